"""results/fedcl_fgn: whole runs against loops, rules against enumeration and scikit-learn."""

import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import ordinary
import pandas as pd
import plain_rules
import pytest
import torch
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
from scipy import stats
from scipy.spatial.distance import pdist, squareform

import common
import experiment
import fedcl_fgn
from data import load_data
from experiment import figures
from results.client_curriculum import rivals
from results.fedcl_fgn import clock, compare, criticalfl, rules, selection

draw = compare.plot  # other tests draw nothing
plot = figures.plot


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return str(write_data(tmp_path_factory.mktemp("data") / "tiny.npz"))


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """No figures: they have tests of their own."""
    monkeypatch.setattr(figures, "plot", lambda *args, **options: None)
    monkeypatch.setattr(compare, "plot", lambda *args: None)


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
    "fedavg size n=4": "--method base --select size --n 4",
    "fednova+constant": "--method constant --base fednova --clients-per-round 3",
    "fedavg+constant size": "--method constant --select size --rounds 4",
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


@pytest.mark.parametrize("name", rules.RULES)
def test_a_rule_selects_as_its_plain_program(name):
    cells, difference = plain_rules.compare(name)
    assert cells > 900
    assert difference < 1e-12


def test_oort_explores_less_as_rounds_pass():
    """0.9 * 0.98^t of the clients are new, but at least a fifth, and all that utility leaves."""
    fl = plain_rules.federation(plain_rules.World(2))
    found = []
    for t, known in ((0, 20), (20, 20), (300, 20), (400, 3)):
        turns = {m: {"round": 1} for m in range(known)}
        utility = dict.fromkeys(range(known), 1.0)
        state = {"theta": None, "turns": turns, "oort": {"utility": utility, "achieved": []}}
        clients = rules.oort(fl, state, t, 10).clients
        found.append((clients >= known).sum())
    assert found == [9, round(10 * 0.9 * 0.98**20), 2, 7]


def test_oort_knows_a_utility_among_many_without_loss():
    """29 of 40 clients have no loss. By its odds the other is in 83 % of the selections."""
    turns = {m: {"round": 40} for m in range(30)}
    found = 0
    for seed in range(100):
        fl = plain_rules.federation(plain_rules.World(seed))
        fl.devices = np.ones((2, 40))
        fl.sizes = np.full(40, 9)
        utility = {m: 5.0 * (m == 3) for m in range(30)}
        state = {"theta": None, "turns": turns, "oort": {"utility": utility, "achieved": []}}
        drawn = rules.oort(fl, state, 200, 5)
        found += 3 in drawn.clients
        assert drawn.scored == 45
    assert 65 < found < 97


def test_distances_and_angles_are_scipys():
    """Rounding puts squares below 0, and cosines above 1. Zero is at right angles to the others."""
    vectors = np.random.default_rng(0).normal(size=(40, 30))
    vectors[20:] = vectors[:20]
    found = rules.distances(torch.tensor(vectors)).numpy()
    np.testing.assert_allclose(found, squareform(pdist(vectors)), atol=1e-6)
    cosines = 1 - squareform(pdist(vectors, "cosine"))
    zero = np.zeros((2, 30))
    found = rules.angles(np.concatenate([2 * vectors, zero]))
    np.testing.assert_allclose(found[:40, :40], np.arccos(np.clip(cosines, -1, 1)), atol=1e-6)
    np.testing.assert_allclose(found[40:, :40], math.pi / 2)
    assert (found[40:, 40:] == 0).all()


