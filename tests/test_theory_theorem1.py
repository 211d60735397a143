"""Theorem 1: its sums written out, the violated instances, corrected on random problems."""

from dataclasses import replace

import numpy as np
import pytest
from test_theory_functions import fails
from test_theory_local_sgd import small_quadratic

from theory import theorem1, theorem1_proof, theorem2
from theory.beyond import sharp, theorem1_random
from theory.functions import quadratic
from theory.local_sgd import exact_error
from theory.one_step import largest_steps
from theory.problem import Problem, kinked_problem, opposed, zero_sum
from theory.report import SLACK, ZERO, worst

ABOVE = 1 + 1e-9


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
    """With F = 0 the recursions for E and V are equalities of numbers: run forward they give what
    the weights give.
    """
    problem = small_quadratic(N=5)
    f, M, Q, s = problem.f, problem.M, problem.Q, problem.sigma
    E, V = 2.0, 0.0
    for j, (a, B) in enumerate(zip(problem.steps[1], problem.B[1], strict=True)):
        noise = 2 * M * B + s**2
        c, e = (
            (0.0, a**2)
            if j == 0
            else [(1 - a * 0.3, a / 0.3), ((1 + 1 / j) * (1 - a * 0.3) ** 2, (1 + j) * a**2)][form]
        )
        E = (1 - a * f.mu) * E + 2 * a * f.L * V + a**2 * noise / Q
        V = c * V + e * B + a**2 * (1 - 1 / Q) * noise
    contraction, floor = theorem1_proof.round_in_form(problem, 1, form)
    assert contraction * 2.0 + floor == pytest.approx(E)


def test_the_lemmas_certificate_asks_more_of_a_second_local_step():
    """M = 5, Q = 100, a = .4: one step alone may be this long; after it V weighs on the F of the
    step before.
    """
    one, two = (
        Problem(quadratic([1.0]), [1.0], np.full((2, N), 0.4), 0.1, opposed(100), M=5.0)
        for N in (1, 2)
    )
    assert len(theorem1_proof.corrected(one)) == 2
    fails("not positive", theorem1_proof.corrected, two)


@pytest.mark.parametrize(("L", "s", "Q"), [(1.0, 0.1, 4), (2.0, 0.05, 1), (0.5, 1.3, 7)])
def test_sigma_cubed(L, s, Q):
    steps = np.full((2, 1), 1 / 12 / L)
    problem = replace(
        theorem1.noise_only(),
        f=quadratic([L]),
        sigma=s,
        steps=steps,
        directions=np.zeros((Q, 1)),
        B=0.0,
    )
    E = exact_error(problem)[-1]
    assert pytest.approx((1 / 12 / L) ** 2 * s**2 / Q) == E
    assert theorem1.printed(problem)[-1] / E == pytest.approx(6 * L * s)


def test_index_shift():
    problem = theorem1.late_index()
    assert float(f"{exact_error(problem)[-1]:.1e}") == 6.3e-3
    assert float(f"{theorem1.printed(problem)[-1]:.2e}") == 2.25e-11


@pytest.mark.parametrize(("Q", "ratio"), [(100, 0.293), (1000, 0.029)])
def test_bias_divided_by_the_number_of_clients(Q, ratio):
    problem = kinked_problem(Q)
    assert round(theorem1.printed(problem)[-1] / exact_error(problem)[-1], 3) == ratio


def test_B_for_its_square_moves_the_failure_to_more_clients():
    few, many = (kinked_problem(Q) for Q in (100, 1000))
    E = exact_error(many)[1:]
    assert round(theorem1.printed(few, power=1)[-1] / E[-1], 2) == 11.99
    ratios = theorem1.printed(many, power=1)[1:] / E
    assert round(ratios[-1], 2) == 1.20 and round(ratios[3], 3) == 0.864
    assert (np.flatnonzero(ratios < 1) + 1).tolist() == [2, 3, 4, 5, 6, 7]
    longer = kinked_problem(1000, N=20, T=20)
    E = exact_error(longer)[-1]
    assert round(theorem1.printed(longer, power=1)[-1] / E, 3) == 1.038


def test_the_measured_error_does_not_fall_with_the_number_of_clients():
    ends = [exact_error(kinked_problem(Q))[-1] for Q in (2, 1000)]
    assert ends[0] == pytest.approx(ends[1])


