"""python tests/mutate.py --record
python tests/mutate.py --random 300 --seed 1 [--jobs 2] [--write]

Do the tests notice a wrong program? Mutants are drawn by a program from the syntax trees of common.py, experiment.py, the five
scripts and theory/: another operator, comparison or constant, a negated condition, a dropped statement or keyword argument, two
arguments swapped. Each is run on the tests that reach its line. `--record` finds out once, by tracing the suite, which tests
those are and how long they take; `--random N --seed S` draws N mutants and prints the survivors; --write adds the count to
results/reliability.md.
"""

import argparse
import ast
import collections
import concurrent.futures
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COVERAGE = ROOT / "runs" / "coverage.json"
FILES = sorted([*ROOT.glob("*.py"), *(ROOT / "theory").glob("*.py")])
LONGEST = 90.0  # seconds of tests that a mutant is given, the shortest first; one that hangs four times as long is caught

SWAPPED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div, ast.Pow: ast.Mult}
SWAPPED |= {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
SWAPPED |= {ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And}
SWAPPED |= {ast.MatMult: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.Mod: ast.Mult}


class Recorder:
    """A pytest plugin: which tests reach which line of FILES in this process, and how long each takes."""

    def __init__(self):
        self.lines, self.seconds, self.names = collections.defaultdict(set), {}, {str(path): path.name for path in FILES}

    def trace(self, frame, event, _):
        if frame.f_code.co_filename not in self.names:
            return None
        self.lines[frame.f_code.co_filename, frame.f_lineno].add(self.test)
        return self.trace

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.test, begun = item.nodeid, time.perf_counter()
        sys.settrace(self.trace)
        result = yield
        sys.settrace(None)
        self.seconds[item.nodeid] = time.perf_counter() - begun
        return result

    def write(self) -> None:
        lines = {f"{Path(path).relative_to(ROOT)}:{line}": sorted(tests) for (path, line), tests in self.lines.items()}
        COVERAGE.parent.mkdir(exist_ok=True)
        COVERAGE.write_text(json.dumps({"lines": lines, "seconds": self.seconds}))


def changed(node: ast.AST) -> list[tuple[str, str]]:
    """Every way in which this node may be wrong: (what was done, the new source of the node)."""
    ways = []

    def way(name: str, **fields) -> None:
        new = type(node)(**({field: getattr(node, field) for field in node._fields} | fields))
        ways.append((name, ast.unparse(ast.fix_missing_locations(ast.copy_location(new, node)))))

    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPPED:
            way("operator", op=SWAPPED[type(op)]())
        case ast.Compare(ops=[op]) if type(op) in SWAPPED:
            way("comparison", ops=[SWAPPED[type(op)]()])
        case ast.Constant(value=bool(value)):
            way("constant", value=not value)
        case ast.Constant(value=int(value) | float(value)):
            way("constant", value=value + 1)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            ways.append(("sign", f"({ast.unparse(operand)})"))
        case ast.IfExp(test=test):
            way("condition", test=ast.UnaryOp(ast.Not(), test))
        case ast.Call(args=args, keywords=keywords):
            ways += [] if ast.unparse(node.func) == "flag" else swapped_arguments(node, way, args, keywords)
        case ast.AugAssign() | ast.Expr(value=ast.Call()) | ast.Raise():
            ways.append(("dropped statement", "pass"))
    return [
        (name, f"({new})" if isinstance(node, ast.expr) and not isinstance(node, ast.Constant) else new) for name, new in ways
    ]


def swapped_arguments(node, way, args, keywords) -> list:
    for i, keyword in enumerate(keywords):
        if keyword.arg:
            way(f"dropped {keyword.arg}=", keywords=keywords[:i] + keywords[i + 1 :])
    if len(args) > 1 and not any(isinstance(arg, ast.Starred) for arg in args[:2]):
        way("arguments swapped", args=[args[1], args[0], *args[2:]])
    return []


def mutants(path: Path) -> list[tuple[str, int, str, str]]:
    """(file, line, what was done, the file's new text) of every mutant of a file."""
    text, found = path.read_text(), []
    starts = [0]
    for line in text.encode().split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)

    def walk(node):
        skipped = [getattr(node, "annotation", None), getattr(node, "returns", None), *getattr(node, "decorator_list", [])]
        if isinstance(node, (ast.If, ast.While)) and "__main__" not in ast.unparse(node.test):
            splice(node.test, "condition", f"not ({ast.unparse(node.test)})")
        for name, new in changed(node) if hasattr(node, "lineno") else []:
            splice(node, name, new)
        for child in ast.iter_child_nodes(node):
            if child not in skipped and not isinstance(child, ast.JoinedStr):
                walk(child)

    def splice(node, name, new):
        raw = text.encode()
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        mutated = (raw[:begin] + new.encode() + raw[end:]).decode()
        if mutated != text:
            found.append((str(path.relative_to(ROOT)), node.lineno, f"{name}: {raw[begin:end].decode()} -> {new}", mutated))

    walk(ast.parse(text))
    return found


