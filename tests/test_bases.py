"""bases.py against float64 NumPy, closed forms and loops over ordinary torch layers."""

import pickle

import numpy as np
import ordinary
import pytest
import torch
from ordinary import first_batches, make_config, make_federation
from torch import nn

import bases
import common
import training
from data import Data, epochs_of_batches
from nets import Model
from training import Local

DOUBLE = torch.float64


# ---------------------------------------------------------------------- bases against NumPy


class Point(nn.Module):
    """w (K, n) itself: the net of a quadratic."""

    def __init__(self, n=5):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(n))

    def features(self, x):
        return self.w.unsqueeze(1)

    def head(self, z):
        return z


POINTS = Model(Point, dtype=DOUBLE)
NOTHING = Data(*(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)) * 2, 2)


def quadratic(out):
    """1/2 (w - a)' H (w - a) + b_t' w of each client."""
    away = out.net.w - out.extra["a"]
    curved = torch.einsum("ki,kij,kj->k", away, out.extra["H"], away) / 2
    return curved + (out.net.w * out.extra["b"]).sum(1)


class Problem:
    """M quadratics, who takes part in each round, local steps, sizes and gradient noise."""

    def __init__(self, M=6, rounds=5, per_round=3, n=5, seed=0, steps=None, size=None):
        rng = np.random.default_rng(seed)
        root = rng.normal(size=(M, n, n))
        self.M = M
        self.n = n
        self.H = root @ root.transpose(0, 2, 1) / n + 0.3 * np.eye(n)
        self.a = rng.normal(size=(M, n))
        self.w_0 = rng.normal(size=n)
        self.sizes = rng.integers(5, 50, M) if size is None else np.full(M, size)
        self.steps = rng.integers(1, 7, M) if steps is None else np.full(M, steps)
        self.noise = []
        for _ in range(rounds):
            self.noise.append([0.1 * rng.normal(size=(T, n)) for T in self.steps])
        self.picks = []
        for _ in range(rounds):
            self.picks.append(np.sort(rng.choice(M, per_round, replace=False)))


def run_base(name, problem, lr, momentum=0.0, weight_decay=0.0, mu=-1.0, server_lr=0.0) -> tuple:
    """theta after every round (for solo, all clients') and the memory, by `train` and the base."""
    config = make_config(base=name, mu=mu, server_lr=server_lr, clients=problem.M)
    base = bases.BASES[name](config, POINTS)
    theta = torch.from_numpy(problem.w_0)
    everyone = np.arange(problem.M)
    memory = {}
    path = []
    for clients, noise in zip(problem.picks, problem.noise, strict=True):
        local = Local(
            lr,
            momentum,
            weight_decay,
            loss=quadratic,
            per_client={
                "H": torch.from_numpy(problem.H[clients]),
                "a": torch.from_numpy(problem.a[clients]),
            },
            per_step={"b": [noise[m] for m in clients]},
        )
        local = base.prepare(local, theta, clients, memory)
        theta_0 = base.received(theta, clients, memory)
        batches = [np.zeros((problem.steps[m], 1), int) for m in clients]
        update = training.train(POINTS, theta_0, NOTHING, clients, batches, local)
        p = problem.sizes[clients] / problem.sizes[clients].sum()
        theta = base.aggregate(theta, update, p, memory)
        path.append(base.received(theta, everyone, memory).numpy().copy())
    return np.array(path), memory


def local_steps(problem, m, noise, w, eta, rho, decay, extra):
    """Heavy-ball SGD of client m; `extra`(w) is what the base adds to the gradient."""
    w = w.copy()
    v = 0
    for step in range(problem.steps[m]):
        g = problem.H[m] @ (w - problem.a[m]) + noise[m][step] + decay * w + extra(w)
        v = rho * v + g
        w = w - eta[step] * v
    return w


def accumulated(eta, rho, T):
    """||a||_1 = sum_j sum_{k >= j} (eta_k / eta_0) rho^{k-j} of FedNova."""
    total = 0.0
    for j in range(T):
        for k in range(j, T):
            total += eta[k] / eta[0] * rho ** (k - j)
    return total


def cosine(w, u):
    """cos(w, u) and its gradient in w."""
    norm = np.linalg.norm(w) * np.linalg.norm(u)
    similarity = w @ u / norm
    return similarity, u / norm - similarity * w / (w @ w)


def contrast_gradient(w, w_0, previous, mu, temperature=0.5):
    near, to_global = cosine(w, w_0)
    far, to_previous = cosine(w, previous)
    wrong = 1 / (1 + np.exp((near - far) / temperature))  # softmax weight of the negative pair
    return mu * wrong * (to_previous - to_global) / temperature


