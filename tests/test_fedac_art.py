"""fedac_art.py and its study: whole runs as loops, Fuzzy ART in exact fractions, cases by hand."""

import csv
import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from fedac_loops import NATURAL, Loops, make_images
from matplotlib.figure import Figure

import common
import experiment
import fedac_art
from data import Data, load_data
from experiment import report
from fedac_art import fuzzy_art, small_clusters, weigh_groups, weigh_samples
from nets import build_model
from results.fedac_art import controls

QUICK = {
    "rounds": 2,
    "epochs": 1,
    "trials": 1,
    "jobs": 1,
    "device": "cpu",
    "clients": 6,
    "clients_per_round": 6,
    "min_size": 5,
    "batch_size": 8,
    "rho": 0.75,
}


def words(flags: dict) -> list[str]:
    """Flags as a command line."""
    line = []
    for name, value in flags.items():
        option = "--" + name.replace("_", "-")
        line.append(option if value is True else f"{option}={value}")
    return line


def launch(script, folder, *flags) -> list[dict]:
    """The rows of metrics.csv."""
    script.main(["--out", str(folder), *map(str, flags)])
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def load_states(folder) -> dict:
    """{(setting, method, trial): its state}"""
    states = {}
    for path in (folder / "checkpoints").glob("*-trial?.pt"):
        content = torch.load(path, weights_only=True)["content"]
        if isinstance(content, dict):  # else the cached clusters
            row = content["rows"][0]
            states[row["setting"], row["method"], row["trial"]] = content["state"]
    return states


def load_nets(folder) -> dict:
    """{method: theta (P,)}"""
    return {method: state["theta"] for (_, method, _), state in load_states(folder).items()}


def without_seconds(rows: list[dict]) -> list[dict]:
    return [{**row, "seconds": ""} for row in rows]


@pytest.fixture(scope="module")
def arrays() -> dict:
    return make_images()


@pytest.fixture(scope="module")
def path(arrays, tmp_path_factory):
    """The arrays as an .npz file."""
    path = tmp_path_factory.mktemp("images") / "images.npz"
    np.savez(path, **arrays)
    return path


def draw_nothing(*args, **options) -> None:
    pass


@pytest.fixture
def quiet(monkeypatch):
    """No figures: they have tests of their own."""
    monkeypatch.setattr(report, "plot", draw_nothing)
    monkeypatch.setattr(fedac_art, "draw", draw_nothing)


@pytest.fixture
def quick(path, quiet):
    """A short run without pictures: (rows, {method: theta})."""

    def run(folder, *flags, script=controls):
        rows = launch(script, folder, *words(QUICK), "--dataset", path, *flags)
        return rows, load_nets(folder)

    return run


# -------------------------------------------------------------------------- whole runs, literally

COMMON = {
    "dtype": "float64",
    "partition": "natural",
    "min_size": 8,
    "clients": 6,
    "clients_per_round": 4,
    "rounds": 3,
    "epochs": 2,
    "batch_size": 5,
    "lr": 0.07,
    "momentum": 0.6,
    "weight_decay": 0.01,
    "seed": 7,
    "trials": 1,
    "jobs": 1,
    "device": "cpu",
    "model": "lenet5",
    "eval_every": 2,
    "rho": 0.8,
    "art_alpha": 0.3,
    "art_beta": 0.6,
    "quantile": 0.4,
    "w_small": 0.2,
    "w_large": 0.9,
}
SCRIPT_CASES = {
    "group means": {
        "method": "fedac",
        "base": "fedprox",
        "mu": 0.3,
        "reduction": "group",
        "augment": "crop-flip-rotate",
        "trials": 2,
    },
    "moon": {"method": "fedac", "base": "moon", "mu": 2.0, "augment": "crop-flip"},
    "base": {"method": "base", "base": "moon", "mu": 2.0, "augment": "crop-flip-rotate"},
    "solo": {"method": "fedac", "base": "solo", "solo_epochs": 7, "clients_per_round": 6},
}
STUDY_CASES = {
    "pooled": {
        "method": "fedac",
        "base": "fedprox",
        "mu": 0.3,
        "features": "pooled",
        "scope": "class",
        "reduction": "group",
        "augment": "crop-flip-rotate",
        "trials": 2,
    },
    "encoder": {
        "method": "fedac",
        "features": "encoder",
        "warmup": 2,
        "scope": "class",
        "projection": True,
    },
    "random groups": {"method": "random-groups", "projection": True, "augment": "crop-flip"},
    "random by class": {"method": "random-classes", "base": "fedprox", "mu": 0.3, "w_small": 0.0},
    "base": {"method": "base", "base": "moon", "mu": 2.0, "features": "pooled"},
    "solo": {
        "method": "fedac",
        "base": "solo",
        "solo_epochs": 7,
        "clients_per_round": 6,
        "scope": "class",
    },
}


@pytest.mark.parametrize("case", SCRIPT_CASES)
def test_the_script_equals_the_loops(case, arrays, path, tmp_path, monkeypatch):
    """Weights to 1e-9, every column, what Fig. 6 is drawn from, and what is drawn."""
    drawn = {}
    monkeypatch.setattr(report, "plot", draw_nothing)
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: drawn.update({path.name: self}))
    flags = COMMON | SCRIPT_CASES[case]
    rows = launch(fedac_art, tmp_path, f"--dataset={path}", *words(flags))
    states = load_states(tmp_path)
    compare_with_loops(arrays, flags, rows, states, study=False)
    if flags["trials"] == 1:
        check_figure(drawn["tsne.png"], states["-", flags["method"], 0]["hidden"])


@pytest.mark.parametrize("case", STUDY_CASES)
def test_the_study_equals_the_loops(case, arrays, path, tmp_path, quiet):
    flags = COMMON | {"flip": 0.2} | STUDY_CASES[case]
    rows = launch(controls, tmp_path, f"--dataset={path}", *words(flags))
    compare_with_loops(arrays, flags, rows, load_states(tmp_path), study=True)


