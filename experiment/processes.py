"""How processes start, talk and end: those of --jobs, torchrun's ranks, and signals."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from data import first_line


def say(line: str) -> None:
    """To standard error, once among the ranks."""
    if rank() == 0:
        print(line, file=sys.stderr, flush=True)


def process_context():
    """How processes start: on Linux as forks of a server, which imports from this call on."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver, resource_tracker

    context = multiprocessing.get_context("forkserver")
    # installed ones are found in any folder, ours only where this file lies
    context.set_forkserver_preload(["torch", "pandas", "sklearn.datasets", "experiment"])
    resource_tracker.ensure_running()  # first: later it would unblock SIGINT
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the new process stays deaf to it
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return context


@contextlib.contextmanager
def postponed_stop():
    """Ctrl-C and SIGTERM are heard at the end of the block."""
    heard = []
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in heard[:1]:
        signal.raise_signal(number)


def begin_worker(shared) -> None:
    """A process of --jobs: deaf to Ctrl-C, which its parent hears, and ending with its parent."""
    global progress_of_all
    progress_of_all = shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    keep_heap()


def tell_parent(rounds: int, accuracy: float) -> None:
    """So many rounds more are done, and this is the accuracy that was tested last."""
    with progress_of_all.get_lock():
        progress_of_all[0] += rounds
        progress_of_all[1] = accuracy


def end_with_parent() -> None:
    """Ends this process once the one that started it has ended, however that ended."""
    multiprocessing.parent_process().join()
    os._exit(1)


def keep_heap() -> None:
    """Large buffers stay in the heap: to hand pages back costs up to a third of a step's time."""
    gc.freeze()  # nor need the collector walk through torch's own objects: 3 % of a round
    if sys.platform == "linux":
        M_TRIM_THRESHOLD = -1
        M_MMAP_THRESHOLD = -3
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)


def trim_heap() -> None:
    """Gives free memory back to the system: rounds of unlike sizes leave gaps."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


# --------------------------------------------------------------------------------- torchrun's ranks


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


@contextlib.contextmanager
def joined_ranks(device: str):
    """Joins the processes of `torchrun --nproc-per-node N script.py ..`, if this is one of them."""
    if ranks() < 2:
        yield
        return
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1  # a rank ends when torchrun does, however that ends
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    backend = "gloo"
    if device != "cpu" and torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(backend)
    try:
        yield
    except RuntimeError as error:
        if not re.search("gloo|nccl|connection", str(error), re.IGNORECASE):
            raise
        raise OSError(f"another rank is gone ({first_line(error)})") from None
    finally:
        dist.destroy_process_group()


def on_first_rank(work: Callable):
    """work() done by rank 0 alone; every rank gets its result, or the error that it raised."""
    result = None
    error = None
    if rank() == 0:
        try:
            result = work()
        except Exception as raised:
            error = raised
    if ranks() > 1:
        outcome = [result, error]
        dist.broadcast_object_list(outcome)
        result, error = outcome
    if error:
        raise error
    return result


def interrupt(number: int, frame) -> None:
    """SIGTERM as Ctrl-C, with its own exit status."""
    raise KeyboardInterrupt(128 + number)


def stop(status: int, line: str) -> None:
    """Ends this process; torchrun ends all ranks with the first, so let that be rank 0."""
    say(line)
    if rank() > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(30)
    sys.exit(status)
