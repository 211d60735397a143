"""torchrun: processes that share a round's clients, against one; and when one of them dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from reliability import outcome, same, short_run, write_tiny

import common

ROOT = Path(common.__file__).parent
SCRIPTS = ["fedavg_curriculum", "client_curriculum", "fedcl_fgn", "fedcl_gmm_sync", "fedac_art"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")


def start(ranks: int, name: str, top: Path, *flags: str) -> subprocess.Popen:
    program = [sys.executable]
    if ranks:
        program += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [*program, str(ROOT / f"{name}.py"), *short_run(name), "--dtype=float64", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=top,
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    """(exit status, errors). Only one rank may report: else each trained all by itself."""
    output, errors = process.communicate(timeout=300)
    assert output.count("results: ") == (process.returncode == 0), output
    return process.returncode, errors


def close(a, b) -> bool:
    """States alike but for the last bits: sums are taken in another order."""
    if isinstance(a, torch.Tensor):
        return torch.allclose(a.double(), b.double(), rtol=1e-7, atol=1e-9, equal_nan=True)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(close, a, b))
    if isinstance(a, float):
        return a == pytest.approx(b, rel=1e-7, abs=1e-9, nan_ok=True)
    return a == b


def number(text: str):
    """A cell of metrics.csv."""
    try:
        return float(text)
    except ValueError:
        return text


def numbers(rows: list[dict]) -> list:
    return [[number(cell) for cell in row.values()] for row in rows]


def rank(launcher: int, wanted: int) -> int:
    """The process id of a rank, among the children of torchrun."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for child in children:
        environment = b"\0" + Path(f"/proc/{child}/environ").read_bytes()
        if f"\0LOCAL_RANK={wanted}\0".encode() in environment:
            return int(child)
    raise ProcessLookupError(wanted)


def wait_for_a_checkpoint(folder: Path, process: subprocess.Popen) -> None:
    until = time.monotonic() + 120
    while not list(folder.glob("checkpoints/*trial*.pt")):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("name", SCRIPTS)
def test_ranks_equal_one_process(name, tmp_path):
    """Two runs are fewer than three ranks, which therefore share the clients of each run."""
    write_tiny(tmp_path)
    flags = ["--rounds=4", "--eval-every=3"]
    running = [start(n, name, tmp_path, *flags, f"--out={n}") for n in (0, 3)]
    for process in running:
        status, errors = finish(process)
        assert status == 0, errors[-2000:]
    expected, states = outcome(tmp_path / "0")
    rows, states_of_ranks = outcome(tmp_path / "3")
    assert len(rows) >= 4 and close(numbers(rows), numbers(expected))
    assert close(states_of_ranks, states)


MASKED = """
import torch
class Net(torch.nn.Sequential):
    def __init__(self, channels, side, classes):
        linear = torch.nn.Linear(channels * side * side, classes)
        super().__init__(torch.nn.Flatten(), linear)
        self.register_buffer("mask", torch.linspace(0.1, 1, 97))
"""


def test_ranks_round_no_buffer_that_no_client_changed(tmp_path):
    write_tiny(tmp_path)
    (tmp_path / "masked.py").write_text(MASKED)
    flags = ("--rounds=4", "--model=masked.py:Net", "--trials=1", "--clients-per-round=3")
    status, errors = finish(start(3, "fedavg_curriculum", tmp_path, "--out=r", *flags))
    assert status == 0, errors[-2000:]
    _, states = outcome(tmp_path / "r")
    assert len(states) > 0
    for state in states.values():
        assert torch.equal(state["theta"][-97:], torch.linspace(0.1, 1, 97).double())


