"""python plain/fedac_art.py

Read this after fedcl_fgn.py, which explains FedAvg. It is FedAC, of "Clustering-based Curriculum
Construction for Sample-Balanced Federated Learning" (Qi et al., CICAI 2022,
https://doi.org/10.1007/978-3-031-20503-3_13). To get results run ../fedac_art.py, which lists the
differences from the paper.

FedAC gives each sample a weight in the loss, the same in all rounds. Why it should help: an image
that resembles few others of its class may be noisy, or may have a wrong label. If such images count
less, a client learns a better model, and so the mean is better.

    each client k, which holds N_k samples, once:
        clusters its images of each class with Fuzzy ART                    Eq. 4
        size_i <- the number of samples in the cluster of sample i
        T  <- the median of size_i over its samples (of two middle ones the larger)
        P1 <- its samples i with size_i < T, and P2 <- its other samples    Eq. 5
        weight_i <- w_small for sample i in P1, w_large for sample i in P2
        weight_i <- weight_i / (the mean of its weights)
    in each round FedAvg, and the loss of a batch is the mean of
        weight_i (cross-entropy_i)                                          Eq. 8

Fuzzy ART (adaptive resonance theory) finds the number of clusters by itself. It takes the images of
a class one by one. An image x has d pixels from 0 to 1. It is coded as I = (x, 1 - x), so that dark
pixels count as much as bright ones. Here a ^ b takes the smaller of each two numbers, and |a| is
the sum of all numbers, so |I| = d. Cluster j has a template w_j of 2 d numbers. The image may join
a cluster that matches it:

    |I ^ w_j| / |I| >= rho                                                  Eq. 1

It joins the one with the largest choice_j, and the template of this cluster moves towards it. If no
cluster matches, a new one begins with w_j = I.

    choice_j = |I ^ w_j| / (art_alpha + |w_j|)                              Eq. 2
    w_j <- art_beta (I ^ w_j) + (1 - art_beta) w_j                          Eq. 3

Only here: LeNet-5 learns scikit-learn's digits, 1437 images to train it and 360 to test it. The
script's metrics.csv has the same numbers with `--dtype float64`: method fedac, trial 0. Lines
marked "same numbers" are needed only for this. It takes 15 seconds.
"""

import argparse
import copy
import math
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

COUNT = (1, 10**6)  # the smallest and the largest number that an option may be
FRACTION = (0, 1)
POSITIVE = (1e-6, 1e6)
FROM_0 = (0, math.inf)
OPTIONS = {  # default, what is allowed, help; names and defaults are those of the script
    "--method": ("fedac", ("fedac", "base"), "fedac: FedAC; base: FedAvg, with equal weights"),
    "--rho": (0.6, FRACTION, "smallest match, the vigilance (script: -1, which is 0.6 here)"),
    "--art-alpha": (0.01, POSITIVE, "large: small templates win less often"),
    "--art-beta": (1.0, FRACTION, "how far a template moves, at most 1"),
    "--quantile": (0.5, FRACTION, "T is this quantile of the sizes"),
    "--w-small": (0.5, POSITIVE, "weight of P1, alpha of Eq. 8"),
    "--w-large": (1.0, (0, 1e6), "weight of P2, beta of Eq. 8"),
    "--clients": (10, COUNT, "M, all clients"),
    "--clients-per-round": (10, COUNT, "n, clients of a round"),
    "--alpha": (0.5, POSITIVE, "how equal the clients' labels are (small: very different)"),
    "--min-size": (10, COUNT, "fewest samples of a client"),
    "--rounds": (10, COUNT, "communication rounds"),
    "--epochs": (5, COUNT, "E, a client's passes over its samples in a round"),
    "--batch-size": (64, COUNT, "samples in a batch"),
    "--lr": (0.01, POSITIVE, "the clients' learning rate"),
    "--momentum": (0.9, (0, 0.9999), "of the clients' SGD"),
    "--weight-decay": (1e-5, (0, 1), "of the clients' SGD"),
    "--seed": (202207, FROM_0, "of all random numbers"),
    "--trial": (0, FROM_0, "another number gives other clients, initial weights and batches"),
}


