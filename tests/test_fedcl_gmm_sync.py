"""FedCL and its baselines against closed forms, SciPy, scikit-learn, loops and literal runs."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import matplotlib.figure
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from scipy.special import lambertw, rel_entr
from scipy.stats import spearmanr
from sklearn.mixture import GaussianMixture
from torch import nn

import common
import experiment
import fedcl_gmm_sync as g
from data import Data, load_data
from nets import build_model
from results.fedcl_gmm_sync import controls

SMALL = {
    "clients": 8,
    "clients_per_round": 4,
    "local_steps": 3,
    "rounds": 3,
    "trials": 1,
    "threads": 1,
    "device": "cpu",
}
LOG_10 = math.log(10)


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """A sixth of the generator's 50 steps a round, for speed; all where a test says so."""
    assert g.TEACHING_STEPS == 50
    monkeypatch.setattr(g, "TEACHING_STEPS", 8)


def small(method="fedcl", **flags) -> g.Config:
    module = controls if method in controls.CONTROLS else g
    return module.Config(method=method, **SMALL | flags)


def run_of(config, folder) -> experiment.Run:
    """A run that is to be trained; of a control, or of the paper's loop."""
    federate = g.federate
    if isinstance(config, controls.Config):
        federate = controls.federate
    script = experiment.Script(federate, ("method",), folder=folder)
    return script.run(config, 0)


def train(config, folder) -> tuple[dict, list[dict]]:
    """The state after the last round and the rows of one run."""
    run = run_of(config, folder)
    experiment.train(run, lambda *_: None)
    found = run.load()
    return found["state"], found["rows"]


def trained(folder, method="fedcl", **flags) -> tuple[dict, list[dict]]:
    return train(small(method, **flags), folder)


def begun(method="fedcl", **flags) -> tuple:
    """Config, federation in float64, and state with what four clients have sent."""
    config = small(method, **{"dtype": "float64"} | flags)
    fl = config.federation(load_data("digits"), common.Streams(config.seed, 0))
    state = fl.start() | g.begin()
    rng = np.random.default_rng(5)
    state["label_counts"] = {m: rng.integers(1, 50, 10).tolist() for m in range(4)}
    state["pool"] = np.sort(rng.normal(-20, 4, 100)).tolist()
    return config, fl, state


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


def plain_net(theta) -> nn.Sequential:
    """FedGen's classifier in torch's own layers: parameters, then batch statistics."""
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3, 2, 1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 16, 3, 2, 1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(784, 32),
        nn.Linear(32, 10),
    ).double()
    with torch.no_grad():
        for tensor in tensors_of(net):
            tensor.copy_(theta[: tensor.numel()].view_as(tensor))
            theta = theta[tensor.numel() :]
    assert len(theta) == 0
    return net


def tensors_of(net) -> list:
    buffers = [buffer for buffer in net.buffers() if buffer.is_floating_point()]
    return [*net.parameters(), *buffers]


def flatten(net):
    return torch.cat([tensor.detach().flatten() for tensor in tensors_of(net)]).clone()


def grey(x):
    """Images in [-1, 1], (n, C, H, W)."""
    return x.permute(0, 3, 1, 2).double() / 127.5 - 1


def s_star(losses, tau, lam):
    """SuperLoss' confidence, by SciPy, a sample at a time."""
    s = []
    for loss in losses.detach():
        b = (float(loss) - tau) / lam
        if b <= -2 / math.e:
            s.append(math.e)
        else:
            s.append(math.exp(-lambertw(b / 2).real))
    return torch.tensor(s, dtype=torch.float64)


class Literal:
    """Algorithm 1 and its baselines as loops over clients, steps and samples, in float64.

    It shares with the project the random streams, the partition and the first weights.
    """

    def __init__(self, method, config, steps):
        self.c = config
        self.steps = steps
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
        if not self.cl:
            return losses
        s = s_star(losses, self.c.tau, self.c.lam)
        return (losses - self.c.tau) * s + self.c.lam * s.log() ** 2

    def batches(self, m, t):
        shard = self.shards[m]
        rng = self.streams("batches", t, m)
        B = min(self.c.batch_size, len(shard))
        batches = []
        while len(batches) < self.c.local_steps:
            a_pass = rng.permutation(shard)
            batches += [a_pass[i : i + B] for i in range(0, len(shard) - B + 1, B)]
        return batches[: self.c.local_steps]

    def train(self, m, t, start, counts):
        c = self.c
        net = plain_net(start).train()
        batches = self.batches(m, t)
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
        return flatten(net), total / c.local_steps

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
            logits = plain_net(theta).eval()(self.x[shard])
        if self.cl:
            losses = F.cross_entropy(logits, self.y[shard], reduction="none")
            scores = (losses - self.c.tau) * s_star(losses, self.c.tau, self.c.lam)
            seed = self.streams.seed("mixture", t, m)
            fit = GaussianMixture(3, reg_covar=1e-6, random_state=seed, covariance_type="diag")
            fit.fit(scores.numpy()[:, None])
            self.told[m] = (fit.weights_, fit.means_[:, 0], fit.covariances_[:, 0])
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
        beta_T = self.N[math.ceil(round(S[self.z] * len(self.N), 6)) - 1]
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
        head = plain_net(self.theta)[-1]
        for y, x in zip(*self.draw((self.steps, 128), "teaching", t), strict=True):
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
        realised = (losses - self.c.tau) * s_star(losses, self.c.tau, self.c.lam)
        return {"rank_correlation": spearmanr(x[:, -1], realised).statistic}

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
        logits = [plain_net(theta).eval()(self.x_test) for theta in tested]
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
def test_a_literal_run(tmp_path, monkeypatch, method, module):
    """Weights to 1e-9 and every column of metrics.csv, with every flag off its default."""
    steps = 50 if (method, module) == ("fedcl", g) else 6
    monkeypatch.setattr(g, "TEACHING_STEPS", steps)
    config = module.Config(method=method, **LITERAL)
    state, rows = train(config, tmp_path)
    literal = Literal(method, config, steps).run()
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

