"""Supplement 2, three remarks on known theorems: sigma_t in [39], Lambda in [35], rho_t of FedProx in [40].

    python -m theory.known_bounds

PROOFS.md [10] and [11].
"""

import numpy as np

from theory.functions import require
from theory.report import SLACK, row, show


def mean_gap(curvature, theta0, gamma, sigma):
    """mean_{t<T} E f(theta_t) - f* of SGD on sum_i h_i x_i^2 / 2, exact; sigma: (T+1,), the last unseen.

    The paper prints f(theta_T); [39, Theorem 5] is about this mean. h, theta0: (d,).
    """
    P = theta0**2  # E theta_t^2 per coordinate
    gaps = []
    for s in sigma[:-1]:
        gaps.append(curvature @ P / 2)
        P = (1 - gamma * curvature) ** 2 * P + gamma**2 * s**2 / len(P)
    return np.mean(gaps)


def sgd_printed(E_0, gamma, sigma):
    """E f - f* <= C_1 / (gamma T) + C_2 gamma sum_{t=0}^T sigma_t^2, here with C_1 = E_0, C_2 = 1, C_3 = 0."""
    T = len(sigma) - 1
    return E_0 / (gamma * T) + gamma * (sigma**2).sum()


def sgd_corrected(E_0, gamma, sigma, L):
    """mean_{t<T} E f - f* <= E_0 / (gamma T) + gamma (1/T) sum_{t<T} sigma_t^2. ValueError beyond 1/(2L). [10]"""
    T = len(sigma) - 1
    require(gamma > 0 and T >= 1, "gamma > 0 and T >= 1")
    require(gamma <= SLACK / (2 * L), "gamma <= 1 / (2L)")
    return E_0 / (gamma * T) + gamma * (sigma[:-1] ** 2).mean()


def random_clients(rng, m=8, d=4):
    """(h, c: (m, d), q: (m,)): f_m(x) = sum_i h_mi (x_i - c_mi)^2 / 2, h in [.5, 2], sum q_m f_m least at 0."""
    q = rng.uniform(0.5, 1.5, m)
    h = rng.uniform(0.5, 2, (m, d))
    c = rng.standard_normal((m, d))
    c = c - (q @ (h * c)) / (q @ h)
    return h, c, q / q.sum()


def dissimilarity(h, c, q, theta):
    """Lambda = sum q_m ||grad f_m||^2 / ||sum q_m grad f_m||^2 >= 1, and sum q_m grad f_m. ValueError where it is 0."""
    gradients = h * (theta - c)
    slope = q @ gradients
    require(slope @ slope > 0, "sum q_m grad f_m(theta) is not 0")
    return q @ (gradients**2).sum(1) / (slope @ slope), slope


def proximal_round(h, c, q, theta, mu):
    """theta after an exact FedProx round: the mean of argmin_x f_m(x) + mu/2 ||x - theta||^2."""
    return q @ ((h * c + mu * theta) / (h + mu))


def value(h, c, q, x):
    """f = sum q_m f_m at x: (d,)."""
    return q @ (h * (x - c) ** 2).sum(1) / 2


def rho_printed(mu):
    """A round decreases f by rho ||grad f||^2, rho = 1/mu - O(B) O(gamma) O(1/mu): at gamma = 0 it is 1/mu."""
    return 1 / mu


def rho(B, L, mu, gamma=0.0):
    """1/mu - gamma B/mu - L(1+gamma)B/mu^2 - L(1+gamma)^2 B^2/(2 mu^2), B^2 = Lambda(theta). [11]"""
    require(B >= 1 - 1e-12 and L > 0 and mu > 0 and gamma >= 0, "B >= 1, L > 0, mu > 0 and gamma >= 0")
    inexact = (1 + gamma) * B
    return 1 / mu - gamma * B / mu - L * inexact / mu**2 - L * inexact**2 / (2 * mu**2)


def check():
    """A sigma_t that grows; Lambda along a ray towards theta*; the decrease of exact proximal rounds."""
    yield sgd_row()
    distance = 10.0 ** -np.arange(7)
    clients = random_clients(np.random.default_rng(0))
    Lambda = np.array([dissimilarity(*clients, np.full(4, x / 2))[0] for x in distance])
    slope = np.polyfit(np.log(distance[3:]), np.log(Lambda[3:]), 1)[0]
    note = f"Lambda ~ dist^{slope:.2f} near theta*; least value seen {Lambda.min():.2f}"
    yield row("Remark, Lambda bounded by lambda", "violated", Lambda[0] / Lambda[-1], note=note)

    rng = np.random.default_rng(0)
    ratios = [fedprox_ratios(rng) for _ in range(2000)]
    note = "exact local solves, gamma = 0"
    yield row("Remark, FedProx rho_t", "violated", *np.min(ratios, 0), note=note)


def sgd_row():
    """sigma_t from .1 to 1 on curvatures .1 and 1; without 1/T the bound grows with T, and says nothing."""
    curvature = np.array([0.1, 1.0])
    ratios = []
    for T in (100, 1000):
        sigma = np.linspace(0.1, 1, T + 1)
        gap = mean_gap(curvature, np.ones(2), 0.2, sigma)
        bounds = sgd_printed(2, 0.2, sigma), sgd_corrected(2, 0.2, sigma, L=1)
        ratios.append(bounds / gap)
    (short, _), (long, _) = ratios
    note = f"the sum lacks 1/T: ratio {short:.0f} at T = 100, {long:.0f} at 1000"
    name = "Remark, sigma_t in [39]"
    return row(name, "vacuous", *np.min(ratios, 0), note=note, vacuous=long > 5 * short)


def fedprox_ratios(rng):
    """rho ||grad f||^2 promised, the decrease measured: decrease / promise, printed and corrected; inf for rho <= 0."""
    h, c, q = random_clients(rng)
    mu = 10 ** rng.uniform(0.5, 3)
    theta = rng.standard_normal(4) * 10 ** rng.uniform(-1, 1)
    Lambda, slope = dissimilarity(h, c, q, theta)
    moved = proximal_round(h, c, q, theta, mu)
    decrease = (value(h, c, q, theta) - value(h, c, q, moved)) / (slope @ slope)
    promised = rho(np.sqrt(Lambda), h.max(), mu)
    corrected = decrease / promised if promised > 0 else np.inf
    return decrease / rho_printed(mu), corrected


if __name__ == "__main__":
    show(check)
