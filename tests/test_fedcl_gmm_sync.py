"""Every oracle and trap of FedCL and its baselines, against closed forms, SciPy, scikit-learn and brute-force loops."""

import copy
import csv
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import lambertw, rel_entr
from sklearn.mixture import GaussianMixture
from torch import nn

import common
import fedcl_gmm_sync as g

SMALL = {"clients": 8, "clients_per_round": 4, "local_steps": 3, "rounds": 3, "trials": 1, "threads": 1}


def small(**flags) -> g.Config:
    return g.Config(**SMALL | flags)


def run_of(config, method, folder) -> common.Run:
    return common.Run(config, method, "", 0, folder)


def trained(folder, method="fedcl", **flags) -> tuple[dict, list[dict]]:
    """The state after the last round and the rows of one run on digits."""
    run = run_of(small(**flags), method, folder / f"{method}{sorted(flags.items())}")
    g.federate(run.config, common.load_data("digits"), run)
    return common.load_checkpoint(run.path)["state"], run.rows


def begun(tmp_path, method="fedcl", **flags) -> tuple[g.Federation, dict]:
    """A federation in float64 and a state with uploads of four clients, as after a first round."""
    run = run_of(small(dtype="float64", **flags), method, tmp_path)
    fed = g.prepare(run.config, common.load_data("digits"), run)
    state = g.initial_state(fed)
    rng = np.random.default_rng(5)
    state["counts"] = {k: rng.integers(1, 50, 10).tolist() for k in range(4)}
    state["pool"] = np.sort(rng.normal(-20, 4, 100)).tolist()
    return fed, state


# ------------------------------------------------------------------------------------------- the confidence-aware loss

TABLE = [
    (10, 0.5, 0, 2.718282, -27.182818, -26.682818),
    (10, 0.5, 5, 2.718282, -13.591409, -13.091409),
    (10, 0.5, 10, 1, 0, 0),
    (10, 0.5, 12, 0.426303, 0.852606, 1.216074),
    (math.log(10), 1, 2, 1.198871, -0.362760, -0.329862),
    (math.log(10), 1, 5, 0.505631, 1.363896, 1.828950),
    (math.log(10), 0.5, 3, 0.639974, 0.446328, 0.545932),
    (math.log(26), 0.5, 5, 0.453704, 0.790309, 1.102604),
]


@pytest.mark.parametrize("tau, lam, ce, s, score, loss", TABLE)
def test_confidence_score_and_loss_of_the_table(tau, lam, ce, s, score, loss):
    ce = torch.tensor([float(ce)], dtype=torch.float64)
    got = (g.confidence(ce, tau, lam), g.difficulty_score(ce, tau, lam), g.confidence_loss(ce, tau, lam))
    np.testing.assert_allclose(torch.cat(got), [s, score, loss], atol=1e-6)


def test_lambert_w_is_scipys():
    x = np.concatenate([-np.exp(-1) + np.logspace(-12, -0.45, 200), np.linspace(-0.3, 3, 200), np.logspace(0, 12, 200)])
    np.testing.assert_allclose(g.lambert_w(torch.as_tensor(x)).numpy(), lambertw(x).real, rtol=1e-10, atol=2e-8)
    assert torch.isfinite(g.lambert_w(torch.tensor([-1 / math.e, -2 / math.e / 2], dtype=torch.float64))).all()


def test_confidence_minimises_eq_7():
    ce = torch.linspace(0, 30, 61, dtype=torch.float64)
    s = torch.logspace(-5, 1, 4000, dtype=torch.float64)[:, None]
    s = s[s[:, 0] <= math.e]  # where the confidence lives
    for tau, lam in ((10, 0.5), (math.log(10), 0.5), (5, 2.0)):
        grid = (ce - tau) * s + lam * s.log() ** 2
        unclamped = (ce - tau) / lam > -2 / math.e
        assert (g.confidence_loss(ce, tau, lam) <= grid.min(0).values + 1e-12)[unclamped].all()
        assert (g.confidence(ce, tau, lam) == math.e)[~unclamped].all()


@pytest.mark.parametrize("tau, lam", [(10, 0.5), (math.log(10), 0.5), (math.log(10), 1e9)])
def test_gradient_is_s_times_that_of_cross_entropy(tau, lam):
    torch.manual_seed(0)
    logits, y = 1.5 * torch.randn(50, 10, dtype=torch.float64), torch.randint(10, (50,))
    logits.requires_grad_()
    (plain,) = torch.autograd.grad(F.cross_entropy(logits, y, reduction="sum"), logits)
    ce = F.cross_entropy(logits, y, reduction="none")
    assert not g.confidence(ce, tau, lam).requires_grad
    (curriculum,) = torch.autograd.grad(g.confidence_loss(ce, tau, lam).sum(), logits)
    b = (ce.detach().numpy() - tau) / lam
    s = np.where(b <= -2 / math.e, math.e, np.exp(-lambertw(np.maximum(b, -2 / math.e) / 2).real))  # SciPy: nan at -1/e
    torch.testing.assert_close(curriculum, torch.as_tensor(s)[:, None] * plain)
    if tau == 10:
        torch.testing.assert_close(curriculum, math.e * plain, rtol=1e-14, atol=0)  # degenerate: e times the learning rate
    elif lam == 1e9:
        torch.testing.assert_close(curriculum, plain, rtol=1e-7, atol=1e-9)


# -------------------------------------------------------------------------------- the pool, freezing, phases


