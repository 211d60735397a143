"""python fedac_art.py --base moon --alpha 0.5

This is FedAC, the curriculum of "Clustering-based Curriculum Construction for Sample-Balanced
Federated Learning" (Qi et al., CICAI 2022, https://doi.org/10.1007/978-3-031-20503-3_13).
plain/fedac_art.py explains it, with FedAvg, in one file.

Before training, every client clusters its own images, class by class, with Fuzzy ART. To the paper
the samples of small clusters, P1, are hard or noisy, and those of large clusters, P2, easy. In the
cross-entropy P1 has the weight 0.5 and P2 the weight 1. These weights are the curriculum. They stay
the same in all rounds. --base says how clients train and what is averaged. In the paper it is
fedavg, fedprox, moon, or solo, where nothing is averaged. The weights multiply the cross-entropy
only, and no term that a base adds.

How this differs from the paper, and why:
- A sample may join only clusters of its own label. In Eq. 1 a cluster of another label has the
  value 0. So at rho = 0 it is a candidate, too.
- Fuzzy ART clusters pixels. The paper says "multi-channel clustering" of "similar features", and no
  more. results/fedac_art/controls.py compares pixels with features.
- The paper gives neither alpha of Eq. 2 nor beta of Eq. 3. Here they are 0.01 and 1.
- The paper gives no rho. Here it is 0.35, and 0.6 for grey images. Clusters then have 7 to 10
  samples on average, and about 20 on MNIST.
- The paper gives no T, the size below which a cluster is small. Here T is a client's median: at
  least half of its samples are in clusters of T samples or more.
- The paper gives no weights: 0.5 and 1 are our choice. It gives no momentum either: the momentum is
  MOON's, from its code.
- L_1 and L_2 of Eq. 8, L = alpha L_1 + beta L_2, are the cross-entropies of a batch's P1 and P2.
  Here they are sums divided by the batch size, and the weights are divided by their mean over the
  client. So they do not change the size of the steps. With --reduction group L_1 and L_2 are means
  over P1 and over P2, and the weights are divided by alpha + beta.
- P1 are the small clusters (Eq. 5), which are hard by Section 1. By the text of Eqs. 6 and 7 they
  are easy. Exchange --w-small and --w-large to try it.
- SimpleCNN is as in MOON's code: convolutions of 5x5 with 6 and 16 channels, then 120, 84 and C
  outputs. The text says 3 convolutions and 2 linear layers.
- The paper names no augmentation, and the default is none. --augment crop-flip is as in MOON's
  code, except that the border is black. MOON's code mirrors CIFAR-10's images there.
- SOLO's 100 local epochs are spread over the rounds, and momentum begins at 0 in each. Each
  client's model is tested on the whole test set. SOLO's accuracy is the mean. The paper does not
  say how it tests.
- FedProx has mu = 0.001. MOON has mu = 5, and 1 in the preset on CIFAR-100. The paper refers to
  "the corresponding papers", which choose from several.
- The batch size is 64. The paper selects it from 64 and 128 (--preset batch).
- MOON trains a model with a projection head. The other bases do so only with --projection.
- Table 2 does not name the base of "FedAC(our)", and Table 3 lacks FedAvg. We take FedAvg for it.

Names: --art-alpha is alpha of Eq. 2, and --art-beta is beta of Eq. 3. --w-small and --w-large are
alpha and beta of Eq. 8. --alpha is beta of Dir(beta).
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

import common
import experiment
from client_layers import arrange
from data import IS_TEXT, Data
from errors import UsageError
from experiment import figures, flag
from nets import Model
from recording import recordable

METHODS = ("fedac", "base")


def is_weighted(config) -> bool:
    """Whether this method has the curriculum."""
    return config.method != "base"


def is_solo(config) -> bool:
    """Whether every client trains alone."""
    return config.base == "solo"


def is_not_solo(config) -> bool:
    return config.base != "solo"


def is_not_moon(config) -> bool:
    return config.base != "moon"


@dataclass
class Config(experiment.Config):
    """Common options with this script's defaults, then the curriculum's own."""

    alpha: float = 0.5
    min_size: int = 10
    clients: int = 10
    rounds: int = 10
    epochs: int = flag(5, "E, local epochs", low=1, high=10**5, when=is_not_solo)
    drop_last: bool = flag(False, "leave out a client's last batch if it is short")
    batch_size: int = 64
    momentum: float = 0.9
    weight_decay: float = 1e-5

    method: str = flag("fedac", "the curriculum, or its base", sweep=METHODS, choices=METHODS)
    rho: float = flag(
        -1.0,
        "vigilance of Eq. 1; a large value gives many clusters (-1: 0.35, on grey images 0.6)",
        low=-1,
        high=1,
        when=is_weighted,
    )
    art_alpha: float = flag(
        0.01, "alpha of Eq. 2; if large, small templates win less", above=0, when=is_weighted
    )
    art_beta: float = flag(
        1.0, "beta of Eq. 3: how far a template moves", low=0, high=1, when=is_weighted
    )
    quantile: float = flag(
        0.5,
        "T is this quantile of the samples' cluster sizes",
        low=0,
        high=1,
        when=is_weighted,
    )
    w_small: float = flag(0.5, "alpha of Eq. 8, the weight of P1", low=0, when=is_weighted)
    w_large: float = flag(1.0, "beta of Eq. 8, the weight of P2", low=0, when=is_weighted)
    reduction: str = flag(
        "sample",
        "L_1 of Eq. 8: the sum over P1 divided by the batch size, or the mean over P1",
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
        False, "MOON's projection head under every base (moon has it anyway)", when=is_not_moon
    )

    def check(self) -> None:
        super().check()
        if self.w_small == 0 and self.w_large == 0:
            raise UsageError("--w-large 0: choose a number above 0 if --w-small is 0")
        if -1 < self.rho < 0:
            raise UsageError(f"--rho {self.rho}: choose a number from 0 to 1, or -1, the default")
        if is_solo(self) and self.clients_per_round < self.clients:
            raise UsageError("--base solo: choose --clients-per-round equal to --clients")
        if is_solo(self) and self.rounds > self.solo_epochs:
            raise UsageError("--base solo: choose --rounds of at most --solo-epochs")

    def reads_rounds(self) -> bool:
        return is_solo(self)

    def federation(self, data: Data, streams: common.Streams) -> common.Federation:
        if data.mean is None:
            raise UsageError(f"--dataset {self.dataset}: this script clusters images; {IS_TEXT}")
        shape = tuple(data.x_train.shape[1:])
        if self.augment != "none" and len(shape) != 3:
            found = f"samples of shape {shape} are no images"
            raise UsageError(f"--augment {self.augment}: {found}; choose none")
        return common.Federation(self, data, streams, projection=self.projection)


def federate(config: Config, fl: common.Federation, run: experiment.Run) -> None:
    """FedAC around `config.base`, or that base alone."""
    state = fl.start()
    if is_weighted(config):
        P1 = generate_curriculum(config, fl)
    for t in run.rounds(state):
        clients = fl.select(t, config.clients_per_round)
        batches = fl.batches(t, clients, local_epochs(config, t), config.drop_last)
        changes = augmentation(config, fl, t, clients, batches)
        if is_weighted(config):
            changes["sample_weights"] = weigh_clients(config, fl, clients, batches, P1)  # Eq. 8
        update = fl.train(state, t, clients, batches, **changes)
        state["theta"] = fl.aggregate(state, update)
        if t + 1 == config.rounds:
            state["hidden"] = hidden_of_clients(fl, update)  # for Fig. 6
        run.record(t, state, update)


# -------------------------------------------------------------- Curriculum Generation (Section 4.1)


def generate_curriculum(config: Config, fl: common.Federation) -> np.ndarray:
    """Returns which training samples (n,) are in P1 of the client that holds them."""
    x = pixels(fl.data)
    rho = vigilance(config, fl.data)
    P1 = np.zeros(len(x), dtype=bool)
    for m, shard in enumerate(fl.shards):
        rng = fl.streams("presentation", m, 0)  # 0: controls.py also tries other orders, 1, 2, ..
        clusters = cluster_client(
            x[shard], fl.labels[shard], rng, rho, config.art_alpha, config.art_beta
        )  # Eq. 4
        P1[shard] = small_clusters(clusters, config.quantile)  # Eq. 5
    return P1


def vigilance(config: Config, data: Data) -> float:
    """Returns rho: --rho, or a value that gives clusters of 7 to 20 samples on average.

    It is larger for grey images, because their black backgrounds match.
    """
    if config.rho >= 0:
        return config.rho
    is_grey = data.x_train.shape[-1] == 1
    return 0.6 if is_grey else 0.35


def pixels(data: Data) -> np.ndarray:
    """Returns what is clustered, (n, d): bytes as they are, or floats scaled to [0, 1]."""
    x = data.x_train
    if x.dtype != torch.uint8:
        wide = torch.promote_types(x.dtype, torch.float32)
        low, high = data.limits
        x = (x - low.to(wide)) / (high - low).to(wide)
    return x.flatten(1).cpu().numpy()


def cluster_client(
    x: np.ndarray,
    y: np.ndarray,
    rng: np.random.Generator,
    rho: float,
    alpha: float = 0.01,
    beta: float = 1.0,
) -> np.ndarray:
    """Returns the cluster of each of a client's samples (n,), numbered from 0 (Eq. 4).

    y (n,) are the labels. x (n, d), rho, alpha and beta are as in `fuzzy_art`. Each class is
    clustered separately. Fuzzy ART meets the samples in a random order, on which the clusters
    depend. rng is a generator such as np.random.default_rng(0).
    """
    clusters = np.zeros(len(y), dtype=int)
    order = rng.permutation(len(y))
    count = 0
    for c in np.unique(y):
        samples = order[y[order] == c]
        found, templates = fuzzy_art(x[samples], rho, alpha, beta)
        clusters[samples] = count + found
        count += len(templates)
    return clusters


def fuzzy_art(
    x: np.ndarray, rho: float, alpha: float = 0.01, beta: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Fuzzy ART with complement coding, in one pass over the rows of x (n, d) (Eqs. 1 to 3).

    x      one class of images, flattened: floats in [0, 1], or bytes, where 255 means 1 (exact with
           beta = 1). Another order of the rows can give other clusters
    rho    vigilance, from 0 to 1
    alpha  above 0
    beta   from 0 to 1

    Returns the cluster of each row (n,), numbered from 0 in the order of their first samples. Also
    returns their templates w (J, 2d), in the units of x. Raises ValueError for another x or rho.
    """
    if not isinstance(x, np.ndarray) or x.ndim != 2:
        raise ValueError("fuzzy_art: x must be a NumPy array (n, d): flatten the images")
    if not 0 <= rho <= 1:
        raise ValueError(f"fuzzy_art: rho is {rho}; choose a number from 0 to 1")
    unit = 255
    if x.dtype != np.uint8:
        unit = 1.0
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
        I_x = np.concatenate([row, unit - row])  # complement coding: |I| is d, in x's units
        meets = np.minimum(I_x, w[:J])  # I ^ w_j
        overlaps = meets.sum(1, dtype=total)  # |I ^ w_j|
        is_near = overlaps / (unit * d) >= rho - 1e-9  # 1e-9: rounding errors
        candidates = np.flatnonzero(is_near)  # C_p of Eq. 1
        if len(candidates):
            choice = overlaps[candidates] / (unit * alpha + norms[candidates])  # T_j of Eq. 2
            j = candidates[choice.argmax()]  # the oldest of equals
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


