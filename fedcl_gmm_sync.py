"""python fedcl_gmm_sync.py --alpha 0.1 --method fedcl fedgen fedavg

This is FedCL, Algorithm 1 of "FedCL: Federated Multi-Phase Curriculum Learning to Synchronously
Correlate User Heterogeneity" (Wang, Guo and Jia, IEEE TAI 2023, https://arxiv.org/abs/2211.07248),
and its six baselines. plain/fedcl_gmm_sync.py explains FedCL and FedAvg in one file. The method of
fedcl_fgn.py is another paper's, and is also called FedCL.

Clients train on a confidence-aware loss. They send their models and a Gaussian mixture of their
samples' difficulty scores. The server takes random scores from all mixtures: the pool. It trains a
generator of features for a label and a difficulty. A client is frozen if more than a fraction v of
its random scores is at most beta_T, the T-quantile of the pool. So a client passes by being ahead
of the others, and not by reaching a fixed loss. It then waits, and its model is still averaged.
When all are frozen, the next T begins for all.

Here theta are the weights of the model, omega in the paper. G is the generator, theta in the paper.
r_k are client k's random scores, N_k in the paper. M is the number of all clients, K in the paper;
here K is the number in a round. In the code m is a client, ce is l, and s* is sigma_i. The paper's
T is also the number of local steps (--local-steps).

How this differs from the paper, and why:
- A phase lasts at most ceil(rounds / Z) rounds, where Z is the number of phases. One check can pass
  fewer than T M / v of all M clients. For example, at v = 0.7 and T = 0.6 at most 17 of 20 clients
  pass. So phases with T <= v might never end.
- A phase ends when all are frozen (line 3). Section V-B says 80 %: --phase-quorum 0.8. The
  "Completed Threshold" of Table I, 80 %, is read as v.
- Algorithm 1 ends after its last phase. Here all clients train on to the last round, so that all
  methods take as many rounds.
- S falls, as in Section IV-C: only then has a client that passes one T passed all T before it. The
  default is Table VI's best S, with its v. Table I has another one (--preset table1), and so has
  the text of Section V-B: 0.3, 0.5, 0.7 and v = 0.6.
- The confidence s* (Castells et al., 2020) is the local minimum of Eq. 7. It is e where there is no
  minimum. At the published tau = 10 and lambda = 0.5 it is e for every loss below 9.63. There
  FedCL's loss is cross-entropy at e times the learning rate.
- Eq. 21 averages all clients. Here it averages the frozen clients and the clients that trained in
  the round. All have the same weight, and their batch statistics are averaged, too. The baselines
  average in the same way. Only clients that trained are checked. Line 20 checks all of M_l, the
  clients that are not frozen.
- p(y) and the pool leave out clients that have not trained yet: they have sent nothing. The paper
  begins with uniform p(y) and beta. c_k counts the labels in the batches of a client's last round
  (line 10). Eq. 15 has the fraction of each label among all of its samples. So both weigh clients
  equally, unless one has fewer than B samples. Batches are full: the rest of a pass over the
  samples is left out.
- The pool beta (line 18) is made before the generator learns (line 17), so both belong to this
  round. In the first round the generator has learnt nothing, and there are no features.
- Lines 19 and 21 each sample the mixtures. Here the same scores make the pool and are compared with
  its quantile. L = 3 Gaussians and 320 scores are our choice.
- G also learns from exp(-mean d_z d_epsilon) with the weight 1. Eq. 18 has no such term. Section
  V-B mentions a "diversity loss" without a formula. FedGen's code has this one. The method
  fedcl-nodiversity of results/fedcl_gmm_sync/controls.py leaves it out.
- FedGen is in this paper's form: Eq. 19 with plain cross-entropy. It lacks the KL term and the
  falling weights of its own code. The generator's constants come from that code.
- G gets one score for each feature vector, standardised by the pool's mean and std. Nothing in
  Eq. 18 makes the features that difficult. results/fedcl_gmm_sync/controls.py measures it.
- The heads of the clients are linear, so the mean head gives their mean logits in Eq. 18.
- FedEnsemble averages logits. The paper averages "prediction output". Clients that did not train in
  the round count with the model that was sent. FedDistill's Q is the mean over the clients of the
  logits that each has sent last.
- By default the clients hold all of the training set. In the presets they hold half, as in the
  paper, except of CelebA. The presets' EMNIST is the letters, as in FedGen. The paper's counts are
  of emnist-byclass. A client of CelebA is one celebrity, which the paper's clients are not.
- Accuracy is measured on the whole test set, after the last round and as the mean of the last ten.
  The authors' code asks each client for all test samples of its labels, and pools these over
  clients. This is the column own_pooled. Then their code averages the five best rounds.
"""

