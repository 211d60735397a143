"""python -m results.fedcl_fgn.compare runs/selection/001 --first "fedavg size"

Compares methods that spent the same uploads. It reads the metrics.csv of one run of selection.py,
or of several with the same data, budget and trials. It prints the final accuracy, and `late`, the
mean accuracy over the last sixth of the uploads: methods differ in their number of rounds. It also
prints the first method's lead over the others in `late`, paired by trial, with 95 % intervals.
It writes compare.csv and compare.png (accuracy over uploads) into the first folder.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from data import first_line
from experiment import report

RUN = ["method", "trial"]
COLUMNS = ["setting", *RUN, "round", "uploads", "samples", "received_mb", "accuracy"]


def read_rows(folders: list[Path]) -> pd.DataFrame:
    """Returns all rows of these runs. A method that several of them trained counts once.

    Raises OSError or ValueError for a folder without rows of selection.py. It also raises
    ValueError if a method's rows differ between runs or settings, because they are not comparable.
    """
    text = {"keep_default_na": False, "na_values": ""}
    tables = []
    for folder in folders:
        tables.append(pd.read_csv(folder / "metrics.csv", usecols=COLUMNS, **text))
    df = pd.concat(tables).drop_duplicates()
    others = df.method[df.duplicated([*RUN, "round"])]
    if len(others):
        raise ValueError(f"{others.iloc[0]} has several results: choose runs of one setting")
    return df


def per_trial(df: pd.DataFrame) -> pd.DataFrame:
    """Returns by method and trial: `late`, `final`, uploads, rounds, samples, megabytes."""
    runs = df.groupby(RUN, sort=False)
    is_late = df.uploads > 5 / 6 * runs.uploads.transform("last")
    return pd.DataFrame(
        {
            "late": df[is_late].groupby(RUN, sort=False).accuracy.mean(),
            "final": runs.accuracy.last(),
            "uploads": runs.uploads.last(),
            "rounds": runs.size(),
            "samples": runs.samples.last(),
            "received_mb": runs.received_mb.last(),
        }
    )


def compare(df: pd.DataFrame, first: str) -> pd.DataFrame:
    """Returns means over trials by method, and `ahead`, `low`, `high`: first - method in `late`.

    Raises ValueError if methods spent different uploads or trials, or if none is `first`.
    """
    if first not in set(df.method):
        raise ValueError(f"--first {first}: none of {', '.join(df.method.unique())}")
    trials = per_trial(df)
    methods_of_trial = trials.groupby("trial").size()
    if trials.uploads.nunique() > 1 or methods_of_trial.nunique() > 1:
        raise ValueError("methods differ in their uploads or trials: set --budget, let all finish")
    methods = trials.groupby("method", sort=False)
    table = methods.mean()
    table.insert(1, "std", methods.late.std())
    for method in table.index.drop(first):
        lead = trials.late[first] - trials.late[method]
        mean, low, high, _ = report.interval(lead)
        table.loc[method, ["ahead", "low", "high"]] = [mean, low, high]
    return table


def plot(df: pd.DataFrame, path: Path) -> None:
    """Plots accuracy over uploads, straight between tests: mean and deviation over trials."""
    grid = np.linspace(0, df.uploads.max(), 61)[1:]
    curves = []
    for (method, trial), rows in df.dropna(subset="accuracy").groupby(RUN, sort=False):
        uploads = grid[grid >= rows.uploads.iloc[0]]
        accuracy = np.interp(uploads, rows.uploads, rows.accuracy)
        columns = {"setting": "", "method": method, "trial": trial}
        curves.append(pd.DataFrame(columns | {"uploads": uploads, "accuracy": accuracy}))
    options = {"x": "uploads", "y": "accuracy", "hue": "method", "kind": "line"}
    report.plot(pd.concat(curves), path, **options, errorbar=report.spread, height=3.8, aspect=1.3)


def main(argv=None) -> None:
    """Runs the command line. Tests pass its words as `argv`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--first", default="fedavg size")
    given = parser.parse_args(argv)
    try:
        df = read_rows(given.runs)
        table = compare(df, given.first)
    except (OSError, ValueError) as error:
        parser.error(first_line(error))
    print(table.to_string(float_format="%.2f"))
    table.to_csv(given.runs[0] / "compare.csv", float_format="%.4f")
    plot(df, given.runs[0] / "compare.png")


if __name__ == "__main__":
    main()