def test_an_urn_whose_clients_are_all_taken_selects_another():
    urns = np.array([[1.0, 0, 0], [1.0, 0, 0], [1.0, 0, 0]])
    assert rules.draw_from_urns(urns, np.random.default_rng(0)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("scale", [0, 1e6])
def test_fedcor_takes_all_clients_where_rounding_exceeds_the_noise(scale):
    rng = np.random.default_rng(0)
    changes = scale * rng.normal(size=(15, 3)) @ rng.normal(size=(3, 9))
    with np.errstate(divide="raise", invalid="raise"):
        K, s_sq = rules.fit_covariance(changes, 5)
        taken = rules.take_greedily(K, s_sq, np.ones(9), np.full(9, 1 / 9), 9)
    assert sorted(taken) == list(range(9))


@pytest.mark.parametrize("M, rank", [(8, 3), (4, 5)])  # 5 of 4 are 3
def test_fedcor_learns_its_covariance_as_scikit_learns_pca(M, rank):
    from sklearn.decomposition import PCA

    rng = np.random.default_rng(2)
    changes = rng.normal(size=(50, 3)) @ rng.normal(size=(3, M)) + 0.1 * rng.normal(size=(50, M))
    K, s_sq = rules.fit_covariance(changes, rank)
    pca = PCA(3).fit(changes)
    np.testing.assert_allclose((K + s_sq * np.eye(M)) * 50 / 49, pca.get_covariance(), atol=1e-10)


@pytest.mark.parametrize(
    "study, option", [(selection, "--select"), (clock, "--select"), (rivals, "--client-order")]
)
def test_hics_wants_an_output_bias(tmp_path, data, study, option, capsys):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def Net(channels, side, classes):\n"
        "    last = nn.Linear(channels * side**2, classes, bias=False)\n"
        "    return nn.Sequential(nn.Flatten(), last)\n"
    )
    words = f"--dataset {data} --model {tmp_path}/mine.py:Net --clients 6 --clients-per-round 2"
    words += " --rounds 1 --trials 1 --jobs 1"
    if option == "--select":
        words += " --method base --budget 0"
    with pytest.raises(SystemExit) as stopped:
        study.main([*words.split(), option, "hics", "--out", str(tmp_path / "hics")])
    assert stopped.value.code == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.endswith("mine.py:Net does not end with the bias of its output layer")
    other = {"--select": "oort", "--client-order": "random"}[option]
    study.main([*words.split(), option, other, "--out", str(tmp_path / other)])  # it needs none


def test_gamma_falls_with_the_uploads_of_a_budget():
    config = SimpleNamespace(budget=40, rounds=10)
    assert rules.spent(config, {"uploads": 10}, 9) == 0.25
    config.budget = 0
    assert rules.spent(config, {"uploads": 10}, 9) == 0.9


SCORERS = {"power_of_choice": [2] * 5, "fedcor": [4] * 4 + [0]}


@pytest.mark.parametrize("rule", [name for name in rules.RULES if name not in ("uniform", "size")])
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
    scorers = np.cumsum(SCORERS.get(rule, [0] * 5))
    np.testing.assert_allclose(np.array(received) / P, 2 * rounds + scorers, rtol=1e-4)
    np.testing.assert_allclose(np.array(sent) - 2 * rounds * P, scorers, atol=0.3)
    assert [row["clients"] for row in rows] == ["2"] * 5
    assert sum(turn["times"] for turn in state["turns"].values()) == 10
    if rule in ("hics", "divfl", "round_robin"):
        assert len(state["turns"]) == 6  # each of six within the first three rounds of two
    scored = [int(row["scored"]) for row in rows]
    processed = np.diff([int(row["samples"]) for row in rows], prepend=0)
    if rule == "fedcor":
        assert scored == [75] * 4 + [0]
    elif rule == "oort":
        assert (2 * np.array(scored) == processed).all()  # two epochs of what was scored
    elif rule == "power_of_choice":
        assert (2 * np.array(scored) > processed).all()
    else:
        assert scored == [0] * 5


def test_hics_selects_when_the_learning_rate_is_0(tmp_path, data):
    """1e-300 and then 1e-500, which is 0. So no gradient is known after six clients' turns."""
    flags = ["--dataset", data, "--method", "base", "--lr", "1e-300", "--lr-decay", "1e-200"]
    rows = launch(tmp_path, *flags, "--select", "hics")
    assert [row["clients"] for row in rows] == ["2"] * 5


@pytest.mark.parametrize("rule", ["hics", "fedcor", "oort", "clusters_by_similarity"])
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
    "Draw([0] * n, [1] * n)": "different clients from 0 to 5, not these 2: 0 0",
    "Draw(np.arange(n) + 6, np.ones(n))": "not these 2: 6 7",
    "Draw(-1 - np.arange(n), np.ones(n))": "not these 2: -1 -2",
    "Draw(np.arange(n) + 0.5, np.ones(n))": "not these 2: 0.5",
    "Draw(np.arange(n - 1), np.ones(n - 1))": "different clients from 0 to 5, not these 1: 0",
    "Draw(np.arange(n), np.ones(n + 1))": "finite weights",
    "Draw(np.arange(n), np.full(n, np.nan))": "finite weights",
    "Draw(np.arange(n), -np.ones(n))": "finite weights",
    "Draw(np.arange(n), np.zeros(n))": "finite weights",
    "Draw(np.arange(n), np.ones(n), 'x')": "'x'",
    "Draw(np.arange(n), np.ones(n), -1000)": "scorers >= 0, not -1000",
    "Draw(np.arange(n), np.ones(n), scored=-1)": "scored >= 0, not -1",
    "exit(3)": "SystemExit in own.py, line 4",
    "state.clear() or Draw(np.arange(n), np.ones(n))": "state['theta'] belongs to the run",
    "state['theta'].zero_().sum() or Draw(np.arange(n), np.ones(n))": "changed state['theta']",
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
    assert f"--select {path}:own: division by zero (ZeroDivisionError in broken.py, line 1)" in line
    assert "; wanted uniform" in line


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


