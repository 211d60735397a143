"""Theorem 1, sharp: sharp_step.py over a round, from round to round, and in closed form.

V = mean_k ||theta_k - hat theta||^2, E = ||hat theta - theta*||^2. Here B is mean_k ||b_k||^2, no
larger than the printed maximum. Proofs, and where it is attained: PROOFS.md [3], [5] and [6].
"""

import numpy as np

from theory.functions import require
from theory.report import SLACK
from theory.sharp_step import step, young
from theory.theorem1_proof import round_after_round


def spread_path(problem, t):
    """r_j >= sqrt V^(t,j) for M = 0, from 0: (N,). [3]

    r' = sqrt{[(1 - alpha mu) r + alpha sqrt B]^2 + alpha^2 (1 - 1/Q) sigma^2}.
    """
    r = [0.0]
    private = (1 - 1 / problem.Q) * problem.sigma**2
    for j in range(problem.N - 1):
        alpha = problem.steps[t, j]
        shrunk = (1 - alpha * problem.f.mu) * r[j]
        pushed = alpha * np.sqrt(problem.mean_B[t, j])
        squared = (shrunk + pushed) ** 2 + alpha**2 * private
        r.append(np.sqrt(squared))
    return r


def round_bound(problem, t):
    """(contraction, floor): E^(t+1,0) <= contraction E^(t,0) + floor, `step` run back. [5]"""
    f = problem.f
    require(f.mu > 0, "f is strongly convex, mu > 0")
    r = spread_path(problem, t)
    p = 1.0
    w = 0.0
    floor = 0.0
    for j in reversed(range(problem.N)):
        alpha = problem.steps[t, j]
        mean_B = problem.mean_B[t, j]
        shrunk = (1 - alpha * f.mu) * r[j]
        pushed = alpha * np.sqrt(mean_B)
        if shrunk == 0 and problem.M > 0 and j > 0:
            shrunk = pushed  # e = 1: noise alone may have spread the clients
        symbols = problem.symbols(t, j)
        p, w, c = step(f, symbols, mean_B, p, w, young(shrunk, pushed))
        floor += c
    return p, floor


def bound(problem):
    """The sharp Theorem 1, round after round, for every T: (T+1,)."""
    return round_after_round(problem, round_bound)


def closed_form(problem):
    """E_T <= (1 - 2 alpha mu L/(L+mu))^(NT) E_0 + (L+mu)/(2 mu L) alpha sigma^2/Q
    + (L-mu)^2/(4 mu L) r^2, r = min(alpha (N-1), 1/mu) sqrt B + alpha sqrt(N-1) sigma: (T+1,). [6]

    ValueError unless M = 0 and alpha is one constant of at most 2/(L+mu).
    """
    mu, L, alpha, _, M, sigma, Q = problem.symbols(0, 0)
    N = problem.N
    require(M == 0 and mu > 0, "M = 0 and mu > 0")
    require(problem.steps == alpha, "one constant step")
    require(alpha <= SLACK * 2 / (L + mu), "alpha <= 2 / (L + mu)")
    contraction = 1 - 2 * alpha * mu * L / (L + mu)
    steps = N * np.arange(problem.T + 1)
    reach = min(alpha * (N - 1), 1 / mu)
    r = (
        reach * np.sqrt(problem.mean_B.max())  # pushed apart by the biases
        + alpha * np.sqrt(N - 1) * sigma  # and by the noise
    )
    return (
        contraction**steps * problem.E_0
        + (L + mu) / (2 * mu * L) * alpha * sigma**2 / Q
        + (L - mu) ** 2 / (4 * mu * L) * r**2  # the spread drives the average
    )
