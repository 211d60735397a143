"""Theorem 1: its sums written out, the violated instances, corrected on random problems."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from test_theory_functions import fails
from test_theory_local_sgd import small_quadratic

from theory import theorem1, theorem1_proof, theorem2
from theory.beyond import sharp
from theory.functions import quadratic
from theory.local_sgd import exact_error
from theory.one_step import largest_steps
from theory.problem import Problem, kinked_problem, opposed, zero_sum


def test_theorem1_printed_is_the_double_sum():
    problem = small_quadratic(T=4)
    a, B, f, M, s, Q = problem.steps, problem.B, problem.f, problem.M, problem.sigma, problem.Q
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
            assert theorem1.printed(problem, power)[T] == pytest.approx(bound)


def test_the_last_display_is_the_sum_it_states():
    problem = small_quadratic(T=3)
    steps, mu, M, s, Q = problem.steps, problem.f.mu, problem.M, problem.sigma, problem.Q
    E = [problem.theta0 @ problem.theta0]
    for t in range(3):
        bound = E[-1] * np.prod(1 - steps[t] * mu / 2)
        for j in range(problem.N):
            a, B = steps[t, j], problem.B[t, j]
            factor = 2 * a / Q * np.prod(1 - steps[t, j:] * mu / 2)  # L = 1
            bound += factor * (2 * a * (3 + 2 * M) * B + B**2 / mu + 6 * a * s**2)
        E.append(bound)
    assert theorem1_proof.last_display(problem) == pytest.approx(E)


@pytest.mark.parametrize("form", [0, 1])
def test_the_lemmas_certificate_is_the_recursion_run_forward(form):
    """With F = 0, the recursions for E and V give the same numbers when they are run forward."""
    problem = small_quadratic(N=5)
    f, M, Q, s = problem.f, problem.M, problem.Q, problem.sigma
    E, V = 2.0, 0.0
    mean_B = (problem.biases[1] ** 2).sum(-1).mean(-1)  # of ||b_k||^2, at each step
    assert (mean_B < 0.9 * problem.B[1]).all()
    for j, (a, B) in enumerate(zip(problem.steps[1], mean_B, strict=True)):
        noise = 2 * M * B + s**2
        c, e = 0.0, a**2
        if j > 0:
            by_count = (1 + 1 / j) * (1 - a * 0.3) ** 2, (1 + j) * a**2
            c, e = [(1 - a * 0.3, a / 0.3), by_count][form]
        E = (1 - a * f.mu) * E + 2 * a * f.L * V + a**2 * noise / Q
        V = c * V + e * B + a**2 * (1 - 1 / Q) * noise
    contraction, floor = theorem1_proof.round_in_form(problem, 1, form)
    assert contraction * 2.0 + floor == pytest.approx(E)


def test_the_lemmas_certificate_asks_more_of_a_second_local_step():
    """One step of 0.4 is allowed. After it, V weighs on the F of the step before."""
    for N in (1, 2):
        problem = Problem(quadratic([1.0]), [1.0], np.full((2, N), 0.4), 0.1, opposed(100), M=5.0)
        if N == 1:
            assert len(theorem1_proof.corrected(problem)) == 2
    fails("not positive", theorem1_proof.corrected, problem)


@pytest.mark.parametrize(("L", "s", "Q"), [(1.0, 0.1, 4), (2.0, 0.05, 1), (0.5, 1.3, 7)])
def test_sigma_cubed(L, s, Q):
    problem = theorem1.noise_only(L, 1 / 12 / L, s, Q)
    E = exact_error(problem)[-1]
    assert pytest.approx((1 / 12 / L) ** 2 * s**2 / Q) == E
    assert theorem1.printed(problem)[-1] / E == pytest.approx(6 * L * s)


@pytest.mark.parametrize("Q", [1, 2, 7])
@pytest.mark.parametrize("N", [1, 6])
@pytest.mark.parametrize("M", [0.0, 2.0])
def test_corrected_theorem1_in_every_corner(Q, N, M):
    """mu = L or 0.01 L, from theta* or far away, steps at the limit, with bias, with noise."""
    rng = np.random.default_rng(0)
    steps = np.full((4, N), largest_steps(1.0, M)[0])
    corners = product((1.0, 0.01), (0.0, 100.0), (0.0, 1e4), (0.0, 50.0))
    for mu, theta0, B, s in corners:
        f, start = quadratic([mu, 1.0]), np.full(2, theta0)
        problem = Problem(f, start, steps, B, zero_sum(rng, Q, 2), M=M, sigma=s)
        E, slack = exact_error(problem), 1e-9 * (1 + theta0**2)
        tight = sharp.bound(problem)
        assert (theorem1_proof.corrected(problem) >= tight - slack).all()
        assert (tight >= E - slack).all()
        assert M > 0 or (sharp.closed_form(problem) >= E - slack).all()


def test_two_clients_are_algorithm_3_and_the_hand_computation():
    """alpha^4 (L - mu)^2 B / 4 after two steps; as a Problem of any even Q, at any length."""
    found = theorem1.two_clients(L=1.0, mu=0.1, alpha=1 / 12, B=1e-4)
    assert found == pytest.approx((1 / 12) ** 4 * 0.9**2 * 1e-4 / 4)
    for Q in (2, 10_000):
        problem = kinked_problem(Q, N=2, T=1)
        assert exact_error(problem)[-1] == pytest.approx(found)
    bound = theorem1.printed(problem)[-1]
    assert bound == pytest.approx((12 / 144 * 1e-4 + 4 / 12 / 0.1 * 1e-8) / 10_000)
    assert round(bound / found, 3) == 0.857
    longer = theorem1.two_clients(N=10, T=10)
    assert longer == pytest.approx(exact_error(kinked_problem(6))[-1])


def test_the_bias_part_is_what_B_adds_where_nothing_else_is():
    problem = kinked_problem(4, T=3)
    for power in (1, 2):
        alone = 10 * 2 / 12 * 1e-4**power / 0.1 / 4  # N = 10 steps, Q = 4
        assert theorem1.printed_bias(problem, power) == pytest.approx(alone * np.arange(4))


def test_forms_refuse_what_theorem_1_does_not_speak_of():
    nonconvex = replace(theorem2.long_run(3), B=0.0)
    long = Problem(quadratic([1.0]), [1.0], np.full((2, 3), 0.4), 0.1, opposed(2))
    for problem, match in ((nonconvex, "mu > 0"), (long, "alpha <=")):
        for form in (theorem1.printed, theorem1_proof.last_display):
            fails(match, form, problem)
    fails("mu > 0", theorem1_proof.corrected, nonconvex)
    longer = Problem(quadratic([1.0]), [1.0], [[0.7], [0.7]], 0.1, opposed(2))
    fails("not positive", theorem1_proof.corrected, longer)
    too_long = Problem(quadratic([1.0]), [1.0], [[1.01], [1.01]], 0.1, opposed(2))
    fails("mu \\+ L", theorem1_proof.corrected, too_long)
