"""A run: one method in one setting and trial, with its rows and its checkpoint."""

import dataclasses
import functools
import itertools
import math
import re
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import common
from common import NonFiniteError
from data import Data, UsageError, load_data, source_checksum
from nets import SIDE

from .disk import load, save
from .flags import Config
from .processes import on_first_rank, rank, ranks, trim_heap

# ------------------------------------------------------------------------------------------- runs

# counted from round 1 on
TOTALS = ("uploads", "seconds", "samples", "received_mb", "sent_mb", "clock")


@dataclasses.dataclass(eq=False)
class Run:
    """One method in one setting and trial: its rows of metrics.csv, and its checkpoint.

    A script's federate(config, fl, run) loops over `rounds` and calls `record` in each; `cached`
    shares a tensor among arms, `other` finds another arm's run.
    """

    config: Config
    method: str
    setting: str
    trial: int
    script: "Script"

    def __post_init__(self):
        self.rows = []
        self.reported = 0  # how many rounds the progress bar knows of
        self.state = {}
        self.finished = 0  # --rounds when it ended; 0: not yet
        self.diverged = ""  # what was not finite
        self.streams = common.Streams(self.config.seed, self.trial)
        self.device = self.config.device
        if self.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.identity = self.config.results_depend_on()
        self.identity |= {"method": self.method, "trial": self.trial}
        self.file = self.file_name(self.method, self.identity)

    def __str__(self) -> str:
        return f"{self.setting} {self.method} trial {self.trial + 1}".strip()

    def rounds(self, state: dict) -> Iterator[int]:
        """Yields t = 0 .. rounds - 1; restores `state` before the first, saves it as it goes.

        After a round it is saved if that takes less than a twentieth of the time since the last
        save; `train` saves the last round.
        """
        if self.rows:  # those that a checkpoint held
            state.clear()
            state.update(self.state)
        self.state = state
        saved_at = -math.inf
        cost = 0.0
        for t in range(len(self.rows), self.config.rounds):
            self.began = time.perf_counter()
            yield t
            now = time.perf_counter()
            if now - saved_at > 20 * cost and t + 1 < self.config.rounds:
                self.save()
                saved_at = time.perf_counter()
                cost = saved_at - now
            if t % 10 == 9:
                trim_heap()
            self.report_progress()

    def record(self, t: int, state: dict, update: common.Update, last=False, **columns) -> None:
        """A row of metrics.csv: a round's cost, how good the net is, and the script's `columns`.

        last  whether no round follows, before --rounds is reached
        """
        K = len(update.clients)
        row = self.row_of(t) | {"clients": K, "uploads": K} | self.fl.cost(update)
        row["train_loss"] = update.train_loss.mean()
        is_last = last or t + 1 == self.config.rounds
        if is_last or (t + 1) % self.config.eval_every == 0:
            row |= self.fl.test(state)
        row |= columns
        row["seconds"] = time.perf_counter() - self.began
        for name, value in row.items():
            if hasattr(value, "item"):
                row[name] = value.item()
        for name in TOTALS:
            before = self.rows[-1][name] if self.rows else 0
            row[name] = round(row[name] + before, 6)
        self.rows.append(row)

    def row_of(self, t: int) -> dict:
        """Whose row this is."""
        whose = {"setting": self.setting, "method": self.method, "trial": self.trial}
        return whose | {"round": t + 1}

    def cached(self, name: str, make: Callable[[], Tensor], *read: str) -> Tensor:
        """A tensor that a trial's arms share, if central training and flags `read` are alike."""
        identity = self.config.flags("central") | {"trial": self.trial}
        identity |= {option: getattr(self.config, option) for option in read}
        identity["weights"] = self.fl.model.size
        if self.config.hold_out:  # then who holds a sample decides whether it may be seen
            identity |= self.config.flags("dealing")
        path = self.path.with_name(self.file_name(name, identity))
        identity |= self.environment
        if not on_first_rank(path.exists):
            tensor = make()  # a task of all ranks
            on_first_rank(lambda: save(path, identity, tensor))
        return load(path, identity, self.device)

    def other(self, **changes) -> "Run":
        """The run of this setting and trial with these flags changed, to load what it reached."""
        config = dataclasses.replace(self.config, **changes)
        return self.script.run(config, self.trial)

    def load(self) -> dict:
        """{"rows": .., "state": ..} as last saved."""
        if not self.path.exists():
            raise UsageError(f"{self} was not trained: add its arm to the sweep")
        self.restore()
        if self.diverged:
            raise NonFiniteError(f"{self}: {self.diverged}")
        return {"rows": self.rows, "state": self.state}

    def save(self) -> None:
        if rank() == 0:
            content = {"rows": self.rows, "state": self.state}
            content |= {"finished": self.finished, "diverged": self.diverged}
            save(self.path, self.identity | self.environment, content)

    def restore(self) -> None:
        """Takes rows and state from the checkpoint."""
        vars(self).update(load(self.path, self.identity | self.environment, self.device))

    @property
    def path(self) -> Path:
        return self.script.folder / "checkpoints" / self.file

    def file_name(self, label: str, identity: dict) -> str:
        """Legible, and distinct for each identity."""
        digest = zlib.crc32(repr(sorted(identity.items())).encode())
        name = re.sub(r"[^\w.=+,-]", "-", label.strip())[:100]
        return f"{name}-{digest:08x}-trial{self.trial}.pt"

    def report_progress(self, is_over: bool = False) -> None:
        """How many rounds more are done, with the accuracy that was tested last."""
        done = self.config.rounds if is_over else len(self.rows)
        accuracy = math.nan
        for row in self.rows:
            accuracy = row.get("accuracy", accuracy)
        self.progress(done - self.reported, accuracy)
        self.reported = done

    def data(self) -> Data:
        side = SIDE.get(self.config.model, 0)
        return load_data(self.config.dataset, self.config.data_dir, self.device, side)

    @functools.cached_property
    def fl(self) -> common.Federation:
        return self.config.federation(self.data(), self.streams)

    @functools.cached_property
    def environment(self) -> dict:
        """What else the bits depend on, as this process has read it: data and the user's code."""
        found = {
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "state": 2,  # raised when what a script keeps changes
            "device": self.device,
            "ranks": ranks(),
            "data": self.data().checksum,
        }
        for name, value in vars(self.config).items():
            if checksum := source_checksum(value):
                found[f"the file of --{name}, checksum"] = checksum
        return found


