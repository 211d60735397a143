"""Oracles of client_curriculum.py: whole runs written out literally, Algorithm 2, the budget, the pool, the rivals' keys."""

import csv
import dataclasses
import itertools
import math
import shlex
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import client_curriculum as script
import common
import experiment
from client_curriculum import ORDERS, RIVALS, SIGN, Config

PAPER = Config(clients=100, clients_per_round=10, rounds=100, client_order="curriculum", data_order="vanilla")
SIZES = (8, 20, 11, 14, 17, 9)  # of the six clients of the literal runs


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """79 digits of five classes at 16x16 with six natural clients of 8 to 20 samples, as an .npz; 60 to test on."""
    from sklearn.datasets import load_digits

    x, y = load_digits(n_class=5, return_X_y=True)
    x = np.kron(x.reshape(-1, 8, 8), np.ones((2, 2)))[..., None] * (255 / 16)
    owner = np.repeat(np.arange(6), SIZES)
    n = len(owner)
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    x, y = x.astype(np.uint8), y.astype(np.int64)
    np.savez(path, x_train=x[:n], y_train=y[:n], x_test=x[n : n + 60], y_test=y[n : n + 60], owner=owner)
    return path


def small(file, **flags) -> Config:
    """Seconds, not minutes: 9 clients of about 9 samples, 2 a round, one local epoch."""
    base = {"dataset": str(file), "client_order": "curriculum", "data_order": "vanilla", "clients": 9, "clients_per_round": 2}
    base |= {"rounds": 4, "epochs": 1, "batch_size": 4, "expert_epochs": 1, "trials": 1, "alpha": 1.0, "min_size": 2}
    return Config(**{**base, "threads": 1, "device": "cpu", "jobs": 2, **flags})  # jobs: no bar


def trained(config, folder, resume=False) -> tuple[list[dict], dict]:
    """Rows (without seconds and method) and final state of one arm."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    run = experiment.Run(dataclasses.replace(config, resume=resume), script.name(config), "", 0, folder)
    script.federate(run.config, common.load_data(config.dataset), run)
    rows = [{k: v for k, v in row.items() if k not in ("seconds", "method")} for row in run.rows]
    state = run.load()["state"]
    return rows, state | {name: torch.tensor(state[name]) for name in ("trained", "estimate")}


# ------------------------------------------------------------------------------------------------- whole runs, literally


class Literal:
    """Sections 4.1 to 4.5 in float64, client by client and step by step. Shares the random streams and the initial weights."""

    def __init__(self, file, flags: dict, trial: int = 0):
        self.c, self.streams = SimpleNamespace(**flags), common.Streams(flags["seed"], trial)
        with np.load(file) as saved:
            arrays = dict(saved)
        mean, std = arrays["x_train"].mean(), arrays["x_train"].std()
        for split in ("train", "test"):
            x = torch.from_numpy((arrays[f"x_{split}"] - mean) / std).permute(0, 3, 1, 2)
            setattr(self, split, (x, torch.from_numpy(arrays[f"y_{split}"])))
        self.y, self.model = arrays["y_train"], common.build_model("lenet5", common.load_data(str(file)), dtype=torch.float64)
        self.expert = self.sgd(self.model.init(self.streams.seed("central init")), self.central(), itertools.repeat(self.c.lr))
        self.loss = self.losses(self.expert, range(len(self.y)))
        self.before = [[i for i in range(len(self.y)) if arrays["owner"][i] == m] for m in range(6)]
        self.shards = self.deal()

    def logits(self, theta, x):
        """LeNet-5 on 1x16x16: conv 6, pool, conv 16, pool, 120, 84, 5."""
        shapes = [(6, 1, 5, 5), (6,), (16, 6, 5, 5), (16,), (120, 16), (120,), (84, 120), (84,), (5, 84), (5,)]
        parts = theta.split([math.prod(shape) for shape in shapes])
        w1, b1, w2, b2, w3, b3, w4, b4, w5, b5 = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        x = F.max_pool2d(F.relu(F.conv2d(x, w1, b1)), 2)
        x = F.max_pool2d(F.relu(F.conv2d(x, w2, b2)), 2).flatten(1)
        return F.relu(F.relu(x @ w3.T + b3) @ w4.T + b4) @ w5.T + b5

    def cross_entropies(self, theta, x, y):
        logits = self.logits(theta, x)
        return logits.logsumexp(1) - logits[torch.arange(len(y)), y]

    def losses(self, theta, index) -> np.ndarray:
        index = torch.tensor(list(index))
        return self.cross_entropies(theta, self.train[0][index], self.train[1][index]).numpy()

    def sgd(self, start, batches, rates, mu=0.0):
        """theta after one step for each batch; `self.trace` holds the batches' losses."""
        theta, velocity, self.trace = start.clone(), torch.zeros_like(start), []
        for batch, eta in zip(batches, rates, strict=False):
            y = theta.clone().requires_grad_()
            index = torch.tensor(batch)
            loss = sum(self.cross_entropies(y, self.train[0][index], self.train[1][index])) / len(batch)
            (g,) = torch.autograd.grad(loss, y)
            g = g + mu * (theta - start) + self.c.weight_decay * theta
            velocity = self.c.momentum * velocity + g
            theta = theta - eta * velocity
            self.trace.append(float(loss.detach()))
        return theta

    def central(self):
        rng, n, B = self.streams("central batches"), len(self.y), self.c.batch_size
        for _ in range(self.c.expert_epochs):
            shuffled = rng.permutation(n).tolist()
            yield from (shuffled[i : i + B] for i in range(0, n, B))

    def deal(self) -> list[list[int]]:
        """Algorithm 2."""
        blocks, rng = [[] for _ in range(6)], self.streams("difficulty")
        label = self.y.tolist() if self.c.stratify else [0] * len(self.y)
        for c in sorted(set(label)):
            pi_c = sorted((i for i in range(len(label)) if label[i] == c), key=lambda i: self.loss[i])
            counts = [sum(label[i] == c for i in shard) for shard in self.before]
            offset, left = 0, set(pi_c)
            for m, n in enumerate(counts):
                mine = pi_c[offset : offset + math.floor(round(self.c.f_ord * n, 6))]
                blocks[m], left, offset = blocks[m] + mine, left - set(mine), offset + n
                counts[m] -= len(mine)
            dealt = iter(rng.permutation(sorted(left)).tolist())
            for m, n in enumerate(counts):
                blocks[m] += itertools.islice(dealt, n)
        return [sorted(block) for block in blocks]

    def g(self, t, T, N, a, b) -> int:
        x = min(t / (a * T), 1)
        share = {"linear": x, "quadratic": x * x, "root": math.sqrt(x), "step": float(x == 1)}
        share["exponential"] = (math.exp(10 * x) - 1) / (math.exp(10) - 1)
        return max(1, math.floor(round(N * b + N * (1 - b) * share[self.c.pacing], 6)))

    def ordered(self, items, keys, rng) -> list[int]:
        """By key, ties in a random order; without keys in that order."""
        drawn = rng.permutation(len(items)).tolist()
        return [items[i] for i in (drawn if keys is None else sorted(drawn, key=lambda i: keys[i]))]

    def batches(self, m, t, theta, order) -> list[list[int]]:
        shard, B = self.shards[m], self.c.batch_size
        T = self.c.epochs * math.ceil(len(shard) / B)
        keys = None
        if order in ("curriculum", "anti"):
            keys = self.loss[shard] if self.c.score == "E" else self.losses(theta, shard)
            keys = [-key if order == "anti" else key for key in keys]
        ordered, rng, queue, batches = (
            self.ordered(shard, keys, self.streams("ties", t, m)),
            self.streams("batches", t, m),
            [],
            [],
        )
        for step in range(T):
            size = len(shard) if order == "vanilla" else self.g(step, T, len(shard), self.c.pacing_a, self.c.pacing_b)
            batches.append([])
            while len(batches[-1]) < min(B, len(shard)):
                queue = queue or rng.permutation(sorted(ordered[:size])).tolist()
                batches[-1].append(queue.pop(0))
        return batches

    def key(self, order, m, theta) -> float:
        """What ranks client m, smallest first."""
        if order in ("curriculum", "anti", "power-of-choice"):
            loss = self.loss[self.shards[m]].mean() if self.c.score == "E" else self.losses(theta, self.shards[m]).mean()
            return loss if order == "curriculum" else -loss
        if order == "entropy":
            share = [list(self.y[self.shards[m]]).count(c) / len(self.shards[m]) for c in range(5)]
            return sum(p * math.log(p) for p in share if p)
        return -self.estimate[m] if order == "hics" else self.count[m] + (m in self.queue)

    def select(self, t, order, theta) -> list[int]:
        M, m = 6, self.c.clients_per_round
        if order == "vanilla" and self.c.client_sampling == "uniform":
            return sorted(self.streams("select", t).permutation(M)[:m].tolist())
        ranked, ties = order not in ("random", "vanilla"), self.streams("client ties", t)
        if order == "power-of-choice":
            p = np.array([len(shard) for shard in self.shards]) / len(self.y)
            drawn = self.streams("candidates", t).choice(M, self.c.candidates, replace=False, p=p).tolist()
            self.scored(len(drawn))
            return sorted(self.ordered(drawn, [self.key(order, i, theta) for i in drawn], ties)[:m])
        if len(self.queue) < m:
            if order in ("curriculum", "anti"):
                self.scored(M)
            first = self.ordered(range(M), [self.key(order, i, theta) for i in range(M)] if ranked else None, ties)
            U = self.c.rounds * m
            self.pool = M if order == "vanilla" else max(m, self.g(self.u, U, M, self.c.client_a, self.c.client_b))
            again = self.streams("pool", t).permutation(sorted(first[: self.pool])).tolist()
            self.queue += [i for i in again if i not in self.queue] + [i for i in again if i in self.queue]
        chosen, self.queue = self.queue[:m], self.queue[m:]
        return sorted(chosen)

    def scored(self, n):
        if self.c.score == "G":
            self.downloads, self.scalars = self.downloads + n, self.scalars + n

    def run(self, client_order, data_order) -> tuple[list[dict], torch.Tensor]:
        """The rows of metrics.csv and the last weights of one arm."""
        theta, P = self.model.init(self.streams.seed("init")), self.model.size
        ranks = client_order in ("curriculum", "anti", "power-of-choice")
        self.queue, self.u, self.pool, rows, samples = [], 0, 6, [], 0
        self.count, self.estimate = [0] * 6, [math.inf] * 6
        sent = self.c.score == "E" and (ranks or data_order in ("curriculum", "anti"))
        self.downloads, self.scalars = 6 * sent, 6 * (self.c.score == "E" and ranks or client_order == "entropy")
        for t in range(self.c.rounds):
            clients, models, traces = self.select(t, client_order, theta), [], []
            for m in clients:
                batches = self.batches(m, t, theta, data_order)
                rates = [self.c.lr * (1 + self.c.lr_alpha * i) ** -self.c.lr_power for i in range(len(batches))]
                models.append(self.sgd(theta, batches, rates, self.c.mu))
                traces.append(sum(self.trace) / len(batches))
                samples += sum(map(len, batches))
                if not self.count[m]:
                    travelled, velocity, length = 0, 0, 0
                    for eta in rates:  # a gradient of 1 throughout
                        velocity = self.c.momentum * velocity + 1 - self.c.mu * travelled
                        travelled += eta * velocity
                    length = travelled
                    weight = [math.exp(d / (self.c.temperature * length)) for d in (models[-1] - theta)[-5:].tolist()]
                    self.estimate[m] = -sum(w / sum(weight) * math.log(w / sum(weight)) for w in weight)
                self.count[m] += 1
            sizes = [len(self.shards[m]) for m in clients]
            theta = sum(n / sum(sizes) * y for n, y in zip(sizes, models, strict=True))
            self.u += len(clients)
            logits, y = self.logits(theta, self.test[0]), self.test[1]
            row = {"round": t + 1, "clients": len(clients), "dropped": 0, "uploads": self.u, "samples": samples}
            row |= {"received_mb": (self.u + self.downloads) * P * 8 / 1e6, "sent_mb": (self.u * P + self.scalars) * 8 / 1e6}
            row |= {"pool": self.pool, "expert_loss": np.mean([self.loss[self.shards[m]].mean() for m in clients])}
            row |= {"downloads": self.u + self.downloads, "scoring_downloads": self.downloads}
            row |= {"scoring_scalars": self.scalars, "train_loss": np.mean(traces)}
            row |= {"accuracy": 100 * float((logits.argmax(1) == y).double().mean())}
            rows.append(row | {"loss": float(self.cross_entropies(theta, *self.test).mean())})
        return rows, theta


