"""The models against ordinary torch nets with the same weights, and layers with closed forms."""

import random
from unittest import mock

import numpy as np
import ordinary
import pytest
import torch
import torch.nn.functional as F
from ordinary import ZOO, MoonNet, fill, flatten, normalise, perturb, random_images, random_text
from torch import nn

import client_layers
import common
import nets
from client_layers import arrange
from data import from_arrays
from errors import UsageError
from nets import build_model
from training import Local, squared_gradients, train, train_alone

DOUBLE = torch.float64
NETS = [(name, "batch") for name in ZOO] + [("fedgen-cnn", "group"), ("resnet9", "group")]


@pytest.fixture
def products(monkeypatch):
    """In a test with this fixture the CPU computes what a GPU does, and does so at least once."""
    multiply = mock.Mock(wraps=client_layers.multiply_patches)
    monkeypatch.setattr(client_layers, "multiply_patches", multiply)
    monkeypatch.setattr(client_layers, "PRODUCTS_ON", "cpu")
    yield
    assert multiply.called


def run(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Logits (K, B, classes) of images (K, B, H, W, C) or text (1, B, L)."""
    return net.head(net.features(arrange(x)))


# ---------------------------------------------------------------------------- our nets and torch's


@pytest.mark.parametrize("stride", [1, 2, (2, 1)])
@pytest.mark.parametrize("padding", [0, 1, (2, 1)])
@pytest.mark.parametrize("kind", [client_layers.Conv2d, client_layers.PooledConv2d])
def test_products_of_matrices_are_convolutions(kind, padding, stride, products):
    """Of three clients with 32 channels: values and gradients of torch's own, client by client."""
    torch.manual_seed(0)
    layer = kind(32, 5, 3, stride=stride, padding=padding)
    weight = torch.randn(3, 5, 32, 3, 3, dtype=DOUBLE, requires_grad=True)
    bias = torch.randn(3, 5, dtype=DOUBLE, requires_grad=True)
    x = torch.randn(3, 4, 8, 7, 32, dtype=DOUBLE, requires_grad=True)
    layer.weight = nn.Parameter(weight)
    layer.bias = nn.Parameter(bias)
    found = layer(arrange(x)).unflatten(1, (3, 5)).transpose(0, 1)
    expected = []
    for images, w, b in zip(x, weight, bias, strict=True):
        y = F.conv2d(images.permute(0, 3, 1, 2), w, b, stride, padding)
        expected.append(F.max_pool2d(y, 2) if kind is client_layers.PooledConv2d else y)
    expected = torch.stack(expected)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    signs = torch.randn_like(expected)
    ours = torch.autograd.grad((found * signs).sum(), [x, layer.weight, layer.bias])
    theirs = torch.autograd.grad((expected * signs).sum(), [x, weight, bias])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["alexnet", "resnet9", "vgg11"])
def test_a_net_of_products_trains_as_one_of_convolutions(name, products):
    data, model, _ = ordinary.prepare(name, "batch")
    thetas = perturb(model.init(3), 2)
    batches = [np.array([[0, 1], [2, 3]]), np.array([[4, 5]])]
    local = Local(0.01, momentum=0.9, seeds=[0, 0])
    together = train(model, thetas, data, np.arange(2), batches, local, chunk=2)
    for k, rows in enumerate(batches):
        alone, _ = train_alone(model, thetas[k], data, rows, local, k)
        torch.testing.assert_close(together.rows[k], alone, rtol=1e-9, atol=1e-10)


@pytest.fixture(params=[True, False])
def tf32(request):
    """Whether a user lets cuDNN use TF32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = request.param
    yield request.param
    torch.backends.cudnn.allow_tf32 = before


def test_products_are_as_exact_as_convolutions(tf32, monkeypatch):
    """Forwards and backwards cuDNN's switch decides. That of products is as before."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    seen = []
    bmm = torch.bmm

    def spy(*matrices):
        seen.append(matmul.fp32_precision == "tf32")
        return bmm(*matrices)

    monkeypatch.setattr(torch, "bmm", spy)
    x = torch.randn(2, 64, 4, 4)
    weight = torch.randn(2, 5, 32, 3, 3, requires_grad=True)
    client_layers.multiply_patches(x, weight, (1, 1), (1, 1)).sum().backward()
    assert seen == [tf32, tf32]
    assert matmul.fp32_precision == before and not matmul.allow_tf32


@pytest.mark.parametrize("name, norm", NETS)
def test_a_net_equals_the_ordinary_one(name, norm):
    """Alone, and stacked with another: nn.Modules with the same weights."""
    data, model, make_net = ordinary.prepare(name, norm)
    thetas = perturb(model.init(3), 2)
    samples = np.array([[1, 5], [3, 11]])
    x = data.images("train", DOUBLE)
    with torch.no_grad():
        expected = []
        for theta, index in zip(thetas, samples, strict=True):
            net = fill(make_net(), theta).eval()
            expected.append(net(normalise(data, data.x_train[index])))
            alone = run(model.bind(theta[None]), x[index][None])
            assert torch.allclose(alone[0], expected[-1], rtol=0, atol=1e-10)
            assert expected[-1].std() > 1e-4  # not a comparison of zeros
        if not model.is_plain:
            stacked = run(model.bind(thetas), x[samples])
            assert torch.allclose(stacked, torch.stack(expected), rtol=0, atol=1e-10)


TRAINED = [(name, norm, 2) for name, norm in NETS if name != "lstm"]
TRAINED += [("lstm", "batch", 1), ("lenet5", "batch", 1)]
TRAINED += [("fedgen-cnn", "batch", 1), ("fedgen-cnn", "group", 1)]


