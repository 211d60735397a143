"""python -m results.reproduce [--only A6 C2 ..] [--scale paper|reduced] [--list] [--replace]

Makes the runs of claims again. Each row of reproduce.csv is a command. It has a place under runs/,
the claims that it decides, a scale, core-hours, and words. A complete run is skipped, and an
interrupted one is resumed. The rounds of a finished run are compared with those in rounds.csv.xz,
digit by digit. They are written there if the run is new, or with --replace. From this file `python
-m results.tables` writes the pages. A run that diverged is no evidence: it is not published, and
the exit status is 3.
"""

import argparse
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
from filelock import FileLock

from results import evidence
from results.clock import SPREADS

ROOT = evidence.FOLDER.parent
COLUMNS = ["run", "setting", "method", "trial", "round", "clients", "uploads", "samples"]
COLUMNS += ["accuracy", "loss", "train_loss", "own_pooled", "rank_correlation"]
for spread in SPREADS:
    COLUMNS += [f"clock_{spread}", f"waiting_{spread}"]
COLUMNS += ["clock", "received_mb", "sent_mb", "scored"]  # since 2026-11-28
COLUMNS += ["noisy_small", "noisy_large", "spearman", "auc_size", "auc_loss"]  # the same
COLUMNS += ["lambda_easy", "lambda_hard"]  # since 2026-11-29


def read_works() -> pd.DataFrame:
    """Returns a row for each command: place, claims, scale, hours, command."""
    text = {"dtype": str, "keep_default_na": False}
    works = pd.read_csv(evidence.FOLDER / "reproduce.csv", **text)
    return works.astype({"hours": float})


def choose(works: pd.DataFrame, only: list[str], scale: str) -> pd.DataFrame:
    """Returns the works of these claims or places. A ValueError names what is neither."""
    known = set(works.place)
    for claims in works.claims:
        known.update(claims.split())
    unknown = set(only) - known
    if unknown:
        raise ValueError(f"--only {' '.join(sorted(unknown))}: no claim and no place")
    chosen = []
    for work in works.itertuples():
        names = {work.place, *work.claims.split()}
        is_named = not only or bool(names & set(only))
        chosen.append(is_named and scale in ("all", work.scale))
    return works[chosen]


def state_of(work) -> str:
    """Returns what --list says about it."""
    if not is_experiment(work):
        return "a program"
    if is_complete(work):
        return "made here"
    evident = work.place in evidence.trials().index
    return "in the evidence" if evident else "not run"


def folder(work) -> Path:
    """Returns where its run is made."""
    return ROOT / "runs" / work.place


def is_complete(work) -> bool:
    """Whether it was made here, to the end."""
    return (folder(work) / "summary.json").exists()


def is_experiment(work) -> bool:
    """Whether its runs lie in a folder. The other works print what they find."""
    return work.scale != "program"


def command(work) -> list[str]:
    """Returns its words after `python`, with the folder, and --resume if it was begun."""
    words = shlex.split(work.command)
    if is_experiment(work):
        words += ["--out", f"runs/{work.place}"]
        if (folder(work) / "checkpoints").exists():
            words.append("--resume")
    return words


def diverged(work) -> bool:
    """Whether an update of the finished run was not finite."""
    rounds = pd.read_csv(folder(work) / "metrics.csv")
    return "diverged" in rounds and bool(rounds.diverged.any())


