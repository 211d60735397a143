"""Estimates: against counts of a real run, and against sums by hand."""

import importlib
import math
import shlex
from unittest import mock

import pytest

import experiment
import training
from experiment import command, costs, machine

TABLE = {
    ("lenet5", "0", "batch", "28x28x1", "float32"): {
        "step_ms": 1.0,
        "sample_ms": 0.1,
        "score_ms": 0.01,
        "h100_ms": 0.5,
    }
}


@pytest.fixture(autouse=True)
def known_milliseconds():
    with mock.patch.object(costs, "table", lambda: TABLE):
        yield


def config_of(name: str, words: str):
    script = importlib.import_module(name)
    line = shlex.split(words)
    configs, _ = experiment.parse(script.Config, script.PRESETS, script.__doc__, line)
    return configs


def test_a_cost_by_hand():
    """20 rounds of 10 clients with 1437 / 50 samples, three trials, on digits."""
    line = "--order vanilla --epochs 2 --batch-size 10 --clients-per-round 10 --rounds 20"
    cost = costs.cost_of(config_of("fedavg_curriculum", line))
    steps = 200 * 2 * (1437 / 50 / 10 + 0.5)
    samples = 200 * 2 * 1437 / 50
    seconds = (steps + 0.1 * samples + 0.01 * 20 * 360) / 1000 + 20 * costs.ROUND
    assert cost.steps == pytest.approx(3 * steps)
    assert cost.core == pytest.approx(3 * seconds)
    assert cost.card == pytest.approx(3 * (0.5 * steps / 1000 + 20 * costs.ROUND))


@pytest.mark.parametrize("words", ("--model mine.py:Net", "--dtype float64", "--model vgg11"))
def test_what_was_not_measured_is_not_said(words):
    cost = costs.cost_of(config_of("fedcl_fgn", words))
    assert math.isnan(cost.core) and math.isnan(cost.card) and cost.on(2) == ""


@pytest.mark.parametrize(
    "name, words",
    [
        ("fedavg_curriculum", "--order curriculum --score E --rounds 2"),
        ("client_curriculum", "--client-order curriculum --data-order vanilla --rounds 3"),
        ("fedcl_fgn", "--method base --rounds 2"),
        ("fedcl_gmm_sync", "--method fedcl --rounds 2"),
        ("fedac_art", "--method base --rounds 1 --epochs 2 --batch-size 32"),
    ],
)
def test_steps_are_those_of_a_run(name, words, tmp_path):
    """Within a third: clients have different numbers of samples."""
    line = f"{words} --trials 1 --device cpu --jobs 1 --partition iid --out {tmp_path / 'out'}"
    taken = []
    train = training.train

    def counted(model, theta, data, clients, batches, *others):
        taken.append(sum(map(len, batches)))
        return train(model, theta, data, clients, batches, *others)

    with mock.patch.object(training, "train", counted):
        importlib.import_module(name).main(shlex.split(line))
    assert costs.cost_of(config_of(name, line)).steps == pytest.approx(sum(taken), rel=0.34)


@pytest.mark.parametrize("rounds, is_long", [(1000, False), (10**6, True)])
def test_a_long_command_says_so_before_it_starts(rounds, is_long, tmp_path, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    line = f"--device cpu --jobs 2 --rounds {rounds} --out {tmp_path / 'out'}"
    script = importlib.import_module("fedcl_fgn")
    with mock.patch.object(command, "train_all", stop), pytest.raises(SystemExit):
        script.main(shlex.split(line))
    lines = capsys.readouterr().err.splitlines()
    said = [found for found in lines if found.startswith("about ")]
    assert len(said) == is_long
    if is_long:
        assert " on 2 cores, " in said[0] and said[0].endswith(" on an H100")


@pytest.mark.parametrize(
    "cores, milliseconds, device",
    [(2, 0.5, "cuda"), (64, 0.5, "cpu"), (64, math.nan, "cuda")],
)
def test_auto_chooses_what_ends_sooner(cores, milliseconds, device, tmp_path, capsys):
    """A pretended GPU; six runs. What is not known is trained on the GPU."""
    script = importlib.import_module("fedcl_fgn")
    chosen = []

    def stop(runs):
        chosen.append(runs[0].device)
        raise KeyboardInterrupt

    [row] = TABLE.values()
    table = {key: row | {"h100_ms": milliseconds} for key in TABLE}
    with (
        mock.patch.object(costs, "table", lambda: table),
        mock.patch.object(command, "gpu_fault", lambda: ""),
        mock.patch.object(machine, "gpu_fault", lambda: ""),
        mock.patch("experiment.workers.cpu_count", lambda: cores),
        mock.patch.object(command, "workers", stop),
        pytest.raises(SystemExit),
    ):
        script.main(["--rounds", "1000", "--out", str(tmp_path / "out")])
    assert chosen == [device]
    assert ("the CPU is used (about" in capsys.readouterr().err) == (device == "cpu")


@pytest.mark.parametrize(
    "seconds, words", [(40, "40 s"), (540, "9 min"), (3 * 3600, "3 h"), (5 * 86400, "5 days")]
)
def test_times_in_words(seconds, words):
    assert costs.in_words(seconds) == words
