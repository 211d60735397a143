"""python fedcl_fgn.py --alpha 0.1

FedCL of "Critical Learning Periods-Aware Adaptive Client Selection in Federated Learning", Algorithm 2: the server watches
the federated gradient norm FGN. While it grows by at least a factor 1 + delta a round, training is taken to be in a critical
learning period and the next round selects twice as many clients; else half as many. Any base may train inside.

What differs from the paper, and why:
- FGN is reported as G = eta ||g||^2 >= 0, the printed one without its minus sign: the rule is a ratio and does not see it.
- ||g||^2 is the mean over the local batches, which training computes anyway; --fgn per_sample is the literal text.
- Round 0 has no predecessor and counts as critical. A vanished FGN(t-1) is guarded.
- Ours, marked so: the standard error of FGN, the detector `growth` that heeds it, --window, and two controls that the
  paper lacks: `constant` spends FedCL's uploads evenly, `shifted` plays FedCL's own client counts half a run later.
- Uploads are counted beside rounds: a round of FedCL may cost eight times one of its base.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import common
from common import UsageError, opt

BASES = ("fedavg", "fedprox", "vrlsgd", "fednova", "fedadagrad", "fedyogi", "fedadam")
ARMS = ("cl", "base", "random", "constant", "shifted")
DETECTORS = ("fgn", "growth", "fim")
FGN = ("batch", "per_sample", "full")


@dataclass
class Config(common.Config):
    """Common flags with this script's defaults, then FedCL's own."""

    clients: int = 128
    clients_per_round: int = 16
    rounds: int = 60
    epochs: int = 2
    batch_size: int = 4
    momentum: float = 0.9
    weight_decay: float = 1e-5
    base: str = opt("fedavg", "what trains and aggregates inside FedCL, and alone beside it", choices=BASES)

    cl: bool = opt(True, "FedCL; --no-cl trains the base alone")
    arms: tuple = opt(
        ("cl", "base"),
        "FedCL; base; A.4's random sizes; FedCL's uploads spread evenly; its sizes late",
        choices=ARMS,
        many=True,
    )
    detector: tuple = opt(
        ("fgn",), "a FedCL each for Eq. 2 on FGN, growth beyond its noise (ours), Eq. 2 on FedFIM", choices=DETECTORS, many=True
    )
    fgn: str = opt("batch", "||g||^2: mean over local batches, over samples at the received model, or of grad F_k", choices=FGN)
    fgn_lr: bool = opt(True, "FGN = eta ||g||^2; --no-fgn-lr leaves eta out")
    delta: float = opt(0.01, "growth of FGN that makes a round critical (inf: none)", low=0, infinite=True)
    window: int = opt(1, "compare the mean FGN of W rounds with that of the W before (1: the paper)", low=1, high=1_000_000)
    z: float = opt(2.0, "standard errors beyond delta that the detector growth asks for (0: any growth beyond delta)", low=0)
    first_round_critical: bool = opt(True, "round 0, which has no predecessor, counts as critical")
    fewest: int = opt(0, "least clients of a round (0: half of --clients-per-round)", low=0, high=1_000_000)
    most: int = opt(0, "most clients of a round (0: all)", low=0, high=10_000_000)
    lr_decay: float = opt(0.99, "eta is multiplied by this after every round (1: constant)", above=0, high=1)
    detect_samples: int = opt(
        0, "samples a client reads for per_sample, full and fim, redrawn each round (0: all)", low=0, high=10_000_000
    )
    p_double: float = opt(0.3, "A.4: probability that the arm random doubles its clients", low=0, high=1)
    p_halve: float = opt(0.3, "A.4: probability that it halves them", low=0, high=1)
    shift: float = opt(0.5, "fraction of the run by which the arm shifted comes late", low=0, high=1)

    def check(self) -> None:
        super().check()
        m, M = self.clients_per_round, self.clients
        if self.fewest > m:
            raise UsageError(f"--fewest {self.fewest}: more than --clients-per-round {m}")
        if self.most and not m <= self.most <= M:
            raise UsageError(f"--most {self.most}: wanted --clients-per-round {m} to --clients {M}")
        if self.p_double + self.p_halve > 1:
            raise UsageError(f"--p-double {self.p_double} and --p-halve {self.p_halve}: together more than 1")
        if self.cl and {"constant", "shifted"} & set(self.arms) and "cl" not in self.arms:
            raise UsageError("--arms: constant and shifted repeat the sizes of cl; add cl")
        if "growth" in self.detector and self.z > 0 and M > 1 and (self.fewest or max(m // 2, 1)) == 1:
            raise UsageError("--detector growth: one client has no standard error; set --fewest 2 or more")


# ------------------------------------------------------------------------------------------------ FGN (Eq. 1), FedFIM


def squared_norms(model: common.Model, theta: Tensor, data: common.Data, groups: np.ndarray, fisher=False) -> np.ndarray:
    """||gradient at theta of the mean loss of a group||^2 for the groups (G, B) of samples: (G,) float64, in eval mode.

    fisher, for B = 1: sum_y p(y|x) ||grad log p(y|x)||^2, labels from the model itself, exact over the classes; its mean over
    x is the trace of the Fisher matrix (Yan et al., 2022). Each group is a client that holds theta: one backward pass
    yields all their gradients.
    """
    floats = 2**23 if model.device == "cpu" else 2**29  # of gradients held at once
    at_once = 1 if model.plain else max(1, min(64, floats // model.trainable))
    norms = []
    for some in torch.as_tensor(groups, device=model.device).split(at_once):
        net = model.bind(theta.expand(len(some), -1), grad=True)
        with torch.backends.cudnn.flags(enabled=not model.plain):  # cuDNN's LSTM has no backward pass in eval mode
            logits = net.head(net.features(data.inputs(data.x_train[some], model.dtype)))
            log_p = F.log_softmax(logits, -1)  # (g, B, classes)
            if fisher:
                p = log_p.detach().exp()[:, 0]
                terms = [p[:, y] * leaf_norms(log_p[:, 0, y], net, keep=True) for y in range(data.classes)]
                norms.append(torch.stack(terms).sum(0))
            else:
                log_p_y = log_p.gather(-1, data.y_train[some][..., None])
                norms.append(leaf_norms(-log_p_y.mean((1, 2)), net))
    return torch.cat(norms).double().cpu().numpy()


def leaf_norms(losses: Tensor, net, keep: bool = False) -> Tensor:
    """Squared gradient norm of each of `losses` (g,), every one a function of its own row of the parameters."""
    grads = torch.autograd.grad(losses.sum(), net.leaves, retain_graph=keep)
    return sum(g.reshape(len(losses), -1).square().sum(1) for g in grads)


def per_sample(model, theta, data, read: Sequence[np.ndarray], fisher: bool = False) -> np.ndarray:
    """Mean over each client's samples of their own `squared_norms`: (n,)."""
    norms = squared_norms(model, theta, data, np.concatenate(read)[:, None], fisher)
    return np.array([part.mean() for part in np.split(norms, np.cumsum([len(r) for r in read])[:-1])])


