"""results/claims.md against the summary.json files beside it: each claim has a row, each number is what the runs say."""

import configparser
import dataclasses
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import experiment

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
PAGE = (RESULTS / "claims.md").read_text()
COUNTS = {"A": 14, "B": 6, "C": 11, "D": 5, "T": 4}  # claims of each paper, 40 in all
CLAIMS = [f"{paper}{i + 1}" for paper, count in COUNTS.items() for i in range(count)]
VERDICTS = ("reproduced", "partly", "contradicted", "not decided")
MACHINE = re.compile(r"(?:^|[\s=\"'])(?:/|~/|[A-Za-z]:\\|\\\\)")  # where an absolute path begins


def load(folder: Path):
    """results/verdicts.py, reading the runs in `folder`."""
    spec = importlib.util.spec_from_file_location("verdicts", RESULTS / "verdicts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ROOT = folder
    return module


def table(text: str) -> dict[str, list[str]]:
    """The cells after the first of each row whose first cell begins with a claim's name."""
    rows = {}
    for line in text.splitlines():
        if line.startswith("| ") and (name := line[2:].split()[0]) in CLAIMS:
            assert name not in rows, f"{name} has two rows"
            rows[name] = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[2:-1]]
    return rows


def wrong(text: str, verdicts) -> list[str]:
    """The claims whose 'ours' cell is not what the runs give."""
    return [name for name, cells in table(text).items() if cells[1] != verdicts.CELLS[name]()]


def strings(value):
    """Every string inside a JSON value, keys too."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)
    elif isinstance(value, str):
        yield value


SCRIPTS = ("fedavg_curriculum", "client_curriculum", "fedcl_fgn", "fedcl_gmm_sync", "fedac_art")
SUMMARIES = sorted(RESULTS.glob("*/*/summary.json"))


def test_every_claim_has_a_row_and_a_verdict():
    rows = table(PAGE)
    assert sorted(rows, key=CLAIMS.index) == CLAIMS
    for name, cells in rows.items():
        assert len(cells) == 5, f"{name}: wanted paper, ours, verdict, runs, scale"
        assert cells[2].startswith(VERDICTS), f"{name}: {cells[2]}"


def test_every_row_names_its_runs():
    for name, cells in table(PAGE).items():
        named = re.findall(r"\]\(([^)]+)\)", cells[3])
        assert named or cells[2].startswith("not decided"), f"{name} names no run"
        for path in named:
            assert (RESULTS / path).is_file() and path.endswith((".json", ".csv")), f"{name}: {path}"


def test_numbers_of_the_table_are_those_of_the_runs():
    assert wrong(PAGE, load(RESULTS)) == []


@pytest.mark.parametrize("name", CLAIMS)
def test_an_altered_number_is_noticed(name):
    """In the table: any digit of the row's 'ours' cell."""
    verdicts = load(RESULTS)
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {name} "))
    ours = table(PAGE)[name][1]
    digits = [i for i, character in enumerate(ours) if character.isdigit()]
    for i in digits:
        altered = ours[:i] + str((int(ours[i]) + 1) % 10) + ours[i + 1 :]
        assert wrong(row.replace(ours, altered), verdicts) == [name]


def test_an_altered_run_is_noticed(tmp_path):
    """In a summary.json: every accuracy a little lower in each trial, by another amount in every arm."""
    copy = Path(shutil.copytree(RESULTS, tmp_path / "results"))
    shutil.copytree(ROOT / "theory" / "figures", tmp_path / "theory" / "figures")
    for path in copy.glob("*/*/summary.json"):
        found = json.loads(path.read_text())
        for i, arms in enumerate(found["results"].values()):
            for j, figures in enumerate(arms.values()):
                for what in ("final", "last10"):
                    figures[what] = [a - 0.37 * (i + 1) * (j + 1) * (k + 1) for k, a in enumerate(figures[what])]
        path.write_text(json.dumps(found))
    noticed = set(wrong(PAGE, load(copy)))
    words = configparser.ConfigParser(interpolation=None)
    words.read(RESULTS / "claims.ini")
    texts = {name.upper(): text for paper in words.sections() for name, text in words[paper].items()}
    forms = r"\{(both|final|last10|each|std|slope|rising|counts|extremes|ranking|distinct)\b"
    accuracy = {name for name, text in texts.items() if re.search(forms, text)}
    assert len(accuracy) > 20 and accuracy <= noticed


