"""The three laws on the order of a bias: weights of steps, runs written out, measured ties."""

import numpy as np
import pytest

from theory import theorem1_proof
from theory.beyond import drift_law, noise_law, ordering, sharp
from theory.beyond.ordering import at_a_kink, final_ratio, through_noise, where_smooth
from theory.functions import quadratic
from theory.local_sgd import exact_error
from theory.one_step import largest_steps
from theory.problem import Problem, diminishing_steps, opposed

ABOVE = 1 + 1e-9
C_MU = (0.25, 0.5, 1.0, 2.0, 4.0)


def test_growing_bias_wins_through_the_noise_exactly_when_c_mu_is_below_one():
    ratios = [(final_ratio(through_noise, c), noise_law.mean_ratio(c)) for c in C_MU]
    assert [round(final, 2) for final, _ in ratios] == [0.14, 0.31, 1.01, 2.73, 5.94]
    means = [mean for _, mean in ratios]
    assert (round(means[0], 3), round(means[-1], 2)) == (
        0.075,
        0.45,
    )  # averaged over the rounds: ahead everywhere
    assert (np.diff(means) > 0).all()
    for c in (0.7, 0.9, 1.1, 1.4):
        assert (final_ratio(through_noise, c) < 1) == (c < 1)
    assert final_ratio(through_noise, step=0.05) > 1  # a constant step
    assert final_ratio(through_noise, 0.5 / 3, mu=3.0) == pytest.approx(
        final_ratio(through_noise, 0.5)
    )  # a law in c mu


def test_the_setting_of_the_ordering_numbers(monkeypatch):
    """Q = 8, d = 4, T = 200, N = 5, M = 1, B linear from 0 to 8 over the local steps, full
    reversal, s0 = max(20, 40 c).
    """
    seen = []
    monkeypatch.setattr(
        ordering, "exact_error", lambda problem: seen.append(problem) or exact_error(problem)
    )
    for c, offset in ((0.25, 20), (2.0, 80)):
        through_noise(c)
        growing, shrinking = seen[-2:]
        for problem in (growing, shrinking):
            assert (
                problem.Q,
                len(problem.theta0),
                problem.T,
                problem.N,
                problem.M,
                problem.sigma,
            ) == (8, 4, 200, 5, 1.0, 0.0)
            assert (
                problem.steps[:-1].ravel() == pytest.approx(c / (np.arange(1000) + offset))
                and not problem.theta0.any()
            )
        assert growing.B[:-1].ravel() == pytest.approx(np.linspace(0, 8, 1000))
        assert (shrinking.B[:-1].ravel() == growing.B[:-1].ravel()[::-1]).all()
        assert problem.steps.max() <= largest_steps(1.0, 1.0)[0]
        for bound in (theorem1_proof.corrected, sharp.bound):
            assert (bound(growing) * ABOVE >= exact_error(growing)).all()


@pytest.mark.parametrize(
    "settings", [{"T": 150, "N": 4, "offset": 8}, {"T": 300, "N": 1}, {"B": (1.0, 3.0)}]
)
def test_the_side_of_one_does_not_depend_on_the_settings(settings):
    finals = [final_ratio(through_noise, c, **settings) for c in (0.25, 0.5, 2.0, 4.0)]
    assert [final < 1 for final in finals] == [True, True, False, False]
    assert final_ratio(through_noise, 1.0, **settings) == pytest.approx(1, abs=0.06)


@pytest.mark.parametrize("c", [0.5, 1.0, 3.0])
def test_the_noise_law_is_the_weight_of_each_step(c):
    """N = 1, M = 1: E_T = sum_s (B_s / Q) a_s^2 prod_{r>s} [(1 - a_r mu)^2 + a_r^2 mu^2 / Q], an
    independent form.
    """
    a, B, weighted = c / (np.arange(40) + 200), np.linspace(0, 8, 40), 0.0
    for s in range(40):
        weighted += B[s] / 8 * a[s] ** 2 * np.prod((1 - a[s + 1 :]) ** 2 + a[s + 1 :] ** 2 / 8)
    assert through_noise(c, T=40, N=1, offset=200)[0, -1] == pytest.approx(weighted)
    pure = np.array([a[s] * np.prod(1 - a[s + 1 :]) for s in range(40)]) ** 2
    expected = (np.arange(40) + 200.0) ** (
        2 * c - 2
    )  # ~ (s + s0)^(2 c mu - 2); exactly constant at c mu = 1
    assert pure[0] / pure[-1] == pytest.approx(
        expected[0] / expected[-1], rel=1e-9 if c == 1 else 0.02
    )


def test_drift_is_the_kinked_run_written_out():
    """Two clients, L = 1, mu = 1/2, c = 2, growing and shrinking biases, 4 rounds of 3 steps."""
    growing = np.linspace(0, 8, 12)
    for row, B in enumerate((growing, growing[::-1])):
        server, E = 0.0, []
        for t in range(4):
            up = down = server
            for i in range(3 * t, 3 * t + 3):
                a, b = 2 / (i + 80), np.sqrt(B[i])
                up, down = (
                    up - a * ((1 if up > 0 else 0.5) * up - b),
                    down - a * ((1 if down > 0 else 0.5) * down + b),
                )
            server = (up + down) / 2
            E.append(server**2)
        assert at_a_kink(2.0, mu=0.5, L=1.0, T=4, N=3)[row] == pytest.approx(E, rel=1e-10)


