"""A script: what its author gives to `main`. A command: the runs that one command line asks for."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from bases import BASES
from nets import NETS
from user_files import ROOT, file_of, is_ours, is_own

from .flags import Config, about_flag, defaults_of

NO_SETTING = "-"  # where nothing is swept but the methods


def waits_for_none(config: Config) -> dict:
    return {}


def readable(config: Config) -> set[str]:
    """Returns the options that a user's own code may read.

    What our own `when` says is for our code alone. Options that may name a user's function are left
    out: methods without it would have their names twice.
    """
    found = set()
    if is_ours(file_of(config.reads_rounds)):
        found.add("rounds")
    for name in defaults_of(type(config)):
        about = about_flag(type(config), name)
        when = about["when"]
        is_read = about["role"] in ("", "dealing") and (when is None or is_ours(file_of(when)))
        if is_read and (about["kind"] is not str or about["choices"]):
            found.add(name)
    return found


@dataclasses.dataclass
class Script:
    """What a script gives to `main`, by name. All functions are of a module, none is a lambda.

    federate(config, fl, run)  trains one method in one setting and trial: it loops over
                               `run.rounds(state)` and calls `run.record`
    compare                    the options that make the methods. Other swept options make
                               settings. A method that does not use what is swept is trained once
                               and shown in every setting.
    config                     the script's Config
    presets                    {name: command line}. What follows # explains it.
    doc                        the script's docstring. It begins with an example.
    name(config)               a method's name. Without it: the values of `compare`.
    plot(df, folder)           prints and plots what is the script's own, once at the end. `df`
                               holds the rows of metrics.csv, without runs that diverged.
    draw(settings, folder)     plots what runs have saved: {setting: runs}, each with `load()`
    after(config)              the changes that lead to the method that this one needs, for example
                               {"method": "cl"}. It is trained first. {}: it needs none.
    track(run, row)            gets each new row of metrics.csv, in the process that trains. If it
                               raises an error, one line says so and the training continues.
    """

    federate: Callable
    compare: tuple[str, ...]
    config: type = Config
    presets: dict[str, str] = dataclasses.field(default_factory=dict)
    doc: str | None = ""
    name: Callable | None = None
    plot: Callable | None = None
    draw: Callable | None = None
    after: Callable = waits_for_none
    track: Callable | None = None

    def method_of(self, config: Config) -> str:
        """Returns a method's name."""
        if self.name:
            return self.name(config)
        return " ".join(str(getattr(config, name)) for name in self.compare)

    def results_depend_on(self, config: Config) -> dict:
        """{name: value} of the options that decide the result of a config's method.

        A user's own code may read more of them than ours. Those of `compare` are left out: a method
        that does not use them would have its name twice.
        """
        if self.is_all_ours(config):
            return config.results_depend_on()
        return config.results_depend_on(readable(config) - {*self.compare})

    def is_all_ours(self, config: Config) -> bool:
        """Whether no code of a user's reads the options: no script, Config, base or function.

        A wrapper counts as a user's.
        """
        for part in (self.federate, self.config, config.federation, BASES[config.base]):
            if hasattr(part, "__wrapped__") or not is_ours(file_of(part)):
                return False
        return not any(map(is_own, config.flags("").values()))

    def title(self) -> str:
        """Returns the name of the script's file. For one of ours the folder stands before it."""
        file = file_of(self.federate if self.config is Config else self.config)
        return str(Path(file).relative_to(ROOT)) if is_ours(file) else Path(file).name

    def own_files(self, config: Config) -> set[str]:
        """Returns the files of a user's own script, base and model. This project's do not count."""
        net = NETS.get(config.model, self.config)
        files = {*map(file_of, (self.federate, self.config, BASES[config.base], net))}
        return {file for file in files if file.endswith(".py") and not is_ours(file)}


@dataclasses.dataclass
class Command:
    """One command line of a script.

    swept   the options that have several values, without those that `sweep` leaves out
    folder  where its results are; it is chosen before training begins
    ranks   how many processes train one run together
    auto    what --device auto means; empty: a GPU, if one works
    """

    script: Script
    swept: Sequence[str] = ()
    folder: Path | None = None
    ranks: int = 1
    auto: str = ""

    def sweep(self, names: Sequence[str], configs: Sequence[Config]) -> None:
        """Notes the swept options. One of whose values is a user's function makes methods."""
        self.swept = []
        for name in names:
            is_of_methods = about_flag(self.script.config, name)["role"] == ""
            values = [getattr(config, name) for config in configs]
            if not (is_of_methods and any(map(is_own, values))):
                self.swept.append(name)

    def setting(self, config: Config, flags) -> str:
        """'alpha=0.05 base=fedprox': the swept ones of these options that are not compared."""
        words = []
        for name in self.swept:
            if name in flags and name not in self.script.compare:
                words.append(f"{name}={getattr(config, name)}")
        return " ".join(words) or NO_SETTING
