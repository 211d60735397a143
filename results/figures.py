"""python -m results.figures

Plots the figure of every script's page from the evidence. Comparisons are means over trials with
95 % intervals, in points of accuracy, next to the published numbers. Colours say which method is
ahead. If there are many comparisons, a claim that is not at the paper's setting has only one: the
one in the table of claims.md. fedcl_fgn's figure shows uploads and clients, too. It also plots
clock.png, the answers of clock.md, and selection.png, the gains of selection.md.
"""

import argparse

import matplotlib
import numpy as np

from results import clock_answers, selection_answers, tables
from results.evidence import FOLDER, UNDECIDED, Interval

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  after the backend is chosen

ACCURACY = ("final", "last10", "late")
PAPER = "the paper's number"
BLUE = "#1f5fa8"
ORANGE = "#c85a00"
GREY = "0.55"
COLORS = {"the first is ahead": BLUE, "the second is ahead": ORANGE}
COLORS |= {"undecided": GREY}
PANELS = {
    "paper": "The paper's claims, its setting",
    "other": "The paper's claims, other clients than the paper's",
    "reduced": "The paper's claims, a smaller setting",
    "own": "Our questions",
}
LEGEND = {"loc": "upper left", "ncols": 4, "fontsize": 9, "frameon": False}
MANY = 40
SCRIPTS = ("fedavg_curriculum", "client_curriculum", "fedcl_gmm_sync", "fedac_art")
TOO_LARGE = ("D1", "fedavg − solo")  # its 21 points would flatten the other rows
AT_EQUAL_UPLOADS = ("E38", "E43", "E3", "E14")


def draw(script: str) -> None:
    """Plots results/SCRIPT/differences.png: a panel for the claims at each scale."""
    about = tables.of_script(script)
    panels = panels_of(about)
    if sum(map(len, panels.values())) > MANY:
        panels = panels_of(about, is_short=True)
    heights = [len(rows) + 1 for rows in panels.values()]
    figure, axes = plt.subplots(
        len(panels),
        figsize=(10, 0.27 * sum(heights) + 1.2),
        height_ratios=heights,
        sharex=True,
        squeeze=False,
    )
    low, high = limits(panels.values())
    axes[-1, 0].set_xlim(low, high)
    for axis, (title, rows) in zip(axes[:, 0], panels.items(), strict=True):
        draw_panel(axis, rows, title)
    axes[-1, 0].set_xlabel("first − second, points of accuracy, 95 %")
    entries = {}  # each label once
    for axis in axes[:, 0]:
        handles, labels = axis.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    figure.legend(entries.values(), entries, **LEGEND)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.35 / figure.get_figheight()))
    figure.savefig(FOLDER / script / "differences.png", dpi=90)
    plt.close(figure)


def panels_of(about, is_short=False) -> dict[str, list]:
    """{title: rows} for each scale of the claims `about`; in short, a row of a claim."""
    panels = {}
    for scale, title in PANELS.items():
        claims = about.index[about.scale == scale]
        choose = tables.family
        if is_short and scale not in ("paper", "other"):
            choose = tables.telling
            title += " (one row each)"
        rows = rows_of(claims, choose)
        if rows:
            panels[title] = rows
    return panels


def limits(panels: list) -> tuple[float, float]:
    """Returns limits for all means and the paper's numbers. A very wide interval is cut."""
    means = [0.0]
    for rows in panels:
        for row in rows:
            means += [row.interval.mean, float(row.paper or "nan")]
    low = np.nanmin(means)
    high = np.nanmax(means)
    margin = (high - low) / 3
    return low - margin, high + margin


def rows_of(claims, choose) -> list:
    """Returns the comparisons that choose(claim) gives, if they are about accuracy."""
    rows = []
    for claim in claims:
        for row in choose(claim).itertuples():
            if row.measure in ACCURACY and (claim, row.what) != TOO_LARGE:
                rows.append(row)
    return rows


def color_of(found: Interval, is_decided: bool) -> str:
    """Returns the colour of the method that is ahead."""
    if not is_decided:
        return GREY
    return BLUE if found.mean > 0 else ORANGE


def name(row) -> str:
    """Says what was compared, the first words of the claim's setting, and the trials."""
    setting = tables.CLAIMS.setting[row.claim].partition(",")[0]
    return f"{row.claim}  {row.what} ({setting}, n = {row.interval.n})"


def draw_panel(axis, rows: list, title: str) -> None:
    axis.axvline(0, color="0.6", linewidth=1)
    left, right = axis.get_xlim()
    for label, color in COLORS.items():
        axis.plot([], [], "o-", color=color, label=label)
    for height, row in enumerate(rows):
        color = color_of(row.interval, row.direction != UNDECIDED)
        draw_interval(axis, height, row.interval, color)
        if row.interval.low < left:
            axis.plot(left, height, "<", color=color, clip_on=False)
        if row.interval.high > right:
            axis.plot(right, height, ">", color=color, clip_on=False)
        if row.paper:
            axis.plot(float(row.paper), height - 0.25, "kD", markersize=5, label=PAPER)
    label_rows(axis, title, [name(row) for row in rows])


def draw_interval(axis, height: float, found: Interval, color: str) -> None:
    axis.plot([found.low, found.high], [height, height], color=color, linewidth=2)
    axis.plot(found.mean, height, "o", color=color)


