"""python fedac_art.py --base moon --alpha 0.5

The clustering curriculum of "Clustering-based Curriculum Construction for Sample-Balanced Federated Learning" (Qi et al.,
FedAC): before training, every client clusters its own samples, class by class, with Fuzzy ART; samples of small clusters
(P1, hard or noisy) and of large ones (P2, easy) then carry different weights in the cross-entropy. The curriculum goes on
top of SOLO, FedAvg, FedProx or MOON, and stands beside that base alone and beside random groups of the same sizes.

What differs from the paper, and why:
- Candidates share the sample's label: as printed, Eq. 1 lets every class through at rho = 0.
- The threshold T is the sample-weighted median of the cluster size and the weights are (.5, 1), normalised to mean 1 over
  the client: the paper gives no values, and unnormalised weights would also change the learning rate and MOON's balance.
- P1 is hard and P2 easy, as Eq. 5 and Section 1 have it; Eqs. 6 and 7 say the opposite (--swap).
- Random groups (the control), two presentation orders, label flips, the ramp and features other than pixels are ours.
- SOLO's 100 local epochs are spread over the rounds, which are then only looks at its progress.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import common
from common import opt

ARMS = ("fedac", "base", "random-groups")
RHO = {"pixels": 0.35, "pooled": 0.4, "encoder": 0.7}  # mean cluster size 8 to 20
ONE = 255  # what stands for 1 in the clustering: features are uint8, so that Fuzzy ART is exact in integers


@dataclass
class Config(common.Config):
    """Common flags with this script's defaults, then the curriculum's own."""

    alpha: float = 0.5
    min_size: int = 10
    clients: int = 10
    rounds: int = 10
    epochs: int = 5
    batch_size: int = 64
    momentum: float = 0.9
    weight_decay: float = 1e-5

    arms: tuple = opt(ARMS, "what to compare: the curriculum, the base alone, random groups", choices=ARMS, many=True)
    features: str = opt("pixels", "what is clustered: pixels, 8x8 means, features of a warm-up net", choices=tuple(RHO))
    warmup: int = opt(5, "rounds of FedAvg that train the encoder", low=1, high=100_000)
    rho: float = opt(
        -1.0, "vigilance (-1: .35 on pixels, .4 on pooled, both .6 if grey, .7 on encoder features)", low=-1, high=1
    )
    art_alpha: float = opt(0.01, "choice parameter of Fuzzy ART", above=0)
    art_beta: float = opt(1.0, "learning rate of Fuzzy ART (1: fast learning)", low=0, high=1)
    quantile: float = opt(0.5, "T is this sample-weighted quantile of the cluster size (0: no small clusters)", low=0, high=1)
    scope: str = opt("client", "one threshold T for the client, or one for each of its classes", choices=("client", "class"))
    w_small: float = opt(0.5, "loss weight of small clusters, alpha of Eq. 8 (1, as --w-large: no curriculum)", low=0)
    w_large: float = opt(1.0, "loss weight of large clusters, beta of Eq. 8", low=0)
    swap: bool = opt(False, "Eqs. 6 and 7 read literally: --w-small goes to the large clusters")
    ramp: float = opt(0.0, "fraction of the rounds over which w_small moves to w_large (0: never)", low=0, high=1)
    augment: str = opt("none", "of the training images", choices=("none", "crop-flip", "crop-flip-rotate"))
    flip: float = opt(0.0, "share of the training labels replaced by wrong ones (0: none)", low=0, high=1)
    solo_epochs: int = opt(100, "local epochs of SOLO in all, spread over the rounds", low=1, high=1_000_000)
    projection: bool = opt(False, "MOON's projection head under every base, to compare bases (under moon it always is)")

    def check(self) -> None:
        super().check()
        if self.w_small == self.w_large == 0:
            raise common.UsageError("--w-small, --w-large: one of them must be above 0")
        if self.ramp and self.w_large == 0:
            raise common.UsageError("--ramp: moves w_small to --w-large, which must be above 0")
        if -1 < self.rho < 0:
            raise common.UsageError(f"--rho {self.rho}: wanted a number from 0 to 1, or -1 for the default")
        if self.model == "lstm" or self.dataset == "shakespeare":
            raise common.UsageError("--model lstm, --dataset shakespeare: this curriculum clusters images")
        if self.base == "solo" and self.rounds > self.solo_epochs:
            raise common.UsageError(f"--rounds {self.rounds}: SOLO has only --solo-epochs {self.solo_epochs} to spread")
        if self.base == "solo" and self.clients_per_round < self.clients:
            raise common.UsageError("--base solo: all clients train, so --clients-per-round must equal --clients")


# ---------------------------------------------------------------------------------- Curriculum Generation (Section 4.1)


def fuzzy_art(x: np.ndarray, rho: float, art_alpha: float, art_beta: float) -> tuple[np.ndarray, np.ndarray]:
    """Fuzzy ART with complement coding over the samples of one class, in their order. Eqs. 1 to 3.

    x uint8 (n, d) -> the cluster of each sample (n,), numbered by age, and the clusters' templates w (J, 2d).
    """
    n, d = x.shape
    dtype, total = (np.uint8, np.uint32) if art_beta == 1 else (np.float64, np.float64)
    w, overlap = np.empty((4, 2 * d), dtype), np.empty((4, 2 * d), dtype)
    norm, J, cluster = np.empty(4), 0, np.empty(n, dtype=np.int64)  # |w_j|, number of clusters
    for i in range(n):
        I_x = np.concatenate([x[i], ONE - x[i]])  # complement coding, |I| = d
        meet = np.minimum(I_x, w[:J], out=overlap[:J]).sum(1, dtype=total)  # |I ^ w_j|
        choice = np.where(meet / (ONE * d) >= rho, meet / (ONE * art_alpha + norm[:J]), -1.0)  # Eqs. 1 and 2
        j = int(choice.argmax()) if J and choice.max() >= 0 else J  # ties go to the oldest
        if j == len(w):
            w, overlap, norm = np.concatenate([w, w]), np.concatenate([overlap, overlap]), np.concatenate([norm, norm])
        if j == J:  # nothing matches
            w[j], J = I_x, J + 1
        else:
            w[j] = overlap[j] if art_beta == 1 else art_beta * overlap[j] + (1 - art_beta) * w[j]  # Eq. 3
        norm[j] = w[j].sum(dtype=total)
        cluster[i] = j
    return cluster, w[:J]


def clustering(x, y, order, rho, art_alpha, art_beta) -> tuple[np.ndarray, np.ndarray]:
    """C = Clustering(D, C), Eq. 4: an independent Fuzzy ART per class, in the presentation order `order` (n,).

    x uint8 (n, d), y (n,) -> the cluster of each sample (n,), and the templates (J, 2d), class after class.
    """
    cluster, templates, J = np.empty(len(y), dtype=np.int64), [], 0
    for c in np.unique(y):
        own = order[y[order] == c]
        ids, w = fuzzy_art(x[own], rho, art_alpha, art_beta)
        cluster[own] = J + ids
        templates.append(w)
        J += len(w)
    return cluster, np.concatenate(templates)


def groups(owner: np.ndarray, y: np.ndarray, scope: str) -> list[np.ndarray]:
    """Indices of the samples that share a threshold: those of one client, or of one class of one client.

    owner (n,) is the client of each sample, -1 where it has none.
    """
    key = owner if scope == "client" else owner * (y.max() + 1) + y
    return [np.flatnonzero((key == g) & (owner >= 0)) for g in np.unique(key[owner >= 0])]


def threshold(size: np.ndarray, quantile: float) -> int:
    """T: the quantile over samples of the size of their own cluster. Ties leave fewer than `quantile` below it."""
    return np.sort(size)[min(int(quantile * len(size)), len(size) - 1)]


def small_clusters(cluster: np.ndarray, shared: list[np.ndarray], quantile: float) -> np.ndarray:
    """P1 = {c : |c| < T} as a mask over samples (n,), Eq. 5; the others are P2."""
    size, P1 = np.bincount(cluster)[cluster], np.zeros(len(cluster), dtype=bool)
    for own in shared:
        P1[own] = size[own] < threshold(size[own], quantile)
    return P1


def random_groups(P1: np.ndarray, shared: list[np.ndarray], streams) -> np.ndarray:
    """The control: groups of the same sizes, their samples drawn at random."""
    drawn = np.zeros_like(P1)
    for i, own in enumerate(shared):
        drawn[own] = streams("random groups", i).permutation(P1[own])
    return drawn


def client_features(config, data, model, shards, streams) -> list[np.ndarray]:
    """What each client clusters: uint8 (n_k, d), without mean and std, without augmentation."""
    images = [data.x_train[torch.as_tensor(shard, device=model.device)] for shard in shards]  # (n_k, H, W, C)
    if config.features == "pooled":
        images = [F.adaptive_avg_pool2d(x.permute(0, 3, 1, 2).float(), 8).round().to(torch.uint8) for x in images]
    elif config.features == "encoder":
        theta = warm_up(config, model, data, shards, streams)
        images = [to_unit(hidden(model, theta[None], data, x)[0]) for x in images]
    return [x.flatten(1).cpu().numpy() for x in images]


def to_unit(z: Tensor) -> Tensor:
    """Min-max per dimension over the client, in steps of 1/255: (n, F) -> uint8."""
    low, high = z.amin(0), z.amax(0)
    return ((z - low) / (high - low).clamp(min=1e-12) * ONE).round().to(torch.uint8)


def warm_up(config, model, data, shards, streams) -> Tensor:
    """theta (P,) of the encoder: some rounds of FedAvg with every client, from the run's own initial weights."""
    theta, base = model.init(streams.seed("init")), common.FedAvg(config, model, len(shards))
    for t in range(config.warmup):
        batches = [
            common.epochs_of_batches(shard, config.epochs, config.batch_size, streams("warm-up", t, k))
            for k, shard in enumerate(shards)
        ]
        seeds = [streams.seed("warm-up dropout", t, k) for k in range(len(shards))]
        update = common.train(model, theta, data, batches, seeds=seeds, **sgd(config))
        theta = base.aggregate(theta, update, np.arange(len(shards)), [len(shard) for shard in shards])
    if not torch.isfinite(theta).all():
        raise common.NonFiniteError("the encoder of --features encoder is not finite. Try a smaller --lr")
    return theta