def survives(mutant: tuple[str, int, str, str], tests: list[str], tree: Path) -> bool:
    """Whether these tests pass on a copy of the project in which the mutant replaces its file."""
    copy = Path(tempfile.mkdtemp(dir=tree)) / "project"
    try:
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "runs", "data", "results", "__pycache__"))
        (copy / "results").symlink_to(ROOT / "results")
        (copy / mutant[0]).write_text(mutant[3])
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *tests]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(command, cwd=copy, timeout=4 * LONGEST, env=environment, **quiet).returncode == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        shutil.rmtree(copy.parent, ignore_errors=True)


def covering(file: str, line: int, recorded: dict) -> list[str]:
    """The tests that reach this line, the shortest first, as many as LONGEST allows.

    A line that only an import reaches (a constant, a flag's default) is every test's that reaches its file, or reads flags.
    """
    tests = recorded["lines"].get(f"{file}:{line}", [])
    if not tests:
        tests = {test for place, own in recorded["lines"].items() if place.startswith(f"{file}:") for test in own}
        tests |= {test for test in recorded["seconds"] if "test_readme.py::test_no_default" in test}
    tests = sorted(tests, key=recorded["seconds"].get)
    total, chosen = 0.0, []
    for test in tests:
        total += recorded["seconds"][test]
        if total > LONGEST and chosen:
            break
        chosen.append(test)
    return chosen


def draw(count: int, seed: int, jobs: int) -> tuple[int, int, list[str]]:
    """Runs `count` random mutants: (caught, on lines that no test reaches in its own process, the survivors)."""
    recorded = json.loads(COVERAGE.read_text())
    every = [mutant for path in FILES for mutant in mutants(path)]
    chosen = random.Random(seed).sample(every, count)
    caught, unreached, alive = 0, 0, []
    with tempfile.TemporaryDirectory() as tree, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        tests = [covering(*mutant[:2], recorded) for mutant in chosen]
        outcomes = [pool.submit(survives, m, t, Path(tree)) if t else None for m, t in zip(chosen, tests, strict=True)]
        for (file, line, what, _), outcome in zip(chosen, outcomes, strict=True):
            lives = outcome is None or outcome.result()
            caught, unreached = caught + (not lives), unreached + (outcome is None)
            if lives:
                alive.append(f"{file}:{line} {what}" + (" (no test reaches it)" if outcome is None else ""))
                print(alive[-1], flush=True)
    return caught, unreached, alive


def main(argv: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="mutants drawn at random")
    parser.add_argument("--record", action="store_true", help="trace the suite once: which tests reach which line")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="how many mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="add the outcome to results/reliability.md")
    flags = parser.parse_args(argv)
    if flags.record:
        recorder = Recorder()
        os.chdir(ROOT)
        sys.path.insert(0, str(ROOT))
        pytest.main(["-q", "-n0", "--deselect", "tests/test_ranks.py"], plugins=[recorder])
        recorder.write()
    if flags.random:
        caught, unreached, alive = draw(flags.random, flags.seed, flags.jobs)
        line = (
            f"{caught} of {flags.random} random mutants caught at seed {flags.seed} ({unreached} on lines that no test reaches)"
        )
        print(line)
        if flags.write:
            with open(ROOT / "results" / "reliability.md", "a") as file:
                file.write(f"\n## Random mutants\n\n{line}. Survivors:\n\n" + "".join(f"- `{one}`\n" for one in alive))


if __name__ == "__main__":
    main(sys.argv[1:])
