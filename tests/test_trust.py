"""Nothing lost, nothing silent, in all five scripts: the short form of tests/reliability.py, and what a run owes its user."""

import csv
import dataclasses
import functools
import importlib
import json
import math
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import reliability
import torch
from kill_resume import same
from PIL import Image

import common

ROOT = Path(common.__file__).parent
SCRIPTS = [importlib.import_module(name) for name in reliability.SCRIPTS]
ARMS = {"client_curriculum": "client_order", "fedcl_fgn": "arms", "fedcl_gmm_sync": "method", "fedac_art": "arms"}
every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """An empty folder to work in with reliability's small data set."""
    monkeypatch.chdir(tmp_path)
    reliability.write_tiny(tmp_path)
    return tmp_path


def command(script, *more) -> list[str]:
    return [*reliability.short_run(script), "--rounds=3", *more]


def table(folder) -> list[dict]:
    """metrics.csv without the column of seconds."""
    with open(Path(folder) / "metrics.csv") as file:
        return [{k: v for k, v in row.items() if "second" not in k} for row in csv.DictReader(file)]


def states(folder) -> dict:
    paths = sorted((Path(folder) / "checkpoints").glob("*trial*.pt"))
    saved = {path.name: torch.load(path, weights_only=True) for path in paths}
    return {name: content["state"] for name, content in saved.items() if isinstance(content, dict)}


# ---------------------------------------------------------------------------------------------------------- bad input


def test_every_flag_refuses_every_wrong_value():
    refused = reliability.flag_matrix()
    assert set(refused) == {"wrong type", "nan", "inf", "empty", "below", "above"} and refused.total() > 1000


def test_random_command_lines_train_or_are_refused():
    tally = reliability.command_lines(seed=1, count=40)
    assert tally["fault"] == 0 and tally[0] >= 10 and tally[2] >= 10


def test_random_partitions():
    good, errors, *_ = reliability.partitions(np.random.default_rng(1), 60)
    assert good + errors == 60 and good >= 50


@pytest.mark.parametrize(
    "flags",
    [
        ["--dataset", "1" * 400],
        ["--dataset", ""],
        ["--dataset", "shakespeare", "--model", "lstm", "--data-dir", "1" * 400],
        ["--partition", "natural"],
        ["--out", "1" * 400],
    ],
    ids=["long name", "no name", "long folder", "no natural clients", "long results"],
)
def test_a_mistake_found_late_is_one_line_and_touches_no_results(tiny, flags):
    script = SCRIPTS[2]  # which warns of few clients once it trains
    assert reliability.run_line(script, command(script, "--out=r"))[0] == 0
    before = {path: path.read_bytes() for path in (tiny / "r").rglob("*") if path.is_file()}
    status, output, errors = reliability.run_line(script, command(script, "--out=r", *flags))
    assert status == 2 and not output and errors.count("\n") == 1, errors
    assert {path: path.read_bytes() for path in (tiny / "r").rglob("*") if path.is_file()} == before


@every_script
def test_resume_names_every_changed_flag_with_both_values(script, tmp_path):
    config = script.Config(threads=1)
    common._prepare(tmp_path, config)
    before = (tmp_path / "config.json").read_bytes()
    for field in dataclasses.fields(config):
        old = getattr(config, field.name)
        new = not old if isinstance(old, bool) else old[:1] * 2 if isinstance(old, tuple) else old + type(old)(1)
        changed = dataclasses.replace(config, **{field.name: new, "resume": True})
        if field.name in common.FREE_ON_RESUME:
            continue
        with pytest.raises(common.UsageError) as error:
            common._prepare(tmp_path, changed)
        words = [f"--{field.name.replace('_', '-')} was", *(repr(json.loads(json.dumps(value))) for value in (old, new))]
        assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)
        assert (tmp_path / "config.json").read_bytes() == before


def test_a_share_of_the_data_that_leaves_too_few_samples_is_one_line(tiny):
    script = SCRIPTS[3]
    status, output, errors = reliability.run_line(script, command(script, "--data-share=0.1", "--out=r", "--resume"))
    assert status == 2 and not output and errors.count("\n") == 1 and "only 4 samples" in errors
    assert not (tiny / "r").exists()


# --------------------------------------------------------------------------------------------------------------- data


def write_small(name, n_train, n_test, classes, channels=3, folder="."):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (n_train + n_test, 16, 16, channels), dtype=np.uint8)
    y = np.arange(n_train + n_test) % classes
    path = Path(folder) / name
    np.savez(path, x_train=x[:n_train], y_train=y[:n_train], x_test=x[n_train:], y_test=y[n_train:])
    return str(path)


@every_script
def test_one_class_and_one_sample_are_handled_or_refused(script):
    with reliability.watched() as (folder, run):
        one_class = write_small("class.npz", 40, 10, 1)
        status, fault = run(script, [*reliability.short_run(script), "--dataset", one_class, "--out=a"])
        assert not fault and status in (0, 2)
        one_sample = write_small("sample.npz", 1, 1, 1)
        alone = ["--clients=1", "--clients-per-round=1", "--min-size=1", "--out=b", "--dataset", one_sample]
        status, fault = run(script, [*reliability.short_run(script), *alone])
        assert not fault and status in (0, 2)


