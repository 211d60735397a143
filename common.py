"""What the five scripts share: data, nets, the trainer of many clients at once, the bases, and how a run is kept on disk.

Nothing here knows a curriculum, a phase or a cluster. The pivot is that *a curriculum is an index schedule*: which samples
a client sees at local step t is an integer array, built before training starts, and `train` follows it without a branch.
A net's weights are one flat vector theta of P floats; the weights of K clients are one (K, P) matrix. So aggregation,
control variates and moments are the vector arithmetic that the papers print.

Rooms, in this order: random streams | data | partitions | nets | trainer | scoring | bases | configuration | run.
"""

import argparse
import contextlib
import copy
import csv
import dataclasses
import functools
import gc
import importlib
import json
import math
import os
import platform
import shlex
import signal
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

gc.freeze()  # the collector need not walk through torch's own objects again and again: 3 % of a round
if sys.platform == "linux":  # keep large buffers in the heap: returning their pages after every step costs a third of it
    import ctypes

    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, mallopt = -1, -3, ctypes.CDLL(None).mallopt
    mallopt(M_TRIM_THRESHOLD, 1 << 30)
    mallopt(M_MMAP_THRESHOLD, 1 << 30) or mallopt(M_MMAP_THRESHOLD, 1 << 25)  # the most that an older glibc takes


class UsageError(Exception):
    """A mistake of the caller (flag, file, size). The command line shows it as one line and exits with 2."""


class NonFiniteError(Exception):
    """A client's update holds NaN or infinity. The command line shows it as one line and exits with 3."""


SHARES: dict[str, float] = {}  # seconds spent in each timed function, for --profile


def timed(name: str):
    """Adds the time of each call to SHARES[name]."""

    def wrap(function):
        @functools.wraps(function)
        def call(*args, **flags):
            begun = time.perf_counter()
            try:
                return function(*args, **flags)
            finally:
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()
                SHARES[name] = SHARES.get(name, 0.0) + time.perf_counter() - begun

        return call

    return wrap


class RankError(Exception):
    """Another rank of a distributed run is gone. The command line shows it as one line and exits with 4."""


# ---------------------------------------------------------------------------------------------------- random streams


class Streams:
    """Independent generators keyed on (seed, trial, purpose, round, client, ...).

    One purpose is always used with the same number of keys. Because no draw depends on how many were made before it,
    evaluating more often, another order of the arms, another number of processes and a resumed run change no bit.
    """

    def __init__(self, seed: int, trial: int = 0):
        self.key = (seed, trial)

    def __call__(self, purpose: str, *key: int) -> np.random.Generator:
        return np.random.default_rng([*self.key, zlib.crc32(purpose.encode()), *map(int, key)])

    def seed(self, purpose: str, *key: int) -> int:
        """A seed for a torch generator or a library that takes only an integer."""
        return int(self(purpose, *key).integers(2**31))


# -------------------------------------------------------------------------------------------------------------- data


@dataclass
class Data:
    """A data set resident on the device.

    Images are uint8 (n, H, W, C), normalised per channel with the training set's `mean` and `std` when a batch is read.
    Text is int64 (n, L), each sample L characters whose label is the next one. `owner` names the natural client of each
    training sample (speaking role, celebrity), where the data set has such.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    mean: Tensor | None = None
    std: Tensor | None = None
    owner: np.ndarray | None = None

    def inputs(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """What a net takes. Images (K, B, H, W, C) -> (B, K*C, H, W), text (K, B, L) -> (B, L), K = 1.

        In memory the channels come last where clients are stacked, first for a single client: by measurement, each is the
        faster one there.
        """
        if x.dtype == torch.int64:
            return x[0]
        k, b, h, w, c = x.shape
        x = x.permute(1, 2, 3, 0, 4).to(dtype, memory_format=torch.contiguous_format)  # (B, H, W, K, C)
        x = x.sub(self.mean.to(dtype)).div_(self.std.to(dtype))
        x = x.view(b, h, w, k * c).permute(0, 3, 1, 2)
        return x if k > 1 else x.contiguous()


CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"  # LEAF's 80
SEQUENCE = 80  # characters read before the one to predict


def _digits(_: Path) -> tuple:
    """scikit-learn's 1,797 real 8x8 digits: stratified 80/20 split, always the same, enlarged bilinearly to 28x28."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images).float().view(-1, 1, 8, 8) * (255 / 16)
    images = F.interpolate(images, size=28, mode="bilinear", align_corners=False).round().to(torch.uint8)
    train, test = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    images = images.permute(0, 2, 3, 1).numpy()
    return images[train], labels[train], images[test], labels[test], None


def _torchvision(name: str, root: Path) -> tuple:
    """MNIST, Fashion-MNIST, EMNIST letters, CIFAR-10/100 and CelebA ('smiling', 84x84, clients = celebrities)."""
    from torchvision import datasets

    if name == "celeba":
        return _celeba(root)
    maker = {
        "mnist": "MNIST",
        "fmnist": "FashionMNIST",
        "emnist": "EMNIST",
        "cifar10": "CIFAR10",
        "cifar100": "CIFAR100",
    }
    options = {"split": "letters"} if name == "emnist" else {}
    parts = []
    for train in (True, False):
        kind = getattr(datasets, maker[name])
        try:
            part = kind(root, train=train, **options)
        except RuntimeError:  # torchvision's word for 'not there'
            part = kind(root, train=train, download=True, **options)
        images, labels = np.asarray(part.data), np.asarray(part.targets)
        parts += [images[..., None] if images.ndim == 3 else images, labels - (name == "emnist")]
    return (*parts, None)


def _celeba(root: Path) -> tuple:
    from torchvision import datasets, transforms

    resize = transforms.Compose([transforms.CenterCrop(178), transforms.Resize(84)])
    parts, owner = [], None
    for split in ("train", "test"):
        part = datasets.CelebA(root, split=split, target_type="attr", transform=resize, download=True)
        parts.append(np.stack([np.asarray(part[i][0]) for i in range(len(part))]))
        parts.append(part.attr[:, part.attr_names.index("Smiling")].numpy())
        owner = part.identity[:, 0].numpy() if split == "train" else owner
    return (*parts, owner)


def _shakespeare(path: Path) -> tuple:
    """Next-character samples of every `SPEAKER:` role; the last fifth of each role's text is its test part.

    Windows of 80 characters do not overlap in training text; a character outside LEAF's 80 is read as a space.
    """
    path = path / "tinyshakespeare.txt" if os.path.isdir(path) else path
    if not os.path.isfile(path):
        raise UsageError(f"--dataset shakespeare: put a text of 'SPEAKER:' blocks at {path}")
    roles: dict[str, list[str]] = {}
    for block in path.read_text(encoding="utf-8", errors="replace").split("\n\n"):
        speaker, colon, speech = block.strip().partition(":\n")
        if colon:
            roles.setdefault(speaker, []).append(speech)
    code = {c: i for i, c in enumerate(CHARACTERS)}
    x, y, owner = {0: [], 1: []}, {0: [], 1: []}, []
    for role, speeches in enumerate(roles.values()):
        text = np.array([code.get(c, code[" "]) for c in "\n".join(speeches)])
        cut = len(text) * 4 // 5
        for test, part in enumerate((text[:cut], text[cut:])):
            starts = range(0, len(part) - SEQUENCE, SEQUENCE)
            x[test] += [part[s : s + SEQUENCE] for s in starts]
            y[test] += [part[s + SEQUENCE] for s in starts]
            owner += [role] * len(starts) if not test else []
    if not x[0] or not x[1]:
        raise UsageError(f"--dataset shakespeare: {path} holds no role with more than {SEQUENCE * 5} characters")
    return np.stack(x[0]), np.array(y[0]), np.stack(x[1]), np.array(y[1]), np.array(owner)


def _npz(path: Path) -> tuple:
    try:
        with np.load(path, allow_pickle=False) as file:
            x_train, y_train, x_test, y_test = (file[name] for name in ("x_train", "y_train", "x_test", "y_test"))
    except KeyError as error:
        raise UsageError(f"{path}: {error.args[0]}; wanted x_train, y_train, x_test, y_test") from None
    except Exception as error:  # zlib, zip and numpy each have their own word for a damaged file
        raise UsageError(f"{path}: cannot be read ({type(error).__name__}: {error})") from None
    for name, array in (("x_train", x_train), ("x_test", x_test)):
        if np.issubdtype(array.dtype, np.floating) and array.size and array.min() >= 0 and array.max() <= 1:
            array = np.round(array * 255)
        elif np.issubdtype(array.dtype, np.floating):
            raise UsageError(f"{path}: {name} holds floats outside [0, 1]; wanted uint8 or floats in [0, 1]")
        elif array.dtype != np.uint8:
            raise UsageError(f"{path}: {name} is {array.dtype}; wanted uint8 or floats in [0, 1]")
        array = array.astype(np.uint8)
        array = array[..., None] if array.ndim == 3 else array
        x_train, x_test = (array, x_test) if name == "x_train" else (x_train, array)
    return x_train, y_train, x_test, y_test, None


def _tree(path: Path) -> tuple:
    """An ImageFolder tree with train/ and test/, one folder per class."""
    from torchvision.datasets import ImageFolder

    parts, classes = [], None
    for split in ("train", "test"):
        try:
            folder = ImageFolder(path / split)
            images = [np.asarray(folder[i][0]) for i in range(len(folder))]
        except (OSError, SyntaxError) as error:  # PIL raises SyntaxError for a damaged PNG
            raise UsageError(f"{path / split}: {str(error).splitlines()[0]}") from None
        shapes = {image.shape for image in images}
        if len(shapes) > 1:
            raise UsageError(f"{path / split}: images differ in size, such as {sorted(shapes)[:2]}; resize them first")
        if classes not in (None, folder.classes):
            raise UsageError(f"{path}: train/ and test/ hold different classes")
        classes = folder.classes
        parts += [np.stack(images), np.array(folder.targets)]
    return (*parts, None)


MOST_CLASSES = 100_000
DATASETS = ("digits", "mnist", "fmnist", "emnist", "cifar10", "cifar100", "celeba", "shakespeare")
PLACES = {  # where torchvision looks for them under --data-dir
    "mnist": "MNIST/raw/*-ubyte",
    "fmnist": "FashionMNIST/raw/*-ubyte",
    "emnist": "EMNIST/raw/emnist-letters-*-ubyte",
    "cifar10": "cifar-10-batches-py/",
    "cifar100": "cifar-100-python/",
    "celeba": "celeba/img_align_celeba/ and celeba/*.txt",
}


@functools.lru_cache(maxsize=2)
def load_data(name: str, root: str | None = None, device: str = "cpu", size: int | None = None) -> Data:
    """Reads a data set onto the device.

    `name` is one of DATASETS, an .npz file (x_train, y_train, x_test, y_test) or an ImageFolder tree with train/ and
    test/. `size` pads smaller square images with black to size x size, as the nets for 32x32 need, before the moments
    are taken. A file is read once per process.
    Raises UsageError when the data is absent, damaged or ill-formed.
    """
    folder = Path(root) if root else Path("data")
    if name == "digits":
        arrays = _digits(folder)
    elif name == "shakespeare":
        arrays = _shakespeare(folder)
    elif name in DATASETS:
        try:
            arrays = _torchvision(name, folder)
        except Exception as error:  # torchvision asserts, looks up and unpickles: each damage has its own word
            reason = str(error).splitlines()[0].rstrip(" :") if str(error) else type(error).__name__
            hint = f"put {PLACES[name]} there or connect to the network"
            raise UsageError(f"--dataset {name}: not readable from --data-dir {folder} ({reason}); {hint}") from None
    elif name.endswith(".npz") and os.path.isfile(name):  # False for a name too long to be one
        arrays = _npz(Path(name))
    elif os.path.isdir(name):
        arrays = _tree(Path(name))
    else:
        raise UsageError(f"--dataset {name}: not one of {', '.join(DATASETS)}, nor an .npz file or folder that exists")
    return _resident(name, arrays, device, size)


