"""python fedcl_gmm_sync.py --dataset mnist --alpha 0.1 --rounds 60 --method fedcl fedcl-fresh fedgen fedavg

"FedCL: Federated Multi-Phase Curriculum Learning to Synchronously Correlate User Heterogeneity" (Wang, Guo and Jia),
Algorithm 1, and its baselines. Clients train on the confidence-aware loss l_cl and upload, beside their weights, a Gaussian
mixture of their difficulty scores. The server pools draws from all mixtures (the distribution beta), trains a generator of
latent features on label and difficulty, and freezes a client once more than a share v of its draws is at most beta_T, the
T-quantile of all. When all are frozen, everyone goes on with the next, smaller T. omega is the net, theta the generator.

What differs from the paper, and why:
- A phase lasts at most ceil(rounds / Z) rounds: with T <= v not all clients can pass one check, so it might never end.
- At the printed tau = 10, lambda = .5 the confidence s* is e for every loss below 9.63: FedCL is then cross-entropy at e
  times the learning rate. Controls show it: fedgen-e (FedGen at e lr), fedcl-e (l_cl / e), fedcl-logc (tau = log C).
- s* (Castells et al., 2020) is Eq 7's local minimiser, e where it has none: if l < tau, Eq 7 falls without end as s grows.
- Averaged are M_f, the frozen, and P_t, this round's participants (Eq 21: all K); only P_t is checked (line 20: all of M_l).
- beta is renewed before theta (line 18 before 17); round 1 has no synthetic term, as the generator has learnt nothing yet.
- The generator is FedGen's, told one drawn score, standardised by the pool. Whether it obeys: `rank_correlation`.
- Ours, marked so: --average fresh leaves the frozen out of Eq 21; --upload quantiles; --tau -1.
"""

import dataclasses
import math
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common
import experiment
from experiment import flag

COMPONENTS, DRAWS = 3, 320  # L, Gaussians of a client's mixture; N_k, the server's draws from each
LEVELS = np.linspace(0, 1, 17)  # of --upload quantiles
NOISE, TEACHING_STEPS, TEACHING_BATCH, TEACHING_LR = 32, 50, 128, 1e-4  # the generator: length of eps, then Adam in a round


# ----------------------------------------------------------------------------------------------- the bases and methods


class Mean(common.FedProx):
    """omega <- the uniform mean of P_t's weights and of those with which M_f froze (Eq 21). mu is 0 except in fedprox."""

    def aggregate(self, x: Tensor, update: common.Update, clients: np.ndarray, sizes: np.ndarray) -> Tensor:
        M_f = self.memory["frozen"] if self.config.average == "all" else {}
        return torch.stack([*M_f.values(), *update.weights]).mean(0)


class FedEnsemble(Mean):
    """FedAvg; the summed logits of all users' models are tested. Users outside P_t count with the omega that P_t received."""

    def aggregate(self, x, update, clients, sizes):
        self.memory["users"] = torch.cat([update.weights, x[None]])
        return super().aggregate(x, update, clients, sizes)


class FedDistillPlus(Mean):
    """Loss + c KL(softmax(Q[y]) || p), Q (C, C) the mean over users of the logits that they last shared for each label."""

    def client(self, x, clients):
        if "logits" not in self.memory:
            return super().client(x, clients)
        Q = torch.stack([*self.memory["logits"].values()]).nanmean(0)

        def penalty(step) -> Tensor:  # 0 for a label of which nobody has shared logits (nan)
            q, log_p = common.gather(Q, step.y), step.logits.log_softmax(-1)
            kl = F.kl_div(log_p, q.nan_to_num().log_softmax(-1), reduction="none", log_target=True).sum(-1)
            return self.config.distill * (step.weight * kl * ~q.isnan().any(-1)).sum(1)

        return super().client(x, clients) | {"penalty": penalty}

    def share(self, fl: common.Federation, clients: np.ndarray, weights: Tensor) -> None:
        """Notes the mean logits (C, C) of each label that a client holds; nan for the others."""
        shards = [fl.shards[k] for k in clients]
        logits = common.predict(fl.model, weights, fl.data.images("train", fl.model.dtype), shards, fl.config.chunk)
        for k, shard, own in zip(clients, shards, logits, strict=True):
            of_label = F.one_hot(fl.data.y_train[shard], fl.data.classes).to(own.dtype)  # (n, C)
            self.memory.setdefault("logits", {})[int(k)] = of_label.T @ own / of_label.sum(0)[:, None]  # 0 / 0 = nan


