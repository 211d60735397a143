"""Checks of what users bring. Each mistake is one line that says what was found and what to do.

First come arrays of samples, labels and owners, which `data.from_arrays` defines. Then come a
user's own models. This module knows no other module.
"""

import math
import numbers
import pickle

import numpy as np
import torch
from torch import Tensor, nn


class UsageError(Exception):
    """A mistake of the caller. The command line shows one line and exits with status 2."""


def first_line(error: BaseException) -> str:
    """Returns the beginning of an error's message, or its class name."""
    message = str(error) or type(error).__name__
    lines = message.splitlines()
    if lines[0].endswith(":"):  # what follows says what is wrong
        lines[0] = " ".join(map(str.strip, lines[:2]))
    return lines[0][:300]


GPU_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)  # no fault of data or a model


def is_out_of_memory(error: BaseException) -> bool:
    """Whether NumPy's or torch's error means that the machine has not enough memory."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "allocate memory" in str(error)


def is_of_the_machine(error: BaseException) -> bool:
    """Whether memory or a GPU failed, and no file of the user's."""
    return is_out_of_memory(error) or isinstance(error, torch.AcceleratorError)


# ------------------------------------------------------------------------------------------- arrays


def as_array(name: str, values) -> np.ndarray:
    """Returns NumPy's array, of a type that torch knows. It is copied only where it must be."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        if values.dtype == torch.bfloat16:
            values = values.float()  # NumPy has no such type
    if np.ma.is_masked(values):
        raise ValueError(f"{name} has masked entries: leave these samples out, or use .filled(..)")
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"{name}: its entries differ in shape") from None
    except TypeError as error:  # a sparse or quantised tensor
        raise ValueError(f"{name} is no ordinary array ({first_line(error)})") from None
    if array.dtype == np.longdouble:
        array = array.astype(np.float64)
    native = array.dtype.newbyteorder("=")
    return np.require(array, native, ["C_CONTIGUOUS", "WRITEABLE"])


LARGEST = np.float64(1e18)  # the square of a larger number has no room in float32
IS_TEXT = "int64 (n, L) is text; a table of integers: .astype(float)"


def check_samples(name: str, x, codes: int) -> np.ndarray:
    """Returns images as uint8 (n, H, W, C), text as int64 (n, L) below `codes`, or floats."""
    x = as_array(name, x)
    if x.dtype == object:
        kinds = sorted({type(entry).__name__ for entry in x.flat})[:5]
        raise ValueError(f"{name} holds Python's {', '.join(kinds)}; wanted numbers of one type")
    if x.dtype == np.uint8 and x.ndim == 3:
        x = x[..., None]
    is_images = x.dtype == np.uint8 and x.ndim == 4
    is_text = x.dtype == np.int64 and x.ndim == 2
    is_floats = np.issubdtype(x.dtype, np.floating) and x.ndim >= 2
    if not (is_images or is_text or is_floats) or x.size == 0:
        raise ValueError(
            f"{name} is {x.dtype} {x.shape}; wanted images (n, H, W, C) of uint8, floats "
            "(n, .., F), or text (n, L) of int64: .astype(np.uint8) keeps pixels of 0 to 255 (16 "
            "bits: x // 256), .astype(float) makes a table, .reshape(n, H, W) images of flat ones"
        )
    if is_text and not 0 <= x.min() <= x.max() < codes:
        raise ValueError(
            f"{name} is int64 (n, L), so text; wanted codes from 0 to {codes - 1}, not "
            f"{x.min()} to {x.max()} (a table: .astype(float))"
        )
    if x.ndim == 4 and are_channels_first(x.shape):
        raise ValueError(
            f"{name} is {x.shape}, channels first; wanted (n, H, W, C): .transpose(0, 2, 3, 1)"
        )
    if is_floats:
        is_usable = np.abs(x) <= LARGEST  # NaN is not
        bad = np.flatnonzero(~is_usable.reshape(len(x), -1).all(1))
        if len(bad):
            count = f"{len(bad)} of {len(x)} samples, first in {bad[0]}"
            raise ValueError(f"{name}: NaN, infinity or a number above {LARGEST:g} in {count}")
    return x


def are_channels_first(shape: tuple) -> bool:
    """Whether (n, a, b, c) looks like torch's (n, C, H, W).

    Where b = c it does, because images are rarely as wide as they have channels.
    """
    _, channels, height, width = shape
    if height == width != channels:
        return height > 4
    return channels <= 4 and min(height, width) > 16


def are_bytes(x: np.ndarray) -> bool:
    """Whether x are images of bytes, or floats that are bytes / 255.

    A series (n, L, F) of zeros and ones alone may be anything, so it stays.
    """
    if x.dtype == np.uint8:
        return True
    if x.dtype.kind != "f" or x.ndim not in (3, 4):
        return False
    if x.min() < 0 or x.max() > 1:
        return False
    if x.ndim == 3 and np.isin(x, (0, 1)).all():
        return False
    levels = x * 255
    return np.allclose(levels, np.round(levels), rtol=0, atol=1e-3)


def to_bytes(x: np.ndarray) -> np.ndarray:
    """Returns as uint8 (n, H, W, C) what `are_bytes` recognises."""
    if x.dtype != np.uint8:
        x = np.round(x * 255).astype(np.uint8)
    return x if x.ndim == 4 else x[..., None]


def check_match(x_train: np.ndarray, x_test: np.ndarray) -> None:
    """Raises ValueError unless both sets are of one kind, shape and scale."""
    is_one_shape = x_train.shape[1:] == x_test.shape[1:]
    is_one_kind = x_train.dtype.kind == x_test.dtype.kind
    if not (is_one_shape and is_one_kind):
        train = f"{x_train.dtype} {x_train.shape}"
        test = f"{x_test.dtype} {x_test.shape}"
        raise ValueError(f"training samples are {train}, test samples {test}; wanted one kind")
    largest = [float(np.abs(x).max()) for x in (x_train, x_test)]
    if 0 < 100 * min(largest) < max(largest):
        raise ValueError(f"training and test samples reach {largest}; wanted one scale")


NUMBERED = "np.unique(y, return_inverse=True)[1] numbers the labels of both sets from 0"


def check_labels(name: str, y, n: int) -> np.ndarray:
    """Returns labels as int64 (n,)."""
    y = as_array(name, y)
    if y.shape != (n,) or y.dtype.kind not in "iub":
        found = f"{name} is {y.dtype} {y.shape}"
        raise ValueError(f"{found}; wanted {n} integers (n,): {NUMBERED}")
    return y.astype(np.int64)


def check_classes(y_train: np.ndarray, y_test: np.ndarray, classes: int | None) -> int:
    """Returns the number of classes. ValueError for an unknown label or a class without samples."""
    held = np.unique(y_train)
    if classes is None and len(held) == 1:
        raise ValueError(f"y_train holds only class {held[0]}: are the samples sorted by class?")
    count = held[-1] + 1
    if classes is not None:
        count = np.asarray(classes)
        if count.ndim or count.dtype.kind not in "iu":
            raise ValueError(f"classes is {classes}; wanted a whole number")
    for name, y in (("y_train", y_train), ("y_test", y_test)):
        if y.min() < 0 or y.max() >= count:
            found = f"{name} holds {y.min()} to {y.max()}"
            raise ValueError(f"{found}; wanted 0 to {count - 1}, as in training: {NUMBERED}")
    if classes is None and len(held) < count:
        first = np.arange(min(count, 1000))
        missing = np.setdiff1d(first, held)[:10].tolist()
        found = f"y_train lacks {missing} of 0 to {count - 1}"
        raise ValueError(f"{found}: {NUMBERED}; or set classes")
    return int(count)


def check_owner(owner, n: int) -> np.ndarray:
    """Returns who owns each training sample, (n,): numbers or names."""
    from pandas import isna  # None, NaN, NaT, NA

    owner = as_array("owner", owner)
    unknown = isna(owner).sum()
    if owner.shape != (n,) or unknown:
        found = f"{owner.shape} with {unknown} missing"
        raise ValueError(f"owner is {found}; wanted a number or name for each of {n} samples")
    return owner.astype(str) if owner.dtype == object else owner


def check_shards(shards, clients: int, n: int) -> list[np.ndarray]:
    """Returns each client's samples (N_m,), as places in the n training samples."""
    if len(shards) != clients:
        raise UsageError(f"{len(shards)} clients have samples; wanted --clients {clients}")
    checked = []
    for m, shard in enumerate(shards):
        shard = as_array(f"client {m}", shard)
        is_list = shard.ndim == 1 and shard.dtype.kind in "iu" and shard.size > 0
        if not is_list or shard.min() < 0 or shard.max() >= n:
            limits = f", {shard.min()} to {shard.max()}" if shard.size else ""
            found = f"the samples of client {m} are {shard.dtype} {shard.shape}{limits}"
            raise UsageError(f"{found}; wanted integers (N,) from 0 to {n - 1}, at least one")
        checked.append(shard.astype(np.int64))  # with room for -1
    return checked


