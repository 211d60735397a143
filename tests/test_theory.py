"""theory/ against closed forms, brute-force loops, Monte Carlo and the numbers of the specification."""

import json
from dataclasses import replace

import numpy as np
import pytest

from theory import bounds, check, dissimilarity, hessian, problems
from theory.local_sgd import exact_moments, one_step, simulate
from theory.model import (
    Clients,
    annealed_steps,
    diminishing_steps,
    kinked,
    make_problem,
    opposed,
    quadratic,
    rational,
    ripple,
    schedule,
    with_unrun_round,
    zero_sum,
)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def small_quadratic(Q=3, T=3, N=4, M=0.5, s=0.3, B=0.2, d=2, seed=5):
    """A quadratic problem with every kind of noise, steps within Theorem 1's limit and a growing bias."""
    rng = np.random.default_rng(seed)
    f = quadratic(np.linspace(0.3, 1.0, d))
    steps = rng.uniform(0.3, 1, (T + 1, N)) * bounds.theorem1_step(1.0, M)
    return make_problem(f, rng.standard_normal(d), steps, B * schedule("data", T + 1, N), zero_sum(rng, Q, d), M=M, s=s)


# ---- model ----


@pytest.mark.parametrize("f", [quadratic([0.5, 2.0]), kinked(0.2, 3.0), rational(2), ripple(2)])
def test_functions_have_the_constants_they_claim(f, rng):
    x, y = rng.uniform(-4, 4, (2, 4000, 2))
    numeric = [(f.value(x + e) - f.value(x - e)) / 2e-6 for e in 1e-6 * np.eye(2)]
    assert np.allclose(f.gradient(x), np.transpose(numeric), atol=1e-5)
    slope, gap = f.gradient(x) - f.gradient(y), np.linalg.norm(x - y, axis=1)
    assert (np.linalg.norm(slope, axis=1) <= f.L * gap * (1 + 1e-12)).all()
    assert ((slope * (x - y)).sum(1) >= f.mu * gap**2 - 1e-12).all() or f.mu == 0
    assert (f.value(x) >= f.minimum).all() and f.value(np.zeros(2)) == f.minimum
    assert (np.linalg.norm(f.gradient(x), axis=1) <= f.G).all()


def test_the_constants_are_attained():
    peak = np.full(3, 1 / np.sqrt(3))
    assert np.linalg.norm(rational(3).gradient(peak)) == pytest.approx(rational(3).G)
    assert rational(1).gradient(np.array([1e-6]))[0] / 1e-6 == pytest.approx(rational(1).L)
    assert np.linalg.norm(ripple(3).gradient(np.full(3, np.pi / 2))) == pytest.approx(ripple(3).G)


def test_biases_sum_to_zero_with_the_stated_size(rng):
    for directions in (zero_sum(rng, 5, 3), opposed(6, 3)):
        assert np.abs(directions.sum(0)).max() < 1e-14
        assert np.linalg.norm(directions, axis=1).max() == pytest.approx(1)
    assert not zero_sum(rng, 1, 3).any()
    with pytest.raises(ValueError, match="even"):
        opposed(5)


def test_schedules_follow_the_printed_orders(rng):
    orders = {order: schedule(order, 6, 4, mean=0.7, rng=rng) for order in ("client", "data", "anti", "constant", "shuffled")}
    for B in orders.values():
        assert B.shape == (6, 4) and (B > 0).all() and B.mean() == pytest.approx(0.7)
    client, data = orders["client"], orders["data"]
    assert (np.ptp(client, axis=1) == 0).all() and (np.diff(client[:, 0]) > 0).all()
    assert (np.diff(data, axis=1) > 0).all() and np.allclose(data[:-1, -1], data[1:, 0])  # B^(t,J) = B^(t+1,0)
    assert (orders["anti"] == client[::-1]).all() and np.ptp(orders["constant"]) == 0
    assert sorted(orders["shuffled"][:, 0]) == pytest.approx(sorted(client[:, 0]))
    for order, generator in (("shuffled", None), ("spiral", rng)):
        with pytest.raises(ValueError, match="order"):
            schedule(order, 6, 4, rng=generator)


# ---- local SGD ----


def test_exact_moments_are_the_monte_carlo_limit():
    problem = small_quadratic()
    exact, sampled = exact_moments(problem), simulate(problem, replicas=60000, seed=1)
    for name in ("E", "gradient", "V", "F"):
        assert np.allclose(getattr(exact, name), getattr(sampled, name), rtol=0.02, atol=1e-4), name


def test_exact_moments_without_noise_are_the_trajectory():
    problem = small_quadratic(M=0.0, s=0.0)
    exact, run = exact_moments(problem), simulate(problem)
    for name in ("E", "gradient", "V", "F"):
        assert np.allclose(getattr(exact, name), getattr(run, name), rtol=1e-10, atol=1e-15), name


def test_simulation_is_algorithm_3_written_out():
    problem = problems.kinked_problem(Q=4, T=3, N=5, theta0=0.3)
    server, E = 0.3, [0.09]
    for _ in range(3):
        clients = []
        for sign in (1, 1, -1, -1):
            theta = server
            for _ in range(5):
                theta -= 1 / 12 * ((1.0 if theta > 0 else 0.1) * theta + sign * 0.01)
            clients.append(theta)
        server = sum(clients) / 4
        E.append(server**2)
    assert pytest.approx(E, rel=1e-12) == simulate(problem).E


def test_one_step_is_the_monte_carlo_limit(rng):
    f, Q, d, a, M, s = kinked(0.1, 1.0), 3, 2, 0.2, 0.7, 0.4
    clients, biases = Clients(f, rng.standard_normal((Q, d))), 0.5 * zero_sum(rng, Q, d)
    step, drift = one_step(clients, biases, a, M, s), f.gradient(clients.theta) + biases
    scale = np.sqrt((M * (drift**2).sum(1, keepdims=True) + s**2) / d)
    g = drift + scale * rng.standard_normal((200000, Q, d))
    moved = clients.theta - a * g
    average = moved.mean(1, keepdims=True)
    bar = f.gradient(clients.theta).mean(0)
    assert step.second == pytest.approx((g**2).sum(2).mean(0), rel=0.01)
    assert step.off_mean == pytest.approx(((g.mean(1) - bar) ** 2).sum(1).mean(), rel=0.01)
    assert step.spread == pytest.approx(((g - g.mean(1, keepdims=True)) ** 2).sum(2).mean(), rel=0.01)
    assert pytest.approx((average**2).sum(2).mean(), rel=0.01) == step.E
    assert pytest.approx(((moved - average) ** 2).sum(2).mean(), rel=0.01) == step.V


