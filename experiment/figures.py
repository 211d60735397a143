"""Figures of a finished command.

A data frame `df` holds the rows of metrics.csv. Every figure shows df.attrs["title"].
df.attrs["methods"] gives a method its colour, the same in all figures.
"""

import functools
import textwrap
from pathlib import Path

import numpy as np
import pandas as pd

from .report import RUN, costs, student

PANELS = 24  # the most in a figure: each takes a second, and a reader's patience
FEW = 5  # a figure of fewer trials shows each of them, and no band
LABELS = {
    "accuracy": "test accuracy in %",
    "final": "final test accuracy in %",
    "gap": "points of accuracy",
    "loss": "test loss in nats",
    "method": "",
    "name": "",
    "own_mean": "mean of all clients, %",
    "own_worst_tenth": "mean of the worst tenth, %",
    "samples": "samples trained on, all clients together",
    "uploads": "uploads: models sent to the server",
}
WIDTH = 7  # inches of every figure, so that 9 points are legible at 700 pixels
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.92",
}
# Both lists avoid colours that colour-blind readers confuse: Okabe and Ito's, and Paul Tol's.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")  # of the first seven methods, the next seven, ..
CLASSES = (
    *("#332288", "#88CCEE", "#44AA99", "#117733", "#999933"),
    *("#DDCC77", "#CC6677", "#882255", "#AA4499", "#BBBBBB"),
)
CLIENTS = 40  # the most in a panel of partition.png


def plot_all(df: pd.DataFrame, folder: Path) -> None:
    """Plots cost.png, accuracy over what it cost; then differences.png and accuracy.png.

    More than 24 settings have summary.png instead.
    """
    if df.setting.nunique() > PANELS:
        plot_summary(df, folder / "summary.png")
        return
    if "uploads" in df:
        panels = [(cost, "accuracy") for cost in costs(df)]
        plot(df, folder / "cost.png", panels, draw_lines, note_on(df, "standard deviation"))
    gaps, first = paired_curves(df)
    if len(gaps):
        draw = functools.partial(draw_lines, band=student, zero=True, prefix="minus ")
        note = f"{first} minus another method, same trial and round"
        note += note_on(gaps, "95 % interval")
        plot(gaps, folder / "differences.png", [("round", "gap")], draw, note)
    curves(df, folder / "accuracy.png", "accuracy")
    if "own_mean" in df:
        own = df.copy()
        own.attrs["title"] += ": accuracy on each client's own mix of labels"
        curves(own, folder / "own_accuracy.png", "own_mean", "own_worst_tenth")


