"""Where runs are trained: in workers, in ranks that take whole runs, or one after another here."""

import contextlib
import dataclasses
import math
import os
import pickle
import sys
import time
from pathlib import Path

import torch
from joblib import cpu_count

from data import first_line

from .flags import Config
from .processes import Workers, has_group, rank, ranks, tell_parent
from .runs import Run, Script, train
from .terminal import Progress, say


def train_all(runs: list[Run], pool: Workers | None, store) -> None:
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


def train_in_workers(runs: list[Run], pool: Workers, progress: Progress) -> None:
    """Trains runs in workers. Those that use another run's result come after all others."""
    for waits in (False, True):
        group = [run for run in runs if run.waits == waits]
        tasks = [task_of(run) for run in group]
        for run in group:
            vars(run).pop("fl", None)  # its worker builds one of its own
        for place, result in pool.carry_out(tasks, progress):
            vars(group[place]).update(result)
    pool.end()  # their memory is not needed for figures


def task_of(run: Run) -> tuple:
    """Returns what a worker needs to make and train this run."""
    script = dataclasses.replace(run.script, plot=None, draw=None, presets={}, doc="")
    return train_in_worker, script, run.config, run.trial


def train_in_worker(script: Script, config: Config, trial: int) -> dict:
    return train(script.run(config, trial), tell_parent)


def train_in_ranks(runs: list[Run], store, progress: Progress) -> None:
    """Each rank takes the next free run until none is left. Rank 0 then waits for the others."""
    mine = []
    while (place := store.add("taken", 1) - 1) < len(runs):
        run = runs[place]
        if run.waits:
            wait_for(store, run.needed)
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


def count_processes(runs: list[Run]) -> int:
    """Returns --jobs, by default one for each --threads cores, or GPU; at most one for each run."""
    config = runs[0].config
    if ranks() > 1:
        return 1
    automatic = cpu_count() // config.threads
    if runs[0].device == "cuda":
        automatic = torch.cuda.device_count()
    return min(len(runs), config.jobs or max(1, automatic))


def workers(runs: list[Run]):
    """Starts workers for these runs, or none if this process trains them itself."""
    count = count_processes(runs)
    if count > 1 and (fault := unknown_to_workers(task_of(runs[0]))):
        say(f"runs go one after another in this process: {fault}")
        count = 1
    if count == 1:
        return contextlib.nullcontext()
    return Workers(count, runs[0].device == "cuda")


def unknown_to_workers(task: tuple) -> str:
    """Says why a worker could not import what this task names; nothing if it can."""
    try:
        names = pickle.dumps(task)
    except Exception as error:  # a lambda, a function in another one
        return first_line(error)
    file = getattr(sys.modules["__main__"], "__file__", None) or ""
    if b"__main__" in names and not os.path.isfile(file):
        return "workers cannot import a program without a file, such as a notebook"
    if sys.version_info < (3, 11):  # there a new process searches the current folder first
        for name in {path.stem for path in Path().iterdir()} & sys.stdlib_module_names:
            return f"in this folder, workers would import {name} instead of Python's own"
    return ""
