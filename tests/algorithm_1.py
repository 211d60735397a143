"""Algorithm 1 once more, client after client and sample after sample, on ordinary torch nets.

With it the orders that are no part of the paper, three bases, SOLO and FedLC; and what the tests of
fedavg_curriculum.py and of its studies share.
"""

import csv
from decimal import Decimal, getcontext
from pathlib import Path

import numpy as np
import ordinary
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import common
import fedavg_curriculum as script
from data import load_data

getcontext().prec = 50
UNSCORED = ("random", "vanilla", "random-step", "fixed")

# ----------------------------------------------------------------------------------- data and nets


def made_up(n=60, seed=0):
    """16x16 images of 4 classes, a pattern under noise each: x_train, y_train, x_test, y_test."""
    rng = np.random.default_rng(seed)
    y = np.arange(2 * n) % 4
    pattern = rng.integers(0, 256, (4, 16, 16, 1))
    noise = rng.integers(0, 256, (2 * n, 16, 16, 1))
    x = (0.3 * pattern[y] + 0.7 * noise).astype(np.uint8)
    return x[:n], y[:n], x[n:], y[n:]


def write_data(path: Path) -> Path:
    names = ("x_train", "y_train", "x_test", "y_test")
    np.savez(path, **dict(zip(names, made_up(), strict=True)))
    return path


def arrays():
    """The same as a net reads it: x (n, 1, 16, 16) float64 normalised, y, and the test set."""
    x, y, x_test, y_test = made_up()
    mean = x.astype(float).mean()
    std = x.astype(float).std()
    tensors = []
    for part in (x, x_test):
        pixels = torch.from_numpy((part.astype(float) - mean) / std)
        tensors.append(pixels.permute(0, 3, 1, 2))
    return tensors[0], torch.from_numpy(y), tensors[1], torch.from_numpy(y_test)


class Dropped(nn.Module):
    """Somebody's net with dropout, so that --model FILE.py:Dropped and its seeds are run, too."""

    def __init__(self, channels, side, classes):
        super().__init__()
        self.hidden = nn.Linear(channels * side * side, 12)
        self.out = nn.Linear(12, classes)

    def forward(self, x):
        hidden = torch.relu(self.hidden(x.flatten(1)))
        return self.out(F.dropout(hidden, 0.5, self.training))


def net_of(theta, model="lenet5"):
    """An ordinary net with these weights (P,)."""
    net = ordinary.lenet(1, 16, 4) if model == "lenet5" else Dropped(1, 16, 4)
    net = net.double()
    nn.utils.vector_to_parameters(theta.clone(), net.parameters())
    return net


def judge(net, x, y):
    """Loss and predicted class of every sample, one sample at a time."""
    losses = []
    guesses = []
    net.eval()
    with torch.no_grad():
        for i in range(len(x)):
            logits = net(x[i : i + 1])
            losses.append(F.cross_entropy(logits, y[i : i + 1]).item())
            guesses.append(int(logits.argmax()))
    return losses, guesses


# ------------------------------------------------------------------------------- which samples when


def exact_pacing(family, step, T, N, a, b) -> Decimal:
    """g(step) before it is rounded down, to 50 digits; a and b are decimals (Table 5)."""
    x = min(Decimal(step) / (a * T), Decimal(1))
    grown = {
        "linear": x,
        "quadratic": x * x,
        "root": x.sqrt(),
        "step": Decimal(int(x == 1)),
        "exponential": ((10 * x).exp() - 1) / (Decimal(10).exp() - 1),
    }
    return N * b + N * (1 - b) * grown[family]


def literal_scores(config, theta, last_net, expert, x, y) -> list:
    """Section 3.1, sample by sample; `last_net` is None before a client's first round."""
    received = expert if config.score == "E" else theta
    G, guess_G = judge(net_of(received, config.model), x, y)
    L, guess_L = G, guess_G
    if last_net is not None:
        L, guess_L = judge(net_of(last_net, config.model), x, y)
    difficulties = []
    for i, label in enumerate(y.tolist()):
        table = {
            "G": G[i],
            "E": G[i],
            "L": L[i],
            "LG": (G[i] + L[i]) / 2,
            "G_pred": float(guess_G[i] != label),
            "L_pred": float(guess_L[i] != label),
            "LG_pred": float(guess_L[i] != guess_G[i]),
        }
        difficulties.append(table[config.score])
    return difficulties