@pytest.mark.parametrize("name, norm, K", TRAINED)
def test_gradients_and_batch_statistics_equal_the_ordinary_ones(name, norm, K):
    """In training: every client's gradient, and the statistics that its batch leaves."""
    data, model, make_net = ordinary.prepare(name, norm)
    before = perturb(model.init(3), K)
    layers = [before] if model.is_plain else model.by_layer(before)
    samples = np.arange(2 * K).reshape(K, 2)
    y = data.y_train[samples]
    net = model.bind(before if model.is_plain else layers, training=True, grad=True)
    logits = run(net, data.images("train", DOUBLE)[samples])
    loss = sum(F.cross_entropy(logits[k], y[k]) for k in range(K))
    leaves = torch.autograd.grad(loss, net.leaves)
    gradients = torch.cat([leaf.reshape(K, -1) for leaf in leaves], 1)
    thetas = torch.cat(layers, 1)
    for k in range(K):
        twin = fill(make_net(), before[k]).train()
        F.cross_entropy(twin(normalise(data, data.x_train[samples[k]])), y[k]).backward()
        expected = torch.cat([parameter.grad.flatten() for parameter in twin.parameters()])
        assert torch.allclose(gradients[k], expected, rtol=1e-9, atol=1e-10)
        assert torch.allclose(thetas[k], flatten(twin), rtol=0, atol=1e-12)
    has_statistics = model.size > model.trainable
    assert torch.equal(thetas, before) != has_statistics


