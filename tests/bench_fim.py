"""python tests/bench_fim.py cost | agreement [flags of fedcl_fgn.py]

cost        Fig 16: seconds and peak memory a round of FGN in its readings and of FedFIM, on the
            paper's four pairs of net and data (arrays of that shape; what they hold costs nothing),
            beside those of the training they stand in
agreement   Figs 1, 18: how often Eq. 2 calls the same rounds critical on both signals along one
            trajectory of pinned size. Read on the same clients they also share these clients'
            noise, so FedFIM is read on others, too
"""

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: E402
import experiment  # noqa: E402
import fedcl_fgn as fgn  # noqa: E402
import nets  # noqa: E402
import training  # noqa: E402
from data import Data, epochs_of_batches, from_arrays, load_data  # noqa: E402

# ------------------------------------------------------------------------------------------- cost


def fully_connected(channels, side, classes, width):
    """The FC of M+F; the paper does not say which: 200, 200, classes."""
    flat = channels * side**2
    body = [nets.Linear(flat, 200), nn.ReLU(), nets.Linear(200, 200), nn.ReLU()]
    return nets.Net(body, nets.Linear(200, classes))


PAIRS = {  # net, channels, side
    "C+A": (nets.alexnet, 3, 32),
    "C+V": (nets.vgg11, 3, 32),
    "M+F": (fully_connected, 1, 28),
    "F+A": (nets.alexnet, 1, 32),
}


def make_pair(name: str, n: int, device: str, width: int) -> tuple[nets.Model, Data]:
    """A net of Fig 16 and n random images of its data's shape, of ten classes."""
    build, channels, side = PAIRS[name]
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (n, side, side, channels), dtype=np.uint8)
    y = np.arange(n) % 10
    model = nets.Model(lambda: build(channels, side, 10, width), device)
    return model, from_arrays(x, y, x[:10], y[:10], device=device)


def clock(device: str) -> float:
    if device == "cuda":  # kernels run behind Python's back
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(work: Callable, device: str) -> tuple[float, float]:
    """(seconds, most MiB of new tensors alive at once, by the allocator's account) of work()."""
    begun = clock(device)
    work()
    seconds = clock(device) - begun
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return seconds, (torch.cuda.max_memory_allocated() - before) / 2**20
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    events = profile.profiler.kineto_results.events()
    events = [event for event in events if event.name() == "[memory]"]
    events = sorted(events, key=lambda event: event.start_ns())
    alive = np.cumsum([0, *(event.nbytes() for event in events)])
    return seconds, float(alive.max()) / 2**20


def norms_of_batches(gradients: torch.Tensor, steps: int) -> None:
    """What FGN of batches adds to the steps: the squared norm of each gradient (K, P)."""
    for _ in range(steps):
        torch.linalg.vector_norm(gradients, dim=1).square()


def cost(
    names: Sequence[str],
    clients: int,
    samples: int,
    batch_size: int,
    epochs: int,
    device: str,
    width: int,
) -> pd.DataFrame:
    """A round of `clients` that hold `samples` each: seconds and MiB of each work, by pair."""
    rows = []
    for name in names:
        for what, work in make_works(name, clients, samples, batch_size, epochs, device, width):
            work()  # warm
            seconds, memory = measure(work, device)
            rows.append({"pair": name, "what": what, "seconds": seconds, "MiB": memory})
    table = pd.DataFrame(rows).set_index(["pair", "what"])
    for reading in ("batch", "per_sample"):
        seconds = table.xs(f"FGN {reading}", level="what").seconds
        of_pair = seconds.reindex(table.index, level="pair")
        table[f"time / FGN {reading}"] = table.seconds / of_pair
    return table


