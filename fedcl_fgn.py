"""python fedcl_fgn.py --alpha 0.1

FedCL of "Critical Learning Periods-Aware Adaptive Client Selection in Federated Learning", Algorithm 2: the server watches
the federated gradient norm FGN. While it grows by at least a factor 1 + delta a round, training is taken to be in a critical
learning period and the next round selects twice as many clients; else half as many. Any base may train inside.

What differs from the paper, and why:
- FGN is reported as eta ||g||^2 >= 0, g a client's gradient, without the paper's minus sign: a ratio does not see it.
- ||g||^2 is the mean ||g_batch||^2 over the local batches, which training computes anyway; --fgn per_sample follows the text.
- The first round has no predecessor and counts as critical. After an FGN of 0 any growth is infinite.
- Ours: --window, --select, --budget, --server-ema, every --arm but cl, base and random, the columns of `noise` and fgn_se.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

import common
import experiment
from common import UsageError
from experiment import flag

PAPER_BASES = ("fedavg", "fedprox", "vrlsgd", "fednova", "fedadagrad", "fedyogi", "fedadam")
REPLAYS = ("constant", "shifted", "front", "rising")  # arms that spend FedCL's uploads at other times
ARMS = ("cl", "base", "random", "longer", *REPLAYS)
FGN = ("batch", "per_sample", "full")


# ----------------------------------------------------------------------------- which clients take part (--select, ours)
# A rule (fl, state, t, n) gives the clients (n,), their weights (n,) in the aggregate, of any scale, their inclusion
# probabilities pi_k (n,), and how many others received the net only to score it. Client k of M has N_k samples, a share p_k of
# all, and sends theta_k.


def uniform(fl: common.Federation, state: dict, t: int, n: int) -> tuple:
    """Algorithm 1: every set is equally likely; weights N_k (line 6), a ratio estimator of sum_k p_k theta_k."""
    clients = fl.select(t, n)
    return clients, fl.sizes[clients], np.full(n, n / len(fl.sizes)), 0


def by_size(fl: common.Federation, state: dict, t: int, n: int) -> tuple:
    """Systematic sampling with inclusion probabilities pi_k = n p_k.

    Clients lie on a line in random order, each as long as its pi_k; n points at distance 1 pick those they fall upon. Weights
    p_k / pi_k = 1/n estimate sum_k p_k theta_k without bias and sum to 1 in every draw. One random number u places the points
    for every n, at (u + j/n) mod 1 of the line: 8 clients are among the round's 16 (unless some pi_k is 1).
    """
    rng, pi = fl.streams("select by size", t), inclusion(fl.sizes, n)
    order = rng.permutation(len(pi))
    points = np.arange(n) + (n * rng.random()) % 1
    clients = np.unique(order[np.searchsorted(np.cumsum(pi[order])[:-1], points, side="right")])
    return clients, fl.sizes[clients] / pi[clients], pi[clients], 0


def inclusion(sizes: np.ndarray, n: int) -> np.ndarray:
    """pi_k (M,) in proportion to N_k, with sum n; whoever would exceed 1 takes part surely, and the others share the rest."""
    pi, sure = n * sizes / sizes.sum(), np.zeros(len(sizes), bool)
    while (pi > 1).any():
        sure |= pi >= 1
        pi = np.where(sure, 1, (n - sure.sum()) * sizes / max(1, sizes[~sure].sum()))
    return pi


def rule(select: str):
    """The rule of --select. One of your own may have an attribute learn(fl, state, t, clients, update), for after training."""
    return SELECT.get(select) or experiment.named("--select", select, SELECT)


def chosen(select: str, fl: common.Federation, state: dict, t: int, n: int) -> tuple:
    """What the rule of --select gives, checked."""
    with experiment.users(f"--select {select}"):
        clients, weights, pi, scorers = rule(select)(fl, state, t, n)
        clients, weights, pi = np.array(clients), np.array(weights, dtype=float), np.array(pi, dtype=float)
        if clients.shape != (n,) or clients.dtype.kind != "i" or len(np.intersect1d(clients, fl.everyone)) < n:
            raise ValueError(f"wanted {n} different clients from 0 to {len(fl.sizes) - 1}")
        for values, most in ((weights, math.inf), (pi, 1 + 1e-9)):
            if values.shape != (n,) or not (np.isfinite(values) & (values >= 0) & (values <= most)).all() or not values.any():
                raise ValueError(f"wanted {n} weights >= 0 and {n} probabilities from 0 to 1, finite, not all 0")
        if int(scorers) < 0:
            raise ValueError(f"wanted a number of scorers >= 0, not {scorers}")
        return clients, weights, pi, int(scorers)


SELECT = {"uniform": uniform, "size": by_size}


@dataclass
class Config(experiment.Config):
    """Common flags with this script's defaults, then FedCL's own."""

    clients: int = 128
    clients_per_round: int = 16
    rounds: int = 60
    epochs: int = 2
    batch_size: int = 4
    momentum: float = 0.9
    weight_decay: float = 1e-5
    base: str = flag("fedavg", "what trains and aggregates inside FedCL, and alone beside it", choices=PAPER_BASES)
    arm: str = flag(
        ("cl", "base"),
        "cl: FedCL; base: its base; random: sizes at random (A.4); longer: the base with as many samples as --select size; "
        "FedCL's uploads spread evenly (constant), late (shifted), largest first (front), for least final noise (rising)",
        choices=ARMS,
    )
    detector: str = flag("fgn", "what Eq. 2 judges: FGN, or FedFIM, the Fisher matrix' trace", choices=("fgn", "fim"))
    fgn: str = flag("batch", "||g||^2 of local batches, of samples at the received net, or of their mean gradient", choices=FGN)
    detect_samples: int = flag(0, "samples of a client that per_sample, full and fim read, anew each round (0: all)", 0, 10**7)
    fgn_lr: bool = flag(True, "FGN = eta ||g||^2; --no-fgn-lr leaves eta out")
    delta: float = flag(0.01, "relative growth of FGN from which on a round is critical (inf: none)", low=0, high=float("inf"))
    window: int = flag(1, "compare the mean FGN of W rounds with that of the W before (1: the paper)", low=1, high=10**6)
    first_round_critical: bool = flag(True, "the first round, which has no predecessor, counts as critical")
    fewest: int = flag(0, "fewest clients of a round of cl, random (0: half of --clients-per-round)", low=0, high=10**6)
    most: int = flag(0, "most clients of a round (0: all)", low=0, high=10**7)
    lr_decay: float = flag(0.99, "eta is multiplied by this after every round (1: constant)", above=0, high=1)
    p_double: float = flag(0.3, "arm random: probability of twice as many clients next", low=0, high=1)
    p_halve: float = flag(0.3, "arm random: probability of half as many", low=0, high=1)
    shift: float = flag(0.5, "arm shifted: by this fraction of the run FedCL's sizes come later", low=0, high=1)
    kappa: float = flag(0.05, "arm rising: share of earlier rounds' deviation that a round forgets", low=0, below=1)
    each: int = flag(0, "arms base, longer: clients of every round (0: --clients-per-round)", low=0, high=10**7)
    select: str = flag("uniform", "how clients are drawn: uniform, size (by their samples) or MODULE:FUNCTION")
    budget: int = flag(0, "end every arm after N drawn clients; eta falls by them (0: after --rounds)", low=0, high=10**9)
    server_ema: float = flag(0.0, "test a mean of the global nets, ema <- s ema + (1 - s) theta_g (0: theta_g)", low=0, below=1)

    def check(self) -> None:
        super().check()
        m, M = self.clients_per_round, self.clients
        if self.fewest > m:
            raise UsageError(f"--fewest {self.fewest}: more than --clients-per-round {m}")
        if self.most and not m <= self.most <= M:
            raise UsageError(f"--most {self.most}: wanted --clients-per-round {m} to --clients {M}")
        if self.p_double + self.p_halve > 1:
            raise UsageError(f"--p-double {self.p_double} and --p-halve {self.p_halve}: together more than 1")
        if self.each > M:
            raise UsageError(f"--each {self.each}: more than --clients {M}")
        smallest = self.each or m if self.arm in ("base", "longer") else self.fewest or max(m // 2, 1)
        if self.rounds * smallest < self.budget:
            raise UsageError(f"--rounds {self.rounds}: too few to spend --budget {self.budget} at {smallest} clients a round")
        rule(self.select)


def name(config: Config) -> str:
    """fedavg+cl, fedavg+cl-fim, fedavg, fedavg+random, fedavg size n=8, ..: what decides is named, if it is not the default."""
    detector = f"-{config.detector}" if config.detector != "fgn" and "detector" not in unread(config) else ""
    words = [config.base + ("" if config.arm == "base" else f"+{config.arm}{detector}")]
    words += [config.select.rpartition(":")[2]] * (config.select != "uniform" and "select" not in unread(config))
    words += [f"n={config.each}"] * ("each" not in unread(config))
    return " ".join(words + [f"ema={config.server_ema:g}"] * (config.server_ema > 0))


def unread(config: Config) -> set[str]:
    """The flags without effect on this arm: where they are swept it is trained once and shown in every setting."""
    arm, detects = config.arm, config.arm in ("cl", *REPLAYS)
    read = dict.fromkeys(("detector", "delta", "window", "first_round_critical"), detects)
    read |= dict.fromkeys(("fewest", "most"), detects or arm == "random")
    read |= dict.fromkeys(("p_double", "p_halve"), arm == "random")
    read |= {"shift": arm == "shifted", "kappa": arm == "rising", "select": arm != "longer"}
    read["each"] = arm in ("base", "longer") and config.each not in (0, config.clients_per_round)
    read["detect_samples"] = config.fgn != "batch" or (detects and config.detector == "fim")
    return {*common.BASES[config.base].unread, *(name for name, effective in read.items() if not effective)}


# ------------------------------------------------------------------------------------------------ FGN (Eq. 1), FedFIM


def squared_norms(model: common.Model, theta: Tensor, data: common.Data, groups: np.ndarray, fisher=False) -> np.ndarray:
    """||gradient at theta of the mean loss of a group||^2 for the groups (G, B) of samples: (G,) float64, in eval mode.

    fisher, for B = 1: sum_y p(y|x) ||grad log p(y|x)||^2, labels from the model itself, exact over the classes; its mean over
    x is the trace of the Fisher matrix (Yan et al., 2022). Groups pose as clients that hold theta: one backward pass.
    """
    floats = 2**23 if model.device == "cpu" else 2**29  # of gradients held at once
    at_once = 1 if model.plain else max(1, min(64, floats // model.trainable))
    norms, x = [], data.images("train", model.dtype)
    for some in torch.as_tensor(groups, device=model.device).split(at_once):
        net = model.bind(theta.expand(len(some), -1), grad=True)  # in eval mode; plain nets (torch's own layers) one at a time
        with torch.backends.cudnn.flags(enabled=not model.plain):  # cuDNN's LSTM has no backward pass in eval mode
            log_p = F.log_softmax(net.head(net.features(common.inputs(x[some]))), -1)  # clients as channels; (g, B, classes)
            log_p_y, terms = log_p.gather(-1, data.y_train[some][..., None]), []
            pairs = zip(log_p.detach().exp()[:, 0].T, log_p[:, 0].T, strict=True) if fisher else [(1, log_p_y.mean((1, 2)))]
            for p, log_likelihood in pairs:  # (g,): a group's depends on its own row of the parameters alone
                grads = torch.autograd.grad(log_likelihood.sum(), net.leaves, retain_graph=fisher)
                terms.append(p * sum(g.reshape(len(some), -1).square().sum(1) for g in grads))
        norms.append(torch.stack(terms).sum(0))
    return torch.cat(norms).double().cpu().numpy()


def per_sample(model, theta, data, samples: Sequence[np.ndarray], fisher: bool = False) -> np.ndarray:
    """Mean over each client's samples of their own `squared_norms`: (n,)."""
    norms = squared_norms(model, theta, data, np.concatenate(samples)[:, None], fisher)
    return np.array([part.mean() for part in np.split(norms, np.cumsum([len(own) for own in samples])[:-1])])