TABLE = [
    (10, 0.5, 0, 2.718282, -27.182818, -26.682818),
    (10, 0.5, 5, 2.718282, -13.591409, -13.091409),
    (10, 0.5, 10, 1, 0, 0),
    (10, 0.5, 12, 0.426303, 0.852606, 1.216074),
    (LOG_10, 1, 2, 1.198871, -0.362760, -0.329862),
    (LOG_10, 1, 5, 0.505631, 1.363896, 1.828950),
    (LOG_10, 0.5, 3, 0.639974, 0.446328, 0.545932),
    (math.log(26), 0.5, 5, 0.453704, 0.790309, 1.102604),
]


@pytest.mark.parametrize("tau, lam, ce, s, score, loss", TABLE)
def test_confidence_score_and_loss_of_the_table(tau, lam, ce, s, score, loss):
    ce = torch.tensor([float(ce)], dtype=torch.float64)
    parts = [g.confidence(ce, tau, lam), g.difficulty(ce, tau, lam)]
    parts.append(g.confidence_loss(ce, tau, lam))
    np.testing.assert_allclose(torch.cat(parts), [s, score, loss], atol=1e-6)


def test_lambert_w_is_scipys():
    """Also near the branch point -1 / e, and far out."""
    near = -np.exp(-1) + np.logspace(-12, -0.45, 200)
    y = np.concatenate([near, np.linspace(-0.3, 3, 200), np.logspace(0, 12, 200)])
    w = g.lambert_w(torch.as_tensor(y))
    np.testing.assert_allclose(w, lambertw(y).real, rtol=1e-10, atol=2e-8)
    beyond = torch.tensor([-1 / math.e, -0.5, -9], dtype=torch.float64)
    assert (g.confidence(beyond, 0, 0.5) == math.e).all()


def test_confidence_minimises_eq_7_locally():
    """For s up to e, where the confidence lives; beyond, Eq. 7 falls without end if l < tau."""
    ce = torch.linspace(0, 30, 61, dtype=torch.float64)
    s = torch.logspace(-5, 1, 4000, dtype=torch.float64)[:, None]
    s = s[s[:, 0] <= math.e]
    for tau, lam in ((10, 0.5), (LOG_10, 0.5), (5, 2.0)):
        grid = (ce - tau) * s + lam * s.log() ** 2
        unclamped = (ce - tau) / lam > -2 / math.e
        least = grid.min(0).values + 1e-12
        assert (g.confidence_loss(ce, tau, lam) <= least)[unclamped].all()
        assert (g.confidence(ce, tau, lam) == math.e)[~unclamped].all()
    assert (9 - 10) * 1e6 + 0.5 * math.log(1e6) ** 2 < -9e5


@pytest.mark.parametrize("tau, lam", [(10, 0.5), (LOG_10, 0.5), (LOG_10, 1e9)])
def test_gradient_is_s_times_that_of_cross_entropy(tau, lam):
    torch.manual_seed(0)
    logits = 1.5 * torch.randn(50, 10, dtype=torch.float64)
    y = torch.randint(10, (50,))
    logits.requires_grad_()
    [plain] = torch.autograd.grad(F.cross_entropy(logits, y, reduction="sum"), logits)
    ce = F.cross_entropy(logits, y, reduction="none")
    assert not g.confidence(ce, tau, lam).requires_grad
    [curriculum] = torch.autograd.grad(g.confidence_loss(ce, tau, lam).sum(), logits)
    torch.testing.assert_close(curriculum, s_star(ce, tau, lam)[:, None] * plain)
    if tau == 10:  # degenerate: e times the learning rate
        torch.testing.assert_close(curriculum, math.e * plain, rtol=1e-14, atol=0)
    elif lam == 1e9:
        torch.testing.assert_close(curriculum, plain, rtol=1e-7, atol=1e-9)


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


def test_beta_T_is_numpys_inverted_cdf_and_counts_add_up():
    rng = np.random.default_rng(0)
    for K in (1, 3, 20):
        draws = {m: rng.normal(size=320) for m in range(K)}
        pool = np.concatenate(list(draws.values()))
        for T in (*rng.uniform(0.01, 0.99, 30), 0.8, 0.6, 0.2, 0.9, 0.3):
            columns, _ = check(draws, thresholds=str(T))
            beta_T = columns["beta_T"]
            assert beta_T == np.quantile(pool, T, method="inverted_cdf")
            below = [(scores <= beta_T).sum() for scores in draws.values()]
            assert sum(below) == math.ceil(T * 320 * K)
            shares = [float(word.partition(":")[2]) for word in columns["fractions"].split()]
            assert shares == pytest.approx(np.array(below) / 320, abs=6e-4)


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


def test_nothing_passes_at_v_1():
    columns, _ = check({0: np.zeros(320), 1: np.zeros(320)}, v=1.0)
    assert columns["froze"] == 0


