"""What people copy runs alone: each piece's source in an empty module with numpy and torch."""

import ast
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.special import lambertw
from scipy.stats import kstest
from sklearn.preprocessing import StandardScaler

ROOT = Path(__file__).resolve().parent.parent


def paste(script: str, *names: str) -> SimpleNamespace:
    """These functions, classes and constants, executed where nothing else of ours is."""
    source = (ROOT / script).read_text()
    module = {"np": np, "torch": torch, "math": math}
    for node in ast.parse(source).body:
        name = getattr(node, "name", None)
        if isinstance(node, ast.Assign):
            name = ast.unparse(node.targets[0])
        if name in names:
            exec(ast.get_source_segment(source, node), module)
    return SimpleNamespace(**{name: module[name] for name in names})


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


@pytest.mark.parametrize("script", ["fedavg_curriculum.py", "client_curriculum.py"])
def test_the_sampler_and_its_pacing_refuse_what_they_cannot_do(script):
    copied = paste(script, "pacing", "CurriculumBatchSampler")
    for difficulty, batch_size in (([], 2), ([0.1, 0.2], 0)):
        with pytest.raises(ValueError, match="at least one sample"):
            copied.CurriculumBatchSampler(difficulty, batch_size, 3, lambda step: 2, 0)
    for count in (0, 0.5, float("nan")):  # a fraction of the samples is not their number
        sampler = copied.CurriculumBatchSampler([0.1, 0.2], 1, 3, lambda step, g=count: g, 0)
        with pytest.raises(ValueError, match="wanted a whole number of samples"):
            next(iter(sampler))
    with pytest.raises(ValueError, match="cubic: choose linear"):
        copied.pacing("cubic", 0, 8, 10, 0.5, 0.2)


def test_a_seed_stands_for_its_generator():
    copied = paste("fedavg_curriculum.py", "CurriculumBatchSampler")
    samplers = []
    for rng in (7, np.random.default_rng(7)):
        samplers.append(copied.CurriculumBatchSampler(np.arange(9), 2, 6, lambda step: 9, rng))
    batches, wanted = map(list, samplers)
    assert batches == wanted


def test_an_unknown_score_is_refused():
    copied = paste("fedavg_curriculum.py", "difficulty_by")
    with pytest.raises(ValueError, match="loss: choose G"):
        copied.difficulty_by("loss", *np.zeros((5, 2)))


def test_the_queue_takes_every_client_of_each_pool_and_none_twice_in_a_round():
    """K = 3 of 7 clients a round; the pools are easy clients first, by sorting."""
    copied = paste("client_curriculum.py", "fill_queue", "sort_clients")
    L = np.array([0.6, 0.1, 0.5, 0.3, 0.2, 0.4, 0.0])
    ranked = copied.sort_clients(L, np.random.default_rng(0))
    assert ranked.tolist() == [6, 1, 4, 3, 5, 2, 0]
    queue = []
    turns = []
    for size in (4, 5, 7):
        while len(queue) >= 3:
            turns.append(queue[:3])
            queue = queue[3:]
        left = list(queue)
        queue = copied.fill_queue(queue, ranked[:size])
        assert queue[: len(left)] == left
        assert sorted(queue) == sorted(left + ranked[:size].tolist())
    assert [len(set(clients)) for clients in turns] == [3] * len(turns) != []
    assert copied.fill_queue([1, 6], np.array([6, 4, 1, 3])) == [1, 6, 4, 3, 6, 1]


def test_algorithm_2_gives_the_first_client_the_easiest_samples():
    copied = paste("client_curriculum.py", "reconstitute")
    shards = [np.array([0, 5, 6]), np.array([1, 2, 3, 4])]
    labels = np.array([0, 0, 0, 1, 1, 1, 1])
    losses = np.array([0.9, 0.1, 0.5, 0.2, 0.8, 0.3, 0.7])
    parts = copied.reconstitute(shards, labels, losses, 1.0, np.random.default_rng(0))
    assert [part.tolist() for part in parts] == [[1, 3, 5], [0, 2, 4, 6]]
    for bad in (np.full(7, np.nan), 1.5):
        f_ord = bad if np.isscalar(bad) else 1.0
        of_samples = losses if np.isscalar(bad) else bad
        with pytest.raises(ValueError, match="reconstitute"):
            copied.reconstitute(shards, labels, of_samples, f_ord, np.random.default_rng(0))


