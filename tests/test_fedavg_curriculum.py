"""fedavg_curriculum.py against the spec's table, exact arithmetic and a slow literal Algorithm 1 on ordinary torch nets."""

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from decimal import Decimal, getcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import common
import fedavg_curriculum as script

ROOT = Path(script.__file__).parent
ORDERS, FAMILIES = ("curriculum", "anti", "random", "vanilla"), ("linear", "quadratic", "root", "step", "exponential")
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
def test_pacing_table_of_the_spec(family):
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


def test_sort_directions():
    shard, keys = np.array([10, 20, 30, 40]), np.array([0.3, 0.1, 0.9, 0.5])
    assert script.sort(shard, keys, "curriculum", rng()).tolist() == [20, 10, 40, 30]
    assert script.sort(shard, keys, "anti", rng()).tolist() == [30, 40, 10, 20]


def test_curriculum_reversed_is_anti_without_ties():
    shard, keys = rng(1).permutation(200), rng(2).random(200)
    for seed in range(5):
        easy, hard = (script.sort(shard, keys, order, rng(seed)) for order in ("curriculum", "anti"))
        assert np.array_equal(easy[::-1], hard) and np.array_equal(easy, shard[np.argsort(keys)])


@pytest.mark.parametrize("order", ["curriculum", "anti", "random", "vanilla"])
def test_ties_are_broken_by_seed_alone(order):
    """With one wrong sample among 20 the other 19 are equally likely at any place: not by index, not by label."""
    shard, keys = np.arange(20), np.arange(20) == 7
    first = np.zeros(20)
    for seed in range(2000):
        first[script.sort(shard, keys, order, rng(seed))[:10]] += 1
    others = np.delete(first, 7)
    expected = {"curriculum": 2000 * 10 / 19, "anti": 2000 * 9 / 19}.get(order, 1000)
    assert np.abs(others - expected).max() < 5 * np.sqrt(500)
    assert first[7] == {"curriculum": 0, "anti": 2000}.get(order, first[7])
    assert np.array_equal(script.sort(shard, keys, order, rng(3)), script.sort(shard, keys, order, rng(3)))


def test_random_order_ignores_the_keys():
    shard = np.arange(30)
    shown = [script.sort(shard, keys, "random", rng(4)).tolist() for keys in (None, np.arange(30.0), -np.arange(30.0))]
    assert shown[0] == shown[1] == shown[2] and sorted(shown[0]) == shard.tolist() and shown[0] != shard.tolist()


