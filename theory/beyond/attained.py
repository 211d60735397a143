"""Problems that attain the sharp floor (L-mu)^2/(4 mu L) V: its constant cannot be improved.

    python -m theory.beyond.attained

In the first local step of a round, one of 1 + L/mu clients is pushed to the steep side of the kink.
bound / measured tends to 1 as N grows and alpha N L tends to 0. PROOFS.md [5].
"""

import numpy as np

from theory.beyond.floor import draw_sweep, floors
from theory.beyond.ordering import minority
from theory.functions import kinked, require
from theory.problem import Problem, kinked_problem
from theory.report import label_ticks, listed, row, show

RUNS = (  # L/mu, alpha, N
    (10, 1 / 12, 10),
    (10, 0.01, 30),
    (10, 0.001, 100),
    (100, 0.01, 30),
)


def extremal(kappa, alpha, N, B=1e-5):
    """The problem for L = 1, mu = 1/kappa and mean ||b_k||^2 = B. It starts at the floor.

    ValueError unless kappa = L/mu is above 1.
    """
    require(kappa > 1, "L > mu")
    mu = 1 / kappa
    f = kinked(mu, 1.0)
    rounds = int(5 * kappa / (alpha * N)) + 2  # long enough to forget the start
    steps = np.full((rounds, N), alpha)
    start = -(1 - mu) / (2 * np.sqrt(mu)) * alpha * np.sqrt(B)
    largest = kappa * B * np.eye(1, N)  # in the first local step, then 0
    directions = minority(kappa + 1)
    return Problem(f, [start], steps, largest, directions)


def check():
    """Try the extremal problems of RUNS."""
    ratios = []
    for kappa, alpha, N in RUNS:
        E, lemmas, tight = floors(extremal(kappa, alpha, N))
        ratios.append((lemmas / E, tight / E))
    lemmas, tight = np.transpose(ratios)
    note = f"four problems: {listed(tight, 3)} (lemmas {listed(lemmas, 1)})"
    name = "Sharp floor, extremal problem"
    yield row(name, "ours", "ours", min(lemmas), min(tight), note)


def draw(axes):
    """Plot the floor over the number of local steps, and bound / measured on extremal problems."""
    left, right = axes
    N = 2 ** np.arange(1, 7)
    few = N[:-1]
    draw_sweep(left, few, [kinked_problem(N=x, T=None) for x in few])
    left.set(xlabel="local steps N", title="the floor, kinked f: exactly 0 at N = 1")
    for kappa, mark in ((10, "o-"), (40, "s-")):
        found = [floors(extremal(kappa, 0.02, n)) for n in N]
        E, lemmas, tight = np.transpose(found)
        name = f"L/μ = {kappa}"
        right.loglog(N, lemmas / E, "C0" + mark, label=f"corrected by its lemmas, {name}")
        right.loglog(N, tight / E, "C2" + mark, label=f"sharp, {name}")
    right.axhline(1, color="gray", lw=0.8)
    right.set(xlabel="local steps N", ylabel="bound / measured floor")
    right.set(title="extremal problem: attained where 1 is reached")
    label_ticks(left, few)
    label_ticks(right, N)


if __name__ == "__main__":
    show(check, {"attained.png": draw})
