"""Oracles of client_curriculum.py and its rivals: whole runs written out literally, Algorithm 2,
the pool and its budget, the rivals' keys.
"""

import csv
import inspect
import itertools
import math
import shlex
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import client_curriculum as script
import common
import experiment
from client_curriculum import ORDERS, Config
from data import UsageError, load_data, partition
from nets import build_model
from results.client_curriculum import rivals
from results.client_curriculum.rivals import RIVALS

SIZES = (8, 20, 11, 14, 17, 9)  # of the six clients of the literal runs


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """79 digits of five classes at 16x16, of six clients of 8 to 20 samples; 60 to test on."""
    from sklearn.datasets import load_digits

    x, y = load_digits(n_class=5, return_X_y=True)
    x = np.kron(x.reshape(-1, 8, 8), np.ones((2, 2)))[..., None] * (255 / 16)
    x = x.astype(np.uint8)
    y = y.astype(np.int64)
    n = sum(SIZES)
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    train = {"x_train": x[:n], "y_train": y[:n], "owner": np.repeat(np.arange(6), SIZES)}
    np.savez(path, **train, x_test=x[n : n + 60], y_test=y[n : n + 60])
    return path


def script_of(order: str):
    """The program that has this client order."""
    return rivals if order in RIVALS else script


def small(file, **flags) -> Config:
    """Seconds, not minutes: 9 clients of about 9 samples, 2 a round, one local epoch."""
    defaults = {
        "dataset": str(file),
        "client_order": "curriculum",
        "data_order": "vanilla",
        "clients": 9,
        "clients_per_round": 2,
        "rounds": 4,
        "epochs": 1,
        "batch_size": 4,
        "expert_epochs": 1,
        "trials": 1,
        "alpha": 1.0,
        "min_size": 2,
        "device": "cpu",
    }
    flags = defaults | flags
    return script_of(flags["client_order"]).Config(**flags)


def make_run(config, folder) -> experiment.Run:
    federate = script_of(config.client_order).federate
    orders = ("client_order", "data_order")
    program = experiment.Script(federate, orders, name=script.name, folder=folder)
    return program.run(config, 0)


def trained(config, folder) -> tuple[list[dict], dict]:
    """Rows (without seconds and method) and final state of one arm."""
    run = make_run(config, folder)
    experiment.train(run, lambda *_: None)
    saved = run.load()
    rows = []
    for row in saved["rows"]:
        rows.append({key: row[key] for key in row if key not in ("seconds", "method")})
    return rows, saved["state"]


# ---------------------------------------------------------------------------- whole runs, literally


