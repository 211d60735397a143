"""common.py against ordinary torch nets and optimisers, float64 NumPy, closed forms and brute force."""

import ast
import copy
import csv
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import common

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


def ragged_schedules(data, sizes, batch, rng) -> list[np.ndarray]:
    """For each client its own samples in rows of `batch`, the last one filled with -1."""
    rows = []
    for n in sizes:
        flat = np.full(-(-n // batch) * batch, -1)
        flat[:n] = rng.choice(len(data.y_train), n, replace=False)
        rows.append(flat.reshape(-1, batch))
    return rows


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
    layers += [nn.Flatten(), nn.Linear(1024, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, classes))


def vgg(c, classes):
    layers = []
    for size in (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"):
        layers += [nn.MaxPool2d(2)] if size == "M" else [nn.Conv2d(c, size, 3, padding=1), nn.ReLU()]
        c = c if size == "M" else size
    layers += [nn.Flatten(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
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
        self.a = nn.ModuleList(conv_bn(i, o, 3, s) for i, o, s in plan)
        self.b = nn.ModuleList(conv_bn(o, o) for _, o, _ in plan)
        self.skip = nn.ModuleList(conv_bn(i, o, 1, s) if s > 1 else nn.Identity() for i, o, s in plan)
        self.fc = nn.Linear(512, classes)

    def forward(self, x):
        x = self.stem(x).relu()
        for a, b, skip in zip(self.a, self.b, self.skip, strict=True):
            x = (b(a(x).relu()) + skip(x)).relu()
        return self.fc(x.mean((2, 3)))


class Gen(nn.Module):
    """FedGen's classifier: two strided convolutions on digits, three with pools on 84x84 faces."""

    def __init__(self, c, side, classes):
        super().__init__()
        self.faces = side == 84
        sizes = [c, 16, 32, 64] if self.faces else [c, 6, 16]
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, 2, 1) for i, o in zip(sizes, sizes[1:], strict=False))
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for o in sizes[1:])
        self.latent = nn.Linear(64 if self.faces else 16 * (-(-side // 4)) ** 2, 32)
        self.fc = nn.Linear(32, classes)

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x)).relu()
            x = F.max_pool2d(x, 2) if self.faces else x
        return self.fc(self.latent(x.flatten(1)))


class Letters(nn.Module):
    def __init__(self, classes, width):
        super().__init__()
        self.table, self.lstm = nn.Embedding(classes, 256), nn.LSTM(256, width, 2, batch_first=True)
        self.fc = nn.Linear(width, classes)

    def forward(self, x):
        return self.fc(self.lstm(x)[0][:, -1]) if x.is_floating_point() else self.forward(self.table(x))


class MoonNet(nn.Module):
    """LeNet-5 up to its 84 features, then MOON's projection head."""

    def __init__(self, c, side, classes):
        super().__init__()
        self.body = lenet(c, side, classes)[:-1]
        self.projection = nn.Sequential(nn.Linear(84, 84), nn.ReLU(), nn.Linear(84, 256))
        self.fc = nn.Linear(256, classes)

    def forward(self, x):
        return self.fc(self.projection(self.body(x)))


def norms(net):
    return [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]


def pour(net, theta):
    """Fills an ordinary net from a flat vector: parameters in order, then BatchNorm means and variances."""
    net, begin = net.to(theta.dtype), 0
    for tensor in [*net.parameters(), *(b for m in norms(net) for b in (m.running_mean, m.running_var))]:
        tensor.data.copy_(theta[begin : begin + tensor.numel()].view_as(tensor))
        begin += tensor.numel()
    assert begin == len(theta)
    return net


def drained(net):
    tensors = [*net.parameters(), *(b for m in norms(net) for b in (m.running_mean, m.running_var))]
    return torch.cat([t.detach().flatten() for t in tensors])


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


def without_dropout(model: common.Model) -> common.Model:
    """The same net with every dropout at p = 0."""

    def build():
        net = model.build()
        for module in net.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(module, nn.LSTM):
                module.dropout = 0.0
        return net

    return common.Model(build, dtype=model.dtype)


def jittered(theta, k, seed=0):
    """k rows near theta; BatchNorm variances stay positive."""
    noise = torch.randn(k, len(theta), generator=torch.Generator().manual_seed(seed), dtype=theta.dtype)
    return theta * (1 + 0.05 * noise)


@pytest.mark.parametrize("name", ZOO)
def test_net_equals_ordinary_torch_net(name):
    """One client, and two clients at once, against nn.Module with the same weights."""
    make, ordinary, width = ZOO[name]
    data = make()
    model = common.build_model(name, data, dtype=DOUBLE, width=width)
    stack = jittered(model.init(3), 2)
    index = [np.array([1, 5]), np.array([2, 3, 11])]
    stacked = common.predict(model, stack, data, data.x_train, index)
    for theta, i, logits in zip(stack, index, stacked, strict=True):
        with torch.no_grad():
            expected = pour(ordinary(), theta).eval()(normalised(data, data.x_train[i]))
        alone = common.predict(model, theta, data, data.x_train, [i])[0]
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
        ("resnet9", 32, 3, 100, 0, None),
        ("resnet18", 32, 3, 10, 0, 11_173_962),
        ("fedgen-cnn", 28, 1, 10, 0, 26_434),
        ("fedgen-cnn", 28, 1, 26, 0, 26_962),
        ("fedgen-cnn", 84, 3, 2, 0, 25_954),
    ],
)
def test_parameter_counts_of_the_specs(name, side, channels, classes, width, count):
    data = made_up(side, channels, classes, n=1)
    data.classes = classes
    model = common.build_model(name, data, width=width)
    if count is None:
        count = sum(p.numel() for p in Res9(channels, classes).parameters())
    assert model.trainable == count
    assert model.size == count + (2 * sum(m.num_features for m in norms(model.skeleton)))


def test_parameter_count_of_the_lstm():
    assert common.build_model("lstm", sentences()).trainable == 3_739_728


def test_init_is_torchs_default_and_leaves_the_global_stream():
    model = common.build_model("lenet5", made_up(16, 1))
    before = torch.get_rng_state()
    theta = model.init(11)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(11)
    assert torch.equal(theta, drained(lenet(1, 16, 4)))
    torch.set_rng_state(before)
    assert not torch.equal(theta, model.init(12))


@pytest.mark.parametrize(("name", "side"), [("lenet5", 15), ("vgg11", 28), ("lstm", 16), ("fedgen-cnn", 9)])
def test_net_that_does_not_fit_the_data(name, side):
    with pytest.raises(common.UsageError, match=f"--model {name}"):
        common.build_model(name, made_up(side))


def test_text_needs_the_lstm():
    with pytest.raises(common.UsageError, match="lstm"):
        common.build_model("lenet5", sentences())


def test_smallest_image_of_lenet():
    data = made_up(16)
    model = common.build_model("lenet5", data)
    assert common.predict(model, model.init(0), data, data.x_train, [np.arange(2)])[0].shape == (2, 4)


# ------------------------------------------------------------------------------------------- stacked against looped


def looped(net, theta, data, schedule, lr, *, momentum=0, weight_decay=0, proximal=0, correction=None, weights=None, term=None):
    """One client by torch.optim.SGD: (final weights, mean ||grad||^2, mean loss). `term`(net, x) is added to the loss."""
    net = pour(net, theta).train()
    anchor = [p.detach().clone() for p in net.parameters()]
    sgd = torch.optim.SGD(net.parameters(), lr=1.0, momentum=momentum, weight_decay=weight_decay)
    shifts = [torch.zeros_like(p) for p in anchor]
    if correction is not None:
        shifts = [s.view_as(p) for s, p in zip(correction.split([p.numel() for p in anchor]), anchor, strict=True)]
    squares, losses = [], []
    for t, row in enumerate(schedule):
        index = row[row >= 0]
        x, y = normalised(data, data.x_train[index]), data.y_train[index]
        each = F.cross_entropy(net(x), y, reduction="none")
        factor = 1.0 if weights is None else torch.from_numpy(weights[t][: len(index)])
        loss = (factor * each).sum() / len(index) + (term(net, x) if term else 0)
        sgd.zero_grad()
        loss.backward()
        squares.append(sum(p.grad.square().sum().item() for p in net.parameters()))
        losses.append(loss.item())
        for p, x0, shift in zip(net.parameters(), anchor, shifts, strict=True):
            p.grad.add_(proximal * (p.detach() - x0) + shift)
        sgd.param_groups[0]["lr"] = lr[t]
        sgd.step()
    return drained(net), np.mean(squares), np.mean(losses)


SETTINGS = {
    "plain": {},
    "momentum": {"momentum": 0.9, "weight_decay": 5e-3},
    "proximal": {"proximal": 0.3, "momentum": 0.5},
    "correction": {"correction": True},
    "weights": {"weights": True, "momentum": 0.9},
    "everything": {"momentum": 0.8, "weight_decay": 1e-2, "proximal": 0.2, "correction": True, "weights": True},
}


def compare_with_loop(name, setting, sizes=(7, 3, 10, 1, 6), batch=3, chunk=0, scheduled=True):
    make, ordinary, width = ZOO[name]
    data, rng, flags = make(), np.random.default_rng(5), dict(SETTINGS[setting])
    model = without_dropout(common.build_model(name, data, dtype=DOUBLE, width=width))
    start = jittered(model.init(1), len(sizes))
    schedules = ragged_schedules(data, sizes, batch, rng)
    lr = 0.05 * (1 + 0.3 * np.arange(9)) ** -0.75 if scheduled else np.full(9, 0.05)
    if flags.pop("correction", False):
        flags["correction"] = 0.05 * torch.randn(len(sizes), model.trainable, dtype=DOUBLE, generator=torch.manual_seed(2))
    if flags.pop("weights", False):
        flags["weights"] = [rng.uniform(0, 3, b.shape) for b in schedules]
    kept = start.clone()
    update = common.train(model, start, data, schedules, lr=lr if scheduled else 0.05, chunk=chunk, **flags)
    assert torch.equal(start, kept)  # the caller's weights are not trained in place
    for k, schedule in enumerate(schedules):
        own = {n: v[k] if n in ("correction", "weights") else v for n, v in flags.items()}
        theta, square, loss = looped(ordinary(), start[k], data, schedule, lr, **own)
        assert (theta - start[k]).abs().max() > 1e-3
        assert (update.weights[k] - theta).abs().max() < 1e-10
        assert update.grad_sq[k] == pytest.approx(square, rel=1e-10)
        assert update.loss[k] == pytest.approx(loss, rel=1e-10)
    assert update.steps.tolist() == [len(s) for s in schedules]


@pytest.mark.parametrize("setting", SETTINGS)
def test_stacked_equals_looped(setting):
    compare_with_loop("lenet5", setting)


@pytest.mark.parametrize("setting", ["plain", "everything"])
def test_stacked_batch_norm_equals_looped_with_running_statistics(setting):
    """Ragged last batches: padding must not enter the batch statistics."""
    compare_with_loop("fedgen-cnn", setting, sizes=(7, 4, 9, 1, 6), batch=4)


@pytest.mark.parametrize("sizes", [(8, 8, 8), (6, 6), (5,)])
def test_batch_norm_where_all_clients_are_as_long(sizes):
    compare_with_loop("fedgen-cnn", "momentum", sizes=sizes, batch=4, scheduled=False)


@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("name", ["alexnet", "resnet9"])
def test_big_nets_equal_looped_stacked_and_alone(name, chunk):
    compare_with_loop(name, "momentum", sizes=(3, 4), batch=2, chunk=chunk)


def test_vgg11_equals_looped():
    compare_with_loop("vgg11", "momentum", sizes=(3, 2), batch=2)


def test_schedules_of_integers_and_fractions_side_by_side():
    """The first client's weights are whole numbers, the second's are not: neither may be cut to the other's type."""
    data = made_up(16)
    model = common.build_model("lenet5", data, dtype=DOUBLE)
    batches, weights = [np.arange(4)[None], np.arange(4, 8)[None]], [np.ones((1, 4), int), np.full((1, 4), 0.5)]
    update = common.train(model, model.init(0), data, batches, lr=0.1, weights=weights)
    alone = common.train(model, model.init(0), data, batches[1:], lr=0.1, weights=weights[1:])
    assert update.loss[1] == pytest.approx(alone.loss[0], rel=1e-12) and alone.loss[0] > 0.1


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_clients_and_add_up(ranks, monkeypatch):
    """Each rank alone: every client's row comes from exactly one, and all together are one process's result."""
    data = made_up(16)
    model = common.build_model("lenet5", data, dtype=DOUBLE)
    schedules = ragged_schedules(data, (7, 3, 10, 1, 6), 3, np.random.default_rng(5))
    whole = common.train(model, model.init(0), data, schedules, lr=0.05)
    monkeypatch.setattr(common.dist, "all_reduce", lambda tensor: None)
    parts = []
    for number in range(ranks):
        monkeypatch.setattr(common, "world", lambda number=number: (number, ranks))
        parts.append(common.train(model, model.init(0), data, schedules, lr=0.05))
    trained = np.array([(part.weights != 0).any(1).numpy() for part in parts])
    assert (trained.sum(0) == 1).all() and trained.any(1).all()
    assert (sum(part.weights for part in parts) - whole.weights).abs().max() < 1e-12
    np.testing.assert_allclose(sum(part.grad_sq for part in parts), whole.grad_sq, rtol=1e-10)


def test_lstm_trains_as_the_ordinary_net():
    compare_with_loop("lstm", "momentum", sizes=(5, 3), batch=2)


@pytest.mark.parametrize("name", ["lenet5", "fedgen-cnn"])
def test_chunks_agree(name):
    data, rng = ZOO[name][0](), np.random.default_rng(0)
    model = common.build_model(name, data, dtype=DOUBLE)
    schedules = ragged_schedules(data, (9, 2, 14, 5, 5), 4, rng)
    runs = [common.train(model, model.init(0), data, schedules, lr=0.05, momentum=0.9, chunk=c) for c in (1, 2, 5, 0)]
    for other in runs[1:]:
        assert (other.weights - runs[0].weights).abs().max() < 1e-10
        assert np.allclose(other.grad_sq, runs[0].grad_sq, rtol=1e-9)
        assert np.allclose(other.length, runs[0].length, rtol=1e-12)


def test_a_plain_module_trains_one_client_at_a_time():
    data = made_up(16)

    class Plain(nn.Module):
        plain = True

        def __init__(self):
            super().__init__()
            self.net = lenet(1, 16, 4)

        def features(self, x):
            return self.net[:-1](x)[None]

        def head(self, z):
            return self.net[-1](z)

    model = common.Model(Plain, dtype=DOUBLE)
    start = jittered(model.init(0), 3)
    schedules = ragged_schedules(data, (5, 8, 2), 3, np.random.default_rng(0))
    update = common.train(model, start, data, schedules, lr=0.1, momentum=0.5)
    for k in range(3):
        theta, *_ = looped(lenet(1, 16, 4), start[k], data, schedules[k], np.full(9, 0.1), momentum=0.5)
        assert (update.weights[k] - theta).abs().max() < 1e-10


def test_stacked_clients_do_not_touch_one_another():
    """A client whose weights blow up to NaN leaves the others' bits alone."""
    data = made_up(16)
    model = common.build_model("lenet5", data, dtype=DOUBLE)
    start = jittered(model.init(0), 3)
    schedules = ragged_schedules(data, (6, 6, 4), 3, np.random.default_rng(0))
    clean = common.train(model, start, data, schedules, lr=0.1)
    start[1] = math.nan
    dirty = common.train(model, start, data, schedules, lr=0.1)
    assert dirty.weights[1].isnan().all()
    assert torch.equal(dirty.weights[[0, 2]], clean.weights[[0, 2]])


# ------------------------------------------------------------------------------------------------- recorded steps


class Unrecorded:
    """Stands for `_Tape`: does the function itself, each time."""

    replay = None

    def __init__(self, function, *inputs):
        function(*inputs)


def bits(update) -> list:
    return [update.weights.numpy().tobytes(), update.grad_sq.tobytes(), update.loss.tobytes()]


def contrast(step):
    """A penalty with a frozen net, a tensor per client, one per step and the generator in it."""
    with torch.no_grad():
        z = step.frozen["global"].features(step.inputs)
    noisy = step.features + 0.01 * torch.randn_like(step.features)
    return step.extra["pull"] * (step.mean * step.extra["each"] * F.cosine_similarity(noisy, z, dim=-1)).sum(1)


@pytest.mark.parametrize(
    ("name", "penalised"), [*((name, False) for name in ZOO if name != "lstm"), ("lenet5", True), ("fedgen-cnn", True)]
)
def test_a_recorded_step_has_the_bits_of_the_step(name, penalised, monkeypatch):
    """Dropout, batch norm, short batches, an ever smaller number of clients; over two rounds with other data and weights."""
    make, _, width = ZOO[name]
    data, rounds, tapes = make(), [], []
    monkeypatch.setattr(common, "WORTH_RECORDING", 2)
    init = common._Tape.__init__
    monkeypatch.setattr(common._Tape, "__init__", lambda tape, *a: (init(tape, *a), tapes.append(tape))[0])
    for kind in (common._Tape, Unrecorded):
        monkeypatch.setattr(common, "_Tape", kind)
        model, rng, weights = common.build_model(name, data, width=width), np.random.default_rng(5), None
        for sizes in ((13, 8, 12), (8, 15)):
            schedules = ragged_schedules(data, sizes, 2, rng)
            start = jittered(model.init(1), len(sizes)) if weights is None else weights[: len(sizes)]
            flags = {"weights": [rng.uniform(0.5, 2, b.shape) for b in schedules]}
            if penalised:
                extra = {"per_client": {"pull": torch.rand(len(sizes), generator=torch.manual_seed(len(sizes)))}}
                extra["per_step"] = {"each": [rng.uniform(0, 1, b.shape) for b in schedules]}
                flags |= {"penalty": contrast, "frozen": {"global": model.init(7)}, **extra}
            flags |= {"lr": 0.01, "momentum": 0.9, "chunk": 3, "seeds": [4] * len(sizes)}
            update = common.train(model, start, data, schedules, **flags)
            rounds.append(bits(update))
            weights = update.weights
    assert tapes and all(tape.replay for tape in tapes)
    assert rounds[:2] == rounds[2:]


def odd_losses():
    """Losses that a list of operations cannot tell, each by its trap; but for the last, which it can."""
    torch_losses, plain, table = common.sample_losses, common.cross_entropy, torch.arange(16.0).view(4, 4)

    def storage(step):  # as an extension that hands memory around
        hard = torch.from_dlpack(torch_losses(step).detach() + 0)
        return (step.weight * hard * torch_losses(step)).sum(1)

    def mask(step):
        losses = torch_losses(step)
        return plain(step) + losses[losses > losses.mean()].sum() / 9

    def constant(step):
        total = torch.tensor(0.0)
        total += plain(step).sum()
        return total.expand(2) / 2

    def alias(step):
        logits = step.logits[..., :2] + 0
        turned = logits.detach()
        turned.transpose_(1, 2)
        return plain(step) + (logits.sum(2) * table[:2, :2]).sum(1) / 9

    def grown(step):
        bias = step.net.head.bias.detach()[:, :].unsqueeze_(1)
        return plain(step) + 0.1 * (bias * step.logits).sum((1, 2))

    def inference(step):
        with torch.inference_mode():
            z = step.net.features(step.inputs)
        return plain(step) + 0.001 * (z.clone() * step.features).sum((1, 2))

    return {
        "item": lambda step: (3 if int(step.y.sum()) % 2 else 1) * plain(step),
        "list": lambda step: (3 if sum(step.y.flatten().tolist()) % 2 else 1) * plain(step),
        "array": lambda step: (3 if step.y.numpy().sum() % 2 else 1) * plain(step),
        "generator": lambda step: plain(step) * torch.rand(2, generator=torch.Generator().manual_seed(3)),
        "mask": mask,
        "storage": storage,
        "constant": constant,
        "alias": alias,
        "grown": grown,
        "inference": inference,
    }


@pytest.mark.parametrize("kind", odd_losses())
def test_a_step_that_no_list_of_operations_tells_is_not_replayed(kind, monkeypatch):
    data, updates = made_up(16), []
    for tape in (common._Tape, Unrecorded):
        monkeypatch.setattr(common, "_Tape", tape)
        model = common.build_model("lenet5", data)
        schedules = ragged_schedules(data, (40, 40), 2, np.random.default_rng(0))
        updates.append(common.train(model, model.init(0), data, schedules, lr=0.05, loss=odd_losses()[kind]))
    assert bits(updates[0]) == bits(updates[1])


def test_a_copied_model_and_a_mended_call_train_as_ever():
    """The buffers of a model go with neither a copy of it nor a call that was refused."""
    data, schedules = made_up(16), ragged_schedules(made_up(16), (40, 40), 2, np.random.default_rng(0))
    model = common.build_model("lenet5", data)
    first = bits(common.train(model, model.init(0), data, schedules, lr=0.05))
    other, same = copy.deepcopy((model, data))
    assert bits(common.train(other, other.init(0), same, schedules, lr=0.05)) == first
    fresh = common.build_model("lenet5", data)
    with pytest.raises(RuntimeError):
        common.train(fresh, fresh.init(0).double(), data, schedules, lr=0.05)
    assert bits(common.train(fresh, fresh.init(0), data, schedules, lr=0.05)) == first


def test_what_is_kept_between_rounds_changes_no_bit():
    """The same clients trained alone, and after others: more of them, with a longer batch, with another loss."""
    data, rng = made_up(16), np.random.default_rng(0)
    mine = ragged_schedules(data, (40, 25, 40), 2, rng)
    flags = {"lr": 0.05, "momentum": 0.9, "correction": torch.randn(3, 14_000, generator=torch.manual_seed(0)) / 100}
    fresh, used = (common.build_model("lenet5", data) for _ in range(2))
    flags["correction"] = flags["correction"][:, :1].expand(3, fresh.trainable)
    alone = common.train(fresh, fresh.init(0), data, mine, **flags)
    others = ragged_schedules(data, (50, 30, 50, 20), 2, rng), ragged_schedules(data, (60, 60), 5, rng)
    for scale, schedules in zip((2.0, 3.0), others, strict=True):
        common.train(used, used.init(1), data, mine, lr=0.05)
        common.train(used, used.init(1), data, schedules, lr=0.05, loss=lambda step, by=scale: by * common.cross_entropy(step))
        common.train(used, used.init(1), data, schedules, lr=0.05, proximal=0.1)
        assert bits(common.train(used, used.init(0), data, mine, **flags)) == bits(alone)
    elsewhere = made_up(16, seed=3)
    there = [
        common.train(model, model.init(0), elsewhere, mine, lr=0.05) for model in (used, common.build_model("lenet5", data))
    ]
    assert bits(there[0]) == bits(there[1])
    assert bits(common.train(used, used.init(0), data, mine, **flags)) == bits(alone)


def test_a_penalty_that_changes_between_rounds_is_not_remembered():
    """What a script's loss holds is its own: a bound method of an object that changed, a closure."""
    data, schedules = made_up(16), ragged_schedules(made_up(16), (40, 40), 2, np.random.default_rng(0))
    model, pull = common.build_model("lenet5", data, dtype=DOUBLE), SimpleNamespace(mu=0.0)
    penalty = lambda step: pull.mu * (step.mean * step.features.square().sum(-1)).sum(1)  # noqa: E731
    updates = []
    for mu in (0.0, 0.1, 0.0):
        pull.mu = mu
        updates.append(common.train(model, model.init(0), data, schedules, lr=0.05, penalty=penalty).weights)
    assert torch.equal(updates[0], updates[2]) and not torch.allclose(updates[0], updates[1], atol=1e-3)


class Pretended(str):
    """The CPU, answering to the GPU's name: `train` takes the GPU's path, but for the recording of a CUDA graph."""

    def __eq__(self, other):
        return other == "cuda"

    __hash__ = str.__hash__


@pytest.mark.parametrize("setting", ["plain", "everything"])
@pytest.mark.parametrize("name", ["lenet5", "fedgen-cnn"])
def test_the_steps_of_a_gpu_equal_those_of_a_cpu(name, setting, monkeypatch):
    """Counter, schedules and learning rates on the device; plain arithmetic where the CPU has torch's fused kernel."""
    captured = []

    def capture(step, device):
        """As a CUDA graph does: notes the step down without taking it, and repeats it on the memory that it was captured on."""
        before = {key: buffer.clone() for key, buffer in gpu.memory.buffers.items()}
        captured.append(common._Tape(step).replay)
        for key, buffer in gpu.memory.buffers.items():
            buffer.copy_(before[key])
        return captured[-1]

    monkeypatch.setattr(common, "_captured", capture)
    data, rng = made_up(16), np.random.default_rng(5)
    cpu, gpu = (common.build_model(name, data, dtype=DOUBLE) for _ in range(2))
    gpu.device = Pretended("cpu")
    news = []
    first, more = SETTINGS[setting], (9, 40, 40, 37, 36)  # more clients ask for new graphs, and so does each other flag:
    rounds = [((40, 12, 33, 3), first), ((33, 38, 6, 6), first), (more, first), (more, {"momentum": 0.9})]
    rounds += [
        (more, {"momentum": 0.5}),
        (more, {"weight_decay": 0.01}),
        (more, {"proximal": 0.3}),
        (more, {"correction": True}),
        (more, {}),
    ]
    for sizes, flags in rounds:
        flags, schedules = dict(flags), ragged_schedules(data, sizes, 3, rng)
        if flags.pop("correction", False):
            flags["correction"] = 0.05 * torch.randn(len(sizes), cpu.trainable, dtype=DOUBLE, generator=torch.manual_seed(2))
        if flags.pop("weights", False):
            flags["weights"] = [rng.uniform(0, 3, b.shape) for b in schedules]
        lr = rng.uniform(0.01, 0.05) * (1 + 0.3 * np.arange(14)) ** -0.75
        begun = len(captured)
        updates = [common.train(net, jittered(cpu.init(1), len(sizes)), data, schedules, lr=lr, **flags) for net in (cpu, gpu)]
        news.append(len(captured) - begun)
        assert (updates[0].weights - updates[1].weights).abs().max() < 1e-12
        np.testing.assert_allclose(updates[0].grad_sq, updates[1].grad_sq, rtol=1e-10)
        np.testing.assert_allclose(updates[0].loss, updates[1].loss, rtol=1e-10)
    if name == "lenet5":
        assert [count > 0 for count in news] == [True, False, *[True] * 7]


def test_pooling_before_the_bias_changes_no_bit():
    """max(a + b) = max(a) + b in floating point too, since rounding is monotone."""
    torch.manual_seed(0)
    ours, x = common.Conv2d(6, 8, 3, padding=1), torch.randn(5, 6, 12, 12)
    ordinary = F.max_pool2d(F.conv2d(x, ours.weight, None, 1, 1) + ours.bias[:, None, None], 2)
    ours.weight, ours.bias = nn.Parameter(ours.weight[None].detach()), nn.Parameter(ours.bias[None].detach())
    assert torch.equal(ours(x, pool=2), ordinary)


def test_gradients_of_a_batched_linear_map():
    torch.manual_seed(0)
    arguments = [torch.randn(*shape, dtype=DOUBLE, requires_grad=True) for shape in ((3, 4, 5), (3, 2, 5), (3, 2))]
    assert torch.autograd.gradcheck(common._Affine.apply, arguments)
    assert torch.autograd.gradgradcheck(common._Affine.apply, arguments)


def test_client_without_samples_returns_what_it_was_given():
    data = made_up(16)
    model = common.build_model("lenet5", data)
    theta = model.init(0)
    update = common.train(model, theta, data, [np.zeros((0, 4), int), np.arange(4)[None]], lr=0.1)
    assert torch.equal(update.weights[0], theta) and update.length.tolist() == [0, 0.1]
    assert update.grad_sq[0] == 0 and update.steps.tolist() == [0, 1]


def test_rows_of_an_update():
    update = common.Update(torch.arange(6.0).view(3, 2), np.array([1, 2, 3]), *(np.arange(3.0) + i for i in range(3)))
    some = update[np.array([2, 0])]
    assert some.weights.tolist() == [[4, 5], [0, 1]] and some.steps.tolist() == [3, 1] and some.loss.tolist() == [4, 2]


# --------------------------------------------------------------------------------------------------------------- hooks


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_hooks_see_the_rows_of_their_client_and_step(chunk):
    """loss, penalty, frozen, per_client, per_step and sample weights with ragged clients in shuffled order."""
    data, rng = made_up(16), np.random.default_rng(1)
    model = common.build_model("lenet5", data, dtype=DOUBLE)
    schedules = ragged_schedules(data, (4, 11, 1, 7), 3, rng)
    weights = [rng.uniform(0, 2, b.shape) for b in schedules]
    stack = jittered(model.init(0), 4, seed=3)
    seen = []

    def check(step):
        for row, (client, clock) in enumerate(zip(step.extra["id"].tolist(), step.extra["clock"].tolist(), strict=True)):
            index = schedules[client][int(clock)]
            real = index[index >= 0]
            n = len(real)
            assert torch.equal(step.x[row, :n], data.x_train[real]) and torch.equal(step.y[row, :n], data.y_train[real])
            assert torch.allclose(step.mean[row, :n], torch.full((n,), 1 / n, dtype=DOUBLE))
            expected = torch.from_numpy(weights[client][int(clock)][:n]) / n
            assert torch.allclose(step.weight[row, :n], expected)
            assert not step.mean[row, n:].any() and not step.weight[row, n:].any()
            frozen = pour(lenet(1, 16, 4), stack[client]).eval()
            shown = step.frozen["old"].features(step.inputs)[row, :n]
            assert torch.allclose(shown, frozen[:-1](normalised(data, data.x_train[real])), atol=1e-10)
            assert not shown.requires_grad
            seen.append((client, int(clock)))
        return common.cross_entropy(step)

    common.train(
        model,
        model.init(0),
        data,
        schedules,
        lr=0.1,
        weights=weights,
        loss=check,
        frozen={"old": stack},
        per_client={"id": torch.arange(4)},
        per_step={"clock": [np.arange(len(b)) for b in schedules]},
        chunk=chunk,
    )
    assert sorted(seen) == [(k, t) for k, b in enumerate(schedules) for t in range(len(b))]  # each once


def test_one_frozen_vector_serves_all_clients():
    data = made_up(16)
    model = common.build_model("lenet5", data, dtype=DOUBLE)
    theta, shapes = model.init(4), []

    def penalty(step):
        logits = step.frozen["x"].head(step.frozen["x"].features(step.inputs))
        assert torch.allclose(logits[0], pour(lenet(1, 16, 4), theta)(normalised(data, step.x[0])), atol=1e-10)
        shapes.append(logits.shape)
        return logits.mean((1, 2))

    common.train(model, model.init(0), data, [np.arange(3)[None]] * 2, lr=0.1, penalty=penalty, frozen={"x": theta})
    assert shapes == [(2, 3, 4)]


def test_penalty_equals_a_term_in_the_loop():
    data, rng = made_up(16), np.random.default_rng(2)
    model = common.build_model("lenet5", data, dtype=DOUBLE)
    schedules = ragged_schedules(data, (8, 3, 5), 3, rng)
    strength = torch.tensor([0.5, 0.0, 2.0], dtype=DOUBLE)
    update = common.train(
        *(model, model.init(0), data, schedules),
        lr=0.05,
        penalty=lambda step: step.extra["s"] * (step.mean * step.features.square().sum(2)).sum(1),
        per_client={"s": strength},
    )
    for k in range(3):

        def term(net, x, k=k):
            return strength[k] * net[:-1](x).square().sum(1).mean()

        theta, _, loss = looped(lenet(1, 16, 4), model.init(0), data, schedules[k], np.full(9, 0.05), term=term)
        assert (update.weights[k] - theta).abs().max() < 1e-10
        assert update.loss[k] == pytest.approx(loss, rel=1e-10)


def test_augment_reads_the_extras_and_works_before_normalisation():
    data, rng = made_up(16), np.random.default_rng(2)
    model = common.build_model("lenet5", data, dtype=DOUBLE)
    schedules = ragged_schedules(data, (8, 3, 5), 3, rng)
    invert = [rng.integers(0, 2, len(b)) for b in schedules]

    def augment(images, extra):
        assert images.dtype == torch.uint8 and images.shape[:1] == extra["invert"].shape
        return torch.where(extra["invert"].view(-1, 1, 1, 1, 1) > 0, 255 - images, images)

    update = common.train(model, model.init(0), data, schedules, lr=0.05, augment=augment, per_step={"invert": invert})
    for k, schedule in enumerate(schedules):
        theta = model.init(0)
        for t, row in enumerate(schedule):  # one step at a time on a data set that is inverted or not
            twin = made_up(16)
            twin.x_train = 255 - twin.x_train if invert[k][t] else twin.x_train
            theta = looped(lenet(1, 16, 4), theta, twin, row[None], [0.05])[0]
        assert (update.weights[k] - theta).abs().max() < 1e-10


def test_inputs_normalise_as_numpy_does():
    data = made_up(16, 3)
    x = data.x_train[:6].view(2, 3, 16, 16, 3)  # K = 2 clients of B = 3
    shown = data.inputs(x, DOUBLE)
    assert shown.shape == (3, 6, 16, 16)
    for k in range(2):
        expected = (x[k].double().numpy() - data.mean.numpy()) / data.std.numpy()
        assert np.abs(shown[:, 3 * k : 3 * k + 3].numpy() - expected.transpose(0, 3, 1, 2)).max() < 1e-12


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
    """x^t of every round, and the base, by common.train and the base's own methods."""
    config = common.Config(base=name, momentum=momentum, mu=mu, server_lr=server_lr, clients=problem.M)
    base = (base_class or common.BASES[name])(config, POINTS, problem.M)
    x, path = torch.from_numpy(problem.x0), []
    for S, noise in zip(problem.picks, problem.noise, strict=True):
        flags = base.client(x, S)
        extra = {"H": torch.from_numpy(problem.H[S]), "a": torch.from_numpy(problem.a[S])} | flags.pop("per_client", {})
        update = common.train(
            *(POINTS, base.start(x, S), NOTHING, [np.zeros((problem.tau[m], 1), int) for m in S]),
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            loss=quadratic,
            per_client=extra,
            per_step={"b": [noise[m] for m in S]},
            **flags,
        )
        x = base.aggregate(x, update, S, problem.sizes[S])
        path.append(base.models(x).numpy().copy())
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
    """||a||_1 = sum_j sum_{k >= j} (eta_k / eta_0) rho^{k-j} of bases.md."""
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
    """The ten bases of bases.md, literally. Returns x^t of every round and what is remembered."""
    P, x, path = problem, problem.x0.copy(), []
    c, c_i, delta = np.zeros(P.n), np.zeros((P.M, P.n)), np.zeros((P.M, P.n))
    m, v, previous, own = np.zeros(P.n), np.full(P.n, 1e-6), {}, {}
    for S, noise in zip(P.picks, P.noise, strict=True):
        p = P.sizes[S] / P.sizes[S].sum()
        ys = []
        for i in S:
            begin, extra = x, lambda y: 0
            if name == "fedprox":
                extra = lambda y: mu * (y - x)  # noqa: B023, E731
            if name == "scaffold":
                extra = lambda y: c - c_i[i]  # noqa: B023, E731
            if name == "vrlsgd":
                extra = lambda y: -delta[i]  # noqa: B023, E731
            if name == "moon" and i in previous:
                extra = lambda y: contrast_gradient(y, x, previous[i], mu)  # noqa: B023, E731
            if name == "solo":
                begin = own.get(i, x)
            ys.append(local_steps(P, i, noise, begin, eta, rho, wd, extra))
        ys, length = np.array(ys), np.array([accumulated(eta, rho, P.tau[i]) for i in S])
        mean = p @ ys
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
            if name == "fedadagrad":
                v = v + d**2
            elif name == "fedadam":
                v = 0.99 * v + 0.01 * d**2
            else:
                v = v - 0.01 * d**2 * np.sign(v - d**2)
            x = x + server_lr * m / (np.sqrt(v) + 1e-3)
        elif name == "solo":
            own.update(zip(S, ys, strict=True))
        else:
            previous.update(zip(S, ys, strict=True))
            x = mean
        path.append(np.array([own.get(i, x) for i in range(P.M)]) if name == "solo" else x.copy())
    return np.array(path), SimpleNamespace(c=c, c_i=c_i, delta=delta, m=m, v=v)


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
    if name == "scaffold":
        assert np.abs(base.state["c"].numpy() - memory.c).max() < 1e-10
        assert all(np.abs(row.numpy() - memory.c_i[i]).max() < 1e-10 for i, row in base.state["c_i"].items())
    if name == "vrlsgd":
        assert all(np.abs(row.numpy() - memory.delta[i]).max() < 1e-10 for i, row in base.state["delta"].items())
    if name.startswith("fedad") or name == "fedyogi":
        assert np.abs(base.state["m"].numpy() - memory.m).max() < 1e-10
        assert np.abs(base.state["v"].numpy() - memory.v).max() < 1e-10


def test_default_constants_of_the_bases():
    def made(name):
        return common.BASES[name](common.Config(base=name), POINTS, 3)

    assert made("fedprox").mu == 0.001 and made("moon").mu == 5.0 and made("moon").temperature == 0.5
    assert (made("fedadam").b1, made("fedadam").b2, made("fedadam").tau) == (0.9, 0.99, 1e-3)
    assert made("fedadagrad").b1 == 0 and made("fedyogi").b1 == 0.9
    assert made("scaffold").server_lr == 1.0


@pytest.mark.parametrize("rho", [0.0, 0.9])
@pytest.mark.parametrize("name", ["fedprox", "moon"])
def test_mu_zero_is_fedavg(name, rho):
    problem = Problem(seed=1)
    assert np.array_equal(driven(name, problem, 0.1, rho, mu=0.0)[0], driven("fedavg", problem, 0.1, rho)[0])


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_fednova_with_equal_steps_is_fedavg(rho):
    problem = Problem(seed=2, taus=4)
    assert np.abs(driven("fednova", problem, 0.1, rho)[0] - driven("fedavg", problem, 0.1, rho)[0]).max() < 1e-12
    unequal = Problem(seed=2)
    assert np.abs(driven("fednova", unequal, 0.1, rho)[0] - driven("fedavg", unequal, 0.1, rho)[0]).max() > 1e-3


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_first_round_of_the_corrected_bases_is_fedavg(rho):
    problem = Problem(seed=3, sizes=7)  # SCAFFOLD's server takes the plain mean
    fedavg = driven("fedavg", problem, 0.1, rho)[0]
    for name in ("scaffold", "vrlsgd", "moon"):
        path = driven(name, problem, 0.1, rho)[0]
        assert np.abs(path[0] - fedavg[0]).max() < 1e-14
        assert np.abs(path[-1] - fedavg[-1]).max() > 1e-4


def test_fedopt_with_a_plain_server_is_fedavg():
    class PlainServer(common.FedAdam):
        b1 = 0.0

        def second_moment(self, v, delta):
            return torch.full_like(v, (1 - self.tau) ** 2)  # so that sqrt(v) + tau = 1

    problem = Problem(seed=4)
    path = driven("fedadam", problem, 0.1, server_lr=1.0, base_class=PlainServer)[0]
    assert np.abs(path - driven("fedavg", problem, 0.1)[0]).max() < 1e-12


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "fednova", "vrlsgd", "moon", "solo"])
def test_one_client_is_the_identity(name):
    """With one client the server only hands its weights back: as one long run of it with a fresh velocity per round."""
    problem = Problem(M=1, each=1, seed=5)
    path, _ = driven(name, problem, 0.1, 0.9, mu=0.0)
    y, eta = problem.x0, np.full(9, 0.1)
    for t, noise in enumerate(problem.noise):
        y = local_steps(problem, 0, noise, y, eta, 0.9, 0, lambda y: 0)
        assert np.abs(path[t] - y).max() < 1e-12


