"""Data, nets, the trainer of many clients at once, and the bases: what it takes to train and to aggregate, and nothing else.

The pivot is that *a curriculum is an index schedule*: which samples a client sees at local step t is an integer array, built
before training starts, and `train` follows it without a branch. A net's weights are one flat vector theta of P floats; those
of K clients are one (K, P) matrix. So aggregation, control variates and moments are the vector arithmetic that papers print.

Rooms, in this order: random streams | data | partitions | nets | trainer | scoring | bases | a federation's rounds.
"""

import collections
import contextlib
import contextvars
import copy
import ctypes
import functools
import gc
import math
import os
import runpy
import sys
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

gc.freeze()  # the collector need not walk through torch's own objects again and again: 3 % of a round
if sys.platform == "linux":  # keep large buffers in the heap: returning their pages after every step costs a third of it
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, mallopt = -1, -3, ctypes.CDLL(None).mallopt
    mallopt(M_TRIM_THRESHOLD, 1 << 30)
    mallopt(M_MMAP_THRESHOLD, 1 << 30) or mallopt(M_MMAP_THRESHOLD, 1 << 25)  # the most that an older glibc takes


def trim() -> None:
    """Gives what is free in the heap back to the system: rounds of unlike sizes leave gaps, in time thrice what one takes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


class UsageError(Exception):
    """A mistake of the caller (flag, file, size). The command line shows it as one line and exits with 2."""


class NonFiniteError(Exception):
    """A client's update holds NaN or infinity. The command line shows it as one line and exits with 3."""


def first_line(error: BaseException) -> str:
    """The beginning of what an error says, or its name."""
    return (str(error) or type(error).__name__).splitlines()[0][:300]


