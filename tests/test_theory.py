"""theory/ against closed forms, brute-force loops, Monte Carlo, brute-force maximisation and numbers worked out by hand."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from theory import check, figures, statements
from theory.local_sgd import (
    Problem,
    State,
    bent,
    diminishing_steps,
    kinked,
    minority,
    moments,
    opposed,
    quadratic,
    rational,
    ripple,
    schedule,
    zero_sum,
)
from theory.statements import LEMMAS, MENDED, PROOF, SHARP

ABOVE = 1 + 1e-9
C_MU = (0.25, 0.5, 1.0, 2.0, 4.0)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def small_quadratic(Q=3, T=3, N=4, M=0.5, s=0.3, B=0.2, d=2, seed=5):
    """A quadratic problem with every kind of noise, steps within Theorem 1's limit and a growing bias."""
    rng = np.random.default_rng(seed)
    f = quadratic(np.linspace(0.3, 1.0, d))
    steps = rng.uniform(0.3, 1, (T + 1, N)) * statements.largest_steps(1.0, M)[0]
    return Problem(f, rng.standard_normal(d), steps, B * schedule("data", T + 1, N), zero_sum(rng, Q, d), M=M, s=s)


def fails(match, call, *arguments, **named):
    with pytest.raises(ValueError, match=match):
        call(*arguments, **named)


# ------------------------------------------------------------------------------------- functions, biases, orders, problems


@pytest.mark.parametrize("f", [quadratic([0.5, 2.0]), kinked(0.2, 3.0), rational(2), ripple(2)])
def test_functions_have_the_constants_they_claim(f, rng):
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
    assert (quadratic([0.5, 2.0]).mu, quadratic([0.5, 2.0]).L, kinked(0.2, 3.0).mu, kinked(0.2, 3.0).L) == (0.5, 2.0, 0.2, 3.0)


def test_biases_sum_to_zero_with_the_stated_size(rng):
    for directions in (zero_sum(rng, 5, 3), opposed(6, 3)):
        assert np.abs(directions.sum(0)).max() < 1e-14
        assert np.linalg.norm(directions, axis=1).max() == pytest.approx(1)
    assert np.linalg.norm(opposed(6, 3), axis=1) == pytest.approx(np.ones(6)) and not zero_sum(rng, 1, 3).any()


def test_schedules_follow_the_printed_orders(rng):
    orders = {order: schedule(order, 6, 4, mean=0.7, rng=rng) for order in ("client", "data", "anti", "constant", "shuffled")}
    for B in orders.values():
        assert B.shape == (6, 4) and (B > 0).all() and B.mean() == pytest.approx(0.7)
    client, data = orders["client"], orders["data"]
    assert (np.ptp(client, axis=1) == 0).all() and (np.diff(client[:, 0]) > 0).all()
    assert client[0, 0] / client[-1, 0] == pytest.approx(0.03)
    assert (np.diff(data, axis=1) > 0).all() and np.allclose(data[:-1, -1], data[1:, 0])  # B^(t,J) = B^(t+1,0)
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
        ("M >= 0", {"s": -0.1}),
        ("M >= 0", {"s": np.nan}),
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
    fails("at least one round", schedule, "client", 0, 3)
    fails("mean >= 0", schedule, "client", 3, 3, -1.0)
    fails("first", schedule, "client", 3, 3, 1.0, 1.5)
    fails("offset > 0", diminishing_steps, 3, 3, 1.0, 0.0)
    fails("replica", moments, statements.kinked_problem(), 0)
    f, theta = quadratic([1.0]), np.ones((2, 1))
    fails("like theta", State, f, theta, np.zeros((3, 1)), 0.1, 0.0)
    fails("alpha > 0", State, f, theta, np.zeros((2, 1)), -0.1, 0.0)
    fails("\\|\\|b_k", State, f, theta, np.ones((2, 1)), 0.1, 0.9)
    fails("3 samples", statements.spectra, np.zeros(33), np.ones((2, 2)), np.ones(2))
    fails("not 0", statements.fedprox_round, np.ones((2, 1)), np.array([[1.0], [-1.0]]), np.full(2, 0.5), np.zeros(1))


# ------------------------------------------------------------------------------------------------------------- local SGD


def test_exact_moments_are_the_monte_carlo_limit():
    problem = small_quadratic()
    exact, sampled = moments(problem), moments(problem, replicas=60000, seed=1)
    for name in ("E", "gradient", "V", "F"):
        assert np.allclose(getattr(exact, name), getattr(sampled, name), rtol=0.02, atol=1e-4), name


def test_exact_moments_are_those_of_every_pair_of_clients():
    """P_kl = E theta_k theta_l per coordinate, carried pair by pair through every step: no common and own noise in it."""
    problem = small_quadratic(Q=4, d=3)
    h, Q, d, M, s = problem.f.curvature, 4, 3, problem.M, problem.s
    m, found = np.repeat(problem.theta0[:, None], Q, 1), moments(problem)  # m_k = E theta_k: (d, Q)
    P = m[:, :, None] * m[:, None, :]
    for t in range(problem.T):
        for j in range(problem.N):
            a, b, c, squares = problem.steps[t, j], problem.biases[t, j].T, 1 - problem.steps[t, j] * h, np.einsum("ikk->ik", P)
            assert found.F[t, j] == pytest.approx(h @ squares.mean(1) / 2)
            v = M * (h[:, None] ** 2 * squares + 2 * h[:, None] * m * b + b**2).sum(0) + s**2
            cross = m[:, :, None] * b[:, None, :]
            P = c[:, None, None] ** 2 * P - a * c[:, None, None] * (cross + cross.transpose(0, 2, 1))
            P += a**2 * (b[:, :, None] * b[:, None, :] + np.diag(v) / d)
            m = c[:, None] * m - a * b
            assert found.V[t, j + 1] == pytest.approx(np.einsum("ikk->", P) / Q - P.mean((1, 2)).sum())
        m, P = np.repeat(m.mean(1, keepdims=True), Q, 1), np.broadcast_to(P.mean((1, 2), keepdims=True), P.shape)
        assert found.E[t + 1] == pytest.approx(P[:, 0, 0].sum()) and found.gradient[t + 1] == pytest.approx(h**2 @ P[:, 0, 0])


def test_exact_moments_without_noise_are_the_trajectory():
    problem = small_quadratic(M=0.0, s=0.0)
    exact, run = moments(problem), moments(problem, replicas=1)
    for name in ("E", "gradient", "V", "F"):
        assert np.allclose(getattr(exact, name), getattr(run, name), rtol=1e-10, atol=1e-15), name


def test_simulation_is_algorithm_3_written_out():
    problem = statements.kinked_problem(Q=4, T=3, N=5, theta0=0.3)
    server, E, V, F, gradient = 0.3, [0.09], np.zeros((3, 6)), np.zeros((3, 5)), [0.09]
    for t in range(3):
        clients = [server] * 4
        for j in range(5):
            F[t, j] = sum((0.5 if x > 0 else 0.05) * x**2 for x in clients) / 4
            for k, sign in enumerate((1, 1, -1, -1)):
                clients[k] -= 1 / 12 * ((1.0 if clients[k] > 0 else 0.1) * clients[k] + sign * 0.01)
            server = sum(clients) / 4
            V[t, j + 1] = sum((x - server) ** 2 for x in clients) / 4
        E.append(server**2)
        gradient.append(((1.0 if server > 0 else 0.1) * server) ** 2)
    run = moments(problem)
    for name, value in (("E", E), ("V", V), ("F", F), ("gradient", gradient)):
        assert getattr(run, name) == pytest.approx(np.array(value), rel=1e-12), name


def test_a_state_is_the_monte_carlo_limit_of_one_step(rng):
    f, Q, d, a, M, s = kinked(0.1, 1.0), 3, 2, 0.2, 0.7, 0.4
    theta, b = rng.standard_normal((Q, d)), 0.5 * zero_sum(rng, Q, d)
    x, towards = State(f, theta, b, a, 0.25, M, s), f.gradient(theta) + b
    scale = np.sqrt((M * (towards**2).sum(1, keepdims=True) + s**2) / d)
    g = towards + scale * rng.standard_normal((200000, Q, d))
    moved = theta - a * g
    average, bar = moved.mean(1, keepdims=True), f.gradient(theta).mean(0)
    assert x.second == pytest.approx((g**2).sum(2).mean(0), rel=0.01)
    assert x.off_mean == pytest.approx(((g.mean(1) - bar) ** 2).sum(1).mean(), rel=0.01)
    assert x.spread == pytest.approx(((g - g.mean(1, keepdims=True)) ** 2).sum(2).mean(), rel=0.01)
    assert x.next_E == pytest.approx((average**2).sum(2).mean(), rel=0.01)
    assert x.next_V == pytest.approx(((moved - average) ** 2).sum(2).mean(), rel=0.01)
    assert pytest.approx((sum(theta.mean(0) ** 2), theta.var(0).sum())) == (x.E, x.V)
    assert x.mean_B == pytest.approx((b**2).sum() / 3) and pytest.approx(f.value(theta)) == x.F


def test_exact_moments_refuse_what_they_cannot_do():
    for problem in (statements.kinked_problem(), replace(small_quadratic(Q=4), moving=True)):
        fails("quadratic", moments, replace(problem, s=0.1))
        fails("quadratic", moments, replace(problem, M=0.1, s=0.0))


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_a_run_that_overflows_is_refused():
    wild = Problem(quadratic([1.0]), [1.0], np.full((400, 3), 9.0), 0.1, opposed(2), M=1.0)
    fails("finite", moments, wild)
    fails("finite", moments, wild, replicas=1)


# --------------------------------------------------------------------------------------------------- forms against loops


def test_theorem1_printed_is_the_double_sum():
    problem = small_quadratic(T=4)
    a, B, f, M, s, Q = problem.steps, problem.B, problem.f, problem.M, problem.s, problem.Q
    for power in (1, 2):
        for T in range(5):
            bound = problem.theta0 @ problem.theta0
            for t in range(1, T + 1):
                for j in range(problem.N):
                    bound *= 1 - a[t, j] * f.mu / 2
            for t in range(1, T + 1):
                for j in range(problem.N):
                    bound += 2 * a[t, j] ** 2 * f.L * ((3 + 2 * M) * B[t, j] + 3 * s**3) / Q
                    bound += 2 * a[t, j] * f.L * B[t, j] ** power / f.mu / Q
            assert statements.theorem1_printed(problem, power)[0, T] == pytest.approx(bound)


