"""Many clients as one model: the weights of `training.train_alone`, sooner.

No reader of an algorithm needs this module, and a user's own model only with --chunk. The clients
of a `Stack` are independent, so one backward pass of the sum of their losses gives each its own
gradient. tests/test_training.py holds both ways of training together. On a GPU, recording.py
records the steps.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from client_layers import gather
from errors import UsageError
from nets import Model


class Stack:
    """K clients as one model, sorted by falling numbers of local steps. The first `live` train.

    The weights lie by layer, in lists of (K, P_l). Rows of a (K, P) would be copied at every
    convolution. theta, v, w_0 and correction are such lists. They are empty where the update rule
    does not need them. Schedules are (T, K, ...).
    """

    def __init__(self, model: Model, theta_0: Tensor, data, batches, local):
        self.model = model
        self.data = data
        self.images = data.images("train", model.dtype)
        self.labels = data.y_train
        self.local = local  # a training.Local, after `of`
        self.steps = np.array([len(b) for b in batches])
        index = stack_schedules(batches, model, fill=-1)  # (T, K, B)
        real = (index >= 0).to(model.dtype)
        self.index = index.clamp(min=0)
        self.share = real / real.sum(-1, keepdim=True).clamp(min=1)
        counts = [torch.from_numpy((of_client >= 0).sum(1)) for of_client in batches]
        self.batch_sizes = pad_sequence(counts).numpy()  # (T, K), and no word with the GPU
        self.etas = local.learning_rates(len(index))

        self.theta = model.by_layer(theta_0)
        self.v = []
        self.w_0 = []
        self.correction = []
        if local.momentum:
            self.v = [torch.zeros_like(layer) for layer in self.theta[: len(model.parameters)]]
        if local.proximal:
            self.w_0 = model.by_layer(theta_0[:, : model.trainable])
        if local.correction is not None:
            self.correction = model.by_layer(local.correction)
        self.frozen = map_values(model.by_layer, local.frozen)
        # over the steps so far, of ||g||^2 and of the loss
        self.sums = torch.zeros(len(batches), 2, device=model.device, dtype=torch.float64)
        self.groups = {}
        self.of_one = {}  # the modules of a user's own class, which all groups share

    def run(self) -> tuple[Tensor, Tensor]:
        """Takes all steps. Returns `results`."""
        self.seed()
        for step in range(len(self.index)):
            for first, last, batch_size in self.groups_of(step):
                self.train_group(step, self.group(first, last), batch_size, self.etas[step])
        return self.results(len(self.steps))

    def seed(self) -> None:
        """Seeds dropout before the first step."""
        if self.local.seeds is not None:
            torch.manual_seed(self.local.seeds[0])

    def results(self, K: int) -> tuple[Tensor, Tensor]:
        """The weights (K, P) of the first K clients, and three sums (K, 3).

        They are over the steps, of ||g||^2 and of the loss, and over the weights.
        """
        thetas = torch.cat(rows_of(self.theta, slice(K)), 1)
        return thetas, torch.cat([self.sums[:K], thetas.sum(1, keepdim=True)], 1)

    def groups_of(self, step: int) -> list[tuple[int, int, int]]:
        """Which live clients train together: from `first` to before `last`, and the batch size.

        All of them do, and short batches are padded. With batch norms nothing may be padded. There
        neighbours with equal batches are a group.
        """
        live = int((self.steps > step).sum())
        sizes = self.batch_sizes[step, :live].tolist()
        if not self.model.has_batch_norm:
            return [(0, live, max(sizes))]
        groups = []
        first = 0
        for size, neighbours in itertools.groupby(sizes):
            last = first + len([*neighbours])
            groups.append((first, last, size))
            first = last
        return groups

    def train_group(self, step: int, group: "Group", batch_size: int, eta: float | Tensor) -> None:
        losses, *g = self.differentiate(step, group, batch_size)
        has_gradient = [layer is not None for layer in g]
        if not all(has_gradient):
            g = [*itertools.compress(g, has_gradient)]
            group = group.part(has_gradient)
        self.descend(group, eta, losses, g)

    def differentiate(self, step: int, group: "Group", batch_size: int) -> list[Tensor | None]:
        """The clients' losses (K,), then their gradients, of each layer (K, P_l).

        Clients are independent, so the gradient of the sum of their losses is each one's own. A
        layer of a user's own model has None in a step that leaves it out.
        """
        samples = self.index[step, group.rows, :batch_size]
        share = self.share[step, group.rows, :batch_size]
        x = gather(self.images, samples)
        y = gather(self.labels, samples)
        losses = self.local.losses(step, group.net, x, y, share, group.frozen, group.rows)
        gradients = [None]
        if losses.requires_grad:
            gradients = torch.autograd.grad(losses.sum(), group.net.leaves, allow_unused=True)
        may_leave_out = self.model.is_plain and losses.requires_grad
        found = [losses.detach()]
        for layer in gradients:
            if layer is not None:
                layer = layer.contiguous().view(len(losses), -1)
            elif not may_leave_out:
                raise UsageError("a step's loss leaves out weights; wanted each layer in all steps")
            found.append(layer)
        return found

    @torch.no_grad()
    def descend(self, group: "Group", eta: float | Tensor, losses: Tensor, g: list[Tensor]) -> None:
        """g += mu (w - w_0) + correction;  v = momentum v + g + decay w;  w -= eta v.

        A recorded step has eta as a tensor.
        """
        group.losses += losses
        if self.local.grad_norms:
            norms = torch.stack([torch.linalg.vector_norm(layer, dim=1) for layer in g])
            group.squares += norms.square().sum(0)
        if group.w_0:
            moved = torch._foreach_sub(group.w, group.w_0)
            g = torch._foreach_add(g, moved, alpha=self.local.proximal)
        if group.correction:
            g = torch._foreach_add(g, group.correction)
        if isinstance(eta, Tensor) and eta.dtype == torch.float64:
            self.descend_in_float64(group, eta, g)
            return
        torch._fused_sgd_(  # the kernel of torch.optim.SGD: one pass over memory, not four
            group.w,
            g,
            group.v,
            weight_decay=self.local.weight_decay,
            momentum=self.local.momentum,
            lr=eta,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    def descend_in_float64(self, group: "Group", eta: Tensor, g: list[Tensor]) -> None:
        """The same update. The fused kernel would read the tensor eta as a float32."""
        v = torch._foreach_add(g, group.w, alpha=self.local.weight_decay)
        if group.v:
            torch._foreach_mul_(group.v, self.local.momentum)
            torch._foreach_add_(group.v, v)
            v = group.v
        torch._foreach_sub_(group.w, torch._foreach_mul(v, eta))

    def group(self, first: int, last: int) -> "Group":
        """The clients from `first` to before `last`, made once."""
        if (first, last) not in self.groups:
            rows = slice(first, last)
            theta = rows_of(self.theta, rows)
            nets = {"": self.model.bind(theta, training=True, grad=True)}
            for name, layers in self.frozen.items():
                nets[name] = self.model.bind(rows_of(layers, rows))
            if self.model.is_plain:  # so what one counts goes on when a client has ended
                for name, net in nets.items():
                    net.of_one = self.of_one.setdefault(name, net.of_one)
            self.groups[first, last] = Group(
                rows,
                net=nets.pop(""),
                frozen=nets,
                w=theta[: len(self.model.parameters)],
                v=rows_of(self.v, rows),
                w_0=rows_of(self.w_0, rows),
                correction=rows_of(self.correction, rows),
                squares=self.sums[rows, 0],
                losses=self.sums[rows, 1],
            )
        return self.groups[first, last]


@dataclass
class Group:
    """Some clients of a stack, next to one another: views of their rows. w is a list as v is."""

    rows: slice
    net: nn.Module
    frozen: dict[str, nn.Module]
    w: list[Tensor]
    v: list[Tensor]
    w_0: list[Tensor]
    correction: list[Tensor]
    squares: Tensor
    losses: Tensor

    def part(self, has_gradient: list[bool]) -> "Group":
        """The same clients with some of the layers. torch.optim.SGD skips the others."""
        found = {}
        for name in ("w", "v", "w_0", "correction"):
            found[name] = [*itertools.compress(getattr(self, name), has_gradient)]
        return replace(self, **found)


def rows_of(layers: list[Tensor], rows: slice) -> list[Tensor]:
    """These clients' rows of every layer."""
    return [layer[rows] for layer in layers]


# --------------------------------------------------------------- what clients are given, as tensors


def map_values(function: Callable, table: dict) -> dict:
    return {name: function(value) for name, value in table.items()}


def as_tensor(array: np.ndarray | Tensor, model: Model) -> Tensor:
    """The array on the model's device. Floating-point numbers get the model's precision."""
    values = torch.as_tensor(array)
    return values.to(model.device, model.dtype if values.is_floating_point() else None)


def stack_schedules(arrays: Sequence[np.ndarray], model: Model, fill: int = 0) -> Tensor:
    """One tensor (T, K, ...) on the model's device from an array (T_k, ...) for each client."""
    arrays = [np.asarray(array) for array in arrays]
    kind = np.result_type(*arrays)
    tensors = [torch.from_numpy(array.astype(kind)) for array in arrays]
    return as_tensor(pad_sequence(tensors, padding_value=fill), model)
