"""python -m results.fedcl_fgn.compare runs/selection/001

What do rules gain over uniform selection of the same trial? selection.py prints this table at its
end. This command prints it again, also for several runs with the same data and trials together. It
writes gains.csv and gains.png (gain over cost) into the first folder.

Each gain is a difference in accuracy at equal cost: uploads, samples, or simulated seconds. Of both
runs, only what they did until the cheaper run's end counts. The accuracy is the mean over the last
sixth of this cost, of a curve that is straight between tests. Intervals are Student's at 95 %, over
trials. A star is a gain at equal uploads that differs from 0 after Holm's correction over these
gains. The others are not tested, because they ask the same question of the same runs. Scored
samples are those on which a rule computed losses. They cost no simulated seconds.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from data import first_line
from experiment import figures, report

RUN = ["setting", "method", "trial"]
COSTS = {"uploads": "equal uploads", "samples": "equal samples", "clock": "equal seconds"}
COLUMNS = [*RUN, "round", "accuracy", *COSTS, "received_mb", "sent_mb"]
UNIFORM = {  # which method spends another one's uploads with uniform selection
    "cl": "constant",
    "cl-fim": "constant-fim",
    "criticalfl": "constant-criticalfl",
}
POINTS = 101  # of the curve, whose mean is taken
WORK = "samples trained on + a third of those scored (uniform selection: 1)"
GAIN = "gain at equal uploads, points"
FORWARD = 1 / 3  # of the work on a sample in training: scoring has no backward pass


def read_rows(folders: list[Path]) -> pd.DataFrame:
    """Returns all rows of these runs. A method that several of them trained counts once.

    Raises OSError or ValueError for a folder without rows of selection.py. It also raises
    ValueError if a method's rows differ between runs, because they are not comparable.
    """
    text = {"keep_default_na": False, "na_values": ""}
    tables = []
    for folder in folders:
        table = pd.read_csv(folder / "metrics.csv", **text)
        missing = [name for name in COLUMNS if name not in table]
        if missing:
            raise ValueError(f"{folder}: no column {missing[0]}; wanted a run of selection.py")
        whole = report.without_diverged(table)
        tables.append(whole.reindex(columns=[*COLUMNS, "scored"]))
    df = pd.concat(tables).drop_duplicates()
    others = df.method[df.duplicated([*RUN, "round"])]
    if len(others):
        raise ValueError(f"{others.iloc[0]} has several results: choose runs of the same trials")
    return df


def gains(df: pd.DataFrame) -> pd.DataFrame:
    """Returns a row for each gain: whose, at which equal cost, mean, low, high, p, trials, holm.

    holm is p after the correction over all gains at equal uploads, and NaN for the other costs.

    df  rows of metrics.csv, in any order
    """
    runs = {key: rows.sort_values("round") for key, rows in df.groupby(RUN)}
    lines = []
    for setting in df.setting.unique():
        methods = df.method[df.setting == setting].unique()
        for method in methods:
            control = uniform_of(method, methods)
            if control is None:
                continue
            pairs = pair_up(runs, (setting, method), (setting, control))
            for cost in COSTS:
                found = [gain(run, other, cost) for run, other in pairs]
                lines.append((setting, method, control, cost, *report.interval(found), len(pairs)))
    columns = ["setting", "method", "control", "cost", "mean", "low", "high", "p", "trials"]
    table = pd.DataFrame(lines, columns=columns)
    tested = table[table.cost == "uploads"]
    holm = pd.Series(report.holm(tested.p), tested.index)
    return table.assign(holm=holm)


def pair_up(runs: dict, of_method: tuple, of_control: tuple) -> list[tuple]:
    """Returns the runs of a method and its control in each trial that has both."""
    pairs = []
    for (*whose, trial), run in runs.items():
        control = runs.get((*of_control, trial))
        if tuple(whose) == of_method and control is not None:
            pairs.append((run, control))
    return pairs


def uniform_of(method: str, methods) -> str | None:
    """Returns uniform selection at this method's uploads; None if this method is, or if none is.

    For FedCL and the later code's rule it is `constant`, if it was run, and otherwise the base.
    """
    base, _, how = method.split()[0].partition("+")
    constant = f"{base}+{UNIFORM.get(how)}"
    control = constant if constant in methods else base
    is_control = method == base or how in UNIFORM.values()
    if is_control or control not in methods:
        return None
    return control


def gain(run: pd.DataFrame, control: pd.DataFrame, cost: str) -> float:
    """Returns the accuracy of a run minus the control's, in points, at equal cost."""
    end = min(run[cost].max(), control[cost].max())
    return late_accuracy(run, cost, end) - late_accuracy(control, cost, end)


def late_accuracy(run: pd.DataFrame, cost: str, end: float) -> float:
    """Returns the mean accuracy over the last sixth of a cost that ends at `end`.

    run  one run's rounds, in order. Between tests the accuracy is a straight line
    """
    tested = run.dropna(subset="accuracy")
    last_sixth = np.linspace(5 / 6 * end, end, POINTS)
    return np.interp(last_sixth, tested[cost], tested.accuracy).mean()


def costs(df: pd.DataFrame) -> pd.DataFrame:
    """Returns what a run costs, by setting and method, as means over trials.

    accuracy         in the last sixth of its uploads
    samples, scored  samples that clients trained on, and scored for the rule
    megabytes        received and sent
    """
    lines = []
    for key, rows in df.groupby(RUN):
        rows = rows.sort_values("round")
        last = rows.iloc[-1]
        line = dict(zip(RUN, key, strict=True))
        line["accuracy"] = late_accuracy(rows, "uploads", last.uploads)
        line |= {name: last[name] for name in COSTS}
        line["scored"] = np.sum(rows.get("scored", 0))  # runs of older versions have no column
        line["megabytes"] = last.received_mb + last.sent_mb
        lines.append(line)
    return pd.DataFrame(lines).drop(columns="trial").groupby(["setting", "method"]).mean()


