"""Local steps as CUDA graphs: the numbers of `stacks.Stack.run`, sooner on a GPU.

No reader of an algorithm needs this module. Training calls `run`, which gives the same numbers as
`Stack.run`, but for last digits: on a GPU a recorded step has eta in float32. If you write a loss,
a penalty or an augmentation, see `recordable`.

A GPU finishes most steps sooner than Python describes them. A CUDA graph is described once. A
replay computes with the numbers that lie at the same places in memory. So a `Recording` has memory
that stays in place, and each round copies its numbers into it. Graphs pay because they are kept for
the whole run. When each round made new ones, this took as long as the steps that they replaced.

The first two steps of a kind are taken as they are, and the third is recorded. A recording runs
nothing on the GPU. A replay has the shapes of the step itself, and also its random numbers: see
"CUDA Graph-safe RNG states" in torch's CUDAGeneratorImpl.h. So no result depends on which steps
were recorded, in this process or in one that was interrupted.

A graph does not repeat Python. So only steps without a user's Python are recorded: see `recordable`
and `nets.Model.is_recordable`.
"""

import collections
import contextlib
import copy
import functools
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from errors import UsageError, first_line
from stacks import Stack

ON_CPU = False  # a test sets it: there a replay is the step itself, and all else is as on a GPU
WARM_UP = 2  # how many steps of a kind are not recorded: torch chooses kernels in them
GRAPHS = 128  # of a recording: short batches with batch norms give many kinds of steps
RECORDINGS = 3  # that are kept: a penalty that begins in a later round needs another one
KEPT: dict[tuple, "Recording"] = {}  # KEPT.clear() frees their memory


def recordable(function: Callable) -> Callable:
    """Declares that a GPU may record this loss, penalty or augmentation.

    Declare only a function of a module that does the same with tensors in each call. All tensors
    come from its arguments: use `Local.per_client` and `Local.per_step` for your own.
    functools.partial may give it numbers and words. A replay does not print or count, takes no
    random numbers of NumPy, and sees no new value of a global variable.
    """
    function.is_recordable = True
    return function


def run(stack: Stack) -> tuple[Tensor, Tensor]:
    """Does what `stack.run` does, with recorded steps on a GPU.

    If memory or the GPU fails there, a warning says so. The stack is still as it was, and trains
    without them. So does its model from then on. An error that has another cause occurs again.
    """
    model = stack.model
    if not (model.device == "cuda" or ON_CPU) or not can_record(stack):
        return stack.run()
    try:
        return run_recorded(stack)
    except RuntimeError as error:
        KEPT.clear()  # the steps that follow need the memory
        if isinstance(error.__context__, UsageError):
            error = error.__context__  # torch raises another one where a failed graph ends
        warnings.warn(f"training goes on without CUDA graphs: {first_line(error)}", stacklevel=2)
    model.is_recordable = False
    return stack.run()


def run_recorded(stack: Stack) -> tuple[Tensor, Tensor]:
    """Trains the stack in a recording that was kept, or in a new one.

    A recording is not in KEPT while it is used. With one recording all go: torch then frees memory
    that the graphs of other recordings use, too (pytorch/pytorch#193402).
    """
    K = len(stack.steps)
    key = identity(stack)
    recording = KEPT.pop(key, None)
    is_small = recording is not None and len(recording.stack.steps) < K
    if is_small or (recording is None and len(KEPT) == RECORDINGS):
        recording = None  # this frees its memory before there is another one
        KEPT.clear()
    recording = recording or Recording(stack)
    try:
        with side_stream(stack.model.device):
            recording.train(stack)
    except BaseException:
        recording.replays.clear()  # now, and not with the traceback
        KEPT.clear()
        raise
    KEPT[key] = recording
    return recording.stack.results(K)


class Recording:
    """Memory that stays in place, as a copy of a stack, and the graphs of its steps.

    A step finds its rows of the schedules in row 0.
    """

    def __init__(self, stack: Stack):
        self.stack = in_place(stack)
        precision = torch.promote_types(stack.model.dtype, torch.float32)
        self.eta = torch.zeros((), device=stack.model.device, dtype=precision)
        self.taken = collections.Counter()
        self.replays = {}
        self.pool = None  # of memory that all graphs share: nothing in it outlives a replay

    def train(self, stack: Stack) -> None:
        """Trains the stack's clients in this memory. The stack stays as it is."""
        T, K = stack.index.shape[:2]
        for mine, theirs in zip(begun(self.stack), begun(stack), strict=True):
            mine[:K].copy_(theirs)
        etas = torch.tensor(stack.etas[:T], dtype=self.eta.dtype).to(self.eta.device)
        stack.seed()
        for step in range(T):
            self.eta.copy_(etas[step])
            for mine, theirs in zip(scheduled(self.stack), scheduled(stack), strict=True):
                mine[0, :K].copy_(theirs[step])
            for first, last, batch_size in stack.groups_of(step):
                self.take(first, last, batch_size)

    def take(self, first: int, last: int, batch_size: int) -> None:
        """Takes a step of some clients: as it is, or as a replay."""
        kind = (first, last, batch_size)
        if kind not in self.replays:
            self.taken[kind] += 1
            group = self.stack.group(first, last)
            step = functools.partial(self.stack.train_group, 0, group, batch_size, self.eta)
            if self.taken[kind] <= WARM_UP or len(self.replays) == GRAPHS:
                step()
                return
            try:
                self.replays[kind] = self.record(step)
            except UsageError as error:  # a model of the user's own did what a graph cannot
                raise RuntimeError(first_line(error)) from error
        self.replays[kind]()

    def record(self, step: Callable) -> Callable:
        """Returns the function that takes the step again."""
        if self.eta.device.type == "cpu":
            return step
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=torch.cuda.current_stream()):
            step()
        self.pool = graph.pool()
        return graph.replay


