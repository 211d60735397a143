"""The command line, runs on disk and processes, on a script whose rounds cost nothing: this file is that script, too."""

import contextlib
import csv
import errno
import functools
import importlib
import json
import os
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
import experiment
from experiment import flag

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
SCRIPTS = ["fedavg_curriculum", "client_curriculum", "fedcl_fgn", "fedcl_gmm_sync", "fedac_art"]


@dataclass
class Config(experiment.Config):
    """The flags of a script that trains nothing."""

    clients: int = 4
    clients_per_round: int = 2
    rounds: int = 4
    trials: int = 2
    batch_size: int = 8
    arm: str = flag(("a", "b"), "what is compared", choices=("a", "b", "late", "nan"))
    pull: float = flag(0.5, "a number (inf: endless)", above=0, high=float("inf"))
    size: int = flag(3, "of the state", 1, 10**7)
    warm: bool = flag(True, "a switch")
    stages: tuple = flag(((0.8, 0.4),), "numbers that fall", kind=lambda text: tuple(map(float, text.split(","))))
    pause: float = flag(0.0, "seconds of a round", 0)


def federate(config: Config, data: common.Data, run: experiment.Run) -> None:
    """Sums of keyed draws, a memory by client and an inner dict that two names share."""
    expert = run.cached("expert", lambda: torch.tensor([run.streams("expert").random()]), "pull")
    if config.arm == "late":
        assert len(run.other(arm="a").load()["rows"]) == config.rounds
    memory = {}
    state = {"weights": torch.zeros(config.size, dtype=getattr(torch, config.dtype)), "base": memory, "history": [], "early": 1}
    for t in run.rounds(state):
        state.pop("early", None)
        draw = float(run.streams("draw", t).random())
        if config.arm == "nan" and t == 2:
            raise common.NonFiniteError("round 3: the update of client 1 is not finite")
        state["weights"] += draw * config.pull * expert + (config.arm == "b")
        memory[t % 3] = torch.full((2,), draw)
        state["history"].append(draw)
        time.sleep(config.pause)
        tested = {"accuracy": 100 * draw, "loss": np.float64(draw)} if run.due(t) else {}
        run.record(t, 2, samples=np.int64(10), received_mb=0.5, own=t, **tested)
    assert state["base"] is memory  # objects that share an inner dict still share it after a resume


PRESETS = {"two": "--alpha 0.5 5.0 --pull 0.25 --arm a  # two alphas", "plain": "--rounds 3"}


def unread(config) -> tuple:
    return ("pull",) if config.arm == "b" else ()


def main(argv=None) -> None:
    late = {"after": lambda config: config.arm == "late", "unread": unread}
    experiment.main(Config, PRESETS, "python test_experiment.py\n\nA test.", federate, ("arm",), **late, argv=argv)


@pytest.fixture
def work(tmp_path, monkeypatch):
    """An empty folder to work in, with a data set of 40 small images."""
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path)
    monkeypatch.setattr(experiment, "curves", lambda df, path, *_, **__: path.write_bytes(b"png"))  # seaborn takes seconds
    monkeypatch.setattr(experiment, "draw_partition", lambda samples, folder: None)
    return tmp_path


