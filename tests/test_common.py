"""common.py against float64 NumPy, closed forms, loops over ordinary torch nets and brute force."""

import ast
import dataclasses
import math
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import ordinary
import pytest
import torch
from ordinary import fill, normalise, perturb
from torch import nn

import common
import training
from data import Data, UsageError, epochs_of_batches
from nets import Model, build_model
from training import Local

DOUBLE = torch.float64
DECAYING = 0.05 * (1 + 0.3 * np.arange(9)) ** -0.75


def make_config(**changes) -> SimpleNamespace:
    """What a federation reads of the flags."""
    flags = {
        "dataset": "digits",
        "model": "lenet5",
        "norm": "batch",
        "width": 0,
        "dtype": "float64",
        "chunk": 0,
        "partition": "iid",
        "alpha": 0.5,
        "classes_per_client": 2,
        "min_size": 1,
        "parts": 0,
        "clients": 5,
        "batch_size": 3,
        "lr": 0.05,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "base": "fedavg",
        "mu": -1.0,
        "server_lr": 0.0,
        "per_client": False,
        "hold_out": 0.0,
        "device_spread": 0.0,
    }
    return SimpleNamespace(**(flags | changes))


def make_federation(data=None, seed=1, trial=0, **flags) -> common.Federation:
    streams = common.Streams(seed, trial)
    return common.Federation(make_config(**flags), data or ordinary.random_images(), streams)


def first_batches(fl, clients) -> list[np.ndarray]:
    """A batch of each client's first three samples."""
    return [fl.shards[m][None, :3] for m in clients]


# ------------------------------------------------------------------------- importing, streams


def test_importing_changes_nothing_in_the_process():
    """Neither the garbage collector nor threads nor matplotlib's backend nor the random streams."""
    program = """
import gc, os, random, sys, numpy, torch
def settings():
    names = ("OMP_NUM_THREADS", "MPLBACKEND", "MALLOC_TRIM_THRESHOLD_")
    environment = [os.environ.get(name) for name in names]
    streams = [torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist()]
    threads = [torch.get_num_threads(), torch.get_num_interop_threads()]
    flags = [torch.backends.cudnn.deterministic, torch.are_deterministic_algorithms_enabled()]
    return [gc.get_freeze_count(), gc.get_threshold(), gc.isenabled(), environment, threads, flags,
            random.getstate(), streams, torch.get_default_dtype()]
before = settings()
import common
assert settings() == before
assert not {"matplotlib", "pandas", "experiment"} & {*sys.modules}, "imported"
"""
    folder = Path(common.__file__).parent
    subprocess.run([sys.executable, "-c", program], check=True, cwd=folder)


def test_streams_do_not_depend_on_the_order_of_the_calls():
    one = common.Streams(3, 1)
    other = common.Streams(3, 1)
    keys = [("select", 4), ("batches", 4, 2), ("ties", 4, 2), ("init",), ("batches", 2, 4)]
    draws = {key: one(*key).random(3) for key in keys}
    for key in reversed(keys):
        other(*key).random(100)  # any number of draws before
        assert np.array_equal(other(*key).random(3), draws[key])
    assert len({tuple(draw) for draw in draws.values()}) == len(keys)
    assert one.seed("init") == other.seed("init")
    assert 0 <= one.seed("init") < 2**31


def test_streams_differ_by_seed_trial_purpose_and_key():
    draws = []
    for seed in (0, 1):
        for trial in (0, 1):
            streams = common.Streams(seed, trial)
            for purpose in ("init", "ties"):
                for key in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2**20)):
                    draws.append(streams(purpose, *key).random())
    assert len(set(draws)) == len(draws) == 40
    assert len({common.Streams(0).seed("dropout", 0, m) for m in range(20)}) == 20


ROOT = Path(common.__file__).parent
SOURCES = [*ROOT.glob("*.py"), *ROOT.glob("results/*/*.py")]


@pytest.mark.parametrize("path", sorted(SOURCES), ids=lambda path: path.name)
def test_a_purpose_always_has_the_same_number_of_keys(path):
    """NumPy pads a short key with zeros, so that streams("x") would repeat streams("x", 0)."""
    numbers = {}
    for call in ast.walk(ast.parse(path.read_text())):
        if not isinstance(call, ast.Call) or not call.args:
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        purpose = getattr(call.args[0], "value", None)
        if name in ("streams", "seed") and isinstance(purpose, str):
            numbers.setdefault(purpose, set()).add(len(call.args))
    assert all(len(counts) == 1 for counts in numbers.values()), numbers


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
    base = common.BASES[name](config, POINTS)
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
SERVER_LR = {"scaffold": 0.8, "fedadagrad": 0.05, "fedadam": 0.05, "fedyogi": 0.05}