def run_numpy(name, problem, eta, rho=0.0, decay=0.0, mu=0.0, server_lr=1.0) -> tuple:
    """The ten bases, literally: theta after every round, and what is remembered."""
    P = problem
    w_0 = P.w_0.copy()
    c = np.zeros(P.n)
    c_k = np.zeros((P.M, P.n))
    delta = np.zeros((P.M, P.n))
    moment = np.zeros(P.n)
    v = np.full(P.n, 1e-6)
    previous = {}
    nets = {}
    path = []

    def extra(m, w):
        """What the base adds to the gradient of client m."""
        if name == "fedprox":
            return mu * (w - w_0)
        if name == "scaffold":
            return c - c_k[m]
        if name == "vrlsgd":
            return -delta[m]
        if name == "moon" and m in previous:
            return contrast_gradient(w, w_0, previous[m], mu)
        return 0

    for S, noise in zip(P.picks, P.noise, strict=True):
        p = P.sizes[S] / P.sizes[S].sum()
        ends = []
        for m in S:

            def extra_of_client(w, m=m):
                return extra(m, w)

            begin = nets.get(m, w_0)
            ends.append(local_steps(P, m, noise, begin, eta, rho, decay, extra_of_client))
        w = np.array(ends)
        length = np.array([accumulated(eta, rho, P.steps[m]) for m in S])
        mean = p @ w
        if name == "scaffold":
            new = c_k[S] - c + (w_0 - w) / (eta[0] * length)[:, None]
            c = c + len(S) / P.M * (new - c_k[S]).mean(0)
            c_k[S] = new
            w_0 = w_0 + server_lr * (w - w_0).mean(0)
        elif name == "fednova":
            w_0 = w_0 - (p @ length) * (p @ ((w_0 - w) / length[:, None]))
        elif name == "vrlsgd":
            delta[S] += (mean - w) / (eta[0] * length)[:, None]
            w_0 = mean
        elif name in ("fedadagrad", "fedadam", "fedyogi"):
            d = mean - w_0
            b1 = 0.0 if name == "fedadagrad" else 0.9
            moment = b1 * moment + (1 - b1) * d
            if name == "fedadagrad":
                v = v + d**2
            elif name == "fedadam":
                v = 0.99 * v + 0.01 * d**2
            else:
                v = v - 0.01 * d**2 * np.sign(v - d**2)
            w_0 = w_0 + server_lr * moment / (np.sqrt(v) + 1e-3)
        elif name == "solo":
            nets.update(zip(S, w, strict=True))
        else:
            previous.update(zip(S, w, strict=True))
            w_0 = mean
        if name == "solo":
            path.append(np.array([nets.get(m, w_0) for m in range(P.M)]))
        else:
            path.append(w_0.copy())
    return np.array(path), {"c": c, "c_k": c_k, "delta": delta, "m": moment, "v": v}


REMEMBERED = {
    "scaffold": ("c", "c_k"),
    "vrlsgd": ("delta",),
    "fedadam": ("m", "v"),
    "fedyogi": ("m", "v"),
    "fedadagrad": ("m", "v"),
}
BY_CLIENT = {"scaffold": "c_k", "vrlsgd": "delta", "moon": "previous", "solo": "nets"}
MU = {"fedprox": 0.001, "moon": 5.0}  # the defaults
ADAPTIVE = ("fedadagrad", "fedadam", "fedyogi")
SERVER_LR = {"scaffold": 0.8, "fedadagrad": 0.05, "fedadam": 0.05, "fedyogi": 0.05}


@pytest.mark.parametrize("rho", [0.0, 0.9])
@pytest.mark.parametrize("name", bases.BASES)
def test_base_equals_numpy(name, rho):
    """Five rounds, three of six clients, unequal sizes and steps, lr schedule, weight decay.

    With momentum, mu and the server's learning rate are the defaults.
    """
    problem = Problem(seed=len(name))
    eta = 0.1 * (1 + 0.5 * np.arange(6)) ** -0.75
    given = {"mu": -1.0, "server_lr": 0.0}
    known = {"mu": MU.get(name, 0.0), "server_lr": 0.01 if name in ADAPTIVE else 1.0}
    if rho == 0:
        given = known = {"mu": 0.7, "server_lr": SERVER_LR.get(name, 1.0)}
    path, memory = run_base(name, problem, eta, rho, 0.01, **given)
    expected, remembered = run_numpy(name, problem, eta, rho, 0.01, **known)
    assert np.abs(path - expected).max() < 1e-10
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-3
    for what in REMEMBERED.get(name, ()):
        if what in BY_CLIENT.values():
            for m, row in memory[what].items():
                assert np.abs(row.numpy() - remembered[what][m]).max() < 1e-10
        else:
            assert np.abs(memory[what].numpy() - remembered[what]).max() < 1e-10
    if name in BY_CLIENT:  # by client id, never by place
        assert set(memory[BY_CLIENT[name]]) == {m for clients in problem.picks for m in clients}


