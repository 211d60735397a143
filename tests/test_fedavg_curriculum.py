"""fedavg_curriculum.py against Table 5 in exact arithmetic and a slow literal Algorithm 1 on ordinary torch nets."""

import csv
import dataclasses
import functools
import importlib
import os
import signal
import subprocess
import sys
import time
from decimal import Decimal, getcontext
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import common
import experiment
import fedavg_curriculum as script

ROOT = Path(script.__file__).parent
ORDERS, FAMILIES = ("curriculum", "anti", "random", "vanilla"), ("linear", "quadratic", "root", "step", "exponential")
EXTRA = ("random-step", "shuffled", "weighted", "fixed", "balanced", "threshold", "hard-threshold")
getcontext().prec = 50

# -------------------------------------------------------------------------------------------------------------- pacing

TABLE = {  # N = T = 500, a = .8, b = .2 at t = 0, 100, 200, 300, 399, 400
    "linear": [100, 200, 300, 400, 499, 500],
    "quadratic": [100, 125, 200, 325, 498, 500],
    "root": [100, 300, 382, 446, 499, 500],
    "step": [100, 100, 100, 100, 100, 500],
    "exponential": [100, 100, 102, 132, 490, 500],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_pacing_table(family):
    t = np.array([0, 100, 200, 300, 399, 400])
    assert script.pacing(family, t, 500, 500, 0.8, 0.2).tolist() == TABLE[family]


def exact(family, t, T, N, a, b):
    """g(t) before the floor, to 50 digits; a and b are decimals."""
    x = min(Decimal(t) / (a * T), Decimal(1))
    share = {
        "linear": x,
        "quadratic": x * x,
        "root": x.sqrt(),
        "step": Decimal(int(x == 1)),
        "exponential": ((10 * x).exp() - 1) / (Decimal(10).exp() - 1),
    }[family]
    return N * b + N * (1 - b) * share


def test_pacing_in_exact_arithmetic():
    """500 random (a, b, N, T), every step: the value, its ends, its range and that it never falls."""
    draw = np.random.default_rng(0)
    for case in range(500):
        family, T, N = FAMILIES[case % 5], int(draw.integers(1, 21)), int(draw.integers(1, 200))
        a, b = Decimal(int(draw.integers(1, 150))) / 100, Decimal(int(draw.integers(0, 100))) / 100
        g = script.pacing(family, np.arange(T + 5), T, N, float(a), float(b))
        wanted = [max(1, int(exact(family, t, T, N, a, b))) for t in range(T + 5)]
        assert g.tolist() == wanted, (family, T, N, a, b)
        assert g[0] == max(1, int(N * b)) and g.min() >= 1 and g.max() <= N
        assert (np.diff(g) >= 0).all() and all(g[t] == N for t in range(T + 5) if t >= a * T)


@pytest.mark.parametrize("family", FAMILIES)
def test_pacing_admits_all_where_a_is_0_or_b_is_1(family):
    t = np.arange(30)
    for a, b in ((0, 0.2), (0, 0), (0.8, 1), (1e6, 1.0)):
        assert (script.pacing(family, t, 30, 17, a, b) == 17).all()


def test_pacing_keeps_its_promise_at_a_times_t():
    """In doubles .55 * 100 is above 55: the step must not come a step late."""
    for family in FAMILIES:
        for a, T in ((0.55, 100), (0.28, 25), (0.28, 50), (0.07, 100), (0.29, 100)):
            assert script.pacing(family, np.array([round(a * T)]), T, 50, a, 0.2) == 50


# --------------------------------------------------------------------------------------------------- sorting and batches


def rng(seed=0):
    return np.random.default_rng(seed)


def ordered(shard, keys, order, draw, y=None):
    return shard[script.sort(order, keys, np.zeros(len(shard), int) if y is None else y, draw)]


def test_sort_directions():
    shard, keys = np.array([10, 20, 30, 40]), np.array([0.3, 0.1, 0.9, 0.5])
    for order in ("curriculum", "threshold", "balanced"):  # of one class
        assert ordered(shard, keys, order, rng()).tolist() == [20, 10, 40, 30]
    for order in ("anti", "hard-threshold"):
        assert ordered(shard, keys, order, rng()).tolist() == [30, 40, 10, 20]


def test_curriculum_reversed_is_anti_without_ties():
    shard, keys = rng(1).permutation(200), rng(2).random(200)
    for seed in range(5):
        easy, hard = (ordered(shard, keys, order, rng(seed)) for order in ("curriculum", "anti"))
        assert np.array_equal(easy[::-1], hard) and np.array_equal(easy, shard[np.argsort(keys)])


@pytest.mark.parametrize("order", ["curriculum", "anti", "random", "vanilla"])
def test_ties_are_broken_by_seed_alone(order):
    """With one wrong sample among 20 the other 19 are equally likely at any place: not by index, not by label."""
    shard, keys = np.arange(20), np.arange(20) == 7
    first = np.zeros(20)
    for seed in range(2000):
        first[ordered(shard, keys, order, rng(seed))[:10]] += 1
    others = np.delete(first, 7)
    expected = {"curriculum": 2000 * 10 / 19, "anti": 2000 * 9 / 19}.get(order, 1000)
    assert np.abs(others - expected).max() < 5 * np.sqrt(500)
    assert first[7] == {"curriculum": 0, "anti": 2000}.get(order, first[7])
    assert np.array_equal(ordered(shard, keys, order, rng(3)), ordered(shard, keys, order, rng(3)))


@pytest.mark.parametrize("order", ["random", "vanilla", "fixed", "random-step"])
def test_random_orders_ignore_the_keys(order):
    shard = np.arange(30)
    shown = [ordered(shard, keys, order, rng(4)).tolist() for keys in (None, np.arange(30.0), -np.arange(30.0))]
    assert shown[0] == shown[1] == shown[2] and sorted(shown[0]) == shard.tolist() and shown[0] != shard.tolist()


def test_every_balanced_prefix_holds_the_easiest_fraction_of_each_class():
    y, keys = np.repeat([0, 3, 7], [40, 20, 10])[rng(1).permutation(70)], rng(2).random(70)
    places = script.sort("balanced", keys, y, rng(3))
    assert sorted(places) == list(range(70))
    for n in range(1, 71):
        for c, held in ((0, 40), (3, 20), (7, 10)):
            own = places[:n][y[places[:n]] == c]
            assert abs(len(own) - n * held / 70) <= 1
            assert np.array_equal(own, np.flatnonzero(y == c)[np.argsort(keys[y == c])][: len(own)])


@pytest.mark.parametrize("refresh", ["pass", "step"])
def test_every_batch_is_full_and_by_pass_a_prefix_is_used_up_first(refresh):
    draw = rng(5)
    for _ in range(200):
        n, T, B = int(draw.integers(1, 40)), int(draw.integers(1, 40)), int(draw.integers(1, 12))
        sorted_samples, g = draw.permutation(1000)[:n], np.sort(draw.integers(1, n + 1, T))
        batches = script.paced_batches(sorted_samples, g, B, refresh, rng(int(draw.integers(99))))
        width, seen = min(B, n), []
        assert batches.shape == (T, B) and (batches[:, width:] == -1).all() and (batches[:, :width] >= 0).all()
        for t, row in enumerate(batches[:, :width].tolist()):
            seen = [] if refresh == "step" else seen
            for sample in row:
                seen = prefix = seen or sorted_samples[: g[t]].tolist()
                assert sample in prefix
                seen = [other for other in prefix if other != sample]


def test_first_batches_are_uniform_over_the_prefix():
    counts = np.zeros(30)
    for seed in range(2000):
        counts[script.paced_batches(np.arange(30)[::-1], np.array([20]), 5, "pass", rng(seed))[0]] += 1
    assert (counts[:10] == 0).all() and np.abs(counts[10:] - 500).max() < 5 * np.sqrt(500 * 0.75)


def small(**flags):
    """A configuration on 60 made-up images; what is not given keeps the script's default."""
    base = {"clients": 5, "clients_per_round": 3, "rounds": 3, "epochs": 2, "batch_size": 4, "trials": 1, "threads": 1}
    base |= {"device": "cpu", "dtype": "float64", "alpha": 1.0, "min_size": 3, "lr": 0.02, "order": "curriculum"}
    return script.Config(**{**base, **flags})


def made(config, order, n=23, seed=1, t=2, m=3, keys=None, y=None):
    """The schedule of one client with n samples 100, 101, ...: its batches."""
    shard, keys = np.arange(100, 100 + n), rng(seed).random(n) if keys is None else keys
    y = np.arange(n) % 3 if y is None else y
    return script.schedule(dataclasses.replace(config, order=order), shard, keys, y, common.Streams(1), t, m)[0]


@pytest.mark.parametrize("refresh", ["pass", "step"])
@pytest.mark.parametrize("scope", ["round", "global"])
def test_every_order_takes_as_many_steps_and_samples(refresh, scope):
    config = small(pacing_scope=scope, refresh=refresh)
    for n in (1, 3, 4, 5, 23):
        for order in ORDERS + EXTRA:
            batches = made(config, order, n)
            assert batches.shape == (2 * -(-n // 4), 4)  # E ceil(N/B)
            assert ((batches >= 0).sum(1) == min(4, n)).all() and batches.max() < 100 + n


@pytest.mark.parametrize("flags", [{"pacing_b": 1.0}, {"pacing_a": 0.0}])
@pytest.mark.parametrize("refresh", ["pass", "step"])
@pytest.mark.parametrize("scope", ["round", "global"])
def test_without_pacing_all_orders_are_one_schedule(flags, refresh, scope):
    config = small(pacing_scope=scope, refresh=refresh, **flags)
    schedules = [made(config, order) for order in (*ORDERS, "fixed", "balanced", "threshold", "hard-threshold")]
    assert all(np.array_equal(schedules[0], other) for other in schedules[1 : 7 if "pacing_a" in flags else None])


def test_vanilla_passes_over_the_whole_shard_again_and_again():
    batches = made(small(epochs=7), "vanilla")  # 23 samples in batches of 4: 42 steps hold 7 passes and 7 samples of the next
    passes = batches.ravel()[: 7 * 23].reshape(7, 23)
    assert batches.shape == (42, 4) and all(np.array_equal(np.sort(each), np.arange(100, 123)) for each in passes)
    assert len({tuple(each) for each in passes.tolist()}) == 7


def test_curriculum_admits_the_easy_and_anti_the_hard():
    keys = rng(0).random(50)
    rank = np.argsort(np.argsort(keys))
    config = small(epochs=4, batch_size=5, refresh="step", pacing_a=0.8, pacing_b=0.2)
    for order, place in (("curriculum", rank), ("anti", 49 - rank)):
        batches = made(config, order, 50, keys=keys)
        for t, row in enumerate(batches):  # T = 40, so g grows from 10 to 50 over 32 steps
            assert place[row - 100].max() < 10 + 40 * min(t / 32, 1)
    assert place[batches[0] - 100].max() >= 5  # drawn from all of the prefix, not from its head


def test_global_scope_paces_across_the_rounds():
    """Round t goes on where round t - 1 stopped: the concatenated prefix sizes are one pacing function of rounds * T."""
    config = small(rounds=5, epochs=2, batch_size=10, refresh="step", pacing_scope="global", pacing_a=0.6, pacing_b=0.1)
    keys, T = np.arange(100.0), 20
    seen = [row.max() - 100 for t in range(5) for row in made(config, "curriculum", 100, t=t, m=0, keys=keys)]
    wanted = [min(100, 10 + 90 * min(i / (0.6 * 5 * T), 1)) for i in range(5 * T)]
    assert all(s < w for s, w in zip(seen, wanted, strict=True)) and max(seen[:5]) < 18 and min(seen[-40:]) > 50
    by_round = dataclasses.replace(config, pacing_scope="round")
    assert made(by_round, "curriculum", 100, t=4, m=0, keys=keys)[0].max() < 110  # the other scope starts afresh


@pytest.mark.parametrize("rounds", [2, 5])
@pytest.mark.parametrize("order", ["curriculum", "threshold"])
def test_global_pacing_ends_exactly_at_a_times_all_steps(order, rounds):
    """With a = 1 / 2 all samples are in from half of all steps on, not one step later; b = 0 begins with a single sample."""
    config = small(rounds=rounds, epochs=4, batch_size=1, refresh="step", pacing_scope="global", pacing_a=0.5, pacing_b=0.0)
    config = dataclasses.replace(config, pacing="step", order=order)
    T, g = 4 * 12, []
    for t in range(rounds):
        steps = t * T + np.arange(T)
        keys = np.arange(12.0)
        g += script.admitted(config, keys, steps, rounds * T, 12).tolist()
    half = rounds * T // 2
    assert g[half] == 12 and g[half - 1] == (1 if order == "curriculum" else 11) and g[0] == 1 and g == sorted(g)
    drawn = np.concatenate([made(config, order, 12, t=t, m=0, keys=np.arange(12.0)) for t in range(rounds)])[:, 0] - 100
    assert (drawn < g).all() and (order == "threshold" or (drawn[:half] == 0).all()) and drawn[half:].max() > 8


def test_the_streams_of_a_client_do_not_depend_on_who_else_takes_part():
    config = small()
    for order in ORDERS + EXTRA:
        one = made(config, order)
        assert np.array_equal(one, made(config, order))
        assert not np.array_equal(one, made(config, order, t=2, m=4)) and not np.array_equal(one, made(config, order, t=1, m=3))


# ------------------------------------------------------------------------------------- controls and rivals, as schedules


def test_shuffled_is_the_curriculum_at_other_times():
    config, keys = small(epochs=10), np.arange(40.0)
    easy, late = made(config, "curriculum", 40, keys=keys), made(config, "shuffled", 40, keys=keys)
    assert sorted(map(tuple, easy.tolist())) == sorted(map(tuple, late.tolist())) and not np.array_equal(easy, late)
    other = made(config, "shuffled", 40, keys=keys, t=3)
    assert not np.array_equal(np.argsort(late[:, 0]), np.argsort(other[:, 0]))


@pytest.mark.parametrize("refresh", ["pass", "step"])
def test_weighted_has_the_exposure_of_the_curriculum_and_the_batches_of_vanilla(refresh):
    config, shard, keys = small(epochs=10, refresh=refresh, order="weighted"), np.arange(100, 140), np.arange(40.0)
    batches, weights = script.schedule(config, shard, keys, np.zeros(40, int), common.Streams(1), 2, 3)
    assert np.array_equal(batches, made(config, "vanilla", 40, keys=keys))
    visits = np.bincount(made(config, "curriculum", 40, keys=keys).ravel(), minlength=140)[100:]
    assert visits.sum() == 400 and visits[:8].mean() > 2 * visits[-8:].mean()
    assert np.allclose(weights, visits[batches - 100] / 10)  # 10 visits each are what vanilla pays: mean weight 1
    if refresh == "pass":  # vanilla's ten passes visit every sample ten times
        assert np.allclose(np.bincount(batches.ravel(), weights.ravel(), minlength=140)[100:], visits)
    others = script.schedule(
        dataclasses.replace(config, order="shuffled"), shard, keys, np.zeros(40, int), common.Streams(1), 2, 3
    )
    assert (others[1] == 1).all() and others[1].shape == others[0].shape


def test_weights_of_a_client_poorer_than_a_batch():
    config = small(order="weighted", pacing_b=0.4, refresh="step", epochs=5)
    batches, weights = script.schedule(config, np.arange(100, 103), np.arange(3.0), np.zeros(3, int), common.Streams(1), 0, 0)
    real = batches >= 0
    assert (real.sum(1) == 3).all() and weights[real].sum() == pytest.approx(15) and weights[real][0] != 1


def test_fixed_keeps_one_order_over_all_rounds():
    config = small(epochs=4, batch_size=5, refresh="step", pacing_b=0.2, pacing_a=0.8)
    first = [set(made(config, "fixed", 50, t=t)[0]) | set(made(config, "fixed", 50, t=t)[1]) for t in range(20)]
    assert len(set.union(*first)) <= 11  # g is 10 and 11 at these steps, in every round the same samples
    assert len(set.union(*(set(made(config, "random", 50, t=t)[0]) for t in range(20)))) > 25
    assert set.union(*first) != set.union(*(set(made(config, "fixed", 50, t=t, m=4)[0]) for t in range(20)))


def test_random_step_draws_from_all_at_each_step():
    config = small(epochs=20, batch_size=5, pacing_b=0.02)
    batches = made(config, "random-step", 50)
    assert all(len(set(row)) == 5 for row in batches.tolist()) and len(np.unique(batches[:40])) == 50
    assert len(np.unique(batches[:10])) < 50  # not a pass: 10 batches of 5 would be all


@pytest.mark.parametrize("order", ["threshold", "hard-threshold"])
def test_thresholds_by_a_loop(order):
    """lambda moves linearly between two losses; a sample is admitted by comparing its own loss."""
    config = small(pacing_a=0.75, pacing_b=0.3, order=order)
    for seed in range(5):
        losses = rng(seed).exponential(size=20)
        signed = losses if order == "threshold" else -losses
        keys = losses[np.argsort(signed)]
        low, high = (sorted(losses)[5], max(losses)) if order == "threshold" else (min(losses), sorted(losses)[-6])
        for step in range(40):
            x = min(step / 30, 1)
            wanted = low + (high - low) * x
            count = (
                sum(v <= wanted + 1e-12 for v in losses) if order == "threshold" else sum(v >= wanted - 1e-12 for v in losses)
            )
            assert script.admitted(config, keys, np.array([step]), 40, 20).tolist() == [count]
        ends = script.admitted(config, keys, np.array([0, 39]), 40, 20).tolist()
        assert ends == ([6, 20] if order == "threshold" else [20, 6])


@pytest.mark.parametrize("order", ["threshold", "hard-threshold"])
def test_a_threshold_arrives_at_a_times_t(order):
    """In doubles .55 * 100 is above 55: the last sample must not come a step late."""
    losses = np.sort(rng(0).exponential(size=50))
    keys = losses if order == "threshold" else losses[::-1]
    for a, T in ((0.55, 100), (0.28, 25), (0.28, 50), (0.07, 100), (0.29, 100)):
        g = script.admitted(small(pacing_a=a, order=order), keys, np.array([round(a * T) - 1, round(a * T)]), T, 50)
        assert g[1] == (50 if order == "threshold" else 10) and (g[0] < 50 or order == "hard-threshold")


def test_thresholds_with_ties_and_degenerate_paces():
    for order in ("threshold", "hard-threshold"):
        flat = np.zeros(7)
        assert (script.admitted(small(order=order), flat, np.arange(9), 9, 7) == 7).all()
        for a, b in ((0.0, 0.2), (0.8, 0.0), (0.8, 1.0), (1e6, 0.5)):
            keys = np.array([0.0, 0, 0, 1, 1, 2]) if order == "threshold" else np.array([2.0, 1, 1, 0, 0, 0])
            g = script.admitted(small(pacing_a=a, pacing_b=b, order=order), keys, np.arange(9), 9, 6)
            assert g.min() >= 1 and g.max() <= 6


# ------------------------------------------------------------------------------------------------ the sampler for others


class Samples(torch.utils.data.Dataset):
    """Somebody else's data set: sample i is its own index and label."""

    def __init__(self, y):
        self.y = y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return i, int(self.y[i])


@pytest.mark.parametrize("order", ORDERS + EXTRA)
def test_the_sampler_in_a_plain_dataloader_yields_the_index_schedule(order):
    y, keys = rng(1).integers(0, 3, 23), rng(2).random(23)
    flags = {"batch_size": 4, "epochs": 3, "pacing": "root", "pacing_b": 0.3, "refresh": "step", "seed": 5}
    sampler = script.CurriculumBatchSampler(y, keys, 2, 7, order, **flags)
    loader = torch.utils.data.DataLoader(Samples(y), batch_sampler=sampler)
    config = script.Config(order=order, **flags)
    batches, weights = script.schedule(config, np.arange(23), keys, y, common.Streams(5), 2, 7)
    for _ in range(2):  # it can be gone through again
        shown = list(loader)
        assert len(shown) == len(loader) == len(sampler) == 18
        assert [x.tolist() for x, _ in shown] == batches.tolist() and [c.tolist() for _, c in shown] == y[batches].tolist()
    assert np.array_equal(sampler.weights, weights)


def test_the_sampler_leaves_out_padding_and_wants_no_keys_for_a_random_order():
    batches = list(script.CurriculumBatchSampler([0, 1, 1], batch_size=10, epochs=2, order="vanilla"))
    assert [sorted(batch) for batch in batches] == [[0, 1, 2]] * 2
    again = [list(script.CurriculumBatchSampler(np.zeros(40), None, t, order="vanilla")) for t in (0, 1)]
    assert again[0] != again[1]


@pytest.mark.parametrize("keys", [None, [1.0], [1.0, np.nan], [[1.0, 2.0]]])
def test_the_sampler_wants_a_finite_key_for_each_sample(keys):
    with pytest.raises(ValueError, match="^order 'anti': wanted a finite key for each of 2 samples"):
        script.CurriculumBatchSampler([0, 1], keys, order="anti")


def test_the_sampler_wants_an_order_that_is():
    with pytest.raises(ValueError, match="^order: 'easy' is not one of curriculum, "):
        script.CurriculumBatchSampler([0, 1], [1.0, 2.0], order="easy")
    assert len(script.CurriculumBatchSampler([0, 1], [True, False], order="hard-threshold", epochs=3)) == 3


@pytest.mark.parametrize(
    "flags",
    [
        {"pacing_scope": "epoch"},
        {"refresh": "never"},
        {"pacing": "cubic"},
        {"pacing_a": -1.0},
        {"pacing_a": float("nan")},
        {"pacing_b": 2.0},
        {"epochs": 0},
        {"batch_size": 0},
        {"batch_size": 2.5},
        {"passes": 3},
    ],
)
def test_the_sampler_wants_flags_that_the_command_line_takes(flags):
    with pytest.raises(ValueError, match=f"^{[*flags][0]}: "):
        script.CurriculumBatchSampler([0, 1], [1.0, 2.0], **flags)


# ----------------------------------------------------------------------------------------------- an independent Algorithm 1


def made_up(n=60, seed=0):
    """16x16 images of 4 classes, each class a pattern of its own under noise: x_train, y_train, x_test, y_test."""
    draw = np.random.default_rng(seed)
    y = np.arange(2 * n) % 4
    pattern = draw.integers(0, 256, (4, 16, 16, 1))
    x = (0.3 * pattern[y] + 0.7 * draw.integers(0, 256, (2 * n, 16, 16, 1))).astype(np.uint8)
    return x[:n], y[:n], x[n:], y[n:]


@pytest.fixture(scope="session")
def data_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "made_up.npz"
    np.savez(path, **dict(zip(("x_train", "y_train", "x_test", "y_test"), made_up(), strict=True)))
    return path


def arrays():
    """The made-up data as a net reads it, without the project: x (n, 1, 16, 16) float64 normalised, y, and the test set."""
    x, y, x_test, y_test = made_up()
    mean, std = x.astype(float).mean(), x.astype(float).std()
    pixels = [torch.from_numpy((part.astype(float) - mean) / std).permute(0, 3, 1, 2) for part in (x, x_test)]
    return pixels[0], torch.from_numpy(y), pixels[1], torch.from_numpy(y_test)


def lenet():
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(16, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 4)),
    ).double()


class Dropped(nn.Module):
    """Somebody's net with dropout, so that --model FILE.py:Dropped and the dropout's seeds are run too."""

    def __init__(self, channels, side, classes):
        super().__init__()
        self.hidden, self.out = nn.Linear(channels * side * side, 12), nn.Linear(12, classes)

    def forward(self, x):
        return self.out(F.dropout(torch.relu(self.hidden(x.flatten(1))), 0.5, self.training))


def poured(theta, own_net=False):
    net = Dropped(1, 16, 4).double() if own_net else lenet()
    nn.utils.vector_to_parameters(theta.clone(), net.parameters())
    return net


def judged(net, x, y):
    """Loss and predicted class of every sample, one sample at a time."""
    with torch.no_grad():
        logits = [net.eval()(x[i : i + 1]) for i in range(len(x))]
    return [F.cross_entropy(z, y[i : i + 1]).item() for i, z in enumerate(logits)], [int(z.argmax()) for z in logits]


def margin_of(logits, labels, losses):
    """--score test_fedavg_curriculum:margin_of: the right class's lead over the best wrong one, small where it is hard."""
    return [
        -(z[c] - max(z[k] for k in range(len(z)) if k != c)) + 0 * loss
        for z, c, loss in zip(logits, labels, losses, strict=True)
    ]


def literal_keys(config, theta, own, expert, x, y):
    """The scores of Section 3.1, row by row; `own` is None before a client's first round."""
    net = functools.partial(poured, own_net=config.model != "lenet5")
    G, guess_G = judged(net(expert if config.score == "E" else theta), x, y)
    L, guess_L = judged(net(own), x, y) if own is not None else (G, guess_G)
    y, each = y.tolist(), range(len(y))
    if config.score == "test_fedavg_curriculum:margin_of":
        with torch.no_grad():
            return margin_of(net(theta).eval()(x).tolist(), y, G)
    return {
        "G": G,
        "E": G,
        "L": L,
        "LG": [(G[i] + L[i]) / 2 for i in each],
        "G_pred": [float(guess_G[i] != y[i]) for i in each],
        "L_pred": [float(guess_L[i] != y[i]) for i in each],
        "LG_pred": [
            float(guess_L[i] != guess_G[i])
            if config.lg_pred == "disagree"
            else float(guess_G[i] != y[i]) + (guess_L[i] != y[i])
            for i in each
        ],
    }[config.score]


def literal_order(order, shuffled, keys, labels):
    """Positions of the samples in the order in which they are admitted; Python's sort keeps ties as they were shuffled."""
    if order in ("random", "vanilla", "random-step", "fixed"):
        return shuffled
    if order in ("anti", "hard-threshold"):
        return sorted(shuffled, key=lambda i: -keys[i])
    easy = sorted(shuffled, key=lambda i: keys[i])
    if order != "balanced":
        return easy
    rank = {}
    for c in set(labels):
        own = [i for i in easy if labels[i] == c]
        rank.update({i: (place + 0.5) / len(own) for place, i in enumerate(own)})
    return sorted(easy, key=lambda i: rank[i])


def literal_admitted(config, order, places, keys, step, steps):
    """The samples that may be drawn at this step: a prefix, or those on one side of lambda."""
    N, a, b = len(places), Decimal(str(config.pacing_a)), Decimal(str(config.pacing_b))
    if order in ("vanilla", "random-step"):
        return places
    if order in ("threshold", "hard-threshold"):
        x, rank = min(Decimal(step) / (a * steps), Decimal(1)), max(1, int(N * b)) - 1
        values = sorted(keys[i] for i in places)
        start, end = (values[rank], values[-1]) if order == "threshold" else (values[0], values[-1 - rank])
        limit = start + (end - start) * float(x)
        return [i for i in places if (keys[i] <= limit + 1e-12 if order == "threshold" else keys[i] >= limit - 1e-12)]
    return places[: max(1, int(exact(config.pacing, step, steps, N, a, b)))]


def literal_batches(config, order, shard, keys, labels, streams, t, m):
    """T batches of one client: lists of samples."""
    N, T = len(shard), config.epochs * -(-len(shard) // config.batch_size)
    shuffled = (streams("fixed order", m) if order == "fixed" else streams("ties", t, m)).permutation(N).tolist()
    places, draw, queue, batches = literal_order(order, shuffled, keys, labels), streams("batches", t, m), [], []
    for step in range(T):
        when = (step, T) if config.pacing_scope == "round" else (t * T + step, config.rounds * T)
        if config.refresh == "step" or order == "random-step":
            queue = []
        batch = []
        while len(batch) < min(config.batch_size, N):
            if not queue:
                queue = draw.permutation(
                    sorted(shard[i] for i in literal_admitted(config, order, places, keys, *when))
                ).tolist()
            batch.append(queue.pop(0))
        batches.append(batch)
    return batches


def literal_schedule(config, shard, keys, labels, streams, t, m):
    """Batches and, for each, the weights of its samples."""
    order = config.order
    if order == "shuffled":
        easy = literal_batches(config, "curriculum", shard, keys, labels, streams, t, m)
        batches = [easy[i] for i in streams("shuffled", t, m).permutation(len(easy))]
    elif order == "weighted":
        easy = literal_batches(config, "curriculum", shard, keys, labels, streams, t, m)
        batches = literal_batches(config, "vanilla", shard, keys, labels, streams, t, m)
        drawn = [sample for batch in easy for sample in batch]
        return batches, [[drawn.count(sample) * len(shard) / len(drawn) for sample in batch] for batch in batches]
    else:
        batches = literal_batches(config, order, shard, keys, labels, streams, t, m)
    return batches, [[1.0] * len(batch) for batch in batches]


def literal_sgd(config, net, batches, weights, x, y, *, seed=None, calibration=0.0, extra=lambda now: 0, rate=None):
    """SGD by hand, one sample's loss at a time within a batch: theta, and the mean over steps of the loss."""
    theta = nn.utils.parameters_to_vector(net.parameters()).detach()
    velocity, losses = torch.zeros_like(theta), []
    if seed is not None:
        torch.manual_seed(seed)
    for i, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
        net.train().zero_grad()
        logits = net(x[batch]) - calibration
        loss = sum(w * F.cross_entropy(z[None], y[s][None]) for z, s, w in zip(logits, batch, weight, strict=True)) / len(batch)
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in net.parameters()]) + extra(theta) + config.weight_decay * theta
        velocity = config.momentum * velocity + gradient
        theta = theta - (rate(i) if rate else config.lr) * velocity
        nn.utils.vector_to_parameters(theta.clone(), net.parameters())
        losses.append(loss.item())
    return theta, sum(losses) / len(losses)