def weighted_mean(values: np.ndarray, N: np.ndarray, M: int) -> tuple[float, float]:
    """(sum_k w_k v_k with w_k = N_k / sum N (Eq. 1), its standard error over which n of the M clients were drawn (ours)).

    The error is that of a ratio estimator, sqrt(n/(n-1) sum w_k^2 (v_k - mean)^2 (1 - n/M)): 0 if all take part, inf for one.
    """
    n, w = len(values), N / np.sum(N)
    mean = float(w @ values)
    if n in (1, M):
        return mean, 0.0 if n == M else float("inf")
    return mean, float(np.sqrt(n / (n - 1) * np.sum(w**2 * (values - mean) ** 2) * (1 - n / M)))


# ----------------------------------------------------------------------- is the round critical, and how many come next


def windows(history: Sequence[float], window: int) -> tuple[float, float, int]:
    """Means over the last w values and the w before, and w: `window`, or half the rounds so far while those are fewer."""
    w = min(window, len(history) // 2)
    return float(np.mean(history[-w:])), float(np.mean(history[-2 * w : -w])), w


def is_critical(history: Sequence[float], delta: float, window: int = 1, first: bool = True) -> bool:
    """Eq. 2 for the last of `history`: (FGN(t) - FGN(t-1)) / FGN(t-1) >= delta."""
    if len(history) < 2:
        return first
    now, before, _ = windows(history, window)
    if before == 0:  # any growth from nothing is infinite
        return now != 0 and delta < np.inf
    return (now - before) / before >= delta


def is_growing(history, errors, delta: float, z: float, window: int = 1, first: bool = True) -> bool:
    """Ours: FGN(t) - (1 + delta) FGN(t-1) exceeds z of its standard errors, the rounds' draws being independent."""
    if len(history) < 2 or delta == np.inf:
        return first and len(history) < 2
    now, before, w = windows(history, window)
    s_now, s_before = np.sqrt(windows(np.square(errors), window)[:2])
    margin = z * np.hypot(s_now, (1 + delta) * s_before) / np.sqrt(w) if z else 0.0  # an error may be infinite
    return bool(now - (1 + delta) * before > margin)


def next_size(n: int, critical: bool, m: int, M: int, fewest: int = 0, most: int = 0) -> int:
    """Lines 5 and 7 of Algorithm 2: double up to M, or halve down to half of the initial m."""
    return min(2 * n, most or M) if critical else max(n // 2, fewest or max(m // 2, 1))


def random_size(n: int, u: float, p_double: float, p_halve: float, limits: tuple) -> int:
    """A.4: doubles where the uniform draw u < p_double, halves where p_double <= u < p_double + p_halve, else stays."""
    return n if u >= p_double + p_halve else next_size(n, u < p_double, *limits)


def replayed_sizes(arm: str, sizes: np.ndarray, shift: float) -> np.ndarray:
    """The controls' sizes (R,), with FedCL's total: `constant` within one client, `shifted` rolled by shift R rounds."""
    if arm == "constant":
        return np.diff(np.arange(len(sizes) + 1) * sizes.sum() // len(sizes))
    return np.roll(sizes, round(shift * len(sizes)))


# ---------------------------------------------------------------------------------------------------------- the rounds


def cl_arms(config: Config) -> list[str]:
    """The names of the FedCL arms, one for each detector."""
    return [f"{config.base}+cl" + ("" if d == "fgn" else f"-{d}") for d in dict.fromkeys(config.detector)]


def methods(config: Config) -> list[str]:
    """fedavg+cl (fgn), fedavg+cl-growth, fedavg+cl-fim, fedavg, fedavg+random, ..."""
    if not config.cl:
        return [config.base]
    names = {"cl": cl_arms(config), "base": [config.base]}
    return [name for arm in dict.fromkeys(config.arms) for name in names.get(arm, [f"{config.base}+{arm}"])]


def planned_sizes(config: Config, run: common.Run, arm: str) -> Sequence[int] | None:
    """n(t) of the arms whose sizes are known beforehand, None for the others."""
    if arm in ("constant", "shifted"):
        rows = run.finished(cl_arms(config)[0])["rows"]
        return replayed_sizes(arm, np.array([row["clients"] + row["dropped"] for row in rows]), config.shift)
    return [config.clients_per_round] * config.rounds if arm == "" else None


def signals(config: Config, model, theta, data, read: Sequence[np.ndarray], N, update, eta: float, memory: bool) -> dict:
    """What clients that hold N samples (n,) and read `read` of them show: fgn, fgn_se and, where it is a detector, fim.

    theta is the model they received. Beside fim stand the seconds of both and, with `memory`, their peak bytes. For the
    batch FGN these are of the norms that the trainer takes anyway, taken once more to be timed.
    """
    compared = "fim" in config.detector

    def client_norms() -> np.ndarray:  # ||g_k||^2 (n,)
        if config.fgn == "batch":
            for step in range(update.steps.max() if compared else 0):
                torch.linalg.vector_norm(update.weights[: int((update.steps > step).sum())], dim=1)
            return update.grad_sq
        if config.fgn == "full":
            return np.array([squared_norms(model, theta, data, shard[None])[0] for shard in read])
        return per_sample(model, theta, data, read)

    norms, *cheap = measured(client_norms, model.device, compared and memory)
    fgn, error = weighted_mean(norms * (eta if config.fgn_lr else 1), N, config.clients)
    if not compared:
        return {"fgn": fgn, "fgn_se": error}
    traces, *dear = measured(lambda: per_sample(model, theta, data, read, fisher=True), model.device, memory)
    cost = {"fgn_seconds": cheap[0], "fim_seconds": dear[0], "fgn_bytes": cheap[1], "fim_bytes": dear[1]}
    return {"fgn": fgn, "fgn_se": error, "fim": weighted_mean(traces, N, config.clients)[0], **cost}


def measured(work: Callable, device: str, memory: bool) -> tuple:
    """(result, seconds, "" or with `memory` the most bytes of new tensors alive at once, by the allocator's own account)."""

    def clock() -> float:
        if device == "cuda":  # kernels run behind Python's back
            torch.cuda.synchronize()
        return time.perf_counter()

    started = clock()
    result = work()
    seconds = round(clock() - started, 6)
    if not memory:
        return result, seconds, ""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return result, seconds, torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return result, seconds, int(np.cumsum([0, *changes]).max())


def decision(config: Config, detector: str, history: dict) -> bool:
    """Line 3 of Algorithm 2, from the signals of all rounds so far."""
    rule = {"delta": config.delta, "window": config.window, "first": config.first_round_critical}
    if detector == "growth":
        return is_growing(history["fgn"], history["fgn_se"], z=config.z, **rule)
    return is_critical(history[detector], **rule)


def federate(config: Config, data: common.Data, run: common.Run) -> None:
    """Algorithm 2 around `config.base`, for the arm `run.method`."""
    streams, M, m = run.streams, config.clients, config.clients_per_round
    arm, _, detector = run.method.partition("+")[2].partition("-")
    detector = detector or ("fgn" if arm == "cl" else config.detector[0])
    if arm == "cl" and run.trial == 0 and 2 * m >= M:
        common.say(f"warning: one doubling of {m} clients reaches all {M}; critical periods have no room to show")
    _, device, dtype = common.setting_up(config)
    model = common.build_model(config.model, data, device, dtype, config.width)
    shards = common.client_shards(config, data, streams)
    sizes = np.array([len(shard) for shard in shards])
    base = common.BASES[config.base](config, model, M)
    sgd = {"momentum": config.momentum, "weight_decay": config.weight_decay, "chunk": config.chunk}
    limits, planned = (m, M, config.fewest, config.most), planned_sizes(config, run, arm)
    limit = config.detect_samples

    state = {"weights": model.init(streams.seed("init")), "base": base.state, "n": m}
    state["history"] = {"fgn": [], "fgn_se": [], "fim": []}
    for t in run.rounds(state):
        n = state["n"] if planned is None else int(planned[t])
        clients = common.select(config, n, streams, t)  # line 2: M^(t), drawn anew in every round
        theta, eta = state["weights"], config.lr * config.lr_decay**t
        batches = [
            common.epochs_of_batches(shards[k], config.epochs, config.batch_size, streams("batches", t, k)) for k in clients
        ]
        options = sgd | base.client(theta, clients) | {"seeds": [streams.seed("dropout", t, k) for k in clients]}
        update = common.train(model, base.start(theta, clients), data, batches, lr=eta, **options)
        clients, update = run.finite(t, clients, update)
        read = [streams("detect", t, k).permutation(shards[k])[:limit] if limit else shards[k] for k in clients]
        seen = signals(config, model, theta, data, read, sizes[clients], update, eta, memory=t == 0)
        for name, values in state["history"].items():
            values += [seen[name]] if name in seen else []
        critical = decision(config, detector, state["history"])  # line 3
        state["weights"] = base.aggregate(theta, update, clients, sizes[clients])  # line 4, in both branches
        if arm == "random":
            state["n"] = random_size(n, streams("random size", t).random(), config.p_double, config.p_halve, limits)
        else:
            state["n"] = next_size(n, critical, *limits)  # lines 5 and 7
        tested = common.evaluate(model, state["weights"], data) if run.due(t) else {}
        run.record(t, clients=len(clients), **tested, train_loss=float(update.loss.mean()), critical=int(critical), **seen)


# -------------------------------------------------------------------------------------- what selection cost, and figures


def runs_of(rows: list[dict], setting: str) -> dict[str, dict[int, list[dict]]]:
    """method -> trial -> its rows."""
    runs: dict[str, dict[int, list[dict]]] = {}
    for row in rows:
        if row["setting"] == setting:
            runs.setdefault(row["method"], {}).setdefault(row["trial"], []).append(row)
    return runs


def selection(own: list[dict], goal: float, budget: int) -> dict[str, float]:
    """One run's selection: clients a round (mean, peak, mean of the first and of the last third of the rounds), critical
    rounds, mean standard error of FGN in %, rounds and uploads until a tested accuracy reaches `goal` (nan: never), and the
    last accuracy tested within `budget` uploads."""
    third, tested = max(1, len(own) // 3), [row for row in own if row["accuracy"] != ""]
    hit = next((row for row in tested if row["accuracy"] >= goal), {"round": np.nan, "uploads": np.nan})
    within = [row["accuracy"] for row in tested if row["uploads"] <= budget]
    errors = [row["fgn_se"] / row["fgn"] for row in own if np.isfinite(row["fgn_se"]) and row["fgn"]]
    clients = np.array([row["clients"] for row in own])
    line = {"clients": clients.mean(), "peak": clients.max(), "early": clients[:third].mean(), "late": clients[-third:].mean()}
    line |= {"critical": sum(row["critical"] for row in own), "fgn_error": 100 * np.mean(errors) if errors else np.nan}
    reached = np.nan if np.isnan(goal) else float(hit["round"] > 0)
    line |= {"rounds_to": hit["round"], "uploads_to": hit["uploads"], "reached": reached}
    return line | {"equal": within[-1] if within else np.nan}


def selection_table(rows: list[dict], setting: str, base: str) -> list[dict]:
    """`selection` of each method, means over the trials where there is a value: goal = the base's final accuracy in the same
    trial, budget = what the thriftiest arm of the trial spends in all."""
    runs, lines = runs_of(rows, setting), []
    for method, trials in runs.items():
        goals = {k: runs[base][k][-1]["accuracy"] if base in runs else np.nan for k in trials}
        budgets = {k: min(other[k][-1]["uploads"] for other in runs.values()) for k in trials}
        figures = [selection(own, goals[k], budgets[k]) for k, own in trials.items()]
        line = {}
        for name in figures[0]:
            values = [f[name] for f in figures if np.isfinite(f[name])]
            line[name] = float(np.mean(values)) if values else np.nan
        lines.append({"setting": setting, "method": method, **line})
    return lines


def swept(config: Config, setting: str) -> Config:
    """The config of one setting of a sweep, 'window=3'."""
    pairs = dict(part.split("=") for part in setting.split())
    return dataclasses.replace(config, **{n: type(getattr(config, n))(v) for n, v in pairs.items()})


def calls(own: list[dict], name: str, config: Config) -> list[bool]:
    """Which rounds Eq. 2 calls critical on the column `name` of one run."""
    values = [row[name] for row in own]
    rule = (config.delta, config.window, config.first_round_critical)
    return [is_critical(values[: t + 1], *rule) for t in range(len(values))]


def agreement(rows: list[dict], setting: str, config: Config) -> str:
    """How far Eq. 2 calls the same rounds critical on FGN and on FedFIM along the same trajectories, and their cost."""
    own = [own for trials in runs_of(rows, setting).values() for own in trials.values()]
    a, b = (np.concatenate([calls(run, name, config)[1:] for run in own]) for name in ("fgn", "fim"))
    fast, slow = (np.mean([np.median([row[name] for row in run]) for run in own]) for name in ("fgn_seconds", "fim_seconds"))
    small, large = (np.mean([run[0][name] for run in own]) for name in ("fgn_bytes", "fim_bytes"))
    same, a, b = np.mean(a == b), a.mean(), b.mean()
    chance = a * b + (1 - a) * (1 - b)
    return (
        f"FGN ({config.fgn}) and FedFIM agree on {same:.0%} of the rounds, {chance:.0%} by chance (critical {a:.0%}, {b:.0%})\n"
        f"FGN    {1000 * fast:10.2f} ms a round {small / 2**20:10.3f} MiB at peak\n"
        f"FedFIM {1000 * slow:10.2f} ms a round {large / 2**20:10.3f} MiB at peak"
    )


def figure(rows: list[dict], config: Config, folder) -> None:
    """Prints selection.csv; draws FGN, clients and critical rounds (Figs 1, 18, 49) of the first settings."""
    settings, lines = list(dict.fromkeys(row["setting"] for row in rows)), []
    for setting in settings:
        base = next((row["method"] for row in rows if row["setting"] == setting and "+" not in row["method"]), "")
        table = selection_table(rows, setting, base)
        print(f"\n{setting or 'selection':<22}" + "".join(f"{name:>11}" for name in list(table[0])[2:]))
        for line in table:
            print(f"{line['method']:<22}" + "".join(f"{value:>11.1f}" for value in list(line.values())[2:]))
        if "fim" in config.detector and config.rounds > 1:
            print(agreement(rows, setting, swept(config, setting)))
        lines += table
    print("clients of a round: mean, peak, first and last third of the rounds; critical rounds; standard error of FGN in %;")
    print("rounds and uploads to the base's final accuracy, share of trials that reach it; accuracy at equal uploads")
    common.write_csv(folder / "selection.csv", lines)
    fig, axes = common.new_figure(len(settings[:4]), 3, height=2.6)
    for setting, column in zip(settings, axes.T, strict=False):
        draw_selection(rows, setting, swept(config, setting), *column)
    axes[0, 0].legend(fontsize=8)
    common.save_figure(fig, folder / "fgn.png")


def draw_selection(rows: list[dict], setting: str, config: Config, top, middle, bottom) -> None:
    """Above one another: FGN of the first trial +- its standard error, mean clients, critical rounds of each trial.

    Where FedFIM was read too, the critical rounds are those that Eq. 2 calls on either along the same trajectory.
    """
    runs, strips = runs_of(rows, setting), []
    for (method, trials), colour in zip(runs.items(), common.COLOURS, strict=False):
        t, values = common.series(rows, setting, method, "fgn")
        error = np.nan_to_num(common.series(rows, setting, method, "fgn_se")[1][0], posinf=0)
        top.plot(t, values[0], color=colour, label=method, linewidth=1.2)
        top.fill_between(t, values[0] - error, values[0] + error, color=colour, alpha=0.15, linewidth=0)
        for name in ("fgn", "fim") if "fim" in config.detector else ():
            strips += [(f"{method}: {name}", colour, [calls(own, name, config) for own in trials.values()])]
        if "fim" not in config.detector:
            strips += [(method, colour, [[row["critical"] for row in own] for own in trials.values()])]
    for i, (_, colour, trials) in enumerate(strips):
        height = 0.8 / len(trials)
        for k, critical in enumerate(trials):
            at = -i - 0.4 + height * (len(trials) - k - 0.5)
            bottom.eventplot(1 + np.flatnonzero(critical), lineoffsets=at, linelengths=0.8 * height, color=colour)
    common.draw(middle, rows, setting, list(runs), "clients")
    top.set(title=setting, ylabel="FGN, trial 1", ylim=(0, None))
    middle.set(ylabel="clients, mean of trials", xlim=top.get_xlim(), ylim=(0, None))
    bottom.set(xlabel="round", ylabel="critical rounds by trial", xlim=top.get_xlim())
    bottom.set_yticks([-i for i in range(len(strips))], [label for label, *_ in strips])
    bottom.grid(axis="y", visible=False)


# ----------------------------------------------------------------------------------------------------- presets and main

ALEXNET = {"dataset": "cifar10", "model": "alexnet", "rounds": 200, "batch_size": 16, "mu": 0.01}
VGG, RESNET = ALEXNET | {"model": "vgg11", "mu": 0.001}, ALEXNET | {"model": "resnet18", "mu": 0.001}
TEXT = {"dataset": "shakespeare", "model": "lstm", "partition": "natural", "rounds": 200, "batch_size": 16}
EARLY, LATE = ("fedprox", "vrlsgd", "fednova"), ("fedadagrad", "fedyogi", "fedadam")
PAIR, ALPHAS = {"dataset": ("cifar10", "fmnist")}, {"alpha": (0.1, 0.2, 0.3)}
NETS, DELTAS = {"model": ("alexnet", "vgg11")}, {"delta": (0.0, 0.01, 0.03, 0.05, 0.2, 0.35, 0.5)}
A4, P = ALEXNET | {"arms": ("cl", "base", "random")}, (0.1, 0.3, 0.5, 0.7)
PRESETS = {
    "fig1": (
        "FGN and FedFIM: windows, time, memory, accuracy (1, 16, 17)",
        ALEXNET | {"detector": ("fgn", "fim"), "detect_samples": 32},
        PAIR | ALPHAS,
    ),
    "fig2": ("FedAvg with AlexNet and VGG-11 (2-5, 20, 21, 49)", ALEXNET, NETS | PAIR | ALPHAS),
    "fig6": ("FedProx, VRL-SGD, FedNova with AlexNet (6-9, 22-25)", ALEXNET, {"base": EARLY} | PAIR | ALPHAS),
    "fig6-vgg": ("the same with VGG-11", VGG, {"base": EARLY} | PAIR | ALPHAS),
    "fig10": ("threshold delta", ALEXNET, PAIR | ALPHAS | DELTAS),
    "fig11": ("heterogeneity", ALEXNET, PAIR | {"base": ("fedavg", "fedprox"), "alpha": (0.1, 0.2, 0.3, 0.5, 1.0)}),
    "fig12": ("local epochs", ALEXNET, PAIR | {"epochs": (1, 2, 3, 4, 5)}),
    "fig13": ("weight decay", ALEXNET, PAIR | {"weight_decay": (0.0, 1e-5, 1e-4, 1e-3)}),
    "fig14": ("number of clients", ALEXNET, PAIR | {"clients": (64, 128, 256, 512)}),
    "fig15": ("participation", ALEXNET, PAIR | {"clients_per_round": (8, 16, 32, 48)}),
    "fig18": ("five seeds (18, 19)", ALEXNET | {"trials": 5}, PAIR | ALPHAS),
    "fig26": ("delta under other bases (26-28)", ALEXNET, {"base": EARLY} | PAIR | ALPHAS | DELTAS),
    "fig29": (
        "CIFAR-100 with AlexNet (29, 30, 33-36)",
        ALEXNET | {"dataset": "cifar100"},
        {"base": ("fedavg", *EARLY)} | ALPHAS,
    ),
    "fig29-vgg": ("CIFAR-100 with VGG-11", VGG | {"dataset": "cifar100"}, {"base": ("fedavg", *EARLY)} | ALPHAS),
    "fig31": ("Shakespeare, clients are speaking roles (31, 32, 37, 38)", TEXT, {"base": ("fedavg", *EARLY)}),
    "fig31-dirichlet": ("Shakespeare, Dirichlet on the next character", TEXT | {"partition": "dirichlet"}, ALPHAS),
    "fig39": ("FedAdagrad, FedYogi, FedAdam (39-46)", ALEXNET, {"base": LATE} | NETS | PAIR | ALPHAS),
    "fig47": ("A.4: random doubling", A4, PAIR | {"p_double": P}),
    "fig48": ("A.4: random halving", A4, PAIR | {"p_halve": P}),
    "fig50": ("FedAvg with ResNet-18 (50, 51)", RESNET, PAIR | ALPHAS),
    "fig52": ("the other bases with ResNet-18 (52-59)", RESNET, {"base": EARLY + LATE} | PAIR | ALPHAS),
    "controls": ("ours: FedCL against its uploads spent evenly, and late", ALEXNET | {"arms": ARMS}, ALPHAS),
    "detectors": (
        "ours: printed rule, growth, FedFIM and windows",
        ALEXNET | {"detector": DETECTORS, "detect_samples": 32},
        {"window": (1, 3, 5, 10)},
    ),
    "decay": ("ours: decay of the learning rate", ALEXNET, {"lr_decay": (0.9, 0.95, 0.99, 1.0)}),
}


def main(argv=None) -> None:
    """The command line; `argv` stands in for it in tests."""
    controls = [f"{base}+{arm}" for base in BASES for arm in ("constant", "shifted")]
    common.launch(Config, PRESETS, __doc__, methods, federate, figure, second=controls, argv=argv)


if __name__ == "__main__":
    main()