def small_clusters(clusters: np.ndarray, quantile: float) -> np.ndarray:
    """Returns which samples (n,) are in P1, the clusters of fewer than T samples (Eq. 5).

    The rest is P2. clusters (n,) holds the cluster of each sample. T is the quantile, over the
    samples, of the size of a sample's cluster. It is the smallest size such that more than this
    fraction of the samples are in clusters of at most this size (the largest size if it is 1).
    """
    n = len(clusters)
    sizes = np.bincount(clusters)[clusters]
    fractions = np.arange(1, n + 1) / n
    rank = (fractions <= quantile).sum()
    T = np.sort(sizes)[min(rank, n - 1)]
    return sizes < T


# ---------------------------------------------------------------- Curriculum Training (Section 4.2)


def local_epochs(config: Config, t: int) -> int:
    """Returns E of round t. SOLO's epochs are spread over the rounds."""
    if not is_solo(config):
        return config.epochs
    before = t * config.solo_epochs // config.rounds
    after = (t + 1) * config.solo_epochs // config.rounds
    return after - before


def weigh_clients(config, fl: common.Federation, clients, batches, P1) -> list[np.ndarray]:
    """Returns sample weights (T_k, B) of each client's batches. Where a batch has -1, ignore them.

    A client whose weights are all 0 trains with weights 1, in both reductions.
    """
    weights = []
    w_small = config.w_small
    w_large = config.w_large
    of_samples = np.zeros(len(P1))
    for m, of_client in zip(clients, batches, strict=True):
        shard = fl.shards[m]
        has_weight = np.where(P1[shard], w_small, w_large).any()
        if config.reduction == "group" and has_weight:
            weights.append(weigh_groups(P1[of_client], of_client >= 0, w_small, w_large))
        else:
            of_samples[shard] = weigh_samples(P1[shard], w_small, w_large)
            weights.append(of_samples[of_client])
    return weights


