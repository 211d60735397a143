"""The command line of a script: plan all runs, train them where there is room, report.

An error ends a command with one line and an exit status:

- 2: a mistake of the caller
- 3: an update, a score or a test loss that is not finite
- 5: a file that cannot be written, too little memory, or a process that is gone
- 130: Ctrl-C
- 143: SIGTERM
"""

import contextlib
import datetime
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch

from errors import GPU_ERRORS, NonFiniteError, UsageError, first_line, is_out_of_memory
from user_files import ROOT

from . import figures, report
from .costs import HOUR, Cost, cost_of
from .disk import (
    check_folder,
    choose_folder,
    claim,
    delete_older,
    device_of_before,
    files_in,
    locked,
    written_aside,
)
from .flags import Config, defaults_of, option, parse, reads_alpha
from .machine import gpu_fault, keep_heap
from .ranks import joined_ranks, leave_group, on_first_rank, rank, ranks
from .runs import Run, plan
from .script import Command, Script
from .terminal import patient_output, say
from .weights import initial_weights
from .workers import FAILED_START, count_processes, is_starting, train_all, workers


def main(script: Script, argv: list[str] | None = None) -> None:
    """Runs a script's command line: `main(Script(federate=.., compare=.., config=Config, ..))`.

    argv  the words after the script's name. By default they come from this process

    It can be called in a thread, in a notebook, and more than once. It raises SystemExit if a
    command would end with an exit status (see above). Otherwise it returns when all results are
    written.
    """
    if is_starting():  # the script has no main guard
        os._exit(FAILED_START)
    line = shlex.join(sys.orig_argv if argv is None else [script.config.__module__, *argv])
    argv = sys.argv[1:] if argv is None else argv
    if not os.environ.get("MPLBACKEND", "").startswith("module://"):  # a notebook's own
        os.environ["MPLBACKEND"] = "agg"
    keep_heap()
    command = Command(script)
    with patient_output():
        try:
            configs, swept = parse(script.config, script.presets, script.doc, argv)
            command.sweep(swept, configs)
            with sigterm_as_ctrl_c():
                conduct(command, configs, line, unused(script, configs, argv))
        except KeyboardInterrupt as error:  # heard by all ranks
            say(f"stopped{resume_hint(command.folder)}")
            sys.exit(error.args[0] if error.args else 130)
        except Exception as error:
            status, fault = explain(error)
            if status == 5:
                fault += resume_hint(command.folder)
            is_own = command.folder is not None and command.ranks == 1
            stop(status, f"error: {fault}", is_own)


def unused(script: Script, configs: list[Config], argv: list[str]) -> list[str]:
    """Returns the options of a command line that none of its configs uses, as --mu of FedAvg.

    One that has its default is not among them: it may have replaced what a preset says.
    """
    given = {word.partition("=")[0] for word in argv}
    used = set()
    for config in configs:
        used |= config.flags("length", "free").keys() | script.results_depend_on(config).keys()
        if not script.is_all_ours(config):  # a user's code may read these, too
            used |= {*script.compare}
    words = []
    for name, default in defaults_of(script.config).items():
        is_idle = option(name) in given and name not in used
        if is_idle and any(getattr(config, name) != default for config in configs):
            words.append(option(name))
    return words


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


def stop(status: int, line: str, is_own=False) -> None:
    """Ends this process. torchrun ends all ranks with the first, so this one should speak.

    is_own  whether the error is this rank's own: no other one meets the same
    """
    if is_own:
        print(line, file=sys.stderr, flush=True)
    else:
        say(line)
        time.sleep(30 * (rank() > 0))
    raise SystemExit(status) from None


def resume_hint(folder: Path | None) -> str:
    """Says where --resume continues, once there is something."""
    if folder is None or not os.path.exists(folder / "checkpoints"):
        return ""  # exists is False for an impossible name, too
    return f"; --resume continues in {folder}"


# --------------------------------------------------------------------------- plan, train, report


def conduct(command: Command, configs: list[Config], line: str, idle: list[str]) -> None:
    """Trains every run and reports, after `build_all` has read the data and built the models.

    line  the whole command line
    idle  those of its options that are `unused`
    """
    began = datetime.datetime.now().astimezone()
    first = configs[0]
    torch.set_num_threads(first.threads)
    settings, runs = plan(command, configs)
    takes_whole_runs = len(runs) >= ranks()
    if not takes_whole_runs:
        command.ranks = ranks()
    if first.out:  # before anything that takes time
        check_folder(Path(first.out), first.resume)
    name = Path(command.script.title()).stem
    if first.device == "auto":
        command.auto = choose_device(command, runs, name)
    with joined_ranks(runs[0].device) as store, workers(runs) as pool:
        counts = build_all(settings)  # while the workers import
        announce_hours(runs)
        suggest_chunk(runs)
        if command.folder is None:
            command.folder = on_first_rank(lambda: choose_folder(first, name))
        with locked(command.folder):
            on_first_rank(lambda: claim(command.folder, runs, first.resume))
            for word in idle * (rank() == 0):  # with the results: an error is one line alone
                print(f"{word} has no effect: no run of this command uses it", flush=True)
            if takes_whole_runs:
                leave_group()
            train_all(runs, pool, store)
            if rank() > 0:
                return
            about = {"command": line, "commit": commit(), "began": began.isoformat()}
            hours = (datetime.datetime.now().astimezone() - began).total_seconds() / 3600
            conclude(command, settings, counts, about | {"hours": round(hours, 4)})
    diverged = [f"{run}: {run.diverged}" for run in runs if run.diverged]
    if diverged:
        count = f"{len(diverged)} of {len(runs)} runs diverged"
        raise NonFiniteError(f"{count}, their cells are empty ({'; '.join(diverged[:3])})")


