"""python plain/fedcl_fgn.py

This is FedCL, Algorithm 2 of "FedCL: Critical Learning Periods-Aware Adaptive Client Selection in
Federated Learning" (2022, https://openreview.net/forum?id=QCtizuT48D), later CriticalFL (Yan, Wang,
Yuan and Li, KDD 2023). To get results run ../fedcl_fgn.py, which lists the differences from the
paper.

In federated learning M clients keep their data, and a server owns a model. In each round the server
sends the model's weights theta to n clients. Each of them trains on its own samples and sends its
weights back, and the server averages them (FedAvg). FedCL chooses n.

The paper's reason: what a model misses in a critical learning period, early in training, it never
learns later. So this is when many clients should take part. A step of SGD lowers the loss by about
eta ||g||^2, where g is the gradient. The mean of this number over clients is FGN, the federated
gradient norm. While FGN grows, the model learns faster and faster, and the period is critical.

    n <- n_0
    in each round t = 0, 1, ..
        eta_t <- eta lr_decay^t
        the server sends theta to n of the M clients, selected at random
        each of these clients k, which holds N_k samples:
            theta_k <- theta, then E epochs of SGD with learning rate eta_t and momentum
            ||g_k||^2 <- the mean of ||gradient of the loss||^2 over all batches of these epochs
            sends theta_k, N_k and ||g_k||^2
        the server:
            p_k    <- N_k / (the sum of N_k over these clients)
            theta  <- sum_k p_k theta_k
            FGN(t) <- sum_k p_k eta_t ||g_k||^2                             Eq. 1
            if FGN(t) has grown by at least a fraction delta since t - 1:   Eq. 2
                n <- 2 n, at most M
            otherwise:
                n <- n / 2, at least n_0 / 2 (both rounded down) and at least 1

Only here: LeNet-5 learns scikit-learn's digits, 1437 images to train it and 360 to test it. With
`--dtype float64` the metrics.csv of the script holds the numbers that this file prints: method
fedavg+cl, trial 0. Lines marked "same numbers" are needed only for this. It takes 40 seconds.
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
POSITIVE = (1e-6, 1e6)
FROM_0 = (0, math.inf)
OPTIONS = {  # default, what is allowed, help; names and defaults are those of the script
    "--method": ("cl", ("cl", "base"), "cl: FedCL; base: FedAvg, with n_0 clients in every round"),
    "--delta": (0.01, FROM_0, "growth of FGN that makes a round critical, as a fraction"),
    "--clients": (128, COUNT, "M, all clients"),
    "--clients-per-round": (16, COUNT, "n_0, clients of the first round"),
    "--alpha": (0.1, POSITIVE, "how equal the clients' labels are (small: very different)"),
    "--min-size": (1, COUNT, "fewest samples of a client"),
    "--rounds": (60, COUNT, "communication rounds"),
    "--epochs": (2, COUNT, "E, a client's passes over its samples in a round"),
    "--batch-size": (4, COUNT, "samples in a batch"),
    "--lr": (0.01, POSITIVE, "eta, the clients' learning rate in the first round"),
    "--lr-decay": (0.99, (1e-6, 1), "eta is multiplied by this after every round"),
    "--momentum": (0.9, (0, 0.9999), "of the clients' SGD"),
    "--weight-decay": (1e-5, (0, 1), "of the clients' SGD"),
    "--seed": (202207, FROM_0, "of all random numbers"),
    "--trial": (0, FROM_0, "another number gives other clients, initial weights and batches"),
}


# ---------------------------------------------------------------------------------- the algorithm


def federate(config, model):
    """Algorithm 2. Trains `model` in place, and yields the results of each round."""
    x, y, x_test, y_test = load_data()
    shards = partition(config, y)
    n_0 = config.clients_per_round
    n = n_0
    previous_fgn = None
    for t in range(config.rounds):
        eta = config.lr * config.lr_decay**t
        # stream(): random numbers for this purpose and round
        selected = stream(config, "select", t).permutation(config.clients)[:n]
        messages = []
        for k in selected:
            own = shards[k]
            rng = stream(config, "batches", t, k)
            messages.append(client_update(config, model, x[own], y[own], eta, rng))
        theta, fgn = server_update(messages, eta)
        vector_to_parameters(theta, model.parameters())

        row = {"round": t + 1, "clients": n, "fgn": fgn}
        row |= evaluate(model, x_test, y_test)
        if config.method == "cl":
            critical = is_critical(previous_fgn, fgn, config.delta)
            n = double(n, config.clients) if critical else halve(n, n_0)
            previous_fgn = fgn
            row["critical"] = int(critical)
        yield row


def client_update(config, model, x, y, eta, rng):
    """Trains on the client's samples x, y. Returns what it sends: theta_k, N_k, ||g_k||^2."""
    client = copy.deepcopy(model)  # theta_k <- theta
    optimizer = torch.optim.SGD(  # a new one in each round, so momentum begins at 0
        client.parameters(), eta, config.momentum, weight_decay=config.weight_decay
    )
    g_squared = []
    for _ in range(config.epochs):
        order = torch.from_numpy(rng.permutation(len(y)))
        for batch in order.split(config.batch_size):  # the last one may be smaller
            loss = F.cross_entropy(client(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            g = parameters_to_vector(w.grad for w in client.parameters())
            g_squared.append((g @ g).item())
            optimizer.step()
    theta_k = parameters_to_vector(client.parameters()).detach()
    return theta_k, len(y), np.mean(g_squared)


def server_update(messages, eta):
    """The next theta and FGN(t), from the messages of this round's clients."""
    thetas, N, g_squared = zip(*messages, strict=True)
    p = np.array(N) / sum(N)
    theta = torch.from_numpy(p) @ torch.stack(thetas)
    fgn = p @ np.array(g_squared) * eta  # Eq. 1
    return theta, fgn


def is_critical(previous, fgn, delta):
    """Eq. 2, times FGN(t-1): whether FGN grew by at least a fraction delta.

    The first round, where `previous` is None, is critical.
    """
    return previous is None or (fgn > 0 and fgn - previous >= delta * previous)


def double(n, M):
    """Twice as many clients, at most all M."""
    return min(2 * n, M)


def halve(n, n_0):
    """Half as many clients, at least n_0 / 2 and at least one."""
    return max(n // 2, n_0 // 2, 1)


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
