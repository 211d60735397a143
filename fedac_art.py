"""python fedac_art.py --base moon --alpha 0.5

The clustering curriculum of "Clustering-based Curriculum Construction for Sample-Balanced Federated Learning" (Qi et al.,
FedAC): before training, every client clusters its own samples, class by class, with Fuzzy ART; samples of small clusters
(P1, hard or noisy) and of large ones (P2, easy) then carry different weights in the cross-entropy. The curriculum goes on
top of SOLO (everyone alone), FedAvg, FedProx or MOON, and stands beside that base alone and beside random groups.

What differs from the paper, and why:
- A sample may join clusters of its own label only: as printed, Eq. 1 lets every class through where the vigilance rho is 0.
- The paper gives neither rho, nor T, below which a cluster is small, nor the weights. Here T is the median over samples of
  their cluster's size, and the weights are (.5, 1) for P1 and P2, scaled to mean 1. SGD's momentum, .9, is that of MOON's code.
- L1 and L2 of Eq. 8 are sums over the batch, divided by its size; --reduction group takes means over its P1 and its P2.
- P1 is hard and P2 easy, as Eq. 5 and Section 1 have it; Eqs. 6 and 7 say the opposite (--swap).
- SimpleCNN is that of MOON's code (conv5 6, conv5 16, FC 120-84-C); the text says 3 convolutions and 2 FC layers.
- SOLO's 100 local epochs are spread over the rounds. Ours: the random arms (controls), label flips, ramp, other features.
"""

import copy
import functools
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

import common
import experiment
from common import UsageError
from experiment import flag

ARMS = ("fedac", "base", "random-groups", "random-classes")
RHO = {"pixels": 0.35, "pooled": 0.4, "encoder": 0.7}  # vigilance: gives clusters of 8 to 20 samples on average
ONE = 255  # what stands for 1 in the clustering: features are uint8, so that Fuzzy ART is exact in integers


@dataclass
class Config(experiment.Config):
    """Common flags with this script's defaults, then the curriculum's own."""

    alpha: float = 0.5
    min_size: int = 10
    clients: int = 10
    rounds: int = 10
    epochs: int = 5
    batch_size: int = 64
    momentum: float = 0.9
    weight_decay: float = 1e-5

    arm: str = flag(ARMS, "curriculum, base alone, random groups of P1's size, or of its size in each class", choices=ARMS)
    features: str = flag("pixels", "what is clustered: pixels, 8x8 means, features of a warm-up net", choices=tuple(RHO))
    warmup: int = flag(5, "rounds of FedAvg that train the encoder", low=1, high=100_000)
    rho: float = flag(-1.0, "vigilance (-1: .35 on pixels, .4 on pooled, both .6 if grey, .7 on encoder)", low=-1, high=1)
    art_alpha: float = flag(0.01, "alpha of Eq. 2: the larger, the more small templates lose", above=0)
    art_beta: float = flag(1.0, "learning rate of Fuzzy ART (1: fast learning)", low=0, high=1)
    quantile: float = flag(0.5, "T is this sample-weighted quantile of the cluster size (0: no small clusters)", low=0, high=1)
    scope: str = flag("client", "one threshold T for the client, or one for each of its classes", choices=("client", "class"))
    w_small: float = flag(0.5, "loss weight of small clusters, alpha of Eq. 8 (equal to --w-large: no curriculum)", low=0)
    w_large: float = flag(1.0, "loss weight of large clusters, beta of Eq. 8", low=0)
    reduction: str = flag("sample", "L1 of Eq. 8 is the sum over P1 / B, or the mean over P1", choices=("sample", "group"))
    swap: bool = flag(False, "Eqs. 6 and 7 read literally: --w-small goes to the large clusters")
    ramp: float = flag(0.0, "fraction of the rounds over which w_small moves to w_large (0: never)", low=0, high=1)
    augment: str = flag("none", "random changes of the training images", choices=("none", "crop-flip", "crop-flip-rotate"))
    flip: float = flag(0.0, "share of the training labels replaced by wrong ones (0: none)", low=0, high=1)
    solo_epochs: int = flag(100, "local epochs of SOLO in all, spread over the rounds", low=1, high=1_000_000)
    projection: bool = flag(False, "MOON's projection head under every base, to compare bases (under moon it always is)")

    def check(self) -> None:
        super().check()
        if self.w_large == 0 and (self.w_small == 0 or self.ramp):
            raise UsageError("--w-large 0: must be above 0 where --w-small is 0, or --ramp moves w_small to it")
        if self.flip and (self.hold_out or self.tune or self.per_client):
            raise UsageError("--flip: --hold-out, --tune test on true labels, --per-client weighs by wrong ones; leave one out")
        if -1 < self.rho < 0:
            raise UsageError(f"--rho {self.rho}: wanted a number from 0 to 1, or -1 for the default")
        if self.base == "solo" and (self.rounds > self.solo_epochs or self.clients_per_round < self.clients):
            raise UsageError("--base solo: wants all --clients in each round, and --rounds no more than --solo-epochs")

    def federation(self, data: common.Data, streams: common.Streams) -> common.Federation:
        if data.mean is None:  # asked of every arm before the first one trains
            raise UsageError(f"--dataset {self.dataset}: this curriculum clusters images, not text")
        return common.Federation(self, data, streams, projection=self.projection)