def test_exact_moments_refuse_what_they_cannot_do():
    for problem in (problems.kinked_problem(), problems.moving_centre()):
        with pytest.raises(ValueError, match="quadratic"):
            exact_moments(problem)


# ---- bounds against loops ----


def test_theorem1_printed_is_the_double_sum():
    problem = small_quadratic(T=4)
    a, B, f, M, s, Q = problem.steps, problem.B, problem.f, problem.M, problem.s, problem.Q
    for T in range(5):
        bound = problem.theta0 @ problem.theta0
        for t in range(1, T + 1):
            for j in range(problem.N):
                bound *= 1 - a[t, j] * f.mu / 2
        for t in range(1, T + 1):
            for j in range(problem.N):
                bound += 2 * a[t, j] ** 2 * f.L * ((3 + 2 * M) * B[t, j] + 3 * s**3) / Q
                bound += 2 * a[t, j] * f.L * B[t, j] ** 2 / f.mu / Q
        assert bounds.theorem1_printed(problem)[T] == pytest.approx(bound)


def test_equation6_and_the_proof_of_theorem1_are_the_sums_they_state():
    problem = small_quadratic(T=3)
    a, B, mu, M, s, Q, N = problem.steps, problem.B, problem.f.mu, problem.M, problem.s, problem.Q, problem.N
    F = np.array([0.3, 0.1, 0.4, 0.2])
    E = [problem.theta0 @ problem.theta0]
    for t in range(3):
        equation6, bound = 0.0, E[-1] * np.prod(1 - a[t] * mu / 2)
        V, total = 0.0, 0.0
        for j in range(N):
            factor = 2 * a[t, j] / Q * np.prod(1 - a[t, j:] * mu / 2)  # L = 1
            inner = 2 * a[t, j] * (3 + 2 * M) * Q * F[j] + (a[t, j] * (3 + 2 * M) + B[t, j] / mu) * B[t, j]
            equation6 += factor * (inner + 3 * a[t, j] * s**2)
            bound += factor * ((2 * a[t, j] * (3 + 2 * M) + B[t, j] / mu) * B[t, j] + 6 * a[t, j] * s**2)
            total += V
            forms = [(0.0, a[t, j] ** 2)] if j == 0 else [(1 - a[t, j] * mu, a[t, j] / mu)]
            forms += [((1 + 1 / j) * (1 - a[t, j] * mu) ** 2, (1 + j) * a[t, j] ** 2)] if j else []
            noise = a[t, j] ** 2 * (1 - 1 / Q) * (4 * M * F[j] + 2 * M * B[t, j] + s**2)
            V = min(c * V + e * B[t, j] for c, e in forms) + noise
        E.append(bound)
        assert bounds.equation6_printed(problem, F, t) == pytest.approx(equation6)
        assert bounds.equation6_corrected(problem, F, t) == pytest.approx(total)
    assert bounds.theorem1_proof(problem) == pytest.approx(E)


def test_the_certificate_asks_more_of_a_second_local_step():
    """M = 5, Q = 100, a = .4: one step alone may be this long; after it V weighs on the F of the step before."""
    for N, works in ((1, True), (2, False)):
        problem = make_problem(quadratic([1.0]), [1.0], np.full((2, N), 0.4), 0.1, opposed(100), M=5.0)
        assert problems.certified(problem) == works


@pytest.mark.parametrize("form", ["contraction", "growth"])
def test_the_certificate_is_the_recursion_run_forward(form):
    """With F = 0 the recursions for E and V are equalities of numbers: run forward they give what the weights give."""
    problem = small_quadratic(N=5)
    f, M, Q, s = problem.f, problem.M, problem.Q, problem.s
    E, V = 2.0, 0.0
    for j, (a, B) in enumerate(zip(problem.steps[1], problem.B[1], strict=True)):
        noise = 2 * M * B + s**2
        E, V = (
            (1 - a * f.mu) * E + 2 * a * f.L * V + a**2 * noise / Q,
            bounds.lemma5_corrected(f, V, 0.0, a, B, M, s, Q, j, form),
        )
    contraction, floor = bounds.certificate(problem, 1, form)
    assert contraction * 2.0 + floor == pytest.approx(E)


def test_lemmas_are_the_sums_over_clients_they_state(rng):
    mu, L, a, B, M, s, Q = 0.2, 1.0, 0.03, 0.4, 0.6, 0.3, 3
    f, theta = kinked(mu, L), rng.standard_normal((Q, 1))
    clients, x = Clients(f, theta), theta[:, 0]
    gaps = [float(f.value(point)) for point in theta]
    mean = sum(x) / Q
    V = sum((x_k - mean) ** 2 for x_k in x) / Q
    gap_of_mean = float(f.value(np.array([mean])))
    lemma3 = mean**2 + sum(2 * a / Q * ((a * L - 0.5) * F - mu / 2 * p**2) for F, p in zip(gaps, x, strict=True))
    lemma4 = (1 - a * mu) * mean**2 - a / 2 * gap_of_mean + 2 * a * L * V + a**2 * ((3 + 2 * M) * B + 3 * s**2) / Q
    noise = a**2 / Q * (2 * M * B + s**2)
    fixed4 = (1 - a * mu) * mean**2 + 2 * a * L * V + noise - a * (1 - 2 * a * L * (1 + 2 * M / Q)) * sum(gaps) / Q
    equation5 = 2 * (3 + 2 * M) * L * sum(gaps) / Q + (3 + 2 * M) * B + 3 * s**2
    lemma2 = (3 + 2 * M) / Q**2 * sum(2 * L * F + B for F in gaps) + 3 * s**2 / Q
    fixed2 = sum(M * (4 * L * F + 2 * B) + s**2 for F in gaps) / Q**2
    assert bounds.lemma2_printed(clients.gaps, B, L, M, s) == pytest.approx(lemma2)
    assert bounds.lemma2_corrected(clients.gaps, B, L, M, s) == pytest.approx(fixed2)
    assert bounds.lemma3_printed(clients, a) == pytest.approx(lemma3 + 2 * a * L * V)
    assert bounds.lemma4_printed(clients, a, B, M, s) == pytest.approx(lemma4)
    assert bounds.lemma4_corrected(clients, a, B, M, s) == pytest.approx(fixed4)
    assert bounds.equation5_printed(clients, B, M, s) == pytest.approx(equation5)
    lemma5 = (1 - a * mu / 2) * V + a**2 * equation5
    arguments = (f, V, sum(gaps) / Q, a, B, M, s)
    assert bounds.lemma5_printed(*arguments) == pytest.approx(lemma5 + a * B**2 / mu)
    assert bounds.lemma5_proof(*arguments) == pytest.approx(lemma5 + 2 * a * B / mu)
    spread = a**2 * (1 - 1 / Q) * (4 * M * L * sum(gaps) / Q + 2 * M * B + s**2)
    for form, drift in (
        ("contraction", (1 - a * mu) * V + a * B / mu),
        ("growth", 1.5 * (1 - a * mu) ** 2 * V + 3 * a**2 * B),
    ):
        assert bounds.lemma5_corrected(*arguments, Q, 2, form) == pytest.approx(drift + spread)
        first = bounds.lemma5_corrected(f, 0.0, *arguments[2:], Q, 0, form)  # from V = 0 only the bias itself is added
        assert first == pytest.approx(a**2 * B + spread)


