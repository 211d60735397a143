"""recording.py without a GPU: a replay is the step itself, and all else is as on a GPU.

Recorded steps are compared with those of stacks.py and with `train_alone`, in float64. Both kinds
of steps write the update of SGD differently, so last bits may differ.
"""

import contextlib
import functools
import gc
import weakref
from dataclasses import replace
from unittest import mock

import numpy as np
import ordinary
import pytest
import torch
from ordinary import make_federation, perturb

import recording
import training
from bases import BASES
from chunks import check_chunk
from errors import UsageError
from nets import build_model
from recording import recordable
from training import Local, train, train_alone

DOUBLE = torch.float64
ROUNDS = ((7, 3, 10), (9, 9, 2, 5, 4, 1), (4, 6), (7, 3, 10, 6))  # samples of each client
DECAYING = 0.05 * (1 + 0.3 * np.arange(12)) ** -0.75


@contextlib.contextmanager
def recorded():
    """In this block steps are recorded. The list has an entry for each replay."""
    replays = []
    record = recording.Recording.record

    def counted(self, step):
        replay = record(self, step)

        def replay_and_count():
            replays.append(len(replays))
            replay()

        return replay_and_count

    on_cpu = mock.patch.object(recording, "ON_CPU", True)
    with on_cpu, mock.patch.object(recording.Recording, "record", counted):
        yield replays
    recording.KEPT.clear()


def draw_batches(data, sizes, batch_size=3, seed=5) -> list:
    """Three passes over the samples of each client. The last batch of a pass may be short."""
    once = ordinary.draw_schedules(data, sizes, batch_size, seed)
    return [np.concatenate([rows] * 3) for rows in once]


def train_round(model, theta_0, data, batches, local, chunk=0):
    return train(model, theta_0, data, np.arange(len(batches)), batches, local, chunk)


def agree(update, expected) -> None:
    """Two updates are equal, but for last bits."""
    assert (update.rows - expected.rows).abs().max() < 1e-13
    np.testing.assert_allclose(update.train_loss, expected.train_loss, rtol=1e-12)
    if update.grad_sq is not None:
        np.testing.assert_allclose(update.grad_sq, expected.grad_sq, rtol=1e-11)


def agree_in_all_rounds(model, data, rounds: list, chunk=0) -> int:
    """Recorded rounds (theta_0, batches, local) equal those of today, and each client alone.

    Returns the number of replays.
    """
    with recorded() as replays:
        found = [train_round(model, *of_round, chunk) for of_round in rounds]
    for update, (theta_0, given, batches, local) in zip(found, rounds, strict=True):
        agree(update, train_round(model, theta_0, given, batches, local, chunk))
        for k, rows in enumerate(batches):
            theta = train_alone(model, theta_0[k], given, rows, local, k)[0]
            assert (update.rows[k] - theta).abs().max() < 1e-10
            assert (update.rows[k] - theta_0[k]).abs().max() > 1e-4
    return len(replays)


def pull_to_frozen(strength, out):
    """A penalty that reads all that a loss may read."""
    with torch.no_grad():
        target = out.frozen["old"].features(out.inputs)
    distance = (out.features - target).square().sum(2)
    pull = out.extra["strength"] * out.extra["pull"]
    return strength * pull * (out.share * distance).sum(1)


@recordable
def smoothed(out):
    return training.cross_entropy(out) - 0.1 * (out.weight * out.logits.mean(2)).sum(1)


@recordable
def brighten(images, extra):
    return images * extra["pull"][:, None, None, None, None]


pull_to_frozen = recordable(pull_to_frozen)
OPTIONS = {
    "plain": {},
    "momentum": {"momentum": 0.9, "weight_decay": 5e-3},
    "schedule": {"lr": DECAYING},
    "proximal": {"lr": DECAYING, "proximal": 0.3, "momentum": 0.5},
    "correction": {"weight_decay": 0.01},
    "weights": {"momentum": 0.9},
    "all": {"lr": DECAYING, "momentum": 0.8, "weight_decay": 0.01, "proximal": 0.2},
}


