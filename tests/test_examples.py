"""examples/: every recipe of its README and every program, run from nothing."""

import csv
import functools
import itertools
import json
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
import run_lesson
import torch
from PIL import Image
from scipy.special import log_softmax, softmax
from scipy.stats import chisquare

import experiment
import fedcl_fgn
from common import Federation, Streams
from data import epochs_of_batches, load_data
from examples import own_everything, pytorch_loop
from nets import build_model

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "examples" / "README.md").read_text()
RECIPES = re.findall(r"```python\n(.*?)```", README, re.S)
RNG = np.random.default_rng(0)
Y = np.arange(100) % 4
IMAGES = (RNG.integers(0, 100, (100, 16, 16, 3)) + 50 * Y[:, None, None, None]).astype(np.uint8)
SMALL = {"clients_per_round": 2, "batch_size": 10, "epochs": 2, "lr": 0.1, "momentum": 0.5}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(number: int, **given) -> dict:
    """What a code block of the page leaves behind."""
    names = dict(given)
    exec(RECIPES[number], names)
    return names


def losses(fl: Federation) -> list[float]:
    """The test loss before and after five rounds of FedAvg."""
    state = fl.start()
    found = [fl.test(state)["loss"]]
    for t in range(5):
        clients = fl.select(t, 2)
        batches = [epochs_of_batches(fl.shards[m], 2, 10, fl.streams("b", t, m)) for m in clients]
        state["theta"] = fl.aggregate(state, fl.train(state, t, clients, batches))
    return [*found, fl.test(state)["loss"]]


def learns(data, model="lenet5", clients=3, partition="iid", **options) -> Federation:
    """A federation on the data, which is seen to learn."""
    config = experiment.Config(model=model, clients=clients, partition=partition, **SMALL | options)
    fl = Federation(config, data, Streams(0))
    before, after = losses(fl)
    assert after < before
    return fl


LINEAR = """
from torch import nn
def Net(channels, side, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * max(side, 1), classes))
"""


# --------------------------------------------------------------------------------------- your data


