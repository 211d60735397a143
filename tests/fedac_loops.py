"""FedAC once more: loops over rounds, clients, steps, samples and pixels in float64.

Of the project it uses the random streams and the initial weights. Fuzzy ART is plain/'s.
"""

import math
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from ordinary import load_plain
from scipy.stats import spearmanr

import common
from data import from_arrays
from nets import build_model

plain = load_plain("fedac_art")
NATURAL = (9, 20, 14, 8, 17, 12)  # samples of each client
SIDE = 16
LENET = [(6, 3, 5, 5), (6,), (16, 6, 5, 5), (16,), (120, 16), (120,), (84, 120), (84,)]
MOON_HEAD = [(84, 84), (84,), (256, 84), (256,), (3, 256), (3,)]


def make_images() -> dict[str, np.ndarray]:
    """16x16 colour images of three classes, each of three kinds, of six natural clients."""
    rng = np.random.default_rng(3)
    n = sum(NATURAL)
    centres = rng.integers(40, 216, (3, 3, 4, 4, 3)).repeat(4, 2).repeat(4, 3)

    def draw(y):
        noise = rng.integers(-40, 41, (len(y), SIDE, SIDE, 3))
        kinds = rng.integers(3, size=len(y))
        return np.clip(centres[y, kinds] + noise, 0, 255).astype(np.uint8)

    y_train = rng.choice(3, n, p=[0.5, 0.35, 0.15])
    y_test = rng.permutation(np.arange(42) % 3)
    owner = rng.permutation(np.repeat(np.arange(len(NATURAL)), NATURAL))
    x_train = draw(y_train)
    x_test = draw(y_test)
    return {
        "x_train": x_train,
        "y_train": y_train,
        "x_test": x_test,
        "y_test": y_test,
        "owner": owner,
    }


def forward(theta: torch.Tensor, x: torch.Tensor, head: bool):
    """LeNet-5, with MOON's head if asked: x (n, 3, 16, 16) -> hidden vectors and logits."""
    shapes = LENET + (MOON_HEAD if head else [(3, 84), (3,)])
    sizes = [math.prod(shape) for shape in shapes]
    w = [part.view(shape) for part, shape in zip(theta.split(sizes), shapes, strict=True)]
    z = F.max_pool2d(F.conv2d(x, w[0], w[1]), 2).relu()
    z = F.max_pool2d(F.conv2d(z, w[2], w[3]), 2).relu().flatten(1)
    z = (z @ w[4].T + w[5]).relu()
    z = (z @ w[6].T + w[7]).relu()
    if head:
        z = (z @ w[8].T + w[9]).relu()
        z = z @ w[10].T + w[11]
    return z, z @ w[-2].T + w[-1]


def move(image: np.ndarray, shift, flip: bool, angle: float, black=0) -> np.ndarray:
    """An image augmented: each pixel looked up where it comes from, black outside."""
    result = np.full_like(image, black)
    height, width = image.shape[:2]
    for r in range(height):
        for c in range(width):
            down = r - (height - 1) / 2  # from the middle
            right = c - (width - 1) / 2
            y = np.sin(angle) * right + np.cos(angle) * down
            x = np.cos(angle) * right - np.sin(angle) * down
            if flip:
                x = -x
            row = round(y + (height - 1) / 2 + shift[0])
            column = round(x + (width - 1) / 2 + shift[1])
            if 0 <= row < height and 0 <= column < width:
                result[r, c] = image[row, column]
    return result


def silhouette(z: np.ndarray, y: np.ndarray) -> float:
    """Mean of (b - a) / max(a, b): a the mean distance within the class, b to the nearest other."""
    values = []
    for i in range(len(z)):
        away = np.sqrt(((z - z[i]) ** 2).sum(1, dtype=float))
        others = (y == y[i]) & (np.arange(len(z)) != i)
        a = away[others].mean()
        b = min(away[y == c].mean() for c in set(y.tolist()) - {y[i]})
        values.append((b - a) / max(a, b))
    return np.mean(values)


