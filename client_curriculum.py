"""python client_curriculum.py --client-order curriculum vanilla --data-order curriculum vanilla

This is the client curriculum, Section 4 of "When Do Curricula Work in Federated Learning?"
(Vahidian et al., ICCV 2023, https://arxiv.org/abs/2212.12712). plain/client_curriculum.py explains
it, with FedAvg, in one file.

Algorithm 2 divides the data so that some clients are easy and some are hard. The server ranks all M
clients by their mean loss. The easiest g(u) of them are the pool, where u is the number of client
updates so far. Each client of the pool takes part once, in random order, K clients a round. Then
all M are ranked again. A run has U client updates. g grows from b M to M over the first a U of
them. The clients may also use the data curriculum (Algorithm 1), so there are four methods.

How this differs from the paper, and why:
- The data curriculum differs from Algorithm 1 as in fedavg_curriculum.py.
- Client i's block of N_ic samples of class c begins where the block of client i - 1 ends. In
  Algorithm 2 the cumsum begins one client later, so the last client would get samples that do not
  exist.
- --f-ord may be 0, as in the paper's figures. Its default is 1, where clients differ most. The
  preset of Figure 7 follows the authors' notebooks: FedProx, score E, --f-ord 0.9.
- Consistency is measured by the standard deviation of the raw loss inside a client: a small one is
  high consistency. With scores that sum to 1 it could not reach the paper's 0.5. The paper's 0.01
  for IID clients needs --no-stratify.
- Every round has K clients. If fewer are left, they take part first in the next round, before a new
  pool. If they are in this pool, too, they come last in it. So no round has a client twice. With
  short rounds the paper's setting would take 109 rounds, not 100.
- The paper does not say when clients are ranked again, nor in what its g counts time.
- The pool never has fewer than K clients.
- By default vanilla clients take part in turn, as in the authors' code. Algorithm 1 selects K at
  random in each round: --client-sampling uniform. Vanilla is the control of every client order.
  With clients in turn only order and pacing differ.
- All methods have the same partition. In the authors' code both orders seem to be paced in Figures
  4 and 5, with score E. So their random bar is one run of both orders, the same in both figures,
  and Figure 5's control is fair. The presets pace one order, and Figure 5 has score G. Theirs is
  --client-order curriculum random --data-order curriculum random --score E.
- `random` selects a new random pool whenever fewer than K clients are left.
- The pacing functions are corrected. In the paper (Table 5) linear, quadratic and root end at
  N + (N - 1) b. There step ends at N + N b, and the exponential is N at once.
- Clients and samples are sorted by ascending loss. The paper sorts by descending score 1 / loss,
  which is the same order.
- If a pass over the admitted samples ends within a batch, the next pass fills it. All batches are
  full (of N if N < B), so a client's T steps may be a little more than E epochs.
- The expert is an oracle: it has seen all training data, so score E and Algorithm 2 cannot be used
  in practice. By default it is trained as a client is. The paper does not state how, which decides
  the consistency. The presets follow the authors' script (--expert-recipe authors). On IID CIFAR-10
  with --f-ord 0 the deviation inside a client is then 0.48, and the paper has 0.52.
- Scoring does not count in `samples`. In `clock` only the numbers count that clients send back.

Names: M is K in the paper's Section 4.2, where g(u) is K^(t) and L_m is L_k. Here K clients take
part in a round.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

import common
import experiment
import training
from experiment import flag, report
from recording import recordable
from user_files import as_batches, ask_each, blamed, find_function, is_own, name_of

ORDERS = ("curriculum", "anti", "random", "vanilla")
PACINGS = ("linear", "quadratic", "root", "step", "exponential")


def is_ranked(order: str) -> bool:
    """Whether this order sorts by difficulty."""
    return order in ("curriculum", "anti") or is_own(order)


def ranks_clients(config) -> bool:
    """Whether clients are sorted by difficulty."""
    return is_ranked(config.client_order)


def ranks_by_samples(config) -> bool:
    """Whether a client is as difficult as its samples are in the mean."""
    return ranks_clients(config) and config.client_score == "mean"


def asks_score(config) -> bool:
    """Whether clients or samples are sorted by the difficulty of samples."""
    return ranks_by_samples(config) or is_ranked(config.data_order)


def takes_all_clients(config) -> bool:
    """Whether the pool is all clients from the start."""
    return config.client_order == "vanilla"


def paces_clients(config) -> bool:
    """Whether the pool grows."""
    return not takes_all_clients(config)


def paces_samples(config) -> bool:
    """Whether a client's admitted samples grow."""
    return config.data_order != "vanilla"


