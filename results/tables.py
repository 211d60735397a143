"""python -m results.tables [--check]

Writes the tables of the pages from the evidence (evidence.py): in a page what stands between
`<!-- KIND: SCRIPT -->` and `<!-- end -->`, and differences.csv, all comparisons. --check writes
nothing and exits with 1 where a file would change.

claims.csv       the papers' claims, and ours (scale 'own'): statement, the paper's number, setting
comparisons.csv  what decides each: the difference plus - minus of a measure, the claimed sign:
                 +, -, 0 (no difference), <= (not above)

The rule. A claim's comparisons are one family, corrected by Holm. It *holds* if each lies off 0 in
the claimed direction, it *does not hold* if one lies off 0 in the other, else it is *not decided*.
A claim of no difference cannot hold, only not hold. Not at the paper's setting it is *not tested*,
and the differences say what the reduced setting shows. A statement of the theory does not hold if
one of its checks is violated (theory/).
"""

import collections
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from experiment.report import holm
from results import clock_answers
from results.evidence import FOLDER, Interval, difference, interval, values

REDUCED = "not tested at the paper's setting"
OUTCOMES = {"holds": "for", "violated": "against", "vacuous": "against", "partly": "open"}
DIGITS = {"rank_correlation": 3, "silhouette": 3, "spearman": 2}
DIGITS |= {"log_ratio_first_half": 2, "log_ratio_second_half": 2}
TEXT = {"dtype": str, "keep_default_na": False}
CLAIMS = pd.read_csv(FOLDER / "claims.csv", **TEXT).set_index("claim")
COMPARISONS = pd.read_csv(FOLDER / "comparisons.csv", **TEXT)


def family(claim: str) -> pd.DataFrame:
    """A claim's comparisons, with columns interval, p (after Holm) and direction.

    A1 and A1b, halves of one claim, are one family; so are E12 and E12b.
    """
    rows = COMPARISONS[COMPARISONS.claim.str.rstrip("b") == claim.rstrip("b")].copy()
    intervals = []
    for row in rows.itertuples():
        intervals.append(interval(difference(row.plus, row.minus, row.measure)))
    rows["interval"] = intervals
    rows["p"] = holm([found.p for found in intervals])
    rows["direction"] = [direction(row.interval, row.p, row.sign) for row in rows.itertuples()]
    return rows[rows.claim == claim]


def label(claim: str) -> str:
    """The rule above."""
    if CLAIMS.scale[claim] == "reduced":
        return REDUCED
    verdicts = set(family(claim).direction)
    if CLAIMS.scale[claim] == "theory":
        for check in checks(claim):
            verdicts.add(OUTCOMES[check["printed"]])
    if "against" in verdicts:
        return "does not hold"
    if verdicts == {"for"}:
        return "holds"
    return "not decided"


def direction(found: Interval, p: float, sign: str) -> str:
    """One comparison is for its claim, against it or open."""
    if p >= 0.05:
        return "open"
    if sign == "0":  # a claim of no difference
        return "against"
    is_above = found.mean > 0
    return "for" if is_above == (sign == "+") else "against"  # "-", or "<=": not above


def checks(claim: str) -> list[dict]:
    """The lines of theory/figures/check.json that a claim of the theory is about."""
    lines = json.loads((FOLDER.parent / "theory" / "figures" / "check.json").read_text())
    begins = re.compile(re.escape(CLAIMS.setting[claim]) + "(?!')")  # not "Theorem 1's step .."
    return [line for line in lines if begins.match(line["statement"])]


# ------------------------------------------------------------------------------------------ tables


def markdown(head: Sequence, rows: list[Sequence]) -> list[str]:
    """A table's lines."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return lines


def claims(script: str) -> list[str]:
    """A line for each claim, and question of ours, with one of its comparisons."""
    ours = ("ours: difference [95 %], trials", "for, against, open")
    if script == "theory":
        ours = ("ours",)
    rows = []
    for claim, about in of_script(script).iterrows():
        found = (outcome(claim), tally(claim))
        if script == "theory":
            found = (theory_outcome(claim),)
        statement = f"{claim} {about.statement}"
        rows.append((statement, about.paper, *found, about.setting, label(claim)))
    return markdown(("claim", "paper", *ours, "setting", "label"), rows)


def telling(claim: str) -> pd.DataFrame:
    """One row, or none: the first comparison that decides the label, else the first."""
    rows = family(claim)
    wanted = {"does not hold": "against", "not decided": "open"}.get(label(claim))
    decisive = rows[rows.direction == wanted]
    if len(decisive):
        return decisive.head(1)
    return rows.head(1)


def outcome(claim: str) -> str:
    """The comparison that the claim's line shows, or what else was measured."""
    for row in telling(claim).itertuples():
        return words(row)
    if claim in MEASURED:
        return MEASURED[claim]()
    return "not reported"


