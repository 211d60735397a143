"""python -m results.fedac_art.controls --alpha 0.5

Does it matter which samples are in the small clusters, and who is there? All of this is ours. Two
controls give the weights of FedAC to other samples:

random-groups   random samples of each client, as many as are in its P1
random-classes  the same for each client and class: one T per client puts whole rare classes in P1

--flip gives some samples wrong labels. --features clusters other things than pixels. --scope class
gives each class of a client its own threshold. Then both controls are the same. measures.csv has
these columns for each run:

clusters         how many there are over all clients
cluster_size     samples in one of them
small_by_client  fraction of the samples in P1 with one T per client
small_by_class   the same with one T per class of a client
whole_cells      (client, class) cells that lie wholly in the P1 of this method
agreement        samples on the same side of T in two orders of presentation
chance           the same for independent groups of these sizes
noisy_small      fraction of wrong labels in FedAC's P1
noisy_large      fraction of wrong labels in FedAC's P2
spearman         cluster size and loss of the last model, within clients
auc_size         how well small clusters find wrong labels: the area under the ROC curve, within
                 clients. 0.5 is chance
auc_loss         the same for large losses of the last model
silhouette       of the classes in what Fig. 6 shows
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import common
import experiment
import fedac_art as paper
from data import Data, epochs_of_batches
from errors import UsageError
from experiment import flag
from nets import Model

ARMS = ("fedac", "base", "random-groups", "random-classes")
RHO = {"pixels": 0.35, "pooled": 0.4, "encoder": 0.7}  # for clusters of 7 to 20 samples


def is_encoder(config) -> bool:
    return config.features == "encoder"


def reads_epochs(config) -> bool:
    return is_encoder(config) or paper.is_not_solo(config)


@dataclass
class Config(paper.Config):
    """The options of fedac_art.py. The base uses the clustering's options, too: it is measured."""

    epochs: int = flag(5, "E, local epochs", low=1, high=10**5, when=reads_epochs)
    method: str = flag("fedac", "the curriculum, its base, or a control", sweep=ARMS, choices=ARMS)
    features: str = flag(
        "pixels", "what is clustered: pixels, 8x8 means, features of a model", choices=tuple(RHO)
    )
    warmup: int = flag(
        5, "rounds of FedAvg that train the encoder", low=1, high=10**5, when=is_encoder
    )
    scope: str = flag(
        "client",
        "one threshold T for a client, or one for each of its classes",
        choices=("client", "class"),
    )
    flip: float = flag(0.0, "fraction of wrong training labels", low=0, high=1)
    rho: float = flag(
        -1.0, "vigilance (-1: 0.35 on pixels, 0.4 on pooled, 0.6 if grey, 0.7)", low=-1, high=1
    )
    art_alpha: float = flag(0.01, "alpha of Eq. 2", above=0)
    art_beta: float = flag(1.0, "learning rate of Fuzzy ART", low=0, high=1)
    quantile: float = flag(0.5, "T is this quantile of the cluster size", low=0, high=1)

    def check(self) -> None:
        super().check()
        if self.flip and self.hold_out:
            raise UsageError("--flip: --hold-out tests on true labels; leave one out")
        if self.flip and self.per_client:
            raise UsageError("--flip: --per-client weighs by wrong labels; leave one out")

    def reads_rounds(self) -> bool:
        return True  # the last one is measured

    def federation(self, data: Data, streams: common.Streams) -> common.Federation:
        if self.features == "pooled" and data.x_train.dim() != 4:
            raise UsageError(f"--features pooled: --dataset {self.dataset} holds no images")
        return super().federation(data, streams)


