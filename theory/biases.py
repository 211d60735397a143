"""The biases b_k = sqrt(B) u_k of Assumption 1, the orders of their sizes B, and the step sizes."""

import numpy as np

from theory.functions import require


def opposed(Q, d=1):
    """Zero-sum u: (Q, d) of norm 1, half the clients against the others. ValueError for odd Q."""
    require(Q >= 2 and Q % 2 == 0, "opposed biases need an even number of clients")
    signs = np.repeat([1.0, -1.0], Q // 2)
    return signs[:, None] * np.full(d, d**-0.5)


def minority(Q):
    """Zero-sum directions u: (Q, 1), one client pushed up, the others down."""
    u = np.full((Q, 1), 1 / (Q - 1))
    u[0] = -1.0  # a step goes against the bias
    return u


def zero_sum(rng, Q, d):
    """Random zero-sum directions u: (Q, d), the longest of norm 1; all 0 for one client."""
    u = rng.standard_normal((Q, d))
    u -= u.mean(0)
    if Q == 1:
        return np.zeros((1, d))
    return u / np.linalg.norm(u, axis=1).max()


def schedule(order, rounds, N, mean=1.0, first=0.03, rng=None):
    """Sizes B^(t,j): (rounds, N), of one mean; B at the start is `first` of B at the end.

    'client' grows from round to round; 'data' inside every round, with B^(t,J) = B^(t+1,0) as
    printed; 'anti' is 'client' backwards; 'shuffled' permutes its rounds by `rng`. ValueError on
    another order.
    """
    t = np.arange(rounds)[:, None]
    j = np.arange(N)
    client = t + np.zeros(N)
    paths = {
        "client": client,
        "data": t * (N - 1.0) + j,
        "anti": client[::-1],
        "constant": 0 * client,
    }
    if rng:
        paths["shuffled"] = rng.permutation(client)
    require(
        order in paths, f"order {order!r} is one of {list(paths)}; 'shuffled' takes a generator"
    )
    path = paths[order]
    if path.max() == 0:  # nothing grows: 'constant', one round, or 'data' with one local step
        return np.full((rounds, N), float(mean))
    B = first + (1 - first) * path / path.max()
    return mean * B / B.mean()


def diminishing_steps(rounds, N, c, offset):
    """alpha = c / (i + offset) at local step i = t N + j, counted over all rounds: (rounds, N)."""
    i = np.arange(rounds * N).reshape(rounds, N)
    return c / (i + offset)


def random_steps(rng, T, N, largest):
    """Constant, diminishing or arbitrary steps of at most `largest`, often reached: (T+1, N)."""
    shape = rng.integers(3)
    top = largest
    if rng.random() < 0.75:
        top = largest * rng.uniform(0.1, 1)
    if shape == 0:
        return np.full((T + 1, N), top)
    if shape == 1:
        return diminishing_steps(T + 1, N, 5 * top, 5)
    steps = np.ones((T + 1) * N)
    steps[1:] = rng.uniform(0.05, 1, len(steps) - 1)
    return top * steps.reshape(T + 1, N)


def random_biases(rng, T, N):
    """Sizes B: (T+1, N) of random order and mean, one time in ten all 0."""
    order = rng.choice(["client", "data", "anti", "constant", "shuffled"])
    mean = 10 ** rng.uniform(-4, 1) * (rng.random() < 0.9)
    first = rng.uniform(0.01, 1)
    return mean * schedule(order, T + 1, N, first=first, rng=rng)
