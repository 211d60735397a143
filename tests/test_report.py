"""Tables, paired intervals and figures, against scipy's paired test and arithmetic by hand."""

import csv
import itertools
import json
import re

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_rel

from experiment import report


@pytest.fixture
def drawn(monkeypatch):
    """What `plot` is asked to draw: {file name: (df, options)}; nothing is drawn."""
    figures = {}

    def plot(df, path, **options):
        figures[path.name] = (df, options)

    monkeypatch.setattr(report, "plot", plot)
    return figures


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
    assert sorted(shown) == sorted(f"{p:.2g}" for p in expected)
    assert "b - c" not in printed
    assert report.holm([0.9, 0.8]).tolist() == [1, 1]


def test_holms_correction_is_over_all_settings():
    others = {"a": [3.1, 5.0, 4.5, 6.0], "b": [2.0, 4.6, 4.0, 4.0], "c": FOUR["c"]}
    rows = rows_of(FOUR, "alpha=1") + rows_of(others, "alpha=2")
    table = report.differences(report.per_trial(frame(rows)))
    final = table[(table.measure == "final") & table["first"]]
    p = sorted(final.p)
    expected = np.maximum.accumulate(np.array(p) * [4, 3, 2, 1])
    assert sorted(final.holm) == pytest.approx(expected.clip(max=1))


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


def test_pairs_are_taken_within_trials_that_both_have():
    rows = rows_of({"a": [3.0, 5.0, 9.0], "b": [2.0, 4.5]})
    [final, _] = report.differences(report.per_trial(frame(rows))).to_dict("records")
    assert (final["trials"], final["mean"]) == (2, 0.75)


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
    words = ["setting", *settings, "method"]
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
    for row in report.paired_curves(frame(rows)).itertuples():
        found[row.setting, row.method, row.trial, row.round] = row.gap
    expected = {}
    for setting, (first, *others) in methods_of(rows).items():
        for other in others:
            of_a, of_b = runs[setting, first], runs[setting, other]
            for trial in {*of_a} & {*of_b}:
                for t, gap in enumerate(of_a[trial] - of_b[trial]):
                    expected[setting, f"{first} minus {other}", trial, t + 1] = gap
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
    assert f"{long} 55.00 +- 7.07 55.00 +- 7.07 7 1.5 b 60.00" in words
    assert f"{long} - b, final: -5.00 [-68.53, +58.53] p 0.5\n" in printed


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
    gaps = report.paired_curves(frame(rows))
    assert gaps.method.unique().tolist() == ["a minus b", "a minus c"]
    assert len(gaps) == 2 * (4 * 3 - 1)
    of_b = gaps[(gaps.method == "a minus b") & (gaps.trial == 3)]
    assert of_b.gap.tolist() == pytest.approx([2 / 3, 4 / 3, 2])
    assert gaps.index.is_unique
    assert report.student(of_b.gap)[1] > 2  # as wide as Student's, not one standard error


def test_the_first_figure_is_of_differences_and_none_is_drawn_twice(drawn, tmp_path):
    df = frame(rows_of(FOUR, rounds=3))
    report.plot_all(df, tmp_path)
    assert list(drawn) == ["differences.png", "accuracy.png"]
    gaps, options = drawn["differences.png"]
    assert options["errorbar"] is report.student and options["zero"]
    assert gaps.attrs["title"] == "made up, 4 trials: paired differences, mean and 95 % interval"
    drawn.clear()
    report.plot_all(frame(rows_of({"a": [1.0]}, rounds=3)), tmp_path)
    assert list(drawn) == ["accuracy.png"]


def test_bands_stay_within_the_values_that_are_seen():
    rng = np.random.default_rng(0)
    for values in ([1.0, 1.0, 0.0], [128.0, 16.0, 16.0], rng.normal(size=50)):
        low, high = report.spread(pd.Series(values))
        assert min(values) <= low < np.mean(values) < high <= max(values)
    assert low == pytest.approx(np.mean(values) - np.std(values, ddof=1))
    assert high == pytest.approx(np.mean(values) + np.std(values, ddof=1))


