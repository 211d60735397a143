"""results/fedcl_fgn: whole runs against loops, rules against enumeration and scikit-learn."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import ordinary
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from fedcl_loops import (
    FLAGS,
    CriticalLoops,
    StudyLoops,
    assert_same_rows,
    load_state,
    of,
    read,
    write_data,
)

import common
import experiment
import fedcl_fgn
from data import load_data
from experiment import report
from results.fedcl_fgn import clock, compare, criticalfl, rules, selection


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return str(write_data(tmp_path_factory.mktemp("data") / "tiny.npz"))


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """No figures: they have tests of their own."""
    monkeypatch.setattr(report, "plot", lambda *args, **options: None)


def launch(folder, *flags) -> list[dict]:
    selection.main([*FLAGS, "--budget", "0", "--out", str(folder), *flags])
    return read(folder)


def parse(*flags) -> list:
    configs, _ = experiment.parse(selection.Config, selection.PRESETS, "doc", list(flags))
    return configs


def federate(data, *flags) -> common.Federation:
    [config] = parse(*FLAGS, "--budget", "0", "--dataset", data, "--method", "base", *flags)
    return common.Federation(config, load_data(data), common.Streams(1, 0))


# -------------------------------------------------------------------------- whole runs, literally

CASES = {
    "fedyogi size n=4": "--method base --base fedyogi --select size --n 4 --server-lr 0.03",
    "fedadam+constant": "--method constant --base fedadam --clients-per-round 3",
    "vrlsgd+constant size": "--method constant --base vrlsgd --select size --rounds 4",
    "fedprox+longer n=3": "--method longer --base fedprox --n 3 --budget 13 --select size",
    "fedavg+cl size": "--method cl --select size --budget 17 --rounds 30",
    "fednova+cl": "--method cl --base fednova --no-fgn-lr --lr-decay 0.5 --delta 0.01",
    "fedavg+constant-fim": "--method constant --detector fim --budget 15 --rounds 30 "
    "--detect-samples 2",
}


@pytest.mark.parametrize("method", CASES)
def test_a_whole_run_equals_loops(tmp_path, data, method):
    flags = ["--budget", "0", "--dataset", data, *CASES[method].split()]
    with_cl = list(flags)
    if "constant" in method:
        with_cl.insert(with_cl.index("--method") + 1, "cl")
    rows = of(launch(tmp_path, *with_cl), method)
    loops = StudyLoops([*FLAGS, *flags])
    assert_same_rows(rows, loops.rows)
    theta = load_state(tmp_path, method)["theta"]
    torch.testing.assert_close(theta, loops.theta, rtol=0, atol=1e-9)


# ------------------------------------------------------------------------------ draws without bias


def pretend(sizes, seed=0):
    """What the rules read of a federation whose clients hold so many samples."""
    streams = common.Streams(seed, 0)
    config = SimpleNamespace(budget=0, rounds=10)
    fl = SimpleNamespace(sizes=np.array(sizes), streams=streams, config=config)
    fl.everyone = np.arange(len(sizes))
    fl.select = lambda t, n: np.sort(streams("select", t).permutation(len(sizes))[:n])
    return fl


SIZES = np.array([40, 3, 12, 7, 20, 18])


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_draws_by_size_are_without_bias_by_enumeration(n):
    """Over all 720 orders of 6 clients and all places of the points: each client is in as often as
    promised, the weights have sum 1 in every draw and the aggregate's mean is sum_k p_k theta_k."""
    p = SIZES / 100
    theta = np.array([[1.0, 5], [2, -3], [-4, 0], [0.5, 1], [7, 2], [-1, -1]])
    pi = rules.inclusion(SIZES, n)
    assert pi.sum() == pytest.approx(n)
    assert pi.max() <= 1
    included = np.zeros(6)
    mean = np.zeros(2)
    total = 0.0
    for order in itertools.permutations(range(6)):
        ends = np.cumsum(pi[list(order)]) % 1
        edges = np.unique(np.round([0, 1, *ends], 12))  # between these the draw is the same
        for low, high in itertools.pairwise(edges):
            rng = SimpleNamespace(
                permutation=lambda M, order=order: np.array(order),
                random=lambda u=(low + high) / 2 / n: u,
            )
            fl = SimpleNamespace(sizes=SIZES, streams=lambda *key, rng=rng: rng)
            drawn = rules.by_size(fl, {}, 0, n)
            assert len(drawn.clients) == n
            assert drawn.weights.sum() == pytest.approx(100)
            included[drawn.clients] += high - low
            mean += (high - low) * (drawn.weights / 100) @ theta[drawn.clients]
            total += high - low
    np.testing.assert_allclose(included / total, pi, atol=1e-9)
    np.testing.assert_allclose(mean / total, p @ theta, atol=1e-9)
    sure = pi == 1
    share = (n - sure.sum()) / max(p[~sure].sum(), 1e-9)
    np.testing.assert_allclose(pi[~sure] / p[~sure], share)  # the rest in proportion


