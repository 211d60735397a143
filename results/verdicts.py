"""python results/verdicts.py [CLAIM ...]

What our runs say to each of the papers' 40 claims: the 'ours' cells of results/claims.md, computed from the summary.json (and
the small csv) files beside this one. `pages.py` writes them into the page, and a test holds the page to them.

Brackets are 95 % Student intervals of paired differences over trials: the arms of a trial share partition, initial weights and
draws. `final | last ten` are the last round and the mean of the last ten rounds.
"""

import functools
import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import t as student

ROOT = Path(__file__).resolve().parent
CELLS = {}
PAIR = " \\| "  # between final and last ten; a bare | would end the cell of the table
WHATS = ("final", "last10")


def claim(name: str):
    """Registers the function that writes the cell of one claim."""
    return lambda cell: CELLS.setdefault(name, cell)


# ------------------------------------------------------------------------------------------------------ reading the runs


@functools.cache
def summary(run: str) -> dict:
    """The summary.json of one run, a folder under results/."""
    return json.loads((ROOT / run / "summary.json").read_text())


def settings(run: str) -> list[str]:
    return list(summary(run)["results"])


def trials(run: str, setting: str, method: str, what: str = "final") -> np.ndarray:
    """Accuracy in % of each trial (trials,): `what` is final, last10 or best."""
    return np.array(summary(run)["results"][setting][method][what])


def gain(run: str, setting: str, a: str, b: str, what: str = "final") -> np.ndarray:
    """Accuracy of a - accuracy of b in each trial (trials,)."""
    return trials(run, setting, a, what) - trials(run, setting, b, what)


@functools.cache
def frame(run: str, name: str) -> pd.DataFrame:
    """A csv file beside a summary."""
    table = pd.read_csv(ROOT / run / name, dtype={"setting": str})
    return table.assign(setting=table.setting.fillna("")) if "setting" in table else table


def curve(run: str, setting: str, method: str, column: str = "accuracy") -> np.ndarray:
    """A column of curves.csv by trial and round (trials, rounds), rounds without it left out."""
    own = frame(run, "curves.csv").query("setting == @setting and method == @method").dropna(subset=column)
    return own.pivot(index="trial", columns="round", values=column).to_numpy()


# ------------------------------------------------------------------------------------------------------------ statistics


def bounds(d: np.ndarray) -> tuple[float, float, float]:
    """Mean of d (trials,) and its two-sided 95 % Student interval."""
    half = student.ppf(0.975, len(d) - 1) * d.std(ddof=1) / math.sqrt(len(d))
    return d.mean(), d.mean() - half, d.mean() + half


def ci(d: np.ndarray, digits: int = 1) -> str:
    """'+1.2 [-0.3, +2.7]'; of one trial without the brackets."""
    if len(d) == 1:
        return f"{d[0]:+.{digits}f}"
    return "{0:+.{n}f} [{1:+.{n}f}, {2:+.{n}f}]".format(*bounds(np.asarray(d)), n=digits)


def both(run: str, setting: str, a: str, b: str) -> str:
    """The paired difference a - b: final | mean of the last ten rounds."""
    return PAIR.join(ci(gain(run, setting, a, b, what)) for what in WHATS)


def slope(x, y) -> np.ndarray:
    """Least-squares slope of y (points, trials) over x (points,), one for each trial."""
    x = np.asarray(x, dtype=float) - np.mean(x)
    return x @ np.asarray(y) / (x @ x)


def means(arms: dict[str, np.ndarray]) -> str:
    return ", ".join(f"{name} {values.mean():.1f}" for name, values in arms.items())


def chance(p: float, q: float) -> float:
    """How often two independent windows with shares p and q agree."""
    return p * q + (1 - p) * (1 - q)


# --------------------------------------------------------------------- A: when do curricula work in federated learning?

