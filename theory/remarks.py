"""Two remarks after Theorem 1: the bias leaves a floor, and steps ~ 1/t balance a growing bias.

    python -m theory.remarks

On a quadratic with M = 0 the bias leaves nothing at all. The small steps work, but the paper's
bound cannot show it: its part for the bias grows like log T.
"""

import numpy as np

from theory.beyond import sharp
from theory.functions import kinked, quadratic
from theory.local_sgd import exact_error
from theory.problem import Problem, opposed
from theory.report import row, show, verdict, worst
from theory.theorem1 import printed_bias
from theory.theorem1_proof import corrected


def on_a_quadratic(B):
    """E over 20 rounds with curvatures 0.3 and 1 and sigma = 0.1. As M = 0, B has no effect."""
    steps = np.full((21, 5), 0.1)
    f = quadratic([0.3, 1.0])
    problem = Problem(f, [0.6, -0.8], steps, B, opposed(4, 2), sigma=0.1)
    return exact_error(problem)


def annealed(T=1000, N=10, c=1 / 12):
    """The steps of the remark: B = (j+1)^(1/4) and alpha = c / (t+1) (j+1)^(-1/4)."""
    quarter = np.arange(1, N + 1) ** 0.25
    t = np.arange(T + 1)[:, None]
    steps = c / (t + 1) / quarter
    return Problem(kinked(mu=0.1, L=1.0), [5.0], steps, quarter, opposed(4))


def check():
    """Compare E with and without the bias, and follow falling steps over 1000 rounds."""
    difference = on_a_quadratic(1.0) - on_a_quadratic(0.0)
    apart = np.abs(difference).max()
    note = f"M = 0 on a quadratic: E with and without b differ by {apart:.1g}"
    yield row("Remark, the bias leaves a floor", "violated", verdict(apart >= 1e-14), note=note)

    problem = annealed()
    E = exact_error(problem)
    total = printed_bias(problem)
    late = total[1000] - total[100]
    early = total[100] - total[10]
    works = E[1000] < E[100] < E[10] and abs(late / early - 1) < 0.1  # 1 for c log T
    by_lemmas = corrected(problem)
    tight = sharp.bound(problem)
    ratios = (
        worst(total[100:], E[100:]),
        worst(by_lemmas[1:], E[1:]),
        worst(tight[1:], E[1:]),
    )
    note = f"E {E[10]:.2g}, {E[1000]:.2g} at T = 10, 1000; "
    note += f"the bound's bias {total[10]:.1f}, {total[1000]:.1f}"
    name = "Remark, a ~ 1/t mitigates a growing B"
    yield row(name, "vacuous", *ratios, note, vacuous=works)


if __name__ == "__main__":
    show(check)
