"""The sharp step and its floor: brute-force maxima, states that attain it, random problems."""

from dataclasses import replace

import numpy as np
import pytest
from test_theory_functions import fails
from test_theory_local_sgd import small_quadratic

from theory import lemmas, theorem2
from theory.beyond import attained, floor, sharp
from theory.functions import kinked, quadratic
from theory.local_sgd import exact_error
from theory.one_step import State
from theory.problem import Problem, kinked_problem, opposed, zero_sum

ABOVE = 1 + 1e-9


@pytest.mark.parametrize("M", [0.0, 3.0])
def test_one_sharp_step_from_the_optimum_is_noise_alone(M):
    """Exact without M. With M the step counts the noise of the biases twice, as [4] does."""
    b = np.array([[0.3, -0.1], [-0.3, 0.1], [0.0, 0.0]])
    f, p, w = kinked(0.2, 1.0), 1.3, 0.4
    x = State(f, np.zeros((3, 2)), b, 0.04, 0.11, M, 0.7)
    n, mean_B = p / 3 + w * 2 / 3, 0.2 / 3
    truth = 0.0016 * (w * mean_B + n * (M * mean_B + 0.49))
    assert p * x.next_E + w * x.next_V == pytest.approx(truth)
    bound = 0.0016 * (w * mean_B + n * (2 * M * mean_B + 0.49))
    assert sharp.step(f, x.symbols, x.mean_B, p, w, (5.0, 1.0))[2] == pytest.approx(bound)
    too_long = State(f, x.theta, b, 1.7, 0.11)
    fails("smaller steps", sharp.step, f, too_long.symbols, mean_B, p, w, (2.0, 2.0))