def is_paced(config) -> bool:
    """Whether the pool or a client's admitted samples grow."""
    return paces_clients(config) or paces_samples(config)


def has_falling_lr(config) -> bool:
    """Whether eta falls within a round."""
    return config.lr_alpha > 0 and config.lr_power > 0


@dataclass
class Config(experiment.Config):
    """Common options with this script's defaults, then the curricula's own."""

    alpha: float = 0.2
    clients: int = 20
    clients_per_round: int = 4
    rounds: int = 50
    epochs: int = 1
    momentum: float = 0.9
    weight_decay: float = 5e-4

    client_order: str = flag(
        "curriculum",
        "the first pools: easy clients, hard clients, random clients, or all",
        sweep=("curriculum", "vanilla"),
        choices=ORDERS,
    )
    data_order: str = flag(
        "curriculum",
        "a client's samples: easy first (curriculum), hard first (anti), random order, ordinary "
        "batches of all (vanilla), or your own: FILE.py:FUNCTION, like easy_first",
        sweep=("curriculum", "vanilla"),
    )
    score: str = flag(
        "G",
        "difficulty of a sample: loss of the global model (G), of an expert trained on all data "
        "(E), or your own: FILE.py:FUNCTION of (fl, theta, m)",
        when=asks_score,
    )
    client_score: str = flag(
        "mean",
        "difficulty of a client: that of its samples in the mean, or your own: FILE.py:FUNCTION "
        "of (fl, theta, m)",
        when=ranks_clients,
    )
    f_ord: float = flag(
        1.0,
        "fraction of each client's samples that Algorithm 2 gives by difficulty (0: none)",
        low=0,
        high=1,
    )
    stratify: bool = flag(
        True, "divide within each class, so that clients keep their mix of labels"
    )
    expert_epochs: int = flag(2, "epochs of the expert, on all samples", low=1, high=1000)
    expert_recipe: str = flag(
        "clients",
        "how the expert is trained: as the clients, or as in the authors' script",
        choices=("clients", "authors"),
    )
    client_sampling: str = flag(
        "pool",
        "vanilla clients: all in turn, or random ones in every round",
        choices=("pool", "uniform"),
        when=takes_all_clients,
    )
    pacing: str = flag("linear", "shape of both pacings", choices=PACINGS, when=is_paced)
    client_a: float = flag(
        0.8, "fraction of the updates until the pool is full", low=0, high=1e6, when=paces_clients
    )
    client_b: float = flag(
        0.2, "fraction of the clients at first", low=0, high=1, when=paces_clients
    )
    pacing_a: float = flag(
        0.8, "fraction of the steps until all samples are in", low=0, high=1e6, when=paces_samples
    )
    pacing_b: float = flag(
        0.2, "fraction of the samples at first", low=0, high=1, when=paces_samples
    )
    lr_alpha: float = flag(0.0, "alpha in eta_i = eta (1 + alpha i)^-p", low=0, when=has_falling_lr)
    lr_power: float = flag(0.75, "p in eta_i", low=0, when=has_falling_lr)

    def check(self) -> None:
        """Raises UsageError if options contradict, or a function is not found."""
        super().check()
        find_functions(self)

    def client_scores(self) -> dict:
        """Returns {--client-score: its function}. A study adds its own."""
        return {"mean": None}

    def work(self, n: int) -> experiment.Work:
        """Returns about what a run does, with its scores and an expert."""
        work = super().work(n)
        work.scored = n  # by the expert
        if self.score == "G":
            rankings = is_ranked(self.data_order) + is_ranked(self.client_order)
            work.scored += rankings * work.samples / self.epochs
        E = self.expert_epochs
        work.steps += E * n / self.batch_size
        work.samples += E * n
        return work

    def reads_rounds(self) -> bool:
        """Whether a round depends on how many there are."""
        return paces_clients(self)