def _resident(name: str, arrays: tuple, device: str, size: int | None) -> Data:
    """Checks the arrays and moves them to the device."""
    x_train, y_train, x_test, y_test, owner = arrays
    for split, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        if x.ndim < 2 or y.ndim != 1 or len(x) != len(y) or x.size == 0:
            raise UsageError(f"--dataset {name}: {split} holds samples of shape {x.shape} and labels of shape {y.shape}")
        if not np.issubdtype(y.dtype, np.integer) or y.min() < 0 or y.max() >= MOST_CLASSES:
            raise UsageError(f"--dataset {name}: {split} labels must be integers from 0 to {MOST_CLASSES - 1}")
    if x_train.shape[1:] != x_test.shape[1:] or (x_train.dtype == np.uint8 and x_train.ndim != 4):
        raise UsageError(f"--dataset {name}: train is {x_train.shape}, test {x_test.shape}; wanted (n, H, W, C) alike")
    classes = len(CHARACTERS) if name == "shakespeare" else int(y_train.max()) + 1
    if y_test.max() >= classes:
        raise UsageError(f"--dataset {name}: test holds label {y_test.max()}, train only 0 to {classes - 1}")
    y_train, y_test = y_train.astype(np.int64), y_test.astype(np.int64)
    tensors = [torch.as_tensor(np.ascontiguousarray(a)) for a in (x_train, y_train, x_test, y_test)]
    mean = std = None
    if tensors[0].dtype == torch.uint8:
        if size and tensors[0].shape[1] < size:
            edge = size - tensors[0].shape[1]
            pad = (0, 0, edge // 2, edge - edge // 2, edge // 2, edge - edge // 2)
            tensors = [F.pad(t, pad) if t.dim() == 4 else t for t in tensors]
        channels = tensors[0].flatten(0, 2)
        count = torch.stack([torch.bincount(c.int(), minlength=256) for c in channels.unbind(1)]).double()  # exact moments
        value = torch.arange(256, dtype=torch.float64)
        mean = (count @ value) / count.sum(1)
        std = ((count @ value.square()) / count.sum(1) - mean.square()).clamp(min=1).sqrt()
        mean, std = mean.to(device), std.to(device)
    x_train, y_train, x_test, y_test = (t.to(device) for t in tensors)
    return Data(x_train, y_train, x_test, y_test, classes, mean, std, owner)


# -------------------------------------------------------------------------------------------------------- partitions


def partition(
    kind: str, labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator, min_size: int = 1, owner=None
):
    """Splits samples over clients: a list of `clients` sorted index arrays, disjoint.

    iid            equal random parts
    label-skew     each client owns 2 classes: client i has class i mod K and one random other; a class is split equally
    dirichlet      for each class, shares over clients ~ Dir(alpha) (as the papers cite it)
    dirichlet-client  for each client, shares over classes ~ Dir(alpha) (as the authors of the curricula paper coded it)
    natural        clients are drawn from the data's own (speaking roles, celebrities); the others' samples are left out

    A client below `min_size` is filled from the largest clients; the number of moved samples is returned beside.
    Raises UsageError when there are too few samples.
    """
    n = len(labels)
    if clients * min_size > n:
        raise UsageError(
            f"--clients {clients}: the training set has only {n} samples, at least {min_size} per client are needed"
        )
    if kind == "natural":
        return _natural(owner, clients, max(min_size, 2), rng), 0
    makers = {"iid": _iid, "label-skew": _label_skew, "dirichlet": _dirichlet, "dirichlet-client": _dirichlet_client}
    if kind not in makers:
        raise UsageError(f"--partition {kind}: not one of {', '.join([*makers, 'natural'])}")
    owners = makers[kind](labels, clients, alpha, rng)  # (n,) the client of each sample
    moved = _repair(owners, clients, min_size, rng)
    order = np.argsort(owners, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owners, minlength=clients))[:-1]), moved


def _iid(labels, clients, alpha, rng):
    return rng.permutation(np.arange(len(labels)) % clients)


