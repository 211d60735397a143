"""python fedcl_gmm_sync.py --dataset mnist --alpha 0.1 --rounds 60 --method fedcl fedgen fedavg

"FedCL: Federated Multi-Phase Curriculum Learning to Synchronously Correlate User Heterogeneity" (Wang, Guo and Jia),
Algorithm 1, and its six baselines. Clients train on the confidence-aware loss l_cl and upload, beside their weights, a
Gaussian mixture of their difficulty scores. The server pools draws from all mixtures (the distribution beta), trains a
generator of latent features on label and difficulty, and freezes a client once more than v of its draws lie below the
quantile beta_T. When all are frozen, everyone goes on with the next, smaller T.

What differs from the paper, and why:
- A phase lasts at most ceil(rounds / Z) rounds: with T <= v not all clients can pass one check, so it might never end.
- At the printed tau = 10, lambda = .5 the confidence s* is e for every loss below 9.63: FedCL is then cross-entropy at e
  times the learning rate. Three controls show it: fedgen-e (FedGen at e lr), fedcl-e (l_cl / e), fedcl-logc (tau = log C).
- The generator is told one drawn score, standardised by the pool. Nothing in Eq 18 makes it obey: `rank_correlation`.
- The paper gives S and v three times: Table VI's best are the defaults, `--preset table1` has Table I's.
"""

import dataclasses
import json
import math
import re
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common
from common import opt


@dataclass(frozen=True)
class Arm:
    """What sets one method apart from FedAvg."""

    proximal: bool = False  # FedProx's term
    distill: bool = False  # FedDistill's term: users share mean logits per label
    average: bool = True  # users share weights
    ensemble: bool = False  # the summed logits of the users' models are tested
    generator: bool = False  # the synthetic term of Eq 19
    curriculum: bool = False  # l_cl, the generator's difficulty input, freezing
    log_c: bool = False  # tau = log C
    lr_factor: float = 1.0
    divisor: float = 1.0  # of l_cl


ARMS = {
    "fedcl": Arm(generator=True, curriculum=True),
    "fedgen": Arm(generator=True),
    "fedavg": Arm(),
    "fedprox": Arm(proximal=True),
    "fedensemble": Arm(ensemble=True),
    "feddistill": Arm(distill=True, average=False),
    "feddistill+": Arm(distill=True),
    "fedgen-e": Arm(generator=True, lr_factor=math.e),
    "fedcl-e": Arm(generator=True, curriculum=True, divisor=math.e),
    "fedcl-logc": Arm(generator=True, curriculum=True, log_c=True),
}
COMPONENTS, DRAWS = 3, 320  # L, Gaussians of a client's mixture; N_k, the server's draws from each
NOISE, TEACHING_STEPS, TEACHING_BATCH, TEACHING_LR = 32, 50, 128, 1e-4  # the generator's: eps, Adam in a round


@dataclass
class Config(common.Config):
    """Common flags with the paper's defaults (Table I), then the algorithm's own."""

    model: str = "fedgen-cnn"
    clients: int = 20
    clients_per_round: int = 10
    rounds: int = 8
    epochs: int = opt(1, "has no meaning here: --local-steps sets the local work", low=1, high=100_000)
    batch_size: int = 32
    min_size: int = 32
    mu: float = opt(0.1, "of fedprox (0: no term)", low=0)

    method: tuple = opt(tuple(ARMS), "methods to compare, paired", choices=ARMS, many=True)
    local_steps: int = opt(20, "T, SGD steps of a client in a round", low=1, high=100_000)
    data_share: float = opt(0.0, "share of the training set that the users hold (0: half; all of digits)", low=0, high=1)
    eval: str = opt("full", "accuracy reported: on the full test set, or on labels a user holds", choices=("full", "paper"))
    tau: float = opt(10.0, "loss that parts easy from hard (0: log of the number of classes)", low=0)
    lam: float = opt(0.5, "lambda of l_cl (1e9: every confidence is 1)", above=0)
    loss: str = opt("confidence", "fedcl's loss: l_cl, or plain cross-entropy", choices=("confidence", "ce"))
    difficulty: bool = opt(True, "tell fedcl's generator the difficulty s (no: s = 0)")
    freeze: bool = opt(True, "freeze fedcl's clients that pass a phase")
    thresholds: tuple = opt((0.8, 0.6, 0.2), "S, the phases' T_1 > ... > T_Z", above=0, below=1, many=True)
    v: float = opt(0.7, "share of a client's draws below beta_T above which it freezes (1: never)", low=0, high=1)
    phase_quorum: float = opt(1.0, "q, share of frozen clients that ends a phase", above=0, high=1)
    synthetic: float = opt(1.0, "weight of the generated samples' loss (0: none)", low=0)
    distill: float = opt(0.1, "c of feddistill (0: no term)", low=0)
    generator_hidden: int = opt(256, "width of the generator", low=1, high=65_536)

    def check(self) -> None:
        super().check()
        if any(a <= b for a, b in zip(self.thresholds, self.thresholds[1:], strict=False)):
            raise common.UsageError(f"--thresholds {' '.join(map(str, self.thresholds))}: must fall from phase to phase")
        if self.epochs != 1:
            raise common.UsageError(f"--epochs {self.epochs}: --local-steps sets the local work here")
        if self.base != "fedavg" or self.server_lr:
            raise common.UsageError(f"--base {self.base} --server-lr {self.server_lr}: --method sets the server's rule here")
        if self.model == "lstm" or self.dataset == "shakespeare":
            raise common.UsageError(f"--dataset {self.dataset} --model {self.model}: this script reads images")

    def samples(self, n: int) -> int:
        return round((self.data_share or (1.0 if self.dataset == "digits" else 0.5)) * n)


