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
WHATS = {"final": "final", "last10": "last ten"}


def claim(name: str, sep: str = "; ", start: str = ""):
    """Registers the function that returns the cell of one claim, or yields its parts."""

    def register(cell):
        CELLS[name] = lambda: said if isinstance(said := cell(), str) else start + sep.join(said)

    return register


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


def pair(d) -> str:
    """Two differences (2, trials): final | mean of the last ten rounds."""
    return PAIR.join(map(ci, d))


def both(run: str, setting: str, a: str, b: str) -> str:
    """The paired difference a - b: final | mean of the last ten rounds."""
    return pair(gain(run, setting, a, b, what) for what in WHATS)


def minus(run: str, setting: str, a: str, others, sep: str = "; ") -> str:
    """'- b +1.2 [..] | .., - c ..': the paired differences a - b for each b of `others`."""
    return sep.join(f"- {b.removeprefix('client-')} {both(run, setting, a, b)}" for b in others)


def spread(values: list[float]) -> str:
    """'91.76 +- 2.52', the mean and standard deviation over trials; of one trial the value."""
    std = f" +- {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{std}"


def slope(x, y) -> np.ndarray:
    """Least-squares slope of y (points, trials) over x (points,), one for each trial."""
    return np.polyfit(x, y, 1)[0]


def means(arms: dict[str, np.ndarray]) -> str:
    return ", ".join(f"{name} {values.mean():.1f}" for name, values in arms.items())


# --------------------------------------------------------------------- A: when do curricula work in federated learning?

SCORES = ("G", "L", "LG", "G_pred", "L_pred", "LG_pred")
ORDERS = ("curriculum", "anti", "random", "vanilla")
BETAS = (0.05, 0.2, 0.9)
BASES = dict.fromkeys(("FedAvg", "FedProx"), "fmnist-bases") | dict.fromkeys(("FedNova", "SCAFFOLD"), "fmnist-bases-eta0.001")
PARTS = {"IID": "partition=iid", "skew 2": "partition=label-skew"}
FAMILIES, PACING_A = ("linear", "quadratic", "root", "step", "exponential"), (0.1, 0.8)
PACING_B = (0.0025, 0.1, 0.2, 0.5, 0.8)
FIG1, FIG1_G, CIFAR10 = "fedavg_curriculum/fmnist-fig1", "fedavg_curriculum/fmnist-fig1-G", "fedavg_curriculum/cifar10-table1"
EXPOSURE = {beta: f"fedavg_curriculum/cifar10-exposure-alpha{beta}" for beta in (0.05, 0.9)}


@claim("A1", sep=". ")
def _():
    for name, setting in PARTS.items():
        yield f"{name}: curriculum {minus(FIG1_G, setting, 'curriculum', ('random', 'anti', 'vanilla'))}"


@claim("A2", sep=". ")
def _():
    for name, setting in PARTS.items():
        both_of = {s: np.array([trials(FIG1, f"{setting} score={s}", "curriculum", what) for what in WHATS]) for s in SCORES}
        ranked = dict(sorted(((s, own[1]) for s, own in both_of.items()), key=lambda item: -item[1].mean()))
        rivals = dict.fromkeys((next(s for s in ranked if s != "G"), "L_pred"))
        yield f"{name}, last ten: {means(ranked)}; G " + "; ".join(f"- {s} {pair(both_of['G'] - both_of[s])}" for s in rivals)


def rise(here: tuple[str, str], there: tuple[str, str], other: str) -> list[np.ndarray]:
    """A_curr, curriculum - `other`, in one (run, setting) less that in another: final and last ten (2, trials)."""
    return [np.subtract(*(gain(*place, "curriculum", other, what) for place in (here, there))) for what in WHATS]


@claim("A3")
def _():
    for other in ("vanilla", "random"):
        more = rise((FIG1_G, PARTS["skew 2"]), (FIG1_G, PARTS["IID"]), other)
        yield f"gain over {other}, skew 2 - IID: {pair(more)}"


@claim("A4")
def _():
    runs = {"IID": "fedavg_curriculum/fmnist-fig2", "Dir(.05)": "fedavg_curriculum/fmnist-fig12"}
    for (name, run), order in itertools.product(runs.items(), ORDERS[:3]):
        seen = [[[trials(run, f"pacing={f} pacing_a={a}", order, what) for f in FAMILIES] for a in PACING_A] for what in WHATS]
        rising = sum(slope(PACING_A, np.mean(seen[1], 2)) > 0)
        yield f"{name}, {order}: {pair(slope(PACING_A, np.mean(y, 1)) for y in seen)}, rising in {rising} of 5 families"


