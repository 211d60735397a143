"""Other ways to train several clients, step for step as ours: what bench_trainer.py compares with.

Each function takes a `bench_trainer.Work` with full batches of equal numbers, and returns a
function that trains clients from the same weights and returns theirs (K, P). A recorded step is a
CUDA graph, made once and replayed. On a CPU it is the step itself, so that a test can compare the
weights: a rival that computes something else would be worthless.
"""

import copy
import importlib.util

import ordinary
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, replace_all_batch_norm_modules_, vmap

SGD = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}


class UserCNN(nn.Sequential):
    """A user's own model, in torch's layers: pfl-research's CNN without dropout."""

    def __init__(self, channels, side, classes):
        flat = 64 * ((side - 4) // 2) ** 2
        super().__init__(
            *(nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(flat, 128), nn.ReLU()),
            nn.Linear(128, classes),
        )


def plain_loop(work, is_recorded=False, clients=None):
    """One client after the other, as anyone would write it."""
    net = work.net.train()
    weights = [*net.parameters()]
    sgd = torch.optim.SGD(weights, **SGD)
    samples = torch.tensor(work.batches[0][0], device=work.device)

    def step():
        sgd.zero_grad()
        F.cross_entropy(net(work.x[samples]), work.data.y_train[samples]).backward()
        sgd.step()

    take = recorded(step, work.device) if is_recorded else step

    def train():
        thetas = []
        for batches in work.batches[:clients]:
            ordinary.fill(net, work.theta)
            forget(sgd)
            for batch in torch.as_tensor(batches, device=work.device):
                samples.copy_(batch)
                take()
            thetas.append(ordinary.flatten(net).clone())
        return torch.stack(thetas)

    return train


def stacked(work, is_recorded=False):
    """All clients at once by torch.func.vmap, with the same optimizer."""
    net = ordinary.fill(copy.deepcopy(work.net), work.theta).train()
    replace_all_batch_norm_modules_(net)  # running means cannot change within vmap
    names = [name for name, _ in net.named_parameters()]
    K = len(work.batches)
    first = [weight.detach().clone() for weight in net.parameters()]
    weights = [weight.expand(K, *weight.shape).clone() for weight in first]
    sgd = torch.optim.SGD(weights, **SGD)
    schedule = torch.stack([torch.as_tensor(of_client) for of_client in work.batches], 1)
    schedule = schedule.to(work.device)  # (T, K, B)
    samples = schedule[0].clone()

    def loss(of_client, x, y):
        logits = functional_call(net, dict(zip(names, of_client, strict=True)), (x,))
        return F.cross_entropy(logits, y)

    gradients = vmap(grad(loss))

    def step():
        found = gradients(weights, work.x[samples], work.data.y_train[samples])
        for weight, gradient in zip(weights, found, strict=True):
            weight.grad = gradient
        sgd.step()

    take = recorded(step, work.device) if is_recorded else step

    def train():
        for weight, before in zip(weights, first, strict=True):
            weight.copy_(before.expand_as(weight))
        forget(sgd)
        for batches in schedule:
            samples.copy_(batches)
            take()
        return torch.cat([weight.flatten(1) for weight in weights], 1)

    return train


def forget(sgd) -> None:
    """Sets all momentum to 0, in the same memory: a recorded step uses no other."""
    for state in sgd.state.values():
        state["momentum_buffer"].zero_()


def recorded(step, device: str):
    """Returns a function that repeats this step: a CUDA graph; on a CPU the step itself."""
    if device == "cpu":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # cuDNN chooses, the optimizer makes its memory
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


# -------------------------------------------------------------------------------------------- JAX


def has_jax() -> bool:
    return importlib.util.find_spec("jax") is not None


def in_jax(work):
    """All clients by jax.vmap, and all steps in one jax.lax.scan: LeNet-5 and AlexNet."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", work.x.dtype == torch.float64)
    apply, rate = jax_net(work.name), SGD["lr"]
    K = len(work.batches)
    x = jnp.asarray(work.x.permute(0, 2, 3, 1).cpu().numpy())
    y = jnp.asarray(work.data.y_train.cpu().numpy())
    schedule = torch.stack([torch.as_tensor(of_client) for of_client in work.batches], 1)
    schedule = jnp.asarray(schedule.numpy())
    net = ordinary.fill(work.net, work.theta)
    first = [jnp.asarray(weight.detach().cpu().numpy()) for weight in net.parameters()]
    first = [jnp.broadcast_to(weight, (K, *weight.shape)) for weight in first]

    def loss(weights, samples):
        scores = jax.nn.log_softmax(apply(weights, x[samples]))
        return -jnp.take_along_axis(scores, y[samples][:, None], 1).mean()

    gradients = jax.vmap(jax.grad(loss))

    def step(state, samples):
        weights, moments = state
        found = gradients(weights, samples)
        next_weights, next_moments = [], []
        for weight, moment, gradient in zip(weights, moments, found, strict=True):
            gradient = gradient + SGD["weight_decay"] * weight
            next_moments.append(SGD["momentum"] * moment + gradient)
            next_weights.append(weight - rate * next_moments[-1])
        return (next_weights, next_moments), None

    @jax.jit
    def scan(weights):
        moments = [jnp.zeros_like(weight) for weight in weights]
        (weights, _), _ = jax.lax.scan(step, (weights, moments), schedule)
        return jnp.concatenate([weight.reshape(K, -1) for weight in weights], 1)

    return lambda: jax.block_until_ready(scan(first))


def jax_net(name: str):
    """Returns apply(weights, x) of a model whose weights are in torch's order and shapes."""
    import jax
    import jax.numpy as jnp

    strides = {"lenet5": (1, 1), "alexnet": (2, 1, 1, 1, 1)}[name]
    pooled = {"lenet5": (0, 1), "alexnet": (0, 1, 4)}[name]
    edge = {"lenet5": 0, "alexnet": 1}[name]

    def apply(weights, x):
        pairs = [*zip(weights[::2], weights[1::2], strict=True)]
        for place, stride in enumerate(strides):
            weight, bias = pairs[place]
            x = jax.lax.conv_general_dilated(
                x,
                weight,
                (stride, stride),
                [(edge, edge)] * 2,
                dimension_numbers=("NHWC", "OIHW", "NHWC"),
            )
            x = jax.nn.relu(x + bias)
            if place in pooled:
                window = (1, 2, 2, 1)
                x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")
        x = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
        for weight, bias in pairs[len(strides) : -1]:
            x = jax.nn.relu(x @ weight.T + bias)
        weight, bias = pairs[-1]
        return x @ weight.T + bias

    return apply
