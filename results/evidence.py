"""The evidence as arrays: what each run reached, by trial, and how two methods differ.

- trials.csv.xz: run, setting, method, trial, measure, value. The measures are accuracy in % in the
  final round, its mean of the last ten (last10), uploads, and a few of one script.
- rounds.csv.xz: all rounds of the runs that were made after rounds were kept. Uploads, samples,
  clock and megabytes are sums since round 1. The other columns belong to each round.
- runs.csv: run, commit, trials, hours, command. It says where each run comes from.

The methods of a trial have the same partition, initial weights and selections. So differences are
paired. This module also holds the words of the labels and comparisons, for tables and figures.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

FOLDER = Path(__file__).resolve().parent
KEYS = ["run", "setting", "method", "trial"]
TEXT = {"setting": str, "method": str}

CONFIRMED = "confirmed"
REFUTED = "refuted"
UNDECIDED = "undecided"
UNTESTED = "not tested at the paper's setting"
LABELS = (CONFIRMED, REFUTED, UNDECIDED, UNTESTED)  # of a claim
DIRECTIONS = ("for", "against", UNDECIDED)  # of a comparison, for its claim
EFFECTS = ("agrees", "excludes it", "too wide")  # of our difference, with the published effect
AREAS = ("auc_size", "auc_loss")  # of results/fedac_art/controls.py
MARGIN = 2.0  # points of accuracy that count as no difference


@functools.cache
def rounds() -> pd.DataFrame:
    """Returns rounds.csv.xz, with an empty word where nothing is swept."""
    return pd.read_csv(FOLDER / "rounds.csv.xz", dtype=TEXT).fillna({"setting": ""})


@functools.cache
def trials() -> pd.DataFrame:
    """Returns a table with one value in a row, indexed by run."""
    old = pd.read_csv(FOLDER / "trials.csv.xz", dtype=TEXT)
    new = summarise(rounds())
    is_older = old.run.isin(new.run) & old.measure.isin(new.measure)
    old = old[~is_older]
    return pd.concat([old, new]).fillna({"setting": "", "method": ""}).set_index("run")


def summarise(rounds: pd.DataFrame) -> pd.DataFrame:
    """Returns the measures of each trial, from its rounds.

    final, last10, first_quarter     tests: the last, of the last ten rounds, of the first quarter
    late                             tests after five sixths of the uploads
    uploads                          how many uploads there are
    clients_early_late               clients per round, first third - last (66 of 200 rounds each)
    rounds_to_base, uploads_to_base  what 'fedavg+cl' took to the last10 of its trial's 'fedavg'
    clients_to_base                  clients per round until then; NaN if it never came there
    rounds_to_target                 what a method took to the final of its trial's 'fedavg'
    best5_pooled                     own_pooled, mean of the five best tests
    rank_correlation                 mean over rounds
    noisy_gap, spearman, auc_*       of results/fedac_art/controls.py
    log_ratio_*                      of results/fedavg_curriculum/explain.py
    """
    goals = {}
    targets = {}
    rows = []
    for key, run in rounds.groupby(KEYS):  # 'fedavg' comes before 'fedavg+cl'
        run = run.sort_values("round")
        last = run["round"].max()
        tested = run.dropna(subset="accuracy")
        if len(tested) == 0:  # it diverged before its first test
            continue
        last_sixth = tested.uploads > 5 / 6 * run.uploads.max()
        values = {
            "first_quarter": tested.accuracy[tested["round"] <= last // 4].mean(),
            "final": tested.accuracy.iloc[-1],
            "last10": tested.accuracy[tested["round"] > last - 10].mean(),
            "late": tested.accuracy[last_sixth].mean(),
            "uploads": run.uploads.iloc[-1],
        }
        third = len(run) // 3
        values["clients_early_late"] = run.clients[:third].mean() - run.clients[-third:].mean()
        goals[key] = values["last10"]
        trial = (*key[:2], key[3])
        base = (*key[:2], key[2].partition("+")[0], key[3])
        if base in goals:
            t, uploads = first_at(run, goals[base])
            values["rounds_to_base"] = t
            values["uploads_to_base"] = uploads
            values["clients_to_base"] = uploads / t if t <= last else np.nan
        if key[2] == "fedavg":
            targets[trial] = values["final"]
        if trial in targets:
            values["rounds_to_target"], _ = first_at(run, targets[trial])
        values |= of_multi_phase(run) | of_clusters(run) | of_gradients(run)
        for measure, value in values.items():
            rows.append((*key, measure, value))
    return pd.DataFrame(rows, columns=[*KEYS, "measure", "value"])


def of_multi_phase(run: pd.DataFrame) -> dict[str, float]:
    """Returns the measures of fedcl_gmm_sync's columns, if a run has them."""
    run = run.dropna(axis="columns", how="all")
    values = {}
    if "own_pooled" in run:
        values["best5_pooled"] = run.own_pooled.nlargest(5).mean()
    if "rank_correlation" in run:
        values["rank_correlation"] = run.rank_correlation.mean()
    return values