@pytest.fixture(scope="module")
def grids():
    """Problems within the printed step, and beyond it."""
    rng = np.random.default_rng(11)
    draw = theorem1_random.random_problem
    problems = [draw(rng) for _ in range(300)] + [draw(rng, beyond=True) for _ in range(300)]
    return [(problem, exact_error(problem)) for problem in problems]


def test_both_corrected_forms_hold_on_the_grid_and_the_sharp_one_is_smaller(grids):
    beyond, ratios = 0, []
    for problem, E in grids:
        lemmas = theorem1_proof.corrected(problem)
        tight = sharp.bound(problem)
        assert (lemmas * ABOVE + ZERO >= E).all() and (tight * ABOVE + ZERO >= E).all()
        assert (tight <= lemmas * ABOVE).all()
        beyond += problem.steps.max() > largest_steps(problem.f.L, problem.M)[0]
        ratios.append([worst(form[1:], E[1:]) for form in (lemmas, tight)])
        if problem.M == 0 and np.ptp(problem.steps) == 0:
            closed = sharp.closed_form(problem)
            assert (closed * ABOVE + ZERO >= E).all() and (closed * ABOVE + ZERO >= tight).all()
    assert beyond > 120 and np.median(ratios, 0)[1] < 2 and np.median(ratios, 0)[0] < 20


def test_the_grids_reach_the_corners(grids):
    drawn = [problem for problem, _ in grids]
    for name, corner in {
        "one client": lambda p: p.Q == 1,
        "one round": lambda p: p.T == 1,
        "one local step": lambda p: p.N == 1,
        "mu = L": lambda p: p.f.mu == p.f.L,
        "badly conditioned": lambda p: p.f.mu < p.f.L / 50,
        "no bias": lambda p: not p.B.any(),
        "large bias": lambda p: p.B.max() > 5,
        "no noise": lambda p: p.M == p.sigma == 0,
        "all noise": lambda p: p.M > 0 and p.sigma > 0,
        "from theta*": lambda p: not p.theta0.any(),
        "the longest step": lambda p: largest_steps(p.f.L, p.M)[0] <= SLACK * p.steps.max(),
    }.items():
        assert sum(corner(problem) for problem in drawn) >= 8, name
    assert len({problem.theta0.tobytes() + problem.steps.tobytes() for problem in drawn}) == len(
        drawn
    )


@pytest.mark.parametrize("Q", [1, 2, 7])
@pytest.mark.parametrize("N", [1, 6])
@pytest.mark.parametrize("M", [0.0, 2.0])
def test_corrected_theorem1_in_every_corner(Q, N, M):
    """mu = L or .01 L, from theta* or far away, steps at the limit, with and without bias and
    noise: all combinations.
    """
    rng = np.random.default_rng(0)
    for mu in (1.0, 0.01):
        for theta0 in (0.0, 100.0):
            for B in (0.0, 1e4):
                for s in (0.0, 50.0):
                    steps = np.full((4, N), largest_steps(1.0, M)[0])
                    f, start = quadratic([mu, 1.0]), np.full(2, theta0)
                    problem = Problem(f, start, steps, B, zero_sum(rng, Q, 2), M=M, sigma=s)
                    E, slack = exact_error(problem), 1e-9 * (1 + theta0**2)
                    for bound in (theorem1_proof.corrected, sharp.bound):
                        assert (bound(problem) >= E - slack).all()
                    if M == 0:
                        assert (sharp.closed_form(problem) >= E - slack).all()


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


def test_random_problems_repeat():
    one, again = (theorem1_random.random_problem(np.random.default_rng(5)) for _ in range(2))
    assert (one.steps == again.steps).all() and (one.biases == again.biases).all()


def test_the_ratios_of_the_random_grid():
    """As each form alone; a form that does not speak of the problem has none."""
    problem = kinked_problem(4, T=3)
    E = exact_error(problem)[1:]
    forms = [theorem1.printed, theorem1_proof.last_display, theorem1_proof.corrected]
    forms += [sharp.bound, sharp.closed_form]
    alone = [(form(problem)[1:] / E).min() for form in forms]
    assert theorem1_random.ratios(problem) == pytest.approx(alone)
    assert theorem1_random.ratios(problem, beyond=True)[:2] == [np.inf, np.inf]
    noisy = small_quadratic()
    assert theorem1_random.ratios(noisy)[4] == np.inf
