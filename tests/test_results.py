"""The pages' numbers against the evidence, by other formulas; every claim has a command."""

import functools
import importlib
import itertools
import re
import shlex
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import test_english
from PIL import Image
from scipy.special import stdtr, stdtrit

from results import (
    clock_answers,
    evidence,
    figures,
    front,
    idea,
    reproduce,
    selection_answers,
    tables,
)
from results.fedcl_fgn import rules

ROOT = evidence.FOLDER.parent
WORKS = reproduce.read_works()
PATH_OF_A_MACHINE = re.compile(r"(?:^|[\s=\"'])(?:/|~/|[A-Za-z]:\\|\\\\)")
PAPERS = {"A": 16, "B": 6, "C": 11, "D": 5, "T": 4}  # claims of each paper, and three controls
OURS = {"B5", "C11", "D5"}  # no claims of a paper: among E1, E2, ..
HALVES = {"A1b", "A6b", "A6c", "A7b", "A9b", "A10c", "A12b", "A13b", "A16b", "D4b"}


NEW_MNIST = "fedcl_gmm_sync/mnist-all-alpha1"


@functools.cache
def read_evidence(name: str) -> pd.DataFrame:
    return pd.read_csv(ROOT / "results" / name, keep_default_na=False, dtype=str)


def raw(run: str, setting: str, method: str) -> np.ndarray:
    """The mean of the last ten rounds by trial, straight from the files; of joined runs, too."""
    if "+" in run:
        return np.concatenate([raw(block, setting, method) for block in run.split("+")])
    old = read_evidence("trials.csv.xz").query(
        "run == @run and setting == @setting and method == @method"
    )
    found = old[old.measure == "last10"]
    if len(found):
        return found.sort_values("trial").value.astype(float).to_numpy()
    rounds = read_evidence("rounds.csv.xz").query(
        "run == @run and setting == @setting and method == @method"
    )
    values = []
    for _, rows in rounds.groupby("trial"):
        last = rows["round"].astype(int).max()
        tested = rows[(rows["round"].astype(int) > last - 10) & (rows.accuracy != "")]
        values.append(tested.accuracy.astype(float).mean())
    return np.array(values)


def test_an_interval_is_students():
    """By hand: d = 1, 2, 3, 6 has mean 3, standard error sqrt(7/6), t(.975, 3) = 3.18245."""
    found = evidence.interval(np.array([1.0, 2.0, 3.0, 6.0]))
    half = 3.182446305284263 * np.sqrt(7 / 6)
    assert found.mean == 3
    assert found.low == pytest.approx(3 - half)
    assert found.high == pytest.approx(3 + half)
    assert found.p == pytest.approx(2 * stdtr(3, -3 / np.sqrt(7 / 6)))
    assert found.n == 4


@pytest.mark.parametrize(
    ("claim", "run", "setting", "a", "b"),
    [
        ("E7", "fedavg_curriculum/cifar10-table4-eta0.004", "", "curriculum", "vanilla"),
        ("A16b", "client_curriculum/cifar10-fig7", "", "client", "vanilla"),
        ("E2", f"{NEW_MNIST}-a+{NEW_MNIST}-b", "", "fedcl", "fedgen-e"),
    ],
)
def test_the_shown_difference_of_a_claim_is_that_of_its_trials(claim, run, setting, a, b):
    d = raw(run, setting, a) - raw(run, setting, b)
    shown = f"| {d.mean():+.1f} ["
    lines = (ROOT / "results" / "claims.md").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"| {claim} "))
    row = tables.telling(claim).iloc[0]
    assert row.interval.mean == pytest.approx(d.mean())
    assert row.interval.n == len(d)
    assert shown in line


def test_the_authors_clients_are_those_of_whole_places():
    """At 0.05: the places with their controls, one trial each. `random` is not planned at 0.9."""
    made = set(pd.read_csv(ROOT / "results" / "runs.csv").run)
    places = [f"fedavg_curriculum/cifar10-even0.05-{number}" for number in range(1, 7)]
    whole = [place for place in places if {place, f"{place}-controls"} <= made]
    curriculum = raw("+".join(whole), "", "curriculum")
    controls = "+".join(f"{place}-controls" for place in whole)
    line = next(line for line in tables.authors_clients("") if line.startswith("| 0.05 "))
    cells = [cell.strip() for cell in line.split("|")][1:-1]
    assert cells[-1] == str(len(whole))
    for cell, method in ((cells[3], "random"), (cells[5], "shuffled")):
        d = curriculum - raw(controls, "", method)
        assert cell.startswith(f"{d.mean():+.1f}")
        assert ("[" in cell) == (len(whole) > 2)


def test_blocks_of_trials_follow_one_another():
    runs = [f"fedavg_curriculum/cifar10-exposure-new{block}" for block in (1, 2, 3)]
    joined = evidence.values(f"{'+'.join(runs)}||curriculum", "last10")
    parts = [raw(run, "", "curriculum") for run in runs]
    np.testing.assert_allclose(joined, np.concatenate(parts))


