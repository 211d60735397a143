"""python tests/kill_resume.py [--kills 50] [--only MOON SOLO]

Kills runs with SIGKILL at random moments, resumes them, and compares with the uninterrupted run: final state and metrics.csv
(but its seconds) must be identical bit for bit. Every base and method that carries state is among the cases. Flushing a
checkpoint to the disk is slowed down in the killed runs, so that many kills land inside a write. Prints the count.
"""

import argparse
import csv
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

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


def start(case, folder, *more):
    script, *flags = CASES[case]
    command = [sys.executable, "-c", SLOW_FLUSH, str(ROOT / script), *SMALL, *flags, f"--out={folder}", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process, case):
    _, errors = process.communicate()
    assert process.returncode == 0, (case, errors[-2000:])


def result(folder):
    """The final state of every arm, and metrics.csv without its column of seconds."""
    states = {path.name: torch.load(path, weights_only=True) for path in sorted((folder / "checkpoints").glob("*trial*.pt"))}
    with open(folder / "metrics.csv") as file:
        rows = [{name: value for name, value in row.items() if "second" not in name} for row in csv.DictReader(file)]
    return {name: state["state"] for name, state in states.items() if isinstance(state, dict) and "state" in state}, rows


def same(a, b) -> bool:
    """Bit for bit."""
    if isinstance(a, torch.Tensor):  # by their bytes: a NaN, which marks what is not known yet, equals itself
        return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="in turn over the cases")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=CASES, metavar="CASE", help="these cases")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    rng = random.Random(f"{flags.seed} {flags.only}")
    kept, counted, inside, before = 0, 0, 0, 0
    with tempfile.TemporaryDirectory() as top:
        reference, length = {}, {}
        for case in flags.only:
            begun = time.perf_counter()
            finish(start(case, Path(top) / case.replace(" ", "-")), case)
            length[case] = time.perf_counter() - begun
            reference[case] = result(Path(top) / case.replace(" ", "-"))
        for k in range(flags.kills):
            case = flags.only[k % len(flags.only)]
            folder = Path(top) / f"kill{k}"
            while True:  # a run that ended before the moment came was not killed: another moment
                process = start(case, folder)
                time.sleep(rng.uniform(0.4, 0.98) * length[case])
                if process.poll() is None:
                    break
                shutil.rmtree(folder)
            process.kill()
            process.communicate()
            inside += any(folder.rglob("*.tmp"))
            before += not any(folder.rglob("*.pt"))
            finish(start(case, folder, "--resume"), case)
            identical = same(result(folder), reference[case])
            counted, kept = counted + 1, kept + identical
            print(f"{case}: killed, resumed, {'identical' if identical else 'DIFFERENT'}", flush=True)
    print(f"{kept} of {counted} identical; {inside} kills fell inside a write, {before} before the first checkpoint")
    sys.exit(kept != counted)


if __name__ == "__main__":
    main()
