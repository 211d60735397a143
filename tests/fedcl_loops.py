"""FedCL once more: loops over rounds, clients, steps and samples with torch's own layers, float64.

Of the project it shares the random streams, the initial weights and the dealing of samples to
clients. Each rule is written down again, and two bases. `Loops` is fedcl_fgn.py, `StudyLoops`
selection.py, `CriticalLoops` criticalfl.py.
"""

import csv
import math
from pathlib import Path

import numpy as np
import ordinary
import pytest
import torch
import torch.nn.functional as F
from plain_rules import BySize

import common
import experiment
import fedcl_fgn
from data import load_data
from results.fedcl_fgn import criticalfl, selection

COMMAND = (
    "--dtype float64 --trials 1 --clients 6 --clients-per-round 2 --alpha 0.6 --min-size 8 "
    "--epochs 2 --batch-size 5 --lr 0.03 --momentum 0.7 --weight-decay 0.02 --lr-decay 0.8 "
    "--eval-every 2 --rounds 5 --seed 5 --delta 0.05 --mu 0.3 --jobs 1 "
    "--device-spread 0.5"
)
FLAGS = COMMAND.split()


def write_data(path: Path) -> Path:
    """75 training and 20 test images of 16x16, of three classes that a net can tell apart."""
    rng = np.random.default_rng(3)
    y = np.arange(95) % 3
    stripe = np.arange(16) // 6 == y[:, None]
    x = rng.integers(0, 120, (95, 16, 16, 1)) + 60 * stripe[:, None, :, None]
    x = x.astype(np.uint8)
    np.savez(path, x_train=x[:75], y_train=y[:75], x_test=x[75:], y_test=y[75:])
    return path


def read(folder: Path) -> list[dict]:
    """metrics.csv."""
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def of(rows: list[dict], method: str) -> list[dict]:
    return [row for row in rows if row["method"] == method]


def load_state(folder: Path, method: str) -> dict:
    """What the first trial's checkpoint holds."""
    for path in (folder / "checkpoints").glob("*-trial0.pt"):
        content = torch.load(path, weights_only=True)["content"]
        if content["rows"][0]["method"] == method:
            return content["state"]
    raise LookupError(method)


def assert_same_rows(rows: list[dict], expected: list[dict]) -> None:
    """metrics.csv against a run of loops; the clock is a sum of numbers rounded to 1e-6."""
    assert len(rows) == len(expected)
    for row, wanted in zip(rows, expected, strict=True):
        cells = {}
        for column in row.keys() - {"setting", "method", "trial", "seconds"}:
            if row[column]:
                cells[column] = float(row[column])
        assert cells.pop("clock") == pytest.approx(wanted["clock"], abs=1e-5)
        wanted = {column: value for column, value in wanted.items() if column != "clock"}
        assert cells == pytest.approx(wanted, rel=1e-9, abs=1e-9)