def write_data(folder: Path) -> None:
    x, y = np.random.default_rng(0).integers(0, 256, (60, 16, 16, 1), dtype=np.uint8), np.arange(60) % 3
    np.savez(folder / "tiny.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])


SMALL = ["--dataset=tiny.npz", "--threads=1", "--device=cpu"]


def start(*argv: str) -> None:
    main([*SMALL, *argv])


def refused(capsys, *argv: str, status: int = 2) -> str:
    """The one line with which a command line ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        start(*argv)
    shown = capsys.readouterr()
    assert stop.value.code == status and "results" not in shown.out, shown
    line = [line for line in shown.err.replace("\r", "\n").splitlines() if line.strip() and "round/s" not in line]
    assert len(line) == 1 and len(line[0]) < 700 and "error: " in line[0], shown.err
    return line[0]


def table(folder) -> list[dict]:
    """metrics.csv without its seconds."""
    with open(Path(folder) / "metrics.csv") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def checkpoints(folder) -> dict:
    paths = sorted((Path(folder) / "checkpoints").glob("*.pt"))
    return {path.name: torch.load(path, weights_only=True) for path in paths}


def content(folder) -> dict:
    """Final states and rows, without seconds, to be compared bit for bit."""
    runs = {name: saved["content"] for name, saved in checkpoints(folder).items() if isinstance(saved["content"], dict)}
    return {name: repr((run["state"], [{**row, "seconds": 0} for row in run["rows"]])) for name, run in runs.items()}


def files(folder) -> dict:
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    "words",
    [
        "--clients ten",
        "--clients 1.5",
        "--clients 0",
        "--clients",
        "--clients 1" + "0" * 400,
        "--alpha nan",
        "--alpha inf",
        "--alpha 1e-9",
        "--alpha 0.5 nan",
        "--lr 0",
        "--lr -1",
        "--lr nan",
        "--lr inf",
        "--momentum 1",
        "--mu -0.5",
        "--seed -1",
        "--rounds 0",
        "--pull 0",
        "--pull nan",
        "--pull -inf",
        "--stages 1,x",
        "--warm x",
        "--warm=x",
        "--model lenet",
        "--base fedsgd",
        "--partition zipf",
        "--no-such-flag",
        "--client 3",
        "stray",
        "--preset three",
        "--preset two stray",
        "--jobs 1 2",
        "--out a b",
        "--dataset mnits",
        "--dataset gone.npz",
        "--model lstm",
        "--clients 2000",
        "--clients 20 --min-size 15",
        "--parts 3",
        "--clients 5 --clients-per-round 2 6",
        "--partition natural",
        "--out tiny.npz",
        "--out tiny.npz/below",
        f"--out {'1' * 400}",
        "--resume --out tiny.npz",
    ],
)
def test_a_wrong_flag_costs_one_line(words, work, capsys):
    before = files(work)
    refused(capsys, *words.split())
    assert files(work) == before


def test_limits_say_what_is_wanted(work, capsys):
    assert "'1' is not a number >= 0 and < 1" in refused(capsys, "--momentum", "1")
    assert "'0' is not a number > 0" in refused(capsys, "--lr", "0")
    assert "'0' is not an integer >= 1 and <= 1000000" in refused(capsys, "--rounds", "0")
    assert "'x' is not one of a, b, late" in refused(capsys, "--arm", "x")
    assert "holds a NUL" in refused(capsys, "--out", "a\0b")
    for name in ("--dataset", "--model", "--tune", "--out"):
        assert "'a\\nb' holds" in refused(capsys, name, "a\nb")
    configs, _ = experiment.parse(Config, PRESETS, "A test.", ["--pull", "inf", "--momentum", "0"])
    assert configs[0].pull == float("inf")


def test_every_flag_takes_several_values():
    words = "--alpha 0.1 0.2 --base fedavg scaffold --warm on off --stages 0.9 0.8,0.1 --seed 1 2 --clients-per-round 1 2 1"
    configs, swept = experiment.parse(Config, PRESETS, "A test.", words.split())
    assert swept == ["alpha", "clients_per_round", "base", "seed", "arm", "warm", "stages"]
    assert len(configs) == 2**7 == len({repr(config) for config in configs})
    assert {config.stages for config in configs} == {(0.9,), (0.8, 0.1)} and {config.warm for config in configs} == {
        True,
        False,
    }


def test_a_preset_is_a_command_line_and_flags_beside_it_win(capsys):
    def parsed(*argv):
        return experiment.parse(Config, PRESETS, "A test.", list(argv))

    configs, swept = parsed("--preset", "two")
    assert [(c.alpha, c.pull, c.arm) for c in configs] == [(0.5, 0.25, "a"), (5.0, 0.25, "a")] and swept == ["alpha"]
    configs, swept = parsed("--alpha", "3", "--preset", "two", "--pull", "1", "--no-warm")
    assert [(c.alpha, c.pull, c.warm) for c in configs] == [(3.0, 1.0, False)] and not swept
    with pytest.raises(SystemExit) as stop:
        parsed("--list-presets")
    lines = capsys.readouterr().out.splitlines()
    assert stop.value.code == 0 and lines[0] == "# two: two alphas"
    typed = [shlex.split(line, comments=True) for line in lines]
    assert [words[0] for words in typed if words] == ["python", "python"]
    assert parsed(*typed[1][2:]) == parsed("--preset", "two")


def test_help_reads_well(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and len(text.splitlines()) < 85 and max(map(len, text.splitlines())) <= 105
    usage, _, rest = text.partition("\n\n")
    assert "two" not in usage and "[X ...]" not in text and len(usage.splitlines()) == 1
    order = ["data:", "net:", "federation:", "run:", "this algorithm:"]
    assert sorted(order, key=text.index) == order and "--arm" in rest.partition("this algorithm:")[2]


@pytest.mark.parametrize("name", SCRIPTS)
def test_presets_of_the_scripts_parse_and_can_be_typed(name, capsys):
    script = importlib.import_module(name)
    if not issubclass(script.Config, experiment.Config) or not hasattr(script, "main"):
        pytest.skip("not yet")
    assert script.PRESETS
    for words in script.PRESETS.values():
        flags = shlex.split(words, comments=True)
        configs, _ = experiment.parse(script.Config, script.PRESETS, script.__doc__, flags)
        assert configs
    with pytest.raises(SystemExit) as stop:
        script.main(["--list-presets"])
    assert stop.value.code == 0 and len(capsys.readouterr().out.splitlines()) == 2 * len(script.PRESETS)


# -------------------------------------------------------------------------------------------------------------- runs


def a_run(folder, arm="a", trial=0, **flags) -> experiment.Run:
    config = Config(arm=arm, jobs=2, threads=1, dataset="tiny.npz", **flags)  # jobs: no progress bar
    return experiment.Study(federate, ("arm",), "test", unread=unread).run(config, trial, Path(folder))


def trained(run) -> experiment.Run:
    (run.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    experiment.train(run)
    return run


@pytest.mark.parametrize("stop_at", [0, 1, 3])
def test_a_run_that_stops_goes_on_where_it_was(work, stop_at, monkeypatch):
    whole = trained(a_run("whole"))

    def cut(run, t, *args, **columns):
        if t == stop_at:
            raise RuntimeError("power cut")
        record(run, t, *args, **columns)

    record = experiment.Run.record
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setattr(experiment.Run, "record", cut)
        trained(a_run("cut"))
    again = trained(a_run("cut", resume=True))
    assert content("cut") == content("whole") and [row["round"] for row in again.rows] == [1, 2, 3, 4]
    assert again.rows[-1]["uploads"] == 8 and again.rows[-1]["samples"] == 40 and again.rows[-1]["received_mb"] == 2.0
    assert [path.suffix for path in (work / "cut" / "checkpoints").iterdir()] == [".pt", ".pt"]  # nothing temporary stays
    saved = whole.load()
    assert "early" not in saved["state"] and type(saved["rows"][0]["loss"]) is float


def test_a_checkpoint_is_written_rarely_where_that_takes_long(work, monkeypatch):
    count, write = [], experiment.write

    def slow(path, saved):
        time.sleep(0.02)
        count.append(len(saved["content"]["rows"]) if "expert" not in path.name else 0)
        write(path, saved)

    monkeypatch.setattr(experiment, "write", slow)
    trained(a_run("slow", rounds=200, pause=0.002))
    times = [n for n in count if n]
    assert times[0] == 1 and times[-1] == 200 and 2 <= len(times) <= 10
    del count[:]
    monkeypatch.setattr(time, "perf_counter", iter(range(10**6)).__next__)  # every clock reading a second: writing is as dear
    trained(a_run("dear", rounds=50))
    assert count == [0, 1, 8, 15, 22, 29, 36, 43, 50]  # by that clock; a kill costs seven rounds of 50


def test_a_run_that_ends_before_its_last_round_is_saved(work, monkeypatch):
    def short(config, data, run):
        state = {"n": 0}
        for t in run.rounds(state):
            if state["n"] == 3:
                break
            state["n"] += 1
            run.record(t, 1, accuracy=1.0)

    run = a_run("r", rounds=10)
    run.study.federate = short
    monkeypatch.setattr(experiment.Run, "data", lambda self: types.SimpleNamespace(checksum=0))
    assert len(trained(run).rows) == 3 and len(run.load()["rows"]) == 3 and run.load()["state"] == {"n": 3}
    again = a_run("r", rounds=10, resume=True)
    again.study.federate = short
    assert len(trained(again).rows) == 3


def test_cached_is_made_once_for_what_it_depends_on(work):
    calls = []

    def cached(run, *flags):
        (run.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        return run.cached("expert", lambda: calls.append(1) or torch.arange(3.0), *flags)

    assert torch.equal(cached(a_run("r"), "pull"), cached(a_run("r", "b", alpha=5.0, base="scaffold", rounds=9), "pull"))
    assert len(calls) == 1
    cached(a_run("r", trial=1), "pull")
    cached(a_run("r", lr=0.5), "pull")
    cached(a_run("r", pull=0.25), "pull")
    cached(a_run("r", alpha=5.0), "pull", *experiment.DEALING)
    assert len(calls) == 5
    for path in (work / "r" / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(common.UsageError, match="damaged, left as it is"):
        cached(a_run("r"), "pull")


def point(arm: str, trial: int = 0, more: str = "") -> str:
    """The name of a checkpoint of `start`."""
    return f"{arm}-dataset=tiny.npz{more}-trial{trial}.pt"


def tamper(path: Path, change) -> None:
    saved = torch.load(path, weights_only=True)
    torch.save(change(saved) or saved, path)


BAD = {
    "nothing": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_bytes(b"hello"),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-30]),
    "other content": lambda path: torch.save({"other": 1}, path),
    "a list": lambda path: torch.save([1, 2], path),
    "no fingerprint": lambda path: tamper(path, lambda saved: saved.pop("fingerprint") and None),
    "a tensor for fingerprint": lambda path: tamper(path, lambda saved: saved.update(fingerprint=torch.ones(3))),
    "another arm": lambda path: shutil.copy(path.with_name(point("b", 0)), path),
    "another trial": lambda path: shutil.copy(path.with_name(point("a", 1)), path),
    "another script": lambda path: tamper(path, lambda saved: saved["fingerprint"].update(script="other")),
    "another torch": lambda path: tamper(path, lambda saved: saved["fingerprint"].update(torch="1.0")),
    "another dtype": lambda path: tamper(path, lambda saved: saved["fingerprint"].update(dtype="float64")),
    "missing rows": lambda path: tamper(path, lambda saved: saved["content"]["rows"].pop(1) and None),
    "too many rows": lambda path: tamper(
        path, lambda saved: saved["content"]["rows"].append(dict(saved["content"]["rows"][-1], round=5))
    ),
    "another's rows": lambda path: tamper(path, lambda saved: saved["content"]["rows"][0].update(method="b")),
    "no rows": lambda path: tamper(path, lambda saved: saved["content"].update(rows=None)),
    "no state": lambda path: tamper(path, lambda saved: saved["content"].pop("state") is None),
    "a folder": lambda path: path.unlink() or path.mkdir(),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_checkpoint_is_one_line_and_left_alone(bad, work, capsys):
    start("--out=r")
    path = work / "r" / "checkpoints" / point("a")
    BAD[bad](path)
    before = files("r")
    assert point("a") in refused(capsys, "--out=r", "--resume")
    assert all(files("r")[name] == old for name, old in before.items() if name.suffix == ".pt" or name.name == "metrics.csv")


def test_a_state_of_another_shape_is_refused(work, capsys):
    start("--out=r", "--rounds=3")
    first, last = point("a", 0, "-rounds=3"), point("b", 1, "-rounds=3")
    for name in (first, last):
        tamper(work / "r" / "checkpoints" / name, lambda saved: saved["content"]["rows"].pop() and None)
    tamper(work / "r" / "checkpoints" / last, lambda s: s["content"]["state"].update(weights=torch.ones(2)))
    assert "weights has another shape" in refused(capsys, "--out=r", "--rounds=3", "--resume")


def test_a_checkpoint_that_would_run_code_is_refused(work):
    class Evil:
        def __reduce__(self):
            return (open, (str(work / "evil"), "w"))

    run = trained(a_run("r"))
    torch.save(Evil(), run.path)
    with pytest.raises(common.UsageError, match="damaged"):
        run.load()
    assert not (work / "evil").exists()
    with pytest.raises(common.UsageError, match="No such file or directory"):
        a_run("r", "b").load()


def test_a_write_that_fails_leaves_the_old_file(work, monkeypatch):
    path = work / "a.pt"
    experiment.write(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(OSError, match="full"):
            experiment.write(path, {"w": torch.ones(3)})
    assert path.read_text() == "old" and list(work.glob("*.tmp")) == []


def test_due_rounds():
    run = experiment.Run(Config(rounds=7, eval_every=3), "a", "", 0, Path("r"))
    assert [t for t in range(7) if run.due(t)] == [2, 5, 6]


def test_names_of_runs_become_files_without_clashes():
    flags = [{}, {"alpha": 0.5}, {"dataset": "/e"}, {"dataset": "-e"}, {"dataset": "e" * 300}, {"warm": False}]
    runs = [experiment.Run(Config(**f), m, "", 0, Path("r")) for m in ("a", "b/c", "b-c", "x" * 300) for f in flags]
    assert len({run.path for run in runs}) == len(runs) and all(len(run.path.name) < 200 for run in runs)
    assert [runs[i].path.name for i in (1, 5)] == ["a-alpha=0.5-trial0.pt", "a-warm=off-trial0.pt"]
    other = Config(jobs=2, threads=1, trials=9, out="x", resume=True)
    assert experiment.Run(other, "a", "seed=1", 0, Path("r")).path == runs[0].path  # what changes no run, what else is swept


# ------------------------------------------------------------------------------------------------- a command's results


def test_results_of_a_command(work, capsys):
    start("--out=r", "--eval-every=2")
    printed = capsys.readouterr().out
    rows = table("r")
    first = [
        "setting",
        "method",
        "trial",
        "round",
        "clients",
        "dropped",
        "uploads",
        "samples",
        "received_mb",
        "accuracy",
        "loss",
    ]
    assert list(rows[0]) == [*first, "own"]
    assert [(r["method"], r["trial"], r["round"]) for r in rows] == [(m, k, t) for m in "ab" for k in "01" for t in "1234"]
    assert [r["accuracy"] == "" for r in rows] == [True, False] * 8 and rows[3]["samples"] == "40" and rows[0]["own"] == "0"
    summary = json.loads(Path("r/summary.json").read_text(), parse_constant=pytest.fail)
    assert {"python", "torch"} <= set(summary["versions"]) and summary["command"].endswith("--out=r --eval-every=2")
    assert summary["device"] and summary["threads"] == 1 and summary["ranks"] == 1 and summary["config"]["arm"] == ["a", "b"]
    tested = [[float(r["accuracy"]) for r in rows if r["method"] == "a" and r["trial"] == k and r["accuracy"]] for k in "01"]
    shown = summary["results"][""]["a"]
    assert shown["final"] == pytest.approx([path[-1] for path in tested]) and shown["uploads"] == [8, 8]
    assert shown["last10"] == pytest.approx([np.mean(path) for path in tested]) and shown["best"] == [
        max(path) for path in tested
    ]
    expected = {"mean": 0, "low": 0, "high": 0, "trials": 2, "p": 1, "holm": 1}  # of equal arms
    assert summary["paired"][""]["a - b"]["final"] == expected
    assert {"accuracy.png", "summary.json"} <= set(summary["files"])
    assert json.loads(Path("r/config.json").read_text())["clients"] == 4
    runs = {name for name in checkpoints("r") if "expert" not in name}
    assert runs == {point(m, k, "-eval_every=2") for m in "ab" for k in (0, 1)}
    assert "a - b: final +0.00 [+0.00, +0.00]" in printed and printed.endswith("results: r\n")


def test_one_trial_has_no_interval_and_its_summary_is_json(work, capsys):
    start("--out=r", "--trials=1", "--rounds=1")
    summary = json.loads(Path("r/summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["paired"][""]["a - b"]["final"] == {
        "mean": 0,
        **dict.fromkeys(("low", "high", "p", "holm")),
        "trials": 1,
    }
    assert "a - b: final +0.00, last10 +0.00\n" in capsys.readouterr().out


def test_curves_and_figures_are_drawn(tmp_path):
    rows = [
        {"setting": s, "method": m, "trial": k, "round": t, "accuracy": float("nan") if t == 2 else t * k}
        for s in ("", "alpha=1")
        for m in "ab"
        for k in (0, 1)
        for t in (1, 2, 3)
    ]
    df = pd.DataFrame(rows)
    experiment.curves(df, tmp_path / "a.png", "accuracy")
    experiment.curves(df.assign(megabytes=df["round"] * (1 + df.trial)), tmp_path / "b.png", "accuracy", x="megabytes")
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("a.png", "b.png"))


def test_final_best_and_last_ten():
    path = [5.0, 99.0] + [float(i) for i in range(13)]
    sparse = [a if (t + 1) % 4 == 0 or t == 14 else np.nan for t, a in enumerate(path)]
    rows = [(k, t + 1, a) for k, accuracies in enumerate((path, sparse)) for t, a in enumerate(accuracies)]
    df = pd.DataFrame(rows, columns=["trial", "round", "accuracy"]).assign(setting="", method="a", uploads=1, seconds=0.0)
    found = experiment.per_trial(df)
    assert found.final.tolist() == [12, 12] and found.best.tolist() == [99, 12]
    assert found.last10.tolist() == pytest.approx([np.mean(path[5:]), np.mean([path[7], path[11], path[14]])])


def test_interval_is_students():
    from scipy.stats import ttest_rel

    a, b = np.array([3.0, 5.0, 4.5, 6.0]), np.array([2.0, 4.5, 4.0, 4.0])
    expected = ttest_rel(a, b).confidence_interval(0.95)
    assert experiment.interval(a - b) == pytest.approx((1.0, expected.low, expected.high, ttest_rel(a, b).pvalue))
    mean, low, high, p = experiment.interval([2.0])
    assert mean == 2 and low != low and high != high and p != p


def test_an_arm_that_does_not_read_a_swept_flag_is_trained_once_and_shown_in_every_setting(work):
    start("--out=r", "--pull", "0.1", "0.9", "--trials=1")
    names = {name for name in checkpoints("r") if "expert" not in name}
    assert names == {point("a", more="-pull=0.1"), point("a", more="-pull=0.9"), point("b")}
    rows = table("r")
    assert [(r["setting"], r["method"]) for r in rows[::4]] == [
        ("pull=0.1", "a"),
        ("pull=0.1", "b"),
        ("pull=0.9", "a"),
        ("pull=0.9", "b"),
    ]
    assert [r["accuracy"] for r in rows[4:8]] == [r["accuracy"] for r in rows[12:]]
    summary = json.loads(Path("r/summary.json").read_text())
    assert set(summary["results"]["pull=0.9"]) == {"a", "b"} == set(summary["results"]["pull=0.1"])
    start("--out=r", "--pull", "0.9", "0.1", "--trials=1", "--resume")  # what is unread is in no fingerprint


def test_an_arm_that_reads_another_ones_rows_comes_last(work):
    start("--out=r", "--arm", "late", "a")
    assert [r["method"] for r in table("r")[::8]] == ["late", "a"]


def test_order_tests_and_jobs_change_no_bit(work):
    start("--out=one")
    start("--out=order", "--arm", "b", "a", "--eval-every=3")
    kept = [{n: s["content"] for n, s in checkpoints(folder).items()} for folder in ("one", "order")]
    one, order = ({n: repr(content["state"]) for n, content in each.items() if "expert" not in n} for each in kept)
    assert all(order[point(arm, k, "-eval_every=3")] == one[point(arm, k)] for arm in "ab" for k in (0, 1))
    start("--out=jobs", "--jobs=2", f"--dataset={work / 'tiny.npz'}")
    assert [*content("jobs").values()] == [*content("one").values()] and table("jobs") == table("one")


# ------------------------------------------------------------------------------------------------------------- trust


def test_resume_names_a_changed_flag_with_both_values_and_allows_what_changes_no_bit(work, capsys):
    start("--out=r", "--alpha=0.5")
    before = table("r")
    for words, said in {
        "--lr=0.5": "lr 0.01, not 0.5",
        "--dtype=float64": "dtype float32, not float64",
        "--pull=0.1": "pull 0.5, not 0.1",
        "--threads=2": "threads 1, not 2",
        "--rounds=9": "rounds 4, not 9",
    }.items():
        assert said in refused(capsys, "--out=r", "--alpha=0.5", "--resume", words)
    start("--out=r", "--alpha=0.5", "--resume", "--jobs=2", "--trials=3")
    assert [r for r in table("r") if r["trial"] != "2"] == before and len(table("r")) == 24
    start("--out=r", "--alpha=0.5", "--resume", "--profile")


def test_a_resumed_sweep_may_be_wider_or_narrower(work, capsys):
    def times():
        return {path.name: path.stat().st_mtime_ns for path in work.glob("r/checkpoints/[ab]-*")}

    start("--out=r", "--alpha=0.5", "--size", "3", "4")
    before, narrow = times(), table("r")
    capsys.readouterr()
    start("--out=r", "--alpha", "0.5", "5.0", "--size", "3", "4", "--resume")
    assert "--resume: 8 of 16 runs have begun in r; the rest start now" in capsys.readouterr().err
    wide = table("r")
    assert {name: times()[name] for name in before} == before and len(times()) == 16 and len(wide) == 2 * len(narrow)
    assert {row["setting"] for row in wide} == {f"alpha={a} size={s}" for a in (0.5, 5.0) for s in (3, 4)}
    before = times()
    for more in (["5.0"], ["5.0", "0.5"]):
        start("--out=r", "--alpha", *more, "--size", "3", "4", "--resume")
        assert times() == before and len(table("r")) == len(narrow) * len(more)
    said = refused(capsys, "--out=r", "--alpha", "0.1", "50", "--size", "3", "4", "--resume")
    assert "alpha 5.0 0.5, not 0.1 50.0" in said
    (work / "r" / "config.json").unlink()  # the checkpoints know as well whose they are
    start("--out=r", "--alpha", "5.0", "0.5", "--size", "3", "4", "--resume")
    assert times() == before and "--resume" not in capsys.readouterr().err


def test_an_interrupted_wider_sweep_has_one_name_for_a_setting(work, capsys):
    start("--out=r", "--alpha=0.5", "--trials=1")
    with pytest.raises(SystemExit) as stop:
        start("--out=r", "--alpha", "0.5", "5.0", "--arm", "a", "nan", "--trials=1", "--resume")
    assert stop.value.code == 3 and {row["setting"] for row in table("r")} == {"alpha=0.5"} and len(table("r")) > 4


def test_an_interrupted_table_shows_a_run_wherever_it_is_wanted(work, monkeypatch):
    flags = ["--out=r", "--pull", "0.1", "0.9", "--trials=1"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(experiment, "conclude", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        start(*flags)
    stopped = table("r")
    start(*flags, "--resume")
    assert stopped == table("r") and {row["setting"] for row in stopped if row["method"] == "b"} == {"pull=0.1", "pull=0.9"}


def test_flags_that_do_not_go_together(work, capsys):
    before = files(work)
    assert "leave out --jobs" in refused(capsys, "--profile", "--jobs=2") == refused(capsys, "--profile", "--stack-trials")
    assert "--most-trials 2: fewer than --trials 3" in refused(capsys, "--until-halfwidth=1", "--trials=3", "--most-trials=2")
    assert "--until-halfwidth: a single method" in refused(capsys, "--until-halfwidth=1", "--arm=a")
    assert files(work) == before


def test_resume_keeps_the_old_number_of_threads(work, capsys, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2), raising=False)
    main([*SMALL[::2], "--out=r", "--trials=1"])
    assert json.loads(Path("r/config.json").read_text())["threads"] == 2
    capsys.readouterr()
    main([*SMALL[::2], "--out=r", "--trials=1", "--jobs=2", "--resume"])
    assert "--threads stays 2" in capsys.readouterr().err and json.loads(Path("r/config.json").read_text())["threads"] == 2
    assert "threads 2, not 1" in refused(capsys, "--out=r", "--trials=1", "--resume")
    main([*SMALL[::2], "--out=r", "--trials=1", "--resume"])  # what was refused has left the folder's number alone
    torch.set_num_threads(1)


def test_a_new_run_removes_what_belongs_to_the_old_one_and_nothing_else(work, monkeypatch):
    def draws(df, runs, folder):
        (folder / "own.png").write_bytes(b"png")
        (folder / "own.csv").write_text("a,b")

    def run(*argv, report=None):
        experiment.main(Config, PRESETS, "A test.", federate, ("arm",), report=report, argv=[*SMALL, "--out=r", *argv])

    run("--arm=a", report=draws)
    mine = ("mine.png", "notes.txt", "checkpoints/mine.txt", "checkpoints/mine.pt")
    for name in mine:
        (work / "r" / name).write_text("mine")
    monkeypatch.setattr(experiment, "train_all", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(SystemExit) as stop:
        run("--arm=b")
    assert stop.value.code == 130
    assert {str(p.relative_to("r")) for p in files("r")} == {"config.json", *mine}


def test_two_runs_in_one_folder(work, capsys):
    start("--out=r")
    before = files("r")
    with experiment.locked(Path("r")):
        for more in ([], ["--resume"]):
            assert "another run is at work" in refused(capsys, "--out=r", *more)
    assert files("r") == before
    start("--out=r", "--resume")  # the lock is gone with its holder


@pytest.mark.parametrize(
    "text",
    ["null", "3", "[1]", '"x"', "", "{", "[" * 10**5, b"\xff\xfe"]
    + [f'{{"threads": {word}}}' for word in ("null", '"x"', "0", "-1", "1025", "1e999")],
)
def test_a_damaged_config_is_one_line(text, work, capsys):
    start("--out=r", "--arm=a", "--trials=1")
    path = work / "r" / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert "config.json: damaged" in refused(capsys, "--out=r", "--arm=a", "--trials=1", "--resume")
    start("--out=r", "--arm=a", "--trials=1")  # a new run does not mind
    assert len(table("r")) == 4


@pytest.mark.parametrize(
    "name", ["checkpoints", "metrics.csv", "config.json", "summary.json", "megabytes.png", "partition.csv"]
)
def test_a_file_where_a_folder_belongs_and_the_other_way_round(name, work, capsys):
    path = work / "r" / name
    (work / "r").mkdir()
    path.write_text("x") if name == "checkpoints" else path.mkdir()
    for more in ([], ["--resume"]):
        refused(capsys, "--out=r", *more)
    shutil.rmtree(work / "r")


def test_what_is_refused_late_deletes_nothing(work, capsys):
    """A trial after the first that cannot hold samples out, and a folder where a figure belongs."""

    flags, able = {"dataset": "tiny.npz", "clients": 4, "alpha": 0.1, "hold_out": 0.05}, []
    for trial in range(2):
        with contextlib.suppress(common.UsageError):
            config = Config(**flags)
            common.Federation(config, common.load_data("tiny.npz"), common.Streams(config.seed, trial))
            able.append(trial)
    assert able == [0]
    start("--out=r", "--alpha=0.1")
    before = files("r")
    assert "--hold-out" in refused(capsys, "--out=r", "--alpha=0.1", "--hold-out=0.05")
    assert files("r") == before
    (work / "r" / "own_accuracy.png").mkdir()
    assert "own_accuracy.png" in refused(capsys, "--out=r")
    assert files("r") == before


def test_events_of_another_project_stay(work):
    theirs = work / "r" / "tensorboard" / "theirs" / "events.out.1"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("x")
    start("--out=r")
    assert theirs.read_text() == "x"


def test_a_title_leaves_out_what_is_swept(work, capsys):
    np.savez("other.npz", **np.load("tiny.npz"))
    main([*SMALL[1:], "--out=r", "--dataset", "tiny.npz", "other.npz", "--rounds", "1", "2"])
    printed = capsys.readouterr().out
    assert "dataset=other.npz rounds=2: 2 trials, accuracy" in printed and "1 rounds" not in printed
    start("--out=r", "--rounds=3", "--alpha", "1", "2")
    assert "alpha=2.0: tiny.npz, 2 trials, 3 rounds, accuracy" in capsys.readouterr().out


def test_an_endless_flag_is_valid_json(work):
    start("--out=r", "--pull=inf", "--rounds=1")

    def strict(word):
        raise ValueError(word)

    for name in ("config.json", "summary.json"):
        saved = json.loads((work / "r" / name).read_text(), parse_constant=strict)
        assert (saved["config"] if name == "summary.json" else saved)["pull"] == float("inf")
    start("--out=r", "--pull=inf", "--rounds=1", "--resume")


def test_other_clients_are_other_data(work, capsys):
    arrays = dict(np.load("tiny.npz"))
    for owner in (np.arange(40) % 5, np.arange(40) % 4):
        np.savez("owned.npz", **arrays, owner=owner)
        common.load_data.cache_clear()
        flags = ["--dataset=owned.npz", "--partition=natural", "--out=r"]
        if owner.max() == 4:
            start(*flags)
    assert "of another run, left as it is (data" in refused(capsys, *flags, "--resume")


def test_a_run_that_diverges_ends_with_three_and_keeps_its_rounds(work, capsys):
    line = refused(capsys, "--out=r", "--arm=nan", "--trials=1", "--on-nonfinite=stop", status=3)
    assert "client 1 is not finite; 1 rounds are kept" in line or "2 rounds are kept" in line
    assert table("r")[0]["round"] == "1"


def test_a_full_disk_is_one_line_that_says_what_is_safe_and_resume_is_exact(work, capsys, monkeypatch):
    start("--out=whole")
    fsync, left = os.fsync, [9]

    def full(file, **_):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        line = refused(capsys, "--out=r", status=5)
        assert "writable: No space left on device; nothing was trained" in refused(capsys, "--out=new", status=5)
        assert refused(capsys, "--out=new", "--resume", "off", status=5).endswith("--resume off --resume")
        patch.setattr(Path, "mkdir", full)
        assert "No space left on device; nothing was trained" in refused(capsys, "--out=newer", status=5)
    assert "No space left on device" in line and "rounds are kept in r" in line and line.endswith("--out=r --resume")
    start("--out=r", "--resume")
    assert content("r") == content("whole") and table("r") == table("whole")


def test_signals_are_restored(work):
    def mine(*_):
        raise AssertionError("not called")

    before, interrupt = signal.signal(signal.SIGTERM, mine), signal.getsignal(signal.SIGINT)
    try:
        start("--out=r", "--arm=a", "--trials=1")
        assert signal.getsignal(signal.SIGTERM) is mine and signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_command_is_the_one_that_was_typed(monkeypatch):
    argv = ["--out", "a folder/it's", "--alpha=0.1"]
    assert shlex.split(experiment.typed("x/s.py", argv)) == ["python", "x/s.py", *argv]
    for name, value in {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    words = ["torchrun", "--standalone", "--nproc-per-node", "4", "x/s.py", *argv]
    assert shlex.split(experiment.typed("x/s.py", argv)) == words
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "--nnodes 2 --nproc-per-node 2" in experiment.typed("x/s.py", argv)
    assert experiment.place() == (1, 4, 2)


# -------------------------------------------------------------------------- more trials, partitions, finished folders


def trials_of(*accuracies, methods="abc") -> pd.DataFrame:
    """metrics.csv of one round: accuracies of each method by trial."""
    rows = [("", m, k, 1, a, 1, 0.0) for m, own in zip(methods, accuracies, strict=False) for k, a in enumerate(own)]
    return pd.DataFrame(rows, columns=["setting", "method", "trial", "round", "accuracy", "uploads", "seconds"])


def test_differences_of_all_pairs_and_holms_correction():
    from scipy.stats import ttest_rel

    values = np.array([[3.0, 5.0, 4.5, 6.0], [2.0, 4.5, 4.0, 4.0], [2.5, 4.9, 4.4, 5.2]])
    [two, _] = experiment.differences(experiment.per_trial(trials_of(*values[:2, :2]))).p
    assert two == pytest.approx(ttest_rel(*values[:2, :2]).pvalue)
    table = experiment.differences(experiment.per_trial(trials_of(*values)))
    last = table[table.measure == "last10"]
    assert list(zip(last.a, last.b, strict=True)) == [("a", "b"), ("a", "c"), ("b", "c")]
    p = [ttest_rel(values[i], values[j]).pvalue for i, j in ((0, 1), (0, 2), (1, 2))]
    assert last.p.tolist() == pytest.approx(p)
    small, large = min(p[:2]), max(p[:2])
    assert sorted(last.holm.tolist()[:2]) == pytest.approx([2 * small, max(2 * small, large)]) and np.isnan(last.holm.iloc[2])
    [[same, moved, _], _] = (
        experiment.differences(experiment.per_trial(trials_of([1, 2], [1, 2], [2, 3]))).p.values.reshape(3, 2).T
    )
    assert (same, moved) == (1, 0)  # without any spread


def test_trials_are_added_until_the_interval_is_narrow(work, capsys):
    def widths(*argv):
        start("--out=r", "--arm", "a", "late", "--trials=2", "--rounds=2", *argv)
        return sorted({int(row["trial"]) for row in table("r")})

    assert widths("--until-halfwidth=0.5") == [0, 1]  # the arms are alike
    assert "2 trials: the first difference is known to +- 0.00; to +- 0.5 it takes about 2" in capsys.readouterr().err


def test_too_wide_looks_at_the_width_and_says_how_many_trials_it_takes(capsys):
    from scipy.stats import t

    rows = trials_of([1.0, 2.0, 6.0], [0.0, 0.0, 0.0]).to_dict("records")
    config = Config(until_halfwidth=2.0, most_trials=9)
    assert experiment.too_wide(rows, config)
    said = int(capsys.readouterr().err.split()[-1])
    sd = np.std([1.0, 2.0, 6.0], ddof=1)
    assert t.ppf(0.975, said - 1) * sd / said**0.5 <= 2 < t.ppf(0.975, said - 2) * sd / (said - 1) ** 0.5
    assert not experiment.too_wide(rows, Config(until_halfwidth=2.0, most_trials=3))
    assert not experiment.too_wide(rows, Config(until_halfwidth=7.0))
    capsys.readouterr()
    assert experiment.too_wide(trials_of([1.0], [2.0]).to_dict("records"), config)  # one trial has no width
    assert capsys.readouterr().err == ""
    assert not experiment.too_wide(trials_of([1.0]).to_dict("records"), config)  # nor has one method a difference


def test_show_partition_draws_and_trains_nothing(work, monkeypatch, capsys):
    monkeypatch.undo()
    monkeypatch.chdir(work)
    start("--out=r", "--show-partition", "--alpha", "0.1", "100")
    rows = pd.read_csv("r/partition.csv")
    assert {path.name for path in (work / "r").iterdir()} == {"partition.csv", "partition.png"}
    assert rows.groupby("setting").samples.sum().to_dict() == {"alpha=0.1": 40, "alpha=100.0": 40}
    config = Config(dataset="tiny.npz", alpha=100.0)
    fl = common.Federation(config, common.load_data("tiny.npz"), common.Streams(config.seed, 0))
    own = rows[(rows.setting == "alpha=100.0") & (rows.client == 2)]
    assert (
        dict(zip(own["class"], own.samples, strict=True)) == pd.Series(fl.data.y_train[fl.shards[2]]).value_counts().to_dict()
    )
    start("--out=trained", "--alpha", "0.1", "100")
    assert pd.read_csv("trained/partition.csv").equals(rows) and Path("trained/partition.png").exists()


def test_instead(work, capsys):
    seen = []

    def instead(config, runs, folder):
        seen.append((config.arm, len(runs), folder.exists()))
        return config.size == 5

    def run(*argv):
        experiment.main(Config, PRESETS, "A test.", federate, ("arm",), instead=instead, argv=[*SMALL, "--out=r", *argv])

    run("--size=4", "--trials=1")
    before = files("r")
    run("--size=5", "--trials=1")
    assert files("r") == before and seen == [("a", 2, True)] * 2


def test_report_of_finished_folders(work, capsys):
    start("--out=one", "--arm=a")
    start("--out=two", "--arm=b")
    start("--out=three", "--arm=a", "--pull=0.9")
    capsys.readouterr()
    experiment.report_folders(["report", "one", "two"])
    printed = capsys.readouterr().out
    assert "a - b: final +0.00 [+0.00, +0.00]" in printed and (work / "one" / "report.png").exists()
    experiment.report_folders(["report", "one", "three"])
    assert "a (one) - a (three): final" in capsys.readouterr().out
    for sweep in ("1", "2"):
        start(f"--out={sweep}/r", "--arm=a", f"--pull=0.{sweep}")
    experiment.report_folders(["report", "1/r", "2/r", "1/r"])
    assert "a (1/r) - a (2/r): final" in capsys.readouterr().out
    for bad in ("gone", "."):
        with pytest.raises(SystemExit) as stop:
            experiment.report_folders(["report", "one", bad])
        assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1
    path, columns = Path("one/metrics.csv"), "setting,method,trial,round,accuracy,uploads,seconds\n"
    path.write_text(f"{columns},None,0,1,3,1,1\n,nan,0,1,2,1,1\n")  # words that pandas would take for nothing
    experiment.report_folders(["report", "one"])
    assert "None - nan: final +1.00" in capsys.readouterr().out
    for row in (",a,0,one,3,1,1", ",a,0,1,x,1,1"):  # a table of another program
        path.write_text(f"{columns}{row}\n")
        with pytest.raises(SystemExit) as stop:
            experiment.report_folders(["report", "one"])
        assert stop.value.code == 2 and "one: no metrics.csv of a run" in capsys.readouterr().err


def test_tables_hide_no_column_of_a_long_name(capsys):
    long = "client-power-of-choice+data-anti"
    experiment.show_table(experiment.per_trial(trials_of([50.0, 60.0], [50.0, 60.0], methods=(long, "b"))), "2 trials")
    printed = capsys.readouterr().out
    assert all(name in printed for name in (long, "final", "last10", "uploads", "seconds")) and "..." not in printed


def test_no_more_processes_than_there_are_runs(work, monkeypatch):
    asked = []

    def parallel(jobs, **_):
        asked.append(jobs)
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "Parallel", parallel)
    with pytest.raises(SystemExit):
        start("--out=r", "--trials=1", "--jobs=64")
    assert asked == [2]


def test_gaps_in_the_heap_are_given_back_every_ten_rounds(bare, monkeypatch):
    trimmed = []
    monkeypatch.setattr(common, "trim", lambda: trimmed.append(1))
    start("--out=r", "--trials=1", "--arm=a", "--rounds=29")
    assert len(trimmed) == 2


def test_a_checkpoint_that_may_not_be_read_is_not_called_damaged(work, capsys, monkeypatch):
    start("--out=r", "--trials=1")

    def closed(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(experiment, "zipfile", types.SimpleNamespace(ZipFile=closed))
    line = refused(capsys, "--out=r", "--trials=1", "--resume")
    assert line.endswith(".pt: Permission denied")


def test_tracking(work, capsys, monkeypatch):
    if not importlib.util.find_spec("tensorboard"):
        assert "pip install tensorboard" in refused(capsys, "--track=tensorboard")
    seen = []

    class Writer:
        def __init__(self, folder, purge_step):
            assert purge_step == 1
            self.folder = Path(folder)

        def add_scalar(self, name, value, t):
            seen.append((self.folder.name, name, value, t))

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    start("--out=r", "--track=tensorboard", "--trials=1")
    own = {(t, name): value for run, name, value, t in seen if run == point("a")[:-3]}
    assert own[4, "uploads"] == 8 and own[1, "accuracy"] == pytest.approx(float(table("r")[0]["accuracy"]))


# ------------------------------------------------------------------------- held-out samples, tuned flags, stacked trials


@pytest.fixture
def bare(work, monkeypatch):
    """`work`, where a command draws nothing and prints no table."""
    gmm = importlib.import_module("fedcl_gmm_sync")
    for owner, name, value in ((experiment, "conclude", lambda *_: None), (gmm, "TEACHING_STEPS", 2), (gmm, "DRAWS", 50)):
        monkeypatch.setattr(owner, name, value)
    return work


def command(name: str, *argv: str) -> list[dict]:
    """metrics.csv of a short run of one of the five scripts; nothing where an update was not finite."""
    from reliability import short_run

    script = importlib.import_module(name)
    *_, out = (word[6:] for word in argv if word.startswith("--out="))
    words = [word for word in short_run(script) if not word.startswith("--width")]
    try:
        script.main([*words, *argv])
    except SystemExit as stop:
        assert stop.code == 3
        return []
    return table(out)


def of_run(rows: list[dict]) -> dict:
    """{(method, trial): its rows}"""
    return {
        (r["method"], r["trial"]): [s for s in rows if (s["method"], s["trial"]) == (r["method"], r["trial"])] for r in rows
    }


@pytest.mark.parametrize("share", [0.2, 0.29, 0.5])
def test_a_share_of_each_client_is_held_out(work, share, monkeypatch):
    config, data = Config(dataset="tiny.npz", alpha=1.0, dtype="float64"), common.load_data("tiny.npz")
    whole = common.Federation(config, data, common.Streams(1))
    config.hold_out = share
    fl, seen, train = common.Federation(config, data, common.Streams(1)), [], common.train
    for all_of_it, kept in zip(whole.shards, fl.shards, strict=True):
        held = np.setdiff1d(all_of_it, kept)
        assert len(held) == round(100 * share) * len(all_of_it) // 100 and len(np.union1d(held, kept)) == len(all_of_it)
        assert set(held) <= set(fl.held.tolist())
    assert len(fl.held) + fl.sizes.sum() == 40 and fl.sizes.tolist() == [len(shard) for shard in fl.shards]
    assert torch.equal(fl.data.x_test, data.x_train[fl.held]) and torch.equal(fl.data.y_test, data.y_train[fl.held])
    assert torch.equal(fl.data.images("test"), data.images("train")[fl.held]) and len(data.x_test) == 20
    monkeypatch.setattr(common, "train", lambda *args, **flags: seen.append(args[3]) or train(*args, **flags))
    fl.train_centrally(2)
    assert not np.isin(np.concatenate(seen[0]), fl.held).any()  # an expert does not see them
    config.hold_out, config.clients, config.partition = 0.2, 20, "iid"
    with pytest.raises(common.UsageError, match="--hold-out 0.2 .*no client holds"):
        common.Federation(config, data, common.Streams(1))


TUNED = {
    "fedavg_curriculum": (["--score=L"], "lr", ["0.003", "0.5", "1e30"], ""),
    "client_curriculum": (["--client-order=curriculum"], "pacing-b", ["0.1", "1.0"], ""),
    "fedcl_fgn": (["--base=fedprox"], "mu", ["0.0", "5.0"], ""),
    "fedcl_gmm_sync": (["--method", "fedcl", "fedavg"], "lam", ["0.1", "9.0"], "fedavg"),
    "fedac_art": (["--arm", "fedac", "base"], "w-small", ["0.0", "3.0"], "base"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_tune_takes_what_is_best_on_held_out_samples_and_trains_with_it(name, bare):
    """Against commands without --tune: a short one for each value, and whole ones with the values that were chosen."""
    flags, flag, values, blind = TUNED[name]
    flags = [*flags, "--clients=3", "--trials=2", "--dtype=float64", "--eval-every=2", "--batch-size=4"]
    short = {v: command(name, *flags, f"--{flag}={v}", "--hold-out=.2", "--rounds=3", f"--out=short{v}") for v in values}
    short = {v: {run: float(rows[-1]["accuracy"]) for run, rows in of_run(rows).items()} for v, rows in short.items()}
    whole = {v: of_run(command(name, *flags, f"--{flag}={v}", "--rounds=5", f"--out=whole{v}")) for v in values}
    tuned = command(name, *flags, f"--tune={flag}={','.join(values)}", "--tune-rounds=3", "--rounds=5", "--out=tuned")
    for run, rows in of_run(tuned).items():
        best = max(values, key={v: short[v].get(run, -1) for v in values}.get)  # the first of equals
        assert {row["tuned"] for row in rows} == ({""} if run[0] == blind else {best})
        if run[0] != blind:
            assert [{n: v for n, v in row.items() if n != "tuned"} for row in rows] == whole[best][run]
    assert len({tuple(row.items()) for row in tuned}) == 2 * 5 * len({row["method"] for row in tuned})


def test_an_arm_that_replays_another_one_is_tuned_too(bare):
    rows = command("fedcl_fgn", "--arm", "constant", "cl", "--rounds=6", "--tune=lr=.001,.2", "--tune-rounds=9", "--out=r")
    runs = of_run(rows)
    uploads = [int(own[-1]["uploads"]) for own in runs.values()]
    assert len(runs) == 2 and uploads[0] == uploads[1] and {row["tuned"] for row in rows} <= {"0.001", "0.2"}


def choices(folder) -> dict:
    """{(arm, trial): accuracies of the values of --tune}"""
    found = [torch.load(path, weights_only=True) for path in Path(folder).glob("checkpoints/tuned-*.pt")]
    return {(saved["fingerprint"]["order"], saved["fingerprint"]["trial"]): saved["content"].tolist() for saved in found}


def test_the_choice_reads_no_test_sample_and_is_made_once(bare, monkeypatch, capsys):
    tune = ["--trials=2", "--rounds=4", "--tune=lr=.003,.1,.5", "--tune-rounds=2"]
    whole = command("fedavg_curriculum", *tune, "--out=whole")
    assert command("fedavg_curriculum", *tune, "--jobs=2", "--out=jobs") == whole
    arrays = dict(np.load("tiny.npz"))
    np.savez("other.npz", **arrays | {"x_test": 255 - arrays["x_test"], "y_test": arrays["y_test"][::-1]})
    command("fedavg_curriculum", *tune, "--dataset=other.npz", "--out=other")
    assert len(choices("whole")) == 4 and choices("other") == choices("whole") == choices("jobs")

    rehearse, calls = experiment.Run.rehearse, []

    def cut(run, config):
        calls.append(run)
        if len(calls) == 8:  # in the middle of the third run's choice
            raise KeyboardInterrupt
        return rehearse(run, config)

    monkeypatch.setattr(experiment.Run, "rehearse", cut)
    with pytest.raises(AssertionError):  # exit status 130
        command("fedavg_curriculum", *tune, "--out=cut")
    assert command("fedavg_curriculum", *tune, "--out=cut", "--resume") == whole and len(calls) == 8 + 6
    next(Path("cut/checkpoints").glob("vanilla-*-trial1.pt")).unlink()
    assert command("fedavg_curriculum", *tune, "--out=cut", "--resume") == whole and len(calls) == 8 + 6
    capsys.readouterr()
    with pytest.raises(AssertionError):
        command("fedavg_curriculum", *tune[:2], "--tune=lr=.003,.1", "--tune-rounds=2", "--out=cut", "--resume")
    assert "tune lr=.003,.1,.5, not lr=.003,.1" in capsys.readouterr().err


def test_ties_tables_and_caches_of_a_tuned_flag(work, capsys):
    start("--out=r", "--tune=pull=.75,.25", "--tune-rounds=2")
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in shown if line[:2] in ("a ", "b ")][:1] == ["0.75"] and "tuned" in shown[2]
    assert {(r["method"], r["tuned"]) for r in table("r")} == {("a", "0.75"), ("b", "")}  # b does not read it
    start("--out=fixed", "--pull=.75")
    states = reached("r")[point("a")]["state"], reached("fixed")[point("a", more="-pull=0.75")]["state"]
    assert repr(states[0]) == repr(states[1])  # whose cached expert is that of the value, too
    summary = json.loads(Path("r/summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["results"][""]["a"]["tuned"] == [0.75] * 2 and summary["results"][""]["b"]["tuned"] == [None] * 2


@pytest.mark.parametrize(
    "words",
    [
        *("lr", "lr=", "=1", "lr=x", "lr=0.1,", "lr=0", "lr=nan", "momentum=0.5,1", "mu=-0.5", "no_such=1", "dataset=1"),
        *("warm=1", "base=1", "rounds=3", "clients=4", "alpha=1", "seed=1", "trials=2", "tune=1", "hold-out=.1", "check=1"),
    ],
)
def test_a_wrong_tune_costs_one_line(words, work, capsys):
    before = files(work)
    assert ("--mu -0.5" if "mu" in words else "--tune") in refused(capsys, f"--tune={words}")
    assert files(work) == before


def test_tune_beside_flags_that_exclude_it(work, capsys):
    before = files(work)
    assert "not swept" in refused(capsys, "--tune=lr=.1,.2", "--lr", ".1", ".2")
    assert "--hold-out" in refused(capsys, "--tune=lr=.1", "--hold-out=.2")
    assert "no client holds samples enough" in refused(capsys, "--tune=lr=.1", "--clients=20", "--partition=iid")
    assert "no method here reads it" in refused(capsys, "--tune=pull=.75,.25", "--arm=b")  # b does not read it, a does
    assert files(work) == before
    from fedavg_curriculum import main as real

    with pytest.raises(SystemExit) as stop:
        real([*SMALL, "--clients=4", "--clients-per-round=2", "--tune=lr=1e30,1e32", "--out=r"])
    assert stop.value.code == 3 and "no value of --tune lr=1e30,1e32 leads to finite updates" in capsys.readouterr().err


STACKED = {
    "fedavg_curriculum": ["--base=scaffold", "--score=LG", "--lr-alpha=.01", "--momentum=.9", "--alpha=.3"],
    "client_curriculum": ["--client-order", "curriculum", "hics", "--base=fedadam"],
    "fedcl_fgn": ["--arm", "cl", "base", "random", "constant", "--base=vrlsgd", "--clients=8", "--min-size=1"],
    "fedcl_gmm_sync": ["--method=fedcl"],
    "fedac_art": ["--base=fedprox", "--mu=.1", "--arm=fedac"],
}


def close(a, b) -> bool:
    """States, rows, tensors alike to 1e-10, seconds left out."""
    if isinstance(a, torch.Tensor):
        return torch.allclose(a.double(), b.double(), rtol=0, atol=1e-10, equal_nan=True)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[name], b[name]) for name in a if name != "seconds")
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(close, a, b))
    return a == pytest.approx(b, rel=0, abs=1e-10, nan_ok=True) if isinstance(a, float) else a == b


def reached(folder) -> dict:
    return {name: saved["content"] for name, saved in checkpoints(folder).items() if isinstance(saved["content"], dict)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_stacked_trials_equal_trials_apart(name, bare, monkeypatch):
    """In float64 to 1e-10; the same bits in every stacked run; on from rounds that differ between trials."""
    flags, K, train = [*STACKED[name], "--trials=3", "--rounds=4", "--dtype=float64"], [], common.train
    monkeypatch.setattr(common, "train", lambda *args, **how: K.append(len(args[3])) or train(*args, **how))
    command(name, *flags, "--out=apart")
    apart = K[:]
    del K[:]
    command(name, *flags, "--stack-trials", "--out=stacked")
    assert sum(K) == sum(apart) and (len(K) == len(apart)) == (name == "fedcl_gmm_sync")  # whose losses are its own
    if name == "fedavg_curriculum":
        assert K == [3 * 2] * 4 * 2
    assert close(reached("stacked"), reached("apart")) and reached("stacked")
    command(name, *flags, "--stack-trials", f"--jobs={1 + (name == 'fedavg_curriculum')}", "--out=again")
    assert content("again") == content("stacked")

    honest, clock = experiment.Run.record, [0.0]

    def cut(run, t, *args, **columns):
        if (run.trial, t) == (1, 2):
            raise KeyboardInterrupt
        clock[0] += 1  # writing costs nothing by this clock, so every round is saved
        honest(run, t, *args, **columns)

    with monkeypatch.context() as patch, pytest.raises(AssertionError):  # exit status 130
        patch.setattr(experiment.Run, "record", cut)
        patch.setattr(time, "perf_counter", lambda: clock[0])
        command(name, *flags, "--stack-trials", "--out=cut")
    assert {len(run["rows"]) for run in reached("cut").values()} == {2, 3} and not pools()
    command(name, *flags, "--stack-trials", "--out=cut", "--resume")
    assert close(reached("cut"), reached("apart"))


def pools() -> list:
    """The threads of trials that still live."""
    return [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]


@pytest.mark.parametrize("owner", [common, common.Federation])
def test_ctrl_c_ends_all_trials_of_a_stack(owner, bare, monkeypatch):
    """While the stack is trained, and in a trial's own thread."""
    flags = ["--trials=3", "--rounds=9", "--order=vanilla", "--stack-trials"]
    name, calls = "train" if owner is common else "aggregate", []
    honest = getattr(owner, name)

    def interrupted(*args, **how):
        calls.append(1)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return honest(*args, **how)

    monkeypatch.setattr(owner, name, interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as stop:
            importlib.import_module("fedavg_curriculum").main([*SMALL, "--clients=4", "--clients-per-round=2", *flags])
    finally:
        signal.signal(signal.SIGINT, before)
    assert stop.value.code == 130 and not pools() and len(calls) < 9


def test_a_trial_that_diverges_ends_its_stack(bare, capsys, monkeypatch):
    from reliability import short_run

    script, finite = importlib.import_module("fedavg_curriculum"), torch.isfinite
    rounds, honest = [], experiment.Run.record
    monkeypatch.setattr(torch, "isfinite", lambda x: finite(x) & (len(rounds) < 8))
    monkeypatch.setattr(experiment.Run, "record", lambda *args, **how: rounds.append(1) or honest(*args, **how))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        script.main([*short_run(script), "--trials=3", "--rounds=5", "--order=vanilla", "--stack-trials", "--out=r"])
    lines = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert stop.value.code == 3 and not pools()
    assert len(lines) == 1 and "trial 3: round 3: the update of client" in lines[0] and "rounds are kept" in lines[0]


def test_stacked_and_other_checkpoints_are_told_apart(bare, capsys):
    flags = [*SMALL, "--clients=4", "--clients-per-round=2", "--rounds=2", "--order=vanilla", "--trials=2", "--out=r"]
    script = importlib.import_module("fedavg_curriculum")
    script.main([*flags, "--stack-trials"])
    with pytest.raises(SystemExit) as stop:
        script.main([*flags, "--resume"])
    assert stop.value.code == 2 and "stack_trials True, not False" in capsys.readouterr().err
    script.main([*flags, "--stack-trials", "--resume", "--trials=4"])
    assert len(table("r")) == 8


def test_only_calls_that_differ_in_their_clients_alone_are_stacked(work, monkeypatch):
    data, other = common.load_data("tiny.npz"), common.resident(*(dict(np.load("tiny.npz"))[n] for n in ARRAYS))
    model, rng, K, train = common.build_model("lenet5", data, dtype=torch.float64), np.random.default_rng(0), [], common.train

    def call(steps=(3, 1), data=data, lr=0.1, **options):
        batches = [rng.integers(0, 40, (T, 4)) for T in steps]
        return model, model.init(len(steps)), data, batches, {"lr": lr, "momentum": 0.5, "seeds": [0] * len(steps)} | options

    eta = 0.1 / np.arange(1, 6)
    weights, c = [rng.random((T, 4)) for T in (3, 1)], torch.ones(2, model.trainable, dtype=torch.float64)
    apart = {"momentum": 0.4}, {"lr": 0.2}, {"data": other}, {"lr": np.full(3, 0.1)}, {"weights": weights}
    apart = [call(**flags) for flags in (*apart, {"correction": c}, {"penalty": lambda step: step.logits.sum((1, 2))})]
    same = [call(), call((2, 4, 1)), call((5,))]
    schedules = [call(lr=eta[:3]), call((5, 2), lr=eta), call((4,), lr=eta[:4]), call((4,), lr=eta[:4] + [0, 0, 0, 0.1])]
    corrected = [call(correction=3 * c), call(correction=c)]
    calls = [*same, *apart, *schedules, *corrected]
    order = rng.permutation(len(calls))
    monkeypatch.setattr(common, "train", lambda *args, **how: K.append(len(args[3])) or train(*args, **how))
    stacked = common.train_together([calls[k] for k in order])
    assert sorted(K) == sorted([6, 5, 1, 2, 2, 2, 2, 2, 6, 2])
    for k, update in zip(order, stacked, strict=True):
        *args, options = calls[k]
        assert close(torch.as_tensor(update.weights), (alone := train(*args, **options)).weights)
        for column in ("steps", "samples", "length", "grad_sq", "loss"):
            assert getattr(update, column) == pytest.approx(getattr(alone, column), rel=1e-10)


# --------------------------------------------------------------------------------------- as a process, with its pipes


def process(folder, *argv: str, script=(sys.executable, __file__), **how) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(Path(common.__file__).parent), "OMP_NUM_THREADS": "1", **how.pop("env", {})}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder, "env": environment} | how
    return subprocess.Popen([*script, *SMALL, *argv], **how)


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def family(pid: int) -> list[int]:
    """The processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == pid and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(("sent", "status", "jobs"), [(signal.SIGINT, 130, 1), (signal.SIGTERM, 143, 2)])
def test_a_signal_keeps_the_rounds_and_prints_the_command_that_goes_on(work, sent, status, jobs):
    argv = ["--rounds=40", "--pause=0.05", f"--jobs={jobs}", "--out=it's a folder"]
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background processes are deaf to Ctrl-C
    running = process(work, *argv, start_new_session=True, preexec_fn=heard)
    wait_for(lambda: list(work.glob("it's a folder/checkpoints/a-*.pt")) or running.poll() is not None)
    running.send_signal(sent)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == status and "Traceback" not in errors, errors
    *_, said, printed = errors.strip().splitlines()
    kept = table("it's a folder")
    assert f"stopped: {len(kept)} rounds are kept in it's a folder" in said
    wait_for(lambda: family(running.pid) == [], 5)
    again = shlex.split(printed)
    assert again == ["python", __file__, *SMALL, *argv, "--resume"]
    main([*again[2:], "--pause=0.05"])
    main([*SMALL, *argv[:2], "--out=whole"])
    assert content("it's a folder") == content("whole") and table("it's a folder") == table("whole")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_worker_that_dies_ends_the_run_in_one_line(work):
    running = process(work, "--rounds=400", "--pause=0.05", "--jobs=2", "--out=r", start_new_session=True)
    wait_for(lambda: len(list(work.glob("r/checkpoints/[ab]-*.pt"))) >= 2 or running.poll() is not None)
    workers = [pid for pid in family(running.pid) if b"loky" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    workers = [pid for pid in workers if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(workers[-1], signal.SIGKILL)
    _, errors = running.communicate(timeout=60)
    lines = [line for line in errors.replace("\r", "\n").splitlines() if "error: " in line]
    assert running.returncode == 4 and "Traceback" not in errors and len(lines) == 1, errors
    assert "a process of --jobs is gone" in lines[0] and lines[0].endswith("--out=r --resume")
    wait_for(lambda: family(running.pid) == [], 5)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_no_orphan_outlives_its_parent_and_none_writes_into_a_later_run(work):
    running = process(work, "--rounds=400", "--pause=0.05", "--jobs=2", "--seed=1", "--out=r", start_new_session=True)
    wait_for(lambda: len(list(work.glob("r/checkpoints/[ab]-*.pt"))) >= 2 or running.poll() is not None)
    assert len(family(running.pid)) >= 3
    running.kill()
    running.communicate()
    wait_for(lambda: family(running.pid) == [], 5)
    start("--out=r", "--seed=2")  # the lock went with the process
    before = table("r")
    time.sleep(1)
    start("--out=r", "--seed=2", "--resume")
    assert table("r") == before and len(before) == 16


def test_what_was_trained_on_other_data_is_not_resumed(work, capsys):
    start("--out=r", "--arm=a")
    arrays = dict(np.load("tiny.npz"))
    for name, changed in arrays.items():
        np.savez("tiny.npz", **arrays | {name: changed[::-1].copy()})
        common.load_data.cache_clear()
        assert "of another run, left as it is (data " in refused(capsys, "--out=r", "--arm=a", "--resume")
    np.savez("tiny.npz", **arrays)
    common.load_data.cache_clear()
    start("--out=r", "--arm", "a", "b", "--resume")


def test_figures_of_a_wider_run_go_with_it_after_a_narrower_resume(work):
    def drawing(df, runs, folder):
        for method in df.method.unique():
            (folder / f"{method}.png").write_bytes(b"png")

    def run(*flags):
        experiment.main(Config, PRESETS, "A test.", federate, ("arm",), report=drawing, argv=[*SMALL, "--out=r", *flags])
        return {path.name for path in Path("r").glob("?.png")}

    assert run("--arm", "a", "b") == {"a.png", "b.png"} == run("--arm", "a", "--resume")
    assert run("--arm", "a", "--seed=9") == {"a.png"}


def test_a_new_run_that_is_refused_leaves_the_old_one(work, capsys):
    start("--out=r")
    before = {path.name for path in Path("r").iterdir()}
    shutil.rmtree("r/checkpoints")
    Path("r/checkpoints").write_text("a file")
    refused(capsys, "--out=r", "--seed=5")
    assert {path.name for path in Path("r").iterdir()} == before and len(table("r")) == 16


@pytest.mark.parametrize("code", [0, 7, "text"])
def test_a_users_own_code_that_exits_does_not_end_the_run_in_silence(code):
    with pytest.raises(common.UsageError, match=f"^--score x: SystemExit: {code}$"), experiment.users("--score x"):
        sys.exit(code)
    with pytest.raises(common.UsageError, match="^--score x: ValueError: one$"), experiment.users("--score x"):
        raise ValueError("one\ntwo")
    with pytest.raises(SystemExit), experiment.users("--score x"):
        sys.exit(143)  # SIGTERM


def test_a_rank_whose_torchrun_was_killed_while_it_imported_ends_in_one_line(work):
    with socket.socket() as free:  # nobody listens here
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    rank = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    running = process(work, "--out=r", env=rank | {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 4 and len(errors.splitlines()) == 1, errors
    assert "error: rank 1: torchrun is gone (" in errors and "; nothing was trained. To go on: torchrun " in errors
    assert not (work / "r").exists()


def test_pipes_and_environment(work):
    odd = {"PYTHONIOENCODING": "ascii", "MPLBACKEND": "nonsense"}
    quoted = shlex.join([sys.executable, __file__, *SMALL, "--trials=1"])
    done = [
        process(work, script=["bash", "-c", f"{quoted} --out=ü | head -1; exit ${{PIPESTATUS[0]}}", ""], env=odd),
        process(work, script=["bash", "-c", f"{quoted} --out=full >/dev/full", ""]),
        process(work, script=["bash", "-c", f"{quoted} --out=mute >/dev/full 2>&1", ""]),
        process(work, script=["bash", "-c", f"{quoted} --out=closed >&- 2>&-", ""]),
        process(work, script=["bash", "-c", f"{shlex.join([sys.executable, __file__])} --help | head -1", ""]),
        process(work, script=["bash", "-c", f"{shlex.join([sys.executable, __file__])} --help >/dev/full", ""]),
    ]
    for running, folder in zip(done, ("ü", "full", "mute", "closed", "", "help"), strict=True):
        _, errors = running.communicate(timeout=120)
        assert running.returncode == 5 * (folder in ("full", "mute", "help")), (folder, errors)
        assert "Traceback" not in errors and "Error" not in errors
        assert ("output is full" in errors) == (folder in ("full", "help"))
        if folder not in ("", "help"):
            assert {"metrics.csv", "summary.json", "accuracy.png"} <= {path.name for path in (work / folder).iterdir()}


def test_report_into_a_closed_pipe_a_full_disk_and_under_any_backend(work):
    start("--out=r")
    quoted = shlex.join([sys.executable, experiment.__file__, "report", "r"])
    ends = (" | head -1; exit ${PIPESTATUS[0]}", " >/dev/full", "; exit $?")
    commands = [quoted + end for end in ends] + [f"ulimit -f 1; {quoted}"]
    environment = {**os.environ, "MPLBACKEND": "nonsense", "PYTHONIOENCODING": "ascii"}
    running = [subprocess.Popen(["bash", "-c", c], stderr=subprocess.PIPE, text=True, env=environment) for c in commands]
    for ended, status in zip(running, (0, 5, 0, 2), strict=True):
        _, errors = ended.communicate(timeout=120)
        assert ended.returncode == status and "Traceback" not in errors, errors
        assert ("error: " in errors) == (status == 2)


def test_a_disk_that_is_really_full(work):
    """A limit on the size of a file: torch, and not Python, then meets the error."""
    limit = 300_000

    def small():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    running = process(work, "--out=r", "--size=1000000", preexec_fn=small)
    _, errors = running.communicate(timeout=60)
    lines = [line for line in errors.replace("\r", "\n").splitlines() if "error" in line]
    assert running.returncode == 5 and len(lines) == 1 and "0 rounds are kept in r" in lines[0], errors


if __name__ == "__main__":
    main()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_mistake_is_left_to_rank_0_to_end_with(rank, monkeypatch, capsys):
    """torchrun stops the others with SIGTERM, which must then end them."""
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    waited = []
    monkeypatch.setattr(experiment.time, "sleep", lambda seconds: waited.append(signal.getsignal(signal.SIGTERM)))
    with pytest.raises(SystemExit) as stop:
        main(["--rounds=x"])
    assert stop.value.code == 2 and waited == [signal.SIG_DFL] * (rank == "1")
    assert ("error: argument --rounds" in capsys.readouterr().err) == (rank == "0")


def test_the_curve_over_megabytes_counts_both_ways(work, monkeypatch):
    drawn = {}
    monkeypatch.setattr(experiment, "curves", lambda df, path, *y, **how: drawn.update({path.name: (df, how)}))
    rows = command("fedavg_curriculum", "--base=scaffold", "--rounds=3", "--out=r")
    df, how = drawn["megabytes.png"]
    assert how == {"x": "megabytes"} and len(df) == len(rows) == 6
    for seen, row in zip(df.megabytes, rows, strict=True):
        assert seen == float(row["received_mb"]) + float(row["sent_mb"]) > 0


def test_the_figure_of_who_loses_shows_mean_and_worst_tenth_of_the_clients(work, monkeypatch):
    drawn = {}
    monkeypatch.setattr(experiment, "curves", lambda df, path, *y, **how: drawn.update({path.name: (df, y)}))
    rows = command("fedavg_curriculum", "--per-client", "--eval-every=2", "--rounds=3", "--out=r")
    df, names = drawn["own_accuracy.png"]
    assert names == ("own_mean", "own_worst_tenth")
    tested = df.dropna(subset="own_mean")  # rounds 2 and 3
    wanted = [[float(row[name]) for name in names] for row in rows if row["own_mean"]]
    assert tested[[*names]].to_numpy().tolist() == wanted and len(wanted) == 4
    command("fedavg_curriculum", "--rounds=1", "--out=without")
    assert "own_accuracy.png" in drawn and not Path("without/own_accuracy.png").exists()
