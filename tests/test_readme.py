"""README.md and the scripts' pages against the scripts: commands run, flags exist, every column of metrics.csv is explained."""

import csv
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import experiment

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SCRIPTS = ("fedavg_curriculum", "client_curriculum", "fedcl_fgn", "fedcl_gmm_sync", "fedac_art")
SHORT = ("--rounds", "2", "--trials", "1", "--threads", "1")
every_script = pytest.mark.parametrize("script", SCRIPTS)


def page(script: str) -> str:
    return (ROOT / "results" / script / "README.md").read_text()


def commands(text: str, language: str = "bash") -> list[str]:
    blocks = re.findall(rf"```{language}\n(.*?)```", text, re.S)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True)


@every_script
def test_first_command_of_a_page_runs_and_its_columns_are_explained(script, tmp_path):
    line = next(c for c in commands(page(script)) if c.startswith(f"python {script}.py"))
    words = shlex.split(line, comments=True)[1:]
    done = run([str(ROOT / words[0]), *words[1:], *SHORT, "--out", str(tmp_path / "run")], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    with open(tmp_path / "run" / "metrics.csv") as file:
        columns = next(csv.reader(file))
    explained = README + page(script)
    missing = [column for column in columns if not re.search(rf"\b{re.escape(column)}\b", explained)]
    assert not missing, f"no page explains {missing}"


@every_script
def test_flags_on_a_page_exist(script):
    fields = importlib.import_module(script).Config.__dataclass_fields__
    known = {"--" + name.replace("_", "-") for name in fields} | {"--preset", "--list-presets", "--help"}
    programs = "".join(path.read_text() for folder in ("results", "tests") for path in ROOT.glob(f"{folder}/**/*.py"))
    known |= set(re.findall(r'"(--[a-z][a-z-]+)"', programs)) | {
        "--dissimilarity",
        "--show-schedule",
    }  # of the programs beside it
    written = re.sub(r"<!-- table: .*?<!-- end -->", "", page(script), flags=re.S)  # runs of their own time, flags of that time
    for flag in set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]+)", written)):
        assert flag in known or "--" + flag[5:] in known and flag.startswith("--no-"), flag


def test_commands_of_the_front_page_can_be_typed(tmp_path):
    """Each is parsed by its script as printed; the headline command, shortened, also runs."""
    lines = [c.split("&&")[-1].strip() for c in commands(README)]
    ours = [shlex.split(c) for c in lines if ".py" in c]
    assert len(ours) >= 5
    for words in ours:
        at = next(i for i, word in enumerate(words) if word.endswith(".py"))
        done = run([str(ROOT / words[at]), *words[at + 1 :], "--help"], tmp_path)
        assert done.returncode == 0, (words, done.stderr)
    headline = next(words for words in ours if "fedcl_fgn.py" in words)
    done = run([str(ROOT / headline[1]), *headline[2:], *SHORT], tmp_path)
    assert done.returncode == 0 and (tmp_path / "runs" / "fedcl_fgn" / "accuracy.png").exists(), done.stderr[-2000:]


def test_the_loop_of_the_front_page_trains(tmp_path):
    """'Copy it', as printed but for its length."""
    program = re.findall(r"```python\n(.*?)```", README, re.S)[-1].replace("range(20)", "range(6)")
    (tmp_path / "own.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{program}")
    done = run(["own.py"], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    accuracy = [float(value) for value in re.findall(r"'accuracy': ([\d.]+)", done.stdout)]
    assert len(accuracy) == 6 and accuracy[-1] > accuracy[0]


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted(ROOT.glob("results/**/README.md")), ROOT / "theory/README.md"])
def test_links_lead_somewhere(path):
    for name in re.findall(r"\]\(((?!http|#)[^)#]+)\)", path.read_text()):
        assert (path.parent / name).exists(), name


def test_front_page_is_short():
    assert len(README.splitlines()) <= 150 and len(README.encode()) <= 9000


def test_scripts_stand_alone():
    """Delete any four and the fifth still runs: a script imports the two modules and no other script."""
    for script in (*SCRIPTS, "common", "experiment"):
        imported = set(re.findall(r"^\s*(?:import|from) (\w+)", (ROOT / f"{script}.py").read_text(), re.M))
        allowed = {"common", "experiment"} if script in SCRIPTS else {"common"} if script == "experiment" else set()
        assert not imported & ({*SCRIPTS, "common", "experiment"} - allowed), script


def test_no_test_asserts_a_time():
    """Wall-clock assertions fail on a busy machine."""
    for path in (ROOT / "tests").glob("test_*.py"):
        assert not re.search(r"assert .*(perf_counter|time\.time)\(", path.read_text()), path.name


def flags(config: type, common: type = object) -> list[str]:
    """A line for each flag that a Config adds to or changes of the common ones: name, default, limits."""
    known, lines = getattr(common, "__dataclass_fields__", {}), []
    for name, field in config.__dataclass_fields__.items():
        meta = field.metadata or known[name].metadata
        if name not in known or (field.default, meta) != (known[name].default, known[name].metadata):
            values = field.default if isinstance(field.default, tuple) else (field.default,)
            limits = [f"{sign} {limit}" for sign, limit in meta["limits"].items()]
            lines.append(" ".join([f"--{name.replace('_', '-')}", *map(str, values), *limits]))
    return lines


def test_no_default_and_no_limit_changes_unnoticed():
    """A changed default is another experiment to those who compare theirs with ours, so it has to be changed in two places."""
    lines = ["common", *flags(experiment.Config)]
    for script in SCRIPTS:
        lines += ["", script, *flags(importlib.import_module(script).Config, experiment.Config)]
    assert lines == (ROOT / "tests" / "flags.txt").read_text().splitlines()
