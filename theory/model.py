"""What the theorems talk about: functions, zero-sum biases, bias schedules, step sizes, and a Problem made of them.

Supplement 2 of "When Do Curricula Work in Federated Learning?", Algorithm 3 and Assumption 1. Client k of Q steps along

    g_k^(t,j) = grad f(theta_k) + b_k^(t,j) + n_k,      sum_k b_k = 0,   ||b_k||^2 <= B^(t,j),   E n_k = 0,
    E||n_k||^2 = M ||grad f(theta_k) + b_k||^2 + s^2     (the largest noise that Theorem 1 allows),

N = J + 1 times per round; then the server averages. B bounds the *squared* bias. All arithmetic is float64, and nothing
has a physical unit: theta is a length, f an energy, alpha an inverse curvature, B and s^2 are squared gradients.
The numbers come out of `python -m theory.check`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


def require(condition, hypothesis):
    """ValueError naming the hypothesis unless the condition holds (everywhere, for arrays); NaN never holds."""
    if not np.all(condition):
        raise ValueError(f"hypothesis fails: {hypothesis}")


@dataclass(frozen=True)
class Function:
    """A function on R^d whose minimiser is the origin, with the constants that the theorems assume known.

    value: (..., d) -> (...).  gradient: (..., d) -> (..., d).  mu: strong convexity (0: none).  L: Lipschitz constant
    of the gradient.  minimum: f*.  G: bound on ||gradient||.  curvature: (d,) for a diagonal quadratic, else None.
    """

    value: Callable[[np.ndarray], np.ndarray]
    gradient: Callable[[np.ndarray], np.ndarray]
    mu: float
    L: float
    minimum: float = 0.0
    G: float = np.inf
    curvature: np.ndarray | None = None


def quadratic(curvature):
    """f(x) = 1/2 sum_i h_i x_i^2 with curvature h: (d,). ValueError unless every h_i > 0."""
    h = np.asarray(curvature, float)
    require(h > 0, "curvatures are positive")
    return Function(lambda x: (h * x**2).sum(-1) / 2, lambda x: h * x, mu=float(h.min()), L=float(h.max()), curvature=h)


def kinked(mu, L):
    """f(x) = sum_i L/2 max(x_i, 0)^2 + mu/2 min(x_i, 0)^2: its Hessian jumps at theta* = 0.

    ValueError unless 0 < mu <= L.
    """
    require(0 < mu <= L, "0 < mu <= L")

    def slope(x):
        return np.where(x > 0, L, mu)

    return Function(lambda x: (slope(x) * x**2).sum(-1) / 2, lambda x: slope(x) * x, mu=mu, L=L)


def rational(d):
    """f(x) = sum_i x_i^2 / (1 + x_i^2): not convex; |f_i'| <= 9 / (8 sqrt 3), at x_i = 1 / sqrt 3, and f_i'' <= 2."""
    return Function(
        lambda x: (x**2 / (1 + x**2)).sum(-1),
        lambda x: 2 * x / (1 + x**2) ** 2,
        mu=0.0,
        L=2.0,
        G=9 * np.sqrt(d) / (8 * np.sqrt(3)),
    )


def ripple(d):
    """f(x) = sum_i 1 - cos x_i: not convex, minima at every multiple of 2 pi; |f_i'| <= 1 and |f_i''| <= 1."""
    return Function(lambda x: (1 - np.cos(x)).sum(-1), np.sin, mu=0.0, L=1.0, G=np.sqrt(d))


@dataclass(frozen=True)
class Problem:
    """One instance of Algorithm 3 under Assumption 1.

    theta0: (d,).  steps: alpha^(t,j), (T+1, N): Algorithm 3 prints t = 0..T, while theta^(T,0) has seen rounds 0..T-1.
    biases: (T+1, N, Q, d), or a callable (t, j, theta (R, Q, d)) -> (R, Q, d) for biases that depend on theta.
    B: (T+1, N), the bound on ||b_k||^2.  Q: clients, all of them in every round.  M, s: noise, see the module.
    ValueError where the numbers contradict Assumption 1: shapes that do not fit, steps that are not positive, B, M or s
    negative, anything not finite, biases that do not sum to zero or are longer than B says (those that depend on theta
    cannot be looked at beforehand).
    """

    f: Function
    theta0: np.ndarray
    steps: np.ndarray
    biases: np.ndarray | Callable
    B: np.ndarray
    Q: int
    M: float = 0.0
    s: float = 0.0

    def __post_init__(self):
        require(np.ndim(self.theta0) == 1 and np.isfinite(self.theta0), "theta0 is a finite vector")
        require(np.ndim(self.steps) == 2 and np.size(self.steps), "steps are (T+1, N), at least one round of one step")
        require(np.isfinite(self.steps) & (np.asarray(self.steps) > 0), "steps are positive")
        require(np.shape(self.B) == np.shape(self.steps), "B has the shape of the steps")
        require(np.isfinite(self.B) & (np.asarray(self.B) >= 0), "B >= 0")
        require(0 <= self.M < np.inf and 0 <= self.s < np.inf, "M >= 0 and s >= 0")
        if callable(self.biases):
            return
        require(np.shape(self.biases) == (*self.steps.shape, self.Q, len(self.theta0)), "biases are (T+1, N, Q, d)")
        length = np.sqrt(self.B)
        require(np.linalg.norm(self.biases, axis=-1).T <= length.T * (1 + 1e-12), "||b_k||^2 <= B")
        require(np.linalg.norm(self.biases.sum(2), axis=-1) <= 1e-12 * self.Q * length, "the biases sum to zero")

    @property
    def T(self):
        """Rounds before theta^(T,0)."""
        return len(self.steps) - 1

    @property
    def N(self):
        """Local steps per round, J + 1."""
        return self.steps.shape[1]

    def bias(self, t, j, theta):
        """b_k^(t,j) at the clients' parameters theta: (R, Q, d) -> (Q, d) or (R, Q, d)."""
        return self.biases(t, j, theta) if callable(self.biases) else self.biases[t, j]


