"""A run: one method in one setting and trial, with its rows and its checkpoint."""

import dataclasses
import functools
import itertools
import math
import numbers
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import common
import recording
from common import ADVICE
from data import Data, load_data
from errors import NonFiniteError, UsageError, first_line
from nets import SIDE, seed_libraries, seeded
from user_files import file_of, is_ours, source_checksum

from .disk import KEPT, file_name, kept_of, load, save
from .flags import Config
from .machine import gpu_fault, trim_heap
from .ranks import is_first, on_first_rank
from .script import Command
from .terminal import say
from .weights import initial_weights

TOTALS = ("uploads", "seconds", "samples", "received_mb", "sent_mb", "clock")  # since round 1


@dataclasses.dataclass(eq=False)
class Run:
    """One method in one setting and trial.

    config   the options, with one value each
    trial    from 0
    command  the `Command` that it belongs to
    method   its name in tables
    setting  the swept options that are not methods, "alpha=0.05 base=fedprox"; "-" if there is none
    streams  `common.Streams` of this seed and trial: the same numbers in every method
    rows     the rows of metrics.csv so far, a dict for each round
    fl       the `common.Federation`, built when it is first used
    folder   where the command writes its results

    A script's `federate(config, fl, run)` loops over `run.rounds(state)` and calls `run.record` in
    each round. `cached` keeps a tensor for several methods. `other` finds another method's run.
    """

    config: Config
    trial: int
    command: Command

    def __post_init__(self):
        self.script = self.command.script
        self.method = self.script.method_of(self.config)
        self.identity = self.script.results_depend_on(self.config)
        self.setting = self.command.setting(self.config, self.identity)
        self.rows = []
        self.state = {}
        self.finished = 0  # --rounds when it ended; 0: not yet
        self.diverged = ""  # what was not finite
        self.last_test = []  # the columns of a test that is due in the last round only
        self.is_tracked = self.script.track is not None
        self.streams = common.Streams(self.config.seed, self.trial)
        self.identity |= {"method": self.method, "trial": self.trial}
        self.file = file_name(self.method, self.identity)

    def __str__(self) -> str:
        return f"{self.setting} {self.method} trial {self.trial}".removeprefix("- ")

    # ------------------------------------------------------------------------- for `federate`

    def rounds(self, state: dict) -> Iterator[int]:
        """Yields the rounds t = 0 .. rounds - 1 that this run has still to do.

        Before the first of them it replaces what `state` holds by what a checkpoint holds. So
        `state` must be all that one round leaves to the next: tensors, NumPy arrays and plain
        Python. After a round it is saved, if that takes less than a twentieth of the time since
        the last save.
        """
        if self.rows:  # those that a checkpoint held
            before, now = self.state.get("theta"), state.get("theta")
            if isinstance(before, Tensor) and isinstance(now, Tensor) and before.shape != now.shape:
                advice = "undo the edit, or delete the file"  # no fingerprint knows nets.py
                raise UsageError(f"{self.path}: weights of another model; {advice}")
            state.clear()
            state.update(self.state)
        self.state = state
        saved_at = -math.inf
        cost = 0.0
        for t in range(len(self.rows), self.config.rounds):
            self.began = time.perf_counter()
            seed_libraries(self.streams.seed("round", t))  # for a script that uses these
            yield t
            if len(self.rows) != t + 1:
                raise UsageError(f"round {t + 1}: call run.record once in every round")
            now = time.perf_counter()
            if now - saved_at > 20 * cost and t + 1 < self.config.rounds:  # `train` saves the last
                self.save()
                saved_at = time.perf_counter()
                cost = saved_at - now
            if t % 10 == 9:
                trim_heap()
            self.report_progress(t + 1)

    def record(self, t: int, state: dict, update: common.Update, last=False, **columns) -> None:
        """Appends round t's row of metrics.csv: costs, training loss, and `columns`.

        The model is tested if --eval-every says so, and in the last round. `columns` replace what
        is found here, for example the costs: `run.record(.., **fl.cost(update, sent=5))`.

        update  what the clients sent: `fl.train` returns it
        last    whether no round follows, although --rounds is not reached

        Raises UsageError for another t or state than those of `rounds` and for columns that cannot
        be, and NonFiniteError if the loss of the test is not finite.
        """
        if t != len(self.rows) or state is not self.state:
            wanted = "wanted run.record(t, state, ..) with the t and state of run.rounds"
            raise UsageError(f"round {len(self.rows) + 1}: {wanted}")
        K = len(update.clients)
        row = self.row_of(t) | {"clients": K, "uploads": K} | self.fl.cost(update)
        took_steps = update.train_loss[update.steps > 0]
        row["train_loss"] = took_steps.mean() if len(took_steps) else math.nan
        self.forget_last_test()
        test = {}
        is_due = (t + 1) % self.config.eval_every == 0
        if is_due or last or t + 1 == self.config.rounds:
            test = plain_row(dict(self.fl.test(state)))
            if not math.isfinite(test.get("loss", 0)):
                raise NonFiniteError(f"round {t + 1}: the test loss is not finite; {ADVICE}")
            if not is_due:
                self.last_test = [*(test.keys() - columns.keys())]
        fixed = {*self.row_of(t), "seconds", "diverged"}
        if taken := test.keys() & (row.keys() | fixed) | columns.keys() & fixed:
            raise UsageError(f"run.record: {', '.join(sorted(taken))}: choose another name")
        row = plain_row(row | test | columns, TOTALS)
        row["seconds"] = time.perf_counter() - self.began
        for name in TOTALS:
            before = self.rows[-1][name] if self.rows else 0
            row[name] = round(row[name] + before, 6)
        self.rows.append(row)
        if self.is_tracked and is_first():
            self.track(row)

    def cached(self, name: str, make: Callable[[], Tensor], *read: str) -> Tensor:
        """Returns make(), or what it returned to another method of this trial.

        name  of its file
        read  the options that decide it in addition to the role "central"
        """
        identity = self.config.flags("central")
        identity |= {"trial": self.trial, "weights": self.fl.model.size}
        identity |= {option: getattr(self.config, option) for option in read}
        is_dealt_by_us = is_ours(file_of(self.config.federation))
        if self.config.hold_out or not is_dealt_by_us:  # who holds what may decide it
            also = () if is_dealt_by_us else self.identity
            identity |= self.config.flags("dealing", also=also)
        path = self.path.with_name(file_name(name, identity))
        identity |= self.conditions | checksums(identity)  # other options' files may differ
        if not on_first_rank(path.exists):
            tensor = make()  # a task of all ranks
            on_first_rank(lambda: save(path, identity, tensor))
        return load(path, identity, self.device)

    def other(self, **changes) -> "Run":
        """Returns the run of this setting and trial with these options changed.

        `run.other(method="cl").load()` is what that run has reached.
        """
        config = dataclasses.replace(self.config, **changes)
        return Run(config, self.trial, self.command)

    def load(self) -> dict:
        """Returns {"rows": .., "state": ..} as last saved.

        Raises UsageError if the run was not trained, and NonFiniteError if it diverged.
        """
        if not self.path.exists():
            raise UsageError(f"{self} was not trained: add its method to the sweep")
        saved = self.saved()
        if saved["diverged"]:
            raise NonFiniteError(f"{self}: {saved['diverged']}")
        return saved

    # ------------------------------------------------------------------------------- its parts

    def saved(self) -> dict:
        """Returns `KEPT` as the checkpoint holds it."""
        return kept_of(self.path, load(self.path, self.fingerprint, self.device))

    def forget_last_test(self) -> None:
        """Takes out the test that was due only because a shorter run ended there."""
        for name in self.last_test:
            self.rows[-1].pop(name, None)
        self.last_test = []

    def row_of(self, t: int) -> dict:
        """Returns the columns that say which run a row belongs to."""
        whose = {"setting": self.setting, "method": self.method, "trial": self.trial}
        return whose | {"round": t + 1}

    def track(self, row: dict) -> None:
        """Gives the row to the script's `track`. If that fails, the training continues."""
        try:
            self.script.track(self, dict(row))
        except (Exception, SystemExit) as error:
            self.is_tracked = False
            fault = f"{type(error).__name__}: {first_line(error)}"
            say(f"{self}: the run is no longer tracked ({fault})")

    def report_progress(self, rounds: int) -> None:
        """Reports that this run has done this many rounds, with the accuracy tested last."""
        tested = [row["accuracy"] for row in self.rows if "accuracy" in row]
        self.progress(str(self), rounds, tested[-1] if tested else math.nan)

    def save(self) -> None:
        if is_first():
            save(self.path, self.fingerprint, {name: getattr(self, name) for name in KEPT})

    def restore(self) -> None:
        """Takes rows and state from the checkpoint.

        Raises UsageError if it is of a longer run. After its last round such a run did not do what
        is done at the end, such as a test.
        """
        vars(self).update(self.saved())
        least = len(self.rows)
        if self.finished < least and not self.diverged:
            least += 1
        if self.config.rounds < least:
            advice = f"choose at least --rounds {least}"
            raise UsageError(f"--resume: {self.path} is of a longer run; {advice}")

    @property
    def needed(self) -> "Run":
        """The run whose result this one uses; itself, if it uses none."""
        return self.other(**self.script.after(self.config))

    @property
    def waits(self) -> bool:
        """Whether it uses another run's result."""
        return self.needed.file != self.file

    @property
    def device(self) -> str:
        """Where it is trained: "cpu" or "cuda"."""
        if self.config.device != "auto":
            return self.config.device
        return self.command.auto or ("cpu" if gpu_fault() else "cuda")

    @property
    def folder(self) -> Path:
        return self.command.folder

    @property
    def path(self) -> Path:
        return self.folder / "checkpoints" / self.file

    def data(self) -> Data:
        side = SIDE.get(self.config.model, 0)
        return load_data(self.config.dataset, self.config.data_dir, self.device, side)

    @functools.cached_property
    def fl(self) -> common.Federation:
        fl = self.config.federation(self.data(), self.streams)
        if self.config.init:
            theta = initial_weights(self)
            if len(theta) != fl.model.size:
                found = f"{len(theta)} weights, but this model has {fl.model.size}"
                raise UsageError(f"--init {self.config.init}: {found}")
            fl.initial = theta.to(fl.model.device, fl.model.dtype)
        return fl

    @property
    def fingerprint(self) -> dict:
        """Returns all that decides the run's result, {name: value}."""
        return self.identity | self.environment

    @functools.cached_property
    def environment(self) -> dict:
        """Returns what decides it in addition to the options: data and a user's code, as read."""
        return self.conditions | checksums(self.identity)

    @functools.cached_property
    def conditions(self) -> dict:
        """Returns the part of `environment` that all methods share."""
        found = {
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "state": 2,  # raised when what a script keeps changes
            "device": self.device,
            "ranks": self.command.ranks,
            "data": self.data().checksum,
        }
        if self.config.init:
            found["initial weights"] = zlib.crc32(initial_weights(self).numpy())
        for file in self.script.own_files(self.config):
            checksum = source_checksum(f"{file}:federate")
            name = f"the file {Path(file).name}, checksum"  # of two __init__.py, say, the sum
            found[name] = found.get(name, 0) + checksum
        return found


