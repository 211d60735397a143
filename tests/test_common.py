"""common.py against float64 NumPy, closed forms, loops over ordinary torch nets and brute force."""

import ast
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import ordinary
import pytest
import torch
import torch.nn.functional as F
from ordinary import fill, first_batches, make_federation, normalise, perturb, random_images

import bases
import common
import experiment
import training
from data import epochs_of_batches
from errors import UsageError
from nets import build_model

DOUBLE = torch.float64


# ------------------------------------------------------------------------- importing, streams


def test_importing_changes_nothing_in_the_process():
    """Neither the garbage collector nor threads nor matplotlib's backend nor the random streams."""
    program = """
import gc, os, random, sys, numpy, torch
def settings():
    names = ("OMP_NUM_THREADS", "MPLBACKEND", "MALLOC_TRIM_THRESHOLD_")
    environment = [os.environ.get(name) for name in names]
    streams = [torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist()]
    threads = [torch.get_num_threads(), torch.get_num_interop_threads()]
    flags = [torch.backends.cudnn.deterministic, torch.are_deterministic_algorithms_enabled()]
    return [gc.get_freeze_count(), gc.get_threshold(), gc.isenabled(), environment, threads, flags,
            random.getstate(), streams, torch.get_default_dtype()]
before = settings()
import common
assert settings() == before
assert not {"matplotlib", "pandas", "experiment"} & {*sys.modules}, "imported"
"""
    folder = Path(common.__file__).parent
    subprocess.run([sys.executable, "-c", program], check=True, cwd=folder)


def test_labels_that_all_runs_share_cannot_be_changed():
    """Label noise written there would be in the next method's data, too."""
    data = random_images()
    config = experiment.Config(clients=4, clients_per_round=2)
    fl = common.Federation(config, data, common.Streams(0))
    with pytest.raises(ValueError, match="read-only"):
        fl.labels[0] = 1


def test_streams_do_not_depend_on_the_order_of_the_calls():
    one = common.Streams(3, 1)
    other = common.Streams(3, 1)
    keys = [("select", 4), ("batches", 4, 2), ("ties", 4, 2), ("init",), ("batches", 2, 4)]
    draws = {key: one(*key).random(3) for key in keys}
    for key in reversed(keys):
        other(*key).random(100)  # any number of draws before
        assert np.array_equal(other(*key).random(3), draws[key])
    assert len({tuple(draw) for draw in draws.values()}) == len(keys)
    assert one.seed("init") == other.seed("init")
    assert 0 <= one.seed("init") < 2**31
    with pytest.raises(TypeError):
        one("select", 0.5)  # not as 0


def test_streams_differ_by_seed_trial_purpose_and_key():
    draws = []
    for seed in (0, 1):
        for trial in (0, 1):
            streams = common.Streams(seed, trial)
            for purpose in ("init", "ties"):
                for key in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2**20)):
                    draws.append(streams(purpose, *key).random())
    assert len(set(draws)) == len(draws) == 40
    assert len({common.Streams(0).seed("dropout", 0, m) for m in range(20)}) == 20


ROOT = Path(common.__file__).parent
SOURCES = [*ROOT.glob("*.py"), *ROOT.glob("results/*/*.py")]


@pytest.mark.parametrize("path", sorted(SOURCES), ids=lambda path: path.name)
def test_a_purpose_always_has_the_same_number_of_keys(path):
    """NumPy pads a short key with zeros, so that streams("x") would repeat streams("x", 0)."""
    numbers = {}
    for call in ast.walk(ast.parse(path.read_text())):
        if not isinstance(call, ast.Call) or not call.args:
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        purpose = getattr(call.args[0], "value", None)
        if name in ("streams", "seed") and isinstance(purpose, str):
            numbers.setdefault(purpose, set()).add(len(call.args))
    assert all(len(counts) == 1 for counts in numbers.values()), numbers


# ------------------------------------------------------------------------ a federation's rounds