@pytest.mark.parametrize("rho", [0.0, 0.9])
@pytest.mark.parametrize("name", common.BASES)
def test_base_equals_numpy(name, rho):
    """Five rounds, three of six clients, unequal sizes and steps, lr schedule, weight decay."""
    problem = Problem(seed=len(name))
    eta = 0.1 * (1 + 0.5 * np.arange(6)) ** -0.75
    mu = 0.7 if name in ("fedprox", "moon") else -1.0
    server_lr = SERVER_LR.get(name, 0.0)
    path, memory = run_base(name, problem, eta, rho, 0.01, mu, server_lr)
    expected, remembered = run_numpy(name, problem, eta, rho, 0.01, mu, server_lr)
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


def test_default_constants_of_the_bases():
    bases = {}
    for name, base in common.BASES.items():
        bases[name] = base(make_config(base=name), POINTS)
    assert bases["fedprox"].mu == 0.001
    assert bases["moon"].mu == 5.0
    assert bases["moon"].temperature == 0.5
    for name in ("fedadam", "fedyogi"):
        assert (bases[name].b1, bases[name].b2, bases[name].tau) == (0.9, 0.99, 1e-3)
    for name, base in bases.items():
        is_adaptive = name in ("fedadam", "fedadagrad", "fedyogi")
        assert base.server_lr == (0.01 if is_adaptive else 1)


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_limits_of_the_bases(rho):
    """mu = 0, equal steps, the first round: each is FedAvg; and is not, one step further."""
    problem = Problem(seed=1)
    fedavg = run_base("fedavg", problem, 0.1, rho)[0]
    for name in ("fedprox", "moon"):
        assert np.array_equal(run_base(name, problem, 0.1, rho, mu=0.0)[0], fedavg)
    assert np.abs(run_base("fednova", problem, 0.1, rho)[0] - fedavg).max() > 1e-3
    equal = Problem(seed=2, steps=4)
    difference = run_base("fednova", equal, 0.1, rho)[0] - run_base("fedavg", equal, 0.1, rho)[0]
    assert np.abs(difference).max() < 1e-12
    same_sizes = Problem(seed=3, size=7)  # SCAFFOLD's server takes the plain mean
    fedavg = run_base("fedavg", same_sizes, 0.1, rho)[0]
    for name in ("scaffold", "vrlsgd", "moon"):
        path = run_base(name, same_sizes, 0.1, rho)[0]
        assert np.abs(path[0] - fedavg[0]).max() < 1e-14
        assert np.abs(path[-1] - fedavg[-1]).max() > 1e-4


def test_scaffolds_variate_is_the_mean_of_the_clients():
    """c = mean over all M clients of c_k, under any participation."""
    _, memory = run_base("scaffold", Problem(seed=4), 0.1)
    total = torch.stack([*memory["c_k"].values()]).sum(0)
    assert torch.allclose(memory["c"], total / 6, rtol=0, atol=1e-13)


def test_corrections_find_the_common_optimum_where_fedavg_drifts():
    """The fixed point of many local steps is the minimiser of the mean objective."""
    problem = Problem(seed=8, rounds=90, per_round=6, steps=5, size=1)
    problem.noise = [[np.zeros((5, 5))] * 6] * 90
    weighted = np.einsum("mij,mj->i", problem.H, problem.a)
    best = np.linalg.solve(problem.H.sum(0), weighted)
    distance = {}
    for name in ("fedavg", "scaffold", "vrlsgd"):
        path, _ = run_base(name, problem, 0.08)
        distance[name] = np.abs(path[-1] - best).max()
    assert distance["scaffold"] < 1e-6
    assert distance["vrlsgd"] < 1e-6
    assert distance["fedavg"] > 1e-3


@pytest.mark.parametrize("name", [name for name in common.BASES if name != "solo"])
def test_batch_norm_statistics_are_averaged_whatever_the_server(name):
    data, model, _ = ordinary.prepare("fedgen-cnn")
    theta = model.init(0)
    d = model.trainable
    clients = np.array([0, 1])
    batches = ordinary.draw_schedules(data, (8, 12), 4)
    base = common.BASES[name](make_config(base=name), model)
    local = base.prepare(Local(0.05), theta, clients, {})
    update = training.train(model, theta, data, clients, batches, local)
    new = base.aggregate(theta, update, np.array([0.4, 0.6]), {})
    expected = 0.4 * update.gather_thetas()[0, d:] + 0.6 * update.gather_thetas()[1, d:]
    assert torch.allclose(new[d:], expected, rtol=0, atol=1e-12)
    assert not torch.allclose(new[d:], theta[d:])


