"""python results/figures.py [NAME ...]

Draws the papers' figures from the summary.json (and curves.csv) files beside this one, in the papers' own layout: bars and
points are means over trials, error bars their standard deviation, in the figures of gains 95 % intervals of paired differences.
"""

import sys

import numpy as np
import verdicts
from verdicts import ROOT, bounds, curve, gain, settings, trials

sys.path.insert(0, str(ROOT.parent))
import common  # noqa: E402

ACCURACY, ORDERS = "final test accuracy (%)", ("curriculum", "anti", "random", "vanilla")
NAMES = {"iid": "IID", "label-skew": "label skew 2", "dirichlet": "Dir(.05)"}
DRAWN = {}


def drawn(name: str):
    """Registers the function that draws results/NAME.png."""
    return lambda draw: DRAWN.setdefault(name, draw)


def bars(axis, groups: dict[str, dict[str, np.ndarray]]) -> None:
    """Groups of bars, {group: {arm: accuracy (trials,)}}: mean +- std over trials."""
    arms = list(dict.fromkeys(arm for group in groups.values() for arm in group))
    width = 0.8 / len(arms)
    for i, arm in enumerate(arms):
        at = [x + (i - (len(arms) - 1) / 2) * width for x, group in enumerate(groups.values()) if arm in group]
        values = [group[arm] for group in groups.values() if arm in group]
        means, stds = [v.mean() for v in values], [v.std(ddof=1) for v in values]
        axis.bar(at, means, 0.9 * width, yerr=stds, label=arm, color=common.COLOURS[i], error_kw={"linewidth": 0.8})
    axis.set_xticks(range(len(groups)), list(groups))
    axis.grid(axis="x", visible=False)


def points(axis, x, lines: dict[str, list[np.ndarray]], interval=False) -> None:
    """Lines {arm: a value (trials,) for each x}: mean +- std over trials, or the interval of a paired difference."""
    at = range(len(x))
    for i, (arm, values) in enumerate(lines.items()):
        mean = np.array([v.mean() for v in values])
        spread = np.array([bounds(v)[2] - v.mean() if interval else v.std(ddof=1) for v in values])
        shifted = [a + 0.06 * (i - (len(lines) - 1) / 2) for a in at]
        style = {"marker": "o", "markersize": 3, "linewidth": 1.2, "capsize": 2, "color": common.COLOURS[i]}
        axis.errorbar(shifted, mean, spread, label=arm, **style)
    axis.set_xticks(at, [str(value) for value in x])
    if interval:
        axis.axhline(0, color="black", linewidth=0.8)


def one_panel(groups: dict[str, dict[str, np.ndarray]], title: str, width: float):
    """A figure of one panel of bars, its legend below."""
    fig, axes = common.new_figure(1, 1, width, 3.0)
    bars(axes[0, 0], groups)
    axes[0, 0].set(title=title, ylabel=ACCURACY, ylim=(0, 100))
    axes[0, 0].legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    return fig


@drawn("fedavg_curriculum/digits-fig1/fig1")
def _():
    run = "fedavg_curriculum/digits-fig1"
    fig, axes = common.new_figure(1, 2, 9.0, 2.8)
    for axis, partition in zip(axes[:, 0], ("iid", "label-skew"), strict=True):
        arms = {s: {o: trials(run, f"partition={partition} score={s}", o) for o in ORDERS} for s in verdicts.SCORES}
        bars(axis, arms)
        axis.set(title=f"Fig 1 on digits, {NAMES[partition]}: difficulty scores", ylabel=ACCURACY, ylim=(0, 100))
    axes[1, 0].legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    return fig


def tables(scale: str):
    fig, axes = common.new_figure(4, 2, 3.2, 2.7)
    for row, other in zip(axes, ("vanilla", "random"), strict=True):
        for axis, base in zip(row, verdicts.BASES, strict=True):
            lines = {}
            for what, name in (("final", "final round"), ("last10", "mean of the last ten")):
                a = verdicts.gains(scale, other, what)
                lines[name] = [a[base, beta] for beta in verdicts.BETAS]
            points(axis, verdicts.BETAS, lines, interval=True)
            axis.set(title=base, xlabel="Dirichlet beta")
        row[0].set(ylabel=f"curriculum - {other} (points)")
    axes[0, 0].legend(fontsize=8)
    return fig


@drawn("fedavg_curriculum/digits-table1/tables1-4")
def _():
    return tables("digits")