def test_lemmas_that_hold_as_printed_hold_on_random_states(rng):
    for _ in range(1000):
        clients, biases, a, B, M, s = problems.random_state(rng)
        a *= min(1.0, 2 * bounds.lemma4_step(clients.f.L, M, len(biases)))
        step, L, above = one_step(clients, biases, a, M, s), clients.f.L, 1 + 1e-9
        moved = clients.average - a * clients.f.gradient(clients.theta).mean(0)
        assert (step.second <= bounds.lemma1_printed(clients.gaps, B, L, M, s) * above + check.ZERO).all()
        assert step.off_mean <= bounds.lemma2_printed(clients.gaps, B, L, M, s) * above + check.ZERO
        assert moved @ moved <= bounds.lemma3_printed(clients, a) * above + check.ZERO
        assert bounds.lemma4_printed(clients, a, B, M, s) * above + check.ZERO >= step.E
        assert step.spread <= bounds.equation5_printed(clients, B, M, s) * above + check.ZERO


def test_corrected_lemmas_hold_on_random_states(rng):
    for _ in range(1000):
        clients, biases, a, B, M, s = problems.random_state(rng)
        step, Q, above = one_step(clients, biases, a, M, s), len(biases), 1 + 1e-9
        assert (step.second <= bounds.lemma1_corrected(clients.gaps, B, 1.0, M, s) * above + check.ZERO).all()
        assert step.off_mean <= bounds.lemma2_corrected(clients.gaps, B, 1.0, M, s) * above + check.ZERO
        assert bounds.lemma4_corrected(clients, a, B, M, s) * above + check.ZERO >= step.E
        for form in ("contraction", "growth"):
            bound = bounds.lemma5_corrected(clients.f, clients.V, clients.gaps.mean(), a, B, M, s, Q, 3, form)
            assert bound * above + check.ZERO >= step.V


def test_the_closed_form_in_numbers():
    problem = make_problem(quadratic([0.5, 1.0]), [1.0, 1.0], np.full((3, 4), 0.2), 0.3, opposed(2, 2), s=0.6)
    floor = 0.2 * 0.36 / (0.5 * 2) + 4 * 1.0 / 0.5 * (0.8**2 * 0.3 + 4 * 0.04 * 0.36)  # a N = .8 < 1 / mu = 2
    assert bounds.theorem1_closed(problem) == pytest.approx([2 * 0.9 ** (4 * t) + floor for t in range(3)])


def test_theorem2_forms_are_the_sums_they_state():
    rng = np.random.default_rng(3)
    problem = make_problem(rational(2), [1.0, -2.0], rng.uniform(0.01, 0.2, (3, 4)), 0.1, zero_sum(rng, 3, 2), s=0.7)
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
    assert bounds.theorem2_printed(problem) == pytest.approx(printed)
    assert bounds.theorem2_proof(problem) == pytest.approx(proof)
    assert bounds.theorem2_uncorrelated(problem) == pytest.approx(uncorrelated)
    assert bounds.theorem2_corrected(problem) == pytest.approx(corrected)
    assert uncorrelated < corrected