@claim("A5")
def _():
    for (name, partition), order in itertools.product({"IID": "iid", "Dir(.05)": "dirichlet"}.items(), ORDERS[:3]):
        run, each = "fedavg_curriculum/fmnist-fig3", [f"partition={partition} pacing_b={b}" for b in PACING_B]
        yield f"{name}, {order}: {pair(slope(PACING_B, [trials(run, s, order, what) for s in each]) for what in WHATS)}"


def of_base(base: str, beta: float) -> tuple[str, str]:
    """(run, setting) of one of the four tables on Fashion-MNIST."""
    return f"fedavg_curriculum/{BASES[base]}", f"alpha={beta} base={base.lower()}"


@claim("A6")
def _():
    tables = []
    for other, (what, name) in itertools.product(("vanilla", "random"), WHATS.items()):
        every = {base: [gain(*of_base(base, b), "curriculum", other, what) for b in EXPOSURE] for base in BASES}
        cells = [d for each in every.values() for d in each]
        _, low, high = np.transpose([bounds(d) for d in cells])
        above, below = sum(low > 0), sum(high < 0)
        count = f"above / holding / below 0: {above} / {len(cells) - above - below} / {below}"
        by_beta = (f"Dir({str(b)[1:]}) {ci(np.mean([each[i] for each in every.values()], 0))}" for i, b in enumerate(EXPOSURE))
        tables.append(f"- {other}, {name}: {count}, mean of the bases {', '.join(by_beta)}")

    def apart(places, *others):
        return "; ".join(f"Dir({str(b)[1:]}) {minus(*place, 'curriculum', others, ', ')}" for b, place in places.items())

    whole = apart({b: (CIFAR10, f"alpha={b}") for b in BETAS}, "vanilla", "random", "anti")
    larger = apart({b: (run, "") for b, run in EXPOSURE.items()}, "vanilla", "random", "shuffled")
    cells = f"Table 1 whole: {whole}. 40 rounds at eta .01: {larger}"
    return f"CIFAR-10, FedAvg, {cells}. Fashion-MNIST, four bases at two beta: {'; '.join(tables)}"


@claim("A7")
def _():
    tables, whole, larger = [], [], []
    for other in ("vanilla", "random"):
        each = {base: rise(of_base(base, 0.05), of_base(base, 0.9), other) for base in BASES}
        each["mean"] = np.mean(list(each.values()), 0)
        tables.append(f"gain over {other}: " + ", ".join(f"{base} {pair(d)}" for base, d in each.items()))
        whole.append(f"gain over {other} {pair(rise((CIFAR10, 'alpha=0.05'), (CIFAR10, 'alpha=0.9'), other))}")
        larger.append(f"gain over {other} {pair(rise(*((run, '') for run in EXPOSURE.values()), other))}")
    cells = f"Table 1 whole: {', '.join(whole)}. 40 rounds at eta .01: {', '.join(larger)}"
    return f"A_curr at .05 - at .9, CIFAR-10, FedAvg, {cells}. Fashion-MNIST: {'. '.join(tables)}"


@claim("A8")
def _():
    run, parts = "fedavg_curriculum/fmnist-fig10", (100, 200, 400, 800)
    yield ", ".join(f"P = {p}: vanilla {trials(run, f'parts={p}', 'vanilla').mean():.1f}" for p in parts)
    for other in ("vanilla", "random"):
        seen = [[gain(run, f"parts={p}", "curriculum", other, what) for p in parts] for what in WHATS]
        slopes = pair(slope(range(4), a) for a in seen)
        yield f"gain over {other}, last ten {', '.join(map(ci, seen[1]))}, per doubling of P {slopes}"