@dataclass
class Federation:
    """What stays the same from round to round."""

    config: Config
    method: str
    model: common.Model
    data: common.Data
    shards: list[np.ndarray]
    streams: common.Streams

    @property
    def arm(self) -> Arm:
        return ARMS[self.method]

    @property
    def tau(self) -> float:
        return math.log(self.data.classes) if self.arm.log_c or self.config.tau == 0 else self.config.tau

    def loss(self, ce: Tensor) -> Tensor:
        """The arm's loss of samples from their cross-entropy: l_cl, or just that."""
        if not self.arm.curriculum or self.config.loss == "ce":
            return ce
        return confidence_loss(ce, self.tau, self.config.lam) / self.arm.divisor


# ------------------------------------------------------------------------------------------- the confidence-aware loss


def lambert_w(x: Tensor) -> Tensor:
    """W0(x), the w >= -1 with w e^w = x, for float64 x >= -1/e: a first guess, then Halley's steps."""
    p = (2 * (math.e * x + 1)).clamp(min=0).sqrt()
    w = torch.where(x < 0, -1 + p - p**2 / 3 + p**3 * (11 / 72), torch.log1p(x.clamp(min=0)) * 0.8)
    for _ in range(6):
        f, above = w - x * torch.exp(-w), (w + 1).clamp(min=1e-8)
        w = w - f / (above - (w + 2) * f / (2 * above))
    return w


def confidence(ce: Tensor, tau: float, lam: float) -> Tensor:
    """s* = exp(-W0(max(-2/e, b) / 2)) with b = (l - tau) / lambda, the minimiser of Eq 7: detached, of the shape of ce."""
    b = (ce.detach().double() - tau) / lam
    clamped = b <= -2 / math.e
    return torch.where(clamped, math.e, torch.exp(-lambert_w(b.clamp(min=-2 / math.e) / 2))).to(ce.dtype)


def difficulty_score(ce: Tensor, tau: float, lam: float) -> Tensor:
    """(l - tau) s*, Eq 6."""
    return (ce - tau) * confidence(ce, tau, lam)


def confidence_loss(ce: Tensor, tau: float, lam: float) -> Tensor:
    """(l - tau) s* + lambda (log s*)^2, Eq 7. Its derivative in l is s*."""
    s = confidence(ce, tau, lam)
    return (ce - tau) * s + lam * s.log() ** 2


# ------------------------------------------------------------------------------------------------------- the generator


class Generator(nn.Module):
    """z = G(y, s, eps): (noise, one-hot label, difficulty) -> hidden -> BatchNorm -> ReLU -> latent.

    The weights of the difficulty input are a column of their own, so that FedGen's generator is the same but for it.
    """

    def __init__(self, classes: int, latent: int, hidden: int, difficulty: bool):
        super().__init__()
        self.classes, inputs = classes, NOISE + classes
        self.hidden, self.norm, self.out = nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, latent)
        self.column = nn.Parameter((2 * torch.rand(hidden) - 1) / math.sqrt(inputs + 1)) if difficulty else None

    def forward(self, y: Tensor, s: Tensor, eps: Tensor) -> Tensor:
        """y (n,), s (n,), eps (n, NOISE) -> z (n, latent)."""
        h = self.hidden(torch.cat([eps, F.one_hot(y, self.classes).to(eps.dtype)], 1))
        h = h if self.column is None else h + s[:, None] * self.column
        return self.out(F.relu(self.norm(h)))