COMMON = {"seed": 5, "rounds": 4, "clients_per_round": 2, "epochs": 2, "batch_size": 4, "lr": 0.1, "momentum": 0.6}
COMMON |= {"weight_decay": 0.02, "mu": 0.7, "lr_alpha": 0.3, "lr_power": 0.9, "expert_epochs": 3, "temperature": 0.3}
COMMON |= {"candidates": 3, "client_a": 0.6, "client_b": 0.4, "pacing_a": 0.9, "pacing_b": 0.15, "stratify": True}
COMMON |= {"client_sampling": "pool", "pacing": "linear"}
SETTINGS = {
    "G": COMMON | {"score": "G", "f_ord": 0.6, "pacing": "root"},
    "E": COMMON | {"score": "E", "f_ord": 0.4, "pacing": "exponential", "stratify": False, "client_sampling": "uniform"},
    "quadratic": COMMON | {"score": "G", "f_ord": 1.0, "pacing": "quadratic", "mu": 0.0, "client_sampling": "uniform"},
    "step": COMMON | {"score": "G", "f_ord": 0.0, "pacing": "step", "momentum": 0.0, "candidates": 5},
    "linear": COMMON
    | {"score": "E", "f_ord": 0.9, "clients_per_round": 3, "client_a": 0.2, "weight_decay": 0.0, "batch_size": 12},
}
ARMS = {"G": itertools.product(ORDERS + RIVALS, ("curriculum", "vanilla"))}
ARMS |= {"E": itertools.product(ORDERS + RIVALS, ("anti", "random"))}
ARMS |= {"quadratic": [("curriculum", "anti"), ("anti", "curriculum"), ("vanilla", "curriculum")]}
ARMS |= {"step": [("curriculum", "random"), ("vanilla", "anti"), ("power-of-choice", "random")]}
ARMS |= {"linear": [("coverage", "vanilla"), ("hics", "vanilla"), ("random", "curriculum"), ("anti", "vanilla")]}


def command(flags: dict) -> list[str]:
    words = shlex.split("--partition natural --clients 6 --base fedprox --dtype float64 --trials 1 --threads 1 --device cpu")
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        words += [flag if value else flag.replace("--", "--no-")] if isinstance(value, bool) else [flag, str(value)]
    return words