def compare_with_loops(arrays, flags, rows, states, study):
    fields = controls.Config.__dataclass_fields__
    flags = {name: field.default for name, field in fields.items()} | flags
    for trial in range(flags["trials"]):
        loops = Loops(arrays, flags, trial, study)
        theta = loops.whole_run()
        state = states["-", flags["method"], trial]
        got = state["theta"]
        if flags["base"] == "solo":
            got = torch.stack([state["base"]["nets"][m] for m in range(6)])
            theta = torch.stack([loops.nets[m] for m in range(6)])
        assert (got - theta).abs().max() < 1e-9
        assert (got - loops.initial(loops.head)).abs().max() > 1e-2

        of_trial = [row for row in rows if int(row["trial"]) == trial]
        for row, wanted in zip(of_trial, loops.rows, strict=True):
            assert set(row) >= set(wanted) | {"seconds", "trial"}
            for column in set(row) - {"seconds", "trial", "clock", "waiting"}:
                check_cell(column, row[column], wanted.get(column, ""))
        hidden = state["hidden"]
        assert hidden["clients"] == loops.shown_clients
        assert len(set(hidden["clients"])) == 3
        np.testing.assert_array_equal(hidden["labels"], loops.labels)
        np.testing.assert_allclose(hidden["vectors"], loops.vectors, atol=1e-5)
    if flags["clients_per_round"] < 6:
        draws = [loops.streams("select", t).permutation(6)[:4] for t in range(3)]
        first, second, third = map(set, draws)
        assert first & third - second  # somebody returns after a gap


def check_cell(column, got, want):
    """One cell of metrics.csv; a nan is an empty cell."""
    if isinstance(want, str):
        assert got == want, column
    elif math.isnan(want):
        assert got == "", column
    else:
        tolerance = 1e-5 if column == "silhouette" else 1e-9
        if column.endswith("_mb"):
            tolerance = 1e-6  # rounded
        assert float(got) == pytest.approx(want, rel=tolerance, abs=tolerance), column


def check_figure(figure, hidden):
    """The artists: a panel is the t-SNE of one client's vectors, coloured by class."""
    from sklearn.manifold import TSNE

    panels = [axis for axis in figure.axes if axis.collections]
    assert len(panels) == 3
    vectors = hidden["vectors"].numpy()
    for client, z, panel in zip(hidden["clients"], vectors, panels, strict=True):
        tsne = TSNE(perplexity=min(30, len(z) / 2), method="exact", init="random", random_state=0)
        dots = panel.collections[0]
        points = tsne.fit_transform(z / np.abs(z).max())
        np.testing.assert_allclose(dots.get_offsets().data, points, rtol=1e-5)
        assert f"client {client}" in panel.get_title()
        colours = {}
        for colour, label in zip(dots.get_facecolors(), hidden["labels"].tolist(), strict=True):
            colours.setdefault(label, set()).add(tuple(colour))
        assert all(len(of_label) == 1 for of_label in colours.values())
        assert len(set.union(*colours.values())) == 3


# --------------------------------------------------------------------------------- the clustering


def blobs(n=90, d=9, seed=0) -> np.ndarray:
    """Clumped uint8 rows (n, d)."""
    rng = np.random.default_rng(seed)
    centres = rng.integers(0, 256, (6, d))
    x = centres[rng.integers(6, size=n)] + rng.integers(-40, 41, (n, d))
    return np.clip(x, 0, 255).astype(np.uint8)


def exact_art(x, rho, alpha, beta):
    """Section 4.1 row by row in exact fractions: (clusters (n,), templates)."""
    rho, alpha, beta = Fraction(rho), Fraction(alpha), Fraction(beta)
    templates = []
    clusters = []
    for row in x:
        coded = [Fraction(int(v), 255) for v in row]
        coded += [1 - v for v in coded]
        best = None
        for j, w in enumerate(templates):
            meet = sum(map(min, coded, w))
            choice = meet / (alpha + sum(w))
            if meet / len(row) >= rho and (best is None or choice > best[0]):
                best = (choice, j)
        if best is None:
            clusters.append(len(templates))
            templates.append(coded)
        else:
            j = best[1]
            clusters.append(j)
            w = templates[j]
            templates[j] = [
                beta * min(a, b) + (1 - beta) * b for a, b in zip(coded, w, strict=True)
            ]
    return np.array(clusters), np.array(templates, dtype=float)


def same_partition(a, b) -> bool:
    """Whether two labellings group the samples alike."""
    return len(set(zip(a, b, strict=True))) == len(set(a)) == len(set(b))


