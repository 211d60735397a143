"""python results/verdicts.py [CLAIM ...]; python results/verdicts.py fill; python results/verdicts.py cut METRICS COLUMN ...

What our runs say to each claim of the papers: the 'ours' cells of results/README.md, computed from the summary.json (and the
small csv) files beside this one. tests/test_results.py holds the README to what this prints; `fill` writes the cells into it,
and `cut` leaves of a run's metrics.csv the columns that a claim reads.

Brackets are 95 % Student intervals of paired differences over trials: the arms of a trial share partition, initial weights and
draws.
`final | last ten` are the last round and the mean of the last ten rounds.
"""

import csv
import functools
import json
import math
import re
import sys
from pathlib import Path

import numpy as np
from scipy.stats import t as student

ROOT = Path(__file__).resolve().parent
CELLS = {}
PAIR = " \\| "  # between final and last ten; a bare | would end the cell of the table


def claim(name: str):
    """Registers the function that writes the cell of one claim."""
    return lambda cell: CELLS.setdefault(name, cell)


# ------------------------------------------------------------------------------------------------------ reading the runs


@functools.cache
def summary(folder: str) -> dict:
    """The summary.json of one run; `folder` is relative to results/."""
    return json.loads((ROOT / folder / "summary.json").read_text())


@functools.cache
def rows(folder: str, name: str) -> list[dict]:
    """The rows of a csv file beside a summary; numbers where they are numbers."""

    def value(text):
        try:
            return float(text)
        except ValueError:
            return text

    with open(ROOT / folder / name, newline="") as file:
        return [{key: value(text) for key, text in row.items()} for row in csv.DictReader(file)]


def trials(folder: str, setting: str, method: str, what: str = "final") -> np.ndarray:
    """Accuracy in % of each trial (trials,): `what` is final, last10 or best."""
    return np.array(summary(folder)["results"][setting][method][what]["trials"])


def settings(folder: str) -> list[str]:
    return list(summary(folder)["results"])


def gain(folder: str, setting: str, a: str, b: str, what: str = "final") -> np.ndarray:
    """Accuracy of a - accuracy of b in each trial (trials,)."""
    return trials(folder, setting, a, what) - trials(folder, setting, b, what)


# ------------------------------------------------------------------------------------------------------------ statistics


def bounds(d: np.ndarray) -> tuple[float, float, float]:
    """Mean of d (trials,) and its two-sided 95 % Student interval."""
    half = student.ppf(0.975, len(d) - 1) * d.std(ddof=1) / math.sqrt(len(d))
    return d.mean(), d.mean() - half, d.mean() + half


def ci(d: np.ndarray, digits: int = 1) -> str:
    """'+1.2 [-0.3, +2.7]'; of one trial without the brackets."""
    if len(d) == 1:
        return f"{d[0]:+.{digits}f}"
    mean, low, high = bounds(np.asarray(d))
    return f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def both(folder: str, setting: str, a: str, b: str) -> str:
    """The paired difference a - b: final | mean of the last ten rounds."""
    return PAIR.join(ci(gain(folder, setting, a, b, what)) for what in ("final", "last10"))


def slope(x, y: np.ndarray) -> np.ndarray:
    """Least-squares slope of y (points, trials) over x (points,), one for each trial."""
    x = np.asarray(x, dtype=float) - np.mean(x)
    return x @ y / (x @ x)


def signs(cells: list[np.ndarray]) -> str:
    """How many of several paired differences have an interval above 0, one that holds 0, one below: '5 / 6 / 1'."""
    ends = [bounds(d)[1:] for d in cells]
    above, below = sum(low > 0 for low, _ in ends), sum(high < 0 for _, high in ends)
    return f"{above} / {len(cells) - above - below} / {below}"


# --------------------------------------------------------------------- A: when do curricula work in federated learning?

