"""Checks every lemma, theorem and remark of supplement 2 numerically and prints a table of verdicts.

    python -m theory.check             # under two minutes; writes check.json and five figures into theory/figures/
    python -m theory.check --out DIR   # writes them into DIR instead

A ratio is bound / measured: below 1 the statement is violated; each row shows the worst ratio found. 'vacuous' means
true but saying nothing. A violated printed statement is a finding, not an error: the exit code is 1 only when a verdict
differs from the one documented here, or when a corrected statement is violated.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from tqdm import tqdm

from theory import bounds, dissimilarity, hessian, plots, problems
from theory.local_sgd import exact_moments, one_step, simulate
from theory.model import Clients, make_problem, opposed, quadratic, rational, schedule

GRID = 600  # random problems for each theorem
ZERO = 1e-25  # a second moment below this is rounding; no bound is compared with it
STATES = 2000  # random clients' parameters for each lemma
C_MU = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Row:
    """One line of the table; `documented` is the printed verdict that README.md reports."""

    statement: str
    documented: str
    printed: str
    printed_ratio: float | None = None
    corrected: str | None = None
    corrected_ratio: float | None = None
    note: str = ""


def verdict(ratio):
    """'holds' when bound / measured is at least 1, up to rounding."""
    return "holds" if ratio >= 1 - 1e-9 else "violated"


def compared(statement, documented, printed, corrected=None, note="", vacuous=False):
    """A Row from the worst printed and corrected ratios; `vacuous` marks a bound that holds and says nothing."""
    label = "vacuous" if vacuous and verdict(printed) == "holds" else verdict(printed)
    fixed = None if corrected is None else verdict(corrected)
    return Row(statement, documented, label, printed, fixed, corrected, note)


def worst(bound, measured):
    """min of bound / measured over the entries where something was measured; inf where nothing was.

    ValueError where either is not a number: a comparison with NaN would pass unseen.
    """
    bound, measured = np.broadcast_arrays(np.atleast_1d(bound), measured)
    if np.isnan(bound).any() or np.isnan(measured).any():
        raise ValueError("NaN among the bounds or the measurements")
    some = measured > ZERO
    return float((bound[some] / measured[some]).min(initial=np.inf))


def grid1(count):
    """Theorem 1 over `count` random problems within the printed step and `count` beyond it.

    Returns the worst ratios of the printed form, of its proof, of the corrected and of the closed form, and the share of
    problems on which the printed form is violated; only the corrected ones are taken beyond the printed step.
    """
    rng, ratios, corrected, closed = np.random.default_rng(1), [], [], []
    for beyond in [False] * count + [True] * count:
        problem, E = problems.random_theorem1(rng, beyond)
        corrected.append(worst(bounds.theorem1_corrected(problem)[1:], E[1:]))
        if problem.M == 0 and np.ptp(problem.steps) == 0:
            closed.append(worst(bounds.theorem1_closed(problem)[1:], E[1:]))
        if not beyond:
            ratios.append([worst(form(problem)[1:], E[1:]) for form in (bounds.theorem1_printed, bounds.theorem1_proof)])
    printed, proof = np.array(ratios).T
    return printed.min(), proof.min(), min(corrected), min(closed), np.mean(printed < 1)


def grid2(count):
    """Theorem 2 over `count` random problems.

    Returns the worst ratios of the printed, the corrected and the uncorrelated form, and the share on which the printed one
    is violated.
    """
    rng, ratios = np.random.default_rng(2), []
    for _ in range(count):
        problem, gradient = problems.random_theorem2(rng)
        weighted = bounds.ergodic_sum(problem, gradient, weighted=True)
        forms = (bounds.theorem2_corrected, bounds.theorem2_uncorrelated)
        printed = worst(bounds.theorem2_printed(problem), bounds.ergodic_sum(problem, gradient, weighted=False))
        ratios.append([printed] + [worst(form(problem), weighted) for form in forms])
    ratios = np.array(ratios)
    return *ratios.min(0), np.mean(ratios[:, 0] < 1)


# ---- the lemmas ----


def check_assumption1():
    """Random S_t of Q < K clients: sum over every S_t of b_k = 0 is a linear system in the b_k, of rank K."""
    ranks = [
        np.linalg.matrix_rank([[k in S for k in range(K)] for S in combinations(range(K), Q)]) == K
        for K in range(2, 9)
        for Q in range(1, K)
    ]
    return Row(
        "Assumption 1, random S_t, Q < K",
        "vacuous",
        "vacuous" if all(ranks) else "holds",
        note=f"rank K in all {len(ranks)} cases with K <= 8: only b = 0 is left",
    )


def check_moving_centre():
    """Theorem 1 as printed against biases that cancel at every common theta and about a centre that moves."""
    problem = problems.moving_centre()
    ratio = bounds.theorem1_printed(problem)[-1] / simulate(problem).E[-1]
    return compared("Assumption 1, b_k depends on theta", "violated", ratio, note="Theorem 1 at T = 1, moving centre")


def lemma_ratios(measure, *forms):
    """Worst ratios of each form(clients, a, B, M, s) to measure(step, clients, a) over STATES random states: (forms,)."""
    rng, ratios = np.random.default_rng(0), []
    for _ in range(STATES):
        clients, biases, a, B, M, s = problems.random_state(rng)
        L, Q = clients.f.L, len(biases)
        a *= min(1.0, 2 * bounds.lemma4_step(L, M, Q))  # a <= 1/(4 bar L), which Lemma 4 asks and the others allow
        measured = measure(one_step(clients, biases, a, M, s), clients, a)
        ratios.append([worst(form(clients, a, B, M, s), measured) for form in forms])
    return np.min(ratios, 0)


def on_state(form):
    """A bound of (F, B, L, M, s) as a function of (clients, a, B, M, s)."""
    return lambda c, a, B, M, s: form(c.gaps, B, c.f.L, M, s)


def check_lemma1():
    """E||g_k||^2 on random states, and the state on which the corrected form is an equality."""
    forms = on_state(bounds.lemma1_printed), on_state(bounds.lemma1_corrected)
    printed, corrected = lemma_ratios(lambda step, c, a: step.second, *forms)
    g, M = quadratic([1.0]).gradient(np.array([[2.0]])), 3.0
    tight = one_step(Clients(quadratic([1.0]), np.array([[2.0]])), g, 0.1, M, 0.0).second  # b = grad f: equality
    corrected = min(corrected, worst(bounds.lemma1_corrected(2.0, 4.0, 1.0, M, 0.0), tight))
    return compared("Lemma 1", "holds", printed, corrected, "corrected form attained at b = grad f")


def check_lemma1_proof():
    """The first line 3||grad f||^2 + 3||b||^2 + 3 E||n||^2 against the second, at b = grad f on L/2 theta^2, M = 3."""
    M, F, B = 3.0, 2.0, 4.0  # theta = 2: grad f = b = 2
    first = 3 * 4 + 3 * 4 + 3 * M * (2 + 2) ** 2
    printed, derived = (form(F, B, 1.0, M, 0.0) / first for form in (bounds.lemma1_printed, bounds.lemma1_derived))
    return compared("Lemma 1, second line of its proof", "violated", printed, derived, "6M, not 2M")


def check_lemma2():
    """E||g - bar g||^2 on random states, the noise drawn by every client for itself."""
    forms = on_state(bounds.lemma2_printed), on_state(bounds.lemma2_corrected)
    ratios = lemma_ratios(lambda step, c, a: step.off_mean, *forms)
    return compared("Lemma 2, independent noise", "holds", *ratios)


def check_lemma2_shared():
    """The same n for all Q = 12 clients at theta*: E||g - bar g||^2 = s^2."""
    Q, s = 12, 1.0
    printed = bounds.lemma2_printed(np.zeros(Q), 0.0, 1.0, 0.0, s) / s**2
    undivided = Q * bounds.lemma2_corrected(np.zeros(Q), 0.0, 1.0, 0.0, s) / s**2
    return compared("Lemma 2, noise shared by clients", "violated", printed, undivided, "too small by Q/3, here Q = 12")


def check_lemma3():
    """||hat theta - a bar g - theta*||^2 on random states."""
    ratios = lemma_ratios(
        lambda step, c, a: ((c.average - a * c.f.gradient(c.theta).mean(0)) ** 2).sum(),
        lambda c, a, B, M, s: bounds.lemma3_printed(c, a),
    )
    return compared("Lemma 3", "holds", *ratios)


def check_lemma4():
    """E||hat theta' - theta*||^2 on random states, a within Lemma 4's step."""
    ratios = lemma_ratios(lambda step, c, a: step.E, bounds.lemma4_printed, bounds.lemma4_corrected)
    return compared("Lemma 4", "holds", *ratios)


def check_step():
    """Theorem 1's step against the one Lemma 4 needs, over M in [0, 10]."""
    ratio = {Q: min(bounds.lemma4_step(1, M, Q) / bounds.theorem1_step(1, M) for M in range(11)) for Q in range(1, 51)}
    beyond = [Q for Q in ratio if verdict(ratio[Q]) == "violated"]
    fixed = min(ratio[Q] for Q in ratio if Q not in beyond)
    note = f"too long for Q = {', '.join(map(str, beyond))}; corrected: Q >= {max(beyond) + 1}"
    return compared("Theorem 1's step within Lemma 4's", "violated", min(ratio.values()), fixed, note)


