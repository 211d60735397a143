"""The answers of clock.md, from the runs clock-* of rounds.csv.xz.

tables.py writes them into the page, and figures.py plots them.
"""

import numpy as np
import pandas as pd

from results.clock import SPREADS
from results.evidence import KEYS, Interval, interval, rounds

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
