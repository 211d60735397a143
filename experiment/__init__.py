"""What turns an algorithm into an experiment: options, runs on disk, processes, tables, figures.

A script calls `main(Script(..), argv)`. Read the docstrings of `Script`, `Run`, `flag` and `main`:
they say all that a script must know. These are the modules, from the command line to the report:

- command.py: main reads the options, plans the runs, has them trained, and reports
- flags.py: options, and the configs of a sweep
- runs.py: Script.plan, Run.rounds, Run.record
- processes.py: workers, torchrun's ranks, signals, GPUs
- disk.py: a folder and its checkpoints
- terminal.py: what is printed
- report.py: tables and figures
"""

from . import report
from .command import main, stop
from .flags import Config, about_flag, flag, parse
from .processes import keep_heap
from .runs import Run, Script, train

__all__ = [
    "Config",
    "Run",
    "Script",
    "about_flag",
    "flag",
    "keep_heap",
    "main",
    "parse",
    "report",
    "stop",
    "train",
]
