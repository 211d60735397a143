"""The command line: runs are planned, trained, in processes of their own or not, and reported."""

import dataclasses
import json
import math
import multiprocessing
import os
import shlex
import signal
import sys
from concurrent.futures import FIRST_EXCEPTION, BrokenExecutor, ProcessPoolExecutor, wait
from pathlib import Path

import numpy as np
import torch
from joblib import cpu_count
from tqdm import tqdm

from common import NonFiniteError
from data import UsageError

from . import report
from .disk import choose_folder, locked
from .flags import Config, about_flag, parse
from .processes import (
    begin_worker,
    interrupt,
    joined_ranks,
    keep_heap,
    on_first_rank,
    postponed_stop,
    process_context,
    rank,
    ranks,
    say,
    stop,
    tell_parent,
)
from .runs import Run, Script, train


def train_all(runs: list[Run]) -> None:
    """Trains every run, those that read another one's result after the rest."""
    early = [run for run in runs if not run.script.after(run.config)]
    late = [run for run in runs if run.script.after(run.config)]
    processes = count_processes(runs)
    progress = Progress(sum(run.config.rounds for run in runs))
    with progress.bar:
        if processes > 1:
            train_in_processes([early, late], processes, progress)
        else:
            for run in early + late:
                train(run, progress)


def count_processes(runs: list[Run]) -> int:
    """--jobs, by default cores / --threads (on a GPU one), at most one a run; a rank is alone."""
    config = runs[0].config
    if ranks() > 1:
        return 1
    automatic = 1 if runs[0].device == "cuda" else cpu_count() // config.threads
    return min(len(runs), config.jobs or max(1, automatic))


class Progress:
    """Counts the rounds of all runs: a bar in a terminal, else a line for every tenth of them."""

    def __init__(self, total: int):
        self.total = total
        self.done = 0
        is_hidden = rank() > 0 or not sys.stderr.isatty()
        self.bar = tqdm(total=total, unit="round", leave=False, disable=is_hidden)

    def __call__(self, rounds: int, accuracy: float) -> None:
        """So many rounds more are done, and this is the accuracy that was tested last."""
        tenths = 10 * self.done // self.total
        self.done += rounds
        self.bar.set_postfix_str(f"accuracy {accuracy:.1f}", refresh=False)
        self.bar.update(rounds)
        if self.bar.disable and 10 * self.done // self.total > tenths:
            say(f"{self.done} of {self.total} rounds, accuracy {accuracy:.1f}")


def train_in_processes(groups: list[list[Run]], processes: int, progress: Progress) -> None:
    """Trains one group of runs after the other, in processes of their own."""
    context = process_context()
    shared = context.Array("d", [0, math.nan])  # rounds trained, the accuracy tested last
    with ProcessPoolExecutor(processes, context, begin_worker, (shared,)) as pool:
        try:
            for group in groups:
                futures = {}
                with postponed_stop():  # half started, a process could not be ended below
                    for run in group:
                        vars(run).pop("fl", None)  # its process builds one of its own
                        future = pool.submit(train_in_worker, run.script, run.config, run.trial)
                        futures[future] = run
                waiting = set(futures)
                while waiting:
                    done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_EXCEPTION)
                    for future in done:
                        vars(futures[future]).update(future.result())
                    progress(int(shared[0]) - progress.done, shared[1])
        except BaseException:
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


def train_in_worker(script: Script, config: Config, trial: int) -> dict:
    """`train` of a run that this process makes for itself, with its data and federation."""
    return train(script.run(config, trial), tell_parent)


RESULTS = ("config.json", "metrics.csv", "summary.json", "checkpoints/*-trial*.pt")


def claim(folder: Path, configs: list[Config], compare: tuple[str, ...]) -> None:
    """The folder becomes this command's, if it holds no results or --resume says so."""
    first = configs[0]
    flags = {}
    for field in first.__dataclass_fields__:
        flags[field] = sorted({str(getattr(config, field)) for config in configs})
    path = folder / "config.json"
    if not first.resume and any([*folder.glob(pattern)] for pattern in RESULTS):
        raise UsageError(f"--out {folder}: holds results; --resume goes on")
    if first.resume and path.exists():
        refuse_other_flags(path, flags, configs, compare)
    for half in folder.glob("checkpoints/*.tmp"):  # of a process that was killed
        half.unlink()
    path.write_text(json.dumps(flags, indent=1))


