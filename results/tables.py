"""python -m results.tables [--check]

Writes the tables of the pages from the evidence (evidence.py): in a page, the text between
`<!-- KIND: SCRIPT -->` and `<!-- end -->`. It also writes differences.csv, all comparisons, and the
page selection.md (selection_answers.py). --check writes nothing and exits with 1 if a file would
change.

- claims.csv: the papers' claims, and ours (scale 'own'). Each has a statement, the paper's number
  and a setting.
- comparisons.csv: what decides each claim. It names the difference plus - minus of a measure, and
  the claimed sign: +, -, 0 (no difference), <= (not above). `paper_stds` are the published standard
  deviations of the methods. `margin` is set where the trials were planned with it.
- published.csv: accuracies in the papers, and the runs that measured the same.
- verdicts.csv: the first table of results/README.md. A gain is a claim, a colon, and how the name
  of its comparison begins.

The rule. A claim's comparisons are one family. The claim is *confirmed* if each differs from 0 in
the claimed direction (p < 0.05). It is *refuted* if one differs from 0 in the other direction after
Holm's correction. Otherwise it is *undecided*. A claim of no difference, or of no gain, is
confirmed by t-tests against the margin. In another setting than the paper's a claim is *not tested
at the paper's setting*, and the differences say what this setting shows. A statement of the theory
is refuted if one of its checks is violated (theory/).

Next to the label: Welch's test says whether our difference *excludes* the published one. If it does
not, the interval is *too wide* if it contains 0, and otherwise it *agrees*.
"""

import argparse
import collections
import json
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from experiment.report import holm
from results import clock_answers, selection_answers
from results.evidence import (
    CONFIRMED,
    EFFECTS,
    FOLDER,
    LABELS,
    MARGIN,
    REFUTED,
    UNDECIDED,
    UNTESTED,
    Interval,
    difference,
    interval,
    markdown,
    trials,
    values,
)

# A script's paper, and how many trials a published deviation has. Divided by the root of the last
# number, it is a standard error. The first paper's code has the deviation with divisor 3, not 2.
PAPERS = {
    "fedavg_curriculum": ("curricula", 3, 2),
    "client_curriculum": ("curricula", 3, 2),
    "fedcl_gmm_sync": ("multi-phase", 10, 10),
    "fedcl_fgn": ("critical periods", 3, 3),
    "fedac_art": ("FedAC", 1, 1),
    "theory": ("theory", 1, 1),
}
ELSEWHERE = ("reduced", "other")  # scales: smaller than the paper's setting, or other clients
OUTCOMES = {"holds": "for", "violated": "against", "vacuous": "against", "partly": UNDECIDED}
ACCURACY = ("final", "last10", "late", "first_quarter")  # measures in points of accuracy
DIGITS = {"rank_correlation": 3, "silhouette": 3, "spearman": 2, "auc_gain": 2}
DIGITS |= {"log_ratio_first_half": 2, "log_ratio_second_half": 2}
TEXT = {"dtype": str, "keep_default_na": False}
CLAIMS = pd.read_csv(FOLDER / "claims.csv", **TEXT).set_index("claim")
COMPARISONS = pd.read_csv(FOLDER / "comparisons.csv", **TEXT)
PUBLISHED = pd.read_csv(FOLDER / "published.csv", **TEXT)
VERDICTS = pd.read_csv(FOLDER / "verdicts.csv", **TEXT)
CHECKS = json.loads((FOLDER.parent / "theory" / "figures" / "check.json").read_text())


def family(claim: str) -> pd.DataFrame:
    """Returns a claim's comparisons: interval, p_holm, p_margin, direction, p_equal, effect.

    A1 and A1b, parts of one claim, are one family for Holm. So are A6, A6b and A6c, and so on.
    """
    rows = COMPARISONS[COMPARISONS.claim.str.rstrip("bc") == claim.rstrip("bc")].copy()
    intervals = []
    for row in rows.itertuples():
        intervals.append(interval(difference(row.plus, row.minus, row.measure)))
    rows["interval"] = intervals
    rows["p_holm"] = holm([found.p for found in intervals])
    rows["p_margin"] = [p_margin(row) for row in rows.itertuples()]
    rows["direction"] = [direction(row) for row in rows.itertuples()]
    rows["p_equal"] = [p_equal(row) for row in rows.itertuples()]
    rows["effect"] = [effect(row) for row in rows.itertuples()]
    return rows[rows.claim == claim]