def test_moon_with_previous_equal_to_global_costs_log_two_and_pulls_nowhere():
    data = ordinary.random_images()
    model = build_model("lenet5", data, dtype=DOUBLE, projection=True)
    batches = ordinary.draw_schedules(data, (7, 4), 3)
    base = common.Moon(make_config(base="moon", mu=2.0), model)
    theta = model.init(0)
    before = theta.clone()
    clients = np.array([0, 1])
    for memory, cost in (({}, 0), ({"previous": {0: before.clone(), 1: before.clone()}}, 1)):
        terms = []

        def contrast(out, terms=terms):
            terms.append(base.contrast(out))
            return terms[-1]

        local = base.prepare(Local(0.05), theta, clients, memory)
        local = dataclasses.replace(local, penalty=contrast)
        update = training.train(model, theta, data, clients, batches, local)
        for term in terms:
            assert term.tolist() == pytest.approx([2 * math.log(2) * cost] * len(term), abs=1e-12)
        for k, rows in enumerate(batches):
            plain = training.train_one_client(model, theta, data, rows, Local(0.05))
            assert (update.gather_thetas()[k] - plain).abs().max() < 1e-10
    assert torch.equal(theta, before)
    assert torch.equal(memory["previous"][0], before)  # frozen nets do not move
    with pytest.raises(UsageError, match="lstm"):
        build_model("lstm", ordinary.random_text(), projection=True)


# ---------------------------------------------------------------- bases in a federation's rounds


def contrast_by_hand(net, x, global_net, previous_net, mu):
    """MOON's term of a client, by torch's own layers."""
    z = net.z(x)
    near = torch.exp(torch.cosine_similarity(z, global_net.z(x).detach()) / 0.5)
    far = torch.exp(torch.cosine_similarity(z, previous_net.z(x).detach()) / 0.5)
    return mu * -torch.log(near / (near + far)).mean()


def train_by_hand(net, data, theta_0, batches, momentum, decay, proximal, correction, term):
    """theta (P,) of a client by torch's own SGD; the base's terms are added to its gradients."""
    fill(net, theta_0)
    parameters = list(net.parameters())
    begin = [parameter.detach().clone() for parameter in parameters]
    sizes = [parameter.numel() for parameter in parameters]
    added = correction.split(sizes)
    sgd = torch.optim.SGD(parameters, lr=1.0, momentum=momentum, weight_decay=decay)
    for step, batch in enumerate(batches):
        samples = batch[batch >= 0]
        x = normalise(data, data.x_train[samples])
        loss = torch.nn.functional.cross_entropy(net(x), data.y_train[samples]) + term(x)
        sgd.zero_grad()
        loss.backward()
        for parameter, w_0, c in zip(parameters, begin, added, strict=True):
            parameter.grad += proximal * (parameter.detach() - w_0) + c.view(parameter.shape)
        sgd.param_groups[0]["lr"] = float(DECAYING[step])
        sgd.step()
    return ordinary.flatten(net)


@pytest.mark.parametrize("name", common.BASES)
def test_every_base_trains_as_both_loops(name):
    """Three rounds of three of five clients: `train_one_client`, and torch's own layers and SGD."""
    data = ordinary.random_images()
    mu = 0.7 if name in ("fedprox", "moon") else -1
    config = make_config(base=name, mu=mu, momentum=0.5, weight_decay=0.01)
    fl = common.Federation(config, data, common.Streams(3))
    state = fl.start()
    net_class = ordinary.MoonNet if name == "moon" else ordinary.lenet
    previous = {}
    for t in range(3):
        clients = fl.select(t, 3)
        batches = []
        for m in clients:
            rng = fl.streams("batches", t, m)
            batches.append(epochs_of_batches(fl.shards[m], 1, 5, rng))
        theta = state["theta"]
        theta_0 = fl.received(state, clients).expand(3, -1).clone()
        local = Local(DECAYING, 0.5, 0.01)
        local = fl.base.prepare(local, theta, clients, state["base"])
        update = fl.train(state, t, clients, batches, lr=DECAYING)
        assert update.clients.tolist() == clients.tolist()
        for k, m in enumerate(clients):
            rows = batches[k]
            looped = training.train_one_client(fl.model, theta_0[k], data, rows, local, k)
            assert (update.gather_thetas()[k] - looped).abs().max() < 1e-10
            net = net_class(1, 16, 4)

            def term(x, m=int(m), net=net, theta=theta, previous=previous):
                if name != "moon" or m not in previous:
                    return 0
                global_net = fill(net_class(1, 16, 4), theta)
                previous_net = fill(net_class(1, 16, 4), previous[m])
                return contrast_by_hand(net, x, global_net, previous_net, 0.7)

            correction = torch.zeros(fl.model.trainable, dtype=DOUBLE)
            if local.correction is not None:
                correction = local.correction[k]
            proximal = 0.7 if name == "fedprox" else 0
            expected = train_by_hand(
                net, data, theta_0[k], rows, 0.5, 0.01, proximal, correction, term
            )
            assert (update.gather_thetas()[k] - expected).abs().max() < 1e-10
        previous |= dict(zip(clients.tolist(), update.gather_thetas(), strict=True))
        state["theta"] = fl.aggregate(state, update)
    if name in ("scaffold", "vrlsgd"):
        assert local.correction.abs().max() > 1e-4
    assert len(previous) > 3  # somebody returned, somebody was new