def find_functions(config: Config) -> tuple[Callable, Callable | None, Callable | None]:
    """Returns the functions of --data-order, --score, --client-score. None: a score of ours."""
    orders = {
        "curriculum": easy_first,
        "anti": hard_first,
        "random": easy_first,  # all samples are equally easy (`score_samples`)
        "vanilla": easy_first,  # all samples are admitted (`draw_client_batches`)
    }
    order = find_function("--data-order", config.data_order, orders)
    own_score = find_function("--score", config.score, {"G": None, "E": None})
    own_client_score = find_function("--client-score", config.client_score, config.client_scores())
    return order, own_score, own_client_score


def name(config: Config) -> str:
    """client+data, client, data, vanilla; with other orders client-anti, data-random, ..

    Scores of a user's follow: "client by mine".
    """
    words = []
    for who, order in (("client", config.client_order), ("data", config.data_order)):
        if order == "curriculum":
            words.append(who)
        elif order != "vanilla":
            words.append(f"{who}-{name_of(order)}")
    scores = []
    if ranks_clients(config):
        scores.append(config.client_score)
    if asks_score(config):
        scores.append(config.score)
    own = [name_of(score) for score in scores if is_own(score)]
    return " by ".join(["+".join(words) or "vanilla", *own])


def federate(config: Config, fl: common.Federation, run: experiment.Run) -> None:
    """A client order (Section 4.2) around a data order (Algorithm 1)."""
    order, own_score, own_client_score = find_functions(config)
    expert_losses = score_by_expert(config, fl, run)
    # Algorithm 2. Each client gets other samples, but as many as before: fl.sizes stays as it is.
    fl.shards = deal_by_difficulty(config, fl, expert_losses)
    means, stds = measure_difficulty(fl.shards, expert_losses)  # for metrics.csv only
    K = config.clients_per_round
    state = fl.start()
    state["pool_size"] = 0
    state["queue"] = []  # who of the pool has not yet taken part
    for t in run.rounds(state):
        is_short = len(state["queue"]) < K  # too few are left for a round
        if is_short:
            L = score_clients(config, fl, state, expert_losses, own_score, own_client_score)
            state["pool_size"] = pool_size(config, u=t * K)  # g(u) after u client updates
            pool = draw_pool(config, fl, t, L, state["pool_size"])
            state["queue"] = fill_queue(state["queue"], pool)
        clients = np.sort(state["queue"][:K])  # a mini-batch of clients
        state["queue"] = state["queue"][K:]

        difficulties = score_samples(
            config, config.data_order, fl, state, clients, expert_losses, own_score
        )
        batches = []
        for m, difficulty in zip(clients, difficulties, strict=True):
            drawn = draw_client_batches(config, fl, t, m, difficulty, order)
            batches.append(drawn)  # Algorithm 1
        eta = falling_lr(config, steps=max(map(len, batches)))  # enough for the largest client
        update = fl.train(state, t, clients, batches, lr=eta)
        p = fl.proportions(clients)
        state["theta"] = fl.aggregate(state, update, p)

        columns = {"pool": state["pool_size"], "expert_loss": means[clients].mean()}
        columns |= {"inside": stds.mean(), "between": means.std()}  # of clients, Section 4.1
        scorers, numbers = count_scoring(config, fl, t, is_short)
        columns["scorers"] = scorers
        columns |= fl.cost(update, sent=numbers, scorers=scorers)
        run.record(t, state, update, **columns)


# ---------------------------------------------------------------------- easy clients, hard clients


def score_by_expert(config: Config, fl: common.Federation, run: experiment.Run) -> np.ndarray:
    """Returns the loss of every training sample (n,) under a central expert (Section 4.3)."""

    def make_expert() -> torch.Tensor:
        return train_expert(config, fl)

    expert = run.cached("expert", make_expert, "expert_epochs", "expert_recipe")
    everything = [np.arange(len(fl.labels))]  # as one shard
    [(losses, _)] = common.score(fl.model, expert, fl.data, everything, config.chunk)
    if not np.isfinite(losses).all():
        raise common.NonFiniteError("the expert's loss is not finite, so it cannot rank samples")
    return losses


