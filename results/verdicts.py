"""python results/verdicts.py [CLAIM ...]

What our runs say to each of the papers' 40 claims: the 'ours' cells of results/claims.md. claims.ini has their words, with a
placeholder for each number; the numbers come from the summary.json (and the small csv) files beside this one. `pages.py` writes
the cells into the page, and a test holds the page to them.

Brackets are 95 % Student intervals of paired differences over trials: the arms of a trial share partition, initial weights and
draws. `final | last ten` are the last round and the mean of the last ten rounds.
"""

import configparser
import functools
import itertools
import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import t as student

ROOT = Path(__file__).resolve().parent
PAIR = " \\| "  # between final and last ten; a bare | would end the cell of the table


# ------------------------------------------------------------------------------------------------------ reading the runs


@functools.cache
def summary(run: str) -> dict:
    """The summary.json of one run, a folder under results/."""
    return json.loads((ROOT / run / "summary.json").read_text())


def settings(run: str) -> list[str]:
    return list(summary(run)["results"])


def flags(setting: str) -> dict[str, str]:
    """'alpha=0.1 base=moon' -> the value of each flag."""
    return dict(word.split("=") for word in setting.split())


@functools.cache
def frame(path: str) -> pd.DataFrame:
    """A csv file under results/."""
    table = pd.read_csv(ROOT / path, dtype={"setting": str})
    return table.assign(setting=table.setting.fillna("")) if "setting" in table else table


def column(run: str, setting: str, arm: str, name: str) -> np.ndarray:
    """Numbers of one arm by trial (trials,): final, last10 or best accuracy in %, uploads, or TABLE:COLUMN of a csv file, where
    COLUMN may be a formula. What curves.csv has by trial and round (trials, rounds), without rounds that were not tested."""
    table, _, formula = name.rpartition(":")
    if not table:
        return np.array(summary(run)["results"][setting][arm][name])
    found = frame(f"{run}/{table}.csv")
    found = found[(found.setting == setting) & (found.get("method", arm) == arm)]
    found = found.assign(wanted=found.eval(formula)).dropna(subset="wanted")
    return (found.pivot(index="trial", columns="round", values="wanted") if table == "curves" else found.wanted).to_numpy()


# ------------------------------------------------------------------------------------------------------------ statistics


