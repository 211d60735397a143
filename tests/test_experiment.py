"""The command line, runs on disk and processes, on a script whose rounds cost nothing: this file.

Nothing is trained: its federation is a real one, but a round is a keyed draw.
"""

import errno
import functools
import importlib
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import ClassVar
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import reliability
import torch
from ordinary import interrupted_at

import bases
import common
import data
import experiment
import fedavg_curriculum
import fedcl_fgn
import nets
from errors import NonFiniteError, UsageError
from experiment import figures, flag

ROOT = Path(experiment.__file__).parent.parent
SCRIPTS = [
    "fedavg_curriculum",
    "client_curriculum",
    "fedcl_fgn",
    "fedcl_gmm_sync",
    "fedac_art",
    "results.fedcl_fgn.selection",
    "results.fedavg_curriculum.exposure",
]


METHODS = ("a", "b", "late", "nan", "short")


def reads_pull(config) -> bool:
    return config.method != "b"


@dataclass
class Config(experiment.Config):
    """The flags of a script that trains nothing."""

    clients: int = 4
    clients_per_round: int = 2
    rounds: int = 4
    trials: int = 2
    batch_size: int = 8
    method: str = flag("a", "what is compared", sweep=("a", "b"), choices=METHODS)
    pull: float = flag(0.5, "a number", above=0, high=float("inf"), when=reads_pull)
    size: int = flag(3, "of the state", low=1, high=10**7)
    warm: bool = flag(True, "a switch")
    rule: str = flag("none", "FILE.py:FUNCTION")
    pause: float = flag(0.0, "seconds of a round, at 100 % of a core", low=0)
    fixed: bool = flag(False, "whether a round depends on how many there are")

    def federation(self, data, streams):
        return Federation(self, data, streams)

    def reads_rounds(self) -> bool:
        return self.fixed


class Federation(common.Federation):
    """Costs nothing to test."""

    def cost(self, update) -> dict:
        cost = {"samples": np.int64(10), "received_mb": 0.5, "sent_mb": 0.25}
        return cost | {"clock": 2.0, "waiting": 0.5}

    def test(self, state) -> dict:
        draw = state["history"][-1]
        return {"accuracy": 100 * draw, "loss": np.float64(draw)}


@dataclass
class Mixin:
    """Adds an option to any Config."""

    tint: int = flag(7, "a number", low=0)


def federate(config: Config, fl: Federation, run: experiment.Run) -> None:
    """Sums of keyed draws; a memory by client."""
    make = functools.partial(draw_expert, run)
    expert = run.cached("expert", make, "pull")
    if config.method == "late":
        assert len(run.other(method="a").load()["rows"]) == config.rounds
    dtype = getattr(torch, config.dtype)
    state = {"theta": torch.zeros(config.size, dtype=dtype), "base": {}, "history": []}
    state["early"] = 1
    for t in run.rounds(state):
        state.pop("early", None)
        if config.method == "short" and t == 3:
            break
        draw = float(run.streams("draw", t).random())
        if config.method == "nan" and t == 2 and run.trial == 1:
            raise NonFiniteError("round 3: the update of client 1 is not finite")
        state["theta"] += draw * config.pull * expert + (config.method == "b")
        state["base"][t % 3] = torch.full((2,), draw)
        state["history"].append(draw)
        time.sleep(config.pause)
        losses = np.array([1.5, np.nan])  # the second client took no local step
        steps = np.array([1, 0])
        update = types.SimpleNamespace(clients=[0, 1], train_loss=losses, steps=steps)
        run.record(t, state, update, own=t)


def draw_expert(run: experiment.Run) -> torch.Tensor:
    return torch.tensor([run.streams("expert").random()])


def replayed(config) -> dict:
    return {"method": "a"} if config.method == "late" else {}


PRESETS = {"two": "--alpha 0.5 5.0 --pull 0.25 --method a  # two alphas", "plain": "--rounds 3"}
DOC = "python test_experiment.py --method a b\n\nA test."


def main(argv=None, **hooks) -> None:
    fields = {"config": Config, "presets": PRESETS, "doc": DOC, "compare": ("method",)}
    fields |= {"federate": federate, "after": replayed} | hooks
    experiment.main(experiment.Script(**fields), argv)


@pytest.fixture
def work(tmp_path, monkeypatch):
    """An empty folder to work in, with a data set of 40 small images; figures are empty files."""
    monkeypatch.chdir(tmp_path)
    write_data()

    def draw(df, path, *_, **__):
        path.write_bytes(b"png")

    monkeypatch.setattr(figures, "plot", draw)
    data.read_data.cache_clear()
    return tmp_path


def write_data(name="tiny.npz", **changes) -> None:
    x = np.random.default_rng(0).integers(0, 256, (60, 16, 16, 1), dtype=np.uint8)
    y = np.arange(60) % 3
    arrays = {"x_train": x[:40], "y_train": y[:40], "x_test": x[40:], "y_test": y[40:]}
    np.savez(name, **arrays | changes)
    data.read_data.cache_clear()


SMALL = ["--dataset=tiny.npz", "--device=cpu", "--jobs=1"]


def start(*argv: str, **hooks) -> None:
    main([*SMALL, *argv], **hooks)


def refused(capsys, *argv: str, status: int = 2, **hooks) -> str:
    """The one line with which a command line ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        start(*argv, **hooks)
    shown = capsys.readouterr()
    assert stop.value.code == status, shown.err
    assert status == 3 or "results" not in shown.out
    lines = [line for line in shown.err.splitlines() if " rounds, " not in line]
    lines = [line for line in lines if not line.startswith(("--resume: in ", "runs go one "))]
    assert len(lines) == 1 and len(lines[0]) < 1000, shown.err
    assert "error: " in lines[0] or "stopped" in lines[0]
    return lines[0]


def table(folder) -> list[dict]:
    """metrics.csv without its seconds."""
    df = pd.read_csv(Path(folder) / "metrics.csv", keep_default_na=False, dtype=str)
    return df.drop(columns="seconds", errors="ignore").to_dict("records")


def checkpoints(folder, arm="") -> list[Path]:
    """Those of runs, of one arm or of all."""
    paths = sorted((Path(folder) / "checkpoints").glob(f"{arm}*.pt"))
    return [path for path in paths if not path.name.startswith("expert")]


def content(folder) -> dict:
    """Final states and rows, without seconds, to be compared bit for bit."""
    contents = {}
    for path in checkpoints(folder):
        saved = torch.load(path, weights_only=True)["content"]
        rows = [{**row, "seconds": 0} for row in saved["rows"]]
        contents[path.name] = repr((saved["state"], rows))
    return contents


def files(folder) -> dict:
    """Name and bytes of every file but locks."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: path.read_bytes() for path in paths}


# ------------------------------------------------------------------------------------------ flags

WRONG = """
--clients
--clients 1e400
--alpha 0.5 nan
--mu 1e39
--rounds 2 3
--pull nan
--pull -inf
--warm x
--model lenet
--no-such-flag
--client 3
stray
--preset three
--preset two stray
--jobs 1 2
--out a b
--dataset mnits
--dataset gone.npz
--model lstm
--model gone.py:Net
--clients 2000
--clients 20 --min-size 15
--parts 3
--clients 5 --clients-per-round 2 6
--partition natural
--hold-out 0.001
--method late
--out tiny.npz
"""
UNWRITABLE = ["--out tiny.npz/below", f"--out {'1' * 400}"]


@pytest.mark.parametrize("words", WRONG.strip().splitlines())
def test_a_wrong_flag_costs_one_line(words, work, capsys):
    before = files(work)
    refused(capsys, *words.split())
    assert files(work) == before


@pytest.mark.parametrize("words", UNWRITABLE)
def test_a_folder_that_cannot_be_written_costs_one_line(words, work, capsys):
    before = files(work)
    line = refused(capsys, *words.split(), status=5)
    assert "--resume" not in line  # nothing is there to go on with
    assert files(work) == before


def test_limits_say_what_is_wanted(work, capsys):
    line = refused(capsys, "--hold-out", "1")
    assert line == "error: --hold-out 1.0: choose a number of at most 0.99"
    assert "--lr 0.0: choose a number above 0" in refused(capsys, "--lr", "0")
    assert "--rounds 0: choose a whole number of at least 1" in refused(capsys, "--rounds", "0")
    assert "--rounds x: choose a whole number" in refused(capsys, "--rounds", "x")
    assert "--method x: choose one of a, b, late" in refused(capsys, "--method", "x")


def test_a_config_of_a_program_is_checked_as_the_command_line_is():
    Config().check()
    assert Config().method == "a"
    wrong = {"method": ("a", "b"), "lr": 0, "momentum": float("nan"), "rounds": 2.5, "clients": "5"}
    wrong |= {"mu": 1e39, "warm": 1, "alpha": [0.1], "epochs": True}
    for name, value in wrong.items():
        with pytest.raises(UsageError, match=f"--{name} .*: choose "):
            Config(**{name: value}).check()
    for wrong in ({"alpha": "0.1"}, {"rounds": "5"}, {"warm": "True"}):
        with pytest.raises(UsageError, match=", not text$"):
            Config(**wrong).check()
    Config(lr=np.float32(0.5), rounds=np.int64(5), alpha=1).check()


def parsed(*argv):
    return experiment.parse(Config, PRESETS, DOC, list(argv))


@dataclass
class Shaded(Config):
    shade: str = experiment.flag("grey", "a shade")


