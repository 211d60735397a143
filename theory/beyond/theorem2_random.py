"""Theorem 2 on 600 random problems: the paper's form, the last display, and the correction.

python -m theory.beyond.theorem2_random
"""

import numpy as np

from theory.beyond.grid import GRID, random_biases, random_steps
from theory.functions import rational, ripple
from theory.local_sgd import simulate
from theory.problem import Problem, zero_sum
from theory.report import row, show, worst
from theory.theorem2 import (
    client_length,
    corrected,
    earlier,
    hypotheses,
    last_display,
    left_side,
    printed,
    weighted_left_side,
)


def uncorrelated(problem):
    """weighted_left_side <= f_0 - f* + sum_t {L G sum_j alpha_j sum_{l<j} alpha_l r_l
    + L/2 [(sum_j alpha_j)^2 G^2 + sum_j alpha_j^2 sigma^2/Q]}.

    This would follow if later gradients were uncorrelated with earlier noise. We could neither
    prove nor refute it.
    """
    gap, L, G, sigma, Q = hypotheses(problem)
    alpha = problem.steps
    drift = earlier(alpha * client_length(problem))
    driven = (alpha.sum(1) ** 2).sum() * G**2
    noise = (alpha**2).sum() * sigma**2 / Q
    return gap + L * G * (alpha * drift).sum() + L / 2 * (driven + noise)


def ratios(problem, gradient):
    """bound / left side: the paper, last display, corrected, uncorrelated."""
    weighted = weighted_left_side(problem, gradient)
    return [
        worst(printed(problem), left_side(problem, gradient)),
        worst(last_display(problem), weighted),
        worst(corrected(problem), weighted),
        worst(uncorrelated(problem), weighted),
    ]


def random_problem(rng):
    """(problem, E||grad f||^2: (T+1,)) with a step of any length.

    The second is exact without noise, and the mean of 100 runs with noise.
    """
    T, N, Q, d = rng.integers(1, [16, 6, 9, 4])
    f = rng.choice([rational, ripple])(d)
    longest = 10 ** rng.uniform(-2, 0)
    steps = random_steps(rng, T, N, longest)
    sigma = rng.choice([0.0, 0.5, 3.0, 30.0])
    distance = rng.choice([0.0, 0.1, 3.0])  # at the minimum, near it, past the inflection
    theta0 = distance * rng.uniform(-1, 1, d)
    B = random_biases(rng, T, N)
    problem = Problem(f, theta0, steps, B, zero_sum(rng, Q, d), sigma=sigma)
    replicas = 100 if sigma else 1
    seed = int(rng.integers(2**32))
    _, gradient = simulate(problem, replicas, seed)
    return problem, gradient


def check():
    """Try all forms on the random problems."""
    rng = np.random.default_rng(2)
    found = np.array([ratios(*random_problem(rng)) for _ in range(GRID)])
    least = found.min(0)
    violated = np.mean(found[:, 0] < 1)
    note = f"{GRID} problems, {violated:.0%} violated; uncorrelated form {least[3]:.3g}"
    yield row("Theorem 2, random grid", "violated", least[0], least[2], note=note)


if __name__ == "__main__":
    show(check)