@pytest.mark.parametrize(
    "rule, numbers", [(rules.uniform, range(1, 80)), (rules.by_size, (1, 2, 4, 8, 16, 32))]
)
def test_fewer_clients_are_among_more(rule, numbers):
    fl = pretend([5] * 40 + [9] * 40)
    for t in range(5):
        draws = [set(rule(fl, {}, t, n).clients) for n in numbers]
        assert [len(drawn) for drawn in draws] == list(numbers)
        assert all(small < large for small, large in itertools.pairwise(draws))
    later = rule(fl, {}, 5, 8).clients
    assert not np.array_equal(later, rule(fl, {}, 4, 8).clients)


# ---------------------------------------------------------------------------- rules of other papers


def make_turns(M, seed=1) -> dict:
    rng = np.random.default_rng(seed)
    turns = {}
    for m in range(M):
        bias = rng.normal(size=4).tolist()
        turns[m] = {"round": m + 1, "loss": 1 + rng.random(), "bias": bias, "times": 1}
    return turns


def test_fedcor_conditions_as_scikit_learns_gaussian_process():
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import DotProduct

    embedding = np.random.default_rng(0).normal(size=(9, 3))
    K = embedding @ embedding.T
    p = np.full(9, 1 / 9)
    taken = rules.take_greedily(K, 0.3, np.ones(9), p, 4)
    assert len(set(taken)) == 4
    given = K
    kernel = DotProduct(sigma_0=0, sigma_0_bounds="fixed")
    for i, m in enumerate(taken):
        gain = (p @ given) / np.sqrt(given.diagonal() + 0.3)
        gain[taken[:i]] = -np.inf
        assert m == gain.argmax()
        given = rules.condition(given, 0.3, m)
        process = GaussianProcessRegressor(kernel, alpha=0.3, optimizer=None)
        process.fit(embedding[taken[: i + 1]], np.zeros(i + 1))
        _, covariance = process.predict(embedding, return_cov=True)
        np.testing.assert_allclose(given, covariance, atol=1e-8)


@pytest.mark.parametrize("scale", [0, 1e6])
def test_fedcor_takes_all_clients_where_rounding_exceeds_the_noise(scale):
    rng = np.random.default_rng(0)
    changes = scale * rng.normal(size=(15, 3)) @ rng.normal(size=(3, 9))
    with np.errstate(divide="raise", invalid="raise"):
        K, s_sq = rules.fit_covariance(changes, 5)
        taken = rules.take_greedily(K, s_sq, np.ones(9), np.full(9, 1 / 9), 9)
    assert sorted(taken) == list(range(9))


def test_fedcor_leaves_alone_who_had_many_turns():
    embedding = np.random.default_rng(0).normal(size=(9, 3))
    alpha = np.eye(9)[5] + 1e-9
    assert rules.take_greedily(embedding @ embedding.T, 0.3, alpha, np.full(9, 1 / 9), 1) == [5]


@pytest.mark.parametrize("M, rank", [(8, 3), (4, 5)])  # 5 of 4 are 3
def test_fedcor_learns_its_covariance_as_scikit_learns_pca(M, rank):
    from sklearn.decomposition import PCA

    rng = np.random.default_rng(2)
    changes = rng.normal(size=(50, 3)) @ rng.normal(size=(3, M)) + 0.1 * rng.normal(size=(50, M))
    K, s_sq = rules.fit_covariance(changes, rank)
    pca = PCA(3).fit(changes)
    np.testing.assert_allclose((K + s_sq * np.eye(M)) * 50 / 49, pca.get_covariance(), atol=1e-10)


def test_fedcor_warms_up_and_then_takes_the_greedy_clients(monkeypatch):
    monkeypatch.setattr(rules, "WARM_UP", 6)
    monkeypatch.setattr(rules, "RANK", 2)
    losses = np.random.default_rng(1).normal(size=(8, 10)).cumsum(0)
    monkeypatch.setattr(rules, "mean_losses", lambda fl, theta, clients: losses[theta])
    fl = pretend(np.arange(10) + 5)
    state = {"turns": make_turns(4) | {7: {"times": 3}}}
    for t in range(6):
        state["theta"] = t
        drawn = rules.fedcor(fl, state, t, 3)
        assert np.array_equal(drawn.clients, fl.select(t, 3))
        assert drawn.scorers == 7
    state["theta"] = 6
    drawn = rules.fedcor(fl, state, 6, 3)
    K, s_sq = rules.fit_covariance(np.diff(losses[:7], axis=0), 2)
    alpha = 0.95 ** np.array([1, 1, 1, 1, 0, 0, 0, 3, 0, 0])
    taken = rules.take_greedily(K, s_sq, alpha, fl.sizes / fl.sizes.sum(), 3)
    assert drawn.clients.tolist() == sorted(taken)
    assert np.array_equal(drawn.weights, fl.sizes[drawn.clients])
    assert drawn.scorers == 7  # for the last difference
    assert len(state["losses"]) == 7
    assert rules.fedcor(fl, state, 7, 3).scorers == 0
    assert len(state["losses"]) == 7


