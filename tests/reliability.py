"""python tests/reliability.py [--first 0 --count 2000] [--seed 0]

Random command lines of the five scripts, each run in this process: every one trains all its arms
or is refused in one line. Prints the counts; a fault ends it with 1. kill_resume.py counts kills.
Tests take from here short runs, and the comparison of two folders bit for bit.
"""

import argparse
import collections
import contextlib
import importlib
import io
import os
import shutil
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import experiment  # noqa: E402
from experiment import figures  # noqa: E402

SCRIPTS = ("fedavg_curriculum", "client_curriculum", "fedcl_fgn", "fedcl_gmm_sync", "fedac_art")
SHORT = """--dataset=tiny.npz --device=cpu --jobs=1 --clients=4 --clients-per-round=2 --rounds=1
--trials=1 --batch-size=8 --min-size=2 --model=lenet5 --width=8 --epochs=1"""
QUICK = {
    "fedavg_curriculum": "--expert-epochs=1 --order curriculum vanilla",
    "client_curriculum": "--expert-epochs=1 --data-order=curriculum",
    "fedcl_fgn": "",
    "fedcl_gmm_sync": "--local-steps=2 --method fedcl feddistill+ --generator-hidden=8",
    "fedac_art": "--solo-epochs=20 --method fedac base",
}
ARMS = {
    "fedavg_curriculum": ["--order", "curriculum", "vanilla"],
    "client_curriculum": ["--client-order", "curriculum", "vanilla"],
    "fedcl_fgn": ["--method", "cl", "base"],
    "fedcl_gmm_sync": ["--method", "fedcl", "fedavg"],
    "fedac_art": ["--method", "fedac", "base"],
}


def write_tiny(folder: Path) -> None:
    """A data set of 16x16 colour images in three classes."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (60, 16, 16, 3), dtype=np.uint8)
    y = np.arange(60) % 3
    arrays = {"x_train": x[:40], "y_train": y[:40], "x_test": x[40:], "y_test": y[40:]}
    np.savez(folder / "tiny.npz", **arrays)


def short_run(name: str) -> list[str]:
    """Flags of a run that takes a tenth of a second."""
    return [*SHORT.split(), *QUICK[name].split()]


def run_line(name: str, line: list[str]) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a script's command line, in this process."""
    output, errors = io.StringIO(), io.StringIO()
    status = 0
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
        try:
            importlib.import_module(name).main(line)
        except SystemExit as stop:
            status = stop.code
    return status, output.getvalue(), errors.getvalue()


def errors_of(errors: str) -> list[str]:
    """Its lines without those that count rounds."""
    lines = errors.splitlines()
    return [line for line in lines if " rounds, " not in line]


def outcome(folder: Path) -> tuple:
    """(metrics.csv without seconds, every checkpoint's state): what must be the same."""
    df = pd.read_csv(folder / "metrics.csv", dtype=str, keep_default_na=False)
    states = {}
    for path in sorted((folder / "checkpoints").glob("*.pt")):
        content = torch.load(path, weights_only=True)["content"]
        states[path.name] = content["state"] if isinstance(content, dict) else content
    return df.drop(columns="seconds").to_dict("records"), states