import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common
import experiment
import training
from data import IS_TEXT, Data
from errors import UsageError
from experiment import figures, flag, report
from nets import LINEAR_HEAD
from recording import recordable

METHODS = ("fedcl", "fedgen", "fedavg", "fedprox", "fedensemble", "feddistill", "feddistill+")
NUMBERS_OF_A_MIXTURE = 9  # alpha, mu, sigma^2 of three Gaussians
DRAWS = 320  # random scores that the server takes from each client's mixture
NOISE = 32  # length of epsilon
TEACHING_STEPS = 50  # of Adam on the generator, in a round
TEACHING_BATCH = 128
TEACHING_LR = 1e-4
TEACHING_DECAY = 0.98  # TEACHING_LR is multiplied by this after every round


def is_fedcl(config) -> bool:
    return config.method == "fedcl"


def has_generator(config) -> bool:
    return config.method in ("fedcl", "fedgen")


def is_distilling(config) -> bool:
    return config.method.startswith("feddistill")


@dataclass
class Config(experiment.Config):
    """Common options with Table I's values (rounds: 200 there), then the algorithm's own.

    v and the thresholds are Table VI's best.
    """

    computed = ("base",)  # `__post_init__` sets this option

    model: str = "fedgen-cnn"
    clients: int = 20
    clients_per_round: int = 10
    rounds: int = 6
    batch_size: int = 32
    min_size: int = 32
    per_client: bool = True
    epochs: int = flag(1, "not used here: --local-steps is", low=1)
    base: str = flag(
        "fedavg", "not used here, since --method decides; the only value is", choices=("fedavg",)
    )
    mu: float = flag(0.1, "weight of the proximal term of fedprox", low=0)

    method: str = flag("fedcl", "FedCL and its baselines", sweep=METHODS, choices=METHODS)
    local_steps: int = flag(20, "SGD steps of a client in a round", low=1, high=10**6)
    data_share: float = flag(
        1.0, "fraction of the training set that the clients hold (the paper: half)", above=0, high=1
    )
    tau: float = flag(
        10.0, "loss that separates easy from hard samples", above=0, high=1e6, when=is_fedcl
    )
    lam: float = flag(0.5, "lambda of Eq. 7 (1e9: all confidences are 1)", above=0, when=is_fedcl)
    thresholds: str = flag(
        "0.8,0.6,0.2", "S, the phases' T, falling, with commas between them", when=is_fedcl
    )
    v: float = flag(
        0.7,
        "a client freezes if more than this fraction of its scores is <= beta_T (1: never)",
        low=0,
        high=1,
        when=is_fedcl,
    )
    phase_quorum: float = flag(
        1.0,
        "fraction of frozen clients that ends a phase (1: Algorithm 1; 0.8: the paper's text)",
        above=0,
        high=1,
        when=is_fedcl,
    )
    generator_hidden: int = flag(
        256, "width of the generator", low=1, high=65536, when=has_generator
    )
    distill: float = flag(0.1, "weight of FedDistill's term (0: none)", low=0, when=is_distilling)

    def __post_init__(self):
        """Chooses the base. FedProx is one, and with FedDistill clients keep their own models."""
        bases = {"fedprox": "fedprox", "feddistill": "solo"}
        self.base = bases.get(self.method, "fedavg")

    def check(self) -> None:
        super().check()
        split_thresholds(self.thresholds)
        if self.epochs > 1:
            raise UsageError(f"--epochs {self.epochs}: not used here; choose --local-steps")

    def work(self, n: int) -> experiment.Work:
        """Returns about what a run does: all batches are full, and FedCL scores its clients."""
        clients = self.rounds * self.clients_per_round
        steps = clients * self.local_steps
        work = experiment.Work(steps, steps * self.batch_size)
        if has_generator(self):
            work.seconds = 0.3 * self.rounds  # it learns, and mixtures are fitted
        if is_fedcl(self):
            work.scored = clients * self.data_share * n / self.clients
        return work

    def reads_rounds(self) -> bool:
        return is_fedcl(self)  # a phase lasts a part of them

    def federation(self, data: Data, streams: common.Streams) -> common.Federation:
        """The clients hold a random part of the training set; pixels are in [-1, 1]."""
        if data.mean is None:
            raise UsageError(f"--dataset {self.dataset}: this script reads images; {IS_TEXT}")
        n = len(data.y_train)
        count = round(self.data_share * n)
        held = np.sort(streams("share").permutation(n)[:count])
        owner = None if data.owner is None else data.owner[held]
        low, high = data.limits  # these become -1 and 1: a byte b becomes (b - 127.5) / 127.5
        middle = (low + high) / 2
        half = (high - low) / 2
        x = data.x_train[held]
        y = data.y_train[held]
        data = replace(data, x_train=x, y_train=y, owner=owner, mean=middle, std=half)
        fl = Ensemble(self, data, streams)
        if has_generator(self) and not isinstance(fl.model.head, nn.Linear):
            wanted = f"{self.method}'s generator needs {LINEAR_HEAD}"
            raise UsageError(f"--model {self.model}: {wanted}")
        return fl


