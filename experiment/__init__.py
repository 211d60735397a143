"""What turns an algorithm into an experiment: options, runs on disk, processes, tables, figures.

A script calls `main(Script(..), argv)`. Read the docstrings of `Script`, `Run`, `flag` and `main`:
they say all that a script must know. A command goes through these modules:

1. command.py: `main` has `conduct` do the following, and says in one line what went wrong
2. flags.py: `parse` makes a config for each point of the sweep
3. runs.py: `plan` makes a `Run` for each method, setting and trial
4. workers.py: `workers` starts processes; command.py's `build_all` reads the data meanwhile
5. disk.py: `claim` makes the folder this command's
6. workers.py: `train_all` has every run trained, in workers, in torchrun's ranks, or here
7. runs.py: `train` calls the script's `federate`, which loops over `Run.rounds`
8. report.py: tables, and figures.py

script.py says what a script and a command are, and weights.py how `trained` and --init get final
weights. costs.py estimates how long a command takes. machine.py knows memory and GPUs, ranks.py
torchrun's processes, terminal.py what is shown.
"""

from . import figures, report
from .command import main, stop
from .costs import Work
from .flags import Config, about_flag, flag, parse
from .machine import keep_heap
from .runs import Run, train
from .script import Command, Script
from .weights import trained

__all__ = [
    "Command",
    "Config",
    "Run",
    "Script",
    "Work",
    "about_flag",
    "figures",
    "flag",
    "keep_heap",
    "main",
    "parse",
    "report",
    "stop",
    "train",
    "trained",
]
