"""Every oracle and trap of FedCL and its baselines: closed forms, SciPy, scikit-learn, brute-force loops and literal runs."""

import copy
import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

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

SMALL = {"clients": 8, "clients_per_round": 4, "local_steps": 3, "rounds": 3, "trials": 1, "threads": 1, "device": "cpu"}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """A sixth of the generator's 50 steps a round, for speed; the whole of them where a test says so."""
    assert g.TEACHING_STEPS == 50
    monkeypatch.setattr(g, "TEACHING_STEPS", 8)


def small(method="fedcl", **flags) -> g.Config:
    return g.Config(method=method, **SMALL | flags)


def run_of(config, folder) -> experiment.Run:
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    return experiment.Run(config, config.method, "", 0, folder)


def trained(folder, method="fedcl", **flags) -> tuple[dict, list[dict]]:
    """The state after the last round and the rows of one run on digits."""
    run = run_of(small(method, **flags), folder / f"{method}{sorted(flags.items())}".replace("/", "-"))
    g.federate(run.config, common.load_data("digits"), run)
    run.save()
    return run.load()["state"], run.rows


def begun(method="fedcl", **flags) -> tuple[common.Federation, dict]:
    """A federation in float64 and a state with uploads of four clients, as after a first round."""
    config = small(method, **{"dtype": "float64"} | flags)
    fl, state = g.begin(config, common.load_data("digits"), common.Streams(config.seed, 0))
    rng = np.random.default_rng(5)
    state["counts"] = {k: rng.integers(1, 50, 10).tolist() for k in range(4)}
    state["pool"] = np.sort(rng.normal(-20, 4, 100)).tolist()
    return fl, state


# ------------------------------------------------------------------------------------------------- a literal run

LITERAL = {"clients": 6, "clients_per_round": 3, "rounds": 5, "local_steps": 3, "batch_size": 5, "lr": 0.05, "momentum": 0.3}
LITERAL |= {"weight_decay": 0.01, "mu": 0.4, "tau": 2.2, "lam": 0.7, "generator_hidden": 12, "thresholds": "0.7,0.4", "v": 0.6}
LITERAL |= {"phase_quorum": 0.6, "synthetic": 0.8, "distill": 0.3, "data_share": 0.06, "min_size": 8, "alpha": 0.5, "seed": 3}
LITERAL |= {"eval": "paper", "per_client": True, "eval_every": 2, "dtype": "float64", "trials": 1, "threads": 1}


