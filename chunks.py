"""Whether a user's own model may train many clients at once (--chunk), by torch.func.vmap.

No reader of an algorithm needs this module. Clients that train at once share one Python module. So
what the module keeps in Python, and Python's random numbers, are the same for all of them. That may
be wrong without a word. So `check_chunk` compares two clients before the first round.
"""

import copy
import inspect
import io
import pickle
import random
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from data import Data
from errors import UsageError, first_line, is_of_the_machine
from nets import BATCH_NORM, Model, inputs, seed_libraries, seeded
from training import Local, train_rows


def check_chunk(model: Model, data: Data, local: Local) -> None:
    """Raises UsageError unless two clients of a user's own model train at once as they do alone.

    What Python keeps in a module, and its random numbers, are the same for all clients that train
    at once. A count of steps is right so, unless batch norms make several passes of a step. Not
    seen are differences that begin after a few steps, such as hooks on the gradients of features,
    and with dropout those of training alone. Sets what a stack must know of the model:
    `has_batch_norm` and `is_recordable`.
    """
    advice = "leave --chunk out, and clients train one at a time"
    try:
        with seeded(0):
            model.has_batch_norm = model.has_batch_norm or mixes_samples(model, data)
            changed = changed_state(model, data)
            if changed and model.has_batch_norm:
                raise UsageError(f"it changes its {changed}")
            layer = layer_apart(model, data, local)
            if layer:  # rounding, or TF32, may have grown: many batch norms make training chaotic
                exact = copy.copy(model)
                exact.dtype = torch.float64
                layer = layer_apart(exact, data, local)
            model.is_recordable = not (changed or replaces_tensors(model, data))
    except Exception as error:
        if is_of_the_machine(error):
            raise
        reason = first_line(error.__cause__ or error)
        found = f"--chunk: the model cannot train two clients at once ({reason})"
        raise UsageError(f"{found}; {advice}") from error
    if layer:
        found = f"two clients that train at once get another {layer} than each alone"
        raise UsageError(f"--chunk: {found}; {advice}")


@torch.no_grad()
def mixes_samples(model: Model, data: Data) -> bool:
    """Whether a sample of a training batch changes more than its own logits, with equal dropout.

    It may change those of other samples, or what a pass leaves in weights and buffers.
    """
    theta = model.init(0)

    def run(last: int) -> tuple[Tensor, Tensor]:
        net = model.bind(theta[None], training=True)
        seed_libraries(0)
        logits = net.head(net.features(inputs(data, [0, 1, last], model.dtype)))
        return logits[0, 0], model.vector(net)

    logits, left = run(2)
    others, _ = run(-1)
    return not (torch.equal(logits, others) and torch.equal(left, theta))


def layer_apart(model: Model, data: Data, local: Local) -> str:
    """Names a layer in which two clients get other weights alone than at once; "" if none.

    They take a few steps of `local`. Their weights, samples and numbers of steps differ, and some
    batches are short. If training is random, the steps are compared in evaluation mode. Raises
    UsageError for random numbers of Python or NumPy.
    """
    few = replace(data, x_train=data.x_train[:8], y_train=data.y_train[:8])
    places = np.arange(8) % len(few.y_train)
    batches = [places[[[0, 1, 2], [3, 4, 5], [6, 7, 0]]], places[[[4, 2, 7], [1, 3, 5]]]]
    batches[0][1, 2] = -1  # a short batch, beside a full one
    thetas = torch.stack([model.init(0), model.init(1)])

    def run(model: Model, chunk: int, seed: int = 0) -> Tensor:
        some = replace(local, lr=0.01, seeds=[seed, seed])
        return train_rows(model, thetas, few, batches, some, np.arange(2), chunk)[0]

    alone = run(model, chunk=1)
    found = random.random(), np.random.random()
    seed_libraries(0)
    if found != (random.random(), np.random.random()):
        raise UsageError("it uses random numbers of Python or NumPy")
    layer = first_apart(model, run(model, chunk=1), alone, thetas)
    if layer and model.dtype == torch.float64:
        raise UsageError("the same training twice gives other weights: what is kept, and where?")
    if layer:
        return layer
    at_once = run(model, chunk=2)
    is_random = first_apart(model, run(model, chunk=1, seed=1), alone, thetas)
    if is_random:
        model = in_evaluation(model)
        alone = run(model, chunk=1)
        at_once = run(model, chunk=2)
    return first_apart(model, at_once, alone, thetas)


def first_apart(model: Model, found: Tensor, wanted: Tensor, begun: Tensor) -> str:
    """Names the first layer of weights (K, P) that differs by more than 0.1 % of how it moved."""
    layers = [rows.split(model.sizes, dim=1) for rows in (found, wanted, begun)]
    rounding = 100 * torch.finfo(model.dtype).eps
    for name, layer, of_wanted, of_begun in zip(model.shapes, *layers, strict=True):
        moved = (of_wanted - of_begun).abs().max()
        tolerance = moved / 1000 + rounding * (1 + of_wanted.abs().max())
        if not (layer - of_wanted).abs().max() <= tolerance:  # nor NaN
            return name.removeprefix("net.")
    return ""


