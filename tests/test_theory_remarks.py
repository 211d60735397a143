"""The floor that a quadratic does not have, and the remedy for a growing bias."""

import numpy as np
import pytest

from theory import remarks, theorem1
from theory.functions import quadratic
from theory.local_sgd import exact_error
from theory.problem import Problem, opposed


def test_the_bias_has_no_effect_on_a_common_quadratic_without_proportional_noise():
    def run(B, M):
        settings = quadratic([0.3, 1.0]), [0.6, -0.8], np.full((21, 5), 0.1)
        return exact_error(Problem(*settings, B, opposed(4, 2), M, sigma=0.1))

    assert np.abs(run(1.0, 0.0) - run(0.0, 0.0)).max() < 2.5e-16
    assert run(1.0, 1.0)[-1] > 1.1 * run(0.0, 1.0)[-1]
    assert (remarks.on_a_quadratic(1.0) == run(1.0, 0.0)).all()


def test_annealed_steps_beat_a_growing_bias_and_the_bound_cannot_tell():
    assert remarks.annealed().steps[2, [0, 1, 9]] == pytest.approx(
        1 / 12 / 3 / np.array([1, 2, 10]) ** 0.25
    )
    problem = remarks.annealed()
    assert problem.B[7] == pytest.approx(np.arange(1, 11) ** 0.25)
    E, total = exact_error(problem), theorem1.printed_bias(problem)
    assert E[1000] < E[100] / 3 < E[10] / 9
    # 2 a L B^2 / mu = (2 c L / mu) (j+1)^(1/4) / (t+1), over t = 1..T, divided by Q = 4
    slope = 2 / 12 / 0.1 * (np.arange(1, 11) ** 0.25).sum() / 4
    assert (total[1000] - total[100]) / np.log(1001 / 101) == pytest.approx(slope, rel=0.01)