def _label_skew(labels, clients, alpha, rng):
    classes = int(labels.max()) + 1
    own = np.arange(clients) % classes
    other = (own + rng.integers(1, max(classes, 2), clients)) % classes  # any class but the client's own
    owners = np.empty(len(labels), dtype=np.int64)
    for c in range(classes):
        index = rng.permutation(np.flatnonzero(labels == c))
        holders = np.flatnonzero((own == c) | (other == c))
        if len(holders) == 0:  # a class that nobody drew still goes somewhere
            holders = rng.integers(clients, size=1)
        owners[index] = holders[np.arange(len(index)) * len(holders) // max(len(index), 1)]
    return owners


def _dirichlet_shares(alpha, size, rng):
    """Dir(alpha, ..., alpha), also where alpha is so small that every gamma draw underflows to 0."""
    logs = np.log(rng.gamma(alpha + 1, size=size)) + np.log(rng.random(size)) / alpha  # log Gamma(alpha) draws
    shares = np.exp(logs - logs.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def _dirichlet(labels, clients, alpha, rng):
    owners = np.empty(len(labels), dtype=np.int64)
    for c in range(int(labels.max()) + 1):
        index = rng.permutation(np.flatnonzero(labels == c))
        ends = np.cumsum(_dirichlet_shares(alpha, clients, rng))
        owners[index] = np.minimum(np.searchsorted(ends, (np.arange(len(index)) + 0.5) / max(len(index), 1)), clients - 1)
    return owners


def _dirichlet_client(labels, clients, alpha, rng):
    """Equal client sizes; each slot asks for a class from its client's shares and takes what is left where it ran out."""
    classes, n = int(labels.max()) + 1, len(labels)
    shares = _dirichlet_shares(alpha, (clients, classes), rng)
    pools = [list(rng.permutation(np.flatnonzero(labels == c))) for c in range(classes)]
    owners = np.empty(n, dtype=np.int64)
    for slot in rng.permutation(np.arange(n) % clients):
        left = np.array([len(pool) for pool in pools])
        weight = np.where(left > 0, shares[slot], 0)
        weight = weight if weight.sum() > 0 else left.astype(float)
        owners[pools[int(np.searchsorted(np.cumsum(weight), rng.random() * weight.sum(), side="right"))].pop()] = slot
    return owners


def _natural(owner, clients, min_size, rng):
    if owner is None:
        raise UsageError("--partition natural: this data set has no clients of its own")
    names, counts = np.unique(owner, return_counts=True)
    able = names[counts >= min_size]
    if len(able) < clients:
        raise UsageError(f"--clients {clients}: only {len(able)} of the data's own clients hold {min_size} samples or more")
    return [np.flatnonzero(owner == name) for name in np.sort(rng.choice(able, clients, replace=False))]


def _repair(owners, clients, min_size, rng):
    """Moves samples, one at a time, from the largest client to those below `min_size`; returns how many."""
    import heapq

    counts = np.bincount(owners, minlength=clients)
    poor = np.flatnonzero(counts < min_size)
    if len(poor) == 0:
        return 0
    shuffled = rng.permutation(len(owners))
    order = shuffled[np.argsort(owners[shuffled], kind="stable")]  # by owner, in random order within
    ends = np.cumsum(counts)
    rich = [(-counts[i], i) for i in np.flatnonzero(counts > min_size)]
    heapq.heapify(rich)
    moved = 0
    for i in poor:
        for _ in range(min_size - counts[i]):
            size, giver = heapq.heappop(rich)
            ends[giver] -= 1
            owners[order[ends[giver]]] = i
            moved += 1
            if -size - 1 > min_size:
                heapq.heappush(rich, (size + 1, giver))
    return moved


# -------------------------------------------------------------------------------------------------------------- nets
# A net is written once and trains K clients: parameters carry a leading client dimension, images are (B, K*C, H, W),
# features (K, B, F). With K = 1 it is the ordinary net. `features` ends where MOON, FedGen and t-SNE look; `head` is last.


class Conv2d(nn.Conv2d):
    """K convolutions as one grouped one, max-pooled if asked. weight (K, O, C, h, w), x (B, K*C, H, W) -> (B, K*O, H', W')."""

    def forward(self, x, pool=1):
        bias = None if self.bias is None else self.bias.flatten()
        weight, groups = self.weight.flatten(0, 1), len(self.weight)
        if pool == 1:
            return F.conv2d(x, weight, bias, self.stride, self.padding, groups=groups)
        # a bias moves the maximum exactly as it moves the candidates; added after them, it costs a quarter
        x = F.max_pool2d(F.conv2d(x, weight, None, self.stride, self.padding, groups=groups), pool)
        return x + bias[:, None, None]


class Linear(nn.Linear):
    """K linear maps at once. weight (K, O, F), x (K, B, F) -> (K, B, O)."""

    def forward(self, x):
        return _Affine.apply(x, self.weight, self.bias)


class _Affine(torch.autograd.Function):
    """x W^T + b per client. Autograd's own gradient of W lies transposed in memory; copying that costs as much as making it."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            torch.bmm(grad, weight) if wanted[0] else None,
            torch.bmm(grad.transpose(1, 2), x) if wanted[1] else None,
            grad.sum(1) if wanted[2] else None,
        )


class BatchNorm2d(nn.BatchNorm2d):
    """K batch norms at once, each with the statistics of its own client."""

    def forward(self, x):
        mean, var = self.running_mean.flatten().clone(), self.running_var.flatten().clone()
        x = F.batch_norm(x, mean, var, self.weight.flatten(), self.bias.flatten(), self.training, self.momentum, self.eps)
        if self.training:  # the copies were updated: autograd keeps them, so the weights may not be
            self.running_mean.copy_(mean.view_as(self.running_mean))
            self.running_var.copy_(var.view_as(self.running_var))
        return x


def per_client(x: Tensor, k: int) -> Tensor:
    """(B, K*C, H, W) -> (K, B, C*H*W)."""
    return x.unflatten(1, (k, -1)).transpose(0, 1).flatten(2)


class LeNet5(nn.Module):
    """conv5-6, pool, conv5-16, pool, 120, 84, classes. 62,006 parameters on 3x32x32, 44,426 on 1x28x28.

    MOON's and FedAC's SimpleCNN is the same net.
    """

    def __init__(self, channels, side, classes, width):
        super().__init__()
        self.conv1, self.conv2 = Conv2d(channels, 6, 5), Conv2d(6, 16, 5)
        self.fc1, self.fc2 = Linear(16 * (((side - 4) // 2 - 4) // 2) ** 2, 120), Linear(120, 84)
        self.head = Linear(84, classes)

    def features(self, x):
        x = self.conv1(x, pool=2).relu_()
        x = self.conv2(x, pool=2).relu_()
        x = self.fc1(per_client(x, len(self.fc1.weight))).relu_()
        return self.fc2(x).relu_()


class AlexNet(nn.Module):
    """AlexNet for 32x32 images; `width` is that of the two hidden layers. 23,272,266 parameters (4096), 2,400,586 (128)."""

    def __init__(self, channels, side, classes, width):
        super().__init__()
        width = width or 4096
        plan = [(channels, 64, 2), (64, 192, 1), (192, 384, 1), (384, 256, 1), (256, 256, 1)]
        self.convs = nn.ModuleList(Conv2d(i, o, 3, stride, 1) for i, o, stride in plan)
        self.fc1, self.fc2, self.head = Linear(1024, width), Linear(width, width), Linear(width, classes)
        self.dropout = nn.Dropout(0.05)

    def features(self, x):
        for i, conv in enumerate(self.convs):
            x = F.relu(conv(x, pool=2 if i in (0, 1, 4) else 1))
        x = self.dropout(per_client(x, len(self.fc1.weight)))
        return F.relu(self.fc2(self.dropout(F.relu(self.fc1(x)))))


class VGG11(nn.Module):
    """64 M 128 M 256 256 M 512 512 M 512 512 M, 512-512-classes, dropout .2. 9,750,922 parameters."""

    plan = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")

    def __init__(self, channels, side, classes, width):
        super().__init__()
        sizes = [channels, *(size for size in self.plan if size != "M")]
        self.convs = nn.ModuleList(Conv2d(i, o, 3, padding=1) for i, o in zip(sizes, sizes[1:], strict=False))
        self.fc1, self.fc2, self.head = Linear(512, 512), Linear(512, 512), Linear(512, classes)
        self.dropout = nn.Dropout(0.2)

    def features(self, x):
        convs = iter(self.convs)
        for size in self.plan:
            x = F.max_pool2d(x, 2) if size == "M" else F.relu(next(convs)(x))
        x = self.dropout(F.relu(self.fc1(per_client(x, len(self.fc1.weight)))))
        return self.dropout(F.relu(self.fc2(x)))


class ConvNorm(nn.Module):
    """Convolution without bias, batch norm."""

    def __init__(self, inputs, outputs, size=3, stride=1):
        super().__init__()
        self.conv, self.norm = Conv2d(inputs, outputs, size, stride, size // 2, bias=False), BatchNorm2d(outputs)

    def forward(self, x):
        return self.norm(self.conv(x))


class ResNet9(nn.Module):
    """prep 64; 128, pool, residual; 256, pool; 512, pool, residual; max pool; classes."""

    def __init__(self, channels, side, classes, width):
        super().__init__()
        plan = [(channels, 64), (64, 128), (128, 128), (128, 128), (128, 256), (256, 512), (512, 512), (512, 512)]
        self.convs = nn.ModuleList(ConvNorm(i, o) for i, o in plan)
        self.head = Linear(512, classes)

    def features(self, x):
        prep, c128, r1, r2, c256, c512, r3, r4 = self.convs
        x = F.max_pool2d(F.relu(c128(F.relu(prep(x)))), 2)
        x = x + F.relu(r2(F.relu(r1(x))))
        x = F.max_pool2d(F.relu(c256(x)), 2)
        x = F.max_pool2d(F.relu(c512(x)), 2)
        x = x + F.relu(r4(F.relu(r3(x))))
        return per_client(F.adaptive_max_pool2d(x, 1), len(self.head.weight))


class ResNet18(nn.Module):
    """ResNet-18 with the CIFAR stem: 3x3, stride 1, no pool."""

    def __init__(self, channels, side, classes, width):
        super().__init__()
        self.stem = ConvNorm(channels, 64)
        plan = [
            (64, 64, 1),
            (64, 64, 1),
            (64, 128, 2),
            (128, 128, 1),
            (128, 256, 2),
            (256, 256, 1),
            (256, 512, 2),
            (512, 512, 1),
        ]
        self.first = nn.ModuleList(ConvNorm(i, o, 3, stride) for i, o, stride in plan)
        self.second = nn.ModuleList(ConvNorm(o, o) for _, o, _ in plan)
        self.skip = nn.ModuleList(ConvNorm(i, o, 1, s) if s > 1 else nn.Identity() for i, o, s in plan)
        self.head = Linear(512, classes)

    def features(self, x):
        x = F.relu(self.stem(x))
        for first, second, skip in zip(self.first, self.second, self.skip, strict=True):
            x = F.relu(second(F.relu(first(x))) + skip(x))
        return per_client(F.adaptive_avg_pool2d(x, 1), len(self.head.weight))


class FedGenCNN(nn.Module):
    """FedGen's classifier with its 32 latent features: 26,434 parameters on 28x28 digits, 25,954 on 84x84 faces."""

    def __init__(self, channels, side, classes, width):
        super().__init__()
        self.pool = side == 84
        sizes = [channels, 16, 32, 64] if self.pool else [channels, 6, 16]
        pairs = list(zip(sizes, sizes[1:], strict=False))
        self.convs = nn.ModuleList(Conv2d(i, o, 3, stride=2, padding=1) for i, o in pairs)
        self.norms = nn.ModuleList(BatchNorm2d(o) for _, o in pairs)
        for _ in pairs:
            side = (side + 1) // 2
            side = side // 2 if self.pool else side
        self.latent, self.head = Linear(sizes[-1] * side * side, 32), Linear(32, classes)

    def features(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
            x = F.max_pool2d(x, 2) if self.pool else x
        return self.latent(per_client(x, len(self.latent.weight)))


class CharLSTM(nn.Module):
    """Embedding of 256, two LSTM layers of `width` (512), the last step's state classifies. 3,739,728 parameters.

    Plain torch layers, one client at a time: on a CPU its matrix products already fill the machine.
    """

    plain = True

    def __init__(self, channels, side, classes, width):
        super().__init__()
        width = width or 512
        self.embedding = nn.Embedding(classes, 256)
        self.lstm = nn.LSTM(256, width, num_layers=2, batch_first=True, dropout=0.05)
        self.out = nn.Linear(width, classes)

    def features(self, x):
        return self.lstm(self.embedding(x))[0][None, :, -1]

    def head(self, features):
        return self.out(features)


class Projected(nn.Module):
    """A net with MOON's projection head: features -> F -> ReLU -> 256 = z -> classes."""

    def __init__(self, net, classes, outputs=256):
        super().__init__()
        self.net, size = net, net.head.in_features
        self.project1, self.project2, self.head = Linear(size, size), Linear(size, outputs), Linear(outputs, classes)
        self.net.head = nn.Identity()

    def features(self, x):
        return self.project2(F.relu(self.project1(self.net.features(x))))


NETS = {
    "lenet5": LeNet5,
    "simplecnn": LeNet5,
    "alexnet": AlexNet,
    "vgg11": VGG11,
    "resnet9": ResNet9,
    "resnet18": ResNet18,
    "fedgen-cnn": FedGenCNN,
    "lstm": CharLSTM,
}
SIDE = {"alexnet": 32, "vgg11": 32, "resnet9": 32, "resnet18": 32}  # smaller images are padded to this


class Model:
    """A net whose weights live outside it, as a flat vector theta (P,) or a stack (K, P), one row per client.

    The first `trainable` entries are parameters, the rest BatchNorm statistics: averaged, never optimised.
    """

    def __init__(self, build: Callable[[], nn.Module], device: str = "cpu", dtype: torch.dtype = torch.float32):
        self.build, self.device, self.dtype = build, device, dtype
        with torch.device("meta"):
            self.skeleton = build()
        self.plain = getattr(self.skeleton, "plain", False)  # plain torch layers: one client at a time
        self.batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.skeleton.modules())
        self.layout, end = [], 0  # (owning module, attribute, shape, begin, end)
        parameters = dict(self.skeleton.named_parameters())
        buffers = {n: b for n, b in self.skeleton.named_buffers() if b.is_floating_point()}
        for name, tensor in {**parameters, **buffers}.items():
            owner, _, leaf = name.rpartition(".")
            self.layout.append((owner, leaf, tensor.shape, end, end + tensor.numel()))
            end += tensor.numel()
        self.size, self.trainable = end, sum(p.numel() for p in parameters.values())
        self.memory = None  # of the trainer

    def init(self, seed: int) -> Tensor:
        """Torch's default initialisation as a flat vector (P,)."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            net = self.build()
        state = net.state_dict()
        tensors = [state[f"{owner}.{leaf}".lstrip(".")] for owner, leaf, *_ in self.layout]
        return torch.cat([t.flatten() for t in tensors]).to(self.device, self.dtype)

    def bind(self, stack: Tensor, training: bool = False, grad: bool = False):
        """The net over the rows of `stack` (K, P), sharing its memory; with `grad`, its parameters are autograd leaves.

        Returns the net; `net.leaves` lists the parameters in the order of the flat vector.
        """
        net = copy.deepcopy(self.skeleton).train(training)
        leaves = []
        for owner, leaf, shape, begin, end in self.layout:
            view = stack.data[:, begin:end].view(-1, *shape)  # .data: BatchNorm's update must not look like one of the weights
            view = view[0] if self.plain else view
            if begin < self.trainable:
                leaves.append(view := view.detach().requires_grad_(grad))
            module = net.get_submodule(owner)
            delattr(module, leaf)
            setattr(module, leaf, view)
        for module in net.modules():
            if getattr(module, "num_batches_tracked", None) is not None:
                module.num_batches_tracked = None
        net.leaves = leaves
        return net

    def default_chunk(self) -> int:
        """Clients stacked at once: by measurement, all of a small net's; big nets on a CPU are bound by arithmetic."""
        if self.plain or (self.device == "cpu" and self.trainable > 1_000_000):
            return 1
        return 64


def build_model(name: str, data: Data, device="cpu", dtype=torch.float32, width=0, projection=False) -> Model:
    """The net `name` of NETS for this data. Raises UsageError when the data does not fit it."""
    text = data.x_train.dtype == torch.int64
    if text != (name == "lstm"):
        raise UsageError(f"--model {name}: {'text needs --model lstm' if text else 'lstm reads text, not images'}")
    if text and projection:
        raise UsageError("--base moon: not for --model lstm")
    side, channels = (0, 0) if text else (data.x_train.shape[1], data.x_train.shape[3])
    if not text and (data.x_train.shape[2] != side or side < 16 or (name in SIDE and side != 32)):
        wanted = "32x32" if name in SIDE else "at least 16x16, square"
        raise UsageError(f"--model {name}: images are {side}x{data.x_train.shape[2]}; wanted {wanted}")

    def build():
        net = NETS[name](channels, side, data.classes, width)
        return Projected(net, data.classes) if projection else net

    return Model(build, device, dtype)


# ----------------------------------------------------------------------------------------------------------- trainer


@dataclass
class Update:
    """What K clients send back. weights (K, P); the others (K,) float64.

    length   ||a_i||_1 of FedNova times eta: under a constant gradient g, x - y_i = length_i g (momentum and lr schedule in it)
    grad_sq  mean over local steps of ||grad l_B||^2, before momentum, weight decay and correction
    loss     mean over local steps of the training loss
    """

    weights: Tensor
    steps: np.ndarray
    length: np.ndarray
    grad_sq: np.ndarray
    loss: np.ndarray

    def __getitem__(self, keep: np.ndarray) -> "Update":
        """The update of the clients in rows `keep`."""
        rest = (getattr(self, name)[keep] for name in ("steps", "length", "grad_sq", "loss"))
        return Update(self.weights[torch.as_tensor(keep, device=self.weights.device)], *rest)


def sample_losses(step) -> Tensor:
    """Cross-entropy of each sample, (K, B)."""
    return F.cross_entropy(step.logits.flatten(0, 1), step.y.flatten(), reduction="none").view_as(step.y)


def cross_entropy(step) -> Tensor:
    """Each client's weighted cross-entropy, (K,)."""
    return (step.weight * sample_losses(step)).sum(1)


def step_lengths(lr: np.ndarray, momentum: float = 0.0, proximal: float = 0.0) -> np.ndarray:
    """(T,) -> (T+1,): how far tau local steps travel under a unit gradient, sum_j a_j eta: the rollout that defines a_i."""
    travelled, velocity, lengths = 0.0, 0.0, [0.0]
    for eta in lr:
        velocity = momentum * velocity + 1 - proximal * travelled
        travelled += eta * velocity
        lengths.append(travelled)
    return np.array(lengths)


@timed("local training")
def train(
    model: Model,
    start: Tensor,
    data: Data,
    batches: Sequence[np.ndarray],
    *,
    lr: float | np.ndarray,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    proximal: float = 0.0,
    correction: Tensor | None = None,
    weights: Sequence[np.ndarray] | None = None,
    loss: Callable = cross_entropy,
    penalty: Callable | None = None,
    frozen: dict[str, Tensor] | None = None,
    per_client: dict[str, Tensor] | None = None,
    per_step: dict[str, Sequence[np.ndarray]] | None = None,
    augment: Callable | None = None,
    chunk: int = 0,
    seeds: Sequence[int] | None = None,
) -> Update:
    """Trains K clients by SGD over their index schedules, many of them in one pass.

    start       theta (P,) for all, or (K, P)
    batches     for each client an integer array (T_k, B) of training samples, a short batch filled with -1 at its end
    lr          eta, or its schedule over local steps
    proximal    mu of FedProx: adds mu (y - x) to the gradient
    correction  (K, trainable), added to every gradient (SCAFFOLD, VRL-SGD)
    weights     for each client an array (T_k, B) of sample weights; the loss is their sum over the batch's true size
    loss        step -> (K,); `step` has net, inputs, x, y, features (K, B, F), logits (K, B, C), weight and mean (K, B),
                frozen and extra. `mean` is 1 / batch size on real samples and 0 on padding; weight is mean times sample weight
    penalty     step -> (K,), added to the loss; frozen: weights (P,) or (K, P) that step.frozen[name] offers as eval nets
    per_client  tensors (K, ...), per_step lists of arrays (T_k, ...); both appear in step.extra, cut to the live clients
    augment     (uint8 images (K, B, H, W, C), extra) -> images, before normalisation
    chunk       clients stacked at once (0: chosen for the net and device); a plain net always takes 1
    seeds       of dropout, one per client; clients that are stacked share the first one's

    loss, penalty and augment are made of torch's operations on what the step gives them, without state, seeding or switches of
    their own: a step is recorded and done again.
    """
    steps = np.array([len(b) for b in batches], dtype=int)
    lr = np.full(max(steps.max(initial=0), 1), lr) if np.isscalar(lr) else np.asarray(lr)
    order = np.argsort(-steps, kind="stable")  # so that the clients still training are always a prefix
    chunk = 1 if model.plain else chunk or model.default_chunk()
    mine = order[slice(world()[0], None, world()[1])]  # every rank gets long and short clients alike
    result = torch.zeros(len(batches), model.size, device=model.device, dtype=model.dtype)
    statistics = torch.zeros(len(batches), 2, device=model.device, dtype=torch.float64)
    for rows in (mine[i : i + chunk] for i in range(0, len(mine), chunk)):
        pick = torch.as_tensor(rows, device=model.device)
        if seeds is not None:
            torch.manual_seed(seeds[rows[0]])
        group = _Group(model, start.expand(len(batches), -1)[pick], data, [batches[i] for i in rows])
        group.lr = (
            lr if model.device == "cpu" else group.hold("lr", torch.as_tensor(lr, device=model.device, dtype=model.dtype))
        )
        group.momentum, group.weight_decay, group.proximal = momentum, weight_decay, proximal
        group.loss, group.penalty, group.augment = loss, penalty, augment
        group.correction = None if correction is None else group.hold("correction", correction[pick])[: len(rows)]
        group.frozen = {name: w.expand(len(batches), -1)[pick] for name, w in (frozen or {}).items()}
        group.per_client = {name: value[pick] for name, value in (per_client or {}).items()}
        group.per_step = {name: group.stacked([value[i] for i in rows]) for name, value in (per_step or {}).items()}
        if weights is not None:
            weight = group.stacked([weights[i] for i in rows]).to(group.mean)
            group.weight[: len(weight)] *= weight
        result[pick], statistics[pick] = group.run()
    return _gathered(result, statistics, steps, step_lengths(lr, momentum, proximal)[steps])


def _gathered(weights: Tensor, statistics: Tensor, steps: np.ndarray, length: np.ndarray) -> Update:
    """The update, from all ranks: each row is zero on all but one, so the sum is exact."""
    if world()[1] > 1:
        dist.all_reduce(weights)
        dist.all_reduce(statistics)
    average = statistics.cpu().numpy() / np.maximum(steps, 1)[:, None]
    return Update(weights, steps, length, average[:, 0], average[:, 1])


def gather(samples: Tensor, index: Tensor) -> Tensor:
    """samples[index] of any shape, in whole rows: several times as fast as torch's indexing."""
    return samples.index_select(0, index.flatten()).view(*index.shape, *samples.shape[1:])


WORTH_RECORDING = 12  # steps: by measurement, to record one costs what eight replays save


class _Memory:
    """Buffers that stay in their place from round to round, so that nets bound to them and steps recorded on them stay good."""

    def __init__(self, data: Data):
        self.data, self.buffers, self.nets, self.steps = data, {}, {}, {}

    def __deepcopy__(self, _) -> None:
        """A copied model begins without one: the steps recorded here would go on writing to these buffers."""

    def hold(self, name: str, value: Tensor) -> Tensor:
        """`value` (n, ...) copied into a buffer (n' >= n, ...), which is returned; what relied on one too small goes."""
        old = self.buffers.get(name, value[:0])
        shape = [max(sizes) for sizes in zip(old.shape, value.shape, strict=True)]
        if name not in self.buffers or shape != [*old.shape] or old.dtype != value.dtype:
            self.nets.clear()
            self.steps.clear()
            self.buffers[name] = value.new_zeros(shape)
        buffer = self.buffers[name][(slice(None), *map(slice, value.shape[1:]))]
        buffer[: len(value)] = value
        return buffer


class _Group:
    """K clients, sorted by falling number of local steps, trained as one net."""

    def __init__(self, model, start, data, batches):
        self.model, self.data = model, data
        if model.memory is None or model.memory.data is not data:
            model.memory = _Memory(data)
        self.memory, self.hold, k = model.memory, model.memory.hold, len(batches)
        self.steps = np.array([len(b) for b in batches])
        self.weights = self.hold("weights", start)[:k]  # y (K, P)
        self.anchor = self.hold("anchor", start[:, : model.trainable])[:k]  # x
        self.grad = self.hold("grad", torch.zeros_like(self.anchor))[:k]
        self.velocity = self.hold("velocity", torch.zeros_like(self.anchor))[:k]
        self.statistics = self.hold("statistics", torch.zeros(k, 2, device=model.device, dtype=torch.float64))[:k]
        real = [(b >= 0).sum(1) for b in batches]
        self.counts = np.stack([np.pad(r, (0, self.steps[0] - len(r))) for r in real], 1)  # (T, K) true batch sizes
        index = self.stacked(batches, fill=-1)  # (T, K, B)
        mask = (index >= 0).to(model.dtype)
        self.index, self.batch_size = self.hold("index", index.clamp(min=0)), index.shape[2]
        mean = mask / mask.sum(-1, keepdim=True).clamp(min=1)
        self.mean, self.weight = self.hold("mean", mean), self.hold("weight", mean)

    def stacked(self, arrays, fill=0):
        """K arrays (T_k, ...) -> (T, K, ...) on the device; integers stay integers, floats take the net's precision."""
        result = np.full((self.steps[0], len(arrays), *arrays[0].shape[1:]), fill, dtype=np.result_type(*arrays))
        for k, array in enumerate(arrays):
            result[: len(array), k] = array
        tensor = torch.as_tensor(result, device=self.model.device)
        return tensor.to(self.model.dtype) if tensor.is_floating_point() else tensor

    def run(self):
        """All local steps, in segments during which the same clients are live."""
        own = self.penalty or self.augment or self.frozen or self.per_client or self.per_step or self.loss is not cross_entropy
        self.recorded = {} if own else self.memory.steps  # what holds more than the net and its loss serves this group alone
        begin, self.bound = 0, {}
        while begin < self.steps.max(initial=0):
            live = int((self.steps > begin).sum())
            end = int(self.steps[live - 1])
            counts = self.counts[begin:end, :live]
            if self.model.batch_norm and counts.min() < self.batch_size:
                for t in range(begin, end):
                    same = counts[t - begin].min() == counts[t - begin].max()
                    for rows in [slice(0, live)] if same else map(lambda k: slice(k, k + 1), range(live)):
                        self.differentiate(t, rows)  # padding must not enter batch statistics
                    self.descend(t, live)
            elif self.model.device == "cuda":
                self.replay(begin, end, live)
            else:
                for t in range(begin, end):
                    self.differentiate(t, slice(0, live), end - t)
                    self.descend(t, live)
            begin = end
        return self.weights, self.statistics

    def replay(self, begin, end, live, warm_up=3):
        """The segment on a GPU: a few steps as they are, then one captured as a CUDA graph, to be replayed in later rounds too.

        The step counter lives on the device, so that a replay needs nothing from the host.
        """
        counter = self.hold("counter", torch.full((1,), begin, device=self.model.device))

        def step():
            self.differentiate(counter, slice(0, live))
            self.descend(counter, live)
            counter.add_(1)

        key = (live, self.batch_size, self.momentum, self.weight_decay, self.proximal, self.correction is None)
        if key not in self.recorded and end - begin > 2 * warm_up:
            with _side_stream(self.model.device):
                for _ in range(warm_up):
                    step()
            begin += warm_up
            self.recorded[key] = _captured(step, self.model.device)
        for _ in range(end - begin):
            self.recorded.get(key, step)()

    def at(self, schedule, t):
        """Step t of a (T, ...) schedule; t is an integer, or a counter (1,) on the device."""
        return schedule[t] if isinstance(t, int) else schedule.index_select(0, t)[0]

    def nets(self, rows):
        """The net over these clients, where its gradients go, and the frozen nets."""
        key, nets = (rows.start, rows.stop), self.memory.nets
        if key not in nets:
            net = self.model.bind(self.weights[rows], training=True, grad=True)
            sizes = [leaf.numel() if self.model.plain else leaf[0].numel() for leaf in net.leaves]
            grads = self.grad[rows].split(sizes, dim=1)
            nets[key] = net, [grad.view(leaf.shape) for grad, leaf in zip(grads, net.leaves, strict=True)]
        if key not in self.bound:
            self.bound[key] = {name: self.model.bind(stack[rows]) for name, stack in self.frozen.items()}
        return *nets[key], self.bound[key]

    def differentiate(self, t, rows, remaining=0):
        """The gradients of local step t. Where enough of its like remain (on a CPU), it is recorded and then replayed."""
        size = int(self.counts[t, rows].max()) if isinstance(t, int) else self.batch_size
        index = self.at(self.index, t)[rows, :size]
        mean, weight = (self.at(schedule, t)[rows, :size] for schedule in (self.mean, self.weight))
        per_step = [self.at(value, t)[rows] for value in self.per_step.values()]
        inputs = gather(self.data.x_train, index), gather(self.data.y_train, index), mean, weight, *per_step
        backward, key = functools.partial(self.backward, rows, *self.nets(rows)), (rows.start, rows.stop, size)
        if key in self.recorded:
            (self.recorded[key].replay or backward)(*inputs)
        elif remaining >= WORTH_RECORDING and size == self.batch_size and not self.model.plain:
            self.recorded[key] = _Tape(backward, *inputs)
        else:
            backward(*inputs)

    def backward(self, rows, net, grads, frozen, x, y, mean, weight, *per_step):
        """One backward pass of the summed loss: clients are independent, so it yields every client's own gradient."""
        step = SimpleNamespace(net=net, frozen=frozen, x=x, y=y, mean=mean, weight=weight)
        step.extra = {name: value[rows] for name, value in self.per_client.items()}
        step.extra |= dict(zip(self.per_step, per_step, strict=True))
        step.inputs = self.data.inputs(self.augment(x, step.extra) if self.augment else x, self.model.dtype)
        step.features = net.features(step.inputs)
        step.logits = net.head(step.features)
        losses = self.loss(step)
        if self.penalty:
            losses = losses + self.penalty(step)
        torch._foreach_copy_(grads, torch.autograd.grad(losses.sum(), net.leaves))
        self.statistics[rows, 1].add_(losses.detach())

    @torch.no_grad()
    def descend(self, t, live):
        """One step of SGD: g += mu (y - x) + c + lambda y, v = rho v + g, y -= eta v."""
        g, v, y = self.grad[:live], self.velocity[:live], self.weights[:live, : self.model.trainable]
        self.statistics[:live, 0].add_(torch.linalg.vector_norm(g, dim=1).square_())
        if self.proximal:
            g.add_(y - self.anchor[:live], alpha=self.proximal)
        if self.correction is not None:
            g.add_(self.correction[:live])
        if isinstance(t, int) and self.model.device == "cpu":  # torch.optim.SGD's kernel: one pass over memory, not four
            ys, gs, vs = ([m] if y.is_contiguous() else list(m) for m in (y, g, v))  # it does not look at strides
            eta, rest = float(self.lr[t]), {"dampening": 0.0, "nesterov": False, "maximize": False, "is_first_step": False}
            vs = vs if self.momentum else []
            torch._fused_sgd_(ys, gs, vs, lr=eta, momentum=self.momentum, weight_decay=self.weight_decay, **rest)
        else:
            g.add_(y, alpha=self.weight_decay)
            y.sub_(v.mul_(self.momentum).add_(g) * self.at(self.lr, t))


UNSEEN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Looks(TorchFunctionMode):
    """Notes whether a tensor's values leave torch without an operation."""

    seen = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen |= function in (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data.__set__)
        return function(*args, **(kwargs or {}))


class _Tape(TorchDispatchMode):
    """What a function of tensors did, operation by operation, backward pass included; `replay` does it again to new tensors.

    To record is to run the function once. `replay` does the same operations in the same order, so it gives the same bits; it
    saves the layers' and autograd's bookkeeping, a sixth of a small net's step. What is not an input is taken as it stands in
    memory. `replay` is None if the function did what a list of operations cannot tell: looked into a tensor (`.item()`, a mask
    of unknown size), made one from Python's values, seeded a generator.
    """

    def __init__(self, function: Callable, *inputs: Tensor):
        super().__init__()
        self.names = {id(x): f"x{i}" for i, x in enumerate(inputs)}  # of the tensors that differ from call to call
        self.kept, self.made, self.constants, self.lines, self.faithful = list(inputs), set(), {}, [], True
        arguments = ", ".join(self.names.values())
        with self, _Looks() as looks:
            function(*inputs)
        lines, later, space = [], set(), {}
        for line, names in reversed(self.lines):  # a tensor dies with its last use, as it did
            lines.append(f"    {line}; del {', '.join(sorted(names - later))}" if names - later else f"    {line}")
            later |= names
        exec(_compiled("\n".join([f"def replay({arguments}):", *reversed(lines)])), self.constants, space)
        self.replay = torch.inference_mode()(space["replay"]) if self.faithful and not looks.seen else None
        del self.names, self.kept, self.lines

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        self.kept.append((args, result))  # an id must not be given twice
        given = {id(x): x for x in _flat((args, kwargs)) if isinstance(x, Tensor)}
        varying = {self.names[x] for x in given if x in self.names}
        unseen = UNSEEN & set(operation.tags) or operation is torch.ops.aten.lift_fresh.default or kwargs.get("generator")
        if torch.Tag.inplace_view in operation.tags:  # of a tensor that stays, or that goes by two names
            unseen = unseen or list(self.names.values()).count(self.names.get(id(args[0]))) != 1
        if unseen or any(i not in self.names and _storage(x) in self.made for i, x in given.items()):
            self.faithful = False
        if operation.is_view and not varying and {*map(_storage, _flat(result))} <= {*map(_storage, given.values())}:
            return result  # a view of memory that stays
        if operation is torch.ops.aten.detach.default:
            self.names[id(result)] = self.names[id(args[0])]
            return result
        arguments = [*map(self.text, args), *(f"{name}={self.text(value)}" for name, value in kwargs.items())]
        call = f"{self.constant(operation.op)}({', '.join(arguments)})"
        new = [x if isinstance(x, Tensor) and id(x) not in given else None for x in _flat(result)]
        targets = [self.name(x) for x in new]
        if set(targets) - {"_"}:
            call = f"{', '.join(targets)}{',' * isinstance(result, (tuple, list))} = {call}"
        self.lines.append((call, varying.union(targets) - {"_"}))
        return result

    def name(self, x: Tensor | None) -> str:
        """A variable for a tensor that the function has made."""
        if x is None:
            return "_"
        self.made.add(_storage(x))
        return self.names.setdefault(id(x), f"t{len(self.names)}")

    def text(self, value) -> str:
        """An argument as an expression: a variable, a list with variables in it, or a constant."""
        if id(value) in self.names:
            return self.names[id(value)]
        if isinstance(value, (tuple, list)) and any(id(x) in self.names for x in value):
            return f"[{', '.join(map(self.text, value))}]"
        return self.constant(value)

    def constant(self, value) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # otherwise torch imports its compiler first, which takes a second


@functools.lru_cache
def _compiled(program: str):
    return compile(program, "tape", "exec")


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else id(x)


def _flat(value):
    """The leaves of nested tuples, lists and dicts."""
    if isinstance(value, dict):
        value = tuple(value.values())
    return [leaf for x in value for leaf in _flat(x)] if isinstance(value, (tuple, list)) else [value]


@contextlib.contextmanager
def _side_stream(device: str):
    """Where a step runs before it is captured, as CUDA graphs demand. Either stream waits for what the other has begun."""
    if device != "cuda":
        yield
        return
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)


def _captured(step: Callable, device: str) -> Callable:
    """`step` recorded as a CUDA graph: calling the result replays its kernels without launching them one by one."""
    if device != "cuda":
        return step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def world() -> tuple[int, int]:
    """(rank, number of ranks) under torchrun, else (0, 1)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


# ----------------------------------------------------------------------------------------------------------- scoring


@torch.no_grad()
def predict(model: Model, weights: Tensor, data: Data, x: Tensor, index: Sequence[np.ndarray], chunk: int = 0):
    """Logits in eval mode, without touching a random stream or a BatchNorm statistic: a list of (n_k, classes).

    weights (P,) scores every list of samples with one net, in one stream of large batches; (K, P) each with its own.
    """
    if weights.dim() == 1:
        everything = np.concatenate(index) if len(index) else np.empty(0, dtype=np.int64)
        logits = _logits(model, weights[None], data, x, torch.as_tensor(everything, device=model.device)[None])[0]
        return list(logits.split([len(i) for i in index]))
    chunk = 1 if model.plain else chunk or model.default_chunk()
    logits = []
    for begin in range(0, len(index), chunk):
        some = index[begin : begin + chunk]
        padded = np.zeros((len(some), max(len(i) for i in some)), dtype=np.int64)
        for k, i in enumerate(some):
            padded[k, : len(i)] = i
        rows = torch.as_tensor(padded, device=model.device)
        stack = _logits(model, weights[begin : begin + chunk], data, x, rows)
        logits += [stack[k, : len(i)] for k, i in enumerate(some)]
    return logits


def _logits(model, stack, data, x, index, batch=2000):
    """stack (K, P), index (K, n) -> (K, n, classes)."""
    net = model.bind(stack)
    batch = max(1, batch // len(stack))
    parts = [net.head(net.features(data.inputs(x[i], model.dtype))) for i in index.split(batch, dim=1)]
    return torch.cat(parts, 1) if parts else torch.empty(len(stack), 0, data.classes)


@timed("scoring")
def score(model: Model, weights: Tensor, data: Data, shards: Sequence[np.ndarray], chunk: int = 0):
    """Cross-entropy and predicted class of every training sample of each shard: a list of (float64 (n_k,), int64 (n_k,))."""
    scores = []
    for logits, shard in zip(predict(model, weights, data, data.x_train, shards, chunk), shards, strict=True):
        y = data.y_train[torch.as_tensor(shard, device=model.device)]
        losses = F.cross_entropy(logits.double(), y, reduction="none")
        scores.append((losses.cpu().numpy(), logits.argmax(1).cpu().numpy()))
    return scores


@timed("evaluation")
def evaluate(model: Model, weights: Tensor, data: Data) -> dict[str, float]:
    """Accuracy and mean loss on the test set, in percent and nats; for a stack (K, P) their mean over the K nets."""
    test = np.arange(len(data.y_test))
    stack = weights[None] if weights.dim() == 1 else weights
    accuracy, loss = [], []
    for theta in stack:
        logits = predict(model, theta, data, data.x_test, [test])[0].double()
        accuracy.append((logits.argmax(1) == data.y_test).double().mean().item() * 100)
        loss.append(F.cross_entropy(logits, data.y_test).item())
    return {"accuracy": float(np.mean(accuracy)), "loss": float(np.mean(loss))}


# ------------------------------------------------------------------------------------------------------------- bases


class FedAvg:
    """x <- sum_i p_i y_i (McMahan et al., 2017). The other bases change what their docstrings say.

    `client` gives the keyword arguments of `train`; `server` the next x, with x (n,), y (K, n) the trainable weights and p
    the weights |D_i| / sum over the selected. `state` holds all that must survive to the next round, per client id.
    """

    defaults: dict[str, float] = {}

    def __init__(self, config, model: Model, clients: int):
        self.config, self.model, self.clients, self.state = config, model, clients, {}
        self.mu = self.defaults.get("mu", 0.0) if config.mu < 0 else config.mu
        self.server_lr = config.server_lr or self.defaults.get("server_lr", 1.0)

    def client(self, x: Tensor, clients: np.ndarray) -> dict:
        return {}

    def server(self, x: Tensor, y: Tensor, p: Tensor, update: Update, clients: np.ndarray) -> Tensor:
        return p @ y

    def start(self, x: Tensor, clients: np.ndarray) -> Tensor:
        """The weights that the clients begin from."""
        return x

    def models(self, x: Tensor) -> Tensor:
        """The net, or the nets, that are tested."""
        return x

    @timed("aggregation")
    def aggregate(self, x: Tensor, update: Update, clients: np.ndarray, sizes) -> Tensor:
        """x^{t+1} (P,) from the update of `clients` that hold `sizes` samples. BatchNorm statistics are averaged."""
        n = self.model.trainable
        p = torch.as_tensor(np.asarray(sizes) / np.sum(sizes), device=x.device, dtype=x.dtype)
        return torch.cat([self.server(x[:n], update.weights[:, :n], p, update, clients), p @ update.weights[:, n:]])

    def recall(self, name: str, clients: np.ndarray) -> Tensor:
        """Rows of the per-client vectors `name` (K, n), zero for a client that has none yet."""
        held = self.state.setdefault(name, {})
        zero = torch.zeros(self.model.trainable, device=self.model.device, dtype=self.model.dtype)
        return torch.stack([held.get(int(i), zero) for i in clients])

    def keep(self, name: str, clients: np.ndarray, rows: Tensor) -> None:
        held = self.state.setdefault(name, {})
        for i, row in zip(clients, rows, strict=True):
            held[int(i)] = row.clone()


class FedProx(FedAvg):
    """Gradient += mu (y - x) (Li et al., 2020)."""

    defaults = {"mu": 0.001}

    def client(self, x, clients):
        return {"proximal": self.mu}


class Scaffold(FedAvg):
    """Option II of Karimireddy et al. (2020): y <- y - eta (g - c_i + c).

    x - y is divided by the length of the accumulation vector a_i, so that c_i stays a gradient under momentum too.
    """

    def client(self, x, clients):
        self.state.setdefault("c", torch.zeros_like(x[: self.model.trainable]))
        return {"correction": self.state["c"] - self.recall("c_i", clients)}

    def server(self, x, y, p, update, clients):
        length = torch.as_tensor(update.length, device=x.device, dtype=x.dtype)[:, None]  # sum_k eta_k for plain SGD
        c, c_i = self.state["c"], self.recall("c_i", clients)
        c_new = c_i - c + (x - y) / length  # c_i^+
        self.keep("c_i", clients, c_new)
        self.state["c"] = c + len(clients) / self.clients * (c_new - c_i).mean(0)
        return x + self.server_lr * (y - x).mean(0)


class FedNova(FedAvg):
    """d_i = (x - y_i) / ||a_i||_1; x <- x - (sum_i p_i ||a_i||_1) sum_i p_i d_i (Wang et al., 2020)."""

    def server(self, x, y, p, update, clients):
        length = torch.as_tensor(update.length, device=x.device, dtype=x.dtype)  # eta ||a_i||_1; eta cancels
        d = (x - y) / length[:, None]
        return x - (p @ length) * (p @ d)


class VRLSGD(FedAvg):
    """y <- y - eta (g - Delta_i); after averaging Delta_i += (x_hat - y_i) / (eta k) (Liang et al., 2019).

    Only the clients that took part move their Delta_i; eta k is the length of a_i, so that momentum is accounted for.
    """

    def client(self, x, clients):
        return {"correction": -self.recall("delta", clients)}

    def server(self, x, y, p, update, clients):
        x_hat = p @ y
        length = torch.as_tensor(update.length, device=x.device, dtype=x.dtype)[:, None]
        self.keep("delta", clients, self.recall("delta", clients) + (x_hat - y) / length)
        return x_hat


class FedAdam(FedAvg):
    """delta = sum_i p_i (y_i - x); x += eta m / (sqrt(v) + tau), no bias correction (Reddi et al., 2021)."""

    defaults = {"server_lr": 0.01}
    b1, b2, tau = 0.9, 0.99, 1e-3

    def second_moment(self, v, delta):
        return self.b2 * v + (1 - self.b2) * delta**2

    def server(self, x, y, p, update, clients):
        delta = p @ (y - x)
        m = self.b1 * self.state.get("m", torch.zeros_like(x)) + (1 - self.b1) * delta
        v = self.second_moment(self.state.get("v", torch.full_like(x, self.tau**2)), delta)
        self.state.update(m=m, v=v)
        return x + self.server_lr * m / (v.sqrt() + self.tau)


class FedAdagrad(FedAdam):
    """FedAdam with v + delta^2 and no first moment."""

    b1 = 0.0

    def second_moment(self, v, delta):
        return v + delta**2


class FedYogi(FedAdam):
    """FedAdam with v - (1 - b2) delta^2 sign(v - delta^2)."""

    def second_moment(self, v, delta):
        return v - (1 - self.b2) * delta**2 * torch.sign(v - delta**2)


class Moon(FedAvg):
    """Loss + mu l_con: features near the global net's, far from the client's own previous net's (Li et al., 2021)."""

    defaults = {"mu": 5.0}
    temperature = 0.5

    def client(self, x, clients):
        held = self.state.setdefault("previous", {})
        known = torch.tensor([float(int(i) in held) for i in clients], device=x.device, dtype=x.dtype)
        previous = torch.stack([held.get(int(i), x) for i in clients])
        return {"penalty": self.contrast, "frozen": {"global": x, "previous": previous}, "per_client": {"known": known}}

    def contrast(self, step) -> Tensor:
        """l_con = -log(e^{sim(z, z_glob)/T} / (e^{sim(z, z_glob)/T} + e^{sim(z, z_prev)/T})), 0 without a previous net."""
        with torch.no_grad():
            z_glob, z_prev = (step.frozen[name].features(step.inputs) for name in ("global", "previous"))
        similar = torch.stack([F.cosine_similarity(step.features, z, dim=-1) for z in (z_glob, z_prev)], -1)
        l_con = -F.log_softmax(similar / self.temperature, -1)[..., 0]  # (K, B)
        return self.mu * step.extra["known"] * (step.mean * l_con).sum(1)

    def aggregate(self, x, update, clients, sizes):
        self.keep("previous", clients, update.weights)
        return super().aggregate(x, update, clients, sizes)


class Solo(FedAvg):
    """No aggregation: every client trains its own net on; the mean accuracy over clients is reported."""

    def start(self, x, clients):
        held = self.state.setdefault("own", {})
        return torch.stack([held.get(int(i), x) for i in clients])

    def aggregate(self, x, update, clients, sizes):
        self.keep("own", clients, update.weights)
        return x

    def models(self, x):
        return self.start(x, np.arange(self.clients))


BASES = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "fednova": FedNova,
    "vrlsgd": VRLSGD,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "moon": Moon,
    "solo": Solo,
}