def theory_outcome(claim: str) -> str:
    """Of all checks of a statement."""
    numbers = collections.Counter(check["printed"] for check in checks(claim))
    return "checks: " + ", ".join(f"{number} {name}" for name, number in numbers.items())


def agreement() -> str:
    """C4: how often Eq. 2 judges rounds alike, FGN on the clients that train, FedFIM on others."""
    table = pd.read_csv(FOLDER / "fedcl_fgn" / "agreement.csv", index_col=["signal", "and"])
    found = []
    for reading in ("batch", "per_sample"):
        row = table.loc[f"fgn {reading} same", "fim other"]
        percent = 100 * row
        found.append(f"{reading} {percent['alike']:.0f} (by chance {percent['by chance']:.0f})")
    return f"% of rounds judged alike, FGN and FedFIM: {', '.join(found)}"


def cost() -> str:
    """C5: FedFIM's seconds, over those of both readings of FGN, from net to net; its memory."""
    table = pd.read_csv(FOLDER / "fedcl_fgn" / "cost.csv", index_col=["what", "pair"])
    found = []
    for reading in ("batch", "per_sample"):
        times = table.loc["FedFIM"].seconds / table.loc[f"FGN {reading}"].seconds
        found.append(f"{reading} {times.min():.3g} to {times.max():.3g}")
    memory = table.loc["FedFIM"].MiB / table.loc["FGN per_sample"].MiB
    return f"FedFIM / FGN, time: {', '.join(found)}; memory: per_sample {memory.mean():.2f}"


def stability() -> str:
    """C8: the standard deviation of the accuracy over seeds."""
    found = []
    for name, method in (("FedCL", "fedavg+cl"), ("FedAvg", "fedavg")):
        accuracies = values(f"fedcl_fgn/fmnist-alpha|alpha=0.1|{method}", "last10")
        found.append(f"{name} {accuracies.std(ddof=1):.1f}")
    return f"std of the accuracy over {len(accuracies)} seeds: {', '.join(found)}"


MEASURED = {"C4": agreement, "C5": cost, "C8": stability}  # the first two by tests/bench_fim.py


def tally(claim: str) -> str:
    """How many of its comparisons are for it, against it, open."""
    found = collections.Counter(family(claim).direction)
    if not found:
        return ""
    return ", ".join(str(found[name]) for name in ("for", "against", "open"))


def differences() -> str:
    """differences.csv: every comparison, its paired difference with the 95 % interval."""
    rows = []
    for claim, about in CLAIMS.iterrows():
        for row in family(claim).itertuples():
            found = row.interval
            numbers = [found.mean, found.low, found.high, row.p]
            digits = [f"{number:.4g}" for number in numbers]
            claimed = [row.sign, row.paper]
            rows.append((about.script, claim, row.what, row.measure, *digits, found.n, *claimed))
    columns = ["script", "claim", "difference", "measure", "mean", "low", "high", "p_holm"]
    columns += ["trials", "claimed_sign", "paper"]
    return pd.DataFrame(rows, columns=columns).to_csv(index=False)


def of_script(script: str) -> pd.DataFrame:
    """Its claims; 'theory' is one."""
    return CLAIMS[CLAIMS.script == script]


def words(row) -> str:
    """What was compared, the interval, the trials."""
    return f"{measured(row)} {shown(row.interval, row.measure)}, {row.interval.n}"


def measured(row) -> str:
    """What was compared, and when, if not in the last ten rounds."""
    suffix = {"final": " (final round)", "late": " (last sixth of the uploads)"}
    return row.what + suffix.get(row.measure, "")


