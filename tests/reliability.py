"""python tests/reliability.py [--parts partitions flags lines data] [--first 0 --count 10000] [--seed 0]

Counts, over seeded random cases: partitions that are disjoint, covering and without an empty client; wrong values of
every flag; command lines that train or are refused; damaged data files that are detected or harmless. A failure ends it with 1.
"""

import argparse
import collections
import contextlib
import csv
import importlib
import io
import math
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common

SCRIPTS = ("fedavg_curriculum", "client_curriculum", "fedcl_fgn", "fedcl_gmm_sync", "fedac_art")
WORDS = [
    "",
    "0",
    "-1",
    "1",
    "2",
    "10",
    "1e400",
    "nan",
    "inf",
    "-inf",
    "1.5",
    "x",
    "true",
    "G",
    "digits",
    "1" + "0" * 400,
    "\u00fc",
    "--",
    "=",
    "%s",
]


MOST_SAMPLES = 60_000  # Fashion-MNIST's


def partitions(rng, count=1000):
    """(good, clear errors, slowest in CPU seconds, repaired) over random n, classes, clients, alpha and kind."""
    good = errors = repaired = 0
    slowest = 0.0
    for _ in range(count):
        n, classes = int(10 ** rng.uniform(0, math.log10(MOST_SAMPLES))), int(rng.integers(1, 101))
        kind, alpha = str(rng.choice(["iid", "label-skew", "dirichlet", "dirichlet-client"])), 10 ** rng.uniform(-3, 3)
        min_size = int(rng.integers(1, 4))
        most = 1000 if rng.random() < 0.05 else np.clip(n // min_size, 1, 1000)  # one in twenty may ask for too many
        clients = int(10 ** rng.uniform(0, math.log10(most + 0.999)))
        labels = rng.integers(0, classes, n)
        begun = time.process_time()
        try:
            shards, moved = common.partition(kind, labels, clients, alpha, np.random.default_rng(0), min_size)
        except common.UsageError:
            assert clients * min_size > n
            errors += 1
            continue
        slowest = max(slowest, time.process_time() - begun)
        together = np.concatenate(shards)
        assert len(shards) == clients and len(together) == n and len(np.unique(together)) == n, (kind, n, clients)
        assert min(map(len, shards)) >= min_size, (kind, n, clients, alpha)
        good, repaired = good + 1, repaired + (moved > 0)
    return good, errors, slowest, repaired


# ------------------------------------------------------------------------------------------------------ command lines


def flags_of(script) -> dict[str, dict]:
    """Every flag of a script and what is known of it: kind, choices, limits, many."""
    known = {f.name: f.metadata for f in common.Config.__dataclass_fields__.values()}
    own = {f.name: f.metadata or known[f.name] for f in script.Config.__dataclass_fields__.values()}
    return {"--" + name.replace("_", "-"): meta for name, meta in own.items()}


def run_line(script, line) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a command line, in this process."""
    errors, output = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output), mock.patch.object(sys, "argv", ["run"]):
        try:
            script.main(line)
            status = 0
        except SystemExit as stop:
            status = stop.code
    return status, output.getvalue(), errors.getvalue()


def wrong_values(flag: str, meta: dict) -> dict[str, tuple[str, list[str]]]:
    """{what is wrong: (value, words that the refusal must hold)}; what does not apply to the flag is left out."""
    if meta["kind"] is bool:
        return {"wrong type": ("x", [])}
    if meta["kind"] is str and not meta["choices"]:  # any word names a folder
        return dict.fromkeys(("wrong type", "nan", "inf"), ("no-such", list(common.DATASETS))) if flag == "--dataset" else {}
    limits = [(sign, meta[name]) for name, sign in (("low", ">="), ("above", ">"), ("high", "<="), ("below", "<"))]
    allowed = list(meta["choices"]) or [f"{sign} {value}" for sign, value in limits if value is not None]
    cases = {"wrong type": "no-such", "nan": "nan", "inf": "inf", "empty": ""}
    if meta["choices"]:
        return {name: (value, allowed) for name, value in cases.items()}
    low, above, high, below = (value for _, value in limits)
    step = 1 if meta["kind"] is int else 0.5
    if meta["kind"] is int:
        cases["wrong type, a fraction"] = "1.5"
    if meta["infinite"]:
        cases.pop("inf")
    cases["below"] = str(low - step if low is not None else above)
    if high is not None or below is not None:
        cases["above"] = str(high + step if high is not None else below)
    return {name: (value, allowed) for name, value in cases.items()}


def flag_matrix() -> collections.Counter:
    """How many wrong values of each kind were refused: exit status 2, one line with flag, value and what is allowed."""
    refused = collections.Counter()
    for name in SCRIPTS:
        script = importlib.import_module(name)
        for flag, meta in flags_of(script).items():
            for wrong, (value, words) in wrong_values(flag, meta).items():
                line = [f"{flag}={value}"] if meta["kind"] is bool else [flag, value]
                accepts = AssertionError(f"{name} accepts {line}")
                guard = contextlib.nullcontext() if flag == "--dataset" else mock.patch("common._launch", side_effect=accepts)
                with guard:
                    status, output, errors = run_line(script, line)
                assert status == 2 and not output and errors.count("\n") == 1, (name, line, status, errors)
                assert flag in errors and (value or repr(value)) in errors, (name, line, errors)
                assert all(word in errors for word in words), (name, line, errors)
                refused[wrong.split(",")[0]] += 1
    return refused


TINY = {
    "clients": 4,
    "clients-per-round": 2,
    "rounds": 1,
    "trials": 1,
    "batch-size": 8,
    "min-size": 2,
    "model": "lenet5",
    "width": 8,
}
QUICK = {
    "fedavg_curriculum": "--epochs 1 --expert-epochs 1 --order curriculum vanilla",
    "client_curriculum": "--epochs 1 --expert-epochs 1 --data-order curriculum",
    "fedcl_fgn": "--epochs 1",
    "fedcl_gmm_sync": "--local-steps 2 --method fedcl feddistill+ --generator-hidden 8 --model fedgen-cnn",
    "fedac_art": "--epochs 1 --warmup 1 --solo-epochs 2 --arms fedac base",
}
BIG = {"vgg11", "resnet9", "resnet18"}  # seconds for a round
ONE_PROCESS = ("--jobs", "--threads")  # more cost seconds each, and have tests of their own


def legal_value(rng, flag: str, meta: dict, script) -> list[str]:
    """A value the flag allows, such that the run stays short."""
    if meta["choices"]:
        words = [word for word in meta["choices"] if word not in BIG]
        return [str(word) for word in rng.permutation(words)[: rng.integers(1, 4) if meta["many"] else 1]]
    if meta["kind"] is int:
        low = meta["low"]
        return [str(1 if flag in ONE_PROCESS else int(low + rng.integers(0, 5)))]
    if meta["kind"] is float:
        low, high = (meta[a] if meta[a] is not None else meta[b] for a, b in (("low", "above"), ("high", "below")))
        top = low + 2.0 if high is None else min(high, low + 2.0)
        inner = [round(float(v), 4) for v in rng.uniform(low, top, 3)]
        edges = [meta[name] for name in ("low", "high") if meta[name] is not None and abs(meta[name]) <= 10]
        if meta["many"]:
            return [str(v) for v in sorted(inner[: rng.integers(1, 4)], reverse=True)]
        return [str(rng.choice([*inner, *edges]))]
    return [str(rng.choice(["tiny.npz", "tree"]))] if flag == "--dataset" else [str(rng.choice(["a", "b c", "\u00fc"]))]


def short_run(script) -> list[str]:
    """Flags of a run that takes a tenth of a second."""
    line = ["--dataset=tiny.npz", "--device=cpu", "--threads=1", "--model=lenet5", *(f"--{k}={v}" for k, v in TINY.items())]
    return [*line, *QUICK[script.__name__].split()]


def random_line(rng, script) -> list[str]:
    """A short run with one to three flags changed; in six of ten some to a random word or to too few or many."""
    flags = flags_of(script)
    line = short_run(script)
    wild = rng.random() < 0.6
    for _ in range(rng.integers(1, 4)):
        flag = str(rng.choice([*flags, "--preset", "--no-such-flag"], p=[0.98 / len(flags)] * len(flags) + [0.015, 0.005]))
        meta = flags.get(flag)
        if meta is None:
            line += [flag, str(rng.choice(list(script.PRESETS)))]
        elif wild and rng.random() < 0.6:
            words = [word for word in WORDS if not (flag in ONE_PROCESS and word in ("2", "10"))]
            line += [flag, *(str(word) for word in rng.choice(words, rng.choice(3, p=[0.1, 0.8, 0.1])))]
        elif meta["kind"] is bool:
            line.append(flag if rng.random() < 0.5 else "--no-" + flag[2:])
        else:
            line += [flag, *legal_value(rng, flag, meta, script)]
    return line


def write_tiny(folder: Path) -> None:
    """A data set of 16x16 images in three classes, as a file and as a tree."""
    from PIL import Image

    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (60, 16, 16, 3), dtype=np.uint8), np.arange(60) % 3
    np.savez(folder / "tiny.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    for i in range(60):
        path = folder / "tree" / ("train" if i < 40 else "test") / f"class{y[i]}" / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[i]).save(path)


def has_trained(seen: dict, folder: Path) -> bool:
    """Whether every arm, setting and trial of a run that ended with 0 has all rounds, a test, steps and a checkpoint."""
    config, sweep, methods = seen["launched"]
    with open(folder / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    runs = 0
    for setting, flags in common._settings(sweep):
        each = common.dataclasses.replace(config, **flags)
        for method in methods(each):
            for trial in range(config.trials):
                own = [r for r in rows if (r["method"], r["setting"], r["trial"]) == (method, setting, str(trial))]
                saved = common.load_checkpoint(common.Run(each, method, setting, trial, folder).path)
                whole = [int(r["round"]) for r in own] == list(range(1, each.rounds + 1)) and saved["round"] == each.rounds
                if not (whole and 0 <= float(own[-1]["accuracy"]) <= 100 and int(own[-1]["uploads"]) >= each.rounds):
                    return False
                runs += 1
    return runs > 0 and len(rows) == runs * config.rounds and seen["steps"] >= runs * config.rounds


def fault_of(status: int, output: str, errors: str, seen: dict) -> str:
    """What is wrong with the way in which a command line ended; nothing where all is well."""
    last = (errors.splitlines() or [""])[-1]
    if status == 0 and not ("results: " in output and has_trained(seen, Path(seen["launched"][0].out or "runs/run"))):
        return "exit 0 without having trained"
    if status == 2 and not (errors.count("\n") == 1 and "error: " in last and not output):
        return f"exit 2 without its one line: {output} {errors}"
    if status == 3 and not ("error: " in last and "not finite" in last):
        return f"exit 3 without a reason: {errors}"
    return "" if status in (0, 2, 3) else f"exit {status}: {errors}"


@contextlib.contextmanager
def watched():
    """A temporary folder to work in and a function (script, line) -> (status, fault) that runs a line in this process there."""
    seen, train, launch = {}, common.train, common._launch

    def counted(*args, **flags):
        update = train(*args, **flags)
        seen["steps"] += int(np.sum(update.steps))
        return update

    def launched(config, sweep, methods, *rest):
        seen["launched"] = config, sweep, methods
        return launch(config, sweep, methods, *rest)

    def closed(figure, path):
        importlib.import_module("matplotlib.pyplot").close(figure)

    def run(script, line):
        seen.update(steps=0, launched=None)
        try:
            status, output, errors = run_line(script, line)
            return status, fault_of(status, output, errors, seen)
        except Exception:
            return None, traceback.format_exc()

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.callback(os.chdir, os.getcwd())
        os.chdir(folder)
        write_tiny(folder)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for name, stand_in in (("train", counted), ("_launch", launched), ("save_figure", closed)):
            stack.enter_context(mock.patch.object(common, name, stand_in))
        gmm = importlib.import_module("fedcl_gmm_sync")  # the generator's lessons and the flush to disk take most time
        stack.enter_context(mock.patch.multiple(gmm, TEACHING_STEPS=2, TEACHING_BATCH=8))
        stack.enter_context(mock.patch("os.fsync"))
        yield folder, run


def command_lines(seed=0, first=0, count=10_000) -> collections.Counter:
    """How many lines trained (exit 0), were refused (2) or diverged (3), over all scripts in turn; the rest are faults."""
    tally = collections.Counter()
    with watched() as (folder, run):
        for k in range(first, first + count):
            script = importlib.import_module(SCRIPTS[k % len(SCRIPTS)])
            line = random_line(np.random.default_rng([seed, k]), script)
            line = line if "--out" in line else [*line, "--out", f"run{k}"]
            status, fault = run(script, line)
            if fault:
                print(f"FAULT {script.__name__}.py {line}: {fault}", flush=True)
            tally["fault" if fault else status] += 1
            for path in folder.iterdir():
                if path.name not in ("tiny.npz", "tree"):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return tally


def same_data(a, b) -> bool:
    return all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("x_train", "y_train", "x_test", "y_test"))


def write_formats(folder: Path) -> dict[str, tuple[list, list[Path]]]:
    """A small data set in every kind of file: {kind: (arguments of load_data, its files)}."""
    write_tiny(folder)
    rng = np.random.default_rng(1)
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split, n in (("train", 40), ("t10k", 20)):
        images, labels = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8), (np.arange(n) % 3).astype(np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
            (raw / f"{split}-{kind}-ubyte").write_bytes(head + array.tobytes())
    letters = np.array(list("etaoin shrdlu\n"))
    roles = (f"{name}:\n{''.join(rng.choice(letters[:-1], 900))}" for name in ("A", "B"))
    (folder / "tinyshakespeare.txt").write_text("\n\n".join(roles))
    return {
        "npz": ([str(folder / "tiny.npz")], [folder / "tiny.npz"]),
        "png tree": ([str(folder / "tree")], sorted((folder / "tree").rglob("*.png"))),
        "mnist": (["mnist", str(folder)], sorted(raw.iterdir())),
        "shakespeare": (["shakespeare", str(folder)], [folder / "tinyshakespeare.txt"]),
    }


CHECKED = ("npz", "png tree")  # formats with a checksum; the other two show only what breaks their structure


def damaged_files(rng, count=100):
    """{format: how often damage was detected, harmless or unseen}: `count` files, cut and with a flipped bit in turn."""
    counts = {}
    with tempfile.TemporaryDirectory() as top:
        for name, (source, files) in write_formats(Path(top)).items():
            common.load_data.cache_clear()
            before, tally = common.load_data(*source), collections.Counter()
            for k in range(count):
                path = files[int(rng.integers(len(files)))]
                whole = path.read_bytes()
                broken, at = bytearray(whole), int(rng.integers(len(whole)))
                if k % 2:
                    broken = broken[:at]
                else:
                    broken[at] ^= 1 << int(rng.integers(8))
                path.write_bytes(broken)
                common.load_data.cache_clear()
                try:
                    with mock.patch("urllib.request.urlopen", side_effect=OSError("no network")):
                        after = common.load_data(*source)
                    found = "harmless" if same_data(before, after) else "unseen"
                except common.UsageError:
                    found = "detected"
                tally[f"{found}, {'cut' if k % 2 else 'flipped'}"] += 1
                path.write_bytes(whole)
            counts[name] = tally
    common.load_data.cache_clear()
    return counts


def main() -> None:
    parts = ("partitions", "flags", "lines", "data")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="*", default=parts, choices=parts)
    parser.add_argument("--first", type=int, default=0, help="number of the first command line")
    parser.add_argument("--count", type=int, default=10_000, help="how many command lines")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    rng, failed = np.random.default_rng(flags.seed), 0
    if "partitions" in flags.parts:
        good, errors, slowest, moved = partitions(rng)
        print(
            f"partitions: {good} good ({moved} of them repaired), {errors} refused for too few samples, slowest {slowest:.2f} s"
        )
    if "flags" in flags.parts:
        refused = flag_matrix()
        each = ", ".join(f"{name} {n}" for name, n in refused.items())
        print(f"flags: {refused.total()} of {refused.total()} wrong values refused with exit 2 and one line ({each})")
    if "lines" in flags.parts:
        tally = command_lines(flags.seed, flags.first, flags.count)
        numbers = f"{flags.first} to {flags.first + flags.count - 1}"
        shown = f"{tally[0]} trained every arm, exit 0; {tally[2]} refused in one line, exit 2; {tally[3]} diverged, exit 3"
        print(f"command lines {numbers}: {shown}; {tally['fault']} faults (tracebacks, or 0 without having trained)")
        failed += tally["fault"]
    if "data" in flags.parts:
        for name, tally in damaged_files(rng).items():
            print(f"damaged {name}: {'; '.join(f'{found} {n}' for found, n in sorted(tally.items()))}")
            failed += sum(n for found, n in tally.items() if "unseen" in found) if name in CHECKED else 0
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