def p_equal(row) -> float:
    """Returns p that the published effect is ours, or NaN if no number is published."""
    if not row.paper:
        return np.nan
    return row.interval.p_equal(float(row.paper), *paper_errors(row))


def paper_errors(row) -> tuple[np.ndarray, int]:
    """Returns the standard error of each published mean, if there are any, and their trials."""
    _, n, divisor = PAPERS[CLAIMS.script[row.claim]]
    deviations = np.array(row.paper_stds.split(), dtype=float)
    return deviations / np.sqrt(divisor), n


def effect(row) -> str:
    """Returns one of EFFECTS, or nothing if no number is published."""
    return row.interval.effect(row.p_equal) if row.paper else ""


def p_margin(row) -> float:
    """Returns p that a claim of no difference, or of no gain, is right within 2 points.

    It is NaN for other claims, and where the measure is no accuracy.
    """
    if row.measure not in ACCURACY:
        return np.nan
    if row.sign == "0":
        return row.interval.p_within(MARGIN)
    return row.interval.p_below(MARGIN) if row.sign == "<=" else np.nan


def label(claim: str) -> str:
    """Returns the label by the rule above."""
    if CLAIMS.scale[claim] in ELSEWHERE:
        return UNTESTED
    verdicts = set(family(claim).direction)
    if CLAIMS.scale[claim] == "theory":
        for check in checks(claim):
            verdicts.add(OUTCOMES[check["printed"]])
    if "against" in verdicts:
        return REFUTED
    if verdicts == {"for"}:
        return CONFIRMED
    return UNDECIDED


def direction(row) -> str:
    """Returns one of DIRECTIONS: what a comparison is for its claim."""
    if row.margin and row.p_margin < 0.05:
        return "for"
    is_above = row.interval.mean > 0
    is_for = row.sign != "0" and is_above == (row.sign == "+")
    if is_for and row.interval.p < 0.05:
        return "for"
    if not is_for and row.p_holm < 0.05:
        return "against"
    return UNDECIDED


def is_claimed(mean: float, sign: str) -> bool:
    """Whether a mean lies in the claimed direction, or within 2 points where that is claimed."""
    match sign:
        case "+":
            return mean > 0
        case "-":
            return mean < 0
        case "<=":
            return mean < MARGIN
    return abs(mean) < MARGIN


def said(claim: str) -> str:
    """Returns the label, and whether the claim was formed after its runs had been seen."""
    return ", ".join(filter(None, (label(claim), CLAIMS.asked[claim])))


def checks(claim: str) -> list[dict]:
    """Returns the lines of theory/figures/check.json that a claim of the theory is about."""
    begins = re.compile(re.escape(CLAIMS.setting[claim]) + "(?!')")  # not "Theorem 1's step .."
    return [line for line in CHECKS if begins.match(line["statement"])]


# ------------------------------------------------------------------------------------------ tables


def claims(script: str) -> list[str]:
    """Returns a line for each claim, and each question of our own, with one comparison."""
    if script == "theory":
        return theory_claims()
    head = ("claim", "published effect", "comparison that speaks most against it")
    head += ("ours [95 %], n", "for, against", "means in the claimed direction", "setting", "label")
    rows = []
    for claim, about in of_script(script).iterrows():
        what, ours, n = outcome(claim)
        published = "; ".join(filter(None, (about.paper, effects(claim))))
        found = (published, what, f"{ours}, n={n}", tally(claim), means(claim))
        rows.append((f"{claim} {about.statement}", *found, about.setting, said(claim)))
    return markdown(head, rows)


def theory_claims() -> list[str]:
    """Returns a line for each statement of the theory."""
    rows = []
    for claim, about in of_script("theory").iterrows():
        statement = f"{claim} {about.statement}"
        rows.append((statement, about.paper, theory_outcome(claim), about.setting, said(claim)))
    return markdown(("claim", "published", "ours", "setting", "label"), rows)


def telling(claim: str) -> pd.DataFrame:
    """Returns one row, or none: the comparison that speaks most against the claim."""
    rows = family(claim)
    support = [supports(row.interval, row.sign) for row in rows.itertuples()]
    return rows.assign(support=support).sort_values("support", kind="stable").head(1)