def checksums(options: dict) -> dict:
    """Returns the checksum of each FILE.py that is the value of an option."""
    found = {}
    for name, value in options.items():
        if checksum := source_checksum(value):
            found[f"the file of --{name.replace('_', '-')}, checksum"] = checksum
    return found


def plain_row(row: dict, totals=()) -> dict:
    """Returns a row of metrics.csv in plain Python.

    Raises UsageError for an array of several entries, and if a column of `totals` has no finite
    number, or one of a test none.
    """
    plain = {}
    for name, value in row.items():
        if hasattr(value, "item"):
            if math.prod(value.shape) != 1:
                raise UsageError(f"column {name} has shape {tuple(value.shape)}; wanted one number")
            value = value.item()
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if name in ("accuracy", "loss", *totals) and not is_number:
            raise UsageError(f"column {name} is {value!r}; wanted a number")
        if name in totals and not abs(value) < math.inf:
            raise UsageError(f"column {name} is {value!r}; wanted a finite number")
        plain[name] = value
    return plain


def train(run: Run, progress: Callable[[str, int, float], None]) -> dict:
    """Trains a run as far as its checkpoint does not hold it; returns what the table needs.

    progress  is told the run's name, its rounds so far, and its last accuracy
    """
    run.progress = progress
    torch.set_num_threads(run.config.threads)
    if run.config.resume and run.path.exists():
        run.restore()
        run.report_progress(len(run.rows))
    if not run.diverged and run.finished < run.config.rounds:
        try:
            with seeded(run.streams.seed("before the rounds")):
                run.script.federate(run.config, run.fl, run)
            if not run.rows:
                raise UsageError(f"{run}: nothing was trained; wanted a loop over run.rounds")
            if all(math.isnan(row.get("accuracy", math.nan)) for row in run.rows):
                raise UsageError(f"{run}: no round has an accuracy; wanted one of fl.test")
            run.finished = run.config.rounds
        except NonFiniteError as error:
            run.diverged = str(error)
            run.forget_last_test()
            run.rows.append(run.row_of(len(run.rows)) | {"diverged": 1})
        on_first_rank(run.save)  # the others may read it from now on
    vars(run).pop("fl", None)  # its memory
    recording.KEPT.clear()  # that of its graphs, too
    run.state = {}
    run.report_progress(run.config.rounds)
    return {"rows": run.rows, "diverged": run.diverged}


def plan(command: Command, configs: list[Config]) -> tuple[dict[str, list[Run]], list[Run]]:
    """Returns each setting's runs, and all runs: those that wait for another one come last."""
    for name in command.script.compare:
        if name not in command.script.config.__dataclass_fields__:
            raise UsageError(f"compare: {name} is no option; wanted names such as ('method',)")
    runs = {}
    settings = {}
    for config, trial in itertools.product(configs, range(configs[0].trials)):
        run = Run(config, trial, command)
        run = runs.setdefault(run.file, run)
        shown = settings.setdefault(command.setting(config, command.swept), {})
        if shown.setdefault((run.method, trial), run) is not run:
            raise UsageError(f"two methods of different options are both called {run.method}")
    for run in runs.values():
        if run.needed.file not in runs:
            raise UsageError(f"{run} needs {run.needed}: add its method to the sweep")
    settings = {setting: list(shown.values()) for setting, shown in settings.items()}
    return settings, sorted(runs.values(), key=lambda run: run.waits)