def test_the_rule_of_critical_periods():
    copied = paste("fedcl_fgn.py", "is_critical", "double", "halve")
    for previous, fgn, delta in ((1.0, np.nan, 0), (np.inf, 1.0, 0), (None, np.nan, 0)):
        with pytest.raises(ValueError, match="give finite numbers"):
            copied.is_critical(previous, fgn, delta)
    with pytest.raises(ValueError, match="delta nan"):
        copied.is_critical(1.0, 2.0, np.nan)
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


def test_one_client_can_weigh_its_samples():
    """18 dark and 6 bright images of one label: the bright ones are the small cluster."""
    copied = paste("fedac_art.py", "cluster_client", "fuzzy_art", "small_clusters", "weigh_samples")
    rng = np.random.default_rng(0)
    is_bright = rng.permutation(np.arange(24) < 6)
    x = rng.uniform(0, 0.2, (24, 64)) + 0.8 * is_bright[:, None]
    clusters = copied.cluster_client(x, np.zeros(24, dtype=int), rng, rho=0.6)
    in_P1 = copied.small_clusters(clusters, quantile=0.5)
    assert np.array_equal(in_P1, is_bright)
    weights = copied.weigh_samples(in_P1, w_small=0.5, w_large=1.0)
    assert weights.mean() == pytest.approx(1)
    np.testing.assert_allclose(weights[~is_bright], 2 * weights[is_bright][0])


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


def test_a_phase_ends_when_its_clients_have_passed_or_its_time_is_over():
    copied = paste("fedcl_gmm_sync.py", "quantile", "end_of_phase")
    pool = [0.5, 1.5, 2.5, 3.5, 4.5]
    assert [copied.quantile(pool, T) for T in (0.2, 0.21, 0.6, 1.0)] == [0.5, 1.5, 2.5, 4.5]
    assert copied.end_of_phase(frozen=8, M=10, quorum=0.8, rounds_taken=1, limit=9) == "natural"
    assert copied.end_of_phase(frozen=7, M=10, quorum=0.8, rounds_taken=9, limit=9) == "forced"
    assert copied.end_of_phase(frozen=7, M=10, quorum=0.8, rounds_taken=8, limit=9) == ""


def test_the_generators_input_is_noise_a_label_and_a_score():
    copied = paste("fedcl_gmm_sync.py", "sample_conditions", "NOISE")
    counts = np.array([30, 0, 10])
    pool = np.array([-4.0, -1.0, 0.0, 7.0])
    shape = (300, 40)
    draws = []
    for scores in (pool, np.array([])):
        rngs = map(np.random.default_rng, (1, 2, 3))
        draws.append(copied.sample_conditions(counts, scores, shape, *rngs))
    (y, x), (same_y, without_score) = draws
    assert y.shape == shape
    np.testing.assert_allclose(np.bincount(y.flat) / y.size, [0.75, 0, 0.25], atol=0.02)
    noise, one_hot, score = np.split(x, [copied.NOISE, copied.NOISE + 3], axis=-1)
    assert kstest(noise.flat, "norm").pvalue > 0.01
    np.testing.assert_array_equal(one_hot, y[..., None] == np.arange(3))
    values, times = np.unique(score, return_counts=True)
    np.testing.assert_allclose(values, StandardScaler().fit_transform(pool[:, None])[:, 0])
    np.testing.assert_allclose(times / y.size, 0.25, atol=0.02)
    np.testing.assert_array_equal(same_y, y)
    np.testing.assert_array_equal(without_score, x[..., :-1])


def test_similarity_by_loops_over_pairs():
    """It is 1 where the generator ignores its noise."""
    copied = paste("fedcl_gmm_sync.py", "similarity")
    z = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    epsilon = torch.arange(20.0).double().view(5, 4).sin()
    total = 0.0
    for i in range(5):
        for j in range(5):
            d_z = sum(abs(float(a - b)) for a, b in zip(z[i], z[j], strict=True)) / 3
            d_epsilon = sum(float(a - b) ** 2 for a, b in zip(epsilon[i], epsilon[j], strict=True))
            total += d_z * d_epsilon / 4
    assert float(copied.similarity(z, epsilon)) == pytest.approx(math.exp(-total / 25))
    assert copied.similarity(torch.ones(5, 3), epsilon) == 1
