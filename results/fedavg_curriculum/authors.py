"""python -m results.fedavg_curriculum.authors --preset table4 --order curriculum vanilla

SCAFFOLD as in the code of the paper's authors: the server's c takes the whole mean of the clients'
changes, c <- c + mean_k(c_k+ - c_k), where SCAFFOLD takes K/M of it. In the paper's setting c moves
ten times as far. Their code also uses the clients' changes again in later rounds, which is left
out.
"""

from dataclasses import dataclass

import torch

import common
import experiment
import fedavg_curriculum as paper
from bases import Scaffold
from experiment import flag


class WholeMean(Scaffold):
    """SCAFFOLD with the factor 1, not K/M, in the update of c."""

    def server(self, w_0, w_hat, p, update, memory):
        before = memory.get("c", torch.zeros_like(w_0))
        next_w_0 = super().server(w_0, w_hat, p, update, memory)
        step = memory["c"] - before
        memory["c"] = before + self.config.clients / len(update.clients) * step
        return next_w_0


@dataclass
class Config(paper.Config):
    """The options of fedavg_curriculum.py, for this base alone."""

    base: str = flag("scaffold", "the base whose c moves further here", choices=("scaffold",))

    def federation(self, data, streams) -> common.Federation:
        return common.Federation(self, data, streams, base=WholeMean)


def main(argv=None) -> None:
    """Runs the command line. Tests pass its words as `argv`."""
    script = experiment.Script(
        config=Config,
        presets=paper.PRESETS,
        doc=__doc__,
        federate=paper.federate,
        compare=("order",),
        name=paper.name,
        plot=paper.plot,
    )
    experiment.main(script, argv)


if __name__ == "__main__":
    main()