def plain_net(theta) -> nn.Sequential:
    """FedGen's classifier in torch's own layers, with the flat weights theta: parameters, then BatchNorm's statistics."""
    convs = [nn.Conv2d(1, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU()]
    net = nn.Sequential(*convs, nn.Flatten(), nn.Linear(784, 32), nn.Linear(32, 10)).double()
    with torch.no_grad():
        for tensor in tensors(net):
            tensor.copy_(theta[: tensor.numel()].view_as(tensor))
            theta = theta[tensor.numel() :]
    assert len(theta) == 0
    return net


def tensors(net) -> list:
    return [*net.parameters(), *(b for b in net.buffers() if b.is_floating_point())]


def flat(net):
    return torch.cat([tensor.detach().flatten() for tensor in tensors(net)]).clone()


def s_star(losses, tau, lam):
    """SuperLoss' confidence, by SciPy, a sample at a time."""
    b = [(float(loss) - tau) / lam for loss in losses.detach()]
    return torch.tensor([math.e if x <= -2 / math.e else math.exp(-lambertw(x / 2).real) for x in b], dtype=torch.float64)


class Literal:
    """Algorithm 1 and its baselines as loops over clients, steps and samples, in float64.

    It shares with the project the random streams, the partition and the initial weights.
    """

    def __init__(self, method, config, steps=50):
        self.steps, self.c, self.streams = steps, config, common.Streams(config.seed, 0)
        self.kind = method.removesuffix("-fresh").removesuffix("-nofreeze").removesuffix("-e").removesuffix("-logc")
        self.cl, self.gen = self.kind == "fedcl", self.kind in ("fedcl", "fedgen")
        self.lr = config.lr * (math.e if method == "fedgen-e" else 1)
        self.tau = math.log(10) if method == "fedcl-logc" or config.tau <= 0 else config.tau
        self.over = math.e if method == "fedcl-e" else 1
        self.freezes, self.fresh = self.cl and method != "fedcl-nofreeze", method == "fedcl-fresh"
        digits = common.load_data("digits")
        kept = np.sort(self.streams("share").permutation(1437)[: round(config.data_share * 1437)])
        self.x, self.y = digits.x_train[kept].permute(0, 3, 1, 2).double() / 127.5 - 1, digits.y_train[kept]
        self.x_test, self.y_test = digits.x_test.permute(0, 3, 1, 2).double() / 127.5 - 1, digits.y_test
        how = (config.partition, self.y.numpy(), 6, config.alpha, self.streams("partition"), config.min_size)
        self.shards = common.partition(*how)[0]
        model = common.build_model("fedgen-cnn", digits, dtype=torch.float64)
        self.omega = model.init(self.streams.seed("init"))
        self.own, self.frozen, self.told, self.logits = {}, {}, {}, {}  # own nets, M_f, D_k, mean logits by user
        self.counts, self.N, self.G, self.z, self.begun = {}, None, None, 0, 0
        self.rows, self.uploads, self.samples, self.received, self.sent = [], 0, 0, 0.0, 0.0

    def l_cl(self, losses):
        if not self.cl:
            return losses
        s = s_star(losses, self.tau, self.c.lam)
        return ((losses - self.tau) * s + self.c.lam * s.log() ** 2) / self.over

    def draw(self, size, purpose, *key):
        """y ~ p(y), eps, and the generator's input with s, the r-th of N, standardised."""
        p = [sum(count[label] for count in self.counts.values()) for label in range(10)]
        y = torch.as_tensor(self.streams(purpose + " label", *key).choice(10, size, p=np.array(p) / sum(p)))
        eps = torch.as_tensor(self.streams(purpose + " noise", *key).standard_normal((*size, 32)))
        parts = [eps, F.one_hot(y, 10).double()]
        if self.cl:
            r = self.streams(purpose + " difficulty", *key).integers(len(self.N), size=size)
            parts.append((torch.tensor(self.N)[r] - np.mean(self.N)) / np.std(self.N))
            parts[-1] = parts[-1][..., None]
        return y, torch.cat(parts, -1)

    def round(self, t):
        order = [k for k in self.streams("select", t).permutation(6) if k not in self.frozen]
        P_t, sent_omega = sorted(order[: self.c.clients_per_round]), self.omega
        beside = 0
        if self.G is not None:
            beta = len(self.told) * (9 if self.c.upload == "gmm" else 17) * self.cl
            beside = sum(tensor.numel() for tensor in self.G.state_dict().values()) + 10 + beta
        beside += 100 * bool(self.logits)
        shares = self.kind != "feddistill"
        self.received += 8e-6 * len(P_t) * (shares * len(self.omega) + beside)
        weights, losses, seen, counts = {}, [], [], {}
        for k in P_t:
            start = self.omega if shares else self.own.get(k, self.omega)
            weights[k], loss = self.train(k, t, start, counts)
            losses.append(loss)
        for k in P_t:
            seen += [self.tell(k, t, weights[k])]
        self.own, self.counts = self.own | weights, self.counts | counts
        M_f = {} if self.fresh else self.frozen
        if shares:
            self.omega = sum([*M_f.values(), *weights.values()]) / (len(M_f) + len(weights))
        self.uploads += len(P_t)
        row = {"round": t + 1, "clients": len(P_t), "dropped": 0, "uploads": self.uploads, "train_loss": np.mean(losses)}
        row |= {"samples": self.samples, "received_mb": self.received} | self.serve(weights, t)
        self.sent += 8e-6 * sum(shares * len(self.omega) + told for told, _ in seen)
        row["sent_mb"] = self.sent
        if self.cl and self.c.tau == -1:
            row["tau"] = self.tau
            self.tau = 0.9 * self.tau + 0.1 * np.mean([loss for _, loss in seen])
        if (t + 1) % self.c.eval_every == 0 or t + 1 == self.c.rounds:
            row |= self.test(sent_omega, weights)
        self.rows.append(row)

    def train(self, k, t, start, counts):
        c, shard, rng = self.c, self.shards[k], self.streams("batches", t, k)
        net, B, batches, velocity, total = plain_net(start).train(), min(self.c.batch_size, len(self.shards[k])), [], {}, 0.0
        while len(batches) < c.local_steps:
            a_pass = rng.permutation(shard)
            batches += [a_pass[i : i + B] for i in range(0, len(shard) - B + 1, B)]
        y_gen, x_gen = self.draw((c.local_steps, c.batch_size), "synthetic", t, k) if self.G is not None else (None, None)
        if self.gen:
            counts[k] = [
                sum(int(self.y[i]) == label for batch in batches[: c.local_steps] for i in batch) for label in range(10)
            ]
        for step, batch in enumerate(batches[: c.local_steps]):
            logits = net(self.x[batch])
            loss = self.l_cl(F.cross_entropy(logits, self.y[batch], reduction="none")).mean()
            if y_gen is not None:
                z = self.G.eval()(x_gen[step]).detach()
                loss = loss + c.synthetic * self.l_cl(F.cross_entropy(net[-1](z), y_gen[step], reduction="none")).mean()
            if self.kind.startswith("feddistill"):
                for i, row in zip(batch, logits, strict=True):
                    held = [q[int(self.y[i])] for q in self.logits.values() if q[int(self.y[i])] is not None]
                    if held:
                        q = torch.softmax(sum(held) / len(held), 0)
                        loss = loss + c.distill * (q * (q.log() - torch.log_softmax(row, 0))).sum() / len(batch)
            net.zero_grad()
            loss.backward()
            total, at = total + float(loss.detach()), 0
            with torch.no_grad():
                for i, w in enumerate(net.parameters()):
                    x = start[at : at + w.numel()].view_as(w)
                    at += w.numel()
                    g = w.grad + c.weight_decay * w + (c.mu if self.kind == "fedprox" else 0) * (w - x)
                    velocity[i] = c.momentum * velocity.get(i, 0) + g
                    w -= self.lr * velocity[i]
        self.samples += c.local_steps * B
        return flat(net), total / c.local_steps

    def tell(self, k, t, theta):
        """What client k uploads beside its weights: (how many numbers, its mean loss)."""
        net, shard, numbers = plain_net(theta).eval(), self.shards[k], 10 * self.gen
        with torch.no_grad():
            logits = net(self.x[shard])
        losses = F.cross_entropy(logits, self.y[shard], reduction="none")
        if self.cl:
            scores = ((losses - self.tau) * s_star(losses, self.tau, self.c.lam)).numpy()
            if self.c.upload == "gmm":
                fit = GaussianMixture(
                    3, reg_covar=1e-6, random_state=self.streams.seed("mixture", t, k), covariance_type="diag"
                )
                fit.fit(scores[:, None])
                self.told[k] = (fit.weights_, fit.means_[:, 0], fit.covariances_[:, 0])
            else:
                self.told[k] = [np.quantile(scores, i / 16) for i in range(17)]
            numbers += 9 if self.c.upload == "gmm" else 17
        if self.kind.startswith("feddistill"):
            by_label = [[row for row, i in zip(logits, shard, strict=True) if int(self.y[i]) == label] for label in range(10)]
            self.logits[k] = [sum(rows) / len(rows) if rows else None for rows in by_label]
            numbers += 100
        return numbers, float(losses.mean())

    def serve(self, weights, t):
        columns, draws = {}, {}
        if self.cl:
            for k in sorted(self.told):
                rng = self.streams("pool", t, k)
                if self.c.upload == "gmm":
                    alpha, mu, variance = self.told[k]
                    draws[k] = [rng.choice(3, 320, p=alpha / alpha.sum())]
                    draws[k] = rng.normal(mu[draws[k][0]], np.sqrt(variance[draws[k][0]]))
                else:
                    draws[k] = np.array([np.interp(u, np.arange(17) / 16, self.told[k]) for u in rng.random(320)])
            self.N = sorted(x for each in draws.values() for x in each)
        if self.gen:
            columns |= self.teach(t)
        if not self.cl:
            return columns
        S = [float(T) for T in self.c.thresholds.split(",")]
        if not self.freezes or self.z == len(S):
            return columns | {"phase": self.z + 1, "frozen": 0, "froze": 0}
        beta_T, before = self.N[math.ceil(round(S[self.z] * len(self.N), 6)) - 1], len(self.frozen)
        below = {k: sum(x <= beta_T for x in each) for k, each in draws.items()}
        for k, omega_k in weights.items():
            if below[k] > self.c.v * 320:
                self.frozen[k] = omega_k
        columns |= {"phase": self.z + 1, "frozen": len(self.frozen), "froze": len(self.frozen) - before, "beta_T": beta_T}
        columns["fractions"] = " ".join(f"{below[k] / 320:.3f}" if k in below else "-" for k in range(6))
        natural, forced = len(self.frozen) >= self.c.phase_quorum * 6, t + 1 - self.begun >= math.ceil(self.c.rounds / len(S))
        columns["advance"] = "natural" if natural else "forced" if forced else ""
        if natural or forced:
            self.z, self.begun, self.frozen = self.z + 1, t + 1, {}
        return columns

    def teach(self, t):
        if self.G is None:
            torch.manual_seed(self.streams.seed("generator"))
            first, norm, last = nn.Linear(43, self.c.generator_hidden), nn.BatchNorm1d(self.c.generator_hidden), None
            last = nn.Linear(self.c.generator_hidden, 32)
            if not self.cl:
                first.weight = nn.Parameter(first.weight[:, :42].detach().clone())
            self.G = nn.Sequential(first, norm, nn.ReLU(), last).double()
            self.adam = torch.optim.Adam(self.G.parameters(), lr=1e-4, weight_decay=1e-2)
        self.adam.param_groups[0]["lr"] = 1e-4 * 0.98**t
        self.G.train()
        head = plain_net(self.omega)[-1]
        for y, x in zip(*self.draw((self.steps, 128), "teaching", t), strict=True):
            z = self.G(x)
            losses = F.cross_entropy(head(z), y, reduction="none")
            far = (z[:, None] - z).abs().mean(2) * (x[:, None, :32] - x[:, :32]).square().mean(2)
            J = self.l_cl(losses).mean() + torch.exp(-far.mean())
            self.adam.zero_grad()
            J.backward()
            self.adam.step()
        if not self.cl:
            return {}
        y, x = self.draw((320,), "obedience", t)
        with torch.no_grad():
            losses = F.cross_entropy(head(self.G.eval()(x)), y, reduction="none")
        score = (losses - self.tau) * s_star(losses, self.tau, self.c.lam)
        return {"rank_correlation": spearmanr(x[:, -1], score).statistic}

    @torch.no_grad()
    def test(self, sent_omega, weights):
        y, K = self.y_test, 6
        if self.kind == "fedensemble":
            users = [weights.get(k, sent_omega) for k in range(K)]
            logits = [sum(plain_net(theta).eval()(self.x_test) for theta in users) / K]
        else:
            nets = [self.own.get(k, self.start) for k in range(K)] if self.kind == "feddistill" else [self.omega]
            logits = [plain_net(theta).eval()(self.x_test) for theta in nets]
        loss, full, right, asked, own = [], [], 0, 0, []
        for each in logits:
            loss.append(float(F.cross_entropy(each, y)))
            full.append(100 * float((each.argmax(1) == y).double().mean()))
        for k, shard in enumerate(self.shards):
            each, mine = logits[k % len(logits)].argmax(1), [int(self.y[i]) for i in shard]
            held = [i for i in range(len(y)) if int(y[i]) in mine]
            right, asked = right + sum(int(each[i] == y[i]) for i in held), asked + len(held)
            by_label = [float((each[y == label] == label).double().mean()) for label in range(10)]
            own.append(100 * sum(by_label[label] for label in mine) / len(mine))
        seen = {"accuracy": 100 * right / asked, "accuracy_paper": 100 * right / asked, "accuracy_full": np.mean(full)}
        seen |= {"client_std": np.std(full, ddof=1)} if len(full) > 1 else {}
        return seen | {"loss": np.mean(loss), "own_mean": np.mean(own), "own_worst_tenth": min(own), "own_std": np.std(own)}

    def run(self):
        self.start = self.omega
        for t in range(self.c.rounds):
            self.round(t)
        return self


CONFIGS = [(method, {}) for method in g.ARMS]
CONFIGS += [("fedcl", {"upload": "quantiles"}), ("fedcl-fresh", {"tau": -1.0}), ("fedcl", {"tau": 0.0, "phase_quorum": 1.0})]
CONFIGS += [("fedcl-nofreeze", {"eval": "full", "tau": 1.7})]


@pytest.mark.parametrize("method, flags", CONFIGS)
def test_a_literal_run(tmp_path, monkeypatch, method, flags):
    """Weights to 1e-9 and every column of metrics.csv, with every flag off its default."""
    steps = 50 if (method, flags) == ("fedcl", {}) else 6
    monkeypatch.setattr(g, "TEACHING_STEPS", steps)
    config = g.Config(method=method, device="cpu", **LITERAL | flags)
    run = run_of(config, tmp_path)
    g.federate(config, common.load_data("digits"), run)
    run.save()
    literal, state = Literal(method, config, steps).run(), run.load()["state"]
    torch.testing.assert_close(state["weights"], literal.omega, rtol=0, atol=1e-9)
    assert len(run.rows) == len(literal.rows) == 5
    for row, expected in zip(run.rows, literal.rows, strict=True):
        if config.eval == "full" and "accuracy" in expected:
            expected["accuracy"] = expected["accuracy_full"]
        assert {*row} == {*expected, "setting", "method", "trial", "seconds"}
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, abs=2e-6 if name.endswith("_mb") else 1e-8), (name, row["round"])
    if method == "feddistill":
        for k, theta in literal.own.items():
            torch.testing.assert_close(state["base"]["own"][k], theta, rtol=0, atol=1e-9)
    for G in [literal.G] * (literal.G is not None):
        for (name, value), expected in zip(state["generator"].items(), G.state_dict().values(), strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-9, msg=name)
    if literal.freezes and not flags:  # what the transcript is for has happened
        assert sum(row["froze"] for row in run.rows) >= 2 and max(row["frozen"] for row in run.rows) >= 1


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
    got = g.confidence(ce, tau, lam), (ce - tau) * g.confidence(ce, tau, lam), g.loss_of(small(lam=lam), tau, ce)
    np.testing.assert_allclose(torch.cat(got), [s, score, loss], atol=1e-6)