@pytest.mark.parametrize("rho", [0.0, 0.9])
@pytest.mark.parametrize("each", [1, 3, 6])
def test_scaffolds_mean_control_variate_is_c(rho, each):
    problem = Problem(seed=6, each=each)
    _, base = driven("scaffold", problem, 0.1, rho)
    rows = np.zeros((problem.M, problem.n))
    for i, row in base.state["c_i"].items():
        rows[i] = row
    assert np.abs(rows.mean(0) - base.state["c"].numpy()).max() < 1e-12
    assert np.abs(rows).max() > 0.1
    assert set(base.state["c_i"]) == {i for S in problem.picks for i in S}  # per client id, never per slot


def test_scaffolds_control_variate_is_the_mean_gradient():
    """In the first round c_i = sum_k eta_k g_k / sum_k eta_k: exactly, for plain SGD with a schedule."""
    problem = Problem(seed=6, rounds=1, each=6)
    eta = 0.1 * 0.7 ** np.arange(6)
    _, base = driven("scaffold", problem, eta)
    for i in range(problem.M):
        y, gradients = problem.x0, []
        for j in range(problem.tau[i]):
            gradients.append(problem.H[i] @ (y - problem.a[i]) + problem.noise[0][i][j])
            y = y - eta[j] * gradients[-1]
        expected = np.average(gradients, axis=0, weights=eta[: problem.tau[i]])
        assert np.abs(base.state["c_i"][i].numpy() - expected).max() < 1e-12


