"""FedCL and its baselines against closed forms, SciPy, scikit-learn, loops and literal runs."""

import functools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import matplotlib.figure
import numpy as np
import ordinary
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from scipy.special import lambertw
from scipy.stats import spearmanr
from sklearn.mixture import GaussianMixture
from torch import nn

import common
import experiment
import fedcl_gmm_sync as g
from data import load_data
from nets import Model
from results.fedcl_gmm_sync import controls

plain = ordinary.load_plain("fedcl_gmm_sync")
SMALL = {
    "clients": 8,
    "clients_per_round": 4,
    "local_steps": 3,
    "rounds": 3,
    "trials": 1,
    "threads": 1,
    "device": "cpu",
}


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """A sixth of the generator's 50 steps a round, for speed; test_plain.py takes them all."""
    monkeypatch.setattr(g, "TEACHING_STEPS", 8)


def small(method="fedcl", **flags) -> g.Config:
    module = controls if method in controls.CONTROLS else g
    return module.Config(method=method, **SMALL | flags)


def run_of(config, folder) -> experiment.Run:
    """A run that is to be trained; of a control, or of the paper's loop."""
    federate = g.federate
    if isinstance(config, controls.Config):
        federate = controls.federate
    script = experiment.Script(federate, ("method",))
    return experiment.Run(config, 0, experiment.Command(script, folder=folder))


def train(config, folder) -> tuple[dict, list[dict]]:
    """The state after the last round and the rows of one run."""
    run = run_of(config, folder)
    experiment.train(run, lambda *_: None)
    found = run.load()
    return found["state"], found["rows"]


def trained(folder, method="fedcl", **flags) -> tuple[dict, list[dict]]:
    return train(small(method, **flags), folder)


def begun(method="fedcl", **flags) -> tuple:
    """Config, and federation in float64."""
    config = small(method, **{"dtype": "float64"} | flags)
    return config, config.federation(load_data("digits"), common.Streams(config.seed, 0))


def read(folder) -> pd.DataFrame:
    return pd.read_csv(folder / "metrics.csv")


def launch(folder, line: str, module=g) -> pd.DataFrame:
    """What a command line writes into metrics.csv."""
    module.main([*line.split(), "--threads", "1", "--jobs", "1", "--out", str(folder)])
    return read(folder)


# --------------------------------------------------------------------------------- a literal run

LITERAL = {
    "clients": 6,
    "clients_per_round": 3,
    "rounds": 5,
    "local_steps": 3,
    "batch_size": 5,
    "lr": 0.05,
    "momentum": 0.3,
    "weight_decay": 0.01,
    "mu": 0.4,
    "tau": 2.2,
    "lam": 0.7,
    "generator_hidden": 12,
    "thresholds": "0.7,0.4",
    "v": 0.6,
    "phase_quorum": 0.6,
    "distill": 0.3,
    "data_share": 0.06,
    "min_size": 8,
    "alpha": 0.5,
    "seed": 3,
    "per_client": True,
    "eval_every": 2,
    "dtype": "float64",
    "trials": 1,
    "threads": 1,
    "device": "cpu",
}


def net_of(theta) -> nn.Module:
    """FedGen's classifier with these parameters and batch statistics, in evaluation mode."""
    return ordinary.fill(plain.make_model(np.random.default_rng(0)), theta)


def grey(x):
    """Images in [-1, 1], (n, C, H, W)."""
    return x.permute(0, 3, 1, 2).double() / 127.5 - 1


