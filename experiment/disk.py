"""A command's folder: its owner, its checkpoints, and its results. Files are written aside first.

A kill leaves the old file or the new one. What is read is checked.
"""

import contextlib
import itertools
import json
import os
import pickle
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout

from checks import is_of_the_machine
from data import UsageError, first_line
from user_files import our_code

from .ranks import on_first_rank
from .terminal import say

# ---------------------------------------------------------------------------------- checkpoints


SAVED = "tensors, NumPy arrays of numbers or text, and plain Python"
# what torch.load must know to read arrays; an empty one needs bytes
NUMPY = [np.ndarray, np.dtype, bytes]
NUMPY += [np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]]
NUMPY += [type(np.dtype(code)) for code in np.typecodes["AllInteger"] + "?efdFDSU"]
torch.serialization.add_safe_globals(NUMPY)


def save(path: Path, fingerprint: dict, content) -> None:
    """Writes a checkpoint. Raises OSError if it cannot be written.

    fingerprint  {name: value} of all that the content depends on
    content      `SAVED`; UsageError for anything else
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with open(half, "wb") as file:
            torch.save({"fingerprint": fingerprint, "content": content}, file)
            os.fsync(file.fileno())
        torch.load(half, map_location="cpu", weights_only=True, mmap=True)  # may fail
        half.replace(path)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        half.unlink(missing_ok=True)
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = found[1] if found else "what a method keeps between rounds"
        raise UsageError(f"{what} cannot be saved for --resume: wanted {SAVED}") from None
    except (OSError, RuntimeError) as error:  # the second is torch's, for a write that failed
        half.unlink(missing_ok=True)
        if is_of_the_machine(error):
            raise
        reason = f"cannot be written, is the disk full? ({first_line(error)})"
        raise OSError(f"{path}: {reason}") from None


def file_label(name: str) -> str:
    """Returns a name that any file may have."""
    return re.sub(r"[^\w.=+,-]", "-", name.strip())[:100]


def file_name(name: str, identity: dict) -> str:
    """Returns a legible name of a checkpoint, different for each identity {name: value}."""
    digest = zlib.crc32(repr(sorted(identity.items())).encode())
    return f"{file_label(name)}-{digest:08x}-trial{identity['trial']}.pt"


def load(path: Path, fingerprint: dict, device: str):
    """Returns what was saved with this fingerprint; UsageError for any other file."""
    saved = read(path, device)
    changes = differences(saved["fingerprint"], fingerprint)
    if changes:
        raise UsageError(f"{path}: another run's ({'; '.join(changes)})")
    return saved["content"]


def read(path: Path, device: str) -> dict:
    """Returns {"fingerprint": .., "content": ..}. What was saved from a GPU goes to `device`.

    Adam, for one, keeps its step on the CPU.
    """

    def place(storage, location: str):
        return storage if location == "cpu" else storage.to(device=torch.device(device))

    try:
        with zipfile.ZipFile(path) as file:
            if file.testzip():  # torch does not look at the checksums
                raise ValueError
        saved = torch.load(path, weights_only=True, map_location=place)
        if not isinstance(saved["fingerprint"], dict) or "content" not in saved:
            raise ValueError
    except OSError as error:
        raise OSError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # torch, zip and pickle name each damage in their own way
        if is_of_the_machine(error):
            raise
        advice = "delete it, and --resume trains this run again"
        raise UsageError(f"{path}: damaged; {advice}") from None
    return saved


def differences(before: dict, now: dict) -> list[str]:
    """Says what changed, with both values."""
    found = []
    for name in before | now:
        if before.get(name) == now.get(name):
            continue
        if name.endswith(", checksum") and name in before and name in now:
            found.append(f"{name.removesuffix(', checksum')}, or one that it imports, was edited")
        else:
            found.append(f"{name} {before.get(name)}, not {now.get(name)}")
    return found


# --------------------------------------------------------------------------------- the folder


def choose_folder(config, script: str) -> Path:
    """Returns --out, or runs/<script>/001, 002, ..: a new one, or with --resume the last one."""
    if config.out:
        return Path(config.out)
    top = Path("runs") / script
    numbered = [path for path in top.glob("*") if path.name.isdecimal()]
    numbered.sort(key=lambda path: int(path.name))
    if config.resume and not numbered:
        raise UsageError(f"--resume: {top} holds no run")
    if config.resume:
        say(f"--resume: in {numbered[-1]}")
        refuse_nothing(numbered[-1])
        return numbered[-1]
    top.mkdir(parents=True, exist_ok=True)
    last = int(numbered[-1].name) if numbered else 0
    for number in itertools.count(last + 1):
        folder = top / f"{number:03}"
        with contextlib.suppress(FileExistsError):  # another command was faster
            folder.mkdir()
            return folder


@contextlib.contextmanager
def locked(folder: Path):
    """Keeps a second command out of the folder."""
    lock = FileLock(folder / ".lock", blocking=False)

    def acquire():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            raise UsageError(f"--out {folder}: another command works there") from None

    on_first_rank(acquire)
    try:
        yield
    finally:
        lock.release()


CHECKPOINTS = "checkpoints/*-trial*.pt"
CODE = ".code.json"  # {file: checksums of its versions}


def refuse_files(folder: Path) -> None:
    """Raises UsageError if there is anything in the folder, or if it is none."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise UsageError(f"--out {folder}: is a file; choose a folder")
    if {*folder.glob("*")} - {folder / ".lock", folder / CODE}:
        has_runs = any(folder.glob(CHECKPOINTS))
        advice = "results; --resume continues" if has_runs else "files; choose an empty folder"
        raise UsageError(f"--out {folder}: holds {advice}")