def test_a_config_that_is_not_declared_as_it_must_be_is_one_line():
    class Forgotten(Config):
        clients: int = 8

    class Untyped(Config):
        lr = 0.5

    @dataclass
    class Free(Config):
        limits: ClassVar[dict] = {}
        no_clients: float = experiment.flag(0.5, "a part")  # --no-x belongs to a switch x

    @dataclass
    class Faster(Config):
        lr: float = 0.5

    @dataclass
    class As(Config):
        lr: float = 0.01

    @dataclass
    class Equal(Shaded, As):
        pass

    @dataclass
    class Shaped(Config):
        shape: str = experiment.flag("round", "a shape")

    @dataclass
    class Both(Shaped, Faster):  # Python's Both.lr is 0.5, but its dataclass has Shaped's 0.01
        pass

    @dataclass
    class Named(Config):
        kind: tuple = experiment.flag((), "a kind")

    @dataclass
    class Bare(Config):
        beta: float = 0.5

    @dataclass
    class Mixed(Mixin, Config):
        size: int = 5

    class Small:
        clients = 8

    @dataclass
    class Later(Small, Config):
        pass

    @dataclass(slots=True)
    class Slots(Config):
        lr = 0.5

    @dataclass
    class Replaced(Small, Config):
        clients: int = 7

    for config, name in ((Forgotten, "clients"), (Untyped, "lr"), (Bare, "beta")):
        with pytest.raises(UsageError, match=f"^{config.__name__}.{name} is no option"):
            experiment.parse(config, {}, DOC, [])
    with pytest.raises(UsageError, match="^Small.clients is no option"):
        experiment.parse(Later, {}, DOC, [])
    for taken in ("preset", "check", "no_resume", "_x"):  # words of the command line, a method
        made = [(taken, str, experiment.flag("a", "a word"))]
        config = make_dataclass("Own", made, bases=(Config,))
        with pytest.raises(UsageError, match=f"^Own.{taken} is no option: choose another name"):
            experiment.parse(config, {}, DOC, [])
    for made in (field(default=5, init=False), field(default_factory=int)):
        config = make_dataclass("Own", [("clients", int, made)], bases=(Config,))
        with pytest.raises(UsageError, match="clients is no option"):
            experiment.parse(config, {}, DOC, [])
    for config in (Free, Equal):
        assert experiment.parse(config, {}, DOC, [])
    with pytest.raises(UsageError, match="^Faster.lr is no option: write .* in Both,"):
        experiment.parse(Both, {}, DOC, [])
    with pytest.raises(UsageError, match="^Named.kind has a tuple; wanted"):
        experiment.parse(Named, {}, DOC, [])
    with pytest.raises(UsageError, match="^Slots.* is no option: .* without slots=True$"):
        experiment.parse(Slots, {}, DOC, [])
    assert experiment.parse(Replaced, {}, DOC, ["--method", "a"])[0][0].clients == 7
    [config], _ = experiment.parse(Mixed, {}, DOC, ["--method", "a"])
    assert (config.size, config.tint) == (5, 7)


def test_an_option_of_1_and_of_one_point_zero_are_one_setting():
    assert repr(Config(lr=1).results_depend_on()) == repr(Config(lr=1.0).results_depend_on())


@pytest.mark.parametrize(
    ("words", "without_effect"),
    [
        ("--partition iid --alpha 0.5 --classes-per-client=3", ""),  # nor those of dealing
        ("--partition iid dirichlet --alpha 0.5 1 --method a b --pull 2", ""),
        ("--partition label-skew --classes-per-client 2 --no-warm --trials 1", ""),
        ("--base fedprox fedavg --mu 1 --method b --pull 2", "--pull"),
        ("--method b --pull 0.5 1", "--pull"),
        ("--mu 1 --server-lr=1 --preset two", ""),  # this file's federation may read them
        ("--preset two --method b --pull 0.5", ""),  # the default, in place of the preset's value
    ],
)
def test_an_option_without_effect_is_named(words, without_effect, work, capsys):
    start(*words.split(), "--out=made")
    lines = capsys.readouterr().out.splitlines()
    found = [line.partition(" has no effect")[0] for line in lines if "no effect" in line]
    assert found == without_effect.split()


def test_what_is_ones_own_may_read_options_that_ours_does_not(work):
    """Then --resume sees another value of it, and a sweep trains each."""
    start("--mu", "1", "2", "--method=a", "--trials=1", "--out=mine")  # this file's own `federate`
    assert {row["setting"] for row in table("mine")} == {"mu=1.0", "mu=2.0"}
    numbers = {"mu", "server_lr"}

    class Mine:
        """It inherits nothing."""

    def read(federate=fedcl_fgn.federate, config=fedcl_fgn.Config, **options) -> set[str]:
        script = experiment.Script(federate, ("method",))
        return {*script.results_depend_on(config(**options))}

    with mock.patch.dict(bases.BASES, mine=Mine):
        assert numbers <= read(base="mine")
    assert {*numbers, "p_double", "rounds"} <= read(federate)
    assert not {*numbers, "p_double", "rounds"} & read()
    assert experiment.Script(federate, ("base",)).title() == "test_experiment.py"
    with mock.patch.object(fedcl_fgn.Config, "federation", Config.federation):
        assert {"alpha", "p_double"} <= read(partition="iid")
    assert "alpha" in read(federate, partition="iid")
    assert "alpha" not in read(partition="iid")
    ordered = {"order": "mine.py:order", "partition": "iid"}
    read_by_order = read(config=fedavg_curriculum.Config, **ordered)
    assert {*numbers, "rounds", "alpha", "lr_power"} <= read_by_order
    wrapper = functools.wraps(fedcl_fgn.federate)(federate)
    assert {"alpha", "p_double"} <= read(wrapper, partition="iid")
    reliability.write_tiny(work)
    words = [*reliability.short_run("fedcl_fgn"), "--method=base", "--mu=1", "--partition=iid"]
    words += ["--alpha", "0.1", "1", "--classes-per-client=3", "--out=made"]
    status, output, _ = reliability.run_line("fedcl_fgn", words)
    found = [line.split()[0] for line in output.splitlines() if "has no effect: no run" in line]
    assert status == 0 and found == ["--alpha", "--classes-per-client", "--mu"]


