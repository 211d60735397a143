"""The ten bases: how the server combines the clients' models, and what a base adds to training.

Read `FedAvg` first. The other classes change only what their docstrings say. To add a base, write a
class like `FedProx` and name it in BASES. A program can also pass a class of its own:
Federation(.., base=Mine).
"""

import functools
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from errors import UsageError
from nets import Model
from recording import recordable
from training import Local, Output, Update


class FedAvg:
    """w_0 <- sum_k p_k w_k (McMahan et al., 2017).

    w_0    (d,): the trainable weights of the global model
    w      (K, d): those of the clients after training, update.gather_thetas()[:, :d]
    w_hat  (d,): the average of w by p (K,), with sum 1

    `memory` is what a base keeps from round to round: state["base"], which a checkpoint holds. Only
    `aggregate` and `server` change it.
    """

    server_lr = 1.0
    vectors = 1  # how many vectors of a model's size travel each way
    wants_projection = False  # whether the model gets MOON's projection head
    unread = ("mu", "server_lr")  # options without effect

    def __init__(self, config, model: Model):
        self.config = config
        self.model = model
        if config.mu >= 0:  # below 0: the default of the class
            self.mu = config.mu
        if config.server_lr:  # 0: the default of the class
            self.server_lr = config.server_lr

    def received(self, theta: Tensor, clients: np.ndarray, memory: dict) -> Tensor:
        """Returns what the clients begin with, and what is tested: (P,), or each its own (K, P)."""
        return theta

    def prepare(self, local: Local, theta: Tensor, clients: np.ndarray, memory: dict) -> Local:
        """Returns how the clients train under this base."""
        return local

    def server(self, w_0: Tensor, w_hat: Tensor, p: Tensor, update: Update, memory: dict) -> Tensor:
        """Returns the next w_0."""
        return w_hat

    def aggregate(self, theta: Tensor, update: Update, p: np.ndarray, memory: dict) -> Tensor:
        """Returns the next global weights (P,). Batch statistics are averaged, too.

        So are frozen weights that training moved, as those of a mean teacher.
        """
        d = self.model.trainable
        p = theta.new_tensor(p)
        rest = update.gather(self.model.rest)
        average = self.model.keep_constant(update.average(p), theta, rest)
        next_w_0 = self.server(theta[:d], average[:d], p, update, memory)
        return torch.cat([next_w_0, average[d:]])


class FedProx(FedAvg):
    """Gradient += mu (w - w_0) (Li et al., 2020)."""

    mu = 0.001
    unread = ("server_lr",)

    def prepare(self, local, theta, clients, memory):
        return replace(local, proximal=self.mu)


class Scaffold(FedAvg):
    """w <- w - eta (g - c_k + c), option II of Karimireddy et al. (2020).

    After training c_k+ = c_k - c + (w_0 - w_k) / (eta T), and `lengths` replaces eta T. The server
    has c <- c + K/M mean_k(c_k+ - c_k) and w_0 <- w_0 + server_lr mean_k(w_k - w_0). p averages
    only the statistics of batch norms.
    """

    vectors = 2
    unread = ("mu",)

    def prepare(self, local, theta, clients, memory):
        zero = torch.zeros_like(theta[: self.model.trainable])
        c = memory.get("c", zero)
        c_k = recall(memory, "c_k", clients, zero)
        return replace(local, correction=c - c_k)

    def server(self, w_0, w_hat, p, update, memory):
        w = update.gather_thetas()[:, : len(w_0)]
        zero = torch.zeros_like(w_0)
        c = memory.get("c", zero)
        c_k = recall(memory, "c_k", update.clients, zero)
        c_plus = c_k - c + (w_0 - w) / lengths(update)
        keep(memory, "c_k", update.clients, c_plus)
        fraction = len(w) / self.config.clients
        memory["c"] = c + fraction * (c_plus - c_k).mean(0)
        return w_0 + self.server_lr * (w - w_0).mean(0)


class FedNova(FedAvg):
    """w_0 <- w_0 - (sum_k p_k ||a_k||_1) sum_k p_k d_k with d_k = (w_0 - w_k) / ||a_k||_1.

    Wang et al. (2020).
    """

    def server(self, w_0, w_hat, p, update, memory):
        w = update.gather_thetas()[:, : len(w_0)]
        a = lengths(update)  # times eta, which cancels
        d = (w_0 - w) / a
        return w_0 - (p @ a) * (p @ d)


class VRLSGD(FedAvg):
    """w <- w - eta (g - Delta_k); then Delta_k += (sum_k p_k w_k - w_k) / (eta T).

    Liang et al. (2019). With momentum, `lengths` replaces eta T.
    """

    def prepare(self, local, theta, clients, memory):
        zero = torch.zeros_like(theta[: self.model.trainable])
        return replace(local, correction=-recall(memory, "delta", clients, zero))

    def server(self, w_0, w_hat, p, update, memory):
        w = update.gather_thetas()[:, : len(w_0)]
        delta = recall(memory, "delta", update.clients, torch.zeros_like(w_0))
        delta = delta + (w_hat - w) / lengths(update)
        keep(memory, "delta", update.clients, delta)
        return w_hat