def test_selection_is_uniform_nested_and_without_replacement():
    fl = make_federation(clients=40)
    counts = np.zeros(40)
    for t in range(1000):
        chosen = fl.select(t, 16)
        assert len(set(chosen.tolist())) == 16
        assert (np.diff(chosen) > 0).all()
        assert set(chosen) <= set(fl.select(t, 32))
        counts[chosen] += 1
    assert np.abs(counts - 400).max() < 5 * math.sqrt(400 * 0.6)
    fl.config.clients = 20_000  # too many to be permuted in every round
    many = fl.select(0, 50)
    assert len(set(many.tolist())) == 50
    assert (np.diff(many) > 0).all()
    assert many.max() > 10_000
    assert np.array_equal(many, fl.select(0, 50))
    assert not np.array_equal(many, fl.select(1, 50))
    assert np.array_equal(fl.select(0, 20_000), np.arange(20_000))


def test_parts_keep_some_of_a_finer_partition():
    data = ordinary.random_images(n=200)
    fl = make_federation(data, clients=6, parts=20)
    whole = make_federation(data, clients=20)
    assert fl.sizes.tolist() == [10] * 6
    assert len(whole.shards) == 20
    assert len(np.unique(np.concatenate(fl.shards))) == 60
    shards = {shard.tobytes() for shard in fl.shards}
    assert shards <= {shard.tobytes() for shard in whole.shards}
    other = make_federation(data, trial=1, clients=6, parts=20)
    assert shards != {shard.tobytes() for shard in other.shards}


def test_a_federation_obeys_the_flags_of_its_partition():
    data = ordinary.random_images(classes=6)
    fl = make_federation(data, partition="label-skew", classes_per_client=3, clients=4)
    assert [len(np.unique(data.y_train[shard])) for shard in fl.shards] == [3] * 4
    poor = make_federation(data, partition="dirichlet", alpha=0.01, min_size=9, clients=6)
    assert poor.sizes.min() == 9
    assert poor.sizes.tolist() == [len(shard) for shard in poor.shards]
    flat = make_federation(data, partition="dirichlet", alpha=1e6, clients=6)
    assert np.ptp(flat.sizes) <= 6
    assert flat.model.dtype == DOUBLE
    data.owner = np.arange(60) // 5
    natural = make_federation(data, partition="natural", clients=6)
    for shard in natural.shards:
        assert len(np.unique(data.owner[shard])) == 1


def test_hold_out_tests_on_a_share_of_each_clients_samples():
    """They leave training; the images stay normalised by all training images' moments."""
    data = ordinary.random_images(n=103)
    whole = make_federation(data, clients=4)
    fl = make_federation(data, clients=4, hold_out=0.2)
    assert [len(shard) for shard in whole.shards] == [26, 26, 26, 25]
    assert fl.sizes.tolist() == [21, 21, 21, 20]
    images = {image.numpy().tobytes(): i for i, image in enumerate(data.x_train)}
    held = [images[image.numpy().tobytes()] for image in fl.data.x_test]
    assert len(held) == 20
    assert torch.equal(fl.data.y_test, data.y_train[held])
    places = set()
    for m in range(4):
        left = set(whole.shards[m]) - set(fl.shards[m])
        assert left == set(held[5 * m : 5 * m + 5])
        assert set(fl.shards[m]) < set(whole.shards[m])
        places.add(tuple(np.flatnonzero(np.isin(whole.shards[m], fl.shards[m]))))
    assert len(places) == 4  # each client draws by itself
    assert np.array_equal(fl.labels, whole.labels)
    expected = normalise(data, fl.data.x_test)
    shown = fl.data.images("test", DOUBLE).permute(0, 3, 1, 2)
    assert torch.allclose(shown, expected, rtol=0, atol=1e-12)
    with pytest.raises(UsageError, match="^--hold-out 0.01: [^\n]*$"):
        make_federation(data, clients=4, hold_out=0.01)
    fl = make_federation(ordinary.random_images(n=100), clients=1, hold_out=0.29)
    assert len(fl.data.y_test) == 29  # in doubles 0.29 * 100 is below 29


def test_shared_samples_are_not_held_out():
    """One client would train on what another's test holds."""

    class Shared(common.Federation):
        def deal(self):
            return [np.arange(0, 12), np.arange(10, 20)]

    config = ordinary.make_config(clients=2, clients_per_round=1, hold_out=0.5)
    with pytest.raises(UsageError, match="^--hold-out: [^\n]*comes twice[^\n]*$"):
        Shared(config, random_images(), common.Streams(0))