@pytest.mark.parametrize("name", common.BASES)
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


@pytest.mark.parametrize("base", common.BASES)
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
    assert unread == {*common.BASES[base].unread}


def test_a_resumed_round_reads_the_memory_of_its_state():
    """The state of one federation in the hands of another, as after a resume."""
    ends = []
    for is_resumed in (False, True):
        fl = make_federation(base="scaffold")
        state = fl.start()
        for t in range(3):
            if is_resumed and t == 2:
                fl = make_federation(base="scaffold")
            clients = fl.select(t, 3)
            update = fl.train(state, t, clients, first_batches(fl, clients))
            state["theta"] = fl.aggregate(state, update)
        ends.append(state["theta"])
    assert torch.equal(*ends)


def test_a_scripts_own_base_and_projection():
    class Half(common.FedAvg):
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
    mine = type("Mine", (common.Moon,), {})
    projected = common.Federation(make_config(), data, streams, base=mine)
    assert projected.model.trainable == fl.model.trainable


# ------------------------------------------------------------------------ a federation's rounds


def test_selection_is_uniform_nested_and_without_replacement():
    fl = make_federation(clients=40)
    counts = np.zeros(40)
    for t in range(1000):
        chosen = fl.select(t, 16)
        assert len(set(chosen.tolist())) == 16
        assert (np.diff(chosen) > 0).all()
        assert set(chosen) <= set(fl.select(t, 32))
        counts[chosen] += 1
    assert np.abs(counts - 400).max() < 5 * math.sqrt(400 * 0.6)
    fl.config.clients = 20_000  # too many to be permuted in every round
    many = fl.select(0, 50)
    assert len(set(many.tolist())) == 50
    assert (np.diff(many) > 0).all()
    assert many.max() > 10_000
    assert np.array_equal(many, fl.select(0, 50))
    assert not np.array_equal(many, fl.select(1, 50))


def test_parts_keep_some_of_a_finer_partition():
    data = ordinary.random_images(n=200)
    fl = make_federation(data, clients=6, parts=20)
    whole = make_federation(data, clients=20)
    assert fl.sizes.tolist() == [10] * 6
    assert len(whole.shards) == 20
    assert len(np.unique(np.concatenate(fl.shards))) == 60
    shards = {shard.tobytes() for shard in fl.shards}
    assert shards <= {shard.tobytes() for shard in whole.shards}
    other = make_federation(data, trial=1, clients=6, parts=20)
    assert shards != {shard.tobytes() for shard in other.shards}


def test_a_federation_obeys_the_flags_of_its_partition():
    data = ordinary.random_images(classes=6)
    fl = make_federation(data, partition="label-skew", classes_per_client=3, clients=4)
    assert [len(np.unique(data.y_train[shard])) for shard in fl.shards] == [3] * 4
    poor = make_federation(data, partition="dirichlet", alpha=0.01, min_size=9, clients=6)
    assert poor.sizes.min() == 9
    assert poor.sizes.tolist() == [len(shard) for shard in poor.shards]
    flat = make_federation(data, partition="dirichlet", alpha=1e6, clients=6)
    assert np.ptp(flat.sizes) <= 6
    assert flat.model.dtype == DOUBLE
    data.owner = np.arange(60) // 5
    natural = make_federation(data, partition="natural", clients=6)
    for shard in natural.shards:
        assert len(np.unique(data.owner[shard])) == 1


