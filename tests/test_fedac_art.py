"""The oracles of the clustering curriculum, against a literal Fuzzy ART in exact fractions, cases by hand and brute force."""

import csv
import json
import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import common
import fedac_art
from fedac_art import ARMS, PRESETS, Config, clustering, fuzzy_art

QUICK = ["--rounds", "2", "--epochs", "1", "--trials", "1", "--threads", "1", "--device", "cpu"]


def blobs(n=90, d=9, classes=3, seed=0):
    """Clumped uint8 data: (x (n, d), y (n,), a presentation order)."""
    rng = np.random.default_rng(seed)
    centres = rng.integers(0, 256, (6, d))
    x = np.clip(centres[rng.integers(6, size=n)] + rng.integers(-40, 41, (n, d)), 0, 255).astype(np.uint8)
    return x, rng.integers(classes, size=n), rng.permutation(n)


def literal_art(x, y, order, rho, alpha, beta):
    """Section 4.1 sample by sample over one list of clusters of all classes, in exact fractions. (cluster (n,), templates)."""
    rho, alpha, beta = (Fraction(v) for v in (rho, alpha, beta))
    clusters, assigned = [], {}
    for i in order:
        coded = [Fraction(int(v), 255) for v in x[i]] + [1 - Fraction(int(v), 255) for v in x[i]]
        best, chosen = None, None
        for j, (label, w) in enumerate(clusters):
            meet = sum(min(a, b) for a, b in zip(coded, w, strict=True))
            if label == y[i] and meet / len(x[i]) >= rho:
                choice = meet / (alpha + sum(w))
                if best is None or choice > best:
                    best, chosen = choice, j
        if chosen is None:
            clusters.append((y[i], coded))
            chosen = len(clusters) - 1
        else:
            label, w = clusters[chosen]
            moved = [beta * min(a, b) + (1 - beta) * b for a, b in zip(coded, w, strict=True)]
            clusters[chosen] = (label, moved)
        assigned[i] = chosen
    return np.array([assigned[i] for i in range(len(y))]), [w for _, w in clusters]


def same_partition(a, b):
    """Whether two labellings group the samples alike."""
    return len(set(zip(a, b, strict=True))) == len(set(a)) == len(set(b))


# ----------------------------------------------------------------------------------------------------- the clustering


