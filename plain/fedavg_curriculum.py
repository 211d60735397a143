"""python plain/fedavg_curriculum.py

Read this after fedcl_fgn.py, which explains FedAvg. It is Algorithm 1 of "When Do Curricula Work in
Federated Learning?" (Vahidian et al., ICCV 2023, https://arxiv.org/abs/2212.12712). To get results
run ../fedavg_curriculum.py, which lists the differences from the paper.

With a curriculum each client learns from its easiest samples first. The paper's reason: clients
differ, so their models move apart as they train. Easy samples of different clients resemble each
other. So a curriculum begins with these, and adds the samples on which clients disagree only later.
(We measured the opposite: results/claims.md, A13.)

    in each round t = 0, 1, ..
        the server sends theta to K of the M clients, selected at random
        each of these clients m, which holds N_m samples:
            computes the loss of every sample under theta, and sorts: the smallest loss is first
            theta_m <- theta
            at each of its T local steps:
                theta_m takes a step of SGD on a batch from the first g(step) samples
            sends theta_m and N_m
        the server:
            p_m   <- N_m / (the sum of N_m over these clients)
            theta <- sum_m p_m theta_m

A batch holds B samples, and T = E ceil(N_m / B), the steps of E passes over the samples. Batches
come from a queue. When it holds fewer than B, the first g(step) samples are shuffled and appended.
The pacing function g grows from b N_m to N_m in the first a T steps:

    g(step) = b N_m + (1 - b) N_m f(x), rounded down, at least 1        step = 0, .., T - 1
    x = step / (a T), at most 1
    f(x) = x (linear), x^2 (quadratic), sqrt(x) (root), 0 but 1 if x = 1 (step)
           or (e^(10 x) - 1) / (e^10 - 1) (exponential)

Other orders to compare with: anti has the largest loss first. In random the order is random in each
round, and g is the same. vanilla has g = N_m, which is FedAvg.

Only here: LeNet-5 learns scikit-learn's digits, 1437 images to train it and 360 to test it. With
`--dtype float64` the metrics.csv of the script holds the numbers that this file prints, in trial 0.
Lines marked "same numbers" are needed only for this. It takes 15 seconds.
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

PACINGS = {  # f(x), where x grows from 0 to 1
    "linear": lambda x: x,
    "quadratic": lambda x: x**2,
    "root": lambda x: math.sqrt(x),
    "step": lambda x: x >= 1 - 1e-9,  # x may be rounded down
    "exponential": lambda x: math.expm1(10 * x) / math.expm1(10),
}
COUNT = (1, 10**6)  # the smallest and the largest number that an option may be
FRACTION = (0, 1)
POSITIVE = (1e-6, 1e6)
FROM_0 = (0, math.inf)
OPTIONS = {  # default, what is allowed, help; names and defaults are those of the script
    "--order": (
        "curriculum",
        ("curriculum", "anti", "random", "vanilla"),
        "the samples that come first: easy, hard, random, or all at once",
    ),
    "--pacing": ("linear", PACINGS, "f, the shape of the pacing function"),
    "--pacing-a": (0.8, FROM_0, "a, fraction of the local steps until all samples are admitted"),
    "--pacing-b": (0.2, FRACTION, "b, fraction of the samples that are admitted at the first step"),
    "--clients": (50, COUNT, "M, all clients"),
    "--clients-per-round": (10, COUNT, "K, clients of a round"),
    "--alpha": (0.1, POSITIVE, "how equal the clients' labels are (small: very different)"),
    "--min-size": (1, COUNT, "fewest samples of a client"),
    "--rounds": (20, COUNT, "communication rounds"),
    "--epochs": (5, COUNT, "E, a client takes as many steps as E passes over its samples"),
    "--batch-size": (10, COUNT, "B, samples in a batch"),
    "--lr": (0.01, POSITIVE, "the clients' learning rate"),
    "--momentum": (0.9, (0, 0.9999), "of the clients' SGD"),
    "--weight-decay": (5e-4, (0, 1), "of the clients' SGD"),
    "--seed": (202207, FROM_0, "of all random numbers"),
    "--trial": (0, FROM_0, "another number gives other clients, initial weights and batches"),
}


# ---------------------------------------------------------------------------------- the algorithm


def federate(config, model):
    """Algorithm 1. Trains `model` in place, and yields the results of each round."""
    x, y, x_test, y_test = load_data()
    shards = partition(config, y)
    K = config.clients_per_round
    for t in range(config.rounds):
        messages = []
        # stream(): random numbers for this purpose and round
        for m in stream(config, "select", t).permutation(config.clients)[:K]:
            own = shards[m]
            messages.append(client_update(config, model, x[own], y[own], t, m))
        theta = server_update(messages)
        vector_to_parameters(theta, model.parameters())
        yield {"round": t + 1, "clients": K} | evaluate(model, x_test, y_test)


def client_update(config, model, x, y, t, m):
    """Scores and trains on client m's samples x, y. Returns what it sends: theta_m, N_m."""
    losses = sample_losses(model, x, y)
    first_to_last = sort(config.order, losses, stream(config, "ties", t, m))
    batches = take_batches(config, first_to_last, stream(config, "batches", t, m))
    client = copy.deepcopy(model)  # theta_m <- theta
    optimizer = torch.optim.SGD(  # a new one in each round, so momentum begins at 0
        client.parameters(), config.lr, config.momentum, weight_decay=config.weight_decay
    )
    for batch in batches:
        loss = F.cross_entropy(client(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    theta_m = parameters_to_vector(client.parameters()).detach()
    return theta_m, len(y)


def server_update(messages):
    """The next theta, from the messages of this round's clients."""
    thetas, N = zip(*messages, strict=True)
    p = np.array(N) / sum(N)
    return torch.from_numpy(p) @ torch.stack(thetas)


@torch.no_grad()
def sample_losses(model, x, y):
    """The loss of each sample (n,), its difficulty."""
    return F.cross_entropy(model(x), y, reduction="none").numpy()


def sort(order, losses, rng):
    """The samples in the order of their admission. Equal losses are in random order."""
    shuffled = rng.permutation(len(losses))
    if order in ("random", "vanilla"):  # vanilla admits all at once
        return shuffled
    if order == "anti":
        losses = -losses
    return shuffled[np.argsort(losses[shuffled], kind="stable")]


def take_batches(config, first_to_last, rng):
    """Yields the batch of each local step, as indices of the client's samples."""
    N = len(first_to_last)
    T = config.epochs * math.ceil(N / config.batch_size)
    B = min(config.batch_size, N)
    queue = []
    for step in range(T):
        while len(queue) < B:
            admitted = first_to_last[: g(config, step, T, N)]
            admitted = np.sort(admitted)  # same numbers
            queue += rng.permutation(admitted).tolist()
        yield queue[:B]
        queue = queue[B:]


def g(config, step, T, N):
    """The pacing function: how many of N samples are admitted at a step of T."""
    if config.order == "vanilla":
        return N
    a = config.pacing_a
    b = config.pacing_b
    x = 1.0
    if step < a * T:
        x = step / (a * T)
    f = PACINGS[config.pacing]
    admitted = b * N + (1 - b) * N * f(x)
    return max(1, math.floor(admitted + 1e-9))  # admitted may be rounded down


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
