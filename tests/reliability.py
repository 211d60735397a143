"""python tests/reliability.py [--parts partitions flags lines data runs pairs disks] [--first 0 --count 2000] [--seed 0]

Counts, over seeded random cases: partitions that are disjoint, covering and without an empty client; wrong values of
every flag; command lines that train or are refused; damaged files of data and of runs that are detected or harmless; two runs
in one folder; disks that are full after so many bytes. A failure ends it with 1. tests/kill_resume.py counts kills.
"""

import argparse
import collections
import contextlib
import csv
import functools
import importlib
import io
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from pathlib import Path
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
import experiment

ROOT = Path(common.__file__).parent
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
    """Every flag of a script and what is known of it: kind, choices, limits, whether it takes several values."""
    known = {f.name: f.metadata for f in experiment.Config.__dataclass_fields__.values()}
    own = {f.name: f.metadata or known[f.name] for f in script.Config.__dataclass_fields__.values()}
    many = {name: {"many": name not in experiment.SINGLE} for name in own}
    return {"--" + name.replace("_", "-"): dict(meta) | many[name] for name, meta in own.items()}


def run_line(script, line) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a command line, in this process."""
    errors, output = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output), mock.patch.object(sys, "argv", ["run"]):
        try:
            script.main(list(line))
            status = 0
        except SystemExit as stop:
            status = stop.code
    return status, output.getvalue(), errors.getvalue()


FREE_WORDS = ("--score", "--select", "--model", "--thresholds")  # checked by their own function, not by a list


def wrong_values(flag: str, meta: dict) -> dict[str, tuple[str, list[str]]]:
    """{what is wrong: (value, words that the refusal must hold)}; what does not apply to the flag is left out."""
    kind, limits = meta["kind"], meta["limits"]
    if kind is bool:
        return {"wrong type": ("x", ["on", "off"])} if meta["many"] else {}
    allowed = list(meta["choices"]) or [f"{sign} {value}" for sign, value in limits.items()]
    cases = {"wrong type": "no-such", "nan": "nan", "inf": "inf", "empty": ""}
    if meta["choices"]:
        return {name: (value, allowed) for name, value in cases.items()}
    if kind not in (int, float):  # any word names a folder
        words = [] if flag in FREE_WORDS else list(common.DATASETS)
        return dict.fromkeys(("wrong type", "nan", "inf"), ("no-such", words)) if flag in ("--dataset", *FREE_WORDS) else {}
    if kind is int:
        cases["wrong type, a fraction"] = "1.5"
    if limits.get("<=") == math.inf:
        cases.pop("inf")
    step = 1 if kind is int else 0.5
    if ">=" in limits or ">" in limits:
        cases["below"] = str(limits[">="] - step if ">=" in limits else limits[">"])
    if limits.get("<=", math.inf) < math.inf or "<" in limits:
        cases["above"] = str(limits["<="] + step if "<=" in limits else limits["<"])
    return {name: (value, allowed) for name, value in cases.items()}


def flag_matrix() -> collections.Counter:
    """How many wrong values of each kind were refused: exit status 2, one line with flag, value and what is allowed."""
    refused = collections.Counter()
    for name in SCRIPTS:
        script = importlib.import_module(name)
        for flag, meta in flags_of(script).items():
            for wrong, (value, words) in wrong_values(flag, meta).items():
                line = [f"{flag}={value}"]
                accepts = AssertionError(f"{name} accepts {line}")
                late = flag in ("--dataset", "--model")  # what is wrong with these is found when they are read
                guard = contextlib.nullcontext() if late else mock.patch("experiment.conduct", side_effect=accepts)
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
    "fedcl_gmm_sync": "--epochs 1 --local-steps 2 --method fedcl feddistill+ --generator-hidden 8 --model fedgen-cnn",
    "fedac_art": "--epochs 1 --warmup 1 --solo-epochs 20 --arm fedac base",
}
BIG = {"vgg11", "resnet9", "resnet18"}  # seconds for a round
ONE_PROCESS = ("--jobs", "--threads")  # more cost seconds each, and have tests of their own


def legal_value(rng, flag: str, meta: dict) -> list[str]:
    """One to three values that the flag allows, such that the run stays short."""
    count, limits = int(rng.integers(1, 3)) if meta["many"] and rng.random() < 0.3 else 1, meta["limits"]
    if meta["choices"]:
        words = [word for word in meta["choices"] if word not in BIG]
        return [str(word) for word in rng.permutation(words)[:count]]
    if meta["kind"] is int:
        return [str(1 if flag in ONE_PROCESS else int(limits.get(">=", 1) + k)) for k in rng.integers(0, 5, count)]
    if meta["kind"] is float:
        low = limits.get(">=", limits.get(">", 0.0))
        top = min(limits.get("<=", limits.get("<", low + 2.0)), low + 2.0)
        inner = [round(float(v), 4) for v in rng.uniform(low, top, 3)]
        edges = [limits[sign] for sign in (">=", "<=") if abs(limits.get(sign, math.inf)) <= 10]
        return [str(v) for v in rng.choice([*inner, *edges], count, replace=False)]
    words = {"--dataset": ["tiny.npz", "tree"], "--model": ["lenet5", "fedgen-cnn"], "--thresholds": ["0.8,0.6", "0.5"]}
    words |= {"--score": ["G", "L", "LG_pred", "E"], "--select": ["uniform", "size"]}
    return [str(rng.choice(words.get(flag, ["a", "b c", "\u00fc"])))]


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
            line += [flag, *legal_value(rng, flag, meta)]
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


def has_trained(seen: dict) -> bool:
    """Whether every run of a command that ended with 0 has rounds, a test, steps and a checkpoint, and is in metrics.csv."""
    with open(seen["runs"][0].folder / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    for run in seen["runs"]:
        reached, key = run.load()["rows"], (run.method, str(run.trial))
        rounds = [int(r["round"]) for r in rows if (r["method"], r["trial"]) == key and run.setting in r["setting"]]
        whole = len(reached) == run.config.rounds or getattr(run.config, "budget", 0) > 0
        if not (whole and reached[-1]["round"] in rounds and 0 <= reached[-1]["accuracy"] <= 100):
            return False
    return seen["steps"] >= len(seen["runs"])


def fault_of(status: int, output: str, errors: str, seen: dict) -> str:
    """What is wrong with the way in which a command line ended; nothing where all is well."""
    last = (errors.splitlines() or [""])[-1]
    if status == 0 and not ("results: " in output and (has_trained(seen) if seen["runs"] else "--show-" in seen["line"])):
        return "exit 0 without having trained"
    if status == 2 and not (errors.count("\n") == 1 and "error: " in last and not output):
        return f"exit 2 without its one line: {output} {errors}"
    if status == 3 and not ("error: " in last and "not finite" in last):
        return f"exit 3 without a reason: {errors}"
    return "" if status in (0, 2, 3) and "Traceback" not in errors else f"exit {status}: {errors}"


@contextlib.contextmanager
def watched():
    """A temporary folder to work in and a function (script, line) -> (status, fault) that runs a line in this process there."""
    seen, train, conduct = {"steps": 0}, common.train, experiment.conduct

    def counted(*args, **flags):
        update = train(*args, **flags)
        seen["steps"] += int(np.sum(update.steps))
        return update

    def conducted(study, configs, runs, *rest):
        seen["runs"] = runs  # filled as soon as the folder is claimed
        return conduct(study, configs, runs, *rest)

    def run(script, line):
        presets = [script.PRESETS[word] for word in line if word in script.PRESETS]
        seen.update(steps=0, runs=[], line=" ".join([*line, *presets]))
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
        stack.enter_context(mock.patch.object(common, "train", counted))
        stack.enter_context(mock.patch.object(experiment, "conduct", conducted))
        importlib.import_module("seaborn")
        stack.enter_context(mock.patch("matplotlib.figure.Figure.savefig"))
        stack.enter_context(mock.patch.multiple(experiment, curves=mock.DEFAULT, draw_partition=mock.DEFAULT))
        gmm = importlib.import_module("fedcl_gmm_sync")  # the generator's lessons and the flush to disk take most time
        stack.enter_context(mock.patch.multiple(gmm, TEACHING_STEPS=2, TEACHING_BATCH=8))
        stack.enter_context(mock.patch("os.fsync"))
        yield folder, run


def command_lines(seed=0, first=0, count=2000) -> collections.Counter:
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
            importlib.import_module("matplotlib.pyplot").close("all")
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


CHECKED = ("npz", "png tree", "mnist")  # with a checksum, or known sums; of the other only what breaks its structure shows


def damaged_files(rng, count=100):
    """{format: how often damage was detected, harmless or unseen}: `count` files, cut and with a flipped bit in turn."""
    counts = {}
    with tempfile.TemporaryDirectory() as top:
        formats = write_formats(Path(top))
        with mock.patch.dict(common.CRC32, clear=True):  # as if this data were the published one
            data = common.load_data(*formats["mnist"][0])
        published = functools.reduce(
            lambda crc, x: zlib.crc32(x.numpy().tobytes(), crc), (data.x_train, data.y_train, data.x_test, data.y_test), 0
        )
        for name, (source, files) in formats.items():
            common.load_data.cache_clear()
            with mock.patch.dict(common.CRC32, {"mnist": published}):
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
                    offline = mock.patch("urllib.request.urlopen", side_effect=OSError("no network"))
                    with offline, mock.patch.dict(common.CRC32, {"mnist": published}):
                        after = common.load_data(*source)
                    found = "harmless" if same_data(before, after) else "unseen"
                except common.UsageError:
                    found = "detected"
                tally[f"{found}, {'cut' if k % 2 else 'flipped'}"] += 1
                path.write_bytes(whole)
            counts[name] = tally
    common.load_data.cache_clear()
    return counts


# ---------------------------------------------------------------------------------------------------- files of a run


def outcome(folder: Path) -> tuple:
    """(metrics.csv without its seconds, every checkpoint's state): what must be the same bit for bit."""
    with open(folder / "metrics.csv") as file:
        rows = [{name: value for name, value in row.items() if "second" not in name} for row in csv.DictReader(file)]
    states = {}
    for path in (folder / "checkpoints").glob("*.pt"):  # by the method, and by all that a result may depend on
        saved = torch.load(path, weights_only=True)
        depends = [item for item in saved["fingerprint"].items() if item[0] not in ("eval_every", "chunk", "ranks")]
        content = saved["content"]
        states[f"{path.name.split('-')[0]} {depends}"] = content["state"] if isinstance(content, dict) else content
    return rows, states


def same(a, b) -> bool:
    """Bit for bit."""
    if isinstance(a, torch.Tensor):  # by their bytes: a NaN, which marks what is not known yet, equals itself
        return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def damage(rng, path: Path, cut: bool) -> None:
    whole = bytearray(path.read_bytes())
    at = int(rng.integers(len(whole)))
    if not cut:
        whole[at] ^= 1 << int(rng.integers(8))
    path.write_bytes(whole[:at] if cut else whole)


def damaged_runs(rng, count=100) -> dict:
    """{file: how often its damage was detected, harmless or unseen} by a --resume: checkpoint, cached tensor, config.json."""
    counts, script = {}, importlib.import_module("fedavg_curriculum")
    with watched() as (folder, _):
        line = [*short_run(script), "--score=E", "--rounds=2", "--out=run"]
        assert run_line(script, line)[0] == 0
        shutil.copytree("run", "whole")
        before, paths = outcome(folder / "whole"), sorted((folder / "run" / "checkpoints").iterdir())
        kinds = {"checkpoint": [p for p in paths if "expert" not in p.name], "cached": [p for p in paths if "expert" in p.name]}
        for name, files in (kinds | {"config.json": [folder / "run" / "config.json"]}).items():
            tally = collections.Counter()
            for k in range(count):
                shutil.rmtree("run")
                shutil.copytree("whole", "run")
                if name == "cached":  # it is read where a run is not finished
                    for path in kinds["checkpoint"]:
                        path.unlink()
                damage(rng, files[int(rng.integers(len(files)))], cut=k % 2 == 1)
                status, _, errors = run_line(script, [*line, "--resume"])
                if status == 0:
                    found = "harmless" if same(outcome(folder / "run"), before) else "unseen"
                else:
                    found = "detected" if status == 2 and errors.count("error: ") == 1 else "unseen"
                tally[f"{found}, {'cut' if k % 2 else 'flipped'}"] += 1
            counts[name] = tally
    return counts


def process(script, folder: Path, *line: str, **how) -> subprocess.Popen:
    """A command as a process of its own, which works in `folder`."""
    command = [sys.executable, str(ROOT / f"{script.__name__}.py"), *short_run(script), *line]
    how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder}
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **how)


