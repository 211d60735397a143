"""common.py against ordinary torch nets and optimisers, float64 NumPy, closed forms and brute force."""

import ast
import contextlib
import math
import os
import shutil
import struct
import sys
import textwrap
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import common
from common import UsageError

DOUBLE = torch.float64


def made_up(side=16, channels=1, classes=4, n=60, seed=0) -> common.Data:
    """Random images with moments by NumPy."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (2 * n, side, side, channels), dtype=np.uint8)
    y = np.arange(2 * n) % classes
    mean, std = x[:n].astype(float).mean((0, 1, 2)), x[:n].astype(float).std((0, 1, 2))
    tensors = [torch.from_numpy(a) for a in (x[:n], y[:n], x[n:], y[n:])]
    return common.Data(*tensors, classes, torch.from_numpy(mean), torch.from_numpy(std))


def sentences(n=20, classes=80, seed=0) -> common.Data:
    rng = np.random.default_rng(seed)
    x, y = torch.from_numpy(rng.integers(0, classes, (n, 12))), torch.from_numpy(rng.integers(0, classes, n))
    return common.Data(x, y, x, y, classes)


def schedules(data, sizes, batch, seed=5) -> list[np.ndarray]:
    """For each client its own samples in rows of `batch`, the last one filled with -1."""
    rng, rows = np.random.default_rng(seed), []
    for n in sizes:
        flat = np.full(-(-n // batch) * batch, -1)
        flat[:n] = rng.choice(len(data.y_train), n, replace=False)
        rows.append(flat.reshape(-1, batch))
    return rows


def settings(**changes) -> SimpleNamespace:
    """What a federation reads of the flags."""
    flags = {"dataset": "digits", "model": "lenet5", "norm": "batch", "width": 0, "dtype": "float64", "chunk": 0}
    flags |= {"partition": "iid", "alpha": 0.5, "classes_per_client": 2, "min_size": 1, "parts": 0, "clients": 5}
    flags |= {"batch_size": 3, "lr": 0.05, "momentum": 0.0, "weight_decay": 0.0, "base": "fedavg", "mu": -1.0, "server_lr": 0.0}
    return SimpleNamespace(**(flags | {"on_nonfinite": "stop", "per_client": False, "hold_out": 0.0} | changes))


# ------------------------------------------------------------------------------------------------ ordinary torch nets


def lenet(c, side, classes):
    flat = 16 * (((side - 4) // 2 - 4) // 2) ** 2
    return nn.Sequential(
        *(nn.Conv2d(c, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)),
    )


def alex(c, classes, width):
    conv = [(c, 64, 2, True), (64, 192, 1, True), (192, 384, 1, False), (384, 256, 1, False), (256, 256, 1, True)]
    layers = []
    for i, o, stride, pool in conv:
        layers += [nn.Conv2d(i, o, 3, stride, 1), nn.ReLU()] + [nn.MaxPool2d(2)] * pool
    layers += [nn.Dropout(0.05), nn.Flatten(), nn.Linear(1024, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Dropout(0.05), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))


def vgg(c, classes):
    layers = []
    for size in (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"):
        layers += [nn.MaxPool2d(2)] if size == "M" else [nn.Conv2d(c, size, 3, padding=1), nn.ReLU()]
        c = c if size == "M" else size
    layers += [nn.Dropout(0.2), nn.Flatten(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(512, classes))


def conv_bn(i, o, size=3, stride=1):
    return nn.Sequential(nn.Conv2d(i, o, size, stride, size // 2, bias=False), nn.BatchNorm2d(o))


class Res9(nn.Module):
    def __init__(self, c, classes):
        super().__init__()
        plan = [(c, 64), (64, 128), (128, 128), (128, 128), (128, 256), (256, 512), (512, 512), (512, 512)]
        self.blocks = nn.ModuleList(nn.Sequential(conv_bn(i, o), nn.ReLU()) for i, o in plan)
        self.fc = nn.Linear(512, classes)

    def forward(self, x):
        b = self.blocks
        x = F.max_pool2d(b[1](b[0](x)), 2)
        x = x + b[3](b[2](x))
        x = F.max_pool2d(b[5](F.max_pool2d(b[4](x), 2)), 2)
        x = x + b[7](b[6](x))
        return self.fc(x.amax((2, 3)))


class Res18(nn.Module):
    def __init__(self, c, classes):
        super().__init__()
        self.stem = conv_bn(c, 64)
        plan = [(64, 64, 1)] * 2 + [(64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
        blocks = [nn.ModuleList([conv_bn(i, o, 3, s), conv_bn(o, o)]) for i, o, s in plan]
        for block, (i, o, s) in zip(blocks, plan, strict=True):
            block.append(conv_bn(i, o, 1, s) if s > 1 else nn.Identity())
        self.blocks, self.fc = nn.ModuleList(blocks), nn.Linear(512, classes)

    def forward(self, x):
        x = self.stem(x).relu()
        for a, b, skip in self.blocks:
            x = (b(a(x).relu()) + skip(x)).relu()
        return self.fc(x.mean((2, 3)))


class Gen(nn.Module):
    """FedGen's classifier: two strided convolutions on digits, three with pools on 84x84 faces."""

    def __init__(self, c, side, classes):
        super().__init__()
        self.faces = side == 84
        sizes = [c, 16, 32, 64] if self.faces else [c, 6, 16]
        self.blocks = nn.ModuleList()
        for i, o in zip(sizes, sizes[1:], strict=False):
            self.blocks.append(nn.Sequential(nn.Conv2d(i, o, 3, 2, 1), nn.BatchNorm2d(o)))
        self.latent = nn.Linear(64 if self.faces else 16 * (-(-side // 4)) ** 2, 32)
        self.fc = nn.Linear(32, classes)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
            x = F.max_pool2d(x, 2) if self.faces else x
        return self.fc(self.latent(x.flatten(1)))


class Letters(nn.Module):
    def __init__(self, classes, width):
        super().__init__()
        self.table, self.lstm = nn.Embedding(classes, 256), nn.LSTM(256, width, 2, batch_first=True)
        self.drop, self.fc = nn.Dropout(0.05), nn.Linear(width, classes)

    def forward(self, x):
        return self.fc(self.drop(self.lstm(self.table(x))[0][:, -1]))


class MoonNet(nn.Module):
    """LeNet-5 up to its 84 features, then MOON's projection head."""

    def __init__(self, c, side, classes):
        super().__init__()
        self.body = lenet(c, side, classes)[:-1]
        self.projection = nn.Sequential(nn.Linear(84, 84), nn.ReLU(), nn.Linear(84, 256))
        self.fc = nn.Linear(256, classes)

    def z(self, x):
        return self.projection(self.body(x))

    def forward(self, x):
        return self.fc(self.z(x))


def statistics(net):
    """BatchNorm's means and variances, and whatever else an own net averages."""
    return [buffer for buffer in net.buffers() if buffer.is_floating_point()]


def pour(net, theta):
    """Fills an ordinary net from a flat vector: parameters in order, then BatchNorm means and variances."""
    net, begin = net.to(theta.dtype), 0
    for tensor in [*net.parameters(), *statistics(net)]:
        tensor.data.copy_(theta[begin : begin + tensor.numel()].view_as(tensor))
        begin += tensor.numel()
    assert begin == len(theta)
    return net


def drained(net):
    return torch.cat([t.detach().flatten() for t in [*net.parameters(), *statistics(net)]])


def normalised(data, x):
    """What an ordinary net reads, by NumPy: (n, C, H, W)."""
    if x.dtype == torch.int64:
        return x
    return torch.from_numpy(((x.double().numpy() - data.mean.numpy()) / data.std.numpy()).transpose(0, 3, 1, 2).copy())


ZOO = {  # name: (data, ordinary net, width)
    "lenet5": (lambda: made_up(16, 1), lambda: lenet(1, 16, 4), 0),
    "simplecnn": (lambda: made_up(20, 3), lambda: lenet(3, 20, 4), 0),
    "alexnet": (lambda: made_up(32, 3), lambda: alex(3, 4, 24), 24),
    "vgg11": (lambda: made_up(32, 3), lambda: vgg(3, 4), 0),
    "resnet9": (lambda: made_up(32, 3), lambda: Res9(3, 4), 0),
    "resnet18": (lambda: made_up(32, 3), lambda: Res18(3, 4), 0),
    "fedgen-cnn": (lambda: made_up(28, 1), lambda: Gen(1, 28, 4), 0),
    "lstm": (lambda: sentences(), lambda: Letters(80, 16), 16),
}


def in_groups(net):
    """Group norms of at least two channels a group, 32 groups at most, in the place of batch norms."""
    for parent in list(net.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                groups = {6: 1, 16: 8, 64: 32, 128: 32, 256: 32, 512: 32}[child.num_features]
                setattr(parent, name, nn.GroupNorm(groups, child.num_features))
    return net


def awake(net: nn.Module) -> nn.Module:
    """The net with every dropout at p = 0."""
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.LSTM):
            module.dropout = 0.0
    return net


def prepared(name, norm="batch"):
    """The data, the model without dropout, and the maker of the ordinary net."""
    make, ordinary, width = ZOO[name]
    data = make()
    model = common.build_model(name, data, dtype=DOUBLE, width=width, norm=norm)
    awake(model.skeleton)
    return data, model, lambda: awake(ordinary() if norm == "batch" else in_groups(ordinary()))


def jittered(theta, k, seed=0):
    """k rows near theta; BatchNorm variances stay positive."""
    noise = torch.randn(k, len(theta), generator=torch.Generator().manual_seed(seed), dtype=theta.dtype)
    return theta * (1 + 0.05 * noise)


@pytest.mark.parametrize(("name", "norm"), [*((name, "batch") for name in ZOO), ("fedgen-cnn", "group"), ("resnet9", "group")])
def test_net_equals_ordinary_torch_net(name, norm):
    """One client, and two clients at once, against nn.Module with the same weights."""
    data, model, ordinary = prepared(name, norm)
    stack, index, x = jittered(model.init(3), 2), [np.array([1, 5]), np.array([2, 3, 11])], data.images("train", DOUBLE)
    stacked = common.predict(model, stack, x, index)
    for theta, i, logits in zip(stack, index, stacked, strict=True):
        with torch.no_grad():
            expected = pour(ordinary(), theta).eval()(normalised(data, data.x_train[i]))
        alone = common.predict(model, theta, x, [i])[0]
        assert torch.allclose(alone, expected, rtol=0, atol=1e-10)
        assert torch.allclose(logits, expected, rtol=0, atol=1e-10)
        assert expected.std() > 1e-4  # not a comparison of zeros


@pytest.mark.parametrize(
    ("name", "side", "channels", "classes", "width", "count"),
    [
        ("lenet5", 32, 3, 10, 0, 62_006),
        ("lenet5", 28, 1, 10, 0, 44_426),
        ("simplecnn", 32, 3, 10, 0, 62_006),
        ("alexnet", 32, 3, 10, 0, 23_272_266),
        ("alexnet", 32, 3, 10, 128, 2_400_586),
        ("vgg11", 32, 3, 10, 0, 9_750_922),
        ("resnet9", 32, 3, 100, 0, 6_619_300),
        ("resnet18", 32, 3, 10, 0, 11_173_962),
        ("fedgen-cnn", 28, 1, 10, 0, 26_434),
        ("fedgen-cnn", 28, 1, 26, 0, 26_962),
        ("fedgen-cnn", 84, 3, 2, 0, 25_954),
        ("lstm", 0, 0, 80, 0, 3_739_728),
    ],
)
def test_parameter_counts_of_the_papers(name, side, channels, classes, width, count):
    data = made_up(side, channels, classes, n=1) if side else sentences()
    data.classes = classes
    model = common.build_model(name, data, width=width)
    assert model.trainable == count
    assert model.size == count + sum(2 * m.num_features for m in model.skeleton.modules() if isinstance(m, nn.BatchNorm2d))


def test_init_is_torchs_default_and_leaves_the_global_stream():
    model = common.build_model("lenet5", made_up(16, 1))
    before = torch.get_rng_state()
    theta = model.init(11)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(11)
    assert torch.equal(theta, drained(lenet(1, 16, 4)))
    torch.set_rng_state(before)
    assert not torch.equal(theta, model.init(12))


@pytest.mark.parametrize(
    ("name", "side"), [("lenet5", 15), ("vgg11", 28), ("alexnet", 28), ("lstm", 16), ("lenet5", 0), ("lenet", 16)]
)
def test_a_net_that_does_not_fit_the_data(name, side):
    with pytest.raises(UsageError, match=f"^--model {name}: [^\n]*$"):
        common.build_model(name, made_up(side) if side else sentences())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("height, width", [(12, 12), (11, 6), (6, 13), (7, 9)])
def test_pooling_before_the_bias_changes_no_bit(height, width, training):
    """max(a + b) = max(a) + b in floating point too, since rounding is monotone; NaN stays, odd edges are left out."""
    torch.manual_seed(0)
    ours, x = common.Conv2d(6, 8, 3, padding=1, pool=True), torch.randn(5, 6, height, width)
    x[1], x[2, :, 3, 3] = 0, torch.nan
    ordinary = F.max_pool2d(F.conv2d(x, ours.weight, ours.bias * 0, 1, 1) + ours.bias[:, None, None], 2)
    ours.weight, ours.bias = nn.Parameter(ours.weight[None].detach()), nn.Parameter(ours.bias[None].detach())
    with torch.set_grad_enabled(training):
        assert torch.equal(ours(x).nan_to_num(nan=7.0), ordinary.nan_to_num(nan=7.0))


def test_gradients_of_a_batched_linear_map():
    torch.manual_seed(0)
    arguments = [torch.randn(*shape, dtype=DOUBLE, requires_grad=True) for shape in ((3, 4, 5), (3, 2, 5), (3, 2))]
    assert torch.autograd.gradcheck(common.Affine.apply, arguments)


@pytest.mark.parametrize("channels", [1, 3])
def test_stacked_images_lie_channels_last_in_memory(channels):
    """The convolutions of stacked clients are twice as slow on the other layout, and give the same numbers."""
    stacked = common.inputs(torch.zeros(4, 2, 16, 16, channels))
    assert stacked.shape == (2, 4 * channels, 16, 16) and stacked.is_contiguous(memory_format=torch.channels_last)
    assert common.inputs(torch.zeros(1, 2, 16, 16, channels)).is_contiguous()


# -------------------------------------------------------------------------------------------------- anyone's own nets


MOBILE = """
from torchvision.models import mobilenet_v2
class Net(mobilenet_v2().__class__):
    def __init__(self, channels, side, classes):
        super().__init__(classes, width_mult=0.25, dropout=0.0)
"""
TRANSFORMER = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, channels, side, classes):
        super().__init__()
        self.cut = nn.Conv2d(channels, 8, 4, 4)
        self.register_buffer("order", torch.arange((side // 4) ** 2).flip(0))
        self.register_buffer("places", torch.randn((side // 4) ** 2, 8), persistent=False)
        self.blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 1)
        self.out = nn.Linear(8, classes)
    def forward(self, x):
        tokens = self.cut(x).flatten(2).transpose(1, 2)[:, self.order] + self.places
        return self.out(self.blocks(tokens).mean(1))
"""


FLAT = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self, channels, side, classes):
        super().__init__(nn.Flatten(), nn.Linear(channels * side * side, classes))
"""


def own(tmp_path, text):
    """The name of the net for --model, and its class as anyone would import it."""
    path, there = tmp_path / "mine.py", {}
    path.write_text(text)
    exec(text, there)
    return f"{path}:Net", there["Net"]


@pytest.mark.parametrize(
    "text",
    [
        "Net = 3",
        "class Net: pass",
        "class Other: pass",
        "def Net(:",
        "import no_such_module",
        "class Net:\n    def __init__(self, *sizes):\n        raise RuntimeError('no\\nluck')",
        "from torch import nn\nclass Net(nn.Flatten):\n    def __init__(self, *sizes):\n        super().__init__()",
        FLAT + "    def forward(self, x):\n        return super().forward(x).detach()",
        FLAT + "        self.spare = nn.Linear(1, 1)\n    def forward(self, x):\n        return self[1](self[0](x))",
        None,
    ],
)
def test_an_own_net_that_is_none(text, tmp_path):
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UsageError, match="^--model [^\n]*mine.py:Net: [^\n]+$"):
        common.build_model(f"{tmp_path / 'mine.py'}:Net", made_up())
    (tmp_path / "mine.py").write_text(FLAT)
    assert common.build_model(f"{tmp_path / 'mine.py'}:Net", made_up()).plain
    with pytest.raises(UsageError, match="mine.py:Net: a projection head, as under moon, wants a net of images"):
        common.build_model(f"{tmp_path / 'mine.py'}:Net", made_up(), projection=True)


# ------------------------------------------------------------------------------- train beside the loop of its docstring


def eight_lines():
    """The loop in train's docstring, compiled: (K, x, batches, lr, gradient, ...) -> `trained`, a list of y."""
    lines = common.train.__doc__.splitlines()
    begin = next(i for i, line in enumerate(lines) if "for k in range(K):" in line)
    loop = textwrap.dedent("\n".join(lines[begin : lines.index("", begin)]))
    text = "g = grad of loss + penalty at y, over the samples batch[batch >= 0]"
    assert text in loop
    loop = loop.replace(text, "g = gradient(k, t, y, batch[batch >= 0])")
    return compile(f"trained = []\n{loop}\n    trained.append(y)", "train's docstring", "exec")


class Gradient:
    """grad of loss + penalty at y by an ordinary torch net. Keeps each client's BatchNorm statistics, losses and ||g||^2.

    weights  for each client (T_k, B); term(net, images, client, t) is added to the loss
    """

    def __init__(self, net, data, start, weights=None, term=None):
        self.net, self.data, self.weights, self.term = net, data, weights, term
        self.trainable = sum(p.numel() for p in net.parameters())
        self.statistics = list(start[:, self.trainable :])
        self.losses, self.squares = [[] for _ in start], [[] for _ in start]

    def __call__(self, k, t, y, index):
        net = pour(self.net, torch.cat([y, self.statistics[k]])).train()
        x, labels = normalised(self.data, self.data.x_train[index]), self.data.y_train[index]
        each = F.cross_entropy(net(x), labels, reduction="none")
        self.statistics[k] = drained(net)[self.trainable :]
        factor = 1 if self.weights is None else torch.from_numpy(self.weights[k][t][: len(index)])
        loss = (factor * each).sum() / len(index) + (self.term(net, x, k, t) if self.term else 0)
        g = torch.cat([p.flatten() for p in torch.autograd.grad(loss, list(net.parameters()))])
        self.losses[k].append(loss.item())
        self.squares[k].append(g.square().sum().item())
        return g


def literally(net, data, start, batches, lr, *, momentum=0, weight_decay=0, proximal=0, correction=None, **own):
    """What K clients send back, by the eight lines: (weights (K, P), mean losses, mean ||g||^2)."""
    gradient = Gradient(net, data, start, **own)
    x, lr = start[:, : gradient.trainable], np.broadcast_to(lr, max(len(b) for b in batches)) if np.isscalar(lr) else lr
    there = {"K": len(batches), "x": x, "batches": batches, "gradient": gradient, "momentum": momentum, "proximal": proximal}
    there |= {"weight_decay": weight_decay, "correction": torch.zeros_like(x) if correction is None else correction, "lr": lr}
    exec(eight_lines(), there)
    weights = torch.stack([torch.cat(pair) for pair in zip(there["trained"], gradient.statistics, strict=True)])
    return weights, *([np.mean(values) for values in rows] for rows in (gradient.losses, gradient.squares))


def agree(update, expected, start, batches):
    weights, losses, squares = expected
    assert (weights - start).abs().amax(1).min() > 1e-3  # every client moved
    assert (update.weights - weights).abs().max() < 1e-10
    np.testing.assert_allclose(update.loss, losses, rtol=1e-10)
    np.testing.assert_allclose(update.grad_sq, squares, rtol=1e-10)
    assert update.steps.tolist() == [len(b) for b in batches]
    assert update.samples.tolist() == [(b >= 0).sum() for b in batches]


DECAYING = 0.05 * (1 + 0.3 * np.arange(9)) ** -0.75
OPTIONS = {
    "plain": {"lr": 0.05},
    "momentum": {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-3},
    "schedule": {"lr": DECAYING},
    "proximal": {"lr": DECAYING, "proximal": 0.3, "momentum": 0.5},
    "correction": {"lr": DECAYING, "correction": True},
    "weights": {"lr": 0.05, "weights": True, "momentum": 0.9},
    "all": {"lr": DECAYING, "momentum": 0.8, "weight_decay": 0.01, "proximal": 0.2, "correction": True, "weights": True},
}
RAGGED = (7, 3, 10, 1, 6)


def made(option, model, batches):
    """The keyword arguments of an option."""
    flags, rng = dict(OPTIONS[option]), np.random.default_rng(2)
    if flags.get("correction"):
        flags["correction"] = torch.from_numpy(0.05 * rng.normal(size=(len(batches), model.trainable)))
    if flags.get("weights"):
        flags["weights"] = [rng.uniform(0, 3, b.shape) for b in batches]
    return flags


@pytest.mark.parametrize(
    ("name", "norm", "option", "sizes", "batch", "chunk"),
    [
        *(("lenet5", "batch", option, RAGGED, 3, 0) for option in OPTIONS),
        *(("lenet5", "batch", "all", RAGGED, 3, chunk) for chunk in (1, 2)),
        ("simplecnn", "batch", "all", RAGGED, 3, 3),
        *(("fedgen-cnn", "batch", option, RAGGED, 3, chunk) for option, chunk in (("plain", 0), ("all", 2))),
        *(("fedgen-cnn", "batch", "momentum", sizes, 4, 0) for sizes in ((8, 8, 8), (6, 6), (5,))),
        ("fedgen-cnn", "group", "all", RAGGED, 3, 0),
        *((name, "batch", "momentum", (3, 4), 2, chunk) for name in ("alexnet", "resnet9") for chunk in (1, 2)),
        *((name, "batch", "momentum", (3, 2), 2, 2) for name in ("vgg11", "resnet18")),
        ("lstm", "batch", "all", (5, 3), 2, 0),
    ],
)
def test_train_equals_the_loop_of_its_docstring(name, norm, option, sizes, batch, chunk):
    """Ragged clients and short batches: padding must enter no batch statistics. All nets, stacked and one by one."""
    data, model, ordinary = prepared(name, norm)
    batches = schedules(data, sizes, batch)
    start, flags = jittered(model.init(1), len(sizes)), made(option, model, batches)
    kept = start.clone()
    update = common.train(model, start, data, batches, chunk=chunk, **flags)
    assert torch.equal(start, kept)  # the caller's weights are not trained in place
    agree(update, literally(ordinary(), data, start, batches, **flags), start, batches)


@pytest.mark.parametrize("text", [MOBILE, TRANSFORMER])
def test_own_nets_train_as_the_loop_of_the_docstring(text, tmp_path):
    """BatchNorm; whole and non-persistent buffers. One client at a time, with dropout and batch norm off when it is tested."""
    data, (name, net) = made_up(32, 3), own(tmp_path, text)
    model, batches = common.build_model(name, data, dtype=DOUBLE), schedules(data, (16, 8), 8)
    start, ordinary = jittered(model.init(0), 2), net(3, 32, 4)
    flags = made("all", model, batches) | {"lr": 0.005, "correction": None}  # a batch norm over 8 samples is steep
    update = common.train(model, start, data, batches, **flags)
    agree(update, literally(ordinary, data, start, batches, **flags), start, batches)
    with torch.no_grad():
        expected = pour(ordinary, update.weights[1]).eval()(normalised(data, data.x_test))
    logits = common.predict(model, update.weights[1], data.images("test", DOUBLE), [np.arange(60)])[0]
    assert model.plain and torch.allclose(logits, expected, rtol=0, atol=1e-10)
    norms = [m.num_features for m in ordinary.modules() if isinstance(m, nn.BatchNorm2d)]
    assert common.build_model(name, data, norm="group").size == model.size - 2 * sum(norms)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_gaps_in_the_heap_are_given_back():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    blocks = [torch.ones(2**18) for _ in range(300)]  # 1 MiB each
    kept, full = blocks[::10], resident()
    del blocks  # what lies between two that are kept stays, unless it is trimmed
    common.trim()
    assert full - resident() > 250 and len(kept) == 30


def test_what_an_own_net_draws_and_does_not_learn_is_the_same_in_every_process(tmp_path):
    name, _ = own(tmp_path, TRANSFORMER.replace("torch.arange((side // 4) ** 2).flip(0)", "torch.randperm((side // 4) ** 2)"))
    orders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = torch.manual_seed(seed).get_state().clone()
        [order] = common.build_model(name, made_up(32)).constants.values()
        orders.append(order.tolist())
        assert torch.equal(torch.get_rng_state(), expected)
    assert orders[0] == orders[1] != sorted(orders[0])
    drawn = "\n        self[1].weight.data[:] = torch.as_tensor(np.random.rand(classes, 1)).float()"
    name, _ = own(tmp_path, "import numpy as np, torch" + FLAT.rstrip() + drawn)
    first, again, other = (common.build_model(name, made_up(16)).init(seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.isclose(first[0], other[0], atol=1e-6)


def test_a_batch_norm_that_counts_its_batches_is_refused(tmp_path):
    """What torch calls a cumulative average needs the number of batches, an integer that no average of clients keeps."""
    name, _ = own(
        tmp_path, FLAT.replace("side * side, classes))", "side * side, classes), nn.BatchNorm1d(classes, momentum=None))")
    )
    with pytest.raises(UsageError, match="^--model [^\n]*momentum None[^\n]*$"):
        common.build_model(name, made_up(16))


def test_an_own_net_that_fails_in_training_is_named_in_one_line(tmp_path):
    """Batch norm over vectors takes no batch of one, which the last of an epoch may be."""
    text = FLAT.replace("side * side, classes))", "side * side, classes), nn.BatchNorm1d(classes))")
    strict = FLAT + "    def forward(self, x):\n        assert len(x) > 1 or not self.training, 'Expected more than 1 value'\n"
    for net, error in ((text, "ValueError"), (strict + "        return super().forward(x)", "AssertionError")):
        fl = common.Federation(settings(model=own(tmp_path, net)[0]), made_up(16), common.Streams(0))
        said = f"^--model [^\n]*mine.py:Net: {error}: Expected more than 1 value[^\n]*$"
        state, batches = fl.start(), [np.array([[0, 1], [2, -1]])]
        with pytest.raises(UsageError, match=said):
            fl.train(state, 0, np.array([0]), batches)
        with pytest.raises(UsageError, match=said):  # as --stack-trials does
            common.train_together([(fl.model, state["weights"], fl.data, batches, {"lr": 0.1})])


@pytest.mark.parametrize("split, low, high", [("x_train", -1, 79), ("y_train", 0, 80), ("x_test", 0, 80), ("y_test", -1, 3)])
def test_a_text_of_other_characters_is_refused(split, low, high):
    arrays = {name: np.full((6, 4) if name[0] == "x" else 6, 79) for name in ("x_train", "y_train", "x_test", "y_test")}
    assert common.resident(**arrays).classes == 80
    arrays[split].flat[:2] = low, high
    with pytest.raises(ValueError, match="wanted"):
        common.resident(**arrays)


def test_what_an_own_net_has_frozen_stays(tmp_path):
    """A frozen layer before a trained one, by torch's own SGD over what wants a gradient."""
    text = FLAT.replace("nn.Flatten(), nn.Linear(channels * side * side, classes))", "nn.Flatten(), nn.Linear(256, 5),")
    text += "            nn.Tanh(), nn.Linear(5, classes))\n        self[1].requires_grad_(False)\n"
    data, (name, build) = made_up(16), own(tmp_path, text)
    model, net = common.build_model(name, data, dtype=DOUBLE), build(1, 16, 4).double()
    start = model.init(0)
    assert model.trainable == 5 * 4 + 4 and model.size == model.trainable + 257 * 5
    tensors = [net[3].weight, net[3].bias, net[1].weight, net[1].bias]
    for tensor, values in zip(tensors, start.split([t.numel() for t in tensors]), strict=True):
        tensor.data.copy_(values.view(tensor.shape))
    batches = np.arange(12).reshape(4, 3)
    sgd = torch.optim.SGD(tensors[:2], lr=0.1, momentum=0.5, weight_decay=0.1)
    for batch in batches:
        sgd.zero_grad()
        F.cross_entropy(net(normalised(data, data.x_train)[batch]), data.y_train[batch]).backward()
        sgd.step()
    update = common.train(model, start, data, [batches], lr=0.1, momentum=0.5, weight_decay=0.1)
    expected = torch.cat([tensor.detach().flatten() for tensor in tensors])
    assert torch.allclose(update.weights[0], expected, rtol=0, atol=1e-12) and not torch.equal(expected, start)
    assert torch.equal(update.weights[0, model.trainable :], start[model.trainable :])


@pytest.mark.parametrize("name", common.BASES)
def test_every_base_trains_as_the_loop_of_the_docstring(name):
    """Three rounds of three of five clients: each base's correction, proximal and contrastive term as its `client` gives it."""
    data = made_up(16)
    config = settings(base=name, mu=0.7 if name in ("fedprox", "moon") else -1, momentum=0.5, weight_decay=0.01)
    fl, previous = common.Federation(config, data, common.Streams(3)), {}
    state = fl.start()
    net = (MoonNet if name == "moon" else lenet)(1, 16, 4)
    for t in range(3):
        clients = fl.select(t, 3)
        theta, start = state["weights"], fl.received(state, clients).expand(3, -1).clone()
        batches = [common.epochs_of_batches(fl.shards[m], 1, 5, fl.streams("batches", t, m)) for m in clients]
        told = fl.base.client(theta, clients)

        def contrast(net, x, k, t, clients=clients, theta=theta, previous=previous):
            if int(clients[k]) not in previous:
                return 0
            frozen = [pour(MoonNet(1, 16, 4), w).z(x).detach() for w in (theta, previous[int(clients[k])])]
            z = net.z(x)
            glob, prev = (torch.exp(torch.cosine_similarity(z, other) / 0.5) for other in frozen)
            return 0.7 * -torch.log(glob / (glob + prev)).mean()

        expected = literally(
            *(net, data, start, batches, DECAYING),
            **{"momentum": 0.5, "weight_decay": 0.01, "term": contrast if name == "moon" else None},
            **{flag: told.get(flag) or 0 if flag == "proximal" else told.get(flag) for flag in ("proximal", "correction")},
        )
        kept, update = fl.train(state, t, clients, batches, lr=DECAYING)
        assert kept.tolist() == clients.tolist()
        agree(update, expected, start, batches)
        previous |= dict(zip(clients.tolist(), update.weights, strict=True))
        fl.aggregate(state, kept, update)
    if name in ("scaffold", "vrlsgd"):
        assert told["correction"].abs().max() > 1e-4
    assert len(previous) > 3  # somebody returned, somebody was new


# --------------------------------------------------------------------------------- clients together, apart, over ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_clients_and_add_up(ranks, monkeypatch):
    """Each rank alone: every client's row comes from exactly one, and all together are one process's result."""
    data = made_up(16)
    model, batches = common.build_model("lenet5", data, dtype=DOUBLE), schedules(data, RAGGED, 3)
    whole = common.train(model, model.init(0), data, batches, lr=0.05)
    for name, told in (("is_initialized", True), ("get_world_size", ranks), ("all_reduce", None)):
        monkeypatch.setattr(common.dist, name, lambda *_, told=told: told)
    parts = []
    for number in range(ranks):
        monkeypatch.setattr(common.dist, "get_rank", lambda number=number: number)
        parts.append(common.train(model, model.init(0), data, batches, lr=0.05))
    trained = np.array([(part.weights != 0).any(1).numpy() for part in parts])
    assert (trained.sum(0) == 1).all() and trained.any(1).all()
    assert (sum(part.weights for part in parts) - whole.weights).abs().max() < 1e-12
    for name in ("grad_sq", "loss"):
        np.testing.assert_allclose(sum(getattr(part, name) for part in parts), getattr(whole, name), rtol=1e-10)
    assert all(np.array_equal(part.length, whole.length) and np.array_equal(part.samples, whole.samples) for part in parts)


def test_stacked_clients_do_not_touch_one_another():
    """A client whose weights blow up to NaN leaves the others' bits alone."""
    data = made_up(16)
    model, batches = common.build_model("lenet5", data, dtype=DOUBLE), schedules(data, (6, 6, 4), 3)
    start = jittered(model.init(0), 3)
    clean = common.train(model, start, data, batches, lr=0.1)
    start[1] = math.nan
    dirty = common.train(model, start, data, batches, lr=0.1)
    assert dirty.weights[1].isnan().all()
    assert torch.equal(dirty.weights[[0, 2]], clean.weights[[0, 2]])


def test_weights_of_integers_and_fractions_side_by_side():
    """The first client's weights are whole numbers, the second's are not: neither may be cut to the other's type."""
    data = made_up(16)
    model = common.build_model("lenet5", data, dtype=DOUBLE)
    batches, weights = [np.arange(4)[None], np.arange(4, 8)[None]], [np.ones((1, 4), int), np.full((1, 4), 0.5)]
    update = common.train(model, model.init(0), data, batches, lr=0.1, weights=weights)
    alone = common.train(model, model.init(0), data, batches[1:], lr=0.1, weights=weights[1:])
    assert update.loss[1] == pytest.approx(alone.loss[0], rel=1e-12) and alone.loss[0] > 0.1


def test_a_client_without_samples_returns_what_it_was_given():
    data = made_up(16)
    model = common.build_model("lenet5", data)
    theta = model.init(0)
    update = common.train(model, theta, data, [np.zeros((0, 4), int), np.arange(4)[None]], lr=0.1)
    assert torch.equal(update.weights[0], theta) and update.length.tolist() == [0, 0.1]
    assert update.grad_sq[0] == 0 and update.steps.tolist() == [0, 1] and update.samples.tolist() == [0, 4]
    assert torch.equal(common.train(model, theta, data, [np.zeros((0, 4), int)], lr=0.1).weights[0], theta)


def test_rows_of_an_update():
    update = common.Update(torch.arange(6.0).view(3, 2), np.array([1, 2, 3]), *(np.arange(3.0) + i for i in range(4)))
    some = update[np.array([2, 0])]
    assert some.weights.tolist() == [[4, 5], [0, 1]] and some.steps.tolist() == [3, 1]
    assert [some.samples.tolist(), some.length.tolist(), some.grad_sq.tolist(), some.loss.tolist()] == [
        [i + 2, i] for i in range(4)
    ]


@pytest.mark.parametrize("name", ["alexnet", "vgg11", "lstm"])
def test_dropout_lies_where_the_ordinary_nets_does_and_follows_each_clients_seed(name):
    """One client at a time; stacked ones share the first one's seed. It sleeps when samples are scored."""
    make, ordinary, width = ZOO[name]
    data, seeds = make(), [5, 6]
    model, batches = common.build_model(name, data, dtype=DOUBLE, width=width), schedules(data, (4, 3), 2)
    start = jittered(model.init(0), 2)
    update = common.train(model, start, data, batches, lr=0.05, seeds=seeds, chunk=1)
    for k, seed in enumerate(seeds):
        net, _ = ordinary(), torch.manual_seed(seed)
        expected = literally(net, data, start[k : k + 1], batches[k : k + 1], 0.05)[0]
        assert (update.weights[k] - expected[0]).abs().max() < 1e-10
    for again, equal in ((5, True), (7, False)):
        weights = common.train(model, start[:1], data, batches[:1], lr=0.05, seeds=[again]).weights[0]
        assert torch.equal(weights, update.weights[0]) == equal
    torch_state = torch.get_rng_state()
    one, two = (common.score(model, start[0], data, [np.arange(12)])[0][0] for _ in range(2))
    assert np.array_equal(one, two) and torch.equal(torch.get_rng_state(), torch_state)


def test_how_many_clients_are_stacked():
    """All of a small net's; on a CPU, big nets and plain ones are trained one by one."""
    chunks = {name: common.build_model(name, make(), width=width).default_chunk() for name, (make, _, width) in ZOO.items()}
    assert chunks == {name: 64 if name in ("lenet5", "simplecnn", "fedgen-cnn") else 1 for name in ZOO}
    big, plain = (common.build_model(name, ZOO[name][0]()) for name in ("resnet9", "lstm"))
    big.device = plain.device = "cuda"
    assert big.default_chunk() == 64 and plain.default_chunk() == 1


# ----------------------------------------------------------------------------------------------- the steps of a GPU


class Pretended(str):
    """The CPU, answering to the GPU's name: `train` takes the GPU's path, but for the recording of a CUDA graph."""

    def __eq__(self, other):
        return other == "cuda"

    __hash__ = str.__hash__


class Recorded(TorchDispatchMode):
    """As a CUDA graph: the operations on memory that a step did, which can be done again without its Python."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.operations.append((operation, args, kwargs or {}, result))  # which keeps its tensors, so their ids, alive
        return result

    @torch.no_grad()
    def replay(self):
        new = {}

        def now(value):
            if isinstance(value, (list, tuple)):
                return type(value)(map(now, value))
            return new.get(id(value), value)

        for operation, args, kwargs, old in self.operations:
            result = operation(*now(args), **{name: now(value) for name, value in kwargs.items()})
            pairs = zip(old, result, strict=True) if isinstance(old, (list, tuple)) else [(old, result)]
            new |= {id(before): after for before, after in pairs if isinstance(before, torch.Tensor)}


@pytest.fixture
def gpu(monkeypatch):
    """A stand-in for the GPU: a list of (live clients, step) captured. To capture is to note the step down without doing it."""
    captures = []

    def captured(step):
        stack, tape = step.func.__self__, Recorded()
        memory = [value for value in vars(stack).values() if isinstance(value, torch.Tensor)]
        memory += [part for value in vars(stack).values() if isinstance(value, list) for part in value]
        before = [value.clone() for value in memory]
        with tape:
            step()
        for held, value in zip(memory, before, strict=True):
            held.copy_(value)
        captures.append((step.args[0], int(stack.t)))
        return tape.replay

    monkeypatch.setattr(common, "captured", captured)
    monkeypatch.setattr(common, "side_stream", contextlib.nullcontext)
    return captures


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["lenet5", "fedgen-cnn", "simplecnn"])
def test_the_steps_of_a_gpu_equal_those_of_a_cpu(name, option, gpu):
    """Finished clients stay in the stack, masked, so that log2 K graphs serve all live counts; BatchNorm captures nothing."""
    data, model, _ = prepared(name)
    batches = schedules(data, (40, 12, 33, 3, 60, 35), 3)
    start = jittered(model.init(1), 6)
    flags = {"chunk": 5} | made(option, model, batches)
    flags["lr"] = np.resize(flags["lr"], 20)
    expected = common.train(model, start, data, batches, **flags)
    model.device = Pretended("cpu")
    update = common.train(model, start, data, batches, **flags)
    assert (update.weights - expected.weights).abs().max() < 1e-12
    for what in ("steps", "samples", "length", "grad_sq", "loss"):
        np.testing.assert_allclose(getattr(update, what), getattr(expected, what), rtol=1e-10)
    # of five stacked clients 5 are live until step 4, 4 until 11, 3 (as 4) until 12, 2 until 14, 1 until 20: three of each are
    # taken as they are, then one is captured; the last client is alone and takes a single step
    assert gpu == ([] if name == "fedgen-cnn" else [(5, 3), (4, 7), (1, 17)])


def test_hooks_of_a_captured_step_read_the_schedule_of_their_step(gpu):
    """Penalty, frozen net, tensors by client and by step, augmentation: all from memory, nothing from Python's step number.

    A client that has finished neither moves nor adds to its sums, whatever the penalty still says of its weights.
    """
    data, model, _ = prepared("lenet5")
    batches, rng = schedules(data, (40, 9, 30, 36), 3), np.random.default_rng(0)
    flags = {"per_step": {"pull": [rng.uniform(0, 1, len(b)) for b in batches]}, "per_client": {"own": torch.arange(4)}}
    flags |= {
        "frozen": {"old": model.init(7)},
        "augment": lambda images, extra: images * extra["pull"][:, None, None, None, None],
    }

    def penalty(step):
        away = step.features - step.frozen["old"].features(step.inputs).detach()
        decay = 0.01 * step.net.head.weight.square().sum((1, 2))
        return decay + step.extra["own"] * step.extra["pull"] * (step.mean * away.square().sum(2)).sum(1)

    expected = common.train(model, model.init(0), data, batches, lr=0.05, penalty=penalty, **flags)
    model.device = Pretended("cpu")
    update = common.train(model, model.init(0), data, batches, lr=0.05, penalty=penalty, **flags)
    assert gpu and (update.weights - expected.weights).abs().max() < 1e-12
    for what in ("grad_sq", "loss"):
        np.testing.assert_allclose(getattr(update, what), getattr(expected, what), rtol=1e-10)


# --------------------------------------------------------------------------------------------------------------- hooks


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_hooks_see_the_rows_of_their_client_and_step(chunk):
    """loss, frozen, per_client, per_step and sample weights with ragged clients in shuffled order."""
    data, rng = made_up(16), np.random.default_rng(1)
    model, batches = common.build_model("lenet5", data, dtype=DOUBLE), schedules(data, (4, 11, 1, 7), 3)
    weights = [rng.uniform(0, 2, b.shape) for b in batches]
    stack, images, seen = jittered(model.init(0), 4, seed=3), data.images("train", DOUBLE), []

    def check(step):
        for row, (client, clock) in enumerate(zip(step.extra["id"].tolist(), step.extra["clock"].tolist(), strict=True)):
            index = batches[client][int(clock)]
            real = index[index >= 0]
            n = len(real)
            assert torch.equal(step.x[row, :n], images[real]) and torch.equal(step.y[row, :n], data.y_train[real])
            assert torch.allclose(step.mean[row, :n], torch.full((n,), 1 / n, dtype=DOUBLE))
            expected = torch.from_numpy(weights[client][int(clock)][:n]) / n
            assert torch.allclose(step.weight[row, :n], expected)
            assert not step.mean[row, n:].any() and not step.weight[row, n:].any()
            frozen = pour(lenet(1, 16, 4), stack[client]).eval()
            shown = step.frozen["old"].features(step.inputs)[row, :n]
            assert torch.allclose(shown, frozen[:-1](normalised(data, data.x_train[real])), atol=1e-10)
            assert not shown.requires_grad and not step.frozen["old"].training and step.net.training
            seen.append((client, int(clock)))
        return common.cross_entropy(step)

    extra = {"per_client": {"id": torch.arange(4)}, "per_step": {"clock": [np.arange(len(b)) for b in batches]}}
    flags = {"lr": 0.1, "weights": weights, "loss": check, "frozen": {"old": stack}, "chunk": chunk} | extra
    common.train(model, model.init(0), data, batches, **flags)
    assert sorted(seen) == [(k, t) for k, b in enumerate(batches) for t in range(len(b))]  # each once


def test_a_penalty_equals_a_term_in_the_loop():
    """With strengths by client and by step, and one frozen vector that serves all clients."""
    data, model, _ = prepared("lenet5")
    batches, theta, rng = schedules(data, (8, 3, 5), 3), model.init(4), np.random.default_rng(2)
    strength, each = torch.tensor([0.5, 0.0, 2.0], dtype=DOUBLE), [rng.uniform(size=len(b)) for b in batches]
    frozen = pour(lenet(1, 16, 4), theta)

    def penalty(step):
        away = (step.features - step.frozen["old"].features(step.inputs)).square().sum(2)
        return step.extra["s"] * step.extra["each"] * (step.mean * away).sum(1)

    def term(net, x, k, t):
        return strength[k] * each[k][t] * (net[:-1](x) - frozen[:-1](x).detach()).square().sum(1).mean()

    start, extra = jittered(model.init(0), 3), {"per_client": {"s": strength}, "per_step": {"each": each}}
    update = common.train(model, start, data, batches, lr=0.05, penalty=penalty, frozen={"old": theta}, **extra)
    agree(update, literally(lenet(1, 16, 4), data, start, batches, 0.05, term=term), start, batches)


def test_augment_reads_the_extras_and_works_on_normalised_images():
    data, rng = made_up(16, 3), np.random.default_rng(2)
    model, batches = common.build_model("lenet5", data, dtype=DOUBLE), schedules(data, (8, 3, 5), 3)
    invert = [rng.integers(0, 2, len(b)) for b in batches]
    assert len(set(np.concatenate(invert))) == 2

    def augment(images, extra):
        assert images.dtype == DOUBLE and images.shape[:1] == extra["invert"].shape
        return torch.where(extra["invert"].view(-1, 1, 1, 1, 1) > 0, -images, images)

    update = common.train(model, model.init(0), data, batches, lr=0.05, augment=augment, per_step={"invert": invert})
    for k, schedule in enumerate(batches):
        theta = model.init(0)[None]
        for t, row in enumerate(schedule):  # one step at a time on a data set that is mirrored at its mean or not
            twin = made_up(16, 3)
            twin.std = -twin.std if invert[k][t] else twin.std
            theta = literally(lenet(3, 16, 4), twin, theta, [row[None]], 0.05)[0]
        assert (update.weights[k] - theta[0]).abs().max() < 1e-10


def test_images_are_normalised_once_as_numpy_does():
    data = made_up(16, 3)
    for split, x in (("train", data.x_train), ("test", data.x_test)):
        shown = data.images(split, DOUBLE)
        assert torch.allclose(shown.permute(0, 3, 1, 2), normalised(data, x), rtol=0, atol=1e-12)
        assert data.images(split, DOUBLE) is shown and data.images(split).dtype == torch.float32
        assert x.dtype == torch.uint8
    x = data.images("train", DOUBLE)[:6].view(2, 3, 16, 16, 3)  # K = 2 clients of B = 3
    assert torch.equal(common.inputs(x), torch.cat([x[0], x[1]], 3).permute(0, 3, 1, 2))
    assert torch.equal(common.inputs(x[:1]), x[0].permute(0, 3, 1, 2))
    text = sentences()
    assert data.images("train") is not text.images("train") is text.x_train


# ------------------------------------------------------------------------------------------ bases against float64 NumPy


class Point(nn.Module):
    """y (K, n) itself: the net of a quadratic."""

    def __init__(self, n=5):
        super().__init__()
        self.y = nn.Parameter(torch.zeros(n))

    def features(self, x):
        return self.y.unsqueeze(1)

    def head(self, z):
        return z


POINTS = common.Model(Point, dtype=DOUBLE)
NOTHING = common.Data(*(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)) * 2, 2)


def quadratic(step):
    """1/2 (y - a)' H (y - a) + b_t' y of each client."""
    away = step.net.y - step.extra["a"]
    return torch.einsum("ki,kij,kj->k", away, step.extra["H"], away) / 2 + (step.net.y * step.extra["b"]).sum(1)


class Problem:
    """M quadratics, who takes part in each round, local steps, sizes and gradient noise."""

    def __init__(self, M=6, rounds=5, each=3, n=5, seed=0, taus=None, sizes=None):
        rng = np.random.default_rng(seed)
        root = rng.normal(size=(M, n, n))
        self.M, self.n, self.rounds = M, n, rounds
        self.H = root @ root.transpose(0, 2, 1) / n + 0.3 * np.eye(n)
        self.a, self.x0 = rng.normal(size=(M, n)), rng.normal(size=n)
        self.sizes = rng.integers(5, 50, M) if sizes is None else np.full(M, sizes)
        self.tau = rng.integers(1, 7, M) if taus is None else np.full(M, taus)
        self.noise = [[0.1 * rng.normal(size=(self.tau[m], n)) for m in range(M)] for _ in range(rounds)]
        self.picks = [np.sort(rng.choice(M, each, replace=False)) for _ in range(rounds)]


def driven(name, problem, lr, momentum=0.0, weight_decay=0.0, mu=-1.0, server_lr=0.0, base_class=None):
    """x^t of every round (for solo, of every client), and the base, by common.train and the base's own methods."""
    config = settings(base=name, momentum=momentum, mu=mu, server_lr=server_lr, clients=problem.M)
    base = (base_class or common.BASES[name])(config, POINTS)
    x, path = torch.from_numpy(problem.x0), []
    for S, noise in zip(problem.picks, problem.noise, strict=True):
        flags = base.client(x, S)
        flags["per_client"] = {"H": torch.from_numpy(problem.H[S]), "a": torch.from_numpy(problem.a[S])} | flags.get(
            "per_client", {}
        )
        batches, noises = [np.zeros((problem.tau[m], 1), int) for m in S], {"b": [noise[m] for m in S]}
        flags |= {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "loss": quadratic, "per_step": noises}
        update = common.train(POINTS, base.start(x, S), NOTHING, batches, **flags)
        x = base.aggregate(x, update, S, problem.sizes[S])
        path.append(base.start(x, np.arange(problem.M)).numpy().copy())
    return np.array(path), base


def local_steps(problem, m, noise, y, eta, rho, wd, extra):
    """tau_m steps of heavy-ball SGD; `extra`(y) is what the base adds to the gradient."""
    y, v = y.copy(), 0
    for j in range(problem.tau[m]):
        g = problem.H[m] @ (y - problem.a[m]) + noise[m][j] + wd * y + extra(y)
        v = rho * v + g
        y = y - eta[j] * v
    return y


def accumulated(eta, rho, tau):
    """||a||_1 = sum_j sum_{k >= j} (eta_k / eta_0) rho^{k-j} of FedNova."""
    return sum(eta[k] / eta[0] * rho ** (k - j) for j in range(tau) for k in range(j, tau))


def cosine_pull(y, u):
    """cos(y, u) and its gradient in y."""
    norm = np.linalg.norm(y) * np.linalg.norm(u)
    return y @ u / norm, u / norm - (y @ u / norm) * y / (y @ y)


def contrast_gradient(y, x, previous, mu, temperature=0.5):
    s1, d1 = cosine_pull(y, x)
    s2, d2 = cosine_pull(y, previous)
    wrong = 1 / (1 + np.exp((s1 - s2) / temperature))  # softmax weight of the negative pair
    return mu * wrong * (d2 - d1) / temperature


def by_numpy(name, problem, eta, rho=0.0, wd=0.0, mu=0.0, server_lr=1.0):
    """The ten bases, literally. Returns x^t of every round and what is remembered."""
    P, x, path = problem, problem.x0.copy(), []
    c, c_i, delta = np.zeros(P.n), np.zeros((P.M, P.n)), np.zeros((P.M, P.n))
    m, v, previous, own = np.zeros(P.n), np.full(P.n, 1e-6), {}, {}

    def added(i, y):
        """What the base adds to the gradient of client i."""
        if name == "moon" and i in previous:
            return contrast_gradient(y, x, previous[i], mu)
        return {"fedprox": mu * (y - x), "scaffold": c - c_i[i], "vrlsgd": -delta[i]}.get(name, 0)

    for S, noise in zip(P.picks, P.noise, strict=True):
        p = P.sizes[S] / P.sizes[S].sum()
        begin = {i: own.get(i, x) for i in S}
        ys = np.array([local_steps(P, i, noise, begin[i], eta, rho, wd, lambda y, i=i: added(i, y)) for i in S])
        length, mean = np.array([accumulated(eta, rho, P.tau[i]) for i in S]), p @ ys
        if name == "scaffold":
            new = c_i[S] - c + (x - ys) / (eta[0] * length)[:, None]
            c = c + len(S) / P.M * (new - c_i[S]).mean(0)
            c_i[S] = new
            x = x + server_lr * (ys - x).mean(0)
        elif name == "fednova":
            x = x - (p @ length) * (p @ ((x - ys) / length[:, None]))
        elif name == "vrlsgd":
            delta[S] += (mean - ys) / (eta[0] * length)[:, None]
            x = mean
        elif name in ("fedadagrad", "fedadam", "fedyogi"):
            d, b1 = mean - x, 0.0 if name == "fedadagrad" else 0.9
            m = b1 * m + (1 - b1) * d
            second = {"fedadagrad": v + d**2, "fedadam": 0.99 * v + 0.01 * d**2, "fedyogi": v - 0.01 * d**2 * np.sign(v - d**2)}
            v = second[name]
            x = x + server_lr * m / (np.sqrt(v) + 1e-3)
        elif name == "solo":
            own.update(zip(S, ys, strict=True))
        else:
            previous.update(zip(S, ys, strict=True))
            x = mean
        path.append(np.array([own.get(i, x) for i in range(P.M)]) if name == "solo" else x.copy())
    return np.array(path), {"c": c, "c_i": c_i, "delta": delta, "m": m, "v": v}


REMEMBERED = {
    "scaffold": ("c", "c_i"),
    "vrlsgd": ("delta",),
    "fedadam": ("m", "v"),
    "fedyogi": ("m", "v"),
    "fedadagrad": ("m", "v"),
}


@pytest.mark.parametrize("rho", [0.0, 0.9])
@pytest.mark.parametrize("name", common.BASES)
def test_base_equals_numpy(name, rho):
    """Five rounds, three of six clients, unequal sizes and local steps, an lr schedule and weight decay."""
    problem = Problem(seed=len(name))
    eta = 0.1 * (1 + 0.5 * np.arange(6)) ** -0.75
    mu = 0.7 if name in ("fedprox", "moon") else -1.0
    server_lr = {"scaffold": 0.8, "fedadagrad": 0.05, "fedadam": 0.05, "fedyogi": 0.05}.get(name, 0.0)
    path, base = driven(name, problem, eta, rho, 0.01, mu, server_lr)
    expected, memory = by_numpy(name, problem, eta, rho, 0.01, mu, server_lr)
    assert np.abs(path - expected).max() < 1e-10
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-3
    for what in REMEMBERED.get(name, ()):
        held = base.memory[what]
        rows = held.items() if isinstance(held, dict) else [(slice(None), held)]
        assert all(np.abs(row.numpy() - memory[what][i]).max() < 1e-10 for i, row in rows)
    if name in ("scaffold", "vrlsgd", "moon", "solo"):  # per client id, never per slot
        [held] = [value for value in base.memory.values() if isinstance(value, dict)]
        assert set(held) == {i for S in problem.picks for i in S}


def test_default_constants_of_the_bases():
    bases = {name: base(settings(base=name), POINTS) for name, base in common.BASES.items()}
    assert bases["fedprox"].mu == 0.001 and bases["moon"].mu == 5.0 and bases["moon"].temperature == 0.5
    assert (bases["fedadam"].b1, bases["fedadam"].b2, bases["fedadam"].tau) == (0.9, 0.99, 1e-3)
    assert {name: base.server_lr for name, base in bases.items() if base.server_lr != 1} == dict.fromkeys(
        ("fedadam", "fedadagrad", "fedyogi"), 0.01
    )


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_limits_of_the_bases(rho):
    """mu = 0, equal steps, the first round, a plain server: each is FedAvg; and is not, one step further."""
    problem, equal = Problem(seed=1), Problem(seed=2, taus=4)
    for name in ("fedprox", "moon"):
        assert np.array_equal(driven(name, problem, 0.1, rho, mu=0.0)[0], driven("fedavg", problem, 0.1, rho)[0])
    assert np.abs(driven("fednova", equal, 0.1, rho)[0] - driven("fedavg", equal, 0.1, rho)[0]).max() < 1e-12
    assert np.abs(driven("fednova", problem, 0.1, rho)[0] - driven("fedavg", problem, 0.1, rho)[0]).max() > 1e-3
    same_sizes = Problem(seed=3, sizes=7)  # SCAFFOLD's server takes the plain mean
    fedavg = driven("fedavg", same_sizes, 0.1, rho)[0]
    for name in ("scaffold", "vrlsgd", "moon"):
        path = driven(name, same_sizes, 0.1, rho)[0]
        assert np.abs(path[0] - fedavg[0]).max() < 1e-14
        assert np.abs(path[-1] - fedavg[-1]).max() > 1e-4


def test_vrlsgd_and_scaffold_find_the_common_optimum_where_fedavg_drifts():
    """What the corrections are for: the fixed point of many local steps is the minimiser of the mean objective."""
    problem = Problem(seed=8, rounds=90, each=6, taus=5, sizes=1)
    problem.noise = [[0 * b for b in row] for row in problem.noise]
    best = np.linalg.solve(problem.H.sum(0), np.einsum("mij,mj->i", problem.H, problem.a))
    reached = {name: np.abs(driven(name, problem, 0.08)[0][-1] - best).max() for name in ("fedavg", "scaffold", "vrlsgd")}
    assert reached["scaffold"] < 1e-6 and reached["vrlsgd"] < 1e-6 and reached["fedavg"] > 1e-3


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_step_lengths_against_closed_forms(rho):
    """FedNova's for momentum, its double sum for a schedule, and a geometric sum for a proximal term."""
    eta, mu = 0.3 * 0.8 ** np.arange(8), 0.7
    for tau in range(1, 9):
        closed = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
        assert common.step_lengths(np.full(9, 0.1), rho)[tau] == pytest.approx(0.1 * closed, rel=1e-12)
        assert common.step_lengths(eta, rho)[tau] == pytest.approx(eta[0] * accumulated(eta, rho, tau), rel=1e-12)
        a = [(1 - 0.1 * mu) ** (tau - 1 - j) for j in range(tau)]
        assert common.step_lengths(np.full(9, 0.1), proximal=mu)[tau] == pytest.approx(0.1 * sum(a), rel=1e-12)


@pytest.mark.parametrize(("rho", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.5), (0.9, 0.5)])
def test_update_length_is_the_way_under_a_unit_gradient(rho, mu):
    """The brute-force rollout: clients of 1, 4 and 6 steps pulled by the gradient (1, ..., 1)."""
    eta = 0.1 * (1 + np.arange(6)) ** -0.5
    batches = [np.zeros((tau, 1), int) for tau in (4, 1, 6)]
    flags = {"lr": eta, "momentum": rho, "proximal": mu, "loss": lambda step: step.net.y.sum(1)}
    update = common.train(POINTS, torch.zeros(3, 5, dtype=DOUBLE), NOTHING, batches, **flags)
    assert np.abs(-update.weights.numpy() - update.length[:, None]).max() < 1e-12
    assert update.length[1] == pytest.approx(0.1)


@pytest.mark.parametrize("name", [name for name in common.BASES if name != "solo"])
def test_batch_norm_statistics_are_averaged_whatever_the_server(name):
    data, model, _ = prepared("fedgen-cnn")
    x, n, clients = model.init(0), model.trainable, np.array([0, 1])
    batches = schedules(data, (8, 12), 4)
    base = common.BASES[name](settings(base=name), model)
    update = common.train(model, x, data, batches, lr=0.05, **base.client(x, clients))
    new = base.aggregate(x, update, clients, np.array([8, 12]))
    expected = (8 * update.weights[0, n:] + 12 * update.weights[1, n:]) / 20
    assert torch.allclose(new[n:], expected, rtol=0, atol=1e-12) and not torch.allclose(new[n:], x[n:])


def test_moon_with_previous_equal_to_global_costs_log_two_and_pulls_nowhere():
    data = made_up(16)
    model, batches = common.build_model("lenet5", data, dtype=DOUBLE, projection=True), schedules(data, (7, 4), 3)
    base, x, clients = common.Moon(settings(base="moon", mu=2.0), model), model.init(0), np.array([0, 1])
    held, terms = x.clone(), []
    for known in ({}, {0: x.clone(), 1: x.clone()}):
        base.memory["previous"] = known
        flags = base.client(x, clients)
        flags["penalty"] = lambda step: terms.append(base.contrast(step)) or terms[-1]
        update = common.train(model, x, data, batches, lr=0.05, **flags)
        assert terms[-1].tolist() == pytest.approx([2.0 * math.log(2) * bool(known)] * len(terms[-1]), abs=1e-12)
        expected = literally(MoonNet(1, 16, 4), data, x.expand(2, -1), batches, 0.05)[0]
        assert (update.weights - expected).abs().max() < 1e-10
    assert torch.equal(x, held) and torch.equal(base.memory["previous"][0], held)  # frozen nets do not move
    with pytest.raises(UsageError, match="lstm"):
        common.build_model("lstm", sentences(), projection=True)


# ------------------------------------------------------------------------------------------------ a federation's rounds


def federation(data=None, seed=1, trial=0, **flags):
    return common.Federation(settings(**flags), data or made_up(16), common.Streams(seed, trial))


def test_selection_is_uniform_nested_and_without_replacement():
    fl, counts = federation(clients=40), np.zeros(40)
    for t in range(1000):
        chosen = fl.select(t, 16)
        assert len(set(chosen.tolist())) == 16 and (np.diff(chosen) > 0).all()
        assert set(chosen) <= set(fl.select(t, 32))
        counts[chosen] += 1
    assert np.abs(counts - 400).max() < 5 * math.sqrt(400 * 0.6)
    fl.config.clients = 20_000  # too many to be permuted in every round
    many = fl.select(0, 50)
    assert len(set(many.tolist())) == 50 and (np.diff(many) > 0).all() and many.max() > 10_000
    assert np.array_equal(many, fl.select(0, 50)) and not np.array_equal(many, fl.select(1, 50))


def test_parts_keep_some_of_a_finer_partition():
    data = made_up(16, n=200)
    fl, every = federation(data, clients=6, parts=20), federation(data, clients=20)
    assert len(fl.shards) == 6 and fl.sizes.tolist() == [10] * 6 and len(every.shards) == 20
    assert len(np.unique(np.concatenate(fl.shards))) == 60
    assert {s.tobytes() for s in fl.shards} <= {s.tobytes() for s in every.shards}
    other = federation(data, trial=1, clients=6, parts=20)
    assert {s.tobytes() for s in fl.shards} != {s.tobytes() for s in other.shards}


def test_a_federation_obeys_the_flags_of_its_partition():
    data = made_up(16, classes=6)
    fl = federation(data, partition="label-skew", classes_per_client=3, clients=4)
    assert [len(np.unique(data.y_train[shard])) for shard in fl.shards] == [3] * 4 and fl.moved == 0
    poor = federation(data, partition="dirichlet", alpha=0.01, min_size=9, clients=6)
    assert poor.sizes.min() == 9 and poor.moved > 0 and poor.sizes.tolist() == [len(s) for s in poor.shards]
    flat = federation(data, partition="dirichlet", alpha=1e6, clients=6)
    assert np.ptp(flat.sizes) <= 6 and flat.model.dtype == DOUBLE
    data.owner = np.arange(60) // 5
    natural = federation(data, partition="natural", clients=6)
    assert all(len(np.unique(data.owner[shard])) == 1 for shard in natural.shards)


@pytest.mark.parametrize("base", common.BASES)
def test_unread_are_a_bases_flags_without_effect(base):
    """Three rounds of all clients, each of the two flags changed on its own: the weights stay exactly where it is unread."""

    def trained(**flags):
        fl = federation(base=base, **flags)
        state, clients = fl.start(), fl.everyone
        for t in range(3):
            batches = [common.epochs_of_batches(shard, 1, 5, fl.streams("batches", t, m)) for m, shard in enumerate(fl.shards)]
            fl.aggregate(state, *fl.train(state, t, clients, batches))
        return fl.received(state, clients)

    reference = trained()
    same = {flag for flag in ("mu", "server_lr") if torch.equal(trained(**{flag: 0.37}), reference)}
    assert same == {*common.BASES[base].unread}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("base", common.BASES)
def test_cost_in_bytes(base, dtype):
    """Downloads to all, uploads from those whose update counts; SCAFFOLD's c and c_i travel too, solo moves nothing."""
    data = made_up(16)
    fl = federation(data, base=base, dtype=dtype, model="fedgen-cnn" if base == "scaffold" else "lenet5")
    state, clients, batches = fl.start(), np.array([0, 2, 3]), schedules(data, (7, 3, 10), 3)
    _, update = fl.train(state, 0, clients, batches)
    bytes_each = state["weights"].numel() * state["weights"].element_size()
    net = bytes_each * {"scaffold": 2, "solo": 0}.get(base, 1)
    number = state["weights"].element_size()
    found = fl.cost(clients, update[np.array([0, 2])], received=1000, sent=500)
    assert found == {
        "samples": 17,
        "received_mb": pytest.approx((3 * net + 1000 * number) / 1e6, rel=1e-12),
        "sent_mb": pytest.approx((2 * net + 500 * number) / 1e6, rel=1e-12),
    }


def diverging(fl, state, bad):
    """Three clients, of whom the second's training ends in `bad`."""
    clients = np.array([0, 2, 4])
    batches = [fl.shards[m][None, :3] for m in clients]
    blow = torch.tensor([0.0, bad, 0.0], dtype=fl.model.dtype)
    penalty = lambda step: step.extra["blow"] * step.features.sum((1, 2))  # noqa: E731
    return fl.train(state, 6, clients, batches, penalty=penalty, per_client={"blow": blow})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite(bad):
    fl = federation(on_nonfinite="drop")
    state = fl.start()
    kept, update = diverging(fl, state, bad)
    assert kept.tolist() == [0, 4] and update.weights.isfinite().all() and len(update.loss) == len(update.steps) == 2
    fl.config.on_nonfinite = "stop"
    with pytest.raises(common.NonFiniteError, match="^round 7: the update of client 2 is not finite"):
        diverging(fl, state, bad)
    fl.config.on_nonfinite = "drop"
    state["weights"] *= math.nan
    with pytest.raises(common.NonFiniteError, match="0, 2, 4"):  # nobody is left
        diverging(fl, state, 0.0)


def test_options_of_a_round_are_merged_with_those_of_the_base():
    """MOON brings frozen nets and a tensor per client; a script adds its own beside them, and its flags win over the common."""
    data = made_up(16)
    fl = federation(data, base="moon", mu=0.5, momentum=0.9, lr=0.01)
    state, clients, seen = fl.start(), np.array([1, 3]), []
    batches = [fl.shards[m][None, :3] for m in clients]

    def loss(step):
        seen.append((set(step.extra), set(step.frozen), step.extra["mine"].tolist(), step.extra["known"].tolist()))
        return common.cross_entropy(step)

    own = {"per_client": {"mine": torch.tensor([5.0, 6.0])}, "frozen": {"other": fl.model.init(9)}, "loss": loss}
    for _ in range(2):
        kept, update = fl.train(state, 0, clients, batches, per_step={"clock": [np.arange(1)] * 2}, lr=0.05, **own)
        assert np.allclose(update.length, 0.05)
        fl.aggregate(state, kept, update)
    assert seen == [({"mine", "known", "clock"}, {"other", "global", "previous"}, [5, 6], [k, k]) for k in (0, 1)]
    default = fl.train(state, 0, clients, batches)[1]
    assert np.allclose(default.length, 0.01)


def test_the_flags_of_training_reach_it():
    """momentum, weight decay and chunk of the flags, and a dropout seed of its own for each round and client."""
    data = made_up(32, 3)
    fl = federation(data, model="alexnet", width=8, momentum=0.5, weight_decay=0.1, lr=0.02, chunk=1)
    state, clients = fl.start(), np.array([0, 1])
    batches = [fl.shards[m][:4].reshape(2, 2) for m in clients]
    seeds = [fl.streams.seed("dropout", 3, m) for m in clients]
    flags = {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.1, "chunk": 1}
    expected = common.train(fl.model, state["weights"], data, batches, seeds=seeds, **flags)
    assert torch.equal(fl.train(state, 3, clients, batches)[1].weights, expected.weights)
    assert not torch.equal(fl.train(state, 4, clients, batches)[1].weights, expected.weights)
    assert torch.equal(state["weights"], fl.model.init(fl.streams.seed("init")))


def test_aggregation_by_sizes_or_by_given_weights():
    fl = federation(partition="dirichlet", min_size=3)
    state, clients = fl.start(), np.array([0, 2, 3])
    _, update = fl.train(state, 0, clients, [fl.shards[m][None, :3] for m in clients])
    for given, p in ((None, fl.sizes[clients]), ([2.0, 4.0, 2.0], np.array([1, 2, 1]))):
        fl.aggregate(state, clients, update, given)
        expected = torch.from_numpy(p / p.sum()) @ update.weights
        assert torch.allclose(state["weights"], expected, rtol=0, atol=1e-12)
    assert len(set(fl.sizes[clients])) > 1


def test_a_resumed_round_reads_the_memory_of_its_state():
    """The state of one federation in the hands of another, as after a resume: same weights from there on."""
    ends = []
    for resumed in (False, True):
        fl = federation(base="scaffold")
        state = fl.start()
        for t in range(3):
            if resumed and t == 2:
                fl = federation(base="scaffold")
                fl.start()
            clients = fl.select(t, 3)
            kept, update = fl.train(state, t, clients, [fl.shards[m][None, :3] for m in clients])
            fl.aggregate(state, kept, update)
        ends.append(state["weights"])
    assert torch.equal(*ends)


def test_a_scripts_own_base_and_projection():
    class Half(common.FedAvg):
        def server(self, x, y, p, update, clients):
            return x / 2

    data = made_up(16)
    fl = common.Federation(settings(), data, common.Streams(0), base=Half, projection=True)
    assert fl.model.trainable == sum(p.numel() for p in MoonNet(1, 16, 4).parameters())
    state = fl.start()
    kept, update = fl.train(state, 0, np.array([0]), [fl.shards[0][None, :3]])
    before = state["weights"].clone()
    fl.aggregate(state, kept, update)
    assert torch.equal(state["weights"], before / 2)
    moon = type("Own", (common.Moon,), {})
    assert common.Federation(settings(), data, common.Streams(0), base=moon).model.trainable == fl.model.trainable


def test_solo_reports_the_mean_of_the_clients_own_nets():
    data = made_up(16)
    fl = federation(data, base="solo", clients=3, per_client=True)
    state = fl.start()
    x, rows = state["weights"], jittered(fl.model.init(1), 2)
    fl.base.keep("own", np.array([2, 0]), rows)
    assert torch.equal(fl.received(state, np.array([0, 1])), torch.stack([rows[1], x]))
    single = [common.evaluate(fl.model, w, data) for w in (rows[1], x, rows[0])]
    shown = fl.test(state)
    for name in ("accuracy", "loss"):
        assert shown[name] == pytest.approx(np.mean([s[name] for s in single]), rel=1e-12)
    assert shown["client_std"] == pytest.approx(np.std([s["accuracy"] for s in single], ddof=1), rel=1e-12)
    each = [own_accuracy(fl.model, w, data, fl.shards[m]) for m, w in enumerate((rows[1], x, rows[0]))]
    assert shown["own_mean"] == pytest.approx(np.mean(each), rel=1e-9) and shown["own_std"] == pytest.approx(np.std(each))


def own_accuracy(model, theta, data, shard):
    """Accuracy on test samples weighted so that their labels are mixed as the client's own, sample by sample."""
    logits = common.predict(model, theta, data.images("test", model.dtype), [np.arange(len(data.y_test))])[0]
    mine, hits, total = data.y_train[shard].tolist(), 0.0, 0.0
    for guess, y in zip(logits.argmax(1).tolist(), data.y_test.tolist(), strict=True):
        weight = mine.count(y) / len(mine) / (data.y_test == y).sum().item()
        hits, total = hits + weight * (guess == y), total + weight
    return 100 * hits / total


def test_per_client_accuracy_equals_brute_force():
    """21 clients with mixes of their own; a class without test samples tells nothing."""
    data = made_up(16, classes=6, n=126)
    data.x_test, data.y_test = data.x_test[:90], data.y_test[:90] % 5  # class 5 is never tested
    fl = federation(data, partition="dirichlet", clients=21, per_client=True, min_size=3)
    state = fl.start()
    [logits] = common.predict(fl.model, state["weights"], data.images("test", DOUBLE), [np.arange(90)])
    state["weights"][-6:] -= logits.mean(0)  # so that it guesses every class
    each = np.sort([own_accuracy(fl.model, state["weights"], data, shard) for shard in fl.shards])
    shown = fl.test(state)
    assert np.ptp(each) > 10 and each[0] < each[1] < each[2]
    wanted = {"own_mean": each.mean(), "own_worst_tenth": each[:2].mean(), "own_std": each.std()}
    assert {name: shown[name] for name in wanted} == {name: pytest.approx(value, rel=1e-9) for name, value in wanted.items()}
    fl.config.per_client = False
    assert fl.test(state) == {"accuracy": shown["accuracy"], "loss": shown["loss"]}


def test_central_training_is_plain_sgd_on_everything():
    fl = federation(made_up(16, n=10), seed=2, batch_size=10, lr=0.1, momentum=0.5, weight_decay=0.01)
    theta = fl.train_centrally(2)
    start = fl.model.init(fl.streams.seed("central init"))[None]
    schedule = np.arange(10)[None].repeat(2, 0)  # full batches: their order does not matter
    expected = literally(lenet(1, 16, 4), fl.data, start, [schedule], 0.1, momentum=0.5, weight_decay=0.01)
    assert (theta - expected[0][0]).abs().max() < 1e-10
    fl.config.lr = 1e200
    with pytest.raises(common.NonFiniteError, match="--lr"):
        fl.train_centrally(2)
    dropping = federation(made_up(32, 3, n=5), model="alexnet", width=8)
    assert torch.equal(dropping.train_centrally(1), dropping.train_centrally(1))


# ---------------------------------------------------------------------------------------------------------- partitions

KINDS = ("iid", "label-skew", "dirichlet", "dirichlet-client", "dirichlet-ext")


def owners_of(shards, n):
    owners = np.full(n, -1)
    for i, shard in enumerate(shards):
        owners[shard] = i
    return owners


def cut(kind, labels, clients, alpha=1.0, seed=0, **more):
    """The partition and its counts (clients, classes)."""
    shards, moved = common.partition(kind, labels, clients, alpha, np.random.default_rng(seed), **more)
    return shards, moved, np.array([np.bincount(labels[s], minlength=labels.max() + 1) for s in shards])


def test_partitions_at_random():
    """500 random cases: disjoint, covering, sorted, seeded; only as many samples move as small clients lack."""
    draw = np.random.default_rng(0)
    for _ in range(500):
        kind, n = KINDS[draw.integers(5)], int(draw.integers(1, 300))
        classes, clients = int(draw.integers(1, 12)), int(draw.integers(1, min(n, 40) + 1))
        labels, alpha = draw.integers(0, classes, n), 10 ** draw.uniform(-3, 3)
        low, own = int(draw.integers(0, n // clients + 1)), int(draw.integers(1, 5))
        flags = {"seed": int(draw.integers(1000)), "own_classes": own}
        shards, moved, _ = cut(kind, labels, clients, alpha, min_size=low, **flags)
        again = cut(kind, labels, clients, alpha, min_size=low, **flags)[0]
        free, none, _ = cut(kind, labels, clients, alpha, min_size=0, **flags)
        case = (kind, n, classes, clients, alpha, low)
        assert len(shards) == clients, case
        assert np.array_equal(np.sort(np.concatenate(shards)), np.arange(n)), case
        assert all(np.array_equal(s, np.sort(s)) for s in shards), case
        assert all(np.array_equal(a, b) for a, b in zip(shards, again, strict=True)), case
        sizes, before = np.array([len(s) for s in shards]), np.array([len(s) for s in free])
        assert sizes.min() >= low and none == 0, case
        assert moved == np.maximum(low - before, 0).sum(), case
        assert (owners_of(shards, n) != owners_of(free, n)).sum() == moved, case
        assert (sizes[before < low] == low).all(), case


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_gives_another_partition(kind):
    labels = np.arange(100) % 10
    a, b = (owners_of(cut(kind, labels, 10, 0.5, seed)[0], 100) for seed in (1, 2))
    assert not np.array_equal(a, b)


def test_the_poor_are_filled_from_the_largest_at_random():
    shards, moved, _ = cut("dirichlet", np.zeros(100, dtype=int), 5, 1e-3, min_size=8)
    assert sorted(len(s) for s in shards) == [8, 8, 8, 8, 68] and moved == 32
    given = np.sort(np.concatenate([s for s in shards if len(s) == 8]))
    assert np.ptp(given) > 40  # not the largest client's first or last samples
    labels = np.repeat(np.arange(4), (50, 48, 1, 1))  # client i owns class i
    shards, moved, _ = cut("label-skew", labels, 4, min_size=11, own_classes=1)
    assert [len(s) for s in shards] == [39, 39, 11, 11] and moved == 20  # in turn from whoever has most


def test_iid_sizes_and_mixture():
    shards, _, counts = cut("iid", np.arange(1003) % 10, 10)
    assert {len(s) for s in shards} == {100, 101} and (counts > 0).all()
    assert np.mean(np.diff(shards[0])) > 5  # not consecutive


@pytest.mark.parametrize("own_classes", [1, 2, 4])
def test_label_skew_ownership_and_equal_split(own_classes):
    labels = np.random.default_rng(0).integers(0, 10, 4000)
    _, _, counts = cut("label-skew", labels, 25, seed=1, own_classes=own_classes)
    assert ((counts > 0).sum(1) == own_classes).all() and all(counts[i, i % 10] > 0 for i in range(25))
    for c in range(10):
        held = counts[counts[:, c] > 0, c]
        assert held.max() - held.min() <= 1 and held.sum() == (labels == c).sum()


def test_label_skews_other_class_is_uniform():
    _, _, counts = cut("label-skew", np.arange(60_000) % 10, 3000, seed=1)
    step = [(c - i) % 10 for i, row in enumerate(counts) for c in np.flatnonzero(row) if c != i % 10]
    found = np.bincount(step, minlength=10)
    assert found[0] == 0 and len(step) == 3000
    assert np.abs(found[1:] - 3000 / 9).max() < 5 * math.sqrt(3000 / 9 * 8 / 9)


@pytest.mark.parametrize(("kind", "M"), [("dirichlet", 5), ("dirichlet-ext", 600)])
def test_dirichlet_shares_have_the_moments_of_the_distribution(kind, M):
    """Shares of a class over its m owners: mean 1/m, variance (1/m)(1-1/m)/(m alpha + 1). Under dirichlet all are owners."""
    classes, alpha, each = 600, 0.5, 200
    labels = np.repeat(np.arange(classes), each)
    _, _, counts = cut(kind, labels, M, alpha, min_size=0, own_classes=4)
    if kind == "dirichlet":
        shares, m = counts / each, np.full(classes, M)
        assert np.allclose(shares.mean(1), 1 / M, atol=0.05)
    else:  # who owns what is label-skew's: the same draws
        owned = cut("label-skew", labels, M, alpha, min_size=0, own_classes=4)[2] > 0
        shares, m = counts / each, owned.sum(0)
        assert (owned.sum(1) == 4).all() and (counts.sum(0) == each).all()
        shares, m = shares[:, m == 4], m[m == 4]  # 4 clients own a class on average
        shares = np.sort(shares, 0)[-4:]
    expected = (1 / m[0]) * (1 - 1 / m[0]) / (m[0] * alpha + 1)
    assert shares.size > 300 and ((shares - 1 / m[0]) ** 2).mean() == pytest.approx(expected, rel=0.12)


@pytest.mark.parametrize("kind", ["dirichlet", "dirichlet-client", "dirichlet-ext"])
def test_the_smallest_and_the_largest_alpha(kind):
    labels = np.repeat(np.arange(10), 400)
    for clients in (5, 2000):  # no NaN, whatever the length of the vector of shares
        _, _, counts = cut(kind, labels, clients, 1e-3, min_size=0)
        assert counts.sum() == 4000 and (counts.sum(0) == 400).all()
        if kind == "dirichlet" and clients == 5:
            assert np.median(counts.max(0)) == 400  # a class lies with one client
        if kind == "dirichlet-client":
            assert set(counts.sum(1)) == {4000 // clients}
    _, _, counts = cut(kind, labels, 5, 1e6, own_classes=10)
    assert np.abs(counts - 80).max() <= (1 if kind != "dirichlet-client" else 60)


def test_dirichlet_client_has_equal_sizes_and_follows_alpha():
    labels = np.repeat(np.arange(10), 200)

    def distance(alpha):
        shards, moved, counts = cut("dirichlet-client", labels, 20, alpha)
        assert {len(s) for s in shards} == {100} and moved == 0
        return np.abs(counts / 100 - 0.1).sum(1).mean() / 2

    assert distance(0.01) > 0.7 > distance(0.5) > 0.2 > distance(1e3)

    class Rigged(np.random.Generator):
        """Nine clients that want classes as they are, and one that wants a class that there is not: it takes what is left."""

        def dirichlet(self, alpha, size):
            return np.array([[0.0, 1.0, 0.0]] + [[0.75, 0.0, 0.25]] * 9)

    labels = np.repeat((0, 2), (3000, 1000))
    shards, _ = common.partition("dirichlet-client", labels, 10, 1.0, Rigged(np.random.PCG64(0)))
    assert (labels[shards[0]] == 2).mean() == pytest.approx(0.25, abs=0.07)


def test_natural_clients_are_whole():
    owner = np.repeat(np.arange(12) * 7, np.arange(1, 13))
    shards, moved, _ = cut("natural", owner * 0, 5, min_size=4, owner=owner)
    names = [np.unique(owner[s]) for s in shards]
    assert all(len(name) == 1 for name in names) and len({int(name[0]) for name in names}) == 5 and moved == 0
    assert all(len(s) == (owner == name).sum() >= 4 for s, name in zip(shards, names, strict=True))
    assert min(map(len, cut("natural", owner * 0, 11, owner=owner)[0])) == 2
    with pytest.raises(UsageError, match="only 11"):  # of the 12, one has a single sample
        cut("natural", owner * 0, 12, owner=owner)


@pytest.mark.parametrize(
    ("kind", "clients", "low", "owner", "message"),
    [
        ("iid", 11, 1, None, "--clients 11"),
        ("iid", 5, 3, None, "--clients 5"),
        ("natural", 5, 1, None, "natural"),
        ("natural", 5, 1, np.arange(10) // 5, "only 2"),
    ],
)
def test_partition_errors(kind, clients, low, owner, message):
    with pytest.raises(UsageError, match=message):
        cut(kind, np.zeros(10, int), clients, min_size=low, owner=owner)


def test_epochs_of_batches():
    shard = np.arange(100, 123)
    batches = common.epochs_of_batches(shard, 3, 5, np.random.default_rng(0))
    assert batches.shape == (15, 5)
    for epoch in batches.reshape(3, 25):
        assert np.array_equal(np.sort(epoch[epoch >= 0]), shard) and (epoch[-2:] == -1).all()
    assert not np.array_equal(batches[:5], batches[5:10]) and np.ptp(batches[0]) > 4


# ------------------------------------------------------------------------------------------------------------- streams


def test_streams_do_not_depend_on_the_order_of_the_calls():
    a, b = common.Streams(3, 1), common.Streams(3, 1)
    keys = [("select", 4), ("batches", 4, 2), ("ties", 4, 2), ("init",), ("batches", 2, 4)]
    first = {key: a(*key).random(3) for key in keys}
    for key in reversed(keys):
        b(*key).random(100)  # any number of draws before
        assert np.array_equal(b(*key).random(3), first[key])
    assert len({tuple(v) for v in first.values()}) == len(keys)
    assert a.seed("init") == b.seed("init") and 0 <= a.seed("init") < 2**31


def test_streams_differ_by_seed_trial_purpose_and_key():
    draws = [
        common.Streams(seed, trial)(purpose, *key).random()
        for seed in (0, 1)
        for trial in (0, 1)
        for purpose in ("init", "ties")
        for key in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2**20))
    ]
    assert len(set(draws)) == len(draws) and len({common.Streams(0).seed("dropout", 0, m) for m in range(20)}) == 20


@pytest.mark.parametrize("path", sorted(Path(common.__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_a_purpose_always_has_the_same_number_of_keys(path):
    """numpy pads a short key with zeros, so that streams("x") would repeat streams("x", 0)."""
    numbers = {}
    for call in ast.walk(ast.parse(path.read_text())):
        if not isinstance(call, ast.Call) or not call.args or not isinstance(call.args[0], ast.Constant):
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if name in ("streams", "seed") and isinstance(call.args[0].value, str):
            numbers.setdefault(call.args[0].value, set()).add(len(call.args))
    assert all(len(found) == 1 for found in numbers.values()), numbers


# ------------------------------------------------------------------------------------------------------------- scoring


@pytest.mark.parametrize("name", ["lenet5", "fedgen-cnn"])
def test_scores_equal_a_loop_and_leave_no_trace(name):
    data, model, ordinary = prepared(name)
    stack = jittered(model.init(0), 3)
    shards = [np.array([4, 1, 50]), np.array([9]), np.arange(20)]
    held, torch_state, numpy_state = stack.clone(), torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    by_own = common.score(model, stack, data, shards)
    by_one = common.score(model, stack[1], data, shards)
    in_chunks = common.score(model, stack, data, shards, chunk=2)
    assert torch.equal(stack, held)
    assert torch.equal(torch.get_rng_state(), torch_state) and np.array_equal(np.random.get_state()[1], numpy_state)
    for k, shard in enumerate(shards):
        for theta, scores in ((stack[k], by_own), (stack[k], in_chunks), (stack[1], by_one)):
            net = pour(ordinary(), theta).eval()
            for i, sample in enumerate(shard):  # one sample at a time
                logits = net(normalised(data, data.x_train[[sample]]))[0].detach().numpy()
                loss = np.log(np.exp(logits).sum()) - logits[data.y_train[sample]]
                assert scores[k][0][i] == pytest.approx(loss, abs=1e-10)
                assert scores[k][1][i] == logits.argmax()
            assert scores[k][0].dtype == np.float64 and len(scores[k][0]) == len(shard)
    for weights in (stack[0], stack[:2]):
        assert [len(s[0]) for s in common.score(model, weights, data, [np.arange(0), np.arange(2)])] == [0, 2]


def test_many_samples_are_scored_in_pieces():
    """More than a pass takes, of one net and of two."""
    data = made_up(16, n=2100)
    model, x = common.build_model("lenet5", data, dtype=DOUBLE), data.images("train", DOUBLE)
    stack, index = jittered(model.init(0), 2), [np.arange(2100)[::-1].copy(), np.arange(1500)]
    for theta, logits, i in zip(stack, common.predict(model, stack, x, index), index, strict=True):
        parts = torch.cat(common.predict(model, theta, x, np.array_split(i, 7)))
        expected = pour(lenet(1, 16, 4), theta)(normalised(data, data.x_train[i.copy()])).detach()
        assert torch.allclose(logits, expected, atol=1e-10) and torch.allclose(parts, expected, atol=1e-10)


def test_evaluation_is_in_percent_and_nats():
    data = made_up(16)
    model = common.build_model("lenet5", data, dtype=DOUBLE)
    theta, y = model.init(5), data.y_test.numpy()
    logits = pour(lenet(1, 16, 4), theta)(normalised(data, data.x_test)).detach().numpy()
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]
    shown = common.evaluate(model, theta, data)
    assert shown == {"accuracy": pytest.approx(100 * (logits.argmax(1) == y).mean()), "loss": pytest.approx(losses.mean())}


# ---------------------------------------------------------------------------------------------------------------- data


def bilinear(images, size):
    """Half-pixel bilinear enlargement of (n, h, h) by NumPy."""
    at = np.clip((np.arange(size) + 0.5) * images.shape[1] / size - 0.5, 0, None)
    low = at.astype(int)
    high, part = np.minimum(low + 1, images.shape[1] - 1), at - low
    rows = images[:, low] * (1 - part)[:, None] + images[:, high] * part[:, None]
    return rows[:, :, low] * (1 - part) + rows[:, :, high] * part


def test_digits_are_all_of_scikit_learns():
    data = common.load_data("digits")
    images, labels = load_digits(return_X_y=True)
    assert data.x_train.shape == (1437, 28, 28, 1) and data.x_test.shape == (360, 28, 28, 1) and data.classes == 10
    enlarged = bilinear(images.reshape(-1, 8, 8) * 255 / 16, 28)
    shown = torch.cat([data.x_train, data.x_test])[..., 0].double().numpy()
    found = torch.cdist(torch.from_numpy(shown).flatten(1), torch.from_numpy(enlarged).flatten(1)).argmin(1).numpy()
    assert np.array_equal(np.sort(found), np.arange(1797))  # each once: the test set is held out
    assert np.abs(shown - enlarged[found]).max() <= 0.5 + 1e-3
    assert np.array_equal(torch.cat([data.y_train, data.y_test]).numpy(), labels[found])
    share = np.bincount(data.y_test.numpy()) / np.bincount(labels)
    assert np.abs(share - 0.2).max() < 0.01  # stratified
    x = data.images("train", DOUBLE)
    assert abs(x.mean()) < 1e-9 and abs(x.std(correction=0) - 1) < 1e-9
    assert common.load_data("digits") is data  # read once per process


def write_npz(path, **changes):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (30, 18, 18, 3), dtype=np.uint8), np.arange(30) % 3
    np.savez(path, **{"x_train": x[:20], "y_train": y[:20], "x_test": x[20:], "y_test": y[20:]} | changes)
    return x, y


def test_npz(tmp_path):
    x, y = write_npz(tmp_path / "a.npz")
    data = common.load_data(str(tmp_path / "a.npz"))
    assert np.array_equal(data.x_train, x[:20]) and np.array_equal(data.y_test, y[20:]) and data.classes == 3
    assert np.allclose(data.mean, x[:20].astype(float).mean((0, 1, 2))) and data.owner is None
    assert np.allclose(data.std, x[:20].astype(float).std((0, 1, 2)))
    padded = common.load_data(str(tmp_path / "a.npz"), "data", "cpu", 33)
    assert np.array_equal(padded.x_train, np.pad(x[:20], ((0, 0), (7, 8), (7, 8), (0, 0)))) and padded.x_test.shape[1:3] == (
        33,
        33,
    )
    grey = x[..., 0]  # floats, no channels, owners, labels of any integer type
    floats = {"x_train": grey[:20] / 255, "x_test": (grey[20:] / 255).astype(np.float32), "owner": np.arange(20) // 4}
    for i, kind in enumerate((np.uint8, np.int32, np.uint64, ">i8")):
        write_npz(tmp_path / f"{i}.npz", **floats, y_train=y[:20].astype(kind))
        data = common.load_data(str(tmp_path / f"{i}.npz"))
        assert np.array_equal(data.x_train[..., 0], grey[:20]) and np.array_equal(data.x_test[..., 0], grey[20:])
        assert np.array_equal(data.y_train, y[:20]) and data.owner.tolist() == floats["owner"].tolist()
    black = np.zeros((20, 18, 18, 3), np.uint8)
    write_npz(tmp_path / "black.npz", x_train=black)
    assert common.load_data(str(tmp_path / "black.npz")).images("train").isfinite().all()


IMAGES, LABELS = np.zeros((20, 18, 18, 3), np.uint8), np.arange(20) % 3


@pytest.mark.parametrize(
    "changes",
    [
        {"x_train": np.full(IMAGES.shape, 2.0)},
        {"x_train": np.full(IMAGES.shape, -0.1)},
        {"x_train": np.full(IMAGES.shape, np.nan)},
        {"x_train": IMAGES.astype(np.int64)},
        {"x_train": IMAGES[0, 0]},
        {"x_train": IMAGES[:5]},
        {"x_train": IMAGES[:, :9]},
        {"x_train": IMAGES[:0], "y_train": LABELS[:0]},
        {"x_train": IMAGES[..., None]},
        {"x_train": np.array(3, np.uint8)},
        {"x_train": np.array(["a"] * 20)},
        {"y_train": np.array(3)},
        {"y_train": LABELS[:, None]},
        {"y_train": LABELS.astype(float)},
        {"y_train": LABELS - 1},
        {"y_train": LABELS * 10**6},
        {"y_train": LABELS.astype(str)},
        {"y_train": np.array([None] * 20)},
        {"y_test": np.arange(10)},
        {"owner": np.arange(3)},
    ],
)
def test_malformed_npz(tmp_path, changes):
    path = tmp_path / "a.npz"
    write_npz(path, **changes)
    with pytest.raises(UsageError, match=r"^--dataset [^\n]*a.npz: [^\n]+$"):
        common.load_data(str(path))


def bomb(path):
    """An npz of a kilobyte whose header promises 10^15 bytes."""
    write_npz(path)
    import zipfile

    head = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000, 1000, 1000, 1), }".ljust(117) + b"\n"
    with zipfile.ZipFile(path, "w") as file:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            file.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head)


def test_npz_that_is_none(tmp_path):
    write_npz(tmp_path / "a.npz")
    whole = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "flipped.npz").write_bytes(whole[:9000] + bytes([whole[9000] ^ 4]) + whole[9001:])
    np.savez(tmp_path / "names.npz", x=IMAGES)
    bomb(tmp_path / "bomb.npz")
    for name in ("cut.npz", "text.npz", "flipped.npz", "names.npz", "bomb.npz", "absent.npz", "absent", "a\0b.npz", "x" * 5000):
        with pytest.raises(UsageError, match=r"^--dataset [^\n]{3,800}$"):
            common.load_data(str(tmp_path / name))


def png(array) -> bytes:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(array).save(file, "png")
    return file.getvalue()


def write_tree(root, side=18):
    rng, shown = np.random.default_rng(0), {}
    for split in ("train", "test"):
        for label, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for i in range(3):
                image = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
                (root / split / name / f"{i}.png").write_bytes(png(image))
                shown[split, 3 * label + i] = image
    return shown


def huge() -> bytes:
    """A PNG of a hundred bytes that says it has 9 * 10^8 pixels."""
    chunk = struct.pack(">II5B", 30_000, 30_000, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", chunk), (b"IDAT", zlib.compress(b"\0")), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts
    )


def test_image_folder(tmp_path, capsys):
    """Hidden folders are skipped with a word, whether they lie beside the classes or within one."""
    shown = write_tree(tmp_path)
    for place in ("train", "train/cat"):
        (tmp_path / place / ".ipynb_checkpoints").mkdir()
        shutil.copy(tmp_path / "train" / "dog" / "0.png", tmp_path / place / ".ipynb_checkpoints" / "0-checkpoint.png")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("of the photographer")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "train" / "dog" / "2.png").rename(tmp_path / "elsewhere" / "2.png")
    (tmp_path / "train" / "dog" / "more").symlink_to(tmp_path / "elsewhere")
    data = common.load_data(str(tmp_path))
    assert ".ipynb_checkpoints" in capsys.readouterr().err and data.classes == 2
    for split, x, y in (("train", data.x_train, data.y_train), ("test", data.x_test, data.y_test)):
        assert y.tolist() == [0, 0, 0, 1, 1, 1] and all(np.array_equal(x[i], shown[split, i]) for i in range(6))


DAMAGES = {
    "no test": lambda root, first: shutil.rmtree(root / "test"),
    "no class": lambda root, first: [shutil.rmtree(root / "train" / name) for name in ("cat", "dog")],
    "garbage": lambda root, first: first.write_bytes(b"not an image"),
    "cut": lambda root, first: first.write_bytes(first.read_bytes()[:400]),
    "other size": lambda root, first: first.write_bytes(png(np.zeros((9, 9, 3), np.uint8))),
    "16 bits": lambda root, first: first.write_bytes(png(np.arange(324, dtype=np.uint16).reshape(18, 18) * 200)),
    "bomb": lambda root, first: first.write_bytes(huge()),
    "other classes": lambda root, first: (root / "test" / "cat").rename(root / "test" / "cow"),
    "empty class": lambda root, first: (root / "train" / "eel").mkdir(),
    "loop as a class": lambda root, first: [(root / split / "loop").symlink_to("..") for split in ("train", "test")],
    "loop in a class": lambda root, first: (root / "train" / "cat" / "loop").symlink_to(".."),
    "loop deep": lambda root, first: ((root / "train/cat/a").mkdir(), (root / "train/cat/a/b").symlink_to(root.resolve())),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_malformed_image_folder(tmp_path, damage):
    write_tree(tmp_path)
    DAMAGES[damage](tmp_path, tmp_path / "train" / "cat" / "0.png")
    with pytest.raises(UsageError, match=r"^--dataset [^\n]*$") as error:
        common.load_data(str(tmp_path))
    if damage in ("garbage", "cut", "16 bits", "bomb"):
        assert "cat/0.png" in str(error.value)


def test_shakespeare(tmp_path):
    rng = np.random.default_rng(0)
    letters = list(common.CHARACTERS.replace("\n", "")) + ["~"]  # ~ is none of the 80
    speech = {name: "y" + "".join(rng.choice(letters, n)) + "x" for name, n in (("A", 1001), ("B", 500), ("C", 90))}
    parts = [
        f"A:\n{speech['A'][:600]}",
        f"B:\n{speech['B']}",
        "no colon here",
        f"A:\n{speech['A'][600:]}",
        f"C:\n{speech['C']}",
    ]
    (tmp_path / "tinyshakespeare.txt").write_text("\n\n".join(parts))
    data = common.load_data("shakespeare", str(tmp_path))
    code = {c: i for i, c in enumerate(common.CHARACTERS)}
    x, y, owner = {"train": [], "test": []}, {"train": [], "test": []}, []
    for role, text in enumerate((speech["A"][:600] + "\n" + speech["A"][600:], speech["B"], speech["C"])):
        ids = [code.get(c, code[" "]) for c in text]
        end = int(len(ids) * 0.8)
        for split, part in (("train", ids[:end]), ("test", ids[end:])):
            begin = 0
            while begin + 80 < len(part):
                x[split].append(part[begin : begin + 80])
                y[split].append(part[begin + 80])
                owner += [role] * (split == "train")
                begin += 80
    assert owner.count(1) == 5  # B's training text of 401 characters ends with the label of its fifth window
    assert len(common.CHARACTERS) == len(set(common.CHARACTERS)) == 80 == data.classes
    assert data.x_train.tolist() == x["train"] and data.y_train.tolist() == y["train"]
    assert data.x_test.tolist() == x["test"] and data.y_test.tolist() == y["test"] and data.owner.tolist() == owner
    named = common.load_data("shakespeare", str(tmp_path / "tinyshakespeare.txt"))  # the file itself
    assert torch.equal(named.x_train, data.x_train)
    (tmp_path / "short.txt").write_text("A:\nhello\n\nB:\nworld")
    for path in (tmp_path / "short.txt", tmp_path / "gone"):
        with pytest.raises(UsageError, match=f"{path.name}[^\n]*SPEAKER[^\n]*$"):
            common.load_data("shakespeare", str(path))


def fake(n, classes, downloads=True):
    """A torchvision data set that is not there before it is downloaded; training has n images, testing half as many."""

    def made(root, train, download=False, **options):
        if not download:
            raise RuntimeError("Dataset not found")
        if not downloads:
            raise OSError("<urlopen error>\nno network")
        size = n if train else n // 2
        first = 1 if options == {"split": "letters"} else 0  # EMNIST's letters count from 1
        return SimpleNamespace(
            data=torch.full((size, 28, 28), 9, dtype=torch.uint8), targets=torch.arange(size) % classes + first
        )

    return made


def test_torchvision_data_sets(tmp_path, monkeypatch):
    from torchvision import datasets

    monkeypatch.setattr(datasets, "EMNIST", fake(130, 26))
    letters, everything = (common.load_data(name, str(tmp_path)) for name in ("emnist", "emnist-byclass"))
    assert letters.classes == everything.classes == 26 and letters.x_train.shape == (130, 28, 28, 1)
    assert letters.y_train.tolist() == everything.y_train.tolist() == [i % 26 for i in range(130)]
    for name, kind, made in (("cifar10", "CIFAR10", fake(4, 2, False)), ("mnist", "MNIST", fake(60, 10))):
        monkeypatch.setattr(datasets, kind, made)
        word = "no network|checksum" if name == "mnist" else "urlopen"
        with pytest.raises(UsageError, match=f"^--dataset {name}: [^\n]*({word})[^\n]*--data-dir[^\n]*$"):
            common.load_data(name, str(tmp_path))


def test_celeba_has_owners_and_smiles(tmp_path, monkeypatch):
    from PIL import Image
    from torchvision import datasets

    class Fake:
        attr_names = ["Bald", "Smiling", ""]

        def __init__(self, root, split, target_type, transform, download):
            self.n, self.transform = (6 if split == "train" else 4), transform
            self.attr = torch.stack([torch.zeros(self.n), torch.arange(self.n) % 2, torch.zeros(self.n)], 1).long()
            self.identity = torch.arange(self.n)[:, None] // 2 + 10

        def __len__(self):
            return self.n

        def __getitem__(self, i):
            if i == self.n:
                raise IndexError
            return self.transform(Image.fromarray(np.full((218, 178, 3), 10 * i, np.uint8))), 0

    monkeypatch.setattr(datasets, "CelebA", Fake)
    data = common.load_data("celeba", str(tmp_path))
    assert data.x_train.shape == (6, 84, 84, 3) and data.x_train[3, 40, 40, 0] == 30 and len(data.x_test) == 4
    assert data.y_train.tolist() == [0, 1, 0, 1, 0, 1] and data.owner.tolist() == [10, 10, 11, 11, 12, 12]


def test_mnist_against_its_own_bytes_and_a_flipped_bit(real_data, tmp_path):
    data, raw = common.load_data("mnist", str(real_data)), real_data / "MNIST" / "raw"
    for split, x, y in (("train", data.x_train, data.y_train), ("t10k", data.x_test, data.y_test)):
        images = np.frombuffer((raw / f"{split}-images-idx3-ubyte").read_bytes()[16:], np.uint8)
        labels = np.frombuffer((raw / f"{split}-labels-idx1-ubyte").read_bytes()[8:], np.uint8)
        assert np.array_equal(x.numpy().ravel(), images) and np.array_equal(y.numpy(), labels)
    assert data.mean.item() / 255 == pytest.approx(0.1307, abs=1e-4)
    assert data.std.item() / 255 == pytest.approx(0.3081, abs=1e-4)
    copy = tmp_path / "MNIST" / "raw"
    copy.mkdir(parents=True)
    for file in raw.glob("*-ubyte"):
        (copy / file.name).symlink_to(file)
    for name, place in (("train-images-idx3-ubyte", 20_000), ("t10k-labels-idx1-ubyte", 100)):
        whole = bytearray((raw / name).read_bytes())
        whole[place] ^= 1
        (copy / name).unlink()
        (copy / name).write_bytes(whole)
        with pytest.raises(UsageError, match="^--dataset mnist: [^\n]*checksum"):
            common.load_data("mnist", str(tmp_path))
        (copy / name).unlink()
        (copy / name).symlink_to(raw / name)
    assert len(common.load_data("fmnist", str(real_data)).y_train) == 60_000  # its sum is known too


def test_cifar_npz_and_tree_hold_the_same_images(real_data, tmp_path):
    for split in ("train", "test"):
        for folder in (real_data / "cifar10_jpeg" / split).iterdir():
            (tmp_path / split / folder.name).mkdir(parents=True)
            for file in sorted(folder.iterdir())[:12]:
                shutil.copy(file, tmp_path / split / folder.name / file.name)
    tree = common.load_data(str(tmp_path))
    whole = common.load_data(str(real_data / "cifar10_jpeg.npz"))
    assert whole.x_train.shape == (50_000, 32, 32, 3) and len(tree.y_train) == 120 and tree.classes == whole.classes == 10
    for x, y, all_x, all_y in (
        (tree.x_train, tree.y_train, whole.x_train, whole.y_train),
        (tree.x_test, tree.y_test, whole.x_test, whole.y_test),
    ):
        label = {image.tobytes(): c for image, c in zip(all_x.numpy(), all_y.tolist(), strict=True)}
        assert [label[image.tobytes()] for image in x.numpy()] == y.tolist()


def test_tiny_shakespeare(real_data):
    data = common.load_data("shakespeare", str(real_data))
    text = "".join(common.CHARACTERS[i] for i in data.x_train[0].tolist())
    assert text.startswith("Before we proceed any further, hear me speak.") and len(data.owner) == len(data.y_train)
    assert data.x_train.shape[1] == 80 and len(np.unique(data.owner)) > 50


def test_an_image_that_pil_only_warns_of_is_refused(tmp_path, monkeypatch):
    from PIL import Image

    Image.fromarray(np.zeros((10, 10, 3), np.uint8)).save(tmp_path / "big.png")
    assert common.read_image(tmp_path / "big.png").shape == (10, 10, 3)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60)
    with pytest.raises(ValueError, match="decompression bomb"):
        common.read_image(tmp_path / "big.png")