@pytest.mark.parametrize(
    "T, v, most", [(0.3, 0.7, 8), (0.6, 0.7, 17), (0.2, 0.7, 5), (0.8, 0.7, 20)]
)
def test_pigeonhole_bounds_who_can_pass_one_check(T, v, most):
    """Brute force: m clients hold just enough of the lowest scores each, for every m."""
    need = 225
    counts = []
    for lucky in range(1, 21):
        low = iter(np.linspace(0, 1, lucky * need))
        high = iter(np.linspace(2, 3, 20 * 320))
        draws = {}
        for m in range(20):
            easy = need if m < lucky else 0
            draws[m] = np.array([next(low if i < easy else high) for i in range(320)])
        columns, _ = check(draws, thresholds=str(T), v=v)
        counts.append(columns["froze"])
    assert max(counts) == most


def test_hand_made_mixtures_freeze_only_fresh_participants_below_beta():
    points = {m: [[1.0], [float(m)], [1e-20]] for m in range(4)}  # scores 0, 1, 2, 3
    draws = g.sample_mixtures(SimpleNamespace(streams=common.Streams(1)), points, 0)
    columns, _ = check(draws, trained=[1, 2], thresholds="0.3,0.2")
    # element 384 of 1280: all draws of client 0 and 64 of client 1
    assert abs(columns["beta_T"] - 1) < 1e-6
    assert columns["frozen"] == 0
    assert columns["fractions"] == "1:0.200 2:0.000"
    columns, state = check(draws, trained=[0, 2, 3], thresholds="0.3,0.2", t=1)
    assert [*state["frozen"]] == [0]
    assert columns["froze"] == 1
    assert columns["advance"] == ""
    assert state["frozen"][0] == 1  # with the weights that it has just trained


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


def test_after_the_last_phase_nobody_freezes():
    columns, state = check({0: np.zeros(320)}, phase=3, t=9, thresholds="0.8,0.6,0.2")
    assert state["frozen"] == {}
    assert columns == {"phase": 4, "frozen": 0, "froze": 0}


def test_v_1_forces_every_advance_and_the_run_ends(tmp_path):
    _, rows = trained(tmp_path, rounds=4, v=1.0, thresholds="0.8,0.2", local_steps=1)
    assert [row["advance"] for row in rows] == ["", "forced", "", "forced"]
    assert [row["phase"] for row in rows] == [1, 1, 2, 2]
    assert sum(row["froze"] for row in rows) == 0


def test_participants_are_the_unfrozen_in_the_order_of_all_methods():
    config, fl, _ = begun(clients=20, clients_per_round=10)
    for t in range(5):
        order = fl.streams("select", t).permutation(20)
        everyone = g.select_unfrozen(config, fl, t, {}).tolist()
        assert everyone == sorted(order[:10]) == fl.select(t, 10).tolist()
        frozen = [*range(0, 20, 2), 1, 3, 5]
        left = g.select_unfrozen(config, fl, t, dict.fromkeys(frozen)).tolist()
        assert left == [7, 9, 11, 13, 15, 17, 19]  # min(10, 7)
        frozen = [0, 4, 9]
        left = g.select_unfrozen(config, fl, t, dict.fromkeys(frozen)).tolist()
        assert left == sorted([m for m in order if m not in frozen][:10])


@pytest.mark.parametrize("method", ["fedcl", "fedcl-fresh"])
def test_frozen_weights_stay_and_enter_the_average_or_not(tmp_path, monkeypatch, method):
    """Eq. 21 by a loop over clients, in a run in which clients freeze by rule."""
    rounds = []
    average = g.average

    def recorded(frozen, update):
        theta = average(frozen, update)
        nets = {m: net.clone() for m, net in frozen.items()}
        rounds.append((nets, update.clients.tolist(), update.gather_thetas().clone(), theta))
        return theta

    monkeypatch.setattr(g, "average", recorded)
    _, rows = trained(tmp_path, method, rounds=8, local_steps=4)
    assert sum(row["froze"] for row in rows) >= 1
    last_nets = {}
    waited = 0
    for frozen, clients, thetas, theta in rounds:
        assert not {*clients} & {*frozen}
        for m, net in frozen.items():
            assert torch.equal(net, last_nets[m])
        last_nets |= dict(zip(clients, thetas, strict=True))
        waited += len(frozen)
        group = [*frozen, *clients]
        expected = sum(last_nets[m].double() for m in group) / len(group)
        torch.testing.assert_close(theta.double(), expected, rtol=1e-5, atol=1e-7)
    assert (waited > 0) == (method == "fedcl")


# --------------------------------------------------------------------------------------- mixtures


def test_mixture_is_the_scores_own():
    rng = np.random.default_rng(0)
    groups = [rng.normal(-6, 0.2, 300), rng.normal(-1, 0.3, 100), rng.normal(3, 0.1, 100)]
    alpha, mu, variance = np.array(g.mixture(np.concatenate(groups), 1))
    order = np.argsort(mu)
    np.testing.assert_allclose(alpha[order], [0.6, 0.2, 0.2], atol=1e-6)
    np.testing.assert_allclose(mu[order], [group.mean() for group in groups], atol=1e-6)
    np.testing.assert_allclose(variance[order], [group.var() for group in groups], rtol=1e-3)


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
    config, fl, _ = begun(tau=LOG_10)
    losses = [(np.ones(40), None), (np.array([*np.ones(39), bad]), None)]
    monkeypatch.setattr(common, "score", lambda *_, **__: losses)
    update = SimpleNamespace(clients=np.array([2, 5]), gather_thetas=lambda: None)
    with pytest.raises(common.NonFiniteError, match="round 3: .*client 5"):
        g.fit_mixtures(config, fl, 2, update)


