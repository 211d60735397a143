"""The rules of results/fedcl_fgn/rules.py once more, from the papers' algorithms: loops and lists.

They share with the rules the random streams, and nothing else of them. `compare` has a rule and its
plain program select clients in a made-up federation, round after round.
"""

import math
from types import SimpleNamespace

import numpy as np
import torch

import common
from results.fedcl_fgn import rules

CLASSES = 4
P = 19  # weights; the last four are the output bias
ROUNDS = 75


class World:
    """Forty clients. Their losses, gradients and devices are random, but keep to the client."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.M = 40
        self.streams = common.Streams(seed, 0)
        self.labels = rng.integers(0, 30, (self.M, CLASSES)) * rng.integers(0, 2, (self.M, CLASSES))
        self.labels[:, 0] += 1
        self.labels[0] *= 15  # so large that it is in every selection by size
        self.sizes = self.labels.sum(1)
        self.slowness, self.bandwidth = np.exp(0.7 * rng.standard_normal((2, self.M)))
        self.tilt = rng.standard_normal((self.M, P))
        self.epochs = 3
        self.rounds = ROUNDS

    def losses(self, t, m):
        rng = np.random.default_rng([7, t, m])
        level = 1 / (1 + 0.05 * t) + 0.6 + 0.5 * math.sin(t / 6)  # the pacer has falls and rises
        return (level + 0.1 * m) * rng.random(int(self.sizes[m]))

    def turn(self, t, m):
        """Training of client m: its weights, their length, its mean loss."""
        rng = np.random.default_rng([8, t, m])
        length = 0.5 + rng.random()
        gradient = self.tilt[m] + 0.4 * rng.standard_normal(P)
        return self.theta(t) - length * gradient, length, self.losses(t, m).mean() / 2

    def theta(self, t):
        return np.random.default_rng([9, t]).standard_normal(P)


def federation(world):
    """What the rules read of `common.Federation`."""
    fl = SimpleNamespace(sizes=world.sizes, streams=world.streams, everyone=np.arange(world.M))
    fl.config = SimpleNamespace(epochs=world.epochs, rounds=world.rounds, budget=0)
    fl.devices = np.array([world.slowness, world.bandwidth])
    fl.data = SimpleNamespace(classes=CLASSES)
    fl.base = SimpleNamespace(vectors=2)
    fl.model = SimpleNamespace(trainable=P, size=P, frozen=2, dtype=torch.float64)
    fl.count_labels = lambda: world.labels
    fl.select = lambda t, n: np.sort(world.streams("select", t).permutation(world.M)[:n])
    fl.t = 0
    fl.score = lambda theta, clients: [(world.losses(fl.t, m), None) for m in clients]
    return fl


# ------------------------------------------------------------------------------ what rules share


class BySize:
    """Systematic sampling of M clients with N samples, which `streams` places at random."""

    def inclusion(self, n):
        """pi: in proportion to the sizes, sum n, nobody above 1."""
        pi = [0.0] * self.M
        free = list(range(self.M))
        left = n
        while True:
            total = sum(self.N[m] for m in free)
            for m in free:
                pi[m] = left * self.N[m] / total
            over = [m for m in free if pi[m] > 1]
            if not over:
                return pi
            for m in over:
                pi[m] = 1.0
                left -= 1
            free = [m for m in free if m not in over]

    def by_size(self, t, n):
        pi = self.inclusion(n)
        rng = self.streams("select by size", t)
        order = rng.permutation(self.M).tolist()
        first = (n * rng.random()) % 1
        found = {}
        begin = 0.0
        for m in order:
            end = begin + pi[m]
            if any(begin <= first + i < end for i in range(n)):
                found[m] = self.N[m] / pi[m]
            begin = end
        return found


class Plain(BySize):
    """A rule. `draw` returns {client: weight}, the weights with any sum."""

    def __init__(self, world):
        self.world = world
        self.N = world.sizes.tolist()
        self.M = world.M
        self.streams = world.streams
        self.turns = {}  # of client m: round (from 1), times, loss, gradient
        self.begin()

    def begin(self):
        pass

    def note(self, t, m):
        theta, length, loss = self.world.turn(t, m)
        gradient = [(a - b) / length for a, b in zip(self.world.theta(t), theta, strict=True)]
        times = self.turns[m]["times"] + 1 if m in self.turns else 1
        self.turns[m] = {"round": t + 1, "times": times, "loss": loss, "gradient": gradient}

    def uniform(self, t, n):
        return sorted(self.streams("select", t).permutation(self.M)[:n].tolist())

    def new(self):
        return [m for m in range(self.M) if m not in self.turns]

    def new_first(self, rng, n):
        new = rng.permutation(self.new()).tolist()
        others = rng.permutation(sorted(self.turns)).tolist()
        return {int(m): self.N[int(m)] for m in (new + others)[:n]}


def norm(vector):
    return math.sqrt(sum(x * x for x in vector))


def angle(a, b):
    if norm(a) == 0 and norm(b) == 0:
        return 0.0
    if norm(a) == 0 or norm(b) == 0:
        return math.pi / 2
    cosine = sum(x * y for x, y in zip(a, b, strict=True)) / norm(a) / norm(b)
    return math.acos(max(-1.0, min(1.0, cosine)))


def ward(distance):
    """Merges of Ward's tree: the two sets of leaves that are joined, by Lance and Williams."""
    sets = {i: [i] for i in range(len(distance))}
    d = {(i, j): distance[i][j] for i in sets for j in sets if i < j}
    merges = []
    while len(sets) > 1:
        i, j = min(d, key=d.get)
        merges.append((sets[i], sets[j]))
        a, b = len(sets[i]), len(sets[j])
        for k in sets:
            if k in (i, j):
                continue
            c = len(sets[k])
            to_i, to_j = (d[min(k, x), max(k, x)] for x in (i, j))
            squared = (a + c) * to_i**2 + (b + c) * to_j**2 - c * d[i, j] ** 2
            d[min(i, k), max(i, k)] = math.sqrt(squared / (a + b + c))
        sets[i] = sets[i] + sets.pop(j)
        d = {pair: value for pair, value in d.items() if j not in pair}
    return merges


