"""FedCL in Flower, which runs `server` and `client` below. See examples/README.md.

The Strategy selects more clients while FGN, the federated gradient norm, grows
(fedcl_fgn.py). The client trains on its easy samples first (fedavg_curriculum.py).

This is written for the Message API of flwr 1.42. Flower averages by "num-examples", so the clients'
FGN is averaged as in the paper. It selects clients with Python's `random`: seed it for equal runs.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Result
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from data import load_data, partition
from fedavg_curriculum import CurriculumBatchSampler, pacing
from fedcl_fgn import double, halve, is_critical

EPOCHS, B, ETA = 2, 10, 0.05


class FedCL(FedAvg):
    """FedAvg with a number of clients that follows the critical learning periods.

    n_0    clients of the first round
    M      all clients
    delta  growth of FGN that is critical
    """

    def __init__(self, n_0: int, M: int, delta: float = 0.01):
        super().__init__(fraction_train=1e-9, fraction_evaluate=0.0, min_available_nodes=M)
        self.n_0 = n_0
        self.M = M
        self.delta = delta
        self.n = n_0
        self.previous = None  # FGN of the round before

    def configure_train(self, server_round, arrays, config, grid):
        self.min_train_nodes = self.n  # the fraction rounds down to 0, so this is the number
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        if metrics is not None:
            metrics["clients"] = self.n
            if is_critical(self.previous, metrics["fgn"], self.delta):
                self.n = double(self.n, self.M)
            else:
                self.n = halve(self.n, self.n_0)
            self.previous = metrics["fgn"]
        return arrays, metrics


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def load_client(m: int, M: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns samples and labels of client m of M. All clients make the same partition."""
    digits = load_data("digits")
    labels = digits.y_train.numpy()
    shards = partition("dirichlet", labels, M, 0.5, np.random.default_rng(0), min_size=2)
    return digits.images("train")[shards[m]].flatten(1), digits.y_train[shards[m]]


client = ClientApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Local SGD from the received weights, easy samples first. Replies with weights and FGN."""
    m = context.node_config["partition-id"]
    x, y = load_client(m, context.node_config["num-partitions"])
    net = make_net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    n = len(y)
    T = EPOCHS * math.ceil(n / B)
    with torch.no_grad():
        difficulty = F.cross_entropy(net(x), y, reduction="none").numpy()

    def g(step):  # how many of the easiest samples a batch may hold
        return pacing("linear", step, T, n, a=0.8, b=0.2)

    rng = np.random.default_rng([m, message.content["config"]["server-round"]])
    sampler = CurriculumBatchSampler(difficulty, B, T, g, rng)
    sgd = torch.optim.SGD(net.parameters(), lr=ETA)
    g_sq = 0.0
    for inputs, labels in DataLoader(TensorDataset(x, y), batch_sampler=sampler):
        sgd.zero_grad()
        F.cross_entropy(net(inputs), labels).backward()
        sgd.step()
        g_sq += sum(w.grad.square().sum().item() for w in net.parameters()) / T
    metrics = MetricRecord({"fgn": ETA * g_sq, "num-examples": n})
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}
    return Message(RecordDict(content), reply_to=message)


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Federated training. Options come from pyproject.toml, [tool.flwr.app.config]."""
    federate(grid, context.run_config)


def federate(grid: Grid, run_config: dict) -> Result:
    """Returns what Flower's strategy returns: weights, and the metrics of every round."""
    options = {"n-0": 4, "clients": 16, "rounds": 10} | run_config
    torch.manual_seed(0)
    digits = load_data("digits")
    net = make_net()

    def test(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        net.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            hits = net(digits.images("test").flatten(1)).argmax(1) == digits.y_test
        return MetricRecord({"accuracy": 100 * hits.float().mean().item()})

    strategy = FedCL(options["n-0"], options["clients"])
    initial = ArrayRecord(net.state_dict())
    return strategy.start(grid, initial, num_rounds=options["rounds"], evaluate_fn=test)
