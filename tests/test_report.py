"""Tables, paired intervals and figures, against scipy's paired test and arithmetic by hand."""

import csv
import itertools
import json
import re

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_rel

from experiment import figures, report


def rows_of(accuracies: dict, setting="", rounds=1) -> list[dict]:
    """metrics.csv of methods {name: final accuracy by trial}; round t of R has t / R of it."""
    rows = []
    for method, finals in accuracies.items():
        for trial, final in enumerate(finals):
            for t in range(1, rounds + 1):
                row = {"setting": setting, "method": method, "trial": trial, "round": t}
                row |= {"accuracy": final * t / rounds, "uploads": 3 * t, "seconds": 0.5 * t}
                row |= {"received_mb": 2.0 * t, "sent_mb": 1.0 * t}
                rows.append(row | {"clock": 10.0 * t, "waiting": 0.0})
    return rows


def frame(rows: list[dict]) -> pd.DataFrame:
    df = pd.DataFrame(rows)
    df.attrs["title"] = "made up, 4 trials"
    return df


FOUR = {"a": [3.0, 5.0, 4.5, 6.0], "b": [2.0, 4.5, 4.0, 4.0], "c": [2.5, 4.9, 4.4, 5.2]}


def test_final_best_and_last_ten():
    path = [5.0, 99.0] + [float(i) for i in range(13)]
    sparse = [a if (t + 1) % 4 == 0 or t == 14 else np.nan for t, a in enumerate(path)]
    rows = []
    for trial, accuracies in enumerate((path, sparse)):
        for t, accuracy in enumerate(accuracies):
            row = {"setting": "", "method": "a", "trial": trial, "round": t + 1}
            rows.append(row | {"accuracy": accuracy, "uploads": t, "seconds": 0.1 * t})
    found = report.per_trial(frame(rows))
    assert found.final.tolist() == [12, 12]
    assert found.best.tolist() == [99, 12]
    means = [np.mean(path[5:]), np.mean([path[7], path[11], path[14]])]
    assert found.last10.tolist() == pytest.approx(means)
    assert found.uploads.tolist() == [14, 14]


def test_interval_is_students():
    a, b = np.array(FOUR["a"]), np.array(FOUR["b"])
    test = ttest_rel(a, b)
    expected = test.confidence_interval(0.95)
    found = report.interval(a - b)
    assert found == pytest.approx((1.0, expected.low, expected.high, test.pvalue))
    assert report.interval([*(a - b), np.nan]) == found


def test_an_interval_without_spread_or_of_one_trial():
    assert report.interval([0.0, 0.0, 0.0]) == (0, 0, 0, 1)
    for equal in ([2.0, 2.0], [80 / 9, 80 / 9 + 1e-14]):  # nothing to estimate a spread from
        mean, *rest = report.interval(equal)
        assert mean == pytest.approx(equal[0])
        assert np.isnan(rest).all()
    mean, *rest = report.interval([2.0])
    assert mean == 2 and np.isnan(rest).all()


def test_differences_of_all_pairs_and_holms_correction(capsys):
    runs = report.per_trial(frame(rows_of(FOUR)))
    table = report.differences(runs)
    last = table[table.measure == "last10"]
    assert list(zip(last.a, last.b, strict=True)) == [("a", "b"), ("a", "c"), ("b", "c")]
    p = [ttest_rel(FOUR[x], FOUR[y]).pvalue for x, y in ("ab", "ac", "bc")]
    assert last.p.tolist() == pytest.approx(p)
    small, large = sorted(p[:2])
    expected = [2 * small, max(2 * small, large)]
    assert sorted(last.holm[:2]) == pytest.approx(expected)
    assert np.isnan(last.holm.iloc[2])  # no pair with the first method
    assert last["mean"].tolist() == pytest.approx([1.0, 0.375, -0.625])
    report.print_tables(runs, table, "digits")
    printed = capsys.readouterr().out
    shown = re.findall("a - ., final: .* p (.*)", printed)
    words = [f"{p:.2g}" + ": undecided" * int(p >= 0.05) for p in expected]
    assert sorted(shown) == sorted(words)
    assert "b - c" not in printed
    assert report.holm([0.9, 0.8]).tolist() == [1, 1]


