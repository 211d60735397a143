"""Algorithm 3 three times: one exact step anywhere, exact second moments on diagonal quadratics, simulation elsewhere.

The last two return the same Moments. A simulation without noise (s = M = 0) is exact with one replica.
"""

from dataclasses import dataclass

import numpy as np

from theory.model import require


@dataclass(frozen=True)
class Moments:
    """Expectations along Algorithm 3, with hat theta the clients' average and theta* = 0.

    E: (T+1,), E||theta^(t,0) - theta*||^2.  gradient: (T+1,), E||grad f(theta^(t,0))||^2.
    V: (T, N+1), E mean_k ||theta_k^(t,j) - hat theta^(t,j)||^2, the last just before the server averages.
    F: (T, N), E mean_k f(theta_k^(t,j)) - f*.
    """

    E: np.ndarray
    gradient: np.ndarray
    V: np.ndarray
    F: np.ndarray


@dataclass(frozen=True)
class Step:
    """Exact expectations over the noise of one local step. g_k: client k's gradient, g: their mean, bar g: mean grad f.

    second: (Q,), E||g_k||^2.  off_mean: E||g - bar g||^2.  spread: mean_k E||g_k - g||^2.
    E, V: E||hat theta' - theta*||^2 and E mean_k ||theta_k' - hat theta'||^2 after the step.
    """

    second: np.ndarray
    off_mean: float
    spread: float
    E: float
    V: float


def one_step(clients, biases, a, M, s):
    """The Step from parameters clients.theta with biases (Q, d) and step a, for any f; the noise is independent.

    ValueError unless biases fit theta, a > 0, M >= 0 and s >= 0.
    """
    require(np.shape(biases) == clients.theta.shape, "biases are (Q, d), like theta")
    require(a > 0 and M >= 0 and s >= 0, "alpha > 0, M >= 0 and s >= 0")
    Q = len(biases)
    g = clients.f.gradient(clients.theta) + biases  # E g_k: (Q, d)
    squares = (g**2).sum(1)
    v = M * squares + s**2  # (Q,)
    deviations = clients.theta - clients.average

    def within(x):  # mean_k ||x_k - average||^2
        return float(((x - x.mean(0)) ** 2).sum(1).mean())

    return Step(
        second=squares + v,
        off_mean=float((biases.mean(0) ** 2).sum() + v.mean() / Q),
        spread=within(g) + (1 - 1 / Q) * v.mean(),
        E=float(((clients.average - a * g.mean(0)) ** 2).sum() + a**2 * v.mean() / Q),
        V=within(deviations - a * g) + a**2 * (1 - 1 / Q) * v.mean(),
    )


def exact_moments(problem):
    """Exact Moments on a diagonal quadratic, one coordinate and pair of clients at a time; no Monte Carlo.

    With c = 1 - a h, m_k = E theta_k and P_kl = E theta_k theta_l per coordinate, independence of the noise gives
        P_kl <- c^2 P_kl - a c (m_k b_l + b_k m_l) + a^2 b_k b_l + delta_kl a^2 v_k / d,
        m_k  <- c m_k - a b_k,      v_k = M sum_i E(h_i theta_ki + b_ki)^2 + s^2.
    ValueError on any other function, on biases that depend on theta, and where the moments overflow.
    """
    f, Q, N, T = problem.f, problem.Q, problem.N, problem.T
    if f.curvature is None or callable(problem.biases):
        raise ValueError("exact moments need a diagonal quadratic and biases that do not depend on theta")
    h, d, diagonal = f.curvature, len(f.curvature), np.arange(Q)
    m = np.repeat(problem.theta0[:, None], Q, 1)  # (d, Q)
    P = m[:, :, None] * m[:, None, :]  # (d, Q, Q)
    E, gradient, V, F = np.zeros(T + 1), np.zeros(T + 1), np.zeros((T, N + 1)), np.zeros((T, N))
    for t in range(T + 1):
        E[t], gradient[t] = P[:, 0, 0].sum(), h**2 @ P[:, 0, 0]
        if t == T:
            break
        for j in range(N):
            a, b = problem.steps[t, j], problem.biases[t, j].T  # (), (d, Q)
            squares = P[:, diagonal, diagonal]  # (d, Q)
            F[t, j] = h @ squares.mean(1) / 2
            second = h[:, None] ** 2 * squares + 2 * h[:, None] * m * b + b**2
            v = problem.M * second.sum(0) + problem.s**2  # (Q,)
            c = (1 - a * h)[:, None]
            cross = m[:, :, None] * b[:, None, :]
            P = c[:, :, None] ** 2 * P - a * c[:, :, None] * (cross + cross.transpose(0, 2, 1))
            P += a**2 * b[:, :, None] * b[:, None, :]
            P[:, diagonal, diagonal] += a**2 * v / d
            m = c * m - a * b
            V[t, j + 1] = P[:, diagonal, diagonal].mean(1).sum() - P.mean((1, 2)).sum()
        m = np.repeat(m.mean(1, keepdims=True), Q, 1)
        P = np.repeat(np.repeat(P.mean((1, 2), keepdims=True), Q, 1), Q, 2)
    require(np.isfinite(E), "the moments stay finite: smaller steps")
    return Moments(E, gradient, V, F)


def simulate(problem, replicas=1, seed=0):
    """Moments averaged over `replicas` runs with Gaussian noise, isotropic and independent across clients.

    ValueError for fewer than one replica, and where the run overflows.
    """
    require(replicas >= 1, "at least one replica")
    f, Q, N, T = problem.f, problem.Q, problem.N, problem.T
    rng, d = np.random.default_rng(seed), len(problem.theta0)
    noisy = problem.M > 0 or problem.s > 0
    server = np.broadcast_to(problem.theta0, (replicas, 1, d))
    E, gradient, V, F = np.zeros(T + 1), np.zeros(T + 1), np.zeros((T, N + 1)), np.zeros((T, N))
    for t in range(T + 1):
        E[t], gradient[t] = (server**2).sum(-1).mean(), (f.gradient(server) ** 2).sum(-1).mean()
        if t == T:
            break
        theta = np.repeat(server, Q, 1)  # (R, Q, d)
        for j in range(N):
            F[t, j] = f.value(theta).mean() - f.minimum
            g = f.gradient(theta) + problem.bias(t, j, theta)
            if noisy:
                v = problem.M * (g**2).sum(-1, keepdims=True) + problem.s**2
                g = g + np.sqrt(v / d) * rng.standard_normal(g.shape)
            theta = theta - problem.steps[t, j] * g
            V[t, j + 1] = ((theta - theta.mean(1, keepdims=True)) ** 2).sum(-1).mean()
        server = theta.mean(1, keepdims=True)
    require(np.isfinite(E), "the run stays finite: smaller steps")
    return Moments(E, gradient, V, F)
