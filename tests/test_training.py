"""training.py against loops over ordinary torch nets, autograd, closed forms and brute force."""

import dataclasses
import math

import numpy as np
import ordinary
import pytest
import torch
import torch.nn.functional as F
from ordinary import fill, normalise, perturb
from torch import nn

import fedcl_gmm_sync
import training
from bases import BASES
from data import Data, load_data
from errors import UsageError
from nets import Linear, Model, Net, build_model
from training import Local, train, train_alone

DOUBLE = torch.float64
DECAYING = 0.05 * (1 + 0.3 * np.arange(9)) ** -0.75
RAGGED = (7, 3, 10, 1, 6)


def lenet_on(data: Data) -> Model:
    return build_model("lenet5", data, dtype=DOUBLE)


def train_all(model, theta_0, data, batches, local, chunk=0):
    """`train` of clients 0, 1, .."""
    return train(model, theta_0, data, np.arange(len(batches)), batches, local, chunk)


# ------------------------------------------------------- beside a loop over ordinary torch nets


def train_ordinary(net, data, theta_0, batches, local, k=0, term=None):
    """Client k by torch's own layers: (theta (P,), losses, squared norms of the gradients).

    local  of it lr, momentum, weight_decay, proximal, correction, sample_weights
    term   (net, x (n, C, H, W), k, step) -> a number that is added to the loss
    """
    d = sum(parameter.numel() for parameter in net.parameters())
    w = theta_0[:d].clone()
    w_0 = theta_0[:d]
    statistics = theta_0[d:]
    etas = np.broadcast_to(local.lr, len(batches)) if np.isscalar(local.lr) else local.lr
    v = 0
    losses = []
    squares = []
    for step, batch in enumerate(batches):
        samples = batch[batch >= 0]
        fill(net, torch.cat([w, statistics])).train()
        x = normalise(data, data.x_train[samples])
        entropies = F.cross_entropy(net(x), data.y_train[samples], reduction="none")
        if local.sample_weights is not None:
            weights = local.sample_weights[k][step][: len(samples)]
            entropies = torch.from_numpy(weights) * entropies
        loss = entropies.sum() / len(samples)
        if term is not None:
            loss = loss + term(net, x, k, step)
        statistics = ordinary.flatten(net)[d:]
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        g = torch.cat([gradient.flatten() for gradient in gradients])
        losses.append(loss.item())
        squares.append(g.square().sum().item())
        g = g + local.proximal * (w - w_0) + local.weight_decay * w
        if local.correction is not None:
            g = g + local.correction[k]
        v = local.momentum * v + g
        w = w - etas[step] * v
    return torch.cat([w, statistics]), losses, squares


def agree_with_ordinary(update, net, data, theta_0, batches, local, term=None):
    """Every client's update is what torch's own layers make of it."""
    for k, rows in enumerate(batches):
        theta, losses, squares = train_ordinary(net, data, theta_0[k], rows, local, k, term)
        assert (theta - theta_0[k]).abs().max() > 1e-3  # the client moved
        assert (update.gather_thetas()[k] - theta).abs().max() < 1e-10
        assert update.train_loss[k] == pytest.approx(np.mean(losses), rel=1e-10)
        assert update.grad_sq[k] == pytest.approx(np.mean(squares), rel=1e-10)
        assert update.steps[k] == len(rows)
        assert update.samples[k] == (rows >= 0).sum()


def agree_with_loop(update, model, data, theta_0, batches, local):
    """Every client's update is what `train_alone` makes of it."""
    for k, rows in enumerate(batches):
        theta = train_alone(model, theta_0[k], data, rows, local, k)[0]
        assert (update.gather_thetas()[k] - theta).abs().max() < 1e-10


OPTIONS = {
    "plain": Local(0.05),
    "momentum": Local(0.05, momentum=0.9, weight_decay=5e-3),
    "schedule": Local(DECAYING),
    "proximal": Local(DECAYING, proximal=0.3, momentum=0.5),
    "correction": Local(DECAYING),
    "weights": Local(0.05, momentum=0.9),
    "all": Local(DECAYING, momentum=0.8, weight_decay=0.01, proximal=0.2),
}


