"""The options of every script, and a command line as the configs of its sweep.

`flag` declares an option: a field of a Config is `config.alpha` in a program and `--alpha` in a
terminal. `parse` reads a command line. It returns a config for each point of the sweep.
"""

import argparse
import dataclasses
import functools
import itertools
import numbers
import os
import shlex
import sys
from collections.abc import Sequence

import common
from bases import BASES
from data import DATASETS, PARTITIONS, Data
from errors import UsageError
from nets import NETS

from .costs import Work, price_tag
from .machine import gpu_fault

LARGEST = 1e18  # of a float: products of two such numbers still fit into float32


def flag(
    default, help: str, *, sweep=(), low=None, high=None, above=None, choices=(), role="", when=None
):
    """Returns a dataclass field that is also an option of the command line.

    default    the field's value in a program. Its type is the option's type.
    help       what --help says
    sweep      the values that the command line takes if the option is not given. Without a sweep
               it takes the default.
    low, high  limits. Both are allowed values. Only high=math.inf admits infinity.
    above      a limit that is not allowed itself
    choices    the allowed values, if there are few
    role       what the option decides in addition to a method's training. "central": training on
               all data uses it, too. "dealing": it decides which client holds which samples.
               "length": it says how far a run goes. "free": it changes no result.
    when       config -> bool: whether this config's method uses the option. A method that does not
               is trained once, however many values are compared.

    `Config.check` raises UsageError for a value of another type, or outside the limits.
    """
    if not isinstance(choices, dict):  # a program may add a base to BASES later
        choices = tuple(choices)
    about = {"help": help, "kind": type(default), "sweep": sweep, "choices": choices}
    about |= {"low": low, "high": high, "above": above, "role": role, "when": when}
    return dataclasses.field(default=default, metadata=about)


central = functools.partial(flag, role="central")
dealing = functools.partial(flag, role="dealing")
length = functools.partial(flag, role="length")
free = functools.partial(flag, role="free")


def reads_alpha(config) -> bool:
    """Whether a Dirichlet distribution divides the samples."""
    return config.partition.startswith("dirichlet")


def limits_classes(config) -> bool:
    """Whether a client gets samples of --classes-per-client classes only."""
    return config.partition in ("label-skew", "dirichlet-ext")