def supports(found: Interval, sign: str) -> float:
    """Returns how many half-widths of its interval the mean lies in the claimed direction."""
    widths = found.mean / (found.high - found.mean)
    if sign == "0":
        return -abs(widths)
    if sign == "+":
        return widths
    return -widths


def outcome(claim: str) -> tuple[str, str, str]:
    """Returns the comparison in the claim's line, its interval and n; or what was measured."""
    for row in telling(claim).itertuples():
        return measured(row), shown(row.interval, row.measure), str(row.interval.n)
    return MEASURED[claim]()


def effects(claim: str) -> str:
    """Says how the intervals agree with the published effects, and how many show no difference."""
    rows = family(claim)
    found = collections.Counter(rows.effect)
    parts = [f"{name}: {found[name]}" for name in EFFECTS if found[name]]
    if found.total() == 1 and parts:
        parts = [name for name in EFFECTS if found[name]]
    of_no_difference = rows.p_margin[rows.sign == "0"].dropna()
    if len(of_no_difference):
        count = (of_no_difference < 0.05).sum()
        parts.append(f"within {MARGIN:.0f} points: {count} of {len(of_no_difference)}")
    return "; ".join(parts)


def theory_outcome(claim: str) -> str:
    """Returns the outcome of all checks of a statement."""
    numbers = collections.Counter(check["printed"] for check in checks(claim))
    return "checks: " + ", ".join(f"{number} {name}" for name, number in numbers.items())


def agreement() -> tuple[str, str, str]:
    """C4: how often Eq. 2 judges a round equally by FGN on its clients and by FedFIM on others."""
    table = pd.read_csv(FOLDER / "fedcl_fgn" / "agreement.csv", index_col=["signal", "and"])
    found = []
    for reading in ("batch", "per_sample"):
        row = table.loc[f"fgn {reading} same", "fim other"]
        percent = 100 * row
        found.append(f"{reading} {percent['alike']:.0f} (by chance {percent['by chance']:.0f})")
    return "% of rounds that FGN and FedFIM judge equally", ", ".join(found), "3"


def cost() -> tuple[str, str, str]:
    """C5: FedFIM's seconds over the seconds of both readings of FGN, by model; its memory."""
    table = pd.read_csv(FOLDER / "fedcl_fgn" / "cost.csv", index_col=["what", "pair"])
    found = []
    for reading in ("batch", "per_sample"):
        times = table.loc["FedFIM"].seconds / table.loc[f"FGN {reading}"].seconds
        found.append(f"{reading} {times.min():.3g} to {times.max():.3g}")
    memory = table.loc["FedFIM"].MiB / table.loc["FGN per_sample"].MiB
    shown = f"{', '.join(found)}; memory of per_sample: {memory.mean():.2f} times"
    return "FGN is this many times faster than FedFIM, over the models", shown, str(len(times))


def stability() -> tuple[str, str, str]:
    """C8: the standard deviation of the accuracy over seeds."""
    found = []
    for name, method in (("FedCL", "fedavg+cl"), ("FedAvg", "fedavg")):
        accuracies = values(f"fedcl_fgn/fmnist-alpha|alpha=0.1|{method}", "last10")
        found.append(f"{name} {accuracies.std(ddof=1):.1f}")
    return "std of the accuracy over seeds", ", ".join(found), str(len(accuracies))


MEASURED = {"C4": agreement, "C5": cost, "C8": stability}  # the first two by tests/bench_fim.py


def tally(claim: str) -> str:
    """Says how many of its comparisons are for it, and against it."""
    found = collections.Counter(family(claim).direction)
    if not found:
        return ""
    return f"{found['for']}, {found['against']}"


def means(claim: str) -> str:
    """Says how many means lie in the claimed direction: '9 of 9'."""
    rows = family(claim)
    rows = rows[(rows.sign != "0") | rows.measure.isin(ACCURACY)]
    if rows.empty:
        return ""
    found = [is_claimed(row.interval.mean, row.sign) for row in rows.itertuples()]
    return f"{sum(found)} of {len(found)}"


def differences() -> str:
    """Returns differences.csv: every comparison, its paired difference with the 95 % interval."""
    rows = []
    for claim, about in CLAIMS.iterrows():
        for row in family(claim).itertuples():
            line = {
                "script": about.script,
                "claim": claim,
                "difference": row.what,
                "measure": row.measure,
                "mean": row.interval.mean,
                "low": row.interval.low,
                "high": row.interval.high,
                "p": row.interval.p,
                "p_holm": row.p_holm,
                "trials": row.interval.n,
                "claimed_sign": row.sign,
                "direction": row.direction,
                "paper": row.paper,
                "p_equal": row.p_equal,
                "published_effect": row.effect,
                "p_2_points": row.p_margin,
            }
            rows.append(line)
    return pd.DataFrame(rows).to_csv(index=False, float_format="%.4g")