def test_differences_are_taken_within_trials_that_all_have(monkeypatch):
    of_a = {3: 50.0, 0: 61.0, 2: 45.0}
    of_b = {1: 20.0, 2: 44.0, 0: 57.0}
    rows = []
    for run, gain in (("one", 0), ("two", 10)):
        for method, accuracies in (("z", of_a), ("b", of_b)):
            for trial, accuracy in accuracies.items():
                row = {"run": run, "setting": "", "method": method, "trial": trial}
                rows.append(row | {"measure": "final", "value": accuracy + gain * (method == "z")})
    monkeypatch.setattr(evidence, "trials", lambda: pd.DataFrame(rows).set_index("run"))
    found = evidence.difference("one+two||z", "one+two||b", "final")
    assert found.tolist() == [61 - 57, 45 - 44, 71 - 57, 55 - 44]


UP = [5, 6, 7, 6]
DOWN = [-5, -6, -7, -6]
ANY = [-3, 3, 2, -3]
BIT = [2, 3, 2, 3]
EDGE = [1, 3, 3, 5]
FLAT = [0, 1, 0.5, 0.5]
LOW = [0.8, 1, 1.3, 0.9]


@pytest.mark.parametrize(
    ("differences", "signs", "label", "tally", "means", "shown"),
    [
        ([UP, BIT], "++", "confirmed", "2, 0", "2 of 2", "1 +2.5 [1.6, 3.4] 4"),
        ([UP, BIT], "+-", "refuted", "1, 1", "1 of 2", "1 +2.5 [1.6, 3.4] 4"),
        ([ANY, UP], "++", "undecided", "1, 0", "1 of 2", "0 -0.2 [-5.3, 4.8] 4"),
        ([DOWN], "-", "confirmed", "1, 0", "1 of 1", "0 -6.0 [-7.3, -4.7] 4"),
        ([ANY, DOWN], "00", "refuted", "0, 1", "1 of 2", "1 -6.0 [-7.3, -4.7] 4"),
        ([ANY], "0", "undecided", "0, 0", "1 of 1", "0 -0.2 [-5.3, 4.8] 4"),
        ([DOWN], "n", "confirmed", "1, 0", "1 of 1", "0 -6.0 [-7.3, -4.7] 4"),  # not above
        ([UP, DOWN], "nn", "refuted", "1, 1", "1 of 2", "0 +6.0 [4.7, 7.3] 4"),
        # p is 0.03: enough for a claim, without Holm; not enough against one of three
        ([EDGE] * 3, "+++", "confirmed", "3, 0", "3 of 3", "0 +3.0 [0.4, 5.6] 4"),
        ([EDGE] * 3, "---", "undecided", "0, 0", "0 of 3", "0 +3.0 [0.4, 5.6] 4"),
        # within 2 points, on older trials and on trials that were planned with this margin
        ([BIT, FLAT], "00", "refuted", "0, 1", "1 of 2", "0 +2.5 [1.6, 3.4] 4"),
        ([FLAT], "0", "undecided", "0, 0", "1 of 1", "0 +0.5 [-0.1, 1.1] 4"),
        ([FLAT], "z", "confirmed", "1, 0", "1 of 1", "0 +0.5 [-0.1, 1.1] 4"),
        ([FLAT], "m", "confirmed", "1, 0", "1 of 1", "0 +0.5 [-0.1, 1.1] 4"),
        ([LOW], "z", "confirmed", "1, 0", "1 of 1", "0 +1.0 [0.7, 1.3] 4"),  # not 0, but small
        ([LOW], "0", "refuted", "0, 1", "1 of 1", "0 +1.0 [0.7, 1.3] 4"),
        ([ANY], "m", "undecided", "0, 0", "1 of 1", "0 -0.2 [-5.3, 4.8] 4"),
    ],
)
def test_the_rule(monkeypatch, differences, signs, label, tally, means, shown):
    """And the comparison that a table shows: the one that speaks most against the claim.

    Signs: n is "not above"; z and m are 0 and n on trials that were planned with the margin.
    """
    rows = []
    for place, sign in enumerate(signs):
        for claim in ("B1", "A2", "A9b"):
            row = {"claim": claim, "what": str(place), "measure": "last10", "paper": ""}
            sign_and_margin = {"n": ("<=", ""), "z": ("0", "2"), "m": ("<=", "2")}
            row["sign"], row["margin"] = sign_and_margin.get(sign, (sign, ""))
            rows.append(row)
    rows = pd.DataFrame(rows).assign(plus=lambda table: table.what, minus="")
    monkeypatch.setattr(tables, "COMPARISONS", rows)
    monkeypatch.setattr(tables, "difference", lambda plus, *_: np.array(differences[int(plus)]))
    assert tables.label("B1") == label
    assert tables.tally("B1") == tally
    assert tables.means("B1") == means
    assert " ".join(tables.outcome("B1")) == shown
    for claim in ("A2", "A9b"):  # a smaller setting, and other clients: whatever they show
        assert tables.label(claim) == "not tested at the paper's setting"


def test_a_family_of_halves_is_one_for_holm():
    """A10c's p is 0.015, the third smallest of eight with those of A10 and A10b: times six."""
    rows = tables.family("A10c").set_index("what")
    d = raw("client_curriculum/cifar10-fig5", "alpha=0.2", "client")
    d = d - raw("client_curriculum/cifar10-fig5", "alpha=0.2", "vanilla")
    row = rows.loc["Dir(0.2): client curriculum − vanilla"]
    assert row.interval.mean == pytest.approx(d.mean())
    assert row.p_holm == pytest.approx(6 * row.interval.p)
    assert row.effect == "excludes it"  # the paper has 5.7