# ----------------------------------------------------------------------------------------------------- configuration


def opt(default, help, *, choices=(), low=None, above=None, high=None, below=None, infinite=False, many=False, kind=None):
    """A dataclass field that is also a flag: its default, meaning and allowed values.

    low <= value <= high, above < value < below. `many` takes one or more values; `kind` is the type where the default is None.
    """
    kind = kind or type(default[0] if many else default)
    limits = {"low": low, "above": above, "high": high, "below": below}
    meta = {"help": help, "choices": tuple(choices), "infinite": infinite, "many": many, "kind": kind, **limits}
    return dataclasses.field(default=default, metadata=meta)


@dataclass
class Config:
    """The flags every script has, in the order of --help. A script's own Config adds the algorithm's and other defaults."""

    dataset: str = opt("digits", f"{', '.join(DATASETS)}, a path to an .npz file or to a folder with train/ and test/")
    data_dir: str = opt("data", "where torchvision's data sets are, or are downloaded to")
    model: str = opt("lenet5", "the net", choices=NETS)
    width: int = opt(0, "hidden width of alexnet (0: 4096) and lstm (0: 512)", low=0, high=65536)
    partition: str = opt(
        "dirichlet", "samples over clients", choices=("iid", "label-skew", "dirichlet", "dirichlet-client", "natural")
    )
    alpha: float = opt(0.1, "Dirichlet concentration: small is heterogeneous", low=1e-3, high=1e6)
    min_size: int = opt(1, "fewest samples of a client; poorer ones are filled from the largest", low=1, high=1_000_000)
    parts: int = opt(
        0, "cut the data into this many parts and keep `clients` of them (0: no part is left out)", low=0, high=10_000_000
    )
    clients: int = opt(100, "M, all clients", low=1, high=10_000_000)
    clients_per_round: int = opt(10, "clients selected in a round", low=1, high=1_000_000)
    rounds: int = opt(100, "communication rounds", low=1, high=1_000_000)
    epochs: int = opt(10, "E, local epochs", low=1, high=100_000)
    batch_size: int = opt(10, "B, local batch", low=1, high=65_536)
    lr: float = opt(0.01, "eta, the clients' learning rate", above=0)
    momentum: float = opt(0.0, "of the clients' SGD, fresh every round (0: none)", low=0, below=1)
    weight_decay: float = opt(0.0, "of the clients' SGD (0: none)", low=0)
    base: str = opt("fedavg", "client correction and server rule", choices=BASES)
    mu: float = opt(-1.0, "of fedprox and moon (-1: the base's own default; 0: no term)", low=-1)
    server_lr: float = opt(0.0, "of scaffold, fedadagrad, fedadam and fedyogi (0: the base's own default)", low=0)
    seed: int = opt(202207, "of every random stream", low=0, high=2**31 - 1)
    trials: int = opt(3, "repetitions, each with its own partition, initial weights and draws", low=1, high=10_000)
    jobs: int = opt(1, "trials and methods trained at once, in processes of their own", low=1, high=1024)
    threads: int = opt(0, "torch threads of each process (0: the processor's cores shared out)", low=0, high=1024)
    device: str = opt("auto", "auto takes the GPU where there is one", choices=("auto", "cpu", "cuda"))
    dtype: str = opt("float32", "of weights and arithmetic", choices=("float32", "float64"))
    chunk: int = opt(0, "clients trained as one net (0: chosen for the net and device)", low=0, high=1_000_000)
    eval_every: int = opt(1, "rounds between tests; the last round is always tested", low=1, high=1_000_000)
    on_nonfinite: str = opt(
        "stop", "a NaN or infinite client update: end the run, or leave the client out", choices=("stop", "drop")
    )
    profile: bool = opt(False, "print where the time of the rounds went (with --jobs 1)")
    out: str = opt("", "folder of the results (default: runs/<script>; overwritten)")
    resume: bool = opt(False, "continue the run in --out, with the same flags")

    def check(self) -> None:
        """Raises UsageError where flags contradict one another."""
        if self.clients_per_round > self.clients:
            raise UsageError(f"--clients-per-round {self.clients_per_round}: more than --clients {self.clients}")
        if -1 < self.mu < 0:
            raise UsageError(f"--mu {self.mu}: wanted a number >= 0, or -1 for the base's own default")
        if self.parts and self.parts < self.clients:
            raise UsageError(f"--parts {self.parts}: fewer than --clients {self.clients}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda: torch finds no GPU here")

    def samples(self, n: int) -> int:
        """How many of the training set's n samples the clients hold."""
        return n


