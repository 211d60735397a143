"""README.md, REFERENCE.md and the pages of the scripts: their snippets, commands, names, links."""

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import bases
import experiment

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
REFERENCE = (ROOT / "REFERENCE.md").read_text()
SCRIPTS = ("fedavg_curriculum", "client_curriculum", "fedcl_fgn", "fedcl_gmm_sync", "fedac_art")
SHORT = ("--rounds", "2", "--trials", "1", "--jobs", "1")
MODULES = ("bases", "common", "training", "recording", "stacks", "data", "nets", "errors")
MODULES += ("client_layers", "user_files", "chunks", "experiment")
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


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below this heading of REFERENCE.md, its head left out."""
    section = re.split(rf"^#+ {re.escape(heading)}\n", REFERENCE, flags=re.M)[1]
    table = re.search(r"(?:^\|.*\n)+", section, re.M).group()
    return [re.split(r" *\| *", line)[1:-1] for line in table.splitlines()[2:]]


# --------------------------------------------------------------------------------------- snippets


def test_the_sampler_runs_in_an_ordinary_loop(tmp_path):
    (tmp_path / "mine.py").write_text(blocks(README, "python")[0])
    done = run(["mine.py"], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["torch.Size([32, 20]) torch.Size([32])"] * 101


@pytest.mark.parametrize(
    ("name", "short", "said"),
    [
        ("contrast", ["--rounds", "2", "--epochs", "1"], "curriculum by contrast - random, final:"),
        ("largest", ["--rounds", "2", "--budget", "32"], "fedavg largest - fedavg, final:"),
    ],
)
def test_a_method_of_ones_own_is_compared(name, short, said, tmp_path):
    """As on the page, where the first line of the block is the command, but shorter."""
    [block] = [block for block in blocks(README, "python") if f"def {name}(" in block]
    assert len(block.splitlines()) <= 10
    (tmp_path / "mine.py").write_text(block)
    program, *words = shlex.split(block.splitlines()[0].removeprefix("# python "))
    start = ["-m", words.pop(0)] if program == "-m" else [str(ROOT / program)]
    done = run([*start, *words, *short, "--trials", "2", "--jobs", "1"], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert said in done.stdout


# -------------------------------------------------------------------------------------- reference


def test_bases_and_their_defaults():
    listed = {}
    for base, _, _, options in rows("Bases (`--base`)"):
        listed[base.strip("`")] = dict(re.findall(r"`--([a-z-]+)` \(([\d.]+)\)", options))
    assert listed.keys() == bases.BASES.keys()
    for name, options in listed.items():
        base = bases.BASES[name]
        used = {"mu", "server_lr"} - {*base.unread}
        assert options.keys() == {option.replace("_", "-") for option in used}
        for option in used:
            assert float(options[option.replace("_", "-")]) == getattr(base, option)


def test_the_docstrings_that_the_page_names_exist():
    for _, where in rows("Reference"):
        names, _, place = where.partition(" in [")
        module = importlib.import_module(re.split(r"[./\]]", place)[0])
        for name in re.findall(r"`(\w+)`", names):
            assert getattr(module, name).__doc__


# --------------------------------------------------------------------------------------- commands


@every_script
def test_what_the_first_command_of_a_page_leaves_is_explained(script, tmp_path):
    """Every file of its folder, and every column of metrics.csv."""
    lines = commands(page(script))
    line = next(line for line in lines if line.startswith(f"python {script}.py"))
    typed = shlex.split(line, comments=True)[1:]
    out = tmp_path / "run"
    done = run([str(ROOT / typed[0]), *typed[1:], *SHORT, "--out", str(out)], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    names = (out / "metrics.csv").read_text().splitlines()[0].split(",")
    names += [path.name for path in out.iterdir()]
    explained = REFERENCE + page(script)
    for name in names:
        assert re.search(rf"(?<!\w){re.escape(name)}\b", explained), f"no page explains {name}"


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


def test_the_headline_command_prints_what_the_page_shows(tmp_path):
    line = next(line for line in commands(README) if "python fedcl_fgn.py" in line)
    typed = shlex.split(line.split("&&")[-1])[1:]
    done = run([str(ROOT / typed[0]), *typed[1:], *SHORT, "--trials", "2"], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    for line in blocks(README, "text")[0].splitlines():
        for word in re.findall(r"[a-z+]+", line.partition("001")[0]):
            assert word in done.stdout, word
    assert (tmp_path / "runs" / "fedcl_fgn" / "001" / "summary.json").exists()


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


PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("[rt]*/**/*.md"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for name in re.findall(r"\]\(((?!http|#)[^)#]+)\)", path.read_text()):
        assert (path.parent / name).exists(), name


@pytest.mark.parametrize("name", [*SCRIPTS, *MODULES])
def test_arrows_go_one_way(name):
    """Delete any four scripts and the fifth still runs; no module knows a script."""
    paths = [*ROOT.glob(f"{name}.py"), *ROOT.glob(f"{name}/*.py")]
    text = "".join(path.read_text() for path in paths)
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.M))
    below = {
        "errors": set(),
        "data": {"errors"},
        "user_files": {"data", "errors"},
        "client_layers": set(),
        "nets": {"client_layers", "data", "errors", "user_files"},
        "stacks": {"client_layers", "nets", "errors"},
        "recording": {"stacks", "nets", "errors"},
        "training": {"client_layers", "recording", "stacks", "data", "nets", "errors"},
        "bases": {"training", "recording", "data", "nets", "errors"},
        "chunks": {"training", "data", "nets", "errors"},
        "common": {"bases", "chunks", "client_layers", "training", "data", "nets", "errors"},
        "experiment": {"bases", "common", "training", "recording", "errors", "data", "nets"}
        | {"user_files"},
    }
    allowed = below.get(name, set(MODULES))
    assert imported & {*SCRIPTS, *MODULES, "results", "tests"} <= allowed


def list_flags(config: type, common_flags: type = object) -> list[str]:
    """A line for each flag that a Config adds to or changes of the common ones."""
    known = getattr(common_flags, "__dataclass_fields__", {})
    lines = []
    for name, field in config.__dataclass_fields__.items():
        about = experiment.about_flag(config, name)
        if known.get(name) is field:
            continue
        values = about["sweep"] or (field.default,)
        words = [f"--{name.replace('_', '-')}", *map(str, values)]
        for limit in ("above", "low", "high"):
            if about[limit] is not None:
                words.append(f"{limit} {about[limit]:g}")
        lines.append(" ".join(words))
    return lines


def test_packages_and_version_are_the_same_in_every_file():
    project = (ROOT / "pyproject.toml").read_text()
    *packages, builder = re.findall(r'"([\w-]+>=[\d.]+)"', project)
    assert packages == (ROOT / "requirements.txt").read_text().split()
    assert builder.startswith("setuptools")
    version = re.search(r'^version = "(.+)"$', project, re.M)[1]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_no_default_and_no_limit_changes_unnoticed():
    """Who compares theirs with ours runs another experiment then: so change it in two places."""
    lines = ["common", *list_flags(experiment.Config)]
    for script in SCRIPTS:
        config = importlib.import_module(script).Config
        lines += ["", script, *list_flags(config, experiment.Config)]
    assert lines == (ROOT / "tests" / "flags.txt").read_text().splitlines()
