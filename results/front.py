"""python -m results.front

Plots results/front.png, the figure of the front page, from differences.csv and claims.csv. A blue
dot is what an algorithm gains over FedAvg: the mean over n paired trials, with its 95 % interval.
An orange dot is its gain over a control. A dot is hollow if the difference is undecided. A diamond
is the gain in the paper, grey where its data, model or clients are others than ours.
"""

import argparse
import re
from dataclasses import dataclass

import matplotlib
import pandas as pd

from results.evidence import FOLDER, UNDECIDED
from results.tables import ELSEWHERE

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  after the backend is chosen

TITLE = "Gains are smaller than published, and two of nine beat a control"
BLUE = "#1f5fa8"
ORANGE = "#c85a00"
GREY = "0.65"
DIFFERENCES = pd.read_csv(FOLDER / "differences.csv")
CLAIMS = pd.read_csv(FOLDER / "claims.csv", index_col="claim", keep_default_na=False)
LIMITS = (-4.5, 12)


@dataclass
class Row:
    """An algorithm on one data set: a claim, and how the names of its differences begin."""

    name: str
    data: str
    gain: tuple[str, str]  # on ordinary training
    control: tuple[str, str]  # on what else may cause the gain
    control_name: str
    of_paper: str  # the paper's claim; its scale says whether the paper's setting is another


ROWS = [
    Row(
        "Easy samples first",
        "CIFAR-10, IID",
        ("A15", "IID"),
        ("A1", "IID: curriculum"),
        "samples in random order",
        "A15",
    ),
    Row(
        "Easy samples first",
        "CIFAR-10, alpha 0.05, clients of other sizes",
        ("A6", "FedAvg, Dir(0.05), new"),
        ("E5", "FedAvg, Dir(0.05), 100"),
        "the same batches, shuffled",
        "A6",
    ),
    Row(
        "Easy samples first",
        "Fashion-MNIST, IID (no published number)",
        ("E18", "IID, 100 rounds"),
        ("E9", "IID, 100 rounds"),
        "the same batches, shuffled",
        "",
    ),
    Row(
        "Easy clients first",
        "CIFAR-10, IID",
        ("A10", "IID: client"),
        ("A10b", "IID: client"),
        "clients in random order",
        "A10",
    ),
    Row(
        "Easy clients and easy samples",
        "CIFAR-10, alpha 0.2, clients of other sizes",
        ("A12", "both − vanilla"),
        ("A12", "both − client"),
        "easy clients alone",
        "A12",
    ),
    Row(
        "FedCL, critical periods",
        "CIFAR-10, alpha 0.1, LeNet-5, 200 rounds",
        ("E34", "CIFAR-10, decay 0.9:"),
        ("E38", "CIFAR-10, decay 0.9:"),
        "FedAvg, its uploads, early",
        "C1",
    ),
    Row(
        "FedCL, critical periods",
        "CIFAR-10, alpha 0.1, AlexNet, 60 rounds",
        ("E36", "CIFAR-10, AlexNet"),
        ("E43", "CIFAR-10, AlexNet"),
        "FedAvg, its uploads, early",
        "C1",
    ),
    Row(
        "FedCL, synchronised phases",
        "MNIST, alpha 0.1",
        ("E20", "alpha 0.1"),
        ("E1", "alpha 0.1"),
        "FedAvg at 2.7 times the learning rate",
        "B1",
    ),
    Row(
        "FedAC, fuzzy clusters",
        "Fashion-MNIST, alpha 0.5",
        ("E15", "FedAC"),
        ("E8", "FedAC"),
        "random groups of the same sizes",
        "D1",
    ),
]


def find(claim: str, start: str) -> pd.Series:
    """Returns the one row of differences.csv of this claim that begins so."""
    is_found = (DIFFERENCES.claim == claim) & DIFFERENCES.difference.str.startswith(start)
    [row] = DIFFERENCES[is_found].to_dict("records")
    return pd.Series(row)