def of_script(script: str) -> pd.DataFrame:
    """Returns the claims of a script; 'theory' counts as one."""
    return CLAIMS[CLAIMS.script == script]


def measured(row) -> str:
    """Says what was compared, and when, if not in the last ten rounds."""
    suffix = {"final": " (final round)", "late": " (last sixth of the uploads)"}
    return row.what + suffix.get(row.measure, "")


def shown(found: Interval, measure: str) -> str:
    """Returns '+4.1 [2.7, 5.6]', with the digits that fit the measure and the interval."""
    ends_near_0 = min(abs(found.low), abs(found.high)) < 0.05  # "0.0" would not say on which side
    digits = 2 if ends_near_0 or found.high - found.low < 0.1 else 1
    return found.text(DIGITS.get(measure, digits))


def accuracies(script: str) -> list[str]:
    """Returns published.csv as a table: accuracies of methods, ours and published, in %."""
    head = ("setting", "method", "ours", "n", "published", "where")
    rows = []
    for about in PUBLISHED[PUBLISHED.script == script].itertuples():
        found = values(about.ours, about.measure)
        ours = f"{found.mean():.1f}"
        if len(found) > 1:
            ours += f" ± {found.std(ddof=1):.1f}"
        published = about.published
        if about.std:
            published = f"{published} ± {about.std}"
        rows.append((about.setting, about.method, ours, len(found), published, about.where))
    return markdown(head, rows)


TABLE_1 = {"0.05": "6.8", "0.2": "4.3", "0.9": "3.2"}  # the published gains of FedAvg
DECAY_RUNS = {  # a run, and the endings of its blocks of trials
    "CIFAR-10, LeNet-5, 200, 0.9": ("cifar10-decay0.9", "ab"),
    "Fashion-MNIST, LeNet-5, 200, 0.9": ("fmnist-decay0.9", "ab"),
    "CIFAR-10, LeNet-5, 60, 0.99": ("cifar10-decay0.99", "ab"),
    "Fashion-MNIST, LeNet-5, 60, 0.99": ("fmnist-decay0.99", "ab"),
    "CIFAR-10, AlexNet, 60, 0.9": ("alexnet-criticalfl0.9", "123456"),
    "CIFAR-10, AlexNet, 36, 0.9": ("alexnet-decay0.9", "123456"),
}


def decays(_: str) -> list[str]:
    """fedcl_fgn: FedCL against FedAvg at both decays. The paper's numbers are of C2."""
    head = ("data, model, rounds, decay", "accuracy", "uploads in all rounds")
    head += ("clients a round until the goal", "rounds until the goal")
    head += ("clients a round, first third - last", "n")
    rows = []
    for name in DECAY_RUNS:
        gain, uploads, early = of_decay(name)
        fedcl, fedavg = decay_terms(name)
        clients = values(fedcl, "clients_to_base") / values(fedavg, "clients_to_base")
        clients = clients[np.isfinite(clients)]
        until = f"{len(clients)} trials only"
        if len(clients) > 2:
            until = interval(clients).text(2).removeprefix("+")
        rounds = interval(difference(fedcl, fedavg, "rounds_to_base"))
        found = (shown(gain, "last10"), uploads.text(2).removeprefix("+"), until)
        rows.append((name, *found, shown(rounds, ""), shown(early, ""), gain.n))
    rows.append(
        ("published (it states no rounds)", "up to +11", "", "0.95 to 1.1", "fewer (curves)")
    )
    rows[-1] += ("more early (curves)", "3")
    return markdown(head, rows)


def decay_terms(name: str) -> tuple[str, str]:
    """Returns the trials of FedCL and of FedAvg of one of DECAY_RUNS."""
    run, blocks = DECAY_RUNS[name]
    runs = "+".join(f"fedcl_fgn/{run}-{block}" for block in blocks)
    return f"{runs}||fedavg+cl", f"{runs}||fedavg"


