"""Nothing lost, nothing silent, in all five scripts: what a run owes its user."""

import importlib
import math
from pathlib import Path

import numpy as np
import pytest
import reliability
from reliability import ARMS, SCRIPTS, errors_of, outcome, run_line, same, short_run

import bases
import data
import training
from experiment import figures

every_script = pytest.mark.parametrize("name", SCRIPTS)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """An empty folder to work in with reliability's small data set; nothing is drawn."""
    monkeypatch.chdir(tmp_path)
    reliability.write_tiny(tmp_path)
    data.read_data.cache_clear()
    monkeypatch.setattr(figures, "plot", lambda *_, **__: None)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)
    gmm = importlib.import_module("fedcl_gmm_sync")
    monkeypatch.setattr(gmm, "TEACHING_STEPS", 2)
    return tmp_path


def command(name: str, *more: str) -> list[str]:
    return [*short_run(name), "--rounds=3", *more]


def trained(name: str, *more: str) -> None:
    status, _, errors = run_line(name, command(name, *more))
    assert status == 0, errors


def wrong_values(about: dict) -> list[str]:
    """Words that a flag must refuse."""
    if about["kind"] is bool:
        return ["x"]
    if about["choices"]:
        return ["no-such", "nan", ""]
    if about["kind"] is str:
        return []
    words = ["no-such", "nan", "", "-inf"]
    if about["high"] != math.inf:
        words.append("inf")
    if about["kind"] is int:
        words.append("1.5")
    if about["low"] is not None:
        words.append(str(about["low"] - 1))
    if about["above"] is not None:
        words.append(str(about["above"]))
    if about["high"] not in (None, math.inf):
        words.append(str(about["high"] + 1))
    return words


@every_script
def test_every_flag_refuses_every_wrong_value(name):
    count = 0
    for flag, about in reliability.flags_of(name).items():
        option = "--" + flag.replace("_", "-")
        for word in wrong_values(about):
            status, output, errors = run_line(name, [f"{option}={word}"])
            lines = errors_of(errors)
            assert status == 2 and not output and len(lines) == 1, (option, word, errors)
            assert option in lines[0] and "error: " in lines[0]
            count += 1
    assert count > 150


def test_random_command_lines_train_or_are_refused():
    tally = reliability.command_lines(seed=1, count=40)
    assert tally["fault"] == 0 and tally[0] >= 8 and tally[2] >= 8


CHANGED = {
    "fedavg_curriculum": ("--pacing-b=0.3", "pacing_b 0.2, not 0.3"),
    "client_curriculum": ("--f-ord=0.5", "f_ord "),
    "fedcl_fgn": ("--delta=0.5", "delta 0.01, not 0.5"),
    "fedcl_gmm_sync": ("--lam=0.7", "lam "),
    "fedac_art": ("--art-beta=0.5", "art_beta "),
}


@every_script
def test_resume_names_a_changed_flag_of_the_script_with_both_values(name, tiny):
    trained(name, "--out=r")
    changed, said = CHANGED[name]
    status, _, errors = run_line(name, command(name, "--out=r", "--resume", changed))
    assert status == 2 and said in errors and f", not {changed.partition('=')[2]}" in errors


@every_script
def test_rounds_grow_or_are_refused(name, tiny):
    """Where they grow, the run is the one that had as many from the beginning."""
    trained(name, *ARMS[name], "--out=r")
    line = command(name, *ARMS[name], "--rounds=5", "--out=r", "--resume")
    status, _, errors = run_line(name, line)
    if status == 2:
        assert "rounds 3, not 5" in errors
        return
    assert status == 0, errors
    trained(name, *ARMS[name], "--rounds=5", "--out=whole")
    assert same(outcome(tiny / "r"), outcome(tiny / "whole"))


@every_script
def test_a_client_that_is_not_finite_leaves_an_empty_cell(name, tiny, monkeypatch):
    """The update of the first client of a first arm's second round."""
    train = training.train
    calls = []

    def poisoned(*args, **options):
        update = train(*args, **options)
        calls.append(1)
        if len(calls) == 3:
            update.finite[0] = False
        return update

    monkeypatch.setattr(training, "train", poisoned)
    status, output, errors = run_line(name, command(name, *ARMS[name], "--rounds=4", "--out=r"))
    assert status == 3 and "results: r" in output and "Traceback" not in errors
    assert "1 of 2 runs diverged" in errors_of(errors)[-1]
    rows, _ = outcome(tiny / "r")
    last = [row for row in rows if row["diverged"]]
    assert len(last) == 1 and last[0]["accuracy"] == ""


@every_script
def test_order_of_the_arms_tests_and_resume_change_no_bit(name, tiny):
    flag, *arms = ARMS[name]
    trained(name, flag, *arms, "--out=first")
    trained(name, flag, *reversed(arms), "--out=order")
    trained(name, flag, arms[0], "--out=later")
    trained(name, flag, *arms, "--out=later", "--resume")
    first, states = outcome(tiny / "first")
    assert len(first) >= 6
    assert same(outcome(tiny / "order")[1], states)
    assert same(outcome(tiny / "later"), (first, states))
    by_run = {(row["method"], row["round"]): row for row in outcome(tiny / "order")[0]}
    assert all(by_run[row["method"], row["round"]] == row for row in first)


@every_script
def test_chunk_changes_no_more_than_the_last_bits(name, tiny):
    thetas = []
    for chunk in (1, 2):
        trained(name, "--dtype=float64", f"--chunk={chunk}", f"--out=c{chunk}")
        _, states = outcome(tiny / f"c{chunk}")
        found = [state["theta"] for state in states.values() if isinstance(state, dict)]
        thetas.append(sorted(found, key=lambda theta: float(theta.sum())))
    assert len(thetas[0]) >= 2
    for one, other in zip(*thetas, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-10)


@every_script
def test_one_class_and_one_sample_are_handled_or_refused(name, tiny):
    rng = np.random.default_rng(0)
    for train, alone in ((40, []), (1, ["--clients=1", "--clients-per-round=1", "--min-size=1"])):
        arrays = {}
        for part, n in (("train", train), ("test", 10)):
            arrays[f"x_{part}"] = rng.integers(0, 256, (n, 16, 16, 1), dtype=np.uint8)
            arrays[f"y_{part}"] = np.zeros(n, int)
        np.savez("odd.npz", **arrays)
        data.read_data.cache_clear()
        line = [*short_run(name), "--dataset=odd.npz", *alone, f"--out={train}"]
        status, output, errors = run_line(name, line)
        assert not reliability.fault_of(status, output, errors)


def test_scripts_do_not_touch_what_they_share(tiny):
    """The bases' table and the memory of loaded data are as before."""
    before = dict(bases.BASES)
    trained("fedcl_fgn", "--out=r")
    assert before == bases.BASES
    assert Path("r/metrics.csv").exists()