@claim("A9")
def _():
    run, cells = "client_curriculum/fmnist-fig4", []
    for name, other in {"random": "data-random", "vanilla": "vanilla"}.items():
        for beta in (0.2, 0.05):
            each = [f"f_ord {f:.0f} {both(run, f'alpha={beta} f_ord={f}', 'data', other)}" for f in (0.0, 1.0)]
            cells.append(f"Dir({str(beta)[1:]}), data curriculum - {name}: {', '.join(each)}")
    inside = frame(run, "consistency.csv").groupby("setting").inside.agg(spread)
    stds = (f"Dir({b[1:]}) {inside[f'alpha={b} f_ord=0.0']} -> {inside[f'alpha={b} f_ord=1.0']}" for b in ("0.2", "0.05"))
    return "; ".join(cells) + f". std inside clients: {', '.join(stds)}"


@claim("A10")
def _():
    start, arms = "client curriculum, Fashion-MNIST, ", ("vanilla", "client-random", "client-anti")
    each = (f"Dir({str(b)[1:]}) {minus('client_curriculum/fmnist-fig5', f'alpha={b}', 'client', arms)}" for b in (0.2, 0.05))
    cifar = minus("client_curriculum/cifar10-rivals", "", "client", arms[1:])
    cells = f"f_ord .9: {minus('client_curriculum/fmnist-fig7', '', 'client', arms[:1])}. CIFAR-10: {cifar}"
    return f"{start}{'. '.join(each)}. {cells}"


@claim("A11")
def _():
    for who, run in {"data": "fmnist-fig6-data", "client": "fmnist-fig6-clients"}.items():

        def accuracy(arm, score, run=f"client_curriculum/{run}"):
            return np.mean([curve(run, f"alpha={alpha} score={score}", arm) for alpha in (0.2, 0.05)], 0)

        E, G, random = accuracy(who, "E"), accuracy(who, "G"), accuracy(f"{who}-random", "G")
        quarter = E.shape[1] // 4
        first, last = ([ci(d[:, part].mean(1)) for d in (E - G, G - random)] for part in (np.s_[:quarter], np.s_[-quarter:]))
        said = [f"{a} first quarter, {b} last" for a, b in zip(first, last, strict=True)]
        yield f"{who} curriculum: E - G {said[0]}, G - random {said[1]}"


@claim("A12")
def _():
    run, arms = "client_curriculum/fmnist-fig7", ("client", "data", "vanilla")
    differences = [f"client+data - {arm} {both(run, '', 'client+data', arm)}" for arm in arms]
    return "; ".join([means({arm: trials(run, "", arm) for arm in ("client+data", *arms)}), *differences])


@claim("A13")
def _():
    for order, half in itertools.product(("vanilla", "curriculum"), ("first", "second")):
        names, run = ("easy", "all", "hard"), "fedavg_curriculum/fmnist-dissimilarity"
        log = {name: np.log(curve(run, "", order, f"lambda_{name}")) for name in names}
        log = {name: np.array_split(x, 2, axis=1)[half == "second"] for name, x in log.items()}
        levels = ", ".join(f"{name} {math.exp(x.mean()):.1f}" for name, x in log.items())
        apart = {other: np.exp(bounds((log["easy"] - log[other]).mean(1))) for other in ("all", "hard")}
        ratios = ", ".join("easy / {} {:.2f} [{:.2f}, {:.2f}]".format(other, *ratio) for other, ratio in apart.items())
        yield f"under {order}, {half} half: {levels}; {ratios}"


# -------------------------------------------------------------------------------- B: FedCL, multi-phase synchronisation

RIVALS = ("fedcl", "fedgen", "fedensemble", "fedavg")
MNIST = {alpha: f"fedcl_gmm_sync/mnist-200-alpha{alpha}" for alpha in (0.05, 0.1, 1)}


@claim("B1", sep=". ")
def _():
    for alpha, run in MNIST.items():
        steps = ", ".join(f"{a} - {b} {both(run, '', a, b)}" for a, b in itertools.pairwise(RIVALS))
        yield f"alpha {alpha}: {means({m: trials(run, '', m) for m in RIVALS})}; {steps}"


@claim("B2", sep=". ")
def _():
    for what, name in WHATS.items():
        each = {alpha: gain(run, "", "fedcl", "fedavg", what) for alpha, run in MNIST.items()}
        by_alpha = ", ".join(f"{alpha}: {ci(d)}" for alpha, d in each.items())
        yield f"FedCL - FedAvg, {name}, at alpha {by_alpha}; at .05 - at 1 {ci(each[0.05] - each[1])}"


