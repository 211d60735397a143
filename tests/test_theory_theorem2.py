"""Theorem 2: its sums written out, violated instances, the corrected form at random."""

from dataclasses import replace

import numpy as np
import pytest
from test_theory_functions import fails
from test_theory_local_sgd import small_quadratic

from theory import theorem2
from theory.beyond import theorem2_random
from theory.functions import rational
from theory.local_sgd import simulate
from theory.problem import Problem, opposed, schedule, zero_sum

FORMS = (
    theorem2.printed,
    theorem2.last_display,
    theorem2.corrected,
    theorem2_random.uncorrelated,
)


def forms(problem):
    """printed, last display, corrected, uncorrelated."""
    return tuple(form(problem) for form in FORMS)


def test_theorem2_forms_are_the_sums_they_state():
    rng = np.random.default_rng(3)
    steps = rng.uniform(0.01, 0.2, (3, 4))
    problem = Problem(rational(2), [1.0, -2.0], steps, 0.1, zero_sum(rng, 3, 2), sigma=0.7)
    a, B, (L, G), Q, s, N = problem.steps, problem.B, (2.0, problem.f.G), 3, 0.7, 4
    gap = 1 / 2 + 4 / 5
    printed, proof, uncorrelated, corrected = Q * gap, Q * gap, gap, gap
    for t in range(3):
        for j in range(N):
            later = sum(a[t, m] for m in range(j, N))
            printed += 2 * a[t, j] * (a[t, j] + later) * L * G**2
            proof += (a[t, j] * later + a[t, j] ** 2 / 2) * L * G**2
            for m in range(j):
                client = np.sqrt((G + np.sqrt(B[t, m])) ** 2 + s**2)
                uncorrelated += L * G * a[t, j] * a[t, m] * client
                corrected += L * G * a[t, j] * a[t, m] * (client + np.sqrt(G**2 + s**2 / Q))
            corrected += L / 2 * a[t, j] ** 2 * (G**2 + s**2 / Q)
        uncorrelated += L / 2 * (sum(a[t]) ** 2 * G**2 + sum(a[t] ** 2) * s**2 / Q)
    assert forms(problem) == pytest.approx((printed, proof, corrected, uncorrelated))
    gradient = np.array([1.0, 2.0, 4.0])
    weighted = a[0].sum() + 2 * a[1].sum() + 4 * a[2].sum()
    assert theorem2.left_side(problem, gradient) == pytest.approx(4 * 7)
    assert theorem2.weighted_left_side(problem, gradient) == pytest.approx(weighted)
    ratios = printed / 28, proof / weighted, corrected / weighted, uncorrelated / weighted
    assert theorem2_random.ratios(problem, gradient) == pytest.approx(ratios)


def test_later_gradients_are_correlated_with_earlier_noise():
    """The term that Theorem 2's uncorrelated form drops, E f'(theta - a (f' + n)) n, by Gauss-
    Hermite quadrature.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    f, theta, a = rational(1), 1.0, 0.1
    moved = theta - a * (f.gradient(np.array([theta])) + nodes[:, None])
    correlation = (weights / weights.sum()) @ (f.gradient(moved)[:, 0] * nodes)
    assert correlation > 0.03  # - a f''(1) E n^2 = a / 2 at first order


def test_theorem2_without_noise_on_the_right_and_without_sampling():
    """One client and one step: the density of theta, carried round by round over a fine grid."""
    x = np.linspace(-15, 15, 2001)
    slope = 2 * x / (1 + x**2) ** 2
    kernel = np.exp(-(((x[:, None] - (x - 0.01 * slope)) / 0.3) ** 2) / 2)
    kernel /= kernel.sum(0)
    density, left = np.eye(1, 2001, 1000)[0], 0.0
    for _ in range(51):
        left += 0.01 * slope**2 @ density
        density = kernel @ density
    printed, proof, corrected, uncorrelated = forms(theorem2.noisy_run())
    assert round(printed / left, 3) == 0.188 and proof < left <= uncorrelated <= corrected


def test_theorem2_as_printed_does_not_know_the_order():
    runs = [
        Problem(rational(1), [2.0], np.full((5, 3), 0.1), B, opposed(2), sigma=s)
        for B, s in ((schedule("client", 5, 3), 0.0), (schedule("anti", 5, 3), 9.0), (0.0, 1.0))
    ]
    printed, _, corrected, _ = zip(*(forms(run) for run in runs), strict=True)
    assert len(set(printed)) == 1 and len(set(corrected)) == 3


def test_theorem2_refuses_what_it_does_not_speak_of():
    varying = Problem(rational(1), [1.0], np.full((2, 2), 0.1), 0.1, opposed(2), M=1.0)
    for form in FORMS:
        fails("finite G", form, small_quadratic())
        fails("M = 0", form, varying)


def test_the_rate_is_the_mean_of_its_run():
    """T = 4 written out; exact but for the noise of 64 runs, which is small."""
    steps = 0.3 / 2
    problem = Problem(rational(2), [1.75, 1.75], np.full((4, 5), steps), 1.0, opposed(4, 2))
    _, gradient = simulate(replace(problem, sigma=1.0), replicas=64)
    assert theorem2.ergodic_rate(4) == pytest.approx(sum(gradient) / 4 * 2)
    assert theorem2.ergodic_rate(1000) == pytest.approx(1.073, abs=0.006)