def families(run: str, partition: str):
    shapes, a = ("linear", "quadratic", "root", "step", "exponential"), (0.1, 0.5, 0.8)
    fig, axes = common.new_figure(5, 1, 2.6, 2.8)
    for axis, family in zip(axes[0], shapes, strict=True):
        lines = {o: [trials(run, f"pacing={family} pacing_a={x}", o) for x in a] for o in ORDERS[:3]}
        points(axis, a, lines)
        axis.set(title=f"{family}, {NAMES[partition]}", xlabel="pacing a", ylim=(0, 100))
    axes[0, 0].set(ylabel=ACCURACY)
    axes[0, 0].legend(fontsize=8)
    return fig


@drawn("fedavg_curriculum/digits-fig2/fig2")
def _():
    return families("fedavg_curriculum/digits-fig2", "iid")


@drawn("fedavg_curriculum/digits-fig12/fig12")
def _():
    return families("fedavg_curriculum/digits-fig12", "label-skew")


@drawn("fedavg_curriculum/digits-fig3/fig3")
def _():
    run, bs = "fedavg_curriculum/digits-fig3", (0.0025, 0.1, 0.2, 0.5, 0.8)
    fig, axes = common.new_figure(2, 1, 4.2, 3.0)
    for axis, partition in zip(axes[0], ("iid", "dirichlet"), strict=True):
        points(axis, bs, {o: [trials(run, f"partition={partition} pacing_b={b}", o) for b in bs] for o in ORDERS})
        axis.set(title=f"Fig 3 on digits, {NAMES[partition]}", xlabel="pacing b", ylabel=ACCURACY)
    axes[0, 0].legend()
    return fig


@drawn("fedavg_curriculum/fmnist-fig10/fig10")
def _():
    run, parts = "fedavg_curriculum/fmnist-fig10", (100, 200, 400, 800)
    fig, axes = common.new_figure(2, 1, 4.2, 3.0)
    points(axes[0, 0], parts, {o: [trials(run, f"parts={p}", o) for p in parts] for o in ORDERS})
    axes[0, 0].set(title="Fig 10 on Fashion-MNIST, label skew 2", xlabel="parts P (100 of them are clients)", ylabel=ACCURACY)
    axes[0, 0].legend()
    gains = {f"curriculum - {o}": [gain(run, f"parts={p}", "curriculum", o) for p in parts] for o in ("vanilla", "random")}
    points(axes[0, 1], parts, gains, interval=True)
    axes[0, 1].set(title="gain of the curriculum", xlabel="parts P", ylabel="paired difference (points)")
    axes[0, 1].legend()
    return fig


@drawn("client_curriculum/digits-fig4/fig4")
def _():
    run = "client_curriculum/digits-fig4"
    names = {"curriculum": "data", "anti": "data-anti", "random": "data-random", "vanilla": "vanilla"}
    groups = {s: {o: trials(run, s, arm) for o, arm in names.items()} for s in settings(run)}
    groups = {s.replace("alpha=", "Dir(").replace(" f_ord=", "), f_ord "): group for s, group in groups.items()}
    return one_panel(groups, "Fig 4 on digits: data orders at low and high consistency", 7.0)


@drawn("client_curriculum/digits-fig6-data/fig6")
def _():
    fig, axes = common.new_figure(2, 2, 4.2, 2.8)
    for line, who in zip(axes, ("data", "client"), strict=True):
        run = f"client_curriculum/digits-fig6-{'data' if who == 'data' else 'clients'}"
        for axis, alpha in zip(line, (0.2, 0.05), strict=True):
            arms = {"expert score E": ("E", who), "global score G": ("G", who), "random": ("G", f"{who}-random")}
            for i, (name, (score, arm)) in enumerate(arms.items()):
                y = curve(run, f"alpha={alpha} score={score}", arm)
                x = np.arange(1, y.shape[1] + 1)
                mean, std = y.mean(0), y.std(0, ddof=1)
                axis.plot(x, mean, label=name, color=common.COLOURS[i])
                axis.fill_between(x, mean - std, mean + std, color=common.COLOURS[i], alpha=0.15)
            axis.set(title=f"{who} curriculum, Dir({alpha})", xlabel="round", ylabel="test accuracy (%)")
            axis.locator_params("x", integer=True)
    axes[0, 0].legend()
    return fig


