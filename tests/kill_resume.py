"""python tests/kill_resume.py [--kills 50] [--only MOON SOLO] [--how plain jobs ranks runs]

Kills runs with SIGKILL at random moments after the first checkpoint, a third of them twice in a
row, resumes them, and compares with the uninterrupted run: final states and metrics.csv, except its
seconds, must be identical bit for bit. Takes turns over cases in which every base and method that
carries state occurs, and over one process, --jobs 2, three ranks of torchrun that share the clients
of two runs, and two ranks that take whole runs. Of several processes sometimes the first is killed,
sometimes another. Flushing a checkpoint to the disk is slowed down, so that many kills land inside
a write. Counts the processes that are left 5 s after a kill of their parent.
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
SMALL = "--trials=1 --rounds=5"
FEW = "--clients=12 --clients-per-round=4 --epochs=1"
CASES = {
    "stale local models, SCAFFOLD": f"fedavg_curriculum.py --score=LG --base=scaffold {FEW}",
    "expert, FedYogi": f"fedavg_curriculum.py --order=anti --score=E --base=fedyogi {FEW}",
    "FedNova, global pacing": f"fedavg_curriculum.py --base=fednova --pacing-scope=global {FEW}",
    "client curriculum": f"client_curriculum.py {FEW}",
    "FGN history, VRL-SGD": "fedcl_fgn.py --clients=24 --clients-per-round=4 --base=vrlsgd",
    "FGN history, FedAdam": "fedcl_fgn.py --clients=24 --clients-per-round=4 --base=fedadam",
    "generator": "fedcl_gmm_sync.py --method fedcl fedgen --clients=8 --clients-per-round=4",
    "FedDistill": "fedcl_gmm_sync.py --method feddistill --clients=8 --clients-per-round=4",
    "MOON": "fedac_art.py --base=moon --epochs=1",
    "SOLO": "fedac_art.py --base=solo --epochs=1",
}
SLOW_FLUSH = (
    "import os, runpy, sys, time; sys.argv = sys.argv[1:]; flush = os.fsync;"
    "os.fsync = lambda file: (time.sleep(0.1), flush(file));"
    "sys.path.insert(0, os.path.dirname(sys.argv[0]));"
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
HOW = ("plain", "jobs", "ranks", "runs")


def start(case: str, how: str, folder: Path, *more: str) -> subprocess.Popen:
    script, *flags = CASES[case].split()
    program = [sys.executable]
    if how == "plain":
        program += ["-c", SLOW_FLUSH]
    elif how in ("ranks", "runs"):
        count = 3 if how == "ranks" else 2
        program += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    flags += [*SMALL.split(), "--jobs=2" if how == "jobs" else "--jobs=1", f"--out={folder}", *more]
    return subprocess.Popen(
        [*program, str(ROOT / script), *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def family(session: int, folder: Path) -> list[int]:
    """The processes that are alive of a session, or that write to `folder`, as ranks do."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        is_of_it = int(fields[3]) == session or f"--out={folder}".encode() in words
        if fields[0] != "Z" and is_of_it:
            found.append(int(process.name))
    return found


def finish(process: subprocess.Popen, case: str) -> None:
    _, errors = process.communicate()
    assert process.returncode == 0, (case, errors[-2000:])


def kill(rng: random.Random, process: subprocess.Popen, how: str, folder: Path) -> int:
    """SIGKILL to the first process, or to another one of it; how many are left 5 s later."""
    others = [pid for pid in family(process.pid, folder) if pid != process.pid]
    victim = process.pid
    if how != "plain" and others and rng.random() < 0.5:
        victim = rng.choice(others)
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
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--how", nargs="*", default=HOW, choices=HOW)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    rng = random.Random(f"{flags.seed} {flags.only}")
    identical = kills = runs = inside = before = orphans = 0
    whole = {}
    seconds = {}
    turns = itertools.cycle(itertools.product(flags.only, flags.how))
    with tempfile.TemporaryDirectory() as top:
        while kills < flags.kills:
            case, how = turn = next(turns)
            if turn not in whole:
                began = time.perf_counter()
                folder = Path(top) / f"whole{len(whole)}"
                finish(start(case, how, folder), case)
                seconds[turn] = time.perf_counter() - began
                whole[turn] = outcome(folder)
            folder = Path(top) / f"kill{kills}"
            more = []
            for _ in range(1 + (rng.random() < 1 / 3)):
                process = start(case, how, folder, *more)
                while process.poll() is None and not any(folder.rglob("*.pt")):
                    time.sleep(0.01)
                time.sleep(rng.uniform(0, 0.6) * seconds[turn])
                if process.poll() is not None:  # it ended before the moment came
                    process.communicate()
                    continue
                orphans += kill(rng, process, how, folder)
                kills += 1
                inside += any(folder.rglob("*.tmp"))
                before += not any(folder.rglob("*.pt"))
                more = ["--resume"]
            if not more:
                shutil.rmtree(folder)
                continue
            finish(start(case, how, folder, "--resume"), case)
            is_same = same(outcome(folder), whole[turn])
            runs += 1
            identical += is_same
            print(f"{case}, {how}: {'identical' if is_same else 'DIFFERENT'}", flush=True)
    print(
        f"{kills} kills of {runs} runs: {identical} identical, {orphans} processes left 5 s",
        end=" ",
    )
    print(f"after; {inside} kills fell inside a write, {before} before the first checkpoint")
    sys.exit(identical != runs or orphans > 0)


if __name__ == "__main__":
    main()
