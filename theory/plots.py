"""The five figures of theory/README.md, written as PNG into a folder by `python -m theory.check`."""

from dataclasses import replace

import matplotlib
import numpy as np

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from theory import bounds, problems
from theory.local_sgd import exact_moments, simulate

MEASURED, PRINTED, CORRECTED, OTHER = "black", "tab:red", "tab:blue", "tab:orange"


def panels(count):
    """A row of `count` axes."""
    figure, axes = plt.subplots(1, count, figsize=(4.6 * count, 3.8), layout="constrained")
    return figure, axes


def plain_ticks(axis, values):
    """Labels a logarithmic x axis at the given values only."""
    axis.set_xticks(values, [f"{value:g}" for value in values])
    axis.minorticks_off()


def save(figure, path):
    """Writes and closes the figure; no date or version in the file, so that the same numbers give the same bytes."""
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def plot_bounds(out):
    """Theorem 1 against the number of rounds: where it starts far away, and where only the bias acts."""
    figure, axes = panels(2)
    for axis, Q, theta0 in zip(axes, (4, 1000), (1.0, 0.0), strict=True):
        problem = problems.kinked_problem(Q, T=60, theta0=theta0)
        T = np.arange(1, problem.T + 1)
        axis.plot(T, simulate(problem).E[1:], color=MEASURED, label="measured")
        axis.plot(T, bounds.theorem1_printed(problem)[1:], color=PRINTED, label="printed")
        axis.plot(T, bounds.theorem1_corrected(problem)[1:], color=CORRECTED, label="corrected")
        axis.plot(T, bounds.theorem1_closed(problem)[1:], color=CORRECTED, ls=":", label="corrected, closed form")
        start = "far away" if theta0 else "at θ*"
        axis.set(yscale="log", xlabel="rounds T", ylabel="E‖θ − θ*‖²", title=f"Q = {Q}, started {start}")
        axis.legend(fontsize=8)
    save(figure, out / "bounds.png")


def plot_floor(out):
    """What the bias leaves on the kinked function, against B, the step and the number of local steps."""
    figure, axes = panels(3)
    sweeps = (
        ("B", 10.0 ** np.arange(-6, 1), "bias bound B  (slope 1)"),
        ("a", 0.08 / 2.0 ** np.arange(5), "step α  (slope 2 for small αN)"),
        ("N", np.array([2, 4, 8, 16, 32]), "local steps N  (exactly 0 at N = 1)"),
    )
    for axis, (name, values, label) in zip(axes, sweeps, strict=True):
        floors = [problems.floor(**{name: v}) for v in values]
        certified = [certified_floor(**{name: v}) for v in values]
        axis.loglog(values, floors, "o-", color=MEASURED, label="measured")
        axis.loglog(values, certified, "s-", color=CORRECTED, label="corrected bound")
        axis.set(xlabel=label, ylabel="E‖θ − θ*‖² at the end")
        plain_ticks(axis, values[::2] if name == "B" else values)
        axis.legend(fontsize=8)
    save(figure, out / "floor.png")


def certified_floor(a=1 / 12, B=1e-4, N=10):
    """The fixed point floor / (1 - contraction) of the better certificate on the kinked problem."""
    problem = problems.kinked_problem(a=a, B=B, N=N, T=1)
    pairs = (bounds.certificate(problem, 0, form) for form in ("contraction", "growth"))
    return min(rest / (1 - contraction) for contraction, rest in pairs)