def test_runs_that_several_settings_show_count_once_in_holms_correction():
    """Methods that do not use a swept option: more of its values are no more comparisons."""
    one = report.differences(report.per_trial(frame(rows_of(FOUR, "alpha=1"))))
    rows = [*rows_of(FOUR, "alpha=1"), *rows_of(FOUR, "alpha=2"), *rows_of(FOUR, "alpha=3")]
    three = report.differences(report.per_trial(frame(rows)))
    for setting in ("alpha=1", "alpha=2", "alpha=3"):
        assert three[three.setting == setting].holm.tolist() == pytest.approx(
            one.holm.tolist(), nan_ok=True
        )


def test_other_runs_with_equal_differences_count_each():
    rows = rows_of(FOUR, "alpha=1")
    rows += [row | {"setting": "alpha=2", "seconds": 2 * row["seconds"]} for row in rows]
    table = report.differences(report.per_trial(frame(rows)))
    final = table[(table.measure == "final") & table["first"]]
    expected = np.maximum.accumulate(np.array(sorted(final.p)) * [4, 3, 2, 1])
    assert sorted(final.holm) == pytest.approx(expected.clip(max=1))


SETTINGS = ("s=1", "s=10", "s=2")


def in_random_order(seed) -> tuple[list[dict], dict]:
    """Rows of runs, each of 12 rounds, and {(setting, method): {trial: its accuracies}}.

    Each method misses other trials. The rows are in random order, except for their rounds.
    """
    rng = np.random.default_rng(seed)
    rows = []
    runs = {}
    for setting, method in itertools.product(SETTINGS, "abcd"):
        trials = rng.permutation(9)[: rng.integers(6, 9)].tolist()
        runs[setting, method] = {trial: rng.normal(50, 9, 12) for trial in trials}
        for trial, accuracies in runs[setting, method].items():
            for t, accuracy in enumerate(accuracies):
                row = {"setting": setting, "method": method, "trial": trial, "round": t + 1}
                rows.append(row | {"accuracy": accuracy, "uploads": t, "seconds": 0.5 * t})
    rng.shuffle(rows)
    return sorted(rows, key=lambda row: row["round"]), runs


def methods_of(rows: list[dict]) -> dict:
    """{setting: its methods}, in the order of the rows."""
    found = {}
    for row in rows:
        found.setdefault(row["setting"], {})[row["method"]] = True
    return {setting: [*methods] for setting, methods in found.items()}


def by_scipy(of_a: dict, of_b: dict, measure: str) -> tuple:
    """The mean of a - b over the trials of both, its interval, p, and how many trials there are."""
    last = slice(-1, None) if measure == "final" else slice(-10, None)
    shared = {*of_a} & {*of_b}
    a = [np.mean(of_a[trial][last]) for trial in shared]
    b = [np.mean(of_b[trial][last]) for trial in shared]
    test = ttest_rel(a, b)
    return np.mean(a) - np.mean(b), *test.confidence_interval(0.95), test.pvalue, len(shared)


@pytest.mark.parametrize("seed", range(3))
def test_differences_of_rows_in_random_order(seed):
    rows, runs = in_random_order(seed)
    table = report.differences(report.per_trial(frame(rows)))
    pairs = []
    for setting, methods in methods_of(rows).items():
        for a, b in itertools.combinations(methods, 2):
            pairs += [(setting, a, b, "final"), (setting, a, b, "last10")]
    found = table[["setting", "a", "b", "measure"]].itertuples(index=False, name=None)
    assert [*found] == pairs
    for row in table.itertuples():
        expected = by_scipy(runs[row.setting, row.a], runs[row.setting, row.b], row.measure)
        assert (row.mean, row.low, row.high, row.p, row.trials) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(3))
