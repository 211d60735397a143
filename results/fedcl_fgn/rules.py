"""Rules for which clients take part in a round, for `--select` of selection.py.

A rule is a function (fl, state, t, n). It returns a `Draw` of n clients for round t.
`remember` notes every client's turns in state["turns"]. The uploads that are spent are
state["uploads"]. A rule may keep keys of its own in state, for the next rounds: tensors, NumPy
arrays of numbers or plain Python. It leaves the other keys as they are. It takes random numbers
from fl.streams("mine", t), since others change with --resume. Rules of other papers are biased on
purpose: no weights correct it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import common
from errors import UsageError, first_line
from user_files import load_from_file

TINY = 1e-200  # instead of a denominator 0


@dataclass
class Draw:
    """The clients of a round."""

    clients: np.ndarray  # (n,), ascending
    weights: np.ndarray  # (n,) in the aggregate, of any scale
    scorers: int = 0  # others that received the model only to score it


def uniform(fl: common.Federation, state: dict, t: int, n: int) -> Draw:
    clients = fl.select(t, n)
    return Draw(clients, fl.sizes[clients])


def by_size(fl: common.Federation, state: dict, t: int, n: int) -> Draw:
    """Systematic sampling with inclusion probabilities pi_m in proportion to the sizes.

    Clients lie on a line in random order, and each is as long as its pi_m. The n points on this
    line have distance 1, and select the clients that they hit. Weights N_m / pi_m estimate the mean
    over all samples without bias. One random number places the points for every n. So the round's 8
    clients would be among its 16.
    """
    rng = fl.streams("select by size", t)
    pi = inclusion(fl.sizes, n)
    order = rng.permutation(len(pi))
    points = np.arange(n) + (n * rng.random()) % 1
    ends = np.cumsum(pi[order])
    places = np.searchsorted(ends[:-1], points, side="right")
    clients = np.unique(order[places])
    return Draw(clients, fl.sizes[clients] / pi[clients])


def inclusion(sizes: np.ndarray, n: int) -> np.ndarray:
    """Returns pi_m (M,) with sum n. A client above 1 gets 1, and the others divide the rest."""
    pi = n * sizes / sizes.sum()
    sure = np.zeros(len(sizes), bool)
    while (pi > 1).any():
        sure |= pi >= 1
        others = max(1, sizes[~sure].sum())
        left = n - sure.sum()
        pi = np.where(sure, 1, left * sizes / others)
    return pi


# -------------------------------------------------------------------------- rules of other papers


def remember(fl: common.Federation, state: dict, t: int, update: common.Update) -> None:
    """Notes each client's turn in state["turns"][m]. Call it before the aggregate.

    round, loss  of the client's last turn
    times        how many turns it has had
    bias         (C,): its mean gradient of the output bias, label fractions minus predicted ones.
                 It has no meaning if the model does not end with this bias: `check_output_bias`
    """
    classes = fl.data.classes
    output = slice(fl.model.trainable - classes, fl.model.trainable)  # a model's last weights
    moved = update.gather_thetas()[:, output] - state["theta"][output]
    moved = moved.double().cpu().numpy()
    bias = moved / np.maximum(update.length, TINY)[:, None]
    for k, m in enumerate(update.clients.tolist()):
        before = state["turns"].get(m, {"times": 0})
        state["turns"][m] = {
            "round": t + 1,
            "loss": float(update.train_loss[k]),
            "bias": bias[k].tolist(),
            "times": before["times"] + 1,
        }


def check_output_bias(fl: common.Federation, option: str) -> None:
    """Raises UsageError, with the option that wants it, unless the model ends with such a bias."""
    last = fl.model.shapes[fl.model.parameters[-1]]
    if tuple(last) != (fl.data.classes,):
        raise UsageError(
            f"{option}: --model {fl.config.model} does not end with the bias of its output layer"
        )


def mean_losses(fl: common.Federation, theta: Tensor, clients: np.ndarray) -> np.ndarray:
    """Returns each client's mean loss (n,) at theta (P,)."""
    scores = fl.score(theta, clients)
    return np.array([losses.mean() for losses, _ in scores])


def power_of_choice(fl: common.Federation, state: dict, t: int, n: int) -> Draw:
    """Selects the n clients of largest loss among 2n that are selected by size; equal weights."""
    twice = min(2 * n, len(fl.sizes))
    candidates = by_size(fl, state, t, twice).clients
    losses = mean_losses(fl, state["theta"], candidates)
    largest_first = np.argsort(-losses, kind="stable")
    clients = candidates[largest_first[:n]]
    return Draw(np.sort(clients), np.ones(n), scorers=twice - n)


