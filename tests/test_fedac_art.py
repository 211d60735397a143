"""The oracles of the clustering curriculum: whole runs as loops, Fuzzy ART in exact fractions, cases by hand."""

import csv
import json
import math
from fractions import Fraction
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

import common
import experiment
import fedac_art
from fedac_art import ARMS, PRESETS, Config, clustering, fuzzy_art, sample_weights

QUICK = {"rounds": 2, "epochs": 1, "trials": 1, "threads": 1, "device": "cpu", "clients": 6, "clients_per_round": 6}
QUICK |= {"min_size": 5, "batch_size": 8, "rho": 0.75}


def words(flags):
    """A dict of flags as a command line."""
    return [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in flags.items()]


def run(folder, *flags):
    """(rows of metrics.csv, {(setting, method, trial): its state}) of a run."""
    report, kept = fedac_art.report, []
    with mock.patch.object(fedac_art, "report", lambda df, runs, folder: kept.extend(runs) or report(df, runs, folder)):
        fedac_art.main(["--out", str(folder), *map(str, flags)])
    with open(folder / "metrics.csv") as file:
        return list(csv.DictReader(file)), {(r.setting, r.method, r.trial): r.load()["state"] for r in kept}


@pytest.fixture
def quick(images):
    """A short run without pictures: rows, and the final weights of each method."""

    def runs(folder, *flags):
        with mock.patch.object(fedac_art, "draw"), mock.patch.object(experiment, "curves"):
            rows, states = run(folder, *words(QUICK), "--dataset", images[0], *flags)
        return rows, {method: state["weights"] for (_, method, _), state in states.items()}

    return runs


# --------------------------------------------------------------------------- a whole run, as loops, in float64 arithmetic

NATURAL = (9, 20, 14, 8, 17, 12)  # samples of each client
COMMON = {"dtype": "float64", "partition": "natural", "min_size": 8, "clients": 6, "clients_per_round": 4, "rounds": 3}
COMMON |= {"epochs": 2, "batch_size": 5, "lr": 0.07, "momentum": 0.6, "weight_decay": 0.01, "seed": 7, "trials": 1}
COMMON |= {"threads": 1, "device": "cpu", "model": "lenet5", "eval_every": 2}
CURRICULUM = {"rho": 0.8, "art_alpha": 0.3, "art_beta": 0.6, "quantile": 0.4, "w_small": 0.2, "w_large": 0.9, "flip": 0.2}
CASES = {
    "fedac, group means, swapped": {
        **{"arm": "fedac", "base": "fedprox", "mu": 0.3, "features": "pooled", "scope": "class", "reduction": "group"},
        **{"swap": True, "ramp": 0.9, "augment": "crop-flip-rotate", "trials": 2},
    },
    "fedac on moon": {"arm": "fedac", "base": "moon", "mu": 2.0, "scope": "client", "ramp": 0.5, "augment": "crop-flip"},
    "fedac on an encoder": {"arm": "fedac", "base": "fedavg", "features": "encoder", "warmup": 2, "scope": "class"},
    "random groups": {"arm": "random-groups", "base": "fedavg", "scope": "client", "projection": True, "augment": "crop-flip"},
    "random by class": {"arm": "random-classes", "base": "fedprox", "mu": 0.3, "scope": "client", "reduction": "group"},
    "base": {"arm": "base", "base": "moon", "mu": 2.0, "features": "pooled", "w_small": 0.0, "augment": "crop-flip-rotate"},
    "solo": {"arm": "fedac", "base": "solo", "solo_epochs": 7, "clients_per_round": 6, "scope": "class", "swap": True},
}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """(path, arrays) of a small .npz: 16x16 colour images of three classes, of six natural clients."""
    rng, n = np.random.default_rng(3), sum(NATURAL)
    centres = rng.integers(40, 216, (3, 3, 4, 4, 3)).repeat(4, 2).repeat(4, 3)  # three kinds of each class

    def draw(y):
        noise = rng.integers(-40, 41, (len(y), 16, 16, 3))
        return np.clip(centres[y, rng.integers(3, size=len(y))] + noise, 0, 255).astype(np.uint8)

    y_train, y_test = rng.choice(3, n, p=[0.5, 0.35, 0.15]), rng.permutation(np.arange(42) % 3)
    owner = rng.permutation(np.repeat(np.arange(len(NATURAL)), NATURAL))
    arrays = {"x_train": draw(y_train), "y_train": y_train, "x_test": draw(y_test), "y_test": y_test, "owner": owner}
    path = tmp_path_factory.mktemp("images") / "images.npz"
    np.savez(path, **arrays)
    return path, arrays