def of_decay(name: str) -> tuple[Interval, Interval, Interval]:
    """Returns FedCL's gain over FedAvg, its uploads / FedAvg's, its clients early - late."""
    fedcl, fedavg = decay_terms(name)
    gain = interval(difference(fedcl, fedavg, "last10"))
    uploads = interval(values(fedcl, "uploads") / values(fedavg, "uploads"))
    early = interval(values(fedcl, "clients_early_late"))
    return gain, uploads, early


def find(place: str):
    """'E20: alpha 0.1' -> the one comparison of this claim that begins so."""
    claim, _, start = place.partition(": ")
    rows = family(claim)
    [row] = rows[rows.what.str.startswith(start)].itertuples()
    return row


def verdicts(_: str) -> list[str]:
    """Returns a line for each algorithm: whether to use it, its gains, its cost."""
    head = ("algorithm", "use it?", "gain over plain training [95 %], n (published)")
    head += ("gain over the control", "extra cost", "not tested")
    rows = []
    for about in VERDICTS.itertuples():
        name = f"[{about.name}]({about.script}/README.md)"
        gain = find(about.gain)
        control = find(about.control)
        of_plain = f"{about.data}: {gained(gain)} ({about.published or gain.paper})"
        of_control = f"{about.control_name}: {gained(control)}"
        rows.append((name, about.use, of_plain, of_control, about.cost, about.untested))
    return markdown(head, rows)


def gained(row) -> str:
    """Returns '+4.1 [2.7, 5.6], n = 3', and whether that is undecided."""
    found = f"{shown(row.interval, row.measure)}, n = {row.interval.n}"
    return f"{found}, undecided" if row.direction == UNDECIDED else found


def authors_clients(_: str) -> list[str]:
    """fedavg_curriculum: Table 1 with the clients of the authors' code, as far as it was made.

    A trial counts if its place is whole, with its controls. Below three there is no interval.
    """
    made = set(trials().index)
    head = ("alpha", "curriculum - ordinary", "published", "curriculum - random")
    head += ("shuffled - ordinary", "curriculum - shuffled", "n")
    rows = []
    for alpha, of_paper in TABLE_1.items():
        places = [f"fedavg_curriculum/cifar10-even{alpha}-{number}" for number in range(1, 7)]
        places = [place for place in places if {place, f"{place}-controls"} <= made]
        if not places:
            continue
        plain = "+".join(places)
        controls = "+".join(f"{place}-controls" for place in places)
        pairs = [(f"{plain}||curriculum", f"{plain}||vanilla")]
        pairs.append((f"{plain}||curriculum", f"{controls}||random"))
        pairs.append((f"{controls}||shuffled", f"{plain}||vanilla"))
        pairs.append((f"{plain}||curriculum", f"{controls}||shuffled"))
        found = []
        for plus, minus in pairs:
            if alpha == "0.9" and minus.endswith("||random"):
                found.append("not planned")
            else:
                found.append(few(difference(plus, minus, "last10")))
        rows.append((alpha, found[0], of_paper, *found[1:], len(places)))
    return markdown(head, rows)


def few(gains: pd.Series) -> str:
    """Returns the mean, with its interval if there are three trials or more."""
    if len(gains) < 3:
        return f"{gains.mean():+.1f}"
    return shown(interval(gains), "last10")


def labels(_: str) -> list[str]:
    """Says which of the papers' claims got which label: a line per script, one for the theory."""
    rows = []
    for script in CLAIMS.script.unique():
        found = {name: [] for name in LABELS}
        about = of_script(script)
        for claim in about.index[about.scale != "own"]:
            asked = CLAIMS.asked[claim]
            found[label(claim)].append(f"{claim} ({asked})" if asked else claim)
        page = f"#{script}"
        if script == "theory":
            page = "../theory/README.md"
        rows.append((f"[{script}]({page})", *map(", ".join, found.values())))
    return markdown(("page", *LABELS), rows)


def counts(_: str) -> list[str]:
    """Counts each label, for the papers' claims (with the theory's) and for ours."""
    is_ours = CLAIMS.scale == "own"
    rows = []
    for who, about in (("of the papers", CLAIMS[~is_ours]), ("our own", CLAIMS[is_ours])):
        found = collections.Counter(map(label, about.index))
        numbers = [str(found[name]) for name in LABELS]
        rows.append((who, *numbers, str(len(about))))
    return markdown(("claims", *LABELS, "all"), rows)