@pytest.mark.parametrize("setting", SETTINGS)
def test_whole_runs_against_the_transcript(file, setting, tmp_path, monkeypatch):
    """Every arm's weights to 1e-9, every column of its metrics.csv, and consistency.csv."""
    runs, honest, literal = {}, script.federate, Literal(file, SETTINGS[setting])
    monkeypatch.setattr(script, "federate", lambda c, data, run: runs.update({run.method: run}) or honest(c, data, run))
    monkeypatch.setattr(experiment, "curves", lambda *r, **k: None)
    arms = list(ARMS[setting])
    for data_order in dict.fromkeys(data for _, data in arms):
        clients = [client for client, data in arms if data == data_order]
        orders = ["--client-order", *clients, "--data-order", data_order]
        script.main([*command(SETTINGS[setting]), *orders, "--dataset", str(file), "--out", str(tmp_path)])
        table = list(csv.DictReader((tmp_path / "metrics.csv").open()))
        for client in clients:
            method = script.name(SimpleNamespace(client_order=client, data_order=data_order))
            wanted, theta = literal.run(client, data_order)
            got = [row for row in table if row["method"] == method]
            assert set(got[0]) - set(wanted[0]) == {"setting", "method", "trial", "seconds"}
            assert [{name: float(row[name]) for name in wanted[0]} for row in got] == [
                pytest.approx(r, 1e-9) for r in wanted
            ], method
            weights = runs[method].load()["state"]["weights"]
            assert (weights - theta).abs().max() < 1e-9, method
    check_consistency(tmp_path, literal)


def check_consistency(folder, literal):
    [row] = csv.DictReader((folder / "consistency.csv").open())
    for when, shards in (("_before", literal.before), ("", literal.shards)):
        means = [sum(literal.loss[shard]) / len(shard) for shard in shards]
        inside = [
            math.sqrt(sum((literal.loss[i] - mean) ** 2 for i in shard) / len(shard))
            for shard, mean in zip(shards, means, strict=True)
        ]
        between = math.sqrt(sum((mean - sum(means) / 6) ** 2 for mean in means) / 6)
        assert float(row[f"inside{when}"]) == pytest.approx(sum(inside) / 6, rel=1e-9)
        assert float(row[f"between{when}"]) == pytest.approx(between, rel=1e-9)


# ------------------------------------------------------------------------------------------------------- Algorithm 2


def dealt_by_hand(shards, labels, loss, f):
    """Algorithm 2 sample by sample, in Python lists: the blocks of every client and the leftovers of every class."""
    blocks, rest = [[] for _ in shards], {}
    for c in sorted(set(labels)):
        members = sorted((i for shard in shards for i in shard if labels[i] == c), key=lambda i: (loss[i], i))
        taken, start = set(), 0
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
    shards, _ = common.partition("dirichlet", labels, 20, 0.2, rng)
    return shards, labels, np.round(rng.exponential(size=900), 2)


@pytest.mark.parametrize("f", [0.0, 0.1, 0.29, 0.5, 0.9, 1.0])
def test_algorithm_2_against_python_lists(base, f):
    shards, labels, loss = base
    new = script.reconstitute(shards, labels, loss, f, np.random.default_rng(1))
    assert np.array_equal(np.sort(np.concatenate(new)), np.arange(900))  # each sample dealt once
    for before, after in zip(shards, new, strict=True):  # N_ic conserved
        assert np.array_equal(np.bincount(labels[before], minlength=5), np.bincount(labels[after], minlength=5))
    blocks, rest = dealt_by_hand(shards, labels, loss, f)
    for block, after in zip(blocks, new, strict=True):
        assert set(block) <= set(after)
        assert all(i in rest[labels[i]] for i in set(after) - set(block))


def test_offsets_are_exclusive():
    """Two clients, two classes, by hand: with the printed inclusive cumsum client 0 would get the second block."""
    labels = np.array([0, 0, 0, 0, 0, 1, 1, 1])
    loss = np.array([5.0, 1, 4, 2, 3, 9, 7, 8])
    shards = [np.array([0, 1, 5, 6]), np.array([2, 3, 4, 7])]
    easy, hard = script.reconstitute(shards, labels, loss, 1.0, np.random.default_rng(0))
    assert easy.tolist() == [1, 3, 6, 7] and hard.tolist() == [0, 2, 4, 5]


def test_f_1_is_contiguous_and_ordered_in_each_class_and_needs_no_draw(base):
    shards, labels, loss = base
    new = script.reconstitute(shards, labels, loss, 1.0, np.random.default_rng(1))
    again = script.reconstitute(shards, labels, loss, 1.0, np.random.default_rng(2))
    assert all(np.array_equal(a, b) for a, b in zip(new, again, strict=True))
    for c in range(5):
        by_client = np.concatenate([np.sort(loss[own[labels[own] == c]]) for own in new])
        assert np.array_equal(by_client, np.sort(loss[labels == c]))


