"""python results/figures.py [NAME ...]

Draws the papers' figures from the summary.json (and curves.csv) files beside this one, in the papers' own layout: bars and
points are means over trials, error bars their standard deviation, in figures of gains 95 % intervals of paired differences.
"""

import sys

import matplotlib
import matplotlib.pyplot as plt
import pandas as pd
import verdicts
from verdicts import ROOT, bounds, frame, settings, trials

matplotlib.use("Agg")
import seaborn as sns  # noqa: E402  after the backend is chosen

LABELS = {"final": "final test accuracy (%)", "gain": "paired difference (points)", "iid": "IID", "label-skew": "label skew 2"}


def tidy(*runs: str) -> pd.DataFrame:
    """A row for each run, setting, method and trial: final and last10, and the swept flags as columns."""
    rows = []
    for run in runs:
        for setting in settings(run):
            flags = dict(word.split("=", 1) for word in setting.replace(", ", ",").split())
            for method in verdicts.summary(run)["results"][setting]:
                figures = zip(trials(run, setting, method), trials(run, setting, method, "last10"), strict=True)
                own = {"run": run, "setting": setting, "method": method} | flags
                rows += [own | {"trial": i, "final": final, "last10": last10} for i, (final, last10) in enumerate(figures)]
    return pd.DataFrame(rows).replace(LABELS)


def gains(df: pd.DataFrame, of: str, *against: str) -> pd.DataFrame:
    """Paired differences `of` - each of `against`, in the final round and the mean of the last ten: column gain."""
    rows, keys = [], [column for column in df if column not in ("method", "final", "last10")]
    wide = df.set_index([*keys, "method"])[["final", "last10"]].unstack("method")
    for other in against:
        for what, name in (("final", "final round"), ("last10", "mean of the last ten")):
            d = (wide[what][of] - wide[what][other]).rename("gain").reset_index()
            rows.append(d.assign(difference=f"{of} - {other}", measured=name))
    return pd.concat(rows)


def draw(df: pd.DataFrame, y="final", kind="point", **layout) -> sns.FacetGrid:
    """Bars or points over `x`, coloured by `hue`, in panels by `col` and `row`."""
    sns.set_theme(style="ticks", palette="colorblind", rc={"axes.grid": True, "grid.alpha": 0.25, "lines.linewidth": 1.2})
    spread = (lambda d: bounds(d.to_numpy())[1:]) if y == "gain" else "sd"
    style = {} if kind == "bar" else {"dodge": 0.2 if df[layout["hue"]].nunique() > 1 else False, "markersize": 4}
    grid = sns.catplot(df, y=y, kind=kind, errorbar=spread, err_kws={"linewidth": 1}, height=3, **style, **layout)
    if y == "gain":
        grid.refline(y=0, color="black")
    return grid.set_titles("{col_name}" if "row" not in layout else "{col_name}, {row_name}").set_ylabels(LABELS[y])


def orders(run: str) -> pd.DataFrame:
    return tidy(f"fedavg_curriculum/{run}")


def by_table(script: str, tables: dict[str, str]) -> pd.DataFrame:
    """Runs of a single swept flag each, under one another: `value` holds the flag's value, `sweep` the table's name."""
    parts = [tidy(f"{script}/{run}").assign(sweep=name) for run, name in tables.items()]
    return pd.concat(part.assign(value=part.setting.str.split("=").str[1]) for part in parts)


def curves() -> sns.FacetGrid:
    """Fig 6: accuracy over rounds under both scores, for the data and the client curriculum."""
    parts = []
    for who, name in {"data": "data", "client": "clients"}.items():
        df = frame(f"client_curriculum/digits-fig6-{name}", "curves.csv")
        flags = df.setting.str.extract(r"alpha=(?P<alpha>\S+) score=(?P<score>\S+)")
        arm = df.method.map({who: "score ", f"{who}-random": "random "}) + flags.score
        parts.append(df.assign(alpha="Dir(" + flags.alpha + ")", arm=arm, who=f"{who} curriculum"))
    shown = pd.concat(parts).query("arm in ('score E', 'score G', 'random G')")
    how = {"kind": "line", "errorbar": "sd", "height": 2.8, "aspect": 1.4}
    return sns.relplot(shown, x="round", y="accuracy", hue="arm", col="alpha", row="who", **how)


def tables_1_to_4() -> sns.FacetGrid:
    parts = [orders(f"digits-{table}").assign(base=base) for base, table in verdicts.BASES.items()]
    df = gains(pd.concat(parts), "curriculum", "vanilla", "random")
    return draw(df, "gain", x="alpha", hue="measured", col="base", row="difference")


def apart(runs: dict[str, str], *pairs: str) -> sns.FacetGrid:
    """Paired differences 'A - B' of two arms, a panel for each run."""
    df = pd.concat(tidy(run).assign(run=name) for name, run in runs.items())
    shown = pd.concat(gains(df, *pair.split(" - ")) for pair in pairs)
    shown = shown.assign(pair=shown.difference.str.replace(" - ", "\n- ")).reset_index()
    grid = draw(shown, "gain", x="pair", hue="measured", col="run", col_wrap=1, aspect=2.9, linestyle="none")
    return grid.set_axis_labels("", "paired difference\n(points, 95 %)")