def test_later_gradients_are_correlated_with_earlier_noise():
    """The term that theorem2_uncorrelated drops, E f'(theta - a (f' + n)) n, by Gauss-Hermite quadrature: not zero."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    f, theta, a = rational(1), 1.0, 0.1
    moved = theta - a * (f.gradient(np.array([theta])) + nodes[:, None])
    correlation = (weights / weights.sum()) @ (f.gradient(moved)[:, 0] * nodes)
    assert correlation > 0.03  # - a f''(1) E n^2 = a / 2 at first order


def fails(match, call, *arguments):
    with pytest.raises(ValueError, match=match):
        call(*arguments)


def test_bounds_raise_outside_their_hypotheses():
    inside, rational_run = small_quadratic(), problems.long_run(T=3)
    long_steps = make_problem(quadratic([1.0]), [1.0], np.full((2, 3), 0.4), 0.1, opposed(2))
    for form in (bounds.theorem1_printed, bounds.theorem1_proof, bounds.bias_sum_printed):
        fails("mu > 0", form, rational_run)
        fails("alpha <=", form, long_steps)
    fails("mu > 0", bounds.theorem1_corrected, rational_run)
    fails("do not depend on theta", bounds.theorem1_corrected, problems.moving_centre())
    fails(
        "not positive",
        bounds.theorem1_corrected,
        make_problem(quadratic([1.0]), [1.0], [[0.7], [0.7]], 0.1, opposed(2)),
    )
    fails("M = 0", bounds.theorem1_closed, inside)
    fails("one constant step", bounds.theorem1_closed, small_quadratic(M=0.0))
    fails("finite G", bounds.theorem2_corrected, inside)
    smaller = make_problem(quadratic([1.0]), [1.0], np.full((2, 2), 0.6), 0.1, opposed(2))
    fails("1 / \\(2L\\)", bounds.theorem1_closed, smaller)
    fails("M = 0 and mu > 0", bounds.theorem1_closed, rational_run)
    fails("do not depend", bounds.theorem1_closed, problems.moving_centre())
    varying = make_problem(rational(1), [1.0], np.full((2, 2), 0.1), 0.1, opposed(2))
    varying = replace(varying, biases=lambda t, j, theta: 0 * theta)
    for form in (bounds.theorem2_uncorrelated, bounds.theorem2_corrected):
        fails("do not depend", form, varying)
    fails("one squared gradient per round", bounds.ergodic_sum, rational_run, np.ones(3), True)
    noisy = make_problem(rational(1), [1.0], np.full((2, 2), 0.1), 0.1, opposed(2), M=1.0)
    for form in (
        bounds.theorem2_printed,
        bounds.theorem2_proof,
        bounds.theorem2_uncorrelated,
        bounds.theorem2_corrected,
    ):
        fails("M = 0", form, noisy)
    state = Clients(quadratic([1.0]), np.ones((2, 1)))
    fails("bar L", bounds.lemma4_printed, state, 0.2, 0.1, 0.0, 0.1)
    fails("alpha > 0", bounds.lemma4_corrected, state, 0.0, 0.1, 0.0, 0.1)
    fails("minimum", bounds.lemma1_printed, -1.0, 0.1, 1.0, 0.0, 0.1)
    fails("mu > 0", bounds.lemma5_printed, rational(1), 0.1, 0.1, 0.1, 0.1, 0.0, 0.1)
    fails("mu \\+ L", bounds.lemma5_corrected, quadratic([1.0]), 0.1, 0.1, 1.5, 0.1, 0.0, 0.1, 2, 1)
    fails("mu > 0", bounds.lemma5_proof, rational(1), 0.1, 0.1, 0.1, 0.1, 0.0, 0.1)
    fails("mu > 0", bounds.lemma5_corrected, rational(1), 0.1, 0.1, 0.1, 0.1, 0.0, 0.1, 2, 1)
    fails("V = 0 at j = 0", bounds.lemma5_corrected, quadratic([1.0]), 0.1, 0.1, 0.1, 0.1, 0.0, 0.1, 2, 0)
    fails("unknown form", bounds.lemma5_corrected, quadratic([1.0]), 0.1, 0.1, 0.1, 0.1, 0.0, 0.1, 2, 1, "guess")
    fails("mu > 0", bounds.equation6_printed, rational_run, np.ones(5), 0)
    nonconvex = Clients(rational(1), np.ones((2, 1)))
    fails("mu > 0", bounds.lemma3_printed, nonconvex, 0.1)
    for form in (bounds.lemma4_printed, bounds.lemma4_corrected):
        fails("mu > 0", form, nonconvex, 0.01, 0.1, 0.0, 0.1)
    for form in (bounds.lemma3_printed, lambda c, a: bounds.lemma4_printed(c, a, 0.1, 0.0, 0.1)):
        fails("alpha > 0", form, state, 0.0)
    fails("gamma", bounds.sigma_corrected, 1.0, 0.6, np.ones(3), 1.0)
    for form in (bounds.sigma_printed, lambda *x: bounds.sigma_corrected(*x, 1.0)):
        fails("gamma > 0", form, 1.0, 0.0, np.ones(3))
        fails("T >= 1", form, 1.0, 0.1, np.ones(1))
    fails("gamma >= 0", dissimilarity.rho_corrected, 1.0, 1.0, 1.0, -0.1)
    fails("mu > 0", dissimilarity.rho_printed, 0.0)


@pytest.mark.parametrize("bad", [-1.0, np.nan])
def test_the_lemmas_refuse_negative_numbers_and_nan(bad):
    lemmas = (
        bounds.lemma1_printed,
        bounds.lemma1_derived,
        bounds.lemma1_corrected,
        bounds.lemma2_printed,
        bounds.lemma2_corrected,
    )
    for form in lemmas:
        for place in range(5):
            arguments = [np.full(2, 0.3), 0.2, 1.0, 0.5, 0.1]  # F, B, L, M, s
            assert np.isfinite(form(*arguments)).all()
            arguments[place] = arguments[place] * bad
            fails("minimum" if place == 0 else "B >= 0", form, *arguments)


@pytest.mark.parametrize(
    ("match", "change"),
    [
        ("finite vector", {"theta0": np.array([np.nan, 0.0])}),
        ("finite vector", {"theta0": 0.5}),
        ("steps are positive", {"steps": np.array([[0.1, -0.1]] * 3)}),
        ("steps are positive", {"steps": np.array([[0.1, np.nan]] * 3)}),
        ("steps are \\(T", {"steps": np.full(3, 0.1)}),
        ("steps are \\(T", {"steps": np.zeros((0, 2))}),
        ("B has the shape", {"B": np.ones((3, 1))}),
        ("B >= 0", {"B": np.full((3, 2), -1.0)}),
        ("B >= 0", {"B": np.full((3, 2), np.nan)}),
        ("M >= 0", {"M": -0.1}),
        ("M >= 0", {"s": -0.1}),
        ("M >= 0", {"s": np.nan}),
        ("biases are", {"biases": np.zeros((3, 2, 4, 1))}),
        ("biases are", {"Q": 3}),
        ("\\|\\|b_k", {"B": np.full((3, 2), 0.04)}),
        ("\\|\\|b_k", {"biases": np.full((3, 2, 4, 2), np.nan)}),
        ("sum to zero", {"biases": np.full((3, 2, 4, 2), 0.1)}),
    ],
)
def test_a_problem_is_held_to_assumption_1(match, change):
    problem = make_problem(quadratic([1.0, 2.0]), [1.0, 2.0], np.full((3, 2), 0.1), 0.05, opposed(4, 2))
    fails(match, lambda: replace(problem, **change))


def test_what_makes_no_sense_is_refused():
    fails("positive", quadratic, [1.0, 0.0])
    fails("positive", quadratic, [np.nan])
    for mu, L in ((0.0, 1.0), (2.0, 1.0), (np.nan, 1.0)):
        fails("mu <= L", kinked, mu, L)
    fails("B >= 0", make_problem, quadratic([1.0]), [1.0], np.full((2, 2), 0.1), -1.0, opposed(2))
    fails("even", opposed, 0)
    fails("at least one round", schedule, "client", 0, 3)
    fails("mean >= 0", schedule, "client", 3, 3, -1.0)
    fails("first", schedule, "client", 3, 3, 1.0, 1.5)
    fails("offset > 0", diminishing_steps, 3, 3, 1.0, 0.0)
    fails("replica", simulate, problems.kinked_problem(), 0)
    state = Clients(quadratic([1.0]), np.ones((2, 1)))
    fails("like theta", one_step, state, np.zeros((3, 1)), 0.1, 0.0, 0.0)
    fails("alpha > 0", one_step, state, np.zeros((2, 1)), -0.1, 0.0, 0.0)
    fails("3 samples", hessian.thirds, np.ones(2))
    clients = dissimilarity.random_clients(np.random.default_rng(0))
    fails("mu > 0", clients.proximal_round, np.ones(4), 0.0)
    fails("weights", dissimilarity.QuadraticClients, np.ones((2, 1)), np.ones((2, 1)), np.ones(2))
    at_rest = dissimilarity.QuadraticClients(np.ones((2, 1)), np.array([[1.0], [-1.0]]), np.full(2, 0.5))
    fails("not 0", at_rest.dissimilarity, np.zeros(1))


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_a_run_that_overflows_is_refused():
    wild = make_problem(quadratic([1.0]), [1.0], np.full((400, 3), 9.0), 0.1, opposed(2), M=1.0)
    fails("finite", exact_moments, wild)
    fails("finite", simulate, wild)


def test_a_schedule_in_which_nothing_grows_is_constant():
    for order, rounds, N in (("data", 5, 1), ("client", 1, 4), ("anti", 1, 1)):
        assert (schedule(order, rounds, N, mean=0.4, first=0.0) == 0.4).all()


def test_worst_ratio_never_hides_nan():
    assert check.worst([2.0, 1.0, 9.0], [1.0, 2.0, 0.0]) == 0.5
    assert check.worst(3.0, np.array([1.0, 2.0])) == 1.5 and check.worst([1.0], [0.0]) == np.inf
    for bound, measured in (([np.nan], [1.0]), ([1.0, 1.0], [1.0, np.nan])):
        fails("NaN", check.worst, bound, measured)
    assert check.verdict(np.nan) == "violated" and check.verdict(1.0) == "holds" and check.verdict(0.999) == "violated"


# ---- the counterexamples and numbers of the specification ----


@pytest.mark.parametrize(("L", "s", "Q"), [(1.0, 0.1, 4), (2.0, 0.05, 1), (0.5, 1.3, 7)])
def test_sigma_cubed(L, s, Q):
    problem = problems.noise_only(L, s, Q, a=1 / 12 / L)
    E = exact_moments(problem).E[-1]
    assert pytest.approx((1 / 12 / L) ** 2 * s**2 / Q) == E
    assert bounds.theorem1_printed(problem)[-1] / E == pytest.approx(6 * L * s)
    if (L, s) == (1.0, 0.1):
        assert round(bounds.theorem1_printed(problem)[-1] / E, 3) == 0.600


def test_index_shift():
    problem = problems.late_index()
    assert float(f"{exact_moments(problem).E[-1]:.1e}") == 6.3e-3
    assert float(f"{bounds.theorem1_printed(problem)[-1]:.2e}") == 2.25e-11


@pytest.mark.parametrize(("Q", "ratio"), [(100, 0.293), (1000, 0.029)])
def test_bias_divided_by_the_number_of_clients(Q, ratio):
    problem = problems.kinked_problem(Q)
    assert round(bounds.theorem1_printed(problem)[-1] / simulate(problem).E[-1], 3) == ratio


def test_B_for_its_square_moves_the_failure_to_more_clients():
    """The specification's .52 for this did not come out of any setting it names; these are the numbers that do."""
    few, many = (problems.kinked_problem(Q) for Q in (100, 1000))
    E = simulate(many).E[1:]
    assert round(bounds.theorem1_printed(few, power=1)[-1] / E[-1], 2) == 11.99
    ratios = bounds.theorem1_printed(many, power=1)[1:] / E
    assert round(ratios[-1], 2) == 1.20 and round(ratios[3], 3) == 0.864
    assert (np.flatnonzero(ratios < 1) + 1).tolist() == [2, 3, 4, 5, 6, 7]