def federate(config: Config, fl: common.Federation, run: experiment.Run) -> None:
    """The loop of fedac_art.py, with other groups, and measures in the first and last round."""
    fl.data, flipped = flip_labels(fl.data, config.flip, fl.streams("flips"))
    fl.labels = fl.data.y_train.cpu().numpy()  # the true ones make the partition
    clusters = cached_clusters(config, fl, run)
    P1 = arm_groups(config, fl, clusters[0])

    state = fl.start()
    for t in run.rounds(state):
        clients = fl.select(t, config.clients_per_round)
        batches = fl.batches(t, clients, paper.local_epochs(config, t), config.drop_last)
        changes = paper.augmentation(config, fl, t, clients, batches)
        if paper.is_weighted(config):
            changes["sample_weights"] = paper.weigh_clients(config, fl, clients, batches, P1)
        update = fl.train(state, t, clients, batches, **changes)
        state["theta"] = fl.aggregate(state, update)

        columns = {}
        if t == 0:
            columns |= measure_clusters(config, fl, clusters, P1, flipped)
        if t + 1 == config.rounds:
            state["hidden"] = paper.hidden_of_clients(fl, update)
            sizes = np.bincount(clusters[0])[clusters[0]]
            losses = losses_of_samples(fl, state)
            columns["spearman"] = rank_correlation(fl.shards, sizes, losses)
            columns["auc_size"] = detection(fl.shards, -sizes, flipped)
            columns["auc_loss"] = detection(fl.shards, losses, flipped)
            columns["silhouette"] = silhouette(**state["hidden"])
        run.record(t, state, update, **columns)


def flip_labels(data: Data, share: float, rng: np.random.Generator) -> tuple[Data, np.ndarray]:
    """Returns data with this fraction of wrong training labels, and which are wrong (n,)."""
    n = len(data.y_train)
    flipped = np.zeros(n, dtype=bool)
    flipped[rng.permutation(n)[: round(share * n)]] = True
    if data.classes == 1:
        flipped[:] = False
    shift = rng.integers(1, max(data.classes, 2), n) * flipped
    y_train = (data.y_train + torch.as_tensor(shift, device=data.y_train.device)) % data.classes
    noisy = replace(data, y_train=y_train)
    noisy.normalised = data.normalised  # the largest array, made once
    return noisy, flipped


# --------------------------------------------------------------------------- clusters and groups


def cached_clusters(config, fl: common.Federation, run: experiment.Run) -> np.ndarray:
    """Returns the clusters (2, n) of two orders of presentation. The second is for comparison."""
    flags = ["epochs", "features", "warmup", "rho", "art_alpha", "art_beta", "flip"]

    def make() -> Tensor:
        x = features(config, fl, run)
        rho = vigilance(config, fl.data)
        orders = [cluster_clients(config, fl, x, rho, i) for i in range(2)]
        return torch.from_numpy(np.stack(orders))

    return run.cached("clusters", make, *config.flags("dealing"), *flags).cpu().numpy()


def cluster_clients(
    config: Config, fl: common.Federation, x: np.ndarray, rho: float, presentation: int
) -> np.ndarray:
    """Returns each training sample's cluster (n,), numbered from 1; 0 if no client has the sample.

    Another `presentation` gives the samples x (n, d) to Fuzzy ART in another random order.
    """
    clusters = np.zeros(len(x), dtype=int)
    for m, shard in enumerate(fl.shards):
        rng = fl.streams("presentation", m, presentation)
        of_client = paper.cluster_client(
            x[shard], fl.labels[shard], rng, rho, config.art_alpha, config.art_beta
        )
        clusters[shard] = clusters.max() + 1 + of_client
    return clusters


def vigilance(config: Config, data: Data) -> float:
    """Returns rho, by default for clusters of 7 to 20 samples. Black backgrounds always match."""
    if config.rho >= 0:
        return config.rho
    is_grey = data.x_train.shape[-1] == 1
    if is_grey and not is_encoder(config):
        return 0.6
    return RHO[config.features]


