"""What can go wrong: a user's mistakes, numbers that are not finite, a machine that fails.

The command line shows one line for each, and ends with an exit status (experiment/command.py).
"""

import torch


class UsageError(Exception):
    """A mistake of the caller. The command line shows one line and exits with status 2."""


class NonFiniteError(Exception):
    """An update, a score or a test is NaN or infinite. The command line says so, and exits with 3.

    What causes it most often: a large --lr, --server-lr or --mu.
    """


def first_line(error: BaseException) -> str:
    """Returns the beginning of an error's message, or its class name."""
    message = str(error) or type(error).__name__
    lines = message.splitlines()
    if lines[0].endswith(":"):  # what follows says what is wrong
        lines[0] = " ".join(map(str.strip, lines[:2]))
    return lines[0][:300]


GPU_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)  # no fault of data or a model


def is_out_of_memory(error: BaseException) -> bool:
    """Whether NumPy's or torch's error means that the machine has not enough memory."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    message = str(error)
    is_from_torch = "allocate memory" in message or "could not create a primitive" in message
    return isinstance(error, kinds) or is_from_torch  # the second is what oneDNN says


def is_of_the_machine(error: BaseException) -> bool:
    """Whether memory or a GPU failed, and no file of the user's."""
    return is_out_of_memory(error) or isinstance(error, torch.AcceleratorError)