def literal_expert(config, model, streams, x, y):
    """Central training on everything, each epoch in a new order, the last batch of an epoch as short as it is."""
    draw, batches = streams("central batches"), []
    for _ in range(config.expert_epochs):
        order = draw.permutation(np.arange(len(y))).tolist()
        batches += [order[i : i + config.batch_size] for i in range(0, len(order), config.batch_size)]
    net = poured(model.init(streams.seed("central init")), config.model != "lenet5")
    return literal_sgd(config, net, batches, [[1.0] * len(b) for b in batches], x, y)[0]


def travelled(config, T):
    """eta_0 ||a||_1 by its double sum, without the proximal term."""
    eta = [config.lr * (1 + config.lr_alpha * i) ** -config.lr_power for i in range(T)]
    return sum(eta[k] * config.momentum ** (k - j) for j in range(T) for k in range(j, T))


def literal(config, trial=0):
    """Algorithm 1 with four bases and SOLO, client after client. Returns theta_g^T (or the clients' own nets) and the rows."""
    method = config.order + (f" fedlc={config.fedlc:g}" if config.fedlc else "")
    x, y, x_test, y_test = arrays()
    data, streams, own_net = common.load_data(config.dataset), common.Streams(config.seed, trial), config.model != "lenet5"
    federation = common.Federation(config, data, streams)  # for the partition and the initial weights
    theta, shards = federation.start()["weights"], [shard.tolist() for shard in federation.shards]
    expert = literal_expert(config, federation.model, streams, x, y) if config.score == "E" else None
    c, c_i, held, own, rows = 0 * theta, {}, {}, {}, []
    total = {"uploads": 0, "samples": 0, "received_mb": 0.0, "sent_mb": 0.0}
    for t in range(config.rounds):
        chosen = sorted(streams("select", t).permutation(config.clients)[: config.clients_per_round].tolist())
        ys, lengths, losses, fallback = [], [], [], []
        for m in chosen:
            start = own.get(m, theta) if config.base == "solo" else theta
            labels, keys = y[shards[m]].tolist(), None
            if config.order not in ("random", "vanilla", "random-step", "fixed"):
                keys = literal_keys(config, start, held.get(m), expert, x[shards[m]], y[shards[m]])
            batches, weights = literal_schedule(config, shards[m], keys, labels, streams, t, m)
            correction = c - c_i.get(m, 0 * theta) if config.base == "scaffold" else 0 * theta
            mu = config.mu if config.base == "fedprox" else 0
            calibration = (
                config.fedlc * torch.tensor([max(labels.count(k), 1e-8) for k in range(4)], dtype=torch.float64) ** -0.25
            )
            client, loss = literal_sgd(
                config,
                poured(start, own_net),
                batches,
                weights,
                x,
                y,
                seed=streams.seed("dropout", t, m),
                calibration=calibration if config.fedlc else 0.0,
                extra=lambda now: correction + mu * (now - theta),  # noqa: B023
                rate=lambda i: config.lr * (1 + config.lr_alpha * i) ** -config.lr_power,
            )
            ys.append(client)
            losses.append(loss)
            lengths.append(travelled(config, len(batches)))
            fallback.append(m not in held)
            total["samples"] += sum(len(batch) for batch in batches)
        p = [len(shards[m]) / sum(len(shards[k]) for k in chosen) for m in chosen]
        held.update(zip(chosen, ys, strict=True))
        if config.base == "solo":
            own.update(zip(chosen, ys, strict=True))
        elif config.base == "scaffold":
            new = {m: c_i.get(m, 0 * theta) - c + (theta - end) / a for m, end, a in zip(chosen, ys, lengths, strict=True)}
            c_next = c + sum(new[m] - c_i.get(m, 0 * theta) for m in chosen) / config.clients
            c, c_i = c_next, c_i | new
            theta = theta + sum(end - theta for end in ys) / len(ys)
        elif config.base == "fednova":
            direction = sum(q * (theta - end) / a for q, end, a in zip(p, ys, lengths, strict=True))
            theta = theta - sum(q * a for q, a in zip(p, lengths, strict=True)) * direction
        else:
            theta = sum(q * end for q, end in zip(p, ys, strict=True))
        vectors = {"scaffold": 2, "solo": 0}.get(config.base, 1)
        total["uploads"] += len(chosen)
        for way in ("received_mb", "sent_mb"):
            total[way] += len(chosen) * vectors * len(theta) * 8 / 1e6  # float64
        row = {"setting": "", "method": method, "trial": trial, "round": t + 1, "clients": len(chosen), "dropped": 0, **total}
        row |= {"train_loss": sum(losses) / len(losses)}
        if config.score in ("L", "LG", "L_pred", "LG_pred") and config.order not in (
            "random",
            "vanilla",
            "random-step",
            "fixed",
        ):
            row["fallback"] = sum(fallback) / len(fallback)
        if (t + 1) % config.eval_every == 0 or t + 1 == config.rounds:
            nets = [own.get(m, theta) for m in range(config.clients)] if config.base == "solo" else [theta]
            results = [judged(poured(weights, own_net), x_test, y_test) for weights in nets]
            row["loss"] = float(np.mean([np.mean(loss) for loss, _ in results]))
            right = [
                100 * np.mean([guess == c for guess, c in zip(found, y_test.tolist(), strict=True)]) for _, found in results
            ]
            row["accuracy"] = float(np.mean(right))
            if config.base == "solo":
                row["client_std"] = float(np.std(right, ddof=1))
        rows.append(row)
    return (own if config.base == "solo" else theta), rows