def estimate(values: Tensor, w: np.ndarray, pi: np.ndarray) -> tuple[Tensor, float]:
    """(sum_k w_k v_k of the drawn clients' v (n, d), its variance over the draw); the weights w (n,) have sum 1.

    The variance is the jackknife's for a ratio, over the r clients that might not have been drawn (pi_k < 1): without one of
    them the sum moves by w_k / (1 - w_k / A) (c - v_k), A being their share of the weights and c their own mean, in which each
    counts with (1 - pi_k) w_k; V = (r-1)/r sum_k (1 - pi_k) ||that||^2. For equal weights it is Hajek's (1964), of factor
    r/(r-1). It is 0 if all take part surely, inf if only one might not.
    """
    mean = torch.as_tensor(w, dtype=values.dtype, device=values.device) @ values
    (unsure,) = np.nonzero((pi < 1) & (w > 0))
    if len(unsure) < 2:
        return mean, float("inf") if len(unsure) else 0.0
    w_u, out, A = w[unsure], 1 - pi[unsure], w[unsure].sum()
    c = sum(float(s) * values[k] for k, s in zip(unsure, out * w_u / (out @ w_u), strict=True))
    apart = np.array([float((values[k] - c).square().sum()) for k in unsure])  # row by row, sparing a second (n, d)
    return mean, float((1 - 1 / len(unsure)) * np.sum(out * (w_u / (1 - w_u / A)) ** 2 * apart))


