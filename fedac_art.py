"""python fedac_art.py --base moon --alpha 0.5

The clustering curriculum of "Clustering-based Curriculum Construction for Sample-Balanced Federated
Learning" (Qi et al., FedAC). Before training, every client clusters its own images, class by class,
with Fuzzy ART. The samples of small clusters, P1, are hard or noisy, those of large ones, P2, easy;
they weigh differently in the cross-entropy. Any base may train inside: SOLO (everyone alone),
FedAvg, FedProx, MOON.

What differs from the paper, and why:
- A sample may join clusters of its own label only: as printed, Eq. 1 lets every class through where
  the vigilance rho is 0.
- The paper gives neither rho, nor T, below which a cluster is small, nor the weights. Here T is the
  median over a client's samples of the size of their cluster, and the weights are 0.5 and 1, scaled
  to mean 1. SGD's momentum is that of MOON's code.
- L1 and L2 of Eq. 8 are sums over the batch, divided by its size; --reduction group takes means
  over its P1 and its P2.
- P1 is hard and P2 easy, as Eq. 5 and Section 1 have it; Eqs. 6 and 7 say the opposite.
- SimpleCNN is that of MOON's code (conv5 6, conv5 16, FC 120-84-C); the text says 3 convolutions
  and 2 FC layers. So is the augmentation, of which the paper says nothing.
- SOLO's 100 local epochs are spread over the rounds.
"""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import common
import experiment
from data import Data, UsageError, epochs_of_batches
from experiment import flag
from nets import Model, arrange


def is_weighted(config) -> bool:
    return config.arm != "base"


def is_solo(config) -> bool:
    return config.base == "solo"


def is_not_solo(config) -> bool:
    return config.base != "solo"


def is_not_moon(config) -> bool:
    return config.base != "moon"


@dataclass
class Config(experiment.Config):
    """Common flags with this script's defaults, then the curriculum's own."""

    alpha: float = 0.5
    min_size: int = 10
    clients: int = 10
    rounds: int = 10
    epochs: int = flag(5, "E, local epochs", low=1, high=10**5, when=is_not_solo)
    batch_size: int = 64
    momentum: float = 0.9
    weight_decay: float = 1e-5

    arm: str = flag(("fedac", "base"), "the curriculum, or its base", choices=("fedac", "base"))
    rho: float = flag(
        -1.0,
        "vigilance: large for many clusters (-1: .35, on grey images .6)",
        low=-1,
        high=1,
        when=is_weighted,
    )
    art_alpha: float = flag(
        0.01, "alpha of Eq. 2: the larger, the more small templates lose", above=0, when=is_weighted
    )
    art_beta: float = flag(1.0, "learning rate of Fuzzy ART", low=0, high=1, when=is_weighted)
    quantile: float = flag(
        0.5,
        "T is this quantile, over samples, of the size of their cluster",
        low=0,
        high=1,
        when=is_weighted,
    )
    w_small: float = flag(0.5, "alpha of Eq. 8, the weight of P1", low=0, when=is_weighted)
    w_large: float = flag(1.0, "beta of Eq. 8, the weight of P2", low=0, when=is_weighted)
    reduction: str = flag(
        "sample",
        "L1 of Eq. 8 is the sum over P1 / B, or the mean over P1",
        choices=("sample", "group"),
        when=is_weighted,
    )
    augment: str = flag(
        "none",
        "random changes of the training images",
        choices=("none", "crop-flip", "crop-flip-rotate"),
    )
    solo_epochs: int = flag(
        100, "local epochs of SOLO, over all rounds", low=1, high=10**6, when=is_solo
    )
    projection: bool = flag(
        False, "MOON's projection head under every base, to compare bases", when=is_not_moon
    )

    def check(self) -> None:
        super().check()
        if self.w_small == 0 and self.w_large == 0:
            raise UsageError("--w-large 0: must be above 0 where --w-small is 0")
        if -1 < self.rho < 0:
            raise UsageError(f"--rho {self.rho}: wanted 0 to 1, or -1 for the default")
        if is_solo(self) and self.clients_per_round < self.clients:
            raise UsageError("--base solo: wants all --clients in each round")
        if is_solo(self) and self.rounds > self.solo_epochs:
            raise UsageError("--base solo: wants no more --rounds than --solo-epochs")

    def reads_rounds(self) -> bool:
        return is_solo(self)

    def federation(self, data: Data, streams: common.Streams) -> common.Federation:
        if data.mean is None:
            raise UsageError(f"--dataset {self.dataset}: this curriculum clusters images, not text")
        return common.Federation(self, data, streams, projection=self.projection)


