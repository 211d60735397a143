"""Theorem 1, sharp: one joint step, a round, all rounds, and a closed form.

E = ||hat theta - theta*||^2 and V = mean_k ||theta_k - hat theta||^2. A prime marks the next local
step. Here B is mean_k ||b_k||^2, which is at most the maximum in the paper. `symbols` are
(mu, L, alpha, B, M, sigma, Q) of a step. The gradients that drive the average away also pull the
clients together, so both are bounded jointly. Proofs: PROOFS.md [3] to [6].
"""

import numpy as np

from theory.functions import require
from theory.report import SLACK
from theory.theorem1_proof import round_after_round


def weight(f, alpha, p, w, noise):
    """Phi = max over mu <= s <= L of w (1 - alpha s)^2 + 2 alpha p/(L+mu) (s - mu)(L - s)
    + 2 noise s^2.

    This is a parabola in s. PROOFS.md [4].
    """
    mu = f.mu
    L = f.L
    pull = 2 * alpha * p / (L + mu)
    bend = pull - w * alpha**2 - 2 * noise  # minus the coefficient of s^2
    slopes = np.array([mu, L])
    if bend > 0:
        top = pull * (L + mu) / 2 - alpha * w
        top = top / bend
        slopes = np.append(slopes, np.clip(top, mu, L))
    values = (
        w * (1 - alpha * slopes) ** 2  # what is left of the spread
        + pull * (slopes - mu) * (L - slopes)  # what it does to the average
        + 2 * noise * slopes**2  # the noise that it feeds
    )
    return values.max()


def step(f, symbols, mean_B, p, w, young):
    """(p', w', c) with p E' + w V' <= p' E + w' V + c.

    p, w: the weights of E and V after the step.
    young: (1 + e, 1 + 1/e).

    p' = p (1 - 2 alpha mu L/(L+mu)), w' = Phi at (1+e) w, and
    c = alpha^2 {w (1 + 1/e) B + n (2MB + sigma^2)} with n = p/Q + w (1 - 1/Q). PROOFS.md [4].
    ValueError if the step is too long.
    """
    mu, L, alpha, _, M, sigma, Q = symbols
    on_V, on_B = young
    n = p / Q + w * (1 - 1 / Q)
    longest = 2 * p / (L + mu)
    require(alpha * (p + n * M) <= SLACK * longest, "alpha (p + nM) <= 2p/(L+mu): smaller steps")
    new_p = p * (1 - 2 * alpha * mu * L / (L + mu))
    new_w = weight(f, alpha, p, w * on_V, n * alpha**2 * M)
    c = (
        w * on_B * mean_B  # the biases push the clients apart
        + n * (2 * M * mean_B + sigma**2)  # noise
    )
    return new_p, new_w, alpha**2 * c


def young(shrunk, pushed):
    """(1 + e, 1 + 1/e) at e = pushed / shrunk, which makes Young's inequality an equality."""
    if shrunk == 0 or pushed == 0:  # one of the two terms is 0
        return 1.0, 1.0
    return 1 + pushed / shrunk, 1 + shrunk / pushed


def spread_path(problem, t):
    """Bounds r_j >= sqrt V^(t,j) for M = 0, from r_0 = 0: (N,).

    r' = sqrt{[(1 - alpha mu) r + alpha sqrt B]^2 + alpha^2 (1 - 1/Q) sigma^2}. PROOFS.md [3].
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
    """(contraction, floor) with E^(t+1,0) <= contraction E^(t,0) + floor.

    The weights are computed backwards, with `step`, from the last local step. PROOFS.md [5].
    ValueError unless mu > 0 and the steps are short enough.
    """
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
    """The sharp Theorem 1, applied round after round, for every T: (T+1,). PROOFS.md [5]."""
    return round_after_round(problem, round_bound)


def closed_form(problem):
    """E_T <= (1 - 2 alpha mu L/(L+mu))^(NT) E_0 + (L+mu)/(2 mu L) alpha sigma^2/Q
    + (L-mu)^2/(4 mu L) r^2, with r = min(alpha (N-1), 1/mu) sqrt B + alpha sqrt(N-1) sigma.

    Returns the bound for every T: (T+1,). PROOFS.md [6]. ValueError unless M = 0, mu > 0 and alpha
    is one constant of at most 2/(L+mu).
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