def test_holms_correction_of_rows_in_random_order(seed):
    rows, runs = in_random_order(seed)
    table = report.differences(report.per_trial(frame(rows)))
    for measure in ("final", "last10"):
        p = {}
        for setting, (first, *others) in methods_of(rows).items():
            for other in others:
                test = by_scipy(runs[setting, first], runs[setting, other], measure)
                p[setting, first, other] = test[3]
        for row in table[table.measure == measure].itertuples():
            own = p.get((row.setting, row.a, row.b), np.nan)  # NaN: not with the first method
            steps = [q * sum(r >= q for r in p.values()) for q in p.values() if q <= own]
            expected = min(1, max(steps)) if steps else np.nan
            assert row.holm == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("seed", range(3))
def test_gains_of_rows_in_random_order(seed, capsys):
    rows, runs = in_random_order(seed)
    report.print_gains(report.per_trial(frame(rows)), "c")
    printed = " ".join(capsys.readouterr().out.split())
    settings = [*methods_of(rows)]
    words = [*settings]
    methods = dict.fromkeys(row["method"] for row in rows if row["method"] != "c")
    for method in methods:
        words.append(method)
        for setting in settings:
            mean, low, high, *_ = by_scipy(runs[setting, method], runs[setting, "c"], "final")
            words.append(f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]")
    assert printed.endswith(" ".join(words))


@pytest.mark.parametrize("seed", range(3))
def test_paired_curves_of_rows_in_random_order(seed):
    rows, runs = in_random_order(seed)
    found = {}
    gaps, _ = figures.paired_curves(frame(rows))
    for row in gaps.itertuples():
        found[row.setting, row.method, row.trial, row.round] = row.gap
    expected = {}
    for setting, (first, *others) in methods_of(rows).items():
        for other in others:
            of_a, of_b = runs[setting, first], runs[setting, other]
            for trial in {*of_a} & {*of_b}:
                for t, gap in enumerate(of_a[trial] - of_b[trial]):
                    expected[setting, other, trial, t + 1] = gap
    assert found == pytest.approx(expected)


def test_tables_are_printed_whole(capsys):
    long = "client-power-of-choice+data-anti"
    runs = report.per_trial(frame(rows_of({long: [50.0, 60.0], "b": [50.0, 70.0]}, "alpha=1")))
    runs["uploads"] = [4, 10] * 2
    runs["seconds"] = [1.0, 2.0] * 2
    report.print_tables(runs, report.differences(runs), "digits, 2 trials")
    printed = capsys.readouterr().out
    assert "alpha=1 digits, 2 trials, accuracy in %" in printed
    words = " ".join(printed.split())
    assert f"{long} 55.00 +- 7.07 7 1.5 b 60.00" in words
    assert f"{long} - b, final: -5.00 [-68.53, +58.53], p 0.5: undecided\n" in printed
    assert "not corrected" in printed


@pytest.mark.parametrize(("rounds", "is_shown"), [(19, False), (20, True)])
def test_the_last_ten_of_few_rounds_are_not_shown(rounds, is_shown, capsys):
    runs = report.per_trial(frame(rows_of({"a": [5.0, 6.0], "b": [4.0, 7.0]}, rounds=rounds)))
    report.print_tables(runs, report.differences(runs), "digits")
    assert ("last10" in capsys.readouterr().out) == is_shown


def test_a_single_trial_has_no_interval(capsys):
    runs = report.per_trial(frame(rows_of({"a": [5.0], "b": [4.0]})))
    report.print_tables(runs, report.differences(runs), "digits, 1 trials")
    printed = capsys.readouterr().out
    assert " 5.00 " in printed and "+-" not in printed and "nan" not in printed
    assert "paired" not in printed


def diverge(rows: list[dict], method: str, trial: int) -> list[dict]:
    """The run's last round diverges."""
    of_run = [row for row in rows if row["method"] == method and row["trial"] == trial]
    others = [row for row in rows if row not in of_run]
    names = ("setting", "method", "trial", "round")
    last = {name: of_run[-1][name] for name in names} | {"diverged": 1}
    return others + of_run[:-1] + [last]