class Literal:
    """FedAC as the paper tells it. Of the project it uses the random streams and the initial weights only."""

    def __init__(self, arrays, flags, trial):
        self.a, self.flags, self.streams = (
            SimpleNamespace(**arrays),
            SimpleNamespace(**flags),
            common.Streams(flags["seed"], trial),
        )
        x, f = self.a.x_train.astype(float), self.flags
        self.mean, self.std = x.mean((0, 1, 2)), x.std((0, 1, 2))
        self.clean, self.wrong = self.a.y_train, np.zeros(len(x), dtype=bool)
        rng = self.streams("flips")
        self.wrong[rng.permutation(len(x))[: round(f.flip * len(x))]] = True
        self.y = np.where(self.wrong, (self.clean + rng.integers(1, 3, len(x))) % 3, self.clean)
        self.shards = [np.flatnonzero(self.a.owner == k) for k in range(6)]
        self.rows, self.P1 = [], np.zeros(len(x), dtype=bool)

    # nets

    def normalised(self, image):
        """uint8 (n, H, W, C) -> (n, C, H, W) float64."""
        return torch.from_numpy((image - self.mean) / self.std).permute(0, 3, 1, 2)

    def net(self, theta, x, head):
        """LeNet-5, with MOON's head if asked: x (n, 3, 16, 16) -> hidden vectors and logits."""
        shapes = [(6, 3, 5, 5), (6,), (16, 6, 5, 5), (16,), (120, 16), (120,), (84, 120), (84,)]
        shapes += [(84, 84), (84,), (256, 84), (256,), (3, 256), (3,)] if head else [(3, 84), (3,)]
        parts = [part.view(shape) for part, shape in zip(theta.split([math.prod(s) for s in shapes]), shapes, strict=True)]
        z = F.max_pool2d(F.conv2d(x, parts[0], parts[1]), 2).relu()
        z = F.max_pool2d(F.conv2d(z, parts[2], parts[3]), 2).relu().flatten(1)
        z = (z @ parts[4].T + parts[5]).relu()
        z = (z @ parts[6].T + parts[7]).relu()
        if head:
            z = (z @ parts[8].T + parts[9]).relu() @ parts[10].T + parts[11]
        return z, z @ parts[-2].T + parts[-1]

    def initial(self, head):
        data = common.resident(*(self.a.__dict__[name] for name in ("x_train", "y_train", "x_test", "y_test")))
        model = common.build_model("lenet5", data, dtype=torch.float64, projection=head)
        return model.init(self.streams.seed("init"))

    # curriculum generation

    def features(self):
        f, x = self.flags, self.a.x_train
        if f.features == "pixels":
            return x.reshape(len(x), -1)
        if f.features == "pooled":
            return (
                np.round(x.reshape(len(x), 8, 2, 8, 2, 3).mean((2, 4)))
                .astype(np.uint8)
                .transpose(0, 3, 1, 2)
                .reshape(len(x), -1)
            )
        theta = self.initial(False)
        for t in range(f.warmup):
            local = [self.train(theta, theta, k, t, f.epochs, "warm-up", plain=True) for k in range(6)]
            theta = sum(len(shard) * y for shard, y in zip(self.shards, local, strict=True)) / len(x)
        result = np.zeros((len(x), 84), dtype=np.uint8)
        for shard in self.shards:
            z = self.net(theta, self.normalised(x[shard]), False)[0].numpy()
            result[shard] = np.round(255 * (z - z.min(0)) / np.maximum(z.max(0) - z.min(0), 1e-12))
        return result

    def cluster(self, x, second):
        """The members of each cluster: lists of samples, all of one client and class."""
        f, clusters = self.flags, []
        for k, shard in enumerate(self.shards):
            own = []  # (label, w, members)
            for i in shard[self.streams("presentation", k, second).permutation(len(shard))]:
                coded, best = np.concatenate([x[i] / 255, 1 - x[i] / 255]), None
                for each in own:
                    meet = np.minimum(coded, each[1]).sum()
                    if each[0] == self.y[i] and meet / x.shape[1] >= f.rho:  # Eq. 1
                        choice = meet / (f.art_alpha + each[1].sum())  # Eq. 2
                        if best is None or choice > best[0]:
                            best = choice, each
                if best is None:
                    own.append([self.y[i], coded, [i]])
                else:
                    best[1][1] = f.art_beta * np.minimum(coded, best[1][1]) + (1 - f.art_beta) * best[1][1]  # Eq. 3
                    best[1][2].append(i)
            clusters += [members for _, _, members in own]
        return clusters

    def shared(self, scope):
        cells = [[i for i in shard if self.y[i] == c] for shard in self.shards for c in range(3)]
        return [list(shard) for shard in self.shards] if scope == "client" else [cell for cell in cells if cell]

    def small(self, clusters, scope):
        size = {i: len(members) for members in clusters for i in members}
        result = set()
        for own in self.shared(scope):
            T = sorted(size[i] for i in own)[int(self.flags.quantile * len(own))]
            result |= {i for i in own if size[i] < T}  # Eq. 5
        return result

    def groups(self):
        """P1 of the arm."""
        f = self.flags
        P1 = self.small(self.clusters[0], f.scope)
        if f.arm.startswith("random"):
            drawn = set()
            for j, own in enumerate(self.shared(f.scope if f.arm == "random-groups" else "class")):
                told = self.streams("random groups", j).permutation(np.array([i in P1 for i in own]))
                drawn |= {i for i, small in zip(own, told, strict=True) if small}
            P1 = drawn
        return P1

    # curriculum training

    def weights(self, batch, shard, t):
        """The weight of each sample of a batch in the mean over the batch."""
        f = self.flags
        alpha = f.w_small + (f.w_large - f.w_small) * min(1, t / (f.ramp * f.rounds)) if f.ramp else f.w_small
        P1 = set(range(len(self.y))) - self.P1 if f.swap else self.P1
        if f.arm == "base":
            return [1.0] * len(batch)
        if f.reduction == "sample":
            total = sum(alpha if i in P1 else f.w_large for i in shard)
            return [(alpha if i in P1 else f.w_large) * len(shard) / total for i in batch]
        small = sum(i in P1 for i in batch)
        means = [alpha / small if i in P1 else f.w_large / (len(batch) - small) for i in batch]
        return [mean * len(batch) / (alpha + f.w_large) for mean in means]

    def turned(self, image, shift, flip, angle):
        """One augmented uint8 image: each pixel looked up where it comes from, black outside."""
        result, middle = np.zeros_like(image), (16 - 1) / 2
        for r in range(16):
            for c in range(16):
                y = np.sin(angle) * (c - middle) + np.cos(angle) * (r - middle)
                x = np.cos(angle) * (c - middle) - np.sin(angle) * (r - middle)
                row, column = round(y + middle + shift[0]), round((-x if flip else x) + middle + shift[1])
                if 0 <= row < 16 and 0 <= column < 16:
                    result[r, c] = image[row, column]
        return result

    def train(self, start, theta_g, k, t, epochs, purpose="batches", plain=False):
        """Client k's SGD from `start`, step by step: its weights (P,)."""
        f, shard, y, v, step = self.flags, self.shards[k], start.clone(), 0, 0
        rng, draw = self.streams(purpose, t, k), self.streams("augment", t, k)
        per_pass = -(-len(shard) // f.batch_size)
        shape = (epochs * per_pass, f.batch_size)
        shift, flip = draw.integers(-4, 5, (*shape, 2)), draw.random(shape) < 0.5
        angle = draw.uniform(-15, 15, shape) * np.pi / 180 if f.augment == "crop-flip-rotate" else np.zeros(shape)
        for _ in range(epochs):
            order = rng.permutation(shard)
            for batch in (order[b : b + f.batch_size] for b in range(0, len(order), f.batch_size)):
                x = self.a.x_train[batch]
                if f.augment != "none" and not plain:
                    x = np.stack([self.turned(x[j], shift[step, j], flip[step, j], angle[step, j]) for j in range(len(batch))])
                theta = y.clone().requires_grad_()
                loss = self.loss(theta, theta_g, self.normalised(x), batch, k, t, plain)
                g = torch.autograd.grad(loss, theta)[0] + f.weight_decay * y
                if f.base == "fedprox" and not plain:
                    g = g + f.mu * (y - theta_g)
                v = f.momentum * v + g
                y = y - f.lr * v
                step += 1
        return y

    def loss(self, theta, theta_g, x, batch, k, t, plain):
        z, logits = self.net(theta, x, self.head and not plain)
        weights, loss = [1.0] * len(batch) if plain else self.weights(batch, self.shards[k], t), 0
        for j, i in enumerate(batch):  # L_total = alpha L_1 + beta L_2, Eq. 8
            loss = loss - weights[j] * torch.log_softmax(logits[j], 0)[self.y[i]] / len(batch)
        if self.flags.base == "moon" and k in self.previous and not plain:
            z_glob, z_prev = (self.net(w, x, True)[0] for w in (theta_g, self.previous[k]))
            for j in range(len(batch)):
                near, far = (torch.exp(F.cosine_similarity(z[j], other[j], dim=0) / 0.5) for other in (z_glob, z_prev))
                loss = loss - self.flags.mu * torch.log(near / (near + far)) / len(batch)
        return loss

    def whole_run(self):
        f, self.previous, self.own = self.flags, {}, {}
        self.head = f.projection or f.base == "moon"
        theta, x, sums = self.initial(self.head), self.features(), {"uploads": 0, "samples": 0, "received_mb": 0, "sent_mb": 0}
        self.clusters = [self.cluster(x, 0), self.cluster(x, 1)]
        self.P1 = self.groups()
        for t in range(f.rounds):
            clients = sorted(self.streams("select", t).permutation(6)[: f.clients_per_round].tolist())
            epochs = f.epochs
            if f.base == "solo":  # 7 epochs over 3 rounds
                epochs = (2, 2, 3)[t]
            local = {k: self.train(self.own.get(k, theta), theta, k, t, epochs) for k in clients}
            if f.base == "solo":
                self.own = local
            else:
                theta = sum(len(self.shards[k]) * local[k] for k in clients) / sum(len(self.shards[k]) for k in clients)
            self.previous |= local
            moved = len(clients) * len(theta) * 8 / 1e6 * (f.base != "solo")
            sums["uploads"] += len(clients)
            sums["samples"] += sum(epochs * len(self.shards[k]) for k in clients)
            sums["received_mb"] += moved
            sums["sent_mb"] += moved
            row = {"setting": "", "method": f.arm, "round": t + 1, "clients": len(clients), "dropped": 0, **sums}
            nets = [self.own[k] for k in range(6)] if f.base == "solo" else [theta]
            row |= self.tested(nets) if (t + 1) % f.eval_every == 0 or t + 1 == f.rounds else {}
            row |= self.measures() if t == 0 else {}
            row |= self.last_round(nets, clients, local) if t + 1 == f.rounds else {}
            self.rows.append(row)
        return theta

    # what is measured

    def tested(self, nets):
        y, right, losses = self.a.y_test, [], []
        for theta in nets:
            logits = self.net(theta, self.normalised(self.a.x_test), self.head)[1]
            right.append(100 * np.mean([int(row.argmax()) == label for row, label in zip(logits, y, strict=True)]))
            losses.append(-np.mean([float(torch.log_softmax(row, 0)[label]) for row, label in zip(logits, y, strict=True)]))
        row = {"accuracy": np.mean(right), "loss": np.mean(losses)}
        return row | ({"client_std": np.std(right, ddof=1)} if len(nets) > 1 else {})

    def measures(self):
        f, n = self.flags, len(self.y)
        first, second = (self.small(clusters, f.scope) for clusters in self.clusters)
        chance = 0
        for own in self.shared(f.scope):
            p, q = (sum(i in P for i in own) / len(own) for P in (first, second))
            chance += len(own) / n * (p * q + (1 - p) * (1 - q))
        return {
            "clusters": len(self.clusters[0]),
            "cluster_size": n / len(self.clusters[0]),
            "small_by_client": len(self.small(self.clusters[0], "client")) / n,
            "small_by_class": len(self.small(self.clusters[0], "class")) / n,
            "whole_cells": np.mean([all(i in self.P1 for i in cell) for cell in self.shared("class")]),
            "agreement": sum((i in first) == (i in second) for i in range(n)) / n,
            "chance": chance,
            "noisy_small": np.mean([self.wrong[i] for i in first]),
            "noisy_large": np.mean([self.wrong[i] for i in range(n) if i not in first]),
        }

    def last_round(self, nets, clients, local):
        from scipy.stats import spearmanr

        size = {i: len(members) for members in self.clusters[0] for i in members}
        total = weight = 0
        for k, shard in enumerate(self.shards):
            logits = self.net(nets[k % len(nets)], self.normalised(self.a.x_train[shard]), self.head)[1]
            losses = [-float(torch.log_softmax(row, 0)[self.y[i]]) for row, i in zip(logits, shard, strict=True)]
            if len({size[i] for i in shard}) > 1:
                total += len(shard) * spearmanr([size[i] for i in shard], losses)[0]
                weight += len(shard)
        rng, y = self.streams("shown images"), self.a.y_test
        classes = sorted(rng.permutation([0, 1, 2]))
        shown = np.concatenate([rng.permutation(np.flatnonzero(y == c))[:10] for c in classes])
        self.labels = y[shown]
        self.shown_clients = [clients[j] for j in sorted(self.streams("shown clients").permutation(len(clients))[:3])]
        x = self.normalised(self.a.x_test[shown])
        self.z = np.stack([self.net(local[k], x, self.head)[0].numpy() for k in self.shown_clients])
        values = [silhouette(z.astype(np.float32), self.labels) for z in self.z]
        return {"spearman": total / weight if weight else math.nan, "silhouette": np.mean(values)}


def silhouette(z, y):
    """Mean of (b - a) / max(a, b): a the mean distance to the own class's others, b to the nearest other class."""
    values = []
    for i in range(len(z)):
        away = np.sqrt(((z - z[i]) ** 2).sum(1, dtype=float))
        a = away[(y == y[i]) & (np.arange(len(z)) != i)].mean()
        b = min(away[y == c].mean() for c in set(y.tolist()) - {y[i]})
        values.append((b - a) / max(a, b))
    return np.mean(values)


@pytest.mark.parametrize("case", CASES)
def test_whole_run_equals_the_literal_algorithm(case, images, tmp_path, monkeypatch):
    """Weights to 1e-9 and every column of metrics.csv; what the figures are drawn from, and what is drawn."""
    path, arrays = images
    flags = {name: field.default for name, field in Config.__dataclass_fields__.items()} | COMMON | CURRICULUM | CASES[case]
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: drawn.append((path.name, self)))
    rows, states = run(tmp_path, f"--dataset={path}", *words(COMMON | CURRICULUM | CASES[case]))
    for trial in range(flags["trials"]):
        literal = Literal(arrays, flags, trial)
        theta = literal.whole_run()
        state = states["", flags["arm"], trial]
        got = torch.stack([state["base"]["own"][k] for k in range(6)]) if flags["base"] == "solo" else state["weights"]
        want = torch.stack([literal.own[k] for k in range(6)]) if flags["base"] == "solo" else theta
        assert (got - want).abs().max() < 1e-9 and (got - literal.initial(literal.head)).abs().max() > 1e-2
        mine = [row for row in rows if int(row["trial"]) == trial]
        assert len(mine) == len(literal.rows)
        for row, wanted in zip(mine, literal.rows, strict=True):
            assert set(row) >= set(wanted) | {"seconds", "trial"}
            for column in set(row) - {"seconds", "trial"}:
                check(column, row[column], wanted.get(column, ""))
        seen = state["seen"]
        assert seen["clients"] == literal.shown_clients and len(set(seen["clients"])) == 3
        np.testing.assert_array_equal(seen["labels"], literal.labels)
        np.testing.assert_allclose(seen["features"], literal.z, atol=1e-5)
    if flags["trials"] == 1:
        check_figures(dict(drawn), seen)
    if flags["clients_per_round"] < 6:
        took_part = [set(literal.streams("select", t).permutation(6)[:4].tolist()) for t in range(3)]
        assert took_part[0] & took_part[2] - took_part[1]  # somebody returns after a gap


