"""python plain/client_curriculum.py

Read this after fedavg_curriculum.py. It is the client curriculum, Section 4 of the same paper (ICCV
2023, https://arxiv.org/abs/2212.12712): the clients with easy samples take part first. To get
results run ../client_curriculum.py, which lists the differences from the paper.

Why it should help: one client has a good camera, another a bad one. Easy data help a model that has
learnt little. Digits have no cameras, so Algorithm 2 makes easy and hard clients. N_mc is how many
samples of class c client m has. The client keeps these numbers, but gets other samples. An expert,
which is a model that was trained on all clients' data, computes each sample's loss:

    for each class c:
        sort the samples of class c by the expert's loss: the smallest is first
        client 0 gets the first N_0c of them, client 1 the next N_1c, ..

Only a fraction f_ord of a client's samples is divided like this, the others at random. Then:

    the queue is empty
    in each round t = 0, 1, ..
        if fewer than K clients are in the queue:
            the server sends theta to all M clients, and each of them sends back
                L_m <- the mean loss of its samples under theta                 Eq. 1
            the server sorts the clients: the smallest L_m is first
            the first g(t) clients are the pool, which joins the end of the queue in random order,
            but clients that still wait in the queue come last: so no round has a client twice
        the first K clients leave the queue, and train as in fedavg_curriculum.py
        theta <- sum_m p_m theta_m, where p_m = N_m / (the sum of N_m over these clients)

The pacing function g grows from b M to M in the first a R of R rounds:

    g(t) = b M + (1 - b) M x, rounded down, at least K                  x = t / (a R), at most 1

The order of samples has an a and a b of its own. Other orders to compare with, of clients and of
samples: anti (the largest loss first), random, and vanilla (all at once).

Only here: LeNet-5 learns scikit-learn's digits, 1437 images to train it and 360 to test it. Column
expert_loss is the round's clients' mean loss under the expert, small if they are easy. The script's
metrics.csv has the same numbers with `--dtype float64`: client+data, trial 0. Lines marked "same
numbers" are needed only for this. It takes 15 seconds.
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

ORDERS = ("curriculum", "anti", "random", "vanilla")
COUNT = (1, 10**6)  # the smallest and the largest number that an option may be
FRACTION = (0, 1)
POSITIVE = (1e-6, 1e6)
FROM_0 = (0, math.inf)
OPTIONS = {  # default, what is allowed, help; names and defaults are those of the script
    "--client-order": ("curriculum", ORDERS, "the first clients: easy, hard, random, or all"),
    "--data-order": ("curriculum", ORDERS, "its first samples: easy, hard, random, or all"),
    "--score": ("G", ("G", "E"), "the loss is that of theta (G), or of the expert (E)"),
    "--f-ord": (1.0, FRACTION, "fraction of a client's samples that is divided by difficulty"),
    "--expert-epochs": (2, COUNT, "the expert's passes over all samples"),
    "--client-a": (0.8, FROM_0, "a of the clients: their pool grows in this part of the rounds"),
    "--client-b": (0.2, FRACTION, "b of the clients, fraction of them in the first pool"),
    "--pacing-a": (0.8, FROM_0, "a of the samples, fraction of the steps until all are admitted"),
    "--pacing-b": (0.2, FRACTION, "b of the samples, fraction of them at the first step"),
    "--clients": (20, COUNT, "M, all clients"),
    "--clients-per-round": (4, COUNT, "K, clients of a round"),
    "--alpha": (0.2, POSITIVE, "how equal the clients' labels are (small: very different)"),
    "--min-size": (1, COUNT, "fewest samples of a client"),
    "--rounds": (50, COUNT, "communication rounds"),
    "--epochs": (1, COUNT, "E, a client takes as many steps as E passes over its samples"),
    "--batch-size": (10, COUNT, "B, samples in a batch"),
    "--lr": (0.01, POSITIVE, "the clients' learning rate"),
    "--momentum": (0.9, (0, 0.9999), "of the clients' SGD"),
    "--weight-decay": (5e-4, (0, 1), "of the clients' SGD"),
    "--seed": (202207, FROM_0, "of all random numbers"),
    "--trial": (0, FROM_0, "another number gives other clients, initial weights and batches"),
}


# ---------------------------------------------------------------------------------- the algorithm


def federate(config, model):
    """Section 4. Trains `model` in place, and yields the results of each round."""
    x, y, x_test, y_test = load_data()
    expert = train_expert(config, x, y)
    expert_losses = sample_losses(expert, x, y)
    shards = partition(config, y)
    shards = partition_by_difficulty(config, shards, y.numpy(), expert_losses)
    scorer = model if config.score == "G" else expert  # model is theta of every round
    K = config.clients_per_round
    queue = []
    for t in range(config.rounds):
        if len(queue) < K:
            L = [sample_losses(scorer, x[own], y[own]).mean() for own in shards]  # Eq. 1
            pool = choose_pool(config, t, np.array(L))
            queue += sorted(pool, key=lambda m: m in queue)  # who still waits comes last
        selected = queue[:K]
        queue = queue[K:]
        messages = []
        for m in selected:
            own = shards[m]
            messages.append(client_update(config, model, scorer, x[own], y[own], t, m))
        theta = server_update(messages)
        vector_to_parameters(theta, model.parameters())

        means = [expert_losses[shards[m]].mean() for m in selected]
        row = {"round": t + 1, "pool": len(pool), "expert_loss": np.mean(means)}
        yield row | evaluate(model, x_test, y_test)


def client_update(config, model, scorer, x, y, t, m):
    """Scores and trains on client m's samples x, y. Returns what it sends: theta_m, N_m."""
    losses = sample_losses(scorer, x, y)
    first_to_last = sort(config.data_order, losses, stream(config, "ties", t, m))
    batches = take_batches(config, first_to_last, stream(config, "batches", t, m))
    client = train(config, model, x, y, batches)
    theta_m = parameters_to_vector(client.parameters()).detach()
    return theta_m, len(y)