# ---------------------------------------------------------------------------------- Curriculum Generation (Section 4.1)


def fuzzy_art(x: np.ndarray, rho: float, art_alpha: float, art_beta: float) -> tuple[np.ndarray, np.ndarray]:
    """Fuzzy ART with complement coding over the samples of one class, in their order. Eqs. 1 to 3.

    x uint8 (n, d) -> the cluster of each sample (n,), numbered by age, and the clusters' templates w (J, 2d).
    """
    n, d = x.shape
    dtype, total = (np.uint8, np.uint32) if art_beta == 1 else (np.float64, np.float64)
    w, overlap = np.empty((2, 4, 2 * d), dtype)  # w_j and I ^ w_j, with room for 4 clusters at first
    norm, cluster = np.empty(4), np.empty(n, dtype=np.int64)  # norm: |w_j|
    J = 0  # clusters so far
    for i in range(n):
        I_x = np.concatenate([x[i], ONE - x[i]])  # complement coding: every sample has the same |I| = d
        meet = np.minimum(I_x, w[:J], out=overlap[:J]).sum(1, dtype=total)  # |I ^ w_j|, ^ the minimum
        choice = np.where(meet / (ONE * d) >= rho, meet / (ONE * art_alpha + norm[:J]), -1.0)  # Eq. 2 if Eq. 1
        j = int(choice.argmax()) if J and choice.max() >= 0 else J  # the largest choice that matches; the oldest of equals
        if j == len(w):
            w, overlap, norm = (np.concatenate([room, room]) for room in (w, overlap, norm))
        w[j] = I_x if j == J else art_beta * overlap[j] + (1 - art_beta) * w[j]  # a new cluster where none matches, or Eq. 3
        norm[j] = w[j].sum(dtype=total)
        cluster[i], J = j, max(J, j + 1)
    return cluster, w[:J]


def clustering(x, label, order, rho, art_alpha, art_beta) -> np.ndarray:
    """C = Clustering(D, C), Eq. 4: an independent Fuzzy ART for each label, in the presentation order `order` of samples.

    x uint8 (n, d), label (n,) -> the cluster of each sample (n,), numbered from 1; 0 where `order` leaves the sample out.
    """
    cluster = np.zeros(len(label), dtype=np.int64)
    for c in np.unique(label[order]):
        own = order[label[order] == c]
        cluster[own] = cluster.max() + 1 + fuzzy_art(x[own], rho, art_alpha, art_beta)[0]
    return cluster


