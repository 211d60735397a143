"""python tests/zoo.py [NAMES ..]

Does a PyTorch model train here as PyTorch trains it? This program prints a table of models, those
of zoo_models.py. Each is given to this project as a user gives it, --model FILE.py:NAME. FedAvg in
plain PyTorch, below, trains it, too, and shares no code with the project. Both get the same initial
weights, batches and random numbers, in float64. The table says how far their test losses are apart,
or what the project says about the model. All models take five minutes on one core. The program ends
with 1 if a model ends in a traceback.
"""

import argparse
import collections
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ordinary  # noqa: E402
from zoo_models import CODES, ZOO, Entry  # noqa: E402

import common  # noqa: E402
from data import Data, from_arrays  # noqa: E402
from errors import NonFiniteError, UsageError  # noqa: E402

MODELS = Path(__file__).resolve().with_name("zoo_models.py")
SEED = 71
ROUNDS = 2
SIZES = (6, 8, 11)  # samples of each client
TRAINED = sum(SIZES)
TESTED = 12
BATCH = 4
CLASSES = 4
LR = 0.02
MOMENTUM = 0.9
DECAY = 1e-3

# ------------------------------------------------------------------------------------------- data


def make_samples(kind: str) -> np.ndarray:
    """Random samples (n, ..) of one kind, first those to train on."""
    rng = np.random.default_rng(SEED)
    n = TRAINED + TESTED
    if kind == "image":
        return rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
    if kind == "grey":
        return rng.integers(0, 256, (n, 28, 28, 1), dtype=np.uint8)
    if kind == "series":
        return rng.normal(size=(n, 32, 6))
    if kind == "table":
        return rng.normal(size=(n, 12))
    codes = CODES[kind]
    x = rng.integers(1, codes, (n, 16))
    for sample, length in zip(x, rng.integers(5, 17, n), strict=True):
        sample[length:] = 0  # padding
    x[-1, 0] = codes - 1  # the largest code comes in the test set alone
    return x


def standardise(x: np.ndarray, mean: np.ndarray, std: np.ndarray) -> Tensor:
    """What a model gets: images (n, C, H, W), otherwise (n, .., F)."""
    x = (x - mean) / std
    if x.ndim == 4:
        x = x.transpose(0, 3, 1, 2)
    return torch.from_numpy(x.copy())


def make_labels() -> np.ndarray:
    return np.random.default_rng(SEED).permutation(np.arange(TRAINED + TESTED) % CLASSES)


def make_shards() -> list[np.ndarray]:
    """The samples of each client."""
    return np.split(np.arange(TRAINED), np.cumsum(SIZES)[:-1])


def make_batches(t: int) -> list[list[np.ndarray]]:
    """Each client's batches in round t. The last one of a client may be short."""
    batches = []
    for m, shard in enumerate(make_shards()):
        order = np.random.default_rng([SEED, t, m]).permutation(shard)
        batches.append([order[i : i + BATCH] for i in range(0, len(order), BATCH)])
    return batches


# ------------------------------------------------------------------------- FedAvg in plain PyTorch


@dataclass
class Setting:
    """What the plain loop and the project share: numbers alone."""

    x: Tensor  # all samples as models get them
    sizes: tuple[int, int, int]  # channels, side, classes
    decay: float
    initial_seed: int
    seeds: list[list[int]]  # of each round and client


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def build(entry: Entry, setting: Setting) -> nn.Module:
    """Returns a new module. Its initial weights are always the same."""
    seed_everything(setting.initial_seed)
    net = entry.make(*setting.sizes)
    if any(map(nn.parameter.is_lazy, net.parameters())):
        net.eval()(setting.x[:2].float())  # a dry run gives lazy layers their sizes
    for weight in net.double().parameters():
        if weight.is_complex():
            weight.data = weight.data.to(torch.cdouble)
    return net


def floats(net: nn.Module) -> dict[str, Tensor]:
    """Copies what FedAvg averages. All else is as built: counters and masks, for example."""
    state = {}
    for name, value in net.state_dict().items():
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            state[name] = value.clone()
    return state


def load(entry: Entry, setting: Setting, state: dict[str, Tensor]) -> nn.Module:
    """Returns a new module with these weights and statistics."""
    net = build(entry, setting)
    whole = net.state_dict()  # with its metadata
    whole.update(state)
    net.load_state_dict(whole)
    return net


def train(net: nn.Module, x: Tensor, y: Tensor, batches: list, decay: float, seed: int) -> None:
    """One client's SGD. The seed is that of dropout."""
    sgd = torch.optim.SGD(net.parameters(), LR, MOMENTUM, weight_decay=decay)
    net.train()
    seed_everything(seed)
    for batch in batches:
        sgd.zero_grad()
        F.cross_entropy(net(x[batch]), y[batch]).backward()
        sgd.step()


def test(net: nn.Module, x: Tensor, y: Tensor, seed: int) -> float:
    """Returns the test loss. Some models are random in tests, too: all tests have one seed."""
    net.eval()
    seed_everything(seed)
    with torch.no_grad():
        return F.cross_entropy(net(x.clone()).double(), y).item()  # a model may change its input