def test_server_draws_follow_the_mixture_and_change_every_round():
    fl = SimpleNamespace(streams=common.Streams(1))
    mixture = [[0.5, 0.3, 0.2], [-6.0, 0.0, 4.0], [0.04, 0.25, 1.0]]
    rounds = [g.sample_mixtures(fl, {7: mixture}, t)[7] for t in range(100)]
    assert all(len(scores) == 320 for scores in rounds)
    assert not np.array_equal(rounds[0], rounds[1])
    both = g.sample_mixtures(fl, {2: mixture, 7: mixture}, 3)
    np.testing.assert_array_equal(rounds[3], both[7])
    x = np.concatenate(rounds)
    assert abs(x.mean() - (-3 + 0.8)) < 0.05
    assert abs(x.var() - (0.5 * 36.04 + 0.3 * 0.25 + 0.2 * 17 - 2.2**2)) < 0.5


def test_mixtures_are_of_scores_not_of_losses():
    """At tau = 10 scores are an affine map of losses: compare where they are not, at log C."""
    config, fl, state = begun(tau=LOG_10)
    theta = 3 * state["theta"]  # losses on both sides of the clamp
    update = SimpleNamespace(clients=np.array([2]), gather_thetas=lambda: theta[None])
    alpha, mu, variance = np.array(g.fit_mixtures(config, fl, 0, update)[2])
    logits = plain_net(theta).eval()(grey(fl.data.x_train[fl.shards[2]]))
    losses = F.cross_entropy(logits, fl.data.y_train[fl.shards[2]], reduction="none").detach()
    scores = (losses - LOG_10) * s_star(losses, LOG_10, 0.5)
    assert abs(scores.mean() - losses.mean()) > 0.1
    assert abs(alpha @ mu - scores.mean()) < 1e-6
    assert abs(alpha @ (variance + mu**2) - (scores**2).mean()) < 1e-4


def test_only_parameters_are_uploaded(tmp_path):
    state, _ = trained(tmp_path, rounds=1)
    for mixture in state["mixtures"].values():
        assert len(mixture) == 3
        assert max(map(len, mixture)) <= 3
    assert len(state["pool"]) == 320 * len(state["mixtures"])


def test_labels_are_counted_over_the_rounds_batches(tmp_path):
    """c_k counts what was trained on (line 10), not the shard."""
    state, _ = trained(tmp_path, "fedgen", rounds=1, local_steps=2, batch_size=8)
    assert {sum(count) for count in state["label_counts"].values()} == {16}
    assert len(state["label_counts"]) == 4


# ---------------------------------------------------------------------------------- the generator


def test_parameter_counts():
    for method, count in (("fedcl", 20_000), ("fedgen", 19_744)):
        G = g.build_generator(*begun(method))
        assert sum(p.numel() for p in G.parameters()) == count
    blank = torch.zeros(1, 28, 28, 1, dtype=torch.uint8)
    label = torch.zeros(1, dtype=torch.int64)
    for classes, count in ((10, 26_434), (26, 26_962)):
        data = Data(blank, label, blank, label, classes, torch.zeros(1), torch.ones(1))
        assert build_model("fedgen-cnn", data).trainable == count


def test_generators_of_all_methods_begin_equal_but_for_the_difficulty():
    cl = g.build_generator(*begun("fedcl")).state_dict()
    gen = g.build_generator(*begun("fedgen")).state_dict()
    assert torch.equal(cl.pop("0.weight")[:, :42], gen.pop("0.weight"))
    assert all(torch.equal(cl[name], gen[name]) for name in gen)


def test_teaching_is_adam_on_eq_18_with_the_ensemble_of_heads(monkeypatch):
    """Two rounds against plain layers, one Adam and the mean of each user's logits."""
    monkeypatch.setattr(g, "TEACHING_STEPS", 50)
    config, fl, state = begun(tau=LOG_10)
    torch.manual_seed(1)
    noise = torch.randn(3, len(state["theta"]), dtype=torch.float64)
    users = state["theta"] + 0.3 * noise  # A_t
    state["theta"] = users.mean(0)
    reference = g.build_generator(config, fl, state)
    first = reference[3].weight.clone()
    heads = [plain_net(user)[-1] for user in users]
    adam = torch.optim.Adam(reference.parameters(), lr=1e-4, weight_decay=1e-2)
    before = state["theta"].clone()
    for t in range(2):
        adam.param_groups[0]["lr"] = 1e-4 * 0.98**t
        conditions = g.draw_conditions(config, fl, state, (50, 128), "teaching", t)
        for y, x in zip(*conditions, strict=True):
            z = reference(x)
            mean_logits = sum(head(z) for head in heads) / 3
            ce = F.nll_loss(torch.log(torch.softmax(mean_logits, 1)), y, reduction="none")
            far_z = (z[:, None] - z).abs().mean(2)
            far_eps = (x[:, None, :32] - x[:, :32]).square().mean(2)
            s = s_star(ce, LOG_10, 0.5)
            l_cl = (ce - LOG_10) * s + 0.5 * s.log() ** 2
            adam.zero_grad()
            (l_cl.mean() + torch.exp(-(far_z * far_eps).mean())).backward()
            adam.step()
        state |= g.teach(config, fl, state, t)
        state = copy.deepcopy(state)  # what a checkpoint would carry
    assert torch.equal(before, state["theta"])  # no weight of the classifier moves
    for name, expected in reference.state_dict().items():
        torch.testing.assert_close(state["generator"][name], expected, rtol=0, atol=1e-7)
    assert (state["generator"]["3.weight"] - first).abs().max() > 1e-3


