"""The error of local SGD and one step's expectations against loops over clients and simulation."""

from dataclasses import replace

import numpy as np
import pytest
from test_theory_functions import fails

from theory.functions import kinked, quadratic
from theory.local_sgd import exact_error, recursion, simulate
from theory.one_step import State, largest_steps
from theory.problem import Problem, kinked_problem, opposed, schedule, zero_sum


def small_quadratic(Q=3, T=3, N=4, M=0.5, sigma=0.3, B=0.2, d=2, seed=5):
    """A quadratic with every kind of noise, steps within Theorem 1's limit and a growing bias."""
    rng = np.random.default_rng(seed)
    f = quadratic(np.linspace(0.3, 1.0, d))
    steps = rng.uniform(0.3, 1, (T + 1, N)) * largest_steps(1.0, M)[0]
    theta0 = rng.standard_normal(d)
    B = B * schedule("data", T + 1, N)
    return Problem(f, theta0, steps, B, zero_sum(rng, Q, d), M, sigma)


def test_exact_error_is_the_monte_carlo_limit():
    problem = small_quadratic()
    error, _ = simulate(problem, replicas=60000, seed=1)
    assert np.allclose(exact_error(problem), error, rtol=0.02, atol=1e-4)


def test_exact_error_is_that_of_every_pair_of_clients():
    """P_kl = E theta_k theta_l per coordinate, pair by pair: no common and own noise in it."""
    problem = small_quadratic(Q=4, d=3)
    h, Q, d, M, sigma = problem.f.curvature, 4, 3, problem.M, problem.sigma
    m = np.repeat(problem.theta0[:, None], Q, 1)  # E theta_k: (d, Q)
    P = m[:, :, None] * m[:, None, :]
    found = exact_error(problem)
    for t in range(problem.T):
        for j in range(problem.N):
            a, b = problem.steps[t, j], problem.biases[t, j].T
            c, squares = 1 - a * h, np.einsum("ikk->ik", P)
            v = M * (h[:, None] ** 2 * squares + 2 * h[:, None] * m * b + b**2).sum(0) + sigma**2
            cross = m[:, :, None] * b[:, None, :]
            P = c[:, None, None] ** 2 * P
            P -= a * c[:, None, None] * (cross + cross.transpose(0, 2, 1))
            P += a**2 * (b[:, :, None] * b[:, None, :] + np.diag(v) / d)
            m = c[:, None] * m - a * b
        m = np.repeat(m.mean(1, keepdims=True), Q, 1)
        P = np.broadcast_to(P.mean((1, 2), keepdims=True), P.shape)
        assert found[t + 1] == pytest.approx(P[:, 0, 0].sum())


def test_without_noise_the_recursion_is_the_trajectory():
    problem = small_quadratic(M=0.0, sigma=0.0)
    error, gradient = simulate(problem)
    assert np.allclose(recursion(problem), error, rtol=1e-10, atol=1e-15)
    assert (exact_error(problem) == error).all()
    assert gradient[0] == pytest.approx(((problem.f.curvature * problem.theta0) ** 2).sum())


def test_simulation_is_algorithm_3_written_out():
    problem = kinked_problem(Q=4, T=3, N=5, theta0=0.3)
    server, E, gradient = 0.3, [0.09], [0.09]
    for _ in range(3):
        clients = [server] * 4
        for _ in range(5):
            for k, sign in enumerate((1, 1, -1, -1)):
                clients[k] -= 1 / 12 * ((1.0 if clients[k] > 0 else 0.1) * clients[k] + sign * 0.01)
        server = sum(clients) / 4
        E.append(server**2)
        gradient.append(((1.0 if server > 0 else 0.1) * server) ** 2)
    found = simulate(problem)
    assert found[0] == pytest.approx(np.array(E), rel=1e-12)
    assert found[1] == pytest.approx(np.array(gradient), rel=1e-12)


def test_a_state_is_the_monte_carlo_limit_of_one_step():
    rng = np.random.default_rng(0)
    f, Q, d, a, M, s = kinked(0.1, 1.0), 3, 2, 0.2, 0.7, 0.4
    theta, b = rng.standard_normal((Q, d)), 0.5 * zero_sum(rng, Q, d)
    x, towards = State(f, theta, b, a, 0.25, M, s), f.gradient(theta) + b
    scale = np.sqrt((M * (towards**2).sum(1, keepdims=True) + s**2) / d)
    g = towards + scale * rng.standard_normal((200000, Q, d))
    moved = theta - a * g
    average, bar = moved.mean(1, keepdims=True), f.gradient(theta).mean(0)
    pulled = ((theta.mean(0) - a * bar) ** 2).sum()
    assert x.pulled == pytest.approx(pulled)
    assert x.gap == pytest.approx(f.value(theta.mean(0)))
    assert x.second == pytest.approx((g**2).sum(2).mean(0), rel=0.01)
    assert x.off_mean == pytest.approx(((g.mean(1) - bar) ** 2).sum(1).mean(), rel=0.01)
    assert x.apart == pytest.approx(((g - g.mean(1, keepdims=True)) ** 2).sum(2).mean(), rel=0.01)
    assert x.next_E == pytest.approx((average**2).sum(2).mean(), rel=0.01)
    assert x.next_V == pytest.approx(((moved - average) ** 2).sum(2).mean(), rel=0.01)
    assert pytest.approx((sum(theta.mean(0) ** 2), theta.var(0).sum())) == (x.E, x.V)
    assert x.mean_B == pytest.approx((b**2).sum() / 3) and pytest.approx(f.value(theta)) == x.F


def test_exact_moments_refuse_what_they_cannot_do():
    problem = kinked_problem()
    fails("quadratic", exact_error, replace(problem, sigma=0.1))
    fails("quadratic", exact_error, replace(problem, M=0.1))


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_a_run_that_overflows_is_refused():
    wild = Problem(quadratic([1.0]), [1.0], np.full((400, 3), 9.0), 0.1, opposed(2), M=1.0)
    fails("finite", exact_error, wild)
    fails("finite", simulate, wild)