def refuse_nothing(folder: Path) -> None:
    """Raises UsageError if --resume finds no folder, or one with files but no checkpoint."""
    ours = {folder / ".lock", folder / CODE, folder / "checkpoints"}
    is_new = folder.is_dir() and not {*folder.glob("*")} - ours
    if not is_new and not any(folder.glob(CHECKPOINTS)):
        raise UsageError(f"--resume --out {folder}: nothing to resume, it holds no checkpoint")


def claim(folder: Path, runs: list, resume: bool) -> None:
    """Makes the folder this command's, if it holds nothing, or --resume says so.

    A resumed sweep may have more values than before, or fewer, or other methods. But if runs of a
    method and trial are there, one of them must be the command's, too. Otherwise this raises
    UsageError. It names what differs from the most similar run. It also raises UsageError if all
    runs there are another script's.
    """
    if not resume:
        refuse_files(folder)
    for half in folder.glob("checkpoints/*.tmp"):  # of a process that was killed
        half.unlink()
    for half in folder.glob(".results-*"):
        shutil.rmtree(half)
    refuse_other_scripts(folder, runs)
    mine = {run.path for run in runs}
    for run in runs:
        name = f"{file_label(run.method)}-????????-trial{run.trial}.pt"
        similar = {*folder.glob(f"checkpoints/{name}")}
        if similar and not similar & mine:
            fingerprints = [read(path, run.device)["fingerprint"] for path in sorted(similar)]
            changes = [differences(before, run.fingerprint) for before in fingerprints]
            changed = "; ".join(min(changes, key=len))
            raise UsageError(f"--resume: {folder} holds another run ({changed})")
    note_code(folder, resume)


def note_code(folder: Path, resume: bool) -> None:
    """Notes which versions of our code train here. If a file has several, one line says so."""
    path = folder / CODE
    versions = {}
    if resume:
        by_hand = (ValueError, TypeError, AttributeError, OverflowError)  # it was edited
        with contextlib.suppress(OSError, *by_hand):
            before = json.loads(path.read_text())
            versions = {file: [*map(int, checksums)] for file, checksums in before.items()}
    for file, checksum in our_code().items():
        versions[file] = sorted({checksum, *versions.get(file, [])})
    path.write_text(json.dumps(versions, indent=1))
    if edited := [file for file, checksums in versions.items() if len(checksums) > 1]:
        say(f"{', '.join(edited)}: edited since these runs began")


def refuse_other_scripts(folder: Path, runs: list) -> None:
    """Raises UsageError if the folder holds runs, but none of this command or its script."""
    found = {*folder.glob(CHECKPOINTS)}
    if found & {run.path for run in runs}:
        return
    made_by = runs[0].made_by
    others = set()
    for path in found:
        content = read(path, runs[0].device)["content"]
        if isinstance(content, dict):  # what `Run.cached` has saved is none
            others.add(content.get("made_by", made_by))  # older ones do not say it
    if others and made_by not in others:
        raise UsageError(
            f"--resume: {folder} holds runs of {', '.join(sorted(others))}, not {made_by}"
        )


OLD_FIGURES = ("differences.png", "own_accuracy.png", "summary.png")


def files_of_before(folder: Path) -> list[str]:
    """Returns the files that the command before wrote into the folder, as its summary says.

    Files in a folder that is a link now, or within one, are the user's.
    """
    try:
        summary = json.loads((folder / "summary.json").read_text())
        names = summary.get("files", OLD_FIGURES)  # summaries of version 0.1.0 do not say it
        paths = [Path(name) for name in names if not Path(name).is_absolute()]
        top = folder.resolve()
        return [str(path) for path in paths if (top / path).parent.resolve() == top / path.parent]
    except (OSError, RuntimeError, ValueError, AttributeError, TypeError):  # the second: a loop
        return []


def summary_last(name: str) -> tuple[bool, str]:
    return name == "summary.json", name


def files_in(folder: Path) -> list[str]:
    """Returns the files and links of a folder and its subfolders; summary.json is the last."""
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    return sorted([str(path.relative_to(folder)) for path in paths], key=summary_last)


@contextlib.contextmanager
def written_aside(folder: Path, old: Iterable[str] = ()):
    """Yields an empty folder. At the end of the block its files move to `folder`.

    old  files in `folder` that are deleted then, unless they were written again
    """
    with tempfile.TemporaryDirectory(prefix=".results-", dir=folder) as half:
        yield Path(half)
        written = files_in(Path(half))
        for name in sorted({*old} - {*written}, key=summary_last):
            with contextlib.suppress(OSError):  # it is gone, or the user has put a folder there
                (folder / name).unlink()
                (folder / name).parent.rmdir()  # if it is empty
        for name in written:  # where summary.json is, the others are
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(half) / name).replace(folder / name)
