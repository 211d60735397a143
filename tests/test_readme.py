"""README.md against the scripts: its commands run, its flags exist, and it explains every column of metrics.csv."""

import csv
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SCRIPTS = ("fedavg_curriculum", "client_curriculum", "fedcl_fgn", "fedcl_gmm_sync", "fedac_art")
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.S) for line in block.splitlines() if line.strip()]
SHORT = {"--rounds": "2", "--trials": "1", "--threads": "1"}


def section(script: str) -> str:
    """The text between a script's heading and the next heading of its level."""
    return re.split(r"\n## ", README.split(f"\n## {script}.py\n")[1])[0]


@pytest.mark.parametrize("script", SCRIPTS)
def test_command_and_columns(script, tmp_path):
    """The script's first command without real data runs as printed, but for its length."""
    line = next(c for c in COMMANDS if f"python {script}.py" in c and "--dataset" not in c)
    words = shlex.split(line.split("&&")[-1], comments=True)
    assert words[0] == "python"
    command = [sys.executable, str(ROOT / words[1]), *words[2:], *sum(SHORT.items(), ()), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    with open(tmp_path / "metrics.csv") as file:
        columns = next(csv.reader(file))
    explained = README.split("### What changes a bit")[0].split("Columns of `metrics.csv`")[1] + section(script)
    missing = [column for column in columns if not re.search(rf"\b{re.escape(column)}\b", explained)]
    assert not missing, f"README does not explain {missing}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_flags_exist(script):
    fields = importlib.import_module(script).Config.__dataclass_fields__
    known = {"--" + name.replace("_", "-") for name in fields} | {"--preset", "--list-presets", "--help"}
    for flag in set(re.findall(r"`(--[a-z0-9-]+)", section(script))):
        assert flag in known or "--" + flag[5:] in known and flag.startswith("--no-"), flag


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_own_flag_is_explained(script):
    module = importlib.import_module(script)
    common_flags = module.common.Config.__dataclass_fields__
    own = ["--" + name.replace("_", "-") for name in module.Config.__dataclass_fields__ if name not in common_flags]
    missing = [flag for flag in own if f"`{flag}" not in section(script)]
    assert not missing, missing


def test_files_of_the_tree_exist():
    for name in re.findall(r"\]\(((?!http|#)[^)#]+)\)", README):
        assert (ROOT / name).exists(), name


def test_no_test_asserts_a_time():
    """Wall-clock assertions fail on a busy machine."""
    for path in (ROOT / "tests").glob("test_*.py"):
        assert not re.search(r"assert .*(perf_counter|time\.time)\(", path.read_text()), path.name