class Streams:
    """Independent generators keyed on (seed, trial, purpose, round, client, ...).

    No draw depends on how many were made before it, so testing more often, another order of the arms, more processes or a
    resumed run change no bit. One purpose is always used with the same number of keys.
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
    """A data set on the device: uint8 images (n, H, W, C) or int64 text (n, L), each sample a label in 0 .. classes - 1."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    mean: Tensor | None = None  # (C,), as std: the training images' moments, in units of a pixel
    std: Tensor | None = None
    owner: np.ndarray | None = None  # (n,): each training sample's natural client (speaking role, celebrity), if any
    ready: dict = field(init=False, default_factory=dict, repr=False)

    @functools.cached_property
    def checksum(self) -> int:
        """CRC-32 of all samples, labels and natural clients: what was trained on other data is not resumed."""
        parts = [part.cpu().numpy() for part in (self.x_train, self.y_train, self.x_test, self.y_test)]
        parts += [] if self.owner is None else [np.unique(self.owner, return_inverse=True)[1]]  # names may be text
        return functools.reduce(lambda crc, part: zlib.crc32(part, crc), parts, 0)

    def images(self, split: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """What the nets read of 'train' or 'test': images normalised per channel, (n, H, W, C); text as it is. Made once."""
        x = self.x_train if split == "train" else self.x_test
        if x.dtype == torch.int64:
            return x
        if (split, dtype) not in self.ready:
            self.ready[split, dtype] = x.to(dtype).sub_(self.mean.to(dtype)).div_(self.std.to(dtype))
        return self.ready[split, dtype]


def inputs(x: Tensor) -> Tensor:
    """What a net takes: images (K, B, H, W, C) -> (B, K*C, H, W); text (K, B, L) -> (B, L), K = 1.

    Channels lie last where clients are stacked, first for a single client: by measurement each is the faster one there.
    """
    if x.dtype == torch.int64:
        return x[0]
    k, b, h, w, c = x.shape
    if k == 1:
        return x[0].permute(0, 3, 1, 2).contiguous()
    return x.permute(1, 2, 3, 0, 4).contiguous().view(b, h, w, k * c).permute(0, 3, 1, 2)


CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"  # LEAF's 80
SEQUENCE = 80  # characters read before the one to predict


def read_digits(root: Path) -> tuple:
    """scikit-learn's 1,797 real 8x8 digits, split 80/20 within each class, always the same, enlarged bilinearly to 28x28."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x = torch.from_numpy(x).float().view(-1, 1, 8, 8) * (255 / 16)
    x = F.interpolate(x, size=28, mode="bilinear").round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.2, stratify=y, random_state=0)
    return x_train, y_train, x_test, y_test


def read_torchvision(root: Path, kind: str, **options) -> list:
    """MNIST, Fashion-MNIST, EMNIST, CIFAR-10/100, downloaded where absent, in the published order."""
    from torchvision import datasets

    parts = []
    for train in (True, False):
        part = getattr(datasets, kind)(root, train=train, download=True, **options)
        parts += [np.asarray(part.data), np.asarray(part.targets) - (options.get("split") == "letters")]  # these count from 1
    return parts


def read_celeba(root: Path) -> tuple:
    """'Smiling' on 84x84 faces; the clients are the celebrities."""
    from torchvision import datasets, transforms

    resize, parts = transforms.Compose([transforms.CenterCrop(178), transforms.Resize(84)]), []
    for split in ("test", "train"):
        part = datasets.CelebA(root, split=split, target_type="attr", transform=resize, download=True)
        smiling = part.attr[:, part.attr_names.index("Smiling")].numpy()
        parts = [np.stack([np.asarray(image) for image, _ in part]), smiling, *parts]
    return (*parts, part.identity[:, 0].numpy())


def read_shakespeare(root: Path) -> tuple:
    """Next-character samples of every `SPEAKER:` role, in windows that do not overlap; the last fifth of each role is test.

    A character outside LEAF's 80 is read as a space.
    """
    path = root / "tinyshakespeare.txt" if root.is_dir() else root
    roles = collections.defaultdict(list)
    for block in path.read_text(encoding="utf-8", errors="replace").split("\n\n"):
        speaker, colon, speech = block.strip().partition(":\n")
        if colon:
            roles[speaker].append(speech)
    code = {c: i for i, c in enumerate(CHARACTERS)}
    windows, owner = ([], []), []
    for role, speeches in enumerate(roles.values()):
        text = np.array([code.get(c, code[" "]) for c in "\n".join(speeches)])
        for test, part in enumerate(np.split(text, [len(text) * 4 // 5])):
            starts = range(0, len(part) - SEQUENCE, SEQUENCE)
            windows[test].extend(part[s : s + SEQUENCE + 1] for s in starts)
            owner += [role] * len(starts) * (not test)
    if not all(windows):
        raise ValueError(f"{path} holds no 'SPEAKER:' block of more than {SEQUENCE * 5} characters")
    train, test = map(np.stack, windows)
    return train[:, :-1], train[:, -1], test[:, :-1], test[:, -1], np.array(owner)


def read_tree(root: Path) -> list:
    """train/ and test/ with a folder of 8-bit images for each class, in the order of their names, as torchvision reads them."""
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    parts, classes = [], None
    for split in (root / "train", root / "test"):
        if links := [p for p in split.rglob("*") if p.is_symlink() and p.parent.resolve().is_relative_to(p.resolve())]:
            raise ValueError(f"{links[0]} links to a folder that it lies in")
        names = sorted(folder.name for folder in split.iterdir() if folder.is_dir() and not folder.name.startswith("."))
        files = make_dataset(split, {name: label for label, name in enumerate(names)}, IMG_EXTENSIONS)  # (path, label) of each
        shown = [file for file in files if f"{os.sep}." not in file[0][len(str(split)) :]]
        if hidden := sorted({*files} - {*shown}):
            print(f"{split}: skipped {len(hidden)} hidden images, such as {hidden[0][0]}", file=sys.stderr)
        images, labels = [read_image(path) for path, _ in shown], np.array([label for _, label in shown])
        if len(np.unique(labels)) < len(names) or classes not in (None, names):
            raise ValueError("train/ and test/ must hold the same classes, and images of each")
        classes = names
        parts += [np.stack(images), labels]
    return parts


def read_image(path: Path) -> np.ndarray:
    """uint8 (H, W, 3). Raises ValueError for a mode with more than 8 bits, which PIL would clip to white."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                if image.mode.startswith(("I", "F")):
                    raise ValueError(f"mode {image.mode} has more than 8 bits a channel; convert it first")
                return np.asarray(image.convert("RGB"))
    except Exception as error:  # PIL has a word of its own for every damage
        raise ValueError(f"{path}: {error}") from None


def read_npz(path: Path) -> list:
    """x_train, y_train, x_test, y_test; owner, if there are natural clients. uint8, or floats in [0, 1]."""
    with np.load(path, allow_pickle=False) as file:
        return [file[part] for part in ("x_train", "y_train", "x_test", "y_test", "owner")[: 4 + ("owner" in file)]]


CRC32 = {"mnist": 0x3528FDDB, "fmnist": 0xC9293D1E}  # of the published pixels and labels: their raw files carry no checksum
ONLINE = "in --data-dir {} or connect to the network"
DATASETS = {  # the reader, torchvision's class and options, and what to put where when it is not found
    "digits": (read_digits, {}, ""),
    "mnist": (read_torchvision, {"kind": "MNIST"}, f"MNIST/raw/*-ubyte {ONLINE}"),
    "fmnist": (read_torchvision, {"kind": "FashionMNIST"}, f"FashionMNIST/raw/*-ubyte {ONLINE}"),
    "emnist": (read_torchvision, {"kind": "EMNIST", "split": "letters"}, f"EMNIST/raw/emnist-letters-*-ubyte {ONLINE}"),
    "emnist-byclass": (read_torchvision, {"kind": "EMNIST", "split": "byclass"}, f"EMNIST/raw/emnist-byclass-*-ubyte {ONLINE}"),
    "cifar10": (read_torchvision, {"kind": "CIFAR10"}, f"cifar-10-batches-py/ {ONLINE}"),
    "cifar100": (read_torchvision, {"kind": "CIFAR100"}, f"cifar-100-python/ {ONLINE}"),
    "celeba": (read_celeba, {}, f"celeba/img_align_celeba/ and celeba/*.txt {ONLINE}"),
    "shakespeare": (read_shakespeare, {}, "a text of 'SPEAKER:' blocks at --data-dir {}/tinyshakespeare.txt"),
}


@functools.lru_cache(maxsize=2)
def load_data(name: str, root: str = "data", device: str = "cpu", size: int | None = None) -> Data:
    """The data set `name`: one of DATASETS, an .npz file (`read_npz`) or a folder with train/ and test/. Read once per process.

    Smaller images are padded with black to size x size. Raises UsageError when the data is absent, damaged or ill-formed.
    """
    if name not in DATASETS and not os.path.isdir(name) and not (name.endswith(".npz") and os.path.isfile(name)):
        raise UsageError(f"--dataset {name[:200]}: not one of {', '.join(DATASETS)}, nor an .npz file or folder that exists")
    read, options, place = DATASETS.get(name) or (read_tree if os.path.isdir(name) else read_npz, {}, "")
    try:
        arrays = read(Path(root if name in DATASETS else name), **options)
        if name in CRC32 and zlib.crc32(b"".join(arrays)) != CRC32[name]:
            raise ValueError("its pixels or labels are not the published ones: the checksum differs")
        return resident(*arrays, device=device, size=size)
    except Exception as error:  # zip, numpy, PIL and torchvision each have their own word for what is damaged or missing
        hint = place and f"; put {place.format(root)}"
        raise UsageError(f"--dataset {name}: {first_line(error).rstrip(' :')}{hint}") from error


def resident(x_train, y_train, x_test, y_test, owner=None, *, device="cpu", size=None) -> Data:
    """The arrays checked, padded and on the device, with the training images' exact moments. Raises ValueError."""
    tensors = []
    for split, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        if np.issubdtype(x.dtype, np.floating) and x.size and x.min() >= 0 and x.max() <= 1:
            x = np.round(x * 255).astype(np.uint8)
        x = x[..., None] if x.dtype == np.uint8 and x.ndim == 3 else x
        if (x.dtype, x.ndim) not in ((np.uint8, 4), (np.int64, 2)) or x.size == 0:
            raise ValueError(f"x_{split} is {x.dtype} {x.shape}; wanted uint8 or floats in [0, 1], (n, H, W, C)")
        if y.shape != (len(x),) or not np.issubdtype(y.dtype, np.integer) or y.min() < 0 or y.max() >= 10**5:
            raise ValueError(f"y_{split} is {y.dtype} {y.shape}; wanted {len(x)} integers from 0 to 99999")
        if x.dtype == np.int64 and not 0 <= min(x.min(), y.min()) <= max(x.max(), y.max()) < len(CHARACTERS):
            raise ValueError(f"x_{split} is text; wanted codes, and labels, from 0 to {len(CHARACTERS) - 1}")
        x, edge = torch.as_tensor(np.ascontiguousarray(x)), max(0, (size or 0) - x.shape[1]) if x.ndim == 4 else 0
        x = F.pad(x, (0, 0, *(edge // 2, edge - edge // 2) * 2)) if edge else x
        tensors += [x.to(device), torch.as_tensor(y.astype(np.int64), device=device)]
    if tensors[0].shape[1:] != tensors[2].shape[1:] or tensors[0].dtype != tensors[2].dtype:
        raise ValueError(f"x_train is {x_train.shape}, x_test {x_test.shape}; wanted samples alike")
    if y_test.max() > y_train.max():
        raise ValueError(f"y_test holds label {y_test.max()}, y_train only up to {y_train.max()}")
    if owner is not None and np.shape(owner) != np.shape(y_train):
        raise ValueError(f"owner is {np.shape(owner)}; wanted one for each of {len(y_train)} training samples")
    if tensors[0].dtype == torch.int64:
        return Data(*tensors, len(CHARACTERS), owner=owner)
    count = torch.stack([torch.bincount(c.flatten().int(), minlength=256) for c in tensors[0].unbind(-1)]).double()  # (C, 256)
    value, n = torch.arange(256.0, dtype=torch.float64, device=device), count.sum(1)
    mean = count @ value / n
    std = (count @ value**2 / n - mean**2).clamp(min=1).sqrt()
    return Data(*tensors, int(y_train.max()) + 1, mean, std, owner)


# -------------------------------------------------------------------------------------------------------- partitions


PARTITIONS = ("iid", "label-skew", "dirichlet", "dirichlet-client", "dirichlet-ext", "natural")


def partition(kind, labels, clients, alpha, rng, min_size=1, owner=None, own_classes=2) -> tuple[list[np.ndarray], int]:
    """Splits samples over clients: a list of disjoint sorted index arrays, and how many samples had to be moved.

    iid               equal random parts
    label-skew        client i owns class i mod C and own_classes - 1 random others; a class is split equally over its owners
    dirichlet         for each class, shares over clients ~ Dir(alpha) (as the papers cite it)
    dirichlet-client  for each client, shares over classes ~ Dir(alpha) (as the authors of the curricula paper coded it)
    dirichlet-ext     owners as in label-skew; each class is split over its owners with shares ~ Dir(alpha)
    natural           clients are drawn from the data's own (speaking roles, celebrities); the others' samples are left out

    A client below `min_size` is filled, sample by sample, from the largest. Raises UsageError when there are too few samples.
    """
    if kind == "natural":
        if owner is None:
            raise UsageError("--partition natural: this data set has no clients of its own")
        low, (names, counts) = max(min_size, 2), np.unique(owner, return_counts=True)
        able = names[counts >= low]
        if len(able) < clients:
            raise UsageError(f"--clients {clients}: only {len(able)} of the data's own clients hold {low} samples or more")
        return [np.flatnonzero(owner == name) for name in np.sort(rng.choice(able, clients, replace=False))], 0
    if clients * min_size > len(labels):
        raise UsageError(f"--clients {clients}: {len(labels)} training samples are fewer than --min-size {min_size} for each")
    owners, C = rng.permutation(np.arange(len(labels)) % clients), int(labels.max()) + 1  # the client of each sample
    classes = [rng.permutation(np.flatnonzero(labels == c)) for c in range(C)]
    holders = [np.arange(clients)] * C  # of each class
    if kind in ("label-skew", "dirichlet-ext"):
        others = rng.random((clients, C - 1)).argsort(1)[:, : own_classes - 1] + 1
        owned = (np.arange(clients)[:, None] + np.pad(others, ((0, 0), (1, 0)))) % C  # (clients, own_classes)
        holders = [np.flatnonzero((owned == c).any(1)) for c in range(C)]
        holders = [own if len(own) else rng.integers(clients, size=1) for own in holders]  # what nobody drew gets one owner
    if kind in ("label-skew", "dirichlet", "dirichlet-ext"):
        for index, own in zip(classes, holders, strict=True):
            shares = np.full(len(own), 1 / len(own)) if kind == "label-skew" else rng.dirichlet(np.full(len(own), alpha))
            ends = np.cumsum(shares) * len(index)  # owner j gets shares[j] of the class, rounded
            owners[index] = own[np.searchsorted(ends[:-1], np.arange(len(index)) + 0.5)]
    elif kind == "dirichlet-client":  # each slot asks for a class by its client's shares, or takes what is left
        shares, left = rng.dirichlet(np.full(C, alpha), clients), np.array([len(index) for index in classes])
        for slot in owners.copy():
            weight = shares[slot] * (left > 0)
            weight = weight if weight.sum() > 0 else left
            c = np.searchsorted(np.cumsum(weight), rng.random() * weight.sum(), side="right")
            left[c] -= 1
            owners[classes[c][left[c]]] = slot
    index, counts = rng.permutation(len(owners)), np.bincount(owners, minlength=clients)
    shards = [[*own] for own in np.split(index[np.argsort(owners[index], kind="stable")], np.cumsum(counts)[:-1])]
    receivers = np.repeat(np.arange(clients), np.maximum(min_size - counts, 0))
    for client in receivers:  # a random sample of the largest client, of equals the first
        giver = counts.argmax()
        counts[giver] -= 1
        shards[client].append(shards[giver].pop())
    return [np.sort(np.array(own, dtype=int)) for own in shards], len(receivers)


def epochs_of_batches(shard: np.ndarray, epochs: int, batch_size: int, rng: np.random.Generator) -> np.ndarray:
    """E passes over the shard, each in a new order: (E ceil(n / B), B), the last batch of a pass filled with -1."""
    passes = np.stack([rng.permutation(shard) for _ in range(epochs)])
    return np.pad(passes, ((0, 0), (0, -len(shard) % batch_size)), constant_values=-1).reshape(-1, batch_size)


# -------------------------------------------------------------------------------------------------------------- nets
# A net is written once and trains K clients: parameters carry a leading client dimension, images are (B, K*C, H, W),
# features (K, B, F). With K = 1 it is the ordinary net. `features` ends where MOON, FedGen and t-SNE look; `head` is last.


class Conv2d(nn.Conv2d):
    """K convolutions as one grouped one, max-pooled if asked: weight (K, O, C, h, w), x (B, K*C, H, W) -> (B, K*O, H', W')."""

    def __init__(self, *args, pool=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.pool = pool

    def forward(self, x):
        bias = None if self.bias is None else self.bias.flatten()
        how = {"stride": self.stride, "padding": self.padding, "groups": len(self.weight)}
        x = F.conv2d(x, self.weight.flatten(0, 1), None if self.pool else bias, **how)
        # a bias moves the maximum exactly as it moves the candidates; added after them, it costs a quarter
        return pooled(x) + bias[:, None, None] if self.pool else x


def pooled(x: Tensor) -> Tensor:
    """Maxima of 2 x 2. Forward alone, torch's kernel takes 12 times as long as maxima of neighbours, most of a CPU's test."""
    if torch.is_grad_enabled() or 1 in x.shape[-2:]:  # torch refuses an edge of one
        return F.max_pool2d(x, 2)
    x = torch.maximum(x[..., : x.shape[-2] - 1 : 2, :], x[..., 1::2, :])
    return torch.maximum(x[..., : x.shape[-1] - 1 : 2], x[..., 1::2])


class Linear(nn.Linear):
    """K linear maps at once: weight (K, O, F), x (K, B, F) or images (B, K*C, H, W) with F = C H W -> (K, B, O)."""

    def forward(self, x):
        if x.dim() == 4:
            x = x.unflatten(1, (len(self.weight), -1)).transpose(0, 1).flatten(2)
        if len(x) == 1:
            return F.linear(x.squeeze(0), self.weight.squeeze(0), self.bias.squeeze(0)).unsqueeze(0)
        return Affine.apply(x, self.weight, self.bias)


class Affine(torch.autograd.Function):
    """x W^T + b per client. Autograd's own gradient of W lies transposed in memory; copying that costs as much as making it."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        dx = torch.bmm(grad, weight) if ctx.needs_input_grad[0] else None
        dw = torch.bmm(grad.transpose(1, 2), x) if ctx.needs_input_grad[1] else None
        return dx, dw, grad.sum(1) if ctx.needs_input_grad[2] else None


class BatchNorm2d(nn.BatchNorm2d):
    """K batch norms at once, each with the statistics of its own client."""

    def forward(self, x):
        mean, var = self.running_mean.flatten(), self.running_var.flatten()  # views in a stack: they are updated in place
        return F.batch_norm(x, mean, var, self.weight.flatten(), self.bias.flatten(), self.training, self.momentum, self.eps)


class GroupNorm(nn.GroupNorm):
    """K group norms at once: weight and bias (K, C), x (B, K*C, H, W)."""

    def forward(self, x):
        return F.group_norm(x, self.num_groups * len(self.weight), self.weight.flatten(), self.bias.flatten(), self.eps)


class Residual(nn.ModuleList):
    """[body, skip]: body(x) + skip(x)."""

    def forward(self, x):
        return self[0](x) + self[1](x)


class Net(nn.Module):
    """Client-aware layers up to the features (K, B, F), (B, K*F, 1, 1) where a pool ends them, and the linear head on them."""

    def __init__(self, body: list[nn.Module], head: nn.Module):
        super().__init__()
        self.features, self.head = nn.Sequential(*body), head


class Plain(nn.Module):
    """A net of torch's own layers, `lstm` or somebody's, trains one client at a time. Its logits stand for its features.

    What it raises is a UsageError that names it.
    """

    def __init__(self, name: str, net: nn.Module):
        super().__init__()
        self.name, self.net, self.head = name, net, nn.Identity()

    def features(self, x):
        try:
            return self.net(x)[None]
        except Exception as error:
            raise UsageError(f"--model {self.name}: {type(error).__name__}: {first_line(error)}") from error


ReLU = functools.partial(nn.ReLU, inplace=True)


def convolutions(channels, plan, stride=1) -> list[nn.Module]:
    """3x3 convolutions of these widths, each with its ReLU; a negative width is max-pooled. `stride` is the first one's."""
    layers = []
    for size in plan:
        layers += [Conv2d(channels, abs(size), 3, stride, 1, pool=size < 0), ReLU()]
        channels, stride = abs(size), 1
    return layers


def conv_norm(i, o, size=3, stride=1, relu=True) -> list[nn.Module]:
    """A convolution without bias that keeps the size (at stride 1), its batch norm and, if asked, a ReLU."""
    return [Conv2d(i, o, size, stride, size // 2, bias=False), BatchNorm2d(o), *[ReLU()] * relu]


def lenet5(channels, side, classes, width):
    """conv5-6, pool, conv5-16, pool, 120, 84, classes: 62,006 parameters on 3x32x32. It is MOON's SimpleCNN too."""
    convs = [Conv2d(channels, 6, 5, pool=True), ReLU(), Conv2d(6, 16, 5, pool=True), ReLU()]
    flat = 16 * (((side - 4) // 2 - 4) // 2) ** 2
    return Net([*convs, Linear(flat, 120), ReLU(), Linear(120, 84), ReLU()], Linear(84, classes))


def alexnet(channels, side, classes, width):
    """For 32x32 images; `width` is that of the two hidden layers. 23,272,266 parameters (4096), 2,400,586 (128)."""
    width, drop = width or 4096, nn.Dropout(0.05)
    convs = convolutions(channels, (-64, -192, 384, 256, -256), stride=2)
    return Net([*convs, drop, Linear(1024, width), ReLU(), drop, Linear(width, width), ReLU()], Linear(width, classes))


def vgg11(channels, side, classes, width):
    """VGG-11 with 512-512-classes, dropout .2 before and after these hidden layers. 9,750,922 parameters."""
    convs = convolutions(channels, (-64, -128, 256, -256, 512, -512, 512, -512))
    hidden = [nn.Dropout(0.2), Linear(512, 512), ReLU(), Linear(512, 512), ReLU(), nn.Dropout(0.2)]
    return Net([*convs, *hidden], Linear(512, classes))


def resnet9(channels, side, classes, width):
    """prep 64; 128, pool, residual; 256, pool; 512, pool, residual; max pool; classes."""
    body = [*conv_norm(channels, 64), *conv_norm(64, 128), nn.MaxPool2d(2)]
    body += [Residual([nn.Sequential(*conv_norm(128, 128), *conv_norm(128, 128)), nn.Identity()])]
    body += [*conv_norm(128, 256), nn.MaxPool2d(2), *conv_norm(256, 512), nn.MaxPool2d(2)]
    body += [Residual([nn.Sequential(*conv_norm(512, 512), *conv_norm(512, 512)), nn.Identity()]), nn.AdaptiveMaxPool2d(1)]
    return Net(body, Linear(512, classes))


def resnet18(channels, side, classes, width):
    """ResNet-18 with the CIFAR stem: 3x3, stride 1, no pool."""
    body, i = conv_norm(channels, 64), 64
    for o, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        skip = nn.Sequential(*conv_norm(i, o, 1, stride, relu=False)) if stride > 1 else nn.Identity()
        body += [Residual([nn.Sequential(*conv_norm(i, o, 3, stride), *conv_norm(o, o, relu=False)), skip]), ReLU()]
        i = o
    return Net([*body, nn.AdaptiveAvgPool2d(1)], Linear(512, classes))


def fedgen_cnn(channels, side, classes, width):
    """FedGen's classifier with its 32 latent features: 26,434 parameters on 28x28 digits, 25,954 on 84x84 faces."""
    body, pool, sizes = [], side == 84, [channels, 16, 32, 64] if side == 84 else [channels, 6, 16]
    for i, o in zip(sizes, sizes[1:], strict=False):
        body += [Conv2d(i, o, 3, 2, 1), BatchNorm2d(o), ReLU(), *[nn.MaxPool2d(2)] * pool]
        side = (side + 1) // 2 // (2 if pool else 1)
    return Net([*body, Linear(sizes[-1] * side * side, 32)], Linear(32, classes))


class CharLSTM(nn.Module):
    """Embedding of 256, two LSTM layers of `width` (512), the last step's state classifies. 3,739,728 parameters."""

    def __init__(self, channels, side, classes, width):
        super().__init__()
        self.embedding = nn.Embedding(classes, 256)
        self.lstm = nn.LSTM(256, width or 512, num_layers=2, batch_first=True)
        self.drop, self.out = nn.Dropout(0.05), nn.Linear(width or 512, classes)

    def forward(self, x):
        return self.out(self.drop(self.lstm(self.embedding(x))[0][:, -1]))


NETS = {"lenet5": lenet5, "simplecnn": lenet5, "alexnet": alexnet, "vgg11": vgg11, "resnet9": resnet9, "resnet18": resnet18}
NETS |= {"fedgen-cnn": fedgen_cnn, "lstm": CharLSTM}
SIDE = {"alexnet": 32, "vgg11": 32, "resnet9": 32, "resnet18": 32}  # smaller images are padded to this


class Model:
    """A net whose weights live outside it, as a flat vector theta (P,) or a stack (K, P), one row per client.

    The first `trainable` entries are learnt. The rest, BatchNorm statistics and what a net has frozen, is averaged only.
    """

    def __init__(self, build: Callable[[], nn.Module], device: str = "cpu", dtype: torch.dtype = torch.float32):
        self.build, self.device, self.dtype = build, device, dtype
        net = self.drawn(0)  # with what a net of one's own draws and does not learn, permutations say
        whole = {name: b.to(device) for name, b in net.named_buffers() if not b.is_floating_point()}
        self.constants = {name: None if name.endswith("num_batches_tracked") else b for name, b in whole.items()}
        self.skeleton, self.plain = net.to("meta"), isinstance(net, Plain)
        self.batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.skeleton.modules())
        parameters, buffers = dict(self.skeleton.named_parameters()), self.skeleton.named_buffers()
        self.parameters = {n: p for n, p in parameters.items() if p.requires_grad}
        self.tensors = self.parameters | parameters | {n: b for n, b in buffers if b.is_floating_point()}
        self.sizes = [tensor.numel() for tensor in self.tensors.values()]
        self.size, self.trainable = sum(self.sizes), sum(p.numel() for p in self.parameters.values())

    def drawn(self, seed: int) -> nn.Module:
        """A new net; the seed is that of NumPy, too, by which somebody's own net may draw. Both go on as before."""
        kept = np.random.get_state()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            net = self.build()
        np.random.set_state(kept)
        return net

    def init(self, seed: int) -> Tensor:
        """Torch's default initialisation as a flat vector (P,)."""
        net = self.drawn(seed)
        held = dict(net.named_parameters()) | dict(net.named_buffers())
        return torch.cat([held[name].detach().flatten() for name in self.tensors]).to(self.device, self.dtype)

    def by_layer(self, stack: Tensor) -> list[Tensor]:
        """(K, P) or (K, trainable) -> (K, P_l) for each of the net's tensors l, in memory of their own."""
        sizes = self.sizes if stack.shape[1] == self.size else self.sizes[: len(self.parameters)]
        return [part.clone() for part in stack.split(sizes, dim=1)]

    def bind(self, stack: Tensor | list[Tensor], training: bool = False, grad: bool = False):
        """The net over the rows of `stack` (K, P), in its memory; its parameters, `net.leaves`, are autograd's with `grad`."""
        net, held = copy.deepcopy(self.skeleton).train(training), dict(self.constants)
        parts = stack.split(self.sizes, dim=1) if isinstance(stack, Tensor) else stack
        for (name, tensor), part in zip(self.tensors.items(), parts, strict=True):
            held[name] = part.view(tensor.shape) if self.plain else part.view(-1, *tensor.shape)
            if name in self.parameters:
                held[name] = held[name].data.requires_grad_(grad)  # .data: its own version counter
        for name, value in held.items():
            owner, _, leaf = name.rpartition(".")
            delattr(net.get_submodule(owner), leaf)
            setattr(net.get_submodule(owner), leaf, value)
        net.leaves = [held[name] for name in self.parameters]
        return net

    def default_chunk(self) -> int:
        """Clients stacked at once: by measurement, all of a small net's; big nets on a CPU are bound by arithmetic."""
        return 1 if self.plain or (self.device == "cpu" and self.trainable > 1_000_000) else 64


def build_model(name, data: Data, device="cpu", dtype=torch.float32, width=0, norm="batch", projection=False) -> Model:
    """The net `name`, one of NETS or `file.py:Class`, for this data; with MOON's projection head where asked.

    norm 'group' puts a group norm, of at least two channels a group, in the place of every BatchNorm2d. Raises UsageError when
    there is no such net, it cannot be built, or a sample does not go through it.
    """
    own, shape = ":" in name, tuple(data.x_train.shape[1:])
    sizes = (shape[2], shape[0], data.classes) if len(shape) == 3 else (0, 0, data.classes)
    if name not in NETS and not own:
        raise UsageError(f"--model {name}: not one of {', '.join(NETS)}, nor FILE.py:CLASS")
    if projection and (own or name == "lstm"):
        raise UsageError(f"--model {name}: a projection head, as under moon, wants a net of images with features and a head")

    def build():
        file, _, cls = name.rpartition(":")
        net = runpy.run_path(file)[cls](*sizes) if own else NETS[name](*sizes, width)
        net = net if isinstance(net, Net) else Plain(name, net)  # from a batch to (B, classes)
        if any(getattr(m, "momentum", 0) is None for m in net.modules()):
            raise ValueError("a batch norm of momentum None counts its batches, and no count is averaged")
        if projection:  # features -> F -> ReLU -> 256 = z -> classes
            size = net.head.in_features
            net.features.extend([Linear(size, size), ReLU(), Linear(size, 256)])
            net.head = Linear(256, data.classes)
        for path, module in list(net.named_modules()) if norm == "group" else ():
            if isinstance(module, nn.BatchNorm2d):
                group_norm, size = nn.GroupNorm if own else GroupNorm, module.num_features
                net.set_submodule(path, group_norm(math.gcd(32, max(size // 2, 1)), size))
        return net

    try:
        model = Model(build, device, dtype)
        net = model.bind(model.init(0)[None], grad=True)
        with torch.backends.cudnn.flags(enabled=False):  # cuDNN's LSTM has no backward pass in eval mode
            [logits] = net.head(net.features(inputs(data.images("train", dtype)[None, :1])))
            if logits.shape != (1, data.classes):
                raise ValueError(f"it returns {tuple(logits.shape)}, wanted {(1, data.classes)}")
            torch.autograd.grad(F.cross_entropy(logits, data.y_train[:1]), net.leaves)  # all weights must be used
    except (Exception, SystemExit) as error:  # torch's word for sizes that do not fit, or whatever somebody's own file raises
        wants = "CLASS(channels, side, classes)" if own else "lstm reads text, lenet5 images from 16x16, big nets 32x32"
        said = f"cannot learn from samples of shape {shape} ({wants}): {first_line(error.__cause__ or error)}"
        raise UsageError(f"--model {name}: {said}") from error
    return model


# ----------------------------------------------------------------------------------------------------------- trainer


@dataclass
class Update:
    """What K clients send back. weights (K, P); the others (K,): steps and samples int, the rest float64."""

    weights: Tensor
    steps: np.ndarray
    samples: np.ndarray  # how many were processed, repetitions counted
    length: np.ndarray  # ||a_i||_1 of FedNova times eta: x - y_i = length_i g under a constant g, momentum and lr in it
    grad_sq: np.ndarray  # mean over local steps of ||grad l_B||^2, before momentum, weight decay and correction
    loss: np.ndarray  # mean over local steps of the training loss

    def __getitem__(self, keep: np.ndarray) -> "Update":
        """The update of the clients in rows `keep`."""
        return Update(*(getattr(self, f.name)[keep] for f in fields(self)))


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


def train(
    model: Model,
    start: Tensor,  # x: theta (P,) for all, or (K, P)
    data: Data,
    batches: Sequence[np.ndarray],  # of each client (T_k, B), training samples; a short batch ends with -1
    *,
    lr: float | np.ndarray,  # eta, or its schedule over local steps (T,)
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    proximal: float = 0.0,  # mu of FedProx
    correction: Sequence[Tensor] | None = None,  # (K, trainable), of SCAFFOLD and VRL-SGD
    weights: Sequence[np.ndarray] | None = None,  # of each client (T_k, B); the loss is their sum over the batch's true size
    loss: Callable = cross_entropy,  # step -> (K,)
    penalty: Callable | None = None,  # step -> (K,), added to the loss
    frozen: dict[str, Tensor] | None = None,  # weights (P,) or (K, P) that step.frozen[name] offers as eval nets
    per_client: dict[str, Tensor] | None = None,  # (K, ...) each, in step.extra cut to the live clients
    per_step: dict[str, Sequence[np.ndarray]] | None = None,  # of each client (T_k, ...), in step.extra
    augment: Callable | None = None,  # (normalised images (K, B, H, W, C), extra) -> images
    chunk: int = 0,  # clients stacked at once (0: chosen for the net and device); a plain net always takes 1
    seeds: Sequence[int] | None = None,  # of dropout, one per client; clients that are stacked share the first one's
) -> Update:
    """Trains K clients by SGD over their index schedules, many of them in one pass. Equal to this loop, which a test runs:

        for k in range(K):
            y, v = x[k].clone(), 0
            for t, batch in enumerate(batches[k]):
                g = grad of loss + penalty at y, over the samples batch[batch >= 0]
                g = g + proximal * (y - x[k]) + correction[k] + weight_decay * y
                v = momentum * v + g
                y = y - lr[t] * v

    `step` has net, inputs, x, y, features (K, B, F), logits (K, B, C), weight and mean (K, B), frozen and extra. `mean` is
    1 / batch size on real samples and 0 on padding; weight is mean times sample weight.
    """
    K, steps = len(batches), np.array([len(b) for b in batches], dtype=int)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)
    lr = np.full(max(steps.max(initial=0), 1), lr) if np.isscalar(lr) else np.asarray(lr)
    theta, chunk = start.expand(K, -1), 1 if model.plain else chunk or model.default_chunk()
    order = np.argsort(-steps, kind="stable")[rank::ranks]  # longest first; every rank gets long and short clients alike
    result = (torch.empty if ranks == 1 else torch.zeros)(K, model.size, device=model.device, dtype=model.dtype)
    sums = torch.zeros(K, 2, device=model.device, dtype=torch.float64)
    for rows in (order[i : i + chunk] for i in range(0, len(order), chunk)):
        if seeds is not None:
            torch.manual_seed(seeds[rows[0]])
        stack = Stack(model, theta[rows], data, batches, lr, rows)
        stack.momentum, stack.weight_decay, stack.proximal = momentum, weight_decay, proximal
        stack.x = model.by_layer(theta[rows, : model.trainable]) if proximal else None
        stack.correction = None if correction is None else model.by_layer(torch.stack([correction[i] for i in rows]))
        stack.loss, stack.penalty, stack.augment = loss, penalty, augment
        stack.frozen = {name: model.by_layer(w.expand(K, -1)[rows]) for name, w in (frozen or {}).items()}
        stack.per_client = {name: value[rows] for name, value in (per_client or {}).items()}
        stack.per_step = {name: stack.steps_first(value) for name, value in (per_step or {}).items()}
        stack.weight = stack.mean if weights is None else stack.mean * stack.steps_first(weights)
        with side_stream() if stack.recorded else contextlib.nullcontext():
            result[rows], sums[rows] = stack.train()
    if ranks > 1:  # each row is zero on all ranks but one, so the sum is exact
        dist.all_reduce(result)
        dist.all_reduce(sums)
    samples, means = np.array([(batch >= 0).sum() for batch in batches], dtype=int), sums.cpu().numpy().T / np.maximum(steps, 1)
    return Update(result, steps, samples, step_lengths(lr, momentum, proximal)[steps], *means)


TRAINER = contextvars.ContextVar("trainer", default=None)  # what a federation's clients are given to instead of `train`
ROWS = ("correction", "weights", "seeds")  # options of `train` with an entry for each client


def train_together(calls: Sequence[tuple]) -> list[Update]:
    """`train` of each call (model, start, data, batches, options), models alike: those that are `stackable` as one stack."""
    stacks, updates = [], {}
    for k in sorted(range(len(calls)), key=lambda k: -np.size(calls[k][4]["lr"])):
        mine = next((stack for stack in stacks if stackable(calls[stack[0]], calls[k])), None)
        stacks.append([k]) if mine is None else mine.append(k)
    for stack in stacks:
        models, starts, data, batches, options = zip(*(calls[k] for k in stack), strict=True)
        start = torch.cat([start.expand(len(own), -1) for start, own in zip(starts, batches, strict=True)])
        rows = {name: [row for each in options for row in each[name]] for name in ROWS if name in options[0]}
        update = train(models[0], start, data[0], [b for own in batches for b in own], **options[0] | rows)
        ends = np.cumsum([0, *map(len, batches)])
        updates |= {k: update[begin:end] for k, begin, end in zip(stack, ends, ends[1:], strict=False)}
    return [updates[k] for k in range(len(calls))]


def stackable(longer: tuple, call: tuple) -> bool:
    """Whether two calls have the same arrays and equal numbers for options, but for ROWS and a longer schedule of lr."""
    (_, _, one, _, a), (_, _, other, _, b) = longer, call
    if one.x_train is not other.x_train or one.y_train is not other.y_train or a.keys() != b.keys():
        return False
    shared = [(a[name], b[name]) for name in a if name not in ("lr", *ROWS)]
    eta, its = np.ravel(a["lr"]), np.ravel(b["lr"])
    alike = all(isinstance(v, (int, float)) and v == w for v, w in shared)  # no function: it may hold what is a call's own
    return alike and np.ndim(a["lr"]) == np.ndim(b["lr"]) and np.array_equal(eta[: len(its)], its)


class Stack:
    """The clients `rows`, of falling numbers of local steps, trained as one net: the first `live` of them at step t.

    Weights lie by layer, in a list of (K, P_l): the rows of a (K, P) are copied at every convolution.
    """

    def __init__(self, model: Model, start: Tensor, data: Data, batches: Sequence, lr: np.ndarray, rows: np.ndarray):
        self.model, self.data, self.x_train = model, data, data.images("train", model.dtype)
        self.lr, self.rows, self.steps = lr, rows, np.array([len(batches[i]) for i in rows])
        self.recorded = model.device == "cuda" and not model.batch_norm  # CUDA graphs need padding, unfit for batch statistics
        index = self.steps_first(batches, fill=-1)  # (T, K, B)
        real = (index >= 0).to(model.dtype)
        self.index, self.counts = index.clamp(min=0), real.sum(-1).long().cpu().numpy()  # counts (T, K): true batch sizes
        self.mean = real / real.sum(-1, keepdim=True).clamp(min=1)
        self.trains, self.eta = index[..., 0] >= 0, torch.as_tensor(lr).to(model.device, model.dtype)  # (T, K), (T,)
        self.weights = model.by_layer(start)
        self.y = self.weights[: len(model.parameters)]
        self.v = [torch.zeros_like(part) for part in self.y]
        self.sums = torch.zeros(len(rows), 2, device=model.device, dtype=torch.float64)
        self.t = torch.zeros(1, dtype=torch.int64, device=model.device)  # read on the device, also when a graph is replayed
        self.bound = {}

    def steps_first(self, arrays: Sequence[np.ndarray], fill=0) -> Tensor:
        """Every client's (T_k, ...) -> (T, K, ...) on the device; integers stay integers, floats take the net's precision."""
        own = [arrays[i] for i in self.rows]
        tensor = pad_sequence([torch.from_numpy(a.astype(np.result_type(*own))) for a in own], padding_value=fill)
        return tensor.to(self.model.device, self.model.dtype if tensor.is_floating_point() else None)

    def train(self) -> tuple[Tensor, Tensor]:
        """All T steps: the weights (K, P), and the sums over steps of ||g||^2 and of the loss (K, 2)."""
        taken, graphs = collections.Counter(), {}
        for t, counts in enumerate(self.counts):
            live = int((self.steps > t).sum())
            sizes = counts[:live]
            if self.recorded:  # a finished client stays, masked, until half of them have: log2 K graphs serve all live counts
                live, sizes = min(len(counts), 1 << (live - 1).bit_length()), [self.index.shape[2]]
            elif not self.model.batch_norm or sizes.min() == sizes.max():
                sizes = [sizes.max()]
            step = functools.partial(self.step, live, sizes, float(self.lr[t]))
            taken[live] += 1
            if self.recorded and taken[live] == 4:  # three steps as they are, then one is recorded and replayed
                graphs[live] = captured(step)
            graphs.get(live, step)()
        return torch.cat(self.weights, 1), self.sums

    def step(self, live: int, sizes: Sequence[int], eta: float) -> None:
        """A local step: of the live clients together, or one by one where their batch sizes must not be padded."""
        rows = [slice(0, live)] if len(sizes) == 1 else [slice(k, k + 1) for k in range(live)]
        parts = [self.differentiate(own, int(size)) for own, size in zip(rows, sizes, strict=True)]
        self.descend(live, eta, *(parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))))
        self.t.add_(1)

    def nets(self, rows: slice):
        """The net over these clients, and the frozen nets."""
        if (rows.start, rows.stop) not in self.bound:
            frozen = {name: self.model.bind([part[rows] for part in stack]) for name, stack in self.frozen.items()}
            own = self.model.bind([part[rows] for part in self.weights], training=True, grad=True)
            self.bound[rows.start, rows.stop] = own, frozen
        return self.bound[rows.start, rows.stop]

    def now(self, schedule: Tensor, rows: slice) -> Tensor:
        """These clients' row of a schedule (T, K, ...) at step t."""
        return schedule.index_select(0, self.t)[0, rows]

    def differentiate(self, rows: slice, size: int) -> tuple[Tensor, ...]:
        """The clients' losses (K,) and gradients, (K, P_l) for each l: clients are independent, so one backward pass does."""
        step, index = SimpleNamespace(), self.now(self.index, rows)[:, :size]
        step.net, step.frozen = self.nets(rows)
        step.mean = self.now(self.mean, rows)[:, :size]
        step.weight = step.mean if self.weight is self.mean else self.now(self.weight, rows)[:, :size]
        step.x, step.y = gather(self.x_train, index), gather(self.data.y_train, index)
        step.extra = {name: value[rows] for name, value in self.per_client.items()}
        step.extra |= {name: self.now(schedule, rows) for name, schedule in self.per_step.items()}
        step.inputs = inputs(self.augment(step.x, step.extra) if self.augment else step.x)
        step.features = step.net.features(step.inputs)
        step.logits = step.net.head(step.features)
        losses = self.loss(step) + self.penalty(step) if self.penalty else self.loss(step)
        grads = torch.autograd.grad(losses.sum(), step.net.leaves)
        return losses.detach(), *(grad.contiguous().view(len(losses), -1) for grad in grads)

    @torch.no_grad()
    def descend(self, live: int, eta: float, losses: Tensor, *g: Tensor) -> None:
        """One step of SGD: g += mu (y - x) + c + lambda y, v = rho v + g, y -= eta v."""
        norms = torch.stack([torch.linalg.vector_norm(part, dim=1) for part in g])
        seen = torch.stack([norms.square().sum(0), losses], 1)
        y, v, x, c = ([part[:live] for part in parts or ()] for parts in (self.y, self.v, self.x, self.correction))
        if x:
            g = torch._foreach_add(g, torch._foreach_sub(y, x), alpha=self.proximal)
        if c:
            g = torch._foreach_add(g, c)
        if self.model.device == "cuda":
            trains, eta = self.now(self.trains, slice(0, live))[:, None], self.eta[self.t]
            seen = torch.where(trains, seen, 0)
            torch._foreach_mul_(v, self.momentum)
            torch._foreach_add_(v, g)
            torch._foreach_add_(v, y, alpha=self.weight_decay)
            torch._foreach_sub_(y, [torch.where(trains, eta * part, 0) for part in v])
        else:  # torch.optim.SGD's kernel: one pass over memory, not four. It does not look at strides
            rest = {"dampening": 0.0, "nesterov": False, "maximize": False, "is_first_step": False}
            how = {"lr": eta, "momentum": self.momentum, "weight_decay": self.weight_decay} | rest
            torch._fused_sgd_(y, g, v if self.momentum else [], **how)
        self.sums[:live] += seen


@contextlib.contextmanager
def side_stream():
    """Where steps run before one is captured, as CUDA graphs demand. Either stream waits for what the other has begun."""
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)


def captured(step: Callable) -> Callable:
    """`step` as a CUDA graph, noted down but not taken: calling the result replays its kernels without launching each."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def gather(samples: Tensor, index: Tensor) -> Tensor:
    """samples[index] of any shape, in whole rows: several times as fast as torch's indexing."""
    return samples.index_select(0, index.flatten()).view(*index.shape, *samples.shape[1:])


# ----------------------------------------------------------------------------------------------------------- scoring


@torch.no_grad()
def predict(model: Model, weights: Tensor, x: Tensor, index: Sequence[np.ndarray], chunk: int = 0) -> list[Tensor]:
    """Logits in eval mode of each list of samples of x = data.images(...): a list of (n_k, classes).

    weights (P,) scores every list with one net, in one stream of large batches; (K, P) each list with its own.
    """
    if weights.dim() == 1:
        [logits] = predict(model, weights[None], x, [np.concatenate([*index, np.arange(0)])])
        return list(logits.split([len(i) for i in index]))
    chunk, logits = 1 if model.plain else chunk or model.default_chunk(), []
    for begin in range(0, len(index), chunk):
        net, some = model.bind(weights[begin : begin + chunk]), index[begin : begin + chunk]
        rows = pad_sequence([torch.as_tensor(i) for i in some], batch_first=True).to(model.device)
        parts = [net.head(net.features(inputs(gather(x, i)))) for i in rows.split(max(1, 2000 // len(some)), dim=1)]
        logits += [own[: len(i)] for own, i in zip(torch.cat(parts, 1), some, strict=True)]
    return logits


def score(model: Model, weights: Tensor, data: Data, shards: Sequence[np.ndarray], chunk: int = 0) -> list[tuple]:
    """Cross-entropy (float64) and predicted class of every training sample of each shard: a list of two arrays (n_k,)."""
    scores = []
    for logits, shard in zip(predict(model, weights, data.images("train", model.dtype), shards, chunk), shards, strict=True):
        losses = F.cross_entropy(logits.double(), data.y_train[shard], reduction="none")
        scores.append((losses.cpu().numpy(), logits.argmax(1).cpu().numpy()))
    return scores


def evaluate(model: Model, weights: Tensor, data: Data, shares: np.ndarray | None = None) -> dict[str, float]:
    """`tested` of the global net (P,), or of a stack (M, P): a net for each client."""
    images, everything = data.images("test", model.dtype), [np.arange(len(data.y_test))]
    return tested([predict(model, theta, images, everything)[0] for theta in weights.view(-1, model.size)], data, shares)[0]


def tested(logits: Sequence[Tensor], data: Data, shares: np.ndarray | None = None) -> tuple[dict[str, float], np.ndarray]:
    """From logits (n, classes) of the test set, by one net or one for each client, (columns, hits (nets, classes)).

    Columns are accuracy in percent and mean loss in nats; of several nets their mean, and the accuracy's spread. shares
    (M, classes), each client's distribution over labels, adds what the clients see: the accuracy on test samples drawn by a
    client's own labels, sum_c shares_mc accuracy_c, as its mean, worst tenth and standard deviation over clients.
    """
    y, count = data.y_test, torch.bincount(data.y_test, minlength=data.classes).cpu().numpy()
    hits = np.stack([torch.bincount(y[z.argmax(1) == y], minlength=data.classes).cpu().numpy() for z in logits])
    accuracy, loss = 100 * hits.sum(1) / len(y), [F.cross_entropy(z.double(), y).item() for z in logits]
    seen = {"accuracy": accuracy.mean(), "loss": np.mean(loss)}
    if len(logits) > 1:
        seen["client_std"] = accuracy.std(ddof=1)
    if shares is not None:
        known = shares * (count > 0)  # a class without test samples tells nothing
        of_class = 100 * hits / np.maximum(count, 1)  # broadcasts where there is a single net
        own = np.sort((known * of_class).sum(1) / np.maximum(known.sum(1), 1e-300))  # (M,)
        seen |= {"own_mean": own.mean(), "own_worst_tenth": own[: max(1, len(own) // 10)].mean(), "own_std": own.std()}
    return {name: float(value) for name, value in seen.items()}, hits


# ------------------------------------------------------------------------------------------------------------- bases


class FedAvg:
    """x <- sum_i p_i y_i (McMahan et al., 2017). The other bases change what their docstrings say.

    `client` gives the keyword arguments of `train`; `server` the next x, with x (n,), y (K, n) the trainable weights and p
    the weights |D_i| / sum over the selected. `memory` is what survives to the next round, per-client vectors by client.
    `vectors` is how many of a net's size travel each way: SCAFFOLD's c and c_i make it two. `unread` are flags without effect.
    """

    mu = 0.0
    server_lr = 1.0
    vectors = 1
    unread = ("mu", "server_lr")

    def __init__(self, config, model: Model):
        self.config, self.model, self.memory = config, model, {}
        self.mu = self.mu if config.mu < 0 else config.mu
        self.server_lr = config.server_lr or self.server_lr

    def client(self, x: Tensor, clients: np.ndarray) -> dict:
        return {}

    def server(self, x: Tensor, y: Tensor, p: Tensor, update: Update, clients: np.ndarray) -> Tensor:
        return p @ y

    def start(self, x: Tensor, clients: np.ndarray) -> Tensor:
        """The weights that the clients begin from, and those that are tested."""
        return x

    def aggregate(self, x: Tensor, update: Update, clients: np.ndarray, sizes) -> Tensor:
        """x^{t+1} (P,) from the update of `clients` that hold `sizes` samples. BatchNorm statistics are averaged."""
        n, p = self.model.trainable, torch.as_tensor(np.asarray(sizes) / np.sum(sizes), device=x.device, dtype=x.dtype)
        return torch.cat([self.server(x[:n], update.weights[:, :n], p, update, clients), p @ update.weights[:, n:]])

    def recall(self, name: str, clients: np.ndarray, default: Tensor) -> Tensor:
        """Rows of the per-client vectors `name` (K, n); `default` for a client that has none yet."""
        held = self.memory.setdefault(name, {})
        return torch.stack([held.get(int(i), default) for i in clients])

    def keep(self, name: str, clients: np.ndarray, rows: Tensor) -> None:
        self.memory.setdefault(name, {}).update({int(i): row.clone() for i, row in zip(clients, rows, strict=True)})

    def lengths(self, update: Update) -> Tensor:
        """eta ||a_i||_1 (K, 1): x - y_i divided by it is a gradient, under momentum too; eta k for plain SGD."""
        return torch.as_tensor(update.length, device=update.weights.device, dtype=update.weights.dtype)[:, None]


class FedProx(FedAvg):
    """Gradient += mu (y - x) (Li et al., 2020)."""

    mu = 0.001
    unread = ("server_lr",)

    def client(self, x, clients):
        return {"proximal": self.mu}


class Scaffold(FedAvg):
    """Option II of Karimireddy et al. (2020): y <- y - eta (g - c_i + c), the x - y of c_i^+ divided by its `lengths`."""

    vectors = 2
    unread = ("mu",)

    def client(self, x, clients):
        zero = torch.zeros_like(x[: self.model.trainable])
        return {"correction": self.memory.setdefault("c", zero) - self.recall("c_i", clients, zero)}

    def server(self, x, y, p, update, clients):
        c, c_i = self.memory["c"], self.recall("c_i", clients, torch.zeros_like(x))
        c_new = c_i - c + (x - y) / self.lengths(update)  # c_i^+
        self.keep("c_i", clients, c_new)
        self.memory["c"] = c + len(clients) / self.config.clients * (c_new - c_i).mean(0)
        return x + self.server_lr * (y - x).mean(0)


class FedNova(FedAvg):
    """d_i = (x - y_i) / ||a_i||_1; x <- x - (sum_i p_i ||a_i||_1) sum_i p_i d_i (Wang et al., 2020)."""

    def server(self, x, y, p, update, clients):
        d = (x - y) / self.lengths(update)
        return x - (p @ self.lengths(update)) * (p @ d)  # eta cancels


class VRLSGD(FedAvg):
    """y <- y - eta (g - Delta_i), then Delta_i += (x_hat - y_i) / (eta k) of those that took part (Liang et al., 2019)."""

    def client(self, x, clients):
        return {"correction": -self.recall("delta", clients, torch.zeros_like(x[: self.model.trainable]))}

    def server(self, x, y, p, update, clients):
        x_hat = p @ y
        self.keep("delta", clients, self.recall("delta", clients, torch.zeros_like(x)) + (x_hat - y) / self.lengths(update))
        return x_hat


class FedOpt(FedAvg):
    """delta = sum_i p_i (y_i - x); x += eta m / (sqrt(v) + tau), no bias correction (Reddi et al., 2021). Adagrad has no m."""

    server_lr = 0.01
    unread = ("mu",)
    b1, b2, tau = 0.9, 0.99, 1e-3

    def server(self, x, y, p, update, clients):
        delta, b1 = p @ (y - x), self.b1 * (self.config.base != "fedadagrad")
        m = b1 * self.memory.get("m", torch.zeros_like(x)) + (1 - b1) * delta
        v = self.memory.get("v", torch.full_like(x, self.tau**2))
        rules = {"fedadagrad": v + delta**2, "fedadam": self.b2 * v + (1 - self.b2) * delta**2}
        rules["fedyogi"] = v - (1 - self.b2) * delta**2 * torch.sign(v - delta**2)
        self.memory.update(m=m, v=rules[self.config.base])
        return x + self.server_lr * m / (self.memory["v"].sqrt() + self.tau)


class Moon(FedAvg):
    """Loss + mu l_con: features near the global net's, far from the client's own previous net's (Li et al., 2021)."""

    mu = 5.0
    unread = ("server_lr",)
    temperature = 0.5

    def client(self, x, clients):
        held = self.memory.get("previous", {})
        known = torch.tensor([float(int(i) in held) for i in clients], device=x.device, dtype=x.dtype)
        frozen = {"global": x, "previous": self.recall("previous", clients, x)}
        return {"penalty": self.contrast, "frozen": frozen, "per_client": {"known": known}}

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

    vectors = 0

    def start(self, x, clients):
        return self.recall("own", clients, x)

    def aggregate(self, x, update, clients, sizes):
        self.keep("own", clients, update.weights)
        return x


BASES = {"fedavg": FedAvg, "fedprox": FedProx, "scaffold": Scaffold, "fednova": FedNova, "vrlsgd": VRLSGD}
BASES |= {"fedadagrad": FedOpt, "fedadam": FedOpt, "fedyogi": FedOpt, "moon": Moon, "solo": Solo}


# ------------------------------------------------------------------------------------------------ a federation's rounds


class Federation:
    """One trial's clients with their data, net and base, and what every round does with them.

    `shards` are the clients' samples, index arrays into the training set, `sizes` (M,) their numbers, `moved` how many samples
    the partition had to move so that every client holds --min-size. `base` replaces what --base names. Raises UsageError.

    --hold-out keeps that share of each client's samples from training, `held` in all, and puts them in the test set's place.
    """

    def __init__(self, config, data: Data, streams: Streams, base: type | None = None, projection: bool = False):
        self.config, self.data, self.streams, self.everyone = config, data, streams, np.arange(config.clients)
        base, device = base or BASES[config.base], str(data.x_train.device.type)
        projection = projection or issubclass(base, Moon)
        dtype, count, labels = getattr(torch, config.dtype), config.parts or config.clients, data.y_train.cpu().numpy()
        self.model = build_model(config.model, data, device, dtype, config.width, config.norm, projection)
        self.base = base(config, self.model)
        how = {"min_size": config.min_size, "owner": data.owner, "own_classes": config.classes_per_client}
        shards, self.moved = partition(config.partition, labels, count, config.alpha, streams("partition"), **how)
        kept = streams("parts").permutation(count)[: config.clients] if config.parts else self.everyone
        self.shards, self.held = [shards[i] for i in kept], np.empty(0, dtype=np.int64)
        if config.hold_out:
            own = [streams("held out", m).permutation(shard) for m, shard in enumerate(self.shards)]
            parts = [np.split(index, [int(config.hold_out * len(index) + 1e-9)]) for index in own]
            self.shards, self.held = [np.sort(left) for _, left in parts], np.concatenate([held for held, _ in parts])
            if len(self.held) == 0:
                raise UsageError(f"--hold-out {config.hold_out} (--tune: 0.2): no client holds samples enough")
            self.data = replace(data, x_test=data.x_train[self.held], y_test=data.y_train[self.held])
            self.data.ready["train", dtype] = data.images("train", dtype)  # the largest array, made once
        self.sizes = np.array([len(shard) for shard in self.shards])

    def start(self) -> dict:
        """The state before the first round: all that a checkpoint must hold."""
        return {"weights": self.model.init(self.streams.seed("init")), "base": self.base.memory}

    def select(self, t: int, count: int) -> np.ndarray:
        """`count` of the clients, uniformly without replacement, the same in every arm; fewer are among more (M <= 10^4)."""
        rng, M = self.streams("select", t), self.config.clients
        return np.sort(rng.permutation(M)[:count] if M <= 10_000 else rng.choice(M, count, replace=False))

    def received(self, state: dict, clients: np.ndarray) -> Tensor:
        """The weights that these clients begin from: (P,), or (K, P) where every client has its own."""
        self.base.memory = state["base"]  # a resumed run brings its own
        return self.base.start(state["weights"], clients)

    def train(self, state: dict, t: int, clients: np.ndarray, batches: Sequence[np.ndarray], **options):
        """Local training with `options` of `train`: (clients, Update), those left out whose update is not finite.

        Raises NonFiniteError where --on-nonfinite is stop, or no update is finite.
        """
        c, start = self.config, self.received(state, clients)
        flags = {"lr": c.lr, "momentum": c.momentum, "weight_decay": c.weight_decay, "chunk": c.chunk}
        flags |= {"seeds": [self.streams.seed("dropout", t, m) for m in clients]} | options
        for name, value in self.base.client(state["weights"], clients).items():
            flags[name] = flags[name] | value if isinstance(value, dict) and flags.get(name) else value
        update = (TRAINER.get() or train)(self.model, start, self.data, batches, **flags)
        good = torch.isfinite(update.weights).all(1).cpu().numpy()
        if not good.all() and (c.on_nonfinite == "stop" or not good.any()):
            bad = ", ".join(map(str, clients[~good]))
            raise NonFiniteError(f"round {t + 1}: the update of client {bad} is not finite. Try a smaller --lr")
        return clients[good], update[good]

    def aggregate(self, state: dict, clients: np.ndarray, update: Update, weights: np.ndarray | None = None) -> None:
        """theta_g^{t+1}, the clients weighted by their sizes, or by `weights` (n,) of any scale."""
        weights = self.sizes[clients] if weights is None else weights
        state["weights"] = self.base.aggregate(state["weights"], update, clients, weights)

    def cost(self, clients: np.ndarray, update: Update, received: float = 0, sent: float = 0) -> dict[str, float]:
        """A round's samples and megabytes: `clients` downloaded, those of the update uploaded; beside it so many numbers."""
        net, megabyte = self.model.size * self.base.vectors, 1e6 / self.model.dtype.itemsize
        moved = {"received_mb": len(clients) * net + received, "sent_mb": len(update.steps) * net + sent}
        return {"samples": int(update.samples.sum())} | {way: numbers / megabyte for way, numbers in moved.items()}

    def test(self, state: dict) -> dict[str, float]:
        """`evaluate` of the global net, or of every client's own."""
        labels, classes, shares = self.data.y_train.cpu().numpy(), self.data.classes, None
        if self.config.per_client:
            shares = np.stack([np.bincount(labels[own], minlength=classes) / len(own) for own in self.shards])
        return evaluate(self.model, self.received(state, self.everyone), self.data, shares)

    def train_centrally(self, epochs: int) -> Tensor:
        """theta (P,) after SGD on all training samples but those held out, an expert. NonFiniteError when it diverges."""
        c, everything = self.config, np.setdiff1d(np.arange(len(self.data.y_train)), self.held)
        batches = [epochs_of_batches(everything, epochs, c.batch_size, self.streams("central batches"))]
        how = {"lr": c.lr, "momentum": c.momentum, "weight_decay": c.weight_decay}
        theta = self.model.init(self.streams.seed("central init"))
        theta = train(self.model, theta, self.data, batches, seeds=[self.streams.seed("central dropout")], **how).weights[0]
        if not torch.isfinite(theta).all():
            raise NonFiniteError("the expert, trained centrally, is not finite. Try a smaller --lr")
        return theta
