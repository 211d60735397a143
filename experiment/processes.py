"""How processes start, talk and end: workers on this machine, torchrun's ranks, signals.

Nothing here knows what a run is.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection, resource_tracker
from pathlib import Path

import torch
import torch.distributed as dist

from data import UsageError, first_line
from user_files import forget_neighbours

from .machine import keep_heap, take_gpu

ROOT = str(Path(__file__).parent.parent)


@contextlib.contextmanager
def sigterm_as_ctrl_c():
    """In this block SIGTERM raises KeyboardInterrupt, with its own exit status.

    Only a program's main thread may change what a signal does. In another one this does nothing.
    """

    def interrupt(number, frame):
        raise KeyboardInterrupt(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ----------------------------------------------------------------------- workers on this machine

FAILED_START = 70  # exit status of a worker that would run the whole script once more


class Workers:
    """Processes that carry out tasks for this one, and end with it.

    A task is a tuple (function, *arguments): a function of a module, and what pickle can send. They
    begin to import now, while this process continues. They find modules where it found its
    own, and never in the current folder: another checkout may lie there.
    """

    def __init__(self, count: int, on_gpu: bool):
        context = multiprocessing.get_context("spawn")
        modules = own_modules()
        self.processes = {}  # {our end of a pipe: the process at its other end}
        with undisturbed_start():
            for number in range(count):
                ours, theirs = context.Pipe()
                task = (theirs, number, on_gpu, modules)
                process = context.Process(target=serve, args=task, daemon=True)
                process.start()
                theirs.close()  # so that reading ours ends when the process does
                self.processes[ours] = process

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error) -> None:
        self.end()

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()

    def carry_out(self, tasks: Iterable[tuple], hear: Callable) -> Iterator[tuple]:
        """Yields (place, result) of each task (function, *arguments), in the order of their ends.

        hear  gets what a function tells meanwhile with `tell_parent`
        Raises what a function raises, and OSError if a worker is gone.
        """
        waiting = deque(enumerate(tasks))
        idle = [*self.processes]
        places = {}  # {pipe of a worker: which task it carries out}
        while waiting or places:
            while waiting and idle:
                pipe = idle.pop()
                places[pipe], task = waiting.popleft()
                self.talk(pipe, pipe.send, task)
            for pipe in connection.wait(places):
                kind, content = self.talk(pipe, pipe.recv)
                if kind == "news":
                    hear(*content)
                elif kind == "error":
                    error, seen = content
                    raise error from RuntimeError(f"in a worker\n{seen}")
                else:
                    idle.append(pipe)
                    yield places.pop(pipe), content

    def talk(self, pipe, how: Callable, *content):
        """Returns how(*content), or raises what a user should know about a worker that is gone."""
        try:
            return how(*content)
        except (EOFError, OSError):
            process = self.processes[pipe]
            process.join()
        if process.exitcode == FAILED_START:
            raise UsageError(
                "a worker would run this script once more: begin its last lines with "
                'if __name__ == "__main__":'
            )
        raise OSError(f"a worker is gone (exit status {process.exitcode})")


@contextlib.contextmanager
def undisturbed_start():
    """Processes that start in this block ignore Ctrl-C and SIGTERM, which their parent hears.

    The parent hears them at the end of the block: it could not end a process that half exists.
    """
    was_safe = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"  # until it has our paths, a process searches no folder
    sys.path.insert(0, ROOT)
    resource_tracker.ensure_running()  # now: later, its start would let the signals through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        sys.path.remove(ROOT)
        del os.environ["PYTHONSAFEPATH"]
        if was_safe:
            os.environ["PYTHONSAFEPATH"] = was_safe
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def own_modules() -> dict[str, str]:
    """{name: file} of the modules that come from this checkout or from the script's folder.

    Those of users' files are left out: each process imports them again.
    """
    forget_neighbours()
    main = getattr(sys.modules["__main__"], "__file__", None) or ROOT
    folders = (ROOT, str(Path(main).resolve().parent))
    files = {}
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None) or ""
        if file.startswith(folders) and "site-packages" not in file:
            files[name] = file
    return files


def serve(pipe, number: int, on_gpu: bool, modules: dict[str, str]) -> None:
    """Does a worker's tasks, one after the other, until its parent ends it or has ended."""
    global pipe_to_parent
    pipe_to_parent = pipe
    end_with(multiprocessing.parent_process().pid)
    keep_heap()
    if on_gpu:
        take_gpu(number)
    while True:
        try:
            function, *arguments = pipe.recv()
            for name, file in modules.items():
                found = getattr(sys.modules.get(name), "__file__", file)
                if found != file and name != "__main__":
                    raise UsageError(f"a worker found {found} instead of {file}")
            answer = ("result", function(*arguments))
        except EOFError:
            return
        except Exception as error:
            answer = ("error", (error, traceback.format_exc()))
        pipe.send(answer)


def tell_parent(*news) -> None:
    """Sends news from a worker to the `hear` of its parent."""
    pipe_to_parent.send(("news", news))


def is_starting() -> bool:
    """Whether this process is a worker that still imports its parent's script."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def end_with(parent: int) -> None:
    """Ends this process once its parent has ended, in whichever way."""

    def watch():
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ---------------------------------------------------------------------------- torchrun's processes


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


def has_group() -> bool:
    """Whether this process shares the clients of every run with other ranks."""
    return dist.is_available() and dist.is_initialized()


def leave_group() -> None:
    """From now on this process trains alone."""
    if has_group():
        dist.destroy_process_group()


def is_first() -> bool:
    """Whether this process writes what its group trains; one without a group does."""
    return not has_group() or dist.get_rank() == 0


def on_first_rank(work: Callable):
    """The group's first process does work(). All get its result, or the error that it raised."""
    result = None
    error = None
    if is_first():
        try:
            result = work()
        except Exception as raised:
            error = raised
    if has_group():
        outcome = [result, error]
        dist.broadcast_object_list(outcome)
        result, error = outcome
    if error:
        raise error
    return result
