"""python -m results.fedcl_gmm_sync.controls --dataset mnist --data-share 0.5 --alpha 0.1

What makes FedCL work: its phases, or the learning rate that hides in its loss? All of this is ours.
The methods are the paper's, and these:

- fedcl-fresh: Eq. 21 averages only the clients of the round. Clients that wait are left out.
- fedcl-nofreeze: nobody freezes, and there are no phases.
- fedcl/e: FedCL at 1 / e of the learning rate. At tau = 10 its loss is then cross-entropy.
- fedgen-e: FedGen at e times the learning rate. FedCL gets this factor from its loss.
- fedavg-e: FedAvg at e times the learning rate.
- fedcl-nodiversity: FedCL with a generator that learns from Eq. 18 as published. It lacks the term
  exp(-mean d_z d_epsilon), which fedcl_gmm_sync.py takes from FedGen.
- fedgen-nodiversity: FedGen with a generator that learns without this term.

fedcl and its variants have one column more, rank_correlation: do generated features obey? It is
Spearman's correlation of two difficulties. The generator is given one, and the global head sees the
other.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

import common
import experiment
import fedcl_gmm_sync as paper
from experiment import flag

CONTROLS = ("fedcl-fresh", "fedcl-nofreeze", "fedcl/e", "fedgen-e", "fedavg-e")
CONTROLS += ("fedcl-nodiversity", "fedgen-nodiversity")
METHODS = paper.METHODS + CONTROLS


def is_fedcl(config) -> bool:
    return config.method.startswith("fedcl")


def has_phases(config) -> bool:
    return is_fedcl(config) and config.method != "fedcl-nofreeze"


def has_generator(config) -> bool:
    return config.method.startswith(("fedcl", "fedgen"))


@dataclass
class Config(paper.Config):
    """The options of fedcl_gmm_sync.py. More methods use some of them."""

    method: str = flag(
        "fedcl",
        "a method of the paper, or a control",
        sweep=(
            "fedcl",
            "fedcl-fresh",
            "fedcl-nofreeze",
            "fedgen",
            "fedgen-e",
            "fedavg",
            "fedavg-e",
        ),
        choices=METHODS,
    )
    tau: float = flag(10.0, "loss between easy and hard samples", above=0, high=1e6, when=is_fedcl)
    lam: float = flag(0.5, "lambda of Eq. 7", above=0, when=is_fedcl)
    thresholds: str = flag("0.8,0.6,0.2", "S, the phases' T, falling", when=has_phases)
    v: float = flag(0.7, "fraction of scores <= beta_T", low=0, high=1, when=has_phases)
    phase_quorum: float = flag(
        1.0, "fraction of frozen clients that ends a phase", above=0, high=1, when=has_phases
    )
    generator_hidden: int = flag(
        256, "width of the generator", low=1, high=65536, when=has_generator
    )

    def reads_rounds(self) -> bool:
        return has_phases(self)


def method_of_paper(config: Config) -> Config:
    """Returns the paper's method that a control changes, at the control's learning rate."""
    match config.method:
        case "fedcl-fresh" | "fedcl-nofreeze" | "fedcl-nodiversity":
            return replace(config, method="fedcl")
        case "fedgen-nodiversity":
            return replace(config, method="fedgen")
        case "fedcl/e":
            return replace(config, method="fedcl", lr=config.lr / math.e)
        case "fedgen-e":
            return replace(config, method="fedgen", lr=config.lr * math.e)
        case "fedavg-e":
            return replace(config, method="fedavg", lr=config.lr * math.e)
    return config


def federate(config: Config, fl: common.Federation, run: experiment.Run) -> None:
    """The loop of fedcl_gmm_sync.py, with what the controls change, and a measure."""
    method = config.method
    config = method_of_paper(config)
    if not paper.has_generator(config):
        paper.federate(config, fl, run)
        return

    diversity = 1.0
    if method.endswith("-nodiversity"):
        diversity = 0.0
    state = fl.start() | paper.begin()
    for t in run.rounds(state):
        clients = paper.select_unfrozen(config, fl, t, state["frozen"])
        batches = paper.draw_batches(config, fl, t, clients)
        objective = paper.local_objective(config, fl, state, t, clients)
        update = fl.train(state, t, clients, batches, **objective)

        columns = paper.traffic(config, fl, state, update)
        state["label_counts"] |= paper.count_batch_labels(fl, clients, batches)
        averaged = state["frozen"]
        if method == "fedcl-fresh":
            averaged = {}
        state["theta"] = paper.average(fl, state["theta"], averaged, update)
        if paper.is_fedcl(config):
            state["mixtures"] |= paper.fit_mixtures(config, fl, t, update)
            scores = paper.sample_mixtures(fl, state["mixtures"], t)
            state["pool"] = paper.pool_scores(scores)
        state |= paper.teach(config, fl, state, t, diversity)
        if paper.is_fedcl(config):
            columns["rank_correlation"] = rank_correlation(config, fl, state, t)
            if method != "fedcl-nofreeze":
                changes, found = paper.synchronise(config, state, update, scores, t)
                state |= changes
                columns |= found
        run.record(t, state, update, **columns)


@torch.no_grad()
def rank_correlation(config, fl: common.Federation, state: dict, t: int) -> float:
    """Returns Spearman's correlation of asked and realised difficulty; 0 if either is constant."""
    import pandas as pd

    head = fl.model.bind(state["theta"][None]).head
    G = paper.build_generator(config, fl, state).eval()
    y, conditions = paper.draw_conditions(config, fl, state, (paper.DRAWS,), "obedience", t)
    ce = F.cross_entropy(head(G(conditions)[None])[0].double(), y, reduction="none")
    realised = paper.difficulty(ce, config.tau, config.lam)
    both = pd.DataFrame({"asked": conditions[:, -1].tolist(), "realised": realised.tolist()})
    rho = both.corr("spearman").loc["asked", "realised"]
    return 0.0 if math.isnan(rho) else float(rho)


VARIANTS = "--method fedcl fedcl-fresh fedcl-nofreeze fedgen-e"
PRESETS = {  # the paper's presets, for FedCL's variants and their control
    name: f"{line.partition(' #')[0].replace(' --method fedcl', '')} {VARIANTS}"
    for name, line in paper.PRESETS.items()
}


def main(argv=None) -> None:
    """Runs the command line. Tests pass its words as `argv`."""
    script = experiment.Script(
        config=Config,
        presets=PRESETS,
        doc=__doc__,
        federate=federate,
        compare=("method",),
        plot=paper.plot,
    )
    experiment.main(script, argv)


if __name__ == "__main__":
    main()