def test_entropy_reads_the_labels_from_the_output_bias():
    from scipy.stats import entropy

    bias = np.array([[0.0, 0, 0, 0], [1, -0.3, -0.3, -0.4], [0.3, 0.3, -0.3, -0.3]])
    H = rules.entropy(bias)
    softmax = np.exp(bias / 0.1) / np.exp(bias / 0.1).sum(1, keepdims=True)
    np.testing.assert_allclose(H, entropy(softmax, axis=1), rtol=1e-10)
    assert H[0] == pytest.approx(math.log(4))
    assert H[0] > H[2] > H[1]


def test_hics_first_takes_who_has_not_taken_part():
    fl = pretend([10] * 20)
    drawn = rules.hics(fl, {"turns": make_turns(17)}, 0, 5)
    assert {17, 18, 19} < set(drawn.clients.tolist())
    assert len(drawn.clients) == 5
    assert np.array_equal(drawn.weights, [10] * 5)


def test_a_gradient_of_zero_is_at_right_angles_to_all_others():
    bias = np.array([[0.0, 0], [1, 0], [1, 0], [0, 0]])
    a, b, c, d = rules.cluster_by_bias(bias, np.ones(4), 2)
    assert a == d != b == c


@pytest.mark.parametrize("study", [selection, clock])
def test_hics_wants_an_output_bias(tmp_path, data, study, capsys):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def Net(channels, side, classes):\n"
        "    last = nn.Linear(channels * side**2, classes, bias=False)\n"
        "    return nn.Sequential(nn.Flatten(), last)\n"
    )
    words = f"--dataset {data} --model {tmp_path}/mine.py:Net --method base --clients 6"
    words += " --clients-per-round 2 --budget 0 --rounds 1 --trials 1 --jobs 1"
    words += f" --out {tmp_path}/out --select"
    with pytest.raises(SystemExit) as stopped:
        study.main([*words.split(), "hics"])
    assert stopped.value.code == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.endswith("mine.py:Net does not end with the bias of its output layer")
    study.main([*words.split(), "oort", "--resume"])  # it needs no bias


def test_hics_leaves_high_entropy_for_all_as_gamma_falls():
    flat = {"bias": [0.01, 0, 0, -0.01]}
    skewed = {"bias": [0.7, -0.2, -0.3, -0.2]}
    turns = {m: flat if m < 10 else skewed for m in range(20)}
    counts = np.zeros((2, 20))
    for i, t in enumerate((0, 10)):  # gamma falls from 4 to 0
        for seed in range(200):
            drawn = rules.hics(pretend([10] * 20, seed), {"turns": turns}, t, 2)
            counts[i, drawn.clients] += 1
            assert np.array_equal(drawn.weights, [1, 1])
    assert counts.sum() == 800
    assert counts[0, :10].sum() > 350
    assert 150 < counts[1, :10].sum() < 250


def test_gamma_falls_with_the_uploads_of_a_budget():
    config = SimpleNamespace(budget=40, rounds=10)
    assert rules.spent(config, {"uploads": 10}, 9) == 0.25
    config.budget = 0
    assert rules.spent(config, {"uploads": 10}, 9) == 0.9


def test_hics_draws_inside_a_cluster_by_size():
    """Two clusters of equal entropy, one of a large and a small client."""
    turns = {0: {"bias": [1.0, 0]}, 1: {"bias": [1.0, 0]}, 2: {"bias": [0, 1.0]}}
    counts = np.zeros(3)
    for seed in range(400):
        drawn = rules.hics(pretend([30, 10, 20], seed), {"turns": turns}, 10, 1)
        counts[drawn.clients] += 1
    np.testing.assert_allclose(
        rules.cluster_by_bias(np.eye(2)[[0, 0, 1]], np.ones(3), 2), [1, 1, 2]
    )
    assert 1.8 < counts[0] / counts[1] < 5.5


def test_oort_tries_new_clients_first():
    fl = pretend([10] * 30)
    explored = []
    for t in (0, 20, 300):
        clients = rules.oort(fl, {"turns": make_turns(20)}, t, 10).clients
        explored.append(len(set(clients) - set(range(20))))
    assert explored == [9, round(10 * 0.9 * 0.98**20), 2]
    few = rules.oort(fl, {"turns": make_turns(3)}, 400, 10).clients
    assert len(few) == 10
    assert {0, 1, 2} < set(few)  # only three are known: seven are new


