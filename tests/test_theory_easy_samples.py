"""The remark on easy samples: derivatives by differences, spectra by loops, the verdict."""

import numpy as np
import pytest

from theory import easy_samples
from theory.beyond.network import hessians, network


def numeric_hessians(theta, X, width):
    """hess f_i by differences of the gradient, which another test checks by differences of f: (n,
    p, p).
    """
    shifts = 1e-5 * np.eye(len(theta))
    rows = [
        (network(theta + e, X, width)[1] - network(theta - e, X, width)[1]) / 2e-5 for e in shifts
    ]
    return np.transpose(rows, (1, 2, 0))


def test_network_derivatives_by_finite_differences():
    rng = np.random.default_rng(0)
    X, theta = rng.standard_normal((6, 3)), rng.standard_normal(2 * 5 + 1)
    shifts = 1e-5 * np.eye(len(theta))
    values = [(network(theta + e, X, 2)[0] - network(theta - e, X, 2)[0]) / 2e-5 for e in shifts]
    f, gradient = network(theta, X, 2)
    W, v = theta[:8].reshape(2, 4), theta[8:10]
    assert f == pytest.approx(np.tanh(X @ W[:, :3].T + W[:, 3]) @ v + theta[10])
    assert np.allclose(gradient, np.transpose(values), atol=1e-8)
    assert np.allclose(hessians(theta, X, 2), numeric_hessians(theta, X, 2), atol=1e-8)


def test_spectra_and_weyl_bounds_by_loops():
    """Every eigenvalue and bound from a Hessian by differences, sample by sample."""
    rng = np.random.default_rng(0)
    for scale in (0.3, 1.0, 3.0):
        X, y = rng.standard_normal((13, 2)), scale * rng.standard_normal(13)
        theta = scale * rng.standard_normal(3 * 4 + 1)
        f, gradient = network(theta, X, 3)
        r, curvature = f - y, numeric_hessians(theta, X, 3)
        ranked = sorted(range(13), key=lambda i: abs(r[i]))
        sets = ranked[:4], ranked, ranked[-4:]
        found = easy_samples.spectra(theta, X, y, 3)
        for S, (eigenvalues, weyl) in zip(sets, found, strict=True):
            GN = sum(np.outer(gradient[i], gradient[i]) for i in S) / len(S)
            H = GN + sum(r[i] * curvature[i] for i in S) / len(S)
            size = sum(abs(r[i]) * np.linalg.norm(curvature[i], 2) for i in S) / len(S)
            assert np.allclose(eigenvalues, np.linalg.eigvalsh(H), atol=1e-6)
            assert weyl == pytest.approx(np.linalg.eigvalsh(GN)[0] - size, rel=1e-6, abs=1e-7)


def test_weyl_is_attained():
    """One unit on one input at theta = (W, c, v, e) = 0: r < 0, grad f = (0, 0, 0, 1)."""
    eigenvalues, weyl = easy_samples.spectra(np.zeros(4), np.ones((3, 1)), np.full(3, 2.0), 1)[1]
    assert (weyl, eigenvalues[0]) == pytest.approx((-2 * np.sqrt(2), -2 * np.sqrt(2)))


def test_training_lowers_the_loss_and_is_gradient_descent():
    rng = np.random.default_rng(3)
    X = rng.standard_normal((90, 2))
    y = network(rng.standard_normal(33), X)[0] + 0.1 * rng.standard_normal(90)
    theta, losses = 0.5 * rng.standard_normal(33), []
    for _ in range(30):
        f, gradient = network(theta, X)
        losses.append(((f - y) ** 2).mean())
        theta = theta - 0.1 * sum((f[i] - y[i]) * gradient[i] for i in range(90)) / 90
    lowest, _ = easy_samples.convexity(30)
    assert losses[-1] < losses[0] / 2
    assert lowest[3] == pytest.approx(
        [values[0] for values, _ in easy_samples.spectra(theta, X, y)], rel=1e-6
    )


def test_a_harder_sample_can_be_more_convex():
    def loss(theta, c):
        return (theta**2 + c) ** 2 / 2

    for theta, c in ((0.0, 1.0), (0.7, 1.0), (0.7, 5.0)):
        numeric = (loss(theta + 1e-4, c) - 2 * loss(theta, c) + loss(theta - 1e-4, c)) / 1e-8
        assert numeric == pytest.approx(6 * theta**2 + 2 * c, rel=1e-4)


@pytest.mark.parametrize(
    ("easy", "late", "label"),
    [(1.0, -1.0, "partly"), (-1.0, -1.0, "violated"), (1.0, 1.0, "partly")],
)
def test_the_verdict_on_easy_samples_follows_the_networks(easy, late, label, monkeypatch):
    """lambda_min of all samples is 0 in 20 networks, of easy ones `easy` at the start and `late`
    after training.
    """
    fake = {0: np.tile([easy, 0.0, -2.0], (20, 1)), 1000: np.tile([late, 0.0, -2.0], (20, 1))}
    monkeypatch.setattr(easy_samples, "convexity", lambda steps: (fake[steps], True))
    (row,) = easy_samples.check()
    assert (
        row["printed"] == label and f"step 0 easy > all {20 if easy > 0 else 0}/20" in row["note"]
    )
