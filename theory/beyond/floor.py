"""The sharp floor: the error that the bias leaves, on the kinked problem and on random states.

    python -m theory.beyond.floor

The floor has the order alpha^2 N^2 B, and Q does not divide it. sharp.py has the bounds,
attained.py the problems that attain them. Proofs: PROOFS.md [4] to [6].
"""

from contextlib import suppress

import numpy as np

from theory.beyond import sharp
from theory.local_sgd import exact_error
from theory.one_step import State, random_states
from theory.problem import kinked_problem
from theory.report import label_ticks, row, show
from theory.theorem1_proof import corrected, round_by_lemmas


def floors(problem):
    """[E at the end, the floor by the lemmas, the sharp floor].

    A floor is floor / (1 - contraction) of one round.
    """
    found = [exact_error(problem)[-1]]
    for one_round in (round_by_lemmas, sharp.round_bound):
        contraction, floor = one_round(problem, 0)
        found.append(floor / (1 - contraction))
    return found


def one_step_ratios():
    """bound / measured of one sharp step on random states.

    The weights p, w and e are random, and the steps reach 2/(L+mu). PROOFS.md [4].
    """
    rng = np.random.default_rng(0)
    ratios = []
    for state in random_states():
        mu, L, _, B, M, sigma, _ = state.symbols
        alpha = 2 / (L + mu) * rng.uniform(0.01, 1)
        M = M * (rng.random() < 0.5)
        x = State(state.f, state.theta, state.b, alpha, B, M, sigma)
        p, w, e = 10 ** rng.uniform([-1, -2, -2], 1)
        with suppress(ValueError):  # the step is too long for these weights
            young = (1 + e, 1 + 1 / e)
            on_E, on_V, rest = sharp.step(x.f, x.symbols, x.mean_B, p, w, young)
            bound = on_E * x.E + on_V * x.V + rest
            ratios.append(bound / (p * x.next_E + w * x.next_V))
    return ratios


def check():
    """Try one step on random states, and the kinked problem after 10 rounds and at the end."""
    ratios = one_step_ratios()
    note = f"{len(ratios)} random states"
    yield row("Sharp floor, one step", "ours", "ours", None, min(ratios), note)

    problem = kinked_problem()
    E = exact_error(problem)[-1]
    lemmas_10 = corrected(problem)[-1] / E
    sharp_10 = sharp.bound(problem)[-1] / E
    E, lemmas, tight = floors(kinked_problem(T=None))
    lemmas = lemmas / E
    tight = tight / E
    note = f"T = 10; at the end {tight:.2f} (lemmas {lemmas:.1f})"
    lemmas = min(lemmas, lemmas_10)
    tight = min(tight, sharp_10)
    yield row("Sharp floor, kinked f", "ours", "ours", lemmas, tight, note)


def draw(axes):
    """Plot the floor of the kinked problem over the bias and over the step."""
    left, right = axes
    B = 10.0 ** np.arange(-6, 1)
    draw_sweep(left, B, [kinked_problem(B=x, T=None) for x in B])
    label_ticks(left, B[::2])
    left.set(xlabel="bias bound B, a squared gradient", title="the floor: linear in B")
    alpha = 0.08 / 2.0 ** np.arange(5)
    draw_sweep(right, alpha, [kinked_problem(alpha=x, T=None) for x in alpha])
    label_ticks(right, alpha)
    right.set(xlabel="step α, an inverse curvature", title="the floor: quadratic in a small step")


def draw_sweep(axis, values, problems):
    """Plot the measured floor and its two bounds over the values that the problems differ in."""
    E, lemmas, tight = np.transpose([floors(problem) for problem in problems])
    axis.loglog(values, E, "ko-", label="measured")
    axis.loglog(values, lemmas, "C0s-", label="corrected by its lemmas")
    axis.loglog(values, tight, "C2d-", label="sharp")
    axis.set(ylabel="E‖θ − θ*‖² at the end")


if __name__ == "__main__":
    show(check, {"floor.png": draw})
