"""Oracles of client_curriculum.py and its rivals: whole runs written out literally, Algorithm 2,
the pool and its budget, the rivals' keys.
"""

import csv
import inspect
import itertools
import math
import shlex
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ordinary import load_plain

import client_curriculum as script
import common
import experiment
import fedavg_curriculum
from client_curriculum import ORDERS, Config
from data import load_data, partition
from nets import build_model
from results.client_curriculum import rivals
from results.client_curriculum.rivals import RIVALS

plain_clients = load_plain("client_curriculum")
plain_samples = load_plain("fedavg_curriculum")
SIZES = (8, 20, 11, 14, 17, 9)  # of the six clients of the literal runs


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """79 digits of five classes at 16x16, of six clients of 8 to 20 samples; 60 to test on."""
    from sklearn.datasets import load_digits

    x, y = load_digits(n_class=5, return_X_y=True)
    x = np.kron(x.reshape(-1, 8, 8), np.ones((2, 2)))[..., None] * (255 / 16)
    x = x.astype(np.uint8)
    y = y.astype(np.int64)
    n = sum(SIZES)
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    train = {"x_train": x[:n], "y_train": y[:n], "owner": np.repeat(np.arange(6), SIZES)}
    np.savez(path, **train, x_test=x[n : n + 60], y_test=y[n : n + 60])
    return path


def script_of(order: str):
    """The program that has this client order."""
    return rivals if order in RIVALS else script


def small(file, **flags) -> Config:
    """Seconds, not minutes: 9 clients of about 9 samples, 2 a round, one local epoch."""
    defaults = {
        "dataset": str(file),
        "client_order": "curriculum",
        "data_order": "vanilla",
        "clients": 9,
        "clients_per_round": 2,
        "rounds": 4,
        "epochs": 1,
        "batch_size": 4,
        "expert_epochs": 1,
        "trials": 1,
        "alpha": 1.0,
        "min_size": 2,
        "device": "cpu",
    }
    flags = defaults | flags
    return script_of(flags["client_order"]).Config(**flags)


def make_run(config, folder) -> experiment.Run:
    federate = script_of(config.client_order).federate
    orders = ("client_order", "data_order")
    program = experiment.Script(federate, orders, name=script.name)
    return experiment.Run(config, 0, experiment.Command(program, folder=folder))


def trained(config, folder) -> tuple[list[dict], dict]:
    """Rows (without seconds and method) and final state of one arm."""
    run = make_run(config, folder)
    experiment.train(run, lambda *_: None)
    saved = run.load()
    rows = []
    for row in saved["rows"]:
        rows.append({key: row[key] for key in row if key not in ("seconds", "method")})
    return rows, saved["state"]


# ---------------------------------------------------------------------------- whole runs, literally