def of_clusters(run: pd.DataFrame) -> dict[str, float]:
    """Returns the measures of results/fedac_art/controls.py, if a run has them.

    noisy_gap is the fraction of wrong labels in small minus in large clusters, in points. auc_gain
    is how much better the loss finds wrong labels.
    """
    measured = run.reindex(columns=["noisy_small", "noisy_large", "spearman", *AREAS]).max()
    values = measured.dropna().to_dict()
    if "noisy_small" in values:
        values["noisy_gap"] = 100 * (values.pop("noisy_small") - values.pop("noisy_large"))
    if "auc_loss" in values:
        values["auc_gain"] = values["auc_loss"] - values["auc_size"]
    return values


def of_gradients(run: pd.DataFrame) -> dict[str, float]:
    """Returns the measures of results/fedavg_curriculum/explain.py, if a run has them.

    They are means of log Lambda on easy samples minus log Lambda on hard ones, over the first half
    of the rounds and over the second.
    """
    measured = run.reindex(columns=["lambda_easy", "lambda_hard"]).dropna()
    if measured.empty:
        return {}
    ratio = np.log(measured.lambda_easy / measured.lambda_hard)
    half = len(ratio) // 2
    names = ("log_ratio_first_half", "log_ratio_second_half")
    return dict(zip(names, (ratio[:half].mean(), ratio[half:].mean()), strict=True))


def first_at(run: pd.DataFrame, goal: float) -> tuple[float, float]:
    """Returns the first tested round with this accuracy, and the uploads until then.

    If there is none, it returns one round more than there are, and all uploads.
    """
    reached = run[run.accuracy >= goal]
    if len(reached) == 0:
        return run["round"].max() + 1, run.uploads.iloc[-1]
    return reached["round"].iloc[0], reached.uploads.iloc[0]


def values(term: str, measure: str) -> pd.Series:
    """'RUN | FLAG=VALUE .. | METHOD' -> the measure by trial, mean over the settings that fit.

    RUN may be several, joined by '+': blocks of trials that follow one another.
    """
    runs, wanted, method = [part.strip() for part in term.split("|")]
    blocks = [of_one_run(run, wanted.split(), method, measure) for run in runs.split("+")]
    return pd.concat(blocks, keys=range(len(blocks)))


def of_one_run(run: str, wanted: list[str], method: str, measure: str) -> pd.Series:
    rows = trials().loc[[run]]
    rows = rows[(rows.method == method) & (rows.measure == measure)]
    fits = [set(wanted) <= set(setting.split()) for setting in rows.setting]
    if not any(fits):
        raise KeyError(f"{run} {wanted} {method}: no {measure} in the evidence")
    return rows[fits].groupby("trial").value.mean()


def difference(plus: str, minus: str, measure: str) -> pd.Series:
    """Terms joined by ' & ' on either side are added up: the paired difference by trial.

    Only trials count that all terms have.
    """
    total = 0
    for term in plus.split(" & "):
        total = total + values(term, measure)
    for term in minus.split(" & "):
        if term:
            total = total - values(term, measure)
    return total.dropna()


def markdown(head: Sequence, rows: list[Sequence]) -> list[str]:
    """Returns a table's lines."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return lines


@dataclass
class Interval:
    """The mean of n paired differences, its 95 % Student interval, and two-sided p."""

    mean: float
    low: float
    high: float
    p: float
    n: int

    def text(self, digits=1) -> str:
        """'+4.1 [-0.3, 5.6]'"""
        return f"{self.mean:+.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return (self.high - self.mean) / stats.t(self.n - 1).ppf(0.975)

    def p_equal(self, published: float, errors: Sequence[float] = (), n: int = 3) -> float:
        """Returns p of Welch's t-test that the published effect is ours.

        errors  the standard error of each published mean over n trials. Without them the effect is
                an exact number
        """
        variances = np.array([self.error, *errors]) ** 2
        total = variances.sum()
        freedom = np.array([self.n - 1] + [n - 1] * len(errors))
        df = total**2 / (variances**2 / freedom).sum()  # Welch and Satterthwaite
        return float(2 * stats.t(df).sf(abs(self.mean - published) / np.sqrt(total)))

    def effect(self, p_equal: float) -> str:
        """Returns one of EFFECTS, from the p of `p_equal`."""
        if p_equal < 0.05:
            return "excludes it"
        return "too wide" if self.low <= 0 <= self.high else "agrees"

    def p_below(self, margin: float) -> float:
        """Returns p of a one-sided t-test: small if the mean is below the margin."""
        return float(stats.t(self.n - 1).sf((margin - self.mean) / self.error))

    def p_within(self, margin: float) -> float:
        """Returns p of two one-sided t-tests: small if the mean is between -margin and margin."""
        return float(stats.t(self.n - 1).sf((margin - abs(self.mean)) / self.error))


def interval(d: pd.Series | np.ndarray) -> Interval:
    test = stats.ttest_1samp(d, 0)
    low, high = test.confidence_interval(0.95)
    return Interval(d.mean(), low, high, test.pvalue, len(d))