def publish(work, replace=False) -> None:
    """Writes the rounds of a finished run to rounds.csv.xz, and says whether they are as there.

    Others that are there already are replaced only with `replace`. A lock keeps a second command
    from losing these rows. A kill leaves the old file or the new one.
    """
    path = evidence.FOLDER / "rounds.csv.xz"
    half = path.with_name(f"{os.getpid()}.{path.name}")
    text = {"dtype": str, "keep_default_na": False}
    rounds = pd.read_csv(folder(work) / "metrics.csv", **text)
    rounds = rounds.replace({"setting": {"-": ""}})  # as in the older rows
    rounds["run"] = work.place
    rounds = rounds.reindex(columns=COLUMNS, fill_value="")
    with FileLock(ROOT / "runs" / ".publish.lock"):
        before = pd.read_csv(path, **text).reindex(columns=COLUMNS, fill_value="")
        theirs = before[before.run == work.place]
        if not theirs.empty and not change(theirs, rounds):
            print(f"its rounds are those of {path.name}, to the last digit")
            return
        if work.place in evidence.trials().index and not replace:
            found = change(theirs, rounds)
            print(f"its rounds are not those of {path.name} ({found}); --replace writes them there")
            return
        both = pd.concat([before[before.run != work.place], rounds])
        try:
            both.to_csv(half, index=False)
            half.replace(path)
        finally:
            half.unlink(missing_ok=True)
    print(f"its rounds are in {path.name}; python -m results.tables writes the pages")


def change(before: pd.DataFrame, now: pd.DataFrame) -> str:
    """Says how the rounds of a run differ from those before, in the columns that those have."""
    if before.empty:
        return "which has none: trials.csv.xz has each trial's values"
    if len(before) != len(now):
        return f"{len(now)}, not {len(before)}"
    columns = [name for name in COLUMNS if (before[name] != "").any()]
    differing = [name for name in columns if before[name].tolist() != now[name].tolist()]
    return ", ".join(differing)


def show(works: pd.DataFrame) -> None:
    """Prints --list: a line for each, and the hours in all."""
    for work in works.itertuples():
        hours = f"{work.hours:.1f} core-hours"
        words = shlex.join(command(work))
        print(f"{work.claims:12} {work.scale:8} {hours:>16} {state_of(work):16} python {words}")
    print(f"{len(works)} commands, {works.hours.sum():.1f} core-hours in all")


def main(argv: list[str]) -> int:
    """Returns the exit status: 0, 3 if runs diverged, or the first failed command's status."""
    parser = argparse.ArgumentParser(description="Makes the runs behind the pages again.")
    parser.add_argument("--only", nargs="+", default=[], metavar="CLAIM", help="or places")
    parser.add_argument("--scale", choices=("all", "paper", "reduced", "program"), default="all")
    parser.add_argument("--list", action="store_true", help="print them and their hours, and stop")
    parser.add_argument("--replace", action="store_true", help="rounds that differ")
    flags = parser.parse_args(argv)
    try:
        works = choose(read_works(), flags.only, flags.scale)
    except ValueError as error:
        parser.error(str(error))
    if flags.list:
        show(works)
        return 0
    if len(works) == 0:
        print(f"no command of scale {flags.scale} among these")
    status = 0
    for work in works.itertuples():
        of_work = make(work, flags.replace)
        if of_work not in (0, 3):
            return of_work
        status = max(status, of_work)
    return status


def make(work, replace: bool) -> int:
    """Runs one command, unless it is complete, and compares or publishes its rounds.

    Returns the status. That of a command that a signal killed is 128 and the signal's number, as in
    a shell.
    """
    status = 0
    if is_experiment(work) and is_complete(work):
        print(f"already made: runs/{work.place}")
    else:
        print(f"python {shlex.join(command(work))}", flush=True)
        before = cpu_hours()
        status = subprocess.run([sys.executable, *command(work)], cwd=ROOT).returncode
        print(f"{cpu_hours() - before:.2f} core-hours", flush=True)
        if status < 0:
            status = 128 - status
        if status not in (0, 3):
            return status
    if not is_experiment(work):
        return status
    if diverged(work):
        print(f"runs/{work.place}: a run diverged, so it is no evidence and is not published")
        return 3
    publish(work, replace)
    return 0


def cpu_hours() -> float:
    """Returns the core-hours of the processes that this one started and that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) / 3600


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)  # the command has said what happened
