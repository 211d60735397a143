"""python -m results.client_curriculum.rivals --client-order curriculum random coverage hics

Which clients should take part, at equal uploads? This study is ours, not the paper's. It compares
other orders of clients with the client curriculum, on the same partition.

power-of-choice  the K largest mean losses among --candidates, selected by size in every round
                 (Cho et al., 2022)
entropy          the most even labels first: an oracle, because no server sees labels
hics             the same, estimated from the output layer's bias after a client's first turn
                 (HiCS-FL, Chen and Vikalo, 2024, without its clusters)
coverage         the least trained first

Each is a score of clients, as --client-score. They differ only in this score: pools are paced as in
the client curriculum. Only a pool of power-of-choice is always K clients.
"""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import torch

import client_curriculum as paper
import common
import experiment
from experiment import flag
from results.fedcl_fgn.rules import check_output_bias

POOLED = ("entropy", "hics", "coverage")
RIVALS = ("power-of-choice", *POOLED)


def is_choice(config) -> bool:
    """Whether clients selected by size compare their losses. If so, it uses --candidates."""
    return config.client_order == "power-of-choice"


def is_estimated(config) -> bool:
    """Whether entropies come from output layers. If so, it uses --temperature."""
    return config.client_order == "hics"


def has_pool(config) -> bool:
    """Whether clients are admitted one after the other: it uses --client-a, --client-b."""
    return paper.paces_clients(config) and not is_choice(config)


def is_paced(config) -> bool:
    """Whether clients or samples are admitted so."""
    return has_pool(config) or paper.paces_samples(config)


def asks_score(config) -> bool:
    """Whether anything is ranked by a loss."""
    return is_choice(config) or paper.asks_score(config)


@dataclass
class Config(paper.Config):
    """The options of client_curriculum.py, with more client orders."""

    client_order: str = flag(
        "curriculum",
        "an order of the paper, or a rival",
        sweep=("curriculum", "anti", "random", *RIVALS),
        choices=paper.ORDERS + RIVALS,
    )
    data_order: str = flag("vanilla", "order of a client's samples, or FILE.py:FUNCTION")
    score: str = flag(
        "G", "loss of the global model (G) or an expert (E), or FILE.py:FUNCTION", when=asks_score
    )
    pacing: str = flag("linear", "shape of both pacings", choices=paper.PACINGS, when=is_paced)
    client_a: float = flag(
        0.8, "fraction of the updates until the pool is full", low=0, high=1e6, when=has_pool
    )
    client_b: float = flag(0.2, "fraction of the clients at first", low=0, high=1, when=has_pool)
    candidates: int = flag(
        8, "d, the clients that compare losses (at least K)", low=1, high=10**6, when=is_choice
    )
    temperature: float = flag(
        0.5,
        "T, for each unit of a client's distance under a unit gradient",
        above=0,
        when=is_estimated,
    )

    def client_scores(self) -> dict:
        rivals = {"entropy": entropy, "hics": hics, "coverage": coverage}
        return super().client_scores() | rivals | {"power-of-choice": largest_losses}

    def reads_rounds(self) -> bool:
        return has_pool(self)

    def federation(self, data, streams) -> common.Federation:
        fl = Noting(self, data, streams)
        if is_estimated(self):
            check_output_bias(fl, "--client-order hics")
        return fl


def federate(config: Config, fl: common.Federation, run: experiment.Run) -> None:
    """The loop of client_curriculum.py. A rival puts the clients with its smallest score first."""
    fl.expert_losses = paper.score_by_expert(config, fl, run)
    fl.before = paper.measure_difficulty(fl.shards, fl.expert_losses)
    if config.client_order in RIVALS:
        config = replace(config, client_order="curriculum", client_score=config.client_order)
    if config.client_score == "power-of-choice":
        config = replace(config, client_a=1e6, client_b=0.0)  # a pool is K clients
    paper.federate(config, fl, run)


class Noting(common.Federation):
    """The clients, with notes on their turns in `state`, and the costs of the rivals' scores.

    turns       how many turns each client has had
    entropies   of labels, estimated after a client's first turn
    difficulty  before and after Algorithm 2, for clients.png
    """

    def start(self) -> dict:
        M = self.config.clients
        after = paper.measure_difficulty(self.shards, self.expert_losses)
        self.state = super().start() | {"turns": [0] * M, "entropies": [math.inf] * M}
        self.state["difficulty"] = torch.tensor(np.array([self.before, after]))
        return self.state

    def train(self, state, t, clients, batches, **changes) -> common.Update:
        update = super().train(state, t, clients, batches, **changes)
        count_turns(self.config, self, state, update)
        return update

    def cost(self, update, received=0, sent=0, scorers=0) -> dict[str, float]:
        if self.config.client_order in RIVALS:
            scorers, sent = count_scoring(self.config, self, self.round() - 1)
        return super().cost(update, received, sent, scorers) | {"scorers": scorers}

    def round(self) -> int:
        """Returns how many rounds are over."""
        return sum(self.state["turns"]) // self.config.clients_per_round