def test_vrlsgd_deltas_sum_to_zero_under_its_hypotheses():
    hypotheses = Problem(seed=7, each=6, taus=4, sizes=3)
    total = sum(driven("vrlsgd", hypotheses, 0.1)[1].state["delta"].values())
    assert total.abs().max() < 1e-12
    unequal = Problem(seed=7, each=6)
    assert sum(driven("vrlsgd", unequal, 0.1)[1].state["delta"].values()).abs().max() > 1e-2


def test_vrlsgd_and_scaffold_find_the_common_optimum_where_fedavg_drifts():
    """What the corrections are for: the fixed point of many local steps is the minimiser of the mean objective."""
    problem = Problem(seed=8, rounds=150, each=6, taus=5, sizes=1)
    problem.noise = [[0 * b for b in row] for row in problem.noise]
    best = np.linalg.solve(problem.H.sum(0), np.einsum("mij,mj->i", problem.H, problem.a))
    reached = {name: np.abs(driven(name, problem, 0.05)[0][-1] - best).max() for name in ("fedavg", "scaffold", "vrlsgd")}
    assert reached["scaffold"] < 1e-6 and reached["vrlsgd"] < 1e-6 and reached["fedavg"] > 1e-3


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("tau", [1, 2, 7])
def test_fednova_closed_form_with_momentum(rho, tau):
    closed = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
    assert common.step_lengths(np.full(9, 0.1), rho)[tau] == pytest.approx(0.1 * closed, rel=1e-12)


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_fednova_closed_form_with_a_schedule(rho):
    eta = 0.3 * 0.8 ** np.arange(8)
    for tau in range(1, 9):
        assert common.step_lengths(eta, rho)[tau] == pytest.approx(eta[0] * accumulated(eta, rho, tau), rel=1e-12)