def test_a_family_has_a_cell_once():
    table = tables.COMPARISONS.copy()
    table["cell"] = table.what.str.replace(r", (new trials|the trials before)", "", regex=True)
    assert not table.duplicated(["claim", "cell", "measure"]).any()


@pytest.mark.parametrize(
    ("differences", "published", "effect"),
    [(UP, 5, "agrees"), (UP, 4, "excludes it"), (ANY, 4, "too wide"), (ANY, -6, "excludes it")],
)
def test_an_interval_and_an_exact_published_effect(differences, published, effect):
    """UP's is 4.7 to 7.3, ANY's -5.3 to 4.8."""
    found = evidence.interval(np.array(differences))
    assert found.effect(found.p_equal(published)) == effect


def test_a_published_effect_has_an_error_of_its_own():
    """Welch's test of scipy on two samples: our differences, and three numbers of the paper.

    A second published method adds its variance, with its own degrees of freedom: by hand.
    """
    from scipy.stats import t, ttest_ind

    ours = np.array([1.0, 2.0, 3.0, 6.0])
    theirs = np.array([4.0, 7.5, 5.0])
    found = evidence.interval(ours)
    error = theirs.std(ddof=1) / np.sqrt(3)
    wanted = ttest_ind(ours, theirs, equal_var=False).pvalue
    assert found.p_equal(theirs.mean(), [error], 3) == pytest.approx(wanted)
    a, b, c = 7 / 6, 0.5**2, 0.8**2
    df = (a + b + c) ** 2 / (a**2 / 3 + b**2 / 2 + c**2 / 2)
    wanted = 2 * t.sf(1.5 / np.sqrt(a + b + c), df)
    assert found.p_equal(4.5, [0.5, 0.8], 3) == pytest.approx(wanted)


def test_published_deviations_are_those_of_their_trials():
    """The first paper's code divides by n: three numbers of population deviation s have s / root 2.

    The multi-phase paper has ten trials.
    """
    sample = np.array([50.0, 51.0, 54.0])
    error = sample.std(ddof=1) / np.sqrt(3)
    row = tables.family("A15").iloc[0]
    halves = [0.58 / np.sqrt(2), 0.86 / np.sqrt(2)]
    assert row.p_equal == pytest.approx(row.interval.p_equal(3.9, halves, 3))
    assert error == pytest.approx(sample.std() / np.sqrt(2))
    row = tables.family("E20").iloc[0]
    tenths = [0.81 / np.sqrt(10), 1.56 / np.sqrt(10)]
    assert row.p_equal == pytest.approx(row.interval.p_equal(4.6, tenths, 10))


def test_no_difference_is_two_one_sided_tests():
    from scipy.stats import ttest_1samp

    for d in ([0.5, 1.5, 1.0, 0.2], [-1.0, 0.5, -2.5, 0.1]):
        above = ttest_1samp(d, -2, alternative="greater").pvalue
        below = ttest_1samp(d, 2, alternative="less").pvalue
        found = evidence.interval(np.array(d))
        assert found.p_within(2) == pytest.approx(max(above, below))
        assert found.p_below(2) == pytest.approx(below)
    within = tables.family("B4").p_margin
    assert within.notna().all()
    assert tables.effects("B4").endswith(f"{(within < 0.05).sum()} of 6")
    assert tables.family("C2").p_margin.isna().all()  # uploads are no accuracy


def test_words_are_counted_by_paper_and_apart_for_other_data():
    """A2 and A9b are on other data or clients; ours count nowhere."""
    rows = [line.split(" | ") for line in tables.published("")[2:]]
    found = {(row[0].strip("| "), row[1]): row[2:] for row in rows}
    wanted = {}
    curricula = ["A1", "A1b", "A3", "A6", "A7", "A9", "A10", "A12", "A15", "A16"]
    for script, scale, words in [
        ("curricula", "its setting", curricula),
        ("multi-phase", "its setting", ["B1", "B2", "B3"]),
        ("FedAC", "other data or clients", ["D1", "D2"]),
    ]:
        effects = [effect for claim in words for effect in tables.family(claim).effect]
        wanted[script, scale] = [effects.count(name) for name in evidence.EFFECTS]
    for key, numbers in wanted.items():
        assert [int(cell.strip(" |")) for cell in found[key]] == numbers
    assert len(found) == 4


def test_a_claim_that_was_formed_afterwards_says_so():
    assert tables.said("A15") == "confirmed, asked afterwards"
    assert tables.said("A1") == "confirmed"


def test_equal_uploads_are_compared_over_the_same_share_of_them():
    """The tests beyond 800 of 960 uploads: FedCL takes 11 rounds for what takes FedAvg 60."""
    rounds = pd.read_csv(ROOT / "results" / "rounds.csv.xz", low_memory=False)
    rounds = rounds[(rounds.run == "fedcl_fgn/equal-digits") & (rounds.uploads > 800)]
    late = rounds.groupby(["method", "trial"]).accuracy.mean()
    row = tables.family("E14").set_index("what").loc["digits: FedAvg − FedCL"]
    assert row.interval.mean == pytest.approx((late["fedavg"] - late["fedavg+cl"]).mean())


