"""A user's own FILE.py: how it is loaded and called, and how an edit of it is noticed.

Such a file holds a model (--model), a rule (--select), a curriculum (--score, --order) or a whole
script. It may import modules that lie next to it.
"""

import ast
import contextlib
import functools
import importlib.util
import itertools
import os
import runpy
import sys
import sysconfig
import traceback
import zlib
from collections.abc import Callable, Iterable
from importlib.machinery import PathFinder
from pathlib import Path

import numpy as np

from data import as_array
from errors import NonFiniteError, UsageError, first_line, is_of_the_machine

ROOT = Path(__file__).resolve().parent
OURS = ("bases", "chunks", "client_layers", "common", "data", "errors", "experiment", "nets")
OURS += ("client_curriculum", "fedac_art", "fedavg_curriculum", "fedcl_fgn", "fedcl_gmm_sync")
OURS += ("recording", "results", "stacks", "training", "user_files")


def is_ours(file: str) -> bool:
    """Whether a file is one of this project's, and not a user's that lies next to them."""
    path = Path(file).resolve()
    if ROOT not in path.parents:
        return False
    return path.relative_to(ROOT).parts[0].removesuffix(".py") in OURS


def our_code() -> dict[str, int]:
    """Returns {file: CRC-32} of this project's modules that are imported, without experiment/."""
    found = {}
    for name, module in [*sys.modules.items()]:
        top = name.partition(".")[0]
        file = getattr(module, "__file__", None)  # None: a folder, or a notebook
        if top in {*OURS, "__main__"} - {"experiment"} and file and is_ours(file):
            path = Path(file).resolve()
            found[str(path.relative_to(ROOT))] = zlib.crc32(path.read_bytes())
    return found


def file_of(thing: Callable) -> str:
    """Returns the file that defines a function or class, or "notebook"."""
    if isinstance(thing, functools.partial):
        return file_of(thing.func)
    file = getattr(sys.modules.get(thing.__module__), "__file__", None)
    return str(Path(file).resolve()) if file else "notebook"


class Neighbours:
    """Finds the modules next to users' files, after all other places.

    An import within a function finds them, too.

    places    the folders of these files. That of the file that was loaded last comes first
    imported  the names of the modules that Python has found there, also if it searches the folder
              itself
    """

    places = []
    imported = set()

    @classmethod
    def find_spec(cls, name: str, path=None, target=None):
        if path is not None or name in OURS:  # a part of a package, or this project's
            return None
        neighbour = PathFinder.find_spec(name, cls.places)
        found = PathFinder.find_spec(name, [*sys.path, *cls.places])
        if neighbour is None or found.origin != neighbour.origin:
            return None
        cls.imported.add(name)
        return found

    @classmethod
    def move_to(cls, folder: str) -> None:
        """Has Python import all neighbours again: edited ones, or those of another folder."""
        for name in [*sys.modules]:
            if name.partition(".")[0] in cls.imported:
                del sys.modules[name]
        cls.imported.clear()
        cls.places = [*dict.fromkeys([folder, *cls.places])]
        importlib.invalidate_caches()


sys.meta_path.insert(sys.meta_path.index(PathFinder), Neighbours)


def load_from_file(word: str) -> Callable:
    """Returns the class or function NAME of FILE.py:NAME, found from the working directory.

    The file may import its `Neighbours`. Raises whatever the file raises.
    """
    file, _, name = word.rpartition(":")
    if not file.endswith(".py"):
        raise ValueError("wanted FILE.py:NAME")
    folder = str(Path(file).resolve().parent)
    Neighbours.move_to(folder)
    refuse_namesakes(file, folder)
    writes_none = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # bytecode does not notice an edit within a second
    try:
        names = runpy.run_path(file)
    finally:
        sys.dont_write_bytecode = writes_none
    if name not in names:
        raise AttributeError(f"{file} holds no {name}")
    return names[name]


def refuse_namesakes(file: str, folder: str) -> None:
    """Raises ImportError if the file would get another module instead of its own neighbour."""
    for neighbour in imported_by(Path(file), [Path(folder)]):
        place = neighbour.parent if neighbour.name == "__init__.py" else neighbour
        if place.parent != Path(folder):
            continue
        found = importlib.util.find_spec(place.stem).origin or place.stem
        if Path(found).resolve() != neighbour.resolve():
            raise ImportError(f"{neighbour} has the name of the module {found}; rename it")


