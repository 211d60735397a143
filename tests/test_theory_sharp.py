"""The sharp step and its floor: brute-force maxima, states that attain it, random problems."""

from dataclasses import replace

import numpy as np
import pytest
from test_theory_functions import fails
from test_theory_local_sgd import small_quadratic

from theory import theorem1_proof, theorem2
from theory.beyond import attained, floor, sharp
from theory.functions import kinked, quadratic
from theory.local_sgd import exact_error
from theory.one_step import State, random_states
from theory.problem import Problem, kinked_problem, opposed, zero_sum
from theory.report import ZERO

ABOVE = 1 + 1e-9


class Named(State):
    """A State with its symbols by name."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.mu, self.L, self.a, self.B, self.M, self.s, self.Q = self.symbols


def spread_bound(x):
    """[3], written out."""
    return ((1 - x.a * x.f.mu) * np.sqrt(x.V) + x.a * np.sqrt(x.mean_B)) ** 2 + x.a**2 * (
        1 - 1 / x.Q
    ) * x.s**2


def sharp_states(count, M, seed=7):
    """Random states with steps up to 2/(L + mu), which they reach one time in ten."""
    rng = np.random.default_rng(seed)
    for state in random_states(seed, count):
        x = Named(state.f, state.theta, state.b, *state.symbols[2:6])
        longest = 2 / (x.f.L + x.f.mu)
        yield (
            rng,
            Named(x.f, x.theta, x.b, longest * min(1, rng.uniform(0, 1.1) + 1e-3), x.B, M, x.s),
        )


def test_the_spread_grows_by_no_more_than_its_bound():
    for _, x in sharp_states(2000, 0.0):
        assert spread_bound(x) * ABOVE + ZERO >= x.next_V


def test_one_sharp_step_without_weights_on_random_states():
    """E' <= (1 - 2a mu L/(L+mu)) E + a (L-mu)^2/(2(L+mu)) V + a^2 s^2/Q: the formula itself."""
    closest = np.inf
    for _, x in sharp_states(3000, 0.0):
        L, mu, a = x.f.L, x.f.mu, x.a
        bound = (
            (1 - 2 * a * mu * L / (L + mu)) * x.E
            + a * (L - mu) ** 2 / (2 * (L + mu)) * x.V
            + a**2 * x.s**2 / x.Q
        )
        assert bound * ABOVE + 1e-12 * (x.E + x.V) + ZERO >= x.next_E
        assert sharp.weight(x.f, a, 1.0, 0.0, 0.0) == pytest.approx(
            a * (L - mu) ** 2 / (2 * (L + mu)), abs=1e-15
        )
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
        weight = sharp.weight(x.f, x.a, p, w * (1 + e), n * x.a**2 * M)
        bound = p * (1 - x.a * k * x.f.mu * x.f.L) * x.E + weight * x.V
        bound += w * (1 + 1 / e) * x.a**2 * x.mean_B + n * x.a**2 * (2 * M * x.mean_B + x.s**2)
        assert bound == pytest.approx(
            np.dot(sharp.step(x.f, x.symbols, x.mean_B, p, w, (1 + e, 1 + 1 / e)), (x.E, x.V, 1)),
            rel=1e-12,
        )
        slack = 1e-12 * (p * x.E + w * x.V)  # 1 - lambda and weight may both be 0, up to rounding
        assert bound * ABOVE + slack + ZERO >= p * x.next_E + w * x.next_V
        tried += 1
    assert tried > 100


@pytest.mark.parametrize("M", [0.0, 3.0])
def test_one_sharp_step_from_the_optimum_is_noise_alone(M):
    """All clients at theta*: the step is exact without M, and with it counts the biases' noise
    twice, as [4] does.
    """
    b = np.array([[0.3, -0.1], [-0.3, 0.1], [0.0, 0.0]])
    x, p, w = Named(kinked(0.2, 1.0), np.zeros((3, 2)), b, 0.04, 0.11, M, 0.7), 1.3, 0.4
    n, mean_B = p / 3 + w * 2 / 3, 0.2 / 3
    assert p * x.next_E + w * x.next_V == pytest.approx(
        0.0016 * (w * mean_B + n * (M * mean_B + 0.49))
    )
    assert sharp.step(x.f, x.symbols, x.mean_B, p, w, (5.0, 1.0))[2] == pytest.approx(
        0.0016 * (w * mean_B + n * (2 * M * mean_B + 0.49))
    )
    with pytest.raises(ValueError, match="smaller steps"):
        x = Named(x.f, x.theta, b, 1.7, 0.11)
        sharp.step(x.f, x.symbols, x.mean_B, p, w, (2.0, 2.0))