def test_identical_features_have_diversity_1():
    assert g.similarity(torch.ones(5, 3), torch.randn(5, 32)) == 1


def test_conditions_follow_p_y_and_the_standardised_pool():
    config, fl, state = begun()
    y, x = g.draw_conditions(config, fl, state, (200, 100), "synthetic", 0, 3)
    counts = np.sum(list(state["label_counts"].values()), 0)
    drawn = np.bincount(y.flatten(), minlength=10) / 20_000
    np.testing.assert_allclose(drawn, counts / counts.sum(), atol=0.015)
    eps, one_hot, s = x[..., :32], x[..., 32:42], x[..., 42]
    assert torch.equal(one_hot.argmax(-1), y)
    assert torch.equal(one_hot.sum(-1), torch.ones(200, 100).double())
    pool = np.array(state["pool"])
    allowed = (pool - pool.mean()) / pool.std()
    assert np.isin(s.numpy().round(9), allowed.round(9)).all()
    assert len(np.unique(s)) == 100
    assert abs(s.mean()) < 0.03
    assert abs(s.std() - 1) < 0.03
    assert abs(eps.std() - 1) < 0.01
    fedgen, fl, _ = begun("fedgen")  # the methods share labels and noise
    state["pool"] = []
    again = g.draw_conditions(fedgen, fl, state, (200, 100), "synthetic", 0, 3)
    assert torch.equal(again[0], y)
    assert torch.equal(again[1], x[..., :42])


def test_rank_correlation_of_a_generator_that_obeys(monkeypatch):
    config, fl, state = begun()
    state["label_counts"] = {0: [1, *[0] * 9]}  # every label is 0
    last = nn.Identity()  # its feature is what it was told last

    class Obedient(nn.Module):
        def forward(self, told):
            return last(told[:, -1:])

    monkeypatch.setattr(g, "build_generator", lambda *_: Obedient())
    for sign in (1, -1, 0):

        def head(z, sign=sign):
            return torch.cat([-sign * z, torch.zeros(*z.shape[:2], 9)], 2)

        monkeypatch.setattr(fl.model, "bind", lambda _, head=head: SimpleNamespace(head=head))
        assert abs(controls.rank_correlation(config, fl, state, 0) - sign) < 1e-12


def test_generated_features_come_from_the_generator_in_eval_mode():
    config, fl, state = begun()
    clients = np.array([0, 3])
    assert {*g.local_objective(config, fl, state, 0, clients)} == {"lr", "loss"}
    state |= g.teach(config, fl, state, 0)  # its batch norm's statistics are now its own
    generated = g.generate(config, fl, state, 1, clients)
    G = g.build_generator(config, fl, state).eval()
    for k, m in enumerate(clients):
        y, told = g.draw_conditions(config, fl, state, (3, 32), "synthetic", 1, m)
        assert np.array_equal(generated["y"][k], y)
        z = torch.stack([G(of_step) for of_step in told]).detach()
        np.testing.assert_allclose(generated["z"][k], z, rtol=1e-9, atol=1e-12)


def test_what_travels_beside_the_nets():
    config, fl, state = begun()
    update = SimpleNamespace(clients=np.array([0, 3]), samples=np.array([5, 6]))
    net = 2 * fl.model.size
    first = g.traffic(config, fl, state, update)
    assert first["samples"] == 11
    assert first["received_mb"] == pytest.approx(8e-6 * net)
    assert first["sent_mb"] == pytest.approx(8e-6 * (net + 2 * (10 + 9)))
    state |= g.teach(config, fl, state, 0)
    state["mixtures"] = dict.fromkeys((0, 3, 5))
    later = g.traffic(config, fl, state, update)
    G = 20_000 + 2 * 256 + 1  # with its batch norm's statistics and counter
    assert later["received_mb"] == pytest.approx(8e-6 * (net + 2 * (G + 10 + 3 * 9)))


def test_synthetic_term_moves_the_head_and_nothing_else():
    config, fl, state = begun(local_steps=1)
    clients = np.array([0, 3])
    state |= g.teach(config, fl, state, 0)
    generated = g.generate(config, fl, state, 1, clients)
    batches = g.draw_batches(config, fl, 0, clients)

    def one_step(state):
        objective = g.local_objective(config, fl, state, 1, clients) | {"lr": 0.1}
        return fl.train(state, 0, clients, batches, **objective).gather_thetas()

    plain = one_step(state | {"generator": None})
    mixed = one_step(state)
    differs = (plain != mixed).any(0)
    head = slice(26_104, 26_434)  # 32 x 10 + 10
    assert differs[head].all()
    assert not differs[: head.start].any()
    assert not differs[head.stop :].any()
    z = torch.as_tensor(generated["z"][1][0])
    y = torch.as_tensor(generated["y"][1][0])
    layer = plain_net(state["theta"])[-1]
    F.cross_entropy(layer(z), y).backward()  # by hand: -lr e times its gradient, of client 3
    gradient = torch.cat([layer.weight.grad.flatten(), layer.bias.grad])
    torch.testing.assert_close((mixed - plain)[1, head], -0.1 * math.e * gradient)


# ------------------------------------------------------------------------ identities, bit for bit