def make_local(option: str, model: Model, batches) -> Local:
    """An option of training, with what differs between the clients."""
    rng = np.random.default_rng(2)
    local = dataclasses.replace(OPTIONS[option], grad_norms=True)
    if option in ("correction", "all"):
        noise = rng.normal(size=(len(batches), model.trainable))
        local = dataclasses.replace(local, correction=torch.from_numpy(0.05 * noise))
    if option in ("weights", "all"):
        weights = [rng.uniform(0, 3, rows.shape) for rows in batches]
        local = dataclasses.replace(local, sample_weights=weights)
    return local


@pytest.mark.parametrize(
    ("name", "norm", "option", "sizes", "batch_size", "chunk"),
    [
        *(("lenet5", "batch", option, RAGGED, 3, 0) for option in OPTIONS),
        ("lenet5", "batch", "all", RAGGED, 3, 1),
        ("lenet5", "batch", "all", RAGGED, 3, 2),
        ("simplecnn", "batch", "all", RAGGED, 3, 3),
        ("fedgen-cnn", "batch", "plain", RAGGED, 3, 0),
        ("fedgen-cnn", "batch", "all", RAGGED, 3, 2),
        ("fedgen-cnn", "batch", "momentum", (8, 8, 8), 4, 0),
        ("fedgen-cnn", "batch", "momentum", (6, 6), 4, 0),
        ("fedgen-cnn", "batch", "momentum", (5,), 4, 0),
        ("fedgen-cnn", "group", "all", RAGGED, 3, 0),
        ("alexnet", "batch", "momentum", (3, 4), 2, 1),
        ("alexnet", "batch", "momentum", (3, 4), 2, 2),
        ("resnet9", "batch", "momentum", (3, 4), 2, 1),
        ("resnet9", "batch", "momentum", (3, 4), 2, 2),
        ("vgg11", "batch", "momentum", (3, 2), 2, 2),
        ("resnet18", "batch", "momentum", (3, 2), 2, 2),
        ("lstm", "batch", "all", (5, 3), 2, 0),
    ],
)
def test_the_stack_equals_both_loops(name, norm, option, sizes, batch_size, chunk):
    """`train_alone`, and torch's own layers: unequal numbers of steps, short batches.

    All nets, stacked and one by one; padding must enter no batch statistics.
    """
    data, model, make_net = ordinary.prepare(name, norm)
    batches = ordinary.draw_schedules(data, sizes, batch_size)
    theta_0 = perturb(model.init(1), len(sizes))
    before = theta_0.clone()
    local = make_local(option, model, batches)
    update = train_all(model, theta_0, data, batches, local, chunk)
    assert torch.equal(theta_0, before)  # the caller's weights are not trained in place
    agree_with_ordinary(update, make_net(), data, theta_0, batches, local)
    agree_with_loop(update, model, data, theta_0, batches, local)


def pull_to_frozen(out):
    """A penalty that reads all that a loss may read."""
    with torch.no_grad():
        target = out.frozen["old"].features(out.inputs)
    distance = (out.features - target).square().sum(2)
    decay = 0.01 * out.net.head.weight.square().sum((1, 2))
    strength = out.extra["strength"] * out.extra["pull"]
    return decay + strength * (out.share * distance).sum(1)