def entropy(fl: Noting, theta: torch.Tensor, m: int) -> float:
    """Returns minus the entropy of the client's labels, in nats."""
    shares = torch.from_numpy(fl.count_labels()[m] / fl.sizes[m])
    return -float(torch.special.entr(shares).sum())


def hics(fl: Noting, theta: torch.Tensor, m: int) -> float:
    """Returns the same, estimated. Who has had no turn comes first."""
    return -fl.state["entropies"][m]


def coverage(fl: Noting, theta: torch.Tensor, m: int) -> int:
    """Returns how many turns the client has had, with the one that it waits for."""
    return fl.state["turns"][m] + (m in fl.state["queue"])


def largest_losses(fl: Noting, theta: torch.Tensor, m: int) -> float:
    """Power-of-choice: returns minus the mean loss of a candidate, and infinity for others.

    The d candidates of a round are selected by size.
    """
    rng = fl.streams("candidates", fl.round())
    d = count_candidates(fl.config)
    p = fl.sizes / fl.sizes.sum()
    if m not in rng.choice(fl.config.clients, d, replace=False, p=p):
        return math.inf
    _, own_score, _ = paper.find_functions(fl.config)
    clients = np.array([m])
    [losses] = paper.score_samples(
        fl.config, "anti", fl, fl.state, clients, fl.expert_losses, own_score
    )
    return -losses.mean()


def count_candidates(config) -> int:
    """Returns d."""
    return min(max(config.candidates, config.clients_per_round), config.clients)


def count_turns(config, fl: common.Federation, state: dict, update: common.Update) -> None:
    """Notes who was trained, and for hics what a first turn tells: later turns tell less."""
    entropies = [math.nan] * len(update.clients)
    if is_estimated(config):
        b_0 = output_bias(fl, fl.received(state, update.clients))
        b = output_bias(fl, update.gather_thetas())
        entropies = estimate_entropies(b - b_0, update.length, config.temperature)
    for m, estimate in zip(update.clients.tolist(), entropies, strict=True):
        if is_estimated(config) and state["turns"][m] == 0:
            state["entropies"][m] = float(estimate)
        state["turns"][m] += 1


def output_bias(fl: common.Federation, thetas: torch.Tensor) -> torch.Tensor:
    """Returns the last C trainable weights of each model, (C,) or (K, C)."""
    last = fl.model.trainable
    return thetas[..., last - fl.data.classes : last].double().cpu()


def estimate_entropies(delta_b: torch.Tensor, length, temperature: float) -> torch.Tensor:
    """Returns H(softmax(Delta b / T)) (K,) from Delta b (K, C).

    Frequent labels pull their biases up. T is `temperature` times the length of the client's way
    under a unit gradient. So the learning rate and the number of steps have no influence.
    """
    T = temperature * torch.as_tensor(length)[:, None]
    p = torch.softmax(delta_b / T, 1)
    return torch.special.entr(p).sum(1)


def count_scoring(config, fl: common.Federation, t: int) -> tuple[int, int]:
    """As in client_curriculum.py, for a rival. The labels' entropies are sent once."""
    scorers, numbers = paper.count_scoring(config, fl, t, is_short=False)
    if config.client_order == "entropy" and t == 0:
        numbers = config.clients
    if is_choice(config) and config.score == "E" and t == 0:
        scorers = config.clients
        numbers = config.clients
    if is_choice(config) and config.score != "E":
        numbers = count_candidates(config)
        if fl.base.vectors > 0:
            scorers = numbers
    return scorers, numbers


def draw(settings: dict, folder) -> None:
    """Plots clients.png: each client's difficulty, mean +- std, before and after Algorithm 2.

    It shows the first trial of the first setting.
    """
    from matplotlib import pyplot

    [run, *_] = itertools.chain(*settings.values())
    tables = run.load()["state"]["difficulty"].cpu().numpy()
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.6), sharey=True, layout="constrained")
    for axis, when, (means, stds) in zip(axes, ("before", "after"), tables, strict=True):
        down = np.minimum(stds, means)  # a loss is never negative
        axis.errorbar(np.arange(len(means)), means, [down, stds], fmt="o")
        consistency = f"std {stds.mean():.2f} inside, {means.std():.2f} between"
        axis.set_title(f"{when} Algorithm 2\n{consistency}")
        axis.set_xlabel("client")
    axes[0].set_ylabel("expert's loss (nats), mean +- std")
    figure.suptitle(f"{run.config.dataset}, first trial")
    figure.savefig(folder / "clients.png", dpi=150)
    pyplot.close(figure)


PRESETS = {
    "rivals": f"{paper.CLIENTS} --client-order curriculum anti random {' '.join(RIVALS)}",
}


def main(argv=None) -> None:
    script = experiment.Script(
        config=Config,
        presets=PRESETS,
        doc=__doc__,
        federate=federate,
        compare=("client_order", "data_order"),
        name=paper.name,
        plot=paper.plot,
        draw=draw,
    )
    experiment.main(script, argv)


if __name__ == "__main__":
    main()
