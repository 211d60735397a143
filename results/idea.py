"""python -m results.idea [--data-dir FOLDER]

Plots results/idea.png, the ideas of the papers in one picture, from real runs (five minutes):

1. The images of one client of Fashion-MNIST, sorted by their loss under FedAvg's model after
   60 rounds, and the batches that the data curriculum selects from them (fedavg_curriculum.py).
2. What 24 clients hold if a Dirichlet distribution with alpha 0.1 divides some of these images.
3. FGN and the number of clients in ten trials of `python fedcl_fgn.py --alpha 0.1`, on digits.
"""

import argparse
import tempfile

import matplotlib
import numpy as np
import pandas as pd
from PIL import Image

import fedavg_curriculum as paper
import fedcl_fgn
from common import Federation, Streams
from data import epochs_of_batches, load_data, partition
from results.evidence import FOLDER

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  after the backend is chosen

BLUE = "#1f5fa8"
LIGHT = "#cfdff0"
ORANGE = "#c85a00"
COLORS = plt.get_cmap("tab10").colors
STYLE = {
    "font.size": 11.5,
    "axes.titlesize": 12.5,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
FEDCL = "--alpha 0.1 --method cl --trials 10"
CONFIG = paper.Config(dataset="fmnist", clients=400, alpha=1.0, batch_size=10, lr=0.01)
ROUNDS = 60
SHOWN = 12  # images of the client
HELD = 1200  # images that are divided among the clients of the second panel


def train(data) -> tuple[Federation, dict]:
    """Returns a federation after ROUNDS rounds of FedAvg, and its state."""
    fl = Federation(CONFIG, data, Streams(0))
    state = fl.start()
    for t in range(ROUNDS):
        clients = fl.select(t, 40)
        batches = []
        for m in clients:
            rng = fl.streams("batches", t, m)
            batches.append(epochs_of_batches(fl.shards[m], 1, CONFIG.batch_size, rng))
        update = fl.train(state, t, clients, batches)
        state["theta"] = fl.aggregate(state, update)
    return fl, state


def draw_samples(strip, steps, fl: Federation, state: dict) -> None:
    """Plots images from easy to hard, and below them the batch of each local step."""
    distances = np.abs(fl.sizes - 100)
    m = int(np.argmin(distances))
    [(losses, _)] = fl.score(state["theta"], np.array([m]))
    samples = fl.shards[m][np.argsort(losses)]
    N = len(samples)
    places = np.linspace(0, N - 1, SHOWN).astype(int)
    images = picture(fl.data, samples[places])
    strip.imshow(np.hstack(images), cmap="gray", aspect="auto")
    strip.axis("off")
    strip.set_title("1  A curriculum: a client trains on its easy samples first", loc="left")

    batches = paper.draw_client_batches(CONFIG, fl, 0, m, losses, paper.easy_first)
    T = len(batches)
    ranks = np.zeros(len(fl.labels), dtype=int)
    ranks[samples] = np.arange(N)
    admitted = []
    for step in range(T):
        g = paper.pacing(CONFIG.pacing, step, T, N, CONFIG.pacing_a, CONFIG.pacing_b)
        admitted.append(g)
    every_step = np.arange(T)
    steps.set_facecolor("0.93")
    steps.fill_betweenx(every_step, 0, admitted, step="mid", color=LIGHT, linewidth=0)
    steps.plot(ranks[batches], every_step, ".", color=BLUE, markersize=3.5)
    steps.set(xlim=(0, N), ylim=(T - 0.5, -0.5), xticks=(), yticks=(0, T - 1))
    steps.set(yticklabels=("first\nstep", "last\nstep"))
    below = {"va": "top", "transform": steps.transAxes}
    steps.text(0, -0.02, "easy (small loss)", **below)
    steps.text(1, -0.02, "hard (large loss)", ha="right", **below)
    steps.text(0.5, -0.02, "blue: admitted; dots: selected, at random", ha="center", **below)
    steps.text(0.98, 0.8, "not yet admitted", ha="right", color="0.35", **below)


def picture(data, samples: np.ndarray) -> np.ndarray:
    """Returns these images (n, H, W), dark on white."""
    images = data.x_train[samples, :, :, 0].numpy()
    return images.max() - images


def draw_clients(axis, data) -> None:
    """Plots what 24 clients hold, and an image of each class as the key to the colours."""
    labels = data.y_train.numpy()[:HELD]
    shards = partition("dirichlet", labels, 24, 0.1, np.random.default_rng(5), min_size=3)
    shards.sort(key=len, reverse=True)
    heights = np.arange(len(shards))
    left = np.zeros(len(shards))
    for label, color in enumerate(COLORS):
        counts = [(labels[shard] == label).sum() for shard in shards]
        axis.barh(heights, counts, left=left, color=color, height=0.8)
        left += counts
        row, column = divmod(label, 5)
        corner = (0.5 + 0.1 * column, 0.3 - 0.27 * row)
        key = axis.inset_axes((*corner, 0.09, 0.22))
        first = np.flatnonzero(labels == label)[0]
        key.imshow(picture(data, [first])[0], cmap="gray")
        key.set(xticks=(), yticks=())
        key.spines[:].set(color=color, linewidth=3, visible=True)
    axis.invert_yaxis()
    axis.set(yticks=(), xlabel="samples", ylabel="clients")
    axis.set_title("2  Clients hold different samples", loc="left")


def draw_selection(above, below, folder: str) -> None:
    """Plots FGN and the number of clients: each trial, and the mean."""
    rounds = pd.read_csv(f"{folder}/metrics.csv")
    for axis, column, color in ((above, "fgn", ORANGE), (below, "clients", BLUE)):
        table = rounds.pivot(index="round", columns="trial", values=column)
        mean = table.mean(axis=1)
        axis.plot(table, color=color, linewidth=0.6, alpha=0.3)
        axis.plot(mean, color=color, linewidth=2.5)
        axis.set_ylim(0, 1.7 * mean.max())
    above.set(xticks=(), ylabel="gradient\nnorm")
    below.set(xlabel="round of ten runs, and their mean", ylabel="clients", ylim=(0, 135))
    above.set_title("3  Gradients grow: more clients", loc="left")


def main(data_dir: str) -> None:
    """Trains, and plots the picture."""
    data = load_data("fmnist", data_dir)
    plt.rcParams.update(STYLE)
    figure = plt.figure(figsize=(8.4, 6.8))
    upper = figure.add_gridspec(2, 1, height_ratios=(1, 2), hspace=0.05)
    upper.update(left=0.09, right=0.98, top=0.95, bottom=0.51)
    lower = figure.add_gridspec(2, 2, hspace=0.12, wspace=0.25)
    lower.update(left=0.09, right=0.98, top=0.4, bottom=0.08)
    strip, steps = upper.subplots()
    draw_samples(strip, steps, *train(data))
    draw_clients(figure.add_subplot(lower[:, 0]), data)
    above = figure.add_subplot(lower[0, 1])
    below = figure.add_subplot(lower[1, 1])
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/run"
        fedcl_fgn.main([*FEDCL.split(), "--out", out])
        draw_selection(above, below, out)
    figure.savefig(FOLDER / "idea.png", dpi=120)
    with Image.open(FOLDER / "idea.png") as image:
        light = image.convert("RGB").quantize(96)
    light.save(FOLDER / "idea.png", optimize=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default="data", help="of Fashion-MNIST, downloaded if absent")
    main(parser.parse_args().data_dir)