def test_what_only_has_the_name_of_ours_is_not_deleted(work, capsys):
    start("--out=a", "--trials=1")
    for path in ("a/.results-2023/thesis", "a/checkpoints/thesis.tmp"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text("mine")
    start("--out=a", "--trials=2", "--resume")
    assert Path("a/.results-2023/thesis").exists() and Path("a/checkpoints/thesis.tmp").exists()
    for path in ("b/.results-20231128/thesis", "c/.code.json", "d/checkpoints", "e/.lock/thesis"):
        Path(path).parent.mkdir(parents=True)
        Path(path).write_text("{}")
        assert f"--out {path[0]}: holds files" in refused(capsys, f"--out={path[0]}")
        assert Path(path).read_text() == "{}"


def test_every_flag_takes_several_values():
    words = "--alpha 0.1 0.2 --base fedavg scaffold --seed 1 2 --clients 5 6 5"
    configs, swept = parsed(*words.split(), "--pull", "inf", "1")
    assert swept == ["alpha", "clients", "base", "seed", "method", "pull"]
    assert len(configs) == 2**6 == len({repr(config) for config in configs})
    assert {config.clients for config in configs} == {5, 6}
    assert {config.pull for config in configs} == {1.0, float("inf")}


def test_switches():
    assert [parsed(*words)[0][0].warm for words in ([], ["--warm"], ["--no-warm"])] == [1, 1, 0]
    assert parsed("--resume")[0][0].resume
    assert not parsed("--resume", "--no-resume")[0][0].resume


def test_a_preset_is_a_command_line_and_flags_beside_it_win(capsys):
    configs, swept = parsed("--preset", "two")
    assert [(c.alpha, c.pull, c.method) for c in configs] == [(0.5, 0.25, "a"), (5.0, 0.25, "a")]
    assert swept == ["alpha"]
    configs, swept = parsed("--alpha", "3", "--preset", "two", "--pull", "1", "--no-warm")
    assert [(c.alpha, c.pull, c.warm) for c in configs] == [(3.0, 1.0, False)] and not swept
    with pytest.raises(SystemExit) as stop:
        parsed("--list-presets")
    lines = capsys.readouterr().out.splitlines()
    assert stop.value.code == 0 and lines[0].partition(":")[0] == "# two"
    typed = shlex.split(lines[1], comments=True)
    assert typed[:2] == ["python", "test_experiment.py"]
    assert parsed(*typed[2:]) == parsed("--preset", "two")


def test_help_shows_defaults_and_fits(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and max(map(len, text.splitlines())) <= 100
    assert "--base" in text and all(base in text for base in bases.BASES)
    assert text.index("--pull") < text.index("--dataset")  # its own options come first
    assert "(default: 0.01)" in text and "--method" in text and "two" not in text.partition("\n")[0]


@pytest.mark.parametrize("name", SCRIPTS)
def test_presets_of_the_scripts_parse_and_can_be_typed(name, capsys):
    script = importlib.import_module(name)
    for words in script.PRESETS.values():
        flags = shlex.split(words, comments=True)
        configs, _ = experiment.parse(script.Config, script.PRESETS, script.__doc__, flags)
        assert configs
    with pytest.raises(SystemExit) as stop:
        script.main(["--list-presets"])
    lines = capsys.readouterr().out.splitlines()
    assert stop.value.code == 0 and len(lines) == 2 * len(script.PRESETS)
    program = f"python -m {name}" if "." in name else f"python {name}.py"
    assert all(line.startswith(f"{program} --") for line in lines[1::2])


SHARED = ["rounds", "clients", "clients_per_round", "epochs", "batch_size", "lr", "momentum"]
SHARED += ["weight_decay"]
CURRICULA = (100, 100, 10, 10, 10, 0.001, 0.9, 5e-4)
RESNET9 = (100, 100, 10, 10, 10, 0.01, 0.9, 0)
FGN = (200, 128, 16, 2, 16, 0.01, 0.9, 1e-5)
GMM = (200, 20, 10, 1, 32, 0.01, 0, 0)
FACES = (100, 25, 10, 1, 32, 0.01, 0, 0)
FEDAC = (100, 10, 10, 10, 64, 0.01, 0.9, 1e-5)
EVEN = {"partition": {"dirichlet-even"}}
BETAS = {0.05, 0.2, 0.9}
CONSTANTS = [  # as the papers, or else their code, state them: SHARED, then the preset's own
    ("fedavg_curriculum", "table1", CURRICULA, EVEN | {"alpha": BETAS, "lr_alpha": {0.001}}),
    ("fedavg_curriculum", "fig11", RESNET9, {"alpha": BETAS, "lr_power": {0}}),
    ("client_curriculum", "fig5", CURRICULA, EVEN | {"alpha": {0.05, 0.2}}),
    ("fedcl_fgn", "fig2", FGN, {"alpha": {0.1, 0.2, 0.3}, "mu": {0.01}, "delta": {0.01}}),
    ("fedcl_fgn", "fig6-vgg", FGN, {"alpha": {0.1, 0.2, 0.3}, "mu": {0.001}}),
    ("fedcl_fgn", "fig10", FGN, {"delta": {0, 0.01, 0.03, 0.05, 0.2, 0.35, 0.5}}),
    ("fedcl_fgn", "fig31", FGN, {"partition": {"natural"}}),
    ("fedcl_fgn", "fig47", FGN, {"p_double": {0.1, 0.3, 0.5, 0.7}, "p_halve": {0.3}}),
    ("fedcl_gmm_sync", "table1", GMM, {"v": {0.8}, "thresholds": {"0.9,0.6,0.3"}, "mu": {0.1}}),
    ("fedcl_gmm_sync", "table2-emnist", GMM, {"local_steps": {20, 40}, "data_share": {0.5}}),
    ("fedcl_gmm_sync", "table2-celeba-10", FACES, {"partition": {"natural"}}),
    ("fedac_art", "table2", FEDAC, {"alpha": {0.3, 0.5}}),
    ("fedac_art", "table2-cifar100", FEDAC, {"alpha": {0.3, 0.5}}),
    ("fedac_art", "table2-moon-cifar100", FEDAC, {"alpha": {0.3, 0.5}, "mu": {1}}),
]


@pytest.mark.parametrize(("name", "preset", "shared", "own"), CONSTANTS)
def test_presets_have_the_constants_of_the_papers(name, preset, shared, own):
    script = importlib.import_module(name)
    configs, _ = experiment.parse(script.Config, script.PRESETS, "", ["--preset", preset])
    wanted = {option: {value} for option, value in zip(SHARED, shared, strict=True)} | own
    for option, values in wanted.items():
        assert {getattr(config, option) for config in configs} == values, option


# ------------------------------------------------------------------------------------------- runs


def a_run(folder, arm="a", trial=0, federate=federate, **flags) -> experiment.Run:
    config = Config(method=arm, device="cpu", dataset="tiny.npz", **flags)
    script = experiment.Script(federate, ("method",), after=replayed)
    return experiment.Run(config, trial, experiment.Command(script, folder=Path(folder)))


def trained(run, progress=lambda *_: None) -> experiment.Run:
    experiment.train(run, progress)
    return run


@pytest.mark.parametrize("stop_at", [0, 1, 3])
def test_a_run_that_stops_goes_on_where_it_was(work, stop_at):
    whole = trained(a_run("whole"))
    with interrupted_at(stop_at), pytest.raises(KeyboardInterrupt):
        trained(a_run("cut"))
    again = trained(a_run("cut", resume=True))
    assert content("cut") == content("whole")
    assert [row["round"] for row in again.rows] == [1, 2, 3, 4]
    last = again.rows[-1]
    assert (last["uploads"], last["samples"], last["received_mb"]) == (8, 40, 2.0)
    assert {path.suffix for path in (work / "cut" / "checkpoints").iterdir()} == {".pt"}
    saved = whole.load()
    assert "early" not in saved["state"] and type(saved["rows"][0]["loss"]) is float


def test_a_run_of_other_length_resumes_as_if_it_had_always_had_it(work):
    """With a test in every third round, and in the last."""
    trained(a_run("longer", rounds=4, eval_every=3))
    trained(a_run("longer", rounds=6, eval_every=3, resume=True))
    trained(a_run("six", rounds=6, eval_every=3))
    assert content("longer") == content("six")

    with interrupted_at(2), pytest.raises(KeyboardInterrupt):
        trained(a_run("cut", rounds=6, eval_every=3))
    done = len(a_run("cut", rounds=6, eval_every=3).load()["rows"])
    with pytest.raises(UsageError, match=f"longer run; choose at least --rounds {done + 1}$"):
        trained(a_run("cut", rounds=done, eval_every=3, resume=True))
    trained(a_run("cut", rounds=4, eval_every=3, resume=True))
    trained(a_run("four", rounds=4, eval_every=3))
    assert content("cut") == content("four")


def an_update() -> types.SimpleNamespace:
    return types.SimpleNamespace(clients=[0], train_loss=np.ones(1), steps=np.ones(1))


def records(*shifts, times=1, is_copied=False, **columns):
    """A federate that records round t + shift, for each of the shifts, so many times."""

    def federate(config, fl, run):
        state = {"base": {}, "history": [0.5]}
        for t in run.rounds(state) if shifts else ():
            if is_copied:
                state = {**state, "history": [0.25]}
            for shift in shifts * times:
                run.record(t + shift, state, an_update(), **columns)

    return federate


WANTED = "wanted run.record(t, state, ..) with the t and state of run.rounds"


@pytest.mark.parametrize(
    ("federate", "line"),
    [
        (records(0, times=0), "round 1: call run.record once in every round"),
        (records(), "a trial 0: nothing was trained; wanted a loop over run.rounds"),
        (records(1), f"round 1: {WANTED}"),
        (records(0, times=2), f"round 2: {WANTED}"),
        (records(0, is_copied=True), f"round 1: {WANTED}"),  # a checkpoint would hold the first one
    ],
)
def test_each_round_is_recorded_once_and_as_it_is(federate, line, work):
    with pytest.raises(UsageError, match=f"^{re.escape(line)}$"):
        trained(a_run("r", federate=federate))


def test_a_column_in_place_of_a_tests_stays_when_more_rounds_follow(work):
    def federate(config, fl, run):
        state = {"base": {}, "history": [0.5]}
        for t in run.rounds(state):
            run.record(t, state, an_update(), accuracy=40.0 + t)

    for rounds in (3, 4):
        run = trained(a_run("r", federate=federate, rounds=rounds, eval_every=2, resume=rounds > 3))
    assert [row["accuracy"] for row in run.rows] == [40, 41, 42, 43]
    assert ["loss" in row for row in run.rows] == [False, True, False, True]


def test_weights_in_several_tensors_go_on(work):
    def federate(config, fl, run):
        state = {"theta": [torch.zeros(2), torch.zeros(3)], "history": [0.5]}
        for t in run.rounds(state):
            run.record(t, state, an_update(), accuracy=40.0)

    for rounds in (3, 4):
        run = trained(a_run("r", federate=federate, rounds=rounds, resume=rounds > 3))
    assert len(run.rows) == 4


def test_empty_arrays_are_a_state(work):
    def federate(config, fl, run):
        state = {"base": {}, "history": [0.5], "clients": np.array([], dtype=int)}
        for t in run.rounds(state):
            run.record(t, state, an_update())

    run = trained(a_run("r", federate=federate))
    assert run.load()["state"]["clients"].shape == (0,)


COLUMNS = {
    "seconds: choose another name": {"seconds": 1.0},
    "diverged: choose another name": {"diverged": 1},
    "^run.record: trial: choose another name$": {"trial": 7},
    "column uploads is inf; wanted a finite number": {"uploads": math.inf},
    "column accuracy is True; wanted a number": {"accuracy": True},
    "column own has shape .2,.; wanted one number": {"own": np.zeros(2)},
    "column uploads is 'many'; wanted a number": {"uploads": "many"},
    "column loss is None; wanted a number": {"loss": None},
}


@pytest.mark.parametrize("line", COLUMNS)
def test_a_column_that_cannot_be_is_one_line(line, work):
    with pytest.raises(UsageError, match=line):
        trained(a_run("r", federate=records(0, **COLUMNS[line])))


@pytest.mark.parametrize(
    "test, line",
    [
        ({"accuracy": 1.0, "samples": 3}, "samples: choose another name"),
        ({"accuracy": 1.0, "train_loss": 3.0}, "train_loss: choose another name"),
        ({"accuracy": 1.0, "seconds": 3.0}, "seconds: choose another name"),
        ({"loss": 1.0}, "no round has an accuracy"),
        ({"accuracy": math.nan}, "no round has an accuracy"),
    ],
)
def test_a_test_of_the_users_must_find_an_accuracy_and_no_column_of_ours(test, line, work):
    run = a_run("r")
    run.fl.test = lambda state: test
    with pytest.raises(UsageError, match=line):
        trained(run)


NOT_FINITE = f"round 1: the test loss is not finite; {common.ADVICE}"


@pytest.mark.parametrize(
    "test, columns, diverged",
    [
        ({"accuracy": 1.0, "loss": math.nan}, {"loss": 2.0}, NOT_FINITE),
        ({"accuracy": 1.0, "loss": 2.0}, {"loss": math.nan}, ""),
        (pd.Series({"accuracy": 1.0}), {"own": pd.Series([1.5])}, ""),
    ],
)
def test_a_test_that_is_not_finite_ends_a_run_and_no_column_does(test, columns, diverged, work):
    run = a_run("r", federate=records(0, **columns))
    run.fl.test = lambda state: test
    assert trained(run).diverged == diverged
    assert run.rows[0].get("own", 1.5) == 1.5


def test_a_script_may_test_by_itself_and_not_in_all_rounds(work):
    def federate(config, fl, run):
        state = {"base": {}, "history": [0.5]}
        for t in run.rounds(state):
            run.record(t, state, an_update(), **({"accuracy": 40.0} if t == 1 else {}))

    run = a_run("r", federate=federate)
    run.fl.test = lambda state: {}
    assert [row.get("accuracy") for row in trained(run).rows] == [None, 40, None, None]


def test_a_state_that_cannot_be_saved_is_named_whenever_it_comes(work):
    def federate_late(config, fl, run):
        state = {"theta": torch.zeros(2), "base": {}, "history": [0.5]}
        for t in run.rounds(state):
            if t == 2:
                state["where"] = Path("here")
            run.record(t, state, an_update())

    with pytest.raises(UsageError, match="Path cannot be saved for --resume"):
        trained(a_run("r", federate=federate_late))


def test_a_checkpoint_is_written_rarely_where_that_takes_long(work, monkeypatch):
    counts = []
    save = experiment.runs.save

    def noted(path, fingerprint, saved):
        if isinstance(saved, dict):
            counts.append(len(saved["rows"]))
        save(path, fingerprint, saved)

    monkeypatch.setattr(experiment.runs, "save", noted)
    clock = iter(range(10**6))
    monkeypatch.setattr(time, "perf_counter", clock.__next__)  # each reading is a second later
    trained(a_run("dear", rounds=50))
    assert counts[0] == 1 and counts[-1] == 50 and 6 <= len(counts) <= 10
    assert max(np.diff(counts)) <= 8  # a kill costs so many rounds of 50
    del counts[:]
    clock = {"now": 0.0}
    record = experiment.Run.record

    def slow(run, *args, **columns):
        clock["now"] += 1
        record(run, *args, **columns)

    monkeypatch.setattr(experiment.Run, "record", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: clock["now"])  # writing costs nothing
    trained(a_run("cheap", rounds=50))
    assert counts == [*range(1, 51)]


def test_a_finished_run_is_not_built_again(work, monkeypatch):
    whole = trained(a_run("r"))
    short = trained(a_run("r", "short"))
    assert len(short.rows) == 3
    monkeypatch.setattr(Config, "federation", lambda *_: 1 / 0)
    for arm, rounds in (("a", whole.rows), ("short", short.rows)):
        again = trained(a_run("r", arm, resume=True))
        assert again.rows == rounds and again.load()["rows"] == rounds


RUNS = [("a", {}), ("short", {}), ("nan", {"trial": 1})]


@pytest.mark.parametrize(("arm", "flags"), RUNS)
def test_progress_counts_every_round_once(work, arm, flags):
    for resume in (False, True):
        seen = []
        run = a_run("r", arm, resume=resume, **flags)
        experiment.train(run, lambda *news, seen=seen: seen.append(news))
        assert {name for name, _, _ in seen} == {str(run)} and seen[-1][1] == 4


def test_cached_is_made_once_for_what_it_depends_on(work, monkeypatch):
    calls = []
    own = Config.federation
    monkeypatch.setattr(Config, "federation", experiment.Config.federation)

    def make():
        calls.append(1)
        return torch.arange(3.0)

    first = a_run("r").cached("expert", make, "pull")
    other = a_run("r", "b", alpha=5.0, base="scaffold", rounds=9)
    assert torch.equal(first, other.cached("expert", make, "pull"))
    assert len(calls) == 1
    a_run("r", trial=1).cached("expert", make, "pull")
    a_run("r", lr=0.5).cached("expert", make, "pull")
    a_run("r", pull=0.25).cached("expert", make, "pull")
    assert len(calls) == 4
    a_run("r", hold_out=0.3).cached("expert", make, "pull")
    a_run("r", hold_out=0.3, alpha=5.0).cached("expert", make, "pull")
    assert len(calls) == 6  # who holds a sample decides whether it may be seen
    monkeypatch.setattr(Config, "federation", own)
    a_run("r").cached("expert", make, "pull")
    a_run("r", "b").cached("expert", make, "pull")
    a_run("r", alpha=5.0).cached("expert", make, "pull")
    assert len(calls) == 8  # it may read any option
    for path in (work / "r" / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UsageError, match="damaged"):
        a_run("r").cached("expert", make, "pull")


def tamper(path: Path, change) -> None:
    saved = torch.load(path, weights_only=True)
    change(saved)
    torch.save(saved, path)


def flip(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    at = whole.index(b"history")
    whole[at] ^= 1
    path.write_bytes(whole)


def grow(path: Path) -> None:
    """Text that gets another size after its array was made: NumPy would read beyond the array."""

    class Grown:
        def __reduce__(self):
            return np.dtype, (kind,), (3, "|", None, None, None, 1000, 1, 0)

    kind = np.dtype("S1")
    text = np.ndarray((4,), kind, b"text")
    tamper(path, lambda saved: saved["content"]["state"].update(text=[text, Grown()]))


def hold(content):
    """Replaces the content of a checkpoint, whose fingerprint and checksum stay right."""
    return lambda path: tamper(path, lambda saved: saved.update(content=content))


def change(**content):
    return lambda path: tamper(path, lambda saved: saved["content"].update(content))


def other_weights(saved: dict) -> None:
    """As if the run had been stopped after two rounds, with another model."""
    content = saved["content"]
    content.update(finished=0, rows=content["rows"][:2])
    content["state"].update(theta=torch.ones(1))


BAD = {
    "other weights": lambda path: tamper(path, other_weights),
    "an option that is none": lambda p: tamper(p, lambda s: s["fingerprint"].update(lr=[0.1])),
    "text of another size": grow,
    "a number": hold(5),
    "no state": hold({"rows": [], "finished": 0, "diverged": "", "last_test": []}),
    "nothing": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-30]),
    "a flipped bit": flip,
    "other content": lambda path: torch.save({"other": 1}, path),
    "a list": lambda path: torch.save([1, 2], path),
    "no fingerprint": lambda path: tamper(path, lambda saved: saved.pop("fingerprint")),
    "another arm": lambda path: shutil.copy(checkpoints("r", "b")[0], path),
    "another trial": lambda path: shutil.copy(*Path("r/checkpoints").glob("a-*-trial1.pt"), path),
    "another torch": lambda path: tamper(path, lambda s: s["fingerprint"].update(torch="1.0")),
    "a torch unknown": lambda path: tamper(path, lambda s: s["fingerprint"].pop("torch")),
}


def test_a_home_that_the_shell_left_as_it_is_becomes_a_folder(work, monkeypatch):
    """bash does so in --out=~/r, where pandas and pathlib then disagree."""
    monkeypatch.setenv("HOME", str(work / "home"))
    start("--out=~/r")
    assert (work / "home" / "r" / "metrics.csv").exists()
    assert not (work / "~").exists()


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_checkpoint_is_one_line_and_left_alone(bad, work):
    for arm, trial in (("a", 0), ("a", 1), ("b", 0)):
        path = trained(a_run("r", arm, trial)).path
    path = a_run("r").path
    BAD[bad](path)
    before = files("r")
    with pytest.raises(UsageError, match=re.escape(path.name)):
        trained(a_run("r", resume=True))
    assert files("r") == before


def test_a_checkpoint_that_does_not_fit_into_memory_is_not_called_damaged(work, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")

    run = trained(a_run("r"))
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(RuntimeError, match="allocate memory"):
        run.load()


def test_a_checkpoint_takes_the_place_of_no_other_attribute(work):
    """A run takes its rows and its state from a file, and nothing else."""
    run = trained(a_run("r"))
    change(trial=7, script=None)(run.path)
    again = trained(a_run("r", resume=True))
    assert again.trial == 0 and again.script.federate is federate and again.rows == run.rows


def test_two_containers_of_one_process_number_write_one_file(work, monkeypatch):
    """One of them begins to write while the other has not yet ended."""
    run = a_run("r")
    fsync, inner = os.fsync, [1]

    def slow(file):
        if inner:
            inner.pop()
            run.cached("expert", lambda: torch.ones(3))
        fsync(file)

    monkeypatch.setattr(os, "fsync", slow)
    assert run.cached("expert", lambda: torch.ones(3)).tolist() == [1, 1, 1]
    assert len([*run.path.parent.iterdir()]) == 1


def test_text_of_numpy_is_no_state(work):
    """Its types are not safe to read. A list keeps text, too."""

    def keeping(names):
        def federate(config, fl, run):
            state = {"base": {}, "history": [0.5], "names": names}
            for t in run.rounds(state):
                run.record(t, state, an_update())

        return federate

    for names in (np.array(["one", "two"]), np.array([b"one"]), np.str_("one")):
        with pytest.raises(UsageError, match="cannot be saved for --resume: .*text in lists"):
            trained(a_run("r", federate=keeping(names)))
    assert trained(a_run("r", federate=keeping(["one"]))).load()["state"]["names"] == ["one"]


def test_a_checkpoint_that_would_run_code_is_refused(work):
    class Evil:
        def __reduce__(self):
            return (open, (str(work / "evil"), "w"))

    run = trained(a_run("r"))
    torch.save(Evil(), run.path)
    with pytest.raises(UsageError, match="damaged"):
        run.load()
    assert not (work / "evil").exists()
    with pytest.raises(UsageError, match="b trial 0 was not trained"):
        a_run("r", "b").load()


def test_names_of_runs_become_files_without_clashes():
    flags = [{}, {"alpha": 0.5}, {"dataset": "/e"}, {"dataset": "-e"}, {"dataset": "e" * 300}]

    def file(method="a", **options) -> str:
        script = experiment.Script(federate, ("method",), name=lambda config: method)
        return experiment.Run(Config(**options), 0, experiment.Command(script)).file

    names = set()
    for method in ("a", "b/c", "b-c", "x" * 300):
        names |= {file(method, **changes) for changes in flags}
    assert len(names) == 20 and all(len(name) < 200 for name in names)
    same = {"jobs": 2, "trials": 9, "out": "x", "resume": True, "rounds": 9, "data_dir": "y"}
    assert file(**same) == file()  # what changes no result
    assert file(fixed=True, rounds=4) != file(fixed=True, rounds=9)


# -------------------------------------------------------------------------- a command's results


def test_results_of_a_command(work, capsys):
    start("--out=r", "--eval-every=3")
    printed = capsys.readouterr().out
    rows = table("r")
    keys = [(r["method"], r["trial"], r["round"]) for r in rows]
    assert keys == [(m, k, t) for m in "ab" for k in "01" for t in "1234"]
    assert [r["accuracy"] == "" for r in rows] == [True, True, False, False] * 4
    last = {"clients": "2", "uploads": "8", "samples": "40", "sent_mb": "1.0", "own": "3"}
    assert rows[3].items() >= last.items() and rows[3]["train_loss"] == "1.5"
    summary = json.loads(Path("r/summary.json").read_text())
    assert summary["command"] == "test_experiment --dataset=tiny.npz --device=cpu --jobs=1 " + (
        "--out=r --eval-every=3"
    )
    assert summary["ranks"] == 1 and summary["config"]["b"]["method"] == "b"
    assert summary["began"].startswith("20") and summary["hours"] >= 0 and "commit" in summary
    drawn = {"differences.png", "accuracy.png", "partition.png"}
    written = {str(path) for path in Path("r").glob("*.*")}
    assert {f"r/{name}" for name in drawn | {"table.csv", "partition.csv"}} <= written
    assert len(checkpoints("r")) == 4
    assert "tiny.npz, alpha 0.1, lenet5, 2 trials, accuracy in %" in printed
    assert (
        "a - b, final: +0.00 [+0.00, +0.00], p 1: undecided\n" in printed
        and "results: r\n" in printed
    )


def test_partition_csv_is_what_the_first_trial_trains_on(work):
    start("--out=r", "--alpha", "0.1", "100")
    rows = pd.read_csv("r/partition.csv")
    assert rows.groupby("setting").samples.sum().to_dict() == {"alpha=0.1": 40, "alpha=100.0": 40}
    config = Config(dataset="tiny.npz", alpha=100.0)
    fl = config.federation(data.load_data("tiny.npz"), common.Streams(config.seed, 0))
    own = rows[(rows.setting == "alpha=100.0") & (rows.client == 2)]
    expected = pd.Series(fl.labels[fl.shards[2]]).value_counts().to_dict()
    assert dict(zip(own["class"], own.samples, strict=True)) == expected


def test_an_arm_that_does_not_read_a_swept_flag_is_trained_once_and_shown_everywhere(work):
    start("--out=r", "--pull", "0.1", "0.9", "--trials=1")
    assert len(checkpoints("r", "a")) == 2 and len(checkpoints("r", "b")) == 1
    rows = table("r")
    settings = [(row["setting"], row["method"]) for row in rows[::4]]
    assert settings == [(f"pull={x}", m) for x in (0.1, 0.9) for m in "ab"]
    assert [r["accuracy"] for r in rows[4:8]] == [r["accuracy"] for r in rows[12:]]
    start("--out=r", "--pull", "0.9", "0.1", "--trials=1", "--resume")


def test_a_misspelt_name_in_compare_is_one_line(work, capsys):
    assert "compare: m is no option" in refused(capsys, compare=("method")[:1])


def test_two_arms_of_one_name_are_refused(work, capsys):
    line = refused(capsys, "--out=r", name=lambda config: "same")
    assert "two methods of different options are both called same" in line


def test_an_arm_that_reads_another_ones_rows_comes_last(work, capsys):
    start("--out=r", "--method", "late", "a")
    assert [r["method"] for r in table("r")[::8]] == ["late", "a"]
    line = refused(capsys, "--out=s", "--method", "late", "b")
    assert "late trial 0 needs a trial 0: add its method" in line and not Path("s").exists()


def test_a_changed_default_keeps_what_is_known_of_a_flag():
    """A study's Config changes one of its script's, which had changed one of Config."""

    @dataclass
    class Deeper(Config):
        size: int = 4
        clients: int = 7

    @dataclass
    class Study(Deeper):
        size: int = 5

    assert experiment.about_flag(Study, "size") == experiment.about_flag(Config, "size")
    assert experiment.about_flag(Study, "size")["low"] == 1
    configs, _ = experiment.parse(Study, {}, DOC, [])
    assert {(config.size, config.clients) for config in configs} == {(5, 7)}
    with pytest.raises(UsageError, match="at least 1"):
        experiment.parse(Study, {}, DOC, ["--size", "0"])


def test_order_tests_and_jobs_change_no_bit(work):
    start("--out=one")
    start("--out=order", "--method", "b", "a", "--eval-every=3")
    for arm in "ab":
        for trial in (0, 1):
            states = []
            for folder in ("one", "order"):
                [path] = [p for p in checkpoints(folder, arm) if f"trial{trial}" in p.name]
                states.append(repr(torch.load(path)["content"]["state"]))
            assert states[0] == states[1]
    start("--out=jobs", "--jobs=2", f"--dataset={work / 'tiny.npz'}")
    assert sorted(content("jobs").values()) == sorted(content("one").values())
    assert table("jobs") == table("one")


def test_scripts_draw_and_find_the_states(work):
    seen = []

    def draw(settings, folder):
        for setting, runs in settings.items():
            seen.append((setting, [len(run.load()["state"]["history"]) for run in runs], folder))

    start("--out=r", plot=lambda df, folder: seen.append(len(df)), draw=draw)
    assert [seen[0], seen[1][:2]] == [16, ("-", [4, 4, 4, 4])]


# ------------------------------------------------------------------------------ folders, --resume


def test_each_command_has_a_folder_of_its_own(work, capsys):
    start("--method=a")
    start("--method=b")
    top = work / "runs" / "test_experiment"
    assert {path.name for path in top.iterdir()} == {"001", "002"}
    before = files(top / "001")
    capsys.readouterr()
    start("--method=b", "--trials=3", "--resume")
    assert "--resume: in runs/test_experiment/002" in capsys.readouterr().err
    assert len(table(top / "002")) == 12 and files(top / "001") == before
    (top / "notes").mkdir()
    start("--method=a")
    assert len(table(top / "003")) == 8
    (top / "003").rename(top / "999")
    start("--method=a")
    start("--method=a", "--trials=3", "--resume")
    assert len(table(top / "1000")) == 12


def test_results_are_not_deleted_unasked(work, capsys):
    start("--out=r")
    before = files("r")
    for more in (["--rounds=2"], ["--method=a"], []):
        assert "r: holds results; --resume continues" in refused(capsys, "--out=r", *more)
    line = refused(capsys, "--out=r", "--rounds=2", "--resume")
    assert "choose at least --rounds 4" in line
    assert files("r") == before


def test_results_without_checkpoints_are_not_resumed(work, capsys):
    """They would be replaced by those of any other command."""
    start()
    shutil.rmtree("runs/test_experiment/001/checkpoints")
    before = files("runs")
    for words in (["--out=runs/test_experiment/001"], []):
        assert "no checkpoint" in refused(capsys, *words, "--seed=3", "--resume")
    assert files("runs") == before


@pytest.mark.parametrize("more", [[], ["--resume"]])
@pytest.mark.parametrize("name", ["summary.png", "table.csv", ".notes", "folder/mine.txt"])
def test_a_folder_with_files_of_the_users_is_refused(name, more, work, capsys):
    """Before anything else is read."""
    path = work / "r" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    before = files(work)
    assert "--out r: " in refused(capsys, "--out=r", "--dataset=gone.npz", *more)
    assert files(work) == before


def test_a_folder_whose_name_is_no_text_is_refused_at_the_beginning(work, capsys):
    """Bytes that are not UTF-8, or a letter that the locale does not know."""
    line = refused(capsys, "--out=r\udcff", "--dataset=gone.npz")
    assert line.startswith("error: --out 'r\\udcff': ") and not os.path.lexists("r\udcff")


def test_the_checksums_of_our_code_are_written_as_other_files_are(work, capsys):
    """In place of a link, and not through it. What nobody can read is begun again."""
    start("--out=r", "--trials=1")
    Path("mine").write_text("mine")
    Path("r/.code.json").unlink()
    Path("r/.code.json").symlink_to(work / "mine")
    start("--out=r", "--trials=1", "--resume")
    assert Path("mine").read_text() == "mine" and not Path("r/.code.json").is_symlink()
    for text in ("[" * 10**6, '{"common.py": ["x"]}', '{"common.py": 1e400}'):
        Path("r/.code.json").write_text(text)
        start("--out=r", "--trials=1", "--resume")
        assert "common.py" in json.loads(Path("r/.code.json").read_text())


def test_a_link_that_leads_nowhere_is_no_folder(work, capsys):
    Path("r").symlink_to("nowhere")
    assert "--out r: " in refused(capsys, "--out=r") and Path("r").is_symlink()


def test_only_a_folder_with_this_scripts_runs_is_resumed(work, capsys):
    assert "r: nothing to resume" in refused(capsys, "--out=r", "--resume")
    assert not Path("r").exists()
    Path(f"r/.results-{'0' * 32}half").mkdir(parents=True)  # a kill before the first checkpoint
    start("--out=r", "--resume")
    shutil.copytree("r/checkpoints", "s/checkpoints")
    for folder, owner in (("r", "test_experiment.py"), ("s", "an unknown script")):
        before = files(folder)
        small = [*SMALL, "--clients=4", "--clients-per-round=2", f"--out={folder}", "--resume"]
        with pytest.raises(SystemExit) as stop:
            fedcl_fgn.main(small)
        line = capsys.readouterr().err.splitlines()[-1]
        assert stop.value.code == 2 and f"holds runs of {owner}, not fedcl_fgn.py" in line
        assert files(folder) == before
    start("--out=s", "--resume")  # its own runs are there
    start("--out=s", "--method", "short", "--resume")
    start("--out=s", "--resume")
    assert table("s") == table("r")


def test_a_resumed_sweep_leaves_no_figure_of_the_one_before(work, monkeypatch):
    """Two arms have a difference, one has none."""
    monkeypatch.setattr(figures, "plot", lambda df, path, *_, **__: path.write_bytes(b"png"))
    start("--out=r", "--method", "a", "b")
    (work / "r" / "mine.png").write_text("mine")
    assert (work / "r" / "differences.png").exists()
    start("--out=r", "--method=a", "--resume")
    assert not (work / "r" / "differences.png").exists()
    assert (work / "r" / "accuracy.png").exists() and (work / "r" / "mine.png").exists()


def test_no_summary_of_the_command_before_is_left_where_figures_fail(work, monkeypatch, capsys):
    """It says that all other files are there."""
    start("--out=r", "--trials=1")

    def fill_disk(*args, **options):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(figures, "plot", fill_disk)
    with pytest.raises(SystemExit):
        start("--out=r", "--resume")
    assert len(table("r")) == 16
    left = {path.name for path in Path("r").iterdir()} - {".lock", ".code.json"}
    assert left == {"metrics.csv", "table.csv", "checkpoints"}


def test_what_lies_elsewhere_stays_whatever_a_summary_says(work):
    def plot(df, folder):
        (folder / "own").mkdir(exist_ok=True)
        (folder / "own/plot").write_text("text")
        (folder / "plot").write_text("text")

    start("--out=r", "--trials=1", plot=plot)
    Path("kept").write_text("the user's")
    Path("r/own/kept").write_text("the user's")
    Path("r/plot").unlink()
    Path("r/plot").symlink_to(work / "kept")
    summary = json.loads(Path("r/summary.json").read_text())
    assert {"plot", "own/plot"} <= {*summary["files"]}
    summary["files"] += ["../kept", str(work / "kept"), "own", "own/kept", "checkpoints"]
    Path("r/summary.json").write_text(json.dumps(summary))
    start("--out=r", "--trials=1", "--resume")
    assert Path("kept").exists() and Path("r/own/kept").exists() and not Path("r/plot").exists()
    Path("r/summary.json").write_text('{"files": 5}')
    start("--out=r", "--trials=1", "--resume", plot=plot)
    assert Path("r/own/plot").exists() and Path("r/plot").exists()


def test_resume_names_a_changed_flag_with_both_values(work, capsys):
    start("--out=r", "--alpha=0.5")
    before = table("r")
    changes = {
        "--lr=0.5": "lr 0.01, not 0.5",
        "--dtype=float64": "dtype float32, not float64",
        "--pull=0.1": "pull 0.5, not 0.1",
        "--threads=2": "threads 1, not 2",
        "--no-warm": "warm True, not False",
    }
    for words, said in changes.items():
        assert said in refused(capsys, "--out=r", "--alpha=0.5", "--resume", words)
    start("--out=r", "--alpha=0.5", "--resume", "--jobs=2", "--trials=3")
    assert [r for r in table("r") if r["trial"] != "2"] == before and len(table("r")) == 24


def test_a_resumed_sweep_may_be_wider_or_narrower(work, capsys):
    def times():
        return {path.name: path.stat().st_mtime_ns for path in checkpoints("r")}

    def swept(*alphas, more=("--resume",)):
        start("--out=r", "--alpha", *alphas, "--size", "3", "4", *more)

    swept("0.5", more=())
    before, narrow = times(), table("r")
    swept("0.5", "5.0")
    wide = table("r")
    assert {name: times()[name] for name in before} == before and len(times()) == 16
    settings = {f"alpha={a} size={s}" for a in (0.5, 5.0) for s in (3, 4)}
    assert {row["setting"] for row in wide} == settings and len(wide) == 2 * len(narrow)
    before = times()
    swept("5.0")
    assert times() == before and len(table("r")) == len(narrow)
    swept("0.5")  # the other value is still there
    assert times() == before and table("r") == narrow
    line = refused(capsys, "--out=r", "--alpha", "0.1", "50", "--size", "3", "4", "--resume")
    assert re.search(r"alpha (0.5|5.0), not 0.1\)", line)
    swept("5.0", "0.5")
    assert times() == before


def test_two_commands_in_one_folder(work, capsys):
    start("--out=r")
    before = files("r")
    with experiment.disk.locked(Path("r")):
        assert "another command works there" in refused(capsys, "--out=r", "--resume")
    assert files("r") == before
    start("--out=r", "--resume")  # the lock is gone with its holder


@pytest.mark.parametrize("name", ["checkpoints", "metrics.csv", "summary.json"])
def test_a_file_where_a_folder_belongs_and_the_other_way_round(name, work, capsys):
    path = work / "r" / name
    path.parent.mkdir()
    if name == "checkpoints":
        path.write_text("x")
    else:
        path.mkdir()
    for more in ([], ["--resume"]):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            start("--out=r", *more)
        assert stop.value.code in (2, 5)
        assert capsys.readouterr().err.count("error: ") == 1


def test_what_was_trained_on_other_data_is_not_resumed(work, capsys):
    owner = np.arange(40) % 5
    write_data(owner=owner)
    start("--out=r", "--method=a")
    arrays = dict(np.load("tiny.npz"))
    for name, array in arrays.items():
        write_data(**{"owner": owner, name: array[::-1].copy()})
        assert "another run's (data " in refused(capsys, "--out=r", "--method=a", "--resume")
    write_data(owner=owner)
    start("--out=r", "--method", "a", "b", "--resume")


OWN = {  # the user's file of a rule with a neighbour, a script, a base and a model
    "mine.py": "import beside\ndef rule(): return beside.x\n",
    "beside.py": "x = 1\n",
    "own_script.py": "import test_experiment\ndef federate(*a): test_experiment.federate(*a)\n",
    "own_base/__init__.py": "import bases\nclass Base(bases.FedAvg): pass\n",
    "own_model/__init__.py": "import nets\ndef model(*a, **how): return nets.lenet5(*a, **how)\n",
}


@pytest.mark.parametrize("edited", OWN)
def test_an_edited_file_of_the_users_is_not_resumed(edited, work, capsys, monkeypatch):
    """Their program has registered the base and the model. The model is a partial."""
    monkeypatch.syspath_prepend(work)
    for name, text in OWN.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    for name in ("own_script", "own_base", "own_model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    model = functools.partial(importlib.import_module("own_model").model)
    monkeypatch.setitem(bases.BASES, "fedavg", importlib.import_module("own_base").Base)
    monkeypatch.setitem(nets.NETS, "lenet5", model)
    hooks = {"federate": importlib.import_module("own_script").federate}
    flags = ["--out=r", "--rule=mine.py:rule", "--trials=1"]
    start(*flags, **hooks)
    start(*flags, "--resume", **hooks)
    Path(edited).write_text(OWN[edited] + "# edited\n")
    line = refused(capsys, *flags, "--resume", **hooks)
    whose = Path(edited).name if "own" in edited else "of --rule"
    assert f"another run's (the file {whose}, or one that it imports, was edited)" in line


def test_an_edit_of_our_code_is_said_when_a_run_goes_on(tmp_path):
    """Rounds of two algorithms in one run may be meant, but must be known."""
    top = Path(common.__file__).parent
    for path in [*top.glob("*.py"), top / "experiment"]:
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, tmp_path / path.name)

    def said(*words) -> str:
        words = ["fedcl_fgn.py", "--trials=2", "--method=base", "--out=r", "--jobs=1", *words]
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "edited" not in said("--rounds=1")
    (tmp_path / "experiment/report.py").open("a").write("# edited\n")
    text = (tmp_path / "bases.py").read_text()
    (tmp_path / "bases.py").write_text(text + "# edited\n")
    shown = said("--rounds=2", "--resume", "--jobs=2")
    assert re.findall(".*edited.*", shown) == ["bases.py: edited since these runs began"]
    (tmp_path / "bases.py").write_text(text)  # round 2 is still of the other one
    assert "bases.py: edited since" in said("--rounds=3", "--resume")


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_edit_of_our_scripts_leaves_their_runs_resumable(name, work, monkeypatch):
    """A fingerprint of version 0.2.0 had these names, and the options."""
    monkeypatch.setattr(experiment, "main", lambda script, argv: scripts.append(script))
    scripts = []
    module = importlib.import_module(name)
    module.main([])
    config = module.Config(dataset="tiny.npz", device="cpu")
    wanted = {"torch", "numpy", "state", "device", "ranks", "data"}
    run = experiment.Run(config, 0, experiment.Command(scripts[0]))
    assert run.environment.keys() == wanted


def test_a_rewritten_file_is_read_again_in_the_same_process(work):
    start("--out=before", "--method=a", "--trials=1")
    y = np.repeat([0, 1, 2], 20)
    x = np.zeros((60, 16, 16, 1), np.uint8)
    np.savez("tiny.npz", x_train=x[::2], y_train=y[::2], x_test=x[1::2], y_test=y[1::2])
    start("--out=after", "--method=a", "--trials=1")
    held = [pd.read_csv(f"{out}/partition.csv").samples.sum() for out in ("before", "after")]
    assert held == [40, 30]


# ---------------------------------------------------------------------- what goes wrong, and right


PRIMITIVE = """
from torch import nn

class Net(nn.Linear):
    def __init__(self, channels, side, classes):
        super().__init__(channels * side * side, classes)
    def forward(self, x):
        if self.training and len(x) > 2:
            raise RuntimeError("could not create a primitive")  # what oneDNN says
        return super().forward(x.flatten(1))
"""


def test_too_little_memory_is_one_line_that_names_what_helps(work, capsys):
    def large(config, fl, run):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 48 GiB")

    line = refused(capsys, "--out=r", status=5, federate=large)
    assert "out of memory" in line and "--chunk 1" in line and "--batch-size" in line
    refused(capsys, "--out=s", status=5, federate=lambda *_: bytearray(10**18))

    def one_round(config, fl, run):
        fl.train(fl.start(), 0, fl.everyone, fl.batches(0, fl.everyone, epochs=1))

    Path("own.py").write_text(PRIMITIVE)
    line = refused(capsys, "--out=t", "--model=own.py:Net", status=5, federate=one_round)
    assert "out of memory" in line and "own.py" not in line


@pytest.mark.parametrize("error", ["torch.OutOfMemoryError", "torch.AcceleratorError"])
def test_a_fault_of_a_gpu_is_none_of_the_model_or_the_data(work, capsys, monkeypatch, error):
    Path("big.py").write_text(f"import torch\ndef net(*sizes):\n    raise {error}('lack')\n")
    assert "--model" not in refused(capsys, "--out=r", "--model=big.py:net", status=5)

    def fails(*_, **__):
        raise eval(error)("lack")

    monkeypatch.setattr(data, "from_arrays", fails)
    data.read_data.cache_clear()
    assert "--dataset" not in refused(capsys, "--out=r", status=5)


def test_tracking_gets_every_new_row_once_and_may_fail(work, capsys):
    seen = []

    def track(run, row):
        seen.append((run.method, row["round"]))
        if run.method == "b" and row["round"] == 2:
            raise ConnectionError("no server")

    start("--out=r", "--trials=1", track=track)
    assert seen == [("a", t) for t in (1, 2, 3, 4)] + [("b", 1), ("b", 2)]
    said = "b trial 0: the run is no longer tracked (ConnectionError: no server)"
    assert capsys.readouterr().err.count(said) == 1 and len(table("r")) == 8
    start("--out=r", "--trials=1", "--rounds=5", "--resume", track=track)
    assert seen[6:] == [("a", 5), ("b", 5)]


@pytest.mark.parametrize("jobs", ["--jobs=1", "--jobs=2"])
def test_a_run_that_diverges_leaves_an_empty_cell(work, capsys, jobs):
    drawn = []
    flags = ["--out=r", "--method", "nan", "a", jobs]
    hooks = {"plot": lambda df, folder: drawn.append(df)}
    if jobs == "--jobs=2":
        hooks = {}  # a lambda cannot be sent to another process
    line = refused(capsys, *flags, status=3, **hooks)
    said = "1 of 4 runs diverged, their cells are empty (nan trial 1: round 3: the update of "
    assert said in line and "client 1" in line
    rows = table("r")
    assert len(rows) == 15 and Path("r/accuracy.png").exists()
    last = [row for row in rows if row["diverged"]]
    assert [(r["method"], r["trial"], r["round"]) for r in last] == [("nan", "1", "3")]
    results = json.loads(Path("r/summary.json").read_text())["results"]
    finals = {(run["method"], run["trial"]): run["final"] for run in results}
    assert finals["nan", 1] is None and finals["nan", 0] > 0
    for df in drawn:
        assert len(df) == 12
    before = {path: path.stat().st_mtime_ns for path in checkpoints("r")}
    refused(capsys, *flags, "--resume", status=3, **hooks)
    assert {path: path.stat().st_mtime_ns for path in checkpoints("r")} == before
    assert table("r") == rows


def test_summary_json_is_json(work, capsys):
    """Which knows no infinity. A word of the command line stands for it."""

    def refuse(word):
        raise ValueError(word)

    start("--out=r", "--pull=inf", "--trials=1", "--method", "b", "a")
    assert "lenet5, 1 trial," in capsys.readouterr().out
    summary = json.loads(Path("r/summary.json").read_text(), parse_constant=refuse)
    assert float(summary["config"]["a"]["pull"]) == float("inf")


def test_what_reads_a_diverged_run_diverges_too(work):
    run = trained(a_run("r", "nan", trial=1))
    with pytest.raises(NonFiniteError, match="nan trial 1: round 3"):
        run.load()


def test_all_runs_diverge(work, capsys):
    def never(config, fl, run):
        raise NonFiniteError("the expert, trained centrally, is not finite")

    line = refused(capsys, "--out=r", status=3, federate=never)
    assert "4 of 4 runs diverged" in line and "a trial 0: the expert" in line
    assert len(table("r")) == 4


def test_a_full_disk_is_one_line_and_resume_is_exact(work, capsys, monkeypatch):
    start("--out=whole")
    fsync, left = os.fsync, [9]

    def full(file):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        line = refused(capsys, "--out=r", status=5)
    assert "No space left on device" in line and line.endswith("; --resume continues in r")
    start("--out=r", "--resume")
    assert content("r") == content("whole") and table("r") == table("whole")


def test_signals_are_restored(work):
    def mine(*_):
        raise AssertionError("not called")

    before = signal.signal(signal.SIGTERM, mine)
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        start("--out=r", "--method=a", "--trials=1")
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGTERM, before)


def test_progress_without_a_terminal_is_a_line_every_tenth(capsys):
    progress = experiment.terminal.Progress(40)
    for t in range(1, 41):
        progress("a trial 1", t, float(t) if t > 4 else float("nan"))
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "4 of 40 rounds, a trial 1"
    assert lines == [
        f"{t} of 40 rounds, a trial 1, round {t}: accuracy {t:.1f}" for t in range(8, 41, 4)
    ]


def test_progress_in_a_terminal_is_a_bar_with_the_last_accuracy(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress = experiment.terminal.Progress(40)
    progress("a trial 1", 30, 12.34)
    progress.bar.refresh()
    shown = capsys.readouterr().err
    assert "30/40" in shown and "accuracy 12.3" in shown and "of 40 rounds" not in shown


# ---------------------------------------------------------------------------------- as a process


def process(folder, *argv: str, script=(sys.executable, __file__), **options) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [*script, *SMALL, *argv]
    return subprocess.Popen(command, cwd=folder, env=environment, **options)


def wait_for(condition, seconds=120):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def family(session: int) -> list[int]:
    """The processes of a session that are alive."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def started(folder, *argv: str, **options) -> subprocess.Popen:
    """A long command that has written a checkpoint of both arms."""
    long = ["--rounds=60", "--pause=0.05", "--trials=1", "--out=r", *argv]
    running = process(folder, *long, start_new_session=True, **options)
    wanted = 2 if "--jobs=2" in argv else 1
    wait_for(lambda: len(checkpoints("r")) >= wanted or running.poll() is not None)
    return running


@pytest.mark.parametrize(
    ("sent", "status", "jobs"), [(signal.SIGINT, 130, 1), (signal.SIGTERM, 143, 2)]
)
def test_a_signal_keeps_the_rounds_and_resume_is_exact(work, sent, status, jobs):
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # in the background
    running = started(work, f"--jobs={jobs}", preexec_fn=heard)
    running.send_signal(sent)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == status and "Traceback" not in errors, errors
    assert errors.splitlines()[-1] == "stopped; --resume continues in r"
    assert not (work / "r" / "metrics.csv").exists()
    wait_for(lambda: family(running.pid) == [], 5)
    start("--rounds=60", "--pause=0.05", "--trials=1", "--out=r", "--resume")
    start("--rounds=60", "--trials=1", "--out=whole")
    assert table("r") == table("whole")


def libraries_numbers() -> float:
    return np.random.random() + random.random() + torch.rand(()).item()


def test_random_numbers_of_libraries_are_a_rounds_own(work):
    """The same in every method, after --resume, and whatever was used before."""

    def careless(config, fl, run):
        state = {"history": [libraries_numbers()]}
        for t in run.rounds(state):
            for _ in range(len(run.method)):
                state["history"].append(libraries_numbers())
            update = types.SimpleNamespace(clients=[0], train_loss=np.ones(1), steps=np.ones(1))
            run.record(t, state, update, own=state["history"][-len(run.method)])

    start("--out=whole", "--method", "a", "late", federate=careless, after=lambda config: {})
    np.random.seed(7)
    start("--out=r", "--method", "a", "late", "--rounds=2", federate=careless, after=lambda _: {})
    assert np.random.random() == np.random.RandomState(7).random()  # nor is the caller disturbed
    start("--out=r", "--method", "a", "late", "--resume", federate=careless, after=lambda _: {})
    assert table("r") == table("whole")
    own = pd.read_csv("whole/metrics.csv").pivot(index=["trial", "round"], columns="method")["own"]
    assert (own["a"] == own["late"]).all() and own["a"].nunique() == len(own)


def test_resume_where_no_run_was(work, capsys):
    assert "holds no run" in refused(capsys, "--resume")
    assert not (work / "runs").exists()


def test_threads_are_each_arms_own(work, monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    start("--method=a", "--threads", "2", "3", "--trials=1", "--out=r")
    assert chosen[-2:] == [2, 3]


def test_a_sweep_of_data_sets_is_not_titled_with_its_first(work, capsys):
    write_data("other.npz")
    start("--dataset", "tiny.npz", "other.npz", "--out=r", "--trials=1")
    assert "\ndataset=other.npz alpha 0.1, lenet5, 1 trial," in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_ctrl_c_while_processes_are_prepared_is_one_line(work):
    """All of the terminal's processes get it; the one that imports for the others is deaf to it."""
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    flags = ["--rounds=60", "--trials=1", "--jobs=2", "--out=r"]
    running = process(work, *flags, start_new_session=True, preexec_fn=heard)
    wait_for(lambda: len(family(running.pid)) >= 3)  # itself, the resource tracker, the importer
    os.killpg(running.pid, signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130 and "Traceback" not in errors, errors
    assert errors.splitlines()[-1] in ("stopped", "stopped; --resume continues in r")
    wait_for(lambda: family(running.pid) == [], 10)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_worker_that_dies_ends_the_command_in_one_line(work):
    running = started(work, "--jobs=2")
    workers = []
    for pid in family(running.pid):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if parent == running.pid and b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
            workers.append(pid)
    assert len(workers) == 2
    os.kill(workers[-1], signal.SIGKILL)
    _, errors = running.communicate(timeout=60)
    lines = [line for line in errors.splitlines() if "error: " in line]
    assert running.returncode == 5 and "Traceback" not in errors and len(lines) == 1, errors
    assert "a worker is gone" in lines[0] and "--resume continues in r" in lines[0]
    wait_for(lambda: family(running.pid) == [], 5)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_no_orphan_outlives_its_parent(work):
    running = started(work, "--jobs=2")
    assert len(family(running.pid)) >= 3
    running.kill()
    running.wait()
    wait_for(lambda: family(running.pid) == [], 5)
    half = work / "r" / "checkpoints" / f"a-0-trial0.{'a' * 32}.tmp"
    half.write_text("half written")
    start("--out=r", "--rounds=60", "--pause=0.05", "--trials=1", "--resume")
    assert len(table("r")) == 120 and not half.exists()  # the lock went with the process


STRANGERS = ("common", "data", "experiment", "report", "pandas", "torch", "signal", "socket")


def test_workers_import_nothing_from_the_current_folder(work):
    """Another checkout may lie there, or a stranger's report.py."""
    start("--out=one")
    for name in STRANGERS:
        Path(f"{name}.py").write_text("open('imported', 'w')\n")
    _, errors = process(work, "--out=two", "--jobs=2").communicate(timeout=300)
    assert not Path("imported").exists() and table("two") == table("one"), errors


def program(text: str) -> list[str]:
    """A program that has this file's script as `test_experiment.main`."""
    head = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\nimport test_experiment\n"
    )
    return [sys.executable, "-c", head + text]


def test_main_runs_in_a_thread_and_twice_in_a_process(work):
    start("--out=one")
    text = """
import threading
thread = threading.Thread(target=test_experiment.main, args=([*sys.argv[1:], "--jobs=2"],))
thread.start()
thread.join()
test_experiment.main([*sys.argv[1:], "--out=b"])
"""
    running = process(work, "--out=a", script=program(text))
    output, errors = running.communicate(timeout=600)
    assert output.count("results: ") == 2 and "Traceback" not in errors, errors
    assert table("a") == table("b") == table("one")


@pytest.mark.parametrize("how", ["file", "command", "input"])
def test_a_program_without_a_main_guard_or_without_a_file(how, work):
    """Workers would run the first once more, and cannot import the others."""
    command = program("""
def federate(config, fl, run): test_experiment.federate(config, fl, run)
test_experiment.main([*test_experiment.SMALL, "--jobs=2", "--out=r"], federate=federate)
""")
    Path("mine.py").write_text(command[2])
    if how == "file":
        command = [sys.executable, "mine.py"]
    elif how == "input":
        command = ["sh", "-c", f"exec {sys.executable} < mine.py"]
    running = process(work, script=command)
    _, errors = running.communicate(timeout=300)
    lines = [line for line in errors.splitlines() if " rounds, " not in line]
    assert len(lines) == 1, errors
    if how == "file":
        assert running.returncode == 2 and '__name__ == "__main__"' in lines[0]
    else:
        assert running.returncode == 0 and "one after another in this process" in lines[0]
        assert len(table("r")) == 16


def test_an_error_that_cannot_be_sent_from_a_worker_is_shown(work):
    """An exception of two arguments, which pickle cannot make again."""
    text = """
class Odd(Exception):
    def __init__(self, one, two): super().__init__(f"{one} and {two}")
def federate(config, fl, run): raise Odd("this", "that")
if __name__ == "__main__":
    test_experiment.main([*test_experiment.SMALL, "--jobs=2", "--out=r"], federate=federate)
"""
    Path("mine.py").write_text(program(text)[2])
    _, errors = process(work, script=[sys.executable, "mine.py"]).communicate(timeout=300)
    assert "Odd: this and that" in errors and "a worker is gone" not in errors


def test_a_reader_that_is_gone_stops_no_training(work):
    running = process(work, "--out=r", "--jobs=2")
    running.stdout.close()
    running.stderr.close()
    assert running.wait(timeout=300) == 0 and Path("r/summary.json").exists()
    shell = f"exec {sys.executable} {__file__} {' '.join(SMALL)} --jobs=2 --out=s <&- >&- 2>&-"
    running = process(work, script=["sh", "-c", shell])
    assert running.wait(timeout=300) == 0 and table("s") == table("r")


def test_a_wrong_environment_of_torchrun_is_one_line(work, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "started by torchrun" in refused(capsys)
    for word in ("", "x", "1"):
        monkeypatch.setenv("WORLD_SIZE", word)
        monkeypatch.setenv("RANK", "1")
        start(f"--out=r{word}", "--trials=1")


def test_a_disk_that_is_really_full(work):
    """A limit on the size of a file: torch, and not Python, then meets the error."""
    limit = 300_000

    def small():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    running = process(work, "--out=r", "--size=1000000", preexec_fn=small)
    _, errors = running.communicate(timeout=120)
    lines = [line for line in errors.splitlines() if "error" in line]
    assert running.returncode == 5 and len(lines) == 1, errors
    assert "is the disk full?" in lines[0]
    limit = 100
    before = Path("r/.code.json").read_text()
    running = process(work, "--out=r", "--size=1000000", "--resume", preexec_fn=small)
    _, errors = running.communicate(timeout=120)
    assert running.returncode == 5 and errors.count("error: ") == 1, errors
    assert Path("r/.code.json").read_text() == before


def test_importing_changes_nothing_and_reads_no_drawing_library(work, monkeypatch):
    program = """
import gc, os, signal, sys
frozen = gc.get_freeze_count()  # Python 3.12 begins with some
import experiment, fedcl_fgn
heavy = [name for name in ("scipy.stats", "seaborn") if name in sys.modules]
handler = signal.getsignal(signal.SIGTERM).name
print(gc.get_freeze_count() - frozen, "MPLBACKEND" in os.environ, handler)
print(heavy)
"""
    monkeypatch.delenv("MPLBACKEND", raising=False)
    running = process(work, script=(sys.executable, "-c", program))
    output, errors = running.communicate(timeout=120)
    first, heavy = output.splitlines()
    assert first == "0 False SIG_DFL", errors
    assert heavy == "[]"


if __name__ == "__main__":
    main()