def split_thresholds(text: str) -> list[float]:
    """Returns S for '0.8,0.6,0.2'. Raises UsageError unless its numbers fall, all within (0, 1)."""
    problem = UsageError(f"--thresholds {text}: must be numbers that fall, between 1 and 0")
    try:
        S = [float(word) for word in text.split(",")]
    except ValueError as error:
        raise problem from error
    if not (np.diff([1, *S, 0]) < 0).all():
        raise problem
    return S


# ---------------------------------------------------------------------------------- Algorithm 1


def federate(config: Config, fl: common.Federation, run: experiment.Run) -> None:
    """Algorithm 1. FedGen is the same with plain cross-entropy, without difficulty and phases."""
    if not has_generator(config):
        federate_baseline(config, fl, run)
        return
    state = fl.start() | begin()
    for t in run.rounds(state):  # lines 1 and 3; a phase ends in `synchronise`
        clients = select_unfrozen(config, fl, t, state["frozen"])  # lines 4 and 5: some of M_l
        batches = draw_batches(config, fl, t, clients)  # line 8
        objective = local_objective(config, fl, state, t, clients)  # line 9 and Eq. 19
        update = fl.train(state, t, clients, batches, **objective)  # line 11: plain SGD
        columns = traffic(config, fl, state, update)  # lines 4 and 14, as `state` was sent
        state["label_counts"] |= count_batch_labels(fl, clients, batches)  # line 10: c_k
        state["theta"] = average(fl, state["theta"], state["frozen"], update)  # line 16: Eq. 21
        if is_fedcl(config):
            state["mixtures"] |= fit_mixtures(config, fl, t, update)  # line 13: D_k^cl
            scores = sample_mixtures(fl, state["mixtures"], t)  # line 21: the sets r_k
            state["pool"] = pool_scores(scores)  # lines 18 and 19: the distribution beta
        state |= teach(config, fl, state, t)  # line 17: Eq. 18
        if is_fedcl(config):
            changes, found = synchronise(config, state, update, scores, t)  # lines 19 to 26
            state |= changes
            columns |= found
        run.record(t, state, update, **columns)


def begin() -> dict:
    """Returns what one round leaves to the next, in addition to the model's weights."""
    return {
        "phase": 0,  # counted from 0
        "phase_began": 0,  # the round in which it began
        "frozen": {},  # M_f: theta (P,) of each client, as it was when the client froze
        "mixtures": {},  # D_k^cl: alpha, mu, sigma^2 of each client that has trained
        "pool": [],  # the random scores of all clients, sorted: the distribution beta
        "label_counts": {},  # c_k (C,)
        "generator": None,  # G's weights; with "adam", Adam's moments, once it has learnt
    }


def select_unfrozen(config, fl, t: int, frozen) -> np.ndarray:
    """Returns the first K unfrozen clients in the round's random order, or fewer if fewer are left.

    fl.select uses the same order, up to M = 10,000.
    """
    order = fl.streams("select", t).permutation(config.clients)
    unfrozen = order[~np.isin(order, list(frozen))]
    return np.sort(unfrozen[: config.clients_per_round])


def draw_batches(config, fl, t: int, clients: np.ndarray) -> list[np.ndarray]:
    """Returns each client's full batches (steps, B); -1 where it has fewer than B samples.

    Each pass over the client's samples has a new order. Its rest that fills no batch is left out.
    """
    steps = config.local_steps
    B = config.batch_size
    schedules = []
    for m in clients:
        rng = fl.streams("batches", t, m)
        shard = fl.shards[m]
        size = min(B, len(shard))
        full = len(shard) // size * size
        batches = []
        while len(batches) < steps:
            order = rng.permutation(shard)[:full]
            batches += list(order.reshape(-1, size))
        schedule = np.full((steps, B), -1)
        schedule[:, :size] = batches[:steps]
        schedules.append(schedule)
    return schedules