def trained(flags, folder, monkeypatch):
    """The command line with these flags: its runs, and the rows of metrics.csv."""
    argv, kept = [word for k, v in flags.items() for word in (f"--{k.replace('_', '-')}", str(v))], []
    monkeypatch.setattr(script, "report", lambda df, runs, folder: kept.extend(runs))
    script.main([*argv, "--out", str(folder)])
    return kept, metrics(folder)


def metrics(folder):
    with open(folder / "metrics.csv") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


OFF = {  # every number off its default; the arms below change the rest
    "clients": 6,
    "clients_per_round": 3,
    "rounds": 3,
    "epochs": 3,
    "batch_size": 7,
    "parts": 7,
    "partition": "iid",
    "lr": 0.03,
    "lr_alpha": 0.2,
    "lr_power": 0.6,
    "momentum": 0.8,
    "weight_decay": 0.01,
    "pacing_a": 0.7,
    "pacing_b": 0.3,
    "eval_every": 2,
    "chunk": 2,
    "seed": 7,
    "expert_epochs": 2,
}
ARMS = [
    {"order": "curriculum"},
    {"order": "curriculum", "score": "L", "pacing": "root", "base": "fednova"},
    {"order": "anti", "score": "LG", "pacing": "quadratic", "base": "scaffold", "refresh": "step"},
    {"order": "curriculum", "score": "G_pred", "pacing": "exponential", "base": "fedprox", "mu": 0.3},
    {"order": "anti", "score": "L_pred", "pacing": "step", "pacing_scope": "global"},
    {"order": "curriculum", "score": "LG_pred", "lr": 0.15, "momentum": 0.0},
    {"order": "anti", "score": "LG_pred", "lg_pred": "errors", "refresh": "step", "partition": "dirichlet", "alpha": 0.5},
    {"order": "curriculum", "score": "E", "pacing": "quadratic", "pacing_b": 0.0},
    {"order": "curriculum", "score": "test_fedavg_curriculum:margin_of", "pacing_scope": "global"},
    {"order": "curriculum", "base": "solo", "score": "LG"},
    {"order": "anti", "model": "net", "score": "L"},
    {"order": "random", "pacing": "root", "fedlc": 0.7},
    {"order": "random", "pacing_scope": "global", "refresh": "step", "base": "fedprox", "mu": 0.3},
    {"order": "vanilla", "base": "scaffold", "partition": "label-skew"},
    {"order": "vanilla", "batch_size": 20, "partition": "dirichlet", "alpha": 0.5, "model": "net"},
    {"order": "random-step", "base": "fednova"},
    {"order": "shuffled", "score": "L", "refresh": "step"},
    {"order": "weighted", "score": "LG", "pacing": "root", "weight_decay": 0.0},
    {"order": "weighted", "batch_size": 20, "partition": "dirichlet", "alpha": 0.5, "fedlc": 0.5},
    {"order": "fixed", "pacing": "step"},
    {"order": "balanced", "pacing_scope": "global", "score": "L"},
    {"order": "balanced", "fedlc": 1.5, "partition": "dirichlet", "alpha": 0.5},
    {"order": "threshold", "score": "LG", "pacing_scope": "global"},
    {"order": "hard-threshold", "score": "E", "base": "fedprox", "mu": 0.3},
]


