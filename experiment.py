"""What makes a script an experiment: flags, presets and sweeps, trials, checkpoints, processes, tables and figures.

A script calls `main(Config, PRESETS, __doc__, federate, ...)`. Every flag takes one value, or several: then it is swept. So a
preset is nothing but a command line with a name, and what is compared is the sweep of the flags that make a method.

A checkpoint is the rows of metrics.csv and the state of a round loop, written by renaming a whole file, with a fingerprint of
all that its bits depend on. Another fingerprint, a damaged file, a folder where another run is at work are refused in one line.

Exit status: 0; 2 a mistake of the caller; 3 an update that is not finite; 4 a rank of torchrun is gone; 5 a file could not be
written (a full disk, say); 130 and 143 after Ctrl-C and SIGTERM. Each says so in one line, and what is kept. Two are not ours:
Ctrl-C while Python still imports numpy and torch is a traceback, and torchrun ends with 1 whatever its ranks ended with.

Rooms, in this order: flags | a run on disk | processes | the folder of a run | main | tables and figures.
"""

import argparse
import concurrent.futures
import contextlib
import cProfile
import ctypes
import dataclasses
import errno
import functools
import importlib.util
import io
import itertools
import json
import math
import operator
import os
import platform
import pstats
import queue
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import scipy
import torch
import torch.distributed as dist
from joblib import Parallel, cpu_count, delayed
from torch import Tensor
from tqdm import tqdm

import common
from common import NonFiniteError, UsageError, first_line

# ------------------------------------------------------------------------------------------------------------- flags


def flag(default, help: str, low=None, high=None, above=None, below=None, choices=(), kind=None, group=""):
    """A dataclass field that is also a flag, of the type of its default; a tuple of defaults is a sweep.

    low <= value <= high, above < value < below (inf only where `high` is inf). `kind` turns a word into a value where the type
    does not do; what it raises (ValueError, UsageError) is shown. `group` begins a group of --help.
    """
    kind = kind or type(default[0] if isinstance(default, tuple) else default)
    limits = {sign: v for sign, v in ((">=", low), (">", above), ("<=", high), ("<", below)) if v is not None}
    meta = {"help": help, "choices": tuple(choices), "kind": kind, "group": group, "limits": limits}
    return dataclasses.field(default=default, metadata=meta)


@dataclasses.dataclass
class Config:
    """The flags every script has, in the order of --help. A script's own Config adds the algorithm's and other defaults."""

    dataset: str = flag("digits", f"{', '.join(common.DATASETS)}, an .npz file or a folder with train/ and test/", group="data")
    data_dir: str = flag("data", "where torchvision's data sets are, or are downloaded to")
    partition: str = flag("dirichlet", "samples over clients", choices=common.PARTITIONS)
    alpha: float = flag(0.1, "Dirichlet concentration: small is heterogeneous", 1e-3, 1e6)
    classes_per_client: int = flag(2, "classes a client owns under label-skew and dirichlet-ext", 1, 1000)
    min_size: int = flag(1, "fewest samples of a client; poorer ones are filled from the largest", 1, 10**6)
    parts: int = flag(0, "cut the data into so many parts and keep --clients of them (0: all)", 0, 10**7)
    model: str = flag("lenet5", f"{', '.join(common.NETS)}, or FILE.py:CLASS, anyone's nn.Module", group="net")
    width: int = flag(0, "hidden width of alexnet (0: 4096) and lstm (0: 512)", 0, 65536)
    norm: str = flag("batch", "batch norm as the net has it, or group norm", choices=("batch", "group"))
    dtype: str = flag("float32", "of weights and arithmetic", choices=("float32", "float64"))
    clients: int = flag(100, "M, all clients", 1, 10**7, group="federation")
    clients_per_round: int = flag(10, "clients selected in a round", 1, 10**6)
    rounds: int = flag(100, "communication rounds", 1, 10**6)
    epochs: int = flag(10, "E, local epochs", 1, 10**5)
    batch_size: int = flag(10, "B, local batch", 1, 65536)
    lr: float = flag(0.01, "eta, the clients' learning rate", above=0)
    momentum: float = flag(0.0, "of the clients' SGD, fresh every round (0: none)", 0, below=1)
    weight_decay: float = flag(0.0, "of the clients' SGD (0: none)", 0)
    base: str = flag("fedavg", "client correction and server rule", choices=common.BASES)
    mu: float = flag(-1.0, "of fedprox and moon (-1: the base's default; 0: no term)", -1)
    server_lr: float = flag(0.0, "of scaffold, fedadagrad, fedadam, fedyogi (0: the base's default)", 0)
    seed: int = flag(202207, "of every random stream", 0, 2**31 - 1, group="run")
    trials: int = flag(3, "repetitions, each with its own partition, initial weights and draws", 1, 10**4)
    until_halfwidth: float = flag(0.0, "add trials until the first difference is known to +- this (0: no)", 0, 100)
    most_trials: int = flag(50, "no more trials than these, with --until-halfwidth", 1, 10**4)
    eval_every: int = flag(1, "rounds between tests; the last round is always tested", 1, 10**6)
    per_client: bool = flag(False, "test on the clients' own mixes of labels, too: mean, worst tenth (own_accuracy.png)")
    hold_out: float = flag(0.0, "test on this share of each client's training data (0: test data)", 0, below=1)
    tune: str = flag("", "FLAG=VALUE,..: a run takes what is best on a held-out fifth of its training samples")
    tune_rounds: int = flag(10, "rounds with each value of --tune", 1, 10**6)
    on_nonfinite: str = flag("stop", "a NaN or infinite update ends the run or is left out", choices=("stop", "drop"))
    device: str = flag("auto", "auto takes the GPU where there is one", choices=("auto", "cpu", "cuda"))
    stack_trials: bool = flag(False, "train a method's trials as one stack: for small nets on a GPU")
    jobs: int = flag(1, "trials and methods trained at once, in processes of their own", 1, 1024)
    threads: int = flag(0, "torch threads of each process (0: the cores shared out)", 0, 1024)
    chunk: int = flag(0, "clients trained as one net (0: chosen for the net and device)", 0, 10**6)
    track: str = flag("none", "write metrics.csv for tensorboard, too", choices=("none", "tensorboard"))
    show_partition: bool = flag(False, "draw which client has how many samples of which class, and stop")
    profile: bool = flag(False, "print where the time went (without --jobs, --stack-trials)")
    out: str = flag("", "folder of the results, overwritten (nothing: runs/<script>)")
    resume: bool = flag(False, "continue the run in --out; --jobs, --trials and sweeps may differ")

    def check(self) -> None:
        """Raises UsageError where flags contradict one another."""
        m, M, n, most = self.clients_per_round, self.clients, self.trials, self.most_trials
        tracked, apart = self.track == "tensorboard", self.jobs > 1 or self.stack_trials
        wrong = {
            f"--clients-per-round {m}: more than --clients {M}": m > M,
            f"--mu {self.mu}: wanted a number >= 0, or -1 for the base's own default": -1 < self.mu < 0,
            f"--parts {self.parts}: fewer than --clients {M}": 0 < self.parts < M,
            "--tune: holds samples out by itself; leave --hold-out at 0": self.tune and self.hold_out,
            "--device cuda: torch finds no GPU here": self.device == "cuda" and not torch.cuda.is_available(),
            "--track tensorboard: pip install tensorboard first": tracked and not importlib.util.find_spec("tensorboard"),
            f"--most-trials {most}: fewer than --trials {n}": self.until_halfwidth and most < n,
            "--profile: sees this process and thread alone; leave out --jobs and --stack-trials": self.profile and apart,
            "--jobs, --stack-trials: under torchrun the ranks share each run, one after another": apart and place()[1] > 1,
        }
        for said, so in wrong.items():
            if so:
                raise UsageError(said)

    def federation(self, data: common.Data, streams: common.Streams) -> common.Federation:
        """Who holds which samples: what is checked and drawn before training."""
        return common.Federation(self, data, streams)