def test_equation6_and_the_proof_of_theorem1_are_the_sums_they_state():
    problem = small_quadratic(T=3)
    a, B, mu, M, s, Q, N = problem.steps, problem.B, problem.f.mu, problem.M, problem.s, problem.Q, problem.N
    F, E, mended = np.array([0.3, 0.1, 0.4, 0.2]), [problem.theta0 @ problem.theta0], [problem.theta0 @ problem.theta0]
    for t in range(3):
        equation6, bound, other = 0.0, E[-1] * np.prod(1 - a[t] * mu / 2), mended[-1] * np.prod(1 - a[t] * mu / 2)
        V, total = 0.0, 0.0
        for j in range(N):
            factor = 2 * a[t, j] / Q * np.prod(1 - a[t, j:] * mu / 2)  # L = 1
            inner = 2 * a[t, j] * (3 + 2 * M) * Q * F[j] + (a[t, j] * (3 + 2 * M) + B[t, j] / mu) * B[t, j]
            equation6 += factor * (inner + 3 * a[t, j] * s**2)
            bound += factor * ((2 * a[t, j] * (3 + 2 * M) + B[t, j] / mu) * B[t, j] + 6 * a[t, j] * s**2)
            other += factor * ((2 * a[t, j] * (3 + 2 * M) + 1 / mu) * B[t, j] + 6 * a[t, j] * s**2)
            total += V
            forms = [(0.0, a[t, j] ** 2)] if j == 0 else [(1 - a[t, j] * mu, a[t, j] / mu)]
            forms += [((1 + 1 / j) * (1 - a[t, j] * mu) ** 2, (1 + j) * a[t, j] ** 2)] if j else []
            noise = a[t, j] ** 2 * (1 - 1 / Q) * (4 * M * F[j] + 2 * M * B[t, j] + s**2)
            V = min(c * V + e * B[t, j] for c, e in forms) + noise
        E.append(bound)
        mended.append(other)
        paths = statements.along(problem, F, t)
        assert (paths[3, -1], paths[2, :-1].sum()) == pytest.approx((equation6, total))
    assert statements.theorem1(problem, PROOF) == pytest.approx(E)
    assert statements.theorem1(problem, MENDED) == pytest.approx(mended)


@pytest.mark.parametrize("form", [0, 1])
def test_the_lemmas_certificate_is_the_recursion_run_forward(form):
    """With F = 0 the recursions for E and V are equalities of numbers: run forward they give what the weights give."""
    problem = small_quadratic(N=5)
    f, M, Q, s = problem.f, problem.M, problem.Q, problem.s
    E, V = 2.0, 0.0
    for j, (a, B) in enumerate(zip(problem.steps[1], problem.B[1], strict=True)):
        noise = 2 * M * B + s**2
        c, e = (0.0, a**2) if j == 0 else [(1 - a * 0.3, a / 0.3), ((1 + 1 / j) * (1 - a * 0.3) ** 2, (1 + j) * a**2)][form]
        E = (1 - a * f.mu) * E + 2 * a * f.L * V + a**2 * noise / Q
        V = c * V + e * B + a**2 * (1 - 1 / Q) * noise
    contraction, floor = statements.certificate(problem, 1, LEMMAS[form])
    assert contraction * 2.0 + floor == pytest.approx(E)


def test_the_lemmas_certificate_asks_more_of_a_second_local_step():
    """M = 5, Q = 100, a = .4: one step alone may be this long; after it V weighs on the F of the step before."""
    one, two = (Problem(quadratic([1.0]), [1.0], np.full((2, N), 0.4), 0.1, opposed(100), M=5.0) for N in (1, 2))
    assert len(statements.theorem1(one, LEMMAS)) == 2
    fails("not positive", statements.theorem1, two, LEMMAS)


def test_lemmas_are_the_sums_over_clients_they_state(rng):
    mu, L, a, B, M, s, Q = 0.2, 1.0, 0.03, 0.4, 0.6, 0.3, 3
    theta = rng.standard_normal((Q, 1))
    x = State(kinked(mu, L), theta, np.zeros((Q, 1)), a, B, M, s)
    points = theta[:, 0]
    F = [(L if p > 0 else mu) * p**2 / 2 for p in points]
    mean = sum(points) / Q
    V = sum((p - mean) ** 2 for p in points) / Q
    gap_of_mean = (L if mean > 0 else mu) * mean**2 / 2
    bounds = {name: forms for name, (_, *forms) in statements.lemma_bounds(x).items()}
    for k in range(Q):
        printed, corrected = (form[k] for form in bounds["Lemma 1"])
        assert printed == pytest.approx(2 * (3 + 2 * M) * L * F[k] + (3 + 2 * M) * B + 3 * s**2)
        assert corrected == pytest.approx((1 + M) * (4 * L * F[k] + 2 * B) + s**2)
    lemma2 = (3 + 2 * M) / Q**2 * sum(2 * L * f + B for f in F) + 3 * s**2 / Q
    fixed2 = sum(M * (4 * L * f + 2 * B) + s**2 for f in F) / Q**2
    assert bounds["Lemma 2, independent noise"] == pytest.approx([lemma2, fixed2])
    lemma3 = mean**2 + sum(2 * a / Q * ((a * L - 0.5) * f - mu / 2 * p**2) for f, p in zip(F, points, strict=True))
    assert bounds["Lemma 3"] == pytest.approx([lemma3 + 2 * a * L * V])
    lemma4 = (1 - a * mu) * mean**2 - a / 2 * gap_of_mean + 2 * a * L * V + a**2 * ((3 + 2 * M) * B + 3 * s**2) / Q
    noise = a**2 / Q * (2 * M * B + s**2)
    fixed4 = (1 - a * mu) * mean**2 + 2 * a * L * V + noise - a * (1 - 2 * a * L * (1 + 2 * M / Q)) * sum(F) / Q
    assert bounds["Lemma 4"] == pytest.approx([lemma4, fixed4])
    lemma5 = (1 - a * mu / 2) * V + a**2 * (2 * (3 + 2 * M) * L * sum(F) / Q + (3 + 2 * M) * B + 3 * s**2)
    spread = a**2 * (1 - 1 / Q) * (4 * M * L * sum(F) / Q + 2 * M * B + s**2)
    fixed5 = (1 - a * mu) * V + a * B / mu + spread, 4 / 3 * (1 - a * mu) ** 2 * V + 4 * a**2 * B + spread  # at j = 3
    assert bounds["Lemma 5"] == pytest.approx([lemma5 + a * B**2 / mu, lemma5 + 2 * a * B / mu, *fixed5])
    second = statements.lemmas(x, 2)["Lemma 5"][3]
    assert second[1] * V + second[2] * sum(F) / Q + second[3] == pytest.approx(
        fixed5[1] + (V * (1 - a * mu) ** 2 / 6 - a**2 * B)
    )
    for _, _, on_F, constant in statements.lemmas(x, 0)["Lemma 5"][2:]:  # from V = 0 only the bias itself is added
        assert on_F * sum(F) / Q + constant == pytest.approx(a**2 * B + spread)
    assert bounds["Equation 5"] == pytest.approx([2 * (3 + 2 * M) * L * sum(F) / Q + (3 + 2 * M) * B + 3 * s**2])


def test_lemmas_hold_on_random_states():
    for x in statements.states(100, 1000):  # not the states of the table
        moved, bounds = x.average - x.a * x.f.gradient(x.theta).mean(0), statements.lemma_bounds(x)
        measured = {
            "Lemma 1": x.second,
            "Lemma 2, independent noise": x.off_mean,
            "Lemma 3": moved @ moved,
            "Lemma 4": x.next_E,
            "Equation 5": x.spread,
            "Lemma 5": x.next_V,
        }
        assert list(bounds) == list(measured)
        for name, value in measured.items():
            found, *forms = bounds[name]
            assert found == pytest.approx(value)
            for bound in forms[1:] if name == "Lemma 5" else forms:  # Lemma 5 is false as printed
                assert (bound * ABOVE + statements.ZERO >= value).all(), name


def test_theorem2_forms_are_the_sums_they_state():
    rng = np.random.default_rng(3)
    problem = Problem(rational(2), [1.0, -2.0], rng.uniform(0.01, 0.2, (3, 4)), 0.1, zero_sum(rng, 3, 2), s=0.7)
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
    assert statements.theorem2(problem) == pytest.approx((printed, proof, corrected, uncorrelated))
    left = [statements.ergodic_sum(problem, np.array([1.0, 2.0, 4.0]), weighted) for weighted in (False, True)]
    assert left == pytest.approx([4 * 7, a[0].sum() + 2 * a[1].sum() + 4 * a[2].sum()])


