"""python -m results.front

Draws front.png, the figure of the front page, from differences.csv. Each row has two differences of
accuracy in the same trials: the algorithm minus FedAvg, and minus a control. A point is a mean, a
bar its 95 % interval.
"""

import re
from dataclasses import dataclass

import matplotlib
import pandas as pd

from results.evidence import FOLDER

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  after the backend is chosen

TITLE = "Gains are smaller than published; against a control little is left"
BLUE = "#1f5fa8"
ORANGE = "#d96f00"
REACH = 12  # points to each side


@dataclass
class Row:
    """gain, control: the claim and the difference of a line of differences.csv."""

    name: str
    setting: str
    gain: tuple[str, str]
    control: tuple[str, str]
    control_name: str
    published: float | None = None
    is_larger: bool = False  # whether the paper's setting is larger than ours


ROWS = [
    Row(
        "Easy samples first",
        "CIFAR-10, alpha 0.05",
        ("A6", "FedAvg, Dir(0.05), new trials: curriculum − vanilla"),
        (
            "E5",
            "FedAvg, Dir(0.05), 100 rounds of 10 epochs, new trials: curriculum − shuffled (order)",
        ),
        "its batches, shuffled",
        6.8,
    ),
    Row(
        "Easy samples first",
        "Fashion-MNIST, IID",
        ("E18", "IID: curriculum − vanilla"),
        ("E9", "IID: curriculum − shuffled (order)"),
        "its batches, shuffled",
    ),
    Row(
        "Easy clients first",
        "CIFAR-10, alpha 0.2",
        ("A10", "Dir(0.2): client curriculum − vanilla"),
        ("A10", "Dir(0.2): client curriculum − random client order"),
        "a random order",
        5.7,
    ),
    Row(
        "FedCL, critical periods",
        "Fashion-MNIST, alpha 0.1",
        ("C1", "Fashion-MNIST, alpha 0.1: FedCL − FedAvg"),
        ("E3", "Fashion-MNIST: FedCL − constant"),
        "FedAvg, same uploads",
        11,
        True,
    ),
    Row(
        "FedCL, multi-phase",
        "MNIST, alpha 0.1",
        ("E20", "alpha 0.1: FedCL − FedAvg"),
        ("E1", "alpha 0.1: FedCL − FedAvg at e times its eta"),
        "FedAvg, 2.7 × learning rate",
        4.9,
    ),
    Row(
        "FedAC",
        "Fashion-MNIST, alpha 0.5",
        ("E15", "FedAC − FedAvg"),
        ("E8", "FedAC − random groups"),
        "random groups",
        1.5,
        True,
    ),
]


def read_differences() -> pd.DataFrame:
    """differences.csv by claim and difference, .5 written 0.5."""
    table = pd.read_csv(FOLDER / "differences.csv")
    table["difference"] = [re.sub(r"(?<!\d)\.(?=\d)", "0.", text) for text in table.difference]
    return table.set_index(["claim", "difference"])


def draw_interval(axis, y: float, found, color: str) -> None:
    axis.plot([found.low, found.high], [y, y], color=color, linewidth=3, solid_capstyle="butt")
    axis.plot(found["mean"], y, "o", color=color, markersize=7)
    axis.text(REACH + 0.6, y, f"n = {found.trials}", va="center", fontsize=9, color="0.3")


def draw_row(axis, y: float, row: Row, table: pd.DataFrame) -> None:
    below = y + 0.36
    control = table.loc[row.control]
    axis.text(-REACH - 13.5, y, row.name, va="center", fontsize=11, weight="bold")
    axis.text(-REACH - 13.5, below, row.setting, va="center", fontsize=9.5, color="0.3")
    draw_interval(axis, y, table.loc[row.gain], BLUE)
    draw_interval(axis, below, control, ORANGE)
    place = {"x": min(control.low, 0) - 0.5, "y": below, "ha": "right", "va": "center"}
    axis.text(s=f"minus {row.control_name}", color=ORANGE, fontsize=9, **place)
    if row.published is not None:
        fill = "w" if row.is_larger else "k"
        axis.plot(row.published, y - 0.2, "D", color="k", markerfacecolor=fill, markersize=6)


def main() -> None:
    table = read_differences()
    figure, axis = plt.subplots(figsize=(7.4, 5.2))
    axis.axvline(0, color="0.3", linewidth=1)
    for y, row in enumerate(ROWS):
        draw_row(axis, y, row, table)
    axis.plot([], [], "o-", color=BLUE, linewidth=3, label="minus FedAvg")
    axis.plot([], [], "o-", color=ORANGE, linewidth=3, label="minus a control")
    axis.plot([], [], "kD", markersize=6, label="published")
    axis.plot([], [], "kD", markersize=6, markerfacecolor="w", label="published, larger setting")
    figure.suptitle(TITLE, x=0.02, ha="left", fontsize=12.5, weight="bold")
    figure.legend(ncols=4, fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(0.01, 0.94))
    axis.set(xlim=(-REACH, REACH), ylim=(len(ROWS) - 0.3, -0.6), yticks=[])
    axis.set_xlabel("worse  ←  difference in test accuracy, points  →  better", fontsize=10)
    axis.spines[["left", "right", "top"]].set_visible(False)
    figure.subplots_adjust(left=0.36, right=0.91, top=0.88, bottom=0.1)
    figure.savefig(FOLDER / "front.png", dpi=160)


if __name__ == "__main__":
    main()