def test_the_sharp_weight_is_the_maximum_over_the_cone():
    """Over s = sqrt(W/V) and C between (W + mu L V)/(L + mu) and sqrt(VW), V = 1, of the expression
    in the proof.
    """
    rng = np.random.default_rng(0)
    for _ in range(300):
        L, mu, p, w = 10 ** rng.uniform(-1, 1), 0.0, *10 ** rng.uniform(-1, 1, 2)
        mu = L * 10 ** rng.uniform(-2, 0)
        a, noise = (
            2 / (L + mu) * rng.uniform(0.01, 1),
            0.0 if rng.random() < 0.5 else 10 ** rng.uniform(-3, 0),
        )
        s = np.linspace(mu, L, 4001)
        ends = [s, (s**2 + mu * L) / (L + mu)]
        values = [
            w * (1 - 2 * a * C + a**2 * s**2)
            + p * (2 * a * C - 2 * a / (L + mu) * (s**2 + mu * L))
            + 2 * noise * s**2
            for C in ends
        ]
        brute = np.max(values)
        assert sharp.weight(kinked(mu, L), a, p, w, noise) == pytest.approx(brute, rel=1e-5)


@pytest.mark.parametrize("kappa", [1.5, 10.0, 100.0])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_sharp_step_is_attained(kappa, share):
    """On the states of the proof, q = i/Q of the clients on the steep side, for the weights that
    have their maximum there.
    """
    L, mu = 1.0, 1 / kappa
    a, p = share * 2 / (L + mu), 1.3
    for i, Q in ((1, 2), (1, 3), (2, 5), (1, 11), (3, 40)):
        s = mu * L / (i / Q * (L - mu) + mu)
        if s > (L + mu) / 2 + 1e-9:
            continue
        theta = np.where(np.arange(Q) < i, s / (L - s), -s / (s - mu))[:, None]
        x = Named(kinked(mu, L), theta, np.zeros((Q, 1)), a, 0.0)
        w = p * (1 - 2 * s / (L + mu)) / (1 - a * s) if share < 1 else 0.37 * p
        bound = p * (1 - 2 * a * mu * L / (L + mu)) * x.E + sharp.weight(x.f, a, p, w, 0.0) * x.V
        if share < 1:
            assert bound == pytest.approx(p * x.next_E + w * x.next_V, rel=1e-10)
        assert bound * ABOVE >= p * x.next_E + w * x.next_V
        assert pytest.approx((s - mu) * (L - s) / (mu * L) * x.V) == x.E


def test_the_floor_is_a_state_that_does_not_move():
    """(L-mu)^2/(4 mu L) V at s = (L+mu)/2, one client of L/mu + 1 on the steep side; every step
    length.
    """
    for kappa in (2, 10, 50):
        L, mu, Q = 1.0, 1 / kappa, kappa + 1
        theta = np.full((Q, 1), -(L + mu) / (L - mu))
        theta[0] *= -1
        for a in (0.01, 0.5, 2 / (L + mu)):
            x = Named(kinked(mu, L), theta, np.zeros((Q, 1)), a, 0.0)
            assert (
                x.next_E == pytest.approx(x.E)
                and pytest.approx((L - mu) ** 2 / (4 * mu * L) * x.V) == x.E
            )


def test_the_sharp_certificate_of_two_steps_by_hand():
    L, mu, a, s, Q = 2.0, 0.5, 0.3, 0.7, 4
    biases = np.zeros((2, 2, Q, 1))
    biases[0, :, :, 0] = [[0.3, 0.3, 0.0, -0.6], [0.2, -0.2, 0.0, 0.0]]
    problem = Problem(kinked(mu, L), np.zeros(1), np.full((2, 2), a), 0.36, biases / 0.6, sigma=s)
    lam, w = (
        2 * a * mu * L / (L + mu),
        a * (L - mu) ** 2 / (2 * (L + mu)),
    )  # weight of V before the last step
    floor = a**2 * s**2 / Q + ((1 - lam) / Q + w * (1 - 1 / Q)) * a**2 * s**2
    floor += (
        w * a**2 * (0.09 + 0.09 + 0.36) / 4
    )  # only the bias of the first step spreads the clients before the second
    assert sharp.round_bound(problem, 0) == pytest.approx(((1 - lam) ** 2, floor))
    noisy = replace(problem, M=0.8)
    n = [(1 - lam) / Q, 1 / Q]  # p_1 and p_2 over Q; w_1 comes from a maximum over s on a grid
    slopes = np.linspace(mu, L, 100001)
    w = (2 * a / (L + mu) * (slopes - mu) * (L - slopes) + 2 * a**2 * 0.8 / Q * slopes**2).max()
    n[0] += w * (1 - 1 / Q)
    floor = (
        sum(
            n_j * a**2 * (2 * 0.8 * B + s**2)
            for n_j, B in zip(n, (0.54 / 4, 0.08 / 4), strict=True)
        )
        + w * a**2 * 0.54 / 4
    )
    assert sharp.round_bound(noisy, 0) == pytest.approx(((1 - lam) ** 2, floor))


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
    """M = 40 and neither bias nor s: the weight on V must be kept where the M = 0 path stands at 0.
    It was dropped once.
    """
    for s in (0.0, 1e-9):
        for Q, N, a, M in ((50, 39, 0.1, 40.0), (8, 9, 0.05, 80.0)):
            problem = Problem(
                quadratic([1.0]), [1.0], np.full((2, N), a), 0.0, np.zeros((Q, 1)), M, s
            )
            with pytest.raises(ValueError, match="smaller steps"):
                sharp.bound(problem)
    problem = Problem(
        quadratic([1.0]), [1.0], np.full((3, 9), 0.01), 0.0, np.zeros((8, 1)), 20.0, 0.0
    )
    E, bound = exact_error(problem), sharp.bound(problem)
    assert (
        (bound * ABOVE >= E).all()
        and bound[-1] < 1.5 * E[-1]
        and bound[-1] > 1.02 * (1 - 0.01) ** 36
    )