def test_the_measured_error_does_not_fall_with_the_number_of_clients():
    assert simulate(problems.kinked_problem(1000)).E[-1] == pytest.approx(simulate(problems.kinked_problem(2)).E[-1])


def test_biases_about_a_moving_centre():
    problem = problems.moving_centre()
    assert np.abs(problem.bias(0, 3, np.full((1, 100, 1), 0.7)).sum(1)).max() < 1e-15  # at a common theta they cancel
    assert round(bounds.theorem1_printed(problem)[1] / simulate(problem).E[1], 3) == 0.014


def test_random_participation_leaves_no_bias():
    row = check.check_assumption1()
    assert row.printed == "vacuous"
    K, Q = 5, 3
    constraints = np.array([[bin(S)[2:].zfill(K)[k] == "1" for k in range(K)] for S in range(2**K) if bin(S).count("1") == Q])
    assert np.linalg.svd(constraints.astype(float))[1].min() > 0.5  # only b = 0 solves them
    assert np.linalg.matrix_rank(np.ones((1, K))) == 1  # with everyone taking part K - 1 dimensions are free


def test_lemma2_with_shared_noise_fails_by_a_third_of_the_clients(rng):
    for Q in (6, 30):
        n = 0.4 * rng.standard_normal(200000)  # one draw for all: g - bar g is that draw
        assert (n**2).mean() / bounds.lemma2_printed(np.zeros(Q), 0.0, 1.0, 0.0, 0.4) == pytest.approx(Q / 3, rel=0.02)


def test_lemma1_is_tight_and_its_derivation_is_not():
    g = np.array([[2.0]])
    second = one_step(Clients(quadratic([1.0]), g), g, 0.1, 3.0, 0.0).second[0]  # b = grad f = 2
    assert second == pytest.approx(64) and bounds.lemma1_corrected(2.0, 4.0, 1.0, 3.0, 0.0) == pytest.approx(64)
    first_line = 3 * 4 + 3 * 4 + 3 * 3.0 * 16
    assert bounds.lemma1_printed(2.0, 4.0, 1.0, 3.0, 0.0) < first_line <= bounds.lemma1_derived(2.0, 4.0, 1.0, 3.0, 0.0)


def test_step_size_reaches_too_far_for_one_and_two_clients():
    for M in (0.0, 0.5, 3.0):
        beyond = [Q for Q in range(1, 20) if bounds.theorem1_step(2.0, M) > bounds.lemma4_step(2.0, M, Q) * (1 + 1e-12)]
        assert beyond == [1, 2]


