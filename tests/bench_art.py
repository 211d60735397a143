"""python tests/bench_art.py [images.npz]: seconds of the clustering, on one thread.

It clusters 5,000 images of 3,072 dimensions in ten classes: of the file (x_train, y_train as in
--dataset), or random smooth ones, whose cost is the same per cluster but not in all.

python tests/bench_art.py examples [FLAGS of fedac_art.py]: no clock, but examples.png in --out
(default: runs/fedac_art). A row for each class of the largest client: eight samples of its smallest
clusters, then eight of its largest.
"""

import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"

import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import common
import experiment
import fedac_art
from data import load_data
from nets import SIDE


def load_images(rng: np.random.Generator, path: str = "") -> tuple[np.ndarray, np.ndarray]:
    """5,000 uint8 images (n, 3072) and their labels (n,)."""
    if path:
        with np.load(path) as file:
            x = file["x_train"]
            y = file["y_train"]
        chosen = rng.permutation(len(x))[:5000]
        return x[chosen].reshape(len(chosen), -1), y[chosen]
    colours = rng.integers(0, 256, (5000, 8, 8, 3), dtype=np.uint8)
    x = colours.repeat(4, 1).repeat(4, 2)
    return x.reshape(5000, -1), rng.integers(0, 10, 5000)


def clock(path: str = "") -> None:
    rng = np.random.default_rng(0)
    x, y = load_images(rng, path)
    for rho in (0.3, 0.35, 0.6):
        seconds = []
        busy = []
        for _ in range(5):
            order = rng.permutation(len(y))
            begun = time.perf_counter()
            busy_before = time.process_time()
            clusters = 0
            for c in np.unique(y):
                _, templates = fedac_art.fuzzy_art(x[order[y[order] == c]], rho)
                clusters += len(templates)
            seconds.append(time.perf_counter() - begun)
            busy.append(time.process_time() - busy_before)
        median = f"median {np.median(seconds):.2f} s, best {min(seconds):.2f} s"
        processor = f"of the processor {np.median(busy):.2f} s"
        print(f"{len(x)} x {x.shape[1]}, rho {rho}: {median}, {processor}, {clusters} clusters")


def examples(x: Tensor, labels, clusters, shard: np.ndarray, across: int = 8) -> np.ndarray:
    """The picture, uint8 (H, W, 3), of at most ten classes of a client; x (n, h, w, C) is uint8."""
    from torchvision.utils import make_grid

    sizes = np.bincount(clusters)[clusters]
    white = torch.full_like(x[:1], 255)
    shown = []
    for c in np.unique(labels[shard])[:10]:
        samples = shard[labels[shard] == c]
        # by size, members of a cluster side by side
        samples = samples[np.lexsort((clusters[samples], sizes[samples]))]
        for part in (samples[:across], samples[::-1][:across]):
            shown.append(x[torch.as_tensor(part.copy())])
            shown += [white] * (across - len(part))
    images = torch.cat(shown).permute(0, 3, 1, 2)
    grid = make_grid(images, nrow=2 * across, padding=1, pad_value=255)
    return grid.permute(1, 2, 0).numpy()


def draw(argv: list[str]) -> None:
    from matplotlib import pyplot

    configs, _ = experiment.parse(fedac_art.Config, fedac_art.PRESETS, fedac_art.__doc__, argv)
    config = configs[0]
    data = load_data(config.dataset, config.data_dir, side=SIDE.get(config.model, 0))
    fl = config.federation(data, common.Streams(config.seed))
    rho = fedac_art.vigilance(config, data)
    m = np.argmax(fl.sizes)
    largest = fl.shards[m]
    rng = fl.streams("presentation", m, 0)
    x = fedac_art.pixels(data)[largest]
    clusters = np.zeros(len(fl.labels), dtype=int)
    clusters[largest] = fedac_art.cluster_client(
        x, fl.labels[largest], rng, rho, config.art_alpha, config.art_beta
    )
    path = Path(config.out or "runs/fedac_art") / "examples.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    pyplot.imsave(path, examples(data.x_train, fl.labels, clusters, largest))
    print(path)


if __name__ == "__main__":
    if sys.argv[1:2] == ["examples"]:
        draw(sys.argv[2:])
    else:
        clock(*sys.argv[1:2])