def cluster_clients(config: Config, fl: common.Federation, data: common.Data) -> Tensor:
    """Each sample's cluster (2, n) in two orders, the second only to compare. `data` has the true labels, fl.data --flip's."""
    grey = config.features != "encoder" and data.x_train.shape[-1] == 1
    rho = config.rho if config.rho >= 0 else 0.6 if grey else RHO[config.features]
    x, label = features(config, fl, data), fl.data.y_train.cpu().numpy().copy()
    for k, shard in enumerate(fl.shards):
        label[shard] += k * data.classes  # clusters of different clients never mix
    result = []
    for i in range(2):
        orders = [shard[fl.streams("presentation", k, i).permutation(len(shard))] for k, shard in enumerate(fl.shards)]
        result.append(clustering(x, label, np.concatenate(orders), rho, config.art_alpha, config.art_beta))
    return torch.from_numpy(np.stack(result))


def features(config: Config, fl: common.Federation, data: common.Data) -> np.ndarray:
    """What is clustered, uint8 (n, d): raw or pooled pixels, or features of normalised images; never augmented."""
    x = data.x_train
    if config.features == "pooled":
        x = torch.cat([F.adaptive_avg_pool2d(part.permute(0, 3, 1, 2).float(), 8) for part in x.split(500)]).round()
    elif config.features == "encoder":
        model, theta = warm_up(config, fl, data)
        x = hidden(model, theta[None], data.images("train", model.dtype), np.arange(len(x)))[0]
        for shard in map(torch.as_tensor, fl.shards):  # min-max per dimension over the client
            z, low, high = x[shard], *x[shard].aminmax(dim=0)
            x[shard] = ((z - low) / (high - low).clamp(min=1e-12) * ONE).round()
    return x.to(torch.uint8).flatten(1).cpu().numpy()


def warm_up(config: Config, fl: common.Federation, data: common.Data) -> tuple[common.Model, Tensor]:
    """The encoder and its theta (P,): rounds of FedAvg with every client, from the initial weights, whatever --base is."""
    warm, E, B = common.Federation(config, data, fl.streams, base=common.FedAvg), config.epochs, config.batch_size
    warm.data, state = fl.data, warm.start()  # with the labels of --flip, as the clients have them
    for t in range(config.warmup):
        batches = [common.epochs_of_batches(own, E, B, fl.streams("warm-up", t, k)) for k, own in enumerate(warm.shards)]
        warm.aggregate(state, *warm.train(state, t, warm.everyone, batches))
    return warm.model, state["weights"]


@torch.no_grad()
def hidden(model: common.Model, weights: Tensor, x: Tensor, index: np.ndarray) -> Tensor:
    """Hidden vectors (K, n, F) of the images x[index] in the nets of the stack `weights` (K, P)."""
    if model.plain and len(weights) > 1:  # a net that takes one client at a time
        return torch.cat([hidden(model, theta[None], x, index) for theta in weights])
    net, K, parts = model.bind(weights), len(weights), torch.as_tensor(index, device=model.device).split(500)
    z = [net.features(common.inputs(common.gather(x, part.expand(K, -1)))) for part in parts]
    z = [each.unflatten(1, (K, -1)).transpose(0, 1).flatten(2) if each.dim() == 4 else each for each in z]  # (n, K*F, 1, 1)
    return torch.cat(z, 1)


def groups(shards: list[np.ndarray], y: np.ndarray, scope: str) -> list[np.ndarray]:
    """Indices of the samples that share a threshold: those of one client, or of one class of one client."""
    return shards if scope == "client" else [shard[y[shard] == c] for shard in shards for c in np.unique(y[shard])]


def small_clusters(cluster: np.ndarray, shared: list[np.ndarray], quantile: float) -> np.ndarray:
    """P1 = {c : |c| < T} as a mask over samples (n,), Eq. 5; the others are P2.

    T is the quantile over samples of the size of their own cluster. Ties leave fewer than `quantile` below it.
    """
    size, P1 = np.bincount(cluster)[cluster], np.zeros(len(cluster), dtype=bool)
    for own in shared:
        T = np.sort(size[own])[min(int(quantile * len(own) + 1e-9), len(own) - 1)]
        P1[own] = size[own] < T
    return P1