def test_a_folder_by_client(folder):
    owner = np.arange(100) % 7 // 2  # four people
    for i, (image, label, person) in enumerate(zip(IMAGES, Y, owner, strict=True)):
        place = folder / "photos" / f"person{person}" / f"kind{label}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{i:03}.png")
    recipe(0)
    data = load_data("photos.npz")
    fl = learns(data, clients=4, partition="natural")
    wanted = {
        image.tobytes(): (label, f"person{m}")
        for image, label, m in zip(IMAGES, Y, owner, strict=True)
    }
    for image, label, name in zip(
        data.x_train.numpy(), data.y_train.tolist(), data.owner, strict=True
    ):
        assert wanted[image.tobytes()] == (label, name)
    assert all(len(np.unique(data.owner[shard])) == 1 for shard in fl.shards)
    line = re.search(r"python (fedcl_fgn.py .*photos.*)", README)[1]
    command = [sys.executable, str(ROOT / "fedcl_fgn.py"), *shlex.split(line)[1:]]
    command += ["--rounds", "1", "--trials", "1", "--jobs", "1", "--method", "base"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_picture_is_predicted_by_a_trained_model(folder):
    """The classes differ in brightness."""
    np.savez("photos.npz", x_train=IMAGES[20:], y_train=Y[20:], x_test=IMAGES[:20], y_test=Y[:20])
    words = "--dataset=photos.npz --clients=4 --clients-per-round=4 --alpha=100 --trials=1 --jobs=1"
    fedcl_fgn.main([*words.split(), "--rounds=8", "--lr=0.02"])
    for label in range(4):
        Image.fromarray(IMAGES[label]).save("new.png")
        assert recipe(7)["label"] == label == Y[label]


def test_a_list_of_dicts_and_a_fixed_partition():
    rows = [{"image": Image.fromarray(x), "label": int(c)} for x, c in zip(IMAGES, Y, strict=True)]
    fl = recipe(1, rows=rows)["fl"]
    assert np.array_equal(fl.data.x_train, IMAGES[20:])
    assert [shard.tolist() for shard in fl.shards] == [
        [*range(30)],
        [*range(30, 70)],
        [*range(70, 80)],
    ]
    before, after = losses(fl)
    assert after < before


def test_a_table_with_string_labels(folder):
    kinds = np.array(["iris", "lily", "rose", "tulip"])
    x = RNG.standard_normal((100, 5)) * [1, 10, 100, 1000, 1] + Y[:, None]
    table = pd.DataFrame(x, columns=[*"abcde"]).assign(kind=kinds[Y])
    table.to_csv("flowers.csv", index=False)
    found = recipe(2)
    assert found["classes"].tolist() == kinds.tolist()
    data = load_data("flowers.npz")
    assert np.allclose(data.x_train, x[20:])
    (folder / "net.py").write_text(RECIPES[3])
    learns(data, model="net.py:MyNet")


def test_a_time_series_with_natural_clients(folder):
    """The shape of UCI HAR: 30 people, 9 channels, 128 steps; made up."""
    person = np.repeat(np.arange(1, 31), 8)
    activity = 1 + np.arange(240) % 6
    x = RNG.standard_normal((240, 9, 128)) + activity[:, None, None] * np.arange(9)[:, None]
    np.savetxt("subject.txt", person, fmt="%d")
    np.savetxt("activity.txt", activity, fmt="%d")
    np.save("windows.npy", x.astype(np.float32))
    recipe(4)
    data = load_data("har.npz")
    (folder / "mine.py").write_text(RECIPES[5])
    learns(data, model="mine.py:MyNet", clients=24, partition="natural", lr=0.01)
    assert data.x_train.shape == (192, 128, 9)
    assert len(np.unique(data.owner)) == 24
    assert torch.allclose(data.images("train").std((0, 1), correction=0), torch.ones(9), atol=1e-4)


# -------------------------------------------------------------------------------------- your model


def test_a_net_of_ones_own_has_features_and_a_head(folder):
    """MOON and the multi-phase algorithm run with it; many clients train at once."""
    (folder / "mine.py").write_text(RECIPES[6])
    for line in re.findall(r"python (\w+.py) (--model mine.*)", README):
        command = [sys.executable, str(ROOT / line[0]), *shlex.split(line[1]), "--out", line[0]]
        command += ["--rounds", "2", "--trials", "1", "--jobs", "1", "--clients-per-round", "2"]
        if line[0] == "fedcl_gmm_sync.py":
            command += ["--method", "fedcl", "--local-steps", "2"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
    assert build_model("mine.py:small", load_data("digits")).clients_at_once() == 64


def test_pretrained_and_frozen_weights(folder):
    """What the file holds is where training begins; frozen weights stay."""
    (folder / "mine.py").write_text(RECIPES[6])
    names = recipe(6)
    digits = load_data("digits")
    weights = names["small"](1, 28, 10).state_dict()
    torch.save(weights, "weights.pt")
    config = experiment.Config(model="mine.py:pretrained", clients=3, partition="iid", **SMALL)
    fl = Federation(config, digits, Streams(0))
    state = fl.start()
    bound = fl.model.bind(state["theta"][None])
    assert torch.equal(bound.features[0].weight[0], weights["features.0.weight"])
    assert torch.equal(bound.features[3].weight[0], weights["features.3.weight"])
    frozen = state["theta"][fl.model.trainable :].clone()
    assert len(frozen) == 8 * 9 + 8
    clients = fl.select(0, 2)
    batches = [epochs_of_batches(fl.shards[m], 1, 10, fl.streams("b", m)) for m in clients]
    update = fl.train(state, 0, clients, batches)
    assert torch.equal(update.rows[:, fl.model.trainable :], frozen.expand(2, -1))
    assert not torch.equal(update.rows[0], state["theta"])


# ----------------------------------------------------------------------------------------- recipes


@pytest.fixture
def noisy(folder) -> list[str]:
    """Options for a data set on which the accuracy of a linear model soon stops growing."""
    noise = RNG.standard_normal((200, 6))
    y = np.arange(200) % 4
    x = noise + np.eye(6)[y]
    np.savez("noisy.npz", x_train=x[:120], y_train=y[:120], x_test=x[120:], y_test=y[120:])
    (folder / "net.py").write_text(LINEAR)
    words = "--dataset=noisy.npz --model=net.py:Net --clients=12 --partition=iid --lr=0.1"
    return [*words.split(), "--batch-size=5", "--epochs=1", "--trials=1", "--jobs=1", "--out=r"]


def rows_of(federate, words, config=experiment.Config) -> pd.DataFrame:
    """metrics.csv of a script with this `federate`."""
    experiment.main(experiment.Script(federate=federate, compare=("base",), config=config), words)
    return pd.read_csv("r/metrics.csv")


def federation_of(number: int, **options) -> Federation:
    """A recipe's class, on the noisy data."""
    config = experiment.Config(model="net.py:Net", clients=4, **SMALL | options)
    return recipe(number)["Federation"](config, load_data("noisy.npz"), Streams(0))


@pytest.mark.parametrize("every", [1, 2])
def test_a_run_stops_early(every, noisy):
    """It ends in the first tested round before which five brought no growth."""
    words = [*noisy, "--rounds=60", "--clients-per-round=4", f"--eval-every={every}"]
    accuracy = rows_of(recipe(9)["federate"], words).accuracy
    tested = accuracy.index[accuracy.notna()]
    accuracy = accuracy.fillna(0)
    grew = []
    for t in tested:
        grew.append(t < 5 or accuracy[t - 4 : t + 1].max() > accuracy[: t - 4].max())
    assert 6 < len(accuracy) < 60
    assert grew == [True] * (len(grew) - 1) + [False]
    assert tested[-1] == accuracy.index[-1]


def test_the_cosine_schedule_is_torchs(noisy):
    etas = []

    class Spy(Federation):
        def train(self, *given, **changes):
            etas.append(changes["lr"])
            return super().train(*given, **changes)

    class Config(experiment.Config):
        def federation(self, data, streams):
            return Spy(self, data, streams)

    rows_of(recipe(10)["federate"], [*noisy, "--rounds=8", "--clients-per-round=2"], Config)
    sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=8)
    for eta in etas:
        assert eta == pytest.approx(sgd.param_groups[0]["lr"])
        sgd.step()
        schedule.step()
    assert len(etas) == 8


@pytest.mark.parametrize("n", [1, 8])
def test_clients_drop_out(n, noisy):
    """All receive the model of 28 float32; those that arrive train, send and count."""
    words = [*noisy, "--rounds=40", f"--clients-per-round={n}"]
    rows = rows_of(recipe(11)["federate"], words)
    arrived = np.diff(rows.uploads, prepend=0)
    assert (rows.clients == n).all()
    assert (arrived >= 1).all() and (arrived <= n).all()
    assert np.allclose(rows.received_mb, n * (rows.index + 1) * 28 * 4e-6, atol=1e-5)
    assert np.allclose(rows.sent_mb, rows.uploads * 28 * 4e-6, atol=1e-5)
    assert np.array_equal(rows.samples, 10 * rows.uploads)
    if n == 8:  # four standard errors
        assert abs(arrived.mean() / n - 0.8) < 4 * 0.4 / np.sqrt(320)


def trained_alone(fl: Federation, theta, m: int, t: int, epochs: int, make) -> torch.nn.Module:
    """Client m's linear model after round t, by a plain loop with make(parameters)."""
    net = torch.nn.Linear(6, 4)
    torch.nn.utils.vector_to_parameters(theta.clone(), net.parameters())
    optimizer = make(net.parameters())
    x = fl.data.images("train")
    for batch in fl.batches(t, [m], epochs)[0]:
        samples = batch[batch >= 0]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x[samples]), fl.data.y_train[samples]).backward()
        optimizer.step()
    return net