def test_oort_follows_utility():
    turns = {m: {"round": 40, "loss": 5.0 if m < 6 else 0.1} for m in range(30)}
    for seed in range(20):
        drawn = rules.oort(pretend([10] * 30, seed), {"turns": turns}, 40, 5)
        assert set(drawn.clients) <= set(range(6))
    turns[20] = {"round": 1, "loss": 4.0}  # long ago: sqrt(.1 log t / t_k) lifts it above the cut
    draws = [rules.oort(pretend([10] * 30, s), {"turns": turns}, 40, 5) for s in range(20)]
    assert any(20 in drawn.clients for drawn in draws)


def test_oort_knows_a_utility_among_many_without_loss():
    """29 of 30 clients have no loss. By its odds the other is in 83 % of the selections."""
    turns = {m: {"round": 40, "loss": 5.0 if m == 3 else 0.0} for m in range(30)}
    draws = [rules.oort(pretend([10] * 30, s), {"turns": turns}, 40, 5).clients for s in range(100)]
    assert 65 < sum(3 in clients for clients in draws) < 97


def test_power_of_choice_takes_the_candidates_of_largest_loss(data):
    fl = federate(data)
    theta = fl.start()["theta"]
    net = ordinary.fill(ordinary.lenet(1, 16, 3).double(), theta)
    losses = []
    for shard in fl.shards:
        logits = net(ordinary.normalise(fl.data, fl.data.x_train[shard]))
        losses.append(F.cross_entropy(logits, fl.data.y_train[shard]).item())
    for t in range(4):
        candidates = rules.by_size(fl, {}, t, 4).clients
        largest = sorted(candidates, key=lambda m: -losses[m])[:2]
        drawn = rules.power_of_choice(fl, {"theta": theta}, t, 2)
        assert drawn.clients.tolist() == sorted(largest)
        assert drawn.scorers == 2
        assert drawn.weights.tolist() == [1, 1]


def test_what_is_remembered_is_the_gradient_of_the_bias(data):
    """After one step of plain SGD: label shares minus predicted ones."""
    fl = federate(data, "--momentum", "0", "--weight-decay", "0")
    state = fl.start() | {"turns": {}}
    clients = np.array([1, 4])
    batches = []
    for m in clients:
        padding = np.full(40 - fl.sizes[m], -1)
        batches.append(np.append(fl.shards[m], padding)[None])
    update = fl.train(state, 0, clients, batches, lr=0.05)
    rules.remember(fl, state, 6, update)
    net = ordinary.fill(ordinary.lenet(1, 16, 3).double(), state["theta"])
    for k, m in enumerate([1, 4]):
        shard = fl.shards[m]
        logits = net(ordinary.normalise(fl.data, fl.data.x_train[shard]))
        labels = F.one_hot(fl.data.y_train[shard], 3).double()
        expected = (labels - torch.softmax(logits, 1)).mean(0)
        turn = state["turns"][m]
        np.testing.assert_allclose(turn["bias"], expected.detach().numpy(), atol=1e-9)
        assert (turn["round"], turn["times"]) == (7, 1)
        assert turn["loss"] == update.train_loss[k]
    rules.remember(fl, state, 8, fl.train(state, 0, clients[:1], batches[:1], lr=0.05))
    assert (state["turns"][1]["times"], state["turns"][1]["round"]) == (2, 9)
    assert state["turns"][4]["times"] == 1


SCORERS = {"power_of_choice": [2] * 5, "fedcor": [4] * 4 + [0], "hics": [0] * 5, "oort": [0] * 5}


@pytest.mark.parametrize("rule", SCORERS)
def test_rules_of_other_papers_train(tmp_path, data, rule, monkeypatch):
    """Who scores receives a net, and sends one number."""
    monkeypatch.setattr(rules, "WARM_UP", 3)
    monkeypatch.setattr(rules, "RANK", 2)
    rows = launch(tmp_path, "--dataset", data, "--method", "base", "--select", rule)
    state = load_state(tmp_path, f"fedavg {rule}")
    P = len(state["theta"])
    rounds = np.arange(5) + 1
    received = [float(row["received_mb"]) * 1e6 / 8 for row in rows]
    sent = [float(row["sent_mb"]) * 1e6 / 8 for row in rows]
    scorers = np.cumsum(SCORERS[rule])
    np.testing.assert_allclose(np.array(received) / P, 2 * rounds + scorers, rtol=1e-4)
    np.testing.assert_allclose(np.array(sent) - 2 * rounds * P, scorers, atol=0.3)
    assert [row["clients"] for row in rows] == ["2"] * 5
    assert sum(turn["times"] for turn in state["turns"].values()) == 10
    if rule == "hics":
        assert len(state["turns"]) == 6  # each of six within the first three rounds of two


