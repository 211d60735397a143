"""The remarks on SGD and FedProx: sums written out, simulation, every client solved by descent."""

import numpy as np
import pytest
from test_theory_functions import fails

from theory import supplement


def test_sigma_remark():
    """sigma_2 belongs to a step after theta_1, the last that the mean contains."""
    sigma = np.array([0.1, 0.2, 0.3])
    assert supplement.sgd_printed(2, 0.1, sigma) == pytest.approx(10 + 0.1 * 0.14)
    assert supplement.sgd_corrected(2, 0.1, sigma, L=1) == pytest.approx(10 + 0.1 * 0.05 / 2)
    one, average = np.array([1.0]), (0.5 + (0.25 + 0.25) / 2) / 2  # theta_1 = theta_0 / 2 - n / 2
    found = supplement.mean_gap(one, one, 0.5, np.array([1.0, 0.0, 0.0]))
    assert found == pytest.approx(average)


def test_the_gap_of_sgd_is_the_monte_carlo_mean():
    rng = np.random.default_rng(0)
    h, gamma, sigma = np.array([0.5, 1.0]), 0.3, np.array([0.4, 1.2, 0.7, 5.0])
    theta, gaps = np.ones((200000, 2)), []
    for s in sigma[:-1]:
        gaps.append((h * theta**2).sum(1).mean() / 2)
        theta = theta - gamma * (h * theta + s / np.sqrt(2) * rng.standard_normal(theta.shape))
    assert supplement.mean_gap(h, np.ones(2), gamma, sigma) == pytest.approx(
        np.mean(gaps), rel=0.01
    )


def test_the_known_bounds_refuse_what_they_do_not_speak_of():
    for gamma in (0.6, 0.0):
        fails("gamma", supplement.sgd_corrected, 1.0, gamma, np.ones(3), 1.0)
    fails("T >= 1", supplement.sgd_corrected, 1.0, 0.1, np.ones(1), 1.0)
    fails("gamma >= 0", supplement.rho, 1.0, 1.0, 1.0, -0.1)


def f_of(h, c, q):
    """f of the clients, written out."""
    return lambda x: sum(
        q_m * (h_m * (x - c_m) ** 2).sum() / 2 for h_m, c_m, q_m in zip(h, c, q, strict=True)
    )


def test_dissimilarity_is_the_sum_over_clients_and_diverges():
    rng = np.random.default_rng(0)
    for _ in range(30):
        (h, c, weights), theta = supplement.random_clients(rng), 3 * rng.standard_normal(4)
        assert weights.sum() == pytest.approx(1) and ((h >= 0.5) & (h <= 2)).all()
        f, gradients = f_of(h, c, weights), h * (theta - c)
        mean = sum(q * g for q, g in zip(weights, gradients, strict=True))
        Lambda = sum(q * g @ g for q, g in zip(weights, gradients, strict=True)) / (mean @ mean)
        value, slope = supplement.dissimilarity(h, c, weights, theta)
        numeric = [(f(theta + e) - f(theta - e)) / 2e-6 for e in 1e-6 * np.eye(4)]
        assert value == pytest.approx(Lambda) and value >= 1 and slope == pytest.approx(mean)
        assert slope == pytest.approx(numeric, abs=1e-6)
        assert supplement.value(h, c, weights, theta) == pytest.approx(f(theta))
        near = supplement.dissimilarity(h, c, weights, np.full(4, 1e-4))[0]  # theta* = 0
        nearer = supplement.dissimilarity(h, c, weights, np.full(4, 1e-5))[0]
        assert nearer / near == pytest.approx(100, rel=0.01)


def test_proximal_round_solves_every_client():
    rng = np.random.default_rng(0)
    (h, c, q), theta, mu = supplement.random_clients(rng), rng.standard_normal(4), 3.0
    x = np.tile(theta, (8, 1))
    for _ in range(300):
        x = x - 0.15 * (h * (x - c) + mu * (x - theta))
    assert supplement.proximal_round(h, c, q, theta, mu) == pytest.approx(q @ x)


@pytest.mark.parametrize("gamma", [0.0, 0.1, 0.3])
def test_corrected_fedprox_decrease_holds_with_inexact_clients(gamma):
    """Residuals of norm gamma ||grad f_m|| that all point where f rises."""
    rng = np.random.default_rng(0)
    tried, refuted = 0, False
    for _ in range(400):
        (h, c, q), mu = supplement.random_clients(rng), 10 ** rng.uniform(1, 3)
        theta, f = rng.standard_normal(4) * 10 ** rng.uniform(-1, 1), f_of(h, c, q)
        Lambda, slope = supplement.dissimilarity(h, c, q, theta)
        length = gamma * np.linalg.norm(h * (theta - c), axis=1)[:, None]
        residual = length * slope / np.linalg.norm(slope)
        moved = supplement.proximal_round(h, c, q, theta, mu) + q @ (residual / (h + mu))
        rho = supplement.rho(np.sqrt(Lambda), h.max(), mu, gamma)
        decrease = f(theta) - f(moved)
        assert decrease >= rho * slope @ slope - 1e-12
        refuted |= decrease < supplement.rho_printed(mu) * slope @ slope
        tried += rho > 0
    assert tried > 20 and refuted


def test_fedprox_rho_in_numbers():
    assert supplement.rho_printed(10.0) == pytest.approx(0.1)
    assert supplement.rho(2.0, 3.0, 10.0, 0.5) == pytest.approx(0.1 - 0.1 - 0.09 - 3 * 9 / 200)
