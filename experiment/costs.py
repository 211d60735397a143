"""What a command will cost, before it starts: from the milliseconds of a step in costs.csv.

costs.csv holds CPU time of one core, as `python tests/bench_trainer.py --only costs` prints it. The
column h100_ms is one step of one client on an H100, in batches of at most 16. It was measured at
commit 1083be6 with a sketch of recorded steps, not with this code: for LeNet-5, AlexNet, VGG-11 and
ResNet-9 with batch norms in rounds of unequal clients, for the others with equal clients, which
takes less. An estimate may be wrong by a factor of 2, and other processors differ more. Where
nothing was measured, as for a user's own model or data, it is NaN.
"""

import csv
import dataclasses
import functools
import math
from collections.abc import Iterable
from pathlib import Path

from nets import SIDE

TABLE = Path(__file__).with_name("costs.csv")
START = 5.0  # seconds: imports, tables and figures
ROUND = 0.03  # seconds in addition to steps: batches, averages, a row
HOUR = 3600
UNKNOWN = dict.fromkeys(("step_ms", "sample_ms", "score_ms", "h100_ms"), math.nan)
SAMPLES = {  # of a data set: training samples, test samples, shape. No data is read
    "digits": (1437, 360, (28, 28, 1)),
    "mnist": (60_000, 10_000, (28, 28, 1)),
    "fmnist": (60_000, 10_000, (28, 28, 1)),
    "emnist": (124_800, 20_800, (28, 28, 1)),
    "emnist-byclass": (697_932, 116_323, (28, 28, 1)),
    "cifar10": (50_000, 10_000, (32, 32, 3)),
    "cifar100": (50_000, 10_000, (32, 32, 3)),
    "celeba": (162_770, 19_962, (84, 84, 3)),
    "shakespeare": (10_125, 2_437, (80,)),
}


@dataclasses.dataclass
class Work:
    """What a run does, as far as it takes much time.

    steps    local steps of all clients in all rounds
    samples  how many samples these steps have together
    scored   on how many samples a model is evaluated, without the tests
    seconds  of other work on one core, also if a GPU trains

    What the methods of a trial do only once, such as training an expert, counts in each of them.
    """

    steps: float
    samples: float
    scored: float = 0.0
    seconds: float = 0.0


@dataclasses.dataclass
class Cost:
    """The local steps of several runs, their seconds on one core, and their seconds on an H100."""

    steps: float = 0.0
    core: float = 0.0
    card: float = 0.0

    def add(self, config, work: Work, shape: tuple) -> None:
        """Adds this work of a config's model, on samples of this shape, in each trial."""
        ms = table().get(key_of(config, shape), UNKNOWN)
        core = work.steps * ms["step_ms"] + work.samples * ms["sample_ms"]
        core += work.scored * ms["score_ms"]
        card = work.steps * ms["h100_ms"] * max(1, config.batch_size / 16)
        other = work.seconds + config.rounds * ROUND
        self.steps += config.trials * work.steps
        self.core += config.trials * (core / 1000 + other)
        self.card += config.trials * (card / 1000 + other)

    def on(self, cores: int) -> str:
        """Returns for example "3 h on 2 cores, 9 min on an H100", as far as it is known."""
        words = []
        if math.isfinite(self.core):
            count = f"{cores} cores" if cores > 1 else "one core"
            words.append(f"{in_words(START + self.core / cores)} on {count}")
        if math.isfinite(self.card):
            words.append(f"{in_words(START + self.card)} on an H100")
        return ", ".join(words)


def cost_of(configs: Iterable) -> Cost:
    """Returns the cost of these configs, one for each method and setting, with all their trials."""
    total = Cost()
    for config in configs:
        n, tests, shape = size_of(config)
        work = config.work(n)
        tested = tests * math.ceil(config.rounds / config.eval_every)
        if config.base == "solo":  # each client has a model of its own
            tested *= config.clients
        work.scored += tested
        if config.base == "moon":  # the received and the client's last model see each batch, too
            work.scored += 2 * work.samples
        total.add(config, work, shape)
    return total


def price_tag(configs: list) -> str:
    """Returns ": 12,000 local steps, 3 h on one core, 9 min on an H100", as far as it is known.

    configs  a command line's. Equal ones are trained once
    """
    runs = {repr(config.results_depend_on()): config for config in configs}
    cost = cost_of(runs.values())
    if not cost.steps > 0:  # NaN: of a data set that is not known
        return ""
    return ", ".join([f": {cost.steps:,.0f} local steps", *filter(None, [cost.on(1)])])


def size_of(config) -> tuple[float, float, tuple]:
    """Returns how many training and test samples a config's data set has, and a sample's shape.

    The numbers are NaN if they are not known.
    """
    n, tests, shape = SAMPLES.get(config.dataset, (math.nan, math.nan, ()))
    if len(shape) == 3:
        side = max(shape[0], SIDE.get(config.model, 0))
        shape = (side, side, shape[2])
    return n, tests, shape


def key_of(config, shape: tuple) -> tuple:
    """Returns the columns of costs.csv that name a model."""
    name = "lenet5" if config.model == "simplecnn" else config.model  # the same layers
    width = str(config.width) if name in ("alexnet", "lstm") else "0"
    norm = config.norm if name.startswith("resnet") else "batch"
    return name, width, norm, "x".join(map(str, shape)), config.dtype


@functools.cache
def table() -> dict[tuple, dict[str, float]]:
    """Returns {`key_of`: {column: milliseconds}}. An empty cell is NaN."""
    found = {}
    with open(TABLE, newline="") as file:
        for row in csv.DictReader(file):
            key = (row["model"], row["width"], row["norm"], row["shape"], "float32")
            found[key] = {name: float(row[name] or "nan") for name in UNKNOWN}
    return found


def in_words(seconds: float) -> str:
    """Returns for example "40 s", "9 min", "3 h" or "5 days"."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{round(seconds / length)} {unit}"
    return f"{seconds:.0f} s"
