"""python tests/bench_trainer.py [--only PART ..] [--write]

How much faster the trainer is than a loop over clients, as federated simulators have it, and how it
compares with pfl-research and PFLlib on their own nets and schedules. All train the same clients,
in turn, so that a drift of the machine hits all alike; printed are medians, and the median and
the range of the ratios of one turn. --write puts each table into results/bench.md between its
marks: no number there is typed by hand. --device cuda prints the tables of a GPU: a plain loop,
torch.func.vmap and JAX, if it is installed, with and without CUDA graphs. --pfl-python
names the Python of an environment with pfl-research (pip install "pfl[pytorch]"); without it its
rows are left out. --before names a checkout of an older commit of ours, measured beside this one.
"""

import argparse
import contextlib
import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import gpu_rivals  # noqa: E402
import ordinary  # noqa: E402

import common  # noqa: E402
import data  # noqa: E402
import experiment  # noqa: E402
import training  # noqa: E402
from nets import build_model  # noqa: E402

PAGE = ROOT / "results" / "bench.md"
SCRIPT = ROOT / "fedavg_curriculum.py"
RIVALS = ROOT / "tests" / "bench_rivals.py"
CORES = os.cpu_count()
SGD = gpu_rivals.SGD
USERS = f"{gpu_rivals.__file__}:UserCNN"


def make_net(name: str, channels: int, side: int) -> torch.nn.Module:
    """As anyone would write it in torch, parameters in the order of ours."""
    nets = {
        "lenet5": lambda: ordinary.lenet(channels, side, 10),
        "resnet9": lambda: ordinary.ResNet9(channels, 10),
        "resnet18": lambda: ordinary.ResNet18(channels, 10),
        "vgg11": lambda: ordinary.vgg11(channels, 10),
        "alexnet": lambda: ordinary.alexnet(channels, 10, 128),
        "lstm": lambda: ordinary.CharLSTM(80, 512),
        USERS: lambda: gpu_rivals.UserCNN(channels, side, 10),
    }
    return nets[name]()


class Work:
    """A round of local training: clients of these sizes, without dropout."""

    def __init__(
        self,
        name,
        channels,
        side,
        sizes,
        batch_size=10,
        norm="batch",
        device="cpu",
        dtype=torch.float32,
        epochs=1,
    ):
        rng = np.random.default_rng(0)
        n = int(sum(sizes))
        self.name = name
        self.data = make_data(rng, n, name == "lstm", channels, side, device)
        width = 128 if name == "alexnet" else 0
        self.model = build_model(name, self.data, device, dtype, width, norm)
        if name != USERS:  # it has none
            ordinary.without_dropout(self.model.layers)
        self.theta = self.model.init(0)
        self.batch_size = batch_size
        self.device = device
        self.batches = []
        for shard in np.split(np.arange(n), np.cumsum(sizes)[:-1]):
            self.batches.append(data.epochs_of_batches(shard, epochs, batch_size, rng))
        self.net = ordinary.without_dropout(make_net(name, channels, side))
        if norm == "group":
            ordinary.use_group_norms(self.net)
        self.net.to(device)
        self.x = self.data.images("train", dtype)
        if name != "lstm":
            self.x = self.x.permute(0, 3, 1, 2).contiguous()

    def loop(self, clients=None):
        """Clients one after the other: a DataLoader each; on a GPU its own memory, faster there."""
        thetas = []
        for batches in self.batches[:clients]:
            net = ordinary.fill(self.net, self.theta).train()
            sgd = torch.optim.SGD(net.parameters(), **SGD)
            samples = torch.from_numpy(batches[batches >= 0]).to(self.device)
            for x, y in self.load(samples):
                sgd.zero_grad()
                F.cross_entropy(net(x), y).backward()
                sgd.step()
            thetas.append(ordinary.flatten(net))
        return torch.stack(thetas)

    def load(self, samples):
        """A client's batches (x, y), on a GPU in the order of the schedule."""
        x = self.x
        y = self.data.y_train
        if self.device == "cuda":
            return ((x[index], y[index]) for index in samples.split(self.batch_size))
        pairs = TensorDataset(x[samples], y[samples])
        return DataLoader(pairs, self.batch_size, shuffle=True)

    def ours(self, chunk=0):
        clients = np.arange(len(self.batches))
        work = self.data, clients, self.batches, training.Local(**SGD)
        return training.train(self.model, self.theta, *work, chunk).gather_thetas()