def test_adam_on_the_clients(noisy):
    fl = federation_of(12, lr=0.01)
    state = fl.start()
    update = fl.train(state, 3, np.array([1, 2]), fl.batches(3, [1, 2], 2))
    for m, theta in zip([1, 2], update.gather_thetas(), strict=True):
        adam = functools.partial(torch.optim.Adam, lr=0.01)
        net = trained_alone(fl, state["theta"], m, 3, 2, adam)
        wanted = torch.nn.utils.parameters_to_vector(net.parameters())
        assert torch.allclose(theta, wanted, atol=1e-5)
    Path("own.py").write_text(RECIPES[12] + RECIPES[8])
    command = [sys.executable, "own.py", *noisy, "--rounds=2", "--clients-per-round=2"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(pd.read_csv("r/metrics.csv").method) == {"fedavg+cl", "fedavg"}


def test_images_are_cropped_and_flipped():
    """Each is one of the 162 pictures that can be; the choice is uniform over clients, too."""
    augment = recipe(13)["crop_and_flip"]
    images = torch.rand(3, 40, 6, 5, 2)
    torch.manual_seed(0)
    found = augment(images, {})
    chosen = []
    for image, crop in zip(images.flatten(0, 1), found.flatten(0, 1), strict=True):
        padded = np.pad(image.numpy(), ((4, 4), (4, 4), (0, 0)))
        for y, x, step in itertools.product(range(9), range(9), (1, -1)):
            if np.array_equal(padded[y : y + 6, x : x + 5][:, ::step], crop):
                chosen.append((y, x, step))
                break
    assert len(chosen) == 120
    for picks, count in zip(zip(*chosen, strict=True), (9, 9, 2), strict=True):
        frequency = np.unique(picks, return_counts=True)[1]
        assert chisquare(frequency).pvalue > 1e-3 and len(frequency) == count
    fl = learns(load_data("digits"), "lenet5")
    state = fl.start()
    clients = np.arange(3)
    batches = fl.batches(0, clients, 1)
    plain, one, again = (
        fl.train(state, 0, clients, batches, **changes).gather_thetas()
        for changes in ({}, {"augment": augment}, {"augment": augment})
    )
    assert torch.equal(one, again) and not torch.equal(plain, one)


def test_fine_tuning_before_a_test(noisy):
    """The mean accuracy on the clients' own labels, by a plain loop over the clients."""
    fl = federation_of(14, per_client=True, alpha=0.3)
    state = fl.start()
    before = state["theta"].clone()
    columns = fl.test(state)
    assert torch.equal(state["theta"], before)  # the global model stays
    y = fl.data.y_test.numpy()
    own = []
    for m in range(4):
        sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5)
        net = trained_alone(fl, before, m, 0, 1, sgd)
        is_right = net(fl.data.images("test")).argmax(1).numpy() == y
        labels = fl.labels[fl.shards[m]]
        own.append(np.mean([is_right[y == c].mean() for c in labels]))
    assert columns["own_mean"] == pytest.approx(100 * np.mean(own))
    assert np.std(own) > 0