def test_beta_T_is_numpys_inverted_cdf_and_counts_add_up():
    rng = np.random.default_rng(0)
    for N in (1, 7, 100, 6400):
        draws = np.split(np.sort(rng.normal(size=N))[rng.permutation(N)], np.unique(rng.integers(0, N, 5)))
        pool = np.sort(np.concatenate(draws))
        for T in (*rng.uniform(0.01, 0.99, 30), 0.8, 0.6, 0.2, 0.9, 0.3):
            beta_T = g.quantile(pool.tolist(), T)
            assert beta_T == np.quantile(pool, T, method="inverted_cdf")
            assert sum((part <= beta_T).sum() for part in draws) == math.ceil(T * N)


def test_beta_T_where_T_times_N_is_no_float():
    assert math.ceil(0.07 * 100) == 8  # the trap
    assert g.quantile(list(range(1, 101)), 0.07) == 7


@pytest.mark.parametrize("v, size", [(0.7, 320), (0.55, 320), (0.07, 100), (0.6, 320)])
def test_freezing_is_strict_at_exactly_v(v, size):
    draws = np.arange(1, size + 1)
    assert not g.passes(draws, round(v * size), v)
    assert g.passes(draws, round(v * size) + 1, v)


def test_nothing_passes_at_v_1():
    assert not g.passes(np.zeros(320), 1.0, 1.0)


def phase_state(pool, **flags):
    return {"phase": 0, "begun": 0, "frozen": [], "pool": np.sort(pool).tolist()} | flags


@pytest.mark.parametrize("T, v, most", [(0.3, 0.7, 8), (0.6, 0.7, 17), (0.2, 0.7, 5), (0.8, 0.7, 20)])
def test_pigeonhole_bounds_who_can_pass_one_check(T, v, most):
    """Brute force: m clients hold just enough of the lowest scores each, the others none, for every m."""
    config = g.Config(thresholds=(T,), v=v)
    need, counts = 225, []
    for m in range(1, 21):
        low, high = iter(np.linspace(0, 1, m * need)), iter(np.linspace(2, 3, 20 * 320))
        draws = {k: np.array([next(low) if k < m and i < need else next(high) for i in range(320)]) for k in range(20)}
        state = phase_state(np.concatenate(list(draws.values())))
        counts.append(g.synchronise(config, state, np.arange(20), draws, 0)["froze"])
    assert max(counts) == most


def test_hand_made_mixtures_freeze_only_fresh_participants_below_beta():
    points = {k: [[1.0], [float(k)], [1e-20]] for k in range(4)}  # scores 0, 1, 2, 3
    config, streams = g.Config(clients=4, clients_per_round=4, thresholds=(0.3, 0.2), rounds=10), common.Streams(1)
    draws = g.pooled_draws(points, streams, 0)
    state = phase_state(np.concatenate(list(draws.values())))
    columns = g.synchronise(config, state, np.array([1, 2]), draws, 0)
    assert abs(columns["beta_T"] - 1) < 1e-6  # element 384 of 1280: all draws of client 0 and 64 of client 1
    assert columns["frozen"] == 0 and columns["fractions"] == "1.000 0.200 0.000 0.000"
    columns = g.synchronise(config, state, np.array([0, 2, 3]), draws, 1)
    assert state["frozen"] == [0] and columns["froze"] == 1 and columns["advance"] == ""


def test_natural_advance_unfreezes_everyone_and_quorum_lowers_the_bar():
    draws = {k: np.full(320, float(k >= 3)) for k in range(4)}
    state = phase_state(np.concatenate(list(draws.values())))
    config = g.Config(clients=4, clients_per_round=4, thresholds=(0.5, 0.2), rounds=10)
    columns = g.synchronise(config, state, np.arange(4), draws, 0)
    assert columns["advance"] == "" and state["frozen"] == [0, 1, 2] and state["phase"] == 0
    config = g.Config(clients=4, clients_per_round=4, thresholds=(0.5, 0.2), rounds=10, phase_quorum=0.75)
    columns = g.synchronise(config, state | {"frozen": []}, np.arange(4), draws, 3)
    assert columns["advance"] == "natural" and columns["frozen"] == 3
    state = phase_state(np.concatenate(list(draws.values())))
    g.synchronise(config, state, np.arange(4), draws, 3)
    assert (state["phase"], state["begun"], state["frozen"]) == (1, 4, [])


def test_after_the_last_phase_nobody_freezes():
    draws = {0: np.zeros(320)}
    state = phase_state(np.zeros(320), phase=3)
    columns = g.synchronise(g.Config(), state, np.array([0]), draws, 9)
    assert state["frozen"] == [] and columns == {"phase": 4, "frozen": 0, "froze": 0}


def test_v_1_forces_every_advance_and_the_run_ends(tmp_path):
    _, rows = trained(tmp_path, rounds=4, v=1.0, thresholds=(0.8, 0.2), local_steps=1)
    assert [row.get("advance", "") for row in rows] == ["", "forced", "", "forced"]
    assert [row["phase"] for row in rows] == [1, 1, 2, 2] and sum(row["froze"] for row in rows) == 0


def test_participants_are_the_unfrozen(tmp_path):
    config, streams = g.Config(), common.Streams(3)
    for t in range(5):
        np.testing.assert_array_equal(g.participants(config, [], streams, t), common.select(config, 10, streams, t))
        frozen = list(range(0, 20, 2)) + [1, 3, 5]
        assert g.participants(config, frozen, streams, t).tolist() == [7, 9, 11, 13, 15, 17, 19]  # min(10, 7)