SIGNS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what a disk, a quota and a limit say when there is no more room
FREE = ("resume", "out", "jobs", "profile", "track", "show_partition")  # flags that change no result
FREE += ("trials", "until_halfwidth", "most_trials")  # nor any run, so they may differ when it is resumed
SINGLE = (*FREE, "threads", "device", "tune", "tune_rounds", "stack_trials")  # flags that take one value
DEALING = ("partition", "alpha", "classes_per_client", "min_size", "parts", "clients", "hold_out")  # who holds which samples
DEALING += ("data_share",)  # of a single script
CENTRAL = ("dataset", "data_dir", "model", "width", "norm", "dtype", "batch_size", "lr", "momentum", "weight_decay", "seed")
UNTUNED = (*SINGLE, *DEALING, "f_ord", "expert_epochs", "clients_per_round", "rounds", "seed", "eval_every", "chunk")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n" if place()[0] == 0 else "")


class Formatter(argparse.HelpFormatter):
    def _format_action_invocation(self, action):  # `--alpha X`, not `--alpha X [X ...]`
        return action.metavar or ", ".join(action.option_strings)


def parse(config_class: type, presets: dict[str, str], doc: str, argv: list[str]) -> tuple[list, list[str]]:
    """Flags -> (a config for each point of the sweep, the names of the swept flags). Flags beside a --preset win."""
    usage = "%(prog)s [--preset NAME] [--FLAG VALUE ...]   (several values for a flag are a sweep)"
    how = {"usage": usage, "allow_abbrev": False, "formatter_class": functools.partial(Formatter, max_help_position=26)}
    parser = Parser(f"{config_class.__module__}.py", description=doc.strip().splitlines()[0], **how)
    known, fields, titles = Config.__dataclass_fields__, dataclasses.fields(config_class), {}
    for f in fields:
        title = known[f.name].metadata["group"] if f.name in known else "this algorithm"
        if title not in ("", *titles):
            titles[title] = group = parser.add_argument_group(title)
        add_flag(group, f, f.metadata or known[f.name].metadata)  # a script may change no more than the default
    text = f"one of {len(presets)} experiments that --list-presets prints; flags beside it win"
    group.add_argument("--preset", metavar="--preset NAME", choices=presets, help=text)
    group.add_argument("--list-presets", action="store_true", help="print every preset as a command line and exit")
    given = parser.parse_args(argv)
    if given.list_presets:
        for name, (line, _, comment) in ((name, text.partition("#")) for name, text in presets.items()):
            print(f"# {name}:{comment}\npython {parser.prog} {line}".rstrip())
        parser.exit()
    if given.preset:
        given = parser.parse_args([*shlex.split(presets[given.preset], comments=True), *argv])
    grid = {f.name: getattr(given, f.name) for f in fields}
    grid = {name: list(dict.fromkeys(v if isinstance(v, (list, tuple)) else [v])) or [True] for name, v in grid.items()}
    configs = [config_class(**dict(zip(grid, values, strict=True))) for values in itertools.product(*grid.values())]
    swept = [name for name, values in grid.items() if len(values) > 1]
    for config in configs:
        for each in (config, *candidates(config, swept)[1]):
            dataclasses.replace(each, rounds=config.rounds).check()
    return configs, swept


def add_flag(group, f: dataclasses.Field, meta: dict) -> None:
    """One field of a Config as a flag of its group, with what it takes and its default in the help."""
    option, values = "--" + f.name.replace("_", "-"), f.default if isinstance(f.default, tuple) else (f.default,)
    default = "all" if len(values) == len(meta["choices"]) > 1 else " ".join(map(shown, values)) or "nothing"
    text = ": ".join(filter(None, (meta["help"], ", ".join(meta["choices"])))) + f" [{default}]"
    how = {"help": text.replace("%", "%%"), "default": f.default, "type": functools.partial(convert, meta)}
    if meta["kind"] is bool:  # --flag, --no-flag, and as a sweep --flag on off
        how |= {"nargs": "?", "const": True} if f.name in SINGLE else {"nargs": "*"}
        how["metavar"] = f"--[no-]{option[2:]}"
        group.add_argument("--no-" + option[2:], action="store_false", dest=f.name, default=f.default, help=argparse.SUPPRESS)
    else:
        letter = {int: "N", float: "X"}.get(meta["kind"], "WORD")
        how |= {"nargs": None if f.name in SINGLE else "+", "metavar": f"{option} {letter}"}
    group.add_argument(option, **how)


def convert(meta: dict, text: str):
    """The value of one word of the command line. Raises ArgumentTypeError that says what is wanted."""
    kind, limits, choices = meta["kind"], meta["limits"], meta["choices"] or (("on", "off") if meta["kind"] is bool else ())
    if choices and text not in choices:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(choices)}")
    if {*text} & {*"\0\r\n"}:
        raise argparse.ArgumentTypeError(f"{text!r} holds a NUL or the end of a line")
    try:
        value = text == "on" if kind is bool else kind(text)
        endless = kind is float and not math.isfinite(value) and limits.get("<=") != value
        if endless or not all(SIGNS[sign](value, limit) for sign, limit in limits.items()):
            raise ValueError("out of range")
    except (ValueError, UsageError) as error:
        wanted = " ".join(["an integer" if kind is int else "a number", " and ".join(f"{s} {v}" for s, v in limits.items())])
        reason = f"{text!r} is not {wanted}".rstrip() if kind in (int, float) else error
        raise argparse.ArgumentTypeError(reason) from None
    return value


def checked(config_class: type, **flags):
    """A Config with these flags. Raises ValueError for one that the command line would not take."""
    for name, value in flags.items():
        f = config_class.__dataclass_fields__.get(name)
        try:
            convert(f.metadata or Config.__dataclass_fields__[name].metadata, shown(value))
        except (AttributeError, argparse.ArgumentTypeError) as error:
            raise ValueError(f"{name}: {error if f else 'there is no such flag'}") from None
    return config_class(**flags)


def named(option: str, name: str, known) -> Callable:
    """The user's own function that MODULE:FUNCTION names, the module found as by `import`. Raises UsageError: `known` are the
    other words that `option` takes."""
    module, _, function = name.partition(":")
    with users(f"{option} {name}", f"(wanted {', '.join(known)} or MODULE:FUNCTION)"):
        found = getattr(importlib.import_module(module), function)
        if not callable(found):
            raise TypeError(f"{type(found).__name__} is not a function")
        return found