def local_objective(config, fl, state: dict, t: int, clients: np.ndarray) -> dict:
    """Returns what `fl.train` takes to minimise J (Eq. 19). Part two waits until G has learnt."""
    constants = (config.method, config.tau, config.lam)
    changes = {"lr": config.lr, "loss": functools.partial(loss_of_samples, *constants)}
    if state["generator"]:
        changes["per_step"] = generate(config, fl, state, t, clients)  # comes as out.extra
        changes["penalty"] = functools.partial(loss_of_features, *constants)
    return changes


@recordable
def loss_of_samples(method: str, tau: float, lam: float, out: training.Output) -> Tensor:
    """Returns the first part of Eq. 19, (K,): the mean loss of each client's batch."""
    losses = loss_of(method, tau, lam, training.sample_losses(out))
    return (out.weight * losses).sum(1)


@recordable
def loss_of_features(method: str, tau: float, lam: float, out: training.Output) -> Tensor:
    """Returns the second part, (K,): the mean loss of generated features z with labels y.

    z is (K, B, F), and y is (K, B). Only the predictor, the model's head, sees them.
    """
    y = out.extra["y"]
    logits = out.net.head(out.extra["z"])
    ce = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
    return loss_of(method, tau, lam, ce).view_as(y).mean(1)


def loss_of(method: str, tau: float, lam: float, ce: Tensor) -> Tensor:
    """Returns the loss of samples with cross-entropy ce: FedCL's, or for FedGen ce itself."""
    if method == "fedcl":
        return confidence_loss(ce, tau, lam)
    return ce


def confidence_loss(ce: torch.Tensor, tau: float, lam: float) -> torch.Tensor:
    """Returns l_cl (Eq. 7) of samples with cross-entropy ce, of any shape.

    ce has an entry for each sample. Average the result: the mean of ce would have one confidence
    for the whole batch. lam is above 0. The derivative of l_cl in ce is s*. At the paper's tau = 10
    and lam = 0.5, l_cl is e (ce - 10) + 0.5 for every ce below 9.63. So it is negative there, and
    trains as cross-entropy at e times the learning rate.
    """
    s = confidence(ce, tau, lam)
    score = (ce - tau) * s  # Eq. 6
    return score + lam * torch.log(s) ** 2  # Eq. 7


def confidence(ce: torch.Tensor, tau: float, lam: float) -> torch.Tensor:
    """Returns s* = exp(-W(b / 2)) with b = (ce - tau) / lam, the local minimum of Eq. 7.

    It is e if b < -2 / e, where there is no minimum. No gradient flows through s*.
    """
    least = -2 / math.e
    b = (ce.detach().double() - tau) / lam
    s = torch.exp(-lambert_w(b.clamp(min=least) / 2))
    s = s.masked_fill(~(b > least), math.e)
    return s.to(ce.dtype)


def lambert_w(y: torch.Tensor) -> torch.Tensor:
    """Returns the w >= -1 with w e^w = y, for y >= -1 / e in float64, by Halley's steps.

    SciPy's lambertw takes no tensors of a GPU, and clients need it at each of their local steps.
    """
    p = (2 * (math.e * y + 1)).clamp(min=0).sqrt()
    # where the steps begin
    at_branch_point = -1 + p - p**2 / 3 + p**3 * (11 / 72)
    elsewhere = torch.log1p(y.clamp(min=0)) * 0.8
    w = torch.where(y < 0, at_branch_point, elsewhere)
    for _ in range(6):
        f = w - y * torch.exp(-w)  # (w e^w - y) e^-w
        slope = (w + 1).clamp(min=1e-8)  # (w e^w - y)' e^-w
        w = w - f / (slope - (w + 2) * f / (2 * slope))
    return w


def traffic(config, fl, state: dict, update: training.Update) -> dict:
    """Returns the columns of `fl.cost`. In addition to models, clients send c_k and D_k^cl.

    From the second round on they receive G, p(y) and all mixtures.
    """
    C = fl.data.classes
    received = 0
    if state["generator"]:  # the clients get beta as its mixtures, and the seed of the scores
        weights = sum(tensor.numel() for tensor in state["generator"].values())
        received = weights + C + NUMBERS_OF_A_MIXTURE * len(state["mixtures"])  # FedGen has none
    sent = C + NUMBERS_OF_A_MIXTURE * is_fedcl(config)
    K = len(update.clients)
    return fl.cost(update, K * received, K * sent)


def count_batch_labels(fl, clients: np.ndarray, batches: list) -> dict[int, list]:
    """Returns c_k (C,): how many samples of each class were in a client's batches."""
    counts = {}
    for m, schedule in zip(clients, batches, strict=True):
        labels = fl.labels[schedule[schedule >= 0]]
        counts[int(m)] = np.bincount(labels, minlength=fl.data.classes).tolist()
    return counts


