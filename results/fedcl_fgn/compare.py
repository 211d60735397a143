"""python results/fedcl_fgn/compare.py RUN [RUN ...] --first "fedavg size"

Arms that spent the same uploads, from the metrics.csv of one run or of several with the same data, budget and trials: the mean
accuracy over the last sixth of the uploads (the last ten rounds where 60 rounds spend them: arms differ in their number of
rounds), the final one, and the first arm's differences from the others, paired by trial, with 95 % Student intervals. `noise`
is V, the variance of the aggregate over the draw of clients, divided by that of the first arm: the sum over all trials and over
those rounds in which both drew as many clients. compare.csv and compare.png, accuracy over uploads, go into the first folder.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[2]))
import experiment  # noqa: E402


def rows(folders: list[Path]) -> pd.DataFrame:
    """All rows of these runs. An arm that several of them trained counts once."""
    runs = [pd.read_csv(folder / "metrics.csv", na_values="", keep_default_na=False) for folder in folders]
    return pd.concat(runs).drop_duplicates(["method", "trial", "round"])


def by_trial(df: pd.DataFrame) -> pd.DataFrame:
    """By method and trial: `late` and `final` accuracy, uploads, rounds, samples, megabytes received, 1 + CV^2(N)."""
    keys = ["method", "trial"]
    runs = df.groupby(keys, sort=False)
    late = df[df.uploads > 5 / 6 * runs.uploads.transform("last")].groupby(keys, sort=False).accuracy.mean()
    columns = {"late": late, "final": runs.accuracy.last(), "uploads": runs.uploads.last(), "rounds": runs.size()}
    columns |= {"samples": runs.samples.last(), "received_mb": runs.received_mb.last(), "size_ratio": runs.size_ratio.mean()}
    return pd.DataFrame(columns)


def compare(df: pd.DataFrame, first: str) -> pd.DataFrame:
    """By method: means, the trials' standard deviation of `late`, and first - method in `late`: mean, low, high.

    Raises ValueError where arms spent different uploads or have different trials.
    """
    each = by_trial(df)
    if each.uploads.nunique() > 1 or each.groupby("trial").size().nunique() > 1:
        raise ValueError("arms differ in their uploads or trials: set --budget, let all finish")
    table = each.groupby("method", sort=False).mean()
    table.insert(1, "std", each.groupby("method", sort=False).late.std())
    V, n = (df.pivot(index=["trial", "round"], columns="method", values=column) for column in ("V", "clients"))
    V = V.where(n.eq(n[first], axis=0) & np.isfinite(V))
    table["noise"] = V.sum(min_count=1) / V.notna().mul(V[first], axis=0).sum()
    ours = each.late[first]
    for method in table.index:
        table.loc[method, ["ahead", "low", "high"]] = experiment.interval(ours - each.late[method])[:3]
    table.loc[first, ["ahead", "low", "high"]] = np.nan
    return table


def draw(df: pd.DataFrame, path: Path) -> None:
    """Accuracy over uploads: mean and standard deviation over trials, each curve straight between its tests."""
    import seaborn as sns

    parts, uploads = [], np.linspace(0, df.uploads.max(), 61)[1:]
    for (method, trial), own in df.dropna(subset="accuracy").groupby(["method", "trial"], sort=False):
        shown = uploads[uploads >= own.uploads.iloc[0]]
        accuracy = np.interp(shown, own.uploads, own.accuracy)
        parts.append(pd.DataFrame({"method": method, "trial": trial, "uploads": shown, "accuracy": accuracy}))
    how = {"x": "uploads", "y": "accuracy", "hue": "method", "kind": "line", "errorbar": "sd", "height": 3.8, "aspect": 1.3}
    sns.relplot(pd.concat(parts), **how).set_ylabels("test accuracy (%)").savefig(path, dpi=150)


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--first", default="fedavg size")
    given = parser.parse_args(argv)
    df = rows(given.runs)
    table = compare(df, given.first)
    print(table.to_string(float_format="%.2f"))
    table.to_csv(given.runs[0] / "compare.csv", float_format="%.4f")
    draw(df, given.runs[0] / "compare.png")


if __name__ == "__main__":
    main()