@contextlib.contextmanager
def users(what: str, hint: str = ""):
    """Whatever a user's own code raises in here is a UsageError about `what`, in one line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, (UsageError, NonFiniteError)) or getattr(error, "code", 0) == 143:  # SIGTERM
            raise
        raise UsageError(f"{what}: {type(error).__name__}: {first_line(error)} {hint}".rstrip()) from error


def candidates(config, swept=()) -> tuple[str, list]:
    """The flag of --tune, and a config with each of its values for a short run. ("", []) without --tune; raises UsageError."""
    word, _, values = config.tune.partition("=")
    name, rounds = word.replace("-", "_"), min(config.tune_rounds, config.rounds)
    short = {"rounds": rounds, "eval_every": rounds, "hold_out": 0.2, "tune": "", "resume": False, "track": "none"}
    f = config.__dataclass_fields__.get(name)
    meta = f and (f.metadata or Config.__dataclass_fields__[name].metadata)
    try:
        if config.tune and (not meta or meta["kind"] not in (int, float) or name in (*UNTUNED, *swept)):
            raise UsageError(f"wanted FLAG=VALUE,VALUE,.. of a number that is not swept and none of {', '.join(UNTUNED)}")
        return name, [dataclasses.replace(config, **short, **{name: convert(meta, v)}) for v in values.split(",") if name]
    except (argparse.ArgumentTypeError, UsageError) as error:
        raise UsageError(f"--tune {config.tune[:200]}: {error}") from None


# ----------------------------------------------------------------------------------------------------- a run on disk


def shown(value) -> str:
    """A flag's value as it is typed."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else {"True": "on", "False": "off"}.get(str(value), str(value))


@dataclasses.dataclass
class Study:
    """What a script gives to `main`, and the flags that a command sweeps: known to its runs in whatever process they are."""

    federate: Callable | None = None
    method: tuple = ()
    script: str = ""
    name: Callable | None = None
    report: Callable | None = None
    after: Callable = lambda config: False
    unread: Callable = lambda config: ()
    instead: Callable = lambda config, runs, folder: False
    swept: tuple = ()

    def idle(self, config) -> set[str]:
        """The flags that the arm does not read, whatever --tune chooses for it."""
        return set.intersection(*(set(self.unread(each)) for each in candidates(config)[1] or [config]))

    def run(self, config, trial: int, folder: Path) -> "Run":
        method = self.name(config) if self.name else " ".join(shown(getattr(config, f)) for f in self.method)
        return Run(config, method, self.setting(config, self.idle(config)), trial, folder, self)

    def setting(self, config, ignored=()) -> str:
        """'alpha=0.05 base=fedprox': the swept flags that are no part of a method, but those ignored."""
        flags = (f for f in self.swept if f not in (*self.method, *ignored))
        return " ".join(f"{f}={shown(getattr(config, f))}" for f in flags)

    def plan(self, configs: list, trials, folder: Path, wanted: dict) -> list["Run"]:
        """The runs of these trials, each once; `wanted` gains them by the setting, method and trial where they are shown."""
        runs = {}
        for config, trial in itertools.product(configs, trials):
            run = self.run(config, trial, folder)
            run = runs.setdefault(run.path, run)
            for f in set(self.method) - self.idle(config):
                one, other = getattr(run.config, f), getattr(config, f)
                if one != other:
                    raise UsageError(f"--{f.replace('_', '-')}: {one} and {other} would both be called {run.method}")
            wanted.setdefault(self.setting(config), {}).setdefault(run.method, {}).setdefault(trial, run)
        return list(runs.values())