class FedDistill(common.Solo, FedDistillPlus):
    """FedDistill+ without an average: each user trains, and is tested with, its own model."""


# A method is the one loop below with a base, a factor of --lr, and flags that it fixes and so does not read
NEITHER = {"mu": 0.0, "distill": 0.0}  # FedProx' term nor FedDistill's
FEDGEN = {"freeze": False, "loss": "ce", "difficulty": False, "tau": 0.0}
FEDAVG = FEDGEN | {"synthetic": 0.0}
ARMS = {
    "fedcl": (Mean, 1.0, NEITHER),
    "fedcl-fresh": (Mean, 1.0, NEITHER | {"average": "fresh"}),
    "fedcl-nofreeze": (Mean, 1.0, NEITHER | {"freeze": False}),
    "fedgen": (Mean, 1.0, NEITHER | FEDGEN),
    "fedgen-e": (Mean, math.e, NEITHER | FEDGEN),
    "fedavg": (Mean, 1.0, NEITHER | FEDAVG),
    "fedprox": (Mean, 1.0, FEDAVG | {"distill": 0.0}),
    "fedensemble": (FedEnsemble, 1.0, NEITHER | FEDAVG),
    "feddistill": (FedDistill, 1.0, FEDAVG | {"mu": 0.0}),
    "feddistill+": (FedDistillPlus, 1.0, FEDAVG | {"mu": 0.0}),
    "fedcl-e": (Mean, 1.0, NEITHER | {"loss": "confidence/e"}),
    "fedcl-logc": (Mean, 1.0, NEITHER | {"tau": 0.0}),
}


@dataclasses.dataclass
class Config(experiment.Config):
    """Common flags with Table I's values (rounds: 200 there), then the algorithm's own (v and S: Table VI's best)."""

    model: str = "fedgen-cnn"
    clients: int = 20
    clients_per_round: int = 10
    rounds: int = 6
    epochs: int = 1
    batch_size: int = 32
    min_size: int = 32
    mu: float = flag(0.1, "method fedprox: weight of its proximal term (0: none)", 0)
    method: str = flag(tuple(ARMS)[:-2], "methods to compare, paired", choices=ARMS)  # the last two, controls, cost 10 s each
    local_steps: int = flag(20, "SGD steps of a client in a round", 1, 10**5)
    data_share: float = flag(0.0, "share of the training set that the users hold (0: half; all of digits)", 0, 1)
    eval: str = flag("full", "accuracy reported: on the full test set, or on labels a user holds", choices=("full", "paper"))
    tau: float = flag(10.0, "loss that parts easy from hard (0: log of the classes; -1, ours: its running mean)", -1, 1e6)
    lam: float = flag(0.5, "lambda of the confidence-aware loss l_cl (1e9: all confidences are 1)", above=0)
    loss: str = flag("confidence", "fedcl's: l_cl, that over e, or cross-entropy", choices=("confidence", "confidence/e", "ce"))
    difficulty: bool = flag(True, "tell fedcl's generator the difficulty s")
    freeze: bool = flag(True, "freeze fedcl's clients that pass a phase")
    average: str = flag("all", "Eq 21 over frozen and fresh weights, or over the fresh alone (ours)", choices=("all", "fresh"))
    thresholds: str = flag("0.8,0.6,0.2", "the phases' T, shares of all draws, falling, with commas")
    v: float = flag(0.7, "share of a client's draws below beta_T above which it freezes (1: never)", 0, 1)
    phase_quorum: float = flag(1.0, "share of frozen clients that ends a phase (1: Algorithm 1; .8: the text)", high=1, above=0)
    upload: str = flag("gmm", "form of a client's scores: a mixture, or 17 quantiles (ours)", choices=("gmm", "quantiles"))
    synthetic: float = flag(1.0, "weight of the generated samples' loss (0: none, and no generator)", 0)
    generator_hidden: int = flag(256, "width of the generator", 1, 65536)
    distill: float = flag(0.1, "methods feddistill: weight of their term (0: none)", 0)

    def check(self) -> None:
        super().check()
        S = pd.to_numeric(pd.Series([1, *self.thresholds.split(","), 0]), errors="coerce")
        if not (S.diff()[1:] < 0).all():
            raise common.UsageError(f"--thresholds {self.thresholds}: must fall from phase to phase within (0, 1)")
        if -1 < self.tau < 0:
            raise common.UsageError(f"--tau {self.tau}: wanted a loss, 0 or -1")
        if (self.epochs, self.base, self.server_lr) != (1, "fedavg", 0):
            raise common.UsageError("--epochs, --base, --server-lr: have no meaning here; --local-steps and --method have")

    def federation(self, data: common.Data, streams: common.Streams) -> common.Federation:
        return begin(self, data, streams)[0]

    def scored(self) -> bool:
        """Whether anybody reads the clients' scores: freezing, the generator or a running tau."""
        return self.freeze or (self.difficulty and self.synthetic > 0) or self.tau == -1