def features(config: Config, fl: common.Federation, run: experiment.Run) -> np.ndarray:
    """Returns what is clustered, uint8 (n, d): pixels, means in 8x8 fields, or hidden vectors."""
    if config.features == "pixels":
        return paper.pixels(fl.data)
    if config.features == "pooled":
        x = torch.from_numpy(paper.pixels(fl.data)).view(fl.data.x_train.shape)
        if x.is_floating_point():
            x = 255 * x
        parts = []
        for part in x.split(500):
            image = part.permute(0, 3, 1, 2).float()
            parts.append(F.adaptive_avg_pool2d(image, 8).round())
        return torch.cat(parts).to(torch.uint8).flatten(1).cpu().numpy()
    model, theta = warm_up(config, fl, run)
    z = paper.hidden_vectors(model, theta, fl.data.images("train", model.dtype))
    for shard in map(torch.as_tensor, fl.shards):  # from 0 to 255 in each dimension of a client
        low, high = z[shard].aminmax(dim=0)
        width = (high - low).clamp(min=1e-12)
        z[shard] = ((z[shard] - low) / width * 255).round()
    return z.to(torch.uint8).cpu().numpy()


def warm_up(config, fl: common.Federation, run: experiment.Run) -> tuple[Model, Tensor]:
    """Returns the encoder and its theta (P,): FedAvg with every client, whatever --base is."""
    plain = replace(config, base="fedavg", projection=False)
    warm = plain.federation(run.data(), fl.streams)
    warm.data = fl.data  # with the labels of --flip, as the clients have them
    state = warm.start()
    for t in range(config.warmup):
        batches = []
        for m, shard in enumerate(warm.shards):
            rng = fl.streams("warm-up", t, m)
            batches.append(epochs_of_batches(shard, config.epochs, config.batch_size, rng))
        update = warm.train(state, t, warm.everyone, batches)
        state["theta"] = warm.aggregate(state, update)
    return warm.model, state["theta"]


def arm_groups(config: Config, fl: common.Federation, clusters: np.ndarray) -> np.ndarray:
    """Returns P1 of this method as a mask over samples (n,)."""
    P1 = small_clusters(clusters, sharing(fl, config.scope), config.quantile)
    if config.method == "random-groups":
        return draw_groups(P1, sharing(fl, config.scope), fl.streams)
    if config.method == "random-classes":
        return draw_groups(P1, sharing(fl, "class"), fl.streams)
    return P1


def small_clusters(clusters: np.ndarray, groups: list[np.ndarray], quantile: float) -> np.ndarray:
    """Returns P1 (n,), where each group of samples has its own threshold T."""
    P1 = np.zeros(len(clusters), dtype=bool)
    for samples in groups:
        P1[samples] = paper.small_clusters(clusters[samples], quantile)
    return P1


def sharing(fl: common.Federation, scope: str) -> list[np.ndarray]:
    """Returns the samples with a common threshold: of a client, or of a class of a client."""
    if scope == "client":
        return fl.shards
    groups = []
    for shard in fl.shards:
        labels = fl.labels[shard]
        groups += [shard[labels == c] for c in np.unique(labels)]
    return groups


def draw_groups(P1: np.ndarray, groups: list[np.ndarray], streams: common.Streams) -> np.ndarray:
    """Selects in each group as many random samples as P1 (n,) has there."""
    drawn = np.zeros_like(P1)
    for i, samples in enumerate(groups):
        drawn[samples] = streams("random groups", i).permutation(P1[samples])
    return drawn


# -------------------------------------------------------------------------------------- measures


def measure_clusters(config, fl: common.Federation, clusters, P1, flipped) -> dict[str, float]:
    """Measures two clusterings (2, n), this method's P1 (n,), and the wrong labels (n,)."""
    groups = sharing(fl, config.scope)
    cells = sharing(fl, "class")
    by_client = small_clusters(clusters[0], fl.shards, config.quantile)
    by_class = small_clusters(clusters[0], cells, config.quantile)
    first = small_clusters(clusters[0], groups, config.quantile)  # FedAC's P1
    second = small_clusters(clusters[1], groups, config.quantile)

    dealt = clusters[0] > 0
    count = clusters[0].max()
    noisy_small = flipped[first].mean() if first.any() else math.nan
    return {
        "clusters": count,
        "cluster_size": dealt.sum() / count,
        "small_by_client": by_client[dealt].mean(),
        "small_by_class": by_class[dealt].mean(),
        "whole_cells": np.mean([P1[cell].all() for cell in cells]),
        "agreement": (first == second)[dealt].mean(),
        "chance": chance_agreement(first, second, groups),
        "noisy_small": noisy_small,
        "noisy_large": flipped[dealt & ~first].mean(),
    }