def test_hics_selects_when_the_learning_rate_is_0(tmp_path, data):
    """1e-300 and then 1e-500, which is 0. So no gradient is known after six clients' turns."""
    flags = ["--dataset", data, "--method", "base", "--lr", "1e-300", "--lr-decay", "1e-200"]
    rows = launch(tmp_path, *flags, "--select", "hics")
    assert [row["clients"] for row in rows] == ["2"] * 5


@pytest.mark.parametrize("rule", ["hics", "fedcor", "oort"])
def test_a_stopped_run_remembers_its_turns(tmp_path, data, rule, monkeypatch, capsys):
    monkeypatch.setattr(rules, "WARM_UP", 4)
    monkeypatch.setattr(rules, "RANK", 2)
    flags = ["--dataset", data, "--method", "base", "--select", rule, "--rounds", "30"]
    flags += ["--budget", "16"]
    whole = launch(tmp_path / "whole", *flags)
    with ordinary.interrupted_at(5), pytest.raises(SystemExit):
        launch(tmp_path / "part", *flags)
    resumed = launch(tmp_path / "part", *flags, "--resume")
    for row, other in zip(whole, resumed, strict=True):
        assert row | {"seconds": ""} == other | {"seconds": ""}


# -------------------------------------------------------------------------------- one's own rule

OWN_RULES = {  # and what the line says
    "1 / 0": "division by zero (ZeroDivisionError in own.py, line 4)",
    "None": "wanted a Draw(clients, weights), not NoneType",
    "[0, 1]": "not list",
    "Draw([0] * n, [1] * n)": "different clients from 0 to 5, not 0 0",
    "Draw(np.arange(n) + 6, np.ones(n))": "not 6 7",
    "Draw(-1 - np.arange(n), np.ones(n))": "not -1 -2",
    "Draw(np.arange(n) + 0.5, np.ones(n))": "not 0.5",
    "Draw(np.arange(n - 1), np.ones(n - 1))": "different clients from 0 to 5, not 0",
    "Draw(np.arange(n), np.ones(n + 1))": "finite weights",
    "Draw(np.arange(n), np.full(n, np.nan))": "finite weights",
    "Draw(np.arange(n), -np.ones(n))": "finite weights",
    "Draw(np.arange(n), np.zeros(n))": "finite weights",
    "Draw(np.arange(n), np.ones(n), 'x')": "'x'",
    "Draw(np.arange(n), np.ones(n), -1000)": "scorers >= 0, not -1000",
    "exit(3)": "SystemExit in own.py, line 4",
    "state.clear() or Draw(np.arange(n), np.ones(n))": "state['theta'] belongs to the run",
    "state.update(size=1) or Draw(np.arange(n), np.ones(n))": "state['size'] belongs to the run",
}


def write_rule(path, expression: str) -> str:
    path.write_text(
        "import numpy as np\n"
        "from results.fedcl_fgn.rules import Draw, power_of_choice\n"
        f"def mine(fl, state, t, n):\n    return {expression}\n"
    )
    return f"{path}:mine"


@pytest.mark.parametrize("returned", OWN_RULES)
def test_an_own_rule_that_is_wrong_is_one_line(tmp_path, data, returned, capsys):
    word = write_rule(tmp_path / "own.py", returned)
    with pytest.raises(SystemExit) as stop:
        launch(tmp_path / "run", "--dataset", data, "--method", "base", "--select", word)
    *_, line = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert line.startswith(f"error: --select {word}, round 1: ")
    assert OWN_RULES[returned] in line


def test_losses_that_are_not_finite_end_the_run_with_3(tmp_path, data, capsys):
    theta = "state['theta'] * 1e300"
    own = write_rule(tmp_path / "own.py", f"power_of_choice(fl, state | dict(theta={theta}), t, n)")
    with pytest.raises(SystemExit) as stop:
        launch(tmp_path / "run", "--dataset", data, "--method", "base", "--select", own)
    assert stop.value.code == 3
    assert "the losses of client" in capsys.readouterr().err


class OwnLoops(StudyLoops):
    def draw(self, t, n):
        return {1: 0.25, 4: 0.75}


@pytest.mark.parametrize(
    "drawn", ["[4, 1], [3, 1]", "np.uint8([4, 1]), [1.5e308, 5e307]", "[4, 1], [3e-320, 1e-320]"]
)
def test_an_own_rule_may_give_lists_in_any_order_and_scale(tmp_path, data, drawn):
    """Clients 4 and 1: their weights follow them."""
    word = write_rule(tmp_path / "own.py", f"Draw({drawn})")
    flags = ["--budget", "0", "--dataset", data, "--method", "base", "--rounds", "2"]
    rows = launch(tmp_path / "run", *flags, "--select", word)
    assert {row["method"] for row in rows} == {"fedavg mine"}
    theta = load_state(tmp_path / "run", "fedavg mine")["theta"]
    torch.testing.assert_close(theta, OwnLoops([*FLAGS, *flags]).theta, rtol=0, atol=1e-9)


