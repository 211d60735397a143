"""Lemmas 1 to 5, Equations 5 and 6: sums over clients written out, and random states."""

import numpy as np
import pytest
from test_theory_functions import fails

from theory import lemma5, lemmas
from theory.functions import kinked, quadratic, rational
from theory.one_step import State, largest_steps, random_states
from theory.report import SLACK, ZERO, worst

ABOVE = 1 + 1e-9


def test_lemmas_are_the_sums_over_clients_they_state():
    rng = np.random.default_rng(0)
    mu, L, a, B, M, s, Q = 0.2, 1.0, 0.03, 0.4, 0.6, 0.3, 3
    theta = rng.standard_normal((Q, 1))
    x = State(kinked(mu, L), theta, np.zeros((Q, 1)), a, B, M, s)
    points = theta[:, 0]
    F = [(L if p > 0 else mu) * p**2 / 2 for p in points]
    mean = sum(points) / Q
    V = sum((p - mean) ** 2 for p in points) / Q
    gap_of_mean = (L if mean > 0 else mu) * mean**2 / 2
    for k in range(Q):
        printed, corrected = lemmas.lemma1_printed(x)[k], lemmas.lemma1(x)[k]
        assert printed == pytest.approx(2 * (3 + 2 * M) * L * F[k] + (3 + 2 * M) * B + 3 * s**2)
        assert corrected == pytest.approx((1 + M) * (4 * L * F[k] + 2 * B) + s**2)
    lemma2 = (3 + 2 * M) / Q**2 * sum(2 * L * f + B for f in F) + 3 * s**2 / Q
    fixed2 = sum(M * (4 * L * f + 2 * B) + s**2 for f in F) / Q**2
    assert lemmas.lemma2_printed(x) == pytest.approx(lemma2)
    assert lemmas.lemma2(x) == pytest.approx(fixed2)
    lemma3 = mean**2 + sum(
        2 * a / Q * ((a * L - 0.5) * f - mu / 2 * p**2) for f, p in zip(F, points, strict=True)
    )
    assert lemmas.lemma3(x) == pytest.approx(lemma3 + 2 * a * L * V)
    printed4 = (
        (1 - a * mu) * mean**2
        - a / 2 * gap_of_mean
        + 2 * a * L * V
        + a**2 * ((3 + 2 * M) * B + 3 * s**2) / Q
    )
    noise = a**2 / Q * (2 * M * B + s**2)
    fixed4 = (
        (1 - a * mu) * mean**2
        + 2 * a * L * V
        + noise
        - a * (1 - 2 * a * L * (1 + 2 * M / Q)) * sum(F) / Q
    )
    assert lemmas.lemma4_printed(x) == pytest.approx(printed4)
    assert lemmas.lemma4(x) == pytest.approx(fixed4)
    lemma5_sum = (1 - a * mu / 2) * V + a**2 * (
        2 * (3 + 2 * M) * L * sum(F) / Q + (3 + 2 * M) * B + 3 * s**2
    )
    spread = a**2 * (1 - 1 / Q) * (4 * M * L * sum(F) / Q + 2 * M * B + s**2)
    fixed5 = (
        (1 - a * mu) * V + a * B / mu + spread,
        4 / 3 * (1 - a * mu) ** 2 * V + 4 * a**2 * B + spread,
    )  # at j = 3
    given = x.symbols, V, sum(F) / Q
    assert lemma5.printed(*given) == pytest.approx(lemma5_sum + a * B**2 / mu)
    assert lemma5.corrected(*given, j=3) == pytest.approx(min(fixed5))
    for j in (1, 2, 3, 50):
        by_rate = (1 - a * mu) * V + a * B / mu
        by_count = (1 + 1 / j) * (1 - a * mu) ** 2 * V + (1 + j) * a**2 * B
        assert lemma5.corrected(*given, j) == pytest.approx(min(by_rate, by_count) + spread)
        (c, e), (d, g) = lemma5.factors(a, mu, j)
        assert (c * V + e * B, d * V + g * B) == pytest.approx((by_rate, by_count))
    assert lemma5.corrected(x.symbols, 0.0, sum(F) / Q, 0) == pytest.approx(a**2 * B + spread)
    assert lemmas.equation5(x) == pytest.approx(
        2 * (3 + 2 * M) * L * sum(F) / Q + (3 + 2 * M) * B + 3 * s**2
    )


def test_lemmas_hold_on_random_states():
    for x in random_states(100, 1000):  # not the states of the table
        mu, L, alpha, B, M, sigma, Q = x.symbols
        g = x.f.gradient(x.theta)
        moved = x.theta.mean(0) - alpha * g.mean(0)
        F = x.F.mean()
        for measured, forms in (
            (x.second, (lemmas.lemma1_printed(x), lemmas.lemma1(x))),
            (x.off_mean, (lemmas.lemma2_printed(x), lemmas.lemma2(x))),
            (moved @ moved, (lemmas.lemma3(x),)),
            (x.next_E, (lemmas.lemma4_printed(x), lemmas.lemma4(x))),
            (x.apart, (lemmas.equation5(x),)),
            (x.next_V, (lemma5.corrected(x.symbols, x.V, F, 3),)),
        ):
            for bound in forms:
                assert (bound * ABOVE + ZERO >= measured).all()
        noise = M * ((g + x.b) ** 2).sum(1) + sigma**2
        assert x.second == pytest.approx(((g + x.b) ** 2).sum(1) + noise)
        assert x.pulled == pytest.approx(moved @ moved)


def test_the_ratios_are_those_of_the_forms():
    for x in random_states(3, 50):
        F = x.F.mean()
        assert lemmas.ratios(x) == {
            "Lemma 1": worst(lemmas.lemma1_printed(x), x.second),
            "Lemma 1, corrected": worst(lemmas.lemma1(x), x.second),
            "Lemma 2": worst(lemmas.lemma2_printed(x), x.off_mean),
            "Lemma 2, corrected": worst(lemmas.lemma2(x), x.off_mean),
            "Lemma 3": worst(lemmas.lemma3(x), x.pulled),
            "Lemma 4": worst(lemmas.lemma4_printed(x), x.next_E),
            "Lemma 4, corrected": worst(lemmas.lemma4(x), x.next_E),
            "Equation 5": worst(lemmas.equation5(x), x.apart),
        }
        expected = [worst(lemma5.printed(x.symbols, x.V, F), x.next_V)]
        expected += [worst(lemma5.corrected(x.symbols, x.V, F, 3), x.next_V)]
        assert lemma5.ratios(x) == expected


def test_random_states_repeat_and_reach_their_corners():
    drawn = list(random_states(7, 300))
    again = next(iter(random_states(7, 1)))
    assert (again.theta == drawn[0].theta).all()
    assert {x.symbols[6] for x in drawn} == set(range(1, 9))
    assert sum(x.symbols[3] == 0 for x in drawn) > 10
    for x in drawn:
        mu, L, alpha, B, M, sigma, Q = x.symbols
        assert alpha <= SLACK * largest_steps(L, M, Q)[1] and L <= 1
    M = [x.symbols[4] for x in drawn]
    assert sorted(set(M)) == [0.0, 0.5, 3.0] and {x.symbols[5] for x in drawn} == {0.0, 0.1, 2.0}


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