def test_what_the_signals_cost_and_how_they_agree_is_in_their_files():
    def column(file: str, name: str, *keys: str) -> list[float]:
        """A column of one of the files, of the lines that begin with these keys."""
        head, *lines = (ROOT / "results" / "fedcl_fgn" / file).read_text().splitlines()
        place = head.split(",").index(name)
        lines = [line.split(",") for line in lines]
        return [float(line[place]) for line in lines if set(keys) <= set(line[:2])]

    percents = []
    for reading in ("batch", "per_sample"):
        for name in ("alike", "by chance"):
            [share] = column("agreement.csv", name, f"fgn {reading} same", "fim other")
            percents.append(str(round(100 * share)))
    assert re.findall(r"\d+", tables.outcome("C4")[1]) == percents
    fim = np.array(column("cost.csv", "seconds", "FedFIM"))
    batch = fim / column("cost.csv", "seconds", "FGN batch")
    single = fim / column("cost.csv", "seconds", "FGN per_sample")
    memory = np.divide(
        column("cost.csv", "MiB", "FedFIM"), column("cost.csv", "MiB", "FGN per_sample")
    )
    shown = [float(number) for number in re.findall(r"[\d.]+", tables.outcome("C5")[1])]
    wanted = [batch.min(), batch.max(), single.min(), single.max(), memory.mean()]
    np.testing.assert_allclose(shown, wanted, rtol=0.005)
    stds = []
    for method in ("fedavg+cl", "fedavg"):
        accuracies = raw("fedcl_fgn/fmnist-alpha", "alpha=0.1", method)
        assert len(accuracies) == 5
        stds.append(f"{np.sqrt(((accuracies - accuracies.mean()) ** 2).sum() / 4):.1f}")
    assert re.findall(r"\d\.\d", tables.outcome("C8")[1]) == stds


def test_a_page_shows_our_accuracies_next_to_the_published_ones():
    accuracies = raw(f"{NEW_MNIST}-a+{NEW_MNIST}-b", "", "fedavg")
    ours = f"{accuracies.mean():.1f} ± {accuracies.std(ddof=1):.1f}"
    line = f"| MNIST, alpha 1 | FedAvg | {ours} | 10 | 94.7 ± 0.5 | Table II |"
    assert line in tables.accuracies("fedcl_gmm_sync")


def test_a_cell_has_at_most_20_words():
    for page in tables.pages():
        for match in tables.MARK.finditer(page.read_text()):
            for line in match[4].splitlines():
                assert not re.search(r"(?<![\d.])\.\d", line), line  # 0.6, not .6
                assert all(len(cell.split()) <= 20 for cell in line.split("|")), line


def test_pages_are_what_the_program_writes():
    assert tables.main(["--check"]) == 0


def test_every_claim_of_the_papers_is_judged_or_ours():
    names = set()
    for paper, count in PAPERS.items():
        names.update(f"{paper}{number + 1}" for number in range(count))
    papers = tables.CLAIMS[tables.CLAIMS.scale != "own"].index
    assert set(papers) == names - OURS | HALVES


def test_a_figure_has_all_comparisons_at_the_papers_setting_and_where_they_are_few(monkeypatch):
    panels = {}

    def keep(axis, rows, title):
        panels[title] = [(row.claim, row.what) for row in rows]

    monkeypatch.setattr(figures, "draw_panel", keep)
    monkeypatch.setattr(figures.plt.Figure, "savefig", lambda *_, **__: None)
    figures.draw("fedcl_gmm_sync")
    at_papers, smaller, ours = panels.values()
    table = tables.COMPARISONS
    rows = table[table.claim.isin(["B1", "B2"])]
    assert at_papers == list(zip(rows.claim, rows.what, strict=True))  # 9 and 1
    rows = table[table.claim == "B4"]
    assert smaller == list(zip(rows.claim, rows.what, strict=True))  # six: few
    rows = table[table.claim.isin(["E1", "E2", "E20", "E24", "E40", "E42"])]
    assert ours == list(zip(rows.claim, rows.what, strict=True))  # twenty: few
    panels.clear()
    figures.draw("fedavg_curriculum")
    rows = panels["Our questions (one row each)"]
    claims = [claim for claim, _ in rows]
    assert len(claims) == len(set(claims)) > 10
    assert all(tables.outcome(claim)[0].startswith(what) for claim, what in rows)


def row_of_differences(place: str) -> dict:
    """The row of differences.csv of 'CLAIM: how its name begins'."""
    claim, _, start = place.partition(": ")
    table = pd.read_csv(ROOT / "results" / "differences.csv")
    rows = table[(table.claim == claim) & table.difference.str.startswith(start)]
    [row] = rows.to_dict("records")
    return row


