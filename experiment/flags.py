"""The options of every script, and a command line as the configs of its sweep."""

import argparse
import dataclasses
import functools
import itertools
import math
import operator
import shlex

import torch

import common
from bases import BASES
from data import DATASETS, PARTITIONS, Data, UsageError
from nets import NETS

# ------------------------------------------------------------------------------------------ flags


def flag(default, help: str, *, low=None, high=None, above=None, choices=(), role="", when=None):
    """A dataclass field that is also a flag, of its default's type; a tuple is a default sweep.

    low, high  limits, both allowed; above: one that is not. Only high=math.inf admits infinity
    role       "central": training on all data reads it, too; "dealing": decides who holds which
               samples; "length": how far a run goes; "free": changes no result
    when       config -> bool: whether an arm reads it; arms that do not are trained once
    """
    kind = type(default[0] if isinstance(default, tuple) else default)
    about = {"help": help, "kind": kind, "choices": tuple(choices), "role": role, "when": when}
    limits = {"low": low, "high": high, "above": above}
    return dataclasses.field(default=default, metadata=about | limits)


central = functools.partial(flag, role="central")
dealing = functools.partial(flag, role="dealing")
length = functools.partial(flag, role="length")
free = functools.partial(flag, role="free")


def reads_alpha(config) -> bool:
    """Whether samples are dealt by Dirichlet."""
    return config.partition.startswith("dirichlet")


@dataclasses.dataclass
class Config:
    """The flags of every script. A script's own Config adds flags and changes defaults."""

    # data
    dataset: str = central("digits", f"{', '.join(DATASETS)}, an .npz file or a folder")
    data_dir: str = free("data", "where torchvision's data sets are, or go")
    partition: str = dealing("dirichlet", "samples over clients", choices=PARTITIONS)
    alpha: float = dealing(
        0.1, "of Dirichlet: small is heterogeneous", low=1e-3, high=1e6, when=reads_alpha
    )
    classes_per_client: int = dealing(2, "of label-skew and dirichlet-ext", low=1, high=1000)
    min_size: int = dealing(1, "fewest samples of a client", low=1, high=10**6)
    parts: int = dealing(0, "deal into so many, keep --clients of them (0: no)", low=0, high=10**7)
    hold_out: float = dealing(0.0, "test on this share of the clients' samples", low=0, high=0.99)
    # net
    model: str = central("lenet5", f"{', '.join(NETS)}, or FILE.py:CLASS")
    width: int = central(0, "of the hidden layers of alexnet and lstm", low=0, high=65536)
    norm: str = central("batch", "as the net has it, or group norm", choices=("batch", "group"))
    dtype: str = central("float32", "of weights", choices=("float32", "float64"))
    # federation
    clients: int = dealing(100, "M, all clients", low=1, high=10**7)
    clients_per_round: int = flag(10, "clients selected in a round", low=1, high=10**6)
    rounds: int = length(100, "communication rounds", low=1, high=10**6)
    base: str = flag("fedavg", "client correction and server rule", choices=BASES)
    mu: float = flag(-1.0, "of fedprox and moon (below 0: the base's default)", low=-1)
    server_lr: float = flag(0.0, "of scaffold and fedadagrad, -adam, -yogi (0: the default)", low=0)
    # local training
    epochs: int = flag(10, "E, local epochs", low=1, high=10**5)
    batch_size: int = central(10, "B, local batch", low=1, high=65536)
    lr: float = central(0.01, "eta, the clients' learning rate", above=0)
    momentum: float = central(0.0, "of the clients' SGD, fresh every round", low=0, high=1 - 1e-9)
    weight_decay: float = central(0.0, "of the clients' SGD", low=0)
    # run
    seed: int = central(202207, "of every random stream", low=0, high=2**31 - 1)
    trials: int = free(3, "repetitions, each with its own partition", low=1, high=10**4)
    eval_every: int = flag(1, "rounds between tests; the last is always tested", low=1, high=10**6)
    device_spread: float = flag(0.0, "std of the log of slowness and of bandwidth", low=0, high=9)
    per_client: bool = flag(False, "test on the clients' own mixes of labels, too")
    device: str = central("auto", "auto: a GPU, if any", choices=("auto", "cpu", "cuda"))
    threads: int = central(1, "torch threads of a process; they change last bits", low=1, high=1024)
    chunk: int = central(0, "clients trained as one net (0: chosen for the net)", low=0, high=10**6)
    jobs: int = free(0, "processes (0: one for each run and core)", low=0, high=1024)
    out: str = free("", "folder of the results (nothing: runs/<script>/001, 002, ..)")
    resume: bool = free(False, "go on with the run in --out, or with the last one")

    def check(self) -> None:
        """Raises UsageError where flags contradict one another."""
        if self.clients_per_round > self.clients:
            raise UsageError(f"--clients-per-round: more than --clients {self.clients}")
        if 0 < self.parts < self.clients:
            raise UsageError(f"--parts {self.parts}: fewer than --clients {self.clients}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda: torch finds no GPU here")

    def reads_rounds(self) -> bool:
        """Whether a round depends on how many there are; if none does, --resume may add some."""
        return True

    def federation(self, data: Data, streams: common.Streams) -> common.Federation:
        """Who holds which samples, the net and the base."""
        return common.Federation(self, data, streams)

    def flags(self, *roles: str) -> dict:
        """The flags of these roles that this arm reads, with their values."""
        values = {}
        for name in self.__dataclass_fields__:
            about = about_flag(type(self), name)
            is_read = about["when"] is None or about["when"](self)
            if about["role"] in roles and is_read and name not in BASES[self.base].unread:
                values[name] = getattr(self, name)
        return values

    def results_depend_on(self) -> dict:
        """The flags that this arm reads, but those that change no result."""
        roles = ["", "dealing", "central"]
        if self.reads_rounds():
            roles.append("length")
        return self.flags(*roles)