def make_data(rng, n: int, is_text, channels, side, device, codes=()) -> data.Data:
    """Random samples: what they hold costs nothing."""
    if is_text:
        x = rng.integers(0, 80, (n, data.SEQUENCE))
        y = rng.integers(0, 80, n)
        y[: len(codes)] = codes  # each one occurs
    else:
        x = rng.integers(0, 256, (n, side, side, channels), dtype=np.uint8)
        y = np.arange(n) % 10
    return data.from_arrays(x, y, x[:10], y[:10], device=device)


def time_in_turn(contestants: dict, repeats: int, device="cpu") -> dict[str, np.ndarray]:
    """Each contestant's seconds, in turn, after a warm-up of each."""
    times = {name: [] for name in contestants}
    for turn in range(repeats + 1):
        for name, contestant in contestants.items():
            begun = time.perf_counter()
            contestant()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn > 0:
                times[name].append(time.perf_counter() - begun)
    return {name: np.array(seconds) for name, seconds in times.items()}


def ratio(slow: np.ndarray, fast: np.ndarray) -> str:
    ratios = slow / fast
    return f"{np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})"


def line(*cells) -> str:
    """A row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def head(*cells) -> str:
    return line(*cells) + "\n|" + "---|" * len(cells)


# -------------------------------------------------------------------------------------- on a CPU


def compare(works: dict, repeats: int):
    """A table of the loop and ours."""
    times_as_fast = "times as fast: median of the turns (range)"
    yield head("work", "clients", "steps", "DataLoader loop, ms", "ours, ms", times_as_fast)
    for title, arguments in works.items():
        work = Work(*arguments)
        times = time_in_turn({"loop": work.loop, "ours": work.ours}, repeats)
        loop = times["loop"]
        ours = times["ours"]
        steps = sum(map(len, work.batches))
        milliseconds = [f"{np.median(seconds) * 1e3:.0f}" for seconds in (loop, ours)]
        yield line(title, len(work.batches), steps, *milliseconds, ratio(loop, ours))


def big(flags):
    """Four clients of 32 samples train big models, one client at a time, in batches of 16."""
    n = min(flags.samples or 32, 32)
    nets = {
        "ResNet-9": "resnet9",
        "VGG-11": "vgg11",
        "AlexNet, width 128": "alexnet",
        "LSTM, 80 characters": "lstm",
    }
    works = {}
    for title, name in nets.items():
        works[title] = (name, 3, 32, [n] * 4, min(16, n))
    return compare(works, flags.repeats)


def launch(*command) -> float:
    """Wall time of a Python program."""
    begun = time.perf_counter()
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return time.perf_counter() - begun


ROUND = ["--trials", "1", "--jobs", "1", "--order", "vanilla", "--device", "cpu"]


def start(flags):
    """The seconds last from the command to its end, with imports, tables and figures."""
    yield head("command", "seconds (range)")
    with tempfile.TemporaryDirectory() as folder:
        one_round = [*ROUND, "--rounds", "1", "--out", f"{folder}/run"]
        commands = {
            'python -c "import torch"': ["-c", "import torch"],
            "python fedavg_curriculum.py --help": [SCRIPT, "--help"],
            "the same, one round": [SCRIPT, *one_round],
        }
        for title, words in commands.items():
            times = []
            for _ in range(flags.repeats):
                times.append(launch(*words))
                shutil.rmtree(f"{folder}/run", ignore_errors=True)
            spread = f"{min(times):.1f} to {max(times):.1f}"
            yield line(title, f"{np.median(times):.1f} ({spread})")


def write_data(folder: str, n: int, channels: int, side: int, tests: int) -> str:
    """An .npz of n random training images."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (n + tests, side, side, channels), dtype=np.uint8)
    y = np.arange(n + tests) % 10
    path = f"{folder}/d.npz"
    np.savez(path, x_train=x[tests:], y_train=y[tests:], x_test=x[:tests], y_test=y[:tests])
    return path


