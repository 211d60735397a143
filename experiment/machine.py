"""What this machine is: its memory, its GPUs."""

import ctypes
import functools
import gc
import sys

import torch

from errors import first_line

from .ranks import number_in


def keep_heap() -> None:
    """Keeps large buffers in the heap: giving pages back costs up to a third of a step's time."""
    gc.freeze()  # nor need the collector walk through torch's own objects: 3 % of a round
    if sys.platform == "linux":
        M_TRIM_THRESHOLD = -1
        M_MMAP_THRESHOLD = -3
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)


def trim_heap() -> None:
    """Gives free memory back to the system: rounds of different sizes leave gaps."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def gpu_fault() -> str:
    """Says why no kernel runs on a GPU here (none, too old, full); nothing if one does.

    A rank of torchrun takes the GPU of its own number.
    """
    if not torch.cuda.is_available():
        return "torch finds no GPU here"
    try:
        take_gpu(number_in("LOCAL_RANK", 0))
        torch.ones(1, device="cuda").sum().item()
    except RuntimeError as error:
        return f"the GPU cannot be used ({first_line(error)})"
    return ""


def take_gpu(number: int) -> None:
    """From now on "cuda" means this GPU. Numbers beyond the last GPU begin again."""
    torch.cuda.set_device(number % torch.cuda.device_count())