# ---------------------------------------------------------------------------------- the algorithm


def federate(config, model):
    """FedAC. Trains `model` in place, and yields the results of each round."""
    x, y, x_test, y_test = load_data()
    shards = partition(config, y)
    weights = torch.ones(len(y)).double()
    if config.method == "fedac":
        pixels = (x - x.min()) / (x.max() - x.min())  # from 0 to 1
        for k, own in enumerate(shards):
            rng = stream(config, "presentation", k, 0)  # for the order of the images
            weights[own] = make_curriculum(config, pixels[own], y[own], rng)
    for t in range(config.rounds):
        # stream(): random numbers for this purpose and round
        order = stream(config, "select", t).permutation(config.clients)
        messages = []
        for k in order[: config.clients_per_round]:
            own = shards[k]
            rng = stream(config, "batches", t, k)
            message = client_update(config, model, x[own], y[own], weights[own], rng)
            messages.append(message)
        vector_to_parameters(server_update(messages), model.parameters())
        yield {"round": t + 1} | evaluate(model, x_test, y_test)


def client_update(config, model, x, y, weights, rng):
    """Trains on the client's samples x, y, which have these weights. Returns theta_k and N_k."""
    client = copy.deepcopy(model)  # theta_k <- theta
    optimizer = torch.optim.SGD(  # a new one in each round, so momentum begins at 0
        client.parameters(), config.lr, config.momentum, weight_decay=config.weight_decay
    )
    for _ in range(config.epochs):
        order = torch.from_numpy(rng.permutation(len(y)))
        for batch in order.split(config.batch_size):  # the last one may be smaller
            ce = F.cross_entropy(client(x[batch]), y[batch], reduction="none")
            loss = (weights[batch] * ce).mean()  # Eq. 8
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    theta_k = parameters_to_vector(client.parameters()).detach()
    return theta_k, len(y)


def server_update(messages):
    """The next theta, from theta_k and N_k of this round's clients."""
    thetas, N = zip(*messages, strict=True)
    p = np.array(N) / sum(N)
    return torch.from_numpy(p) @ torch.stack(thetas)


# --------------------------------------------------------------------------------- the curriculum


def make_curriculum(config, pixels, y, rng):
    """The weights (N_k,) of a client's samples, from their pixels (N_k, 1, 28, 28) and labels."""
    sizes = cluster_sizes(config, pixels.flatten(1).numpy(), y.numpy(), rng)
    T = quantile(sizes, config.quantile)
    in_P1 = sizes < T  # Eq. 5
    weights = np.where(in_P1, config.w_small, config.w_large)
    if not weights.any():  # all are in P2, and w_large is 0
        weights = np.ones(len(y))
    return torch.from_numpy(weights / weights.mean())


def cluster_sizes(config, x, y, rng):
    """size_i (N_k,): the size of each sample's cluster. A cluster has samples of one class."""
    sizes = np.zeros(len(y), dtype=int)
    order = rng.permutation(len(y))  # in which Fuzzy ART meets the images
    for c in np.unique(y):
        samples = order[y[order] == c]
        clusters = fuzzy_art(x[samples], config.rho, config.art_alpha, config.art_beta)
        sizes[samples] = np.bincount(clusters)[clusters]
    return sizes


def fuzzy_art(x, rho, alpha, beta):
    """The cluster (n,) of each row of x (n, d), counted from 0 in the order in which they begin."""
    n, d = x.shape
    w = np.empty((0, 2 * d))  # a template for each cluster
    clusters = np.empty(n, dtype=int)
    for i, row in enumerate(x):
        I_x = np.concatenate([row, 1 - row])
        meets = np.minimum(I_x, w)  # I ^ w_j for every j
        overlaps = meets.sum(1)
        matches = overlaps / d >= rho - 1e-9  # Eq. 1, |I| = d; sums err by about 1e-12
        if matches.any():
            choices = overlaps / (alpha + w.sum(1))  # Eq. 2
            j = np.where(matches, choices, -1).argmax()  # the oldest of equals
            w[j] = beta * meets[j] + (1 - beta) * w[j]  # Eq. 3
        else:
            j = len(w)
            w = np.vstack([w, I_x])
        clusters[i] = j
    return clusters


