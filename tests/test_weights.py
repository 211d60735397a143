"""weights.py: a trained model is an ordinary one, and a run can begin with its weights."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import reliability
import torch
import torch.nn.functional as F
from reliability import errors_of, run_line, short_run

import data
import experiment
from errors import UsageError
from experiment import figures

NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, channels, side, classes):
        layers = [nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
        super().__init__(*layers, nn.Linear(4 * (side - 2) ** 2, classes))

class Row(nn.Linear):
    def __init__(self, channels, side, classes):
        super().__init__(channels, classes)
"""


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reliability.write_tiny(tmp_path)
    Path("mine.py").write_text(NET)
    data.read_data.cache_clear()
    monkeypatch.setattr(figures, "plot", lambda *_, **__: None)
    return tmp_path


def train(*flags: str, script="fedcl_fgn") -> None:
    status, _, errors = run_line(script, [*short_run(script), *flags])
    assert status == 0, errors


def refused(*flags: str, script="fedcl_fgn") -> str:
    status, _, errors = run_line(script, [*short_run(script), *flags])
    [line] = errors_of(errors)
    assert status == 2, line
    return line


def rows(folder: str, **where) -> pd.DataFrame:
    df = pd.read_csv(f"{folder}/metrics.csv")
    for name, value in where.items():
        df = df[df[name] == value]
    return df.reset_index()


def of_test(name="tiny.npz") -> tuple[torch.Tensor, torch.Tensor]:
    """Standardised here, by the channels of the training set, as images (n, C, H, W)."""
    arrays = dict(np.load(name))
    axes = tuple(range(arrays["x_train"].ndim - 1))
    mean = arrays["x_train"].mean(axes)
    std = arrays["x_train"].std(axes)
    x = torch.from_numpy((arrays["x_test"] - mean) / std)
    if x.dim() == 4:
        x = x.permute(0, 3, 1, 2)
    return x.float(), torch.from_numpy(arrays["y_test"])


MODELS = [
    ("fedcl_fgn", "--model=lenet5"),
    ("fedcl_fgn", "--model=fedgen-cnn"),  # with batch norms
    ("fedcl_fgn", "--model=fedgen-cnn --norm=group"),
    ("fedcl_fgn", "--model=mine.py:Net"),
    ("fedac_art", "--base=moon"),  # with a projection head
]


@pytest.mark.parametrize(("script", "words"), MODELS)
def test_a_trained_model_predicts_what_the_run_found(script, words):
    train("--out=r", "--method=base", "--rounds=3", *words.split(), script=script)
    net = experiment.trained("r")
    x, y = of_test()
    assert isinstance(net, torch.nn.Module) and not net.training
    logits = net(x)
    last = rows("r").iloc[-1]
    accuracy = (logits.argmax(1) == y).double().mean().item()
    assert logits.shape == (20, 3) and 100 * accuracy == pytest.approx(last.accuracy, abs=1e-9)
    assert F.cross_entropy(logits, y).item() == pytest.approx(last.loss, rel=1e-4)
    assert torch.allclose(net(x[:1]), logits[:1], atol=1e-5)


def test_a_trained_model_of_a_table_can_be_trained_on():
    x = np.random.default_rng(0).standard_normal((60, 5))
    y = np.arange(60) % 3
    np.savez("table.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    train("--out=r", "--method=base", "--dataset=table.npz", "--model=mine.py:Row")
    net = experiment.trained(Path("r"))
    x, y = of_test("table.npz")
    before = F.cross_entropy(net(x), y)
    assert before.item() == pytest.approx(rows("r").iloc[-1].loss, rel=1e-4)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    before.backward()
    sgd.step()
    assert F.cross_entropy(net(x), y) < before


def test_a_trained_model_is_named_as_its_rows_are():
    train("--out=r", "--trials=2", "--alpha", "0.1", "5", "--rounds=2")
    x, y = of_test()
    for setting in ("alpha=0.1", "alpha=5.0"):
        for method in ("fedavg", "fedavg+cl"):
            net = experiment.trained("r", method=method, trial=1, setting=setting)
            last = rows("r", setting=setting, method=method, trial=1).iloc[-1]
            assert F.cross_entropy(net(x), y).item() == pytest.approx(last.loss, rel=1e-4)
    with pytest.raises(
        UsageError, match="^r, trial 1: 2 such runs instead of one; name its folder, method"
    ):
        experiment.trained("r", "fedavg", 1)
    for wrong in ({"method": "x"}, {"trial": 7}, {"setting": "alpha=0.7"}, {"folder": "gone"}):
        with pytest.raises(UsageError, match=", trial .: 0 such runs"):
            experiment.trained(**{"folder": "r", "method": "fedavg"} | wrong)


def test_what_has_no_final_weights_is_one_line():
    train("--out=r", "--method=base", "--base=fedavg", "--rounds=2")
    [path] = Path("r/checkpoints").glob("*.pt")
    whole = torch.load(path)
    changes = {
        "has not ended; --resume continues it": {"finished": 0},
        "has not ended; round 2": {"diverged": "round 2: the update"},
        "has no global weights": {"state": {}},
    }
    for line, change in changes.items():
        torch.save({**whole, "content": whole["content"] | change}, path)
        with pytest.raises(UsageError, match=line):
            experiment.trained("r")
    for content in ([1], None, {"rows": []}):  # as of an older version
        torch.save({**whole, "content": content}, path)
        with pytest.raises(UsageError, match="damaged; delete it"):
            experiment.trained("r")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UsageError, match="damaged; delete it"):
        experiment.trained("r")
    train("--out=s", "--method=base", "--base=solo", "--clients=2", script="fedac_art")
    with pytest.raises(UsageError, match="has no global weights"):
        experiment.trained("s")