def refuse_other_flags(path: Path, flags: dict, configs: list[Config], compare) -> None:
    """UsageError where a flag has none of the values of before, which config.json at `path` holds.

    A resumed sweep may be wider or narrower, its methods others, and it may have more rounds where
    no arm reads how many there are.
    """
    try:
        before = json.loads(path.read_text())
    except ValueError:
        raise UsageError(f"{path}: damaged; without it --resume goes on") from None
    for name, values in flags.items():
        old = before.get(name, [])
        role = about_flag(type(configs[0]), name)["role"]
        if role == "free" or name in compare or {*values} & {*old}:
            continue
        may_grow = role == "length" and not any(config.reads_rounds() for config in configs)
        if not (may_grow and int(values[0]) > int(old[0])):
            change = f"{name} {' '.join(old)}, not {' '.join(values)}"
            raise UsageError(f"--resume: {path.parent} holds another run ({change})")


def conclude(script: Script, settings: dict[str, list[Run]], counts: dict, command: str) -> None:
    """metrics.csv, tables, figures, the script's own plots, and last summary.json."""
    folder = script.folder
    rows = []
    finite = {}
    for setting, runs in settings.items():
        finite[setting] = [run for run in runs if not run.diverged]
        for run in runs:  # whose rows stand in every setting where it is shown
            rows += [row | {"setting": setting} for row in run.rows]
    first = next(iter(settings.values()))[0]
    config = first.config
    dataset = config.dataset
    if "dataset" in script.swept:
        dataset = "several data sets"  # each setting names its own
    df = report.write_metrics(rows, folder, f"{dataset}, {config.trials} trials")
    summary = {"command": command, "config": dataclasses.asdict(config)} | first.environment
    summary |= report.conclude(df, folder)
    report.plot_partition(counts, folder, dataset)
    if any(finite.values()):
        df = report.without_diverged(df)
        report.plot_all(df, folder)
        if script.plot:
            script.plot(df, folder)
        if script.draw:
            script.draw(finite, folder)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    print(f"results: {folder}")


# ------------------------------------------------------------------------------------ command line


def main(script: Script, argv=None) -> None:
    """Runs a script's command line, or `argv` in its place."""
    name = script.config.__module__
    command = shlex.join(sys.orig_argv if argv is None else [name, *argv])
    argv = sys.argv[1:] if argv is None else argv
    os.environ["MPLBACKEND"] = "agg"
    before = signal.signal(signal.SIGTERM, interrupt)
    keep_heap()
    try:
        configs, script.swept = parse(script.config, script.presets, script.doc, argv)
        with joined_ranks(configs[0].device):
            conduct(script, configs, command)
    except UsageError as error:
        stop(2, f"error: {error}")
    except NonFiniteError as error:
        stop(3, f"error: {error}")
    except (OSError, BrokenExecutor) as error:  # the second: a process of --jobs was killed
        stop(5, f"error: {error}{resume_hint(script)}")
    except KeyboardInterrupt as error:  # heard by all ranks
        say(f"stopped{resume_hint(script)}")
        sys.exit(error.args[0] if error.args else 130)
    finally:
        signal.signal(signal.SIGTERM, before)


def resume_hint(script: Script) -> str:
    """Where --resume goes on, once there is something."""
    if script.folder is None or not os.path.exists(script.folder / "config.json"):
        return ""  # exists is False for an impossible name, too
    return f"; --resume goes on in {script.folder}"


def conduct(script: Script, configs: list[Config], command: str) -> None:
    """Trains every run and reports; data, net and partition are checked before that."""
    first = configs[0]
    torch.set_num_threads(first.threads)
    name = Path(sys.modules[type(first).__module__].__file__).stem
    settings, runs = script.plan(configs)
    if count_processes(runs) > 1:
        process_context()  # imports while this process reads the data
    counts = count_labels(settings)
    script.folder = on_first_rank(lambda: choose_folder(first, name))
    with locked(script.folder):
        on_first_rank(lambda: claim(script.folder, configs, script.compare))
        train_all(runs)
        if rank() == 0:
            conclude(script, settings, counts, command)
    diverged = [f"{run}: {run.diverged}" for run in runs if run.diverged]
    if diverged:
        count = f"{len(diverged)} of {len(runs)} runs diverged"
        raise NonFiniteError(f"{count}, their cells are empty ({'; '.join(diverged[:3])})")


def count_labels(settings: dict[str, list[Run]]) -> dict[str, np.ndarray]:
    """How many samples of each class every client has in a setting's first run, (M, C).

    Building what will be trained raises UsageError where data, net and partition do not fit.
    """
    counts = {}
    for setting, runs in settings.items():
        federations = [run.fl for run in runs if run.trial == 0]
        counts[setting] = federations[0].count_labels()
    return counts