def average(fl, theta: Tensor, frozen: dict[int, Tensor], update: training.Update) -> Tensor:
    """Returns the mean (P,) of the frozen clients' weights and of this round's weights (Eq. 21).

    `fl.aggregate` would weigh by samples, and knows no frozen clients. theta (P,) is what the
    clients received: layers with requires_grad=False, and buffers that nobody changed, keep it.
    """
    thetas = torch.stack([*frozen.values(), *update.gather_thetas()])
    return fl.model.keep_constant(thetas.mean(0), theta, thetas[:, fl.model.rest])


def fit_mixtures(config, fl, t: int, update: training.Update) -> dict[int, list]:
    """Returns D_k^cl of each client: the mixture of its own model's scores of all its samples."""
    clients = update.clients
    shards = [fl.shards[m] for m in clients]
    # one model at a time: shards have different sizes, and padding them costs more
    scored = common.score(fl.model, update.gather_thetas(), fl.data, shards, chunk=1)
    mixtures = {}
    for m, (losses, _) in zip(clients, scored, strict=True):
        scores = difficulty(torch.as_tensor(losses), config.tau, config.lam).numpy()
        if not np.isfinite(scores).all():
            raise common.NonFiniteError(f"round {t + 1}: a score of client {m} is not finite")
        mixtures[int(m)] = mixture(scores, fl.streams.seed("mixture", t, m))
    return mixtures


def difficulty(ce: torch.Tensor, tau: float, lam: float) -> torch.Tensor:
    """Returns the difficulty scores of samples with cross-entropy ce (Eq. 6)."""
    return (ce - tau) * confidence(ce, tau, lam)


def mixture(scores: np.ndarray, seed: int, L: int = 3) -> list[list[float]]:
    """Returns alpha, mu, sigma^2 of at most L Gaussians for scores (n,): three lists (Eq. 12).

    Raises ValueError if there is no score, or one is not finite.
    """
    import warnings

    from sklearn.mixture import GaussianMixture
    from threadpoolctl import threadpool_limits

    L = min(L, len(np.unique(scores)))
    fit = GaussianMixture(L, covariance_type="diag", reg_covar=1e-6, random_state=seed)
    with warnings.catch_warnings(), threadpool_limits(1):  # more threads would change last bits
        warnings.simplefilter("ignore")  # one that has not converged is a mixture all the same
        try:
            fit.fit(scores.reshape(-1, 1))
        except ValueError:
            if L == 0 or not np.isfinite(scores).all():
                raise
            # scores near 1e5 that hardly differ: E[x^2] - mu^2 is below 0
            return [[1.0], [float(scores.mean())], [float(scores.var()) + 1e-6]]
    parts = (fit.weights_, fit.means_[:, 0], fit.covariances_[:, 0])
    return [part.tolist() for part in parts]


def sample_mixtures(fl, mixtures: dict, t: int) -> dict[int, np.ndarray]:
    """Returns the set r_k of each client: DRAWS random scores (320,) from its latest mixture."""
    scores = {}
    for m in sorted(mixtures):
        scores[m] = draw_scores(mixtures[m], DRAWS, fl.streams("pool", t, m))
    return scores


def draw_scores(mixture: list, n: int, rng: np.random.Generator) -> np.ndarray:
    """Returns n random scores from the Gaussian mixture (alpha, mu, sigma^2).

    rng is a generator such as np.random.default_rng(0).
    """
    alpha, mu, variance = np.array(mixture)
    which = rng.choice(len(alpha), n, p=alpha / alpha.sum())
    return rng.normal(mu[which], np.sqrt(variance[which]))


def pool_scores(scores: dict[int, np.ndarray]) -> list[float]:
    """Returns the scores of all clients, sorted."""
    return np.sort(np.concatenate(list(scores.values()))).tolist()


def synchronise(
    config, state: dict, update: training.Update, scores: dict, t: int
) -> tuple[dict, dict]:
    """Freezes clients that have passed (lines 19 to 26) and ends the phase once enough have.

    Returns what changes in the state, and the round's columns.
    """
    S = split_thresholds(config.thresholds)
    phase = state["phase"]
    if phase == len(S):  # after the last one, where Algorithm 1 ends
        return {}, {"phase": phase + 1, "frozen": 0, "froze": 0}

    beta_T = quantile(state["pool"], S[phase])  # line 19
    passed = {}
    fractions = []
    for m, theta in zip(update.clients.tolist(), update.gather_thetas(), strict=True):  # line 20
        fraction = (scores[m] <= beta_T).mean()
        fractions.append(f"{m}:{fraction:.3f}")
        if fraction > config.v:  # line 22
            passed[m] = theta.clone()
    frozen = state["frozen"] | passed  # line 23
    columns = {"phase": phase + 1, "frozen": len(frozen), "froze": len(passed), "beta_T": beta_T}
    columns["fractions"] = " ".join(fractions)

    changes = {"frozen": frozen}
    rounds_taken = t + 1 - state["phase_began"]
    limit = config.rounds / len(S)
    advance = end_of_phase(len(frozen), config.clients, config.phase_quorum, rounds_taken, limit)
    if advance:
        changes = {"frozen": {}, "phase": phase + 1, "phase_began": t + 1}  # line 2
    return changes, columns | {"advance": advance}


