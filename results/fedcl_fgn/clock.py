"""python -m results.fedcl_fgn.clock --method cl base --dataset fmnist --alpha 0.1

This study asks whether FedCL's doubling saves time, and whether selection by size does. It makes
the runs of selection.py, timed on devices of several spreads. The columns clock_0.5, waiting_0.5,
.. belong to each round (they are not summed).
"""

from dataclasses import dataclass

import common
import experiment
from results.clock import Timed
from results.fedcl_fgn import selection


class Federation(Timed, common.Federation):
    pass


@dataclass
class Config(selection.Config):
    """The options of selection.py."""

    def federation(self, data, streams) -> Federation:
        return Federation(self, data, streams)


PRESETS = {
    "doubling": "--method cl base --budget 0 --rounds 60 "
    "--batch-size 16 --alpha 0.1 --eval-every 2",
    "size": "--method base longer --select uniform size --batch-size 16 --alpha 0.1 --eval-every 2",
}


def main(argv=None) -> None:
    """Runs the command line. Tests pass its words as `argv`."""
    script = experiment.Script(
        config=Config,
        presets=PRESETS,
        doc=__doc__,
        federate=selection.federate,
        compare=("method", "follow", "detector", "select", "n"),
        name=selection.name,
    )
    experiment.main(script, argv)


if __name__ == "__main__":
    main()