def choose_device(command: Command, runs: list[Run], name: str) -> str:
    """Returns what --device auto means: the CPU, if its cores end sooner or no GPU works.

    name  of the script. A resumed command continues where it began
    """
    first = runs[0].config
    if gpu_fault():
        if torch.cuda.is_available():
            say(f"--device auto: the CPU is used, since {gpu_fault()}")
        return "cpu"
    if ranks() > 1:
        return "cuda"
    if first.resume:
        command.folder = choose_folder(first, name)
        return device_of_before(command.folder)
    cost, cores = estimate(runs)
    if cost.core / cores < cost.card:  # not so for NaN, which is not known
        say(f"--device auto: the CPU is used (about {cost.on(cores)}); --device cuda is the GPU")
        return "cpu"
    return "cuda"


def estimate(runs: list[Run]) -> tuple[Cost, int]:
    """Returns what these runs cost, and how many cores would train them."""
    cost = cost_of([run.config for run in runs if run.trial == 0])
    return cost, max(ranks(), count_processes(runs, "cpu"))


def announce_hours(runs: list[Run]) -> None:
    """Says how long a command takes if this is more than an hour, and known."""
    cost, cores = estimate(runs)
    seconds = cost.card if runs[0].device == "cuda" else cost.core / cores
    if seconds > HOUR and not runs[0].config.resume:
        say(f"about {cost.on(cores)}")


def commit() -> str | None:
    """Returns the commit of this folder, "-dirty" if files differ from it; None without git."""
    words = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def build_all(settings: dict[str, list[Run]]) -> dict[str, np.ndarray]:
    """Reads the data, deals the samples and builds the model of every method's first trial.

    Returns how many samples of each class every client has, {setting: (M, C)}: the methods of a
    setting have the same. Raises UsageError if data, model, partition and --init do not fit.
    """
    counts = {}
    for setting, runs in settings.items():
        federations = [run.fl for run in runs if run.trial == 0]
        for run in runs:
            if run.config.init:  # before training, it is seen to be there for every trial
                initial_weights(run)
        counts[setting] = federations[0].count_labels()
    return counts


def suggest_chunk(runs: list[Run]) -> None:
    """Says what --chunk would do, where a user's own model trains one client at a time on a GPU."""
    for run in runs:
        is_own = ":" in run.config.model  # vmap knows no LSTM, which is the built-in plain model
        is_alone = run.trial == 0 and is_own and run.fl.model.is_plain and not run.config.chunk
        if run.device == "cuda" and is_alone:
            now = f"--model {run.config.model} trains one client at a time"
            say(f"{now}; --chunk 16 would train 16 at once, several times as fast, if it can")
            return


def title_of(config: Config, swept: list[str]) -> str:
    """Returns the data set, how it is divided, and the model, in words.

    What is swept is left out: each setting names it.
    """
    words = {"dataset": Path(config.dataset).name, "partition": config.partition}
    if reads_alpha(config) and "partition" not in swept:
        words.pop("partition")
        words["alpha"] = f"alpha {config.alpha:g}"
    words["model"] = Path(config.model).name
    return ", ".join(word for name, word in words.items() if name not in swept) or "a sweep"


def conclude(command: Command, settings: dict[str, list[Run]], counts: dict, about: dict) -> None:
    """Writes metrics.csv and tables; then figures, the script's own plots, and summary.json."""
    rows = []
    finite = {}
    for setting, shown in settings.items():
        finite[setting] = [run for run in shown if not run.diverged]
        for run in shown:  # whose rows stand in every setting where it is shown
            rows += [row | {"setting": setting} for row in run.rows]
    runs = [*itertools.chain(*settings.values())]
    first = runs[0]
    title = title_of(first.config, command.swept)
    with written_aside(command.folder) as folder:
        trials = f"{first.config.trials} trial" + "s" * (first.config.trials > 1)
        df = report.write_metrics(rows, folder, f"{title}, {trials}")
        results = report.write_results(df, folder)
        tables = files_in(folder)
    delete_older(command.folder, tables)
    with written_aside(command.folder) as folder:
        figures.plot_partition(counts, folder, title)
        if any(finite.values()):
            df = report.without_diverged(df)
            figures.plot_all(df, folder)
            if command.script.plot:
                command.script.plot(df, folder)
            if command.script.draw:
                command.script.draw(finite, folder)
        pictures = files_in(folder)
    configs = {run.method: vars(run.config) for run in reversed(runs)}  # of its first run
    summary = about | {"swept": command.swept, "config": configs} | first.environment | results
    summary["files"] = tables + pictures
    if first.device == "cuda":
        summary["card"] = torch.cuda.get_device_name()
    in_words = json.loads(json.dumps(summary), parse_constant=str)  # JSON has no infinity
    with written_aside(command.folder) as folder:  # last: where it is, the others are
        (folder / "summary.json").write_text(json.dumps(in_words, indent=1))
    print(f"results: {command.folder}")