def test_fedcl_is_fedgen_with_confidence_difficulty_and_phases(tmp_path, monkeypatch):
    """Without the three, each of which alone changes the weights."""
    fedgen, _ = trained(tmp_path, "fedgen")
    monkeypatch.setattr(g, "confidence_loss", lambda ce, tau, lam: ce)
    difficult, _ = trained(tmp_path / "difficult", v=1.0)
    assert not torch.equal(difficult["theta"], fedgen["theta"])

    sample_conditions = g.sample_conditions
    build_generator = g.build_generator

    def without_difficulty(counts, pool, *rest):
        return sample_conditions(counts, [], *rest)

    def without_its_input(config, *rest):
        return build_generator(replace(config, method="fedgen"), *rest)

    monkeypatch.setattr(g, "sample_conditions", without_difficulty)
    monkeypatch.setattr(g, "build_generator", without_its_input)
    bare, _ = trained(tmp_path / "bare", v=1.0)
    assert torch.equal(bare["theta"], fedgen["theta"])
    for name, value in fedgen["generator"].items():
        assert torch.equal(value, bare["generator"][name])
    frozen, rows = trained(tmp_path / "frozen", rounds=8, local_steps=4)
    waiting, _ = trained(tmp_path / "frozen", rounds=8, local_steps=4, v=1.0)
    assert max(row["frozen"] for row in rows) > 0
    assert not torch.equal(frozen["theta"], waiting["theta"])


@pytest.mark.parametrize(
    "method, off", [("fedprox", {"mu": 0.0}), ("feddistill+", {"distill": 0.0})]
)
def test_baselines_with_their_term_off_are_fedavg(tmp_path, method, off):
    fedavg = trained(tmp_path, "fedavg")[0]["theta"]
    assert torch.equal(trained(tmp_path, method, **off)[0]["theta"], fedavg)
    assert not torch.equal(trained(tmp_path, method)[0]["theta"], fedavg)


def test_first_round_has_no_synthetic_term(tmp_path):
    fedgen = trained(tmp_path, "fedgen", rounds=1)[0]["theta"]
    assert torch.equal(fedgen, trained(tmp_path, "fedavg", rounds=1)[0]["theta"])


@pytest.mark.parametrize("method", ["fedgen", "fedavg"])
def test_e_is_a_learning_rate(tmp_path, method):
    faster = trained(tmp_path, method, lr=0.01 * math.e)[0]["theta"]
    assert torch.equal(trained(tmp_path, method + "-e")[0]["theta"], faster)


def test_fedcl_over_e_is_cross_entropy_at_tau_10(tmp_path):
    """In the first round, where no generated features are."""
    flags = {"dtype": "float64", "rounds": 1}
    slower = trained(tmp_path, "fedcl/e", **flags)[0]["theta"]
    fedavg = trained(tmp_path, "fedavg", **flags)[0]["theta"]
    torch.testing.assert_close(slower, fedavg, rtol=1e-9, atol=1e-12)
    nofreeze = trained(tmp_path, "fedcl-nofreeze", **flags)[0]["theta"]
    faster = trained(tmp_path, "fedgen-e", **flags)[0]["theta"]
    torch.testing.assert_close(nofreeze, faster, rtol=1e-9, atol=1e-12)


def test_nofreeze_is_v_1_and_the_study_runs_the_papers_fedcl(tmp_path):
    flags = {"rounds": 8, "local_steps": 4}
    nofreeze, rows = trained(tmp_path, "fedcl-nofreeze", **flags)
    assert torch.equal(nofreeze["theta"], trained(tmp_path, v=1.0, **flags)[0]["theta"])
    assert "phase" not in rows[0]
    paper, rows = trained(tmp_path, **flags)
    study, measured = train(controls.Config(method="fedcl", **SMALL | flags), tmp_path / "study")
    assert torch.equal(paper["theta"], study["theta"])
    for row, more in zip(rows, measured, strict=True):
        assert {*more} - {*row} == {"rank_correlation"}
        assert all(more[name] == row[name] for name in row if name != "seconds")


# ---------------------------------------------------------------------------------- the baselines


def flags_read(config) -> set[str]:
    own = {"tau", "lam", "thresholds", "v", "phase_quorum", "generator_hidden", "distill", "mu"}
    return own & {*config.results_depend_on()}


PHASES = {"thresholds", "v", "phase_quorum"}
FEDCL = PHASES | {"tau", "lam", "generator_hidden"}


@pytest.mark.parametrize(
    "method, expected",
    [
        ("fedcl", FEDCL),
        ("fedcl-fresh", FEDCL),
        ("fedcl/e", FEDCL),
        ("fedcl-nodiversity", FEDCL),
        ("fedgen-nodiversity", {"generator_hidden"}),
        ("fedcl-nofreeze", FEDCL - PHASES),
        ("fedgen", {"generator_hidden"}),
        ("fedgen-e", {"generator_hidden"}),
        ("fedavg", set()),
        ("fedavg-e", set()),
        ("fedensemble", set()),
        ("fedprox", {"mu"}),
        ("feddistill", {"distill"}),
        ("feddistill+", {"distill"}),
    ],
)
def test_flags_that_a_method_reads(method, expected):
    assert flags_read(controls.Config(method=method)) == expected
    if method in g.METHODS:
        config = g.Config(method=method)
        assert flags_read(config) == expected
        assert config.reads_rounds() == (method == "fedcl")
    reads_rounds = controls.Config(method=method).reads_rounds()
    assert reads_rounds == (expected >= PHASES)