SCORES = ("G", "L", "LG", "G_pred", "L_pred", "LG_pred")
ORDERS = ("curriculum", "anti", "random", "vanilla")
BASES = {"FedAvg": "table1", "FedProx": "table2", "FedNova": "table3", "SCAFFOLD": "table4"}
BETAS = (0.05, 0.2, 0.9)
PARTS = {"IID": "iid", "skew 2": "label-skew"}
FAMILIES, PACING_A = ("linear", "quadratic", "root", "step", "exponential"), (0.1, 0.5, 0.8)
PACING_B = (0.0025, 0.1, 0.2, 0.5, 0.8)
FIG1, CIFAR10 = "fedavg_curriculum/digits-fig1", "fedavg_curriculum/cifar10-table1"
EXPOSURE = {beta: f"fedavg_curriculum/cifar10-exposure-alpha{beta}" for beta in (0.05, 0.9)}


@claim("A1")
def _():
    def orders(partition):
        setting = f"partition={partition} score=G"
        return "; ".join(f"- {o} {both(FIG1, setting, 'curriculum', o)}" for o in ("random", "anti", "vanilla"))

    return ". ".join(f"{name}: curriculum {orders(partition)}" for name, partition in PARTS.items())


@claim("A2")
def _():
    cells = []
    for name, partition in PARTS.items():
        final = {s: trials(FIG1, f"partition={partition} score={s}", "curriculum") for s in SCORES}
        ranked = dict(sorted(final.items(), key=lambda item: -item[1].mean()))
        rivals = dict.fromkeys((next(s for s in ranked if s != "G"), "L_pred"))
        cells.append(f"{name}: {means(ranked)}; G " + "; ".join(f"- {s} {ci(final['G'] - final[s])}" for s in rivals))
    return ". ".join(cells)


@claim("A3")
def _():
    def more(other, what):
        skew, iid = (gain(FIG1, f"partition={p} score=G", "curriculum", other, what) for p in ("label-skew", "iid"))
        return ci(skew - iid)

    return "; ".join(
        f"gain over {o}, skew 2 - IID: " + PAIR.join(more(o, what) for what in WHATS) for o in ("vanilla", "random")
    )


@claim("A4")
def _():
    cells = []
    for name, run in {"IID": "fedavg_curriculum/digits-fig2", "Dir(.05)": "fedavg_curriculum/digits-fig12"}.items():
        for order in ORDERS[:3]:
            by_family = [[trials(run, f"pacing={f} pacing_a={a}", order) for a in PACING_A] for f in FAMILIES]
            slopes = [slope(PACING_A, accuracy) for accuracy in by_family]
            rising = sum(s.mean() > 0 for s in slopes)
            cells.append(f"{name}, {order}: {ci(np.mean(slopes, 0))}, rising in {rising} of 5 families")
    return "; ".join(cells)


@claim("A5")
def _():
    run, cells = "fedavg_curriculum/digits-fig3", []
    for name, partition in {"IID": "iid", "Dir(.05)": "dirichlet"}.items():
        for order in ORDERS[:3]:
            y = [trials(run, f"partition={partition} pacing_b={b}", order) for b in PACING_B]
            cells.append(f"{name}, {order}: {ci(slope(PACING_B, y))}")
    return "; ".join(cells)


def gains(scale: str, other: str, what: str = "final") -> dict[tuple[str, float], np.ndarray]:
    """A_curr of Tables 1-4: curriculum - `other` for each base and beta (trials,)."""
    runs = {base: f"fedavg_curriculum/{scale}-{table}" for base, table in BASES.items()}
    return {(base, b): gain(run, f"alpha={b}", "curriculum", other, what) for base, run in runs.items() for b in BETAS}


@claim("A6")
def _():
    digits = []
    for other in ("vanilla", "random", "anti"):
        for what, name in zip(WHATS, ("final", "last ten"), strict=True):
            every = list(gains("digits", other, what).values())
            above, below = (sum(sign * bounds(d)[end] > 0 for d in every) for sign, end in ((1, 1), (-1, 2)))
            count = f"above / holding / below 0: {above} / {len(every) - above - below} / {below}"
            digits.append(f"- {other}, {name}: mean of the 12 {ci(np.mean(every, 0))}, {count}")

    def apart(places, others):
        cells = (", ".join(f"- {o} {both(*place, 'curriculum', o)}" for o in others) for place in places.values())
        return "; ".join(f"Dir({str(b)[1:]}) {cell}" for b, cell in zip(places, cells, strict=True))

    longer = apart({b: (run, "") for b, run in EXPOSURE.items()}, ("vanilla", "random", "shuffled"))
    short = apart({b: (CIFAR10, f"alpha={b}") for b in BETAS}, ORDERS[:0:-1])
    return f"CIFAR-10, FedAvg, 40 rounds: {longer}. 20 rounds: {short}. digits: {'; '.join(digits)}"