def test_a_run_that_diverged_counts_nowhere(capsys):
    rows = diverge(rows_of(FOUR, rounds=2), "b", 1)
    df = frame(rows)
    runs = report.per_trial(df)
    empty = runs[runs.final.isna()]
    assert empty.index.tolist() == [("", "b", 1)]
    assert empty[["last10", "best"]].isna().all(axis=None)
    pair = report.differences(runs).iloc[0]
    assert (pair.b, pair.trials) == ("b", 3)
    rest = [0, 2, 3]
    gaps = np.array(FOUR["a"])[rest] - np.array(FOUR["b"])[rest]
    assert pair["mean"] == pytest.approx(gaps.mean())
    table = report.print_tables(runs, report.differences(runs), "digits")
    assert table.uploads.tolist() == [6, 6, 6]  # not the 3 of its first round
    finite = report.without_diverged(df)
    assert len(finite) == len(df) - 2
    assert not ((finite.method == "b") & (finite.trial == 1)).any()


def test_a_method_that_always_diverged_leaves_an_empty_cell(capsys):
    rows = rows_of({"a": [3.0], "b": [2.0]}, rounds=2)
    runs = report.per_trial(frame(diverge(rows, "b", 0)))
    report.print_tables(runs, report.differences(runs), "digits, 1 trials")
    printed = capsys.readouterr().out
    [line] = [line for line in printed.splitlines() if line.startswith("b ")]
    assert "nan" not in line and "+-" not in line
    assert "a - b" not in printed


def test_runs_that_diverged_before_the_first_test_keep_what_they_cost():
    rows = [{"setting": "", "method": "a", "trial": 0, "round": 1, "uploads": 5, "seconds": 2.0}]
    rows.append(rows[0] | {"round": 2, "diverged": 1})
    [run] = report.per_trial(frame(rows)).itertuples()
    assert (run.uploads, run.seconds) == (5, 2.0)
    assert np.isnan(run.final)


def test_nothing_but_diverged_runs(tmp_path, capsys):
    rows = [{"setting": "", "method": m, "trial": 0, "round": 1, "diverged": 1} for m in "ab"]
    df = report.write_metrics(rows, tmp_path, "digits, 1 trials")
    summary = report.write_results(df, tmp_path)
    assert [run["method"] for run in summary["results"]] == ["a", "b"]


def test_what_is_written(tmp_path, capsys):
    rows = rows_of(FOUR, rounds=3)
    df = report.write_metrics(rows, tmp_path, "digits, 4 trials")
    with open(tmp_path / "metrics.csv") as file:
        for line, row in zip(csv.DictReader(file), rows, strict=True):
            assert line == {name: str(value) for name, value in row.items()}
    summary = json.loads(json.dumps(report.write_results(df, tmp_path), allow_nan=False))
    assert [run["final"] for run in summary["results"]] == FOUR["a"] + FOUR["b"] + FOUR["c"]
    assert len(summary["paired"]) == 6
    table = pd.read_csv(tmp_path / "table.csv")
    assert table.method.tolist() == ["a", "b", "c"]
    assert table.final.tolist() == ["4.62 +- 1.25", "3.62 +- 1.11", "4.25 +- 1.21"]
    assert table.uploads.tolist() == [9, 9, 9]


def test_gains_over_a_control(capsys):
    runs = report.per_trial(frame(rows_of(FOUR)))
    report.print_gains(runs, "b")
    printed = capsys.readouterr().out
    assert "minus b's" in printed and "+1.00 [" in printed
    report.print_gains(runs, "absent")
    assert capsys.readouterr().out == ""
    alone = report.per_trial(frame(rows_of({"a": [5.0], "b": [4.0]})))
    report.print_gains(alone, "b")
    printed = capsys.readouterr().out
    assert "+1.00" in printed and "nan" not in printed


def test_paired_curves_are_differences_within_trial_and_round():
    rows = rows_of(FOUR, rounds=3)
    rows[1]["accuracy"] = np.nan  # method a, trial 0, round 2 was not tested
    gaps, first = figures.paired_curves(frame(rows))
    assert first == "a" and gaps.method.unique().tolist() == ["b", "c"]
    assert len(gaps) == 2 * (4 * 3 - 1)
    of_b = gaps[(gaps.method == "b") & (gaps.trial == 3)]
    assert of_b.gap.tolist() == pytest.approx([2 / 3, 4 / 3, 2])
    assert report.student(of_b.gap)[1] > 2  # as wide as Student's, not one standard error