NOTES = """
from pathlib import Path
import numpy as np
from results.fedcl_fgn.rules import Draw

def mine(fl, state, t, n):
    if t == 2 and Path("stop").exists():
        raise KeyboardInterrupt
    clients = fl.select(t, n)
    last = state.setdefault("last", {})
    state["seen"] = state.get("seen", np.zeros(len(fl.sizes))) + t
    for m in clients:
        last[m] = np.float32(t)
    if Path("lazy").exists():
        state["last"] = iter(last)
    return Draw(clients, weights=1 + state["seen"][clients] + len(last))
"""


def test_a_rule_may_keep_numpy_values(tmp_path, data, capsys, monkeypatch):
    """Stopped in its third round and resumed, it equals a run that was not stopped."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(NOTES)
    flags = ["--dataset", data, "--method", "base", "--select", "own.py:mine", "--rounds", "4"]
    whole = launch(tmp_path / "whole", *flags)
    Path("stop").touch()
    with pytest.raises(SystemExit):
        launch(tmp_path / "part", *flags)
    Path("stop").unlink()
    resumed = launch(tmp_path / "part", *flags, "--resume")
    assert [row["loss"] for row in resumed] == [row["loss"] for row in whole]
    Path("lazy").touch()
    with pytest.raises(SystemExit) as stop:
        launch(tmp_path / "other", *flags)
    assert stop.value.code == 2
    assert "cannot be saved for --resume: wanted tensors" in capsys.readouterr().err


def test_a_file_that_raises_is_one_line(tmp_path, capsys):
    path = tmp_path / "broken.py"
    path.write_text("1 / 0")
    with pytest.raises(SystemExit) as stop:
        launch(tmp_path / "run", "--select", f"{path}:own")
    line = capsys.readouterr().err
    assert stop.value.code == 2
    assert f"--select {path}:own: division by zero; wanted uniform" in line


def test_two_rules_of_one_name_are_refused(tmp_path, data, capsys):
    """A method's name keeps what follows the colon: the second would be taken for the first."""
    one = write_rule(tmp_path / "one.py", "Draw([0, 1], [1, 1])")
    other = write_rule(tmp_path / "other.py", "Draw([2, 3], [1, 1])")
    with pytest.raises(SystemExit) as stop:
        launch(tmp_path / "r", "--dataset", data, "--method", "base", "--select", one, other)
    assert stop.value.code == 2
    assert "both called fedavg mine" in capsys.readouterr().err


# ------------------------------------------------------------------------------- arms and budget


def test_every_arm_ends_when_the_budget_is_spent(tmp_path, data):
    flags = ["--dataset", data, "--budget", "15", "--rounds", "20", "--lr-decay", "0.5"]
    flags += ["--eval-every", "50", "--method", "cl", "base", "longer", "constant"]
    rows = launch(tmp_path, *flags, "--n", "0", "3", "--select", "uniform", "size")
    ends = {row["method"]: row for row in rows}
    assert len(ends) == 2 + 4 + 2 + 2
    assert {row["uploads"] for row in ends.values()} == {"15"}
    assert len([row for row in rows if row["accuracy"]]) == len(ends)  # the last of each
    assert all(row["accuracy"] for row in ends.values())

    def sizes(method):
        return [int(row["clients"]) for row in of(rows, method)]

    assert sizes("fedavg") == [2] * 7 + [1]
    assert sizes("fedavg n=3") == sizes("fedavg size n=3") == [3] * 5
    assert sum(sizes("fedavg+constant")) == 15
    assert np.ptp(sizes("fedavg+constant")) <= 1
    assert len(sizes("fedavg+constant")) == len(sizes("fedavg+cl"))
    longer = int(ends["fedavg+longer"]["samples"]) / int(ends["fedavg"]["samples"])
    fl = federate(data)
    expected = rules.inclusion(fl.sizes, 2) @ fl.sizes / 2 / fl.sizes.mean()
    assert longer == pytest.approx(expected, rel=0.1)
    assert selection.sampled_by_size(fl.sizes, 2) == pytest.approx(expected)


def test_a_spent_budget_has_nothing_left_to_resume(tmp_path, data):
    flags = ["--dataset", data, "--budget", "6", "--rounds", "9", "--method", "cl", "constant"]
    before = launch(tmp_path, *flags)
    assert launch(tmp_path, *flags, "--resume") == before


