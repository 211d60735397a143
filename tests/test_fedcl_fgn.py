"""fedcl_fgn.py: whole runs against loops, the controller against the paper's numbers, reports."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from fedcl_loops import FLAGS, Loops, assert_same_rows, load_state, read, write_data
from matplotlib.figure import Figure

import fedcl_fgn as fgn
from experiment import figures


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return str(write_data(tmp_path_factory.mktemp("data") / "tiny.npz"))


@pytest.fixture
def quiet(monkeypatch):
    """No figures: they have tests of their own."""
    monkeypatch.setattr(figures, "plot", lambda *args, **options: None)


def launch(folder, *flags) -> list[dict]:
    fgn.main([*FLAGS, "--out", str(folder), *flags])
    return read(folder)


# -------------------------------------------------------------------------- whole runs, literally

CASES = {
    "fedavg": "--method base",
    "fedavg+cl": "--method cl --fgn per_sample --detect-samples 4 --delta 0.2",
    "fedprox+cl": "--method cl --base fedprox --clients-per-round 3 --fgn per_sample",
    "fednova+cl-fim": "--method cl --base fednova --detector fim --detect-samples 4 --rounds 4",
    "fedavg+cl-fim": "--method cl --detector fim --fgn per_sample --rounds 3",
    "fednova+cl": "--method cl --base fednova --lr-decay 1",
    "fedavg+random": "--method random --p-double 0.3 --p-halve 0.6 --rounds 6",
}


@pytest.mark.parametrize("method", CASES)
def test_a_whole_run_equals_loops(tmp_path, data, method, quiet):
    """Weights and every column of metrics.csv, under partial participation."""
    flags = ["--dataset", data, *CASES[method].split()]
    rows = launch(tmp_path, *flags)
    loops = Loops([*FLAGS, *flags])
    assert {row["method"] for row in rows} == {method}
    assert_same_rows(rows, loops.rows)
    theta = load_state(tmp_path, method)["theta"]
    torch.testing.assert_close(theta, loops.theta, rtol=0, atol=1e-9)
    sizes = [row["clients"] for row in loops.rows]
    assert min(sizes) < 6
    assert len(set(sizes)) > 1 or "base" in CASES[method]


# -------------------------------------------------------------------------------- the controller


def trajectory(decisions, n_0=16, M=128) -> list[int]:
    sizes = [n_0]
    for critical in decisions:
        n = sizes[-1]
        sizes.append(fgn.double(n, M) if critical else fgn.halve(n, n_0))
    return sizes


def decide(values, delta=0.01) -> list[bool]:
    before = [None, *values[:-1]]
    return [fgn.is_critical(old, new, delta) for old, new in zip(before, values, strict=True)]


def test_scripted_ratios_give_the_specified_sizes():
    decisions = decide([1.0, 1.5, 2.0, 2.5, 2.0, 1.5, 1.0, 0.5, 0.4])
    assert decisions == [True] * 4 + [False] * 5
    assert trajectory(decisions) == [16, 32, 64, 128, 128, 64, 32, 16, 8, 8]


def test_the_threshold_is_inclusive_and_guarded():
    assert fgn.is_critical(1.0, 1.25, 0.25)
    assert not fgn.is_critical(1.0, 1.2499, 0.25)
    assert fgn.is_critical(1.0, 1.0, 0.0)
    assert fgn.is_critical(0.0, 1.0, 0.01)
    assert not fgn.is_critical(0.0, 0.0, 0.01)
    assert not fgn.is_critical(1.0, 9e9, math.inf)
    assert fgn.is_critical(None, 5.0, math.inf)


# ---------------------------------------------------------------------------------- the command


def test_the_detector_may_change_where_no_arm_heeds_it(tmp_path, data, quiet):
    """FedFIM is read, and told apart, only where an arm heeds it."""
    rows = launch(tmp_path, "--dataset", data, "--detector", "fgn")
    again = launch(tmp_path, "--dataset", data, "--detector", "fim", "fgn", "--resume")
    assert {row["method"] for row in rows} == {"fedavg", "fedavg+cl"}
    assert {row["method"] for row in again} == {"fedavg", "fedavg+cl", "fedavg+cl-fim"}
    assert {row["method"] for row in again if row["fim"]} == {"fedavg+cl-fim"}


# ---------------------------------------------------------------------------------- the reports


def scripted(method, accuracy, clients, critical=math.nan, trial=0, setting="") -> pd.DataFrame:
    columns = {"setting": setting, "method": method, "trial": trial}
    columns |= {"round": np.arange(len(clients)) + 1, "clients": clients, "fgn": 2.0}
    columns |= {"uploads": np.cumsum(clients), "accuracy": accuracy, "critical": critical}
    return pd.DataFrame(columns)


def test_selection_table_by_hand():
    steady = [4] * 6
    climb = [5, 10, 15, 20, 30, 45]
    df = pd.concat(
        [
            scripted("fedavg+cl", [10, 30, math.nan, 50, 40, 60], [4, 8, 8, 2, 2, 2]),
            scripted("fedavg+cl", [10, 20, math.nan, 20, 20, 20], [4, 8, 4, 4, 2, 2], trial=1),
            scripted("fedavg n=4", [99.0] * 6, steady),  # not the base, though it has no +
            scripted("fedavg", climb, steady),
            scripted("fedavg", climb, steady, trial=1),
        ]
    )
    table = fgn.selection(df)
    cl = table.loc[("", "fedavg+cl")]
    assert (cl.rounds_to, cl.uploads_to, cl.reached) == (4, 22, 0.5)  # 50 >= 45, once
    assert cl.clients == pytest.approx(25 / 6)
    assert (cl.early, cl.late) == (6, 2)
    base = table.loc[("", "fedavg")]
    assert (base.rounds_to, base.uploads_to, base.reached) == (6, 24, 1)


def test_each_base_of_a_sweep_is_its_own_goal():
    runs = []
    for base, goal in (("fedavg", 30), ("fednova", 80)):
        runs.append(scripted(f"{base}+cl", [10, 40, 90], [2, 4, 8], setting=base))
        runs.append(scripted(base, [10, 20, goal], [2, 2, 2], setting=base))
    table = fgn.selection(pd.concat(runs))
    assert table.loc[("fedavg", "fedavg+cl")].rounds_to == 2
    assert table.loc[("fednova", "fednova+cl")].rounds_to == 3


def test_without_a_base_nothing_is_said_of_reaching_it():
    table = fgn.selection(scripted("fedavg+cl", [10, 30], [4, 8]))
    assert table.columns.tolist() == ["clients", "early", "late"]


def test_common_targets_by_hand():
    cl = scripted("fedavg+cl", [12, math.nan, 33], [4, 8, 2])
    base = scripted("fedavg", [5, 21, 22], [4, 4, 4])
    table = fgn.targets(pd.concat([cl, base]))
    assert sorted(set(table.index.get_level_values("target"))) == [10, 20, 30]
    assert table.loc[("", 20, "fedavg+cl")].tolist() == [3, 14, 1]
    assert table.loc[("", 20, "fedavg")].tolist() == [2, 8, 1]
    assert table.loc[("", 30, "fedavg")].reached == 0
    assert math.isnan(table.loc[("", 30, "fedavg")].uploads_to)
    assert fgn.targets(scripted("fedavg", [5, 6], [1, 1])).empty
    whole = fgn.targets(scripted("fedavg", [5, 40], [1, 1]))  # 40 itself is reached
    assert whole.reached.tolist() == [1, 1, 1, 1]


def test_fgn_png_draws_fgn_and_clients(tmp_path, monkeypatch):
    """Read from the drawn lines: means over the trials, a column per setting."""
    saved = {}
    keep = lambda figure, path, **_: saved.update({Path(path).name: figure})  # noqa: E731
    monkeypatch.setattr(Figure, "savefig", keep)
    runs = []
    for setting, shift in (("a=1", 0), ("a=2", 3)):
        accuracy = [1, 2, 3]
        sizes = [4 + shift, 8, 2]
        runs.append(scripted("fedavg+cl", accuracy, sizes, [1, 0, 1], 0, setting))
        sizes = [6 + shift, 8, 4]
        runs.append(scripted("fedavg+cl", accuracy, sizes, [0, 0, 1], 1, setting))
    fgn.plot(pd.concat(runs), tmp_path)
    lines = [axis.lines[0].get_ydata().tolist() for axis in saved["fgn.png"].axes]
    assert len(lines) == 4
    for expected in ([5, 8, 3], [8, 8, 3], [2, 2, 2]):
        assert expected in lines


def test_a_run_leaves_its_tables_and_figures(tmp_path, data, capsys):
    flags = [
        "--dataset",
        data,
        "--rounds",
        "3",
        "--detector",
        "fgn",
        "fim",
        "--detect-samples",
        "2",
    ]
    launch(tmp_path, *flags)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"accuracy.png", "fgn.png", "selection.csv", "targets.csv", "metrics.csv"} <= names
    table = pd.read_csv(tmp_path / "selection.csv")
    assert table.method.tolist() == ["fedavg+cl", "fedavg+cl-fim", "fedavg"]
    assert "rounds to goal" in capsys.readouterr().out
    costs = ["rounds_to", "uploads_to", "reached"]
    assert [*pd.read_csv(tmp_path / "targets.csv")] == ["setting", "target", "method", *costs]


# ------------------------------------------------------------------------------------- presets


def test_an_lstm_learns_the_next_characters_of_speaking_roles(tmp_path, real_data, quiet):
    """A few rounds bring the loss far below that of guessing among 80 characters."""
    flags = (
        "--dataset shakespeare --model lstm --partition natural --width 16 --clients 20 "
        "--clients-per-round 4 --rounds 3 --lr 0.5 --min-size 20 --method base --epochs 1 "
        "--batch-size 16 --dtype float32 --momentum 0.9 --weight-decay 1e-5 --lr-decay 0.99"
    )
    rows = launch(tmp_path, "--data-dir", str(real_data), *flags.split())
    assert float(rows[-1]["loss"]) < 0.85 * math.log(80)