@claim("A7")
def _():
    digits, cifar, longer = [], [], []
    for other in ("vanilla", "random"):
        runs = [gains("digits", other, what) for what in WHATS]
        each = {base: [a[base, 0.05] - a[base, 0.9] for a in runs] for base in BASES}
        each["mean"] = list(np.mean(list(each.values()), 0))
        digits.append(f"gain over {other}: " + ", ".join(f"{base} {PAIR.join(map(ci, d))}" for base, d in each.items()))
        rise = [np.subtract(*(gain(CIFAR10, f"alpha={b}", "curriculum", other, w) for b in (0.05, 0.9))) for w in WHATS]
        cifar.append(f"gain over {other} {PAIR.join(map(ci, rise))}")
        rise = [np.subtract(*(gain(run, "", "curriculum", other, w) for run in EXPOSURE.values())) for w in WHATS]
        longer.append(f"gain over {other} {PAIR.join(map(ci, rise))}")
    cells = f"40 rounds: {', '.join(longer)}. 20 rounds: {', '.join(cifar)}"
    return f"A_curr at .05 - at .9, CIFAR-10, FedAvg, {cells}. digits: {'. '.join(digits)}"


@claim("A8")
def _():
    run, parts = "fedavg_curriculum/fmnist-fig10", (100, 200, 400, 800)
    cells = [", ".join(f"P = {p}: vanilla {trials(run, f'parts={p}', 'vanilla').mean():.1f}" for p in parts)]
    for other in ("vanilla", "random"):
        a = [gain(run, f"parts={p}", "curriculum", other) for p in parts]
        cells.append(
            f"gain over {other} {', '.join(f'{x.mean():+.1f}' for x in a)}, per doubling of P {ci(slope(range(4), a))}"
        )
    return "; ".join(cells)


@claim("A9")
def _():
    run, cells = "client_curriculum/digits-fig4", []
    for name, other in {"random": "data-random", "vanilla": "vanilla"}.items():
        for beta in (0.2, 0.05):
            each = [f"f_ord {f:.0f} {both(run, f'alpha={beta} f_ord={f}', 'data', other)}" for f in (0.0, 1.0)]
            cells.append(f"Dir({str(beta)[1:]}), data curriculum - {name}: {', '.join(each)}")
    inside = frame("client_curriculum/cifar10-consistency", "consistency.csv").set_index("setting").inside
    stds = [
        f"Dir({b[1:]}) {inside[f'alpha={b} f_ord=0.0']:.2f} -> {inside[f'alpha={b} f_ord=1.0']:.2f}" for b in ("0.2", "0.05")
    ]
    return "; ".join(cells) + f". std inside clients on CIFAR-10 (1 trial): {', '.join(stds)}"


@claim("A10")
def _():
    arms = {"vanilla": "vanilla", "random": "client-random", "anti": "client-anti"}
    run, cifar = "client_curriculum/digits-orders", "client_curriculum/cifar10-rivals"
    digits = "; ".join(f"client curriculum - {name} {both(run, '', 'client', arm)}" for name, arm in arms.items())
    rivals = "; ".join(f"- {name} {both(cifar, '', 'client', arm)}" for name, arm in arms.items() if name != "vanilla")
    fmnist = both("client_curriculum/fmnist-fig7", "", "client", "vanilla")
    return f"{digits}. CIFAR-10: {rivals}. Fashion-MNIST, f_ord .9: - vanilla {fmnist}"


