"""The table of verdicts, and what `python -m theory.NAME` prints and plots for one statement.

A ratio is bound / measured. If it is 1, the bound is attained. Below 1 the statement is violated. A
large ratio means a true bound of little use. 'vacuous' is true but says nothing. 'ours' is not in
the paper. In the figures black is measured, red is the paper's statement, blue is corrected by the
paper's lemmas, and green is sharp.
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np

from theory.functions import require

OUT = Path("runs/theory")
SLACK = 1 + 1e-12  # so that a step may sit exactly on its bound
ZERO = 1e-25  # a second moment below this is rounding; no bound is compared with it
LINE = (
    "{statement:44}{printed:>9}{printed_ratio:>10}"
    "{corrected:>11}{corrected_ratio:>7}{sharp_ratio:>7}  {note}"
)
HEADER = "statement".ljust(44) + "  printed     ratio  corrected  ratio  sharp  note"


def verdict(found):
    """'holds' for True or a ratio of at least 1 up to rounding, else 'violated'. Words stay."""
    if found is None or isinstance(found, str):
        return found
    return "holds" if found >= 1 - 1e-9 else "violated"


def number(found):
    """The ratio as a float, or None for a verdict in words."""
    if found is None or isinstance(found, str):
        return None
    return float(found)


def row(statement, documented, printed, corrected=None, sharp=None, note="", vacuous=False):
    """Return a row of the table. Each form has its worst ratio, or a verdict in words.

    documented: the verdict in README.md on the paper's form.
    vacuous: whether the paper's form, if it is true, says nothing.
    """
    label = verdict(printed)
    if vacuous and label == "holds":
        label = "vacuous"
    fixed = verdict(corrected)
    if sharp is not None and fixed != "violated":
        fixed = verdict(sharp)
    return {
        "statement": statement,
        "documented": documented,
        "printed": label,
        "printed_ratio": number(printed),
        "corrected": fixed,
        "corrected_ratio": number(corrected),
        "sharp_ratio": number(sharp),
        "note": note,
    }


def worst(bound, measured):
    """The least bound / measured, or inf if nothing was measured. ValueError for NaN."""
    bound, measured = np.broadcast_arrays(bound, measured)
    require(~np.isnan(bound + measured), "no NaN among the bounds or the measurements")
    some = measured > ZERO
    return np.min(bound[some] / measured[some], initial=np.inf)


def listed(numbers, digits=2):
    """The numbers as text, with commas between them."""
    return ", ".join(f"{number:.{digits}f}" for number in numbers)


def line(row):
    """Return a row as a line of text."""
    words = {}
    for key, value in row.items():
        words[key] = f"{value:.3g}" if isinstance(value, float) else value or ""
    return LINE.format(**words)


def label_ticks(axis, values):
    """Label these values on a logarithmic x axis, and no others."""
    axis.set_xticks(values, [f"{value:g}" for value in values])
    axis.set_xticks([], minor=True)


def save(path, draw):
    """Plot two panels with draw(axes) into a PNG. The same numbers give the same bytes."""
    os.environ["MPLBACKEND"] = "agg"  # matplotlib refuses a backend that it does not know
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.2, 3.8), layout="constrained")
    axes = figure.subplots(1, 2)
    draw(axes)
    for axis in axes:
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def show(check, figures=()):
    """Print the rows of one statement and plot its figures {name: draw} into runs/theory."""
    argparse.ArgumentParser(description=sys.modules["__main__"].__doc__).parse_args()  # no options
    print(HEADER)
    for found in check():
        print(line(found))
    OUT.mkdir(parents=True, exist_ok=True)
    for name in figures:
        save(OUT / name, figures[name])
        print(f"-> {OUT / name}")