def train_expert(config: Config, fl: common.Federation) -> torch.Tensor:
    """Returns the weights (P,) of a model that was trained on all samples.

    The authors' script has batches of 64, eta_i = 0.01 (1 + i / 1000)^-0.75 over all steps, and
    `smoothed_loss`.
    """
    if config.expert_recipe == "clients":
        return fl.train_centrally(config.expert_epochs)
    i = np.arange(config.expert_epochs * math.ceil(len(fl.labels) / 64))
    eta = 0.01 * (1 + i / 1000) ** -0.75
    return fl.train_centrally(config.expert_epochs, batch_size=64, lr=eta, loss=smoothed_loss)


@recordable
def smoothed_loss(out: training.Output) -> torch.Tensor:
    """Returns the mean cross-entropy (K,) with label smoothing 0.1.

    Its gradient is ten times as large in the last layer, which has ten times the learning rate in
    the authors' script. There its weight decay is ten times as large, too. A user's own model has
    no such layer here.
    """
    alone = out.net.head(out.features.detach())  # its gradient reaches the last layer only
    logits = out.logits + 9 * (alone - alone.detach())
    losses = F.cross_entropy(
        logits.flatten(0, 1), out.y.flatten(), reduction="none", label_smoothing=0.1
    )
    return (out.share * losses.view_as(out.y)).sum(1)


def deal_by_difficulty(config, fl: common.Federation, losses: np.ndarray) -> list[np.ndarray]:
    """Algorithm 2 on the clients' shards. Without --stratify all samples count as one class."""
    labels = fl.labels
    if not config.stratify:
        labels = np.zeros_like(labels)
    rng = fl.streams("difficulty")
    return reconstitute(fl.shards, labels, losses, config.f_ord, rng)


def reconstitute(shards, labels: np.ndarray, losses: np.ndarray, f_ord: float, rng) -> list:
    """Algorithm 2: the first client gets the easiest samples. Client i keeps its class counts N_ic.

    shards          disjoint index arrays, one for each client
    labels, losses  (n,) of all samples
    f_ord           client i gets f_ord N_ic samples of class c in the order of difficulty
    rng             gives each client the rest at random

    Raises ValueError if a loss is not finite, or if f_ord is not from 0 to 1.
    """
    if not np.isfinite(losses).all() or not 0 <= f_ord <= 1:
        raise ValueError("reconstitute: wanted finite losses, and f_ord from 0 to 1")
    dealt = [[] for _ in shards]
    held = np.sort(np.concatenate(shards))
    for c in np.unique(labels[held]):
        D_c = held[labels[held] == c]
        D_c = D_c[np.argsort(losses[D_c], kind="stable")]  # easy first
        N_c = np.array([(labels[shard] == c).sum() for shard in shards])
        id_c = np.cumsum(N_c) - N_c  # where client i's block begins
        ordered = np.floor(f_ord * N_c + 1e-9).astype(int)  # 1e-9: 0.29 of 100 is 29, not 28
        for i, begin in enumerate(id_c):
            dealt[i].append(D_c[begin : begin + ordered[i]])
        taken = np.concatenate([parts[-1] for parts in dealt])  # of class c
        remaining = rng.permutation(np.setdiff1d(D_c, taken))
        ends = np.cumsum(N_c - ordered)
        for i, rest in enumerate(np.split(remaining, ends[:-1])):
            dealt[i].append(rest)
    return [np.sort(np.concatenate(parts)) for parts in dealt]


