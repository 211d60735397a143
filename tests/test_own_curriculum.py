"""A user's own scores and orders in both curriculum scripts, by loops and by Algorithm 1."""

import sys

import algorithm_1
import pytest
from algorithm_1 import OFF, QUICK, SMALL, command, compare_with_literal, metrics, write_data

import client_curriculum
import common
import experiment
import fedavg_curriculum
from experiment import figures
from results.client_curriculum import rivals as client_rivals
from results.fedavg_curriculum import exposure

OWN = """
import numpy as np

def contrast(fl, theta, m):
    x = fl.data.x_train[fl.shards[m]].double()
    theta.zero_()  # it is a copy
    return -x.flatten(1).std(1)

def loss(fl, theta, m):
    [(losses, guesses)] = fl.score(theta, [m])
    return losses.tolist()

def mean_loss(fl, theta, m):
    return np.mean(loss(fl, theta, m))

def in_lists(fl, t, m, difficulty, g, rng):  # Algorithm 1 without the sampler
    ties = fl.streams("ties", t, m).permutation(len(difficulty)).tolist()
    easy = sorted(ties, key=lambda i: difficulty[i])
    difficulty[:] = 0  # it is a copy
    queue = []
    for count in g:
        batch = []
        while len(batch) < min(fl.config.batch_size, len(easy)):
            if not queue:
                queue = rng.permutation(sorted(easy[:count])).tolist()
            batch.append(queue.pop(0))
        yield batch

def padded(fl, t, m, difficulty, g, rng):  # the same as an array
    batches = np.full((len(g), fl.config.batch_size), -1)
    for step, batch in enumerate(in_lists(fl, t, m, difficulty, g, rng)):
        batches[step, : len(batch)] = batch
    return batches
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return str(write_data(tmp_path_factory.mktemp("data") / "made_up.npz"))


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """Is in own.py of the working directory. Figures take seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["a script"])
    monkeypatch.setattr(figures, "plot", lambda *args, **options: None)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def launch(script, data, folder, *words) -> dict:
    """{method: its rows}, without the columns that name the run."""
    script.main(["--dataset", data, *QUICK, *words, "--out", str(folder)])
    rows = {}
    for row in metrics(folder):
        names = ("setting", "method")
        cells = {name: cell for name, cell in row.items() if name not in names}
        rows.setdefault(row["method"], []).append(cells)
    return rows


# ------------------------------------------------------------------------------ the right values


@pytest.mark.parametrize("order", ["curriculum", "anti"])
def test_an_own_score_orders_the_samples(order, data, own, monkeypatch):
    """A whole run by the literal Algorithm 1, with the deviation of each image's pixels."""

    def by_hand(config, theta, last_net, expert, x, y):
        deviation = algorithm_1.arrays()[0].std()
        return [-float((image * deviation).std()) for image in x]

    monkeypatch.setattr(algorithm_1, "literal_scores", by_hand)
    flags = OFF | SMALL | {"dataset": data, "order": order, "score": "own.py:contrast"}
    fedavg_curriculum.main([*command(flags), "--out", str(own / "run")])
    compare_with_literal(fedavg_curriculum.Config(**flags), f"{order} by contrast", own / "run")


@pytest.mark.parametrize("base", ["fedavg", "solo"])
def test_the_loss_as_an_own_score_is_the_built_in_one(base, data, own):
    """Under solo, each client has weights of its own."""
    words = ["--order", "curriculum", "anti", "--base", base]
    wanted = launch(fedavg_curriculum, data, own / "G", *words)
    found = launch(fedavg_curriculum, data, own / "own", *words, "--score", "own.py:loss")
    assert found == {f"{order} by loss": rows for order, rows in wanted.items()}


def test_an_own_score_is_compared_with_another(data, own, capsys):
    """As methods of one setting. vanilla, which uses none, is one of them."""
    words = ["--order", "curriculum", "vanilla", "--score", "own.py:contrast", "G", "--alpha", "1"]
    rows = launch(fedavg_curriculum, data, own / "run", *words, "0.5", "--trials", "2")
    assert [*rows] == ["curriculum by contrast", "curriculum", "vanilla"]
    pair = "curriculum by contrast - curriculum, final: "
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith(pair)][1:]


@pytest.mark.parametrize("script", [fedavg_curriculum, exposure])
@pytest.mark.parametrize("name", ["in_lists", "padded"])
def test_algorithm_1_as_an_own_order_is_the_built_in_one(script, name, data, own):
    """It is a method next to the built-in ones, with its function's name."""
    words = ["--order", "curriculum", f"own.py:{name}", "vanilla", "--pacing", "root"]
    rows = launch(script, data, own / "run", *words, "--pacing-scope", "global", "--score", "E")
    assert [*rows] == ["curriculum", name, "vanilla"]
    assert rows[name] == rows["curriculum"] != rows["vanilla"]


