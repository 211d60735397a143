"""fedavg_curriculum.py against Table 5 in exact arithmetic and a slow, literal Algorithm 1."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from algorithm_1 import (
    OFF,
    QUICK,
    SMALL,
    arrays,
    checkpoints,
    command,
    compare_with_literal,
    exact_pacing,
    is_same,
    literal_scores,
    metrics,
    small,
    state_of,
    states,
    write_data,
)

import bases
import common
import experiment
import fedavg_curriculum as script
import training
from data import load_data
from experiment import report

ROOT = Path(script.__file__).parent
ORDERS = ("curriculum", "anti", "random", "vanilla")
FAMILIES = ("linear", "quadratic", "root", "step", "exponential")


@pytest.fixture(scope="session")
def data_file(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "made_up.npz")


@pytest.fixture(autouse=True)
def called_by_its_name(monkeypatch):
    """And without figures, which take seconds; those of `reference` are drawn."""
    monkeypatch.setattr(sys, "argv", ["fedavg_curriculum.py"])
    monkeypatch.setattr(report, "plot", lambda *args, **options: None)


def rng(seed=0):
    return np.random.default_rng(seed)


# ------------------------------------------------------------------------------------------ pacing

TABLE = {  # N = T = 500, a = .8, b = .2 at steps 0, 100, 200, 300, 399, 400
    "linear": [100, 200, 300, 400, 499, 500],
    "quadratic": [100, 125, 200, 325, 498, 500],
    "root": [100, 300, 382, 446, 499, 500],
    "step": [100, 100, 100, 100, 100, 500],
    "exponential": [100, 100, 102, 132, 490, 500],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_pacing_table(family):
    steps = (0, 100, 200, 300, 399, 400)
    assert [script.pacing(family, step, 500, 500, 0.8, 0.2) for step in steps] == TABLE[family]


def test_pacing_in_exact_arithmetic():
    """500 random (a, b, N, T), every step: the value, its ends, its range, and it never falls."""
    draw = rng()
    for case in range(500):
        family = FAMILIES[case % 5]
        T = int(draw.integers(1, 21))
        N = int(draw.integers(1, 200))
        a = Decimal(int(draw.integers(1, 150))) / 100
        b = Decimal(int(draw.integers(0, 100))) / 100
        steps = range(T + 5)
        g = [script.pacing(family, step, T, N, float(a), float(b)) for step in steps]
        assert g == [max(1, int(exact_pacing(family, step, T, N, a, b))) for step in steps]
        assert g[0] == max(1, int(N * b))
        assert g == sorted(g)
        assert g[0] >= 1 and g[-1] <= N
        assert all(g[step] == N for step in steps if step >= a * T)


@pytest.mark.parametrize("family", FAMILIES)
def test_pacing_admits_all_where_a_is_0_or_b_is_1(family):
    for a, b in ((0, 0.2), (0, 0), (0.8, 1), (1e6, 1.0)):
        assert {script.pacing(family, step, 30, 17, a, b) for step in range(30)} == {17}


def test_pacing_keeps_its_promise_at_a_times_t():
    """In doubles .55 * 100 is above 55: the step must not come a step late."""
    for family in FAMILIES:
        for a, T in ((0.55, 100), (0.28, 25), (0.28, 50), (0.07, 100), (0.29, 100)):
            assert script.pacing(family, round(a * T), T, 50, a, 0.2) == 50


# ----------------------------------------------------------------------------------------- sampler


def all_at_once(step):
    return 10**6


def order_of(difficulty, seed=0):
    """The places in the order of their admission: one more at every step, the newcomer is told."""
    places = []
    N = len(difficulty)
    for g in range(1, N + 1):
        pacing = {0: g}.__getitem__
        sampler = script.CurriculumBatchSampler(difficulty, g, 1, pacing, rng(), rng(seed))
        [newcomer] = set(next(iter(sampler))) - set(places)
        places.append(newcomer)
    return places


def test_the_easiest_are_admitted_first():
    assert order_of([0.3, 0.1, 0.9, 0.5]) == [1, 0, 3, 2]
    difficulty = rng(2).random(50)
    for seed in range(3):
        assert order_of(difficulty, seed) == np.argsort(difficulty).tolist()
        assert order_of(-difficulty, seed) == np.argsort(difficulty)[::-1].tolist()


def test_ties_are_broken_by_chance():
    """With one hard sample among 20 the others are equally likely at any place."""
    difficulty = (np.arange(20) == 7).astype(float)
    first = np.zeros(20)
    for seed in range(2000):
        sampler = script.CurriculumBatchSampler(
            difficulty, 10, 1, lambda step: 10, rng(0), rng(seed)
        )
        first[next(iter(sampler))] += 1
    assert first[7] == 0
    assert np.abs(np.delete(first, 7) - 2000 * 10 / 19).max() < 5 * np.sqrt(500)


def test_every_batch_is_full_and_a_pass_is_used_up_before_the_next():
    draw = rng(5)
    for _ in range(200):
        n, T, B = (int(draw.integers(1, most)) for most in (40, 40, 12))
        difficulty = draw.random(n)
        g = np.sort(draw.integers(1, n + 1, T)).tolist()
        sampler = script.CurriculumBatchSampler(difficulty, B, T, g.__getitem__, draw)
        easy_first = np.argsort(difficulty).tolist()
        left = []
        batches = list(sampler)
        assert len(batches) == len(sampler) == T
        for step, batch in enumerate(batches):
            assert len(batch) == min(B, n)
            for place in batch:
                left = left or easy_first[: g[step]]
                assert place in left
                left = [other for other in left if other != place]


def test_first_batches_are_uniform_over_the_prefix():
    counts = np.zeros(30)
    difficulty = -np.arange(30)
    for seed in range(2000):
        sampler = script.CurriculumBatchSampler(difficulty, 5, 1, lambda step: 20, rng(seed))
        counts[next(iter(sampler))] += 1
    assert (counts[:10] == 0).all()
    assert np.abs(counts[10:] - 500).max() < 5 * np.sqrt(500 * 0.75)


class Samples(torch.utils.data.Dataset):
    """Somebody else's data set: sample i is its own index and label."""

    def __init__(self, y):
        self.y = y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return i, int(self.y[i])