def test_frozen_weights_stay_and_enter_the_average(tmp_path, monkeypatch):
    """Eq 21 by a loop over clients, from the states after every round of a real run in which clients freeze by rule."""
    states, save = [], common.Run.save
    monkeypatch.setattr(common.Run, "save", lambda run, t, state: (states.append(copy.deepcopy(state)), save(run, t, state)))
    _, rows = trained(tmp_path, rounds=6, local_steps=4)
    assert sum(row["froze"] for row in rows) >= 1 and max(row["frozen"] for row in rows) >= 1
    config, averaged = small(rounds=6, local_steps=4), 0
    for t, (before, after) in enumerate(zip(states, states[1:], strict=False), 1):
        taking_part = g.participants(config, before["frozen"], common.Streams(config.seed), t)
        assert not set(taking_part) & set(before["frozen"])
        for k in range(8):
            assert torch.equal(before["own"][k], after["own"][k]) == (k not in taking_part)
        group = [*before["frozen"], *taking_part]
        averaged += bool(before["frozen"])
        expected = sum(after["own"][k].double() for k in group) / len(group)
        torch.testing.assert_close(after["weights"].double(), expected, rtol=1e-5, atol=1e-7)
    assert averaged >= 1


# ------------------------------------------------------------------------------------------- mixtures


def test_mixture_is_the_scores_own(tmp_path):
    rng = np.random.default_rng(0)
    scores = np.concatenate([rng.normal(-6, 0.2, 300), rng.normal(-1, 0.3, 100), rng.normal(3, 0.1, 100)])
    alpha, mu, variance = (np.array(part) for part in g.mixture(scores, 1))
    order = np.argsort(mu)
    np.testing.assert_allclose(alpha[order], [0.6, 0.2, 0.2], atol=1e-6)
    np.testing.assert_allclose(mu[order], [scores[:300].mean(), scores[300:400].mean(), scores[400:].mean()], atol=1e-6)
    np.testing.assert_allclose(variance[order], [scores[:300].var(), scores[300:400].var(), scores[400:].var()], rtol=1e-3)


@pytest.mark.parametrize("scores, L", [([2.0] * 40, 1), ([1.0, 2.0] * 20, 2), ([1.5], 1)])
def test_fewer_distinct_scores_give_fewer_gaussians(scores, L):
    alpha, mu, variance = g.mixture(np.array(scores), 1)
    assert len(alpha) == len(mu) == len(variance) == L
    assert abs(np.dot(alpha, mu) - np.mean(scores)) < 1e-9 and min(variance) >= 0.99e-6