def cluster_clients(config, data, model, shards, streams) -> Tensor:
    """The cluster of every training sample, (2, n): under two presentation orders, the second only to compare.

    Clusters are numbered from 1 over all clients; 0 marks a sample of no client.
    """
    grey = config.features != "encoder" and data.x_train.shape[-1] == 1
    rho = config.rho if config.rho >= 0 else 0.6 if grey else RHO[config.features]
    y, result = data.y_train.cpu().numpy(), np.zeros((2, len(data.y_train)), dtype=np.int64)
    for k, x in enumerate(client_features(config, data, model, shards, streams)):
        for i in range(2):
            order = streams("presentation", k, i).permutation(len(x))
            ids, _ = clustering(x, y[shards[k]], order, rho, config.art_alpha, config.art_beta)
            result[i, shards[k]] = result[i].max() + 1 + ids
    return torch.from_numpy(result)


# ------------------------------------------------------------------------------------ Curriculum Training (Section 4.2)


def loss_weights(config, t: int) -> tuple[float, float]:
    """alpha and beta of Eq. 8 in round t; with --ramp (ours) w_small moves linearly to w_large."""
    moved = min(1.0, t / (config.ramp * config.rounds)) if config.ramp else 0.0
    return config.w_small + (config.w_large - config.w_small) * moved, config.w_large


