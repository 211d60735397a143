"""python -m results.fedavg_curriculum.rivals --alpha 0.05 0.9 --lr 0.01

What does a curriculum gain on other ways to choose samples? These rivals are not the paper's. The
same a and b pace them:

- balanced: easy first in each class. Any prefix holds the easiest fraction of every class (Hacohen
  and Weinshall, 2019).
- threshold: losses <= lambda, which rises from the loss of sample b N to the largest (self-paced
  learning, Kumar et al., 2010).
- hard-threshold: losses >= lambda, which rises from the smallest to the loss where the hardest b N
  begin (the idea of FedBalancer, Shin et al., 2022).

--fedlc tau works with any order: a client's labels calibrate its logits (Zhang et al., 2022).
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

import common
import experiment
import fedavg_curriculum as paper
import training
from experiment import flag
from recording import recordable

RIVALS = ("balanced", "threshold", "hard-threshold")


def has_threshold(config) -> bool:
    return config.order.endswith("threshold")


def has_family(config) -> bool:
    return paper.is_paced(config) and not has_threshold(config)


@dataclass
class Config(paper.Config):
    """The options of fedavg_curriculum.py, with more orders, and FedLC."""

    order: str = flag(
        "curriculum",
        "an order of the paper, or a rival",
        sweep=("curriculum", "vanilla", *RIVALS),
        choices=paper.ORDERS + RIVALS,
    )
    pacing: str = flag("linear", "shape of g", choices=paper.PACINGS, when=has_family)
    fedlc: float = flag(0.0, "tau of FedLC's calibrated logits (0: plain cross-entropy)", low=0)


def name(config: Config) -> str:
    """The order, with the tau of FedLC if it acts."""
    if config.fedlc:
        return f"{config.order} fedlc={config.fedlc:g}"
    return config.order


def federate(config: Config, fl: common.Federation, run: experiment.Run) -> None:
    """The loop of fedavg_curriculum.py, with FedLC's loss."""
    state = fl.start()
    state["own_nets"] = {}
    expert_losses = None
    if paper.asks_expert(config):
        expert_losses = paper.score_by_expert(config, fl, run)
    for t in run.rounds(state):
        clients = fl.select(t, config.clients_per_round)
        difficulties = paper.score_samples(config, fl, state, clients, expert_losses)
        batches = []
        for m, difficulty in zip(clients, difficulties, strict=True):
            batches.append(draw_client_batches(config, fl, t, m, difficulty))
        eta = paper.falling_lr(config, steps=max(map(len, batches)))
        changes = {"lr": eta}
        if config.fedlc:
            changes["loss"] = calibrated_loss
            changes["per_client"] = {"margin": calibration(config, fl, clients)}
        update = fl.train(state, t, clients, batches, **changes)
        p = fl.proportions(clients)
        state["theta"] = fl.aggregate(state, update, p)
        if paper.asks_own_net(config):
            paper.keep_own_nets(state, update)
        run.record(t, state, update)


def draw_client_batches(config, fl: common.Federation, t: int, m: int, difficulty: np.ndarray):
    """Returns the samples of client m at each of its T local steps in round t: (T, B), -1: none."""
    if has_threshold(config):
        return draw_threshold_batches(config, fl, t, m, difficulty)
    if config.order == "balanced":
        y = fl.labels[fl.shards[m]]
        difficulty = balance(difficulty, y, fl.streams("ties", t, m))
    return paper.draw_client_batches(config, fl, t, m, difficulty)


def balance(difficulty: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns ranks (N,), all different, that spread every class y (N,) evenly, easy first."""
    places = rng.permutation(len(y))
    places = places[np.argsort(difficulty[places], kind="stable")]
    share = np.empty(len(y))  # how much of a sample's class is easier than it
    for c in np.unique(y):
        in_class = np.flatnonzero(y[places] == c)
        share[in_class] = (np.arange(len(in_class)) + 0.5) / len(in_class)
    places = places[np.argsort(share, kind="stable")]
    return np.argsort(places)


def draw_threshold_batches(config, fl: common.Federation, t: int, m: int, difficulty):
    """As `draw_client_batches` of the paper, but g counts the samples on one side of lambda."""
    shard = fl.shards[m]
    T = config.epochs * math.ceil(len(shard) / config.batch_size)
    start = 0
    total = T
    if config.pacing_scope == "global":
        start = t * T
        total = config.rounds * T
    if config.order == "hard-threshold":
        difficulty = -difficulty

    def g(step: int) -> int:
        x = 1.0  # how far lambda has come
        if start + step < config.pacing_a * total:
            x = (start + step) / (config.pacing_a * total)
        if config.order == "hard-threshold":  # from all samples to b N of them
            x = 1 - x
        return count_below(difficulty, x, config.pacing_b)

    rng = fl.streams("batches", t, m)
    ties = fl.streams("ties", t, m)
    sampler = paper.CurriculumBatchSampler(difficulty, config.batch_size, T, g, rng, ties)
    batches = np.full((T, config.batch_size), -1)
    for step, drawn in enumerate(sampler):
        batches[step, : len(drawn)] = shard[drawn]
    return batches


def count_below(difficulty: np.ndarray, x: float, b: float) -> int:
    """Counts losses up to lambda, which x in [0, 1] moves from the b N-th smallest to the last."""
    N = len(difficulty)
    values = np.sort(difficulty)
    smallest = values[max(1, int(b * N + 1e-9)) - 1]
    largest = values[-1]
    if x > 1 - 1e-9:
        return N
    limit = smallest + x * (largest - smallest)
    return int((values <= limit).sum())


def calibration(config: Config, fl: common.Federation, clients: np.ndarray) -> torch.Tensor:
    """Returns tau n_c^(-1/4) of each client (K, C). n_c is its number of samples of class c."""
    n = fl.count_labels()[clients].clip(1e-8)  # nowhere 0
    margin = config.fedlc * n**-0.25
    return torch.as_tensor(margin, device=fl.model.device, dtype=fl.model.dtype)


@recordable
def calibrated_loss(out: training.Output) -> torch.Tensor:
    """Returns the cross-entropy of logits minus their margins, (K,).

    FedLC's own denominator leaves out the true class. With it the loss may fall without bound.
    """
    margin = out.extra["margin"][:, None]  # of every sample of a client
    return training.cross_entropy(replace(out, logits=out.logits - margin))


SHORT = f"{paper.CIFAR10} --rounds 40 --epochs 5 --trials 5 --lr 0.01 --lr-power 0"
PRESETS = paper.PRESETS | {
    "rivals": f"{SHORT} --alpha 0.05 0.9  # easy first, against other choices of samples",
}


def main(argv=None) -> None:
    """Runs the command line. Tests pass its words as `argv`."""
    script = experiment.Script(
        config=Config,
        presets=PRESETS,
        doc=__doc__,
        federate=federate,
        compare=("order", "fedlc"),
        name=name,
        plot=paper.plot,
    )
    experiment.main(script, argv)


if __name__ == "__main__":
    main()