def test_the_sampler_in_a_plain_dataloader():
    y = rng(1).integers(0, 3, 23)
    difficulty = rng(2).random(23)
    samplers = []
    for _ in range(2):
        samplers.append(
            script.CurriculumBatchSampler(difficulty, 4, 18, lambda step: 5 + step, rng(3))
        )
    loader = torch.utils.data.DataLoader(Samples(y), batch_sampler=samplers[0])
    batches = list(loader)
    expected = list(samplers[1])
    assert len(batches) == len(loader) == 18
    assert [x.tolist() for x, _ in batches] == expected
    assert [labels.tolist() for _, labels in batches] == [y[batch].tolist() for batch in expected]
    again = [x.tolist() for x, _ in loader]
    assert again != expected  # a second time it draws anew, as torch's samplers do
    assert len(again) == 18


def test_a_batch_is_no_larger_than_the_data_and_no_step_is_without_a_sample():
    sampler = script.CurriculumBatchSampler([0.5, 0.1, 0.2], 10, 2, all_at_once, rng())
    assert [sorted(batch) for batch in sampler] == [[0, 1, 2]] * 2
    sampler = script.CurriculumBatchSampler([0.5, 0.1, 0.2], 1, 3, lambda step: step, rng())
    first, second, third = sampler
    assert first == second == [1]
    assert third[0] in (1, 2)


@pytest.mark.parametrize("difficulty", [0.5, [1.0, np.nan], [[1.0, 2.0]]])
def test_the_sampler_wants_a_number_for_each_sample(difficulty):
    with pytest.raises(ValueError, match="^difficulty: wanted one number for each sample"):
        script.CurriculumBatchSampler(difficulty, 1, 1, all_at_once, rng())


# ------------------------------------------------------------------------ a client's round of steps


def drawn(config, order="curriculum", n=23, t=2, m=3, difficulty=None):
    """The batches of a client whose samples are 100, 101, ..."""
    fl = SimpleNamespace(shards={m: np.arange(100, 100 + n)}, streams=common.Streams(1))
    if order in ("random", "vanilla"):
        difficulty = np.zeros(n)
    elif difficulty is None:
        difficulty = rng(1).random(n)
    config = dataclasses.replace(config, order=order)
    return script.draw_client_batches(config, fl, t, m, difficulty)


