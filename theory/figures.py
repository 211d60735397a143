"""The six figures of theory/README.md, written as PNG into a folder by `python -m theory.check`.

Black is measured, red (C3) printed, blue (C0) corrected, green (C2) sharp.
"""

import os
from dataclasses import replace

import numpy as np

os.environ["MPLBACKEND"] = "agg"  # whatever it was

import matplotlib.pyplot as plt

from theory import statements
from theory.local_sgd import moments
from theory.statements import LEMMAS, LONG_RUN, SHARP, kinked_problem, ordering_ratio

LOG = {"xscale": "log", "yscale": "log"}
GROWING = {"ylabel": "E growing / E shrinking", "title": "below 1: growing bias wins", "xlabel": "c μ,  steps c / (i + s₀)"}


def draw(axis, curves, ticks=None, one=False, **settings):
    """Draws {label: (x, y, format)}. ticks: the values to label on a logarithmic x axis; one: a thin line at 1."""
    axis.set(**settings)
    for label, curve in curves.items():
        axis.plot(*curve, label=label)
    if one:
        axis.axhline(1, color="gray", lw=0.8)
    if ticks is not None:
        axis.set_xticks(ticks, [f"{value:g}" for value in ticks])
        axis.minorticks_off()


def plot_bounds(axes):
    """Theorem 1 against the number of rounds: where it starts far away, and where only the bias acts."""
    for axis, Q, theta0, start in zip(axes, (4, 1000), (1.0, 0.0), ("far away", "at θ*"), strict=True):
        problem = kinked_problem(Q, T=60, theta0=theta0)
        curves = {
            "measured": (moments(problem).E, "k"),
            "printed": (statements.theorem1_printed(problem)[0], "C3"),
            "corrected by its lemmas": (statements.theorem1(problem, LEMMAS), "C0"),
            "sharp": (statements.theorem1(problem, SHARP), "C2"),
            "sharp, closed form": (statements.theorem1_closed(problem), "C2:"),
        }
        curves = {name: (np.arange(1, 61), E[1:], style) for name, (E, style) in curves.items()}
        draw(axis, curves, yscale="log", xlabel="rounds T", ylabel="E‖θ − θ*‖²", title=f"Q = {Q}, started {start}")


def plot_floor(axes):
    """What the bias leaves on the kinked function, against B, the step and N; and how close the sharp bound comes."""
    B, a, N = 10.0 ** np.arange(-6, 1), 0.08 / 2.0 ** np.arange(5), 2 ** np.arange(1, 7)
    for axis, name, values, ticks, label in (
        (axes[0], "B", B, B[::2], "bias bound B  (slope 1)"),
        (axes[1], "a", a, a, "step α  (slope 2 for small αN)"),
        (axes[2], "N", N[:-1], N[:-1], "local steps N  (exactly 0 at N = 1)"),
    ):
        E, lemmas, sharp = np.transpose([statements.floors(kinked_problem(T=None, **{name: x})) for x in values])
        curves = {"measured": (E, "ko-"), "corrected by its lemmas": (lemmas, "C0s-"), "sharp": (sharp, "C2d-")}
        curves = {name: (values, *curve) for name, curve in curves.items()}
        draw(axis, curves, ticks, **LOG, xlabel=label, ylabel="E‖θ − θ*‖² at the end")
    curves = {}
    for kappa, style in ((10, "o-"), (40, "s-")):
        E, lemmas, sharp = np.transpose([statements.floors(statements.extremal(kappa, 0.02, n)) for n in N])
        curves[f"corrected by its lemmas, L/μ = {kappa}"] = N, lemmas / E, "C0" + style
        curves[f"sharp, L/μ = {kappa}"] = N, sharp / E, "C2" + style
    settings = {"xlabel": "local steps N,  α = .02", "ylabel": "bound / measured floor", "title": "the extremal problem"}
    draw(axes[3], curves, N, one=True, **LOG, **settings)


def plot_ordering(axes):
    """Through the noise: a bias that grows beats the same bias shrinking, at the end, exactly when c mu < 1."""
    left, right = axes
    c, curves = np.geomspace(0.25, 4, 9), {}
    final, mean = np.array([ordering_ratio(x) for x in c]).T
    both = {"at the end": (c, final, "ko-"), "averaged over rounds": (c, mean, "C1o-")}
    draw(left, both, [0.25, 0.5, 1, 2, 4], one=True, **LOG, **GROWING)
    left.axvline(1, color="gray", lw=0.8)
    for x, color in ((0.5, "C0"), (2.0, "C3")):
        for E, name, style in zip(statements.ordered(x), ("growing", "shrinking"), ("-", "--"), strict=True):
            curves[f"{name}, c μ = {x:g}"] = np.arange(1, len(E) + 1), E, color + style
    draw(right, curves, **LOG, xlabel="rounds", ylabel="E‖θ − θ*‖²", title="the same total bias in two orders")