def quantile(pool: list[float], T: float) -> float:
    """Returns beta_T of the sorted pool (n,): the T-quantile.

    At least a fraction T of the pool is at most beta_T. It is element ceil(T n), counted from 1.
    """
    n = len(pool)
    fractions = np.arange(1, n + 1) / n
    return pool[(fractions < T).sum()]


def end_of_phase(frozen: int, M: int, quorum: float, rounds_taken: int, limit: float) -> str:
    """Says why a phase ends after this round: "natural" or "forced"; "" if it does not end.

    It ends if the fraction `quorum` of the M clients is frozen. In line 3 these are all clients, so
    M_l is empty. Otherwise it ends after `limit` rounds.
    """
    if frozen / M >= quorum:
        return "natural"
    if rounds_taken >= limit:
        return "forced"
    return ""


# --------------------------------------------------------------------------------- the generator


def build_generator(config, fl, state: dict) -> nn.Sequential:
    """Builds z = G(epsilon, one-hot y, difficulty) with the state's weights, or initial ones."""
    hidden = config.generator_hidden
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fl.streams.seed("generator"))
        first = nn.Linear(NOISE + fl.data.classes + 1, hidden)
        last = nn.Linear(hidden, fl.model.head.in_features)  # F
    if not is_fedcl(config):  # FedGen begins with the same weights, but has no input for difficulty
        first.weight = nn.Parameter(first.weight[:, :-1].detach().clone())
    G = nn.Sequential(first, nn.BatchNorm1d(hidden), nn.ReLU(), last)
    G = G.to(fl.model.device, fl.model.dtype)
    if state["generator"]:
        G.load_state_dict(state["generator"])
    return G


def draw_conditions(config, fl, state: dict, shape: tuple, purpose: str, *key) -> tuple:
    """Returns random labels y of this shape and G's input for them, on the model's device."""
    counts = np.sum(list(state["label_counts"].values()), axis=0)
    pool = np.array(state["pool"])  # FedGen has none
    rngs = [fl.streams(f"{purpose} {part}", *key) for part in ("label", "noise", "difficulty")]
    y, conditions = sample_conditions(counts, pool, shape, *rngs)
    y = torch.as_tensor(y, device=fl.model.device)
    return y, torch.as_tensor(conditions, device=fl.model.device, dtype=fl.model.dtype)


def sample_conditions(
    counts: np.ndarray, pool: np.ndarray, shape: tuple, rng_y, rng_epsilon, rng_score
) -> tuple[np.ndarray, np.ndarray]:
    """Returns random labels y ~ p(y) of this shape, and G's input: epsilon, one-hot y, a score.

    counts   (C,): how many samples of each class were in the clients' batches
    pool     (n,): the scores. It is empty if G gets none
    rng_...  NumPy generators. With a score or without, labels and noise are the same

    The input is (*shape, NOISE + C + 1), or one less without a score.
    """
    p = counts / counts.sum()  # Eq. 15
    y = rng_y.choice(len(p), shape, p=p)
    parts = [rng_epsilon.standard_normal((*shape, NOISE)), np.eye(len(p))[y]]
    if len(pool):
        r = rng_score.integers(len(pool), size=shape)  # Section IV-A
        score = (pool[r] - pool.mean()) / max(pool.std(), 1e-12)
        parts.append(score[..., None])
    return y, np.concatenate(parts, -1)


@torch.no_grad()
def generate(config, fl, state: dict, t: int, clients: np.ndarray) -> dict[str, list]:
    """Returns each client's features z (steps, B, F) and labels y (steps, B)."""
    G = build_generator(config, fl, state).eval()
    shape = (config.local_steps, config.batch_size)
    features = []
    labels = []
    for m in clients:
        y, conditions = draw_conditions(config, fl, state, shape, "synthetic", t, m)
        z = G(conditions.flatten(0, 1)).unflatten(0, shape)
        features.append(z.cpu().numpy())
        labels.append(y.cpu().numpy())
    return {"z": features, "y": labels}


