"""python tests/bench_art.py [images.npz]: seconds of the clustering of 5,000 images of 3,072 dimensions, on one thread.

Without a file (x_train, y_train as in --dataset) it clusters random smooth images: the cost is the same per cluster, but
the number of clusters is not.
"""

import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"

import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import fedac_art


def images(rng):
    """5,000 uint8 images (n, 3072) and their labels: a random subset of the file's, or blobs of 8x8 colours."""
    if len(sys.argv) > 1:
        with np.load(sys.argv[1]) as file:
            x, y = file["x_train"], file["y_train"]
        kept = rng.permutation(len(x))[:5000]
        return x[kept].reshape(len(kept), -1), y[kept]
    coarse = rng.integers(0, 256, (5000, 8, 8, 3), dtype=np.uint8)
    return coarse.repeat(4, 1).repeat(4, 2).reshape(5000, -1), rng.integers(0, 10, 5000)


def main():
    rng = np.random.default_rng(0)
    x, y = images(rng)
    for rho in (0.3, 0.35, 0.6):
        seconds, busy = [], []
        for _ in range(5):
            begun, busy_before = time.perf_counter(), time.process_time()
            cluster, _ = fedac_art.clustering(x, y, rng.permutation(len(y)), rho, 0.01, 1.0)
            seconds.append(time.perf_counter() - begun)
            busy.append(time.process_time() - busy_before)
        times = f"median {np.median(seconds):.2f} s, best {min(seconds):.2f} s, of the processor {np.median(busy):.2f} s"
        print(f"{len(x)} x {x.shape[1]}, rho {rho}: {times}, {cluster.max() + 1} clusters")


if __name__ == "__main__":
    main()
