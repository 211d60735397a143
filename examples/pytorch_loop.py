"""python -m examples.pytorch_loop

This is an ordinary FedAvg loop in PyTorch, with three of the methods as switches. The numbers in
comments say which lines belong to which method. Without them the loop is plain FedAvg.

1. "samples": a client trains on its easy samples first (fedavg_curriculum.py)
2. "clients": more clients take part while the gradient norm grows (fedcl_fgn.py)
3. "weights": samples in small clusters weigh half (fedac_art.py)
"""

import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from data import load_data, partition
from fedac_art import cluster_client, small_clusters, weigh_samples
from fedavg_curriculum import CurriculumBatchSampler, pacing
from fedcl_fgn import double, halve, is_critical

M = 40  # clients
N_0 = 8  # that take part in the first round
EPOCHS = 2
B = 10
ETA = 0.05


def train_client(net, x, y, weights, rng, methods) -> float:
    """Trains the model in place by SGD. Returns the mean of ||gradient||^2 over its steps."""
    n = len(y)
    T = EPOCHS * math.ceil(n / B)
    difficulty = np.zeros(n)
    if "samples" in methods:  # 1: small losses of the received model are easy
        with torch.no_grad():
            difficulty = F.cross_entropy(net(x), y, reduction="none").numpy()

    def g(step):  # 1: how many of the easiest samples a batch may hold
        return pacing("linear", step, T, n, a=0.8, b=0.2) if "samples" in methods else n

    sampler = CurriculumBatchSampler(difficulty, B, T, g, rng)
    sgd = torch.optim.SGD(net.parameters(), lr=ETA)
    g_sq = 0.0
    for inputs, labels, weight in DataLoader(TensorDataset(x, y, weights), batch_sampler=sampler):
        sgd.zero_grad()
        losses = F.cross_entropy(net(inputs), labels, reduction="none")
        (weight * losses).mean().backward()  # 3: all weights are 1 without this method
        sgd.step()
        g_sq += sum(w.grad.square().sum().item() for w in net.parameters()) / T
    return g_sq


def weigh(x, y, rng) -> torch.Tensor:
    """3: a client's weights (n,). Pixels as floats in [0, 1] are clustered, class by class."""
    clusters = cluster_client(x.flatten(1).numpy(), y.numpy(), rng, rho=0.6)
    in_P1 = small_clusters(clusters, quantile=0.5)
    return torch.from_numpy(weigh_samples(in_P1, w_small=0.5, w_large=1.0)).float()


def federate(methods=(), rounds=20, seed=0) -> tuple[list[float], list[int]]:
    """FedAvg on scikit-learn's digits. Returns test accuracy and clients of every round."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    digits = load_data("digits")
    x = digits.images("train").flatten(1)
    y = digits.y_train
    x_test = digits.images("test").flatten(1)
    shards = partition("dirichlet", y.numpy(), M, 0.5, rng, min_size=2)
    weights = torch.ones(len(y))
    if "weights" in methods:  # 3
        for shard in shards:
            weights[shard] = weigh(digits.x_train[shard] / 255, y[shard], rng)

    net = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    n = N_0
    previous = None  # 2: FGN of the round before
    accuracy = []
    counts = []
    for _ in range(rounds):
        clients = rng.permutation(M)[:n]
        p = np.array([len(shards[m]) for m in clients], dtype=float)
        p /= p.sum()
        average = {name: 0 for name in net.state_dict()}
        fgn = 0.0
        for m, p_m in zip(clients, p, strict=True):
            local = copy.deepcopy(net)
            shard = shards[m]
            g_sq = train_client(local, x[shard], y[shard], weights[shard], rng, methods)
            for name, value in local.state_dict().items():
                average[name] = average[name] + p_m * value
            fgn += p_m * ETA * g_sq
        net.load_state_dict(average)
        counts.append(n)
        if "clients" in methods:  # 2: twice as many clients next, or half as many
            n = double(n, M) if is_critical(previous, fgn, delta=0.01) else halve(n, N_0)
            previous = fgn
        with torch.no_grad():
            hits = net(x_test).argmax(1) == digits.y_test
        accuracy.append(100 * hits.float().mean().item())
    return accuracy, counts


if __name__ == "__main__":
    torch.set_num_threads(1)
    for methods in (
        (),
        ("samples",),
        ("clients",),
        ("weights",),
        ("samples", "clients", "weights"),
    ):
        accuracy, counts = federate(methods)
        name = " + ".join(methods) or "FedAvg"
        print(f"{name}: {accuracy[-1]:.1f} % after {sum(counts)} uploads")