# -------------------------------------------------------------------------------------- the rules


class Uniform(Plain):
    def draw(self, t, n):
        return {m: self.N[m] for m in self.uniform(t, n)}


class Size(Plain):
    def draw(self, t, n):
        return self.by_size(t, n)


class RoundRobin(Plain):
    def begin(self):
        self.queue = self.streams("round robin").permutation(self.M).tolist()

    def draw(self, t, n):
        first, self.queue = self.queue[:n], self.queue[n:]
        self.queue += first
        return {m: self.N[m] for m in first}


class Loss(Plain):
    def draw(self, t, n):
        seen = [turn["loss"] for turn in self.turns.values()] or [1.0]
        odds = []
        for m in range(self.M):
            loss = self.turns[m]["loss"] if m in self.turns else max(seen)
            odds.append(self.N[m] * loss)
        p = [odd / sum(odds) for odd in odds]
        return dict.fromkeys(self.streams("by loss", t).choice(self.M, n, replace=False, p=p), 1)


class PowerOfChoice(Plain):
    def draw(self, t, n):
        candidates = sorted(self.by_size(t, 2 * n))
        candidates.sort(key=lambda m: -self.world.losses(t, m).mean())
        return dict.fromkeys(candidates[:n], 1)


class Oort(Plain):
    """Algorithm 1 of the paper: E, U, L, D, R and T are its names."""

    def begin(self):
        self.U = {}
        self.of_round = []
        self.D = {}
        self.T = 0.3  # a fraction
        for m in range(self.M):
            work = self.world.epochs * self.N[m] * 0.01 * self.world.slowness[m]
            megabytes = 2 * 2 * (P - 2) * 8 / 1e6  # two vectors both ways, but two weights
            self.D[m] = work + megabytes / self.world.bandwidth[m]

    def draw(self, t, n):
        R = t + 1
        W = rules.WINDOW
        if R - 1 >= 2 * W and sum(self.of_round[-2 * W : -W]) > sum(self.of_round[-W:]):
            self.T += 0.05
        E = sorted(self.turns)
        epsilon = 0.9
        for _ in range(t):
            epsilon *= 0.98
        explore = round(n * max(epsilon, 0.2))
        explore = min(max(explore, n - len(E)), len(self.new()))
        rng = self.streams("oort", t)
        P_t = []
        if explore:
            speeds = [1 / self.world.slowness[m] for m in self.new()]
            p = [speed / sum(speeds) for speed in speeds]
            P_t += rng.choice(self.new(), explore, replace=False, p=p).tolist()
        exploit = n - explore
        if exploit:
            util = self.utilities(E, R)
            cut = 0.95 * sorted(util.values(), reverse=True)[exploit - 1]
            W_t = [m for m in E if util[m] >= cut]
            total = sum(util[m] for m in W_t)
            p = [util[m] / total for m in W_t]
            P_t += rng.choice(W_t, exploit, replace=False, p=p).tolist()
        for m in P_t:
            losses = self.world.losses(t, m).tolist()
            self.U[m] = len(losses) * math.sqrt(sum(x * x for x in losses) / len(losses))
        self.of_round.append(sum(self.U[m] for m in P_t))
        return {m: self.N[m] for m in P_t}

    def utilities(self, E, R):
        clip = np.quantile([self.U[m] for m in E], 0.95)
        T = np.quantile([*self.D.values()], min(self.T, 1))
        util = {}
        for m in E:
            util[m] = min(self.U[m], clip) / clip
            util[m] += math.sqrt(0.1 * math.log(R) / self.turns[m]["round"])
            if self.D[m] > T:
                util[m] *= (T / self.D[m]) ** 2
        return util