def check_batches(model, clients, batches, n: int) -> list[np.ndarray]:
    """Returns each client's batches (T_k, B): a row holds places in n samples, then only -1.

    The model must be able to learn from them.
    """
    checked = []
    for m, of_client in zip(clients, batches, strict=True):
        of_client = as_array(f"client {m}", of_client)
        is_table = of_client.ndim == 2 and of_client.dtype.kind in "iu"
        is_sample = np.zeros((1, 1))
        if is_table:
            is_sample = of_client >= 0
        has_gap = (is_sample[:, 1:] > is_sample[:, :-1]).any()
        is_empty = not is_sample.any(1).all()
        if has_gap or is_empty or of_client.max(initial=0) >= n:
            found = f"the batches of client {m} are {of_client.dtype} {of_client.shape}"
            wanted = f"integers (T, B); each row from 0 to {n - 1}, then perhaps -1"
            raise UsageError(f"{found}; wanted {wanted}")
        checked.append(of_client.astype(np.int64))
    model.check_batches(clients, checked)
    return checked


def moments_of_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and standard deviation of each channel (C,).

    They are exact, because counts of the 256 values give them. A deviation is at least 1/255 of the
    brightest pixel, so that noise on black stays small.
    """
    channels = [channel.flatten() for channel in x.unbind(-1)]
    counts = [torch.bincount(channel, minlength=256) for channel in channels]
    count = torch.stack(counts).double()  # (C, 256)
    value = torch.arange(256.0, dtype=torch.float64, device=x.device)
    n = count.sum(1)
    mean = count @ value / n
    variance = count @ value**2 / n - mean**2
    least = max(x.max().item(), 1) / 255
    return mean, variance.clamp(min=least**2).sqrt()


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and deviation (F,) of each entry of the last axis; 1 where it is constant."""
    rows = x.flatten(0, -2)
    parts = rows.split(1 << 16)  # in float64 the whole might not fit into memory
    mean = sum(part.double().sum(0) for part in parts) / len(rows)
    variance = sum((part.double() - mean).square().sum(0) for part in parts) / len(rows)
    std = variance.sqrt()
    return mean, torch.where(std > 1e-12 * mean.abs(), std, 1.0)


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


