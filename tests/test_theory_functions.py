"""Functions, biases, schedules and problems against differences, sums and printed orders."""

from dataclasses import replace

import numpy as np
import pytest

from theory import easy_samples, supplement
from theory.beyond.ordering import minority
from theory.functions import bent, kinked, quadratic, rational, ripple
from theory.local_sgd import simulate
from theory.one_step import State
from theory.problem import Problem, diminishing_steps, kinked_problem, opposed, schedule, zero_sum


def fails(match, call, *arguments, **named):
    """The call raises a ValueError that says `match`."""
    with pytest.raises(ValueError, match=match):
        call(*arguments, **named)


@pytest.mark.parametrize("f", [quadratic([0.5, 2.0]), kinked(0.2, 3.0), rational(2), ripple(2)])
def test_functions_have_the_constants_they_claim(f):
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-4, 4, (2, 4000, 2))
    numeric = [(f.value(x + e) - f.value(x - e)) / 2e-6 for e in 1e-6 * np.eye(2)]
    assert np.allclose(f.gradient(x), np.transpose(numeric), atol=1e-5)
    slope, gap = f.gradient(x) - f.gradient(y), np.linalg.norm(x - y, axis=1)
    assert (np.linalg.norm(slope, axis=1) <= f.L * gap * (1 + 1e-12)).all()
    assert ((slope * (x - y)).sum(1) >= f.mu * gap**2 - 1e-12).all() or f.mu == 0
    assert (f.value(x) >= 0).all() and f.value(np.zeros(2)) == 0
    assert (np.linalg.norm(f.gradient(x), axis=1) <= f.G).all()


def test_the_constants_are_attained():
    peak = np.full(3, 1 / np.sqrt(3))
    assert np.linalg.norm(rational(3).gradient(peak)) == pytest.approx(rational(3).G)
    assert rational(1).gradient(np.array([1e-6]))[0] / 1e-6 == pytest.approx(rational(1).L)
    assert np.linalg.norm(ripple(3).gradient(np.full(3, np.pi / 2))) == pytest.approx(ripple(3).G)
    for f, mu, L in ((quadratic([0.5, 2.0]), 0.5, 2.0), (kinked(0.2, 3.0), 0.2, 3.0)):
        assert (f.mu, f.L) == (mu, L)


def test_a_minority_and_a_bent_function():
    assert minority(2).tolist() == [[-1.0], [1.0]]
    assert minority(5)[:, 0].tolist() == [-1.0, 0.25, 0.25, 0.25, 0.25]
    x, step, f = np.linspace(-4, 4, 801)[:, None], 1e-5, bent(0.9)
    slope = (f.value(x + step) - f.value(x - step)) / (2 * step)
    assert slope == pytest.approx(f.gradient(x)[:, 0], abs=1e-8)
    curvature = (f.gradient(x + step) - f.gradient(x - step)) / (2 * step)
    assert (curvature >= f.mu).all() and (curvature <= f.L).all()
    assert (f.mu, f.L) == pytest.approx((0.1, 1.9))
    assert f.value(np.zeros((1, 1))) == 0 and f.gradient(np.zeros((1, 1))) == 0
    for k in (1.0, -0.1):
        fails("hypothesis fails", bent, k)


def test_biases_sum_to_zero_with_the_stated_size():
    rng = np.random.default_rng(0)
    for directions in (zero_sum(rng, 5, 3), opposed(6, 3)):
        assert np.abs(directions.sum(0)).max() < 1e-14
        assert np.linalg.norm(directions, axis=1).max() == pytest.approx(1)
    assert np.linalg.norm(opposed(6, 3), axis=1) == pytest.approx(np.ones(6))
    assert not zero_sum(rng, 1, 3).any()