def published(_: str) -> list[str]:
    """Counts the comparisons of each paper's claims by how they agree with a published effect."""
    found = collections.defaultdict(collections.Counter)
    for claim, about in CLAIMS[CLAIMS.scale != "own"].iterrows():
        paper, *_ = PAPERS[about.script]
        where = "other data or clients" if about.scale in ELSEWHERE else "its setting"
        found[paper, where].update(family(claim).effect)
    rows = []
    for (paper, where), words in found.items():
        numbers = [words[name] for name in EFFECTS]
        if any(numbers):
            rows.append((paper, where, *numbers))
    return markdown(("paper", "compared on", *EFFECTS), rows)


def statements(_: str) -> list[str]:
    """Returns each statement's verdicts and worst ratios bound / measured (theory/figures/).

    They come from check.json. A remark of more than 20 words stays in that file.
    """
    head = ("statement", "as published", "bound / measured", "corrected", "bound / measured")
    head += ("sharp: bound / measured", "remark")
    fields = ("statement", "printed", "printed_ratio", "corrected", "corrected_ratio")
    fields += ("sharp_ratio", "note")
    rows = []
    for line in CHECKS:
        if len((line["note"] or "").split()) > 20:
            line = line | {"note": "see figures/check.json"}
        rows.append(tuple(cell(line[field]) for field in fields))
    return ["", *markdown(head, rows)]


def doubling(_: str) -> list[str]:
    """clock.md (a)."""
    times = "seconds to FedAvg's accuracy, FedCL / FedAvg: geometric mean [95 %]"
    head = ("data", "spread", times, "n", "trials in which FedCL reached it")
    rows = []
    for data, spread, ratio, came in clock_answers.doubling():
        rows.append((data, spread, ratio.text().removeprefix("+"), ratio.n, came))
    return markdown(head, rows)


def phases(_: str) -> list[str]:
    """clock.md (b)."""
    head = ("data", "spread", "method", "time spent waiting, mean over rounds")
    head += ("waiting: method − no freezing, points", "accuracy: method − no freezing, points", "n")
    rows = []
    for data, spread, method, waited, waiting, accuracy in clock_answers.phases():
        found = (waiting.text(), accuracy.text(), accuracy.n)
        rows.append((data, spread, method, f"{waited:.0f} %", *found))
    return markdown(head, rows)


def draws(_: str) -> list[str]:
    """clock.md (c)."""
    lead = "accuracy at equal time: by size − other method [95 %]"
    head = ("data", "spread", "other method", lead, "n")
    rows = []
    for data, spread, other, found in clock_answers.draws():
        rows.append((data, spread, other, found.text(), found.n))
    return markdown(head, rows)


def cell(value) -> str:
    """Returns a value of check.json, with three digits of a number."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return (value or "").replace("|", "\\|")


# ------------------------------------------------------------------------------------------- pages

WRITERS = {
    "claims": claims,
    "accuracies": accuracies,
    "decays": decays,
    "verdicts": verdicts,
    "authors_clients": authors_clients,
    "labels": labels,
    "counts": counts,
    "published": published,
    "statements": statements,
    "doubling": doubling,
    "phases": phases,
    "draws": draws,
}
MARK = re.compile(rf"(<!-- ({'|'.join(WRITERS)})(?:: (\w+))? -->\n)(.*?)(<!-- end -->)", re.S)


def write(text: str) -> str:
    """Returns a page with its tables written again."""

    def table(match: re.Match) -> str:
        begin, kind, script, _, end = match.groups()
        lines = WRITERS[kind](script)
        return begin + "\n".join(lines) + "\n" + end

    return MARK.sub(table, text)


def pages() -> list[Path]:
    """Returns all pages that may hold a table."""
    return [*sorted(FOLDER.rglob("*.md")), FOLDER.parent / "theory" / "README.md"]


def main(argv: list[str]) -> int:
    """Returns the exit status: 1 if --check finds a file that would change."""
    parser = argparse.ArgumentParser(description="Writes the tables.", allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args(argv)
    files = {FOLDER / "differences.csv": differences()}
    for path in pages():
        files[path] = write(path.read_text())
    page = selection_answers.page(selection_answers.published())
    files[FOLDER / "selection.md"] = page
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(path.relative_to(FOLDER.parent))
    if given.check:
        return 1 if stale else 0
    for path in stale:
        path.write_text(files[path])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