SMALL = {"trials": 1, "threads": 1, "device": "cpu", "dtype": "float64", "min_size": 3}


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: "-".join(str(v).rpartition(":")[2] for v in arm.values()))
def test_a_run_equals_a_literal_algorithm_1(arm, data_file, tmp_path, monkeypatch):
    """Weights to 1e-9 and every column of metrics.csv."""
    arm = OFF | SMALL | {"dataset": str(data_file)} | arm | ({"model": f"{__file__}:Dropped"} if arm.get("model") else {})
    [run], found = trained(arm, tmp_path, monkeypatch)
    expected, rows = literal(script.Config(**arm))
    state = run.load()["state"]
    if arm.get("base") == "solo":
        assert state["base"]["own"].keys() == expected.keys()
        assert all((state["base"]["own"][m] - expected[m]).abs().max() < 1e-9 for m in expected)
    else:
        assert (state["weights"] - expected).abs().max() < 1e-9
    assert len(found) == len(rows) and found[0].keys() == rows[-1].keys()  # the last round has every column
    for row, wanted in zip(found, rows, strict=True):
        for name, cell in row.items():
            value = wanted.get(name, "")
            assert cell == value if isinstance(value, str) else float(cell) == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_the_literal_run_covers_a_client_that_returns_after_a_gap_and_poor_clients(data_file):
    config = small(**OFF | SMALL, dataset=str(data_file))
    parts = [set(common.Streams(config.seed)("select", t).permutation(6)[:3].tolist()) for t in range(3)]
    assert (parts[0] & parts[2]) - parts[1] and parts[1] & parts[2]
    config = dataclasses.replace(config, partition="dirichlet", alpha=0.5, batch_size=20)
    sizes = common.Federation(config, common.load_data(str(data_file)), common.Streams(config.seed)).sizes
    assert (sizes < 20).any() and (sizes > 7).any(), sizes