class Literal:
    """Algorithm 1 and its baselines as loops over clients, steps and samples, in float64.

    It shares with the project the random streams, the partition and the first weights. Clients'
    batches, the confidence loss, mixtures and beta_T are those of plain/.
    """

    def __init__(self, method, config):
        self.c = config
        self.kind = method.partition("-")[0].removesuffix("/e")
        self.cl = self.kind == "fedcl"
        self.gen = self.kind in ("fedcl", "fedgen")
        self.has_phases = self.cl and method != "fedcl-nofreeze"
        self.fresh = method == "fedcl-fresh"
        self.diverse = not method.endswith("-nodiversity")
        self.measures = self.cl and isinstance(config, controls.Config)
        self.lr = config.lr
        if method in ("fedgen-e", "fedavg-e"):
            self.lr = config.lr * math.e
        if method == "fedcl/e":
            self.lr = config.lr / math.e

        self.streams = common.Streams(config.seed, 0)
        digits = load_data("digits")
        held = np.sort(self.streams("share").permutation(1437)[: round(config.data_share * 1437)])
        self.x = grey(digits.x_train[held])
        self.y = digits.y_train[held]
        self.x_test = grey(digits.x_test)
        self.y_test = digits.y_test
        fl = config.federation(digits, self.streams)
        self.shards = fl.shards
        self.theta_0 = fl.model.init(self.streams.seed("init"))
        self.theta = self.theta_0
        self.nets = {}  # each user's last
        self.frozen = {}
        self.told = {}  # D_k
        self.logits = {}  # of each user, by label
        self.counts = {}
        self.N = None
        self.G = None
        self.z = 0
        self.began = 0
        self.rows = []
        self.totals = dict.fromkeys(("uploads", "samples", "received_mb", "sent_mb"), 0.0)

    def run(self):
        for t in range(self.c.rounds):
            self.rows.append(self.round(t))
        return self

    def round(self, t):
        order = self.streams("select", t).permutation(6)
        unfrozen = [m for m in order if m not in self.frozen]
        P_t = sorted(unfrozen[: self.c.clients_per_round])
        shares = self.kind != "feddistill"
        net = len(self.theta) * shares
        self.totals["received_mb"] += 8e-6 * len(P_t) * (net + self.numbers_received())
        theta_sent = self.theta
        thetas = {}
        losses = []
        counts = {}
        for m in P_t:
            start = self.theta if shares else self.nets.get(m, self.theta)
            thetas[m], loss = self.train(m, t, start, counts)
            losses.append(loss)
        for m in P_t:
            self.totals["sent_mb"] += 8e-6 * (net + self.tell(m, t, thetas[m]))
        self.nets |= thetas
        self.counts |= counts
        M_f = {} if self.fresh else self.frozen
        if shares:
            self.theta = sum([*M_f.values(), *thetas.values()]) / (len(M_f) + len(thetas))
        self.totals["uploads"] += len(P_t)
        row = {"round": t + 1, "clients": len(P_t), "train_loss": np.mean(losses)}
        row |= self.totals | self.serve(thetas, t)
        if (t + 1) % self.c.eval_every == 0 or t + 1 == self.c.rounds:
            row |= self.test(theta_sent, thetas)
        return row

    def numbers_received(self):
        if self.kind.startswith("feddistill"):
            return 100 * bool(self.logits)
        if self.G is None:
            return 0
        weights = sum(tensor.numel() for tensor in self.G.state_dict().values())
        return weights + 10 + 9 * len(self.told)

    def draw(self, size, purpose, *key):
        """y ~ p(y), and the generator's input: eps, y, and s, the r-th of N, standardised."""
        p = np.array(list(self.counts.values())).sum(0)
        y = self.streams(purpose + " label", *key).choice(10, size, p=p / p.sum())
        y = torch.as_tensor(y)
        noise = self.streams(purpose + " noise", *key).standard_normal((*size, 32))
        parts = [torch.as_tensor(noise), F.one_hot(y, 10).double()]
        if self.cl:
            r = self.streams(purpose + " difficulty", *key).integers(len(self.N), size=size)
            s = (torch.tensor(self.N)[r] - np.mean(self.N)) / np.std(self.N)
            parts.append(s[..., None])
        return y, torch.cat(parts, -1)

    def l_cl(self, losses):
        return plain.confidence_loss(losses, self.c.tau, self.c.lam) if self.cl else losses

    def scores(self, losses):
        return (losses - self.c.tau) * plain.confidence(losses, self.c.tau, self.c.lam)

    def train(self, m, t, start, counts):
        c = self.c
        net = net_of(start).train()
        shard = self.shards[m]
        places = plain.full_batches(c, len(shard), self.streams("batches", t, m))
        batches = shard[places]
        generated = None
        if self.G is not None:
            generated = self.draw((c.local_steps, c.batch_size), "synthetic", t, m)
        if self.gen:
            labels = [int(self.y[i]) for batch in batches for i in batch]
            counts[m] = [labels.count(label) for label in range(10)]
        velocity = [0] * 12  # one of each layer's weights and biases
        total = 0.0
        for step, batch in enumerate(batches):
            loss = self.loss(net, batch, generated, step)
            net.zero_grad()
            loss.backward()
            total += float(loss.detach())
            place = 0
            with torch.no_grad():
                for i, w in enumerate(net.parameters()):
                    w_0 = start[place : place + w.numel()].view_as(w)
                    place += w.numel()
                    mu = c.mu if self.kind == "fedprox" else 0
                    gradient = w.grad + c.weight_decay * w + mu * (w - w_0)
                    velocity[i] = c.momentum * velocity[i] + gradient
                    w -= self.lr * velocity[i]
            self.totals["samples"] += len(batch)
        return ordinary.flatten(net), total / c.local_steps

    def loss(self, net, batch, generated, step):
        logits = net(self.x[batch])
        loss = self.l_cl(F.cross_entropy(logits, self.y[batch], reduction="none")).mean()
        if generated is not None:
            y, told = generated
            z = self.G.eval()(told[step]).detach()
            ce = F.cross_entropy(net[-1](z), y[step], reduction="none")
            loss = loss + self.l_cl(ce).mean()
        if not self.kind.startswith("feddistill"):
            return loss
        for i, row in zip(batch, logits, strict=True):
            label = int(self.y[i])
            shared = [means[label] for means in self.logits.values() if means[label] is not None]
            if shared:
                q = torch.softmax(sum(shared) / len(shared), 0)
                kl = (q * (q.log() - torch.log_softmax(row, 0))).sum()
                loss = loss + self.c.distill * kl / len(batch)
        return loss

    def tell(self, m, t, theta):
        """What client m sends beside its net: how many numbers."""
        shard = self.shards[m]
        with torch.no_grad():
            logits = net_of(theta)(self.x[shard])
        if self.cl:
            losses = F.cross_entropy(logits, self.y[shard], reduction="none")
            rng = self.streams("mixture", t, m)
            self.told[m] = plain.fit_mixture(self.scores(losses), rng)
        if self.kind.startswith("feddistill"):
            self.logits[m] = []
            for label in range(10):
                rows = [row for row, i in zip(logits, shard, strict=True) if self.y[i] == label]
                self.logits[m].append(sum(rows) / len(rows) if rows else None)
            return 100
        return 10 * self.gen + 9 * self.cl

    def serve(self, thetas, t):
        columns = {}
        draws = {}
        if self.cl:
            for m in sorted(self.told):
                alpha, mu, variance = self.told[m]
                rng = self.streams("pool", t, m)
                which = rng.choice(3, 320, p=alpha / alpha.sum())
                draws[m] = rng.normal(mu[which], np.sqrt(variance[which]))
            self.N = sorted(x for scores in draws.values() for x in scores)
        if self.gen:
            columns |= self.teach(t)
        if self.has_phases:
            columns |= self.synchronise(thetas, draws, t)
        return columns

    def synchronise(self, thetas, draws, t):
        S = [float(T) for T in self.c.thresholds.split(",")]
        if self.z == len(S):
            return {"phase": self.z + 1, "frozen": 0, "froze": 0}
        beta_T = plain.quantile(np.array(self.N), S[self.z])
        before = len(self.frozen)
        below = {m: (scores <= beta_T).sum() for m, scores in draws.items()}
        for m, theta in thetas.items():
            if below[m] > self.c.v * 320:
                self.frozen[m] = theta
        after = len(self.frozen)
        columns = {"phase": self.z + 1, "frozen": after, "froze": after - before}
        words = [f"{m}:{below[m] / 320:.3f}" for m in sorted(thetas)]
        columns |= {"beta_T": beta_T, "fractions": " ".join(words), "advance": ""}
        if t + 1 - self.began >= math.ceil(self.c.rounds / len(S)):
            columns["advance"] = "forced"
        if after >= self.c.phase_quorum * 6:
            columns["advance"] = "natural"
        if columns["advance"]:
            self.z += 1
            self.began = t + 1
            self.frozen = {}
        return columns

    def teach(self, t):
        if self.G is None:
            self.make_generator()
        self.adam.param_groups[0]["lr"] = 1e-4 * 0.98**t
        self.G.train()
        head = net_of(self.theta)[-1]
        for y, x in zip(*self.draw((g.TEACHING_STEPS, 128), "teaching", t), strict=True):
            z = self.G(x)
            losses = F.cross_entropy(head(z), y, reduction="none")
            J = self.l_cl(losses).mean()
            if self.diverse:
                far_z = (z[:, None] - z).abs().mean(2)
                far_eps = (x[:, None, :32] - x[:, :32]).square().mean(2)
                J = J + torch.exp(-(far_z * far_eps).mean())
            self.adam.zero_grad()
            J.backward()
            self.adam.step()
        if not self.measures:
            return {}
        y, x = self.draw((320,), "obedience", t)
        with torch.no_grad():
            losses = F.cross_entropy(head(self.G.eval()(x)), y, reduction="none")
        return {"rank_correlation": spearmanr(x[:, -1], self.scores(losses)).statistic}

    def make_generator(self):
        torch.manual_seed(self.streams.seed("generator"))
        hidden = self.c.generator_hidden
        first = nn.Linear(43, hidden)
        last = nn.Linear(hidden, 32)
        if not self.cl:
            first.weight = nn.Parameter(first.weight[:, :42].detach().clone())
        self.G = nn.Sequential(first, nn.BatchNorm1d(hidden), nn.ReLU(), last).double()
        self.adam = torch.optim.Adam(self.G.parameters(), lr=1e-4, weight_decay=1e-2)

    @torch.no_grad()
    def test(self, theta_sent, thetas):
        y = self.y_test
        tested = [self.theta]
        if self.kind == "fedensemble":
            tested = [thetas.get(m, theta_sent) for m in range(6)]
        if self.kind == "feddistill":
            tested = [self.nets.get(m, self.theta_0) for m in range(6)]
        logits = [net_of(theta)(self.x_test) for theta in tested]
        if self.kind == "fedensemble":
            logits = [sum(logits) / 6]
        guesses = [of_net.argmax(1) for of_net in logits]
        full = [100 * float((guess == y).double().mean()) for guess in guesses]
        losses = [float(F.cross_entropy(of_net, y)) for of_net in logits]
        columns = {"accuracy": np.mean(full), "loss": np.mean(losses)}
        if len(full) > 1:
            columns["client_std"] = np.std(full, ddof=1)
        right = 0
        asked = 0
        own = []
        for m, shard in enumerate(self.shards):
            guess = guesses[m % len(guesses)]
            mine = [int(self.y[i]) for i in shard]
            held = [i for i in range(len(y)) if int(y[i]) in mine]
            right += sum(int(guess[i] == y[i]) for i in held)
            asked += len(held)
            by_label = [float((guess[y == c] == c).double().mean()) for c in range(10)]
            own.append(100 * sum(by_label[c] for c in mine) / len(mine))
        columns["own_pooled"] = 100 * right / asked
        columns |= {"own_mean": np.mean(own), "own_worst_tenth": min(own), "own_std": np.std(own)}
        return columns