class FedOpt(FedAvg):
    """w_0 += eta m / (sqrt(v) + tau): m follows delta = sum_k p_k (w_k - w_0), v its square.

    There is no bias correction (Reddi et al., 2021). A subclass has `second_moment`, the next v.
    """

    server_lr = 0.01  # eta
    unread = ("mu",)
    b1 = 0.9
    b2 = 0.99
    tau = 1e-3

    def server(self, w_0, w_hat, p, update, memory):
        w = update.gather_thetas()[:, : len(w_0)]
        delta = p @ (w - w_0)  # w_hat - w_0 would lose digits
        m_t = memory.get("m", torch.zeros_like(w_0))
        v_t = memory.get("v", torch.full_like(w_0, self.tau**2))
        m_t = self.b1 * m_t + (1 - self.b1) * delta
        v_t = self.second_moment(v_t, delta**2)
        memory.update(m=m_t, v=v_t)
        return w_0 + self.server_lr * m_t / (v_t.sqrt() + self.tau)


class FedAdagrad(FedOpt):
    """v += delta^2. There is no momentum."""

    b1 = 0.0

    def second_moment(self, v, delta_sq):
        return v + delta_sq


class FedAdam(FedOpt):
    """v <- b2 v + (1 - b2) delta^2."""

    def second_moment(self, v, delta_sq):
        return self.b2 * v + (1 - self.b2) * delta_sq


class FedYogi(FedOpt):
    """v <- v - (1 - b2) delta^2 sign(v - delta^2)."""

    def second_moment(self, v, delta_sq):
        return v - (1 - self.b2) * delta_sq * torch.sign(v - delta_sq)


class Moon(FedAvg):
    """Loss + mu l_con pulls features to the global model's, and away from the previous model's.

    The previous model is the client's own, after its last round (Li et al., 2021). A client without
    one trains without l_con. The term ignores `Local.sample_weights`.
    """

    mu = 5.0
    unread = ("server_lr",)
    wants_projection = True
    temperature = 0.5

    def prepare(self, local, theta, clients, memory):
        previous = recall(memory, "previous", clients, theta)
        has_previous = memory.get("previous", {})
        known = theta.new_tensor([int(m) in has_previous for m in clients])  # 1 or 0
        models = {"global": theta.expand_as(previous), "previous": previous}
        return replace(
            local,
            penalty=functools.partial(contrast, self.mu, self.temperature),
            frozen=local.frozen | models,
            per_client=local.per_client | {"known": known},
        )

    def aggregate(self, theta, update, p, memory):
        keep(memory, "previous", update.clients, update.gather_thetas())
        return super().aggregate(theta, update, p, memory)


@recordable
def contrast(mu: float, temperature: float, out: Output) -> Tensor:
    """Returns mu l_con (K,), which is 0 without a previous model.

    l_con = -log(e^{sim(z, z_g)/tau} / (e^{sim(z, z_g)/tau} + e^{sim(z, z_prev)/tau}))

    z are features, sim is the cosine, and tau is the temperature.
    """
    with torch.no_grad():
        z_global = out.frozen["global"].features(out.inputs)
        z_previous = out.frozen["previous"].features(out.inputs)
    near = F.cosine_similarity(out.features, z_global, dim=-1)
    far = F.cosine_similarity(out.features, z_previous, dim=-1)
    similarity = torch.stack([near, far], -1)  # (K, n, 2)
    log_p = F.log_softmax(similarity / temperature, -1)
    l_con = -(out.share * log_p[..., 0]).sum(1)
    return mu * out.extra["known"] * l_con


class Solo(FedAvg):
    """No aggregation: every client keeps its own model. The accuracy is the mean over these."""

    vectors = 0

    def received(self, theta, clients, memory):
        return recall(memory, "nets", clients, theta)

    def aggregate(self, theta, update, p, memory):
        keep(memory, "nets", update.clients, update.gather_thetas())
        return theta


BASES = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "fednova": FedNova,
    "vrlsgd": VRLSGD,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "moon": Moon,
    "solo": Solo,
}


def recall(memory: dict, name: str, clients: np.ndarray, default: Tensor) -> Tensor:
    """Returns the clients' vectors `name`, a row for each. A client without one gets `default`."""
    vectors = memory.get(name, {})
    return torch.stack([vectors.get(int(m), default) for m in clients])


def keep(memory: dict, name: str, clients: np.ndarray, rows: Tensor) -> None:
    """Stores copies of the clients' vectors `name` for later rounds."""
    vectors = memory.setdefault(name, {})
    for m, row in zip(clients, rows, strict=True):
        vectors[int(m)] = row.clone()


def lengths(update: Update) -> Tensor:
    """Returns eta ||a_k||_1 (K, 1). w_0 - w_k divided by it is a gradient; plain SGD has eta T.

    In the weights' precision a very small eta would be 0. Then this is the smallest normal number.
    Raises UsageError if a client took no local step, or if SGD did not train it.
    """
    if update.length is None:
        raise UsageError("scaffold, fednova and vrlsgd need SGD: choose another --base")
    if not update.steps.all():
        client = update.clients[update.steps == 0][0]
        raise UsageError(f"client {client} took no local step: leave it out of the round")
    smallest = torch.finfo(update.rows.dtype).tiny
    return update.rows.new_tensor(update.length)[:, None].clamp(min=smallest)
