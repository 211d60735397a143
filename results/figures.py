"""python results/figures.py [NAME ...]

Draws the pages' figures from the summary.json files beside this one: points are means over trials of paired differences, error
bars their 95 % intervals.
"""

import itertools
import sys

import matplotlib
import matplotlib.pyplot as plt
import pandas as pd
import verdicts
from verdicts import ROOT, bounds, gain, settings

matplotlib.use("Agg")
import seaborn as sns  # noqa: E402  after the backend is chosen

MEASURES = {"final": "final round", "last10": "mean of the last ten"}


def gains(place: str, *pairs: str, **labels) -> pd.DataFrame:
    """Paired differences 'A - B' of a run in the final round and the mean of the last ten: a row for each setting, pair and
    trial, the swept flags and `labels` as columns."""
    rows = []
    for setting, pair, (what, name) in itertools.product(settings(place), pairs, MEASURES.items()):
        own = dict(word.split("=") for word in setting.split()) | labels
        rows.append(own | {"difference": pair, "measured": name, "gain": gain(place, setting, *pair.split(" - "), what)})
    return pd.DataFrame(rows).explode("gain", ignore_index=True).astype({"gain": float})


def draw(df: pd.DataFrame, **layout) -> sns.FacetGrid:
    """Points of `gain` over `x`, a colour for each measure, in panels by `col`."""
    sns.set_theme(style="ticks", palette="colorblind", rc={"axes.grid": True, "grid.alpha": 0.25, "lines.linewidth": 1.2})
    style = {"dodge": 0.2, "markersize": 4, "linestyle": "none", "errorbar": lambda d: bounds(d.to_numpy())[1:]}
    grid = sns.catplot(df, y="gain", kind="point", err_kws={"linewidth": 1}, height=3, hue="measured", **style, **layout)
    return grid.refline(y=0, color="black").set_titles("{col_name}").set_ylabels("paired difference (points)")


def apart(runs: dict[str, str], *pairs: str) -> sns.FacetGrid:
    """Paired differences 'A - B' of two arms, a panel for each run."""
    df = pd.concat(gains(run, *pairs, run=name) for name, run in runs.items())
    df = df.assign(pair=df.difference.str.replace(" - ", "\n- "))
    grid = draw(df, x="pair", col="run", col_wrap=1, aspect=2.9)
    return grid.set_axis_labels("", "paired difference\n(points, 95 %)")


EXPOSED = ("curriculum", "shuffled", "weighted", "fixed", "random", "threshold", "balanced")
FIGURES = {
    "fedavg_curriculum/cifar10-table1/gains": lambda: draw(
        gains(verdicts.CIFAR10, *(f"curriculum - {other}" for other in ("vanilla", "random", "anti"))),
        x="alpha",
        col="difference",
    ),
    "fedavg_curriculum/cifar10-exposure-alpha0.9/exposure": lambda: apart(
        {f"CIFAR-10, Dir({alpha})": run for alpha, run in verdicts.EXPOSURE.items()},
        *(f"{order} - vanilla" for order in EXPOSED),
        "curriculum - shuffled",
    ),
    "fedcl_gmm_sync/mnist-200-alpha0.1/gains": lambda: apart(
        {f"MNIST, Dir({alpha}), 200 rounds": run for alpha, run in verdicts.MNIST.items()},
        *("fedcl - fedgen", "fedcl - fedgen-e", "fedcl-fresh - fedgen-e", "fedgen-e - fedgen", "fedgen - fedavg"),
    ),
    "fedac_art/fmnist-table2/gains": lambda: draw(gains("fedac_art/fmnist-table2", "fedac - base"), x="base", aspect=1.8),
}


def main(names: list[str]) -> None:
    """Draws the named figures, or all."""
    for name in names or FIGURES:
        grid = FIGURES[name]()
        grid.savefig(ROOT / f"{name}.png", dpi=110)
        plt.close(grid.figure)


if __name__ == "__main__":
    main(sys.argv[1:])
