"""Lemmas 1 to 5, Equations 5 and 6: sums over clients written out, and random states."""

import numpy as np
import pytest
from test_theory_functions import fails

from theory import lemma5, lemmas
from theory.functions import kinked, quadratic, rational
from theory.one_step import State, largest_steps


def test_lemmas_are_the_sums_over_clients_they_state():
    rng = np.random.default_rng(0)
    mu, L, a, B, M, s, Q = 0.2, 1.0, 0.03, 0.4, 0.6, 0.3, 3
    theta = rng.standard_normal((Q, 1))
    x = State(kinked(mu, L), theta, np.zeros((Q, 1)), a, B, M, s)
    points = theta[:, 0]
    F = [(L if p > 0 else mu) * p**2 / 2 for p in points]
    mean, bar_F = sum(points) / Q, sum(F) / Q
    V = sum((p - mean) ** 2 for p in points) / Q
    gap_of_mean = (L if mean > 0 else mu) * mean**2 / 2
    printed = [(3 + 2 * M) * (2 * L * f + B) + 3 * s**2 for f in F]  # E||g_k||^2
    noise = sum(M * (4 * L * f + 2 * B) + s**2 for f in F) / Q
    assert lemmas.lemma1_printed(x) == pytest.approx(printed)
    assert lemmas.lemma1(x) == pytest.approx([(1 + M) * (4 * L * f + 2 * B) + s**2 for f in F])
    assert lemmas.lemma2_printed(x) == pytest.approx(sum(printed) / Q**2)
    assert lemmas.lemma2(x) == pytest.approx(noise / Q)
    assert lemmas.equation5(x) == pytest.approx(sum(printed) / Q)
    pull = sum((a * L - 0.5) * f - mu / 2 * p**2 for f, p in zip(F, points, strict=True))
    assert lemmas.lemma3(x) == pytest.approx(mean**2 + 2 * a / Q * pull + 2 * a * L * V)
    both = (1 - a * mu) * mean**2 + 2 * a * L * V
    printed4 = both - a / 2 * gap_of_mean + a**2 * ((3 + 2 * M) * B + 3 * s**2) / Q
    fixed4 = both - a * (1 - 2 * a * L * (1 + 2 * M / Q)) * bar_F + a**2 * (2 * M * B + s**2) / Q
    assert lemmas.lemma4_printed(x) == pytest.approx(printed4)
    assert lemmas.lemma4(x) == pytest.approx(fixed4)
    given = x.symbols, V, bar_F
    lemma5_sum = (1 - a * mu / 2) * V + a**2 * sum(printed) / Q + a * B**2 / mu
    assert lemma5.printed(*given) == pytest.approx(lemma5_sum)
    spread = a**2 * (1 - 1 / Q) * noise
    for j in (1, 2, 3, 50):
        by_rate = (1 - a * mu) * V + a * B / mu
        by_count = (1 + 1 / j) * (1 - a * mu) ** 2 * V + (1 + j) * a**2 * B
        assert lemma5.corrected(*given, j) == pytest.approx(min(by_rate, by_count) + spread)
        (c, e), (d, g) = lemma5.factors(a, mu, j)
        assert (c * V + e * B, d * V + g * B) == pytest.approx((by_rate, by_count))
    assert lemma5.corrected(x.symbols, 0.0, bar_F, 0) == pytest.approx(a**2 * B + spread)


def test_lemma2_with_shared_noise_fails_by_a_third_of_the_clients():
    rng = np.random.default_rng(0)
    for Q in (6, 30):
        x = lemmas.only_noise(Q)
        n = rng.standard_normal(200000)  # one draw for all: g - bar g is that draw
        assert (n**2).mean() / lemmas.lemma2_printed(x) == pytest.approx(Q / 3, rel=0.02)


def test_lemma1_is_tight():
    x = lemmas.attained()  # b = grad f = 2
    assert x.theta.tolist() == x.b.tolist() == [[2.0], [-2.0]]
    assert x.symbols[3:5] == (4, 3)
    assert x.second[0] == pytest.approx(64) and lemmas.lemma1(x)[0] == pytest.approx(64)
    assert lemmas.lemma1_printed(x)[0] == 72 < 3 * 4 + 3 * 4 + 3 * 3.0 * 16  # the first line


def test_step_size_reaches_too_far_for_one_and_two_clients():
    for M in (0.0, 0.5, 3.0):
        ratio = [largest_steps(2.0, M)[0] / largest_steps(2.0, M, Q)[1] for Q in range(1, 20)]
        assert [Q for Q, x in enumerate(ratio, 1) if x > 1 + 1e-12] == [1, 2]
    assert largest_steps(2.0, 0.5)[0] == pytest.approx(1 / 32)
    assert largest_steps(2.0, 0.5, 4)[1] == pytest.approx(1 / 24)


def test_lemma5_and_equation6_fail_on_a_common_quadratic():
    """The round simulated client by client; every bound against the simulated V."""
    up = down = 0.0
    V, F = [0.0], [0.0]
    for _ in range(10):
        up -= 1 / 12 * (0.1 * up - 0.01)
        down -= 1 / 12 * (0.1 * down + 0.01)
        V.append(((up - down) / 2) ** 2)
        F.append(0.1 / 2 * (up**2 + down**2) / 2)
    symbols, found, gaps = lemma5.counterexample()
    assert symbols == (0.1, 1.0, 1 / 12, 1e-4, 0.0, 0.0, 4)
    printed, corrected = lemma5.along_a_round(symbols, gaps)
    total = lemma5.equation6(symbols, gaps[:-1])
    assert found == pytest.approx(np.array(V)) and gaps == pytest.approx(np.array(F))
    for j in range(10):
        assert printed[j + 1] == pytest.approx(lemma5.printed(symbols, printed[j], F[j]))
        assert corrected[j + 1] == pytest.approx(lemma5.corrected(symbols, corrected[j], F[j], j))
    assert round(printed[-1] / V[-1], 3) == 0.325
    assert (corrected >= found).all()
    assert round(total / sum(V[:-1]), 3) == 0.058
    written_out = sum(
        2 / 12 / 4 * (1 - 1 / 240) ** (10 - j) * (6 / 12 * 4 * F[j] + (3 / 12 + 1e-3) * 1e-4)
        for j in range(10)
    )
    assert total == pytest.approx(written_out)


def test_equation6_is_the_sum_it_states():
    mu, L, a, B, M, sigma, Q = 0.3, 1.7, 0.02, 0.4, 0.6, 0.5, 3
    F, total = [0.3, 0.1, 0.4, 0.2], 0.0
    for j in range(4):
        product = np.prod([1 - a * mu / 2 for _ in range(j, 4)])
        inner = 2 * a * (3 + 2 * M) * L * Q * F[j] + (a * (3 + 2 * M) + B / mu) * B
        total += 2 * a * L / Q * product * (inner + 3 * a * sigma**2)
    assert lemma5.equation6((mu, L, a, B, M, sigma, Q), F) == pytest.approx(total)


def test_lemmas_refuse_what_they_do_not_speak_of():
    theta, b = np.ones((2, 1)), np.zeros((2, 1))
    fails("bar L", lemmas.lemma4_printed, State(quadratic([1.0]), theta, b, 0.2, 0.1))
    x = State(quadratic([1.0]), theta, b, 1.5, 0.1)
    fails("mu \\+ L", lemma5.corrected, x.symbols, 1.0, 1.0, 3)
    x = State(rational(1), theta, b, 0.1, 0.1)
    fails("mu > 0", lemma5.corrected, x.symbols, 1.0, 1.0, 3)