def test_hold_out_tests_on_a_share_of_each_clients_samples():
    """They leave training; the images stay normalised by all training images' moments."""
    data = ordinary.random_images(n=103)
    whole = make_federation(data, clients=4)
    fl = make_federation(data, clients=4, hold_out=0.2)
    assert [len(shard) for shard in whole.shards] == [26, 26, 26, 25]
    assert fl.sizes.tolist() == [21, 21, 21, 20]
    images = {image.numpy().tobytes(): i for i, image in enumerate(data.x_train)}
    held = [images[image.numpy().tobytes()] for image in fl.data.x_test]
    assert len(held) == 20
    assert torch.equal(fl.data.y_test, data.y_train[held])
    places = set()
    for m in range(4):
        left = set(whole.shards[m]) - set(fl.shards[m])
        assert left == set(held[5 * m : 5 * m + 5])
        assert set(fl.shards[m]) < set(whole.shards[m])
        places.add(tuple(np.flatnonzero(np.isin(whole.shards[m], fl.shards[m]))))
    assert len(places) == 4  # each client draws by itself
    assert np.array_equal(fl.labels, whole.labels)
    expected = normalise(data, fl.data.x_test)
    shown = fl.data.images("test", DOUBLE).permute(0, 3, 1, 2)
    assert torch.allclose(shown, expected, rtol=0, atol=1e-12)
    with pytest.raises(UsageError, match="^--hold-out 0.01: [^\n]*$"):
        make_federation(data, clients=4, hold_out=0.01)


def test_labels_are_counted_by_client_and_class():
    fl = make_federation(partition="dirichlet", alpha=0.3)
    counts = fl.count_labels()
    for m, shard in enumerate(fl.shards):
        for c in range(4):
            assert counts[m, c] == sum(fl.labels[i] == c for i in shard)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("base", common.BASES)
def test_cost_in_bytes(base, dtype):
    """SCAFFOLD's c and c_k travel too, solo moves nothing; numbers beside the nets."""
    data = ordinary.random_images()
    model = "fedgen-cnn" if base == "scaffold" else "lenet5"
    fl = make_federation(data, base=base, dtype=dtype, model=model)
    state = fl.start()
    clients = np.array([0, 2, 3])
    batches = ordinary.draw_schedules(data, (7, 3, 10), 3)
    update = fl.train(state, 0, clients, batches)
    number = state["theta"].element_size()
    nets = 3 * state["theta"].numel() * number * {"scaffold": 2, "solo": 0}.get(base, 1)
    for received, sent in ((0, 0), (1000, 500)):
        cost = fl.cost(update, received, sent)
        assert cost["samples"] == 20
        expected = (nets + received * number) / 1e6
        assert cost["received_mb"] == pytest.approx(expected, rel=1e-12)
        assert cost["sent_mb"] == pytest.approx((nets + sent * number) / 1e6, rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite(bad):
    """Of three clients the second's training ends in `bad`; then nobody's is finite."""
    fl = make_federation()
    state = fl.start()
    clients = np.array([0, 2, 4])

    def blow_up(out):
        return out.extra["blow"] * out.features.sum((1, 2))

    def diverge(value):
        blow = torch.tensor([0.0, value, 0.0], dtype=DOUBLE)
        batches = first_batches(fl, clients)
        fl.train(state, 6, clients, batches, penalty=blow_up, per_client={"blow": blow})

    diverge(1.0)
    message = "^round 7: the update of client 2 is not finite[^\n]*--lr[^\n]*$"
    with pytest.raises(common.NonFiniteError, match=message):
        diverge(bad)
    state["theta"] = state["theta"] * math.nan
    with pytest.raises(common.NonFiniteError, match="client 0, 2, 4"):
        diverge(0.0)


def test_an_own_net_that_fails_in_training_is_named_in_one_line(tmp_path):
    """Batch norm over vectors takes no batch of one, which the last of an epoch may be."""
    flat = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self, channels, side, classes):
        super().__init__(nn.Flatten(), nn.Linear(channels * side * side, classes)NORM)
"""
    asserting = """
    def forward(self, x):
        assert len(x) > 1 or not self.training, 'Expected more than 1 value'
        return super().forward(x)