def test_damaged_files_are_detected_or_harmless():
    """Where the format has a checksum; without one whatever is cut short."""
    counts = reliability.damaged_files(np.random.default_rng(1), 20)
    for name in reliability.CHECKED:
        assert not any("unseen" in found for found in counts[name])
    assert counts["mnist"]["detected, cut"] == 10


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_another_kind_of_image_among_colour_ones_is_read_as_colour(tiny, mode):
    path = next(iter(sorted((tiny / "tree" / "train").rglob("*.png"))))
    path.unlink()
    path = path.with_suffix(".tiff" if mode == "CMYK" else ".png")
    Image.new(mode, (16, 16), 100 if mode in "LP" else (100,) * len(mode)).save(path)
    data = common.load_data(str(tiny / "tree"))
    assert data.x_train.shape == (40, 16, 16, 3) and data.x_train[0].unique().numel() <= 3
    if mode == "L":
        assert (data.x_train[0] == 100).all()


@pytest.mark.parametrize("name", ["mnist", "fmnist", "emnist", "cifar10", "cifar100", "celeba"])
def test_without_a_network_one_line_says_what_to_put_where(tiny, name, monkeypatch, capsys):
    def offline(*_, **__):
        raise urllib.error.URLError("Name or service not known")

    for place in ("urllib.request.urlopen", "socket.create_connection", "socket.getaddrinfo"):
        monkeypatch.setattr(place, offline)
    status, output, errors = reliability.run_line(SCRIPTS[0], ["--dataset", name, "--data-dir", "here"])
    line = errors.splitlines()[-1]
    assert status == 2 and "results" not in output and "Traceback" not in errors
    assert f"--dataset {name}" in line and "--data-dir here" in line and f"put {common.PLACES[name]}" in line


# ------------------------------------------------------------------------------------------------------------ numbers


def poison(monkeypatch, column=0):
    """The update of the first client of every round 2 becomes NaN; returns the clients it befell."""
    finite, struck = common.Run.finite, []

    def poisoned(run, t, clients, update):
        if t == 1:
            update.weights[0, column] = math.nan
            struck.append(int(clients[0]))
        return finite(run, t, clients, update)

    monkeypatch.setattr(common.Run, "finite", poisoned)
    return struck


@every_script
def test_a_client_that_is_not_finite_stops_the_run(script, tiny, monkeypatch):
    struck = poison(monkeypatch)
    status, _, errors = reliability.run_line(script, command(script, "--out=r"))
    assert status == 3 and "Traceback" not in errors
    line = errors.splitlines()[-1]
    (name,) = states("r")  # the run stops in its first arm
    path, method = tiny / "r" / "checkpoints" / name, name.removesuffix("-trial0.pt")
    assert f"{method} trial 1 round 2: the update of client {struck[0]} is not finite" in line
    assert common.load_checkpoint(path)["round"] == 1  # the last good one stays


@every_script
def test_a_client_that_is_not_finite_is_dropped_and_counted(script, tiny, monkeypatch):
    struck = poison(monkeypatch)
    status, _, errors = reliability.run_line(script, command(script, "--on-nonfinite=drop", "--out=r"))
    rows = table("r")
    assert status == 0 and len(struck) == len(rows) // 3 > 0
    assert [row["dropped"] for row in rows] == [str(int(row["round"] == "2")) for row in rows]
    assert all(f"round 2: the update of client {k} is not finite; left out" in errors for k in struck)
    assert all(math.isfinite(float(row["accuracy"])) for row in rows)


# -------------------------------------------------------------------------------------------------------- determinism


@every_script
def test_order_of_the_arms_tests_and_jobs_change_no_bit(script, tiny):
    name = ARMS.get(script.__name__, "order")
    config, _ = common.parse(script.Config, script.PRESETS, script.__doc__, reliability.short_run(script))
    flag, arms = "--" + name.replace("_", "-"), getattr(config, name)
    for folder, more in {
        "first": [flag, *arms],
        "again": [flag, *arms],
        "order": [flag, *reversed(arms)],
        "tests": [flag, *arms, "--eval-every=2"],
        "jobs": [flag, *arms, "--jobs=2", f"--dataset={tiny / 'tiny.npz'}"],  # processes that may work in another folder
    }.items():
        status, _, errors = reliability.run_line(script, command(script, *more, f"--out={tiny / folder}"))
        assert status == 0, errors
        assert same(states(folder), states("first")) and len(states(folder)) >= 2, folder
    assert table("again") == table("first") == table("jobs")
    by_name = {tuple(row.values())[:4]: row for row in table("order")}
    assert all(by_name[tuple(row.values())[:4]] == row for row in table("first"))


@every_script
def test_chunk_changes_no_more_than_the_last_bits(script, tiny):
    for chunk in (1, 2):
        status, _, errors = reliability.run_line(
            script, command(script, "--dtype=float64", f"--chunk={chunk}", f"--out=c{chunk}")
        )
        assert status == 0, errors
    for name, one in states("c1").items():
        torch.testing.assert_close(one["weights"], states("c2")[name]["weights"], rtol=1e-7, atol=1e-10)


# ------------------------------------------------------------------------------------------------- Ctrl-C and SIGTERM


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_the_rounds_and_prints_the_command_that_goes_on(tiny, sent, status):
    script = SCRIPTS[2]
    argv = [sys.executable, script.__file__, *command(script, "--rounds=120", "--eval-every=120", "--out=a folder")]
    heard = functools.partial(signal.signal, sent, signal.SIG_DFL)  # a shell's background processes do not hear Ctrl-C
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    while not list(tiny.glob("a folder/checkpoints/*.pt")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(sent)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status and "Traceback" not in errors, errors
    *_, said, printed = errors.strip().splitlines()
    assert f"stopped: {len(table('a folder'))} rounds are kept in a folder" in said
    again = shlex.split(printed)
    assert again[0] == "python" and again[1:] == [*argv[1:], "--resume"]
    kept = table("a folder")
    done = subprocess.run([sys.executable, *again[1:]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert table("a folder")[: len(kept)] == kept and len(table("a folder")) == 240
    shutil.rmtree(tiny / "a folder")
