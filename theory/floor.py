"""The sharp floor: what the bias leaves for good, (L-mu)^2/(4 mu L) V, is attained, and Q does not divide it.

    python -m theory.floor

PROOFS.md [4] to [6]; the bounds themselves are in sharp.py.
"""

from contextlib import suppress

import numpy as np

from theory import sharp
from theory.biases import minority
from theory.functions import kinked
from theory.local_sgd import Problem, exact_error
from theory.one_step import State, random_states
from theory.report import label_ticks, listed, row, show
from theory.theorem1 import kinked_problem
from theory.theorem1_proof import corrected, round_by_lemmas


def extremal(kappa, alpha, N, B=1e-5):
    """Where the floor is attained as alpha N -> 0: one client of 1 + L/mu is pushed to the steep side. [5]

    L = 1, mu = 1/kappa; bias in the first local step only, mean ||b_k||^2 = B; started at the predicted floor.
    """
    mu = 1 / kappa
    rounds = int(5 * kappa / (alpha * N)) + 2  # long enough to forget the start
    start = -(1 - mu) / (2 * np.sqrt(mu)) * alpha * np.sqrt(B)
    first = np.eye(1, N)  # 1 in the first local step, then 0
    steps = np.full((rounds, N), alpha)
    return Problem(kinked(mu, 1.0), [start], steps, kappa * B * first, minority(kappa + 1))


def floors(problem):
    """(E at the end, floor by the lemmas, sharp floor): fixed points floor / (1 - contraction) of a round."""
    lemmas = np.inf
    for form in (0, 1):
        contraction, floor = round_by_lemmas(problem, 0, form)
        lemmas = min(lemmas, floor / (1 - contraction))
    contraction, floor = sharp.round_bound(problem, 0)
    return exact_error(problem)[-1], lemmas, floor / (1 - contraction)


def one_step_ratios():
    """bound / measured of [4] on random states, with random weights p, w, Young's e and steps up to 2/(L+mu)."""
    rng = np.random.default_rng(0)
    ratios = []
    for x in random_states():
        mu, L, _, B, M, sigma, _ = x.symbols
        alpha = 2 / (L + mu) * rng.uniform(0.01, 1)
        x = State(x.f, x.theta, x.b, alpha, B, M * (rng.random() < 0.5), sigma)
        p, w, e = 10 ** rng.uniform([-1, -2, -2], 1)
        with suppress(ValueError):  # the step is too long for these weights
            on_E, on_V, c = sharp.step(x.f, x.symbols, x.mean_B, p, w, 1 + e, 1 + 1 / e)
            ratios.append((on_E * x.E + on_V * x.V + c) / (p * x.next_E + w * x.next_V))
    return ratios


def check():
    """One step on random states; the floor where it is attained; the floor on the kinked problem."""
    ratios = one_step_ratios()
    note = f"{len(ratios)} random states; attained [4]"
    yield row("Sharp floor, one step", "ours", "ours", None, min(ratios), note)

    runs = (10, 1 / 12, 10), (10, 0.01, 30), (10, 0.001, 100), (100, 0.01, 30)
    E, lemmas, tight = np.transpose([floors(extremal(*run)) for run in runs])
    note = f"{listed(tight / E, 3)} (lemmas {listed(lemmas / E, 0)}) at L/mu, a, N = "
    note += "; ".join(f"{kappa}, {alpha:.3g}, {N}" for kappa, alpha, N in runs)
    lemmas, tight = min(lemmas / E), min(tight / E)
    yield row("Sharp floor, extremal problem", "ours", "ours", lemmas, tight, note)

    problem = kinked_problem()
    E = exact_error(problem)[-1]
    at_10 = corrected(problem)[-1] / E
    sharp_10 = sharp.bound(problem)[-1] / E
    closed_10 = sharp.closed_form(problem)[-1] / E
    E, lemmas, tight = floors(kinked_problem(T=None))
    note = f"T = 10: {sharp_10:.2f}, closed form {closed_10:.2f} (lemmas {at_10:.1f}); "
    note += f"in the end {tight / E:.2f} (lemmas {lemmas / E:.1f})"
    least = min(tight / E, sharp_10, closed_10)
    yield row("Sharp floor, kinked f", "ours", "ours", min(lemmas / E, at_10), least, note)


def draw(axes):
    """What is left on the kinked problem against the bias, and against the step."""
    B = 10.0 ** np.arange(-6, 1)
    draw_sweep(axes[0], B, [kinked_problem(B=x, T=None) for x in B])
    label_ticks(axes[0], B[::2])
    axes[0].set(xlabel="bias bound B, a squared gradient", title="linear in the bias bound")
    alpha = 0.08 / 2.0 ** np.arange(5)
    draw_sweep(axes[1], alpha, [kinked_problem(alpha=x, T=None) for x in alpha])
    label_ticks(axes[1], alpha)
    axes[1].set(xlabel="step α, an inverse curvature", title="quadratic in a small step")


def draw_attained(axes):
    """What is left against the number of local steps, and bound / measured on the extremal problem."""
    N = 2 ** np.arange(1, 7)
    draw_sweep(axes[0], N[:-1], [kinked_problem(N=x, T=None) for x in N[:-1]])
    axes[0].set(xlabel="local steps N", title="nothing at N = 1, then more")
    for kappa, mark in ((10, "o-"), (40, "s-")):
        E, lemmas, tight = np.transpose([floors(extremal(kappa, 0.02, n)) for n in N])
        axes[1].loglog(N, lemmas / E, "C0" + mark, label=f"corrected by its lemmas, L/μ = {kappa}")
        axes[1].loglog(N, tight / E, "C2" + mark, label=f"sharp, L/μ = {kappa}")
    axes[1].axhline(1, color="gray", lw=0.8)
    axes[1].set(xlabel="local steps N", ylabel="bound / measured floor", title="where it is attained")
    for axis in axes:
        label_ticks(axis, N)


def draw_sweep(axis, values, problems):
    """The measured floor and the two bounds on it against what varies over the problems."""
    E, lemmas, tight = np.transpose([floors(problem) for problem in problems])
    axis.loglog(values, E, "ko-", label="measured")
    axis.loglog(values, lemmas, "C0s-", label="corrected by its lemmas")
    axis.loglog(values, tight, "C2d-", label="sharp")
    axis.set(ylabel="E‖θ − θ*‖² at the end")


if __name__ == "__main__":
    show(check, {"floor.png": draw, "attained.png": draw_attained})
