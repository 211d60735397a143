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
        f"an order of the paper, a rival ({', '.join(RIVALS)}), or FILE.py:FUNCTION",
        sweep=("curriculum", "vanilla", *RIVALS),
    )
    pacing: str = flag("linear", "shape of g", choices=paper.PACINGS, when=has_family)
    fedlc: float = flag(0.0, "tau of FedLC's calibrated logits (0: plain cross-entropy)", low=0)

    def orders(self) -> dict:
        rivals = {"balanced": balanced, "threshold": threshold, "hard-threshold": hard_threshold}
        return super().orders() | rivals

    def federation(self, data, streams) -> common.Federation:
        return Calibrated(self, data, streams)


def name(config: Config) -> str:
    """The order, with the tau of FedLC if it acts."""
    order = paper.name(config)
    if config.fedlc:
        return f"{order} fedlc={config.fedlc:g}"
    return order


class Calibrated(common.Federation):
    """Trains with FedLC's loss if --fedlc is not 0."""

    def train(self, state, t, clients, batches, **changes) -> common.Update:
        if self.config.fedlc:
            changes["loss"] = calibrated_loss
            changes["per_client"] = {"margin": calibration(self.config, self, clients)}
        return super().train(state, t, clients, batches, **changes)


def balanced(fl: common.Federation, t: int, m: int, difficulty, g: np.ndarray, rng):
    """Returns batches of the samples that are easy in their class."""
    y = fl.labels[fl.shards[m]]
    ranks = balance(difficulty, y, fl.streams("ties", t, m))
    return paper.easy_first(fl, t, m, ranks, g, rng)


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


def threshold(fl: common.Federation, t: int, m: int, difficulty, g: np.ndarray, rng):
    """Returns batches of the samples with losses up to lambda, instead of the g easiest."""
    b = fl.config.pacing_b
    below = [count_below(difficulty, x, b) for x in way_of_lambda(fl.config, t, len(g))]
    return paper.easy_first(fl, t, m, difficulty, np.array(below), rng)


def hard_threshold(fl: common.Federation, t: int, m: int, difficulty, g: np.ndarray, rng):
    """The same with losses from lambda on: first all samples, at last the hardest b N."""
    b = fl.config.pacing_b
    above = [count_below(-difficulty, 1 - x, b) for x in way_of_lambda(fl.config, t, len(g))]
    return paper.easy_first(fl, t, m, -difficulty, np.array(above), rng)


def way_of_lambda(config, t: int, T: int) -> np.ndarray:
    """Returns which fraction of its way lambda has come at each of the T steps of round t."""
    start = 0
    total = T
    if config.pacing_scope == "global":
        start = t * T
        total = config.rounds * T
    steps = start + np.arange(T)
    before = steps < config.pacing_a * total  # it has arrived at the others
    x = np.ones(T)
    x[before] = steps[before] / (config.pacing_a * total)
    return x


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
        federate=paper.federate,
        compare=("order", "fedlc"),
        name=name,
        plot=paper.plot,
    )
    experiment.main(script, argv)


if __name__ == "__main__":
    main()