def signals(config: Config, fl: common.Federation, theta: Tensor, t: int, clients, w, pi, update, eta: float) -> dict:
    """What round t's clients show at theta (P,), the net they received: fgn, its standard error and, if it detects, fim."""
    limit = config.detect_samples
    samples = [fl.streams("detect", t, k).permutation(fl.shards[k])[:limit] if limit else fl.shards[k] for k in clients]
    if config.fgn == "batch":
        norms = update.grad_sq
    elif config.fgn == "full":
        norms = np.array([squared_norms(fl.model, theta, fl.data, own[None])[0] for own in samples])
    else:
        norms = per_sample(fl.model, theta, fl.data, samples)
    fgn, variance = estimate(torch.as_tensor(norms * (eta if config.fgn_lr else 1))[:, None], w, pi)
    seen = {"fgn": float(fgn), "fgn_se": math.sqrt(variance)}
    if config.detector == "fim" and "detector" not in unread(config):
        seen["fim"] = float(w @ per_sample(fl.model, theta, fl.data, samples, fisher=True))
    return seen


def noise(theta: Tensor, nets: Tensor, w: np.ndarray, pi: np.ndarray) -> dict[str, float]:
    """Returns, of the aggregate sum_k w_k theta_k of the `nets` theta_k (n, P) (ours): its variance V over the draw, the mean
    update's ||m||^2 = m_sq, nu = V / m_sq, and the number of equally weighted clients n_eff that would average as well."""
    mean, V = estimate(nets, w, pi)
    m_sq = float((mean - theta).square().sum())
    return {"V": V, "m_sq": m_sq, "nu": V / m_sq if m_sq else math.nan, "n_eff": float(1 / np.sum(w**2))}


