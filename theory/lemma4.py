"""Lemmas 3 and 4: how far one step brings the average. True, but Theorem 1's step is too long.

    python -m theory.lemma4

A State gives E = ||hat theta - theta*||^2, V = mean_k ||theta_k - hat theta||^2, F = f(theta_k) -
f*: (Q,) with mean bar F. A prime marks the next local step. Proofs: [2] of PROOFS.md.
"""

import numpy as np

from theory.functions import require
from theory.one_step import largest_steps, random_states
from theory.report import SLACK, row, show, worst


def lemma3(x):
    """||hat theta - alpha bar g||^2 <= E + 2 alpha (alpha L - 1/2) bar F - alpha mu (E + V)
    + 2 alpha L V; theta* = 0, and E + V is the mean of ||theta_k - theta*||^2.

    theta* = 0, and E + V is the mean of ||theta_k - theta*||^2.
    """
    mu, L, alpha, B, M, sigma, Q = x.symbols
    return (
        x.E
        + 2 * alpha * (alpha * L - 1 / 2) * x.F.mean()
        - alpha * mu * (x.E + x.V)
        + 2 * alpha * L * x.V
    )


def lemma4_printed(x):
    """E' <= (1 - alpha mu)E - alpha/2 (f(hat theta) - f*) + 2 alpha L V
    + alpha^2 [(3+2M)B + 3 sigma^2] / Q. ValueError beyond alpha <= 1 / (4 bar L).
    """
    mu, L, alpha, B, M, sigma, Q = x.symbols
    longest = largest_steps(L, M, Q)[1]
    require(alpha <= SLACK * longest, "alpha <= 1 / (4 bar L)")
    noise = (3 + 2 * M) * B + 3 * sigma**2
    return (1 - alpha * mu) * x.E - alpha / 2 * x.gap + 2 * alpha * L * x.V + alpha**2 * noise / Q


def lemma4(x):
    """E' <= (1 - alpha mu)E - alpha [1 - 2 alpha L (1 + 2M/Q)] bar F + 2 alpha L V
    + alpha^2 (2MB + sigma^2) / Q.
    """
    mu, L, alpha, B, M, sigma, Q = x.symbols
    gained = 1 - 2 * alpha * L * (1 + 2 * M / Q)
    noise = 2 * M * B + sigma**2
    return (
        (1 - alpha * mu) * x.E
        - alpha * gained * x.F.mean()
        + 2 * alpha * L * x.V
        + alpha**2 * noise / Q
    )


def ratios(x):
    """bound / measured at a State: Lemma 3, Lemma 4 printed, Lemma 4 corrected."""
    return [
        worst(lemma3(x), x.pulled),
        worst(lemma4_printed(x), x.next_E),
        worst(lemma4(x), x.next_E),
    ]


def check():
    """On random states; and Theorem 1's step against Lemma 4's, for Q up to 50 and M up to 10."""
    least = np.min([ratios(x) for x in random_states()], 0)
    yield row("Lemma 3", "holds", least[0])
    yield row("Lemma 4", "holds", least[1], least[2])
    Q = np.arange(1, 51)
    of_theorem1, of_lemma4 = largest_steps(1, np.arange(11), Q[:, None])
    ratio = (of_lemma4 / of_theorem1).min(1)
    short = Q[ratio > 1 - 1e-9]
    note = f"too long for Q = 1, {short[0] - 1}; corrected: Q >= {short[0]}"
    name = "Theorem 1's step within Lemma 4's"
    yield row(name, "violated", ratio.min(), ratio[short - 1].min(), note=note)


if __name__ == "__main__":
    show(check)
