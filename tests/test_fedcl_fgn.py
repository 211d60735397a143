"""fedcl_fgn.py: whole runs against loops, the controller against the paper's numbers, reports."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from fedcl_loops import FLAGS, Loops, assert_same_rows, load_state, of, read, write_data
from matplotlib.figure import Figure

import experiment
import fedcl_fgn as fgn
from experiment import report

FIGURES = (
    "fig1 fig2 fig6 fig6-vgg fig10 fig11 fig12 fig13 fig14 fig15 fig17 fig18 fig26 fig29 "
    "fig29-vgg fig31 fig31-dirichlet fig39 fig47 fig48 fig50 fig52"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return str(write_data(tmp_path_factory.mktemp("data") / "tiny.npz"))


@pytest.fixture
def quiet(monkeypatch):
    """No figures: they have tests of their own."""
    monkeypatch.setattr(report, "plot", lambda *args, **options: None)


def launch(folder, *flags) -> list[dict]:
    fgn.main([*FLAGS, "--out", str(folder), *flags])
    return read(folder)


def parse(*flags) -> list:
    configs, _ = experiment.parse(fgn.Config, fgn.PRESETS, "doc", list(flags))
    return configs


# -------------------------------------------------------------------------- whole runs, literally

CASES = {
    "fedavg": "--method base",
    "fedavg+cl": "--method cl",
    "fedprox+cl": "--method cl --base fedprox --fgn per_sample --detect-samples 4 --delta 0.2",
    "vrlsgd+cl": "--method cl --base vrlsgd --clients-per-round 3 --fgn per_sample",
    "fednova+cl-fim": "--method cl --base fednova --detector fim --detect-samples 4 --rounds 4",
    "fedavg+cl-fim": "--method cl --detector fim --fgn per_sample --rounds 3",
    "fedadagrad+random": "--method random --base fedadagrad --p-double 0.6 --server-lr 0.02",
    "fedyogi+cl": "--method cl --base fedyogi --server-lr 0.03 --lr-decay 1",
    "fedadam+random": "--method random --base fedadam --p-double 0.3 --p-halve 0.6 --rounds 6",
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


@pytest.mark.parametrize("base", fgn.PAPER_BASES)
def test_pinned_size_is_the_base_bit_for_bit(tmp_path, data, base, quiet, monkeypatch):
    monkeypatch.setattr(fgn, "double", lambda n, M: n)
    monkeypatch.setattr(fgn, "halve", lambda n, n_0: n)
    rows = launch(tmp_path, "--dataset", data, "--base", base, "--rounds", "3", "--eval-every", "1")
    theta = load_state(tmp_path, f"{base}+cl")["theta"]
    assert torch.equal(theta, load_state(tmp_path, base)["theta"])
    for ours, alone in zip(of(rows, f"{base}+cl"), of(rows, base), strict=True):
        for column in ("accuracy", "loss", "clients", "fgn", "train_loss"):
            assert ours[column] == alone[column]


def test_what_a_detector_reads_is_drawn_anew_in_each_round(tmp_path, data, quiet):
    """Where eta is so small that the net stands still, and all take part, it alone moves FGN."""
    still = ["--dataset", data, "--lr", "1e-9", "--lr-decay", "1", "--clients-per-round", "6"]
    still += ["--method", "base", "--rounds", "4", "--fgn", "per_sample"]
    part = launch(tmp_path / "part", *still, "--detect-samples", "3")
    whole = launch(tmp_path / "whole", *still)
    assert len({f"{float(row['fgn']):.4g}" for row in part}) == 4
    assert len({f"{float(row['fgn']):.4g}" for row in whole}) == 1


def test_random_sizes_are_drawn_anew_in_each_round(tmp_path, data, quiet):
    """One draw for all rounds would only ever double, or only halve."""
    flags = ["--method", "random", "--p-double", "0.5", "--p-halve", "0.5", "--rounds", "12"]
    sizes = [int(row["clients"]) for row in launch(tmp_path, "--dataset", data, *flags)]
    changes = np.sign(np.diff(sizes))
    assert 1 in changes
    assert -1 in changes


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


def test_halves_are_rounded_down_to_half_of_the_first_size_and_at_least_one():
    assert trajectory([False] * 5, n_0=1, M=9) == [1] * 6
    decisions = [True] * 4 + [False] * 5
    assert trajectory(decisions, n_0=3, M=20) == [3, 6, 12, 20, 20, 10, 5, 2, 1, 1]


def test_a_hump_of_the_norm_gives_one_hump_of_clients():
    """The norm rises for 8 rounds, then decays: on average about the base's 16 clients (Fig 49)."""
    t = np.arange(200)
    norms = 1.1 ** np.minimum(t, 7) * 0.95 ** np.maximum(t - 7, 0)
    sizes = trajectory(decide(list(norms * 0.01 * 0.99**t)))
    assert sizes[:4] == [16, 32, 64, 128]
    down = sizes.index(64, 4)
    assert set(sizes[3:down]) == {128}
    assert sizes[down : down + 4] == [64, 32, 16, 8]
    assert set(sizes[down + 3 :]) == {8}
    assert 0.95 < np.mean(sizes[:100]) / 16 < 1.1