@claim("A11")
def _():
    def apart(run, who, a, b):
        """Accuracy of two (score, arm) apart, in the first and the last quarter of the rounds, mean over both alphas."""
        arms = [[curve(run, f"alpha={alpha} score={s}", arm) for s, arm in (a, b)] for alpha in (0.2, 0.05)]
        d = np.mean([x - y for x, y in arms], 0)
        quarter = d.shape[1] // 4
        return f"{ci(d[:, :quarter].mean(1))} first quarter, {ci(d[:, -quarter:].mean(1))} last"

    cells = []
    for who, name in {"data": "data", "client": "clients"}.items():
        run = f"client_curriculum/digits-fig6-{name}"
        cells.append(f"{who} curriculum: E - G {apart(run, who, ('E', who), ('G', who))}, ")
        cells[-1] += f"G - random {apart(run, who, ('G', who), ('G', f'{who}-random'))}"
    return "; ".join(cells)


@claim("A12")
def _():
    run, arms = "client_curriculum/fmnist-fig7", ("client", "data", "vanilla")
    differences = [f"client+data - {arm} {both(run, '', 'client+data', arm)}" for arm in arms]
    return "; ".join([means({arm: trials(run, "", arm) for arm in ("client+data", *arms)}), *differences])


@claim("A13")
def _():
    run, cells = "fedavg_curriculum/digits-dissimilarity", []
    for order in ("vanilla", "curriculum"):
        log = {name: np.log(curve(run, "", order, f"lambda_{name}")) for name in ("easy", "all", "hard")}
        half = log["all"].shape[1] // 2
        for phase, part in {"first half": np.s_[:, :half], "second half": np.s_[:, half:]}.items():
            levels = ", ".join(f"{name} {math.exp(x[part].mean()):.1f}" for name, x in log.items())
            ratio = np.exp(bounds((log["easy"] - log["all"])[part].mean(1)))
            cells.append(f"under {order}, {phase}: {levels}; easy / all {ratio[0]:.2f} [{ratio[1]:.2f}, {ratio[2]:.2f}]")
    return "; ".join(cells)


@claim("A14")
def _():
    return "not run"


# -------------------------------------------------------------------------------- B: FedCL, multi-phase synchronisation

RIVALS = ("fedcl", "fedgen", "fedensemble", "fedavg")
MNIST = {alpha: f"fedcl_gmm_sync/mnist-200-alpha{alpha}" for alpha in (0.05, 0.1, 1)}


@claim("B1")
def _():
    cells = []
    for alpha, run in MNIST.items():
        steps = [f"{a} - {b} {both(run, '', a, b)}" for a, b in itertools.pairwise(RIVALS)]
        cells.append(f"alpha {alpha}: {means({m: trials(run, '', m) for m in RIVALS})}; {', '.join(steps)}")
    return ". ".join(cells)


@claim("B2")
def _():
    cells = []
    for what, name in zip(WHATS, ("final", "last ten"), strict=True):
        each = {alpha: gain(run, "", "fedcl", "fedavg", what) for alpha, run in MNIST.items()}
        by_alpha = ", ".join(f"{alpha}: {ci(d)}" for alpha, d in each.items())
        cells.append(f"FedCL - FedAvg, {name}, at alpha {by_alpha}; at .05 - at 1 {ci(each[0.05] - each[1])}")
    return ". ".join(cells)


@claim("B3")
def _():
    cells = []
    for alpha, run in MNIST.items():
        by_method = frame(run, "results.csv").pivot(index="trial", columns="method")
        reached, own = by_method["rounds"].notna().sum(), []
        for m in ("fedcl", "fedgen", "fedcl-fresh", "fedgen-e"):
            mean = f"{by_method['rounds'][m].mean():.0f} rounds, {by_method['updates'][m].mean():.0f} uploads"
            own.append(f"{m} {mean} in {reached[m]} trials")
        apart = [(by_method[of]["fedcl"] - by_method[of]["fedgen"]).dropna().to_numpy() for of in ("rounds", "updates")]
        cells.append(f"alpha {alpha}: {', '.join(own)}; fedcl - fedgen {ci(apart[0])} rounds, {ci(apart[1])} uploads")
    return ". ".join(cells)


@claim("B4")
def _():
    tables, cells = {"P": "4", "phases": "5", "lambda": "6-lambda", "tau": "6-tau", "S": "6-s", "v": "6-v"}, []
    for name, table in tables.items():
        run = f"fedcl_gmm_sync/digits-table{table}"
        ranges = [np.ptp([trials(run, s, "fedcl", what).mean() for s in settings(run)]) for what in WHATS]
        cells.append(f"{name} {ranges[0]:.1f}{PAIR}{ranges[1]:.1f}")
    return "range of the means over each sweep: " + ", ".join(cells)