@dataclasses.dataclass(eq=False)
class Run:
    """One method in one setting and trial: its rows of metrics.csv, and its checkpoint."""

    config: object  # the script's Config
    method: str
    setting: str
    trial: int
    folder: Path
    study: Study = dataclasses.field(default_factory=Study)
    rows: list = dataclasses.field(default_factory=list)
    unsaved: dict | None = None  # the state that the last round left
    tuned: dict = dataclasses.field(default_factory=dict)  # the flag of --tune and the value that was chosen

    def __post_init__(self):
        self.streams = common.Streams(self.config.seed, self.trial)
        fields, aside = self.config.__dataclass_fields__, (*SINGLE, *self.study.method, *self.study.idle(self.config))
        values = {name: getattr(self.config, name) for name in fields if name not in aside}
        own = [f"{name}={shown(value)}" for name, value in values.items() if fields[name].default not in (value, (value,))]
        self.path = self.file(" ".join([self.method, *own]))  # whatever else is swept: a resumed sweep may be a wider one
        self.device = self.config.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")

    def __str__(self) -> str:
        return f"{self.setting} {self.method} trial {self.trial + 1}".strip()

    def file(self, label: str) -> Path:
        name = re.sub(r"[^\w.=+,-]", "-", label, flags=re.ASCII)[:120]
        odd = f"-{zlib.crc32(label.encode(errors='replace')):08x}" if name != label.replace(" ", "-") else ""
        return self.folder / "checkpoints" / f"{name}{odd}-trial{self.trial}.pt"

    def data(self) -> common.Data:
        return common.load_data(self.config.dataset, self.config.data_dir, self.device, common.SIDE.get(self.config.model))

    def other(self, **changes) -> "Run":
        """The run of this setting and trial with these flags changed, to load what it reached."""
        return self.study.run(dataclasses.replace(self.config, **changes), self.trial, self.folder)

    def fingerprint(self, *flags: str) -> dict:
        """All that the bits of a checkpoint depend on; of a cached tensor, that depends on `flags` only."""
        values = dataclasses.asdict(self.config) | (self.tuned if flags else {})
        names = flags or [n for n in values if n not in (*FREE, *self.study.idle(self.config))]
        seen = {name: values.get(name) for name in (*names, "threads", "chunk")} | {"device": self.device, "trial": self.trial}
        seen |= {"script": self.study.script, "torch": str(torch.__version__), "numpy": np.__version__, "ranks": place()[1]}
        seen["data"] = self.data().checksum
        return seen | ({} if flags else {"method": self.method})

    def read(self, path: Path, fingerprint: dict):
        """What was saved with this fingerprint. Raises UsageError for any other file, and leaves it untouched."""
        try:
            if zipfile.ZipFile(path).testzip():  # torch does not look at the checksums
                raise ValueError("a wrong checksum")
            saved = torch.load(path, weights_only=True, map_location=self.device)
            theirs, content = dict(saved["fingerprint"]), saved["content"]
            differ = [n for n in theirs | fingerprint if str(theirs.get(n)) != str(fingerprint.get(n))]
        except (FileNotFoundError, PermissionError) as error:
            raise UsageError(f"{path}: {error.strerror}") from None
        except Exception as error:  # torch, zip and pickle each have their own word for a damaged file
            raise UsageError(f"{path}: damaged, left as it is ({first_line(error)}); remove it to begin it anew") from None
        if differ:
            pairs = (f"{n} {theirs.get(n)!s:.40}, not {fingerprint.get(n)!s:.40}" for n in differ[:3])
            raise UsageError(f"{path}: of another run, left as it is ({'; '.join(pairs)})")
        return content

    def load(self) -> dict:
        """{"rows": ..., "state": ...} as last saved. Raises UsageError where that is absent, damaged or another run's."""
        saved = self.read(self.path, self.fingerprint())
        with contextlib.suppress(TypeError, KeyError, AttributeError):
            rounds = [(row["method"], row["trial"], row["round"]) for row in saved["rows"]]
            whole = rounds == [(self.method, self.trial, t + 1) for t in range(len(rounds))]
            if whole and len(rounds) <= self.config.rounds and isinstance(saved["state"], dict):
                return saved
        raise UsageError(f"{self.path}: rows are missing or foreign, left as it is; remove it to begin it anew")

    def save(self) -> None:
        if place()[0] == 0 and self.unsaved is not None:
            write(self.path, {"fingerprint": self.fingerprint(), "content": {"rows": self.rows, "state": self.unsaved}})
        self.unsaved = None

    def cached(self, name: str, make: Callable[[], Tensor], *flags: str) -> Tensor:
        """A tensor that many runs of a trial share (an expert, say): made once per value of CENTRAL and `flags`, then read."""
        held_out = DEALING if self.config.hold_out else ()  # who holds a sample then decides whether an expert may see it
        seen = self.fingerprint(*CENTRAL, *flags, *held_out) | {"projection": self.config.base == "moon"}
        path = self.file(f"{name} {zlib.crc32(repr(sorted(seen.items())).encode()):08x}")
        if not on_first_rank(path.exists):
            tensor = make()  # a task of all ranks
            on_first_rank(lambda: write(path, {"fingerprint": seen, "content": tensor}))
        return self.read(path, seen)

    def choose(self):
        """The config to train with. The choice of --tune is made once and kept; an arm that does not read the flag has none.

        The best accuracy on held-out samples wins, of equals the first. Raises NonFiniteError where every value diverges.
        """
        name, short = candidates(self.config)
        if not short or name in self.study.idle(self.config):
            return self.config
        decisive = [flag for flag in self.fingerprint() if hasattr(self.config, flag)]
        reached = self.cached("tuned", lambda: torch.tensor([*map(self.rehearse, short)]), *decisive).tolist()
        if max(reached) < 0:
            raise NonFiniteError(f"no value of --tune {self.config.tune} leads to finite updates")
        self.tuned = {name: getattr(short[reached.index(max(reached))], name)}
        return dataclasses.replace(self.config, **self.tuned)

    def rehearse(self, config) -> float:
        """The accuracy in percent that a run with this config ends with, -1 where it diverges. Nothing of it is kept."""
        run = Run(config, self.method, f"{self.setting} tune", self.trial, self.folder, self.study)
        run.save, run.other = lambda: None, self.other  # what it reads of another arm is from that one's real run
        try:
            self.study.federate(config, self.data(), run)
        except NonFiniteError:
            return -1.0
        return run.rows[-1]["accuracy"]

    def rounds(self, state: dict):
        """Yields t = 0 .. rounds - 1. Before the first it restores `state`; all that must survive to the next round is in it.

        It is saved where that takes less than a twentieth of the time, and at the end: what a kill costs is trained again.
        """
        if self.config.resume and self.path.exists():
            saved = self.load()
            restore(state, saved["state"], self.path)
            self.rows = saved["rows"]
        hidden, saved_at, cost, R = self.config.jobs > 1 or place()[0] > 0, -math.inf, 0.0, self.config.rounds
        how = {"initial": len(self.rows), "total": R, "disable": hidden, "leave": False, "unit": "round"}
        for t in (bar := tqdm(range(len(self.rows), R), f"{self}", **how)):
            self.begun = time.perf_counter()
            yield t
            self.unsaved, ended = state, time.perf_counter()
            if t + 1 == R or ended - saved_at > 20 * cost:
                self.save()
                saved_at = time.perf_counter()
                cost = saved_at - ended
            bar.set_postfix_str(self.accuracy(), refresh=False)
            if t % 10 == 9:
                common.trim()

    @functools.cached_property
    def tensorboard(self):
        from torch.utils.tensorboard import SummaryWriter

        path = self.folder / "tensorboard" / self.path.stem
        return SummaryWriter(str(path), purge_step=len(self.rows))  # rounds after the last checkpoint are trained again

    def accuracy(self) -> str:
        """The last tested accuracy, for a progress bar; nothing before the first test."""
        tested = [row["accuracy"] for row in self.rows if "accuracy" in row]
        return f"accuracy {tested[-1]:.1f}" if tested else ""

    def due(self, t: int) -> bool:
        """Whether round t is tested."""
        return (t + 1) % self.config.eval_every == 0 or t + 1 == self.config.rounds

    def record(self, t: int, clients: int, dropped: int = 0, **columns) -> None:
        """Adds round t to metrics.csv. `clients` uploaded an update; further columns are the script's own.

        uploads, seconds, samples, received_mb and sent_mb are counted from the first round on.
        """
        row = {"setting": self.setting, "method": self.method, "trial": self.trial, "round": t + 1, "clients": clients}
        row |= {"dropped": dropped, "uploads": clients, "seconds": time.perf_counter() - self.begun} | columns
        if self.tuned:
            [row["tuned"]] = self.tuned.values()
        row = {name: value.item() if hasattr(value, "item") else value for name, value in row.items()}
        for name in row.keys() & {"uploads", "seconds", "samples", "received_mb", "sent_mb"}:
            row[name] = round(row[name] + (self.rows[-1][name] if self.rows else 0), 6)
        self.rows.append(row)
        if self.config.track == "tensorboard" and place()[0] == 0:
            for name, value in row.items():
                if isinstance(value, (int, float)):
                    self.tensorboard.add_scalar(name, value, t + 1)
        if dropped:
            say(f"warning: {self} round {t + 1}: {dropped} updates are not finite, left out")


def restore(state: dict, saved: dict, path: Path) -> None:
    """`saved` in the place of what `state` holds; objects that share one of its inner dicts see the restored values."""
    for name in state.keys() & saved.keys():
        here, value = state[name], saved[name]
        if isinstance(here, Tensor) and (getattr(value, "shape", 0), getattr(value, "dtype", 0)) != (here.shape, here.dtype):
            raise UsageError(f"{path}: {name} has another shape or type, left as it is; remove it to begin it anew")
        if isinstance(here, dict) and isinstance(value, dict):
            restore(here, value, path)
            saved[name] = here
    state.clear()
    state.update(saved)