def test_fednova_closed_form_with_a_proximal_term():
    eta, mu = 0.1, 0.7
    for tau in range(1, 9):
        a = [(1 - eta * mu) ** (tau - 1 - j) for j in range(tau)]
        assert common.step_lengths(np.full(9, eta), proximal=mu)[tau] == pytest.approx(eta * sum(a), rel=1e-12)


@pytest.mark.parametrize(("rho", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.5), (0.9, 0.5)])
def test_update_length_is_the_way_under_a_unit_gradient(rho, mu):
    """The brute-force rollout: clients of 1, 4 and 6 steps pulled by the gradient (1, ..., 1)."""
    eta = 0.1 * (1 + np.arange(6)) ** -0.5
    start = torch.zeros(3, 5, dtype=DOUBLE)
    batches = [np.zeros((tau, 1), int) for tau in (4, 1, 6)]
    loss = lambda step: step.net.y.sum(1)  # noqa: E731
    update = common.train(POINTS, start, NOTHING, batches, lr=eta, momentum=rho, proximal=mu, loss=loss)
    assert np.abs(-update.weights.numpy() - update.length[:, None]).max() < 1e-12
    assert update.length[1] == pytest.approx(0.1)


def test_batch_norm_statistics_are_averaged_whatever_the_server():
    data = ZOO["fedgen-cnn"][0]()
    model = common.build_model("fedgen-cnn", data, dtype=DOUBLE)
    x, n = model.init(0), model.trainable
    schedules = ragged_schedules(data, (8, 12), 4, np.random.default_rng(0))
    sizes, clients = np.array([8, 12]), np.array([0, 1])
    for name in ("fedavg", "scaffold", "fednova", "fedadam", "vrlsgd"):
        base = common.BASES[name](common.Config(base=name), model, 2)
        update = common.train(model, x, data, schedules, lr=0.05, **base.client(x, clients))
        new = base.aggregate(x, update, clients, sizes)
        expected = (8 * update.weights[0, n:] + 12 * update.weights[1, n:]) / 20
        assert torch.allclose(new[n:], expected, rtol=0, atol=1e-12)
        assert not torch.allclose(new[n:], x[n:])