@pytest.mark.parametrize("kind", ["bytes", "float64", "float32"])
@pytest.mark.parametrize("beta", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("rho", [0.0, 0.5, 0.75, 0.875, 1.0])
def test_fuzzy_art_equals_exact_fractions(rho, beta, kind):
    x = blobs(n=50, seed=int(rho * 8))
    x[25:30] = x[:5]  # at rho 1 copies share a cluster
    clusters, templates = exact_art(x, rho, 0.01, beta)
    if kind == "bytes":
        got, w = fuzzy_art(x, rho, alpha=0.01, beta=beta)
        w = w / 255
    else:
        got, w = fuzzy_art((x / 255).astype(kind), rho, alpha=0.01, beta=beta)
    np.testing.assert_array_equal(got, clusters)
    np.testing.assert_allclose(w, templates, atol=1e-6)
    if rho == 0.75:
        assert 3 < len(templates) < 40


@pytest.mark.parametrize("alpha", [0.01, 0.2, 5.0])
def test_the_choice_parameter_is_in_units_of_one(alpha):
    x = blobs(n=60, seed=15)
    want, _ = exact_art(x, 0.5, alpha, 1.0)
    for rows in (x, x / 255):
        np.testing.assert_array_equal(fuzzy_art(rows, 0.5, alpha)[0], want)


@pytest.mark.parametrize(
    "x, rho, word",
    [
        (np.array([[0.0, 255.0]]), 0.5, "floats in"),
        (np.array([[-0.1, 1.0]]), 0.5, "floats in"),
        (np.array([[0.5, np.nan]]), 0.5, "floats in"),
        (np.array([[0, 200]]), 0.5, "floats in"),
        (np.zeros((3, 4, 4, 1)), 0.5, "flatten"),
        (torch.zeros(3, 16), 0.5, "flatten"),
        (np.zeros((3, 16)), 60, "rho"),
        (np.zeros((3, 16)), math.nan, "rho"),
    ],
)
def test_fuzzy_art_refuses_in_one_line_what_it_would_read_wrongly(x, rho, word):
    with pytest.raises(ValueError, match=word) as error:
        fuzzy_art(x, rho)
    assert "\n" not in str(error.value)


def test_a_case_worked_by_hand():
    """d = 2, in units of 1/255: a is (255, 0, 0, 255), b (204, 51, 51, 204), |a ^ b| / |I| = .8."""
    x = np.array([[255, 0], [204, 51]], dtype=np.uint8)
    clusters, w = fuzzy_art(x, 0.8)
    assert clusters.tolist() == [0, 0]
    assert w.tolist() == [[204, 0, 0, 204]]
    clusters, w = fuzzy_art(x, 0.81)
    assert clusters.tolist() == [0, 1]
    assert w.tolist() == [[255, 0, 0, 255], [204, 51, 51, 204]]


def test_ties_go_to_the_oldest_and_the_largest_choice_wins():
    x = np.array([[0], [255], [250]], dtype=np.uint8)
    assert fuzzy_art(x, 0.9)[0].tolist() == [0, 1, 1]
    x = np.array([[0, 255], [255, 0], [128, 128]], dtype=np.uint8)  # the third is between them
    assert fuzzy_art(x, 0.5)[0].tolist() == [0, 1, 0]
    assert fuzzy_art(x[[1, 0, 2]], 0.5)[0].tolist() == [0, 1, 0]


@pytest.mark.parametrize("rho", [0.3, 0.7, 0.9])
def test_templates_are_the_minimum_over_members(rho):
    x = blobs(n=100, seed=3)
    coded = np.concatenate([x, 255 - x], 1)
    clusters, w = fuzzy_art(x, rho)
    assert set(clusters) == set(range(len(w)))
    for j, template in enumerate(w):
        np.testing.assert_array_equal(template, coded[clusters == j].min(0))
        assert template.sum(dtype=int) / (255 * x.shape[1]) >= rho


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_templates_only_shrink_and_stay_in_the_unit_cube(beta):
    x = blobs(n=40, seed=4)
    before = np.empty((0, 18))
    for n in range(1, 41):
        _, w = fuzzy_art(x[:n], 0.6, beta=beta)
        assert 0 <= w.min() <= w.max() <= 255
        assert (w[: len(before)] <= before).all()
        before = w.astype(float)


def test_real_images_give_clusters_of_useful_size(real_data):
    """CIFAR-10: the default rho gives clusters of several samples, the textbook's singletons."""
    with np.load(real_data / "cifar10_jpeg.npz") as file:
        x = file["x_train"]
        y = file["y_train"]
    chosen = np.random.default_rng(0).permutation(len(x))[:1000]
    x = x[chosen].reshape(1000, -1)
    count = {0.35: 0, 0.9: 0}
    for rho in count:
        for c in range(10):
            count[rho] += len(fuzzy_art(x[y[chosen] == c], rho)[1])
    assert 3 < 1000 / count[0.35] < 20
    assert 1000 / count[0.9] < 1.3


def make_federation(data: Data, script=fedac_art, **flags):
    """(config, federation) of two clients."""
    flags = {"clients": 2, "clients_per_round": 2, "device": "cpu"} | flags
    config = script.Config(**flags)
    return config, config.federation(data, common.Streams(0))


def few_digits(n=40, side=0) -> Data:
    data = load_data("digits", side=side)
    test = (data.x_test, data.y_test)
    return Data(data.x_train[:n], data.y_train[:n], *test, data.classes, data.mean, data.std)


def test_classes_never_mix_and_the_order_is_random():
    x = fedac_art.pixels(load_data("digits"))[:300]
    y = load_data("digits").y_train[:300].numpy()
    clusters = fedac_art.cluster_client(x, y, np.random.default_rng(0), 0.6)
    assert set(clusters) == set(range(clusters.max() + 1))
    assert len(set(zip(clusters, y, strict=True))) == clusters.max() + 1
    order = np.random.default_rng(0).permutation(300)
    for c in range(10):
        samples = order[y[order] == c]
        alone, _ = fuzzy_art(x[samples], 0.6)
        assert same_partition(alone, clusters[samples])
    other = fedac_art.cluster_client(x, y, np.random.default_rng(1), 0.6)
    assert not same_partition(other, clusters)


def test_clusters_of_different_clients_never_mix():
    config, fl = make_federation(load_data("digits"))
    fl.shards = [np.arange(0, 300), np.arange(300, 500)]
    x = fedac_art.pixels(fl.data)
    clusters = controls.cluster_clients(config, fl, x, 0.6, 0)
    assert (clusters[500:] == 0).all()
    ids = clusters[:500]
    assert set(ids) == set(range(1, ids.max() + 1))
    assert not set(ids[:300]) & set(ids[300:])


@pytest.mark.parametrize(
    ("features", "channels", "rho"),
    [
        ("pixels", 3, 0.35),
        ("pooled", 3, 0.4),
        ("encoder", 3, 0.7),
        ("pixels", 1, 0.6),
        ("pooled", 1, 0.6),
        ("encoder", 1, 0.7),
    ],
)
def test_default_vigilance(features, channels, rho):
    data = SimpleNamespace(x_train=torch.zeros(1, 4, 4, channels))
    for given, want in ((-1.0, rho), (0.0, 0.0), (0.9, 0.9)):
        config = controls.Config(features=features, rho=given)
        assert controls.vigilance(config, data) == want
        if features == "pixels":
            assert fedac_art.vigilance(config, data) == want


# ----------------------------------------------------------------------------- groups and weights


def test_threshold_is_the_sample_weighted_quantile():
    rng = np.random.default_rng(0)
    for _ in range(50):
        clusters = rng.integers(0, rng.integers(1, 12), 60)
        sizes = np.bincount(clusters)[clusters]
        for quantile in (0.0, 0.25, 0.5, 0.9, 1.0):
            small = small_clusters(clusters, quantile)
            assert small.mean() <= quantile  # as few as asked, ...
            assert not small.any() or sizes[small].max() < sizes[~small].min()
            larger = sizes[sizes > sizes[~small].min()]
            if len(larger):
                assert (sizes < larger.min()).mean() > quantile  # ... one size more: too many
    clusters = np.concatenate([np.arange(29), np.full(71, 29)])
    assert small_clusters(clusters, 0.29).sum() == 29  # 0.29 * 100 is 28.999..


def test_small_clusters_by_client_and_by_class():
    """Client 0: class 0 in clusters of 6 and 2, class 1 of 2 and 1; client 1: one of 3."""
    clusters = np.array([1] * 6 + [2] * 2 + [3] * 2 + [4] + [5] * 3 + [0])
    labels = np.array([0] * 8 + [1] * 3 + [0] * 3 + [1])
    fl = SimpleNamespace(shards=[np.arange(11), np.arange(11, 14)], labels=labels)
    by_client = controls.small_clusters(clusters, controls.sharing(fl, "client"), 0.5)
    assert np.flatnonzero(by_client).tolist() == [6, 7, 8, 9, 10]  # the whole rare class
    by_class = controls.small_clusters(clusters, controls.sharing(fl, "class"), 0.5)
    assert np.flatnonzero(by_class).tolist() == [6, 7, 10]


@pytest.mark.parametrize("scope", ["client", "class"])
def test_random_groups_have_the_same_sizes(scope):
    rng = np.random.default_rng(1)
    owner = rng.integers(-1, 4, 400)
    labels = rng.integers(0, 3, 400)
    P1 = rng.random(400) < 0.3
    P1[owner < 0] = False
    fl = SimpleNamespace(shards=[np.flatnonzero(owner == m) for m in range(4)], labels=labels)
    groups = controls.sharing(fl, scope)
    assert sorted(np.concatenate(groups)) == np.flatnonzero(owner >= 0).tolist()
    drawn = controls.draw_groups(P1, groups, common.Streams(1))
    for m in range(4):
        for c in range(3):
            cell = (owner == m) & (labels == c) if scope == "class" else owner == m
            assert drawn[cell].sum() == P1[cell].sum()
    assert not np.array_equal(drawn, P1)
    again = controls.draw_groups(P1, groups, common.Streams(1))
    np.testing.assert_array_equal(drawn, again)
    of_other_trial = controls.draw_groups(P1, groups, common.Streams(1, trial=1))
    assert not np.array_equal(drawn, of_other_trial)


def test_weights_have_mean_one_and_the_asked_ratio():
    in_P1 = np.array([True, False, False, False])
    got = weigh_samples(in_P1, 0.5, 1.0)
    np.testing.assert_allclose(got, [4 / 7, 8 / 7, 8 / 7, 8 / 7])
    np.testing.assert_array_equal(weigh_samples(in_P1, 1.0, 1.0), np.ones(4))
    np.testing.assert_array_equal(weigh_samples(~in_P1[1:], 0.0, 1.0), np.ones(3))


def test_group_means_by_hand():
    """A batch with P1 = {0} and P2 = {1, 2}, one of P2 only, and a short one."""
    in_P1 = np.array([[True, False, False], [False, False, True], [True, True, True]])
    is_sample = np.array([[True, True, True], [True, True, False], [True, False, False]])
    got = weigh_groups(in_P1, is_sample, 0.5, 1.0)
    by_hand = got * 1.5 / np.array([[3], [2], [1]])  # alpha + beta, 1 / batch size
    np.testing.assert_allclose(by_hand[0], [0.5, 0.5, 0.5])  # alpha / 1, beta / 2, beta / 2
    np.testing.assert_allclose(by_hand[1, :2], [0.5, 0.5])  # L1 is 0
    np.testing.assert_allclose(by_hand[2, :1], [0.5])


@pytest.mark.parametrize("reduction", ["sample", "group"])
def test_a_client_whose_samples_would_all_have_weight_0_learns_from_all(reduction):
    config = fedac_art.Config(w_small=0.5, w_large=0.0, reduction=reduction)
    fl = SimpleNamespace(shards=[np.arange(3), np.arange(3, 5)])
    P1 = np.array([True, False, False, False, False])
    batches = [np.array([[0, 1, 2]]), np.array([[4, 3, -1]])]
    first, second = fedac_art.weigh_clients(config, fl, np.array([0, 1]), batches, P1)
    np.testing.assert_allclose(first, [[3, 0, 0]])
    np.testing.assert_array_equal(second[0, :2], [1, 1])


# ----------------------------------------------------------------------------------- the training


@pytest.fixture(scope="module")
def default_run(path, tmp_path_factory):
    """(rows, {method: theta}, folder) of the study's four arms."""
    folder = tmp_path_factory.mktemp("default") / "run"
    rows = launch(controls, folder, *words(QUICK), "--dataset", path, "--w-small", "0")
    return rows, load_nets(folder), folder


def test_run_writes_rows_measures_and_figures(default_run):
    rows, nets, folder = default_run
    assert [(row["method"], row["round"]) for row in rows] == [
        (arm, t) for arm in controls.ARMS for t in "12"
    ]
    for name in ("tsne.png", "partition.png"):
        assert (folder / name).read_bytes()[:4] == b"\x89PNG"
    assert (folder / "summary.json").exists()
    assert len({tuple(theta.tolist()) for theta in nets.values()}) == 4
    with open(folder / "measures.csv") as file:
        measured = {row["method"]: row for row in csv.DictReader(file)}
    names = list(measured["base"])[3:]
    assert names[0] == "clusters"
    assert names[-2:] == ["spearman", "silhouette"]
    assert len(names) == 11
    for arm in controls.ARMS:
        first, last = (row for row in rows if row["method"] == arm)
        for name in names:
            got = first[name] or last[name]
            assert float(got) == pytest.approx(float(measured[arm][name]))
            assert bool(last[name]) == (name in names[-2:])


def test_the_script_trains_what_the_study_trains(tmp_path, default_run, quick):
    _, nets = quick(tmp_path / "run", "--w-small", "0", script=fedac_art)
    assert set(nets) == {"fedac", "base"}
    for arm, theta in nets.items():
        assert torch.equal(theta, default_run[1][arm])


def test_clusters_are_those_of_the_flipped_labels(tmp_path, quick):
    """Two shares of wrong labels in one folder, each as in a folder of its own."""
    both, _ = quick(tmp_path / "both", "--flip", "0", "0.4", "--method", "fedac")
    for flip in ("0", "0.4"):
        alone, _ = quick(tmp_path / flip, "--flip", flip, "--method", "fedac")
        beside = [row for row in both if row["setting"] == f"flip={float(flip)}"]
        assert [row["clusters"] for row in beside] == [row["clusters"] for row in alone]
        assert [row["accuracy"] for row in beside] == [row["accuracy"] for row in alone]
    assert len({row["clusters"] for row in both if row["round"] == "1"}) == 2


def test_the_control_by_class_keeps_what_random_groups_change(default_run):
    """At --scope client whole (client, class) cells lie in P1."""
    first = [row for row in default_run[0] if row["round"] == "1"]
    cells = {row["method"]: float(row["whole_cells"]) for row in first}
    assert cells["fedac"] == cells["base"] == cells["random-classes"]
    assert cells["fedac"] > 3 * cells["random-groups"]


def test_both_controls_are_one_where_thresholds_are_by_class(tmp_path, quick):
    arms = ["--method", "random-groups", "random-classes"]
    _, nets = quick(tmp_path / "run", "--scope", "class", "--rounds", "1", *arms)
    assert torch.equal(nets["random-groups"], nets["random-classes"])


def test_equal_weights_are_the_base_bit_for_bit_but_not_of_group_means(
    tmp_path, default_run, quick
):
    base = default_run[1]["base"]
    _, nets = quick(tmp_path / "sums", "--w-small", "1")
    assert len(nets) == 4
    assert all(torch.equal(theta, base) for theta in nets.values())
    _, nets = quick(
        tmp_path / "means", "--w-small", "1", "--method", "fedac", "--reduction", "group"
    )
    assert not torch.equal(nets["fedac"], base)


def test_sweeps_train_the_base_once_and_show_it_in_every_setting(tmp_path, path, monkeypatch):
    points = pd.DataFrame({"x": [0, 1], "y": [0, 1], "label": [0, 1], "client": [4, 4]})
    monkeypatch.setattr(report, "plot", draw_nothing)
    monkeypatch.setattr(fedac_art, "embed", lambda **hidden: points)
    flags = ["--dataset", path, "--w-small", "1", "0", "--rounds", "1"]
    folder = tmp_path / "run"
    rows = launch(fedac_art, folder, *words(QUICK), *flags)
    assert sorted(method for _, method, _ in load_states(folder)) == ["base", "fedac", "fedac"]
    shown = [(row["setting"], row["method"]) for row in rows]
    assert shown == [(f"w_small={w}", arm) for w in ("1.0", "0.0") for arm in ("fedac", "base")]
    base = [{**row, "setting": ""} for row in rows if row["method"] == "base"]
    assert base[0] == base[1]
    for w in ("1.0", "0.0"):
        assert (folder / f"tsne-w_small={w}.png").exists()


@pytest.mark.parametrize("features", ["pixels", "encoder"])
@pytest.mark.parametrize(("arm", "base"), [("base", "fedavg"), ("fedac", "solo")])
def test_what_an_arm_does_not_read_changes_nothing(arm, base, features, quick, tmp_path):
    """The flags that the study leaves out of an arm's identity."""
    flags = {"method": arm, "base": base, "features": features, "solo_epochs": 4}
    changed = {"epochs": 2, "warmup": 2, "solo_epochs": 9, "w_small": 0.1, "reduction": "group"}
    read = controls.Config(**flags).results_depend_on()
    unread = {name: value for name, value in changed.items() if name not in read}
    assert bool(unread) == ((arm, features) != ("fedac", "encoder"))
    _, first = quick(tmp_path / "first", *words(flags))
    _, second = quick(tmp_path / "second", *words(flags | unread))
    assert torch.equal(first[arm], second[arm])


def test_the_scripts_base_reads_nothing_of_the_curriculum(quick, tmp_path):
    changed = {"rho": 0.1, "art_alpha": 3.0, "art_beta": 0.5, "quantile": 0.1, "w_small": 0.1}
    changed |= {"reduction": "group", "solo_epochs": 9}
    read = fedac_art.Config(method="base").results_depend_on()
    assert not set(changed) & set(read)
    _, first = quick(tmp_path / "first", "--method", "base", script=fedac_art)
    _, second = quick(tmp_path / "second", *words({"method": "base"} | changed), script=fedac_art)
    assert torch.equal(first["base"], second["base"])


# ------------------------------------------------------------------------------------------ bases


def test_moon_equals_fedavg_in_its_first_round_only(tmp_path, quick):
    nets = {}
    for rounds in ("1", "2"):
        flags = ["--method", "fedac", "--rounds", rounds]
        for base in ("moon", "fedavg"):
            folder = tmp_path / (base + rounds)
            run = quick(folder, *flags, "--base", base, "--projection", script=fedac_art)
            nets[base, rounds] = run[1]["fedac"]
    assert torch.equal(nets["moon", "1"], nets["fedavg", "1"])
    assert not torch.equal(nets["moon", "2"], nets["fedavg", "2"])


def test_fedprox_pulls_and_mu_0_is_fedavg(tmp_path, default_run, quick):
    flags = ["--base", "fedprox", "--w-small", "0", "--method", "fedac"]
    _, far = quick(tmp_path / "far", *flags, "--mu", "1", script=fedac_art)
    _, zero = quick(tmp_path / "zero", *flags, "--mu", "0", script=fedac_art)
    assert torch.equal(zero["fedac"], default_run[1]["fedac"])
    assert not torch.equal(far["fedac"], zero["fedac"])


def test_solo_trains_its_hundred_epochs_and_sends_nothing(tmp_path, quick):
    for rounds in (1, 3, 7, 10, 100):
        config = fedac_art.Config(base="solo", rounds=rounds, epochs=10)
        assert sum(fedac_art.local_epochs(config, t) for t in range(rounds)) == 100
    assert fedac_art.local_epochs(fedac_art.Config(base="moon", epochs=7), 3) == 7
    flags = ["--base", "solo", "--solo-epochs", "3", "--method", "base"]
    rows, _ = quick(tmp_path / "run", *flags, script=fedac_art)
    n = sum(NATURAL)
    assert [int(row["samples"]) for row in rows] == [n, 3 * n]
    for row in rows:
        assert float(row["received_mb"]) == float(row["sent_mb"]) == 0


# ----------------------------------------------------------------- augmentation, hidden vectors


def normalise(x):
    """(normalised images, black) of uint8 images, with other moments in each channel."""
    mean = torch.tensor([100.0, 50, 30])
    std = torch.tensor([60.0, 70, 80])
    return (torch.as_tensor(x) - mean) / std, -mean / std


def test_augmentation_crops_and_flips_each_image_by_its_own_draw():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (2, 3, 16, 16, 3), dtype=np.uint8)
    shift = rng.integers(-4, 5, (2, 5, 2))
    flip = rng.random((2, 5)) < 0.5
    extra = {"shift": shift, "flip": flip, "angle": np.zeros((2, 5)), "known": np.ones(2)}
    extra = {name: torch.as_tensor(values) for name, values in extra.items()}
    images, black = normalise(x)
    got = fedac_art.change_images(images, extra, black)  # the batch is shorter than the schedule
    for k in range(2):
        for b in range(3):
            top, left = shift[k, b] + 4
            padded = np.pad(x[k, b], ((4, 4), (4, 4), (0, 0)))
            want = padded[top : top + 16, left : left + 16]
            if flip[k, b]:
                want = want[:, ::-1].copy()
            np.testing.assert_allclose(got[k, b], normalise(want)[0], atol=1e-5)


