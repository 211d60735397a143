"""python -m results.reproduce [--only A6 C2 ..] [--scale paper|reduced] [--list]

Makes the runs of claims anew, from reproduce.csv: place under runs/, the claims that it decides,
scale, core-hours, command. What is complete is skipped, what was stopped goes on. The rounds of a
finished run then stand in rounds.csv.xz, from which `python -m results.tables` writes the pages.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd

from results import evidence
from results.clock import SPREADS

ROOT = evidence.FOLDER.parent
COLUMNS = ["run", "setting", "method", "trial", "round", "clients", "uploads", "samples"]
COLUMNS += ["accuracy", "loss", "train_loss"]
for spread in SPREADS:
    COLUMNS += [f"clock_{spread}", f"waiting_{spread}"]


def read_works() -> pd.DataFrame:
    """A row a command: place, claims, scale, hours, command."""
    text = {"dtype": str, "keep_default_na": False}
    works = pd.read_csv(evidence.FOLDER / "reproduce.csv", **text)
    return works.astype({"hours": float})


def choose(works: pd.DataFrame, only: list[str], scale: str) -> pd.DataFrame:
    """Those of these claims or places; ValueError names what is neither."""
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
    """What --list says of it."""
    if not is_experiment(work):
        return "a program"
    if is_complete(work):
        return "made here"
    evident = work.place in evidence.trials().index
    return "in the evidence" if evident else "not run"


def folder(work) -> Path:
    """Where its run is made."""
    return ROOT / "runs" / work.place


def is_complete(work) -> bool:
    """Whether it was made here, to the end."""
    return (folder(work) / "summary.json").exists()


def is_experiment(work) -> bool:
    """One whose runs lie in a folder; the others print what they find."""
    return work.scale != "program"


def command(work) -> list[str]:
    """Its words after `python`, with the folder; --resume where it was begun."""
    words = shlex.split(work.command)
    if is_experiment(work):
        words += ["--out", f"runs/{work.place}"]
        if (folder(work) / "config.json").exists():
            words.append("--resume")
    return words


def publish(work) -> None:
    """Puts the rounds of a finished run into rounds.csv.xz, in place of older ones."""
    path = evidence.FOLDER / "rounds.csv.xz"
    text = {"dtype": str, "keep_default_na": False}
    others = pd.read_csv(path, **text)
    others = others[others.run != work.place]
    rounds = pd.read_csv(folder(work) / "metrics.csv", **text)
    rounds["run"] = work.place
    both = pd.concat([others, rounds.reindex(columns=COLUMNS)])
    both.to_csv(path, index=False)
    print(f"its rounds are in {path.name}; python -m results.tables writes the pages")


def show(works: pd.DataFrame) -> None:
    """--list: a line each, and the hours in all."""
    for work in works.itertuples():
        hours = f"{work.hours:.1f} core-hours"
        words = shlex.join(command(work))
        print(f"{work.claims:12} {work.scale:8} {hours:>16} {state_of(work):16} python {words}")
    print(f"{len(works)} commands, {works.hours.sum():.0f} core-hours in all")


def main(argv: list[str]) -> int:
    """The exit status of the first command that fails."""
    parser = argparse.ArgumentParser(description="Makes the runs behind the pages anew.")
    parser.add_argument("--only", nargs="+", default=[], metavar="CLAIM", help="or places")
    parser.add_argument("--scale", choices=("all", "paper", "reduced", "program"), default="all")
    parser.add_argument("--list", action="store_true", help="print them and their hours, and stop")
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
    for work in works.itertuples():
        if is_experiment(work) and is_complete(work):
            print(f"already made: runs/{work.place}")
            continue
        print(f"python {shlex.join(command(work))}", flush=True)
        status = subprocess.run([sys.executable, *command(work)], cwd=ROOT).returncode
        if status:  # 3: runs that diverged are no evidence
            return status
        if is_experiment(work):
            publish(work)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)  # the command has said what goes on