def oort(fl: common.Federation, state: dict, t: int, n: int) -> Draw:
    """Selects a fraction max(0.9 * 0.98^t, 0.2) of new clients, and the others by utility.

    The utility has two terms. The first is N_m loss_m of the last turn, clipped at its 95 %
    quantile and scaled to [0, 1]. It uses the mean of the losses, not of their squares. The second
    is sqrt(0.1 log t / t_m), where t_m is the round of client m's last turn. Clients are selected
    among those with at least 0.95 of the lowest utility that would be in.
    """
    rng = fl.streams("oort", t)
    tried = np.array(sorted(state["turns"]), dtype=int)
    new = rng.permutation(np.setdiff1d(fl.everyone, tried))
    share = max(0.9 * 0.98**t, 0.2)
    count = max(round(n * share), n - len(tried))
    clients = new[:count]
    count = len(clients)
    if count < n:
        turns = [state["turns"][m] for m in tried]
        loss = np.array([turn["loss"] for turn in turns])
        last_round = np.array([turn["round"] for turn in turns])
        utility = fl.sizes[tried] * loss
        clip = np.quantile(utility, 0.95)
        clip = max(clip, TINY)  # it is 0 if most clients have no loss left
        utility = np.minimum(utility / clip, 1)
        utility += np.sqrt(0.1 * np.log(t + 1) / last_round)
        bar = 0.95 * np.sort(utility)[count - n]
        odds = utility * (utility >= bar)
        odds = odds / odds.sum()
        known = rng.choice(tried, n - count, replace=False, p=odds)
        clients = np.append(clients, known)
    clients = np.sort(clients)
    return Draw(clients, fl.sizes[clients])


def hics(fl: common.Federation, state: dict, t: int, n: int) -> Draw:
    """Selects clients with a high entropy H_m of labels, which their output bias shows.

    Clients that have not taken part come first. Then clients are clustered (Ward) by the angle
    between their bias gradients and 10 |H_m - H_j|. Each selection takes a cluster with probability
    in proportion to exp(gamma mean H), then one of its clients by size. Here gamma falls from 4 to
    0, and weights are equal. The paper may select a client twice.
    """
    rng = fl.streams("hics", t)
    tried = np.array(sorted(state["turns"]), dtype=int)
    new = np.setdiff1d(fl.everyone, tried)
    if len(new):
        new = rng.permutation(new)
        in_order = np.append(new, rng.permutation(tried))
        clients = np.sort(in_order[:n])
        return Draw(clients, fl.sizes[clients])

    bias = np.array([state["turns"][m]["bias"] for m in tried])
    H = entropy(bias)
    cluster = cluster_by_bias(bias, H, n)
    gamma = 4 * (1 - spent(fl.config, state, t))
    odds = np.zeros(len(H))
    for c in np.unique(cluster):
        inside = cluster == c
        share = fl.sizes[inside] / fl.sizes[inside].sum()
        mean_H = H[inside].mean()
        odds[inside] = np.exp(gamma * mean_H) * share
    odds = odds / odds.sum()
    clients = rng.choice(len(H), n, replace=False, p=odds)
    return Draw(np.sort(clients), np.ones(n))


def entropy(bias: np.ndarray, temperature: float = 0.1) -> np.ndarray:
    """Returns H(softmax(b_m / T)) (M,) in nats of the bias gradients b_m (M, C).

    The paper takes the bias's change itself and T = 0.0025. Here the change is divided by the
    length of the steps, so it does not depend on eta or epochs.
    """
    log_p = F.log_softmax(torch.as_tensor(bias) / temperature, -1)
    return -(log_p.exp() * log_p).sum(-1).numpy()


def cluster_by_bias(bias: np.ndarray, H: np.ndarray, clusters: int) -> np.ndarray:
    """Returns the clients' clusters (M,) from bias gradients (M, C) and entropies (M,)."""
    from scipy.cluster.hierarchy import fcluster, linkage

    length = np.linalg.norm(bias, axis=1, keepdims=True)
    unit = bias / np.maximum(length, TINY)
    cosine = np.clip(unit @ unit.T, -1, 1)
    apart = abs(H[:, None] - H)
    distance = np.arccos(cosine) + 10 * apart
    pairs = np.triu_indices(len(H), 1)
    tree = linkage(distance[pairs], "ward")
    return fcluster(tree, clusters, "maxclust")


def spent(config, state: dict, t: int) -> float:
    """Returns how much of the run is over, from 0 to 1."""
    if config.budget:
        return state["uploads"] / config.budget
    return t / config.rounds


WARM_UP = 15  # FedCor's rounds in which all clients score
RANK = 5  # of its covariance
ANNEAL = 0.95  # alpha for each turn that a client has had


