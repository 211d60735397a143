"""python results/pages.py [--check]

Writes every table of the pages under results/ from the runs beside them, so that none is typed by hand: the cells 'ours' of
claims.md (verdicts.py) and the commands below them, the verdicts in README.md, and in each script's page the table after a line
`<!-- table: RUN -->`, RUN being a folder under results/ that holds a summary.json, or a csv file there, and after a line
`<!-- pairs: RUN ..: A - B, .. -->` these paired differences of the last ten rounds; in theory/README.md the table of
theory/figures/check.json. papers.csv holds what the papers print for cells of a run. --check writes nothing and exits with 1
where a page would change.
"""

import collections
import csv
import re
import sys

import numpy as np
import pandas as pd
import verdicts
from verdicts import CELLS, ROOT, ci, spread, summary

# the papers' own cells: (run, setting, method) -> accuracy in %
PAPERS = {tuple(cells): paper for *cells, paper in csv.reader((ROOT / "papers.csv").read_text().splitlines())}
ROW = re.compile(rf"^\| ({'|'.join(CELLS)}) .*$", re.M)  # of claims.md: claim, paper, ours, verdict, runs, scale


def markdown(head, rows) -> list[str]:
    """The lines of a table between empty ones."""
    return ["", *(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)), ""]


def table(run: str) -> list[str]:
    """A run's summary in Markdown: mean +- std over trials, each arm's paired difference from the first, the paper's cell and
    how far the final accuracy is from it."""
    if not (ROOT / run).exists():
        return ["", "*Not measured yet.*", ""]
    if run.endswith(".csv"):
        cells = pd.read_csv(ROOT / run, dtype={"method": str}).round(2).astype(object).fillna("")
        return markdown(cells.columns, cells.astype(str).to_numpy())
    found, rows = summary(run), []
    head = ("setting", "method", "final", "mean of the last ten", "minus the first arm, last ten", "uploads", "paper (off by)")
    for setting, arms in found["results"].items():
        first, *_ = arms
        for method, own in arms.items():
            apart = ci(np.subtract(own["last10"], arms[first]["last10"])) if method != first else ""
            said = (spread(own["final"]), spread(own["last10"]), apart, f"{np.mean(own['uploads']):.0f}")
            paper = PAPERS.get((run, setting, method), "")
            paper += f" ({np.mean(own['final']) - float(paper.partition(' ')[0]):+.1f})" if paper else ""
            rows.append((setting, method, *said, paper))
    shown = len(head) - (not any(row[-1] for row in rows))
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    threads = f", {found['config']['threads']} thread" if found["config"].get("threads") == 1 else ""
    note = f"{len(own['final'])} trials; {found['device']}{threads}; {versions}, commit {found['commit']}"
    return [*markdown(head[:shown], [row[:shown] for row in rows]), f"`{found['command']}` ({note})", ""]


def pairs(wanted: str) -> list[str]:
    """'RUN ..: A - B, ..' -> a line for each setting of the runs with each paired difference and its 95 % interval."""
    places, _, columns = wanted.partition(": ")
    columns, rows = columns.split(", "), []
    for run in filter(lambda place: (ROOT / place).exists(), places.split()):
        for s, arms in summary(run)["results"].items():
            apart = [ci(np.subtract(*(arms[arm]["last10"] for arm in column.split(" - ")))) for column in columns]
            rows.append([f"{run.rpartition('/')[2]} {s}".strip(), *apart])
    return markdown(["mean of the last ten", *columns], rows)


def said_of_claims(title: str = "") -> list[tuple[str, str]]:
    """Name and verdict of the claims in the section of claims.md with this title, or in all."""
    sections = (ROOT / "claims.md").read_text().split("\n## ")
    cells = [row[0].split(" | ") for section in sections if section.startswith(title) for row in ROW.finditer(section)]
    return [(claim, verdict) for claim, _, _, verdict, *_ in cells]


def verdict_table(title: str) -> list[str]:
    return ["| claim | verdict |", "|---|---|", *(f"{claim} | {verdict} |" for claim, verdict in said_of_claims(title))]


def verdict_counts(_) -> list[str]:
    counts = collections.Counter(re.match("[a-z]+(?: decided)?", verdict)[0] for _, verdict in said_of_claims())
    return [f"{counts.total()} claims: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common()) + "."]


def statements(_) -> list[str]:
    """theory/figures/check.json as a table: each statement's verdicts and worst ratios bound / measured."""
    shown = ("statement", "printed", "printed_ratio", "corrected", "corrected_ratio", "sharp_ratio", "note")
    rows = ["| statement | printed | ratio | corrected | ratio | sharp | |", "|---|---|---|---|---|---|---|"]
    for line in verdicts.statements().values():
        cells = (line[name] for name in shown)
        words = (f"{x:.3g}" if isinstance(x, float) else (x or "").replace("|", "\\|") for x in cells)
        rows.append(f"| {' | '.join(words)} |")
    return rows


WRITERS = {"table": table, "pairs": pairs, "verdicts": verdict_table, "counts": verdict_counts, "statements": statements}
MARK = rf"(<!-- ({'|'.join(WRITERS)})(?:: (.+?))? -->)(?:(?:(?!<!-- ).)*<!-- end -->)?"  # and what is below it by now


def script_page(text: str) -> str:
    """`text` with what follows each marker, up to the line `<!-- end -->`, written anew."""

    def written(match):
        mark, kind, wanted = match.groups()
        title = text[: match.start()].rpartition("\n## ")[2].partition("\n")[0]  # of the section that it stands in
        return "\n".join([mark, *WRITERS[kind](wanted or title), "<!-- end -->"])

    return re.sub(MARK, written, text, flags=re.S)


def claims_page(text: str) -> str:
    """`text` with the cells 'ours' of its tables, and below each table the commands of the runs that it names."""

    def ours(row):
        claim, paper, _, *verdict = row[0].split(" | ")
        return " | ".join([claim, paper, CELLS[row[1]](), *verdict])

    def commands(section):
        runs = dict.fromkeys(re.findall(r"\]\((\w[^)]*)/summary\.json\)", section[0]))
        return "\n".join([section[1], *(summary(run)["command"] for run in runs), "```"])

    return re.sub(r"(^## .*?```bash)\n.*?```", commands, ROW.sub(ours, text), flags=re.S | re.M)


def main(words: list[str]) -> None:
    """Writes or checks all pages."""
    stale, claims = [], ROOT / "claims.md"
    for path in [claims, *sorted(ROOT.rglob("README.md")), ROOT.parent / "theory" / "README.md"]:
        old = path.read_text()
        new = claims_page(old) if path == claims else script_page(old)
        stale += [path] if new != old else []
        if words != ["--check"]:
            path.write_text(new)
    for path in stale:
        print(path.relative_to(ROOT.parent))
    sys.exit(1 if stale and words == ["--check"] else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