def write(path: Path, content) -> None:
    """Text, or what torch saves, by renaming a file that is whole and on the disk: a kill leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(half, "wb") as file:
            if isinstance(content, str):
                file.write(content.encode(errors="surrogateescape"))
            else:
                torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)
    except (OSError, RuntimeError) as error:  # torch's word for a write that failed is the second
        reason = getattr(error, "strerror", f"cannot be written, is the disk full? ({first_line(error)})")
        raise OSError(getattr(error, "errno", errno.ENOSPC), reason, str(path)) from None
    finally:
        half.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------------- processes


class RankError(Exception):
    """Another process of torchrun, or one of --jobs, is gone."""


def place() -> tuple[int, int, int]:
    """(rank, ranks, ranks on this machine) under torchrun, else (0, 1, 1); known before the ranks have met."""
    told = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    if not all(word.isdecimal() for word in told) or told[1] == "1":  # a cluster may set some of them for its own ends
        return 0, 1, 1
    return int(told[0]), int(told[1]), int(told[2])


def typed(script: str, argv: list[str]) -> str:
    """The command as a shell takes it, torchrun and its ranks included."""
    _, ranks, here = place()
    nodes = f"--nnodes {ranks // here}" if ranks > here else "--standalone"
    return f"torchrun {nodes} --nproc-per-node {here} " * (ranks > 1) + "python " * (ranks < 2) + shlex.join([script, *argv])


@contextlib.contextmanager
def ranks():
    """Joins the processes of `torchrun --nproc-per-node N script.py ...`, if this is one of them."""
    if place()[1] < 2:
        yield
        return
    live_with(os.getppid())
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # killed while this rank was importing, torchrun has no store
        try:
            socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=5).close()
        except OSError as error:
            raise RankError(f"rank {place()[0]}: torchrun is gone ({first_line(error)})") from None
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or re.search("gloo|nccl|connection", str(error), re.IGNORECASE)):
            raise
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, which follows, must not come before the line that says why
        raise RankError(f"rank {place()[0]}: another rank is gone ({first_line(error)})") from None
    finally:
        dist.destroy_process_group()


def on_first_rank(work: Callable):
    """work() done by rank 0 alone; its result, or its UsageError or OSError, is that of every rank."""
    outcome = [None, None]
    if place()[0] == 0:
        try:
            outcome[0] = work()
        except (UsageError, OSError) as error:
            outcome[1] = error
    if dist.is_initialized():
        dist.broadcast_object_list(outcome)
    if outcome[1]:
        raise outcome[1]
    return outcome[0]


def live_with(parent: int, folder: str = "") -> None:
    """Ends this process when its parent ends, however that ends. One of --jobs works in `folder`, deaf to Ctrl-C."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    if folder:
        os.chdir(folder)
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def train(run: Run) -> None:
    """Trains one run in this process as far as its checkpoint does not already hold it."""
    torch.set_num_threads(run.config.threads)
    if run.config.resume and run.path.exists() and len(rows := run.load()["rows"]) >= run.config.rounds:
        run.rows = rows
        return
    try:
        run.study.federate(run.choose(), run.data(), run)
    except NonFiniteError as error:
        raise NonFiniteError(f"{run}: {error}") from None
    run.save()  # where it ended before the last round
    if dist.is_initialized():
        dist.barrier()  # other ranks may read it from now on


def train_stack(runs: list[Run]) -> list[tuple[Path, list[dict]]]:
    """Each run's path and rows. Several go on in turn, each until it calls the trainer: these calls are trained together."""
    if len(runs) == 1:
        train(runs[0])
    else:
        torch.set_num_threads(runs[0].config.threads)
        with contextlib.ExitStack() as stack:
            waiting = {stack.enter_context(contextlib.closing(trainer_calls(run))): None for run in runs}
            while waiting:
                calls = {trial: call for trial, update in waiting.items() if (call := trial.send(update))}
                waiting = dict(zip(calls, common.train_together([*calls.values()]), strict=True))
    return [(run.path, run.rows) for run in runs]


def trainer_calls(run: Run):
    """Yields what the run calls the trainer with, None at its end; is sent the updates. Closed, it ends the run.

    The run has a thread of its own, which goes on only while the generator does: so all is done in one and the same order.
    """
    calls, updates = queue.SimpleQueue(), queue.SimpleQueue()

    def trainer(*args, **options):
        calls.put((*args, options))
        if (update := updates.get()) is None:
            sys.exit()  # this thread
        return update

    with concurrent.futures.ThreadPoolExecutor(1, initializer=common.TRAINER.set, initargs=(trainer,)) as pool:
        ended = pool.submit(train, run)
        ended.add_done_callback(lambda _: calls.put(None))
        try:
            while call := calls.get():
                updates.put((yield call))
            yield ended.result()  # None, or what it raised
        finally:
            updates.put(None)


def train_all(runs: list[Run]) -> None:
    """Trains every run, in --jobs processes, those that read another one's result after the rest."""
    after, by_path = runs[0].study.after, {run.path: run for run in runs}
    for late in (False, True):
        stacks = {}
        for run in runs:
            if bool(after(run.config)) == late:
                stacks.setdefault((run.setting, run.method, run.config.stack_trials or run.path), []).append(run)
        jobs = min(runs[0].config.jobs, len(stacks))  # joblib starts as many as it is told, half a gigabyte each
        if jobs < 2:
            for stack in stacks.values():
                train_stack(stack)
            continue
        os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")  # of workers that were killed
        pool = Parallel(jobs, return_as="generator_unordered", initializer=live_with, initargs=(os.getpid(), os.getcwd()))
        how = {"total": len(runs), "initial": sum(bool(run.rows) for run in runs), "unit": "run", "leave": False}
        with contextlib.closing(pool(map(delayed(train_stack), stacks.values()))) as ended:
            try:
                for path, rows in (bar := tqdm(itertools.chain.from_iterable(ended), **how)):
                    by_path[path].rows = rows
                    bar.set_postfix_str(f"{by_path[path]} {by_path[path].accuracy()}")
            except concurrent.futures.BrokenExecutor as error:
                raise RankError(f"a process of --jobs is gone ({first_line(error)})") from None


class Forgiving(io.TextIOBase):
    """Standard output or errors that may have no reader (| head, 2>&-) or no word for a letter (ASCII)."""

    full = False  # of a disk: then what was printed is lost

    def __init__(self, stream):
        self.stream = stream or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")  # in the place of what is closed
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

    def write(self, text):
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError) as error:
            self.full |= getattr(error, "errno", 0) in FULL
            with contextlib.suppress(OSError, ValueError):  # what is left in it goes nowhere when Python ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        return len(text)


# ------------------------------------------------------------------------------------------------ the folder of a run


@contextlib.contextmanager
def locked(folder: Path):
    """Keeps a second run out of the folder. The kernel lets go of the lock with the process; none that it starts has it."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        import fcntl  # not on Windows, which opens no folder either

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UsageError(f"--out {folder}: another run is at work there") from None
    finally:
        os.close(handle)


def claim(folder: Path, configs: list, automatic: int, method: tuple) -> int:
    """The folder becomes this command's: a new run removes the old one's files first. Returns the threads of each process.

    A resumed run goes on with the old number of threads, since with another one sums have other last bits. Its sweeps may be
    wider or narrower, and its methods others; a flag that has none of its old values is another run's.
    """
    config, path = configs[0], folder / "config.json"
    values = {name: list(dict.fromkeys(getattr(c, name) for c in configs)) for name in config.__dataclass_fields__}
    flags = {name: v if len(v) > 1 else v[0] for name, v in values.items()} | {"threads": config.threads or automatic}
    if config.resume and path.exists():
        try:
            saved = json.loads(path.read_text())
            before = range(1, 1025).index(saved["threads"]) + 1
        except (OSError, ValueError, TypeError, LookupError, RecursionError):
            raise UsageError(f"{path}: damaged; cannot resume from it") from None
        flags["threads"] = config.threads or before
        for name, value in json.loads(json.dumps(flags)).items():
            old, new = ([*map(shown, v if isinstance(v, list) else [v])] for v in (saved.get(name, value), value))
            if (name == "threads" or name not in (*SINGLE, *method)) and not {*old} & {*new}:
                raise UsageError(f"{path}: of another run, left as it is ({name} {' '.join(old)}, not {' '.join(new)})")
        if before not in (config.threads, automatic):
            say(f"--resume: --threads stays {before}; another number would change the last bits")
    for file in leftovers(folder, resume=False):
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder", str(file))
    write(folder / "checkpoints" / "writable", "")  # before anything of the old run goes
    (folder / "checkpoints" / "writable").unlink()
    for file in leftovers(folder, config.resume):
        file.unlink(missing_ok=True)
    write(path, as_json(flags))
    return flags["threads"]


def leftovers(folder: Path, resume: bool) -> list[Path]:
    """What this project wrote into the folder; with `resume` only what was half written."""
    half = ("checkpoints/*.tmp", "*.json.*.tmp", "*.csv.*.tmp")
    whole = ("config.json", "summary.json", "metrics.csv", "accuracy.png", "own_accuracy.png", "megabytes.png", "report.png")
    whole += ("partition.csv", "partition.png", "checkpoints/*-trial*.pt", "tensorboard/*-trial*/events*")
    found = [path for pattern in half + whole * (not resume) for path in folder.glob(pattern)]
    return found + [folder / name for name in figures(folder) if not resume]


def figures(folder: Path) -> list[str]:
    """The tables and pictures that are there of those which the last run left, by its summary.json."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        files = json.loads((folder / "summary.json").read_text())["files"]
        return [path.name for path in folder.iterdir() if path.name in files and path.suffix in (".png", ".csv")]
    return []


