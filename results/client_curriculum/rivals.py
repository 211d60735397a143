"""python -m results.client_curriculum.rivals --client-order curriculum random coverage hics

Which clients should take part, at equal uploads? This study is ours, not the paper's. It compares
other orders of clients with the client curriculum, on the same partition.

power-of-choice  the K largest mean losses among --candidates, selected by size in every round
                 (Cho et al., 2022)
entropy          the most even labels first: an oracle, because no server sees labels
hics             the same, estimated from the output layer's bias after a client's first turn
                 (HiCS-FL, Chen and Vikalo, 2024, without its clusters)
coverage         the least trained first

All except power-of-choice make pools, paced as in the client curriculum. They differ only in the
key by which clients are ranked.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch

import client_curriculum as paper
import common
import experiment
from experiment import flag
from results.fedcl_fgn.rules import check_output_bias

POOLED = ("entropy", "hics", "coverage")
RIVALS = ("power-of-choice", *POOLED)


def is_choice(config) -> bool:
    """Whether clients selected by size compare their losses. If so, it uses --candidates."""
    return config.client_order == "power-of-choice"


def is_estimated(config) -> bool:
    """Whether entropies come from output layers. If so, it uses --temperature."""
    return config.client_order == "hics"


def has_pool(config) -> bool:
    """Whether clients are admitted one after the other: it uses --client-a, --client-b."""
    return paper.paces_clients(config) and not is_choice(config)


def is_paced(config) -> bool:
    """Whether clients or samples are admitted so."""
    return has_pool(config) or paper.paces_samples(config)


def asks_score(config) -> bool:
    """Whether anything is ranked by a loss."""
    return is_choice(config) or paper.asks_score(config)


@dataclass
class Config(paper.Config):
    """The options of client_curriculum.py, with more client orders."""

    client_order: str = flag(
        "curriculum",
        "an order of the paper, or a rival",
        sweep=("curriculum", "anti", "random", *RIVALS),
        choices=paper.ORDERS + RIVALS,
    )
    data_order: str = flag("vanilla", "order of a client's samples, or FILE.py:FUNCTION")
    score: str = flag(
        "G", "loss of the global model (G) or an expert (E), or FILE.py:FUNCTION", when=asks_score
    )
    pacing: str = flag("linear", "shape of both pacings", choices=paper.PACINGS, when=is_paced)
    client_a: float = flag(
        0.8, "fraction of the updates until the pool is full", low=0, high=1e6, when=has_pool
    )
    client_b: float = flag(0.2, "fraction of the clients at first", low=0, high=1, when=has_pool)
    candidates: int = flag(
        8, "d, the clients that compare losses (at least K)", low=1, high=10**6, when=is_choice
    )
    temperature: float = flag(
        0.5,
        "T, for each unit of a client's distance under a unit gradient",
        above=0,
        when=is_estimated,
    )

    def reads_rounds(self) -> bool:
        return has_pool(self)

    def federation(self, data, streams) -> common.Federation:
        fl = super().federation(data, streams)
        if is_estimated(self):
            check_output_bias(fl, "--client-order hics")
        return fl


def federate(config: Config, fl: common.Federation, run: experiment.Run) -> None:
    """The loop of client_curriculum.py, with other keys by which clients are ranked."""
    order, own_score, own_client_score = paper.find_functions(config)
    expert_losses = paper.score_by_expert(config, fl, run)
    before = paper.measure_difficulty(fl.shards, expert_losses)
    fl.shards = paper.deal_by_difficulty(config, fl, expert_losses)
    means, stds = paper.measure_difficulty(fl.shards, expert_losses)
    K = config.clients_per_round
    state = fl.start() | {"pool_size": config.clients, "queue": []}
    state["difficulty"] = torch.tensor(np.array([before, (means, stds)]))  # for clients.png
    state["turns"] = [0] * config.clients
    state["entropies"] = [math.inf] * config.clients  # of labels, estimated after the first turn
    for t in run.rounds(state):
        is_short = len(state["queue"]) < K
        if is_choice(config):
            clients = choose_by_loss(config, fl, state, t, expert_losses, own_score)
        else:
            if is_short:
                key = rank_clients(config, fl, state)
                if key is None:  # an order of the paper
                    key = paper.score_clients(
                        config, fl, state, expert_losses, own_score, own_client_score
                    )
                state["pool_size"] = paper.pool_size(config, u=t * K)
                pool = paper.draw_pool(config, fl, t, key, state["pool_size"])
                state["queue"] = paper.fill_queue(state["queue"], pool)
            clients = np.sort(state["queue"][:K])
            state["queue"] = state["queue"][K:]

        losses = paper.score_samples(
            config, config.data_order, fl, state, clients, expert_losses, own_score
        )
        batches = []
        for m, difficulty in zip(clients, losses, strict=True):
            batches.append(paper.draw_client_batches(config, fl, t, m, difficulty, order))
        eta = paper.falling_lr(config, steps=max(map(len, batches)))
        update = fl.train(state, t, clients, batches, lr=eta)
        count_turns(config, fl, state, update)
        p = fl.proportions(clients)
        state["theta"] = fl.aggregate(state, update, p)

        columns = {"pool": state["pool_size"], "expert_loss": means[clients].mean()}
        columns |= {"inside": stds.mean(), "between": means.std()}
        scorers, numbers = count_scoring(config, fl, t, is_short)
        columns["scorers"] = scorers
        columns |= fl.cost(update, sent=numbers, scorers=scorers)
        run.record(t, state, update, **columns)


def choose_by_loss(
    config, fl: common.Federation, state: dict, t: int, expert_losses, own_score
) -> np.ndarray:
    """Power-of-choice: returns the K clients of largest loss among d that are selected by size."""
    drawn = fl.streams("candidates", t).choice(
        config.clients, count_candidates(config), replace=False, p=fl.sizes / fl.sizes.sum()
    )
    losses = paper.score_samples(config, "anti", fl, state, drawn, expert_losses, own_score)
    gains = np.array([-of_client.mean() for of_client in losses])
    worst_first = paper.sort_clients(gains, fl.streams("client ties", t))
    return np.sort(drawn[worst_first[: config.clients_per_round]])


def count_candidates(config) -> int:
    """Returns d."""
    return min(max(config.candidates, config.clients_per_round), config.clients)


def rank_clients(config, fl: common.Federation, state: dict) -> np.ndarray | None:
    """Returns a rival's key of each client (M,), or None. The smallest comes first."""
    match config.client_order:
        case "entropy":
            return -label_entropies(fl)
        case "hics":
            return -np.array(state["entropies"])  # who has had no turn comes first
        case "coverage":
            waits = np.isin(fl.everyone, state["queue"])  # then its turn comes before the pool's
            return np.array(state["turns"]) + waits
    return None


