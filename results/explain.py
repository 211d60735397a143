"""python results/explain.py --order curriculum shuffled weighted vanilla --score G --alpha 0.1

The runs of fedavg_curriculum.py, with its flags and presets, and columns in metrics.csv that say why an order helps or not:

visits_1 .. visits_5  a sample's visits in the round, by loss weight, in the easiest .. hardest fifth of its client's samples
entropy, distance     of the labels shown in the first fifth of the local steps: entropy (nats), and total variation distance
                      from the labels of the whole training set; mean over clients
hard_accuracy         accuracy (%) of the received net on the fifth of the test set that an expert finds hardest
lambda_easy, _all, _hard  (--dissimilarity) how far the clients' gradients disagree on the easiest fraction b, all and the
                      hardest fraction b of their samples

--show-schedule trains nothing and draws Fig 9 and what one client sees, step by step, in schedule.png.
"""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common
import experiment
import fedavg_curriculum as script
from experiment import flag


@dataclass
class Config(script.Config):
    """The script's flags and what else to look at."""

    dissimilarity: bool = flag(
        False,
        "log the gradient dissimilarity of the easiest, all and hardest samples in every round",
    )
    show_schedule: bool = flag(
        False, "train nothing; draw g(t) and what a client sees when, by difficulty"
    )


# ------------------------------------------------------------------------------------------------------- the columns


class Observer:
    """What `federate` asks before it trains a round."""

    def __init__(self, run: experiment.Run, fl: common.Federation):
        self.config, self.fl, self.y = (
            fl.config,
            fl,
            fl.data.y_train.cpu().numpy(),
        )  # run.config is without what --tune chose
        expert = run.cached(
            "expert", lambda: fl.train_centrally(run.config.expert_epochs), "expert_epochs"
        )
        self.hardest = hardest_fifth(fl, expert)

    def __call__(self, state, t: int, clients, keys, schedules) -> dict[str, float]:
        """The columns of round t, from each client's keys (n_m,) and schedule: batches and weights (T, B)."""
        fl, seeds, ordered = self.fl, [self.fl.streams.seed("dropout", t, m) for m in clients], []
        for m, k in zip(clients, keys, strict=True):
            own = fl.shards[m]
            ordered.append(own[script.sort("curriculum", k, self.y[own], fl.streams("ties", t, m))])
        columns = exposure(ordered, schedules) | first_labels(self.y, fl.data.classes, schedules)
        theta = fl.received(state, fl.everyone)
        columns["hard_accuracy"] = common.evaluate(fl.model, theta, self.hardest)["accuracy"]
        if self.config.dissimilarity:
            parts = [max(1, int(self.config.pacing_b * len(own) + 1e-9)) for own in ordered]
            easy = [own[:n] for own, n in zip(ordered, parts, strict=True)]
            hard = [own[-n:] for own, n in zip(ordered, parts, strict=True)]
            for name, chosen in (("easy", easy), ("all", ordered), ("hard", hard)):
                columns[f"lambda_{name}"] = dissimilarity(fl, state["weights"], chosen, seeds)
        return columns