# ---------------------------------------------------------------------------------- rivals' work

PFL = {"net": "PflCNN", "clients": 1000, "per_round": 50, "lr": 0.1}
PFLLIB = {"net": "PFLlibCNN", "clients": 20, "per_round": 20, "lr": 0.005}
LENET = {"net": "LeNet5", "clients": 100, "per_round": 10, "lr": 0.01, "momentum": 0.9}


def start_rival(contestant: str, path: str, work: dict, flags, ranks=0, threads=1):
    """A process of bench_rivals.py at `work`."""
    python = flags.pfl_python if contestant == "pfl" else sys.executable
    tree = ROOT
    if contestant == "before":
        contestant = "ours"
        tree = flags.before
    launcher = []
    if ranks:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [python, *launcher, str(RIVALS), contestant, path, f"--device={flags.device}"]
    command += [f"--rounds={flags.rounds or 6}", f"--threads={threads}", f"--tree={tree}"]
    for name, value in work.items():
        command.append(f"--{name.replace('_', '-')}={value}")
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )


def finish_rival(process) -> tuple[float, float]:
    """Seconds a round, without the first round and the last, which is tested; peak MiB."""
    output, _ = process.communicate()
    assert process.returncode == 0, process.args
    ends = [float(end) for end in re.findall(r"^ROUND \d+ ([\d.]+)", output, re.MULTILINE)]
    peaks = [float(peak) for peak in re.findall(r"PEAK (\d+)", output)]
    return float(np.median(np.diff(ends)[1:-1])), max(peaks)


def contestants_here(flags) -> dict[str, tuple]:
    """Title: (contestant, ranks, threads)."""
    if flags.device == "cuda":
        contestants = {"a loop": ("loop", 0, 1), "pfl-research": ("pfl", 0, 1)}
        contestants["ours"] = ("ours", 0, 1)
    else:
        contestants = {
            f"a loop, {CORES} threads": ("loop", 0, CORES),
            f"loops, {CORES} processes": ("loop", CORES, 1),
            f"pfl-research, {CORES} processes": ("pfl", CORES, 1),
            f"ours, {CORES} threads": ("ours", 0, CORES),
            f"ours, torchrun {CORES}": ("ours", CORES, 1),
            "a loop, 1 thread": ("loop", 0, 1),
            "pfl-research, 1 thread": ("pfl", 0, 1),
            "ours, 1 thread": ("ours", 0, 1),
        }
    if not flags.pfl_python:
        contestants = {title: c for title, c in contestants.items() if c[0] != "pfl"}
    if flags.before:
        commit = commit_of(flags.before)
        for title, (contestant, ranks, threads) in list(contestants.items()):
            if contestant == "ours":
                title = title.replace("ours", f"ours at {commit}")
                contestants[title] = ("before", ranks, threads)
    return contestants