def label_entropies(fl: common.Federation) -> np.ndarray:
    """Returns the entropy of each client's labels (M,), in nats."""
    shares = torch.from_numpy(fl.count_labels() / fl.sizes[:, None])
    return torch.special.entr(shares).sum(1).numpy()


def count_turns(config, fl: common.Federation, state: dict, update: common.Update) -> None:
    """Notes who was trained, and for hics what a first turn tells: later turns tell less."""
    entropies = [math.nan] * len(update.clients)
    if is_estimated(config):
        b_0 = output_bias(fl, fl.received(state, update.clients))
        b = output_bias(fl, update.gather_thetas())
        entropies = estimate_entropies(b - b_0, update.length, config.temperature)
    for m, entropy in zip(update.clients.tolist(), entropies, strict=True):
        if is_estimated(config) and state["turns"][m] == 0:
            state["entropies"][m] = float(entropy)
        state["turns"][m] += 1


def output_bias(fl: common.Federation, thetas: torch.Tensor) -> torch.Tensor:
    """Returns the last C trainable weights of each model, (C,) or (K, C)."""
    last = fl.model.trainable
    return thetas[..., last - fl.data.classes : last].double().cpu()


def estimate_entropies(delta_b: torch.Tensor, length, temperature: float) -> torch.Tensor:
    """Returns H(softmax(Delta b / T)) (K,) from Delta b (K, C).

    Frequent labels pull their biases up. T is `temperature` times the length of the client's way
    under a unit gradient. So the learning rate and the number of steps have no influence.
    """
    T = temperature * torch.as_tensor(length)[:, None]
    p = torch.softmax(delta_b / T, 1)
    return torch.special.entr(p).sum(1)


def count_scoring(config, fl: common.Federation, t: int, is_short: bool) -> tuple[int, int]:
    """As in client_curriculum.py. The labels' entropies are sent once."""
    scorers, numbers = paper.count_scoring(config, fl, t, is_short)
    if config.client_order == "entropy" and t == 0:
        numbers = config.clients
    if is_choice(config) and config.score == "E" and t == 0:
        scorers = config.clients
        numbers = config.clients
    if is_choice(config) and config.score == "G":
        numbers = count_candidates(config)
        if fl.base.vectors > 0:
            scorers = numbers
    return scorers, numbers


def draw(settings: dict, folder) -> None:
    """Plots clients.png: each client's difficulty, mean +- std, before and after Algorithm 2.

    It shows the first trial of the first setting.
    """
    from matplotlib import pyplot

    [run, *_] = itertools.chain(*settings.values())
    tables = run.load()["state"]["difficulty"].cpu().numpy()
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.6), sharey=True, layout="constrained")
    for axis, when, (means, stds) in zip(axes, ("before", "after"), tables, strict=True):
        down = np.minimum(stds, means)  # a loss is never negative
        axis.errorbar(np.arange(len(means)), means, [down, stds], fmt="o")
        consistency = f"std {stds.mean():.2f} inside, {means.std():.2f} between"
        axis.set_title(f"{when} Algorithm 2\n{consistency}")
        axis.set_xlabel("client")
    axes[0].set_ylabel("expert's loss (nats), mean +- std")
    figure.suptitle(f"{run.config.dataset}, first trial")
    figure.savefig(folder / "clients.png", dpi=150)
    pyplot.close(figure)


PRESETS = {
    "rivals": f"{paper.CLIENTS} --client-order curriculum anti random {' '.join(RIVALS)}",
}


def main(argv=None) -> None:
    script = experiment.Script(
        config=Config,
        presets=PRESETS,
        doc=__doc__,
        federate=federate,
        compare=("client_order", "data_order"),
        name=paper.name,
        plot=paper.plot,
        draw=draw,
    )
    experiment.main(script, argv)


if __name__ == "__main__":
    main()
