"""Lemma 5 and Equation 6: how far the clients drift apart in a round. Both are violated as printed.

    python -m theory.lemma5

V = mean_k ||theta_k - hat theta||^2 and bar F = mean_k f(theta_k) - f* before local step j; a prime marks the next.
`symbols` are (mu, L, alpha, B, M, sigma, Q) of the step. Proofs: [3] and [7] of PROOFS.md.
"""

import numpy as np

from theory import report
from theory.functions import require
from theory.one_step import random_states


def printed(symbols, V, F):
    """V' <= (1 - alpha mu/2)V + 2(3+2M)L alpha^2 bar F + alpha (alpha (3+2M) + B/mu) B + 3 alpha^2 sigma^2."""
    mu, L, alpha, B, M, sigma, Q = symbols
    return (
        (1 - alpha * mu / 2) * V
        + 2 * (3 + 2 * M) * L * alpha**2 * F
        + alpha * (alpha * (3 + 2 * M) + B / mu) * B  # bias
        + 3 * alpha**2 * sigma**2  # noise
    )


def mended(symbols, V, F):
    """The same with the sqrt B that its Cauchy-Schwarz needs: alpha B^2 / mu becomes 2 alpha B / mu."""
    mu, L, alpha, B, M, sigma, Q = symbols
    return printed(symbols, V, F) - alpha * B**2 / mu + 2 * alpha * B / mu


def factors(alpha, mu, j):
    """Two pairs (c, e) with V' <= c V + e B + noise at local step j: Young's inequality, alpha mu and 1/(j+1)."""
    if j == 0:  # V = 0
        return (0.0, alpha**2), (0.0, alpha**2)
    by_rate = 1 - alpha * mu, alpha / mu
    by_count = (1 + 1 / j) * (1 - alpha * mu) ** 2, (1 + j) * alpha**2
    return by_rate, by_count


def corrected(symbols, V, F, j):
    """V' <= c V + e B + alpha^2 (1 - 1/Q)(4ML bar F + 2MB + sigma^2), the better (c, e) of `factors`. [7]

    ValueError beyond alpha <= 2 / (mu + L) and without strong convexity.
    """
    mu, L, alpha, B, M, sigma, Q = symbols
    require(mu > 0, "mu > 0")
    require(alpha <= report.SLACK * 2 / (mu + L), "alpha <= 2 / (mu + L)")
    noise = (1 - 1 / Q) * (4 * M * L * F + 2 * M * B + sigma**2)
    by_rate, by_count = factors(alpha, mu, j)
    drift = min(by_rate[0] * V + by_rate[1] * B, by_count[0] * V + by_count[1] * B)
    return drift + alpha**2 * noise


def equation6_step(symbols, total, F):
    """A term of sum_j V <= sum_j 2 alpha L/Q prod_{l>=j} (1 - alpha_l mu/2) [2 alpha (3+2M)L Q bar F + ...].

    The rest of the bracket is (alpha (3+2M) + B/mu) B + 3 alpha sigma^2; `total` is the sum so far.
    """
    mu, L, alpha, B, M, sigma, Q = symbols
    bracket = (
        2 * alpha * (3 + 2 * M) * L * Q * F
        + (alpha * (3 + 2 * M) + B / mu) * B  # bias
        + 3 * alpha * sigma**2  # noise
    )
    return (1 - alpha * mu / 2) * (total + 2 * alpha * L / Q * bracket)


def counterexample(mu=0.1, L=1.0, alpha=1 / 12, B=1e-4, N=10, Q=4):
    """A round on f = mu theta^2 / 2, known to be L-smooth: half the clients are pushed to x, half to -x.

    Returns V: (N+1,), which grows like the square of the push, and the bounds on it, printed and corrected,
    then the bounds on sum_{j<N} V, printed as Equation 6 and corrected.
    """
    symbols = mu, L, alpha, B, 0.0, 0.0, Q
    x = np.sqrt(B) / mu * (1 - (1 - alpha * mu) ** np.arange(N + 1))  # x' = (1 - alpha mu) x + alpha sqrt B
    F = mu / 2 * x**2
    bound, fixed, equation6 = [0.0], [0.0], 0.0
    for j in range(N):
        bound.append(printed(symbols, bound[j], F[j]))
        fixed.append(corrected(symbols, fixed[j], F[j], j))
        equation6 = equation6_step(symbols, equation6, F[j])
    return x**2, np.array(bound), np.array(fixed), equation6, sum(fixed[:-1])


def check():
    """The counterexample, and random states, which stand for local step j = 3."""
    V, bound, fixed, equation6, fixed_sum = counterexample()
    run = bound[-1] / V[-1]
    ratios = []
    for x in random_states():
        given = x.symbols, x.V, x.F.mean()
        forms = [printed(*given), mended(*given), corrected(*given, j=3)]
        ratios.append([report.worst(form, x.next_V) for form in forms])
    worst = np.min(ratios, 0)
    note = f"{run:.3f} over a round on a common quadratic"
    yield report.row("Lemma 5", "violated", min(run, worst[0]), worst[1:].min(), note=note)
    total = V[:-1].sum()
    note = "a spurious 2aL/Q"
    yield report.row("Equation 6", "violated", equation6 / total, fixed_sum / total, note=note)


if __name__ == "__main__":
    report.show(check)