# ------------------------------------------------------------------------------- a user's own model


LAZY = nn.parameter.UninitializedTensorMixin


def check_tensors(net: nn.Module) -> None:
    """Raises UsageError for weights that cannot be a part of a vector theta (P,)."""
    parameters = [*net.parameters()]
    if any(isinstance(value, LAZY) for value in [*parameters, *net.buffers()]):
        raise UsageError("a lazy layer has no size; wanted its sizes: nn.Linear for nn.LazyLinear")
    if any(parameter.is_complex() for parameter in parameters):
        raise UsageError("its weights are complex; wanted real ones")
    for module in net.modules():
        hooks = [type(hook).__name__ for hook in module._forward_pre_hooks.values()]
        if {"WeightNorm", "SpectralNorm"} & {*hooks}:
            old = f"the {hooks[0]} of a {type(module).__name__} keeps no weight"
            raise UsageError(f"{old}; wanted those of torch.nn.utils.parametrizations")
    names = {}  # of what is in a place of the memory
    for name, parameter in net.named_parameters():
        other = names.setdefault(memory_of(parameter) or name, name)
        if name != other and parameter.requires_grad:
            found = f"{name} and {other} share memory, and would train apart".replace("net.", "")
            raise UsageError(f"{found}; wanted one parameter in both places")


def refuse_unused(model, net: nn.Module, loss: Tensor) -> None:
    """Raises UsageError if a parameter has no gradient."""
    if not loss.requires_grad:
        raise UsageError("its logits do not depend on its weights (detach, no_grad, argmax?)")
    gradients = torch.autograd.grad(loss, net.leaves, allow_unused=True)  # hooks may look on
    for name, gradient in zip(model.parameters, gradients, strict=True):
        name = name.removeprefix("net.")
        if gradient is None:
            wanted = "leave it out, or freeze it: requires_grad_(False)"
            raise UsageError(f"its logits do not depend on {name}; {wanted}")
        if gradient.is_sparse:
            raise UsageError(f"the gradient of {name} is sparse; leave out sparse=True")


def refuse_state(model, x: Tensor) -> None:
    """Raises UsageError if a model has state that is not averaged and saved.

    Only weights, and float buffers that change in place, are averaged and saved. A training step
    must change nothing else, and a test no weight and no buffer. What lies outside the model's
    modules (closures, global names, Python's random) is not seen.
    """
    theta = model.init(0)
    if not is_same(theta, model.init(0)):
        raise UsageError("its initial weights differ each time; wanted random numbers of torch")
    net = model.bind(model.by_layer(theta[None]), training=True, grad=True)
    before = remember(model, net)
    logits = net.head(net.features(x))
    refuse_unused(model, net, logits.sum())
    after = remember(model, net)
    changed = {name for name, module in after if after[name, module] != before.get((name, module))}
    changed |= changes(model.constants, dict(net.named_buffers()))  # .data has no version
    if name := min(changed, default=""):
        wanted = "leave it out, or make it a finite float buffer and change it in place: add_"
        if name in model.shapes:
            wanted = "change it in place: add_, copy_"
        name = name.removeprefix("net.")
        raise UsageError(f"training sets self.{name}, which is not averaged or saved; {wanted}")
    layers = model.by_layer(theta[None])
    net = model.bind(layers)
    given = dict(zip(model.shapes, layers, strict=True))
    copies = copies_of(given) | model.constants  # `bind` copied these
    net.head(net.features(x))
    if name := min(changes(copies, dict(net.named_buffers()) | given), default=""):
        name = name.removeprefix("net.")
        raise UsageError(
            f"a test changes self.{name}; leave this out (such as max_norm), or do it only if "
            "self.training"
        )


