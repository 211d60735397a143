"""python plain/fedcl_gmm_sync.py --rounds 18

Read this last. It is Algorithm 1 of "FedCL: Federated Multi-Phase Curriculum Learning to
Synchronously Correlate User Heterogeneity" (Wang, Guo and Jia, IEEE TAI 2023,
https://arxiv.org/abs/2211.07248). To get results run ../fedcl_gmm_sync.py, which lists the
differences from the paper. This file has two lessons. Each adds something to FedAvg.

Lesson 1: phases. Clients with different data do not learn equally fast, so their models drift
apart. A client that is ahead of the others in a phase is frozen: it waits for them. In the next
phase it must be further ahead. Progress is measured by difficulty, from a sample's cross-entropy l:

    b     = (l - tau) / lambda
    s     = exp(-W(b / 2)), but e where b <= -2 / e     confidence; W(u) exp(W(u)) = u (Lambert)
    score = (l - tau) s                                 difficulty, Eq. 6
    l_cl  = score + lambda (log s)^2                    the loss that clients minimise, Eq. 7

On the first reading take s = e. With the default tau and lambda it is e for every l below 9.63.

    T <- the first of the thresholds S, which fall
    in each round t = 0, 1, ..
        n clients that are not frozen, or fewer if fewer are left, are selected at random and
            take steps of SGD on the mean of l_cl
        D_k   <- a mixture of three Gaussians, fitted to the scores of client k's samples   Eq. 12
        model <- the mean of these models and of those of the frozen clients               Eq. 21
        r_k   <- 320 random scores from the last D_k of each client that has trained
        beta   <- the numbers of all r_k, sorted
        beta_T <- the smallest number in beta such that at least a fraction T of beta is <= beta_T
        a client k of this round freezes if more than a fraction v of r_k is <= beta_T
        if all are frozen, or after rounds / |S| rounds: T <- the next of S, and none is frozen
        (after the last T no client freezes any more)

Lesson 2: a client that lacks a label forgets it. So from round 2 on the server's generator G makes
features z = G(epsilon, y', score) for the clients' heads. epsilon is noise, y' ~ p is a label, and
the score is from beta. p is how frequent each label is in the clients' last batches (Eq. 15).

    each client minimises mean l_cl(model(x), y) + mean l_cl(head(z), y')                  Eq. 19
    G minimises mean l_cl(head(z), y') + exp(-mean |z_i - z_j| (epsilon_i - epsilon_j)^2)   Eq. 18

The paper's Eq. 18 lacks the second term, which is FedGen's.

Only here: scikit-learn's digits. With 18 rounds phase 1 ends because all clients are frozen, and
the next two after six rounds each. The script's metrics.csv has the same numbers with the same
`--rounds` and `--dtype float64`: method fedcl, trial 0. Lines marked "same numbers" are for this
only. It takes half a minute.
"""

import argparse
import copy
import math
import zlib
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import lambertw
from sklearn.datasets import load_digits
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import train_test_split
from torch import nn


class Falling(str):
    """S as one word with commas. Its numbers must fall between 1 and 0."""

    def __init__(self, word):
        self.numbers = [float(T) for T in word.split(",")]
        steps = np.diff([1, *self.numbers, 0])
        if not (steps < 0).all():
            raise argparse.ArgumentTypeError("choose numbers that fall from 1 to 0")


COUNT = (1, 10**6)  # the smallest and the largest number that an option may be
FRACTION = (0, 1)
POSITIVE = (1e-6, 1e6)
FROM_0 = (0, math.inf)
OPTIONS = {  # default, what is allowed, help; names and defaults are those of the script
    "--method": ("fedcl", ("fedcl", "fedavg"), "fedcl: FedCL; fedavg: FedAvg, on cross-entropy"),
    "--tau": (10.0, POSITIVE, "loss between easy and hard samples"),
    "--lam": (0.5, POSITIVE, "lambda of Eq. 7"),
    "--thresholds": (Falling("0.8,0.6,0.2"), None, "S, the T of each phase, between 1 and 0"),
    "--v": (0.7, FRACTION, "a client freezes if more than this fraction of r_k is <= beta_T"),
    "--generator-hidden": (256, COUNT, "width of the generator"),
    "--clients": (20, COUNT, "M, all clients"),
    "--clients-per-round": (10, COUNT, "n, clients of a round"),
    "--alpha": (0.1, POSITIVE, "how equal the clients' labels are (small: very different)"),
    "--min-size": (32, (2, 1437), "fewest samples of a client"),
    "--rounds": (6, COUNT, "communication rounds"),
    "--local-steps": (20, COUNT, "batches of a client in a round"),
    "--batch-size": (32, COUNT, "samples in a batch"),
    "--lr": (0.01, POSITIVE, "the clients' learning rate"),
    "--seed": (202207, FROM_0, "of all random numbers"),
    "--trial": (0, FROM_0, "another number gives other clients, initial weights and batches"),
}
C = 10  # classes
FEATURES = 32  # length of z
NOISE = 32  # length of epsilon


