"""torchrun: processes that share a round's clients, against one process, in all five scripts; and when one of them dies."""

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
import experiment

ROOT = Path(common.__file__).parent
SCRIPTS = ["fedavg_curriculum", "client_curriculum", "fedcl_fgn", "fedcl_gmm_sync", "fedac_art"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
every_script = pytest.mark.parametrize("name", SCRIPTS)


def start(ranks: int, name: str, top: Path, *flags: str) -> subprocess.Popen:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    script = sys.modules.get(name) or __import__(name)
    command = [sys.executable, *launcher, str(ROOT / f"{name}.py"), *short_run(script), "--dtype=float64", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=top)


def finish(process: subprocess.Popen) -> tuple[int, str]:
    """(exit status, errors). Only one rank may report: several would mean that each trained all by itself."""
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
    return a == pytest.approx(b, rel=1e-7, abs=1e-9, nan_ok=True) if isinstance(a, float) else a == b


def number(text: str):
    """A cell of metrics.csv."""
    try:
        return float(text)
    except ValueError:
        return text


def rank(launcher: int, number: int) -> int:
    """The process id of a rank, among the children of torchrun."""
    for child in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
        if f"\0LOCAL_RANK={number}\0".encode() in b"\0" + Path(f"/proc/{child}/environ").read_bytes():
            return child
    raise ProcessLookupError(number)


def begun(folder: Path, process: subprocess.Popen) -> None:
    """Waits for the first checkpoint."""
    until = time.monotonic() + 120
    while not list(folder.glob("checkpoints/*trial*.pt")):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)


@every_script
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_ranks_equal_one_process_and_a_rank_that_dies_ends_the_run_which_can_be_resumed(name, tmp_path):
    """SIGKILL to rank 1 after the first checkpoint: no rank hangs, one line names the way on, going on equals no kill."""
    write_tiny(tmp_path)
    flags = ["--rounds=6" if name == "fedcl_gmm_sync" else "--rounds=20", "--eval-every=3"]
    alone, whole = start(0, name, tmp_path, *flags, "--out=alone"), start(2, name, tmp_path, *flags, "--out=whole")
    for process in (alone, whole):
        status, errors = finish(process)
        assert status == 0, errors[-2000:]
    (rows, states), (expected, expected_states) = outcome(tmp_path / "whole"), outcome(tmp_path / "alone")
    assert close([list(map(number, row.values())) for row in rows], [list(map(number, row.values())) for row in expected])
    assert close(*({n: state for n, state in each.items() if isinstance(state, dict)} for each in (states, expected_states)))
    process = start(2, name, tmp_path, *flags, "--out=killed")
    begun(tmp_path / "killed", process)
    os.kill(rank(process.pid, 1), signal.SIGKILL)
    status, errors = finish(process)
    lines = [line for line in errors.replace("\r", "\n").splitlines() if "torchrun --standalone --nproc-per-node 2" in line]
    said = ("another rank is gone", "rounds are kept in killed")  # the launcher's SIGTERM may come before the lost connection
    assert status != 0 and len(lines) == 1 and any(word in errors for word in said), errors[-3000:]
    assert lines[0].endswith("--out=killed --resume")
    status, errors = finish(start(2, name, tmp_path, *flags, "--out=killed", "--resume"))
    assert status == 0, errors[-2000:]
    assert same(outcome(tmp_path / "killed"), outcome(tmp_path / "whole"))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_launcher_stops_and_mistakes(tmp_path):
    """SIGTERM to torchrun: each rank ends with 143. SIGKILL: none outlives it. A mistake is one line, not one for each rank."""
    write_tiny(tmp_path)
    process = start(2, SCRIPTS[0], tmp_path, "--rounds=2000", "--eval-every=2000", "--out=r")
    begun(tmp_path / "r", process)
    ranks = [rank(process.pid, k) for k in (0, 1)]
    locked = start(0, SCRIPTS[0], tmp_path, "--out=r")
    assert locked.communicate()[1].count("another run is at work there") == 1 and locked.returncode == 2
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert errors.count("rounds are kept in r") == 1 and "--resume" in errors
    process = start(2, SCRIPTS[0], tmp_path, "--rounds=2000", "--eval-every=2000", "--out=s")
    begun(tmp_path / "s", process)
    ranks += [rank(process.pid, k) for k in (0, 1)]
    process.kill()
    process.communicate()
    time.sleep(1)
    alive = [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    assert all(") Z " in Path(f"/proc/{pid}/stat").read_text() for pid in alive)  # nobody may be there to collect the dead
    for mistake in (["--order=x"], ["--out=tiny.npz"]):
        process = start(2, SCRIPTS[0], tmp_path, *mistake)
        _, errors = process.communicate(timeout=60)
        lines = [line for line in errors.splitlines() if "fedavg_curriculum.py: error: " in line]
        assert process.returncode != 0 and len(lines) == 1, errors[-2000:]


def test_the_cores_are_shared_out_among_the_ranks_of_a_machine(tmp_path, monkeypatch):
    """Before they have met, from what torchrun says in the environment."""
    monkeypatch.setattr(experiment, "cpu_count", lambda: 8)
    monkeypatch.setattr(experiment, "claim", lambda *given: (_ for _ in ()).throw(KeyError(given[2])))
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path)
    script = __import__(SCRIPTS[0])
    for name, value in {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(experiment, "ranks", __import__("contextlib").nullcontext)
    before = torch.get_num_threads()
    with pytest.raises(KeyError, match="4"):
        script.main([*(flag for flag in short_run(script) if "threads" not in flag), "--out=r"])
    assert torch.get_num_threads() == 4
    torch.set_num_threads(before)
