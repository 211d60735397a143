"""What a command tells its user, whether its output is a terminal, a file or a closed pipe."""

import contextlib
import io
import math
import os
import sys

from tqdm import tqdm

from .ranks import rank


class Stream:
    """Writes to another stream. What this one cannot take is dropped: its reader may be gone."""

    def __init__(self, stream):
        self.stream = stream or io.StringIO()

    def write(self, text: str) -> int:
        self.attempt(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self.attempt(self.stream.flush)

    def attempt(self, write, *text) -> None:
        try:
            write(*text)
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):  # at its end Python would complain
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


@contextlib.contextmanager
def patient_output():
    """In this block no print fails, even if standard output or error is closed."""
    number = 0
    while number < 3:  # the next file would become a standard stream that was closed
        number = os.open(os.devnull, os.O_RDWR)
    os.close(number)
    output = Stream(sys.stdout)
    errors = Stream(sys.stderr)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            yield
        finally:
            output.flush()
            errors.flush()


def say(line: str) -> None:
    """Prints a line to standard error, once among the ranks."""
    if rank() == 0:
        print(line, file=sys.stderr, flush=True)


class Progress:
    """Counts the rounds of all runs: a bar in a terminal, otherwise a line for each tenth."""

    def __init__(self, total: int):
        self.total = total
        self.rounds = {}  # of each run
        self.tenths = 0
        is_hidden = rank() > 0 or None  # None: where standard error is no terminal
        self.bar = tqdm(total=total, unit="round", leave=False, disable=is_hidden)

    def __call__(self, run: str, rounds: int, accuracy: float) -> None:
        """This run has done this many rounds. Its last test found this accuracy, or none (NaN)."""
        self.rounds[run] = rounds
        done = sum(self.rounds.values())
        found = run
        if not math.isnan(accuracy):
            found = f"{run}, round {rounds}: accuracy {accuracy:.1f}"
        self.bar.set_postfix_str(found, refresh=False)
        self.bar.update(done - self.bar.n)
        tenths = 10 * done // self.total
        if self.bar.disable and tenths > self.tenths:
            self.tenths = tenths
            say(f"{done} of {self.total} rounds, {found}")