def fedcl_around_bases() -> sns.FacetGrid:
    alone = [tidy(f"fedcl_fgn/digits-{base}").assign(base=base) for base in ("fedprox", "vrlsgd", "fednova")]
    df = pd.concat([*alone, tidy("fedcl_fgn/digits-fig39")])
    df = df.assign(arm=df.method.str.endswith("+cl").map({True: "with FedCL", False: "alone"}))
    return draw(df, kind="bar", x="base", hue="arm", aspect=2)


def swept(run: str, flag: str):
    """FedCL, and FedAvg where it was trained too, over the values of one flag."""
    return lambda: draw(
        tidy(run).assign(value=lambda df: df.setting.str.split("=").str[1]), x="value", hue="method", aspect=1.4
    ).set_xlabels(flag)


def random_sizes(run: str):
    return lambda: draw(gains(tidy(run), "fedavg+random", "fedavg"), "gain", x="setting", hue="measured", aspect=1.6)


EXPOSED = ("curriculum", "shuffled", "weighted", "fixed", "random", "threshold", "balanced")
FGN_SWEEPS = {"fig12": "local epochs E", "fig13": "weight decay", "fig14": "clients M", "fig15": "clients a round m"}
GMM_SWEEPS = {"table4": "P", "table5": "thresholds of the phases", "table6-lambda": "lambda", "table6-tau": "tau"}
GMM_SWEEPS |= {"table6-s": "S", "table6-v": "v"}
DELTAS = {"digits-fig10-alpha0.1": "alpha .1", "digits-fig10-alpha0.3": "alpha .3"}
FIGURES = {
    "fedavg_curriculum/digits-fig1/fig1": lambda: draw(
        orders("digits-fig1"), kind="bar", x="score", hue="method", row="partition", col="run", aspect=3
    ).set_titles("{row_name}"),
    "fedavg_curriculum/digits-table1/tables1-4": tables_1_to_4,
    "fedavg_curriculum/cifar10-exposure-alpha0.9/exposure": lambda: apart(
        {f"CIFAR-10, Dir({alpha})": run for alpha, run in verdicts.EXPOSURE.items()},
        *(f"{order} - vanilla" for order in EXPOSED),
        "curriculum - shuffled",
    ),
    "fedavg_curriculum/digits-fig2/fig2": lambda: draw(orders("digits-fig2"), x="pacing_a", hue="method", col="pacing"),
    "fedavg_curriculum/digits-fig12/fig12": lambda: draw(
        orders("digits-fig12"), x="pacing_a", hue="method", col="pacing"
    ).set_titles("{col_name}, Dir(.05)"),
    "fedavg_curriculum/digits-fig3/fig3": lambda: draw(orders("digits-fig3"), x="pacing_b", hue="method", col="partition"),
    "fedavg_curriculum/fmnist-fig10/fig10": lambda: draw(orders("fmnist-fig10"), x="parts", hue="method", aspect=1.5),
    "client_curriculum/digits-fig4/fig4": lambda: draw(
        tidy("client_curriculum/digits-fig4"), kind="bar", x="setting", hue="method", aspect=2.5
    ),
    "client_curriculum/digits-fig6-data/fig6": curves,
    "fedcl_gmm_sync/mnist-200-alpha0.1/gains": lambda: apart(
        {f"MNIST, Dir({alpha}), 200 rounds": run for alpha, run in verdicts.MNIST.items()},
        *("fedcl - fedgen", "fedcl - fedgen-e", "fedcl-fresh - fedgen-e", "fedgen-e - fedgen", "fedgen - fedavg"),
    ),
    "fedcl_fgn/digits-fig39/fig6-39": fedcl_around_bases,
    "fedcl_fgn/digits-fig10-alpha0.1/fig10": lambda: draw(
        by_table("fedcl_fgn", DELTAS).query("method == 'fedavg+cl'"), x="value", hue="sweep", aspect=1.6
    ),
    "fedac_art/fmnist-table2/gains": lambda: draw(
        gains(tidy("fedac_art/fmnist-table2"), "fedac", "base"), "gain", x="base", hue="measured", aspect=1.8, linestyle="none"
    ),
}
FIGURES |= {f"fedcl_fgn/digits-{n}/{n}": swept(f"fedcl_fgn/digits-{n}", flag) for n, flag in FGN_SWEEPS.items()}
FIGURES |= {f"fedcl_fgn/digits-{n}/{n}": random_sizes(f"fedcl_fgn/digits-{n}") for n in ("fig47", "fig48")}
FIGURES |= {f"fedcl_gmm_sync/digits-{n}/{n}": swept(f"fedcl_gmm_sync/digits-{n}", flag) for n, flag in GMM_SWEEPS.items()}


def main(names: list[str]) -> None:
    """Draws the named figures, or all."""
    for name in names or FIGURES:
        grid = FIGURES[name]()
        grid.savefig(ROOT / f"{name}.png", dpi=110)
        plt.close(grid.figure)


if __name__ == "__main__":
    main(sys.argv[1:])