def teach(config, fl, state: dict, t: int, diversity: float = 1.0) -> dict:
    """Trains G for a round on Eq. 18, and on FedGen's `similarity` with the weight `diversity`.

    Returns what changes in the state: G's weights, and Adam's moments. Eq. 18 judges z by the mean
    of the logits of the clients' heads. As heads are linear, these are the logits of their mean,
    the global head.
    """
    head = fl.model.bind(state["theta"][None]).head
    G = build_generator(config, fl, state).train()
    adam = torch.optim.Adam(G.parameters(), weight_decay=1e-2)
    if state["generator"]:
        adam.load_state_dict(state["adam"])
    adam.param_groups[0]["lr"] = TEACHING_LR * TEACHING_DECAY**t
    shape = (TEACHING_STEPS, TEACHING_BATCH)
    labels, conditions = draw_conditions(config, fl, state, shape, "teaching", t)
    for y, condition in zip(labels, conditions, strict=True):
        z = G(condition)
        ce = F.cross_entropy(head(z[None])[0], y, reduction="none")  # the head's input: (1, n, F)
        losses = loss_of(config.method, config.tau, config.lam, ce)
        J = losses.mean() + diversity * similarity(z, condition[:, :NOISE])
        adam.zero_grad()
        J.backward()
        adam.step()
    return {"generator": G.state_dict(), "adam": adam.state_dict()}


def similarity(z: torch.Tensor, epsilon: torch.Tensor) -> torch.Tensor:
    """Returns exp(-mean_ij d_z d_epsilon) of features z (n, F) from noise epsilon (n, NOISE).

    It is 1 where all z are equal. d_z is the mean |z_i - z_j|, d_epsilon the mean square.
    """
    d_z = torch.cdist(z, z, p=1) / z.shape[1]
    d_epsilon = (epsilon[:, None] - epsilon).square().mean(-1)
    return torch.exp(-(d_z * d_epsilon).mean())


# --------------------------------------------------------------------------------- the baselines


def federate_baseline(config: Config, fl: common.Federation, run: experiment.Run) -> None:
    """FedAvg and four methods that change one thing of it.

    FedProx has a base with a further term. FedEnsemble is tested as an ensemble. FedDistill's
    clients send mean logits and keep their models. FedDistill+ averages the models, too.
    """
    state = fl.start() | {"logits": {}}  # m -> FedDistill's mean logits (C, C)
    for t in run.rounds(state):
        clients = fl.select(t, config.clients_per_round)
        batches = draw_batches(config, fl, t, clients)
        numbers = len(clients) * fl.data.classes**2  # in Q, and in what the clients send for it
        received = 0
        changes = {"lr": config.lr}
        if state["logits"]:
            Q = torch.stack(list(state["logits"].values())).nanmean(0)
            changes["penalty"] = functools.partial(distillation, config.distill)  # joins the loss
            changes["per_client"] = {"Q": Q.expand(len(clients), *Q.shape)}  # comes as out.extra
            received = numbers
        update = fl.train(state, t, clients, batches, **changes)

        columns = {}
        if is_distilling(config):
            columns = fl.cost(update, received, sent=numbers)
            state["logits"] |= mean_logits(config, fl, update)
        if config.method == "fedensemble":  # the last row is the model of all that did not train
            state["ensemble"] = torch.cat([update.gather_thetas(), state["theta"][None]])
        if config.method == "feddistill":
            state["theta"] = fl.aggregate(state, update)  # base solo keeps each client's own model
        else:
            state["theta"] = average(fl, state["theta"], {}, update)
        run.record(t, state, update, **columns)


@recordable
def distillation(weight: float, out: training.Output) -> Tensor:
    """Returns weight KL(softmax(Q[y]) || p), (K,). Q (C, C) is nan for a label nobody has sent."""
    Q = out.extra["Q"][0]  # all clients have the same
    q = Q[out.y]
    is_shared = ~q.isnan().any(-1)
    log_q = q.nan_to_num().log_softmax(-1)
    log_p = out.logits.log_softmax(-1)
    kl = F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
    return weight * (out.weight * kl * is_shared).sum(1)


def mean_logits(config, fl, update: training.Update) -> dict[int, Tensor]:
    """Returns each client's mean logits of every label that it holds (C, C); nan for the others."""
    shards = [fl.shards[m] for m in update.clients]
    x = fl.data.images("train", fl.model.dtype)
    thetas = update.gather_thetas()
    predicted = common.predict_shards(fl.model, thetas, x, shards, config.chunk)
    means = {}
    for m, shard, logits in zip(update.clients, shards, predicted, strict=True):
        one_hot = F.one_hot(fl.data.y_train[shard], fl.data.classes).to(logits.dtype)  # (n, C)
        means[int(m)] = one_hot.T @ logits / one_hot.sum(0)[:, None]  # 0 / 0 is nan
    return means