def test_feddistill_objective_and_its_gradient_in_closed_form():
    """CE + c KL(softmax(Q[y]) || p); its gradient p - onehot(y) + c (p - softmax(Q[y])).

    Nobody has shared logits of label 4.
    """
    torch.manual_seed(0)
    Q = torch.randn(10, 10).double()
    Q[4] = math.nan
    logits = torch.randn(2, 20, 10).double().requires_grad_()
    y = torch.arange(40).view(2, 20) % 10
    weight = torch.full((2, 20), 1 / 20, dtype=torch.float64)
    out = SimpleNamespace(logits=logits, y=y, weight=weight)
    ce = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(2, 20)
    J = ce.mean(1) + g.distillation(0.3, Q, out)
    p = torch.softmax(logits.detach(), -1).numpy()
    c = 0.3 * (y != 4).numpy()[..., None]
    target = np.where(c > 0, torch.softmax(Q, -1).numpy()[y], p)
    one_hot = np.eye(10)[y]
    expected = -np.log((p * one_hot).sum(-1)) + (c * rel_entr(target, p)).sum(-1)
    np.testing.assert_allclose(J.detach(), expected.mean(1), rtol=1e-10)
    [gradient] = torch.autograd.grad(J.sum(), logits)
    by_hand = (p - one_hot + c * (p - target)) / 20
    np.testing.assert_allclose(gradient, by_hand, rtol=1e-9, atol=1e-12)


def test_feddistill_shares_logits_and_no_weights(tmp_path):
    state, rows = trained(tmp_path, "feddistill", rounds=4)
    nets = [*state["base"]["nets"].values()]
    for i, net in enumerate(nets):
        assert not any(torch.equal(net, other) for other in nets[:i])
    a_round = 4 * 100 * 4e-6
    assert [row["sent_mb"] for row in rows] == pytest.approx([a_round * t for t in range(1, 5)])
    assert [row["received_mb"] for row in rows] == pytest.approx([a_round * t for t in range(4)])


def test_shared_logits_are_means_per_label_of_those_who_hold_it():
    config, fl, state = begun("feddistill")
    thetas = state["theta"] * torch.tensor([[1.0], [2.0]])
    update = SimpleNamespace(clients=np.array([1, 6]), gather_thetas=lambda: thetas)
    shared = g.mean_logits(config, fl, update)
    assert [*shared] == [1, 6]
    for m, theta in zip((1, 6), thetas, strict=True):
        net = plain_net(theta).eval()
        for c in range(10):
            held = [i for i in fl.shards[m] if fl.labels[i] == c]
            if held:
                expected = net(grey(fl.data.x_train[held])).mean(0)
                torch.testing.assert_close(shared[m][c], expected)
            else:
                assert shared[m][c].isnan().all()


def test_fedensemble_tests_the_sum_of_all_users_logits():
    """Four users trained this round, the other four hold the net that was sent to all."""
    _, fl, state = begun("fedensemble")
    torch.manual_seed(0)
    theta = state["theta"]
    thetas = theta + 0.2 * torch.randn(4, len(theta), dtype=torch.float64)
    state["ensemble"] = torch.cat([thetas, theta[None]])
    x = grey(fl.data.x_test)
    logits = sum(plain_net(user).eval()(x) for user in [*thetas, *[theta] * 4])
    accuracy = 100 * (logits.argmax(1) == fl.data.y_test).double().mean()
    assert abs(fl.test(state)["accuracy"] - accuracy) < 1e-9


@pytest.mark.parametrize("method", ["fedavg", "feddistill"])
def test_both_protocols_against_loops_over_users(method):
    _, fl, state = begun(method, alpha=0.05)
    torch.manual_seed(0)
    nets = state["theta"] * (1 + 0.3 * torch.randn(8, len(state["theta"]))).double()
    state["base"]["nets"] = dict(enumerate(nets))
    found = fl.test(state)
    y = fl.data.y_test.numpy()
    x = grey(fl.data.x_test)
    right = 0
    asked = 0
    full = []
    for m, shard in enumerate(fl.shards):
        theta = nets[m] if method == "feddistill" else state["theta"]
        guess = plain_net(theta).eval()(x).argmax(1).numpy()
        held = np.isin(y, np.unique(fl.labels[shard]))
        right += (guess == y)[held].sum()
        asked += held.sum()
        full.append(100 * (guess == y).mean())
    assert asked < 8 * len(y)
    assert abs(found["own_pooled"] - 100 * right / asked) < 1e-9
    assert abs(found["accuracy"] - np.mean(full)) < 1e-9


# ------------------------------------------------------------------------ data, run, command line


def test_batches_are_full_and_of_passes_over_the_shard():
    config = small(local_steps=7)
    fl = SimpleNamespace(streams=common.Streams(1), shards=[np.arange(100, 175), np.arange(5)])
    batches, few = g.draw_batches(config, fl, 0, np.array([0, 1]))
    assert batches.shape == (7, 32)  # 75 samples: two batches of 32 a pass
    assert np.isin(batches, fl.shards[0]).all()
    for step in range(0, 6, 2):
        assert len(np.unique(batches[step : step + 2])) == 64
    first = np.sort(batches[:2], axis=None)
    assert not np.array_equal(first, np.sort(batches[2:4], axis=None))
    assert (np.sort(few[:, :5]) == np.arange(5)).all()
    assert (few[:, 5:] == -1).all()


def test_users_hold_their_share_and_images_lie_in_minus_1_to_1():
    for share, expected in ((1.0, 1437), (0.5, 718)):
        _, fl, _ = begun("fedavg", data_share=share)
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