def test_the_sharp_weight_is_the_maximum_over_the_cone():
    """Brute force over s = sqrt(W/V) and C between (W + mu L V)/(L + mu) and sqrt(VW), V = 1."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        L, p, w = 10 ** rng.uniform(-1, 1, 3)
        mu = L * 10 ** rng.uniform(-2, 0)
        a = 2 / (L + mu) * rng.uniform(0.01, 1)
        noise = rng.choice([0.0, 10 ** rng.uniform(-3, 0)])
        s = np.linspace(mu, L, 4001)
        brute = 0.0
        for C in (s, (s**2 + mu * L) / (L + mu)):
            average = 2 * a * C - 2 * a / (L + mu) * (s**2 + mu * L)
            spread = 1 - 2 * a * C + a**2 * s**2
            brute = max(brute, (w * spread + p * average + 2 * noise * s**2).max())
        assert sharp.weight(kinked(mu, L), a, p, w, noise) == pytest.approx(brute, rel=1e-5)


@pytest.mark.parametrize("kappa", [1.5, 10.0, 100.0])
@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
def test_the_sharp_step_is_attained(kappa, fraction):
    """On the states of [4e]: i of Q clients on the steep side, weights that choose them."""
    L, mu, p = 1.0, 1 / kappa, 1.3
    f, a = kinked(mu, L), fraction * 2 / (L + mu)
    for i, Q in ((1, 2), (1, 3), (2, 5), (1, 11), (3, 40)):
        s = mu * L / (i / Q * (L - mu) + mu)
        if s > (L + mu) / 2 + 1e-9:
            continue
        theta = np.where(np.arange(Q) < i, s / (L - s), -s / (s - mu))[:, None]
        x = State(f, theta, np.zeros((Q, 1)), a, 0.0)
        w = p * (1 - 2 * s / (L + mu)) / (1 - a * s) if fraction < 1 else 0.37 * p
        on_E, on_V, rest = sharp.step(f, x.symbols, 0.0, p, w, (1.0, 1.0))
        bound = on_E * x.E + on_V * x.V + rest
        truth = p * x.next_E + w * x.next_V
        assert bound * ABOVE >= truth
        assert fraction == 1 or bound == pytest.approx(truth, rel=1e-10)
        assert pytest.approx((s - mu) * (L - s) / (mu * L) * x.V) == x.E


def test_the_floor_is_a_state_that_does_not_move():
    """(L-mu)^2/(4 mu L) V, with one client of L/mu + 1 on the steep side, at every step length."""
    for kappa in (2, 10, 50):
        L, mu, Q = 1.0, 1 / kappa, kappa + 1
        theta = np.full((Q, 1), -(L + mu) / (L - mu))
        theta[0] *= -1
        for a in (0.01, 0.5, 2 / (L + mu)):
            x = State(kinked(mu, L), theta, np.zeros((Q, 1)), a, 0.0)
            assert x.next_E == pytest.approx(x.E)
            assert pytest.approx((L - mu) ** 2 / (4 * mu * L) * x.V) == x.E


def test_the_example_of_the_joint_bound_in_the_lecture():
    """Clients at 3, -3, -3 in the valley with curvatures 1 and 1/2, one step of 1/10."""
    x = State(kinked(0.5, 1.0), np.array([[3.0], [-3.0], [-3.0]]), np.zeros((3, 1)), 0.1, 0.0)
    assert (x.E, x.V, x.next_E, x.next_V) == pytest.approx((1, 8, 1, 6.845))
    on_E, on_V, _ = sharp.step(x.f, x.symbols, 0.0, 1.0, 0.0, (1.0, 1.0))
    assert (on_E, on_V) == pytest.approx((14 / 15, 1 / 120))
    assert lemmas.lemma4(x) == pytest.approx(2.31)


def test_the_sharp_certificate_of_two_steps_by_hand():
    L, mu, a, s, Q = 2.0, 0.5, 0.3, 0.7, 4
    biases = np.zeros((2, 2, Q, 1))
    biases[0, :, :, 0] = [[0.3, 0.3, 0.0, -0.6], [0.2, -0.2, 0.0, 0.0]]
    problem = Problem(kinked(mu, L), np.zeros(1), np.full((2, 2), a), 0.36, biases / 0.6, sigma=s)
    lam, slopes = 2 * a * mu * L / (L + mu), np.linspace(mu, L, 100001)
    for M in (0.0, 0.8):  # only the bias of the first step spreads the clients before the second
        pull = 2 * a / (L + mu) * (slopes - mu) * (L - slopes)
        w = (pull + 2 * a**2 * M / Q * slopes**2).max()
        first = ((1 - lam) / Q + w * (1 - 1 / Q)) * (2 * M * 0.54 / 4 + s**2)
        last = (2 * M * 0.08 / 4 + s**2) / Q
        floor = a**2 * (first + last + w * 0.54 / 4)
        found = sharp.round_bound(replace(problem, M=M), 0)
        assert found == pytest.approx(((1 - lam) ** 2, floor))


def test_the_sharp_certificate_is_the_weights_run_back_with_any_young_constant():
    """Independent: e_j drawn at random give a bound that is never better than the program's by more
    than its own choice allows for M = 0, and the program's e_j, written out, give its floor.
    """
    rng = np.random.default_rng(0)
    problem = kinked_problem(N=6)
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
    assert sharp.round_bound(problem, 0)[1] == pytest.approx(floor_of(chosen), rel=1e-6)
    truth = exact_error(problem)[1]  # one round from theta*: every choice bounds it
    assert all(floor_of(np.exp(rng.uniform(-2, 2, N))) >= truth for _ in range(20))


def test_the_spread_path_is_the_recursion():
    problem = small_quadratic(M=0.0, N=5)
    r = [0.0]
    for j in range(4):
        a, B = problem.steps[1, j], (problem.biases[1, j] ** 2).sum(1).mean()
        r.append(np.sqrt(((1 - a * 0.3) * r[-1] + a * np.sqrt(B)) ** 2 + a**2 * (1 - 1 / 3) * 0.09))
    assert sharp.spread_path(problem, 1) == pytest.approx(r)


def test_noise_alone_spreads_the_clients_too():
    """With large M the weight on V is kept where the M = 0 path stands at 0. It was lost once."""

    def problem(Q, N, a, M, sigma=0.0):
        return Problem(quadratic([1.0]), [1.0], np.full((3, N), a), 0.0, np.zeros((Q, 1)), M, sigma)

    for sigma in (0.0, 1e-9):
        for settings in ((50, 39, 0.1, 40.0), (8, 9, 0.05, 80.0)):
            fails("smaller steps", sharp.bound, problem(*settings, sigma))
    short = problem(8, 9, 0.01, 20.0)
    E, bound = exact_error(short), sharp.bound(short)
    assert (bound * ABOVE >= E).all() and 1.02 * (1 - 0.01) ** 36 < bound[-1] < 1.5 * E[-1]


def test_the_extremal_problem():
    """One client of eleven is pushed up by sqrt(kappa B) in the first step, the others down."""
    problem = attained.extremal(10, 0.01, 30, B=1e-5)
    b = problem.biases[0, 0, :, 0]
    assert b.tolist() == pytest.approx([-1e-2] + [1e-3] * 10) and not problem.biases[:, 1:].any()
    assert problem.mean_B[3] == pytest.approx([1e-5] + [0.0] * 29)
    assert (problem.f.mu, problem.f.L, problem.Q) == (0.1, 1.0, 11)
    for N, a, ratio, blunt in ((10, 1 / 12, 1.084, 14.4), (30, 0.01, 1.015, 11.4)):
        problem = attained.extremal(10, a, N)
        E = exact_error(problem)
        assert E[-1] == pytest.approx(E[-10], rel=2e-3)  # it has settled
        end, by_lemmas, tight = floor.floors(problem)
        assert end == E[-1] and round(tight / end, 3) == ratio
        assert round(by_lemmas / end, 1) == blunt  # both bounds have the same B, the mean
        plain = 0.81 / 0.4 * a**2 * 1e-5  # (L - mu)^2/(4 mu L) a^2 B
        assert 0.99 * plain > E[-1] > plain / (1 + 1.2 * a * N)
    fails("L > mu", attained.extremal, 1, 0.01, 30)


@pytest.mark.parametrize("N", [2, 3, 10])
def test_at_few_local_steps_the_extremal_problem_stays_below_the_bound(N):
    """The limit of bound / measured as alpha -> 0, by hand: it is 1 only for large N."""
    harmonic = 2 * 0.1 / 1.1  # 2 mu L/(L + mu)
    limit = (0.1 / harmonic + N - 1) ** 2 / (N * (N - 1))
    end, _, tight = floor.floors(attained.extremal(10, 0.01 / N, N))
    assert tight / end == pytest.approx(limit, abs=0.01) and limit > 1


def test_one_local_step_leaves_no_floor_and_mu_equal_to_L_none_either():
    for f in (kinked(0.1, 1.0), kinked(1.0, 1.0)):
        problem = Problem(f, [0.0], np.full((2, 1 if f.mu < 1 else 6), 0.3), 1.0, opposed(2))
        assert sharp.round_bound(problem, 0)[1] == 0 and not sharp.closed_form(problem).any()


def test_the_closed_form_in_numbers():
    problem = Problem(
        quadratic([0.5, 1.0]), [1.0, 1.0], np.full((3, 4), 0.2), 0.3, opposed(2, 2), sigma=0.6
    )
    lam = 2 * 0.2 * 0.5 / 1.5
    root = 0.6 * np.sqrt(0.3) + 0.2 * np.sqrt(3) * 0.6  # a (N - 1) = .6 < 1 / mu = 2
    floor = 0.2 * 0.36 * 1.5 / (2 * 0.5 * 2) + 0.25 / 2 * root**2
    assert sharp.closed_form(problem) == pytest.approx(
        [2 * (1 - lam) ** (4 * t) + floor for t in range(3)]
    )
    long = Problem(quadratic([0.5, 1.0]), [0.0, 0.0], np.full((2, 40), 0.2), 0.3, opposed(2, 2))
    assert sharp.closed_form(long)[1] == pytest.approx(0.25 / 2 * 4 * 0.3)  # 1 / mu = 2 < a (N - 1)


@pytest.mark.parametrize("M", [0.0, 2.0])
def test_sharp_theorem1_at_its_longest_step(M):
    """Steps at the condition of a round, found by bisection, on quadratics and kinked functions."""
    rng = np.random.default_rng(4)
    for _ in range(30):
        Q, N, mu = int(rng.integers(1, 6)), int(rng.integers(1, 6)), 10 ** rng.uniform(-2, 0)
        f = quadratic([mu, 1.0]) if M or rng.random() < 0.5 else kinked(mu, 1.0)
        sigma = 0.0 if f.curvature is None else 0.4
        short, too_long = np.full((4, N), 0.01), 2.1
        u = zero_sum(rng, Q, 2)
        problem = Problem(f, [0.3, -0.1], short, 0.2, u, M, sigma)
        for _ in range(20):
            middle = (problem.steps.max() + too_long) / 2
            longer = replace(problem, steps=np.full((4, N), middle))
            try:
                sharp.bound(longer)
                problem = longer
            except ValueError:
                too_long = middle
        assert too_long > 0.1 and (sharp.bound(problem) * ABOVE >= exact_error(problem)).all()
        if M == 0:
            assert too_long == pytest.approx(2 / (1 + mu), rel=1e-4)


def test_sharp_forms_refuse_what_they_do_not_speak_of():
    nonconvex = theorem2.long_run(3)
    fails("mu > 0", sharp.bound, nonconvex)
    longer = Problem(quadratic([1.0]), [1.0], [[0.7], [0.7]], 0.1, opposed(2))
    assert len(sharp.bound(longer)) == 2  # allowed up to 2/(L + mu) = 1
    too_long = Problem(quadratic([1.0]), [1.0], [[1.01], [1.01]], 0.1, opposed(2))
    fails("2p", sharp.bound, too_long)
    noisy = replace(longer, M=1.0)  # a (1 + M/Q) = 1.05
    fails("2p", sharp.bound, noisy)
    fails("M = 0", sharp.closed_form, small_quadratic())
    fails("one constant step", sharp.closed_form, small_quadratic(M=0.0))
    fails("2 / \\(L", sharp.closed_form, too_long)
    fails("M = 0 and mu > 0", sharp.closed_form, nonconvex)


def test_young_is_an_equality_at_its_own_constant():
    """(x + y)^2 = (1 + e) x^2 + (1 + 1/e) y^2 at e = y / x; where one is 0, the other is counted
    once.
    """
    for x, y in ((0.3, 2.0), (1.0, 1e-3), (0.0, 2.0), (0.7, 0.0)):
        on_V, on_B = sharp.young(x, y)
        assert on_V * x**2 + on_B * y**2 == pytest.approx((x + y) ** 2)


def test_one_step_ratios_are_of_states_within_the_step():
    ratios = floor.one_step_ratios()
    assert len(ratios) == 1670 and 1 - 1e-9 <= min(ratios) < 1.0001 and np.median(ratios) < 50