def generator(fed: Federation, saved: dict) -> Generator:
    """The generator with its saved state; without one the initial one, equal in all arms."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fed.streams.seed("generator"))
        latent = fed.model.skeleton.head.in_features
        G = Generator(fed.data.classes, latent, fed.config.generator_hidden, fed.arm.curriculum)
    if saved:
        G.load_state_dict(saved)
    return G.to(fed.model.device, fed.model.dtype)


def conditions(fed: Federation, state: dict, size: tuple, purpose: str, *key: int) -> tuple[Tensor, Tensor, Tensor]:
    """y ~ p(y), s ~ beta, standardised, and eps ~ N(0, I), of shapes size, size and (*size, NOISE)."""
    p = np.sum(list(state["counts"].values()), axis=0)  # Eq 15
    y = fed.streams(purpose + " label", *key).choice(len(p), size, p=p / p.sum())
    eps = fed.streams(purpose + " noise", *key).standard_normal((*size, NOISE))
    s = np.zeros(size)
    if fed.arm.curriculum and fed.config.difficulty:
        N = np.array(state["pool"])
        r = fed.streams(purpose + " difficulty", *key).integers(len(N), size=size)  # the r-th of N, Section IV-A
        s = (N[r] - N.mean()) / max(N.std(), 1e-12)
    y, s, eps = (torch.as_tensor(a, device=fed.model.device) for a in (y, s, eps))
    return y, s.to(fed.model.dtype), eps.to(fed.model.dtype)


def diversity(z: Tensor, eps: Tensor) -> Tensor:
    """exp(-mean_ij d1(z_i, z_j) d2(eps_i, eps_j)), d1 mean absolute and d2 mean square difference; 1 if all z agree."""
    d1 = torch.cdist(z, z, p=1) / z.shape[1]
    d2 = (eps[:, None] - eps).square().mean(-1)
    return torch.exp(-(d1 * d2).mean())


def teach(fed: Federation, state: dict, head: nn.Module, t: int) -> None:
    """Adam on Eq 18 plus the diversity term.

    `head` is the new global net's. It is linear, so it gives the mean over A_t of the logits that their heads would give.
    """
    G = generator(fed, state["generator"]).train()
    adam = torch.optim.Adam(G.parameters(), lr=TEACHING_LR * 0.98**t, weight_decay=1e-2)
    if state["adam"]:
        adam.load_state_dict({"state": state["adam"], "param_groups": adam.state_dict()["param_groups"]})
    for y, s, eps in zip(*conditions(fed, state, (TEACHING_STEPS, TEACHING_BATCH), "teaching", t), strict=True):
        z = G(y, s, eps)
        J = fed.loss(F.cross_entropy(head(z[None])[0], y, reduction="none")).mean() + diversity(z, eps)
        adam.zero_grad()
        J.backward()
        adam.step()
    state["generator"], state["adam"] = G.state_dict(), adam.state_dict()["state"]


@torch.no_grad()
def rank_correlation(fed: Federation, state: dict, head: nn.Module, t: int) -> float:
    """Spearman's of requested and realised difficulty over fresh generated samples (0 if either is constant)."""
    from scipy.stats import rankdata

    y, s, eps = conditions(fed, state, (DRAWS,), "obedience", t)
    z = generator(fed, state["generator"]).eval()(y, s, eps)
    ce = F.cross_entropy(head(z[None])[0].double(), y, reduction="none")
    requested, realised = (rankdata(a.cpu().numpy()) for a in (s, difficulty_score(ce, fed.tau, fed.config.lam)))
    return float(np.corrcoef(requested, realised)[0, 1]) if np.ptp(requested) * np.ptp(realised) > 0 else 0.0


# --------------------------------------------------------------------------------------------------------- client side


