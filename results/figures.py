"""python -m results.figures

Draws the figure of every script's page from the evidence: each comparison as its mean over trials
and 95 % interval, in points of accuracy, beside what the paper prints.
"""

import matplotlib
import numpy as np

from results import tables
from results.evidence import FOLDER

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  after the backend is chosen

ACCURACY = ("final", "last10", "late")
SCRIPTS = ("fedavg_curriculum", "client_curriculum", "fedcl_fgn", "fedcl_gmm_sync", "fedac_art")


def draw(script: str) -> None:
    """results/SCRIPT/differences.png: a panel for the paper's claims, one for our questions."""
    about = tables.of_script(script)
    paper = about.index[about.scale != "own"]
    ours = about.index[about.scale == "own"]
    panels = [rows_of(paper), rows_of(ours)]
    panels = [rows for rows in panels if rows]
    heights = [len(rows) + 1 for rows in panels]
    figure, axes = plt.subplots(
        len(panels),
        figsize=(9, 0.27 * sum(heights) + 1.2),
        height_ratios=heights,
        sharex=True,
        squeeze=False,
    )
    titles = ("The paper's claims", "Our questions: no control in the paper")
    for axis, rows, title in zip(axes[:, 0], panels, titles, strict=False):
        draw_panel(axis, rows, title)
    axes[-1, 0].set_xlabel("points of accuracy: mean, 95 % interval")
    axes[-1, 0].set_xlim(limits(panels))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="upper right", ncols=2, fontsize=8)
    figure.suptitle(f"{script}.py: what came out", x=0.02, ha="left", weight="bold")
    figure.tight_layout()
    figure.savefig(FOLDER / script / "differences.png", dpi=110)
    plt.close(figure)


def limits(panels: list) -> tuple[float, float]:
    """All means and the paper's numbers; a very wide interval is cut."""
    means = [0.0]
    for rows in panels:
        for _, found, paper in rows:
            means += [found.mean, paper]
    low = np.nanmin(means)
    high = np.nanmax(means)
    margin = (high - low) / 4
    return low - margin, high + margin


def rows_of(claims) -> list:
    """The comparisons of accuracy of these claims, with where they were made."""
    rows = []
    for claim in claims:
        setting = tables.CLAIMS.setting[claim].partition(",")[0]
        for row in tables.family(claim).itertuples():
            if row.measure in ACCURACY:
                name = f"{claim}  {row.what} ({setting}, n = {row.interval.n})"
                paper = float(row.paper or "nan")
                rows.append((name, row.interval, paper))
    return rows


def draw_panel(axis, rows: list, title: str) -> None:
    axis.axvline(0, color="0.6", linewidth=1)
    for height, (_, found, paper) in enumerate(rows):
        axis.plot([found.low, found.high], [height, height], color="C0", linewidth=2)
        axis.plot(found.mean, height, "o", color="C0")
        axis.plot(paper, height, "D", color="C3", markersize=5)
    axis.plot([], [], "o-", color="C0", label="ours")
    if not np.isnan([paper for *_, paper in rows]).all():
        axis.plot([], [], "D", color="C3", markersize=5, label="the paper's number")
    axis.set_yticks(range(len(rows)), [name for name, *_ in rows], fontsize=8)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.grid(axis="x", color="0.9")
    axis.set_title(title, loc="left", fontsize=10)


if __name__ == "__main__":
    for name in SCRIPTS:
        draw(name)