@drawn("fedcl_gmm_sync/mnist-alpha/table2")
def _():
    run, alphas = "fedcl_gmm_sync/mnist-alpha", verdicts.ALPHAS
    fig, axes = common.new_figure(2, 1, 4.4, 3.0)
    arms = ("fedcl", "fedgen", "fedensemble", "fedavg")
    bars(axes[0, 0], {f"alpha {a}": {m: trials(run, f"alpha={a}", m) for m in arms} for a in alphas})
    axes[0, 0].set(title="Table II on MNIST", ylabel=ACCURACY, ylim=(0, 100))
    axes[0, 0].legend(ncols=4, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    gains = {f"fedcl - {m}": [gain(run, f"alpha={a}", "fedcl", m) for a in alphas] for m in arms[1:]}
    points(axes[0, 1], alphas, gains, interval=True)
    axes[0, 1].set(title="gain of FedCL", xlabel="Dirichlet alpha", ylabel="paired difference (points)")
    axes[0, 1].legend(fontsize=8, loc="upper right")
    return fig


@drawn("fedcl_gmm_sync/digits-table4/tables4-6")
def _():
    names = {"table4": "P", "table5": "phases' thresholds", "table6-lambda": "lambda"}
    names |= {"table6-tau": "tau", "table6-s": "S", "table6-v": "v"}
    fig, axes = common.new_figure(3, 2, 4.0, 2.6)
    for axis, (table, name) in zip(axes.ravel(), names.items(), strict=True):
        run = f"fedcl_gmm_sync/digits-{table}"
        labels = [s.split("=")[1].strip("()").replace(", ", "\n") for s in settings(run)]
        points(axis, labels, {"final": [trials(run, s, "fedcl") for s in settings(run)]})
        axis.set(title=f"FedCL by {name}", ylabel=ACCURACY)
    return fig


@drawn("fedcl_fgn/digits-fig39/fig6-39")
def _():
    runs = {base: (f"fedcl_fgn/digits-{base}", "") for base in ("fedprox", "vrlsgd", "fednova")}
    runs |= {base: ("fedcl_fgn/digits-fig39", f"base={base}") for base in ("fedadagrad", "fedyogi", "fedadam")}
    groups = {b: {"alone": trials(*run, b), "with FedCL": trials(*run, f"{b}+cl")} for b, run in runs.items()}
    return one_panel(groups, "Figs 6 and 39 on digits, alpha .1", 8.0)


@drawn("fedcl_fgn/digits-fig10-alpha0.1/fig10")
def _():
    fig, axes = common.new_figure(1, 1, 5.5, 3.0)
    lines = {}
    for alpha in (0.1, 0.3):
        run = f"fedcl_fgn/digits-fig10-alpha{alpha}"
        lines[f"alpha {alpha}"] = [trials(run, f"delta={d}", "fedavg+cl") for d in verdicts.DELTAS]
    points(axes[0, 0], verdicts.DELTAS, lines)
    axes[0, 0].set(title="Fig 10 on digits: FedCL by threshold", xlabel="delta", ylabel=ACCURACY)
    axes[0, 0].legend()
    return fig


@drawn("fedcl_fgn/digits-fig12/fig12-15")
def _():
    names = {"fig12": "local epochs E", "fig13": "weight decay", "fig14": "clients M", "fig15": "clients a round m"}
    fig, axes = common.new_figure(2, 2, 4.2, 2.8)
    for axis, (table, name) in zip(axes.ravel(), names.items(), strict=True):
        run = f"fedcl_fgn/digits-{table}"
        arms = {"FedCL": "fedavg+cl", "FedAvg": "fedavg"}
        lines = {arm: [trials(run, s, method) for s in settings(run)] for arm, method in arms.items()}
        points(axis, [s.split("=")[1] for s in settings(run)], lines)
        axis.set(xlabel=name, ylabel=ACCURACY)
    axes[0, 0].legend()
    return fig


@drawn("fedcl_fgn/digits-fig47/fig47-48")
def _():
    fig, axes = common.new_figure(2, 1, 4.2, 2.8)
    for axis, (table, name) in zip(axes[0], {"fig47": "doubling", "fig48": "halving"}.items(), strict=True):
        run = f"fedcl_fgn/digits-{table}"
        lines = {"final": "final", "mean of the last ten": "last10"}
        values = {label: [gain(run, s, "fedavg+random", "fedavg", w) for s in settings(run)] for label, w in lines.items()}
        points(axis, [s.split("=")[1] for s in settings(run)], values, interval=True)
        axis.set(xlabel=f"probability of {name}", ylabel="random sizes - FedAvg (points)")
    axes[0, 0].legend()
    return fig


@drawn("fedac_art/digits-table2/table2")
def _():
    run, arms = verdicts.FEDAC, {"alone": "base", "with FedAC": "fedac"}
    groups = {b: {label: trials(run, f"base={b}", arm) for label, arm in arms.items()} for b in verdicts.BASE_ARMS}
    return one_panel(groups, "Tables 2 and 3 on digits", 5.0)


def main(names: list[str]) -> None:
    for name in names or DRAWN:
        common.save_figure(DRAWN[name](), ROOT / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