def weigh_samples(in_P1: np.ndarray, w_small: float, w_large: float) -> np.ndarray:
    """Returns the weights (n,) of a client's samples: L = w_small L_1 + w_large L_2 (Eq. 8).

    in_P1 (n,) says which samples are in P1. Multiply each sample's cross-entropy by its weight and
    take the mean over a batch. The mean of the weights is 1. If all would be 0, they are 1.
    """
    weights = np.where(in_P1, w_small, w_large)
    if not weights.any():
        return np.ones(len(weights))
    return weights / weights.mean()


def weigh_groups(
    in_P1: np.ndarray, is_sample: np.ndarray, w_small: float, w_large: float
) -> np.ndarray:
    """Returns the weights (steps, B) of the samples of batches, if L_1, L_2 of Eq. 8 are means.

    in_P1      (steps, B): which places of the batches are in P1
    is_sample  (steps, B): which places hold a sample

    L_1 is the mean over a batch's samples in P1, and L_2 over the others. L is their weighted mean.
    If a batch has no sample of one kind, its mean is 0. Use the weights in a mean over the batch.
    """
    B = is_sample.sum(1, keepdims=True)
    n_1 = (is_sample & in_P1).sum(1, keepdims=True)
    n_own = np.where(in_P1, n_1, B - n_1)  # how many of the batch are in the sample's own group
    weights = np.where(in_P1, w_small, w_large) / (w_small + w_large)
    return weights * B / np.maximum(n_own, 1)