@pytest.mark.parametrize("name", [name for name in bases.BASES if name != "solo"])
def test_batch_norm_statistics_are_averaged_whatever_the_server(name):
    data, model, _ = ordinary.prepare("fedgen-cnn")
    theta = model.init(0)
    d = model.trainable
    clients = np.array([0, 1])
    batches = ordinary.draw_schedules(data, (8, 12), 4)
    base = bases.BASES[name](make_config(base=name), model)
    local = base.prepare(Local(0.05), theta, clients, {})
    update = training.train(model, theta, data, clients, batches, local)
    new = base.aggregate(theta, update, np.array([0.4, 0.6]), {})
    expected = 0.4 * update.gather_thetas()[0, d:] + 0.6 * update.gather_thetas()[1, d:]
    assert torch.allclose(new[d:], expected, rtol=0, atol=1e-12)
    assert not torch.allclose(new[d:], theta[d:])


# ---------------------------------------------------------------- bases in a federation's rounds


@pytest.mark.parametrize("name", bases.BASES)
def test_only_aggregation_changes_the_state(name):
    """Training twice from one state is training once; `aggregate` returns theta."""
    fl = make_federation(base=name, momentum=0.5)
    state = fl.start()
    for t in range(2):
        clients = fl.select(t, 3)
        theta = state["theta"].clone()
        memory = pickle.dumps(state["base"])
        first = fl.train(state, t, clients, first_batches(fl, clients))
        again = fl.train(state, t, clients, first_batches(fl, clients))
        fl.test(state)
        assert torch.equal(first.gather_thetas(), again.gather_thetas())
        assert pickle.dumps(state["base"]) == memory
        new = fl.aggregate(state, first)
        assert torch.equal(state["theta"], theta)
        state["theta"] = new


@pytest.mark.parametrize("base", bases.BASES)
def test_an_eta_without_effect_moves_nothing_and_divides_by_nothing(base):
    """In float32 1e-60 is 0. The server's learning rate of the adaptive bases is another one."""
    fl = make_federation(base=base, lr=1e-60, dtype="float32")
    state = fl.start()
    theta_0 = state["theta"]
    for t in range(3):
        update = fl.train(state, t, fl.everyone, first_batches(fl, fl.everyone))
        state["theta"] = fl.aggregate(state, update)
    torch.testing.assert_close(state["theta"], theta_0, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("base", bases.BASES)
def test_unread_are_a_bases_flags_without_effect(base):
    """Three rounds of all clients: the weights stay exactly where they are if a flag is unread."""

    def trained(**flags):
        fl = make_federation(base=base, **flags)
        state = fl.start()
        for t in range(3):
            batches = []
            for m, shard in enumerate(fl.shards):
                batches.append(epochs_of_batches(shard, 1, 5, fl.streams("batches", t, m)))
            update = fl.train(state, t, fl.everyone, batches)
            state["theta"] = fl.aggregate(state, update)
        return fl.received(state, fl.everyone)

    reference = trained()
    unread = set()
    for flag in ("mu", "server_lr"):
        if torch.equal(trained(**{flag: 0.37}), reference):
            unread.add(flag)
    assert unread == {*bases.BASES[base].unread}


def test_a_scripts_own_base_and_projection():
    class Half(bases.FedAvg):
        def server(self, w_0, w_hat, p, update, memory):
            return w_0 / 2

    data = ordinary.random_images()
    streams = common.Streams(0)
    fl = common.Federation(make_config(), data, streams, base=Half, projection=True)
    parameters = ordinary.MoonNet(1, 16, 4).parameters()
    assert fl.model.trainable == sum(parameter.numel() for parameter in parameters)
    state = fl.start()
    update = fl.train(state, 0, np.array([0]), first_batches(fl, [0]))
    assert torch.equal(fl.aggregate(state, update), state["theta"] / 2)
    mine = type("Mine", (bases.Moon,), {})
    projected = common.Federation(make_config(), data, streams, base=mine)
    assert projected.model.trainable == fl.model.trainable