@pytest.mark.parametrize("scope", ["round", "global"])
def test_every_order_takes_as_many_steps_and_samples(scope):
    config = small(pacing_scope=scope)
    for n in (1, 3, 4, 5, 23):
        for order in ORDERS:
            batches = drawn(config, order, n)
            assert batches.shape == (2 * -(-n // 4), 4)  # E ceil(N/B)
            assert ((batches >= 0).sum(1) == min(4, n)).all()
            assert (batches[:, min(4, n) :] == -1).all()
            assert batches.max() < 100 + n


@pytest.mark.parametrize("flags", [{"pacing_b": 1.0}, {"pacing_a": 0.0}])
@pytest.mark.parametrize("scope", ["round", "global"])
def test_without_pacing_all_orders_are_one_schedule(flags, scope):
    config = small(pacing_scope=scope, **flags)
    first = drawn(config, "curriculum")
    for order in ORDERS[1:]:
        assert np.array_equal(first, drawn(config, order))


def test_vanilla_passes_over_the_whole_shard_again_and_again():
    batches = drawn(small(epochs=7), "vanilla")  # 42 steps hold 7 passes of 23 and 7 samples more
    assert batches.shape == (42, 4)
    passes = batches.ravel()[: 7 * 23].reshape(7, 23)
    assert (np.sort(passes, axis=1) == np.arange(100, 123)).all()
    assert len({tuple(one_pass) for one_pass in passes.tolist()}) == 7


def test_curriculum_admits_the_easy_and_anti_the_hard():
    difficulty = rng(0).random(50)
    rank = np.argsort(np.argsort(difficulty))
    config = small(epochs=4, batch_size=5, pacing_a=0.8, pacing_b=0.2)
    for order, place in (("curriculum", rank), ("anti", 49 - rank)):
        batches = drawn(config, order, 50, difficulty=difficulty)
        for step, batch in enumerate(batches):  # T = 40, so g grows from 10 to 50 over 32 steps
            assert place[batch - 100].max() < 10 + 40 * min(step / 32, 1)
        assert place[batches[0] - 100].max() >= 5  # of all that are admitted, not the first few


def test_random_admits_others_in_each_round_and_curriculum_the_same():
    config = small(epochs=4, batch_size=5, pacing_a=0.8, pacing_b=0.2)
    first = {"curriculum": set(), "random": set()}
    for order, samples in first.items():
        for t in range(20):
            samples.update(drawn(config, order, 50, t=t)[0].tolist())
    assert len(first["curriculum"]) == 10
    assert len(first["random"]) > 25


def test_global_scope_paces_across_the_rounds():
    """Round t goes on where round t - 1 stopped: one pacing function of all rounds * T steps."""
    config = small(rounds=5, epochs=2, batch_size=10, pacing_a=0.6, pacing_b=0.1)
    config = dataclasses.replace(config, pacing_scope="global")
    difficulty = np.arange(100.0)
    hardest = []
    for t in range(5):
        batches = drawn(config, n=100, t=t, m=0, difficulty=difficulty)
        hardest += (batches.max(1) - 100).tolist()
    for i, rank in enumerate(hardest):
        assert rank < min(100, 10 + 90 * min(i / 60, 1))
    assert max(hardest[:5]) < 18
    assert min(hardest[-40:]) > 50
    afresh = dataclasses.replace(config, pacing_scope="round")
    assert drawn(afresh, n=100, t=4, m=0, difficulty=difficulty)[0].max() < 110


@pytest.mark.parametrize("rounds", [2, 5])
def test_global_pacing_ends_exactly_at_a_times_all_steps(rounds):
    """With a = 1/2 all are in from half of all steps on, and b = 0 begins with one sample."""
    config = small(rounds=rounds, epochs=4, batch_size=1, pacing_a=0.5, pacing_b=0.0)
    config = dataclasses.replace(config, pacing_scope="global", pacing="step")
    samples = []
    for t in range(rounds):
        batches = drawn(config, n=12, t=t, m=0, difficulty=np.arange(12.0))
        samples += batches[:, 0].tolist()
    half = rounds * 4 * 12 // 2
    assert set(samples[:half]) == {100}
    assert set(samples[half : half + 12]) == set(range(100, 112))  # a whole pass, at once


def test_the_streams_of_a_client_do_not_depend_on_who_else_takes_part():
    config = small()
    for order in ORDERS:
        batches = drawn(config, order)
        assert np.array_equal(batches, drawn(config, order))
        assert not np.array_equal(batches, drawn(config, order, t=2, m=4))
        assert not np.array_equal(batches, drawn(config, order, t=1, m=3))


def test_the_learning_rate_falls_within_a_round():
    config = small(lr=0.5, lr_alpha=0.2, lr_power=0.6)
    wanted = [0.5 * (1 + 0.2 * i) ** -0.6 for i in range(7)]
    assert script.falling_lr(config, 7) == pytest.approx(wanted)
    assert script.falling_lr(small(lr=0.5), 3).tolist() == [0.5] * 3


# ------------------------------------------------------------------------------------ Algorithm 1

ARMS = [
    {"order": "curriculum"},
    {"order": "curriculum", "score": "L", "pacing": "root", "base": "fednova"},
    {"order": "anti", "score": "LG", "pacing": "quadratic", "base": "scaffold"},
    {
        "order": "curriculum",
        "score": "G_pred",
        "pacing": "exponential",
        "base": "fedprox",
        "mu": 0.3,
    },
    {"order": "anti", "score": "L_pred", "pacing": "step", "pacing_scope": "global"},
    {"order": "curriculum", "score": "LG_pred", "lr": 0.15, "momentum": 0.0},
    {"order": "anti", "score": "LG_pred", "partition": "dirichlet", "alpha": 0.5},
    {"order": "curriculum", "score": "E", "pacing": "quadratic", "pacing_b": 0.0},
    {"order": "curriculum", "base": "solo", "score": "G"},
    {"order": "anti", "model": "dropped", "score": "L"},
    {"order": "random", "pacing": "root"},
    {"order": "random", "pacing_scope": "global", "base": "fedprox", "mu": 0.3},
    {"order": "vanilla", "base": "scaffold", "partition": "label-skew"},
    {
        "order": "vanilla",
        "batch_size": 20,
        "partition": "dirichlet",
        "alpha": 0.5,
        "model": "dropped",
    },
]


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: "-".join(map(str, arm.values())))
def test_a_run_equals_a_literal_algorithm_1(arm, data_file, tmp_path):
    """Weights to 1e-9 and every column of metrics.csv."""
    flags = OFF | SMALL | {"dataset": str(data_file)} | arm
    if arm.get("model"):
        flags["model"] = f"{ROOT}/tests/algorithm_1.py:Dropped"
    script.main([*command(flags), "--out", str(tmp_path)])
    compare_with_literal(script.Config(**flags), arm["order"], tmp_path)


def test_the_literal_run_has_clients_that_return_after_a_gap_and_poor_ones(data_file):
    config = small(**OFF | {"dataset": str(data_file)})
    parts = []
    for t in range(3):
        everyone = common.Streams(config.seed)("select", t).permutation(6)
        parts.append(set(everyone[:3].tolist()))
    assert (parts[0] & parts[2]) - parts[1] and parts[1] & parts[2]
    config = dataclasses.replace(config, partition="dirichlet", alpha=0.5, batch_size=20)
    streams = common.Streams(config.seed)
    sizes = common.Federation(config, load_data(str(data_file)), streams).sizes
    assert (sizes < 20).any() and (sizes > 7).any(), sizes


def test_the_orders_and_scores_differ_where_they_should(data_file, tmp_path):
    flags = SMALL | {"dataset": data_file, "clients": 5, "clients_per_round": 3, "rounds": 4}
    flags |= {"epochs": 5, "batch_size": 4, "alpha": 1.0, "pacing_b": 0.25, "lr": 0.05}
    nets = {}
    for order in ORDERS:
        state = state_of(script.main, flags | {"order": order}, tmp_path / order)
        nets[order] = state["theta"]
    for score in script.SCORES[1:]:
        arm = {"order": "curriculum", "score": score}
        nets[score] = state_of(script.main, flags | arm, tmp_path / score)["theta"]
    names = list(nets)
    for i, a in enumerate(names):
        for b in names[:i]:
            assert not torch.equal(nets[a], nets[b]), (a, b)


# -------------------------------------------------------------------------------------- difficulty


def federation(data_file, **flags):
    config = small(dataset=str(data_file), **flags)
    fl = common.Federation(config, load_data(str(data_file)), common.Streams(0))
    fl.shards = [np.arange(0, 20), np.arange(20, 33), np.arange(33, 60), np.arange(9), np.arange(8)]
    fl.sizes = np.array([len(shard) for shard in fl.shards])
    return config, fl


def scored(data_file, score, own_nets, expert=None) -> list:
    """The difficulties of clients 0 and 2."""
    config, fl = federation(data_file, score=score)
    state = fl.start() | {"theta": fl.model.init(1), "own_nets": own_nets}
    if expert is not None:
        expert = [losses for losses, _ in fl.score(expert, fl.everyone)]
    return script.score_samples(config, fl, state, np.array([0, 2]), expert)


def nets(data_file, *seeds):
    return [2 * federation(data_file)[1].model.init(seed) for seed in seeds]


def test_a_client_without_a_net_of_its_own_has_the_global_one(data_file):
    stranger = {1: nets(data_file, 5)[0]}  # client 1 has a net, and does not take part
    for fallback, score in (("G", "L"), ("G", "LG"), ("G_pred", "L_pred")):
        found = scored(data_file, score, stranger)
        wanted = scored(data_file, fallback, {})
        for a, b in zip(found, wanted, strict=True):
            assert a == pytest.approx(b, abs=1e-12)
    for difficulty in scored(data_file, "LG_pred", stranger):
        assert (difficulty == 0).all()  # all easy


@pytest.mark.parametrize("score", [score for score in script.SCORES if score != "E"])
def test_difficulty_by_a_loop(score, data_file):
    x, y, *_ = arrays()
    [own_net] = nets(data_file, 7)
    config, fl = federation(data_file, score=score)
    theta = fl.model.init(1)
    found = scored(data_file, score, {2: own_net})
    shards = (np.arange(20), np.arange(33, 60))
    for difficulty, shard, last_net in zip(found, shards, (None, own_net), strict=True):
        wanted = literal_scores(config, theta, last_net, None, x[shard], y[shard])
        assert difficulty == pytest.approx(wanted, abs=1e-10)
    if score != "LG_pred":
        assert len(set(found[1])) > 1


def test_predictions_are_compared_with_labels_and_with_one_another():
    y = np.array([0, 0, 0, 1])
    guess_G = np.array([0, 1, 1, 2])
    guess_L = np.array([0, 0, 1, 3])
    table = {"G_pred": [0, 1, 1, 1], "L_pred": [0, 0, 1, 1], "LG_pred": [0, 1, 0, 1]}
    for score, wanted in table.items():
        assert script.difficulty_by(score, y, None, guess_G, None, guess_L).tolist() == wanted


def test_an_expert_equal_to_the_global_net_scores_as_g(data_file):
    theta = federation(data_file)[1].model.init(1)
    pairs = zip(scored(data_file, "E", {}, theta), scored(data_file, "G", {}), strict=True)
    for by_expert, by_global in pairs:
        assert by_expert == pytest.approx(by_global, abs=1e-12)


@pytest.mark.parametrize("score", script.SCORES)
def test_scoring_leaves_no_trace(score, data_file):
    own_net, expert = nets(data_file, 7, 8)
    own_nets = {2: own_net}
    copies = (own_net.clone(), expert.clone())
    torch_state = torch.get_rng_state()
    numpy_state = np.random.get_state()[1].copy()
    scored(data_file, score, own_nets, expert)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    assert torch.equal(own_net, copies[0]) and torch.equal(expert, copies[1])
    assert set(own_nets) == {2}


def test_a_net_that_is_kept_holds_no_other_memory():
    """A row of the round's (K, P) would put all of them into every checkpoint."""
    state = {"own_nets": {}}
    thetas = torch.arange(15.0).reshape(3, 5)
    update = SimpleNamespace(clients=np.array([4, 7, 9]), gather_thetas=lambda: thetas)
    script.keep_own_nets(state, update)
    assert [*state["own_nets"]] == [4, 7, 9]
    for theta, row in zip(state["own_nets"].values(), thetas, strict=True):
        assert torch.equal(theta, row)
        assert theta.untyped_storage().nbytes() == 5 * 4


def test_momentum_is_fresh_in_every_round(data_file, tmp_path):
    """One client, two rounds of one step, b = 1: plain SGD, whatever the momentum."""
    flags = SMALL | {"dataset": data_file, "clients": 1, "clients_per_round": 1, "rounds": 2}
    flags |= {"epochs": 1, "batch_size": 60, "weight_decay": 0.0, "order": "vanilla"}
    plain = state_of(script.main, flags | {"momentum": 0.0}, tmp_path / "plain")
    heavy = state_of(script.main, flags | {"momentum": 0.9}, tmp_path / "heavy")
    assert torch.equal(plain["theta"], heavy["theta"])


# ---------------------------------------------------------------------------------- whole commands


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """All orders and two trials, by this process, and the figures that it drew by file name."""
    from matplotlib.figure import Figure

    folder = tmp_path_factory.mktemp("reference")
    figures = {}
    save = Figure.savefig

    def keep(figure, path, **options):
        figures[Path(path).name] = figure
        save(figure, path, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", keep)
        patch.setattr(sys, "argv", ["fedavg_curriculum.py"])
        script.main([*QUICK, "--trials", "2", "--out", str(folder)])
    return folder, figures


def final_accuracies(folder) -> dict[str, list[float]]:
    """Of each order, in its last round, by trial."""
    final = {order: [] for order in ORDERS}
    for row in metrics(folder):
        if row["round"] == "4":
            final[row["method"]].append(float(row["accuracy"]))
    return final


def test_orders_png_shows_the_final_round(reference):
    folder, figures = reference
    axes = figures["orders.png"].axes[0]
    bars = []
    for container in axes.containers:
        bars += [float(bar.get_width()) for bar in container]
    final = final_accuracies(folder)
    assert bars == pytest.approx([np.mean(final[order]) for order in ORDERS])
    assert [label.get_text() for label in axes.get_yticklabels()] == list(ORDERS)
    widths = [np.ptp(line.get_xdata()) / 2 for line in axes.lines]
    spread = [np.std(final[order], ddof=1) for order in ORDERS]
    whiskers = [width for width in widths if width > 0]
    assert whiskers == pytest.approx([std for std in spread if std > 0])
    assert (folder / "orders.png").stat().st_size > 5000


def test_what_an_order_gains_over_vanilla_is_printed(reference, capsys, tmp_path):
    """12.7062 is the .975 quantile of Student's t with one degree of freedom."""
    folder, _ = reference
    final = final_accuracies(folder)
    df = pd.read_csv(folder / "metrics.csv", dtype={"setting": str}).fillna({"setting": ""})
    script.plot(df, tmp_path)
    lines = capsys.readouterr().out.partition("minus that of vanilla")[2].splitlines()
    for order in ("curriculum", "anti", "random"):
        gains = np.subtract(final[order], final["vanilla"])
        half = 12.7062 * abs(gains[0] - gains[1]) / 2
        mean = gains.mean()
        [line] = [line for line in lines if line.split()[:1] == [order]]
        wanted = f"{mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}]"
        assert line.split(None, 1)[1] == wanted


def test_an_expert_is_that_of_its_own_epochs(data_file, tmp_path):
    """Two experts in one folder, each as in a folder of its own."""
    flags = ["--dataset", str(data_file), *QUICK, "--rounds", "2"]
    flags += ["--order", "curriculum", "--score", "E"]
    script.main([*flags, "--expert-epochs", "1", "9", "--out", str(tmp_path / "both")])
    both = metrics(tmp_path / "both")
    for epochs in ("1", "9"):
        script.main([*flags, "--expert-epochs", epochs, "--out", str(tmp_path / epochs)])
        rows = []
        for row in both:
            if row["setting"] == f"expert_epochs={epochs}":
                rows.append(row | {"setting": ""})
        assert len(rows) == 2
        assert rows == metrics(tmp_path / epochs)
    assert both[1]["train_loss"] != both[3]["train_loss"]


def count_runs(monkeypatch) -> list:
    """The configs of the runs that are trained from now on."""
    federate = script.federate
    configs = []

    def spy(config, fl, run):
        configs.append(config)
        federate(config, fl, run)

    monkeypatch.setattr(script, "federate", spy)
    return configs


def test_a_sweep_trains_once_what_does_not_read_it(data_file, tmp_path, monkeypatch):
    """random asks for no score, vanilla for no pacing either: Fig 3's vanilla is trained once."""
    configs = count_runs(monkeypatch)
    flags = ["--dataset", str(data_file), *QUICK, "--rounds", "1", "--order", *ORDERS]
    flags += ["--score", "G", "L", "--pacing-a", "0.5", "0.8"]
    script.main([*flags, "--out", str(tmp_path)])
    trained = [config.order for config in configs]
    count = {order: trained.count(order) for order in ORDERS}
    assert count == {"curriculum": 4, "anti": 4, "random": 2, "vanilla": 1}
    rows = metrics(tmp_path)
    assert len(rows) == 4 * 4  # its rows are shown in every setting
    assert len({row["setting"] for row in rows}) == 4
    assert len({row["accuracy"] for row in rows if row["method"] == "vanilla"}) == 1


@pytest.mark.parametrize(
    ("flags", "distinct"),
    [
        ("--order anti --score G E --expert-epochs 1 2", 3),  # G asks for no expert
        ("--order vanilla --base fedavg fedprox --mu 0.1 0.2", 3),  # FedAvg has no mu
        ("--order vanilla --lr-alpha 0 0.1 --lr-power 0 0.75", 2),  # three of four are constant
        ("--order vanilla --alpha 0.1 1 --partition iid dirichlet", 3),  # iid has no alpha
    ],
)
def test_what_another_flag_switches_off_is_trained_once(
    flags, distinct, data_file, tmp_path, monkeypatch
):
    configs = count_runs(monkeypatch)
    words = flags.split()
    start = ["--dataset", str(data_file), *QUICK, "--rounds", "1", "--out", str(tmp_path)]
    script.main([*start, *words])
    assert len(configs) == distinct
    assert len({row["setting"] for row in metrics(tmp_path)}) == 4
    backwards = [*words[:-2], words[-1], words[-2]]  # others represent the same runs
    script.main([*start, *backwards, "--resume"])
    experts = len([*(tmp_path / "checkpoints").glob("expert*")])
    assert len(checkpoints(tmp_path)) == distinct
    assert experts == (2 if "E" in words else 0)


@pytest.mark.parametrize("order", ["random", "vanilla"])
def test_what_an_order_is_declared_not_to_read_it_does_not_read(order, data_file, tmp_path):
    flags = SMALL | {"dataset": data_file, "clients": 5, "clients_per_round": 3, "rounds": 2}
    flags |= {"epochs": 2, "order": order}
    changed = {"score": "L", "expert_epochs": 2, "pacing": "root", "pacing_a": 0.3}
    changed |= {"pacing_b": 0.5, "pacing_scope": "global", "lr_power": 0.1, "mu": 0.7}
    changed |= {"server_lr": 0.3, "lr_alpha": 0.0}
    read = script.Config(order=order).results_depend_on()
    unread = {name: value for name, value in changed.items() if name not in read}
    assert len(unread) == {"random": 6, "vanilla": 10}[order]
    plain = state_of(script.main, flags, tmp_path / "plain")
    other = state_of(script.main, flags | unread, tmp_path / "other")
    assert is_same(plain, other)


@pytest.mark.parametrize("model", ["lenet5", "fedgen-cnn"])
@pytest.mark.parametrize("score", ["G", "L"])
def test_with_b_1_the_four_orders_are_one_program(score, model, tmp_path, data_file):
    """Bit for bit; fedgen-cnn would tell if scoring touched a statistic of its batch norms."""
    flags = [*QUICK, "--rounds", "3", "--pacing-b", "1", "--model", model, "--score", score]
    script.main([*flags, "--dataset", str(data_file), "--out", str(tmp_path)])
    first, *others = [state["theta"] for state in states(tmp_path).values()]
    assert len(others) == 3
    for theta in others:
        assert torch.equal(first, theta)
    by_order = {order: [] for order in ORDERS}
    for row in metrics(tmp_path):
        by_order[row.pop("method")].append(row)
    assert len(by_order["vanilla"]) == 3
    for rows in by_order.values():
        assert rows == by_order["vanilla"]


def test_the_reference_learns_and_its_arms_differ(reference):
    rows = metrics(reference[0])
    thetas = [state["theta"] for state in states(reference[0]).values()]
    assert len(rows) == 4 * 2 * 4
    assert len(thetas) == 8
    for i in range(8):
        for j in range(i):
            assert not torch.equal(thetas[i], thetas[j])
    assert max(float(row["accuracy"]) for row in rows) > 30
    samples = {(row["trial"], row["round"], row["samples"]) for row in rows}
    assert len(samples) == 2 * 4  # as many in every order


def test_the_same_command_twice_and_fewer_tests_change_no_bit(reference, tmp_path):
    orders = ["vanilla", "anti", "curriculum"]
    flags = [*QUICK, "--trials", "2", "--eval-every", "3", "--order", *orders]
    script.main([*flags, "--out", str(tmp_path)])
    found = states(tmp_path)
    expected = states(reference[0])
    assert len(found) == 6
    for run, state in found.items():
        assert is_same(state, expected[run])
    rows = metrics(tmp_path)
    assert len(rows) == 3 * 2 * 4
    assert {row["round"] for row in rows if row["accuracy"]} == {"3", "4"}
    tested = {}
    for row in metrics(reference[0]):
        tested[row["method"], row["trial"], row["round"]] = row
    for row in rows:
        other = tested[row["method"], row["trial"], row["round"]]
        assert row["train_loss"] == other["train_loss"]
        assert row["accuracy"] in ("", other["accuracy"])


def test_two_jobs_change_no_bit(tmp_path, data_file):
    """Both workers of a trial want the same expert at the same time."""
    flags = [*QUICK, "--rounds", "2", "--score", "E", "--expert-epochs", "1"]
    flags += ["--order", "curriculum", "anti", "--dataset", str(data_file)]
    line = [sys.executable, ROOT / "fedavg_curriculum.py", *flags, "--jobs", "2", "--out", "two"]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    subprocess.run(line, env=environment, cwd=tmp_path, check=True, capture_output=True)
    script.main([*flags, "--out", str(tmp_path / "one")])
    assert len(states(tmp_path / "one")) == 2
    assert metrics(tmp_path / "two") == metrics(tmp_path / "one")
    assert is_same(states(tmp_path / "two"), states(tmp_path / "one"))


def test_killed_and_resumed(reference, tmp_path):
    """SIGKILL in the third of eight runs, then --resume: the same table, every bit of the state."""
    flags = [*QUICK, "--trials", "2", "--out", str(tmp_path)]
    line = [sys.executable, ROOT / "fedavg_curriculum.py", *flags]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(line, env=dict(os.environ, OMP_NUM_THREADS="1"), **silent)
    deadline = time.monotonic() + 120
    while len(checkpoints(tmp_path)) < 3 and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert 3 <= len(checkpoints(tmp_path)) < 8
    assert not (tmp_path / "metrics.csv").exists()
    script.main([*flags, "--resume"])
    assert metrics(tmp_path) == metrics(reference[0])
    assert is_same(states(tmp_path), states(reference[0]))
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("base", bases.BASES)
def test_every_base_resumes_to_the_same_bits(base, data_file, tmp_path, monkeypatch):
    """Ctrl-C in the training of round 4 of 5; what bases and scores remember must survive."""
    flags = [*QUICK, "--rounds", "5", "--base", base, "--score", "LG", "--order", "anti"]
    flags += ["--dataset", str(data_file)]
    flags += ["--clients", "4", "--clients-per-round", "2", "--parts", "16"]
    script.main([*flags, "--out", str(tmp_path / "whole")])
    train = training.train
    calls = []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return train(*args)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(training, "train", interrupted)
        script.main([*flags, "--out", str(tmp_path / "cut")])
    assert stop.value.code == 130
    [path] = checkpoints(tmp_path / "cut")
    assert 1 <= len(torch.load(path, weights_only=True)["content"]["rows"]) <= 3
    script.main([*flags, "--out", str(tmp_path / "cut"), "--resume"])
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert is_same(states(tmp_path / "cut"), states(tmp_path / "whole"))


@pytest.mark.parametrize(
    "flags",
    [
        "--order best",
        "--order",
        "--score GL",
        "--pacing cubic",
        "--pacing-a -1",
        "--pacing-a nan",
        "--pacing-b 1.5",
        "--pacing-b -0.1",
        "--pacing-scope epoch",
        "--lr-alpha -1",
        "--lr-power inf",
        "--expert-epochs 0",
        "--preset table9",
        "--clients 3",  # fewer than --clients-per-round
        "--clients 1438",  # one more than digits has samples
        "--parts 2000",
    ],
)
def test_a_wrong_flag_costs_one_line(flags, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        script.main([*flags.split(), "--rounds", "1"])
    shown = capsys.readouterr()
    assert stop.value.code == 2
    assert shown.out == ""
    assert len(shown.err.strip().split("\n")) == 1
    assert "error: " in shown.err


@pytest.mark.parametrize(
    ("flag", "words"), [("--help", "--pacing-scope"), ("--list-presets", "fig10")]
)
def test_help_and_presets(flag, words, capsys):
    with pytest.raises(SystemExit) as stop:
        script.main([flag])
    shown = capsys.readouterr()
    assert stop.value.code == 0
    assert words in shown.out
    assert shown.err == ""


def test_a_mistake_in_a_process_of_its_own(tmp_path):
    line = [sys.executable, ROOT / "fedavg_curriculum.py", "--dataset", str(tmp_path / "none.npz")]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_more_rounds_may_follow_where_no_round_depends_on_their_number():
    assert not small().reads_rounds()
    assert small(pacing_scope="global").reads_rounds()
    assert not small(pacing_scope="global", order="vanilla").reads_rounds()


# ----------------------------------------------------------------------------------------- presets

BETAS = {"alpha": (0.05, 0.2, 0.9)}
PARTS = {"parts": (100, 200, 400, 800)}
PACED = {"pacing": FAMILIES, "pacing_a": (0.1, 0.5, 0.8), "order": ORDERS[:3]}
EXPERT = {"expert_epochs": 20, "score": ("E", "G"), "order": ("curriculum", "random")}
BASES = ("fedavg", "fedprox", "fednova", "scaffold")
SKEWS = {"partition": ("iid", "label-skew")}
PUBLISHED = {  # what each table and figure of the paper varies, and what it holds fixed
    "table1": BETAS,
    "table2": BETAS | {"base": "fedprox"},
    "table3": BETAS | {"base": "fednova"},
    "table4": BETAS | {"base": "scaffold"},
    "fmnist": BETAS | {"base": BASES, "dataset": "fmnist"},
    "fig1": SKEWS | {"score": ("G", "L", "LG", "G_pred", "L_pred", "LG_pred")},
    "fig2": PACED | {"partition": "iid"},
    "fig3": {
        "partition": ("iid", "dirichlet"),
        "alpha": 0.05,
        "pacing_b": (0.0025, 0.1, 0.2, 0.5, 0.8),
    },
    "fig6": EXPERT | {"alpha": (0.05, 0.2)},
    "fig6-iid": EXPERT | {"partition": "iid"},
    "fig10": PARTS | {"partition": "label-skew"},
    "fig10-fedprox": PARTS | {"alpha": 0.05, "base": "fedprox"},
    "fig11": BETAS | {"dataset": "cifar100"},
    "fig11-fedprox": BETAS | {"dataset": "cifar100", "base": "fedprox"},
    "fig11-fednova": BETAS | {"dataset": "cifar100", "base": "fednova"},
    "fig11-scaffold": BETAS | {"dataset": "cifar100", "base": "scaffold"},
    "fig12": PACED | {"alpha": 0.05},
}
HELD = {"dataset": "cifar10", "model": "lenet5", "partition": "dirichlet", "base": "fedavg"}
HELD |= {"score": "G", "order": ORDERS, "clients": 100, "clients_per_round": 10, "rounds": 100}
HELD |= {"epochs": 10, "batch_size": 10, "momentum": 0.9, "trials": 3, "seed": 202207}
HELD |= {"lr": 0.001, "lr_alpha": 0.001, "lr_power": 0.75, "weight_decay": 5e-4, "parts": 0}
HELD |= {"mu": -1.0, "pacing": "linear", "pacing_a": 0.8, "pacing_b": 0.2, "pacing_scope": "round"}
RESNET = {"model": "resnet9", "lr": 0.01, "lr_power": 0.0, "weight_decay": 0.0}


def swept(argv) -> dict[str, list]:
    """All values that each flag takes in the runs of a command."""
    configs, _ = experiment.parse(script.Config, script.PRESETS, "d", argv)
    values = {}
    for field in dataclasses.fields(script.Config):
        values[field.name] = list(dict.fromkeys(getattr(config, field.name) for config in configs))
    return values


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_hold_the_papers_values(preset):
    wanted = HELD | PUBLISHED[preset]
    if preset.startswith("fig11"):
        wanted |= RESNET
    found = swept(["--preset", preset])
    default = swept(["--order", "curriculum"])
    for name, values in found.items():
        if name not in wanted:
            assert values == default[name], name
        elif isinstance(wanted[name], tuple):
            assert values == list(wanted[name]), name
        else:
            assert values == [wanted[name]], name


def test_no_other_presets():
    assert {*script.PRESETS} == {*PUBLISHED}


def test_explicit_flags_win_over_a_preset():
    found = swept(["--preset", "table1", "--alpha", "0.3", "--lr", "0.5"])
    assert found["alpha"] == [0.3]
    assert found["lr"] == [0.5]
    assert found["dataset"] == ["cifar10"]