# --------------------------------------------------------------------------------------------------------- MOON, SOLO


def moon_problem():
    data = made_up(16)
    model = common.build_model("lenet5", data, dtype=DOUBLE, projection=True)
    base = common.BASES["moon"](common.Config(base="moon", mu=2.0), model, 3)
    return data, model, base, model.init(0), ragged_schedules(data, (7, 4), 3, np.random.default_rng(0))


def test_moon_equals_a_loop_with_its_projection_head():
    data, model, base, x, schedules = moon_problem()
    clients = np.array([0, 2])
    previous = jittered(x, 1, seed=9)[0]
    base.state["previous"] = {2: previous}  # client 0 has none yet
    update = common.train(model, x, data, schedules, lr=0.05, momentum=0.9, **base.client(x, clients))
    old = [pour(MoonNet(1, 16, 4), w) for w in (x, previous)]

    def features(net, inputs):
        return net.projection(net.body(inputs))

    def term(net, inputs):
        z = features(net, inputs)
        glob, prev = (torch.exp(torch.cosine_similarity(z, features(o, inputs).detach()) / 0.5) for o in old)
        return 2.0 * -torch.log(glob / (glob + prev)).mean()

    for k, own in enumerate([None, term]):
        theta, _, loss = looped(MoonNet(1, 16, 4), x, data, schedules[k], np.full(9, 0.05), momentum=0.9, term=own)
        assert (update.weights[k] - theta).abs().max() < 1e-10
        assert update.loss[k] == pytest.approx(loss, rel=1e-10)
    base.aggregate(x, update, clients, np.array([7, 4]))
    assert torch.equal(base.state["previous"][2], update.weights[1]) and 0 in base.state["previous"]


def test_moon_with_previous_equal_to_global_costs_log_two_and_pulls_nowhere():
    data, model, base, x, schedules = moon_problem()
    clients = np.array([0, 1])
    base.state["previous"] = {0: x.clone(), 1: x.clone()}
    flags = base.client(x, clients)
    held, plain, with_term = x.clone(), [], []
    flags["penalty"] = lambda step: with_term.append(base.contrast(step)) or with_term[-1]
    update = common.train(model, x, data, schedules, lr=0.05, **flags)
    common.train(model, x, data, schedules, lr=0.05, penalty=lambda step: plain.append(0) or 0 * step.features.sum((1, 2)))
    for value in with_term:
        assert torch.allclose(value, torch.full_like(value, 2.0 * math.log(2)), rtol=0, atol=1e-12)
    for k, schedule in enumerate(schedules):  # equal to no term at all
        theta = looped(MoonNet(1, 16, 4), x, data, schedule, np.full(9, 0.05))[0]
        assert (update.weights[k] - theta).abs().max() < 1e-10
    assert torch.equal(x, held) and torch.equal(base.state["previous"][0], held)  # frozen nets do not move


def test_moons_first_round_has_no_term():
    data, model, base, x, schedules = moon_problem()
    moon = common.train(model, x, data, schedules, lr=0.05, **base.client(x, np.array([0, 1])))
    fedavg = common.train(model, x, data, schedules, lr=0.05)
    assert torch.equal(moon.weights, fedavg.weights) and np.array_equal(moon.loss, fedavg.loss)


def test_moon_has_no_projection_for_text():
    with pytest.raises(common.UsageError):
        common.build_model("lstm", sentences(), projection=True)


def test_solo_never_mixes():
    """Changing one client's objective changes only that client's net."""
    one, two = Problem(seed=9), Problem(seed=9)
    two.a[4] += 1.0
    assert any(4 in S for S in one.picks)
    paths = [driven("solo", problem, 0.1, 0.9)[0] for problem in (one, two)]  # (rounds, M, n)
    others = np.arange(6) != 4
    assert np.array_equal(paths[0][:, others], paths[1][:, others]) and not np.array_equal(paths[0], paths[1])


def test_solo_reports_the_mean_of_the_clients_own_nets():
    data = made_up(16)
    model = common.build_model("lenet5", data, dtype=DOUBLE)
    base = common.BASES["solo"](common.Config(base="solo"), model, 3)
    x, rows = model.init(0), jittered(model.init(1), 2)
    base.keep("own", np.array([2, 0]), rows)
    shown = common.evaluate(model, base.models(x), data)
    single = [common.evaluate(model, w, data) for w in (rows[1], x, rows[0])]
    for name in ("accuracy", "loss"):
        assert shown[name] == pytest.approx(np.mean([s[name] for s in single]), rel=1e-12)


# ---------------------------------------------------------------------------------------------------------- partitions

KINDS = ("iid", "label-skew", "dirichlet", "dirichlet-client")


def owners_of(shards, n):
    owners = np.full(n, -1)
    for i, shard in enumerate(shards):
        owners[shard] = i
    return owners