def test_bands_stay_within_the_values_that_are_seen():
    rng = np.random.default_rng(0)
    for values in ([1.0, 1.0, 0.0], [128.0, 16.0, 16.0], rng.normal(size=50)):
        low, high = figures.spread(pd.Series(values))
        assert min(values) <= low < np.mean(values) < high <= max(values)
    assert low == pytest.approx(np.mean(values) - np.std(values, ddof=1))
    assert high == pytest.approx(np.mean(values) + np.std(values, ddof=1))


# ---------------------------------------------------------------------- figures, read from the axes


@pytest.fixture
def saved(monkeypatch):
    """The saved figures by file name. They are written, too."""
    from matplotlib.figure import Figure

    saved = {}
    save = Figure.savefig

    def keep(figure, path, **how):
        saved[path.name] = figure
        save(figure, path, **how)

    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


def curves_of(axis) -> list[list[tuple]]:
    """The points of each line, rounded."""
    return [[(round(x, 6), round(y, 6)) for x, y in line.get_xydata()] for line in axis.lines]


def random_rows(trials: int, methods=("a", "b"), rounds=6) -> list[dict]:
    """Rows of runs that differ in accuracy, in uploads and in samples a upload."""
    rng = np.random.default_rng(trials)
    rows = []
    for k, method in enumerate(methods):
        for trial in range(trials):
            uploads = np.cumsum(rng.integers(1, 9, rounds))
            for t, sent in enumerate(uploads.tolist()):
                row = {"setting": "-", "method": method, "trial": trial, "round": t + 1}
                row |= {"accuracy": rng.uniform(0, 99), "uploads": sent, "seconds": 1.0}
                rows.append(row | {"samples": sent * (k + 2)})
    return rows


def means_by_hand(rows: list[dict], method: str, x: str, y: str) -> list[tuple]:
    """The mean over trials of x and of y after each round."""
    points = {}
    for row in rows:
        if row["method"] == method:
            points.setdefault(row["round"], []).append((row[x], row[y]))
    return [tuple(round(float(v), 6) for v in np.mean(points[t], axis=0)) for t in sorted(points)]


@pytest.mark.parametrize("trials", [1, 3, 6])
def test_lines_are_means_of_the_rows_over_rounds_and_over_costs(trials, saved, tmp_path):
    """Fewer than five trials are drawn one by one, more as a band."""
    rows = random_rows(trials)
    figures.plot_all(frame(rows), tmp_path)
    assert [*saved] == ["cost.png", "differences.png", "accuracy.png"]
    by_uploads, by_samples = saved["cost.png"].axes
    [by_round] = saved["accuracy.png"].axes
    panels = {"uploads": by_uploads, "samples": by_samples, "round": by_round}
    for x, axis in panels.items():
        lines = curves_of(axis)
        singles = 2 * trials * (1 < trials < 5)
        assert len(lines) == 2 + singles
        assert len(axis.collections) == 2 * (trials >= 5)
        for method in "ab":
            assert means_by_hand(rows, method, x, "accuracy") in lines
    if trials == 3:
        run = [row for row in rows if row["method"] == "b" and row["trial"] == 2]
        points = [(row["uploads"], round(row["accuracy"], 6)) for row in run]
        assert points in curves_of(by_uploads)


def test_samples_are_a_cost_of_their_own_only_if_they_differ_from_uploads(saved, tmp_path):
    rows = random_rows(2)
    for row in rows:
        row["samples"] = 7 * row["uploads"]
    figures.plot_all(frame(rows), tmp_path)
    assert [axis.get_xlabel().split(":")[0] for axis in saved["cost.png"].axes] == ["uploads"]