class Literal:
    """Sections 4.1 to 4.5 in float64, client by client and step by step.

    Shares the random streams and the initial weights. Algorithm 2, pacing, and which samples are in
    a batch are those of plain/.
    """

    def __init__(self, file, flags: dict):
        self.c = SimpleNamespace(**flags, trial=0)
        self.streams = common.Streams(flags["seed"], 0)
        with np.load(file) as saved:
            arrays = dict(saved)
        mean = arrays["x_train"].mean()
        std = arrays["x_train"].std()
        self.x, self.x_test = [
            torch.from_numpy((arrays[name] - mean) / std).permute(0, 3, 1, 2)
            for name in ("x_train", "x_test")
        ]
        self.y = torch.from_numpy(arrays["y_train"])
        self.y_test = torch.from_numpy(arrays["y_test"])
        self.labels = arrays["y_train"].tolist()
        self.model = build_model("lenet5", load_data(str(file)), dtype=torch.float64)
        theta_0 = self.model.init(self.streams.seed("central init"))
        self.expert, _ = self.sgd(theta_0, self.central(), itertools.repeat(self.c.lr))
        self.loss = self.losses(self.expert, range(len(self.y)))
        self.before = [[] for _ in range(6)]
        for i, m in enumerate(arrays["owner"]):
            self.before[m].append(i)
        self.shards = self.deal()

    def logits(self, theta, x):
        """LeNet-5 on 1x16x16: conv 6, pool, conv 16, pool, 120, 84, 5."""
        shapes = [(6, 1, 5, 5), (6,), (16, 6, 5, 5), (16,)]
        shapes += [(120, 16), (120,), (84, 120), (84,), (5, 84), (5,)]
        parts = theta.split([math.prod(shape) for shape in shapes])
        tensors = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        w1, b1, w2, b2, w3, b3, w4, b4, w5, b5 = tensors
        x = F.max_pool2d(F.relu(F.conv2d(x, w1, b1)), 2)
        x = F.max_pool2d(F.relu(F.conv2d(x, w2, b2)), 2).flatten(1)
        return F.relu(F.relu(x @ w3.T + b3) @ w4.T + b4) @ w5.T + b5

    def cross_entropies(self, theta, x, y):
        logits = self.logits(theta, x)
        return logits.logsumexp(1) - logits[torch.arange(len(y)), y]

    def losses(self, theta, index) -> np.ndarray:
        index = torch.tensor(list(index))
        return self.cross_entropies(theta, self.x[index], self.y[index]).numpy()

    def sgd(self, start, batches, rates, mu=0.0) -> tuple:
        """theta after one step for each batch, and the batches' losses."""
        theta = start.clone()
        velocity = torch.zeros_like(start)
        trace = []
        for batch, eta in zip(batches, rates, strict=False):
            w = theta.clone().requires_grad_()
            index = torch.tensor(batch)
            loss = sum(self.cross_entropies(w, self.x[index], self.y[index])) / len(batch)
            (g,) = torch.autograd.grad(loss, w)
            g = g + mu * (theta - start) + self.c.weight_decay * theta
            velocity = self.c.momentum * velocity + g
            theta = theta - eta * velocity
            trace.append(float(loss.detach()))
        return theta, trace

    def central(self):
        rng = self.streams("central batches")
        for _ in range(self.c.expert_epochs):
            shuffled = rng.permutation(len(self.y)).tolist()
            for i in range(0, len(shuffled), self.c.batch_size):
                yield shuffled[i : i + self.c.batch_size]

    def deal(self) -> list[list[int]]:
        """Algorithm 2."""
        classes = np.array(self.labels) * self.c.stratify  # without it all are class 0
        shards = plain_clients.partition_by_difficulty(self.c, self.before, classes, self.loss)
        return [shard.tolist() for shard in shards]

    def consistency(self) -> tuple[float, float]:
        """Mean std of the expert's loss inside clients, std of their means."""
        inside = []
        means = []
        for shard in self.shards:
            mean = sum(self.loss[i] for i in shard) / len(shard)
            square = sum((self.loss[i] - mean) ** 2 for i in shard) / len(shard)
            inside.append(math.sqrt(square))
            means.append(mean)
        centre = sum(means) / 6
        between = math.sqrt(sum((mean - centre) ** 2 for mean in means) / 6)
        return sum(inside) / 6, between

    def pace(self, order, a, b) -> SimpleNamespace:
        """What the pacing of plain/fedavg_curriculum.py uses."""
        return SimpleNamespace(**vars(self.c) | {"order": order, "pacing_a": a, "pacing_b": b})

    def ordered(self, items, keys, rng) -> list[int]:
        """By key, ties in a random order; without keys in that order."""
        drawn = rng.permutation(len(items)).tolist()
        if keys is not None:
            drawn.sort(key=lambda i: keys[i])
        return [items[i] for i in drawn]

    def batches(self, m, t, theta, order) -> list[list[int]]:
        shard = np.array(self.shards[m])
        losses = self.loss[shard] if self.c.score == "E" else self.losses(theta, shard)
        ordered = plain_samples.sort(order, losses, self.streams("ties", t, m))
        config = self.pace(order, self.c.pacing_a, self.c.pacing_b)
        batches = plain_samples.take_batches(config, ordered, self.streams("batches", t, m))
        return [shard[batch].tolist() for batch in batches]

    def key(self, order, m, theta) -> float:
        """What ranks client m, smallest first."""
        shard = self.shards[m]
        if order == "entropy":
            labels = [self.labels[i] for i in shard]
            shares = [labels.count(c) / len(shard) for c in set(labels)]
            return sum(p * math.log(p) for p in shares)
        if order == "hics":
            return -self.estimate[m]
        if order == "coverage":
            return self.count[m] + (m in self.queue)
        losses = self.loss[shard] if self.c.score == "E" else self.losses(theta, shard)
        return losses.mean() if order == "curriculum" else -losses.mean()

    def select(self, t, order, theta) -> list[int]:
        M = 6
        K = self.c.clients_per_round
        if order == "vanilla" and self.c.client_sampling == "uniform":
            return sorted(self.streams("select", t).permutation(M)[:K].tolist())
        ties = self.streams("client ties", t)
        if order == "power-of-choice":
            p = np.array([len(shard) for shard in self.shards]) / len(self.labels)
            rng = self.streams("candidates", t)
            drawn = rng.choice(M, self.c.candidates, replace=False, p=p).tolist()
            self.scored(len(drawn))
            self.pool = K
            keys = [self.key(order, m, theta) for m in drawn]
            return sorted(self.ordered(drawn, keys, ties)[:K])
        if len(self.queue) < K:
            if order in ("curriculum", "anti"):
                self.scored(M)
            keys = None
            if order not in ("random", "vanilla"):
                keys = [self.key(order, m, theta) for m in range(M)]
            first = self.ordered(range(M), keys, ties)
            U = self.c.rounds * K
            config = self.pace(order, self.c.client_a, self.c.client_b)
            self.pool = max(K, plain_samples.g(config, self.u, U, M))
            again = self.streams("pool", t).permutation(sorted(first[: self.pool])).tolist()
            waiting = [m for m in again if m in self.queue]
            self.queue += [m for m in again if m not in waiting] + waiting
        chosen = self.queue[:K]
        self.queue = self.queue[K:]
        return sorted(chosen)

    def scored(self, n):
        """n clients score theta and send a number back."""
        if self.c.score == "G":
            self.downloads += n
            self.scalars += n

    def estimate_entropy(self, delta_b, rates) -> float:
        """Of the labels, from the way of the output's bias: HiCS."""
        travelled = 0
        velocity = 0
        for eta in rates:  # a gradient of 1 throughout
            velocity = self.c.momentum * velocity + 1 - self.c.mu * travelled
            travelled += eta * velocity
        weights = [math.exp(d / (self.c.temperature * travelled)) for d in delta_b]
        return -sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights)

    def run(self, client_order, data_order) -> tuple[list[dict], torch.Tensor]:
        """The rows of metrics.csv and the last weights of one arm."""
        theta = self.model.init(self.streams.seed("init"))
        ranks = client_order in ("curriculum", "anti", "power-of-choice")
        self.queue = []
        self.u = 0
        self.samples = 0
        self.pool = 6
        self.count = [0] * 6
        self.estimate = [math.inf] * 6
        self.downloads = 0
        self.scalars = 0
        if self.c.score == "E":
            self.downloads = 6 * (ranks or data_order in ("curriculum", "anti"))
            self.scalars = 6 * ranks
        if client_order == "entropy":
            self.scalars = 6
        rows = []
        for t in range(self.c.rounds):
            before = self.downloads if t else 0
            clients = self.select(t, client_order, theta)
            theta, losses = self.train(t, clients, theta, data_order)
            counts = {"round": t + 1, "scorers": self.downloads - before}
            rows.append(counts | self.row(clients, theta, losses))
        return rows, theta

    def train(self, t, clients, theta, order) -> tuple:
        """The next theta, and each client's mean training loss."""
        nets = []
        losses = []
        for m in clients:
            batches = self.batches(m, t, theta, order)
            steps = range(len(batches))
            rates = [self.c.lr * (1 + self.c.lr_alpha * i) ** -self.c.lr_power for i in steps]
            net, trace = self.sgd(theta, batches, rates, self.c.mu)
            nets.append(net)
            losses.append(sum(trace) / len(trace))
            self.samples += sum(map(len, batches))
            if not self.count[m]:
                self.estimate[m] = self.estimate_entropy((net - theta)[-5:].tolist(), rates)
            self.count[m] += 1
        self.u += len(clients)
        sizes = [len(self.shards[m]) for m in clients]
        theta = sum(n / sum(sizes) * net for n, net in zip(sizes, nets, strict=True))
        return theta, losses

    def row(self, clients, theta, losses) -> dict:
        """What metrics.csv has of a round."""
        P = self.model.size
        hits = self.logits(theta, self.x_test).argmax(1) == self.y_test
        means = [self.loss[self.shards[m]].mean() for m in clients]
        inside, between = self.consistency()
        return {
            "trial": 0,
            "clients": len(clients),
            "uploads": self.u,
            "samples": self.samples,
            "received_mb": (self.u + self.downloads) * P * 8 / 1e6,
            "sent_mb": (self.u * P + self.scalars) * 8 / 1e6,
            "pool": self.pool,
            "expert_loss": np.mean(means),
            "inside": inside,
            "between": between,
            "train_loss": np.mean(losses),
            "accuracy": 100 * float(hits.double().mean()),
            "loss": float(self.cross_entropies(theta, self.x_test, self.y_test).mean()),
        }