def plain_losses(entry: Entry, setting: Setting) -> Iterator[float]:
    """Yields the test loss before training, and after each round."""
    x = setting.x
    y = torch.from_numpy(make_labels())
    x_test, y_test = x[TRAINED:], y[TRAINED:]
    state = floats(build(entry, setting))
    seed = setting.initial_seed
    yield test(load(entry, setting, state), x_test, y_test, seed)
    for t in range(ROUNDS):
        average = {name: torch.zeros_like(value) for name, value in state.items()}
        for m, batches in enumerate(make_batches(t)):
            client = load(entry, setting, state)
            train(client, x, y, batches, setting.decay, setting.seeds[t][m])
            for name, value in floats(client).items():
                average[name] += SIZES[m] / TRAINED * value
        state = average
        yield test(load(entry, setting, state), x_test, y_test, seed)


# -------------------------------------------------------------------------------------- the project


def make_data(kind: str) -> Data:
    x = make_samples(kind)
    y = make_labels()
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    try:
        return from_arrays(x[:TRAINED], y[:TRAINED], x[TRAINED:], y[TRAINED:], owner)
    except ValueError as error:  # as a command says it
        raise UsageError(str(error)) from error


def make_federation(name: str, entry: Entry) -> common.Federation:
    """The three clients of this project, with the user's model NAME of zoo_models.py."""
    data = make_data(entry.kind)
    config = ordinary.make_config(
        model=f"{MODELS}:{name}",
        partition="natural",
        clients=len(SIZES),
        lr=LR,
        momentum=MOMENTUM,
        weight_decay=entry.decay,
    )
    return common.Federation(config, data, common.Streams(SEED))


def pad(batches: list[np.ndarray]) -> np.ndarray:
    """One client's batches as an array (T, B). A short one ends with -1."""
    return np.stack([np.pad(b, (0, BATCH - len(b)), constant_values=-1) for b in batches])


def our_losses(fl: common.Federation) -> Iterator[float]:
    """Yields the same test losses as `plain_losses`, from the project."""
    state = fl.start()
    yield fl.test(state)["loss"]
    for t in range(ROUNDS):
        batches = [pad(of_client) for of_client in make_batches(t)]
        update = fl.train(state, t, fl.everyone, batches)
        state["theta"] = fl.aggregate(state, update)
        yield fl.test(state)["loss"]


def make_setting(fl: common.Federation, entry: Entry) -> Setting:
    """The numbers that this federation uses."""
    x = make_samples(entry.kind)
    shape = x.shape[1:]
    if x.dtype == np.int64:
        sizes = (CODES[entry.kind], shape[0], CLASSES)
        x = torch.from_numpy(x)
    else:
        sizes = (shape[-1], shape[0] if len(shape) > 1 else 0, CLASSES)
        x = standardise(x, fl.data.mean.numpy(), fl.data.std.numpy())
    seeds = []
    for t in range(ROUNDS):
        seeds.append([fl.streams.seed("dropout", t, m) for m in fl.everyone])
    return Setting(x, sizes, entry.decay, fl.streams.seed("init"), seeds)


# -------------------------------------------------------------------------------------- the table


def compare(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the test losses of a model here, and those of plain PyTorch: (ROUNDS + 1,) each.

    Raises what the project raises, UsageError if it refuses the model.
    """
    entry = ZOO[name]
    fl = make_federation(name, entry)
    ours = np.array([*our_losses(fl)])
    try:
        plain = np.array([*plain_losses(entry, make_setting(fl, entry))])
    except Exception as error:
        raise AssertionError(f"it trains here, but plain PyTorch raises {error!r}") from error
    assert plain[0] != plain[-1], "plain PyTorch does not train it, so nothing is compared"
    return ours, plain


def describe(name: str) -> str:
    """Returns what the table says about a model."""
    try:
        ours, plain = compare(name)
    except (UsageError, NonFiniteError) as error:
        line = str(error).replace(f"{MODELS}:", "")
        return f"FAILS: lines: {line!r}" if "\n" in line else f"refused: {line}"
    except Exception as error:
        return f"FAILS: {error!r}"
    difference = np.abs(ours / plain - 1).max()
    if difference == 0:
        return "equal to the last bit"
    if difference <= 1e-12:
        return f"equal to 1e-12 ({difference:.0e})"
    return f"differs by {difference:.1e}"


def main(args=None) -> int:
    parser = argparse.ArgumentParser(description="A table of models: here and in plain PyTorch.")
    parser.add_argument("names", nargs="*", help="models of zoo_models.py (default: all)")
    names = parser.parse_args(args).names or [*ZOO]
    if unknown := {*names} - {*ZOO}:
        parser.error(f"{', '.join(unknown)}: choose from {', '.join(ZOO)}")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    verdicts = collections.Counter()
    print("| model | stands for | what is special | samples | here |")
    print("|---|---|---|---|---|")
    for name in names:
        entry = ZOO[name]
        found = describe(name)
        print(f"| {name} | {entry.source} | {entry.trait} | {entry.kind} | {found} |", flush=True)
        verdicts[found.split()[0]] += 1
    print()
    for word, count in verdicts.items():
        print(f"{word.strip(':')} {count}")
    return int("FAILS:" in verdicts)


if __name__ == "__main__":
    sys.exit(main())