def make_local(option: str, model, batches, t: int) -> Local:
    """An option of training, with other numbers in each round."""
    rng = np.random.default_rng([2, t])
    K = len(batches)
    local = replace(Local(0.05, grad_norms=True), **OPTIONS[option])
    local.lr = local.lr / (1 + t)
    if option in ("correction", "all"):
        local.correction = torch.from_numpy(0.05 * rng.normal(size=(K, model.trainable)))
    if option in ("weights", "all"):
        local.sample_weights = [rng.uniform(0, 3, rows.shape) for rows in batches]
    if option == "all":
        local.loss = smoothed
        local.penalty = functools.partial(pull_to_frozen, 0.5)
        local.augment = brighten
        local.frozen = {"old": perturb(model.init(7), K, seed=t)}
        local.per_client = {"strength": torch.from_numpy(rng.uniform(size=K))}
        local.per_step = {"pull": [rng.uniform(0.5, 1.5, len(rows)) for rows in batches]}
    return local


def make_rounds(option: str, model, data, batch_size=3) -> list:
    rounds = []
    for t, sizes in enumerate(ROUNDS):
        batches = draw_batches(data, sizes, batch_size, seed=t)
        theta_0 = perturb(model.init(1), len(sizes), seed=t)
        rounds.append((theta_0, data, batches, make_local(option, model, batches, t)))
    return rounds


@pytest.mark.parametrize(
    ("name", "norm", "option", "chunk"),
    [
        *(("lenet5", "batch", option, 0) for option in OPTIONS),
        *(("lenet5", "batch", "all", chunk) for chunk in (1, 2)),
        *(("fedgen-cnn", "batch", option, 0) for option in ("plain", "all")),
        *(("fedgen-cnn", "batch", "momentum", 2), ("fedgen-cnn", "group", "all", 0)),
    ],
)
def test_recorded_steps_equal_those_of_today(name, norm, option, chunk):
    """K changes, clients end at different steps, and batch norms have unequal batches."""
    data, model, _ = ordinary.prepare(name, norm)
    assert agree_in_all_rounds(model, data, make_rounds(option, model, data), chunk) > 10


def test_unequal_batches_are_padded_in_no_batch_statistics():
    """Neighbours with equal batches are a group: five clients of 4, 4, 2, 4 and 4 samples."""
    data, model, _ = ordinary.prepare("fedgen-cnn")
    batches = draw_batches(data, (4, 4, 2, 4, 4), 4)
    local = Local(0.01, momentum=0.5)
    rounds = [(perturb(model.init(1), 5), data, batches, local)]
    assert agree_in_all_rounds(model, data, rounds) == 3  # of the third step


def test_clients_without_a_step_keep_their_weights():
    """A first round without any step, then one in which two of three clients take some."""
    data, model, _ = ordinary.prepare("lenet5")
    theta_0 = perturb(model.init(1), 3)
    rounds = []
    for sizes in ((0, 0, 0), (7, 0, 4)):
        batches = draw_batches(data, sizes)
        rounds.append((theta_0, data, batches, make_local("all", model, batches, 0)))
    with recorded() as replays:
        found = [train_round(model, *of_round) for of_round in rounds]
    assert replays
    assert torch.equal(found[0].rows, theta_0)
    agree(found[1], train_round(model, *rounds[1]))


@pytest.mark.parametrize("base", BASES)
def test_a_run_under_each_base_is_the_same(base):
    def run():
        fl = make_federation(base=base, momentum=0.5, clients=6, weight_decay=1e-3)
        state = fl.start()
        for t in range(3):
            clients = fl.select(t, 4 - t % 2)
            batches = fl.batches(t, clients, epochs=2)
            update = fl.train(state, t, clients, batches)
            state["theta"] = fl.aggregate(state, update)
        return state

    with recorded() as replays:
        found = run()
    expected = run()
    assert len(replays) > 10
    assert (found["theta"] - expected["theta"]).abs().max() < 1e-13
    assert found["base"].keys() == expected["base"].keys()


# ------------------------------------------------------------------------------- random numbers