def pairs(rng, count=20) -> collections.Counter:
    """Two runs that are started in one folder: the second is refused in one line, or comes after the first. None is mixed."""
    tally = collections.Counter()
    with tempfile.TemporaryDirectory() as top:
        write_tiny(Path(top))
        for k in range(count):
            script, folder = importlib.import_module(SCRIPTS[k % len(SCRIPTS)]), Path(top) / f"pair{k}"
            lines = [["--rounds=6", f"--seed={seed}", f"--out={folder}"] for seed in (1, 2)]
            first = process(script, top, *lines[0])
            time.sleep(float(rng.uniform(0, 3)))
            second = process(script, top, *lines[1])
            said = [running.communicate()[1] for running in (first, second)]
            statuses = [first.returncode, second.returncode]
            refused = [errors for errors, status in zip(said, statuses, strict=True) if status == 2]
            fine = statuses in ([0, 0], [0, 2], [2, 0])
            fine = fine and all("another run is at work" in errors and errors.count("error: ") == 1 for errors in refused)
            last = lines[0 if statuses[1] else 1]
            process(script, top, *last[:2], f"--out={folder}-alone").communicate()
            fine = fine and same(outcome(folder), outcome(Path(f"{folder}-alone")))
            tally[("one refused" if refused else "one after the other") if fine else "fault"] += 1
    return tally


