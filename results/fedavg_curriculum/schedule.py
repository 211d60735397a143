"""python -m results.fedavg_curriculum.schedule --order curriculum shuffled weighted vanilla

Plots schedule.png, and trains nothing. At the top is g of the five families of pacing functions
(Fig. 9 of the paper). Below is what one client of 500 samples sees under each order. A column is a
local step. The colour is a sample's rank by difficulty. It is paler where the loss weighs less.
Also prints how often an order visits the easiest .. hardest fifth of the samples.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import common
import experiment
import fedavg_curriculum as paper
from errors import UsageError
from results.fedavg_curriculum import exposure

N = 500
DIFFICULTY = -np.log1p(-np.arange(N) / N)  # exponential: few samples are hard
Config = exposure.Config
PRESETS = {
    "fig9": "--order curriculum anti random vanilla --epochs 10  # g, and what a client sees",
}


def draw_schedule(configs: list, swept: list[str], folder: Path) -> None:
    """Plots schedule.png: a panel for each config, below the panel of the pacing functions.

    swept  the options in which the configs differ. They name the panels
    """
    from matplotlib import pyplot

    first = configs[0]
    rows = 1 + len(configs)
    size = (8, 2 + 1.1 * len(configs))
    figure, axes = pyplot.subplots(rows, figsize=size, sharex=True, layout="constrained")
    plot_pacing(first, axes[0])
    axes[0].set_title(
        f"a = {first.pacing_a}, b = {first.pacing_b}; below: {first.pacing} pacing, {N} samples"
    )
    for config, ax in zip(configs, axes[1:], strict=True):
        batches, weights = draw_client_batches(config)
        image = show(batches, weights, ax)
        others = [f"{name}={getattr(config, name)}" for name in swept if name != "order"]
        name = " ".join([paper.name(config), *others])
        ax.set(ylabel=name.replace(" ", "\n"), yticks=[])
        visits = " ".join(f"{v:5.1f}" for v in visits_of_fifths(batches, weights))
        print(f"{name:<16} visits by fifth, easiest first: {visits}")
    axes[-1].set(xlabel="local step")
    figure.colorbar(image, ax=axes[1:], label="difficulty, 0 = easiest")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "schedule.png", dpi=150)
    pyplot.close(figure)


def plot_pacing(config, ax) -> None:
    """Plots g of each family, at every local step of a client of N samples."""
    T = config.epochs * -(-N // config.batch_size)
    for family in paper.PACINGS:
        g = [
            paper.pacing(family, step, T, N, config.pacing_a, config.pacing_b) for step in range(T)
        ]
        ax.plot(g, label=family)
    ax.set(ylabel="g")
    ax.legend(ncols=5, fontsize="x-small")


def draw_client_batches(config) -> tuple:
    """Returns the client's batches and weights, (T, B) each: sample i is the i-th easiest.

    An order that needs no difficulty gets none, as in `score_samples`.
    """
    shard = np.arange(N)
    streams = common.Streams(config.seed)
    fl = SimpleNamespace(shards=[shard], sizes=[N], labels=shard, streams=streams, config=config)
    difficulty = DIFFICULTY if paper.is_scored(config) else np.zeros(N)
    order, _ = paper.find_functions(config)
    batches = paper.draw_client_batches(config, fl, 0, 0, difficulty, order)
    if config.order == "weighted":
        return exposure.weigh(fl, 0, 0, batches)
    return batches, np.ones(batches.shape)


def show(batches: np.ndarray, weights: np.ndarray, ax):
    """Returns an image: a column is a step, sorted by difficulty; padding stays blank."""
    ranks = np.where(batches < 0, np.nan, batches / N)
    places = np.argsort(batches, axis=1)
    ranks = np.take_along_axis(ranks, places, axis=1)
    opacity = np.take_along_axis(weights / weights.max(), places, axis=1)
    options = {"aspect": "auto", "origin": "lower", "interpolation": "nearest"}
    return ax.imshow(ranks.T, alpha=opacity.T, vmin=0, vmax=1, **options)


def visits_of_fifths(batches: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns (5,): mean visits of a sample, by weight, in the easiest .. hardest fifth."""
    drawn = batches >= 0
    visits = np.bincount(batches[drawn], weights[drawn], minlength=N)
    return visits.reshape(5, -1).mean(1)


def main(argv=None) -> None:
    """Runs the command line. Tests pass its words as `argv`."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        configs, swept = experiment.parse(Config, PRESETS, __doc__, argv)
        draw_schedule(configs, swept, Path(configs[0].out or "results/fedavg_curriculum"))
    except UsageError as error:
        experiment.stop(2, f"error: {error}")
    except OSError as error:
        experiment.stop(5, f"error: {error}")


if __name__ == "__main__":
    main()
