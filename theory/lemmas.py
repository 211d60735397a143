"""Lemmas 1 to 4 and Equation 5, on one local step. They are true, but not sharp.

    python -m theory.lemmas

x is a State, with E = ||hat theta - theta*||^2, V = mean_k ||theta_k - hat theta||^2 and
F = f(theta_k) - f*: (Q,). bar F is the mean of F over clients. g is the mean of the clients'
gradients g_k, and bar g the mean of grad f(theta_k). A prime marks the next local step. Each lemma
returns the right side of its inequality. Proofs: [2] of PROOFS.md.
"""

import numpy as np

from theory.functions import quadratic, require
from theory.one_step import State, largest_steps, random_states
from theory.report import SLACK, row, show, worst


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
    """E||g - bar g||^2 <= (3+2M)/Q [2L bar F + B] + 3 sigma^2 / Q: the mean of Lemma 1 over Q."""
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


def lemma3(x):
    """||hat theta - alpha bar g||^2 <= E + 2 alpha (alpha L - 1/2) bar F - alpha mu (E + V)
    + 2 alpha L V.

    Here theta* = 0, and E + V is the mean of ||theta_k - theta*||^2.
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
    + alpha^2 [(3+2M)B + 3 sigma^2] / Q.

    ValueError unless alpha <= 1 / (4 bar L).
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


def attained():
    """A State where Lemma 1 is an equality: b_k = grad f(theta_k) = +-2 and M = 3.

    There E||g_k||^2 = (1 + M) 4^2.
    """
    theta = np.array([[2.0], [-2.0]])
    return State(quadratic([1.0]), theta, theta, alpha=0.01, B=4.0, M=3.0)


def only_noise(Q=12):
    """Clients at theta* without bias, sigma = 1. One noise for all has E||n||^2 = 1, not 1/Q."""
    nothing = np.zeros((Q, 1))
    return State(quadratic([1.0]), nothing, nothing, alpha=0.1, B=0.0, sigma=1.0)


def ratios(x):
    """bound / measured at a State, for every form in the paper and its correction."""
    return {
        "Lemma 1": worst(lemma1_printed(x), x.second),
        "Lemma 1, corrected": worst(lemma1(x), x.second),
        "Lemma 2": worst(lemma2_printed(x), x.off_mean),
        "Lemma 2, corrected": worst(lemma2(x), x.off_mean),
        "Lemma 3": worst(lemma3(x), x.pulled),
        "Lemma 4": worst(lemma4_printed(x), x.next_E),
        "Lemma 4, corrected": worst(lemma4(x), x.next_E),
        "Equation 5": worst(equation5(x), x.apart),
    }


def check():
    """Try random states, the State that attains Lemma 1, and noise that clients have in common."""
    found = [ratios(x) for x in random_states()]
    least = {}
    for name in found[0]:
        least[name] = min(ratio[name] for ratio in found)
    equality = worst(lemma1(attained()), attained().second)
    fixed = min(least["Lemma 1, corrected"], equality)
    note = "the corrected form is attained at b = grad f"
    yield row("Lemma 1", "holds", least["Lemma 1"], fixed, note=note)

    first_line = 3 * 4 + 3 * 4 + 3 * 3 * 16  # 3||grad f||^2 + 3||b||^2 + 3M||grad f + b||^2 there
    printed = (3 + 2 * 3) * (4 + 4) / first_line
    with_6M = (3 + 6 * 3) * (4 + 4) / first_line
    name = "Lemma 1, second line of its proof"
    yield row(name, "violated", printed, with_6M, note="6M, not 2M")

    fixed = least["Lemma 2, corrected"]
    yield row("Lemma 2, independent noise", "holds", least["Lemma 2"], fixed)
    printed = lemma2_printed(only_noise())  # against E||n||^2 = 1
    undivided = 12 * lemma2(only_noise())
    note = "too small by Q/3, here Q = 12"
    yield row("Lemma 2, noise shared by clients", "violated", printed, undivided, note=note)
    yield row("Equation 5", "holds", least["Equation 5"])
    yield row("Lemma 3", "holds", least["Lemma 3"])
    yield row("Lemma 4", "holds", least["Lemma 4"], least["Lemma 4, corrected"])
    yield longest_step()


def longest_step():
    """Compare Theorem 1's largest step with Lemma 4's, for Q up to 50 and M up to 10."""
    Q = np.arange(1, 51)
    of_theorem1, of_lemma4 = largest_steps(1, np.arange(11), Q[:, None])
    ratio = (of_lemma4 / of_theorem1).min(1)
    short = Q[ratio > 1 - 1e-9]
    note = f"too long for Q = 1, {short[0] - 1}; corrected: Q >= {short[0]}"
    name = "Theorem 1's step within Lemma 4's"
    return row(name, "violated", ratio.min(), ratio[short - 1].min(), note=note)


if __name__ == "__main__":
    show(check)