@pytest.mark.parametrize("centre, spread", [(1e5, 1e-3), (-1e5, 1e-6), (1e7, 1e-3)])
def test_huge_scores_that_hardly_differ_give_one_gaussian(centre, spread):
    """Where scikit-learn's E[x^2] - mu^2 is negative in floating point and it refuses to fit."""
    scores = centre + spread * np.random.default_rng(0).normal(size=200)
    with pytest.raises(ValueError, match="ill-defined"):
        GaussianMixture(3, covariance_type="diag", random_state=1).fit(scores[:, None])
    assert g.mixture(scores, 1) == [[1.0], [scores.mean()], [scores.var() + 1e-6]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_finite_stop_the_run(tmp_path, monkeypatch, bad):
    fed, state = begun(tmp_path, "fedcl-logc")
    ce = [(np.ones(40), None), (np.array([*np.ones(39), bad]), None)]
    monkeypatch.setattr(common, "score", lambda *_: ce)
    with pytest.raises(common.NonFiniteError, match="fedcl-logc round 3: .*client 5 .*smaller --lr"):
        g.upload_mixtures(fed, state, np.array([2, 5]), state["own"][:2], 2)
    assert 5 not in state["mixtures"]


def test_server_draws_follow_the_mixture_and_change_every_round():
    parameters = [[0.5, 0.3, 0.2], [-6.0, 0.0, 4.0], [0.04, 0.25, 1.0]]
    rounds = [g.pooled_draws({7: parameters}, common.Streams(1), t)[7] for t in range(100)]
    assert all(len(each) == 320 for each in rounds) and not np.array_equal(rounds[0], rounds[1])
    np.testing.assert_array_equal(rounds[3], g.pooled_draws({2: parameters, 7: parameters}, common.Streams(1), 3)[7])
    x = np.concatenate(rounds)
    assert abs(x.mean() - (-3 + 0.8)) < 0.05
    assert abs(x.var() - (0.5 * 36.04 + 0.3 * 0.25 + 0.2 * 17 - 2.2**2)) < 0.5


def test_upload_is_the_mixture_of_scores_at_tau_log_c_not_of_losses(tmp_path):
    """At tau = 10 scores are an affine map of losses, so a mixture of losses would pass: compare at log C."""
    fed, state = begun(tmp_path, "fedcl-logc")
    theta = 3 * state["weights"]  # losses on both sides of the clamp
    g.upload_mixtures(fed, state, np.array([2]), theta[None], 0)
    loss, _ = common.score(fed.model, theta, fed.data, [fed.shards[2]])[0]
    b = np.maximum((loss - math.log(10)) / 0.5, -2 / math.e + 1e-15)
    scores = (loss - math.log(10)) * np.exp(-lambertw(b / 2).real)
    alpha, mu, variance = map(np.array, state["mixtures"][2])
    assert abs(alpha @ mu - scores.mean()) < 1e-6 and abs(scores.mean() - loss.mean()) > 0.1
    assert abs(alpha @ (variance + mu**2) - (scores**2).mean()) < 1e-4


def test_only_parameters_are_uploaded(tmp_path):
    state, _ = trained(tmp_path, rounds=1)
    assert all(len(m) == 3 and max(map(len, m)) <= 3 for m in state["mixtures"].values())
    assert len(state["pool"]) == 320 * len(state["mixtures"])


# -------------------------------------------------------------------------------------------------- the generator


def test_parameter_counts():
    for difficulty, count in ((True, 20_000), (False, 19_744)):
        assert sum(p.numel() for p in g.Generator(10, 32, 256, difficulty).parameters()) == count
    blank = torch.zeros(1, 28, 28, 1, dtype=torch.uint8)
    for classes, count in ((10, 26_434), (26, 26_962)):
        data = common.Data(blank, torch.zeros(1), blank, torch.zeros(1), classes)
        assert common.build_model("fedgen-cnn", data).trainable == count


def test_diversity_against_loops_and_for_identical_features():
    torch.manual_seed(0)
    z, eps = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    pairs = [(z[i] - z[j]).abs().mean() * ((eps[i] - eps[j]) ** 2).mean() for i in range(5) for j in range(5)]
    torch.testing.assert_close(g.diversity(z, eps), torch.exp(-torch.stack(pairs).mean()))
    assert g.diversity(z[:1].expand(5, -1), eps) == 1


def reference_generator(G):
    """The same net over the concatenation (eps, one-hot y, s), in plain layers."""
    net = nn.Sequential(nn.Linear(43, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 32)).double()
    with torch.no_grad():
        net[0].weight.copy_(torch.cat([G.hidden.weight, G.column[:, None]], 1))
        net[0].bias.copy_(G.hidden.bias)
    net[1].load_state_dict(G.norm.state_dict())
    net[3].load_state_dict(G.out.state_dict())
    return net


def test_teaching_is_adam_on_eq_18_with_the_ensemble_of_heads(tmp_path):
    """Two rounds against plain layers, one unbroken Adam and the mean of each user's logits; no classifier weight moves."""
    fed, state = begun(tmp_path, "fedcl-logc")
    torch.manual_seed(1)
    users = state["weights"] + 0.3 * torch.randn(3, len(state["weights"]), dtype=torch.float64)  # A_t
    state["weights"] = users.mean(0)
    reference = reference_generator(g.generator(fed, {}))
    adam = torch.optim.Adam(reference.parameters(), lr=1e-4, weight_decay=1e-2)
    before = copy.deepcopy({name: state[name] for name in ("weights", "own")})
    for t in range(2):
        adam.param_groups[0]["lr"] = 1e-4 * 0.98**t
        for y, s, eps in zip(*g.conditions(fed, state, (50, 128), "teaching", t), strict=True):
            z = reference(torch.cat([eps, F.one_hot(y, 10), s[:, None]], 1))
            logits = [fed.model.bind(user[None]).head(z[None])[0] for user in users]
            ce = F.nll_loss(torch.log(torch.softmax(sum(logits) / 3, 1)), y, reduction="none")
            far = ((z[:, None] - z).abs().mean(2) * (eps[:, None] - eps).square().mean(2)).mean()
            adam.zero_grad()
            (g.confidence_loss(ce, math.log(10), 0.5).mean() + torch.exp(-far)).backward()
            adam.step()
        g.teach(fed, state, fed.model.bind(state["weights"][None]).head, t)
        state = copy.deepcopy(state)  # what a checkpoint would carry
    for name in before:
        assert torch.equal(before[name], state[name])
    G = g.generator(fed, state["generator"])
    torch.testing.assert_close(G.hidden.weight, reference[0].weight[:, :42], rtol=0, atol=1e-7)
    torch.testing.assert_close(G.column, reference[0].weight[:, 42], rtol=0, atol=1e-7)
    torch.testing.assert_close(G.out.weight, reference[3].weight, rtol=0, atol=1e-7)
    torch.testing.assert_close(G.norm.running_mean, reference[1].running_mean, rtol=0, atol=1e-7)
    assert (G.out.weight - g.generator(fed, {}).out.weight).abs().max() > 1e-3


def test_conditions_follow_p_y_and_the_standardised_pool(tmp_path):
    fed, state = begun(tmp_path)
    y, s, eps = g.conditions(fed, state, (200, 100), "synthetic", 0, 3)
    p = np.sum(list(state["counts"].values()), 0) / np.sum(list(state["counts"].values()))
    np.testing.assert_allclose(np.bincount(y.flatten(), minlength=10) / 20_000, p, atol=0.015)
    pool = np.array(state["pool"])
    allowed = (pool - pool.mean()) / pool.std()
    assert np.isin(s.numpy().round(9), allowed.round(9)).all() and len(np.unique(s)) == 100
    assert abs(s.mean()) < 0.03 and abs(s.std() - 1) < 0.03
    assert eps.shape == (200, 100, 32) and abs(eps.std() - 1) < 0.01
    plain, without = begun(tmp_path, "fedgen")[0], begun(tmp_path, difficulty=False)[0]
    for other in (plain, without):  # the arms share labels and noise
        again = g.conditions(other, state, (200, 100), "synthetic", 0, 3)
        assert torch.equal(again[0], y) and torch.equal(again[2], eps) and not again[1].any()


def test_rank_correlation_of_a_generator_that_obeys(tmp_path, monkeypatch):
    fed, state = begun(tmp_path)
    state["counts"] = {0: [1, *[0] * 9]}  # every label is 0

    class Obedient(nn.Module):
        def forward(self, y, s, eps):
            return s[:, None]

    monkeypatch.setattr(g, "generator", lambda fed, saved: Obedient())
    for sign in (1, -1):
        head = lambda z, sign=sign: torch.cat([-sign * z, torch.zeros(*z.shape[:2], 9)], 2)  # noqa: E731
        assert abs(g.rank_correlation(fed, state, head, 0) - sign) < 1e-12
    assert g.rank_correlation(fed, state, lambda z: torch.zeros(*z.shape[:2], 10), 0) == 0.0


def test_generated_features_come_from_the_generator_in_eval_mode(tmp_path):
    fed, state = begun(tmp_path)
    g.teach(fed, state, fed.model.bind(state["weights"][None]).head, 0)  # BatchNorm's statistics are now its own
    clients = np.array([0, 3])
    got = g.generated(fed, state, clients, 1)
    net = reference_generator(g.generator(fed, state["generator"])).eval()
    for k, z, labels in zip(clients, got["z"], got["y'"], strict=True):
        y, s, eps = g.conditions(fed, state, (3, 32), "synthetic", 1, k)
        assert np.array_equal(labels, y)
        expected = net(torch.cat([eps, F.one_hot(y, 10), s[..., None]], -1).flatten(0, 1)).view(3, 32, 32)
        np.testing.assert_allclose(z, expected.detach(), rtol=1e-9, atol=1e-12)


def one_step(fed, state, clients, extra, Q=None):
    batches = [g.schedule(fed.shards[k], 1, 32, np.random.default_rng(k)) for k in clients]
    loss = g.objective(fed, Q)
    return common.train(fed.model, state["weights"], fed.data, batches, lr=0.1, loss=loss, per_step=extra).weights


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_synthetic_term_moves_the_head_and_nothing_else(tmp_path, weight):
    fed, state = begun(tmp_path, local_steps=1, synthetic=weight)
    clients = np.array([0, 3])
    g.teach(fed, state, fed.model.bind(state["weights"][None]).head, 0)
    extra = g.generated(fed, state, clients, 1)
    plain, mixed = one_step(fed, state, clients, None), one_step(fed, state, clients, extra)
    differs = (plain != mixed).any(0)
    for owner, leaf, _, begin, end in fed.model.layout:
        assert differs[begin:end].any() == (owner == "head"), (owner, leaf)
    z, y = torch.as_tensor(extra["z"][1][0]), torch.as_tensor(extra["y'"][1][0])
    head = nn.Linear(32, 10).double()  # by hand: - lr weight e (mean gradient of cross-entropy), client 3
    layout = {leaf: (begin, end) for owner, leaf, _, begin, end in fed.model.layout if owner == "head"}
    with torch.no_grad():
        for leaf, (begin, end) in layout.items():
            getattr(head, leaf).copy_(state["weights"][begin:end].view_as(getattr(head, leaf)))
    F.cross_entropy(head(z), y).backward()
    for leaf, (begin, end) in layout.items():
        step = (mixed - plain)[1, begin:end].view_as(getattr(head, leaf))
        torch.testing.assert_close(step, -0.1 * weight * math.e * getattr(head, leaf).grad)


# ------------------------------------------------------------------------------------- identities, bit for bit


def test_fedcl_without_its_parts_is_fedgen(tmp_path):
    cl, rows_cl = trained(tmp_path, "fedcl", loss="ce", difficulty=False, freeze=False)
    gen, rows_gen = trained(tmp_path, "fedgen")
    assert torch.equal(cl["weights"], gen["weights"])
    for name, value in gen["generator"].items():
        assert torch.equal(value, cl["generator"][name]), name
    assert [r["accuracy"] for r in rows_cl] == [r["accuracy"] for r in rows_gen]
    for part in ({"loss": "ce", "freeze": False}, {"difficulty": False, "freeze": False}):
        assert not torch.equal(trained(tmp_path, "fedcl", **part)[0]["weights"], gen["weights"])


@pytest.mark.parametrize(
    "method, off", [("fedprox", {"mu": 0.0}), ("feddistill+", {"distill": 0.0}), ("fedgen", {"synthetic": 0.0})]
)
def test_baselines_with_their_term_off_are_fedavg(tmp_path, method, off):
    fedavg = trained(tmp_path, "fedavg")[0]["weights"]
    assert torch.equal(trained(tmp_path, method, **off)[0]["weights"], fedavg)
    assert not torch.equal(trained(tmp_path, method)[0]["weights"], fedavg)


def test_first_round_has_no_synthetic_term(tmp_path):
    assert torch.equal(trained(tmp_path, "fedgen", rounds=1)[0]["weights"], trained(tmp_path, "fedavg", rounds=1)[0]["weights"])


def test_controls(tmp_path):
    faster = trained(tmp_path, "fedgen", lr=0.01 * math.e)[0]["weights"]
    assert torch.equal(trained(tmp_path, "fedgen-e")[0]["weights"], faster)
    same = {"difficulty": False, "freeze": False, "dtype": "float64"}
    torch.testing.assert_close(
        trained(tmp_path, "fedcl-e", **same)[0]["weights"],
        trained(tmp_path, "fedgen", dtype="float64")[0]["weights"],
        rtol=1e-9,
        atol=1e-12,
    )
    assert torch.equal(trained(tmp_path, "fedcl-logc")[0]["weights"], trained(tmp_path, "fedcl", tau=0.0)[0]["weights"])


# ------------------------------------------------------------------------------------------------------- the baselines


def test_fedprox_step_against_its_formula(tmp_path):
    fed, state = begun(tmp_path, "fedprox")
    batch = g.schedule(fed.shards[0], 2, 32, np.random.default_rng(0))
    first, both = (
        common.train(fed.model, state["weights"], fed.data, [batch[:n]], lr=0.1, proximal=0.1).weights[0] for n in (1, 2)
    )
    second = common.train(fed.model, first, fed.data, [batch[1:]], lr=0.1).weights[0]
    n = fed.model.trainable
    torch.testing.assert_close(both[:n], second[:n] - 0.1 * 0.1 * (first - state["weights"])[:n])


def test_fedprox_run_by_hand(tmp_path):
    got = trained(tmp_path, "fedprox", rounds=2, mu=2.0, dtype="float64")[0]["weights"]
    fed, state = begun(tmp_path, "fedprox")
    omega = state["weights"]
    for t in range(2):
        clients = g.participants(fed.config, [], fed.streams, t)
        batches = [g.schedule(fed.shards[k], 3, 32, fed.streams("batches", t, k)) for k in clients]
        omega = common.train(fed.model, omega, fed.data, batches, lr=0.01, proximal=2.0).weights.mean(0)
    torch.testing.assert_close(got, omega, rtol=1e-9, atol=1e-12)


def test_feddistill_objective_and_its_gradient_in_closed_form(tmp_path):
    """CE + c KL(softmax(Q[y]) || p), and d / d logits = p - onehot(y) + c (p - softmax(Q[y])); label 4 has no shared logits."""
    fed, _ = begun(tmp_path, "feddistill", distill=0.3)
    torch.manual_seed(0)
    Q, logits, y = torch.randn(10, 10).double(), torch.randn(2, 20, 10).double(), torch.arange(40).view(2, 20) % 10
    Q[4], weight = math.nan, torch.full((2, 20), 1 / 20, dtype=torch.float64)
    J = g.objective(fed, Q)(SimpleNamespace(logits=logits.requires_grad_(), y=y, weight=weight, extra={}))
    p, target = torch.softmax(logits.detach(), -1).numpy(), torch.softmax(Q, -1).numpy()[y]
    c, hot = 0.3 * (y != 4).numpy()[..., None], np.eye(10)[y]
    target = np.where(c > 0, target, p)
    expected = -np.log((p * hot).sum(-1)) + (c * rel_entr(target, p)).sum(-1)
    np.testing.assert_allclose(J.detach(), expected.mean(1), rtol=1e-10)
    (grad,) = torch.autograd.grad(J.sum(), logits)
    np.testing.assert_allclose(grad, (p - hot + c * (p - target)) / 20, rtol=1e-9, atol=1e-12)


def test_feddistill_shares_logits_and_no_weights(tmp_path):
    state, rows = trained(tmp_path, "feddistill", rounds=4)
    assert all(not torch.equal(a, b) for i, a in enumerate(state["own"]) for b in state["own"][:i])
    run = run_of(small(rounds=4), "feddistill", tmp_path)
    fed = g.prepare(run.config, common.load_data("digits"), run)
    alone = [common.evaluate(fed.model, own, fed.data)["accuracy"] for own in state["own"]]
    assert abs(np.mean(alone) - rows[-1]["accuracy_full"]) < 1e-9


def test_feddistill_users_go_on_from_their_own_model(tmp_path):
    """With c = 0, by hand: every client trains alone, whenever it is drawn."""
    own, rows = trained(tmp_path, "feddistill", rounds=4, distill=0.0, dtype="float64")
    fed, state = begun(tmp_path, "feddistill")
    for k, expected in enumerate(own["own"]):
        theta, took_part = state["weights"], 0
        for t in range(4):
            if k in g.participants(fed.config, [], fed.streams, t):
                batches = [g.schedule(fed.shards[k], 3, 32, fed.streams("batches", t, k))]
                theta, took_part = common.train(fed.model, theta, fed.data, batches, lr=0.01).weights[0], took_part + 1
        torch.testing.assert_close(expected, theta, rtol=1e-9, atol=1e-12)
    assert took_part >= 1 and rows[-1]["uploads"] == 16


def test_shared_logits_are_means_per_label_of_those_who_hold_it(tmp_path):
    fed, state = begun(tmp_path, "feddistill")
    clients, stack = np.array([1, 6]), state["weights"] * torch.tensor([[1.0], [2.0]])
    g.upload_logits(fed, state, clients, stack)
    for k, theta in zip(clients, stack, strict=True):
        net, y = fed.model.bind(theta[None]), fed.data.y_train.numpy()
        for c in range(10):
            own = [i for i in fed.shards[k] if y[i] == c]
            if not own:
                assert state["logits"][k, c].isnan().all()
                continue
            x = fed.data.inputs(fed.data.x_train[own][None], torch.float64)
            torch.testing.assert_close(state["logits"][k, c], net.head(net.features(x))[0].mean(0))
    Q = state["logits"].nanmean(0)
    for c in range(10):
        known = [state["logits"][k, c] for k in clients if not state["logits"][k, c].isnan().any()]
        assert Q[c].isnan().all() if not known else torch.allclose(Q[c], sum(known) / len(known))


def test_divergence_is_scipys_and_skips_unknown_labels():
    torch.manual_seed(0)
    q, logits = torch.randn(4, 6, 10, dtype=torch.float64), torch.randn(4, 6, 10, dtype=torch.float64)
    expected = rel_entr(torch.softmax(q, -1).numpy(), torch.softmax(logits, -1).numpy()).sum(-1)
    np.testing.assert_allclose(g.divergence(q, logits).numpy(), expected, rtol=1e-10)
    q[1] = math.nan
    logits.requires_grad_()
    (grad,) = torch.autograd.grad(g.divergence(q, logits).sum(), logits)
    assert not grad[1].any() and grad[0].any() and torch.isfinite(grad).all()


def test_fedensemble_tests_the_sum_of_all_users_logits(tmp_path):
    """Four users trained this round, the other four hold the global model that was sent to all."""
    fed, state = begun(tmp_path, "fedensemble")
    torch.manual_seed(0)
    omega = state["weights"]
    locals_ = omega + 0.2 * torch.randn(4, len(omega), dtype=torch.float64)
    got = g.evaluate(fed, *g.tested(fed, state, omega, locals_))
    test = [np.arange(len(fed.data.y_test))]
    logits = sum(common.predict(fed.model, each, fed.data, fed.data.x_test, test)[0] for each in [*locals_, *[omega] * 4])
    assert abs(got["accuracy_full"] - 100 * (logits.argmax(1) == fed.data.y_test).double().mean()) < 1e-9


@pytest.mark.parametrize("method", ["fedavg", "feddistill"])
def test_both_protocols_against_loops_over_users(tmp_path, method):
    fed, state = begun(tmp_path, method, alpha=0.05)
    torch.manual_seed(0)
    state["own"] = state["own"] * (1 + 0.3 * torch.randn_like(state["own"]))
    got = g.evaluate(fed, *g.tested(fed, state, state["weights"], state["own"][:4]))
    y, right, asked, full = fed.data.y_test.numpy(), 0, 0, []
    for k, shard in enumerate(fed.shards):
        theta = state["own"][k] if method == "feddistill" else state["weights"]
        predicted = common.predict(fed.model, theta, fed.data, fed.data.x_test, [np.arange(len(y))])[0].argmax(1).numpy()
        held = np.isin(y, np.unique(fed.data.y_train.numpy()[shard]))
        right, asked = right + (predicted == y)[held].sum(), asked + held.sum()
        full.append(100 * (predicted == y).mean())
    assert asked < 8 * len(y)
    assert abs(got["accuracy_paper"] - 100 * right / asked) < 1e-9 and abs(got["accuracy_full"] - np.mean(full)) < 1e-9
    assert got["accuracy"] == got["accuracy_full"]
    fed.config.eval = "paper"
    got = g.evaluate(fed, *g.tested(fed, state, state["weights"], state["own"][:4]))
    assert got["accuracy"] == got["accuracy_paper"]


# --------------------------------------------------------------------------------------------- data, run, command line


def test_schedule_passes_over_the_shard_in_full_batches():
    shard = np.arange(100, 175)  # 75 samples: two batches of 32 a pass
    batches = g.schedule(shard, 7, 32, np.random.default_rng(0))
    assert batches.shape == (7, 32) and np.isin(batches, shard).all()
    for i in range(0, 6, 2):
        assert len(np.unique(batches[i : i + 2])) == 64
    assert not np.array_equal(np.sort(batches[:2], None), np.sort(batches[2:4], None))
    few = g.schedule(np.arange(5), 3, 32, np.random.default_rng(0))
    assert (np.sort(few[:, :5]) == np.arange(5)).all() and (few[:, 5:] == -1).all()


def test_users_hold_their_share_and_images_lie_in_minus_1_to_1(tmp_path):
    for share, expected in ((0.0, 1437), (0.5, 718)):  # 0: all of digits
        run = run_of(small(data_share=share), "fedavg", tmp_path)
        fed = g.prepare(run.config, common.load_data("digits"), run)
        everything = np.concatenate(fed.shards)
        assert len(everything) == len(np.unique(everything)) == expected and min(map(len, fed.shards)) >= 32
    x = fed.data.inputs(fed.data.x_train[None, :200], torch.float32)
    assert x.min() == -1 and x.max() == 1


def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path, monkeypatch):
    """Everything that must survive is in the state: generator, Adam, frozen weights, mixtures, logits, own models."""
    save = common.Run.save

    def killed(run, t, state):
        save(run, t, state)
        if t == 2:
            raise KeyboardInterrupt

    for method in ("fedcl", "feddistill"):
        whole, rows = trained(tmp_path, method, rounds=5, local_steps=4)
        config = small(rounds=5, local_steps=4)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(common.Run, "save", killed)
            g.federate(config, common.load_data("digits"), run_of(config, method, tmp_path / "killed"))
        again = small(rounds=5, local_steps=4, resume=True)
        run = run_of(again, method, tmp_path / "killed")
        g.federate(again, common.load_data("digits"), run)
        state = common.load_checkpoint(run.path)["state"]
        assert torch.equal(state["weights"], whole["weights"]) and torch.equal(state["own"], whole["own"])
        assert state["mixtures"] == whole["mixtures"] and state["pool"] == whole["pool"]
        strip = [[{k: v for k, v in row.items() if k != "seconds"} for row in each] for each in (rows, run.rows)]
        assert strip[0] == strip[1]