def check(column, got, want):
    """One cell of metrics.csv; a nan is an empty cell."""
    if isinstance(want, str) or math.isnan(want):
        assert got == ("" if not isinstance(want, str) else want), (column, got, want)
    else:
        tolerance = 1e-5 if column == "silhouette" else 1e-9
        assert float(got) == pytest.approx(want, rel=tolerance, abs=tolerance), (column, got, want)


def check_figures(drawn, seen):
    """The artists: each panel of Fig 6 is the t-SNE of one client's features, coloured by class."""
    from sklearn.manifold import TSNE

    panels = [axis for axis in drawn["tsne.png"].axes if axis.collections and len(axis.collections[0].get_offsets())]
    assert len(panels) == 3
    points = [panel.collections[0].get_offsets().data for panel in panels]
    for client, z, panel, at in zip(seen["clients"], seen["features"].numpy(), panels, points, strict=True):
        tsne = TSNE(perplexity=min(30, len(z) / 2), method="exact", init="random", random_state=0)
        np.testing.assert_allclose(at, tsne.fit_transform(z / np.abs(z).max()), rtol=1e-5)
        assert f"client {client}" in panel.get_title()
        colours = {}
        for colour, label in zip(panel.collections[0].get_facecolors(), seen["labels"].tolist(), strict=True):
            colours.setdefault(label, set()).add(tuple(colour))
        assert all(len(each) == 1 for each in colours.values()) and len(set.union(*colours.values())) == 3
    assert not np.allclose(points[0], points[1]) and not np.allclose(points[1], points[2])


# ----------------------------------------------------------------------------------------------------- the clustering


def blobs(n=90, d=9, classes=3, seed=0):
    """Clumped uint8 data: (x (n, d), y (n,), a presentation order)."""
    rng = np.random.default_rng(seed)
    centres = rng.integers(0, 256, (6, d))
    x = np.clip(centres[rng.integers(6, size=n)] + rng.integers(-40, 41, (n, d)), 0, 255).astype(np.uint8)
    return x, rng.integers(classes, size=n), rng.permutation(n)


