"""Local SGD with biased gradients (supplement 2, Algorithm 3 and Assumption 1): exact moments, and simulation.

In "When Do Curricula Work in Federated Learning?" client k of Q steps along g_k = grad f(theta_k) + b_k + n_k with

    sum_k b_k = 0,   ||b_k||^2 <= B,   E n_k = 0,   E||n_k||^2 = M ||grad f(theta_k) + b_k||^2 + s^2   (Theorem 1's largest),

N = J + 1 times per round; then the server averages. B bounds the *squared* bias. All is float64, and nothing has a physical
unit: theta is a length, f an energy, alpha an inverse curvature, B and s^2 are squared gradients. theta* = 0 and f* = 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np


def require(condition, hypothesis):
    """ValueError naming the hypothesis unless the condition holds (everywhere, for arrays); NaN never holds."""
    if not (condition.all() if isinstance(condition, np.ndarray) else condition):
        raise ValueError(f"hypothesis fails: {hypothesis}")


@dataclass(frozen=True)
class Function:
    """A function on R^d with minimum 0 at the origin, and the constants that the theorems assume known.

    value: (..., d) -> (...).  gradient: (..., d) -> (..., d).  mu: strong convexity (0: none).  L: Lipschitz constant
    of the gradient.  G: bound on ||gradient||.  curvature: (d,) for a diagonal quadratic, else None.
    """

    value: Callable[[np.ndarray], np.ndarray]
    gradient: Callable[[np.ndarray], np.ndarray]
    mu: float
    L: float
    G: float = np.inf
    curvature: np.ndarray | None = None


def quadratic(curvature):
    """f(x) = 1/2 sum_i h_i x_i^2 with curvature h: (d,). ValueError unless every h_i > 0."""
    h = np.asarray(curvature, float)
    require(h > 0, "curvatures are positive")
    return Function(lambda x: (h * x**2).sum(-1) / 2, lambda x: h * x, mu=float(h.min()), L=float(h.max()), curvature=h)


def kinked(mu, L):
    """f(x) = sum_i L/2 max(x_i, 0)^2 + mu/2 min(x_i, 0)^2: its Hessian jumps at 0. ValueError unless 0 < mu <= L."""
    require(0 < mu <= L, "0 < mu <= L")
    return Function(lambda x: (np.where(x > 0, L, mu) * x**2).sum(-1) / 2, lambda x: np.where(x > 0, L, mu) * x, mu, L)


def bent(k):
    """f'(x) = x + k (sqrt(1 + x^2) - 1) on R: smooth, f''(0) = 1, f'''(0) = k. ValueError unless 0 <= k < 1."""
    require(0 <= k < 1, "0 <= k < 1")

    def value(x):
        return (x**2 / 2 + k * ((x * np.sqrt(1 + x**2) + np.arcsinh(x)) / 2 - x)).sum(-1)

    return Function(value, lambda x: x + k * (np.sqrt(1 + x**2) - 1), 1 - k, 1 + k)


def rational(d):
    """f(x) = sum_i x_i^2 / (1 + x_i^2): not convex; |f_i'| <= 9 / (8 sqrt 3), at x_i = 1 / sqrt 3, and f_i'' <= 2."""
    G = 9 * np.sqrt(d) / (8 * np.sqrt(3))
    return Function(lambda x: (x**2 / (1 + x**2)).sum(-1), lambda x: 2 * x / (1 + x**2) ** 2, 0.0, 2.0, G)


def ripple(d):
    """f(x) = sum_i 1 - cos x_i: not convex, minima at every multiple of 2 pi; |f_i'| <= 1 and |f_i''| <= 1."""
    return Function(lambda x: (1 - np.cos(x)).sum(-1), np.sin, 0.0, 1.0, np.sqrt(d))


