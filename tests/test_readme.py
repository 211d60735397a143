"""README.md and the scripts' pages against the scripts: commands, flags, columns, quoted code."""

import ast
import csv
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import common
import experiment

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SCRIPTS = ("fedavg_curriculum", "client_curriculum", "fedcl_fgn", "fedcl_gmm_sync", "fedac_art")
SHORT = ("--rounds", "2", "--trials", "1", "--jobs", "1")
MODULES = ("common", "training", "data", "nets", "experiment", "report")
every_script = pytest.mark.parametrize("script", SCRIPTS)


def page(script: str) -> str:
    return (ROOT / "results" / script / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def commands(text: str) -> list[str]:
    lines = "".join(blocks(text, "bash")).splitlines()
    return [line for line in lines if line.strip()]


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess:
    environment = {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


def source(path: str, function: str) -> str:
    text = (ROOT / path).read_text()
    for node in ast.parse(text).body:
        if getattr(node, "name", None) == function:
            return ast.get_source_segment(text, node)
    raise KeyError(function)


def dedent(code: str) -> str:
    return re.sub(r"^    ", "", code, flags=re.M)


# ------------------------------------------------------------------------------------ quoted code


def test_the_loop_of_the_front_page_is_the_scripts():
    loop = blocks(README, "python")[0]
    assert loop.strip() in dedent(source("fedcl_fgn.py", "federate"))
    assert loop.startswith("state = fl.start()")
    assert "run.record(" in loop


def test_local_training_of_the_front_page_is_the_trainers():
    assert blocks(README, "python")[1].strip() == source("training.py", "train_one_client")


def test_the_program_to_copy_trains(tmp_path):
    """As printed but for its length."""
    program = blocks(README, "python")[-1].replace("range(20)", "range(6)")
    (tmp_path / "mine.py").write_text(program)
    done = run(["mine.py"], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    accuracy = [float(value) for value in re.findall(r"'accuracy': ([\d.]+)", done.stdout)]
    assert len(accuracy) == 6
    assert accuracy[-1] > accuracy[0]


def test_the_verbs_of_the_front_page_exist():
    for verb in re.findall(r"`fl\.(\w+)\(", README):
        assert callable(getattr(common.Federation, verb)), verb
    for base in common.BASES:
        assert re.search(rf"\b{base}\b", README), base


# --------------------------------------------------------------------------------------- commands


@every_script
def test_first_command_of_a_page_runs_and_its_columns_are_explained(script, tmp_path):
    lines = commands(page(script))
    line = next(line for line in lines if line.startswith(f"python {script}.py"))
    words = shlex.split(line, comments=True)[1:]
    out = tmp_path / "run"
    done = run([str(ROOT / words[0]), *words[1:], *SHORT, "--out", str(out)], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    with open(out / "metrics.csv") as file:
        columns = next(csv.reader(file))
    explained = README + page(script)
    for column in columns:
        assert re.search(rf"\b{re.escape(column)}\b", explained), f"no page explains {column}"


@pytest.mark.parametrize("name", ["", *SCRIPTS])
def test_commands_of_a_page_can_be_typed(name, capsys):
    """Each is parsed by its script, as printed."""
    text = page(name) if name else README
    for line in commands(text):
        words = shlex.split(line.split("&&")[-1], comments=True)
        first = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
        if "-m" in words:
            first = words.index("-m") + 1
        if first is None or words[first].startswith(("pytest", "tests/")):
            continue
        module = importlib.import_module(words[first].removesuffix(".py").replace("/", "."))
        with pytest.raises(SystemExit) as stopped:
            module.main([*words[first + 1 :], "--help"])
        assert stopped.value.code == 0, (line, capsys.readouterr().err[-500:])


def test_the_headline_command_leaves_figures(tmp_path):
    line = next(line for line in commands(README) if "python fedcl_fgn.py" in line)
    words = shlex.split(line.split("&&")[-1])[1:]
    done = run([str(ROOT / words[0]), *words[1:], *SHORT], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    folder = tmp_path / "runs" / "fedcl_fgn" / "001"
    assert (folder / "accuracy.png").exists()
    assert (folder / "summary.json").exists()


@every_script
def test_flags_on_a_page_exist(script):
    known = {"preset", "list-presets", "help"}
    for path in [ROOT / f"{script}.py", *ROOT.glob(f"results/{script}/*.py")]:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        config = getattr(importlib.import_module(name), "Config", experiment.Config)
        known.update(field.replace("_", "-") for field in config.__dataclass_fields__)
    for flag in set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", page(script))):
        assert flag in known or flag.removeprefix("no-") in known, flag


# -------------------------------------------------------------------------------------- the house


PAGES = [ROOT / "README.md", *sorted(ROOT.glob("results/**/*.md")), ROOT / "theory/README.md"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for name in re.findall(r"\]\(((?!http|#)[^)#]+)\)", path.read_text()):
        assert (path.parent / name).exists(), name


def test_pages_are_short():
    words = 0
    for path in ROOT.glob("results/**/*.md"):
        words += len(path.read_text().split())
    assert words < 15_300
    assert len(README.splitlines()) <= 230


@pytest.mark.parametrize("name", [*SCRIPTS, *MODULES])
def test_arrows_go_one_way(name):
    """Delete any four scripts and the fifth still runs; no module knows a script."""
    text = (ROOT / f"{name}.py").read_text()
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.M))
    below = {
        "nets": {"data"},
        "data": set(),
        "training": {"data", "nets"},
        "common": {"training", "data", "nets"},
        "report": {"common", "data"},
        "experiment": {"report", "common", "training", "data", "nets"},
    }
    allowed = below.get(name, set(MODULES))
    assert imported & {*SCRIPTS, *MODULES, "results", "tests"} <= allowed


def test_no_test_asserts_a_time():
    """Wall-clock assertions fail on a busy machine."""
    for path in (ROOT / "tests").glob("test_*.py"):
        assert not re.search(r"assert .*(perf_counter|time\.time)\(", path.read_text()), path.name


def list_flags(config: type, common_flags: type = object) -> list[str]:
    """A line for each flag that a Config adds to or changes of the common ones."""
    known = getattr(common_flags, "__dataclass_fields__", {})
    lines = []
    for name, field in config.__dataclass_fields__.items():
        about = experiment.about_flag(config, name)
        if known.get(name) is field:
            continue
        default = field.default
        values = default if isinstance(default, tuple) else (default,)
        words = [f"--{name.replace('_', '-')}", *map(str, values)]
        for limit in ("above", "low", "high"):
            if about[limit] is not None:
                words.append(f"{limit} {about[limit]:g}")
        lines.append(" ".join(words))
    return lines


def test_no_default_and_no_limit_changes_unnoticed():
    """Who compares theirs with ours runs another experiment then: so change it in two places."""
    lines = ["common", *list_flags(experiment.Config)]
    for script in SCRIPTS:
        config = importlib.import_module(script).Config
        lines += ["", script, *list_flags(config, experiment.Config)]
    assert lines == (ROOT / "tests" / "flags.txt").read_text().splitlines()