@claim("B5")
def _():
    def apart(run, arm):
        return f"{arm} - fedgen-e {both(run, '', arm, 'fedgen-e')}, {trials(run, '', arm, 'uploads').mean():.0f} uploads"

    cells = [f"alpha {alpha}: {apart(run, 'fedcl')}; {apart(run, 'fedcl-fresh')}" for alpha, run in MNIST.items()]
    uploads = trials(MNIST[0.1], "", "fedgen-e", "uploads").mean()
    return ". ".join(cells) + f". fedgen-e is FedGen at e times its learning rate, {uploads:.0f} uploads"


@claim("B6")
def _():
    rho = {a: frame(run, "results.csv").query("method == 'fedcl'").rank_correlation for a, run in MNIST.items()}
    return "rank correlation, mean over rounds, at alpha " + ", ".join(f"{a}: {ci(x.to_numpy(), 3)}" for a, x in rho.items())


# --------------------------------------------------------------------------- C: FedCL, critical learning periods

FGN = {"CIFAR-10": ("fedcl_fgn/cifar10", ""), "Fashion-MNIST": ("fedcl_fgn/fmnist-alpha", "alpha=0.1")}
FGN |= {"digits": ("fedcl_fgn/digits-fig18", "")}
DELTAS = (0.0, 0.01, 0.03, 0.05, 0.2, 0.35, 0.5)


def selected(run: str, setting: str, method: str) -> pd.Series:
    """A method's line of selection.csv."""
    return frame(run, "selection.csv").set_index(["setting", "method"]).loc[setting, method]


@claim("C1")
def _():
    fmnist, arms = "fedcl_fgn/fmnist-alpha", ("fedavg+cl", "fedavg")
    cells = [f"Fashion-MNIST, alpha {a}: {both(fmnist, f'alpha={a}', *arms)}" for a in (0.1, 0.3)]
    more = [np.subtract(*(gain(fmnist, f"alpha={a}", *arms, what) for a in (0.1, 0.3))) for what in WHATS]
    cells += [f".1 - .3: {PAIR.join(map(ci, more))}", f"CIFAR-10, alpha .1: {both('fedcl_fgn/cifar10', '', *arms)}"]
    uploads = np.divide(*(trials(fmnist, "alpha=0.1", arm, "uploads") for arm in arms)).mean()
    return f"FedCL - FedAvg: {'; '.join(cells)}; at {uploads:.1f} times the uploads"


@claim("C2")
def _():
    cells = []
    for name, place in FGN.items():
        cl, base = selected(*place, "fedavg+cl"), selected(*place, "fedavg")
        rounds = f"{cl['rounds_to']:.1f} rounds against {base['rounds_to']:.1f}"
        uploads = f"{cl['uploads_to']:.0f} uploads against {base['uploads_to']:.0f}"
        cells.append(f"{name}: {rounds}, {uploads}, {cl['clients'] / base['clients']:.1f} times the clients a round")
    return "; ".join(cells)


@claim("C3")
def _():
    runs = {b: (f"digits-{b}", "") for b in ("fedprox", "vrlsgd", "fednova")}
    runs |= {b: ("digits-fig39", f"base={b}") for b in ("fedadagrad", "fedyogi", "fedadam")}
    each = [f"{b} {both(f'fedcl_fgn/{run}', setting, f'{b}+cl', b)}" for b, (run, setting) in runs.items()]
    return "with FedCL - alone: " + "; ".join(each)


@claim("C4")
def _():
    agree, cells = frame("fedcl_fgn", "agreement.csv").set_index(["signal", "and"]), []
    for name in ("batch", "per_sample"):
        for other in ("other", "same"):
            row = agree.loc[f"fgn {name} same", f"fim {other}"]
            said = (
                f"in {100 * row['alike']:.0f} % of the rounds (by chance {100 * row['by chance']:.0f} %, kappa {row.kappa:.2f})"
            )
            cells.append(f"{name.replace('_', '-')} FGN agrees with FedFIM read on {other} clients {said}")
    return "; ".join(cells)