def commit_of(tree: str) -> str:
    command = ["git", "-C", tree, "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def measure_in_turn(flags, work: dict, samples: int, channels: int, side: int) -> dict:
    """Each contestant's (seconds a round, peak MiB), of every turn."""
    contestants = contestants_here(flags)
    results = {title: [] for title in contestants}
    with tempfile.TemporaryDirectory() as folder:
        path = write_data(folder, work["clients"] * samples, channels, side, tests=100)
        for _ in range(flags.repeats):
            for title, (contestant, ranks, threads) in contestants.items():
                process = start_rival(contestant, path, work, flags, ranks, threads)
                results[title].append(finish_rival(process))
    return results


def compare_rivals(flags, work: dict, samples: int, channels: int, side: int, rounds: int):
    """A table of all contestants; `rounds` are the rival's own, to which is extrapolated."""
    total = f"{rounds:,} rounds, minutes"
    yield head("how", "seconds a round (range)", total, "peak memory a process, MiB")
    for title, measured in measure_in_turn(flags, work, samples, channels, side).items():
        seconds = [seconds for seconds, _ in measured]
        peak = max(peak for _, peak in measured)
        minutes = np.median(seconds) * rounds / 60
        yield line(title, median_and_range(seconds), f"{minutes:.1f}", f"{peak:.0f}")


def median_and_range(values: list[float]) -> str:
    return f"{np.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def single(flags):
    """Seconds a round of one run: LeNet-5, K of 100 clients of 600 samples, batch 10, one epoch."""
    works = {
        "K=10, 1x28x28": (10, 1, 28),
        "K=20, 1x28x28": (20, 1, 28),
        "K=10, 3x32x32": (10, 3, 32),
    }
    rows = {}
    for K, channels, side in works.values():
        work = LENET | {"per_round": K}
        measured = measure_in_turn(flags, work, flags.samples or 600, channels, side)
        for title, turns in measured.items():
            seconds = [seconds for seconds, _ in turns]
            rows.setdefault(title, []).append(median_and_range(seconds))
    yield head("how", *works)
    for title, cells in rows.items():
        yield line(title, *cells)


def pfl(flags):
    """pfl-research's CIFAR-10 benchmark trains its CNN (1.63 million weights) for 1,500 rounds. In
    a round, 50 of 1,000 clients take 5 steps of batch 10. A few rounds were run, and
    extrapolated."""
    return compare_rivals(flags, PFL, flags.samples or 50, 3, 32, 1500)


def pfllib(flags):
    """PFLlib's quick start trains its CNN (0.58 million weights) for 2,000 rounds. In a round, all
    20 clients train one epoch of 2,625 samples of 1x28x28 in batches of 10. A few rounds were run,
    and extrapolated."""
    return compare_rivals(flags, PFLLIB, flags.samples or 2625, 1, 28, 2000)


STEPS = {  # a net, clients, samples of each, channels, side
    "LeNet-5, K = 10, 1x28x28": ("LeNet5", 10, 200, 1, 28),
    "LeNet-5, K = 10, 3x32x32": ("LeNet5", 10, 200, 3, 32),
    "PFLlib's CNN, 1x28x28": ("PFLlibCNN", 2, 200, 1, 28),
    "pfl-research's CNN, 3x32x32": ("PflCNN", 2, 200, 3, 32),
    "AlexNet, width 128, 3x32x32": ("AlexNet", 2, 200, 3, 32),
}


def step(flags):
    """A local step's time is shown as a fraction of a plain loop's. The loop indexes tensors and
    has torch's own optimizer. CPU time of one thread, batch 10, momentum 0.9; medians of the turns
    (range)."""
    before = f"ours at {commit_of(flags.before)}" if flags.before else "ours once more"
    yield head("model", "plain loop, ms a step", "DataLoader's loop", before, "ours")
    for name, (net, K, samples, channels, side) in STEPS.items():
        samples = flags.samples or samples
        work = {"net": net, "clients": K, "momentum": 0.9}
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            path = write_data(folder, K * samples, channels, side, tests=10)
            here = stack.enter_context(start_turns("ours", path, work, flags))
            before = stack.enter_context(start_turns("before", path, work, flags))
            seconds = {"index": [], "loader": [], "before": [], "ours": []}
            for turn in range(flags.repeats + 1):
                for word in seconds:
                    taken = take_turn(before if word == "before" else here, word)
                    if turn > 0:  # the first one warms up
                        seconds[word].append(taken)
            here.communicate()
            before.communicate()
        steps = K * -(-samples // 10)
        loop = np.array(seconds.pop("index"))
        fractions = [ratio(np.array(times), loop) for times in seconds.values()]
        yield line(name, f"{1e3 * np.median(loop) / steps:.2f}", *fractions)


def start_turns(tree: str, path: str, work: dict, flags) -> subprocess.Popen:
    """A process that waits for words: of this checkout, or of --before."""
    root = flags.before if tree == "before" and flags.before else ROOT
    command = [sys.executable, str(RIVALS), "turns", path, f"--tree={root}"]
    command += [f"--{name}={value}" for name, value in work.items()]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes, env={**os.environ, "OMP_NUM_THREADS": "1"})


def take_turn(process: subprocess.Popen, word: str) -> float:
    """The seconds of one turn."""
    print(word.replace("before", "ours"), file=process.stdin, flush=True)
    return float(process.stdout.readline())


def throughput(flags):
    """As many runs as cores are trained side by side, with one thread each. A run trains LeNet-5
    with 10 of 100 clients of 600 samples, one epoch in batches of 10."""
    yield head(
        "images", "contestant", f"rounds a second of {CORES} runs", "seconds a round and run"
    )
    names = ["loop", "pfl", "ours"] if flags.pfl_python else ["loop", "ours"]
    title = {}
    if flags.before:
        names.append("before")
        title["before"] = f"ours at {commit_of(flags.before)}"
    for channels, side in ((1, 28), (3, 32)):
        seconds = {name: [] for name in names}
        with tempfile.TemporaryDirectory() as folder:
            path = write_data(folder, 100 * (flags.samples or 600), channels, side, tests=100)
            for _ in range(flags.repeats):
                for name in names:
                    runs = [start_rival(name, path, LENET, flags) for _ in range(CORES)]
                    seconds[name] += [finish_rival(run)[0] for run in runs]
        for name in names:
            median = np.median(seconds[name])
            shape = f"{channels}x{side}x{side}"
            rounds = f"{CORES / median:.1f}"
            yield line(shape, title.get(name, name), rounds, f"{median:.3f}")


# -------------------------------------------------------------------------------------- on a GPU


COSTS = ("lenet5 28x28x1", "lenet5 32x32x3", "fedgen-cnn 28x28x1", "fedgen-cnn 84x84x3")
COSTS += ("alexnet 32x32x1", "alexnet 32x32x3", "vgg11 32x32x1", "vgg11 32x32x3")
COSTS += ("resnet9 32x32x3", "resnet18 32x32x1", "resnet18 32x32x3", "lstm 80")


def costs(flags):
    """Milliseconds of CPU time on one core, for experiment/costs.csv: of a client's local step, of
    each of its samples, and of each sample that is only evaluated. The least of the turns."""
    yield head("model", "shape", "step_ms", "sample_ms", "score_ms")
    for work in COSTS:
        name, shape = work.split()
        sizes = [int(size) for size in shape.split("x")]
        side, channels = sizes[0], sizes[-1]
        K = 10 if name in ("lenet5", "fedgen-cnn") else 1  # as stacks do on a CPU
        small = cpu_step(name, channels, side, K, 8, flags.repeats)
        large, score = cpu_step(name, channels, side, K, 32, flags.repeats)
        sample = (large - small[0]) / 24
        cells = (small[0] - 8 * sample, sample, score)
        yield line(name, shape, *(f"{cell:.3g}" for cell in cells))


def cpu_step(name, channels, side, K: int, batch_size: int, repeats: int) -> tuple[float, float]:
    """The milliseconds of a step of one of K clients, and of a test of one of its samples."""
    T = 3
    rng = np.random.default_rng(0)
    n = max(K * T * batch_size, 100)
    samples = make_data(rng, n, name == "lstm", channels, side, "cpu", range(80))
    width = 128 if name == "alexnet" else 0
    model = build_model(name, samples, "cpu", torch.float32, width)
    theta = model.init(0)
    schedule = list(np.arange(K * T * batch_size).reshape(K, T, batch_size))
    local = training.Local(**SGD, seeds=list(range(K)))
    x = samples.images("train", torch.float32)
    trained, tested = [], []
    for _ in range(repeats):
        begun = time.process_time()
        training.train(model, theta, samples, np.arange(K), schedule, local)
        trained.append(time.process_time() - begun)
        begun = time.process_time()
        common.predict(model, theta, x, np.arange(100))
        tested.append(time.process_time() - begun)
    return 1e3 * min(trained) / K / T, 1e3 * min(tested) / 100


GPU_WORKS = {  # a model, channels, side, clients, batch size, norm
    "LeNet-5, 1x28x28": ("lenet5", 1, 28, 10, 10, "batch"),
    "LeNet-5, 3x32x32": ("lenet5", 3, 32, 64, 10, "batch"),
    "AlexNet, width 128": ("alexnet", 3, 32, 16, 16, "batch"),
    "VGG-11": ("vgg11", 3, 32, 16, 16, "batch"),
    "ResNet-9, batch norms": ("resnet9", 3, 32, 16, 16, "batch"),
    "ResNet-9, group norms": ("resnet9", 3, 32, 16, 16, "group"),
    "a user's CNN": (USERS, 3, 32, 20, 10, "batch"),
}
GPU_STEPS = 25
ALONE = 4  # so many clients of a plain loop are timed


def gpu_contestants(work: Work) -> dict:
    """Title: a function that trains the clients, and how many of them. Their steps are equal."""
    K = len(work.batches)
    alone = min(ALONE, K)
    found = {
        "plain loop": (gpu_rivals.plain_loop(work, clients=alone), alone),
        "plain loop, graph": (gpu_rivals.plain_loop(work, True, alone), alone),
        "torch.func.vmap": (gpu_rivals.stacked(work), K),
        "vmap, graph": (gpu_rivals.stacked(work, True), K),
        "ours": (functools.partial(ours_at_once, work), K),
    }
    if gpu_rivals.has_jax() and work.name in ("lenet5", "alexnet"):
        found["JAX, vmap in scan"] = (gpu_rivals.in_jax(work), K)
    return found


def gpu(flags):
    """Milliseconds of a client's local step, for equal clients, with momentum 0.9. A graph is a
    step that is recorded once and replayed. Our first round contains the recording. MiB is the peak
    of the card's memory in ours."""
    columns = ["plain loop", "plain loop, graph", "torch.func.vmap", "vmap, graph"]
    columns += ["JAX, vmap in scan", "ours"]
    rounds = ("first round, s", "later rounds, s", "MiB")
    yield head("model", "clients", *columns, *(f"ours, {what}" for what in rounds))
    for title, (name, channels, side, K, batch_size, norm) in GPU_WORKS.items():
        samples = flags.samples or GPU_STEPS * batch_size
        batch_size = min(batch_size, samples)
        sizes = [samples // batch_size * batch_size] * K
        work = Work(name, channels, side, sizes, batch_size, norm, flags.device)
        first, peak = first_round(work, flags.device)
        contestants = gpu_contestants(work)
        functions = {who: train for who, (train, _) in contestants.items()}
        times = time_in_turn(functions, flags.repeats, flags.device)
        steps = len(work.batches[0])
        cells = []
        for who in columns:
            milliseconds = "-"
            if who in times:
                _, clients = contestants[who]
                milliseconds = f"{1e3 * np.median(times[who]) / clients / steps:.3f}"
            cells.append(milliseconds)
        later = f"{np.median(times['ours']):.3f}"
        yield line(title, K, *cells, f"{first:.3f}", later, f"{peak:.0f}")


def ours_at_once(work: Work):
    """Ours, and for a user's own model --chunk of all clients."""
    return work.ours(len(work.batches) if work.name == USERS else 0)


def first_round(work: Work, device: str) -> tuple[float, float]:
    """The seconds of our first round, and the peak of the card's memory in MiB."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    ours_at_once(work)
    peak = 0
    if device == "cuda":
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() / 2**20
    return time.perf_counter() - begun, peak


def blazefl(flags):
    """BlazeFL's benchmark trains LeNet-5 on images of 3x32x32. In each of five rounds all 100
    clients train five epochs of 500 samples in batches of 50. Published are about 30 s for BlazeFL
    and 92 s for Flower, on an unnamed card and with the tests, which are left out here."""
    samples = flags.samples or 500
    batch_size = min(50, samples)
    sizes = [samples] * 100
    work = Work("lenet5", 3, 32, sizes, batch_size, device=flags.device, epochs=5)
    yield head("round", "seconds")
    total = 0.0
    for t in range(5):
        begun = time.perf_counter()
        work.theta = work.ours().mean(0)
        if flags.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        total += seconds
        yield line(t + 1, f"{seconds:.2f}")
    yield line("all", f"{total:.2f}")


# ------------------------------------------------------------------------------------------ main


def machine(device: str) -> str:
    if device == "cuda":
        return f"Machine: {torch.cuda.get_device_name()}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    instructions = torch.backends.cpu.get_cpu_capability()  # AVX2, AVX512, ..
    cores = f"{platform.machine()} with {instructions}, {CORES} cores, {threads} threads"
    return f"Machine: {cores}, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}"


def write(name: str, table: str) -> None:
    """Puts a table between its marks in the page, or at its end."""
    text = PAGE.read_text() if PAGE.exists() else "# Speed\n"
    block = f"<!-- table: {name} -->\n{table}\n<!-- end: {name} -->"
    old = re.compile(rf"<!-- table: {name} -->.*?<!-- end: {name} -->", re.DOTALL)
    if old.search(text):
        PAGE.write_text(old.sub(lambda _: block, text))
    else:
        PAGE.write_text(f"{text.rstrip()}\n\n{block}\n")


PARTS = {
    "cpu": (step, single, big, start, throughput, pfl, pfllib, gpu, blazefl, costs),
    "cuda": (gpu, blazefl, pfl, pfllib),
}


def main() -> None:
    names = [part.__name__ for part in PARTS["cpu"]]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=PARTS, default="cpu")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART")
    parser.add_argument("--repeats", type=int, default=5, help="turns that are timed [5]")
    parser.add_argument("--samples", type=int, default=0, help="of a client (0: as described)")
    parser.add_argument("--rounds", type=int, default=0, help="of a run (0: as described)")
    parser.add_argument("--pfl-python", help="the Python of an environment with pfl-research")
    parser.add_argument("--before", help="a checkout of an older commit, measured beside this one")
    parser.add_argument("--write", action="store_true", help="into results/bench.md")
    flags = parser.parse_args()
    if 0 < flags.rounds < 4:
        parser.error(f"--rounds {flags.rounds}: choose at least 4, since the first and last differ")
    experiment.keep_heap()  # as every script does: page faults cost up to a third
    command = f"python tests/bench_trainer.py {' '.join(sys.argv[1:])}".strip()
    for path, word in ((flags.pfl_python, "PYTHON"), (flags.before, "CHECKOUT")):
        if path:  # of this machine: no reader's
            command = command.replace(path, word)
    for part in PARTS[flags.device]:
        is_gpus = flags.device == "cpu" and part in (gpu, blazefl, costs)  # on request
        if part.__name__ not in (flags.only or names) or is_gpus and not flags.only:
            continue
        title = f"{' '.join(part.__doc__.split())} {machine(flags.device)}."
        if flags.samples and part in (pfl, pfllib):
            title += (
                f" Here a client has {flags.samples} samples, and the minutes are for such rounds."
            )
        print(f"\n{title}\n")
        lines = []
        for row in part(flags):
            print(row, flush=True)
            lines.append(row)
        if flags.write:
            name = part.__name__ if flags.device == "cpu" else f"{part.__name__} on a GPU"
            write(name, "\n".join([title, "", *lines, "", f"`{command}`"]))


if __name__ == "__main__":
    main()
