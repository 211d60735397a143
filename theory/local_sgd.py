"""Algorithm 3, local SGD with biased gradients: its exact error, and a simulation."""

import numpy as np

from theory.functions import require


def exact_error(problem):
    """E||theta^(t,0) - theta*||^2 for t = 0..T: (T+1,).

    ValueError for a problem with noise if f is not quadratic.
    """
    if problem.M == 0 and problem.sigma == 0:
        error, _ = simulate(problem)  # without noise, one run is exact
        return error
    return recursion(problem)


def simulate(problem, replicas=1, seed=0):
    """Means over `replicas` runs of ||theta^(t,0) - theta*||^2 and ||grad f(theta^(t,0))||^2.

    Returns two arrays (T+1,). The noise is Gaussian and isotropic. The noise of each client is
    independent of the others. ValueError if a run does not stay finite.
    """
    require(replicas >= 1, "at least one replica")
    f = problem.f
    rng = np.random.default_rng(seed)
    server = np.tile(problem.theta0, (replicas, 1, 1))
    visited = [server]
    for t in range(problem.T):
        theta = np.repeat(server, problem.Q, 1)  # (replicas, Q, d)
        for j in range(problem.N):
            g = f.gradient(theta) + problem.biases[t, j]
            g = g + noise(problem, g, rng)
            theta = theta - problem.steps[t, j] * g
        server = theta.mean(1, keepdims=True)
        visited.append(server)
    theta = np.array(visited)
    require(np.isfinite(theta), "the run stays finite: smaller steps")
    error = (theta**2).sum(-1)
    gradient = (f.gradient(theta) ** 2).sum(-1)
    return error.mean((1, 2)), gradient.mean((1, 2))


def noise(problem, g, rng):
    """n_k at the biased gradients g = grad f(theta_k) + b_k: (replicas, Q, d)."""
    if problem.M == 0 and problem.sigma == 0:
        return 0.0
    squared = (g**2).sum(-1, keepdims=True)
    variance = problem.M * squared + problem.sigma**2
    deviation = np.sqrt(variance / g.shape[-1])
    return deviation * rng.standard_normal(g.shape)


def recursion(problem):
    """The error on f = sum_i h_i x_i^2 / 2: (T+1,). theta_k is its mean m_k plus noise.

    The noise of earlier rounds is the same for all clients and has the variance u. The noise of
    this round is the client's own and has the variance w_k. A step multiplies both by
    (1 - alpha h)^2 and adds alpha^2 E||n_k||^2 / d to w_k. Averaging adds mean_k w_k / Q to u. All
    of this is per coordinate. ValueError unless f is a quadratic and the moments stay finite.
    """
    h = problem.f.curvature
    require(h is not None, "exact moments of noise need a quadratic")
    Q = problem.Q
    d = len(h)
    mean = problem.theta0
    u = np.zeros(d)
    error = [(mean**2).sum()]
    for t in range(problem.T):
        m = np.tile(mean, (Q, 1))
        w = np.zeros((Q, d))
        for j in range(problem.N):
            alpha = problem.steps[t, j]
            contraction = (1 - alpha * h) ** 2
            g = h * m + problem.biases[t, j]
            squared = (g**2 + h**2 * (u + w)).sum(1, keepdims=True)
            variance = problem.M * squared + problem.sigma**2
            m = m - alpha * g
            u = contraction * u
            w = contraction * w + alpha**2 * variance / d
        mean = m.mean(0)
        u = u + w.mean(0) / Q
        error.append((mean**2).sum() + u.sum())
    require(np.isfinite(error), "the moments stay finite: smaller steps")
    return np.array(error)