def test_the_sign_of_fgn_does_not_matter():
    """The printed rule on the printed, negative FGN, and ours on -FGN, decide alike."""
    G = np.random.default_rng(0).gamma(5, size=200)
    printed = [(-new - -old) / -old >= 0.01 for old, new in zip(G, G[1:], strict=False)]
    assert 40 < sum(printed) < 160
    assert decide(G)[1:] == printed
    assert decide(-G)[1:] == printed


def test_the_threshold_is_inclusive_and_guarded():
    assert fgn.is_critical(1.0, 1.25, 0.25)
    assert not fgn.is_critical(1.0, 1.2499, 0.25)
    assert fgn.is_critical(1.0, 1.0, 0.0)
    assert fgn.is_critical(0.0, 1.0, 0.01)
    assert not fgn.is_critical(0.0, 0.0, 0.01)
    assert not fgn.is_critical(1.0, 9e9, math.inf)
    assert fgn.is_critical(None, 5.0, math.inf)


def test_infinite_delta_ends_at_the_floor():
    assert trajectory(decide([*np.exp(np.arange(5))], math.inf)) == [16, 32, 16, 8, 8, 8]


def test_random_sizes_follow_their_probabilities():
    rule = {"n_0": 16, "M": 128, "p_double": 0.2, "p_halve": 0.3}
    draws = np.random.default_rng(0).random(20000)
    sizes = [fgn.random_size(16, u=u, **rule) for u in draws]
    shares = [round(sizes.count(n) / 20000, 1) for n in (32, 8, 16)]
    assert shares == [0.2, 0.3, 0.5]
    assert fgn.random_size(128, u=0.1, **rule) == 128  # no more than all
    assert fgn.random_size(8, u=0.4, **rule) == 8  # the least


# ---------------------------------------------------------------------------------- the command


def identities(folder) -> list[dict]:
    paths = (folder / "checkpoints").glob("*.pt")
    return [torch.load(path, weights_only=True)["fingerprint"] for path in paths]


def test_arms_that_do_not_read_a_flag_are_trained_once(tmp_path, data, quiet):
    flags = ["--dataset", data, "--delta", "0.01", "0.3", "--method", "cl", "base", "random"]
    rows = launch(tmp_path, *flags)
    assert len(rows) == 2 * 3 * 5
    found = {(saved["method"], saved.get("delta")) for saved in identities(tmp_path)}
    once = {("fedavg", None), ("fedavg+random", None)}
    assert found == once | {("fedavg+cl", 0.01), ("fedavg+cl", 0.3)}


def test_samples_that_nobody_reads_are_swept_once(tmp_path, data, quiet):
    flags = ["--dataset", data, "--detect-samples", "2", "5", "--detector", "fgn", "fim"]
    rows = launch(tmp_path, *flags)
    assert len(rows) == 2 * 3 * 5  # two settings of three methods
    found = {(saved["method"], saved.get("detect_samples")) for saved in identities(tmp_path)}
    once = {("fedavg", None), ("fedavg+cl", None)}
    assert found == once | {("fedavg+cl-fim", 2), ("fedavg+cl-fim", 5)}