LITERAL = {
    "seed": 5,
    "rounds": 4,
    "clients_per_round": 2,
    "epochs": 2,
    "batch_size": 4,
    "lr": 0.1,
    "momentum": 0.6,
    "weight_decay": 0.02,
    "mu": 0.7,
    "lr_alpha": 0.3,
    "lr_power": 0.9,
    "expert_epochs": 3,
    "client_a": 0.6,
    "client_b": 0.4,
    "pacing_a": 0.9,
    "pacing_b": 0.15,
    "stratify": True,
    "client_sampling": "pool",
    "pacing": "linear",
    "candidates": 3,
    "temperature": 0.3,
}
EVERY = (*ORDERS, *RIVALS)
SETTINGS = {
    "G": {"score": "G", "f_ord": 0.6, "pacing": "root"},
    "E": {
        "score": "E",
        "f_ord": 0.4,
        "pacing": "exponential",
        "stratify": False,
        "client_sampling": "uniform",
    },
    "quadratic": {
        "score": "G",
        "f_ord": 1.0,
        "pacing": "quadratic",
        "mu": 0.0,
        "client_sampling": "uniform",
    },
    "step": {"score": "G", "f_ord": 0.0, "pacing": "step", "momentum": 0.0, "candidates": 5},
    "linear": {
        "score": "E",
        "f_ord": 0.9,
        "clients_per_round": 3,
        "client_a": 0.2,
        "weight_decay": 0.0,
        "batch_size": 12,
    },
}
ARMS = {
    "G": zip(EVERY, itertools.cycle(("curriculum", "vanilla")), strict=False),
    "E": zip(EVERY, itertools.cycle(("anti", "random")), strict=False),
    "quadratic": [("curriculum", "anti"), ("anti", "curriculum"), ("vanilla", "curriculum")],
    "step": [("curriculum", "random"), ("vanilla", "anti"), ("power-of-choice", "random")],
    "linear": [
        ("coverage", "vanilla"),
        ("hics", "vanilla"),
        ("random", "curriculum"),
        ("anti", "vanilla"),
    ],
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_whole_runs_against_the_transcript(file, setting, tmp_path):
    """Every arm's weights to 1e-9, every column of its rows."""
    flags = LITERAL | SETTINGS[setting]
    literal = Literal(file, flags)
    federation = {"partition": "natural", "clients": 6, "base": "fedprox", "dtype": "float64"}
    for client, data in ARMS[setting]:
        orders = {"client_order": client, "data_order": data}
        known = script_of(client).Config.__dataclass_fields__
        mine = {name: value for name, value in flags.items() if name in known}
        folder = tmp_path / script_of(client).__name__
        rows, state = trained(small(file, **mine, **federation, **orders), folder)
        wanted, theta = literal.run(client, data)
        others = {"setting", "clock", "waiting"}  # whose tests are elsewhere
        assert set(rows[0]) - set(wanted[0]) == others, orders
        for row, by_hand in zip(rows, wanted, strict=True):
            got = {name: row[name] for name in by_hand}
            assert got == pytest.approx(by_hand, rel=1e-9), orders
        assert (state["theta"] - theta).abs().max() < 1e-9, orders


# ------------------------------------------------------------------------------------- Algorithm 2


@pytest.mark.parametrize("f", [0.0, 0.5, 1.0])
def test_algorithm_2_keeps_class_counts_and_what_parts_left_out(f):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, 900)
    shards = partition("dirichlet", labels, 20, 0.2, rng)[3:9]
    losses = np.round(rng.exponential(size=900), 2)  # some are equal
    new = script.reconstitute(shards, labels, losses, f, rng)
    assert np.array_equal(np.sort(np.concatenate(new)), np.sort(np.concatenate(shards)))
    for before, after in zip(shards, new, strict=True):
        assert np.array_equal(np.sort(labels[before]), np.sort(labels[after]))