def federate(config: Config, fl: common.Federation, run: experiment.Run) -> None:
    """FedAC around `config.base`, or that base alone."""
    state = fl.start()
    if is_weighted(config):
        rho = vigilance(config, fl.data)
        clusters = cluster_clients(config, fl, pixels(fl.data), rho)  # C = Clustering(D, C), Eq. 4
        P1 = small_clusters(clusters, fl.shards, config.quantile)  # P1, P2 = S(C), Eq. 5
    for t in run.rounds(state):
        clients = fl.select(t, config.clients_per_round)
        batches = draw_batches(config, fl, t, clients)
        changes = augmentation(config, fl, t, clients, batches)
        if is_weighted(config):
            changes["sample_weights"] = weigh_clients(config, fl, clients, batches, P1)  # Eq. 8
        update = fl.train(state, t, clients, batches, **changes)
        state["theta"] = fl.aggregate(state, update)
        if t + 1 == config.rounds:
            state["hidden"] = hidden_of_clients(fl, update)  # Fig. 6
        run.record(t, state, update)


# -------------------------------------------------------------- Curriculum Generation (Section 4.1)


def vigilance(config: Config, data: Data) -> float:
    """rho. The default gives clusters of 8 to 20 samples; a black background always matches."""
    if config.rho >= 0:
        return config.rho
    is_grey = data.x_train.shape[-1] == 1
    return 0.6 if is_grey else 0.35


def pixels(data: Data) -> np.ndarray:
    """What is clustered: the training images as they are, uint8 (n, d)."""
    return data.x_train.flatten(1).cpu().numpy()


def cluster_clients(
    config: Config, fl: common.Federation, x: np.ndarray, rho: float, presentation: int = 0
) -> np.ndarray:
    """The cluster of each training sample (n,), numbered from 1; 0 for those of no client.

    Each class of each client is clustered alone, its samples x (n, d) presented in random order.
    """
    clusters = np.zeros(len(x), dtype=int)
    count = 0
    for m, shard in enumerate(fl.shards):
        order = fl.streams("presentation", m, presentation).permutation(len(shard))
        presented = shard[order]
        for c in np.unique(fl.labels[shard]):
            samples = presented[fl.labels[presented] == c]
            found, templates = fuzzy_art(x[samples], rho, config.art_alpha, config.art_beta)
            clusters[samples] = count + 1 + found
            count += len(templates)
    return clusters