def test_rotation_turns_about_the_centre():
    x = np.random.default_rng(0).integers(0, 256, (1, 2, 16, 16, 3), dtype=np.uint8)
    images, black = normalise(x)
    extra = {"shift": torch.zeros(1, 2, 2), "flip": torch.zeros(1, 2, dtype=torch.bool)}
    extra["angle"] = torch.tensor([[0.0, np.pi / 2]])
    turned = fedac_art.change_images(images, extra, black)
    torch.testing.assert_close(turned[0, 0], images[0, 0])
    quarters = []
    for turns in (1, 3):
        rotated = torch.rot90(images[0, 1], turns, (0, 1))
        quarters.append(torch.allclose(turned[0, 1], rotated, atol=1e-5))
    assert sorted(quarters) == [False, True]


def test_draws_reach_every_place_and_angle():
    drawn = fedac_art.draw_changes("crop-flip", (60, 60), np.random.default_rng(0))
    assert drawn["shift"].shape == (60, 60, 2)
    assert set(drawn["shift"].flatten().tolist()) == set(range(-4, 5))
    assert 0.45 < drawn["flip"].mean() < 0.55
    assert not np.array_equal(drawn["shift"][..., 0], drawn["shift"][..., 1])
    assert not drawn["angle"].any()
    turned = fedac_art.draw_changes("crop-flip-rotate", (60, 60), np.random.default_rng(0))
    np.testing.assert_array_equal(turned["shift"], drawn["shift"])
    angle = np.degrees(turned["angle"])
    assert -15 <= angle.min() < -14
    assert 14 < angle.max() <= 15