def test_lemma5_and_equation6_fail_on_a_common_quadratic():
    problem = problems.common_hessian()
    V = exact_moments(problem).V[0]
    push = 0.01 * (1 - (1 - 1 / 120) ** np.arange(11)) / 0.1  # |theta_k| after j steps of theta <- (1 - a mu) theta - a b
    assert pytest.approx(push**2) == V
    assert round(check.lemma5_run(problem, lambda *x: bounds.lemma5_printed(*x[:-1])) / V[-1], 3) == 0.325
    assert check.lemma5_run(problem, lambda *x: bounds.lemma5_proof(*x[:-1])) > V[-1]
    assert bounds.equation6_printed(problem, exact_moments(problem).F[0], 0) < V[:-1].sum()
    assert bounds.equation6_corrected(problem, exact_moments(problem).F[0], 0) >= V[:-1].sum()


def test_theorem2_without_alpha_on_the_left():
    problem = problems.long_run()
    gradient = simulate(problem).gradient
    assert round(bounds.ergodic_sum(problem, gradient, weighted=False)) == 160
    assert round(bounds.theorem2_printed(problem), 1) == 9.8
    assert bounds.ergodic_sum(problem, gradient, weighted=True) == pytest.approx(1.60, abs=0.01)  # about f0 - f* = 1.6


def test_theorem2_without_noise_on_the_right():
    problem = problems.noisy_run()
    left = bounds.ergodic_sum(problem, simulate(problem, replicas=20000).gradient, weighted=True)
    assert round(bounds.theorem2_printed(problem) / left, 3) == 0.188
    assert bounds.theorem2_proof(problem) < left <= bounds.theorem2_uncorrelated(problem)


def test_the_same_without_sampling():
    """One client and one step: the density of theta, carried round by round over a fine grid, gives .188 as well."""
    x = np.linspace(-15, 15, 2001)
    slope = 2 * x / (1 + x**2) ** 2
    kernel = np.exp(-(((x[:, None] - (x - 0.01 * slope)) / 0.3) ** 2) / 2)
    kernel /= kernel.sum(0)
    density, left = np.eye(1, 2001, 1000)[0], 0.0
    for _ in range(51):
        left += 0.01 * slope**2 @ density
        density = kernel @ density
    assert round(bounds.theorem2_printed(problems.noisy_run()) / left, 3) == 0.188


def test_theorem2_as_printed_does_not_know_the_order():
    runs = [
        make_problem(rational(1), [2.0], np.full((5, 3), 0.1), B, opposed(2), s=s)
        for B, s in ((schedule("client", 5, 3), 0.0), (schedule("anti", 5, 3), 9.0), (0.0, 1.0))
    ]
    assert len({bounds.theorem2_printed(run) for run in runs}) == 1
    assert len({bounds.theorem2_corrected(run) for run in runs}) == 3


def test_ergodic_rate():
    for T in (30, 300, 3000):
        assert 1.01 <= round(problems.ergodic_rate(T), 2) <= 1.02


def test_floor_is_linear_in_B_quadratic_in_the_step_and_gone_at_one_local_step():
    per_B = [problems.floor(B=B) / B for B in (1e-6, 1e-4, 1e-1)]
    assert np.ptp(per_B) / per_B[0] < 1e-8
    floors = [problems.floor(a=a) for a in (0.01, 0.005)]
    assert np.log2(floors[0] / floors[1]) == pytest.approx(2, abs=0.01)
    assert problems.floor(N=1) == 0.0


def test_the_bias_has_no_effect_on_a_common_quadratic_without_proportional_noise():
    def run(B, M):
        return exact_moments(
            make_problem(quadratic([0.3, 1.0]), [0.6, -0.8], np.full((9, 5), 0.1), B, opposed(4, 2), M, s=0.1)
        ).E

    assert np.abs(run(1.0, 0.0) - run(0.0, 0.0)).max() < 2.5e-16
    assert run(1.0, 1.0)[-1] > 1.1 * run(0.0, 1.0)[-1]


def test_annealed_steps_beat_a_growing_bias_and_the_bound_cannot_tell():
    assert annealed_steps(3, 2, 0.5)[2] == pytest.approx([0.5 / 3, 0.5 / 3 / 2**0.25])
    problem = problems.annealed(1000)
    E, total = simulate(problem).E, bounds.bias_sum_printed(problem)
    assert E[1000] < E[100] / 3 < E[10] / 9
    # 2 a L B^2 / mu = (2 c L / mu) (j+1)^(1/4) / (t+1), over t = 1..T, divided by Q = 4
    slope = 2 / 12 / 0.1 * (np.arange(1, 11) ** 0.25).sum() / 4
    assert (total[1000] - total[100]) / np.log(1001 / 101) == pytest.approx(slope, rel=0.01)


def test_sigma_remark():
    sigma = np.full(201, 0.5)
    original = bounds.sigma_corrected(2.0, 0.1, sigma, 1.0)  # the printed C_1 / (gamma T) + C_2 gamma sigma^2
    assert original == pytest.approx(2 / (0.1 * 200) + 0.1 * 0.25)
    assert bounds.sigma_printed(2.0, 0.1, sigma) == pytest.approx(2 / (0.1 * 200) + 0.1 * 0.25 * 201)
    growing = np.array([0.1, 0.2, 0.3])  # sigma_2 belongs to a step after theta_1, the last one averaged
    assert bounds.sigma_corrected(2.0, 0.1, growing, 1.0) == pytest.approx(2 / (0.1 * 2) + 0.1 * (0.01 + 0.04) / 2)
    assert bounds.sigma_printed(2.0, 0.1, growing) == pytest.approx(2 / (0.1 * 2) + 0.1 * (0.01 + 0.04 + 0.09))
    gaps = problems.sgd_gaps(np.array([1.0]), np.array([1.0]), 0.5, np.array([1.0, 0.0, 0.0]))
    assert gaps == pytest.approx([0.5, (0.25 + 0.25) / 2])  # theta_1 = theta_0 / 2 - gamma n


# ---- the ordering law ----


def test_growing_bias_wins_at_the_end_exactly_when_c_mu_is_below_one():
    ratios = [problems.ordering_ratio(c) for c in check.C_MU]
    assert [round(final, 2) for final, _ in ratios] == [0.14, 0.31, 1.01, 2.73, 5.94]
    assert (round(ratios[0][1], 3), round(ratios[-1][1], 2)) == (0.075, 0.45)  # averaged over the rounds
    for c in (0.7, 0.9, 1.1, 1.4):
        assert (problems.ordering_ratio(c)[0] < 1) == (c < 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"T": 150, "N": 4, "first": 1 / 300},
        {"T": 150, "N": 4, "first": 0.03, "offset": 8},
        {"T": 300, "N": 1, "first": 0.1},
        {"T": 60, "N": 10, "offset": 50},
    ],
)
def test_the_side_of_one_does_not_depend_on_the_settings(settings):
    finals = np.array([problems.ordering_ratio(c, **settings)[0] for c in (0.25, 0.5, 2.0, 4.0)])
    assert ((finals < 1) == [True, True, False, False]).all()
    assert problems.ordering_ratio(1.0, **settings)[0] == pytest.approx(1, abs=0.06)


