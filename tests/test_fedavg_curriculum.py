"""fedavg_curriculum.py against Table 5 in exact arithmetic and a slow, literal Algorithm 1."""

import os
import subprocess
import sys
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
    checkpoints,
    command,
    compare_with_literal,
    exact_pacing,
    is_same,
    metrics,
    states,
    write_data,
)

import fedavg_curriculum as script
from experiment import figures

ROOT = Path(script.__file__).parent
FAMILIES = ("linear", "quadratic", "root", "step", "exponential")


@pytest.fixture(scope="session")
def data_file(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "made_up.npz")


@pytest.fixture(autouse=True)
def called_by_its_name(monkeypatch):
    """And without figures, which take seconds."""
    monkeypatch.setattr(sys, "argv", ["fedavg_curriculum.py"])
    monkeypatch.setattr(figures, "plot", lambda *args, **options: None)


def rng(seed=0):
    return np.random.default_rng(seed)


# ------------------------------------------------------------------------------------------ pacing


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


@pytest.mark.parametrize("difficulty", [0.5, [1.0, np.nan], [[1.0, 2.0]]])
def test_the_sampler_wants_a_number_for_each_sample(difficulty):
    with pytest.raises(ValueError, match="^difficulty: wanted one number for each sample"):
        script.CurriculumBatchSampler(difficulty, 1, 1, all_at_once, rng())


# ------------------------------------------------------------------------------------ Algorithm 1

ARMS = [
    {"order": "curriculum"},
    {"order": "curriculum", "score": "L", "pacing": "root", "base": "fednova"},
    {"order": "anti", "score": "LG", "pacing": "quadratic"},
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
    {"order": "vanilla", "partition": "label-skew"},
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
        flags["chunk"] = 0  # clients that train at once have other dropout
    script.main([*command(flags), "--out", str(tmp_path)])
    compare_with_literal(script.Config(**flags), arm["order"], tmp_path)


# -------------------------------------------------------------------------------------- difficulty


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


# ---------------------------------------------------------------------------------- whole commands


def count_runs(monkeypatch) -> list:
    """The configs of the runs that are trained from now on."""
    federate = script.federate
    configs = []

    def spy(config, fl, run):
        configs.append(config)
        federate(config, fl, run)

    spy.__module__ = federate.__module__  # a function of a user's own could read more options
    monkeypatch.setattr(script, "federate", spy)
    return configs


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


def test_final_accuracies_are_drawn_and_their_gains_printed(tmp_path, monkeypatch, capsys):
    drawn = {}

    def plot(df, path, panels, *_, **__):
        [(x, _)] = panels
        drawn[path.name] = df[x].tolist()

    monkeypatch.setattr(figures, "plot", plot)
    rows = []
    for order, accuracies in {"anti": (9.0, 2.0), "vanilla": (4.0, 5.0)}.items():
        for t, accuracy in enumerate(accuracies):
            row = {"setting": "", "method": order, "trial": 0, "round": t + 1}
            rows.append(row | {"accuracy": accuracy})
    script.plot(pd.DataFrame(rows), tmp_path)
    assert "-3.00" in capsys.readouterr().out
    assert drawn == {"orders.png": [2, 5]}