CASES = [(method, g) for method in g.METHODS]
CASES += [(method, controls) for method in ("fedcl", *controls.CONTROLS)]


COMMON = {"setting", "method", "trial", "seconds", "clock", "waiting"}


@pytest.mark.parametrize("method, module", CASES)
def test_a_literal_run(tmp_path, method, module):
    """Weights to 1e-9 and every column of metrics.csv, with every flag off its default."""
    config = module.Config(method=method, **LITERAL)
    state, rows = train(config, tmp_path)
    literal = Literal(method, config).run()
    torch.testing.assert_close(state["theta"], literal.theta, rtol=0, atol=1e-9)
    assert len(rows) == len(literal.rows) == 5
    for row, expected in zip(rows, literal.rows, strict=True):
        assert {*row} == {*expected, *COMMON}
        for name, value in expected.items():
            tolerance = 2e-6 if name.endswith("_mb") else 1e-8
            assert row[name] == pytest.approx(value, abs=tolerance), (name, row["round"])
    if method == "feddistill":
        for m, theta in literal.nets.items():
            torch.testing.assert_close(state["base"]["nets"][m], theta, rtol=0, atol=1e-9)
    if literal.G:
        for name, value in literal.G.state_dict().items():
            torch.testing.assert_close(state["generator"][name], value, rtol=0, atol=1e-9)
    if literal.has_phases:  # what the transcript is for has happened
        assert sum(row["froze"] for row in rows) >= 1
        assert max(row["frozen"] for row in rows) >= 1