class Hics(Plain):
    def draw(self, t, n):
        rng = self.streams("hics", t)
        if self.new():
            return self.new_first(rng, n)
        bias = [[-g for g in self.turns[m]["gradient"][-CLASSES:]] for m in range(self.M)]
        H = []
        for b in bias:
            parts = [math.exp((x - max(b)) / 0.1) for x in b]
            parts = [part / sum(parts) for part in parts]
            H.append(-sum(p * math.log(p) for p in parts if p > 0))
        distance = []
        for i in range(self.M):
            row = [angle(bias[i], bias[j]) + 10 * abs(H[i] - H[j]) for j in range(self.M)]
            distance.append(row)
        clusters = [[m] for m in range(self.M)]
        for a, b in ward(distance)[: self.M - n]:
            clusters = [c for c in clusters if sorted(c) not in (sorted(a), sorted(b))] + [a + b]
        odds = [0.0] * self.M
        for cluster in clusters:
            mean = sum(H[m] for m in cluster) / len(cluster)
            weight = math.exp(4 * (1 - t / ROUNDS) * mean)
            for m in cluster:
                odds[m] = weight * self.N[m] / sum(self.N[i] for i in cluster)
        p = [odd / sum(odds) for odd in odds]
        return dict.fromkeys(rng.choice(self.M, n, replace=False, p=p), 1)


class FedCor(Plain):
    """K from a singular value decomposition, and what is given by an inverse."""

    def begin(self):
        self.losses = []

    def draw(self, t, n):
        if t <= 15:
            self.losses.append([self.world.losses(t, m).mean() for m in range(self.M)])
        if t < 15:
            return {m: self.N[m] for m in self.uniform(t, n)}
        changes = np.array(self.losses[1:]) - np.array(self.losses[:-1])
        changes -= changes.mean(0)
        _, values, vectors = np.linalg.svd(changes)
        values = np.append(values**2 / len(changes), np.zeros(self.M - len(values)))
        noise = values[5:].mean()
        K = sum((values[i] - noise) * np.outer(vectors[i], vectors[i]) for i in range(5))
        A = []
        for _ in range(n):
            given = K
            if A:
                inverse = np.linalg.inv(K[np.ix_(A, A)] + noise * np.eye(len(A)))
                given = K - K[:, A] @ inverse @ K[A]
            gain = {}
            for m in set(range(self.M)) - set(A):
                alpha = 0.95 ** (self.turns[m]["times"] if m in self.turns else 0)
                falls = sum(self.N[i] * given[i, m] for i in range(self.M)) / sum(self.N)
                gain[m] = alpha * falls / math.sqrt(given[m, m] + noise)
            A.append(max(gain, key=gain.get))
        return {m: self.N[m] for m in A}


class DivFL(Plain):
    def draw(self, t, n):
        if self.new():
            return self.new_first(self.streams("divfl", t), n)
        g = [np.array(self.turns[m]["gradient"]) for m in range(self.M)]
        self.apart = [[norm(a - b) for a in g] for b in g]
        S = []
        while len(S) < n:
            errors = {m: self.error([*S, m]) for m in range(self.M) if m not in S}
            least = min(errors.values())
            S.append(min(m for m in errors if math.isclose(errors[m], least)))  # neighbours tie
        return dict.fromkeys(S, 1)

    def error(self, S):
        """sum over all clients of the distance of their gradient to the nearest one in S."""
        return sum(min(self.apart[m][i] for i in S) for m in range(self.M))