def fedcor(fl: common.Federation, state: dict, t: int, n: int) -> Draw:
    """Selects the clients that tell most about all losses, from a Gaussian process.

    The losses change from round to round as N(., K + s^2 I). In the first rounds the selection is
    uniform, and all clients score. Later, each candidate's loss falls by alpha_m of its standard
    deviations. The rule takes the client with the largest fall of sum_i p_i loss_i. Given this
    client, it takes the next, and so on. alpha_m is 0.95^(turns of client m). The paper trains K
    further.
    """
    M = len(fl.sizes)
    if t <= WARM_UP:
        losses = mean_losses(fl, state["theta"], fl.everyone)
        state["losses"] = [*state.get("losses", []), losses.tolist()]
    if t < WARM_UP:
        drawn = uniform(fl, state, t, n)
        return Draw(drawn.clients, drawn.weights, scorers=M - n)
    changes = np.diff(state["losses"], axis=0)
    K, s_sq = fit_covariance(changes, RANK)
    times = np.zeros(M)
    for m, turn in state["turns"].items():
        times[m] = turn["times"]
    p = fl.sizes / fl.sizes.sum()
    clients = take_greedily(K, s_sq, ANNEAL**times, p, n)
    clients = np.sort(clients)
    scorers = 0
    if t == WARM_UP:
        scorers = M - n
    return Draw(clients, fl.sizes[clients], scorers)


def fit_covariance(changes: np.ndarray, rank: int) -> tuple[np.ndarray, float]:
    """Returns K (M, M) of this rank and s^2, of greatest likelihood for changes (T, M).

    The rank is at most M - 1, since s^2 needs the smallest eigenvalue. M is at least 2.
    The model is N(., K + s^2 I), so this is probabilistic PCA. The paper ascends the same
    likelihood by gradients.
    """
    rank = min(rank, changes.shape[1] - 1)
    covariance = np.cov(changes.T, bias=True)
    values, vectors = np.linalg.eigh(covariance)
    s_sq = max(values[:-rank].mean(), 1e-12)
    largest = vectors[:, -rank:]
    above = np.maximum(values[-rank:] - s_sq, 0)  # losses that stand still have none
    K = (largest * above) @ largest.T
    return K, s_sq


def take_greedily(K: np.ndarray, s_sq: float, alpha, p: np.ndarray, n: int) -> list[int]:
    """Returns FedCor's n clients, in the order in which they are taken."""
    taken = []
    for _ in range(n):
        variance = np.maximum(K.diagonal(), 0)  # rounding may go below 0
        deviation = np.sqrt(variance + s_sq)
        gain = alpha * (p @ K) / deviation
        gain[taken] = -np.inf
        m = int(gain.argmax())
        taken.append(m)
        K = condition(K, s_sq, m)
    return taken


def condition(K: np.ndarray, s_sq: float, m: int) -> np.ndarray:
    """Returns the covariance (M, M) of all losses once client m's is known up to noise s^2."""
    explained = np.outer(K[m], K[m]) / (max(K[m, m], 0) + s_sq)
    return K - explained


# --------------------------------------------------------------------------------------- --select


RULES = {
    "uniform": uniform,
    "size": by_size,
    "power_of_choice": power_of_choice,
    "oort": oort,
    "hics": hics,
    "fedcor": fedcor,
}


def find_rule(word: str) -> Callable:
    """Returns the rule of --select."""
    if word in RULES:
        return RULES[word]
    try:
        return load_from_file(word)
    except (Exception, SystemExit) as error:  # whatever a user's own file raises
        wanted = f"{', '.join(RULES)} or FILE.py:FUNCTION"
        raise UsageError(f"--select {word}: {first_line(error)}; wanted {wanted}") from error


def check_draw(drawn: Draw, n: int, M: int) -> Draw:
    """Returns the same selection in ascending order. ValueError unless it has n of M clients."""
    if not isinstance(drawn, Draw):
        raise ValueError(f"wanted a Draw(clients, weights), not {type(drawn).__name__}")
    clients = np.array(drawn.clients)
    weights = np.array(drawn.weights, dtype=float)
    are_integers = clients.shape == (n,) and clients.dtype.kind in "iu"
    known = np.intersect1d(clients, np.arange(M))
    if not are_integers or len(known) < n:
        first = clients.ravel()[:20]
        found = " ".join(map(str, first))
        wanted = f"{n} different clients from 0 to {M - 1}"
        raise ValueError(f"wanted {wanted}, not {found}")
    are_finite = weights.shape == (n,) and np.isfinite(weights).all()
    if not are_finite or weights.min() < 0 or weights.max() == 0:
        raise ValueError(f"wanted {n} finite weights >= 0, not all 0")
    if int(drawn.scorers) < 0:
        raise ValueError(f"wanted a number of scorers >= 0, not {drawn.scorers}")
    _, exponent = np.frexp(weights.max())
    weights = np.ldexp(weights, -exponent)  # their sum is finite; a power of 2 changes no bit
    order = np.argsort(clients)
    return Draw(clients[order].astype(int), weights[order], int(drawn.scorers))