def check_equation5():
    """mean_k E||g_k - g||^2 on random states."""

    def stated(c, a, B, M, s):
        return bounds.equation5_printed(c, B, M, s)

    return compared("Equation 5", "holds", *lemma_ratios(lambda step, c, a: step.spread, stated))


def lemma5_run(problem, form):
    """A Lemma 5 form(f, V, F, a, B, M, s, j) run through round 0 from V = 0: the bound on V^(0,N), a float."""
    F, V = exact_moments(problem).F[0], 0.0
    for j in range(problem.N):
        V = form(problem.f, V, F[j], problem.steps[0, j], problem.B[0, j], problem.M, problem.s, j)
    return V


def check_lemma5():
    """V' on random states as if local step 3 had come, and V after a whole round from V = 0 on a common quadratic."""
    problem = problems.common_hessian()
    run = lemma5_run(problem, lambda *x: bounds.lemma5_printed(*x[:-1])) / exact_moments(problem).V[0, -1]
    single = lemma_ratios(
        lambda step, c, a: step.V,
        lambda c, a, B, M, s: bounds.lemma5_printed(c.f, c.V, c.gaps.mean(), a, B, M, s),
        lambda c, a, B, M, s: bounds.lemma5_proof(c.f, c.V, c.gaps.mean(), a, B, M, s),
        lambda c, a, B, M, s: bounds.lemma5_corrected(c.f, c.V, c.gaps.mean(), a, B, M, s, len(c.theta), 3),
        lambda c, a, B, M, s: bounds.lemma5_corrected(c.f, c.V, c.gaps.mean(), a, B, M, s, len(c.theta), 3, "growth"),
    )
    printed, corrected = min(run, single[0]), single[1:].min()
    return compared("Lemma 5", "violated", printed, corrected, f"{run:.3f} over a round on a common quadratic")