@pytest.mark.parametrize("name", ["alexnet", "vgg11", "lstm"])
def test_dropout_lies_where_the_ordinary_nets_does(name):
    pair = ZOO[name]
    data = pair.data()
    model = build_model(name, data, dtype=DOUBLE, width=pair.width)
    theta = model.init(3)
    twin = fill(pair.net(), theta)
    x = data.images("train", DOUBLE)[None, :4]
    for training in (True, False):
        torch.manual_seed(5)
        logits = run(model.bind(theta[None], training=training), x)
        torch.manual_seed(5)
        expected = twin.train(training)(normalise(data, data.x_train[:4]))
        assert torch.allclose(logits[0], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "name, side, channels, classes, width, count",
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
    data = random_images(side, channels, classes, n=1) if side else random_text()
    model = build_model(name, data, width=width)
    norms = [m for m in model.build().modules() if isinstance(m, nn.BatchNorm2d)]
    assert model.trainable == count
    assert model.size == count + sum(2 * norm.num_features for norm in norms)


def test_init_is_torchs_default_and_leaves_the_global_streams():
    model = build_model("lenet5", random_images(16, 1))
    torch_state = torch.get_rng_state()
    numpy_state = np.random.get_state()[1].copy()  # noqa: NPY002
    theta = model.init(11)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002
    torch.manual_seed(11)
    assert torch.equal(theta, flatten(ordinary.lenet(1, 16, 4)))
    torch.set_rng_state(torch_state)
    assert not torch.equal(theta, model.init(12))


@pytest.mark.parametrize(
    "name, side",
    [("lenet5", 15), ("vgg11", 28), ("alexnet", 28), ("lstm", 16), ("lenet5", 0)],
)
def test_a_net_that_does_not_fit_the_data(name, side):
    data = random_images(side) if side else random_text()
    with pytest.raises(UsageError, match=f"^--model {name}: [^\n]*(it takes|is empty)[^\n]*$"):
        build_model(name, data)


def test_nets_for_32_pixels_say_so():
    """SIDE is what smaller images are padded to: less does not go through, as much does."""
    assert set(nets.SIDE.values()) == {32}
    for name in nets.NETS:
        data = random_images(28, 3, n=4)
        if name in nets.SIDE and name in ("alexnet", "vgg11"):
            with pytest.raises(UsageError):
                build_model(name, data, width=8)
        if name in nets.SIDE:
            build_model(name, random_images(nets.SIDE[name], 3, n=4), width=8)


def test_moons_projection():
    """features -> 84 -> ReLU -> 256 = z -> classes."""
    data = random_images()
    model = build_model("lenet5", data, dtype=DOUBLE, projection=True)
    thetas = perturb(model.init(0), 2)
    samples = np.array([[0, 1], [2, 3]])
    net = model.bind(thetas)
    z = net.features(arrange(data.images("train", DOUBLE)[samples]))
    for k in range(2):
        twin = fill(MoonNet(1, 16, 4), thetas[k])
        x = normalise(data, data.x_train[samples[k]])
        assert torch.allclose(z[k], twin.z(x), rtol=0, atol=1e-10)
        assert torch.allclose(net.head(z)[k], twin(x), rtol=0, atol=1e-10)
    with pytest.raises(UsageError, match="^--model lstm: [^\n]*projection"):
        build_model("lstm", random_text(), projection=True)


def test_how_many_clients_are_stacked():
    """All of a small model; on a GPU 64 million weights of a big one. A user's own: one by one."""
    for name, pair in ZOO.items():
        model = build_model(name, pair.data(), width=pair.width)
        is_small = name in ("lenet5", "simplecnn", "fedgen-cnn")
        assert model.clients_at_once() == (64 if is_small else 1)
        assert model.clients_at_once(7) == (1 if name == "lstm" else 7)
        model.device = "cuda"
        together = model.clients_at_once()
        if is_small or name == "lstm":
            assert together == (64 if is_small else 1)
        else:
            size = sum(layer.numel() for layer in model.build().parameters())
            assert together == max(1, 64_000_000 // size)


# ----------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("height, width", [(12, 12), (11, 6), (6, 13), (7, 9)])
def test_pooling_before_the_bias_changes_no_bit(height, width, training):
    """Rounding is monotone: max(a + b) = max(a) + b. NaN stays, odd edges are left out."""
    torch.manual_seed(0)
    layer = client_layers.PooledConv2d(6, 8, 3, padding=1)
    x = torch.randn(5, 6, height, width)
    x[1] = 0
    x[2, :, 3, 3] = torch.nan
    convolved = F.conv2d(x, layer.weight, layer.bias * 0, 1, 1) + layer.bias[:, None, None]
    expected = F.max_pool2d(convolved, 2)
    layer.weight = nn.Parameter(layer.weight[None].detach())  # of one client
    layer.bias = nn.Parameter(layer.bias[None].detach())
    with torch.set_grad_enabled(training):
        pooled = layer(x)
    assert torch.equal(pooled.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@pytest.mark.parametrize("is_avx2", [True, False])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_stacked_convolutions_are_each_clients_own(channels, is_avx2, monkeypatch):
    """Values and both gradients, with a channel of zeros beside three or without."""
    monkeypatch.setattr(client_layers, "IS_AVX2", is_avx2)
    torch.manual_seed(0)
    layer = client_layers.Conv2d(channels, 6, 3, stride=2, padding=1)
    x = torch.randn(4, 5, 9, 8, channels, dtype=DOUBLE, requires_grad=True)
    weight = torch.randn(4, 6, channels, 3, 3, dtype=DOUBLE, requires_grad=True)
    bias = torch.randn(4, 6, dtype=DOUBLE)
    expected = []
    for k in range(4):
        expected.append(F.conv2d(x[k].permute(0, 3, 1, 2), weight[k], bias[k], 2, 1))
    expected = torch.cat(expected, 1)
    del layer.weight
    layer.weight = weight
    stacked = layer.convolve(arrange(x), bias.flatten())
    assert torch.allclose(stacked, expected, rtol=0, atol=1e-12)
    slope = torch.randn_like(expected)
    gradients = torch.autograd.grad(stacked, (x, weight), slope)
    wanted = torch.autograd.grad(expected, (x, weight), slope)
    for gradient, of_loop in zip(gradients, wanted, strict=True):
        assert torch.allclose(gradient, of_loop, rtol=0, atol=1e-12)


def test_gradients_of_a_batched_linear_map():
    torch.manual_seed(0)
    shapes = ((3, 4, 5), (3, 2, 5), (3, 2))
    arguments = [torch.randn(*shape, dtype=DOUBLE, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(client_layers.Affine.apply, arguments)


def test_gather_is_indexing():
    samples = torch.arange(60.0).view(5, 3, 4)
    index = torch.tensor([[4, 0, 4], [1, 2, 0]])
    assert torch.equal(client_layers.gather(samples, index), samples[index])
    assert torch.equal(client_layers.gather(samples, index[0]), samples[index[0]])


# -------------------------------------------------------------------------------- weights as rows


def test_a_bound_net_lies_in_the_memory_of_its_rows():
    model = build_model("fedgen-cnn", random_images(28))
    thetas = perturb(model.init(0), 2)
    net = model.bind(thetas, grad=True)
    assert all(leaf.requires_grad for leaf in net.leaves)
    assert not any(leaf.requires_grad for leaf in model.bind(thetas).leaves)
    assert not model.bind(thetas).training
    thetas.zero_()
    assert not any(leaf.any() for leaf in net.leaves)
    layers = model.by_layer(perturb(model.init(0), 2))
    by_layer = model.bind(layers)
    assert by_layer.leaves[0].data_ptr() == layers[0].data_ptr()


def test_rows_by_layer_are_copies():
    model = build_model("fedgen-cnn", random_images(28))
    thetas = perturb(model.init(0), 3)
    layers = model.by_layer(thetas)
    assert torch.equal(torch.cat(layers, 1), thetas)
    learnt = model.by_layer(thetas[:, : model.trainable])
    assert torch.equal(torch.cat(learnt, 1), thetas[:, : model.trainable])
    assert len(learnt) == len(model.parameters)
    layers[0].zero_()
    assert thetas[:, 0].all()


# ------------------------------------------------------------------------------- anyone's own nets

FLAT = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self, channels, side, classes):
        super().__init__(nn.Flatten(), nn.Linear(channels * side * side, classes))
"""
UNLUCKY = """
class Net:
    def __init__(self, *sizes):
        raise RuntimeError('no\\nluck')
"""
HEADLESS = """
from torch import nn
class Net(nn.Flatten):
    def __init__(self, *sizes):
        super().__init__()
"""
PERMUTED = """
import random
import numpy as np
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, channels, side, classes):
        super().__init__()
        self.register_buffer("order", torch.randperm(side * side))
        self.out = nn.Linear(side * side, classes)
        self.out.weight.data[:] = torch.as_tensor(np.random.rand(classes, 1)).float()
        self.out.bias.data[:] = random.random()
    def forward(self, x):
        return self.out(x.flatten(1)[:, self.order])
"""
NORMED = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self, channels, side, classes):
        super().__init__(nn.Conv2d(channels, 6, side), nn.BatchNorm2d(6), nn.Flatten())
        self.append(nn.Linear(6, classes))
"""


def write_net(tmp_path, text: str) -> str:
    """The net's name for --model."""
    (tmp_path / "mine.py").write_text(text)
    return f"{tmp_path / 'mine.py'}:Net"


def class_of(text: str) -> type:
    """The net's class as anyone would import it."""
    names = {}
    exec(text, names)
    return names["Net"]


@pytest.mark.parametrize(
    "text",
    [
        "Net = 3",
        "class Net: pass",
        "class Other: pass",
        "def Net(:",
        "import no_such_module",
        "raise SystemExit(3)",
        UNLUCKY,
        HEADLESS,
        FLAT.replace("classes))", "classes + 1))"),
    ],
)
def test_an_own_net_that_is_none(text, tmp_path):
    with pytest.raises(UsageError, match="^--model [^\n]*mine.py:Net: [^\n]+$"):
        build_model(write_net(tmp_path, text), random_images())


def test_an_own_net_whose_file_is_gone_or_lacks_the_name(tmp_path):
    with pytest.raises(UsageError, match="^--model [^\n]*gone.py:Net: [^\n]+$"):
        build_model(f"{tmp_path}/gone.py:Net", random_images())
    write_net(tmp_path, FLAT)
    with pytest.raises(UsageError, match="mine.py holds no Other"):
        build_model(f"{tmp_path}/mine.py:Other", random_images())


def test_an_own_net_is_found_from_the_working_directory(tmp_path, monkeypatch):
    write_net(tmp_path, FLAT)
    monkeypatch.chdir(tmp_path)
    model = build_model("mine.py:Net", random_images())
    assert model.is_plain
    assert model.trainable == 257 * 4
    with pytest.raises(UsageError, match="^--model mine.py:Net: [^\n]*projection head"):
        build_model("mine.py:Net", random_images(), projection=True)


READER = """
from torch import nn
class Net(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        assert sizes == (80, 0, 80)
        self.table = nn.Embedding(80, 80)
    def forward(self, x):
        return self.table(x).mean(1)
"""


def test_an_own_net_of_text(tmp_path):
    text = random_text()
    model = build_model(write_net(tmp_path, READER), text, dtype=DOUBLE)
    theta = model.init(0)
    logits = run(model.bind(theta[None]), text.x_train[None, :5])
    expected = theta.view(80, 80)[text.x_train[:5]].mean(1)
    assert torch.allclose(logits[0], expected, rtol=0, atol=1e-12)


def test_an_own_net_of_client_aware_layers_is_stacked(tmp_path):
    text = "import nets\ndef Net(channels, side, classes):\n"
    text += "    return nets.lenet5(channels, side, classes, 0)\n"
    data = random_images()
    model = build_model(write_net(tmp_path, text), data, projection=True)
    assert model.clients_at_once() == 64
    assert torch.equal(model.init(1), build_model("lenet5", data, projection=True).init(1))


def test_what_an_own_net_draws_and_does_not_learn_is_the_same_in_every_process(tmp_path):
    name = write_net(tmp_path, PERMUTED)
    orders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = build_model(name, random_images())
        net = model.bind(model.init(seed)[None]).net
        orders.append(net.order.tolist())
    assert orders[0] == orders[1]
    assert orders[0] != sorted(orders[0])
    assert torch.equal(model.init(1), model.init(1))
    assert not torch.isclose(model.init(1)[0], model.init(2)[0], atol=1e-6)


def test_group_norms_take_the_place_of_an_own_nets_batch_norms(tmp_path):
    data = random_images()
    name = write_net(tmp_path, NORMED)
    model = build_model(name, data, dtype=DOUBLE, norm="group")
    theta = perturb(model.init(0), 1)[0]
    twin = class_of(NORMED)(1, 16, 4)
    twin[1] = nn.GroupNorm(1, 6)
    logits = run(model.bind(theta[None]), data.images("train", DOUBLE)[:3][None])
    expected = fill(twin, theta)(normalise(data, data.x_train[:3]))
    assert torch.allclose(logits[0], expected, rtol=0, atol=1e-12)
    assert not model.has_batch_norm
    assert build_model(name, data).has_batch_norm
    assert build_model(name, data).size == model.size + 2 * 6


def test_group_norms_that_replace_nothing_are_refused(tmp_path):
    text = FLAT.replace("classes))", "classes), nn.BatchNorm1d(classes))")
    name = write_net(tmp_path, text)
    assert build_model(name, random_images()).has_batch_norm
    for refused in (name, "lenet5"):
        with pytest.raises(UsageError, match="^--model .*--norm group replaces .* has none \\("):
            build_model(refused, random_images(), norm="group")


STRICT = """
    def forward(self, x):
        assert len(x) > 1 or not self.training, 'Expected more than 1 value'
        return super().forward(x)
"""
FLAT_NORM = FLAT.replace("classes))", "classes), nn.BatchNorm1d(classes))")
TINY = """
import nets
def Net(channels, side, classes):
    return nets.Net([nets.Conv2d(channels, 4, side), nets.BatchNorm2d(4)], nets.Linear(4, classes))
"""


@pytest.mark.parametrize("text", [FLAT_NORM, FLAT + STRICT, TINY])
def test_a_batch_of_one_that_a_net_cannot_learn_from_is_refused_before_training(text, tmp_path):
    """It is known from the schedules; batches of two and more train."""
    data = random_images()
    model = build_model(write_net(tmp_path, text), data)
    theta = model.init(0)
    whole = np.array([[0, 1], [2, 3]])
    update = train(model, theta, data, np.array([4]), [whole], Local(0.1))
    assert update.gather_thetas().isfinite().all()
    message = "^--model .*:Net: .*batch of one .*more than 1 value.*{}.*last one$"
    batches = [whole, np.array([[0, 1], [2, -1]])]
    for m, whose in ((7, "client 7"), (-1, "training on all data")):
        with pytest.raises(UsageError, match=message.format(whose)):
            train(model, theta, data, np.array([4, m]), batches, Local(0.1))
    assert torch.equal(theta, model.init(0))


def own_net(init="pass", before="pass", after="pass") -> str:
    return f"""
import collections
import random
import numpy as np
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, channels, side, classes):
        super().__init__()
        {init}
        self.out = nn.Linear(channels * side * side, classes)
    def forward(self, x):
        {before}
        y = self.out(x.flatten(1))
        {after}
        return y
"""


BUFFER = "self.register_buffer('ema', torch.zeros(1))"
COUNTER = BUFFER.replace("1)", "1, dtype=int)")
GROWN = "if self.training and self.out.weight.abs().max() > 0.06: "
NARROW = "self.out.weight.data.clamp(-0.05, 0.05)"
TABLE = "self.table = nn.Embedding(3, classes, {})"
CODES = "y = y + self.table(x.flatten(1)[:, :4].sign().long() + 1).mean(1)"
MORE = "self.more = nn.{}"
OWN = {  # what a module may do
    "assigned buffer": own_net(BUFFER, "if self.training: self.ema = self.ema + x.mean()"),
    "in place": own_net(BUFFER, "if self.training: self.ema.mul_(0.9).add_(0.1)"),
    "integer buffer": own_net(COUNTER, "self.ema += 1", "y = y / self.ema"),
    "integer by .data": own_net(COUNTER, "self.ema.data += 1", "y = y / self.ema"),
    "infinite mask": own_net(
        BUFFER.replace("zeros(1)", "tensor([0, -torch.inf])"), "x = x + self.ema[0]"
    ),
    "no buffer": own_net("self.register_buffer('none', torch.zeros(0))"),
    "zero variance": own_net(
        "self.register_buffer('v', torch.zeros(1)); self.n = nn.BatchNorm2d(channels)",
        "x = self.n(x) / (self.v + 1e-5).sqrt()",
    ),
    "counted batches": own_net("self.n = nn.BatchNorm2d(1, momentum=None)", "x = self.n(x)"),
    "no statistics": own_net(
        "self.n = nn.BatchNorm2d(1, track_running_stats=False)", "x = self.n(x)"
    ),
    "shared buffer": own_net(
        f"{BUFFER}; self.two = nn.Module(); self.two.register_buffer('again', self.ema)",
        "if self.training: self.two.again.add_(0.1)",
        "y = y * self.ema",
    ),
    "hook": own_net(
        "self.act = []; self.register_forward_hook(lambda m, i, o: self.act.append(o))"
    ),
    "features kept": own_net(after="self.z = y"),
    "counter": own_net("self.n = 0", "self.n += 1; x = x / self.n"),
    "generator": own_net("self.rng = np.random.default_rng(0)", "x = x * self.rng.random()"),
    "global generators": own_net(before="x = x * np.random.rand() * random.random()"),
    "queue": own_net("self.q = collections.deque(maxlen=3)", "self.q.append(x.mean())"),
    "tensor": own_net("self.t = torch.zeros(2)", "self.t += 1; x = x / self.t[0]"),
    "weight by .data": own_net(after=f"self.out.weight.data = {NARROW}"),
    "new weight": own_net(after=f"{GROWN}self.out.weight = nn.Parameter({NARROW})"),
    "spare in a test": own_net(
        MORE.format("Parameter(torch.ones(1))"), after="y = y * self.more if self.training else y"
    ),
    "one memory": own_net(
        "self.a, self.b = [nn.Parameter(t.detach()) for t in [torch.ones(4)] * 2]",
        after="y = y * self.a + self.b",
    ),
    "one weight of two layers": own_net(
        "self.a, self.b = [nn.Linear(256, 256) for _ in 'ab']; self.b.weight = self.a.weight",
        "x = self.b(self.a(x.flatten(1)).relu())",
    ),
    "frozen twice": own_net("self.a, self.b = [nn.Parameter(t, False) for t in torch.ones(2, 3)]"),
    "old weight norm": own_net(
        MORE.format("utils.weight_norm(nn.Linear(classes, classes))"), after="y = self.more(y)"
    ),
    "sparse": own_net(TABLE.format("sparse=True"), after=CODES),
    "limited": own_net(TABLE.format("max_norm=0.5"), after=CODES),
    "constant": own_net("self.scale = [torch.ones(1), {'a': 2}]", "x = x * self.scale[0]"),
    "complex": own_net(
        "self.c = nn.Parameter(torch.randn(classes, classes, dtype=torch.cdouble))",
        after="y = (y.to(self.c.dtype) @ self.c).abs()",
    ),
    "penalty of its own": own_net(after="y = y + sum(w.square().sum() for w in self.parameters())"),
}


def train_plainly(text: str, theta: torch.Tensor, data, batches, seed, decay) -> torch.Tensor:
    """What torch.optim.SGD makes of a new module with the weights theta (P,)."""
    torch.manual_seed(0)
    net = class_of(text)(1, 16, data.classes).double()
    x = normalise(data, data.x_train)
    fill(net, theta).train()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5, weight_decay=decay)
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)
    for batch in batches:
        sgd.zero_grad()
        F.cross_entropy(net(x[batch]), data.y_train[batch]).backward()
        sgd.step()
    return flatten(net)


@pytest.mark.parametrize("kind", OWN)
def test_an_own_net_trains_as_torch_trains_it(kind, tmp_path):
    """Two clients, each with a new module, whose parameters and float buffers are the weights."""
    data = random_images()
    model = build_model(write_net(tmp_path, OWN[kind]), data, dtype=DOUBLE)
    theta = model.init(3)
    batches = [np.arange(8).reshape(4, 2), np.arange(8, 14).reshape(3, 2)]
    decay = 0.0 if kind == "sparse" else 0.01  # torch's SGD has none for sparse gradients
    local = Local(0.1, momentum=0.5, weight_decay=decay, seeds=[5, 6], grad_norms=True)
    update = train(model, theta, data, np.arange(2), batches, local)
    assert np.isfinite(update.grad_sq).all()
    for k, theta_k in enumerate(update.gather_thetas()):
        expected = train_plainly(OWN[kind], theta, data, batches[k], 5 + k, decay)
        assert torch.allclose(theta_k, expected, rtol=1e-12, atol=1e-12)
        assert not torch.equal(theta_k, theta)


SPLIT = """
import torch
import torch.nn.functional as F
from torch import nn
class Cosine(nn.Linear):
    def forward(self, z):
        return F.linear(F.normalize(z), F.normalize(self.weight))
class Net(nn.Module):
    def __init__(self, channels, side, classes):
        super().__init__()
        self.body = nn.Linear(channels * side * side, 6)
        self.head = {head}
    def features(self, x):
        return self.body(x.flatten(1)).tanh()
    def forward(self, x):
        z = self.features(x)
        {between}
        return self.head(z)
"""
LAST = "nn.Linear(6, classes)"
SPLITS = {
    "another scale": SPLIT.format(head=LAST, between="z = 2 * z if self.training else z"),
    "batch norm": SPLIT.format(head=f"nn.Sequential(nn.BatchNorm1d(6), {LAST})", between=""),
    "cosines": SPLIT.format(head="Cosine(6, classes)", between=""),
}


@pytest.mark.parametrize("kind", SPLITS)
def test_features_and_a_head_change_no_training(kind, tmp_path):
    """The module may do more than head(features(x)), and a head may need (n, F)."""
    data = random_images()
    model = build_model(write_net(tmp_path, SPLITS[kind]), data, dtype=DOUBLE)
    theta = model.init(3)
    batches = np.arange(8).reshape(4, 2)
    local = Local(0.1, momentum=0.5, weight_decay=0.01, seeds=[5])
    [theta_k] = train(model, theta, data, np.arange(1), [batches], local).gather_thetas()
    expected = train_plainly(SPLITS[kind], theta, data, batches, 5, 0.01)
    assert torch.allclose(theta_k, expected, rtol=1e-12, atol=1e-12)


def test_a_net_that_changes_its_images_in_place_has_features(tmp_path):
    """MOON gives the same grey images to three models."""
    text = SPLIT.format(head=LAST, between="").replace("self.body(x", "self.body(x.mul_(0.5)")
    data = random_images()
    model = build_model(write_net(tmp_path, text), data, dtype=DOUBLE, projection=True)
    x = arrange(data.images("train", DOUBLE)[None, :3])
    net = model.bind(model.init(0)[None])
    assert torch.equal(net.features(x), net.features(x))


def test_weights_with_gaps_in_memory_train_as_without(tmp_path):
    """Half of the columns, as of a decomposition. float64 copies them, so float32 shows it."""
    gaps = "self.out.weight = nn.Parameter(torch.randn(classes, 512)[:, ::2] / 16)"
    text = own_net(after="y = y").replace("    def forward", f"        {gaps}\n    def forward")
    repeated = text.replace("        self.out =", f"        {REPEATED}\n        self.out =")
    data = random_images()
    model = build_model(write_net(tmp_path, repeated), data)
    theta = model.init(3)
    batches = np.arange(8).reshape(4, 2)
    local = Local(0.1, momentum=0.5, weight_decay=0.01, seeds=[5])
    [theta_k] = train(model, theta, data, np.arange(1), [batches], local).gather_thetas()
    expected = train_plainly(text, theta[:-4].double(), data, batches, 5, 0.01)
    assert torch.allclose(theta_k[:-4].double(), expected, rtol=1e-4, atol=1e-5)


REPEATED = "self.register_buffer('one', torch.ones(1).expand(4))"


def test_a_buffer_in_the_memory_of_a_weight_does_not_replace_it(tmp_path):
    """A server that takes other steps than the average changes only what is learnt."""
    text = own_net(after="y = y").replace(
        "    def forward", "        self.register_buffer('w', self.out.weight)\n    def forward"
    )
    model = build_model(write_net(tmp_path, text), random_images())
    theta = model.init(0)
    theta[: model.trainable] += 1
    learnt = model.vector(model.load(theta))[: model.trainable]
    assert torch.equal(learnt, theta[: model.trainable])


def test_what_an_optimizer_refuses_is_one_line(tmp_path):
    data = random_images()
    model = build_model(write_net(tmp_path, OWN["limited"]), data)
    local = Local(0.1, optimizer=torch.optim.SparseAdam)  # for sparse gradients alone
    with pytest.raises(
        UsageError, match="^--model .*mine.py:Net, in its optimizer's step: SparseAdam"
    ):
        train(model, model.init(0), data, np.arange(1), [np.arange(8).reshape(4, 2)], local)


def test_a_sparse_buffer_stays_as_built(tmp_path):
    text = own_net("self.register_buffer('s', torch.eye(4).to_sparse())", after="return y @ self.s")
    data = random_images()
    logits = []
    for net in (text, own_net()):
        model = build_model(write_net(tmp_path, net), data)
        x = data.images("train")
        logits.append(common.predict(model, model.init(0), x, np.arange(3)))
    assert torch.equal(*logits)


def test_gradients_of_a_net_that_freezes_weights_as_it_runs(tmp_path):
    """Only the bias learns: ||p - e_y||^2 of each sample."""
    data = random_images()
    text = own_net("pass", "self.out.weight.requires_grad_(False)")
    model = build_model(write_net(tmp_path, text), data, dtype=DOUBLE)
    theta = model.init(0)
    logits = common.predict(model, theta, data.images("train", DOUBLE), np.arange(3))
    expected = (logits.softmax(1) - F.one_hot(data.y_train[:3], 4)).square().sum(1)
    assert np.allclose(squared_gradients(model, theta, data, np.arange(3)), expected)


@pytest.mark.parametrize("kind", ["in place", "integer buffer", "weight by .data", "limited"])
def test_a_test_changes_no_net(kind, tmp_path):
    """Otherwise test data would train it, and more tests would give other results."""
    text = OWN[kind].replace("if self.training: ", "")
    data = random_images()
    model = build_model(write_net(tmp_path, text), data)
    theta = 100 * model.init(0)
    before = theta.clone()
    x = data.images("test", torch.float32)
    logits = [common.predict(model, theta, x, np.arange(3)) for _ in range(2)]
    assert torch.equal(*logits)
    common.predict_shards(model, theta.expand(2, -1), x, [[0], [1]])
    assert torch.equal(theta, before)


def test_a_batch_norm_with_two_names_becomes_one_group_norm(tmp_path):
    text = own_net(
        "self.n = nn.BatchNorm2d(channels); self.m = nn.Sequential(self.n)"
        "; self.a = nn.Parameter(torch.ones(1))",
        "x = self.m(self.a * x)",  # torch 2.11 crashes where a norm's input needs no gradient
    )
    model = build_model(write_net(tmp_path, text), random_images(), norm="group")
    assert not model.has_batch_norm
    assert model.trainable == 1 + 2 + 256 * 4 + 4  # scale and shift once


EXTRA = "self.extra = nn.Linear(channels * side * side, classes)"
TRAINED_ONLY = own_net(EXTRA, after="y = y + self.extra(x.flatten(1)) if self.training else y")


def test_a_head_that_only_training_uses_is_trained(tmp_path):
    """In a test its gradient is 0."""
    data = random_images()
    model = build_model(write_net(tmp_path, TRAINED_ONLY), data, dtype=DOUBLE)
    theta = model.init(0)
    batches = np.array([[0, 1], [2, -1], [3, 4]])
    update = train(model, theta, data, np.array([0]), [batches], Local(0.1))
    after = update.gather_thetas()[0]
    assert (after != theta).all()
    one = train_alone(model, theta, data, batches, Local(0.1))[0]
    assert torch.allclose(after, one, rtol=0, atol=1e-12)
    bare = build_model(write_net(tmp_path, own_net()), data, dtype=DOUBLE)
    expected = squared_gradients(bare, theta[-bare.size :], data, np.arange(3))
    found = squared_gradients(model, theta, data, np.arange(3))
    assert found == pytest.approx(expected, rel=1e-9)


MASK = "self.register_buffer('mask', torch.linspace(0.1, 1, 97))"
COUNT = "self.register_buffer('n', torch.ones(1))"


@pytest.mark.parametrize("base", ["fedavg", "scaffold"])
def test_an_average_rounds_no_buffer_that_no_client_changed(base, tmp_path):
    """A mask of ones would otherwise be 0.99999994 after a round, and not equal 1 any more."""
    text = own_net(f"{MASK}; {COUNT}", "if self.training and x.mean() > 0: self.n.add_(x.mean())")
    name = write_net(tmp_path, text)
    fl = ordinary.make_federation(clients=7, model=name, base=base, dtype="float32")
    state = fl.start()
    before = fl.model.bind(state["theta"][None])
    everyone = fl.everyone
    for t in range(3):
        update = fl.train(state, t, everyone, ordinary.first_batches(fl, everyone))
        p = np.random.default_rng(t).dirichlet(np.ones(7))
        state["theta"] = fl.aggregate(state, update, p)
        after = fl.model.bind(state["theta"][None])
        assert torch.equal(after.net.mask, before.net.mask)
        expected = sum(p[k] * update.gather_thetas()[k, -1].item() for k in range(7))
        assert after.net.n.item() == pytest.approx(expected, rel=1e-6)
        counts = update.gather_thetas()[:, -1]
        assert 0 < (counts == before.net.n).sum() < 7 or t
        assert expected != 1


def test_frozen_weights_that_training_moves_are_averaged_and_sent(tmp_path):
    """As those of a mean teacher. One client in three leaves them, and others stay to the bit."""
    teacher = "self.m, self.k = [nn.Parameter(torch.full((1,), 0.1), False) for _ in 'mk']"
    text = own_net(teacher, "if self.training and x.mean() > 0: self.m.mul_(0.9).add_(x.mean())")
    options = {"clients": 3, "dtype": "float32"}
    fl = ordinary.make_federation(model=write_net(tmp_path, text), **options)
    state = fl.start()
    everyone = fl.everyone
    batches = ordinary.first_batches(fl, everyone)
    images = fl.data.images("train")
    images[batches[0].ravel()] = images[batches[0].ravel()].abs().neg()
    update = fl.train(state, 0, everyone, batches)
    theta = fl.aggregate(state, update, np.array([0.2, 0.3, 0.5]))
    means = []
    for of_client in batches:
        m = 0.1
        for batch in of_client:
            x = images[batch[batch >= 0]].double().mean().item()
            m = 0.9 * m + x if x > 0 else m
        means.append(m)
    kept = fl.model.bind(theta[None]).net
    assert means[0] == 0.1 and means[1] != 0.1
    assert kept.m.item() == pytest.approx(np.dot([0.2, 0.3, 0.5], means), rel=1e-5)
    assert kept.k.item() == state["theta"][fl.model.trainable + 1].item()
    assert fl.cost(update)["sent_mb"] == pytest.approx(3 * fl.model.size * 4e-6)


def test_what_a_net_prints_and_warns_of_is_shown_once(tmp_path, capsys):
    """Although each client and each test has a new one."""
    name = write_net(tmp_path, own_net("import warnings; print('built'); warnings.warn('old')"))
    data = random_images()
    with pytest.warns(UserWarning, match="old") as warned:
        model = build_model(name, data)
        theta = model.init(0)
        train(model, theta, data, np.arange(2), [np.array([[0, 1]])] * 2, Local(0.1))
        common.predict(model, theta, data.images("test"), np.arange(3))
    assert capsys.readouterr().out == "built\n" and len(warned) == 1


def test_a_net_that_removes_a_weight_in_training_is_named(tmp_path):
    removing = own_net(after="if len(x) > 2: del self.out")
    model = build_model(write_net(tmp_path, removing), random_images())
    with pytest.raises(UsageError, match="^--model .*mine.py:Net: training removes out.weight"):
        train(model, model.init(0), random_images(), [0], [np.arange(3)[None]], Local(0.1))


def test_a_net_with_an_empty_weight_is_refused(tmp_path):
    """A table has no side: channels * side * side is 0, and only the biases would learn."""
    x = np.random.default_rng(0).standard_normal((8, 5))
    table = from_arrays(x, np.arange(8) % 4, x, np.arange(8) % 4)
    with pytest.raises(
        UsageError, match=r"out.weight has the shape \(4, 0\), so it is empty: .*0, c"
    ):
        build_model(write_net(tmp_path, own_net()), table)


ZERO_HEAD = """
    for weights in net.head.parameters():
        nets.nn.init.zeros_(weights)
    return net
"""
WRONG = {
    "a tuple": (own_net(after="return y, x"), "returns a tuple; wanted logits"),
    "a dict": (own_net(after="return {'logits': y}"), "returns a dict; wanted logits"),
    "NumPy": (
        own_net(after="return y.detach().numpy()"),
        "returns a ndarray",
    ),
    "one value": (
        own_net(after="return y[:, 0]"),
        r"Tensor\(2,\); wanted logits",
    ),
    "softmax": (own_net(after="y = y.softmax(1)"), "without softmax"),
    "detached": (own_net(after="y = y.detach()"), "depend on no weights that it learns"),
    "frozen": (FLAT + "        self.requires_grad_(False)", "all frozen?"),
    "one module": (FLAT + "module = Net(1, 16, 4)\ndef Net(*x):\n    return module", "one module"),
    "NaN": (own_net(after="y = y / 0"), "NaN or infinite"),
    "backward": (
        own_net(after="y = y.sigmoid()\n        y += 1"),
        "in its backward pass: .*inplace",
    ),
    "module": ("from torch import nn\nNet = nn.Linear(3, 3)", "4 were given"),
    "no module": ("def Net(*sizes):\n    pass", "makes a NoneType; wanted an nn.Module"),
    "batch_first": (
        own_net("self.rnn = nn.RNN(16, 16)", "x = x + self.rnn(x.flatten(1, 2))[0][:, None]"),
        "depend on other samples or clients; is batch_first=True missing",
    ),
    "by the batch": (own_net("pass", "x = x / x.std()"), "depend on other samples"),
    "forward": (own_net("pass", "{}['a']"), r"\(2, 1, 16, 16\): 'a' \(KeyError in mine.py, l"),
    "torch's layer": (
        TINY.replace("nets.Linear", "__import__('torch').nn.Linear"),
        "torch's Linear",
    ),
    "dilation": (
        TINY.replace("4, side)", "4, side, dilation=2, padding=16)"),
        "unexpected keyword argument 'dilation'",
    ),
    "reflected": (
        TINY.replace("4, side)", "4, side, padding_mode='reflect')"),
        "argument 'padding_mode'",
    ),
    "no bias": (TINY.replace("classes))", "classes, bias=False))"), "argument 'bias'"),
    "mixed": (TINY.replace("BatchNorm2d(4)", "nn.Softmax2d()"), "other samples or clients"),
    "behind zeros": (
        TINY.replace("BatchNorm2d(4)", "nn.Softmax2d()").replace("return ", "net = ") + ZERO_HEAD,
        "other samples or clients",
    ),
    "unseeded": (
        own_net("self.w = nn.Parameter(torch.tensor(np.random.default_rng().random(1)).float())"),
        "initial weights differ each time",
    ),
    "samples": (TINY.replace("BatchNorm2d(4)", "nn.Softmax(0)"), "other samples or clients"),
    "response": (TINY.replace("nets.BatchNorm2d(4)", "nets.nn.LocalResponseNorm(2)"), "LocalResp"),
    "shaped": (
        TINY.replace("BatchNorm2d(4)", "nn.LayerNorm([4, 1, 1], elementwise_affine=False)"),
        "normalized_shape",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_a_net_of_ones_own_does_wrong_is_said_in_our_words(kind, tmp_path):
    text, said = WRONG[kind]
    with pytest.raises(UsageError, match=f"^--model [^\n]*mine.py:Net[:,] [^\n]*{said}[^\n]*$"):
        build_model(write_net(tmp_path, text), random_images())


LINEAR = """
from torch import nn
def Net(channels, side, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * max(side, 1), classes))
"""
STACKED = """
from nets import Linear, Net as Stack, ReLU
def Net(channels, side, classes):
    return Stack([Linear(channels, 8), ReLU()], Linear(8, classes))
"""


@pytest.mark.parametrize("text", ["", LINEAR, STACKED])
def test_a_table_of_integers_is_text_and_the_line_says_so(text, tmp_path):
    data = from_arrays(*[np.arange(12).reshape(4, 3), [0, 1, 0, 1]] * 2)
    name = write_net(tmp_path, text) if text else "lenet5"
    with pytest.raises(UsageError, match=r"^--model [^\n]*is text; [^\n]*astype\(float\)"):
        build_model(name, data)


def test_a_neighbour_of_a_nets_file_is_imported_but_not_one_of_our_names(tmp_path):
    (tmp_path / "my_layers_of_this_test.py").write_text("from torch.nn import Flatten")
    text = "import my_layers_of_this_test\n" + FLAT.replace(
        "nn.Flatten", "my_layers_of_this_test.Flatten"
    )
    assert build_model(write_net(tmp_path, text), random_images()).trainable == 257 * 4
    (tmp_path / "data.py").write_text("")
    with pytest.raises(
        UsageError, match="^--model [^\n]*data.py has the name of the module [^\n]*data.py; rename"
    ):
        build_model(write_net(tmp_path, "import os, data\n" + FLAT), random_images())


# ------------------------------------------------------------------------------ tables and series


def float_data(*shape):
    rng = np.random.default_rng(0)
    x = 3 + rng.standard_normal((40, *shape))
    y = np.arange(40) % 3
    return from_arrays(x[:30], y[:30], x[30:], y[30:])


@pytest.mark.parametrize("shape", [(7,), (20, 9)])
def test_a_net_of_ones_own_takes_tables_and_series_as_they_are(shape, tmp_path):
    """Training equals torch's SGD on the standardised arrays."""
    data = float_data(*shape)
    model = build_model(write_net(tmp_path, LINEAR), data, dtype=DOUBLE)
    theta = model.init(0)
    batches = [np.arange(12).reshape(3, 4)]
    update = train(model, theta, data, np.array([0]), batches, Local(0.1))
    twin = fill(class_of(LINEAR)(shape[-1], shape[0] if len(shape) > 1 else 0, 3), theta)
    sgd = torch.optim.SGD(twin.parameters(), lr=0.1)
    x = data.x_train.numpy()
    axes = tuple(range(x.ndim - 1))
    x = torch.from_numpy((x - x.mean(axes)) / x.std(axes))
    for batch in batches[0]:
        sgd.zero_grad()
        F.cross_entropy(twin(x[batch]), data.y_train[batch]).backward()
        sgd.step()
    assert torch.allclose(update.gather_thetas()[0], flatten(twin), rtol=0, atol=1e-10)


def test_client_aware_layers_train_on_tables_stacked_and_refuse_series(tmp_path):
    data = float_data(7)
    model = build_model(write_net(tmp_path, STACKED), data, dtype=DOUBLE)
    thetas = perturb(model.init(0), 2)
    samples = np.arange(6).reshape(2, 3)
    stacked = run(model.bind(thetas), data.images("train", DOUBLE)[samples])
    for k in range(2):
        layers = (nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 3))
        twin = fill(nn.Sequential(*layers), thetas[k])
        assert torch.allclose(
            stacked[k], twin(data.images("train", DOUBLE)[samples[k]]), atol=1e-12
        )
    with pytest.raises(UsageError, match=r"^--model .*\(samples of shape \(20, 9\)\)$"):
        build_model(write_net(tmp_path, STACKED), float_data(20, 9))


OWN_LSTM = """
from torch import nn
class Net(nn.Module):
    def __init__(self, channels, side, classes):
        super().__init__()
        self.rnn = nn.LSTM(channels * side, 5, batch_first=True)
        self.out = nn.Linear(5, classes)
    def forward(self, x):
        self.rnn.flatten_parameters()
        return self.out(self.rnn(x.flatten(1, 2))[0][:, -1])
"""


def move_weights(rnn: nn.RNNBase) -> None:
    """What torch does on a GPU, where cuDNN wants the weights next to one another."""
    for weight in rnn._flat_weights:
        weight.data = weight.data.clone()


@pytest.mark.parametrize("name", ["lstm", "own"])
def test_a_recurrent_layer_trains_where_torch_would_move_its_weights(name, tmp_path, monkeypatch):
    data = random_text() if name == "lstm" else random_images()
    file = name if name == "lstm" else write_net(tmp_path, OWN_LSTM)
    batches = [np.arange(12).reshape(4, 3)] * 2
    thetas = []
    for _ in range(2):
        model = build_model(file, data, dtype=torch.float64)
        local = Local(lr=0.1, seeds=[0, 1])
        update = train(model, model.init(0), data, np.arange(2), batches, local)
        thetas.append(update.gather_thetas())
        monkeypatch.setattr(nn.RNNBase, "flatten_parameters", move_weights)
    assert (thetas[0][0] != model.init(0)).any()
    assert torch.equal(*thetas)