def make_problem(f, theta0, steps, B, directions, M=0.0, s=0.0):
    """A Problem with biases b_k^(t,j) = sqrt(B^(t,j)) u_k for zero-sum directions u: (Q, d), no longer than 1.

    theta0: (d,).  steps: (T+1, N).  B broadcasts to steps.  ValueError as in Problem.
    """
    steps, B = np.asarray(steps, float), np.broadcast_to(np.asarray(B, float), np.shape(steps))
    require(B >= 0, "B >= 0")
    biases = np.sqrt(B)[:, :, None, None] * directions
    return Problem(f, np.asarray(theta0, float), steps, biases, B, len(directions), M, s)


def opposed(Q, d=1):
    """Zero-sum directions (Q, d): half the clients push every coordinate up, half down, with norm 1. ValueError: odd Q."""
    if Q % 2 or Q < 2:
        raise ValueError(f"opposed biases need an even number of clients, not {Q}")
    return np.repeat([1.0, -1.0], Q // 2)[:, None] * np.full(d, d**-0.5)


def zero_sum(rng, Q, d):
    """Random zero-sum directions (Q, d), the longest of norm 1; all zero for one client, as equation 3 demands."""
    directions = rng.standard_normal((Q, d))
    directions -= directions.mean(0)
    return directions / np.linalg.norm(directions, axis=1).max() if Q > 1 else np.zeros((1, d))


@dataclass(frozen=True)
class Clients:
    """The clients' parameters theta: (Q, d) at one local step, and the averages in which the lemmas are stated."""

    f: Function
    theta: np.ndarray

    @property
    def average(self):
        """hat theta: (d,)."""
        return self.theta.mean(0)

    @property
    def E(self):
        """||hat theta - theta*||^2."""
        return float(self.average @ self.average)

    @property
    def V(self):
        """mean_k ||theta_k - hat theta||^2."""
        return float(((self.theta - self.average) ** 2).sum(1).mean())

    @property
    def gaps(self):
        """f(theta_k) - f*: (Q,)."""
        return self.f.value(self.theta) - self.f.minimum


def schedule(order, rounds, N, mean=1.0, first=0.03, rng=None):
    """Bias bounds B^(t,j): (rounds, N), with the same mean for every order, so also the same total.

    order: 'client' grows from round to round; 'data' grows inside every round, and B^(t,J) = B^(t+1,0) as printed;
    'anti' is 'client' backwards; 'constant'; 'shuffled' is 'client' with its rounds permuted by `rng`.
    first: B at the start over B at the end. ValueError on another order, an empty schedule, a mean below zero, and a first
    outside [0, 1].
    """
    require(rounds >= 1 and N >= 1, "at least one round of one step")
    require(0 <= mean < np.inf and 0 <= first <= 1, "mean >= 0 and 0 <= first <= 1")
    t, j = np.arange(rounds)[:, None], np.arange(N)[None, :]
    client = t + 0.0 * j
    paths = {
        "client": client,
        "data": t * (N - 1.0) + j,
        "anti": client[::-1],
        "shuffled": client if rng is None else rng.permutation(client),
        "constant": np.ones((rounds, N)),
    }
    if order not in paths or (order == "shuffled" and rng is None):
        raise ValueError(f"unknown order {order!r} (or 'shuffled' without a generator); one of {', '.join(paths)}")
    path = paths[order]
    if np.ptp(path) == 0:  # nothing grows: 'constant', one round, or 'data' with one local step
        return np.full((rounds, N), float(mean))
    B = first + (1 - first) * path / path.max()
    return mean * B / B.mean()


def diminishing_steps(rounds, N, c, offset):
    """alpha of local step i = t N + j (counted over all rounds) is c / (i + offset), offset > 0: (rounds, N)."""
    require(c > 0 and offset > 0, "c > 0 and offset > 0")
    return c / (np.arange(rounds * N).reshape(rounds, N) + offset)


def annealed_steps(rounds, N, c):
    """alpha^(t,j) = c / (t+1) (j+1)^(-1/4): (rounds, N), the step that the remark after Theorem 1 recommends."""
    return c / np.arange(1, rounds + 1)[:, None] * np.arange(1, N + 1) ** -0.25


def with_unrun_round(schedule):
    """(T, N) -> (T+1, N): repeats the last round, which Theorem 1 as printed reads and theta^(T,0) has not seen."""
    return np.concatenate([schedule, schedule[-1:]])