def test_dropout_has_the_same_random_numbers_whether_steps_are_recorded_or_not():
    """Also in a later process, which begins with round 2, and in what is drawn afterwards."""
    data = ordinary.random_images(32, 3)
    model = build_model("alexnet", data, dtype=DOUBLE, width=8)
    rounds = []
    for t, sizes in enumerate(((4, 4, 2), (6, 2), (4, 3, 4))):
        batches = draw_batches(data, sizes, 2)
        local = Local(0.05, momentum=0.5, seeds=range(5 * t, 5 * t + len(sizes)))
        rounds.append((model.init(t), data, batches, local))

    def train_rounds(first=0):
        thetas = [train_round(model, *of_round, chunk=3).rows for of_round in rounds[first:]]
        return thetas, torch.rand(1)

    expected, drawn = train_rounds()
    with recorded() as replays:
        found, drawn_then = train_rounds()
    with recorded():
        resumed, _ = train_rounds(first=2)
    assert len(replays) > 5
    assert drawn == drawn_then
    assert torch.equal(resumed[0], found[2])
    for theta, wanted in zip(found, expected, strict=True):
        assert (theta - wanted).abs().max() < 1e-13


# ------------------------------------------------------------------- what must not be recorded


def undeclared(out):
    return out.features.square().sum((1, 2))


def test_a_function_that_may_hold_a_tensor_is_not_recorded():
    """Closures, partials, methods, and what nobody declared: each round has another tensor."""
    data = ordinary.random_images()
    model = build_model("lenet5", data, dtype=DOUBLE)
    batches = draw_batches(data, (6, 3))

    @recordable
    def times(weight, out):
        return weight * out.features.square().sum((1, 2))

    class Penalty:
        def __init__(self, weight):
            self.weight = weight

        @recordable
        def of(self, out):
            return self.weight * out.features.square().sum((1, 2))

    def closure(weight):
        return recordable(lambda out: times(weight, out))

    kinds = (closure, functools.partial(functools.partial, times), lambda w: Penalty(w).of)
    for penalty_of in (*kinds, lambda weight: undeclared):
        rounds = []
        for weight in torch.tensor([0.1, 0.0, 0.3], dtype=DOUBLE):
            local = Local(0.05, penalty=penalty_of(weight))
            rounds.append((perturb(model.init(1), 2), data, batches, local))
        assert agree_in_all_rounds(model, data, rounds) == 0


@pytest.mark.parametrize("number", ["momentum", "weight_decay", "proximal", "penalty"])
def test_numbers_are_part_of_what_is_recorded(number):
    data, model, _ = ordinary.prepare("lenet5")
    rounds = make_rounds("all", model, data)
    for t, (*_, local) in enumerate(rounds):
        value = 0.2 + t / 10
        is_penalty = number == "penalty"
        given = functools.partial(pull_to_frozen, value) if is_penalty else value
        setattr(local, number, given)
    assert agree_in_all_rounds(model, data, rounds) > 10


OWN_LAYER = """
from torch import nn
from nets import Linear, Net, ReLU
seen = []
class Mine(ReLU.func):
    def forward(self, x):
        seen.append(len(x))
        return super().forward(x)
def make(channels, side, classes):
    return Net([Linear(channels * side * side, 5), Mine()], Linear(5, classes))
def make_hooked(channels, side, classes):
    layer = ReLU()
    layer.register_forward_hook(lambda *_: seen.append(0))
    return Net([Linear(channels * side * side, 5), layer], Linear(5, classes))
"""


@pytest.mark.parametrize("name", ["make", "make_hooked"])
def test_layers_of_a_users_own_are_not_recorded(name, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN_LAYER)
    data = ordinary.random_images()
    model = build_model(f"{path}:{name}", data, dtype=DOUBLE)
    assert agree_in_all_rounds(model, data, make_rounds("momentum", model, data)) == 0


def test_nothing_is_recorded_on_a_cpu():
    data, model, _ = ordinary.prepare("lenet5")
    for of_round in make_rounds("plain", model, data):
        train_round(model, *of_round)
    assert not recording.KEPT


# ----------------------------------------------------------------------------- what may go wrong

AHEAD = []  # what the next calls of this loss raise, the last one first


@recordable
def failing(out):
    error = AHEAD.pop() if AHEAD else None
    if error:
        raise error
    return training.cross_entropy(out)