def literal_art(x, y, order, rho, alpha, beta):
    """Section 4.1 sample by sample over one list of clusters of all classes, in exact fractions. (cluster (n,), templates)."""
    rho, alpha, beta = (Fraction(v) for v in (rho, alpha, beta))
    clusters, assigned = [], {}
    for i in order:
        coded = [Fraction(int(v), 255) for v in x[i]] + [1 - Fraction(int(v), 255) for v in x[i]]
        best, chosen = None, None
        for j, (label, w) in enumerate(clusters):
            meet = sum(min(a, b) for a, b in zip(coded, w, strict=True))
            if label == y[i] and meet / len(x[i]) >= rho:
                choice = meet / (alpha + sum(w))
                if best is None or choice > best:
                    best, chosen = choice, j
        if chosen is None:
            clusters.append((y[i], coded))
            chosen = len(clusters) - 1
        else:
            label, w = clusters[chosen]
            clusters[chosen] = (label, [beta * min(a, b) + (1 - beta) * b for a, b in zip(coded, w, strict=True)])
        assigned[i] = chosen
    return np.array([assigned[i] for i in range(len(y))]), [w for _, w in clusters]


def same_partition(a, b):
    """Whether two labellings group the samples alike."""
    return len(set(zip(a, b, strict=True))) == len(set(a)) == len(set(b))


