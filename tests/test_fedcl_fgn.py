"""Oracles and traps of FedCL by critical learning periods: each against something computed another way."""

import csv
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import bench_fim
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import common
import experiment
import fedcl_fgn as fgn
from results.fedcl_fgn import compare, rules

SCRIPT = Path(fgn.__file__)
TINY = ["--threads", "1", "--clients", "12", "--clients-per-round", "4", "--rounds", "4", "--trials", "1"]
TINY += ["--alpha", "0.5", "--epochs", "1", "--batch-size", "16"]


@pytest.fixture(scope="module")
def digits():
    return common.load_data("digits")


def launch(folder, *flags, base=TINY):
    fgn.main([*base, "--out", str(folder), *flags])
    return read(folder)


def read(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def of(rows, method):
    return [row for row in rows if row["method"] == method]


def state(folder, method):
    saved = [torch.load(path, weights_only=True)["content"] for path in (folder / "checkpoints").glob("*-trial0.pt")]
    return next(each["state"] for each in saved if each["rows"][0]["method"] == method)


def weights(folder, method):
    return state(folder, method)["weights"]


def squared_grad(net, x, y):
    grads = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
    return sum(float(g.square().sum()) for g in grads)


def plain_lenet(theta, side=28, classes=10):
    """LeNet-5 on one channel from torch's own layers, filled from the flat vector theta in its documented order."""
    flat = 16 * (((side - 4) // 2 - 4) // 2) ** 2
    layers = [nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    layers += [nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)]
    net = nn.Sequential(*layers).double()
    nn.utils.vector_to_parameters(theta.clone(), net.parameters())
    return net


def images(data, index, split="train"):
    """(n, C, H, W) float64, normalised by hand."""
    x = getattr(data, f"x_{split}")[torch.as_tensor(index)].double().permute(0, 3, 1, 2)
    return (x - data.mean.view(1, -1, 1, 1)) / data.std.view(1, -1, 1, 1)


# ---------------------------------------------------------------------------- the whole run, literally, for every arm
# Loops over rounds, clients, steps and samples with torch's own layers in float64. Of the project it shares the random
# streams, the initial weights and the dealing of samples to clients; each rule is written down once more.

SMALL = [
    "--dtype",
    "float64",
    "--threads",
    "1",
    "--trials",
    "1",
    "--clients",
    "6",
    "--clients-per-round",
    "2",
    "--alpha",
    "0.6",
]
SMALL += [
    "--min-size",
    "8",
    "--epochs",
    "2",
    "--batch-size",
    "5",
    "--lr",
    "0.03",
    "--momentum",
    "0.7",
    "--weight-decay",
    "0.02",
]
SMALL += ["--lr-decay", "0.8", "--eval-every", "2", "--rounds", "5", "--seed", "5", "--delta", "0.05", "--mu", "0.3"]


@pytest.fixture(scope="module")
def tiny_data(tmp_path_factory):
    """75 training and 20 test images of 16x16, of three classes that a net can tell apart."""
    rng = np.random.default_rng(3)
    y = np.arange(95) % 3
    x = rng.integers(0, 120, (95, 16, 16, 1)) + 60 * (np.arange(16)[None, :, None, None] // 6 == y[:, None, None, None])
    path = tmp_path_factory.mktemp("data") / "tiny.npz"
    np.savez(path, x_train=x[:75].astype(np.uint8), y_train=y[:75], x_test=x[75:].astype(np.uint8), y_test=y[75:])
    return path


class Literal:
    """The run that `flags` describe, as loops. rows: metrics.csv; theta: the last net."""

    def __init__(self, flags, fed=None):
        [self.config], _ = experiment.parse(fgn.Config, fgn.PRESETS, "doc", flags)
        c = self.config
        self.data, self.streams = common.load_data(c.dataset), common.Streams(c.seed, 0)
        fl = common.Federation(c, self.data, self.streams)
        self.shards, self.N = fl.shards, [len(shard) for shard in fl.shards]
        self.theta = fl.model.init(self.streams.seed("init"))
        self.rows, self.memory, self.fed = [], {}, fed
        self.run()

    def net(self, theta):
        return plain_lenet(theta, 16, 3)

    def gradient(self, theta, index, label=None):
        """Gradient (P,) of the mean loss of these samples, or of one sample's -log p(label)."""
        net, x, y = self.net(theta), images(self.data, index), self.data.y_train[torch.as_tensor(index)]
        loss = F.cross_entropy(net(x), y if label is None else torch.tensor([label]))
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))]), loss.item()

    # ------------------------------------------------------------------------------------------------ which clients

    def inclusion(self, n):
        pi, sure = [0.0] * len(self.N), set()
        while True:
            rest = sum(N for k, N in enumerate(self.N) if k not in sure)
            pi = [1.0 if k in sure else (n - len(sure)) * N / rest for k, N in enumerate(self.N)]
            over = {k for k, p in enumerate(pi) if p > 1}
            if not over:
                return pi
            sure |= over

    def draw(self, t, n):
        """{client: (weight, inclusion probability)}, the weights with sum 1."""
        M = len(self.N)
        if self.config.select == "uniform" or self.config.arm == "longer":
            chosen = self.streams("select", t).permutation(M)[:n].tolist()
            return {k: (self.N[k] / sum(self.N[j] for j in chosen), n / M) for k in sorted(chosen)}
        pi, rng = self.inclusion(n), self.streams("select by size", t)
        order, u = rng.permutation(M), rng.random()
        chosen, begin = [], 0.0
        for k in order:
            points = [(n * u) % 1 + i for i in range(n)]
            chosen += [int(k)] * any(begin <= point < begin + pi[k] for point in points)
            begin += pi[k]
        return {k: (self.N[k] / sum(self.N) / pi[k], pi[k]) for k in sorted(chosen)}

    # ------------------------------------------------------------------------------------------------ local training

    def batches(self, t, k):
        c, rng, passes, found = self.config, self.streams("batches", t, k), self.config.epochs, []
        if c.arm == "longer":  # the expected samples of a draw by size over those of a uniform one
            n, pi = c.each or c.clients_per_round, self.inclusion(c.each or c.clients_per_round)
            passes *= sum(p * N for p, N in zip(pi, self.N, strict=True)) / (n * sum(self.N) / len(self.N))
        for _ in range(math.ceil(passes)):
            order = rng.permutation(self.shards[k])
            found += [order[i : i + c.batch_size] for i in range(0, len(order), c.batch_size)]
        return found[: round(passes * math.ceil(self.N[k] / c.batch_size))]

    def ratio(self):
        mean = sum(self.N) / len(self.N)
        return 1 + sum((N - mean) ** 2 for N in self.N) / len(self.N) / mean**2

    def local(self, t, k, eta):
        """(y_k, mean ||g||^2, mean loss, length, samples) of client k's SGD from theta."""
        c, x = self.config, self.theta
        y, v, norms, losses, samples, travelled, pace = x.clone(), 0.0, [], [], 0, 0.0, 0.0
        for batch in self.batches(t, k):
            g, loss = self.gradient(y, batch)
            norms.append(float(g @ g))
            losses.append(loss)
            if c.base == "fedprox":
                g = g + c.mu * (y - x)
            if c.base == "vrlsgd":
                g = g - self.memory.get(("Delta", k), torch.zeros_like(x))
            v = c.momentum * v + g + c.weight_decay * y
            y = y - eta * v
            pace = c.momentum * pace + 1 - (c.mu * travelled if c.base == "fedprox" else 0)
            travelled += eta * pace
            samples += len(batch)
        return y, sum(norms) / len(norms), sum(losses) / len(losses), travelled, samples

    def server(self, p, sent, lengths):
        """The base's rule for the next net from {client: weight}, {client: net}, {client: length}."""
        c, x, memory = self.config, self.theta, self.memory
        mean = sum(p[k] * sent[k] for k in p)
        if c.base == "vrlsgd":
            for k in p:
                Delta = memory.get(("Delta", k), torch.zeros_like(x))
                memory["Delta", k] = Delta + (mean - sent[k]) / lengths[k]
        if c.base == "fednova":
            d = sum(p[k] * (x - sent[k]) / lengths[k] for k in p)
            return x - sum(p[k] * lengths[k] for k in p) * d
        if c.base not in ("fedadagrad", "fedyogi", "fedadam"):
            return mean
        tau, b2, b1 = 1e-3, 0.99, 0.0 if c.base == "fedadagrad" else 0.9
        delta = mean - x
        m, v = b1 * memory.get("m", 0) + (1 - b1) * delta, memory.get("v", torch.full_like(x, tau**2))
        if c.base == "fedadagrad":
            v = v + delta**2
        elif c.base == "fedadam":
            v = b2 * v + (1 - b2) * delta**2
        else:
            v = v - (1 - b2) * delta**2 * torch.sign(v - delta**2)
        memory["m"], memory["v"] = m, v
        return x + (c.server_lr or 0.01) * m / (v.sqrt() + tau)

    # ------------------------------------------------------------------------------------------------ FGN and FedFIM

    def norms(self, t, k, batch_norm):
        """(||g_k||^2 in the reading asked for, FedFIM's trace of client k) at theta."""
        c, read = self.config, self.shards[k]
        if c.detect_samples:
            read = self.streams("detect", t, k).permutation(read)[: c.detect_samples]
        norm, traces = batch_norm, []
        if c.fgn == "per_sample":
            norm = sum(float(self.gradient(self.theta, [i])[0].square().sum()) for i in read) / len(read)
        if c.fgn == "full":
            norm = float(self.gradient(self.theta, read)[0].square().sum())
        for i in read if c.detector == "fim" else []:
            p = torch.softmax(self.net(self.theta)(images(self.data, [i])), 1)[0]
            traces.append(sum(float(p[y]) * float(self.gradient(self.theta, [i], y)[0].square().sum()) for y in range(3)))
        return norm, sum(traces) / max(len(traces), 1)

    def critical(self, history):
        c, t = self.config, len(history)
        if t == 1:
            return c.first_round_critical
        w = max(w for w in range(1, c.window + 1) if 2 * w <= t)
        now, before = sum(history[t - w :]) / w, sum(history[t - 2 * w : t - w]) / w
        return now >= before * (1 + c.delta) ** w

    # ------------------------------------------------------------------------------------------------------- sizes

    def planned(self):
        """The sizes that are known beforehand; those of the arms that repeat FedCL's from FedCL's own literal run."""
        c = self.config
        if c.arm in ("base", "longer"):
            return [c.each or c.clients_per_round] * c.rounds
        if c.arm in ("cl", "random"):
            return None
        sizes = [row["clients"] for row in Literal([*self.fed, "--arm", "cl"]).rows]
        R, total = len(sizes), sum(sizes)
        if c.arm == "shifted":
            late = round(c.shift * R)
            return [sizes[(t - late) % R] for t in range(R)]
        if c.arm == "front":
            return sorted(sizes, reverse=True)
        share = [1.0 if c.arm == "constant" else (1 - c.kappa) ** (R - 1 - t) * c.lr_decay**t for t in range(R)]
        low, high = 0.0, c.clients / min(share)
        for _ in range(200):
            scale = (low + high) / 2
            exact = [min(max(scale * s, 1), c.clients) for s in share]
            low, high = (scale, high) if sum(exact) < total else (low, scale)
        ends = [math.floor(0.5 + sum(exact[: t + 1]) + 1e-9) for t in range(R)]
        return [b - a for a, b in zip([0, *ends], ends, strict=False)]

    # ------------------------------------------------------------------------------------------------------ the run

    def run(self):
        c, M, m, P = self.config, len(self.N), self.config.clients_per_round, len(self.theta)
        planned, size, history, spent, ema, t = self.planned(), m, [], 0, None, 0
        total = {"uploads": 0, "samples": 0, "received_mb": 0.0, "sent_mb": 0.0}
        while (spent < c.budget) if c.budget else (t < c.rounds):
            n = size if planned is None else planned[t]
            n = min(n, c.budget - spent) if c.budget else n
            eta = c.lr * c.lr_decay ** (spent / m if c.budget else t)
            drawn, sent, g_sq, losses, lengths = self.draw(t, n), {}, {}, {}, {}
            fim = 0.0
            for k, (w, _) in drawn.items():
                sent[k], batch_norm, losses[k], lengths[k], samples = self.local(t, k, eta)
                g_sq[k], trace = self.norms(t, k, batch_norm)
                g_sq[k] *= eta if c.fgn_lr else 1
                fim += w * trace
                total["samples"] += samples
            p = {k: w for k, (w, _) in drawn.items()}
            row = {"round": t + 1, "clients": n, "dropped": 0, "size_ratio": self.ratio()}
            row["fgn"] = sum(p[k] * g_sq[k] for k in p)
            row["fgn_se"] = self.spread(drawn, {k: torch.tensor([g_sq[k]], dtype=torch.float64) for k in p}) ** 0.5
            mean = sum(p[k] * sent[k] for k in p)
            row["V"], row["m_sq"] = self.spread(drawn, sent), float((mean - self.theta).square().sum())
            row["nu"], row["n_eff"] = row["V"] / row["m_sq"], 1 / sum(w**2 for w in p.values())
            row["train_loss"] = sum(losses.values()) / n
            row |= {"fim": fim} if c.detector == "fim" else {}
            self.theta = self.server(p, sent, lengths)
            ema = self.theta if ema is None else c.server_ema * ema + (1 - c.server_ema) * self.theta
            if c.arm == "cl":
                history.append(row[c.detector])
                row["critical"] = int(self.critical(history))
                size = min(2 * n, c.most or M) if row["critical"] else max(n // 2, c.fewest or max(m // 2, 1))
            if c.arm == "random":
                u = self.streams("random size", t).random()
                if u < c.p_double:
                    size = min(2 * n, c.most or M)
                elif u < c.p_double + c.p_halve:
                    size = max(n // 2, c.fewest or max(m // 2, 1))
            spent, t = spent + n, t + 1
            total["uploads"] += n
            total["received_mb"] += n * P * 8 / 1e6
            total["sent_mb"] += n * P * 8 / 1e6
            if t % c.eval_every == 0 or (spent == c.budget if c.budget else t == c.rounds):
                logits = self.net(ema)(images(self.data, np.arange(20), "test"))
                row["accuracy"] = 100 * float((logits.argmax(1) == self.data.y_test).double().mean())
                row["loss"] = float(F.cross_entropy(logits, self.data.y_test))
            self.rows.append(row | total)

    def spread(self, drawn, values):
        """The jackknife: whoever might not have been drawn is left out once, and the others like him take over his weight."""
        unsure = [k for k, (_, pi) in drawn.items() if pi < 1]
        if len(unsure) < 2:
            return math.inf if unsure else 0.0
        odds = {k: (1 - drawn[k][1]) * drawn[k][0] for k in unsure}
        center, total = sum(odds[k] * values[k] for k in unsure) / sum(odds.values()), 0.0
        for k in unsure:
            weight, others = drawn[k][0], sum(drawn[j][0] for j in unsure if j != k)
            moved = weight * (center - values[k]) * (weight + others) / others
            total += (1 - drawn[k][1]) * float(moved.square().sum())
        return total * (len(unsure) - 1) / len(unsure)


CASES = {
    "fedavg+cl": "--arm cl",
    "fedprox+cl": "--arm cl --base fedprox --fgn per_sample --detect-samples 4 --no-fgn-lr --most 5 --delta 0.2",
    "vrlsgd+cl": "--arm cl --base vrlsgd --fgn full --window 2 --no-first-round-critical --fewest 2",
    "fednova+cl-fim": "--arm cl --base fednova --detector fim --detect-samples 4 --fgn full --rounds 4",
    "fedadagrad+random": "--arm random --base fedadagrad --p-double 0.6 --p-halve 0.3 --most 4 --server-lr 0.02 --rounds 6",
    "fedyogi size": "--arm base --base fedyogi --select size --each 4 --server-lr 0.03",
    "fedadam+constant": "--arm cl constant --base fedadam --server-ema 0.6 --clients-per-round 3",
    "fedavg+shifted-fim": "--arm cl shifted --detector fim --shift 0.3 --fewest 1 --rounds 4 --detect-samples 2",
    "vrlsgd+front size": "--arm cl front --base vrlsgd --select size",
    "fednova+rising": "--arm cl rising --base fednova --kappa 0.3 --most 6",
    "fedprox+longer n=3": "--arm longer --base fedprox --each 3 --budget 13 --select size --server-ema 0.5",
    "fedavg+cl size": "--arm cl --select size --budget 17 --rounds 30 --fewest 2",
    "fedavg+constant-fim": "--arm cl constant --detector fim --budget 15 --rounds 30 --window 2 --detect-samples 2",
}


@pytest.mark.parametrize("method", CASES)
def test_the_whole_run_literally(tmp_path, tiny_data, method, monkeypatch, capsys):
    """Every arm, detector, reading, base and draw: weights and every column of metrics.csv, under partial participation."""
    monkeypatch.setattr(experiment, "curves", lambda *args, **how: None)  # figures have tests of their own
    monkeypatch.setattr(fgn, "report", lambda *args: None)
    flags = [*SMALL, "--dataset", str(tiny_data), *CASES[method].split()]
    launch(tmp_path, *flags, base=[])
    alone = [flags[: flags.index("--arm") + 1], flags[flags.index("--arm") + 1 :]]
    arms = list(itertools.takewhile(lambda word: not word.startswith("--"), alone[1]))
    rest = [*alone[0][:-1], *alone[1][len(arms) :]]
    literal = Literal([*rest, "--arm", arms[-1]], fed=rest)
    [name] = [name for name in {row["method"]: 0 for row in read(tmp_path)} if name == method or name.startswith(method + " ")]
    rows = of(read(tmp_path), name)
    assert len(rows) == len(literal.rows)
    for row, wanted in zip(rows, literal.rows, strict=True):
        cells = {column: value for column, value in row.items() if value != ""}
        assert set(cells) - {"setting", "method", "trial", "seconds"} == set(wanted)
        for column, value in wanted.items():
            assert float(cells[column]) == pytest.approx(value, rel=1e-7 if column in ("V", "nu") else 1e-9, abs=1e-12), column
    torch.testing.assert_close(weights(tmp_path, name), literal.theta, rtol=0, atol=1e-9)
    sizes = [row["clients"] for row in literal.rows]
    assert min(sizes) < 6 and (len(set(sizes)) > 1 or "--arm base" in CASES[method])


@pytest.mark.parametrize("base", fgn.PAPER_BASES)
def test_pinned_size_is_the_base_bit_for_bit(tmp_path, tiny_data, base, monkeypatch, capsys):
    """delta = inf with the size pinned, and the same size pinned under the default delta."""
    monkeypatch.setattr(experiment, "curves", lambda *args, **how: None)
    monkeypatch.setattr(fgn, "report", lambda *args: None)
    flags = ["--dataset", str(tiny_data), "--base", base, "--rounds", "3"]
    rows = launch(tmp_path / "inf", *flags, "--delta", "inf", "--fewest", "2", "--no-first-round-critical", base=SMALL)
    assert torch.equal(weights(tmp_path / "inf", f"{base}+cl"), weights(tmp_path / "inf", base))
    same = [[row[name] for name in ("accuracy", "loss", "clients", "fgn", "train_loss", "V")] for row in rows]
    assert same[:3] == same[3:]
    launch(tmp_path / "pin", *flags, "--fewest", "2", "--most", "2", "--arm", "cl", base=SMALL)
    assert torch.equal(weights(tmp_path / "pin", f"{base}+cl"), weights(tmp_path / "inf", base))


def test_detection_samples_and_random_sizes_are_drawn_anew_each_round(tmp_path, tiny_data, monkeypatch, capsys):
    """With eta so small that the net stands still and all clients selected, FGN moves by the samples read alone."""
    monkeypatch.setattr(fgn, "report", lambda *args: None)
    still = ["--dataset", str(tiny_data), "--lr", "1e-9", "--no-fgn-lr", "--fgn", "per_sample", "--clients-per-round", "6"]
    part = launch(tmp_path / "part", *still, "--arm", "base", "--detect-samples", "3", "--rounds", "4", base=SMALL)
    whole = launch(tmp_path / "whole", *still, "--arm", "base", "--rounds", "4", base=SMALL)
    assert len({round(float(row["fgn"]), 4) for row in part}) == 4
    assert len({round(float(row["fgn"]), 4) for row in whole}) == 1
    flags = ["--dataset", str(tiny_data), "--arm", "random", "--p-double", "0.5", "--p-halve", "0.5", "--rounds", "12"]
    sizes = [int(row["clients"]) for row in launch(tmp_path / "random", *flags, base=SMALL)]
    turns = np.sign(np.diff(np.clip(sizes, 1.5, 5.5)))
    assert 1 in turns and -1 in turns  # one draw for all rounds would only ever double, or only halve


# --------------------------------------------------------------------------------------------------- FGN, three readings


def pixels(n=7, side=4, classes=3, seed=0):
    """A small data set of raw images whose normalisation is the identity up to scale."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.integers(0, 256, (n, side, side, 1), dtype=np.uint8))
    y = torch.from_numpy(rng.integers(0, classes, n))
    return common.Data(x, y, x, y, classes, torch.tensor([100.0]), torch.tensor([50.0]))


def softmax_model(inputs=16, classes=3):
    """One linear layer on the pixels."""
    return common.Model(lambda: common.Net([nn.Identity()], common.Linear(inputs, classes)), dtype=torch.float64)


def test_per_sample_equals_autograd_loop_and_vmap(digits):
    model = common.build_model("lenet5", digits, dtype=torch.float64)
    theta, index = model.init(1), np.arange(70)  # more than one chunk of 64
    ours = fgn.squared_norms(model, theta, digits, index[:, None])
    net, x, y = plain_lenet(theta), images(digits, index), digits.y_train[:70]
    loop = [squared_grad(net, x[i : i + 1], y[i : i + 1]) for i in index]
    params = {name: p.detach() for name, p in net.named_parameters()}

    def loss(params, x, y):
        return F.cross_entropy(torch.func.functional_call(net, params, x[None]), y[None])

    grads = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(params, x, y)
    vmapped = sum(g.flatten(1).square().sum(1) for g in grads.values())
    np.testing.assert_allclose(ours, loop, rtol=1e-10)
    np.testing.assert_allclose(ours, vmapped.numpy(), rtol=1e-10)


def test_full_is_the_gradient_of_the_client_mean(digits):
    model = common.build_model("lenet5", digits, dtype=torch.float64)
    theta, shard = model.init(2), np.arange(5, 40)
    wanted = squared_grad(plain_lenet(theta), images(digits, shard), digits.y_train[5:40])
    assert fgn.squared_norms(model, theta, digits, shard[None])[0] == pytest.approx(wanted, rel=1e-10)


def test_linear_softmax_closed_form():
    data, model = pixels(), softmax_model()
    theta = model.init(0)
    x = images(data, np.arange(7)).flatten(1)
    p = torch.softmax(x @ theta[:48].view(3, 16).T + theta[48:], 1)
    wanted = (p - F.one_hot(data.y_train, 3)).square().sum(1) * (x.square().sum(1) + 1)  # ||p - e_y||^2 (||x||^2 + 1)
    np.testing.assert_allclose(fgn.squared_norms(model, theta, data, np.arange(7)[:, None]), wanted.numpy(), rtol=1e-12)


def batch_reading(model, theta, data, batches):
    return common.train(model, theta, data, batches, lr=1e-30).grad_sq


def test_batch_of_one_is_per_sample():
    data, model = pixels(), softmax_model()
    theta, shard = model.init(0), np.arange(7)
    batches = common.epochs_of_batches(shard, 2, 1, np.random.default_rng(0))
    np.testing.assert_allclose(
        batch_reading(model, theta, data, [batches]), fgn.per_sample(model, theta, data, [shard]), rtol=1e-12
    )


def test_identical_samples_make_the_three_readings_equal():
    data, model = pixels(), softmax_model()
    data.x_train[:], data.y_train[:] = data.x_train[0].clone(), 1
    theta, shard = model.init(0), np.arange(6)
    batch = batch_reading(model, theta, data, [shard.reshape(3, 2)])[0]
    full = fgn.squared_norms(model, theta, data, shard[None])[0]
    assert batch == pytest.approx(full, rel=1e-12)
    assert fgn.per_sample(model, theta, data, [shard])[0] == pytest.approx(full, rel=1e-12)


@pytest.mark.parametrize("B", [2, 3])
def test_expected_batch_norm_interpolates_between_full_and_per_sample(B):
    """E||g_B||^2 = ||g||^2 + (tr F - ||g||^2) / B with replacement, over all n^B batches."""
    data, model = pixels(n=4), softmax_model()
    theta = model.init(3)
    every = np.stack(np.meshgrid(*[np.arange(4)] * B), -1).reshape(-1, B)
    full = fgn.squared_norms(model, theta, data, np.arange(4)[None])[0]
    trace = fgn.per_sample(model, theta, data, [np.arange(4)])[0]
    assert trace > 1.5 * full  # else the identity says little
    assert batch_reading(model, theta, data, [every])[0] == pytest.approx(full + (trace - full) / B, rel=1e-12)


def test_loss_falls_by_eta_times_fgn_in_the_limit():
    data, model = pixels(), softmax_model()
    theta, one = model.init(0), np.array([[2]])
    norm = fgn.squared_norms(model, theta, data, one)[0]

    def loss(weights):
        return common.score(model, weights, data, [one[0]])[0][0][0]

    errors = []
    for eta in (1e-3, 1e-4, 1e-5):
        moved = common.train(model, theta, data, [one], lr=eta).weights[0]
        errors.append(abs((loss(moved) - loss(theta)) / (-eta * norm) - 1))
    assert errors[0] > 5 * errors[1] > 25 * errors[2]  # first order in eta
    assert errors[2] < 1e-2


def test_plain_nets_take_one_sample_at_a_time():
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.integers(0, 80, (3, 12))), torch.from_numpy(rng.integers(0, 80, 3))
    data = common.Data(x, y, x, y, 80)
    model = common.build_model("lstm", data, dtype=torch.float64, width=8)
    theta = model.init(0)
    torch.manual_seed(0)
    net = common.CharLSTM(0, 0, 80, 8).double().eval()  # parameters in the order of the flat vector
    nn.utils.vector_to_parameters(theta, net.parameters())
    wanted = []
    for i in range(3):
        grads = torch.autograd.grad(F.cross_entropy(net(x[i : i + 1]), y[i : i + 1]), list(net.parameters()))
        wanted.append(sum(float(g.square().sum()) for g in grads))
    np.testing.assert_allclose(fgn.squared_norms(model, theta, data, np.arange(3)[:, None]), wanted, rtol=1e-10)
    grads = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
    full = sum(float(g.square().sum()) for g in grads)
    assert fgn.squared_norms(model, theta, data, np.arange(3)[None])[0] == pytest.approx(full, rel=1e-10)


# ---------------------------------------------------------------------------------------------------------------- FedFIM


def test_fim_equals_dense_jacobian():
    """tr E_x [J^T (diag p) J], J = d log p / d theta, from torch's own Jacobian of a net of torch's own layers."""
    data = pixels()
    model = common.Model(lambda: common.Net([common.Linear(16, 5), nn.Tanh()], common.Linear(5, 3)), dtype=torch.float64)
    theta, x = model.init(4), images(data, np.arange(7)).flatten(1)

    def log_p(flat):
        a, b, c, d = flat.split([80, 5, 15, 3])
        return torch.log_softmax(torch.tanh(x @ a.view(5, 16).T + b) @ c.view(3, 5).T + d, 1)

    J = torch.autograd.functional.jacobian(log_p, theta)  # (n, classes, P)
    F_x = torch.einsum("ny,nyp,nyq->npq", log_p(theta).exp(), J, J)
    trace = F_x.mean(0).trace().item()
    assert fgn.per_sample(model, theta, data, [np.arange(7)], fisher=True)[0] == pytest.approx(trace, rel=1e-10)
    assert fgn.per_sample(model, theta, data, [np.arange(7)])[0] != pytest.approx(trace, rel=1e-3)  # labels from the model


def test_detection_leaves_weights_and_streams_alone():
    data = common.load_data("digits", size=32)
    model = common.build_model("alexnet", data, width=16)  # has dropout
    theta = model.init(0)
    before, stream = theta.clone(), torch.get_rng_state()
    first = fgn.per_sample(model, theta, data, [np.arange(4)], fisher=True)
    np.testing.assert_array_equal(first, fgn.per_sample(model, theta, data, [np.arange(4)], fisher=True))
    assert torch.equal(theta, before) and torch.equal(torch.get_rng_state(), stream)


# -------------------------------------------------------------------------------------- draws, their means and their noise


def federation(sizes, t_seed=0):
    """What the rules read of a federation whose clients hold so many samples."""
    sizes, streams = np.array(sizes), common.Streams(t_seed, 0)
    everyone = np.arange(len(sizes))
    select = lambda t, n: np.sort(streams("select", t).permutation(len(sizes))[:n])  # noqa: E731
    return SimpleNamespace(sizes=sizes, everyone=everyone, streams=streams, select=select)


SIZES = [40, 3, 12, 7, 20, 18]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_draws_by_size_are_unbiased_by_enumeration(n, monkeypatch):
    """All 720 orders of 6 clients, and all places of the points: the inclusion probabilities are the promised ones, the sum
    of the weights is 1 in every draw and the aggregate's mean is sum_k p_k theta_k."""
    p, theta = np.array(SIZES) / 100, np.array([[1.0, 5], [2, -3], [-4, 0], [0.5, 1], [7, 2], [-1, -1]])
    pi = fgn.inclusion(np.array(SIZES), n)
    assert pi.sum() == pytest.approx(n) and pi.max() <= 1
    included, mean, total = np.zeros(6), np.zeros(2), 0.0
    for order in itertools.permutations(range(6)):
        edges = np.unique(np.round([0, 1, *(np.cumsum(pi[list(order)]) % 1)], 12))  # between these the draw is the same
        for low, high in zip(edges, edges[1:], strict=False):
            u = (low + high) / 2 / n  # the points then begin at (low + high) / 2
            rng = SimpleNamespace(permutation=lambda M, order=order: np.array(order), random=lambda u=u: u)
            fl = SimpleNamespace(sizes=np.array(SIZES), streams=lambda *key, rng=rng: rng)
            clients, weights, probability, _ = fgn.by_size(fl, {}, 0, n)
            assert len(clients) == n and weights.sum() == pytest.approx(100)
            np.testing.assert_allclose(probability, pi[clients])
            included[clients] += high - low
            mean += (high - low) * (weights / weights.sum()) @ theta[clients]
            total += high - low
    np.testing.assert_allclose(included / total, pi, atol=1e-9)
    np.testing.assert_allclose(mean / total, p @ theta, atol=1e-9)
    sure = pi == 1
    np.testing.assert_allclose(pi[~sure] / p[~sure], (n - sure.sum()) / max(p[~sure].sum(), 1e-9))  # the rest in proportion


def test_uniform_draws_are_algorithm_1_and_both_are_nested():
    fl = federation([5] * 40 + [9] * 40)
    for rule, reach in ((fgn.uniform, range(1, 80)), (fgn.by_size, (1, 2, 4, 8, 16, 32))):
        for t in range(5):
            draws = [set(rule(fl, {}, t, n)[0]) for n in reach]
            assert all(a < b for a, b in zip(draws, draws[1:], strict=False))
            assert [len(d) for d in draws] == list(reach)
    clients, weights, pi, scorers = fgn.uniform(fl, {}, 3, 10)
    assert np.array_equal(weights, fl.sizes[clients]) and np.array_equal(pi, np.full(10, 0.125)) and scorers == 0
    assert not np.array_equal(clients, fgn.uniform(fl, {}, 4, 10)[0])
    assert not np.array_equal(fgn.by_size(fl, {}, 3, 10)[0], fgn.by_size(fl, {}, 4, 10)[0])


def estimate(values, w, pi):
    mean, variance = fgn.estimate(torch.tensor(values, dtype=torch.float64)[:, None], np.array(w), np.array(pi))
    return float(mean), variance


def test_estimate_is_eq_1_with_the_jackknifes_error_of_a_ratio():
    v, N, pi = [1.0, 3.0, 8.0], [4, 2, 2], 1 / 3
    mean, variance = estimate(v, [0.5, 0.25, 0.25], [pi] * 3)
    assert mean == (4 * 1 + 2 * 3 + 2 * 8) / 8
    without = [sum(N[j] * v[j] for j in range(3) if j != k) / (8 - N[k]) for k in range(3)]
    assert variance == pytest.approx((1 - pi) * 2 / 3 * sum((leave - mean) ** 2 for leave in without))
    assert estimate([1.0, 3.0], [0.5, 0.5], [1, 1])[1] == 0  # all clients take part
    assert estimate([1.0], [1.0], [0.5])[1] == math.inf and estimate([4.0], [1.0], [1]) == (4.0, 0.0)
    assert estimate([1.0, 3.0], [0.5, 0.5], [1, 0.5])[1] == math.inf  # of a single unsure one nothing is known
    assert estimate([1.0, 3.0], [1, 0], [0.5, 0.5])[1] == math.inf  # nor where the other has no weight


def test_error_of_equal_weights_is_hajeks_and_leaves_out_who_takes_part_surely():
    v, pi = [1.0, 3.0, 8.0, 500.0], [0.2, 0.5, 0.4, 1]
    out = [0.8, 0.5, 0.6]
    center = (0.8 * 1 + 0.5 * 3 + 0.6 * 8) / 1.9
    wanted = 3 / 2 * sum(q * (0.2 * (x - center)) ** 2 for q, x in zip(out, v, strict=False))
    mean, variance = estimate(v, [0.2, 0.2, 0.2, 0.4], pi)
    assert mean == pytest.approx(202.4) and variance == pytest.approx(wanted)


@pytest.mark.parametrize("rule", [fgn.uniform, fgn.by_size])
@pytest.mark.parametrize("n", [8, 48])
def test_variance_predicts_the_spread_over_draws(rule, n):
    """128 clients of sizes as uneven as at alpha = .1 are drawn 4,000 times: the spread of the aggregate of 5 numbers is the
    mean of its own variance. Of 48 by size some take part surely. Without 1 - w_k / A uniform draws of 8 come out at .78."""
    rng = np.random.default_rng(0)
    fl = federation(np.maximum(2, 40 * np.exp(0.9 * rng.normal(size=128))).astype(int))
    values, means, variances = torch.from_numpy(3 + rng.normal(size=(128, 5))), [], []
    for t in range(4000):
        clients, weights, pi, _ = rule(fl, {}, t, n)
        mean, variance = fgn.estimate(values[clients], weights / weights.sum(), pi)
        means.append(mean.numpy())
        variances.append(variance)
    assert (fgn.inclusion(fl.sizes, n).max() == 1) == (n == 48)
    assert np.mean(variances) == pytest.approx(np.var(means, axis=0).sum(), rel=0.12)
    if n == 8:
        ratio = 128 * np.sum((fl.sizes / fl.sizes.sum()) ** 2) if rule is fgn.uniform else 1
        assert np.var(means, axis=0).sum() == pytest.approx(5 * ratio / n * (1 - n / 128), rel=0.2)


@pytest.mark.parametrize("rule", [fgn.uniform, fgn.by_size])
def test_V_is_the_variance_of_a_real_aggregate(rule, monkeypatch):
    """All 128 clients of the default experiment train once; 1,000 draws of 16 of them differ by the mean of their own V. Larger
    clients move farther, which test_variance_predicts_the_spread_over_draws leaves out."""
    [config], _ = experiment.parse(fgn.Config, fgn.PRESETS, "doc", ["--arm", "base"])
    fl = common.Federation(config, common.load_data("digits"), common.Streams(config.seed, 0))
    everyone, state = np.arange(128), fl.start()
    batches = [common.epochs_of_batches(shard, 1, 4, fl.streams("batches", k)) for k, shard in enumerate(fl.shards)]
    theta = fl.train(state, 0, everyone, batches, lr=0.01)[1].weights.double()
    p = torch.from_numpy(fl.sizes / fl.sizes.sum())
    whole, G = p @ theta, theta @ theta.T
    farther = (theta - whole).square().sum(1)
    assert np.corrcoef(farther, fl.sizes)[0, 1] > 0.5
    basis = torch.linalg.cholesky(
        G + 1e-9 * G.trace() * torch.eye(128, dtype=torch.float64)
    )  # the same distances in 128 numbers
    errors, variances = [], []
    for t in range(1000):
        clients, weights, pi, _ = rule(fl, {}, t, 16)
        mean, V = fgn.estimate(basis[clients], weights / weights.sum(), pi)
        errors.append(float((mean - p @ basis).square().sum()))
        variances.append(V)
    assert np.mean(variances) == pytest.approx(np.mean(errors), rel=0.1)


def test_noise_columns_by_hand():
    theta, sent = torch.tensor([1.0, 1.0]), torch.tensor([[3.0, 1.0], [1.0, 3.0]])
    seen = fgn.noise(theta, sent, np.array([0.75, 0.25]), np.array([0.5, 0.5]))
    assert seen["m_sq"] == 1.5**2 + 0.5**2 and seen["n_eff"] == 1 / (0.75**2 + 0.25**2)
    moves = 1.5**2 + 1.5**2 + 0.5**2 + 0.5**2  # the other client alone: (1, 3) or (3, 1) instead of (2.5, 1.5)
    assert seen["V"] == pytest.approx(1 / 2 * 0.5 * moves) and seen["nu"] == seen["V"] / seen["m_sq"]


# ------------------------------------------------------------------------------------------- other papers' rules


def seen(M, seed=1, classes=4):
    rng = np.random.default_rng(seed)
    return {
        k: {"round": k + 1, "loss": 1 + rng.random(), "bias": rng.normal(size=classes).tolist(), "times": 1} for k in range(M)
    }


def test_fedcor_conditions_as_scikit_learns_gaussian_process():
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import DotProduct

    embedding = np.random.default_rng(0).normal(size=(9, 3))
    K, noise = embedding @ embedding.T, 0.3
    p, alpha = np.full(9, 1 / 9), np.ones(9)
    chosen = rules.greedy(K, noise, alpha, p, 4)
    assert len(set(chosen)) == 4 and chosen[0] == np.argmax(p @ K / np.sqrt(K.diagonal() + noise))
    ours = K
    for i, k in enumerate(chosen):
        gain = (p @ ours) / np.sqrt(ours.diagonal() + noise)
        gain[chosen[:i]] = -np.inf
        assert k == gain.argmax()
        ours = rules.given(ours, noise, k)
        gp = GaussianProcessRegressor(DotProduct(sigma_0=0, sigma_0_bounds="fixed"), alpha=noise, optimizer=None)
        gp.fit(embedding[chosen[: i + 1]], np.zeros(i + 1))
        np.testing.assert_allclose(ours, gp.predict(embedding, return_cov=True)[1], atol=1e-8)
    assert rules.greedy(K, noise, np.eye(9)[5] + 1e-9, p, 1) == [5]  # alpha: who had many turns is left alone


def test_fedcor_learns_its_covariance_as_scikit_learns_pca():
    from sklearn.decomposition import PCA

    changes = np.random.default_rng(2).normal(size=(50, 3)) @ np.random.default_rng(3).normal(size=(3, 8))
    changes = changes + 0.1 * np.random.default_rng(4).normal(size=changes.shape)
    K, noise = rules.kernel(changes, 3)
    pca = PCA(3).fit(changes)
    np.testing.assert_allclose((K + noise * np.eye(8)) * 50 / 49, pca.get_covariance(), atol=1e-10)


def test_hics_reads_the_labels_entropy_from_the_output_bias():
    from scipy.stats import entropy

    bias = np.array([[0.0, 0, 0, 0], [1, -0.3, -0.3, -0.4], [0.3, 0.3, -0.3, -0.3]])
    H = rules.entropy(bias)
    wanted = [entropy(np.exp(b / 0.1) / np.exp(b / 0.1).sum()) for b in bias]
    np.testing.assert_allclose(H, wanted, rtol=1e-10)
    assert H[0] == pytest.approx(math.log(4)) and H[0] > H[2] > H[1]
    fl = federation([10] * 20)
    fl.config = SimpleNamespace(budget=0, rounds=10)
    first = rules.hics(fl, {"seen": {k: {} for k in range(17)}}, 0, 5)
    assert {17, 18, 19} < set(first[0].tolist()) and len(first[0]) == 5  # who has not taken part comes first
    flat, skewed = [0.01, 0, 0, -0.01], [0.7, -0.2, -0.3, -0.2]
    memory = {k: {"bias": flat if k < 10 else skewed} for k in range(20)}
    counts = np.zeros((2, 20))
    for i, t in ((0, 0), (1, 10)):  # gamma falls from 4 to 0
        for s in range(200):
            fl.streams = common.Streams(s, 0)
            clients, weights, *_ = rules.hics(fl, {"seen": memory, "spent": 0}, t, 2)
            counts[i, clients] += 1
            assert len(set(clients)) == 2 and np.array_equal(weights, [1, 1])
    assert counts[0, :10].sum() > 350 and 150 < counts[1, :10].sum() < 250


def test_oort_tries_new_clients_first_and_then_follows_utility():
    fl = federation([10] * 30)
    explored = [len(set(rules.oort(fl, {"seen": seen(20)}, t, 10)[0]) - set(range(20))) for t in (0, 20, 300)]
    assert explored == [9, round(10 * 0.9 * 0.98**20), 2]
    few = rules.oort(fl, {"seen": seen(3)}, 400, 10)[0]  # only three known: seven are new
    assert len(few) == 10 and len(set(few) & {0, 1, 2}) == 3
    everyone = {k: {"round": 40, "loss": 5.0 if k < 6 else 0.1, "bias": [], "times": 1} for k in range(30)}
    for t in range(20):
        fl.streams = common.Streams(t, 0)
        assert set(rules.oort(fl, {"seen": everyone}, 40, 5)[0]) <= set(range(6))
    everyone[20]["round"] = 1  # long ago: its bonus sqrt(.1 log t / t_k) lifts it above the cut
    everyone[20]["loss"] = 4.0
    assert any(20 in rules.oort(federation([10] * 30, s), {"seen": everyone}, 40, 5)[0] for s in range(20))


@pytest.mark.parametrize("name", ["power_of_choice", "fedcor", "hics", "oort"])
def test_rules_of_other_papers_train(tmp_path, tiny_data, name, monkeypatch, capsys):
    monkeypatch.setattr(rules, "WARM_UP", 3)
    monkeypatch.setattr(rules, "RANK", 2)
    monkeypatch.setattr(fgn, "report", lambda *args: None)
    rule = f"results.fedcl_fgn.rules:{name}"
    flags = ["--dataset", str(tiny_data), "--arm", "base", "--select", rule, "--rounds", "5"]
    rows = launch(tmp_path, *flags, base=SMALL)
    P = len(weights(tmp_path, f"fedavg {name}"))
    beyond = [float(row["received_mb"]) * 1e6 / 8 - 2 * (t + 1) * P for t, row in enumerate(rows)]  # scoring downloads
    wanted = {"power_of_choice": [2, 4, 6, 8, 10], "fedcor": [4, 8, 12, 16, 16], "hics": [0] * 5, "oort": [0] * 5}
    np.testing.assert_allclose(np.array(beyond) / P, wanted[name], rtol=1e-4, atol=1e-4)
    answers = [float(row["sent_mb"]) * 1e6 / 8 - 2 * (t + 1) * P for t, row in enumerate(rows)]  # a loss from each that scored
    np.testing.assert_allclose(answers, wanted[name], atol=0.3)
    assert [row["clients"] for row in rows] == ["2"] * 5
    memory = state(tmp_path, f"fedavg {name}").get("seen", {})
    assert sum(own["times"] for own in memory.values()) == (0 if name == "power_of_choice" else 10)
    if name == "hics":
        assert len(memory) == 6  # each of 6 clients within the first three rounds of two


def test_power_of_choice_takes_the_candidates_of_largest_loss(tiny_data):
    [config], _ = experiment.parse(fgn.Config, fgn.PRESETS, "doc", [*SMALL, "--dataset", str(tiny_data), "--arm", "base"])
    data = common.load_data(config.dataset)
    fl = common.Federation(config, data, common.Streams(1, 0))
    theta = fl.start()["weights"]
    net, y = plain_lenet(theta, 16, 3), [data.y_train[torch.as_tensor(shard)] for shard in fl.shards]
    losses = [float(F.cross_entropy(net(images(data, shard)), own)) for shard, own in zip(fl.shards, y, strict=True)]
    for t in range(4):
        candidates = fgn.by_size(fl, {}, t, 4)[0]
        wanted = sorted(candidates, key=lambda k: -losses[k])[:2]
        clients, weights, pi, scorers = rules.power_of_choice(fl, {"weights": theta}, t, 2)
        assert clients.tolist() == sorted(wanted) and scorers == 2 and weights.tolist() == [1, 1]


def test_what_rules_remember_is_the_bias_gradient(tiny_data):
    """One step of SGD without momentum: the mean gradient of the output bias is label shares minus predicted ones."""
    flags = [*SMALL, "--dataset", str(tiny_data), "--arm", "base", "--momentum", "0", "--weight-decay", "0"]
    [config], _ = experiment.parse(fgn.Config, fgn.PRESETS, "doc", flags)
    data = common.load_data(config.dataset)
    fl = common.Federation(config, data, common.Streams(1, 0))
    state, clients = fl.start(), np.array([1, 4])
    padded = np.full((2, 1, 30), -1)
    for row, k in zip(padded, clients, strict=True):
        row[0, : len(fl.shards[k])] = fl.shards[k]
    kept, update = fl.train(state, 0, clients, list(padded), lr=0.05)
    rules.remember(fl, state, 6, kept, update)
    for k in (1, 4):
        labels = data.y_train[torch.as_tensor(fl.shards[k])]
        p = torch.softmax(plain_lenet(state["weights"], 16, 3)(images(data, fl.shards[k])), 1).mean(0)
        wanted = F.one_hot(labels, 3).double().mean(0) - p
        np.testing.assert_allclose(state["seen"][k]["bias"], wanted.detach().numpy(), atol=1e-9)
        assert state["seen"][k]["round"] == 7 and state["seen"][k]["times"] == 1
    rules.remember(fl, state, 8, kept[:1], update[[0]])
    assert (state["seen"][1]["times"], state["seen"][1]["round"], state["seen"][4]["times"]) == (2, 9, 1)


# ----------------------------------------------------------------------------------------------------- the pure controller


def trajectory(decisions, m=16, M=128, **limits):
    sizes = [m]
    for critical in decisions:
        sizes.append(fgn.next_size(sizes[-1], critical, m, M, **limits))
    return sizes


def test_scripted_ratios_give_the_specified_sizes():
    values = [1.0, 1.5, 2.0, 2.5, 2.0, 1.5, 1.0, 0.5, 0.4]
    decisions = [fgn.is_critical(values[: t + 1], 0.01) for t in range(len(values))]
    assert decisions == [True] * 4 + [False] * 5
    assert trajectory(decisions) == [16, 32, 64, 128, 128, 64, 32, 16, 8, 8]


def test_floor_is_half_of_the_initial_size_and_at_least_one():
    assert trajectory([False] * 5, m=1, M=9) == [1] * 6
    assert trajectory([True] * 4 + [False] * 5, m=3, M=20) == [3, 6, 12, 20, 20, 10, 5, 2, 1, 1]
    assert trajectory([True, False, True, False], fewest=16, most=16) == [16] * 5


def test_a_hump_of_the_norm_gives_one_hump_of_clients():
    """The norm rises for 8 rounds, then decays: on average about the base's 16 clients over 100 rounds."""
    norms = [1.1 ** min(t, 7) * 0.95 ** max(t - 7, 0) for t in range(200)]
    G = [norm * 0.01 * 0.99**t for t, norm in enumerate(norms)]
    sizes = trajectory([fgn.is_critical(G[: t + 1], 0.01) for t in range(199)])
    assert sizes[:4] == [16, 32, 64, 128] and max(sizes) == 128
    down = sizes.index(64, 4)
    assert set(sizes[3:down]) == {128} and sizes[down : down + 5] == [64, 32, 16, 8, 8]
    assert set(sizes[down + 3 :]) == {8}
    assert 0.95 < np.mean(sizes[:100]) / 16 < 1.1


def test_sign_of_fgn_does_not_matter():
    """The printed rule on the printed, negative FGN, and ours on -FGN, take the same decisions."""
    G = np.random.default_rng(0).gamma(5, size=200)
    printed = [(-G[t] - -G[t - 1]) / -G[t - 1] >= 0.01 for t in range(1, 200)]
    assert 40 < sum(printed) < 160
    assert printed == [fgn.is_critical(G[: t + 1], 0.01) for t in range(1, 200)]
    assert printed == [fgn.is_critical(-G[: t + 1], 0.01) for t in range(1, 200)]


def test_threshold_is_inclusive_and_guarded():
    assert fgn.is_critical([1.0, 1.25], 0.25) and not fgn.is_critical([1.0, 1.2499], 0.25)
    assert fgn.is_critical([1.0, 1.0], 0.0)
    assert fgn.is_critical([0.0, 1.0], 0.01) and not fgn.is_critical([0.0, 0.0], 0.01)
    assert not fgn.is_critical([1.0, 9e9], math.inf) and not fgn.is_critical([0.0, 1.0], math.inf)
    assert fgn.is_critical([5.0], math.inf) and not fgn.is_critical([5.0], 0.01, first=False)


def test_infinite_delta_ends_at_the_floor():
    values = np.exp(np.arange(6))
    assert trajectory([fgn.is_critical(values[: t + 1], math.inf) for t in range(5)]) == [16, 32, 16, 8, 8, 8]


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_window_compares_growth_per_round_of_neighbouring_means(window):
    values = np.random.default_rng(window).gamma(5, size=30).tolist()
    for t in range(2, 31):
        w = max(k for k in range(1, window + 1) if 2 * k <= t)
        now, before = sum(values[t - w : t]) / w, sum(values[t - 2 * w : t - w]) / w
        assert fgn.is_critical(values[:t], 0.01, window) == (now / before >= 1.01**w)
    for growth, critical in ((1.003, False), (1.02, True)):  # the threshold means the same at every window
        steady = [growth**t for t in range(20)]
        assert fgn.is_critical(steady, 0.01, window) == critical


def test_random_sizes_follow_their_probabilities():
    u = np.random.default_rng(0).random(20000)
    steps = [fgn.random_size(16, x, 0.2, 0.3, (16, 128, 0, 0)) for x in u]
    assert [round(steps.count(n) / 20000, 1) for n in (32, 8, 16)] == [0.2, 0.3, 0.5]
    assert fgn.random_size(128, 0.1, 0.2, 0.3, (16, 128, 0, 0)) == 128  # capped
    assert fgn.random_size(8, 0.4, 0.2, 0.3, (16, 128, 0, 0)) == 8  # at the floor


def test_controls_spend_what_fedcl_spends():
    sizes = [16, 32, 64, 128, 64, 32, 16, 8, 8, 8, 8]
    rows = [{"clients": n - (n > 100), "dropped": int(n > 100)} for n in sizes]  # a dropped client was selected too

    def replayed(arm, **flags):
        return fgn.replayed_sizes(fgn.Config(arm=arm, detector="fgn", **flags), rows)

    constant, rising = replayed("constant"), replayed("rising", lr_decay=1.0, kappa=0.2)
    assert {int(replayed(arm).sum()) for arm in fgn.REPLAYS} == {sum(sizes)} and {len(constant), len(rising)} == {11}
    assert np.ptp(constant) <= 1
    assert replayed("shifted").tolist() == [32, 16, 8, 8, 8, 8, 16, 32, 64, 128, 64]
    assert replayed("shifted", shift=0.0).tolist() == sizes
    assert replayed("front").tolist() == sorted(sizes, reverse=True)
    np.testing.assert_allclose(rising / rising.sum(), 0.8 ** (10 - np.arange(11)) / sum(0.8 ** np.arange(11)), atol=0.002)
    np.testing.assert_array_equal(replayed("rising", lr_decay=0.8, kappa=0.2), constant)  # noise fades as fast as it is kept


def test_rising_sizes_leave_the_least_noise():
    """No other split of 60 uploads over 4 rounds leaves less of sum_t c_t^2 V_t / n_t, by enumeration."""
    kappa, decay = 0.3, 0.9
    rows = [{"clients": 15, "dropped": 0}] * 4
    best = fgn.replayed_sizes(fgn.Config(arm="rising", detector="fgn", kappa=kappa, lr_decay=decay, clients=60), rows)
    c, V = (1 - kappa) ** (3 - np.arange(4)), decay ** (2 * np.arange(4))
    floor = {
        n: np.sum(c**2 * V / np.array([*n, 60 - sum(n)])) for n in itertools.product(range(1, 40), repeat=3) if sum(n) < 60
    }
    least = min(floor, key=floor.get)
    np.testing.assert_allclose(best, [*least, 60 - sum(least)], atol=1)


def test_rising_keeps_to_the_most_clients_of_a_round():
    """Unbounded its last round would take 12 of the 24 uploads."""
    rows = [{"clients": n, "dropped": 0} for n in (4, 6, 3, 6, 3, 2)]
    flags = {"arm": "rising", "kappa": 0.6, "clients": 12, "clients_per_round": 4}
    assert fgn.replayed_sizes(fgn.Config(**flags), rows).max() == 12
    sizes = fgn.replayed_sizes(fgn.Config(**flags, most=6), rows)
    assert sizes.max() == 6 and sizes.sum() == 24
    assert fgn.replayed_sizes(fgn.Config(**flags, most=3), rows).sum() == 24  # --tune took more for FedCL than here


@pytest.mark.parametrize("total", [5, 17, 30])
def test_spread_keeps_its_bounds(total):
    sizes = fgn.spread(np.array([1.0, 100.0, 3.0, 9.0, 0.1]), total, 6)
    assert sizes.sum() == total and sizes.min() >= 1 and sizes.max() <= 6
    assert total in (5, 30) or sizes[1] == 6  # the bound binds


# ------------------------------------------------------------------------------------------------- behaviour of a run


@pytest.fixture
def quiet(monkeypatch):
    """No figures: they have tests of their own."""
    monkeypatch.setattr(experiment, "curves", lambda *args, **how: None)


def test_every_arm_ends_when_the_budget_is_spent(tmp_path, tiny_data, quiet, capsys):
    flags = ["--dataset", str(tiny_data), "--budget", "15", "--rounds", "20", "--eval-every", "50", "--lr-decay", "0.5"]
    arms = ["--arm", "cl", "base", "random", "longer", "constant", "front", "--each", "0", "3", "--select", "uniform", "size"]
    rows = launch(tmp_path, *flags, *arms, base=SMALL)
    ends = {row["method"]: row for row in rows}
    assert len(ends) == 2 + 4 + 2 + 2 + 2 + 2 and {row["uploads"] for row in ends.values()} == {"15"}
    assert all(row["accuracy"] for row in ends.values()) and len([row for row in rows if row["accuracy"]]) == len(ends)
    sizes = {name: [int(row["clients"]) for row in of(rows, name)] for name in ends}
    assert sizes["fedavg"] == [2] * 7 + [1] and sizes["fedavg n=3"] == sizes["fedavg size n=3"] == [3] * 5
    assert sizes["fedavg+front"] == sorted(sizes["fedavg+cl"], reverse=True)
    small, large = of(rows, "fedavg"), of(rows, "fedavg n=3")
    samples = {name: int(ends[name]["samples"]) for name in ends}
    assert 1.05 < samples["fedavg+longer"] / samples["fedavg"] < float(small[0]["size_ratio"]) + 0.1
    assert [row["clients"] for row in large] == ["3"] * 5 and {row["dropped"] for row in rows} == {"0"}
    assert float(small[3]["fgn"]) < float(small[0]["fgn"])


def test_resuming_a_spent_budget_trains_nothing(tmp_path, tiny_data, quiet, capsys):
    flags = ["--dataset", str(tiny_data), "--budget", "6", "--rounds", "9", "--arm", "cl", "constant", "--server-ema", "0.5"]
    before = launch(tmp_path, *flags, base=SMALL)
    assert launch(tmp_path, *flags, "--resume", base=SMALL) == before


def test_the_mean_of_the_servers_nets_is_tested_and_nothing_else_changes(tmp_path, tiny_data, quiet, capsys):
    flags = ["--dataset", str(tiny_data), "--arm", "base", "--server-ema", "0", "0.7", "--eval-every", "1"]
    rows = launch(tmp_path, *flags, base=SMALL)
    assert torch.equal(weights(tmp_path, "fedavg"), weights(tmp_path, "fedavg ema=0.7"))
    loss = [[float(row["loss"]) for row in of(rows, name)] for name in ("fedavg", "fedavg ema=0.7")]
    assert loss[0][0] == pytest.approx(loss[1][0], rel=1e-12) and loss[0][1] != loss[1][1]
    assert "ema" not in state(tmp_path, "fedavg")


def test_controls_count_the_clients_that_were_dropped(tmp_path, monkeypatch, quiet, capsys):
    """A client whose update is not finite was selected, and trained, all the same."""
    train = common.train

    def diverging(*args, lr, **options):
        update = train(*args, lr=lr, **options)
        if lr < 0.01:  # from the second round on
            update.weights[0] = math.nan
        return update

    monkeypatch.setattr(common, "train", diverging)
    flags = ["--on-nonfinite", "drop", "--eval-every", "4"]
    for select in ("uniform", "size"):
        rows = launch(tmp_path / select, "--arm", "cl", "constant", "shifted", "--select", select, *flags)
        word = "" if select == "uniform" else " size"
        n = {arm: [int(row["clients"]) + int(row["dropped"]) for row in of(rows, f"fedavg+{arm}{word}")] for arm in fgn.ARMS}
        assert [row["dropped"] for row in of(rows, f"fedavg+cl{word}")] == ["0", "1", "1", "1"]
        assert n["shifted"] == np.roll(n["cl"], 2).tolist()
        received = np.array([float(row["received_mb"]) for row in of(rows, f"fedavg+cl{word}")])  # by all, sent by the kept
        sent = np.array([float(row["sent_mb"]) for row in of(rows, f"fedavg+cl{word}")])
        assert received * np.cumsum(n["cl"])[0] == pytest.approx(received[0] * np.cumsum(n["cl"]), rel=1e-5)
        assert (received - sent) * n["cl"][0] == pytest.approx(received[0] * np.arange(4), abs=1e-3)
        assert sum(n["constant"]) == sum(n["cl"]) and np.ptp(n["constant"]) <= 1
        [config], _ = experiment.parse(fgn.Config, fgn.PRESETS, "doc", [*TINY, "--arm", "cl"])
        fl = common.Federation(config, common.load_data("digits"), common.Streams(config.seed, 0))
        clients, weights, *_ = fgn.SELECT[select](fl, {}, 1, n["cl"][1])
        w = weights[1:] / weights[1:].sum()  # the first one's update was not finite
        assert float(of(rows, f"fedavg+cl{word}")[1]["n_eff"]) == pytest.approx(1 / np.sum(w**2))


def test_arms_that_do_not_read_a_flag_are_trained_once(tmp_path, tiny_data, quiet, capsys):
    flags = ["--dataset", str(tiny_data), "--delta", "0.01", "0.3", "--arm", "cl", "base", "random", "constant"]
    rows = launch(tmp_path, *flags, base=SMALL)
    assert len(rows) == 2 * 4 * 5
    saved = [torch.load(path, weights_only=True)["fingerprint"] for path in (tmp_path / "checkpoints").iterdir()]
    alone = [("fedavg", None), ("fedavg+random", None)]
    twice = [(f"fedavg+{arm}", delta) for arm in ("cl", "constant") for delta in (0.01, 0.3)]
    assert sorted(((each["method"], each.get("delta")) for each in saved), key=str) == sorted(alone + twice, key=str)


def test_samples_that_nobody_reads_are_swept_once(tmp_path, tiny_data, quiet, capsys):
    flags = ["--dataset", str(tiny_data), "--detect-samples", "2", "5", "--arm", "cl", "base", "--detector", "fgn", "fim"]
    rows = launch(tmp_path, *flags, base=SMALL)
    assert len(rows) == 2 * 3 * 5  # two settings of three methods
    saved = [torch.load(path, weights_only=True)["fingerprint"] for path in (tmp_path / "checkpoints").iterdir()]
    found = sorted((each["method"], each.get("detect_samples", 0)) for each in saved)
    assert found == [("fedavg", 0), ("fedavg+cl", 0), ("fedavg+cl-fim", 2), ("fedavg+cl-fim", 5)]


OWN_RULES = {
    "raises": lambda n: 1 / 0,
    "nothing": lambda n: None,
    "one twice": lambda n: ([0] * n, [1] * n, [1] * n, 0),
    "unknown": lambda n: (np.arange(n) + 6, np.ones(n), np.ones(n), 0),
    "negative": lambda n: (-1 - np.arange(n), np.ones(n), np.ones(n), 0),
    "halves": lambda n: (np.arange(n) + 0.5, np.ones(n), np.ones(n), 0),
    "too few": lambda n: (np.arange(n - 1), np.ones(n - 1), np.ones(n - 1), 0),
    "weights": lambda n: (np.arange(n), np.ones(n + 1), np.ones(n), 0),
    "nan": lambda n: (np.arange(n), np.full(n, np.nan), np.ones(n), 0),
    "no weight": lambda n: (np.arange(n), np.zeros(n), np.ones(n), 0),
    "probabilities": lambda n: (np.arange(n), np.ones(n), -np.ones(n), 0),
    "too probable": lambda n: (np.arange(n), np.ones(n), np.full(n, 1.1), 0),
    "scorers": lambda n: (np.arange(n), np.ones(n), np.ones(n), "x"),
    "negative scorers": lambda n: (np.arange(n), np.ones(n), np.ones(n), -1000),
    "learns": lambda n: (list(range(n)), [1] * n, [1] * n, 0),  # a list will do; what it learns with raises
}


@pytest.mark.parametrize("name", OWN_RULES)
def test_an_own_rule_that_is_wrong_is_one_line(tmp_path, tiny_data, name, monkeypatch, capsys):
    def own(fl, state, t, n):
        return OWN_RULES[name](n)

    if name == "learns":
        own.learn = lambda *_: 1 / 0
    monkeypatch.setattr(rules, "own", own, raising=False)
    flags = [*SMALL, "--dataset", str(tiny_data), "--arm", "base", "--select", "results.fedcl_fgn.rules:own"]
    with pytest.raises(SystemExit) as stop:
        fgn.main([*flags, "--out", str(tmp_path)])
    *_, line = capsys.readouterr().err.replace("\r", "\n").splitlines()
    assert stop.value.code == 2 and "error: --select results.fedcl_fgn.rules:own: " in line


@pytest.mark.parametrize("one, other", [("rules_a:mine", "rules_b:mine"), ("size", "rules_a:size"), ("rules_a:size", "size")])
def test_two_rules_of_one_name_are_refused(tmp_path, tiny_data, monkeypatch, capsys, one, other):
    """A method's name keeps what follows the colon: the second of two would be taken for the first, without a word."""
    for module in ("rules_a", "rules_b"):
        (tmp_path / f"{module}.py").write_text("from fedcl_fgn import by_size as mine\nsize = mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as stop:
        fgn.main([*SMALL, "--dataset", str(tiny_data), "--arm", "base", "--select", one, other, "--out", str(tmp_path / "r")])
    line = f"--select: {one} and {other} would both be called fedavg {other.rpartition(':')[2]}"
    assert stop.value.code == 2 and capsys.readouterr().err.strip().endswith(line) and not (tmp_path / "r").exists()


def test_until_needs_two_methods_of_one_setting(tmp_path, capsys):
    """The base is part of a method's name, but two bases are two settings: there is no difference to measure."""
    with pytest.raises(SystemExit) as stop:
        fgn.main([*SMALL, "--arm=cl", "--base", "fedavg", "fedprox", "--until-halfwidth=.1", "--out", str(tmp_path / "r")])
    assert stop.value.code == 2 and "a single method has no difference to measure" in capsys.readouterr().err


def test_the_detector_of_an_arm_that_heeds_none_may_change(tmp_path):
    """FedFIM is read, and told apart, only where an arm heeds it: the order of a sweep and --resume change nothing."""
    rows = launch(tmp_path, "--arm", "cl", "base", "--detector", "fgn", base=SMALL)
    again = launch(tmp_path, "--arm", "cl", "base", "--detector", "fim", "fgn", "--resume", base=SMALL)
    assert {row["method"] for row in rows} == {"fedavg", "fedavg+cl"}
    assert {row["method"] for row in again} == {"fedavg", "fedavg+cl", "fedavg+cl-fim"}
    assert {row["method"] for row in again if row["fim"]} == {"fedavg+cl-fim"}


def test_a_module_of_rules_that_raises_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "broken_rules.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as stop:
        fgn.main(["--select", "broken_rules:own", "--out", str(tmp_path / "r")])
    assert (
        stop.value.code == 2
        and "--select broken_rules:own: ZeroDivisionError: division by zero (wanted uniform, size or MODULE:FUNCTION)"
        in capsys.readouterr().err
    )


def test_each_of_as_many_clients_is_the_base_and_is_trained_once(tmp_path, tiny_data, quiet, capsys):
    flags = ["--dataset", str(tiny_data), "--arm", "base", "cl", "longer", "--select", "uniform", "size"]
    m = SMALL[SMALL.index("--clients-per-round") + 1]
    rows = launch(tmp_path, *flags, "--each", "0", m, base=SMALL)
    assert {row["method"] for row in rows} == {"fedavg", "fedavg size", "fedavg+cl", "fedavg+cl size", "fedavg+longer"}
    assert len(list((tmp_path / "checkpoints").iterdir())) == 5
    again = launch(tmp_path, *flags[:-2], "size", "uniform", "--each", m, "0", "--resume", base=SMALL)
    assert len(again) == len(rows)


@pytest.mark.parametrize(
    "arm, spared",
    [
        ("base", {"delta", "window", "first_round_critical", "fewest", "most", "p_double", "p_halve", "shift", "kappa"}),
        ("longer", {"delta", "window", "first_round_critical", "fewest", "most", "p_double", "p_halve", "shift", "kappa"}),
        ("random", {"delta", "window", "first_round_critical", "shift", "kappa"}),
        ("cl", {"p_double", "p_halve", "shift", "kappa"}),
        ("constant", {"p_double", "p_halve", "shift", "kappa"}),
        ("shifted", {"p_double", "p_halve", "kappa"}),
        ("rising", {"p_double", "p_halve", "shift"}),
    ],
)
def test_unread_flags(arm, spared):
    spared = spared | {"mu", "server_lr"} | ({"select"} if arm == "longer" else set())  # of FedAvg
    spared |= {"detector"} if arm in ("base", "longer", "random") else set()
    assert fgn.unread(fgn.Config(arm=arm, detector="fgn", fgn="full")) == spared | {"each"}
    assert fgn.unread(fgn.Config(arm=arm, fgn="full", each=16)) == spared | {"each"}  # as many as it would take anyhow
    alone = {"each"} if arm not in ("base", "longer") else set()
    assert fgn.unread(fgn.Config(arm=arm, fgn="full", each=8)) == spared | alone
    no_samples = {"each", "detect_samples"}  # batch FGN reads what training computes
    assert fgn.unread(fgn.Config(arm=arm, detector="fgn")) == spared | no_samples
    assert fgn.unread(fgn.Config(arm=arm, detector="fim")) == spared | (no_samples if "detector" in spared else {"each"})


def test_names_tell_what_decides():
    def name(**flags):
        return fgn.name(fgn.Config(**{"arm": "cl", "detector": "fgn"} | flags))

    assert name() == "fedavg+cl" and name(detector="fim") == "fedavg+cl-fim" and name(arm="base", detector="fim") == "fedavg"
    assert name(arm="constant", detector="fim", select="size") == "fedavg+constant-fim size"
    assert name(arm="base", each=8, base="fednova", server_ema=0.8) == "fednova n=8 ema=0.8"
    assert name(each=8, select="results.fedcl_fgn.rules:oort") == "fedavg+cl oort"
    assert name(arm="longer", each=3, select="size", detector="fim") == "fedavg+longer n=3"


def test_warns_where_one_doubling_reaches_all(tmp_path, quiet, capsys):
    launch(tmp_path, "--clients", "8", "--rounds", "1", "--arm", "cl")
    assert "one doubling of 4 clients reaches all 8" in capsys.readouterr().err


def same_results(a, b, methods):
    strip = [[{k: v for k, v in row.items() if "seconds" not in k} for row in read(folder)] for folder in (a, b)]
    assert strip[0] == strip[1]
    assert all(torch.equal(weights(a, method), weights(b, method)) for method in methods)


def test_jobs_do_not_change_a_bit(tmp_path, tiny_data, quiet, capsys):
    flags = ["--dataset", str(tiny_data), "--arm", "cl", "base", "constant", "--rounds", "3", "--select", "size"]
    launch(tmp_path / "one", *flags, base=SMALL)
    launch(tmp_path / "two", *flags, "--jobs", "2", base=SMALL)
    same_results(tmp_path / "one", tmp_path / "two", ["fedavg+cl size", "fedavg size", "fedavg+constant size"])


def test_killed_run_resumes_to_the_same_result(tmp_path, tiny_data, quiet, capsys):
    flags = [*SMALL, "--dataset", str(tiny_data), "--rounds", "60", "--base", "fedyogi", "--arm", "cl", "random"]
    flags += ["--detector", "fim", "--detect-samples", "3", "--server-ema", "0.5", "--budget", "60", "--fewest", "1"]
    command = [sys.executable, str(SCRIPT), *flags, "--out", str(tmp_path / "killed")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
    first = "killed/checkpoints/fedyogi+cl-fim-ema=0.5-*-trial0.pt"
    while process.poll() is None and not list(tmp_path.glob(first)):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(tmp_path.glob(first))
    fgn.main([*flags, "--out", str(tmp_path / "killed"), "--resume"])
    fgn.main([*flags, "--out", str(tmp_path / "whole")])
    same_results(tmp_path / "killed", tmp_path / "whole", ["fedyogi+cl-fim ema=0.5", "fedyogi+random ema=0.5"])


# ------------------------------------------------------------------------------------------------------------- the report


def scripted(method, accuracy, clients, critical=None, trial=0, setting=""):
    uploads = np.cumsum(clients)
    rows = [
        {
            "setting": setting,
            "method": method,
            "trial": trial,
            "round": t + 1,
            "clients": n,
            "uploads": int(u),
            "samples": 10 * u,
        }
        | {"accuracy": a, "fgn": 2.0, "fgn_se": 0.5 if n > 1 else math.inf, "size_ratio": 1.5}
        for t, (a, n, u) in enumerate(zip(accuracy, clients, uploads, strict=True))
    ]
    return [row | {"critical": c} for row, c in zip(rows, critical or [math.nan] * len(rows), strict=True)]


def test_selection_table_by_hand():
    rows = scripted("x+cl", [10, 30, math.nan, 50, 40, 60], [4, 8, 8, 2, 2, 2], [1, 1, 0, 0, 0, 0])
    rows += scripted("x+cl", [10, 20, math.nan, 20, 20, 20], [4, 8, 4, 4, 2, 2], [1, 0, 0, 0, 1, 0], trial=1)
    rows += scripted("x n=4", [99.0] * 6, [4] * 6)  # a control is not the base, though its name has no +
    rows += scripted("x", [5, 10, 15, 20, 30, 45], [4] * 6)
    rows += scripted("x", [5, 10, 15, 20, 30, 45], [4] * 6, trial=1)
    table = fgn.selection(pd.DataFrame(rows))
    cl, base = table.loc[("", "x+cl")], table.loc[("", "x")]
    assert (cl.rounds_to, cl.uploads_to, cl.clients_to, cl.reached) == (4, 22, 5.5, 0.5)  # 50 >= 45 in trial 1, never in 2
    assert (base.rounds_to, base.uploads_to, base.reached) == (6, 24, 1)
    assert cl.clients == pytest.approx(25 / 6) and (cl.peak, cl.early, cl.late) == (8, 6, 2)
    assert cl.critical == 2 and math.isnan(base.critical) and cl.fgn_error == 25
    assert cl.equal == (40 + 20) / 2  # 24 uploads are spent after round 5 of trial 1, after round 6 of trial 2
    assert base.equal == 45 and (cl.rounds, cl.samples, cl.size_ratio) == (6, (260 + 240) / 2, 1.5)


def test_each_base_of_a_sweep_is_its_own_goal():
    rows = []
    for base, goal in (("fedavg", 30), ("fednova", 80)):
        rows += scripted(f"{base}+cl", [10, 40, 90], [2, 4, 8], [1, 1, 1], setting=f"base={base}")
        rows += scripted(base, [10, 20, goal], [2, 2, 2], setting=f"base={base}")
    table = fgn.selection(pd.DataFrame(rows))
    assert table.loc[("base=fedavg", "fedavg+cl")].rounds_to == 2
    assert table.loc[("base=fednova", "fednova+cl")].rounds_to == 3


def test_without_a_base_nothing_is_said_of_reaching_it():
    line = fgn.selection(pd.DataFrame(scripted("x+cl", [10, 30], [4, 8], [1, 1]))).iloc[0]
    assert math.isnan(line.reached) and math.isnan(line.rounds_to) and line.equal == 30


def test_common_targets_by_hand():
    rows = scripted("x+cl", [12, math.nan, 33], [4, 8, 2]) + scripted("x", [5, 21, 22], [4, 4, 4])
    table = fgn.targets(pd.DataFrame(rows))
    assert sorted(set(table.index.get_level_values("target"))) == [10, 20, 30]
    assert table.loc[("", 20, "x+cl")].tolist() == [3, 14, 14 / 3, 1] and table.loc[("", 20, "x")].tolist() == [2, 8, 4, 1]
    assert table.loc[("", 30, "x")].reached == 0 and math.isnan(table.loc[("", 30, "x")].uploads_to)
    assert fgn.targets(pd.DataFrame(scripted("x", [5, 6], [1, 1]))).empty
    whole = fgn.targets(pd.DataFrame(scripted("x", [5, 40], [1, 1])))  # 40 is reached
    assert whole.index.get_level_values("target").max() == 40 and (whole.reached == 1).all()


@pytest.mark.parametrize("decay, kappa, rounds", [(0.95, 0.4, 97), (0.99, 0.05, 60), (0.01, 0.99, 200)])
def test_rising_sizes_are_a_fixed_point(decay, kappa, rounds):
    """Under a budget the sizes decide how eta falls: they are those that follow from themselves; the least shares are tiny."""
    flags = {"arm": "rising", "kappa": kappa, "lr_decay": decay, "clients_per_round": 16, "clients": 512, "budget": 16 * rounds}
    sizes = fgn.replayed_sizes(fgn.Config(**flags), [{"clients": 16, "dropped": 0}] * rounds)
    assert sizes.sum() == 16 * rounds and sizes.min() >= 1 and sizes.max() <= 512
    if kappa < 0.9:
        decays = (np.cumsum(sizes) - sizes) / 16
        again = fgn.spread((1 - kappa) ** np.arange(rounds)[::-1] * decay**decays, 16 * rounds, 512)
        assert np.abs(again - sizes).max() <= 1


def test_rising_follows_the_learning_rate_of_a_budget():
    """n_t in proportion to (1 - kappa)^(R-1-t) eta_t, eta_t after the uploads that these n spend; up to rounding."""
    rows = [{"clients": n, "dropped": 0} for n in (16, 32, 64, 128, 128, 128, 64, 32, 64, 128, 64, 64, 48)]
    flags = {"arm": "rising", "kappa": 0.2, "lr_decay": 0.97, "clients_per_round": 16, "clients": 500}
    c = 0.8 ** np.arange(13)[::-1]
    n = fgn.replayed_sizes(fgn.Config(**flags, budget=960, rounds=120), rows)
    eta = 0.97 ** ((n.cumsum() - n) / 16)
    wanted = 960 * c * eta / (c * eta).sum()
    assert n.sum() == 960 and np.abs(n - wanted).max() <= 1
    free = fgn.replayed_sizes(fgn.Config(**flags), rows)
    by_round = c * 0.97 ** np.arange(13)
    assert np.abs(free - 960 * by_round / by_round.sum()).max() <= 1 and np.abs(free - n).max() > 3


def test_fgn_png_draws_fgn_clients_and_critical_rounds(tmp_path, monkeypatch):
    """Read from the drawn lines: means over the trials, a column per setting."""
    from matplotlib.figure import Figure

    saved = {}
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: saved.update({path.name: self}))
    rows = []
    for setting, shift in (("a=1", 0), ("a=2", 3)):
        rows += scripted("x+cl", [1, 2, 3], [4 + shift, 8, 2], [1, 0, 1], 0, setting)
        rows += scripted("x+cl", [1, 2, 3], [6 + shift, 8, 4], [0, 0, 1], 1, setting)
    fgn.report(pd.DataFrame(rows), [], tmp_path)
    drawn = {tuple(axis.get_title().split()): axis.lines[0].get_ydata().tolist() for axis in saved["fgn.png"].axes}
    assert len(drawn) == 6
    assert drawn["clients", "a=1"] == [5, 8, 3] and drawn["clients", "a=2"] == [8, 8, 3]
    assert drawn["critical", "a=1"] == [0.5, 0, 1] and drawn["fgn", "a=2"] == [2, 2, 2]
    assert "x+cl" in [text.get_text() for text in saved["fgn.png"].legends[0].texts]


def test_a_run_leaves_its_tables_and_figures(tmp_path, tiny_data, capsys):
    flags = ["--dataset", str(tiny_data), "--rounds", "3", "--detector", "fgn", "fim", "--detect-samples", "2"]
    launch(tmp_path, *flags, base=SMALL)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"accuracy.png", "fgn.png", "selection.csv", "targets.csv", "metrics.csv", "summary.json"} <= names
    table = pd.read_csv(tmp_path / "selection.csv")
    assert table.method.tolist() == ["fedavg+cl", "fedavg+cl-fim", "fedavg"]
    said = capsys.readouterr().out
    assert "fedavg+cl-fim" in said and "first, last third; critical rounds;" in said and "trials that reach it;" in said


# --------------------------------------------------------------------------------- the bench of detectors, and comparisons


def test_peak_memory_counts_what_is_alive():
    def chained():
        a = torch.ones(2**18)  # 1 MiB
        b = a + 1
        del a
        return (b * 2).sum()  # 2 MiB alive at most

    seconds, peak = bench_fim.measured(chained, "cpu")
    assert seconds > 0 and 2 <= peak < 2.1


def test_time_on_the_gpu_waits_for_its_kernels(monkeypatch):
    order = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("wait"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**20)
    monkeypatch.setattr(bench_fim.time, "perf_counter", lambda: order.append("clock") or 0.0)
    assert bench_fim.measured(lambda: order.append("work"), "cuda") == (0.0, 2.0)
    assert order == ["wait", "clock", "work", "wait", "clock", "work"]


def test_cost_of_the_detectors_is_told_beside_that_of_training():
    table = bench_fim.cost(["M+F"], 2, 6, 3, 1, "cpu", 0)
    what = ["training", "FGN batch", "FGN full", "FGN per_sample", "FedFIM"]
    assert table.loc["M+F"].index.tolist() == what and (table.seconds > 0).all()
    assert table.loc[("M+F", "FGN batch"), "time / FGN batch"] == 1
    assert table.loc[("M+F", "FedFIM"), "MiB"] > table.loc[("M+F", "FGN batch"), "MiB"]


def test_fc_cost_reads_norms_of_gradients(monkeypatch):
    """One norm of the stacked gradients for every local step of every chunk."""
    seen = []
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda g, dim: seen.append(tuple(g.shape)) or g.sum(dim))
    bench_fim.norms_of(torch.ones(2, 5), 7)
    assert seen == [(2, 5)] * 7


def test_agreement_by_hand():
    signals = pd.DataFrame({"trial": 0, "round": range(1, 6), "a": [1.0, 2, 3, 2, 3], "b": [1.0, 2, 1, 0.5, 1]})
    config = fgn.Config(delta=0.01, window=1, arm="base", detector="fgn")  # up up down up; up down down up
    line = bench_fim.agreement(signals, config).iloc[0]
    assert (line["alike"], line["by chance"], line["critical"], line["critical "]) == (0.75, 0.5, 0.75, 0.5)
    assert line["kappa"] == 0.5


def test_agreement_reads_fedfim_on_other_clients_too(tiny_data, monkeypatch):
    """Each signal is Eq. 1 over the clients it is said to be read on, and `other` shares none with `same`."""
    flags = [*SMALL, "--dataset", str(tiny_data), "--arm", "base", "--rounds", "2", "--detect-samples", "3"]
    [config], _ = experiment.parse(fgn.Config, fgn.PRESETS, "doc", flags)
    data, read, per_sample = common.load_data(config.dataset), [], fgn.per_sample

    def spied(model, theta, data, samples, fisher=False):
        read.append({int(i) for part in samples for i in part})
        return per_sample(model, theta, data, samples, fisher)

    monkeypatch.setattr(fgn, "per_sample", spied)
    signals = bench_fim.trajectory(config, data, 0)
    assert len(signals) == 2 and len(read) == 8
    for t in range(2):
        same, same_fim, other, other_fim = read[4 * t : 4 * t + 4]
        assert same == same_fim and other == other_fim and not same & other
    run = Literal([*flags, "--fgn", "per_sample", "--detector", "fim"])
    for t, row in enumerate(run.rows):
        assert signals["fgn per_sample same"][t] == pytest.approx(row["fgn"]) and signals["fim same"][t] == pytest.approx(
            row["fim"]
        )
    batch = Literal(flags).rows
    assert [*signals["fgn batch same"]] == pytest.approx([row["fgn"] for row in batch])


def test_noise_floor_by_hand():
    rows = [{"setting": "", "method": "x", "trial": 0, "V": v, "accuracy": a} for v, a in ((4, 10), (9, 12), (16, 11))]
    line = bench_fim.floors(pd.DataFrame(rows), 0.5).iloc[0]
    assert line.predicted == pytest.approx(math.sqrt(4 / 16 + 9 / 4 + 16))
    assert line.realised == pytest.approx(math.sqrt((0.5**2 + 1 + 0.5**2) / 1))  # about the line 10.5, 11, 11.5


def test_compare_by_hand():
    def arm(method, trial, accuracy, clients, V):
        rows = scripted(method, accuracy, clients, trial=trial)
        return [row | {"received_mb": 1.0, "V": v} for row, v in zip(rows, V, strict=True)]

    df = []
    for trial, shift in ((0, 0), (1, 2)):  # 12 uploads: the last sixth is the last round
        df += arm("a", trial, [1, 2, 3, 4, 50, 60 + shift], [2] * 6, [2.0 + shift] * 6)
        df += arm("b", trial, [5, math.nan, 41, 43], [2, 2, 4, 4], [4.0 + 3 * shift, math.inf, 5.0, 16.0])
    table = compare.compare(pd.DataFrame(df), "a")
    assert table.late.tolist() == [61, 43] and table.final.tolist() == [61, 43] and table.rounds.tolist() == [6, 4]
    assert table.noise.tolist() == [1, (4 + 10) / (2 + 4)]  # in the first rounds both draw two and the estimate is finite
    low, high = (18 + sign * 12.7062 * math.sqrt(2) / math.sqrt(2) for sign in (-1, 1))
    assert table.loc["b", ["ahead", "low", "high"]].tolist() == pytest.approx([18, low, high], rel=1e-3)
    assert math.isnan(table.loc["a", "ahead"]) and table.loc["a", "std"] == pytest.approx(math.sqrt(2))
    with pytest.raises(ValueError, match="differ"):
        compare.compare(pd.DataFrame([*df, *arm("c", 0, [1, 2], [2, 2], [1.0, 1.0])]), "a")


# ---------------------------------------------------------------------------------------------------- set-up and command


def test_nets_have_the_specified_sizes():
    image = SimpleNamespace(x_train=torch.empty(1, 32, 32, 3, dtype=torch.uint8), classes=10)
    image = common.Data(image.x_train, torch.zeros(1, dtype=torch.int64), image.x_train, None, 10, torch.ones(3), torch.ones(3))
    text = torch.zeros(1, 80, dtype=torch.int64)
    text = common.Data(text, text[:, 0], text, None, 80)
    size = {name: common.build_model(name, image).trainable for name in ("alexnet", "vgg11")}
    assert size == {"alexnet": 23_272_266, "vgg11": 9_750_922}
    assert common.build_model("alexnet", image, width=128).trainable == 2_400_586
    assert common.build_model("lstm", text).trainable == 3_739_728
    assert common.build_model("resnet18", image).trainable > 11_000_000


def test_presets_are_valid_and_cover_the_figures():
    found = {}
    for name in fgn.PRESETS:
        configs, _ = experiment.parse(fgn.Config, fgn.PRESETS, "doc", ["--preset", name])
        found[name] = configs
        for config in configs:
            assert (config.clients_per_round, config.epochs, config.lr) == (16, 2, 0.01) or name in ("fig12", "fig15")
            assert (config.momentum, config.delta) == (0.9, 0.01) or name in ("fig10", "fig26")
            assert fgn.name(config)
    wanted = {"fig1", "fig2", "fig6", "fig10", "fig11", "fig12", "fig13", "fig14", "fig15", "fig18", "fig26", "fig29", "fig31"}
    wanted |= {"fig6-vgg", "fig29-vgg", "fig31-dirichlet", "fig39", "fig47", "fig48", "fig50", "fig52", "decay", "detectors"}
    assert wanted | {"controls", "selection"} == fgn.PRESETS.keys()

    def swept(name, flag):
        return sorted({getattr(config, flag) for config in found[name]})

    assert swept("fig10", "delta") == [0, 0.01, 0.03, 0.05, 0.2, 0.35, 0.5] and swept("fig12", "epochs") == [1, 2, 3, 4, 5]
    assert swept("fig14", "base") == ["fedavg", "fedprox"] and swept("fig14", "clients") == [64, 128, 256, 512]
    assert swept("fig2", "model") == ["alexnet", "vgg11"] and swept("fig2", "alpha") == [0.1, 0.2, 0.3]
    assert swept("fig52", "base") == sorted(set(fgn.PAPER_BASES) - {"fedavg"}) and swept("fig50", "model") == ["resnet18"]
    assert swept("fig29", "base") == ["fedavg", "fednova", "fedprox", "vrlsgd"] and swept("fig29", "dataset") == ["cifar100"]
    assert swept("fig47", "p_double") == [0.1, 0.3, 0.5, 0.7] and swept("fig47", "p_halve") == [0.3]
    assert swept("fig48", "p_halve") == [0.1, 0.3, 0.5, 0.7] and "random" in swept("fig48", "arm")
    assert swept("fig1", "detector") == ["fgn", "fim"] and swept("controls", "arm") == sorted(fgn.ARMS)
    assert {config.mu for config in found["fig6"]} == {0.01} and {config.mu for config in found["fig6-vgg"]} == {0.001}


@pytest.mark.parametrize(
    "flags, word",
    [
        ("--fewest 5", "--fewest"),
        ("--most 3", "--most"),
        ("--most 13", "--most"),
        ("--each 13", "--each"),
        ("--p-double .8", "--p-double"),
        ("--arm base constant", "add cl"),
        ("--arm cl rising --detector fim fgn --arm rising", "add cl"),
        ("--delta -1", "--delta"),
        ("--base scaffold", "--base"),
        ("--detector growth", "--detector"),
        ("--lr-decay 1.1", "--lr-decay"),
        ("--lr-decay 0", "--lr-decay"),
        ("--window 0", "--window"),
        ("--model lstm", "--model"),
        ("--select sizes", "--select"),
        ("--select results.fedcl_fgn.rules:none", "--select"),
        ("--budget 17 --arm base", "--budget"),
        ("--server-ema 1", "--server-ema"),
        ("--kappa 1", "--kappa"),
    ],
)
def test_wrong_flags_give_one_line_and_2(tmp_path, flags, word, capsys):
    with pytest.raises(SystemExit) as stop:
        launch(tmp_path, *flags.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and word in error and "Traceback" not in error
    assert len([line for line in error.splitlines() if "error:" in line]) == 1


def test_lstm_learns_next_characters_of_speaking_roles(tmp_path, real_data, quiet, capsys):
    """Clients are roles; a few rounds bring the loss far below that of guessing among 80 characters."""
    flags = f"--dataset shakespeare --data-dir {real_data} --model lstm --partition natural --width 16 --clients 20"
    flags += " --clients-per-round 4 --rounds 3 --lr 0.5 --min-size 20 --arm base --epochs 1"
    rows = launch(tmp_path, *flags.split())
    assert float(rows[-1]["loss"]) < 0.85 * math.log(80)