@pytest.mark.parametrize("chunk", [0, 1, 2])
@pytest.mark.parametrize("name", ["lenet5", "fedgen-cnn"])
def test_the_stack_equals_the_reference_loop_in_every_field_at_once(name, chunk):
    """Loss, penalty, frozen nets, extras, augmentation, weights, correction, schedules."""
    data, model, _ = ordinary.prepare(name)
    batches = ordinary.draw_schedules(data, RAGGED, 3)
    rng = np.random.default_rng(4)
    K = len(batches)

    def smoothed(out):
        return training.cross_entropy(out) - 0.1 * (out.weight * out.logits.mean(2)).sum(1)

    def augment(images, extra):
        return images * extra["pull"][:, None, None, None, None]

    local = dataclasses.replace(
        make_local("all", model, batches),
        loss=smoothed,
        penalty=pull_to_frozen,
        frozen={"old": perturb(model.init(7), K, seed=3)},
        per_client={"strength": torch.linspace(0, 1, K, dtype=DOUBLE)},
        per_step={"pull": [rng.uniform(0.5, 1.5, len(rows)) for rows in batches]},
        augment=augment,
    )
    theta_0 = perturb(model.init(1), K)
    update = train_all(model, theta_0, data, batches, local, chunk)
    assert (update.gather_thetas() - theta_0).abs().amax(1).min() > 1e-3
    agree_with_loop(update, model, data, theta_0, batches, local)


# --------------------------------------------------------------------------- somebody's own nets

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
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 1)
        self.out = nn.Linear(8, classes)
    def forward(self, x):
        tokens = self.cut(x).flatten(2).transpose(1, 2)[:, self.order] + self.places
        return self.out(self.blocks(tokens).mean(1))
"""
FROZEN_LAYER = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self, channels, side, classes):
        super().__init__(nn.Flatten(), nn.Linear(256, 5), nn.Tanh(), nn.Linear(5, classes))
        self[1].requires_grad_(False)
"""


def write_net(tmp_path, text: str) -> tuple:
    """The net's name for --model, and its class as anyone would import it."""
    path = tmp_path / "mine.py"
    path.write_text(text)
    names = {}
    exec(text, names)
    return f"{path}:Net", names["Net"]


@pytest.mark.parametrize("text", [MOBILE, TRANSFORMER])
def test_own_nets_train_as_ordinary_ones(text, tmp_path):
    """Batch norms; whole and non-persistent buffers; eval mode when tested."""
    data = ordinary.random_images(32, 3)
    name, net_class = write_net(tmp_path, text)
    model = build_model(name, data, dtype=DOUBLE)
    batches = ordinary.draw_schedules(data, (16, 8), 8)
    theta_0 = perturb(model.init(0), 2)
    local = make_local("all", model, batches)
    local = dataclasses.replace(local, lr=0.005, correction=None)  # batch norms of 8 are steep
    update = train_all(model, theta_0, data, batches, local)
    net = net_class(3, 32, 4)
    agree_with_ordinary(update, net, data, theta_0, batches, local)
    agree_with_loop(update, model, data, theta_0, batches, local)


def test_what_an_own_net_has_frozen_stays(tmp_path):
    """A frozen layer before a trained one, by torch's own SGD over what wants a gradient."""
    data = ordinary.random_images()
    name, net_class = write_net(tmp_path, FROZEN_LAYER)
    model = build_model(name, data, dtype=DOUBLE)
    net = net_class(1, 16, 4).double()
    theta_0 = model.init(0)
    assert model.trainable == 5 * 4 + 4
    assert model.size == model.trainable + 257 * 5
    tensors = [net[3].weight, net[3].bias, net[1].weight, net[1].bias]
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, values in zip(tensors, theta_0.split(sizes), strict=True):
        tensor.data.copy_(values.view(tensor.shape))
    batches = np.arange(12).reshape(4, 3)
    sgd = torch.optim.SGD(tensors[:2], lr=0.1, momentum=0.5, weight_decay=0.1)
    for batch in batches:
        sgd.zero_grad()
        logits = net(normalise(data, data.x_train)[batch])
        F.cross_entropy(logits, data.y_train[batch]).backward()
        sgd.step()
    local = Local(0.1, momentum=0.5, weight_decay=0.1)
    [theta] = train_all(model, theta_0, data, [batches], local).gather_thetas()
    expected = torch.cat([tensor.detach().flatten() for tensor in tensors])
    assert torch.allclose(theta, expected, rtol=0, atol=1e-12)
    assert not torch.equal(expected, theta_0)
    assert torch.equal(theta[model.trainable :], theta_0[model.trainable :])


