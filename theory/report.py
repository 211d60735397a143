"""The table of verdicts, and what `python -m theory.NAME` prints and draws for one statement.

A ratio is bound / measured: below 1 the statement is violated. 'vacuous' is true but says nothing;
'ours' stands on no page of the paper. In the figures black is measured, red printed, blue corrected
by the paper's lemmas, green sharp.
"""

import os
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
    """'holds' for True and for a ratio of at least 1, up to rounding; words are left alone."""
    if found is None or isinstance(found, str):
        return found
    return "holds" if found >= 1 - 1e-9 else "violated"


def number(found):
    """The ratio as a float, None for a verdict in words."""
    return None if found is None or isinstance(found, str) else float(found)


def row(statement, documented, printed, corrected=None, sharp=None, note="", vacuous=False):
    """A row of the table: each form by its worst ratio or by a verdict in words.

    documented: the verdict on the printed form in README.md. vacuous: whether, if true, it says
    nothing.
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
    """min of bound / measured, inf where nothing was measured. ValueError for NaN."""
    bound, measured = np.broadcast_arrays(bound, measured)
    require(~np.isnan(bound + measured), "no NaN among the bounds or the measurements")
    some = measured > ZERO
    return np.min(bound[some] / measured[some], initial=np.inf)


def listed(numbers, digits=2):
    """The numbers as words, separated by commas."""
    return ", ".join(f"{number:.{digits}f}" for number in numbers)


def line(row):
    """A row as a line of text."""
    words = {}
    for key, value in row.items():
        words[key] = f"{value:.3g}" if isinstance(value, float) else value or ""
    return LINE.format(**words)


def label_ticks(axis, values):
    """Labels these values on a logarithmic x axis, and no others."""
    axis.set_xticks(values, [f"{value:g}" for value in values])
    axis.set_xticks([], minor=True)


def save(path, draw):
    """Draws two panels by draw(axes) into a PNG; the same numbers give the same bytes."""
    os.environ["MPLBACKEND"] = (
        "agg"  # whatever it was: matplotlib refuses a name that it does not know
    )
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.2, 3.8), layout="constrained")
    axes = figure.subplots(1, 2)
    draw(axes)
    for axis in axes:
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def show(check, figures=()):
    """Prints the rows of one statement and draws its figures, {name: draw}, into runs/theory."""
    print(HEADER)
    for found in check():
        print(line(found))
    OUT.mkdir(parents=True, exist_ok=True)
    for name in figures:
        save(OUT / name, figures[name])
        print(f"-> {OUT / name}")