class Message(NamedTuple):
    """What a client sends."""

    model: nn.Module
    D: tuple  # its mixture: weights, means and variances
    c: np.ndarray  # (C,): how many samples of each class were in its batches


# ------------------------------------------------------------------------------- lesson 1: phases


def federate(config, model):
    """Algorithm 1, or FedAvg. Trains `model` in place, and yields the results of each round."""
    x, y, x_test, y_test = load_data()
    x = rescale(x)
    x_test = rescale(x_test)
    shards = partition(config, y)
    S = config.thresholds.numbers
    phase = 0  # its T is S[phase]
    phase_began = 0
    frozen = set()
    messages = {}  # the last one of each client, so they hold the models of the frozen
    G = make_generator(config)  # lesson 2
    adam = torch.optim.Adam(G.parameters(), weight_decay=0.01)
    generator = None  # what the server sends of lesson 2: G, p and beta, once G has learnt
    for t in range(config.rounds):
        # stream(): random numbers for this purpose and round
        order = stream(config, "select", t).permutation(config.clients)
        unfrozen = [k for k in order if k not in frozen]
        selected = unfrozen[: config.clients_per_round]
        for k in selected:
            own = shards[k]
            messages[k] = client_update(config, model, generator, x[own], y[own], t, k)
        models = [messages[k].model for k in [*frozen, *selected]]
        model.load_state_dict(average(models))  # Eq. 21
        row = {"round": t + 1} | evaluate(model, x_test, y_test)

        if config.method == "fedcl":
            r = sample_mixtures(config, messages, t)
            beta = np.sort(np.concatenate(list(r.values())))
            generator = teach(config, G, adam, model[-1], messages, beta, t)  # lesson 2
            row |= {"phase": phase + 1, "frozen": 0}
            if phase < len(S):
                beta_T = quantile(beta, S[phase])
                for k in selected:
                    fraction = (r[k] <= beta_T).mean()
                    if fraction > config.v:
                        frozen.add(k)
                row |= {"frozen": len(frozen), "beta_T": beta_T}
                is_late = t + 1 - phase_began >= config.rounds / len(S)
                if is_late or len(frozen) == config.clients:
                    phase += 1
                    phase_began = t + 1
                    frozen = set()
        yield row


def client_update(config, model, generator, x, y, t, k):
    """Trains client k in round t on its samples x, y. Returns its message."""
    client = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(client.parameters(), config.lr)
    rng = stream(config, "batches", t, k)
    batches = full_batches(config, len(y), rng)
    features = generate(config, generator, t, k)  # lesson 2
    for step, batch in enumerate(batches):
        loss = mean_loss(config, client(x[batch]), y[batch])
        if features:
            z, y_z = features[step]
            head = client[-1]  # only the last layer sees z
            loss = loss + mean_loss(config, head(z), y_z)  # Eq. 19
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    client.eval()
    D_k = None
    if config.method == "fedcl":
        scores = difficulty(config, client, x, y)
        D_k = fit_mixture(scores, stream(config, "mixture", t, k))
    c_k = np.bincount(y[batches.flatten()], minlength=C)
    return Message(client, D_k, c_k)


def rescale(x):
    """Pixels from -1 to 1."""
    low, high = x.aminmax()
    return 2 * (x - low) / (high - low) - 1


def full_batches(config, n, rng):
    """Which of n samples are in the batch of each step, (steps, B).

    Passes over the samples in new orders. What does not fill a batch is left out.
    """
    B = min(config.batch_size, n)
    batches = []
    while len(batches) < config.local_steps:
        order = rng.permutation(n)
        for begin in range(0, n - B + 1, B):
            batches.append(order[begin : begin + B])
    return np.stack(batches[: config.local_steps])


def average(models):
    """The mean of the models' weights, and of the statistics of their batch norms."""
    states = [model.state_dict() for model in models]
    mean = {}
    for name in states[0]:
        total = sum(state[name] for state in states)
        mean[name] = total / len(states)
    return mean


def mean_loss(config, logits, y):
    """The mean over samples of l_cl, or of the cross-entropy in FedAvg."""
    losses = F.cross_entropy(logits, y, reduction="none")
    if config.method == "fedcl":
        losses = confidence_loss(losses, config.tau, config.lam)
    return losses.mean()


def confidence_loss(ce, tau, lam):
    """l_cl of samples with cross-entropy ce (n,). Its derivative in ce is s."""
    s = confidence(ce, tau, lam)
    score = (ce - tau) * s  # Eq. 6
    return score + lam * torch.log(s) ** 2  # Eq. 7