def test_a_rank_that_dies_ends_the_run_which_can_be_resumed(tmp_path):
    """SIGKILL to rank 1 after the first checkpoint: no rank hangs, going on equals no kill."""
    write_tiny(tmp_path)
    name = SCRIPTS[0]
    flags = ["--rounds=20", "--eval-every=3"]
    process = start(3, name, tmp_path, *flags, "--out=killed")
    wait_for_a_checkpoint(tmp_path / "killed", process)
    os.kill(rank(process.pid, 1), signal.SIGKILL)
    whole = start(3, name, tmp_path, *flags, "--out=whole")
    status, errors = finish(process)
    said = [line for line in errors.splitlines() if "--resume continues in killed" in line]
    assert status != 0 and len(said) == 1, errors[-3000:]
    assert "another rank is gone" in said[0] or said[0].startswith("stopped")  # torchrun's SIGTERM
    status, errors = finish(start(3, name, tmp_path, *flags, "--out=killed", "--resume"))
    assert status == 0, errors[-2000:]
    assert finish(whole)[0] == 0
    assert same(outcome(tmp_path / "killed"), outcome(tmp_path / "whole"))


def test_unless_runs_are_fewer_than_ranks_each_rank_trains_whole_runs(tmp_path):
    """The bits are those of one process, which can resume what ranks began, after a kill of one.

    Two ranks have four runs, and then four ranks have four.
    """
    write_tiny(tmp_path)
    name = "fedcl_fgn"
    flags = ["--trials=2", "--rounds=6"]
    ranks = start(2, name, tmp_path, *flags, "--out=ranks")
    alone = start(0, name, tmp_path, *flags, "--jobs=1", "--out=alone")
    assert finish(ranks)[0] == finish(alone)[0] == 0
    assert same(outcome(tmp_path / "ranks"), outcome(tmp_path / "alone"))
    process = start(4, name, tmp_path, *flags, "--out=killed")
    wait_for_a_checkpoint(tmp_path / "killed", process)
    os.kill(rank(process.pid, 1), signal.SIGKILL)
    process.communicate(timeout=120)
    status, errors = finish(start(0, name, tmp_path, *flags, "--out=killed", "--resume"))
    assert status == 0, errors[-2000:]
    assert same(outcome(tmp_path / "killed"), outcome(tmp_path / "alone"))


def test_launcher_stops_and_mistakes(tmp_path):
    """SIGTERM and SIGKILL to torchrun: no rank outlives it. A mistake is one line, not two."""
    write_tiny(tmp_path)
    name = SCRIPTS[0]
    ranks = []
    for out, stop in (("r", signal.SIGTERM), ("s", signal.SIGKILL)):
        process = start(2, name, tmp_path, "--rounds=2000", "--eval-every=2000", f"--out={out}")
        wait_for_a_checkpoint(tmp_path / out, process)
        ranks += [rank(process.pid, k) for k in (0, 1)]
        if stop == signal.SIGTERM:
            locked = start(0, name, tmp_path, "--out=r", "--resume")
            assert "another command works there" in locked.communicate()[1]
            assert locked.returncode == 2
        process.send_signal(stop)
        _, errors = process.communicate(timeout=60)
        if stop == signal.SIGTERM:
            assert errors.count("stopped; --resume continues in r") == 1
    time.sleep(1)
    for pid in ranks:
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or ") Z " in stat.read_text()
    process = start(2, name, tmp_path, "--order=x")
    _, errors = process.communicate(timeout=60)
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert process.returncode != 0 and len(lines) == 1, errors[-2000:]


def test_ranks_whose_folders_are_not_one_are_refused_before_training(tmp_path):
    """As of two machines that share no disk. torchrun's environment is made here."""
    running = []
    port = torch.distributed.TCPStore("localhost", 0, is_master=True).port  # free from now on
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    for number in ("0", "1"):
        (tmp_path / number).mkdir()
        write_tiny(tmp_path / number)
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "fedcl_fgn.py"), *short_run("fedcl_fgn"), "--out=r"],
            env=os.environ | environment | {"RANK": number, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path / number,
        )
        running.append(process)
    outcomes = [finish(process) for process in running]
    assert [status for status, _ in outcomes] == [2, 2], outcomes
    assert "--out r: choose a folder that all ranks' machines share" in outcomes[0][1]
    assert not (tmp_path / "0/r/checkpoints").exists()