def test_later_gradients_are_correlated_with_earlier_noise():
    """The term that Theorem 2's uncorrelated form drops, E f'(theta - a (f' + n)) n, by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    f, theta, a = rational(1), 1.0, 0.1
    moved = theta - a * (f.gradient(np.array([theta])) + nodes[:, None])
    correlation = (weights / weights.sum()) @ (f.gradient(moved)[:, 0] * nodes)
    assert correlation > 0.03  # - a f''(1) E n^2 = a / 2 at first order


def test_forms_raise_outside_their_hypotheses():
    inside, moving = small_quadratic(), statements.MOVING_CENTRE
    nonconvex = replace(statements.LONG_RUN, steps=statements.LONG_RUN.steps[:4], B=0.0)
    long_steps = Problem(quadratic([1.0]), [1.0], np.full((2, 3), 0.4), 0.1, opposed(2))
    for problem, match in ((nonconvex, "mu > 0"), (long_steps, "alpha <=")):
        fails(match, statements.theorem1_printed, problem)
        for forms in (PROOF, MENDED):
            fails(match, statements.theorem1, problem, forms)
    for forms in (LEMMAS, SHARP):
        fails("mu > 0", statements.theorem1, nonconvex, forms)
        fails("do not depend on theta", statements.theorem1, moving, forms)
    longer = Problem(quadratic([1.0]), [1.0], [[0.7], [0.7]], 0.1, opposed(2))
    fails("not positive", statements.theorem1, longer, LEMMAS)
    statements.theorem1(longer, SHARP)  # allowed up to 2/(L + mu) = 1
    too_long = Problem(quadratic([1.0]), [1.0], [[1.01], [1.01]], 0.1, opposed(2))
    fails("2p", statements.theorem1, too_long, SHARP)
    noisy = Problem(quadratic([1.0]), [1.0], [[0.7], [0.7]], 0.1, opposed(2), M=1.0)  # a (1 + M/Q) = 1.05
    fails("2p", statements.theorem1, noisy, SHARP)
    fails("M = 0", statements.theorem1_closed, inside)
    fails("one constant step", statements.theorem1_closed, small_quadratic(M=0.0))
    fails("2 / \\(L", statements.theorem1_closed, too_long)
    fails("M = 0 and mu > 0", statements.theorem1_closed, nonconvex)
    fails("do not depend", statements.theorem1_closed, moving)
    fails("finite G", statements.theorem2, inside)
    varying = Problem(rational(1), [1.0], np.full((2, 2), 0.1), 0.1, opposed(2))
    fails("do not depend", statements.theorem2, replace(varying, moving=True))
    fails("M = 0", statements.theorem2, replace(varying, M=1.0))
    fails("one squared gradient per round", statements.ergodic_sum, nonconvex, np.ones(3), True)
    fails("bar L", statements.lemma_bounds, State(quadratic([1.0]), np.ones((2, 1)), np.zeros((2, 1)), 0.2, 0.1))
    fails("mu \\+ L", statements.lemmas, State(quadratic([1.0]), np.ones((2, 1)), np.zeros((2, 1)), 1.5, 0.1))
    fails("mu > 0", statements.lemmas, State(rational(1), np.ones((2, 1)), np.zeros((2, 1)), 0.1, 0.1))
    for gamma in (0.6, 0.0):
        fails("gamma", statements.sgd_average, np.ones(1), np.ones(1), gamma, np.ones(3))
    fails("T >= 1", statements.sgd_average, np.ones(1), np.ones(1), 0.1, np.ones(1))
    fails("gamma >= 0", statements.rho, 1.0, 1.0, 1.0, -0.1)


def test_worst_ratio_never_hides_nan():
    assert statements.worst([2.0, 1.0, 9.0], [1.0, 2.0, 0.0]) == 0.5
    assert statements.worst(3.0, np.array([1.0, 2.0])) == 1.5 and statements.worst([1.0], [0.0]) == np.inf
    for bound, measured in (([np.nan], [1.0]), ([1.0, 1.0], [1.0, np.nan])):
        fails("NaN", statements.worst, bound, measured)
    assert [statements.verdict(x) for x in (np.nan, 1.0, 0.999)] == ["violated", "holds", "violated"]
    row = statements.row("x", "holds", 2.0, 1.5, 0.5)
    assert (row["printed"], row["corrected"]) == ("holds", "violated")  # a sharp form that fails is seen
    assert statements.row("x", "vacuous", 2.0, vacuous=True)["printed"] == "vacuous"
    assert statements.row("x", "violated", 0.5, "holds", vacuous=True)["printed"] == "violated"


# ------------------------------------------------------------------------------------------------- the sharp floor [3 - 6]


def spread_bound(x):
    """[3], written out."""
    return ((1 - x.a * x.f.mu) * np.sqrt(x.V) + x.a * np.sqrt(x.mean_B)) ** 2 + x.a**2 * (1 - 1 / x.Q) * x.s**2


def sharp_states(count, M, seed=7):
    """Random states with steps up to 2/(L + mu), which they reach one time in ten."""
    rng = np.random.default_rng(seed)
    for x in statements.states(seed, count):
        longest = 2 / (x.f.L + x.f.mu)
        yield rng, State(x.f, x.theta, x.b, longest * min(1, rng.uniform(0, 1.1) + 1e-3), x.B, M, x.s)


def test_the_spread_grows_by_no_more_than_its_bound():
    for _, x in sharp_states(2000, 0.0):
        assert spread_bound(x) * ABOVE + statements.ZERO >= x.next_V


def test_one_sharp_step_without_weights_on_random_states():
    """E' <= (1 - 2a mu L/(L+mu)) E + a (L-mu)^2/(2(L+mu)) V + a^2 s^2/Q: the formula itself."""
    closest = np.inf
    for _, x in sharp_states(3000, 0.0):
        L, mu, a = x.f.L, x.f.mu, x.a
        bound = (1 - 2 * a * mu * L / (L + mu)) * x.E + a * (L - mu) ** 2 / (2 * (L + mu)) * x.V + a**2 * x.s**2 / x.Q
        assert bound * ABOVE + 1e-12 * (x.E + x.V) + statements.ZERO >= x.next_E
        assert statements.sharp_weight(x.f, a, 1.0, 0.0, 0.0) == pytest.approx(a * (L - mu) ** 2 / (2 * (L + mu)), abs=1e-15)
        closest = min(closest, bound / x.next_E if x.next_E > 1e-12 else np.inf)
    assert closest < 1.001


@pytest.mark.parametrize("M", [0.0, 0.5, 3.0])
def test_one_sharp_step_with_weights_on_random_states(M):
    tried = 0
    for rng, x in sharp_states(3000, M):
        k, (p, w, e) = 2 / (x.f.L + x.f.mu), 10 ** rng.uniform([-1, -2, -2], [1, 2, 2])
        n = p / x.Q + w * (1 - 1 / x.Q)
        if x.a * (p + n * M) > k * p:
            continue
        weight = statements.sharp_weight(x.f, x.a, p, w * (1 + e), n * x.a**2 * M)
        bound = p * (1 - x.a * k * x.f.mu * x.f.L) * x.E + weight * x.V
        bound += w * (1 + 1 / e) * x.a**2 * x.mean_B + n * x.a**2 * (2 * M * x.mean_B + x.s**2)
        assert bound == pytest.approx(np.dot(statements.sharp_step(x, p, w, 1 + e, 1 + 1 / e), (x.E, x.V, 1)), rel=1e-12)
        slack = 1e-12 * (p * x.E + w * x.V)  # 1 - lambda and weight may both be 0, up to rounding
        assert bound * ABOVE + slack + statements.ZERO >= p * x.next_E + w * x.next_V
        tried += 1
    assert tried > 100


@pytest.mark.parametrize("M", [0.0, 3.0])
def test_one_sharp_step_from_the_optimum_is_noise_alone(M):
    """All clients at theta*: the step is exact without M, and with it counts the biases' noise twice, as [4] does."""
    b = np.array([[0.3, -0.1], [-0.3, 0.1], [0.0, 0.0]])
    x, p, w = State(kinked(0.2, 1.0), np.zeros((3, 2)), b, 0.04, 0.11, M, 0.7), 1.3, 0.4
    n, mean_B = p / 3 + w * 2 / 3, 0.2 / 3
    assert p * x.next_E + w * x.next_V == pytest.approx(0.0016 * (w * mean_B + n * (M * mean_B + 0.49)))
    assert statements.sharp_step(x, p, w, 5.0, 1.0)[2] == pytest.approx(0.0016 * (w * mean_B + n * (2 * M * mean_B + 0.49)))
    with pytest.raises(ValueError, match="smaller steps"):
        statements.sharp_step(State(x.f, x.theta, b, 1.7, 0.11), p, w, 2.0, 2.0)


def test_the_sharp_weight_is_the_maximum_over_the_cone(rng):
    """Over s = sqrt(W/V) and C between (W + mu L V)/(L + mu) and sqrt(VW), V = 1, of the expression in the proof."""
    for _ in range(300):
        L, mu, p, w = 10 ** rng.uniform(-1, 1), 0.0, *10 ** rng.uniform(-1, 1, 2)
        mu = L * 10 ** rng.uniform(-2, 0)
        a, noise = 2 / (L + mu) * rng.uniform(0.01, 1), 0.0 if rng.random() < 0.5 else 10 ** rng.uniform(-3, 0)
        s = np.linspace(mu, L, 4001)
        ends = [s, (s**2 + mu * L) / (L + mu)]
        values = [
            w * (1 - 2 * a * C + a**2 * s**2) + p * (2 * a * C - 2 * a / (L + mu) * (s**2 + mu * L)) + 2 * noise * s**2
            for C in ends
        ]
        brute = np.max(values)
        assert statements.sharp_weight(kinked(mu, L), a, p, w, noise) == pytest.approx(brute, rel=1e-5)


@pytest.mark.parametrize("kappa", [1.5, 10.0, 100.0])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_sharp_step_is_attained(kappa, share):
    """On the states of the proof, q = i/Q of the clients on the steep side, for the weights that have their maximum there."""
    L, mu = 1.0, 1 / kappa
    a, p = share * 2 / (L + mu), 1.3
    for i, Q in ((1, 2), (1, 3), (2, 5), (1, 11), (3, 40)):
        s = mu * L / (i / Q * (L - mu) + mu)
        if s > (L + mu) / 2 + 1e-9:
            continue
        theta = np.where(np.arange(Q) < i, s / (L - s), -s / (s - mu))[:, None]
        x = State(kinked(mu, L), theta, np.zeros((Q, 1)), a, 0.0)
        w = p * (1 - 2 * s / (L + mu)) / (1 - a * s) if share < 1 else 0.37 * p
        bound = p * (1 - 2 * a * mu * L / (L + mu)) * x.E + statements.sharp_weight(x.f, a, p, w, 0.0) * x.V
        if share < 1:
            assert bound == pytest.approx(p * x.next_E + w * x.next_V, rel=1e-10)
        assert bound * ABOVE >= p * x.next_E + w * x.next_V
        assert pytest.approx((s - mu) * (L - s) / (mu * L) * x.V) == x.E


def test_the_floor_is_a_state_that_does_not_move():
    """(L-mu)^2/(4 mu L) V at s = (L+mu)/2, one client of L/mu + 1 on the steep side; every step length."""
    for kappa in (2, 10, 50):
        L, mu, Q = 1.0, 1 / kappa, kappa + 1
        theta = np.full((Q, 1), -(L + mu) / (L - mu))
        theta[0] *= -1
        for a in (0.01, 0.5, 2 / (L + mu)):
            x = State(kinked(mu, L), theta, np.zeros((Q, 1)), a, 0.0)
            assert x.next_E == pytest.approx(x.E) and pytest.approx((L - mu) ** 2 / (4 * mu * L) * x.V) == x.E