def test_frozen_weights_stay_to_the_last_bit_and_are_not_sent(tmp_path):
    """A mean of equal numbers is rounded: after 100 rounds it would be another number."""
    name, _ = write_net(tmp_path, FROZEN_LAYER)
    fl = ordinary.make_federation(model=name, dtype="float32")
    d = fl.model.trainable
    state = fl.start()
    frozen = state["theta"][d:].clone()
    update = fl.train(state, 0, np.arange(3), ordinary.first_batches(fl, np.arange(3)))
    p = np.array([0.1, 0.3, 0.6])
    for _ in range(5):
        state["theta"] = fl.aggregate(state, update, p)
        update.rows[:, d:] = state["theta"][d:]
        gmm = fedcl_gmm_sync.average(fl, state["theta"], {9: update.rows[0]}, update)
        assert torch.equal(gmm[d:], frozen)
    assert torch.equal(state["theta"][d:], frozen)
    assert fl.cost(update)["sent_mb"] == pytest.approx(3 * d * 4e-6)


@pytest.mark.parametrize(
    "row",
    [[0, -1, 2], [-1, -1, -1], [0, 1, 900], [0.0, 1.0, 2.0], [True, False, True]],
)
def test_batches_that_hold_no_places_are_refused(row):
    data = ordinary.random_images()
    model = lenet_on(data)
    good = np.array([[0, 1, 2]])
    message = r"^the batches of client 1[^\n]*: wanted|^the batches[^\n]*; wanted integers[^\n]*$"
    with pytest.raises(UsageError, match=message):
        train_all(model, model.init(0), data, [good, np.array([row])], Local(0.1))


@pytest.mark.parametrize(
    "schedule, message",
    [
        ({"lr": [0.1, 0.1]}, "lr has 2 entries; wanted one for each of 3 steps"),
        ({"sample_weights": [(3, 2), (1, 2)]}, "sample_weights of client 1 has 1 of 2 steps"),
        (
            {"sample_weights": [(3, 2)]},
            "sample_weights has 1 rows; wanted one for each of 2 clients",
        ),
        ({"per_step": [(2,), (2,)]}, "share of client 0 has 2 of 3 steps"),
    ],
)
def test_a_schedule_that_is_too_short_is_refused(schedule, message):
    data = ordinary.random_images()
    model = lenet_on(data)
    batches = [np.arange(6).reshape(3, 2), np.arange(4).reshape(2, 2)]
    local = Local(schedule.pop("lr", 0.1))
    for name, shapes in schedule.items():
        arrays = [np.ones(shape) for shape in shapes]
        setattr(local, name, {"share": arrays} if name == "per_step" else arrays)
    with pytest.raises(UsageError, match=f"^{message}$"):
        train_all(model, model.init(0), data, batches, local)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"correction": torch.zeros(5, 3)}, "correction has 5 rows"),
        ({"per_client": {"z": torch.zeros(5)}}, "z has 5 rows"),
        ({"per_client": {"z": 0.5}}, "z has 0 rows; wanted one for each of 2 clients"),
        ({"per_client": {"seeds": torch.tensor(3.0)}}, "seeds has 0 rows"),
        ({"per_step": {"z": 5}}, "z has 0 rows"),
        ({"frozen": {"old": torch.zeros(5, 3)}}, "old has 5 rows"),
        ({"seeds": [1, 2, 3]}, "seeds has 3 rows"),
        ({"penalty": lambda out: out.logits.mean()}, r"penalty has the shape \(\); wanted \(K,\)"),
        ({"loss": lambda out: out.weight}, r"loss has the shape \(2, 2\); wanted \(K,\)"),
    ],
)
def test_what_is_not_one_for_each_client_is_refused(given, message):
    """The first rows would be used, and a number would be added once for each client."""
    data = ordinary.random_images()
    model = lenet_on(data)
    batches = [np.arange(4).reshape(2, 2)] * 2
    with pytest.raises(UsageError, match=message):
        train_all(model, model.init(0), data, batches, Local(0.1, **given))


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_penalty_over_a_models_parameters_is_learnt_from(chunk):
    """Weight decay by hand: a net's parameters are the weights of all its clients, (K, ...)."""

    def decay(out):
        return sum(w.flatten(1).square().sum(1) for w in out.net.parameters()) / 2

    data = ordinary.random_images()
    model = lenet_on(data)
    theta = model.init(0)
    batches = [np.arange(6).reshape(3, 2)] * 2
    found = train_all(model, theta, data, batches, Local(0.1, penalty=decay), chunk)
    expected = train_all(model, theta, data, batches, Local(0.1, weight_decay=1.0), chunk)
    assert (found.gather_thetas() - expected.gather_thetas()).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["alexnet", "vgg11", "lstm"])
