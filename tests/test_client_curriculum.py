"""Oracles of client_curriculum.py: Algorithm 2, the update budget, the pool, both scores, and the 2x2 as one program."""

import csv
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import client_curriculum as script
import common
from client_curriculum import ARMS, ORDERS, Config

PAPER = Config(clients=100, clients_per_round=10, rounds=100)


def small(**flags) -> Config:
    """Seconds, not minutes: 9 clients, 2 a round, one local epoch."""
    flags = {"clients": 9, "clients_per_round": 2, "rounds": 4, "epochs": 1, "expert_epochs": 1, "trials": 1} | flags
    return Config(threads=1, **flags)


@pytest.fixture(scope="module")
def digits():
    """600 of the digits, so that an epoch takes little."""
    data = common.load_data("digits")
    return dataclasses.replace(data, x_train=data.x_train[:600], y_train=data.y_train[:600])


def trained(config, data, method, folder, resume=False) -> tuple[list[dict], dict]:
    """Rows (without seconds) and final state of one arm."""
    run = common.Run(dataclasses.replace(config, resume=resume), method, "", 0, folder)
    script.federate(run.config, data, run)
    rows = [{k: v for k, v in row.items() if k not in ("seconds", "method")} for row in run.rows]
    return rows, common.load_checkpoint(run.path)["state"]


# ------------------------------------------------------------------------------------------------------- Algorithm 2