def bounds(d: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean of d (.., trials) and its two-sided 95 % Student interval."""
    mean, trials = d.mean(-1), d.shape[-1]
    half = student.ppf(0.975, trials - 1) * d.std(-1, ddof=1) / math.sqrt(trials)
    return mean, mean - half, mean + half


def ci(d: np.ndarray, digits: int = 1) -> str:
    """'+1.2 [-0.3, +2.7]'; of one trial without the brackets."""
    if len(d) == 1:
        return f"{d[0]:+.{digits}f}"
    return "{0:+.{n}f} [{1:+.{n}f}, {2:+.{n}f}]".format(*bounds(d), n=digits)


def pair(d: np.ndarray) -> str:
    """Two differences (2, trials): final | mean of the last ten rounds."""
    return PAIR.join(map(ci, d))


def spread(values: list[float]) -> str:
    """'91.76 +- 2.52', the mean and standard deviation over trials; of one trial the value."""
    std = f" +- {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{std}"


# ------------------------------------------------------------------- what a placeholder of claims.ini gives: the usual ones

TERM = re.compile(r"(?:(\S+/\S+) ?)?((?:\S+=\S+ ?)*)(.*)")  # RUN FLAG=VALUE .. A - B


def places(run: str, wanted: dict[str, str]) -> list[tuple[str, str]]:
    """(run, setting) wherever the wanted flags have these values, in all runs that fit `run`."""
    runs = sorted(path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob(f"{run}/summary.json"))
    return [(each, setting) for each in runs for setting in settings(each) if wanted.items() <= flags(setting).items()]


def values(place: str, words: str) -> np.ndarray:
    """'COLUMN [FLAG=VALUE ..] A', 'A - B' or 'A / B' at `place`, 'RUN [FLAG=VALUE ..]', in each setting (settings, trials).

    What follows 'less' is subtracted; a run, flag or arm on which it is silent is as before.
    """
    name, _, words = words.partition(" ")
    run, wanted, arms, terms = "", {}, "", []
    for term in f"{place} {words}".split(" less "):
        other, more, said = TERM.fullmatch(term).groups()
        run, wanted, arms = other or run, wanted | flags(more), said or arms
        each = [np.array([column(*at, arm, name) for at in places(run, wanted)]) for arm in re.split(" [-/] ", arms)]
        terms.append(functools.reduce(np.divide if " / " in arms else np.subtract, each))
    return functools.reduce(np.subtract, terms)


def final_and_last10(place: str, words: str) -> np.ndarray:
    """`values` of the accuracy in the last round and of its mean over the last ten (settings, 2, trials)."""
    return np.stack([values(place, f"{what} {words}") for what in ("final", "last10")], axis=1)


def said(d: np.ndarray, words: str, digits: int) -> str:
    """Trials (trials,) as `words` ask: a difference with its interval, else the mean."""
    return ci(d, digits) if re.search(" (-|less) ", words) else f"{d.mean():.{digits}f}"


def number(place: str, words: str, digits: int = 1) -> str:
    return said(values(place, words).mean(0), words, digits)


def each(place: str, words: str, digits: int = 1) -> str:
    """The number of each setting."""
    return ", ".join(said(d, words, digits) for d in values(place, words))


def interval(place: str, words: str, digits: int = 1) -> str:
    """The interval of what is a difference without saying so."""
    return ci(values(place, words).mean(0), digits)


def mean_std(place: str, words: str) -> str:
    return spread(values(place, words).mean(0))


def std(place: str, words: str) -> str:
    return f"{values(place, words).mean(0).std(ddof=1):.1f}"


def both(place: str, words: str) -> str:
    return pair(final_and_last10(place, words).mean(0))


def slopes(place: str, words: str) -> np.ndarray:
    """'FLAG/UNIT [FLAG=VALUE ..] A [- B]' -> least-squares slopes of the accuracy, final and last ten (2, trials)."""
    step, _, words = words.partition(" ")
    flag, unit = step.split("/")
    run, wanted, _ = TERM.fullmatch(f"{place} {words}").groups()
    x = np.array([float(flags(setting)[flag]) for _, setting in places(run, flags(wanted))])
    x, y = np.log2(x) if unit == "doubling" else x / float(unit), final_and_last10(place, words)
    return np.polyfit(x, y.reshape(len(x), -1), 1)[0].reshape(2, -1)


def slope(place: str, words: str) -> str:
    return pair(slopes(place, words))


# ------------------------------------------------------------------------------------------------------- those of one claim


def ranking(place: str, setting: str) -> str:
    """A2: the curriculum's accuracy by score, best first, and G less the best other score and L_pred, the paper's worst."""
    scores = dict.fromkeys(flags(each)["score"] for _, each in places(place, {}))
    levels = {score: number(place, f"last10 {setting} score={score} curriculum") for score in scores}
    ranked = sorted(levels, key=lambda score: -values(place, f"last10 {setting} score={score} curriculum").mean())
    rivals = dict.fromkeys((next(score for score in ranked if score != "G"), "L_pred"))
    apart = (f"- {score} {both(place, f'{setting} score=G curriculum less score={score}')}" for score in rivals)
    return f"{', '.join(f'{score} {levels[score]}' for score in ranked)}; G {'; '.join(apart)}"


def rising(place: str, words: str) -> str:
    """A4: in how many pacing families the slope of the last ten is above 0."""
    families = dict.fromkeys(flags(setting)["pacing"] for _, setting in places(place, {}))
    found = [slopes(f"{place} pacing={family}", words)[1].mean() > 0 for family in families]
    return f"{sum(found)} of {len(found)}"


def counts(place: str, words: str) -> str:
    """A6: in how many settings the interval is above 0, holds it, is below."""
    _, low, high = bounds(values(place, words))
    above, below = sum(low > 0), sum(high < 0)
    return f"above / holding / below 0: {above} / {len(low) - above - below} / {below}"


def quarters(place: str, words: str) -> str:
    """A11: mean accuracy over the first and over the last quarter of the rounds."""
    d = values(place, f"curves:accuracy {words}").mean(0)
    quarter = d.shape[1] // 4
    return f"{ci(d[:, :quarter].mean(1))} first quarter, {ci(d[:, -quarter:].mean(1))} last"


def dissimilarity(place: str, words: str) -> str:
    """A13: geometric means of Lambda over one half of the rounds, and their ratios."""
    half, _, order = words.partition(" ")
    log = {name: values(place, f"curves:log(lambda_{name}) {order}")[0] for name in ("easy", "all", "hard")}
    log = {name: np.array_split(x, 2, axis=1)[half == "second"].mean(1) for name, x in log.items()}
    levels = ", ".join(f"{name} {math.exp(x.mean()):.1f}" for name, x in log.items())
    apart = {other: np.exp(bounds(log["easy"] - log[other])) for other in ("all", "hard")}
    return f"{levels}; " + ", ".join("easy / {} {:.2f} [{:.2f}, {:.2f}]".format(other, *x) for other, x in apart.items())


def speed(place: str, words: str) -> str:
    """B3: rounds and uploads until a method has the target accuracy, and the first method's less the second's."""
    found, said = frame(f"{place}/results.csv").set_index(["method", "trial"])[["rounds", "updates"]], []
    for arm in words.split():
        rounds, uploads = found.loc[arm].mean()
        said.append(f"{arm} {rounds:.0f} rounds, {uploads:.0f} uploads in {found.loc[arm].rounds.count()} trials")
    first, second, *_ = words.split()
    d = found.loc[first] - found.loc[second]
    rounds, uploads = (ci(d[name].dropna().to_numpy()) for name in d)
    late = f"later or never in {sum(~(d.rounds <= 0))} of {len(d)} trials"
    return f"{', '.join(said)}; {first} - {second} {rounds} rounds, {uploads} uploads, {late}"


def extremes(place: str, arm: str) -> str:
    """B4: the setting with the best mean less that with the worst."""
    ranked = (sorted(own, key=np.mean) for own in final_and_last10(place, arm).swapaxes(0, 1))
    return pair([best - worst for worst, *_, best in ranked])


def agreement(_, words: str) -> str:
    """C4: how often two critical signals say the same."""
    name, other = words.split()
    found = frame("fedcl_fgn/agreement.csv").set_index(["signal", "and"])
    alike, by_chance, kappa, *_ = found.loc[f"fgn {name.replace('-', '_')} same", f"fim {other}"]
    return f"in {100 * alike:.0f} % of the rounds (by chance {100 * by_chance:.0f} %, kappa {kappa:.2f})"


def cost(*_) -> str:
    """C5: FGN against FedFIM."""
    found = frame("fedcl_fgn/cost.csv").set_index(["what", "pair"])
    fim, batch, own = (found.loc[what] for what in ("FedFIM", "FGN batch", "FGN per_sample"))
    faster, slower, memory = fim.seconds / batch.seconds, fim.seconds / own.seconds, own.MiB / fim.MiB
    said = f"batch FGN is {faster.min():.1f} to {faster.max():.0f} times faster; per-sample FGN is {slower.min():.1f} to"
    takes = f"takes {memory.min():.2f} to {memory.max():.2f} of its memory ({', '.join(fim.index)})"
    return f"{said} {slower.max():.1f} times faster and {takes}"


def distinct(place: str, words: str) -> str:
    """C7: the mean over the settings of several sweeps, each of which has the defaults."""
    points = np.unique(final_and_last10(place, words), axis=0)
    times = values(place, f"uploads {words.replace(' - ', ' / ')}").mean(1)
    return f"{len(points)} settings {pair(points.mean(0))}, {times.min():.1f} to {times.max():.1f} times the uploads"


def windows(place: str, words: str) -> str:
    """C8: how many rounds are critical, and how often two trials agree on a round."""
    [critical], shares = values(place, f"curves:critical {words}"), []
    rounds = critical.shape[1]
    for part in (critical[:, : rounds // 3], critical[:, rounds // 3 :]):
        same = np.mean([a == b for a, b in itertools.combinations(part, 2)])
        by_chance = np.mean([p * q + (1 - p) * (1 - q) for p, q in itertools.combinations(part.mean(1), 2)])
        shares.append(f"{100 * same:.0f} % in {{}} (by chance {100 * by_chance:.0f} %)")
    agree = " and ".join(shares).format("the first third", "the rest")
    few, many = critical.sum(1).min(), critical.sum(1).max()
    return f"{few:.0f} to {many:.0f} of {rounds} rounds critical; two seeds agree on {agree}"


def statements() -> dict[str, dict]:
    """The lines of theory/figures/check.json."""
    lines = json.loads((ROOT.parent / "theory" / "figures" / "check.json").read_text())
    return {line["statement"]: line for line in lines}


def check(_, words: str) -> str:
    """T: what theory/figures/check.json says of a statement in one of its fields, 'printed' with how tight the bound is."""
    field, _, name = words.partition(" ")
    line = statements()[name]
    return f"{name}: {line['printed']}, bound / truth {line['printed_ratio']:.2g}" if field == "printed" else line[field]


# ----------------------------------------------------------------------------------------------------------- the cells

FORMS = (each, interval, mean_std, std, both, slope, ranking, rising, counts, quarters, dissimilarity, speed, extremes)
FORMS = {form.__name__: form for form in (*FORMS, agreement, cost, distinct, windows, check)}


def cell(template: str) -> str:
    """A claim's words of claims.ini with the loops written out and the placeholders filled in."""

    def repeated(match):
        text, between, each = match.groups()
        return f"{between} ".join(text.replace("@", value) for value in each.split(", "))

    place, said = "", []
    for piece in re.split(r"(<.+?> |{.+?})", re.sub(r"\[([^[]+?)([;.,]) for (.+?)\]", repeated, template)):
        if piece.startswith("<"):
            place = piece[1:-2]
        elif piece.startswith("{"):
            name, digits, words = re.fullmatch(r"{(\S+?)(?:\.(\d))?(?: (.+))?}", piece).groups()
            form, words = (FORMS[name], words) if name in FORMS else (number, f"{name} {words}")
            said.append(form(place, words, **({"digits": int(digits)} if digits else {})))
        else:
            said.append(piece)
    return "".join(said)


CLAIMS = configparser.ConfigParser(interpolation=None)
CLAIMS.optionxform = str  # names of claims as they are
CLAIMS.read(ROOT / "claims.ini")
TEMPLATES = {name: " ".join(text.split()) for paper in CLAIMS.sections() for name, text in CLAIMS[paper].items()}
CELLS = {name: functools.partial(cell, template) for name, template in TEMPLATES.items()}


def main(names: list[str]) -> None:
    """Prints the cells of the named claims, or of all."""
    for name in names or CELLS:
        print(f"{name}: {CELLS[name]()}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
