"""python client_curriculum.py --client-order curriculum vanilla --data-order curriculum vanilla --f-ord 1

The client curriculum of "When Do Curricula Work in Federated Learning?" (Vahidian et al., ICCV 2023), Sections 4.1 to 4.5:
clients are ranked by their mean loss, the first g(u) of M form a pool, and g grows from b M (--client-b) to M at u = a U
(--client-a), u being the updates so far and U rounds times K clients a round. Inside a client the data curriculum (Algorithm 1)
may act too: a 2x2. Algorithm 2 first deals the data so that some clients are easy and some hard, class counts as they were.

What differs from the paper, and why:
- Algorithm 2 reads from exclusive offsets: the printed inclusive cumsum shifts every client by one block and overruns the
  last. f (--f-ord) may be 0, as in the paper. The paper's std of the loss inside a client on IID, .01, needs --no-stratify.
- Every round aggregates K clients. Where the pool leaves fewer, they begin the next round's and the re-scored pool fills
  them up. Left short, the paper's setting would take 109 rounds instead of 100 and be tested after one of 3 clients.
- All arms, `vanilla` too, run on the same partition, and `random` is a random order of *clients* (of samples, for the data).
- The pacing functions are the corrected ones: as printed (Table 5) linear, quadratic and root end at N + (N - 1) b, step at
  N + N b, the exponential is N at once. Clients and samples are sorted by loss, the printed score 1/loss from the other end.
- Every step trains min(B, N) samples: where a pass over the admitted samples ends inside a batch, the next pass fills it up.

Rivals that choose clients at equal uploads, none of them the paper's: `power-of-choice` (Cho et al., 2022), `entropy` of the
client's labels, most balanced first (an oracle), `hics`, the same estimated from the client's first update (Chen and Vikalo,
2024, without clusters of clients), and `coverage`, least trained first. All but the first are paced by the same pool.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

import common
import experiment
from experiment import flag

SIGN = {"curriculum": 1, "anti": -1}  # of the loss: easy first, hard first
ORDERS = (*SIGN, "random", "vanilla")
BY_LOSS = SIGN | {"power-of-choice": -1}  # orders of clients that ask for their mean losses
RIVALS = ("power-of-choice", "entropy", "hics", "coverage")


@dataclass
class Config(experiment.Config):
    """Common flags with this script's defaults, then the curricula's own."""

    alpha: float = 0.2
    clients: int = 20
    clients_per_round: int = 4
    rounds: int = 50
    epochs: int = 1
    momentum: float = 0.9
    weight_decay: float = 5e-4

    client_order: str = flag(
        ("curriculum", "vanilla"),
        "clients: easy first, hard first, random, no pacing, highest loss of some (power-of-choice), most even labels first "
        "(entropy: an oracle; hics: estimated), least trained first (coverage)",
        choices=ORDERS + RIVALS,
    )
    data_order: str = flag(("curriculum", "vanilla"), "of a client's samples; every pair of orders is an arm", choices=ORDERS)
    score: str = flag("G", "difficulty: loss of the global (G) or of a central expert model (E, an oracle)", choices=("G", "E"))
    f_ord: float = flag(1.0, "fraction of the samples dealt by difficulty (0: none, clients are alike)", 0, 1)
    stratify: bool = flag(True, "deal by difficulty within each class, so that class counts stay (off: only sizes do)")
    expert_epochs: int = flag(2, "central epochs of the expert that deals the data, and scores under E", 1, 1000)
    client_sampling: str = flag("pool", "vanilla clients: all in turn, or drawn anew every round", choices=("pool", "uniform"))
    pacing: str = flag("linear", "of both pacings", choices=("linear", "quadratic", "root", "step", "exponential"))
    client_a: float = flag(0.8, "fraction of the budget until all clients are in (0: at once)", 0, 1e6)
    client_b: float = flag(0.2, "fraction of the clients at first (1: all)", 0, 1)
    pacing_a: float = flag(0.8, "fraction of the local steps until all samples are in (0: at once)", 0, 1e6)
    pacing_b: float = flag(0.2, "fraction of the samples at the first step (1: all)", 0, 1)
    lr_alpha: float = flag(0.0, "alpha of eta_i = eta (1 + alpha i)^-p, i counting a round's steps (0: constant)", 0)
    lr_power: float = flag(0.75, "p of eta_i (0: constant)", 0)
    candidates: int = flag(8, "d of power-of-choice: so many compare their losses (never fewer than a round's)", 1, 10**6)
    temperature: float = flag(0.5, "T of hics, per unit of the distance that a unit gradient would carry the client", above=0)

    def federation(self, data: common.Data, streams: common.Streams) -> common.Federation:
        fl = super().federation(data, streams)
        if self.client_order == "hics" and [*fl.model.parameters.values()][-1].shape != (data.classes,):
            raise common.UsageError(f"--client-order hics: --model {self.model} does not end with the bias of its output layer")
        return fl


def name(config: Config) -> str:
    """An arm's name: 'client' and 'data' are curricula, other orders are spelt out, 'vanilla' is neither."""
    parts = [("client", config.client_order), ("data", config.data_order)]
    return "+".join(f"{who}-{o}".removesuffix("-curriculum") for who, o in parts if o != "vanilla") or "vanilla"