def test_the_front_figure_says_what_its_rows_show():
    """Every gain is smaller than the published one. Both colours of a row are one measure."""
    gains = 0
    losses = 0
    controls = 0
    for row in front.ROWS:
        gain = row_of_differences(row.gain)
        for place in row.controls.values():
            control = row_of_differences(place)
            assert control["measure"] == gain["measure"]
            gains += control["low"] > 0
            losses += control["high"] < 0 and control["p_holm"] < 0.05
            controls += 1
        if row.of_paper:
            assert gain["mean"] < front.published(row.of_paper, tables.find(row.gain))
        else:
            assert np.isnan(gain["paper"])
    over = f"{gains} gains, {losses} losses, {controls - gains - losses} undecided"
    said = "All gains over FedAvg are smaller than published."
    assert front.title() == f"{said} Over controls: {over}"


def test_the_picture_of_the_idea_can_be_made(real_data, tmp_path, monkeypatch):
    """From one round of everything. It has three panels of two sizes."""
    monkeypatch.setattr(idea, "ROUNDS", 1)
    monkeypatch.setattr(idea, "FEDCL", "--method cl --trials 2 --rounds 2 --jobs 1")
    monkeypatch.setattr(idea, "FOLDER", tmp_path)
    idea.main(str(real_data))
    with Image.open(tmp_path / "idea.png") as image:
        assert image.size == (1008, 816)


def test_a_published_interval_is_welchs():
    """Of three numbers with the published population deviations, and of ten."""
    from scipy.stats import ttest_ind

    three = np.array([-1, 0, 1]) * np.sqrt(1.5)  # population deviation 1
    ten = np.repeat([-1, 1], 5) * np.sqrt(0.9)  # sample deviation 1
    for place, sample, stds in [
        ("A15: IID", three, (0.58, 0.86)),
        ("E20: alpha 0.1", ten, (0.12, 0.84)),
    ]:
        test = ttest_ind(stds[0] * sample, stds[1] * sample, equal_var=False)
        half = test.confidence_interval(0.95).high
        assert front.half_width(tables.find(place)) == pytest.approx(half)
    assert front.half_width(tables.find("E15: FedAC")) == 0  # it publishes no deviation


def test_the_verdict_is_one_line_for_each_algorithm():
    head, _, *lines = tables.verdicts("")
    for line, about in zip(lines, tables.VERDICTS.itertuples(), strict=True):
        _, name, use, gain, control, *_ = [cell.strip() for cell in line.split("|")]
        assert (ROOT / "results" / about.script / "README.md").exists()
        assert (name, use) == (f"[{about.name}]({about.script}/README.md)", about.use)
        for cell, place in ((gain, about.gain), (control, about.control)):
            row = row_of_differences(place)
            assert f": {row['mean']:+.1f} [" in cell
            assert f"n = {row['trials']}" in cell
            assert (", undecided" in cell) == (row["direction"] == "undecided")
    assert len(lines) == 5


def clocked(accuracies: list, seconds: list, waited: float) -> pd.DataFrame:
    """A run's rounds as `clock_answers.made` gives them."""
    table = pd.DataFrame({"accuracy": accuracies, "seconds": seconds, "waited": waited})
    return table.assign(round=range(1, len(table) + 1))


def test_the_clocks_trials_are_those_of_the_rounds(monkeypatch):
    """Seconds are summed in each trial and method, whatever the order of the rows."""
    rows = []
    for trial, method, t in itertools.product(range(2), ["a", "b"], [2, 1, 3]):
        costs = {f"clock_{spread}": spread * t + trial for spread in (0.5, 1.5)}
        waits = {f"waiting_{spread}": 0.1 * t for spread in (0.5, 1.5)}
        whose = {"run": "x-fmnist", "setting": "", "trial": trial, "method": method, "round": t}
        rows.append(whose | costs | waits)
    monkeypatch.setattr(clock_answers, "rounds", lambda: pd.DataFrame(rows))
    found = []
    for data, spread, trials in clock_answers.made("x-{}"):
        assert data == "Fashion-MNIST"
        for trial, arms in enumerate(trials):
            for method, of_run in arms.items():
                sums = np.cumsum([spread * t + trial for t in (1, 2, 3)])
                assert of_run.seconds.tolist() == pytest.approx(sums)
                assert of_run.waited.tolist() == pytest.approx([10, 20, 30])
                found.append((spread, trial, method))
    assert found == [*itertools.product([0.5, 1.5], range(2), ["a", "b"])]