def unread(config: Config) -> set[str]:
    """The flags without effect on this method: where they are swept it is trained once and shown in every setting."""
    fixed = ARMS[config.method][2]
    config = dataclasses.replace(config, **fixed)
    read = dict.fromkeys(("average", "thresholds", "v", "phase_quorum"), config.freeze)
    read |= dict.fromkeys(("difficulty", "generator_hidden"), config.synthetic > 0)
    read |= dict.fromkeys(("tau", "lam"), config.loss != "ce" or config.scored()) | {"upload": config.scored()}
    return {*fixed, *(name for name, effective in read.items() if not effective)}


# ------------------------------------------------------------------------ the confidence-aware loss and the generator


def confidence(ce: Tensor, tau: float, lam: float) -> Tensor:
    """s* = exp(-w) with w e^w = max(-2/e, b) / 2, b = (l - tau) / lambda detached: Lambert's W by Halley's steps in float64."""
    b = ((ce.detach().double() - tau) / lam).clamp(min=-2 / math.e)
    p = (math.e * b + 2).clamp(min=0).sqrt()  # 0 at the branch point, where w = -1
    w = torch.where(b < 0, -1 + p - p**2 / 3 + p**3 * (11 / 72), torch.log1p(b.clamp(min=0) / 2) * 0.8)
    for _ in range(6):  # w began as the series at the branch point, or near log(1 + b / 2)
        f, above = w - b / 2 * torch.exp(-w), (w + 1).clamp(min=1e-8)
        w = w - f / (above - (w + 2) * f / (2 * above))
    return torch.where(b > -2 / math.e, torch.exp(-w), math.e).to(ce.dtype)


def loss_of(config: Config, tau: float, ce: Tensor) -> Tensor:
    """The method's loss of samples: l_cl = (l - tau) s* + lambda (log s*)^2 (Eq 7, derivative s* in l), that over e, or l."""
    if config.loss == "ce":
        return ce
    s = confidence(ce, tau, config.lam)
    return ((ce - tau) * s + config.lam * s.log() ** 2) / (math.e if config.loss == "confidence/e" else 1)


def generator(fl: common.Federation, saved: dict) -> nn.Sequential:
    """z = G(eps, y, s) of noise, one-hot label and, if told, difficulty. If none is saved, the initial one that all share."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fl.streams.seed("generator"))
        hidden, latent = fl.config.generator_hidden, fl.model.skeleton.head.in_features
        first = nn.Linear(NOISE + fl.data.classes + 1, hidden)
        G = nn.Sequential(first, nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, latent))
    if not fl.config.difficulty:
        first.weight = nn.Parameter(first.weight[:, :-1].detach().clone())
    G.to(fl.model.device, fl.model.dtype).load_state_dict(saved or G.state_dict())
    return G


def conditions(fl: common.Federation, state: dict, size: tuple, purpose: str, *key: int) -> tuple[Tensor, Tensor]:
    """y ~ p(y) of shape `size`, and the generator's input (*size, NOISE + C [+ 1]): eps ~ N(0, I), one-hot y, s ~ beta."""
    p, N = np.sum(list(state["counts"].values()), axis=0), np.array(state["pool"])  # Eq 15
    y = fl.streams(purpose + " label", *key).choice(len(p), size, p=p / p.sum())
    parts = [fl.streams(purpose + " noise", *key).standard_normal((*size, NOISE)), np.eye(len(p))[y]]
    if fl.config.difficulty:
        r = fl.streams(purpose + " difficulty", *key).integers(len(N), size=size)  # the r-th of N, Section IV-A
        parts.append(((N[r] - N.mean()) / max(N.std(), 1e-12))[..., None])
    x = torch.as_tensor(np.concatenate(parts, -1), device=fl.model.device, dtype=fl.model.dtype)
    return torch.as_tensor(y, device=fl.model.device), x