def test_batches_by_pass_use_up_the_prefix_before_it_is_read_again():
    draw = rng(5)
    for _ in range(100):
        n, T, B = int(draw.integers(1, 40)), int(draw.integers(1, 40)), int(draw.integers(1, 12))
        ordered, g = draw.permutation(1000)[:n], np.sort(draw.integers(1, n + 1, T))
        batches = script.paced_batches(ordered, g, B, "pass", rng(int(draw.integers(99))))
        assert batches.shape == (T, B)
        t = 0
        while t < T:
            prefix, used = set(ordered[: g[t]].tolist()), []
            for row in batches[t : t + -(-len(prefix) // B)]:
                real = row[row >= 0].tolist()
                assert (row[len(real) :] == -1).all() and len(real) == min(B, len(prefix) - len(used))
                used += real
                t += 1
            assert len(set(used)) == len(used) and set(used) <= prefix
            assert t == T or set(used) == prefix


def test_batches_by_step_read_the_prefix_every_time():
    ordered, g = rng(6).permutation(50), np.arange(1, 51)
    batches = script.paced_batches(ordered, g, 8, "step", rng(7))
    for t, row in enumerate(batches):
        real = row[row >= 0]
        assert len(real) == min(8, g[t]) == len(set(real.tolist())) and set(real) <= set(ordered[: g[t]])


def test_first_batches_are_uniform_over_the_prefix():
    counts = np.zeros(30)
    for seed in range(2000):
        counts[script.paced_batches(np.arange(30)[::-1], np.array([20]), 5, "pass", rng(seed))[0]] += 1
    assert (counts[:10] == 0).all() and np.abs(counts[10:] - 500).max() < 5 * np.sqrt(500 * 0.75)


def small(**flags):
    """A configuration on 60 made-up images; what is not given keeps the script's default."""
    base = {"clients": 5, "clients_per_round": 3, "rounds": 3, "epochs": 2, "batch_size": 4, "trials": 1, "threads": 1}
    base |= {"device": "cpu", "dtype": "float64", "alpha": 1.0, "min_size": 3, "lr": 0.02, "jobs": 2}  # jobs: no bar
    return script.Config(**{**base, **flags})


@pytest.mark.parametrize("refresh", ["pass", "step"])
@pytest.mark.parametrize("scope", ["round", "global"])
def test_every_order_takes_as_many_steps(refresh, scope):
    config = small(pacing_scope=scope, refresh=refresh)
    for n in (1, 4, 5, 23):
        shard = np.arange(100, 100 + n)
        made = [script.schedule(config, o, shard, rng(n).random(n), common.Streams(1), 1, 3) for o in ORDERS]
        assert {b.shape for b in made} == {(2 * -(-n // 4), 4)}  # E ceil(N/B)


@pytest.mark.parametrize("flags", [{"pacing_b": 1.0}, {"pacing_a": 0.0}])
@pytest.mark.parametrize("refresh", ["pass", "step"])
@pytest.mark.parametrize("scope", ["round", "global"])
def test_without_pacing_all_orders_are_one_schedule(flags, refresh, scope):
    config = small(pacing_scope=scope, refresh=refresh, **flags)
    shard, keys = rng(0).permutation(60)[:23], rng(1).random(23)
    made = [script.schedule(config, order, shard, keys, common.Streams(1), 2, 3) for order in ORDERS]
    assert all(np.array_equal(made[0], other) for other in made[1:])


def test_vanilla_is_epochs_over_the_whole_shard():
    shard = np.arange(7, 30)
    made = script.schedule(small(), "vanilla", shard, None, common.Streams(1), 2, 3).reshape(2, 24)
    assert all(np.array_equal(np.sort(epoch)[1:], shard) for epoch in made) and not np.array_equal(*made)


def test_curriculum_admits_the_easy_and_anti_the_hard():
    shard, keys = np.arange(100, 150), rng(0).random(50)
    rank = np.argsort(np.argsort(keys))
    config = small(epochs=4, batch_size=5, refresh="step", pacing_a=0.8, pacing_b=0.2)
    for order, place in (("curriculum", rank), ("anti", 49 - rank)):
        made = script.schedule(config, order, shard, keys, common.Streams(1), 0, 0)
        for t, row in enumerate(made):  # T = 40, so g grows from 10 to 50 over 32 steps
            assert place[row - 100].max() < 10 + 40 * min(t / 32, 1)
    assert place[made[0] - 100].max() >= 5  # drawn from all of the prefix, not from its head


def test_global_scope_paces_across_the_rounds():
    """Round t goes on where round t - 1 stopped: the concatenated prefix sizes are one pacing function of rounds * T."""
    config = small(rounds=5, epochs=2, batch_size=10, refresh="step", pacing_scope="global", pacing_a=0.6, pacing_b=0.1)
    shard, keys = np.arange(100), np.arange(100.0)
    T = 20
    seen = []
    for t in range(5):
        made = script.schedule(config, "curriculum", shard, keys, common.Streams(1), t, 0)
        seen += [row.max() for row in made]
    wanted = [min(100, 10 + 90 * min(i / (0.6 * 5 * T), 1)) for i in range(5 * T)]
    assert all(s < w for s, w in zip(seen, wanted, strict=True)) and max(seen[:5]) < 18 and min(seen[-40:]) > 50
    by_round = dataclasses.replace(config, pacing_scope="round")
    late = script.schedule(by_round, "curriculum", shard, keys, common.Streams(1), 4, 0)
    assert late[0].max() < 10  # the other scope starts afresh


def test_the_streams_of_a_client_do_not_depend_on_who_else_takes_part():
    shard, keys = np.arange(23), rng(1).random(23)
    one = script.schedule(small(), "curriculum", shard, keys, common.Streams(1), 2, 3)
    for m, t in ((4, 2), (3, 1)):
        assert not np.array_equal(one, script.schedule(small(), "curriculum", shard, keys, common.Streams(1), t, m))
    assert np.array_equal(one, script.schedule(small(), "curriculum", shard, keys, common.Streams(1), 2, 3))


# ----------------------------------------------------------------------------------------------- an independent Algorithm 1


def made_up(n=60, seed=0) -> common.Data:
    """16x16 images of 4 classes, each class a pattern of its own under noise."""
    draw = np.random.default_rng(seed)
    y = np.arange(2 * n) % 4
    pattern = draw.integers(0, 256, (4, 16, 16, 1))
    x = (0.3 * pattern[y] + 0.7 * draw.integers(0, 256, (2 * n, 16, 16, 1))).astype(np.uint8)
    moments = [torch.tensor([f(x[:n].astype(float))]) for f in (np.mean, np.std)]
    tensors = [torch.from_numpy(a) for a in (x[:n], y[:n], x[n:], y[n:])]
    return common.Data(*tensors, 4, *moments)


def lenet():
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(16, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 4)),
    ).double()


def poured(theta):
    net = lenet()
    nn.utils.vector_to_parameters(theta.clone(), net.parameters())
    return net


def pixels(data, x):
    return ((x.double() - data.mean) / data.std).permute(0, 3, 1, 2)


def losses_and_guesses(theta, data, shard):
    with torch.no_grad():
        logits = poured(theta)(pixels(data, data.x_train[shard]))
    return F.cross_entropy(logits, data.y_train[shard], reduction="none").tolist(), logits.argmax(1).tolist()


def literal_keys(config, theta, own, expert, data, shard):
    """The flag table of the spec, row by row."""
    y = data.y_train[shard].tolist()
    G, guess_G = losses_and_guesses(theta, data, shard)
    L, guess_L = losses_and_guesses(own, data, shard) if own is not None else (G, guess_G)
    each = range(len(shard))
    return {
        "G": G,
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
        "E": losses_and_guesses(expert, data, shard)[0] if expert is not None else None,
    }[config.score]


def literal_client(config, data, start, anchor, ordered, N, streams, t, m, order, correction):
    """ClientUpdate of Algorithm 1, one mini-batch at a time by torch.optim.SGD."""
    net, T = poured(start), config.epochs * -(-N // config.batch_size)
    sgd = torch.optim.SGD(net.parameters(), lr=1.0, momentum=config.momentum, weight_decay=config.weight_decay)
    draw, queue = streams("batches", t, m), []
    for i in range(T):
        if not queue or config.refresh == "step":
            g = exact(config.pacing, i, T, N, Decimal(str(config.pacing_a)), Decimal(str(config.pacing_b)))
            prefix = ordered if order == "vanilla" else ordered[: max(1, int(g))]
            queue = draw.permutation(sorted(prefix)).tolist()
        batch, queue = queue[: config.batch_size], queue[config.batch_size :]
        sgd.zero_grad()
        F.cross_entropy(net(pixels(data, data.x_train[batch])), data.y_train[batch]).backward()
        now = nn.utils.parameters_to_vector(net.parameters()).detach()
        extra = correction + (0.3 * (now - anchor) if config.base == "fedprox" else 0)
        begin = 0
        for p in net.parameters():
            p.grad += extra[begin : begin + p.numel()].view_as(p)
            begin += p.numel()
        sgd.param_groups[0]["lr"] = config.lr * (1 + config.lr_alpha * i) ** -config.lr_power
        sgd.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach(), T


def travelled(config, T):
    """eta_0 ||a||_1 by its double sum."""
    eta = [config.lr * (1 + config.lr_alpha * i) ** -config.lr_power for i in range(T)]
    return sum(eta[k] * config.momentum ** (k - j) for j in range(T) for k in range(j, T))


def literal(config, order, data, streams, expert=None):
    """Algorithm 1 with four bases and SOLO, client after client. Returns theta_g^T (or the clients' own nets)."""
    model = common.build_model("lenet5", data, dtype=torch.float64)
    shards = common.client_shards(config, data, streams)
    theta = model.init(streams.seed("init"))
    c, c_i, held, own = 0 * theta, {}, {}, {}
    for t in range(config.rounds):
        chosen = sorted(streams("select", t).choice(config.clients, config.clients_per_round, replace=False).tolist())
        ys, lengths = [], []
        for m in chosen:
            shard = shards[m].tolist()
            start = own.get(m, theta) if config.base == "solo" else theta
            shuffled = streams("ties", t, m).permutation(len(shard)).tolist()
            if order in ("curriculum", "anti"):
                keys = literal_keys(config, start, held.get(m), expert, data, shard)
                shuffled = sorted(shuffled, key=lambda i: keys[i] if order == "curriculum" else -keys[i])  # noqa: B023
            correction = c - c_i.get(m, 0 * theta) if config.base == "scaffold" else 0 * theta
            ordered = [shard[i] for i in shuffled]
            y, T = literal_client(config, data, start, theta, ordered, len(shard), streams, t, m, order, correction)
            ys.append(y)
            lengths.append(travelled(config, T))
        p = np.array([len(shards[m]) for m in chosen]) / sum(len(shards[m]) for m in chosen)
        held.update(zip(chosen, ys, strict=True))
        if config.base == "solo":
            own.update(zip(chosen, ys, strict=True))
        elif config.base == "scaffold":
            new = {m: c_i.get(m, 0 * theta) - c + (theta - y) / a for m, y, a in zip(chosen, ys, lengths, strict=True)}
            c_next = c + sum(new[m] - c_i.get(m, 0 * theta) for m in chosen) / config.clients
            c, c_i = c_next, c_i | new
            theta = theta + sum(y - theta for y in ys) / len(ys)
        elif config.base == "fednova":
            direction = sum(q * (theta - y) / a for q, y, a in zip(p, ys, lengths, strict=True))
            theta = theta - float(p @ np.array(lengths)) * direction
        else:
            theta = sum(q * y for q, y in zip(p, ys, strict=True))
    return own if config.base == "solo" else theta


def federated(config, order, data, folder, trial=0):
    run = common.Run(config, order, "", trial, folder)
    script.federate(config, data, run)
    return torch.load(run.path, weights_only=True)["state"], run


COMBINATIONS = [
    ("curriculum", {}),
    ("anti", {"momentum": 0.0, "weight_decay": 0.0}),
    ("random", {}),
    ("vanilla", {}),
    ("curriculum", {"score": "L", "base": "fednova", "lr_alpha": 0.1}),
    ("curriculum", {"score": "LG", "base": "scaffold", "lr_alpha": 0.5, "lr_power": 0.5}),
    ("anti", {"score": "G_pred", "base": "fedprox", "mu": 0.3}),
    ("curriculum", {"score": "L_pred", "pacing": "root", "refresh": "step"}),
    ("curriculum", {"score": "LG_pred", "pacing": "exponential", "lr": 0.2, "momentum": 0.0}),
    ("anti", {"score": "LG_pred", "lg_pred": "errors", "pacing": "step"}),
    ("curriculum", {"score": "E", "pacing": "quadratic", "pacing_b": 0.0}),
    ("curriculum", {"base": "solo", "score": "G"}),
    ("anti", {"base": "scaffold", "partition": "iid", "momentum": 0.0}),
]


@pytest.mark.parametrize(
    ("order", "flags"), COMBINATIONS, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values()))
)
def test_federate_equals_a_literal_algorithm_1(order, flags, tmp_path):
    data = made_up()
    config = small(**{"pacing_b": 0.25, "rounds": 4, **flags})
    state, run = federated(config, order, data, tmp_path)
    streams, expert = common.Streams(config.seed), None
    if config.score == "E":
        model = common.build_model("lenet5", data, dtype=torch.float64)
        expert = common.train_centrally(model, data, config.expert_epochs, config, streams)
    expected = literal(config, order, data, streams, expert)
    if config.base == "solo":
        found = state["base"]["own"]
        assert found.keys() == expected.keys()
        assert all((found[m] - expected[m]).abs().max() < 1e-9 for m in expected)
        return
    assert (state["weights"] - expected).abs().max() < 1e-9
    with torch.no_grad():
        logits = poured(expected)(pixels(data, data.x_test))
    accuracy = 100 * (logits.argmax(1) == data.y_test).double().mean().item()
    assert run.rows[-1]["accuracy"] == pytest.approx(accuracy) and [r["clients"] for r in run.rows] == [3] * 4
    assert run.rows[-1]["loss"] == pytest.approx(F.cross_entropy(logits, data.y_test).item(), abs=1e-8)
    assert run.rows[-1]["uploads"] == 12


def test_the_orders_and_scores_differ_where_they_should(tmp_path):
    data, seen, config = made_up(), {}, small(rounds=4, lr=0.05, pacing_b=0.25)
    for order in ORDERS:
        seen[order] = federated(config, order, data, tmp_path / order)[0]["weights"]
    for score in script.SCORES[1:]:
        changed = dataclasses.replace(config, score=score)
        seen[score] = federated(changed, "curriculum", data, tmp_path / score)[0]["weights"]
    assert [(a, b) for i, a in enumerate(seen) for b in list(seen)[:i] if torch.equal(seen[a], seen[b])] == []


# ---------------------------------------------------------------------------------------------------------- difficulty


def scored(score, held, expert=None, lg_pred="disagree"):
    data = made_up()
    model = common.build_model("lenet5", data, dtype=torch.float64)
    shards = [np.arange(0, 20), np.arange(20, 33), np.arange(33, 60)]
    config = small(score=score, lg_pred=lg_pred)
    keys = script.difficulty(config, model, model.init(1), held, expert, data, shards, np.array([0, 2]))
    return [np.asarray(k, dtype=float) for k in keys]


def thetas(*seeds):
    model = common.build_model("lenet5", made_up(), dtype=torch.float64)
    return [2 * model.init(seed) for seed in seeds]


def test_first_participation_falls_back_to_the_global_model():
    stranger = {1: thetas(5)[0]}  # only client 1 has a model of its own, and it does not take part
    for fallback, score in (("G", "L"), ("G", "LG"), ("G_pred", "L_pred")):
        assert all(np.array_equal(a, b) for a, b in zip(scored(score, stranger), scored(fallback, {}), strict=True))
    assert all((k == 0).all() for k in scored("LG_pred", stranger))  # all easy
    assert all(
        np.array_equal(a, 2 * b) for a, b in zip(scored("LG_pred", {}, None, "errors"), scored("G_pred", {}), strict=True)
    )


@pytest.mark.parametrize("lg_pred", ["disagree", "errors"])
@pytest.mark.parametrize("score", [s for s in script.SCORES if s != "E"])
def test_difficulty_equals_the_table_by_a_loop(score, lg_pred):
    data, (own,) = made_up(), thetas(7)
    theta = common.build_model("lenet5", data, dtype=torch.float64).init(1)
    found = scored(score, {2: own}, lg_pred=lg_pred)
    for keys, shard, mine in zip(found, (np.arange(20), np.arange(33, 60)), (None, own), strict=True):
        wanted = literal_keys(small(score=score, lg_pred=lg_pred), theta, mine, None, data, shard)
        assert keys == pytest.approx(wanted, abs=1e-10)
    if score != "LG_pred":
        assert len(set(found[1])) > 1


def test_readings_of_lg_pred():
    y = np.zeros(8, int)
    G, L = np.array([0, 0, 1, 1, 1, 2, 0, 3]), np.array([0, 1, 0, 1, 2, 2, 0, 0])

    def keys(reading):
        return (1 * script.key(small(score="LG_pred", lg_pred=reading), (y, G), (y, L), y)).tolist()

    assert keys("disagree") == [0, 1, 1, 0, 1, 0, 0, 1] and keys("errors") == [0, 1, 1, 2, 2, 2, 0, 1]


def test_an_expert_equal_to_the_global_model_scores_as_g():
    theta = common.build_model("lenet5", made_up(), dtype=torch.float64).init(1)
    assert all(np.array_equal(a, b) for a, b in zip(scored("E", {}, theta), scored("G", {}), strict=True))


@pytest.mark.parametrize("score", script.SCORES)
def test_scoring_leaves_no_trace(score):
    (own, expert) = thetas(7, 8)
    held, kept = {2: own}, (own.clone(), expert.clone())
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    scored(score, held, expert)
    assert torch.equal(torch.get_rng_state(), before[0]) and np.array_equal(np.random.get_state()[1], before[1])
    assert torch.equal(own, kept[0]) and torch.equal(expert, kept[1]) and set(held) == {2}


def test_own_models_are_those_of_the_last_participation(tmp_path, monkeypatch):
    data, sent = made_up(), {}
    train = common.train

    def spy(model, start, data, batches, **flags):
        update = train(model, start, data, batches, **flags)
        clients = [shard_of[tuple(np.unique(b[b >= 0]))] for b in batches]
        sent.update(zip(clients, update.weights.clone(), strict=True))
        return update

    config = small(score="L", pacing_b=1.0)  # all samples are in the batches, so that they tell the client
    shards = common.client_shards(config, data, common.Streams(config.seed))
    shard_of = {tuple(s): m for m, s in enumerate(shards)}
    monkeypatch.setattr(common, "train", spy)
    state, _ = federated(config, "curriculum", data, tmp_path)
    assert state["held"].keys() == sent.keys() and all(torch.equal(state["held"][m], sent[m]) for m in sent)


def test_learning_rate_is_its_closed_form_in_every_round(tmp_path, monkeypatch):
    seen, train = [], common.train

    def spy(*args, **flags):
        seen.append((flags["lr"], max(len(b) for b in args[3])))
        return train(*args, **flags)

    monkeypatch.setattr(common, "train", spy)
    federated(small(lr=0.03, lr_alpha=0.2, lr_power=0.75), "random", made_up(), tmp_path)
    assert len(seen) == 3
    for lr, steps in seen:
        assert len(lr) >= steps
        assert lr[:steps] == pytest.approx([0.03 * (1 + 0.2 * i) ** -0.75 for i in range(steps)], rel=1e-12)


def test_momentum_is_fresh_in_every_round(tmp_path):
    """One client in two rounds of one step with b = 1 is plain SGD, whatever the momentum."""
    flags = {"clients": 1, "clients_per_round": 1, "rounds": 2, "epochs": 1, "batch_size": 60, "weight_decay": 0.0}
    ends = [federated(small(momentum=rho, **flags), "vanilla", made_up(), tmp_path / str(rho))[0] for rho in (0.0, 0.9)]
    assert torch.equal(ends[0]["weights"], ends[1]["weights"])


def test_gradient_dissimilarity_by_autograd():
    data = made_up()
    model = common.build_model("lenet5", data, dtype=torch.float64)
    theta, chosen = 3 * model.init(4), [np.arange(0, 9), np.arange(9, 12), np.arange(12, 40)]
    gradients = []
    for index in chosen:
        net = poured(theta)
        F.cross_entropy(net(pixels(data, data.x_train[index])), data.y_train[index]).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]).numpy())
    q = np.array([9, 3, 28]) / 40
    expected = sum(w * (g @ g) for w, g in zip(q, gradients, strict=True)) / np.linalg.norm(q @ np.array(gradients)) ** 2
    found = [script.dissimilarity(model, theta, data, index, 0, [0, 1, 2]) for index in (chosen, [np.arange(9)] * 3)]
    assert found == pytest.approx([expected, 1.0], rel=1e-8) and expected > 1.01