def quantile(sizes, q):
    """The smallest size such that more than a fraction q of the samples have at most this size."""
    n = len(sizes)
    fractions = np.arange(1, n + 1) / n
    rank = (fractions <= q).sum()
    return np.sort(sizes)[min(rank, n - 1)]


# ------------------------------------------------- what all programs of this folder have in common


@torch.no_grad()
def evaluate(model, x, y):
    """Accuracy in percent, and mean loss."""
    logits = model(x)
    is_correct = (logits.argmax(1) == y).double()
    loss = F.cross_entropy(logits, y)
    return {"accuracy": 100 * is_correct.mean().item(), "loss": loss.item()}


def stream(config, purpose, *key):
    """A generator of random numbers for each purpose, round and client.

    So the batches of client 7 in round 3 do not depend on what else was random before.
    """
    code = zlib.crc32(purpose.encode())
    return np.random.default_rng([config.seed, config.trial, code, *key])


def load_data():
    """Images (n, 1, 28, 28) and labels (n,) of scikit-learn's digits: training, then test."""
    x, y = map(torch.from_numpy, load_digits(return_X_y=True))
    x = x.float().view(-1, 1, 8, 8)  # from 0 to 16
    x = F.interpolate(x * (255 / 16), size=28, mode="bilinear")
    x = x.round().double()  # bytes, as the script has; float64, as NumPy has
    train, test = train_test_split(np.arange(len(y)), test_size=0.2, stratify=y, random_state=0)
    x = (x - x[train].mean()) / x[train].std(correction=0)
    return x[train], y[train], x[test], y[test]


def partition(config, y):
    """Divides the samples of each class among the clients, in random fractions ~ Dir(alpha).

    Returns each client's samples, as indices of y (n,).
    """
    y = y.numpy()
    rng = stream(config, "partition")
    rng.permutation(len(y))  # same numbers
    classes = [rng.permutation(np.flatnonzero(y == c)) for c in range(10)]
    client_of = np.empty(len(y), dtype=int)
    for samples in classes:
        fractions = rng.dirichlet(np.full(config.clients, config.alpha))
        ends = fractions.cumsum() * len(samples)  # each client has the interval up to its end
        middles = np.arange(len(samples)) + 0.5  # sample i is the point i + 0.5
        client_of[samples] = np.searchsorted(ends[:-1], middles)
    order = rng.permutation(len(y))  # so the sample that a large client loses is random
    shards = [list(order[client_of[order] == k]) for k in range(config.clients)]
    for shard in shards:
        while len(shard) < config.min_size:  # it gets a sample of the largest client
            largest = max(shards, key=len)
            shard.append(largest.pop())
    return [np.sort(shard) for shard in shards]  # same numbers


def make_model(rng):
    """LeNet-5 with PyTorch's initial weights."""
    torch.manual_seed(rng.integers(2**31))
    model = nn.Sequential(
        nn.Conv2d(1, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )
    return model.double()  # float64, as the data


def parse_options(words=None):
    """The options of the command line, or of `words` in its place, each as an attribute."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for option, (default, allowed, text) in OPTIONS.items():
        choices = None
        if isinstance(default, str):
            choices = allowed
        parser.add_argument(option, type=type(default), default=default, choices=choices, help=text)
    config = parser.parse_args(words)
    for option, value in zip(OPTIONS, vars(config).values(), strict=True):
        if not isinstance(value, str):
            low, high = OPTIONS[option][1]
            if not low <= value <= high:
                parser.error(f"{option} {value}: choose a number from {low} to {high}")
    # There are 1437 training samples, and each client needs min_size of them.
    if not config.clients_per_round <= config.clients <= 1437 // config.min_size:
        parser.error("--clients: choose from --clients-per-round to 1437 / --min-size")
    return config


if __name__ == "__main__":
    config = parse_options()
    torch.set_num_threads(1)  # a model this small is slower on several
    model = make_model(stream(config, "init"))
    for row in federate(config, model):
        cells = [f"{name} {value:<9.4g}" for name, value in row.items()]
        print(*cells)