def test_features_are_the_clients_own_raw_images():
    data = few_digits()
    run = SimpleNamespace(data=lambda: data)
    config, fl = make_federation(data, controls)
    pixels = controls.features(config, fl, run)
    np.testing.assert_array_equal(pixels, data.x_train.numpy().reshape(40, -1))

    config, fl = make_federation(data, controls, features="encoder", epochs=1, warmup=1)
    encoder = controls.features(config, fl, run)
    assert encoder.shape == (40, 84)
    assert encoder.dtype == np.uint8
    for shard in fl.shards:  # a feature spans the bytes on every client, or is constant there
        assert set(encoder[shard].min(0)) == {0}
        assert {255} <= set(encoder[shard].max(0)) <= {0, 255}

    wide = few_digits(side=32)
    config, fl = make_federation(wide, controls, features="pooled")
    pooled = controls.features(config, fl, run)
    fields = wide.x_train.numpy().reshape(40, 8, 4, 8, 4).astype(float).mean((2, 4))
    assert pooled.dtype == np.uint8
    assert np.abs(pooled - fields.reshape(40, 64)).max() <= 0.5


@pytest.mark.parametrize(("name", "size"), [("resnet9", 512), ("lenet5", 84)])
def test_hidden_vectors_are_those_before_the_head(name, size):
    data = few_digits(6, side=32)
    model = build_model(name, data, dtype=torch.float64)
    theta = model.init(0)
    x = data.images("train", torch.float64)
    z = fedac_art.hidden_vectors(model, theta, x)
    assert z.shape == (6, size)
    logits = common.predict(model, theta, x, np.arange(6))
    torch.testing.assert_close(model.bind(theta[None]).head(z[None])[0], logits)


