"""plain/: each program and the script of the same name give the same numbers, in float64.

The two share no line. So each is the other's oracle: a rule that only one of them changes is seen.
"""

import ast
import csv
import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from ordinary import load_plain as load
from torch.nn.utils import parameters_to_vector

from experiment import figures

ROOT = Path(__file__).resolve().parent.parent
ORDERS = ["curriculum", "anti", "random", "vanilla"]

# A list: one of these words. A pair: a number between these two. SGD with large steps is chaotic,
# and turns rounding errors of 1e-16 into differences that are seen, so lr and momentum are small.
COMMON = {
    "alpha": (0.05, 2.0),
    "clients": (24, 60),
    "clients_per_round": (2, 5),
    "min_size": (1, 4),
    "rounds": (3, 4),
    "batch_size": (8, 16),
    "lr": (0.005, 0.02),
    "seed": (0, 10**6),
}
SGD = {"epochs": (1, 2), "momentum": (0.0, 0.7), "weight_decay": (0.0, 0.01)}
PACING = {"pacing_a": (0.0, 1.2), "pacing_b": (0.0, 1.0)}
OPTIONS = {
    "fedcl_fgn": COMMON
    | SGD
    | {"method": ["cl", "base"], "delta": ["0.0", "0.02", "0.2", "inf"], "lr_decay": (0.8, 1.0)},
    "fedavg_curriculum": COMMON
    | SGD
    | PACING
    | {"order": ORDERS, "pacing": ["linear", "quadratic", "root", "step", "exponential"]},
    "client_curriculum": COMMON
    | SGD
    | PACING
    | {
        "client_order": ORDERS,
        "data_order": ORDERS,
        "score": ["G", "E"],
        "f_ord": (0.0, 1.0),
        "expert_epochs": (1, 1),
        "client_a": (0.0, 1.2),
        "client_b": (0.0, 1.0),
    },
    "fedac_art": COMMON
    | SGD
    | {
        "method": ["fedac", "fedac", "fedac", "base"],
        "clients": (5, 20),
        "rho": (0.4, 1.0),
        "art_alpha": (0.001, 0.5),
        "art_beta": ["1.0", "0.6"],
        "quantile": (0.0, 1.0),
        "w_small": (0.1, 1.5),
        "w_large": ["0.0", "0.4", "1.0", "1.5"],
    },
    "fedcl_gmm_sync": COMMON
    | {
        "method": ["fedcl", "fedcl", "fedcl", "fedavg"],
        "clients": (5, 10),
        "min_size": (10, 30),
        "rounds": (5, 6),
        "local_steps": (2, 5),
        "tau": ["10.0", "1.5", "2.3", "4.0"],
        "lam": (0.4, 3.0),
        "thresholds": ["0.8,0.6,0.2", "0.7,0.4", "0.9,0.75,0.5,0.3", "0.5"],
        "v": (0.3, 0.7),
        "generator_hidden": (8, 40),
    },
}
ONLY_IN_SCRIPT = {  # defaults of options that no program has
    "fedavg_curriculum": {"expert_epochs": 5},
    "fedac_art": {"solo_epochs": 100},
    "fedcl_fgn": {"p_double": 0.3, "p_halve": 0.3},
    "fedcl_gmm_sync": {"distill": 0.1, "mu": 0.1},
}
SETTINGS = 5
REPEATED = {  # functions that several programs repeat
    "evaluate": OPTIONS,
    "stream": OPTIONS,
    "load_data": OPTIONS,
    "partition": OPTIONS,
    "parse_options": OPTIONS,
    "make_model": OPTIONS.keys() - {"fedcl_gmm_sync"},  # which has FedGen's model
    "server_update": ["fedavg_curriculum", "client_curriculum"],
    "sample_losses": ["fedavg_curriculum", "client_curriculum"],
    "sort": ["fedavg_curriculum", "client_curriculum"],
}


def random_settings(name: str) -> list[list[str]]:
    """Command lines with random values. Together they use each word equally often."""
    rng = np.random.default_rng(sum(name.encode()))
    lines = [[] for _ in range(SETTINGS)]
    for option, allowed in OPTIONS[name].items():
        if isinstance(allowed, list):
            values = rng.permutation(np.resize(allowed, SETTINGS))
        elif isinstance(allowed[0], int):
            values = rng.integers(*allowed, SETTINGS, endpoint=True)
        else:
            values = rng.uniform(*allowed, SETTINGS).round(3)
        for line, value in zip(lines, values, strict=True):
            line += ["--" + option.replace("_", "-"), str(value)]
    return lines


def run_script(name: str, words: list[str], trial: int, folder: Path) -> tuple:
    """The trial's rows of metrics.csv, and the last weights."""
    words = [*words, "--dtype", "float64", "--trials", str(trial + 1), "--jobs", "1"]
    importlib.import_module(name).main([*words, "--out", str(folder)])
    with open(folder / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["trial"] == str(trial)]
    for path in (folder / "checkpoints").glob(f"*-trial{trial}.pt"):
        content = torch.load(path, weights_only=True)["content"]
        if isinstance(content, dict):  # not an expert
            return rows, content["state"]["theta"]
    raise LookupError(f"no checkpoint in {folder}")


