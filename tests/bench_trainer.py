"""python tests/bench_trainer.py [--repeats 5] [--only lenet5 lstm ...]

How much faster the stacked trainer is than what federated simulators do, in one run and on the same work: every contestant
trains the same K clients for one epoch on the same samples, in turn, so that a drift of the machine hits all alike. Prints
the median and the range of the per-repeat ratios to the DataLoader loop over images normalised beforehand, then to the one
that starts from uint8 as ours does. Asserts nothing about time; it asserts that stacked and looped weights agree to 1e-10
in float64.

The malloc settings of `common` hold for every contestant, since all run in processes that import it.
"""

import argparse
import multiprocessing
import os
import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common

ETA, RHO, DECAY = 0.01, 0.9, 5e-4


def conv_norm(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(conv_norm(width, width), conv_norm(width, width))

    def forward(self, x):
        return x + self.body(x)


class OrdinaryLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm, self.out = nn.Embedding(80, 256), nn.LSTM(256, 512, 2, batch_first=True), nn.Linear(512, 80)

    def forward(self, x):
        return self.out(self.lstm(self.embedding(x))[0][:, -1])


def ordinary(name: str, channels: int, side: int) -> nn.Module:
    """The net as anyone would write it in torch, parameters in the order of common's."""
    relu, pool = nn.ReLU, lambda: nn.MaxPool2d(2)
    if name == "lenet5":
        flat = 16 * (((side - 4) // 2 - 4) // 2) ** 2
        convs = [nn.Conv2d(channels, 6, 5), relu(), pool(), nn.Conv2d(6, 16, 5), relu(), pool(), nn.Flatten()]
        return nn.Sequential(*convs, nn.Linear(flat, 120), relu(), nn.Linear(120, 84), relu(), nn.Linear(84, 10))
    if name == "alexnet":
        plan = [(channels, 64, 2), (64, 192, 1), (192, 384, 1), (384, 256, 1), (256, 256, 1)]
        convs = [[nn.Conv2d(i, o, 3, s, 1), relu(), *([pool()] if n in (0, 1, 4) else [])] for n, (i, o, s) in enumerate(plan)]
        full = [nn.Flatten(), nn.Linear(1024, 128), relu(), nn.Linear(128, 128), relu(), nn.Linear(128, 10)]
        return nn.Sequential(*sum(convs, []), *full)
    if name == "vgg11":
        layers, i = [], channels
        for o in common.VGG11.plan:
            layers += [pool()] if o == "M" else [nn.Conv2d(i, o, 3, padding=1), relu()]
            i = i if o == "M" else o
        full = [nn.Flatten(), nn.Linear(512, 512), relu(), nn.Linear(512, 512), relu(), nn.Linear(512, 10)]
        return nn.Sequential(*layers, *full)
    if name == "resnet9":
        first = [conv_norm(channels, 64), conv_norm(64, 128), pool(), Residual(128)]
        last = [conv_norm(128, 256), pool(), conv_norm(256, 512), pool(), Residual(512), nn.AdaptiveMaxPool2d(1)]
        return nn.Sequential(*first, *last, nn.Flatten(), nn.Linear(512, 10))
    return OrdinaryLSTM()


class Stored(torch.utils.data.Dataset):
    """A client's samples as published simulators hold them: uint8 images, each normalised when it is read."""

    def __init__(self, work, index):
        self.x, self.y, self.work = work.data.x_train[index], work.data.y_train[index], work

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.work.data.inputs(self.x[None, i : i + 1], self.work.dtype)[0], self.y[i]


class Work:
    """One round: a net, K clients, and an index schedule of one epoch each."""

    def __init__(self, name, channels, side, sizes, batch_size, dtype=torch.float32):
        rng = np.random.default_rng(0)
        n = int(sum(sizes))
        if name == "lstm":
            x = torch.from_numpy(rng.integers(0, 80, (n, common.SEQUENCE)))
            moments = None
        else:
            x = torch.from_numpy(rng.integers(0, 256, (n, side, side, channels)).astype(np.uint8))
            moments = torch.full((channels,), 127.5, dtype=torch.float64)
        y = torch.from_numpy(rng.integers(0, 80 if name == "lstm" else 10, n))
        self.data = common.Data(x, y, x[:10], y[:10], 80 if name == "lstm" else 10, moments, moments)
        shards = np.split(np.arange(n), np.cumsum(sizes)[:-1])
        self.batches = [common.epochs_of_batches(shard, 1, batch_size, rng) for shard in shards]
        self.name, self.channels, self.side, self.dtype, self.batch_size = name, channels, side, dtype, batch_size
        self.model = common.build_model(name, self.data, dtype=dtype, width=128 if name == "alexnet" else 0)
        for module in self.model.skeleton.modules():  # the contestants must draw the same nothing
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(module, nn.LSTM):
                module.dropout = 0.0
        self.theta = self.model.init(0)
        self.resident = self.data.inputs(x[None], dtype).contiguous()
        self.halves = [list(range(len(sizes)))[i::2] for i in (0, 1)]

    def net(self):
        net = ordinary(self.name, self.channels, self.side).to(self.dtype)
        torch.nn.utils.vector_to_parameters(self.theta[: self.model.trainable].clone(), net.parameters())
        return net, torch.optim.SGD(net.parameters(), lr=ETA, momentum=RHO, weight_decay=DECAY)


def dataloader(work, clients):
    """What published simulators do: clients one after the other, a DataLoader each, here over images normalised beforehand."""
    for k in clients:
        index = work.batches[k][work.batches[k] >= 0]
        loop(work, DataLoader(TensorDataset(work.resident[index], work.data.y_train[index]), work.batch_size, shuffle=True))


def stored(work, clients):
    """The same from where ours starts too, uint8 images."""
    for k in clients:
        index = work.batches[k][work.batches[k] >= 0]
        loop(work, DataLoader(Stored(work, index), work.batch_size, shuffle=True))


def loop(work, batches):
    net, optimizer = work.net()
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


def resident(work, clients):
    """The same loop over tensors in memory, without a DataLoader. Returns the weights of each client."""
    weights = []
    for k in clients:
        net, optimizer = work.net()
        for row in work.batches[k]:
            row = torch.from_numpy(row[row >= 0])
            optimizer.zero_grad()
            F.cross_entropy(net(work.resident[row]), work.data.y_train[row]).backward()
            optimizer.step()
        weights.append(torch.nn.utils.parameters_to_vector(net.parameters()).detach())
    return torch.stack(weights)


def ours(work, clients):
    batches = [work.batches[k] for k in clients]
    return common.train(work.model, work.theta, work.data, batches, lr=ETA, momentum=RHO, weight_decay=DECAY).weights


def _begin(arguments):
    torch.set_num_threads(1)
    globals()["WORK"] = Work(*arguments)


def _half(task):
    contestant, half = task
    globals()[contestant](WORK, WORK.halves[half])  # noqa: F821 (set by _begin)


def equal_to_1e_10(arguments) -> float:
    """Largest difference between looped and stacked weights in float64, on shorter shards of the same net."""
    name, channels, side, sizes, batch_size = arguments
    short = [min(int(size), 2 * batch_size + 3) for size in sizes][:3]
    work = Work(name, channels, side, short, batch_size, torch.float64)
    clients = range(len(short))
    looped, stacked = resident(work, clients), ours(work, clients)[:, : work.model.trainable]
    difference = (looped - stacked).abs().max().item()
    assert difference < 1e-10, (name, difference)
    return difference


def contest(title, arguments, repeats) -> None:
    """Times every contestant in turn and prints its row."""
    difference = equal_to_1e_10(arguments)
    work = Work(*arguments)
    everyone = list(range(len(work.batches)))
    with multiprocessing.get_context("spawn").Pool(2, _begin, (arguments,)) as pool:
        contestants = {
            "DataLoader loop": lambda: dataloader(work, everyone),
            "DataLoader loop from uint8": lambda: stored(work, everyone),
            "DataLoader loop, 2 processes": lambda: pool.map(_half, [("dataloader", 0), ("dataloader", 1)], chunksize=1),
            "resident loop": lambda: resident(work, everyone),
            "ours": lambda: ours(work, everyone),
            "ours, 2 processes": lambda: pool.map(_half, [("ours", 0), ("ours", 1)], chunksize=1),
        }
        seconds = {name: [] for name in contestants}
        for repeat in range(repeats + 1):
            for name, contestant in contestants.items():
                begun = time.perf_counter()
                contestant()
                if repeat:  # the first is warm-up
                    seconds[name].append(time.perf_counter() - begun)
    print(f"\n{title}: {len(everyone)} clients, {sum(len(b) for b in work.batches)} steps; float64 difference {difference:.1e}")
    for name, own in seconds.items():
        row = f"  {name:<30} {np.median(own) * 1e3:9.0f} ms"
        for reference in ("DataLoader loop", "DataLoader loop from uint8"):
            ratio = np.array(seconds[reference]) / np.array(own)
            row += f"   {np.median(ratio):5.2f}x ({ratio.min():.2f} to {ratio.max():.2f})"
        print(row, flush=True)
    print(f"  {'arithmetic floor':<30} {floor(work) * 1e3:9.0f} ms")


def floor(work) -> float:
    """Seconds of the round's multiply-adds (forward, and twice that backward) at the speed of a large matrix product."""
    count, hooks = [], []
    net, _ = work.net()
    for module in net.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            per_output = module.weight[0].numel()
            hooks.append(module.register_forward_hook(lambda m, i, o, per=per_output: count.append(o.numel() * per)))
        elif isinstance(module, nn.LSTM):
            per_step = sum(p.numel() for p in module.parameters())
            hooks.append(module.register_forward_hook(lambda m, i, o, per=per_step: count.append(common.SEQUENCE * per)))
    with torch.no_grad():
        net(work.resident[:1])
    a = torch.randn(1024, 1024)
    a @ a
    begun = time.perf_counter()
    for _ in range(5):
        a @ a
    speed = 5 * 1024**3 / (time.perf_counter() - begun)
    return 3 * sum(count) * sum((b >= 0).sum() for b in work.batches) / speed


def first_round() -> None:
    """Launch to the end of the first round, imports included."""
    import subprocess
    import tempfile

    script = Path(__file__).resolve().parent.parent / "fedavg_curriculum.py"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, script, "--rounds=1", "--trials=1", "--order=vanilla", f"--out={folder}"]
        begun = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
    print(f"\nstart-up: {time.perf_counter() - begun:.1f} s from launch to the end of a one-round run, table and figures too")


def many_clients() -> None:
    """Time of a round and peak memory by the number of clients, 10 of them selected."""
    import subprocess
    import tempfile

    script = Path(__file__).resolve().parent.parent / "fedavg_curriculum.py"
    code = "import resource,runpy,sys; sys.argv=sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    code += "; print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    print(f"\n{'clients':>9} {'s / round':>10} {'peak MiB':>9}   (1,100,000 samples of 1x16x16, 10 selected, SCAFFOLD)")
    with tempfile.TemporaryDirectory() as folder:
        rng, path = np.random.default_rng(0), Path(folder) / "many.npz"
        x, y = rng.integers(0, 256, (1_100_000, 16, 16), dtype=np.uint8), rng.integers(0, 10, 1_100_000)
        np.savez(path, x_train=x, y_train=y, x_test=x[:1000], y_test=y[:1000])
        for clients in (100, 1_000, 10_000, 100_000, 1_000_000):
            # the same 11 samples per selected client at every M: what is left out of the partition must not cost anything
            flags = f"--dataset {path} --partition iid --parts 1000000 --clients {clients} --clients-per-round 10 --rounds 20"
            flags += f" --epochs 1 --trials 1 --order vanilla --base scaffold --out {folder}/run"
            done = subprocess.run([sys.executable, "-c", code, script, *flags.split()], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-2000:]
            import json

            seconds = json.loads((Path(folder) / "run" / "summary.json").read_text())["results"][""]["vanilla"]["seconds"][
                "mean"
            ]
            print(f"{clients:>9} {seconds / 20:>10.3f} {int(done.stdout.split()[-1]) / 1024:>9.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=["lenet5", "resnet9", "vgg11", "alexnet", "lstm", "start", "clients"])
    flags = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"command: python {' '.join(sys.argv)}")
    rng = np.random.default_rng(1)
    for channels, side in ((1, 28), (3, 32)) if "lenet5" in flags.only else ():
        for clients in (10, 20):
            contest(
                f"LeNet-5 {channels}x{side}x{side}, equal shards",
                ("lenet5", channels, side, [600] * clients, 10),
                flags.repeats,
            )
        sizes = np.maximum((rng.dirichlet([0.1] * 10, 10).sum(0) * 600).astype(int), 1)
        contest(f"LeNet-5 {channels}x{side}x{side}, Dirichlet(.1) shards", ("lenet5", channels, side, sizes, 10), flags.repeats)
    for name in ("resnet9", "vgg11", "alexnet", "lstm"):
        if name in flags.only:
            contest(name, (name, 3, 32, [32] * 4, 16), flags.repeats)
    if "start" in flags.only:
        first_round()
    if "clients" in flags.only:
        many_clients()


if __name__ == "__main__":
    main()