def test_the_clocks_answers_by_hand(monkeypatch):
    """Two trials. FedCL comes to FedAvg's mean of 20 after 8 of 4 s, and never, in 16 of 4 s."""

    def pretend(trials: list) -> None:
        monkeypatch.setattr(clock_answers, "made", lambda _: [("CIFAR-10", 0.5, trials)])

    arms = {"fedavg": clocked([10, 30], [2, 4], 0.0)}
    came = arms | {"fedavg+cl": clocked([5, 20], [4, 8], 0.0)}
    never = arms | {"fedavg+cl": clocked([5, 10], [4, 16], 0.0)}
    pretend([came, never])
    [(data, spread, ratio, reached)] = clock_answers.doubling()
    assert (data, spread, reached) == ("CIFAR-10", 0.5, "1 of 2")
    assert ratio.mean == pytest.approx(np.sqrt(2 * 4))  # 8 / 4 and 16 / 4

    trials = []
    for waited in (10.0, 30.0):
        arms = {"fedcl": clocked([40 + waited], [1], waited)}
        arms["fedcl-fresh"] = clocked([45 + waited], [1], waited + 5)
        arms["fedcl-nofreeze"] = clocked([58], [1], 40.0)
        trials.append(arms)
    pretend(trials)
    printed, fresh = clock_answers.phases()
    assert printed[2:4] == ("phases as published", 20)
    assert [found.mean for found in printed[4:]] == [20 - 40, 60 - 58]
    assert [found.mean for found in fresh[4:]] == [25 - 40, 65 - 58]

    trial = {"fedavg size": clocked([40, 50, 90], [2, 5, 9], 0.0)}
    trial["fedavg"] = clocked([30, 41], [3, 6], 0.0)  # the fastest: tests after 6 s do not count
    trial["fedavg+longer"] = clocked([45, 80], [4, 7], 0.0)
    other = trial | {name: clocked([41, 47], [3, 6], 0.0) for name in ("fedavg", "fedavg+longer")}
    pretend([trial, other])
    leads = {arm: found.mean for _, _, arm, found in clock_answers.draws()}
    assert leads == {"FedAvg": (9 + 3) / 2, "FedAvg, equal samples": (5 + 3) / 2}


def test_every_comparison_finds_its_trials():
    for claim in tables.CLAIMS.index:
        for row in tables.family(claim).itertuples():
            assert np.isfinite(row.interval.mean), (claim, row.what)
            assert row.interval.n >= 3


def test_what_it_took_to_the_bases_accuracy():
    """By hand: FedAvg's tests have the mean 20."""

    def rows(method: str, accuracies: list, clients: list) -> list[dict]:
        uploads = np.cumsum(clients)
        rows = []
        for t, accuracy in enumerate(accuracies):
            row = {"run": "r", "setting": "", "method": method, "trial": 0, "round": t + 1}
            row |= {"clients": clients[t], "uploads": uploads[t], "accuracy": accuracy}
            rows.append(row)
        return rows

    table = rows("fedavg", [10, 20, 30], [2, 2, 2])
    table += rows("fedavg+cl", [25, 5, 5], [4, 2, 1])
    table += rows("fedavg+random", [1, 2, 3], [2, 2, 2])
    table += rows("diverged", [np.nan], [2])
    table += rows("rising", range(1, 10), [2] * 9)
    for row in table[-9:]:
        row["own_pooled"] = 100 - row["accuracy"]
        row["rank_correlation"] = row["accuracy"] / 10
        row |= {"lambda_easy": 8.0, "lambda_hard": 2.0}
    last = {"lambda_easy": 2.0}
    last |= {"noisy_small": 0.5, "noisy_large": 0.25, "auc_size": 0.5, "auc_loss": 0.75}
    table[-1] |= last  # of results/fedac_art/controls.py
    found = evidence.summarise(pd.DataFrame(table)).set_index(["method", "measure"]).value
    assert found["fedavg", "last10"] == 20 and found["fedavg", "final"] == 30
    assert found["fedavg", "rounds_to_base"] == 2 and found["fedavg", "uploads_to_base"] == 4
    assert found["fedavg+cl", "rounds_to_base"] == 1 and found["fedavg+cl", "uploads_to_base"] == 4
    assert found["fedavg", "clients_to_base"] == 2 and found["fedavg+cl", "clients_to_base"] == 4
    assert np.isnan(found["fedavg+random", "clients_to_base"])
    assert found["fedavg+cl", "clients_early_late"] == 3
    assert found["fedavg+cl", "late"] == 5  # the tests after 5/6 of 7 uploads
    assert found["fedavg+random", "rounds_to_base"] == 4  # never
    assert found["rising", "first_quarter"] == 1.5  # two rounds of nine
    targets = found.xs("rounds_to_target", level="measure")  # FedAvg ends at 30
    assert targets.to_dict() == {"fedavg": 3, "fedavg+cl": 4, "fedavg+random": 4, "rising": 10}
    assert found["rising", "best5_pooled"] == 97  # of 99, 98, .. 91
    assert found["rising", "rank_correlation"] == 0.5  # of 0.1, 0.2, .. 0.9
    assert found["rising", "log_ratio_first_half"] == pytest.approx(np.log(4))  # four rounds
    assert found["rising", "log_ratio_second_half"] == pytest.approx(np.log([4, 4, 4, 4, 1]).mean())
    assert found["rising", "noisy_gap"] == 25 and found["rising", "auc_gain"] == 0.25
    assert not {("fedavg", "best5_pooled"), ("fedavg", "rank_correlation")} & {*found.index}
    assert "diverged" not in found.index.get_level_values("method")


# ------------------------------------------------------------------------------------ selection.md