def sample_weights(P1: np.ndarray, shards, w_small: float, w_large: float) -> np.ndarray:
    """alpha on P1, beta on P2, with mean 1 over each client, (n,); a client that would lose all its samples keeps 1."""
    weight = np.ones(len(P1))
    for shard in shards:
        raw = np.where(P1[shard], w_small, w_large)
        if raw.sum() > 0:
            weight[shard] = raw * (len(raw) / raw.sum())
    return weight


def draws(kind: str, batches: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """What the augmentation of one client's batches (T, B) draws; the samples keep their index, and so their group."""
    drawn = {"shift": rng.integers(0, 9, (*batches.shape, 2)), "flip": rng.random(batches.shape) < 0.5}
    if kind == "crop-flip-rotate":
        drawn["angle"] = np.radians(rng.uniform(-15, 15, batches.shape))
    return drawn


def augmented(x: Tensor, extra: dict[str, Tensor]) -> Tensor:
    """Random crop after padding by 4, horizontal flip, rotation by up to 15 degrees: uint8 (K, B, H, W, C) -> the same."""
    k, b, h, w, c = x.shape
    shift, flip = extra["shift"][:, :b], extra["flip"][:, :b, None]
    down = shift[..., :1] + torch.arange(h, device=x.device)  # (K, B, H)
    right = shift[..., 1:] + torch.arange(w, device=x.device)  # (K, B, W)
    right = torch.where(flip, right.flip(-1), right)
    image = torch.arange(k * b, device=x.device).view(k, b, 1, 1) * (h + 8) * (w + 8)
    place = image + down[..., None] * (w + 8) + right[:, :, None]  # (K, B, H, W)
    x = F.pad(x, (0, 0, 4, 4, 4, 4)).flatten(0, 3).index_select(0, place.flatten()).view(k, b, h, w, c)
    if "angle" not in extra:
        return x
    cos, sin = extra["angle"][:, :b].flatten().cos(), extra["angle"][:, :b].flatten().sin()
    turn = torch.stack([cos, -sin, 0 * cos, sin, cos, 0 * cos], 1).view(-1, 2, 3)
    grid = F.affine_grid(turn, (k * b, c, h, w), align_corners=False)
    planes = x.flatten(0, 1).permute(0, 3, 1, 2).to(grid.dtype)
    return F.grid_sample(planes, grid, mode="nearest", align_corners=False).to(x.dtype).permute(0, 2, 3, 1).view(k, b, h, w, c)


def local_epochs(config, t: int) -> int:
    """E of round t; SOLO's epochs are spread over the rounds."""
    if config.base != "solo":
        return config.epochs
    return (t + 1) * config.solo_epochs // config.rounds - t * config.solo_epochs // config.rounds


def sgd(config) -> dict:
    """The flags that `common.train` takes as they are."""
    return {name: getattr(config, name) for name in ("lr", "momentum", "weight_decay", "chunk")}


# ---------------------------------------------------------------------------------------------------- what is measured


def measures(config, cluster: np.ndarray, owner: np.ndarray, y: np.ndarray, flipped: np.ndarray) -> dict:
    """Columns: clusters, achieved share of P1 under both scopes, agreement of two orders, wrong labels (claim D4)."""
    own = owner >= 0
    small = {scope: small_clusters(cluster[0], groups(owner, y, scope), config.quantile)[own] for scope in ("client", "class")}
    first, shared = small[config.scope], groups(owner, y, config.scope)
    second = small_clusters(cluster[1], shared, config.quantile)[own]
    of = np.concatenate([np.full(len(each), i) for i, each in enumerate(shared)])[np.argsort(np.concatenate(shared))]
    p, q = (np.bincount(of, P1)[of] / np.bincount(of)[of] for P1 in (first, second))  # small share where T is shared
    columns = {
        "clusters": cluster[0].max(),
        "cluster_size": own.sum() / cluster[0].max(),
        "small_by_client": small["client"].mean(),
        "small_by_class": small["class"].mean(),
        "agreement": (first == second).mean(),
        "chance": (p * q + (1 - p) * (1 - q)).mean(),
        "noisy_small": flipped[own][first].sum() / max(first.sum(), 1),
        "noisy_large": flipped[own][~first].mean(),
    }
    return {name: float(value) for name, value in columns.items()}


def size_and_loss(cluster: np.ndarray, shards, losses) -> float:
    """Spearman's rank correlation of cluster size and loss, within each client, averaged over samples (claim D4)."""
    from scipy.stats import spearmanr

    size = np.bincount(cluster)[cluster]
    able = [k for k, shard in enumerate(shards) if np.ptp(size[shard]) > 0 and np.ptp(losses[k]) > 0]
    each = [spearmanr(size[shards[k]], losses[k])[0] for k in able]
    return float(np.average(each, weights=[len(shards[k]) for k in able])) if able else math.nan


def tested(model, nets: Tensor, data) -> dict[str, float]:
    """Accuracy and loss on the test set; for SOLO their mean over the clients' nets, and the accuracy's std beside."""
    each = [common.evaluate(model, theta, data) for theta in nets.view(-1, nets.shape[-1])]
    result = {name: float(np.mean([one[name] for one in each])) for name in ("accuracy", "loss")}
    return result | ({"client_std": float(np.std([one["accuracy"] for one in each], ddof=1))} if len(each) > 1 else {})


@torch.no_grad()
def hidden(model, weights: Tensor, data, x: Tensor) -> Tensor:
    """Hidden vectors (K, n, F) of the images x (n, H, W, C) in the nets of the stack `weights` (K, P)."""
    net, K = model.bind(weights), len(weights)
    return torch.cat([net.features(data.inputs(part.expand(K, *part.shape), model.dtype)) for part in x.split(500)], 1)


def seen(model, data, update, clients, cluster, shards, streams) -> dict:
    """What the figures show: features of 100 test images in three clients' local nets, images of one client's clusters."""
    y, rng = data.y_test.cpu().numpy(), streams("shown images")
    classes = np.sort(rng.permutation(np.unique(y))[:10])
    shown = np.concatenate([rng.permutation(np.flatnonzero(y == c))[:10] for c in classes])
    rows = np.sort(streams("shown clients").permutation(len(clients))[:3])
    z = hidden(model, update.weights[torch.as_tensor(rows)], data, data.x_test[torch.as_tensor(shown)]).float().cpu()
    y_train = data.y_train.cpu().numpy()
    shard = max(shards, key=len)
    picture = examples(data.x_train[torch.as_tensor(shard)].cpu().numpy(), cluster[shard], y_train[shard])
    labels = torch.as_tensor(y[shown])
    return {"features": z, "labels": labels, "clients": clients[rows].tolist(), "examples": torch.as_tensor(picture)}


def separation(z: np.ndarray, y: np.ndarray) -> float:
    """Silhouette of the classes in the features z (n, F), in [-1, 1] (claim D3)."""
    from sklearn.metrics import silhouette_score

    return float(silhouette_score(z, y)) if 1 < len(np.unique(y)) < len(y) and np.isfinite(z).all() else math.nan


def examples(images: np.ndarray, cluster: np.ndarray, y: np.ndarray, across: int = 8) -> np.ndarray:
    """One row per class: samples of its smallest, and of its largest clusters. (2, rows, columns, C) of uint8."""
    size, (h, w, c), classes = np.bincount(cluster)[cluster], images.shape[1:], np.unique(y)[:10]
    picture = np.full((2, len(classes), h + 2, across, w + 2, c), 255, dtype=np.uint8)
    for row, label in enumerate(classes):
        own = np.flatnonzero(y == label)
        own = own[np.lexsort((cluster[own], size[own]))]  # by size, members of a cluster side by side
        for side, chosen in enumerate((own[:across], own[::-1][:across])):
            picture[side, row, :h, : len(chosen), :w] = images[chosen].swapaxes(0, 1)
    return picture.reshape(2, len(classes) * (h + 2), across * (w + 2), c)


# ---------------------------------------------------------------------------------------------------------- the rounds


def flip_labels(data, share: float, rng: np.random.Generator):
    """Data whose training labels are wrong for `share` of the samples, and which they are (n,)."""
    flipped = np.zeros(len(data.y_train), dtype=bool)
    flipped[rng.permutation(len(flipped))[: round(share * len(flipped))]] = True
    C = int(data.y_train.max()) + 1
    wrong = torch.as_tensor(rng.integers(1, max(C, 2), len(flipped)) * flipped, device=data.y_train.device)
    return dataclasses.replace(data, y_train=(data.y_train + wrong) % C), flipped


def federate(config: Config, data: common.Data, run: common.Run) -> None:
    """FedAC(base), the base alone, or the base with random groups, as `run.method` says."""
    streams = run.streams
    _, device, dtype = common.setting_up(config)
    shards = common.client_shards(config, data, streams)
    data, flipped = flip_labels(data, config.flip, streams("flips"))
    model = common.build_model(config.model, data, device, dtype, config.width, config.projection or config.base == "moon")
    base = common.BASES[config.base](config, model, config.clients)
    y, sizes = data.y_train.cpu().numpy(), np.array([len(shard) for shard in shards])
    owner = np.full(len(y), -1)
    owner[np.concatenate(shards)] = np.repeat(np.arange(len(shards)), sizes)
    cluster = run.cached("clusters", lambda: cluster_clients(config, data, model, shards, streams)).cpu().numpy()  # Eq. 4
    shared = groups(owner, y, config.scope)
    P1 = small_clusters(cluster[0], shared, config.quantile)  # P1, P2 = S(C), Eq. 5
    P1 = random_groups(P1, shared, streams) if run.method == "random-groups" else P1

    state = {"weights": model.init(streams.seed("init")), "base": base.state, "seen": {}}
    for t in run.rounds(state):
        clients = common.select(config, config.clients_per_round, streams, t)
        theta, E, flags = state["weights"], local_epochs(config, t), sgd(config)
        batches = [common.epochs_of_batches(shards[k], E, config.batch_size, streams("batches", t, k)) for k in clients]
        if run.method != "base":
            weight = sample_weights(config.swap ^ P1, shards, *loss_weights(config, t))
            flags["weights"] = [weight[b] for b in batches]  # L_total = alpha L_1 + beta L_2, Eq. 8
        if config.augment != "none":
            drawn = [draws(config.augment, b, streams("augment", t, k)) for k, b in zip(clients, batches, strict=True)]
            flags |= {"augment": augmented, "per_step": {name: [d[name] for d in drawn] for name in drawn[0]}}
        flags["seeds"] = [streams.seed("dropout", t, k) for k in clients]
        update = common.train(model, base.start(theta, clients), data, batches, **flags, **base.client(theta, clients))
        clients, update = run.finite(t, clients, update)
        state["weights"] = base.aggregate(theta, update, clients, sizes[clients])
        nets = base.models(state["weights"])
        columns = tested(model, nets, data) if run.due(t) else {}
        columns |= measures(config, cluster, owner, y, flipped) if t == 0 else {}
        if t + 1 == config.rounds:
            losses = [loss for loss, _ in common.score(model, nets, data, shards, config.chunk)]
            state["seen"] = kept = seen(model, data, update, clients, cluster[0], shards, streams)
            columns["spearman"] = size_and_loss(cluster[0], shards, losses)
            columns["silhouette"] = float(np.mean([separation(z, kept["labels"]) for z in kept["features"].numpy()]))
        run.record(t, clients=len(clients), **columns)


# ------------------------------------------------------------------------------------------------ figure, presets, main


def figure(rows, config, folder) -> None:
    """Prints the measurements of each setting and draws, for its first trial, the t-SNE of Fig 6 and example images."""
    for setting in dict.fromkeys(row["setting"] for row in rows):
        own = [row for row in rows if row["setting"] == setting]
        arms = list(dict.fromkeys(row["method"] for row in own))
        print_measures(own, setting, arms)
        paths = {arm: common.Run(config, arm, setting, 0, folder).path for arm in arms}
        kept = {arm: common.load_checkpoint(path)["state"]["seen"] for arm, path in paths.items()}
        ending = "-".join(["", *setting.split()]).replace("/", "_") + ".png"
        draw_tsne({arm: kept[arm] for arm in ("base", "fedac") if arm in kept} or kept, folder / f"tsne{ending}")
        draw_examples(kept[arms[0]]["examples"].cpu().numpy(), folder / f"examples{ending}")


def print_measures(rows, setting, arms) -> None:
    """Means over trials, and over arms where the arms share the value."""

    def mean(column, arm=None):
        values = [row[column] for row in rows if row.get(column, "") != "" and arm in (None, row["method"])]
        return np.mean(values) if values else math.nan

    print(f"\n{setting or 'clustering'}: {mean('clusters'):.0f} clusters of {mean('cluster_size'):.1f} samples")
    print(f"small clusters hold {mean('small_by_client'):.3f} of the samples (T by class: {mean('small_by_class'):.3f})")
    print(f"two presentation orders agree on P1 for {mean('agreement'):.3f} of the samples (chance {mean('chance'):.3f})")
    print(f"wrong labels: {mean('noisy_small'):.3f} of P1, {mean('noisy_large'):.3f} of P2")
    for arm in arms:
        line = f"{arm:<14} Spearman(cluster size, loss) {mean('spearman', arm):+.3f}, silhouette {mean('silhouette', arm):+.3f}"
        std = mean("client_std", arm)
        print(line + ("" if math.isnan(std) else f", std of the accuracy over clients {std:.2f}"))


def flat_map(z: np.ndarray) -> np.ndarray:
    """t-SNE (n, 2) of features z (n, F); zeros where they have no map: two samples, all alike or huge (sklearn would crash)."""
    from sklearn.manifold import TSNE

    spread = np.ptp(z, axis=0).max()  # nan or inf where a feature is
    if len(z) < 3 or not 1e-5 * np.abs(z).max() < spread < 1e15:
        return np.zeros((len(z), 2))
    return TSNE(perplexity=min(30, len(z) - 1), init="pca", random_state=0).fit_transform(z)


def draw_tsne(kept: dict, path) -> None:
    """One row per arm, one panel per client."""
    fig, axes = common.new_figure(max(len(seen["clients"]) for seen in kept.values()), len(kept), width=3.0, height=2.9)
    for (arm, one), line in zip(kept.items(), axes, strict=True):
        classes, colour = np.unique(one["labels"].cpu().numpy(), return_inverse=True)
        for axis, z, client in zip(line, one["features"].cpu().numpy(), one["clients"], strict=False):
            dots = axis.scatter(*flat_map(z).T, c=colour, cmap="tab10", vmin=-0.5, vmax=9.5, s=12)
            axis.set_title(f"{arm}, client {client}, silhouette {separation(z, colour):.2f}", fontsize=8)
            axis.set(xticks=[], yticks=[])
    bar = fig.colorbar(dots, ax=axes, ticks=range(len(classes)), label="class", aspect=40)
    bar.ax.set_yticklabels([str(c) for c in classes])
    common.save_figure(fig, path)


def draw_examples(picture: np.ndarray, path) -> None:
    """Each class's smallest clusters beside its largest."""
    fig, axes = common.new_figure(2, 1, width=4.0, height=4.0 * picture.shape[1] / picture.shape[2] + 0.35)
    for axis, side, title in zip(axes[0], picture, ("smallest clusters", "largest clusters"), strict=True):
        axis.imshow(side.squeeze(), cmap="gray", vmin=0, vmax=255)
        axis.set(title=f"{title} of each class", xticks=[], yticks=[])
        axis.grid(False)
        axis.spines[:].set_visible(False)
    common.save_figure(fig, path)


CIFAR10 = {"dataset": "cifar10", "model": "simplecnn", "rounds": 100, "epochs": 10, "augment": "crop-flip"}
CIFAR100 = CIFAR10 | {"dataset": "cifar100", "model": "resnet18", "augment": "crop-flip-rotate"}
PLAIN, ALPHA = {"arms": ("fedac", "base")}, (0.3, 0.5)
MOON = CIFAR100 | {"base": "moon", "mu": 1.0}
PRESETS = {
    "table2": (
        "the four bases and FedAC on one net, CIFAR-10",
        CIFAR10 | PLAIN | {"projection": True},
        {"base": ("solo", "fedavg", "fedprox", "moon"), "alpha": ALPHA},
    ),
    "table2-cifar100": (
        "the same on CIFAR-100, MOON apart",
        CIFAR100 | PLAIN | {"projection": True},
        {"base": ("solo", "fedavg", "fedprox"), "alpha": ALPHA},
    ),
    "table2-moon-cifar100": ("MOON on CIFAR-100, with its own mu", MOON | PLAIN, {"alpha": ALPHA}),
    "table3": ("FedAC, base, control, CIFAR-10", CIFAR10, {"base": ("solo", "fedprox", "moon"), "alpha": ALPHA}),
    "table3-cifar100": ("the same on CIFAR-100, MOON apart", CIFAR100, {"base": ("solo", "fedprox"), "alpha": ALPHA}),
    "table3-moon-cifar100": ("MOON on CIFAR-100, with its own mu", MOON, {"alpha": ALPHA}),
    "fig6": ("t-SNE of local features, FedAvg, CIFAR-10", CIFAR10 | PLAIN, {}),
    "small": ("less weight for small clusters", CIFAR10, {"w_small": (1.0, 0.5, 0.0)}),
    "large": ("less weight for large clusters", CIFAR10 | {"w_small": 1.0}, {"w_large": (0.5, 0.0)}),
    "d4": (
        "who is in the small clusters, without and with wrong labels",
        CIFAR10 | {"arms": ("base",), "rounds": 10},
        {"features": ("pixels", "encoder"), "flip": (0.0, 0.2)},
    ),
}


def main(argv=None) -> None:
    """The command line; `argv` stands in for it in tests."""
    common.launch(Config, PRESETS, __doc__, lambda config: config.arms, federate, figure, argv=argv)


if __name__ == "__main__":
    main()