def unread(config: Config) -> list[str]:
    """The flags without effect on this arm: where they are swept it is trained once and shown in every setting."""
    order, paced = config.client_order, config.data_order != "vanilla"
    pooled = order not in ("vanilla", "power-of-choice")
    read = {"score": config.data_order in SIGN or order in BY_LOSS, "lr_power": config.lr_alpha > 0}
    read |= {"client_a": pooled, "client_b": pooled, "pacing_a": paced, "pacing_b": paced, "pacing": pooled or paced}
    read |= {"client_sampling": order == "vanilla", "candidates": order == "power-of-choice", "temperature": order == "hics"}
    return [*common.BASES[config.base].unread, *(option for option, effective in read.items() if not effective)]


# --------------------------------------------------------------------------------------------- the difficulty partition


def reconstitute(shards, labels, loss, f: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Algorithm 2: client i gets the first floor(f N_ic) samples of its block of pi_c, the rest of class c at random.

    shards: disjoint index arrays, one per client; labels, loss (n,) of every sample. Returns shards with the same class
    counts N_ic for every f. If all labels are equal it sorts all samples and keeps only the clients' sizes.
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
        for own, block, others in zip(dealt, ordered, rest, strict=True):
            own += [block, others]
    return [np.sort(np.concatenate(own)) for own in dealt]


def difficulty(shards, loss) -> np.ndarray:
    """(M, 2): mean and standard deviation of the expert's loss, in nats, inside each client (Section 4.1)."""
    return np.array([[loss[shard].mean(), loss[shard].std()] for shard in shards])


def consistency(clients: np.ndarray) -> tuple[float, float]:
    """(inside, between) of difficulty (M, 2): mean over clients of the std inside (the paper's), std of the clients' means."""
    return float(clients[:, 1].mean()), float(clients[:, 0].std())


def deal(config: Config, fl: common.Federation, run: experiment.Run) -> tuple[np.ndarray, torch.Tensor]:
    """Deals fl's clients anew by Algorithm 2. Returns the expert's losses (n,), and difficulty before and after (2, M, 2).
    Raises NonFiniteError where the expert diverged.
    """
    untuned = run.other(hold_out=config.hold_out)  # with the flags as typed, not as --tune chose them: all are dealt the same
    central = untuned.config.federation(fl.data, run.streams)
    expert = untuned.cached("expert", lambda: central.train_centrally(config.expert_epochs), "expert_epochs")
    [(loss, _)] = common.score(central.model, expert, fl.data, [np.arange(len(fl.data.y_train))], config.chunk)
    if not np.isfinite(loss).all():
        raise common.NonFiniteError("the expert's loss is not finite, so it cannot rank the samples. Try a smaller --lr")
    labels = fl.data.y_train.cpu().numpy() if config.stratify else np.zeros(len(loss), dtype=np.int64)
    before, fl.shards = fl.shards, reconstitute(fl.shards, labels, loss, config.f_ord, run.streams("difficulty"))
    return loss, torch.from_numpy(np.stack([difficulty(before, loss), difficulty(fl.shards, loss)]))


# ---------------------------------------------------------------------------------- the data curriculum, as in Algorithm 1


def pacing(family: str, t: np.ndarray, T: int, N: int, a: float, b: float) -> np.ndarray:
    """g(t), the number of admitted samples (clients) at t (any shape), in [1, N]. Supplement Table 5, corrected."""
    x = np.minimum(np.asarray(t) / (a * T), 1) if a else np.ones(np.shape(t))
    shapes = {"linear": x, "quadratic": x**2, "root": np.sqrt(x), "step": np.floor(x + 1e-9)}
    shapes["exponential"] = np.expm1(10 * x) / np.expm1(10)
    return np.clip(np.floor(N * b + N * (1 - b) * shapes[family] + 1e-9).astype(int), 1, N)  # 1e-9: 399, not 398.99...


def sort(items: np.ndarray, keys: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
    """A client's samples, or clients, by ascending key (n,). A seeded permutation breaks ties; without keys it is the order."""
    shuffled = rng.permutation(len(items))
    return items[shuffled if keys is None else shuffled[np.argsort(keys[shuffled], kind="stable")]]


def paced_batches(ordered: np.ndarray, g: np.ndarray, batch_size: int, rng: np.random.Generator) -> np.ndarray:
    """The index schedule (T, B) of one client: a step draws min(B, N) samples from passes over the first g[step]. When
    a pass is used up, the prefix of that step is read anew and fills the batch, so that all orders train equally many samples.
    """
    batches, queue = np.full((len(g), batch_size), -1, dtype=np.int64), ordered[:0]
    B = min(batch_size, len(ordered))
    for step, size in enumerate(g):
        while len(queue) < B:
            queue = np.concatenate([queue, rng.permutation(np.sort(ordered[:size]))])  # sorted: only who is admitted matters
        batches[step, :B], queue = queue[:B], queue[B:]
    return batches


def schedule(config: Config, shard, loss, streams: common.Streams, t: int, m: int) -> np.ndarray:
    """The samples (T, B) of client m in round t: T = E ceil(N/B) steps, whatever the order."""
    order, T = config.data_order, config.epochs * -(-len(shard) // config.batch_size)
    g = pacing(config.pacing, np.arange(T), T, len(shard), config.pacing_a, 1 if order == "vanilla" else config.pacing_b)
    ordered = sort(shard, SIGN[order] * loss if order in SIGN else None, streams("ties", t, m))
    return paced_batches(ordered, g, config.batch_size, streams("batches", t, m))


# ------------------------------------------------------------------------------------------------ the client curriculum


def pool_size(config: Config, u: int) -> int:
    """g(u), how many of M clients are in after u of the budget's U = rounds * K updates; never fewer than K."""
    U = config.rounds * config.clients_per_round
    b = 1 if config.client_order == "vanilla" else config.client_b
    return max(int(pacing(config.pacing, u, U, config.clients, config.client_a, b)), config.clients_per_round)


def refill(queue: np.ndarray, pool: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The clients still waiting, then the pool, shuffled, with the waiting last: no round holds one twice."""
    shuffled = rng.permutation(np.sort(pool))
    waiting = np.isin(shuffled, queue)
    return np.concatenate([queue, shuffled[~waiting], shuffled[waiting]])


def select(config: Config, fl: common.Federation, state: dict, keys_of, t: int) -> np.ndarray:
    """Round t's K clients. `keys_of(clients)` ranks them, ascending; `state` keeps the queue and the pool's size g(u)."""
    K, streams = config.clients_per_round, fl.streams
    if config.client_order == "vanilla" and config.client_sampling == "uniform":
        return fl.select(t, K)
    if config.client_order == "power-of-choice":
        d = min(max(config.candidates, K), config.clients)
        drawn = streams("candidates", t).choice(config.clients, d, replace=False, p=fl.sizes / fl.sizes.sum())
        return np.sort(sort(drawn, keys_of(drawn), streams("client ties", t))[:K])
    queue = np.array(state["queue"], dtype=np.int64)
    if len(queue) < K:  # the pool is exhausted: rank all clients anew
        ranked = sort(fl.everyone, keys_of(fl.everyone), streams("client ties", t))
        state["pool"] = pool_size(config, state["updates"])
        queue = refill(queue, ranked[: state["pool"]], streams("pool", t))
    state["queue"] = queue[K:].tolist()
    return np.sort(queue[:K])


def estimated_entropy(fl: common.Federation, start: torch.Tensor, update: common.Update, temperature: float) -> torch.Tensor:
    """(K,) float64: H(softmax(Delta b / T)) of HiCS-FL, Delta b the update of the output layer's bias: frequent labels pull
    theirs up. T is `temperature` times the distance that a unit gradient would have carried the client (update.length), so that
    neither the learning rate nor the momentum nor the number of steps counts.
    """
    bias = slice(fl.model.trainable - fl.data.classes, fl.model.trainable)
    delta = (update.weights - start)[:, bias].double().cpu()
    return torch.special.entr(torch.softmax(delta / (temperature * torch.from_numpy(update.length)[:, None]), 1)).sum(1)


# ---------------------------------------------------------------------------------------------------------- the rounds


def federate(config: Config, data: common.Data, run: experiment.Run) -> None:
    """Client order x data order of one arm, on the difficulty partition."""
    fl, M, order = config.federation(data, run.streams), config.clients, config.client_order
    expert_loss, table = deal(config, fl, run)
    label_entropy = [torch.special.entr(data.y_train[own].bincount().double() / len(own)).sum().item() for own in fl.shards]
    ranks_clients, sorts_samples = order in BY_LOSS, config.data_order in SIGN  # by their losses

    state = fl.start() | {"difficulty": table, "queue": [], "pool": M, "updates": 0}
    state |= {"trained": [0] * M, "estimate": [np.inf] * M}  # how often each client was, and the entropy of its labels
    expert = config.score == "E"  # sent to all once, and its scores back once: like the labels' entropies they never change
    state["scoring_downloads"] = M * (expert and (ranks_clients or sorts_samples))
    state["scoring_scalars"] = M * ((expert and ranks_clients) or order == "entropy")

    def losses(clients) -> list[np.ndarray]:
        """Each client's samples' losses, under the expert or the model that it holds."""
        own = [fl.shards[m] for m in clients]
        if expert:
            return [expert_loss[shard] for shard in own]
        return [loss for loss, _ in common.score(fl.model, fl.received(state, clients), fl.data, own, config.chunk)]

    def keys_of(clients) -> np.ndarray | None:
        """What ranks these clients, ascending; if L_m (Eq. 1) under G, each downloads theta_g and sends one number back."""
        if ranks_clients:
            asked = len(clients) * (not expert)
            state["scoring_downloads"] += asked * (fl.base.vectors > 0)  # under solo each holds its net already
            state["scoring_scalars"] += asked
            return BY_LOSS[order] * np.array([loss.mean() for loss in losses(clients)])
        rivals = {"entropy": -np.array(label_entropy), "hics": -np.array(state["estimate"])}  # entropy: an oracle
        rivals["coverage"] = state["trained"] + np.isin(clients, state["queue"])  # who waits is trained before the new pool
        return rivals.get(order)

    for t in run.rounds(state):
        clients = select(config, fl, state, keys_of, t)  # S_t
        sample_losses = losses(clients) if sorts_samples else [None] * len(clients)
        batches = [schedule(config, fl.shards[m], k, run.streams, t, m) for m, k in zip(clients, sample_losses, strict=True)]
        eta = config.lr * (1 + config.lr_alpha * np.arange(max(map(len, batches)))) ** -config.lr_power  # reset every round
        kept, update = fl.train(state, t, clients, batches, lr=eta)
        state["updates"] += len(clients)  # u
        if order == "hics":
            for m, H in zip(kept, estimated_entropy(fl, fl.received(state, kept), update, config.temperature), strict=True):
                if state["trained"][m] == 0:  # as in HiCS-FL's warm-up: later updates tell less about the labels
                    state["estimate"][m] = float(H)
        for m in kept:
            state["trained"][m] += 1
        fl.aggregate(state, kept, update)  # theta_g^{t+1}
        scoring, last = {name: state[name] for name in ("scoring_downloads", "scoring_scalars")}, [{}, *run.rows][-1]
        received, sent = (scoring[name] - last.get(name, 0) for name in scoring)  # of this round: record adds up
        columns = scoring | fl.cost(clients, update, received=received * fl.model.size, sent=sent)
        columns |= {"pool": state["pool"], "expert_loss": table[1, clients, 0].mean(), "train_loss": update.loss.mean()}
        columns["downloads"] = state["updates"] * (fl.base.vectors > 0) + scoring["scoring_downloads"]
        run.record(t, len(kept), len(clients) - len(kept), **columns, **(fl.test(state) if run.due(t) else {}))


# --------------------------------------------------------------------------------------- tables, figures, presets, main


def report(df: pd.DataFrame, runs: list[experiment.Run], folder) -> None:
    """Prints Fig 7's 2x2 and Section 4.1's consistency (consistency.csv), draws clients.png and difficulty.png."""
    orders = {run.method: (run.config.client_order, run.config.data_order) for run in runs}
    each = experiment.per_trial(df).reset_index()
    each[["clients", "data"]] = [orders[method] for method in each.method]
    cells = each.groupby(["setting", "clients", "data"], sort=False).final.agg(experiment.spread)
    print(f"\nfinal accuracy (%, mean +- std), client orders by data orders\n{cells.unstack('data', sort=False).to_string()}")
    experiment.print_gains(experiment.per_trial(df), "vanilla")
    rows = []
    for setting, trial in each.groupby(["setting", "trial"], sort=False).groups:  # an arm names only the flags that it reads
        run = next(r for r in runs if r.trial == trial and set(r.setting.split()) <= set(setting.split()))
        before, after = map(consistency, run.load()["state"]["difficulty"].cpu().numpy())
        rows.append((setting, trial, before[0], after[0], before[1], after[1]))
    table = pd.DataFrame(rows, columns=["setting", "trial", "inside_before", "inside", "between_before", "between"])
    table.to_csv(folder / "consistency.csv", index=False)
    means = table.drop(columns="trial").groupby("setting", sort=False).agg(["mean", "std"])
    print(f"\nstd of the expert's loss inside clients and between their means\n{means.to_string(float_format='%.3f')}")
    figure(runs[0].load()["state"]["difficulty"].cpu().numpy(), folder / "clients.png")
    experiment.curves(df, folder / "difficulty.png", "expert_loss")


def figure(before_after: np.ndarray, path) -> None:
    """Each client's difficulty, mean +- std (2, M, 2), before and after Algorithm 2, of the first setting's first trial."""
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(8, 3.6), sharey=True, layout="constrained")
    for axis, when, clients in zip(axes, ("before", "after"), before_after, strict=True):
        mean, std = clients.T
        axis.errorbar(np.arange(len(mean)), mean, [np.minimum(std, mean), std], fmt="o")  # a loss is never negative
        inside, between = consistency(clients)
        axis.set(title=f"{when} Algorithm 2\nstd {inside:.2f} inside, {between:.2f} between", xlabel="client")
    axes[0].set_ylabel("expert's loss (nats), mean +- std")
    fig.savefig(path, dpi=150)
    plt.close(fig)


ROUNDS = "--clients 100 --clients-per-round 10 --rounds 100 --epochs 10"
CIFAR10 = f"--dataset cifar10 {ROUNDS} --lr 0.001 --lr-alpha 0.001 --expert-epochs 20"
IID, ALPHAS, ENDS, ALL = "--partition iid --no-stratify", "--alpha 0.2 0.05", "--f-ord 0 1", " ".join(ORDERS)
DATA, CLIENTS = f"{CIFAR10} --client-order vanilla --data-order {ALL}", f"{CIFAR10} --client-order {ALL} --data-order vanilla"
ALONE = f"{CIFAR10} --client-order vanilla --data-order vanilla --rounds 1 --epochs 1"
SCORES_CLIENTS = f"{CLIENTS} --client-order curriculum random --score G E"
SCORES_DATA = f"{DATA} --data-order curriculum random --f-ord 0 --score G E"
PRESETS = {
    "consistency": f"{ALONE} {ALPHAS} {ENDS}  # std of the expert's loss inside clients, by beta and f_ord",
    "consistency-iid": f"{ALONE} {IID} {ENDS}  # the same, sorted over all classes",
    "fig4": f"{DATA} --score E {ALPHAS} {ENDS}  # data curriculum at low and high consistency",
    "fig4-iid": f"{DATA} --score E {IID} {ENDS}",
    "fig5": f"{CLIENTS} {ALPHAS}  # client curriculum at high consistency",
    "fig5-iid": f"{CLIENTS} {IID}",
    "fig6-clients": f"{SCORES_CLIENTS} {ALPHAS}  # client curriculum: expert and global score",
    "fig6-clients-iid": f"{SCORES_CLIENTS} {IID}",
    "fig6-data": f"{SCORES_DATA} {ALPHAS}  # data curriculum: expert and global score",
    "fig6-data-iid": f"{SCORES_DATA} {IID}",
    "fig7": f"{CIFAR10} --base fedprox --score E --f-ord 0.9  # client x data curriculum",
    "rivals": f"{CLIENTS} --client-order curriculum anti random {' '.join(RIVALS)}  # other choices of clients, equal uploads",
}


def main(argv=None) -> None:
    """The command line; `argv` stands in for it in tests."""
    orders = ("client_order", "data_order")
    experiment.main(Config, PRESETS, __doc__, federate, orders, name=name, report=report, unread=unread, argv=argv)


if __name__ == "__main__":
    main()