SCORES = ("G", "L", "LG", "G_pred", "L_pred", "LG_pred")
BASES = {"FedAvg": "table1", "FedProx": "table2", "FedNova": "table3", "SCAFFOLD": "table4"}
BETAS = (0.05, 0.2, 0.9)
PARTS = {"IID": "iid", "skew 2": "label-skew"}


@claim("A1")
def _():
    run, cells = "fedavg_curriculum/digits-fig1", []
    for name, partition in PARTS.items():
        orders = [
            f"- {o} {both(run, f'partition={partition} score=G', 'curriculum', o)}" for o in ("random", "anti", "vanilla")
        ]
        cells.append(f"{name}: curriculum " + "; ".join(orders))
    return ". ".join(cells)


@claim("A2")
def _():
    run, cells = "fedavg_curriculum/digits-fig1", []
    for name, partition in PARTS.items():
        final = {s: trials(run, f"partition={partition} score={s}", "curriculum") for s in SCORES}
        ranked = sorted(SCORES, key=lambda s: -final[s].mean())
        means = ", ".join(f"{s} {final[s].mean():.1f}" for s in ranked)
        rivals = dict.fromkeys((next(s for s in ranked if s != "G"), "L_pred"))
        others = "; ".join(f"- {s} {ci(final['G'] - final[s])}" for s in rivals)
        cells.append(f"{name}: {means}; G {others}")
    return ". ".join(cells)


@claim("A3")
def _():
    run, cells = "fedavg_curriculum/digits-fig1", []
    for other in ("vanilla", "random"):
        by_partition = [
            [gain(run, f"partition={p} score=G", "curriculum", other, what) for p in ("label-skew", "iid")]
            for what in ("final", "last10")
        ]
        cells.append(f"gain over {other}, skew 2 - IID: " + PAIR.join(ci(skew - iid) for skew, iid in by_partition))
    return "; ".join(cells)


def paced(run: str, order: str) -> dict[str, np.ndarray]:
    """Slope of the final accuracy over pacing a, in points from a = 0 to 1, for each family (trials,)."""
    partition, a = ("iid" if run.endswith("fig2") else "label-skew"), (0.1, 0.5, 0.8)
    assert summary(run)["config"]["partition"] == partition
    families = ("linear", "quadratic", "root", "step", "exponential")
    return {family: slope(a, np.array([trials(run, f"pacing={family} pacing_a={x}", order) for x in a])) for family in families}


@claim("A4")
def _():
    cells = []
    for name, run in {"IID": "fedavg_curriculum/digits-fig2", "skew 2": "fedavg_curriculum/digits-fig12"}.items():
        for order in ("curriculum", "anti", "random"):
            slopes = paced(run, order)
            rising = sum(s.mean() > 0 for s in slopes.values())
            cells.append(f"{name}, {order}: {ci(np.mean(list(slopes.values()), 0))}, rising in {rising} of 5 families")
    return "; ".join(cells)


@claim("A5")
def _():
    run, bs, cells = "fedavg_curriculum/digits-fig3", (0.0025, 0.1, 0.2, 0.5, 0.8), []
    for name, partition in {"IID": "iid", "Dir(.05)": "dirichlet"}.items():
        for order in ("curriculum", "anti", "random"):
            y = np.array([trials(run, f"partition={partition} pacing_b={b}", order) for b in bs])
            cells.append(f"{name}, {order}: {ci(slope(bs, y))}")
    return "; ".join(cells)


def gains(scale: str, other: str, what: str = "final") -> dict[tuple[str, float], np.ndarray]:
    """A_curr of Tables 1-4: curriculum - `other` for each base and beta (trials,)."""
    runs = {base: f"fedavg_curriculum/{scale}-{table}" for base, table in BASES.items()}
    return {(base, b): gain(run, f"alpha={b}", "curriculum", other, what) for base, run in runs.items() for b in BETAS}


