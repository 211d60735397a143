"""python -m examples.track --rounds 20 --trials 1

This is fedcl_fgn.py, with every round written to TensorBoard as it ends. To see it:
tensorboard --logdir runs

`track` is a function of a module, so it works in the processes of --jobs, too. If it fails, the
run says so in one line and continues. A resumed run tracks its further rounds.
"""

import functools
import re

from torch.utils.tensorboard import SummaryWriter

import experiment
import fedcl_fgn


@functools.cache
def writer(folder: str) -> SummaryWriter:
    """Returns the writer of a run: one for each run in a process."""
    return SummaryWriter(folder)


def track(run: experiment.Run, row: dict) -> None:
    """Writes the numbers of a row of metrics.csv under their columns' names, by round.

    Weights & Biases: wandb.init(name=folder, reinit="create_new") replaces SummaryWriter, and
    .log(numbers, step=row["round"]) replaces the loop. MLflow: mlflow.end_run(), then
    mlflow.start_run(run_name=folder), and mlflow.log_metrics(numbers, step=row["round"]).
    """
    name = re.sub(r"[^\w.=-]+", "-", str(run))
    board = writer(str(run.folder / "tensorboard" / name))
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    for column, value in numbers.items():
        board.add_scalar(column, value, row["round"])
    board.flush()


def main(argv=None) -> None:
    script = experiment.Script(
        config=fedcl_fgn.Config,
        presets=fedcl_fgn.PRESETS,
        doc=__doc__,
        federate=fedcl_fgn.federate,
        compare=("method", "detector"),
        name=fedcl_fgn.name,
        track=track,
    )
    experiment.main(script, argv)


if __name__ == "__main__":
    main()