def shown(found: pd.DataFrame, spent: pd.DataFrame) -> pd.DataFrame:
    """Returns the table that is printed, of `gains` and `costs`: a row for each method.

    Those with which the others are compared come first. They have no gains.
    """
    table = {}
    for row in found.itertuples():
        table[row.setting, row.control] = {}
    for row in found.itertuples():
        line = table.setdefault((row.setting, row.method), {})
        line |= {"over": row.control, "n": row.trials, COSTS[row.cost]: text_of(row)}
    for key, line in table.items():
        cost = spent.loc[key]
        line["accuracy"] = f"{cost.accuracy:.1f}"
        for name in ("uploads", "samples", "scored", "clock", "megabytes"):
            line[name] = f"{cost[name]:.0f}"
    columns = ["over", "n", *COSTS.values(), "accuracy", "uploads", "samples", "scored", "clock"]
    lines = pd.DataFrame(table).T.reindex(columns=[*columns, "megabytes"])
    return lines.fillna("").rename(columns={"clock": "simulated s"})


def text_of(row) -> str:
    """Returns '+4.1 [2.7, 5.6]*' for a row of `gains`, without an interval if there is none."""
    if np.isnan(row.mean):  # no trial has both
        return ""
    text = f"{row.mean:+.1f}"
    if not np.isnan(row.low):
        text += f" [{row.low:.1f}, {row.high:.1f}]"
    return text + "*" * (row.holm < 0.05)


def show(df: pd.DataFrame, folder: Path) -> None:
    """Prints the table, and writes gains.csv and gains.png, if there is a control."""
    found = gains(df)
    if found.empty:
        return
    spent = costs(df)
    print("\nwhat each method gains over uniform selection, which is named in the column `over`")
    for setting, table in shown(found, spent).groupby(level=0, sort=False):
        heading = "" if setting == "-" else f"{setting}\n"
        print(f"{heading}{table.droplevel(0).to_string()}")
    print("(accuracy in %, gains in points: means over the last sixth of the uploads, samples, or")
    print(" simulated seconds. [..]: 95 % intervals, paired over trials. *: decided by Holm, p <")
    print(" 0.05. Only gains at equal uploads are tested)")
    found.join(spent, on=["setting", "method"]).to_csv(folder / "gains.csv", index=False)
    plot(found, spent, folder / "gains.png", df.attrs.get("title", ""))


# ---------------------------------------------------------------------------------------- figure


def relative(found: pd.DataFrame, spent: pd.DataFrame) -> pd.DataFrame:
    """Returns the gains at equal uploads, with megabytes and samples as multiples of the base's.

    Without the base, they are multiples of the control's. A scored sample counts as a third of a
    sample in training.
    """
    work = spent.samples + FORWARD * spent.scored
    rows = found[found.cost == "uploads"].copy()
    for name, cost in (("megabytes", spent.megabytes), ("samples", work)):
        times = []
        for row in rows.itertuples():
            base, _, _ = row.control.partition("+")
            unit = cost.get((row.setting, base), cost[row.setting, row.control])
            times.append(cost[row.setting, row.method] / unit)
        rows[name] = times
    return rows


def plot(found: pd.DataFrame, spent: pd.DataFrame, path: Path, title: str) -> None:
    """Plots the gain at equal uploads over what a method costs: a panel for each setting.

    A name says how many times the base's megabytes a method sends and receives, if they differ.
    """
    rows = relative(found, spent).rename(columns={"samples": WORK, "mean": GAIN})
    rows.attrs["title"] = title
    note = (
        "lines: 95 % intervals. Blue: a decided gain; orange: a decided loss; grey: undecided\n"
        "(1.5 x MB): megabytes sent and received, as a multiple of uniform selection's"
    )
    figures.plot(rows, path, [(WORK, GAIN)], draw_gains, note, height=3.2, shared="", edge=-1)


def draw_gains(axis, rows: pd.DataFrame, x: str, y: str, styles) -> None:
    """Draws each method's gain with its interval, and its name at the right edge."""
    axis.axhline(0, color="0.5", linewidth=1, zorder=1)
    for row in rows.to_dict("records"):
        base, _, control = row["control"].partition("+")
        name = row["method"].removeprefix(base).strip(" +")
        if control:
            name += f" over {control}"
        if abs(row["megabytes"] - 1) >= 0.05:
            name += f" ({row['megabytes']:.1f} x MB)"
        color = "0.45"
        if row["holm"] < 0.05:
            color = figures.COLORS[row[y] < 0]
        place = (row[x], row[y])
        axis.plot([row[x], row[x]], [row["low"], row["high"]], color=color, linewidth=1)
        axis.plot(*place, "o", markersize=4, color=color, zorder=5)
        figures.label_end(axis, name, place, color)
    axis.set_xlim(0, 1.05 * rows[x].max())


def main(argv=None) -> None:
    """Runs the command line. Tests pass its words as `argv`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[2])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs of selection.py")
    given = parser.parse_args(argv)
    try:
        df = read_rows(given.runs)
    except (OSError, ValueError) as error:
        parser.error(first_line(error))
    if gains(df).empty:
        parser.error("no run of uniform selection: add --method base --select uniform")
    show(df, given.runs[0])


if __name__ == "__main__":
    main()