def disks(rng, count=12) -> collections.Counter:
    """No file may grow beyond so many bytes: exit 5 and one line (2 where config.json does not fit), then --resume is exact."""
    tally = collections.Counter()
    with tempfile.TemporaryDirectory() as top:
        write_tiny(Path(top))
        for k in range(count):
            script, folder = importlib.import_module(SCRIPTS[k % len(SCRIPTS)]), Path(top) / f"disk{k}"
            limit = int(10 ** rng.uniform(2, 5.6))

            def full(limit=limit):
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

            running = process(script, top, "--rounds=4", f"--out={folder}", preexec_fn=full)
            _, errors = running.communicate()
            fine = running.returncode == 0 or errors.count("error: ") == 1 and "Traceback" not in errors
            fine = fine and running.returncode in (0, 2, 5)
            again = process(script, top, "--rounds=4", f"--out={folder}", "--resume")
            again.communicate()
            process(script, top, "--rounds=4", f"--out={folder}-whole").communicate()
            fine = fine and again.returncode == 0 and same(outcome(folder), outcome(Path(f"{folder}-whole")))
            tally[f"exit {running.returncode}, resumed exactly" if fine else "fault"] += 1
    return tally


def main() -> None:
    parts = ("partitions", "flags", "lines", "data", "runs", "pairs", "disks")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="*", default=parts, choices=parts)
    parser.add_argument("--first", type=int, default=0, help="number of the first command line")
    parser.add_argument("--count", type=int, default=2000, help="how many command lines")
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
    if "runs" in flags.parts:
        for name, tally in damaged_runs(rng).items():
            print(f"damaged {name}: {'; '.join(f'{found} {n}' for found, n in sorted(tally.items()))}")
            failed += sum(n for found, n in tally.items() if "unseen" in found)
    for name, part in {"pairs": pairs, "disks": disks}.items():
        if name in flags.parts:
            tally = part(rng)
            print(f"{name}: {'; '.join(f'{found} {n}' for found, n in sorted(tally.items()))}")
            failed += tally["fault"]
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
