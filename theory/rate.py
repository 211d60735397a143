"""The ergodic rate of Theorem 2, 1/sqrt T: it survives bias and noise.

    python -m theory.rate

With alpha ~ 1/sqrt T the average of ||grad f||^2 times sqrt T is one number for all T.
"""

from functools import cache

import numpy as np

from theory.biases import opposed
from theory.functions import rational
from theory.local_sgd import simulate
from theory.problem import Problem
from theory.report import row, show, verdict
from theory.theorem2 import corrected, left_side, long_run, printed, weighted_left_side


@cache
def ergodic_rate(T):
    """avg ||grad f||^2 sqrt T with alpha = .3 / sqrt T; the same for all T: the 1/sqrt T rate."""
    steps = np.full((T, 5), 0.3 / np.sqrt(T))
    problem = Problem(rational(2), [1.75, 1.75], steps, 0.01, opposed(4, 2), sigma=0.3)
    _, gradient = simulate(problem, replicas=64)
    return gradient.mean() * np.sqrt(T)


def check():
    """From 30 to 3000 rounds."""
    rates = [ergodic_rate(T) for T in (30, 100, 300, 1000, 3000)]
    note = f"avg ||grad||^2 sqrt T = {min(rates):.3f} to {max(rates):.3f}, T = 30..3000"
    same = verdict(max(rates) < 1.05 * min(rates))
    yield row("Remark, the ergodic rate survives bias", "holds", same, note=note)


def draw(axes):
    """Both sides as T grows, and the rate."""
    sides, rate = axes
    rounds = np.unique(np.geomspace(1, 500, 30).astype(int))
    found = []
    for T in rounds:
        problem = long_run(T)
        _, gradient = simulate(problem)
        lefts = left_side(problem, gradient), weighted_left_side(problem, gradient)
        found.append([*lefts, printed(problem), corrected(problem)])
    left, weighted, bound, fixed = np.transpose(found)
    sides.loglog(rounds, left, "C3", label="printed: left side")
    sides.loglog(rounds, bound, "C3--", label="printed: right side")
    sides.loglog(rounds, weighted, "C0", label="corrected: left side, weighted by α")
    sides.loglog(rounds, fixed, "C0--", label="corrected: right side")
    sides.set(xlabel="rounds T", ylabel="the two sides of Theorem 2")
    sides.set(title="solid must stay below dashed")
    sides.set_ylim(3e-3, 3e4)  # room for the legend
    rounds = np.array([30, 100, 300, 1000, 3000])
    rates = np.array([ergodic_rate(T) for T in rounds])
    rate.loglog(rounds, rates / np.sqrt(rounds), "ko", label="measured, biased and noisy")
    law = rates.mean() / np.sqrt(rounds)
    rate.loglog(rounds, law, color="gray", label=f"{rates.mean():.2f} / √T")
    rate.set(xlabel="rounds T", ylabel="average ‖∇f‖²", title="steps α = 0.3 / √T")


if __name__ == "__main__":
    show(check, {"ergodic.png": draw})