"""
    normed = flat.replace("NORM", ", nn.BatchNorm1d(classes)")
    strict = flat.replace("NORM", "") + asserting
    path = tmp_path / "mine.py"
    for text, error in ((normed, "ValueError"), (strict, "AssertionError")):
        path.write_text(text)
        fl = make_federation(model=f"{path}:Net")
        message = f"^--model [^\n]*mine.py:Net: {error}: Expected more than 1 value[^\n]*$"
        with pytest.raises(UsageError, match=message):
            fl.train(fl.start(), 0, np.array([0]), [np.array([[0, 1], [2, -1]])])


def test_options_of_a_round_are_merged_with_those_of_the_base():
    """A script's frozen nets and tensors lie beside MOON's; its fields win over the flags."""
    fl = make_federation(base="moon", mu=0.5, momentum=0.9, lr=0.01)
    state = fl.start()
    clients = np.array([1, 3])
    batches = first_batches(fl, clients)
    visits = []

    def loss(out):
        visits.append((set(out.extra), set(out.frozen), out.extra["known"].tolist()))
        assert out.extra["mine"].tolist() == [5, 6]
        return training.cross_entropy(out)

    for _ in range(2):
        update = fl.train(
            state,
            0,
            clients,
            batches,
            lr=0.05,
            loss=loss,
            frozen={"other": fl.model.init(9).expand(2, -1)},
            per_client={"mine": torch.tensor([5.0, 6.0])},
            per_step={"clock": [np.arange(1)] * 2},
        )
        assert np.allclose(update.length, 0.05)
        state["theta"] = fl.aggregate(state, update)
    extras = {"mine", "known", "clock"}
    nets = {"other", "global", "previous"}
    assert visits == [(extras, nets, [0, 0]), (extras, nets, [1, 1])]
    assert np.allclose(fl.train(state, 0, clients, batches).length, 0.01)
    with pytest.raises(TypeError, match="learning_rate"):
        fl.train(state, 0, clients, batches, learning_rate=0.1)


def test_the_flags_of_training_reach_it():
    """Momentum, weight decay and chunk; a dropout seed of its own for each round and client."""
    data = ordinary.random_images(32, 3)
    flags = {"model": "alexnet", "width": 8, "momentum": 0.5, "weight_decay": 0.1, "lr": 0.02}
    fl = make_federation(data, chunk=1, **flags)
    state = fl.start()
    clients = np.array([0, 1])
    batches = [fl.shards[m][:4].reshape(2, 2) for m in clients]
    seeds = [fl.streams.seed("dropout", 3, m) for m in clients]
    local = Local(0.02, 0.5, 0.1, seeds=seeds)
    expected = training.train(fl.model, state["theta"], data, clients, batches, local, chunk=1)
    assert torch.equal(
        fl.train(state, 3, clients, batches).gather_thetas(), expected.gather_thetas()
    )
    assert not torch.equal(
        fl.train(state, 4, clients, batches).gather_thetas(), expected.gather_thetas()
    )
    assert torch.equal(state["theta"], fl.model.init(fl.streams.seed("init")))


def test_aggregation_by_sizes_or_by_given_proportions():
    fl = make_federation(partition="dirichlet", min_size=3)
    state = fl.start()
    clients = np.array([0, 2, 3])
    sizes = fl.sizes[clients]
    assert len(set(sizes)) > 1
    assert fl.proportions(clients).tolist() == (sizes / sizes.sum()).tolist()
    update = fl.train(state, 0, clients, first_batches(fl, clients))
    by_size = torch.from_numpy(sizes / sizes.sum()) @ update.gather_thetas()
    assert torch.allclose(fl.aggregate(state, update), by_size, rtol=0, atol=1e-12)
    p = np.array([0.25, 0.5, 0.25])
    given = torch.from_numpy(p) @ update.gather_thetas()
    assert torch.allclose(fl.aggregate(state, update, p), given, rtol=0, atol=1e-12)


def test_central_training_is_plain_sgd_on_everything():
    """Full batches, as then their order does not matter."""
    flags = {"batch_size": 10, "lr": 0.1, "momentum": 0.5, "weight_decay": 0.01}
    fl = make_federation(ordinary.random_images(n=10), seed=2, **flags)
    theta = fl.train_centrally(2)
    net = fill(ordinary.lenet(1, 16, 4), fl.model.init(fl.streams.seed("central init")))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)
    for _ in range(2):
        sgd.zero_grad()
        logits = net(normalise(fl.data, fl.data.x_train))
        torch.nn.functional.cross_entropy(logits, fl.data.y_train).backward()
        sgd.step()
    assert (theta - ordinary.flatten(net)).abs().max() < 1e-10
    fl.config.lr = 1e200
    with pytest.raises(common.NonFiniteError, match="--lr"):
        fl.train_centrally(2)
    dropping = make_federation(ordinary.random_images(32, 3, n=5), model="alexnet", width=8)
    assert torch.equal(dropping.train_centrally(1), dropping.train_centrally(1))


def test_central_training_leaves_out_what_is_held_out():
    """An expert must not have learnt the test set: its labels may change without a trace."""
    experts = []
    for flip in (False, True):
        data = ordinary.random_images()
        fl = make_federation(data, hold_out=0.4)
        if flip:
            for image in fl.data.x_test:
                same = (data.x_train == image).flatten(1).all(1)
                data.y_train[same] = 3 - data.y_train[same]
        experts.append(fl.train_centrally(1))
    assert torch.equal(*experts)


# ---------------------------------------------------------------------------- tests and scores


def client_accuracy(model, theta, data, shard) -> float:
    """Accuracy on test samples whose labels are mixed as the client's, sample by sample."""
    logits = common.predict(model, theta, data.images("test", DOUBLE), np.arange(len(data.y_test)))
    labels = data.y_train[shard].tolist()
    hits = 0.0
    total = 0.0
    for guess, y in zip(logits.argmax(1).tolist(), data.y_test.tolist(), strict=True):
        weight = labels.count(y) / len(labels) / (data.y_test == y).sum().item()
        hits += weight * (guess == y)
        total += weight
    return 100 * hits / total