def test_the_sharp_certificate_of_two_steps_by_hand():
    L, mu, a, s, Q = 2.0, 0.5, 0.3, 0.7, 4
    biases = np.zeros((2, 2, Q, 1))
    biases[0, :, :, 0] = [[0.3, 0.3, 0.0, -0.6], [0.2, -0.2, 0.0, 0.0]]
    problem = Problem(kinked(mu, L), np.zeros(1), np.full((2, 2), a), 0.36, biases / 0.6, s=s)
    lam, w = 2 * a * mu * L / (L + mu), a * (L - mu) ** 2 / (2 * (L + mu))  # weight of V before the last step
    floor = a**2 * s**2 / Q + ((1 - lam) / Q + w * (1 - 1 / Q)) * a**2 * s**2
    floor += w * a**2 * (0.09 + 0.09 + 0.36) / 4  # only the bias of the first step spreads the clients before the second
    assert statements.certificate(problem, 0, "sharp") == pytest.approx(((1 - lam) ** 2, floor))
    noisy = replace(problem, M=0.8)
    n = [(1 - lam) / Q, 1 / Q]  # p_1 and p_2 over Q; w_1 comes from a maximum over s on a grid
    slopes = np.linspace(mu, L, 100001)
    w = (2 * a / (L + mu) * (slopes - mu) * (L - slopes) + 2 * a**2 * 0.8 / Q * slopes**2).max()
    n[0] += w * (1 - 1 / Q)
    floor = sum(n_j * a**2 * (2 * 0.8 * B + s**2) for n_j, B in zip(n, (0.54 / 4, 0.08 / 4), strict=True)) + w * a**2 * 0.54 / 4
    assert statements.certificate(noisy, 0, "sharp") == pytest.approx(((1 - lam) ** 2, floor))


def test_the_sharp_certificate_is_the_weights_run_back_with_any_young_constant(rng):
    """Independent: e_j drawn at random give a bound that is never better than the program's by more than its own choice
    allows for M = 0, and the program's e_j, written out, give its floor."""
    problem = statements.kinked_problem(N=6)
    L, mu, a, B, N = 1.0, 0.1, 1 / 12, 1e-4, 6
    r = [0.0]
    for _ in range(N - 1):
        r.append((1 - a * mu) * r[-1] + a * np.sqrt(B))

    def floor_of(e):
        p, w, floor = 1.0, 0.0, 0.0
        for j in reversed(range(N)):
            floor += w * a**2 * B * (1 + 1 / e[j] if j else 1)
            slopes = np.linspace(mu, L, 20001)
            tilde = w * (1 + e[j])
            pull = 2 * a / (L + mu) * max(p, tilde) * (slopes - mu) * (L - slopes)
            p, w = p * (1 - 2 * a * mu * L / (L + mu)), (tilde * (1 - a * slopes) ** 2 + pull).max()
        return floor

    chosen = [1.0] + [a * np.sqrt(B) / ((1 - a * mu) * r_j) for r_j in r[1:]]
    assert statements.certificate(problem, 0, "sharp")[1] == pytest.approx(floor_of(chosen), rel=1e-6)
    truth = moments(problem).E[1]  # one round from theta*: every choice bounds it
    assert all(floor_of(np.exp(rng.uniform(-2, 2, N))) >= truth for _ in range(20))


def test_the_spread_path_is_the_recursion():
    problem = small_quadratic(M=0.0, N=5)
    r = [0.0]
    for j in range(4):
        a, B = problem.steps[1, j], (problem.biases[1, j] ** 2).sum(1).mean()
        r.append(np.sqrt(((1 - a * 0.3) * r[-1] + a * np.sqrt(B)) ** 2 + a**2 * (1 - 1 / 3) * 0.09))
    assert statements.spread_path(problem, 1) == pytest.approx(r)


def test_noise_alone_spreads_the_clients_too():
    """M = 40 and neither bias nor s: the weight on V must be kept where the M = 0 path stands at 0. It was dropped once."""
    for s in (0.0, 1e-9):
        for Q, N, a, M in ((50, 39, 0.1, 40.0), (8, 9, 0.05, 80.0)):
            problem = Problem(quadratic([1.0]), [1.0], np.full((2, N), a), 0.0, np.zeros((Q, 1)), M, s)
            with pytest.raises(ValueError, match="smaller steps"):
                statements.theorem1(problem, SHARP)
    problem = Problem(quadratic([1.0]), [1.0], np.full((3, 9), 0.01), 0.0, np.zeros((8, 1)), 20.0, 0.0)
    E, bound = moments(problem).E, statements.theorem1(problem, SHARP)
    assert (bound * ABOVE >= E).all() and bound[-1] < 1.5 * E[-1] and bound[-1] > 1.02 * (1 - 0.01) ** 36


def test_a_minority_and_a_bent_function():
    assert minority(2).tolist() == [[-1.0], [1.0]] and minority(5)[:, 0].tolist() == [-1.0, 0.25, 0.25, 0.25, 0.25]
    x, step = np.linspace(-4, 4, 801)[:, None], 1e-5
    f = bent(0.9)
    assert (f.value(x + step) - f.value(x - step)) / (2 * step) == pytest.approx(f.gradient(x)[:, 0], abs=1e-8)
    curvature = (f.gradient(x + step) - f.gradient(x - step)) / (2 * step)
    assert (curvature >= f.mu).all() and (curvature <= f.L).all() and (f.mu, f.L) == pytest.approx((0.1, 1.9))
    assert f.value(np.zeros((1, 1))) == 0 and f.gradient(np.zeros((1, 1))) == 0
    for wrong in (lambda: bent(1.0), lambda: bent(-0.1), lambda: minority(1)):
        with pytest.raises(ValueError, match="hypothesis fails"):
            wrong()


def test_the_extremal_problem():
    """One client of eleven pushed up by sqrt(kappa B) in the first step of a round, the others down, sums and sizes."""
    problem = statements.extremal(10, 0.01, 30, B=1e-5)
    b = problem.biases[0, 0, :, 0]
    assert b.tolist() == pytest.approx([-1e-2] + [1e-3] * 10) and not problem.biases[:, 1:].any()
    assert problem.mean_B[3] == pytest.approx([1e-5] + [0.0] * 29) and problem.B[3, 0] == pytest.approx(1e-4)
    assert (problem.f.mu, problem.f.L, problem.Q) == (0.1, 1.0, 11)
    for N, a, ratio in ((10, 1 / 12, 1.084), (30, 0.01, 1.015)):
        problem = statements.extremal(10, a, N)
        E = moments(problem).E
        assert E[-1] == pytest.approx(E[-10], rel=2e-3)  # it has settled
        end, lemmas, sharp = statements.floors(problem)
        assert end == E[-1] and round(sharp / end, 3) == ratio and lemmas / end > 100
        plain = 0.81 / 0.4 * a**2 * 1e-5  # (L - mu)^2/(4 mu L) a^2 B: what the spread of the first step can do
        assert 0.99 * plain > E[-1] > plain / (1 + 1.2 * a * N)


def test_sharp_numbers_on_the_kinked_problem():
    problem, E = statements.kinked_problem(), moments(statements.kinked_problem()).E[-1]
    forms = statements.theorem1(problem, LEMMAS), statements.theorem1(problem, SHARP)
    assert [round(form[-1] / E, 2) for form in (*forms, statements.theorem1_closed(problem))] == [15.29, 1.80, 7.99]
    end, *bounds = statements.floors(statements.kinked_problem(T=None))
    assert [round(x / end, 1) for x in bounds] == [23.8, 2.0]


def test_one_local_step_leaves_no_floor_and_mu_equal_to_L_none_either():
    for f in (kinked(0.1, 1.0), kinked(1.0, 1.0)):
        problem = Problem(f, [0.0], np.full((2, 1 if f.mu < 1 else 6), 0.3), 1.0, opposed(2))
        assert statements.certificate(problem, 0, "sharp")[1] == 0 and not statements.theorem1_closed(problem).any()


def test_the_closed_form_in_numbers():
    problem = Problem(quadratic([0.5, 1.0]), [1.0, 1.0], np.full((3, 4), 0.2), 0.3, opposed(2, 2), s=0.6)
    lam = 2 * 0.2 * 0.5 / 1.5
    root = 0.6 * np.sqrt(0.3) + 0.2 * np.sqrt(3) * 0.6  # a (N - 1) = .6 < 1 / mu = 2
    floor = 0.2 * 0.36 * 1.5 / (2 * 0.5 * 2) + 0.25 / 2 * root**2
    assert statements.theorem1_closed(problem) == pytest.approx([2 * (1 - lam) ** (4 * t) + floor for t in range(3)])
    long = Problem(quadratic([0.5, 1.0]), [0.0, 0.0], np.full((2, 40), 0.2), 0.3, opposed(2, 2))
    assert statements.theorem1_closed(long)[1] == pytest.approx(0.25 / 2 * 4 * 0.3)  # 1 / mu = 2 < a (N - 1)


@pytest.mark.parametrize("M", [0.0, 2.0])
def test_sharp_theorem1_at_its_longest_step(M):
    """Steps just at the condition of a round: found by bisection, run exactly on quadratics and on the kinked function."""
    rng = np.random.default_rng(4)
    for _ in range(30):
        Q, N, mu = int(rng.integers(1, 6)), int(rng.integers(1, 6)), 10 ** rng.uniform(-2, 0)
        f = quadratic([mu, 1.0]) if M or rng.random() < 0.5 else kinked(mu, 1.0)
        short, too_long, seed = 0.0, 2.1, int(rng.integers(1000))

        def problem(a, f=f, N=N, Q=Q, seed=seed):
            directions = zero_sum(np.random.default_rng(seed), Q, 2)
            return Problem(f, [0.3, -0.1], np.full((4, N), a), 0.2, directions, M, 0.0 if f.curvature is None else 0.4)

        for _ in range(20):
            middle = (short + too_long) / 2
            try:
                statements.theorem1(problem(middle), SHARP)
                short = middle
            except ValueError:
                too_long = middle
        E = moments(problem(short)).E
        assert short > 0.1 and (statements.theorem1(problem(short), SHARP) * ABOVE >= E).all()
        if M == 0:
            assert short == pytest.approx(2 / (1 + mu), rel=1e-4)


# ------------------------------------------------------------------------------------------------- counterexamples, numbers


@pytest.mark.parametrize(("L", "s", "Q"), [(1.0, 0.1, 4), (2.0, 0.05, 1), (0.5, 1.3, 7)])
def test_sigma_cubed(L, s, Q):
    steps = np.full((2, 1), 1 / 12 / L)
    problem = replace(statements.NOISE_ONLY, f=quadratic([L]), s=s, steps=steps, directions=np.zeros((Q, 1)), B=0.0)
    E = moments(problem).E[-1]
    assert pytest.approx((1 / 12 / L) ** 2 * s**2 / Q) == E
    assert statements.theorem1_printed(problem)[0, -1] / E == pytest.approx(6 * L * s)


def test_index_shift():
    problem = statements.LATE_INDEX
    assert float(f"{moments(problem).E[-1]:.1e}") == 6.3e-3
    assert float(f"{statements.theorem1_printed(problem)[0, -1]:.2e}") == 2.25e-11


