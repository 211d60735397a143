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
import uuid
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout

from errors import UsageError, first_line, is_of_the_machine
from user_files import our_code

from .ranks import on_all_ranks, on_first_rank
from .terminal import say

# ---------------------------------------------------------------------------------- checkpoints

SAVED = "tensors, NumPy arrays of numbers, and plain Python; text in lists: .tolist()"
# What torch.load must know to read arrays; an empty one needs bytes. The types of text are not
# here: a file can give them another size, and then they read beyond their array.
NUMPY = [np.ndarray, np.dtype, bytes]
NUMPY += [np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]]
NUMPY += [type(np.dtype(code)) for code in np.typecodes["AllInteger"] + "?efdFD"]
torch.serialization.add_safe_globals(NUMPY)


def save(path: Path, fingerprint: dict, content) -> None:
    """Writes a checkpoint. Raises OSError if it cannot be written.

    fingerprint  {name: value} of all that the content depends on
    content      `SAVED`; UsageError for anything else
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
    try:
        with open(half, "wb") as file:
            torch.save({"fingerprint": fingerprint, "content": content}, file)
            os.fsync(file.fileno())
        torch.load(half, map_location="cpu", weights_only=True, mmap=True)  # may fail
        half.replace(path)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = found[1] if found else "what a method keeps between rounds"
        raise UsageError(f"{what} cannot be saved for --resume: wanted {SAVED}") from None
    except (OSError, RuntimeError) as error:  # the second is torch's, for a write that failed
        if is_of_the_machine(error):
            raise
        reason = f"cannot be written, is the disk full? ({first_line(error)})"
        raise OSError(f"{path}: {reason}") from None
    finally:
        half.unlink(missing_ok=True)


def file_label(name: str) -> str:
    """Returns a name that any file may have."""
    return re.sub(r"[^\w.=+,-]", "-", name.strip())[:100]


def file_name(name: str, identity: dict) -> str:
    """Returns a legible name of a checkpoint, different for each identity {name: value}."""
    digest = zlib.crc32(repr(sorted(identity.items())).encode())
    return f"{file_label(name)}-{digest:08x}-trial{identity['trial']}.pt"


def load(path: Path, fingerprint: dict, device: str):
    """Returns what was saved with this fingerprint; UsageError for any other file."""
    before, content = read(path, device)
    changes = differences(before, fingerprint)
    if changes:
        raise UsageError(f"{path}: another run's ({'; '.join(changes)})")
    return content


def read(path: Path, device: str) -> tuple[dict, Any]:
    """Returns fingerprint and content. What was saved from a GPU goes to `device`.

    Adam, for one, keeps its step on the CPU.
    """

    def place(storage, location: str):
        return storage if location == "cpu" else storage.to(device=torch.device(device))

    try:
        with zipfile.ZipFile(path) as file:
            if file.testzip():  # torch does not look at the checksums
                raise ValueError
        saved = torch.load(path, weights_only=True, map_location=place)
        return dict(saved["fingerprint"]), saved["content"]
    except OSError as error:
        raise OSError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # torch, zip and pickle name each damage in their own way
        if is_of_the_machine(error):
            raise
        raise damaged(path) from None


def damaged(path: Path) -> UsageError:
    return UsageError(f"{path}: damaged; delete it, and --resume trains this run again")


KEPT = ("rows", "state", "finished", "diverged", "last_test")  # of a run


def kept_of(path: Path, content) -> dict:
    """Returns `KEPT` as a checkpoint's content; UsageError if it lacks one of them."""
    try:
        return {name: content[name] for name in KEPT}
    except (KeyError, TypeError, IndexError):
        raise damaged(path) from None


def differences(before: dict, now: dict) -> list[str]:
    """Says what changed, with both values. Values are equal if their texts are."""
    found = []
    for name in before | now:
        old = str(before.get(name))
        new = str(now.get(name))
        if old == new:
            continue
        if name.endswith(", checksum") and name in before and name in now:
            found.append(f"{name.removesuffix(', checksum')}, or one that it imports, was edited")
        else:
            found.append(f"{name} {old}, not {new}")
    return found


# --------------------------------------------------------------------------------- the folder

CHECKPOINTS = "checkpoints/*-trial*.pt"
CODE = ".code.json"  # {file: its checksum, null if there were several; "script": its name}
HEX = "[0-9a-f]" * 32  # a random name, so that no file of a user's has it
HALVES = f".results-{HEX}*"  # what a killed process has not moved to its place


