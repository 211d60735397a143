"""python -m results.front

Plots results/front.png, the figure of the front page, from the evidence. A blue dot is what an
algorithm gains over FedAvg: the mean over n paired trials, with its 95 % interval. An orange dot is
its gain over a control, by the same measure of the same setting. A dot is filled if the difference
is decided as for a claim's label (tables.py), and hollow if not. A diamond is the gain in the
paper, with a 95 % interval by Welch where the paper has deviations. It is grey where data, model or
clients are others than the paper's.
"""

import argparse
import re
from dataclasses import dataclass

import matplotlib
import numpy as np
from scipy import stats

from results import tables
from results.evidence import FOLDER, UNDECIDED

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  after the backend is chosen

BLUE = "#1f5fa8"
ORANGE = "#c85a00"
GREY = "0.65"
LIMITS = (-5, 12)
DECIDED = "filled: decided, a gain by p < 0.05, a loss after Holm's correction; hollow: undecided"


@dataclass
class Row:
    """An algorithm on one data set. Each comparison is CLAIM: how its name begins (tables.py)."""

    name: str
    data: str
    gain: str  # on ordinary training
    controls: dict[str, str]  # what else may cause the gain -> the gain over it
    of_paper: str  # the paper's claim; its scale says whether the paper's setting is another


SAMPLES = "Easy samples first"
CLIENTS = "Easy clients first"
PERIODS = "FedCL: more clients in critical rounds"
PHASES = "FedCL: synchronised phases"
GROUPS = "FedAC: samples in small clusters weigh less"
ROWS = [
    Row(
        SAMPLES,
        "CIFAR-10, IID",
        "A15: IID",
        {"random order (the paper's control)": "A1: IID: curriculum"},
        "A15",
    ),
    Row(
        SAMPLES,
        "CIFAR-10, two classes a client",
        "A15: two",
        {"random order (the paper's control)": "A1b: two classes: curriculum"},
        "A15",
    ),
    Row(
        SAMPLES,
        "CIFAR-10, alpha 0.05",
        "A6: FedAvg, Dir(0.05)",
        {
            "random order (the paper's control)": "E44: FedAvg, Dir(0.05)",
            "the same batches, shuffled": "E5: FedAvg, Dir(0.05), 100 rounds, authors",
        },
        "A6",
    ),
    Row(
        SAMPLES,
        "CIFAR-10, alpha 0.9",
        "A6: FedAvg, Dir(0.9)",
        {"the same batches, shuffled": "E5: FedAvg, Dir(0.9), 100 rounds, authors"},
        "A6",
    ),
    Row(
        SAMPLES,
        "Fashion-MNIST, IID (none published)",
        "E18: IID, 100 rounds",
        {"the same batches, shuffled": "E9: IID, 100 rounds"},
        "",
    ),
    Row(
        CLIENTS,
        "CIFAR-10, alpha 0.2",
        "A10: Dir(0.2): client curriculum − vanilla",
        {"clients in random order": "A10: Dir(0.2): client curriculum − random"},
        "A10",
    ),
    Row(
        CLIENTS,
        "with easy samples, CIFAR-10, alpha 0.2",
        "A12: both − vanilla",
        {"easy clients alone": "A12: both − client", "easy samples alone": "A12: both − data"},
        "A12",
    ),
    Row(
        PERIODS,
        "CIFAR-10, alpha 0.1, AlexNet at 29 %",
        "E36: CIFAR-10, AlexNet",
        {"FedAvg with FedCL's uploads, early": "E43: CIFAR-10, AlexNet"},
        "C1",
    ),
    Row(
        PERIODS,
        "CIFAR-10, alpha 0.1, LeNet-5",
        "E34: CIFAR-10, decay 0.9:",
        {"FedAvg with FedCL's uploads, early": "E38: CIFAR-10, decay 0.9:"},
        "C1",
    ),
    Row(
        PHASES,
        "MNIST, alpha 0.1",
        "E20: alpha 0.1",
        {"FedAvg at 2.7 times the rate": "E1: alpha 0.1"},
        "B1",
    ),
    Row(
        PHASES,
        "MNIST, alpha 1",
        "E20: alpha 1",
        {"FedAvg at 2.7 times the rate": "E1: alpha 1"},
        "B1",
    ),
    Row(
        GROUPS,
        "Fashion-MNIST, alpha 0.5",
        "E15: FedAC",
        {"random groups of the same sizes": "E8: FedAC"},
        "D1",
    ),
]


def title() -> str:
    """Says how many gains reach the published one, and how the methods do against controls."""
    reached = 0
    signs = []
    for row in ROWS:
        gain = tables.find(row.gain)
        if row.of_paper:
            reached += gain.interval.mean >= published(row.of_paper, gain)
        for place in row.controls.values():
            control = tables.find(place)
            is_decided = control.direction != UNDECIDED
            signs.append(np.sign(control.interval.mean) * is_decided)
    ahead, behind = signs.count(1), signs.count(-1)
    over = f"{ahead} gains, {behind} losses, {len(signs) - ahead - behind} undecided"
    gains = "All gains over FedAvg are smaller than published"
    if reached:
        gains = f"{reached} gains over FedAvg reach the published one"
    return f"{gains}. Over controls: {over}"