FREE_ON_RESUME = ("resume", "out", "jobs", "profile")  # these change no result


def parse(config_class: type, presets: dict, doc: str, argv: Sequence[str] | None = None):
    """Flags -> (config, sweep). A preset is (description, {flag: value}, {flag: values to sweep}); explicit flags win.

    Exits with 2 and one line on a wrong flag, with 0 after --help and --list-presets.
    """
    parser = _Parser(description=doc.strip().split("\n")[0], allow_abbrev=False, formatter_class=_Formatter)
    groups = [parser.add_argument_group(name) for name in ("common", "this algorithm")]
    base_fields = {f.name: f for f in dataclasses.fields(Config)}
    fields = [f for f in dataclasses.fields(config_class) if f.name in base_fields]
    fields += [f for f in dataclasses.fields(config_class) if f.name not in base_fields]
    for f in fields:
        _add_flag(groups[f.name not in base_fields], f, (f if f.metadata else base_fields[f.name]).metadata)
    groups[0].add_argument(
        "--preset", choices=list(presets), default=None, help="an experiment of the paper; flags given beside it win"
    )
    groups[0].add_argument("--list-presets", action="store_true", help="print the presets and exit")
    given = vars(parser.parse_args(argv))
    preset, listing = given.pop("preset"), given.pop("list_presets")
    if listing:
        for name, (description, flags, sweep) in presets.items():
            print(f"{name:<16} {description}\n{'':16} {_flags(flags)} {_flags(sweep)}".rstrip())
        sys.exit(0)
    _, flags, sweep = presets[preset] if preset else ("", {}, {})
    for name, values in given.items():
        if isinstance(values, list) and len(set(values)) < len(values):
            parser.error(f"argument --{name.replace('_', '-')}: a value is given twice")
    config = config_class(**{**flags, **given})
    if config.threads == 0:  # the number is part of what a run is: sums depend on it
        config.threads = max(1, (os.cpu_count() or 1) // (config.jobs * world()[1]))
    config.check()
    return config, {name: values for name, values in sweep.items() if name not in given}


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog):
        super().__init__(prog, max_help_position=30, width=120)