def pretend_runs(trials: int) -> pd.DataFrame:
    """Rounds as published, in random order: `size` gains 6 points less a third of the trial."""
    rows = []
    places = ("cifar10-0.1", "cifar10-0.5", "fmnist-0.1")
    for key, trial in itertools.product(places, range(trials)):
        for ending, method, gained in (
            ("", "fedavg", 0),
            ("", "fedavg size", 6 - trial / 3),
            ("-detection", "fedavg+cl", 2),
            ("-detection", "fedavg+constant", (-1) ** trial),
        ):
            run = f"fedcl_fgn/rules-{key}-{trial + 1}{ending}"
            for t in range(1, 13):
                row = {"run": run, "setting": "", "method": method, "trial": 0, "round": t}
                row |= {"accuracy": 50 + gained, "uploads": 16 * t, "samples": 100 * t, "clock": t}
                rows.append(row | {"received_mb": 2 * t, "sent_mb": t, "scored": 7})
    rows.append(rows[-1] | {"run": "fedcl_fgn/other"})
    return pd.DataFrame(rows).sample(frac=1, random_state=0)


def test_the_page_of_rules_by_hand(monkeypatch):
    monkeypatch.setattr(evidence, "rounds", lambda: pretend_runs(3))
    page = selection_answers.page(selection_answers.published())
    d = np.array([6, 6 - 1 / 3, 6 - 2 / 3])
    half = 4.302652729 * d.std(ddof=1) / np.sqrt(3)
    interval = f"{d.mean():+.1f} [{d.mean() - half:.1f}, {d.mean() + half:.1f}]"
    costs = "192 | 36 | 1,200 | 84 | 12 |"
    assert page.count(f"| uniform |  |  |  |  | 50.0 | {costs}") == 3
    line = f"| size | {interval}* | {interval} | {interval} | 3 | 55.7 | {costs}"
    assert page.count(line) == 3
    assert page.count("| cl | +1.7 [-1.2, 4.5] |") == 3  # 1, 3 and 1
    assert "of 6 gains at equal uploads differ from 0" in page
    needed = stdtrit(2, 1 - 0.025 / 6) / np.sqrt(3)
    assert f"a mean of {needed:.1f} standard deviations" in " ".join(page.split())
    assert {*selection_answers.RULES} == {*rules.RULES, "cl", "criticalfl"} - {"uniform"}
    text = test_english.read(page)
    lengths = test_english.sentence_lengths(text)
    assert lengths[int(0.95 * len(lengths))] <= 25
    assert test_english.longest_cell(page) <= 20
    assert test_english.old_words(text) == []