@pytest.mark.parametrize("trials", [3, 6])
def test_limits_of_differences_come_from_what_is_drawn(trials, saved, tmp_path):
    rows = random_rows(trials)
    figures.plot_all(frame(rows), tmp_path)
    [axis] = saved["differences.png"].axes
    low, high = axis.get_ylim()
    gaps = {}
    for a in rows[: len(rows) // 2]:
        for b in rows[len(rows) // 2 :]:
            if (a["trial"], a["round"]) == (b["trial"], b["round"]):
                gaps.setdefault(a["round"], []).append(a["accuracy"] - b["accuracy"])
    seen = np.array([*gaps.values()])
    if trials >= 5:
        test = ttest_rel(seen, np.zeros_like(seen), axis=1).confidence_interval(0.95)
        seen = np.array([test.low, test.high])
    assert low <= min(0, seen.min()) and high >= max(0, seen.max())
    assert high - low < 1.15 * (max(0, seen.max()) - min(0, seen.min()))


LONG = "client-power-of-choice+data-anti"


@pytest.mark.parametrize("methods", [1, 2, 12, 30])
def test_names_at_lines_are_apart_and_within_the_figure(methods, saved, tmp_path):
    from matplotlib.text import Text

    names = [f"{LONG}-{i}" for i in range(methods)]
    finals = {name: [50.0 + 0.01 * i] for i, name in enumerate(names)}  # the lines are together
    figures.plot_all(frame(rows_of(finals, rounds=2)), tmp_path)
    for figure in saved.values():
        figure.draw_without_rendering()
        for axis in figure.axes:
            boxes = [Text.get_window_extent(label) for label in axis.texts]  # no leaders
            for a, b in itertools.combinations(boxes, 2):
                assert a.y1 <= b.y0 or b.y1 <= a.y0
            assert max(box.x1 for box in boxes) <= figure.bbox.x1
            assert axis.bbox.width > 0.25 * figure.bbox.width
    shown = {label.get_text() for label in saved["accuracy.png"].axes[0].texts}
    assert shown == {*names}


def test_a_method_has_one_colour_in_all_figures(saved, tmp_path):
    """Also if another method diverged, and is drawn nowhere."""
    rows = rows_of({name: [5.0, 6.0] for name in "abcd"}, rounds=2)
    for row in rows:
        row["diverged"] = 1 if row["method"] == "b" else np.nan
    df = report.without_diverged(report.write_metrics(rows, tmp_path, "digits"))
    figures.plot_all(df, tmp_path)
    figures.dots(report.per_trial(df).reset_index(), tmp_path / "dots.png", "final")
    colors = {}
    for figure in saved.values():
        for label in figure.axes[0].texts:
            name = label.get_text().removeprefix("minus ")
            colors.setdefault(name, set()).add(label.get_color())
    assert {*colors} == {*"acd"}
    assert [len(found) for found in colors.values()] == [1, 1, 1]
    assert len(set.union(*colors.values())) == 3
    drawn = {line.get_color() for line in saved["dots.png"].axes[0].lines}
    assert drawn == set.union(*colors.values())


def test_one_round_is_seen(saved, tmp_path):
    figures.plot_all(frame(rows_of({"a": [5.0]})), tmp_path)
    assert [*saved] == ["cost.png", "accuracy.png"]
    for figure in saved.values():
        assert figure.axes[0].lines[0].get_marker() == "o"


def test_rounds_without_a_test_and_marked_rounds(saved, tmp_path):
    rows = random_rows(2)
    for row in rows:
        row["marked"] = int(row["round"] in (2, 5)) if row["method"] == "a" else np.nan
        if row["round"] % 2:
            row["accuracy"] = np.nan
    figures.curves(frame(rows), tmp_path / "c.png", "uploads", "accuracy", marks="marked")
    top, bottom = saved["c.png"].axes
    wanted = [(r["round"], r["uploads"]) for r in rows if r["marked"] == 1]
    assert wanted in curves_of(top)
    assert [x for x, _ in curves_of(bottom)[0]] == [2, 4, 6]


@pytest.mark.parametrize("methods", [1, 2, 3])
def test_many_settings_make_one_panel(methods, saved, tmp_path, capsys):
    some = dict([*FOUR.items()][:methods])
    rows = [row for k in range(30) for row in rows_of(some, f"alpha={k}", rounds=3)]
    figures.plot_all(frame(rows), tmp_path)
    figures.curves(frame(rows), tmp_path / "own.png", "accuracy", "uploads")
    assert [path.name for path in tmp_path.iterdir()] == ["summary.png"]
    [axis] = saved["summary.png"].axes
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert names == [f"alpha={k}" for k in range(30)]
    shown = {round(x, 6) for line in axis.lines for x in line.get_xdata()}
    if methods == 1:
        assert shown == {*FOUR["a"], 4.625}
    else:
        assert {1, 0.5, 2} <= shown  # a - b after the last round
    printed = capsys.readouterr().out
    assert "summary.png shows all settings" in printed
    assert "own.png is not drawn: it would have 60 panels, more than 24" in printed


def test_who_loses_is_drawn_where_it_is_known(saved, tmp_path):
    df = frame(rows_of(FOUR, rounds=2)).assign(own_mean=5.0, own_worst_tenth=1.0)
    figures.plot_all(df, tmp_path)
    figure = saved["own_accuracy.png"]
    shown = {axis.get_ylabel(): axis.lines[0].get_ydata().tolist() for axis in figure.axes}
    assert shown == {"mean of all clients, %": [5, 5], "mean of the worst tenth, %": [1, 1]}
    assert "own mix" in figure.get_suptitle() and "own mix" not in df.attrs["title"]


def test_partition_is_written_by_setting(saved, tmp_path):
    counts = np.array([[3, 0], [1, 2]])
    figures.plot_partition({"alpha=1": counts, "alpha=2": counts[::-1]}, tmp_path, "digits")
    table = pd.read_csv(tmp_path / "partition.csv")
    second = table[table.setting == "alpha=2"]
    rows = second[["client", "class", "samples"]].to_numpy().tolist()
    assert rows == [[0, 0, 1], [0, 1, 2], [1, 0, 3]]
    assert saved["partition.png"].get_suptitle().startswith("digits, first trial")


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (7, 10), (128, 10), (10_000, 100)])
def test_bars_are_the_samples_of_the_largest_clients_first(clients, classes, saved, tmp_path):
    rng = np.random.default_rng(clients)
    counts = rng.poisson(3, (clients, classes)) * rng.integers(1, 9, (clients, 1))
    counts[:, 0] += 1  # nobody is empty
    figures.plot_partition({"-": counts}, tmp_path, "digits")
    axis = saved["partition.png"].axes[0]
    heights = np.array([[bar.get_height() for bar in bars] for bars in axis.containers]).T
    assert len(heights) == min(clients, 40)
    sizes = heights.sum(1).tolist()
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (counts.sum(1).max(), counts.sum(1).min())
    whole = {tuple(row) for row in counts.tolist()}
    assert all(tuple(row) in whole for row in heights.tolist())
    tops = [bars[0].get_y() + bars[0].get_height() for bars in axis.containers]
    assert tops == np.cumsum(heights[0]).tolist()
    if classes <= 10:
        named = {text.get_text() for text in axis.get_legend().get_texts()}
        assert named == {str(label) for label in range(classes)}


def test_figures_are_light_files_with_titles_and_units(saved, tmp_path):
    df = frame(rows_of(FOUR, "alpha=1", rounds=3) + rows_of(FOUR, "alpha=2", rounds=3))
    figures.plot_all(df, tmp_path)
    figures.curves(df, tmp_path / "two.png", "accuracy", "uploads")
    sizes = [path.stat().st_size for path in tmp_path.glob("*.png")]
    assert len(sizes) == 4 and min(sizes) > 5_000 and max(sizes) < 300_000
    assert all(figure.get_figwidth() == 7 for figure in saved.values())  # legible at 700 pixels
    for figure in saved.values():
        assert figure.get_suptitle().startswith("made up, 4 trials")
    left, right = saved["accuracy.png"].axes
    assert (left.get_title(), right.get_title()) == ("alpha=1", "alpha=2")
    assert left.get_ylabel() == "test accuracy in %" and left.get_xlabel() == "round"
    assert left.get_ylim() == right.get_ylim()
    assert len(saved["two.png"].axes) == 4