def _flags(flags: dict) -> str:
    """A preset's flags as they would be typed."""
    words = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words.append(f"--{flag} {' '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}")
    return " ".join(words)


def _add_flag(group, f, meta) -> None:
    name, default = "--" + f.name.replace("_", "-"), f.default
    shown = " ".join(map(str, default)) if meta["many"] else default
    text = f"{meta['help']} [{'nothing' if shown in ('', None) else shown}]".replace("%", "%%")
    if meta["kind"] is bool:
        group.add_argument(name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        return
    convert = functools.partial(_convert, meta)
    nargs = {"nargs": "+"} if meta["many"] else {}
    metavar = "{" + ",".join(meta["choices"]) + "}" if meta["choices"] else meta["kind"].__name__.upper()
    group.add_argument(name, type=convert, default=argparse.SUPPRESS, help=text, metavar=metavar, **nargs)


def _convert(meta: dict, text: str):
    kind, words = meta["kind"], {int: "an integer", float: "a number", str: "a word"}
    if meta["choices"]:
        if text not in meta["choices"]:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(meta['choices'])}")
        return text
    allowed = [
        f"{sign} {meta[limit]}"
        for limit, sign in (("low", ">="), ("above", ">"), ("high", "<="), ("below", "<"))
        if meta[limit] is not None
    ]
    wanted = " ".join([words[kind], " and ".join(allowed)]).strip()
    try:
        value = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None
    if kind is str:
        return value
    low, above, high, below = (meta[limit] for limit in ("low", "above", "high", "below"))
    if kind is float and not math.isfinite(value) and not (meta["infinite"] and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not {wanted}")
    inside = (low is None or value >= low) and (above is None or value > above) and (high is None or value <= high)
    inside = inside and (below is None or value < below)
    if not inside:
        raise argparse.ArgumentTypeError(f"{text} is not {wanted}")
    return value


# --------------------------------------------------------------------------------------------------------------- run


def client_shards(config: Config, data: Data, streams: Streams) -> list[np.ndarray]:
    """The trial's partition as index arrays, one per client; says so where samples had to be moved."""
    count = config.parts or config.clients
    labels = data.y_train.cpu().numpy()
    shards, moved = partition(config.partition, labels, count, config.alpha, streams("partition"), config.min_size, data.owner)
    if moved:
        say(f"partition: {moved} of {len(labels)} samples moved so that every client has at least {config.min_size}")
    kept = streams("parts").permutation(count)[: config.clients] if config.parts else range(count)
    return [shards[i] for i in kept]


def select(config: Config, count: int, streams: Streams, t: int) -> np.ndarray:
    """`count` of the clients, uniformly without replacement, the same in every arm."""
    return np.sort(streams("select", t).choice(config.clients, count, replace=False))


def epochs_of_batches(shard: np.ndarray, epochs: int, batch_size: int, rng: np.random.Generator) -> np.ndarray:
    """E passes over the shard, each in a new order: (E ceil(n / B), B), the last batch of a pass filled with -1."""
    steps = -(-len(shard) // batch_size)
    batches = np.full((epochs, steps * batch_size), -1, dtype=np.int64)
    for row in batches:
        row[: len(shard)] = rng.permutation(shard)
    return batches.reshape(-1, batch_size)


def train_centrally(model: Model, data: Data, epochs: int, config: Config, streams: Streams) -> Tensor:
    """theta (P,) after SGD on the whole training set with the clients' batch size, learning rate, momentum and decay.

    Raises NonFiniteError when it diverges.
    """
    everything = np.arange(len(data.y_train))
    batches = [epochs_of_batches(everything, epochs, config.batch_size, streams("central batches"))]
    flags = {"momentum": config.momentum, "weight_decay": config.weight_decay, "seeds": [streams.seed("central dropout")]}
    theta = train(model, model.init(streams.seed("central init")), data, batches, lr=config.lr, **flags).weights[0]
    model.memory = None  # it would keep room for so many steps for every client
    if not torch.isfinite(theta).all():
        raise NonFiniteError("the expert, trained centrally, is not finite. Try a smaller --lr")
    return theta


def say(line: str) -> None:
    """Prints beside a progress bar, once among the ranks."""
    from tqdm import tqdm

    if world()[0] == 0:
        tqdm.write(line, file=sys.stderr)


class Run:
    """One training run: one method, one setting, one trial. It keeps the rows of metrics.csv and the checkpoint."""

    def __init__(self, config: Config, method: str, setting: str, trial: int, folder: Path):
        self.config, self.method, self.setting, self.trial, self.folder = config, method, setting, trial, folder
        self.streams = Streams(config.seed, trial)
        self.rows: list[dict] = []
        self.uploads, self.dropped, self.seconds, self.started = 0, 0, 0.0, time.perf_counter()

    @property
    def path(self) -> Path:
        label = "-".join(part for part in (self.setting.replace(" ", "-"), self.method, f"trial{self.trial}") if part)
        return self.folder / "checkpoints" / f"{label}.pt".replace("/", "_")

    def finished(self, method: str) -> dict:
        """The checkpoint of another method in the same setting and trial, for an arm that depends on it."""
        if world()[1] > 1:  # rank 0 may still be writing it
            dist.barrier()
        return load_checkpoint(Run(self.config, method, self.setting, self.trial, self.folder).path, self.config.device)

    def cached(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that all arms of the trial share (an expert, say): made once, then read from the run's folder."""
        label = "-".join(part for part in (self.setting.replace(" ", "-"), name, f"trial{self.trial}") if part)
        path = self.path.with_name(f"{label}.pt".replace("/", "_"))
        missing = [not path.exists()]
        if world()[1] > 1:  # making it is a task of all ranks, so all must agree that it is missing
            dist.broadcast_object_list(missing)
        if missing[0]:
            tensor = make()
            if world()[0] > 0:
                return tensor
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, lambda file: torch.save(tensor, file))
        return torch.load(path, weights_only=True, map_location=resolve_device(self.config.device))

    def rounds(self, state: dict):
        """Yields t = 0 .. rounds - 1. Before the first it restores `state`, after each it saves it.

        All that must survive to the next round is in `state`: weights, the base's state, whatever the algorithm remembers.
        """
        from tqdm import tqdm

        first = 0
        if self.config.resume and self.path.exists():
            saved = load_checkpoint(self.path, self.config.device)
            first, self.rows, self.uploads, self.seconds = (saved[k] for k in ("round", "rows", "uploads", "seconds"))
            _restore(state, saved["state"])
        name = " ".join(part for part in (self.setting, self.method, f"trial {self.trial + 1}/{self.config.trials}") if part)
        quiet = self.config.jobs > 1 or world()[0] > 0
        with tqdm(total=self.config.rounds, initial=first, desc=name, disable=quiet, leave=False, unit="round") as bar:
            for t in range(first, self.config.rounds):
                self.started, self.dropped = time.perf_counter(), 0
                yield t
                self.save(t + 1, state)
                tested = [row["accuracy"] for row in self.rows if row["accuracy"] != ""]
                bar.set_postfix_str(f"accuracy {tested[-1]:.1f}" if tested else "", refresh=False)
                bar.update()

    def due(self, t: int) -> bool:
        """Whether round t is tested."""
        return (t + 1) % self.config.eval_every == 0 or t + 1 == self.config.rounds

    def finite(self, t: int, clients: np.ndarray, update: Update) -> tuple[np.ndarray, Update]:
        """Guards the server: drops the clients whose update is not finite, or stops the run (--on-nonfinite)."""
        good = torch.isfinite(update.weights).all(1).cpu().numpy()
        if good.all():
            return clients, update
        bad = ", ".join(str(i) for i in clients[~good])
        where = f"{self.method} trial {self.trial + 1} round {t + 1}: the update of client {bad} is not finite"
        if self.config.on_nonfinite == "stop" or not good.any():
            raise NonFiniteError(f"{where}; the checkpoint of the last good round stays. Try a smaller --lr")
        say(f"warning: {where}; left out")
        self.dropped = int((~good).sum())
        keep = np.flatnonzero(good)
        return clients[keep], update[keep]

    def record(self, t: int, *, clients: int, accuracy="", loss="", **columns) -> None:
        """Adds round t to metrics.csv. `clients` uploaded an update; further columns are the script's own."""
        self.uploads += clients
        self.seconds += time.perf_counter() - self.started
        row = {
            "method": self.method,
            "setting": self.setting,
            "trial": self.trial,
            "round": t + 1,
            "accuracy": accuracy,
            "loss": loss,
        }
        row |= {"clients": clients, "uploads": self.uploads, "dropped": self.dropped, "seconds": round(self.seconds, 3)}
        self.rows.append(row | columns)

    @timed("checkpoint")
    def save(self, t: int, state: dict) -> None:
        if world()[0] == 0:
            content = {"round": t, "rows": self.rows, "uploads": self.uploads, "seconds": self.seconds, "state": state}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, lambda file: torch.save(content, file))


def _restore(state: dict, saved: dict) -> None:
    """Fills `state` in place, so that objects which share its inner dicts (the base's state) see the restored values."""
    for key in list(state):
        if key not in saved:
            del state[key]
    for key, value in saved.items():
        if isinstance(value, dict) and isinstance(state.get(key), dict):
            _restore(state[key], value)
        else:
            state[key] = value


def write_atomically(path: Path, write: Callable) -> None:
    """Writes to a temporary file, flushes it to the disk and renames it: a kill leaves the old file or the new one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # parallel jobs may write the same cached tensor
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load_checkpoint(path: Path, device: str = "cpu") -> dict:
    """Raises UsageError where the file is damaged, and leaves it untouched."""
    try:
        saved = torch.load(path, weights_only=True, map_location=resolve_device(device))
        return {name: saved[name] for name in ("round", "rows", "uploads", "seconds", "state")}
    except FileNotFoundError:
        raise UsageError(f"no checkpoint at {path}") from None
    except Exception as error:  # torch, zip and pickle each have their own word for a damaged file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"{path}: damaged checkpoint, left as it is ({reason[:120]}); remove it to start this arm anew"
        ) from None


def resolve_device(name: str) -> str:
    """'auto' is the GPU where torch finds one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def setting_up(config: Config) -> tuple[Data, str, torch.dtype]:
    """(data, device, dtype) of a run, with the process's thread count set."""
    torch.set_num_threads(max(config.threads, 1))
    device = resolve_device(config.device)
    return (
        load_data(config.dataset, config.data_dir, device, SIDE.get(config.model)),
        device,
        getattr(torch, config.dtype),
    )


def _work(config, method, setting, trial, folder, federate) -> list[dict]:
    """One run in this process, or its rows where its checkpoint is already complete."""
    run = Run(config, method, setting, trial, folder)
    if config.resume and run.path.exists():
        saved = load_checkpoint(run.path)
        if saved["round"] >= config.rounds:
            return saved["rows"]
    federate(config, setting_up(config)[0], run)
    return run.rows


@contextlib.contextmanager
def ranks_of_torchrun():
    """Joins the process group of `torchrun --nproc-per-node N script.py ...`, if the process was started so."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error) or "onnection" in str(error)):
            raise
        raise RankError(
            f"rank {world()[0]}: another rank is gone ({str(error).splitlines()[0][:100]}); go on with --resume"
        ) from None
    finally:
        dist.destroy_process_group()


def launch(config_class, presets, doc, methods, federate, figure=None, second=(), argv=None) -> None:
    """The command line of a script: flags -> every (setting, method, trial) -> table, metrics.csv, summary.json, PNG.

    methods(config)              -> names of the arms, compared on the same partition, initial weights and draws
    federate(config, data, run)  trains run.method and records its rounds
    figure(rows, config, folder) draws the script's own figures from the rows of metrics.csv
    second                       methods that read another arm's result and so start after the rest
    """
    signal.signal(signal.SIGTERM, _terminated)
    try:
        config, sweep = parse(config_class, presets, doc, argv)
        with ranks_of_torchrun():
            _launch(config, sweep, methods, federate, figure, second, list(sys.argv if argv is None else [sys.argv[0], *argv]))
    except UsageError as error:
        sys.exit(_failed(error, 2))
    except NonFiniteError as error:
        sys.exit(_failed(error, 3))
    except RankError as error:
        sys.exit(_failed(error, 4))
    except (KeyboardInterrupt, _Terminated) as stop:  # before the first round
        sys.exit(stop.status if isinstance(stop, _Terminated) else 130)


def _failed(error: Exception, status: int) -> int:
    print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
    return status


def _launch(config, sweep, methods, federate, figure, second, command) -> None:
    folder = Path(config.out or Path("runs") / Path(command[0]).stem)
    work = [
        (dataclasses.replace(config, **flags), method, setting, trial)
        for setting, flags in _settings(sweep)
        for method in methods(dataclasses.replace(config, **flags))
        for trial in range(config.trials)
    ]
    for each in {repr(each): each for each, *_ in work}.values():
        _possible(each)  # before a folder is touched
    if world()[0] == 0:
        _prepare(folder, config)
    if world()[1] > 1:
        dist.barrier()
    waves = [[w for w in work if w[1] not in second], [w for w in work if w[1] in second]]
    begun, rows = time.perf_counter(), []
    try:
        for wave in waves:
            rows += _parallel(wave, folder, federate, config.jobs)
        if world()[0] > 0:
            return
        _keep(rows, work, folder)
        report(rows, config, folder, command, time.perf_counter() - begun)
        curves(rows, folder / "accuracy.png")
        if figure:
            figure(rows, config, folder)
        if config.profile:
            print(shares(sum(run[-1]["seconds"] for run in _runs(rows))))
        print(f"results: {folder}")
    except (KeyboardInterrupt, _Terminated) as stop:
        runs = [Run(each, method, setting, trial, folder) for each, method, setting, trial in work]
        rows = [row for run in runs if run.path.exists() for row in load_checkpoint(run.path)["rows"]]
        _keep(rows, work, folder)
        again = shlex.join([*(part for part in command if part != "--resume"), "--resume"])
        say(f"\nstopped: {len(rows)} rounds are kept in {folder}. To go on:\n  python {again}")
        sys.exit(stop.status if isinstance(stop, _Terminated) else 130)


def _keep(rows: list[dict], work: list[tuple], folder: Path) -> None:
    """metrics.csv in the order of the arms, whatever the order in which they finished."""
    position = {(setting, method, trial): i for i, (_, method, setting, trial) in enumerate(work)}
    rows.sort(key=lambda row: (position[row["setting"], row["method"], row["trial"]], row["round"]))
    write_csv(folder / "metrics.csv", rows)


class _Terminated(BaseException):
    """SIGTERM, told apart from Ctrl-C."""

    status = 143


def _terminated(*_):
    raise _Terminated


def _settings(sweep: dict):
    """The grid of a preset's sweep: ('alpha=0.05', {'alpha': 0.05}), ...; one empty setting without a sweep."""
    settings = [("", {})]
    for name, values in sweep.items():
        settings = [
            (f"{label} {name}={value}".strip(), {**flags, name: value}) for label, flags in settings for value in values
        ]
    return settings


def _possible(config: Config) -> None:
    """Raises UsageError where data, net, clients or processes do not fit together."""
    config.check()
    data, device, dtype = setting_up(config)
    build_model(config.model, data, device, dtype, config.width)
    n = config.samples(len(data.y_train))
    if config.partition != "natural" and max(config.parts, config.clients) * config.min_size > n:
        raise UsageError(f"--clients {config.clients}: the training set has only {n} samples")
    if config.partition == "natural":
        client_shards(config, data, Streams(config.seed))  # raises where there are too few natural clients
    if world()[1] > 1 and config.jobs > 1:
        raise UsageError("--jobs: under torchrun the ranks share each run; leave --jobs at 1")


def _prepare(folder: Path, config: Config) -> None:
    """The run's folder: a fresh one, or the one to resume, whose flags must be the same."""
    flags = dataclasses.asdict(config)
    path = folder / "config.json"
    with _writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for half_written in (folder / "checkpoints").glob("*.tmp"):
        half_written.unlink()
    if config.resume and path.exists():
        try:
            before = json.loads(path.read_text())
        except ValueError:
            raise UsageError(f"{path}: damaged; cannot resume from it") from None
        for name, value in json.loads(json.dumps(flags)).items():
            if name not in FREE_ON_RESUME and before.get(name) != value:
                flag = name.replace("_", "-")
                raise UsageError(f"--resume: --{flag} was {before.get(name)!r} in {folder}, now it is {value!r}")
    elif config.resume and any((folder / "checkpoints").glob("*.pt")):
        raise UsageError(f"--resume: {folder} has checkpoints but no config.json to compare the flags with")
    elif config.resume:
        say(f"--resume: no run in {folder} yet, starting from the beginning")
    else:
        for old in (folder / "checkpoints").glob("*.pt*"):
            old.unlink()
    with _writable(folder):
        write_atomically(path, lambda file: file.write(json.dumps(flags, indent=1).encode()))


@contextlib.contextmanager
def _writable(folder: Path):
    """A folder that cannot be made or written is the caller's mistake."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}") from None


def _parallel(wave, folder, federate, jobs) -> list[dict]:
    if jobs == 1 or len(wave) < 2:
        return [row for each, method, setting, trial in wave for row in _work(each, method, setting, trial, folder, federate)]
    from joblib import Parallel, delayed
    from tqdm import tqdm

    if federate.__module__ == "__main__":  # workers import the script by name rather than unpickle its functions
        script = importlib.import_module(Path(sys.argv[0]).stem)
        federate = getattr(script, federate.__name__)
        wave = [(script.Config(**dataclasses.asdict(each)), *rest) for each, *rest in wave]
    tasks = (delayed(_work)(each, method, setting, trial, folder, federate) for each, method, setting, trial in wave)
    rows = []
    with tqdm(total=len(wave), unit="run", leave=False) as bar:
        for done in Parallel(n_jobs=jobs, return_as="generator_unordered")(tasks):
            rows += done
            bar.set_postfix_str(f"{done[-1]['setting']} {done[-1]['method']} {done[-1]['accuracy']:.1f}".strip())
            bar.update()
    return rows


def _runs(rows: list[dict]) -> list[list[dict]]:
    """The rows of each (setting, method, trial)."""
    runs: dict[tuple, list[dict]] = {}
    for row in rows:
        runs.setdefault((row["setting"], row["method"], row["trial"]), []).append(row)
    return list(runs.values())


def shares(seconds: float) -> str:
    """Where `seconds` of rounds went, as one line; 'the rest' is schedules and the script's own arithmetic."""
    spent = {name: s for name, s in SHARES.items() if name != "checkpoint"}
    spent["the rest"] = max(seconds - sum(spent.values()), 0.0)
    parts = [f"{name} {100 * s / seconds:.1f} %" for name, s in sorted(spent.items(), key=lambda item: -item[1])]
    return f"profile: {seconds:.1f} s of rounds: {', '.join(parts)}; checkpoints {SHARES.get('checkpoint', 0.0):.1f} s beside"


def write_csv(path: Path, rows: list[dict]) -> None:
    """Columns in the order in which they first appear."""
    columns = list(dict.fromkeys(name for row in rows for name in row))

    def write(file):
        lines = csv.DictWriter(text := _Text(file), columns, restval="", lineterminator="\n")
        lines.writeheader()
        lines.writerows(rows)
        return text

    write_atomically(path, write)


class _Text:
    """The text side of a binary file, for csv."""

    def __init__(self, file):
        self.file = file

    def write(self, text):
        self.file.write(text.encode())


def per_trial(rows: list[dict], setting: str, method: str) -> dict[str, np.ndarray]:
    """Each trial's final, mean-of-last-ten-rounds and best accuracy, uploads and seconds: arrays (trials,)."""
    trials: dict[int, list[dict]] = {}
    for row in rows:
        if (row["setting"], row["method"]) == (setting, method):
            trials.setdefault(row["trial"], []).append(row)
    figures = {name: [] for name in ("final", "last10", "best", "uploads", "seconds")}
    for _, own in sorted(trials.items()):
        tested = [(row["round"], row["accuracy"]) for row in own if row["accuracy"] != ""]
        last = own[-1]["round"]
        figures["final"].append(tested[-1][1])
        figures["last10"].append(np.mean([a for t, a in tested if t > last - 10]))
        figures["best"].append(max(a for _, a in tested))
        figures["uploads"].append(own[-1]["uploads"])
        figures["seconds"].append(own[-1]["seconds"])
    return {name: np.array(values, dtype=float) for name, values in figures.items()}


def paired(a: np.ndarray, b: np.ndarray) -> dict[str, float | None]:
    """Mean of a - b over trials with its two-sided 95 % Student interval (None for one trial)."""
    from scipy.stats import t

    d = a - b
    if len(d) < 2:
        return {"mean": float(d.mean()), "low": None, "high": None, "trials": len(d)}
    half = t.ppf(0.975, len(d) - 1) * d.std(ddof=1) / math.sqrt(len(d))
    return {"mean": float(d.mean()), "low": float(d.mean() - half), "high": float(d.mean() + half), "trials": len(d)}


def interval(d: dict) -> str:
    """'+1.20 [+0.30, +2.10]' from what `paired` returns; without the brackets for one trial."""
    return f"{d['mean']:+.2f}" + ("" if d["low"] is None else f" [{d['low']:+.2f}, {d['high']:+.2f}]")


def spread(values: np.ndarray) -> dict[str, float]:
    """Mean and sample standard deviation (0 for one value)."""
    return {"mean": float(values.mean()), "std": float(values.std(ddof=1)) if len(values) > 1 else 0.0}


def report(rows, config, folder: Path, command, seconds: float) -> dict:
    """Prints the table, final round and mean of the last ten beside each other, and writes summary.json."""
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    summary = {
        "command": shlex.join(["python", Path(command[0]).name, *command[1:]]),
        "device": _device_name(config),
        "versions": _versions(),
        "seconds": round(seconds, 1),
    }
    summary |= {"config": dataclasses.asdict(config), "results": {}, "paired": {}}
    for setting in settings:
        methods = list(dict.fromkeys(row["method"] for row in rows if row["setting"] == setting))
        figures = {method: per_trial(rows, setting, method) for method in methods}
        summary["results"][setting] = {
            m: {n: spread(v) | {"trials": v.tolist()} for n, v in f.items()} for m, f in figures.items()
        }
        print(
            f"\n{setting or config.dataset}: {len(figures[methods[0]]['final'])} trials, {config.rounds} rounds, accuracy in %"
        )
        print(f"{'method':<22}{'final':>15}{'last 10':>15}{'uploads':>10}{'seconds':>9}")
        for method, f in figures.items():
            final, last10 = spread(f["final"]), spread(f["last10"])
            shown = [f"{s['mean']:.2f} +- {s['std']:.2f}" for s in (final, last10)]
            print(f"{method:<22}{shown[0]:>15}{shown[1]:>15}{f['uploads'].mean():>10.0f}{f['seconds'].mean():>9.1f}")
        first, differences = methods[0], {}
        for other in methods[1:]:
            differences[other] = {n: paired(figures[first][n], figures[other][n]) for n in ("final", "last10")}
            final, last10 = differences[other]["final"], differences[other]["last10"]
            print(f"{first} - {other}: final {interval(final)}, last 10 {interval(last10)} (paired, 95 %)")
        summary["paired"][setting] = {f"{first} - {other}": d for other, d in differences.items()}
    write_atomically(folder / "summary.json", lambda file: file.write(json.dumps(summary, indent=1).encode()))
    return summary


def _device_name(config: Config) -> str:
    return (
        torch.cuda.get_device_name()
        if resolve_device(config.device) == "cuda"
        else f"{platform.machine()} CPU, {os.cpu_count()} cores"
    )


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}