def test_dropout_follows_each_clients_seed(name):
    """As in an ordinary net seeded alike; one client at a time, as a stack shares a seed."""
    pair = ordinary.ZOO[name]
    data = pair.data()
    model = build_model(name, data, dtype=DOUBLE, width=pair.width)
    batches = ordinary.draw_schedules(data, (4, 3), 2)
    theta_0 = perturb(model.init(0), 2)
    local = Local(0.05, seeds=[5, 6])
    update = train_all(model, theta_0, data, batches, local, chunk=1)
    agree_with_loop(update, model, data, theta_0, batches, local)
    for k, seed in enumerate(local.seeds):
        net = pair.net()
        torch.manual_seed(seed)
        theta, _, _ = train_ordinary(net, data, theta_0[k], batches[k], local, k)
        assert (update.gather_thetas()[k] - theta).abs().max() < 1e-10
    for seed, is_equal in ((5, True), (7, False)):
        again = train_all(model, theta_0[:1], data, batches[:1], Local(0.05, seeds=[seed]))
        assert torch.equal(again.gather_thetas()[0], update.gather_thetas()[0]) == is_equal


def test_stacked_clients_share_the_first_ones_seed():
    data = ordinary.random_images(32, 3)
    model = build_model("alexnet", data, dtype=DOUBLE, width=8)
    batches = ordinary.draw_schedules(data, (4, 4), 2)
    theta = model.init(0)

    def thetas(*seeds):
        local = Local(0.05, seeds=seeds)
        return train_all(model, theta, data, batches, local, chunk=2).gather_thetas()

    assert torch.equal(thetas(5, 6), thetas(5, 7))
    assert not torch.equal(thetas(5, 6), thetas(6, 6))


# ---------------------------------------------------------------------- clients together, apart


def test_stacked_clients_do_not_touch_one_another():
    """A client whose weights blow up to NaN leaves the others' bits alone."""
    data = ordinary.random_images()
    model = lenet_on(data)
    batches = ordinary.draw_schedules(data, (6, 6, 4), 3)
    theta_0 = perturb(model.init(0), 3)
    clean = train_all(model, theta_0, data, batches, Local(0.1))
    theta_0[1] = math.nan
    dirty = train_all(model, theta_0, data, batches, Local(0.1))
    thetas = dirty.gather_thetas()
    assert thetas[1].isnan().all()
    assert torch.equal(thetas[[0, 2]], clean.gather_thetas()[[0, 2]])


def test_weights_of_integers_and_fractions_side_by_side():
    """Neither client's sample weights may be cut to the other's type."""
    data = ordinary.random_images()
    model = lenet_on(data)
    batches = [np.arange(4)[None], np.arange(4, 8)[None]]
    weights = [np.ones((1, 4), int), np.full((1, 4), 0.5)]
    both = train_all(model, model.init(0), data, batches, Local(0.1, sample_weights=weights))
    local = Local(0.1, sample_weights=weights[1:])
    alone = train_all(model, model.init(0), data, batches[1:], local)
    assert both.train_loss[1] == pytest.approx(alone.train_loss[0], rel=1e-12)
    assert alone.train_loss[0] > 0.1


