"""The studies of fedavg_curriculum.py, by loops and by the literal Algorithm 1."""

import dataclasses
import sys
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from algorithm_1 import (
    OFF,
    QUICK,
    SMALL,
    arrays,
    command,
    compare_with_literal,
    exact_pacing,
    literal_schedule,
    literal_scores,
    metrics,
    net_of,
    small,
    state_of,
    write_data,
)

import common
import fedavg_curriculum as script
import training
from data import load_data
from experiment import figures
from results.fedavg_curriculum import authors, explain, exposure, rivals, schedule

ROOT = Path(script.__file__).parent
FAMILIES = ("linear", "quadratic", "root", "step", "exponential")
STUDY = dict.fromkeys(("random-step", "shuffled", "weighted", "fixed"), exposure)
STUDY |= dict.fromkeys(("balanced", "threshold", "hard-threshold"), rivals)


@pytest.fixture(scope="session")
def data_file(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "made_up.npz")


@pytest.fixture(autouse=True)
def without_figures(monkeypatch):
    """They take seconds."""
    monkeypatch.setattr(sys, "argv", ["a study"])
    monkeypatch.setattr(figures, "plot", lambda *args, **options: None)


def rng(seed=0):
    return np.random.default_rng(seed)


# ------------------------------------------------------------------------ a client's round of steps


def drawn(order, n=23, t=2, m=3, difficulty=None, **flags):
    """(batches, weights) of a client whose samples are 100, 101, ..., of three classes."""
    y = np.arange(100 + n) % 3
    shards = {m: np.arange(100, 100 + n)}
    streams = common.Streams(1)
    if difficulty is None:
        difficulty = rng(1).random(n)
    if order in ("random", "vanilla"):
        difficulty = np.zeros(n)
    study = STUDY.get(order, exposure)
    config = small(study.Config, order=order, **flags)
    fl = SimpleNamespace(shards=shards, sizes={m: n}, labels=y, streams=streams, config=config)
    function, _ = script.find_functions(config)
    batches = script.draw_client_batches(config, fl, t, m, difficulty, function)
    if order == "weighted":
        return exposure.weigh(fl, t, m, batches)
    return batches, np.ones(batches.shape)