def random_groups(P1: np.ndarray, shared: list[np.ndarray], streams: common.Streams) -> np.ndarray:
    """The controls: in each group as many samples, drawn at random, as P1 has there."""
    drawn = np.zeros_like(P1)
    for i, own in enumerate(shared):
        drawn[own] = streams("random groups", i).permutation(P1[own])
    return drawn


# ------------------------------------------------------------------------------------ Curriculum Training (Section 4.2)


def sample_weights(config: Config, t: int, batches: np.ndarray, shard: np.ndarray, P1: np.ndarray) -> np.ndarray:
    """L_total = alpha L_1 + beta L_2, Eq. 8, as sample weights (T, B) of a client's batches; the loss is the weighted sum / B.

    sample  alpha on P1 and beta on P2, divided by their mean over the client
    group   L_1 and L_2 are means over the batch's members of P1 and P2, 0 where it has none, divided by alpha + beta

    A client that would lose all its samples keeps weight 1. With --ramp (ours) alpha moves linearly to beta.
    """
    moved = min(1.0, t / (config.ramp * config.rounds)) if config.ramp else 0.0
    alpha, beta = config.w_small + (config.w_large - config.w_small) * moved, config.w_large
    P1 = ~P1 if config.swap else P1
    weight = np.where(P1, alpha, beta)
    if not weight[shard].any():
        return np.ones(batches.shape)
    if config.reduction == "sample":
        return weight[batches] / weight[shard].mean()
    real, small = batches >= 0, P1[batches]  # -1 fills up a batch
    members = np.where(small, (real & small).sum(1, keepdims=True), (real & ~small).sum(1, keepdims=True))
    return weight[batches] / (alpha + beta) * real.sum(1, keepdims=True) / np.maximum(members, 1)