def literal_order(order, shuffled, scores, labels) -> list:
    """Places in the order of admission; Python's sort keeps ties as they were shuffled."""
    if order in UNSCORED:
        return shuffled
    if order in ("anti", "hard-threshold"):
        return sorted(shuffled, key=lambda i: -scores[i])
    easy = sorted(shuffled, key=lambda i: scores[i])
    if order != "balanced":
        return easy
    rank = {}
    for label in set(labels):
        of_class = [i for i in easy if labels[i] == label]
        for place, i in enumerate(of_class):
            rank[i] = (place + 0.5) / len(of_class)
    return sorted(easy, key=lambda i: rank[i])


def literal_admitted(config, order, places, scores, step, steps) -> list:
    """Who may be drawn at this step: the first few, or those on one side of lambda."""
    N = len(places)
    a = Decimal(str(config.pacing_a))
    b = Decimal(str(config.pacing_b))
    if order in ("vanilla", "random-step"):
        return places
    if not order.endswith("threshold"):
        return places[: max(1, int(exact_pacing(config.pacing, step, steps, N, a, b)))]
    x = float(min(Decimal(step) / (a * steps), Decimal(1)))
    rank = max(1, int(N * b)) - 1
    losses = sorted(scores[i] for i in places)
    if order == "threshold":
        limit = losses[rank] + (losses[-1] - losses[rank]) * x
        return [i for i in places if scores[i] <= limit + 1e-12]
    limit = losses[0] + (losses[-1 - rank] - losses[0]) * x
    return [i for i in places if scores[i] >= limit - 1e-12]


def literal_batches(config, order, shard, scores, labels, streams, t, m) -> list:
    """T lists of samples."""
    N = len(shard)
    T = config.epochs * -(-N // config.batch_size)
    ties = streams("fixed order", m) if order == "fixed" else streams("ties", t, m)
    places = literal_order(order, ties.permutation(N).tolist(), scores, labels)
    rng = streams("batches", t, m)
    queue = []
    batches = []
    for step in range(T):
        now = (step, T)
        if config.pacing_scope == "global":
            now = (t * T + step, config.rounds * T)
        if order == "random-step":
            queue = []
        batch = []
        while len(batch) < min(config.batch_size, N):
            if not queue:
                admitted = literal_admitted(config, order, places, scores, *now)
                queue = rng.permutation(sorted(shard[i] for i in admitted)).tolist()
            batch.append(queue.pop(0))
        batches.append(batch)
    return batches


def literal_schedule(config, shard, scores, labels, streams, t, m):
    """Batches, and for each the weights of its samples."""
    order = config.order
    client = (shard, scores, labels, streams, t, m)
    if order == "shuffled":
        easy = literal_batches(config, "curriculum", *client)
        times = streams("shuffled", t, m).permutation(len(easy))
        batches = [easy[i] for i in times]
    elif order == "weighted":
        easy = literal_batches(config, "curriculum", *client)
        batches = literal_batches(config, "vanilla", *client)
        drawn = [sample for batch in easy for sample in batch]
        weights = []
        for batch in batches:
            weights.append([drawn.count(sample) * len(shard) / len(drawn) for sample in batch])
        return batches, weights
    else:
        batches = literal_batches(config, order, *client)
    return batches, [[1.0] * len(batch) for batch in batches]


# ------------------------------------------------------------------------------------- the training


def falling(config, i) -> float:
    return config.lr * (1 + config.lr_alpha * i) ** -config.lr_power


def literal_sgd(config, net, batches, weights, x, y, lr, seed=None, margin=0.0, extra=None):
    """SGD by hand, one sample's loss at a time: theta, and the mean over steps of the loss.

    lr(i) at step i; `margin` (C,) is taken from the logits; extra(theta) is added to the gradient.
    """
    theta = nn.utils.parameters_to_vector(net.parameters()).detach()
    velocity = torch.zeros_like(theta)
    losses = []
    if seed is not None:
        torch.manual_seed(seed)
    for i, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
        net.train().zero_grad()
        logits = net(x[batch]) - margin
        loss = 0
        for z, sample, w in zip(logits, batch, weight, strict=True):
            loss = loss + w * F.cross_entropy(z[None], y[sample][None]) / len(batch)
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in net.parameters()])
        gradient = gradient + config.weight_decay * theta
        if extra:
            gradient = gradient + extra(theta)
        velocity = config.momentum * velocity + gradient
        theta = theta - lr(i) * velocity
        nn.utils.vector_to_parameters(theta.clone(), net.parameters())
        losses.append(loss.item())
    return theta, sum(losses) / len(losses)