class Clusters(Plain):
    def fill(self, urns, clients, pi):
        """Pours the clients into the urns, in order."""
        k = 0
        for m in clients:
            left = pi[m]
            while left > 1e-12 and k < len(urns):
                poured = min(left, 1 - sum(urns[k].values()))
                if poured > 0:
                    urns[k][m] = urns[k].get(m, 0) + poured
                left -= poured
                if left > 1e-12:
                    k += 1

    def pick(self, urns, rng, pi):
        found = {}
        for urn in urns:
            p = [urn.get(m, 0) if m not in found else 0 for m in range(self.M)]
            p = [x / sum(p) for x in p]
            [m] = rng.choice(self.M, 1, replace=False, p=p)
            found[int(m)] = self.N[m] / pi[m]
        return found


class ClustersBySize(Clusters):
    def draw(self, t, n):
        pi = self.inclusion(n)
        urns = [{} for _ in range(n)]
        self.fill(urns, sorted(range(self.M), key=lambda m: -self.N[m]), pi)
        return self.pick(urns, self.streams("clusters by size", t), pi)


class ClustersBySimilarity(Clusters):
    def draw(self, t, n):
        pi = self.inclusion(n)
        E = sorted(self.turns)
        groups = [[m] for m in E]
        gradients = [self.turns[m]["gradient"] for m in E]
        for a, b in ward([[angle(g, h) for h in gradients] for g in gradients]) if E else []:
            a, b = [E[i] for i in a], [E[i] for i in b]
            is_whole = sorted(a) in map(sorted, groups) and sorted(b) in map(sorted, groups)
            if is_whole and sum(pi[m] for m in a + b) <= 1 + 1e-9:
                groups = [c for c in groups if sorted(c) not in (sorted(a), sorted(b))] + [a + b]
        groups.sort(key=lambda group: (-round(sum(pi[m] for m in group), 9), min(group)))
        urns = [{m: pi[m] for m in group} for group in groups[:n]]
        urns += [{} for _ in range(n - len(urns))]
        others = [m for group in groups[n:] for m in sorted(group)]
        self.fill(urns, others + sorted(self.new(), key=lambda m: -self.N[m]), pi)
        return self.pick(urns, self.streams("clusters by similarity", t), pi)


class Oracle(Plain):
    def draw(self, t, n):
        candidates = self.uniform(t, 2 * n)
        S = []
        for _ in range(n):
            others = [m for m in candidates if m not in S]
            S.append(min(others, key=lambda m: self.distance([*S, m])))
        return dict.fromkeys(S, 1)

    def distance(self, S):
        labels = self.world.labels
        total = 0.0
        for c in range(CLASSES):
            ours = sum(labels[m][c] / sum(labels[m]) for m in S) / len(S)
            total += (ours - labels[:, c].sum() / labels.sum()) ** 2
        return total


PLAIN = {
    "uniform": Uniform,
    "size": Size,
    "round_robin": RoundRobin,
    "loss": Loss,
    "power_of_choice": PowerOfChoice,
    "oort": Oort,
    "hics": Hics,
    "fedcor": FedCor,
    "divfl": DivFL,
    "clusters_by_size": ClustersBySize,
    "clusters_by_similarity": ClustersBySimilarity,
    "oracle": Oracle,
}


def compare(name: str, seed: int = 0, rounds: int = ROUNDS) -> tuple[int, float]:
    """Returns the number of cells compared, and the largest difference of two normalised weights.

    The difference is infinite if a rule selects other clients than its plain program.
    """
    world = World(seed)
    fl = federation(world)
    plain = PLAIN[name](world)
    state = {"turns": {}, "uploads": 0}
    cells = 0
    largest = 0.0
    for t in range(rounds):
        n = 5 + t % 4
        fl.t = t
        state["theta"] = torch.tensor(world.theta(t))
        drawn = rules.RULES[name](fl, state, t, n)
        wanted = plain.draw(t, n)
        cells += 2 * n
        if drawn.clients.tolist() != sorted(wanted):
            return cells, math.inf
        weights = drawn.weights / drawn.weights.sum()
        for m, weight in zip(drawn.clients.tolist(), weights, strict=True):
            largest = max(largest, abs(weight - wanted[m] / sum(wanted.values())))
        turns = [world.turn(t, m) for m in drawn.clients]
        thetas = torch.tensor(np.array([theta for theta, _, _ in turns]))
        update = SimpleNamespace(clients=drawn.clients, gather_thetas=lambda thetas=thetas: thetas)
        update.length = np.array([length for _, length, _ in turns])
        update.train_loss = np.array([loss for _, _, loss in turns])
        rules.remember(fl, state, t, update)
        for m in drawn.clients.tolist():
            plain.note(t, m)
        state["uploads"] += n
    return cells, largest