@pytest.mark.parametrize("methods", [1, 2, 3])
def test_many_settings_make_one_panel(methods, tmp_path, monkeypatch, capsys):
    from matplotlib import pyplot

    figures = []
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr(pyplot, "close", figures.append)
    some = dict([*FOUR.items()][:methods])
    rows = [row for k in range(30) for row in rows_of(some, f"alpha={k}")]
    report.plot_all(frame(rows), tmp_path)
    report.curves(frame(rows), tmp_path / "own.png", "accuracy", "uploads")
    assert [path.name for path in tmp_path.iterdir()] == ["summary.png"]
    [[axis]] = [figure.axes for figure in figures]
    assert len(axis.get_yticks()) == 30
    printed = capsys.readouterr().out
    assert "summary.png shows all settings" in printed
    assert "own.png is not drawn: it would have 60 panels, more than 24" in printed


def test_the_summary_shows_the_differences_after_the_last_round(drawn, tmp_path):
    report.plot_summary(frame(rows_of(FOUR, rounds=3)), tmp_path / "summary.png")
    shown, _ = drawn["summary.png"]
    assert shown.gap.tolist() == pytest.approx([1, 0.5, 0.5, 2, 0.5, 0.1, 0.1, 0.8])


def test_who_loses_is_drawn_where_it_is_known(drawn, tmp_path):
    df = frame(rows_of(FOUR, rounds=2)).assign(own_mean=5.0, own_worst_tenth=1.0)
    report.plot_all(df, tmp_path)
    shown, options = drawn["own_accuracy.png"]
    assert options["row"] == "column" and shown["column"].nunique() == 2
    means = shown[shown["column"] == "mean of all clients, %"]
    assert set(means["value"]) == {5}
    assert "own mix" in shown.attrs["title"] and "own mix" not in df.attrs["title"]


def test_partition_is_written_by_setting(drawn, tmp_path):
    counts = np.array([[3, 0], [1, 2]])
    report.plot_partition({"alpha=1": counts, "alpha=2": counts[::-1]}, tmp_path, "digits")
    table = pd.read_csv(tmp_path / "partition.csv")
    second = table[table.setting == "alpha=2"]
    rows = second[["client", "class", "samples"]].to_numpy().tolist()
    assert rows == [[0, 0, 1], [0, 1, 2], [1, 0, 3]]
    assert drawn["partition.png"][0].attrs["title"].startswith("digits, first trial")


def test_figures_are_files_with_titles_and_units(tmp_path, monkeypatch):
    from matplotlib import pyplot

    figures = []
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr(pyplot, "close", figures.append)
    df = frame(rows_of(FOUR, "alpha=1", rounds=3) + rows_of(FOUR, "alpha=2", rounds=3))
    report.plot_all(df, tmp_path)
    report.curves(df, tmp_path / "two.png", "accuracy", "uploads")
    bars = {"x": "final", "y": "method", "kind": "bar", "errorbar": "sd"}
    report.plot(report.per_trial(df).reset_index(), tmp_path / "bars.png", **bars)
    names = {path.name for path in tmp_path.glob("*.png") if path.stat().st_size > 5000}
    assert names == {"differences.png", "accuracy.png", "two.png", "bars.png"}
    differences, accuracy, two, bar = figures
    assert "95 % interval" in differences.get_suptitle()
    assert bar.get_suptitle() == "made up, 4 trials"
    assert "mean ± standard deviation" in accuracy.get_suptitle()
    left, right = accuracy.axes
    assert (left.get_title(), right.get_title()) == ("alpha=1", "alpha=2")
    assert left.get_ylabel() == "test accuracy in %" and left.get_xlabel() == "round"
    assert len(two.axes) == 4 and two.axes[0].get_title() == "test accuracy in %\nalpha=1"
    assert bar.axes[0].get_xlabel() == "final test accuracy in %"