def copies_of(tensors: dict) -> dict:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def changes(copies: dict, tensors: dict) -> set[str]:
    """Returns the names of the tensors that are no longer as when `copies_of` copied them."""
    return {name for name, copy in copies.items() if not is_same(copy, tensors.get(name))}


def refuse_mixing(model, x: list[Tensor], batch: Tensor, K: int) -> None:
    """Raises UsageError if a sample's logits depend on other samples, or on other clients.

    x      samples, each as the model takes it alone
    batch  all of them for each of K clients. A model that is random in a test is not judged
    """
    thetas = torch.stack([model.init(k) for k in range(K)])
    places = torch.arange(model.trainable, device=thetas.device)
    thetas[:, : model.trainable] += 0.01 * places.cos()  # a last layer of zeros would hide others
    alone = logits_alone(model, thetas, x)
    if not alone.isfinite().all() or not torch.equal(alone, logits_alone(model, thetas, x)):
        return
    net = model.bind(thetas)
    try:
        together = net.head(net.features(batch))
        is_equal = (together - alone).abs().max() <= 1e-3 * alone.abs().max()
    except RuntimeError as error:
        if is_of_the_machine(error):
            raise
        is_equal = False
    if model.is_plain and not is_equal:
        cause = "is batch_first=True missing, or track_running_stats=False set?"
        raise UsageError(f"in a test the logits of a sample depend on the other samples; {cause}")
    if not is_equal:
        raise UsageError("a layer of its Net mixes clients or samples; wanted layers from nets")


def logits_alone(model, thetas: Tensor, x: list[Tensor]) -> Tensor:
    """Returns the logits (K, n, C) of K models thetas (K, P) for n samples, one at a time."""
    of_clients = []
    for theta in thetas:
        net = model.bind(theta[None])
        logits = [net.head(net.features(sample)) for sample in x]
        of_clients.append(torch.cat(logits, 1))
    return torch.cat(of_clients)


def is_same(a: Tensor, b: Tensor | None) -> bool:
    """Whether two tensors have the same entries. NaN is the same as NaN."""
    if b is None or a.shape != b.shape:
        return False
    are_nan = (a != a) & (b != b)
    return ((a == b) | are_nan).all().item()


def remember(model, net: nn.Module) -> dict:
    """The attributes of a bound model's modules, and of the modules that it was copied from.

    Hooks know the latter. Of weights and float buffers it keeps which tensor it is and its memory,
    and of other tensors also the version. Of anything else it keeps the content.
    """
    torchs_own = vars(nn.Module())
    found = {}
    for path, module in [*model.skeleton.named_modules(), *net.named_modules()]:
        attributes = vars(module) | module._parameters | module._buffers
        for attribute, value in attributes.items():
            name = f"{path}.{attribute}".removeprefix(".")
            if attribute in torchs_own or attribute.startswith("_flat_weight"):  # of torch's LSTM
                continue
            if isinstance(value, Tensor):
                is_averaged = name in model.shapes or name in model.ties
                version = 0 if is_averaged else value._version
                tensor = frozenset([value])  # equal for the same one
                found[name, module] = (tensor, memory_of(value), version)
            elif attribute != "leaves":
                found[name, module] = content(value)
    return found


def memory_of(tensor: Tensor) -> int:
    """Returns where its entries are; 0 if they are nowhere, as those of a skeleton."""
    return 0 if tensor.is_meta or tensor.is_sparse else tensor.data_ptr()


def content(value):
    """Returns something equal for equal values. Where values cannot be compared, it is their id."""
    try:
        return pickle.dumps(value)
    except Exception:
        return id(value)


def try_alone(model, name: str, one: Tensor) -> str:
    """Says how a batch of one sample fails in training, as with batch norms over vectors; or ""."""
    layers = model.by_layer(model.init(0)[None])
    net = model.bind(layers, training=True)
    try:
        net.features(one)
    except Exception as error:
        reason = first_line(error.__cause__ or error)
        return f"--model {name}: cannot learn from a batch of one sample ({reason})"
    return ""