@claim("C5")
def _():
    cost = frame("fedcl_fgn", "cost.csv").set_index(["what", "pair"])
    fim, cells = cost.loc["FedFIM"], []
    for name in ("batch", "per_sample"):
        own = cost.loc[f"FGN {name}"]
        times, memory = fim.seconds / own.seconds, own.MiB / fim.MiB
        cells.append(f"{name.replace('_', '-')} FGN is {times.min():.1f} to {times.max():.0f} times faster")
        cells[-1] += f" and takes {memory.min():.2f} to {memory.max():.2f} of its memory" if name != "batch" else ""
    return "; ".join(cells) + f" ({', '.join(fim.index)})"


@claim("C6")
def _():
    cells = []
    for alpha in (0.1, 0.3):
        by_what = [
            [trials(f"fedcl_fgn/digits-fig10-alpha{alpha}", f"delta={d}", "fedavg+cl", w) for d in DELTAS] for w in WHATS
        ]
        slopes = PAIR.join(ci(0.1 * slope(DELTAS, accuracy)) for accuracy in by_what)
        cells.append(f"alpha {alpha}: {', '.join(f'{x.mean():.1f}' for x in by_what[0])}; per .1 of delta {slopes}")
    return ". ".join(cells)


@claim("C7")
def _():
    cells = []
    for name, table in {"E": "fig12", "weight decay": "fig13", "M": "fig14", "participation m": "fig15"}.items():
        run = f"fedcl_fgn/digits-{table}"
        final, last10 = ([gain(run, s, "fedavg+cl", "fedavg", what) for s in settings(run)] for what in WHATS)
        each = ", ".join(f"{s.split('=')[1]} {ci(d)}" for s, d in zip(settings(run), last10, strict=True))
        cells.append(f"{name} {each}; mean of the sweep {ci(np.mean(final, 0))}{PAIR}{ci(np.mean(last10, 0))}")
    return ". ".join(cells)


@claim("C8")
def _():
    (run, _), shares = FGN["digits"], []
    windows = curve(run, "", "fedavg+cl", "critical")
    pairs, third = [(i, j) for i in range(len(windows)) for j in range(i)], windows.shape[1] // 3
    for name, part in {"the first third": windows[:, :third], "the rest": windows[:, third:]}.items():
        same, p = np.mean([np.mean(part[i] == part[j]) for i, j in pairs]), part.mean(1)
        by_chance = np.mean([chance(p[i], p[j]) for i, j in pairs])
        shares.append(f"{100 * same:.0f} % in {name} (by chance {100 * by_chance:.0f} %)")
    arms = ("fedavg+cl", "fedavg")
    stds = [f"{arm} " + PAIR.join(f"{trials(run, '', arm, what).std(ddof=1):.1f}" for what in WHATS) for arm in arms]
    counts = f"{windows.sum(1).min():.0f} to {windows.sum(1).max():.0f} of {windows.shape[1]} rounds critical"
    return f"{counts}; two seeds agree on {' and '.join(shares)}; std of the accuracy over 5 seeds: {', '.join(stds)}"


@claim("C9")
def _():
    runs = {"doubling": "fedcl_fgn/digits-fig47", "halving": "fedcl_fgn/digits-fig48"}
    each = {
        p: [f"{s.split('=')[1]} {both(run, s, 'fedavg+random', 'fedavg')}" for s in settings(run)] for p, run in runs.items()
    }
    return "; ".join(f"random - FedAvg at p of {p} {', '.join(cells)}" for p, cells in each.items())


@claim("C10")
def _():
    lines = {name: selected(*place, "fedavg+cl") for name, place in FGN.items()}
    share = "clients a round in the first third of the rounds"
    return "; ".join(f"{name}: {x['early']:.0f} {share}, {x['late']:.0f} in the last" for name, x in lines.items())


