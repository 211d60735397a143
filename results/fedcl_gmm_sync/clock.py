"""python -m results.fedcl_gmm_sync.clock --method fedcl fedcl-fresh fedcl-nofreeze --dataset fmnist

Do phases save waiting, as the title of the paper promises? These are the runs of controls.py, timed
on devices of several spreads. The columns clock_0.5, waiting_0.5, .. belong to each round (they are
not summed).
"""

from dataclasses import dataclass

import experiment
import fedcl_gmm_sync as paper
from results.clock import Timed
from results.fedcl_gmm_sync import controls


class Ensemble(Timed, paper.Ensemble):
    pass


@dataclass
class Config(controls.Config):
    """The options of controls.py."""

    def federation(self, data, streams) -> Ensemble:
        fl = super().federation(data, streams)
        fl.__class__ = Ensemble
        return fl


def main(argv=None) -> None:
    """Runs the command line. Tests pass its words as `argv`."""
    script = experiment.Script(
        config=Config,
        presets=controls.PRESETS,
        doc=__doc__,
        federate=controls.federate,
        compare=("method",),
    )
    experiment.main(script, argv)


if __name__ == "__main__":
    main()
