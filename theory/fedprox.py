"""Supplement 2, two remarks: Lambda in [35] is not bounded; the decrease rho_t of FedProx [40].

    python -m theory.fedprox

On quadratics f_m. Lambda >= 1 grows as dist^-2 near theta*. PROOFS.md [11].
"""

import numpy as np

from theory.functions import require
from theory.report import row, show


def random_clients(rng, m=8, d=4):
    """(h, c: (m, d), q: (m,)) of f_m(x) = sum_i h_mi (x_i - c_mi)^2 / 2, sum q_m f_m least at 0."""
    q = rng.uniform(0.5, 1.5, m)
    h = rng.uniform(0.5, 2, (m, d))
    c = rng.standard_normal((m, d))
    c = c - (q @ (h * c)) / (q @ h)
    return h, c, q / q.sum()


def dissimilarity(h, c, q, theta):
    """Lambda = sum q_m ||grad f_m||^2 / ||sum q_m grad f_m||^2, and sum q_m grad f_m: (d,).

    ValueError where the latter is 0.
    """
    gradients = h * (theta - c)
    slope = q @ gradients
    require(slope @ slope > 0, "sum q_m grad f_m(theta) is not 0")
    mean_square = q @ (gradients**2).sum(1)
    return mean_square / (slope @ slope), slope


def proximal_round(h, c, q, theta, mu):
    """theta after an exact FedProx round: the mean of argmin_x f_m(x) + mu/2 ||x - theta||^2."""
    solved = (h * c + mu * theta) / (h + mu)  # (m, d)
    return q @ solved


def value(h, c, q, x):
    """f = sum q_m f_m at x: (d,)."""
    values = (h * (x - c) ** 2).sum(1) / 2
    return q @ values


def rho_printed(mu):
    """A round decreases f by rho ||grad f||^2; rho = 1/mu - O(B) O(gamma) O(1/mu), gamma = 0."""
    return 1 / mu


def rho(B, L, mu, gamma=0.0):
    """1/mu - gamma B/mu - L(1+gamma)B/mu^2 - L(1+gamma)^2 B^2/(2 mu^2), B^2 = Lambda. [11]"""
    require(L > 0 and mu > 0 and gamma >= 0, "L > 0, mu > 0 and gamma >= 0")
    inexact = (1 + gamma) * B
    return (
        1 / mu
        - gamma * B / mu  # the residual of the inexact solve
        - L * inexact / mu**2  # the gradient changes on the way
        - L * inexact**2 / (2 * mu**2)  # the curvature of f
    )


def ratios(rng):
    """decrease / rho ||grad f||^2 of an exact round, printed and corrected; inf for rho <= 0."""
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


def check():
    """Lambda along a ray towards theta*; the decrease of 2000 exact proximal rounds."""
    clients = random_clients(np.random.default_rng(0))
    distance = 10.0 ** -np.arange(7)
    Lambda = [dissimilarity(*clients, np.full(4, x / 2))[0] for x in distance]
    x = np.log(distance[3:])
    y = np.log(Lambda[3:])
    slope, _ = np.polyfit(x, y, 1)
    note = f"Lambda ~ dist^{slope:.2f} near theta*; least value seen {min(Lambda):.2f}"
    yield row("Remark, Lambda bounded by lambda", "violated", Lambda[0] / Lambda[-1], note=note)
    rng = np.random.default_rng(0)
    printed, fixed = np.min([ratios(rng) for _ in range(2000)], 0)
    note = "exact local solves, gamma = 0"
    yield row("Remark, FedProx rho_t", "violated", printed, fixed, note=note)


if __name__ == "__main__":
    show(check)