@claim("C11")
def _():
    equal = {"CIFAR-10": "select-cifar10-others", "CIFAR-10 at 2,200": "select-cifar10-u2200-others"}
    equal |= {"Fashion-MNIST": "select-fmnist-others", "digits": "select-digits"}
    cells = [f"{name} {both(f'fedcl_fgn/{run}', '', 'fedavg+cl', 'fedavg+constant')}" for name, run in equal.items()]
    late = {"CIFAR-10": "fedcl_fgn/cifar10", "digits": "fedcl_fgn/digits"}
    shifted = [f"{name} {both(run, '', 'fedavg+cl', 'fedavg+shifted')}" for name, run in late.items()]
    return f"FedCL - constant, equal uploads (960): {', '.join(cells)}; FedCL - shifted: {', '.join(shifted)}"


# --------------------------------------------------------------------------------------------------------- D: FedAC

FEDAC, BASE_ARMS = "fedac_art/fmnist-table2", ("solo", "fedavg", "fedprox", "moon")


@claim("D1")
def _():
    arms = {"fedac": trials(FEDAC, "base=fedavg", "fedac", "last10")}
    arms |= {base: trials(FEDAC, f"base={base}", "base", "last10") for base in reversed(BASE_ARMS)}
    steps = [f"{a} - {b} {ci(arms[a] - arms[b])}" for a, b in zip(arms, list(arms)[1:], strict=False)]
    return f"{means(arms)}; {', '.join(steps)}"


@claim("D2")
def _():
    return "FedAC - its base: " + ", ".join(f"{b} {both(FEDAC, f'base={b}', 'fedac', 'base')}" for b in BASE_ARMS)


@claim("D3")
def _():
    cells, seen = [], frame(FEDAC, "measures.csv").set_index(["setting", "method"]).silhouette
    for base in BASE_ARMS:
        a, b = (seen[f"base={base}", arm].to_numpy() for arm in ("fedac", "base"))
        cells.append(f"{base} {a.mean():.3f} against {b.mean():.3f}, difference {ci(a - b, 3)}")
    return f"silhouette under FedAC and its base: {'; '.join(cells)}"


@claim("D4")
def _():
    def seen(features, column, flip):
        return curve("fedac_art/digits-d4", f"features={features} flip={flip}", "base", column)[:, -1]

    cells = []
    for features in ("pixels", "encoder"):
        small, large = (100 * seen(features, column, 0.2) for column in ("noisy_small", "noisy_large"))
        wrong = f"wrong labels in {small.mean():.1f} % of P1 and {large.mean():.1f} % of P2, difference {ci(small - large)}"
        cells.append(f"{features}: {wrong}, Spearman(cluster size, loss) {ci(seen(features, 'spearman', 0.0), 2)}")
    return "20 % wrong labels. " + "; ".join(cells)


@claim("D5")
def _():
    cells = [f"{what} {both('fedac_art/fmnist-controls', '', 'fedac', f'random-{what}')}" for what in ("groups", "classes")]
    return f"FedAC - random: {'; '.join(cells)}"


# -------------------------------------------------------------------------------------------------------- T: theory


def statement(name: str) -> dict:
    """A line of theory/figures/check.json."""
    lines = json.loads((ROOT.parent / "theory" / "figures" / "check.json").read_text())
    return next(line for line in lines if line["statement"] == name)


def theorem(*names: str) -> str:
    lines, cells = [statement(name) for name in names], []
    for line in lines:
        ratio = f", bound / truth {line['printed_ratio']:.2g}" if line["printed_ratio"] is not None else ""
        cells.append(f"{line['statement']}: {line['printed']}{ratio}")
    return f"{'; '.join(cells)} ({lines[-1]['note']}); corrected it {lines[-1]['corrected']}"


@claim("T1")
def _():
    parts = ("sigma^3 and L on the noise", "indices t = 1..T", "bias over Q = 1000", "random grid")
    return theorem(*(f"Theorem 1, {part}" for part in parts))


@claim("T2")
def _():
    return theorem(*(f"Theorem 2, {p}" for p in ("alpha missing on the left", "no sigma, alpha restored", "random grid")))


@claim("T3")
def _():
    return "; ".join(statement(f"Remark, {n}")["note"] for n in ("curriculum ends below anti", "the same through the drift"))


@claim("T4")
def _():
    return statement("Remark, easy samples are more convex")["note"]


def main(names: list[str]) -> None:
    """Prints the cells of the named claims, or of all."""
    for name in names or CELLS:
        print(f"{name}: {CELLS[name]()}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