def test_a_client_without_samples_returns_what_it_was_given():
    data = ordinary.random_images()
    model = build_model("lenet5", data)
    theta = model.init(0)
    nothing = np.zeros((0, 4), int)
    local = Local(0.1, grad_norms=True)
    update = train_all(model, theta, data, [nothing, np.arange(4)[None]], local)
    assert torch.equal(update.gather_thetas()[0], theta)
    assert update.length.tolist() == [0, 0.1]
    assert np.isnan([update.grad_sq[0], update.train_loss[0]]).all()  # nothing has no mean
    assert np.isfinite([update.grad_sq[1], update.train_loss[1]]).all()
    assert update.steps.tolist() == [0, 1]
    assert update.samples.tolist() == [0, 4]
    for name in ("fednova", "scaffold", "vrlsgd"):  # these divide by its steps
        base = BASES[name](ordinary.make_config(base=name), model)
        with pytest.raises(UsageError, match="^client 0 took no local step"):
            base.aggregate(theta, update, np.array([0.5, 0.5]), {})
    alone = train_all(model, theta, data, [nothing], Local(0.1))
    assert torch.equal(alone.gather_thetas()[0], theta)
    assert torch.equal(train_alone(model, theta, data, nothing, Local(0.1))[0], theta)


@pytest.mark.parametrize("name", ["lenet5", "fedgen-cnn", "lstm"])
def test_another_optimizer_replaces_sgd(name):
    """Adam over ordinary layers, its rate by a schedule. SGD's bases refuse what it made."""
    data, model, make_net = ordinary.prepare(name)
    batches = ordinary.draw_schedules(data, (7, 10), 3)
    theta_0 = model.init(1)
    local = Local(0.1 * DECAYING, momentum=0.9, optimizer=torch.optim.Adam)
    update = train_all(model, theta_0, data, batches, local)
    for theta, of_client in zip(update.gather_thetas(), batches, strict=True):
        net = fill(make_net(), theta_0).train()
        adam = torch.optim.Adam(net.parameters())
        for eta, batch in zip(local.lr, of_client, strict=False):
            samples = batch[batch >= 0]
            x = normalise(data, data.x_train[samples])
            adam.zero_grad()
            F.cross_entropy(net(x), data.y_train[samples]).backward()
            adam.param_groups[0]["lr"] = eta
            adam.step()
        apart = (theta - ordinary.flatten(net)).abs().max()
        assert apart < 1e-8  # Adam divides rounding by small gradients
    assert (theta - theta_0).abs().max() > 1e-3
    for base in ("fednova", "scaffold", "vrlsgd"):
        with pytest.raises(UsageError, match="need SGD: choose another --base$"):
            made = BASES[base](ordinary.make_config(base=base), model)
            made.aggregate(theta_0, update, np.array([0.5, 0.5]), {})


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_ranks_train_each_client_once_and_all_hold_one_processs_bits(ranks, monkeypatch):
    """Of 5 clients. The ranks run in turn, twice: the second time, sums hold all that was sent."""
    data = ordinary.random_images()
    model = lenet_on(data)
    batches = ordinary.draw_schedules(data, RAGGED, 3)
    local = Local(0.05, grad_norms=True)
    whole = train_all(model, model.init(0), data, batches, local, chunk=1)
    expected = whole.gather_thetas()
    p = torch.tensor([0.1, 0.3, 0.2, 0.25, 0.15], dtype=torch.float64)
    sent = {}  # by rank and call
    now = {}

    def all_reduce(part):
        now["call"] += 1
        sent[now["rank"], now["call"]] = part.clone()
        part.copy_(sum(sent.get((rank, now["call"]), 0) for rank in range(ranks)))

    def train_rank(rank):
        """Its update, the average, the clients' weights, and once more the average."""
        now.update(rank=rank, call=0)
        update = train_all(model, model.init(0), data, batches, local, chunk=1)
        average = update.average(p)  # before the rows of others are here
        thetas = update.gather_thetas()
        assert update.gather_thetas() is thetas and now["call"] == 3  # nothing is sent twice
        return update, thetas, average, update.average(p)

    monkeypatch.setattr(training, "rank_and_ranks", lambda: (now["rank"], ranks))
    monkeypatch.setattr(training.dist, "all_reduce", all_reduce)
    for rank in range(ranks):
        train_rank(rank)
    trained = torch.stack([sent[rank, 3].any(1) for rank in range(ranks)])
    assert trained.sum(0).tolist() == [1] * 5
    for rank in range(ranks):
        update, thetas, *averages = train_rank(rank)
        assert torch.equal(thetas, expected)
        for average in averages:
            assert torch.allclose(average, p @ expected, rtol=0, atol=1e-12)
        for name in ("finite", "steps", "samples", "length", "grad_sq", "train_loss"):
            assert np.array_equal(getattr(update, name), getattr(whole, name))


