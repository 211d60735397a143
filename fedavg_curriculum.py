"""python fedavg_curriculum.py --order curriculum anti random vanilla --score G --alpha 0.1

The data curriculum of "When Do Curricula Work in Federated Learning?" (Vahidian et al., ICCV 2023), Algorithm 1: every
client that takes part in a round scores its N samples with the model it receives (or its own, or an expert trained on all
data), sorts them, and trains on the g(t) easiest: the pacing function g grows from b N to N in the first a T of T local steps.

What differs from the paper, and why:
- The pacing functions are the corrected ones: as printed (Table 5) linear, quadratic and root end at N + (N - 1) b, step at
  N + N b, and the exponential is N at once. Samples are sorted by loss, the printed score 1/loss read from the other end.
- Every order takes the same T = E ceil(N/B) steps (E epochs, batches of B) of min(B, N) samples: a batch in which a pass over
  the admitted samples ends is filled from the next pass. With b = 1 curriculum, anti, random, fixed, vanilla are one program.
- The paper's random draws anew at each step (here `random-step`); `random` draws one permutation in each round.
- FedProx keeps a proximal term and SCAFFOLD divides theta_g - theta_m by its steps' length: the authors' code does neither.
- Not in the paper: `shuffled`, `weighted` and `fixed` tell order from exposure; `balanced`, the thresholds, FedLC are rivals.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

import common
import experiment
from experiment import flag

ORDERS = ("curriculum", "anti", "random", "vanilla")
EXTRA = ("random-step", "shuffled", "weighted", "fixed", "balanced", "threshold", "hard-threshold")  # controls and rivals
UNSCORED = ("random", "vanilla", "random-step", "fixed")  # orders that ask for no difficulty
UNPACED = ("vanilla", "random-step")  # orders that draw from all samples at every step
SCORES = ("G", "L", "LG", "G_pred", "L_pred", "LG_pred", "E")
LOCAL = ("L", "LG", "L_pred", "LG_pred")  # scores that ask the client's own model
PACINGS = ("linear", "quadratic", "root", "step", "exponential")


@dataclass
class Config(experiment.Config):
    """Common flags with this script's defaults, then the curriculum's own."""

    clients: int = 50
    rounds: int = 20
    epochs: int = 5
    momentum: float = 0.9
    weight_decay: float = 5e-4

    order: str = flag(
        ORDERS,
        "curriculum: easy first; anti: hard first; random: a permutation a round, paced; vanilla: no pacing; random-step: "
        "drawn at each step, so never paced; shuffled: the curriculum's batches at other times; weighted: vanilla weighted "
        "by its visits; fixed: one permutation for all rounds; balanced: easy first in each class; threshold, "
        "hard-threshold: losses below, above a rising lambda",
        choices=ORDERS + EXTRA,
    )
    score: str = flag(
        "G",
        f"difficulty, one of {', '.join(SCORES)}: loss or errors of the global (G), own (L), both (LG) or an expert (E) model; "
        "or MODULE:FUNCTION of your own, (logits, labels, losses) -> keys, small = easy",
        kind=lambda word: word if word in SCORES or experiment.named("--score", word, SCORES) else "",  # refused if not found
    )
    lg_pred: str = flag("disagree", "LG_pred: do models disagree, or how many err", choices=("disagree", "errors"))
    pacing: str = flag("linear", "shape of g(t)", choices=PACINGS)
    pacing_a: float = flag(0.8, "fraction of the steps until all samples are in (0: at once)", 0, 1e6)
    pacing_b: float = flag(0.2, "fraction of the samples at the first step (1: all)", 0, 1)
    pacing_scope: str = flag("round", "pace within a local round, or across all", choices=("round", "global"))
    refresh: str = flag("pass", "re-read the prefix after a pass, or at every step", choices=("pass", "step"))
    fedlc: float = flag(0.0, "tau of FedLC's calibrated logits (0: plain cross-entropy)", 0)
    lr_alpha: float = flag(0.0, "alpha of eta_i = eta (1 + alpha i)^-p over steps (0: constant)", 0)
    lr_power: float = flag(0.75, "p of eta_i (0: constant)", 0)
    expert_epochs: int = flag(5, "central epochs of the expert that E scores with", 1, 1000)


def name(config) -> str:
    """The order, with the tau of FedLC where it acts."""
    return f"{config.order} fedlc={config.fedlc:g}" if config.fedlc else config.order


def unread(config) -> list[str]:
    """The flags without effect on this arm: where they are swept it is trained once and shown in every setting."""
    scored, paced = config.order not in UNSCORED, config.order not in UNPACED
    falls = config.lr_alpha > 0 and config.lr_power > 0  # eta, over a round's steps
    read = {"score": scored, "lg_pred": scored and config.score == "LG_pred", "expert_epochs": scored and config.score == "E"}
    read |= {"pacing": paced and not config.order.endswith("threshold"), "refresh": config.order != "random-step"}
    read |= dict.fromkeys(("pacing_a", "pacing_b", "pacing_scope"), paced) | dict.fromkeys(("lr_alpha", "lr_power"), falls)
    return [*common.BASES[config.base].unread, *(option for option, effective in read.items() if not effective)]


# ------------------------------------------------------------------------------------------------------ the curriculum


def pacing(family: str, t: np.ndarray, T: int, N: int, a: float, b: float) -> np.ndarray:
    """g(t), the number of admitted samples at steps t (any shape), in [1, N]. Supplement Table 5, corrected."""
    x = np.minimum(np.asarray(t) / (a * T), 1) if a else np.ones(np.shape(t))
    shapes = {"linear": x, "quadratic": x**2, "root": np.sqrt(x), "step": np.floor(x + 1e-9)}
    shapes["exponential"] = np.expm1(10 * x) / np.expm1(10)
    return np.clip(np.floor(N * b + N * (1 - b) * shapes[family] + 1e-9).astype(int), 1, N)  # 1e-9: 399, not 398.99...


def difficulty(config, fl: common.Federation, state: dict, clients: np.ndarray, expert_loss) -> list[np.ndarray]:
    """Each client's keys (n_m,), ascending = easy (Section 3.1). Before its first round a client's own model is theta_g."""
    shards, theta_g = [fl.shards[m] for m in clients], fl.received(state, clients)
    if config.score == "E":
        return [expert_loss[shard] for shard in shards]
    labels, keys = [fl.data.y_train[shard].cpu().numpy() for shard in shards], []
    G = L = common.score(fl.model, theta_g, fl.data, shards, config.chunk)
    if config.score not in SCORES:
        logits = common.predict(fl.model, theta_g, fl.data.images("train", fl.model.dtype), shards, config.chunk)
        return [own_keys(config.score, z.cpu().numpy(), y, loss) for z, y, (loss, _) in zip(logits, labels, G, strict=True)]
    if config.score in LOCAL:
        theta_m = torch.stack([state["held"].get(m, state["weights"]) for m in clients.tolist()])
        L = common.score(fl.model, theta_m, fl.data, shards, config.chunk)
    for y, (loss_G, guess_G), (loss_L, guess_L) in zip(labels, G, L, strict=True):
        wrong_G, wrong_L = 1.0 * (guess_G != y), 1.0 * (guess_L != y)
        table = {"G": loss_G, "L": loss_L, "LG": (loss_L + loss_G) / 2, "G_pred": wrong_G, "L_pred": wrong_L}
        table["LG_pred"] = 1.0 * (guess_L != guess_G) if config.lg_pred == "disagree" else wrong_G + wrong_L
        keys.append(table[config.score])
    return keys


def own_keys(name: str, logits: np.ndarray, y: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """One client's keys (n_m,) from logits (n_m, C), labels and losses (n_m,) by the user's own function."""
    with experiment.users(f"--score {name}"):
        keys = np.asarray(experiment.named("--score", name, SCORES)(logits, y, loss), dtype=float)
        if keys.shape != y.shape or not np.isfinite(keys).all():
            raise ValueError(f"wanted a finite number for each of {len(y)} samples")
        return keys


def sort(order: str, keys: np.ndarray | None, y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(x_1, ..., x_n) <- sort({x_1, ..., x_n}, s, o) as places (N,) in the shard; y (N,) are the labels.

    A seeded permutation breaks ties (prediction keys are nearly all ties), and is all that `random` is. balanced merges the
    sorted classes so that any prefix holds the easiest fraction of each (Hacohen and Weinshall, 2019).
    """
    places = rng.permutation(len(y))
    if order in UNSCORED:
        return places
    sign = -1 if order in ("anti", "hard-threshold") else 1
    places = places[np.argsort(sign * keys[places], kind="stable")]
    if order == "balanced":
        of_class = y[places, None] == np.unique(y)  # (N, classes)
        rank = ((of_class.cumsum(0) - 0.5) / of_class.sum(0))[of_class]  # of a sample in its class, from 0 to 1
        places = places[np.argsort(rank, kind="stable")]
    return places