def about_flag(config_class, name: str) -> dict:
    """What `flag` noted; a script that changes a default inherits the rest."""
    field = config_class.__dataclass_fields__[name]
    return field.metadata or about_flag(config_class.__base__, name)


class Parser(argparse.ArgumentParser):
    """One line for a mistake, as for all of a caller's mistakes."""

    def error(self, message: str):
        raise UsageError(message)


def parse(config_class, presets: dict, doc: str, argv: list[str]) -> tuple[list, list[str]]:
    """A config for each point of the sweep, and the swept flags. Flags beside a preset win."""
    example = doc.strip().splitlines()[0]  # python SCRIPT --FLAG ..
    parser = Parser(
        usage="%(prog)s [--preset NAME] [--FLAG VALUE ..]   (several values are a sweep)",
        description=example,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    for field in dataclasses.fields(config_class):
        add_flag(parser, field, about_flag(config_class, field.name))
    parser.add_argument("--preset", choices=presets, help="one of --list-presets")
    parser.add_argument("--list-presets", action="store_true", help="print them and exit")
    refuse_old_words(config_class, argv)
    given = parser.parse_args(argv)
    if given.list_presets:
        for name, line in presets.items():
            print(f"# {name}\n{example.partition(' --')[0]} {line}")
        parser.exit()
    if given.preset:
        preset = shlex.split(presets[given.preset], comments=True)
        given = parser.parse_args(preset + argv)

    grid = {}
    for field in dataclasses.fields(config_class):
        value = getattr(given, field.name)
        values = value if isinstance(value, (list, tuple)) else [value]
        grid[field.name] = list(dict.fromkeys(values))
    configs = []
    for point in itertools.product(*grid.values()):
        config = config_class(**dict(zip(grid, point, strict=True)))
        config.check()
        configs.append(config)
    return configs, [name for name, values in grid.items() if len(values) > 1]


def refuse_old_words(config_class, argv: list[str]) -> None:
    """UsageError for an option that has another name now."""
    for word in argv:
        if word.partition("=")[0] == "--arm" and "method" in config_class.__dataclass_fields__:
            raise UsageError("--arm: this option is called --method now")


def add_flag(parser, field: dataclasses.Field, about: dict) -> None:
    """One field of a Config as a flag, which takes several values if it may be swept."""
    option = "--" + field.name.replace("_", "-")
    is_swept = about["role"] not in ("free", "length")
    options = {"default": field.default, "help": about["help"].replace("%", "%%")}
    if about["kind"] is bool:  # --switch, --no-switch
        parser.add_argument(option, action=argparse.BooleanOptionalAction, **options)
        return
    if about["choices"]:
        options["help"] += f": {', '.join(about['choices'])}"
    options |= {"nargs": "+" if is_swept else None, "choices": about["choices"] or None}
    options["metavar"] = about["kind"].__name__
    take = functools.partial(convert, about)
    take.__name__ = about["kind"].__name__  # argparse names it in its messages
    parser.add_argument(option, type=take, **options)


def convert(about: dict, word: str):
    """A word of the command line as a value; the error says what is wanted."""
    kind = about["kind"]
    if kind is str:
        return word
    value = kind(word)
    for name, (wanted, holds) in LIMITS.items():
        limit = about[name]
        if limit is not None and not holds(value, limit):
            raise argparse.ArgumentTypeError(f"{word}: wanted {wanted} {limit}")
    if not math.isfinite(value) and value != about["high"]:
        raise argparse.ArgumentTypeError(f"{word}: wanted a finite number")
    return value


LIMITS = {
    "low": ("at least", operator.ge),
    "above": ("more than", operator.gt),
    "high": ("at most", operator.le),
}