# ---------------------------------------------------------------------------- the confidence loss


def test_lambert_w_is_scipys():
    """Also near the branch point -1 / e, and far out."""
    near = -np.exp(-1) + np.logspace(-12, -0.45, 200)
    y = np.concatenate([near, np.linspace(-0.3, 3, 200), np.logspace(0, 12, 200)])
    w = g.lambert_w(torch.as_tensor(y))
    np.testing.assert_allclose(w, lambertw(y).real, rtol=1e-10, atol=2e-8)
    beyond = torch.tensor([-1 / math.e, -0.5, -9], dtype=torch.float64)
    assert (g.confidence(beyond, 0, 0.5) == math.e).all()


def test_the_average_keeps_buffers_that_neither_clients_nor_frozen_ones_changed():
    """Eq. 21 averages the others: here two of three buffers, changed by a frozen client or now."""
    kept = 0.9
    model = SimpleNamespace(rest=slice(1, 4))
    fl = SimpleNamespace(model=model)
    model.keep_constant = functools.partial(Model.keep_constant, model)
    theta = torch.tensor([1.0, kept, 5.0, 7.0])
    frozen = {2: torch.tensor([2.0, kept, 6.5, 7.0])}
    rows = torch.tensor([[3.0, kept, 5.0, 7.0], [4.0, kept, 5.0, 10.0]])
    update = SimpleNamespace(gather_thetas=lambda: rows)
    found = g.average(fl, theta, frozen, update)
    assert found.tolist() == pytest.approx([3.0, kept, 5.5, 8.0], rel=1e-6)
    assert found[1] == theta[1] and found[1] != torch.stack([*frozen.values(), *rows]).mean(0)[1]


