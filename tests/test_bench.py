"""bench_fim.py and bench_trainer.py: what they measure, by hand."""

import bench_fim
import bench_trainer
import pandas as pd
import torch

import fedcl_fgn as fgn
import nets


def test_agreement_by_hand():
    """One is up, up, down, up; the other up, down, down, up."""
    signals = {"trial": 0, "round": range(1, 6)}
    signals |= {"a": [1.0, 2, 3, 2, 3], "b": [1.0, 2, 1, 0.5, 1]}
    config = fgn.Config(delta=0.01, method="base", detector="fgn")
    row = bench_fim.agreement(pd.DataFrame(signals), config).iloc[0]
    shares = (row["alike"], row["by chance"], row["critical"], row["critical "])
    assert shares == (0.75, 0.5, 0.75, 0.5)
    assert row["kappa"] == 0.5


def test_loop_and_ours_train_alike():
    """The loop shuffles, so each client has a single batch."""
    work = bench_trainer.Work("lenet5", 1, 16, [10, 10], dtype=torch.float64)
    assert isinstance(work.model, nets.Model)
    assert (work.loop() - work.ours()).abs().max() < 1e-10
    assert (work.ours() - work.theta).abs().amax(1).min() > 1e-4
    group = bench_trainer.Work("resnet9", 3, 32, [10], 10, "group", dtype=torch.float64)
    assert (group.loop() - group.ours()).abs().max() < 1e-10