@pytest.mark.parametrize("failure", [UsageError("no"), ValueError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("calls", [1, 3, 6])
def test_a_step_that_raises_leaves_nothing_half_written(failure, calls):
    """In the first step, in one that is recorded, and in a replay. Later rounds are right."""
    data, model, _ = ordinary.prepare("lenet5")
    rounds = make_rounds("all", model, data)
    for *_, local in rounds:
        local.loss = failing
    expected = [train_round(model, *of_round) for of_round in rounds]
    with recorded() as replays:
        AHEAD[:] = [failure] + [None] * (calls - 1)
        with pytest.raises(type(failure)):
            train_round(model, *rounds[0])
        found = [train_round(model, *of_round) for of_round in rounds]
    assert len(replays) > 10
    for update, wanted in zip(found, expected, strict=True):
        agree(update, wanted)


def test_memory_that_ends_in_a_recorded_step_ends_recording_only():
    """The round that fails, and later ones, are trained as today. Dropout is the same, too."""
    data = ordinary.random_images(32, 3)
    model = build_model("alexnet", data, dtype=DOUBLE, width=8)
    batches = draw_batches(data, (4, 4, 2), 2)
    rounds = [(model.init(t), data, batches, Local(0.05, seeds=[t] * 3)) for t in range(3)]
    expected = [train_round(model, *of_round, chunk=3) for of_round in rounds]
    error = torch.OutOfMemoryError("CUDA out of memory")
    with recorded() as replays:
        found = [train_round(model, *rounds[0], chunk=3)]
        before = len(replays)
        rounds[1][3].loss = failing
        AHEAD[:] = [error] + [None] * 5
        with pytest.warns(match="^training goes on without CUDA graphs: CUDA out of memory$"):
            found.append(train_round(model, *rounds[1], chunk=3))
        count = len(replays)
        found.append(train_round(model, *rounds[2], chunk=3))
        assert not recording.KEPT
    assert AHEAD == []
    assert before > 0
    assert len(replays) == count
    for update, wanted in zip(found, expected, strict=True):
        agree(update, wanted)


def test_a_warning_names_what_a_model_did_and_not_how_its_graph_ended():
    data, model, _ = ordinary.prepare("lenet5")
    of_round = make_rounds("plain", model, data)[0]
    of_round[3].loss = failing
    error = RuntimeError("a previous error during capture")
    error.__context__ = UsageError("mine.py, line 3")
    AHEAD[:] = [error]
    with recorded(), pytest.warns(match="^training goes on without CUDA graphs: mine.py, line 3$"):
        train_round(model, *of_round)


def test_memory_that_ends_before_a_step_ends_recording_only(monkeypatch):
    """Of a second recording: the first gives its memory back before training goes on."""
    data, model, _ = ordinary.prepare("lenet5")
    rounds = make_rounds("plain", model, data) + make_rounds("momentum", model, data)
    expected = [train_round(model, *of_round) for of_round in rounds]

    def fail(stack):
        raise torch.OutOfMemoryError("CUDA out of memory")

    count = len(rounds) // 2
    with recorded():
        found = [train_round(model, *of_round) for of_round in rounds[:count]]
        assert recording.KEPT
        monkeypatch.setattr(recording, "Recording", fail)
        with pytest.warns(match="^training goes on without CUDA graphs: CUDA out of memory$"):
            found.append(train_round(model, *rounds[count]))
        assert not recording.KEPT
        found += [train_round(model, *of_round) for of_round in rounds[count + 1 :]]
    for update, wanted in zip(found, expected, strict=True):
        agree(update, wanted)


# ---------------------------------------------------------------------- which recording is taken


def test_other_labels_and_images_need_another_recording():
    """Labels that are replaced in the same data set, or written over; another data set; images."""
    data, model, _ = ordinary.prepare("lenet5")
    other = ordinary.random_images(seed=3)
    negative = replace(other, x_train=255 - other.x_train)
    batches = draw_batches(data, (7, 3, 10))
    theta_0 = perturb(model.init(1), 3)
    local = Local(0.05)
    with recorded() as replays:
        found = [train_round(model, theta_0, data, batches, local).rows]
        data.y_train = 3 - data.y_train
        found.append(train_round(model, theta_0, data, batches, local).rows)
        data.y_train.fill_(2)
        found.append(train_round(model, theta_0, data, batches, local).rows)
        found.append(train_round(model, theta_0, other, batches, local).rows)
        found.append(train_round(model, theta_0, negative, batches, local).rows)
    data, model, _ = ordinary.prepare("lenet5")
    flipped = replace(data, y_train=3 - data.y_train)
    constant = replace(data, y_train=torch.full_like(data.y_train, 2))
    assert len(replays) > 10
    for rows, given in zip(found, (data, flipped, constant, other, negative), strict=True):
        expected = train_round(model, theta_0, given, batches, local).rows
        assert (rows - expected).abs().max() < 1e-13


def test_two_models_train_in_turn():
    """Their weights have the same shapes, but one model's running statistics move faster."""
    data, slow, _ = ordinary.prepare("fedgen-cnn")
    _, fast, _ = ordinary.prepare("fedgen-cnn")
    for module in fast.layers.modules():
        module.momentum = 0.5
    rounds = make_rounds("momentum", slow, data)
    expected = [train_round(model, *given).rows for given in rounds for model in (slow, fast)]
    with recorded() as replays:
        found = [train_round(model, *given).rows for given in rounds for model in (slow, fast)]
    assert len(replays) > 10
    assert (expected[0] - expected[1]).abs().max() > 0.01
    for rows, wanted in zip(found, expected, strict=True):
        assert (rows - wanted).abs().max() < 1e-13


@pytest.mark.parametrize(
    "switch",
    [
        lambda: torch.backends.cudnn.flags(enabled=False),
        lambda: torch.backends.cudnn.flags(enabled=True, benchmark=True),
        lambda: torch.backends.cudnn.flags(enabled=True, deterministic=True),
        lambda: switched(torch.set_float32_matmul_precision, "high", "highest"),
        lambda: switched(torch.use_deterministic_algorithms, True, False),
    ],
)
def test_a_switch_of_torch_needs_another_recording(switch):
    """Its first two steps are taken as they are."""
    data, model, _ = ordinary.prepare("lenet5")
    of_round = make_rounds("plain", model, data)[0]
    counts = []
    with recorded() as replays:
        for context in (contextlib.nullcontext, contextlib.nullcontext, switch):
            before = len(replays)
            with context():
                train_round(model, *of_round)
            counts.append(len(replays) - before)
    assert counts[1] > counts[0] == counts[2] > 0


def test_nothing_is_recorded_under_autocast():
    data, model, _ = ordinary.prepare("lenet5")
    with switched(functools.partial(torch.set_autocast_enabled, "cuda"), True, False):
        assert agree_in_all_rounds(model, data, make_rounds("plain", model, data)) == 0


@contextlib.contextmanager
def switched(setter, value, before):
    setter(value)
    try:
        yield
    finally:
        setter(before)


def test_recordings_are_few_and_go():
    """Three are kept. What they hold goes with them."""
    data, model, _ = ordinary.prepare("lenet5")
    gone = weakref.ref(model)
    with recorded():
        for option in OPTIONS:
            train_round(model, *make_rounds(option, model, data)[0])
        assert len(recording.KEPT) <= 3
    del model
    gc.collect()
    assert gone() is None


def test_recordings_go_together():
    """The end of one makes torch free memory that graphs of others use: no other is used then."""
    ended = []
    models = [ordinary.prepare("lenet5")[:2] for _ in range(5)]
    given = [make_rounds("momentum", model, data) for data, model in models]
    begin = recording.Recording.__init__
    train_recorded = recording.Recording.train

    def noted(self, stack):
        begin(self, stack)
        self.ended_before = len(ended)
        weakref.finalize(self, ended.append, 1)

    def checked(self, stack):
        assert len(ended) == self.ended_before
        train_recorded(self, stack)

    changes = {"__init__": noted, "train": checked}
    with recorded() as replays, mock.patch.multiple(recording.Recording, **changes):
        for t in range(len(ROUNDS)):  # of the third method in all rounds, then of the others
            train_round(models[2][1], *given[2][t])
        for t in range(2):
            for rounds, (_, model) in zip(given, models, strict=True):
                train_round(model, *rounds[t])
    assert len(replays) > 10
    assert len(ended) > 5


LATER_KINDS = {  # how a model may count its calls: begin, count, and how many there were
    "Number": ("0", "self.calls += 1", "self.calls"),
    "List": ("[]", "self.calls.append(1)", "len(self.calls)"),
    "Tensor": ("torch.tensor(0)", "self.calls = self.calls + 1", "int(self.calls)"),
    "Object": ("Calls()", "self.calls.n += 1", "self.calls.n"),
    "Word": ("''", "self.calls += '.'", "len(self.calls)"),
}
LATER = """
import torch
from torch import nn
class Calls:
    n = 0
"""
for kind, (begin, count, calls) in LATER_KINDS.items():
    LATER += f"""
class Later{kind}(nn.Linear):
    def __init__(self, channels, side, classes):
        super().__init__(channels * side * side, classes)
        self.calls = {begin}
    def forward(self, x):
        y = super().forward(x.flatten(1))
        {count}
        return y * (1 if {calls} > 4 else 3)
"""
LATER += """
class Counted(nn.Linear):
    def __init__(self, channels, side, classes):
        super().__init__(channels * side * side, classes)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    def forward(self, x):
        self.calls += 1
        return super().forward(x.flatten(1)) * (1 + 1 / self.calls)
class Plain(nn.Linear):
    def __init__(self, channels, side, classes):
        super().__init__(channels * side * side, classes)
    def forward(self, x):
        return super().forward(x.flatten(1))
"""


@pytest.mark.parametrize("name", [f"Later{kind}" for kind in LATER_KINDS] + ["Counted"])
def test_what_a_users_own_model_counts_is_right_and_not_recorded(name, tmp_path):
    """Clients that train at once share a module, and a client that ends takes no count with it."""
    path = tmp_path / "mine.py"
    path.write_text(LATER)
    data = ordinary.random_images()
    model = build_model(f"{path}:{name}", data, dtype=DOUBLE)
    check_chunk(model, data, Local(0.05))
    assert agree_in_all_rounds(model, data, make_rounds("plain", model, data), chunk=4) == 0


@pytest.mark.parametrize("name", ["LaterNumber", "Counted"])
def test_a_count_beside_a_batch_norm_is_refused(name, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        LATER
        + f"""
class Normed(nn.Sequential):
    def __init__(self, *given):
        super().__init__(nn.Flatten(), nn.BatchNorm1d(256), {name}(*given))
"""
    )
    data = ordinary.random_images()
    model = build_model(f"{path}:Normed", data, dtype=DOUBLE)
    with pytest.raises(UsageError, match="changes its .*calls.*leave --chunk out"):
        check_chunk(model, data, Local(0.05))


def test_a_users_model_that_cannot_be_recorded_trains_without(tmp_path):
    """What torch raises in a capture looks like a fault of the user's model."""
    path = tmp_path / "mine.py"
    path.write_text(LATER)
    data = ordinary.random_images()
    model = build_model(f"{path}:Plain", data, dtype=DOUBLE)
    check_chunk(model, data, Local(0.05))
    rounds = make_rounds("plain", model, data)
    expected = [train_round(model, *of_round).rows for of_round in rounds]

    def fail(self, step):
        raise UsageError("--model mine.py:Plain: Cannot copy during CUDA graph capture")

    failing = mock.patch.object(recording.Recording, "record", fail)
    line = "^training goes on without CUDA graphs: --model mine.py:Plain:"
    with recorded(), failing, pytest.warns(match=line):
        found = [train_round(model, *of_round, chunk=4).rows for of_round in rounds]
    for rows, wanted in zip(found, expected, strict=True):
        assert (rows - wanted).abs().max() < 1e-10


@pytest.mark.parametrize("is_new", [False, True])
def test_switches_of_cudnn_stay_as_the_user_set_them(is_new, tmp_path):
    """TF32 is off by the old or the new switch: for gradients' norms and the check of --chunk."""
    path = tmp_path / "mine.py"
    path.write_text(LATER)
    data = ordinary.random_images()
    cudnn = torch.backends.cudnn
    seen = set()

    def note(*_):
        seen.add((cudnn.conv.fp32_precision, cudnn.benchmark))

    before = cudnn.conv.fp32_precision
    was_allowed = cudnn.allow_tf32
    if is_new:
        cudnn.conv.fp32_precision = "ieee"
    else:
        cudnn.allow_tf32 = False
    cudnn.benchmark = True
    hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        model = build_model(f"{path}:Plain", data, dtype=DOUBLE)
        norms = training.squared_gradients(model, model.init(0), data, np.arange(3))
        check_chunk(model, data, Local(0.05))
        assert len(seen) == 1 and "tf32" not in str(seen) and True in seen.pop()
    finally:
        hook.remove()
        cudnn.benchmark = False
        if is_new:
            cudnn.conv.fp32_precision = before
        else:
            cudnn.allow_tf32 = was_allowed
    assert (norms > 0).all()