def tables(scale: str) -> str:
    cells = []
    for other in ("vanilla", "random", "anti"):
        for what, name in (("final", "final"), ("last10", "last ten")):
            every = list(gains(scale, other, what).values())
            cells.append(
                f"- {other}, {name}: mean of the 12 {ci(np.mean(every, 0))}, above / holding / below 0: {signs(every)}"
            )
    return "; ".join(cells)


def over_beta(scale: str) -> str:
    """How much larger the gain is at beta = .05 than at .9: final | last ten, by base and in the mean over bases."""
    cells = []
    for other in ("vanilla", "random"):
        runs = [gains(scale, other, what) for what in ("final", "last10")]
        each = {base: [a[base, 0.05] - a[base, 0.9] for a in runs] for base in BASES}
        each["mean"] = list(np.mean(list(each.values()), 0))
        cells.append(f"gain over {other}: " + ", ".join(f"{base} {PAIR.join(map(ci, d))}" for base, d in each.items()))
    return "A_curr at .05 - at .9, " + ". ".join(cells)


CIFAR10, WHATS = "fedavg_curriculum/cifar10-table1", ("final", "last10")


@claim("A6")
def _():
    cells = []
    for b in BETAS:
        each = [f"{other} {both(CIFAR10, f'alpha={b}', 'curriculum', other)}" for other in ("vanilla", "random", "anti")]
        cells.append(f"Dir({str(b)[1:]}) - {', - '.join(each)}")
    return f"digits: {tables('digits')}. CIFAR-10, FedAvg: {'; '.join(cells)}"


@claim("A7")
def _():
    cells = []
    for other in ("vanilla", "random"):
        rise = [np.subtract(*(gain(CIFAR10, f"alpha={b}", "curriculum", other, what) for b in (0.05, 0.9))) for what in WHATS]
        cells.append(f"gain over {other} {PAIR.join(map(ci, rise))}")
    return f"digits: {over_beta('digits')}. CIFAR-10, FedAvg: {', '.join(cells)}"


@claim("A8")
def _():
    run, parts = "fedavg_curriculum/fmnist-fig10", (100, 200, 400, 800)
    every = [trials(run, f"parts={p}", "vanilla").mean() for p in parts]
    cells = ["P = 100, 200, 400, 800: vanilla " + ", ".join(f"{a:.1f}" for a in every)]
    for other in ("vanilla", "random"):
        a = np.array([gain(run, f"parts={p}", "curriculum", other) for p in parts])
        cells.append(
            f"gain over {other} " + ", ".join(f"{x.mean():+.1f}" for x in a) + f", per doubling of P {ci(slope(range(4), a))}"
        )
    return "; ".join(cells)


@claim("A9")
def _():
    run, cells = "client_curriculum/digits-fig4", []
    for name, other in {"random": "data-random", "vanilla": "vanilla"}.items():
        for beta in (0.2, 0.05):
            each = [both(run, f"alpha={beta} f_ord={f}", "data", other) for f in (0.0, 1.0)]
            cells.append(f"Dir({str(beta)[1:]}), data curriculum - {name}: f_ord 0 {each[0]}, f_ord 1 {each[1]}")
    inside = {(row["setting"]): row["inside"] for row in rows("client_curriculum/cifar10-consistency", "consistency.csv")}
    stds = ", ".join(
        f"Dir({beta[1:]}) {inside[f'alpha={beta} f_ord=0.0']:.2f} -> {inside[f'alpha={beta} f_ord=1.0']:.2f}"
        for beta in ("0.2", "0.05")
    )
    return "; ".join(cells) + f". std inside clients on CIFAR-10 (1 trial): {stds}"


@claim("A10")
def _():
    run = "client_curriculum/digits-orders"
    return "; ".join(
        f"client curriculum - {name} {both(run, '', 'client', arm)}"
        for name, arm in {"vanilla": "vanilla", "random": "client-random", "anti": "client-anti"}.items()
    )