def plot_ordering(out):
    """The law: a bias that grows beats the same bias shrinking, at the end, exactly when c mu < 1."""
    figure, (left, right) = panels(2)
    c = np.geomspace(0.25, 4, 17)
    final, mean = np.array([problems.ordering_ratio(x) for x in c]).T
    left.loglog(c, final, "o-", color=MEASURED, label="at the end")
    left.loglog(c, mean, "o-", color=OTHER, label="averaged over rounds")
    left.axhline(1, color="gray", lw=0.8)
    left.axvline(1, color="gray", lw=0.8)
    left.set(
        xlabel="c μ,  steps c / (i + max(20, 40 c μ))", ylabel="E growing / E shrinking", title="below 1: growing bias wins"
    )
    plain_ticks(left, [0.25, 0.5, 1, 2, 4])
    left.legend(fontsize=8)
    for x, color in ((0.5, CORRECTED), (2.0, PRINTED)):
        for order, style in (("client", "-"), ("anti", "--")):
            E = exact_moments(problems.ordered(order, x)).E[1:]
            name = "growing" if order == "client" else "shrinking"
            right.loglog(np.arange(1, len(E) + 1), E, style, color=color, label=f"{name}, c μ = {x:g}")
    right.set(xlabel="rounds", ylabel="E‖θ − θ*‖²", title="the same total bias in two orders")
    right.legend(fontsize=8)
    save(figure, out / "ordering.png")


def plot_ergodic(out):
    """Theorem 2: both sides as T grows, and the 1/sqrt T rate that survives."""
    figure, (left, right) = panels(2)
    whole = problems.long_run()
    gradient = simulate(whole).gradient
    T = np.unique(np.geomspace(1, whole.T, 30).astype(int))
    shorter = [replace(whole, steps=whole.steps[: t + 1], biases=whole.biases[: t + 1], B=whole.B[: t + 1]) for t in T]
    for weighted, bound, color in (
        (False, bounds.theorem2_printed, PRINTED),
        (True, bounds.theorem2_corrected, CORRECTED),
    ):
        name = "corrected, weighted by α" if weighted else "printed, unweighted"
        sums = [bounds.ergodic_sum(p, gradient[: p.T + 1], weighted) for p in shorter]
        left.loglog(T, sums, color=color, label=f"{name}: left side")
        left.loglog(T, [bound(p) for p in shorter], "--", color=color, label=f"{name}: right side")
    left.set(xlabel="rounds T", ylabel="the two sides of Theorem 2", title="solid must stay below dashed")
    left.legend(fontsize=8, loc="lower right")
    T = np.array([30, 100, 300, 1000, 3000])
    rates = [problems.ergodic_rate(t) for t in T]
    right.loglog(T, rates / np.sqrt(T), "o", color=MEASURED, label="measured, biased and noisy")
    right.loglog(T, np.mean(rates) / np.sqrt(T), color="gray", label=f"{np.mean(rates):.2f} / √T")
    plain_ticks(right, T)
    right.set_yticks([0.02, 0.05, 0.1, 0.2], ["0.02", "0.05", "0.1", "0.2"])
    right.set(xlabel="rounds T", ylabel="average ‖∇f‖²", title="α = 0.3 / √T")
    right.legend(fontsize=8)
    save(figure, out / "ergodic.png")


def plot_spectra(out):
    """Hessian eigenvalues on easy, all and hard samples: one network in full, and the lowest one of every network."""
    figure, (left, right) = panels(2)
    results = [problems.spectra_of(seed, 1000)[0] for seed in range(problems.SEEDS)]
    order = np.argsort([values["all"][0] for values in results])
    for name, color in (("easy", CORRECTED), ("all", "gray"), ("hard", PRINTED)):
        left.plot(results[0][name], ".-", color=color, label=name)
        right.plot([results[seed][name][0] for seed in order], "o", ms=4, color=color, label=name)
    left.set_yscale("symlog", linthresh=1e-3)
    left.set(xlabel="eigenvalue number", ylabel="eigenvalue of H_S", title="one tanh network after 1000 steps")
    right.set(
        xlabel="network, sorted by λ_min on all",
        ylabel="λ_min(H_S)",
        title="the lowest one of every network",
    )
    right.set_xticks(range(0, problems.SEEDS, 5))
    for axis in (left, right):
        axis.axhline(0, color="gray", lw=0.8)
        axis.legend(fontsize=8)
    save(figure, out / "spectra.png")


FIGURES = (plot_bounds, plot_floor, plot_ordering, plot_ergodic, plot_spectra)