def test_growing_bias_is_ahead_on_the_way_and_behind_with_a_constant_step():
    means = [problems.ordering_ratio(c)[1] for c in check.C_MU]
    assert (np.diff(means) > 0).all() and means[-1] < 1
    assert problems.ordering_ratio(steps=0.05)[0] > 1


def test_the_law_is_in_c_times_mu():
    for mu in (0.1, 3.0):
        assert problems.ordering_ratio(0.5 / mu, mu=mu) == pytest.approx(problems.ordering_ratio(0.5), rel=1e-9)


def test_the_ordered_problems_are_within_theorem1():
    for c in check.C_MU:
        problem = problems.ordered("client", c)
        assert problem.steps.max() <= bounds.theorem1_step(1.0, 1.0) / 2 * (1 + 1e-12)
        assert (bounds.theorem1_corrected(problem) >= exact_moments(problem).E).all()
    total = [problems.ordered(order, 1.0).B[:-1].sum() for order in ("client", "anti")]
    assert total[0] == pytest.approx(total[1])


@pytest.mark.parametrize("c", [0.5, 1.0, 3.0])
def test_the_law_is_the_weight_of_each_step(c):
    """N = 1, M = 1: E_T = sum_s (B_s / Q) a_s^2 prod_{r>s} [(1 - a_r mu)^2 + a_r^2 mu^2 / Q], an independent form."""
    problem = problems.ordered("client", c, T=40, N=1, offset=200)
    a, B, weighted = problem.steps[:-1, 0], problem.B[:-1, 0], 0.0
    for s in range(40):
        weighted += B[s] / 4 * a[s] ** 2 * np.prod((1 - a[s + 1 :]) ** 2 + a[s + 1 :] ** 2 / 4)
    assert exact_moments(problem).E[-1] == pytest.approx(weighted)
    pure = np.array([a[s] * np.prod(1 - a[s + 1 :]) for s in range(40)]) ** 2
    expected = (np.arange(40) + 200.0) ** (2 * c - 2)  # ~ (s + s0)^(2 c mu - 2); exactly constant at c mu = 1
    assert pure[0] / pure[-1] == pytest.approx(expected[0] / expected[-1], rel=1e-9 if c == 1 else 0.02)


# ---- random grids ----


@pytest.fixture(scope="module")
def first_grid():
    rng = np.random.default_rng(11)
    return [problems.random_theorem1(rng) for _ in range(500)]


def test_corrected_theorem1_holds_on_the_grid(first_grid):
    for problem, E in first_grid:
        bound = bounds.theorem1_corrected(problem)
        assert (bound * (1 + 1e-9) + check.ZERO >= E).all()


@pytest.fixture(scope="module")
def second_grid():
    rng = np.random.default_rng(13)
    return [problems.random_theorem1(rng, beyond=True) for _ in range(500)]


def test_corrected_theorem1_holds_beyond_the_printed_step(second_grid):
    beyond = 0
    for problem, E in second_grid:
        assert (bounds.theorem1_corrected(problem) * (1 + 1e-9) + check.ZERO >= E).all()
        beyond += problem.steps.max() > bounds.theorem1_step(problem.f.L, problem.M)
    assert beyond > 200


def test_the_grids_reach_the_corners(first_grid, second_grid):
    drawn = [problem for problem, _ in first_grid + second_grid]
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
        "the longest step": lambda p: bounds.at_most(bounds.theorem1_step(p.f.L, p.M), p.steps.max()),
    }.items():
        assert sum(corner(problem) for problem in drawn) >= 10, name
    one = problems.random_theorem1(np.random.default_rng(5))
    again = problems.random_theorem1(np.random.default_rng(5))
    assert (one[1] == again[1]).all() and (one[0].steps == again[0].steps).all()
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
                    steps = np.full((4, N), bounds.theorem1_step(1.0, M))
                    f, start = quadratic([mu, 1.0]), np.full(2, theta0)
                    problem = make_problem(f, start, steps, B, zero_sum(rng, Q, 2), M=M, s=s)
                    E, slack = exact_moments(problem).E, 1e-9 * (1 + theta0**2)
                    assert (bounds.theorem1_corrected(problem) >= E - slack).all()
                    if M == 0:
                        assert (bounds.theorem1_closed(problem) >= E - slack).all()


def test_closed_theorem1_holds_on_the_grid(first_grid, second_grid):
    eligible = [(p, E) for p, E in first_grid + second_grid if p.M == 0 and np.ptp(p.steps) == 0]
    assert len(eligible) > 100
    for problem, E in eligible:
        bound = bounds.theorem1_closed(problem)
        assert (bound * (1 + 1e-9) + check.ZERO >= E).all()


def test_the_corrected_bound_is_not_loose_everywhere(first_grid):
    ratios = [check.worst(bounds.theorem1_corrected(problem)[1:], E[1:]) for problem, E in first_grid]
    assert np.median(ratios) < 20


def test_corrected_theorem2_holds_on_the_grid():
    rng, violated = np.random.default_rng(12), 0
    for _ in range(500):
        problem, gradient = problems.random_theorem2(rng)
        left = bounds.ergodic_sum(problem, gradient, weighted=True)
        assert left <= bounds.theorem2_uncorrelated(problem) <= bounds.theorem2_corrected(problem) * (1 + 1e-12)
        violated += bounds.theorem2_printed(problem) < bounds.ergodic_sum(problem, gradient, weighted=False)
    assert violated > 100


# ---- Hessian and dissimilarity ----