@pytest.mark.parametrize(("Q", "ratio"), [(100, 0.293), (1000, 0.029)])
def test_bias_divided_by_the_number_of_clients(Q, ratio):
    problem = statements.kinked_problem(Q)
    assert round(statements.theorem1_printed(problem)[0, -1] / moments(problem).E[-1], 3) == ratio


def test_B_for_its_square_moves_the_failure_to_more_clients():
    few, many = (statements.kinked_problem(Q) for Q in (100, 1000))
    E = moments(many).E[1:]
    assert round(statements.theorem1_printed(few, power=1)[0, -1] / E[-1], 2) == 11.99
    ratios = statements.theorem1_printed(many, power=1)[0, 1:] / E
    assert round(ratios[-1], 2) == 1.20 and round(ratios[3], 3) == 0.864
    assert (np.flatnonzero(ratios < 1) + 1).tolist() == [2, 3, 4, 5, 6, 7]
    longer = statements.kinked_problem(1000, N=20, T=20)
    E = moments(longer).E[-1]
    assert round(statements.theorem1(longer, MENDED)[-1] / E, 3) == 0.516
    assert round(statements.theorem1_printed(longer, power=1)[0, -1] / E, 3) == 1.038


def test_the_measured_error_does_not_fall_with_the_number_of_clients():
    ends = [moments(statements.kinked_problem(Q)).E[-1] for Q in (2, 1000)]
    assert ends[0] == pytest.approx(ends[1])


def test_biases_about_a_moving_centre():
    problem = statements.MOVING_CENTRE
    assert np.abs(problem.bias(0, 3, np.full((1, 100, 1), 0.7)).sum(1)).max() < 1e-15  # at a common theta they cancel
    assert round(statements.theorem1_printed(problem)[0, 1] / moments(problem).E[1], 3) == 0.014


def test_random_participation_leaves_no_bias():
    K, Q = 5, 3
    constraints = np.array([[bin(S)[2:].zfill(K)[k] == "1" for k in range(K)] for S in range(2**K) if bin(S).count("1") == Q])
    assert np.linalg.svd(constraints.astype(float))[1].min() > 0.5  # only b = 0 solves them
    assert np.linalg.matrix_rank(np.ones((1, K))) == 1  # with everyone taking part K - 1 dimensions are free


def test_lemma2_with_shared_noise_fails_by_a_third_of_the_clients(rng):
    for Q in (6, 30):
        x = State(quadratic([1.0]), np.zeros((Q, 1)), np.zeros((Q, 1)), 0.1, 0.0, 0.0, 0.4)
        n = 0.4 * rng.standard_normal(200000)  # one draw for all: g - bar g is that draw
        assert (n**2).mean() / statements.lemma_bounds(x)["Lemma 2, independent noise"][1] == pytest.approx(Q / 3, rel=0.02)


def test_lemma1_is_tight():
    x = statements.ATTAINED  # b = grad f = 2
    assert x.theta.tolist() == x.b.tolist() == [[2.0], [-2.0]] and (x.B, x.M) == (4, 3)
    measured, printed, corrected = statements.lemma_bounds(x)["Lemma 1"]
    assert x.second[0] == measured[0] == pytest.approx(64) and corrected[0] == pytest.approx(64)
    assert printed[0] == 72 < 3 * 4 + 3 * 4 + 3 * 3.0 * 16  # the proof's first line


def test_step_size_reaches_too_far_for_one_and_two_clients():
    for M in (0.0, 0.5, 3.0):
        ratio = [statements.largest_steps(2.0, M)[0] / statements.largest_steps(2.0, M, Q)[1] for Q in range(1, 20)]
        assert [Q for Q, x in enumerate(ratio, 1) if x > 1 + 1e-12] == [1, 2]
    assert statements.largest_steps(2.0, 0.5)[0] == pytest.approx(1 / 32)
    assert statements.largest_steps(2.0, 0.5, 4)[1] == pytest.approx(1 / 24)


def test_lemma5_and_equation6_fail_on_a_common_quadratic():
    problem = statements.COMMON_HESSIAN
    exact = moments(problem)
    V, F = exact.V[0], exact.F[0]
    push = 0.01 * (1 - (1 - 1 / 120) ** np.arange(11)) / 0.1  # |theta_k| after j steps of theta <- (1 - a mu) theta - a b
    assert pytest.approx(push**2) == V
    printed, mended, corrected, equation6 = statements.along(problem, F)
    assert round(printed[-1] / V[-1], 3) == 0.325 and (mended >= V).all() and (corrected >= V).all()
    assert round(equation6[-1] / V[:-1].sum(), 3) == 0.058 and corrected[:-1].sum() >= V[:-1].sum()


def test_theorem2_without_alpha_on_the_left():
    problem = statements.LONG_RUN
    gradient = moments(problem).gradient
    assert round(statements.ergodic_sum(problem, gradient, weighted=False)) == 160
    assert round(statements.theorem2(problem)[0], 1) == 9.8
    assert statements.ergodic_sum(problem, gradient, weighted=True) == pytest.approx(1.60, abs=0.01)  # about f0 - f* = 1.6


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
    printed, proof, corrected, uncorrelated = statements.theorem2(statements.NOISY_RUN)
    assert round(printed / left, 3) == 0.188 and proof < left <= uncorrelated <= corrected


def test_theorem2_as_printed_does_not_know_the_order():
    runs = [
        Problem(rational(1), [2.0], np.full((5, 3), 0.1), B, opposed(2), s=s)
        for B, s in ((schedule("client", 5, 3), 0.0), (schedule("anti", 5, 3), 9.0), (0.0, 1.0))
    ]
    printed, _, corrected, _ = zip(*(statements.theorem2(run) for run in runs), strict=True)
    assert len(set(printed)) == 1 and len(set(corrected)) == 3


def test_floor_is_linear_in_B_quadratic_in_the_step_and_gone_at_one_local_step():
    def floor(**settings):
        return moments(statements.kinked_problem(T=None, **settings)).E[-1]

    assert statements.kinked_problem(a=0.05, N=6, T=None).T == 400  # 12 / (a mu N)
    per_B = [floor(B=B) / B for B in (1e-6, 1e-4, 1e-1)]
    assert np.ptp(per_B) / per_B[0] < 1e-8
    floors = [floor(a=a) for a in (0.01, 0.005)]
    assert np.log2(floors[0] / floors[1]) == pytest.approx(2, abs=0.01)
    assert floor(N=1) == 0.0


def test_the_bias_has_no_effect_on_a_common_quadratic_without_proportional_noise():
    def run(B, M):
        settings = quadratic([0.3, 1.0]), [0.6, -0.8], np.full((9, 5), 0.1)
        return moments(Problem(*settings, B, opposed(4, 2), M, s=0.1)).E

    assert np.abs(run(1.0, 0.0) - run(0.0, 0.0)).max() < 2.5e-16
    assert run(1.0, 1.0)[-1] > 1.1 * run(0.0, 1.0)[-1]


def test_annealed_steps_beat_a_growing_bias_and_the_bound_cannot_tell():
    assert statements.ANNEALED.steps[2, [0, 1, 9]] == pytest.approx(1 / 12 / 3 / np.array([1, 2, 10]) ** 0.25)
    problem = statements.ANNEALED
    assert problem.B[7] == pytest.approx(np.arange(1, 11) ** 0.25)
    E, total = moments(problem).E, statements.theorem1_printed(problem)[1]
    assert E[1000] < E[100] / 3 < E[10] / 9
    # 2 a L B^2 / mu = (2 c L / mu) (j+1)^(1/4) / (t+1), over t = 1..T, divided by Q = 4
    slope = 2 / 12 / 0.1 * (np.arange(1, 11) ** 0.25).sum() / 4
    assert (total[1000] - total[100]) / np.log(1001 / 101) == pytest.approx(slope, rel=0.01)


def test_sigma_remark():
    curvature, theta0 = np.array([0.5, 1.0]), np.ones(2)  # C_1 = 2
    both = 2 / (0.1 * 200) + 0.1 * 0.25 * 201, 2 / (0.1 * 200) + 0.1 * 0.25  # the second: C_1 / (gamma T) + C_2 gamma sigma^2
    assert statements.sgd_average(curvature, theta0, 0.1, np.full(201, 0.5))[1:] == pytest.approx(both)
    growing = np.array([0.1, 0.2, 0.3])  # sigma_2 belongs to a step after theta_1, the last one averaged
    both = 2 / (0.1 * 2) + 0.1 * (0.01 + 0.04 + 0.09), 2 / (0.1 * 2) + 0.1 * (0.01 + 0.04) / 2
    assert statements.sgd_average(curvature, theta0, 0.1, growing)[1:] == pytest.approx(both)
    average = statements.sgd_average(np.array([1.0]), np.array([1.0]), 0.5, np.array([1.0, 0.0, 0.0]))[0]
    assert average == pytest.approx((0.5 + (0.25 + 0.25) / 2) / 2)  # theta_1 = theta_0 / 2 - gamma n


# ------------------------------------------------------------------------------------------------------- the ordering law


def test_growing_bias_wins_through_the_noise_exactly_when_c_mu_is_below_one():
    ratios = [statements.ordering_ratio(c) for c in C_MU]
    assert [round(final, 2) for final, _ in ratios] == [0.14, 0.31, 1.01, 2.73, 5.94]
    means = [mean for _, mean in ratios]
    assert (round(means[0], 3), round(means[-1], 2)) == (0.075, 0.45)  # averaged over the rounds: ahead everywhere
    assert (np.diff(means) > 0).all()
    for c in (0.7, 0.9, 1.1, 1.4):
        assert (statements.ordering_ratio(c)[0] < 1) == (c < 1)
    assert statements.ordering_ratio(steps=0.05)[0] > 1  # a constant step
    assert statements.ordering_ratio(0.5 / 3, mu=3.0) == pytest.approx(statements.ordering_ratio(0.5))  # a law in c mu


def test_the_setting_of_the_ordering_numbers(monkeypatch):
    """Q = 8, d = 4, T = 200, N = 5, M = 1, B linear from 0 to 8 over the local steps, full reversal, s0 = max(20, 40 c)."""
    seen = []
    monkeypatch.setattr(statements, "moments", lambda problem: seen.append(problem) or moments(problem))
    for c, offset in ((0.25, 20), (2.0, 80)):
        statements.ordered(c)
        growing, shrinking = seen[-2:]
        for problem in (growing, shrinking):
            assert (problem.Q, len(problem.theta0), problem.T, problem.N, problem.M, problem.s) == (8, 4, 200, 5, 1.0, 0.0)
            assert problem.steps[:-1].ravel() == pytest.approx(c / (np.arange(1000) + offset)) and not problem.theta0.any()
        assert growing.B[:-1].ravel() == pytest.approx(np.linspace(0, 8, 1000))
        assert (shrinking.B[:-1].ravel() == growing.B[:-1].ravel()[::-1]).all()
        assert problem.steps.max() <= statements.largest_steps(1.0, 1.0)[0]
        for form in (LEMMAS, SHARP):
            assert (statements.theorem1(growing, form) * ABOVE >= moments(growing).E).all()


