"""examples/: every recipe of its README and every program, run from nothing."""

import csv
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from scipy.special import log_softmax, softmax

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
        assert recipe(6)["label"] == label == Y[label]


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
    (folder / "mine.py").write_text(LINEAR)
    learns(data, model="mine.py:Net", clients=24, partition="natural", lr=0.01)
    assert data.x_train.shape == (192, 128, 9)
    assert len(np.unique(data.owner)) == 24
    assert torch.allclose(data.images("train").std((0, 1), correction=0), torch.ones(9), atol=1e-4)


# -------------------------------------------------------------------------------------- your model


def test_a_net_of_ones_own_has_features_and_a_head(folder):
    """MOON and the multi-phase algorithm run with it; many clients train at once."""
    (folder / "mine.py").write_text(RECIPES[5])
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
    (folder / "mine.py").write_text(RECIPES[5])
    names = recipe(5)
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


# ---------------------------------------------------------------------------------------- the page


def test_the_page_and_the_programs_are_short():
    assert len(README.split()) <= 1000
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 130, path.name
        assert f"[{path.name}]" in README