def literal_expert(config, model, streams, x, y):
    """Central training on all samples: an epoch is a new order, its last batch may be short."""
    rng = streams("central batches")
    batches = []
    for _ in range(config.expert_epochs):
        order = rng.permutation(np.arange(len(y))).tolist()
        for begin in range(0, len(order), config.batch_size):
            batches.append(order[begin : begin + config.batch_size])
    weights = [[1.0] * len(batch) for batch in batches]
    net = net_of(model.init(streams.seed("central init")), config.model)
    theta, _ = literal_sgd(config, net, batches, weights, x, y, lambda i: config.lr)
    return theta


def travelled(config, T) -> float:
    """eta_0 ||a||_1 by its double sum, without the proximal term."""
    total = 0.0
    for j in range(T):
        for k in range(j, T):
            total += falling(config, k) * config.momentum ** (k - j)
    return total


class LiteralServer:
    """What the four bases do with the clients' nets: `theta`, or with SOLO `own` by client."""

    def __init__(self, config, theta):
        self.config = config
        self.theta = theta
        self.own = {}  # SOLO's nets

    def received(self, m):
        if self.config.base == "solo":
            return self.own.get(m, self.theta)
        return self.theta

    def extra(self):
        """Added to a client's gradient at `theta`."""
        start = self.theta
        if self.config.base == "fedprox":
            return lambda theta: self.config.mu * (theta - start)
        return None

    def update(self, clients, nets, p, lengths) -> None:
        if self.config.base == "solo":
            self.own.update(zip(clients, nets, strict=True))
        elif self.config.base == "fednova":
            direction = 0 * self.theta
            for q, net, a in zip(p, nets, lengths, strict=True):
                direction = direction + q * (self.theta - net) / a
            a_mean = sum(q * a for q, a in zip(p, lengths, strict=True))
            self.theta = self.theta - a_mean * direction
        else:
            self.theta = sum(q * net for q, net in zip(p, nets, strict=True))


def literal(config, method, trial=0):
    """A whole run: the global net (or with SOLO the clients' own) and the rows of metrics.csv."""
    x, y, x_test, y_test = arrays()
    streams = common.Streams(config.seed, trial)
    fl = common.Federation(config, load_data(config.dataset), streams)  # partition, initial net
    shards = [shard.tolist() for shard in fl.shards]
    server = LiteralServer(config, fl.start()["theta"])
    expert = None
    if config.score == "E":
        expert = literal_expert(config, fl.model, streams, x, y)
    vectors = int(config.base != "solo")
    last_nets = {}
    rows = []
    total = {"uploads": 0, "samples": 0, "received_mb": 0.0, "sent_mb": 0.0}
    total["clock"] = 0.0
    for t in range(config.rounds):
        everyone = streams("select", t).permutation(config.clients)
        clients = sorted(everyone[: config.clients_per_round].tolist())
        nets = []
        lengths = []
        losses = []
        seconds = []  # of devices that are all alike
        megabytes = vectors * len(server.theta) * 8 / 1e6  # float64
        for m in clients:
            net, loss, batches = literal_client(
                config, server, shards[m], x, y, streams, t, m, last_nets.get(m), expert
            )
            nets.append(net)
            losses.append(loss)
            lengths.append(travelled(config, len(batches)))
            samples = sum(map(len, batches))
            total["samples"] += samples
            travelling = 2 * megabytes  # at 1 MB/s
            seconds.append(samples * common.SECONDS_A_SAMPLE + travelling)
        held = sum(len(shards[m]) for m in clients)
        p = [len(shards[m]) / held for m in clients]
        last_nets.update(zip(clients, nets, strict=True))
        server.update(clients, nets, p, lengths)
        total["uploads"] += len(clients)
        for way in ("received_mb", "sent_mb"):
            total[way] += len(clients) * megabytes
        total["clock"] += max(seconds)
        row = {"setting": "-", "method": method, "trial": trial, "round": t + 1}
        row |= {"clients": len(clients), "train_loss": sum(losses) / len(losses)} | total
        row["waiting"] = 1 - sum(seconds) / len(seconds) / max(seconds)
        if (t + 1) % config.eval_every == 0 or t + 1 == config.rounds:
            row |= literal_test(config, server, x_test, y_test)
        rows.append(row)
    return (server.own if config.base == "solo" else server.theta), rows


def literal_client(config, server, shard, x, y, streams, t, m, last_net, expert):
    """ClientUpdate: client m's net, its mean loss and its batches."""
    theta = server.received(m)
    labels = y[shard].tolist()
    scores = None
    if config.order not in UNSCORED:
        scores = literal_scores(config, theta, last_net, expert, x[shard], y[shard])
    batches, weights = literal_schedule(config, shard, scores, labels, streams, t, m)
    net, loss = literal_sgd(
        config,
        net_of(theta, config.model),
        batches,
        weights,
        x,
        y,
        lambda i: falling(config, i),
        seed=streams.seed("dropout", t, m),
        margin=literal_margin(config, labels),
        extra=server.extra(),
    )
    return net, loss, batches