def test_the_extremal_problem():
    """One client of eleven pushed up by sqrt(kappa B) in the first step of a round, the others
    down, sums and sizes.
    """
    problem = attained.extremal(10, 0.01, 30, B=1e-5)
    b = problem.biases[0, 0, :, 0]
    assert b.tolist() == pytest.approx([-1e-2] + [1e-3] * 10) and not problem.biases[:, 1:].any()
    assert problem.mean_B[3] == pytest.approx([1e-5] + [0.0] * 29) and problem.B[
        3, 0
    ] == pytest.approx(1e-4)
    assert (problem.f.mu, problem.f.L, problem.Q) == (0.1, 1.0, 11)
    for N, a, ratio in ((10, 1 / 12, 1.084), (30, 0.01, 1.015)):
        problem = attained.extremal(10, a, N)
        E = exact_error(problem)
        assert E[-1] == pytest.approx(E[-10], rel=2e-3)  # it has settled
        end, lemmas, tight = floor.floors(problem)
        assert end == E[-1] and round(tight / end, 3) == ratio and lemmas / end > 100
        plain = (
            0.81 / 0.4 * a**2 * 1e-5
        )  # (L - mu)^2/(4 mu L) a^2 B: what the spread of the first step can do
        assert 0.99 * plain > E[-1] > plain / (1 + 1.2 * a * N)


def test_sharp_numbers_on_the_kinked_problem():
    problem, E = kinked_problem(), exact_error(kinked_problem())[-1]
    forms = theorem1_proof.corrected(problem), sharp.bound(problem)
    assert [round(form[-1] / E, 2) for form in (*forms, sharp.closed_form(problem))] == [
        15.29,
        1.80,
        7.99,
    ]
    end, *bounds = floor.floors(kinked_problem(T=None))
    assert [round(x / end, 1) for x in bounds] == [23.8, 2.0]


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
    """Steps just at the condition of a round: found by bisection, run exactly on quadratics and on
    the kinked function.
    """
    rng = np.random.default_rng(4)
    for _ in range(30):
        Q, N, mu = int(rng.integers(1, 6)), int(rng.integers(1, 6)), 10 ** rng.uniform(-2, 0)
        f = quadratic([mu, 1.0]) if M or rng.random() < 0.5 else kinked(mu, 1.0)
        short, too_long, seed = 0.0, 2.1, int(rng.integers(1000))

        def problem(a, f=f, N=N, Q=Q, seed=seed):
            directions = zero_sum(np.random.default_rng(seed), Q, 2)
            return Problem(
                f,
                [0.3, -0.1],
                np.full((4, N), a),
                0.2,
                directions,
                M,
                0.0 if f.curvature is None else 0.4,
            )

        for _ in range(20):
            middle = (short + too_long) / 2
            try:
                sharp.bound(problem(middle))
                short = middle
            except ValueError:
                too_long = middle
        E = exact_error(problem(short))
        assert short > 0.1 and (sharp.bound(problem(short)) * ABOVE >= E).all()
        if M == 0:
            assert short == pytest.approx(2 / (1 + mu), rel=1e-4)


def test_floor_is_linear_in_B_quadratic_in_the_step_and_gone_at_one_local_step():
    def left_over(**settings):
        return exact_error(kinked_problem(T=None, **settings))[-1]

    assert kinked_problem(alpha=0.05, N=6, T=None).T == 400  # 12 / (a mu N)
    per_B = [left_over(B=B) / B for B in (1e-6, 1e-4, 1e-1)]
    assert np.ptp(per_B) / per_B[0] < 1e-8
    floors = [left_over(alpha=a) for a in (0.01, 0.005)]
    assert np.log2(floors[0] / floors[1]) == pytest.approx(2, abs=0.01)
    assert left_over(N=1) == 0.0


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