def opposed(Q, d=1):
    """Zero-sum directions (Q, d) of norm 1, half the clients against the other half. ValueError for an odd Q."""
    require(Q >= 2 and Q % 2 == 0, "opposed biases need an even number of clients")
    return np.repeat([1.0, -1.0], Q // 2)[:, None] * np.full(d, d**-0.5)


def minority(Q):
    """Zero-sum directions (Q, 1), the longest of norm 1: one client is pushed up, the others down. ValueError for Q < 2."""
    require(Q >= 2, "a minority needs others")
    return np.append(-1.0, np.full(Q - 1, 1 / (Q - 1)))[:, None]


def zero_sum(rng, Q, d):
    """Random zero-sum directions (Q, d), the longest of norm 1; all zero for one client, as equation 3 demands."""
    directions = rng.standard_normal((Q, d))
    directions -= directions.mean(0)
    return directions / np.linalg.norm(directions, axis=1).max() if Q > 1 else np.zeros((1, d))


def schedule(order, rounds, N, mean=1.0, first=0.03, rng=None):
    """Bias bounds B^(t,j): (rounds, N), of the same mean for every order; B at the start is `first` of B at the end.

    order: 'client' grows from round to round; 'data' inside every round, with B^(t,J) = B^(t+1,0) as printed; 'anti' is
    'client' backwards; 'constant'; 'shuffled' is 'client' with its rounds permuted by `rng`. ValueError on another.
    """
    require(rounds >= 1 and N >= 1, "at least one round of one step")
    require(0 <= mean < np.inf and 0 <= first <= 1, "mean >= 0 and 0 <= first <= 1")
    t, j = np.arange(rounds)[:, None], np.arange(N)[None, :]
    client = t + 0.0 * j
    paths = {"client": client, "data": t * (N - 1.0) + j, "anti": client[::-1], "constant": 0 * client}
    paths |= {"shuffled": rng.permutation(client)} if rng else {}
    require(order in paths, f"order {order!r} is client, data, anti, constant or, with a generator, shuffled")
    path = paths[order]
    if np.ptp(path) == 0:  # nothing grows: 'constant', one round, or 'data' with one local step
        return np.full((rounds, N), float(mean))
    B = first + (1 - first) * path / path.max()
    return mean * B / B.mean()


def diminishing_steps(rounds, N, c, offset):
    """alpha of local step i = t N + j (counted over all rounds) is c / (i + offset): (rounds, N)."""
    require(c > 0 and offset > 0, "c > 0 and offset > 0")
    return c / (np.arange(rounds * N).reshape(rounds, N) + offset)


@dataclass
class Problem:
    """One instance of Algorithm 3, all Q clients in every round; ValueError where its numbers contradict Assumption 1.

    theta0: (d,).  steps: alpha^(t,j), (T+1, N): Algorithm 3 prints t = 0..T, while theta^(T,0) has seen rounds 0..T-1.
    B: the bound on ||b_k||^2, a number or up to (T+1, N).  directions: zero-sum u_k no longer than 1, (Q, d), or (N, Q, d)
    where they differ from step to step; b_k = sqrt(B) u_k, and with `moving` sqrt(B) u_k sign(theta_k - average).
    M, s: the noise. T, N, Q and biases: (T+1, N, Q, d) follow, and mean_B = mean_k ||b_k||^2: (T+1, N).
    """

    f: Function
    theta0: np.ndarray
    steps: np.ndarray
    B: np.ndarray
    directions: np.ndarray
    M: float = 0.0
    s: float = 0.0
    moving: bool = False

    def __post_init__(self):
        self.theta0, self.steps, B = (np.asarray(x, float) for x in (self.theta0, self.steps, self.B))
        require(self.theta0.ndim == 1 and np.isfinite(self.theta0), "theta0 is a finite vector")
        require(self.steps.ndim == 2 and self.steps.size, "steps are (T+1, N), at least one round of one step")
        require(np.isfinite(self.steps) & (self.steps > 0), "steps are positive")
        require(np.isfinite(B) & (B >= 0), "B >= 0")
        require(0 <= self.M < np.inf and 0 <= self.s < np.inf, "M >= 0 and s >= 0")
        u = np.asarray(self.directions)
        require(u.ndim > 1 and u.shape[-1] == len(self.theta0), "directions are (Q, d)")
        self.T, self.N, self.Q = len(self.steps) - 1, self.steps.shape[1], u.shape[-2]
        require(np.linalg.norm(u, axis=-1) <= 1 + 1e-12, "||b_k||^2 <= B")
        require(np.linalg.norm(u.sum(-2), axis=-1) <= 1e-12 * self.Q, "the biases sum to zero")
        self.B = np.broadcast_to(B, self.steps.shape)
        self.biases = np.sqrt(self.B)[:, :, None, None] * np.broadcast_to(u, (*self.steps.shape, self.Q, u.shape[-1]))
        self.mean_B = (self.biases**2).sum(-1).mean(-1)

    def bias(self, t, j, theta):
        """b_k^(t,j) for clients at theta: (R, Q, d); (Q, d) where it does not depend on theta."""
        side = np.where(theta >= theta.mean(-2, keepdims=True), 1.0, -1.0) if self.moving else 1.0
        return self.biases[t, j] * side

    def at(self, t, j):
        """What a bound reads at local step (t, j), with the names of State. ValueError for biases that move."""
        require(not self.moving, "the biases do not depend on theta")
        at = {"a": self.steps[t, j], "B": self.B[t, j], "mean_B": self.mean_B[t, j]}
        return SimpleNamespace(f=self.f, M=self.M, s=self.s, Q=self.Q, **at)


class State:
    """The clients before one local step, the averages in which the lemmas speak, and exact expectations after it.

    theta: (Q, d).  b: (Q, d), ||b_k||^2 <= B.  a: the step.  M, s: the noise, independent across clients.  g is the mean of
    the clients' gradients g_k, bar g the mean of grad f(theta_k). ValueError where the arguments contradict this.
    """

    def __init__(self, f, theta, b, a, B, M=0.0, s=0.0):
        require(np.shape(b) == np.shape(theta), "biases are (Q, d), like theta")
        require(a > 0 and M >= 0 and s >= 0, "alpha > 0, M >= 0 and s >= 0")
        require((b**2).sum(1) <= B * (1 + 1e-12), "||b_k||^2 <= B")
        self.f, self.theta, self.b, self.a, self.B, self.M, self.s, self.Q = f, theta, b, a, B, M, s, len(theta)
        gradient = f.gradient(theta)
        g = gradient + b  # E g_k: (Q, d)
        v = M * (g**2).sum(1) + s**2  # E||n_k||^2: (Q,)
        self.average, self.bar_g = theta.mean(0), gradient.mean(0)  # hat theta and bar g: (d,)
        self.E = float(self.average @ self.average)  # ||hat theta - theta*||^2
        self.V, self.F = dispersion(theta), f.value(theta)  # mean_k ||theta_k - hat theta||^2, f(theta_k) - f*: (Q,)
        self.mean_B = float((b**2).sum(1).mean())  # mean_k ||b_k||^2
        self.second = (g**2).sum(1) + v  # E||g_k||^2: (Q,)
        self.off_mean = float((b.mean(0) ** 2).sum() + v.mean() / self.Q)  # E||g - bar g||^2
        self.spread = dispersion(g) + (1 - 1 / self.Q) * v.mean()  # mean_k E||g_k - g||^2
        self.next_E = float(((self.average - a * g.mean(0)) ** 2).sum() + a**2 * v.mean() / self.Q)
        self.next_V = dispersion(theta - a * g) + a**2 * (1 - 1 / self.Q) * v.mean()


def dispersion(x):
    """mean_k ||x_k - average||^2 of x: (..., Q, d), averaged over what stands before."""
    return float(((x - x.mean(-2, keepdims=True)) ** 2).sum(-1).mean())


def moments(problem, replicas=None, seed=0):
    """Second moments: exact, or means of `replicas` runs with Gaussian noise, isotropic and independent across clients.

    .E: (T+1,), E||theta^(t,0) - theta*||^2.  .gradient: (T+1,), E||grad f(theta^(t,0))||^2.  .F: (T, N), E mean_k f(theta_k).
    .V: (T, N+1), E mean_k ||theta_k^(t,j) - hat theta^(t,j)||^2, the last just before the server averages.

    Without noise one run is exact. With noise, on a diagonal quadratic, theta_k is its mean m_k plus noise from earlier
    rounds, common to all clients and of variance u, plus noise of this round, its own and of variance w_k. Per coordinate,
    with c = 1 - a h,
        m_k <- c m_k - a b_k,   u <- c^2 u,   w_k <- c^2 w_k + a^2 v_k / d,   v_k = M sum_i E(h_i theta_ki + b_ki)^2 + s^2,
    and when the server averages, u <- u + mean_k w_k / Q. ValueError for exact moments of noise on any other function or
    under biases that depend on theta, for fewer than one replica, and where a run overflows.
    """
    f, Q, N, T, d = problem.f, problem.Q, problem.N, problem.T, len(problem.theta0)
    exact, noisy = replicas is None, problem.M > 0 or problem.s > 0
    require(exact or replicas >= 1, "at least one replica")
    able = f.curvature is not None and not problem.moving
    require(able or not (exact and noisy), "exact moments of noise need a quadratic and biases that do not depend on theta")
    h, rng = f.curvature if able else np.zeros(d), np.random.default_rng(seed)
    theta, u = np.broadcast_to(problem.theta0, (replicas or 1, 1, d)), np.zeros(d)
    E, gradient, V, F = np.zeros(T + 1), np.zeros(T + 1), np.zeros((T, N + 1)), np.zeros((T, N))
    for t in range(T + 1):
        E[t], gradient[t] = (theta**2).sum(-1).mean() + u.sum(), (f.gradient(theta) ** 2).sum(-1).mean() + h**2 @ u
        if t == T:
            break
        theta, w = np.repeat(theta, Q, 1), np.zeros((Q, d))  # m_k, or every sampled theta_k: (R, Q, d)
        for j in range(N):
            a, g = problem.steps[t, j], f.gradient(theta) + problem.bias(t, j, theta)
            F[t, j] = f.value(theta).mean() + h @ (u + w.sum(0) / Q) / 2
            if noisy:
                v = problem.M * (g**2 + h**2 * (u + w)).sum(-1, keepdims=True) + problem.s**2  # (R, Q, 1)
                if exact:
                    u, w = (1 - a * h) ** 2 * u, (1 - a * h) ** 2 * w + a**2 * v[0] / d
                else:
                    g = g + np.sqrt(v / d) * rng.standard_normal(g.shape)
            theta = theta - a * g
            V[t, j + 1] = dispersion(theta) + (1 - 1 / Q) * w.sum() / Q
        theta, u = theta.mean(1, keepdims=True), u + w.sum(0) / Q**2
    require(np.isfinite(E), "the moments stay finite: smaller steps")
    return SimpleNamespace(E=E, gradient=gradient, V=V, F=F)
