"""The three laws on the order of a bias: weights of steps, runs written out, measured ties."""

import numpy as np
import pytest

from theory.beyond import drift_law, noise_law, ordering
from theory.beyond.ordering import at_a_kink, final_ratio, through_noise, where_smooth

ABOVE = 1 + 1e-9
C_MU = (0.25, 0.5, 1.0, 2.0, 4.0)


def test_the_growing_bias_is_better_through_the_noise_for_c_mu_below_one():
    for c in (0.25, 0.5, 0.7, 0.9, 1.1, 1.4, 2.0, 4.0):
        assert (final_ratio(through_noise, c) < 1) == (c < 1)
        assert noise_law.mean_ratio(c) < 1  # averaged over the rounds it is ahead everywhere
    assert final_ratio(through_noise, step=0.05) > 1  # a constant step
    third = final_ratio(through_noise, 0.5 / 3, mu=3.0)
    assert third == pytest.approx(final_ratio(through_noise, 0.5))  # a law in c mu


def test_the_example_of_the_noise_law_in_the_lecture():
    """Two rounds of one step, sizes 0 and 8, Q = 8: by hand."""
    for c, numbers in (
        (0.5, (0.01, 0.0127, 0.79)),
        (1, (0.04, 0.0403, 0.99)),
        (2, (0.16, 0.095, 1.68)),
    ):
        growing, shrinking = through_noise(c, T=2, N=1, offset=4)[:, -1]
        a, b = c / 4, c / 5
        assert growing == pytest.approx(b**2)
        assert shrinking == pytest.approx(((1 - b) ** 2 + b**2 / 8) * a**2)
        found = growing, shrinking, growing / shrinking
        assert found == pytest.approx(numbers, rel=0.01)


def test_the_example_of_the_tie_in_the_lecture():
    """L = 3, mu = 1: at c = 4/3 the clients meet the mean curvature 3/2, and c m = 2."""
    pushed_right = (1 + 3) / 2  # half of the round on each side
    m = (pushed_right + 1) / 2
    assert drift_law.tie_law(3.0) * m == pytest.approx(2)
    found = drift_law.kink_ratios((1.0, 4 / 3, 2.0), 3.0)
    assert found == pytest.approx([0.60, 0.95, 1.70], abs=0.005)
    assert drift_law.tie(3.0) == pytest.approx(1.38, abs=0.005)


@pytest.mark.parametrize(
    "settings", [{"T": 150, "N": 4, "offset": 8}, {"T": 300, "N": 1}, {"B": (1.0, 3.0)}]
)
def test_the_side_of_one_does_not_depend_on_the_settings(settings):
    finals = [final_ratio(through_noise, c, **settings) for c in (0.25, 0.5, 2.0, 4.0)]
    assert [final < 1 for final in finals] == [True, True, False, False]
    assert final_ratio(through_noise, 1.0, **settings) == pytest.approx(1, abs=0.06)


@pytest.mark.parametrize("c", [0.5, 1.0, 3.0])
def test_the_noise_law_is_the_weight_of_each_step(c):
    """E_T = sum_s (B_s / Q) a_s^2 prod_{r>s} [(1 - a_r mu)^2 + a_r^2 mu^2 / Q] for N = M = 1."""
    a, B, weighted = c / (np.arange(40) + 200), np.linspace(0, 8, 40), 0.0
    for s in range(40):
        weighted += B[s] / 8 * a[s] ** 2 * np.prod((1 - a[s + 1 :]) ** 2 + a[s + 1 :] ** 2 / 8)
    assert through_noise(c, T=40, N=1, offset=200)[0, -1] == pytest.approx(weighted)
    pure = [(a[s] * np.prod(1 - a[s + 1 :])) ** 2 for s in (0, 39)]
    rel = 1e-9 if c == 1 else 0.02  # (s + s0)^(2 c mu - 2) is constant at c mu = 1
    assert pure[0] / pure[1] == pytest.approx((200 / 239) ** (2 * c - 2), rel=rel)


def test_drift_is_the_kinked_run_written_out():
    """Two clients, L = 1, mu = 1/2, c = 2, growing and shrinking biases, 4 rounds of 3 steps."""
    growing = np.linspace(0, 8, 12)
    for row, B in enumerate((growing, growing[::-1])):
        server, E = 0.0, []
        for t in range(4):
            up = down = server
            for i in range(3 * t, 3 * t + 3):
                a, b = 2 / (i + 80), np.sqrt(B[i])
                up -= a * ((1 if up > 0 else 0.5) * up - b)
                down -= a * ((1 if down > 0 else 0.5) * down + b)
            server = (up + down) / 2
            E.append(server**2)
        assert at_a_kink(2.0, mu=0.5, L=1.0, T=4, N=3)[row] == pytest.approx(E, rel=1e-10)


@pytest.mark.parametrize("kappa, Q", [(1.5, 2), (10.0, 2), (10.0, 11), (3.0, 4), (2.0, 3)])
def test_the_drift_ties_where_the_law_says(kappa, Q):
    """The two equations of the proof [8d], solved by bisection on y at mu = 1."""
    q, L = 1 / Q, kappa

    def c_of(y):  # from c m(y) = 2
        return 2 / (q * L * (1 - y) + 1 - q + q * y)

    def left(y):
        return c_of(y) * q * (L * (1 - y) ** 2 - 1 - y**2 - 2 * (1 - q) / q * y) + 2 * y

    low, high = 0.0, 1.0
    for _ in range(60):
        y = (low + high) / 2
        low, high = (y, high) if np.sign(left(y)) == np.sign(left(0.0)) else (low, y)
    assert drift_law.tie_law(kappa, Q) == pytest.approx(c_of(low), rel=1e-9)
    assert drift_law.tie(kappa, Q) == pytest.approx(c_of(low), rel=0.05)


def test_the_tie_does_not_depend_on_the_settings():
    with pytest.raises(ValueError, match="the tie is near the law"):
        drift_law.tie(100.0)
    with pytest.raises(ValueError, match="L > mu"):
        drift_law.kink_ratios((1.0, 2.0), 1.0)
    settings = {"mu": 0.5, "L": 1.0, "T": 150, "N": 8, "offset": 400, "B": (1.0, 2.0)}
    assert final_ratio(at_a_kink, 0.9 * 3, **settings) < 1
    assert final_ratio(at_a_kink, 1.15 * 3, **settings) > 1


def test_a_bias_that_grows_inside_each_round_drifts_less():
    """The kinked run of the lecture, written out; and the spread of [8g] with falling steps."""
    for row, B in enumerate((np.linspace(0, 8, 5), np.linspace(8, 0, 5))):
        server = 0.0
        for _ in range(200):
            up = down = server
            for b in np.sqrt(B):
                up -= 0.05 * ((1 if up > 0 else 0.1) * up - b)
                down -= 0.05 * ((1 if down > 0 else 0.1) * down + b)
            server = (up + down) / 2
        E = at_a_kink(mu=0.1, c=1.0, step=0.05, each_round=True)[row]
        assert E[-1] == pytest.approx(server**2, rel=1e-9)
    rng = np.random.default_rng(0)
    for _ in range(100):
        steps, b = np.sort(rng.random((2, 9)))
        growing, shrinking = (np.cumsum(steps[::-1] * x) for x in (b, b[::-1]))
        assert (growing <= shrinking + 1e-12).all()


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
