"""What the tests compare with: data, federations, ordinary torch modules, the plain programs."""

import contextlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common
import experiment
from data import Data
from nets import Model, build_model

ROOT = Path(__file__).resolve().parent.parent


def load_plain(name: str) -> ModuleType:
    """plain/NAME.py as a module: a script has the same name."""
    path = ROOT / "plain" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"plain_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------- data


def random_images(side=16, channels=1, classes=4, n=60, seed=0) -> Data:
    """n training and n test images; their moments by NumPy."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (2 * n, side, side, channels), dtype=np.uint8)
    y = np.arange(2 * n) % classes
    tensors = [torch.from_numpy(part) for part in (x[:n], y[:n], x[n:], y[n:])]
    mean = torch.from_numpy(x[:n].mean((0, 1, 2), dtype=float))
    std = torch.from_numpy(x[:n].std((0, 1, 2), dtype=float))
    return Data(*tensors, classes, mean, std)


def random_text(n=20, classes=80, seed=0) -> Data:
    """n samples of 12 characters; tested on the same."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.integers(0, classes, (n, 12)))
    y = torch.from_numpy(rng.integers(0, classes, n))
    return Data(x, y, x, y, classes)


def normalise(data: Data, x: Tensor) -> Tensor:
    """What an ordinary net reads, by NumPy: images (n, C, H, W), text as it is.

    In torch's own order, as ours is after AlexNet's convolutions: dropout draws in that order.
    """
    if x.dtype == torch.int64:
        return x
    images = (x.double().numpy() - data.mean.numpy()) / data.std.numpy()
    return torch.from_numpy(images.transpose(0, 3, 1, 2).copy())


# ------------------------------------------------------------------------------------ federations


def make_config(**changes) -> SimpleNamespace:
    """What a federation reads of the flags."""
    flags = {
        "dataset": "digits",
        "model": "lenet5",
        "norm": "batch",
        "width": 0,
        "dtype": "float64",
        "chunk": 0,
        "partition": "iid",
        "alpha": 0.5,
        "classes_per_client": 2,
        "min_size": 1,
        "parts": 0,
        "clients": 5,
        "batch_size": 3,
        "lr": 0.05,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "base": "fedavg",
        "mu": -1.0,
        "server_lr": 0.0,
        "per_client": False,
        "hold_out": 0.0,
        "device_spread": 0.0,
    }
    return SimpleNamespace(**(flags | changes))


def make_federation(data=None, seed=1, trial=0, **flags) -> common.Federation:
    streams = common.Streams(seed, trial)
    return common.Federation(make_config(**flags), data or random_images(), streams)


@contextlib.contextmanager
def interrupted_at(t: int):
    """In this block Ctrl-C comes before round t is recorded."""
    record = experiment.Run.record

    def interrupt(run, round_, *args, **columns):
        if round_ == t:
            raise KeyboardInterrupt
        record(run, round_, *args, **columns)

    with mock.patch.object(experiment.Run, "record", interrupt):
        yield


def first_batches(fl, clients) -> list[np.ndarray]:
    """A batch of each client's first three samples."""
    return [fl.shards[m][None, :3] for m in clients]


# ------------------------------------------------------------------------------------------- nets


