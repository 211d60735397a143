"""Theorem 1 on random problems: 600 within its largest step and 600 beyond it.

python -m theory.beyond.theorem1_random
"""

from contextlib import suppress
from dataclasses import replace

import numpy as np

from theory.beyond import sharp
from theory.beyond.grid import GRID, random_biases, random_steps
from theory.functions import kinked, quadratic
from theory.local_sgd import exact_error
from theory.one_step import largest_steps
from theory.problem import Problem, kinked_problem, zero_sum
from theory.report import row, show, worst
from theory.theorem1 import printed
from theory.theorem1_proof import corrected, last_display


def random_problem(rng, beyond=False):
    """A random problem with a strongly convex f. Only quadratics have noise, with exact moments.

    The steps reach Theorem 1's limit. With `beyond` they reach 1/(2L(1+2M/Q)) and are halved until
    the lemmas allow them. The corners occur, too: one client, round, step or dimension, mu = L, no
    bias, no noise, a start at theta*.
    """
    T, N, Q, d = rng.integers(1, [9, 7, 9, 4])
    L = 10 ** rng.uniform(-1, 1)
    mu = 10 ** rng.uniform(-2, 0)
    M = 0.0
    sigma = 0.0
    smooth = rng.random() < 0.5
    if smooth:
        M = rng.choice([0.0, 0.5, 2.0])
        sigma = rng.choice([0.0, 0.3, 2.0])
        f = quadratic(L * np.append(rng.uniform(mu, 1, d - 1), 1.0))
    else:
        f = kinked(L * mu, L)
    distances = [0.0, 0.1, 3.0]
    if smooth and M == sigma == 0:  # from theta* a quadratic's E would be rounding alone
        distances = [0.1, 3.0]
    theta0 = rng.standard_normal(d) * rng.choice(distances)
    longest = largest_steps(f.L, M)[0]
    if beyond:
        longest = 1 / (2 * L * (1 + 2 * M / Q))
    steps = random_steps(rng, T, N, longest)
    B = random_biases(rng, T, N)
    problem = Problem(f, theta0, steps, B, zero_sum(rng, Q, d), M, sigma)
    while beyond:
        with suppress(ValueError):
            corrected(problem)
            return problem
        problem = replace(problem, steps=problem.steps / 2)
    return problem


def ratios(problem, beyond=False):
    """The least bound / E_T over T >= 1: the paper, last display, corrected, sharp, closed form.

    It is inf for a form that does not apply: beyond the paper's step, or without a closed form.
    """
    E = exact_error(problem)
    bounds = np.full((5, len(E)), np.inf)
    if not beyond:
        bounds[0] = printed(problem)
        bounds[1] = last_display(problem)
    bounds[2] = corrected(problem)
    bounds[3] = sharp.bound(problem)
    if problem.M == 0 and np.ptp(problem.steps) == 0:
        bounds[4] = sharp.closed_form(problem)
    return [worst(bound[1:], E[1:]) for bound in bounds]


def check():
    """Try all forms on random problems, and the last display on the kinked problem, too."""
    rng = np.random.default_rng(1)
    within = [ratios(random_problem(rng)) for _ in range(GRID)]
    longer = [ratios(random_problem(rng, beyond=True), beyond=True) for _ in range(GRID)]
    least = np.min(within + longer, 0)
    violated = np.mean(np.array(within)[:, 0] < 1)
    note = f"{GRID} + {GRID} problems, {violated:.1%} violated"
    yield row("Theorem 1, random grid", "violated", least[0], least[2], least[3], note)

    short = kinked_problem(1000)
    proof = last_display(short)[-1] / exact_error(short)[-1]
    note = "the same problems and Q = 1000 above"
    name = "Theorem 1 by its proof; closed form"
    yield row(name, "violated", min(proof, least[1]), None, least[4], note)


if __name__ == "__main__":
    show(check)