def test_table_counts_rounds_and_updates_to_fedavgs_final_accuracy():
    def rows(method, trial, accuracies):
        return [
            {"setting": "", "method": method, "trial": trial, "round": t, "accuracy": a, "uploads": 10 * t}
            | {"accuracy_full": a, "accuracy_paper": a + 1, "seconds": 0}
            for t, a in enumerate(accuracies, 1)
        ]

    both = [rows("fedavg", 0, [50, 70, 60, 65, 65, 64]), rows("fedavg", 1, [50, 60, 70, 80, 85, 90])]
    both += [rows("fedcl", 0, [10, 64, 20, 20, 20, 30]), rows("fedcl", 1, [10, 20, 30, 40, 50, 60])]
    both = sum(both, [])
    assert g.to_target(both, "", "fedavg") == [(2, 20), (6, 60)]
    line = g.results(both, g.Config(dataset="mnist", alpha=0.1), "", "fedcl")
    assert (line["rounds"], line["updates"], line["reached"], line["table2"]) == (2, 20, "1/2", 96.03)
    assert line["full_final"]["mean"] == 45
    assert abs(line["paper_top5"]["mean"] - (np.mean([65, 31, 21, 21, 21]) + np.mean([21, 31, 41, 51, 61])) / 2) < 1e-9
    swept = [row | {"setting": "local_steps=40 alpha=0.05"} for row in both]
    assert g.results(swept, g.Config(dataset="emnist"), "local_steps=40 alpha=0.05", "fedcl")["table2"] == 74.91