@pytest.mark.parametrize("beta", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("rho", [0.0, 0.5, 0.75, 0.875, 1.0])
def test_clustering_equals_the_literal_algorithm(rho, beta):
    x, y, order = blobs(seed=int(rho * 8))
    got = clustering(x, y, order, rho, 0.01, beta)
    want, templates = literal_art(x, y, order, rho, 0.01, beta)
    assert same_partition(got, want) and set(got) == set(range(1, len(templates) + 1))
    if rho == 0.75:
        assert 3 < len(templates) < 60
    for c in range(3):
        own = order[y[order] == c]
        ids, w = fuzzy_art(x[own], rho, 0.01, beta)
        for j in range(len(w)):
            literal = np.array([float(v) for v in templates[want[own][ids == j][0]]])
            np.testing.assert_allclose(w[j] / 255, literal, atol=1e-12)


@pytest.mark.parametrize("art_alpha", [0.01, 0.2, 5.0])
def test_the_choice_parameter_is_in_units_of_one(art_alpha):
    x, y, order = blobs(n=150, classes=2, seed=11)
    want, _ = literal_art(x, y, order, 0.7, art_alpha, 1.0)
    assert same_partition(clustering(x, y, order, 0.7, art_alpha, 1.0), want)


def test_samples_outside_the_order_have_no_cluster():
    x, y, order = blobs()
    got = clustering(x, y, order[:50], 0.75, 0.01, 1.0)
    assert set(np.flatnonzero(got == 0)) == set(order[50:])


def test_a_case_worked_by_hand():
    # d = 2, |I| = 510 in units of 1/255. a = (255, 0): I = (255, 0, 0, 255). b = (204, 51): I = (204, 51, 51, 204).
    # |a ^ b| = 408, 408 / 510 = .8 exactly: at rho = .8 b joins a and w = (204, 0, 0, 204), at rho = .81 it does not.
    x = np.array([[255, 0], [204, 51]], dtype=np.uint8)
    cluster, w = fuzzy_art(x, 0.8, 0.01, 1.0)
    assert cluster.tolist() == [0, 0] and w.tolist() == [[204, 0, 0, 204]]
    cluster, w = fuzzy_art(x, 0.81, 0.01, 1.0)
    assert cluster.tolist() == [0, 1] and w.tolist() == [[255, 0, 0, 255], [204, 51, 51, 204]]


def test_ties_go_to_the_oldest_and_the_largest_choice_wins():
    x = np.array([[0], [255], [128], [250]], dtype=np.uint8)  # one black, one white, then neither
    cluster, _ = fuzzy_art(x[[0, 1, 3]], 0.9, 0.01, 1.0)
    assert cluster.tolist() == [0, 1, 1]
    # two clusters with equal match and choice for the third sample: (0, 255) and (255, 0) seen from (128, 128)
    x = np.array([[0, 255], [255, 0], [128, 128]], dtype=np.uint8)
    assert fuzzy_art(x, 0.5, 0.01, 1.0)[0].tolist() == [0, 1, 0]
    assert fuzzy_art(x[[1, 0, 2]], 0.5, 0.01, 1.0)[0].tolist() == [0, 1, 0]


@pytest.mark.parametrize("rho", [0.3, 0.7, 0.9])
def test_templates_are_the_minimum_over_members(rho):
    x, y, order = blobs(n=300, seed=3)
    coded = np.concatenate([x, 255 - x], 1)
    for c in range(3):
        own = order[y[order] == c]
        cluster, w = fuzzy_art(x[own], rho, 0.01, 1.0)
        assert set(cluster) == set(range(len(w)))
        for j in range(len(w)):
            np.testing.assert_array_equal(w[j], coded[own][cluster == j].min(0))
            assert w[j].sum(dtype=int) / (255 * x.shape[1]) >= rho


@pytest.mark.parametrize("beta", [1.0, 0.3, 0.0])
def test_templates_only_shrink_and_stay_in_the_unit_cube(beta):
    x, y, _ = blobs(n=80, classes=1, seed=4)
    before = None
    for n in range(1, 81):
        _, w = fuzzy_art(x[:n], 0.6, 0.01, beta)
        assert w.min() >= 0 and w.max() <= 255
        if before is not None:
            assert (w[: len(before)] <= before).all()
            if beta == 0:
                np.testing.assert_array_equal(w[: len(before)], before)
        before = w.astype(float)


def test_extremes_of_the_vigilance():
    x, y, order = blobs(n=200, d=3, seed=5)
    x = x // 100  # many duplicates
    assert same_partition(clustering(x, y, order, 0.0, 0.01, 1.0), y)
    pairs = [tuple(row) + (label,) for row, label in zip(x.tolist(), y.tolist(), strict=True)]
    distinct = np.array([sorted(set(pairs)).index(pair) for pair in pairs])
    assert 3 < len(set(pairs)) < 200
    assert same_partition(clustering(x, y, order, 1.0, 0.01, 1.0), distinct)


def test_classes_are_independent_but_the_order_within_one_matters():
    x, y, order = blobs(n=200, seed=6)
    got = clustering(x, y, order, 0.75, 0.01, 1.0)
    sorted_by_class = order[np.argsort(y[order], kind="stable")]
    np.testing.assert_array_equal(clustering(x, y, sorted_by_class, 0.75, 0.01, 1.0), got)
    for c in range(3):
        own = order[y[order] == c]
        assert same_partition(fuzzy_art(x[own], 0.75, 0.01, 1.0)[0], got[own])
    assert not same_partition(clustering(x, y, order[::-1], 0.75, 0.01, 1.0), got)


def test_real_images_give_clusters_of_useful_size(real_data):
    """CIFAR-10, 1,000 images: the default rho gives clusters of several samples, the textbook's near-singletons."""
    with np.load(real_data / "cifar10_jpeg.npz") as file:
        x, y = file["x_train"], file["y_train"]
    kept = np.random.default_rng(0).permutation(len(x))[:1000]
    x, y, order = x[kept].reshape(1000, -1), y[kept], np.arange(1000)
    cluster = clustering(x, y, order, fedac_art.RHO["pixels"], 0.01, 1.0)
    assert 3 < 1000 / cluster.max() < 20
    assert 1000 / clustering(x, y, order, 0.9, 0.01, 1.0).max() < 1.3


# ------------------------------------------------------------------------------------------------ groups and weights


def test_threshold_is_the_sample_weighted_quantile():
    rng = np.random.default_rng(0)
    for _ in range(50):
        cluster = rng.integers(0, rng.integers(1, 12), 60)
        size = np.bincount(cluster)[cluster]
        for quantile in (0.0, 0.25, 0.5, 0.9, 1.0):
            small = fedac_art.small_clusters(cluster, [np.arange(60)], quantile)
            assert small.mean() <= quantile  # as few as asked, ...
            assert not small.any() or size[small].max() < size[~small].min()
            larger = size[size > size[~small].min()]
            if len(larger):
                assert (size < larger.min()).mean() > quantile  # ... and one size more would be too many
    cluster = np.concatenate([np.arange(29), np.full(71, 29)])  # 29 singletons: .29 of the 100 samples, not .28
    assert fedac_art.small_clusters(cluster, [np.arange(100)], 0.29).sum() == 29


def test_small_clusters_by_client_and_by_class():
    # client 0: class 0 in clusters of 6 and 2, class 1 (rare) in clusters of 2 and 1; client 1: one cluster of 3
    cluster = np.array([1] * 6 + [2] * 2 + [3] * 2 + [4] + [5] * 3 + [0])
    y = np.array([0] * 8 + [1] * 3 + [0] * 3 + [1])
    shards = [np.arange(11), np.arange(11, 14)]
    client = fedac_art.small_clusters(cluster, fedac_art.groups(shards, y, "client"), 0.5)
    assert client.tolist() == [False] * 6 + [True] * 5 + [False] * 3 + [False]  # the whole rare class is small
    by_class = fedac_art.small_clusters(cluster, fedac_art.groups(shards, y, "class"), 0.5)
    assert by_class.tolist() == [False] * 6 + [True] * 2 + [False] * 2 + [True] + [False] * 3 + [False]


@pytest.mark.parametrize("scope", ["client", "class"])
def test_random_groups_have_the_same_sizes(scope):
    rng = np.random.default_rng(1)
    owner, y, P1 = rng.integers(-1, 4, 400), rng.integers(0, 3, 400), rng.random(400) < 0.3
    P1[owner < 0] = False
    shared = fedac_art.groups([np.flatnonzero(owner == k) for k in range(4)], y, scope)
    assert sorted(np.concatenate(shared)) == np.flatnonzero(owner >= 0).tolist()
    drawn = fedac_art.random_groups(P1, shared, common.Streams(1))
    for m in range(4):
        for c in range(3):
            own = (owner == m) & (y == c) if scope == "class" else owner == m
            assert drawn[own].sum() == P1[own].sum()
    assert not np.array_equal(drawn, P1)
    np.testing.assert_array_equal(drawn, fedac_art.random_groups(P1, shared, common.Streams(1)))
    assert not np.array_equal(drawn, fedac_art.random_groups(P1, shared, common.Streams(1, trial=1)))


def test_weights_have_mean_one_per_client_and_the_asked_ratio():
    P1 = np.array([True, False, False, False, True, True, False, False])
    shards = [np.array([0, 1, 2, 3]), np.array([4, 5, 7])]  # sample 6 belongs to nobody
    halves, ones = Config(w_small=0.5), Config(w_small=1.0)
    np.testing.assert_allclose(sample_weights(halves, 0, shards[0][None], shards[0], P1), [[4 / 7, 8 / 7, 8 / 7, 8 / 7]])
    np.testing.assert_allclose(sample_weights(halves, 0, np.array([[7, 4], [5, 7]]), shards[1], P1), [[1.5, 0.75], [0.75, 1.5]])
    np.testing.assert_array_equal(sample_weights(ones, 0, shards[0][None], shards[0], P1), np.ones((1, 4)))
    for reduction in ("sample", "group"):  # all in P1, which weighs nothing
        nothing = Config(w_small=0.0, reduction=reduction)
        np.testing.assert_array_equal(sample_weights(nothing, 0, np.array([[4, 5]]), shards[1][:2], P1), [[1, 1]])


def test_group_means_by_hand():
    """A batch with P1 = {a} and P2 = {b, c}, one of P2 only, and a short one: alpha L1 + beta L2 of group means."""
    P1, shard = np.array([True, False, False, True]), np.arange(4)
    batches = np.array([[0, 1, 2], [1, 2, -1], [3, -1, -1]])
    got = sample_weights(Config(w_small=0.5, w_large=1.0, reduction="group"), 0, batches, shard, P1)
    size = np.array([3, 2, 1])
    np.testing.assert_allclose(got[0] / size[0] * 1.5, [0.5, 0.5, 0.5])  # alpha / 1, beta / 2, beta / 2
    np.testing.assert_allclose(got[1][:2] / size[1] * 1.5, [0.5, 0.5])  # L1 is 0
    np.testing.assert_allclose(got[2][:1] / size[2] * 1.5, [0.5])
    swapped = sample_weights(Config(w_small=0.5, w_large=1.0, reduction="group", swap=True), 0, batches, shard, P1)
    np.testing.assert_allclose(swapped[0] / 3 * 1.5, [1.0, 0.25, 0.25])


def test_ramp_moves_the_first_weight_to_the_second():
    P1, batch, config = np.array([True, False]), np.array([[0, 1]]), Config(rounds=10, ramp=0.5, w_small=0.2)

    def ratio(config, t):
        small, large = sample_weights(config, t, batch, batch[0], P1)[0]
        return small / large

    assert [ratio(config, t) for t in (0, 2, 5, 9)] == pytest.approx([0.2, 0.2 + 0.8 * 0.4, 1.0, 1.0])
    assert ratio(Config(w_small=0.2), 9) == pytest.approx(0.2)


# --------------------------------------------------------------------------------------------------------- the training


@pytest.fixture(scope="module")
def default_run(images, tmp_path_factory):
    """(rows, final weights of each method, folder) of all arms."""
    folder = tmp_path_factory.mktemp("default")
    rows, states = run(folder, *words(QUICK), "--dataset", images[0], "--w-small", "0")
    return rows, {method: state["weights"] for (_, method, _), state in states.items()}, folder


def test_run_writes_rows_summary_and_figures(default_run):
    rows, weights, folder = default_run
    assert [(r["method"], r["round"]) for r in rows] == [(arm, t) for arm in ARMS for t in "12"]
    assert all(r["clusters"] != "" for r in rows if r["round"] == "1")
    assert all(-1 <= float(r[c]) <= 1 for r in rows if r["round"] == "2" for c in ("silhouette", "spearman"))
    assert list(json.loads((folder / "summary.json").read_text())["results"][""]) == list(ARMS)
    for name in ("tsne.png", "partition.png", "accuracy.png"):
        assert (folder / name).read_bytes()[:4] == b"\x89PNG"
    assert len({tuple(w.tolist()) for w in weights.values()}) == 4 and all(torch.isfinite(w).all() for w in weights.values())
    with open(folder / "measures.csv") as file:
        measured = {row["method"]: row for row in csv.DictReader(file)}
    for arm in ARMS:
        first, last = (row for row in rows if row["method"] == arm)
        assert {first[c] for c in ("noisy_small", "whole_cells")} == {measured[arm][c] for c in ("noisy_small", "whole_cells")}
        assert float(last["spearman"]) == pytest.approx(float(measured[arm]["spearman"]))


def test_clusters_are_those_of_the_flipped_labels(tmp_path, quick):
    """Two shares of wrong labels in one folder, each as in a folder of its own."""
    both, _ = quick(tmp_path / "both", "--flip", "0", "0.4", "--arm", "fedac")
    for flip in ("0", "0.4"):
        alone, _ = quick(tmp_path / flip, "--flip", flip, "--arm", "fedac")
        own = [row for row in both if row["setting"] == f"flip={float(flip)}"]
        assert [row["small_by_client"] for row in own] == [row["small_by_client"] for row in alone]
        assert [row["clusters"] for row in own] == [row["clusters"] for row in alone] and len(own) == len(alone) > 0
    assert len({row["clusters"] for row in both if row["round"] == "1"}) == 2


def test_measures_are_this_scripts_own_columns(tmp_path, quick, default_run):
    quick(tmp_path, "--per-client", "--base", "solo", "--arm", "base")
    with open(default_run[2] / "measures.csv") as own, open(tmp_path / "measures.csv") as other:
        names = next(csv.reader(own))
        assert next(csv.reader(other)) == names and names[3] == "clusters" and names[-2:] == ["spearman", "silhouette"]
        assert {"accuracy", "loss", "own_mean", "client_std"}.isdisjoint(names)


def test_the_control_by_class_keeps_what_random_groups_change(default_run):
    """At --scope client whole (client, class) cells lie in P1, and stay there only where the groups are drawn by class."""
    rows = {row["method"]: float(row["whole_cells"]) for row in default_run[0] if row["round"] == "1"}
    assert rows["fedac"] == rows["base"] == rows["random-classes"] > 3 * rows["random-groups"]


def test_both_controls_are_one_where_thresholds_are_by_class(tmp_path, quick):
    _, weights = quick(tmp_path, "--scope", "class", "--arm", "random-groups", "random-classes", "--rounds", "1")
    assert torch.equal(weights["random-groups"], weights["random-classes"])


def test_equal_weights_are_the_base_bit_for_bit(tmp_path, default_run, quick):
    _, weights = quick(tmp_path, "--w-small", "1", "--arm", "fedac", "random-groups", "random-classes")
    assert all(torch.equal(w, default_run[1]["base"]) for w in weights.values())


def test_group_means_of_equal_weight_are_not_the_base(tmp_path, default_run, quick):
    _, weights = quick(tmp_path, "--w-small", "1", "--arm", "fedac", "base", "--reduction", "group")
    assert not torch.equal(weights["fedac"], weights["base"]) and torch.equal(weights["base"], default_run[1]["base"])


def test_swap_gives_the_weights_to_the_other_groups(tmp_path, default_run, quick):
    _, weights = quick(tmp_path, "--w-small", "1", "--w-large", "0", "--swap", "--arm", "fedac")
    assert torch.equal(weights["fedac"], default_run[1]["fedac"])


def test_sweeps_train_the_base_once_and_draw_it_in_every_setting(tmp_path, images):
    flags = ["--dataset", images[0], "--w-small", "1", "0", "--arm", "fedac", "base", "--rounds", "1"]
    rows, states = run(tmp_path, *words(QUICK), *flags)
    assert sorted(method for _, method, _ in states) == ["base", "fedac", "fedac"]
    assert [(r["setting"], r["method"]) for r in rows] == [
        (f"w_small={w}", arm) for w in ("1.0", "0.0") for arm in ("fedac", "base")
    ]
    base = [{**row, "setting": ""} for row in rows if row["method"] == "base"]
    assert base[0] == base[1]
    assert all((tmp_path / f"tsne-w_small={w}.png").exists() for w in ("1.0", "0.0"))


# --------------------------------------------------------------------------------------------------------------- bases


def test_moon_equals_fedavg_in_its_first_round_only(tmp_path, quick):
    weights, few = {}, ["--arm", "fedac", "--rounds"]
    for rounds in ("1", "2"):
        weights["moon" + rounds] = quick(tmp_path / f"moon{rounds}", *few, rounds, "--base", "moon")[1]["fedac"]
        weights["avg" + rounds] = quick(tmp_path / f"avg{rounds}", *few, rounds, "--projection")[1]["fedac"]
    assert torch.equal(weights["moon1"], weights["avg1"]) and not torch.equal(weights["moon2"], weights["avg2"])


def test_fedprox_pulls_and_mu_0_is_fedavg(tmp_path, default_run, quick):
    _, far = quick(tmp_path / "far", "--base", "fedprox", "--mu", "1", "--w-small", "0", "--arm", "fedac")
    _, zero = quick(tmp_path / "zero", "--base", "fedprox", "--mu", "0", "--w-small", "0", "--arm", "fedac")
    assert torch.equal(zero["fedac"], default_run[1]["fedac"]) and not torch.equal(far["fedac"], zero["fedac"])


def test_solo_trains_its_hundred_epochs_and_sends_nothing(tmp_path, quick):
    for rounds in (1, 3, 7, 10, 100):
        config = Config(base="solo", rounds=rounds, epochs=10)
        assert sum(fedac_art.local_epochs(config, t) for t in range(rounds)) == 100
    assert fedac_art.local_epochs(Config(base="moon", epochs=7), 3) == 7
    rows, _ = quick(tmp_path, "--base", "solo", "--solo-epochs", "3", "--arm", "base")
    n = sum(NATURAL)
    assert [int(row["samples"]) for row in rows] == [n, 3 * n]
    assert [(float(row["received_mb"]), float(row["sent_mb"])) for row in rows] == [(0, 0), (0, 0)]


# ------------------------------------------------------------------------------------- augmentation, features, measures


def black_on(x):
    """(normalised images, black) of uint8 images, with other moments in each channel."""
    mean, std = torch.tensor([100.0, 50, 30][: x.shape[-1]]), torch.tensor([60.0, 70, 80][: x.shape[-1]])
    return (torch.as_tensor(x) - mean) / std, -mean / std


def test_augmentation_crops_and_flips_each_image_by_its_own_draw():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (2, 3, 16, 16, 3), dtype=np.uint8)
    drawn = fedac_art.draws("crop-flip", np.zeros((1, 5), dtype=int), rng)
    assert drawn["shift"].shape == (1, 5, 2) and not drawn["angle"].any()
    shift, flip = rng.integers(-4, 5, (2, 5, 2)), rng.random((2, 5)) < 0.5
    extra = {"shift": torch.as_tensor(shift), "flip": torch.as_tensor(flip), "angle": torch.zeros(2, 5), "known": torch.ones(2)}
    images, black = black_on(x)
    got = fedac_art.augmented(images, extra, black).numpy()  # the batch is shorter than the schedule is wide
    for k in range(2):
        for b in range(3):
            top, left = shift[k, b] + 4
            want = np.pad(x[k, b], ((4, 4), (4, 4), (0, 0)))[top : top + 16, left : left + 16]
            want = black_on(want[:, ::-1].copy() if flip[k, b] else want)[0]
            np.testing.assert_allclose(got[k, b], want, atol=1e-5)


