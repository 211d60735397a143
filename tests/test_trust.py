"""Nothing lost, nothing silent, in all five scripts: what a run owes its user."""

import importlib
import math
from pathlib import Path

import numpy as np
import ordinary
import pytest
import reliability
from reliability import ARMS, SCRIPTS, errors_of, outcome, run_line, same, short_run

import bases
import client_curriculum
import data
import experiment
import fedac_art
import fedavg_curriculum
import fedcl_fgn
import training
from experiment import figures
from results.client_curriculum import rivals as client_rivals
from results.fedac_art import controls as fedac_controls
from results.fedavg_curriculum import exposure, rivals
from results.fedcl_gmm_sync import controls

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


OTHER = {  # values off the default
    "rounds": 5,
    "epochs": 2,
    "mu": 0.7,
    "server_lr": 0.3,
    "score": "E",
    "expert_epochs": 2,
    "expert_recipe": "authors",
    "pacing": "root",
    "pacing_a": 0.3,
    "pacing_b": 0.6,
    "pacing_scope": "global",
    "lr_power": 0.3,
    "client_sampling": "uniform",
    "client_a": 0.3,
    "client_b": 0.6,
    "temperature": 0.01,
    "candidates": 3,
    "rho": 0.1,
    "art_alpha": 3.0,
    "art_beta": 0.5,
    "quantile": 0.1,
    "w_small": 0.1,
    "w_large": 0.7,
    "reduction": "group",
    "solo_epochs": 9,
    "warmup": 2,
    "detector": "fim",
    "detect_samples": 3,
    "delta": 0.5,
    "p_double": 0.6,
    "p_halve": 0.1,
    "distill": 0.7,
    "tau": 3.0,
    "lam": 0.9,
    "thresholds": "0.5,0.1",
    "v": 0.3,
    "phase_quorum": 0.5,
    "generator_hidden": 9,
}
EXPERT = "expert_epochs expert_recipe"
PACING = "pacing pacing_a pacing_b"
CLIENTS = "client_a client_b client_sampling"
WEIGHTS = "w_small w_large reduction solo_epochs"
PHASES = "thresholds v phase_quorum"
NO_USE = {"mu", "server_lr", "lr_power"}  # of FedAvg, and of a constant learning rate
UNREAD = [  # a program, a method, and what it does not read beside NO_USE
    (fedavg_curriculum, "--order=random", f"rounds score {EXPERT}"),
    (fedavg_curriculum, "--order=vanilla", f"rounds score {EXPERT} {PACING} pacing_scope"),
    (fedavg_curriculum, "--order=curriculum --pacing-scope=global", EXPERT),
    (exposure, "--order=random-step", f"rounds score {EXPERT} {PACING} pacing_scope"),
    (exposure, "--order=fixed", f"rounds score {EXPERT}"),
    (rivals, "--order=threshold", f"rounds {EXPERT} pacing"),
    (rivals, "--order=hard-threshold", f"rounds {EXPERT} pacing"),
    (client_curriculum, "curriculum vanilla", "pacing_a pacing_b client_sampling"),
    (client_curriculum, "vanilla anti", "rounds client_a client_b"),
    (client_curriculum, "vanilla vanilla", f"rounds score {PACING} client_a client_b"),
    (client_curriculum, "random random", "score client_sampling"),
    (client_rivals, "power-of-choice vanilla", f"rounds {PACING} {CLIENTS} temperature"),
    (client_rivals, "hics vanilla", "score pacing_a pacing_b client_sampling candidates"),
    (client_rivals, "coverage curriculum", "client_sampling candidates temperature"),
    (fedac_art, "--method=base", f"rounds rho art_alpha art_beta quantile {WEIGHTS}"),
    (fedac_art, "--method=fedac --base=solo --clients-per-round=4", "epochs"),
    (fedac_controls, "--method=base", f"{WEIGHTS} warmup"),
    (fedac_controls, "--method=base --features=encoder", WEIGHTS),
    (fedcl_fgn, "--method=base", "rounds detector detect_samples delta p_double p_halve"),
    (fedcl_fgn, "--method=random", "rounds detector detect_samples delta"),
    (fedcl_fgn, "--method=cl", "rounds detect_samples p_double p_halve"),
    (controls, "--method=fedcl", "distill"),
    (controls, "--method=fedcl-nofreeze", f"rounds distill {PHASES}"),
    (controls, "--method=fedgen", f"rounds distill tau lam {PHASES}"),
    (controls, "--method=fedavg-e", f"rounds distill tau lam generator_hidden {PHASES}"),
    (controls, "--method=feddistill", f"rounds tau lam generator_hidden {PHASES}"),
]


@pytest.mark.parametrize(("program", "method", "unread"), UNREAD)
def test_what_a_method_does_not_read_changes_nothing(program, method, unread, tiny):
    """All these flags are changed at once. Of more rounds, the first ones are the same."""
    if not method.startswith("--"):
        client_order, data_order = method.split()
        method = f"--client-order={client_order} --data-order={data_order}"
    words = [*reliability.SHORT.split(), "--rounds=3", *method.split()]
    [config], _ = experiment.parse(program.Config, {}, "doc", words)
    known = OTHER.keys() & program.Config.__dataclass_fields__
    found = known - config.results_depend_on().keys()
    assert found == (NO_USE & known) | {*unread.split()}
    words += ["--local-steps=2"] * (program is controls)
    changed = [f"--{flag.replace('_', '-')}={OTHER[flag]}" for flag in found]
    rows = []
    for folder, line in (("first", words), ("second", words + changed)):
        program.main([*line, f"--out={folder}"])
        rows.append(outcome(Path(folder))[0][:3])
    assert rows[0] == rows[1]


RESUMED = []
for base in bases.BASES:
    RESUMED.append((fedavg_curriculum, f"--order=anti --score=LG --base={base}"))
for orders in ("curriculum curriculum", "random vanilla", "hics vanilla"):
    client_order, data_order = orders.split()
    words = f"--client-order={client_order} --data-order={data_order} --base=scaffold"
    RESUMED.append((client_rivals, f"{words} --client-b=0.6"))
for method in ("fedcl", "fedensemble", "feddistill"):
    RESUMED.append((controls, f"--method={method} --local-steps=2"))


@pytest.mark.parametrize(("program", "method"), RESUMED)
def test_interrupted_and_resumed_is_the_same_run(program, method, tiny):
    """Ctrl-C in round 4 of 5: what bases, scores, queues and generators remember is kept."""
    words = [*reliability.SHORT.split(), "--rounds=5", *method.split()]
    program.main([*words, "--out=whole"])
    with ordinary.interrupted_at(3), pytest.raises(SystemExit) as stop:
        program.main([*words, "--out=cut"])
    assert stop.value.code == 130
    assert list(Path("cut/checkpoints").glob("*.pt"))
    program.main([*words, "--out=cut", "--resume"])
    assert same(outcome(Path("cut")), outcome(Path("whole")))


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