def test_network_derivatives_by_finite_differences(rng):
    network = hessian.Network(d=3, width=2)
    X, y, theta = hessian.teacher_problem(network, 6, rng)
    shifts = 1e-5 * np.eye(network.p)
    gradients = [(network.forward(theta + e, X)[0] - network.forward(theta - e, X)[0]) / 2e-5 for e in shifts]
    hessians = [(network.forward(theta + e, X)[1] - network.forward(theta - e, X)[1]) / 2e-5 for e in shifts]
    assert np.allclose(network.forward(theta, X)[1], np.transpose(gradients), atol=1e-8)
    assert np.allclose(network.hessians(theta, X), np.transpose(hessians, (1, 2, 0)), atol=1e-8)

    def slope(theta):  # of the mean of (f - y)^2 / 2
        f, gradient, *_ = network.forward(theta, X)
        return (f - y) @ gradient / 6

    whole = [(slope(theta + e) - slope(theta - e)) / 2e-5 for e in shifts]
    assert np.allclose(hessian.spectra(network, theta, X, y)[0]["all"], np.linalg.eigvalsh(whole), atol=1e-7)


def test_training_lowers_the_loss_and_thirds_are_by_residual(rng):
    network = hessian.Network()
    X, y, start = hessian.teacher_problem(network, 90, rng)

    def residuals(theta):
        return network.forward(theta, X)[0] - y

    trained = hessian.train(network, X, y, start, 200)
    assert (residuals(trained) ** 2).mean() < 0.2 * (residuals(start) ** 2).mean()
    parts = hessian.thirds(residuals(trained))
    size = np.abs(residuals(trained))
    assert len(parts["easy"]) == len(parts["hard"]) == 30 and size[parts["easy"]].max() <= size[parts["hard"]].min()


def test_easy_samples_are_more_convex_than_hard_ones_but_not_than_all():
    lowest, weyl = check.convexity()
    assert (lowest[:, 0] > lowest[:, 2]).sum() == 20 and (lowest[:, 0] > lowest[:, 1]).sum() == 7
    assert weyl


def test_weyl_bounds_every_network_anywhere(rng):
    for width, scale in ((2, 0.1), (5, 1.0), (8, 5.0)):
        network = hessian.Network(width=width)
        X, y, _ = hessian.teacher_problem(network, 30, rng, noise=scale)
        for _ in range(20):
            eigenvalues, weyl = hessian.spectra(network, scale * rng.standard_normal(network.p), X, y)
            for name, values in eigenvalues.items():
                assert values[0] >= weyl[name] - 1e-9 * np.abs(values).max()


def test_a_harder_sample_can_be_more_convex():
    def loss(theta, c):
        return (theta**2 + c) ** 2 / 2

    for theta, c in ((0.0, 1.0), (0.7, 1.0), (0.7, 5.0)):
        numeric = (loss(theta + 1e-4, c) - 2 * loss(theta, c) + loss(theta - 1e-4, c)) / 1e-8
        assert hessian.square_model_hessian(theta, c) == pytest.approx(6 * theta**2 + 2 * c)
        assert hessian.square_model_hessian(theta, c) == pytest.approx(numeric, rel=1e-4)


def test_dissimilarity_is_at_least_one_and_diverges(rng):
    for _ in range(50):
        clients = dissimilarity.random_clients(rng)
        assert clients.dissimilarity(rng.standard_normal(4) * 3) >= 1
        assert np.abs(clients.weights @ clients.gradients(clients.minimiser)).max() < 1e-12
        near, nearer = (clients.dissimilarity(clients.minimiser + x) for x in (1e-4, 1e-5))
        assert nearer / near == pytest.approx(100, rel=0.01)


def test_proximal_round_solves_every_client(rng):
    clients, theta, mu = dissimilarity.random_clients(rng), rng.standard_normal(4), 3.0
    x = np.tile(theta, (8, 1))
    for _ in range(300):
        x = x - 0.15 * (clients.gradients(x) + mu * (x - theta))
    assert clients.proximal_round(theta, mu) == pytest.approx(clients.weights @ x)


@pytest.mark.parametrize("gamma", [0.0, 0.1, 0.3])
def test_corrected_fedprox_decrease_holds_with_inexact_clients(rng, gamma):
    """Worst-looking inexact solves: residuals of norm gamma ||grad f_m||, all pointing where f rises."""
    tried, refuted = 0, False
    for _ in range(400):
        clients, mu = dissimilarity.random_clients(rng), 10 ** rng.uniform(1, 3)
        theta = clients.minimiser + rng.standard_normal(4) * 10 ** rng.uniform(-1, 1)
        gradients = clients.gradients(theta)
        slope = clients.weights @ gradients
        residual = gamma * np.linalg.norm(gradients, axis=1)[:, None] * slope / np.linalg.norm(slope)
        moved = clients.proximal_round(theta, mu) + clients.weights @ (residual / (clients.curvatures + mu))
        B = np.sqrt(clients.dissimilarity(theta))
        rho = dissimilarity.rho_corrected(B, clients.curvatures.max(), mu, gamma)
        decrease = clients.value(theta) - clients.value(moved)
        assert decrease >= rho * slope @ slope - 1e-12
        refuted |= decrease < dissimilarity.rho_printed(mu) * slope @ slope
        tried += rho > 0
    assert tried > 20 and refuted


# ---- the program ----


def test_check_reproduces_every_documented_verdict(tmp_path, capsys):
    assert check.main(["--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "check.json").read_text())
    assert sorted(p.name for p in tmp_path.glob("*.png")) == [
        "bounds.png", "ergodic.png", "floor.png", "ordering.png", "spectra.png"
    ]  # fmt: skip
    table = capsys.readouterr().out
    for row in rows:
        assert row["statement"] in table and row["printed"] == row["documented"] and row["corrected"] != "violated"
        if row["printed_ratio"] is not None:
            assert (row["printed_ratio"] < 1 - 1e-9) == (row["printed"] == "violated")
    statements = " ".join(row["statement"] for row in rows)
    for name in (
        "Assumption 1",
        *(f"Lemma {i}" for i in range(1, 6)),
        "Equation 5",
        "Equation 6",
        "Theorem 1",
        "Theorem 2",
    ):
        assert name in statements
    assert check.GRID >= 500


@pytest.mark.parametrize(
    "row",
    [
        check.Row("surprise", "violated", "holds", 1.2),
        check.Row("broken", "violated", "violated", 0.5, "violated", 0.9),
    ],
)
def test_an_unexpected_verdict_or_a_violated_correction_exits_1(row, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(check, "CHECKS", (lambda: row,))
    monkeypatch.setattr(check.plots, "FIGURES", ())
    assert check.main(["--out", str(tmp_path)]) == 1
    assert row.statement in capsys.readouterr().out.splitlines()[-1]


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


def test_unrun_round_repeats_the_last():
    assert with_unrun_round(np.array([[1.0, 2.0], [3.0, 4.0]])).tolist() == [[1, 2], [3, 4], [3, 4]]