def evaluate(model, theta, data) -> dict[str, float]:
    """The grades of one net."""
    x = data.images("test", model.dtype)
    columns = common.grade([common.predict(model, theta, x, np.arange(len(x)))], data)
    return columns


def test_solo_reports_the_mean_of_the_clients_own_nets():
    data = ordinary.random_images()
    fl = make_federation(data, base="solo", clients=3, per_client=True)
    state = fl.start()
    theta = state["theta"]
    rows = perturb(fl.model.init(1), 2)
    common.keep(state["base"], "nets", np.array([2, 0]), rows)
    nets = [rows[1], theta, rows[0]]
    assert torch.equal(fl.received(state, np.array([0, 1])), torch.stack(nets[:2]))
    single = [evaluate(fl.model, net, data) for net in nets]
    columns = fl.test(state)
    for name in ("accuracy", "loss"):
        expected = np.mean([of_net[name] for of_net in single])
        assert columns[name] == pytest.approx(expected, rel=1e-12)
    spread = np.std([of_net["accuracy"] for of_net in single], ddof=1)
    assert columns["client_std"] == pytest.approx(spread, rel=1e-12)
    own = []
    for net, shard in zip(nets, fl.shards, strict=True):
        own.append(client_accuracy(fl.model, net, data, shard))
    assert columns["own_mean"] == pytest.approx(np.mean(own), rel=1e-9)
    assert columns["own_std"] == pytest.approx(np.std(own))


def test_per_client_accuracy_equals_brute_force():
    """21 clients with mixes of their own; a class without test samples tells nothing."""
    data = ordinary.random_images(classes=6, n=126)
    data.x_test = data.x_test[:90]
    data.y_test = data.y_test[:90] % 5  # class 5 is never tested
    fl = make_federation(data, partition="dirichlet", clients=21, per_client=True, min_size=3)
    state = fl.start()
    logits = common.predict(fl.model, state["theta"], data.images("test", DOUBLE), np.arange(90))
    state["theta"][-6:] -= logits.mean(0)  # so that it guesses every class
    own = [client_accuracy(fl.model, state["theta"], data, shard) for shard in fl.shards]
    own = np.sort(own)
    columns = fl.test(state)
    assert np.ptp(own) > 10
    assert own[0] < own[1] < own[2]
    assert columns["own_mean"] == pytest.approx(own.mean(), rel=1e-9)
    assert columns["own_worst_tenth"] == pytest.approx(own[:2].mean(), rel=1e-9)
    assert columns["own_std"] == pytest.approx(own.std(), rel=1e-9)
    guesses = common.predict(fl.model, state["theta"], data.images("test", DOUBLE), np.arange(90))
    hits = (guesses.argmax(1) == data.y_test).numpy()
    asked = []
    for shard in fl.shards:
        held = np.isin(data.y_test.numpy(), data.y_train[shard].numpy())
        asked.extend(hits[held])
    assert columns["own_pooled"] == pytest.approx(100 * np.mean(asked))
    fl.config.per_client = False
    assert fl.test(state) == {"accuracy": columns["accuracy"], "loss": columns["loss"]}