def published(claim: str, found) -> float:
    """Returns the paper's gain, or the first number of the claim's text; NaN if there is none."""
    if found.paper or not claim:
        return float(found.paper or "nan")
    return float(re.search(r"[-+]?\d+(\.\d+)?", tables.CLAIMS.paper[claim])[0])


def half_width(found) -> float:
    """Returns half of the 95 % interval of a published difference; 0 without deviations."""
    errors, trials = tables.paper_errors(found)
    variances = errors**2
    if not found.paper or not variances.any():
        return 0.0
    df = variances.sum() ** 2 / (variances**2 / (trials - 1)).sum()
    return float(stats.t(df).ppf(0.975) * np.sqrt(variances.sum()))


def draw_interval(axis, y: float, ends: tuple[float, float], color: str, width: float) -> None:
    """Plots a line, with an arrow where it is cut."""
    axis.plot(ends, [y, y], color=color, linewidth=width, solid_capstyle="butt")
    for end, marker in zip(ends, "<>", strict=True):
        if not LIMITS[0] <= end <= LIMITS[1]:
            edge = LIMITS[0] if marker == "<" else LIMITS[1]
            axis.plot(edge, y, marker, color=color, clip_on=False)


def draw_line(axis, y: float, label: str, found, color: str) -> None:
    """Plots a comparison, with its name on the left and n on the right."""
    draw_interval(axis, y, (found.interval.low, found.interval.high), color, 3)
    fill = "w" if found.direction == UNDECIDED else color
    axis.plot(found.interval.mean, y, "o", color=color, markersize=7, markerfacecolor=fill)
    place = {"transform": axis.get_yaxis_transform(), "va": "center", "color": color}
    axis.text(-0.84, y, label, fontsize=10, **place)
    axis.text(1.02, y, f"n = {found.interval.n}", fontsize=10, **place)


def draw_published(axis, y: float, claim: str, found) -> None:
    """Plots the diamond above a comparison. The claim's scale gives the colour."""
    of_paper = published(claim, found)
    scale = tables.CLAIMS.scale.get(claim, "")
    color = GREY if scale in tables.ELSEWHERE else "k"
    half = half_width(found)
    if half:
        draw_interval(axis, y, (of_paper - half, of_paper + half), color, 1)
    axis.plot(of_paper, y, "D", color=color, markersize=6)
    if tables.CLAIMS.paper.get(claim, "").startswith("up to"):
        axis.text(of_paper - 0.4, y, "up to", fontsize=9, color="0.4", ha="right", va="center")


def draw(axis) -> float:
    """Plots all rows from the top, and returns where they end."""
    y = 0.0
    name = ""
    for row in ROWS:
        if row.name != name:
            name = row.name
            place = {"transform": axis.get_yaxis_transform(), "va": "center"}
            axis.text(-0.86, y, name, weight="bold", fontsize=11, **place)
            axis.axhline(y - 0.7, xmin=-0.86, color="0.85", linewidth=1, clip_on=False)
            y += 1.1
        gain = tables.find(row.gain)
        draw_line(axis, y, row.data, gain, BLUE)
        draw_published(axis, y - 0.42, row.of_paper, gain)
        for control_name, place in row.controls.items():
            control = tables.find(place)
            y += 1
            draw_line(axis, y, f"   over {control_name}", control, ORANGE)
            if control.paper:
                draw_published(axis, y - 0.42, row.of_paper, control)
        y += 1.3
    return y


def main() -> None:
    figure, axis = plt.subplots(figsize=(7.4, 8.9))
    axis.axvline(0, color="0.4", linewidth=1)
    end = draw(axis)
    axis.plot([], [], "o-", color=BLUE, linewidth=3, label="gain over FedAvg")
    axis.plot([], [], "o-", color=ORANGE, linewidth=3, label="gain over a control")
    axis.plot([], [], "kD", label="published")
    axis.plot([], [], "D", color=GREY, label="published, other data, model or clients")
    figure.legend(ncols=2, fontsize=10, frameon=False, loc=(0.005, 0.918), columnspacing=1.5)
    figure.text(0.017, 0.905, DECIDED, fontsize=9, color="0.25")
    axis.set(xlim=LIMITS, ylim=(end - 0.6, -0.7), xticks=range(-4, 13, 2), yticks=[])
    axis.set_xlabel("worse  ←  percentage points of accuracy  →  better", fontsize=10)
    axis.spines[["left", "right", "top"]].set_visible(False)
    figure.suptitle(title(), x=0.015, ha="left", y=0.988, weight="bold", fontsize=9.6)
    figure.subplots_adjust(left=0.43, right=0.915, top=0.893, bottom=0.06)
    figure.savefig(FOLDER / "front.png", dpi=150, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # it has no options
    main()
