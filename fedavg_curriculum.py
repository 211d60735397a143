"""python fedavg_curriculum.py --order curriculum anti random vanilla --score G --alpha 0.1

The data curriculum of "When Do Curricula Work in Federated Learning?" (Vahidian et al., ICCV 2023), Algorithm 1: every
client that takes part in a round scores its samples with the model it holds, sorts them, and trains its T local steps on
the easiest g(t) of them, where the pacing function g grows from b N to N over the first a T steps.

What differs from the paper, and why:
- The pacing functions are the corrected ones: as printed (Table 5) linear, quadratic and root miss N, step overshoots it
  and the exponential collapses to N.
- Samples are sorted by loss, which is the printed score 1/loss read from the other end.
- Every order takes the same T = E ceil(N/B) steps and the same random streams; with b = 1 all four are one program.
- FedProx keeps a proximal term and SCAFFOLD divides by the step length: the authors' own code does neither.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch

import common
from common import opt

ORDERS = ("curriculum", "anti", "random", "vanilla")
SCORES = ("G", "L", "LG", "G_pred", "L_pred", "LG_pred", "E")
PACINGS = ("linear", "quadratic", "root", "step", "exponential")


@dataclass
class Config(common.Config):
    """Common flags with this script's defaults, then the curriculum's own."""

    clients: int = 50
    clients_per_round: int = 10
    rounds: int = 20
    epochs: int = 5
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4

    order: tuple = opt(
        ORDERS, "orders to compare: easy first, hard first, random with pacing, no pacing", choices=ORDERS, many=True
    )
    score: str = opt("G", "difficulty: loss or errors of the global (G), own (L), both or an expert (E) model", choices=SCORES)
    lg_pred: str = opt(
        "disagree", "hard for LG_pred: the two models disagree, or the number that err", choices=("disagree", "errors")
    )
    pacing: str = opt("linear", "shape of g(t)", choices=PACINGS)
    pacing_a: float = opt(0.8, "fraction of the steps until all samples are in (0: at once)", low=0, high=1e6)
    pacing_b: float = opt(0.2, "fraction of the samples at the first step (1: all)", low=0, high=1)
    pacing_scope: str = opt("round", "pace within each local round, or across all rounds", choices=("round", "global"))
    refresh: str = opt("pass", "re-read the prefix when a pass over it ends, or at every step", choices=("pass", "step"))
    lr_alpha: float = opt(0.0, "alpha of eta_i = eta (1 + alpha i)^-p over local steps (0: constant)", low=0)
    lr_power: float = opt(0.75, "p of eta_i (0: constant)", low=0)
    expert_epochs: int = opt(5, "central epochs of the expert that E scores with", low=1, high=1000)
    dissimilarity: bool = opt(False, "log the gradient dissimilarity of the easiest, all and hardest samples in every round")


# ------------------------------------------------------------------------------------------------------ the curriculum


def pacing(family: str, t: np.ndarray, T: int, N: int, a: float, b: float) -> np.ndarray:
    """g(t), the number of admitted samples at steps t (any shape), in [1, N]. Supplement Table 5, corrected."""
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
    return np.clip(np.floor(N * b + N * (1 - b) * share + 1e-9).astype(int), 1, N)  # 1e-9: 399 must not become 398.99...


def difficulty(config, model, theta_g, held, expert, data, shards, clients) -> list[np.ndarray]:
    """Each client's difficulty keys (n_m,), ascending = easy (Section 3.1).

    `held` maps a client to its model at the end of its last participation; a client without one uses theta_g.
    """
    own = [shards[m] for m in clients]
    if config.score == "E":
        return [loss for loss, _ in common.score(model, expert, data, own, config.chunk)]
    G = common.score(model, theta_g, data, own, config.chunk)
    L = list(G)
    back = [k for k, m in enumerate(clients) if int(m) in held]
    if back:
        stale = torch.stack([held[int(clients[k])] for k in back])
        for k, scores in zip(back, common.score(model, stale, data, [own[k] for k in back], config.chunk), strict=True):
            L[k] = scores
    y = data.y_train.cpu().numpy()
    return [key(config, G_m, L_m, y[shard]) for G_m, L_m, shard in zip(G, L, own, strict=True)]


def key(config, G, L, y) -> np.ndarray:
    """The key of one client from (loss, predicted class) under the global and the local model, each (n_m,)."""
    (loss_G, predicted_G), (loss_L, predicted_L) = G, L
    return {
        "G": loss_G,
        "L": loss_L,
        "LG": (loss_L + loss_G) / 2,
        "G_pred": predicted_G != y,
        "L_pred": predicted_L != y,
        "LG_pred": predicted_L != predicted_G if config.lg_pred == "disagree" else 1 * (predicted_G != y) + (predicted_L != y),
    }[config.score]


def sort(shard: np.ndarray, keys: np.ndarray | None, order: str, rng: np.random.Generator) -> np.ndarray:
    """(x_1, ..., x_n) <- sort({x_1, ..., x_n}, s, o). A seeded permutation breaks ties: prediction keys are nearly all ties."""
    shuffled = rng.permutation(len(shard))
    if order in ("random", "vanilla"):
        return shard[shuffled]
    signed = keys[shuffled].astype(float) * (1 if order == "curriculum" else -1)
    return shard[shuffled[np.argsort(signed, kind="stable")]]


def paced_batches(ordered: np.ndarray, g: np.ndarray, batch_size: int, refresh: str, rng: np.random.Generator) -> np.ndarray:
    """The index schedule (T, B) of one client: step t draws from the first g[t] samples, without replacement.

    refresh 'pass' draws until the prefix is used up, then reads the prefix of that step; 'step' reads it at every step.
    Admitted samples are sorted before the shuffle, so that their order matters only through who is admitted.
    """
    batches = np.full((len(g), batch_size), -1, dtype=np.int64)
    queue = np.empty(0, dtype=np.int64)
    for t, size in enumerate(g):
        if refresh == "step" or len(queue) == 0:
            queue = rng.permutation(np.sort(ordered[:size]))
        batch, queue = queue[:batch_size], queue[batch_size:]
        batches[t, : len(batch)] = batch
    return batches


def schedule(config, order, shard, keys, streams, t, m) -> np.ndarray:
    """ClientUpdate's samples for round t and client m: T = E ceil(N/B) steps, whatever the order."""
    N = len(shard)
    T = config.epochs * -(-N // config.batch_size)
    steps = np.arange(T)
    if order == "vanilla":
        g = np.full(T, N)
    elif config.pacing_scope == "round":
        g = pacing(config.pacing, steps, T, N, config.pacing_a, config.pacing_b)
    else:
        g = pacing(config.pacing, t * T + steps, config.rounds * T, N, config.pacing_a, config.pacing_b)
    ordered = sort(shard, keys, order, streams("ties", t, m))
    return paced_batches(ordered, g, config.batch_size, config.refresh, streams("batches", t, m))


def dissimilarity(model, theta_g, data, chosen: list[np.ndarray], chunk: int, seeds: list[int]) -> float:
    """Lambda = sum_m q_m ||grad f_m||^2 / ||sum_m q_m grad f_m||^2 >= 1 over the clients' chosen samples, at theta_g (P,).

    1 means that all clients pull the same way (Section 3.3: easy prefixes are closer in distribution). In float64 whatever
    --dtype is: the easy samples' gradients vanish as theta_g learns them.
    """
    model, theta_g = common.Model(model.build, model.device, torch.float64), theta_g.double()
    longest = max(len(index) for index in chosen)
    batches = [np.pad(index, (0, longest - len(index)), constant_values=-1)[None] for index in chosen]
    step = common.train(model, theta_g, data, batches, lr=1.0, chunk=chunk, seeds=seeds)  # theta - y_m = grad f_m
    gradients = (theta_g - step.weights)[:, : model.trainable]
    q = torch.as_tensor([len(index) for index in chosen], dtype=gradients.dtype, device=gradients.device)
    q = q / q.sum()
    return float(q @ gradients.square().sum(1) / (q @ gradients).square().sum())


def dissimilarities(config, model, theta_g, data, shards, clients, streams, t) -> dict[str, float]:
    """Lambda over each client's easiest fraction b, all, and the hardest fraction b of its samples, by loss under theta_g."""
    keys = [loss for loss, _ in common.score(model, theta_g, data, [shards[m] for m in clients], config.chunk)]
    parts = {"easy": [], "all": [], "hard": []}
    for m, k in zip(clients, keys, strict=True):
        ordered = sort(shards[m], k, "curriculum", streams("ties", t, m))
        prefix = max(1, int(config.pacing_b * len(ordered) + 1e-9))
        for name, chosen in (("easy", ordered[:prefix]), ("all", ordered), ("hard", ordered[-prefix:])):
            parts[name].append(chosen)
    seeds = [streams.seed("dropout", t, m) for m in clients]
    measure = functools.partial(dissimilarity, model, theta_g, data, chunk=config.chunk, seeds=seeds)
    return {f"lambda_{name}": measure(chosen) for name, chosen in parts.items()}


# ---------------------------------------------------------------------------------------------------------- the rounds


def federate(config: Config, data: common.Data, run: common.Run) -> None:
    """Algorithm 1 for the order `run.method`."""
    order, streams = run.method, run.streams
    _, device, dtype = common.setting_up(config)
    model = common.build_model(config.model, data, device, dtype, config.width, projection=config.base == "moon")
    shards = common.client_shards(config, data, streams)
    sizes = np.array([len(shard) for shard in shards])
    base = common.BASES[config.base](config, model, config.clients)
    longest = config.epochs * -(-sizes.max() // config.batch_size)
    eta = config.lr * (1 + config.lr_alpha * np.arange(longest)) ** -config.lr_power  # reset in every round
    scored = order in ("curriculum", "anti")
    expert = None
    if scored and config.score == "E":
        expert = run.cached("expert", lambda: common.train_centrally(model, data, config.expert_epochs, config, streams))

    state = {"weights": model.init(streams.seed("init")), "base": base.state, "held": {}}  # theta_g^0
    for t in run.rounds(state):
        clients = common.select(config, config.clients_per_round, streams, t)  # S_t
        theta_g = base.start(state["weights"], clients)
        measured = {}
        if config.dissimilarity:
            measured = dissimilarities(config, model, state["weights"], data, shards, clients, streams, t)
        keys = [None] * len(clients)
        if scored:
            keys = difficulty(config, model, theta_g, state["held"], expert, data, shards, clients)
        batches = [schedule(config, order, shards[m], k, streams, t, m) for m, k in zip(clients, keys, strict=True)]
        update = common.train(  # theta_m <- train(theta_g, {x_1, ..., x_g(t)}) for every m at once
            model,
            theta_g,
            data,
            batches,
            lr=eta,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            chunk=config.chunk,
            seeds=[streams.seed("dropout", t, m) for m in clients],
            **base.client(state["weights"], clients),
        )
        clients, update = run.finite(t, clients, update)
        state["weights"] = base.aggregate(state["weights"], update, clients, sizes[clients])  # theta_g^{t+1}
        if scored and config.score.startswith("L"):
            state["held"].update({int(m): theta_m.clone() for m, theta_m in zip(clients, update.weights, strict=True)})
        tested = common.evaluate(model, base.models(state["weights"]), data) if run.due(t) else {}
        run.record(t, clients=len(clients), **tested, train_loss=float(update.loss.mean()), **measured)


# ------------------------------------------------------------------------------------------------ figure, presets, main


def figure(rows, config, folder) -> None:
    """Final accuracy by setting and order, mean +- std over trials: the layout of Figs 1 to 3 and 10."""
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    parts = [part for setting in settings for part in setting.split()]  # flag=value of the sweep
    fig, axes = common.new_figure(width=max(4.0, len(settings) * (0.3 + 0.07 * max(map(len, parts), default=0))))
    for i, (order, colour) in enumerate(zip(config.order, common.COLOURS, strict=False)):
        final = [common.spread(common.per_trial(rows, setting, order)["final"]) for setting in settings]
        at = np.arange(len(settings)) + (i - (len(config.order) - 1) / 2) * 0.2
        means, stds = [f["mean"] for f in final], [f["std"] for f in final]
        axes[0, 0].bar(at, means, 0.18, yerr=stds, label=order, color=colour, error_kw={"linewidth": 0.8})
    axes[0, 0].set_xticks(range(len(settings)), [s.replace(" ", "\n") or config.dataset for s in settings])
    same = {"base": config.base, "score": f"score {config.score}", "pacing": f"{config.pacing} pacing"}
    title = ", ".join(text for flag, text in same.items() if flag not in {part.split("=")[0] for part in parts})
    axes[0, 0].set(ylabel="final test accuracy (%)", title=title)
    axes[0, 0].legend(ncols=len(config.order), loc="upper center", bbox_to_anchor=(0.5, -0.12))
    common.save_figure(fig, folder / "orders.png")


CIFAR10 = {"dataset": "cifar10", "clients": 100, "clients_per_round": 10, "rounds": 100, "epochs": 10, "batch_size": 10}
CIFAR10 |= {"lr": 0.001, "lr_alpha": 0.001, "lr_power": 0.75, "momentum": 0.9, "weight_decay": 5e-4}
CIFAR100 = CIFAR10 | {"dataset": "cifar100", "model": "resnet9", "lr": 0.01, "lr_power": 0.0, "weight_decay": 0.0}
BETAS, PARTS, PACED = (0.05, 0.2, 0.9), (100, 200, 400, 800), ("curriculum", "anti", "random")
PRESETS = {
    "table1": ("FedAvg by heterogeneity, CIFAR-10", CIFAR10, {"alpha": BETAS}),
    "table2": ("FedProx by heterogeneity, CIFAR-10", CIFAR10 | {"base": "fedprox"}, {"alpha": BETAS}),
    "table3": ("FedNova by heterogeneity, CIFAR-10", CIFAR10 | {"base": "fednova"}, {"alpha": BETAS}),
    "table4": ("SCAFFOLD by heterogeneity, CIFAR-10", CIFAR10 | {"base": "scaffold"}, {"alpha": BETAS}),
    "fig1": ("the scores, IID and label skew", CIFAR10, {"partition": ("iid", "label-skew"), "score": SCORES[:6]}),
    "fig2": (
        "pacing family and a, IID",
        CIFAR10 | {"partition": "iid", "order": PACED},
        {"pacing": PACINGS, "pacing_a": (0.1, 0.5, 0.8)},
    ),
    "fig3": (
        "b, IID and Dir(.05)",
        CIFAR10 | {"alpha": 0.05},
        {"partition": ("iid", "dirichlet"), "pacing_b": (0.0025, 0.1, 0.2, 0.5, 0.8)},
    ),
    "fig10": ("amount of data, FedAvg, label skew", CIFAR10 | {"partition": "label-skew"}, {"parts": PARTS}),
    "fig10-fedprox": ("amount of data, FedProx, Dir(.05)", CIFAR10 | {"alpha": 0.05, "base": "fedprox"}, {"parts": PARTS}),
    "fig11": ("heterogeneity, CIFAR-100 with ResNet-9", CIFAR100, {"alpha": BETAS}),
    "fig12": (
        "pacing family and a, label skew",
        CIFAR10 | {"partition": "label-skew", "order": PACED},
        {"pacing": PACINGS, "pacing_a": (0.1, 0.5, 0.8)},
    ),
}


def main(argv=None) -> None:
    """The command line; `argv` stands in for it in tests."""
    common.launch(Config, PRESETS, __doc__, lambda config: config.order, federate, figure, argv=argv)


if __name__ == "__main__":
    main()