def admitted(config, keys: np.ndarray | None, steps: np.ndarray, T: int, N: int) -> np.ndarray:
    """g (len(steps),): how many of the N sorted samples are drawn from at `steps` out of T; `keys` (N,) are sorted alike.

    threshold: losses <= lambda, which rises in a T steps from the loss of sample b N to the largest (self-paced learning,
    Kumar et al., 2010). hard-threshold: losses >= lambda, from the smallest up to that of the hardest b N (the idea of
    FedBalancer, Shin et al., 2022).
    """
    if not config.order.endswith("threshold"):
        return pacing(config.pacing, steps, T, N, config.pacing_a, 1 if config.order in UNPACED else config.pacing_b)
    x = np.minimum(steps / (config.pacing_a * T), 1) if config.pacing_a else np.ones(len(steps))  # how far lambda rose
    if config.order == "hard-threshold":  # keys fall: negate them, and run lambda backwards, from all samples to b N of them
        x, keys = 1 - x, -keys
    first, last = keys[max(1, int(config.pacing_b * N + 1e-9)) - 1], keys[-1]
    limit = np.where(x < 1 - 1e-9, first + x * (last - first), last)  # lambda
    return np.searchsorted(keys, limit, side="right")


def paced_batches(ordered: np.ndarray, g: np.ndarray, batch_size: int, refresh: str, rng: np.random.Generator) -> np.ndarray:
    """The index schedule (T, B) of one client: a step draws min(B, N) of the first g[step] samples; -1: none.

    refresh 'pass' draws without replacement until the prefix is used up, then goes on, in the same batch, with the prefix of
    that step; 'step' draws from it anew at every step. Prefixes are sorted, then shuffled: only who is admitted matters.
    """
    batches, queue = np.full((len(g), batch_size), -1, dtype=np.int64), ordered[:0]
    B = min(batch_size, len(ordered))
    for step, size in enumerate(g):
        queue = queue[:0] if refresh == "step" else queue
        while len(queue) < B:
            queue = np.concatenate([queue, rng.permutation(np.sort(ordered[:size]))])
        batches[step, :B], queue = queue[:B], queue[B:]
    return batches


