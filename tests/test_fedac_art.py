"""fedac_art.py and its study: whole runs as loops, Fuzzy ART in exact fractions, cases by hand."""

import csv
import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fedac_loops import Loops, make_images, move
from sklearn.manifold import TSNE

import common
import fedac_art
from data import Data, from_arrays, load_data
from errors import UsageError
from experiment import figures
from fedac_art import fuzzy_art, small_clusters
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
    monkeypatch.setattr(figures, "plot", draw_nothing)
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
def test_the_script_equals_the_loops(case, arrays, path, tmp_path, quiet):
    """Weights to 1e-9, every column, and what Fig. 6 is drawn from."""
    flags = COMMON | SCRIPT_CASES[case]
    rows = launch(fedac_art, tmp_path, f"--dataset={path}", *words(flags))
    compare_with_loops(arrays, flags, rows, load_states(tmp_path), study=False)


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


@pytest.mark.parametrize("kind", ["bytes", "float64", "float32"])
@pytest.mark.parametrize("beta", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("rho", [0.0, 0.5, 0.75, 0.875, 1.0])
def test_fuzzy_art_equals_exact_fractions(rho, beta, kind):
    x = blobs(n=50, seed=int(rho * 8))
    x[25:30] = x[:5]  # at rho 1 copies share a cluster
    clusters, templates = exact_art(x, rho, 0.2, beta)
    if kind == "bytes":
        got, w = fuzzy_art(x, rho, alpha=0.2, beta=beta)
        w = w / 255
    else:
        got, w = fuzzy_art((x / 255).astype(kind), rho, alpha=0.2, beta=beta)
    np.testing.assert_array_equal(got, clusters)
    np.testing.assert_allclose(w, templates, atol=1e-6)
    if rho == 0.75:
        assert 3 < len(templates) < 40


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


def test_ties_go_to_the_oldest_and_the_largest_choice_wins():
    x = np.array([[0], [255], [250]], dtype=np.uint8)
    assert fuzzy_art(x, 0.9)[0].tolist() == [0, 1, 1]
    x = np.array([[0, 255], [255, 0], [128, 128]], dtype=np.uint8)  # the third is between them
    assert fuzzy_art(x, 0.5)[0].tolist() == [0, 1, 0]
    assert fuzzy_art(x[[1, 0, 2]], 0.5)[0].tolist() == [0, 1, 0]


def make_federation(data: Data, script=fedac_art, **flags):
    """(config, federation) of two clients."""
    flags = {"clients": 2, "clients_per_round": 2, "device": "cpu"} | flags
    config = script.Config(**flags)
    return config, config.federation(data, common.Streams(0))


def few_digits(n=40, side=0) -> Data:
    data = load_data("digits", side=side)
    test = (data.x_test, data.y_test)
    return Data(data.x_train[:n], data.y_train[:n], *test, data.classes, data.mean, data.std)


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
    late = ["spearman", "auc_size", "auc_loss", "silhouette"]
    assert names[-4:] == late
    assert len(names) == 13
    for arm in controls.ARMS:
        first, last = (row for row in rows if row["method"] == arm)
        for name in names:
            got = first[name] or last[name] or "nan"
            wanted = float(measured[arm][name] or "nan")
            assert float(got) == pytest.approx(wanted, nan_ok=True)
            assert not (name in late and first[name])


def test_clusters_are_those_of_the_flipped_labels(tmp_path, quick):
    """Two shares of wrong labels in one folder, each as in a folder of its own."""
    both, _ = quick(tmp_path / "both", "--flip", "0", "0.4", "--method", "fedac")
    for flip in ("0", "0.4"):
        alone, _ = quick(tmp_path / flip, "--flip", flip, "--method", "fedac")
        beside = [row for row in both if row["setting"] == f"flip={float(flip)}"]
        assert [row["clusters"] for row in beside] == [row["clusters"] for row in alone]
        assert [row["accuracy"] for row in beside] == [row["accuracy"] for row in alone]
    assert len({row["clusters"] for row in both if row["round"] == "1"}) == 2


# ----------------------------------------------------------------- augmentation, hidden vectors


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


def float_data(*shape) -> Data:
    """Five training samples and a test sample; columns of other scales."""
    x = np.random.default_rng(0).normal(-3, 2, (6, *shape)) * np.logspace(0, 4, shape[-1])
    y = np.array([0, 1, 0, 1, 0, 1])
    return from_arrays(x[:5], y[:5], x[5:], y[5:])


@pytest.mark.parametrize("height, width", [(12, 12), (9, 14)])
def test_augmented_floats_are_pixels_looked_up_and_the_smallest_number_is_black(height, width):
    data = float_data(height, width, 3)
    streams = common.Streams(0)
    model = SimpleNamespace(dtype=torch.float64)
    fl = SimpleNamespace(data=data, streams=streams, model=model)
    config = fedac_art.Config(augment="crop-flip-rotate")
    options = fedac_art.augmentation(config, fl, 0, [7], [np.arange(5)[None]])
    changes = {name: values[0][0] for name, values in options["per_step"].items()}
    extra = {name: torch.from_numpy(values)[None] for name, values in changes.items()}
    extra |= options["per_client"]
    x = data.images("train", torch.float64)
    black = data.x_train.min()
    wanted = []
    for i, image in enumerate(data.x_train.numpy()):
        wanted.append(move(image, *(values[i] for values in changes.values()), black))
    wanted = (torch.from_numpy(np.stack(wanted)) - data.mean) / data.std
    torch.testing.assert_close(options["augment"](x[None], extra)[0], wanted)


@pytest.mark.parametrize("shape", [(4,), (20, 4)])
def test_tables_and_series_are_clustered_by_column_and_not_augmented(shape):
    data = float_data(*shape)
    rows = data.x_train.numpy().reshape(-1, 4)
    wanted = (data.x_train.numpy() - rows.min(0)) / np.ptp(rows, 0)
    np.testing.assert_allclose(fedac_art.pixels(data), wanted.reshape(5, -1), atol=1e-12)
    with pytest.raises(UsageError, match=r"^--augment crop-flip: [^\n]*\(.*4,?\) are no images"):
        fedac_art.Config(augment="crop-flip").federation(data, None)
    with pytest.raises(UsageError, match="^--features pooled: [^\n]* no images"):
        controls.Config(features="pooled").federation(data, None)


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


# ----------------------------------------------------------------------------------- command line


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
        "--base solo --solo-epochs 1 --rounds 2",
        "--base solo --clients-per-round 5",
        "--dataset shakespeare",
        "--model lstm",
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
    assert "clusters images; int64" in refuse(fedac_art, [*text, *out], capsys)
    assert not (tmp_path / "out" / "metrics.csv").exists()


@pytest.mark.parametrize(("n", "perplexity"), [(20, 10), (70, 30)])
def test_hidden_vectors_are_embedded_by_sklearns_tsne(n, perplexity):
    z = np.random.default_rng(0).normal(size=(n, 4))
    options = {"method": "exact", "init": "random", "random_state": 0}
    wanted = TSNE(perplexity=perplexity, **options).fit_transform(z / np.abs(z).max())
    points = fedac_art.embed(torch.from_numpy(z)[None], torch.arange(n), [7])
    np.testing.assert_allclose(points[["x", "y"]], wanted)
    assert points.label.tolist() == [*range(n)]


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
    np.savez(tmp_path / "one.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2], classes=1)
    few = {"dataset": tmp_path / "one.npz", "clients_per_round": 2, "min_size": 1, "flip": 0.5}
    few["method"] = "fedac"
    rows = launch(controls, tmp_path / "run", *words(QUICK | few))
    assert {row["noisy_large"] for row in rows if row["round"] == "1"} == {"0.0"}
    assert {row["silhouette"] for row in rows} == {""}