@torch.no_grad()  # s counts as a constant: it is e, or the slope of l_cl in s is 0
def confidence(ce, tau, lam):
    """s of samples with cross-entropy ce (n,)."""
    b = (ce.numpy() - tau) / lam
    edge = -2 / np.e  # there s = e
    W = lambertw(np.maximum(b, edge) / 2).real
    s = np.where(b > edge, np.exp(-W), np.e)
    return torch.from_numpy(s)


@torch.no_grad()
def difficulty(config, model, x, y):
    """The scores (n,) of a client's samples, Eq. 6."""
    ce = F.cross_entropy(model(x), y, reduction="none")
    s = confidence(ce, config.tau, config.lam)
    return (ce - config.tau) * s


def fit_mixture(scores, rng):
    """D_k of scores (n,), Eq. 12: the weights, means and variances of at most three Gaussians."""
    L = min(3, len(scores.unique()))
    seed = rng.integers(2**31)
    fit = GaussianMixture(L, covariance_type="diag", random_state=seed)
    fit.fit(scores[:, None].numpy())
    return fit.weights_, fit.means_[:, 0], fit.covariances_[:, 0]


def sample_mixtures(config, messages, t):
    """r_k (320,) of each client that has sent a mixture: random numbers from its last D_k."""
    r = {}
    for k, message in messages.items():
        weights, means, variances = message.D
        rng = stream(config, "pool", t, k)
        which = rng.choice(len(weights), 320, p=weights / weights.sum())
        r[k] = rng.normal(means[which], np.sqrt(variances[which]))
    return r


def quantile(beta, T):
    """beta_T: the smallest number such that at least a fraction T of beta (sorted) is <= beta_T."""
    n = len(beta)
    fractions = np.arange(1, n + 1) / n  # of the numbers that are at most beta_1, beta_2, ..
    return beta[fractions >= T][0]


# ------------------------------------------------------------------------ lesson 2: the generator


def make_generator(config):
    """G: a row of epsilon, one-hot y and score (NOISE + C + 1) -> features (FEATURES)."""
    torch.manual_seed(stream(config, "generator").integers(2**31))
    hidden = config.generator_hidden
    G = nn.Sequential(
        nn.Linear(NOISE + C + 1, hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, FEATURES),
    )
    return G.double()  # float64, as its inputs


def make_inputs(config, p, beta, shape, purpose, *key):
    """Random labels of this shape, and G's input for each of them (*shape, NOISE + C + 1).

    shape: (steps, batch size). purpose, key: as of `stream`.
    """
    scores = (beta - beta.mean()) / beta.std()
    rng = stream(config, purpose + " label", *key)
    y = rng.choice(C, shape, p=p)
    one_hot = np.eye(C)[y]
    rng = stream(config, purpose + " noise", *key)
    epsilon = rng.standard_normal((*shape, NOISE))
    rng = stream(config, purpose + " difficulty", *key)
    score = rng.choice(scores, (*shape, 1))
    inputs = np.concatenate([epsilon, one_hot, score], axis=-1)
    return torch.from_numpy(y), torch.from_numpy(inputs)


@torch.no_grad()
def generate(config, generator, t, k):
    """Features (B, FEATURES) and labels (B,) for each step of client k, once G has learnt."""
    if generator is None:
        return []
    G, p, beta = generator
    shape = (config.local_steps, config.batch_size)
    y, inputs = make_inputs(config, p, beta, shape, "synthetic", t, k)
    G.eval()
    z = [G(of_step) for of_step in inputs]
    return list(zip(z, y, strict=True))


def teach(config, G, adam, head, messages, beta, t):
    """Trains G in 50 steps of Adam with batches of 128. Returns what the server sends of it.

    `head` is that of the averaged model. Because it is one linear layer, its logits are the means
    of the logits of the averaged heads, which Eq. 18 has.
    """
    counts = sum(message.c for message in messages.values())
    p = counts / counts.sum()  # Eq. 15
    labels, inputs = make_inputs(config, p, beta, (50, 128), "teaching", t)
    adam.param_groups[0]["lr"] = 1e-4 * 0.98**t
    G.train()
    for y, of_step in zip(labels, inputs, strict=True):
        z = G(of_step)
        epsilon = of_step[:, :NOISE]
        d_z = (z[:, None] - z).abs().mean(2)  # (128, 128)
        d_epsilon = (epsilon[:, None] - epsilon).square().mean(2)
        sameness = torch.exp(-(d_z * d_epsilon).mean())
        loss = mean_loss(config, head(z), y) + sameness  # Eq. 18, and FedGen's term
        adam.zero_grad()
        loss.backward()
        adam.step()
    return G, p, beta


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
    """FedGen's CNN with PyTorch's initial weights, in eval mode. Its last layer is the head."""
    torch.manual_seed(rng.integers(2**31))
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, stride=2, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(784, FEATURES),
        nn.Linear(FEATURES, C),
    )
    return model.double().eval()


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