# ----------------------------------------------------------------------- is the round critical, and how many come next


def is_critical(history: Sequence[float], delta: float, window: int = 1, first: bool = True) -> bool:
    """Eq. 2 for the last of `history`: (FGN(t) - FGN(t-1)) / FGN(t-1) >= delta.

    With a window W (ours; at most half of the rounds so far): growth a round from the mean of the W before to that of the last
    W. Growth from nothing is infinite.
    """
    if len(history) < 2:
        return first
    W = min(window, len(history) // 2)
    now, before = float(np.mean(history[-W:])), float(np.mean(history[-2 * W : -W]))
    return now > 0 and delta < math.inf if before == 0 else (now / before) ** (1 / W) - 1 >= delta


def next_size(n: int, critical: bool, m: int, M: int, fewest: int = 0, most: int = 0) -> int:
    """Lines 5 and 7 of Algorithm 2: double up to `most` (M), or halve down to `fewest` (half of the initial m)."""
    return min(2 * n, most or M) if critical else max(n // 2, fewest or max(m // 2, 1))


def random_size(n: int, u: float, p_double: float, p_halve: float, limits: tuple) -> int:
    """A.4: doubles where the uniform draw u < p_double, halves where p_double <= u < p_double + p_halve, else stays."""
    return n if u >= p_double + p_halve else next_size(n, u < p_double, *limits)


def replayed_sizes(config: Config, rows: Sequence[dict]) -> np.ndarray:
    """The sizes (R,) of FedCL's `rows` in another order, or with the same sum: `constant`, `shifted`, `front`, `rising`.

    The net after R rounds holds the noise sum_t c_t^2 V_t / n_t with c_t = (1 - kappa)^(R-1-t), V_t of one client; at a fixed
    sum of n_t it is least for n_t proportional to c_t sqrt(V_t). `rising` takes V_t for eta_t^2, since updates are proportional
    to the learning rate; under --budget, with the eta_t that these very sizes lead to.
    """
    sizes = np.array([row["clients"] + row["dropped"] for row in rows])
    if config.arm == "shifted":
        return np.roll(sizes, round(config.shift * len(sizes)))
    if config.arm == "front":
        return np.sort(sizes)[::-1]
    most = max(config.most or config.clients, sizes.max())  # FedCL's own --most may be larger where --tune chose it
    t, n = np.arange(len(sizes)), spread(np.ones(len(sizes)), sizes.sum(), most)
    decays = t.astype(float)  # how often eta has decayed by round t
    for _ in range(100 if config.arm == "rising" else 0):  # to the fixed point by half steps: whole ones may oscillate
        log_share = t[::-1] * math.log(1 - config.kappa) + decays * math.log(config.lr_decay)
        n = spread(np.exp(log_share - log_share.max()), sizes.sum(), most)
        decays = (decays + (np.cumsum(n) - n) / config.clients_per_round) / 2 if config.budget else decays
    return n


def spread(share: np.ndarray, total: int, most: int) -> np.ndarray:
    """Integers (R,) in 1 .. most of sum `total` (running sums are rounded) in proportion to `share` (R,), if in bounds."""
    from scipy.optimize import brentq

    share = np.maximum(share, 1e-12 * share.max())  # > 0, so that the bracket below is finite
    scale = brentq(lambda s: np.clip(s * share, 1, most).sum() - total, 0, most / share.min())
    return np.diff(np.floor(np.cumsum([0.5, *np.clip(scale * share, 1, most)]))).astype(int)


# ---------------------------------------------------------------------------------------------------------- the rounds


def federate(config: Config, data: common.Data, run: experiment.Run) -> None:
    """Algorithm 2 around `config.base`, for one arm and detector."""
    fl, m, M = common.Federation(config, data, run.streams), config.clients_per_round, config.clients
    limits, U, planned = (m, M, config.fewest, config.most), config.budget or math.inf, None  # U: uploads in all
    passes, select = config.epochs, "uniform" if config.arm == "longer" else config.select
    if config.arm in ("base", "longer"):
        planned = [config.each or m] * config.rounds
    if config.arm == "longer":  # as many samples as draws by size would take
        passes *= inclusion(fl.sizes, planned[0]) @ fl.sizes / planned[0] / fl.sizes.mean()
    if config.arm in REPLAYS:
        planned = replayed_sizes(config, run.other(arm="cl").load()["rows"])
    if config.arm == "cl" and run.trial == 0 and 2 * m >= M:
        experiment.say(f"warning: one doubling of {m} clients reaches all {M}; critical periods have no room to show")
    size_ratio = float(M * np.sum(fl.sizes**2) / fl.sizes.sum() ** 2)  # 1 + CV^2(N): n average like n / that of one size

    state = fl.start() | {"n": m, "history": [], "spent": 0}
    for t in run.rounds(state):
        if state["spent"] == U:
            break
        n = min(state["n"] if planned is None else int(planned[t]), U - state["spent"])
        clients, raw, pi, scorers = chosen(select, fl, state, t, n)  # line 2: the set M^(t); raw: w_k of any scale
        theta, eta = state["weights"], config.lr * config.lr_decay ** (state["spent"] / m if config.budget else t)
        batches = [schedule(fl.shards[k], passes, config.batch_size, fl.streams("batches", t, k)) for k in clients]
        kept, update = fl.train(state, t, clients, batches, lr=eta)
        raw, pi = (values[np.isin(clients, kept)] for values in (raw, pi))
        w = raw / raw.sum()  # for uniform draws N_k / sum of the selected N_k (Eq. 1)
        seen = signals(config, fl, theta, t, kept, w, pi, update, eta) | noise(theta, update.weights, w, pi)
        if hasattr(rule(select), "learn"):
            with experiment.users(f"--select {select}"):
                rule(select).learn(fl, state, t, kept, update)
        fl.aggregate(state, kept, update, raw)  # line 4, in both branches
        state["spent"] += n
        if config.server_ema:
            state["ema"] = torch.lerp(state["weights"], state.get("ema", state["weights"]), config.server_ema)
        if config.arm == "cl":
            state["history"].append(seen[config.detector])
            critical = is_critical(state["history"], config.delta, config.window, config.first_round_critical)  # line 3
            state["n"], seen["critical"] = next_size(n, critical, *limits), int(critical)  # lines 5 and 7
        elif config.arm == "random":
            state["n"] = random_size(n, fl.streams("random size", t).random(), config.p_double, config.p_halve, limits)
        seen |= fl.test(state | {"weights": state.get("ema", state["weights"])}) if run.due(t) or state["spent"] == U else {}
        seen |= fl.cost(clients, update, received=scorers * fl.model.size, sent=scorers) | {"size_ratio": size_ratio}
        run.record(t, len(kept), n - len(kept), train_loss=float(update.loss.mean()), **seen)


def require_cl(config: Config, runs: list, folder) -> bool:
    """Raises UsageError where an arm would repeat the sizes of a FedCL that is not trained; else training begins."""
    if not {run.other(arm="cl").path for run in runs if run.config.arm in REPLAYS} <= {run.path for run in runs}:
        raise UsageError(f"--arm: {', '.join(REPLAYS)} repeat the sizes of cl; add cl")
    return False


def schedule(shard: np.ndarray, passes: float, batch_size: int, rng) -> np.ndarray:
    """Passes over the shard, the last of which may end early: (round(passes ceil(N_k / B)), B)."""
    return common.epochs_of_batches(shard, math.ceil(passes), batch_size, rng)[: round(passes * -(-len(shard) // batch_size))]


# -------------------------------------------------------------------------------------- what selection cost, and figures


def reach(own: pd.DataFrame, goal: float) -> dict[str, float]:
    """Rounds, uploads and clients a round until one run's tested accuracy is `goal` (nan: never), and whether it ever is."""
    rounds, uploads = own.loc[own.accuracy >= goal, ["round", "uploads"]].astype(float).min()  # both only grow
    reached = np.nan if np.isnan(goal) else float(rounds > 0)
    return {"rounds_to": rounds, "uploads_to": uploads, "clients_to": uploads / rounds, "reached": reached}


def selection(df: pd.DataFrame) -> pd.DataFrame:
    """By (setting, method), means over trials: what `report` names; the accuracy to reach is that of the same trial's base,
    equal uploads are those of the trial's thriftiest arm."""
    lines = []
    for (setting, _), arms in df.groupby(["setting", "trial"], sort=False):
        base = arms[~arms.method.str.contains("[+ ]")]  # the plain one
        goal = base.accuracy.dropna().iloc[-1] if len(base) else np.nan
        thriftiest = arms.groupby("method").uploads.max().min()
        for method, own in arms.groupby("method", sort=False):
            third, error = max(1, len(own) // 3), (100 * own.fgn_se / own.fgn).replace(np.inf, np.nan).mean()
            line = {"setting": setting, "method": method, "clients": own.clients.mean(), "peak": own.clients.max()}
            line |= {"early": own.clients[:third].mean(), "late": own.clients[-third:].mean()}
            line |= {"critical": own.critical.sum(min_count=1) if "critical" in own else np.nan, "fgn_error": error}
            line |= {"size_ratio": own.size_ratio.mean(), "rounds": len(own), "samples": own.samples.iloc[-1]}
            within = own[own.uploads <= thriftiest].accuracy.dropna()
            lines.append(line | reach(own, goal) | {"equal": within.iloc[-1] if len(within) else np.nan})
    return pd.DataFrame(lines).groupby(["setting", "method"], sort=False).mean()


def targets(df: pd.DataFrame) -> pd.DataFrame:
    """`reach` of 10, 20, .. % accuracy as far as any arm comes (Figs 20, 21), means over the trials that reach it."""
    runs, goals = df.groupby(["setting", "method", "trial"], sort=False), range(10, int(df.accuracy.max()) + 1, 10)
    lines = [{"setting": s, "target": goal, "method": m} | reach(own, goal) for (s, m, _), own in runs for goal in goals]
    return pd.DataFrame(lines or {"setting": [], "target": [], "method": []}).groupby(["setting", "target", "method"]).mean()


def report(df: pd.DataFrame, runs: list, folder) -> None:
    """Writes and prints selection.csv; writes targets.csv, and fgn.png (Figs 1, 18, 49)."""
    table = selection(df)
    table.to_csv(folder / "selection.csv")
    print(table.to_string(float_format="%.1f"))
    print("clients a round: mean, peak, first, last third; critical rounds; standard error of FGN in %; 1 + CV^2(N); totals;")
    print("rounds, uploads, clients a round to the base's final accuracy, trials that reach it; accuracy at equal uploads")
    targets(df).to_csv(folder / "targets.csv")
    experiment.curves(df, folder / "fgn.png", *(name for name in ("fgn", "fim", "clients", "critical") if name in df))


# ----------------------------------------------------------------------------------------------------- presets and main

ALEXNET = "--dataset cifar10 --model alexnet --rounds 200 --batch-size 16 --mu 0.01"
VGG, RESNET = ALEXNET + " --model vgg11 --mu 0.001", ALEXNET + " --model resnet18 --mu 0.001"
TEXT = "--dataset shakespeare --model lstm --partition natural --rounds 200 --batch-size 16"
CLIENT_BASES, SERVER_BASES = "--base fedprox vrlsgd fednova", "--base fedadagrad fedyogi fedadam"
PAIR, ALPHAS, NETS = "--dataset cifar10 fmnist", "--alpha 0.1 0.2 0.3", "--model alexnet vgg11"
BOTH, DELTAS, P = f"{PAIR} {ALPHAS}", "--delta 0 0.01 0.03 0.05 0.2 0.35 0.5", "0.1 0.3 0.5 0.7"
PRESETS = {
    "fig1": f"{ALEXNET} {BOTH} --detector fgn fim --detect-samples 32  # FGN and FedFIM: windows, accuracy (1, 17)",
    "fig2": f"{ALEXNET} {BOTH} {NETS}  # FedAvg with AlexNet and VGG-11 (2-5, 20, 21, 49)",
    "fig6": f"{ALEXNET} {BOTH} {CLIENT_BASES}  # FedProx, VRL-SGD, FedNova with AlexNet (6-9, 22-25)",
    "fig6-vgg": f"{VGG} {BOTH} {CLIENT_BASES}  # the same with VGG-11",
    "fig10": f"{ALEXNET} {BOTH} {DELTAS}  # threshold delta",
    "fig11": f"{ALEXNET} {PAIR} --base fedavg fedprox --alpha 0.1 0.2 0.3 0.5 1.0  # heterogeneity",
    "fig12": f"{ALEXNET} {PAIR} --epochs 1 2 3 4 5  # local epochs",
    "fig13": f"{ALEXNET} {PAIR} --weight-decay 0 1e-5 1e-4 1e-3  # weight decay",
    "fig14": f"{ALEXNET} {PAIR} --base fedavg fedprox --clients 64 128 256 512  # number of clients",
    "fig15": f"{ALEXNET} {PAIR} --clients-per-round 8 16 32 48  # participation",
    "fig18": f"{ALEXNET} {BOTH} --trials 5  # five seeds (18, 19)",
    "fig26": f"{ALEXNET} {BOTH} {CLIENT_BASES} {DELTAS}  # delta under other bases (26-28)",
    "fig29": f"{ALEXNET} {ALPHAS} --base fedavg fedprox vrlsgd fednova --dataset cifar100  # (29, 30, 33-36)",
    "fig29-vgg": f"{VGG} {ALPHAS} --base fedavg fedprox vrlsgd fednova --dataset cifar100  # the same with VGG-11",
    "fig31": f"{TEXT} --base fedavg fedprox vrlsgd fednova  # clients are speaking roles (31, 32, 37, 38)",
    "fig31-dirichlet": f"{TEXT} {ALPHAS} --base fedavg fedprox vrlsgd fednova --partition dirichlet  # by the next character",
    "fig39": f"{ALEXNET} {BOTH} {SERVER_BASES} {NETS}  # FedAdagrad, FedYogi, FedAdam (39-46)",
    "fig47": f"{ALEXNET} {PAIR} --arm cl base random --p-double {P}  # A.4: random doubling",
    "fig48": f"{ALEXNET} {PAIR} --arm cl base random --p-halve {P}  # A.4: random halving",
    "fig50": f"{RESNET} {BOTH}  # FedAvg with ResNet-18 (50, 51)",
    "fig52": f"{RESNET} {BOTH} {CLIENT_BASES} fedadagrad fedyogi fedadam  # the other bases with ResNet-18 (52-59)",
    "controls": f"{ALEXNET} {ALPHAS} --arm {' '.join(ARMS)}  # ours: every arm, among them FedCL's uploads spent otherwise",
    "selection": "--arm base cl longer constant --select size uniform --each 0 8 --budget 960 --rounds 120 --trials 10  # ours",
    "detectors": f"{ALEXNET} --detector fgn fim --detect-samples 32 --window 1 3 5 10  # ours: FGN, FedFIM and windows",
    "decay": f"{ALEXNET} --lr-decay 0.9 0.95 0.99 1.0  # ours: decay of the learning rate",
}


def main(argv=None) -> None:
    """The command line; `argv` stands in for it in tests."""
    method, hooks = ("arm", "detector", "select", "each", "server_ema"), {"after": lambda config: config.arm in REPLAYS}
    hooks |= {"name": name, "report": report, "unread": unread, "instead": require_cl}
    experiment.main(Config, PRESETS, __doc__, federate, method, **hooks, argv=argv)


if __name__ == "__main__":
    main()