@pytest.mark.parametrize("settings", [{"T": 150, "N": 4, "offset": 8}, {"T": 300, "N": 1}, {"B": (1.0, 3.0)}])
def test_the_side_of_one_does_not_depend_on_the_settings(settings):
    finals = [statements.ordering_ratio(c, **settings)[0] for c in (0.25, 0.5, 2.0, 4.0)]
    assert [final < 1 for final in finals] == [True, True, False, False]
    assert statements.ordering_ratio(1.0, **settings)[0] == pytest.approx(1, abs=0.06)


@pytest.mark.parametrize("c", [0.5, 1.0, 3.0])
def test_the_noise_law_is_the_weight_of_each_step(c):
    """N = 1, M = 1: E_T = sum_s (B_s / Q) a_s^2 prod_{r>s} [(1 - a_r mu)^2 + a_r^2 mu^2 / Q], an independent form."""
    a, B, weighted = c / (np.arange(40) + 200), np.linspace(0, 8, 40), 0.0
    for s in range(40):
        weighted += B[s] / 8 * a[s] ** 2 * np.prod((1 - a[s + 1 :]) ** 2 + a[s + 1 :] ** 2 / 8)
    assert statements.ordered(c, T=40, N=1, offset=200)[0, -1] == pytest.approx(weighted)
    pure = np.array([a[s] * np.prod(1 - a[s + 1 :]) for s in range(40)]) ** 2
    expected = (np.arange(40) + 200.0) ** (2 * c - 2)  # ~ (s + s0)^(2 c mu - 2); exactly constant at c mu = 1
    assert pure[0] / pure[-1] == pytest.approx(expected[0] / expected[-1], rel=1e-9 if c == 1 else 0.02)


def test_drift_is_the_kinked_run_written_out():
    """Two clients, L = 1, mu = 1/2, c = 2: growing and shrinking biases over 4 rounds of 3 steps."""
    growing = np.linspace(0, 8, 12)
    for row, B in enumerate((growing, growing[::-1])):
        server, E = 0.0, []
        for t in range(4):
            up = down = server
            for i in range(3 * t, 3 * t + 3):
                a, b = 2 / (i + 80), np.sqrt(B[i])
                up, down = up - a * ((1 if up > 0 else 0.5) * up - b), down - a * ((1 if down > 0 else 0.5) * down + b)
            server = (up + down) / 2
            E.append(server**2)
        assert statements.ordered(2.0, mu=0.5, L=1.0, T=4, N=3)[row] == pytest.approx(E, rel=1e-10)


def test_exactly_when_c_mu_is_below_one_is_false_through_the_drift():
    ratios = [statements.ordering_ratio(x * 1.5, mu=1 / 1.5, L=1.0)[0] for x in (1.0, 4 / 3, 2.0, 4.0)]
    assert [round(x, 2) for x in ratios] == [0.40, 0.67, 1.31, 3.37]


def test_the_drift_ties_where_the_law_says():
    assert [round(statements.drift_tie(kappa), 2) for kappa in (1.5, 3.0, 10.0)] == [1.69, 1.38, 1.08]
    for kappa in (1.5, 3.0, 10.0):
        assert statements.tie_law(kappa) == pytest.approx(1 + 1 / kappa)
        assert statements.drift_tie(kappa) == pytest.approx(1 + 1 / kappa, rel=0.05)
    for kappa, Q in ((10.0, 11), (3.0, 4), (2.0, 3)):  # the proof's two equations, solved by bisection on y
        q, L = 1 / Q, kappa

        def c_of(y, q=q, L=L):  # from c m(y) = 2 at mu = 1
            return 2 / (q * L * (1 - y) + 1 - q + q * y)

        def left(y, q=q, L=L, c_of=c_of):
            return c_of(y) * q * (L * (1 - y) ** 2 - 1 - y**2 - 2 * (1 - q) / q * y) + 2 * y

        low, high = 0.0, 1.0
        for _ in range(60):
            y = (low + high) / 2
            low, high = (y, high) if np.sign(left(y)) == np.sign(left(0.0)) else (low, y)
        assert statements.tie_law(kappa, Q) == pytest.approx(c_of(low), rel=1e-9)
        assert statements.drift_tie(kappa, Q) == pytest.approx(c_of(low), rel=0.05)
    with pytest.raises(ValueError, match="the tie is near the law"):
        statements.drift_tie(100.0)
    for x, sign in ((0.9, -1), (1.15, 1)):  # at another length, start and number of local steps
        ratio = statements.ordering_ratio(x * 1.5 * 2, mu=0.5, L=1.0, T=150, N=8, offset=400, B=(1.0, 2.0))[0]
        assert np.sign(ratio - 1) == sign


def test_on_a_smooth_function_the_drift_ties_at_three():
    """Two clients on f' = x + .9 (sqrt(1 + x^2) - 1), written out: the tie is at c f''(0) = 3, whatever L/mu = 19 says."""
    growing = np.linspace(0, 8, 120)
    for c in (2.0, 3.0, 4.0):
        ends = []
        for B in (growing, growing[::-1]):
            server = 0.0
            for t in range(40):
                up = down = server
                for i in range(3 * t, 3 * t + 3):
                    a, b = c / (i + 40 * c * 1.9), np.sqrt(B[i])
                    up -= a * (up + 0.9 * (np.hypot(1, up) - 1) - b)
                    down -= a * (down + 0.9 * (np.hypot(1, down) - 1) + b)
                server = (up + down) / 2
            ends.append(server**2)
        found = statements.ordering_ratio(c, bend=0.9, T=40, N=3)[0]
        assert found == pytest.approx(ends[0] / ends[1], rel=1e-8)
    finals = [statements.ordering_ratio(c, bend=0.9)[0] for c in (2.5, 3.0, 3.5)]
    assert finals[0] < 0.6 and finals[1] == pytest.approx(1, abs=0.01) and finals[2] > 1.5


def test_several_curvatures_tie_elsewhere_through_the_noise():
    """(1, 3, 3, 3), N = 1: at c mu = .9 the growing bias loses already, at c L = .9 it still wins."""
    f, u, B = quadratic([1.0, 3.0, 3.0, 3.0]), opposed(8, 4), np.linspace(0, 8, 400)[:, None]
    for c, wins in ((0.3, True), (0.9, False)):
        steps = diminishing_steps(400, 1, c, max(20.0, 40 * 3 * c))
        E = [moments(Problem(f, np.zeros(4), steps, b, u, 1.0)).E[-1] for b in (B, B[::-1])]
        assert (E[0] < E[1]) == wins


def test_the_drift_of_a_constant_bias_sits_where_the_proof_puts_it():
    """At c = 1/mu + 1/L the average is at -y a N sqrt B, y = (L - mu)/(L + mu), to leading order in aN."""
    mu, N, T = 0.25, 20, 400
    c = 1 / mu + 1
    E = statements.ordered(c, mu=mu, L=1.0, T=T, N=N, offset=200, B=(4.0, 4.0))[0]
    a = c / (200 + T * N)
    assert np.sqrt(E[-1]) / (a * N * 2) == pytest.approx(0.6, rel=0.06)


# ----------------------------------------------------------------------------------------------------------- random grids


@pytest.fixture(scope="module")
def grids():
    """Problems within the printed step, and beyond it."""
    rng = np.random.default_rng(11)
    return [statements.random_theorem1(rng) for _ in range(300)], [statements.random_theorem1(rng, True) for _ in range(300)]


def test_both_corrected_forms_hold_on_the_grid_and_the_sharp_one_is_smaller(grids):
    beyond, ratios = 0, []
    for problem, E in grids[0] + grids[1]:
        lemmas, sharp = (statements.theorem1(problem, forms) for forms in (LEMMAS, SHARP))
        assert (lemmas * ABOVE + statements.ZERO >= E).all() and (sharp * ABOVE + statements.ZERO >= E).all()
        assert (sharp <= lemmas * ABOVE).all()
        beyond += problem.steps.max() > statements.largest_steps(problem.f.L, problem.M)[0]
        ratios.append([statements.worst(form[1:], E[1:]) for form in (lemmas, sharp)])
        if problem.M == 0 and np.ptp(problem.steps) == 0:
            closed = statements.theorem1_closed(problem)
            assert (closed * ABOVE + statements.ZERO >= E).all() and (closed * ABOVE + statements.ZERO >= sharp).all()
    assert beyond > 120 and np.median(ratios, 0)[1] < 2 and np.median(ratios, 0)[0] < 20


def test_the_grids_reach_the_corners(grids):
    drawn = [problem for problem, _ in grids[0] + grids[1]]
    for name, corner in {
        "one client": lambda p: p.Q == 1,
        "one round": lambda p: p.T == 1,
        "one local step": lambda p: p.N == 1,
        "mu = L": lambda p: p.f.mu == p.f.L,
        "badly conditioned": lambda p: p.f.mu < p.f.L / 50,
        "no bias": lambda p: not p.B.any(),
        "large bias": lambda p: p.B.max() > 5,
        "no noise": lambda p: p.M == p.s == 0,
        "all noise": lambda p: p.M > 0 and p.s > 0,
        "from theta*": lambda p: not p.theta0.any(),
        "the longest step": lambda p: statements.largest_steps(p.f.L, p.M)[0] <= statements.SLACK * p.steps.max(),
    }.items():
        assert sum(corner(problem) for problem in drawn) >= 8, name
    assert len({problem.theta0.tobytes() + problem.steps.tobytes() for problem in drawn}) == len(drawn)


@pytest.mark.parametrize("Q", [1, 2, 7])
@pytest.mark.parametrize("N", [1, 6])
@pytest.mark.parametrize("M", [0.0, 2.0])
def test_corrected_theorem1_in_every_corner(Q, N, M):
    """mu = L or .01 L, from theta* or far away, steps at the limit, with and without bias and noise: all combinations."""
    rng = np.random.default_rng(0)
    for mu in (1.0, 0.01):
        for theta0 in (0.0, 100.0):
            for B in (0.0, 1e4):
                for s in (0.0, 50.0):
                    steps = np.full((4, N), statements.largest_steps(1.0, M)[0])
                    f, start = quadratic([mu, 1.0]), np.full(2, theta0)
                    problem = Problem(f, start, steps, B, zero_sum(rng, Q, 2), M=M, s=s)
                    E, slack = moments(problem).E, 1e-9 * (1 + theta0**2)
                    for forms in (LEMMAS, SHARP):
                        assert (statements.theorem1(problem, forms) >= E - slack).all()
                    if M == 0:
                        assert (statements.theorem1_closed(problem) >= E - slack).all()