# ------------------------------------------------------------------------------- what losses see


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_losses_see_the_rows_of_their_client_and_step(chunk):
    """Frozen nets, extras and sample weights, with ragged clients in shuffled order."""
    data = ordinary.random_images()
    model = lenet_on(data)
    rng = np.random.default_rng(1)
    batches = ordinary.draw_schedules(data, (4, 11, 1, 7), 3)
    weights = [rng.uniform(0, 2, rows.shape) for rows in batches]
    nets = perturb(model.init(0), 4, seed=3)
    visits = []

    def check_client(out, row, m, step):
        samples = batches[m][step]
        samples = samples[samples >= 0]
        n = len(samples)
        images = normalise(data, data.x_train[samples])
        assert torch.equal(out.y[row, :n], data.y_train[samples])
        assert torch.allclose(out.inputs[:n, row : row + 1], images, atol=1e-12)
        share = torch.full((n,), 1 / n, dtype=DOUBLE)
        assert torch.allclose(out.share[row, :n], share)
        assert torch.allclose(out.weight[row, :n], share * torch.from_numpy(weights[m][step, :n]))
        assert not out.share[row, n:].any()
        assert not out.weight[row, n:].any()
        frozen = fill(ordinary.lenet(1, 16, 4), nets[m]).eval()
        features = out.frozen["old"].features(out.inputs)[row, :n]
        assert torch.allclose(features, frozen[:-1](images), atol=1e-10)
        assert not features.requires_grad

    def check(out):
        assert out.net.training
        assert not out.frozen["old"].training
        ids = out.extra["id"].tolist()
        steps = out.extra["step"].tolist()
        for row, (m, step) in enumerate(zip(ids, steps, strict=True)):
            check_client(out, row, m, step)
            visits.append((m, step))
        return training.cross_entropy(out)

    local = Local(
        0.1,
        sample_weights=weights,
        loss=check,
        frozen={"old": nets},
        per_client={"id": torch.arange(4)},
        per_step={"step": [np.arange(len(rows)) for rows in batches]},
    )
    train_all(model, model.init(0), data, batches, local, chunk)
    expected = []
    for m, rows in enumerate(batches):
        expected += [(m, step) for step in range(len(rows))]
    assert sorted(visits) == expected  # each once


# ----------------------------------------------------------------------- norms of single gradients


def squared_gradient(net, x, y) -> float:
    """||gradient of the mean loss||^2 of an ordinary net."""
    gradients = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
    return sum(float(gradient.square().sum()) for gradient in gradients)


def pixels(n=7, classes=3) -> Data:
    """4x4 images."""
    rng = np.random.default_rng(5)
    x = torch.from_numpy(rng.integers(0, 256, (n, 4, 4, 1), dtype=np.uint8))
    y = torch.from_numpy(rng.integers(0, classes, n))
    return Data(x, y, x, y, classes, torch.tensor([100.0]), torch.tensor([50.0]))


def test_norms_of_single_gradients_equal_a_loop_and_vmap():
    """Of more samples than one pass takes."""
    data = load_data("digits")
    model = lenet_on(data)
    theta = model.init(1)
    norms = training.squared_gradients(model, theta, data, np.arange(70))
    net = fill(ordinary.lenet(1, 28, 10), theta)
    x = normalise(data, data.x_train[:70])
    y = data.y_train[:70]
    loop = [squared_gradient(net, x[i : i + 1], y[i : i + 1]) for i in range(70)]
    parameters = {name: value.detach() for name, value in net.named_parameters()}

    def loss(parameters, x, y):
        logits = torch.func.functional_call(net, parameters, x[None])
        return F.cross_entropy(logits, y[None])

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, y)
    vmapped = sum(gradient.flatten(1).square().sum(1) for gradient in gradients.values())
    np.testing.assert_allclose(norms, loop, rtol=1e-10)
    np.testing.assert_allclose(norms, vmapped.numpy(), rtol=1e-10)


