"""python tests/reliability.py [--seed 0]

Counts, over seeded random cases: partitions that are disjoint, covering and without an empty client; command lines that end in
a configuration or in one line and exit status 2; damaged data files that are detected or harmless. Exits with 1 on any failure.
"""

import argparse
import contextlib
import importlib
import io
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

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


def partitions(rng, count=1000):
    """(good, clear errors, slowest in seconds, moved samples) over random n, classes, clients, alpha and kind."""
    good = errors = moved_all = 0
    slowest = 0.0
    for _ in range(count):
        n, classes = int(10 ** rng.uniform(0, 4.5)), int(rng.integers(1, 101))
        clients, alpha = int(10 ** rng.uniform(0, 3)), 10 ** rng.uniform(-3, 3)
        kind = str(rng.choice(["iid", "label-skew", "dirichlet", "dirichlet-client"]))
        min_size = int(rng.integers(1, 4))
        labels = rng.integers(0, classes, n)
        begun = time.perf_counter()
        try:
            shards, moved = common.partition(kind, labels, clients, alpha, np.random.default_rng(0), min_size)
        except common.UsageError:
            assert clients * min_size > n
            errors += 1
            continue
        slowest = max(slowest, time.perf_counter() - begun)
        together = np.concatenate(shards)
        assert len(shards) == clients and len(together) == n and len(np.unique(together)) == n, (kind, n, clients)
        assert min(map(len, shards)) >= min_size, (kind, n, clients, alpha)
        good, moved_all = good + 1, moved_all + (moved > 0)
    return good, errors, slowest, moved_all


def random_line(rng, options):
    line = []
    for _ in range(int(rng.integers(1, 6))):
        flag, choices = options[int(rng.integers(len(options)))]
        values = [*WORDS, *choices, str(round(10 ** rng.uniform(-4, 4), 3)), str(int(rng.integers(0, 200)))]
        line.append(flag)
        line += [str(rng.choice(values)) for _ in range(int(rng.integers(0, 3)))]
    return line


def command_lines(rng, count=10_000):
    """(lines that give a configuration, lines refused with exit 2 and one line) over all scripts; anything else raises."""
    accepted = refused = 0
    for k in range(count):
        script = importlib.import_module(SCRIPTS[k % len(SCRIPTS)])
        fields = {f.name: f for f in (*script.Config.__dataclass_fields__.values(),)}
        options = [("--" + name.replace("_", "-"), list(map(str, f.metadata.get("choices", ())))) for name, f in fields.items()]
        options += [("--preset", list(script.PRESETS)), ("--no-such-flag", [])]
        line = random_line(rng, options)
        errors, output = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
                common.parse(script.Config, script.PRESETS, script.__doc__, line)
            accepted += 1
        except common.UsageError as error:  # launch prints it as one line and exits with 2
            assert "\n" not in str(error), (script.__name__, line)
            refused += 1
        except SystemExit as stop:
            assert stop.code == 2 and errors.getvalue().count("\n") == 1, (script.__name__, line, stop.code, errors.getvalue())
            refused += 1
    return accepted, refused


def same_data(a, b) -> bool:
    return all(bool((getattr(a, n) == getattr(b, n)).all()) for n in ("x_train", "y_train", "x_test", "y_test"))


def damaged_files(rng, count=100):
    """{format: (detected, harmless, changed pixels that the format cannot show)} over truncations and flipped bits."""
    from PIL import Image

    counts = {}
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top)
        x, y = rng.integers(0, 256, (60, 16, 16, 3), dtype=np.uint8), np.arange(60) % 3
        np.savez(folder / "whole.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
        for split, part in (("train", slice(0, 40)), ("test", slice(40, 60))):
            for i, (image, label) in enumerate(zip(x[part], y[part], strict=True)):
                path = folder / "tree" / split / f"class{label}" / f"{i:02}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(path)
        for name in ("npz", "png tree"):
            tally = {"detected": 0, "harmless": 0, "unseen": 0}
            for k in range(count):
                path = folder / "whole.npz" if name == "npz" else rng.choice(sorted((folder / "tree").rglob("*.png")))
                source = str(folder / ("whole.npz" if name == "npz" else "tree"))
                whole = path.read_bytes()
                common.load_data.cache_clear()
                before = common.load_data(source)
                broken, at = bytearray(whole), int(rng.integers(len(whole)))
                if k % 2:
                    broken = broken[:at]
                else:
                    broken[at] ^= 1 << int(rng.integers(8))
                path.write_bytes(broken)
                common.load_data.cache_clear()
                try:
                    tally["harmless" if same_data(before, common.load_data(source)) else "unseen"] += 1
                except common.UsageError:
                    tally["detected"] += 1
                path.write_bytes(whole)
            counts[name] = tally
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    rng = np.random.default_rng(flags.seed)
    good, errors, slowest, moved = partitions(rng)
    print(f"partitions: {good} good ({moved} of them repaired), {errors} refused for too few samples, slowest {slowest:.2f} s")
    accepted, refused = command_lines(rng)
    print(f"command lines: {accepted} accepted, {refused} refused with exit 2 and one line, 0 tracebacks")
    unseen = 0
    for name, tally in damaged_files(rng).items():
        print(f"damaged {name}: {tally['detected']} detected, {tally['harmless']} harmless, {tally['unseen']} unseen")
        unseen += tally["unseen"]
    sys.exit(unseen > 0)


if __name__ == "__main__":
    main()