class Loops:
    """The run that `flags` describe. rows: metrics.csv; theta: the last net."""

    script = fedcl_fgn

    def __init__(self, flags: list[str]):
        [self.config], _ = experiment.parse(self.script.Config, {}, "doc", flags)
        self.flags = flags
        self.data = load_data(self.config.dataset)
        self.streams = common.Streams(self.config.seed, 0)
        fl = common.Federation(self.config, self.data, self.streams)
        self.shards = fl.shards
        self.N = [len(shard) for shard in fl.shards]
        self.M = len(self.N)
        self.theta = fl.model.init(self.streams.seed("init"))
        self.rows = []
        self.run()

    # -------------------------------------------------------------------------------- the net

    def net(self, theta):
        return ordinary.fill(ordinary.lenet(1, 16, 3).double(), theta)

    def gradient(self, theta, samples, label=None):
        """Gradient (P,) and value of these samples' mean loss, or of one's -log p(label)."""
        x = ordinary.normalise(self.data, self.data.x_train[samples])
        y = self.data.y_train[samples]
        if label is not None:
            y = torch.tensor([label])
        net = self.net(theta)
        loss = F.cross_entropy(net(x), y)
        parts = torch.autograd.grad(loss, list(net.parameters()))
        return torch.cat([part.flatten() for part in parts]), loss.item()

    # ------------------------------------------------------------------------- local training

    def batches(self, t, m):
        rng = self.streams("batches", t, m)
        found = []
        for _ in range(self.config.epochs):
            order = rng.permutation(self.shards[m])
            for begin in range(0, len(order), self.config.batch_size):
                found.append(order[begin : begin + self.config.batch_size])
        return found

    def train(self, t, m, eta):
        """Client m's net, mean ||g||^2, mean loss, the length of its way, its samples."""
        c = self.config
        w = self.theta.clone()
        v = torch.zeros_like(w)
        norms = []
        losses = []
        samples = 0
        travelled = pace = 0.0
        for batch in self.batches(t, m):
            g, loss = self.gradient(w, batch)
            norms.append(float(g @ g))
            losses.append(loss)
            if c.base == "fedprox":
                g = g + c.mu * (w - self.theta)
            v = c.momentum * v + g + c.weight_decay * w
            w = w - eta * v
            pull = c.mu * travelled if c.base == "fedprox" else 0
            pace = c.momentum * pace + 1 - pull
            travelled += eta * pace
            samples += len(batch)
        return w, np.mean(norms), np.mean(losses), travelled, samples

    # -------------------------------------------------------------------------------- the base

    def aggregate(self, p, sent, lengths):
        """The next net from {client: weight}, {client: net}, {client: length}."""
        if self.config.base == "fednova":
            d = sum(p[m] * (self.theta - sent[m]) / lengths[m] for m in p)
            return self.theta - sum(p[m] * lengths[m] for m in p) * d
        return sum(p[m] * sent[m] for m in p)

    # -------------------------------------------------------------------------- FGN and FedFIM

    def samples_read(self, t, m):
        count = self.config.detect_samples
        if count:
            return self.streams("detect", t, m).permutation(self.shards[m])[:count]
        return self.shards[m]

    def norm(self, t, m):
        """Mean over samples of ||gradient||^2 at theta."""
        norms = []
        for i in self.samples_read(t, m):
            g, _ = self.gradient(self.theta, [i])
            norms.append(float(g @ g))
        return np.mean(norms)

    def trace(self, t, m):
        """Mean over samples of sum_y p(y) ||grad log p(y)||^2 at theta."""
        traces = []
        for i in self.samples_read(t, m):
            x = ordinary.normalise(self.data, self.data.x_train[[i]])
            p = torch.softmax(self.net(self.theta)(x), 1)[0].detach()
            for label in range(3):
                g, _ = self.gradient(self.theta, [i], label)
                traces.append(float(p[label]) * float(g @ g))
        return 3 * np.mean(traces)

    # ----------------------------------------------------------------------------------- sizes

    def begin(self):
        """What the arm knows before the first round."""

    def size(self, t):
        """n of round t, from the rows before it."""
        c = self.config
        if t == 0 or c.method == "base":
            return c.clients_per_round
        n = self.rows[-1]["clients"]
        if c.method == "cl":
            return self.change(n, self.rows[-1]["critical"], not self.rows[-1]["critical"])
        u = self.streams("random size", t - 1).random()
        return self.change(n, u < c.p_double, c.p_double <= u < c.p_double + c.p_halve)

    def change(self, n, doubles, halves):
        if doubles:
            return min(2 * n, self.M)
        if halves:
            return max(n // 2, self.config.clients_per_round // 2, 1)
        return n

    def is_critical(self, now):
        """Eq. 2, multiplied out."""
        if not self.rows:
            return True
        return now >= self.rows[-1][self.config.detector] * (1 + self.config.delta)

    def draw(self, t, n):
        """{client: weight}, the weights with sum 1."""
        clients = sorted(self.streams("select", t).permutation(self.M)[:n].tolist())
        total = sum(self.N[m] for m in clients)
        return {m: self.N[m] / total for m in clients}

    def eta(self, t):
        return self.config.lr * self.config.lr_decay**t

    def in_fgn(self, eta):
        return eta

    def fgn(self, t, p, eta, norms):
        return sum(p[m] * self.in_fgn(eta) * norms[m] for m in p)

    def is_over(self, t):
        return t == self.config.rounds

    # ----------------------------------------------------------------------------------- the run

    def run(self):
        self.begin()
        t = 0
        while not self.is_over(t):
            self.rows.append(self.round(t))
            t += 1
            if t % self.config.eval_every == 0 or self.is_over(t):
                self.rows[-1] |= self.test()

    def round(self, t):
        c = self.config
        eta = self.eta(t)
        p = self.draw(t, self.size(t))
        sent = {}
        norms = {}
        losses = {}
        lengths = {}
        samples = {}
        for m in p:
            sent[m], norms[m], losses[m], lengths[m], samples[m] = self.train(t, m, eta)
            if c.fgn == "per_sample":
                norms[m] = self.norm(t, m)
        row = {"round": t + 1, "clients": len(p), "train_loss": np.mean([*losses.values()])}
        row["fgn"] = self.fgn(t, p, eta, norms)
        if c.method == "cl":
            if c.detector == "fim":
                row["fim"] = sum(p[m] * self.trace(t, m) for m in p)
            row["critical"] = int(self.is_critical(row[c.detector]))
        self.theta = self.aggregate(p, sent, lengths)
        before = self.rows[-1] if self.rows else {}
        megabytes = len(p) * len(self.theta) * 8 / 1e6
        row["uploads"] = before.get("uploads", 0) + len(p)
        row["samples"] = before.get("samples", 0) + sum(samples.values())
        row["received_mb"] = before.get("received_mb", 0) + megabytes
        row["sent_mb"] = before.get("sent_mb", 0) + megabytes
        seconds = self.seconds(samples, 2 * megabytes / len(p))
        row["clock"] = before.get("clock", 0) + max(seconds)
        row["waiting"] = 1 - np.mean(seconds) / max(seconds)
        return row

    def seconds(self, samples, megabytes):
        """Simulated, of {client: samples} that receive and send so many megabytes."""
        normal = self.streams("devices").standard_normal((2, self.M))
        slowness, bandwidth = np.exp(self.config.device_spread * normal)
        found = []
        for m, count in samples.items():
            found.append(0.01 * count * slowness[m] + megabytes / bandwidth[m])
        return found

    def test(self):
        logits = self.net(self.theta)(ordinary.normalise(self.data, self.data.x_test)).detach()
        correct = logits.argmax(1) == self.data.y_test
        loss = F.cross_entropy(logits, self.data.y_test)
        return {"accuracy": 100 * float(correct.double().mean()), "loss": float(loss)}


class StudyLoops(BySize, Loops):
    """The same with a budget, draws by size, and the arms longer and constant."""

    script = selection

    def begin(self):
        if self.config.method == "constant":
            place = self.flags.index("--method") + 1
            rows = StudyLoops([*self.flags[:place], "cl", *self.flags[place + 1 :]]).rows
            self.rounds = len(rows)
            self.total = sum(row["clients"] for row in rows)

    def draw(self, t, n):
        if self.config.select == "uniform" or self.config.method == "longer":
            return super().draw(t, n)
        drawn = self.by_size(t, n)
        return {m: drawn[m] / sum(self.N) for m in sorted(drawn)}

    def batches(self, t, m):
        whole = super().batches(t, m)
        if self.config.method != "longer":
            return whole
        n = self.config.n or self.config.clients_per_round
        by_size = sum(p * N for p, N in zip(self.inclusion(n), self.N, strict=True))
        passes = self.config.epochs * by_size / (n * np.mean(self.N))
        rng = self.streams("batches", t, m)
        found = []
        for _ in range(math.ceil(passes)):
            order = rng.permutation(self.shards[m])
            for begin in range(0, len(order), self.config.batch_size):
                found.append(order[begin : begin + self.config.batch_size])
        return found[: round(passes * math.ceil(self.N[m] / self.config.batch_size))]

    def spent(self):
        return self.rows[-1]["uploads"] if self.rows else 0

    def size(self, t):
        c = self.config
        if c.method == "cl":
            n = super().size(t)
        elif c.method == "constant":
            ends = [math.floor(0.5 + self.total * i / self.rounds) for i in (t, t + 1)]
            n = ends[1] - ends[0]
        else:
            n = c.n or c.clients_per_round
        return min(n, c.budget - self.spent()) if c.budget else n

    def eta(self, t):
        if self.config.budget:
            t = self.spent() / self.config.clients_per_round
        return super().eta(t)

    def in_fgn(self, eta):
        return eta if self.config.fgn_lr else 1

    def round(self, t):
        return super().round(t) | {"scored": 0}

    def is_over(self, t):
        if self.config.budget:
            return self.spent() == self.config.budget
        return super().is_over(t)


class CriticalLoops(Loops):
    """The later code's rule and FGN, and FedAvg with FedCL's uploads, more of them early."""

    script = criticalfl

    def begin(self):
        self.judged = [0.0] * 12
        if self.config.method == "early":
            place = self.flags.index("--method") + 1
            rows = Loops([*self.flags[:place], "cl", *self.flags[place + 1 :]]).rows
            self.sizes = self.spread([row["clients"] for row in rows])

    def spread(self, clients):
        """Takes uploads away from rounds of M clients, the last ones first."""
        third = max(1, len(clients) // 3)
        late = int(min(np.mean(clients), np.mean(clients[-third:])))
        sizes = [self.M] * len(clients)
        for t in reversed(range(len(clients))):
            sizes[t] = max(late, sizes[t] - (sum(sizes) - sum(clients)))
        return sizes

    def size(self, t):
        if self.config.method == "early":
            return self.sizes[t]
        c = self.config
        if t == 0:
            return c.clients_per_round
        n = self.rows[-1]["clients"]
        if "critical" not in self.rows[-1]:
            return n
        critical = self.rows[-1]["critical"]
        if c.rule == "paper":
            return self.change(n, critical, not critical)
        most = int(0.75 * self.M)
        if critical and all(row["clients"] != most for row in self.rows[::2]):
            return min(2 * n, most)
        if not critical:
            return max(math.ceil(n / 2), c.clients_per_round)
        return n

    def fgn(self, t, p, eta, norms):
        if self.config.method == "early" or self.config.signal == "paper":
            return super().fgn(t, p, eta, norms)
        sums = [eta * min(norms[m], 100) * len(self.batches(t, m)) / 2 for m in p]  # 2 epochs
        return np.mean(sums)

    def round(self, t):
        row = super().round(t)
        if self.config.method == "criticalfl" and self.config.rule == "paper":
            row["critical"] = int(self.is_critical(row["fgn"]))
        elif self.config.method == "criticalfl" and t % 2 == 0:
            self.judged.append(row["fgn"])
            before = np.mean(self.judged[-11:-1])
            now = np.mean(self.judged[-10:])
            grew = now / max(before, 1e-7) > 1 + self.config.delta
            row["critical"] = int(grew or len(self.judged) <= 12 + 5)
        return row