def test_pages_are_what_the_program_writes():
    """results/pages.py --check: no table, verdict cell or command was typed by hand or has gone stale."""
    done = subprocess.run([sys.executable, RESULTS / "pages.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_front_page_has_every_verdict_and_their_count():
    text, rows = (RESULTS / "README.md").read_text(), table(PAGE)
    for name, cells in rows.items():
        [line] = [line for line in text.splitlines() if line.startswith(f"| {name} ")]
        assert line.endswith(f" | {cells[2]} |")
    said = re.search(r"40 claims: (.*)\.", text)[1]
    for verdict in VERDICTS:
        assert f"{sum(cells[2].startswith(verdict) for cells in rows.values())} {verdict}" in said.split(", ")


def test_a_table_of_a_page_holds_the_means_of_its_run(tmp_path, monkeypatch):
    """A page with a marker, and beside it a run with numbers that are easily averaged by hand."""
    monkeypatch.syspath_prepend(str(RESULTS))
    pages = importlib.import_module("pages")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages.verdicts, "ROOT", tmp_path)
    arm = {"final": [80.0, 82.0, 84.0], "last10": [70.0, 72.0, 77.0], "best": [90.0] * 3, "uploads": [10, 10, 10]}
    rival = arm | {"final": [81.0, 82.0, 86.0], "last10": [71.0, 73.0, 78.0]}
    run = {
        "results": {"alpha=0.1": {"a": arm, "b": rival}},
        "command": "python x.py",
        "device": "d",
        "versions": {},
        "commit": "c",
    }
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text(json.dumps(run | {"config": {}}))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "summary.json").write_text(json.dumps(run | {"config": {}}))
    monkeypatch.setitem(pages.PAPERS, ("own", "alpha=0.1", "b"), "85.5 +- 1.2")
    text = pages.script_page(
        "before\n<!-- table: run -->\nafter\n<!-- table: absent -->\n<!-- pairs: run absent: b - a, a - b -->\n"
    )
    assert "| alpha=0.1 | a | 82.00 +- 2.00 | 73.00 +- 3.61 |  | 10 |" in text
    assert "| alpha=0.1 | b | 83.00 +- 2.65 | 74.00 +- 3.61 | +1.0 [+1.0, +1.0] | 10 |" in text
    assert "python x.py" in text and "after" in text and "Not measured yet" in text
    assert "| mean of the last ten | b - a | a - b |\n| --- | --- | --- |\n" in text
    assert "| run alpha=0.1 | +1.0 [+1.0, +1.0] | -1.0 [-1.0, -1.0] |\n\n<!-- end -->" in text
    assert pages.script_page(text) == text
    text = pages.script_page("<!-- table: own -->")
    assert "| uploads | paper (off by) |" in text and "|  | 10 |  |" in text
    assert "+1.0 [+1.0, +1.0] | 10 | 85.5 +- 1.2 (-2.5) |" in text