def imported_by(file: Path, places: Iterable[Path]) -> set[Path]:
    """Returns the files that Python may read for a file's own imports, from the folders `places`.

    For a.b.c, and for `from a.b import c`, they are a.py, a/__init__.py, a/b.py and so on. Dots
    begin at the file's folder.
    """
    found = set()
    for node in ast.walk(ast.parse(file.read_bytes(), file)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        before = getattr(node, "module", None) or ""
        folders = places
        if level := getattr(node, "level", 0):
            above = file.parents[:level][-1]  # the top if there are more dots than folders
            found.add(above / "__init__.py")
            folders = [above]
        for folder, alias in itertools.product(folders, node.names):
            for part in f"{before}.{alias.name}".strip(".").split("."):
                found |= {folder / f"{part}.py", folder / part / "__init__.py"}
                folder /= part
    return {path for path in found if os.access(path, os.R_OK) and path.is_file()}


# ------------------------------------------------------------------------------- its functions


def find_function(option: str, word: str, known: dict) -> Callable:
    """Returns known[word], or the function that FILE.py:FUNCTION names.

    Raises UsageError, which names the option, if there is none.
    """
    if word in known:
        return known[word]
    wanted = f"{', '.join(known)} or FILE.py:FUNCTION"
    if not is_own(word):
        raise UsageError(f"{option} {word}: choose {wanted}")
    try:
        return load_from_file(word)
    except (Exception, SystemExit) as error:  # whatever a user's own file raises
        raise UsageError(f"{option} {word}: {fault_of(word, error)}; wanted {wanted}") from error


def is_own(word) -> bool:
    """Whether a word is FILE.py:FUNCTION. Other values of options are not."""
    return ".py:" in str(word)


def name_of(word: str) -> str:
    """Returns FUNCTION of FILE.py:FUNCTION, and any other word as it is."""
    return word.rpartition(":")[2]


@contextlib.contextmanager
def blamed(option: str, word: str, where: str):
    """In this block a class or function of FILE.py is called. Its errors become a UsageError.

    `where` says for which client or round. NonFiniteError, and errors of memory or a GPU, stay what
    they are, as do all errors if `word` names no file.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        is_theirs = not isinstance(error, NonFiniteError) and not is_of_the_machine(error)
        if not (is_theirs and is_own(word)):
            raise
        raise UsageError(f"{option} {word}, {where}: {fault_of(word, error)}") from error


def fault_of(word: str, error: BaseException) -> str:
    """Returns an error's first line, then its kind and the line of FILE.py or a neighbour."""
    folder = Path(word).resolve().parent
    theirs = []
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename).resolve()
        if file.parent == folder and file.is_file() and not is_ours(file):
            theirs.append(f" ({type(error).__name__} in {file.name}, line {frame.lineno})")
    return first_line(error) + "".join(theirs[-1:])


def ask_each(function: Callable, option: str, word: str, fl, theta, clients, shapes) -> list:
    """Returns function(fl, theta_m, m) for each client, as numbers of these shapes.

    theta  (P,) or (K, P): the weights that the clients received. theta_m (P,) is a copy
    """
    thetas = theta.expand(len(clients), -1)  # a row for each client
    answers = []
    for m, theta_m, shape in zip(clients.tolist(), thetas, shapes, strict=True):
        with blamed(option, word, f"client {m}"):
            answers.append(as_numbers(function(fl, theta_m.clone(), m), shape))
    return answers


def as_numbers(returned, shape: tuple) -> np.ndarray:
    """Returns what a function returned in float64. ValueError for another shape, and for NaN."""
    numbers = as_array("the result", returned)
    if numbers.shape != shape or numbers.dtype.kind not in "biuf":
        wanted = f"numbers of shape {shape}" if shape else "one number"
        found = f"{type(returned).__name__} of shape {numbers.shape}"
        raise ValueError(f"wanted {wanted}, not {found}")
    if np.isnan(numbers).any():
        raise ValueError(f"wanted numbers, but {np.isnan(numbers).sum()} are NaN")
    return numbers.astype(float)


def as_batches(returned: Iterable, T: int, B: int, N: int) -> np.ndarray:
    """Returns T batches, each of at most B places in N samples, as an array (T, B).

    -1 means no sample. Raises ValueError for another number of batches, and for other places.
    """
    found = type(returned).__name__
    rows = []
    if isinstance(returned, Iterable):
        rows = [np.asarray(row) for row in itertools.islice(returned, T + 1)]
        found = "more" if len(rows) > T else len(rows)
    if len(rows) != T:
        raise ValueError(f"wanted a batch for each of {T} steps, not {found}")
    batches = np.full((T, B), -1)
    for step, row in enumerate(rows):
        places = row if row.dtype.kind in "iu" else np.empty(0)
        is_sample = np.arange(places.size) < np.count_nonzero(places >= 0)  # they come first
        is_row = is_sample.any() and np.array_equal(places >= 0, is_sample)
        if not (is_row and row.size <= B and row.min() >= -1 and row.max() < N):
            wanted = f"wanted batches of 1 to {B} integers from 0 to {N - 1}, then perhaps -1"
            raise ValueError(f"{wanted}; batch {step} is {row.dtype} {str(row.tolist())[:80]}")
        batches[step, : row.size] = row
    return batches


# -------------------------------------------------------------------------------- its checksum


def files_of(path: Path) -> set[Path]:
    """Returns a program's file, and those that it imports: directly, or through another of them.

    They are those of the imported names in its folder, in one above it, in the working directory
    or in this project, even if Python finds the name elsewhere. Installed packages and this
    project's own modules do not count.
    """
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in kinds}
    places = {*path.parents, Path.cwd(), ROOT} - installed
    found = {path}
    waiting = [path]
    while waiting:
        with contextlib.suppress(SyntaxError, ValueError):  # Python says so, if it imports it
            imports = {file.resolve() for file in imported_by(waiting.pop(), places)}
            new = {file for file in imports - found if not is_ours(file)}
            found |= new
            waiting += new
    return found


def source_checksum(word) -> int | None:
    """Returns the CRC-32 of FILE.py and of what it imports (`files_of`); None for other words.

    With it --resume notices an edit.
    """
    file, _, name = str(word).rpartition(":")
    if not file.endswith(".py"):
        return None
    path = Path(file).resolve()
    checksum = 0
    try:
        for read in [path, *sorted(files_of(path) - {path})]:
            checksum = zlib.crc32(read.read_bytes(), checksum)
    except OSError as error:
        raise UsageError(f"{word}: {first_line(error)}") from error
    return checksum