def test_the_orders_and_scores_differ_where_they_should(data_file, tmp_path, monkeypatch):
    flags = SMALL | {"dataset": data_file, "clients": 5, "clients_per_round": 3, "rounds": 4, "epochs": 5, "batch_size": 4}
    flags |= {"alpha": 1.0, "pacing_b": 0.25, "lr": 0.05}
    seen = {}
    for order in ORDERS + EXTRA:
        [run], _ = trained(flags | {"order": order}, tmp_path / order, monkeypatch)
        seen[order] = run.load()["state"]["weights"]
    for score in (*script.SCORES[1:], "test_fedavg_curriculum:margin_of"):
        [run], _ = trained(flags | {"order": "curriculum", "score": score}, tmp_path / score, monkeypatch)
        seen[score] = run.load()["state"]["weights"]
    equal = [(a, b) for i, a in enumerate(seen) for b in list(seen)[:i] if torch.equal(seen[a], seen[b])]
    assert equal == [], equal


# ---------------------------------------------------------------------------------------------------------- difficulty


def federation(data_file, **flags):
    config = small(dataset=str(data_file), **flags)
    fl = common.Federation(config, common.load_data(str(data_file)), common.Streams(0))
    fl.shards = [np.arange(0, 20), np.arange(20, 33), np.arange(33, 60), np.arange(9), np.arange(8)]
    return config, fl


def scored(data_file, score, held, expert=None, lg_pred="disagree"):
    config, fl = federation(data_file, score=score, lg_pred=lg_pred)
    state = fl.start() | {"weights": fl.model.init(1), "held": held}
    if expert is not None:
        [(expert, _)] = common.score(fl.model, expert, fl.data, [np.arange(60)])
    return [np.asarray(k, dtype=float) for k in script.difficulty(config, fl, state, np.array([0, 2]), expert)]


def thetas(data_file, *seeds):
    return [2 * federation(data_file)[1].model.init(seed) for seed in seeds]


def test_first_participation_falls_back_to_the_global_model(data_file):
    stranger = {1: thetas(data_file, 5)[0]}  # only client 1 has a model of its own, and it does not take part
    for fallback, score in (("G", "L"), ("G", "LG"), ("G_pred", "L_pred")):
        pairs = zip(scored(data_file, score, stranger), scored(data_file, fallback, {}), strict=True)
        assert all(a == pytest.approx(b, abs=1e-12) for a, b in pairs)
    assert all((k == 0).all() for k in scored(data_file, "LG_pred", stranger))  # all easy
    errors = scored(data_file, "LG_pred", {}, None, "errors")
    assert all(np.array_equal(a, 2 * b) for a, b in zip(errors, scored(data_file, "G_pred", {}), strict=True))


@pytest.mark.parametrize("lg_pred", ["disagree", "errors"])
@pytest.mark.parametrize("score", [s for s in script.SCORES if s != "E"])
def test_difficulty_equals_the_table_by_a_loop(score, lg_pred, data_file):
    x, y, *_ = arrays()
    (own,), (_, fl) = thetas(data_file, 7), federation(data_file)
    found = scored(data_file, score, {2: own}, lg_pred=lg_pred)
    for keys, shard, mine in zip(found, (np.arange(20), np.arange(33, 60)), (None, own), strict=True):
        wanted = literal_keys(small(score=score, lg_pred=lg_pred), fl.model.init(1), mine, None, x[shard], y[shard])
        assert keys == pytest.approx(wanted, abs=1e-10)
    if score != "LG_pred":
        assert len(set(found[1])) > 1


def test_readings_of_lg_pred(data_file, monkeypatch):
    G, L = np.array([0, 0, 1, 1, 1, 2, 0, 3]), np.array([0, 1, 0, 1, 2, 2, 0, 0])

    def keys(reading):
        config, fl = federation(data_file, score="LG_pred", lg_pred=reading)
        theta_g, own, y = fl.model.init(1), fl.model.init(2), fl.data.y_train[fl.shards[4]].numpy()
        monkeypatch.setattr(common, "score", lambda _, theta, *r: [(0.0 * G, y + (L if torch.equal(theta, own[None]) else G))])
        state = fl.start() | {"weights": theta_g, "held": {4: own}}
        return script.difficulty(config, fl, state, np.array([4]), None)[0].tolist()

    assert keys("disagree") == [0, 1, 1, 0, 1, 0, 0, 1] and keys("errors") == [0, 1, 1, 2, 2, 2, 0, 1]


def test_an_expert_equal_to_the_global_model_scores_as_g(data_file):
    theta = federation(data_file)[1].model.init(1)
    pairs = zip(scored(data_file, "E", {}, theta), scored(data_file, "G", {}), strict=True)
    assert all(a == pytest.approx(b, abs=1e-12) for a, b in pairs)


@pytest.mark.parametrize("score", script.SCORES)
def test_scoring_leaves_no_trace(score, data_file):
    (own, expert) = thetas(data_file, 7, 8)
    held, kept = {2: own}, (own.clone(), expert.clone())
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    scored(data_file, score, held, expert)
    assert torch.equal(torch.get_rng_state(), before[0]) and np.array_equal(np.random.get_state()[1], before[1])
    assert torch.equal(own, kept[0]) and torch.equal(expert, kept[1]) and set(held) == {2}


def no_number(logits, labels, losses):
    return losses / 0 * np.inf