def test_partitions_at_random():
    """400 random cases: disjoint, covering, sorted, seeded; only as many samples move as small clients lack."""
    draw = np.random.default_rng(0)
    for _ in range(400):
        kind, n = KINDS[draw.integers(4)], int(draw.integers(1, 300))
        classes, clients = int(draw.integers(1, 12)), int(draw.integers(1, min(n, 40) + 1))
        labels, alpha = draw.integers(0, classes, n), 10 ** draw.uniform(-3, 3)
        low, seed = int(draw.integers(0, n // clients + 1)), int(draw.integers(1000))
        flags = (kind, labels, clients, alpha)
        shards, moved = common.partition(*flags, np.random.default_rng(seed), low)
        again, _ = common.partition(*flags, np.random.default_rng(seed), low)
        free, none = common.partition(*flags, np.random.default_rng(seed), 0)
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


def test_another_seed_gives_another_partition():
    labels = np.arange(100) % 10
    for kind in KINDS:
        a, b = (common.partition(kind, labels, 10, 0.5, np.random.default_rng(s))[0] for s in (1, 2))
        assert not np.array_equal(owners_of(a, 100), owners_of(b, 100))


def test_repair_takes_from_the_largest():
    labels = np.zeros(100, dtype=int)
    shards, moved = common.partition("dirichlet", labels, 5, 1e-3, np.random.default_rng(0), min_size=8)
    assert sorted(len(s) for s in shards) == [8, 8, 8, 8, 68] and moved == 32


def test_iid_sizes_and_mixture():
    shards, _ = common.partition("iid", np.arange(1003) % 10, 10, 1, np.random.default_rng(0))
    assert {len(s) for s in shards} == {100, 101}
    assert all(len(np.unique(s % 10)) == 10 for s in shards)
    assert np.mean(np.diff(shards[0])) > 5  # not consecutive


def test_label_skew_ownership_and_equal_split():
    labels = np.random.default_rng(0).integers(0, 10, 2000)
    shards, _ = common.partition("label-skew", labels, 25, 1, np.random.default_rng(1))
    counts = np.array([np.bincount(labels[s], minlength=10) for s in shards])  # (clients, classes)
    assert ((counts > 0).sum(1) == 2).all()
    assert all(counts[i, i % 10] > 0 for i in range(25))
    for c in range(10):
        held = counts[counts[:, c] > 0, c]
        assert held.max() - held.min() <= 1 and held.sum() == (labels == c).sum()


def test_label_skews_other_class_is_uniform():
    labels = np.arange(60_000) % 10
    shards, _ = common.partition("label-skew", labels, 3000, 1, np.random.default_rng(1))
    step = [(c - i) % 10 for i, s in enumerate(shards) for c in np.unique(labels[s]) if c != i % 10]
    counts = np.bincount(step, minlength=10)
    assert counts[0] == 0 and len(step) == 3000
    assert np.abs(counts[1:] - 3000 / 9).max() < 5 * math.sqrt(3000 / 9 * 8 / 9)


def test_dirichlet_shares_have_the_moments_of_the_distribution():
    """Shares of a class over M clients: mean 1/M, variance (1/M)(1-1/M)/(M alpha + 1)."""
    classes, M, alpha, each = 600, 5, 0.5, 200
    labels = np.repeat(np.arange(classes), each)
    shards, _ = common.partition("dirichlet", labels, M, alpha, np.random.default_rng(0))
    shares = np.array([np.bincount(labels[s], minlength=classes) / each for s in shards])  # (M, classes)
    assert np.allclose(shares.mean(1), 1 / M, atol=0.05)
    assert shares.var() == pytest.approx((1 / M) * (1 - 1 / M) / (M * alpha + 1), rel=0.06)


def test_dirichlet_extremes():
    labels = np.repeat(np.arange(10), 100)
    flat = common.partition("dirichlet", labels, 5, 1e6, np.random.default_rng(0))[0]
    counts = np.array([np.bincount(labels[s], minlength=10) for s in flat])
    assert np.abs(counts - 20).max() <= 1
    sharp = common.partition("dirichlet", labels, 5, 1e-3, np.random.default_rng(0), min_size=0)[0]
    counts = np.array([np.bincount(labels[s], minlength=10) for s in sharp])
    assert (counts.max(0) >= 98).all()  # each class lies with one client


def test_dirichlet_client_has_equal_sizes_and_follows_alpha():
    labels = np.repeat(np.arange(10), 200)

    def distance(alpha):
        shards, moved = common.partition("dirichlet-client", labels, 20, alpha, np.random.default_rng(0))
        assert {len(s) for s in shards} == {100} and moved == 0
        return np.mean([np.abs(np.bincount(labels[s], minlength=10) / 100 - 0.1).sum() / 2 for s in shards])

    assert distance(0.01) > 0.7 > distance(0.5) > 0.2 > distance(1e3)


def test_natural_clients_are_whole():
    owner = np.repeat(np.arange(12) * 7, np.arange(1, 13))
    shards, _ = common.partition("natural", owner * 0, 5, 1, np.random.default_rng(0), min_size=4, owner=owner)
    names = [np.unique(owner[s]) for s in shards]
    assert all(len(name) == 1 for name in names) and len({int(name[0]) for name in names}) == 5
    assert all(len(s) == (owner == name).sum() >= 4 for s, name in zip(shards, names, strict=True))


@pytest.mark.parametrize(
    ("flags", "owner", "message"),
    [
        (("iid", 10, 11, 1), None, "--clients 11"),
        (("iid", 10, 5, 3), None, "--clients 5"),
        (("natural", 10, 5, 1), None, "natural"),
        (("natural", 10, 5, 1), np.arange(10) // 5, "only 2"),
        (("zipf", 10, 5, 1), None, "zipf"),
    ],
)
def test_partition_errors(flags, owner, message):
    kind, n, clients, low = flags
    with pytest.raises(common.UsageError, match=message):
        common.partition(kind, np.zeros(n, int), clients, 1.0, np.random.default_rng(0), low, owner)


def test_parts_keep_some_of_a_finer_partition():
    data = made_up(16, n=200)
    config = common.Config(clients=6, parts=20, partition="iid")
    shards = common.client_shards(config, data, common.Streams(1))
    assert len(shards) == 6 and {len(s) for s in shards} == {10}
    assert len(np.unique(np.concatenate(shards))) == 60
    all_parts = common.client_shards(common.Config(clients=20, partition="iid"), data, common.Streams(1))
    assert {s.tobytes() for s in shards} <= {s.tobytes() for s in all_parts}
    other = common.client_shards(config, data, common.Streams(1, trial=1))
    assert {s.tobytes() for s in shards} != {s.tobytes() for s in other}


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
    assert len(set(draws)) == len(draws)


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


def test_selection_is_uniform_and_without_replacement():
    config, counts = common.Config(clients=10, clients_per_round=3), np.zeros(10)
    for t in range(1000):
        chosen = common.select(config, 3, common.Streams(5), t)
        assert len(set(chosen.tolist())) == 3 and (np.diff(chosen) > 0).all()
        counts[chosen] += 1
    assert np.abs(counts - 300).max() < 5 * math.sqrt(300 * 0.7)


def test_epochs_of_batches():
    shard = np.arange(100, 123)
    batches = common.epochs_of_batches(shard, 3, 5, np.random.default_rng(0))
    assert batches.shape == (15, 5)
    for epoch in batches.reshape(3, 25):
        assert np.array_equal(np.sort(epoch[epoch >= 0]), shard) and (epoch[-2:] == -1).all()
    assert not np.array_equal(batches[:5], batches[5:10])


# ------------------------------------------------------------------------------------------------------------- scoring


@pytest.mark.parametrize("name", ["lenet5", "fedgen-cnn"])
def test_scores_equal_a_loop_and_leave_no_trace(name):
    data = ZOO[name][0]()
    model = common.build_model(name, data, dtype=DOUBLE)
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
            net = pour(ZOO[name][1](), theta).eval()
            for i, sample in enumerate(shard):  # one sample at a time
                logits = net(normalised(data, data.x_train[[sample]]))[0].detach().numpy()
                loss = np.log(np.exp(logits).sum()) - logits[data.y_train[sample]]
                assert scores[k][0][i] == pytest.approx(loss, abs=1e-10)
                assert scores[k][1][i] == logits.argmax()
            assert scores[k][0].dtype == np.float64 and len(scores[k][0]) == len(shard)


def test_scoring_does_not_drop_out():
    data = made_up(32, 3)
    model = common.build_model("alexnet", data, width=16)
    theta, everything = model.init(0), [np.arange(12)]
    torch_state = torch.get_rng_state()
    one, two = (common.score(model, theta, data, everything)[0][0] for _ in range(2))
    assert np.array_equal(one, two) and torch.equal(torch.get_rng_state(), torch_state)


def test_dropout_follows_its_seed():
    data = made_up(32, 3)
    model = common.build_model("alexnet", data, width=16)
    schedule = [np.arange(8).reshape(2, 4)]
    a, b, c = (common.train(model, model.init(0), data, schedule, lr=0.1, seeds=[s]).weights for s in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_scores_of_no_samples():
    data = made_up(16)
    model = common.build_model("lenet5", data)
    empty = [np.arange(0), np.arange(2)]
    assert [len(s[0]) for s in common.score(model, model.init(0), data, empty)] == [0, 2]
    assert [len(s[0]) for s in common.score(model, jittered(model.init(0), 2), data, empty)] == [0, 2]


def test_evaluation_is_in_percent_and_nats():
    data = made_up(16)
    model = common.build_model("lenet5", data, dtype=DOUBLE)
    theta = model.init(5)
    with torch.no_grad():
        logits = pour(lenet(1, 16, 4), theta)(normalised(data, data.x_test)).numpy()
    y = data.y_test.numpy()
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]
    shown = common.evaluate(model, theta, data)
    assert shown["accuracy"] == pytest.approx(100 * (logits.argmax(1) == y).mean(), abs=1e-9)
    assert shown["loss"] == pytest.approx(losses.mean(), abs=1e-10)


def test_central_training_is_plain_sgd_on_everything():
    data = made_up(16, n=10)
    model = common.build_model("lenet5", data, dtype=DOUBLE)
    config, streams = common.Config(batch_size=10, lr=0.1, momentum=0.5), common.Streams(2)
    theta = common.train_centrally(model, data, 2, config, streams)
    schedule = np.arange(10)[None].repeat(2, 0)  # full batches: their order does not matter
    start = model.init(streams.seed("central init"))
    expected, *_ = looped(lenet(1, 16, 4), start, data, schedule, [0.1, 0.1], momentum=0.5)
    assert (theta - expected).abs().max() < 1e-10


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


def test_normalisation_against_numpy():
    data = common.load_data("digits")
    x = data.x_train.numpy().astype(float)
    assert data.mean.item() == pytest.approx(x.mean(), rel=1e-12) and data.std.item() == pytest.approx(x.std(), rel=1e-9)
    inputs = data.inputs(data.x_train[None], DOUBLE)
    assert abs(inputs.mean()) < 1e-9 and abs(inputs.std(correction=0) - 1) < 1e-9


def write_npz(path, **changes):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (30, 18, 18, 3), dtype=np.uint8), np.arange(30) % 3
    np.savez(path, **{"x_train": x[:20], "y_train": y[:20], "x_test": x[20:], "y_test": y[20:]} | changes)
    return x, y


def test_npz(tmp_path):
    x, y = write_npz(tmp_path / "a.npz")
    data = common.load_data(str(tmp_path / "a.npz"))
    assert np.array_equal(data.x_train, x[:20]) and np.array_equal(data.y_test, y[20:]) and data.classes == 3
    assert np.allclose(data.mean, x[:20].astype(float).mean((0, 1, 2)))
    assert np.allclose(data.std, x[:20].astype(float).std((0, 1, 2)))


def test_npz_of_floats_and_without_channels(tmp_path):
    x, _ = write_npz(tmp_path / "a.npz")
    grey = x[..., 0]
    write_npz(tmp_path / "b.npz", x_train=grey[:20] / 255, x_test=(grey[20:] / 255).astype(np.float32))
    data = common.load_data(str(tmp_path / "b.npz"))
    assert np.array_equal(data.x_train[..., 0], grey[:20]) and np.array_equal(data.x_test[..., 0], grey[20:])


def test_images_are_padded_for_the_nets_that_need_it(tmp_path):
    x, _ = write_npz(tmp_path / "a.npz")
    data = common.load_data(str(tmp_path / "a.npz"), None, "cpu", 32)
    assert np.array_equal(data.x_train, np.pad(x[:20], ((0, 0), (7, 7), (7, 7), (0, 0)))) and data.x_test.shape[1:3] == (32, 32)


IMAGES, LABELS = np.zeros((20, 18, 18, 3), np.uint8), np.arange(20) % 3


@pytest.mark.parametrize(
    "changes",
    [
        {"x_train": np.full(IMAGES.shape, 2.0)},
        {"x_train": np.full(IMAGES.shape, np.nan)},
        {"x_train": IMAGES.astype(np.int64)},
        {"x_train": IMAGES[0, 0]},
        {"x_train": IMAGES[:5]},
        {"x_train": IMAGES[:, :9]},
        {"x_train": IMAGES[:0], "y_train": LABELS[:0]},
        {"x_train": IMAGES[..., None]},
        {"x_train": np.array(3, np.uint8)},
        {"y_train": np.array(3)},
        {"y_train": LABELS[:, None]},
        {"y_train": LABELS.astype(float)},
        {"y_train": LABELS - 1},
        {"y_train": LABELS.astype(str)},
        {"y_train": np.array([None] * 20)},
        {"y_test": np.arange(10)},
    ],
)
def test_malformed_npz(tmp_path, changes):
    path = tmp_path / "a.npz"
    write_npz(path, **changes)
    with pytest.raises(common.UsageError) as error:
        common.load_data(str(path))
    assert "\n" not in str(error.value) and "a.npz" in str(error.value)


def test_labels_of_any_integer_type(tmp_path):
    for i, kind in enumerate((np.uint8, np.int32, np.uint64, ">i8")):
        write_npz(tmp_path / f"{i}.npz", y_train=LABELS.astype(kind))
        assert np.array_equal(common.load_data(str(tmp_path / f"{i}.npz")).y_train, LABELS)


def test_npz_that_is_none(tmp_path):
    write_npz(tmp_path / "a.npz")
    whole = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.npz").write_text("hello")
    np.savez(tmp_path / "names.npz", x=IMAGES)
    for name in ("cut.npz", "text.npz", "names.npz", "absent.npz", "absent"):
        with pytest.raises(common.UsageError, match=name):
            common.load_data(str(tmp_path / name))


def write_tree(root, side=18):
    from PIL import Image

    rng, shown = np.random.default_rng(0), {}
    for split in ("train", "test"):
        for label, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for i in range(3):
                image = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
                Image.fromarray(image).save(root / split / name / f"{i}.png")
                shown[split, 3 * label + i] = image
    return shown


def test_image_folder(tmp_path):
    shown = write_tree(tmp_path / "t")
    data = common.load_data(str(tmp_path / "t"))
    for split, x, y in (("train", data.x_train, data.y_train), ("test", data.x_test, data.y_test)):
        assert all(np.array_equal(x[i], shown[split, i]) for i in range(6)) and y.tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("damage", ["no test", "garbage", "cut", "other size", "other classes", "empty class"])
def test_malformed_image_folder(tmp_path, damage):
    root = tmp_path / "t"
    write_tree(root)
    first = root / "train" / "cat" / "0.png"
    if damage == "no test":
        shutil.rmtree(root / "test")
    elif damage == "garbage":
        first.write_bytes(b"not an image")
    elif damage == "cut":
        first.write_bytes(first.read_bytes()[:400])
    elif damage == "other size":
        write_tree(tmp_path / "small", side=9)
        shutil.copy(tmp_path / "small" / "train" / "cat" / "0.png", first)
    elif damage == "other classes":
        (root / "test" / "cat").rename(root / "test" / "cow")
    else:
        (root / "train" / "eel").mkdir()
    with pytest.raises(common.UsageError) as error:
        common.load_data(str(root))
    assert "\n" not in str(error.value)


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
        cut = int(len(ids) * 0.8)
        for split, part in (("train", ids[:cut]), ("test", ids[cut:])):
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


def test_shakespeare_errors(tmp_path):
    (tmp_path / "short.txt").write_text("A:\nhello\n\nB:\nworld")
    for path, message in ((tmp_path, "SPEAKER"), (tmp_path / "short.txt", "80"), (tmp_path / "gone", "gone")):
        with pytest.raises(common.UsageError, match=message if path != tmp_path / "short.txt" else "no role"):
            common.load_data("shakespeare", str(path))


def test_emnist_letters_count_from_zero(tmp_path, monkeypatch):
    from torchvision import datasets

    def fake(root, train, split, download=False):
        if not download:
            raise RuntimeError("Dataset not found")  # torchvision's word before a download
        n = 52 if train else 26
        return SimpleNamespace(data=torch.full((n, 28, 28), 9, dtype=torch.uint8), targets=torch.arange(n) % 26 + 1)

    monkeypatch.setattr(datasets, "EMNIST", fake)
    data = common.load_data("emnist", str(tmp_path))
    assert data.classes == 26 and data.y_train.min() == 0 and data.x_train.shape == (52, 28, 28, 1)


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
            return self.transform(Image.fromarray(np.full((218, 178, 3), 10 * i, np.uint8))), 0

    monkeypatch.setattr(datasets, "CelebA", Fake)
    data = common.load_data("celeba", str(tmp_path))
    assert data.x_train.shape == (6, 84, 84, 3) and data.x_train[3, 40, 40, 0] == 30
    assert data.y_train.tolist() == [0, 1, 0, 1, 0, 1] and data.owner.tolist() == [10, 10, 11, 11, 12, 12]


def test_torchvision_data_that_cannot_be_read(tmp_path, monkeypatch):
    from torchvision import datasets

    def offline(root, train, download=False):
        raise RuntimeError("Dataset not found") if not download else OSError("<urlopen error>\nno network")

    monkeypatch.setattr(datasets, "CIFAR10", offline)
    with pytest.raises(common.UsageError, match="--data-dir") as error:
        common.load_data("cifar10", str(tmp_path))
    assert "\n" not in str(error.value)


def test_mnist_against_its_own_bytes(real_data):
    data = common.load_data("mnist", str(real_data))
    raw = real_data / "MNIST" / "raw"
    for split, x, y in (("train", data.x_train, data.y_train), ("t10k", data.x_test, data.y_test)):
        images = np.frombuffer((raw / f"{split}-images-idx3-ubyte").read_bytes()[16:], np.uint8)
        labels = np.frombuffer((raw / f"{split}-labels-idx1-ubyte").read_bytes()[8:], np.uint8)
        assert np.array_equal(x.numpy().ravel(), images) and np.array_equal(y.numpy(), labels)
    assert data.mean.item() / 255 == pytest.approx(0.1307, abs=1e-4) and data.std.item() / 255 == pytest.approx(
        0.3081, abs=1e-4
    )


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


# -------------------------------------------------------------------------------------------- runs on disk, NaN guard


def short_run(tmp_path, method="a", trial=0, **flags):
    config = common.Config(rounds=4, clients=3, clients_per_round=2, trials=1, jobs=2, **flags)  # jobs: no progress bar
    return common.Run(config, method, "", trial, tmp_path)


def an_update(rows):
    weights = torch.tensor(rows)
    return common.Update(weights, *(np.arange(float(len(rows))) for _ in range(4)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_update_is_dropped(tmp_path, bad, capsys):
    run = short_run(tmp_path, on_nonfinite="drop")
    clients, update = run.finite(0, np.array([4, 7, 9]), an_update([[1.0, 2.0], [3.0, bad], [5.0, 6.0]]))
    assert clients.tolist() == [4, 9] and update.weights.tolist() == [[1, 2], [5, 6]] and update.loss.tolist() == [0, 2]
    run.record(0, clients=len(clients), accuracy=1.0)
    assert run.rows[0]["dropped"] == 1 and run.rows[0]["uploads"] == 2
    assert "client 7" in capsys.readouterr().err
    with pytest.raises(common.NonFiniteError):  # nobody is left
        run.finite(0, np.array([4]), an_update([[bad, 1.0]]))


def test_non_finite_update_stops(tmp_path):
    run = short_run(tmp_path)
    good = an_update([[1.0], [2.0]])
    assert run.finite(0, np.array([1, 2]), good)[1] is good
    with pytest.raises(common.NonFiniteError, match="client 2 is not finite"):
        run.finite(0, np.array([1, 2]), an_update([[1.0], [math.nan]]))


def counting(run, stop_at=None):
    """A federate whose state is nested: sums of keyed draws, per-client memory and a base-like inner dict."""
    memory = {}
    state = {"weights": torch.zeros(3), "base": memory, "name": "x", "history": [], "only at first": 1}
    for t in run.rounds(state):
        if t == 0:
            del state["only at first"]
        draw = float(run.streams("draw", t).random())
        state["weights"] = state["weights"] + draw
        memory.setdefault("c_i", {})[t % 3] = torch.full((2,), draw)
        memory["count"] = memory.get("count", 0) + 1
        state["history"].append(draw)
        if t == stop_at:
            raise RuntimeError("power cut")
        run.record(t, clients=2, accuracy=draw, loss=0.0)
    assert state["base"] is memory  # objects that share an inner dict still share it after a resume
    return state


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def without_seconds(rows):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


@pytest.mark.parametrize("stop_at", [0, 1, 3])
def test_a_run_that_stops_goes_on_where_it_was(tmp_path, stop_at):
    whole = short_run(tmp_path / "whole")
    expected = counting(whole)
    with pytest.raises(RuntimeError, match="power cut"):
        counting(short_run(tmp_path / "cut"), stop_at)
    again = short_run(tmp_path / "cut", resume=True)
    assert same(counting(again), expected) and expected["base"]["count"] == 4
    assert without_seconds(again.rows) == without_seconds(whole.rows) and again.rows[-1]["uploads"] == 8
    saved = [torch.load(run.path, weights_only=True) for run in (whole, again)]
    assert same(saved[0]["state"], saved[1]["state"]) and saved[1]["round"] == 4


def test_checkpoint_loads_with_weights_only_and_is_whole(tmp_path):
    run = short_run(tmp_path)
    state = counting(run)
    assert same(torch.load(run.path, weights_only=True)["state"], state)
    assert same(run.finished("a")["state"], state)
    assert [p.name for p in run.path.parent.iterdir()] == [run.path.name]  # nothing temporary stays


def test_damaged_checkpoint_is_named_and_left_alone(tmp_path):
    run = short_run(tmp_path)
    counting(run)
    whole = run.path.read_bytes()
    for damaged in (b"", b"hello", whole[: len(whole) // 2], whole[:-30]):
        run.path.write_bytes(damaged)
        with pytest.raises(common.UsageError, match="damaged") as error:
            counting(short_run(tmp_path, resume=True))
        assert run.path.read_bytes() == damaged and "\n" not in str(error.value)
    torch.save({"other": 1}, run.path)
    with pytest.raises(common.UsageError, match="damaged"):
        run.finished("a")
    with pytest.raises(common.UsageError, match="no checkpoint"):
        run.finished("b")


def test_checkpoint_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "evil"), "w"))

    run = short_run(tmp_path)
    run.path.parent.mkdir()
    torch.save(Evil(), run.path)
    with pytest.raises(common.UsageError):
        run.finished("a")
    assert not (tmp_path / "evil").exists()


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "a"
    common.write_atomically(path, lambda file: file.write(b"old"))

    def half(file):
        file.write(b"ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        common.write_atomically(path, half)
    assert path.read_bytes() == b"old"


def test_cached_is_made_once(tmp_path):
    calls = []

    def make():
        calls.append(1)
        return torch.arange(3.0)

    a, b = short_run(tmp_path), short_run(tmp_path, method="b")
    assert torch.equal(a.cached("expert", make), b.cached("expert", make)) and len(calls) == 1
    short_run(tmp_path, trial=1).cached("expert", make)
    assert len(calls) == 2  # another trial, another expert


def test_due_rounds():
    run = common.Run(common.Config(rounds=7, eval_every=3), "a", "", 0, None)
    assert [t for t in range(7) if run.due(t)] == [2, 5, 6]


# ---------------------------------------------------------------------------------------------------- figures of a run


def rows_of(accuracies, method="a", trial=0, **more):
    return [
        {"setting": "", "method": method, "trial": trial, "round": t + 1, "accuracy": a, "uploads": 2 * t, "seconds": t, **more}
        for t, a in enumerate(accuracies)
    ]


def test_final_best_and_last_ten():
    path = [5.0, 99.0] + [float(i) for i in range(13)]
    sparse = [a if (t + 1) % 4 == 0 or t == 14 else "" for t, a in enumerate(path)]
    found = common.per_trial(rows_of(path) + rows_of(sparse, trial=1) + rows_of([0.0], method="b"), "", "a")
    assert found["final"].tolist() == [12, 12] and found["best"].tolist() == [99, 12]
    assert found["last10"].tolist() == [np.mean(path[5:]), np.mean([path[7], path[11], path[14]])]
    assert found["uploads"].tolist() == [28, 28]


def test_spread_and_paired_interval():
    from scipy.stats import ttest_rel

    a, b = np.array([3.0, 5.0, 4.5, 6.0]), np.array([2.0, 4.5, 4.0, 4.0])
    interval = ttest_rel(a, b).confidence_interval(0.95)
    shown = common.paired(a, b)
    assert (shown["low"], shown["high"]) == pytest.approx((interval.low, interval.high), rel=1e-10)
    assert shown["mean"] == pytest.approx(1.0) and shown["trials"] == 4
    assert common.spread(a) == {"mean": pytest.approx(4.625), "std": pytest.approx(np.std(a, ddof=1))}
    assert common.spread(a[:1])["std"] == 0


def test_series_has_gaps_where_a_round_was_not_tested():
    rounds, values = common.series(rows_of([1.0, "", 3.0]) + rows_of([4.0, "", 6.0], trial=1), "", "a", "accuracy")
    assert rounds.tolist() == [1, 3] and values.tolist() == [[1, 3], [4, 6]]


# -------------------------------------------------------------------------------------------------------- command line


def federate(config, data, run):
    """FedAvg in ten lines, so that the command line has something to run."""
    model = common.build_model(config.model, data, *common.setting_up(config)[1:], config.width)
    shards = common.client_shards(config, data, run.streams)
    state = {"weights": model.init(run.streams.seed("init"))}
    if run.method == "second":
        state["weights"] = run.finished("first")["state"]["weights"]
    for t in run.rounds(state):
        clients = common.select(config, config.clients_per_round, run.streams, t)
        schedules = [common.epochs_of_batches(shards[m], 1, 50, run.streams("batches", t, m)) for m in clients]
        update = common.train(model, state["weights"], data, schedules, lr=config.lr)
        clients, update = run.finite(t, clients, update)
        state["weights"] = update.weights.mean(0)
        tested = common.evaluate(model, state["weights"], data) if run.due(t) else {}
        run.record(t, clients=len(clients), **tested, own_column=t)


PRESETS = {"two": ("two alphas", {"rounds": 1, "lr": 0.02}, {"alpha": (0.5, 5.0)})}
SMALL = ["--clients", "4", "--clients-per-round", "2", "--rounds", "2", "--trials", "2", "--threads", "1", "--device", "cpu"]


def command(*argv, methods=("first", "second")):
    common.launch(common.Config, PRESETS, "A test.", lambda config: methods, federate, None, ("second",), list(argv))


def table(path) -> list[dict]:
    with open(path) as file:
        return list(csv.DictReader(file))


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "argv",
    [
        ["--clients", "ten"],
        ["--clients", "1.5"],
        ["--clients", "0"],
        ["--clients"],
        ["--clients", "1" + "0" * 400],
        ["--alpha", "nan"],
        ["--alpha", "inf"],
        ["--alpha", "1e-9"],
        ["--lr", "0"],
        ["--lr", "-1"],
        ["--lr", "nan"],
        ["--momentum", "1"],
        ["--seed", "-1"],
        ["--rounds", "0"],
        ["--eval-every", "0"],
        ["--model", "lenet"],
        ["--base", "fedsgd"],
        ["--partition", "zipf"],
        ["--on-nonfinite", "ignore"],
        ["--no-such-flag"],
        ["--client", "3"],
        ["stray"],
        ["--preset", "three"],
        ["--dataset", "mnits"],
        ["--dataset", "gone.npz"],
        ["--dataset", "shakespeare", "--data-dir", "gone"],
        ["--model", "vgg11", "--dataset", "small.npz"],
        ["--model", "lstm"],
        ["--clients", "2000"],
        ["--clients", "100", "--min-size", "15"],
        ["--parts", "3"],
        ["--clients", "5", "--clients-per-round", "6"],
        ["--partition", "natural"],
        ["--out", "small.npz"],
    ],
)
def test_a_wrong_flag_costs_one_line(argv, work, capsys):
    np.savez("small.npz", x_train=np.zeros((4, 40, 40, 1), np.uint8), y_train=[0, 1, 0, 1], x_test=[], y_test=[])
    with pytest.raises(SystemExit) as stop:
        command(*SMALL[2:], "--clients", "4", *argv)
    shown = capsys.readouterr()
    assert stop.value.code == 2 and shown.out == ""
    assert len(shown.err.strip().split("\n")) == 1 and "error: " in shown.err and len(shown.err) < 500


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(work, capsys):
    with pytest.raises(SystemExit) as stop:
        command(*SMALL[:-2], "--device", "cuda")
    assert stop.value.code == 2 and "GPU" in capsys.readouterr().err


def test_help_and_presets(capsys):
    for flag, words in (("--help", ["--clients-per-round", "--momentum"]), ("--list-presets", ["two", "--alpha 0.5 5.0"])):
        with pytest.raises(SystemExit) as stop:
            command(flag)
        shown = capsys.readouterr()
        assert stop.value.code == 0 and all(word in shown.out for word in words) and shown.err == ""


def test_parse_presets_and_explicit_flags():
    config, sweep = common.parse(common.Config, PRESETS, "A test.", ["--preset", "two"])
    assert (config.rounds, config.lr, sweep) == (1, 0.02, {"alpha": (0.5, 5.0)})
    config, sweep = common.parse(common.Config, PRESETS, "A test.", ["--preset", "two", "--alpha", "3", "--lr", "1e-3"])
    assert (config.rounds, config.lr, config.alpha, sweep) == (1, 0.001, 3.0, {})


def test_results_of_a_command(work, capsys):
    command(*SMALL, "--out", "r")
    rows = table("r/metrics.csv")
    required = ["method", "trial", "round", "accuracy", "loss", "clients", "uploads", "seconds"]
    assert set(required) <= set(rows[0]) and "own_column" in rows[0]
    places = [(r["method"], int(r["trial"]), int(r["round"])) for r in rows]
    assert places == [(m, k, t) for m in ("first", "second") for k in (0, 1) for t in (1, 2)]
    summary = json.loads(Path("r/summary.json").read_text(), parse_constant=pytest.fail)
    assert {"python", "torch", "numpy"} <= set(summary["versions"]) and "--out r" in summary["command"]
    assert summary["command"].startswith("python ") and summary["device"]
    for method in ("first", "second"):
        final = [float(r["accuracy"]) for r in rows if r["method"] == method and r["round"] == "2"]
        both = [float(r["accuracy"]) for r in rows if r["method"] == method]
        shown = summary["results"][""][method]
        assert shown["final"]["mean"] == pytest.approx(np.mean(final))
        assert shown["final"]["std"] == pytest.approx(np.std(final, ddof=1))
        assert shown["last10"]["mean"] == pytest.approx(np.mean(both))
        assert shown["best"]["trials"] == [max(both[:2]), max(both[2:])]
    assert (work / "r" / "accuracy.png").stat().st_size > 1000
    assert json.loads(Path("r/config.json").read_text())["clients"] == 4
    checkpoints = {p.name for p in (work / "r" / "checkpoints").iterdir()}
    assert checkpoints == {f"{m}-trial{k}.pt" for m in ("first", "second") for k in (0, 1)}
    printed = capsys.readouterr().out
    assert "final" in printed and "last 10" in printed and "results: r" in printed


def test_summary_of_one_trial_is_json(work):
    command(*SMALL, "--trials", "1", "--rounds", "1", "--out", "r")
    summary = json.loads(Path("r/summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["paired"][""]["first - second"]["final"]["trials"] == 1


def test_a_sweep_has_a_run_per_setting(work):
    command(*SMALL[:4], *SMALL[6:], "--trials", "1", "--preset", "two", "--out", "r", methods=("first",))
    rows = table("r/metrics.csv")
    assert [r["setting"] for r in rows] == ["alpha=0.5", "alpha=5.0"] and rows[0]["accuracy"] != rows[1]["accuracy"]


def test_resume_wants_the_same_flags(work, capsys):
    command(*SMALL, "--trials", "1", "--out", "r", methods=("first",))
    before = (work / "r" / "metrics.csv").read_text()
    with pytest.raises(SystemExit) as stop:
        command(*SMALL, "--trials", "1", "--out", "r", "--resume", "--lr", "0.5", methods=("first",))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "--lr was 0.01" in error
    command(*SMALL, "--trials", "1", "--out", "r", "--resume", methods=("first",))  # complete: nothing to do
    assert (work / "r" / "metrics.csv").read_text() == before
    (work / "r" / "checkpoints" / "first-trial0.pt").write_bytes(b"damaged")
    with pytest.raises(SystemExit) as stop:
        command(*SMALL, "--trials", "1", "--out", "r", "--resume", methods=("first",))
    assert stop.value.code == 2 and (work / "r" / "checkpoints" / "first-trial0.pt").read_bytes() == b"damaged"


def test_a_mistake_does_not_cost_the_results_in_the_folder(work, capsys):
    command(*SMALL, "--trials", "1", "--out", "r", methods=("first",))
    before = {p: p.read_bytes() for p in (work / "r").rglob("*") if p.is_file()}
    with pytest.raises(SystemExit):
        command(*SMALL, "--trials", "1", "--out", "r", "--dataset", "mnits", methods=("first",))
    assert {p: p.read_bytes() for p in (work / "r").rglob("*") if p.is_file()} == before


def test_resume_without_its_config_does_not_take_old_checkpoints(work):
    command(*SMALL, "--trials", "1", "--out", "r", methods=("first",))
    (work / "r" / "config.json").unlink()
    try:
        command(*SMALL, "--trials", "1", "--out", "r", "--resume", "--lr", "0.0001", methods=("first",))
    except SystemExit as stop:
        assert stop.code == 2
        return
    command(*SMALL, "--trials", "1", "--out", "fresh", "--lr", "0.0001", methods=("first",))
    tables = [table(f"{name}/metrics.csv") for name in ("r", "fresh")]
    assert [r["loss"] for r in tables[0]] == [r["loss"] for r in tables[1]]


def test_a_run_that_diverges_ends_with_three(work, capsys):
    with pytest.raises(SystemExit) as stop:
        command(*SMALL, "--lr", "1e30", "--out", "r", methods=("first",))
    error = capsys.readouterr().err
    assert stop.value.code == 3 and "not finite" in error and "Traceback" not in error