def dealt_by_hand(shards, labels, loss, f, rng):
    """Algorithm 2 sample by sample, in Python lists: the blocks of every client and the leftovers of every class."""
    blocks, rest = [[] for _ in shards], {}
    for c in sorted(set(labels)):
        members = sorted((i for shard in shards for i in shard if labels[i] == c), key=lambda i: (loss[i], i))
        taken, start = set(), 0
        for i, shard in enumerate(shards):
            n = sum(labels[j] == c for j in shard)
            mine = members[start : start + round(f * n * 1000) // 1000]
            blocks[i] += mine
            taken |= set(mine)
            start += n
        rest[c] = [i for i in members if i not in taken]
    return blocks, rest


@pytest.fixture(scope="module")
def base():
    """(shards, labels, loss) of 20 Dirichlet clients with tied losses among them."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, 900)
    shards, _ = common.partition("dirichlet", labels, 20, 0.2, rng)
    return shards, labels, np.round(rng.exponential(size=900), 2)


@pytest.mark.parametrize("f", [0.0, 0.1, 0.29, 0.5, 0.9, 1.0])
def test_algorithm_2_against_python_lists(base, f):
    shards, labels, loss = base
    new = script.reconstitute(shards, labels, loss, f, np.random.default_rng(1))
    assert np.array_equal(np.sort(np.concatenate(new)), np.arange(900))  # each sample dealt once
    for before, after in zip(shards, new, strict=True):  # N_ic conserved
        assert np.array_equal(np.bincount(labels[before], minlength=5), np.bincount(labels[after], minlength=5))
    blocks, rest = dealt_by_hand(shards, labels, loss, f, None)
    for block, after in zip(blocks, new, strict=True):
        assert set(block) <= set(after)
        assert all(i in rest[labels[i]] for i in set(after) - set(block))


def test_offsets_are_exclusive():
    """Two clients, two classes, by hand: with the printed inclusive cumsum client 0 would get the second block."""
    labels = np.array([0, 0, 0, 0, 0, 1, 1, 1])
    loss = np.array([5.0, 1, 4, 2, 3, 9, 7, 8])
    shards = [np.array([0, 1, 5, 6]), np.array([2, 3, 4, 7])]
    easy, hard = script.reconstitute(shards, labels, loss, 1.0, np.random.default_rng(0))
    assert easy.tolist() == [1, 3, 6, 7] and hard.tolist() == [0, 2, 4, 5]


def test_f_1_is_contiguous_and_ordered_in_each_class_and_needs_no_draw(base):
    shards, labels, loss = base
    new = script.reconstitute(shards, labels, loss, 1.0, np.random.default_rng(1))
    again = script.reconstitute(shards, labels, loss, 1.0, np.random.default_rng(2))
    assert all(np.array_equal(a, b) for a, b in zip(new, again, strict=True))
    for c in range(5):
        by_client = np.concatenate([np.sort(loss[own[labels[own] == c]]) for own in new])
        assert np.array_equal(by_client, np.sort(loss[labels == c]))


def test_f_0_ignores_the_loss(base):
    shards, labels, loss = base
    one = script.reconstitute(shards, labels, loss, 0.0, np.random.default_rng(1))
    other = script.reconstitute(shards, labels, loss, 0.0, np.random.default_rng(2))
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    first = np.concatenate([loss[own] for own in one[: len(one) // 2]])  # the half that f = 1 makes easy
    assert abs(first.mean() - loss.mean()) < 4 * loss.std() / np.sqrt(len(first))


def test_the_block_of_29_percent_of_100_is_29():
    labels, loss = np.zeros(200, dtype=int), np.arange(200.0)
    first, second = script.reconstitute([np.arange(100), np.arange(100, 200)], labels, loss, 0.29, np.random.default_rng(0))
    assert first[:29].tolist() == list(range(29))
    assert set(range(100, 129)) <= set(second) and not set(range(100, 129)) & set(first)


def test_a_block_rounds_down_so_that_one_sample_is_dealt_at_random():
    """floor(.9 x 1) = 0 of each client's only sample is in the ordered block."""
    shards, labels, loss = [np.array([i]) for i in range(40)], np.zeros(40, dtype=int), np.arange(40.0)
    dealt = [np.concatenate(script.reconstitute(shards, labels, loss, 0.9, np.random.default_rng(seed))) for seed in (1, 2)]
    assert not np.array_equal(dealt[0], dealt[1]) and not np.array_equal(dealt[0], np.arange(40))


def test_data_left_out_by_parts_stays_out(base):
    shards, labels, loss = base
    new = script.reconstitute(shards[3:9], labels, loss, 0.5, np.random.default_rng(0))
    assert np.array_equal(np.sort(np.concatenate(new)), np.sort(np.concatenate(shards[3:9])))


def test_consistency_falls_with_f_and_stratification_keeps_it_up():
    """1,000 samples with losses 0..999, 10 equal clients: without classes a block of 100 has std sqrt((100^2 - 1) / 12)."""
    rng = np.random.default_rng(0)
    labels, loss = rng.integers(0, 4, 1000), rng.permutation(1000).astype(float) + 250.0
    loss += 1000 * labels  # so that the classes differ in difficulty
    shards, _ = common.partition("iid", labels, 10, 1.0, rng)
    figures = {
        f: script.consistency(script.difficulty(script.reconstitute(shards, labels, loss, f, rng), loss)) for f in (0, 0.5, 1)
    }
    assert figures[0][0] > figures[0.5][0] > figures[1][0]
    assert figures[0][1] < figures[0.5][1] < figures[1][1]
    together = script.reconstitute(shards, np.zeros_like(labels), np.argsort(np.argsort(loss)) * 1.0, 1.0, rng)
    inside, between = script.consistency(script.difficulty(together, np.argsort(np.argsort(loss)) * 1.0))
    assert inside == pytest.approx(np.sqrt((100**2 - 1) / 12), rel=1e-12)
    assert between == pytest.approx(100 * np.sqrt((10**2 - 1) / 12), rel=1e-12)


def test_consistency_is_of_the_raw_loss():
    loss = np.array([1.0, 3.0, 10.0, 10.0, 10.0])
    clients = script.difficulty([np.array([0, 1]), np.array([2, 3, 4])], loss)
    assert clients.tolist() == [[2.0, 1.0], [10.0, 0.0]]
    assert script.consistency(clients) == (0.5, 4.0)


def test_class_counts_on_mnist(real_data):
    labels = common.load_data("mnist", str(real_data)).y_train.numpy()
    rng = np.random.default_rng(0)
    shards, _ = common.partition("dirichlet", labels, 100, 0.05, rng)
    loss = rng.exponential(size=len(labels))
    for f in (0.0, 0.33, 1.0):
        new = script.reconstitute(shards, labels, loss, f, rng)
        assert np.array_equal(np.sort(np.concatenate(new)), np.arange(60000))
        for before, after in zip(shards, new, strict=True):
            assert np.array_equal(np.bincount(labels[before], minlength=10), np.bincount(labels[after], minlength=10))


# ------------------------------------------------------------------------------------------------- pacing and sorting

TABLE = {
    "linear": (100, 200, 300, 400, 499, 500),
    "quadratic": (100, 125, 200, 325, 498, 500),
    "root": (100, 300, 382, 446, 499, 500),
    "step": (100, 100, 100, 100, 100, 500),
    "exponential": (100, 100, 102, 132, 490, 500),
}


@pytest.mark.parametrize("family", TABLE)
def test_pacing(family):
    t = np.array([0, 100, 200, 300, 399, 400])
    assert tuple(script.pacing(family, t, 500, 500, 0.8, 0.2)) == TABLE[family]
    every = script.pacing(family, np.arange(501), 500, 37, 0.6, 0.01)
    assert every[0] == 1 and (np.diff(every) >= 0).all() and (every[300:] == 37).all()
    assert (script.pacing(family, t, 500, 37, 0, 0.1) == 37).all() and (script.pacing(family, t, 500, 37, 0.5, 1) == 37).all()


def test_curriculum_reversed_is_anti_and_ties_do_not_follow_the_index():
    items, loss = np.arange(50) * 3, np.random.default_rng(0).random(50)
    curriculum, anti = (script.sort(items, loss, order, np.random.default_rng(1)) for order in ("curriculum", "anti"))
    assert np.array_equal(curriculum, items[np.argsort(loss)]) and np.array_equal(anti, curriculum[::-1])
    tied = [script.sort(items, np.zeros(50), "curriculum", np.random.default_rng(seed)) for seed in (1, 2)]
    assert not np.array_equal(tied[0], tied[1]) and not np.array_equal(tied[0], items)


def test_every_data_order_takes_the_same_steps_from_its_prefix():
    config, streams = Config(epochs=3, batch_size=10, pacing_b=0.2, pacing_a=0.8), common.Streams(0)
    shard, loss = np.arange(47) + 100, np.random.default_rng(0).random(47)
    ranked = {"curriculum": shard[np.argsort(loss)], "anti": shard[np.argsort(-loss)]}
    for order in ORDERS:
        batches = script.schedule(config, order, shard, loss, streams, 0, 0)
        assert batches.shape == (15, 10)
        if order in ranked:
            for t, batch in enumerate(batches):
                g = int(max(1, np.floor(47 * 0.2 + 47 * 0.8 * min(t / 12, 1) + 1e-9)))
                assert set(batch[batch >= 0]) <= set(ranked[order][:g])
    whole = script.schedule(config, "vanilla", shard, None, streams, 0, 0)
    assert np.array_equal(np.sort(whole[:5].ravel())[3:], shard)  # a pass shows each sample once
    first = [frozenset(script.schedule(config, "random", shard, None, streams, *key)[0]) for key in ((0, 0), (1, 0), (0, 1))]
    assert len(set(first)) == 3  # a permutation of its own for each client in each round
    free = dataclasses.replace(config, pacing_b=1.0)
    assert all(np.array_equal(script.schedule(free, order, shard, loss, streams, 0, 0), whole) for order in ORDERS)


# -------------------------------------------------------------------------------------------------- pool and budget


def played(config, order, loss, seed=0):
    """The clients of every round, the state after each, and how often all were scored; nothing is trained."""
    state = {"queue": [], "pool": config.clients, "updates": 0, "downloads": 0, "scalars": 0}
    calls, rounds = [], []

    def score():
        calls.append(state["updates"])
        return loss

    for t in range(config.rounds):
        clients = script.select(config, order, state, score, common.Streams(seed), t)
        state["updates"] += len(clients)
        rounds.append((clients, dict(state)))
    return rounds, calls


@pytest.mark.parametrize("order", ORDERS)
def test_the_budget_is_met_exactly(order):
    rounds, _ = played(PAPER, order, np.random.default_rng(0).random(100))
    assert len(rounds) == 100 and all(len(set(clients)) == 10 for clients, _ in rounds)
    assert sum(len(clients) for clients, _ in rounds) == 1000 == rounds[-1][1]["updates"]


@pytest.mark.parametrize("M, m, R, b", [(23, 7, 19, 0.1), (5, 5, 4, 0.2), (17, 1, 40, 0.01), (20, 9, 31, 0.3)])
@pytest.mark.parametrize("order", ORDERS)
def test_no_client_twice_in_a_mini_batch_whatever_the_sizes(M, m, R, b, order):
    config = Config(clients=M, clients_per_round=m, rounds=R, client_b=b)
    rounds, _ = played(config, order, np.random.default_rng(1).random(M))
    assert sum(len(set(clients)) for clients, _ in rounds) == R * m


def test_pool_grows_from_20_to_100_as_the_budget_is_spent():
    """K = floor(20 + .1 u) at the updates u at which all clients are scored, capped at 100 from u = 800 on."""
    rounds, calls = played(PAPER, "curriculum", np.random.default_rng(0).random(100))
    pools = [next(state["pool"] for _, state in rounds if state["updates"] > u) for u in calls]
    assert pools == [min(20 + u // 10, 100) for u in calls] and pools[0] == 20 and pools[-1] == 100
    last = rounds[-1][1]
    assert last["downloads"] == last["scalars"] == 100 * len(calls)


def test_all_are_scored_anew_only_when_the_pool_cannot_fill_a_mini_batch():
    """By hand: pools of 20, 22, 24 and 26 clients with 0, 0, 2 and 6 left waiting are 2, 2, 2 and 3 mini-batches of 10."""
    _, calls = played(PAPER, "curriculum", np.random.default_rng(0).random(100))
    assert calls[:5] == [0, 20, 40, 60, 90]


@pytest.mark.parametrize("order", ["curriculum", "anti"])
def test_each_pool_is_the_first_k_and_each_member_trains_once(order):
    loss = np.random.default_rng(3).permutation(100).astype(float)
    ranked = np.argsort(loss if order == "curriculum" else -loss)
    rounds, calls = played(PAPER, order, loss)
    trained = np.concatenate([clients for clients, _ in rounds])
    owed = np.zeros(100, dtype=int)  # every pool owes each of its members one update
    for u in calls:
        owed[ranked[: min(20 + u // 10, 100)]] += 1
    owed -= np.bincount(rounds[-1][1]["queue"], minlength=100)
    assert np.array_equal(np.bincount(trained, minlength=100), owed)
    assert set(trained[:20]) == set(ranked[:20])  # the first two mini-batches are the 20 easiest (hardest)


def test_random_and_vanilla_pools_score_nothing():
    def refuse():
        raise AssertionError("scored")

    for order in ("random", "vanilla"):
        state = {"queue": [], "pool": 100, "updates": 0, "downloads": 0, "scalars": 0}
        clients = [script.select(PAPER, order, state, refuse, common.Streams(0), t) for t in range(10)]
        assert state["downloads"] == 0
    assert np.array_equal(np.sort(np.concatenate(clients)), np.arange(100))  # vanilla deals everyone in turn
    assert len(set(played(PAPER, "random", None)[0][0][0]) - set(range(20))) > 0  # not simply the first ids


def test_uniform_sampling_is_the_common_draw():
    config = dataclasses.replace(PAPER, client_sampling="uniform")
    rounds, _ = played(config, "vanilla", None)
    for t, (clients, _) in enumerate(rounds):
        assert np.array_equal(clients, common.select(config, 10, common.Streams(0), t))
    assert played(config, "curriculum", np.arange(100.0))[1]  # a client order has its pool all the same


def test_cut_raggedly_the_paper_would_take_109_rounds_and_end_on_three_clients():
    """The docstring's figures, by the literal reading: mini-batches of 10, the pool's last one short."""
    u, sizes = 0, []
    while u < 1000:
        pool = min(int(20 + u / 10 + 1e-9), 100)
        cut = [10] * (pool // 10) + [pool % 10] * (pool % 10 > 0)
        for size in cut:
            size = min(size, 1000 - u)
            sizes += [size] if size else []
            u += size
    assert len(sizes) == 109 and sizes[-1] == 3


# -------------------------------------------------------------------------------------------------------------- scores


def lenet_losses(theta, data):
    """Cross-entropy of LeNet-5 on 1x28x28, written out in float64 from the flat vector."""
    shapes = [(6, 1, 5, 5), (6,), (16, 6, 5, 5), (16,), (120, 256), (120,), (84, 120), (84,), (10, 84), (10,)]
    parts = theta.double().split([int(np.prod(s)) for s in shapes])
    w1, b1, w2, b2, w3, b3, w4, b4, w5, b5 = (part.view(s) for part, s in zip(parts, shapes, strict=True))
    x = (data.x_train.double().permute(0, 3, 1, 2) - data.mean) / data.std
    x = F.max_pool2d(F.relu(F.conv2d(x, w1, b1)), 2)
    x = F.max_pool2d(F.relu(F.conv2d(x, w2, b2)), 2).flatten(1)
    logits = F.relu(F.relu(x @ w3.T + b3) @ w4.T + b4) @ w5.T + b5
    return (logits.logsumexp(1) - logits[torch.arange(len(logits)), data.y_train]).numpy()


def test_client_loss_is_the_mean_over_all_its_samples_and_e_with_the_global_model_is_g(digits):
    model = common.build_model("lenet5", digits, dtype=torch.float64)
    theta = model.init(3)
    shards = [np.arange(0, 40), np.arange(40, 41), np.arange(41, 600)]
    loss = lenet_losses(theta, digits)
    expected = [loss[shard].mean() for shard in shards]  # Eq. 1
    G = script.client_losses(small(score="G"), model, theta, None, digits, shards)
    E = script.client_losses(small(score="E"), model, None, loss, digits, shards)
    np.testing.assert_allclose([G, E], [expected, expected], rtol=1e-10)


def test_e_scores_by_the_expert_and_g_by_the_global_model(digits, tmp_path, monkeypatch):
    """The samples' keys that reach the sort, recomputed from the weights that the arm held at that round."""
    seen, held = [], []
    honest_schedule, honest_train = script.schedule, common.train
    monkeypatch.setattr(
        script, "schedule", lambda c, o, shard, loss, *r: seen.append((shard, loss)) or honest_schedule(c, o, shard, loss, *r)
    )
    monkeypatch.setattr(
        common, "train", lambda model, start, *r, **k: held.append(start) or honest_train(model, start, *r, **k)
    )
    config = small(rounds=3, dtype="float64")
    trained(config, digits, "client+data", tmp_path)
    starts = held[-3:]  # before them the expert was trained
    for k, (shard, loss) in enumerate(seen):
        assert loss == pytest.approx(lenet_losses(starts[k // 2], digits)[shard], rel=1e-8)
    expert = torch.load(next(tmp_path.glob("checkpoints/expert*")), weights_only=True)
    seen.clear()
    trained(dataclasses.replace(config, score="E"), digits, "client+data", tmp_path)
    for shard, loss in seen:
        assert loss == pytest.approx(lenet_losses(expert, digits)[shard], rel=1e-8)


def test_the_expert_never_sees_test_data(digits, tmp_path):
    model, config = common.build_model("lenet5", digits), small()
    blank = dataclasses.replace(digits, x_test=torch.zeros_like(digits.x_test), y_test=torch.zeros_like(digits.y_test))
    parts = [
        script.deal(config, model, data, common.Run(config, "client", "", 0, tmp_path / name))
        for name, data in (("honest", digits), ("blank", blank))
    ]
    assert all(np.array_equal(a, b) for a, b in zip(parts[0][0], parts[1][0], strict=True))
    assert np.array_equal(parts[0][1], parts[1][1])
    assert parts[0][1].mean() < np.log(10)  # it did learn something


def test_an_expert_that_diverged_ranks_nobody(digits, tmp_path):
    """NaN losses would be sorted without a word, and every table and arm would stand on that order."""
    model, config = common.build_model("lenet5", digits), small(lr=1e6)
    with pytest.raises(common.NonFiniteError, match="expert"):
        script.deal(config, model, digits, common.Run(config, "client", "", 0, tmp_path))


def test_one_expert_serves_all_settings_of_a_trial(digits, tmp_path, monkeypatch):
    made, honest = [], common.train_centrally
    monkeypatch.setattr(common, "train_centrally", lambda *r: made.append(r) or honest(*r))
    model, deals = common.build_model("lenet5", digits), []
    for alpha, trial in ((0.05, 0), (0.2, 0), (0.2, 1)):
        run = common.Run(small(alpha=alpha), "client", f"alpha={alpha}", trial, tmp_path)
        deals.append(script.deal(run.config, model, digits, run))
    assert len(made) == 2 and np.array_equal(deals[0][1], deals[1][1]) and not np.array_equal(deals[1][1], deals[2][1])
    assert not all(len(a) == len(b) for a, b in zip(deals[0][0], deals[1][0], strict=True))  # the shards do follow alpha


def test_stratify_keeps_class_counts_and_its_absence_only_sizes(digits, tmp_path):
    model, labels = common.build_model("lenet5", digits), digits.y_train.numpy()
    base = common.client_shards(small(), digits, common.Streams(Config.seed, 0))
    counts = {}
    for stratify in (True, False):
        run = common.Run(small(stratify=stratify), "client", "", 0, tmp_path)
        shards, loss, table = script.deal(run.config, model, digits, run)
        counts[stratify] = np.array([np.bincount(labels[shard], minlength=10) for shard in shards])
        means = np.array([[loss[shard].mean() for shard in when] for when in (base, shards)])
        np.testing.assert_allclose(table[:, :, 0].numpy(), means, rtol=1e-12)  # before and after
    assert np.array_equal(counts[True], [np.bincount(labels[shard], minlength=10) for shard in base])
    assert np.array_equal(counts[False].sum(1), counts[True].sum(1)) and not np.array_equal(counts[False], counts[True])
    assert (np.diff([loss[shard].mean() for shard in shards]) > 0).all()  # without classes, client by client harder


# ------------------------------------------------------------------------------------------------------- whole arms


def test_with_b_1_all_sixteen_arms_are_one_program(digits, tmp_path):
    config = small(client_b=1.0, pacing_b=1.0)
    results = {method: trained(config, digits, method, tmp_path) for method in ARMS}
    weights = results["vanilla"][1]["weights"]
    rows = [{k: v for k, v in row.items() if not k.startswith("scoring")} for row in results["vanilla"][0]]
    for method, (own_rows, state) in results.items():
        assert torch.equal(state["weights"], weights), method
        assert [{k: v for k, v in row.items() if not k.startswith("scoring")} for row in own_rows] == rows


def test_arms_differ_where_they_should_and_share_the_partition(digits, tmp_path):
    config = small(rounds=3)
    results = {method: trained(config, digits, method, tmp_path) for method in ("client+data", "client", "data", "vanilla")}
    tables = [state["difficulty"] for _, state in results.values()]
    assert all(torch.equal(table, tables[0]) for table in tables) and tables[0].shape == (2, 9, 2)
    weights = [state["weights"] for _, state in results.values()]
    assert all(not torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])
    pools = {method: [row["pool"] for row in rows] for method, (rows, _) in results.items()}
    assert (
        pools["data"] == pools["vanilla"] == [9, 9, 9] and pools["client"] == pools["client+data"] and pools["client"][0] == 2
    )


def test_scoring_is_counted(digits, tmp_path):
    """G: M downloads and M scalars per re-score. E: the expert once to everyone, and the clients' scores once."""
    count = {
        (score, method): [
            (r["scoring_downloads"], r["scoring_scalars"])
            for r in trained(small(score=score, rounds=2), digits, method, tmp_path)[0]
        ]
        for score in "GE"
        for method in ("client", "data", "client-random", "vanilla")
    }
    assert count["G", "client"] == [(9, 9), (18, 18)]  # K = 2 of m = 2: the pool is exhausted after each round
    assert count["E", "client"] == [(9, 9), (9, 9)]
    assert count["E", "data"] == [(9, 0), (9, 0)]
    for case in (("G", "data"), ("G", "client-random"), ("E", "client-random"), ("G", "vanilla"), ("E", "vanilla")):
        assert count[case] == [(0, 0), (0, 0)]


def test_clients_weigh_by_their_samples_and_a_dropped_one_takes_its_weight_along(digits, tmp_path, monkeypatch):
    dealt, weighed, honest_deal, honest_train = [], [], script.deal, common.train
    monkeypatch.setattr(script, "deal", lambda *r: dealt.append(honest_deal(*r)) or dealt[-1])

    def poisoned(model, start, data, batches, **flags):
        update = honest_train(model, start, data, batches, **flags)
        update.weights[0] = np.nan if len(batches) > 1 else update.weights[0]  # the first client of a round, not the expert
        return update

    def aggregate(base, x, update, clients, sizes):
        weighed.append((clients.tolist(), list(sizes), len(update.weights)))
        return x

    monkeypatch.setattr(common, "train", poisoned)
    monkeypatch.setattr(common.FedAvg, "aggregate", aggregate)
    rows, state = trained(small(clients_per_round=3, on_nonfinite="drop", rounds=3), digits, "client", tmp_path)
    sizes = [len(shard) for shard in dealt[0][0]]
    assert len(weighed) == 3 and all(own == [sizes[m] for m in clients] and n == 2 for clients, own, n in weighed)
    assert [(row["clients"], row["dropped"], row["uploads"]) for row in rows] == [(2, 1, 2), (2, 1, 4), (2, 1, 6)]
    assert state["updates"] == 9 and len(set(sizes)) > 1  # who was dropped has spent its part of the budget


def test_learning_rate_is_reset_every_round(digits, tmp_path, monkeypatch):
    rates, honest = [], common.train
    monkeypatch.setattr(common, "train", lambda *r, lr, **k: rates.append(lr) or honest(*r, lr=lr, **k))
    trained(small(lr=0.02, lr_alpha=0.1, rounds=2), digits, "client", tmp_path)
    for schedule in rates[-2:]:
        assert schedule == pytest.approx([0.02 * (1 + 0.1 * i) ** -0.75 for i in range(len(schedule))], rel=1e-12)


@pytest.mark.parametrize("method", ["client+data", "client-random"])
def test_interrupted_and_resumed_is_the_same_run(digits, tmp_path, monkeypatch, method):
    """Stopped while a pool is half used, with SCAFFOLD's state, then resumed: same rows, same weights, bit for bit."""
    config = small(rounds=6, client_b=0.6, base="scaffold")
    whole_rows, whole = trained(config, digits, method, tmp_path / "whole")
    honest = common.Run.record

    def stop(run, t, **columns):
        if t == 3:
            raise KeyboardInterrupt
        honest(run, t, **columns)

    monkeypatch.setattr(common.Run, "record", stop)
    with pytest.raises(KeyboardInterrupt):
        trained(config, digits, method, tmp_path / "cut")
    monkeypatch.setattr(common.Run, "record", honest)
    rows, state = trained(config, digits, method, tmp_path / "cut", resume=True)
    assert rows == whole_rows and torch.equal(state["weights"], whole["weights"])
    assert state["queue"] == whole["queue"] and state["updates"] == whole["updates"] == 12


def test_command_line_writes_the_two_by_two(tmp_path, capsys):
    flags = "--clients 6 --clients-per-round 3 --rounds 2 --epochs 1 --expert-epochs 1 --trials 2 --threads 1 --partition iid"
    script.main([*flags.split(), "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert len(rows) == 4 * 2 * 2 and {row["method"] for row in rows} == {"client+data", "client", "data", "vanilla"}
    assert {(row["uploads"]) for row in rows if row["round"] == "2"} == {"6"}
    final = [float(r["accuracy"]) for r in rows if r["method"] == "client" and r["round"] == "2"]
    line = next(line for line in printed.splitlines() if line.startswith("curriculum"))
    assert line.split()[-3:] == [f"{np.mean(final):.2f}", "+-", f"{np.std(final, ddof=1):.2f}"]
    one, two = csv.DictReader((tmp_path / "consistency.csv").read_text().splitlines())
    assert float(one["inside"]) < float(one["inside_before"]) and float(two["between"]) > float(two["between_before"])
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("clients.png", "accuracy.png"))


@pytest.mark.parametrize(
    "flags",
    [
        "--client-order easy",
        "--f-ord 1.5",
        "--client-b -1",
        "--clients-per-round 30 --clients 20",
        "--score L",
        "--clients 2000",
    ],
)
def test_wrong_flags_give_one_line(flags, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        script.main([*flags.split(), "--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1 and not (tmp_path / "metrics.csv").exists()


def test_presets_are_the_papers_settings():
    for label, (_, flags, sweep) in script.PRESETS.items():
        known = {field.name for field in dataclasses.fields(Config)}
        assert set(flags) | set(sweep) <= known, label
        assert set(sweep) <= {"alpha", "f_ord", "score"}, label  # the expert, shared by all settings, depends on none of them
        config = Config(**{**flags, **{name: values[0] for name, values in sweep.items()}})
        config.check()
        assert (config.clients, config.clients_per_round, config.batch_size, config.lr) == (100, 10, 10, 0.001)
    fig7 = Config(**script.PRESETS["fig7"][1])
    assert (fig7.base, fig7.score, fig7.f_ord, fig7.alpha, fig7.rounds, fig7.epochs) == ("fedprox", "E", 0.9, 0.2, 100, 10)
    assert script.methods(fig7) == ["client+data", "client", "data", "vanilla"]
    assert len(ARMS) == 16 and ARMS["client-anti+data"] == ("anti", "curriculum") and ARMS["vanilla"] == ("vanilla",) * 2


@pytest.mark.parametrize("base, models", [("moon", 1), ("solo", 9)])
def test_bases_with_models_of_their_own(digits, tmp_path, monkeypatch, base, models):
    """SOLO's clients are scored by the model each of them holds; MOON's net carries its projection head into the expert."""
    seen, honest = [], script.client_losses
    monkeypatch.setattr(script, "client_losses", lambda c, model, theta, *r: seen.append(theta) or honest(c, model, theta, *r))
    rows, _ = trained(small(base=base, rounds=3), digits, "client+data", tmp_path)
    assert len(rows) == 3 and seen[-1].reshape(-1, seen[-1].shape[-1]).shape[0] == models
    if base == "solo":
        assert (seen[-1] != seen[0]).any(1).sum() >= 2  # who trained is scored by what it trained