def test_schedules_follow_the_printed_orders():
    rng = np.random.default_rng(0)
    orders = {
        order: schedule(order, 6, 4, mean=0.7, rng=rng)
        for order in ("client", "data", "anti", "constant", "shuffled")
    }
    for B in orders.values():
        assert B.shape == (6, 4) and (B > 0).all() and B.mean() == pytest.approx(0.7)
    client, data = orders["client"], orders["data"]
    assert (np.ptp(client, axis=1) == 0).all() and (np.diff(client[:, 0]) > 0).all()
    assert client[0, 0] / client[-1, 0] == pytest.approx(0.03)
    assert (np.diff(data, axis=1) > 0).all() and np.allclose(
        data[:-1, -1], data[1:, 0]
    )  # B^(t,J) = B^(t+1,0)
    assert (orders["anti"] == client[::-1]).all() and np.ptp(orders["constant"]) == 0
    assert sorted(orders["shuffled"][:, 0]) == pytest.approx(sorted(client[:, 0]))
    for order, generator in (("shuffled", None), ("spiral", rng)):
        fails("order", schedule, order, 6, 4, rng=generator)
    for order, rounds, N in (("data", 5, 1), ("client", 1, 4), ("anti", 1, 1)):  # nothing grows
        assert (schedule(order, rounds, N, mean=0.4, first=0.0) == 0.4).all()


def test_diminishing_steps():
    assert diminishing_steps(2, 3, 4.0, 2.0) == pytest.approx(4 / np.array([[2, 3, 4], [5, 6, 7]]))


@pytest.mark.parametrize(
    ("match", "change"),
    [
        ("finite vector", {"theta0": np.array([np.nan, 0.0])}),
        ("finite vector", {"theta0": 0.5}),
        ("steps are positive", {"steps": np.array([[0.1, -0.1]] * 3)}),
        ("steps are positive", {"steps": np.array([[0.1, np.nan]] * 3)}),
        ("steps are \\(T", {"steps": np.full(3, 0.1)}),
        ("steps are \\(T", {"steps": np.zeros((0, 2))}),
        ("broadcast", {"B": np.ones((2, 2))}),
        ("B >= 0", {"B": np.full((3, 2), -1.0)}),
        ("B >= 0", {"B": np.full((3, 2), np.nan)}),
        ("M >= 0", {"M": -0.1}),
        ("M >= 0", {"sigma": -0.1}),
        ("M >= 0", {"sigma": np.nan}),
        ("directions are", {"directions": np.zeros((3, 2, 4, 1))}),
        ("directions are", {"directions": np.zeros(2)}),
        ("broadcast", {"directions": np.zeros((4, 2, 4, 2))}),
        ("\\|\\|b_k", {"directions": 1.01 * opposed(4, 2)}),
        ("\\|\\|b_k", {"directions": np.full((3, 2, 4, 2), np.nan)}),
        ("sum to zero", {"directions": np.full((3, 2, 4, 2), 0.1)}),
    ],
)
def test_a_problem_is_held_to_assumption_1(match, change):
    problem = Problem(quadratic([1.0, 2.0]), [1.0, 2.0], np.full((3, 2), 0.1), 0.05, opposed(4, 2))
    fails(match, lambda: replace(problem, **change))


def test_what_makes_no_sense_is_refused():
    fails("positive", quadratic, [1.0, 0.0])
    fails("positive", quadratic, [np.nan])
    for mu, L in ((0.0, 1.0), (2.0, 1.0), (np.nan, 1.0)):
        fails("mu <= L", kinked, mu, L)
    fails("B >= 0", Problem, quadratic([1.0]), [1.0], np.full((2, 2), 0.1), -1.0, opposed(2))
    for Q in (0, 5):
        fails("even", opposed, Q)
    fails("replica", simulate, kinked_problem(), 0)
    f, theta = quadratic([1.0]), np.ones((2, 1))
    fails("like theta", State, f, theta, np.zeros((3, 1)), 0.1, 0.0)
    fails("alpha > 0", State, f, theta, np.zeros((2, 1)), -0.1, 0.0)
    fails("\\|\\|b_k", State, f, theta, np.ones((2, 1)), 0.1, 0.9)
    fails("3 samples", easy_samples.spectra, np.zeros(33), np.ones((2, 2)), np.ones(2))
    clients = np.ones((2, 1)), np.array([[1.0], [-1.0]]), np.full(2, 0.5)
    fails("not 0", supplement.dissimilarity, *clients, np.zeros(1))
