"""A command's folder and its checkpoints: written aside and renamed, and checked when read."""

import contextlib
import itertools
import os
import zipfile
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from data import UsageError, first_line

from .flags import Config
from .processes import on_first_rank, say


def save(path: Path, fingerprint: dict, content) -> None:
    """By renaming a whole file that is on the disk: a kill leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with open(half, "wb") as file:
            torch.save({"fingerprint": fingerprint, "content": content}, file)
            os.fsync(file.fileno())
        half.replace(path)
    except (OSError, RuntimeError) as error:  # the second is torch's, for a write that failed
        half.unlink(missing_ok=True)
        reason = f"cannot be written, is the disk full? ({first_line(error)})"
        raise OSError(f"{path}: {reason}") from None


def load(path: Path, fingerprint: dict, device: str):
    """What was saved with this fingerprint; UsageError for any other file."""
    try:
        if zipfile.ZipFile(path).testzip():  # torch does not look at the checksums
            raise ValueError("a wrong checksum")
        saved = torch.load(path, weights_only=True, map_location=device)
        theirs = dict(saved["fingerprint"])
        content = saved["content"]
    except Exception as error:  # torch, zip and pickle name each damage in their own way
        raise UsageError(f"{path}: damaged ({first_line(error)})") from None
    for name in theirs | fingerprint:
        if theirs.get(name) != fingerprint.get(name):
            change = f"{name} {theirs.get(name)}, not {fingerprint.get(name)}"
            raise UsageError(f"{path}: another run's ({change})")
    return content


def choose_folder(config: Config, name: str) -> Path:
    """--out, or runs/<script>/001, 002, ..: a new one, with --resume the last one."""
    if config.out:
        return Path(config.out)
    top = Path("runs") / name
    numbers = [int(path.name) for path in top.glob("*") if path.name.isdecimal()]
    last = max(numbers, default=0)
    if config.resume and not numbers:
        raise UsageError(f"--resume: {top} holds no run")
    if config.resume:
        folder = top / f"{last:03}"
        say(f"--resume: in {folder}")
        return folder
    top.mkdir(parents=True, exist_ok=True)
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
            raise UsageError(f"--out {folder}: another run is at work there") from None

    on_first_rank(acquire)
    try:
        yield
    finally:
        lock.release()