def test_dissimilarity_of_vanishing_gradients_needs_float64():
    """Where the samples are learned, theta - (theta - g) in float32 would be rounding alone."""
    data = made_up()
    model = common.build_model("lenet5", data)
    theta, every = model.init(4), np.arange(len(data.y_train))
    batches = [np.tile(np.arange(40), (300, 1))]
    theta = common.train(model, theta, data, batches, lr=0.05, momentum=0.9).weights[0]
    chosen = [np.arange(0, 20), np.arange(20, 40)]
    double = common.build_model("lenet5", data, dtype=torch.float64)
    exact = script.dissimilarity(double, theta.double(), data, chosen, 0, [0, 1])
    assert common.score(model, theta, data, [every[:40]])[0][0].mean() < 1e-2
    assert script.dissimilarity(model, theta, data, chosen, 0, [0, 1]) == pytest.approx(exact, rel=1e-9)


def test_dissimilarity_is_of_the_easiest_all_and_hardest_samples(monkeypatch):
    data = made_up()
    model = common.build_model("lenet5", data, dtype=torch.float64)
    theta, shards, seen = 3 * model.init(4), [np.arange(0, 20), np.arange(20, 36), np.arange(36, 60)], []
    monkeypatch.setattr(script, "dissimilarity", lambda model, theta, data, chosen, **_: seen.append(chosen) or len(seen))
    config = small(pacing_b=0.25)
    found = script.dissimilarities(config, model, theta, data, shards, np.arange(3), common.Streams(0), 0)
    assert found == {"lambda_easy": 1, "lambda_all": 2, "lambda_hard": 3}
    losses = F.cross_entropy(poured(theta)(pixels(data, data.x_train)), data.y_train, reduction="none").detach().numpy()
    for k, shard in enumerate(shards):
        easy, everything, hard = (sorted(part[k].tolist()) for part in seen)
        by_loss = shard[np.argsort(losses[shard])]
        assert everything == shard.tolist()
        assert easy == sorted(by_loss[: len(shard) // 4].tolist()) and hard == sorted(by_loss[-(len(shard) // 4) :].tolist())


def test_dissimilarity_is_logged_and_changes_nothing(tmp_path):
    plain, _ = federated(small(), "curriculum", made_up(), tmp_path / "a")
    logged, run = federated(small(dissimilarity=True), "curriculum", made_up(), tmp_path / "b")
    assert torch.equal(plain["weights"], logged["weights"])
    assert all(row[f"lambda_{part}"] >= 1 - 1e-9 for row in run.rows for part in ("easy", "all", "hard"))


def test_a_dropped_client_leaves_no_trace(tmp_path, monkeypatch):
    """--on-nonfinite drop: the others' weights |D_m| are renormalised and the lost client keeps its old model."""
    data, train, kept = made_up(), common.train, {}

    def broken(*args, **flags):
        update = train(*args, **flags)
        kept["weights"] = update.weights.clone()
        update.weights[1] = float("nan")
        return update

    config = small(rounds=1, score="L", on_nonfinite="drop")
    monkeypatch.setattr(common, "train", broken)
    state, run = federated(config, "curriculum", data, tmp_path)
    streams = common.Streams(config.seed)
    clients = common.select(config, 3, streams, 0)
    sizes = np.array([len(common.client_shards(config, data, streams)[m]) for m in clients])[[0, 2]]
    expected = (sizes[0] * kept["weights"][0] + sizes[1] * kept["weights"][2]) / sizes.sum()
    assert (state["weights"] - expected).abs().max() < 1e-12
    assert set(state["held"]) == {int(clients[0]), int(clients[2])}
    assert run.rows[0]["dropped"] == 1 and run.rows[0]["clients"] == run.rows[0]["uploads"] == 2
    with pytest.raises(common.NonFiniteError):
        federated(small(rounds=1), "curriculum", data, tmp_path / "stop")


# -------------------------------------------------------------------------------------------------------- whole commands

QUICK = ["--clients", "8", "--clients-per-round", "3", "--rounds", "5", "--epochs", "1", "--trials", "1", "--threads", "1"]
QUICK += ["--device", "cpu", "--batch-size", "20", "--lr", "0.05"]


def metrics(folder):
    with open(folder / "metrics.csv") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def states(folder):
    """The state in every arm's checkpoint."""
    paths = [p for p in sorted((folder / "checkpoints").glob("*.pt")) if not p.name.startswith("expert")]
    return {p.stem: torch.load(p, weights_only=True)["state"] for p in paths}


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """All orders and two trials, by this process."""
    folder = tmp_path_factory.mktemp("reference")
    script.main([*QUICK, "--trials", "2", "--out", str(folder)])
    return folder


@pytest.mark.parametrize("model", ["lenet5", "fedgen-cnn"])
def test_with_b_1_the_four_orders_are_one_program(tmp_path, model):
    """Bit for bit, end to end; fedgen-cnn would tell if scoring touched a BatchNorm statistic."""
    for score in ("G", "L"):
        folder = tmp_path / score
        script.main([*QUICK, "--rounds", "3", "--pacing-b", "1", "--model", model, "--score", score, "--out", str(folder)])
        weights = [state["weights"] for state in states(folder).values()]
        assert len(weights) == 4 and all(torch.equal(weights[0], w) for w in weights[1:])
        rows = metrics(folder)
        by_order = [[{k: v for k, v in r.items() if k != "method"} for r in rows if r["method"] == o] for o in ORDERS]
        assert len(by_order[0]) == 3 and all(r == by_order[0] for r in by_order[1:])


def test_the_reference_learns_and_its_arms_differ(reference):
    rows, finals = metrics(reference), states(reference)
    assert len(rows) == 4 * 2 * 5 and len(finals) == 8
    weights = [state["weights"] for state in finals.values()]
    assert all(not torch.equal(weights[i], weights[j]) for i in range(8) for j in range(i))
    assert max(float(r["accuracy"]) for r in rows) > 40


def part_of(reference, folder):
    """The rows and states of the reference for the arms that `folder` holds."""
    found = states(folder)
    methods = {row["method"] for row in metrics(folder)}
    return [r for r in metrics(reference) if r["method"] in methods], {n: s for n, s in states(reference).items() if n in found}


def test_the_same_command_twice(reference, tmp_path):
    script.main([*QUICK, "--trials", "2", "--order", "curriculum", "random", "--out", str(tmp_path)])
    assert len(states(tmp_path)) == 4
    rows, expected = part_of(reference, tmp_path)
    assert metrics(tmp_path) == rows and same(states(tmp_path), expected)


def test_another_order_of_the_arms_and_fewer_tests_change_no_bit(reference, tmp_path):
    orders = ["vanilla", "anti", "curriculum"]
    script.main([*QUICK, "--trials", "2", "--eval-every", "3", "--order", *orders, "--out", str(tmp_path)])
    found, expected = states(tmp_path), states(reference)
    assert len(found) == 6 and all(same(found[name], expected[name]) for name in found)
    rows = metrics(tmp_path)
    assert {r["round"] for r in rows if r["accuracy"]} == {"3", "5"} and len(rows) == 3 * 2 * 5
    full = {(r["method"], r["trial"], r["round"]): r for r in metrics(reference)}
    for r in rows:
        other = full[r["method"], r["trial"], r["round"]]
        assert r["train_loss"] == other["train_loss"] and r["accuracy"] in ("", other["accuracy"])


def test_two_jobs_change_no_bit(tmp_path):
    """As typed by a stranger in a folder of their own; both workers of a trial want the same expert at the same time."""
    flags = [*QUICK, "--rounds", "3", "--trials", "2", "--score", "E", "--expert-epochs", "1", "--order", "curriculum", "anti"]
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
    process = subprocess.Popen(
        [sys.executable, ROOT / "fedavg_curriculum.py", *flags], env=environment, stderr=subprocess.DEVNULL
    )
    third, deadline = tmp_path / "checkpoints" / "anti-trial0.pt", time.monotonic() + 120
    while not third.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    done = len(list((tmp_path / "checkpoints").glob("*.pt")))
    assert 3 <= done < 8 and not (tmp_path / "metrics.csv").exists()
    script.main([*flags, "--resume"])
    assert metrics(tmp_path) == metrics(reference) and same(states(tmp_path), states(reference))
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("base", common.BASES)
def test_every_base_resumes_to_the_same_bits(base, tmp_path, monkeypatch):
    """Ctrl-C inside the training of round 4 of 5; control variates, moments and previous nets must survive."""
    flags = [*QUICK, "--rounds", "5", "--base", base, "--score", "LG", "--order", "curriculum", "--epochs", "1"]
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
    assert stop.value.code == 130 and len(metrics(tmp_path / "cut")) == 3
    script.main([*flags, "--out", str(tmp_path / "cut"), "--resume"])
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert same(states(tmp_path / "cut"), states(tmp_path / "whole"))


def test_summary(reference):
    summary = json.loads((reference / "summary.json").read_text(), parse_constant=pytest.fail)
    rows = metrics(reference)
    for order in ORDERS:
        accuracy = np.array([float(r["accuracy"]) for r in rows if r["method"] == order]).reshape(2, 5)
        shown = summary["results"][""][order]
        for name, values in (("final", accuracy[:, -1]), ("last10", accuracy.mean(1)), ("best", accuracy.max(1))):
            assert shown[name]["mean"] == pytest.approx(values.mean()) and shown[name]["std"] == pytest.approx(
                values.std(ddof=1)
            )
        assert shown["uploads"]["mean"] == 15
    difference = summary["paired"][""]["curriculum - random"]["final"]
    final = {o: [float(r["accuracy"]) for r in rows if r["method"] == o and r["round"] == "5"] for o in ORDERS}
    assert difference["mean"] == pytest.approx(np.mean(final["curriculum"]) - np.mean(final["random"]))
    assert set(summary["versions"]) >= {"python", "torch", "numpy"} and "--trials 2" in summary["command"]
    assert summary["device"] and summary["seconds"] > 0 and summary["config"]["clients"] == 8
    for name in ("accuracy.png", "orders.png"):
        assert (reference / name).stat().st_size > 5000


@pytest.mark.parametrize(
    "argv",
    [
        ["--order", "best"],
        ["--order"],
        ["--order", "anti", "anti"],
        ["--score", "GL"],
        ["--lg-pred", "both"],
        ["--pacing", "cubic"],
        ["--pacing-a", "-1"],
        ["--pacing-a", "nan"],
        ["--pacing-b", "1.5"],
        ["--pacing-b", "-0.1"],
        ["--pacing-scope", "epoch"],
        ["--refresh", "never"],
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


@pytest.mark.parametrize("preset", script.PRESETS)
def test_presets_hold_the_papers_values(preset):
    config, sweep = common.parse(script.Config, script.PRESETS, "d", ["--preset", preset])
    assert (config.clients, config.clients_per_round, config.rounds, config.epochs, config.batch_size) == (100, 10, 100, 10, 10)
    assert (config.momentum, config.trials, config.seed, config.pacing_a, config.pacing_b) == (0.9, 3, 202207, 0.8, 0.2)
    residual = config.model == "resnet9"
    rates = (0.01, 0.0, 0.0) if residual else (0.001, 0.75, 5e-4)
    assert (config.lr, config.lr_power, config.weight_decay) == rates and (residual or config.lr_alpha == 0.001)
    for name, values in sweep.items():
        for value in values:
            dataclasses.replace(config, **{name: value}).check()
    bases = {"table2": "fedprox", "table3": "fednova", "table4": "scaffold", "fig10-fedprox": "fedprox"}
    assert config.base == bases.get(preset, "fedavg")
    if preset.startswith("fig10"):  # Non-IID (2) for FedAvg, Dir(.05) for FedProx
        assert config.partition == ("dirichlet" if "fedprox" in preset else "label-skew") and sweep == {"parts": script.PARTS}
        assert "fedprox" not in preset or config.alpha == 0.05


def test_explicit_flags_win_over_a_preset():
    config, sweep = common.parse(script.Config, script.PRESETS, "d", ["--preset", "table1", "--alpha", "0.3", "--lr", "0.5"])
    assert config.alpha == 0.3 and config.lr == 0.5 and sweep == {} and config.dataset == "cifar10"
