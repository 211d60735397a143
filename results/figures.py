"""python results/figures.py [NAME ...]

Draws the pages' figures from the summary.json files beside this one: points are means over trials of paired differences, error
bars their 95 % intervals.
"""

import itertools
import sys

import matplotlib
import numpy as np
import pandas as pd
from verdicts import ROOT, bounds, flags, summary

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  after the backend is chosen
import seaborn as sns  # noqa: E402

MEASURES = {"final": "final round", "last10": "mean of the last ten"}
BY_PAIR = {"x": "pair", "col": "run", "col_wrap": 1, "aspect": 2.9}
EXPOSED = ("curriculum", "shuffled", "weighted", "fixed", "random", "threshold", "balanced")
FIGURES = {  # where it is kept: its runs under results/, differences of arms, layout
    "fedavg_curriculum/cifar10-table1/gains": (
        {"": "fedavg_curriculum/cifar10-table1"},
        ("curriculum - vanilla", "curriculum - random", "curriculum - anti"),
        {"x": "alpha", "col": "difference"},
    ),
    "fedavg_curriculum/cifar10-exposure-alpha0.9/exposure": (
        {f"CIFAR-10, Dir({alpha})": f"fedavg_curriculum/cifar10-exposure-alpha{alpha}" for alpha in (0.05, 0.9)},
        (*(f"{order} - vanilla" for order in EXPOSED), "curriculum - shuffled"),
        BY_PAIR,
    ),
    "fedcl_gmm_sync/mnist-200-alpha0.1/gains": (
        {f"MNIST, Dir({alpha}), 200 rounds": f"fedcl_gmm_sync/mnist-200-alpha{alpha}" for alpha in (0.05, 0.1, 1)},
        ("fedcl - fedgen", "fedcl - fedgen-e", "fedcl-fresh - fedgen-e", "fedgen-e - fedgen", "fedgen - fedavg"),
        BY_PAIR,
    ),
    "fedac_art/fmnist-table2/gains": ({"": "fedac_art/fmnist-table2"}, ("fedac - base",), {"x": "base", "aspect": 1.8}),
}


def gains(runs: dict[str, str], differences: tuple[str, ...]) -> pd.DataFrame:
    """Paired differences 'A - B' in the final round and the mean of the last ten: a row for each run, setting, difference and
    trial, the swept flags as columns."""
    rows = []
    for (name, run), difference, (what, measured) in itertools.product(runs.items(), differences, MEASURES.items()):
        shared = {"run": name, "difference": difference, "pair": difference.replace(" - ", "\n- "), "measured": measured}
        for setting, arms in summary(run)["results"].items():
            gain = np.subtract(*(arms[arm][what] for arm in difference.split(" - ")))
            rows.append(flags(setting) | shared | {"gain": gain})
    return pd.DataFrame(rows).explode("gain", ignore_index=True).astype({"gain": float})


def draw(df: pd.DataFrame, **layout) -> sns.FacetGrid:
    """Points of `gain` over `x`, a colour for each measure, in panels by `col`."""
    sns.set_theme(style="ticks", palette="colorblind", rc={"axes.grid": True, "grid.alpha": 0.25, "lines.linewidth": 1.2})
    style = {"dodge": 0.2, "markersize": 4, "linestyle": "none", "errorbar": lambda d: bounds(d.to_numpy())[1:]}
    grid = sns.catplot(df, y="gain", kind="point", err_kws={"linewidth": 1}, height=3, hue="measured", **style, **layout)
    grid.refline(y=0, color="black").set_titles("{col_name}").set_ylabels("paired difference (points)")
    return grid.set_axis_labels("", "paired difference\n(points, 95 %)") if layout["x"] == "pair" else grid


def main(names: list[str]) -> None:
    """Draws the named figures, or all."""
    for name in names or FIGURES:
        runs, differences, layout = FIGURES[name]
        grid = draw(gains(runs, differences), **layout)
        grid.savefig(ROOT / f"{name}.png", dpi=110)
        plt.close(grid.figure)


if __name__ == "__main__":
    main(sys.argv[1:])
