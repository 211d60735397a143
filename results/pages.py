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
            apart = ci(verdicts.gain(run, setting, method, first, "last10")) if method != first else ""
            said = (spread(own["final"]), spread(own["last10"]), apart, f"{np.mean(own['uploads']):.0f}")
            paper = PAPERS.get((run, setting, method), "")
            paper += f" ({np.mean(own['final']) - float(paper.partition(' ')[0]):+.1f})" if paper else ""
            rows.append((setting, method, *said, paper))
    shown = len(head) - (not any(row[-1] for row in rows))
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    threads = f", {found['config']['threads']} thread" if found["config"].get("threads") == 1 else ""
    commit = f", commit {found.get('commit') or 'fe9fb39 or before, whose flags these are'}"
    note = f"{len(own['final'])} trials; {found['device']}{threads}; {versions}{commit}"
    return [*markdown(head[:shown], [row[:shown] for row in rows]), f"`{found['command']}` ({note})", ""]


def pairs(wanted: str) -> list[str]:
    """'RUN ..: A - B, ..' -> a line for each setting of the runs with each paired difference and its 95 % interval."""
    places, _, columns = wanted.partition(": ")
    columns, rows = columns.split(", "), []
    for run in filter(lambda place: (ROOT / place).exists(), places.split()):
        for s in verdicts.settings(run):
            apart = [ci(verdicts.gain(run, s, *column.split(" - "), "last10")) for column in columns]
            rows.append([f"{run.rpartition('/')[2]} {s}".strip(), *apart])
    return markdown(["mean of the last ten", *columns], rows)


def script_page(text: str) -> str:
    """`text` with what follows each marker, up to the line `<!-- end -->`, written anew."""

    def fill(match):
        kind, wanted = match.groups()
        return "\n".join([f"<!-- {kind}: {wanted} -->", *(table if kind == "table" else pairs)(wanted), "<!-- end -->"])

    return re.sub(r"<!-- (table|pairs): (.+?) -->(?:(?:(?!<!-- (?:table|pairs)).)*?<!-- end -->)?", fill, text, flags=re.S)


def claims_page(text: str) -> str:
    """`text` with the cells 'ours' of its tables, and below each table the commands of the runs that it names."""

    def ours(row):
        cells = re.split(r"(?<!\\)\|", row[0])
        runs.update(dict.fromkeys(re.findall(r"\]\((\w[^)]*)/summary\.json\)", row[0])))
        return "|".join([*cells[:3], f" {CELLS[row[1]]()} ", *cells[4:]])

    parts = []
    for part in text.split("\n## "):
        runs = {}
        part = re.sub(rf"^\| ({'|'.join(CELLS)}) .*$", ours, part, flags=re.M)
        commands = "\n".join(["```bash", *(summary(run)["command"] for run in runs), "```"])
        parts.append(re.sub("```bash\n.*?```", lambda _, said=commands: said, part, flags=re.S))
    return "\n## ".join(parts)


def front_page(text: str, claims: str) -> str:
    """`text` with the verdicts of `claims`, section by section, between its marks, and their count."""
    counts, rows = collections.Counter(), collections.defaultdict(list)
    for part in claims.split("\n## "):
        for line in part.splitlines():
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
            if len(cells) > 4 and cells[1].partition(" ")[0] in CELLS:
                rows[part.partition("\n")[0]].append(f"| {cells[1]} | {cells[4]} |")
                counts[re.match("[a-z]+(?: decided)?", cells[4])[0]] += 1
    first, *parts = text.split("\n## ")
    head = ["| claim | verdict |", "|---|---|"]
    parts = [between("verdicts", head + rows[part.partition("\n")[0]], part) for part in parts]
    said = f"{counts.total()} claims: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common()) + "."
    return "\n## ".join([between("counts", [said], first), *parts])


def between(mark: str, lines: list[str], text: str) -> str:
    """`text` with these lines between `<!-- mark -->` and `<!-- end -->`."""
    new = "\n".join([f"<!-- {mark} -->", *lines, "<!-- end -->"])
    return re.sub(rf"<!-- {mark} -->.*?<!-- end -->", lambda _: new, text, flags=re.S)


def theory_page(text: str) -> str:
    """`text` with theory/figures/check.json as a table: each statement's verdicts and worst ratios bound / measured."""
    shown = ("statement", "printed", "printed_ratio", "corrected", "corrected_ratio", "sharp_ratio", "note")
    rows = ["| statement | printed | ratio | corrected | ratio | sharp | |", "|---|---|---|---|---|---|---|"]
    for line in verdicts.statements().values():
        cells = (line[name] for name in shown)
        words = (f"{x:.3g}" if isinstance(x, float) else (x or "").replace("|", "\\|") for x in cells)
        rows.append(f"| {' | '.join(words)} |")
    return between("statements", rows, text)


def main(words: list[str]) -> None:
    """Writes or checks all pages."""
    stale, claims, theory = [], ROOT / "claims.md", ROOT.parent / "theory" / "README.md"
    writers = {claims: claims_page, ROOT / "README.md": lambda text: front_page(text, claims.read_text()), theory: theory_page}
    for path in [claims, *sorted(ROOT.rglob("README.md")), theory]:
        old = path.read_text()
        new = writers.get(path, script_page)(old)
        stale += [path] if new != old else []
        if words != ["--check"]:
            path.write_text(new)
    for path in stale:
        print(path.relative_to(ROOT.parent))
    sys.exit(1 if stale and words == ["--check"] else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
