"""What bench_trainer.py compares is the same training: steps of the rivals, and of ours."""

import subprocess
import sys

import bench_trainer
import gpu_rivals
import pytest
import torch

NETS = {  # a model, channels, side, clients, batch size, norm
    "lenet5": ("lenet5", 1, 28, 3, 4, "batch"),
    "alexnet": ("alexnet", 3, 32, 2, 2, "batch"),
    "resnet9": ("resnet9", 3, 32, 2, 2, "group"),
    "resnet9, batch norms": ("resnet9", 3, 32, 2, 4, "batch"),
    "user": (bench_trainer.USERS, 3, 32, 2, 2, "batch"),
}


@pytest.mark.parametrize("title", NETS)
def test_rivals_take_our_steps(title):
    """Twice, because a recorded step begins the second round in used memory."""
    name, channels, side, K, batch_size, norm = NETS[title]
    sizes = [3 * batch_size] * K
    work = bench_trainer.Work(name, channels, side, sizes, batch_size, norm, dtype=torch.float64)
    ours = work.ours()[:, : work.model.trainable]  # a vmap keeps no statistics
    assert (ours - work.theta[: work.model.trainable]).abs().max() > 1e-4
    found = bench_trainer.gpu_contestants(work)
    assert len(found) >= 5
    for who, (train, clients) in found.items():
        if who.startswith("JAX"):
            continue
        for _ in range(2):
            thetas = train()
            torch.testing.assert_close(
                thetas[:, : work.model.trainable], ours[:clients], rtol=0, atol=1e-12
            )


@pytest.mark.skipif(not gpu_rivals.has_jax(), reason="jax is not installed")
@pytest.mark.parametrize("name", ("lenet5", "alexnet"))
def test_jax_takes_our_steps(name):
    import numpy as np

    work = bench_trainer.Work(name, 3, 32, [8] * 2, 4, dtype=torch.float64)
    thetas = np.asarray(gpu_rivals.in_jax(work)())
    np.testing.assert_allclose(thetas, work.ours().numpy(), rtol=0, atol=1e-12)


def test_too_few_rounds_are_refused_at_once():
    command = [sys.executable, bench_trainer.__file__, "--rounds", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "--rounds 3: choose at least 4" in done.stderr