OWN_NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, channels, side, classes):
        super().__init__(
            nn.Flatten(), nn.Linear(channels * side**2, 20), nn.Tanh(), nn.Linear(20, classes)
        )

class Text(nn.Sequential):
    def __init__(self, channels, side, classes):
        super().__init__(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, classes))
"""


def test_hidden_vectors_of_somebodys_own_net_are_its_logits(tmp_path):
    """Two nets, more images than pass at once, against the layers by hand."""
    (tmp_path / "mine.py").write_text(OWN_NET)
    data = few_digits(1100)
    model = build_model(f"{tmp_path}/mine.py:Net", data, dtype=torch.float64)
    x = data.images("train", torch.float64)
    flat = x.flatten(1)
    for seed in (0, 1):
        theta = model.init(seed)
        sizes = [20 * 784, 20, 200, 10]
        w_1, b_1, w_2, b_2 = theta.split(sizes)
        logits = torch.tanh(flat @ w_1.view(20, 784).T + b_1) @ w_2.view(10, 20).T + b_2
        z = fedac_art.hidden_vectors(model, theta, x)
        torch.testing.assert_close(z, logits)


def test_somebodys_own_net_is_encoder_and_net(tmp_path, quick):
    """FedAvg by hand is the encoder; Fig. 6 shows the logits of three clients' nets."""
    (tmp_path / "mine.py").write_text(OWN_NET)
    flags = ["--model", f"{tmp_path}/mine.py:Net", "--features", "encoder", "--warmup", "1"]
    rows, nets = quick(tmp_path / "run", *flags, "--rho", "0.5", "--method", "fedac", "base")
    assert not torch.equal(nets["fedac"], nets["base"])
    assert len({row["clusters"] for row in rows if row["round"] == "1"}) == 1
    for state in load_states(tmp_path / "run").values():
        vectors = state["hidden"]["vectors"]
        assert vectors.shape == (3, 30, 3)
        assert not torch.equal(vectors[0], vectors[1])