def curve(folder: str, setting: str, method: str, column: str = "accuracy") -> np.ndarray:
    """A column of curves.csv by trial and round (trials, rounds)."""
    own = [row for row in rows(folder, "curves.csv") if (row["setting"], row["method"]) == (setting, method)]
    count = int(max(row["trial"] for row in own)) + 1
    return np.array([[row[column] for row in own if row["trial"] == k] for k in range(count)])


def curve_ends(folder: str, setting: str, method: str, column: str) -> np.ndarray:
    """The one value of a column that a run of curves.csv holds, by trial (trials,)."""
    own = [row for row in rows(folder, "curves.csv") if (row["setting"], row["method"]) == (setting, method)]
    return np.array([row[column] for row in own if row[column] != ""])


def early_and_late(run: str, arms: dict[str, tuple[str, str]], settings: tuple[str, ...]) -> str:
    """Accuracy of pairs of arms apart, in the first and in the last quarter of the rounds, mean over the settings."""
    cells = []
    for name, ((score_a, arm_a), (score_b, arm_b)) in arms.items():
        d = np.mean(
            [curve(run, f"{s} score={score_a}", arm_a) - curve(run, f"{s} score={score_b}", arm_b) for s in settings], 0
        )
        quarter = d.shape[1] // 4
        cells.append(f"{name} {ci(d[:, :quarter].mean(1))} first quarter, {ci(d[:, -quarter:].mean(1))} last")
    return ", ".join(cells)


@claim("A11")
def _():
    cells = []
    for who in ("data", "client"):
        run = f"client_curriculum/digits-fig6-{'data' if who == 'data' else 'clients'}"
        arms = {"E - G": (("E", who), ("G", who)), "G - random": (("G", who), ("G", f"{who}-random"))}
        cells.append(f"{who} curriculum: " + early_and_late(run, arms, ("alpha=0.2", "alpha=0.05")))
    return "; ".join(cells)


@claim("A12")
def _():
    run = "client_curriculum/digits-fig7"
    means = ", ".join(f"{arm} {trials(run, '', arm).mean():.1f}" for arm in ("client+data", "client", "data", "vanilla"))
    return (
        means
        + "; "
        + "; ".join(f"client+data - {arm} {both(run, '', 'client+data', arm)}" for arm in ("client", "data", "vanilla"))
    )