# --------------------------------------------------------------------- the pool, freezing, phases


def check(draws, trained=None, t=0, frozen=(), phase=0, began=0, **flags):
    """The columns of one check of `draws`, and the state after it.

    All clients have just trained unless `trained` names those that have.
    """
    K = len(draws)
    default = {"clients": K, "clients_per_round": K, "rounds": 10, "thresholds": "0.8,0.2"}
    config = small(**default | flags)
    state = {"phase": phase, "phase_began": began, "pool": g.pool_scores(draws)}
    state["frozen"] = {m: torch.zeros(1) for m in frozen}
    clients = np.array(list(draws if trained is None else trained))
    update = SimpleNamespace(clients=clients, gather_thetas=lambda: torch.ones(len(clients), 1))
    changes, columns = g.synchronise(config, state, update, draws, t)
    return columns, state | changes


def test_beta_T_where_T_times_N_is_no_float():
    assert math.ceil(0.07 * 6400) == 449  # the trap: it is 448
    assert g.quantile(list(range(1, 6401)), 0.07) == 448
    assert g.quantile(list(range(1, 81)), 1e-13) == 1  # the first, not the last


@pytest.mark.parametrize("v", [0.7, 0.55, 0.6, 0.1])
def test_freezing_is_strict_at_exactly_v(v):
    """320 v draws of a client are the least of all: it freezes when T takes one more."""
    draws = {0: np.arange(1, 321), 1: np.arange(321, 641)}
    for extra in (0, 1):
        place = round(320 * v) + extra
        columns, _ = check(draws, thresholds=str(place / 640), v=v)
        assert (columns["beta_T"], columns["froze"]) == (place, extra)