# ------------------------------------------------------------------------------------ augmentation


def augmentation(config, fl: common.Federation, t: int, clients, batches) -> dict:
    """Returns what fl.train takes to change each image at random. Its cluster stays the same."""
    if config.augment == "none":
        return {}
    per_step = {"shift": [], "flip": [], "angle": []}
    for m, of_client in zip(clients, batches, strict=True):
        rng = fl.streams("augment", t, m)
        for name, values in draw_changes(config.augment, of_client.shape, rng).items():
            per_step[name].append(values)
    black = (fl.data.limits[0] - fl.data.mean) / fl.data.std
    per_client = {"black": black.expand(len(clients), -1)}
    return {"per_step": per_step, "per_client": per_client, "augment": change_images}


def draw_changes(kind: str, shape: tuple, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns random shifts in pixels (steps, B, 2), and flips and angles in radians (steps, B)."""
    shift = rng.integers(-4, 5, (*shape, 2))
    flip = rng.random(shape) < 0.5
    angle = np.zeros(shape)
    if kind == "crop-flip-rotate":
        angle = np.radians(rng.uniform(-15, 15, shape))
    return {"shift": shift, "flip": flip, "angle": angle}


@recordable
def change_images(x: Tensor, extra: dict[str, Tensor]) -> Tensor:
    """Crops each image at `shift`, flips it if `flip`, then turns it by `angle`: nearest pixels.

    shift (1, 2) moves the crop 1 pixel down and 2 to the right, so the content goes up and left. A
    positive angle turns counter-clockwise.

    x      (K, n, H, W, C): normalised images
    extra  shift (K, B, 2), flip and angle (K, B). A short batch takes the first n. black (K, C) is
           what lies beyond the edges
    """
    black = extra["black"][:, None, None, None]
    images = (x - black).flatten(0, 1).permute(0, 3, 1, 2)
    n, height, width = x.shape[1:4]

    def drawn(name: str) -> Tensor:
        return extra[name][:, :n].flatten(0, 1).to(x.dtype)

    cos = drawn("angle").cos()
    sin = drawn("angle").sin()
    sign = 1 - 2 * drawn("flip")
    down, right = (2 * drawn("shift")).unbind(-1)
    across = [sign * cos, -sign * sin * (height / width), right / width]  # edges are at -1 and 1
    along = [sin * (width / height), cos, down / height]
    source = torch.stack(across + along, 1)
    grid = F.affine_grid(source.view(-1, 2, 3), images.shape, align_corners=False)
    images = F.grid_sample(images, grid, mode="nearest", padding_mode="zeros", align_corners=False)
    return images.permute(0, 2, 3, 1).view_as(x) + black


# ------------------------------------------------------------------------------------------ Fig. 6


def hidden_of_clients(fl: common.Federation, update: common.Update) -> dict:
    """Returns what three clients' models make of test images: hidden `vectors` (3, n, F).

    There are ten images of each of ten classes, so n is at most 100. Their `labels` (n,) and the
    numbers of the `clients` are returned, too.
    """
    y = fl.data.y_test.cpu().numpy()
    rng = fl.streams("shown images")
    classes = np.sort(rng.permutation(np.unique(y))[:10])
    samples = []
    for c in classes:
        of_class = rng.permutation(np.flatnonzero(y == c))
        samples.append(of_class[:10])
    samples = np.concatenate(samples)
    rng = fl.streams("shown clients")
    rows = np.sort(rng.permutation(len(update.clients))[:3])

    x = fl.data.images("test", fl.model.dtype)[samples]
    thetas = update.gather_thetas()[rows]
    vectors = [hidden_vectors(fl.model, theta, x).float() for theta in thetas]
    return {
        "vectors": torch.stack(vectors),
        "labels": torch.from_numpy(y[samples]),
        "clients": update.clients[rows].tolist(),
    }


@torch.no_grad()
def hidden_vectors(model: Model, theta: Tensor, x: Tensor) -> Tensor:
    """Returns the input (n, F) of the model's last layer for images x (n, H, W, C) at theta (P,).

    It returns the logits of a user's own model that is not head(features(x)).
    """
    net = model.bind(theta[None])
    vectors = []
    for part in x.split(500):
        z = net.features(arrange(part[None]))
        vectors.append(z.reshape(len(part), -1))
    return torch.cat(vectors)


def draw(settings: dict[str, list[experiment.Run]], folder: Path) -> None:
    """Writes tsne*.png: t-SNE of the first trial's hidden vectors, one per setting (Fig. 6)."""
    import seaborn as sns
    from matplotlib import pyplot

    for setting, runs in settings.items():
        tables = []
        for run in runs:
            if run.trial == 0:
                hidden = run.load()["state"]["hidden"]  # of `hidden_of_clients`
                points = embed(**hidden)
                tables.append(points.assign(method=run.method))
        if not tables:
            continue
        shown = pd.concat(tables)
        colors = {label: figures.CLASSES[label % 10] for label in shown.label.unique()}
        grid = sns.relplot(
            shown,
            x="x",
            y="y",
            hue="label",
            palette=colors,
            row="method",
            col="client",
            height=2.9,
            facet_kws={"sharex": False, "sharey": False},
        )
        grid.set_titles("{row_name}, client {col_name}")
        grid.set(xticks=[], yticks=[], xlabel="", ylabel="")
        name = "tsne"
        if setting != "-":
            name += re.sub(r"[^\w.=-]", "-", f"-{setting}")[-99:]
        grid.savefig(folder / f"{name}.png")
        pyplot.close(grid.figure)


def embed(vectors: Tensor, labels: Tensor, clients: list[int]):
    """Returns t-SNE of each client's hidden vectors (3, n, F): a table of x, y, label, client."""
    from sklearn.manifold import TSNE

    tables = []
    for client, z in zip(clients, vectors.cpu().numpy(), strict=True):
        z = np.nan_to_num(z, posinf=0, neginf=0)
        z = z / max(np.abs(z).max(), 1e-30)
        perplexity = min(30, len(z) / 2)
        # exact and from random points, which copes with vectors that are all equal
        tsne = TSNE(perplexity=perplexity, method="exact", init="random", random_state=0)
        points = pd.DataFrame(tsne.fit_transform(z), columns=["x", "y"])
        tables.append(points.assign(label=labels.cpu().numpy(), client=client))
    return pd.concat(tables)


# -------------------------------------------------------------------------------- the command line

# If an option is given twice, the last one counts.
CIFAR10 = "--dataset cifar10 --model simplecnn --rounds 100 --epochs 10 --augment crop-flip"
CIFAR100 = "--dataset cifar100 --model resnet18 --rounds 100 --epochs 10 --augment crop-flip-rotate"
MOON = f"{CIFAR100} --base moon --mu 1"
BASES = "--base solo fedavg fedprox"
ALPHAS = "--alpha 0.3 0.5"
PRESETS = {
    "table2": f"{CIFAR10} {ALPHAS} --projection {BASES} moon  # all with MOON's head",
    "table2-cifar100": f"{CIFAR100} {ALPHAS} --projection {BASES}  # MOON: table2-moon-cifar100",
    "table2-moon-cifar100": f"{MOON} {ALPHAS}  # with its own mu; Table 3 has the same runs",
    "table3": f"{CIFAR10} {ALPHAS} --base solo fedprox moon",
    "table3-cifar100": f"{CIFAR100} {ALPHAS} --base solo fedprox  # MOON: table2-moon-cifar100",
    "fig2": f"{CIFAR10} --method base --projection --base fedavg fedprox moon  # the first rounds",
    "fig5": f"--dataset cifar10 cifar100 {ALPHAS} --method base --rounds 1  # partition.png",
    "fig6": f"{CIFAR10}  # t-SNE of local features",
    "batch": f"{CIFAR10} --batch-size 64 128 --base fedavg fedprox moon  # the paper chose one",
    "small": f"{CIFAR10} --w-small 1 0.5 0  # less weight for small clusters",
    "large": f"{CIFAR10} --w-small 1 --w-large 0.5 0  # less weight for large clusters",
    "reduction": f"{CIFAR10} --reduction sample group  # the two readings of Eq. 8",
}


def main(argv=None) -> None:
    """Runs the command line. Tests pass its words as `argv`."""
    script = experiment.Script(
        config=Config,
        presets=PRESETS,
        doc=__doc__,
        federate=federate,
        compare=("method",),
        draw=draw,
    )
    experiment.main(script, argv)


if __name__ == "__main__":
    main()