def test_macro_f1_by_hand(noisy):
    fl = federation_of(15)
    state = fl.start()
    [logits] = fl.predict(state)
    guesses = logits.argmax(1)
    y = fl.data.y_test
    f1 = []
    for c in range(4):
        hits = ((guesses == c) & (y == c)).sum().item()
        f1.append(2 * hits / ((guesses == c).sum().item() + (y == c).sum().item()))
    columns = fl.test(state)
    assert columns["macro_f1"] == pytest.approx(100 * np.mean(f1))
    assert columns["accuracy"] != columns["macro_f1"]


# ------------------------------------------------------------------------------------ your program


@pytest.mark.parametrize("methods", [(), ("samples",), ("clients",), ("weights",)])
def test_the_pytorch_loop_learns_with_each_method(methods):
    accuracy, counts = pytorch_loop.federate(methods, rounds=6)
    assert accuracy[-1] > 60 > accuracy[0]
    if "clients" in methods:
        assert counts[:2] == [8, 16]  # the first round counts as critical
        assert all(
            b in (min(2 * a, 40), max(a // 2, 4)) for a, b in zip(counts, counts[1:], strict=False)
        )
    else:
        assert counts == [8] * 6


@pytest.mark.parametrize(("methods", "admitted"), [((), (4, 4)), (("samples",), (1, 2))])
def test_a_client_of_the_pytorch_loop_by_hand(methods, admitted):
    """Softmax regression in NumPy. A batch may hold the `admitted` easiest of four samples."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 3))
    y = np.array([0, 1, 1, 0])
    weights = np.array([0.5, 1.0, 2.0, 0.25])
    net = torch.nn.Linear(3, 2, bias=False).double()
    w = net.weight.detach().numpy().copy()
    easy_first = np.argsort(-log_softmax(x @ w.T, 1)[range(4), y])
    norms = []
    for count in admitted:
        batch = easy_first[:count]
        error = softmax(x[batch] @ w.T, 1) - np.eye(2)[y[batch]]
        gradient = (weights[batch, None] * error).T @ x[batch] / count
        norms.append((gradient**2).sum())
        w -= pytorch_loop.ETA * gradient
    tensors = map(torch.from_numpy, (x, y, weights))
    found = pytorch_loop.train_client(net, *tensors, rng, methods)
    assert found == pytest.approx(np.mean(norms))
    np.testing.assert_allclose(net.weight.detach(), w)


def test_the_pytorch_loop_averages_by_size_and_wants_growth(monkeypatch):
    """A client's weights become its size. Gradients never grow, so the number of clients falls."""
    received = []
    sizes = []

    def train_client(net, x, y, *rest):
        received.append(next(net.parameters())[0, 0].item())
        sizes.append(len(y))
        for value in net.parameters():
            torch.nn.init.constant_(value, len(y))
        return 1.0

    monkeypatch.setattr(pytorch_loop, "train_client", train_client)
    _, counts = pytorch_loop.federate(("clients",), rounds=5)
    assert counts == [8, 16, 8, 4, 4]
    first = np.array(sizes[:8])
    assert received[8] == pytest.approx((first**2).sum() / first.sum())


def test_the_pytorch_loop_halves_the_weight_of_a_small_cluster():
    x = torch.zeros(8, 3)
    x[6:] = 1
    weights = pytorch_loop.weigh(x, torch.zeros(8), np.random.default_rng(0))
    assert weights.tolist() == pytest.approx([8 / 7] * 6 + [4 / 7] * 2)


def test_everything_of_ones_own(folder):
    own_everything.main(["--rounds=4", "--trials=1", "--jobs=2", "--out=r"])
    with open("r/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["small"] * 4 + ["large"] * 4
    assert all(float(row["worst_recall"]) <= float(row["accuracy"]) for row in rows)
    assert float(rows[0]["train_loss"]) < float(rows[4]["train_loss"])
    data = load_data("blobs")
    fl = own_everything.Config().federation(data, Streams(0))
    state = fl.start()
    candidates = fl.select(0, 8)
    mean = {m: fl.score(state["theta"], np.array([m]))[0][0].mean() for m in candidates}
    smallest = sorted(mean, key=mean.get)[:4]
    assert fl.largest_loss(state, 0, 4, sign=1).tolist() == sorted(smallest)
    w_0, w_hat = torch.zeros(3), torch.ones(3)
    assert fl.base.server(w_0, w_hat, None, None, {}).tolist() == [0.5] * 3
    for fl.config.batch_size in (7, 64):  # no sample is left out
        batches = own_everything.schedule(fl, 0, 3)
        samples, counts = np.unique(batches[batches >= 0], return_counts=True)
        assert np.array_equal(samples, fl.shards[3]) and set(counts) == {2}
    fl.config.batch_size = 10
    for flag in ("--base=solo", "--partition=iid", "--parts=40"):
        with pytest.raises(SystemExit) as stop:
            own_everything.main([flag])
        assert stop.value.code == 2
    mixed = np.argmax([np.ptp(fl.labels[shard]) for shard in fl.shards])
    first, last = own_everything.schedule(fl, 0, mixed), own_everything.schedule(fl, 9, mixed)
    assert np.array_equal(np.unique(first), np.unique(last))
    assert (np.diff(fl.labels[first[:3].ravel()]) >= 0).all()
    assert (np.diff(fl.labels[last[:3].ravel()]) < 0).any()


def test_flower_follows_the_critical_periods():
    """Sizes against FGN as the Strategy reports it, by hand; the client's rounds learn."""
    pytest.importorskip("flwr", reason="pip install flwr==1.42.0 for examples/flower_fedcl.py")
    import flower_driver

    from examples import flower_fedcl

    random.seed(0)
    grid, result = flower_driver.run(flower_fedcl, clients=12, rounds=6, n_0=4)
    sizes = [len(nodes) for nodes in grid.trained]
    fgn = [metrics["fgn"] for metrics in result.train_metrics_clientapp.values()]
    wanted = [4]
    previous = 0
    for value in fgn[:-1]:
        grew = value >= 1.01 * previous
        wanted.append(min(2 * wanted[-1], 12) if grew else max(wanted[-1] // 2, 2))
        previous = value
    assert sizes == wanted
    assert len(set(sizes)) > 1
    assert all(len(set(nodes)) == len(nodes) for nodes in grid.trained)
    accuracy = [row["accuracy"] for row in result.evaluate_metrics_serverapp.values()]
    assert accuracy[-1] > 60 > accuracy[0]


SHORT = [
    "--clients=4",
    "--clients-per-round=2",
    "--rounds=3",
    "--trials=1",
    "--epochs=1",
    "--out=r",
]


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_round_is_tracked_in_tensorboard(jobs):
    """What TensorBoard reads is what metrics.csv holds."""
    pytest.importorskip("tensorboard", reason="pip install tensorboard for examples/track.py")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from examples import track

    track.main([*SHORT, f"--jobs={jobs}"])
    with open("r/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    boards = {path.name: EventAccumulator(str(path)) for path in Path("r/tensorboard").iterdir()}
    assert len(boards) == 2
    for name, board in boards.items():
        board.Reload()
        method = "fedavg+cl" if "cl" in name else "fedavg"
        of_run = [row for row in rows if row["method"] == method]
        for column in ("accuracy", "fgn", "uploads"):
            found = [(event.step, event.value) for event in board.Scalars(column)]
            wanted = [(int(row["round"]), float(row[column])) for row in of_run]
            np.testing.assert_allclose(found, wanted, rtol=1e-6)


# -------------------------------------------------------------------------------------- the lesson


def text_of(outputs: list[dict]) -> str:
    return "".join(itertools.chain(*(output.get("text", "") for output in outputs)))


def shown(outputs: list[dict]) -> tuple[str, int]:
    """What a code cell prints, with 0 for each number, and how many pictures it shows."""
    printed = text_of(outputs)
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    return re.sub(r"[-+]?\d+(\.\d+)?", "0", printed), pictures


def test_the_lesson_runs_and_shows_what_the_page_shows(monkeypatch):
    """Other processors change the numbers. Two cells train less here."""
    lesson = ROOT / "examples" / "lesson.ipynb"
    text = lesson.read_text()
    shorter = {"accuracies_of(schedule, trial)": "accuracies_of(schedule, trial, 1)"}
    shorter["--rounds=24"] = "--rounds=4"
    for long, short in shorter.items():
        assert text.count(long) == 1
        text = text.replace(long, short)
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    monkeypatch.chdir(lesson.parent)
    with matplotlib.rc_context():
        found = run_lesson.run(cells)
    for cell, outputs in zip(cells, found, strict=True):
        assert shown(outputs) == shown(cell["outputs"])
    printed = "".join(map(text_of, found))
    answers = ("alpha 0.1: 3 digits", "rounding: True", "\n1.5\n", "16 32 64 32 16", "both: True")
    for answer in answers:
        assert answer in printed
    accuracy = dict(re.findall(r"(curriculum|shuffled|vanilla): ([\d.]+) %", printed))
    assert float(accuracy["vanilla"]) > float(accuracy["curriculum"]) + 5  # as its text says
    assert lesson.stat().st_size <= 300_000


# ---------------------------------------------------------------------------------------- the page


def test_the_page_and_the_programs_are_short():
    assert len(README.split()) <= 1750
    for block in RECIPES[9:]:
        assert len([line for line in block.splitlines() if line]) <= 10, block
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 130, path.name
        assert f"[{path.name}]" in README