def test_corrected_theorem2_holds_on_the_grid():
    rng, violated = np.random.default_rng(12), 0
    for _ in range(300):
        problem, gradient = statements.random_theorem2(rng)
        left = statements.ergodic_sum(problem, gradient, weighted=True)
        printed, _, corrected, uncorrelated = statements.theorem2(problem)
        assert left <= uncorrelated <= corrected * (1 + 1e-12)
        violated += printed < statements.ergodic_sum(problem, gradient, weighted=False)
    assert violated > 60


def test_random_problems_repeat():
    for draw in (statements.random_theorem1, statements.random_theorem2):
        one, again = (draw(np.random.default_rng(5)) for _ in range(2))
        assert (one[1] == again[1]).all() and (one[0].steps == again[0].steps).all()


# ------------------------------------------------------------------------------------------------ Hessian, dissimilarity


def numeric_hessians(theta, X, width):
    """hess f_i by differences of the gradient, which another test checks by differences of f: (n, p, p)."""
    shifts = 1e-5 * np.eye(len(theta))
    rows = [(statements.network(theta + e, X, width)[1] - statements.network(theta - e, X, width)[1]) / 2e-5 for e in shifts]
    return np.transpose(rows, (1, 2, 0))


def test_network_derivatives_by_finite_differences(rng):
    X, theta = rng.standard_normal((6, 3)), rng.standard_normal(2 * 5 + 1)
    shifts = 1e-5 * np.eye(len(theta))
    values = [(statements.network(theta + e, X, 2)[0] - statements.network(theta - e, X, 2)[0]) / 2e-5 for e in shifts]
    f, gradient = statements.network(theta, X, 2)
    W, v = theta[:8].reshape(2, 4), theta[8:10]
    assert f == pytest.approx(np.tanh(X @ W[:, :3].T + W[:, 3]) @ v + theta[10])
    assert np.allclose(gradient, np.transpose(values), atol=1e-8)
    assert np.allclose(statements.hessians(theta, X, 2), numeric_hessians(theta, X, 2), atol=1e-8)


def test_spectra_and_weyl_bounds_by_loops(rng):
    """Every eigenvalue and every bound from a Hessian by finite differences, sample by sample; not one bound is looser."""
    for scale in (0.3, 1.0, 3.0):
        X, y, theta = rng.standard_normal((13, 2)), scale * rng.standard_normal(13), scale * rng.standard_normal(3 * 4 + 1)
        f, gradient = statements.network(theta, X, 3)
        r, curvature = f - y, numeric_hessians(theta, X, 3)
        ranked = sorted(range(13), key=lambda i: abs(r[i]))
        found = statements.spectra(theta, X, y, 3)
        for name, S in {"easy": ranked[:4], "all": ranked, "hard": ranked[-4:]}.items():
            GN = sum(np.outer(gradient[i], gradient[i]) for i in S) / len(S)
            H = GN + sum(r[i] * curvature[i] for i in S) / len(S)
            size = sum(abs(r[i]) * np.linalg.norm(curvature[i], 2) for i in S) / len(S)
            eigenvalues, weyl = found[name]
            assert np.allclose(eigenvalues, np.linalg.eigvalsh(H), atol=1e-6)
            assert weyl == pytest.approx(np.linalg.eigvalsh(GN)[0] - size, rel=1e-6, abs=1e-7)
            assert eigenvalues[0] >= weyl - 1e-9 * np.abs(eigenvalues).max()


def test_weyl_is_attained():
    """One sample, r < 0 and no Gauss-Newton term in the direction of the steepest curvature: nothing is lost."""
    theta = np.zeros(5)  # one unit on one input: W, c, v, e; at 0 grad f = (0, 0, 0, 1), hess f couples c, W and v
    eigenvalues, weyl = statements.spectra(theta[:4], np.ones((3, 1)), np.full(3, 2.0), 1)["all"]
    assert weyl == pytest.approx(-2 * np.sqrt(2)) and eigenvalues[0] == pytest.approx(-2 * np.sqrt(2))


def test_training_lowers_the_loss_and_is_gradient_descent():
    rng = np.random.default_rng(3)
    X = rng.standard_normal((90, 2))
    y = statements.network(rng.standard_normal(33), X)[0] + 0.1 * rng.standard_normal(90)
    theta, losses = 0.5 * rng.standard_normal(33), []
    for _ in range(30):
        f, gradient = statements.network(theta, X)
        losses.append(((f - y) ** 2).mean())
        theta = theta - 0.1 * sum((f[i] - y[i]) * gradient[i] for i in range(90)) / 90
    lowest, _ = statements.convexity(30)
    assert losses[-1] < losses[0] / 2
    assert lowest[3] == pytest.approx([values[0] for values, _ in statements.spectra(theta, X, y).values()], rel=1e-6)


def test_easy_samples_are_more_convex_than_all_at_the_start_only():
    for steps, counts in ((0, (20, 20)), (1000, (20, 7))):
        lowest, weyl = statements.convexity(steps)
        assert weyl and ((lowest[:, 0] > lowest[:, 2]).sum(), (lowest[:, 0] > lowest[:, 1]).sum()) == counts


def test_a_harder_sample_can_be_more_convex():
    def loss(theta, c):
        return (theta**2 + c) ** 2 / 2

    for theta, c in ((0.0, 1.0), (0.7, 1.0), (0.7, 5.0)):
        numeric = (loss(theta + 1e-4, c) - 2 * loss(theta, c) + loss(theta - 1e-4, c)) / 1e-8
        assert numeric == pytest.approx(6 * theta**2 + 2 * c, rel=1e-4)  # what [9] and check_easy have


def f_of(h, c, q):
    """f of the clients, written out."""
    return lambda x: sum(q_m * (h_m * (x - c_m) ** 2).sum() / 2 for h_m, c_m, q_m in zip(h, c, q, strict=True))


def test_dissimilarity_is_the_sum_over_clients_and_diverges(rng):
    for _ in range(30):
        (h, c, weights), theta = statements.random_clients(rng), 3 * rng.standard_normal(4)
        f, gradients = f_of(h, c, weights), h * (theta - c)
        mean = sum(q * g for q, g in zip(weights, gradients, strict=True))
        Lambda = sum(q * g @ g for q, g in zip(weights, gradients, strict=True)) / (mean @ mean)
        value, slope, moved, decrease = statements.fedprox_round(h, c, weights, theta)
        assert value == pytest.approx(Lambda) and value >= 1 and slope == pytest.approx(mean)
        assert decrease == pytest.approx(f(theta) - f(moved))
        numeric = [(f(theta + e) - f(theta - e)) / 2e-6 for e in 1e-6 * np.eye(4)]
        assert slope == pytest.approx(numeric, abs=1e-6)
        near, nearer = (statements.fedprox_round(h, c, weights, np.full(4, x))[0] for x in (1e-4, 1e-5))  # theta* = 0
        assert nearer / near == pytest.approx(100, rel=0.01)
        assert weights.sum() == pytest.approx(1) and ((h >= 0.5) & (h <= 2)).all()


def test_proximal_round_solves_every_client(rng):
    (h, c, q), theta, mu = statements.random_clients(rng), rng.standard_normal(4), 3.0
    x = np.tile(theta, (8, 1))
    for _ in range(300):
        x = x - 0.15 * (h * (x - c) + mu * (x - theta))
    assert statements.fedprox_round(h, c, q, theta, mu)[2] == pytest.approx(q @ x)


@pytest.mark.parametrize("gamma", [0.0, 0.1, 0.3])
def test_corrected_fedprox_decrease_holds_with_inexact_clients(rng, gamma):
    """Worst-looking inexact solves: residuals of norm gamma ||grad f_m||, all pointing where f rises."""
    tried, refuted = 0, False
    for _ in range(400):
        (h, c, q), mu = statements.random_clients(rng), 10 ** rng.uniform(1, 3)
        theta, f = rng.standard_normal(4) * 10 ** rng.uniform(-1, 1), f_of(h, c, q)
        Lambda, slope, exact, _ = statements.fedprox_round(h, c, q, theta, mu)
        residual = gamma * np.linalg.norm(h * (theta - c), axis=1)[:, None] * slope / np.linalg.norm(slope)
        moved = exact + q @ (residual / (h + mu))
        printed, rho = statements.rho(np.sqrt(Lambda), h.max(), mu, gamma)
        decrease = f(theta) - f(moved)
        assert decrease >= rho * slope @ slope - 1e-12
        refuted |= decrease < printed * slope @ slope
        tried += rho > 0
    assert tried > 20 and refuted


def test_fedprox_rho_in_numbers():
    assert statements.rho(2.0, 3.0, 10.0, 0.5) == pytest.approx((0.1, 0.1 - 0.1 - 0.09 - 3 * 9 / 200))


# ------------------------------------------------------------------------------------------------------------ the program


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """One whole run: (exit code, rows, what was printed, {figure: [(x, y) by label of every panel]}, folder)."""
    out, drawn, printed = tmp_path_factory.mktemp("theory"), {}, []
    close = figures.plt.close

    def record(figure):
        name = list(figures.FIGURES)[len(drawn)]
        drawn[name] = [{line.get_label(): line.get_data() for line in axis.lines} for axis in figure.axes]
        close(figure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures.plt, "close", record)
        patch.setattr("builtins.print", lambda text: printed.append(text))
        code = check.main(["--out", str(out)])
    return code, json.loads((out / "check.json").read_text()), "\n".join(printed), drawn, out


def test_check_reproduces_every_documented_verdict(program):
    code, rows, table, _, out = program
    assert code == 0 and table.endswith(f"{len(rows)} statements; all as documented")
    names = ["bounds.png", "ergodic.png", "floor.png", "ordering.png", "spectra.png", "ties.png"]
    assert sorted(path.name for path in out.glob("*.png")) == names
    for row in rows:
        assert row["printed"] == row["documented"] and row["corrected"] != "violated"
        [line] = [line for line in table.splitlines() if line.startswith(f"{row['statement']:44}")]
        ratios = [f"{row[key]:.3g}" for key in ("printed_ratio", "corrected_ratio", "sharp_ratio") if row[key] is not None]
        said = " ".join([row["printed"], row["corrected"] or "", *ratios, row["note"]])
        assert sorted(said.split()) == sorted(line[44:].split())
        if row["printed_ratio"] is not None:
            assert (row["printed_ratio"] < 1 - 1e-9) == (row["printed"] == "violated")
    found = " ".join(row["statement"] for row in rows)
    for name in ("Assumption 1", *(f"Lemma {i}" for i in range(1, 6)), "Equation 5", "Equation 6", "Theorem 1", "Theorem 2"):
        assert name in found
    assert statements.GRID >= 500


