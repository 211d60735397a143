"""python tests/mutate.py data.py nets.py --number 25 --seed 1 [--tests tests/test_data.py]

Do the tests notice a wrong program? Draws mutants of these files: another operator, comparison or
constant, a negated condition, a dropped statement or keyword, two arguments swapped. Each runs, in
a copy of the project, the tests of its file; those that pass them are printed: a hole in the tests,
or a mutant that means the same.
"""

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SWAPPED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


@dataclass
class Mutant:
    path: Path
    old: ast.AST
    new: ast.AST

    def __str__(self):
        place = f"{self.path.relative_to(ROOT)}:{self.old.lineno}"
        return f"{place}: {ast.unparse(self.old)} -> {ast.unparse(self.new)}"

    def source(self) -> str:
        """The whole file; places in a line are counted in bytes."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        begin = sum(map(len, lines[: self.old.lineno - 1])) + self.old.col_offset
        end = sum(map(len, lines[: self.old.end_lineno - 1])) + self.old.end_col_offset
        new = ast.unparse(self.new)
        if isinstance(self.new, ast.expr):
            new = f"({new})"
        whole = b"".join(lines)
        return (whole[:begin] + new.encode() + whole[end:]).decode()


def find_mutants(path: Path) -> list[Mutant]:
    found = []
    for old in walk(ast.parse(path.read_text())):
        found += [Mutant(path, old, new) for new in changes(old)]
        if isinstance(old, (ast.If, ast.While, ast.IfExp)):
            found.append(Mutant(path, old.test, ast.UnaryOp(ast.Not(), old.test)))
    differing = [mutant for mutant in found if ast.dump(mutant.old) != ast.dump(mutant.new)]
    return [mutant for mutant in differing if "__main__" not in str(mutant)]


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Code that does something: no annotations, decorators and texts."""
    yield node
    silent = [getattr(node, "annotation", None), getattr(node, "returns", None)]
    silent += getattr(node, "decorator_list", [])
    for child in ast.iter_child_nodes(node):
        if child not in silent and not isinstance(child, ast.JoinedStr):
            yield from walk(child)


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Every way in which this node alone may be wrong."""
    if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in SWAPPED:
        yield replace(node, op=SWAPPED[type(node.op)]())
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPPED:
        yield replace(node, ops=[SWAPPED[type(node.ops[0])]()])
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield replace(node, value=not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield replace(node, value=node.value + 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node.operand
    if isinstance(node, ast.Call):
        yield from changes_of_call(node)
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if is_call or isinstance(node, (ast.AugAssign, ast.Raise)):
        yield ast.Pass()


def changes_of_call(call: ast.Call) -> Iterator[ast.Call]:
    for keyword in call.keywords:
        if keyword.arg:
            others = [other for other in call.keywords if other is not keyword]
            yield replace(call, keywords=others)
    has_star = any(isinstance(arg, ast.Starred) for arg in call.args[:2])
    if len(call.args) > 1 and not has_star:
        yield replace(call, args=[call.args[1], call.args[0], *call.args[2:]])


def replace(node: ast.AST, **fields) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def tests_of(path: Path) -> list[str]:
    is_theory = path.relative_to(ROOT).parts[0] == "theory"
    name = "theory" if is_theory else path.stem
    return [str(test.relative_to(ROOT)) for test in ROOT.glob(f"tests/test_{name}*.py")]


def survives(mutant: Mutant, tests: list[str], seconds: float) -> bool:
    """Whether these tests pass with the mutant; one that hangs is caught."""
    left_out = shutil.ignore_patterns(".git", "runs", "data", "__pycache__")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "project"
        shutil.copytree(ROOT, project, ignore=left_out)
        (project / mutant.path.relative_to(ROOT)).write_text(mutant.source())
        try:
            outcome = subprocess.run(
                command, cwd=project, timeout=seconds, env=environment, capture_output=True
            )
        except subprocess.TimeoutExpired:
            return False
    return outcome.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description="mutants drawn at random")
    parser.add_argument("files", nargs="+", help="to change, such as data.py")
    parser.add_argument("--number", type=int, default=25, help="of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="+", help="default: tests/test_FILE*.py")
    parser.add_argument("--seconds", type=float, default=600, help="that the tests may take")
    flags = parser.parse_args()

    mutants = []
    for file in flags.files:
        mutants += find_mutants(ROOT / file)
    drawn = random.Random(flags.seed).sample(mutants, min(flags.number, len(mutants)))
    caught = 0
    for mutant in drawn:
        if survives(mutant, flags.tests or tests_of(mutant.path), flags.seconds):
            print(f"survived: {mutant}", flush=True)
        else:
            caught += 1
    print(f"{caught} of {len(drawn)} mutants caught, of {len(mutants)} that could be drawn")


if __name__ == "__main__":
    main()
