"""The command line of a script: plan all runs, train them where there is room, report.

An error ends a command with one line and an exit status:

- 2: a mistake of the caller
- 3: an update that is not finite
- 5: a file that cannot be written, too little memory, or a process that is gone
- 130: Ctrl-C
- 143: SIGTERM
"""

import contextlib
import dataclasses
import datetime
import itertools
import json
import math
import os
import pickle
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from joblib import cpu_count

from checks import is_out_of_memory
from common import NonFiniteError
from data import UsageError, first_line

from . import report
from .disk import choose_folder, claim, locked, written_aside
from .flags import Config, parse
from .processes import (
    FAILED_START,
    GPU_ERRORS,
    ROOT,
    Workers,
    gpu_fault,
    has_group,
    is_starting,
    joined_ranks,
    keep_heap,
    leave_group,
    on_first_rank,
    rank,
    ranks,
    sigterm_as_ctrl_c,
    tell_parent,
)
from .runs import Run, Script, train
from .terminal import Progress, patient_output, say


def main(script: Script, argv: list[str] | None = None) -> None:
    """Runs a script's command line: `main(Script(federate=.., compare=.., config=Config, ..))`.

    argv  the words after the script's name. By default they come from this process

    It can be called in a thread, in a notebook, and more than once. It raises SystemExit if a
    command would end with an exit status (see above). Otherwise it returns when all results are
    written.
    """
    if is_starting():  # the script has no main guard
        os._exit(FAILED_START)
    command = shlex.join(sys.orig_argv if argv is None else [script.config.__module__, *argv])
    argv = sys.argv[1:] if argv is None else argv
    if not os.environ.get("MPLBACKEND", "").startswith("module://"):  # a notebook's own
        os.environ["MPLBACKEND"] = "agg"
    keep_heap()
    with patient_output():
        try:
            refuse_strangers()
            configs, script.swept = parse(script.config, script.presets, script.doc, argv)
            with sigterm_as_ctrl_c():
                conduct(script, configs, command)
        except KeyboardInterrupt as error:  # heard by all ranks
            say(f"stopped{resume_hint(script)}")
            sys.exit(error.args[0] if error.args else 130)
        except Exception as error:
            status, line = explain(error)
            if status == 5:
                line += resume_hint(script)
            trains_alone = script.folder is not None and script.ranks == 1
            stop(status, f"error: {line}", trains_alone)


def refuse_strangers() -> None:
    """Raises UsageError if another module was found before one of our modules."""
    for path in Path(ROOT).glob("*.py"):
        found = getattr(sys.modules.get(path.stem), "__file__", None) or str(path)
        if not os.path.samefile(found, path):
            raise UsageError(f"{found} is imported instead of our {path.name}: rename it")


def explain(error: Exception) -> tuple[int, str]:
    """Returns the exit status of an expected error, and its line. Raises any other error again."""
    if isinstance(error, UsageError):
        return 2, str(error)
    if isinstance(error, NonFiniteError):
        return 3, str(error)
    if is_out_of_memory(error):
        advice = "try --chunk 1, or a smaller --batch-size if clients train one at a time already"
        return 5, f"out of memory: {advice} ({first_line(error)})"
    if isinstance(error, GPU_ERRORS):
        return 5, f"the GPU failed ({first_line(error)})"
    if isinstance(error, OSError):
        return 5, str(error)
    raise error


def stop(status: int, line: str, trains_alone=False) -> None:
    """Ends this process. torchrun ends all ranks with the first, so this one should speak.

    trains_alone  whether no other rank meets the same error
    """
    if trains_alone:
        print(line, file=sys.stderr, flush=True)
    else:
        say(line)
        time.sleep(30 * (rank() > 0))
    sys.exit(status)


def resume_hint(script: Script) -> str:
    """Says where --resume continues, once there is something."""
    if script.folder is None or not os.path.exists(script.folder / "checkpoints"):
        return ""  # exists is False for an impossible name, too
    return f"; --resume continues in {script.folder}"