def draw_interval(axis, y: float, found: pd.Series, color: str) -> None:
    """Plots a dot with its interval, and an arrow where the interval is cut."""
    ends = [found.low, found.high]
    axis.plot(ends, [y, y], color=color, linewidth=3, solid_capstyle="butt")
    fill = "w" if found.direction == UNDECIDED else color
    axis.plot(found["mean"], y, "o", color=color, markersize=7, markerfacecolor=fill)
    for end, marker in zip(ends, "<>", strict=True):
        if not LIMITS[0] <= end <= LIMITS[1]:
            edge = LIMITS[0] if marker == "<" else LIMITS[1]
            axis.plot(edge, y, marker, color=color, clip_on=False)


def published(row: Row, found: pd.Series) -> float:
    """Returns the paper's gain, or the first number of the claim's text; NaN if there is none."""
    if row.of_paper == "" or found.paper == found.paper:  # no claim, or a number
        return found.paper
    return float(re.search(r"[-+]?\d+(\.\d+)?", CLAIMS.paper[row.of_paper])[0])


def draw_row(axis, y: float, row: Row) -> None:
    """Plots the gain above, the gain over the control below, and their names on the left."""
    gain = find(*row.gain)
    control = find(*row.control)
    draw_interval(axis, y - 0.12, gain, BLUE)
    draw_interval(axis, y + 0.24, control, ORANGE)
    is_other = row.of_paper and CLAIMS.scale[row.of_paper] in ELSEWHERE
    color = GREY if is_other else "k"
    of_paper = published(row, gain)
    axis.plot(of_paper, y - 0.36, "D", color=color, markersize=6.5)
    if CLAIMS.paper.get(row.of_paper, "").startswith("up to"):
        axis.text(
            of_paper - 0.4, y - 0.36, "up to", fontsize=8, color="0.4", ha="right", va="center"
        )
    place = {"transform": axis.get_yaxis_transform(), "va": "center"}
    axis.text(-0.86, y - 0.27, row.name, weight="bold", fontsize=10.5, **place)
    axis.text(-0.86, y + 0.02, row.data, fontsize=9, color="0.25", **place)
    axis.text(-0.86, y + 0.29, f"control: {row.control_name}", fontsize=9, color=ORANGE, **place)
    axis.text(1.02, y - 0.12, f"n = {gain.trials}", fontsize=9, color=BLUE, **place)
    axis.text(1.02, y + 0.24, f"n = {control.trials}", fontsize=9, color=ORANGE, **place)


def main() -> None:
    figure, axis = plt.subplots(figsize=(7.4, 7.4))
    axis.axvline(0, color="0.4", linewidth=1)
    for y, row in enumerate(ROWS):
        axis.axhspan(y - 0.5, y + 0.5, color="0.96" if y % 2 == 0 else "w", zorder=0)
        draw_row(axis, y, row)
    axis.plot([], [], "o-", color=BLUE, linewidth=3, label="gain over FedAvg")
    axis.plot([], [], "o-", color=ORANGE, linewidth=3, label="gain over a control")
    axis.plot([], [], "kD", label="published")
    axis.plot([], [], "D", color=GREY, label="published, other data, model or clients")
    axis.plot([], [], "ko", markerfacecolor="w", label="hollow: undecided")
    figure.legend(ncols=3, fontsize=9, frameon=False, loc=(0.005, 0.905), columnspacing=1.5)
    axis.set(xlim=LIMITS, ylim=(len(ROWS) - 0.5, -0.5), xticks=range(-4, 13, 2), yticks=[])
    axis.set_xlabel("worse  ←  percentage points of accuracy  →  better", fontsize=10)
    axis.spines[["left", "right", "top"]].set_visible(False)
    figure.suptitle(TITLE, x=0.015, ha="left", weight="bold", fontsize=12)
    figure.subplots_adjust(left=0.43, right=0.925, top=0.9, bottom=0.075)
    figure.savefig(FOLDER / "front.png", dpi=150, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # it has no options
    main()
