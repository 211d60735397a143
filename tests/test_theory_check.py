"""The program: its table, verdicts and figures, and what it does with bad usage."""

import json
import os
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


def test_worst_ratio_never_hides_nan():
    assert worst([2.0, 1.0, 9.0], [1.0, 2.0, 0.0]) == 0.5
    assert worst(3.0, np.array([1.0, 2.0])) == 1.5 and worst([1.0], [0.0]) == np.inf
    for bound, measured in (([np.nan], [1.0]), ([1.0, 1.0], [1.0, np.nan])):
        fails("NaN", worst, bound, measured)
    assert [report.verdict(x) for x in (np.nan, 1.0, 0.999)] == [
        "violated",
        "holds",
        "violated",
    ]
    row = report.row("x", "holds", 2.0, 1.5, 0.5)
    assert (row["printed"], row["corrected"]) == (
        "holds",
        "violated",
    )  # a sharp form that fails is seen
    assert report.row("x", "vacuous", 2.0, vacuous=True)["printed"] == "vacuous"
    assert report.row("x", "violated", 0.5, "holds", vacuous=True)["printed"] == "violated"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """One whole run: (exit code, rows, what was printed, {figure: its two panels}, folder)."""
    out, drawn, printed = tmp_path_factory.mktemp("theory"), {}, []
    save = report.save

    def record(path, draw):
        def draw_and_keep(axes):
            draw(axes)
            drawn[path.name] = axes

        save(path, draw_and_keep)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "save", record)
        patch.setattr("builtins.print", lambda text, flush=False: printed.append(text))
        code = check.main(["--out", str(out)])
    panels = {
        name: [{line.get_label(): line.get_data() for line in axis.lines} for axis in axes]
        for name, axes in drawn.items()
    }
    for axes in drawn.values():  # a title and both axes named on every panel
        for axis in axes:
            assert axis.get_title() and axis.get_xlabel() and axis.get_ylabel()
    rows = json.loads((out / "check.json").read_text())
    return code, rows, "\n".join(printed), panels, out


def test_check_reproduces_every_documented_verdict(program):
    code, rows, table, _, out = program
    assert code == 0 and table.endswith(f"{len(rows)} statements; all as documented")
    names = ["attained.png", "bounds.png", "ergodic.png", "floor.png", "kink_law.png"]
    names += ["noise_law.png", "smooth_law.png", "spectra.png"]
    assert sorted(path.name for path in out.glob("*.png")) == names
    for row in rows:
        assert row["printed"] == row["documented"] and row["corrected"] != "violated"
        [line] = [line for line in table.splitlines() if line.startswith(f"{row['statement']:44}")]
        ratios = [
            f"{row[key]:.3g}"
            for key in ("printed_ratio", "corrected_ratio", "sharp_ratio")
            if row[key] is not None
        ]
        said = " ".join([row["printed"], row["corrected"] or "", *ratios, row["note"]])
        assert sorted(said.split()) == sorted(line[44:].split())
        if row["printed_ratio"] is not None:
            assert (row["printed_ratio"] < 1 - 1e-9) == (row["printed"] == "violated")
    found = " ".join(row["statement"] for row in rows)
    for name in (
        "Assumption 1",
        *(f"Lemma {i}" for i in range(1, 6)),
        "Equation 5",
        "Equation 6",
        "Theorem 1",
        "Theorem 2",
    ):
        assert name in found
    assert GRID >= 500


def test_the_table_that_is_kept_is_the_one_that_comes_out(program):
    kept = json.loads(
        (Path(__file__).parent.parent / "theory" / "figures" / "check.json").read_text()
    )
    assert len(program[1]) == len(kept) > 30
    for row, before in zip(program[1], kept, strict=True):
        assert list(row) == list(before)
        for key, value in before.items():
            assert row[key] == (
                pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
            ), (row["statement"], key)


def test_the_numbers_of_the_table(program):
    """The worst ratios that the pages quote, and what the sharp floor makes of them."""
    rows = {row["statement"]: row for row in program[1]}
    printed = {
        "Assumption 1, b_k depends on theta": 0.0143,
        "Lemma 1": 1.13,
        "Lemma 1, second line of its proof": 0.429,
        "Lemma 2, independent noise": 1.87,
        "Lemma 2, noise shared by clients": 0.25,
        "Equation 5": 1.6,
        "Lemma 5": 0.325,
        "Equation 6": 0.0584,
        "Theorem 1, sigma^3 and L on the noise": 0.6,
        "Theorem 1, indices t = 1..T": 3.56e-9,
        "Theorem 1, bias over Q = 1000, B for B^2": 0.864,
        "Theorem 1, random grid": 0.0546,
        "Theorem 1 by its proof; closed form": 0.0478,
        "Theorem 2, alpha missing on the left": 0.0611,
        "Theorem 2, no sigma, alpha restored": 0.188,
        "Theorem 2 by its proof": 0.0707,
        "Theorem 2, random grid": 0.00011,
        "Remark, sigma_t in [39]": 186,
        "Remark, Lambda bounded by lambda": 1.25e-12,
        "Remark, FedProx rho_t": 0.522,
        "Remark, a ~ 1/t mitigates a growing B": 453,
        "Remark, curriculum ends below anti": 0.168,
        "Remark, the same through the drift": 0.297,
    }
    corrected = {
        "Theorem 1, indices t = 1..T": 2.32,
        "Theorem 1, bias over Q = 100": 13.6,
        "Theorem 2, random grid": 1.26,
    }
    sharp = {
        "Theorem 1, indices t = 1..T": 1.16,
        "Theorem 1, bias over Q = 100": 1.77,
        "Sharp floor, kinked f": 1.80,
    }
    for wanted, column in (
        (printed, "printed_ratio"),
        (corrected, "corrected_ratio"),
        (sharp, "sharp_ratio"),
    ):
        for name, value in wanted.items():
            assert float(f"{rows[name][column]:.3g}") == value, name
    for name in (
        "Theorem 1, random grid",
        "Sharp floor, one step",
        "Sharp floor, extremal problem",
    ):
        assert 1 - 1e-9 <= rows[name]["sharp_ratio"] < 1.01
    notes = {name: row["note"] for name, row in rows.items()}
    assert (
        "1.084, 1.015, 1.002, 1.014 (lemmas 144, 114, 104, 943)"
        in notes["Sharp floor, extremal problem"]
    )
    assert "0.14, 0.31, 1.01, 2.73, 5.94" in notes["Remark, curriculum ends below anti"]
    assert "0.075 to 0.45" in notes["Remark, curriculum ends below anti"]
    assert (
        "avg ||grad||^2 sqrt T = 1.012 to 1.014" in notes["Remark, the ergodic rate survives bias"]
    )
    assert (
        "easy > all 7/20 after 1000 steps; at step 0 easy > all 20/20"
        in notes["Remark, easy samples are more convex"]
    )