def teach(fl: common.Federation, state: dict, head: nn.Module, t: int) -> None:
    """Adam on Eq 18 plus FedGen's diversity term. The global head, linear, gives the mean of the averaged heads' logits."""
    config, tau, G = fl.config, state["tau"], generator(fl, state["generator"]).train()
    adam = torch.optim.Adam(G.parameters(), lr=TEACHING_LR * 0.98**t, weight_decay=1e-2)
    adam.load_state_dict({"state": state["adam"], "param_groups": adam.state_dict()["param_groups"]})  # its moments so far
    for y, x in zip(*conditions(fl, state, (TEACHING_STEPS, TEACHING_BATCH), "teaching", t), strict=True):
        z = G(x)
        ce = F.cross_entropy(head(z[None])[0], y, reduction="none")
        d1, d2 = torch.cdist(z, z, p=1) / z.shape[1], (x[:, None, :NOISE] - x[:, :NOISE]).square().mean(-1)
        J = loss_of(config, tau, ce).mean() + torch.exp(-(d1 * d2).mean())  # 1 where all z agree
        adam.zero_grad()
        J.backward()
        adam.step()
    state["generator"], state["adam"] = G.state_dict(), adam.state_dict()["state"]


@torch.no_grad()
def rank_correlation(fl: common.Federation, state: dict, head: nn.Module, t: int) -> float:
    """Spearman's rho of requested and realised difficulty over fresh generated samples (0 if either is constant)."""
    y, x = conditions(fl, state, (DRAWS,), "obedience", t)
    ce = F.cross_entropy(head(generator(fl, state["generator"]).eval()(x)[None])[0].double(), y, reduction="none")
    scores = (ce - state["tau"]) * confidence(ce, state["tau"], fl.config.lam)
    both = pd.DataFrame({"requested": x[:, -1].tolist(), "realised": scores.tolist()})
    return float(both.corr("spearman").fillna(0.0).loc["requested", "realised"])


# ------------------------------------------------------------------------------------------- client side, server side


