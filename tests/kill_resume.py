"""python tests/kill_resume.py [--kills 50] [--only MOON SOLO] [--how plain jobs ranks]

Kills runs with SIGKILL at random moments, a third of them twice in a row, resumes them, and compares with the uninterrupted
run: final states and metrics.csv (but its seconds) must be identical bit for bit. In turn over cases, in which every base and
method that carries state occurs, and over one process, --jobs 2 and two ranks of torchrun; of several processes sometimes the
first is killed, sometimes another. Flushing a checkpoint to the disk is slowed down in the killed runs, so that many kills
land inside a write. Counts processes that are left 5 s after a kill of their parent. Prints the count.
"""

import argparse
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from reliability import outcome, same

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--trials=1", "--rounds=5", "--threads=1"]
FEW = ["--clients=12", "--clients-per-round=4", "--epochs=1"]
CASES = {
    "stale local models, SCAFFOLD": ["fedavg_curriculum.py", "--order=curriculum", "--score=LG", "--base=scaffold", *FEW],
    "expert, FedYogi": ["fedavg_curriculum.py", "--order=anti", "--score=E", "--base=fedyogi", "--expert-epochs=1", *FEW],
    "FedNova, global pacing": ["fedavg_curriculum.py", "--order=random", "--base=fednova", "--pacing-scope=global", *FEW],
    "client curriculum": ["client_curriculum.py", *FEW],
    "FGN history, VRL-SGD": ["fedcl_fgn.py", "--clients=24", "--clients-per-round=4", "--base=vrlsgd"],
    "FGN history, FedAdam": ["fedcl_fgn.py", "--clients=24", "--clients-per-round=4", "--base=fedadam"],
    "generator, frozen clients": ["fedcl_gmm_sync.py", "--method", "fedcl", "fedgen", "--clients=8", "--clients-per-round=4"],
    "FedDistill": ["fedcl_gmm_sync.py", "--method", "feddistill", "fedensemble", "--clients=8", "--clients-per-round=4"],
    "MOON": ["fedac_art.py", "--base=moon", "--epochs=1"],
    "SOLO": ["fedac_art.py", "--base=solo", "--epochs=1"],
}
SLOW_FLUSH = (
    "import os, runpy, sys, time; sys.argv = sys.argv[1:]; flush = os.fsync;"
    "os.fsync = lambda file: (time.sleep(0.1), flush(file)); sys.path.insert(0, os.path.dirname(sys.argv[0]));"
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
HOW = ("plain", "jobs", "ranks")


def start(case: str, how: str, folder: Path, *more: str) -> subprocess.Popen:
    script, *flags = CASES[case]
    python = [sys.executable, "-c", SLOW_FLUSH]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    jobs = ["--jobs=2"] if how == "jobs" else []
    command = [*(launcher if how == "ranks" else python), str(ROOT / script), *SMALL, *flags, *jobs, f"--out={folder}", *more]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)


def family(session: int, folder: Path) -> list[int]:
    """The processes that are alive of a session, as those of --jobs are, or that write to `folder`, as ranks do."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, of = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if state != "Z" and (int(of) == session or f"--out={folder}".encode() in words):
            found.append(int(process.name))
    return found


def finish(process: subprocess.Popen, case: str) -> None:
    _, errors = process.communicate()
    assert process.returncode == 0, (case, errors[-2000:])


def kill(rng: random.Random, process: subprocess.Popen, how: str, folder: Path) -> int:
    """SIGKILL to the first process, or to another one of it; how many are left 5 s later. A single process leaves none."""
    others = [pid for pid in family(process.pid, folder) if pid != process.pid]
    victim = rng.choice(others) if how != "plain" and others and rng.random() < 0.5 else process.pid
    os.kill(victim, signal.SIGKILL)
    if victim != process.pid:  # the others must notice by themselves
        process.communicate(timeout=120)
    until = time.monotonic() + 5
    while family(process.pid, folder) and time.monotonic() < until:
        process.poll()  # else it stays a zombie
        time.sleep(0.1)
    left = family(process.pid, folder)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    return len(left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="in turn over the cases")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=CASES, metavar="CASE", help="these cases")
    parser.add_argument("--how", nargs="*", default=HOW, choices=HOW, help="one process, --jobs 2, two ranks of torchrun")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    rng = random.Random(f"{flags.seed} {flags.only}")
    kept = counted = runs = inside = before = orphans = 0
    reference, length = {}, {}
    turns = itertools.cycle(
        (case, flags.how[(k + k // len(flags.only)) % len(flags.how)]) for k, case in enumerate(flags.only * 3)
    )
    with tempfile.TemporaryDirectory() as top:
        while counted < flags.kills:
            case, how = next(turns)
            if (case, how) not in reference:
                begun, whole = time.perf_counter(), Path(top) / f"whole{len(reference)}"
                finish(start(case, how, whole), case)
                length[case, how], reference[case, how] = time.perf_counter() - begun, outcome(whole)
            folder, more = Path(top) / f"kill{counted}", []
            for _ in range(1 + (rng.random() < 1 / 3)):
                process = start(case, how, folder, *more)
                time.sleep(rng.uniform(0.3, 0.95) * length[case, how])
                if process.poll() is not None:  # it ended before the moment came
                    process.communicate()
                    continue
                orphans += kill(rng, process, how, folder)
                counted, inside, before = (
                    counted + 1,
                    inside + any(folder.rglob("*.tmp")),
                    before + (not any(folder.rglob("*.pt"))),
                )
                more = ["--resume"]
            if not more:
                shutil.rmtree(folder)
                continue
            finish(start(case, how, folder, "--resume"), case)
            identical = same(outcome(folder), reference[case, how])
            runs, kept = runs + 1, kept + identical
            print(f"{case}, {how}: killed, resumed, {'identical' if identical else 'DIFFERENT'}", flush=True)
    print(f"{counted} kills of {runs} runs: {kept} identical, {orphans} processes left 5 s after a kill;", end=" ")
    print(f"{inside} kills fell inside a write, {before} before the first checkpoint")
    sys.exit(kept != runs or orphans > 0)


if __name__ == "__main__":
    main()