@pytest.mark.parametrize("scope", ["round", "global"])
@pytest.mark.parametrize("order", STUDY)
def test_schedules_by_python_lists(order, scope):
    """Batches and weights, of poor clients too: as many steps and samples as any order takes."""
    for n in (1, 3, 4, 5, 23):
        flags = {"pacing_scope": scope, "pacing_a": 0.7, "pacing_b": 0.3}
        batches, weights = drawn(order, n, **flags)
        config = small(STUDY[order].Config, order=order, **flags)
        labels = (np.arange(100, 100 + n) % 3).tolist()
        difficulty = rng(1).random(n).tolist()
        client = (list(range(100, 100 + n)), difficulty, labels, common.Streams(1), 2, 3)
        expected, expected_weights = literal_schedule(config, *client)
        width = min(4, n)
        assert batches.shape == weights.shape == (2 * -(-n // 4), 4)
        assert batches[:, :width].tolist() == expected
        assert (batches[:, width:] == -1).all()
        assert weights[:, :width] == pytest.approx(np.array(expected_weights))


def admitted_by(order, losses, T, monkeypatch, **flags) -> list[int]:
    """g at each of T steps, with one batch an epoch."""
    pacings = []
    sampler = script.CurriculumBatchSampler

    def spy(difficulty, batch_size, steps, pacing, *generators):
        pacings.append(pacing)
        return sampler(difficulty, batch_size, steps, pacing, *generators)

    monkeypatch.setattr(script, "CurriculumBatchSampler", spy)
    N = len(losses)
    drawn(order, N, difficulty=np.array(losses), epochs=T, batch_size=N, **flags)
    monkeypatch.undo()
    return [int(pacings[0](step)) for step in range(T)]


@pytest.mark.parametrize("order", ["threshold", "hard-threshold"])
def test_a_threshold_arrives_at_a_times_t(order, monkeypatch):
    """In doubles .55 * 100 is above 55: the last sample must not come a step late."""
    losses = rng(0).exponential(size=50)
    for a, T in ((0.55, 100), (0.28, 25), (0.28, 50), (0.07, 100), (0.29, 100)):
        g = admitted_by(order, losses, T, monkeypatch, pacing_a=a)
        assert g[round(a * T)] == (50 if order == "threshold" else 10)
        if order == "threshold":
            assert g[round(a * T) - 1] < 50


@pytest.mark.parametrize("order", ["threshold", "hard-threshold"])
def test_thresholds_with_ties_and_degenerate_paces(order, monkeypatch):
    assert set(admitted_by(order, np.zeros(7), 9, monkeypatch)) == {7}
    losses = [0.0, 0.0, 0.0, 1.0, 1.0, 2.0]
    for a, b in ((0.0, 0.2), (0.8, 0.0), (0.8, 1.0), (1e6, 0.5)):
        g = admitted_by(order, losses, 9, monkeypatch, pacing_a=a, pacing_b=b)
        assert min(g) >= 1
        assert max(g) <= 6


# -------------------------------------------------------------------------------------- whole runs

SKEWED = {"partition": "dirichlet", "alpha": 0.5}
ARMS = [
    (exposure, {"order": "curriculum"}),
    (exposure, {"order": "random-step", "base": "fednova"}),
    (exposure, {"order": "shuffled", "score": "L"}),
    (exposure, {"order": "weighted", "score": "LG", "pacing": "root", "weight_decay": 0.0}),
    (exposure, {"order": "weighted", "score": "E", "batch_size": 20} | SKEWED),
    (exposure, {"order": "fixed", "pacing": "step"}),
    (rivals, {"order": "random", "pacing": "root", "fedlc": 0.7}),
    (rivals, {"order": "balanced", "pacing_scope": "global", "score": "L"}),
    (rivals, {"order": "balanced", "fedlc": 1.5} | SKEWED),
    (rivals, {"order": "threshold", "score": "LG", "pacing_scope": "global"}),
    (rivals, {"order": "hard-threshold", "score": "E", "base": "fedprox", "mu": 0.3}),
]


def label(value):
    return "-".join(map(str, value.values())) if isinstance(value, dict) else ""


@pytest.mark.parametrize(("study", "arm"), ARMS, ids=label)
def test_a_run_equals_a_literal_algorithm_1(study, arm, data_file, tmp_path):
    flags = OFF | SMALL | {"dataset": str(data_file)} | arm
    study.main([*command(flags), "--out", str(tmp_path)])
    config = study.Config(**flags)
    method = rivals.name(config) if study is rivals else config.order
    compare_with_literal(config, method, tmp_path)


def test_fedlc_is_an_arm_beside_the_orders(data_file, tmp_path):
    """MOON brings entries of its own for each client."""
    flags = ["--dataset", str(data_file), *QUICK, "--rounds", "2", "--base", "moon"]
    flags += ["--order", "curriculum", "vanilla", "--fedlc", "0", "0.5"]
    rivals.main([*flags, "--out", str(tmp_path)])
    rows = metrics(tmp_path)
    assert {row["setting"] for row in rows} == {"-"}
    methods = {"curriculum", "vanilla", "curriculum fedlc=0.5", "vanilla fedlc=0.5"}
    assert {row["method"] for row in rows} == methods


# ----------------------------------------------------------------------------------------- explain


def federation(data_file, **flags):
    config = small(explain.Config, dataset=str(data_file), **flags)
    return common.Federation(config, load_data(str(data_file)), common.Streams(0))


def dissimilarity_by_autograd(theta, samples) -> float:
    x, y, *_ = arrays()
    gradients = []
    for chosen in samples:
        net = net_of(theta)
        F.cross_entropy(net(x[chosen]), y[chosen]).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
        gradients.append(gradient.numpy())
    sizes = np.array([len(chosen) for chosen in samples])
    q = sizes / sizes.sum()
    squares = [gradient @ gradient for gradient in gradients]
    mean = q @ np.array(gradients)
    return float(q @ squares / (mean @ mean))


def test_dissimilarity_of_vanishing_gradients_needs_float64(data_file):
    """Where the samples are learned, theta - (theta - g) in float32 would be rounding alone."""
    fl = federation(data_file, dtype="float32")
    batches = [np.tile(np.arange(40), (900, 1))]
    local = training.Local(lr=0.05, momentum=0.5)
    theta_0 = fl.model.init(4)
    update = training.train(fl.model, theta_0, fl.data, np.arange(1), batches, local)
    [theta] = update.gather_thetas()
    [(losses, _)] = common.score(fl.model, theta, fl.data, [np.arange(40)])
    assert losses.mean() < 1e-2
    samples = [np.arange(0, 20), np.arange(20, 40)]
    exactly = explain.dissimilarity(federation(data_file), theta.double(), samples, [0, 1])
    assert explain.dissimilarity(fl, theta, samples, [0, 1]) == pytest.approx(exactly, rel=1e-9)


def test_dissimilarity_draws_its_dropout_from_the_seeds(data_file):
    fl = federation(data_file, model=f"{ROOT}/tests/algorithm_1.py:Dropped")
    theta = fl.model.init(4)
    samples = [np.arange(0, 20), np.arange(20, 40)]
    found = []
    for stray, seeds in ((0, [1, 2]), (1, [1, 2]), (1, [3, 4])):
        torch.manual_seed(stray)
        found.append(explain.dissimilarity(fl, theta, samples, seeds))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("order", ["curriculum", "anti", "random", "vanilla"])
def test_explained_runs_have_the_columns_and_the_same_bits(order, data_file, tmp_path):
    """Columns of the first round by autograd; the nets as without looking."""
    flags = OFF | SMALL | {"dataset": str(data_file), "order": order, "rounds": 2}
    plain = state_of(script.main, flags, tmp_path / "plain")
    explained = state_of(explain.main, flags, tmp_path / "explained")
    assert torch.equal(plain["theta"], explained["theta"])
    row = metrics(tmp_path / "explained")[0]
    config = script.Config(**flags)
    streams = common.Streams(config.seed)
    fl = common.Federation(config, load_data(str(data_file)), streams)
    theta = fl.start()["theta"]
    x, y, *_ = arrays()
    samples = {"easy": [], "all": [], "hard": []}
    for m in sorted(streams("select", 0).permutation(6)[:3].tolist()):
        shard = fl.shards[m].tolist()
        losses = literal_scores(config, theta, None, None, x[shard], y[shard])
        by_loss = [shard[i] for i in sorted(range(len(shard)), key=losses.__getitem__)]
        count = max(1, int(0.3 * len(shard) + 1e-9))
        samples["easy"].append(by_loss[:count])
        samples["all"].append(by_loss)
        samples["hard"].append(by_loss[-count:])
    for name, chosen in samples.items():
        wanted = dissimilarity_by_autograd(theta, chosen)
        assert float(row[f"lambda_{name}"]) == pytest.approx(wanted), name


def test_every_order_reads_what_says_who_is_easy():
    read = explain.Config(order="vanilla").results_depend_on()
    assert {"score", "pacing_b"} <= set(read)
    assert "pacing_a" not in read


# ----------------------------------------------------------------------------------------- authors


def test_the_authors_c_takes_the_whole_mean_of_the_clients_changes(data_file):
    """Rounds of 3 of 5 clients: c is the sum of the mean changes of c_k, and w_0 is SCAFFOLD's."""
    config = authors.Config(**SMALL | {"dataset": str(data_file), "clients": 5, "device": "cpu"})
    fl = config.federation(load_data(str(data_file)), common.Streams(0))
    state = fl.start()
    wanted = 0
    changes = [{m: 0 for m in range(5)}]
    for t in range(3):
        clients = fl.select(t, 3)
        batches = [fl.shards[m][:2].reshape(2, 1) for m in clients]
        update = fl.train(state, t, clients, batches)
        theta = state["theta"] + (update.gather_thetas() - state["theta"]).mean(0)
        state["theta"] = fl.aggregate(state, update)
        assert torch.allclose(state["theta"], theta)
        changes.append(changes[-1] | state["base"]["c_k"])
        wanted = wanted + sum(changes[-1][int(m)] - changes[-2][int(m)] for m in clients) / 3
        assert torch.allclose(state["base"]["c"], wanted, atol=1e-6)
    assert wanted.abs().max() > 1e-3


# ---------------------------------------------------------------------------------------- schedule


@pytest.fixture
def saved(monkeypatch):
    """What is saved as a figure: file name -> the figure."""
    from matplotlib.figure import Figure

    found = {}
    save = Figure.savefig

    def keep(figure, path, **options):
        found[Path(path).name] = figure
        save(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return found


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SystemExit) as stop:
        schedule.main(["--out", str(tmp_path / "file")])
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 5 and len(lines) == 1 and "file" in lines[0]


def test_the_picture_shows_the_schedule(tmp_path, capsys, saved):
    orders = ["curriculum", "shuffled", "weighted"]
    flags = ["--batch-size", "10", "--epochs", "2", "--order", *orders, "--pacing-a", "0.6"]
    schedule.main([*flags, "--out", str(tmp_path)])
    assert (tmp_path / "schedule.png").stat().st_size > 5000
    first, *others = saved["schedule.png"].axes
    for family, line in zip(FAMILIES, first.lines, strict=True):
        assert line.get_label() == family
        wanted = []
        for step in range(100):
            g = exact_pacing(family, step, 100, 500, Decimal("0.6"), Decimal("0.2"))
            wanted.append(int(g))
        assert list(line.get_ydata()) == wanted
    config = exposure.Config(order="curriculum", epochs=2, batch_size=10, pacing_a=0.6)
    losses = [float(i) for i in range(500)]
    client = (list(range(500)), losses, losses, common.Streams(config.seed), 0, 0)
    for order, ax in zip(orders, others, strict=False):
        assert ax.get_ylabel() == order
        batches, weights = literal_schedule(dataclasses.replace(config, order=order), *client)
        heaviest = max(map(max, weights))
        ranks = []
        opacity = []
        for batch, weight in zip(batches, weights, strict=True):
            pairs = sorted(zip(batch, weight, strict=True))
            ranks.append([sample / 500 for sample, _ in pairs])
            opacity.append([w / heaviest for _, w in pairs])
        image = ax.images[0]
        assert np.allclose(image.get_array(), np.array(ranks).T)
        assert np.allclose(image.get_alpha(), np.array(opacity).T)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "visits" in line]
    assert [line[0] for line in lines] == orders
    assert lines[0][-5:] == lines[1][-5:] == lines[2][-5:]
    assert float(lines[0][-5]) > 3 > 1 > float(lines[0][-1])


@pytest.mark.parametrize("order", ["random", "vanilla", "fixed", "random-step"])
def test_an_order_without_difficulty_shows_all_fifths_as_often(tmp_path, capsys, order):
    """Ten epochs are ten visits; a client of 500 samples has little noise in a fifth."""
    schedule.main(["--order", order, "--epochs", "10", "--out", str(tmp_path)])
    visits = [float(word) for word in capsys.readouterr().out.split()[-5:]]
    assert visits == pytest.approx([10] * 5, abs=2)
