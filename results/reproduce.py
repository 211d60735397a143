"""python results/reproduce.py [--list] [--scale small|reduced|paper] [--only A6 C2 ...] [--jobs 2]

The runs behind the pages under results/, from reproduce.csv: place under results/ and runs/, the claims that it decides, scale,
hours on two cores (measured where the run is here), command. What is complete is skipped, what was stopped is resumed; what a
page reads is then copied beside it, and pages.py writes the pages. `small` shows in minutes that everything runs, `reduced` is
for two cores, `paper` is the papers' own setting.
"""

import argparse
import csv
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pandas as pd

ROOT = Path(__file__).resolve().parent


class Work(NamedTuple):
    """One run, a line of reproduce.csv."""

    place: str
    claims: str
    scale: str
    hours: str
    line: str

    def command(self, jobs: int) -> list[str]:
        return shlex.split(f"{self.line} --threads 1 --jobs {jobs} --out runs/{self.place}")

    def complete(self) -> bool:
        return (ROOT.parent / "runs" / self.place / "summary.json").exists()


READ = {"selection.csv", "measures.csv", "results.csv", "consistency.csv"}  # by the cells of claims
KEYS = ["setting", "method", "trial", "round"]
BY_ROUND = {
    "A11": ["accuracy"],
    "A13": ["lambda_easy", "lambda_all", "lambda_hard"],
    "C8": ["critical"],
}
BY_ROUND["D4"] = [
    "noisy_small",
    "noisy_large",
    "spearman",
]  # the columns that these claims' cells read in curves.csv
RUNS = [Work(*cells) for cells in csv.reader((ROOT / "reproduce.csv").read_text().splitlines()[1:])]


def publish(work: Work) -> None:
    """Copies a finished run's summary, its tables and the figures that pages show beside its page."""
    source, target = ROOT.parent / "runs" / work.place, ROOT / work.place
    target.mkdir(parents=True, exist_ok=True)
    pages = "".join(
        page.read_text() for page in (*ROOT.rglob("README.md"), ROOT.parent / "README.md")
    )
    for path in source.glob("*.*"):
        if (
            path.name == "summary.json"
            or path.suffix in (".png", ".csv")
            and f"{source.name}/{path.name}" in pages
        ):
            shutil.copy(path, target)
    for name in READ & {path.name for path in source.iterdir()}:
        shutil.copy(source / name, target)
    for claim in BY_ROUND.keys() & set(work.claims.split()):
        metrics = pd.read_csv(source / "metrics.csv", dtype=str)
        metrics[KEYS + BY_ROUND[claim]].dropna(subset=BY_ROUND[claim], how="all").to_csv(
            target / "curves.csv", index=False
        )


def main(argv: list[str]) -> int:
    """The command line; the exit status of the first run that fails."""
    parser = argparse.ArgumentParser(description="the runs behind the pages")
    parser.add_argument(
        "--list", action="store_true", help="print them, with their hours on two cores, and stop"
    )
    parser.add_argument("--scale", choices=("small", "reduced", "paper"), default="reduced")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="CLAIM",
        help="those that these claims rest on; or places",
    )
    parser.add_argument("--jobs", type=int, default=2)
    flags = parser.parse_args(argv)
    named = {w: {w.place, *w.claims.split()} for w in RUNS}
    if unknown := set(flags.only).difference(*named.values()):
        parser.error(f"--only {' '.join(sorted(unknown))}: no claim and no place of reproduce.csv")
    chosen = [w for w in RUNS if not flags.only or named[w] & set(flags.only)]
    if flags.list:
        for w in chosen:
            state = "done" if w.complete() else f"{w.hours} h"
            print(
                f"{w.scale:<8} {w.claims:<12} {state:>7}  python {shlex.join(w.command(flags.jobs))}"
            )
        return 0
    for work in (w for w in chosen if w.scale == flags.scale):
        resumed = (
            ["--resume"] if (ROOT.parent / "runs" / work.place / "config.json").exists() else []
        )
        run = [sys.executable, *work.command(flags.jobs), *resumed]
        if not work.complete() and (status := subprocess.run(run, cwd=ROOT.parent).returncode):
            return status
        if work.scale != "small":
            publish(work)
    return subprocess.run([sys.executable, str(ROOT / "pages.py")]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