class Literal:
    """Sections 4.1 to 4.5 in float64, client by client and step by step.

    Shares the random streams and the initial weights.
    """

    def __init__(self, file, flags: dict):
        self.c = SimpleNamespace(**flags)
        self.streams = common.Streams(flags["seed"], 0)
        with np.load(file) as saved:
            arrays = dict(saved)
        mean = arrays["x_train"].mean()
        std = arrays["x_train"].std()
        self.x, self.x_test = [
            torch.from_numpy((arrays[name] - mean) / std).permute(0, 3, 1, 2)
            for name in ("x_train", "x_test")
        ]
        self.y = torch.from_numpy(arrays["y_train"])
        self.y_test = torch.from_numpy(arrays["y_test"])
        self.labels = arrays["y_train"].tolist()
        self.model = build_model("lenet5", load_data(str(file)), dtype=torch.float64)
        theta_0 = self.model.init(self.streams.seed("central init"))
        self.expert, _ = self.sgd(theta_0, self.central(), itertools.repeat(self.c.lr))
        self.loss = self.losses(self.expert, range(len(self.y)))
        self.before = [[] for _ in range(6)]
        for i, m in enumerate(arrays["owner"]):
            self.before[m].append(i)
        self.shards = self.deal()

    def logits(self, theta, x):
        """LeNet-5 on 1x16x16: conv 6, pool, conv 16, pool, 120, 84, 5."""
        shapes = [(6, 1, 5, 5), (6,), (16, 6, 5, 5), (16,)]
        shapes += [(120, 16), (120,), (84, 120), (84,), (5, 84), (5,)]
        parts = theta.split([math.prod(shape) for shape in shapes])
        tensors = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        w1, b1, w2, b2, w3, b3, w4, b4, w5, b5 = tensors
        x = F.max_pool2d(F.relu(F.conv2d(x, w1, b1)), 2)
        x = F.max_pool2d(F.relu(F.conv2d(x, w2, b2)), 2).flatten(1)
        return F.relu(F.relu(x @ w3.T + b3) @ w4.T + b4) @ w5.T + b5

    def cross_entropies(self, theta, x, y):
        logits = self.logits(theta, x)
        return logits.logsumexp(1) - logits[torch.arange(len(y)), y]

    def losses(self, theta, index) -> np.ndarray:
        index = torch.tensor(list(index))
        return self.cross_entropies(theta, self.x[index], self.y[index]).numpy()

    def sgd(self, start, batches, rates, mu=0.0) -> tuple:
        """theta after one step for each batch, and the batches' losses."""
        theta = start.clone()
        velocity = torch.zeros_like(start)
        trace = []
        for batch, eta in zip(batches, rates, strict=False):
            w = theta.clone().requires_grad_()
            index = torch.tensor(batch)
            loss = sum(self.cross_entropies(w, self.x[index], self.y[index])) / len(batch)
            (g,) = torch.autograd.grad(loss, w)
            g = g + mu * (theta - start) + self.c.weight_decay * theta
            velocity = self.c.momentum * velocity + g
            theta = theta - eta * velocity
            trace.append(float(loss.detach()))
        return theta, trace

    def central(self):
        rng = self.streams("central batches")
        for _ in range(self.c.expert_epochs):
            shuffled = rng.permutation(len(self.y)).tolist()
            for i in range(0, len(shuffled), self.c.batch_size):
                yield shuffled[i : i + self.c.batch_size]

    def deal(self) -> list[list[int]]:
        """Algorithm 2."""
        blocks = [[] for _ in range(6)]
        rng = self.streams("difficulty")
        label = self.labels if self.c.stratify else [0] * len(self.labels)
        for c in sorted(set(label)):
            pi_c = [i for i in range(len(label)) if label[i] == c]
            pi_c.sort(key=lambda i: self.loss[i])
            counts = []
            for shard in self.before:
                counts.append(sum(label[i] == c for i in shard))
            offset = 0
            left = set(pi_c)
            for m, n in enumerate(counts):
                mine = pi_c[offset : offset + math.floor(round(self.c.f_ord * n, 6))]
                blocks[m] = blocks[m] + mine
                left -= set(mine)
                offset += n
                counts[m] -= len(mine)
            dealt = iter(rng.permutation(sorted(left)).tolist())
            for m, n in enumerate(counts):
                blocks[m] += itertools.islice(dealt, n)
        return [sorted(block) for block in blocks]

    def consistency(self) -> tuple[float, float]:
        """Mean std of the expert's loss inside clients, std of their means."""
        inside = []
        means = []
        for shard in self.shards:
            mean = sum(self.loss[i] for i in shard) / len(shard)
            square = sum((self.loss[i] - mean) ** 2 for i in shard) / len(shard)
            inside.append(math.sqrt(square))
            means.append(mean)
        centre = sum(means) / 6
        between = math.sqrt(sum((mean - centre) ** 2 for mean in means) / 6)
        return sum(inside) / 6, between

    def g(self, t, T, N, a, b) -> int:
        x = min(t / (a * T), 1)
        exponential = (math.exp(10 * x) - 1) / (math.exp(10) - 1)
        shares = {"linear": x, "quadratic": x * x, "root": math.sqrt(x)}
        shares |= {"step": float(x == 1), "exponential": exponential}
        return max(1, math.floor(round(N * b + N * (1 - b) * shares[self.c.pacing], 6)))

    def ordered(self, items, keys, rng) -> list[int]:
        """By key, ties in a random order; without keys in that order."""
        drawn = rng.permutation(len(items)).tolist()
        if keys is not None:
            drawn.sort(key=lambda i: keys[i])
        return [items[i] for i in drawn]

    def batches(self, m, t, theta, order) -> list[list[int]]:
        shard = self.shards[m]
        N = len(shard)
        B = min(self.c.batch_size, N)
        T = self.c.epochs * math.ceil(N / self.c.batch_size)
        keys = None
        if order in ("curriculum", "anti"):
            keys = self.loss[shard] if self.c.score == "E" else self.losses(theta, shard)
            if order == "anti":
                keys = -keys
        ordered = self.ordered(shard, keys, self.streams("ties", t, m))
        rng = self.streams("batches", t, m)
        queue = []
        batches = []
        for step in range(T):
            size = N
            if order != "vanilla":
                size = self.g(step, T, N, self.c.pacing_a, self.c.pacing_b)
            batches.append([])
            while len(batches[-1]) < B:
                queue = queue or rng.permutation(sorted(ordered[:size])).tolist()
                batches[-1].append(queue.pop(0))
        return batches

    def key(self, order, m, theta) -> float:
        """What ranks client m, smallest first."""
        shard = self.shards[m]
        if order == "entropy":
            labels = [self.labels[i] for i in shard]
            shares = [labels.count(c) / len(shard) for c in set(labels)]
            return sum(p * math.log(p) for p in shares)
        if order == "hics":
            return -self.estimate[m]
        if order == "coverage":
            return self.count[m] + (m in self.queue)
        losses = self.loss[shard] if self.c.score == "E" else self.losses(theta, shard)
        return losses.mean() if order == "curriculum" else -losses.mean()

    def select(self, t, order, theta) -> list[int]:
        M = 6
        K = self.c.clients_per_round
        if order == "vanilla" and self.c.client_sampling == "uniform":
            return sorted(self.streams("select", t).permutation(M)[:K].tolist())
        ties = self.streams("client ties", t)
        if order == "power-of-choice":
            p = np.array([len(shard) for shard in self.shards]) / len(self.labels)
            rng = self.streams("candidates", t)
            drawn = rng.choice(M, self.c.candidates, replace=False, p=p).tolist()
            self.scored(len(drawn))
            keys = [self.key(order, m, theta) for m in drawn]
            return sorted(self.ordered(drawn, keys, ties)[:K])
        if len(self.queue) < K:
            if order in ("curriculum", "anti"):
                self.scored(M)
            keys = None
            if order not in ("random", "vanilla"):
                keys = [self.key(order, m, theta) for m in range(M)]
            first = self.ordered(range(M), keys, ties)
            U = self.c.rounds * K
            self.pool = M
            if order != "vanilla":
                self.pool = max(K, self.g(self.u, U, M, self.c.client_a, self.c.client_b))
            again = self.streams("pool", t).permutation(sorted(first[: self.pool])).tolist()
            waiting = [m for m in again if m in self.queue]
            self.queue += [m for m in again if m not in waiting] + waiting
        chosen = self.queue[:K]
        self.queue = self.queue[K:]
        return sorted(chosen)

    def scored(self, n):
        """n clients score theta and send a number back."""
        if self.c.score == "G":
            self.downloads += n
            self.scalars += n

    def estimate_entropy(self, delta_b, rates) -> float:
        """Of the labels, from the way of the output's bias: HiCS."""
        travelled = 0
        velocity = 0
        for eta in rates:  # a gradient of 1 throughout
            velocity = self.c.momentum * velocity + 1 - self.c.mu * travelled
            travelled += eta * velocity
        weights = [math.exp(d / (self.c.temperature * travelled)) for d in delta_b]
        return -sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights)

    def run(self, client_order, data_order) -> tuple[list[dict], torch.Tensor]:
        """The rows of metrics.csv and the last weights of one arm."""
        theta = self.model.init(self.streams.seed("init"))
        ranks = client_order in ("curriculum", "anti", "power-of-choice")
        self.queue = []
        self.u = 0
        self.samples = 0
        self.pool = 6
        self.count = [0] * 6
        self.estimate = [math.inf] * 6
        self.downloads = 0
        self.scalars = 0
        if self.c.score == "E":
            self.downloads = 6 * (ranks or data_order in ("curriculum", "anti"))
            self.scalars = 6 * ranks
        if client_order == "entropy":
            self.scalars = 6
        rows = []
        for t in range(self.c.rounds):
            before = self.downloads if t else 0
            clients = self.select(t, client_order, theta)
            theta, losses = self.train(t, clients, theta, data_order)
            counts = {"round": t + 1, "scorers": self.downloads - before}
            rows.append(counts | self.row(clients, theta, losses))
        return rows, theta

    def train(self, t, clients, theta, order) -> tuple:
        """The next theta, and each client's mean training loss."""
        nets = []
        losses = []
        for m in clients:
            batches = self.batches(m, t, theta, order)
            steps = range(len(batches))
            rates = [self.c.lr * (1 + self.c.lr_alpha * i) ** -self.c.lr_power for i in steps]
            net, trace = self.sgd(theta, batches, rates, self.c.mu)
            nets.append(net)
            losses.append(sum(trace) / len(trace))
            self.samples += sum(map(len, batches))
            if not self.count[m]:
                self.estimate[m] = self.estimate_entropy((net - theta)[-5:].tolist(), rates)
            self.count[m] += 1
        self.u += len(clients)
        sizes = [len(self.shards[m]) for m in clients]
        theta = sum(n / sum(sizes) * net for n, net in zip(sizes, nets, strict=True))
        return theta, losses

    def row(self, clients, theta, losses) -> dict:
        """What metrics.csv has of a round."""
        P = self.model.size
        hits = self.logits(theta, self.x_test).argmax(1) == self.y_test
        means = [self.loss[self.shards[m]].mean() for m in clients]
        inside, between = self.consistency()
        return {
            "trial": 0,
            "clients": len(clients),
            "uploads": self.u,
            "samples": self.samples,
            "received_mb": (self.u + self.downloads) * P * 8 / 1e6,
            "sent_mb": (self.u * P + self.scalars) * 8 / 1e6,
            "pool": self.pool,
            "expert_loss": np.mean(means),
            "inside": inside,
            "between": between,
            "train_loss": np.mean(losses),
            "accuracy": 100 * float(hits.double().mean()),
            "loss": float(self.cross_entropies(theta, self.x_test, self.y_test).mean()),
        }