def check_equation6():
    """sum_j V^(0,j) on the common quadratic."""
    problem = problems.common_hessian()
    moments = exact_moments(problem)
    ratios = [
        form(problem, moments.F[0], 0) / moments.V[0, :-1].sum()
        for form in (bounds.equation6_printed, bounds.equation6_corrected)
    ]
    return compared("Equation 6", "violated", *ratios, "a spurious 2aL/Q")


# ---- the theorems ----


def check_noise_power():
    """One step of pure noise: the bound's sigma^3 and L against E = a^2 s^2 / Q."""
    problem = problems.noise_only()
    E = exact_moments(problem).E[-1]
    ratios = [form(problem)[-1] / E for form in (bounds.theorem1_printed, bounds.theorem1_corrected)]
    return compared("Theorem 1, sigma^3 and L on the noise", "violated", *ratios, "the ratio is 6 L s")


def check_late_index():
    """The only real step is taken in round 0, which the printed sum leaves out."""
    problem = problems.late_index()
    E = exact_moments(problem).E[-1]
    ratios = [form(problem)[-1] / E for form in (bounds.theorem1_printed, bounds.theorem1_corrected)]
    return compared("Theorem 1, indices t = 1..T", "violated", *ratios, "round 0 is left out")


def check_kinked(Q, T=10, power=2):
    """Theorem 1 at round T of the kinked problem for Q clients, with B^power in the bias term."""
    problem = problems.kinked_problem(Q, T=T)
    E = simulate(problem).E
    printed = bounds.theorem1_printed(problem, power)[-1] / E[-1]
    corrected = [worst(form(problem)[1:], E[1:]) for form in (bounds.theorem1_corrected, bounds.theorem1_closed)]
    mended = ", B for B^2" if power == 1 else ""
    return compared(f"Theorem 1, bias over Q = {Q}{mended}", "violated", printed, min(corrected), f"kinked f, T = {T}")