def same(a, b) -> bool:
    """Bit for bit: NaN, which marks what is not known yet, equals itself."""
    if isinstance(a, torch.Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape
        return alike and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


# ---------------------------------------------------------------------------- random command lines

WORDS = ["", "0", "-1", "1", "2", "10", "1e400", "nan", "inf", "-inf", "1.5", "x", "true", "G"]
WORDS += ["digits", "1" + "0" * 400, "\u00fc", "--", "=", "%s", "off"]
BIG = {"vgg11", "resnet9", "resnet18", "alexnet"}  # seconds for a round
ONE_PROCESS = ("jobs", "threads")  # more cost seconds each, and have tests of their own
LEGAL_WORDS = {"dataset": ["tiny.npz"], "model": ["lenet5", "fedgen-cnn"]}


def flags_of(name: str) -> dict[str, dict]:
    """Every flag of a script, and what `flag` noted of it."""
    config_class = importlib.import_module(name).Config
    fields = config_class.__dataclass_fields__
    return {field: experiment.about_flag(config_class, field) for field in fields}


def legal_value(rng, flag: str, about: dict) -> str:
    """A value that the flag allows, such that the run stays short."""
    if about["choices"]:
        return str(rng.choice([word for word in about["choices"] if word not in BIG]))
    low = about["low"] or 0
    if about["kind"] is int:
        return str(1 if flag in ONE_PROCESS else low + int(rng.integers(0, 5)))
    if about["kind"] is float:
        high = about["high"] if about["high"] is not None else low + 2.0
        return str(round(float(rng.uniform(low, min(high, low + 2.0))), 4))
    return str(rng.choice(LEGAL_WORDS.get(flag, ["a", "b c", "\u00fc"])))


def random_line(rng, name: str) -> list[str]:
    """A short run with one to three flags changed; in six of ten some to a random word."""
    flags = flags_of(name)
    line = short_run(name)
    is_wild = rng.random() < 0.6
    for _ in range(rng.integers(1, 4)):
        flag = str(rng.choice([*flags]))
        option = "--" + flag.replace("_", "-")
        if is_wild and rng.random() < 0.6:
            words = [word for word in WORDS if flag not in ONE_PROCESS or word not in ("2", "10")]
            line += [option, str(rng.choice(words))]
        elif flags[flag]["kind"] is bool:
            line.append(option if rng.random() < 0.5 else "--no-" + option[2:])
        else:
            line += [option, legal_value(rng, flag, flags[flag])]
    return line


def fault_of(status: int, output: str, errors: str) -> str:
    """What is wrong with the way in which a command line ended; nothing where all is well."""
    lines = errors_of(errors)
    if "Traceback" in errors or status not in (0, 2, 3, 5):
        return f"exit {status}: {errors}"
    if status == 0 and "results: " not in output:
        return "exit 0 without results"
    if status in (2, 5) and (output or len(lines) != 1 or "error: " not in lines[0]):
        return f"exit {status} without its one line: {output} {errors}"
    if status == 3 and "diverged" not in lines[-1]:
        return f"exit 3 without a reason: {errors}"
    return ""


def draw_nothing(*_, **__) -> None:
    """In place of figures, which take most of a short run."""


@contextlib.contextmanager
def in_a_folder():
    """A temporary folder to work in, with the data set; figures are not drawn."""
    before = os.getcwd()
    gmm = importlib.import_module("fedcl_gmm_sync")  # a generator's lessons take most time
    with tempfile.TemporaryDirectory() as top, contextlib.ExitStack() as stack:
        os.chdir(top)
        stack.callback(os.chdir, before)
        write_tiny(Path(top))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(mock.patch.object(figures, "plot", draw_nothing))
        stack.enter_context(mock.patch("matplotlib.figure.Figure.savefig", draw_nothing))
        stack.enter_context(mock.patch.multiple(gmm, TEACHING_STEPS=2, TEACHING_BATCH=8))
        stack.enter_context(mock.patch("os.fsync"))
        yield Path(top)


def command_lines(seed=0, first=0, count=2000) -> collections.Counter:
    """How many lines ended with which status, over all scripts in turn; the rest are faults."""
    tally = collections.Counter()
    with in_a_folder() as folder:
        for k in range(first, first + count):
            name = SCRIPTS[k % len(SCRIPTS)]
            line = random_line(np.random.default_rng([seed, k]), name)
            try:
                status, output, errors = run_line(name, line)
                fault = fault_of(status, output, errors)
            except Exception:
                fault = traceback.format_exc()
            if fault:
                print(f"FAULT {name}.py {line}: {fault}", flush=True)
            tally["fault" if fault else status] += 1
            for path in folder.iterdir():
                if path.name != "tiny.npz":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first command line")
    parser.add_argument("--count", type=int, default=2000, help="how many command lines")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    tally = command_lines(flags.seed, flags.first, flags.count)
    print(f"command lines {flags.first} to {flags.first + flags.count - 1}:", end=" ")
    print(f"{tally[0]} trained every arm, exit 0; {tally[2]} refused in one line, exit 2;", end=" ")
    print(f"{tally[3]} diverged, exit 3; {tally[5]} not writable, exit 5; {tally['fault']} faults")
    sys.exit(tally["fault"] > 0)


if __name__ == "__main__":
    main()