def test_confidence_is_scipys_lambert_w():
    """At tau = 0, lambda = .5: s* = exp(-W0(l)), also near the branch point -1/e and beyond it."""
    x = np.concatenate([-np.exp(-1) + np.logspace(-12, -0.45, 200), np.linspace(-0.3, 3, 200), np.logspace(0, 12, 200)])
    w = -g.confidence(torch.as_tensor(x), 0, 0.5).log().numpy()
    np.testing.assert_allclose(w, lambertw(x).real, rtol=1e-10, atol=2e-8)
    assert (g.confidence(torch.tensor([-1 / math.e, -0.5, -9], dtype=torch.float64), 0, 0.5) == math.e).all()


def test_confidence_minimises_eq_7_locally():
    """For s up to e, where the confidence lives; beyond, Eq 7 falls without end where l < tau."""
    ce = torch.linspace(0, 30, 61, dtype=torch.float64)
    s = torch.logspace(-5, 1, 4000, dtype=torch.float64)[:, None]
    s = s[s[:, 0] <= math.e]
    for tau, lam in ((10, 0.5), (math.log(10), 0.5), (5, 2.0)):
        grid = (ce - tau) * s + lam * s.log() ** 2
        unclamped = (ce - tau) / lam > -2 / math.e
        assert (g.loss_of(small(lam=lam), tau, ce) <= grid.min(0).values + 1e-12)[unclamped].all()
        assert (g.confidence(ce, tau, lam) == math.e)[~unclamped].all()
    assert (9 - 10) * 1e6 + 0.5 * math.log(1e6) ** 2 < -9e5


@pytest.mark.parametrize("tau, lam", [(10, 0.5), (math.log(10), 0.5), (math.log(10), 1e9)])
def test_gradient_is_s_times_that_of_cross_entropy(tau, lam):
    torch.manual_seed(0)
    logits, y = 1.5 * torch.randn(50, 10, dtype=torch.float64), torch.randint(10, (50,))
    logits.requires_grad_()
    (plain,) = torch.autograd.grad(F.cross_entropy(logits, y, reduction="sum"), logits)
    ce = F.cross_entropy(logits, y, reduction="none")
    assert not g.confidence(ce, tau, lam).requires_grad
    (curriculum,) = torch.autograd.grad(g.loss_of(small(lam=lam), tau, ce).sum(), logits)
    torch.testing.assert_close(curriculum, s_star(ce, tau, lam)[:, None] * plain)
    if tau == 10:
        torch.testing.assert_close(curriculum, math.e * plain, rtol=1e-14, atol=0)  # degenerate: e times the learning rate
    elif lam == 1e9:
        torch.testing.assert_close(curriculum, plain, rtol=1e-7, atol=1e-9)


# -------------------------------------------------------------------------------- the pool, freezing, phases


def check(draws, trained=None, t=0, frozen=(), phase=0, begun=0, **flags):
    """The columns of one check of `draws`, and the state after it; all clients are fresh unless `trained` names them."""
    config = small(**{"clients": len(draws), "clients_per_round": len(draws), "rounds": 10, "thresholds": "0.8,0.2"} | flags)
    state = {"phase": phase, "begun": begun, "base": {"frozen": {k: torch.zeros(1) for k in frozen}}}
    state["pool"] = np.sort(np.concatenate(list(draws.values()))).tolist()
    fresh = {k: torch.ones(1) for k in (draws if trained is None else trained)}
    return g.synchronise(config, state, fresh, draws, t), state


def test_beta_T_is_numpys_inverted_cdf_and_counts_add_up():
    rng = np.random.default_rng(0)
    for K in (1, 3, 20):
        draws = {k: rng.normal(size=320) for k in range(K)}
        pool = np.concatenate(list(draws.values()))
        for T in (*rng.uniform(0.01, 0.99, 30), 0.8, 0.6, 0.2, 0.9, 0.3):
            columns, _ = check(draws, thresholds=str(T))
            assert columns["beta_T"] == np.quantile(pool, T, method="inverted_cdf")
            below = np.array([float(share) * 320 for share in columns["fractions"].split()]).round()
            assert abs(below.sum() - math.ceil(T * 320 * K)) <= 0.5 + K / 4  # printed to three digits
            assert [(draws[k] <= columns["beta_T"]).sum() for k in draws] == pytest.approx(below, abs=0.2)


def test_beta_T_where_T_times_N_is_no_float():
    assert math.ceil(0.07 * 6400) == 449  # the trap: it is 448
    draws = {k: np.arange(1, 321) + 320 * k for k in range(20)}
    assert check(draws, thresholds="0.07")[0]["beta_T"] == 448


@pytest.mark.parametrize("v", [0.7, 0.55, 0.6, 0.1])
def test_freezing_is_strict_at_exactly_v(v):
    """320 v draws of one client are the least of all: it freezes when T takes one more, not when it takes just these."""
    draws = {0: np.arange(1, 321), 1: np.arange(321, 641)}
    for extra, froze in ((0, 0), (1, 1)):
        columns, _ = check(draws, thresholds=str((round(320 * v) + extra) / 640), v=v)
        assert (columns["beta_T"], columns["froze"]) == (round(320 * v) + extra, froze)


def test_nothing_passes_at_v_1():
    assert check({0: np.zeros(320), 1: np.zeros(320)}, v=1.0)[0]["froze"] == 0


@pytest.mark.parametrize("T, v, most", [(0.3, 0.7, 8), (0.6, 0.7, 17), (0.2, 0.7, 5), (0.8, 0.7, 20)])
def test_pigeonhole_bounds_who_can_pass_one_check(T, v, most):
    """Brute force: m clients hold just enough of the lowest scores each, the others none, for every m."""
    need, counts = 225, []
    for m in range(1, 21):
        low, high = iter(np.linspace(0, 1, m * need)), iter(np.linspace(2, 3, 20 * 320))
        draws = {k: np.array([next(low) if k < m and i < need else next(high) for i in range(320)]) for k in range(20)}
        counts.append(check(draws, thresholds=str(T), v=v)[0]["froze"])
    assert max(counts) == most


