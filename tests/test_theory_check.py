"""The program: its table, verdicts and figures, and what it does with bad usage."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_theory_functions import fails

from theory import check, report, theorem1, theorem1_proof, theorem2
from theory.beyond import ordering, sharp
from theory.beyond.grid import GRID
from theory.local_sgd import exact_error
from theory.problem import kinked_problem
from theory.report import worst

ROOT = Path(__file__).resolve().parent.parent
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "nonsense"}


def test_worst_ratio_never_hides_nan():
    assert worst([2.0, 1.0, 9.0], [1.0, 2.0, 0.0]) == 0.5
    assert worst(3.0, np.array([1.0, 2.0])) == 1.5 and worst([1.0], [0.0]) == np.inf
    for bound, measured in (([np.nan], [1.0]), ([1.0, 1.0], [1.0, np.nan])):
        fails("NaN", worst, bound, measured)
    verdicts = [report.verdict(x) for x in (np.nan, 1.0, 0.999)]
    assert verdicts == ["violated", "holds", "violated"]
    row = report.row("x", "holds", 2.0, 1.5, 0.5)  # a sharp form that fails is seen
    assert (row["printed"], row["corrected"]) == ("holds", "violated")
    assert report.row("x", "vacuous", 2.0, vacuous=True)["printed"] == "vacuous"
    assert report.row("x", "violated", 0.5, "holds", vacuous=True)["printed"] == "violated"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """One whole run: (exit code, rows, what was printed, {figure: its two panels}, folder)."""
    out, panels, printed = tmp_path_factory.mktemp("theory"), {}, []
    save = report.save

    def record(path, draw):
        def draw_and_keep(axes):
            draw(axes)
            lines = [{x.get_label(): x.get_data() for x in axis.lines} for axis in axes]
            panels[path.name] = lines
            for axis in axes:  # a title and both axes named on every panel
                assert axis.get_title() and axis.get_xlabel() and axis.get_ylabel()

        save(path, draw_and_keep)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "save", record)
        patch.setattr("builtins.print", lambda text, flush=False: printed.append(text))
        code = check.main(["--out", str(out)])
    rows = json.loads((out / "check.json").read_text())
    return code, rows, "\n".join(printed), panels, out


def test_check_reproduces_every_documented_verdict(program):
    code, rows, table, _, out = program
    assert code == 0 and table.endswith(f"{len(rows)} statements; all as documented")
    assert {path.name for path in out.glob("*.png")} == set(check.FIGURES)
    for row in rows:
        assert row["printed"] == row["documented"] and row["corrected"] != "violated"
        [line] = [line for line in table.splitlines() if line.startswith(f"{row['statement']:44}")]
        ratios = [row[key] for key in ("printed_ratio", "corrected_ratio", "sharp_ratio")]
        said = [f"{ratio:.3g}" for ratio in ratios if ratio is not None]
        said += f"{row['printed']} {row['corrected'] or ''} {row['note']}".split()
        assert sorted(said) == sorted(line[44:].split())
        assert ratios[0] is None or (ratios[0] < 1 - 1e-9) == (row["printed"] == "violated")
    assert GRID >= 500


def test_the_table_that_is_kept_is_the_one_that_comes_out(program):
    kept = json.loads((ROOT / "theory" / "figures" / "check.json").read_text())
    assert len(program[1]) == len(kept) > 30
    for row, before in zip(program[1], kept, strict=True):
        assert list(row) == list(before)
        for key, value in before.items():
            wanted = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
            assert row[key] == wanted, (row["statement"], key)


def test_the_page_quotes_the_table(program):
    """Numbers of README.md's own text that a run gives."""
    page = (ROOT / "theory" / "README.md").read_text()
    page = page[: page.index("<!-- claims")]
    notes = {row["statement"]: row["note"] for row in program[1]}
    names = "Sharp floor, extremal problem", "Remark, curriculum ends below anti"
    numbers = []
    for name in (*names, "Remark, the same through the drift"):
        numbers += re.findall(r"[\d.]+\d", notes[name])
    far_ends = ["0.14", "5.94", "3.37"]  # of the laws
    assert [number for number in numbers if number not in page] == far_ends


def test_the_figures_of_the_bounds_show_what_they_say(program):
    drawn = program[3]
    problem = kinked_problem(1000, T=60)
    left, right = drawn["bounds.png"]
    for label, values in {
        "measured": exact_error(problem),
        "the paper": theorem1.printed(problem),
        "corrected by its lemmas": theorem1_proof.corrected(problem),
        "sharp": sharp.bound(problem),
        "sharp, closed form": sharp.closed_form(problem),
    }.items():
        assert right[label][0].tolist() == list(range(1, 61))
        assert right[label][1] == pytest.approx(values[1:]), label
    assert left["measured"][1][0] > 0.1
    steps, extremal = drawn["attained.png"]
    for panel, slope in zip([*drawn["floor.png"], steps], (1, 2, None), strict=True):
        names = "measured", "sharp", "corrected by its lemmas"
        measured, tight, lemmas = (panel[label][1] for label in names)
        assert (measured < tight).all() and (tight < lemmas).all()
        if slope:
            fit = np.polyfit(np.log(panel["measured"][0]), np.log(measured), 1)
            assert fit[0] == pytest.approx(slope, abs=0.05)
    assert steps["measured"][0].tolist() == [2, 4, 8, 16, 32]
    assert extremal["sharp, L/μ = 10"][1].min() < 1.03
    assert extremal["corrected by its lemmas, L/μ = 10"][1].min() > 10