class Ensemble(common.Federation):
    """A federation in which FedEnsemble tests all models as one: the mean of their logits."""

    def predict(self, state: dict):
        """Returns what `common.Federation` returns; under FedEnsemble the mean logits [(n, C)]."""
        if "ensemble" not in state:
            return super().predict(state)
        models = state["ensemble"]
        x = self.data.images("test", self.model.dtype)
        everything = [np.arange(len(x))] * len(models)
        logits = common.predict_shards(self.model, models, x, everything, self.config.chunk)
        M = self.config.clients  # who did not train has the last model, which is in `logits` once
        return [(sum(logits) + (M - len(models)) * logits[-1]) / M]


# -------------------------------------------------------------------------------- the command line


def plot(df, folder: Path) -> None:
    """Prints Table III and writes table3.csv and phases.png."""
    table = rounds_to_fedavg(df)
    table.to_csv(folder / "table3.csv")
    if len(table):
        heading = "to FedAvg's final accuracy: means over the trials that reach it, and how many do"
        by_method = table.groupby(["setting", "method"], sort=False)
        report.print_table(by_method.agg(["mean", "count"]), heading, "never")
    if "phase" in df:
        df = df.dropna(subset="phase").rename(columns={"frozen": "frozen clients"})
        figures.curves(df, folder / "phases.png", "phase", "frozen clients", "beta_T")


def rounds_to_fedavg(df):
    """Returns the first tested round at FedAvg's final accuracy, and its uploads, of each run.

    A run that does not reach it has NaN.
    """
    trial = ["setting", "trial"]
    tested = df.dropna(subset="accuracy")
    goal = tested[tested.method == "fedavg"].groupby(trial).accuracy.last()
    tested = tested.join(goal.rename("goal"), on=trial).dropna(subset="goal")
    tested.loc[tested.accuracy < tested.goal, ["round", "uploads"]] = math.nan
    return tested.groupby(report.RUN, sort=False)[["round", "uploads"]].first()  # but NaN


MNIST = "--dataset mnist --data-share 0.5 --rounds 200"
EMNIST = "--dataset emnist --data-share 0.5 --rounds 200"
ABLATION = f"{EMNIST} --alpha 0.1 --method fedcl"
FACES = "--dataset celeba --partition natural --min-size 2 --rounds 100 --generator-hidden 128"
NUMBERS_OF_PHASES = "0.8,0.4 0.8,0.6,0.2 0.8,0.6,0.4,0.2 0.9,0.7,0.5,0.3,0.1"
PRESETS = {  # command lines, each perhaps with a remark for --list-presets
    "table1": f"{MNIST} --thresholds 0.9,0.6,0.3 --v 0.8  # S and threshold (v) of Table I",
    "table2-mnist": f"{MNIST} --alpha 0.05 0.1 1  # Fig 3",
    "table2-emnist": f"{EMNIST} --alpha 0.05 0.1 1 10 --local-steps 20 40  # Fig 5",
    "table2-celeba": f"{FACES} --clients 10 25 --clients-per-round 5  # r: 5/10, 5/25, Fig 4",
    "table2-celeba-10": f"{FACES} --clients 25 --clients-per-round 10  # r: 10/25",
    "table3": f"{MNIST} --alpha 0.05 0.1 1 10  # its MNIST rows; table2-* write the others. Fig 6",
    "table4": f"{ABLATION} --phase-quorum 0.6 0.7 0.8 0.9  # quorum",
    "table5": f"{ABLATION} --thresholds {NUMBERS_OF_PHASES}  # 2, 3, 4, 5 phases",
    "table6-lambda": f"{ABLATION} --lam 0.2 0.5 0.8 1",
    "table6-tau": f"{ABLATION} --tau 5 10 15 20",
    "table6-s": f"{ABLATION} --thresholds 0.8,0.6,0.4,0.2 0.7,0.5,0.3 0.8,0.6,0.2 0.8,0.4",
    "table6-v": f"{ABLATION} --v 0.5 0.6 0.7 0.8",
}


def main(argv=None) -> None:
    """Runs the command line. Tests pass its words as `argv`."""
    script = experiment.Script(
        config=Config,
        presets=PRESETS,
        doc=__doc__,
        federate=federate,
        compare=("method",),
        plot=plot,
    )
    experiment.main(script, argv)


if __name__ == "__main__":
    main()
