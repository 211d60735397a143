"""Lemma 5 and Equation 6: how far the clients drift apart. Both are violated.

    python -m theory.lemma5

V = mean_k ||theta_k - hat theta||^2 and F = mean_k f(theta_k) - f* before local step j. A prime
marks the next step. `symbols` are (mu, L, alpha, B, M, sigma, Q) of the step. Equation 6 should be
Lemma 5, summed over a round. But it multiplies bias and noise by 2 L / Q, and F by 2 L. And it has
one sum, although every step feeds V at all later steps. PROOFS.md [3] and [7].
"""

import numpy as np

from theory.functions import require
from theory.one_step import random_states
from theory.report import SLACK, row, show, worst


def printed(symbols, V, F):
    """V' <= (1 - alpha mu/2)V + 2(3+2M)L alpha^2 F + alpha (alpha (3+2M) + B/mu) B
    + 3 alpha^2 sigma^2.
    """
    mu, L, alpha, B, M, sigma, Q = symbols
    return (
        (1 - alpha * mu / 2) * V
        + 2 * (3 + 2 * M) * L * alpha**2 * F
        + alpha * (alpha * (3 + 2 * M) + B / mu) * B  # bias
        + 3 * alpha**2 * sigma**2  # noise
    )


def factors(alpha, mu, j):
    """Two pairs (c, e) with V' <= c V + e B + noise at local step j.

    They come from Young's inequality with alpha mu and with 1/(j+1).
    """
    if j == 0:  # V = 0
        return (0.0, alpha**2), (0.0, alpha**2)
    contraction = 1 - alpha * mu
    by_rate = contraction, alpha / mu
    by_count = (1 + 1 / j) * contraction**2, (1 + j) * alpha**2
    return by_rate, by_count


def corrected(symbols, V, F, j):
    """V' <= c V + e B + alpha^2 (1 - 1/Q)(4ML F + 2MB + sigma^2), with the better of `factors`.

    PROOFS.md [7]. ValueError unless alpha <= 2 / (mu + L) and mu > 0.
    """
    mu, L, alpha, B, M, sigma, Q = symbols
    require(mu > 0, "mu > 0")
    require(alpha <= SLACK * 2 / (mu + L), "alpha <= 2 / (mu + L)")
    by_rate, by_count = factors(alpha, mu, j)
    drift = min(
        by_rate[0] * V + by_rate[1] * B,
        by_count[0] * V + by_count[1] * B,
    )
    noise = (
        4 * M * L * F  # fed by the gradient
        + 2 * M * B  # fed by the bias
        + sigma**2
    )
    return drift + alpha**2 * (1 - 1 / Q) * noise


def counterexample(mu=0.1, L=1.0, alpha=1 / 12, B=1e-4, N=10, Q=4):
    """A round on f = mu theta^2 / 2: half of the clients go to x, half to -x.

    Only its L-smoothness is assumed to be known. Returns the symbols of every step, V = x^2: (N+1,)
    and F: (N+1,).
    """
    symbols = mu, L, alpha, B, 0.0, 0.0, Q
    contraction = (1 - alpha * mu) ** np.arange(N + 1)
    x = np.sqrt(B) / mu * (1 - contraction)
    return symbols, x**2, mu / 2 * x**2


def along_a_round(symbols, F):
    """The bounds on V through a round from V = 0, the paper's and the corrected: (N+1,) each."""
    bound = [0.0]
    fixed = [0.0]
    for j in range(len(F) - 1):
        bound.append(printed(symbols, bound[j], F[j]))
        fixed.append(corrected(symbols, fixed[j], F[j], j))
    return np.array(bound), np.array(fixed)


def ratios(x):
    """bound / measured at a State, as local step j = 3, for the paper's and the corrected form."""
    given = x.symbols, x.V, x.F.mean()
    return [
        worst(printed(*given), x.next_V),
        worst(corrected(*given, j=3), x.next_V),
    ]


def equation6(symbols, F):
    """sum_j V <= sum_j 2 alpha L/Q prod_{l>=j} (1 - alpha_l mu/2) [2 alpha (3+2M)L Q F
    + (alpha (3+2M) + B/mu) B + 3 alpha sigma^2], the same step and B at every j, F: (N,).
    """
    mu, L, alpha, B, M, sigma, Q = symbols
    total = 0.0
    for gap in F:
        bracket = (
            2 * alpha * (3 + 2 * M) * L * Q * gap
            + (alpha * (3 + 2 * M) + B / mu) * B  # bias
            + 3 * alpha * sigma**2  # noise
        )
        total += 2 * alpha * L / Q * bracket
        total *= 1 - alpha * mu / 2
    return total


def check():
    """Try the counterexample, random states, and the sum over the counterexample."""
    symbols, V, F = counterexample()
    bound, fixed = along_a_round(symbols, F)
    run = bound[-1] / V[-1]
    least = np.min([ratios(x) for x in random_states()], 0)
    note = f"{run:.3f} over a round on a common quadratic"
    yield row("Lemma 5", "violated", min(run, least[0]), least[1], note=note)

    measured = V[:-1].sum()
    ratio = equation6(symbols, F[:-1]) / measured
    note = "bias and noise times 2 L / Q; one sum is missing"
    yield row("Equation 6", "violated", ratio, fixed[:-1].sum() / measured, note=note)


if __name__ == "__main__":
    show(check)