def test_hand_made_mixtures_freeze_only_fresh_participants_below_beta():
    points = {k: [[1.0], [float(k)], [1e-20]] for k in range(4)}  # scores 0, 1, 2, 3
    draws = g.pooled_draws(points, common.Streams(1), 0)
    columns, _ = check(draws, trained=[1, 2], thresholds="0.3,0.2")
    assert abs(columns["beta_T"] - 1) < 1e-6  # element 384 of 1280: all draws of client 0 and 64 of client 1
    assert columns["frozen"] == 0 and columns["fractions"] == "1.000 0.200 0.000 0.000"
    columns, state = check(draws, trained=[0, 2, 3], thresholds="0.3,0.2", t=1)
    assert [*state["base"]["frozen"]] == [0] and columns["froze"] == 1 and columns["advance"] == ""
    assert state["base"]["frozen"][0] == 1  # with the weights that it has just trained


def test_natural_advance_unfreezes_everyone_and_quorum_lowers_the_bar():
    draws = {k: np.full(320, float(k >= 3)) for k in range(4)}
    columns, state = check(draws, thresholds="0.5,0.2")
    assert columns["advance"] == "" and [*state["base"]["frozen"]] == [0, 1, 2] and state["phase"] == 0
    columns, _ = check(draws, t=3, thresholds="0.5,0.2", phase_quorum=0.75)
    assert columns["advance"] == "natural" and columns["frozen"] == 3
    _, state = check({k: np.full(320, 0.0) for k in range(4)}, t=3)
    assert (state["phase"], state["begun"], state["base"]["frozen"]) == (1, 4, {})


def test_after_the_last_phase_nobody_freezes():
    columns, state = check({0: np.zeros(320)}, phase=3, t=9, thresholds="0.8,0.6,0.2")
    assert state["base"]["frozen"] == {} and columns == {"phase": 4, "frozen": 0, "froze": 0}


def test_v_1_forces_every_advance_and_the_run_ends(tmp_path):
    _, rows = trained(tmp_path, rounds=4, v=1.0, thresholds="0.8,0.2", local_steps=1)
    assert [row.get("advance", "") for row in rows] == ["", "forced", "", "forced"]
    assert [row["phase"] for row in rows] == [1, 1, 2, 2] and sum(row["froze"] for row in rows) == 0


def test_participants_are_the_unfrozen_in_the_order_of_all_methods():
    fl, _ = begun(clients=20, clients_per_round=10)
    for t in range(5):
        order = fl.streams("select", t).permutation(20)
        assert g.participants(fl, {}, t).tolist() == sorted(order[:10]) == fl.select(t, 10).tolist()
        frozen = [*range(0, 20, 2), 1, 3, 5]
        assert g.participants(fl, dict.fromkeys(frozen), t).tolist() == [7, 9, 11, 13, 15, 17, 19]  # min(10, 7)
        frozen = [0, 4, 9]
        assert g.participants(fl, dict.fromkeys(frozen), t).tolist() == sorted([k for k in order if k not in frozen][:10])


@pytest.mark.parametrize("method", ["fedcl", "fedcl-fresh"])
def test_frozen_weights_stay_and_enter_the_average_or_not(tmp_path, monkeypatch, method):
    """Eq 21 by a loop over clients, in a real run in which clients freeze by rule; --average fresh leaves M_f out."""
    seen, aggregate, averaged = [], common.Federation.aggregate, 0

    def recorded(fl, state, clients, update, weights=None):
        before = {k: omega_k.clone() for k, omega_k in state["base"]["frozen"].items()}
        aggregate(fl, state, clients, update, weights)
        seen.append((before, clients, update.weights.clone(), state["weights"].clone()))

    monkeypatch.setattr(common.Federation, "aggregate", recorded)
    _, rows = trained(tmp_path, method, rounds=8, local_steps=4)
    assert sum(row["froze"] for row in rows) >= 1
    own = {}
    for frozen, clients, trained_, omega in seen:
        assert not {*clients} & {*frozen} and all(torch.equal(omega_k, own[k]) for k, omega_k in frozen.items())
        own |= dict(zip(clients.tolist(), trained_, strict=True))
        group = [*(frozen if method == "fedcl" else []), *clients.tolist()]
        averaged += bool(frozen)
        expected = sum(own[k].double() for k in group) / len(group)
        torch.testing.assert_close(omega.double(), expected, rtol=1e-5, atol=1e-7)
    assert averaged >= 1


# ------------------------------------------------------------------------------------------- mixtures and quantiles


def test_mixture_is_the_scores_own():
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


def upload(fl, state, clients, weights, t=0):
    """`g.upload` of clients that have trained on all their samples."""
    return g.upload(fl, state, np.array(clients), weights, {k: fl.shards[k][None] for k in clients}, t)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_finite_stop_the_run(monkeypatch, bad):
    fl, state = begun("fedcl-logc")
    ce = [(np.ones(40), None), (np.array([*np.ones(39), bad]), None)]
    monkeypatch.setattr(common, "score", lambda *_: ce)
    with pytest.raises(common.NonFiniteError, match="round 3: .*client 5 .*smaller --lr"):
        upload(fl, state, [2, 5], state["weights"].expand(2, -1), t=2)
    assert 5 not in state["scores"]


def test_server_draws_follow_the_mixture_and_change_every_round():
    parameters = [[0.5, 0.3, 0.2], [-6.0, 0.0, 4.0], [0.04, 0.25, 1.0]]
    rounds = [g.pooled_draws({7: parameters}, common.Streams(1), t)[7] for t in range(100)]
    assert all(len(each) == 320 for each in rounds) and not np.array_equal(rounds[0], rounds[1])
    np.testing.assert_array_equal(rounds[3], g.pooled_draws({2: parameters, 7: parameters}, common.Streams(1), 3)[7])
    x = np.concatenate(rounds)
    assert abs(x.mean() - (-3 + 0.8)) < 0.05
    assert abs(x.var() - (0.5 * 36.04 + 0.3 * 0.25 + 0.2 * 17 - 2.2**2)) < 0.5


@pytest.mark.parametrize("how", ["gmm", "quantiles"])
def test_upload_tells_of_scores_at_tau_log_c_not_of_losses(how):
    """At tau = 10 scores are an affine map of losses, so a mixture of losses would pass: compare at log C."""
    fl, state = begun("fedcl-logc", upload=how)
    theta = 3 * state["weights"]  # losses on both sides of the clamp
    assert upload(fl, state, [2], theta[None]) == 10 + (9 if how == "gmm" else 17)
    loss, _ = common.score(fl.model, theta, fl.data, [fl.shards[2]])[0]
    scores = (loss - math.log(10)) * s_star(torch.as_tensor(loss), math.log(10), 0.5).numpy()
    assert abs(scores.mean() - loss.mean()) > 0.1
    if how == "gmm":
        alpha, mu, variance = map(np.array, state["scores"][2])
        assert abs(alpha @ mu - scores.mean()) < 1e-6 and abs(alpha @ (variance + mu**2) - (scores**2).mean()) < 1e-4
        return
    [quantiles] = state["scores"][2]
    assert len(quantiles) == 17 and quantiles[0] == scores.min() and quantiles[8] == np.median(scores)
    draws = g.pooled_draws(state["scores"], fl.streams, 0)[2]
    assert scores.min() <= draws.min() and draws.max() <= scores.max()  # no mass where no score can be
    wide = np.concatenate([g.pooled_draws(state["scores"], fl.streams, t)[2] for t in range(100)])
    np.testing.assert_allclose(np.quantile(wide, np.arange(17) / 16), quantiles, atol=0.25)


def test_only_parameters_are_uploaded(tmp_path):
    state, _ = trained(tmp_path, rounds=1)
    assert all(len(m) == 3 and max(map(len, m)) <= 3 for m in state["scores"].values())
    assert len(state["pool"]) == 320 * len(state["scores"])


def test_labels_are_counted_over_the_rounds_batches(tmp_path):
    """c_k counts what was trained on (line 10), not the shard."""
    state, _ = trained(tmp_path, "fedgen", rounds=1, local_steps=2, batch_size=8)
    assert {sum(count) for count in state["counts"].values()} == {16} and len(state["counts"]) == 4


