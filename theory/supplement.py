"""Supplement 2: remarks on SGD [39] and on FedProx [35, 40].

    python -m theory.supplement

The bound on SGD lacks 1/T before a sum. It is true, but it grows with T. Lambda in [35] is not
bounded: on quadratics f_m it grows as dist^-2 near theta*. PROOFS.md [10] and [11].
"""

import numpy as np

from theory.functions import require
from theory.report import SLACK, row, show


def mean_gap(curvature, theta0, gamma, sigma):
    """The exact mean_{t<T} E f(theta_t) - f* of SGD on sum_i h_i x_i^2 / 2.

    curvature, theta0: h and the start, (d,).
    gamma: the learning rate.
    sigma: the noise of each step, (T+1,).

    The paper has f(theta_T), but [39, Theorem 5] is about this mean.
    """
    P = theta0**2  # E theta_t^2 per coordinate
    gaps = []
    for s in sigma[:-1]:
        gaps.append(curvature @ P / 2)
        contraction = (1 - gamma * curvature) ** 2
        P = contraction * P + gamma**2 * s**2 / len(P)
    return np.mean(gaps)


def sgd_printed(E_0, gamma, sigma):
    """E f - f* <= C_1 / (gamma T) + C_2 gamma sum_{t=0}^T sigma_t^2, C_1 = E_0, C_2 = 1.

    The paper's term C_3 gamma^2 sum_t sigma_t^2 comes from several local steps. Here is one.
    """
    T = len(sigma) - 1
    return E_0 / (gamma * T) + gamma * (sigma**2).sum()


def sgd_corrected(E_0, gamma, sigma, L):
    """mean_{t<T} E f - f* <= E_0 / (gamma T) + gamma (1/T) sum_{t<T} sigma_t^2.

    PROOFS.md [10]. ValueError unless 0 < gamma <= 1 / (2L) and T >= 1.
    """
    T = len(sigma) - 1
    require(gamma > 0 and T >= 1, "gamma > 0 and T >= 1")
    require(gamma <= SLACK / (2 * L), "gamma <= 1 / (2L)")
    return E_0 / (gamma * T) + gamma * (sigma[:-1] ** 2).mean()


def sgd_ratios(T):
    """bound / measured of the paper's and the corrected form.

    sigma_t grows from 0.1 to 1, and the curvatures are 0.1 and 1.
    """
    sigma = np.linspace(0.1, 1, T + 1)
    curvature = np.array([0.1, 1.0])
    gap = mean_gap(curvature, np.ones(2), 0.2, sigma)
    bounds = sgd_printed(2, 0.2, sigma), sgd_corrected(2, 0.2, sigma, L=1)
    return bounds / gap


def check_sgd():
    """Compare 100 and 1000 steps."""
    short, fixed = sgd_ratios(100)
    long, long_fixed = sgd_ratios(1000)
    grows = long > 5 * short
    note = f"the sum lacks 1/T: ratio {short:.0f} at T = 100, {long:.0f} at 1000"
    name = "Remark, sigma_t in [39]"
    yield row(name, "vacuous", short, min(fixed, long_fixed), note=note, vacuous=grows)


def random_clients(rng, m=8, d=4):
    """Random f_m(x) = sum_i h_mi (x_i - c_mi)^2 / 2, with sum_m q_m f_m least at 0.

    Returns h and c: (m, d), and q: (m,) with sum 1.
    """
    q = rng.uniform(0.5, 1.5, m)
    h = rng.uniform(0.5, 2, (m, d))
    c = rng.standard_normal((m, d))
    c = c - (q @ (h * c)) / (q @ h)
    return h, c, q / q.sum()


def dissimilarity(h, c, q, theta):
    """(Lambda, slope) with Lambda = sum_m q_m ||grad f_m||^2 / ||slope||^2.

    slope = sum_m q_m grad f_m: (d,). ValueError if it is 0.
    """
    gradients = h * (theta - c)
    slope = q @ gradients
    require(slope @ slope > 0, "sum q_m grad f_m(theta) is not 0")
    mean_square = q @ (gradients**2).sum(1)
    return mean_square / (slope @ slope), slope


def proximal_round(h, c, q, theta, mu):
    """theta after an exact FedProx round, the mean of argmin_x f_m(x) + mu/2 ||x - theta||^2."""
    solved = (h * c + mu * theta) / (h + mu)  # (m, d)
    return q @ solved


def value(h, c, q, x):
    """f = sum_m q_m f_m at x: (d,)."""
    values = (h * (x - c) ** 2).sum(1) / 2
    return q @ values


def rho_printed(mu):
    """The paper's rho = 1/mu - O(B) O(gamma) O(1/mu), for gamma = 0.

    A round decreases f by rho ||grad f||^2.
    """
    return 1 / mu


def rho(B, L, mu, gamma=0.0):
    """1/mu - gamma B/mu - L(1+gamma)B/mu^2 - L(1+gamma)^2 B^2/(2 mu^2), with B^2 = Lambda.

    PROOFS.md [11]. ValueError unless L > 0, mu > 0 and gamma >= 0.
    """
    require(L > 0 and mu > 0 and gamma >= 0, "L > 0, mu > 0 and gamma >= 0")
    inexact = (1 + gamma) * B
    return (
        1 / mu
        - gamma * B / mu  # the residual of the inexact solve
        - L * inexact / mu**2  # the gradient changes on the way
        - L * inexact**2 / (2 * mu**2)  # the curvature of f
    )


def fedprox_ratios(rng):
    """decrease / (rho ||grad f||^2) of an exact round, for the paper's rho and the corrected one.

    The ratio is inf for rho <= 0.
    """
    h, c, q = random_clients(rng)
    mu = 10 ** rng.uniform(0.5, 3)
    theta = rng.standard_normal(4)
    theta *= 10 ** rng.uniform(-1, 1)
    Lambda, slope = dissimilarity(h, c, q, theta)
    moved = proximal_round(h, c, q, theta, mu)
    decrease = value(h, c, q, theta) - value(h, c, q, moved)
    decrease = decrease / (slope @ slope)
    promised = rho(np.sqrt(Lambda), h.max(), mu)
    fixed = decrease / promised if promised > 0 else np.inf
    return decrease / rho_printed(mu), fixed


def check_fedprox():
    """Follow Lambda on a ray towards theta*, and try 2000 exact proximal rounds."""
    clients = random_clients(np.random.default_rng(0))
    distance = 10.0 ** -np.arange(7)
    Lambda = []
    for x in distance:
        theta = np.full(4, x / 2)
        found, _ = dissimilarity(*clients, theta)
        Lambda.append(found)
    x = np.log(distance[3:])
    y = np.log(Lambda[3:])
    slope, _ = np.polyfit(x, y, 1)
    note = f"Lambda ~ dist^{slope:.2f} near theta*; least value seen {min(Lambda):.2f}"
    yield row("Remark, Lambda bounded by lambda", "violated", Lambda[0] / Lambda[-1], note=note)
    rng = np.random.default_rng(0)
    printed, fixed = np.min([fedprox_ratios(rng) for _ in range(2000)], 0)
    note = "exact local solves, gamma = 0"
    yield row("Remark, FedProx rho_t", "violated", printed, fixed, note=note)


def check():
    """Check the remark on SGD, then the two on FedProx."""
    yield from check_sgd()
    yield from check_fedprox()


if __name__ == "__main__":
    show(check)