def shown(found: Interval, measure: str) -> str:
    """'+4.1 [2.7, 5.6]', with the digits that fit the measure."""
    return found.text(DIGITS.get(measure, 1))


def labels(_: str) -> list[str]:
    """Which of the papers' claims got which label, a line a script and one for the theory."""
    names = ("holds", "does not hold", "not decided", REDUCED)
    rows = []
    for script in CLAIMS.script.unique():
        found = {name: [] for name in names}
        about = of_script(script)
        for claim in about.index[about.scale != "own"]:
            found[label(claim)].append(claim)
        page = f"{script}/README.md"
        if script == "theory":
            page = "../theory/README.md"
        rows.append((f"[{script}]({page})", *map(", ".join, found.values())))
    return markdown(("", *names), rows)


def counts(_: str) -> list[str]:
    """How often each label is given to the papers' claims, the theory's among them."""
    papers = CLAIMS[CLAIMS.scale != "own"]
    found = collections.Counter(map(label, papers.index))
    parts = [f"{name}: {number}" for name, number in found.most_common()]
    return [f"{len(papers)} claims of the papers. {'; '.join(parts)}."]


def statements(_: str) -> list[str]:
    """theory/figures/check.json: each statement's verdicts and worst ratios bound / measured."""
    head = ("statement", "as printed", "bound / measured", "corrected", "bound / measured")
    head += ("sharp: bound / measured", "remark")
    fields = ("statement", "printed", "printed_ratio", "corrected", "corrected_ratio")
    fields += ("sharp_ratio", "note")
    rows = []
    for line in json.loads((FOLDER.parent / "theory" / "figures" / "check.json").read_text()):
        rows.append(tuple(cell(line[field]) for field in fields))
    return ["", *markdown(head, rows)]


def doubling(_: str) -> list[str]:
    """clock.md (a)."""
    times = "seconds to FedAvg's accuracy, FedCL / FedAvg: geometric mean [95 %]"
    head = ("data", "spread", times, "trials in which FedCL came there")
    rows = []
    for data, spread, ratio, came in clock_answers.doubling():
        rows.append((data, spread, ratio.text().removeprefix("+"), came))
    return markdown(head, rows)


def phases(_: str) -> list[str]:
    """clock.md (b)."""
    head = ("data", "spread", "method", "time spent waiting")
    head += ("waiting: method − no freezing, points", "accuracy: method − no freezing, points")
    rows = []
    for data, spread, method, waited, waiting, accuracy in clock_answers.phases():
        rows.append((data, spread, method, f"{waited:.0f} %", waiting.text(), accuracy.text()))
    return markdown(head, rows)


def draws(_: str) -> list[str]:
    """clock.md (c)."""
    head = ("data", "spread", "other arm", "accuracy at equal time: by size − other arm [95 %]")
    rows = []
    for data, spread, other, lead in clock_answers.draws():
        rows.append((data, spread, other, lead.text()))
    return markdown(head, rows)


def cell(value) -> str:
    """A value of check.json, three digits of a number."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return (value or "").replace("|", "\\|")


# ------------------------------------------------------------------------------------------- pages

WRITERS = {
    "claims": claims,
    "labels": labels,
    "counts": counts,
    "statements": statements,
    "doubling": doubling,
    "phases": phases,
    "draws": draws,
}
MARK = re.compile(rf"(<!-- ({'|'.join(WRITERS)})(?:: (\w+))? -->\n)(.*?)(<!-- end -->)", re.S)


def write(text: str) -> str:
    """A page with its tables written anew."""

    def table(match: re.Match) -> str:
        begin, kind, script, _, end = match.groups()
        lines = WRITERS[kind](script)
        return begin + "\n".join(lines) + "\n" + end

    return MARK.sub(table, text)


def pages() -> list[Path]:
    """All that may hold a table."""
    return [*sorted(FOLDER.rglob("*.md")), FOLDER.parent / "theory" / "README.md"]


def main(argv: list[str]) -> int:
    files = {FOLDER / "differences.csv": differences()}
    for path in pages():
        files[path] = write(path.read_text())
    stale = [path for path, text in files.items() if path.read_text() != text]
    for path in stale:
        print(path.relative_to(FOLDER.parent))
    if argv == ["--check"]:
        return 1 if stale else 0
    for path in stale:
        path.write_text(files[path])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
