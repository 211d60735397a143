"""python -m results.clock_answers

What the clock says, from the runs clock-* of rounds.csv.xz: the tables of clock.md (tables.py puts
them there), and, as a program, its figures.
"""

import numpy as np
import pandas as pd

from results.clock import SPREADS
from results.evidence import FOLDER, KEYS, interval

DATA = {"fmnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
NAMES = {
    "fedavg": "FedAvg",
    "fedavg+cl": "FedCL",
    "fedcl": "phases as printed",
    "fedcl-fresh": "the frozen left out",
    "fedcl-nofreeze": "no freezing",
    "fedavg size": "by size",
    "fedavg+longer": "FedAvg, equal samples",
}


def read(run: str, spread: float) -> pd.DataFrame:
    """A run's rounds with `seconds`, simulated since round 1, and `waited`; empty if not made."""
    rounds = pd.read_csv(FOLDER / "rounds.csv.xz", dtype={"setting": str}).fillna({"setting": ""})
    rounds = rounds[rounds.run == run].sort_values([*KEYS, "round"])
    rounds["seconds"] = rounds.groupby(KEYS)[f"clock_{spread}"].cumsum()
    rounds["waited"] = 100 * rounds[f"waiting_{spread}"]
    return rounds


def by_trial(run: str, spread: float):
    """Yields each trial's rounds by method."""
    for _, trial in read(run, spread).groupby("trial"):
        yield {method: rows for method, rows in trial.groupby("method")}


def doubling() -> list[tuple]:
    """(a) Seconds to FedAvg's final accuracy, FedCL / FedAvg: geometric mean and interval."""
    rows = []
    for name, spread in settings("fedcl_fgn/clock-{}"):
        logs = []
        reached = 0
        for arms in by_trial(f"fedcl_fgn/clock-{name}", spread):
            goal = last_ten(arms["fedavg"])
            fedcl, came = seconds_to(arms["fedavg+cl"], goal)
            fedavg, _ = seconds_to(arms["fedavg"], goal)
            logs.append(np.log(fedcl / fedavg))
            reached += came
        found = interval(np.array(logs))
        ratios = np.exp([found.mean, found.low, found.high])
        mean, low, high = [f"{ratio:.1f}".removeprefix("0") for ratio in ratios]
        times = f"{mean} [{low}, {high}]"
        rows.append((DATA[name], spread, times, f"{reached} of {found.n}"))
    return rows


def phases() -> list[tuple]:
    """(b) Share of the selected clients' time that is waiting, and the final accuracy."""
    rows = []
    for name, spread in settings("fedcl_gmm_sync/clock-{}"):
        waited = {}
        accuracy = {}
        for arms in by_trial(f"fedcl_gmm_sync/clock-{name}", spread):
            for method, run in arms.items():
                waited.setdefault(method, []).append(run.waited.mean())
                accuracy.setdefault(method, []).append(last_ten(run))
        for method in ("fedcl", "fedcl-fresh"):
            line = [DATA[name], spread, NAMES[method]]
            line.append(f"{np.mean(waited[method]):.0f} %")
            for measure in (waited, accuracy):
                d = np.subtract(measure[method], measure["fedcl-nofreeze"])
                line.append(interval(d).text())
            rows.append(tuple(line))
    return rows


def draws() -> list[tuple]:
    """(c) Accuracy when the trial's fastest arm ends: draws by size minus the others."""
    rows = []
    for name, spread in settings("fedcl_fgn/clock-size-{}"):
        at_end = {}
        for arms in by_trial(f"fedcl_fgn/clock-size-{name}", spread):
            end = min(run.seconds.max() for run in arms.values())
            for method, run in arms.items():
                tested = run[run.seconds <= end].accuracy.dropna()
                at_end.setdefault(method, []).append(tested.iloc[-1])
        size = np.array(at_end["fedavg size"])
        for method in ("fedavg", "fedavg+longer"):
            gain = interval(size - at_end[method])
            rows.append((DATA[name], spread, NAMES[method], gain.text()))
    return rows


def settings(run: str):
    """Yields the data sets of which there is such a run, with each spread."""
    made = set(pd.read_csv(FOLDER / "rounds.csv.xz", usecols=["run"]).run)
    for name in DATA:
        for spread in SPREADS:
            if run.format(name) in made:
                yield name, spread


def last_ten(run: pd.DataFrame) -> float:
    """Mean of the tests in the last ten rounds."""
    return run.accuracy[run["round"] > run["round"].max() - 10].mean()


def seconds_to(run: pd.DataFrame, goal: float) -> tuple[float, bool]:
    """Until a test reaches the goal, and whether one does; if none does, the whole run's."""
    there = run[run.accuracy >= goal]
    if len(there):
        return there.seconds.iloc[0], True
    return run.seconds.max(), False


def draw(name: str, run: str, title: str) -> None:
    """results/clock-NAME.png: accuracy over hours, a panel for each data set and spread."""
    import matplotlib

    matplotlib.use("Agg")
    import seaborn as sns

    parts = []
    for data, spread in settings(run):
        rounds = read(run.format(data), spread)
        parts.append(rounds.assign(data=DATA[data], spread=spread))
    df = pd.concat(parts).dropna(subset="accuracy")
    df["hours"] = df.seconds / 3600
    df["method"] = df["method"].replace(NAMES)
    grid = sns.relplot(
        df,
        x="hours",
        y="accuracy",
        hue="method",
        units="trial",
        estimator=None,
        row="data",
        col="spread",
        kind="line",
        height=2.7,
        aspect=1.3,
        facet_kws={"sharex": False, "sharey": "row"},
        linewidth=1,
        alpha=0.7,
    )
    grid.set_titles("{row_name}, spread {col_name}")
    grid.set_axis_labels("simulated hours", "test accuracy in %")
    grid.figure.suptitle(f"{title}: a line for each trial", y=1.02)
    grid.savefig(FOLDER / f"clock-{name}.png", dpi=90)


if __name__ == "__main__":
    draw("doubling", "fedcl_fgn/clock-{}", "FedCL and FedAvg")
    draw("phases", "fedcl_gmm_sync/clock-{}", "Phases")
    draw("draws", "fedcl_fgn/clock-size-{}", "Draws by size, 960 uploads")