def test_natural_advance_unfreezes_everyone_and_quorum_lowers_the_bar():
    draws = {m: np.full(320, float(m >= 3)) for m in range(4)}
    columns, state = check(draws, thresholds="0.5,0.2")
    assert columns["advance"] == ""
    assert [*state["frozen"]] == [0, 1, 2]
    assert state["phase"] == 0
    columns, _ = check(draws, t=3, thresholds="0.5,0.2", phase_quorum=0.75)
    assert columns["advance"] == "natural"
    assert columns["frozen"] == 3
    _, state = check({m: np.full(320, 0.0) for m in range(4)}, t=3)
    assert (state["phase"], state["phase_began"], state["frozen"]) == (1, 4, {})


@pytest.mark.parametrize(
    ("frozen", "rounds_taken", "said"),
    [(8, 1, "natural"), (8, 9, "natural"), (7, 9, "forced"), (7, 8, "")],
)
def test_a_phase_ends_when_its_clients_have_passed_or_its_time_is_over(frozen, rounds_taken, said):
    assert g.end_of_phase(frozen, 10, 0.8, rounds_taken, limit=9) == said


def test_after_the_last_phase_nobody_freezes():
    columns, state = check({0: np.zeros(320)}, phase=3, t=9, thresholds="0.8,0.6,0.2")
    assert state["frozen"] == {}
    assert columns == {"phase": 4, "frozen": 0, "froze": 0}


# --------------------------------------------------------------------------------------- mixtures


@pytest.mark.parametrize("scores, L", [([2.0] * 40, 1), ([1.0, 2.0] * 20, 2), ([1.5], 1)])
def test_fewer_distinct_scores_give_fewer_gaussians(scores, L):
    alpha, mu, variance = g.mixture(np.array(scores), 1)
    assert len(alpha) == len(mu) == len(variance) == L
    assert abs(np.dot(alpha, mu) - np.mean(scores)) < 1e-9
    assert min(variance) >= 0.99e-6