def waits_for_none(config: Config) -> dict:
    return {}


@dataclasses.dataclass
class Script:
    """What a script gives to `main`, and what the command line adds.

    federate(config, fl, run)  trains one method and records its rounds
    config, presets, doc       its Config, command lines by name, and docstring
    compare                    the flags whose values are the methods, compared in each setting
    name(config)               how a method is called, if not by its flags
    plot(df, folder)           prints and plots what is the script's own
    draw(settings, folder)     plots what runs saved: {setting: its runs}, each with load()
    after(config)              the flags of the arm whose result this one reads, and waits for,
                               {"method": "cl"}; {}: it reads none
    """

    federate: Callable
    compare: tuple[str, ...]
    config: type = Config
    presets: dict[str, str] = dataclasses.field(default_factory=dict)
    doc: str = ""
    name: Callable | None = None
    plot: Callable | None = None
    draw: Callable | None = None
    after: Callable = waits_for_none
    swept: tuple[str, ...] = ()
    folder: Path | None = None  # chosen before training begins

    def run(self, config: Config, trial: int) -> Run:
        """An arm's run. Its setting names the swept flags that it reads."""
        method = " ".join(str(getattr(config, name)) for name in self.compare)
        if self.name:
            method = self.name(config)
        setting = self.setting(config, config.results_depend_on())
        return Run(config, method, setting, trial, self)

    def setting(self, config: Config, flags) -> str:
        """'alpha=0.05 base=fedprox': the swept ones of these flags that are not compared."""
        names = [name for name in self.swept if name in flags and name not in self.compare]
        return " ".join(f"{name}={getattr(config, name)}" for name in names)

    def plan(self, configs: list[Config]) -> tuple[dict[str, list[Run]], list[Run]]:
        """Each setting's runs, and all; an arm that does not read what is swept serves several."""
        runs = {}
        settings = {}
        for config, trial in itertools.product(configs, range(configs[0].trials)):
            run = self.run(config, trial)
            run = runs.setdefault(run.file, run)
            shown = settings.setdefault(self.setting(config, self.swept), {})
            if shown.setdefault((run.method, trial), run) is not run:
                raise UsageError(f"two arms of different flags would both be called {run.method}")
        for run in runs.values():
            other = run.other(**self.after(run.config))  # by default itself
            if other.file not in runs:
                raise UsageError(f"{run} needs {other}: add its arm to the sweep")
        settings = {setting: list(shown.values()) for setting, shown in settings.items()}
        return settings, list(runs.values())


def train(run: Run, progress: Callable) -> dict:
    """Trains a run as far as its checkpoint does not already hold it; what the table needs."""
    run.progress = progress
    torch.set_num_threads(run.config.threads)
    if run.config.resume and run.path.exists():
        run.restore()
        run.report_progress()
    if not run.diverged and run.finished < run.config.rounds:
        try:
            run.script.federate(run.config, run.fl, run)
            run.finished = run.config.rounds
        except NonFiniteError as error:
            run.diverged = str(error)
            run.rows.append(run.row_of(len(run.rows)) | {"diverged": 1})
        run.save()
    vars(run).pop("fl", None)
    run.report_progress(is_over=True)
    if ranks() > 1:
        dist.barrier()  # other ranks may read its checkpoint from now on
    return {"rows": run.rows, "diverged": run.diverged}