def one_number(logits, labels, losses):
    return losses.mean()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("score", "words"),
    [
        ("nonsense", "nonsense"),
        (":f", ":f"),
        ("no_such_module:f", "no_such_module"),
        ("numpy:pi", "TypeError: float is not a function"),
        ("numpy:False_", "is not a function"),
        ("test_fedavg_curriculum:none_such", "none_such"),
        ("test_fedavg_curriculum:one_number", "for each of"),
        ("test_fedavg_curriculum:no_number", "finite"),
    ],
)
def test_a_score_of_ones_own_that_is_none_costs_one_line(score, words, data_file, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        script.main(["--dataset", str(data_file), "--score", score, *QUICK, "--out", str(tmp_path)])
    shown = capsys.readouterr()
    assert stop.value.code == 2 and words in shown.err and shown.err.strip().splitlines()[-1].count("error: ") == 1


def test_momentum_is_fresh_in_every_round(data_file, tmp_path, monkeypatch):
    """One client in two rounds of one step with b = 1 is plain SGD, whatever the momentum."""
    flags = SMALL | {"dataset": data_file, "clients": 1, "clients_per_round": 1, "rounds": 2, "epochs": 1, "batch_size": 60}
    flags |= {"weight_decay": 0.0, "order": "vanilla"}
    runs = [trained(flags | {"momentum": rho}, tmp_path / str(rho), monkeypatch)[0][0] for rho in (0.0, 0.9)]
    assert torch.equal(runs[0].load()["state"]["weights"], runs[1].load()["state"]["weights"])


def test_a_dropped_client_leaves_no_trace(data_file, tmp_path, monkeypatch):
    """--on-nonfinite drop: the others' weights |D_m| are renormalised and the lost client keeps its old model."""
    train, kept = common.train, {}

    def broken(*args, **flags):
        update = train(*args, **flags)
        kept["weights"] = update.weights.clone()
        update.weights[1] = float("nan")
        return update

    flags = SMALL | {
        "dataset": data_file,
        "clients": 5,
        "clients_per_round": 3,
        "rounds": 1,
        "order": "curriculum",
        "score": "L",
    }
    monkeypatch.setattr(common, "train", broken)
    [run], [row] = trained(flags | {"on_nonfinite": "drop"}, tmp_path, monkeypatch)
    state, fl = run.load()["state"], common.Federation(run.config, common.load_data(str(data_file)), run.streams)
    clients = fl.select(0, 3)
    sizes = fl.sizes[clients][[0, 2]]
    expected = (sizes[0] * kept["weights"][0] + sizes[1] * kept["weights"][2]) / sizes.sum()
    assert (state["weights"] - expected).abs().max() < 1e-12
    assert set(state["held"]) == {int(clients[0]), int(clients[2])}
    assert row["dropped"] == "1" and row["clients"] == row["uploads"] == "2"
    with pytest.raises(SystemExit) as stop:
        trained(flags, tmp_path / "stop", monkeypatch)
    assert stop.value.code == 3


# -------------------------------------------------------------------------------------------------------- whole commands

QUICK = ["--clients", "8", "--clients-per-round", "3", "--rounds", "4", "--epochs", "1", "--trials", "1", "--threads", "1"]
QUICK += ["--device", "cpu", "--batch-size", "20", "--lr", "0.05"]


@pytest.fixture(autouse=True)
def called_by_its_name(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fedavg_curriculum.py"])


def files(folder):
    return {p.stem: p for p in sorted((folder / "checkpoints").glob("*.pt")) if not p.name.startswith("expert")}


def states(folder):
    """The state in every arm's checkpoint, by method and trial."""
    saved = [torch.load(path, weights_only=True) for path in files(folder).values()]
    return {(each["fingerprint"]["method"], each["fingerprint"]["trial"]): each["content"]["state"] for each in saved}


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """All orders of the paper and two trials, by this process, and what it drew."""
    folder = tmp_path_factory.mktemp("reference")
    with pytest.MonkeyPatch.context() as patch:
        drawn = drawings(patch)
        patch.setattr(sys, "argv", ["fedavg_curriculum.py"])
        script.main([*QUICK, "--trials", "2", "--out", str(folder)])
    return folder, drawn


def drawings(patch):
    """What is saved as a figure from now on: file name -> the figure."""
    from matplotlib.figure import Figure

    drawn, save = {}, Figure.savefig
    patch.setattr(Figure, "savefig", lambda self, path, **how: drawn.update({Path(path).name: self}) or save(self, path, **how))
    return drawn


def test_orders_png_shows_the_final_round(reference):
    folder, drawn = reference
    axes, rows = drawn["orders.png"].axes[0], metrics(folder)
    bars = [float(bar.get_width()) for container in axes.containers for bar in container]
    names = [label.get_text() for label in axes.get_yticklabels()]
    wanted = [np.mean([float(r["accuracy"]) for r in rows if r["method"] == o and r["round"] == "4"]) for o in ORDERS]
    assert bars == pytest.approx(wanted) and names == list(ORDERS)
    best = [max(float(r["accuracy"]) for r in rows if r["method"] == o) for o in ORDERS]
    assert any(abs(w - b) > 1 for w, b in zip(wanted, best, strict=True))
    spread = [np.std([float(r["accuracy"]) for r in rows if r["method"] == o and r["round"] == "4"], ddof=1) for o in ORDERS]
    whiskers = [np.ptp(line.get_xdata()) / 2 for line in axes.lines if np.ptp(line.get_xdata()) > 0]
    assert whiskers == pytest.approx([std for std in spread if std > 0])
    assert (folder / "orders.png").stat().st_size > 5000 and (folder / "accuracy.png").stat().st_size > 5000


def test_what_an_order_gains_over_vanilla_is_printed(reference, capsys):
    """A_curr, A_anti and A_random; 12.7062 is the .975 quantile of Student's t with one degree of freedom."""
    rows = metrics(reference[0])
    final = {o: [float(r["accuracy"]) for r in rows if r["method"] == o and r["round"] == "4"] for o in ORDERS}
    script.report(pd.read_csv(reference[0] / "metrics.csv", dtype={"setting": str}).fillna({"setting": ""}), [], reference[0])
    said = capsys.readouterr().out.partition("A_o =")[2].splitlines()
    for order in ("curriculum", "anti", "random"):
        A = np.subtract(final[order], final["vanilla"])
        half = 12.7062 * abs(A[0] - A[1]) / 2
        [line] = [line for line in said if line.split()[:1] == [order]]
        assert line.split(None, 1)[1] == f"{A.mean():+.2f} [{A.mean() - half:+.2f}, {A.mean() + half:+.2f}]"


def test_an_expert_is_that_of_its_own_epochs(data_file, tmp_path):
    """Two experts in one folder, each as in a folder of its own."""
    flags = ["--dataset", str(data_file), *QUICK, "--rounds", "2", "--order", "curriculum", "--score", "E"]
    script.main([*flags, "--expert-epochs", "1", "9", "--out", str(tmp_path / "both")])
    both = metrics(tmp_path / "both")
    for epochs in ("1", "9"):
        script.main([*flags, "--expert-epochs", epochs, "--out", str(tmp_path / epochs)])
        own = [row | {"setting": ""} for row in both if row["setting"] == f"expert_epochs={epochs}"]
        assert own == metrics(tmp_path / epochs) and len(own) == 2
    assert both[1]["accuracy"] != both[3]["accuracy"] or both[1]["train_loss"] != both[3]["train_loss"]


def test_a_sweep_trains_once_what_does_not_read_it(data_file, tmp_path, monkeypatch):
    """random asks for no score, vanilla for no pacing either: Fig 1's and Fig 3's vanilla are trained once."""
    federate, trained_arms = script.federate, []

    def spy(config, data, run):
        trained_arms.append((config.order, config.score, config.pacing_a))
        federate(config, data, run)

    monkeypatch.setattr(script, "federate", spy)
    flags = ["--dataset", str(data_file), *QUICK, "--rounds", "1", "--order", *ORDERS, "random-step", "fixed", "weighted"]
    script.main([*flags, "--score", "G", "L", "--pacing-a", "0.5", "0.8", "--out", str(tmp_path)])
    count = {order: sum(arm[0] == order for arm in trained_arms) for order in (*ORDERS, "random-step", "fixed", "weighted")}
    assert count == {
        "curriculum": 4,
        "anti": 4,
        "random": 2,
        "vanilla": 1,
        "random-step": 1,
        "fixed": 2,
        "weighted": 4,
    }
    rows = metrics(tmp_path)
    assert len(rows) == 4 * 7 and len({r["setting"] for r in rows}) == 4  # its rows are shown in every setting
    assert len({r["accuracy"] for r in rows if r["method"] == "vanilla"}) == 1


@pytest.mark.parametrize(
    ("flags", "distinct"),
    [
        (["--order", "curriculum", "--score", "G", "LG_pred", "--lg-pred", "disagree", "errors"], 3),  # G asks for no reading,
        (["--order", "anti", "--score", "G", "E", "--expert-epochs", "1", "2"], 3),  # nor for an expert
        (["--order", "vanilla", "--base", "fedavg", "fedprox", "--mu", "0.1", "0.2"], 3),  # FedAvg has no mu
        (["--order", "vanilla", "--lr-alpha", "0", "0.1", "--lr-power", "0", "0.75"], 2),  # three of four are constant
    ],
)
def test_a_sweep_of_what_another_flag_switches_off_is_trained_once(flags, distinct, data_file, tmp_path, monkeypatch):
    federate, trained_arms = script.federate, []
    monkeypatch.setattr(script, "federate", lambda config, data, run: trained_arms.append(run) or federate(config, data, run))
    script.main(["--dataset", str(data_file), *QUICK, "--rounds", "1", *flags, "--out", str(tmp_path)])
    assert len(trained_arms) == distinct and len({row["setting"] for row in metrics(tmp_path)}) == 4
    again = [*flags[:-2], flags[-1], flags[-2]]  # the sweep the other way round, with other runs to represent each
    script.main(["--dataset", str(data_file), *QUICK, "--rounds", "1", *again, "--out", str(tmp_path), "--resume"])
    assert len(trained_arms) == distinct


def test_a_swept_flag_that_tune_switches_on_is_trained_for_each_of_its_values(data_file, tmp_path):
    """lr_power without lr_alpha is unread, unless --tune chooses an lr_alpha."""
    flags = ["--dataset", str(data_file), *QUICK, "--rounds", "1", "--order", "curriculum", "--tune", "lr-alpha=1,5"]
    flags += ["--batch-size", "2"]  # several local steps
    script.main([*flags, "--lr-power", "0.1", "3", "--out", str(tmp_path / "both")])
    both = metrics(tmp_path / "both")
    for power in ("0.1", "3"):
        script.main([*flags, "--lr-power", power, "--out", str(tmp_path / power)])
        [own] = metrics(tmp_path / power)
        assert [row for row in both if float(row["setting"].partition("=")[2]) == float(power)] == [
            own | {"setting": f"lr_power={float(power)}"}
        ]
    assert both[0]["loss"] != both[1]["loss"]


def test_arms_that_tune_chose_other_rates_for_ask_the_same_expert(data_file, tmp_path, monkeypatch):
    """Two arms with other choices of --tune: what E ranks is the same, so the comparison stays paired."""
    choose, difficulty, seen = experiment.Run.choose, script.difficulty, {}

    def chosen(run):
        choose(run)
        run.tuned = {"lr": 0.03 if run.config.order == "curriculum" else 0.001}
        return dataclasses.replace(run.config, **run.tuned)

    def spy(config, *args):
        keys = difficulty(config, *args)
        seen.setdefault((config.order, config.lr, config.hold_out), keys)
        return keys

    monkeypatch.setattr(experiment.Run, "choose", chosen)
    monkeypatch.setattr(script, "difficulty", spy)
    flags = ["--dataset", str(data_file), *QUICK, "--rounds", "1", "--score", "E", "--expert-epochs", "3"]
    script.main([*flags, "--order", "curriculum", "anti", "--tune", "lr=0.03,0.001", "--out", str(tmp_path)])
    keys = [np.concatenate(keys) for (_, _, hold_out), keys in seen.items() if not hold_out]
    rehearsed = [np.concatenate(keys) for (order, _, hold_out), keys in seen.items() if hold_out and order == "curriculum"]
    assert len(keys) == 2 == len(rehearsed) and np.array_equal(*keys) and np.array_equal(*rehearsed)
    assert not np.array_equal(keys[0][: len(rehearsed[0])], rehearsed[0])  # which never saw what is held out


@pytest.mark.parametrize("order", ["random", "vanilla", "random-step", "fixed", "threshold", "hard-threshold"])
def test_what_an_order_is_said_not_to_read_it_does_not_read(order, data_file, tmp_path, monkeypatch):
    flags = SMALL | {"dataset": data_file, "clients": 5, "clients_per_round": 3, "rounds": 2, "epochs": 2, "order": order}
    changed = {"score": "L", "lg_pred": "errors", "expert_epochs": 2, "pacing": "root", "pacing_a": 0.3, "pacing_b": 0.5}
    changed |= {"pacing_scope": "global", "refresh": "step", "lr_power": 0.1, "mu": 0.7, "server_lr": 0.3}
    unread = [name for name in script.unread(script.Config(order=order)) if name != "lr_alpha"]  # it switches lr_power on
    assert set(unread) <= set(changed)
    runs = [
        trained(flags | {k: changed[k] for k in names}, tmp_path / str(len(names)), monkeypatch)[0] for names in ((), unread)
    ]
    assert same(*(run.load()["state"] for [run] in runs))


def test_fedlc_is_an_arm_beside_the_orders(data_file, tmp_path):
    flags = ["--dataset", str(data_file), *QUICK, "--rounds", "2", "--order", "curriculum", "vanilla", "--fedlc", "0", "0.5"]
    script.main([*flags, "--base", "moon", "--out", str(tmp_path)])  # moon brings per-client options of its own
    rows = metrics(tmp_path)
    assert {r["setting"] for r in rows} == {""}
    assert {r["method"] for r in rows} == {"curriculum", "curriculum fedlc=0.5", "vanilla", "vanilla fedlc=0.5"}


@pytest.mark.parametrize("model", ["lenet5", "fedgen-cnn"])
def test_with_b_1_the_four_orders_are_one_program(tmp_path, model, data_file):
    """Bit for bit, end to end; fedgen-cnn would tell if scoring touched a BatchNorm statistic."""
    for score in ("G", "L"):
        folder = tmp_path / score
        flags = [*QUICK, "--rounds", "3", "--pacing-b", "1", "--model", model, "--score", score, "--order", *ORDERS, "fixed"]
        script.main([*flags, "--dataset", str(data_file), "--out", str(folder)])
        weights = [state["weights"] for state in states(folder).values()]
        assert len(weights) == 5 and all(torch.equal(weights[0], w) for w in weights[1:])
        own = ("method", "fallback")
        by_order = [[{k: v for k, v in r.items() if k not in own} for r in metrics(folder) if r["method"] == o] for o in ORDERS]
        assert len(by_order[0]) == 3 and all(r == by_order[0] for r in by_order[1:])


def test_the_reference_learns_and_its_arms_differ(reference):
    rows, finals = metrics(reference[0]), states(reference[0])
    assert len(rows) == 4 * 2 * 4 and len(finals) == 8
    weights = [state["weights"] for state in finals.values()]
    assert all(not torch.equal(weights[i], weights[j]) for i in range(8) for j in range(i))
    assert max(float(r["accuracy"]) for r in rows) > 30
    samples = {(r["trial"], r["round"], r["samples"]) for r in rows}
    assert len(samples) == 2 * 4  # the same number of samples in every order


def part_of(reference, folder):
    """The rows and states of the reference for the arms that `folder` holds."""
    found = states(folder)
    methods = {row["method"] for row in metrics(folder)}
    return [r for r in metrics(reference) if r["method"] in methods], {n: s for n, s in states(reference).items() if n in found}


def test_the_same_command_twice(reference, tmp_path):
    script.main([*QUICK, "--trials", "2", "--order", "curriculum", "random", "--out", str(tmp_path)])
    assert len(states(tmp_path)) == 4
    rows, expected = part_of(reference[0], tmp_path)
    assert metrics(tmp_path) == rows and same(states(tmp_path), expected)


def test_another_order_of_the_arms_and_fewer_tests_change_no_bit(reference, tmp_path):
    orders = ["vanilla", "anti", "curriculum"]
    script.main([*QUICK, "--trials", "2", "--eval-every", "3", "--order", *orders, "--out", str(tmp_path)])
    found, expected = states(tmp_path), states(reference[0])
    assert len(found) == 6 and all(same(found[name], expected[name]) for name in found)
    rows = metrics(tmp_path)
    assert {r["round"] for r in rows if r["accuracy"]} == {"3", "4"} and len(rows) == 3 * 2 * 4
    full = {(r["method"], r["trial"], r["round"]): r for r in metrics(reference[0])}
    for r in rows:
        other = full[r["method"], r["trial"], r["round"]]
        assert r["train_loss"] == other["train_loss"] and r["accuracy"] in ("", other["accuracy"])


def test_two_jobs_change_no_bit(tmp_path, data_file):
    """As typed by a stranger in a folder of their own; both workers of a trial want the same expert at the same time."""
    flags = [*QUICK, "--rounds", "3", "--trials", "2", "--score", "E", "--expert-epochs", "1", "--order", "curriculum", "anti"]
    flags += ["--dataset", str(data_file)]
    command = [sys.executable, ROOT / "fedavg_curriculum.py", *flags, "--jobs", "2", "--out", "two"]
    subprocess.run(command, env=dict(os.environ, OMP_NUM_THREADS="1"), cwd=tmp_path, check=True, capture_output=True)
    script.main([*flags, "--out", str(tmp_path / "one")])
    assert len(states(tmp_path / "one")) == 4
    assert metrics(tmp_path / "two") == metrics(tmp_path / "one")
    assert same(states(tmp_path / "two"), states(tmp_path / "one"))


def test_killed_and_resumed(reference, tmp_path):
    """SIGKILL in the third of eight runs, then --resume: the same table and every bit of the state."""
    flags = [*QUICK, "--trials", "2", "--out", str(tmp_path)]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    command = [sys.executable, ROOT / "fedavg_curriculum.py", *flags]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(files(tmp_path)) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert 3 <= len(files(tmp_path)) < 8 and not (tmp_path / "metrics.csv").exists()
    script.main([*flags, "--resume"])
    assert metrics(tmp_path) == metrics(reference[0]) and same(states(tmp_path), states(reference[0]))
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("base", common.BASES)
def test_every_base_resumes_to_the_same_bits(base, data_file, tmp_path, monkeypatch):
    """Ctrl-C inside the training of round 4 of 5; control variates, moments and previous nets must survive."""
    flags = [*QUICK, "--rounds", "5", "--base", base, "--score", "LG", "--order", "balanced", "--dataset", str(data_file)]
    flags += ["--clients", "4", "--clients-per-round", "2", "--parts", "16"]
    script.main([*flags, "--out", str(tmp_path / "whole")])
    train, calls = common.train, []

    def interrupted(*args, **more):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return train(*args, **more)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(common, "train", interrupted)
        script.main([*flags, "--out", str(tmp_path / "cut")])
    assert stop.value.code == 130 and len(metrics(tmp_path / "cut")) <= 3
    script.main([*flags, "--out", str(tmp_path / "cut"), "--resume"])
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert same(states(tmp_path / "cut"), states(tmp_path / "whole"))


@pytest.mark.parametrize(
    "argv",
    [
        ["--order", "best"],
        ["--order"],
        ["--score", "GL"],
        ["--lg-pred", "both"],
        ["--pacing", "cubic"],
        ["--pacing-a", "-1"],
        ["--pacing-a", "nan"],
        ["--pacing-b", "1.5"],
        ["--pacing-b", "-0.1"],
        ["--pacing-scope", "epoch"],
        ["--refresh", "never"],
        ["--fedlc", "-1"],
        ["--lr-alpha", "-1"],
        ["--lr-power", "inf"],
        ["--expert-epochs", "0"],
        ["--preset", "table9"],
        ["--clients", "3"],  # fewer than --clients-per-round
        ["--clients", "1438"],  # one more than digits has samples
        ["--parts", "2000"],
    ],
)
def test_a_wrong_flag_costs_one_line(argv, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        script.main([*argv, "--rounds", "1"])
    shown = capsys.readouterr()
    assert stop.value.code == 2 and shown.out == "" and len(shown.err.strip().split("\n")) == 1 and "error: " in shown.err


@pytest.mark.parametrize(("flag", "words"), [("--help", "--pacing-scope"), ("--list-presets", "fig10")])
def test_help_and_presets(flag, words, capsys):
    with pytest.raises(SystemExit) as stop:
        script.main([flag])
    shown = capsys.readouterr()
    assert stop.value.code == 0 and words in shown.out and shown.err == ""


def test_a_mistake_in_a_process_of_its_own(tmp_path):
    command = [sys.executable, ROOT / "fedavg_curriculum.py", "--dataset", str(tmp_path / "none.npz")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and done.stdout == ""


ALL_BETAS, PACED = {"alpha": (0.05, 0.2, 0.9)}, {"pacing": FAMILIES, "pacing_a": (0.1, 0.5, 0.8)}
PUBLISHED = {  # what each table and figure of the paper varies, and what it holds fixed
    "table1": ALL_BETAS,
    "table2": ALL_BETAS | {"base": ("fedprox",)},
    "table3": ALL_BETAS | {"base": ("fednova",)},
    "table4": ALL_BETAS | {"base": ("scaffold",)},
    "fmnist": ALL_BETAS | {"base": ("fedavg", "fedprox", "fednova", "scaffold"), "dataset": ("fmnist",)},
    "fig1": {"partition": ("iid", "label-skew"), "score": ("G", "L", "LG", "G_pred", "L_pred", "LG_pred")},
    "fig2": {"partition": ("iid",), "order": ORDERS[:3], **PACED},
    "fig3": {"partition": ("iid", "dirichlet"), "alpha": (0.05,), "pacing_b": (0.0025, 0.1, 0.2, 0.5, 0.8)},
    "fig6": {"alpha": (0.05, 0.2), "score": ("E", "G"), "order": ("curriculum", "random")},
    "fig6-iid": {"partition": ("iid",), "score": ("E", "G"), "order": ("curriculum", "random")},
    "fig10": {"partition": ("label-skew",), "parts": (100, 200, 400, 800)},
    "fig10-fedprox": {"alpha": (0.05,), "base": ("fedprox",), "parts": (100, 200, 400, 800)},
    "fig11": ALL_BETAS | {"dataset": ("cifar100",)},
    "fig11-fedprox": ALL_BETAS | {"dataset": ("cifar100",), "base": ("fedprox",)},
    "fig11-scaffold": ALL_BETAS | {"dataset": ("cifar100",), "base": ("scaffold",)},
    "fig11-fednova": ALL_BETAS | {"dataset": ("cifar100",), "base": ("fednova",)},
    "fig12": {"alpha": (0.05,), "order": ORDERS[:3], **PACED},
}
HELD = {"dataset": "cifar10", "model": "lenet5", "partition": "dirichlet", "base": "fedavg", "score": "G", "order": ORDERS}
HELD |= {"clients": 100, "clients_per_round": 10, "rounds": 100, "epochs": 10, "batch_size": 10, "momentum": 0.9, "trials": 3}
HELD |= {"seed": 202207, "lr": 0.001, "lr_alpha": 0.001, "lr_power": 0.75, "weight_decay": 5e-4, "parts": 0, "mu": -1.0}
HELD |= {"pacing": "linear", "pacing_a": 0.8, "pacing_b": 0.2, "pacing_scope": "round", "refresh": "pass", "fedlc": 0.0}
RESNET = {"model": "resnet9", "lr": 0.01, "lr_power": 0.0, "weight_decay": 0.0}


def swept(argv):
    """All values that each flag takes in the runs of a command."""
    configs = experiment.parse(script.Config, script.PRESETS, "d", argv)[0]
    return {f.name: list(dict.fromkeys(getattr(c, f.name) for c in configs)) for f in dataclasses.fields(script.Config)}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_hold_the_papers_values(preset):
    wanted = HELD | (RESNET if preset.startswith("fig11") else {}) | PUBLISHED[preset]
    found = swept(["--preset", preset])
    assert {k: found[k] for k in wanted} == {k: list(v) if isinstance(v, tuple) else [v] for k, v in wanted.items()}
    default = swept(["--order", "curriculum"])
    rest = found.keys() - wanted.keys()
    assert {k: found[k] for k in rest} == {k: default[k] for k in rest}


def test_the_preset_on_exposure_compares_every_order_at_equal_steps():
    found = swept(["--preset", "exposure"])
    assert found["order"] == [*ORDERS, *EXTRA] and found["alpha"] == [0.05, 0.9] and found["clients"] == [100]
    assert (found["rounds"], found["epochs"], found["trials"], found["dataset"]) == ([40], [5], [5], ["cifar10"])
    assert {*script.PRESETS} == {*PUBLISHED, "exposure"}


def test_explicit_flags_win_over_a_preset():
    found = swept(["--preset", "table1", "--alpha", "0.3", "--lr", "0.5"])
    assert found["alpha"] == [0.3] and found["lr"] == [0.5] and found["dataset"] == ["cifar10"]


# -------------------------------------------------------------------------------------------------- results/explain.py

sys.path.append(str(ROOT / "results"))
explain = importlib.import_module("explain")


def test_gradient_dissimilarity_by_autograd(data_file):
    _, fl = federation(data_file)
    (x, y, *_), theta, chosen = arrays(), 3 * fl.model.init(4), [np.arange(0, 9), np.arange(9, 12), np.arange(12, 40)]
    gradients = []
    for index in chosen:
        net = poured(theta)
        F.cross_entropy(net(x[index]), y[index]).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]).numpy())
    q = np.array([9, 3, 28]) / 40
    expected = sum(w * (g @ g) for w, g in zip(q, gradients, strict=True)) / np.linalg.norm(q @ np.array(gradients)) ** 2
    found = [explain.dissimilarity(fl, theta, index, [0, 1, 2]) for index in (chosen, [np.arange(9)] * 3)]
    assert found == pytest.approx([expected, 1.0], rel=1e-8) and expected > 1.01


def test_dissimilarity_of_vanishing_gradients_needs_float64(data_file):
    """Where the samples are learned, theta - (theta - g) in float32 would be rounding alone."""
    _, fl = federation(data_file, dtype="float32")
    batches = [np.tile(np.arange(40), (900, 1))]
    theta = common.train(fl.model, fl.model.init(4), fl.data, batches, lr=0.05, momentum=0.5).weights[0]
    chosen = [np.arange(0, 20), np.arange(20, 40)]
    exactly = explain.dissimilarity(federation(data_file)[1], theta.double(), chosen, [0, 1])
    assert common.score(fl.model, theta, fl.data, [np.arange(40)])[0][0].mean() < 1e-2
    assert explain.dissimilarity(fl, theta, chosen, [0, 1]) == pytest.approx(exactly, rel=1e-9)


def test_dissimilarity_draws_its_dropout_from_the_seeds(data_file):
    _, fl = federation(data_file, model=f"{__file__}:Dropped")
    theta, chosen, found = fl.model.init(4), [np.arange(0, 20), np.arange(20, 40)], []
    for stray, seeds in ((0, [1, 2]), (1, [1, 2]), (1, [3, 4])):
        torch.manual_seed(stray)
        found.append(explain.dissimilarity(fl, theta, chosen, seeds))
    assert found[0] == found[1] != found[2]


def test_exposure_and_first_labels_by_a_loop():
    draw, y = rng(3), rng(4).integers(0, 4, 60)
    ordered = [draw.permutation(np.arange(0, 3)), draw.permutation(np.arange(3, 30)), draw.permutation(np.arange(30, 60))]
    schedules = [(draw.choice(own, (11, 4)), draw.random((11, 4))) for own in ordered]
    schedules[0][0][:, 3] = -1
    visits, samples = [0.0] * 5, [0] * 5
    for own, (batches, weights) in zip(ordered, schedules, strict=True):
        for place, sample in enumerate(own):
            fifth = next(i for i in range(5) if 5 * place < (i + 1) * len(own))
            samples[fifth] += 1
            visits[fifth] += sum(weights[i, j] for i in range(11) for j in range(4) if batches[i, j] == sample)
    found = explain.exposure(ordered, schedules)
    assert list(found.values()) == pytest.approx([v / max(n, 1) for v, n in zip(visits, samples, strict=True)])
    entropies, distances = [], []
    for batches, weights in schedules:
        share = [
            sum(weights[i, j] for i in range(3) for j in range(4) if batches[i, j] >= 0 and y[batches[i, j]] == c)
            for c in range(4)
        ]
        share = np.array(share) / sum(share)
        entropies.append(sum(-p * np.log(p) for p in share if p > 0))
        distances.append(sum(max(0.0, p - np.mean(y == c)) for c, p in enumerate(share)))
    found = explain.first_labels(y, 4, schedules)
    assert found == pytest.approx({"entropy": np.mean(entropies), "distance": np.mean(distances)})


@pytest.mark.parametrize("order", ["curriculum", "vanilla", "weighted"])
def test_explained_runs_have_the_columns_and_the_same_bits(order, data_file, tmp_path, monkeypatch):
    """Columns of the first round from the literal transcript; weights as without looking."""
    flags = OFF | SMALL | {"dataset": str(data_file), "order": order, "rounds": 2}
    [plain], _ = trained(flags, tmp_path / "plain", monkeypatch)
    argv = [word for k, v in flags.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    explain.main([*argv, "--dissimilarity", "--out", str(tmp_path / "seen")])
    [seen] = states(tmp_path / "seen").values()
    assert torch.equal(plain.load()["state"]["weights"], seen["weights"])
    row, config, streams = metrics(tmp_path / "seen")[0], script.Config(**flags), common.Streams(OFF["seed"])
    x, y, x_test, y_test = arrays()
    fl = common.Federation(config, common.load_data(str(data_file)), streams)
    theta, visits, entropy, distance, parts = fl.start()["weights"], [[] for _ in range(5)], [], [], [[], [], []]
    for m in sorted(streams("select", 0).permutation(6)[:3].tolist()):
        shard = fl.shards[m].tolist()
        keys = literal_keys(config, theta, None, None, x[shard], y[shard])
        batches, weights = literal_schedule(config, shard, keys, y[shard].tolist(), streams, 0, m)
        by_loss = sorted(range(len(shard)), key=lambda i: keys[i])
        for place, i in enumerate(by_loss):
            shown = [w for b, ws in zip(batches, weights, strict=True) for s, w in zip(b, ws, strict=True) if s == shard[i]]
            visits[place * 5 // len(shard)].append(sum(shown))
        early = range(-(-len(batches) // 5))
        share = np.zeros(4)
        for i in early:
            for s, w in zip(batches[i], weights[i], strict=True):
                share[y[s]] += w / sum(sum(weights[k]) for k in early)
        entropy.append(-sum(p * np.log(p) for p in share if p))
        distance.append(sum(abs(p - 0.25) for p in share) / 2)
        b, samples = max(1, int(0.3 * len(shard) + 1e-9)), [shard[i] for i in by_loss]
        for part, some in zip(parts, (samples[:b], samples, samples[-b:]), strict=True):
            part.append(np.array(some))
    wanted = {f"visits_{i + 1}": np.mean(own) for i, own in enumerate(visits)}
    wanted |= {"entropy": np.mean(entropy), "distance": np.mean(distance)}
    for name, chosen in zip(("easy", "all", "hard"), parts, strict=True):
        wanted[f"lambda_{name}"] = explain.dissimilarity(fl, theta, chosen, [0, 1, 2])
    expert = literal_expert(config, fl.model, streams, x, y)
    losses, _ = judged(poured(expert), x_test, y_test)
    hard = sorted(range(60), key=lambda i: -losses[i])[:12]
    guesses = judged(poured(theta), x_test, y_test)[1]
    wanted["hard_accuracy"] = 100 * np.mean([guesses[i] == y_test[i] for i in hard])
    assert {name: float(row[name]) for name in wanted} == pytest.approx(wanted)
    later = metrics(tmp_path / "seen")[1]
    guesses = judged(poured(literal(dataclasses.replace(config, rounds=1))[0]), x_test, y_test)[1]
    assert float(later["hard_accuracy"]) == pytest.approx(100 * np.mean([guesses[i] == y_test[i] for i in hard]))


def test_show_schedule_draws_the_schedule_and_trains_nothing(data_file, tmp_path, monkeypatch, capsys):
    drawn, orders = drawings(monkeypatch), ["curriculum", "shuffled", "weighted"]
    monkeypatch.setattr(script, "federate", lambda *_: pytest.fail("trained"))
    flags = [
        "--dataset",
        str(data_file),
        *QUICK,
        "--batch-size",
        "10",
        "--epochs",
        "2",
        "--order",
        *orders,
        "--score",
        "G",
        "L",
    ]
    explain.main([*flags, "--pacing-a", "0.6", "--show-schedule", "--out", str(tmp_path)])
    assert not (tmp_path / "metrics.csv").exists() and (tmp_path / "schedule.png").stat().st_size > 5000
    first, *others = drawn["schedule.png"].axes
    for family, line in zip(FAMILIES, first.lines, strict=True):
        assert line.get_label() == family
        wanted = [int(exact(family, t, 100, 500, Decimal("0.6"), Decimal("0.2"))) for t in range(100)]
        assert line.get_ydata().tolist() == wanted
    losses, config = [float(i) for i in range(500)], script.Config(order="x", epochs=2, batch_size=10, pacing_a=0.6)
    labels, shown = [i // 50 for i in range(500)], {ax.get_ylabel(): ax.images[0] for ax in others[:3]}
    assert list(shown) == orders
    for order, image in shown.items():
        one = dataclasses.replace(config, order=order)
        batches, weights = literal_schedule(one, list(range(500)), losses, labels, common.Streams(config.seed), 0, 0)
        assert np.allclose(image.get_array(), np.array([sorted(batch) for batch in batches]).T / 500)
        heaviest = max(max(own) for own in weights)
        paler = [[w / heaviest for _, w in sorted(zip(b, own, strict=True))] for b, own in zip(batches, weights, strict=True)]
        assert np.allclose(image.get_alpha(), np.array(paler).T)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "visits" in line]
    assert [line[0] for line in lines] == orders and lines[0][-5:] == lines[1][-5:] == lines[2][-5:]
    assert float(lines[0][-5]) > 3 > 1 > float(lines[0][-1])


def test_show_schedule_leaves_padding_blank(data_file, tmp_path, monkeypatch):
    drawn = drawings(monkeypatch)
    flags = ["--dataset", str(data_file), *QUICK, "--batch-size", "600", "--order", "vanilla", "curriculum"]
    explain.main([*flags, "--show-schedule", "--out", str(tmp_path)])
    _, *others = drawn["schedule.png"].axes
    for ax in others[:2]:
        image = np.ma.filled(ax.images[0].get_array().astype(float), np.nan)
        assert np.isnan(image[:100]).all() and not np.isnan(image[100:]).any()  # 500 samples in batches of 600


def test_the_preset_of_fig_9(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # where no data set is
    explain.main(["--preset", "fig9", "--out", str(tmp_path)])
    said = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "visits" in line]
    assert said == list(ORDERS) and (tmp_path / "schedule.png").exists()