def test_the_table_that_is_kept_is_the_one_that_comes_out(program):
    kept = json.loads((Path(__file__).parent.parent / "theory" / "figures" / "check.json").read_text())
    assert len(program[1]) == len(kept) > 30
    for row, before in zip(program[1], kept, strict=True):
        assert list(row) == list(before)
        for key, value in before.items():
            assert row[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), (row["statement"], key)


def test_the_numbers_of_the_table(program):
    """The worst ratios that the pages quote, and what the sharp floor makes of them."""
    rows = {row["statement"]: row for row in program[1]}
    printed = {
        "Assumption 1, b_k depends on theta": 0.0143,
        "Lemma 1": 1.13,
        "Lemma 1, second line of its proof": 0.429,
        "Lemma 2, independent noise": 1.87,
        "Lemma 2, noise shared by clients": 0.25,
        "Equation 5": 1.6,
        "Lemma 5": 0.325,
        "Equation 6": 0.0584,
        "Theorem 1, sigma^3 and L on the noise": 0.6,
        "Theorem 1, indices t = 1..T": 3.56e-9,
        "Theorem 1, bias over Q = 1000, B for B^2": 0.864,
        "Theorem 1, random grid": 0.0546,
        "Theorem 1 by its proof; closed form": 0.0478,
        "Theorem 2, alpha missing on the left": 0.0611,
        "Theorem 2, no sigma, alpha restored": 0.188,
        "Theorem 2 by its proof": 0.0707,
        "Theorem 2, random grid": 0.00011,
        "Remark, sigma_t in [39]": 186,
        "Remark, Lambda bounded by lambda": 1.25e-12,
        "Remark, FedProx rho_t": 0.522,
        "Remark, a ~ 1/t mitigates a growing B": 453,
        "Remark, curriculum ends below anti": 0.168,
        "Remark, the same through the drift": 0.297,
    }
    corrected = {"Theorem 1, indices t = 1..T": 2.32, "Theorem 1, bias over Q = 100": 13.6, "Theorem 2, random grid": 1.26}
    sharp = {"Theorem 1, indices t = 1..T": 1.16, "Theorem 1, bias over Q = 100": 1.77, "Sharp floor, kinked f": 1.80}
    for wanted, column in ((printed, "printed_ratio"), (corrected, "corrected_ratio"), (sharp, "sharp_ratio")):
        for name, value in wanted.items():
            assert float(f"{rows[name][column]:.3g}") == value, name
    for name in ("Theorem 1, random grid", "Sharp floor, one step", "Sharp floor, extremal problem"):
        assert 1 - 1e-9 <= rows[name]["sharp_ratio"] < 1.01
    notes = {name: row["note"] for name, row in rows.items()}
    assert "N = T = 20: 0.516, printed form 1.04" in notes["Theorem 1 by its proof; closed form"]
    assert "1.084, 1.015, 1.002, 1.014 (lemmas 144, 114, 104, 943)" in notes["Sharp floor, extremal problem"]
    assert "0.14, 0.31, 1.01, 2.73, 5.94" in notes["Remark, curriculum ends below anti"]
    assert "0.075 to 0.45" in notes["Remark, curriculum ends below anti"]
    assert "avg ||grad||^2 sqrt T = 1.012 to 1.014" in notes["Remark, the ergodic rate survives bias"]
    assert "easy > all 7/20 after 1000 steps; at step 0 easy > all 20/20" in notes["Remark, easy samples are more convex"]


def test_the_figures_show_what_they_say(program):
    drawn = program[3]
    problem = statements.kinked_problem(1000, T=60)
    left, right = drawn["bounds.png"]
    E = moments(problem).E
    for label, values in {
        "measured": E,
        "printed": statements.theorem1_printed(problem)[0],
        "corrected by its lemmas": statements.theorem1(problem, LEMMAS),
        "sharp": statements.theorem1(problem, SHARP),
        "sharp, closed form": statements.theorem1_closed(problem),
    }.items():
        assert right[label][0].tolist() == list(range(1, 61)) and right[label][1] == pytest.approx(values[1:]), label
    assert left["measured"][1][0] > 0.1
    *sweeps, extremal = drawn["floor.png"]
    for panel, slope in zip(sweeps, (1, 2, None), strict=True):
        measured, sharp, lemmas = (panel[label][1] for label in ("measured", "sharp", "corrected by its lemmas"))
        assert (measured < sharp).all() and (sharp < lemmas).all()
        if slope:
            assert np.polyfit(np.log(panel["measured"][0]), np.log(measured), 1)[0] == pytest.approx(slope, abs=0.05)
    assert extremal["sharp, L/μ = 10"][1].min() < 1.03 and extremal["corrected by its lemmas, L/μ = 10"][1].min() > 100
    noise = drawn["ordering.png"][0]["at the end"]
    assert noise[0][[0, 4, 8]] == pytest.approx([0.25, 1, 4]) and noise[1][[0, 4, 8]] == pytest.approx(
        [0.14, 1.01, 5.94], abs=0.01
    )
    curves = drawn["ordering.png"][1]
    assert curves["growing, c μ = 2"][1] == pytest.approx(statements.ordered(2.0)[0])
    assert curves["shrinking, c μ = 0.5"][1] == pytest.approx(statements.ordered(0.5)[1])
    ratios, ties = drawn["ties.png"]
    assert ratios["noise, quadratic f"][1][-1] == pytest.approx(5.94, abs=0.01)
    assert ratios["drift, kinked f, L/μ = 1.5"][1][-1] == pytest.approx(3.37, abs=0.01)
    kappa, law = ties["tie through the drift at a kink, c μ = 1 + μ/L"]
    assert law == pytest.approx(1 + 1 / kappa) and set(ties["tie through the noise, c μ = 1"][1]) == {1}
    kappa, measured = ties["measured"]
    assert measured == pytest.approx(1 + 1 / kappa, rel=0.05)
    sides, rate = drawn["ergodic.png"]
    assert sides["printed, unweighted: left side"][1][-1] == pytest.approx(160, abs=0.5)
    assert sides["printed, unweighted: right side"][1][-1] == pytest.approx(9.8, abs=0.05)
    whole = statements.theorem2(statements.LONG_RUN)
    assert sides["corrected, weighted by α: right side"][1][-1] == pytest.approx(whole[2])
    assert (sides["corrected, weighted by α: left side"][1] < sides["corrected, weighted by α: right side"][1]).all()
    assert rate["measured, biased and noisy"][1] * np.sqrt([30, 100, 300, 1000]) == pytest.approx(np.full(4, 1.013), abs=0.003)
    start, late = drawn["spectra.png"]
    assert (start["easy"][1] > start["all"][1]).all() and (late["easy"][1] > late["all"][1]).sum() == 7
    assert (late["easy"][1] > late["hard"][1]).all() and (np.diff(late["all"][1]) >= 0).all()


@pytest.mark.parametrize(
    "row",
    [
        statements.row("surprise", "violated", 1.2),
        statements.row("broken", "violated", 0.5, 0.9),
        statements.row("blunt", "ours", "ours", None, 0.9),
    ],
)
def test_an_unexpected_verdict_or_a_violated_correction_exits_1(row, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(statements, "SECTIONS", (lambda: [row],))
    monkeypatch.setattr(figures, "FIGURES", {})
    assert check.main(["--out", str(tmp_path)]) == 1
    assert f"NOT as documented: {row['statement']}" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(("easy", "late", "label"), [(1.0, -1.0, "partly"), (-1.0, -1.0, "violated"), (1.0, 1.0, "partly")])
def test_the_verdict_on_easy_samples_follows_the_networks(easy, late, label, monkeypatch):
    """lambda_min of all samples is 0 in 20 networks, of easy ones `easy` at the start and `late` after training."""
    fake = {0: np.tile([easy, 0.0, -2.0], (20, 1)), 1000: np.tile([late, 0.0, -2.0], (20, 1))}
    monkeypatch.setattr(statements, "convexity", lambda steps: (fake[steps], True))
    (row,) = statements.check_easy()
    assert row["printed"] == label and f"step 0 easy > all {20 if easy > 0 else 0}/20" in row["note"]


def test_the_verdicts_on_the_order_follow_the_runs(monkeypatch):
    """Runs in which the growing bias always wins, and a tie at another place, break both laws."""
    monkeypatch.setattr(statements, "ANNEALED", statements.kinked_problem(T=1000, N=1))
    monkeypatch.setattr(statements, "ordering_ratio", lambda *c, **settings: (0.5, 0.2))
    monkeypatch.setattr(statements, "drift_tie", lambda kappa, Q: 1.0)
    noise, drift = list(statements.check_remarks())[-2:]
    assert [row[key] for row in (noise, drift) for key in ("printed", "corrected")] == [
        "holds",
        "violated",
        "holds",
        "violated",
    ]


def test_tracked_figures_are_never_overwritten_unasked(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(statements, "SECTIONS", ())
    monkeypatch.setattr(figures, "FIGURES", {})
    assert check.main([]) == 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "runs" / "theory" / "check.json"]


@pytest.mark.parametrize("arguments", [["--wrong"], ["extra"], ["--out"]])
def test_bad_usage_is_one_line_and_exit_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        check.main(arguments)
    assert stop.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


def test_an_unwritable_folder_is_bad_usage(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        check.main(["--out", str(tmp_path / "file" / "inside")])
    assert stop.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


def test_ctrl_c_is_one_line_and_exit_130(tmp_path):
    def heed():  # a shell's background jobs ignore the signal, and so would their children
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    root, words = Path(__file__).resolve().parent.parent, [sys.executable, "-m", "theory.check", "--out", str(tmp_path / "x")]
    env = {**os.environ, "TQDM_DISABLE": "1"}
    process = subprocess.Popen(words, cwd=root, stderr=subprocess.PIPE, env=env, preexec_fn=heed)
    while process.poll() is None and not (tmp_path / "x" / "check.json").exists():
        time.sleep(0.05)  # until it is past its imports
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and error.decode().splitlines() == ["python -m theory.check: interrupted"]