def schedule(shard: np.ndarray, T: int, B: int, rng: np.random.Generator) -> np.ndarray:
    """The index schedule (T, B): passes over the shard, each in a new order; what does not fill a batch is left out."""
    size = min(B, len(shard))
    a_pass = len(shard) // size
    rows = [rng.permutation(shard)[: a_pass * size].reshape(a_pass, size) for _ in range(-(-T // a_pass))]
    return np.pad(np.concatenate(rows)[:T], ((0, 0), (0, B - size)), constant_values=-1)


@torch.no_grad()
def generated(fed: Federation, state: dict, clients: np.ndarray, t: int) -> dict:
    """Each client's features z (T, B, latent) and labels y' (T, B) from the generator that it received."""
    size = (fed.config.local_steps, fed.config.batch_size)
    draws = [conditions(fed, state, size, "synthetic", t, k) for k in clients]
    y, s, eps = (torch.stack(each) for each in zip(*draws, strict=True))
    z = generator(fed, state["generator"]).eval()(y.flatten(), s.flatten(), eps.flatten(0, -2))
    return {"z": list(z.view(*y.shape, -1).cpu().numpy()), "y'": list(y.cpu().numpy())}


def objective(fed: Federation, Q: Tensor | None):
    """J of a step, (K,): Eq 19, or FedDistill's with the shared mean logits Q (C, C) of each label."""

    def J(step) -> Tensor:
        loss = (step.weight * fed.loss(common.sample_losses(step))).sum(1)
        if "z" in step.extra:  # h(z): only the predictor head sees it
            y = step.extra["y'"]
            ce = F.cross_entropy(step.net.head(step.extra["z"]).flatten(0, 1), y.flatten(), reduction="none")
            loss = loss + fed.config.synthetic * fed.loss(ce).view_as(y).mean(1)
        if Q is not None:
            loss = loss + fed.config.distill * (step.weight * divergence(common.gather(Q, step.y), step.logits)).sum(1)
        return loss

    return J


def divergence(q: Tensor, logits: Tensor) -> Tensor:
    """KL(softmax(q) || p) over the last dimension; 0 for a label of which nobody has shared logits (nan)."""
    kl = F.kl_div(logits.log_softmax(-1), q.nan_to_num().log_softmax(-1), reduction="none", log_target=True).sum(-1)
    return kl * ~q.isnan().any(-1)


def mixture(scores: np.ndarray, seed: int) -> list[list[float]]:
    """(alpha, mu, sigma^2), each (L,), of the scores (n,), Eq 12: all of them that is uploaded."""
    from sklearn.mixture import GaussianMixture

    L = min(COMPONENTS, len(np.unique(scores)))
    one = [[1.0], [float(scores.mean())], [float(scores.var()) + 1e-6]]
    if L == 1:
        return one
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fit that has not converged is a mixture all the same
        try:
            fit = GaussianMixture(L, covariance_type="diag", reg_covar=1e-6, random_state=seed).fit(scores[:, None])
        except ValueError:  # E[x^2] - mu^2 cancels below 0 where scores near 1e5 hardly differ: one Gaussian tells as much
            return one
    return [fit.weights_.tolist(), fit.means_[:, 0].tolist(), fit.covariances_[:, 0].tolist()]


def upload_mixtures(fed: Federation, state: dict, clients: np.ndarray, weights: Tensor, t: int) -> None:
    """One pass of each local model over all its samples gives their scores; only the mixture leaves the client.

    Finite weights can have scores that are not: NonFiniteError.
    """
    from threadpoolctl import threadpool_limits

    scored = common.score(fed.model, weights, fed.data, [fed.shards[k] for k in clients], fed.config.chunk)
    with threadpool_limits(1):  # scikit-learn's sums would differ with the number of threads
        for k, (ce, _) in zip(clients, scored, strict=True):
            scores = difficulty_score(torch.as_tensor(ce), fed.tau, fed.config.lam).numpy()
            if not np.isfinite(scores).all():
                where = f"{fed.method} round {t + 1}: a difficulty score of client {k}"
                raise common.NonFiniteError(f"{where} is not finite. Try a smaller --lr")
            state["mixtures"][int(k)] = mixture(scores, fed.streams.seed("mixture", t, k))


def upload_logits(fed: Federation, state: dict, clients: np.ndarray, weights: Tensor) -> None:
    """Mean logits (C,) of each label that a client holds; nan for the others."""
    data, shards = fed.data, [fed.shards[k] for k in clients]
    logits = common.predict(fed.model, weights, data, data.x_train, shards, fed.config.chunk)
    for k, shard, own in zip(clients, shards, logits, strict=True):
        of_label = F.one_hot(data.y_train[torch.as_tensor(shard)], data.classes).to(own.dtype)  # (n, C)
        state["logits"][k] = of_label.T @ own / of_label.sum(0)[:, None]  # 0 / 0 = nan


# --------------------------------------------------------------------------------------------------------- server side


def participants(config: Config, frozen: list[int], streams: common.Streams, t: int) -> np.ndarray:
    """P_t: clients drawn from the unfrozen M_l; with nobody frozen the same in every arm."""
    M_l = np.setdiff1d(np.arange(config.clients), frozen)
    return np.sort(streams("select", t).choice(M_l, min(config.clients_per_round, len(M_l)), replace=False))


def pooled_draws(mixtures: dict[int, list], streams: common.Streams, t: int) -> dict[int, np.ndarray]:
    """N_k: draws from the latest mixture of every client that has uploaded one."""
    draws = {}
    for k, (alpha, mu, variance) in sorted(mixtures.items()):
        rng = streams("pool", t, k)
        of = rng.choice(len(alpha), DRAWS, p=np.array(alpha) / np.sum(alpha))
        draws[k] = rng.normal(np.array(mu)[of], np.sqrt(variance)[of])
    return draws


def quantile(N: list[float], T: float) -> float:
    """beta_T, element ceil(T N) of the sorted list. The 1e-9: .07 * 100 is 7.000000000000001 in floating point."""
    return N[math.ceil(T * len(N) - 1e-9) - 1]


def passes(draws: np.ndarray, beta_T: float, v: float) -> bool:
    """#{x in N_k: x <= beta_T} > v N_k (Algorithm 1, line 22), strictly."""
    return bool((draws <= beta_T).sum() > v * len(draws) + 1e-9)


def synchronise(config: Config, state: dict, clients: np.ndarray, draws: dict[int, np.ndarray], t: int) -> dict:
    """Freezes fresh participants that pass beta_T and ends the phase (lines 19 to 26). Returns the round's columns."""
    z, Z, columns = state["phase"], len(config.thresholds), {"phase": state["phase"] + 1}
    if z == Z or not config.freeze:  # after the last phase everyone trains on
        return columns | {"frozen": 0, "froze": 0}
    beta_T = quantile(state["pool"], config.thresholds[z])
    passed = [int(k) for k in clients if passes(draws[k], beta_T, config.v)]
    state["frozen"] = sorted([*state["frozen"], *passed])  # M_f
    columns |= {"frozen": len(state["frozen"]), "froze": len(passed), "beta_T": beta_T, "advance": ""}
    if len(state["frozen"]) >= math.ceil(config.phase_quorum * config.clients - 1e-9):
        columns["advance"] = "natural"
    elif t + 1 - state["begun"] >= math.ceil(config.rounds / Z):
        columns["advance"] = "forced"
    if columns["advance"]:
        state["phase"], state["begun"], state["frozen"] = z + 1, t + 1, []
    shares = (f"{(draws[k] <= beta_T).mean():.3f}" if k in draws else "-" for k in range(config.clients))
    return columns | {"fractions": " ".join(shares)}


def evaluate(fed: Federation, models: Tensor, votes: Tensor | None = None) -> dict:
    """Accuracy (%) and loss of nets (M, P): one for all; an ensemble that sums logits by `votes` (M,); or each user's own.

    The paper's accuracy, read from FedGen's code, asks each user only for the labels it holds.
    """
    data, y, C = fed.data, fed.data.y_test, fed.data.classes
    logits = common.predict(fed.model, models, data, data.x_test, [np.arange(len(y))] * len(models), fed.config.chunk)
    if votes is not None:
        logits = [torch.einsum("m,mnc->nc", votes / votes.sum(), torch.stack(logits))]
    correct = torch.stack([torch.bincount(y[each.argmax(1) == y], minlength=C) for each in logits]).double()  # (1 or K, C)
    total = torch.bincount(y, minlength=C)
    held = torch.stack([torch.bincount(data.y_train[torch.as_tensor(s)], minlength=C) > 0 for s in fed.shards])  # (K, C)
    full = 100 * (correct.sum(1) / total.sum()).mean().item()
    paper = 100 * ((held * correct).sum() / (held * total).sum()).item()
    loss = np.mean([F.cross_entropy(each.double(), y).item() for each in logits])
    chosen = paper if fed.config.eval == "paper" else full
    return {"accuracy": chosen, "loss": float(loss), "accuracy_full": full, "accuracy_paper": paper}


# ---------------------------------------------------------------------------------------------------------- the rounds


def federate(config: Config, data: common.Data, run: common.Run) -> None:
    """Algorithm 1 for `run.method`; a baseline is the same loop without what it lacks."""
    fed = prepare(config, data, run)
    arm, streams = fed.arm, fed.streams
    state = initial_state(fed)
    for t in run.rounds(state):
        clients = participants(config, state["frozen"], streams, t)  # P_t
        batches = {k: schedule(fed.shards[k], config.local_steps, config.batch_size, streams("batches", t, k)) for k in clients}
        omega = state["weights"]
        update = common.train(
            fed.model,
            omega if arm.average else state["own"][clients],
            fed.data,
            list(batches.values()),
            lr=config.lr * arm.lr_factor,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            proximal=config.mu if arm.proximal else 0.0,
            loss=objective(fed, state["logits"].nanmean(0) if arm.distill else None),
            per_step=generated(fed, state, clients, t) if state["generator"] else None,  # none before it is trained
            chunk=config.chunk,
        )
        clients, update = run.finite(t, clients, update)
        state["own"][clients] = update.weights
        if arm.average:  # omega <- mean over M_f and P_t, Eq 21, of BatchNorm statistics too
            state["weights"] = torch.cat([state["own"][state["frozen"]], update.weights]).mean(0)
        columns = serve(fed, state, clients, update.weights, batches, t)
        if run.due(t):
            columns = evaluate(fed, *tested(fed, state, omega, update.weights)) | columns
        run.record(t, clients=len(clients), **columns, train_loss=float(update.loss.mean()))


def serve(fed: Federation, state: dict, clients: np.ndarray, weights: Tensor, batches: dict, t: int) -> dict:
    """What the server does beyond averaging: shared logits; or p(y), beta, the generator, freezing (lines 16 to 26)."""
    if fed.arm.distill:
        upload_logits(fed, state, clients, weights)
    if not fed.arm.generator:
        return {}
    y, C = fed.data.y_train.cpu().numpy(), fed.data.classes
    state["counts"].update({int(k): np.bincount(y[batches[k][batches[k] >= 0]], minlength=C).tolist() for k in clients})  # c_k
    head = fed.model.bind(state["weights"][None]).head
    if not fed.arm.curriculum:
        teach(fed, state, head, t)
        return {}
    upload_mixtures(fed, state, clients, weights, t)
    draws = pooled_draws(state["mixtures"], fed.streams, t)
    state["pool"] = np.sort(np.concatenate(list(draws.values()))).tolist()  # N, the distribution beta
    teach(fed, state, head, t)
    columns = synchronise(fed.config, state, clients, draws, t)
    if t in shown(fed.config):
        state["snapshots"][t] = {"mixtures": dict(state["mixtures"]), "beta_T": columns.get("beta_T", math.nan)}
    return columns | {"rank_correlation": rank_correlation(fed, state, head, t)}


def tested(fed: Federation, state: dict, omega: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | None]:
    """The nets that `evaluate` tests, and their votes: in FedEnsemble, users out of P_t hold the omega they received."""
    if fed.arm.ensemble:
        rest = fed.config.clients - len(weights)
        return torch.cat([weights, omega[None]]), weights.new_tensor([1.0] * len(weights) + [rest])
    return (state["weights"][None] if fed.arm.average else state["own"]), None


def prepare(config: Config, data: common.Data, run: common.Run) -> Federation:
    """Data in [-1, 1], the net, and the users' samples: a random share of the training set, then partitioned."""
    _, device, dtype = common.setting_up(config)
    data = dataclasses.replace(data, mean=torch.full_like(data.mean, 127.5), std=torch.full_like(data.std, 127.5))
    model = common.build_model(config.model, data, device, dtype, config.width)
    n = len(data.y_train)
    kept = np.sort(run.streams("share").permutation(n)[: config.samples(n)])
    owner = None if data.owner is None else data.owner[kept]
    part = SimpleNamespace(y_train=data.y_train.cpu()[kept], owner=owner)
    shards = [kept[shard] for shard in common.client_shards(config, part, run.streams)]
    return Federation(config, run.method, model, data, shards, run.streams)


def initial_state(fed: Federation) -> dict:
    """All that survives a round. `own` (K, P) is each user's last upload: of a frozen one, what it froze with."""
    K, C, omega = fed.config.clients, fed.data.classes, fed.model.init(fed.streams.seed("init"))
    state = {"weights": omega, "own": omega.repeat(K, 1), "frozen": [], "phase": 0, "begun": 0, "snapshots": {}}
    state |= {"mixtures": {}, "pool": [], "counts": {}, "generator": {}, "adam": {}}
    return state | {"logits": torch.full((K, C, C), math.nan, device=omega.device, dtype=omega.dtype)}


def shown(config: Config) -> list[int]:
    """The three rounds whose mixtures are drawn."""
    return [0, config.rounds // 3, 2 * config.rounds // 3]


# --------------------------------------------------------------------------------------------- tables, figures, presets


PAPER = {  # Table II: mean accuracy in % by (data set, T, alpha), of the methods in PAPER_METHODS
    ("mnist", 20, 0.05): (86.92, 86.73, 89.05, 71.84, 90.04, 91.47),
    ("mnist", 20, 0.1): (91.13, 90.69, 91.60, 58.03, 95.86, 96.03),
    ("mnist", 20, 1.0): (94.73, 94.40, 94.77, 86.92, 97.36, 97.56),
    ("emnist", 20, 0.05): (63.00, 62.75, 64.52, 47.13, 71.98, 73.65),
    ("emnist", 20, 0.1): (73.65, 68.55, 69.72, 45.84, 76.05, 78.06),
    ("emnist", 20, 1.0): (78.08, 77.28, 78.34, 56.12, 82.81, 84.21),
    ("emnist", 20, 10.0): (77.81, 77.03, 77.83, 46.34, 82.71, 83.88),
    ("emnist", 40, 0.05): (68.72, 66.85, 69.57, 49.32, 72.29, 74.91),
    ("emnist", 40, 0.1): (75.18, 74.05, 75.92, 48.23, 77.43, 79.25),
    ("emnist", 40, 1.0): (83.79, 83.22, 82.91, 56.83, 84.01, 84.77),
    ("emnist", 40, 10.0): (83.47, 82.91, 83.62, 48.67, 84.24, 84.77),
}
PAPER_METHODS = ("fedavg", "fedprox", "fedensemble", "feddistill", "fedgen", "fedcl")


def to_target(rows: list[dict], setting: str, method: str) -> list[tuple[int, int]]:
    """(round, client updates) at which a trial first has its FedAvg's final accuracy, for the trials that come so far."""
    reached = []
    for trial, target in enumerate(common.per_trial(rows, setting, "fedavg")["final"]):
        own = [row for row in rows if (row["setting"], row["method"], row["trial"]) == (setting, method, trial)]
        above = [row for row in own if row["accuracy"] != "" and row["accuracy"] >= target]
        reached += [(row["round"], row["uploads"]) for row in above[:1]]
    return reached


def results(rows: list[dict], config: Config, setting: str, method: str) -> dict:
    """A method's line of the table: both protocols, rounds and client updates to FedAvg's final accuracy, freezing."""
    full, paper = (common.series(rows, setting, method, name)[1] for name in ("accuracy_full", "accuracy_paper"))
    line = {"full_final": common.spread(full[:, -1]), "paper_top5": common.spread(np.sort(paper, 1)[:, -5:].mean(1))}
    flags = dict(re.findall(r"(alpha|local_steps)=(\S+)", setting))
    key = (config.dataset, int(flags.get("local_steps", config.local_steps)), float(flags.get("alpha", config.alpha)))
    if method in PAPER_METHODS and key in PAPER:
        line["table2"] = PAPER[key][PAPER_METHODS.index(method)]
    if any(row["method"] == "fedavg" for row in rows):
        reached = to_target(rows, setting, method)
        line["reached"] = f"{len(reached)}/{len(full)}"
        line["rounds"], line["updates"] = np.mean(reached, axis=0).round(1).tolist() if reached else (None, None)
    own = [row for row in rows if (row["setting"], row["method"]) == (setting, method) and "phase" in row]
    if own:
        line["natural"], line["forced"] = (sum(row.get("advance") == kind for row in own) for kind in ("natural", "forced"))
        line["froze"], line["rank_correlation"] = (
            sum(r["froze"] for r in own),
            float(np.mean([r["rank_correlation"] for r in own])),
        )
    return line


def table(rows: list[dict], config: Config, folder) -> None:
    """Prints the results of every setting and method and adds them to summary.json."""
    summary = json.loads((folder / "summary.json").read_text()) | {"table": {}}
    for setting in dict.fromkeys(row["setting"] for row in rows):
        methods = dict.fromkeys(row["method"] for row in rows if row["setting"] == setting)
        summary["table"][setting] = lines = {method: results(rows, config, setting, method) for method in methods}
        print(f"\n{setting or config.dataset}: both protocols, and the way to FedAvg's final accuracy")
        print(f"{'method':<14}{'full, final':>15}{'paper, top 5':>15}{'Table II':>10}{'rounds':>8}{'updates':>9}{'reached':>9}")
        for method, line in lines.items():
            own = [f"{s['mean']:.2f} +- {s['std']:.2f}" for s in (line["full_final"], line["paper_top5"])]
            cells = [str(line.get(name) or "-") for name in ("table2", "rounds", "updates", "reached")]
            print(f"{method:<14}{own[0]:>15}{own[1]:>15}{cells[0]:>10}{cells[1]:>8}{cells[2]:>9}{cells[3]:>9}")
        for method in (method for method, line in lines.items() if "froze" in line):
            said = "{froze} frozen by rule; phases ended: {natural} naturally, {forced} by force; rank correlation of requested"
            print(f"{method}: {said} and realised difficulty {{rank_correlation:+.2f}}".format(**lines[method]))
    common.write_atomically(folder / "summary.json", lambda file: file.write(json.dumps(summary, indent=1).encode()))


def figure(rows: list[dict], config: Config, folder) -> None:
    """The table, and for each setting with a curriculum its phases and its mixtures."""
    table(rows, config, folder)
    names = {"phase": "phase", "frozen": "frozen clients", "beta_T": "β$_T$"}
    for i, setting in enumerate(dict.fromkeys(row["setting"] for row in rows if "phase" in row)):
        methods = list(dict.fromkeys(row["method"] for row in rows if "phase" in row and row["setting"] == setting))
        suffix = f"-{i + 1}" if i else ""
        fig, axes = common.new_figure(3, len(methods), 4.0, 2.4)
        for axis_row, method in zip(axes, methods, strict=True):
            for axis, column in zip(axis_row, names, strict=True):
                common.draw(axis, rows, setting, [method], column)
                axis.set(title=f"{method}: {names[column]}", xlabel="round")
        common.save_figure(fig, folder / f"phases{suffix}.png")
        saved = common.Run(config, methods[0], setting, 0, folder).finished(methods[0])["state"]["snapshots"]
        draw_mixtures(saved, methods[0], config.v, folder / f"mixtures{suffix}.png")


def draw_mixtures(snapshots: dict, method: str, v: float, path) -> None:
    """The mixtures' distribution functions: a client whose curve is above v at beta_T freezes."""
    from scipy.stats import norm

    fig, axes = common.new_figure(len(snapshots), 1, 4.0, 3.2)
    for axis, (t, saved) in zip(axes[0], snapshots.items(), strict=True):
        mixtures = [np.array(m) for m in saved["mixtures"].values()]  # (alpha, mu, sigma^2), each (L,)
        x = np.linspace(min(m[1].min() for m in mixtures) - 1, max((m[1] + 3 * np.sqrt(m[2])).max() for m in mixtures), 20000)
        curves = np.array([m[0] @ norm.cdf(x, m[1][:, None], np.sqrt(m[2])[:, None]) for m in mixtures])
        middle = (curves.mean(0) > 0.001) & (curves.mean(0) < 0.97)  # a few hard samples would stretch the axis
        x, curves = x[middle], curves[:, middle]
        axis.plot(x, curves.T, color="#8a8a8a", linewidth=0.6, label=["client"] + ["_"] * (len(curves) - 1))
        axis.plot(x, curves.mean(0), color=common.COLOURS[0], linewidth=2, label="pooled")
        axis.axvline(saved["beta_T"], color=common.COLOURS[1], linestyle="--", label="β$_T$")
        axis.axhline(v, color=common.COLOURS[2], linestyle=":", label="v")
        axis.locator_params(axis="x", nbins=5)
        axis.set(title=f"{method}, round {t + 1}", xlabel="difficulty score", ylabel="share of samples below")
    axes[0, 0].legend(loc="lower right")
    common.save_figure(fig, path)


SEVEN = tuple(ARMS)[:7]
MNIST = {"dataset": "mnist", "rounds": 200, "method": SEVEN}
EMNIST = {"dataset": "emnist", "rounds": 200, "alpha": 0.1, "method": ("fedcl",)}
CELEBA = {"dataset": "celeba", "partition": "natural", "data_share": 1.0, "min_size": 2, "generator_hidden": 128}
CELEBA |= {"rounds": 100, "method": SEVEN}
ALPHAS = (0.05, 0.1, 1.0, 10.0)
STAGES = ((0.8, 0.4), (0.8, 0.6, 0.2), (0.8, 0.6, 0.4, 0.2), (0.9, 0.7, 0.5, 0.3, 0.1))
SETS = ((0.8, 0.6, 0.4, 0.2), (0.7, 0.5, 0.3), (0.8, 0.6, 0.2), (0.8, 0.4))
PRESETS = {
    "table1": ("Table I's S and v, on MNIST", MNIST | {"thresholds": (0.9, 0.6, 0.3), "v": 0.8}, {}),
    "table2-mnist": ("accuracy by heterogeneity", MNIST, {"alpha": ALPHAS[:3]}),
    "table2-emnist": ("by heterogeneity and T", EMNIST | {"method": SEVEN}, {"local_steps": (20, 40), "alpha": ALPHAS}),
    "table2-celeba": ("5 of 10 and 5 of 25 celebrities", CELEBA | {"clients_per_round": 5}, {"clients": (10, 25)}),
    "table2-celeba-10": ("10 of 25 celebrities", CELEBA | {"clients": 25}, {}),
    "table3": ("rounds to FedAvg's final accuracy, MNIST", MNIST, {"alpha": ALPHAS}),
    "table4": ("share of frozen clients that ends a phase", EMNIST, {"phase_quorum": (0.6, 0.7, 0.8, 0.9)}),
    "table5": ("number of phases", EMNIST, {"thresholds": STAGES}),
    "table6-lambda": ("lambda", EMNIST, {"lam": (0.2, 0.5, 0.8, 1.0)}),
    "table6-tau": ("tau", EMNIST, {"tau": (5.0, 10.0, 15.0, 20.0)}),
    "table6-s": ("thresholds S", EMNIST, {"thresholds": SETS}),
    "table6-v": ("v", EMNIST, {"v": (0.5, 0.6, 0.7, 0.8)}),
}


def main(argv=None) -> None:
    """The command line; `argv` stands in for it in tests."""
    common.launch(Config, PRESETS, __doc__, lambda config: config.method, federate, figure, argv=argv)


if __name__ == "__main__":
    main()
