"""Lemmas 1 and 2 and Equation 5: how large a noisy gradient is. True as printed, with room.

    python -m theory.lemma1

A State gives F = f(theta_k) - f*: (Q,); bar F is its mean over clients, g the clients' mean
gradient, bar g that of grad f(theta_k). Proofs: [2] of PROOFS.md.
"""

import numpy as np

from theory.functions import quadratic
from theory.one_step import State, random_states
from theory.report import row, show, worst


def lemma1_printed(x):
    """E||g_k||^2 <= 2(3+2M)L F + (3+2M)B + 3 sigma^2, for every client: (Q,)."""
    mu, L, alpha, B, M, sigma, Q = x.symbols
    return (
        2 * (3 + 2 * M) * L * x.F  # of the gradient
        + (3 + 2 * M) * B  # of the bias
        + 3 * sigma**2  # of the noise
    )


def lemma1(x):
    """E||g_k||^2 <= 4(1+M)L F + 2(1+M)B + sigma^2, for every client: (Q,)."""
    mu, L, alpha, B, M, sigma, Q = x.symbols
    return (
        4 * (1 + M) * L * x.F  # of the gradient
        + 2 * (1 + M) * B  # of the bias
        + sigma**2  # of the noise
    )


def lemma2_printed(x):
    """E||g - bar g||^2 <= (3+2M)/Q [2L bar F + B] + 3 sigma^2 / Q: Lemma 1 averaged, over Q."""
    return lemma1_printed(x).mean() / len(x.F)


def lemma2(x):
    """E||g - bar g||^2 <= (4ML bar F + 2MB + sigma^2) / Q, for noise independent across clients."""
    mu, L, alpha, B, M, sigma, Q = x.symbols
    return (
        4 * M * L * x.F.mean()  # noise that the gradient feeds
        + 2 * M * B  # noise that the bias feeds
        + sigma**2
    ) / Q


def equation5(x):
    """mean_k E||g_k - g||^2 <= 2(3+2M)L bar F + (3+2M)B + 3 sigma^2."""
    return lemma1_printed(x).mean()


def attained():
    """Lemma 1 is an equality at b_k = grad f(theta_k) = +-2, M = 3: E||g_k||^2 = (1 + M) 4^2."""
    theta = np.array([[2.0], [-2.0]])
    return State(quadratic([1.0]), theta, theta, alpha=0.01, B=4.0, M=3.0)


def only_noise(Q=12):
    """Clients at theta*, no bias, sigma = 1: a noise that all share has E||n||^2 = 1, not 1/Q."""
    nothing = np.zeros((Q, 1))
    return State(quadratic([1.0]), nothing, nothing, alpha=0.1, B=0.0, sigma=1.0)


def ratios(x):
    """bound / measured at a State: Lemma 1, printed and corrected, Lemma 2 the same, Equation 5."""
    return [
        worst(lemma1_printed(x), x.second),
        worst(lemma1(x), x.second),
        worst(lemma2_printed(x), x.off_mean),
        worst(lemma2(x), x.off_mean),
        worst(equation5(x), x.apart),
    ]


def check():
    """On random states, where Lemma 1 is attained, and where Lemma 2 goes wrong."""
    least = np.min([ratios(x) for x in random_states()], 0)
    equality = worst(lemma1(attained()), attained().second)
    fixed = min(least[1], equality)
    note = "corrected form attained at b = grad f"
    yield row("Lemma 1", "holds", least[0], fixed, note=note)

    first_line = 3 * 4 + 3 * 4 + 3 * 3 * 16  # 3||grad f||^2 + 3||b||^2 + 3M||grad f + b||^2 there
    printed = (3 + 2 * 3) * (4 + 4) / first_line
    with_6M = (3 + 6 * 3) * (4 + 4) / first_line
    name = "Lemma 1, second line of its proof"
    yield row(name, "violated", printed, with_6M, note="6M, not 2M")

    yield row("Lemma 2, independent noise", "holds", least[2], least[3])
    printed = lemma2_printed(only_noise())  # against E||n||^2 = 1
    undivided = 12 * lemma2(only_noise())
    note = "too small by Q/3, here Q = 12"
    yield row("Lemma 2, noise shared by clients", "violated", printed, undivided, note=note)
    yield row("Equation 5", "holds", least[4])


if __name__ == "__main__":
    show(check)