def paired_curves(df: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Returns the rows of `gap`, and the first method's name.

    A gap is the first method's accuracy minus that of `method` in the same trial and round.
    """
    tables = []
    names = {}
    for setting, rows in df.groupby("setting", sort=False):
        first, *others = rows.method.unique()
        accuracy = rows.pivot(index=["trial", "round"], columns="method", values="accuracy")
        for other in others:
            gap = (accuracy[first] - accuracy[other]).dropna().reset_index(name="gap")
            tables.append(gap.assign(setting=setting, method=other))
            names[first] = True
    if not tables:
        return pd.DataFrame(), ""
    gaps = pd.concat(tables, ignore_index=True)
    gaps.attrs = df.attrs | {"methods": [*styles(df)]}
    return gaps, " or ".join(names)


def plot_summary(df: pd.DataFrame, path: Path) -> None:
    """Plots one panel: the last differences of every setting, or the only method's accuracies."""
    rows, first = paired_curves(df)
    if len(rows):
        x = "gap"
        draw = functools.partial(draw_dots, band=student, zero=True)
        note = f"{first} minus another method, after the last round"
        note += note_on(rows, "95 % interval", are_dots=True)
    else:
        rows = df.dropna(subset="accuracy")
        x = "accuracy"
        draw = draw_dots
        note = "after the last round" + note_on(rows, "standard deviation", are_dots=True)
    last = rows.groupby(RUN, sort=False).last().reset_index()
    last.attrs = rows.attrs
    last = last.assign(name=last.setting, setting="-")
    height = min(1 + 0.2 * df.setting.nunique(), 200)  # inches
    plot(last, path, [(x, "name")], draw, note, height)
    print(f"{path.name} shows all settings: they are too many for a panel each")


def curves(df: pd.DataFrame, path: Path, *columns: str, marks="", log="") -> None:
    """Plots columns over rounds: the mean over trials, and each trial or their `spread`.

    marks  a column that is 1 in the rounds to be marked, by a dot for each trial
    log    the column whose axis is logarithmic

    Each setting has a panel for each column, below one another.
    """
    draw = functools.partial(draw_lines, marks=marks, log=log)
    note = note_on(df, "standard deviation")
    if marks in df:
        note += f"\ndots: {marks} rounds of a trial"
    plot(df, path, [("round", column) for column in columns], draw, note)


def dots(df: pd.DataFrame, path: Path, column: str) -> None:
    """Plots each run's value of a column, a line for each method, and the means."""
    note = note_on(df, "standard deviation", are_dots=True)
    plot(df, path, [(column, "method")], draw_dots, note, shared="x")


def plot_partition(counts: dict, folder: Path, title: str) -> None:
    """Writes partition.csv and a figure of it: the samples of each class that every client holds.

    Both show the first trial. The figure has at most 40 clients, evenly spaced by their size.

    counts  {setting: (M, C)}
    """
    tables = {setting: pd.DataFrame(held.T).unstack() for setting, held in counts.items()}
    samples = pd.concat(tables, names=["setting", "client", "class"]).reset_index(name="samples")
    samples = samples.loc[samples.samples > 0, ["client", "class", "samples", "setting"]]
    samples.to_csv(folder / "partition.csv", index=False)
    samples.attrs["title"] = f"{title}, first trial: what each client holds"
    panels = [("clients, largest first", "samples")]
    plot(samples, folder / "partition.png", panels, draw_stacks, shared="")


# ----------------------------------------------------------------------------------------- panels


def plot(
    df: pd.DataFrame, path: Path, panels, draw, note="", height=2.5, shared="xy", edge=0.8
) -> None:
    """Saves a figure: each setting has a panel for each (x, y) of `panels`, below one another.

    draw    draws a panel: draw(axis, rows of a setting, x, y, styles)
    note    a line below the title
    height  inches of a panel
    shared  the axes that a panel's settings have in common
    edge    what ends to the right of this fraction of a panel has its name at the right edge

    A figure of more than 24 panels is not made: a line says so.
    """
    settings = df.setting.unique()
    count = len(settings) * len(panels)
    if count > PANELS:
        print(f"{path.name} is not drawn: it would have {count} panels, more than {PANELS}")
        return
    from matplotlib import pyplot

    names = styles(df)
    longest = max(map(len, names), default=0)
    columns = 1
    if len(settings) > 1 and longest <= 16:  # longer labels leave no room for two panels
        columns = 2
    height = max(height, 0.17 * len(names) + 0.6)
    rows = -(-len(settings) // columns) * len(panels)
    with pyplot.rc_context(STYLE):
        size = (WIDTH, rows * height + 0.6)
        figure, axes = pyplot.subplots(
            rows, columns, figsize=size, squeeze=False, layout="constrained"
        )
        blocks = axes.reshape(-1, len(panels), columns).swapaxes(1, 2).reshape(-1, len(panels))
        for axis in blocks[len(settings) :].flat:
            axis.remove()
        for setting, block in zip(settings, blocks, strict=False):
            of_setting = df[df.setting == setting]
            for axis, first, (x, y) in zip(block, blocks[0], panels, strict=True):
                share(axis, first, shared)
                axis.set_xlabel(LABELS.get(x, x))
                axis.set_ylabel(LABELS.get(y, y))
                draw(axis, of_setting, x, y, names)
            block[0].set_title(textwrap.fill(setting.removesuffix("-"), 90 // columns))
        title = [df.attrs.get("title", ""), *note.splitlines()]
        lines = [textwrap.fill(line, 95) for line in title if line]
        figure.suptitle("\n".join(lines), fontsize=10)
        separate_labels(figure, edge)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def styles(df: pd.DataFrame) -> dict[str, dict]:
    """Returns {method: its colour and dashes}."""
    methods = df.attrs.get("methods")
    if methods is None:
        methods = df.get("method", pd.Series()).unique()
    found = {}
    for i, method in enumerate(methods):
        dashes = DASHES[i // len(COLORS) % len(DASHES)]
        found[method] = {"color": COLORS[i % len(COLORS)], "linestyle": dashes}
    return found


def note_on(df: pd.DataFrame, band: str, are_dots=False) -> str:
    """Returns a line that says how `draw_lines`, or `draw_dots`, shows several trials."""
    trials = df.trial.nunique()
    if trials == 1:
        return ""
    few = "bold: mean; thin: each trial"
    many = f"line: mean; band: {band}"
    if are_dots:
        few = "diamond: mean; dot: a trial"
        many = f"{few}; line: {band}"
    return "\n" + (few if trials < FEW else many)


def share(axis, first, shared: str) -> None:
    """Gives a panel the limits of the first setting's."""
    if axis is first:
        return
    if "x" in shared:
        axis.sharex(first)
    if "y" in shared:
        axis.sharey(first)


def spread(values: pd.Series) -> tuple[float, float]:
    """Returns mean +- one standard deviation, but within the values that are seen."""
    mean = values.mean()
    deviation = values.std()
    return max(mean - deviation, values.min()), min(mean + deviation, values.max())


def draw_lines(
    axis, rows, x, y, styles, band=spread, zero=False, prefix="", marks="", log=""
) -> None:
    """Draws each method's mean over trials, of x and of y after each round, with its name.

    band    the function of the trials' values that returns a band's limits
    zero    whether there is a line where y is 0
    prefix  is written before each name
    marks, log  as in `curves`
    """
    rows = rows.dropna(subset=y)
    few = rows.trial.nunique() < FEW
    methods = rows.method.unique()  # the first one covers the others
    for on_top, method in zip(np.linspace(4, 3, len(methods)), methods, strict=True):
        of_method = rows[rows.method == method]
        style = styles[method]
        color = style["color"]
        rounds = of_method.groupby("round")
        mean = rounds[[x, y]].mean()
        marker = "o" if len(mean) == 1 else ""  # a line of one point is not seen
        axis.plot(mean[x], mean[y], marker=marker, linewidth=2, zorder=on_top, **style)
        trials = of_method.groupby("trial")
        if few and len(trials) > 1:
            for _, trial in trials:
                axis.plot(trial[x], trial[y], marker=marker, linewidth=0.8, alpha=0.45, **style)
        elif len(trials) > 1:
            limits = np.array([band(values) for _, values in rounds[y]])
            axis.fill_between(mean[x], *limits.T, color=color, alpha=0.18, linewidth=0)
        if marks in of_method:
            marked = of_method[of_method[marks] == 1]
            axis.plot(marked[x], marked[y], "o", markersize=3, color=color, zorder=5)
        end = mean.iloc[-1]
        label_end(axis, f"{prefix}{method}", (end[x], end[y]), color)
    if zero:
        axis.axhline(0, color="0.5", linewidth=1, zorder=1)
    if y == log:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
    axis.xaxis.get_major_locator().set_params(integer=True, nbins=6)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.margins(x=0.02)


def label_end(axis, name: str, end, color: str) -> None:
    """Writes a line's name at the right edge. `separate_labels` moves it to its place."""
    leader = {"arrowstyle": "-", "color": "0.75", "shrinkB": 0, "relpos": (0, 0.5)}
    axis.annotate(
        name,
        end,
        (1.02, 0),
        textcoords="axes fraction",
        color=color,
        verticalalignment="center",
        arrowprops=leader,
        annotation_clip=False,
    )


def separate_labels(figure, edge: float) -> None:
    """Moves the names of lines up or down, as little as possible, so that none covers another.

    A line that ends before the fraction `edge` of a panel has its name there.
    """
    from scipy.optimize import isotonic_regression

    figure.draw_without_rendering()  # gives panels their sizes
    for axis in figure.axes:
        if not axis.texts:
            continue
        gap = 1.3 * figure.dpi * STYLE["font.size"] / 72 / axis.bbox.height
        to_fraction = (axis.transData - axis.transAxes).transform
        ends = np.array([to_fraction(label.xy) for label in axis.texts])
        is_at_edge = ends[:, 0] > edge
        for group in (np.flatnonzero(is_at_edge), np.flatnonzero(~is_at_edge)):
            order = group[np.argsort(ends[group, 1], kind="stable")]
            below = gap * np.arange(len(order))
            room = max(0, 1 - below.max(initial=0))
            heights = isotonic_regression(ends[order, 1] - below).x.clip(0, room) + below
            for i, height in zip(order, heights, strict=True):
                x = 1 if is_at_edge[i] else ends[i, 0]
                axis.texts[i].set_position((x + 0.02, height))


def draw_dots(axis, rows, x, y, styles, band=spread, zero=False) -> None:
    """Draws each run's x as a dot in the line of its y, and the mean of each method."""
    rows = rows.dropna(subset=x)
    names = [*rows[y].unique()]
    shown = {}
    for i, name in enumerate(names):
        of_name = rows[rows[y] == name]
        methods = of_name.method.unique()
        for k, method in enumerate(methods):
            values = of_name[of_name.method == method][x]
            height = i + 0.6 * ((k + 0.5) / len(methods) - 0.5)
            color = styles[method]["color"]
            heights = [height] * len(values)
            axis.plot(values, heights, "o", markersize=3.5, alpha=0.5, color=color)
            [shown[method]] = axis.plot(values.mean(), height, "D", markersize=6, color=color)
            if len(values) >= FEW:
                axis.plot(band(values), [height, height], linewidth=2, color=color)
    if zero:
        axis.axvline(0, color="0.5", linewidth=1, zorder=1)
    axis.set_yticks(range(len(names)), names)
    if {*names} != {*shown}:  # the names are settings
        axis.legend(
            shown.values(),
            shown,
            loc="lower center",
            bbox_to_anchor=(0.5, 1),
            ncols=3,
            frameon=False,
        )
    axis.set_ylim(len(names) - 0.5, -0.5)


def draw_stacks(axis, rows, x, y, styles) -> None:
    """Draws a bar for each client, of its samples by class; at most 40, evenly spaced by size."""
    held = rows.pivot(index="client", columns="class", values=y).fillna(0)
    largest_first = held.sum(axis=1).sort_values(ascending=False, kind="stable").index
    shown = np.arange(len(held))
    if len(held) > CLIENTS:
        shown = np.linspace(0, len(held) - 1, CLIENTS).round().astype(int)
        axis.set_xlabel(f"{x} ({CLIENTS} of {len(held):,}, evenly spaced)")
    clients = largest_first[shown]
    places = range(len(clients))
    axis.set_ylabel("training samples")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.set_xticks([])
    if len(clients) <= 20:
        axis.set_xticks(places, clients)
    count = held.columns.max() + 1
    colors = class_colors(axis, count)
    bottom = np.zeros(len(clients))
    for label, samples in held.loc[clients].items():
        axis.bar(places, samples, 0.9, bottom, color=colors[label], label=str(label))
        bottom += samples.to_numpy()
    if count <= len(CLASSES):
        axis.legend(
            title="class", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, reverse=True
        )


def class_colors(axis, count: int):
    """Returns each class's colour. More than ten have a scale next to the panel."""
    if count <= len(CLASSES):
        return CLASSES
    from matplotlib import cm, colors

    scale = cm.ScalarMappable(colors.Normalize(0, count - 1), "viridis")
    axis.figure.colorbar(scale, ax=axis, label="class", format="{x:.0f}")
    return scale.to_rgba(range(count))
