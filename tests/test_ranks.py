"""torchrun: several processes that share a round's clients, against one process; and what happens when one of them dies."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
FLAGS = [
    "--clients=12",
    "--clients-per-round=5",
    "--epochs=1",
    "--partition=dirichlet",
    "--lr=0.05",
    "--trials=1",
    "--threads=1",
]
SCRIPT = [str(ROOT / "fedavg_curriculum.py"), "--order=curriculum", "--base=scaffold", "--dtype=float64", *FLAGS]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(ranks: int, folder: Path, *flags: str) -> subprocess.Popen:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, *launcher, *SCRIPT, f"--out={folder}", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


def finish(process: subprocess.Popen) -> tuple[int, str]:
    """(exit status, errors). Only one rank may report: several would mean that each trained all by itself."""
    output, errors = process.communicate(timeout=300)
    assert output.count("results: ") == (process.returncode == 0), output
    return process.returncode, errors


def outcome(folder: Path) -> tuple[torch.Tensor, list[float]]:
    """The final weights, and the accuracy of each round."""
    (path,) = (folder / "checkpoints").glob("*trial*.pt")
    with open(folder / "metrics.csv") as file:
        accuracy = [float(row["accuracy"]) for row in csv.DictReader(file)]
    return torch.load(path, weights_only=True)["state"]["weights"], accuracy


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    status, errors = finish(start(0, folder, "--rounds=6"))
    assert status == 0, errors
    return outcome(folder)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_equal_one_process(ranks, alone, tmp_path):
    status, errors = finish(start(ranks, tmp_path, "--rounds=6"))
    assert status == 0, errors[-2000:]
    weights, accuracy = outcome(tmp_path)
    assert (weights - alone[0]).abs().max() < 1e-10
    assert accuracy == alone[1] and max(accuracy) > 15


def rank(launcher: int, number: int) -> int:
    """The process id of a rank, among the children of torchrun."""
    for child in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
        if f"\0LOCAL_RANK={number}\0".encode() in b"\0" + Path(f"/proc/{child}/environ").read_bytes():
            return child
    raise ProcessLookupError(number)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_a_rank_that_dies_ends_the_run_and_it_can_be_resumed(tmp_path):
    """SIGKILL to rank 1 after the first checkpoint: no rank hangs, the error names the way on, going on equals no kill."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    status, errors = finish(start(2, whole, "--rounds=16", "--lr=0.01"))
    assert status == 0, errors
    process = start(2, killed, "--rounds=16", "--lr=0.01")
    until = time.monotonic() + 120
    while not list(killed.glob("checkpoints/*trial*.pt")):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    os.kill(rank(process.pid, 1), signal.SIGKILL)
    status, errors = finish(process)
    assert status != 0 and "--resume" in errors, errors[-3000:]
    (path,) = killed.glob("checkpoints/*trial*.pt")
    assert 1 <= torch.load(path, weights_only=True)["round"] < 16
    status, errors = finish(start(2, killed, "--rounds=16", "--lr=0.01", "--resume"))
    assert status == 0, errors
    (weights, accuracy), (expected, expected_accuracy) = outcome(killed), outcome(whole)
    assert torch.equal(weights, expected) and accuracy == expected_accuracy