def lenet(channels, side, classes):
    flat = 16 * (((side - 4) // 2 - 4) // 2) ** 2
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(flat, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


def alexnet(channels, classes, width):
    layers = []
    for size, stride, pools in ((64, 2, True), (192, 1, True), (384, 1, False), (256, 1, False)):
        layers += [nn.Conv2d(channels, size, 3, stride, 1), nn.ReLU()]
        if pools:
            layers.append(nn.MaxPool2d(2))
        channels = size
    layers += [nn.Conv2d(256, 256, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Dropout(0.05), nn.Flatten(), nn.Linear(1024, width), nn.ReLU()]
    layers += [nn.Dropout(0.05), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, classes))


def vgg11(channels, classes):
    layers = []
    for size in (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"):
        if size == "M":
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, size, 3, padding=1), nn.ReLU()]
            channels = size
    layers += [nn.Dropout(0.2), nn.Flatten(), nn.Linear(512, 512), nn.ReLU()]
    layers += [nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(512, classes))


def conv_norm(inside, outside, size=3, stride=1):
    convolution = nn.Conv2d(inside, outside, size, stride, size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outside))


class ResNet9(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.blocks = nn.ModuleList()
        before = channels
        for size in (64, 128, 128, 128, 256, 512, 512, 512):
            self.blocks.append(nn.Sequential(conv_norm(before, size), nn.ReLU()))
            before = size
        self.out = nn.Linear(512, classes)

    def forward(self, x):
        prep, first, first_a, first_b, second, third, third_a, third_b = self.blocks
        x = F.max_pool2d(first(prep(x)), 2)
        x = x + first_b(first_a(x))
        x = F.max_pool2d(second(x), 2)
        x = F.max_pool2d(third(x), 2)
        x = x + third_b(third_a(x))
        return self.out(x.amax((2, 3)))


class ResNet18(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.stem = conv_norm(channels, 64)
        self.blocks = nn.ModuleList()
        before = 64
        for size, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)):
            self.add_block(before, size, stride)
            before = size
        self.add_block(512, 512, 1)
        self.out = nn.Linear(512, classes)

    def add_block(self, inside, outside, stride):
        skip = nn.Identity()
        if stride > 1:
            skip = conv_norm(inside, outside, 1, stride)
        first = conv_norm(inside, outside, 3, stride)
        self.blocks.append(nn.ModuleList([first, conv_norm(outside, outside), skip]))

    def forward(self, x):
        x = self.stem(x).relu()
        for first, second, skip in self.blocks:
            x = (second(first(x).relu()) + skip(x)).relu()
        return self.out(x.mean((2, 3)))


class FedGenCNN(nn.Module):
    """FedGen's classifier: two strided convolutions on digits, three with pools on 84x84 faces."""

    def __init__(self, channels, side, classes):
        super().__init__()
        self.is_faces = side == 84
        self.blocks = nn.ModuleList()
        before = channels
        for size in (16, 32, 64) if self.is_faces else (6, 16):
            convolution = nn.Conv2d(before, size, 3, 2, 1)
            self.blocks.append(nn.Sequential(convolution, nn.BatchNorm2d(size)))
            before = size
        flat = 64 if self.is_faces else 16 * (-(-side // 4)) ** 2
        self.latent = nn.Linear(flat, 32)
        self.out = nn.Linear(32, classes)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
            if self.is_faces:
                x = F.max_pool2d(x, 2)
        return self.out(self.latent(x.flatten(1)))


class CharLSTM(nn.Module):
    def __init__(self, classes, width):
        super().__init__()
        self.table = nn.Embedding(classes, 256)
        self.lstm = nn.LSTM(256, width, 2, batch_first=True)
        self.drop = nn.Dropout(0.05)
        self.out = nn.Linear(width, classes)

    def forward(self, x):
        states, _ = self.lstm(self.table(x))
        return self.out(self.drop(states[:, -1]))


class MoonNet(nn.Module):
    """LeNet-5 up to its 84 features, then MOON's projection."""

    def __init__(self, channels, side, classes):
        super().__init__()
        self.body = lenet(channels, side, classes)[:-1]
        self.projection = nn.Sequential(nn.Linear(84, 84), nn.ReLU(), nn.Linear(84, 256))
        self.out = nn.Linear(256, classes)

    def z(self, x):
        return self.projection(self.body(x))

    def forward(self, x):
        return self.out(self.z(x))


@dataclass
class Pair:
    """A data set, and the ordinary net that the project's net of this width must equal on it."""

    data: Callable[[], Data]
    net: Callable[[], nn.Module]
    width: int = 0


ZOO = {
    "lenet5": Pair(lambda: random_images(16, 1), lambda: lenet(1, 16, 4)),
    "simplecnn": Pair(lambda: random_images(20, 3), lambda: lenet(3, 20, 4)),
    "alexnet": Pair(lambda: random_images(32, 3), lambda: alexnet(3, 4, 24), 24),
    "vgg11": Pair(lambda: random_images(32, 3), lambda: vgg11(3, 4)),
    "resnet9": Pair(lambda: random_images(32, 3), lambda: ResNet9(3, 4)),
    "resnet18": Pair(lambda: random_images(32, 3), lambda: ResNet18(3, 4)),
    "fedgen-cnn": Pair(lambda: random_images(28, 1), lambda: FedGenCNN(1, 28, 4)),
    "lstm": Pair(random_text, lambda: CharLSTM(80, 16), 16),
}


def prepare(name: str, norm="batch") -> tuple[Data, Model, Callable[[], nn.Module]]:
    """The data, the float64 model and a maker of the ordinary net, both without dropout."""
    pair = ZOO[name]
    data = pair.data()
    model = build_model(name, data, dtype=torch.float64, width=pair.width, norm=norm)
    if model.is_plain:
        build = model.build
        model.build = lambda: without_dropout(build())
    else:
        without_dropout(model.layers)

    def make_net():
        net = pair.net()
        if norm == "group":
            use_group_norms(net)
        return without_dropout(net)

    return data, model, make_net


def use_group_norms(net: nn.Module) -> None:
    """At least two channels a group and 32 groups at most, in the place of batch norms."""
    groups = {6: 1, 16: 8, 64: 32, 128: 32, 256: 32, 512: 32}
    for parent in list(net.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                size = child.num_features
                setattr(parent, name, nn.GroupNorm(groups[size], size))


def without_dropout(net: nn.Module) -> nn.Module:
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.LSTM):
            module.dropout = 0.0
    return net


# ---------------------------------------------------------------------------------------- weights


def statistics(net: nn.Module) -> list[Tensor]:
    """Means and variances of batch norms, and whatever else a net averages."""
    buffers = [buffer for buffer in net.buffers() if buffer.is_floating_point()]
    return [buffer for buffer in buffers if buffer.isfinite().all()]


def parameters(net: nn.Module) -> list[Tensor]:
    """Those that are learnt, then those that are frozen."""
    return sorted(net.parameters(), key=lambda weights: not weights.requires_grad)


def fill(net: nn.Module, theta: Tensor) -> nn.Module:
    """The ordinary net with the weights theta (P,): parameters in order, then statistics."""
    net = net.double() if theta.dtype == torch.float64 else net.float()
    tensors = [real(tensor) for tensor in [*parameters(net), *statistics(net)]]
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, values in zip(tensors, theta.split(sizes), strict=True):
        tensor.data.copy_(values.view_as(tensor))
    return net


def flatten(net: nn.Module) -> Tensor:
    """The weights (P,) of an ordinary net; `fill` is its inverse."""
    tensors = [*parameters(net), *statistics(net)]
    return torch.cat([real(tensor).flatten() for tensor in tensors])


def real(tensor: Tensor) -> Tensor:
    """Without autograd, in the same memory. A complex number is two real ones."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def perturb(theta: Tensor, k: int, seed=0) -> Tensor:
    """k rows near theta, (k, P); variances stay positive."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(k, len(theta), generator=generator, dtype=theta.dtype)
    return theta * (1 + 0.05 * noise)


def draw_schedules(data: Data, sizes, batch_size: int, seed=5) -> list[np.ndarray]:
    """For each client samples of its own, in rows of batch_size; the last is filled with -1."""
    rng = np.random.default_rng(seed)
    schedules = []
    for n in sizes:
        rows = -(-n // batch_size)
        flat = np.full(rows * batch_size, -1)
        flat[:n] = rng.choice(len(data.y_train), n, replace=False)
        schedules.append(flat.reshape(rows, batch_size))
    return schedules