def say(line: str) -> None:
    """Prints beside a progress bar, once among the ranks."""
    if place()[0] == 0:
        tqdm.write(line, file=sys.stderr)


# -------------------------------------------------------------------------------------------------------------- main


def main(config_class, presets, doc, federate, method, argv=None, **hooks):
    """The command line of a script: flags -> every (setting, method, trial) -> table, metrics.csv, summary.json, figures.

    federate(config, data, run)    trains run.method and records its rounds
    method                         the flags whose sweep is the comparison; `hooks`, each of which may be absent, are
    name(config)                   how a method is called, if not by its flags
    report(df, runs, folder)       prints and draws what is the script's own, from metrics.csv as a data frame
    after(config)                  whether an arm reads another one's result and so starts after the rest
    unread(config)                 swept flags that an arm does not read: it is trained once, its rows shown in every setting
    instead(config, runs, folder)  does something else and returns True, or nothing and returns False
    """
    argv, script, module = list(sys.argv[1:] if argv is None else argv), sys.argv[0], config_class.__module__
    if module == "__main__":  # a script imports itself by its name, so that the processes of --jobs find its functions
        return importlib.import_module(Path(script).stem).main(argv)
    if Path(script).stem != module:  # called by a test or a notebook
        script = sys.modules[module].__file__
    study, runs, wanted = Study(federate, tuple(method), module, **hooks), [], {}
    os.environ["MPLBACKEND"] = "agg"
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.getsignal(number))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        output = stack.enter_context(contextlib.redirect_stdout(Forgiving(sys.stdout)))
        stack.enter_context(contextlib.redirect_stderr(Forgiving(sys.stderr)))
        try:
            configs, study.swept = parse(config_class, presets, doc, argv)
            with ranks():
                folder = conduct(study, configs, runs, wanted, stack, typed(script, argv))
            if place()[0] == 0:
                print(f"results: {folder}")
        except (UsageError, NonFiniteError, RankError, OSError, KeyboardInterrupt, SystemExit) as error:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # while what was reached is put down
            again = typed(script, [*argv, *["--resume"] * (argv[-1:] != ["--resume"])])
            status, line = ended(error, runs, wanted, again)
            if line and (place()[0] == 0 or status == 4):
                print(f"{Path(script).name}: {line}", file=sys.stderr)
            if status == 2 and place()[0] > 0:  # torchrun ends all ranks with the first: let that be rank 0, which says why
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                time.sleep(30)
            if status or not output.full:
                sys.exit(status)
        if output.full:
            print(f"{Path(script).name}: error: standard output is full; what goes to files is written", file=sys.stderr)
            sys.exit(5)