@claim("A13")
def _():
    run, cells = "fedavg_curriculum/digits-dissimilarity", []
    for order in ("vanilla", "curriculum"):
        easy, full, hard = (np.log(curve(run, "", order, f"lambda_{name}")) for name in ("easy", "all", "hard"))
        for phase, part in {
            "first half": np.s_[:, : easy.shape[1] // 2],
            "second half": np.s_[:, easy.shape[1] // 2 :],
        }.items():
            means = ", ".join(
                f"{name} {math.exp(x[part].mean()):.1f}" for name, x in (("easy", easy), ("all", full), ("hard", hard))
            )
            ratio = np.exp(bounds((easy[part] - full[part]).mean(1)))
            cells.append(f"under {order}, {phase}: {means}; easy / all {ratio[0]:.2f} [{ratio[1]:.2f}, {ratio[2]:.2f}]")
    return "; ".join(cells)


@claim("A14")
def _():
    return "not run"


# -------------------------------------------------------------------------------- B: FedCL, multi-phase synchronisation

ALPHAS = (0.05, 0.1, 1.0)


@claim("B1")
def _():
    run, cells = "fedcl_gmm_sync/mnist-alpha", []
    for alpha in ALPHAS:
        s = f"alpha={alpha}"
        means = ", ".join(f"{m} {trials(run, s, m).mean():.1f}" for m in ("fedcl", "fedgen", "fedensemble", "fedavg"))
        steps = (("fedcl", "fedgen"), ("fedgen", "fedensemble"), ("fedensemble", "fedavg"))
        each = ", ".join(f"{a} - {b} {ci(gain(run, s, a, b))}" for a, b in steps)
        cells.append(f"alpha {alpha}: {means}; {each}")
    long = "fedcl_gmm_sync/mnist"
    means = ", ".join(f"{trials(long, '', m).mean():.1f}" for m in ("fedcl", "fedgen", "fedensemble", "fedavg"))
    return ". ".join(cells) + f". 60 rounds, alpha .1: {means}; fedcl - fedgen {both(long, '', 'fedcl', 'fedgen')}"


@claim("B2")
def _():
    run, cells = "fedcl_gmm_sync/mnist-alpha", []
    for what, name in (("final", "final"), ("last10", "last ten")):
        each = [gain(run, f"alpha={alpha}", "fedcl", "fedavg", what) for alpha in ALPHAS]
        means = ", ".join(f"{alpha}: {ci(d)}" for alpha, d in zip(ALPHAS, each, strict=True))
        cells.append(f"FedCL - FedAvg, {name}, at alpha {means}; at .05 - at 1 {ci(each[0] - each[-1])}")
    return ". ".join(cells)


@claim("B3")
def _():
    lines = summary("fedcl_gmm_sync/mnist")["table"][""]
    return ", ".join(
        f"{m} {lines[m]['rounds']:.1f} rounds, {lines[m]['updates']:.0f} client updates" for m in ("fedcl", "fedgen")
    )


@claim("B4")
def _():
    tables, cells = (
        {"P": "table4", "phases": "table5", "lambda": "table6-lambda", "tau": "table6-tau", "S": "table6-s", "v": "table6-v"},
        [],
    )
    for name, table in tables.items():
        run = f"fedcl_gmm_sync/digits-{table}"
        ranges = [np.ptp([trials(run, s, "fedcl", what).mean() for s in settings(run)]) for what in ("final", "last10")]
        cells.append(f"{name} {ranges[0]:.1f}{PAIR}{ranges[1]:.1f}")
    return "range of the means over each sweep: " + ", ".join(cells)


@claim("B5")
def _():
    run = "fedcl_gmm_sync/mnist"
    below = (gain(run, "", "fedcl", "fedgen-e") < 0).sum()
    return f"FedCL - FedGen at e times its learning rate {both(run, '', 'fedcl', 'fedgen-e')}; below it in {below} of 3 trials"


@claim("B6")
def _():
    return f"rank correlation {summary('fedcl_gmm_sync/mnist')['table']['']['fedcl']['rank_correlation']:+.2f}"


# --------------------------------------------------------------------------- C: FedCL, critical learning periods


def selected(folder: str, method: str) -> dict:
    """A method's line of selection.csv (one setting)."""
    return next(row for row in rows(folder, "selection.csv") if row["method"] == method)


@claim("C1")
def _():
    cells = [f"CIFAR-10, alpha .1: FedCL - FedAvg {both('fedcl_fgn/cifar10', '', 'fedavg+cl', 'fedavg')}"]
    cells.append(f"digits, 60 rounds, alpha .1: {both('fedcl_fgn/default', '', 'fedavg+cl', 'fedavg')}")
    run = "fedcl_fgn/digits-fig2"
    cells += [f"20 rounds, alpha {a}: {both(run, f'alpha={a}', 'fedavg+cl', 'fedavg')}" for a in (0.1, 0.2, 0.3)]
    return "; ".join(cells)


@claim("C2")
def _():
    cells = []
    for name, run in {"CIFAR-10": "fedcl_fgn/cifar10", "digits": "fedcl_fgn/digits-fig18"}.items():
        cl, base = selected(run, "fedavg+cl"), selected(run, "fedavg")
        cells.append(
            f"{name}: {cl['rounds_to']:.1f} rounds against {base['rounds_to']:.1f}, {cl['uploads_to']:.0f} uploads against "
            f"{base['uploads_to']:.0f}, {cl['clients'] / base['clients']:.1f} times the clients a round"
        )
    return "; ".join(cells)


@claim("C3")
def _():
    cells = [f"{b} {both(f'fedcl_fgn/digits-{b}', '', f'{b}+cl', b)}" for b in ("fedprox", "vrlsgd", "fednova")]
    cells += [f"{b} {both('fedcl_fgn/digits-fig39', f'base={b}', f'{b}+cl', b)}" for b in ("fedadagrad", "fedyogi", "fedadam")]
    return "with FedCL - alone: " + "; ".join(cells)


def critical(values: np.ndarray) -> np.ndarray:
    """Which rounds after the first Eq. 2 calls critical at delta = .01, from a signal by round (rounds,)."""
    return values[1:] / values[:-1] - 1 >= 0.01


def agreement(run: str, method: str) -> tuple[np.ndarray, float]:
    """Share of rounds in which FGN and FedFIM, read along the same trajectory, agree (trials,), and by chance."""
    a, b = ([critical(v) for v in curve(run, "", method, name)] for name in ("fgn", "fim"))
    p, q = np.mean(a), np.mean(b)
    return np.mean(np.equal(a, b), 1), p * q + (1 - p) * (1 - q)


FIM = {"batch": "fedcl_fgn/digits-fim-batch", "per-sample": "fedcl_fgn/digits-fim"}


@claim("C4")
def _():
    cells = []
    for name, run in FIM.items():
        share, chance = agreement(run, "fedavg")
        line = f"{name} FGN agrees with FedFIM in {100 * share.mean():.0f} % of the rounds"
        cells.append(f"{line} ({', '.join(f'{100 * x:.0f}' for x in share)} by trial), by chance {100 * chance:.0f} %")
    return "; ".join(cells)


@claim("C5")
def _():
    cells = []
    for name, run in FIM.items():
        fast, slow = (np.median(curve(run, "", "fedavg", f"{d}_seconds"), 1) for d in ("fgn", "fim"))
        small, large = (curve_ends(run, "", "fedavg", f"{d}_bytes").mean() / 2**20 for d in ("fgn", "fim"))
        times = slow / fast
        cells.append(
            f"{name} FGN is {times.min():.1f} to {times.max():.1f} times faster, {small:.1f} against {large:.1f} MiB at peak"
        )
    return "; ".join(cells)


DELTAS = (0.0, 0.01, 0.03, 0.05, 0.2, 0.35, 0.5)


@claim("C6")
def _():
    cells = []
    for alpha in (0.1, 0.3):
        run = f"fedcl_fgn/digits-fig10-alpha{alpha}"
        means = ", ".join(f"{trials(run, f'delta={d}', 'fedavg+cl').mean():.1f}" for d in DELTAS)
        slopes = (
            0.1 * slope(DELTAS, np.array([trials(run, f"delta={d}", "fedavg+cl", w) for d in DELTAS]))
            for w in ("final", "last10")
        )
        cells.append(f"alpha {alpha}: {means}; per .1 of delta " + PAIR.join(ci(s) for s in slopes))
    return ". ".join(cells)


@claim("C7")
def _():
    sweeps, cells = {"E": "fig12", "weight decay": "fig13", "M": "fig14", "participation m": "fig15"}, []
    for name, table in sweeps.items():
        run = f"fedcl_fgn/digits-{table}"
        final, last10 = ([gain(run, s, "fedavg+cl", "fedavg", what) for s in settings(run)] for what in ("final", "last10"))
        each = ", ".join(f"{s.split('=')[1]} {ci(d)}" for s, d in zip(settings(run), last10, strict=True))
        cells.append(f"{name} {each}; mean of the sweep {ci(np.mean(final, 0))}{PAIR}{ci(np.mean(last10, 0))}")
    return ". ".join(cells)


@claim("C8")
def _():
    run, stds, shares = "fedcl_fgn/digits-fig18", [], []
    windows = curve(run, "", "fedavg+cl", "critical")
    pairs = [(i, j) for i in range(len(windows)) for j in range(i)]
    third = windows.shape[1] // 3
    for name, part in {"the first third": windows[:, :third], "the rest": windows[:, third:]}.items():
        same = np.mean([np.mean(part[i] == part[j]) for i, j in pairs])
        p = part.mean(1)
        chance = np.mean([p[i] * p[j] + (1 - p[i]) * (1 - p[j]) for i, j in pairs])
        shares.append(f"{100 * same:.0f} % in {name} (by chance {100 * chance:.0f} %)")
    for arm in ("fedavg+cl", "fedavg"):
        stds += [f"{arm} " + PAIR.join(f"{trials(run, '', arm, what).std(ddof=1):.1f}" for what in ("final", "last10"))]
    counts = windows.sum(1)
    return (
        f"{counts.min():.0f} to {counts.max():.0f} of {windows.shape[1]} rounds critical; two seeds agree on "
        f"{' and '.join(shares)}; std of the accuracy over 5 seeds: {', '.join(stds)}"
    )


@claim("C9")
def _():
    cells = []
    for name, run in {"p of doubling": "fedcl_fgn/digits-fig47", "p of halving": "fedcl_fgn/digits-fig48"}.items():
        each = ", ".join(f"{s.split('=')[1]} {both(run, s, 'fedavg+random', 'fedavg')}" for s in settings(run))
        cells.append(f"random - FedAvg at {name} {each}")
    return "; ".join(cells)


@claim("C10")
def _():
    cells = []
    for name, run in {"CIFAR-10": "fedcl_fgn/cifar10", "digits": "fedcl_fgn/digits-fig18"}.items():
        line = selected(run, "fedavg+cl")
        cells.append(
            f"{name}: {line['early']:.0f} clients a round in the first third of the rounds, {line['late']:.0f} in the last"
        )
    return "; ".join(cells)


@claim("C11")
def _():
    cells = []
    for name, run in {"CIFAR-10": "fedcl_fgn/cifar10", "digits": "fedcl_fgn/digits"}.items():
        each = (f"FedCL - {arm} {both(run, '', 'fedavg+cl', f'fedavg+{arm}')}" for arm in ("constant", "shifted"))
        cells.append(f"{name}: {', '.join(each)}")
    smoothed = both("fedcl_fgn/window", "", "fedavg+cl", "fedavg+constant")
    return "; ".join(cells) + f"; digits, FGN averaged over 4 rounds: FedCL - constant {smoothed}"


# --------------------------------------------------------------------------------------------------------- D: FedAC

FEDAC, BASE_ARMS = "fedac_art/digits-table2", ("solo", "fedavg", "fedprox", "moon")
ONE_TRIAL = {"FedAvg": "fedac_art/cifar10-fedavg", "MOON": "fedac_art/cifar10-moon"}


@claim("D1")
def _():
    arms = {base: trials(FEDAC, f"base={base}", "base") for base in BASE_ARMS} | {
        "fedac": trials(FEDAC, "base=fedavg", "fedac")
    }
    order = ("fedac", "moon", "fedprox", "fedavg", "solo")
    steps = [f"{a} - {b} {ci(arms[a] - arms[b])}" for a, b in zip(order, order[1:], strict=False)]
    return ", ".join(f"{m} {arms[m].mean():.1f}" for m in order) + "; " + ", ".join(steps)


@claim("D2")
def _():
    each = ", ".join(f"{base} {both(FEDAC, f'base={base}', 'fedac', 'base')}" for base in BASE_ARMS)
    single = ", ".join(f"{base} {both(run, '', 'fedac', 'base')}" for base, run in ONE_TRIAL.items())
    return f"FedAC - its base. digits: {each}; CIFAR-10, 1 trial: {single}"


@claim("D3")
def _():
    a, b = (curve_ends(FEDAC, "base=fedavg", arm, "silhouette") for arm in ("fedac", "base"))
    return f"silhouette {a.mean():+.3f} against {b.mean():+.3f}, difference {ci(a - b, 3)}"


@claim("D4")
def _():
    run, cells = "fedac_art/digits-d4", []
    for features in ("pixels", "encoder"):
        small, large, rank = (
            curve_ends(run, f"features={features} flip={flip}", "base", column)
            for column, flip in (("noisy_small", 0.2), ("noisy_large", 0.2), ("spearman", 0.0))
        )
        cells.append(
            f"{features}: wrong labels in {100 * small.mean():.1f} % of P1 and {100 * large.mean():.1f} % of P2, "
            f"difference {ci(100 * (small - large))}, Spearman(cluster size, loss) {ci(rank, 2)}"
        )
    return "20 % wrong labels. " + "; ".join(cells)


@claim("D5")
def _():
    single = both(ONE_TRIAL["FedAvg"], "", "fedac", "random-groups")
    return (
        f"FedAC - random groups: digits {both('fedac_art/digits', '', 'fedac', 'random-groups')}; CIFAR-10, 1 trial: {single}"
    )


# -------------------------------------------------------------------------------------------------------- T: theory


def statements(*names: str) -> list[dict]:
    """Lines of theory/figures/check.json."""
    lines = json.loads((ROOT.parent / "theory" / "figures" / "check.json").read_text())
    return [next(line for line in lines if line["statement"] == name) for name in names]


def shown(line: dict) -> str:
    ratio = f", bound / truth {line['printed_ratio']:.2g}" if line["printed_ratio"] is not None else ""
    return f"{line['statement']}: {line['printed']}{ratio}"


@claim("T1")
def _():
    names = (
        "Theorem 1, sigma^3 and L on the noise",
        "Theorem 1, indices t = 1..T",
        "Theorem 1, bias over Q = 1000",
        "Theorem 1, random grid",
    )
    lines = statements(*names)
    return "; ".join(shown(line) for line in lines) + f" ({lines[-1]['note']}); corrected it {lines[-1]['corrected']}"


@claim("T2")
def _():
    lines = statements("Theorem 2, alpha missing on the left", "Theorem 2, no sigma, alpha restored", "Theorem 2, random grid")
    return "; ".join(shown(line) for line in lines) + f" ({lines[-1]['note']}); corrected it {lines[-1]['corrected']}"


@claim("T3")
def _():
    (line,) = statements("Remark, curriculum ends below anti")
    return line["note"]


@claim("T4")
def _():
    (line,) = statements("Remark, easy samples are more convex")
    return line["note"]


# ---------------------------------------------------------------------------------------------------------- command line


def cut(metrics: str, columns: list[str]) -> None:
    """Writes curves.csv beside a run's metrics.csv: the columns that a claim reads, rows without any of them left out."""
    with open(metrics, newline="") as file:
        lines = list(csv.DictReader(file))
    with open(Path(metrics).with_name("curves.csv"), "w", newline="") as file:
        writer = csv.DictWriter(
            file, ["setting", "method", "trial", "round", *columns], extrasaction="ignore", lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(line for line in lines if any(line[name] for name in columns))


def fill() -> None:
    """Writes the 'ours' cells into the tables of README.md, and below each table the commands of the runs it names."""
    lines, runs, inside = [], [], False
    for line in (ROOT / "README.md").read_text().splitlines():
        cells = re.split(r"(?<!\\)\|", line)
        if len(cells) > 4 and (name := (cells[1].split() or [""])[0]) in CELLS:
            runs += [run for run in re.findall(r"\]\((\w[^)]*)/summary\.json\)", line) if run not in runs]
            line = "|".join([*cells[:3], f" {CELLS[name]()} ", *cells[4:]])
        if line == "```":
            inside = False
        if not inside:
            lines.append(line)
        if line == "```bash":
            lines += [summary(run)["command"] for run in runs]
            runs, inside = [], True
    (ROOT / "README.md").write_text("\n".join(lines) + "\n")


def main(words: list[str]) -> None:
    """The command line."""
    if words[:1] == ["cut"]:
        cut(words[1], words[2:])
    elif words == ["fill"]:
        fill()
    else:
        for name in words or CELLS:
            print(f"{name}: {CELLS[name]()}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