def server_update(messages):
    """The next theta, from the messages of this round's clients."""
    thetas, N = zip(*messages, strict=True)
    p = np.array(N) / sum(N)
    return torch.from_numpy(p) @ torch.stack(thetas)


# ------------------------------------------------------------------------------------- the clients


def train_expert(config, x, y):
    """A model that was trained on all samples, as if there were no clients."""
    rng = stream(config, "central batches")
    batches = []
    for _ in range(config.expert_epochs):
        order = torch.from_numpy(rng.permutation(len(y)))
        batches += order.split(config.batch_size)
    model = make_model(stream(config, "central init"))
    return train(config, model, x, y, batches)


def partition_by_difficulty(config, shards, y, losses):
    """Algorithm 2: of every class the first client gets the easiest samples.

    shards: each client's samples. A client keeps only their number in each class, N_mc.
    y, losses: (n,) of all samples, the losses under the expert.
    """
    rng = stream(config, "difficulty")
    parts = [[] for _ in shards]
    for c in range(10):
        samples = np.flatnonzero(y == c)
        easy_first = samples[np.argsort(losses[samples], kind="stable")]
        N_c = np.array([(y[shard] == c).sum() for shard in shards])
        # Of N_mc samples this many are divided by difficulty. The product may be rounded down.
        n_sorted = np.floor(config.f_ord * N_c + 1e-9).astype(int)
        ends = N_c.cumsum()
        blocks = np.split(easy_first, ends[:-1])
        others = []
        for part, block, n in zip(parts, blocks, n_sorted, strict=True):
            part.extend(block[:n])
            others.extend(block[n:])
        others = rng.permutation(np.sort(others))
        ends = (N_c - n_sorted).cumsum()
        for part, block in zip(parts, np.split(others, ends[:-1]), strict=True):
            part.extend(block)
    return [np.sort(part) for part in parts]


def choose_pool(config, t, L):
    """The clients that join the queue in round t, in random order. L (M,): all mean losses."""
    M = config.clients
    size = g(config.client_order, t, config.rounds, M, config.client_a, config.client_b)
    size = max(size, config.clients_per_round)
    first_to_last = sort(config.client_order, L, stream(config, "client ties", t))
    pool = np.sort(first_to_last[:size])  # same numbers
    return stream(config, "pool", t).permutation(pool).tolist()


# ------------------------------------------------------------- a client's samples, and local SGD


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
    """Yields the batch of each local step, as indices of the client's samples.

    They come from a queue. When it holds too few, the admitted samples are shuffled and appended.
    """
    N = len(first_to_last)
    T = config.epochs * math.ceil(N / config.batch_size)
    B = min(config.batch_size, N)
    queue = []
    for step in range(T):
        while len(queue) < B:
            size = g(config.data_order, step, T, N, config.pacing_a, config.pacing_b)
            admitted = np.sort(first_to_last[:size])  # same numbers
            queue += rng.permutation(admitted).tolist()
        yield queue[:B]
        queue = queue[B:]


def g(order, step, T, N, a, b):
    """The pacing function: how many of N clients or samples are admitted at step 0, 1, .. of T."""
    if order == "vanilla":
        return N
    x = 1.0
    if step < a * T:
        x = step / (a * T)
    admitted = b * N + (1 - b) * N * x
    return max(1, math.floor(admitted + 1e-9))  # admitted may be rounded down


def train(config, model, x, y, batches):
    """SGD on samples x, y. Returns the trained copy of the model."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(
        model.parameters(), config.lr, config.momentum, weight_decay=config.weight_decay
    )
    for batch in batches:
        loss = F.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


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
