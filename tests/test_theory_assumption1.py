"""Assumption 1: what a random S_t leaves of the bias, and a bias that depends on theta."""

from itertools import combinations

import numpy as np
import pytest

from theory import assumption1, theorem1
from theory.problem import kinked_problem


def test_biases_about_a_moving_centre():
    """One round written out client by client; at a common theta these biases cancel."""
    theta = [0.0] * 100
    for _ in range(10):
        centre = sum(theta) / 100
        for k in range(100):
            slope = (1.0 if theta[k] > 0 else 0.1) * theta[k]
            side = (1 if k < 50 else -1) * (1 if theta[k] - centre >= -1e-18 else -1)
            theta[k] -= 1 / 12 * (slope + 0.01 * side)
    E = (sum(theta) / 100) ** 2
    assert assumption1.moving_centre() == pytest.approx(E, rel=1e-9)
    bound = theorem1.printed(kinked_problem(100, T=1))[1]
    assert round(bound / E, 3) == 0.014


def test_random_participation_leaves_no_bias():
    """By determinants over all groups of 3 of 5: only b = 0 solves them."""
    constraints = np.array([[k in S for k in range(5)] for S in combinations(range(5), 3)])
    assert np.linalg.det(constraints.T.astype(float) @ constraints) > 0.5
    assert [assumption1.rank(5, 3), assumption1.rank(4, 4)] == [5, 1]