def check_theorem1_grid():
    """Theorem 1, printed, by its proof, corrected and closed, on random problems."""
    printed, proof, corrected, closed, share = grid1(GRID)
    problem = problems.kinked_problem(1000)
    proof = min(proof, bounds.theorem1_proof(problem)[-1] / simulate(problem).E[-1])
    return [
        compared("Theorem 1, random grid", "violated", printed, corrected, f"{GRID} + {GRID} problems, {share:.1%} violated"),
        compared("Theorem 1 by its proof; closed form", "violated", proof, closed, "the same and Q = 1000 above"),
    ]


def check_long_run():
    """Theorem 2 over 500 rounds without noise: as printed alpha does not weigh the left side."""
    problem = problems.long_run()
    gradient = simulate(problem).gradient
    printed = bounds.theorem2_printed(problem) / bounds.ergodic_sum(problem, gradient, weighted=False)
    corrected = bounds.theorem2_corrected(problem) / bounds.ergodic_sum(problem, gradient, weighted=True)
    return compared("Theorem 2, alpha missing on the left", "violated", printed, corrected, "T = 500, a = .01")


def check_noisy_run():
    """Theorem 2 with alpha restored under noise that its right side does not contain."""
    problem = problems.noisy_run()
    left = bounds.ergodic_sum(problem, simulate(problem, replicas=20000).gradient, weighted=True)
    forms = bounds.theorem2_printed, bounds.theorem2_proof, bounds.theorem2_corrected, bounds.theorem2_uncorrelated
    printed, proof, corrected, uncorrelated = (form(problem) / left for form in forms)
    return [
        compared("Theorem 2, no sigma, alpha restored", "violated", printed, corrected, "s = 30 from a stationary point"),
        compared("Theorem 2 by its proof", "violated", proof, uncorrelated, "the same problem"),
    ]


def check_blind():
    """The printed right side for a curriculum, its reverse and no bias at all: one number, so it compares nothing."""
    B = [schedule(order, 11, 5) for order in ("client", "anti")] + [np.zeros((11, 5))]
    values = [
        [form(make_problem(rational(2), [2.0, 2.0], np.full((11, 5), 0.1), b, opposed(4, 2))) for b in B]
        for form in (bounds.theorem2_printed, bounds.theorem2_corrected)
    ]
    same, moved = np.ptp(values[0]) == 0, np.ptp(values[1]) > 0
    label = "vacuous" if same else "holds"
    note = f"no B in it; corrected {'depends' if moved else 'does not depend'} on B"
    return Row("Theorem 2 about curricula", "vacuous", label, note=note)


def check_theorem2_grid():
    """Theorem 2, printed and corrected, on random problems."""
    printed, corrected, uncorrelated, share = grid2(GRID)
    note = f"{GRID} problems, {share:.0%} violated; uncorrelated form {uncorrelated:.3g}"
    return compared("Theorem 2, random grid", "violated", printed, min(corrected, uncorrelated), note)


# ---- the remarks ----


def check_sigma():
    """Growing sigma_t, at T and 10 T: the measured average gap stays, the printed bound grows with T."""
    curvature, theta0, gamma, printed, corrected = np.array([0.1, 1.0]), np.ones(2), 0.2, [], []
    for T in (100, 1000):
        sigma = np.linspace(0.1, 1, T + 1)
        gap, distance = problems.sgd_gaps(curvature, theta0, gamma, sigma).mean(), theta0 @ theta0
        printed.append(bounds.sigma_printed(distance, gamma, sigma) / gap)
        corrected.append(bounds.sigma_corrected(distance, gamma, sigma, L=1.0) / gap)
    note = f"the sum lacks 1/T: ratio {printed[0]:.0f} at T = 100, {printed[1]:.0f} at 1000"
    return compared("Remark, sigma_t in [39]", "vacuous", min(printed), min(corrected), note, printed[1] > 5 * printed[0])