@pytest.mark.parametrize("method", ["fedcl", "fedgen", "fedensemble", "feddistill", "fedcl-fresh"])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path, monkeypatch, method):
    """All that must survive is in the state: generator, Adam, frozen nets, mixtures, logits."""
    flags = {"rounds": 5, "local_steps": 4}
    whole, rows = trained(tmp_path / "whole", method, **flags)
    record = experiment.Run.record

    def killed(run, t, *rest, **columns):
        record(run, t, *rest, **columns)
        run.save()
        if t == 3:
            raise KeyboardInterrupt

    config = small(method, resume=True, **flags)
    with monkeypatch.context() as patch:
        patch.setattr(experiment.Run, "record", killed)
        patch.setattr(experiment.Run, "save", experiment.Run.save)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path)
    state, again = train(config, tmp_path)
    torch.testing.assert_close(state, whole, rtol=0, atol=0, equal_nan=True)
    for row, expected in zip(again, rows, strict=True):
        assert {**row, "seconds": 0} == {**expected, "seconds": 0}


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
        ("--epochs 3", "--epochs"),
        ("--base fedavg fedadam", "--base"),
        ("--dataset text.npz --model lstm", "reads images"),
        ("--tau 1e300", "--tau"),
        ("--tau 0", "--tau"),
        ("--tau nan", "--tau"),
        ("--data-share 0.1 1", "only 144 samples, --min-size 32"),
        (f"--model {Path(__file__)}:Flat", "fedcl's generator needs a model with features"),
        (f"--method fedavg fedgen --model {Path(__file__)}:Flat", "fedgen's generator needs"),
        ("--method fedsgd", "fedsgd"),
        ("--lam 0", "--lam"),
        ("--v 1.1", "--v"),
        ("--phase-quorum 0", "quorum"),
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


PRESETS = ["table1", "table2-mnist", "table2-emnist", "table2-celeba", "table2-celeba-10"]
PRESETS += ["table3", "table4", "table5", "table6-lambda", "table6-tau", "table6-s", "table6-v"]


def parse_preset(module, name) -> list:
    configs, _ = experiment.parse(module.Config, module.PRESETS, module.__doc__, ["--preset", name])
    return configs


@pytest.mark.parametrize("name", PRESETS)
def test_presets_compare_what_the_paper_compares(name):
    methods = {config.method for config in parse_preset(g, name)}
    is_ablation = name >= "table4"
    assert methods == ({"fedcl"} if is_ablation else {*g.METHODS})
    variants = {config.method for config in parse_preset(controls, name)}
    assert variants == {"fedcl", "fedcl-fresh", "fedcl-nofreeze", "fedgen-e"}


def test_presets_say_what_the_paper_ran():
    assert PRESETS == [*g.PRESETS] == [*controls.PRESETS]

    def values(name, flag):
        found = {}
        for module in (g, controls):
            configs = parse_preset(module, name)
            found[module] = list(dict.fromkeys(getattr(config, flag) for config in configs))
        assert found[g] == found[controls]
        return found[g]

    for name in PRESETS:
        assert values(name, "local_steps")[0] == 20
        if "celeba" in name:
            assert values(name, "dataset") == ["celeba"]
            assert values(name, "rounds") == [100]
            assert values(name, "data_share") == [1]
            assert values(name, "generator_hidden") == [128]
            assert values(name, "partition") == ["natural"]
        else:
            is_mnist = name in ("table1", "table2-mnist", "table3")
            assert values(name, "dataset") == ["mnist" if is_mnist else "emnist"]
            assert values(name, "rounds") == [200]
            assert values(name, "data_share") == [0.5]
    assert values("table1", "thresholds") == ["0.9,0.6,0.3"]
    assert values("table1", "v") == [0.8]
    assert values("table2-mnist", "alpha") == [0.05, 0.1, 1]
    assert values("table3", "alpha") == [0.05, 0.1, 1, 10]
    assert values("table2-emnist", "local_steps") == [20, 40]
    assert values("table2-emnist", "alpha") == [0.05, 0.1, 1, 10]
    assert values("table2-celeba", "clients") == [10, 25]
    assert values("table2-celeba", "clients_per_round") == [5]
    assert values("table2-celeba-10", "clients") == [25]
    assert values("table2-celeba-10", "clients_per_round") == [10]
    assert values("table4", "phase_quorum") == [0.6, 0.7, 0.8, 0.9]
    assert values("table4", "alpha") == [0.1]
    assert [len(S.split(",")) for S in values("table5", "thresholds")] == [2, 3, 4, 5]
    assert values("table6-lambda", "lam") == [0.2, 0.5, 0.8, 1]
    assert values("table6-tau", "tau") == [5, 10, 15, 20]
    S = ["0.8,0.6,0.4,0.2", "0.7,0.5,0.3", "0.8,0.6,0.2", "0.8,0.4"]
    assert values("table6-s", "thresholds") == S
    assert values("table6-v", "v") == [0.5, 0.6, 0.7, 0.8]


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


def test_every_third_round_is_tested_and_the_last(tmp_path):
    df = launch(tmp_path, f"--eval-every 3 --rounds 5 --trials 1 {SHORT} --method fedcl fedavg")
    for column in ("accuracy", "loss", "own_pooled"):
        assert df[column].notna().tolist() == [False, False, True, False, True] * 2
    assert df.train_loss.notna().all()
    assert df.phase.notna().tolist() == [True] * 5 + [False] * 5


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


def test_a_client_freezes_by_rule_on_mnist(real_data, tmp_path):
    flags = {"dataset": "mnist", "data_dir": str(real_data), "data_share": 0.5, "rounds": 2}
    config = g.Config(method="fedcl", trials=1, threads=1, device="cpu", **flags)
    _, rows = train(config, tmp_path)
    assert sum(row["froze"] for row in rows) >= 1
    assert len(rows[0]["fractions"].split()) == 10