@claim("B3", sep=". ")
def _():
    for alpha, run in MNIST.items():
        found, own = frame(run, "results.csv").set_index(["method", "trial"])[["rounds", "updates"]], []
        for m in ("fedcl", "fedgen", "fedcl-fresh", "fedgen-e"):
            rounds, uploads = found.loc[m].mean()
            own.append(f"{m} {rounds:.0f} rounds, {uploads:.0f} uploads in {found.loc[m].rounds.count()} trials")
        apart = found.loc["fedcl"] - found.loc["fedgen"]
        late = f"later or never in {sum(~(apart.rounds <= 0))} of {len(apart)} trials"
        less = ", ".join(
            f"{ci(apart[what].dropna())} {name}" for what, name in {"rounds": "rounds", "updates": "uploads"}.items()
        )
        yield f"alpha {alpha}: {', '.join(own)}; fedcl - fedgen {less}, {late}"


@claim("B4", start="best - worst mean of each sweep: ")
def _():
    for name, table in {"P": "4", "phases": "5", "lambda": "6-lambda", "tau": "6-tau", "S": "6-s", "v": "6-v"}.items():
        run = f"fedcl_gmm_sync/mnist-table{table}"
        ranked = (sorted((trials(run, s, "fedcl", what) for s in settings(run)), key=np.mean) for what in WHATS)
        yield f"{name} {pair(best - worst for worst, *_, best in ranked)}"


@claim("B5", sep=". ")
def _():
    for alpha, run in MNIST.items():
        uploads = {arm: f"{trials(run, '', arm, 'uploads').mean():.0f} uploads" for arm in ("fedcl", "fedcl-fresh", "fedgen-e")}
        arms = (f"{arm} - fedgen-e {both(run, '', arm, 'fedgen-e')}, {uploads[arm]}" for arm in list(uploads)[:2])
        yield f"alpha {alpha}: {'; '.join(arms)}"
    yield f"fedgen-e is FedGen at e times its learning rate, {uploads['fedgen-e']}"


@claim("B6", sep=", ", start="rank correlation, mean over rounds, at alpha ")
def _():
    for alpha, run in MNIST.items():
        yield f"{alpha}: {ci(frame(run, 'results.csv').set_index('method').rank_correlation['fedcl'].to_numpy(), 3)}"


# --------------------------------------------------------------------------- C: FedCL, critical learning periods

FGN = {"CIFAR-10": ("fedcl_fgn/cifar10", ""), "Fashion-MNIST": ("fedcl_fgn/fmnist-alpha", "alpha=0.1")}
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
    uploads = (f"{np.divide(*(trials(*place, arm, 'uploads') for arm in arms)).mean():.1f}" for place in FGN.values())
    return f"FedCL - FedAvg: {'; '.join(cells)}; at {' (CIFAR-10) and '.join(uploads)} times the uploads"


@claim("C2")
def _():
    for name, place in FGN.items():
        cl, base = selected(*place, "fedavg+cl"), selected(*place, "fedavg")
        rounds = f"{cl.rounds_to:.1f} rounds against {base.rounds_to:.1f}"
        uploads = f"{cl.uploads_to:.0f} uploads against {base.uploads_to:.0f}"
        clients = cl.uploads_to / cl.rounds_to / (base.uploads_to / base.rounds_to)
        yield f"{name}: {rounds}, {uploads}, {clients:.1f} times the clients a round until then"


@claim("C3", start="with FedCL - alone: ")
def _():
    for run in ("fedcl_fgn/fmnist-fig6", "fedcl_fgn/fmnist-fig39"):
        for setting, base in ((setting, setting.removeprefix("base=")) for setting in settings(run)):
            times = np.divide(*(trials(run, setting, arm, "uploads").mean() for arm in (f"{base}+cl", base)))
            yield f"{base} {both(run, setting, f'{base}+cl', base)} ({times:.1f} times the uploads)"


@claim("C4")
def _():
    agree = frame("fedcl_fgn", "agreement.csv").set_index(["signal", "and"])
    for name, other in itertools.product(("batch", "per_sample"), ("other", "same")):
        alike, by_chance, kappa, *_ = agree.loc[f"fgn {name} same", f"fim {other}"]
        said = f"in {100 * alike:.0f} % of the rounds (by chance {100 * by_chance:.0f} %, kappa {kappa:.2f})"
        yield f"{name.replace('_', '-')} FGN agrees with FedFIM read on {other} clients {said}"