def test_a_short_last_batch_can_be_left_out(tmp_path, data):
    """All clients take part, so each round has the whole batches of all."""
    flags = ["--dataset", data, "--method", "base", "--budget", "0", "--rounds", "1"]
    flags += ["--clients-per-round", "6", "--epochs", "2", "--batch-size", "4", "--min-size", "4"]
    flags += ["--seed", "1"]
    fl = federate(data, *flags)
    for words, samples in (([], fl.sizes), (["--drop-last"], fl.sizes // 4 * 4)):
        [row] = launch(tmp_path / str(len(words)), *flags, *words)
        assert float(row["samples"]) == 2 * samples.sum()
    assert (fl.sizes % 4).any()


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


def scripted(method, trial, accuracy, clients, **columns) -> pd.DataFrame:
    """A run's rows: two samples and half a second for each client, and tests where there is one."""
    rounds = np.arange(len(clients)) + 1
    uploads = np.cumsum(clients)
    rows = {"setting": "-", "method": method, "trial": trial, "round": rounds, "uploads": uploads}
    rows |= {"accuracy": accuracy, "samples": 2 * uploads, "clock": 0.5 * uploads}
    return pd.DataFrame(rows | {"received_mb": 1.0, "sent_mb": 2.0, "scored": 3} | columns)


def straight(x, points) -> float:
    """The height at x of straight lines through points (x, y), level beyond both ends."""
    points = sorted(points)
    if x <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in itertools.pairwise(points):
        if x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return points[-1][1]


def late(rows: pd.DataFrame, cost: str, end: float) -> float:
    """The mean of a curve over the last sixth of a cost, from many heights."""
    points = [(row[cost], row.accuracy) for _, row in rows.iterrows() if row.accuracy >= 0]
    heights = [straight(end * (5 + i / 5000) / 6, points) for i in range(5001)]
    return sum(heights) / len(heights)


def test_gains_by_a_plain_program():
    """Rows in random order, names that sort against their order, a trial that one method lacks."""
    rng = np.random.default_rng(5)
    runs = {}
    for trial in (3, 0, 2, 1):
        for method, rounds in (("fedavg", 9), ("fedavg b", 9), ("fedavg a", 6), ("fedavg+cl", 4)):
            if (method, trial) != ("fedavg a", 2):
                accuracy = 50 + rng.normal(size=rounds).cumsum()
                accuracy[:-1:2] = math.nan
                clients = rng.integers(2, 9, rounds)
                seconds = rng.random(rounds).cumsum()
                runs[method, trial] = scripted(method, trial, accuracy, clients, clock=seconds)
    df = pd.concat(runs.values())
    shuffled = df.iloc[rng.permutation(len(df))]
    table = compare.gains(shuffled).set_index(["method", "cost"])
    cells = 0
    p = {}
    for method, cost in itertools.product(["fedavg b", "fedavg a", "fedavg+cl"], compare.COSTS):
        found = []
        for trial in range(4):
            if (method, trial) in runs:
                pair = [runs[method, trial], runs["fedavg", trial]]
                end = min(rows[cost].max() for rows in pair)
                found.append(late(pair[0], cost, end) - late(pair[1], cost, end))
        row = table.loc[method, cost]
        interval = stats.ttest_1samp(found, 0).confidence_interval(0.95)
        wanted = [np.mean(found), *interval, stats.ttest_1samp(found, 0).pvalue]
        np.testing.assert_allclose(row[["mean", "low", "high", "p"]].tolist(), wanted, rtol=0.01)
        assert (row.control, row.trials) == ("fedavg", len(found))
        cells += 6
        p[method, cost] = row.p
    assert cells == 54 == 6 * len(table)
    ascending = sorted((key for key in p if key[1] == "uploads"), key=p.get)
    adjusted = [min(1, p[key] * (3 - place)) for place, key in enumerate(ascending)]
    for place, key in enumerate(ascending):
        assert table.loc[key].holm == pytest.approx(max(adjusted[: place + 1]))
    assert table.holm.isna().sum() == 6  # samples and seconds are not tested


@pytest.mark.parametrize(
    "method, control",
    [
        ("fedavg size", "fedavg"),
        ("fedavg n=8", "fedavg"),
        ("fedavg+longer", "fedavg"),
        ("fedavg+cl", "fedavg+constant"),
        ("fedavg+cl size", "fedavg+constant"),
        ("fedavg+cl-fim", "fedavg"),
        ("fedavg+criticalfl", "fedavg+constant-criticalfl"),
        ("fedavg+constant", None),
        ("fedavg+constant-fim", None),
        ("fedavg", None),
        ("fedprox size", None),
    ],
)
def test_what_a_method_is_compared_with(method, control):
    methods = ["fedavg", "fedavg+constant", "fedavg+constant-criticalfl", method]
    assert compare.uniform_of(method, methods) == control


def test_what_a_run_costs_by_hand(capsys):
    """A third of a scored sample counts. Of a star, p is below 0.05, and two trials are few."""
    parts = []
    for trial, shift in ((0, 0.0), (1, 0.02)):
        parts.append(scripted("fedavg", trial, [40, 41, 42.0], [2, 2, 2]))
        gained = [60, 61 + shift, 62 + shift]
        parts.append(scripted("fedavg size", trial, gained, [4, 4, 4], scored=[6, 0, 9]))
    df = pd.concat(parts)
    found = compare.gains(df)
    spent = compare.costs(df)
    [row] = compare.relative(found, spent).itertuples()
    assert row.samples == (24 + 15 / 3) / (12 + 9 / 3)
    assert row.megabytes == 1
    cl = [scripted(f"fedavg+{how}", 0, [1, 2, 3.0], [8, 8, 8]) for how in ("cl", "constant")]
    both = pd.concat([*parts[:1], *cl])
    [row] = compare.relative(compare.gains(both), compare.costs(both)).itertuples()
    assert (row.control, row.samples) == ("fedavg+constant", (48 + 3) / (12 + 3))
    alone = pd.concat(cl)
    [row] = compare.relative(compare.gains(alone), compare.costs(alone)).itertuples()
    assert row.samples == 1
    line = compare.shown(found, spent).loc["-", "fedavg size"]
    assert line[["uploads", "samples", "scored", "simulated s", "megabytes"]].tolist() == [
        "12", "24", "15", "6", "3",
    ]  # fmt: skip
    assert line["n"] == 2 and line["over"] == "fedavg"
    assert re.fullmatch(r"\+1\d\.\d \[1\d\.\d, \d\d\.\d\]\*", line["equal uploads"])
    assert compare.shown(found, spent).loc["-", "fedavg"].tolist()[:6] == [
        "",
        "",
        "",
        "",
        "",
        "41.8",
    ]
    one_trial = compare.shown(compare.gains(df[df.trial == 0]), spent)
    assert re.fullmatch(r"\+\d\d\.\d", one_trial.loc["-", "fedavg size"]["equal samples"])
    apart = df[(df.trial == 0) != (df.method == "fedavg")]  # one has trial 0, the other trial 1
    line = compare.shown(compare.gains(apart), spent).loc["-", "fedavg size"]
    assert (line["n"], line["equal uploads"]) == (0, "")
    assert compare.costs(df.drop(columns="scored")).scored.tolist() == [0, 0]


def test_one_command_prints_the_table_with_an_own_rule(tmp_path, data, capsys):
    own = write_rule(tmp_path / "own.py", "Draw(np.arange(n), np.ones(n), scorers=1, scored=20)")
    flags = ["--dataset", data, "--trials", "2", "--method", "base", "--select", "uniform", own]
    launch(tmp_path / "run", *flags)
    _, _, printed = capsys.readouterr().out.partition("what each method gains")
    [line] = [line for line in printed.splitlines() if line.startswith("fedavg mine")]
    assert line.split()[:4] == ["fedavg", "mine", "fedavg", "2"]
    assert line.split()[-3] == "100"  # scored in five rounds
    table = pd.read_csv(tmp_path / "run" / "gains.csv")
    assert table.cost.tolist() == ["uploads", "samples", "clock"]
    assert set(table.method) == {"fedavg mine"}
    assert (table.uploads == 10).all()


def test_detection_is_compared_with_uniform_selection_at_its_own_uploads(tmp_path, data):
    """In as many rounds: `constant` spends FedCL's uploads, or the later rule's."""
    flags = ["--dataset", data, "--rounds", "6", "--clients", "16", "--min-size", "2", "--method"]
    methods = ["cl", "criticalfl", "constant"]
    rows = launch(tmp_path / "run", *flags, *methods, "--follow", "cl", "criticalfl")
    ends = {row["method"]: (row["round"], row["uploads"]) for row in rows}
    assert ends["fedavg+cl"] == ends["fedavg+constant"]
    assert ends["fedavg+criticalfl"] == ends["fedavg+constant-criticalfl"]
    assert ends["fedavg+cl"] != ends["fedavg+criticalfl"]
    table = pd.read_csv(tmp_path / "run" / "gains.csv").set_index("method")
    assert set(table.control["fedavg+criticalfl"]) == {"fedavg+constant-criticalfl"}
    assert set(table.index) == {"fedavg+cl", "fedavg+criticalfl"}
    criticalfl.main([*FLAGS, *flags, "criticalfl", "--out", str(tmp_path / "other")])
    again = read(tmp_path / "other")
    ours = of(rows, "fedavg+criticalfl")
    assert [row["loss"] for row in ours] == [row["loss"] for row in again]
    assert [row["fgn"] for row in ours] == [row["fgn"] for row in again]


def test_compare_joins_several_runs(tmp_path, data, monkeypatch, capsys):
    drawn = []

    def keep(found, spent, path, title):
        drawn.append((len(found), len(spent), path))

    monkeypatch.setattr(compare, "plot", keep)
    flags = ["--dataset", data, "--budget", "8", "--trials", "2", "--method", "base"]
    first = tmp_path / "size"
    other = tmp_path / "both"
    launch(first, *flags, "--select", "size", "uniform")
    launch(other, *flags, "--select", "oort", "uniform")
    drawn.clear()
    compare.main([str(first), str(other)])
    table = pd.read_csv(first / "gains.csv")
    assert set(table.method) == {"fedavg size", "fedavg oort"}
    assert table.trials.tolist() == [2] * 6
    assert drawn == [(6, 3, first / "gains.png")]
    launch(tmp_path / "alone", *flags, "--select", "size")
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        compare.main([str(tmp_path / "alone")])
    assert stopped.value.code == 2
    assert "no run of uniform selection" in capsys.readouterr().err


def test_compare_refuses_what_is_not_comparable(tmp_path, capsys):
    rows = scripted("fedavg", 0, [1, 2], [2, 2])
    tables = {
        "good": rows,
        "other": rows.assign(accuracy=[1, 3]),
        "strange": rows[["method", "trial"]],
    }
    for name, table in tables.items():
        (tmp_path / name).mkdir()
        table.to_csv(tmp_path / name / "metrics.csv", index=False)
    for names, word in {
        "good other": "fedavg has several results",
        "good nosuch": "nosuch",
        "strange": "strange: no column setting; wanted a run of selection.py",
    }.items():
        with pytest.raises(SystemExit) as stop:
            compare.main([str(tmp_path / name) for name in names.split()])
        assert stop.value.code == 2
        assert word in capsys.readouterr().err


def test_the_figure_shows_the_gains_over_their_costs(tmp_path, monkeypatch):
    """A point, its interval and its name in each panel. More than 24 panels are not drawn."""
    drawn = []
    monkeypatch.setattr(figures, "plot", plot)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *args, **_: drawn.append(args))
    parts = []
    for trial in (0, 1, 2):
        shift = trial / 100
        parts.append(scripted("fedavg", trial, [1, 2.0], [2, 2]))
        parts.append(scripted("fedavg size", trial, [2, 5 + shift], [2, 2], sent_mb=5.0))
        parts.append(scripted("fedavg loss", trial, [1, 1 - shift], [2, 2], scored=[9, 9]))
        parts.append(scripted("fedavg oort", trial, [1, 2 + trial % 2], [2, 2], scored=[15, 15]))
    df = pd.concat(parts)
    found = compare.gains(df)
    spent = compare.costs(df)
    draw(found, spent, tmp_path / "one.png", "a title")
    rows = found[found.cost == "uploads"].set_index("method")
    [axis] = drawn[0][0].axes
    names = {text.get_text(): text for text in axis.texts}
    assert {*names} == {"size (2.0 x MB)", "loss", "oort"}
    wanted = {"size": (1, "#0072B2"), "loss": (1.4, "#D55E00"), "oort": (1.8, "0.45")}
    lines = [np.array(line.get_data()).tolist() for line in axis.lines]
    for text, label in names.items():
        name = text.split()[0]
        row = rows.loc[f"fedavg {name}"]
        x, color = wanted[name]
        assert label.xy == pytest.approx((x, row["mean"]))
        assert label.get_color() == color
        assert [[x, x], [row.low, row.high]] in lines
    assert "a title" in drawn[0][0].get_suptitle()
    for number in (24, 25):
        many = pd.concat([df.assign(setting=f"alpha={i}") for i in range(number)])
        draw(compare.gains(many), compare.costs(many), tmp_path / "many.png", "")
    assert [len(figure.axes) for figure, _ in drawn] == [1, 24]


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
