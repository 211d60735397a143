"""bench_fim.py and bench_trainer.py: what they measure, by hand."""

import time
from types import SimpleNamespace

import bench_fim
import bench_rivals
import bench_trainer
import numpy as np
import pandas as pd
import pytest
import torch

import experiment
import fedcl_fgn as fgn
import nets
import training
from data import load_data


def test_peak_memory_counts_what_is_alive():
    def chained():
        a = torch.ones(2**18)  # 1 MiB
        b = a + 1
        del a
        return (b * 2).sum()  # 2 MiB alive at most

    seconds, peak = bench_fim.measure(chained, "cpu")
    assert seconds > 0
    assert 2 <= peak < 2.1


def test_time_on_the_gpu_waits_for_its_kernels(monkeypatch):
    order = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("wait"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**20)
    monkeypatch.setattr(bench_fim.time, "perf_counter", lambda: order.append("clock") or 0.0)
    measured = bench_fim.measure(lambda: order.append("work"), "cuda")
    assert measured == (0.0, 2.0)
    assert order == ["wait", "clock", "work", "wait", "clock", "work"]


def test_cost_of_the_signals_is_told_beside_that_of_training():
    table = bench_fim.cost(["M+F"], 2, 6, 3, 1, "cpu", 0)
    what = ["training", "FGN batch", "FGN per_sample", "FedFIM"]
    assert table.loc["M+F"].index.tolist() == what
    assert (table.seconds > 0).all()
    assert table.loc[("M+F", "FGN batch"), "time / FGN batch"] == 1
    assert table.loc[("M+F", "FedFIM"), "MiB"] > table.loc[("M+F", "FGN batch"), "MiB"]


def test_the_cost_of_batches_is_a_norm_of_the_stacked_gradients_a_step(monkeypatch):
    shapes = []

    def norm(gradients, dim):
        shapes.append(tuple(gradients.shape))
        return gradients.sum(dim)

    monkeypatch.setattr(torch.linalg, "vector_norm", norm)
    bench_fim.norms_of_batches(torch.ones(2, 5), 7)
    assert shapes == [(2, 5)] * 7


def test_agreement_by_hand():
    """One is up, up, down, up; the other up, down, down, up."""
    signals = {"trial": 0, "round": range(1, 6)}
    signals |= {"a": [1.0, 2, 3, 2, 3], "b": [1.0, 2, 1, 0.5, 1]}
    config = fgn.Config(delta=0.01, method="base", detector="fgn")
    row = bench_fim.agreement(pd.DataFrame(signals), config).iloc[0]
    shares = (row["alike"], row["by chance"], row["critical"], row["critical "])
    assert shares == (0.75, 0.5, 0.75, 0.5)
    assert row["kappa"] == 0.5


def test_agreement_reads_both_signals_on_other_clients_too(tmp_path, monkeypatch):
    """Each is Eq. 1 over the clients it is said to be read on; `other` shares none with `same`."""
    flags = "--clients 6 --clients-per-round 2 --rounds 2 --trials 1 --epochs 1 --alpha 1"
    flags = [*flags.split(), "--method", "base", "--detect-samples", "3", "--eval-every", "9"]
    [config], _ = experiment.parse(fgn.Config, fgn.PRESETS, "doc", flags)
    reads = []

    def spy(measure):
        def call(model, theta, data, samples):
            reads.append(frozenset(samples.tolist()))
            return measure(model, theta, data, samples)

        return call

    with monkeypatch.context() as patch:
        for name in ("squared_gradients", "fisher_traces"):
            patch.setattr(training, name, spy(getattr(training, name)))
        signals = bench_fim.follow(config, load_data("digits"), 0)
    assert len(signals) == 2
    assert len(reads) == 16  # 2 rounds x (same, other) x (norms, traces) x 2 clients
    for t in range(2):
        of_round = [set().union(*reads[i : i + 2]) for i in range(8 * t, 8 * t + 8, 2)]
        same, same_fim, other, other_fim = of_round
        assert same == same_fim
        assert other == other_fim
        assert not same & other
    for reading, column in (("per_sample", "fgn per_sample same"), ("batch", "fgn batch same")):
        out = tmp_path / reading
        fgn.main([*flags, "--fgn", reading, "--threads", "1", "--jobs", "1", "--out", str(out)])
        expected = pd.read_csv(out / "metrics.csv").fgn
        assert signals[column].tolist() == pytest.approx(expected.tolist())