def test_exactly_when_c_mu_is_below_one_is_false_through_the_drift():
    ratios = [final_ratio(at_a_kink, x * 1.5, mu=1 / 1.5, L=1.0) for x in (1.0, 4 / 3, 2.0, 4.0)]
    assert [round(x, 2) for x in ratios] == [0.40, 0.67, 1.31, 3.37]


def test_the_drift_ties_where_the_law_says():
    assert [round(drift_law.tie(kappa), 2) for kappa in (1.5, 3.0, 10.0)] == [
        1.69,
        1.38,
        1.08,
    ]
    for kappa in (1.5, 3.0, 10.0):
        assert drift_law.tie_law(kappa) == pytest.approx(1 + 1 / kappa)
        assert drift_law.tie(kappa) == pytest.approx(1 + 1 / kappa, rel=0.05)
    for kappa, Q in (
        (10.0, 11),
        (3.0, 4),
        (2.0, 3),
    ):  # the proof's two equations, solved by bisection on y
        q, L = 1 / Q, kappa

        def c_of(y, q=q, L=L):  # from c m(y) = 2 at mu = 1
            return 2 / (q * L * (1 - y) + 1 - q + q * y)

        def left(y, q=q, L=L, c_of=c_of):
            return c_of(y) * q * (L * (1 - y) ** 2 - 1 - y**2 - 2 * (1 - q) / q * y) + 2 * y

        low, high = 0.0, 1.0
        for _ in range(60):
            y = (low + high) / 2
            low, high = (y, high) if np.sign(left(y)) == np.sign(left(0.0)) else (low, y)
        assert drift_law.tie_law(kappa, Q) == pytest.approx(c_of(low), rel=1e-9)
        assert drift_law.tie(kappa, Q) == pytest.approx(c_of(low), rel=0.05)
    with pytest.raises(ValueError, match="the tie is near the law"):
        drift_law.tie(100.0)
    for x, sign in ((0.9, -1), (1.15, 1)):  # at another length, start and number of local steps
        ratio = final_ratio(
            at_a_kink, x * 1.5 * 2, mu=0.5, L=1.0, T=150, N=8, offset=400, B=(1.0, 2.0)
        )
        assert np.sign(ratio - 1) == sign


def test_on_a_smooth_function_the_drift_ties_at_three():
    """Two clients on f' = x + .9 (sqrt(1 + x^2) - 1), written out: the tie is at c f''(0) = 3,
    whatever L/mu = 19 says.
    """
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
        found = final_ratio(where_smooth, c, T=40, N=3)
        assert found == pytest.approx(ends[0] / ends[1], rel=1e-8)
    finals = [final_ratio(where_smooth, c) for c in (2.5, 3.0, 3.5)]
    assert finals[0] < 0.6 and finals[1] == pytest.approx(1, abs=0.01) and finals[2] > 1.5


def test_several_curvatures_tie_elsewhere_through_the_noise():
    """(1, 3, 3, 3), N = 1: at c mu = .9 the growing bias loses already, at c L = .9 it wins."""
    f, u, B = quadratic([1.0, 3.0, 3.0, 3.0]), opposed(8, 4), np.linspace(0, 8, 400)[:, None]
    for c, wins in ((0.3, True), (0.9, False)):
        steps = diminishing_steps(400, 1, c, max(20.0, 40 * 3 * c))
        E = [exact_error(Problem(f, np.zeros(4), steps, b, u, 1.0))[-1] for b in (B, B[::-1])]
        assert (E[0] < E[1]) == wins


def test_the_drift_of_a_constant_bias_sits_where_the_proof_puts_it():
    """At c = 1/mu + 1/L the average is at -y a N sqrt B, y = (L - mu)/(L + mu), to leading order in
    aN.
    """
    mu, N, T = 0.25, 20, 400
    c = 1 / mu + 1
    E = at_a_kink(c, mu=mu, L=1.0, T=T, N=N, offset=200, B=(4.0, 4.0))[0]
    a = c / (200 + T * N)
    assert np.sqrt(E[-1]) / (a * N * 2) == pytest.approx(0.6, rel=0.06)


def test_a_ratio_is_of_the_last_round_and_a_list_of_them_in_order():
    growing, shrinking = through_noise(0.5, T=6)
    assert final_ratio(through_noise, 0.5, T=6) == growing[-1] / shrinking[-1]
    alone = [final_ratio(at_a_kink, c, mu=0.5, T=6) for c in (1.0, 2.0)]
    assert ordering.final_ratios(at_a_kink, (1.0, 2.0), mu=0.5, T=6) == alone
    assert drift_law.kink_ratios((0.5, 1.0), 2.0, Q=3) == [
        final_ratio(at_a_kink, c, mu=0.5, L=1.0, Q=3) for c in (1.0, 2.0)
    ]


@pytest.mark.parametrize("module", [noise_law, drift_law])
def test_the_verdicts_on_the_order_follow_the_runs(module, monkeypatch):
    """Runs in which the growing bias always wins, and a tie at another place, break both laws."""
    fake = {"final_ratio": lambda *run, **settings: 0.5, "tie": lambda kappa, Q: 1.0}
    fake["final_ratios"] = lambda run, values, **settings: [0.5] * len(values)
    for name in set(fake) & set(vars(module)):
        monkeypatch.setattr(module, name, fake[name])
    (row,) = module.check()
    assert (row["printed"], row["corrected"]) == ("holds", "violated")