def test_the_detector_may_change_where_no_arm_heeds_it(tmp_path, data, quiet):
    """FedFIM is read, and told apart, only where an arm heeds it."""
    rows = launch(tmp_path, "--dataset", data, "--detector", "fgn")
    again = launch(tmp_path, "--dataset", data, "--detector", "fim", "fgn", "--resume")
    assert {row["method"] for row in rows} == {"fedavg", "fedavg+cl"}
    assert {row["method"] for row in again} == {"fedavg", "fedavg+cl", "fedavg+cl-fim"}
    assert {row["method"] for row in again if row["fim"]} == {"fedavg+cl-fim"}


@pytest.mark.parametrize(
    "arm, unread",
    [
        ("base", {"detector", "delta", "p_double", "p_halve"}),
        ("random", {"detector", "delta"}),
        ("cl", {"p_double", "p_halve"}),
    ],
)
def test_an_arm_is_told_apart_by_the_flags_that_it_reads(arm, unread):
    own = {*fgn.Config.__annotations__} - {"rounds"}  # no round depends on how many follow

    def flags(**changes):
        config = fgn.Config(method=arm, **changes)
        return own - config.results_depend_on().keys()

    assert flags(fgn="per_sample") == unread
    assert flags(detector="fgn") == unread | {"detect_samples"}
    if arm == "cl":
        assert flags(detector="fim") == unread
    else:
        assert flags(detector="fim") == unread | {"detect_samples"}


def test_names_tell_what_decides():
    def name(**flags):
        return fgn.name(fgn.Config(**flags))

    assert name(method="cl") == "fedavg+cl"
    assert name(method="cl", detector="fim") == "fedavg+cl-fim"
    assert name(method="base", detector="fim", base="fednova") == "fednova"
    assert name(method="random", detector="fim") == "fedavg+random"


@pytest.mark.parametrize(
    "flags, word",
    [
        ("--p-double .8", "--p-double"),
        ("--delta -1", "--delta"),
        ("--base scaffold", "--base"),
        ("--detector growth", "--detector"),
        ("--fgn full", "--fgn"),
        ("--lr-decay 1.1", "--lr-decay"),
        ("--lr-decay 0", "--lr-decay"),
        ("--model lstm", "--model"),
        ("--clients-per-round 7", "--clients-per-round"),
    ],
)
def test_wrong_flags_give_one_line_and_2(tmp_path, flags, word, capsys):
    with pytest.raises(SystemExit) as stop:
        launch(tmp_path, *flags.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert word in error
    assert len(error.strip().splitlines()) == 1


def test_delta_may_be_infinite():
    [config] = parse("--method", "cl", "--delta", "inf")
    assert config.delta == math.inf


def assert_same_results(folder, other, *methods):
    tables = []
    for place in (folder, other):
        rows = read(place)
        for row in rows:
            del row["seconds"]
        tables.append(rows)
    assert tables[0] == tables[1]
    for method in methods:
        theta = load_state(folder, method)["theta"]
        assert torch.equal(theta, load_state(other, method)["theta"])


def test_jobs_and_the_order_of_arms_do_not_change_a_bit(tmp_path, data, quiet):
    flags = ["--dataset", data, "--rounds", "3"]
    launch(tmp_path / "one", *flags, "--method", "cl", "random")
    launch(tmp_path / "two", *flags, "--method", "random", "cl", "--jobs", "2")
    one, two = (read(tmp_path / name) for name in ("one", "two"))
    for method in ("fedavg+cl", "fedavg+random"):
        for row, other in zip(of(one, method), of(two, method), strict=True):
            assert row | {"seconds": ""} == other | {"seconds": ""}


def test_a_killed_run_resumes_to_the_same_result(tmp_path, data, quiet):
    flags = [*FLAGS, "--dataset", data, "--rounds", "40", "--base", "fedyogi"]
    flags += ["--method", "cl", "random", "--detector", "fim", "--detect-samples", "3"]
    killed = tmp_path / "killed"
    command = [sys.executable, fgn.__file__, *flags, "--out", str(killed)]
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=nowhere, stderr=nowhere, env=os.environ)
    checkpoint = "checkpoints/fedyogi+cl-fim-*-trial0.pt"
    while process.poll() is None and not list(killed.glob(checkpoint)):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(killed.glob(checkpoint))
    fgn.main([*flags, "--out", str(killed), "--resume"])
    fgn.main([*flags, "--out", str(tmp_path / "whole")])
    assert_same_results(killed, tmp_path / "whole", "fedyogi+cl-fim", "fedyogi+random")


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