def test_the_figures_show_what_they_say(program):
    drawn = program[3]
    problem = kinked_problem(1000, T=60)
    left, right = drawn["bounds.png"]
    for label, values in {
        "measured": exact_error(problem),
        "printed": theorem1.printed(problem),
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
    assert extremal["corrected by its lemmas, L/μ = 10"][1].min() > 100


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
    kappa, law = ties["law: c μ = 1 + μ/L"]
    assert law == pytest.approx(1 + 1 / kappa)
    kappa, measured = ties["measured"]
    assert measured == pytest.approx(1 + 1 / kappa, rel=0.05)
    ratios, runs = drawn["smooth_law.png"]
    c, final = next(iter(ratios.values()))
    assert ((final < 1) == (c < 3)).all()
    growing, shrinking = ordering.where_smooth(4.0)
    assert runs["growing, c f'' = 4"][1] == pytest.approx(growing)
    assert runs["shrinking, c f'' = 4"][1] == pytest.approx(shrinking)


def test_the_other_figures_show_what_they_say(program):
    drawn = program[3]
    sides, rate = drawn["ergodic.png"]
    assert sides["printed: left side"][1][-1] == pytest.approx(160, abs=0.5)
    assert sides["printed: right side"][1][-1] == pytest.approx(9.8, abs=0.05)
    fixed = sides["corrected: right side"][1]
    assert fixed[-1] == pytest.approx(theorem2.corrected(theorem2.long_run()))
    assert (sides["corrected: left side, weighted by α"][1] < fixed).all()
    measured = rate["measured, biased and noisy"][1] * np.sqrt([30, 100, 300, 1000, 3000])
    assert measured == pytest.approx(np.full(5, 1.013), abs=0.003)
    assert rate["1.01 / √T"][1] * np.sqrt([30, 100, 300, 1000, 3000]) == pytest.approx(
        np.full(5, 1.013), abs=0.003
    )
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
    root = Path(__file__).resolve().parent.parent
    env = {**os.environ, "PYTHONPATH": str(root), "MPLBACKEND": "nonsense"}
    command = [sys.executable, "-m", "theory.theorem1"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
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
    folder = Path(check.__file__).parent
    main = 'if __name__ == "__main__":\n    show(check'
    alone = {path for path in folder.rglob("*.py") if main in path.read_text()}
    assert alone == {Path(name) for name in shown}  # no statement is missing from the whole


def test_an_import_draws_nothing_and_needs_no_matplotlib(tmp_path):
    words = "import sys, theory.check; assert 'matplotlib' not in sys.modules"
    root = Path(__file__).resolve().parent.parent
    env = {**os.environ, "PYTHONPATH": str(root)}
    assert subprocess.run([sys.executable, "-c", words], cwd=tmp_path, env=env).returncode == 0
    assert not list(tmp_path.iterdir())


def test_tracked_figures_are_never_overwritten_unasked(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "STATEMENTS", ())
    monkeypatch.setattr(check, "FIGURES", {})
    assert check.main([]) == 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [
        tmp_path / "runs" / "theory" / "check.json"
    ]


@pytest.mark.parametrize("arguments", [["--wrong"], ["extra"], ["--out"]])
def test_bad_usage_is_one_line_and_exit_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        check.main(arguments)
    assert stop.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


def test_an_unwritable_folder_is_bad_usage(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        check.main(["--out", str(tmp_path / "file" / "inside")])
    assert stop.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


def test_ctrl_c_is_one_line_and_exit_130(tmp_path):
    def heed():  # a shell's background jobs ignore the signal, and so would their children
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    root, words = (
        Path(__file__).resolve().parent.parent,
        [sys.executable, "-m", "theory.check", "--out", str(tmp_path / "x")],
    )
    env = {**os.environ}
    process = subprocess.Popen(words, cwd=root, stderr=subprocess.PIPE, env=env, preexec_fn=heed)
    while process.poll() is None and not (tmp_path / "x" / "check.json").exists():
        time.sleep(0.05)  # until it is past its imports
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and error.decode().splitlines() == [
        "python -m theory.check: interrupted"
    ]