@claim("C5")
def _():
    cost = frame("fedcl_fgn", "cost.csv").set_index(["what", "pair"])
    fim, batch, own = (cost.loc[what] for what in ("FedFIM", "FGN batch", "FGN per_sample"))
    faster, slower, memory = fim.seconds / batch.seconds, fim.seconds / own.seconds, own.MiB / fim.MiB
    yield f"batch FGN is {faster.min():.1f} to {faster.max():.0f} times faster"
    yield f"per-sample FGN is {slower.min():.1f} to {slower.max():.1f} times faster and takes {memory.min():.2f} to " + (
        f"{memory.max():.2f} of its memory ({', '.join(fim.index)})"
    )


@claim("C6", sep=". ")
def _():
    for alpha in (0.1, 0.3):
        run, points = "fedcl_fgn/fmnist-fig10", [f"alpha={alpha} delta={d}" for d in DELTAS]
        final, last10 = ([trials(run, point, "fedavg+cl", what) for point in points] for what in WHATS)
        slopes = pair(0.1 * slope(DELTAS, y) for y in (final, last10))
        yield f"alpha {alpha}: {', '.join(f'{x.mean():.1f}' for x in final)}; per .1 of delta {slopes}"


@claim("C7", sep=". ")
def _():
    every, times = [], []
    for name, table in {"E": "fig12", "weight decay": "fig13", "M": "fig14", "participation m": "fig15"}.items():
        run = f"fedcl_fgn/fmnist-{table}"
        d = np.array([[gain(run, s, "fedavg+cl", "fedavg", what) for s in settings(run)] for what in WHATS])
        each = ", ".join(f"{s.split('=')[1]} {ci(last10)}" for s, last10 in zip(settings(run), d[1], strict=True))
        every += [*d.swapaxes(0, 1)]
        times += [np.divide(*(trials(run, s, arm, "uploads").mean() for arm in ("fedavg+cl", "fedavg"))) for s in settings(run)]
        yield f"{name} {each}; mean of the sweep {pair(d.mean(1))}"
    distinct = np.unique(every, axis=0)  # the defaults are a point of each sweep
    spent = f"{min(times):.1f} to {max(times):.1f} times the uploads"
    yield f"mean of the {len(distinct)} settings {pair(distinct.mean(0))}, {spent}"


@claim("C8")
def _():
    (run, setting), shares = FGN["Fashion-MNIST"], []
    windows = curve(run, setting, "fedavg+cl", "critical")
    third = windows.shape[1] // 3
    for name, part in {"the first third": windows[:, :third], "the rest": windows[:, third:]}.items():
        same = np.mean([a == b for a, b in itertools.combinations(part, 2)])
        by_chance = np.mean([p * q + (1 - p) * (1 - q) for p, q in itertools.combinations(part.mean(1), 2)])
        shares.append(f"{100 * same:.0f} % in {name} (by chance {100 * by_chance:.0f} %)")
    arms = ("fedavg+cl", "fedavg")
    stds = [f"{arm} " + PAIR.join(f"{trials(run, setting, arm, what).std(ddof=1):.1f}" for what in WHATS) for arm in arms]
    counts = f"{windows.sum(1).min():.0f} to {windows.sum(1).max():.0f} of {windows.shape[1]} rounds critical"
    return f"{counts}; two seeds agree on {' and '.join(shares)}; std of the accuracy over 5 seeds: {', '.join(stds)}"


@claim("C9")
def _():
    arms = ("fedavg+random", "fedavg")
    for p, run in {"doubling": "fedcl_fgn/fmnist-fig47", "halving": "fedcl_fgn/fmnist-fig48"}.items():
        times = {s: np.divide(*(trials(run, s, arm, "uploads") for arm in arms)).mean() for s in settings(run)}
        each = ", ".join(f"{s.split('=')[1]} {both(run, s, *arms)} ({x:.1f} times the uploads)" for s, x in times.items())
        yield f"random - FedAvg at p of {p} {each}"


@claim("C10")
def _():
    for name, place in FGN.items():
        own = selected(*place, "fedavg+cl")
        yield f"{name}: {own.early:.0f} clients a round in the first third of the rounds, {own.late:.0f} in the last"