LITERAL = {
    "seed": 5,
    "rounds": 4,
    "clients_per_round": 2,
    "epochs": 2,
    "batch_size": 4,
    "lr": 0.1,
    "momentum": 0.6,
    "weight_decay": 0.02,
    "mu": 0.7,
    "lr_alpha": 0.3,
    "lr_power": 0.9,
    "expert_epochs": 3,
    "client_a": 0.6,
    "client_b": 0.4,
    "pacing_a": 0.9,
    "pacing_b": 0.15,
    "stratify": True,
    "client_sampling": "pool",
    "pacing": "linear",
    "candidates": 3,
    "temperature": 0.3,
}
EVERY = (*ORDERS, *RIVALS)
SETTINGS = {
    "G": {"score": "G", "f_ord": 0.6, "pacing": "root"},
    "E": {
        "score": "E",
        "f_ord": 0.4,
        "pacing": "exponential",
        "stratify": False,
        "client_sampling": "uniform",
    },
    "quadratic": {
        "score": "G",
        "f_ord": 1.0,
        "pacing": "quadratic",
        "mu": 0.0,
        "client_sampling": "uniform",
    },
    "step": {"score": "G", "f_ord": 0.0, "pacing": "step", "momentum": 0.0, "candidates": 5},
    "linear": {
        "score": "E",
        "f_ord": 0.9,
        "clients_per_round": 3,
        "client_a": 0.2,
        "weight_decay": 0.0,
        "batch_size": 12,
    },
}
ARMS = {
    "G": itertools.product(EVERY, ("curriculum", "vanilla")),
    "E": itertools.product(EVERY, ("anti", "random")),
    "quadratic": [("curriculum", "anti"), ("anti", "curriculum"), ("vanilla", "curriculum")],
    "step": [("curriculum", "random"), ("vanilla", "anti"), ("power-of-choice", "random")],
    "linear": [
        ("coverage", "vanilla"),
        ("hics", "vanilla"),
        ("random", "curriculum"),
        ("anti", "vanilla"),
    ],
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_whole_runs_against_the_transcript(file, setting, tmp_path):
    """Every arm's weights to 1e-9, every column of its rows."""
    flags = LITERAL | SETTINGS[setting]
    literal = Literal(file, flags)
    federation = {"partition": "natural", "clients": 6, "base": "fedprox", "dtype": "float64"}
    for client, data in ARMS[setting]:
        orders = {"client_order": client, "data_order": data}
        known = script_of(client).Config.__dataclass_fields__
        mine = {name: value for name, value in flags.items() if name in known}
        folder = tmp_path / script_of(client).__name__
        rows, state = trained(small(file, **mine, **federation, **orders), folder)
        wanted, theta = literal.run(client, data)
        others = {"setting", "clock", "waiting"}  # whose tests are elsewhere
        assert set(rows[0]) - set(wanted[0]) == others, orders
        for row, by_hand in zip(rows, wanted, strict=True):
            got = {name: row[name] for name in by_hand}
            assert got == pytest.approx(by_hand, rel=1e-9), orders
        assert (state["theta"] - theta).abs().max() < 1e-9, orders


# ------------------------------------------------------------------------------------- Algorithm 2


def dealt_by_hand(shards, labels, loss, f):
    """Algorithm 2 in Python lists: the blocks of every client, and what is left of every class."""
    blocks = [[] for _ in shards]
    rest = {}
    for c in sorted(set(labels)):
        members = [i for shard in shards for i in shard if labels[i] == c]
        members.sort(key=lambda i: (loss[i], i))
        taken = set()
        start = 0
        for i, shard in enumerate(shards):
            n = sum(labels[j] == c for j in shard)
            mine = members[start : start + round(f * n * 1000) // 1000]
            blocks[i] += mine
            taken |= set(mine)
            start += n
        rest[c] = [i for i in members if i not in taken]
    return blocks, rest


@pytest.fixture(scope="module")
def base():
    """(shards, labels, loss) of 20 Dirichlet clients with tied losses among them."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, 900)
    shards = partition("dirichlet", labels, 20, 0.2, rng)
    return shards, labels, np.round(rng.exponential(size=900), 2)


def deal(shards, labels, loss, f, seed=0):
    return script.reconstitute(shards, labels, loss, f, np.random.default_rng(seed))


def count(shard, labels, classes=5):
    return np.bincount(labels[shard], minlength=classes)


@pytest.mark.parametrize("f", [0.0, 0.1, 0.29, 0.5, 0.9, 1.0])
def test_algorithm_2_against_python_lists(base, f):
    shards, labels, loss = base
    new = deal(shards, labels, loss, f)
    assert np.array_equal(np.sort(np.concatenate(new)), np.arange(900))  # each sample dealt once
    for before, after in zip(shards, new, strict=True):  # N_ic conserved
        assert np.array_equal(count(before, labels), count(after, labels))
    blocks, rest = dealt_by_hand(shards, labels, loss, f)
    for block, after in zip(blocks, new, strict=True):
        assert set(block) <= set(after)
        assert all(i in rest[labels[i]] for i in set(after) - set(block))


def test_offsets_are_exclusive():
    """Two clients by hand: with the printed inclusive cumsum client 0 gets the second block."""
    labels = np.array([0, 0, 0, 0, 0, 1, 1, 1])
    loss = np.array([5.0, 1, 4, 2, 3, 9, 7, 8])
    shards = [np.array([0, 1, 5, 6]), np.array([2, 3, 4, 7])]
    easy, hard = deal(shards, labels, loss, 1.0)
    assert easy.tolist() == [1, 3, 6, 7]
    assert hard.tolist() == [0, 2, 4, 5]


def test_f_1_is_contiguous_and_ordered_in_each_class_and_needs_no_draw(base):
    shards, labels, loss = base
    new = deal(shards, labels, loss, 1.0, seed=1)
    again = deal(shards, labels, loss, 1.0, seed=2)
    assert all(np.array_equal(a, b) for a, b in zip(new, again, strict=True))
    for c in range(5):
        by_client = np.concatenate([np.sort(loss[shard[labels[shard] == c]]) for shard in new])
        assert np.array_equal(by_client, np.sort(loss[labels == c]))


def test_f_0_ignores_the_loss(base):
    shards, labels, loss = base
    one = deal(shards, labels, loss, 0.0, seed=1)
    other = deal(shards, labels, loss, 0.0, seed=2)
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    first = np.concatenate([loss[shard] for shard in one[:10]])  # the half that f = 1 makes easy
    assert abs(first.mean() - loss.mean()) < 4 * loss.std() / np.sqrt(len(first))


def test_the_block_of_29_percent_of_100_is_29():
    labels = np.zeros(200, dtype=int)
    loss = np.arange(200.0)
    first, second = deal([np.arange(100), np.arange(100, 200)], labels, loss, 0.29)
    assert first[:29].tolist() == list(range(29))
    ordered = set(range(100, 129))
    assert ordered <= set(second)
    assert not ordered & set(first)


def test_a_block_rounds_down_so_that_one_sample_is_dealt_at_random():
    """floor(.9 x 1) = 0 of each client's only sample is in the ordered block."""
    shards = [np.array([i]) for i in range(40)]
    labels = np.zeros(40, dtype=int)
    loss = np.arange(40.0)
    one, other = [np.concatenate(deal(shards, labels, loss, 0.9, seed)) for seed in (1, 2)]
    assert not np.array_equal(one, other)
    assert not np.array_equal(one, np.arange(40))


def test_data_left_out_by_parts_stays_out(base):
    shards, labels, loss = base
    new = deal(shards[3:9], labels, loss, 0.5)
    assert np.array_equal(np.sort(np.concatenate(new)), np.sort(np.concatenate(shards[3:9])))


def consistency(shards, loss) -> tuple[float, float]:
    means, stds = script.measure_difficulty(shards, loss)
    return stds.mean(), means.std()


def test_consistency_falls_with_f_and_stratification_keeps_it_up():
    """10 clients of 1,000 samples; without classes a block of 100 has std sqrt((100^2 - 1) / 12).

    And blocks of 100 consecutive numbers have means at distance 100.
    """
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 1000)
    loss = rng.permutation(1000) + 250.0 + 1000 * labels  # the classes differ in difficulty
    shards = partition("iid", labels, 10, 1.0, rng)
    inside = []
    between = []
    for f in (0, 0.5, 1):
        at_f = consistency(deal(shards, labels, loss, f), loss)
        inside.append(at_f[0])
        between.append(at_f[1])
    assert inside[0] > inside[1] > inside[2]
    assert between[0] < between[1] < between[2]
    ranks = np.argsort(np.argsort(loss)) * 1.0
    together = deal(shards, np.zeros_like(labels), ranks, 1.0)
    wanted = (np.sqrt((100**2 - 1) / 12), 100 * np.sqrt((10**2 - 1) / 12))
    assert consistency(together, ranks) == pytest.approx(wanted, rel=1e-12)


def test_consistency_is_of_the_raw_loss():
    loss = np.array([1.0, 3.0, 10.0, 10.0, 10.0])
    means, stds = script.measure_difficulty([np.array([0, 1]), np.array([2, 3, 4])], loss)
    assert means.tolist() == [2.0, 10.0]
    assert stds.tolist() == [1.0, 0.0]


def test_class_counts_on_mnist(real_data):
    labels = load_data("mnist", str(real_data)).y_train.numpy()
    rng = np.random.default_rng(0)
    shards = partition("dirichlet", labels, 100, 0.05, rng)
    loss = rng.exponential(size=len(labels))
    for f in (0.0, 0.33, 1.0):
        new = deal(shards, labels, loss, f)
        assert np.array_equal(np.sort(np.concatenate(new)), np.arange(60000))
        for before, after in zip(shards, new, strict=True):
            assert np.array_equal(count(before, labels, 10), count(after, labels, 10))


# ------------------------------------------------------------------------------ pacing and sorting


@pytest.mark.parametrize("name", ["pacing", "CurriculumBatchSampler", "falling_lr"])
def test_what_is_repeated_is_that_of_fedavg_curriculum(name):
    """So that its tests hold here too."""
    import fedavg_curriculum

    here, there = [inspect.getsource(getattr(m, name)) for m in (script, fedavg_curriculum)]
    assert here == there


TABLE = {  # at steps 0, 100, 200, 300, 399, 400 of 500, with 500 samples, a = .8, b = .2
    "linear": (100, 200, 300, 400, 499, 500),
    "quadratic": (100, 125, 200, 325, 498, 500),
    "root": (100, 300, 382, 446, 499, 500),
    "step": (100, 100, 100, 100, 100, 500),
    "exponential": (100, 100, 102, 132, 490, 500),
}


@pytest.mark.parametrize("family", TABLE)
def test_pacing(family):
    for step, wanted in zip((0, 100, 200, 300, 399, 400), TABLE[family], strict=True):
        assert script.pacing(family, step, 500, 500, 0.8, 0.2) == wanted
    for a, T in ((0.55, 100), (0.28, 25), (0.07, 100)):  # in doubles .55 x 100 is above 55
        assert script.pacing(family, round(a * T), T, 50, a, 0.2) == 50  # not a step late


def test_clients_are_sorted_upwards_and_ties_do_not_follow_the_index():
    key = np.random.default_rng(0).random(50)
    assert np.array_equal(script.sort_clients(key, np.random.default_rng(1)), np.argsort(key))
    one, other = [script.sort_clients(np.zeros(50), np.random.default_rng(i)) for i in (1, 2)]
    assert not np.array_equal(one, other)
    assert not np.array_equal(one, np.arange(50))
    key = np.arange(300) % 3 * 1.0
    shuffled = np.random.default_rng(1).permutation(300)
    wanted = [i for value in range(3) for i in shuffled if key[i] == value]
    assert script.sort_clients(key, np.random.default_rng(1)).tolist() == wanted


def test_every_data_order_takes_the_same_steps_and_samples_from_its_prefix():
    shard = np.arange(47) + 100
    fl = SimpleNamespace(streams=common.Streams(0), shards=[shard, shard])
    loss = np.random.default_rng(0).random(47)
    zeros = np.zeros(47)

    def draw(order, t=0, m=0, key=zeros, **flags):
        config = Config(data_order=order, epochs=3, batch_size=10, **flags)
        return script.draw_client_batches(config, fl, t, m, key)

    ranked = {"curriculum": shard[np.argsort(loss)], "anti": shard[np.argsort(-loss)]}
    for order in ORDERS:
        batches = draw(order, key=loss if order in ranked else zeros)
        assert batches.shape == (15, 10)
        assert (batches >= 0).all()
        if order in ranked:
            for step, batch in enumerate(batches):
                g = max(1, math.floor(47 * 0.2 + 47 * 0.8 * min(step / 12, 1) + 1e-9))
                assert set(batch) <= set(ranked[order][:g])
    whole = draw("vanilla")
    for i in (0, 47, 94):  # a pass shows each once
        assert np.array_equal(np.sort(whole.ravel()[i : i + 47]), shard)
    first = [frozenset(draw("random", *key)[0]) for key in ((0, 0), (1, 0), (0, 1))]
    assert len(set(first)) == 3  # a permutation of its own for each client in each round
    for order in ORDERS:
        assert np.array_equal(draw(order, key=loss, pacing_b=1.0), whole)


# --------------------------------------------------------------------------------- pool and budget


def played(config, key, monkeypatch, sizes=None) -> list[tuple]:
    """(clients, row, queue) of every round of `federate`; the nets are stubs of one weight.

    key (M,) are the clients' losses.
    """
    M = config.clients
    if sizes is None:
        sizes = np.ones(M, dtype=int)
    n = sizes.sum()
    monkeypatch.setattr(script, "score_by_expert", lambda *_: np.zeros(n))
    rounds = []
    fl = SimpleNamespace(
        streams=common.Streams(0),
        everyone=np.arange(M),
        config=config,
        labels=np.zeros(n, dtype=int),
        shards=np.split(np.arange(n), np.cumsum(sizes)[:-1]),
        sizes=sizes,
        model=SimpleNamespace(trainable=1, size=1, dtype=torch.float32),
        data=SimpleNamespace(classes=1),
        base=SimpleNamespace(vectors=1),
        start=lambda: {"theta": torch.zeros(1)},
        received=lambda state, clients: state["theta"],
        score=lambda theta, clients: [(key[[m]], None) for m in clients],
        proportions=lambda clients: None,
        aggregate=lambda state, update, p: state["theta"],
        count_labels=lambda: np.ones((M, 1)),
        cost=lambda update, **numbers: numbers,
    )
    fl.select = lambda t, n: common.Federation.select(fl, t, n)

    def train(state, t, clients, batches, lr):
        K = len(clients)
        return SimpleNamespace(
            clients=clients, gather_thetas=lambda: torch.zeros(K, 1), length=np.ones(K)
        )

    def record(t, state, update, **row):
        rounds.append((update.clients, row, [*state["queue"]]))

    fl.train = train
    run = SimpleNamespace(rounds=lambda state: range(config.rounds), record=record)
    script_of(config.client_order).federate(config, fl, run)
    return rounds


def paper(order, **flags) -> Config:
    """The paper's 100 clients, 10 in each of 100 rounds."""
    setting = {"clients": 100, "clients_per_round": 10, "rounds": 100, "epochs": 1}
    orders = {"client_order": order, "data_order": "vanilla"}
    return script_of(order).Config(**setting | orders | flags)


def updates_when_scored(rounds) -> list[int]:
    """u at each round in which all clients are scored."""
    u = 0
    scored = []
    for clients, row, _ in rounds:
        if row["scorers"]:
            scored.append(u)
        u += len(clients)
    return scored


@pytest.mark.parametrize("order", EVERY)
def test_the_budget_is_met_exactly(order, monkeypatch):
    rounds = played(paper(order), np.random.default_rng(0).random(100), monkeypatch)
    assert len(rounds) == 100
    assert all(len(set(clients)) == len(clients) == 10 for clients, _, _ in rounds)


@pytest.mark.parametrize(
    "M, K, R, b", [(23, 7, 19, 0.1), (5, 5, 4, 0.2), (17, 1, 40, 0.01), (20, 9, 31, 0.3)]
)
@pytest.mark.parametrize("order", ["curriculum", "vanilla", "power-of-choice"])
def test_no_client_twice_in_a_round_whatever_the_sizes(M, K, R, b, order, monkeypatch):
    sizes = {"clients": M, "clients_per_round": K, "rounds": R}
    rounds = played(paper(order, **sizes, client_b=b), np.arange(M) % 3 * 1.0, monkeypatch)
    assert sum(len(set(clients)) for clients, _, _ in rounds) == R * K


def test_pool_grows_from_20_to_100_as_the_budget_is_spent(monkeypatch):
    """g(u) = floor(20 + .1 u) where all clients are scored, 100 from u = 800 on."""
    rounds = played(paper("curriculum"), np.random.default_rng(0).random(100), monkeypatch)
    scored = updates_when_scored(rounds)
    pools = [rounds[u // 10][1]["pool"] for u in scored]
    assert pools == [min(20 + u // 10, 100) for u in scored]
    assert pools[0] == 20
    assert pools[-1] == 100


def test_all_are_scored_anew_only_when_the_pool_cannot_fill_a_round(monkeypatch):
    """By hand: pools of 20, 22, 24, 26 clients with 0, 0, 2, 6 left waiting: 2, 2, 2, 3 rounds."""
    rounds = played(paper("curriculum"), np.random.default_rng(0).random(100), monkeypatch)
    assert updates_when_scored(rounds)[:5] == [0, 20, 40, 60, 90]
    assert {row["scorers"] for _, row, _ in rounds} == {0, 100}


@pytest.mark.parametrize("order", ["curriculum", "anti"])
def test_each_pool_is_the_first_in_order_and_each_member_trains_once(order, monkeypatch):
    key = np.random.default_rng(3).permutation(100).astype(float)
    ranked = np.argsort(key if order == "curriculum" else -key)
    rounds = played(paper(order), key, monkeypatch)
    turns = np.concatenate([clients for clients, _, _ in rounds])
    owed = np.zeros(100, dtype=int)  # every pool owes each of its members one update
    for u in updates_when_scored(rounds):
        owed[ranked[: min(20 + u // 10, 100)]] += 1
    owed -= np.bincount(rounds[-1][2], minlength=100)
    assert np.array_equal(np.bincount(turns, minlength=100), owed)
    assert set(turns[:20]) == set(ranked[:20])  # the first two rounds are the 20 first


def test_random_clients_are_drawn_anew_for_each_pool(monkeypatch):
    rounds = played(paper("random"), None, monkeypatch)
    turns = [set(clients.tolist()) for clients, _, _ in rounds]
    one, two, three = [turns[i] | turns[i + 1] for i in (0, 2, 4)]
    assert one != two != three
    assert len(one) == 20
    assert len(one - set(range(20))) > 0  # not the first ids
    assert len(one & two) < 15  # and not the same again


def test_vanilla_deals_everyone_in_turn(monkeypatch):
    rounds = played(paper("vanilla"), None, monkeypatch)
    turns = np.concatenate([clients for clients, _, _ in rounds])
    for i in range(0, 1000, 100):
        assert np.array_equal(np.sort(turns[i : i + 100]), np.arange(100))


def test_uniform_sampling_is_the_common_draw(monkeypatch):
    rounds = played(paper("vanilla", client_sampling="uniform"), None, monkeypatch)
    for t, (clients, row, _) in enumerate(rounds):
        drawn = common.Streams(0)("select", t).permutation(100)[:10]
        assert np.array_equal(clients, np.sort(drawn))
        assert row["pool"] == 100
    curriculum = paper("curriculum", client_sampling="uniform")  # which it does not read
    assert updates_when_scored(played(curriculum, np.arange(100.0), monkeypatch))


def test_cut_raggedly_the_paper_would_take_109_rounds_and_end_on_three_clients():
    """The docstring's figure, by the literal reading: the pool's last round is a short one."""
    u = 0
    sizes = []
    while u < 1000:
        pool = min(int(20 + u / 10 + 1e-9), 100)
        for size in [10] * (pool // 10) + [pool % 10]:
            size = min(size, 1000 - u)
            if size:
                sizes.append(size)
            u += size
    assert len(sizes) == 109
    assert sizes[-1] == 3


# ------------------------------------------------------------------------------------------- rivals


def test_power_of_choice_trains_the_largest_losses_of_d_drawn_by_size(monkeypatch):
    """Cho et al.: with d = M always the K of highest loss; with d = K clients by their size."""
    loss = np.random.default_rng(0).random(100)
    rounds = played(paper("power-of-choice", candidates=100), loss, monkeypatch)
    for clients, row, _ in rounds:
        assert set(clients) == set(np.argsort(-loss)[:10])
        assert row["scorers"] == 100
    sizes = np.r_[np.full(50, 1), np.full(50, 9)]
    one = {"clients_per_round": 1, "candidates": 1, "rounds": 2000}
    rounds = played(paper("power-of-choice", **one), loss, monkeypatch, sizes)
    drawn = np.concatenate([clients for clients, _, _ in rounds])
    assert abs((drawn >= 50).mean() - 0.9) < 5 * math.sqrt(0.09 / 2000)
    of_two = {"clients_per_round": 1, "candidates": 2, "rounds": 500}
    rounds = played(paper("power-of-choice", **of_two), loss, monkeypatch)
    drawn = np.concatenate([clients for clients, _, _ in rounds])
    assert loss[drawn].mean() > 0.6 > loss.mean() + 0.05  # of two the one of higher loss


def test_power_of_choice_never_compares_fewer_than_it_trains_nor_more_than_there_are(
    file, tmp_path
):
    for d, asked in ((1, 2), (5, 5), (50, 9)):
        config = small(file, client_order="power-of-choice", candidates=d)
        rows, _ = trained(config, tmp_path)
        assert [row["scorers"] for row in rows] == [asked] * 4


def test_entropy_puts_balanced_clients_first(tmp_path):
    """Clients 0 .. 8 hold 1, 1, 1, 2, 2, 2, 5, 5, 5 classes: the first pool are the last three."""
    y = np.concatenate([np.arange(10) % n for n in (1, 1, 1, 2, 2, 2, 5, 5, 5)])
    x = np.random.default_rng(0).integers(0, 255, (90, 16, 16, 1), dtype=np.uint8)
    path = tmp_path / "held.npz"
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y, owner=np.repeat(np.arange(9), 10))
    flags = {"partition": "natural", "client_order": "entropy"}
    flags |= {"clients_per_round": 3, "client_b": 1 / 3}
    _, state = trained(small(path, **flags, rounds=9), tmp_path)
    turns = state["turns"]
    assert sum(turns[:3]) < sum(turns[3:6]) < sum(turns[6:])
    _, state = trained(small(path, **flags, rounds=1), tmp_path)
    assert state["turns"] == [0] * 6 + [1] * 3


def test_coverage_keeps_the_counts_level(file, tmp_path):
    flags = {"client_order": "coverage", "clients_per_round": 3}
    for rounds in (1, 2, 4, 7):
        level = np.bincount(np.arange(3 * rounds) % 9, minlength=9)
        # a pool of one round's size: nobody a second time before all the first
        config = small(file, rounds=rounds, client_a=1e6, client_b=0.2, **flags)
        _, state = trained(config, tmp_path)
        assert sorted(state["turns"]) == sorted(level)
        # a growing pool is dealt in a random order
        _, state = trained(small(file, rounds=rounds, client_b=0.2, **flags), tmp_path)
        assert max(state["turns"]) - min(state["turns"]) <= 2
        # of a pool of four one waits, and counts as trained
        config = small(file, rounds=rounds, client_a=1e6, client_b=0.5, **flags)
        _, state = trained(config, tmp_path)
        promised = np.array(state["turns"])
        promised[state["queue"]] += 1
        assert promised.max() - promised.min() <= 1


def test_hics_trains_everyone_once_then_the_most_balanced(file, tmp_path):
    flags = {"client_order": "hics", "clients_per_round": 3, "client_b": 0.3, "client_a": 1e6}
    rows, state = trained(small(file, rounds=3, **flags), tmp_path)
    assert state["turns"] == [1] * 9
    assert max(state["entropies"]) <= math.log(5)
    for rounds in (4, 6):
        _, more = trained(small(file, rounds=rounds, **flags), tmp_path)
        assert more["entropies"] == state["entropies"]  # of the first update alone
        best = np.argsort(more["entropies"])[-3:]
        turns = np.array(more["turns"])
        assert set(np.flatnonzero(turns > 1)) == set(best)
        assert (turns[best] == rounds - 2).all()
    assert all(row["scorers"] == 0 for row in rows)


def test_estimated_entropy_is_that_of_the_labels_for_a_net_that_knows_nothing():
    """One step from equal logits moves the bias by eta (share - 1/C): against the closed form."""
    classes = 4
    eta = 0.5
    shares = torch.tensor([[0.25] * 4, [0.7, 0.1, 0.1, 0.1], [1.0, 0, 0, 0]], dtype=torch.float64)
    fl = SimpleNamespace(model=SimpleNamespace(trainable=10), data=SimpleNamespace(classes=classes))
    thetas = torch.zeros(3, 12, dtype=torch.float64)  # six weights, four biases, two statistics
    thetas[:, 6:10] = eta * (shares - 1 / classes)
    thetas[:, :6] = 9.0
    thetas[:, 10:] = -9.0
    delta_b = rivals.output_bias(fl, thetas + 1.5) - rivals.output_bias(fl, torch.full((12,), 1.5))
    for T in (0.1, 2.0):
        got = rivals.estimate_entropies(delta_b, np.full(3, eta), T)
        wanted = []
        for share in shares.tolist():
            weights = [math.exp(p / T) for p in share]
            p = [w / sum(weights) for w in weights]
            wanted.append(-sum(q * math.log(q) for q in p))
        assert got.tolist() == pytest.approx(wanted, rel=1e-12)
        assert (got.diff() < 0).all()


def test_hics_wants_an_output_bias(file, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, channels, side, classes):\n"
        "        linear = nn.Linear(channels * side * side, classes, bias=False)\n"
        "        super().__init__(nn.Flatten(), linear)\n"
    )
    config = small(file, client_order="hics", model=f"{tmp_path / 'mine.py'}:Net")
    wanted = "^--client-order hics: --model .*mine.py:Net does not end with the bias"
    with pytest.raises(UsageError, match=wanted):  # asked before any arm is trained
        config.federation(load_data(config.dataset), common.Streams(0))


@pytest.mark.parametrize("order", ["curriculum", "power-of-choice"])
def test_under_solo_scoring_downloads_no_net(file, tmp_path, order):
    rows, _ = trained(small(file, client_order=order, base="solo"), tmp_path)
    assert all(row["scorers"] == row["received_mb"] == 0 for row in rows)
    assert rows[-1]["sent_mb"] > 0


def test_hics_estimate_follows_the_true_label_entropy(tmp_path):
    """Digits, 20 clients of Dir(.2), all trained once: Spearman's correlation with the truth."""
    from scipy.stats import spearmanr

    flags = {"clients_per_round": 10, "rounds": 2, "epochs": 2, "client_b": 0.5, "client_a": 1e6}
    config = rivals.Config(client_order="hics", **flags)
    run = make_run(config, tmp_path)
    fl = run.fl
    experiment.train(run, lambda *_: None)
    true = []
    for shard in fl.shards:
        counts = np.bincount(fl.labels[shard], minlength=10)
        shares = [n / len(shard) for n in counts if n]
        true.append(-sum(p * math.log(p) for p in shares))
    assert rivals.label_entropies(fl).tolist() == pytest.approx(true, rel=1e-12)
    assert spearmanr(true, run.state["entropies"])[0] > 0.7


# --------------------------------------------------------------------------------------- the expert


def dealt(config, folder) -> tuple:
    """(shards, losses, federation) of Algorithm 2 under this configuration."""
    run = make_run(config, folder)
    losses = script.score_by_expert(config, run.fl, run)
    return script.deal_by_difficulty(config, run.fl, losses), losses, run.fl


def test_the_expert_never_sees_test_data(file, tmp_path):
    with np.load(file) as saved:
        arrays = dict(saved)
    blank = {"x_test": arrays["x_test"] * 0, "y_test": arrays["y_test"] * 0}
    np.savez(tmp_path / "blank.npz", **arrays | blank)
    one, losses, _ = dealt(small(file, expert_epochs=20), tmp_path / "one")
    config = small(tmp_path / "blank.npz", expert_epochs=20)
    other, again, _ = dealt(config, tmp_path / "other")
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert np.array_equal(losses, again)
    assert losses.mean() < np.log(5) / 2  # it did learn something


def test_an_expert_that_diverged_ranks_nobody(file, tmp_path):
    """NaN losses would be sorted without a word, and every table would stand on that order."""
    with pytest.raises(common.NonFiniteError, match="expert"):
        dealt(small(file, lr=1e6, expert_epochs=3), tmp_path)


def test_an_expert_of_finite_weights_and_infinite_loss_ranks_nobody(file, tmp_path, monkeypatch):
    honest = common.score

    def score(*arguments):
        return [(losses * np.inf, guesses) for losses, guesses in honest(*arguments)]

    monkeypatch.setattr(common, "score", score)
    with pytest.raises(common.NonFiniteError, match="cannot rank"):
        dealt(small(file), tmp_path)


@pytest.mark.parametrize(
    "sweep, experts",
    [
        ({"f_ord": (0.0, 1.0), "score": ("G", "E"), "alpha": (0.5, 2.0)}, 1),
        ({"expert_epochs": (1, 2), "lr": (0.01, 0.02)}, 4),
        ({"base": ("fedavg", "moon")}, 2),
    ],
)
def test_one_expert_serves_all_settings_of_a_trial(file, tmp_path, monkeypatch, sweep, experts):
    made = []
    honest = common.Federation.train_centrally

    def train_centrally(fl, epochs):
        made.append(epochs)
        return honest(fl, epochs)

    monkeypatch.setattr(common.Federation, "train_centrally", train_centrally)
    for values in itertools.product(*sweep.values()):
        dealt(small(file, **dict(zip(sweep, values, strict=True))), tmp_path)
    assert len(made) == experts


def test_stratify_keeps_class_counts_and_its_absence_only_sizes(file, tmp_path):
    labels = load_data(str(file)).y_train.numpy()
    counts = {}
    for stratify in (True, False):
        shards, losses, fl = dealt(small(file, stratify=stratify), tmp_path)
        counts[stratify] = np.array([count(shard, labels) for shard in shards])
    assert np.array_equal(counts[True], fl.count_labels())  # fl holds what was dealt before
    assert np.array_equal(counts[False].sum(1), counts[True].sum(1))
    assert not np.array_equal(counts[False], counts[True])
    means = [losses[shard].mean() for shard in shards]
    assert (np.diff(means) > 0).all()  # without classes, client by client harder


# --------------------------------------------------------------------------------------- whole arms


def test_with_b_1_all_sixteen_arms_are_one_program(file, tmp_path):
    costs = ("scorers", "received_mb", "sent_mb", "clock", "waiting")
    bare = []
    thetas = []
    for client, data in itertools.product(ORDERS, ORDERS):
        orders = {"client_order": client, "data_order": data}
        config = small(file, client_b=1.0, pacing_b=1.0, **orders)
        rows, state = trained(config, tmp_path)
        for row in rows:
            for column in costs:
                row.pop(column)
        bare.append(rows)
        thetas.append(state["theta"])
    assert all(rows == bare[0] for rows in bare)
    assert all(torch.equal(theta, thetas[0]) for theta in thetas)


def test_arms_differ_where_they_should_and_share_the_partition(file, tmp_path):
    pools = []
    thetas = []
    partitions = set()
    for client, data in itertools.product(("curriculum", "vanilla"), repeat=2):
        config = small(file, client_order=client, data_order=data)
        rows, state = trained(config, tmp_path)
        pools.append([row["pool"] for row in rows])
        thetas.append(state["theta"])
        partitions.add((rows[0]["inside"], rows[0]["between"]))
    assert len(partitions) == 1
    for one, other in itertools.combinations(thetas, 2):
        assert not torch.equal(one, other)
    assert pools[0] == pools[1] == [2, 4, 4, 8]  # by hand: 1.8 + 7.2 u / 6.4
    assert pools[2] == pools[3] == [9] * 4


EFFECTS = {
    "score": "E",
    "client_a": 0.3,
    "client_b": 0.6,
    "pacing_a": 0.3,
    "pacing_b": 0.7,
    "pacing": "quadratic",
    "client_sampling": "uniform",
    "candidates": 7,
    "temperature": 0.01,
    "lr_power": 0.3,
    "mu": 0.7,
    "server_lr": 0.3,
}


@pytest.mark.parametrize(
    "orders",
    [
        "curriculum vanilla",
        "vanilla anti",
        "vanilla vanilla",
        "random random",
        "power-of-choice vanilla",
        "hics vanilla",
        "coverage curriculum",
    ],
)
def test_an_arm_depends_on_the_flags_that_it_is_said_to_read(file, tmp_path, orders):
    """Each flag changed on its own: the weights stay exactly where the arm does not read it."""
    client, data = orders.split()
    flags = {"client_order": client, "data_order": data, "rounds": 8, "candidates": 4, "lr": 0.05}
    if client not in RIVALS:
        del flags["candidates"]
    config = small(file, **flags, lr_alpha=0.1 * (client == "random"))
    theta = trained(config, tmp_path)[1]["theta"]
    for name, value in EFFECTS.items():
        if name not in config.__dataclass_fields__:
            continue
        changed = trained(replace(config, **{name: value}), tmp_path)[1]["theta"]
        is_read = name in config.results_depend_on()
        assert torch.equal(changed, theta) == (not is_read), name


@pytest.mark.parametrize("order", EVERY)
def test_fewer_rounds_are_the_first_of_more_where_the_number_is_not_read(file, tmp_path, order):
    config = small(file, client_order=order, rounds=5, client_a=0.7)
    five, _ = trained(config, tmp_path / "five")
    nine, _ = trained(replace(config, rounds=9), tmp_path / "nine")
    is_same = [row["pool"] for row in five] == [row["pool"] for row in nine[:5]]
    if not config.reads_rounds():
        assert five == nine[:5]
    assert is_same == (not config.reads_rounds())


@pytest.mark.parametrize("orders", ["curriculum curriculum", "random vanilla", "hics vanilla"])
def test_interrupted_and_resumed_is_the_same_run(file, tmp_path, monkeypatch, orders):
    """Stopped while a pool is half used, with SCAFFOLD's memory: the same bits."""
    client, data = orders.split()
    flags = {"client_order": client, "data_order": data, "rounds": 6, "client_b": 0.6}
    config = small(file, base="scaffold", **flags)
    whole_rows, whole = trained(config, tmp_path / "whole")
    honest = experiment.Run.record

    def record(run, t, *arguments, **columns):
        if t == 3:
            raise KeyboardInterrupt
        honest(run, t, *arguments, **columns)

    monkeypatch.setattr(experiment.Run, "record", record)
    with pytest.raises(KeyboardInterrupt):
        trained(config, tmp_path / "cut")
    monkeypatch.setattr(experiment.Run, "record", honest)
    rows, state = trained(replace(config, resume=True), tmp_path / "cut")
    assert rows == whole_rows
    assert torch.equal(state["theta"], whole["theta"])
    assert state["queue"] == whole["queue"]


@pytest.mark.parametrize("base, nets", [("moon", 1), ("solo", 9)])
def test_bases_with_nets_of_their_own(file, tmp_path, monkeypatch, base, nets):
    """SOLO's clients are scored by the net of each; MOON's projection head is the expert's too."""
    scored = []
    honest = common.score

    def score(model, theta, *arguments):
        scored.append(theta.reshape(-1, model.size))
        return honest(model, theta, *arguments)

    monkeypatch.setattr(common, "score", score)
    rows, _ = trained(small(file, base=base, rounds=3), tmp_path)
    assert len(rows) == 3
    assert len(scored[-1]) == nets
    if base == "solo":  # who trained is scored by what it trained
        assert (scored[-1] != scored[1]).any(1).sum() >= 2


# ------------------------------------------------------------------------------------- command line


def read_csv(path) -> list[dict]:
    with path.open() as lines:
        return list(csv.DictReader(lines))


FEW = "--clients 6 --clients-per-round 3 --rounds 2 --trials 2 --jobs 1 --batch-size 4"
FEW += " --partition iid"


def test_command_line_prints_gains_and_consistency(file, tmp_path, capsys):
    """A_o and its Student interval by hand; the figures are there."""
    flags = f"{FEW} --epochs 4 --expert-epochs 5 --dataset {file} --out {tmp_path}"
    script.main(shlex.split(flags))
    printed = capsys.readouterr().out
    rows = read_csv(tmp_path / "metrics.csv")
    assert len(rows) == 4 * 2 * 2
    finals = {}
    for row in rows:
        if row["round"] == "2":
            finals.setdefault(row["method"], []).append(float(row["accuracy"]))
            assert row["uploads"] == "6"
    assert set(finals) == {"client+data", "client", "data", "vanilla"}
    A_o = np.array(finals["client"]) - np.array(finals["vanilla"])
    half = 12.7062047 * A_o.std(ddof=1) / math.sqrt(2)
    wanted = f"client {A_o.mean():+.2f} [{A_o.mean() - half:+.2f}, {A_o.mean() + half:+.2f}]"
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert wanted in lines
    table = read_csv(tmp_path / "consistency.csv")
    assert [line["trial"] for line in table] == ["0", "1"]
    for line in table:
        of_trial = [row for row in rows if row["trial"] == line["trial"]]
        for name in ("inside", "between"):
            assert {row[name] for row in of_trial} == {line[name]}
    for name in ("difficulty.png", "accuracy.png"):
        assert (tmp_path / name).stat().st_size > 5000


def test_a_sweep_shows_the_consistency_of_every_setting(file, tmp_path):
    """Vanilla does not read --score: trained once for G and E, it has the data of its f_ord."""
    sweep = "--client-order vanilla curriculum --data-order vanilla --score G E --f-ord 0 1"
    flags = f"{FEW} {sweep} --rounds 1 --epochs 1 --expert-epochs 9 --dataset {file}"
    script.main([*shlex.split(flags), "--out", str(tmp_path)])
    rows = {}
    for row in read_csv(tmp_path / "consistency.csv"):
        rows[row.pop("setting"), row.pop("trial")] = row
    assert len(rows) == 8
    for (setting, trial), row in rows.items():
        assert row == rows[setting.replace("score=G", "score=E"), trial]
        dealt = rows[setting.replace("f_ord=0.0", "f_ord=1.0"), trial]
        assert float(row["between"]) <= float(dealt["between"])
        assert float(row["inside"]) >= float(dealt["inside"])


def test_rivals_draw_the_clients_before_and_after_algorithm_2(file, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = {}
    honest = Figure.savefig

    def savefig(figure, path, **options):
        figures[path.name] = figure
        honest(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    flags = f"{FEW} --client-order random coverage --expert-epochs 5 --dataset {file}"
    rivals.main([*shlex.split(flags), "--out", str(tmp_path)])
    config = small(file, clients=6, partition="iid", expert_epochs=5, min_size=1)
    shards, losses, fl = dealt(config, tmp_path / "again")
    for axis, of_clients in zip(figures["clients.png"].axes, (fl.shards, shards), strict=True):
        dots, _, [bars] = axis.containers[0]
        means = np.array([losses[shard].mean() for shard in of_clients])
        stds = np.array([losses[shard].std() for shard in of_clients])
        assert dots.get_ydata() == pytest.approx(means, rel=1e-12)
        ends = np.array([segment[:, 1] for segment in bars.get_segments()])
        assert ends[:, 1] == pytest.approx(means + stds)
        assert ends[:, 0] == pytest.approx(np.maximum(means - stds, 0))


@pytest.mark.parametrize(
    "program, flags",
    [
        (script, "--client-order easy"),
        (script, "--client-order coverage"),
        (script, "--data-order coverage"),
        (script, "--f-ord 1.5"),
        (script, "--client-b -1"),
        (script, "--clients-per-round 30 --clients 20"),
        (script, "--score L"),
        (script, "--clients 2000"),
        (rivals, "--temperature 0"),
        (rivals, "--candidates 0"),
    ],
)
def test_wrong_flags_give_one_line(program, flags, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        program.main([*flags.split(), "--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "metrics.csv").exists()


def test_default_budget_trains_every_client_ten_times_on_average():
    """The paper's U / M; and the first pool fills a round, so that the ranking counts."""
    config = Config()
    assert config.rounds * config.clients_per_round / config.clients >= 10
    assert config.client_b * config.clients >= config.clients_per_round


IID = {"consistency-iid", "fig4-iid", "fig5-iid", "fig6-clients-iid", "fig6-data-iid"}
DIRICHLET = {"consistency", "fig4", "fig5", "fig6-clients", "fig6-data"}


def grid(preset: str) -> dict[str, list[str]]:
    """{flag: its values} of a preset's command line; a later flag replaces an earlier one."""
    presets = script.PRESETS | rivals.PRESETS
    flags = {}
    for word in shlex.split(presets[preset], comments=True):
        if word.startswith("--"):
            values = flags[word] = []
        else:
            values.append(word)
    return flags


def test_every_figure_has_its_preset():
    assert set(script.PRESETS) == IID | DIRICHLET | {"fig7"}
    assert set(rivals.PRESETS) == {"rivals"}


@pytest.mark.parametrize("preset", [*script.PRESETS, *rivals.PRESETS])
def test_presets_are_the_papers_settings(preset):
    flags = grid(preset)
    setting = {"--dataset": "cifar10", "--clients": "100", "--clients-per-round": "10"}
    setting |= {"--lr": "0.001", "--lr-alpha": "0.001", "--expert-epochs": "20"}
    for name, value in setting.items():
        assert flags[name] == [value]
    length = (flags["--rounds"], flags["--epochs"])
    assert length == ((["1"], ["1"]) if "consistency" in preset else (["100"], ["10"]))
    assert ("--no-stratify" in flags) == (preset in IID)
    assert flags.get("--partition") == (["iid"] if preset in IID else None)
    assert flags.get("--alpha") == (["0.2", "0.05"] if preset in DIRICHLET else None)
    left_alone = {"--momentum", "--weight-decay", "--batch-size", "--lr-power", "--trials"}
    assert not left_alone & set(flags)  # the defaults are the paper's


def test_defaults_are_the_papers():
    assert (Config.momentum, Config.weight_decay, Config.batch_size) == (0.9, 5e-4, 10)
    assert (Config.lr_power, Config.trials, Config.alpha, Config.f_ord) == (0.75, 3, 0.2, 1.0)
    assert (Config.pacing, Config.client_a, Config.client_b) == ("linear", 0.8, 0.2)
    assert (Config.pacing_a, Config.pacing_b) == (0.8, 0.2)


def test_presets_compare_what_the_figures_compare():
    fig7 = grid("fig7")
    assert (fig7["--base"], fig7["--score"], fig7["--f-ord"]) == (["fedprox"], ["E"], ["0.9"])
    assert "--client-order" not in fig7
    for end in ("", "-iid"):
        fig4 = grid(f"fig4{end}")
        assert (fig4["--f-ord"], fig4["--score"]) == (["0", "1"], ["E"])
        assert fig4["--client-order"] == ["vanilla"]
        assert fig4["--data-order"] == [*ORDERS]
        fig5 = grid(f"fig5{end}")
        assert fig5["--client-order"] == [*ORDERS]
        left = grid(f"fig6-clients{end}")
        assert left["--client-order"] == ["curriculum", "random"]
        for figure in (fig5, left):
            assert figure["--data-order"] == ["vanilla"]
            assert "--f-ord" not in figure
        right = grid(f"fig6-data{end}")
        assert right["--data-order"] == ["curriculum", "random"]
        assert (right["--f-ord"], right["--client-order"]) == (["0"], ["vanilla"])
        assert left["--score"] == right["--score"] == ["G", "E"]
    assert set(grid("rivals")["--client-order"]) == {"curriculum", "anti", "random", *RIVALS}
    assert grid("rivals")["--data-order"] == ["vanilla"]


def test_names_of_the_arms():
    names = {}
    for client, data in itertools.product(EVERY, ORDERS):
        names[client, data] = script.name(SimpleNamespace(client_order=client, data_order=data))
    assert len(set(names.values())) == 32
    assert names["vanilla", "vanilla"] == "vanilla"
    assert names["vanilla", "anti"] == "data-anti"
    assert names["curriculum", "curriculum"] == "client+data"
    assert names["anti", "curriculum"] == "client-anti+data"
    assert names["curriculum", "vanilla"] == "client"