def measure_difficulty(shards, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and deviation of the expert's losses inside each client, (M,) each."""
    means = [losses[shard].mean() for shard in shards]
    stds = [losses[shard].std() for shard in shards]
    return np.array(means), np.array(stds)


# --------------------------------------------------------------------------- the client curriculum


def score_clients(
    config, fl: common.Federation, state: dict, expert_losses, own_score, own_client_score
) -> np.ndarray:
    """Returns each client's difficulty L_m (M,): its samples' mean (Eq. 1), or a user's own."""
    everyone = fl.everyone
    if ranks_clients(config) and own_client_score is not None:
        theta = fl.received(state, everyone)
        shapes = [()] * len(everyone)
        word = config.client_score
        L = ask_each(own_client_score, "--client-score", word, fl, theta, everyone, shapes)
        return np.array(L)
    order = config.client_order
    difficulties = score_samples(config, order, fl, state, everyone, expert_losses, own_score)
    return np.array([of_client.mean() for of_client in difficulties])


def score_samples(
    config, order: str, fl, state: dict, clients, expert_losses, own_score
) -> list[np.ndarray]:
    """Returns the difficulties (N,) of each client's samples.

    They are the losses under the expert or the received model, or a user's own. If the order needs
    none, all samples are equally difficult.
    """
    if not is_ranked(order):
        return [np.zeros(fl.sizes[m]) for m in clients]
    if config.score == "E":
        return [expert_losses[fl.shards[m]] for m in clients]
    theta = fl.received(state, clients)
    if own_score is not None:
        shapes = [(N,) for N in fl.sizes[clients].tolist()]
        return ask_each(own_score, "--score", config.score, fl, theta, clients, shapes)
    return [losses for losses, _ in fl.score(theta, clients)]


def pool_size(config: Config, u: int) -> int:
    """Returns g(u), the size of the pool after u of all U client updates, at least a round's K.

    Section 4.2 calls it K^(t).
    """
    M = config.clients
    if takes_all_clients(config):
        return M
    U = config.rounds * config.clients_per_round
    g = pacing(config.pacing, u, U, M, config.client_a, config.client_b)
    return max(g, config.clients_per_round)


def draw_pool(config, fl: common.Federation, t: int, L: np.ndarray, size: int) -> np.ndarray:
    """Returns the first `size` clients by the client order and difficulties L (M,), shuffled.

    Under --client-sampling uniform it returns the K random clients of this round alone.
    """
    if takes_all_clients(config) and config.client_sampling == "uniform":
        return fl.select(t, config.clients_per_round)
    if config.client_order == "anti":
        L = -L
    ranked = sort_clients(L, fl.streams("client ties", t))
    pool = np.sort(ranked[:size])  # so that only who is in changes the shuffle
    return fl.streams("pool", t).permutation(pool)


def sort_clients(difficulty: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns the clients (M,) by ascending difficulty; equal ones are in random order."""
    shuffled = rng.permutation(len(difficulty))
    return shuffled[np.argsort(difficulty[shuffled], kind="stable")]


def fill_queue(queue: list[int], pool: np.ndarray) -> list[int]:
    """Returns the clients of the next rounds: first the queue, then the pool (n,).

    Clients of the pool that wait already come last. So no round of up to n clients has one twice.
    """
    waits = np.isin(pool, queue)
    return [*queue, *pool[~waits].tolist(), *pool[waits].tolist()]


# ----------------------------------------------------------------------------- the data curriculum


def draw_client_batches(
    config, fl: common.Federation, t: int, m: int, difficulty: np.ndarray, order: Callable
) -> np.ndarray:
    """Returns the samples of client m at each of its T local steps in round t: (T, B), -1: none.

    order  a function like `easy_first`

    Orders, pacing and sampler are as in fedavg_curriculum.py, over one round.
    """
    shard = fl.shards[m]
    N = len(shard)
    T = config.epochs * math.ceil(N / config.batch_size)
    g = np.full(T, N)  # how many samples are admitted
    if paces_samples(config):
        for step in range(T):
            g[step] = pacing(config.pacing, step, T, N, config.pacing_a, config.pacing_b)
    rng = fl.streams("batches", t, m)
    with blamed("--data-order", config.data_order, f"client {m}"):
        drawn = order(fl, t, m, difficulty.copy(), g, rng)
        places = as_batches(drawn, T, config.batch_size, N)
    return np.where(places < 0, -1, shard[places])


def easy_first(fl: common.Federation, t: int, m: int, difficulty, g: np.ndarray, rng):
    """Returns the batches of client m's T local steps in round t: lists of places in its samples.

    difficulty  (N,) of its samples fl.shards[m], small = easy
    g           (T,): how many of the easiest samples each step admits
    rng         a generator for the batches

    Equal difficulties are in random order. In `random` all are equal.
    """
    ties = fl.streams("ties", t, m)
    B = fl.config.batch_size
    return CurriculumBatchSampler(difficulty, B, len(g), g.__getitem__, rng, ties)


def hard_first(fl: common.Federation, t: int, m: int, difficulty, g: np.ndarray, rng):
    """As `easy_first`, but hard samples count as easy."""
    return easy_first(fl, t, m, -difficulty, g, rng)


def pacing(family: str, step: int, T: int, N: int, a: float, b: float) -> int:
    """Returns g(step): how many of N samples are admitted at a step of T (Table 5, corrected).

    It is in [1, N], and grows from b N to N in the first a T steps. Raises ValueError for an
    unknown family.
    """
    x = 1.0  # the fraction of these steps that is over
    if step < a * T:
        x = step / (a * T)
    match family:
        case "linear":
            grown = x
        case "quadratic":
            grown = x**2
        case "root":
            grown = math.sqrt(x)
        case "step":
            grown = math.floor(x + 1e-9)  # 0, and 1 at the end
        case "exponential":
            grown = math.expm1(10 * x) / math.expm1(10)
        case _:
            raise ValueError(f"{family}: choose linear, quadratic, root, step or exponential")
    g = math.floor(N * b + N * (1 - b) * grown + 1e-9)  # 1e-9: 398.99.. is 399
    return min(max(g, 1), N)


class CurriculumBatchSampler(torch.utils.data.Sampler):
    """Batches of N samples that admit the easiest first, for DataLoader(.., batch_sampler=..).

    difficulty  (N,), small = easy. Equal ones are admitted in random order
    batch_size  numbers in a batch; more than N are taken as N. They are places in `difficulty`
    steps       how many batches there are
    pacing      step -> how many samples are admitted: a whole number, at least 1, not a fraction
    rng         a NumPy generator, or a seed, for the batches
    ties        the same for the order of equal difficulties. Without it, rng decides this order

    Each admitted sample comes once, in random order, before any comes again. If such a pass ends
    within a batch, the next one begins, over the samples that are admitted by then. So a sample
    waits for the end of the pass in which it was admitted. Iterating is one local round: pacing
    begins at step 0. For new difficulties make a new sampler. Raises ValueError if a difficulty is
    NaN, if there is no sample, if batch_size is below 1, or if pacing returns another number.
    """

    def __init__(self, difficulty, batch_size: int, steps: int, pacing, rng, ties=None):
        difficulty = np.asarray(difficulty)
        if difficulty.ndim != 1 or np.isnan(difficulty).any():
            raise ValueError("difficulty: wanted one number for each sample, none of them NaN")
        if min(len(difficulty), batch_size) < 1:
            raise ValueError("wanted at least one sample, and a batch_size of at least 1")
        self.rng = np.random.default_rng(rng)  # of a generator: itself
        ties = self.rng if ties is None else np.random.default_rng(ties)
        shuffled = ties.permutation(len(difficulty))
        self.easy_first = shuffled[np.argsort(difficulty[shuffled], kind="stable")]
        self.batch_size = min(batch_size, len(difficulty))
        self.steps = steps
        self.pacing = pacing

    def __len__(self) -> int:
        return self.steps

    def __iter__(self):
        queue = np.empty(0, dtype=int)  # what is left of the passes begun so far
        for step in range(self.steps):
            while len(queue) < self.batch_size:
                count = self.pacing(step)
                if not count >= 1 or count % 1:
                    raise ValueError(f"pacing({step}) is {count}: wanted a whole number of samples")
                admitted = self.easy_first[: int(count)]
                admitted = np.sort(admitted)  # so that only who is in changes the batches
                queue = np.concatenate([queue, self.rng.permutation(admitted)])
            yield queue[: self.batch_size].tolist()
            queue = queue[self.batch_size :]


def falling_lr(config: Config, steps: int) -> np.ndarray:
    """Returns eta_i = eta (1 + alpha i)^-p of each local step (steps,); i begins at 0."""
    i = np.arange(steps)
    return config.lr * (1 + config.lr_alpha * i) ** -config.lr_power


def count_scoring(config, fl: common.Federation, t: int, is_short: bool) -> tuple[int, int]:
    """Returns how many clients get a model to score with in round t, and the numbers they send.

    is_short says whether round t needed a new pool, for which the clients were ranked. Under G, or
    a user's own score, all M clients get theta whenever they are ranked. Those that are then
    selected get it a second time, to train from it. If the base sends no models (solo), they score
    with their own. The expert is sent once, because its scores never change.
    """
    scorers = 0
    numbers = 0
    by_expert = config.score == "E" and ranks_by_samples(config)
    if config.score == "E" and asks_score(config) and t == 0:
        scorers = config.clients
    if by_expert and t == 0:
        numbers = config.clients
    if ranks_clients(config) and is_short and not by_expert:
        numbers = config.clients
        if fl.base.vectors > 0:  # the base sends models
            scorers += config.clients
    return scorers, numbers


# -------------------------------------------------------------------------------- the command line


def plot(df, folder) -> None:
    """Prints the gains over vanilla, A_o, and writes the consistency of clients (Section 4.1).

    consistency.csv has the columns inside and between.
    """
    report.print_gains(report.per_trial(df), "vanilla")
    table = df.groupby(["setting", "trial"], sort=False)[["inside", "between"]].first()
    table.to_csv(folder / "consistency.csv")
    means = table.groupby("setting", sort=False).mean().round(3)
    report.print_table(means, "std of the expert's loss inside clients, and of the clients' means")


# The names are the paper's figures. If an option is given twice, the last one counts. What follows
# # is a remark for --list-presets.
PAPER = "--dataset cifar10 --clients 100 --clients-per-round 10 --rounds 100 --epochs 10"
AUTHORS = "--expert-recipe authors --expert-epochs 50"
CIFAR10 = f"{PAPER} --lr 0.001 --lr-alpha 0.001 {AUTHORS}"
EVEN = "--partition dirichlet-even"  # as in the authors' code
BETAS = f"{EVEN} --alpha 0.2 0.05"  # beta in the paper
IID = "--partition iid --no-stratify"
NEITHER = f"{CIFAR10} --client-order vanilla --data-order vanilla"
DATA = f"{NEITHER} --data-order curriculum anti random vanilla --score E --f-ord 0 1"
CLIENTS = f"{NEITHER} --client-order curriculum anti random vanilla"
SCORES_CLIENTS = f"{NEITHER} --client-order curriculum random --score G E"
SCORES_DATA = f"{NEITHER} --data-order curriculum random --f-ord 0 --score G E"
DEALT = f"{NEITHER} --rounds 1 --epochs 1 --f-ord 0 1"
PRESETS = {
    "consistency": f"{DEALT} {BETAS}  # std of the expert's loss inside clients",
    "consistency-iid": f"{DEALT} {IID}",
    "fig4": f"{DATA} {BETAS}  # data curriculum, low and high consistency",
    "fig4-iid": f"{DATA} {IID}",
    "fig5": f"{CLIENTS} {BETAS}  # client curriculum",
    "fig5-iid": f"{CLIENTS} {IID}",
    "fig6-clients": f"{SCORES_CLIENTS} {BETAS}  # scored by the expert, and by the global model",
    "fig6-clients-iid": f"{SCORES_CLIENTS} {IID}",
    "fig6-data": f"{SCORES_DATA} {BETAS}",
    "fig6-data-iid": f"{SCORES_DATA} {IID}",
    "fig7": f"{CIFAR10} {EVEN} --base fedprox --score E --f-ord 0.9  # both curricula",
}


def main(argv=None) -> None:
    """Runs the command line. Tests pass its words as `argv`."""
    script = experiment.Script(
        config=Config,
        presets=PRESETS,
        doc=__doc__,
        federate=federate,
        compare=("client_order", "data_order"),
        name=name,
        plot=plot,
    )
    experiment.main(script, argv)


if __name__ == "__main__":
    main()
