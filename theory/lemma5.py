"""Lemma 5 and Equation 6: how far the clients drift apart in a round. Both violated as printed.

    python -m theory.lemma5

V = mean_k ||theta_k - hat theta||^2 and F = mean_k f(theta_k) - f* before local step j; a prime
marks the next. `symbols` are (mu, L, alpha, B, M, sigma, Q) of the step. PROOFS.md [3] and [7].
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


def mended(symbols, V, F):
    """The same with the sqrt B that its Cauchy-Schwarz needs: 2 alpha B / mu, not alpha B^2 / mu."""
    mu, L, alpha, B, M, sigma, Q = symbols
    needed = 2 * alpha * B / mu
    return printed(symbols, V, F) - alpha * B**2 / mu + needed


def factors(alpha, mu, j):
    """Two (c, e) with V' <= c V + e B + noise at local step j: Young, with alpha mu or 1/(j+1)."""
    if j == 0:  # V = 0
        return (0.0, alpha**2), (0.0, alpha**2)
    kept = 1 - alpha * mu
    by_rate = kept, alpha / mu
    by_count = (1 + 1 / j) * kept**2, (1 + j) * alpha**2
    return by_rate, by_count


def corrected(symbols, V, F, j):
    """V' <= c V + e B + alpha^2 (1 - 1/Q)(4ML F + 2MB + sigma^2), the better of `factors`. [7]

    ValueError beyond alpha <= 2 / (mu + L) and without strong convexity.
    """
    mu, L, alpha, B, M, sigma, Q = symbols
    require(mu > 0, "mu > 0")
    require(alpha <= SLACK * 2 / (mu + L), "alpha <= 2 / (mu + L)")
    drift = min(c * V + e * B for c, e in factors(alpha, mu, j))
    noise = 4 * M * L * F + 2 * M * B + sigma**2
    return drift + alpha**2 * (1 - 1 / Q) * noise


def equation6(symbols, total, F):
    """sum_j V <= sum_j 2 alpha L/Q prod_{l>=j} (1 - alpha_l mu/2) [2 alpha (3+2M)L Q F
    + (alpha (3+2M) + B/mu) B + 3 alpha sigma^2], after one more j than in `total`.
    """
    mu, L, alpha, B, M, sigma, Q = symbols
    bracket = (
        2 * alpha * (3 + 2 * M) * L * Q * F
        + (alpha * (3 + 2 * M) + B / mu) * B  # bias
        + 3 * alpha * sigma**2  # noise
    )
    return (1 - alpha * mu / 2) * (total + 2 * alpha * L / Q * bracket)


def counterexample(mu=0.1, L=1.0, alpha=1 / 12, B=1e-4, N=10, Q=4):
    """A round on f = mu theta^2 / 2, known to be L-smooth: half the clients go to x, half to -x.

    Returns V: (N+1,), which is x^2; the bounds on it, printed and corrected; and Equation 6.
    """
    symbols = mu, L, alpha, B, 0.0, 0.0, Q
    x = np.sqrt(B) / mu * (1 - (1 - alpha * mu) ** np.arange(N + 1))
    F = mu / 2 * x**2
    bound = np.zeros(N + 1)
    fixed = np.zeros(N + 1)
    total = 0.0
    for j in range(N):
        bound[j + 1] = printed(symbols, bound[j], F[j])
        fixed[j + 1] = corrected(symbols, fixed[j], F[j], j)
        total = equation6(symbols, total, F[j])
    return x**2, bound, fixed, total


def ratios(x):
    """bound / measured at a State, which stands for local step j = 3: printed, mended, corrected."""
    F = x.F.mean()
    return [
        worst(printed(x.symbols, x.V, F), x.next_V),
        worst(mended(x.symbols, x.V, F), x.next_V),
        worst(corrected(x.symbols, x.V, F, j=3), x.next_V),
    ]


def check():
    """The counterexample, and random states."""
    V, bound, fixed, total = counterexample()
    run = bound[-1] / V[-1]
    least = np.min([ratios(x) for x in random_states()], 0)
    note = f"{run:.3f} over a round on a common quadratic"
    yield row("Lemma 5", "violated", min(run, least[0]), min(least[1:]), note=note)
    spread = V[:-1].sum()
    bounds = total / spread, fixed[:-1].sum() / spread
    yield row("Equation 6", "violated", *bounds, note="a spurious 2aL/Q")


if __name__ == "__main__":
    show(check)