class Loops:
    """One run. flags: every flag of results/fedac_art/controls.py; study: with its measures."""

    def __init__(self, arrays: dict, flags: dict, trial: int, study: bool):
        self.a = SimpleNamespace(**arrays)
        self.f = SimpleNamespace(**flags)
        self.study = study
        self.streams = common.Streams(self.f.seed, trial)
        x = self.a.x_train.astype(float)
        n = len(x)
        self.mean = x.mean((0, 1, 2))
        self.std = x.std((0, 1, 2))
        rng = self.streams("flips")
        self.wrong = np.zeros(n, dtype=bool)
        self.wrong[rng.permutation(n)[: round(self.f.flip * n)]] = True
        another = (self.a.y_train + rng.integers(1, 3, n)) % 3
        self.y = np.where(self.wrong, another, self.a.y_train)
        self.shards = [np.flatnonzero(self.a.owner == m) for m in range(6)]
        self.head = self.f.projection or self.f.base == "moon"
        self.rows = []
        self.previous = {}
        self.nets = {}
        self.train_loss = {}

    def normalise(self, image: np.ndarray) -> torch.Tensor:
        """uint8 (n, H, W, C) -> (n, C, H, W) float64."""
        return torch.from_numpy((image - self.mean) / self.std).permute(0, 3, 1, 2)

    def initial(self, head: bool) -> torch.Tensor:
        arrays = [self.a.x_train, self.a.y_train, self.a.x_test, self.a.y_test]
        data = from_arrays(*arrays)
        model = build_model("lenet5", data, dtype=torch.float64, projection=head)
        return model.init(self.streams.seed("init"))

    # ------------------------------------------------------------------- curriculum generation

    def features(self) -> np.ndarray:
        x = self.a.x_train
        if self.f.features == "pixels":
            return x.reshape(len(x), -1)
        if self.f.features == "pooled":
            fields = x.reshape(len(x), 8, 2, 8, 2, 3).mean((2, 4))
            return np.round(fields).transpose(0, 3, 1, 2).reshape(len(x), -1).astype(np.uint8)
        theta = self.initial(False)
        for t in range(self.f.warmup):
            total = 0
            for m, shard in enumerate(self.shards):
                local = self.train(theta, theta, m, t, self.f.epochs, "warm-up", plain=True)
                total = total + len(shard) * local
            theta = total / len(x)
        result = np.zeros((len(x), 84), dtype=np.uint8)
        for shard in self.shards:
            z = forward(theta, self.normalise(x[shard]), False)[0].numpy()
            width = np.maximum(z.max(0) - z.min(0), 1e-12)
            result[shard] = np.round(255 * (z - z.min(0)) / width)
        return result

    def cluster(self, x: np.ndarray, presentation: int) -> list[list[int]]:
        """The members of each cluster, all of one client and class."""
        f = self.f
        result = []
        for m, shard in enumerate(self.shards):
            order = self.streams("presentation", m, presentation).permutation(shard)
            for c in range(3):
                samples = order[self.y[order] == c]
                found = plain.fuzzy_art(x[samples] / 255, f.rho, f.art_alpha, f.art_beta)
                result += [samples[found == j].tolist() for j in range(max(found, default=-1) + 1)]
        return result

    def groups(self, scope: str) -> list[list[int]]:
        if scope == "client":
            return [list(shard) for shard in self.shards]
        cells = []
        for shard in self.shards:
            for c in range(3):
                cells.append([i for i in shard if self.y[i] == c])
        return [cell for cell in cells if cell]

    def small(self, clusters: list, scope: str) -> set:
        size = self.sizes(clusters)
        result = set()
        for samples in self.groups(scope):
            T = plain.quantile([size[i] for i in samples], self.f.quantile)
            result |= {i for i in samples if size[i] < T}  # Eq. 5
        return result

    def sizes(self, clusters: list) -> dict[int, int]:
        size = {}
        for members in clusters:
            for i in members:
                size[i] = len(members)
        return size

    def arm_groups(self) -> set:
        """P1 of the arm."""
        P1 = self.small(self.clusters[0], self.f.scope)
        if not self.f.method.startswith("random"):
            return P1
        drawn = set()
        scope = "class" if self.f.method == "random-classes" else self.f.scope
        for j, samples in enumerate(self.groups(scope)):
            in_P1 = np.array([i in P1 for i in samples])
            told = self.streams("random groups", j).permutation(in_P1)
            drawn |= {i for i, small in zip(samples, told, strict=True) if small}
        return drawn

    # --------------------------------------------------------------------- curriculum training

    def weights(self, batch: np.ndarray, shard: np.ndarray) -> list[float]:
        """The weight of each sample in the mean over the batch."""
        f = self.f
        if f.method == "base":
            return [1.0] * len(batch)
        alpha = f.w_small
        beta = f.w_large
        weights = []
        if f.reduction == "sample":
            small = len(self.P1 & set(shard))
            total = alpha * small + beta * (len(shard) - small)
            for i in batch:
                weight = alpha if i in self.P1 else beta
                weights.append(weight * len(shard) / total)
        else:
            small = len(self.P1 & set(batch))
            for i in batch:
                mean = alpha / small if i in self.P1 else beta / (len(batch) - small)
                weights.append(mean * len(batch) / (alpha + beta))
        return weights

    def train(self, start, theta_g, m, t, epochs, purpose="batches", plain=False):
        """Client m's SGD from `start`, step by step: its weights (P,)."""
        f = self.f
        shard = self.shards[m]
        w = start.clone()
        v = 0
        step = 0
        losses = []
        rng = self.streams(purpose, t, m)
        draw = self.streams("augment", t, m)
        shape = (epochs * math.ceil(len(shard) / f.batch_size), f.batch_size)
        shift = draw.integers(-4, 5, (*shape, 2))
        flip = draw.random(shape) < 0.5
        angle = np.zeros(shape)
        if f.augment == "crop-flip-rotate":
            angle = draw.uniform(-15, 15, shape) * np.pi / 180
        for _ in range(epochs):
            order = rng.permutation(shard)
            for b in range(0, len(order), f.batch_size):
                batch = order[b : b + f.batch_size]
                x = self.a.x_train[batch]
                if f.augment != "none" and not plain:
                    moves = zip(x, shift[step], flip[step], angle[step], strict=False)
                    x = np.stack([move(*each) for each in moves])
                theta = w.clone().requires_grad_()
                loss = self.loss(theta, theta_g, self.normalise(x), batch, m, plain)
                g = torch.autograd.grad(loss, theta)[0] + f.weight_decay * w
                if f.base == "fedprox" and not plain:
                    g = g + f.mu * (w - theta_g)
                v = f.momentum * v + g
                w = w - f.lr * v
                losses.append(loss.item())
                step += 1
        self.train_loss[m] = np.mean(losses)
        return w

    def loss(self, theta, theta_g, x, batch, m, plain):
        z, logits = forward(theta, x, self.head and not plain)
        weights = [1.0] * len(batch) if plain else self.weights(batch, self.shards[m])
        loss = 0
        for j, i in enumerate(batch):  # L = alpha L_1 + beta L_2, Eq. 8
            loss = loss - weights[j] * torch.log_softmax(logits[j], 0)[self.y[i]] / len(batch)
        if self.f.base == "moon" and m in self.previous and not plain:
            z_g = forward(theta_g, x, True)[0]
            z_previous = forward(self.previous[m], x, True)[0]
            for j in range(len(batch)):
                near = torch.exp(F.cosine_similarity(z[j], z_g[j], dim=0) / 0.5)
                far = torch.exp(F.cosine_similarity(z[j], z_previous[j], dim=0) / 0.5)
                loss = loss - self.f.mu * torch.log(near / (near + far)) / len(batch)
        return loss

    def whole_run(self) -> torch.Tensor:
        f = self.f
        theta = self.initial(self.head)
        x = self.features()
        self.clusters = [self.cluster(x, 0), self.cluster(x, 1)]
        self.P1 = self.arm_groups()
        sums = {"uploads": 0, "samples": 0, "received_mb": 0, "sent_mb": 0}
        for t in range(f.rounds):
            chosen = self.streams("select", t).permutation(6)[: f.clients_per_round]
            clients = sorted(chosen.tolist())
            epochs = f.epochs
            if f.base == "solo":  # 7 epochs over 3 rounds
                epochs = (2, 2, 3)[t]
            local = {}
            for m in clients:
                local[m] = self.train(self.nets.get(m, theta), theta, m, t, epochs)
            samples = sum(len(self.shards[m]) for m in clients)
            if f.base == "solo":
                self.nets = local
            else:
                theta = sum(len(self.shards[m]) * local[m] for m in clients) / samples
            self.previous |= local
            if f.base != "solo":
                sums["received_mb"] += len(clients) * len(theta) * 8 / 1e6
                sums["sent_mb"] += len(clients) * len(theta) * 8 / 1e6
            sums["uploads"] += len(clients)
            sums["samples"] += epochs * samples
            row = {
                "setting": "-",
                "method": f.method,
                "round": t + 1,
                "clients": len(clients),
            } | sums
            row["train_loss"] = np.mean([self.train_loss[m] for m in clients])
            nets = [theta]
            if f.base == "solo":
                nets = [self.nets[m] for m in range(6)]
            is_last = t + 1 == f.rounds
            if (t + 1) % f.eval_every == 0 or is_last:
                row |= self.test(nets)
            if is_last:
                self.look(clients, local)
            if self.study and t == 0:
                row |= self.measure_clusters()
            if self.study and is_last:
                row |= self.measure_nets(nets)
            self.rows.append(row)
        return theta

    # -------------------------------------------------------------------------------- measures

    def test(self, nets: list) -> dict:
        y = self.a.y_test
        right = []
        losses = []
        for theta in nets:
            logits = forward(theta, self.normalise(self.a.x_test), self.head)[1]
            right.append(100 * (logits.argmax(1).numpy() == y).mean())
            losses.append(self.entropies(logits, y).mean())
        row = {"accuracy": np.mean(right), "loss": np.mean(losses)}
        if len(nets) > 1:
            row["client_std"] = np.std(right, ddof=1)
        return row

    def entropies(self, logits, y) -> np.ndarray:
        log_p = torch.log_softmax(logits, 1).numpy()
        return np.array([-row[label] for row, label in zip(log_p, y, strict=True)])

    def measure_clusters(self) -> dict:
        f = self.f
        n = len(self.y)
        first = self.small(self.clusters[0], f.scope)
        second = self.small(self.clusters[1], f.scope)
        chance = 0
        for samples in self.groups(f.scope):
            p = len(first & set(samples)) / len(samples)
            q = len(second & set(samples)) / len(samples)
            chance += len(samples) / n * (p * q + (1 - p) * (1 - q))
        whole = [set(cell) <= self.P1 for cell in self.groups("class")]
        return {
            "clusters": len(self.clusters[0]),
            "cluster_size": n / len(self.clusters[0]),
            "small_by_client": len(self.small(self.clusters[0], "client")) / n,
            "small_by_class": len(self.small(self.clusters[0], "class")) / n,
            "whole_cells": np.mean(whole),
            "agreement": 1 - len(first ^ second) / n,
            "chance": chance,
            "noisy_small": np.mean([self.wrong[i] for i in first]),
            "noisy_large": np.mean([self.wrong[i] for i in range(n) if i not in first]),
        }

    def measure_nets(self, nets: list) -> dict:
        size = self.sizes(self.clusters[0])
        total = 0
        samples = 0
        areas = {"auc_size": [], "auc_loss": []}
        for m, shard in enumerate(self.shards):
            images = self.normalise(self.a.x_train[shard])
            logits = forward(nets[m % len(nets)], images, self.head)[1]
            losses = self.entropies(logits, self.y[shard])
            sizes = [size[i] for i in shard]
            if len(set(sizes)) > 1:
                total += len(shard) * spearmanr(sizes, losses)[0]
                samples += len(shard)
            wrong = [self.wrong[i] for i in shard]
            areas["auc_size"].append(self.area([-i for i in sizes], wrong))
            areas["auc_loss"].append(self.area(losses, wrong))
        silhouettes = [silhouette(z.astype(np.float32), self.labels) for z in self.vectors]
        spearman = total / samples if samples else math.nan
        row = {"spearman": spearman, "silhouette": np.mean(silhouettes)}
        weights = np.array([len(shard) for shard in self.shards])
        for name, of_clients in areas.items():
            has_both = np.isfinite(of_clients)
            row[name] = math.nan
            if has_both.any():
                row[name] = np.average(np.array(of_clients)[has_both], weights=weights[has_both])
        return row

    def area(self, suspicion, wrong) -> float:
        """The fraction of pairs of a wrong and a true label in the right order; ties are halves."""
        won = []
        for of_wrong, is_wrong in zip(suspicion, wrong, strict=True):
            for of_true, is_other in zip(suspicion, wrong, strict=True):
                if is_wrong and not is_other:
                    won.append((of_wrong > of_true) + (of_wrong == of_true) / 2)
        return np.mean(won) if won else math.nan

    def look(self, clients: list[int], local: dict) -> None:
        """What Fig. 6 shows."""
        rng = self.streams("shown images")
        y = self.a.y_test
        shown = []
        for c in sorted(rng.permutation([0, 1, 2])):
            shown.append(rng.permutation(np.flatnonzero(y == c))[:10])
        shown = np.concatenate(shown)
        rows = self.streams("shown clients").permutation(len(clients))[:3]
        self.labels = y[shown]
        self.shown_clients = [clients[k] for k in sorted(rows)]
        x = self.normalise(self.a.x_test[shown])
        nets = [local[m] for m in self.shown_clients]
        self.vectors = np.stack([forward(theta, x, self.head)[0].numpy() for theta in nets])