def schedule(config: Config, shard: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The index schedule (T, B): passes over the shard, each in a new order; what does not fill a batch is left out."""
    T, B, size = config.local_steps, config.batch_size, min(config.batch_size, len(shard))
    a_pass = len(shard) // size
    rows = [rng.permutation(shard)[: a_pass * size].reshape(a_pass, size) for _ in range(-(-T // a_pass))]
    return np.pad(np.concatenate(rows)[:T], ((0, 0), (0, B - size)), constant_values=-1)


@torch.no_grad()
def download(fl: common.Federation, state: dict, clients: np.ndarray, t: int) -> tuple[dict | None, int]:
    """What clients get beside the net (line 4), and how many numbers that is: theta, p(y) and beta, or FedDistill's Q. Once the
    generator has learnt, its features z (T, B, latent) and labels y' (T, B) for each client."""
    C, G, size = fl.data.classes, state["generator"], (fl.config.local_steps, fl.config.batch_size)
    if not G:
        return None, len(clients) * C * C * ("logits" in state["base"])  # FedDistill's Q
    y, x = (torch.stack(each) for each in zip(*(conditions(fl, state, size, "synthetic", t, k) for k in clients), strict=True))
    z = generator(fl, G).eval()(x.flatten(0, -2)).view(*y.shape, -1)
    numbers = sum(w.numel() for w in G.values()) + C  # and beta: by one seed all draw the same pool from the mixtures
    numbers += fl.config.difficulty * sum(len(part) for parts in state["scores"].values() for part in parts)
    return {"z": list(z.cpu().numpy()), "y'": list(y.cpu().numpy())}, len(clients) * numbers


def objective(config: Config, tau: float, step) -> Tensor:
    """J of a step, (K,): Eq 19."""
    J = (step.weight * loss_of(config, tau, common.sample_losses(step))).sum(1)
    if "z" in step.extra:  # h(z): only the predictor head sees it
        y = step.extra["y'"]
        ce = F.cross_entropy(step.net.head(step.extra["z"]).flatten(0, 1), y.flatten(), reduction="none")
        J = J + config.synthetic * loss_of(config, tau, ce).view_as(y).mean(1)
    return J


def mixture(scores: np.ndarray, seed: int) -> list[list[float]]:
    """(alpha, mu, sigma^2), each (L,), of the scores (n,), Eq 12: all that is uploaded of them."""
    from sklearn.mixture import GaussianMixture
    from threadpoolctl import threadpool_limits

    L = min(COMPONENTS, len(np.unique(scores)))
    with warnings.catch_warnings(), threadpool_limits(1):  # scikit-learn's sums would differ with the number of threads
        warnings.simplefilter("ignore")  # a fit that has not converged is a mixture all the same
        try:
            fit = GaussianMixture(L, covariance_type="diag", reg_covar=1e-6, random_state=seed).fit(scores[:, None])
        except ValueError:  # E[x^2] - mu^2 cancels below 0 where scores near 1e5 hardly differ: one Gaussian tells as much
            return [[1.0], [float(scores.mean())], [float(scores.var()) + 1e-6]]
    return [fit.weights_.tolist(), fit.means_[:, 0].tolist(), fit.covariances_[:, 0].tolist()]


def upload(fl: common.Federation, state: dict, clients: np.ndarray, weights: Tensor, batches: dict, t: int) -> int:
    """Line 14: label counts c_k, and the mixture D_k (or quantiles) of the scores that each local model gives its samples.
    Returns how many numbers that is. Finite weights can have scores that are not: NonFiniteError."""
    config, y, C, sent = fl.config, fl.data.y_train.cpu().numpy(), fl.data.classes, 0
    if isinstance(fl.base, FedDistillPlus):
        fl.base.share(fl, clients, weights)
        sent += len(clients) * C * C
    if config.synthetic:
        state["counts"] |= {int(k): np.bincount(y[batches[k][batches[k] >= 0]], minlength=C).tolist() for k in clients}  # c_k
        sent += len(clients) * C
    if config.scored():
        losses = [ce for ce, _ in common.score(fl.model, weights, fl.data, [fl.shards[k] for k in clients], config.chunk or 1)]
        state["mean_loss"] = float(np.mean([ce.mean() for ce in losses]))
        for k, ce in zip(map(int, clients), losses, strict=True):
            scores = (ce - state["tau"]) * confidence(torch.as_tensor(ce), state["tau"], config.lam).numpy()  # Eq 6
            if not np.isfinite(scores).all():
                raise common.NonFiniteError(f"round {t + 1}: a score of client {k} is not finite. Try a smaller --lr")
            quantiles, seed = [np.quantile(scores, LEVELS).tolist()], fl.streams.seed("mixture", t, k)
            state["scores"][k] = mixture(scores, seed) if config.upload == "gmm" else quantiles  # D_k
            sent += sum(map(len, state["scores"][k]))
    return sent


def participants(fl: common.Federation, frozen: dict, t: int) -> np.ndarray:
    """P_t, this round's clients: the first that are not frozen in the round's random order, which all methods share."""
    order = fl.streams("select", t).permutation(len(fl.everyone))
    return np.sort(order[~np.isin(order, list(frozen))][: fl.config.clients_per_round])


def pooled_draws(uploaded: dict[int, list], streams: common.Streams, t: int) -> dict[int, np.ndarray]:
    """N_k of every client that has uploaded: the server's draws from its latest mixture, or between its quantiles."""
    draws = {}
    for k, (first, *rest) in sorted(uploaded.items()):
        rng = streams("pool", t, k)
        if rest:  # alpha, mu, sigma^2
            mu, variance = np.array(rest)[:, rng.choice(len(first), DRAWS, p=np.array(first) / np.sum(first))]
            draws[k] = rng.normal(mu, np.sqrt(variance))
        else:
            draws[k] = np.interp(rng.random(DRAWS), LEVELS, first)
    return draws


def synchronise(config: Config, state: dict, trained: dict[int, Tensor], draws: dict[int, np.ndarray], t: int) -> dict:
    """Freezes those of `trained` that pass beta_T, and ends the phase (lines 19 to 26). Returns the round's columns."""
    z, S, M_f, N = state["phase"], config.thresholds.split(","), state["base"]["frozen"], state["pool"]
    if z == len(S) or not config.freeze:  # after the last phase everyone trains on
        return {"phase": z + 1, "frozen": 0, "froze": 0}
    beta_T = N[max(math.ceil(float(S[z]) * len(N) - 1e-9), 1) - 1]  # element ceil(T N); .07 * 100 is 7.000000000000001
    below = {k: int((N_k <= beta_T).sum()) for k, N_k in draws.items()}
    passed = {k: omega_k.clone() for k, omega_k in trained.items() if below[k] > config.v * DRAWS + 1e-9}  # more, not as many
    M_f.update(passed)
    natural = len(M_f) >= config.phase_quorum * config.clients - 1e-9
    forced = t + 1 - state["begun"] >= config.rounds / len(S)  # that is ceil(rounds / Z) rounds
    columns = {"phase": z + 1, "frozen": len(M_f), "froze": len(passed), "beta_T": beta_T}
    columns["advance"] = "natural" if natural else "forced" if forced else ""
    columns["fractions"] = " ".join(f"{below[k] / DRAWS:.3f}" if k in below else "-" for k in range(config.clients))
    if natural or forced:
        state["phase"], state["begun"] = z + 1, t + 1
        M_f.clear()
    return columns


def serve(fl: common.Federation, state: dict, trained: dict[int, Tensor], t: int) -> dict:
    """What the server does beyond averaging: beta, the generator, freezing (lines 17 to 26). Returns the round's columns."""
    config, columns, head = fl.config, {}, fl.model.bind(state["weights"][None]).head
    draws = pooled_draws(state["scores"], fl.streams, t)
    state["pool"] = np.sort(np.concatenate([*draws.values(), []])).tolist()  # N, the distribution beta
    if config.synthetic:
        teach(fl, state, head, t)
        if config.difficulty:
            columns["rank_correlation"] = rank_correlation(fl, state, head, t)
    if draws:
        columns |= synchronise(config, state, trained, draws, t)
    if config.tau == -1:  # SuperLoss' running mean
        columns["tau"], state["tau"] = state["tau"], 0.9 * state["tau"] + 0.1 * state["mean_loss"]
    if draws and t in (0, config.rounds // 3, 2 * config.rounds // 3):  # the three rounds that mixtures.png shows
        state["snapshots"][t] = {"draws": {k: N_k.tolist() for k, N_k in draws.items()}, "beta_T": columns.get("beta_T")}
    return columns


def evaluate(fl: common.Federation, state: dict) -> dict:
    """Accuracy (%) and loss of the global net, an ensemble, or users' own nets; the paper's asks users for labels they hold."""
    y, users, labels = fl.data.y_test, state["base"].get("users"), np.array(state["labels"])  # label counts (K, C)
    nets = fl.received(state, fl.everyone).view(-1, fl.model.size) if users is None else users
    images, everything = fl.data.images("test", fl.model.dtype), [np.arange(len(y))] * len(nets)
    logits = common.predict(fl.model, nets, images, everything, fl.config.chunk)
    if users is not None:  # the last net is that of all users who did not train
        logits = [(sum(logits) + (len(fl.everyone) - len(users)) * logits[-1]) / len(fl.everyone)]
    shares = labels / labels.sum(1, keepdims=True) if fl.config.per_client else None
    seen, hits = common.tested(logits, fl.data, shares)
    held = (labels > 0) * torch.bincount(y, minlength=fl.data.classes).cpu().numpy()
    both = {"accuracy_full": seen["accuracy"], "accuracy_paper": float(100 * ((labels > 0) * hits).sum() / held.sum())}
    return seen | {"accuracy": both[f"accuracy_{fl.config.eval}"]} | both


def begin(config: Config, data: common.Data, streams: common.Streams) -> tuple[common.Federation, dict]:
    """The users, who hold a random share of the data (pixels in [-1, 1]), and the state, all that survives a round: in "base"
    what the base remembers, the frozen weights above all, in "labels" (K, C) the users' counts (Fig 6)."""
    base, factor, fixed = ARMS[config.method]
    config = dataclasses.replace(config, lr=config.lr * factor, **fixed)
    if data.mean is None:
        raise common.UsageError(f"--dataset {config.dataset}: this script reads images")
    n, share = len(data.y_train), config.data_share or (1.0 if config.dataset == "digits" else 0.5)
    kept = np.sort(streams("share").permutation(n)[: round(share * n)])
    grey, owner = torch.full_like(data.mean, 127.5), None if data.owner is None else data.owner[kept]
    users = {"x_train": data.x_train[kept], "y_train": data.y_train[kept], "owner": owner}
    fl = common.Federation(config, dataclasses.replace(data, mean=grey, std=grey, **users), streams, base)
    if config.synthetic and not hasattr(fl.model.skeleton.head, "in_features"):
        raise common.UsageError(f"--model {config.model}: {config.method}'s generator wants a net with features and a head")
    fl.base.memory["frozen"] = {}  # M_f: weights by client; `start` puts the memory into the state
    state = fl.start() | {"tau": config.tau if config.tau > 0 else math.log(data.classes), "phase": 0, "begun": 0, "pool": []}
    state |= {name: {} for name in ("scores", "counts", "generator", "adam", "snapshots")}
    return fl, state | {"labels": [fl.data.y_train[own].bincount(minlength=data.classes).tolist() for own in fl.shards]}


def federate(config: Config, data: common.Data, run: experiment.Run) -> None:
    """Algorithm 1 for one method; a baseline leaves out what its flags in ARMS switch off."""
    fl, state = begin(config, data, run.streams)
    config = fl.config  # with the flags of ARMS
    for t in run.rounds(state):
        clients = participants(fl, state["base"]["frozen"], t)  # P_t
        batches = {k: schedule(config, fl.shards[k], run.streams("batches", t, k)) for k in clients}
        synthetic, received = download(fl, state, clients, t)  # line 4; z and y' of the generator
        how = {"loss": lambda step: objective(config, state["tau"], step), "per_step": synthetic}  # J, Eq 19
        kept, update = fl.train(state, t, clients, list(batches.values()), lr=config.lr, **how)
        sent = upload(fl, state, kept, update.weights, batches, t)  # line 14: D_k, the scores' mixture; c_k, label counts
        fl.aggregate(state, kept, update)  # omega, Eq 21
        columns = serve(fl, state, dict(zip(map(int, kept), update.weights, strict=True)), t)  # lines 17 to 26
        columns |= fl.cost(clients, update, received, sent) | (evaluate(fl, state) if run.due(t) else {})
        run.record(t, len(kept), len(clients) - len(kept), **columns, train_loss=float(update.loss.mean()))


# --------------------------------------------------------------------------------------------- tables, figures, presets


def results(df: pd.DataFrame) -> pd.DataFrame:
    """By (setting, method, trial): both protocols, (tested) rounds and uploads to FedAvg's final accuracy, traffic, phases."""
    by, tested = ["setting", "method", "trial"], df.dropna(subset="accuracy")
    goal = tested[tested.method == "fedavg"].groupby(["setting", "trial"]).accuracy.last().rename("goal")
    hits = tested.join(goal, on=["setting", "trial"]).query("accuracy >= goal").groupby(by)
    runs, best = df.groupby(by, sort=False), tested.groupby(by).accuracy_paper.nlargest(5).groupby(by)
    columns = {"full_final": runs.accuracy_full.last(), "paper_top5": best.mean()}
    columns |= {"rounds": hits["round"].first(), "updates": hits.uploads.first()}
    columns["megabytes"] = (runs.received_mb.last() + runs.sent_mb.last()).round(3)
    if "phase" in df:
        own = df.reindex(columns=[*by, "phase", "froze", "advance", "rank_correlation"]).dropna(subset="phase")
        own = own.assign(natural=own.advance == "natural", forced=own.advance == "forced").groupby(by)
        columns |= dict(own[["froze", "natural", "forced"]].sum()) | {"rank_correlation": own.rank_correlation.mean()}
    return pd.DataFrame(columns, index=runs.size().index)


def report(df: pd.DataFrame, runs: list[experiment.Run], folder: Path) -> None:
    """Prints `results` and writes results.csv; draws phases.png and mixtures.png."""
    table = results(df)
    table.to_csv(folder / "results.csv")
    by_method = table.groupby(["setting", "method"], sort=False)
    print(by_method.mean().assign(reached=by_method.rounds.count()).to_string(float_format="%.2f", na_rep="-"))
    if "phase" in df:
        experiment.curves(df.dropna(subset="phase"), folder / "phases.png", *df.filter(["phase", "frozen", "beta_T"]))
        draw_mixtures([(run, s) for run in runs if run.trial == 0 and (s := run.load()["state"]["snapshots"])], folder)


def draw_mixtures(snapshots: list, folder: Path) -> None:
    """The distribution of each client's draws at three rounds: who trained there and is above v at beta_T freezes."""
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(len(snapshots), 3, squeeze=False, figsize=(12, 3 * len(snapshots)), layout="constrained")
    for row, (run, saved) in zip(axes, snapshots, strict=True):
        for axis, (t, now) in zip(row, saved.items(), strict=False):
            draws = np.array([*now["draws"].values()])
            for N_k in draws:
                axis.ecdf(N_k, color="grey", lw=0.6)
            axis.ecdf(draws.flatten(), lw=2, label="all")
            if now["beta_T"] is not None:
                axis.axvline(now["beta_T"], color="C1", ls="--", label="β$_T$")
                axis.axhline(run.config.v, color="C2", ls=":", label="v")
            axis.set_xlim(np.quantile(draws, [0.001, 0.97]))  # few are very hard
            axis.set(title=f"{run.setting} {run.method}, round {t + 1}", xlabel="difficulty score", ylabel="share below")
    axes[0, 0].legend(loc="lower right")
    fig.savefig(folder / "mixtures.png", dpi=150)


ABLATION = "--dataset emnist --rounds 200 --alpha 0.1 --method fedcl fedcl-fresh fedcl-nofreeze fedgen-e"
CELEBA = "--dataset celeba --partition natural --data-share 1 --min-size 2 --generator-hidden 128 --rounds 100"
PRESETS = {
    "table1": "--dataset mnist --rounds 200 --thresholds 0.9,0.6,0.3 --v 0.8  # Table I's S and v, on MNIST",
    "table2-mnist": "--dataset mnist --rounds 200 --alpha 0.05 0.1 1  # accuracy by heterogeneity (Fig 3)",
    "table2-emnist": "--dataset emnist --rounds 200 --alpha 0.05 0.1 1 10 --local-steps 20 40  # by alpha and T (Fig 5)",
    "table2-celeba": f"{CELEBA} --clients 10 25 --clients-per-round 5  # 5 of 10 and 5 of 25 (Fig 4)",
    "table2-celeba-10": f"{CELEBA} --clients 25 --clients-per-round 10  # 10 of 25 celebrities",
    "table3": "--dataset mnist --rounds 200 --alpha 0.05 0.1 1 10  # rounds to FedAvg's final accuracy; Fig 6: partition.png",
    "table4": f"{ABLATION} --phase-quorum 0.6 0.7 0.8 0.9  # share of frozen clients that ends a phase",
    "table5": f"{ABLATION} --thresholds 0.8,0.4 0.8,0.6,0.2 0.8,0.6,0.4,0.2 0.9,0.7,0.5,0.3,0.1  # number of phases",
    "table6-lambda": f"{ABLATION} --lam 0.2 0.5 0.8 1",
    "table6-tau": f"{ABLATION} --tau 5 10 15 20",
    "table6-s": f"{ABLATION} --thresholds 0.8,0.6,0.4,0.2 0.7,0.5,0.3 0.8,0.6,0.2 0.8,0.4",
    "table6-v": f"{ABLATION} --v 0.5 0.6 0.7 0.8",
}


def main(argv=None) -> None:
    """The command line; `argv` stands in for it in tests."""
    experiment.main(Config, PRESETS, __doc__, federate, ("method",), report=report, unread=unread, argv=argv)


if __name__ == "__main__":
    main()
