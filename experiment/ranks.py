"""torchrun's processes: which of them this one is, how they meet, and how they end.

`rank` and `ranks` say what torchrun started. `training.rank_and_ranks` says who shares the clients
of a run. Nothing here knows what a run is.
"""

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from errors import UsageError, first_line
from training import rank_and_ranks


def number_in(name: str, default: int) -> int:
    """Returns a number that torchrun has put into the environment."""
    word = os.environ.get(name, "")
    return int(word) if word.isdecimal() else default


def ranks() -> int:
    """Returns how many processes torchrun has started."""
    return number_in("WORLD_SIZE", 1)


def rank() -> int:
    """Returns the number of this process among them."""
    return number_in("RANK", 0) if ranks() > 1 else 0


@contextlib.contextmanager
def joined_ranks(device: str):
    """Joins the processes of `torchrun --nproc-per-node N script.py ..`, if this is one of them.

    Yields their common store, or None. The ranks are a group that trains every run together, until
    `leave_group`. The store outlives it.
    """
    if ranks() < 2:
        yield None
        return
    store = join_group(device)
    try:
        yield store
    except RuntimeError as error:
        if not re.search("gloo|nccl|connection", str(error), re.IGNORECASE):
            raise
        raise OSError(f"another rank is gone ({first_line(error)})") from None
    finally:
        leave_group()


def join_group(device: str) -> dist.Store:
    """Meets the other ranks. UsageError if the environment is not as torchrun makes it."""
    end_with(os.getppid())
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        find_launcher()
    backend = "gloo"
    gpus = torch.cuda.device_count()
    if device == "cuda" and number_in("LOCAL_WORLD_SIZE", ranks()) <= gpus:
        backend = "nccl"  # it needs a GPU for each rank
    try:
        store, _, _ = next(dist.rendezvous("env://"))
        dist.init_process_group(backend, store=store, rank=rank(), world_size=ranks())
    except (ValueError, RuntimeError) as error:
        fault = f"{ranks()} ranks do not meet, were they started by torchrun?"
        raise UsageError(f"{fault} ({first_line(error)})") from None
    return store


def find_launcher() -> None:
    """Ends this process if torchrun ended while it began, so that `end_with` cannot see it."""
    address = (os.environ["MASTER_ADDR"], number_in("MASTER_PORT", 0))
    try:
        socket.create_connection(address, timeout=60).close()
    except OSError:
        os._exit(1)


def end_with(parent: int) -> None:
    """Ends this process once its parent has ended, in whichever way."""

    def watch():
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def has_group() -> bool:
    """Whether this process shares the clients of every run with other ranks."""
    _, count = rank_and_ranks()
    return count > 1


def leave_group() -> None:
    """From now on this process trains alone."""
    if has_group():
        dist.destroy_process_group()


def is_first() -> bool:
    """Whether this process writes what its group trains; one without a group does."""
    number, _ = rank_and_ranks()
    return number == 0


def on_first_rank(work: Callable):
    """The group's first process does work(). All get its result, or the error that it raised."""
    outcome = [None, None]
    if is_first():
        try:
            outcome[0] = work()
        except Exception as error:
            outcome[1] = error
    if has_group():
        dist.broadcast_object_list(outcome)
    result, error = outcome
    if error:
        raise error
    return result


def on_all_ranks(is_true: bool) -> bool:
    """Whether it is true on all ranks of the group."""
    answers = [is_true]
    if has_group():
        answers *= ranks()
        dist.all_gather_object(answers, is_true)
    return all(answers)
