"""Rules for which clients take part in a round, for `--select` of selection.py.

A rule is a function (fl, state, t, n). It returns a `Draw` of n clients for round t.
`remember` notes every client's turns in state["turns"], and `last_gradients` gives the gradients of
these turns. The uploads that are spent are state["uploads"]. A rule may keep keys of its own in
state, for the next rounds: tensors, NumPy arrays of numbers or plain Python. It leaves the other
keys as they are. It takes random numbers from fl.streams("mine", t), since others change with
--resume. Rules of other papers are biased on purpose: no weights correct it.

Every rule of another paper says what we changed, and why its authors could call it unfair. These
points are common to all of them:

- A round has n different clients. Papers that draw with replacement may have fewer.
- Learning rate and decay are uniform selection's. No rule was tuned.
- Clients always answer, and their data does not change. Rules against failures gain nothing.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import common
from errors import UsageError

TINY = 1e-200  # instead of a denominator 0


@dataclass
class Draw:
    """The clients of a round."""

    clients: np.ndarray  # (n,), ascending
    weights: np.ndarray  # (n,) in the aggregate, of any scale
    scorers: int = 0  # others that received the model only to score it
    scored: int = 0  # samples on which clients computed the model's loss, for the rule only


def by_samples(fl: common.Federation, clients: np.ndarray) -> Draw:
    """Returns these clients in ascending order, weighted by their numbers of samples."""
    clients = np.sort(clients)
    return Draw(clients, fl.sizes[clients])


def equally(clients: np.ndarray) -> Draw:
    """Returns these clients in ascending order, with equal weights."""
    return Draw(np.sort(clients), np.ones(len(clients)))


def uniform(fl: common.Federation, state: dict, t: int, n: int) -> Draw:
    return by_samples(fl, fl.select(t, n))


def round_robin(fl: common.Federation, state: dict, t: int, n: int) -> Draw:
    """Selects the next n clients of a random order that is fixed for the whole run.

    The order begins again after the last client. Yang et al. (2020, "Scheduling policies for
    federated learning in wireless networks") form fixed groups instead. Their groups have equal
    numbers of clients, and ours change if n does not divide the number of clients.
    """
    order = fl.streams("round robin").permutation(len(fl.sizes))
    places = (state["uploads"] + np.arange(n)) % len(order)
    return by_samples(fl, order[places])


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

    It also fills what `last_gradients` returns, if a rule asked for it.
    """
    learnt = fl.model.trainable
    if "last_gradients" in state:
        gradients = mean_gradients(update, state["theta"], slice(learnt))
        last = state["last_gradients"]
        last[update.clients] = gradients.to(last.dtype)
    output = slice(learnt - fl.data.classes, learnt)  # a model's last weights
    bias = -mean_gradients(update, state["theta"], output)
    for k, m in enumerate(update.clients.tolist()):
        before = state["turns"].get(m, {"times": 0})
        state["turns"][m] = {
            "round": t + 1,
            "loss": float(update.train_loss[k]),
            "bias": bias[k].tolist(),
            "times": before["times"] + 1,
        }


def mean_gradients(update: common.Update, theta: Tensor, part: slice) -> Tensor:
    """Returns (theta - theta_k) / length_k (K, ..) for a part of the weights, in float64."""
    moved = theta[part] - update.gather_thetas()[:, part]
    length = np.maximum(update.length, TINY)
    length = torch.as_tensor(length, device=moved.device)
    return moved.double() / length[:, None]


def last_gradients(fl: common.Federation, state: dict) -> Tensor:
    """Returns each client's mean gradient in its last turn (M, P), of the weights that are learnt.

    It is 0 for clients that had no turn since the first call. It takes the memory of M models.
    """
    if "last_gradients" not in state:
        M = len(fl.sizes)
        state["last_gradients"] = state["theta"].new_zeros(M, fl.model.trainable)
    return state["last_gradients"]


def tried_and_new(fl: common.Federation, state: dict) -> tuple[np.ndarray, np.ndarray]:
    """Returns the clients that had a turn, and the others, both ascending."""
    tried = np.array(sorted(state["turns"]), dtype=int)
    return tried, np.setdiff1d(fl.everyone, tried)


def new_first(fl: common.Federation, state: dict, rng: np.random.Generator, n: int) -> Draw:
    """Selects new clients, and random others if fewer than n clients are new."""
    tried, new = tried_and_new(fl, state)
    new = rng.permutation(new)
    in_order = np.append(new, rng.permutation(tried))
    return by_samples(fl, in_order[:n])


def choose(rng: np.random.Generator, clients: np.ndarray, n: int, odds: np.ndarray) -> np.ndarray:
    """Returns n different clients, drawn with probabilities in proportion to odds."""
    if n == 0:
        return clients[:0]
    return rng.choice(clients, n, replace=False, p=odds / odds.sum())


def check_output_bias(fl: common.Federation, option: str) -> None:
    """Raises UsageError, with the option that wants it, unless the model ends with such a bias."""
    last = fl.model.shapes[fl.model.parameters[-1]]
    if tuple(last) != (fl.data.classes,):
        raise UsageError(
            f"{option}: --model {fl.config.model} does not end with the bias of its output layer"
        )


def samples_of(fl: common.Federation, clients: np.ndarray) -> int:
    """Returns how many samples these clients have together."""
    return int(fl.sizes[clients].sum())


def mean_losses(fl: common.Federation, theta: Tensor, clients: np.ndarray) -> np.ndarray:
    """Returns each client's mean loss (n,) at theta (P,)."""
    scores = fl.score(theta, clients)
    return np.array([losses.mean() for losses, _ in scores])


def power_of_choice(fl: common.Federation, state: dict, t: int, n: int) -> Draw:
    """Selects the n clients of largest loss among 2n that are selected by size; equal weights.

    This is Power-of-Choice (Cho et al., AISTATS 2022). Its authors also try more candidates than
    2n. They score all samples of a candidate, as we do, or a batch, which is cheaper.
    """
    twice = min(2 * n, len(fl.sizes))
    candidates = by_size(fl, state, t, twice).clients
    losses = mean_losses(fl, state["theta"], candidates)
    largest_first = np.argsort(-losses, kind="stable")
    drawn = equally(candidates[largest_first[:n]])
    drawn.scorers = twice - n
    drawn.scored = samples_of(fl, candidates)
    return drawn


def by_loss(fl: common.Federation, state: dict, t: int, n: int) -> Draw:
    """Selects clients with probability in proportion to N_m loss_m; equal weights.

    loss_m is the mean training loss in client m's last turn. A new client has the largest of these
    losses. So nobody scores, and losses may be old. Active Federated Learning (Goetz et al., 2019)
    uses such old losses. It takes a softmax of 0.01 sqrt(N_m) loss_m, over the quarter of the
    clients where this is largest, and a tenth of the clients uniformly. We leave these numbers out.
    """
    rng = fl.streams("by loss", t)
    known = [turn["loss"] for turn in state["turns"].values()]
    largest = max(known, default=1)
    loss = np.full(len(fl.sizes), largest, dtype=float)
    for m, turn in state["turns"].items():
        loss[m] = turn["loss"]
    odds = fl.sizes * np.maximum(loss, TINY)
    return equally(choose(rng, fl.everyone, n, odds))


WINDOW = 20  # rounds that Oort's pacer compares with as many before


def oort(fl: common.Federation, state: dict, t: int, n: int) -> Draw:
    """Selects a fraction max(0.9 * 0.98^t, 0.2) of new clients, and the others by utility.

    This is Algorithm 1 of Lai et al. (OSDI 2021). New clients are selected with probability in
    proportion to the speed of their devices. The others are selected with probability in
    proportion to `oort_utility`, among those with at least 0.95 of the lowest utility that would be
    in. Clients compute the utility's losses on the model that they receive. The authors take them
    from training, which costs nothing.

    Left out: nobody is banned after ten turns. No clients are selected in reserve. In its authors'
    setting every client takes the same number of steps. Here large clients take more time, so the
    rule avoids them.
    """
    rng = fl.streams("oort", t)
    memory = state.setdefault("oort", {"utility": {}, "achieved": []})
    tried, new = tried_and_new(fl, state)
    share = max(0.9 * 0.98**t, 0.2)
    count = max(round(n * share), n - len(tried))
    count = min(count, len(new))
    slowness, _ = fl.devices
    clients = choose(rng, new, count, 1 / slowness[new])
    if count < n:
        odds = oort_utility(fl, state, t, tried)
        bar = 0.95 * np.sort(odds)[count - n]
        odds[odds < bar] = 0
        known = choose(rng, tried, n - count, odds)
        clients = np.append(clients, known)
    clients = np.sort(clients)
    drawn = by_samples(fl, clients)
    drawn.scored = samples_of(fl, clients)
    achieved = 0.0
    scores = fl.score(state["theta"], clients)
    for m, (losses, _) in zip(clients.tolist(), scores, strict=True):
        mean_square = np.mean(losses**2)
        utility = fl.sizes[m] * math.sqrt(mean_square)  # |B| sqrt(mean of the squared losses)
        memory["utility"][m] = utility
        achieved += utility
    memory["achieved"].append(achieved)
    return drawn


def oort_utility(fl: common.Federation, state: dict, t: int, tried: np.ndarray) -> np.ndarray:
    """Returns the utility of clients that had a turn (n,).

    Its first term is N_m sqrt(mean loss^2) of the last turn. It is clipped at its 95 % quantile and
    scaled to [0, 1], because the paper states no scale. The second term is sqrt(0.1 log R / L_m).
    R is this round, from 1, and L_m the round of the last turn. Their sum is multiplied by
    (T / D_m)^2 if client m takes D_m > T seconds. T is a quantile of all clients' seconds: `pace`.
    """
    memory = state["oort"]
    last_round = np.array([state["turns"][m]["round"] for m in tried])
    utility = np.array([memory["utility"][m] for m in tried])
    clip = np.quantile(utility, 0.95)
    clip = max(clip, TINY)  # it is 0 if most clients have no loss left
    utility = np.minimum(utility / clip, 1)
    utility += np.sqrt(0.1 * np.log(t + 1) / last_round)
    seconds = durations(fl)
    fast = pace(memory["achieved"])
    preferred = np.quantile(seconds, fast)
    times_too_slow = np.maximum(seconds[tried] / preferred, 1)
    return utility / times_too_slow**2


def pace(achieved: list[float]) -> float:
    """Oort's pacer: returns the fraction of the clients that are fast enough.

    It begins with 0.3. Whenever the last 20 rounds achieved less utility than the 20 rounds before,
    it grows by 0.05. The paper has seconds instead. These fractions are the authors' code's. There
    it takes a step at most once in 20 rounds, when utility has become level.
    """
    fraction = 0.3
    for R in range(2 * WINDOW, len(achieved) + 1):
        half = R - WINDOW
        before = achieved[half - WINDOW : half]
        lately = achieved[half:R]
        if sum(before) > sum(lately):
            fraction += 0.05
    return min(fraction, 1.0)


def durations(fl: common.Federation) -> np.ndarray:
    """Returns how long a turn takes each client (M,), in the seconds of `Federation.cost`."""
    slowness, bandwidth = fl.devices
    computing = fl.config.epochs * fl.sizes * common.SECONDS_A_SAMPLE * slowness
    numbers = fl.model.size - fl.model.frozen
    numbers *= 2 * fl.base.vectors  # received and sent
    megabytes = numbers * fl.model.dtype.itemsize / 1e6
    return computing + megabytes / bandwidth


def hics(fl: common.Federation, state: dict, t: int, n: int) -> Draw:
    """Selects clients with a high entropy H_m of labels, which their output bias shows.

    This is HiCS-FL (Chen and Vikalo, 2024). Clients that have not taken part come first. Then
    clients are clustered (Ward) by the angle between their bias gradients and 10 |H_m - H_j|. Each
    selection takes a cluster with probability in proportion to exp(gamma mean H), then one of its
    clients by size. Here gamma falls from 4 to 0, and weights are equal. Its authors tune gamma and
    the number of clusters for each data set. In their settings a part of the clients has all
    labels, and this rule finds them. With one alpha for all clients there is less to find.
    """
    rng = fl.streams("hics", t)
    tried, new = tried_and_new(fl, state)
    if len(new):
        return new_first(fl, state, rng, n)

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
    return equally(choose(rng, tried, n, odds))


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

    apart = abs(H[:, None] - H)
    distance = angles(bias) + 10 * apart
    pairs = np.triu_indices(len(H), 1)
    tree = linkage(distance[pairs], "ward")
    return fcluster(tree, clusters, "maxclust")


def angles(vectors: np.ndarray) -> np.ndarray:
    """Returns the angles (M, M) between vectors (M, P). 0 is at right angles to all but itself."""
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.maximum(length, TINY)
    cosine = np.clip(unit @ unit.T, -1, 1)
    is_zero = length == 0
    cosine[is_zero & is_zero.T] = 1
    return np.arccos(cosine)


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

    This is FedCor (Tang et al., CVPR 2022). The losses change from round to round as N(., K + s^2
    I). In the first rounds the selection is uniform, and all clients score. Later, each candidate's
    loss falls by alpha_m of its standard deviations. The rule takes the client with the largest
    fall of sum_i p_i loss_i. Given this client, it takes the next, and so on. alpha_m is
    0.95^(turns of client m). Its authors train K further, with new losses of all clients. Here K is
    as old as the warm-up, which is a quarter of 60 rounds. In their code K has rank 15, and only
    turns since K was last trained count.
    """
    M = len(fl.sizes)
    everything = int(fl.sizes.sum())
    if t <= WARM_UP:
        losses = mean_losses(fl, state["theta"], fl.everyone)
        state["losses"] = [*state.get("losses", []), losses.tolist()]
    if t < WARM_UP:
        drawn = uniform(fl, state, t, n)
        drawn.scorers = M - n
        drawn.scored = everything
        return drawn
    changes = np.diff(state["losses"], axis=0)
    K, s_sq = fit_covariance(changes, RANK)
    times = np.zeros(M)
    for m, turn in state["turns"].items():
        times[m] = turn["times"]
    p = fl.sizes / fl.sizes.sum()
    clients = take_greedily(K, s_sq, ANNEAL**times, p, n)
    drawn = by_samples(fl, clients)
    if t == WARM_UP:
        drawn.scorers = M - n
        drawn.scored = everything
    return drawn


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


def divfl(fl: common.Federation, state: dict, t: int, n: int) -> Draw:
    """Selects the clients with gradients that represent all gradients best; equal weights.

    This is DivFL (Balakrishnan et al., ICLR 2022). The clients S are to make sum_m min_{i in S}
    ||g_m - g_i|| small. They are taken one by one, each time the client that makes it smallest. g_m
    is client m's mean gradient in its last turn, as in the paper's form without additional
    messages. In the authors' code it is the gradient at the received model, and clients are
    weighted by samples. Clients that have not taken part come first. The code asks all clients for
    a gradient before the first round instead. Their other form asks them in every round: it knows
    more, and sends more.
    """
    rng = fl.streams("divfl", t)
    gradients = last_gradients(fl, state)
    _, new = tried_and_new(fl, state)
    if len(new):
        return new_first(fl, state, rng, n)
    distance = distances(gradients.double()).cpu().numpy()
    return equally(take_representatives(distance, n))


def distances(vectors: Tensor) -> Tensor:
    """Returns the Euclidean distances (M, M) between vectors (M, P)."""
    products = vectors @ vectors.T
    squares = products.diagonal()
    squared = squares[:, None] + squares - 2 * products
    return squared.clamp(min=0).sqrt().fill_diagonal_(0)  # rounding may go below 0


def take_representatives(distance: np.ndarray, n: int) -> list[int]:
    """Returns DivFL's n clients from distances (M, M), in the order in which they are taken.

    Two clients that are nearest to each other often tie. Then the first one is taken.
    """
    taken = []
    nearest = np.full(len(distance), np.inf)
    for _ in range(n):
        with_each = np.minimum(nearest[:, None], distance)
        total = with_each.sum(0)
        total[taken] = np.inf
        is_least = total <= total.min() * (1 + 1e-9)
        m = int(is_least.argmax())
        taken.append(m)
        nearest = with_each[:, m]
    return taken


def clusters_by_size(fl: common.Federation, state: dict, t: int, n: int) -> Draw:
    """Selects a client from each of n urns, which clients fill in the order of their sizes.

    This is Algorithm 1 of clustered sampling (Fraboni et al., ICML 2021). A client lies in its urns
    with pi_m in all, which is in proportion to its size, and an urn holds 1. So two clients of one
    urn are rarely selected together. Weights are N_m / pi_m. In the paper a client of several urns
    may be selected several times, and the average has no bias. Here the other urns select another
    client, and a client larger than an urn fills one. So clients that lie in two urns take part a
    little too rarely.
    """
    rng = fl.streams("clusters by size", t)
    pi = inclusion(fl.sizes, n)
    largest_first = np.argsort(-fl.sizes, kind="stable")
    urns = np.zeros((n, len(pi)))
    room = np.ones(n)
    urns[:, largest_first] = allocate(pi[largest_first], room)
    clients = draw_from_urns(urns, rng)
    return Draw(clients, fl.sizes[clients] / pi[clients])


def allocate(mass: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Returns how much of each mass (J,) lies in each urn (n, J), if they fill the rooms (n,)."""
    ends = np.cumsum(mass)
    borders = np.cumsum(room)
    low = np.maximum.outer(borders - room, ends - mass)
    high = np.minimum.outer(borders, ends)
    return np.maximum(high - low, 0)


def draw_from_urns(urns: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns a client from each urn (n, M), n different ones, ascending."""
    taken = []
    everyone = np.arange(urns.shape[1])
    for urn in urns:
        odds = urn + TINY  # an urn whose clients are all taken selects any other
        odds[taken] = 0
        [m] = choose(rng, everyone, 1, odds)
        taken.append(m)
    return np.sort(taken)


def clusters_by_similarity(fl: common.Federation, state: dict, t: int, n: int) -> Draw:
    """Selects a client from each of n urns, which clients with similar gradients share.

    This is Algorithm 2 of clustered sampling (Fraboni et al., ICML 2021). Clients are clustered
    (Ward) by the angles between their mean gradients of the last turn. The tree is cut into the
    largest groups that fit into an urn. The n heaviest groups have an urn each, and the other
    clients fill the room that is left. Clients without a turn fill it last, the largest first, so
    the first round is Algorithm 1. The paper gives them a gradient of 0. Weights and its other
    remarks are those of `clusters_by_size`.
    """
    rng = fl.streams("clusters by similarity", t)
    gradients = last_gradients(fl, state).double().cpu().numpy()
    tried, new = tried_and_new(fl, state)
    pi = inclusion(fl.sizes, n)
    groups = [tried[places] for places in similar_groups(gradients[tried], pi[tried])]
    urns = np.zeros((n, len(pi)))
    for urn, group in zip(urns, groups, strict=False):
        urn[group] = pi[group]
    largest_first = np.argsort(-fl.sizes[new], kind="stable")
    others = np.concatenate([*groups[n:], new[largest_first]])
    room = 1 - urns.sum(1)
    room = np.maximum(room, 0)  # rounding may go below 0
    urns[:, others] = allocate(pi[others], room)
    clients = draw_from_urns(urns, rng)
    return Draw(clients, fl.sizes[clients] / pi[clients])


def similar_groups(vectors: np.ndarray, mass: np.ndarray) -> list[np.ndarray]:
    """Returns the places of each group's vectors, the heaviest group first, equal ones by places.

    Groups are the largest branches of Ward's tree over the vectors (J, P) with at most the mass 1.

    mass  (J,): the masses of the vectors, each at most 1
    """
    from scipy.cluster.hierarchy import fcluster, linkage

    J = len(mass)
    if J < 2:
        return [np.arange(J)] * J
    pairs = np.triu_indices(J, 1)
    tree = linkage(angles(vectors)[pairs], "ward")
    branch = np.append(mass, np.zeros(J - 1))  # the mass below each node of the tree
    for node, children in enumerate(tree[:, :2].astype(int), J):
        branch[node] = branch[children].sum()
    label = fcluster(tree, 1 + 1e-9, "monocrit", monocrit=branch[J:])
    groups = [np.flatnonzero(label == c) for c in np.unique(label)]

    def heavy_first(group: np.ndarray) -> tuple[float, int]:
        return -round(mass[group].sum(), 9), group[0]  # rounding decides no tie

    return sorted(groups, key=heavy_first)


def oracle(fl: common.Federation, state: dict, t: int, n: int) -> Draw:
    """Selects, among 2n clients, those that together have the labels of all clients; equal weights.

    It reads the labels, which no server knows: it shows what they are worth. The 2n candidates are
    selected uniformly. Then clients are taken one by one. Each time it is the client with which the
    mean of the label fractions has the smallest squared distance to all clients' fractions. Fed-CBS
    (Zhang et al., CVPR 2023) balances classes in this way, with encrypted counts of labels, and
    prefers clients with few turns. Counts would prefer small clients here. The oracle of HiCS-FL is
    another one: HiCS with the true entropies.
    """
    twice = min(2 * n, len(fl.sizes))
    candidates = fl.select(t, twice)
    counts = fl.count_labels()
    wanted = counts.sum(0) / counts.sum()
    fractions = counts[candidates] / fl.sizes[candidates][:, None]
    held = np.zeros(len(wanted))
    taken = []
    for number in range(1, n + 1):
        mean = (held + fractions) / number
        apart = ((mean - wanted) ** 2).sum(1)
        apart[taken] = np.inf
        best = int(apart.argmin())
        taken.append(best)
        held += fractions[best]
    return equally(candidates[taken])


# --------------------------------------------------------------------------------------- --select


RULES = {
    "uniform": uniform,
    "size": by_size,
    "round_robin": round_robin,
    "loss": by_loss,
    "power_of_choice": power_of_choice,
    "oort": oort,
    "hics": hics,
    "fedcor": fedcor,
    "divfl": divfl,
    "clusters_by_size": clusters_by_size,
    "clusters_by_similarity": clusters_by_similarity,
    "oracle": oracle,
}


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
        raise ValueError(f"wanted {wanted}, not these {clients.size}: {found}")
    are_finite = weights.shape == (n,) and np.isfinite(weights).all()
    if not are_finite or weights.min() < 0 or weights.max() == 0:
        raise ValueError(f"wanted {n} finite weights >= 0, not all 0")
    scoring = {"scorers": drawn.scorers, "scored": drawn.scored}
    for name, number in scoring.items():
        if int(number) < 0:
            raise ValueError(f"wanted a number of {name} >= 0, not {number}")
    _, exponent = np.frexp(weights.max())
    weights = np.ldexp(weights, -exponent)  # their sum is finite; a power of 2 changes no bit
    order = np.argsort(clients)
    scoring = {name: int(number) for name, number in scoring.items()}
    return Draw(clients[order].astype(int), weights[order], **scoring)