def test_of_100_samples_0_29_are_29():
    """In doubles 0.29 * 100 is below 29."""
    shards = np.split(np.random.default_rng(0).permutation(200), 2)
    losses = np.arange(200.0)
    first, second = script.reconstitute(
        shards, np.zeros(200, int), losses, 0.29, np.random.default_rng(1)
    )
    assert {*range(29)} <= {*first} and {*range(100, 129)} <= {*second}


# ------------------------------------------------------------------------------ pacing and sorting


@pytest.mark.parametrize("name", ["pacing", "CurriculumBatchSampler", "falling_lr"])
def test_what_is_repeated_is_that_of_fedavg_curriculum(name):
    """So that its tests hold here too."""
    import fedavg_curriculum

    here, there = [inspect.getsource(getattr(m, name)) for m in (script, fedavg_curriculum)]
    assert here == there


# ------------------------------------------------------------------------------------------- rivals


def test_power_of_choice_never_compares_fewer_than_it_trains_nor_more_than_there_are(
    file, tmp_path
):
    for d, asked in ((1, 2), (5, 5), (50, 9)):
        config = small(file, client_order="power-of-choice", candidates=d)
        rows, _ = trained(config, tmp_path)
        assert [row["scorers"] for row in rows] == [asked] * 4


@pytest.mark.parametrize("order", ["curriculum", "power-of-choice"])
def test_under_solo_scoring_downloads_no_net(file, tmp_path, order):
    rows, _ = trained(small(file, client_order=order, base="solo"), tmp_path)
    assert all(row["scorers"] == row["received_mb"] == 0 for row in rows)
    assert rows[-1]["sent_mb"] > 0