@pytest.mark.parametrize("flags, word", [
    ("--thresholds 0.2 0.6", "fall"), ("--thresholds 1.5", "--thresholds"),
    ("--epochs 3", "--local-steps"), ("--base fedadam", "--method"), ("--dataset shakespeare --model lstm", "images"),
    ("--method fedsgd", "fedsgd"), ("--lam 0", "--lam"), ("--v 1.1", "--v"),
])  # fmt: skip
def test_wrong_flags_give_one_line_and_status_2(flags, word, capsys):
    with pytest.raises(SystemExit) as stop:
        g.main(flags.split())
    error = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and word in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("name", g.PRESETS)
def test_presets_are_valid(name):
    config, sweep = common.parse(g.Config, g.PRESETS, g.__doc__, ["--preset", name])
    for flag, values in sweep.items():
        for value in values:
            g.dataclasses.replace(config, **{flag: value}).check()


def test_the_command_line_writes_table_and_figures(tmp_path, capsys):
    flags = "--method fedcl fedavg --clients 6 --clients-per-round 3 --local-steps 1 --rounds 3 --trials 2 --threads 1"
    g.main([*flags.split(), "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert "frozen by rule" in out and "paper, top 5" in out
    assert {"metrics.csv", "summary.json", "accuracy.png", "phases.png", "mixtures.png"} <= {p.name for p in tmp_path.iterdir()}
    assert set(g.json.loads((tmp_path / "summary.json").read_text())["table"][""]) == {"fedcl", "fedavg"}


@pytest.mark.parametrize("method", ["fedcl", "fedensemble", "feddistill+"])
def test_a_dropped_client_is_left_out_everywhere(tmp_path, monkeypatch, method):
    train = common.train

    def one_diverges(*args, **kwargs):
        update = train(*args, **kwargs)
        update.weights[1] = math.nan
        return update

    monkeypatch.setattr(common, "train", one_diverges)
    state, rows = trained(tmp_path, method, rounds=2, v=1.0, on_nonfinite="drop")
    assert [(row["clients"], row["dropped"], row["uploads"]) for row in rows] == [(3, 1, 3), (3, 1, 6)]
    kept = [np.delete(g.participants(small(), [], common.Streams(small().seed), t), 1) for t in range(2)]
    torch.testing.assert_close(state["weights"], sum(state["own"][k] for k in kept[1]) / 3)
    assert torch.isfinite(state["own"]).all() and all(math.isfinite(row["accuracy"]) for row in rows)
    if method == "fedcl":
        assert set(state["mixtures"]) == set(state["counts"]) == set(np.concatenate(kept).tolist())
    elif method == "feddistill+":
        known = ~state["logits"].isnan().all(2).all(1)
        assert set(known.nonzero()[:, 0].tolist()) == set(np.concatenate(kept).tolist())


def run_rows(tmp_path, flags) -> list[dict]:
    g.main([*flags.split(), "--local-steps", "1", "--trials", "1", "--threads", "1", "--out", str(tmp_path)])
    with open(tmp_path / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_every_third_round_is_tested_and_the_last(tmp_path):
    rows = run_rows(tmp_path, "--eval-every 3 --rounds 5 --clients 6 --clients-per-round 3 --method fedcl fedavg")
    for column in ("accuracy", "loss", "accuracy_full", "accuracy_paper"):
        assert [row[column] != "" for row in rows] == [False, False, True, False, True] * 2
    assert all(row["train_loss"] for row in rows) and all(row["rank_correlation"] for row in rows[:5])


def test_one_client(tmp_path):
    """It holds every label, so both protocols agree; its mean, its ensemble and its own model are one net."""
    rows = run_rows(tmp_path, "--clients 1 --clients-per-round 1 --rounds 3 --distill 0")
    assert {row["method"] for row in rows} == set(g.ARMS)
    assert all(row["accuracy_full"] == row["accuracy_paper"] for row in rows)
    of = {method: [row["accuracy"] for row in rows if row["method"] == method] for method in g.ARMS}
    assert of["fedavg"] == of["fedensemble"] == of["feddistill"] == of["feddistill+"]
    # 256 of its 320 draws lie below beta_T at T = .8, which is more than v; at T = .6 and .2 fewer than v do
    assert [row["advance"] for row in rows if row["method"] == "fedcl"] == ["natural", "forced", "forced"]


def test_a_client_freezes_by_rule_on_mnist(real_data, tmp_path):
    config = g.Config(dataset="mnist", data_dir=str(real_data), rounds=2, trials=1, threads=1)
    run = run_of(config, "fedcl", tmp_path)
    g.federate(config, common.setting_up(config)[0], run)
    assert sum(row["froze"] for row in run.rows) >= 1 and len(run.rows[0]["fractions"].split()) == 20