def test_the_running_mean_moves_tau(tmp_path):
    _, rows = trained(tmp_path, tau=-1.0)
    taus = [row["tau"] for row in rows]
    assert taus[0] == math.log(10) and len({*taus}) == 3 and taus[2] < taus[1] < taus[0]


# -------------------------------------------------------------------------------------------------- the generator


def test_parameter_counts():
    for method, count in (("fedcl", 20_000), ("fedgen", 19_744)):
        assert sum(p.numel() for p in g.generator(begun(method)[0], {}).parameters()) == count
    blank, label = torch.zeros(1, 28, 28, 1, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    for classes, count in ((10, 26_434), (26, 26_962)):
        data = common.Data(blank, label, blank, label, classes, torch.zeros(1), torch.ones(1))
        assert common.build_model("fedgen-cnn", data).trainable == count


def test_generators_of_all_methods_begin_equal_but_for_the_difficulty():
    cl, gen = (g.generator(begun(method)[0], {}).state_dict() for method in ("fedcl", "fedgen"))
    assert torch.equal(cl.pop("0.weight")[:, :42], gen.pop("0.weight"))
    assert all(torch.equal(cl[name], gen[name]) for name in gen)


def test_teaching_is_adam_on_eq_18_with_the_ensemble_of_heads(monkeypatch):
    """Two rounds against plain layers, one unbroken Adam and the mean of each user's logits; no classifier weight moves."""
    monkeypatch.setattr(g, "TEACHING_STEPS", 50)
    fl, state = begun("fedcl-logc")
    torch.manual_seed(1)
    users = state["weights"] + 0.3 * torch.randn(3, len(state["weights"]), dtype=torch.float64)  # A_t
    state["weights"] = users.mean(0)
    reference, first = g.generator(fl, {}), g.generator(fl, {})[3].weight.clone()
    adam = torch.optim.Adam(reference.parameters(), lr=1e-4, weight_decay=1e-2)
    before = state["weights"].clone()
    for t in range(2):
        adam.param_groups[0]["lr"] = 1e-4 * 0.98**t
        for y, x in zip(*g.conditions(fl, state, (50, 128), "teaching", t), strict=True):
            z = reference(x)
            logits = [fl.model.bind(user[None]).head(z[None])[0] for user in users]
            ce = F.nll_loss(torch.log(torch.softmax(sum(logits) / 3, 1)), y, reduction="none")
            far = ((z[:, None] - z).abs().mean(2) * (x[:, None, :32] - x[:, :32]).square().mean(2)).mean()
            s = s_star(ce, math.log(10), 0.5)
            adam.zero_grad()
            (((ce - math.log(10)) * s + 0.5 * s.log() ** 2).mean() + torch.exp(-far)).backward()
            adam.step()
        g.teach(fl, state, fl.model.bind(state["weights"][None]).head, t)
        state = copy.deepcopy(state)  # what a checkpoint would carry
    assert torch.equal(before, state["weights"])
    for (name, value), expected in zip(state["generator"].items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-7, msg=name)
    assert (state["generator"]["3.weight"] - first).abs().max() > 1e-3


def test_conditions_follow_p_y_and_the_standardised_pool():
    fl, state = begun()
    y, x = g.conditions(fl, state, (200, 100), "synthetic", 0, 3)
    p = np.sum(list(state["counts"].values()), 0) / np.sum(list(state["counts"].values()))
    np.testing.assert_allclose(np.bincount(y.flatten(), minlength=10) / 20_000, p, atol=0.015)
    pool, eps, s = np.array(state["pool"]), x[..., :32], x[..., 42]
    assert torch.equal(x[..., 32:42].argmax(-1), y) and torch.equal(x[..., 32:42].sum(-1), torch.ones(200, 100).double())
    allowed = (pool - pool.mean()) / pool.std()
    assert np.isin(s.numpy().round(9), allowed.round(9)).all() and len(np.unique(s)) == 100
    assert abs(s.mean()) < 0.03 and abs(s.std() - 1) < 0.03 and abs(eps.std() - 1) < 0.01
    for other in (begun("fedgen")[0], begun(difficulty=False)[0]):  # the methods share labels and noise
        again = g.conditions(other, state, (200, 100), "synthetic", 0, 3)
        assert torch.equal(again[0], y) and torch.equal(again[1], x[..., :42])


def test_rank_correlation_of_a_generator_that_obeys(monkeypatch):
    fl, state = begun()
    state["counts"] = {0: [1, *[0] * 9]}  # every label is 0

    class Obedient(nn.Module):
        def forward(self, x):
            return x[:, -1:]

    monkeypatch.setattr(g, "generator", lambda fl, saved: Obedient())
    for sign in (1, -1):

        def head(z, sign=sign):
            return torch.cat([-sign * z, torch.zeros(*z.shape[:2], 9)], 2)

        assert abs(g.rank_correlation(fl, state, head, 0) - sign) < 1e-12
    assert g.rank_correlation(fl, state, lambda z: torch.zeros(*z.shape[:2], 10), 0) == 0.0


def test_generated_features_come_from_the_generator_in_eval_mode():
    fl, state = begun()
    clients = np.array([0, 3])
    state["scores"] = {0: [[0.5, 0.5], [1.0, 2.0], [1.0, 1.0]], 3: [[1.0], [0.0], [1.0]]}
    assert g.download(fl, state, clients, 0) == (None, 0)
    g.teach(fl, state, fl.model.bind(state["weights"][None]).head, 0)  # BatchNorm's statistics are now its own
    got, numbers = g.download(fl, state, clients, 1)
    net = g.generator(fl, state["generator"]).eval()
    for k, z, labels in zip(clients, got["z"], got["y'"], strict=True):
        y, x = g.conditions(fl, state, (3, 32), "synthetic", 1, k)
        assert np.array_equal(labels, y)
        np.testing.assert_allclose(z, torch.stack([net(each) for each in x]).detach(), rtol=1e-9, atol=1e-12)
    assert numbers == 2 * (20_000 + 2 * 256 + 1 + 10 + 9)  # theta with BatchNorm's statistics and counter, p(y), two mixtures


def one_step(fl, state, clients, synthetic):
    batches = [g.schedule(fl.config, fl.shards[k], np.random.default_rng(k)) for k in clients]
    how = {"loss": lambda step: g.objective(fl.config, state["tau"], step), "per_step": synthetic}
    return common.train(fl.model, state["weights"], fl.data, batches, lr=0.1, **how).weights


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_synthetic_term_moves_the_head_and_nothing_else(weight):
    fl, state = begun(local_steps=1, synthetic=weight)
    clients = np.array([0, 3])
    g.teach(fl, state, fl.model.bind(state["weights"][None]).head, 0)
    extra, _ = g.download(fl, state, clients, 1)
    plain, mixed = one_step(fl, state, clients, None), one_step(fl, state, clients, extra)
    differs = (plain != mixed).any(0)
    assert differs[26_104:26_434].all() and not differs[:26_104].any() and not differs[26_434:].any()  # 32 x 10 + 10 head
    z, y, head = torch.as_tensor(extra["z"][1][0]), torch.as_tensor(extra["y'"][1][0]), plain_net(state["weights"])[-1]
    F.cross_entropy(head(z), y).backward()  # by hand: - lr weight e (mean gradient of cross-entropy), client 3
    gradient = torch.cat([head.weight.grad.flatten(), head.bias.grad])
    torch.testing.assert_close((mixed - plain)[1, 26_104:26_434], -0.1 * weight * math.e * gradient)


# ------------------------------------------------------------------------------------- identities, bit for bit


def test_fedcl_without_its_parts_is_fedgen(tmp_path):
    cl, rows_cl = trained(tmp_path, "fedcl", loss="ce", difficulty=False, freeze=False)
    gen, rows_gen = trained(tmp_path, "fedgen")
    assert torch.equal(cl["weights"], gen["weights"])
    assert all(torch.equal(value, cl["generator"][name]) for name, value in gen["generator"].items())
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
    fedgen = trained(tmp_path, "fedgen", dtype="float64")[0]["weights"]
    torch.testing.assert_close(trained(tmp_path, "fedcl-e", **same)[0]["weights"], fedgen, rtol=1e-9, atol=1e-12)
    for method, flags in (
        ("fedcl-logc", {"tau": 0.0}),
        ("fedcl-fresh", {"average": "fresh"}),
        ("fedcl-nofreeze", {"freeze": False}),
    ):
        assert torch.equal(trained(tmp_path, method)[0]["weights"], trained(tmp_path, "fedcl", **flags)[0]["weights"])


def test_without_freezing_the_confidence_is_a_factor_e_of_the_learning_rate(tmp_path):
    """At tau = 10 fedcl-nofreeze is FedGen at e lr until the generators, that alone differ, have learnt."""
    flags = {"dtype": "float64", "rounds": 1}
    nofreeze, fedgen = (trained(tmp_path, method, **flags)[0]["weights"] for method in ("fedcl-nofreeze", "fedgen-e"))
    torch.testing.assert_close(nofreeze, fedgen, rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------------------------------------------- the baselines


NOFREEZE = {"average", "thresholds", "v", "phase_quorum"}


@pytest.mark.parametrize(
    "flags, unread",
    [
        ({}, set()),
        ({"freeze": False}, NOFREEZE),
        ({"synthetic": 0.0}, {"difficulty", "generator_hidden"}),
        ({"loss": "ce"}, set()),  # scores, which tau and lambda make, decide who freezes
        ({"loss": "ce", "freeze": False, "difficulty": False}, NOFREEZE | {"tau", "lam", "upload"}),
        ({"loss": "ce", "freeze": False, "difficulty": False, "tau": -1.0}, NOFREEZE),  # the running mean is a column
        ({"freeze": False, "synthetic": 0.0}, NOFREEZE | {"difficulty", "generator_hidden", "upload"}),
    ],
)
def test_unread_flags(flags, unread):
    assert g.unread(g.Config(method="fedcl", **flags)) == {"mu", "distill"} | unread
    assert g.unread(g.Config(method="fedcl-fresh", **flags)) == {"mu", "distill", "average"} | unread
    fixed = {"mu", "distill", "freeze", "loss", "difficulty", "tau", "lam", "upload"} | NOFREEZE
    assert g.unread(g.Config(method="fedgen", **flags)) - {"generator_hidden"} == fixed
    assert g.unread(g.Config(method="feddistill", **flags)) == fixed - {"distill"} | {"synthetic", "generator_hidden"}


def test_phases_that_are_switched_off_are_swept_once(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "draw", lambda *_, **__: None)
    flags = "--method fedcl --no-freeze --v 0.5 0.7 --thresholds 0.8,0.2 0.5 --phase-quorum 0.6 1 --rounds 2 --local-steps 1"
    g.main(
        [
            *flags.split(),
            "--clients",
            "4",
            "--clients-per-round",
            "2",
            "--trials",
            "1",
            "--threads",
            "1",
            "--out",
            str(tmp_path),
        ]
    )
    df = pd.read_csv(tmp_path / "metrics.csv")
    assert df.setting.nunique() == 8 and len([*(tmp_path / "checkpoints").iterdir()]) == 1


def test_scores_that_nobody_reads_are_not_uploaded(tmp_path):
    """Without freezing and generator FedCL with plain cross-entropy is FedAvg, its megabytes too."""
    fedcl = trained(tmp_path, "fedcl", freeze=False, synthetic=0.0, loss="ce")
    fedavg = trained(tmp_path, "fedavg")
    assert torch.equal(fedcl[0]["weights"], fedavg[0]["weights"]) and fedcl[0]["scores"] == {}
    assert [row["sent_mb"] for row in fedcl[1]] == [row["sent_mb"] for row in fedavg[1]]


def test_feddistill_objective_and_its_gradient_in_closed_form():
    """CE + c KL(softmax(Q[y]) || p), and d / d logits = p - onehot(y) + c (p - softmax(Q[y])); label 4 has no shared logits."""
    fl, state = begun("feddistill", distill=0.3)
    torch.manual_seed(0)
    Q, logits, y = torch.randn(10, 10).double(), torch.randn(2, 20, 10).double(), torch.arange(40).view(2, 20) % 10
    Q[4], weight = math.nan, torch.full((2, 20), 1 / 20, dtype=torch.float64)
    step = SimpleNamespace(logits=logits.requires_grad_(), y=y, weight=weight, extra={})
    assert "penalty" not in fl.base.client(state["weights"], fl.everyone)
    fl.base.memory["logits"] = {0: Q - 1, 3: Q + 1}
    J = g.objective(fl.config, 1.0, step) + fl.base.client(state["weights"], fl.everyone)["penalty"](step)
    p, target = torch.softmax(logits.detach(), -1).numpy(), torch.softmax(Q, -1).numpy()[y]
    c, hot = 0.3 * (y != 4).numpy()[..., None], np.eye(10)[y]
    target = np.where(c > 0, target, p)
    expected = -np.log((p * hot).sum(-1)) + (c * rel_entr(target, p)).sum(-1)
    np.testing.assert_allclose(J.detach(), expected.mean(1), rtol=1e-10)
    (grad,) = torch.autograd.grad(J.sum(), logits)
    np.testing.assert_allclose(grad, (p - hot + c * (p - target)) / 20, rtol=1e-9, atol=1e-12)


def test_feddistill_shares_logits_and_no_weights(tmp_path):
    state, rows = trained(tmp_path, "feddistill", rounds=4)
    own = [*state["base"]["own"].values()]
    assert all(not torch.equal(a, b) for i, a in enumerate(own) for b in own[:i])
    assert [row["sent_mb"] for row in rows] == pytest.approx([4 * 100 * 4e-6 * t for t in range(1, 5)])
    assert [row["received_mb"] for row in rows] == pytest.approx([4 * 100 * 4e-6 * t for t in range(4)])


def test_shared_logits_are_means_per_label_of_those_who_hold_it():
    fl, state = begun("feddistill")
    clients, stack = np.array([1, 6]), state["weights"] * torch.tensor([[1.0], [2.0]])
    fl.base.share(fl, clients, stack)
    for k, theta in zip(clients, stack, strict=True):
        net, y, shared = plain_net(theta).eval(), fl.data.y_train.numpy(), fl.base.memory["logits"][k]
        for c in range(10):
            own = [i for i in fl.shards[k] if y[i] == c]
            if own:
                x = fl.data.x_train[own].permute(0, 3, 1, 2).double() / 127.5 - 1
                torch.testing.assert_close(shared[c], net(x).mean(0))
            else:
                assert shared[c].isnan().all()


def test_fedensemble_tests_the_sum_of_all_users_logits():
    """Four users trained this round, the other four hold the global model that was sent to all."""
    fl, state = begun("fedensemble")
    torch.manual_seed(0)
    omega = state["weights"]
    local = omega + 0.2 * torch.randn(4, len(omega), dtype=torch.float64)
    fl.aggregate(state, np.arange(4), common.Update(local, *[np.ones(4)] * 5))
    x = fl.data.x_test.permute(0, 3, 1, 2).double() / 127.5 - 1
    logits = sum(plain_net(theta).eval()(x) for theta in [*local, *[omega] * 4])
    assert abs(g.evaluate(fl, state)["accuracy_full"] - 100 * (logits.argmax(1) == fl.data.y_test).double().mean()) < 1e-9


@pytest.mark.parametrize("method", ["fedavg", "feddistill"])
def test_both_protocols_against_loops_over_users(method):
    fl, state = begun(method, alpha=0.05)
    torch.manual_seed(0)
    own = state["weights"] * (1 + 0.3 * torch.randn(8, len(state["weights"]))).double()
    state["base"]["own"] = dict(enumerate(own))
    got, y, right, asked, full = g.evaluate(fl, state), fl.data.y_test.numpy(), 0, 0, []
    x = fl.data.x_test.permute(0, 3, 1, 2).double() / 127.5 - 1
    for k, shard in enumerate(fl.shards):
        predicted = plain_net(own[k] if method == "feddistill" else state["weights"]).eval()(x).argmax(1).numpy()
        held = np.isin(y, np.unique(fl.data.y_train.numpy()[shard]))
        right, asked = right + (predicted == y)[held].sum(), asked + held.sum()
        full.append(100 * (predicted == y).mean())
    assert asked < 8 * len(y)
    assert abs(got["accuracy_paper"] - 100 * right / asked) < 1e-9 and abs(got["accuracy_full"] - np.mean(full)) < 1e-9
    assert got["accuracy"] == got["accuracy_full"]
    fl.config.eval = "paper"
    assert g.evaluate(fl, state)["accuracy"] == got["accuracy_paper"]


# --------------------------------------------------------------------------------------------- data, run, command line


def test_schedule_passes_over_the_shard_in_full_batches():
    config, shard = small(local_steps=7), np.arange(100, 175)  # 75 samples: two batches of 32 a pass
    batches = g.schedule(config, shard, np.random.default_rng(0))
    assert batches.shape == (7, 32) and np.isin(batches, shard).all()
    for i in range(0, 6, 2):
        assert len(np.unique(batches[i : i + 2])) == 64
    assert not np.array_equal(np.sort(batches[:2], None), np.sort(batches[2:4], None))
    few = g.schedule(small(), np.arange(5), np.random.default_rng(0))
    assert (np.sort(few[:, :5]) == np.arange(5)).all() and (few[:, 5:] == -1).all()


def test_users_hold_their_share_and_images_lie_in_minus_1_to_1():
    for share, expected in ((0.0, 1437), (0.5, 718)):  # 0: all of digits
        fl, state = begun("fedavg", data_share=share)
        everything = np.concatenate(fl.shards)
        assert len(everything) == len(np.unique(everything)) == expected == len(fl.data.y_train)
        assert min(map(len, fl.shards)) >= 32 and np.array(state["labels"]).sum(1).tolist() == fl.sizes.tolist()
    x = fl.data.images("train", torch.float32)
    assert x.min() == -1 and x.max() == 1


def test_half_of_other_data_is_shared():
    data = dataclasses.replace(common.load_data("digits"), owner=np.arange(1437) % 9)
    fl, _ = g.begin(small(dataset="mnist", partition="natural", min_size=2), data, common.Streams(1))
    kept = np.sort(common.Streams(1)("share").permutation(1437)[:718])
    assert len(fl.data.y_train) == 718 and torch.equal(fl.data.x_train, data.x_train[kept])
    assert all(len({kept[i] % 9 for i in shard}) == 1 for shard in fl.shards)


@pytest.mark.parametrize("method", ["fedcl", "fedensemble", "feddistill"])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path, method):
    """Everything that must survive is in the state: generator, Adam, frozen weights, mixtures, logits, own models."""
    whole, rows = trained(tmp_path, method, rounds=5, local_steps=4)

    class Killed(experiment.Run):
        def record(self, t, *args, **columns):
            super().record(t, *args, **columns)
            if t == 3:
                raise KeyboardInterrupt

    config = small(method, rounds=5, local_steps=4, resume=True)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(KeyboardInterrupt):
        g.federate(config, common.load_data("digits"), Killed(config, method, "", 0, tmp_path))
    run = experiment.Run(config, method, "", 0, tmp_path)
    g.federate(config, common.load_data("digits"), run)
    run.save()
    state = run.load()["state"]
    assert torch.equal(state["weights"], whole["weights"]) and state["scores"] == whole["scores"]
    assert state["pool"] == whole["pool"] and state["base"].keys() == whole["base"].keys()
    strip = [[{k: v for k, v in row.items() if k != "seconds"} for row in each] for each in (rows, run.rows)]
    assert strip[0] == strip[1]


def test_no_share_of_the_draws_is_ever_all_of_them():
    """At T = 1e-13 element ceil(T N) of the pool is its first, not its last: nobody has 99 % of the draws below it."""
    state = {"phase": 0, "begun": 0, "base": {"frozen": {}}, "pool": sorted(np.linspace(0, 1, 40).tolist())}
    draws = {k: np.full(g.DRAWS, 0.5) for k in range(2)}
    columns = g.synchronise(small("fedcl", thresholds="1e-13", v=0.99), state, {0: torch.ones(3)}, draws, 0)
    assert columns["beta_T"] == 0 and columns["froze"] == 0


def test_results_count_rounds_and_updates_to_fedavgs_final_accuracy():
    def rows(method, trial, accuracies):
        return [
            {"setting": "", "method": method, "trial": trial, "round": t, "accuracy": a, "uploads": 10 * t, "accuracy_full": a}
            | {"accuracy_paper": a + 1, "seconds": 0, "received_mb": 2.0 * t, "sent_mb": 0.5 * t}
            | (
                {"phase": 1, "froze": 1, "advance": "forced" if t == 3 else "", "rank_correlation": 0.1}
                if method == "fedcl"
                else {}
            )
            for t, a in enumerate(accuracies, 1)
        ]

    both = [rows("fedavg", 0, [50, 70, 60, 65, 65, 64]), rows("fedavg", 1, [50, 60, 70, 80, 85, 90])]
    both += [rows("fedcl", 0, [10, 64, 20, 20, 20, 30]), rows("fedcl", 1, [10, 20, 30, 40, 50, 60])]
    table = g.results(pd.DataFrame(sum(both, []))).loc[""]
    assert [*table.index.get_level_values(0)] == ["fedavg", "fedavg", "fedcl", "fedcl"]
    assert table.loc["fedavg"][["rounds", "updates"]].values.tolist() == [[2, 20], [6, 60]]
    fedcl = table.loc["fedcl"]
    assert fedcl.loc[0, ["rounds", "updates"]].tolist() == [2, 20] and fedcl.loc[1, ["rounds", "updates"]].isna().all()
    assert fedcl.full_final.tolist() == [30, 60] and fedcl.paper_top5.tolist() == [31.8, 41]
    assert fedcl.froze.tolist() == [6, 6] and fedcl.forced.tolist() == [1, 1] and fedcl.natural.tolist() == [0, 0]
    assert np.allclose(fedcl.rank_correlation, 0.1) and table.loc["fedavg"].froze.isna().all()
    assert (table.megabytes == 15).all()
    alone = g.results(pd.DataFrame(both[2]).drop(columns=["phase", "froze", "advance", "rank_correlation"]))
    assert alone.rounds.isna().all() and "froze" not in alone


@pytest.mark.parametrize("flags, word", [
    ("--thresholds 0.2,0.6", "fall"), ("--thresholds 1.5", "--thresholds"), ("--thresholds a,b", "--thresholds"),
    ("--thresholds 0.5,nan", "--thresholds"), ("--thresholds 0.5,0.5", "fall"),
    ("--epochs 3", "--epochs, --base, --server-lr: have no meaning here"), ("--server-lr 1", "have no meaning here"),
    ("--base fedavg fedadam", "have no meaning here; --local-steps and --method have"),
    ("--dataset text.npz --model lstm", "reads images"), ("--tau 1e300", "--tau"),
    ("--data-share 0.1 1", "--clients 20: 144 training samples are fewer than --min-size 32 for each"),
    (f"--model {Path(__file__)}:Flat", "fedcl's generator wants a net with features and a head"),
    (f"--method fedavg fedcl --model {Path(__file__)}:Flat", "fedcl's generator wants a net with features and a head"),
    ("--method fedsgd", "fedsgd"), ("--lam 0", "--lam"), ("--v 1.1", "--v"), ("--tau nan", "--tau"), ("--tau -0.5", "--tau"),
    ("--phase-quorum 0", "quorum"),
])  # fmt: skip
def test_wrong_flags_give_one_line_and_status_2(flags, word, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = np.zeros((2000, 80), dtype=np.int64), np.arange(2000) % 80
    np.savez("text.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.raises(SystemExit) as stop:
        g.main([*flags.split(), "--out", "r"])
    error = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and word in error and len(error.splitlines()) == 1 and not Path("r").exists()


class Flat(nn.Sequential):
    """Anyone's net: nothing in it is called features or head."""

    def __init__(self, channels, side, classes):
        super().__init__(nn.Flatten(), nn.Linear(channels * side * side, classes))


def test_an_own_net_trains_where_no_generator_is_asked_for(tmp_path):
    _, rows = trained(tmp_path, "feddistill", model=f"{Path(__file__)}:Flat", rounds=1)
    assert rows[0]["accuracy"] > 0


def test_the_partition_shown_is_that_of_the_share(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "draw", lambda *_, **__: None)
    g.main(["--show-partition", "--threads", "1", "--data-share", "1", "0.6", "--out", str(tmp_path)])
    table = pd.read_csv(tmp_path / "partition.csv")
    assert table.groupby("setting").samples.sum().to_dict() == {"data_share=0.6": 862, "data_share=1.0": 1437}
    fl, _ = g.begin(g.Config(method="fedcl", data_share=0.6), common.load_data("digits"), common.Streams(202207))
    shown = table[table.setting == "data_share=0.6"].groupby("client").samples.sum()
    assert shown.tolist() == fl.sizes.tolist()


@pytest.mark.parametrize("name", g.PRESETS)
def test_presets_are_valid(name):
    configs, _ = experiment.parse(g.Config, g.PRESETS, g.__doc__, ["--preset", name])
    assert {"fedcl", "fedcl-fresh", "fedcl-nofreeze", "fedgen-e"} <= {config.method for config in configs}


def test_presets_say_what_the_paper_ran():
    def values(name, flag):
        return list(
            dict.fromkeys(getattr(c, flag) for c in experiment.parse(g.Config, g.PRESETS, g.__doc__, ["--preset", name])[0])
        )

    for name in g.PRESETS:
        celeba = "celeba" in name
        assert values(name, "rounds") == [100 if celeba else 200] and values(name, "local_steps")[0] == 20
        assert values(name, "dataset") == [
            "celeba" if celeba else "mnist" if name in ("table1", "table2-mnist", "table3") else "emnist"
        ]
    assert values("table1", "thresholds") == ["0.9,0.6,0.3"] and values("table1", "v") == [0.8]
    assert values("table2-mnist", "alpha") == [0.05, 0.1, 1] and values("table3", "alpha") == [0.05, 0.1, 1, 10]
    assert values("table2-emnist", "local_steps") == [20, 40] and values("table2-emnist", "alpha") == [0.05, 0.1, 1, 10]
    assert values("table2-celeba", "clients") == [10, 25] and values("table2-celeba", "clients_per_round") == [5]
    assert values("table2-celeba-10", "clients") == [25] and values("table2-celeba-10", "clients_per_round") == [10]
    assert values("table2-celeba", "generator_hidden") == [128] and values("table2-celeba", "partition") == ["natural"]
    assert values("table4", "phase_quorum") == [0.6, 0.7, 0.8, 0.9] and values("table4", "alpha") == [0.1]
    assert [len(S.split(",")) for S in values("table5", "thresholds")] == [2, 3, 4, 5]
    assert values("table6-lambda", "lam") == [0.2, 0.5, 0.8, 1] and values("table6-tau", "tau") == [5, 10, 15, 20]
    assert values("table6-s", "thresholds") == ["0.8,0.6,0.4,0.2", "0.7,0.5,0.3", "0.8,0.6,0.2", "0.8,0.4"]
    assert values("table6-v", "v") == [0.5, 0.6, 0.7, 0.8]


def test_the_command_line_writes_table_and_figures(tmp_path, capsys, monkeypatch):
    """The figures' artists: Fig 6's counts; where beta_T stands the height of a curve is the share that decides on freezing."""
    import matplotlib.figure

    drawn, save = {}, matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda fig, path, **how: (drawn.update({path.name: fig}), save(fig, path, **how))
    )
    flags = (
        "--method fedcl fedcl-fresh fedavg --clients 6 --clients-per-round 3 --local-steps 1 --rounds 3 --trials 2 --threads 1"
    )
    g.main([*flags.split(), "--lam", "0.4", "0.6", "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert "rank_correlation" in out and "paper_top5" in out
    assert {"metrics.csv", "summary.json", "results.csv", "accuracy.png", "phases.png", "mixtures.png", "partition.png"} <= {
        path.name for path in tmp_path.iterdir()
    }
    table, df = pd.read_csv(tmp_path / "results.csv"), pd.read_csv(tmp_path / "metrics.csv")
    assert len(table) == 12 and {*table.method} == {"fedcl", "fedcl-fresh", "fedavg"}  # fedavg reads no lambda: trained once
    axes = drawn["mixtures.png"].axes
    assert len(axes) == 12  # two methods in two settings, three rounds
    own = df[(df.method == "fedcl") & (df.trial == 0) & (df.setting == "lam=0.4")]
    for axis, (_, row) in zip(axes[:3], own.iterrows(), strict=True):
        lines = {line.get_label(): line for line in axis.get_lines()}
        assert lines["v"].get_ydata()[0] == 0.7 and lines["β$_T$"].get_xdata()[0] == pytest.approx(row.beta_T)
        clients = [line for label, line in lines.items() if label.startswith("_")]
        shares = [(line.get_xdata()[1:] <= row.beta_T + 1e-12).mean() for line in clients]
        assert shares == pytest.approx([float(f) for f in row.fractions.split() if f != "-"], abs=6e-4)
    counts = pd.read_csv(tmp_path / "partition.csv")  # Fig 6
    assert counts.samples.sum() == 1437 and counts.client.nunique() == 6
    panels = [axis for axis in drawn["phases.png"].axes if axis.get_lines()]
    assert len(panels) == 6  # phase, frozen, beta_T in two settings
    mean = own.beta_T.values + df[(df.method == "fedcl") & (df.trial == 1) & (df.setting == "lam=0.4")].beta_T.values
    curves = [line.get_ydata() for axis in panels for line in axis.get_lines()]
    assert any(len(curve) == 3 and np.allclose(curve, mean / 2) for curve in curves)


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
    streams = common.Streams(small().seed)
    kept = {k for t in range(2) for k in np.delete(np.sort(streams("select", t).permutation(8)[:4]), 1)}
    assert torch.isfinite(state["weights"]).all() and all(math.isfinite(row["accuracy"]) for row in rows)
    if method == "fedcl":
        assert {*state["scores"]} == {*state["counts"]} == kept
    elif method == "feddistill+":
        assert {*state["base"]["logits"]} == kept
    else:
        assert len(state["base"]["users"]) == 4


def test_every_third_round_is_tested_and_the_last(tmp_path):
    flags = "--eval-every 3 --rounds 5 --clients 6 --clients-per-round 3 --local-steps 1 --trials 1 --threads 1"
    g.main([*flags.split(), "--method", "fedcl", "fedavg", "--out", str(tmp_path)])
    df = pd.read_csv(tmp_path / "metrics.csv")
    for column in ("accuracy", "loss", "accuracy_full", "accuracy_paper"):
        assert df[column].notna().tolist() == [False, False, True, False, True] * 2
    assert df.train_loss.notna().all() and df.rank_correlation.notna().tolist() == [True] * 5 + [False] * 5


def test_a_running_tau_needs_no_phases(tmp_path):
    """The mean loss that tau follows is uploaded also where nothing else asks for scores."""
    flags = "--method fedcl --tau -1 --no-freeze --no-difficulty --clients 3 --clients-per-round 3 --rounds 2 --trials 1"
    g.main([*flags.split(), "--local-steps", "1", "--threads", "1", "--out", str(tmp_path)])
    tau = pd.read_csv(tmp_path / "metrics.csv").tau
    assert tau[0] == pytest.approx(math.log(10)) and tau[1] != tau[0]


def test_one_client(tmp_path):
    """It holds every label, so both protocols agree; its mean, its ensemble and its own model are one net."""
    flags = "--clients 1 --clients-per-round 1 --rounds 3 --distill 0 --local-steps 1 --trials 1 --threads 1"
    g.main([*flags.split(), "--method", *g.ARMS, "--out", str(tmp_path)])
    df = pd.read_csv(tmp_path / "metrics.csv")
    assert {*df.method} == {*g.ARMS} and (df.accuracy_full == df.accuracy_paper).all()
    of = {method: own.accuracy.tolist() for method, own in df.groupby("method")}
    assert of["fedavg"] == of["fedensemble"] == of["feddistill"] == of["feddistill+"]
    # 256 of its 320 draws lie below beta_T at T = .8, which is more than v; at T = .6 and .2 fewer than v do
    assert df[df.method == "fedcl"].advance.tolist() == ["natural", "forced", "forced"]


def test_a_client_freezes_by_rule_on_mnist(real_data, tmp_path):
    config = g.Config(method="fedcl", dataset="mnist", data_dir=str(real_data), rounds=2, trials=1, threads=1, device="cpu")
    run = run_of(config, tmp_path)
    g.federate(config, common.load_data("mnist", str(real_data)), run)
    assert sum(row["froze"] for row in run.rows) >= 1 and len(run.rows[0]["fractions"].split()) == 20