# --------------------------------------------------------------------------------------- the expert


def dealt(config, folder) -> tuple:
    """(shards, losses, federation) of Algorithm 2 under this configuration."""
    run = make_run(config, folder)
    losses = script.score_by_expert(config, run.fl, run)
    return script.deal_by_difficulty(config, run.fl, losses), losses, run.fl


def test_an_expert_that_diverged_ranks_nobody(file, tmp_path):
    """NaN losses would be sorted without a word, and every table would stand on that order."""
    with pytest.raises(common.NonFiniteError, match="expert"):
        dealt(small(file, lr=1e6, expert_epochs=3), tmp_path)


def test_an_expert_of_finite_weights_and_infinite_loss_ranks_nobody(file, tmp_path, monkeypatch):
    honest = common.score

    def score(*arguments):
        return [(losses * np.inf, guesses) for losses, guesses in honest(*arguments)]

    monkeypatch.setattr(common, "score", score)
    with pytest.raises(common.NonFiniteError, match="cannot rank"):
        dealt(small(file), tmp_path)


@pytest.mark.parametrize("module", [script, fedavg_curriculum])
def test_the_authors_expert_by_torch(file, tmp_path, module):
    """By torch.optim.SGD with two groups of parameters, and CrossEntropyLoss(label_smoothing)."""
    flags = {"expert_recipe": "authors", "expert_epochs": 3, "dtype": "float64"}
    config = small(file, **flags, weight_decay=0.0, momentum=0.9)
    fl = make_run(config, tmp_path).fl
    literal = Literal(file, vars(config) | {"batch_size": 64})
    start = literal.model.init(literal.streams.seed("central init"))
    body = start[:-425].clone().requires_grad_()  # the last layer has 84 x 5 weights, 5 biases
    head = start[-425:].clone().requires_grad_()
    groups = [{"params": [body], "lr": 0.01}, {"params": [head], "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: (1 + i / 1000) ** -0.75)
    loss = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    for batch in literal.central():
        optimizer.zero_grad()
        logits = literal.logits(torch.cat([body, head]), literal.x[batch])
        loss(logits, literal.y[batch]).backward()
        optimizer.step()
        falling.step()
    theta = module.train_expert(config, fl)
    assert torch.allclose(theta, torch.cat([body, head]).detach(), rtol=1e-9, atol=1e-12)
    assert (theta - start).abs().max() > 0.01


@pytest.mark.parametrize(
    "sweep, experts",
    [
        ({"f_ord": (0.0, 1.0), "score": ("G", "E"), "alpha": (0.5, 2.0)}, 1),
        ({"expert_epochs": (1, 2), "lr": (0.01, 0.02)}, 4),
        ({"expert_recipe": ("clients", "authors")}, 2),
        ({"base": ("fedavg", "moon")}, 2),
    ],
)
def test_one_expert_serves_all_settings_of_a_trial(file, tmp_path, monkeypatch, sweep, experts):
    made = []
    honest = common.Federation.train_centrally

    def train_centrally(fl, epochs, **changes):
        made.append(epochs)
        return honest(fl, epochs, **changes)

    monkeypatch.setattr(common.Federation, "train_centrally", train_centrally)
    for values in itertools.product(*sweep.values()):
        dealt(small(file, **dict(zip(sweep, values, strict=True))), tmp_path)
    assert len(made) == experts


# --------------------------------------------------------------------------------------- whole arms


@pytest.mark.parametrize("base, nets", [("moon", 1), ("solo", 9)])
def test_bases_with_nets_of_their_own(file, tmp_path, monkeypatch, base, nets):
    """SOLO's clients are scored by the net of each; MOON's projection head is the expert's too."""
    scored = []
    honest = common.score

    def score(model, theta, *arguments):
        scored.append(theta.reshape(-1, model.size))
        return honest(model, theta, *arguments)

    monkeypatch.setattr(common, "score", score)
    rows, _ = trained(small(file, base=base, rounds=3), tmp_path)
    assert len(rows) == 3
    assert len(scored[-1]) == nets
    if base == "solo":  # who trained is scored by what it trained
        assert (scored[-1] != scored[1]).any(1).sum() >= 2


# ------------------------------------------------------------------------------------- command line


def read_csv(path) -> list[dict]:
    with path.open() as lines:
        return list(csv.DictReader(lines))


FEW = "--clients 6 --clients-per-round 3 --rounds 2 --trials 2 --jobs 1 --batch-size 4"
FEW += " --partition iid"


def test_command_line_prints_gains_and_consistency(file, tmp_path, capsys):
    """A_o and its Student interval by hand; the figures are there."""
    flags = f"{FEW} --epochs 4 --expert-epochs 5 --dataset {file} --out {tmp_path}"
    script.main(shlex.split(flags))
    printed = capsys.readouterr().out
    rows = read_csv(tmp_path / "metrics.csv")
    assert len(rows) == 4 * 2 * 2
    finals = {}
    for row in rows:
        if row["round"] == "2":
            finals.setdefault(row["method"], []).append(float(row["accuracy"]))
            assert row["uploads"] == "6"
    assert set(finals) == {"client+data", "client", "data", "vanilla"}
    A_o = np.array(finals["client"]) - np.array(finals["vanilla"])
    half = 12.7062047 * A_o.std(ddof=1) / math.sqrt(2)
    wanted = f"client {A_o.mean():+.2f} [{A_o.mean() - half:+.2f}, {A_o.mean() + half:+.2f}]"
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert wanted in lines
    table = read_csv(tmp_path / "consistency.csv")
    assert [line["trial"] for line in table] == ["0", "1"]
    for line in table:
        of_trial = [row for row in rows if row["trial"] == line["trial"]]
        for name in ("inside", "between"):
            assert {row[name] for row in of_trial} == {line[name]}
    assert (tmp_path / "accuracy.png").stat().st_size > 5000


def test_a_sweep_shows_the_consistency_of_every_setting(file, tmp_path):
    """Vanilla does not read --score: trained once for G and E, it has the data of its f_ord."""
    sweep = "--client-order vanilla curriculum --data-order vanilla --score G E --f-ord 0 1"
    flags = f"{FEW} {sweep} --rounds 1 --epochs 1 --expert-epochs 9 --dataset {file}"
    script.main([*shlex.split(flags), "--out", str(tmp_path)])
    rows = {}
    for row in read_csv(tmp_path / "consistency.csv"):
        rows[row.pop("setting"), row.pop("trial")] = row
    assert len(rows) == 8
    for (setting, trial), row in rows.items():
        assert row == rows[setting.replace("score=G", "score=E"), trial]
        dealt = rows[setting.replace("f_ord=0.0", "f_ord=1.0"), trial]
        assert float(row["between"]) <= float(dealt["between"])
        assert float(row["inside"]) >= float(dealt["inside"])


def test_rivals_draw_the_clients_before_and_after_algorithm_2(file, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = {}
    honest = Figure.savefig

    def savefig(figure, path, **options):
        figures[path.name] = figure
        honest(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    flags = f"{FEW} --client-order random coverage --expert-epochs 5 --dataset {file}"
    rivals.main([*shlex.split(flags), "--out", str(tmp_path)])
    config = small(file, clients=6, partition="iid", expert_epochs=5, min_size=1)
    shards, losses, fl = dealt(config, tmp_path / "again")
    for axis, of_clients in zip(figures["clients.png"].axes, (fl.shards, shards), strict=True):
        dots, _, [bars] = axis.containers[0]
        means = np.array([losses[shard].mean() for shard in of_clients])
        stds = np.array([losses[shard].std() for shard in of_clients])
        assert dots.get_ydata() == pytest.approx(means, rel=1e-12)
        ends = np.array([segment[:, 1] for segment in bars.get_segments()])
        assert ends[:, 1] == pytest.approx(means + stds)
        assert ends[:, 0] == pytest.approx(np.maximum(means - stds, 0))
