"""python -m results.clock_answers

Makes the tables of clock.md from the runs clock-* of rounds.csv.xz. tables.py writes them into the
page. As a program, this module plots the page's figure.
"""

import argparse

import numpy as np
import pandas as pd

from results.clock import SPREADS
from results.evidence import FOLDER, KEYS, Interval, interval, rounds

DATA = {"fmnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
NAMES = {
    "fedavg": "FedAvg",
    "fedavg+cl": "FedCL",
    "fedcl": "phases as published",
    "fedcl-fresh": "the frozen left out",
    "fedcl-nofreeze": "no freezing",
    "fedavg size": "by size",
    "fedavg+longer": "FedAvg, equal samples",
}


def made(run: str):
    """Yields (data set, spread, trials) of such runs. A trial has each method's rounds.

    `seconds` are simulated, since round 1. `waited` is in %.
    """
    for name, data in DATA.items():
        of_run = rounds()[rounds().run == run.format(name)].sort_values([*KEYS, "round"])
        if of_run.empty:
            continue
        for spread in SPREADS:
            of_run["seconds"] = of_run.groupby(KEYS)[f"clock_{spread}"].cumsum()
            of_run["waited"] = 100 * of_run[f"waiting_{spread}"]
            trials = []
            for _, trial in of_run.groupby("trial"):
                trials.append(dict(list(trial.groupby("method"))))
            yield data, spread, trials


def doubling() -> list[tuple]:
    """(a) Seconds to FedAvg's final accuracy, FedCL / FedAvg: geometric mean and interval.

    Rows: data, spread, the ratio's Interval, in how many trials FedCL reached it.
    """
    rows = []
    for data, spread, trials in made("fedcl_fgn/clock-{}"):
        logs = []
        reached = 0
        for arms in trials:
            goal = last_ten(arms["fedavg"])
            fedcl, came = seconds_to(arms["fedavg+cl"], goal)
            fedavg, _ = seconds_to(arms["fedavg"], goal)
            logs.append(np.log(fedcl / fedavg))
            reached += came
        found = interval(np.array(logs))
        mean, low, high = np.exp([found.mean, found.low, found.high])
        ratio = Interval(mean, low, high, found.p, found.n)
        rows.append((data, spread, ratio, f"{reached} of {found.n}"))
    return rows


def phases() -> list[tuple]:
    """(b) Percentage of the selected clients' time that is waiting, and the final accuracy.

    Rows: data, spread, method, its waiting in %; waiting and accuracy, minus no freezing's.
    """
    rows = []
    for data, spread, trials in made("fedcl_gmm_sync/clock-{}"):
        waited = {}
        accuracy = {}
        for arms in trials:
            for method, run in arms.items():
                waited.setdefault(method, []).append(run.waited.mean())
                accuracy.setdefault(method, []).append(last_ten(run))
        for method in ("fedcl", "fedcl-fresh"):
            row = [data, spread, NAMES[method], np.mean(waited[method])]
            for measure in (waited, accuracy):
                d = np.subtract(measure[method], measure["fedcl-nofreeze"])
                row.append(interval(d))
            rows.append(tuple(row))
    return rows


def draws() -> list[tuple]:
    """(c) Accuracy when the trial's fastest method ends: selection by size minus the others.

    Rows: data, spread, the other method, the difference.
    """
    rows = []
    for data, spread, trials in made("fedcl_fgn/clock-size-{}"):
        at_end = {}
        for arms in trials:
            end = min(run.seconds.max() for run in arms.values())
            for method, run in arms.items():
                tested = run[run.seconds <= end].accuracy.dropna()
                at_end.setdefault(method, []).append(tested.iloc[-1])
        size = np.array(at_end["fedavg size"])
        for method in ("fedavg", "fedavg+longer"):
            rows.append((data, spread, NAMES[method], interval(size - at_end[method])))
    return rows


def last_ten(run: pd.DataFrame) -> float:
    """Returns the mean of the tests in the last ten rounds."""
    return run.accuracy[run["round"] > run["round"].max() - 10].mean()


def seconds_to(run: pd.DataFrame, goal: float) -> tuple[float, bool]:
    """Returns the seconds until a test reaches the goal, or the whole run's, and if one does."""
    there = run[run.accuracy >= goal]
    if len(there):
        return there.seconds.iloc[0], True
    return run.seconds.max(), False


def draw() -> None:
    """Plots results/clock.png: the answers, a panel each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = (
        "(a) seconds to FedAvg's accuracy, FedCL / FedAvg",
        "(b) points of waiting, minus no freezing",
        "(b) points of accuracy, minus no freezing",
        "(c) points of accuracy at equal time, selection by size minus others",
    )
    ratio, waiting, accuracy, lead = panels = [{}, {}, {}, {}]
    for data, spread, found, _ in doubling():
        ratio[f"{data}, spread {spread}"] = found
    for data, spread, method, _, waits, ends in phases():
        waiting[f"{data}, spread {spread}, {method}"] = waits
        accuracy[f"{data}, {method}"] = ends  # at either spread
    for data, spread, method, found in draws():
        lead[f"{data}, spread {spread}, {method}"] = found

    heights = [len(panel) + 1 for panel in panels]
    figure, axes = plt.subplots(4, figsize=(9, 9), height_ratios=heights)
    for axis, name, panel in zip(axes, names, panels, strict=True):
        no_difference = 1 if panel is ratio else 0
        axis.axvline(no_difference, color="0.6", linewidth=1)
        for height, found in enumerate(panel.values()):
            color = "0.5" if found.low <= no_difference <= found.high else "C0"
            axis.plot([found.low, found.high], [height, height], color=color, linewidth=2)
            axis.plot(found.mean, height, "o", color=color)
        labels = [f"{label}, n = {found.n}" for label, found in panel.items()]
        axis.set_yticks(range(len(panel)), labels, fontsize=8)
        axis.set_ylim(len(panel) - 0.5, -0.5)
        axis.grid(axis="x", color="0.9")
        axis.set_title(name, loc="left", fontsize=10)
    axes[-1].set_xlabel("mean, 95 % interval; grey: contains no difference")
    figure.tight_layout()
    figure.savefig(FOLDER / "clock.png", dpi=100)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # it has no options
    draw()