@pytest.mark.parametrize("number", range(SETTINGS))
@pytest.mark.parametrize("name", OPTIONS)
def test_a_program_gives_the_numbers_of_its_script(name, number, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "plot", lambda *args, **options: None)  # no figures
    words = random_settings(name)[number]
    trial = int(number == 1)
    wanted_rows, wanted_theta = run_script(name, words, trial, tmp_path / "out")

    plain = load(name)
    config = plain.parse_options([*words, "--trial", str(trial)])
    model = plain.make_model(plain.stream(config, "init"))
    for row, wanted in zip(plain.federate(config, model), wanted_rows, strict=True):
        wanted = {column: float(wanted[column]) for column in row}
        assert row == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    theta = parameters_to_vector(model.parameters()).detach()
    wanted_theta = wanted_theta[: len(theta)]  # statistics of batch norm come after them
    torch.testing.assert_close(theta, wanted_theta, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_and_defaults_are_those_of_the_script(name):
    """Where the script compares several values, the program has the first one.

    The script's rho of -1 means 0.6 for images like the program's.
    """
    config = vars(load(name).parse_options([]))
    assert config.pop("rho", 0.6) == 0.6
    fields = importlib.import_module(name).Config.__dataclass_fields__
    del config["trial"]
    config |= ONLY_IN_SCRIPT.get(name, {})
    for option, default in config.items():
        wanted = fields[option].default
        assert default == (wanted[0] if isinstance(wanted, tuple) else wanted)


@pytest.mark.parametrize("before", [None, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("fgn", [0.0, 1.0, 1.5])
def test_what_is_critical_is_critical_in_the_script(before, fgn):
    found = load("fedcl_fgn").is_critical(before, fgn, 0.25)
    assert found == importlib.import_module("fedcl_fgn").is_critical(before, fgn, 0.25)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_program_needs_no_other_file_of_ours(name):
    tree = ast.parse((ROOT / "plain" / f"{name}.py").read_text())
    needed = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            needed |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            needed.add(node.module.split(".")[0])
    ours = {path.stem for path in ROOT.iterdir()}
    assert "torch" in needed
    assert not needed & ours


def run_exercise(number: int, changed: bool, tmp_path: Path, more="") -> list[dict]:
    """The rows of an exercise of plain/README.md: its file, its changed line, its command."""
    page = (ROOT / "plain" / "README.md").read_text()
    text = page.split("**")[2 * number]
    name, line = re.search(r"In `(\w+)\.py` change line (\d+)", text).groups()
    before, after = re.search(r"^-(.*)\n\+(.*)$", text, re.M).groups()
    lines = (ROOT / "plain" / f"{name}.py").read_text().splitlines()
    assert lines[int(line) - 1] == before
    if changed:
        lines[int(line) - 1] = after
    path = tmp_path / f"changed_{number}.py"
    path.write_text("\n".join(lines))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    words = re.search(r"python changed.py (.*)", text)[1].split()
    config = program.parse_options(words + more.split())
    return list(program.federate(config, program.make_model(program.stream(config, "init"))))


def test_the_first_exercise_has_its_result(tmp_path):
    before = [row["clients"] for row in run_exercise(1, False, tmp_path)]
    after = [row["clients"] for row in run_exercise(1, True, tmp_path)]
    page = (ROOT / "plain" / "README.md").read_text()
    assert f"Before: {str(before)[1:-1]}. After: {str(after)[1:-1]}." in page


@pytest.mark.parametrize(
    ("number", "option"), [(2, "--order anti"), (3, "--method base --lr 0.03")]
)
def test_an_exercise_has_the_result_of_an_option(number, option, tmp_path):
    assert option in (ROOT / "plain" / "README.md").read_text()
    found = run_exercise(number, True, tmp_path)
    wanted = run_exercise(number, False, tmp_path, option)
    unchanged = run_exercise(number, False, tmp_path)
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in wanted])
    assert found[-1]["loss"] != pytest.approx(unchanged[-1]["loss"])


@pytest.mark.parametrize("function", REPEATED)
def test_a_repeated_function_is_the_same_in_all_programs(function):
    sources = {inspect.getsource(getattr(load(name), function)) for name in REPEATED[function]}
    assert len(sources) == 1


ALL = "--clients 1438", "--clients-per-round 0", "--clients-per-round 1438", "--alpha 0"
ALL += "--batch-size 0", "--lr -1", "--lr nan", "--min-size 0", "--rounds 0", "--rounds 2.5"
ALL += "--seed -1", "--trial -1", "--clients 20 --min-size 100", "--dataset nowhere.npz"
SGD_TOO = "--epochs 0", "--momentum -1", "--momentum 1", "--weight-decay -1"
REFUSED = {
    "fedcl_fgn": (*ALL, *SGD_TOO, "--delta -1", "--lr-decay 2", "--lr-decay 0", "--method avg"),
    "fedavg_curriculum": ("--pacing cubic", "--order easy", "--pacing-a -1", "--pacing-b 2"),
    "client_curriculum": ("--f-ord 1.5", "--client-b -1", "--score L", "--expert-epochs 0"),
    "fedac_art": ("--rho 2", "--art-alpha 0", "--quantile 1.5", "--w-small 0"),
    "fedcl_gmm_sync": (*ALL, "--local-steps 0", "--min-size 1", "--thresholds S", "--lam 0")
    + ("--thresholds 0.2,0.6", "--thresholds 1,0.5", "--thresholds 0.5,0.5")
    + ("--thresholds 0.5,nan", "--thresholds=", "--v 2", "--generator-hidden 0"),
}
BAD_WORDS = [(name, words) for name in REFUSED for words in REFUSED[name]]


@pytest.mark.parametrize(("name", "words"), BAD_WORDS)
def test_impossible_numbers_are_refused_in_one_line(name, words, capsys):
    with pytest.raises(SystemExit) as refused:
        load(name).parse_options(words.split())
    assert refused.value.code == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert words.split()[0].rstrip("=") in last_line