@contextlib.contextmanager
def side_stream(device: str) -> Iterator[None]:
    """On a GPU, has work wait its turn on another stream: torch records on no other."""
    if device == "cpu":
        yield
        return
    stream = new_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        torch.cuda.current_stream().wait_stream(stream)


@functools.cache
def new_stream(device: int) -> torch.cuda.Stream:
    """Made once for each GPU: a stream keeps memory of its own."""
    return torch.cuda.Stream(device)


# -------------------------------------------------------------------------- what a recording holds


def in_place(stack: Stack) -> Stack:
    """Returns a copy of a stack, before its first step, in memory of its own."""
    shared = (stack.model, stack.data, stack.images, stack.labels)
    copied = copy.copy(stack)
    copied.local = replace(stack.local, correction=None, frozen={})  # the stack has them by layer
    return copy.deepcopy(copied, {id(part): part for part in shared})


def begun(stack: Stack) -> list[Tensor]:
    """What clients begin with, and what steps change: (K, ...)."""
    layers = [*stack.theta, *stack.v, *stack.w_0, *stack.correction, stack.sums]
    for frozen in stack.frozen.values():
        layers += frozen
    return [*layers, *stack.local.per_client.values()]


def scheduled(stack: Stack) -> list[Tensor]:
    """What differs from step to step: (T, K, ...)."""
    schedules = [stack.index, stack.share, *stack.local.per_step.values()]
    if stack.local.sample_weights is not None:
        schedules.append(stack.local.sample_weights)
    return schedules


# -------------------------------------------------------------------------- which steps are alike


def can_record(stack: Stack) -> bool:
    """Whether there are steps, and they run no Python that a graph would have to repeat.

    Under autocast torch keeps casted weights, which a graph would use for ever.
    """
    if len(stack.index) == 0 or torch.is_autocast_enabled("cuda"):
        return False
    return stack.model.is_recordable and None not in functions_of(stack)


def functions_of(stack: Stack) -> tuple[tuple | None, ...]:
    """Describes the loss, the augmentation and the penalty."""
    local = stack.local
    return tuple(describe(function) for function in (local.loss, local.augment, local.penalty))


def describe(function: Callable | None) -> tuple | None:
    """Returns a function and the arguments of its partial; None if it may not be recorded.

    A closure, a method or a partial may hold tensors that are new in each round. A graph would use
    the first ones for ever. Without a function there are no arguments, either.
    """
    if function is None:
        return ()
    given = functools.partial(function)  # without arguments if the function is no partial itself
    arguments = (given.args, *given.keywords.items())
    values = (*given.args, *given.keywords.values())
    are_values = all(isinstance(value, int | float | str) for value in values)
    is_of_module = isinstance(given.func, types.FunctionType) and not given.func.__closure__
    if is_of_module and are_values and hasattr(given.func, "is_recordable"):
        return (given.func, *arguments)
    return None


def identity(stack: Stack) -> tuple:
    """Returns what is equal for stacks whose steps differ in numbers alone.

    A recording holds the objects whose ids these are, so no other object gets such an id.
    """
    local = stack.local
    held = (id(stack.model), id(stack.images), id(stack.labels))
    numbers = (local.momentum, local.weight_decay, local.proximal, local.grad_norms)
    names = (tuple(local.per_client), tuple(local.per_step), tuple(local.frozen))
    rows = tuple((values.shape[1:], values.dtype) for values in begun(stack))
    steps = tuple((values.shape[2:], values.dtype) for values in scheduled(stack))
    return (held, functions_of(stack), numbers, names, rows, steps, switches())


def switches() -> tuple:
    """Returns the user's settings of torch that decide which kernels a step runs."""
    cudnn = torch.backends.cudnn
    matmul = torch.backends.cuda.matmul
    return (
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        cudnn.conv.fp32_precision,
        matmul.fp32_precision,
        torch.are_deterministic_algorithms_enabled(),
    )