@pytest.mark.parametrize("beta", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("rho", [0.0, 0.5, 0.75, 0.875, 1.0])
def test_clustering_equals_the_literal_algorithm(rho, beta):
    x, y, order = blobs(seed=int(rho * 8))
    got, w = clustering(x, y, order, rho, 0.01, beta)
    want, templates = literal_art(x, y, order, rho, 0.01, beta)
    assert same_partition(got, want)
    if rho == 0.75:
        assert 3 < len(w) < 60
    for j in range(len(w)):
        literal = np.array([float(v) for v in templates[want[got == j][0]]])
        np.testing.assert_allclose(w[j] / 255, literal, atol=1e-12)


def test_a_case_worked_by_hand():
    # d = 2, |I| = 510 in units of 1/255. a = (255, 0): I = (255, 0, 0, 255). b = (204, 51): I = (204, 51, 51, 204).
    # |a ^ b| = 408, 408 / 510 = .8 exactly: at rho = .8 b joins a and w = (204, 0, 0, 204), at rho = .81 it does not.
    x = np.array([[255, 0], [204, 51]], dtype=np.uint8)
    cluster, w = fuzzy_art(x, 0.8, 0.01, 1.0)
    assert cluster.tolist() == [0, 0] and w.tolist() == [[204, 0, 0, 204]]
    cluster, w = fuzzy_art(x, 0.81, 0.01, 1.0)
    assert cluster.tolist() == [0, 1] and w.tolist() == [[255, 0, 0, 255], [204, 51, 51, 204]]


def test_ties_go_to_the_oldest_and_the_largest_choice_wins():
    x = np.array([[0], [255], [128], [250]], dtype=np.uint8)  # one black, one white, then neither
    cluster, _ = fuzzy_art(x[[0, 1, 3]], 0.9, 0.01, 1.0)
    assert cluster.tolist() == [0, 1, 1]
    # two clusters with equal match and choice for the third sample: (0, 255) and (255, 0) seen from (128, 128)
    x = np.array([[0, 255], [255, 0], [128, 128]], dtype=np.uint8)
    assert fuzzy_art(x, 0.5, 0.01, 1.0)[0].tolist() == [0, 1, 0]
    assert fuzzy_art(x[[1, 0, 2]], 0.5, 0.01, 1.0)[0].tolist() == [0, 1, 0]


@pytest.mark.parametrize("rho", [0.3, 0.7, 0.9])
def test_templates_are_the_minimum_over_members(rho):
    x, y, order = blobs(n=300, seed=3)
    cluster, w = clustering(x, y, order, rho, 0.01, 1.0)
    assert set(cluster) == set(range(len(w)))
    coded = np.concatenate([x, 255 - x], 1)
    for j in range(len(w)):
        members = cluster == j
        assert len(set(y[members])) == 1
        np.testing.assert_array_equal(w[j], coded[members].min(0))
        assert w[j].sum(dtype=int) / (255 * x.shape[1]) >= rho


@pytest.mark.parametrize("beta", [1.0, 0.3, 0.0])
def test_templates_only_shrink_and_stay_in_the_unit_cube(beta):
    x, y, _ = blobs(n=80, classes=1, seed=4)
    before = None
    for n in range(1, 81):
        _, w = fuzzy_art(x[:n], 0.6, 0.01, beta)
        assert w.min() >= 0 and w.max() <= 255
        if before is not None:
            assert (w[: len(before)] <= before).all()
            if beta == 0:
                np.testing.assert_array_equal(w[: len(before)], before)
        before = w.astype(float)


def test_extremes_of_the_vigilance():
    x, y, order = blobs(n=200, d=3, seed=5)
    x = x // 100  # many duplicates
    assert same_partition(clustering(x, y, order, 0.0, 0.01, 1.0)[0], y)
    pairs = [tuple(row) + (label,) for row, label in zip(x.tolist(), y.tolist(), strict=True)]
    distinct = np.array([sorted(set(pairs)).index(pair) for pair in pairs])
    assert 3 < len(set(pairs)) < 200
    assert same_partition(clustering(x, y, order, 1.0, 0.01, 1.0)[0], distinct)


def test_classes_are_independent_but_the_order_within_one_matters():
    x, y, order = blobs(n=200, seed=6)
    got, _ = clustering(x, y, order, 0.75, 0.01, 1.0)
    sorted_by_class = order[np.argsort(y[order], kind="stable")]
    np.testing.assert_array_equal(clustering(x, y, sorted_by_class, 0.75, 0.01, 1.0)[0], got)
    for c in range(3):
        own = order[y[order] == c]
        assert same_partition(fuzzy_art(x[own], 0.75, 0.01, 1.0)[0], got[own])
    assert not same_partition(clustering(x, y, order[::-1], 0.75, 0.01, 1.0)[0], got)


def test_real_images_give_clusters_of_useful_size(real_data):
    """CIFAR-10, 1,000 images: the default rho gives clusters of several samples, the textbook's near-singletons."""
    with np.load(real_data / "cifar10_jpeg.npz") as file:
        x, y = file["x_train"], file["y_train"]
    kept = np.random.default_rng(0).permutation(len(x))[:1000]
    x, y = x[kept].reshape(1000, -1), y[kept]
    order = np.arange(1000)
    cluster, w = clustering(x, y, order, fedac_art.RHO["pixels"], 0.01, 1.0)
    coded = np.concatenate([x, 255 - x], 1)
    for j in range(len(w)):
        np.testing.assert_array_equal(w[j], coded[cluster == j].min(0))
    assert 3 < 1000 / len(w) < 20
    assert 1000 / len(clustering(x, y, order, 0.9, 0.01, 1.0)[1]) < 1.3


# ------------------------------------------------------------------------------------------------ groups and weights


def test_threshold_is_the_sample_weighted_quantile():
    rng = np.random.default_rng(0)
    for _ in range(50):
        cluster = rng.integers(0, rng.integers(1, 12), 60)
        size = np.bincount(cluster)[cluster]
        for quantile in (0.0, 0.25, 0.5, 0.9, 1.0):
            T = fedac_art.threshold(size, quantile)
            assert (size < T).mean() <= quantile  # as few as asked, ...
            larger = size[size > T]
            if len(larger):
                assert (size < larger.min()).mean() > quantile  # ... and one size more would be too many


def test_small_clusters_by_client_and_by_class():
    # client 0: class 0 in clusters of 6 and 2, class 1 (rare) in clusters of 2 and 1; client 1: one cluster of 3
    cluster = np.array([1] * 6 + [2] * 2 + [3] * 2 + [4] + [5] * 3 + [0])
    y = np.array([0] * 8 + [1] * 3 + [0] * 3 + [1])
    owner = np.array([0] * 11 + [1] * 3 + [-1])
    client = fedac_art.small_clusters(cluster, fedac_art.groups(owner, y, "client"), 0.5)
    assert client.tolist() == [False] * 6 + [True] * 5 + [False] * 3 + [False]  # the whole rare class is small
    by_class = fedac_art.small_clusters(cluster, fedac_art.groups(owner, y, "class"), 0.5)
    assert by_class.tolist() == [False] * 6 + [True] * 2 + [False] * 2 + [True] + [False] * 3 + [False]


@pytest.mark.parametrize("scope", ["client", "class"])
def test_random_groups_have_the_same_sizes(scope):
    rng = np.random.default_rng(1)
    owner, y, P1 = rng.integers(-1, 4, 400), rng.integers(0, 3, 400), rng.random(400) < 0.3
    P1[owner < 0] = False
    shared = fedac_art.groups(owner, y, scope)
    assert sorted(np.concatenate(shared)) == np.flatnonzero(owner >= 0).tolist()
    drawn = fedac_art.random_groups(P1, shared, common.Streams(1))
    for m in range(4):
        for c in range(3):
            own = (owner == m) & (y == c) if scope == "class" else owner == m
            assert drawn[own].sum() == P1[own].sum()
    assert not np.array_equal(drawn, P1)
    again = fedac_art.random_groups(P1, shared, common.Streams(1))
    np.testing.assert_array_equal(drawn, again)
    assert not np.array_equal(drawn, fedac_art.random_groups(P1, shared, common.Streams(1, trial=1)))


def test_weights_have_mean_one_per_client_and_the_asked_ratio():
    P1 = np.array([True, False, False, False, True, True, False, False])
    shards = [np.array([0, 1, 2, 3]), np.array([4, 5, 7])]  # sample 6 belongs to nobody
    weight = fedac_art.sample_weights(P1, shards, 0.5, 1.0)
    np.testing.assert_allclose(weight, [4 / 7, 8 / 7, 8 / 7, 8 / 7, 0.75, 0.75, 1, 1.5])
    np.testing.assert_array_equal(fedac_art.sample_weights(P1, shards, 1.0, 1.0), np.ones(8))
    everything = np.ones(8, dtype=bool)
    np.testing.assert_array_equal(fedac_art.sample_weights(everything, shards, 0.0, 1.0), np.ones(8))


def test_ramp_moves_the_first_weight_to_the_second():
    config = Config(rounds=10, ramp=0.5, w_small=0.2)
    assert [fedac_art.loss_weights(config, t)[0] for t in (0, 5, 9)] == [0.2, 1.0, 1.0]
    assert fedac_art.loss_weights(config, 2) == (pytest.approx(0.2 + 0.8 * 0.4), 1.0)
    assert fedac_art.loss_weights(Config(w_small=0.2), 9) == (0.2, 1.0)


# --------------------------------------------------------------------------------------------------------- the training


def run(tmp_path, name, *flags):
    """(metrics rows, folder) of a quick run on digits."""
    folder = tmp_path / name
    fedac_art.main([*QUICK, "--out", str(folder), *flags])
    with open(folder / "metrics.csv") as file:
        return list(csv.DictReader(file)), folder


def weights_of(folder, arm, trial=0):
    return common.load_checkpoint(folder / "checkpoints" / f"{arm}-trial{trial}.pt")["state"]["weights"]


@pytest.fixture(scope="module")
def default_run(tmp_path_factory):
    return run(tmp_path_factory.mktemp("art"), "default", "--w-small", "0")


def test_run_writes_rows_summary_and_figures(default_run):
    rows, folder = default_run
    assert [(r["method"], r["round"]) for r in rows] == [(arm, t) for arm in ARMS for t in "12"]
    assert all(r["clusters"] != "" for r in rows if r["round"] == "1")
    assert all(-1 <= float(r[c]) <= 1 for r in rows if r["round"] == "2" for c in ("silhouette", "spearman"))
    assert list(json.loads((folder / "summary.json").read_text())["results"][""]) == list(ARMS)
    for name in ("tsne.png", "examples.png", "accuracy.png"):
        assert (folder / name).read_bytes()[:4] == b"\x89PNG"
    w = [weights_of(folder, arm) for arm in ARMS]
    assert not torch.equal(w[0], w[1]) and not torch.equal(w[0], w[2]) and all(torch.isfinite(v).all() for v in w)


def test_equal_weights_are_the_base_bit_for_bit(tmp_path, default_run):
    _, folder = run(tmp_path, "ones", "--w-small", "1", "--arms", "fedac", "random-groups")
    for arm in ("fedac", "random-groups"):
        assert torch.equal(weights_of(folder, arm), weights_of(default_run[1], "base"))


def test_swap_gives_the_weights_to_the_other_groups(tmp_path, default_run):
    _, folder = run(tmp_path, "swap", "--w-small", "1", "--w-large", "0", "--swap", "--arms", "fedac")
    assert torch.equal(weights_of(folder, "fedac"), weights_of(default_run[1], "fedac"))


def test_weights_follow_the_samples_through_shuffles_and_augmentation(monkeypatch, tmp_path):
    """What reaches the trainer at (client, step, place) is the weight of that very training image."""
    calls, train = [], common.train
    monkeypatch.setattr(common, "train", lambda *a, **k: calls.append((a, k)) or train(*a, **k))
    _, folder = run(tmp_path, "spy", "--arms", "fedac", "--augment", "crop-flip", "--flip", "0.2")
    config, streams = Config(), common.Streams(Config.seed)
    data = common.load_data("digits")
    shards = common.client_shards(config, data, streams)
    y = fedac_art.flip_labels(data, 0.2, streams("flips"))[0].y_train.numpy()
    assert len(calls) == 2
    for (_, _, seen, batches), flags in calls:
        np.testing.assert_array_equal(seen.y_train.numpy(), y)
        for k, (shard, schedule, weight) in enumerate(zip(shards, batches, flags["weights"], strict=True)):
            order = streams("presentation", k, 0).permutation(len(shard))
            x = data.x_train[torch.as_tensor(shard)].flatten(1).numpy()  # raw: no mean, no std, no augmentation
            cluster, _ = clustering(x, y[shard], order, 0.6, 0.01, 1.0)
            size = np.bincount(cluster)[cluster]
            raw = np.where(size < np.sort(size)[len(size) // 2], 0.5, 1.0)
            of = dict(zip(shard.tolist(), (raw / raw.mean()).tolist(), strict=True))
            assert sorted(schedule[schedule >= 0]) == shard.tolist()
            for i, w in zip(schedule.flatten(), weight.flatten(), strict=True):
                assert i < 0 or w == pytest.approx(of[int(i)])


def test_the_step_is_weighted_cross_entropy_over_the_batch_size():
    """One SGD step against autograd on an explicit softmax regression head, float64; an all-P1 batch of weight 0 stays."""
    data = common.load_data("digits")
    model = common.build_model("lenet5", data, dtype=torch.float64)
    theta, batch = model.init(0), np.array([[3, 8, 11, 40, -1]])
    w = np.array([[0.5, 1.5, 0.0, 2.0, 9.0]])
    update = common.train(model, theta, data, [batch], lr=0.1, weights=[w])
    leaf = theta[None].clone().requires_grad_()
    net = model.bind(leaf.detach(), grad=True)
    index = torch.as_tensor(batch[:, :4])
    logits = net.head(net.features(data.inputs(data.x_train[index], torch.float64)))[0]
    log_p = logits - torch.logsumexp(logits, 1, keepdim=True)
    loss = -(torch.as_tensor(w[0, :4]) * log_p[torch.arange(4), data.y_train[index[0]]]).sum() / 4
    grads = torch.cat([g.flatten() for g in torch.autograd.grad(loss, net.leaves)])
    torch.testing.assert_close(update.weights[0], theta - 0.1 * grads, rtol=0, atol=1e-12)
    nothing = common.train(model, theta, data, [batch], lr=0.1, weights=[0 * w])
    assert torch.equal(nothing.weights[0], theta)


# --------------------------------------------------------------------------------------------------------------- bases


def test_moon_contrast_is_log_2_without_gradient_when_previous_is_global():
    config = SimpleNamespace(mu=-1.0, server_lr=0.0)
    data = common.load_data("digits")
    model = common.build_model("simplecnn", data, dtype=torch.float64, projection=True)
    base = common.Moon(config, model, 2)
    stack = torch.stack([model.init(0), model.init(1)])
    net, frozen = model.bind(stack, grad=True), model.bind(stack.flip(0).clone())
    inputs = data.inputs(data.x_train[:6].view(2, 3, *data.x_train.shape[1:]), torch.float64)
    step = SimpleNamespace(features=net.features(inputs), inputs=inputs, frozen={"global": frozen, "previous": frozen})
    step.mean, step.extra = torch.full((2, 3), 1 / 3, dtype=torch.float64), {"known": torch.ones(2, dtype=torch.float64)}
    step.weight = 0 * step.mean  # sample weights must not reach it
    l_con = base.contrast(step)
    torch.testing.assert_close(l_con, torch.full((2,), 5 * np.log(2), dtype=torch.float64))
    grads = torch.autograd.grad(l_con.sum(), net.leaves, allow_unused=True)
    assert all(g is None or g.abs().max() < 1e-14 for g in grads)
    assert not any(leaf.requires_grad for leaf in frozen.leaves)


def test_moon_equals_fedavg_in_its_first_round_only(tmp_path):
    few = ["--arms", "fedac", "--rounds"]
    folders = {}
    for rounds in ("1", "2"):
        folders["moon" + rounds] = run(tmp_path, "moon" + rounds, *few, rounds, "--base", "moon")[1]
        folders["avg" + rounds] = run(tmp_path, "avg" + rounds, *few, rounds, "--projection")[1]
    w = {name: weights_of(folder, "fedac") for name, folder in folders.items()}
    assert torch.equal(w["moon1"], w["avg1"]) and not torch.equal(w["moon2"], w["avg2"])
    held = common.load_checkpoint(folders["moon2"] / "checkpoints" / "fedac-trial0.pt")["state"]["base"]["previous"]
    assert sorted(held) == list(range(10)) and all(v.shape == w["moon2"].shape for v in held.values())


def test_fedprox_pulls_and_mu_0_is_fedavg(tmp_path, default_run):
    far = run(tmp_path, "prox", "--base", "fedprox", "--mu", "1", "--w-small", "0", "--arms", "fedac")[1]
    zero = run(tmp_path, "prox0", "--base", "fedprox", "--mu", "0", "--w-small", "0", "--arms", "fedac")[1]
    assert torch.equal(weights_of(zero, "fedac"), weights_of(default_run[1], "fedac"))
    assert not torch.equal(weights_of(far, "fedac"), weights_of(zero, "fedac"))


def test_solo_trains_its_hundred_epochs_and_reports_the_mean_over_clients(tmp_path, monkeypatch):
    for rounds in (1, 3, 7, 10, 100):
        config = Config(base="solo", rounds=rounds, epochs=10)
        assert sum(fedac_art.local_epochs(config, t) for t in range(rounds)) == 100
    steps, train = [], common.train
    monkeypatch.setattr(common, "train", lambda *a, **k: steps.append(train(*a, **k)) or steps[-1])
    rows, folder = run(tmp_path, "solo", "--base", "solo", "--solo-epochs", "3", "--arms", "base")
    data = common.load_data("digits")
    shards = common.client_shards(Config(), data, common.Streams(Config.seed))
    batches = np.array([-(-len(shard) // 64) for shard in shards])
    np.testing.assert_array_equal(sum(update.steps for update in steps), 3 * batches)
    own = common.load_checkpoint(folder / "checkpoints" / "base-trial0.pt")["state"]["base"]["own"]
    model = common.build_model("lenet5", data)
    accuracy = []
    for k in range(10):
        net = model.bind(own[k][None])
        logits = net.head(net.features(data.inputs(data.x_test[None], torch.float32)))[0]
        accuracy.append((logits.argmax(1) == data.y_test).double().mean().item() * 100)
    assert float(rows[-1]["accuracy"]) == pytest.approx(np.mean(accuracy), abs=1e-6)
    assert float(rows[-1]["client_std"]) == pytest.approx(np.std(accuracy, ddof=1), abs=1e-6)


# ------------------------------------------------------------------------------------- augmentation, features, measures


def test_augmentation_crops_and_flips_each_image_by_its_own_draw():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (2, 3, 16, 16, 3), dtype=np.uint8)
    drawn = fedac_art.draws("crop-flip", np.zeros((1, 5), dtype=int), rng)
    assert drawn["shift"].shape == (1, 5, 2) and set(drawn) == {"shift", "flip"}
    shift, flip = rng.integers(0, 9, (2, 5, 2)), rng.random((2, 5)) < 0.5
    extra = {"shift": torch.as_tensor(shift), "flip": torch.as_tensor(flip)}
    got = fedac_art.augmented(torch.as_tensor(x), extra).numpy()  # the batch is shorter than the schedule is wide
    for k in range(2):
        for b in range(3):
            top, left = shift[k, b]
            want = np.pad(x[k, b], ((4, 4), (4, 4), (0, 0)))[top : top + 16, left : left + 16]
            np.testing.assert_array_equal(got[k, b], want[:, ::-1] if flip[k, b] else want)


def test_rotation_turns_about_the_centre():
    x = torch.randint(0, 256, (1, 2, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    extra = {"shift": torch.full((1, 2, 2), 4), "flip": torch.zeros(1, 2, dtype=torch.bool)}
    turned = fedac_art.augmented(x, extra | {"angle": torch.tensor([[0.0, np.pi / 2]])})
    assert torch.equal(turned[0, 0], x[0, 0])
    assert torch.equal(turned[0, 1], torch.rot90(x[0, 1], 1, (0, 1))) or torch.equal(
        turned[0, 1], torch.rot90(x[0, 1], 3, (0, 1))
    )
    angle = np.degrees(fedac_art.draws("crop-flip-rotate", np.zeros((50, 50), dtype=int), np.random.default_rng(0))["angle"])
    assert -15 <= angle.min() < -14 and 14 < angle.max() <= 15


def test_features_are_the_clients_own_raw_images():
    data = common.load_data("digits")
    model = common.build_model("lenet5", data)
    shards, streams = [np.arange(40), np.arange(100, 130)], common.Streams(0)
    shape = Config(features="pixels", epochs=1, warmup=1)
    pixels = fedac_art.client_features(shape, data, model, shards, streams)
    np.testing.assert_array_equal(pixels[1], data.x_train[100:130].numpy().reshape(30, -1))
    wide = common.Data(**{**vars(data), "x_train": F.pad(data.x_train, (0, 0, 2, 2, 2, 2))})  # 32x32: blocks of 4x4
    pooled = fedac_art.client_features(Config(features="pooled"), wide, model, shards, streams)
    blocks = wide.x_train[:40].numpy().reshape(40, 8, 4, 8, 4).astype(float).mean((2, 4)).reshape(40, 64)
    assert pooled[0].dtype == np.uint8 and np.abs(pooled[0] - blocks).max() <= 0.5
    encoder = fedac_art.client_features(Config(features="encoder", epochs=1, warmup=1), data, model, shards, streams)
    assert [e.shape for e in encoder] == [(40, 84), (30, 84)] and encoder[0].dtype == np.uint8
    for e in encoder:
        assert set(e.min(0)) == {0} and set(e.max(0)) <= {0, 255} and 255 in e.max(0)


def test_encoder_is_trained_by_fedavg_and_its_features_span_the_bytes():
    data = common.load_data("digits")
    model = common.build_model("lenet5", data, dtype=torch.float64)
    shards, streams = [np.arange(20), np.arange(100, 130)], common.Streams(0)
    config = Config(features="encoder", epochs=2, warmup=2)
    want, sgd = model.init(streams.seed("init")), {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5}
    for t in range(2):
        batches = [common.epochs_of_batches(shard, 2, 64, streams("warm-up", t, k)) for k, shard in enumerate(shards)]
        local = [common.train(model, want, data, [each], **sgd).weights[0] for each in batches]
        want = (20 * local[0] + 30 * local[1]) / 50
    theta = fedac_art.warm_up(config, model, data, shards, streams)
    torch.testing.assert_close(theta, want, rtol=0, atol=1e-12)
    assert (theta - model.init(streams.seed("init"))).abs().max() > 1e-3
    got = fedac_art.client_features(config, data, model, shards, streams)
    for x, shard in zip(got, shards, strict=True):
        z = model.bind(want[None]).features(data.inputs(data.x_train[torch.as_tensor(shard)][None], torch.float64))[0].numpy()
        unit = (z - z.min(0)) / np.maximum(z.max(0) - z.min(0), 1e-12)
        assert np.abs(x - 255 * unit).max() <= 0.5 + 1e-6


def test_encoder_with_dropout_depends_on_no_earlier_draw():
    data = common.load_data("digits", size=32)
    model = common.build_model("alexnet", data, width=16)
    config, shards = Config(features="encoder", epochs=1, warmup=1), [np.arange(8), np.arange(8, 16)]
    first = fedac_art.warm_up(config, model, data, shards, common.Streams(0))
    torch.rand(3)
    assert torch.equal(fedac_art.warm_up(config, model, data, shards, common.Streams(0)), first)


def test_chance_is_that_of_groups_which_share_a_threshold():
    """One client: class 0 has a sample of three in P1 under either order, class 1, a single cluster, has none."""
    cluster = np.array([[1, 2, 2, 3, 3, 3], [2, 1, 2, 3, 3, 3]])
    y, owner = np.array([0, 0, 0, 1, 1, 1]), np.zeros(6, dtype=int)
    got = fedac_art.measures(Config(scope="class"), cluster, owner, y, np.zeros(6, dtype=bool))
    assert got["small_by_class"] == pytest.approx(1 / 6) and got["agreement"] == pytest.approx(4 / 6)
    assert got["chance"] == pytest.approx((3 * (1 / 9 + 4 / 9) + 3) / 6)


def test_clusters_of_different_clients_never_mix():
    data = common.load_data("digits")
    model = common.build_model("lenet5", data)
    shards = [np.arange(0, 300), np.arange(300, 500)]
    cluster = fedac_art.cluster_clients(Config(), data, model, shards, common.Streams(0)).numpy()
    assert cluster.shape == (2, len(data.y_train)) and (cluster[:, 500:] == 0).all() and (cluster[:, :500] > 0).all()
    for ids in cluster:
        assert not set(ids[:300]) & set(ids[300:500]) and set(ids[:500]) == set(range(1, ids.max() + 1))
        assert len({(c, label) for c, label in zip(ids[:500], data.y_train[:500].tolist(), strict=True)}) == ids.max()


def test_measures_against_counting():
    rng = np.random.default_rng(2)
    n = 600
    owner, y, flipped = rng.integers(-1, 3, n), rng.integers(0, 4, n), rng.random(n) < 0.2
    cluster = np.stack([1 + np.minimum(rng.geometric(0.2, n), 9) + 10 * np.maximum(owner, 0) for _ in range(2)])
    cluster[:, owner < 0] = 0
    for ids in cluster:  # number them without gaps
        ids[:] = np.unique(ids, return_inverse=True)[1]
    got = fedac_art.measures(Config(scope="client"), cluster, owner, y, flipped)
    small, chance = [], 0.0
    for ids in cluster:
        size = [sum(1 for j in range(n) if ids[j] == ids[i]) for i in range(n)]
        small.append([False] * n)
        for m in range(3):
            own = [i for i in range(n) if owner[i] == m]
            T = sorted(size[i] for i in own)[len(own) // 2]
            for i in own:
                small[-1][i] = size[i] < T
    own = [i for i in range(n) if owner[i] >= 0]
    for m in range(3):
        p, q = (np.mean([P[i] for i in own if owner[i] == m]) for P in small)
        chance += sum(1 for i in own if owner[i] == m) * (p * q + (1 - p) * (1 - q)) / len(own)
    assert got["clusters"] == len(set(cluster[0][own])) and got["cluster_size"] == pytest.approx(len(own) / got["clusters"])
    assert got["small_by_client"] == pytest.approx(np.mean([small[0][i] for i in own]))
    assert got["agreement"] == pytest.approx(np.mean([small[0][i] == small[1][i] for i in own]))
    assert got["chance"] == pytest.approx(chance)
    assert got["noisy_small"] == pytest.approx(np.mean([flipped[i] for i in own if small[0][i]]))
    assert got["noisy_large"] == pytest.approx(np.mean([flipped[i] for i in own if not small[0][i]]))


def test_correlation_of_size_and_loss_is_by_rank_and_within_clients():
    cluster = np.array([1, 2, 2, 3, 3, 3, 4, 5, 5])
    shards = [np.arange(6), np.arange(6, 9)]
    losses = [np.array([9.0, 2, 2, 1, 1, 1]), np.array([100.0, 7, 7])]
    assert fedac_art.size_and_loss(cluster, shards, losses) == pytest.approx(-1)
    assert fedac_art.size_and_loss(cluster, shards, [-losses[0], losses[1]]) == pytest.approx((6 - 3) / 9)


def test_flipped_labels_are_wrong_and_as_many_as_asked():
    data = common.load_data("digits")
    noisy, flipped = fedac_art.flip_labels(data, 0.2, np.random.default_rng(0))
    np.testing.assert_array_equal((noisy.y_train != data.y_train).numpy(), flipped)
    assert flipped.sum() == round(0.2 * len(flipped)) and set(noisy.y_train.tolist()) == set(range(10))
    assert torch.equal(fedac_art.flip_labels(data, 0.0, np.random.default_rng(0))[0].y_train, data.y_train)


def test_examples_show_the_smallest_and_the_largest_clusters():
    images = np.arange(1, 7, dtype=np.uint8)[:, None, None, None] * np.ones((6, 2, 2, 1), dtype=np.uint8)
    picture = fedac_art.examples(images, np.array([1, 2, 2, 3, 3, 3]), np.zeros(6, dtype=int), across=2)
    assert picture.shape == (2, 4, 8, 1)
    assert picture[0, 0, [0, 4], 0].tolist() == [1, 2] and set(picture[1, 0, [0, 4], 0]) <= {4, 5, 6}


# ---------------------------------------------------------------------------------------------------------- command line


def test_resume_gives_the_same_rows_and_weights(tmp_path, monkeypatch):
    flags = ["--arms", "fedac", "random-groups", "--base", "moon", "--augment", "crop-flip"]
    whole, folder = run(tmp_path, "whole", *flags)
    record = common.Run.record

    def dies(self, t, **columns):
        if self.method == "random-groups" and t == 1:
            raise MemoryError
        record(self, t, **columns)

    monkeypatch.setattr(common.Run, "record", dies)
    with pytest.raises(MemoryError):
        run(tmp_path, "killed", *flags)
    monkeypatch.setattr(common.Run, "record", record)
    resumed, again = run(tmp_path, "killed", *flags, "--resume")
    assert [{**row, "seconds": ""} for row in resumed] == [{**row, "seconds": ""} for row in whole]
    for arm in ("fedac", "random-groups"):
        assert torch.equal(weights_of(folder, arm), weights_of(again, arm))


@pytest.mark.parametrize(
    "flags",
    [
        ["--w-small", "0", "--w-large", "0"],
        ["--w-small", "-1"],
        ["--rho", "1.5"],
        ["--rho", "-0.5"],
        ["--ramp", "0.5", "--w-small", "1", "--w-large", "0"],
        ["--art-alpha", "0"],
        ["--base", "solo", "--solo-epochs", "1", "--rounds", "2"],
        ["--base", "solo", "--clients-per-round", "5"],
        ["--dataset", "shakespeare"],
        ["--features", "hog"],
    ],
)
def test_wrong_flags_give_one_line_and_status_2(flags, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        fedac_art.main([*flags, "--out", str(tmp_path / "x")])
    out = capsys.readouterr()
    assert stop.value.code == 2 and out.err.count("\n") == 1 and out.out == ""


def test_presets_are_the_papers_set_up():
    for name, (_, flags, sweep) in PRESETS.items():
        config = Config(**{**flags, **{flag: values[0] for flag, values in sweep.items()}})
        config.check()
        if name.startswith(("table", "fig")):
            shape = (config.clients, config.clients_per_round, config.rounds, config.epochs, config.batch_size)
            assert shape == (10, 10, 100, 10, 64)
            assert (config.lr, config.momentum, config.weight_decay, config.min_size) == (0.01, 0.9, 1e-5, 10)
            assert config.augment == ("crop-flip-rotate" if "cifar100" in name else "crop-flip")
            assert config.model == ("resnet18" if "cifar100" in name else "simplecnn")
    assert {*PRESETS["table2"][2]["base"]} == {"solo", "fedavg", "fedprox", "moon"}
    assert PRESETS["table2-moon-cifar100"][1]["mu"] == 1.0 and common.Moon.defaults["mu"] == 5.0


@pytest.mark.parametrize("bad", [0.0, 3.5, math.nan, math.inf, 1e30])
def test_features_without_a_map_are_drawn_as_one_point(bad):
    """Of a net that died every feature is alike: scikit-learn's tree would recurse without end."""
    z = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    assert fedac_art.flat_map(z).std(0).min() > 0 and -1 <= fedac_art.separation(z, np.arange(40) % 3) <= 1
    z[:] = np.where(np.isfinite(bad) & (abs(bad) < 1e9), np.float32(bad), z * np.float32(bad))
    assert fedac_art.flat_map(z).shape == (40, 2) and not fedac_art.flat_map(z).any()
    assert math.isnan(fedac_art.separation(z, np.arange(40) % 3)) == (not np.isfinite(z).all())
    assert not fedac_art.flat_map(z[:2]).any()