def check_dissimilarity():
    """Lambda along a ray towards theta*: a bound lambda taken at distance 1 fails by dist^-2."""
    clients = dissimilarity.random_clients(np.random.default_rng(0))
    ray = np.full(4, 0.5)
    at = {10.0**-k: clients.dissimilarity(clients.minimiser + 10.0**-k * ray) for k in range(7)}
    slope = np.polyfit(np.log(list(at)[3:]), np.log(list(at.values())[3:]), 1)[0]
    note = f"Lambda ~ dist^{slope:.2f} near theta*; least value seen {min(at.values()):.2f}"
    return compared("Remark, Lambda bounded by lambda", "violated", at[1.0] / at[1e-6], note=note)


def check_fedprox():
    """The decrease of exact proximal rounds over rho ||grad f||^2, where rho is positive."""
    rng, printed, corrected = np.random.default_rng(0), [], []
    for _ in range(STATES):
        clients, mu = dissimilarity.random_clients(rng), 10 ** rng.uniform(0.5, 3)
        theta = clients.minimiser + rng.standard_normal(4) * 10 ** rng.uniform(-1, 1)
        slope = clients.weights @ clients.gradients(theta)
        decrease = clients.value(theta) - clients.value(clients.proximal_round(theta, mu))
        rho = dissimilarity.rho_corrected(np.sqrt(clients.dissimilarity(theta)), clients.curvatures.max(), mu)
        printed.append(decrease / (dissimilarity.rho_printed(mu) * slope @ slope))
        corrected.append(decrease / (rho * slope @ slope) if rho > 0 else np.inf)
    return compared("Remark, FedProx rho_t", "violated", min(printed), min(corrected), "exact local solves, gamma = 0")


def check_bias_floor():
    """'An asymptotic error bounded from below with the bias': on a quadratic with M = 0 the bias has no effect."""
    settings = (quadratic([0.3, 1.0]), [0.6, -0.8], np.full((21, 5), 0.1))
    with_bias, without = (exact_moments(make_problem(*settings, B, opposed(4, 2), s=0.1)).E for B in (1.0, 0.0))
    apart = np.abs(with_bias - without).max()
    label = "violated" if apart < 1e-14 else "holds"
    note = f"M = 0 on a quadratic: E with and without b differ by {apart:.1g}"
    return Row("Remark, the bias leaves a floor", "violated", label, note=note)


def check_annealing():
    """The remedy works, the bound cannot show it: E falls while the printed bias sum grows like log T."""
    problem = problems.annealed(1000)
    E, total = simulate(problem).E, bounds.bias_sum_printed(problem)
    growth = (total[1000] - total[100]) / (total[100] - total[10])  # 1 for c log T
    falls, diverges = E[1000] < E[100] < E[10], abs(growth - 1) < 0.1
    ratio, fixed = worst(total[100:], E[100:]), worst(bounds.theorem1_corrected(problem)[1:], E[1:])
    note = f"E {E[10]:.2g}, {E[1000]:.2g} at T = 10, 1000; the bound's bias {total[10]:.1f}, {total[1000]:.1f}"
    return compared("Remark, a ~ 1/t mitigates a growing B", "vacuous", ratio, fixed, note, vacuous=falls and diverges)


def check_ordering():
    """'Lower total error at each iteration for curriculum compared to anti-curriculum': shrinking over growing E."""
    final, mean = zip(*(problems.ordering_ratio(c) for c in C_MU), strict=True)
    constant = problems.ordering_ratio(steps=0.05)[0]
    law = all((ratio < 1) == (c < 1) for ratio, c in zip(final, C_MU, strict=True) if c != 1) and constant > 1
    note = "growing/shrinking " + ", ".join(f"{x:.2f}" for x in final) + f" at c mu = {C_MU}; constant a {constant:.0f}"
    note += f"; averaged over rounds {min(mean):.3f} to {max(mean):.2f}"
    return Row(
        "Remark, curriculum ends below anti",
        "violated",
        verdict(1 / max(final)),
        1 / max(final),
        "holds" if law else "violated",
        note=note,
    )