@pytest.mark.parametrize("tested, own", [([10, 0], 80.0), ([0, 0], None)])
def test_clients_whose_classes_are_not_tested_are_left_out_and_counted(tested, own):
    """Two clients of a class each; 8 of 10 samples of the first class are right."""
    count = np.array([*tested, 5])
    hits = np.array([[8, 0, 5]]) * (count > 0)
    columns = common.clients_view(hits, count, np.eye(2, 3))
    if own is None:
        assert columns == {"own_untested": 2}
    else:
        names = ("own_mean", "own_worst_tenth", "own_pooled")
        assert columns == dict.fromkeys(names, own) | {"own_std": 0, "own_untested": 1}


def test_evaluation_is_in_percent_and_nats():
    data = ordinary.random_images()
    model = build_model("lenet5", data, dtype=DOUBLE)
    theta = model.init(5)
    y = data.y_test.numpy()
    net = fill(ordinary.lenet(1, 16, 4), theta)
    logits = net(normalise(data, data.x_test)).detach().numpy()
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]
    columns = evaluate(model, theta, data)
    assert columns["accuracy"] == pytest.approx(100 * (logits.argmax(1) == y).mean())
    assert columns["loss"] == pytest.approx(losses.mean())
    assert columns.keys() == {"accuracy", "loss"}


def test_accuracy_is_the_mean_over_nets():
    data = ordinary.random_images()
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(2, 60, 4)))
    columns = common.grade(logits, data)
    hits = 0
    for of_net in logits.tolist():
        for of_sample, label in zip(of_net, data.y_test.tolist(), strict=True):
            hits += of_sample.index(max(of_sample)) == label
    assert columns["accuracy"] == pytest.approx(100 * hits / 120)


@pytest.mark.parametrize("name", ["lenet5", "fedgen-cnn"])
def test_scores_equal_a_loop_and_leave_no_trace(name):
    """Each shard by its own net, also two at a time, and all shards by one net."""
    data, model, make_net = ordinary.prepare(name)
    thetas = perturb(model.init(0), 3)
    shards = [np.array([4, 1, 50]), np.array([9]), np.arange(20)]
    before = thetas.clone()
    torch_state = torch.get_rng_state()
    numpy_state = np.random.get_state()[1].copy()
    by_own = common.score(model, thetas, data, shards)
    by_one = common.score(model, thetas[1], data, shards)
    in_chunks = common.score(model, thetas, data, shards, chunk=2)
    assert torch.equal(thetas, before)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)

    def check(theta, shard, scores):
        losses, guesses = scores
        assert losses.dtype == np.float64
        assert len(losses) == len(guesses) == len(shard)
        net = fill(make_net(), theta).eval()
        for i, sample in enumerate(shard):  # one sample at a time
            logits = net(normalise(data, data.x_train[[sample]]))[0].detach().numpy()
            loss = np.log(np.exp(logits).sum()) - logits[data.y_train[sample]]
            assert losses[i] == pytest.approx(loss, abs=1e-10)
            assert guesses[i] == logits.argmax()

    for k, shard in enumerate(shards):
        check(thetas[k], shard, by_own[k])
        check(thetas[k], shard, in_chunks[k])
        check(thetas[1], shard, by_one[k])
    for nets in (thetas[0], thetas[:2]):
        scores = common.score(model, nets, data, [np.arange(0), np.arange(2)])
        assert [len(losses) for losses, _ in scores] == [0, 2]


def test_a_federation_scores_its_clients_samples():
    fl = make_federation(partition="dirichlet")
    theta = fl.model.init(3)
    clients = np.array([3, 1])
    shards = [fl.shards[3], fl.shards[1]]
    expected = common.score(fl.model, theta, fl.data, shards)
    for scores, of_shard in zip(fl.score(theta, clients), expected, strict=True):
        for found, wanted in zip(scores, of_shard, strict=True):
            assert np.array_equal(found, wanted)


def test_many_samples_are_scored_in_pieces():
    """More than a pass takes, of one net and of two."""
    data = ordinary.random_images(n=2100)
    model = build_model("lenet5", data, dtype=DOUBLE)
    x = data.images("train", DOUBLE)
    thetas = perturb(model.init(0), 2)
    shards = [np.arange(2100)[::-1].copy(), np.arange(1500)]
    stacked = common.predict_shards(model, thetas, x, shards)
    for theta, shard, logits in zip(thetas, shards, stacked, strict=True):
        net = fill(ordinary.lenet(1, 16, 4), theta)
        expected = net(normalise(data, data.x_train[shard])).detach()
        assert torch.allclose(logits, expected, atol=1e-10)
        alone = common.predict(model, theta, x, shard)
        assert torch.allclose(alone, expected, atol=1e-10)