def test_a_replay_cannot_go_on_for_more_rounds(tmp_path, data, capsys):
    """It spreads the uploads of all of FedCL's rounds, so its first rounds would be others."""
    flags = ["--dataset", data, "--method", "cl", "constant"]
    launch(tmp_path, *flags, "--rounds", "2")
    with pytest.raises(SystemExit) as stop:
        launch(tmp_path, *flags, "--rounds", "9", "--resume")
    assert stop.value.code == 2
    assert "holds another run (rounds 2, not 9)" in capsys.readouterr().err
    one, other = parse("--method", "longer", "--budget", "0", "--select", "uniform", "oort")
    assert one.results_depend_on() == other.results_depend_on()  # it has no rule


def test_as_many_clients_as_the_base_are_the_base(tmp_path, data):
    flags = ["--dataset", data, "--method", "base", "cl", "longer", "--select", "uniform", "size"]
    rows = launch(tmp_path, *flags, "--n", "0", "2")
    names = {"fedavg", "fedavg size", "fedavg+cl", "fedavg+cl size", "fedavg+longer"}
    assert {row["method"] for row in rows} == names
    assert len(list((tmp_path / "checkpoints").iterdir())) == 5


def test_a_replay_follows_the_flags_of_what_it_replays(tmp_path, data):
    flags = ["--dataset", data, "--delta", "0.01", "0.3", "--method", "cl", "base", "constant"]
    launch(tmp_path, *flags)
    found = set()
    for path in (tmp_path / "checkpoints").iterdir():
        saved = torch.load(path, weights_only=True)["fingerprint"]
        found.add((saved["method"], saved.get("delta")))
    twice = {(f"fedavg+{arm}", delta) for arm in ("cl", "constant") for delta in (0.01, 0.3)}
    assert found == twice | {("fedavg", None)}
    reads = selection.Config(
        method="constant", detector="fim", select="uniform"
    ).results_depend_on()
    assert {"detector", "detect_samples", "delta"} <= reads.keys()


