"""How much a reader meets in each file, and how densely: what a budget in lines does not see.

A node is a node of the syntax tree, without docstrings, operators and contexts. Code that is read
with pleasure has five to seven on a line, none of its lines is longer than 100 characters, and it
does not hide a loop in an expression. Take something out before you raise a limit.
"""

import ast
import io
import tokenize
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NODES = {
    "common.py": 1945,
    "bases.py": 1000,
    "chunks.py": 1120,
    "errors.py": 100,
    "training.py": 2200,
    "recording.py": 910,
    "stacks.py": 1090,
    "data.py": 3480,
    "user_files.py": 1255,
    "nets.py": 3400,
    "client_layers.py": 1000,
    "fedavg_curriculum.py": 1690,
    "client_curriculum.py": 2370,
    "fedcl_fgn.py": 1400,
    "fedcl_gmm_sync.py": 3170,
    "fedac_art.py": 2150,
}
SCRIPTS = (
    "fedavg_curriculum.py",
    "client_curriculum.py",
    "fedcl_fgn.py",
    "fedcl_gmm_sync.py",
    "fedac_art.py",
)
FOLDERS = ("*.py", "experiment/*.py", "theory/**/*.py", "results/**/*.py")
MODULES = sorted(path for pattern in FOLDERS for path in ROOT.glob(pattern))
PLAIN = {  # the reading copies may have no more
    "plain/fedcl_fgn.py": 1075,
    "plain/fedavg_curriculum.py": 1200,
    "plain/client_curriculum.py": 1575,
    "plain/fedac_art.py": 1315,
    "plain/fedcl_gmm_sync.py": 2015,
}
FILES = [*MODULES, *sorted(ROOT.glob("plain/*.py")), *sorted(ROOT.glob("tests/*.py"))]

INLINE = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SILENT = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.Module)
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


@dataclass
class Measures:
    """Of one file."""

    nodes: int
    per_line: float  # nodes on a line of code
    packed: float  # % of the assignments that are several: a, b = x, y
    inline: float  # % of the lines that hold a comprehension or a conditional expression
    nested: int  # comprehensions in another
    longest: int  # lines of the longest function


def measure(source: str) -> Measures:
    tree = ast.parse(source)
    docs = docstrings(tree)
    silent = set()
    for doc in docs:
        silent.update(ast.walk(doc))
    nodes = []
    for node in ast.walk(tree):
        if node not in silent and not isinstance(node, SILENT):
            nodes.append(node)
    lines = max(1, len(lines_of_code(source, docs)))

    inline = [node for node in nodes if isinstance(node, INLINE)]
    functions = [node for node in nodes if isinstance(node, FUNCTIONS)]
    lengths = [node.end_lineno - node.lineno + 1 for node in functions]
    assignments = [node for node in nodes if isinstance(node, ast.Assign)]
    packed = [node for node in assignments if is_packed(node)]
    return Measures(
        nodes=len(nodes),
        per_line=len(nodes) / lines,
        packed=100 * len(packed) / max(1, len(assignments)),
        inline=100 * len({node.lineno for node in inline}) / lines,
        nested=sum(map(holds_another, inline)),
        longest=max(lengths, default=0),
    )


def docstrings(tree: ast.Module) -> list[ast.Expr]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            found.append(node.body[0])
    return found


def lines_of_code(source: str, docs: list[ast.Expr]) -> set[int]:
    """Line numbers, without blank lines, comments and docstrings."""
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for doc in docs:
        code.difference_update(range(doc.lineno, doc.end_lineno + 1))
    lines = source.splitlines()
    return {number for number in code if lines[number - 1].strip()}


def is_packed(node: ast.Assign) -> bool:
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def holds_another(node: ast.AST) -> bool:
    inner = [child for child in ast.walk(node) if child is not node]
    return any(isinstance(child, INLINE) for child in inner)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_module_is_plain(path):
    found = measure(path.read_text())
    assert found.nodes <= 1.1 * NODES.get(name(path), 3000)
    assert found.per_line <= (7.5 if path.name in SCRIPTS and path.parent == ROOT else 8.0)
    assert found.packed <= 3
    assert found.inline <= 8
    assert found.nested == 0
    assert found.longest <= 50


@pytest.mark.parametrize("path", sorted(ROOT.glob("plain/*.py")), ids=name)
def test_a_reading_copy_is_plainer(path):
    found = measure(path.read_text())
    assert found.nodes <= PLAIN[name(path)]
    assert found.per_line <= 7
    assert found.packed == 0
    assert found.inline <= 5
    assert found.nested == 0
    assert found.longest <= 50


@pytest.mark.parametrize("path", FILES, ids=name)
def test_no_line_is_longer_than_100_characters(path):
    lines = enumerate(path.read_text().splitlines(), 1)
    assert [number for number, line in lines if len(line) > 100] == []


def test_the_measures_count_what_they_say():
    """By hand: one docstring, five statements on five lines, the fourth of them packed."""
    source = '''
"""A docstring."""

x = 1  # Assign, Name, Constant
y = [x for x in range(3)]  # Assign, Name, ListComp, Name, comprehension, Name, Call, Name, Constant
z = [[1 for _ in y] for _ in y]
a, b = x, y  # Assign, Tuple, Name, Name, Tuple, Name, Name


def f():
    """Another."""
    return 1  # FunctionDef, arguments, Return, Constant
'''
    found = measure(source)
    assert found.nodes == 3 + 9 + 11 + 7 + 4
    assert found.per_line == pytest.approx(found.nodes / 6)
    assert found.packed == 25
    assert found.inline == pytest.approx(100 * 2 / 6)
    assert found.nested == 1
    assert found.longest == 3