def hardest_fifth(fl: common.Federation, expert: torch.Tensor) -> common.Data:
    """The data, of its test set only the fifth on which the expert's loss is largest."""
    d, moments = fl.data, (fl.data.classes, fl.data.mean, fl.data.std)
    tested = common.Data(
        d.x_test, d.y_test, d.x_test, d.y_test, *moments
    )  # its training samples are scored
    [(loss, _)] = common.score(fl.model, expert, tested, [np.arange(len(d.y_test))])
    hard = torch.as_tensor(
        np.argsort(-loss, kind="stable")[: -(-len(loss) // 5)], device=d.y_test.device
    )
    return common.Data(d.x_train, d.y_train, d.x_test[hard], d.y_test[hard], *moments)


def exposure(ordered: list[np.ndarray], schedules) -> dict[str, float]:
    """visits_1 .. visits_5 from the clients' samples in order of difficulty."""
    visits, samples = np.zeros(5), np.zeros(5)
    for own, (batches, weights) in zip(ordered, schedules, strict=True):
        real = batches >= 0
        count = np.bincount(batches[real], weights[real], minlength=own.max() + 1)[own]
        fifth = np.arange(len(own)) * 5 // len(own)
        visits += np.bincount(fifth, count, minlength=5)
        samples += np.bincount(fifth, minlength=5)
    return {f"visits_{i + 1}": visits[i] / max(samples[i], 1) for i in range(5)}


def first_labels(y: np.ndarray, classes: int, schedules) -> dict[str, float]:
    """entropy and distance of the labels in the first fifth of the steps."""
    everything, found = np.bincount(y, minlength=classes) / len(y), []
    for batches, weights in schedules:
        early = slice(-(-len(batches) // 5))
        real = batches[early] >= 0
        share = np.bincount(y[batches[early][real]], weights[early][real], minlength=classes)
        share = share / share.sum()
        found.append(
            (
                -(share * np.log(np.maximum(share, 1e-300))).sum(),
                np.abs(share - everything).sum() / 2,
            )
        )
    return dict(zip(("entropy", "distance"), np.mean(found, axis=0), strict=True))


def dissimilarity(
    fl: common.Federation, theta_g: torch.Tensor, chosen: list[np.ndarray], seeds: list[int]
) -> float:
    """Lambda = sum_m q_m ||grad f_m||^2 / ||sum_m q_m grad f_m||^2 >= 1 over the clients' chosen samples, at theta_g (P,).

    1 means that all clients pull the same way (Section 3.3: easy prefixes are closer in distribution). In float64 whatever
    --dtype is: the easy samples' gradients vanish as theta_g learns them. `seeds` are those of dropout, one per client.
    """
    model, theta_g = common.Model(fl.model.build, fl.model.device, torch.float64), theta_g.double()
    widest = max(map(len, chosen))
    batches = [
        np.pad(index, (0, widest - len(index)), constant_values=-1)[None] for index in chosen
    ]
    step = common.train(
        model, theta_g, fl.data, batches, lr=1.0, chunk=fl.config.chunk, seeds=seeds
    )  # theta - y_m = grad f_m
    gradients = (theta_g - step.weights)[:, : model.trainable]
    q = torch.as_tensor(
        [len(index) for index in chosen], dtype=gradients.dtype, device=gradients.device
    )
    q = q / q.sum()
    return float(q @ gradients.square().sum(1) / (q @ gradients).square().sum())


# ------------------------------------------------------------------------------------------------------- the picture


def show(config: Config, runs, folder: Path, N: int = 500) -> bool:
    """schedule.png: g(t) of the five families (Fig 9), then a client of N samples under each order, a column for each step.

    The client's losses are exponential, so few samples are hard, and rise from class to class; colour is a sample's rank by
    difficulty, paler where its loss weighs less.
    """
    if not config.show_schedule:
        return False
    from matplotlib import pyplot

    orders, everyone = list(dict.fromkeys(run.config.order for run in runs)), np.arange(N)
    T = config.epochs * -(-N // config.batch_size)
    figure, axes = pyplot.subplots(
        1 + len(orders), figsize=(8, 2 + 1.1 * len(orders)), sharex=True, layout="constrained"
    )
    for family in script.PACINGS:
        axes[0].plot(
            script.pacing(family, np.arange(T), T, N, config.pacing_a, config.pacing_b),
            label=family,
        )
    for order, ax in zip(orders, axes[1:], strict=True):
        one = dataclasses.replace(config, order=order)
        losses = -np.log1p(-everyone / N)
        batches, weights = script.schedule(
            one, everyone, losses, everyone * 10 // N, common.Streams(config.seed), 0, 0
        )
        ranks, rows = np.where(batches < 0, np.nan, batches / N), np.argsort(batches, 1)
        ranks, opacity = (
            np.take_along_axis(each, rows, 1).T for each in (ranks, weights / weights.max())
        )
        how = {
            "aspect": "auto",
            "origin": "lower",
            "interpolation": "nearest",
            "vmin": 0,
            "vmax": 1,
        }
        image = ax.imshow(ranks, alpha=opacity, **how)
        ax.set(ylabel=order, yticks=[])
        visits = exposure([everyone], [(batches, weights)])
        print(
            f"{order:<16} visits by fifth, easiest first: {' '.join(f'{v:5.1f}' for v in visits.values())}"
        )
    title = (
        f"a = {config.pacing_a}, b = {config.pacing_b}; below: {config.pacing} pacing, {N} samples"
    )
    axes[0].set(ylabel="g(t)", title=title)
    axes[0].legend(ncols=5, fontsize="x-small")
    axes[-1].set(xlabel="local step t")
    figure.colorbar(image, ax=axes[1:], label="difficulty, 0 = easiest")
    figure.savefig(folder / "schedule.png", dpi=150)
    pyplot.close(figure)
    return True


def federate(config, data, run) -> None:
    script.federate(config, data, run, Observer)


def main(argv=None) -> None:
    """The command line; `argv` stands in for it in tests."""
    fig9 = f"--order {' '.join(script.ORDERS)} --epochs 10 --show-schedule  # g(t), and what a client sees"
    hooks = {"name": script.name, "report": script.report, "instead": show}
    experiment.main(
        Config,
        script.PRESETS | {"fig9": fig9},
        __doc__,
        federate,
        ("order", "fedlc"),
        argv=argv,
        **hooks,
    )


if __name__ == "__main__":
    main()