def test_the_tables_write_the_page_of_rules(tmp_path, monkeypatch):
    monkeypatch.setattr(selection_answers, "published", lambda: pretend_runs(1))
    monkeypatch.setattr(selection_answers, "page", lambda rounds: "the page\n")
    monkeypatch.setattr(tables, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(tables, "differences", lambda: "none\n")
    monkeypatch.setattr(tables, "pages", list)
    (tmp_path / "results").mkdir()
    path = tmp_path / "results" / "selection.md"
    assert tables.main(["--check"]) == 1
    assert not path.exists()
    assert tables.main([]) == 0
    assert path.read_text() == "the page\n"
    assert tables.main(["--check"]) == 0


# -------------------------------------------------------------------------------------- reproduce


def test_columns_that_older_rounds_lack_are_not_compared():
    older = pd.DataFrame([["a", "1.5", "", ""]], columns=["run", "accuracy", "clock", "loss"])
    older = older.reindex(columns=reproduce.COLUMNS, fill_value="")
    now = older.assign(clock="3.0", loss="0.1")
    assert reproduce.change(older, now) == ""
    assert reproduce.change(older, now.assign(accuracy="1.6")) == "accuracy"
    assert reproduce.change(now, now.assign(loss="0.2", clock="")) == "loss, clock"


def test_every_claim_has_a_command_and_every_run_a_line():
    claims = set(" ".join(WORKS.claims).split())
    assert set(tables.CLAIMS.index) == claims
    made = pd.read_csv(ROOT / "results/runs.csv").run
    assert set(evidence.trials().index) <= set(made)
    assert not WORKS.place.duplicated().any()


@pytest.mark.parametrize("work", list(WORKS.itertuples()), ids=lambda work: work.place)
def test_a_command_parses(work, capsys):
    """By its script, as it stands; programs at least exist."""
    first, *words = shlex.split(work.command)
    if first == "-m":
        name, *words = words
    else:
        name = first.removesuffix(".py").replace("/", ".")
    if work.scale == "program":
        assert (ROOT / (name.replace(".", "/") + ".py")).exists()
        return
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(name).main([*words, "--help"])
    assert stopped.value.code == 0


def test_only_takes_claims_and_places():
    assert len(reproduce.choose(WORKS, [], "all")) == len(WORKS)
    a6 = reproduce.choose(WORKS, ["A6", "A6b"], "all")
    tables_1_to_4 = {f"fedavg_curriculum/cifar10-table{number}" for number in (1, 2, 3, 4)}
    assert tables_1_to_4 <= set(a6.place)
    assert set(reproduce.choose(WORKS, ["A6"], "paper").scale) == {"paper"}
    assert list(reproduce.choose(WORKS, ["theory"], "all").claims) == ["T1 T2 T3 T4"]
    with pytest.raises(ValueError, match="A99"):
        reproduce.choose(WORKS, ["A6", "A99"], "all")


def test_differences_of_exactly_zero_decide_nothing():
    row = SimpleNamespace(interval=evidence.interval(np.zeros(3)), p_holm=np.nan, p_margin=np.nan)
    for row.sign, row.margin in itertools.product(("+", "-", "<=", "0"), ("", "2")):
        assert tables.direction(row) == "undecided"


def test_the_list_has_hours_state_and_total(capsys):
    assert reproduce.main(["--only", "A8", "A9", "A14", "--list"]) == 0
    *lines, total = capsys.readouterr().out.splitlines()
    hours = [float(re.search(r"([\d.]+) core-hours", line)[1]) for line in lines]
    assert float(re.search(r"([\d.]+) core-hours", total)[1]) == pytest.approx(sum(hours), abs=1)
    published = set(read_evidence("runs.csv").run)
    for line in lines:
        is_published = re.search(r"--out runs/(\S+)", line)[1] in published
        state = "in the evidence" if is_published else "not run"
        assert state in line or "made here" in line


def test_a_claim_is_made_from_nothing(tmp_path, monkeypatch, capsys):
    """A finished run's rounds are what the tables then read; it is not made twice."""
    line = {"place": "fedavg_curriculum/tiny", "claims": "A6", "scale": "reduced", "hours": 0.1}
    line["command"] = "fedavg_curriculum.py --order vanilla --rounds 2 --trials 1 --clients 10"
    monkeypatch.setattr(reproduce, "read_works", lambda: pd.DataFrame([line]))
    monkeypatch.setattr(reproduce, "folder", lambda work: tmp_path / work.place)
    monkeypatch.setattr(evidence, "FOLDER", tmp_path)
    monkeypatch.setattr(evidence, "trials", pd.DataFrame)  # none
    empty = pd.DataFrame(columns=reproduce.COLUMNS)
    empty.to_csv(tmp_path / "rounds.csv.xz", index=False)
    words = reproduce.command(next(reproduce.read_works().itertuples()))
    assert words[-2:] == ["--out", "runs/fedavg_curriculum/tiny"]
    monkeypatch.setattr(
        reproduce,
        "command",
        lambda work: [*shlex.split(work.command), "--out", str(tmp_path / work.place)],
    )
    assert reproduce.main(["--only", "A6"]) == 0
    rounds = pd.read_csv(tmp_path / "rounds.csv.xz")
    assert list(rounds.run) == ["fedavg_curriculum/tiny"] * 2
    metrics = pd.read_csv(tmp_path / "fedavg_curriculum/tiny/metrics.csv", dtype=str)
    assert list(rounds.accuracy) == list(metrics.accuracy.astype(float))
    capsys.readouterr()
    assert reproduce.main(["--only", "A6"]) == 0
    made, published = capsys.readouterr().out.splitlines()
    assert made == "already made: runs/fedavg_curriculum/tiny"
    assert published == "its rounds are those of rounds.csv.xz, to the last digit"
    other = metrics.assign(accuracy=["11.0", *metrics.accuracy[1:]])
    other.to_csv(tmp_path / "fedavg_curriculum/tiny/metrics.csv", index=False)
    monkeypatch.setattr(evidence, "trials", lambda: pd.DataFrame(index=[line["place"]]))
    assert reproduce.main(["--only", "A6"]) == 0
    assert "not those of rounds.csv.xz (accuracy); --replace" in capsys.readouterr().out
    assert rounds.equals(pd.read_csv(tmp_path / "rounds.csv.xz"))
    empty.to_csv(tmp_path / "rounds.csv.xz", index=False)
    assert reproduce.main(["--only", "A6"]) == 0
    assert "(which has none: trials.csv.xz has " in capsys.readouterr().out
    assert pd.read_csv(tmp_path / "rounds.csv.xz").empty
    assert reproduce.main(["--only", "A6", "--replace"]) == 0
    assert pd.read_csv(tmp_path / "rounds.csv.xz").accuracy[0] == 11
    assert reproduce.main(["--only", "A6", "--scale", "paper"]) == 0
    assert "no command of scale paper" in capsys.readouterr().out


@pytest.mark.parametrize(
    "commands, status, made", [("3 0", 3, 2), ("3 2 0", 2, 2), ("3 kill 0", 137, 2)]
)
def test_the_status_is_that_of_the_first_failed_command(
    tmp_path, monkeypatch, commands, status, made
):
    ends = {"kill": "os.kill(os.getpid(), 9)"}
    works = []
    for place, end in enumerate(commands.split()):
        code = f"import os; open('{tmp_path}/{place}', 'w'); {ends.get(end, f'os._exit({end})')}"
        work = {"place": str(place), "claims": "A6", "scale": "program", "hours": 0.1}
        works.append(work | {"command": shlex.join(["-c", code])})
    monkeypatch.setattr(reproduce, "read_works", lambda: pd.DataFrame(works))
    assert reproduce.main([]) == status
    assert len(list(tmp_path.iterdir())) == made


def test_tables_refuses_an_unknown_word():
    for word in ("--chekc", "--chec", "x"):
        with pytest.raises(SystemExit) as stopped:
            tables.main([word])
        assert stopped.value.code == 2


# ------------------------------------------------------------------------------------------ paths


@pytest.mark.parametrize("name", ["runs.csv", "reproduce.csv", "claims.csv", "comparisons.csv"])
def test_no_path_of_a_machine(name):
    for line in (ROOT / "results" / name).read_text().splitlines():
        assert not PATH_OF_A_MACHINE.search(line), line