@pytest.mark.parametrize(
    "flags, word",
    [
        ("--n 13", "--n"),
        ("--method base constant", "cl"),
        ("--method cl constant --detector growth", "--detector"),
        ("--budget 11 --method base", "--budget"),
        ("--budget 6 --method cl", "--budget"),
        ("--budget 6 --method cl constant", "--budget"),
        ("--clients 1 --clients-per-round 1 --select hics", "--clients 2"),
        ("--clients 1 --clients-per-round 1 --select fedcor", "--clients 2"),
    ],
)
def test_wrong_flags_give_one_line_and_2(tmp_path, data, flags, word, capsys):
    with pytest.raises(SystemExit) as stop:
        launch(tmp_path, "--dataset", data, *flags.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert word in error
    assert len(error.strip().splitlines()) == 1


# ------------------------------------------------------------------------------------ compare.py


def scripted(method, trial, accuracy, clients) -> pd.DataFrame:
    columns = {"method": method, "trial": trial, "round": np.arange(len(clients)) + 1}
    columns |= {"clients": clients, "uploads": np.cumsum(clients), "accuracy": accuracy}
    return pd.DataFrame(columns | {"samples": 1, "received_mb": 1.0})


def test_compare_by_hand():
    parts = []
    for trial, shift in ((0, 0), (1, 2)):  # 12 uploads: the last sixth is the last round
        parts.append(scripted("a", trial, [1, 2, 3, 4, 50, 60 + shift], [2] * 6))
        parts.append(scripted("b", trial, [5, math.nan, 41, 43], [2, 2, 4, 4]))
    table = compare.compare(pd.concat(parts), "a")
    assert table.late.tolist() == [61, 43]
    assert table.final.tolist() == [61, 43]
    assert table.rounds.tolist() == [6, 4]
    halfwidth = 12.7062  # Student's quantile for two trials, of deviation sqrt(2)
    lead = table.loc["b", ["ahead", "low", "high"]].tolist()
    assert lead == pytest.approx([18, 18 - halfwidth, 18 + halfwidth], rel=1e-3)
    assert math.isnan(table.loc["a", "ahead"])
    assert table.loc["a", "std"] == pytest.approx(math.sqrt(2))
    with pytest.raises(ValueError, match="differ"):
        compare.compare(pd.concat([*parts, scripted("c", 0, [1, 2], [2, 2])]), "a")


def test_compare_joins_several_runs(tmp_path, data, monkeypatch):
    drawn = []
    monkeypatch.setattr(report, "plot", lambda df, path, **options: drawn.append((df, path)))
    flags = ["--dataset", data, "--budget", "8", "--trials", "2", "--method", "base"]
    first = tmp_path / "size"
    other = tmp_path / "both"
    launch(first, *flags, "--select", "size")
    launch(other, *flags, "--select", "size", "uniform")
    drawn.clear()
    compare.main([str(first), str(other), "--first", "fedavg size"])
    table = pd.read_csv(first / "compare.csv", index_col="method")
    assert table.index.tolist() == ["fedavg size", "fedavg"]
    assert table.uploads.tolist() == [8, 8]
    [(curves, path)] = drawn
    assert path == first / "compare.png"
    assert set(curves.method) == {"fedavg size", "fedavg"}
    with pytest.raises(SystemExit) as stopped:
        compare.main([str(first), "--first", "fedavg"])
    assert stopped.value.code == 2


def test_compare_refuses_what_is_not_comparable(tmp_path, capsys):
    rows = scripted("a", 0, [1, 2], [2, 2]).assign(setting="-")
    tables = {
        "good": rows,
        "sweep": pd.concat([rows.assign(setting="alpha=1"), rows.assign(setting="alpha=2")]),
        "other": rows.assign(accuracy=[1, 3]),
        "strange": rows[["method", "trial"]],
    }
    for name, table in tables.items():
        (tmp_path / name).mkdir()
        table.to_csv(tmp_path / name / "metrics.csv", index=False)
    for names, word in {
        "sweep": "a has several results",
        "good other": "a has several results",
        "good nosuch": "nosuch",
        "strange": "uploads",
    }.items():
        with pytest.raises(SystemExit) as stop:
            compare.main([str(tmp_path / name) for name in names.split()] + ["--first", "a"])
        assert stop.value.code == 2
        assert word in capsys.readouterr().err


# ---------------------------------------------------------------------------------- criticalfl.py

LATER = {
    "fedavg+criticalfl": "--method criticalfl --rounds 50 --delta 0 --lr-decay 1 --lr 0.1",
    "fedprox+criticalfl paper-rule": "--method criticalfl --rule paper --base fedprox",
    "fedavg+criticalfl paper-fgn": "--method criticalfl --signal paper --rounds 26 --delta 0.9",
    "fedavg+early": "--method early --rounds 8",
}


@pytest.mark.parametrize("method", LATER)
def test_the_later_code_equals_loops(tmp_path, data, method):
    flags = [*FLAGS, "--clients", "16", "--min-size", "2", "--dataset", data]
    flags += ["--eval-every", "9", *LATER[method].split()]
    with_cl = list(flags)
    if "early" in method:
        with_cl.insert(with_cl.index("--method") + 1, "cl")
    criticalfl.main([*with_cl, "--out", str(tmp_path)])
    rows = of(read(tmp_path), method)
    assert len({row["clients"] for row in rows}) > 1
    loops = CriticalLoops(flags)
    assert_same_rows(rows, loops.rows)
    theta = load_state(tmp_path, method)["theta"]
    torch.testing.assert_close(theta, loops.theta, rtol=0, atol=1e-9)


def test_the_study_goes_on_from_a_run_of_the_script(tmp_path, data):
    """FedCL and FedAvg are bit for bit the script's, and are not trained a second time."""
    flags = [*FLAGS, "--dataset", data, "--method", "base", "cl"]
    fedcl_fgn.main([*flags, "--out", str(tmp_path / "script")])
    criticalfl.main([*flags, "--out", str(tmp_path / "study")])
    wanted = [row | {"seconds": ""} for row in read(tmp_path / "script")]
    assert [row | {"seconds": ""} for row in read(tmp_path / "study")] == wanted
    before = read(tmp_path / "script")
    flags += ["criticalfl", "early", "--out", str(tmp_path / "script"), "--resume"]
    criticalfl.main(flags)
    assert read(tmp_path / "script")[: len(before)] == before  # their seconds, too


@pytest.mark.parametrize(
    "study, flags",
    [
        (fedcl_fgn, "--method cl"),
        (selection, "--method cl --budget 0"),
        (criticalfl, "--method criticalfl --rule paper --signal paper"),
    ],
)
def test_a_signal_that_is_not_finite_ends_the_run_with_3(
    tmp_path, data, study, flags, monkeypatch, capsys
):
    monkeypatch.setattr(fedcl_fgn, "squared_norms", lambda *_: np.full(2, np.inf))
    with pytest.raises(SystemExit) as stop:
        study.main([*FLAGS, "--dataset", data, "--out", str(tmp_path), *flags.split()])
    assert stop.value.code == 3
    assert "round 1: FGN is inf; try a smaller --lr" in capsys.readouterr().err


@pytest.mark.parametrize(
    "clients, sizes",
    [
        ([4, 8, 16, 8, 2, 4], [16, 14, 3, 3, 3, 3]),
        ([16, 16, 16], [16, 16, 16]),
        ([2, 2, 8], [4, 4, 4]),
        ([5, 4, 4], [5, 4, 4]),
    ],
)
def test_early_clients_by_hand(clients, sizes):
    assert criticalfl.early_sizes(np.array(clients), 16).tolist() == sizes
