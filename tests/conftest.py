"""Real data where FL_DATA names its folder. One thread and no GPU, so that sums repeat bit for bit.

`python tests/test_device.py` compares a GPU with the CPU.
"""

import os
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for torch, and for the processes that tests start

import pytest
import torch

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config) -> None:
    """Runs the tests on all cores where pytest-xdist is installed: half the time on two cores."""
    if "PYTEST_XDIST_WORKER" in os.environ or not config.pluginmanager.hasplugin("xdist"):
        return
    if config.option.numprocesses is None:  # no -n was given
        config.option.numprocesses = "auto"


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of MNIST/, FashionMNIST/, cifar10_jpeg/, its .npz and tinyshakespeare.txt."""
    folder = os.environ.get("FL_DATA")
    if not folder:
        pytest.skip("real data: set FL_DATA to a folder with MNIST, CIFAR-10 and tinyshakespeare")
    return Path(folder)