def test_fgn_png_draws_fgn_clients_and_critical_rounds(tmp_path, monkeypatch):
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
    assert len(lines) == 6
    for expected in ([5, 8, 3], [8, 8, 3], [0.5, 0, 1], [2, 2, 2]):
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
    assert "rounds_to" in capsys.readouterr().out


# ------------------------------------------------------------------------------------- presets


def test_presets_cover_the_figures():
    assert {*FIGURES.split(), "fig2-decay", "decay"} == fgn.PRESETS.keys()


@pytest.mark.parametrize("preset", fgn.PRESETS)
def test_presets_keep_the_papers_set_up(preset):
    for config in parse("--preset", preset):
        assert config.epochs == 2 or preset == "fig12"
        assert config.clients_per_round == 16 or preset == "fig15"
        assert config.delta == 0.01 or preset in ("fig10", "fig26")
        assert config.clients == 128 or preset == "fig14"
        assert config.weight_decay == 1e-5 or preset == "fig13"
        assert (config.lr, config.momentum, config.rounds) == (0.01, 0.9, 200)
        assert config.trials == (5 if preset == "fig18" else 3)


SWEEPS = [
    ("fig1", "detector", ["fgn", "fim"]),
    ("fig17", "detector", ["fgn", "fim"]),
    ("fig2", "model", ["alexnet", "vgg11"]),
    ("fig2", "alpha", [0.1, 0.2, 0.3]),
    ("fig2", "dataset", ["cifar10", "fmnist"]),
    ("fig6", "mu", [0.01]),
    ("fig6-vgg", "mu", [0.001]),
    ("fig10", "delta", [0, 0.01, 0.03, 0.05, 0.2, 0.35, 0.5]),
    ("fig26", "delta", [0, 0.01, 0.03, 0.05, 0.2, 0.35, 0.5]),
    ("fig12", "epochs", [1, 2, 3, 4, 5]),
    ("fig14", "clients", [64, 128, 256, 512]),
    ("fig29", "base", ["fedavg", "fednova", "fedprox", "vrlsgd"]),
    ("fig29", "dataset", ["cifar100"]),
    ("fig31", "partition", ["natural"]),
    ("fig31-dirichlet", "partition", ["dirichlet"]),
    ("fig39", "base", ["fedadagrad", "fedadam", "fedyogi"]),
    ("fig47", "p_double", [0.1, 0.3, 0.5, 0.7]),
    ("fig47", "p_halve", [0.3]),
    ("fig48", "p_halve", [0.1, 0.3, 0.5, 0.7]),
    ("fig48", "method", ["base", "cl", "random"]),
    ("fig50", "model", ["resnet18"]),
    ("fig52", "base", sorted({*fgn.PAPER_BASES} - {"fedavg"})),
]


@pytest.mark.parametrize("preset, flag, values", SWEEPS)
def test_presets_sweep_what_their_figure_shows(preset, flag, values):
    found = {getattr(config, flag) for config in parse("--preset", preset)}
    assert sorted(found) == values


def test_an_lstm_learns_the_next_characters_of_speaking_roles(tmp_path, real_data, quiet):
    """A few rounds bring the loss far below that of guessing among 80 characters."""
    flags = (
        "--dataset shakespeare --model lstm --partition natural --width 16 --clients 20 "
        "--clients-per-round 4 --rounds 3 --lr 0.5 --min-size 20 --method base --epochs 1 "
        "--batch-size 16 --dtype float32 --momentum 0.9 --weight-decay 1e-5 --lr-decay 0.99"
    )
    rows = launch(tmp_path, "--data-dir", str(real_data), *flags.split())
    assert float(rows[-1]["loss"]) < 0.85 * math.log(80)