def fuzzy_art(
    x: np.ndarray, rho: float, alpha: float = 0.01, beta: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Fuzzy ART with complement coding, one row of x (n, d) after the other (Eqs. 1 to 3).

    x is uint8 (255 stands for 1; exact in integers with beta 1), or floats in [0, 1]. Returns the
    cluster of each row (n,), numbered by age, and the clusters' templates w (J, 2d) in x's units.
    """
    one = 255
    if x.dtype != np.uint8:
        one = 1.0
        x = x.astype(np.float64)
        if x.size and not 0 <= x.min() <= x.max() <= 1:
            limits = f"from {x.min():g} to {x.max():g}"
            raise ValueError(f"fuzzy_art: x is {limits}; wanted floats in [0, 1], or uint8")
    d = x.shape[1]
    clusters = np.empty(len(x), dtype=int)
    w = np.empty((4, 2 * d), x.dtype if beta == 1 else np.float64)  # with room for 4 clusters
    norms = np.empty(0)  # |w_j|
    total = np.uint32 if w.dtype == np.uint8 else np.float64  # numpy's own choice is slower
    for i, row in enumerate(x):
        J = len(norms)
        I_x = np.concatenate([row, one - row])  # complement coding: every |I| is d
        meets = np.minimum(I_x, w[:J])  # I ^ w_j
        overlaps = meets.sum(1, dtype=total)  # |I ^ w_j|
        C_p = np.flatnonzero(overlaps / (one * d) >= rho - 1e-9)  # Eq. 1; 1e-9: rounded sums
        if len(C_p):
            choice = overlaps[C_p] / (one * alpha + norms[C_p])  # Eq. 2
            j = C_p[choice.argmax()]  # the oldest of equals
            w[j] = beta * meets[j] + (1 - beta) * w[j]  # Eq. 3
            norms[j] = w[j].sum()
        else:
            j = J
            if len(w) == J:
                w = np.concatenate([w, w])  # room for as many more
            w[j] = I_x
            norms = np.append(norms, w[j].sum())
        clusters[i] = j
    return clusters, w[: len(norms)]


def small_clusters(clusters: np.ndarray, groups: list[np.ndarray], quantile: float) -> np.ndarray:
    """P1 = {c : |c| < T} as a mask over samples (n,) (Eq. 5); the others are P2.

    Each group of samples, a client's, has a T: this quantile of the size of its samples' clusters.
    """
    sizes = np.bincount(clusters)[clusters]
    P1 = np.zeros(len(clusters), dtype=bool)
    for samples in groups:
        place = int(quantile * len(samples) + 1e-9)  # 1e-9: 29, not 28.99...
        T = np.sort(sizes[samples])[min(place, len(samples) - 1)]
        P1[samples] = sizes[samples] < T
    return P1


# ---------------------------------------------------------------- Curriculum Training (Section 4.2)


def draw_batches(config, fl: common.Federation, t: int, clients: np.ndarray) -> list[np.ndarray]:
    """E epochs over each client's samples, (T_k, B) each."""
    E = local_epochs(config, t)
    batches = []
    for m in clients:
        rng = fl.streams("batches", t, m)
        batches.append(epochs_of_batches(fl.shards[m], E, config.batch_size, rng))
    return batches


def local_epochs(config: Config, t: int) -> int:
    """E of round t; SOLO's epochs are spread over the rounds."""
    if not is_solo(config):
        return config.epochs
    before = t * config.solo_epochs // config.rounds
    after = (t + 1) * config.solo_epochs // config.rounds
    return after - before


def weigh_clients(config, fl: common.Federation, clients, batches, P1) -> list[np.ndarray]:
    """The sample weights (T_k, B) of each client's batches."""
    weights = []
    for m, of_client in zip(clients, batches, strict=True):
        alpha, beta = config.w_small, config.w_large
        weights.append(weigh_samples(of_client, fl.shards[m], P1, alpha, beta, config.reduction))
    return weights


def weigh_samples(
    batches: np.ndarray,
    shard: np.ndarray,
    P1: np.ndarray,
    alpha: float,
    beta: float,
    reduction: str = "sample",
) -> np.ndarray:
    """L = alpha L_1 + beta L_2 (Eq. 8) as weights (T, B): L is a batch's weighted sum over B.

    sample  alpha in P1 and beta in P2, divided by their mean over the client's shard
    group   L_1 and L_2 are means over a batch's P1 and P2, 0 if it has none, over alpha + beta

    A client that would lose all its samples keeps weight 1.
    """
    weight = np.where(P1, alpha, beta)
    if not weight[shard].any():
        return np.ones(batches.shape)
    if reduction == "sample":
        return weight[batches] / weight[shard].mean()
    is_sample = batches >= 0  # -1 fills up a batch
    in_P1 = is_sample & P1[batches]
    in_P2 = is_sample & ~P1[batches]
    B = is_sample.sum(1, keepdims=True)
    n_1 = in_P1.sum(1, keepdims=True)
    n_2 = in_P2.sum(1, keepdims=True)
    members = np.where(P1[batches], n_1, n_2)
    return weight[batches] / (alpha + beta) * B / np.maximum(members, 1)


# ------------------------------------------------------------------------------------ augmentation


def augmentation(config, fl: common.Federation, t: int, clients, batches) -> dict:
    """The fields of training.Local that change each image at random; it keeps its index."""
    if config.augment == "none":
        return {}
    per_step = {"shift": [], "flip": [], "angle": []}
    for m, of_client in zip(clients, batches, strict=True):
        rng = fl.streams("augment", t, m)
        for name, values in draw_changes(config.augment, of_client.shape, rng).items():
            per_step[name].append(values)
    black = (-fl.data.mean / fl.data.std).to(fl.model.dtype)
    return {"per_step": per_step, "augment": functools.partial(change_images, black=black)}


def draw_changes(kind: str, shape: tuple, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """For batches of this shape (T, B): shifts in pixels (T, B, 2), flips, angles in radians."""
    shift = rng.integers(-4, 5, (*shape, 2))
    flip = rng.random(shape) < 0.5
    angle = np.zeros(shape)
    if kind == "crop-flip-rotate":
        angle = np.radians(rng.uniform(-15, 15, shape))
    return {"shift": shift, "flip": flip, "angle": angle}


def change_images(x: Tensor, extra: dict[str, Tensor], black: Tensor) -> Tensor:
    """Each image turned by `angle`, flipped if `flip`, moved by `shift`, to the nearest pixel.

    x (K, B, H, W, C) normalised; black (C,) is what lies beyond its edges. `extra` is drawn for
    full batches.
    """
    images = (x - black).flatten(0, 1).permute(0, 3, 1, 2)
    B, side = x.shape[1:3]

    def drawn(name: str) -> Tensor:
        return extra[name][:, :B].flatten(0, 1).to(x.dtype)

    cos = drawn("angle").cos()
    sin = drawn("angle").sin()
    sign = 1 - 2 * drawn("flip")
    down, right = (2 * drawn("shift") / side).unbind(-1)
    source = torch.stack([sign * cos, -sign * sin, right, sin, cos, down], 1)
    grid = F.affine_grid(source.view(-1, 2, 3), images.shape, align_corners=False)
    images = F.grid_sample(images, grid, mode="nearest", padding_mode="zeros", align_corners=False)
    return images.permute(0, 2, 3, 1).view_as(x) + black


# ------------------------------------------------------------------------------------------ Fig. 6


def hidden_of_clients(fl: common.Federation, update: common.Update) -> dict:
    """Hidden vectors (3, n, F) of test images, ten of each of ten classes, in three local nets."""
    y = fl.data.y_test.cpu().numpy()
    rng = fl.streams("shown images")
    classes = np.sort(rng.permutation(np.unique(y))[:10])
    samples = np.concatenate([rng.permutation(np.flatnonzero(y == c))[:10] for c in classes])
    rng = fl.streams("shown clients")
    rows = np.sort(rng.permutation(len(update.clients))[:3])

    x = fl.data.images("test", fl.model.dtype)[samples]
    vectors = [hidden_vectors(fl.model, update.thetas[k], x).float().cpu() for k in rows]
    return {
        "vectors": torch.stack(vectors),
        "labels": torch.from_numpy(y[samples]),
        "clients": update.clients[rows].tolist(),
    }


@torch.no_grad()
def hidden_vectors(model: Model, theta: Tensor, x: Tensor) -> Tensor:
    """(n, F): what the head of the net theta (P,) gets for the images x (n, H, W, C).

    The logits of somebody's own net, of which no head is known.
    """
    net = model.bind(theta[None])
    vectors = []
    for part in x.split(500):
        z = net.features(arrange(part[None]))
        vectors.append(z.reshape(len(part), -1))
    return torch.cat(vectors)


def draw(settings: dict[str, list[experiment.Run]], folder: Path) -> None:
    """tsne*.png: what the first trial's nets saw, in a figure for each setting (Fig. 6)."""
    import pandas as pd
    import seaborn as sns
    from matplotlib import pyplot

    for setting, runs in settings.items():
        tables = []
        for run in runs:
            if run.trial == 0:
                points = embed(**run.load()["state"]["hidden"])
                tables.append(points.assign(method=run.method))
        if not tables:
            continue
        grid = sns.relplot(
            pd.concat(tables),
            x="x",
            y="y",
            hue="label",
            palette="tab10",
            row="method",
            col="client",
            height=2.9,
            facet_kws={"sharex": False, "sharey": False},
        )
        grid.set_titles("{row_name}, client {col_name}")
        grid.set(xticks=[], yticks=[], xlabel="", ylabel="")
        ending = re.sub(r"[^\w.=-]", "-", f"-{setting}" if setting else "")
        grid.savefig(folder / f"tsne{ending[-99:]}.png")
        pyplot.close(grid.figure)


def embed(vectors: Tensor, labels: Tensor, clients: list[int]):
    """t-SNE of each client's hidden vectors (3, n, F): a data frame of x, y, label, client."""
    import pandas as pd
    from sklearn.manifold import TSNE

    tables = []
    for client, z in zip(clients, vectors.numpy(), strict=True):
        z = np.nan_to_num(z, posinf=0, neginf=0)
        z = z / max(np.abs(z).max(), 1e-30)
        perplexity = min(30, len(z) / 2)
        # exact, from random points: this stands features that are all alike
        tsne = TSNE(perplexity=perplexity, method="exact", init="random", random_state=0)
        points = pd.DataFrame(tsne.fit_transform(z), columns=["x", "y"])
        tables.append(points.assign(label=labels.numpy(), client=client))
    return pd.concat(tables)


# -------------------------------------------------------------------------------- the command line

CIFAR10 = "--dataset cifar10 --model simplecnn --rounds 100 --epochs 10 --augment crop-flip"
CIFAR100 = "--dataset cifar100 --model resnet18 --rounds 100 --epochs 10 --augment crop-flip-rotate"
MOON = f"{CIFAR100} --base moon --mu 1"
BASES = "--base solo fedavg fedprox"
ALPHAS = "--alpha 0.3 0.5"
PRESETS = {  # command lines; of a flag given twice the last counts
    "table2": f"{CIFAR10} {ALPHAS} --projection {BASES} moon  # on one net",
    "table2-cifar100": f"{CIFAR100} {ALPHAS} --projection {BASES}  # MOON apart",
    "table2-moon-cifar100": f"{MOON} {ALPHAS}  # with its own mu",
    "table3": f"{CIFAR10} {ALPHAS} --base solo fedprox moon",
    "table3-cifar100": f"{CIFAR100} {ALPHAS} --base solo fedprox  # MOON apart",
    "table3-moon-cifar100": f"{MOON} {ALPHAS}  # with its own mu",
    "fig2": f"{CIFAR10} --arm base --projection --base fedavg fedprox moon  # the first rounds",
    "fig5": f"--dataset cifar10 cifar100 {ALPHAS} --arm base --rounds 1  # partition.png",
    "fig6": f"{CIFAR10}  # t-SNE of local features",
    "batch": f"{CIFAR10} --batch-size 64 128 --base fedavg fedprox moon  # the paper chose one",
    "small": f"{CIFAR10} --w-small 1 0.5 0  # less weight for small clusters",
    "large": f"{CIFAR10} --w-small 1 --w-large 0.5 0  # less weight for large clusters",
    "reduction": f"{CIFAR10} --reduction sample group  # the two readings of Eq. 8",
}


def main(argv=None) -> None:
    """The command line; `argv` stands in for it in tests."""
    hooks = {"federate": federate, "draw": draw}
    experiment.main(Config, PRESETS, __doc__, argv, compare=("arm",), **hooks)


if __name__ == "__main__":
    main()