WRONG = {
    "partition IID": {"partition": "IID"},
    "alpha 0": {"alpha": 0},
    "base FedAvg": {"base": "FedAvg"},
    "norm layer": {"norm": "layer"},
    "--hold-out 1.5": {"hold_out": 1.5},
    "--hold-out -0.5": {"hold_out": -0.5},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_program_cannot_build_clients_from_what_no_command_takes(name):
    config = experiment.Config(**{"clients": 20} | WRONG[name])
    with pytest.raises(UsageError, match=f"{name}: choose [^\n]*$"):
        common.Federation(config, random_images(), common.Streams(0))


def test_a_base_can_be_named_after_the_options_were_made(monkeypatch):
    class Mine(bases.FedAvg):
        pass

    monkeypatch.setitem(bases.BASES, "mine", Mine)
    config = experiment.Config(clients=20, base="mine")
    fl = common.Federation(config, random_images(), common.Streams(0))
    assert type(fl.base) is Mine


def test_labels_are_counted_by_client_and_class():
    fl = make_federation(partition="dirichlet", alpha=0.3)
    counts = fl.count_labels()
    for m, shard in enumerate(fl.shards):
        for c in range(4):
            assert counts[m, c] == sum(fl.labels[i] == c for i in shard)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite(bad):
    """Of three clients the second's training ends in `bad`; then nobody's is finite."""
    fl = make_federation()
    state = fl.start()
    clients = np.array([0, 2, 4])

    def blow_up(out):
        return out.extra["blow"] * out.features.sum((1, 2))

    def diverge(value):
        blow = torch.tensor([0.0, value, 0.0], dtype=DOUBLE)
        batches = first_batches(fl, clients)
        fl.train(state, 6, clients, batches, penalty=blow_up, per_client={"blow": blow})

    diverge(1.0)
    message = "^round 7: the update of client 2 is not finite[^\n]*--lr[^\n]*$"
    with pytest.raises(common.NonFiniteError, match=message):
        diverge(bad)
    state["theta"] = state["theta"] * math.nan
    with pytest.raises(common.NonFiniteError, match="client 0, 2, 4"):
        diverge(0.0)


def test_scores_that_are_not_finite_name_five_clients():
    """Weights of 1e38 are finite, but logits are not. So no order of samples may follow."""
    fl = make_federation(clients=8, dtype="float32")
    message = r"^the losses of client 0, 1, 2, 3, 4 and 3 more are not finite; [^\n]*--server-lr"
    with pytest.raises(common.NonFiniteError, match=message):
        fl.score(torch.full_like(fl.start()["theta"], 1e38), fl.everyone)
    with pytest.raises(common.NonFiniteError, match="client 0, 1, 2, 3, 4 are not finite"):
        fl.score(torch.full_like(fl.start()["theta"], 1e38), fl.everyone[:5])


def test_averaging_weights_have_the_sum_1():
    fl = make_federation()
    state = fl.start()
    clients = np.array([1, 3])
    update = fl.train(state, 0, clients, first_batches(fl, clients))
    for p in ([1.0, 1.0], [0.2, 0.3], [0.5, math.nan]):
        with pytest.raises(UsageError, match="have the sum [^\n]*; wanted 1$"):
            fl.aggregate(state, update, np.array(p))


def test_places_of_samples_may_be_of_any_type_of_integers(monkeypatch):
    """Also of one that has no room for -1, which fills up a batch."""
    thetas = []
    for kind in (np.int64, np.uint8, np.uint16):
        shards = [np.arange(m, 60, 5, dtype=kind) for m in range(5)]
        monkeypatch.setattr(common.Federation, "deal", lambda fl, shards=shards: shards)
        fl = make_federation()
        batches = epochs_of_batches(fl.shards[1], 1, 5, np.random.default_rng(0))
        whole = np.stack([shards[2][:5], shards[2][5:10]])
        update = fl.train(fl.start(), 0, np.array([1, 2]), [batches, whole])
        thetas.append(update.gather_thetas())
    assert torch.equal(thetas[0], thetas[1]) and torch.equal(thetas[0], thetas[2])


NOISY = """
import torch
from torch import nn

class Net(nn.Linear):
    def __init__(self, channels, side, classes):
        super().__init__(channels * side * side, classes)
    def forward(self, x):
        return super().forward(x.flatten(1)) + torch.randn(len(x), self.out_features)
"""


def test_a_model_that_is_random_in_a_test_has_the_numbers_of_its_trial(tmp_path):
    """Other tests, jobs and --resume change no digit. The caller's random numbers stay."""
    (tmp_path / "own.py").write_text(NOISY)
    fl = make_federation(model=f"{tmp_path}/own.py:Net")
    theta = fl.start()["theta"]
    weight, bias = theta.split([theta.numel() - 4, 4])
    samples = fl.shards[1]
    x = normalise(fl.data, fl.data.x_train)[samples].flatten(1)
    torch.manual_seed(fl.model.seed)
    logits = x @ weight.view(4, -1).T + bias + torch.randn(len(x), 4)
    expected = F.cross_entropy(logits, fl.data.y_train[samples], reduction="none")
    after = torch.rand(1)
    torch.manual_seed(fl.model.seed)
    torch.randn(len(x), 4)
    for thetas in (theta, theta[None]):
        [(losses, _)] = fl.score(thetas, [1])
        assert losses == pytest.approx(expected.numpy(), rel=1e-9)
    assert torch.equal(torch.rand(1), after)


def test_options_of_a_round_are_merged_with_those_of_the_base():
    """A script's frozen nets and tensors lie beside MOON's; its fields win over the flags."""
    fl = make_federation(base="moon", mu=0.5, momentum=0.9, lr=0.01)
    state = fl.start()
    clients = np.array([1, 3])
    batches = first_batches(fl, clients)
    visits = []

    def loss(out):
        visits.append((set(out.extra), set(out.frozen), out.extra["known"].tolist()))
        assert out.extra["mine"].tolist() == [5, 6]
        return training.cross_entropy(out)

    for _ in range(2):
        update = fl.train(
            state,
            0,
            clients,
            batches,
            lr=0.05,
            loss=loss,
            frozen={"other": fl.model.init(9).expand(2, -1)},
            per_client={"mine": torch.tensor([5.0, 6.0])},
            per_step={"clock": [np.arange(1)] * 2},
        )
        assert np.allclose(update.length, 0.05)
        state["theta"] = fl.aggregate(state, update)
    extras = {"mine", "known", "clock"}
    nets = {"other", "global", "previous"}
    assert visits == [(extras, nets, [0, 0]), (extras, nets, [1, 1])]
    assert np.allclose(fl.train(state, 0, clients, batches).length, 0.01)
    with pytest.raises(TypeError, match="learning_rate"):
        fl.train(state, 0, clients, batches, learning_rate=0.1)


def test_central_training_leaves_out_what_is_held_out():
    """An expert must not have learnt the test set: its labels may change without a trace."""
    experts = []
    for flip in (False, True):
        data = ordinary.random_images()
        fl = make_federation(data, hold_out=0.4)
        if flip:
            for image in fl.data.x_test:
                same = (data.x_train == image).flatten(1).all(1)
                data.y_train[same] = 3 - data.y_train[same]
        experts.append(fl.train_centrally(1))
    assert torch.equal(*experts)


# ---------------------------------------------------------------------------- tests and scores


def client_accuracy(model, theta, data, shard) -> float:
    """Accuracy on test samples whose labels are mixed as the client's, sample by sample."""
    logits = common.predict(model, theta, data.images("test", DOUBLE), np.arange(len(data.y_test)))
    labels = data.y_train[shard].tolist()
    hits = 0.0
    total = 0.0
    for guess, y in zip(logits.argmax(1).tolist(), data.y_test.tolist(), strict=True):
        weight = labels.count(y) / len(labels) / (data.y_test == y).sum().item()
        hits += weight * (guess == y)
        total += weight
    return 100 * hits / total


def evaluate(model, theta, data) -> dict[str, float]:
    """The grades of one net."""
    x = data.images("test", model.dtype)
    columns = common.grade([common.predict(model, theta, x, np.arange(len(x)))], data)
    return columns


def test_solo_reports_the_mean_of_the_clients_own_nets():
    data = ordinary.random_images()
    data.y_test[:20] = 1  # otherwise nets that always guess the same class are equally accurate
    fl = make_federation(data, base="solo", clients=3, per_client=True)
    state = fl.start()
    theta = state["theta"]
    rows = perturb(fl.model.init(1), 2)
    bases.keep(state["base"], "nets", np.array([2, 0]), rows)
    nets = [rows[1], theta, rows[0]]
    assert torch.equal(fl.received(state, np.array([0, 1])), torch.stack(nets[:2]))
    single = [evaluate(fl.model, net, data) for net in nets]
    columns = fl.test(state)
    for name in ("accuracy", "loss"):
        expected = np.mean([of_net[name] for of_net in single])
        assert columns[name] == pytest.approx(expected, rel=1e-12)
    spread = np.std([of_net["accuracy"] for of_net in single], ddof=1)
    assert spread > 0
    assert columns["client_std"] == pytest.approx(spread, rel=1e-12)
    own = []
    for net, shard in zip(nets, fl.shards, strict=True):
        own.append(client_accuracy(fl.model, net, data, shard))
    assert columns["own_mean"] == pytest.approx(np.mean(own), rel=1e-9)
    assert columns["own_std"] == pytest.approx(np.std(own))


def test_per_client_accuracy_equals_brute_force():
    """21 clients with mixes of their own; a class without test samples tells nothing."""
    data = ordinary.random_images(classes=6, n=126)
    data.x_test = data.x_test[:90]
    data.y_test = data.y_test[:90] % 5  # class 5 is never tested
    fl = make_federation(data, partition="dirichlet", clients=21, per_client=True, min_size=3)
    state = fl.start()
    logits = common.predict(fl.model, state["theta"], data.images("test", DOUBLE), np.arange(90))
    state["theta"][-6:] -= logits.mean(0)  # so that it guesses every class
    own = [client_accuracy(fl.model, state["theta"], data, shard) for shard in fl.shards]
    own = np.sort(own)
    columns = fl.test(state)
    assert np.ptp(own) > 10
    assert own[0] < own[1] < own[2]
    assert columns["own_mean"] == pytest.approx(own.mean(), rel=1e-9)
    assert columns["own_worst_tenth"] == pytest.approx(own[:2].mean(), rel=1e-9)
    assert columns["own_std"] == pytest.approx(own.std(), rel=1e-9)
    guesses = common.predict(fl.model, state["theta"], data.images("test", DOUBLE), np.arange(90))
    hits = (guesses.argmax(1) == data.y_test).numpy()
    asked = []
    for shard in fl.shards:
        held = np.isin(data.y_test.numpy(), data.y_train[shard].numpy())
        asked.extend(hits[held])
    assert columns["own_pooled"] == pytest.approx(100 * np.mean(asked))
    fl.config.per_client = False
    assert fl.test(state) == {"accuracy": columns["accuracy"], "loss": columns["loss"]}


@pytest.mark.parametrize(
    "shards",
    [
        [[0, 1], []],
        [[0, 1], [-1]],
        [[0, 1], [12]],
        [[0, 1], [2], [3]],
    ],
)
def test_a_partition_of_ones_own_gives_each_client_places_in_the_data(shards):
    class Fixed(common.Federation):
        def deal(self):
            return shards

    config = ordinary.make_config(clients=2, clients_per_round=2)
    with pytest.raises(UsageError, match=r"client 1 are [^\n]*from 0 to 11|3 clients"):
        Fixed(config, ordinary.random_images(n=12), common.Streams(0))
    shards[1:] = [range(2, 5)]
    fl = Fixed(config, ordinary.random_images(n=12), common.Streams(0))
    assert [shard.tolist() for shard in fl.shards] == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize("tested, own", [([10, 0], 80.0), ([0, 0], None)])
def test_clients_whose_classes_are_not_tested_are_left_out_and_counted(tested, own):
    """Two clients of a class each; 8 of 10 samples of the first class are right."""
    count = np.array([*tested, 5])
    hits = np.array([[8, 0, 5]]) * (count > 0)
    columns = common.clients_view(hits, count, np.eye(2, 3))
    if own is None:
        assert columns == {"own_untested": 2}
    else:
        names = ("own_mean", "own_worst_tenth", "own_pooled")
        assert columns == dict.fromkeys(names, own) | {"own_std": 0, "own_untested": 1}


@pytest.mark.parametrize("name", ["lenet5", "fedgen-cnn"])
def test_scores_equal_a_loop_and_leave_no_trace(name):
    """Each shard by its own net, also two at a time, and all shards by one net."""
    data, model, make_net = ordinary.prepare(name)
    thetas = perturb(model.init(0), 3)
    shards = [np.array([4, 1, 50]), np.array([9]), np.arange(20)]
    before = thetas.clone()
    torch_state = torch.get_rng_state()
    numpy_state = np.random.get_state()[1].copy()
    by_own = common.score(model, thetas, data, shards)
    by_one = common.score(model, thetas[1], data, shards)
    in_chunks = common.score(model, thetas, data, shards, chunk=2)
    assert torch.equal(thetas, before)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)

    def check(theta, shard, scores):
        losses, guesses = scores
        assert losses.dtype == np.float64
        assert len(losses) == len(guesses) == len(shard)
        net = fill(make_net(), theta).eval()
        for i, sample in enumerate(shard):  # one sample at a time
            logits = net(normalise(data, data.x_train[[sample]]))[0].detach().numpy()
            loss = np.log(np.exp(logits).sum()) - logits[data.y_train[sample]]
            assert losses[i] == pytest.approx(loss, abs=1e-10)
            assert guesses[i] == logits.argmax()

    for k, shard in enumerate(shards):
        check(thetas[k], shard, by_own[k])
        check(thetas[k], shard, in_chunks[k])
        check(thetas[1], shard, by_one[k])
    for nets in (thetas[0], thetas[:2]):
        scores = common.score(model, nets, data, [np.arange(0), np.arange(2)])
        assert [len(losses) for losses, _ in scores] == [0, 2]