def changed_state(model: Model, data: Data) -> str:
    """Names what a step in training changes in a module, beside theta; "" if nothing is seen.

    A recording keeps the module for the whole run, and a replay runs none of its Python. Raises
    UsageError for what goes on counting samples, because short batches are padded.
    """

    def after(*batches: list[int]) -> dict[str, bytes]:
        net = model.bind(model.init(0)[None], training=True, grad=True)
        for samples in batches:
            differentiate(net, data, samples, model.dtype)
        return state_of(net)

    once = after(FULL, SHORT)
    other = after(SHORT, SHORT)
    again = after(FULL, SHORT, FULL, SHORT)  # a cache, or a largest size, is as it was
    for name in once:
        if once[name] != other.get(name) and once[name] != again.get(name):
            raise UsageError(f"its {name} depends on how many samples batches have")
    return first_change(after(), after(SHORT))


def replaces_tensors(model: Model, data: Data) -> bool:
    """Whether a step makes or changes tensors that a module keeps, beside theta.

    A recording would go on with the first ones, or with their memory.
    """
    net = model.bind(model.init(0)[None], training=True, grad=True)
    alive = []  # so that no other tensor gets an id of these

    def after(samples: list[int]) -> list[tuple]:
        differentiate(net, data, samples, model.dtype)
        tensors = tensors_of(model, net)
        alive.append(tensors)
        return [(id(tensor), version(tensor)) for tensor in tensors]

    return after(FULL) != after(SHORT)


def version(tensor: Tensor) -> int:
    """How many times it was changed in place. Inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


SHORT = [0, -1]  # the samples of a batch
FULL = [0, 1, -1]


def differentiate(net: nn.Module, data: Data, samples: list[int], dtype: torch.dtype) -> None:
    seed_libraries(0)
    net.head(net.features(inputs(data, samples, dtype))).sum().backward()


def first_change(before: dict, now: dict) -> str:
    changed = [name for name in now if before.get(name) != now[name]]
    return changed[0] if changed else ""


def state_of(net: nn.Module) -> dict[str, bytes]:
    """What modules hold in Python and in their buffers, by name.

    Floating-point tensors are left out: a pass may keep features.
    """
    state = {}
    for name, value in held_by(net):
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            state[name], _ = as_bytes(value)
    return state


def tensors_of(model: Model, net: nn.Module) -> list[Tensor]:
    """The tensors that modules hold in Python and in buffers that theta has not."""
    found = []
    for name, value in held_by(net):
        if f"net.{name}" not in model.shapes:
            _, tensors = as_bytes(value)
            found += tensors
    return found


def held_by(net: nn.Module) -> Iterator[tuple[str, object]]:
    """Yields a name and what stands there, for Python's attributes and buffers of all modules.

    How many batches a batch norm has seen is left out, unless it uses this.
    """
    for path, module in net.net.named_modules():
        held = {name: vars(module)[name] for name in vars(module).keys() - vars(nn.Module()).keys()}
        held |= dict(module.named_buffers(recurse=False))
        if isinstance(module, BATCH_NORM) and module.momentum is not None:
            held.pop("num_batches_tracked", None)
        for name, value in held.items():
            yield f"{path}.{name}".removeprefix("."), value


class Names(pickle.Pickler):
    """Notes what pickle cannot compare: functions and classes by name and code, tensors by value.

    Of floating-point and complex tensors it notes the shape. `tensors` holds all that it finds. It
    does not find those of closures, nor those behind something that pickle cannot take.
    """

    def __init__(self, file):
        super().__init__(file)
        self.tensors = []

    def persistent_id(self, thing):
        if isinstance(thing, Tensor):
            self.tensors.append(thing)
            has_whole_numbers = not (thing.is_floating_point() or thing.is_complex())
            values = thing.detach().cpu().numpy().tobytes() if has_whole_numbers else None
            return str(thing.dtype), tuple(thing.shape), values
        if isinstance(thing, type) or inspect.isroutine(thing):  # a lambda has its code alone
            return getattr(thing, "__qualname__", ""), id(getattr(thing, "__code__", None))
        return None


def as_bytes(value) -> tuple[bytes, list[Tensor]]:
    """Describes any value, and returns the tensors that are found in it."""
    found = io.BytesIO()
    names = Names(found)
    try:
        names.dump(value)
    except (Exception, SystemExit):  # whatever an object of a user's own raises
        text = re.sub("0x[0-9a-f]+", "", repr(value))  # without its address
        return text.encode(), names.tensors
    return found.getvalue(), names.tensors


def in_evaluation(model: Model) -> Model:
    """The same model, whose modules stay in evaluation mode, without dropout."""

    def build() -> nn.Module:
        net = model.build().eval()
        net.train = lambda mode=True: net
        return net

    other = copy.copy(model)
    other.build = build
    return other