COLOURS = ("#1b6ca8", "#d1495b", "#3c9d6b", "#8a8a8a", "#b07aa1", "#edae49", "#00798c", "#5f4b66", "#a44a3f", "#2e4057")


def new_figure(columns: int = 1, rows: int = 1, width: float = 5.0, height: float = 3.6):
    """(figure, axes (rows, columns)) in the project's style; close it with `save_figure`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "font.size": 9,
    }
    style |= {"legend.frameon": False, "axes.prop_cycle": plt.cycler(color=COLOURS)}
    plt.rcParams.update(style)
    return plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained")


def save_figure(figure, path: Path) -> None:
    """Writes the PNG and frees the figure."""
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=150)
    plt.close(figure)


def series(rows: list[dict], setting: str, method: str, column: str) -> tuple[np.ndarray, np.ndarray]:
    """A column over rounds: (rounds (R,), values (trials, R)), at the rounds where it is filled."""
    own = [row for row in rows if row["setting"] == setting and row["method"] == method and row.get(column, "") != ""]
    rounds = sorted({row["round"] for row in own})
    trials = sorted({row["trial"] for row in own})
    value = {(row["trial"], row["round"]): row[column] for row in own}
    return np.array(rounds), np.array([[value.get((k, t), np.nan) for t in rounds] for k in trials], dtype=float)


def draw(axis, rows, setting: str, methods: Sequence[str], column: str) -> None:
    """Mean over trials of a column by round, with +- one standard deviation shaded."""
    for method, colour in zip(methods, COLOURS * 3, strict=False):
        rounds, values = series(rows, setting, method, column)
        if len(rounds) == 0:
            continue
        mean = values.mean(0)
        axis.plot(rounds, mean, label=method, color=colour, linewidth=1.5)
        if len(values) > 1:
            std = values.std(0, ddof=1)
            axis.fill_between(rounds, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)


def curves(rows: list[dict], path: Path, column: str = "accuracy", label: str = "test accuracy (%)") -> None:
    """One panel per setting, one curve per method."""
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    across = min(len(settings), 3)
    figure, axes = new_figure(across, -(-len(settings) // across))
    for axis, setting in zip(axes.flat, settings, strict=False):
        draw(axis, rows, setting, list(dict.fromkeys(row["method"] for row in rows if row["setting"] == setting)), column)
        axis.set(title=setting, xlabel="round", ylabel=label)
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis in axes.flat[len(settings) :]:
        axis.set_visible(False)
    handles, methods = axes.flat[0].get_legend_handles_labels()
    beside = {"loc": "upper left", "bbox_to_anchor": (1.01, 1)} if len(methods) > 6 else {}  # inside it would hide curves
    axes.flat[across - 1 if beside else 0].legend(handles, methods, **beside)
    save_figure(figure, path)