def test_contestants_take_turns_after_a_warm_up():
    order = []
    contestants = {
        "a": lambda: order.append("a"),
        "b": lambda: (order.append("b"), time.sleep(0.02)),
    }
    times = bench_trainer.time_in_turn(contestants, 2)
    assert order == ["a", "b"] * 3
    assert len(times["a"]) == len(times["b"]) == 2
    assert (times["b"] > times["a"]).all()


def test_rivals_nets_have_their_published_sizes():
    counts = {
        "LeNet5": (3, 32, 62_006),
        "PflCNN": (3, 32, 1_626_442),
        "PFLlibCNN": (1, 28, 582_026),
    }
    for name, (channels, side, count) in counts.items():
        net = bench_rivals.NETS[name](channels, side, 10)
        assert sum(parameter.numel() for parameter in net.parameters()) == count
        assert net(torch.zeros(2, channels, side, side)).shape == (2, 10)


def test_loop_and_ours_train_alike():
    """The loop shuffles, so each client has a single batch."""
    work = bench_trainer.Work("lenet5", 1, 16, [10, 10], dtype=torch.float64)
    assert isinstance(work.model, nets.Model)
    assert (work.loop() - work.ours()).abs().max() < 1e-10
    assert (work.ours() - work.theta).abs().amax(1).min() > 1e-4
    group = bench_trainer.Work("resnet9", 3, 32, [10], 10, "group", dtype=torch.float64)
    assert (group.loop() - group.ours()).abs().max() < 1e-10


def test_seconds_of_a_rival_leave_out_the_first_and_the_last_round():
    ends = [0.0, 9.0, 10.0, 12.0, 15.0, 99.0]
    output = "".join(f"ROUND {t} {end:.6f}\n" for t, end in enumerate(ends))

    class Process:
        returncode = 0

        def communicate(self):
            return f"{output}results: here\nPEAK 700\nPEAK 900\n", None

    assert bench_trainer.finish_rival(Process()) == (2.0, 900.0)


def test_a_runs_table_has_a_column_for_each_work(monkeypatch):
    def measure(flags, work, samples, channels, side):
        assert samples == 600
        assert work["clients"] == 100
        seconds = work["per_round"] * channels
        return {"a": [(seconds, 1.0), (seconds + 2, 1.0), (seconds + 1, 1.0)], "b": [(0.5, 1.0)]}

    monkeypatch.setattr(bench_trainer, "measure_in_turn", measure)
    _, a, b = bench_trainer.single(SimpleNamespace(samples=0))
    cells = ["11.000 (10.000 to 12.000)", "21.000 (20.000 to 22.000)", "31.000 (30.000 to 32.000)"]
    assert a == f"| a | {' | '.join(cells)} |"
    assert b == "| b | 0.500 (0.500 to 0.500) | 0.500 (0.500 to 0.500) | 0.500 (0.500 to 0.500) |"


def test_a_table_is_written_between_its_marks(tmp_path, monkeypatch):
    page = tmp_path / "bench.md"
    page.write_text("# Speed\n\n<!-- table: a -->\nold\n<!-- end: a -->\n\nWords.\n")
    monkeypatch.setattr(bench_trainer, "PAGE", page)
    bench_trainer.write("a", "new \\1")
    bench_trainer.write("b", "more")
    first = "# Speed\n\n<!-- table: a -->\nnew \\1\n<!-- end: a -->\n\nWords.\n"
    assert page.read_text() == f"{first}\n<!-- table: b -->\nmore\n<!-- end: b -->\n"


def test_a_gpus_loop_takes_the_samples_in_the_schedules_order():
    work = bench_trainer.Work("lenet5", 1, 16, [10], 4)
    work.device = "cuda"
    batches = list(work.load(torch.arange(10)))
    assert [len(y) for _, y in batches] == [4, 4, 2]
    assert np.array_equal(torch.cat([y for _, y in batches]), work.data.y_train)