@dataclasses.dataclass
class Config:
    """The options of every script, with one value each.

    A script's Config inherits from this one. It adds options with `flag`. A bare
    `clients: int = 128` changes a default and keeps the help and the limits.
    """

    computed = ()  # names of options that a script's Config sets by itself

    # data
    dataset: str = central("digits", f"one of {', '.join(DATASETS)}, or an .npz file, or a folder")
    data_dir: str = free("data", "folder of torchvision's data sets, downloaded if absent")
    partition: str = dealing("dirichlet", "how clients get their samples", choices=PARTITIONS)
    alpha: float = dealing(
        0.1,
        "parameter of the Dirichlet distribution; a small value makes the clients very different",
        low=1e-3,
        high=1e6,
        when=reads_alpha,
    )
    classes_per_client: int = dealing(
        2, "classes of a client (label-skew, dirichlet-ext)", low=1, high=1000, when=limits_classes
    )
    min_size: int = dealing(1, "least samples of a client; natural: at least 2", low=1, high=10**6)
    parts: int = dealing(
        0, "divide the data into this many parts, keep --clients of them (0: no)", low=0, high=10**7
    )
    hold_out: float = dealing(
        0.0, "fraction of each client's samples that is the test set (0: no)", low=0, high=0.99
    )
    # model
    model: str = central("lenet5", f"one of {', '.join(NETS)}, or FILE.py:CLASS")
    width: int = central(
        0, "width of the hidden layers of alexnet and lstm (0: the paper's)", low=0, high=65536
    )
    norm: str = central(
        "batch", "the model's own normalisation, or group norm", choices=("batch", "group")
    )
    init: str = free("", "begin with the final weights of a run: FOLDER, or FOLDER:METHOD")
    dtype: str = central("float32", "precision of the weights", choices=("float32", "float64"))
    # federation
    clients: int = dealing(100, "number of clients, M", low=1, high=10**7)
    clients_per_round: int = flag(10, "number of clients in a round", low=1, high=10**6)
    rounds: int = length(100, "number of communication rounds", low=1, high=10**6)
    base: str = flag("fedavg", "how clients train and the server averages", choices=BASES)
    mu: float = flag(-1.0, "mu of fedprox and moon (below 0: the base's default)", low=-1)
    server_lr: float = flag(
        0.0, "server's learning rate in scaffold and fedadagrad, -adam, -yogi (0: default)", low=0
    )
    # local training
    epochs: int = flag(10, "local epochs, E", low=1, high=10**5)
    batch_size: int = central(10, "local batch size, B", low=1, high=65536)
    lr: float = central(0.01, "learning rate of the clients, eta", above=0)
    momentum: float = central(
        0.0, "momentum of the clients; it begins at 0 in every round", low=0, high=1 - 1e-9
    )
    weight_decay: float = central(0.0, "weight decay of the clients", low=0)
    # run
    seed: int = central(202207, "seed of all random numbers", low=0, high=2**31 - 1)
    trials: int = free(3, "repetitions, each with its own partition", low=1, high=10**4)
    eval_every: int = flag(
        1, "rounds from one test to the next; the last round is always tested", low=1, high=10**6
    )
    device_spread: float = flag(
        0.0, "how different simulated devices are: std of log slowness and bandwidth", low=0, high=9
    )
    per_client: bool = flag(False, "test on each client's own mix of classes, too")
    device: str = central(
        "auto", "auto: a GPU, if one works and ends sooner", choices=("auto", "cpu", "cuda")
    )
    threads: int = central(
        1, "threads of a process; another number changes last digits", low=1, high=1024
    )
    chunk: int = central(
        0,
        "clients trained at once (0: chosen for the model; one for a user's own). 16 may train a "
        "user's model sooner: most on a GPU; on a CPU a small one, while a big one gets slower",
        low=0,
        high=10**6,
    )
    jobs: int = free(
        0,
        "processes that train runs at the same time (0: one for each run and core)",
        low=0,
        high=1024,
    )
    out: str = free("", "folder of the results (empty: runs/<script>/001, 002, ..)")
    resume: bool = free(False, "continue the run in --out, or the last one")

    def check(self) -> None:
        """Raises UsageError for a value outside its limits, and where options contradict."""
        for name in defaults_of(type(self)):
            if name not in self.computed:
                check_value(type(self), name, getattr(self, name))
        if self.clients_per_round > self.clients:
            raise UsageError(f"--clients-per-round: choose at most --clients {self.clients}")
        if 0 < self.parts < self.clients:
            raise UsageError(f"--parts {self.parts}: choose at least --clients {self.clients}")
        if self.device == "cuda" and gpu_fault():
            raise UsageError(f"--device cuda: {gpu_fault()}")

    def reads_rounds(self) -> bool:
        """Whether a round depends on --rounds. A Config whose rounds do not returns False.

        Then --resume may add rounds.
        """
        return True

    def work(self, n: int) -> Work:
        """Returns about how much a run trains and scores if there are n training samples.

        It is used for estimates of time. A Config whose runs do more replaces it.
        """
        N = n * (1 - self.hold_out) / max(self.parts, self.clients)  # samples of a client
        rounds = self.rounds * self.clients_per_round
        steps = max(1, N / self.batch_size + 0.5)  # a short batch is half full on average
        return Work(rounds * self.epochs * steps, rounds * self.epochs * N)

    def federation(self, data: Data, streams: common.Streams) -> common.Federation:
        """Returns clients, model and base. UsageError where data, model and options do not fit."""
        return common.Federation(self, data, streams)

    def flags(self, *roles: str, also: Sequence[str] = ()) -> dict:
        """{name: value} of the options with these roles that its method uses, or of `also`."""
        values = {}
        unread = getattr(BASES[self.base], "unread", ())
        for name in defaults_of(type(self)):
            about = about_flag(type(self), name)
            is_used = about["when"] is None or about["when"](self)
            is_used &= name not in unread
            if about["role"] in roles and (is_used or name in also):
                values[name] = getattr(self, name)
                if about["kind"] is float:
                    values[name] = float(values[name])  # 1 and 1.0 are one value
        return values

    def results_depend_on(self, also: Sequence[str] = ()) -> dict:
        """{name: value} of the options that decide its method's result, with those of `also`."""
        roles = ["", "dealing", "central"]
        if "rounds" in also or self.reads_rounds():
            roles.append("length")
        return self.flags(*roles, also=also)


def about_flag(config_class, name: str) -> dict:
    """What `flag` noted. A Config that only changes a default inherits all but the sweep."""
    if field := config_class.__dataclass_fields__[name].metadata:
        return field
    for base in config_class.__mro__[1:]:
        if name in getattr(base, "__dataclass_fields__", ()):
            return about_flag(base, name) | {"sweep": ()}
    raise UsageError(f"{config_class.__name__}.{name} is no option; wanted {name}: .. = flag(..)")


def defaults_of(config_class) -> dict:
    """Returns {name: default} of a Config's options."""
    return {field.name: field.default for field in dataclasses.fields(config_class)}


def check_config(config_class) -> None:
    """Raises UsageError if a class sets options that a dataclass does not see, or of no kind."""
    defaults = defaults_of(config_class)
    taken = {"help", "preset", "list_presets", *vars(Config)} - defaults_of(Config).keys()
    taken |= {f"no_{name}" for name in defaults if isinstance(defaults[name], bool)}  # --no-resume
    for field in dataclasses.fields(config_class):
        where = f"{config_class.__name__}.{field.name}"
        if field.name in taken or field.name.startswith("_") or not field.init:
            raise UsageError(f"{where} is no option: choose another name, and leave out init=False")
        kind = about_flag(config_class, field.name)["kind"]
        if kind not in KINDS:
            raise UsageError(f"{where} has a {kind.__name__}; wanted a bool, str, int or float")
    for name in dir(config_class):
        owner = next(owner for owner in config_class.__mro__ if name in vars(owner))
        value = vars(owner)[name]
        default = defaults.get(name, value)
        if isinstance(value, dataclasses.Field) or not (value is default or value == default):
            advice = f"write its type and value in {config_class.__name__}, below @dataclass"
            raise UsageError(f"{owner.__name__}.{name} is no option: {advice}, without slots=True")


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