def test_encoder_with_dropout_depends_on_no_earlier_draw():
    data = few_digits(16, side=32)
    run = SimpleNamespace(data=lambda: data)
    flags = {"model": "alexnet", "width": 16, "features": "encoder", "epochs": 1, "warmup": 1}
    config, fl = make_federation(data, controls, min_size=1, **flags)
    _, first = controls.warm_up(config, fl, run)
    torch.rand(3)
    _, second = controls.warm_up(config, fl, run)
    assert torch.equal(first, second)


def test_chance_is_that_of_groups_which_share_a_threshold():
    """Class 0 has a sample of three in P1 under either order; class 1, one cluster, none."""
    clusters = np.array([[1, 2, 2, 3, 3, 3], [2, 1, 2, 3, 3, 3]])
    fl = SimpleNamespace(shards=[np.arange(6)], labels=np.array([0, 0, 0, 1, 1, 1]))
    P1 = np.array([1, 0, 0, 1, 1, 1], dtype=bool)  # of a control: a whole cell is in it
    nobody = np.zeros(6, dtype=bool)
    config = controls.Config(scope="class")
    got = controls.measure_clusters(config, fl, clusters, P1, nobody)
    assert got["small_by_class"] == pytest.approx(1 / 6)
    assert got["agreement"] == pytest.approx(4 / 6)
    assert got["chance"] == pytest.approx((3 * (1 / 9 + 4 / 9) + 3) / 6)
    assert got["whole_cells"] == 0.5
    assert (got["noisy_small"], got["noisy_large"]) == (0, 0)
    config = controls.Config(scope="class", quantile=0.0)
    none = controls.measure_clusters(config, fl, clusters, P1, ~nobody)
    assert math.isnan(none["noisy_small"])
    assert none["noisy_large"] == 1
    assert none["small_by_client"] == 0


def test_flipped_labels_are_wrong_and_as_many_as_asked():
    data = load_data("digits")
    noisy, flipped = controls.flip_labels(data, 0.2, np.random.default_rng(0))
    np.testing.assert_array_equal((noisy.y_train != data.y_train).numpy(), flipped)
    assert flipped.sum() == round(0.2 * len(flipped))
    assert set(noisy.y_train.tolist()) == set(range(10))
    same, _ = controls.flip_labels(data, 0.0, np.random.default_rng(0))
    assert torch.equal(same.y_train, data.y_train)
    assert noisy.images("train") is data.images("train")  # normalised once


# ----------------------------------------------------------------------------------- command line


def test_resume_gives_the_same_rows_and_weights(tmp_path, monkeypatch, quick):
    flags = [
        "--method",
        "fedac",
        "random-classes",
        "--base",
        "moon",
        "--augment",
        "crop-flip-rotate",
    ]
    whole, nets = quick(tmp_path / "whole", *flags)
    record = experiment.Run.record

    def die(self, t, *args, **columns):
        if self.method == "random-classes" and t == 1:
            raise SystemExit
        record(self, t, *args, **columns)

    monkeypatch.setattr(experiment.Run, "record", die)
    with pytest.raises(SystemExit):
        quick(tmp_path / "killed", *flags)
    monkeypatch.setattr(experiment.Run, "record", record)
    resumed, again = quick(tmp_path / "killed", *flags, "--resume")
    assert without_seconds(resumed) == without_seconds(whole)
    assert all(torch.equal(nets[arm], again[arm]) for arm in nets)


def test_jobs_change_no_bit(tmp_path, default_run, quick):
    flags = ["--w-small", "0", "--jobs", "2", "--method", "random-classes", "fedac"]
    rows, nets = quick(tmp_path / "run", *flags)
    wanted = []
    for arm in ("random-classes", "fedac"):
        wanted += [row for row in default_run[0] if row["method"] == arm]
    assert without_seconds(rows) == without_seconds(wanted)
    assert all(torch.equal(nets[arm], default_run[1][arm]) for arm in nets)


def refuse(script, flags, capsys) -> str:
    with pytest.raises(SystemExit) as stop:
        script.main(flags)
    out = capsys.readouterr()
    assert stop.value.code == 2
    assert out.err.count("\n") == 1
    assert out.out == ""
    return out.err


@pytest.mark.parametrize(
    "flags",
    [
        "--w-small 0 --w-large 0",
        "--w-small -1",
        "--rho 1.5",
        "--rho -0.5",
        "--art-alpha 0",
        "--art-beta 1.1",
        "--quantile nan",
        "--base solo --solo-epochs 1 --rounds 2",
        "--base solo --clients-per-round 5",
        "--dataset shakespeare",
        "--model lstm",
        "--method random",
        "--reduction mean",
    ],
)
@pytest.mark.parametrize("script", [fedac_art, controls])
def test_wrong_flags_give_one_line_and_status_2(script, flags, capsys, tmp_path):
    refuse(script, [*flags.split(), "--out", str(tmp_path / "x")], capsys)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "flags", ["--flip 0.2 --hold-out 0.2", "--flip 0.2 --per-client", "--features hog"]
)
def test_wrong_flags_of_the_study(flags, capsys, tmp_path):
    refuse(controls, [*flags.split(), "--out", str(tmp_path / "x")], capsys)
    assert not (tmp_path / "x").exists()


