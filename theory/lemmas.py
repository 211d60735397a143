"""Lemmas 1 to 4 and Equation 5: one local step. True as printed, with room; Theorem 1's step is too long for Lemma 4.

    python -m theory.lemmas

A State gives E = ||hat theta - theta*||^2, V = mean_k ||theta_k - hat theta||^2, F = f(theta_k) - f*: (Q,).
A prime marks the next local step; bar F is the mean over clients. Proofs: [2] of PROOFS.md.
"""

import numpy as np

from theory import report
from theory.functions import quadratic, require
from theory.one_step import State, largest_steps, random_states
from theory.report import row


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
    return 4 * (1 + M) * L * x.F + 2 * (1 + M) * B + sigma**2


def lemma2_printed(x):
    """E||g - bar g||^2 <= (3+2M)/Q [2L bar F + B] + 3 sigma^2 / Q, which is Lemma 1 averaged, over Q."""
    Q = len(x.F)
    return lemma1_printed(x).mean() / Q


def lemma2(x):
    """E||g - bar g||^2 <= (4ML bar F + 2MB + sigma^2) / Q, for noise independent across clients."""
    mu, L, alpha, B, M, sigma, Q = x.symbols
    return (4 * M * L * x.F.mean() + 2 * M * B + sigma**2) / Q


def lemma3(x):
    """||hat theta - alpha bar g - theta*||^2 <= E + 2 alpha [(alpha L - 1/2) bar F - mu/2 (E + V)] + 2 alpha L V."""
    mu, L, alpha, B, M, sigma, Q = x.symbols
    inside = (alpha * L - 1 / 2) * x.F.mean() - mu / 2 * (x.E + x.V)  # mean ||theta_k||^2 = E + V
    return x.E + 2 * alpha * inside + 2 * alpha * L * x.V


def lemma4_printed(x):
    """E' <= (1 - alpha mu)E - alpha/2 (f(hat theta) - f*) + 2 alpha L V + alpha^2 [(3+2M)B + 3 sigma^2] / Q.

    ValueError beyond alpha <= 1 / (4 bar L).
    """
    mu, L, alpha, B, M, sigma, Q = x.symbols
    longest = largest_steps(L, M, Q)[1]
    require(alpha <= report.SLACK * longest, "alpha <= 1 / (4 bar L)")
    return (
        (1 - alpha * mu) * x.E
        - alpha / 2 * x.gap
        + 2 * alpha * L * x.V
        + alpha**2 / Q * ((3 + 2 * M) * B + 3 * sigma**2)  # bias and noise
    )


def lemma4(x):
    """E' <= (1 - alpha mu)E + 2 alpha L V + alpha^2 (2MB + sigma^2)/Q - alpha [1 - 2 alpha L (1 + 2M/Q)] bar F."""
    mu, L, alpha, B, M, sigma, Q = x.symbols
    return (
        (1 - alpha * mu) * x.E
        - alpha * (1 - 2 * alpha * L * (1 + 2 * M / Q)) * x.F.mean()
        + 2 * alpha * L * x.V
        + alpha**2 / Q * (2 * M * B + sigma**2)  # noise, which the bias feeds
    )


def equation5(x):
    """mean_k E||g_k - g||^2 <= 2(3+2M)L bar F + (3+2M)B + 3 sigma^2."""
    return lemma1_printed(x).mean()


def bounds(x):
    """{statement: (measured, as printed and, where there is one, corrected)} at a State."""
    return {
        "Lemma 1": (x.second, lemma1_printed(x), lemma1(x)),
        "Lemma 2, independent noise": (x.off_mean, lemma2_printed(x), lemma2(x)),
        "Lemma 3": (x.pulled, lemma3(x)),
        "Lemma 4": (x.next_E, lemma4_printed(x), lemma4(x)),
        "Equation 5": (x.apart, equation5(x)),
    }


def attained():
    """Lemma 1 is an equality at b_k = grad f(theta_k) = +-2, M = 3: E||g_k||^2 = (1 + M) 4^2 = 64."""
    theta = np.array([[2.0], [-2.0]])
    return State(quadratic([1.0]), theta, theta, alpha=0.01, B=4.0, M=3.0)


def only_noise(Q=12):
    """Q clients at theta* without bias, sigma = 1: noise that all share has E||n||^2 = 1, not 1/Q."""
    return State(quadratic([1.0]), np.zeros((Q, 1)), np.zeros((Q, 1)), alpha=0.1, B=0.0, sigma=1.0)


def check():
    """On random states, where Lemma 1 is attained, and where Lemma 2 and Theorem 1's step go wrong."""
    tables = [bounds(x) for x in random_states()]
    worst = {name: worst_ratios([table[name] for table in tables]) for name in tables[0]}
    printed, fixed = worst["Lemma 1"]
    equality = lemma1(attained()) / attained().second
    note = "corrected form attained at b = grad f"
    yield row("Lemma 1", "holds", printed, min(fixed, *equality), note=note)
    norms = 3 * 4 + 3 * 4 + 3 * 3 * 16  # 3 ||grad f||^2 + 3 ||b||^2 + 3 M ||grad f + b||^2 there
    second_line = (3 + 2 * 3) * (4 + 4)
    with_6M = (3 + 6 * 3) * (4 + 4)
    name = "Lemma 1, second line of its proof"
    yield row(name, "violated", second_line / norms, with_6M / norms, note="6M, not 2M")

    name = "Lemma 2, independent noise"
    yield row(name, "holds", *worst[name])
    printed = lemma2_printed(only_noise())  # against E||n||^2 = 1
    undivided = 12 * lemma2(only_noise())
    note = "too small by Q/3, here Q = 12"
    yield row("Lemma 2, noise shared by clients", "violated", printed, undivided, note=note)
    yield row("Lemma 3", "holds", *worst["Lemma 3"])
    yield row("Lemma 4", "holds", *worst["Lemma 4"])

    Q = np.arange(1, 51)
    theorem1, lemma4 = largest_steps(1, np.arange(11), Q[:, None])
    ratio = (lemma4 / theorem1).min(1)
    note = "too long for Q = 1, 2; corrected: Q >= 3"
    name = "Theorem 1's step within Lemma 4's"
    yield row(name, "violated", ratio[:2].min(), ratio[2:].min(), note=note)
    yield row("Equation 5", "holds", *worst["Equation 5"])


def worst_ratios(found):
    """The least bound / measured of every form, over [(measured, form, ..), ..]."""
    ratios = [[report.worst(form, measured) for form in forms] for measured, *forms in found]
    return np.min(ratios, 0)


if __name__ == "__main__":
    report.show(check)