def test_the_figures_of_the_laws_show_what_they_say(program):
    drawn = program[3]
    ratios, runs = drawn["noise_law.png"]
    c_mu, final = ratios["at the end"]
    assert c_mu[[0, 4, 8]] == pytest.approx([0.25, 1, 4])
    assert final[[0, 4, 8]] == pytest.approx([0.14, 1.01, 5.94], abs=0.01)
    assert ratios["averaged over rounds"][1][0] == pytest.approx(0.075, abs=5e-4)
    assert runs["growing, c μ = 2"][1] == pytest.approx(ordering.through_noise(2.0)[0])
    assert runs["shrinking, c μ = 0.5"][1] == pytest.approx(ordering.through_noise(0.5)[1])
    ratios, ties = drawn["kink_law.png"]
    assert ratios["L/μ = 1.5"][1][-1] == pytest.approx(3.37, abs=0.01)
    for label, rel in (("law: c μ = 1 + μ/L", 1e-9), ("measured", 0.05)):
        kappa, tie = ties[label]
        assert tie == pytest.approx(1 + 1 / kappa, rel=rel)
    ratios, runs = drawn["smooth_law.png"]
    c, final = next(iter(ratios.values()))
    assert ((final < 1) == (c < 3)).all()
    for label, E in zip(("growing", "shrinking"), ordering.where_smooth(4.0), strict=True):
        assert runs[f"{label}, c f'' = 4"][1] == pytest.approx(E)


def test_the_other_figures_show_what_they_say(program):
    drawn = program[3]
    sides, rate = drawn["ergodic.png"]
    assert sides["the paper: left side"][1][-1] == pytest.approx(160, abs=0.5)
    assert sides["the paper: right side"][1][-1] == pytest.approx(9.8, abs=0.05)
    fixed = sides["corrected: right side"][1]
    assert fixed[-1] == pytest.approx(theorem2.corrected(theorem2.long_run()))
    assert (sides["corrected: left side, weighted by α"][1] < fixed).all()
    for label in ("measured, biased and noisy", "1.07 / √T"):
        scaled = rate[label][1] * np.sqrt([30, 100, 300, 1000, 3000])
        assert scaled == pytest.approx(np.full(5, 1.07), abs=0.011)
    start, late = drawn["spectra.png"]
    assert (start["easy"][1] > start["all"][1]).all()
    assert (late["easy"][1] > late["all"][1]).sum() == 7
    assert (late["easy"][1] > late["hard"][1]).all() and (np.diff(late["all"][1]) >= 0).all()


@pytest.mark.parametrize(
    "row",
    [
        report.row("surprise", "violated", 1.2),
        report.row("broken", "violated", 0.5, 0.9),
        report.row("blunt", "ours", "ours", None, 0.9),
    ],
)
def test_an_unexpected_verdict_or_a_violated_correction_exits_1(row, monkeypatch, tmp_path, capsys):
    statement = SimpleNamespace(check=lambda: [row])
    monkeypatch.setattr(check, "STATEMENTS", (statement,))
    monkeypatch.setattr(check, "FIGURES", {})
    assert check.main(["--out", str(tmp_path)]) == 1
    assert f"NOT as documented: {row['statement']}" in capsys.readouterr().out.splitlines()[-1]


def test_one_statement_alone_prints_its_rows_and_draws_its_figure(tmp_path):
    command = [sys.executable, "-m", "theory.theorem1"]
    done = subprocess.run(command, cwd=tmp_path, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "bias over Q = 1000" in done.stdout and "0.0293" in done.stdout
    assert (tmp_path / "runs" / "theory" / "bounds.png").stat().st_size > 10_000


def test_every_statement_runs_alone_and_draws_what_the_whole_draws(monkeypatch):
    shown, figures = [], []

    def show(check, drawn=()):
        shown.append(check.__code__.co_filename)
        figures.extend((name, drawn[name].__code__.co_name) for name in drawn)

    monkeypatch.setattr(report, "show", show)
    for statement in check.STATEMENTS:
        runpy.run_path(statement.__file__, run_name="__main__")
    assert shown == [statement.__file__ for statement in check.STATEMENTS]
    whole = [(name, draw.__code__.co_name) for name, draw in check.FIGURES.items()]
    assert sorted(figures) == sorted(whole)
    main = 'if __name__ == "__main__":\n    show(check'
    alone = {str(path) for path in (ROOT / "theory").rglob("*.py") if main in path.read_text()}
    assert alone == set(shown)  # no statement is missing from the whole


def test_an_import_draws_nothing_and_needs_no_matplotlib(tmp_path):
    words = "import sys, theory.check; assert 'matplotlib' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", words], cwd=tmp_path, env=ENV).returncode == 0
    assert not list(tmp_path.iterdir())


def test_tracked_figures_are_never_overwritten_unasked(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "STATEMENTS", ())
    monkeypatch.setattr(check, "FIGURES", {})
    assert check.main([]) == 0
    [path] = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert path == tmp_path / "runs" / "theory" / "check.json"


@pytest.mark.parametrize("arguments", [["--wrong"], ["extra"], ["--out"], ["--out", "file/inside"]])
def test_bad_usage_is_one_line_and_exit_2(arguments, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(SystemExit) as stop:
        check.main(arguments)
    assert stop.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


def test_ctrl_c_is_one_line_and_exit_130(tmp_path):
    def heed():  # a shell's background jobs ignore the signal, and so would their children
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    words = [sys.executable, "-m", "theory.check", "--out", "x"]
    process = subprocess.Popen(
        words, cwd=tmp_path, stderr=subprocess.PIPE, env=ENV, preexec_fn=heed
    )
    while process.poll() is None and not (tmp_path / "x" / "check.json").exists():
        time.sleep(0.05)  # until it is past its imports
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    said = error.decode().splitlines()
    assert process.returncode == 130 and said == ["python -m theory.check: interrupted"]