def label_rows(axis, title: str, labels: list[str]) -> None:
    """The first row is at the top."""
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.grid(axis="x", color="0.9")
    axis.set_title(title, loc="left", fontsize=9)


def draw_critical_periods() -> None:
    """Plots fedcl_fgn's figure: FedCL against FedAvg, in as many rounds and at equal uploads."""
    names = [name for name in tables.DECAY_RUNS if ", 36," not in name]  # that one was cut
    found = [tables.of_decay(name) for name in names]
    labels = []
    for name, (gain, *_) in zip(names, found, strict=True):
        data, model, rounds, decay = name.split(", ")
        labels.append(f"{data}, {model}, {rounds} rounds, decay {decay}, n = {gain.n}")
    at_equal = at_equal_uploads()
    figure = plt.figure(figsize=(10, 0.27 * (len(names) + len(at_equal)) + 2.2))
    heights = (len(names) + 1, len(at_equal) + 1)
    grid = figure.add_gridspec(2, 3, height_ratios=heights, hspace=0.4)
    panels = (
        ("FedCL − FedAvg,\npoints of accuracy", 0),
        ("FedCL's uploads /\nFedAvg's", 1),
        ("FedCL's clients a round,\nfirst third − last third", 0),
    )
    for place, (title, no_difference) in enumerate(panels):
        axis = figure.add_subplot(grid[0, place])
        axis.axvline(no_difference, color="0.6", linewidth=1)
        for height, (gain, *others) in enumerate(found):
            if place == 0:
                draw_interval(axis, height, gain, color_of(gain, gain.p < 0.05))
            else:
                draw_interval(axis, height, others[place - 1], "0.2")
        label_rows(axis, title, labels if place == 0 else [""] * len(names))
    axis = figure.add_subplot(grid[1, :])
    axis.axvline(0, color="0.6", linewidth=1)
    for height, (gain, is_decided) in enumerate(at_equal.values()):
        draw_interval(axis, height, gain, color_of(gain, is_decided))
    label_rows(axis, "At equal uploads: FedCL − another method, points of accuracy", [*at_equal])
    for label, color in (("FedCL is ahead", BLUE), ("FedCL is behind", ORANGE)):
        axis.plot([], [], "o-", color=color, label=label)
    axis.plot([], [], "o-", color=GREY, label="undecided")
    figure.legend(*axis.get_legend_handles_labels(), **LEGEND)
    above = 0.85 / figure.get_figheight()
    figure.subplots_adjust(left=0.43, right=0.98, top=1 - above, bottom=0.05)
    figure.savefig(FOLDER / "fedcl_fgn" / "differences.png", dpi=90)
    plt.close(figure)


def at_equal_uploads() -> dict[str, tuple[Interval, bool]]:
    """Returns {name: FedCL's gain, whether it is decided}; in E14 FedCL comes last."""
    rows = {}
    for row in rows_of(AT_EQUAL_UPLOADS, tables.family):
        gain = row.interval
        setting, _, what = row.what.partition(": ")
        other = what.removeprefix("FedCL − ").removesuffix(" − FedCL")
        other = other.replace("constant", "constant number of clients")
        if what.endswith("FedCL"):
            gain = Interval(-gain.mean, -gain.high, -gain.low, gain.p, gain.n)
        rows[f"{other}: {setting}, n = {gain.n}"] = gain, row.direction != UNDECIDED
    return rows


def draw_clock() -> None:
    """Plots results/clock.png: the answers, a panel each."""
    names = (
        "(a) seconds to FedAvg's accuracy, FedCL / FedAvg",
        "(b) points of waiting, minus no freezing",
        "(b) points of accuracy, minus no freezing",
        "(c) points of accuracy at equal time, selection by size minus others",
    )
    ratio, waiting, accuracy, lead = panels = [{}, {}, {}, {}]
    for data, spread, found, _ in clock_answers.doubling():
        ratio[f"{data}, spread {spread}"] = found
    for data, spread, method, _, waits, ends in clock_answers.phases():
        waiting[f"{data}, spread {spread}, {method}"] = waits
        accuracy[f"{data}, {method}"] = ends  # at either spread
    for data, spread, method, found in clock_answers.draws():
        lead[f"{data}, spread {spread}, {method}"] = found

    heights = [len(panel) + 1 for panel in panels]
    figure, axes = plt.subplots(4, figsize=(9, 9), height_ratios=heights)
    for axis, title, panel in zip(axes, names, panels, strict=True):
        no_difference = 1 if panel is ratio else 0
        axis.axvline(no_difference, color="0.6", linewidth=1)
        for height, found in enumerate(panel.values()):
            color = "0.5" if found.low <= no_difference <= found.high else "C0"
            draw_interval(axis, height, found, color)
        label_rows(axis, title, [f"{label}, n = {found.n}" for label, found in panel.items()])
    axes[-1].set_xlabel("mean, 95 % interval; grey: contains no difference")
    figure.tight_layout()
    figure.savefig(FOLDER / "clock.png", dpi=100)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # it has no options
    for script in SCRIPTS:
        draw(script)
    draw_critical_periods()
    draw_clock()
    selection_answers.plot(selection_answers.published())