KINDS = {
    bool: (bool, "True or False"),
    str: (str, "a word"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
}


def check_value(config_class, name: str, value) -> None:
    """Raises UsageError if an option cannot have this value."""
    if fault := fault_of(value, about_flag(config_class, name)):
        raise UsageError(f"{option(name)} {value}: choose {fault}")


def fault_of(value, about: dict) -> str:
    """Returns what to choose instead of this value; nothing if it is allowed."""
    kind = about["kind"]
    wanted, words = KINDS[kind]
    choices = about["choices"]
    if not isinstance(value, wanted) or isinstance(value, bool) != (kind is bool):
        return words + ", not text" * isinstance(value, str)
    if choices and value not in choices:
        return f"one of {', '.join(choices)}"
    if kind in (bool, str):
        return ""
    low = about["low"]
    high = about["high"]
    if about["above"] is not None and not value > about["above"]:
        return f"{words} above {about['above']}"
    if low is None:
        low = -LARGEST
    if high is None:
        high = LARGEST
    if not value >= low:
        return f"{words} of at least {low}"
    if not value <= high:
        return f"{words} of at most {high}"
    return ""


# ------------------------------------------------------------------------------- the command line


class Parser(argparse.ArgumentParser):
    """Says a mistake in one line, as for all mistakes of a caller."""

    def error(self, message: str):
        raise UsageError(message.removeprefix("argument "))


def parse(config_class, presets: dict, doc: str, argv: list[str]) -> tuple[list, list[str]]:
    """Returns the config of each point of the sweep, and the names of the swept options.

    presets  {name: command line}. Options that stand next to --preset replace the preset's.
    doc      the script's docstring. It begins with an example.
    Raises UsageError for what cannot be read, or is outside its limits.
    """
    example = (doc or f"python {sys.argv[0]}").strip().partition("\n")[0]  # -OO drops docstrings
    check_config(config_class)
    parser = make_parser(config_class, presets, example)
    given = parser.parse_args(argv)
    if given.list_presets:
        for name, line in presets.items():
            words = shlex.split(line, comments=True)
            configs, _ = parse(config_class, presets, doc, words)
            print(f"# {name}{price_tag(configs)}\n{example.partition(' --')[0]} {line}")
        parser.exit()
    if given.preset:
        preset = shlex.split(presets[given.preset], comments=True)
        given = parser.parse_args(preset + argv)

    grid = {}
    for name in defaults_of(config_class):
        value = getattr(given, name)
        values = value if isinstance(value, list) else [value]
        grid[name] = list(dict.fromkeys(values))
        for value in grid[name]:
            check_value(config_class, name, value)
    configs = []
    for point in itertools.product(*grid.values()):
        config = config_class(**dict(zip(grid, point, strict=True)))
        config.check()
        configs.append(config)
    return configs, [name for name, values in grid.items() if len(values) > 1]


def make_parser(config_class, presets: dict, example: str) -> Parser:
    """Returns the parser of a script's options: its own first, then the options of every script."""
    parser = Parser(
        usage="%(prog)s [--preset NAME] [--OPTION VALUE ..]   (several values are a sweep)",
        description=example,
        allow_abbrev=False,
    )
    parser.add_argument("--preset", choices=presets, metavar="NAME", help="see --list-presets")
    words = "print the presets and exit; of an option given twice, the last one counts"
    parser.add_argument("--list-presets", action="store_true", help=words)
    own = parser.add_argument_group("options of this script")
    shared = parser.add_argument_group("options of every script")
    for name in defaults_of(config_class):
        group = shared if name in defaults_of(Config) else own
        add_option(group, config_class, name)
    return parser


def add_option(group, config_class, name: str) -> None:
    """Adds a field of a Config. It takes several values if it may be swept."""
    about = about_flag(config_class, name)
    default = defaults_of(config_class)[name]
    words = about["help"]
    if about["choices"]:
        words += f": {', '.join(about['choices'])}"
    if about["sweep"]:
        default = [*about["sweep"]]
        words += f" (default: {' '.join(map(str, default))})"
    elif default != "":
        words += f" (default: {default})"
    options = {"default": default, "help": words.replace("%", "%%")}
    if about["kind"] is bool:  # --switch, --no-switch
        group.add_argument(option(name), action=argparse.BooleanOptionalAction, **options)
        return
    if about["role"] not in ("free", "length"):
        options["nargs"] = "+"
    kind = about["kind"]
    take = functools.partial(convert, kind)
    group.add_argument(option(name), type=take, metavar=kind.__name__, **options)


def convert(kind: type, word: str):
    """Returns a word of the command line as a value of this type, if it is one."""
    if word.startswith("~/"):
        return os.path.expanduser(word)  # a shell leaves the ~ of --out=~/results
    try:
        return kind(word)
    except ValueError:
        return word  # `check_value` says what is wanted