def make_works(name, clients, samples, batch_size, epochs, device, width) -> list[tuple]:
    """Training, and what each reading of the signals adds to it."""
    model, data = make_pair(name, clients * samples, device, width)
    theta = model.init(0)
    everything = np.arange(clients * samples)
    batches = []
    for shard in everything.reshape(clients, samples):
        batches.append(epochs_of_batches(shard, epochs, batch_size, np.random.default_rng(0)))
    at_once = min(clients, model.clients_at_once())
    steps = len(batches[0]) * -(-clients // at_once)
    gradients = torch.randn(at_once, model.trainable, device=device)  # as the trainer holds them
    local = training.Local(lr=0.01)
    m = np.arange(clients)
    train = functools.partial(training.train, model, theta, data, m, batches, local)
    single = functools.partial(training.squared_gradients, model, theta, data, everything)
    fisher = functools.partial(training.fisher_traces, model, theta, data, everything)
    return [
        ("training", train),
        ("FGN batch", functools.partial(norms_of_batches, gradients, steps)),
        ("FGN per_sample", single),
        ("FedFIM", fisher),
    ]


# -------------------------------------------------------------------------------------- agreement


def follow(config: fgn.Config, data: Data, trial: int) -> pd.DataFrame:
    """A run of the base at --clients-per-round: by round, FGN on the clients that train, and both
    signals at the received net, on these (`same`) and on as many of the others (`other`)."""
    fl = common.Federation(config, data, common.Streams(config.seed, trial))
    n = config.clients_per_round
    state = fl.start()
    rows = []
    for t in range(config.rounds):
        clients = fl.select(t, n)
        eta = config.lr * config.lr_decay**t
        others = np.setdiff1d(fl.select(t, 2 * n), clients)  # draws are nested
        theta = state["theta"]
        row = {"trial": trial, "round": t + 1}
        for which, drawn in (("same", clients), ("other", others)):
            single = fgn.client_means(config, fl, t, theta, drawn, training.squared_gradients)
            traces = fgn.client_means(config, fl, t, theta, drawn, training.fisher_traces)
            p = fl.proportions(drawn)
            row[f"fgn per_sample {which}"] = eta * p @ single
            row[f"fim {which}"] = p @ traces
        batches = fl.batches(t, clients, config.epochs)
        update = fl.train(state, t, clients, batches, lr=eta, grad_norms=True)
        row["fgn batch same"] = eta * fl.proportions(clients) @ update.grad_sq
        state["theta"] = fl.aggregate(state, update)
        rows.append(row)
    return pd.DataFrame(rows)


def agreement(signals: pd.DataFrame, config: fgn.Config) -> pd.DataFrame:
    """For every pair of signals (columns): the share of rounds from the second on that Eq. 2 calls
    alike, that share by chance, and how far the one lies above the other, Cohen's kappa."""
    verdicts = {}
    for name in signals.columns.drop(["trial", "round"]):
        verdicts[name] = judge_rounds(signals, name, config.delta)
    rows = []
    for a, b in itertools.combinations(sorted(verdicts), 2):
        alike = np.mean(verdicts[a] == verdicts[b])
        p = verdicts[a].mean()
        q = verdicts[b].mean()
        chance = p * q + (1 - p) * (1 - q)
        kappa = np.nan
        if chance < 1:
            kappa = (alike - chance) / (1 - chance)
        rows.append((a, b, alike, chance, kappa, p, q))
    columns = ["signal", "and", "alike", "by chance", "kappa", "critical", "critical "]
    return pd.DataFrame(rows, columns=columns).set_index(["signal", "and"])


def judge_rounds(signals: pd.DataFrame, name: str, delta: float) -> np.ndarray:
    """Whether each round but a trial's first is critical."""
    verdicts = []
    for _, trial in signals.groupby("trial"):
        values = trial[name].tolist()
        for previous, value in itertools.pairwise(values):
            verdicts.append(fgn.is_critical(previous, value, delta))
    return np.array(verdicts)


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("cost", "agreement"))
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), choices=PAIRS)
    parser.add_argument("--cost-clients", type=int, default=4)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--csv", type=Path, help="write the table here")
    given, flags = parser.parse_known_args(argv)
    [config], _ = experiment.parse(fgn.Config, fgn.PRESETS, "doc", [*flags, "--method", "base"])
    device = "cuda" if torch.cuda.is_available() and config.device != "cpu" else "cpu"
    torch.set_num_threads(config.threads or torch.get_num_threads())
    experiment.keep_heap()  # as every script does: page faults were half of AlexNet's time
    if given.what == "cost":
        sizes = (given.cost_clients, given.samples, config.batch_size, config.epochs)
        table = cost(given.pairs, *sizes, device, config.width)
    else:
        side = nets.SIDE.get(config.model, 0)
        data = load_data(config.dataset, config.data_dir, device, side)
        trials = [follow(config, data, trial) for trial in range(config.trials)]
        table = agreement(pd.concat(trials), config)
    print(table.to_string(float_format="%.3f"))
    if given.csv:
        table.to_csv(given.csv)


if __name__ == "__main__":
    main()