def check_rate():
    """The O(1/sqrt T) of section 5 with bias, noise and a = .3/sqrt T."""
    values = [problems.ergodic_rate(T) for T in (30, 100, 300, 1000, 3000)]
    label = "holds" if max(values) < 1.05 * min(values) else "violated"
    return Row(
        "Remark, the ergodic rate survives bias",
        "holds",
        label,
        note=f"avg ||grad||^2 sqrt T = {min(values):.3f} to {max(values):.3f}, T = 30..3000",
    )


def convexity(steps=1000):
    """lambda_min: (problems.SEEDS, 3) of the easy, all and hard samples, and whether Weyl's bound held throughout."""
    results = [problems.spectra_of(seed, steps) for seed in range(problems.SEEDS)]
    lowest = np.array([[values[name][0] for name in ("easy", "all", "hard")] for values, _ in results])
    weyl = np.array([[bound[name] for name in ("easy", "all", "hard")] for _, bound in results])
    return lowest, bool((lowest >= weyl - 1e-12).all())


def check_convexity():
    """lambda_min on easy, all and hard thirds of trained networks, and the pair of one-sample problems that refutes it."""
    lowest, weyl = convexity()
    easy, everything, hard = lowest.T
    harder = hessian.square_model_hessian(1.0, 2.0) > hessian.square_model_hessian(1.0, 1.0)
    label = "violated" if harder or (easy <= everything).any() else "holds"
    fixed = "holds" if weyl else "violated"
    above = f"easy > hard {np.sum(easy > hard)}/{len(easy)}, easy > all {np.sum(easy > everything)}/{len(easy)}"
    note = f"{above}; corrected: Weyl"
    return Row("Remark, easy samples are more convex", "violated", label, corrected=fixed, note=note)


CHECKS = (
    check_assumption1,
    check_moving_centre,
    check_lemma1,
    check_lemma1_proof,
    check_lemma2,
    check_lemma2_shared,
    check_lemma3,
    check_lemma4,
    check_step,
    check_equation5,
    check_lemma5,
    check_equation6,
    check_noise_power,
    check_late_index,
    lambda: check_kinked(100),
    lambda: check_kinked(1000),
    lambda: check_kinked(1000, T=4, power=1),
    check_theorem1_grid,
    check_long_run,
    check_noisy_run,
    check_blind,
    check_theorem2_grid,
    check_sigma,
    check_dissimilarity,
    check_fedprox,
    check_bias_floor,
    check_annealing,
    check_ordering,
    check_rate,
    check_convexity,
)


def table(rows):
    """The rows as text, one line each."""

    def ratio(x):
        return "" if x is None else f"{x:.3g}"

    lines = [f"{'statement':44}{'printed':>9}{'worst ratio':>13}{'corrected':>11}{'worst ratio':>13}  note"]
    for row in rows:
        printed, corrected = ratio(row.printed_ratio), ratio(row.corrected_ratio)
        lines.append(f"{row.statement:44}{row.printed:>9}{printed:>13}{row.corrected or '':>11}{corrected:>13}  {row.note}")
    return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    """Bad usage: one line and exit code 2."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv=None):
    """Runs every check and figure; returns the exit code. SystemExit with code 2 on bad usage."""
    parser = Parser(prog="python -m theory.check", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "figures", metavar="DIR", help="for the output")
    out = parser.parse_args(argv).out
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "check.json").touch()
    except OSError as error:
        parser.error(f"cannot write to {out}: {error.strerror}")
    rows = []
    for check in tqdm(CHECKS, desc="checks"):
        result = check()
        rows += result if isinstance(result, list) else [result]
    for figure in tqdm(plots.FIGURES, desc="figures"):
        figure(out)
    (out / "check.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(table(rows))
    wrong = [row.statement for row in rows if row.printed != row.documented or row.corrected == "violated"]
    print(f"{len(rows)} statements; " + (f"NOT as documented: {'; '.join(wrong)}" if wrong else "all as documented"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