STILL = ("--lr=1e-30", "--rounds=1", "--method", "base", "cl")  # only averages are rounded


def losses(folder: str, **where) -> dict:
    """The last loss of each trial; all methods have the same."""
    df = rows(folder, **where).groupby(["trial", "method"]).loss.last().unstack()
    assert np.allclose(df.max(axis=1), df.min(axis=1), rtol=1e-6)
    return pytest.approx(df.iloc[:, 0].to_dict(), rel=1e-6)


@pytest.mark.parametrize("model", ["lenet5", "mine.py:Net"])
def test_a_run_begins_with_the_weights_of_its_trial(model):
    train("--out=r", "--trials=2", "--method=base", "--rounds=3", f"--model={model}")
    flags = (*STILL, "--trials=2", f"--model={model}", "--init=r")
    if model == "lenet5":
        found = rows("r").groupby("trial").loss.last().to_dict()
        train("--out=s", *flags, "--jobs=2")
        assert losses("s") == found and found[0] != pytest.approx(found[1], rel=1e-5)
    else:  # its statistics of batches change although no weight does
        train("--out=s", *flags)
        moved = experiment.trained("s", "fedavg", 1).state_dict()
        for name, value in experiment.trained("r", "fedavg", 1).state_dict().items():
            assert torch.allclose(moved[name], value, atol=1e-6) != ("running" in name)


def test_which_runs_weights_a_run_begins_with():
    train("--out=r", "--rounds=2")  # one trial of two methods
    line = refused(*STILL, "--init=r")
    assert "r, trial 0: 2 such runs instead of one; name its folder, method" in line
    train("--out=one", *STILL, "--init=r:fedavg+cl", "--trials=3")  # its only trial is for all
    last = rows("r", method="fedavg+cl").iloc[-1].loss
    assert losses("one") == dict.fromkeys((0, 1, 2), last)
    train("--out=two", "--trials=2", "--method=base")
    assert "two, trial 2: 0 such runs" in refused(*STILL, "--init=two", "--trials=3", "--out=x")
    train("--out=swept", "--alpha", "0.1", "5", "--method=base", "--rounds=2")
    train("--out=again", "--alpha", "5", "0.1", *STILL, "--init=swept")
    for setting in ("alpha=0.1", "alpha=5.0"):
        assert losses("again", setting=setting) == {0: rows("swept", setting=setting).loss[1]}
    assert "0 such runs" in refused("--alpha", "0.5", "2", *STILL, "--init=swept")
    train("--out=other", "--alpha", "0.5", "2", *STILL, "--init=two")  # a single setting fits all


def test_other_weights_and_other_models_are_one_line():
    train("--out=r", "--method=base")
    wrong = {
        "--init=gone": "gone, trial 0: 0 such runs",
        "--init=r:x": "r, trial 0: 0 such runs",
        "--init=tiny.npz": "tiny.npz, trial 0: 0 such runs",
        "--init=r --model=mine.py:Net": "another model (model lenet5, not mine.py:Net; the file",
        "--init=r --width=9": "another model (width 8, not 9)",
    }
    for words, line in wrong.items():
        assert line in refused("--out=x", *words.split())
    assert not Path("x").exists()
    Path("side.npz").write_bytes(Path("tiny.npz").read_bytes())
    arrays = dict(np.load("tiny.npz"))
    for name in ("x_train", "x_test"):
        arrays[name] = np.pad(arrays[name], ((0, 0), (2, 2), (2, 2), (0, 0)))
    np.savez("side.npz", **arrays)
    assert "weights, but this model has" in refused("--out=x", "--init=r", "--dataset=side.npz")
    train("--out=n", "--method=base", "--model=mine.py:Net")
    Path("mine.py").write_text(NET + "\n# edited")
    line = refused("--out=x", "--init=n", "--method=base", "--model=mine.py:Net")
    assert "the file of --model, or one that it imports, was edited" in line


def test_resume_notices_other_initial_weights():
    train("--out=r", "--method=base")
    train("--out=other", "--method=base", "--seed=5")
    train("--out=s", "--init=r", "--method=base")
    shutil.copytree("r", "moved")
    train("--out=s", "--init=moved", "--resume", "--rounds=2", "--method=base")
    train("--out=whole", "--init=r", "--rounds=2", "--method=base")
    assert rows("s").drop(columns="seconds").equals(rows("whole").drop(columns="seconds"))
    for words in ("--init=other", ""):
        line = refused("--out=s", *words.split(), "--resume", "--rounds=2", "--method=base")
        assert "another run's (initial weights " in line