def test_many_samples_are_scored_in_pieces():
    """More than a pass takes, of one net and of two."""
    data = ordinary.random_images(n=2100)
    model = build_model("lenet5", data, dtype=DOUBLE)
    x = data.images("train", DOUBLE)
    thetas = perturb(model.init(0), 2)
    shards = [np.arange(2100)[::-1].copy(), np.arange(1500)]
    stacked = common.predict_shards(model, thetas, x, shards)
    for theta, shard, logits in zip(thetas, shards, stacked, strict=True):
        net = fill(ordinary.lenet(1, 16, 4), theta)
        expected = net(normalise(data, data.x_train[shard])).detach()
        assert torch.allclose(logits, expected, atol=1e-10)
        alone = common.predict(model, theta, x, shard)
        assert torch.allclose(alone, expected, atol=1e-10)


NORMED = """
from torch import nn
def Net(channels, side, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * side * side, 5), nn.BatchNorm1d(5),
                         nn.Linear(5, classes))
"""


def test_short_last_batches_are_filled_left_out_or_refused_before_training(tmp_path):
    """Of clients with 21, 5 and 10 samples: two passes in batches of 5 and 10, counted by hand."""
    file = tmp_path / "mine.py"
    file.write_text(NORMED)
    name = f"{file}:Net"
    clients = np.arange(3)
    kept = sized(name, sizes=(22, 5, 10), batch_size=10).batches(0, clients[1:], 2)
    assert [b.shape for b in kept] == [(2, 10), (2, 10)]
    assert [(b >= 0).sum() for b in kept] == [10, 20]
    dropped = sized(name, sizes=(21, 5, 10), batch_size=5).batches(0, clients, 2, drop_last=True)
    assert [b.shape for b in dropped] == [(8, 5), (2, 5), (4, 5)]
    assert min(b.min() for b in dropped) >= 0
    for passes, shard in zip(np.split(dropped[0].ravel(), 2), [range(21)] * 2, strict=True):
        assert len(set(passes)) == 20 and set(passes) <= set(shard)
    with pytest.raises(UsageError, match="client 0 has a last one; choose --drop-last"):
        sized(name, sizes=(21, 5, 10), batch_size=10).batches(0, clients[1:], 2)
    with pytest.raises(UsageError, match="--drop-last: client 1 has fewer samples than a batch"):
        sized(name, sizes=(21, 5, 10), batch_size=10).batches(0, clients[:1], 2, drop_last=True)


def sized(model: str, sizes: tuple, batch_size: int) -> common.Federation:
    """A federation with this many samples of each client, the first ones for the first client."""

    class Sized(common.Federation):
        def deal(self):
            return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])

    config = experiment.Config(clients=len(sizes), model=model, batch_size=batch_size)
    return Sized(config, ordinary.random_images(n=40), common.Streams(0))