def test_rotation_turns_about_the_centre():
    x = torch.randint(0, 256, (1, 2, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images, black = black_on(x)
    extra = {"shift": torch.zeros(1, 2, 2), "flip": torch.zeros(1, 2, dtype=torch.bool)}
    turned = fedac_art.augmented(images, extra | {"angle": torch.tensor([[0.0, np.pi / 2]])}, black)
    torch.testing.assert_close(turned[0, 0], images[0, 0])
    quarters = [torch.allclose(turned[0, 1], torch.rot90(images[0, 1], turns, (0, 1)), atol=1e-5) for turns in (1, 3)]
    assert sorted(quarters) == [False, True]
    angle = np.degrees(fedac_art.draws("crop-flip-rotate", np.zeros((50, 50), dtype=int), np.random.default_rng(0))["angle"])
    assert -15 <= angle.min() < -14 and 14 < angle.max() <= 15


def test_draws_reach_every_place_of_the_padded_image():
    drawn = fedac_art.draws("crop-flip", np.zeros((60, 60), dtype=int), np.random.default_rng(0))
    assert set(drawn["shift"].flatten().tolist()) == set(range(-4, 5)) and 0.45 < drawn["flip"].mean() < 0.55
    assert not np.array_equal(drawn["shift"][..., 0], drawn["shift"][..., 1])


def federation(data, flags=None, **shape):
    """(config, Federation) on a few samples of `data`."""
    config = Config(**{"clients": 2, "clients_per_round": 2, "threads": 1, "device": "cpu"} | (flags or {}) | shape)
    return config, common.Federation(config, data, common.Streams(0))


def few_digits(n=40, size=None):
    data = common.load_data("digits", size=size)
    return common.Data(data.x_train[:n], data.y_train[:n], data.x_test, data.y_test, data.classes, data.mean, data.std)


def test_features_are_the_clients_own_raw_images():
    data = few_digits()
    config, fl = federation(data)
    pixels = fedac_art.features(config, fl, data)
    np.testing.assert_array_equal(pixels, data.x_train.numpy().reshape(40, -1))
    wide = few_digits(size=32)
    config, fl = federation(wide, features="pooled")  # 32x32: blocks of 4x4
    blocks = wide.x_train.numpy().reshape(40, 8, 4, 8, 4).astype(float).mean((2, 4)).reshape(40, 64)
    pooled = fedac_art.features(config, fl, wide)
    assert pooled.dtype == np.uint8 and np.abs(pooled - blocks).max() <= 0.5
    config, fl = federation(data, features="encoder", epochs=1, warmup=1)
    encoder = fedac_art.features(config, fl, data)
    assert encoder.shape == (40, 84) and encoder.dtype == np.uint8
    for shard in fl.shards:  # every feature spans the bytes on every client, or is constant there
        assert set(encoder[shard].min(0)) == {0} and {0, 255} >= set(encoder[shard].max(0)) >= {255}


def test_hidden_vectors_of_a_resnet_are_those_before_its_head():
    data = few_digits(6, size=32)
    model = common.build_model("resnet9", data, dtype=torch.float64)
    stack, x = torch.stack([model.init(0), model.init(1)]), data.images("train", torch.float64)
    z = fedac_art.hidden(model, stack, x, np.array([5, 0, 3]))
    assert z.shape == (2, 3, 512)
    logits = torch.stack(common.predict(model, stack, x, [np.array([5, 0, 3])] * 2))
    assert torch.equal(model.bind(stack).head(z), logits)


def test_encoder_with_dropout_depends_on_no_earlier_draw():
    data = few_digits(16, size=32)
    config, fl = federation(data, model="alexnet", width=16, features="encoder", epochs=1, warmup=1, min_size=1)
    _, first = fedac_art.warm_up(config, fl, data)
    torch.rand(3)
    assert torch.equal(fedac_art.warm_up(config, fl, data)[1], first)


@pytest.mark.parametrize(("features", "channels", "rho"), [("pixels", 3, 0.35), ("pooled", 3, 0.4), ("pixels", 1, 0.6)])
def test_default_vigilance(features, channels, rho, monkeypatch):
    rng = np.random.default_rng(0)
    x, y = torch.as_tensor(rng.integers(0, 256, (20, 16, 16, channels), dtype=np.uint8)), torch.arange(20) % 2
    data = common.Data(x, y, x, y, 2, torch.ones(channels), torch.ones(channels))
    seen = []
    monkeypatch.setattr(fedac_art, "clustering", lambda *a: seen.append(a[3]) or np.ones(20, dtype=int))
    for given in (-1.0, 0.0, 0.9):
        fedac_art.cluster_clients(*federation(data, features=features, rho=given, min_size=1), data)
    assert seen == [rho, rho, 0.0, 0.0, 0.9, 0.9]


def test_clusters_of_different_clients_never_mix():
    data = common.load_data("digits")
    config, fl = federation(data)
    fl.shards = [np.arange(0, 300), np.arange(300, 500)]
    before = data.y_train.clone()
    cluster = fedac_art.cluster_clients(config, fl, data).numpy()
    assert torch.equal(before, data.y_train)
    assert cluster.shape == (2, len(data.y_train)) and (cluster[:, 500:] == 0).all() and (cluster[:, :500] > 0).all()
    for ids in cluster:
        assert not set(ids[:300]) & set(ids[300:500]) and set(ids[:500]) == set(range(1, ids.max() + 1))
        assert len({(c, label) for c, label in zip(ids[:500], data.y_train[:500].tolist(), strict=True)}) == ids.max()


def test_chance_is_that_of_groups_which_share_a_threshold():
    """One client: class 0 has a sample of three in P1 under either order, class 1, a single cluster, has none."""
    cluster, y = np.array([[1, 2, 2, 3, 3, 3], [2, 1, 2, 3, 3, 3]]), torch.tensor([0, 0, 0, 1, 1, 1])
    fl = SimpleNamespace(shards=[np.arange(6)], data=SimpleNamespace(y_train=y))
    P1 = np.array([1, 0, 0, 1, 1, 1], dtype=bool)  # of a control: a whole cell is in it
    got = fedac_art.clusters_seen(Config(scope="class"), fl, cluster, P1, np.zeros(6, dtype=bool))
    assert got["small_by_class"] == pytest.approx(1 / 6) and got["agreement"] == pytest.approx(4 / 6)
    assert got["chance"] == pytest.approx((3 * (1 / 9 + 4 / 9) + 3) / 6) and got["whole_cells"] == 0.5
    assert (got["noisy_small"], got["noisy_large"]) == (0, 0)
    none = fedac_art.clusters_seen(Config(scope="class", quantile=0.0), fl, cluster, P1, np.ones(6, dtype=bool))
    assert math.isnan(none["noisy_small"]) and none["noisy_large"] == 1 and none["small_by_client"] == 0


def test_flipped_labels_are_wrong_and_as_many_as_asked():
    data = common.load_data("digits")
    noisy, flipped = fedac_art.flip_labels(data, 0.2, np.random.default_rng(0))
    np.testing.assert_array_equal((noisy.y_train != data.y_train).numpy(), flipped)
    assert flipped.sum() == round(0.2 * len(flipped)) and set(noisy.y_train.tolist()) == set(range(10))
    assert torch.equal(fedac_art.flip_labels(data, 0.0, np.random.default_rng(0))[0].y_train, data.y_train)
    assert noisy.images("train", torch.float32) is data.images("train", torch.float32)  # normalised once


# ---------------------------------------------------------------------------------------------------------- command line


def test_resume_gives_the_same_rows_and_weights(tmp_path, monkeypatch, quick):
    flags = ["--arm", "fedac", "random-classes", "--base", "moon", "--augment", "crop-flip-rotate"]
    whole, weights = quick(tmp_path / "whole", *flags)
    record = experiment.Run.record

    def dies(self, t, *a, **columns):
        if self.method == "random-classes" and t == 1:
            raise MemoryError
        record(self, t, *a, **columns)

    monkeypatch.setattr(experiment.Run, "record", dies)
    with pytest.raises(MemoryError):
        quick(tmp_path / "killed", *flags)
    monkeypatch.setattr(experiment.Run, "record", record)
    resumed, again = quick(tmp_path / "killed", *flags, "--resume")
    assert [{**row, "seconds": ""} for row in resumed] == [{**row, "seconds": ""} for row in whole]
    assert all(torch.equal(weights[arm], again[arm]) for arm in weights)


def test_jobs_change_no_bit(tmp_path, default_run, quick):
    rows, weights = quick(tmp_path, "--w-small", "0", "--jobs", "2", "--arm", "random-classes", "fedac")
    wanted = [{**row, "seconds": ""} for arm in weights for row in default_run[0] if row["method"] == arm]
    assert [{**row, "seconds": ""} for row in rows] == wanted and len(wanted) == 4
    assert all(torch.equal(weights[arm], default_run[1][arm]) for arm in weights)


@pytest.mark.parametrize(
    "flags",
    [
        ["--w-small", "0", "--w-large", "0"],
        ["--w-small", "-1"],
        ["--rho", "1.5"],
        ["--rho", "-0.5"],
        ["--flip", "0.2", "--hold-out", "0.2"],
        ["--flip", "0.2", "--tune", "lr=.1,.2"],
        ["--flip", "0.2", "--per-client"],
        ["--ramp", "0.5", "--w-small", "1", "--w-large", "0"],
        ["--art-alpha", "0"],
        ["--art-beta", "1.1"],
        ["--quantile", "nan"],
        ["--base", "solo", "--solo-epochs", "1", "--rounds", "2"],
        ["--base", "solo", "--clients-per-round", "5"],
        ["--dataset", "shakespeare"],
        ["--model", "lstm"],
        ["--features", "hog"],
        ["--arm", "random"],
        ["--reduction", "mean"],
    ],
)
def test_wrong_flags_give_one_line_and_status_2(flags, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        fedac_art.main([*flags, "--out", str(tmp_path / "x")])
    out = capsys.readouterr()
    assert stop.value.code == 2 and out.err.count("\n") == 1 and out.out == ""
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("features", ["pixels", "encoder"])
@pytest.mark.parametrize("arm, base", [("base", "fedavg"), ("fedac", "solo"), ("random-groups", "fedprox")])
def test_what_an_arm_is_said_not_to_read_it_does_not_read(arm, base, features, quick, tmp_path):
    flags = {"arm": arm, "base": base, "features": features, "clients_per_round": 6, "rounds": 2, "solo_epochs": 4}
    changed = {"epochs": 2, "warmup": 2, "solo_epochs": 9, "w_small": 0.1, "w_large": 0.4, "reduction": "group", "ramp": 0.5}
    unread = {name: value for name, value in changed.items() if name in fedac_art.unread(Config(**flags))}
    assert bool(unread) == ((arm, features) != ("fedac", "encoder"))  # of SOLO, whose encoder takes --epochs
    (_, one), (_, other) = (quick(tmp_path / str(len(own)), *words(flags | own)) for own in ({}, unread))
    assert torch.equal(one[arm], other[arm])


def test_arms_that_tune_chose_other_rates_for_have_the_same_clusters(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment.Run, "rehearse", lambda run, config: config.lr if run.method == "fedac" else 1 - config.lr)
    flags = {"features": "encoder", "warmup": 2, "rho": 0.5, "tune": "lr=.01,1"}
    rows, _ = quick(tmp_path, *words(flags), "--arm", "fedac", "random-groups")
    first = [row for row in rows if row["round"] == "1" and row["trial"] == "0"]
    assert [row["tuned"] for row in first] == ["1.0", "0.01"]
    assert len({(row["clusters"], row["small_by_class"], row["agreement"]) for row in first}) == 1


def test_a_net_without_head_and_a_text_are_refused_before_anything_is_deleted(tmp_path, capsys):
    (tmp_path / "metrics.csv").write_text("of an old run")
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nclass Net(nn.Sequential):\n    def __init__(self, channels, side, classes):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(channels * side**2, classes))\n"
        "class Text(nn.Sequential):\n    def __init__(self, channels, side, classes):\n"
        "        super().__init__(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, classes))\n"
    )
    x, y = np.arange(240).reshape(80, 3) % 9, np.arange(80) % 4
    np.savez(tmp_path / "text.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    head = ["--projection", "off", "on", "--model", f"{tmp_path}/mine.py:Net"]
    text = ["--dataset", f"{tmp_path}/text.npz", "--model", f"{tmp_path}/mine.py:Text", "--clients", "2"]
    for flags, said in ((head, "projection head"), ([*text, "--clients-per-round", "2"], "clusters images")):
        with pytest.raises(SystemExit) as stop:
            fedac_art.main([*flags, "--out", str(tmp_path)])
        assert stop.value.code == 2 and said in capsys.readouterr().err
        assert (tmp_path / "metrics.csv").read_text() == "of an old run"


def test_presets_are_the_papers_set_up():
    for name, text in PRESETS.items():
        configs, swept = experiment.parse(Config, PRESETS, fedac_art.__doc__, ["--preset", name])
        assert "#" in text
        for config in configs:
            config.check()
            cifar100 = config.dataset == "cifar100"
            if name.startswith("table") or name in ("fig2", "fig6", "batch"):
                shape = (config.clients, config.clients_per_round, config.rounds, config.epochs)
                assert shape == (10, 10, 100, 10) and config.batch_size in (64, 128)
                assert config.augment == ("crop-flip-rotate" if cifar100 else "crop-flip")
                assert config.model == ("resnet18" if cifar100 else "simplecnn")
                assert cifar100 == ("cifar100" in name) and config.seed == Config.seed
                assert (config.base == "moon" and cifar100) == (config.mu == 1)
            assert (config.lr, config.momentum, config.weight_decay, config.min_size) == (0.01, 0.9, 1e-5, 10)

    def values(name, flag):
        return list(dict.fromkeys(getattr(c, flag) for c in experiment.parse(Config, PRESETS, "-", ["--preset", name])[0]))

    assert values("table2", "base") == ["solo", "fedavg", "fedprox", "moon"] and values("table2", "projection") == [True]
    assert values("table2", "alpha") == values("table3-moon-cifar100", "alpha") == values("fig5", "alpha") == [0.3, 0.5]
    assert values("table3", "base") == ["solo", "fedprox", "moon"] and values("table3", "arm") == list(ARMS)
    assert values("batch", "batch_size") == [64, 128] and values("fig5", "dataset") == ["cifar10", "cifar100"]
    assert values("small", "w_small") == [1, 0.5, 0] and values("large", "w_large") == [0.5, 0]
    assert values("d4", "flip") == [0, 0.2] and values("d4", "features") == ["pixels", "encoder"]


@pytest.mark.parametrize("bad", [0.0, 3.5, math.nan, math.inf, 1e30])
def test_features_of_a_dead_net_are_drawn_all_the_same(bad, tmp_path):
    """Where every feature is alike scikit-learn's tree would recurse without end."""
    z = torch.full((3, 30, 6), bad)
    seen = {"features": z, "labels": torch.arange(30) % 3, "clients": [0, 4, 7]}
    fedac_art.draw({"random-groups": seen}, tmp_path, "-x")
    assert (tmp_path / "tsne-x.png").stat().st_size > 1000


def test_one_class_two_test_images_and_tiny_clients(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (24, 16, 16, 1), dtype=np.uint8)
    np.savez(tmp_path / "one.npz", x_train=x, y_train=np.zeros(24, int), x_test=x[:2], y_test=np.zeros(2, int))
    few = ["--dataset", tmp_path / "one.npz", "--clients-per-round", "2", "--min-size", "1", "--flip", "0.5"]
    rows, _ = run(tmp_path / "run", *words(QUICK), *few)
    assert {row["noisy_large"] for row in rows if row["round"] == "1"} == {"0.0"}
    assert {row["silhouette"] for row in rows} == {""}


def test_examples_show_the_smallest_and_the_largest_clusters(tmp_path, images):
    import bench_art
    from matplotlib import pyplot

    x = torch.arange(1, 8, dtype=torch.uint8).view(7, 1, 1, 1).expand(7, 2, 2, 1)
    picture = bench_art.examples(x, np.zeros(7, dtype=int), np.array([1, 2, 2, 3, 3, 3, 4]), np.arange(6), across=2)
    shown = picture[1, [1, 4, 7, 10], 0].tolist()
    assert shown[:2] == [1, 2] and set(shown[2:]) <= {4, 5, 6}
    bench_art.picture(["--dataset", str(images[0]), *words(QUICK), "--out", str(tmp_path / "new")])
    assert pyplot.imread(tmp_path / "new" / "examples.png").shape[:2] == (3 * 17 + 1, 16 * 17 + 1)