def test_a_net_without_head_and_a_text_are_refused_before_anything_is_written(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(OWN_NET)
    x = np.arange(240).reshape(80, 3) % 9
    y = np.arange(80) % 4
    np.savez(tmp_path / "text.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    out = ["--out", str(tmp_path / "out")]
    head = ["--projection", "--model", f"{tmp_path}/mine.py:Net"]
    assert "projection head" in refuse(fedac_art, [*head, *out], capsys)
    text = ["--dataset", f"{tmp_path}/text.npz", "--model", f"{tmp_path}/mine.py:Text"]
    text += ["--clients", "2", "--clients-per-round", "2"]
    assert "clusters images" in refuse(fedac_art, [*text, *out], capsys)
    assert not (tmp_path / "out" / "metrics.csv").exists()


def parse_preset(script, name: str) -> list:
    configs, _ = experiment.parse(script.Config, script.PRESETS, "doc", ["--preset", name])
    return configs


def values(script, name: str, flag: str) -> list:
    return list(dict.fromkeys(getattr(config, flag) for config in parse_preset(script, name)))


@pytest.mark.parametrize("script", [fedac_art, controls])
def test_presets_are_the_papers_set_up(script):
    for name in script.PRESETS:
        for config in parse_preset(script, name):
            if name.startswith("table") or name in ("fig2", "fig6", "batch"):
                check_set_up(config, "cifar100" in name)
            sgd = (config.lr, config.momentum, config.weight_decay)
            assert sgd == (0.01, 0.9, 1e-5)
            assert config.min_size == 10


def check_set_up(config, is_cifar100: bool):
    shape = (config.clients, config.clients_per_round, config.rounds, config.epochs)
    assert shape == (10, 10, 100, 10)
    assert config.batch_size in (64, 128)
    assert config.dataset == ("cifar100" if is_cifar100 else "cifar10")
    assert config.augment == ("crop-flip-rotate" if is_cifar100 else "crop-flip")
    assert config.model == ("resnet18" if is_cifar100 else "simplecnn")
    assert (config.mu == 1) == (is_cifar100 and config.base == "moon")


def test_presets_sweep_what_the_paper_compares():
    paper = fedac_art
    assert values(paper, "table2", "base") == ["solo", "fedavg", "fedprox", "moon"]
    assert values(paper, "table2", "projection") == [True]
    assert values(paper, "table2", "method") == ["fedac", "base"]
    for name in ("table2", "table3-moon-cifar100", "fig5"):
        assert values(paper, name, "alpha") == [0.3, 0.5]
    assert values(paper, "table3", "base") == ["solo", "fedprox", "moon"]
    assert values(paper, "fig2", "method") == ["base"]
    assert values(paper, "batch", "batch_size") == [64, 128]
    assert values(paper, "fig5", "dataset") == ["cifar10", "cifar100"]
    assert values(paper, "small", "w_small") == [1, 0.5, 0]
    assert values(paper, "large", "w_large") == [0.5, 0]
    assert values(paper, "reduction", "reduction") == ["sample", "group"]
    assert values(controls, "table3", "method") == list(controls.ARMS)
    assert values(controls, "d4", "flip") == [0, 0.2]
    assert values(controls, "d4", "features") == ["pixels", "encoder"]


@pytest.mark.parametrize("bad", [0.0, math.nan, 1e30])
def test_features_of_a_dead_net_are_drawn_all_the_same(bad, tmp_path):
    """Where every feature is alike scikit-learn's tree would recurse without end."""
    hidden = {
        "vectors": torch.full((3, 30, 6), bad),
        "labels": torch.arange(30) % 3,
        "clients": [0, 4, 7],
    }
    content = {"state": {"hidden": hidden}}
    run = SimpleNamespace(method="fedac", trial=0, load=lambda: content)
    later = SimpleNamespace(method="fedac", trial=1, load=None)  # only the first trial is drawn
    fedac_art.draw({"w_small=0.5 model=a/b": [run, later], "nothing trained": []}, tmp_path)
    assert (tmp_path / "tsne-w_small=0.5-model=a-b.png").stat().st_size > 1000


def test_one_class_two_test_images_and_tiny_clients(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (24, 16, 16, 1), dtype=np.uint8)
    y = np.zeros(24, dtype=int)
    np.savez(tmp_path / "one.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])
    few = {"dataset": tmp_path / "one.npz", "clients_per_round": 2, "min_size": 1, "flip": 0.5}
    few["method"] = "fedac"
    rows = launch(controls, tmp_path / "run", *words(QUICK | few))
    assert {row["noisy_large"] for row in rows if row["round"] == "1"} == {"0.0"}
    assert {row["silhouette"] for row in rows} == {""}


def test_examples_show_the_smallest_and_the_largest_clusters(tmp_path, path):
    import bench_art
    from matplotlib import pyplot

    x = torch.arange(1, 8, dtype=torch.uint8).view(7, 1, 1, 1).expand(7, 2, 2, 1)
    clusters = np.array([1, 2, 2, 3, 3, 3, 4])
    labels = np.zeros(7, dtype=int)
    picture = bench_art.examples(x, labels, clusters, np.arange(6), across=2)
    shown = picture[1, [1, 4, 7, 10], 0].tolist()
    assert shown[:2] == [1, 2]
    assert set(shown[2:]) <= {4, 5, 6}
    bench_art.draw([*words(QUICK), "--dataset", str(path), "--out", str(tmp_path / "new")])
    picture = pyplot.imread(tmp_path / "new" / "examples.png")
    assert picture.shape[:2] == (3 * 17 + 1, 16 * 17 + 1)