def chance_agreement(first: np.ndarray, second: np.ndarray, groups: list[np.ndarray]) -> float:
    """Returns how often two masks (n,) would agree if each were random within every group."""
    p = np.array([first[samples].mean() for samples in groups])
    q = np.array([second[samples].mean() for samples in groups])
    both = p * q
    neither = (1 - p) * (1 - q)
    return np.average(both + neither, weights=[len(samples) for samples in groups])


def losses_of_samples(fl: common.Federation, state: dict) -> np.ndarray:
    """Returns each sample's loss with its client's model (n,); NaN if no client has the sample."""
    losses = np.full(len(fl.labels), math.nan)
    scores = fl.score(fl.received(state, fl.everyone), fl.everyone)
    for shard, (of_client, _) in zip(fl.shards, scores, strict=True):
        losses[shard] = of_client
    return losses


def rank_correlation(shards: list[np.ndarray], sizes: np.ndarray, losses: np.ndarray) -> float:
    """Returns Spearman's correlation of cluster size and loss (n,), averaged over samples.

    It is taken within clients. A client with clusters of one size only has none.
    """
    import pandas as pd

    correlations = []
    samples = []
    for shard in shards:
        if len(np.unique(sizes[shard])) > 1:
            table = pd.DataFrame({"size": sizes[shard], "loss": losses[shard]})
            correlations.append(table.corr("spearman").loc["size", "loss"])
            samples.append(len(shard))
    return np.average(correlations, weights=samples) if samples else math.nan


def detection(shards: list[np.ndarray], suspicion: np.ndarray, is_wrong: np.ndarray) -> float:
    """Returns the area under the ROC curve of finding wrong labels (n,), averaged over samples.

    It is the chance that a client's wrong label is more suspicious than a true one of the same
    client. A client without both has none.
    """
    from sklearn.metrics import roc_auc_score

    areas = []
    samples = []
    for shard in shards:
        if len(np.unique(is_wrong[shard])) == 2:
            areas.append(roc_auc_score(is_wrong[shard], suspicion[shard]))
            samples.append(len(shard))
    return np.average(areas, weights=samples) if samples else math.nan


def silhouette(vectors: Tensor, labels: Tensor, clients: list[int]) -> float:
    """Returns the mean silhouette of the classes in each client's hidden vectors (3, n, F)."""
    from sklearn.metrics import silhouette_score

    classes = len(labels.unique())
    if not 1 < classes < len(labels) or not torch.isfinite(vectors).all():
        return math.nan
    labels = labels.cpu().numpy()
    return np.mean([silhouette_score(z, labels) for z in vectors.cpu().numpy()])


# ------------------------------------------------------------------------------- the command line


def plot(df, folder) -> None:
    """Writes measures.csv, and prints it as means over trials."""
    names = list(df.loc[:, "clusters":"noisy_large"])
    names += ["spearman", "auc_size", "auc_loss", "silhouette"]
    runs = df.groupby(["setting", "method", "trial"], sort=False)[names]
    table = runs.last()  # each has one value in a run
    table.to_csv(folder / "measures.csv")
    means = table.groupby(["setting", "method"], sort=False).mean()
    for setting, of_setting in means.groupby("setting", sort=False):
        of_arms = of_setting.droplevel("setting").T
        print(f"\n{setting}\n{of_arms.to_string(float_format='%.3f')}")


FEATURES = "--features pixels encoder --flip 0 0.2"
PRESETS = paper.PRESETS | {  # the paper's with both controls next to FedAC and its base
    "d4": f"{paper.CIFAR10} --method base --rounds 10 {FEATURES}  # who is in the small clusters",
}


def main(argv=None) -> None:
    """Runs the command line. Tests pass its words as `argv`."""
    script = experiment.Script(
        config=Config,
        presets=PRESETS,
        doc=__doc__,
        federate=federate,
        compare=("method",),
        plot=plot,
        draw=paper.draw,
    )
    experiment.main(script, argv)


if __name__ == "__main__":
    main()