def conduct(study: Study, configs: list, runs: list[Run], wanted: dict, stack: contextlib.ExitStack, command: str) -> Path:
    """Trains every run, reports, returns the folder. Flags, data, net, partition are checked before anything there changes."""
    first, begun = configs[0], time.perf_counter()
    folder = Path(first.out or f"runs/{study.script}")
    automatic = max(1, cpu_count() // (first.jobs * place()[2]))  # of the cores that this process may use
    torch.set_num_threads(first.threads or automatic)
    planned = study.plan(configs, range(first.trials), folder, wanted)
    if first.until_halfwidth and max(map(len, wanted.values())) == 1:
        raise UsageError("--until-halfwidth: a single method has no difference to measure; name two")
    if first.tune and all(candidates(config)[0] in study.idle(config) for config in configs):
        raise UsageError(f"--tune {first.tune}: no method here reads it")
    samples = check(study, planned)
    on_first_rank(lambda: stack.enter_context(locked(folder)))
    if first.show_partition and place()[0] == 0:
        draw_partition(samples, folder)
    if first.show_partition or study.instead(first, planned, folder):
        return folder
    threads = on_first_rank(lambda: claim(folder, configs, automatic, study.method))
    for config in configs:
        config.threads = threads
    there = sum(run.path.exists() for run in planned)
    if first.resume and there < len(planned):
        say(f"--resume: {there} of {len(planned)} runs have begun in {folder}; the rest start now")
    runs += planned
    with cProfile.Profile() if first.profile else contextlib.nullcontext() as profile:
        train_all(runs)
        while first.until_halfwidth and on_first_rank(functools.partial(too_wide, rows_of(wanted), first)):
            runs += (planned := study.plan(configs, [max(run.trial for run in runs) + 1], folder, wanted))
            train_all(planned)
    if place()[0] == 0:
        df = metrics(rows_of(wanted), folder)
        conclude(df, runs, command, time.perf_counter() - begun, samples)
        if first.profile:
            pstats.Stats(profile, stream=sys.stdout).sort_stats("cumulative").print_stats(rf"common\.py|{study.script}", 25)
    return folder


def check(study: Study, runs: list[Run]) -> pd.DataFrame:
    """How the first trial's samples are dealt: a row for every way to deal, client and class.

    Raises UsageError where data, net, clients and base do not fit together.
    """
    distinct, tables, notes = {}, {}, {}
    for run in runs:
        named = (*Config.__dataclass_fields__, *DEALING, "projection", *study.method)
        drawn = run.config.hold_out or run.config.tune or run.config.partition == "natural"  # may not do in a later trial
        distinct.setdefault(repr([drawn and run.trial, *(getattr(run.config, name, 0) for name in named)]), run)
    for run in distinct.values():
        fl, config = run.config.federation(run.data(), run.streams), run.config
        for each in candidates(config)[1]:
            each.federation(run.data(), run.streams)
        labels, way = fl.data.y_train.cpu().numpy(), repr([getattr(config, name, 0) for name in ("dataset", "seed", *DEALING)])
        if fl.moved:
            notes[way] = f"partition: {fl.moved} of {len(labels)} samples moved: no client has less than {config.min_size}"
        dealt = pd.DataFrame({"class": labels[np.concatenate(fl.shards)], "client": np.repeat(fl.everyone, fl.sizes)})
        table = dealt.groupby(["class", "client"]).size().reset_index(name="samples")
        tables.setdefault(way, table.assign(setting=study.setting(config, {*study.swept} - {"dataset", "seed", *DEALING})))
    for note in notes.values():
        say(note)
    return pd.concat(tables.values())


def draw_partition(samples: pd.DataFrame, folder: Path) -> None:
    """partition.csv, and partition.png of at most 500 clients by class, where the area of a dot is the number of samples."""
    write(folder / "partition.csv", samples.to_csv(index=False, columns=["setting", "client", "class", "samples"]))
    dots = {"x": "class", "y": "client", "size": "samples", "sizes": (2, 150), "height": 5}
    draw(samples[samples.client < 500], folder / "partition.png", **dots)


def ended(error: BaseException, runs: list[Run], wanted: dict, again: str) -> tuple[int, str]:
    """(exit status, line) of what ended a command. metrics.csv then holds the rounds that are kept."""
    said = f"{error.filename or 'a file'}: {error.strerror}" if isinstance(error, OSError) else str(error)
    unwritable = isinstance(error, OSError) and not runs and error.errno not in FULL  # before anything is trained
    if isinstance(error, UsageError) or unwritable:
        return 2, f"error: {'--out ' * unwritable}{said}"
    rows = []
    with contextlib.suppress(UsageError, OSError):
        for run in runs:
            run.rows = run.load()["rows"] if run.path.exists() else []
        rows = rows_of(wanted)
        if rows and place()[0] == 0:
            metrics(rows, runs[0].folder)
    kept = f"{len(rows)} rounds are kept in {runs[0].folder}" if runs else "nothing was trained"
    if isinstance(error, NonFiniteError):
        return 3, f"error: {said}; {kept}"
    if isinstance(error, RankError):
        return 4, f"error: {said}; {kept}. To go on: {again}"
    if isinstance(error, OSError):
        return 5, f"error: {said}; {kept}. To go on, once it can be written: {again}"
    return getattr(error, "code", 130), f"stopped: {kept}. To go on:\n  {again}" if runs else ""  # of sys.exit, or Ctrl-C


# ------------------------------------------------------------------------------------------------- tables and figures


def rows_of(wanted: dict[str, dict[str, dict[int, Run]]]) -> list[dict]:
    """The rows of metrics.csv, by setting, then method, then trial; those of a run stand wherever it is wanted."""
    runs = ((setting, run) for setting, methods in wanted.items() for trials in methods.values() for run in trials.values())
    return [row | {"setting": setting} for setting, run in runs for row in run.rows]


def metrics(rows: list[dict], folder: Path) -> pd.DataFrame:
    """Writes metrics.csv; the same as a data frame."""
    first = ["setting", "method", "trial", "round", "clients", "dropped", "uploads", "seconds", "samples", "received_mb"]
    df = pd.DataFrame(rows, dtype=object)
    df = df.filter([*dict.fromkeys([*first, "sent_mb", "accuracy", "loss", *df])])
    write(folder / "metrics.csv", df.to_csv(index=False, lineterminator="\n"))
    return df.infer_objects()


def per_trial(df: pd.DataFrame) -> pd.DataFrame:
    """Final, mean-of-last-ten-rounds and best accuracy, uploads and seconds by (setting, method, trial)."""
    keys = ["setting", "method", "trial"]
    late = df[df["round"] > df.groupby(keys)["round"].transform("max") - 10]
    runs = df.groupby(keys, sort=False)
    columns = {"final": runs.accuracy.last(), "last10": late.groupby(keys, sort=False).accuracy.mean()}
    columns |= {"best": runs.accuracy.max(), "uploads": runs.uploads.last(), "seconds": runs.seconds.last()}
    return pd.DataFrame(columns | ({"tuned": runs.tuned.last()} if "tuned" in df else {}))


def spread(x: pd.Series) -> str:
    """Mean +- standard deviation over trials, 0 of a single one."""
    return f"{x.mean():.2f} +- {x.std(ddof=int(len(x) > 1)):.2f}"


def interval(d) -> tuple[float, float, float, float]:
    """Mean of d over trials, its two-sided 95 % Student interval, and p of a mean of 0 (the last three nan for one trial)."""
    d = pd.Series(d).dropna()
    student = scipy.stats.t(len(d) - 1)  # scipy imports its stats here, which takes a second
    half = student.ppf(0.975) * d.sem()
    p = float(d.mean() == 0) if half == 0 else 2 * student.sf(abs(d.mean()) / d.sem())
    return float(d.mean()), float(d.mean() - half), float(d.mean() + half), float(p)


def print_gains(each: pd.DataFrame, control: str) -> None:
    """Prints A_o, every method's final accuracy minus the control's by trial: mean and 95 % Student interval."""
    finals = each.final.unstack("method", sort=False)
    if control in finals and len(finals.columns) > 1:
        gains = finals.drop(columns=control).sub(finals[control], axis=0).groupby("setting", sort=False)
        said = gains.agg(lambda A: "{:+.2f} [{:+.2f}, {:+.2f}]".format(*interval(A)).removesuffix(" [+nan, +nan]"))
        print(f"\nA_o = final accuracy of o - final accuracy of {control} (paired, 95 %)\n{said.T.to_string()}")


def differences(each: pd.DataFrame) -> pd.DataFrame:
    """Every setting's pairs of methods, a before b, by trial: mean and standard deviation of a - b, its 95 % Student interval,
    p of no difference; for pairs with a setting's first method p after Holm's correction over all of these, too.
    """
    found = []
    for setting, own in each.groupby("setting", sort=False):
        methods = {method: part.droplevel(["setting", "method"]) for method, part in own.groupby("method", sort=False)}
        for (a, one), (b, other) in itertools.combinations(methods.items(), 2):
            for measure in ("final", "last10"):
                d = (one[measure] - other[measure]).dropna()
                found.append((setting, a, b, measure, *interval(d), d.std(), len(d), a == next(iter(methods))))
    columns = ["setting", "a", "b", "measure", "mean", "low", "high", "p", "sd", "trials", "first"]
    table = pd.DataFrame(found, columns=columns).astype({"first": bool}).assign(holm=math.nan)
    for _, family in table[table["first"]].groupby("measure"):
        p = family.p.sort_values()
        table.loc[p.index, "holm"] = (p * np.arange(len(p), 0, -1)).cummax().clip(upper=1)
    return table


def too_wide(rows: list[dict], config: Config) -> bool:
    """Whether --until-halfwidth asks for another trial. It looks at the interval's width alone, so it favours no method.

    Stopped where it is narrow, a 95 % interval covers less: of normal differences 90 % from 3 trials on, 94 % from 10.
    """
    table, n, goal = differences(per_trial(pd.DataFrame(rows))), len({row["trial"] for row in rows}), config.until_halfwidth
    first = table[table["first"] & (table.measure == "last10")].drop_duplicates("setting")
    half, sd = (first["high"] - first["mean"]).max(), first["sd"].max()
    k = np.arange(2, 10_000)
    enough = [*k[scipy.stats.t.ppf(0.975, k - 1) * sd / np.sqrt(k) <= goal], "10,000 or more"]
    if n > 1:
        say(f"{n} trials: the first difference is known to +- {half:.2f}; to +- {goal} it takes about {enough[0]}")
    return len(first) > 0 and not half <= goal and n < config.most_trials


def show_table(each: pd.DataFrame, title: str) -> pd.DataFrame:
    """Prints every setting's mean +- standard deviation over trials, and the first method's differences from the others."""
    table = differences(each)
    for setting, own in each.groupby("setting", sort=False):
        methods = own.groupby("method", sort=False)
        cells = {n: methods[n].agg(spread) for n in ("final", "last10")}
        cells |= {"uploads": methods.uploads.mean().round().astype(int), "seconds": methods.seconds.mean().round(1)}
        if "tuned" in own:
            cells["tuned"] = methods.tuned.agg(lambda x: " ".join(f"{v:g}" for v in sorted({*x.dropna()})))
        print(f"\n{setting}{': ' * bool(setting)}{title}, accuracy in %")
        print(pd.DataFrame(cells).rename_axis(None).to_string())  # all columns, however narrow the terminal is
        for b, pair in table[(table.setting == setting) & table["first"]].groupby("b", sort=False):
            rows = pair[["measure", "mean", "low", "high", "holm"]].itertuples(index=False)
            said = ", ".join(f"{n} {mean:+.2f} [{low:+.2f}, {high:+.2f}] p {p:.2g}" for n, mean, low, high, p in rows)
            print(f"{pair.a.iloc[0]} - {b}: {said}".replace(" [+nan, +nan] p nan", ""))
    if len(table):
        print("(paired over trials, 95 % Student intervals, p after Holm's correction over the table)")
    return table


def conclude(df: pd.DataFrame, runs: list[Run], command: str, seconds: float, samples: pd.DataFrame) -> None:
    """Prints the tables, writes summary.json, draws accuracy.png, partition.png and what is the script's own."""
    config, folder, report, each = runs[0].config, runs[0].folder, runs[0].study.report, per_trial(df)
    summary = {"command": command, "seconds": round(seconds, 1), "threads": config.threads, "ranks": place()[1]}
    summary["device"] = torch.cuda.get_device_name() if runs[0].device == "cuda" else f"{platform.machine()} CPU"
    summary["versions"] = {"python": platform.python_version(), "torch": str(torch.__version__), "pandas": pd.__version__}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        summary["commit"] = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
    summary |= {"config": json.loads((folder / "config.json").read_text()), "paired": {}, "results": {}, "files": []}
    about = {"dataset": config.dataset, "trials": f"{df.trial.nunique()} trials", "rounds": f"{config.rounds} rounds"}
    title = ", ".join(said for name, said in about.items() if name not in runs[0].study.swept)  # a setting names what is swept
    for d in show_table(each, title).to_dict("records"):
        pair = summary["paired"].setdefault(d["setting"], {}).setdefault(f"{d['a']} - {d['b']}", {})
        pair[d["measure"]] = {name: d[name] for name in ("mean", "low", "high", "trials", "p", "holm")}
    for (setting, method), own in each.groupby(["setting", "method"], sort=False):
        summary["results"].setdefault(setting, {})[method] = own.to_dict("list")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    summary["files"] = figures(folder)  # of narrower or wider sweeps before --resume
    write(folder / "summary.json", as_json(summary))
    curves(df, folder / "accuracy.png", "accuracy")
    if "sent_mb" in df:
        curves(df.assign(megabytes=df.received_mb + df.sent_mb), folder / "megabytes.png", "accuracy", x="megabytes")
    if "own_mean" in df:  # who loses
        curves(df, folder / "own_accuracy.png", "own_mean", "own_worst_tenth")
    draw_partition(samples, folder)
    if report:
        report(df, runs, folder)
    new = [path for path in folder.iterdir() if path.is_file() and before.get(path.name) != path.stat().st_mtime_ns]
    write(folder / "summary.json", as_json(summary | {"files": sorted({*summary["files"], *(path.name for path in new)})}))


def as_json(value) -> str:
    """JSON has no word for nan, which becomes null, nor for infinity, which becomes a number that reads as it."""
    text = re.sub(r"\bNaN(?=,?\n)", "null", json.dumps(value, indent=1))
    return re.sub(r"\bInfinity(?=,?\n)", "1e999", text)


def curves(df: pd.DataFrame, path: Path, *names: str, x: str = "round") -> None:
    """One panel per setting, a row of them for each of several columns, one curve per method: mean over trials +- one standard
    deviation; over another x all trials."""
    how = {"errorbar": "sd"} if x == "round" else {"units": "trial", "estimator": None, "alpha": 0.6}
    how |= {"row": "column", "height": 2.4, "aspect": 1.5, "facet_kws": {"sharey": "row"}} if names[1:] else {"height": 3.6}
    y = "value" if names[1:] else names[0]
    shown = df.melt(["setting", "method", "trial", x], names, "column").dropna().rename(columns={"value": y})
    draw(shown, path, x=x, y=y, hue="method", kind="line", **how)


def draw(df: pd.DataFrame, path: Path, **how) -> None:
    """A figure of seaborn's relplot, or of catplot for bars, as a file: a panel per setting, beside one another."""
    import seaborn as sns
    from matplotlib import pyplot

    plot = sns.catplot if how.get("kind") == "bar" else sns.relplot
    wrap, title = ({}, "{row_name} {col_name}") if "row" in how else ({"col_wrap": min(3, df.setting.nunique())}, "{col_name}")
    grid = plot(df, col="setting", **wrap, **how)
    grid.set_titles(title).savefig(path, dpi=150)
    pyplot.close(grid.figure)


def report_folders(argv: list[str] | None = None) -> None:
    """python experiment.py report DIR [DIR ...]: tables, differences and curves over finished runs, without training.

    What occurs in several folders is told apart by the folder; report.png goes into the first.
    """
    parser = Parser("experiment.py", description=report_folders.__doc__.splitlines()[0])
    parser.add_argument("report", choices=("report",))
    parser.add_argument("folders", metavar="DIR", nargs="+", type=Path)
    tables = dict.fromkeys(parser.parse_args(argv).folders)
    how = {"dtype": {"setting": str, "method": str}, "keep_default_na": False, "na_values": ""}  # a method may be called None
    try:
        for folder in tables:
            tables[folder] = pd.read_csv(folder / "metrics.csv", **how).fillna({"setting": ""})
            per_trial(tables[folder])
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        parser.error(f"{folder}: no metrics.csv of a run ({first_line(error)})")
    df, path = pd.concat(tables, names=["folder"]).reset_index("folder"), next(iter(tables)) / "report.png"
    if df.duplicated(["setting", "method", "trial", "round"]).any():
        df["method"] += " (" + df.folder.astype(str) + ")"
    show_table(per_trial(df), f"{df.trial.nunique()} trials, {df['round'].max()} rounds")
    try:
        curves(df, path, "accuracy")
    except OSError as error:
        parser.error(f"{path}: {first_line(error)}")
    print(f"curves: {path}")


if __name__ == "__main__":
    os.environ["MPLBACKEND"] = "agg"
    with contextlib.redirect_stdout(Forgiving(sys.stdout)) as output:
        report_folders()
    sys.exit(5 * output.full)