@pytest.mark.parametrize("centre, spread", [(1e5, 1e-3), (-1e5, 1e-6), (1e7, 1e-3)])
def test_huge_scores_that_hardly_differ_give_one_gaussian(centre, spread):
    """Where E[x^2] - mu^2 is negative in floating point, and scikit-learn refuses to fit."""
    scores = centre + spread * np.random.default_rng(0).normal(size=200)
    with pytest.raises(ValueError, match="ill-defined"):
        GaussianMixture(3, covariance_type="diag", random_state=1).fit(scores[:, None])
    assert g.mixture(scores, 1) == [[1.0], [scores.mean()], [scores.var() + 1e-6]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_finite_stop_the_run(monkeypatch, bad):
    config, fl = begun()
    losses = [(np.ones(40), None), (np.array([*np.ones(39), bad]), None)]
    monkeypatch.setattr(common, "score", lambda *_, **__: losses)
    update = SimpleNamespace(clients=np.array([2, 5]), gather_thetas=lambda: None)
    with pytest.raises(common.NonFiniteError, match="round 3: .*client 5"):
        g.fit_mixtures(config, fl, 2, update)


# ---------------------------------------------------------------------------------- the baselines


# ------------------------------------------------------------------------ data, run, command line


def test_users_hold_their_share_and_images_lie_in_minus_1_to_1():
    for share, expected in ((1.0, 1437), (0.5, 718)):
        _, fl = begun("fedavg", data_share=share)
        everything = np.concatenate(fl.shards)
        assert len(everything) == len(np.unique(everything)) == expected == len(fl.labels)
        assert min(fl.sizes) >= 32
    x = fl.data.images("train", torch.float32)
    assert x.min() == -1
    assert x.max() == 1


def test_the_share_keeps_each_samples_owner():
    data = replace(load_data("digits"), owner=np.arange(1437) % 9)
    config = small(partition="natural", min_size=2, data_share=0.5)
    fl = config.federation(data, common.Streams(1))
    held = np.sort(common.Streams(1)("share").permutation(1437)[:718])
    assert torch.equal(fl.data.x_train, data.x_train[held])
    for shard in fl.shards:
        assert len({held[i] % 9 for i in shard}) == 1


def test_results_count_rounds_and_updates_to_fedavgs_final_accuracy():
    rows = []
    accuracies = {
        ("fedavg", 0): [50, 70, 60, 65, 65, 64],
        ("fedavg", 1): [50, 60, 70, 80, 85, 90],
        ("fedcl", 0): [10, 64, 20, 20, 20, 30],
        ("fedcl", 1): [10, 20, 30, 40, 50, 60],
    }
    for (method, trial), of_rounds in accuracies.items():
        for t, accuracy in enumerate(of_rounds, 1):
            row = {"setting": "", "method": method, "trial": trial, "round": t}
            row |= {"accuracy": accuracy, "uploads": 10 * t}
            rows.append(row)
    df = pd.DataFrame(rows)
    df.loc[(df.trial == 1) & (df["round"] == 3), "accuracy"] = math.nan  # not tested
    table = g.rounds_to_fedavg(df).droplevel("setting")
    found = {key: row.tolist() for key, row in table.iterrows()}
    assert {*found} == {(method, trial) for method in ("fedavg", "fedcl") for trial in (0, 1)}
    assert all(map(math.isnan, found.pop(("fedcl", 1))))  # never
    assert found == {("fedavg", 0): [2, 20], ("fedavg", 1): [6, 60], ("fedcl", 0): [2, 20]}
    assert len(g.rounds_to_fedavg(df[df.method == "fedcl"])) == 0


@pytest.mark.parametrize(
    "flags, word",
    [
        ("--thresholds 0.2,0.6", "fall"),
        ("--thresholds 1.5", "--thresholds"),
        ("--thresholds a,b", "--thresholds"),
        ("--thresholds 0.5,nan", "--thresholds"),
        ("--thresholds 0.5,0.5", "fall"),
        ("--dataset text.npz --model lstm", "reads images"),
        ("--tau 1e300", "--tau"),
        ("--epochs 2", "--epochs 2: not used here; choose --local-steps"),
        ("--local-steps 1000000000000000000", "--local-steps"),
        ("--generator-hidden 1000000000000000000", "--generator-hidden"),
        ("--data-share 0.1 1", "only 144 samples, --min-size 32"),
        (f"--model {Path(__file__)}:Flat", "fedcl's generator needs a model that is head"),
        (f"--method fedavg fedgen --model {Path(__file__)}:Flat", "fedgen's generator needs"),
    ],
)
def test_wrong_flags_give_one_line_and_status_2(flags, word, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x = np.zeros((2000, 80), dtype=np.int64)
    y = np.arange(2000) % 80
    np.savez("text.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.raises(SystemExit) as stop:
        g.main([*flags.split(), "--out", "r"])
    error = capsys.readouterr().err.strip()
    assert stop.value.code == 2
    assert word in error
    assert len(error.splitlines()) == 1
    assert not Path("r").exists()


class Flat(nn.Sequential):
    """Anyone's net: nothing in it is called features or head."""

    def __init__(self, channels, side, classes):
        super().__init__(nn.Flatten(), nn.Linear(channels * side * side, classes))


def test_an_own_net_trains_where_no_generator_is_asked_for(tmp_path):
    _, rows = trained(tmp_path, "feddistill", model=f"{Path(__file__)}:Flat", rounds=1)
    assert rows[0]["accuracy"] > 0


SHORT = "--clients 6 --clients-per-round 3 --local-steps 1"


def test_the_command_line_writes_tables_and_figures(tmp_path, capsys, monkeypatch):
    """phases.png has the mean over trials of what metrics.csv has; Fig. 6 is partition.csv."""
    figures = {}
    save = matplotlib.figure.Figure.savefig

    def keep(figure, path, **how):
        figures[Path(path).name] = figure
        save(figure, path, **how)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    line = f"--method fedcl fedavg {SHORT} --rounds 3 --trials 2 --lam 0.4 0.6"
    df = launch(tmp_path, line)
    assert "to FedAvg's final accuracy" in capsys.readouterr().out
    names = {path.name for path in tmp_path.iterdir()}
    files = {"metrics.csv", "summary.json", "table3.csv", "accuracy.png", "phases.png"}
    assert files | {"partition.png"} <= names
    table = pd.read_csv(tmp_path / "table3.csv")
    assert len(table[table.method == "fedavg"]) == 4
    assert (
        len([*(tmp_path / "checkpoints").glob("fedavg*")]) == 2
    )  # it reads no lambda: trained once
    counts = pd.read_csv(tmp_path / "partition.csv")
    assert counts.groupby("setting").samples.sum().tolist() == [1437, 1437]
    assert counts.client.nunique() == 6
    fedcl = df[(df.method == "fedcl") & (df.setting == "lam=0.4")]
    mean = fedcl.groupby("round").beta_T.mean()
    curves = []
    for axes in figures["phases.png"].axes:
        curves += [line.get_ydata() for line in axes.get_lines()]
    assert any(len(curve) == 3 and np.allclose(curve, mean) for curve in curves)


def test_the_studys_command_line(tmp_path):
    line = f"--method fedcl fedcl-nofreeze fedavg-e {SHORT} --rounds 2 --trials 1"
    df = launch(tmp_path, line, controls)
    assert df.rank_correlation.notna().tolist() == [True] * 4 + [False] * 2
    assert df.phase.notna().tolist() == [True] * 2 + [False] * 4


def test_one_client(tmp_path):
    """It holds every label: both protocols agree. Mean, ensemble and its own net are one net."""
    line = "--clients 1 --clients-per-round 1 --rounds 3 --distill 0 --local-steps 1 --trials 1"
    df = launch(tmp_path, line)
    assert {*df.method} == {*g.METHODS}
    assert (df.accuracy == df.own_pooled).all()
    by_method = {method: rows.accuracy.tolist() for method, rows in df.groupby("method")}
    same = ("fedavg", "fedensemble", "feddistill", "feddistill+")
    assert [by_method[method] for method in same] == [by_method["fedavg"]] * 4
    # 256 of its 320 draws are at most beta_T at T = .8, more than v; at .6 and .2 fewer are
    assert df[df.method == "fedcl"].advance.tolist() == ["natural", "forced", "forced"]
