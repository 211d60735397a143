"""Equation 6: how far the clients drift apart, summed over a round. Violated as printed.

    python -m theory.equation6

It is Lemma 5 summed, with a factor 2 alpha L / Q that belongs to Lemma 4. PROOFS.md [7].
"""

from theory.lemma5 import along_a_round, counterexample
from theory.report import row, show


def printed(symbols, F):
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
    """On the counterexample of Lemma 5; corrected it is the sum of the corrected lemma."""
    symbols, V, F = counterexample()
    _, fixed = along_a_round(symbols, F)
    measured = V[:-1].sum()
    ratio = printed(symbols, F[:-1]) / measured
    note = "a spurious 2aL/Q"
    yield row("Equation 6", "violated", ratio, fixed[:-1].sum() / measured, note=note)


if __name__ == "__main__":
    show(check)