@claim("C11")
def _():
    equal = {"CIFAR-10": "select-cifar10-others", "CIFAR-10 at 2,200": "select-cifar10-u2200-others"}
    equal |= {"Fashion-MNIST": "select-fmnist-others", "digits": "select-digits", "at alpha 1": "select-digits-alpha1"}
    cells = [f"{name} {both(f'fedcl_fgn/{run}', '', 'fedavg+cl', 'fedavg+constant')}" for name, run in equal.items()]
    shifted = both("fedcl_fgn/cifar10", "", "fedavg+cl", "fedavg+shifted")
    return f"FedCL - constant, equal uploads (960): {', '.join(cells)}; FedCL - shifted, CIFAR-10: {shifted}"


# --------------------------------------------------------------------------------------------------------- D: FedAC

FEDAC, BASE_ARMS = "fedac_art/fmnist-table2", ("solo", "fedavg", "fedprox", "moon")


@claim("D1")
def _():
    arms = {"fedac": trials(FEDAC, "base=fedavg", "fedac", "last10")}
    arms |= {base: trials(FEDAC, f"base={base}", "base", "last10") for base in reversed(BASE_ARMS)}
    steps = [f"{a} - {b} {ci(arms[a] - arms[b])}" for a, b in itertools.pairwise(arms)]
    others = (f"{a} - {b} {ci(arms[a] - arms[b])}" for a, b in itertools.combinations(arms, 2) if b in ("fedprox", "fedavg"))
    return f"{means(arms)}; {', '.join(dict.fromkeys([*steps, *others]))}"


@claim("D2", sep=", ", start="FedAC - its base: ")
def _():
    for base in BASE_ARMS:
        yield f"{base} {both(FEDAC, f'base={base}', 'fedac', 'base')}"


@claim("D3", start="silhouette under FedAC and its base: ")
def _():
    seen = frame(FEDAC, "measures.csv").set_index(["setting", "method"]).silhouette
    for base in BASE_ARMS:
        a, b = (seen[f"base={base}", arm].to_numpy() for arm in ("fedac", "base"))
        yield f"{base} {a.mean():.3f} against {b.mean():.3f}, difference {ci(a - b, 3)}"


@claim("D4", start="20 % wrong labels. ")
def _():
    def seen(features, column, flip):
        return curve("fedac_art/fmnist-d4", f"features={features} flip={flip}", "base", column)[:, -1]

    for features in ("pixels", "encoder"):
        small, large = (100 * seen(features, column, 0.2) for column in ("noisy_small", "noisy_large"))
        wrong = f"wrong labels in {small.mean():.1f} % of P1 and {large.mean():.1f} % of P2, difference {ci(small - large)}"
        yield f"{features}: {wrong}, Spearman(cluster size, loss) {ci(seen(features, 'spearman', 0.0), 2)}"


@claim("D5", start="FedAC - random: ")
def _():
    for what in ("groups", "classes"):
        yield f"{what} {both('fedac_art/fmnist-controls', '', 'fedac', f'random-{what}')}"


# -------------------------------------------------------------------------------------------------------- T: theory


def statements() -> dict[str, dict]:
    """The lines of theory/figures/check.json."""
    lines = json.loads((ROOT.parent / "theory" / "figures" / "check.json").read_text())
    return {line["statement"]: line for line in lines}


def theorem(i: int, *parts: str) -> str:
    cells = []
    for line in (statements()[f"Theorem {i}, {part}"] for part in parts):
        ratio = f", bound / truth {line['printed_ratio']:.2g}" if line["printed_ratio"] is not None else ""
        cells.append(f"{line['statement']}: {line['printed']}{ratio}")
    return f"{'; '.join(cells)} ({line['note']}); corrected it {line['corrected']}"


def remark(part: str) -> str:
    return statements()[f"Remark, {part}"]["note"]


CELLS |= {
    "A14": lambda: "not run",
    "T1": lambda: theorem(1, "sigma^3 and L on the noise", "indices t = 1..T", "bias over Q = 1000", "random grid"),
    "T2": lambda: theorem(2, "alpha missing on the left", "no sigma, alpha restored", "random grid"),
    "T3": lambda: f"{remark('curriculum ends below anti')}; {remark('the same through the drift')}",
    "T4": lambda: remark("easy samples are more convex"),
}


def main(names: list[str]) -> None:
    """Prints the cells of the named claims, or of all."""
    for name in names or CELLS:
        print(f"{name}: {CELLS[name]()}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
