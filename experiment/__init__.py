"""What turns an algorithm into an experiment: options, runs on disk, processes, tables, figures."""

from . import report
from .command import main
from .flags import Config, about_flag, flag, parse
from .processes import keep_heap, stop
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
