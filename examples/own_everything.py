"""python -m examples.own_everything --method small large --rounds 5

In this experiment everything is your own: data, model, base, selection, partition, schedule and
metric. Each part is independent of the others. Leave out what you do not need.
"""

from dataclasses import dataclass

import numpy as np
import torch

import common
import experiment
from bases import FedAvg
from data import DATASETS, Source
from experiment import flag
from nets import Linear, Net, ReLU

# ----------------------------------------------------------------------------------------- own data


def read_blobs(root) -> list:
    """Three classes of points in the plane. A reader returns what `data.from_arrays` takes."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 900)
    x = rng.standard_normal((900, 2)) + 3 * np.eye(3)[y][:, :2]
    return [x[:600], y[:600], x[600:], y[600:]]


DATASETS["blobs"] = Source(read_blobs)

# ---------------------------------------------------------------------------------------- own model


def make_net(channels, side, classes) -> Net:
    """For a table, `channels` is the number of columns. All clients are trained at once."""
    return Net([Linear(channels, 16), ReLU()], Linear(16, classes))


# ----------------------------------------------------------------------------------------- own base


class Slow(FedAvg):
    """The server goes half of the way to the clients' average."""

    def server(self, w_0, w_hat, p, update, memory):
        return w_0 + 0.5 * (w_hat - w_0)


# ------------------------------------------------------------------- own partition, rule and metric


class Federation(common.Federation):
    def deal(self) -> list[np.ndarray]:
        """Fixed index arrays: client m holds the m-th of M parts, in the order of labels."""
        M = self.config.clients
        order = np.argsort(self.labels, kind="stable")
        return [np.sort(part) for part in np.array_split(order, M)]

    def largest_loss(self, state, t: int, n: int, sign: int) -> np.ndarray:
        """Selects n of 2 n random clients: the smallest or largest loss of the global model."""
        candidates = self.select(t, 2 * n)
        losses = [sign * loss.mean() for loss, _ in self.score(state["theta"], candidates)]
        return np.sort(candidates[np.argsort(losses)[:n]])

    def test(self, state) -> dict[str, float]:
        """Adds the recall of the worst class, another column of metrics.csv."""
        columns = super().test(state)
        [logits] = self.predict(state)
        y = self.data.y_test
        hits = (logits.argmax(1) == y).double()
        recalls = [hits[y == c].mean().item() for c in y.unique()]
        return columns | {"worst_recall": 100 * min(recalls)}


# ------------------------------------------------------------------------------- the method itself

METHODS = ("small", "large")


@dataclass
class Config(experiment.Config):
    """Common options with other defaults, then your own."""

    dataset: str = "blobs"
    model: str = f"{__file__}:make_net"
    clients: int = 20
    clients_per_round: int = 4
    rounds: int = 10
    epochs: int = 2
    partition: str = flag("sorted", "own: `deal`", choices=("sorted",), role="dealing")
    parts: int = flag(0, "not used here", low=0, high=0)
    base: str = flag("fedavg", "not used here: `Slow` is the base", choices=("fedavg",))
    method: str = flag("small", "whose loss decides", sweep=METHODS, choices=METHODS)

    def federation(self, data, streams) -> Federation:
        return Federation(self, data, streams, base=Slow)


def schedule(fl: Federation, t: int, m: int) -> np.ndarray:
    """Returns client m's batches (T, B): sorted by label, in the first half of the rounds."""
    rng = fl.streams("batches", t, m)
    shard = rng.permutation(fl.shards[m])
    if t < fl.config.rounds // 2:
        shard = shard[np.argsort(fl.labels[shard], kind="stable")]
    B = fl.config.batch_size
    padded = np.pad(shard, (0, -len(shard) % B), constant_values=-1)  # -1: no sample
    one_pass = padded.reshape(-1, B)
    return np.tile(one_pass, (fl.config.epochs, 1))


def federate(config: Config, fl: Federation, run: experiment.Run) -> None:
    state = fl.start()
    sign = 1 if config.method == "small" else -1
    for t in run.rounds(state):
        clients = fl.largest_loss(state, t, config.clients_per_round, sign)
        batches = [schedule(fl, t, m) for m in clients]
        update = fl.train(state, t, clients, batches)
        state["theta"] = fl.aggregate(state, update)
        run.record(t, state, update)


def main(argv=None) -> None:
    torch.set_num_threads(1)
    script = experiment.Script(config=Config, doc=__doc__, federate=federate, compare=("method",))
    experiment.main(script, argv)


if __name__ == "__main__":
    main()
