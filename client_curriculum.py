"""python client_curriculum.py --client-order curriculum vanilla --data-order curriculum vanilla --f-ord 1

The client curriculum of "When Do Curricula Work in Federated Learning?" (Vahidian et al., ICCV 2023), Sections 4.1 to 4.5:
clients are ranked by their mean loss, the first K of them form a pool, and K grows from b M to M as the budget of client
updates is spent. Inside a client the data curriculum (Algorithm 1) may act too; the two make a 2x2. Algorithm 2 first
deals the data so that some clients are easy and some are hard, without touching any client's class counts.

What differs from the paper, and why:
- Algorithm 2 reads from exclusive offsets: the printed inclusive cumsum shifts every client by one block and overruns the
  last. f = 0 is allowed, as the paper uses it. On IID its figure of .01 needs a sort that ignores classes: --no-stratify.
- Every round aggregates m clients. Where the pool leaves fewer, they begin the next mini-batch and the re-scored pool fills
  it up. Cut raggedly, the paper's setting would take 109 rounds instead of 100 and be tested after one of 3 clients.
- All arms, `vanilla` too, run on the same partition, and `random` is a random order of *clients* (of samples, for the data).
- The pacing functions are the corrected ones: as printed (Table 5) linear, quadratic and root miss N, step overshoots it
  and the exponential collapses to N. Clients and samples are sorted by loss, the printed score 1/loss from the other end.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch

import common
from common import opt

ORDERS = ("curriculum", "anti", "random", "vanilla")
PACINGS = ("linear", "quadratic", "root", "step", "exponential")


@dataclass
class Config(common.Config):
    """Common flags with this script's defaults, then the curricula's own."""

    alpha: float = 0.2
    clients: int = 20
    clients_per_round: int = 4
    rounds: int = 20
    epochs: int = 3
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4

    client_order: tuple = opt(
        ("curriculum", "vanilla"), "orders of the clients: easy first, hard first, random, no pacing", choices=ORDERS, many=True
    )
    data_order: tuple = opt(
        ("curriculum", "vanilla"), "orders of a client's samples; every pair of orders is an arm", choices=ORDERS, many=True
    )
    score: str = opt("G", "difficulty: loss of the global (G) or of a central expert model (E, an oracle)", choices=("G", "E"))
    f_ord: float = opt(1.0, "fraction of the samples dealt by difficulty (0: none, clients are alike)", low=0, high=1)
    stratify: bool = opt(True, "deal by difficulty within each class, so that class counts stay (off: over all samples)")
    expert_epochs: int = opt(2, "central epochs of the expert that deals the data, and scores under E", low=1, high=1000)
    client_sampling: str = opt("pool", "vanilla clients: all in turn, or drawn anew every round", choices=("pool", "uniform"))
    pacing: str = opt("linear", "shape of both pacing functions", choices=PACINGS)
    client_a: float = opt(0.8, "fraction of the budget until all clients are in (0: at once)", low=0, high=1e6)
    client_b: float = opt(0.2, "fraction of the clients at first (1: all)", low=0, high=1)
    pacing_a: float = opt(0.8, "fraction of the local steps until all samples are in (0: at once)", low=0, high=1e6)
    pacing_b: float = opt(0.2, "fraction of the samples at the first step (1: all)", low=0, high=1)
    lr_alpha: float = opt(0.0, "alpha of eta_i = eta (1 + alpha i)^-p over local steps (0: constant)", low=0)
    lr_power: float = opt(0.75, "p of eta_i (0: constant)", low=0)


def name(client_order: str, data_order: str) -> str:
    """An arm's name: 'client' and 'data' are curricula, other orders are spelt out, 'vanilla' is neither."""
    parts = [("client", client_order), ("data", data_order)]
    return "+".join(f"{who}-{o}".removesuffix("-curriculum") for who, o in parts if o != "vanilla") or "vanilla"


ARMS = {name(client, data): (client, data) for client in ORDERS for data in ORDERS}


def methods(config: Config) -> list[str]:
    """The arms of a comparison: every client order with every data order."""
    return list(dict.fromkeys(name(client, data) for client in config.client_order for data in config.data_order))