def draws(kind: str, batches: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """What the augmentation of one client's batches (T, B) draws; the samples keep their index, and so their group."""
    drawn = {"shift": rng.integers(-4, 5, (*batches.shape, 2)), "flip": rng.random(batches.shape) < 0.5}
    return drawn | {"angle": np.radians(rng.uniform(-15, 15, batches.shape)) * (kind == "crop-flip-rotate")}


def augmented(x: Tensor, extra: dict[str, Tensor], black: Tensor) -> Tensor:
    """A crop moved by `shift` (K, B, 2) pixels, flipped, turned by `angle` (K, B) to the nearest pixel.

    x (K, B, H, W, C) normalised -> the same; `black` (C,) is what lies beyond the edges. `extra` is drawn for full batches.
    """
    images, side = (x - black).flatten(0, 1).permute(0, 3, 1, 2), x.shape[2]
    shift, flip, angle = (extra[name][:, : x.shape[1]].flatten(0, 1).to(x.dtype) for name in ("shift", "flip", "angle"))
    cos, sin, flip, (down, right) = angle.cos(), angle.sin(), 1 - 2 * flip, shift.unbind(-1)
    source = torch.stack([flip * cos, -flip * sin, 2 * right / side, sin, cos, 2 * down / side], 1)  # where each pixel is from
    grid = F.affine_grid(source.view(-1, 2, 3), images.shape, align_corners=False)
    images = F.grid_sample(images, grid, mode="nearest", padding_mode="zeros", align_corners=False)
    return images.permute(0, 2, 3, 1).view_as(x) + black


def local_epochs(config: Config, t: int) -> int:
    """E of round t; SOLO's epochs are spread over the rounds."""
    before, after = (done * config.solo_epochs // config.rounds for done in (t, t + 1))
    return after - before if config.base == "solo" else config.epochs


# ---------------------------------------------------------------------------------------------------------- the rounds


def flip_labels(data: common.Data, share: float, rng: np.random.Generator) -> tuple[common.Data, np.ndarray]:
    """Data whose training labels are wrong for `share` of the samples, and which they are (n,)."""
    n, C, noisy = len(data.y_train), data.classes, copy.copy(data)
    flipped = np.isin(np.arange(n), rng.permutation(n)[: round(share * n)]) & (C > 1)
    wrong = rng.integers(1, max(C, 2), n) * flipped
    if share:  # else the same tensor, by which --stack-trials knows that trials read the same labels
        noisy.y_train = (data.y_train + torch.as_tensor(wrong, device=data.y_train.device)) % C
    return noisy, flipped


def federate(config: Config, data: common.Data, run: experiment.Run) -> None:
    """FedAC(base), the base alone, or the base with random groups, as --arm says."""
    fl, streams = config.federation(data, run.streams), run.streams
    fl.data, flipped = flip_labels(fl.data, config.flip, streams("flips"))  # the partition is that of the clean labels
    decisive = (*experiment.DEALING, "epochs", "features", "warmup", "rho", "art_alpha", "art_beta", "flip")  # clusters
    untuned = run.other(hold_out=config.hold_out)  # with the flags as typed, not as --tune chose them: all arms share clusters
    cluster = untuned.cached("clusters", lambda: cluster_clients(untuned.config, fl, data), *decisive).cpu().numpy()  # Eq. 4
    y = fl.data.y_train.cpu().numpy()
    P1 = small_clusters(cluster[0], groups(fl.shards, y, config.scope), config.quantile)  # P1, P2 = S(C), Eq. 5
    if config.arm.startswith("random"):
        P1 = random_groups(P1, groups(fl.shards, y, "class" if config.arm == "random-classes" else config.scope), streams)

    state = fl.start() | {"seen": {}}  # what nets_seen keeps for tsne*.png
    for t in run.rounds(state):
        clients, E = fl.select(t, config.clients_per_round), local_epochs(config, t)
        batches = [common.epochs_of_batches(fl.shards[k], E, config.batch_size, streams("batches", t, k)) for k in clients]
        options = {}
        if config.arm != "base":
            options["weights"] = [sample_weights(config, t, b, fl.shards[k], P1) for k, b in zip(clients, batches, strict=True)]
        if config.augment != "none":
            drawn = [draws(config.augment, b, streams("augment", t, k)) for k, b in zip(clients, batches, strict=True)]
            options["per_step"] = {name: [each[name] for each in drawn] for name in drawn[0]}  # `extra` of `augmented`
            options["augment"] = functools.partial(augmented, black=(-data.mean / data.std).to(fl.model.dtype))
        kept, update = fl.train(state, t, clients, batches, **options)
        fl.aggregate(state, kept, update)
        columns = fl.cost(clients, update) | (clusters_seen(config, fl, cluster, P1, flipped) if t == 0 else {})
        columns |= fl.test(state) if run.due(t) else {}
        columns |= nets_seen(fl, state, update, kept, cluster[0]) if t + 1 == config.rounds else {}
        run.record(t, len(kept), len(clients) - len(kept), **columns)


# -------------------------------------------------------------------------------------- measures, figures, presets, main


def clusters_seen(config: Config, fl: common.Federation, cluster, P1, flipped) -> dict[str, float]:
    """Of the first round: clusters, share of P1 under both scopes, (client, class) cells wholly in this arm's P1, agreement of
    two presentation orders and of independent groups of their sizes, shares of wrong labels in FedAC's P1 and P2, any arm."""
    y, dealt, J = fl.data.y_train.cpu().numpy(), cluster[0] > 0, cluster[0].max()
    shared, cells = groups(fl.shards, y, config.scope), groups(fl.shards, y, "class")
    by_client, by_class = (small_clusters(cluster[0], each, config.quantile) for each in (fl.shards, cells))
    first, second = (small_clusters(each, shared, config.quantile) for each in cluster)
    p, q = (np.array([P[one].mean() for one in shared]) for P in (first, second))
    columns = {"clusters": float(J), "cluster_size": dealt.sum() / J}
    columns |= {"small_by_client": by_client[dealt].mean(), "small_by_class": by_class[dealt].mean()}
    columns |= {"whole_cells": np.mean([P1[cell].all() for cell in cells]), "agreement": (first == second)[dealt].mean()}
    columns["chance"] = np.average(p * q + (1 - p) * (1 - q), weights=[len(one) for one in shared])
    noisy_small = flipped[first].mean() if first.any() else math.nan
    return columns | {"noisy_small": noisy_small, "noisy_large": flipped[dealt & ~first].mean()}


def nets_seen(fl: common.Federation, state: dict, update: common.Update, clients, cluster: np.ndarray) -> dict[str, float]:
    """Of the last round: Spearman of cluster size and loss inside clients, averaged over samples, and the silhouette of the
    classes in local features. state["seen"] is what tsne*.png shows: features (3, 100, F) of test images in 3 clients' nets."""
    from sklearn.metrics import silhouette_score

    scores = common.score(fl.model, fl.received(state, fl.everyone), fl.data, fl.shards, fl.config.chunk)
    table = pd.DataFrame({"client": np.repeat(fl.everyone, fl.sizes), "loss": np.concatenate([loss for loss, _ in scores])})
    table["size"] = np.bincount(cluster)[cluster[np.concatenate(fl.shards)]]
    each = table.groupby("client").corr("spearman")["size"].xs("loss", level=1)  # nan where all clusters are alike
    spearman = np.ma.average(np.ma.masked_invalid(each), weights=fl.sizes)

    y, rng = fl.data.y_test.cpu().numpy(), fl.streams("shown images")
    classes = np.sort(rng.permutation(np.unique(y))[:10])
    shown = np.concatenate([rng.permutation(np.flatnonzero(y == c))[:10] for c in classes])
    rows = np.sort(fl.streams("shown clients").permutation(len(clients))[:3])
    z = hidden(fl.model, update.weights[torch.as_tensor(rows)], fl.data.images("test", fl.model.dtype), shown).float().cpu()
    state["seen"] = {"features": z, "labels": torch.as_tensor(y[shown]), "clients": clients[rows].tolist()}
    able = 1 < len(classes) < len(shown) and torch.isfinite(z).all()
    silhouette = np.mean([silhouette_score(one, y[shown]) for one in z.numpy()]) if able else math.nan
    return {"spearman": float(np.ma.filled(spearman, np.nan)), "silhouette": float(silhouette)}


def report(df: pd.DataFrame, runs: list[experiment.Run], folder) -> None:
    """measures.csv, printed as means over trials; tsne*.png of each setting's first trial, * its last 99 letters."""
    own = [*df.loc[:, "clusters":"noisy_large"], "spearman", "silhouette"]  # each has one value in a run
    table = df.groupby(["setting", "method", "trial"], sort=False)[own].last()
    table.to_csv(folder / "measures.csv")
    for setting, means in table.groupby(["setting", "method"], sort=False).mean().groupby("setting", sort=False):
        print(f"\n{setting}", means.droplevel("setting").T.to_string(float_format="%.3f"), sep="\n")
        words = setting.split()
        shown = [r for r in runs if r.trial == 0 and set(r.setting.split()) <= set(words)]  # an arm names only what it reads
        draw({r.method: r.load()["state"]["seen"] for r in shown}, folder, "-".join(["", *words])[-99:].replace("/", "_"))


def draw(kept: dict[str, dict], folder, ending: str) -> None:
    """tsne*.png (Fig 6) from what `nets_seen` kept of each arm: a row per arm, a panel per client."""
    import seaborn as sns
    from matplotlib import pyplot as plt
    from sklearn.manifold import TSNE

    points = []
    for arm, one in ({arm: kept[arm] for arm in ("base", "fedac") if arm in kept} or kept).items():
        for client, z in zip(one["clients"], np.nan_to_num(one["features"].cpu().numpy(), posinf=0, neginf=0), strict=True):
            tsne = TSNE(perplexity=min(30, len(z) / 2), method="exact", init="random", random_state=0)  # stands any features
            flat = pd.DataFrame(tsne.fit_transform(z / max(np.abs(z).max(), 1e-30)), columns=["x", "y"])
            points.append(flat.assign(arm=arm, client=client, label=one["labels"].cpu().numpy()))
    how = {"hue": "label", "palette": "tab10", "row": "arm", "col": "client", "facet_kws": {"sharex": False, "sharey": False}}
    grid = sns.relplot(pd.concat(points), x="x", y="y", height=2.9, **how)
    grid.set_titles("{row_name}, client {col_name}").set(xticks=[], yticks=[], xlabel="", ylabel="")
    grid.savefig(folder / f"tsne{ending}.png")
    plt.close("all")


CIFAR10 = "--dataset cifar10 --model simplecnn --rounds 100 --epochs 10 --augment crop-flip"
CIFAR100 = "--dataset cifar100 --model resnet18 --rounds 100 --epochs 10 --augment crop-flip-rotate"
MOON, PAIR, ALPHAS = f"{CIFAR100} --base moon --mu 1", "--arm fedac base", "--alpha 0.3 0.5"
PRESETS = {  # of a flag given twice the last counts; --list-presets prints what follows #
    "table2": f"{CIFAR10} {PAIR} --projection --base solo fedavg fedprox moon {ALPHAS}  # the bases and FedAC, on one net",
    "table2-cifar100": f"{CIFAR100} {PAIR} --projection --base solo fedavg fedprox {ALPHAS}  # MOON apart",
    "table2-moon-cifar100": f"{MOON} {PAIR} {ALPHAS}  # with its own mu",
    "table3": f"{CIFAR10} --base solo fedprox moon {ALPHAS}  # FedAC, its base and both controls",
    "table3-cifar100": f"{CIFAR100} --base solo fedprox {ALPHAS}  # MOON apart",
    "table3-moon-cifar100": f"{MOON} {ALPHAS}  # with its own mu",
    "fig2": f"{CIFAR10} --arm base --projection --base fedavg fedprox moon  # do base terms slow the first rounds?",
    "fig5": f"--arm base --model simplecnn --dataset cifar10 cifar100 {ALPHAS} --show-partition  # who holds which classes",
    "fig6": f"{CIFAR10} {PAIR}  # t-SNE of local features, FedAvg",
    "batch": f"{CIFAR10} {PAIR} --batch-size 64 128 --base fedavg fedprox moon  # the paper chose one of these",
    "small": f"{CIFAR10} --w-small 1 0.5 0  # less weight for small clusters",
    "large": f"{CIFAR10} --w-small 1 --w-large 0.5 0  # less weight for large clusters",
    "reduction": f"{CIFAR10} --reduction sample group  # the two readings of Eq. 8",
    "d4": f"{CIFAR10} --arm base --rounds 10 --features pixels encoder --flip 0 0.2  # who is in the small clusters",
}


def unread(config: Config) -> list[str]:
    """The flags without effect on this arm: where they are swept it is trained once and shown in every setting."""
    solo, encoder = config.base == "solo", config.features == "encoder"
    read = {"solo_epochs": solo, "epochs": encoder or not solo, "warmup": encoder}  # the encoder's warm-up reads --epochs, too
    read |= dict.fromkeys(("w_small", "w_large", "reduction", "swap", "ramp"), config.arm != "base")
    return [*common.BASES[config.base].unread, *(option for option, effective in read.items() if not effective)]


def main(argv=None) -> None:
    """The command line; `argv` stands in for it in tests."""
    experiment.main(Config, PRESETS, __doc__, federate, ("arm",), report=report, unread=unread, argv=argv)


if __name__ == "__main__":
    main()