def test_a_preset_takes_own_functions(data, own):
    """Each order under each score. vanilla, which uses none, is trained once."""
    words = ["--preset", "fig1", "--order", "own.py:in_lists", "vanilla", "--lr-alpha", "0"]
    words += ["--partition", "iid", "--score", "G", "own.py:loss", "--rounds", "1"]
    rows = launch(fedavg_curriculum, data, own / "run", *words)
    assert [*rows] == ["in_lists", "in_lists by loss", "vanilla"]
    assert rows["in_lists"] == rows["in_lists by loss"]  # both scores are the same loss
    assert len([*(own / "run/checkpoints").iterdir()]) == 3


@pytest.mark.parametrize("script", [client_curriculum, client_rivals])
def test_own_functions_of_clients_are_the_built_in_ones(script, data, own):
    """With what the clients send to be ranked."""
    words = ["--client-order", "curriculum", "anti", "--data-order"]
    wanted = launch(script, data, own / "built-in", *words, "curriculum")
    scores = ["--score", "own.py:loss", "--client-score", "own.py:mean_loss"]
    rows = launch(script, data, own / "own", *words, "own.py:in_lists", *scores)
    assert [*rows.values()] == [*wanted.values()]
    methods = ("client+data-in_lists", "client-anti+data-in_lists")
    assert [*rows] == [f"{method} by mean_loss by loss" for method in methods]


def test_what_scores_cost_an_expert_of_samples_and_an_own_score_of_clients(data, own):
    """All 8 get the expert once, and the model whenever they are ranked."""
    words = ["--client-order", "curriculum", "--data-order", "curriculum", "--score", "E"]
    [rows] = launch(client_curriculum, data, own / "E", *words).values()
    assert [row["scorers"] for row in rows] == ["8", "0", "0", "0"]
    words += ["--client-score", "own.py:mean_loss"]
    [rows] = launch(client_curriculum, data, own / "own", *words).values()
    pools = [int(row["pool"]) for row in rows]  # three of a pool take part in each round
    assert pools == [3, 3, 5, 7]
    assert [row["scorers"] for row in rows] == ["16", "8", "8", "8"]


def test_methods_with_and_without_an_own_file_share_an_expert(data, own):
    words = ["--client-order", "curriculum", "--data-order", "vanilla", "own.py:in_lists"]
    words += ["--client-score", "mean", "own.py:mean_loss"]
    assert len(launch(client_curriculum, data, own / "run", *words)) == 4
    assert len([*(own / "run/checkpoints").glob("expert*")]) == 1


class OwnConfig(fedavg_curriculum.Config):
    def federation(self, data, streams):
        return common.Federation(self, data, streams)


class OwnScript:
    """The recipe of examples/README.md."""

    def main(words: list[str]) -> None:
        script = {"federate": fedavg_curriculum.federate, "name": fedavg_curriculum.name}
        experiment.main(experiment.Script(compare=("order",), config=OwnConfig, **script), words)


def test_a_method_without_a_score_is_trained_once_beside_several(data, own):
    words = ["--order", "curriculum", "vanilla", "--score", "G", "own.py:loss"]
    found = launch(OwnScript, data, own / "run", *words)
    assert (
        len(found) == 3
        and found.keys() == launch(fedavg_curriculum, data, own / "2", *words).keys()
    )


# ----------------------------------------------------------------------------------------- faults

ORDER = ("--order", "def f(fl, t, m, difficulty, g, rng): return ")
SCORE = ("--score", "def f(fl, theta, m): return ")
CLIENT_SCORE = ("--client-score", SCORE[1])
FAULTS = [  # the option, what the function returns, what the line says
    (*SCORE, "[1.0]", "wanted numbers of shape (10,), not list of shape (1,)"),
    (*SCORE, "None", "wanted numbers of shape (10,), not NoneType"),
    (*SCORE, "[float('nan')] * 10", "10 are NaN"),
    (*SCORE, "__import__('numpy').ma.masked_all(10)", "the result has masked entries"),
    (*SCORE, "[[1.0], [1.0, 2.0]] * 5", "the result is no ordinary array"),
    (*SCORE, "['hard'] * 10", "wanted numbers"),
    (*SCORE, "1 / 0", "division by zero (ZeroDivisionError in own.py, line 1)"),
    (*SCORE, "exit(3)", "SystemExit in own.py, line 1"),
    (*ORDER, "None", "wanted a batch for each of 1 steps, not NoneType"),
    (*ORDER, "[]", "wanted a batch for each of 1 steps, not 0"),
    (*ORDER, "__import__('itertools').repeat([0])", "of 1 steps, not more"),
    (
        *ORDER,
        "[[0.5]]",
        "of 1 to 20 integers from 0 to 9, then perhaps -1; batch 0 is float64",
    ),
    (*ORDER, "[[10]]", "batch 0 is int64 [10]"),
    (*ORDER, "[[-2]]", "batch 0 is int64 [-2]"),
    (*ORDER, "[[-1]]", "batch 0 is int64 [-1]"),
    (*ORDER, "[[0, -1, 1]]", "batch 0 is int64 [0, -1, 1]"),
    (*ORDER, "[range(0)]", "batch 0 is float64 []"),
    (*ORDER, "[[0] * 21]", "batch 0 is int64 [0, 0, 0"),
    (*ORDER, "[[[0]]]", "batch 0 is int64 [[0]]"),
    (*ORDER, "[0]", "batch 0 is int64 0"),
    (*ORDER, "[['a']]", "batch 0 is <U1 ['a']"),
    (*ORDER, "[None]", "batch 0 is object None"),
    (*ORDER, "[rng.absent]", "(AttributeError in own.py, line 1)"),
    (*CLIENT_SCORE, "[1.0, 2.0]", "wanted one number, not list of shape (2,)"),
    (*CLIENT_SCORE, "float('nan')", "1 are NaN"),
    (*CLIENT_SCORE, "fl.absent", "(AttributeError in own.py, line 1)"),
]


