"""Fixtures: real data sets where FL_DATA names the folder that holds them, and one thread, so that sums repeat bit for bit."""

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with MNIST/, FashionMNIST/, cifar10_jpeg/, cifar10_jpeg.npz and tinyshakespeare.txt."""
    folder = os.environ.get("FL_DATA")
    if not folder:
        pytest.skip("real data: set FL_DATA to a folder with torchvision's MNIST, cifar10_jpeg.npz and tinyshakespeare.txt")
    return Path(folder)