def literal_margin(config, labels):
    """FedLC's tau n_c^(-1/4)."""
    tau = getattr(config, "fedlc", 0.0)
    if not tau:
        return 0.0
    n = torch.tensor([max(labels.count(c), 1e-8) for c in range(4)], dtype=torch.float64)
    return tau * n**-0.25


def literal_test(config, server, x_test, y_test) -> dict:
    thetas = [server.theta]
    if config.base == "solo":
        thetas = [server.received(m) for m in range(config.clients)]
    losses = []
    accuracies = []
    for theta in thetas:
        loss, guesses = judge(net_of(theta, config.model), x_test, y_test)
        losses.append(np.mean(loss))
        accuracies.append(100 * np.mean(np.array(guesses) == y_test.numpy()))
    columns = {"loss": float(np.mean(losses)), "accuracy": float(np.mean(accuracies))}
    if len(thetas) > 1:
        columns["client_std"] = float(np.std(accuracies, ddof=1))
    return columns


# ---------------------------------------------------------------------------------- whole commands

OFF = {  # every number off its default
    "clients": 6,
    "clients_per_round": 3,
    "rounds": 3,
    "epochs": 3,
    "batch_size": 7,
    "parts": 7,
    "partition": "iid",
    "lr": 0.03,
    "lr_alpha": 0.2,
    "lr_power": 0.6,
    "momentum": 0.8,
    "weight_decay": 0.01,
    "pacing_a": 0.7,
    "pacing_b": 0.3,
    "eval_every": 2,
    "chunk": 2,
    "seed": 7,
    "expert_epochs": 2,
}
SMALL = {"trials": 1, "jobs": 1, "device": "cpu", "dtype": "float64", "min_size": 3}
QUICK = "--clients 8 --clients-per-round 3 --rounds 4 --epochs 1 --trials 1 --jobs 1 --device cpu"
QUICK = f"{QUICK} --batch-size 20 --lr 0.05".split()


def small(Config=script.Config, **flags):
    """A config for 60 made-up images; what is not given keeps the script's default."""
    options = {"clients": 5, "clients_per_round": 3, "rounds": 3, "epochs": 2, "batch_size": 4}
    options |= {"alpha": 1.0, "lr": 0.02, "order": "curriculum"} | SMALL
    return Config(**options | flags)


def command(flags: dict) -> list[str]:
    """{"pacing_a": 0.5} -> ["--pacing-a", "0.5"]"""
    words = []
    for name, value in flags.items():
        words += ["--" + name.replace("_", "-"), str(value)]
    return words


def metrics(folder) -> list[dict]:
    """The rows of metrics.csv without their seconds."""
    with open(folder / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        del row["seconds"]
    return rows


def checkpoints(folder) -> list[Path]:
    """Of the arms."""
    files = sorted((folder / "checkpoints").glob("*.pt"))
    return [path for path in files if not path.name.startswith("expert")]


def states(folder) -> dict:
    """The state in every arm's checkpoint, by method and trial."""
    found = {}
    for path in checkpoints(folder):
        saved = torch.load(path, weights_only=True)
        key = (saved["fingerprint"]["method"], saved["fingerprint"]["trial"])
        found[key] = saved["content"]["state"]
    return found


def state_of(main, flags: dict, folder) -> dict:
    """The last state of a command that trains one run."""
    main([*command(flags), "--out", str(folder)])
    [state] = states(folder).values()
    return state


def is_same(a, b) -> bool:
    """Bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def compare_with_literal(config, method: str, folder) -> None:
    """Weights to 1e-9 and every column of metrics.csv, of a run in this folder."""
    expected, rows = literal(config, method)
    [state] = states(folder).values()
    if config.base == "solo":
        nets = state["base"]["nets"]
        assert nets.keys() == expected.keys()
        for m, theta in expected.items():
            assert (nets[m] - theta).abs().max() < 1e-9
    else:
        assert (state["theta"] - expected).abs().max() < 1e-9
    found = metrics(folder)
    assert len(found) == len(rows)
    assert found[0].keys() == rows[-1].keys()  # the last round has every column
    for row, wanted in zip(found, rows, strict=True):
        for name, cell in row.items():
            value = wanted.get(name, "")
            if isinstance(value, str):
                assert cell == value, name
            else:
                assert float(cell) == pytest.approx(value, rel=1e-9, abs=1e-12), name
