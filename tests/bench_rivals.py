"""python tests/bench_rivals.py loop|pfl|ours|turns DATA.npz --net PflCNN --clients 1000

Rounds of federated averaging on the same work: a loop over clients with torch's DataLoader,
pfl-research's simulator, or fedavg_curriculum.py. Prints `ROUND t TIME` at the end of each round
and `PEAK MiB` at the end. Under torchrun, processes share a round's clients. pfl-research wants an
environment of its own (pip install "pfl[pytorch]"), so nothing of this project is imported for it.
DATA.npz holds images x_train and labels y_train, as many of each client. `turns` reads words:
index, loader, ours. For each it trains all clients once, and prints the seconds of CPU time.
bench_trainer.py starts this program.
"""

import argparse
import functools
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

RANK = int(os.environ.get("RANK", "0"))
RANKS = int(os.environ.get("WORLD_SIZE", "1"))

# ------------------------------------------------------------------------------------------- nets


class LeNet5(nn.Sequential):
    """62,006 parameters on 3x32x32."""

    def __init__(self, channels, side, classes):
        flat = 16 * (((side - 4) // 2 - 4) // 2) ** 2
        super().__init__(
            *(nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()),
            nn.Linear(84, classes),
        )


class PflCNN(nn.Sequential):
    """pfl-research's benchmark net: 1,626,442 parameters on 3x32x32."""

    def __init__(self, channels, side, classes):
        flat = 64 * ((side - 4) // 2) ** 2
        super().__init__(
            *(nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten()),
            *(nn.Linear(flat, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, classes)),
        )


class PFLlibCNN(nn.Sequential):
    """PFLlib's CNN: 582,026 parameters on 1x28x28."""

    def __init__(self, channels, side, classes):
        flat = 64 * (((side - 4) // 2 - 4) // 2) ** 2
        super().__init__(
            *(nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(flat, 512), nn.ReLU(), nn.Linear(512, classes)),
        )


class AlexNet(nn.Sequential):
    """Ours with --width 128, in torch's own layers: 2,403,018 parameters on 3x32x32."""

    def __init__(self, channels, side, classes):
        super().__init__(
            *(nn.Conv2d(channels, 64, 3, 2, 1), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Conv2d(64, 192, 3, 1, 1), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Conv2d(192, 384, 3, 1, 1), nn.ReLU(), nn.Conv2d(384, 256, 3, 1, 1), nn.ReLU()),
            *(nn.Conv2d(256, 256, 3, 1, 1), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()),
            *(nn.Dropout(0.05), nn.Linear(1024, 128), nn.ReLU()),
            *(nn.Dropout(0.05), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, classes)),
        )


NETS = {"LeNet5": LeNet5, "PflCNN": PflCNN, "PFLlibCNN": PFLlibCNN, "AlexNet": AlexNet}
OURS = {"LeNet5": "lenet5", "AlexNet": "alexnet"}  # the others are a user's own

# ----------------------------------------------------------------------------------- what they do


def print_round(t: int) -> None:
    if RANK == 0:
        print(f"ROUND {t} {time.time():.6f}", flush=True)


def read_clients(flags) -> list[tuple]:
    """The images (n, C, H, W), normalised, and labels of each client."""
    with np.load(flags.data) as file:
        x = torch.from_numpy(file["x_train"]).permute(0, 3, 1, 2).float().contiguous()
        y = torch.from_numpy(file["y_train"])
    x = (x - 127.5) / 127.5
    x = x.to(flags.device)
    y = y.to(flags.device)
    parts = np.array_split(np.random.default_rng(0).permutation(len(y)), flags.clients)
    return [(x[part], y[part]) for part in parts]


def build_net(flags, clients) -> nn.Module:
    _, channels, side, _ = clients[0][0].shape
    return NETS[flags.net](channels, side, 10).to(flags.device)


def run_loop(flags) -> None:
    """Clients one after the other; on a GPU the batches are cut from its own memory."""
    if RANKS > 1:
        dist.init_process_group("gloo")
    clients = read_clients(flags)
    torch.manual_seed(0)
    net = build_net(flags, clients)
    parameters = list(net.parameters())
    theta = nn.utils.parameters_to_vector(parameters).detach()
    for t in range(flags.rounds):
        selected = np.random.default_rng([0, t]).choice(flags.clients, flags.per_round, False)
        total = torch.zeros_like(theta)
        for m in selected[RANK::RANKS]:
            nn.utils.vector_to_parameters(theta.clone(), parameters)
            train_client(net, clients[m], flags)
            total += nn.utils.parameters_to_vector(parameters).detach() / flags.per_round
        if RANKS > 1:
            dist.all_reduce(total)
        theta = total
        assert torch.isfinite(theta).all()  # which waits for the device
        print_round(t)
    if RANKS > 1:
        dist.destroy_process_group()


def train_client(net: nn.Module, client: tuple, flags, by_index=False) -> None:
    """An epoch of SGD, over a DataLoader or by indexing the tensors."""
    sgd = torch.optim.SGD(net.parameters(), lr=flags.lr, momentum=flags.momentum)
    images, labels = client
    if by_index or flags.device == "cuda":
        order = torch.randperm(len(labels), device=flags.device).split(flags.batch_size)
        batches = ((images[index], labels[index]) for index in order)
    else:
        batches = DataLoader(TensorDataset(images, labels), flags.batch_size, shuffle=True)
    for x, y in batches:
        sgd.zero_grad()
        F.cross_entropy(net(x), y).backward()
        sgd.step()


def run_pfl(flags) -> None:
    """pfl-research's FederatedAveraging in its SimulatedBackend; it finds torchrun by itself."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    clients = read_clients(flags)

    class PflNet(nn.Module):
        """What pfl-research asks of a net."""

        def __init__(self):
            super().__init__()
            self.net = build_net(flags, clients)

        def forward(self, x):
            return self.net(x)

        def loss(self, x, y, eval=False):
            self.train()
            return F.cross_entropy(self(x), y)

        @torch.no_grad()
        def metrics(self, x, y, eval=False):
            self.eval()
            return {"loss": Weighted(F.cross_entropy(self(x), y).item() * len(y), len(y))}

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, metrics, model, *, central_iteration):
            print_round(central_iteration)
            return False, Metrics()

    def shuffled(m):
        x, y = clients[m]
        order = torch.randperm(len(y))
        return PyTorchTensorDataset((x[order], y[order]), user_id=str(m))

    net = PflNet().to(flags.device)
    sgd = functools.partial(torch.optim.SGD, momentum=flags.momentum)
    model = PyTorchModel(net, sgd, torch.optim.SGD(net.parameters(), lr=1.0))
    dataset = FederatedDataset(shuffled, get_user_sampler("random", list(range(flags.clients))))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=flags.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=flags.per_round,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=dataset, val_data=dataset),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=flags.lr, local_num_epochs=1, local_batch_size=flags.batch_size
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )


def run_ours(flags) -> None:
    """fedavg_curriculum.py, whose net is `flags.net` through --model FILE.py:CLASS, or lenet5."""
    sys.path.insert(0, flags.tree)
    import experiment
    import fedavg_curriculum

    record = experiment.Run.record

    def timed_record(run, t, *given, **columns):
        record(run, t, *given, **columns)
        print_round(t)

    experiment.Run.record = timed_record
    net = OURS.get(flags.net, f"{__file__}:{flags.net}")
    launcher = os.getppid() if RANKS > 1 else os.getpid()  # all ranks share a folder
    folder = Path(flags.data).parent / "runs" / str(launcher)
    command = ["--order", "vanilla", "--dataset", flags.data, "--partition", "iid"]
    command += ["--model", net, "--epochs", "1", "--weight-decay", "0", "--trials", "1"]
    command += ["--clients", str(flags.clients), "--clients-per-round", str(flags.per_round)]
    command += ["--batch-size", str(flags.batch_size), "--lr", str(flags.lr)]
    command += ["--momentum", str(flags.momentum), "--rounds", str(flags.rounds)]
    command += ["--eval-every", str(flags.rounds), "--device", flags.device, "--jobs", "1"]
    command += ["--threads", str(flags.threads), "--out", str(folder)]
    fedavg_curriculum.main(command)


def run_turns(flags) -> None:
    """All clients once for each word: a loop that indexes tensors, a DataLoader's, or ours."""
    sys.path.insert(0, flags.tree)
    import data
    import experiment
    import nets
    import training

    experiment.keep_heap()  # as every script does: page faults cost up to a third
    clients = read_clients(flags)
    net = build_net(flags, clients)
    samples = data.load_data(flags.data)
    model = nets.build_model(OURS.get(flags.net, f"{__file__}:{flags.net}"), samples, width=128)
    theta = model.init(0)
    rng = np.random.default_rng(0)
    batches = []
    for shard in np.array_split(np.arange(len(samples.y_train)), flags.clients):
        batches.append(data.epochs_of_batches(shard, 1, flags.batch_size, rng))

    def loop(by_index):
        for client in clients:
            nn.utils.vector_to_parameters(theta.clone(), net.parameters())
            train_client(net, client, flags, by_index)

    def ours():
        local = training.Local(flags.lr, flags.momentum)
        training.train(model, theta, samples, np.arange(flags.clients), batches, local)

    turns = {"index": lambda: loop(True), "loader": lambda: loop(False), "ours": ours}
    for word in sys.stdin:
        begun = time.process_time()
        turns[word.strip()]()
        print(time.process_time() - begun, flush=True)


CONTESTANTS = {"loop": run_loop, "pfl": run_pfl, "ours": run_ours, "turns": run_turns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contestant", choices=CONTESTANTS)
    parser.add_argument("data")
    parser.add_argument("--net", choices=NETS, default="LeNet5")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--per-round", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    root = str(Path(__file__).resolve().parent.parent)
    parser.add_argument("--tree", default=root, help="ours: the checkout that is measured")
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    CONTESTANTS[flags.contestant](flags)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"PEAK {peak:.0f}", flush=True)
    os._exit(0)  # a thread of gloo that still runs would abort the process now and then


if __name__ == "__main__":
    main()
