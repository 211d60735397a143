"""Where runs are trained: in workers, in ranks that take whole runs, or one after another here."""

import contextlib
import math
import multiprocessing
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from pathlib import Path

import torch
from joblib import cpu_count

from errors import UsageError, first_line

from .machine import keep_heap, take_gpu
from .ranks import end_with, has_group, rank, ranks
from .runs import Run, train
from .terminal import Progress, say


def train_all(runs: list[Run], pool: "Workers | None", store) -> None:
    """Trains every run: in workers, in ranks that take whole runs, or one after the other here."""
    progress = Progress(sum(run.config.rounds for run in runs))
    with progress.bar:
        if pool:
            train_in_workers(runs, pool, progress)
        elif store and not has_group():
            train_in_ranks(runs, store, progress)
        else:
            for run in runs:
                train(run, progress)


def train_in_workers(runs: list[Run], pool: "Workers", progress: Progress) -> None:
    """Trains runs in workers. Those that use another run's result come after all others."""
    for waits in (False, True):
        run_of = {}
        for run in runs:
            if run.waits == waits:
                vars(run).pop("fl", None)  # its worker builds one of its own
                run_of[pool.submit(train_in_worker, run)] = run
        training = {*run_of}
        while training:
            done, training = wait(training, timeout=0.2, return_when=FIRST_COMPLETED)
            while not pool.news.empty():
                progress(*pool.news.get())
            for task in done:
                vars(run_of[task]).update(task.result())
    pool.shutdown(wait=False)  # their memory is not needed for figures


def train_in_ranks(runs: list[Run], store, progress: Progress) -> None:
    """Each rank takes the next free run until none is left. Rank 0 then waits for the others."""
    mine = []
    while (place := store.add("taken", 1) - 1) < len(runs):
        run = runs[place]
        if run.waits:
            wait_for(store, run.needed.file)
        train(run, progress)
        store.set(run.file, "trained")
        mine.append(run)
    if rank() > 0:
        return
    for run in runs:
        wait_for(store, run.file)
        if run not in mine:
            run.restore()
            run.state = {}
            progress(str(run), run.config.rounds, math.nan)


def wait_for(store, file: str) -> None:
    """Returns once a rank has trained this run, without a time limit."""
    while not store.check([file]):
        time.sleep(0.2)


# ----------------------------------------------------------------------- workers on this machine

FAILED_START = 70  # exit status of a worker that would run the whole script once more


class Workers(ProcessPoolExecutor):
    """Processes that train runs. What they tell meanwhile is in the queue `news`."""

    def __init__(self, count: int, on_gpu: bool):
        context = multiprocessing.get_context("spawn")
        self.news = context.SimpleQueue()
        super().__init__(count, context, begin_worker, (os.getpid(), self.news, on_gpu))


@contextlib.contextmanager
def workers(runs: list[Run]) -> Iterator[Workers | None]:
    """Starts workers for these runs; none if this process trains them itself.

    They begin to import now, while this process continues, and end with the block or with this
    process. Raises OSError if one of them ended by itself.
    """
    count = count_processes(runs, runs[0].device)
    if count > 1 and (fault := unknown_to_workers(runs[0])):
        say(f"runs go one after another in this process: {fault}")
        count = 1
    if count == 1:
        yield None
        return
    others = {*multiprocessing.active_children()}
    processes = set()
    try:
        with contextlib.ExitStack() as at_last:
            with undisturbed_start():
                pool = Workers(count, runs[0].device == "cuda")
                at_last.callback(pool.shutdown)
                for _ in range(count):
                    pool.submit(int)  # a task that finds no idle worker starts one
                processes = {*multiprocessing.active_children()} - others
                for process in processes:
                    at_last.callback(process.kill)
            yield pool
    except BrokenProcessPool:
        if any(process.exitcode == FAILED_START for process in processes):
            raise UsageError(
                "a worker would run this script once more: begin its last lines with "
                'if __name__ == "__main__":'
            ) from None
        raise OSError("a worker is gone; was it killed, or is the memory too small?") from None


def count_processes(runs: list[Run], device: str) -> int:
    """Returns --jobs, by default one for each --threads cores, or GPU; at most one for each run."""
    config = runs[0].config
    if ranks() > 1:
        return 1
    automatic = cpu_count() // config.threads
    if device == "cuda":
        automatic = torch.cuda.device_count()
    return min(len(runs), config.jobs or max(1, automatic))


def unknown_to_workers(run: Run) -> str:
    """Says why a worker could not import what this run names; nothing if it can."""
    try:
        names = pickle.dumps(run)
    except Exception as error:  # a lambda, a function in another one
        return first_line(error)
    file = getattr(sys.modules["__main__"], "__file__", None) or ""  # "<stdin>" is none
    if not os.path.isfile(file) and (file or b"__main__" in names):
        return "workers cannot import a program without a file, such as a notebook"
    if sys.version_info < (3, 11):  # there a new process searches the current folder first
        for name in {path.stem for path in Path().iterdir()} & sys.stdlib_module_names:
            return f"in this folder, workers would import {name} instead of Python's own"
    return ""


@contextlib.contextmanager
def undisturbed_start():
    """Processes that start in this block ignore Ctrl-C and SIGTERM, which their parent hears.

    The parent hears them at the end of the block: it could not end a process that half exists. Nor
    do the processes search the current folder for modules, where another checkout may lie.
    """
    was_safe = os.environ.get("PYTHONSAFEPATH", "")
    os.environ["PYTHONSAFEPATH"] = "1"
    resource_tracker.ensure_running()  # now: later, its start would let the signals through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        os.environ["PYTHONSAFEPATH"] = was_safe
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_starting() -> bool:
    """Whether this process is a worker that still imports its parent's script."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def begin_worker(parent: int, news, on_gpu: bool) -> None:
    """Prepares a worker: it ends with its parent, which hears `news`, and has a GPU of its own."""
    global tell_parent
    end_with(parent)
    keep_heap()
    tell_parent = news.put
    if on_gpu:
        [number] = re.findall(r"\d+$", multiprocessing.current_process().name)
        take_gpu(int(number))


def train_in_worker(run: Run) -> dict:
    """Trains a run. An error that cannot be sent to the parent becomes the reason, why not."""
    try:
        return train(run, lambda *progress: tell_parent(progress))
    except Exception as error:
        pickle.loads(pickle.dumps(error))  # may fail; the traceback shows both
        raise