def test_f_0_ignores_the_loss(base):
    shards, labels, loss = base
    one = script.reconstitute(shards, labels, loss, 0.0, np.random.default_rng(1))
    other = script.reconstitute(shards, labels, loss, 0.0, np.random.default_rng(2))
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    first = np.concatenate([loss[own] for own in one[: len(one) // 2]])  # the half that f = 1 makes easy
    assert abs(first.mean() - loss.mean()) < 4 * loss.std() / np.sqrt(len(first))


def test_the_block_of_29_percent_of_100_is_29():
    labels, loss = np.zeros(200, dtype=int), np.arange(200.0)
    first, second = script.reconstitute([np.arange(100), np.arange(100, 200)], labels, loss, 0.29, np.random.default_rng(0))
    assert first[:29].tolist() == list(range(29))
    assert set(range(100, 129)) <= set(second) and not set(range(100, 129)) & set(first)


def test_a_block_rounds_down_so_that_one_sample_is_dealt_at_random():
    """floor(.9 x 1) = 0 of each client's only sample is in the ordered block."""
    shards, labels, loss = [np.array([i]) for i in range(40)], np.zeros(40, dtype=int), np.arange(40.0)
    dealt = [np.concatenate(script.reconstitute(shards, labels, loss, 0.9, np.random.default_rng(seed))) for seed in (1, 2)]
    assert not np.array_equal(dealt[0], dealt[1]) and not np.array_equal(dealt[0], np.arange(40))


def test_data_left_out_by_parts_stays_out(base):
    shards, labels, loss = base
    new = script.reconstitute(shards[3:9], labels, loss, 0.5, np.random.default_rng(0))
    assert np.array_equal(np.sort(np.concatenate(new)), np.sort(np.concatenate(shards[3:9])))


def test_consistency_falls_with_f_and_stratification_keeps_it_up():
    """1,000 samples with losses 0..999, 10 equal clients: without classes a block of 100 has std sqrt((100^2 - 1) / 12)."""
    rng = np.random.default_rng(0)
    labels, loss = rng.integers(0, 4, 1000), rng.permutation(1000).astype(float) + 250.0
    loss += 1000 * labels  # so that the classes differ in difficulty
    shards, _ = common.partition("iid", labels, 10, 1.0, rng)
    figures = {
        f: script.consistency(script.difficulty(script.reconstitute(shards, labels, loss, f, rng), loss)) for f in (0, 0.5, 1)
    }
    assert figures[0][0] > figures[0.5][0] > figures[1][0]
    assert figures[0][1] < figures[0.5][1] < figures[1][1]
    together = script.reconstitute(shards, np.zeros_like(labels), np.argsort(np.argsort(loss)) * 1.0, 1.0, rng)
    inside, between = script.consistency(script.difficulty(together, np.argsort(np.argsort(loss)) * 1.0))
    assert inside == pytest.approx(np.sqrt((100**2 - 1) / 12), rel=1e-12)
    assert between == pytest.approx(100 * np.sqrt((10**2 - 1) / 12), rel=1e-12)


def test_consistency_is_of_the_raw_loss():
    loss = np.array([1.0, 3.0, 10.0, 10.0, 10.0])
    clients = script.difficulty([np.array([0, 1]), np.array([2, 3, 4])], loss)
    assert clients.tolist() == [[2.0, 1.0], [10.0, 0.0]]
    assert script.consistency(clients) == (0.5, 4.0)


def test_class_counts_on_mnist(real_data):
    labels = common.load_data("mnist", str(real_data)).y_train.numpy()
    rng = np.random.default_rng(0)
    shards, _ = common.partition("dirichlet", labels, 100, 0.05, rng)
    loss = rng.exponential(size=len(labels))
    for f in (0.0, 0.33, 1.0):
        new = script.reconstitute(shards, labels, loss, f, rng)
        assert np.array_equal(np.sort(np.concatenate(new)), np.arange(60000))
        for before, after in zip(shards, new, strict=True):
            assert np.array_equal(np.bincount(labels[before], minlength=10), np.bincount(labels[after], minlength=10))


# ------------------------------------------------------------------------------------------------- pacing and sorting

TABLE = {
    "linear": (100, 200, 300, 400, 499, 500),
    "quadratic": (100, 125, 200, 325, 498, 500),
    "root": (100, 300, 382, 446, 499, 500),
    "step": (100, 100, 100, 100, 100, 500),
    "exponential": (100, 100, 102, 132, 490, 500),
}


@pytest.mark.parametrize("family", TABLE)
def test_pacing(family):
    t = np.array([0, 100, 200, 300, 399, 400])
    assert tuple(script.pacing(family, t, 500, 500, 0.8, 0.2)) == TABLE[family]
    every = script.pacing(family, np.arange(501), 500, 37, 0.6, 0.01)
    assert every[0] == 1 and (np.diff(every) >= 0).all() and (every[300:] == 37).all()
    assert (script.pacing(family, t, 500, 37, 0, 0.1) == 37).all() and (script.pacing(family, t, 500, 37, 0.5, 1) == 37).all()
    for a, T in ((0.55, 100), (0.28, 25), (0.07, 100)):  # in doubles .55 x 100 is above 55: not a step late
        assert script.pacing(family, np.array([round(a * T)]), T, 50, a, 0.2) == 50


def test_sort_is_ascending_and_ties_do_not_follow_the_index():
    items, keys = np.arange(50) * 3, np.random.default_rng(0).random(50)
    assert np.array_equal(script.sort(items, keys, np.random.default_rng(1)), items[np.argsort(keys)])
    assert np.array_equal(script.sort(items, -keys, np.random.default_rng(1)), items[np.argsort(keys)[::-1]])
    tied = [script.sort(items, np.zeros(50), np.random.default_rng(seed)) for seed in (1, 2)]
    assert not np.array_equal(tied[0], tied[1]) and not np.array_equal(tied[0], items)
    assert np.array_equal(tied[0], script.sort(items, None, np.random.default_rng(1)))


def of_order(order, **flags) -> Config:
    return dataclasses.replace(PAPER, **{"data_order": order, "epochs": 3, "batch_size": 10} | flags)


def test_every_data_order_takes_the_same_steps_and_samples_from_its_prefix():
    streams, shard, loss = common.Streams(0), np.arange(47) + 100, np.random.default_rng(0).random(47)
    ranked = {"curriculum": shard[np.argsort(loss)], "anti": shard[np.argsort(-loss)]}
    for order in ORDERS:
        batches = script.schedule(of_order(order), shard, loss, streams, 0, 0)
        assert batches.shape == (15, 10) and (batches >= 0).all()
        if order in ranked:
            for t, batch in enumerate(batches):
                g = int(max(1, np.floor(47 * 0.2 + 47 * 0.8 * min(t / 12, 1) + 1e-9)))
                assert set(batch) <= set(ranked[order][:g])
    whole = script.schedule(of_order("vanilla"), shard, None, streams, 0, 0)
    assert all(np.array_equal(np.sort(whole.ravel()[i : i + 47]), shard) for i in (0, 47, 94))  # a pass shows each once
    first = [frozenset(script.schedule(of_order("random"), shard, None, streams, *key)[0]) for key in ((0, 0), (1, 0), (0, 1))]
    assert len(set(first)) == 3  # a permutation of its own for each client in each round
    for order in ORDERS:
        assert np.array_equal(script.schedule(of_order(order, pacing_b=1.0), shard, loss, streams, 0, 0), whole)


def test_a_pass_is_used_up_before_the_prefix_is_read_again_and_the_next_fills_its_last_batch():
    """By hand: batches of 4 at prefixes of 3, 3, 5 and 8 are passes of 3, 3, 3, 5 and the begin of one of 8."""
    ordered, g, begins = np.arange(8) * 10, np.array([3, 3, 5, 8]), set()
    for seed in range(200):
        flat = (script.paced_batches(ordered, g, 4, np.random.default_rng(seed)).ravel() // 10).tolist()
        assert sorted(flat[:3]) == sorted(flat[3:6]) == sorted(flat[6:9]) == [0, 1, 2] and sorted(flat[9:14]) == [0, 1, 2, 3, 4]
        begins |= set(flat[14:])
    assert begins == set(range(8))


# -------------------------------------------------------------------------------------------------- pool and budget


def played(config, key, seed=0, sizes=None):
    """The clients of every round, the state after each, and at which u all were ranked; nothing is trained."""
    state, streams, M = {"queue": [], "pool": config.clients, "updates": 0}, common.Streams(seed), config.clients
    calls, rounds = [], []

    def keys(clients):
        calls.append(state["updates"])
        return None if key is None else key[clients]

    sizes = np.ones(M) if sizes is None else sizes
    fl = SimpleNamespace(streams=streams, everyone=np.arange(M), sizes=sizes, config=config)
    fl.select = lambda t, n: common.Federation.select(fl, t, n)
    for t in range(config.rounds):
        clients = script.select(config, fl, state, keys, t)
        state["updates"] += len(clients)
        rounds.append((clients, dict(state)))
    return rounds, calls


def paper(order, **flags) -> Config:
    return dataclasses.replace(PAPER, client_order=order, **flags)


@pytest.mark.parametrize("order", ORDERS + RIVALS)
def test_the_budget_is_met_exactly(order):
    rounds, _ = played(paper(order), np.random.default_rng(0).random(100))
    assert len(rounds) == 100 and all(len(set(clients)) == 10 for clients, _ in rounds)
    assert sum(len(clients) for clients, _ in rounds) == 1000 == rounds[-1][1]["updates"]


@pytest.mark.parametrize("M, m, R, b", [(23, 7, 19, 0.1), (5, 5, 4, 0.2), (17, 1, 40, 0.01), (20, 9, 31, 0.3)])
@pytest.mark.parametrize("order", ["curriculum", "vanilla", "power-of-choice"])
def test_no_client_twice_in_a_mini_batch_whatever_the_sizes(M, m, R, b, order):
    rounds, _ = played(Config(clients=M, clients_per_round=m, rounds=R, client_b=b, client_order=order), np.arange(M) % 3)
    assert sum(len(set(clients)) for clients, _ in rounds) == R * m


def test_pool_grows_from_20_to_100_as_the_budget_is_spent():
    """K = floor(20 + .1 u) at the updates u at which all clients are scored, capped at 100 from u = 800 on."""
    rounds, calls = played(PAPER, np.random.default_rng(0).random(100))
    pools = [next(state["pool"] for _, state in rounds if state["updates"] > u) for u in calls]
    assert pools == [min(20 + u // 10, 100) for u in calls] and pools[0] == 20 and pools[-1] == 100


def test_all_are_scored_anew_only_when_the_pool_cannot_fill_a_mini_batch():
    """By hand: pools of 20, 22, 24 and 26 clients with 0, 0, 2 and 6 left waiting are 2, 2, 2 and 3 mini-batches of 10."""
    _, calls = played(PAPER, np.random.default_rng(0).random(100))
    assert calls[:5] == [0, 20, 40, 60, 90]


def test_each_pool_is_the_first_k_and_each_member_trains_once():
    key = np.random.default_rng(3).permutation(100).astype(float)
    ranked = np.argsort(key)
    rounds, calls = played(PAPER, key)
    trained = np.concatenate([clients for clients, _ in rounds])
    owed = np.zeros(100, dtype=int)  # every pool owes each of its members one update
    for u in calls:
        owed[ranked[: min(20 + u // 10, 100)]] += 1
    owed -= np.bincount(rounds[-1][1]["queue"], minlength=100)
    assert np.array_equal(np.bincount(trained, minlength=100), owed)
    assert set(trained[:20]) == set(ranked[:20])  # the first two mini-batches are the 20 first


def test_random_clients_are_drawn_anew_for_each_pool():
    rounds, _ = played(paper("random"), None)
    pools = [frozenset(np.concatenate([clients for clients, _ in rounds[i : i + 2]])) for i in (0, 2, 4)]
    assert len(set(pools)) == 3 and all(len(pool) in (20, 19, 18) or len(pool) == 20 for pool in pools)
    assert len(pools[0] - set(range(20))) > 0 and len(pools[0] & pools[1]) < 15  # not the first ids, and not the same again


def test_vanilla_deals_everyone_in_turn():
    rounds, _ = played(paper("vanilla"), None)
    for i in range(0, 100, 10):
        assert np.array_equal(np.sort(np.concatenate([clients for clients, _ in rounds[i : i + 10]])), np.arange(100))


def test_uniform_sampling_is_the_common_draw():
    config = paper("vanilla", client_sampling="uniform")
    rounds, calls = played(config, None)
    for t, (clients, _) in enumerate(rounds):
        assert np.array_equal(clients, np.sort(common.Streams(0)("select", t).permutation(100)[:10]))
    assert not calls and played(paper("curriculum", client_sampling="uniform"), np.arange(100.0))[1]


def test_cut_raggedly_the_paper_would_take_109_rounds_and_end_on_three_clients():
    """The docstring's figures, by the literal reading: mini-batches of 10, the pool's last one short."""
    u, sizes = 0, []
    while u < 1000:
        pool = min(int(20 + u / 10 + 1e-9), 100)
        cut = [10] * (pool // 10) + [pool % 10] * (pool % 10 > 0)
        for size in cut:
            size = min(size, 1000 - u)
            sizes += [size] if size else []
            u += size
    assert len(sizes) == 109 and sizes[-1] == 3


# ------------------------------------------------------------------------------------------------------------- rivals


def test_power_of_choice_trains_the_m_largest_losses_of_d_drawn_by_size():
    """Cho et al.: with d = M always the m of highest loss; with d = m, clients in proportion to their data."""
    loss = np.random.default_rng(0).random(100)
    rounds, _ = played(paper("power-of-choice", candidates=100), -loss)
    assert all(set(clients) == set(np.argsort(-loss)[:10]) for clients, _ in rounds)
    sizes = np.r_[np.full(50, 1), np.full(50, 9)]
    config = Config(clients=100, clients_per_round=1, rounds=2000, client_order="power-of-choice", candidates=1)
    drawn = np.concatenate([clients for clients, _ in played(config, -loss, sizes=sizes)[0]])
    assert abs((drawn >= 50).mean() - 0.9) < 5 * math.sqrt(0.09 / 2000)
    two, calls = played(dataclasses.replace(config, candidates=2, rounds=500), -loss)  # of two the one of higher loss
    assert loss[np.concatenate([clients for clients, _ in two])].mean() > 0.6 > loss.mean() + 0.05 and len(calls) == 500


def test_power_of_choice_never_compares_fewer_than_it_trains_nor_more_than_there_are(file, tmp_path):
    for d, asked in ((1, 2), (5, 5), (50, 9)):
        rows, _ = trained(small(file, client_order="power-of-choice", candidates=d), tmp_path)
        assert [row["scoring_downloads"] for row in rows] == [asked, 2 * asked, 3 * asked, 4 * asked]


def test_entropy_puts_balanced_clients_first(tmp_path):
    """Clients 0 .. 8 hold 1, 1, 1, 2, 2, 2, 5, 5, 5 classes: the first pool of three are the last three."""
    held, rng = (1, 1, 1, 2, 2, 2, 5, 5, 5), np.random.default_rng(0)
    y = np.concatenate([np.arange(10) % n for n in held])
    x = rng.integers(0, 255, (90, 16, 16, 1), dtype=np.uint8)
    np.savez(tmp_path / "held.npz", x_train=x, y_train=y, x_test=x, y_test=y, owner=np.repeat(np.arange(9), 10))
    flags = {"partition": "natural", "client_order": "entropy", "clients_per_round": 3, "client_b": 1 / 3, "rounds": 9}
    rows, state = trained(small(tmp_path / "held.npz", **flags), tmp_path)
    assert state["trained"][:3].sum() < state["trained"][3:6].sum() < state["trained"][6:].sum()
    assert rows[0]["scoring_scalars"] == rows[-1]["scoring_scalars"] == 9 and rows[-1]["scoring_downloads"] == 0
    one = trained(small(tmp_path / "held.npz", **flags | {"rounds": 1}), tmp_path)[1]["trained"]
    assert one.tolist() == [0] * 6 + [1] * 3


def test_coverage_keeps_the_counts_level(file, tmp_path):
    flags = {"client_order": "coverage", "clients_per_round": 3, "client_b": 0.2}
    for rounds in range(1, 8):  # a pool of one mini-batch: nobody a second time before all the first
        _, state = trained(small(file, rounds=rounds, client_a=1e6, **flags), tmp_path)
        assert sorted(state["trained"].tolist()) == sorted(np.bincount(np.arange(3 * rounds) % 9, minlength=9).tolist())
        _, state = trained(small(file, rounds=rounds, **flags), tmp_path)  # a growing pool is dealt in a random order
        assert state["trained"].max() - state["trained"].min() <= 2
        _, state = trained(small(file, rounds=rounds, client_a=1e6, **flags | {"client_b": 0.5}), tmp_path)  # one of 4 waits
        promised = state["trained"] + torch.tensor([int(m in state["queue"]) for m in range(9)])
        assert promised.max() - promised.min() <= 1


def test_hics_trains_everyone_once_then_the_most_balanced(file, tmp_path):
    flags = {"client_order": "hics", "clients_per_round": 3, "client_b": 0.3, "client_a": 1e6}
    rows, state = trained(small(file, rounds=3, **flags), tmp_path)
    assert (state["trained"] == 1).all() and state["estimate"].isfinite().all() and state["estimate"].max() <= math.log(5)
    for rounds in (4, 6):
        _, more = trained(small(file, rounds=rounds, **flags), tmp_path)
        best = torch.argsort(more["estimate"], descending=True)[:3].tolist()
        assert torch.equal(more["estimate"], state["estimate"])  # of the first update alone
        assert set(np.flatnonzero(more["trained"] > 1)) == set(best) and (more["trained"][best] == rounds - 2).all()
    assert rows[-1]["scoring_downloads"] == rows[-1]["scoring_scalars"] == 0


def test_estimated_entropy_is_that_of_the_labels_for_a_net_that_knows_nothing():
    """One step from equal logits moves the bias by eta (share - 1/C), so T = eta ln-slopes: against the closed form."""
    classes, eta = 4, 0.5
    model = SimpleNamespace(trainable=10)
    fl = SimpleNamespace(model=model, data=SimpleNamespace(classes=classes))
    shares = torch.tensor([[0.25] * 4, [0.7, 0.1, 0.1, 0.1], [1.0, 0, 0, 0]], dtype=torch.float64)
    weights = torch.zeros(3, 12, dtype=torch.float64)  # six weights, four biases of the output, two statistics
    weights[:, 6:10] = eta * (shares - 1 / classes)
    weights[:, :6], weights[:, 10:] = 9.0, -9.0
    update = SimpleNamespace(weights=weights + 1.5, length=np.full(3, eta))
    for T in (0.1, 2.0):
        got = script.estimated_entropy(fl, torch.full((12,), 1.5, dtype=torch.float64), update, T)
        soft = [[math.exp(p / T) for p in row] for row in shares.tolist()]
        wanted = [-sum(w / sum(row) * math.log(w / sum(row)) for w in row) for row in soft]
        assert got.tolist() == pytest.approx(wanted, rel=1e-12) and (got.diff() < 0).all()


def test_hics_wants_an_output_bias(file, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nclass Net(nn.Sequential):\n    def __init__(self, channels, side, classes):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(channels * side * side, classes, bias=False))\n"
    )
    config = small(file, client_order="hics", model=f"{tmp_path / 'mine.py'}:Net")
    with pytest.raises(common.UsageError, match="^--client-order hics: --model .*mine.py:Net does not end with the bias"):
        config.federation(common.load_data(config.dataset), common.Streams(0))  # asked before any arm is trained


def test_under_solo_scoring_downloads_no_net(file, tmp_path):
    rows, _ = trained(small(file, client_order="curriculum", base="solo"), tmp_path)
    assert rows[-1]["scoring_downloads"] == rows[-1]["downloads"] == rows[-1]["received_mb"] == 0 < rows[-1]["scoring_scalars"]


def test_hics_estimate_follows_the_true_label_entropy(tmp_path):
    """Digits, 20 clients of Dir(.2), all trained once: Spearman's correlation with what the server cannot see."""
    from scipy.stats import spearmanr

    flags = {"clients_per_round": 10, "rounds": 2, "epochs": 2, "client_b": 0.5, "client_a": 1e6, "threads": 1}
    config = Config(client_order="hics", data_order="vanilla", **flags)
    _, state = trained(config, tmp_path)
    shards, *_, fl = deal(config, tmp_path)
    counts = [np.bincount(fl.data.y_train.numpy()[shard], minlength=10) for shard in shards]
    true = [-sum(n / sum(own) * math.log(n / sum(own)) for n in own if n) for own in counts]
    assert spearmanr(true, state["estimate"].numpy())[0] > 0.7


# --------------------------------------------------------------------------------------------------------- the expert


def deal(config, folder):
    """(shards, loss, difficulty, federation) of Algorithm 2 under this configuration."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    run = experiment.Run(config, "client", "", 0, folder)
    fl = common.Federation(config, common.load_data(config.dataset), run.streams)
    loss, table = script.deal(config, fl, run)
    return fl.shards, loss, table, fl


def test_the_expert_never_sees_test_data(file, tmp_path):
    with np.load(file) as saved:
        arrays = dict(saved)
    np.savez(tmp_path / "blank.npz", **arrays | {"x_test": arrays["x_test"] * 0, "y_test": arrays["y_test"] * 0})
    (one, loss, *_), (other, again, *_) = (
        deal(small(name, expert_epochs=20), tmp_path / f"run{i}") for i, name in enumerate((file, tmp_path / "blank.npz"))
    )
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True)) and np.array_equal(loss, again)
    assert loss.mean() < np.log(5) / 2  # it did learn something


def test_an_expert_that_diverged_ranks_nobody(file, tmp_path):
    """NaN losses would be sorted without a word, and every table and arm would stand on that order."""
    with pytest.raises(common.NonFiniteError, match="expert"):
        deal(small(file, lr=1e6, expert_epochs=3), tmp_path)


def test_an_expert_with_finite_weights_and_an_infinite_loss_ranks_nobody(file, tmp_path, monkeypatch):
    honest = common.score
    monkeypatch.setattr(common, "score", lambda *r: [(loss * np.inf, guess) for loss, guess in honest(*r)])
    with pytest.raises(common.NonFiniteError, match="cannot rank"):
        deal(small(file), tmp_path)


def test_one_expert_serves_all_settings_of_a_trial(file, tmp_path, monkeypatch, capsys):
    """Swept are f_ord, score and alpha, which the expert does not depend on; expert_epochs and lr, which it does."""
    made, honest = [], common.Federation.train_centrally
    monkeypatch.setattr(common.Federation, "train_centrally", lambda fl, n: made.append(n) or honest(fl, n))
    monkeypatch.setattr(script, "federate", lambda config, data, run: made.append(deal_of(config, data, run)))

    def deal_of(config, data, run):
        fl = common.Federation(config, data, run.streams)
        return script.deal(config, fl, run)[0]

    sweeps = (
        ("--f-ord 0 1 --score G E --alpha 0.5 2", 2),
        ("--expert-epochs 1 2 --lr 0.01 0.02", 8),
        ("--base fedavg moon", 4),
    )
    for flags, experts in sweeps:
        made.clear()
        command = f"--dataset {file} --clients 9 --clients-per-round 2 --trials 2 --threads 1 --client-order curriculum"
        with pytest.raises((SystemExit, LookupError, AttributeError)):  # nothing is recorded
            script.main([*command.split(), *flags.split(), "--data-order", "vanilla", "--out", str(tmp_path / str(experts))])
        assert sum(isinstance(each, int) for each in made) == experts


def test_arms_that_tune_chose_other_rates_for_are_dealt_the_same_data(file, tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(experiment.Run, "rehearse", lambda run, config: config.lr if run.method == "client" else 1 - config.lr)
    monkeypatch.setattr(script, "report", lambda df, runs, folder: seen.update({run.method: run.load() for run in runs}))
    command = "--clients 6 --clients-per-round 3 --rounds 1 --epochs 1 --trials 1 --threads 1 --data-order vanilla"
    script.main([*command.split(), "--tune", "lr=.01,.1", "--dataset", str(file), "--out", str(tmp_path)])
    assert [saved["rows"][0]["tuned"] for saved in seen.values()] == [0.1, 0.01]
    one, other = (saved["state"]["difficulty"] for saved in seen.values())
    assert torch.equal(one, other)


def test_stratify_keeps_class_counts_and_its_absence_only_sizes(file, tmp_path):
    labels, counts = common.load_data(str(file)).y_train.numpy(), {}
    base = common.Federation(small(file), common.load_data(str(file)), common.Streams(Config.seed, 0)).shards
    for stratify in (True, False):
        shards, loss, table, _ = deal(small(file, stratify=stratify), tmp_path)
        counts[stratify] = np.array([np.bincount(labels[shard], minlength=5) for shard in shards])
        means = np.array([[loss[shard].mean() for shard in when] for when in (base, shards)])
        np.testing.assert_allclose(table[:, :, 0].numpy(), means, rtol=1e-12)  # before and after
    assert np.array_equal(counts[True], [np.bincount(labels[shard], minlength=5) for shard in base])
    assert np.array_equal(counts[False].sum(1), counts[True].sum(1)) and not np.array_equal(counts[False], counts[True])
    assert (np.diff([loss[shard].mean() for shard in shards]) > 0).all()  # without classes, client by client harder


# ------------------------------------------------------------------------------------------------------- whole arms


def test_with_b_1_all_sixteen_arms_are_one_program(file, tmp_path):
    results = {
        orders: trained(small(file, client_b=1.0, pacing_b=1.0, client_order=orders[0], data_order=orders[1]), tmp_path)
        for orders in itertools.product(ORDERS, ORDERS)
    }
    costly = ("downloads", "scoring_downloads", "scoring_scalars", "received_mb", "sent_mb")
    bare = {
        orders: [{k: v for k, v in row.items() if k not in costly} for row in rows] for orders, (rows, _) in results.items()
    }
    for orders, (_, state) in results.items():
        assert torch.equal(state["weights"], results["vanilla", "vanilla"][1]["weights"]), orders
        assert bare[orders] == bare["vanilla", "vanilla"]


def test_arms_differ_where_they_should_and_share_the_partition(file, tmp_path):
    orders = list(itertools.product(("curriculum", "vanilla"), repeat=2))
    results = [trained(small(file, client_order=client, data_order=data), tmp_path) for client, data in orders]
    tables = [state["difficulty"] for _, state in results]
    assert all(torch.equal(table, tables[0]) for table in tables) and tables[0].shape == (2, 9, 2)
    weights = [state["weights"] for _, state in results]
    assert all(not torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])
    pools = [[row["pool"] for row in rows] for rows, _ in results]
    assert pools[2] == pools[3] == [9] * 4 and pools[0] == pools[1] == [2, 4, 4, 8]  # by hand: 1.8 + 7.2 u / 6.4


EFFECTS = {"score": "E", "client_a": 0.3, "client_b": 0.6, "pacing_a": 0.3, "pacing_b": 0.7, "pacing": "quadratic"}
EFFECTS |= {"client_sampling": "uniform", "candidates": 7, "temperature": 0.01, "lr_power": 0.3, "mu": 0.7, "server_lr": 0.3}


@pytest.mark.parametrize(
    "orders",
    ["curriculum vanilla", "vanilla anti", "vanilla vanilla", "random random", "power-of-choice vanilla", "hics vanilla"],
)
def test_unread_names_the_flags_without_effect(file, tmp_path, orders):
    """Each flag changed on its own: the weights stay exactly where the arm is said not to read it."""
    client, data = orders.split()
    flags = {"client_order": client, "data_order": data, "rounds": 8, "candidates": 4, "lr": 0.05}
    flags["lr_alpha"] = 0.1 * (client == "random")
    config = small(file, **flags)
    reference = trained(config, tmp_path)[1]["weights"]
    for name, value in EFFECTS.items():
        weights = trained(dataclasses.replace(config, **{name: value}), tmp_path)[1]["weights"]
        assert torch.equal(weights, reference) == (name in script.unread(config)), name
    assert set(script.unread(config)) <= set(EFFECTS)


def test_clients_weigh_by_their_samples_and_a_dropped_one_takes_its_weight_along(file, tmp_path, monkeypatch):
    weighed, honest = [], common.train

    def poisoned(model, start, data, batches, **flags):
        update = honest(model, start, data, batches, **flags)
        update.weights[0] = np.nan if len(batches) > 1 else update.weights[0]  # the first client of a round, not the expert
        return update

    def aggregate(base, x, update, clients, sizes):
        weighed.append((clients.tolist(), list(sizes), len(update.weights)))
        return x

    monkeypatch.setattr(common, "train", poisoned)
    monkeypatch.setattr(common.FedAvg, "aggregate", aggregate)
    config = small(file, clients_per_round=3, on_nonfinite="drop", rounds=3, alpha=0.3)
    rows, state = trained(config, tmp_path)
    sizes = [len(shard) for shard in deal(config, tmp_path)[0]]
    assert len(weighed) == 3 and all(own == [sizes[m] for m in clients] and n == 2 for clients, own, n in weighed)
    assert [(row["clients"], row["dropped"], row["uploads"]) for row in rows] == [(2, 1, 2), (2, 1, 4), (2, 1, 6)]
    assert state["updates"] == 9 and len(set(sizes)) > 1  # who was dropped has spent its part of the budget
    assert state["trained"].sum() == 6 and [row["downloads"] - row["scoring_downloads"] for row in rows] == [3, 6, 9]


@pytest.mark.parametrize("orders", ["curriculum curriculum", "random vanilla", "hics vanilla", "coverage vanilla"])
def test_interrupted_and_resumed_is_the_same_run(file, tmp_path, monkeypatch, orders):
    """Stopped while a pool is half used, with SCAFFOLD's state, then resumed: same rows, same weights, bit for bit."""
    client, data = orders.split()
    config = small(file, rounds=6, client_b=0.6, base="scaffold", client_order=client, data_order=data)
    whole_rows, whole = trained(config, tmp_path / "whole")
    honest = experiment.Run.record

    def stop(run, t, *clients, **columns):
        if t == 3:
            raise KeyboardInterrupt
        honest(run, t, *clients, **columns)

    monkeypatch.setattr(experiment.Run, "record", stop)
    with pytest.raises(KeyboardInterrupt):
        trained(config, tmp_path / "cut")
    monkeypatch.setattr(experiment.Run, "record", honest)
    rows, state = trained(config, tmp_path / "cut", resume=True)
    assert rows == whole_rows and torch.equal(state["weights"], whole["weights"])
    assert state["queue"] == whole["queue"] and state["updates"] == whole["updates"] == 12


@pytest.mark.parametrize("base, models", [("moon", 1), ("solo", 9)])
def test_bases_with_models_of_their_own(file, tmp_path, monkeypatch, base, models):
    """SOLO's clients are scored by the model each of them holds; MOON's net carries its projection head into the expert."""
    seen, honest = [], common.score
    monkeypatch.setattr(common, "score", lambda model, theta, *r: seen.append(theta) or honest(model, theta, *r))
    rows, _ = trained(small(file, base=base, rounds=3), tmp_path)
    assert len(rows) == 3 and seen[-1].reshape(-1, seen[-1].shape[-1]).shape[0] == models
    if base == "solo":
        assert (seen[-1] != seen[1]).any(1).sum() >= 2  # who trained is scored by what it trained


# ------------------------------------------------------------------------------------------------------ command line


def test_command_line_writes_the_two_by_two_and_draws_what_the_checkpoint_holds(file, tmp_path, capsys, monkeypatch):
    from matplotlib.figure import Figure

    figures, runs, save, honest = {}, {}, Figure.savefig, script.federate
    monkeypatch.setattr(Figure, "savefig", lambda fig, path, **k: figures.update({path.name: fig}) or save(fig, path, **k))
    monkeypatch.setattr(
        script, "federate", lambda c, data, run: runs.update({(run.method, run.trial): run}) or honest(c, data, run)
    )
    flags = "--clients 6 --clients-per-round 3 --rounds 2 --epochs 8 --expert-epochs 9 --trials 2 --threads 1 --partition iid"
    flags += " --lr 0.01 --batch-size 2"
    script.main([*flags.split(), "--dataset", str(file), "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    assert len(rows) == 4 * 2 * 2 and {row["method"] for row in rows} == {"client+data", "client", "data", "vanilla"}
    assert {(row["uploads"]) for row in rows if row["round"] == "2"} == {"6"}
    two_by_two = printed[printed.index("client orders by data orders") :].replace(" +- ", "+-")
    cells = next(line for line in two_by_two.splitlines() if line.split()[:1] == ["vanilla"]).split()[-2:]
    finals = {
        method: np.array([float(row["accuracy"]) for row in rows if row["method"] == method and row["round"] == "2"])
        for method in ("client", "data", "vanilla")
    }
    for cell, method in zip(cells, ("data", "vanilla"), strict=True):
        assert cell == f"{finals[method].mean():.2f}+-{finals[method].std(ddof=1):.2f}"
    A, half = (
        finals["client"] - finals["vanilla"],
        12.7062047 * (finals["client"] - finals["vanilla"]).std(ddof=1) / math.sqrt(2),
    )
    gains = printed[printed.index("A_o =") :].splitlines()
    line = next(" ".join(line.split()) for line in gains if line.split()[:1] == ["client"])
    assert line == f"client {A.mean():+.2f} [{A.mean() - half:+.2f}, {A.mean() + half:+.2f}]"
    for trial, row in enumerate(csv.DictReader((tmp_path / "consistency.csv").open())):
        means, stds = runs["data", trial].load()["state"]["difficulty"].unbind(2)
        assert [float(row[name]) for name in ("inside_before", "inside")] == pytest.approx(stds.mean(1).tolist(), rel=1e-12)
        between = means.std(1, unbiased=False).tolist()
        assert [float(row[name]) for name in ("between_before", "between")] == pytest.approx(between, rel=1e-12)
    table = runs["client", 0].load()["state"]["difficulty"]
    for axis, (mean, std) in zip(figures["clients.png"].axes, table.transpose(1, 2).tolist(), strict=True):
        dots, _, [bars] = axis.containers[0]
        assert dots.get_xdata().tolist() == list(range(6)) and dots.get_ydata().tolist() == mean
        ends = [[m - min(m, s), m + s] for m, s in zip(mean, std, strict=True)]
        assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [pytest.approx(end) for end in ends]
    lines = [np.asarray(line.get_ydata()).tolist() for line in figures["difficulty.png"].axes[0].lines]
    for method in ("client+data", "client", "data", "vanilla"):
        own = [[float(r["expert_loss"]) for r in rows if r["method"] == method and r["round"] == t] for t in "12"]
        assert any(line == pytest.approx([np.mean(both) for both in own]) for line in lines), method
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("clients.png", "difficulty.png", "accuracy.png"))


def test_a_sweep_shows_the_consistency_of_every_setting(file, tmp_path, monkeypatch):
    """The vanilla arm does not read --score, so that it is trained once for G and E: it has the dealt data of its f_ord."""
    monkeypatch.setattr(experiment, "curves", lambda *r, **k: None)
    flags = "--clients 6 --clients-per-round 3 --rounds 1 --epochs 1 --expert-epochs 9 --trials 2 --threads 1 --partition iid"
    sweep = "--client-order vanilla curriculum --data-order vanilla --score G E --f-ord 0 1"
    script.main([*flags.split(), *sweep.split(), "--dataset", str(file), "--out", str(tmp_path)])
    rows = {(row.pop("setting"), row.pop("trial")): row for row in csv.DictReader((tmp_path / "consistency.csv").open())}
    assert len(rows) == 8 and len({tuple(row.values()) for row in rows.values()}) == 4
    for (setting, trial), row in rows.items():
        assert row == rows[setting.replace("score=G", "score=E"), trial]
        sorted_ = rows[setting.replace("f_ord=0.0", "f_ord=1.0"), trial]
        assert row["between_before"] == sorted_["between_before"] and float(row["between"]) <= float(sorted_["between"])


@pytest.mark.parametrize(
    "flags",
    [
        "--client-order easy",
        "--data-order coverage",
        "--f-ord 1.5",
        "--client-b -1",
        "--clients-per-round 30 --clients 20",
        "--score L",
        "--clients 2000",
        "--temperature 0",
        "--candidates 0",
    ],
)
def test_wrong_flags_give_one_line(flags, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        script.main([*flags.split(), "--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1 and not (tmp_path / "metrics.csv").exists()


def test_default_budget_trains_every_client_ten_times_on_average():
    """U / M >= 10, and the pool's first fifth is no smaller than a round: who is in it is decided by the ranking."""
    config = Config()
    assert config.rounds * config.clients_per_round / config.clients >= 10
    assert config.client_b * config.clients >= config.clients_per_round


OLD = {"consistency", "consistency-iid", "fig4", "fig4-iid", "fig5", "fig5-iid", "fig6-clients", "fig6-data", "fig7"}


def grid(preset: str) -> dict[str, list[str]]:
    """{flag: its values} of a preset's command line; a later flag replaces an earlier one."""
    flags = {}
    for word in shlex.split(script.PRESETS[preset], comments=True):
        if word.startswith("--"):
            values = flags[word] = []
        else:
            values.append(word)
    return flags


def test_presets_are_the_papers_settings():
    assert OLD | {"fig6-clients-iid", "fig6-data-iid", "rivals"} == set(script.PRESETS)
    for label in script.PRESETS:
        flags = grid(label)
        paper = {"--dataset": "cifar10", "--clients": "100", "--clients-per-round": "10", "--lr": "0.001"}
        paper |= {"--lr-alpha": "0.001", "--expert-epochs": "20"}
        assert {name: flags[name] for name in paper} == {name: [value] for name, value in paper.items()}, label
        assert (flags["--rounds"], flags["--epochs"]) == ((["1"],) * 2 if "consistency" in label else (["100"], ["10"]))
        assert ("--no-stratify" in flags) == ("iid" in label) == (flags.get("--partition") == ["iid"])
        assert not {"--momentum", "--weight-decay", "--batch-size", "--lr-power", "--trials"} & set(flags)  # the defaults are
    assert (Config.momentum, Config.weight_decay, Config.batch_size, Config.lr_power, Config.trials) == (0.9, 5e-4, 10, 0.75, 3)
    assert (Config.alpha, Config.f_ord, Config.pacing, Config.client_a, Config.client_b) == (0.2, 1.0, "linear", 0.8, 0.2)
    fig7 = grid("fig7")
    assert (fig7["--base"], fig7["--score"], fig7["--f-ord"]) == (["fedprox"], ["E"], ["0.9"]) and "--client-order" not in fig7
    for label, ends, score in (("fig4", ["0", "1"], ["E"]), ("fig6-data", ["0"], ["G", "E"])):
        for each in (grid(label), grid(f"{label}-iid")):
            assert (each["--f-ord"], each["--score"], each["--client-order"]) == (ends, score, ["vanilla"])
    for label in ("fig5", "fig5-iid", "fig6-clients", "fig6-clients-iid", "rivals"):
        assert grid(label)["--data-order"] == ["vanilla"] and "--f-ord" not in grid(label)
    for label in ("consistency", "fig4", "fig5", "fig6-clients", "fig6-data"):
        assert grid(label)["--alpha"] == ["0.2", "0.05"]
    assert grid("fig5")["--client-order"] == grid("fig4")["--data-order"] == list(ORDERS)
    assert grid("fig6-clients")["--client-order"] == grid("fig6-data")["--data-order"] == ["curriculum", "random"]
    assert set(grid("rivals")["--client-order"]) == {"curriculum", "anti", "random", *RIVALS}


def test_names_of_the_arms():
    names = {
        (client, data): script.name(SimpleNamespace(client_order=client, data_order=data))
        for client, data in itertools.product(ORDERS + RIVALS, ORDERS)
    }
    assert (
        len(set(names.values())) == 32 and names["vanilla", "vanilla"] == "vanilla" and names["vanilla", "anti"] == "data-anti"
    )
    assert names["curriculum", "curriculum"] == "client+data" and names["anti", "curriculum"] == "client-anti+data"
    assert names["curriculum", "vanilla"] == "client" and set(SIGN) == {"curriculum", "anti"}


def test_ties_stay_in_the_order_of_the_permutation():
    keys = np.arange(300) % 3 * 1.0
    shuffled = np.random.default_rng(1).permutation(300)
    wanted = [i for key in range(3) for i in shuffled if keys[i] == key]
    assert script.sort(np.arange(300), keys, np.random.default_rng(1)).tolist() == wanted