def schedule(config, shard, keys, y, streams: common.Streams, t: int, m: int) -> tuple[np.ndarray, np.ndarray]:
    """ClientUpdate's samples in round t of client m, and the weights of their losses: (T, B) each, T = E ceil(N/B).

    shard, keys, y (N,): the client's samples with difficulty (None where the order asks for none) and label.
    """
    own = shard, keys, y, streams, t, m
    if config.order == "shuffled":  # the curriculum's batches, at other times
        batches, weights = schedule(replace(config, order="curriculum"), *own)
        return streams("shuffled", t, m).permutation(batches), weights
    if config.order == "weighted":  # vanilla's batches, a sample weighted by the visits that the curriculum pays it
        batches, _ = schedule(replace(config, order="vanilla"), *own)
        easy_first, _ = schedule(replace(config, order="curriculum"), *own)
        visits = np.bincount(easy_first[easy_first >= 0], minlength=shard.max() + 1)
        return batches, visits[batches] * len(shard) / visits.sum()  # of mean 1 over the shard; unused where batches is -1
    N, T = len(shard), config.epochs * -(-len(shard) // config.batch_size)
    first, horizon = (0, T) if config.pacing_scope == "round" else (t * T, config.rounds * T)
    places = sort(config.order, keys, y, streams("fixed order", m) if config.order == "fixed" else streams("ties", t, m))
    g = admitted(config, None if keys is None else keys[places], first + np.arange(T), horizon, N)
    refresh = "step" if config.order == "random-step" else config.refresh
    batches = paced_batches(shard[places], g, config.batch_size, refresh, streams("batches", t, m))
    return batches, np.ones(batches.shape)


class CurriculumBatchSampler(list):
    """A client's round, all E epochs of it: DataLoader(dataset, batch_sampler=CurriculumBatchSampler(labels, keys, round)).

    It is the list of the batches. labels and keys (n,) are those of the dataset's samples, flags this script's (rounds=, if
    pacing_scope="global"). Of batch i weights[i, :len(batch)] belong to the losses: ones, but for order="weighted".
    ValueError for a flag that the command line refuses, or keys that are not n finite numbers.
    """

    def __init__(self, labels, keys=None, round: int = 0, client: int = 0, order: str = "curriculum", **flags):
        config, y = experiment.checked(Config, order=order, **flags), np.asarray(labels)
        keys = None if keys is None and order in UNSCORED else np.asarray(keys, dtype=float)
        if keys is not None and (keys.shape != y.shape or not np.isfinite(keys).all()):
            raise ValueError(f"order {order!r}: wanted a finite key for each of {len(y)} samples")
        batches, self.weights = schedule(config, np.arange(len(y)), keys, y, common.Streams(config.seed), round, client)
        super().__init__(batch[batch >= 0].tolist() for batch in batches)


# ---------------------------------------------------------------------------------------------------------- the rounds


def federate(config: Config, data: common.Data, run: experiment.Run, observer=None) -> None:
    """Algorithm 1 for one order. An `observer`, as that of results/explain.py, adds columns to each round."""
    fl, y = common.Federation(config, data, run.streams), data.y_train.cpu().numpy()
    observe = observer and observer(run, fl)
    scored = observe or config.order not in UNSCORED
    local, expert_loss = scored and config.score in LOCAL, None  # local: keys need the clients' own, older models
    if scored and config.score == "E":
        untuned = run.other(hold_out=config.hold_out)  # with the flags as typed, not as --tune chose them: one expert for all
        central = untuned.config.federation(data, run.streams)
        expert = untuned.cached("expert", lambda: central.train_centrally(config.expert_epochs), "expert_epochs")
        [(expert_loss, _)] = common.score(central.model, expert, data, [np.arange(len(y))], config.chunk)

    state = fl.start() | {"held": {}}  # theta_g^0; each client's model at the end of its last participation
    for t in run.rounds(state):
        clients = fl.select(t, config.clients_per_round)  # S_t
        keys = difficulty(config, fl, state, clients, expert_loss) if scored else [None] * len(clients)
        shards = [fl.shards[m] for m in clients]
        schedules = [schedule(config, s, k, y[s], run.streams, t, m) for s, k, m in zip(shards, keys, clients, strict=True)]
        columns = observe(state, t, clients, keys, schedules) if observe else {}
        batches, weights = zip(*schedules, strict=True)
        eta = config.lr * (1 + config.lr_alpha * np.arange(max(map(len, batches)))) ** -config.lr_power  # anew in every round
        how = {"lr": eta, "weights": weights} | (fedlc(config, fl, [y[s] for s in shards]) if config.fedlc else {})
        kept, update = fl.train(state, t, clients, batches, **how)  # theta_m <- train(theta_g, {x_1, ..., x_g(t)})
        fl.aggregate(state, kept, update)  # theta_g^{t+1}
        if local:
            columns["fallback"] = np.mean([m not in state["held"] for m in clients.tolist()])  # had no model of their own yet
            state["held"] |= {m: theta_m.clone() for m, theta_m in zip(kept.tolist(), update.weights, strict=True)}
        columns |= fl.cost(clients, update) | (fl.test(state) if run.due(t) else {})
        run.record(t, len(kept), len(clients) - len(kept), **columns, train_loss=update.loss.mean())


def fedlc(config, fl: common.Federation, labels: list[np.ndarray]) -> dict:
    """What FedLC (Zhang et al., 2022) asks of the trainer: cross-entropy of logits - tau n_c^(-1/4), n_c the number of a
    client's samples of class c. The paper's denominator leaves out the true class: then the loss may fall without bound."""
    n = np.stack([np.bincount(y, minlength=fl.data.classes) for y in labels]).clip(1e-8)  # (K, C), nowhere 0
    margin = torch.as_tensor(config.fedlc * n**-0.25, device=fl.model.device, dtype=fl.model.dtype)

    def loss(step):
        step.logits = step.logits - step.extra["margin"][:, None]  # what per_client gave for these clients
        return common.cross_entropy(step)

    return {"loss": loss, "per_client": {"margin": margin}}


def report(df, runs, folder) -> None:
    """Prints the gains over vanilla; orders.png: final accuracy (%) by order, mean +- std, a panel per setting."""
    experiment.print_gains(each := experiment.per_trial(df), "vanilla")
    experiment.draw(each.reset_index(), folder / "orders.png", x="final", y="method", kind="bar", errorbar="sd", height=3.6)


CIFAR10 = "--dataset cifar10 --clients 100 --rounds 100 --epochs 10 --lr 0.001 --lr-alpha 0.001 --order curriculum anti random"
ALL, BETAS = f"{CIFAR10} vanilla", "--alpha 0.05 0.2 0.9"
BASES = ("fedavg", "fedprox", "fednova", "scaffold")  # of Tables 1 to 4
CIFAR100 = f"{ALL} --dataset cifar100 --model resnet9 --lr 0.01 --lr-power 0 --weight-decay 0 {BETAS}"
PACED = "--pacing linear quadratic root step exponential --pacing-a 0.1 0.5 0.8"
EXPOSURE = f"{ALL} {' '.join(EXTRA)} --rounds 40 --epochs 5 --lr 0.01 --lr-power 0 --trials 5"
PRESETS = {  # of a flag given twice the last counts; --list-presets prints what follows #
    **{f"table{i}": f"{ALL} {BETAS} --base {base}  # by heterogeneity, CIFAR-10" for i, base in enumerate(BASES, 1)},
    "fmnist": f"{ALL} {BETAS} --dataset fmnist --base {' '.join(BASES)}  # the four tables on Fashion-MNIST",
    "fig1": f"{ALL} --partition iid label-skew --score {' '.join(SCORES[:6])}  # the scores",
    "fig2": f"{CIFAR10} --partition iid {PACED}  # pacing family and a, IID",
    "fig3": f"{ALL} --alpha 0.05 --partition iid dirichlet --pacing-b 0.0025 0.1 0.2 0.5 0.8  # b, IID and Dir(.05)",
    "fig6": f"{CIFAR10} --order curriculum random --score E G --alpha 0.05 0.2  # expert and global score (right half)",
    "fig6-iid": f"{CIFAR10} --order curriculum random --score E G --partition iid",
    "fig10": f"{ALL} --partition label-skew --parts 100 200 400 800  # amount of data, FedAvg, label skew",
    "fig10-fedprox": f"{ALL} --alpha 0.05 --base fedprox --parts 100 200 400 800  # amount of data, FedProx, Dir(.05)",
    "fig11": f"{CIFAR100}  # heterogeneity, CIFAR-100 with ResNet-9",
    **{f"fig11-{base}": f"{CIFAR100} --base {base}" for base in BASES[1:]},
    "fig12": f"{CIFAR10} --alpha 0.05 {PACED}  # pacing family and a, Dir(.05)",
    "exposure": f"{EXPOSURE} --alpha 0.05 0.9  # not the paper's: is it order or exposure? and rivals",
}


def main(argv=None) -> None:
    """The command line; `argv` stands in for it in tests."""
    experiment.main(Config, PRESETS, __doc__, federate, ("order", "fedlc"), name=name, report=report, unread=unread, argv=argv)


if __name__ == "__main__":
    main()