# --------------------------------------------------------------------------- plan, train, report


def conduct(script: Script, configs: list[Config], command: str) -> None:
    """Trains every run and reports. Data, model and partition are checked before that."""
    began = time.time()
    first = configs[0]
    torch.set_num_threads(first.threads)
    if first.device == "auto" and torch.cuda.is_available() and gpu_fault():
        say(f"--device auto: the CPU is used, since {gpu_fault()}")
    settings, runs = script.plan(configs)
    trains_alone = len(runs) >= ranks()
    script.ranks = 1 if trains_alone else ranks()
    with joined_ranks(runs[0].device) as store, workers(runs) as pool:
        counts = count_labels(settings)  # while the workers import
        script.folder = on_first_rank(lambda: choose_folder(first, name_of(script)))
        with locked(script.folder):
            on_first_rank(lambda: claim(script.folder, runs, first.resume))
            if trains_alone:
                leave_group()
            train_all(runs, pool, store)
            if rank() > 0:
                return
            moment = datetime.datetime.fromtimestamp(began).astimezone()
            about = {"command": command, "commit": commit(), "began": moment.isoformat()}
            about["hours"] = round((time.time() - began) / 3600, 4)
            conclude(script, settings, counts, about)
    diverged = [f"{run}: {run.diverged}" for run in runs if run.diverged]
    if diverged:
        count = f"{len(diverged)} of {len(runs)} runs diverged"
        raise NonFiniteError(f"{count}, their cells are empty ({'; '.join(diverged[:3])})")


def name_of(script: Script) -> str:
    """Returns the name of the script's folder of runs."""
    file = getattr(sys.modules[script.config.__module__], "__file__", None) or "notebook"
    return Path(file).stem


def commit() -> str | None:
    """Returns the commit of this folder, "-dirty" if files differ from it; None without git."""
    words = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def count_labels(settings: dict[str, list[Run]]) -> dict[str, np.ndarray]:
    """Returns the samples of each class that every client has in a setting's first run, (M, C).

    This builds what will be trained. Raises UsageError if data, model and partition do not fit.
    """
    counts = {}
    for setting, runs in settings.items():
        federations = [run.fl for run in runs if run.trial == 0]
        counts[setting] = federations[0].count_labels()
    return counts


def conclude(script: Script, settings: dict[str, list[Run]], counts: dict, about: dict) -> None:
    """Writes metrics.csv and tables; then figures, the script's own plots, and summary.json."""
    rows = []
    finite = {}
    for setting, shown in settings.items():
        finite[setting] = [run for run in shown if not run.diverged]
        for run in shown:  # whose rows stand in every setting where it is shown
            rows += [row | {"setting": setting} for row in run.rows]
    runs = [*itertools.chain(*settings.values())]
    first = runs[0]
    dataset = first.config.dataset
    if "dataset" in script.swept:
        dataset = "several data sets"  # each setting names its own
    with written_aside(script.folder) as folder:
        df = report.write_metrics(rows, folder, f"{dataset}, {first.config.trials} trials")
        results = report.conclude(df, folder)
    with written_aside(script.folder, report.FIGURES) as folder:
        report.plot_partition(counts, folder, dataset)
        if any(finite.values()):
            df = report.without_diverged(df)
            report.plot_all(df, folder)
            if script.plot:
                script.plot(df, folder)
            if script.draw:
                script.draw(finite, folder)
        configs = {run.method: vars(run.config) for run in reversed(runs)}  # of its first run
        summary = about | {"swept": script.swept, "config": configs} | first.environment
        if first.device == "cuda":
            summary["card"] = torch.cuda.get_device_name()
        (folder / "summary.json").write_text(json.dumps(summary | results, indent=1))
    print(f"results: {script.folder}")


# ------------------------------------------------------------------------- where runs are trained


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