def test_plain_nets_take_one_sample_at_a_time():
    data = ordinary.random_text(3)
    model = build_model("lstm", data, dtype=DOUBLE, width=8)
    theta = model.init(0)
    net = fill(ordinary.CharLSTM(80, 8), theta).eval()
    x = data.x_train
    y = data.y_train
    expected = [squared_gradient(net, x[i : i + 1], y[i : i + 1]) for i in range(3)]
    norms = training.squared_gradients(model, theta, data, np.arange(3))
    np.testing.assert_allclose(norms, expected, rtol=1e-10)


def test_fisher_traces_equal_a_dense_jacobian():
    """tr J^T (diag p) J, J = d log p / d theta, from torch's own Jacobian of its own layers."""
    data = pixels()
    model = Model(lambda: Net([Linear(16, 5), nn.Tanh()], Linear(5, 3)), dtype=DOUBLE)
    theta = model.init(4)
    x = normalise(data, data.x_train).flatten(1)

    def log_p(theta):
        w_1, b_1, w_2, b_2 = theta.split([80, 5, 15, 3])
        hidden = torch.tanh(x @ w_1.view(5, 16).T + b_1)
        return torch.log_softmax(hidden @ w_2.view(3, 5).T + b_2, 1)

    J = torch.autograd.functional.jacobian(log_p, theta)  # (n, C, P)
    fisher = torch.einsum("nc,ncp,ncq->npq", log_p(theta).exp(), J, J)
    expected = torch.einsum("npp->n", fisher)
    traces = training.fisher_traces(model, theta, data, np.arange(7))
    np.testing.assert_allclose(traces, expected.numpy(), rtol=1e-10)
    norms = training.squared_gradients(model, theta, data, np.arange(7))
    assert norms.mean() != pytest.approx(traces.mean(), rel=1e-3)  # labels are the model's


def test_norms_leave_weights_and_random_streams_alone():
    """Dropout sleeps."""
    data = load_data("digits", side=32)
    model = build_model("alexnet", data, width=16)
    theta = model.init(0)
    before = theta.clone()
    state = torch.get_rng_state()
    first = training.fisher_traces(model, theta, data, np.arange(4))
    again = training.fisher_traces(model, theta, data, np.arange(4))
    np.testing.assert_array_equal(first, again)
    assert torch.equal(theta, before)
    assert torch.equal(torch.get_rng_state(), state)


# --------------------------------------------------------------------------- the length of a step


class Point(nn.Module):
    """w (K, 5) itself is what the net says."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(5))

    def features(self, x):
        return self.w.unsqueeze(1)

    def head(self, z):
        return z


@pytest.mark.parametrize("mu", [0.0, 0.5])
@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_length_is_the_way_under_a_unit_gradient(rho, mu):
    """The brute-force rollout: clients of 1, 4 and 6 steps pulled by the gradient (1, .., 1)."""
    model = Model(Point, dtype=DOUBLE)
    nothing = torch.zeros(1, 1, dtype=torch.int64)
    data = Data(nothing, nothing[0], nothing, nothing[0], 2)
    eta = 0.1 * (1 + np.arange(6)) ** -0.5
    batches = [np.zeros((T, 1), int) for T in (4, 1, 6)]
    local = Local(eta, momentum=rho, proximal=mu, loss=lambda out: out.net.w.sum(1))
    update = train_all(model, torch.zeros(3, 5, dtype=DOUBLE), data, batches, local)
    assert np.abs(-update.gather_thetas().numpy() - update.length[:, None]).max() < 1e-12
    assert update.length[1] == pytest.approx(0.1)