DEFAULTS = {"fedcl_fgn": "fedcl_fgn/default"} | {name: f"{name}/digits" for name in SCRIPTS if name != "fedcl_fgn"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_default_run_of_a_page_has_the_defaults_of_its_script(name):
    """Every flag that changes a result; a sweep is a list in the summary and a tuple in the Config."""
    kept = json.loads((RESULTS / DEFAULTS[name] / "summary.json").read_text())["config"]
    defaults = {f.name: f.default for f in importlib.import_module(name).Config.__dataclass_fields__.values()}
    defaults = {n: list(v) if isinstance(v, tuple) else v for n, v in defaults.items() if n not in ("out", "threads", "jobs")}
    assert {n: v for n, v in kept.items() if n not in ("out", "threads", "jobs")} == defaults


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/README.md")), ids=lambda path: path.parent.name)
def test_no_command_is_typed_above_a_table(path):
    """The program prints the command of a run below its table; what stands above it says what it is."""
    for above, run in re.findall(r"\n\n([^\n]+(?:\n[^\n]+)*)\n\n<!-- table: (\S+) -->", path.read_text()):
        assert "python" not in above or not (RESULTS / run).exists(), run


@pytest.fixture
def reproduce(monkeypatch):
    monkeypatch.syspath_prepend(str(RESULTS))
    return importlib.import_module("reproduce")


def parsed(program: str, *flags: str) -> list:
    """The configurations that a command runs, in a string each, without what leaves its numbers as they are."""
    script = importlib.import_module(program.removesuffix(".py").replace("results/", ""))
    presets = getattr(script, "PRESETS", importlib.import_module("fedavg_curriculum").PRESETS)
    configs, *rest = experiment.parse(script.Config, presets, "doc", list(flags))
    assert configs
    return [str(dataclasses.replace(config, out="", jobs=1, resume=False, threads=1)) for config in configs]


def test_reproduce_lists_commands_that_parse_and_claims_that_are(reproduce):
    for work in reproduce.RUNS:
        assert parsed(*work.command(2)), work
    listed = {claim for work in reproduce.RUNS for claim in work.claims.split()}
    assert listed <= {*CLAIMS} and {*CLAIMS} - listed == {"A14", "C4", "C5", "T1", "T2", "T3", "T4"}
    assert len({work.place for work in reproduce.RUNS}) == len(reproduce.RUNS)


@pytest.mark.parametrize("place", sorted(set(re.findall(r"\]\(([^)]+)/summary\.json\)", PAGE))))
def test_reproduce_makes_the_run_that_a_claim_names(reproduce, place):
    """Its line in reproduce.csv is the command in its summary.json, but for the order of flags and where the run is kept."""
    work = next(work for work in reproduce.RUNS if work.place == place)
    _, *command = shlex.split(json.loads((RESULTS / place / "summary.json").read_text())["command"])
    assert parsed(*work.command(1)) == parsed(*command)


def test_reproduce_takes_places_and_refuses_what_it_does_not_know(reproduce, capsys):
    assert reproduce.main(["--list", "--only", "fedcl_fgn/fmnist-fig6"]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    with pytest.raises(SystemExit) as stopped:
        reproduce.main(["--only", "C3", "C12"])
    assert stopped.value.code == 2 and "--only C12: no claim" in capsys.readouterr().err


def test_commands_are_those_of_the_runs():
    """The page prints the command of every run that a row names."""
    for path in {path for cells in table(PAGE).values() for path in re.findall(r"\]\(([^)]+summary\.json)\)", cells[3])}:
        command = json.loads((RESULTS / path).read_text())["command"]
        assert command in PAGE.splitlines(), f"{path}: {command}"


@pytest.mark.parametrize("path", SUMMARIES, ids=lambda path: "-".join(path.parts[-3:-1]))
def test_no_path_of_a_machine(path):
    for text in strings(json.loads(path.read_text())):
        assert not MACHINE.search(text), text


@pytest.mark.parametrize("text", ["/tmp/x", "--out /home/a", "--data-dir=/data", "C:\\data", "~/x", "\\\\server\\x"])
def test_a_path_of_a_machine_is_seen(text):
    assert MACHINE.search(text)


@pytest.mark.parametrize("text", ["runs/x", "data", "python a.py --out results/a/b", "client - client-anti", "alpha=0.1"])
def test_a_relative_path_is_not(text):
    assert not MACHINE.search(text)