def check_folder(folder: Path, resume: bool) -> None:
    """Raises UsageError unless a command can begin here or, with `resume`, continue.

    It can begin where nothing is. It can continue where a checkpoint is. It can do both where a
    command was stopped before its first checkpoint.
    """
    try:
        str(folder).encode()
    except UnicodeError:  # torch cannot open it
        raise UsageError(f"--out {str(folder)!a}: choose a name of plain letters") from None
    if any(folder.glob(CHECKPOINTS)):
        if resume:
            return
        raise UsageError(f"--out {folder}: holds results; --resume continues")
    if resume and not folder.exists():
        raise UsageError(f"--resume --out {folder}: nothing to resume, it is not there")
    is_ours = {".lock": (folder / ".lock").is_file(), CODE: "script" in read_json(folder / CODE)}
    is_ours["checkpoints"] = (folder / "checkpoints").is_dir()
    ours = {folder / name for name, found in is_ours.items() if found} | {*folder.glob(HALVES)}
    if (os.path.lexists(folder) and not folder.is_dir()) or {*folder.glob("*")} - ours:
        raise UsageError(f"--out {folder}: holds files, but no checkpoint; choose an empty folder")


def device_of_before(folder: Path) -> str:
    """Returns the device of the runs in this folder; nothing if there is none."""
    for path in folder.glob(CHECKPOINTS):
        fingerprint, _ = read(path, "cpu")
        return fingerprint["device"]
    return ""


def choose_folder(config, script: str) -> Path:
    """Returns --out, or runs/<script>/001, 002, ..: a new one, or with --resume the last one."""
    if config.out:
        return Path(config.out)
    top = Path("runs") / script
    numbered = [path for path in top.glob("*") if path.name.isdecimal()]
    last = max(numbered, key=lambda path: int(path.name), default=top / "0")
    if config.resume:
        if not numbered:
            raise UsageError(f"--resume: {top} holds no run")
        say(f"--resume: in {last}")
        return last
    for number in itertools.count(int(last.name) + 1):
        folder = top / f"{number:03}"
        with contextlib.suppress(FileExistsError):  # another command was faster
            folder.mkdir(parents=True)
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
        if not on_all_ranks(folder.is_dir()):
            raise UsageError(f"--out {folder}: choose a folder that all ranks' machines share")
        yield
    finally:
        lock.release()


def claim(folder: Path, runs: list, resume: bool) -> None:
    """Makes the folder this command's, if it holds nothing, or --resume says so.

    A resumed sweep may have more values than before, or fewer, or other methods. But if runs of a
    method and trial are there, one of them must be the command's, too. Otherwise this raises
    UsageError. It names what differs from the most similar run. It also raises UsageError if the
    runs are another script's, and none of them is the command's.
    """
    check_folder(folder, resume)
    for half in folder.glob(f"checkpoints/*.{HEX}.tmp"):  # of a process that was killed
        half.unlink()
    for half in folder.glob(HALVES):
        shutil.rmtree(half)
    mine = {run.path for run in runs}
    for run in runs:
        name = f"{file_label(run.method)}-????????-trial{run.trial}.pt"
        similar = {*folder.glob(f"checkpoints/{name}")}
        if similar and not similar & mine:
            saved = [read(path, run.device) for path in sorted(similar)]
            changes = (differences(before, run.fingerprint) for before, _ in saved)
            changed = "; ".join(min(changes, key=len))
            raise UsageError(f"--resume: {folder} holds another run ({changed})")
    script = runs[0].script.title()
    noted = read_json(folder / CODE) if resume else {}
    is_strange = any(folder.glob(CHECKPOINTS)) and not any(path.exists() for path in mine)
    if is_strange and noted.get("script") != script:
        owner = noted.get("script", "an unknown script")
        raise UsageError(f"--resume: {folder} holds runs of {owner}, not {script}")
    noted.setdefault("script", script)
    note_code(folder, noted)


def note_code(folder: Path, noted: dict) -> None:
    """Adds the code that trains here to what was noted. If it was edited, one line says so."""
    code = our_code()
    edited = [file for file in code if noted.get(file, code[file]) != code[file]]
    noted |= code | dict.fromkeys(edited)
    with written_aside(folder) as half:
        (half / CODE).write_text(json.dumps(noted, indent=1))
    if edited:
        say(f"{', '.join(edited)}: edited since these runs began")


def read_json(path: Path) -> dict:
    """Returns what a file of ours holds; nothing if it is absent, or somebody wrote into it."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


# ------------------------------------------------------------------------------------ results


@contextlib.contextmanager
def written_aside(folder: Path):
    """Yields an empty folder. At the end of the block its files move to `folder`."""
    with tempfile.TemporaryDirectory(prefix=f".results-{uuid.uuid4().hex}", dir=folder) as half:
        yield Path(half)
        for name in files_in(Path(half)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(half) / name).replace(folder / name)


def files_in(folder: Path) -> list[str]:
    """Returns the files and links of a folder and its subfolders."""
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    return sorted(str(path.relative_to(folder)) for path in paths)


def delete_older(folder: Path, new: list[str]) -> None:
    """Deletes the files that the command before wrote here, as its summary says, and the summary.

    new  names of files that stay. What lies in a folder within this one stays, too
    """
    older = {"summary.json"}
    with contextlib.suppress(TypeError):  # somebody edited it
        older.update(read_json(folder / "summary.json").get("files", []))
    for path in folder.iterdir():
        if path.name in older and path.name not in new and not path.is_dir():
            path.unlink()