def plot_ties(axes):
    """Both channels: the ratio against c mu, and the lines on which growing and shrinking biases tie."""
    left, right = axes
    c_mu = np.geomspace(0.5, 4, 7)
    curves = {"noise, quadratic f": (c_mu, [ordering_ratio(x)[0] for x in c_mu], "ko-")}
    for kappa, style in ((1.5, "C2s-"), (10.0, "C0s-")):
        ratios = [ordering_ratio(x * kappa, mu=1 / kappa, L=1.0)[0] for x in c_mu]
        curves[f"drift, kinked f, L/μ = {kappa:g}"] = c_mu, ratios, style
    curves["drift, smooth f (c f″)"] = c_mu, [ordering_ratio(x, bend=0.9)[0] for x in c_mu], "C1^-"
    draw(left, curves, [0.5, 1, 2, 4], one=True, **LOG, **GROWING)
    left.set_yticks([0.01, 0.1, 1, 5], ["0.01", "0.1", "1", "5"])
    kappa, measured = np.geomspace(1, 10, 100), [1.1, 1.5, 2.0, 3.0, 5.0, 10.0]
    curves = {"tie through the drift at a kink, c μ = 1 + μ/L": (kappa, 1 + 1 / kappa, "C2")}
    curves["measured"] = measured, [statements.drift_tie(x) for x in measured], "C2s"
    draw(right, curves, [1, 2, 3, 5, 10], xscale="log", xlabel="L / μ", ylabel="c μ", ylim=(0.8, 2.1), title="who ends lower")
    right.axhline(1, color="k", label="tie through the noise, c μ = 1")
    right.text(2.6, 0.88, "the growing bias wins in both", fontsize=8)
    right.text(1.03, 1.08, "growing wins through the drift,\nshrinking through the noise", fontsize=8)
    right.text(3.3, 1.55, "the shrinking bias wins in both", fontsize=8)


def plot_ergodic(axes):
    """Theorem 2: both sides as T grows, and the 1/sqrt T rate that survives."""
    left, right = axes
    gradient, curves = moments(LONG_RUN).gradient, {}
    T = np.unique(np.geomspace(1, LONG_RUN.T, 30).astype(int))
    shorter = [replace(LONG_RUN, steps=LONG_RUN.steps[: t + 1], B=0.0) for t in T]
    for name, weighted, form, color in (("printed, unweighted", False, 0, "C3"), ("corrected, weighted by α", True, 2, "C0")):
        sums = [statements.ergodic_sum(problem, gradient[: problem.T + 1], weighted) for problem in shorter]
        curves[f"{name}: left side"] = T, sums, color
        curves[f"{name}: right side"] = T, [statements.theorem2(problem)[form] for problem in shorter], color + "--"
    settings = {"ylim": (1e-5, 5e2), "xlabel": "rounds T", "title": "solid must stay below dashed"}
    draw(left, curves, **LOG, ylabel="the two sides of Theorem 2", **settings)
    T = np.array([30, 100, 300, 1000])
    rates = [statements.ergodic_rate(t) for t in T]
    curves = {"measured, biased and noisy": (T, rates / np.sqrt(T), "ko")}
    draw(right, curves, T, **LOG, xlabel="rounds T", ylabel="average ‖∇f‖²", title="α = 0.3 / √T")
    right.plot(T, np.mean(rates) / np.sqrt(T), color="gray", label=f"{np.mean(rates):.2f} / √T")
    right.set_yticks([0.05, 0.1, 0.2], ["0.05", "0.1", "0.2"])


def plot_spectra(axes):
    """lambda_min of every network on easy, all and hard samples: the initial objective, and after 1000 steps."""
    for axis, steps, title in zip(axes, (0, 1000), ("the initial objective", "after 1000 steps"), strict=True):
        lowest, _ = statements.convexity(steps)
        for values, name, color in zip(lowest[lowest[:, 1].argsort()].T, ("easy", "all", "hard"), "bkr", strict=True):
            axis.plot(values, "o", ms=4, color=color, label=name)
        axis.axhline(0, color="gray", lw=0.8)
        axis.set_xticks(range(0, len(lowest), 5))
        axis.set(xlabel="network, sorted by λ_min on all", ylabel="λ_min of the Hessian", title=title)


FIGURES = {  # name: (rows of two panels, what draws into them)
    "bounds.png": (1, plot_bounds),
    "floor.png": (2, plot_floor),
    "ordering.png": (1, plot_ordering),
    "ties.png": (1, plot_ties),
    "ergodic.png": (1, plot_ergodic),
    "spectra.png": (1, plot_spectra),
}


def save(path):
    """Draws and writes the figure of that name; no date or version in the file: the same numbers give the same bytes."""
    rows, plot = FIGURES[path.name]
    figure, axes = plt.subplots(rows, 2, figsize=(9.2, 3.8 * rows), layout="constrained")
    plot(axes.ravel())
    for axis in figure.axes:
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