# --------------------------------------------------------------------------------------------- the difficulty partition


def reconstitute(shards, labels, loss, f: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Algorithm 2: client i gets the first floor(f N_ic) samples of its block of pi_c, the rest of class c at random.

    shards: disjoint index arrays, one per client; labels, loss (n,) of every sample. Returns shards with the same class
    counts N_ic for every f. All labels equal: a sort over all samples that keeps only the clients' sizes.
    """
    dealt = [[] for _ in shards]
    everyone = np.sort(np.concatenate(shards))
    for c in np.unique(labels[everyone]):
        pi_c = everyone[labels[everyone] == c]
        pi_c = pi_c[np.argsort(loss[pi_c], kind="stable")]  # easy first
        N = np.array([(labels[shard] == c).sum() for shard in shards])  # N_ic
        first = np.floor(f * N + 1e-9).astype(int)  # 1e-9: .29 of 100 is 29, not 28
        ordered = [pi_c[o : o + k] for o, k in zip(np.cumsum(N) - N, first, strict=True)]  # o_ic = sum_{j < i} N_jc
        left = rng.permutation(np.setdiff1d(pi_c, np.concatenate(ordered)))
        rest = np.split(left, np.cumsum(N - first)[:-1])
        for own, *parts in zip(dealt, ordered, rest, strict=True):
            own += parts
    return [np.sort(np.concatenate(own)) for own in dealt]


def difficulty(shards, loss) -> np.ndarray:
    """(M, 2): mean and standard deviation of the expert's loss, in nats, inside each client (Section 4.1)."""
    return np.array([[loss[shard].mean(), loss[shard].std()] for shard in shards])


def consistency(clients: np.ndarray) -> tuple[float, float]:
    """(inside, between) of difficulty (M, 2): the mean over clients of the std inside, and the std of the clients' means.

    The paper's figure is `inside` of the raw loss: that of a score normalised to sum 1 could not exceed 1/sqrt(n).
    """
    return float(clients[:, 1].mean()), float(clients[:, 0].std())


# -------------------------------------------------------------------------- the data curriculum, as in Algorithm 1


def pacing(family: str, t: np.ndarray, T: int, N: int, a: float, b: float) -> np.ndarray:
    """g(t), the number of admitted samples (clients) at t (any shape), in [1, N]. Supplement Table 5, corrected."""
    if a == 0 or b >= 1:
        return np.full(np.shape(t), N)
    x = np.minimum(np.asarray(t) / (a * T), 1)
    share = {
        "linear": x,
        "quadratic": x**2,
        "root": np.sqrt(x),
        "step": np.floor(x + 1e-9),
        "exponential": np.expm1(10 * x) / np.expm1(10),
    }[family]
    return np.clip(np.floor(N * b + N * (1 - b) * share + 1e-9).astype(int), 1, N)


def sort(items: np.ndarray, loss: np.ndarray | None, order: str, rng: np.random.Generator) -> np.ndarray:
    """Samples of a client, or clients, in the order in which they are admitted. A seeded permutation breaks ties."""
    shuffled = rng.permutation(len(items))
    if order in ("random", "vanilla"):
        return items[shuffled]
    signed = loss[shuffled] * (1 if order == "curriculum" else -1)
    return items[shuffled[np.argsort(signed, kind="stable")]]


def paced_batches(ordered: np.ndarray, g: np.ndarray, batch_size: int, rng: np.random.Generator) -> np.ndarray:
    """The index schedule (T, B) of one client: step t draws from the first g[t] samples, until they are used up."""
    batches = np.full((len(g), batch_size), -1, dtype=np.int64)
    queue = np.empty(0, dtype=np.int64)
    for t, size in enumerate(g):
        if len(queue) == 0:
            queue = rng.permutation(np.sort(ordered[:size]))  # sorted: only who is admitted matters
        batch, queue = queue[:batch_size], queue[batch_size:]
        batches[t, : len(batch)] = batch
    return batches


def schedule(config, order, shard, loss, streams, t, m) -> np.ndarray:
    """The samples of client m in round t: T = E ceil(N/B) steps, whatever the order."""
    N = len(shard)
    T = config.epochs * -(-N // config.batch_size)
    g = pacing(config.pacing, np.arange(T), T, N, config.pacing_a, 1 if order == "vanilla" else config.pacing_b)
    return paced_batches(sort(shard, loss, order, streams("ties", t, m)), g, config.batch_size, streams("batches", t, m))


# ------------------------------------------------------------------------------------------------ the client curriculum


def pool_size(config: Config, order: str, u: int) -> int:
    """K = g(u) of M clients after u of the budget's U = rounds * m updates, and never fewer than one mini-batch."""
    U = config.rounds * config.clients_per_round
    b = 1 if order == "vanilla" else config.client_b
    return max(int(pacing(config.pacing, u, U, config.clients, config.client_a, b)), config.clients_per_round)


def refill(queue: np.ndarray, ranked: np.ndarray, K: int, rng: np.random.Generator) -> np.ndarray:
    """The clients still waiting, then the first K of `ranked`, shuffled, who waits last: no mini-batch holds anybody twice."""
    pool = rng.permutation(np.sort(ranked[:K]))
    waiting = np.isin(pool, queue)
    return np.concatenate([queue, pool[~waiting], pool[waiting]])


def client_losses(config, model, theta_g, expert_loss, data, shards) -> np.ndarray:
    """L_m (M,), the mean loss over all of client m's samples (Eq. 1). theta_g (P,), or (M, P) where models stay apart."""
    if config.score == "E":
        return np.array([expert_loss[shard].mean() for shard in shards])
    return np.array([loss.mean() for loss, _ in common.score(model, theta_g, data, shards, config.chunk)])


def select(config: Config, order: str, state: dict, score, streams: common.Streams, t: int) -> np.ndarray:
    """The mini-batch of m clients of round t. `state` keeps the queue, the pool's size K and what scoring cost."""
    m, M = config.clients_per_round, config.clients
    if order == "vanilla" and config.client_sampling == "uniform":
        return common.select(config, m, streams, t)
    queue = np.array(state["queue"], dtype=np.int64)
    if len(queue) < m:  # the pool is exhausted: rank all clients anew
        loss = score() if order in ("curriculum", "anti") else None
        if loss is not None and config.score == "G":  # all clients download theta_g and send one number back
            state["downloads"], state["scalars"] = state["downloads"] + M, state["scalars"] + M
        ranked = sort(np.arange(M), loss, order, streams("client ties", t))
        state["pool"] = pool_size(config, order, state["updates"])
        queue = refill(queue, ranked, state["pool"], streams("pool", t))
    state["queue"] = queue[m:].tolist()
    return np.sort(queue[:m])


# ---------------------------------------------------------------------------------------------------------- the rounds


def deal(config, model, data, run) -> tuple[list[np.ndarray], np.ndarray, torch.Tensor]:
    """The trial's clients after Algorithm 2, the expert's loss of every sample (n,), and difficulty before, after (2, M, 2)."""
    base = common.client_shards(config, data, run.streams)
    shared = common.Run(config, run.method, "", run.trial, run.folder)  # no preset sweeps what the expert depends on
    expert = shared.cached("expert", lambda: common.train_centrally(model, data, config.expert_epochs, config, run.streams))
    [(loss, _)] = common.score(model, expert, data, [np.arange(len(data.y_train))], config.chunk)
    if not np.isfinite(loss).all():
        raise common.NonFiniteError("the expert's loss is not finite, so it cannot rank the samples. Try a smaller --lr")
    labels = data.y_train.cpu().numpy() if config.stratify else np.zeros(len(loss), dtype=np.int64)
    shards = reconstitute(base, labels, loss, config.f_ord, run.streams("difficulty"))
    return shards, loss, torch.from_numpy(np.stack([difficulty(base, loss), difficulty(shards, loss)]))


def federate(config: Config, data: common.Data, run: common.Run) -> None:
    """Client order x data order of the arm `run.method`, on the difficulty partition."""
    client_order, data_order = ARMS[run.method]
    streams, M = run.streams, config.clients
    _, device, dtype = common.setting_up(config)
    model = common.build_model(config.model, data, device, dtype, config.width, projection=config.base == "moon")
    shards, expert_loss, table = deal(config, model, data, run)
    sizes = np.array([len(shard) for shard in shards])
    base = common.BASES[config.base](config, model, M)
    longest = config.epochs * -(-sizes.max() // config.batch_size)
    eta = config.lr * (1 + config.lr_alpha * np.arange(longest)) ** -config.lr_power  # reset in every round

    state = {"weights": model.init(streams.seed("init")), "base": base.state, "difficulty": table}
    state |= {"queue": [], "pool": M, "updates": 0, "downloads": 0, "scalars": 0}
    ranks, sorts = (order in ("curriculum", "anti") for order in ARMS[run.method])
    if config.score == "E" and (ranks or sorts):  # the expert is sent once; its scores never change
        state |= {"downloads": M, "scalars": M * ranks}
    for t in run.rounds(state):
        theta_g = state["weights"]
        score = functools.partial(client_losses, config, model, base.start(theta_g, np.arange(M)), expert_loss, data, shards)
        clients = select(config, client_order, state, score, streams, t)
        start = base.start(theta_g, clients)
        own = [shards[m] for m in clients]
        losses = [expert_loss[shard] for shard in own]
        hardness = float(np.mean([loss.mean() for loss in losses]))
        if sorts and config.score == "G":
            losses = [loss for loss, _ in common.score(model, start, data, own, config.chunk)]
        batches = [schedule(config, data_order, s, key, streams, t, m) for s, key, m in zip(own, losses, clients, strict=True)]
        update = common.train(
            model,
            start,
            data,
            batches,
            lr=eta,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            chunk=config.chunk,
            seeds=[streams.seed("dropout", t, m) for m in clients],
            **base.client(theta_g, clients),
        )
        state["updates"] += len(clients)
        clients, update = run.finite(t, clients, update)
        state["weights"] = base.aggregate(theta_g, update, clients, sizes[clients])  # theta_g^{t+1}
        tested = common.evaluate(model, base.models(state["weights"]), data) if run.due(t) else {}
        columns = {"pool": state["pool"], "expert_loss": hardness, "train_loss": float(update.loss.mean())}
        columns |= {"scoring_downloads": state["downloads"], "scoring_scalars": state["scalars"]}
        run.record(t, clients=len(clients), **tested, **columns)


# --------------------------------------------------------------------------------------- tables, figure, presets, main


def dealt(rows, config, folder) -> dict[tuple[str, int], np.ndarray]:
    """{(setting, trial): difficulty before and after Algorithm 2 (2, M, 2)}, read back from one arm's checkpoint each."""
    arms = {(row["setting"], row["trial"]): row["method"] for row in rows}
    paths = {key: common.Run(config, method, *key, folder).path for key, method in arms.items()}
    return {key: common.load_checkpoint(path)["state"]["difficulty"].numpy() for key, path in paths.items()}


def report_consistency(tables, config, folder) -> None:
    """Prints the std of the expert's loss inside and between clients, mean +- std over trials; writes consistency.csv."""
    columns = ("inside_before", "inside", "between_before", "between")
    figures = {key: np.transpose([consistency(when) for when in table]).ravel() for key, table in tables.items()}
    rows = [{"setting": s, "trial": k} | dict(zip(columns, f.tolist(), strict=True)) for (s, k), f in figures.items()]
    common.write_csv(folder / "consistency.csv", rows)
    print("\nstd of the expert's loss   inside clients: before, after Algorithm 2   between their means: before, after")
    for setting in dict.fromkeys(s for s, _ in tables):
        spreads = [common.spread(v) for v in np.transpose([f for (s, _), f in figures.items() if s == setting])]
        shown = "".join(f"{s['mean']:>12.3f} +- {s['std']:.3f}" for s in spreads)
        print(f"{setting or f'f_ord={config.f_ord}':<20}{shown}")
    if "cifar10" in config.dataset and "cifar100" not in config.dataset:
        print("paper, inside, f_ord 0 and 1 (CIFAR-10, 100 clients): IID .52 .01, Dir(.2) .51 .14, Dir(.05) .50 .13")


def report_orders(rows, config) -> None:
    """Prints final accuracy, mean +- std over trials, as client orders (rows) by data orders: Fig 7's 2x2."""
    columns = "".join(f"{order:>16}" for order in config.data_order)
    for setting in dict.fromkeys(row["setting"] for row in rows):
        print(f"\n{setting or config.dataset}: final accuracy (%)\n{'clients, data:':<16}{columns}")
        for client in config.client_order:
            finals = [common.spread(common.per_trial(rows, setting, name(client, o))["final"]) for o in config.data_order]
            print(f"{client:<16}" + "".join(f"{f['mean']:>9.2f} +- {f['std']:.2f}".rjust(16) for f in finals))


def figure(rows, config, folder) -> None:
    """The tables, and clients.png: each client's difficulty before and after Algorithm 2, and who is trained when."""
    report_orders(rows, config)
    tables = dealt(rows, config, folder)
    report_consistency(tables, config, folder)
    (setting, _), table = next(iter(tables.items()))
    fig, axes = common.new_figure(3)
    for axis, title, (mean, std) in zip(axes[0], ("before", "after"), table.transpose(0, 2, 1), strict=False):
        inside, between = consistency(np.stack([mean, std], 1))
        bars = np.stack([np.minimum(std, mean), std])  # a loss is never negative
        axis.errorbar(np.arange(len(mean)), mean, bars, fmt="o", markersize=3, elinewidth=0.8, color=common.COLOURS[0])
        axis.set(xlabel="client", title=f"{title} Algorithm 2: std {inside:.2f} inside, {between:.2f} between")
    axes[0, 0].set(ylabel="expert's loss (nats), mean +- std")
    axes[0, 1].sharey(axes[0, 0])
    common.draw(axes[0, 2], rows, setting, [name(o, config.data_order[-1]) for o in config.client_order], "expert_loss")
    axes[0, 2].set(title="difficulty of a round's clients", xlabel="round", ylabel="expert's loss (nats)")
    axes[0, 2].legend()
    for axis in axes[0]:
        axis.locator_params("x", integer=True)
    common.save_figure(fig, folder / "clients.png")


CIFAR10 = {"dataset": "cifar10", "clients": 100, "clients_per_round": 10, "rounds": 100, "epochs": 10, "batch_size": 10}
CIFAR10 |= {"lr": 0.001, "lr_alpha": 0.001, "lr_power": 0.75, "momentum": 0.9, "weight_decay": 5e-4, "expert_epochs": 20}
IID = {"partition": "iid", "stratify": False}
DATA = CIFAR10 | {"client_order": ("vanilla",), "data_order": ORDERS}
CLIENTS = CIFAR10 | {"client_order": ORDERS, "data_order": ("vanilla",), "f_ord": 1.0}
PACED, ENDS, BETAS, SCORES = ("curriculum", "random"), {"f_ord": (0.0, 1.0)}, {"alpha": (0.2, 0.05)}, {"score": ("G", "E")}
ALONE = CIFAR10 | {"client_order": ("vanilla",), "data_order": ("vanilla",), "rounds": 1, "epochs": 1}
PRESETS = {
    "consistency": ("std of the expert's loss inside clients, by beta and f_ord", ALONE, BETAS | ENDS),
    "consistency-iid": ("the same on IID, sorted over all classes", ALONE | IID, ENDS),
    "fig4": ("data curriculum at low and high consistency", DATA | {"score": "E"}, BETAS | ENDS),
    "fig4-iid": ("the same on IID", DATA | {"score": "E"} | IID, ENDS),
    "fig5": ("client curriculum at high consistency", CLIENTS, BETAS),
    "fig5-iid": ("the same on IID", CLIENTS | IID, {}),
    "fig6-clients": ("client curriculum: expert and global score", CLIENTS | {"client_order": PACED}, BETAS | SCORES),
    "fig6-data": ("data curriculum: expert and global score", DATA | {"data_order": PACED, "f_ord": 0.0}, BETAS | SCORES),
    "fig7": ("client x data curriculum, FedProx", CIFAR10 | {"base": "fedprox", "score": "E", "f_ord": 0.9}, {}),
}


def main(argv=None) -> None:
    """The command line; `argv` stands in for it in tests."""
    common.launch(Config, PRESETS, __doc__, methods, federate, figure, argv=argv)


if __name__ == "__main__":
    main()