@pytest.mark.parametrize(("option", "head", "returned", "said"), FAULTS)
def test_a_wrong_result_is_one_line(option, head, returned, said, data, own, capsys):
    """It names the file and the client. The clients have 10 samples each."""
    (own / "own.py").write_text(head + returned)
    script = client_curriculum if option == "--client-score" else fedavg_curriculum
    with pytest.raises(SystemExit) as stop:
        words = ["--partition", "iid", "--clients", "6", option, "own.py:f"]
        launch(script, data, own / "run", *words)
    [line] = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert stop.value.code == 2
    assert line.startswith(f"error: {option} own.py:f, client ") and said in line


@pytest.mark.parametrize(
    ("script", "option", "known"),
    [
        (fedavg_curriculum, "--order", "curriculum, anti, random, vanilla"),
        (fedavg_curriculum, "--score", "G, L, LG, G_pred, L_pred, LG_pred, E"),
        (exposure, "--order", "curriculum, anti, random, vanilla, random-step, shuffled"),
        (client_curriculum, "--data-order", "curriculum, anti, random, vanilla"),
        (client_curriculum, "--score", "G, E"),
        (client_curriculum, "--client-score", "mean"),
    ],
)
def test_an_unknown_word_is_one_line(script, option, known, own, capsys):
    (own / "broken.py").write_text("1 / 0")
    faults = {"thing": "choose ", "gone.py:f": "No such file", "own.py:gone": "holds no gone"}
    faults["broken.py:f"] = "division by zero"
    for word, said in faults.items():
        with pytest.raises(SystemExit) as stop:
            script.main([option, word, "--out", str(own / "run")])
        [line] = capsys.readouterr().err.splitlines()
        assert stop.value.code == 2
        assert line.startswith(f"error: {option} {word}: ") and said in line and known in line
    assert not (own / "run").exists()


def test_losses_that_are_not_finite_end_the_run_with_3(data, own, capsys):
    (own / "own.py").write_text("def f(fl, theta, m): return fl.score(theta * 1e300, [m])[0][0]")
    with pytest.raises(SystemExit) as stop:
        launch(fedavg_curriculum, data, own / "run", "--score", "own.py:f")
    assert stop.value.code == 3
    assert "the losses of client" in capsys.readouterr().err


# ---------------------------------------------------------------------------------- resuming a run


@pytest.mark.parametrize("option", ["--order", "--score"])
def test_more_rounds_do_not_follow_what_may_depend_on_their_number(option, data, own, capsys):
    """A user's function can read fl.config.rounds. vanilla does not use the score."""
    word = "own.py:in_lists" if option == "--order" else "own.py:loss"
    words = ["--order", "vanilla", option, word]
    launch(fedavg_curriculum, data, own / "run", *words)
    more = [*words, "--resume", "--rounds", "5"]
    if option == "--score":
        [rows] = launch(fedavg_curriculum, data, own / "run", *more).values()
        assert len(rows) == 5
        return
    with pytest.raises(SystemExit) as stop:
        launch(fedavg_curriculum, data, own / "run", *more)
    assert stop.value.code == 2
    assert "rounds" in capsys.readouterr().err.splitlines()[-1]


def test_an_edited_file_is_not_resumed(data, own, capsys):
    """Not if a method uses the file. vanilla does not use the score."""
    words = ["--order", "curriculum", "vanilla", "--score", "own.py:loss"]
    whole = launch(fedavg_curriculum, data, own / "run", *words)
    assert launch(fedavg_curriculum, data, own / "run", *words, "--resume") == whole
    (own / "own.py").write_text(OWN.replace("losses.tolist()", "losses * 2"))
    with pytest.raises(SystemExit) as stop:
        launch(fedavg_curriculum, data, own / "run", *words, "--resume")
    line = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2
    assert "the file of --score, or one that it imports, was edited" in line
    vanilla = launch(fedavg_curriculum, data, own / "run", *words, "--resume", "--order", "vanilla")
    assert vanilla == {"vanilla": whole["vanilla"]}
