"""What people copy runs alone: each piece's source in an empty module with numpy and torch."""

import ast
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.special import lambertw

ROOT = Path(__file__).resolve().parent.parent


def paste(script: str, *names: str) -> SimpleNamespace:
    """These functions and classes of a script, executed where nothing else of ours is."""
    source = (ROOT / script).read_text()
    module = {"np": np, "torch": torch, "math": math}
    found = {}
    for node in ast.parse(source).body:
        if getattr(node, "name", None) in names:
            exec(ast.get_source_segment(source, node), module)
            found[node.name] = module[node.name]
    assert set(found) == set(names)
    return SimpleNamespace(**found)


@pytest.mark.parametrize("script", ["fedavg_curriculum.py", "client_curriculum.py"])
def test_the_sampler_shows_the_easiest_samples_first(script):
    """In a DataLoader: linear from 2 of 10 samples to all in 4 of 8 steps, batches of 2."""
    copied = paste(script, "pacing", "CurriculumBatchSampler")
    difficulty = np.array([9, 8, 7, 6, 5, 4, 3, 2, 1, 0.0])

    def admitted(step):
        return copied.pacing("linear", step, T=8, N=10, a=0.5, b=0.2)

    rng = np.random.default_rng(0)
    sampler = copied.CurriculumBatchSampler(difficulty, 2, 8, admitted, rng)
    loader = torch.utils.data.DataLoader(torch.arange(10), batch_sampler=sampler)
    batches = [batch.tolist() for batch in loader]
    by_hand = [2, 4, 6, 8, 10, 10, 10, 10]
    assert [admitted(step) for step in range(8)] == by_hand
    assert len(batches) == len(sampler) == 8
    assert sorted(batches[0]) == [8, 9]
    for batch, count in zip(batches, by_hand, strict=True):
        assert len(set(batch)) == 2
        assert (difficulty[batch] < count).all()


def test_the_rule_of_critical_periods():
    copied = paste("fedcl_fgn.py", "is_critical", "double", "halve")
    assert copied.is_critical(None, 3.0, delta=0.01)
    assert copied.is_critical(100.0, 101.5, delta=0.01)
    assert not copied.is_critical(100.0, 100.5, delta=0.01)
    assert copied.double(16, M=128) == 32
    assert copied.double(100, M=128) == 128
    assert copied.halve(16, n_0=16) == 8
    assert copied.halve(8, n_0=16) == 8


@pytest.mark.parametrize("kind", ["uint8", "float64", "float32"])
def test_fuzzy_art_parts_dark_images_from_bright_ones(kind):
    """Bytes and floats in [0, 1] alike; a threshold on the mean is the independent answer."""
    copied = paste("fedac_art.py", "fuzzy_art")
    rng = np.random.default_rng(0)
    dark = rng.integers(0, 60, (20, 64))
    bright = rng.integers(190, 256, (20, 64))
    images = rng.permutation(np.concatenate([dark, bright]))
    x = images.astype(np.uint8)
    if kind != "uint8":
        x = (images / 255).astype(kind)
    clusters, w = copied.fuzzy_art(x, rho=0.6)
    assert len(w) == 2
    is_bright = images.mean(1) > 128
    assert len(set(zip(clusters, is_bright, strict=True))) == 2


def test_fuzzy_art_refuses_what_it_would_read_wrongly():
    copied = paste("fedac_art.py", "fuzzy_art")
    with pytest.raises(ValueError, match="0, 1"):
        copied.fuzzy_art(np.full((2, 3), 255.0), rho=0.5)


def test_the_confidence_loss_is_the_papers():
    """Against SciPy's Lambert W, and the slope of the loss by differences."""
    copied = paste("fedcl_gmm_sync.py", "confidence_loss", "confidence", "lambert_w")
    ce = torch.linspace(0, 12, 25, dtype=torch.float64, requires_grad=True)
    tau = 2.0
    lam = 3.0
    b = (ce.detach().numpy() - tau) / lam
    s = np.exp(-lambertw(np.maximum(b, -2 / np.e) / 2).real)
    wanted = (ce.detach().numpy() - tau) * s + lam * np.log(s) ** 2
    loss = copied.confidence_loss(ce, tau, lam)
    np.testing.assert_allclose(loss.detach(), wanted, rtol=1e-9)
    [slope] = torch.autograd.grad(loss.sum(), ce)
    np.testing.assert_allclose(slope, s, rtol=1e-9)


def test_the_mixture_finds_three_groups_of_scores():
    copied = paste("fedcl_gmm_sync.py", "mixture", "draw_scores")
    rng = np.random.default_rng(0)
    groups = [rng.normal(-9, 0.1, 300), rng.normal(0, 0.2, 500), rng.normal(5, 0.3, 200)]
    fit = copied.mixture(np.concatenate(groups), seed=0)
    order = np.argsort(fit[1])
    alpha, mu, variance = np.array(fit)[:, order]
    np.testing.assert_allclose(alpha, [0.3, 0.5, 0.2], atol=1e-6)
    np.testing.assert_allclose(mu, [group.mean() for group in groups], atol=1e-6)
    np.testing.assert_allclose(variance, [group.var() for group in groups], atol=1e-5)
    draws = copied.draw_scores(fit, 20_000, rng)
    assert abs(np.mean(draws < -5) - 0.3) < 0.02
