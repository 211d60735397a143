"""Theorem 1: the distance to the optimum under strong convexity. Violated as printed, whatever B and sigma mean there.

    python -m theory.theorem1

The bias is divided by Q, the number of clients, and more clients do not help against it: `counterexample`.
Besides, sigma^3 is a misprint for sigma^2, and a factor L is too much there; the products of the proof are
lost before the sums, which miss round 0. Corrected here by the paper's own lemmas, PROOFS.md [7]; sharp in sharp.py.
"""

import numpy as np

from theory import sharp
from theory.biases import opposed
from theory.functions import kinked, quadratic
from theory.local_sgd import Problem, exact_error
from theory.report import row, show, worst
from theory.theorem1_proof import corrected, require_printed_step


def printed_bias(problem, power=2):
    """sum_{t=1}^T sum_j 2 alpha L B^2 / (mu Q), the part that the bias is, for every T: (T+1,)."""
    f = problem.f
    terms = 2 * problem.steps * f.L * problem.B**power / (f.mu * problem.Q)
    return sum_over_rounds(terms)


def sum_over_rounds(terms):
    """sum_{t=1}^T sum_{j=0}^J of terms: (T+1, N), for every T; nothing at T = 0."""
    rounds = terms.sum(1)
    rounds[0] = 0.0
    return rounds.cumsum()


def printed(problem, power=2):
    """E||theta^(T,0) - theta*||^2 <= prod_{t=1}^T prod_j (1 - alpha mu/2) ||theta^(0,0) - theta*||^2
    + sum_{t=1}^T sum_j 2 alpha^2 L ((3+2M) B + 3 sigma^3) / Q + sum_{t=1}^T sum_j 2 alpha L B^2 / (mu Q).

    For every T: (T+1,). power 1 reads the last B^2 as B. ValueError beyond alpha <= 1 / (4(3+2M)L).
    """
    f, M, alpha = problem.f, problem.M, problem.steps
    require_printed_step(problem)
    noise = 2 * alpha**2 * f.L * ((3 + 2 * M) * problem.B + 3 * problem.sigma**3) / problem.Q
    kept = (1 - alpha * f.mu / 2).prod(1)
    kept[0] = 1.0
    start = (problem.theta0**2).sum()
    return kept.cumprod() * start + sum_over_rounds(noise) + printed_bias(problem, power)


def two_clients(L=1.0, mu=0.1, alpha=1 / 12, B=1e-4, N=2, T=1):
    """||theta^(T,0)||^2 after T rounds from 0 = theta*, f of slope L on the right and mu on the left.

    One client is pushed right and one left, and so for every even Q, half and half. Worked out in README.md.
    """
    server = 0.0
    for _ in range(T):
        right = left = server
        for _ in range(N):
            right -= alpha * (np.where(right > 0, L, mu) * right - np.sqrt(B))
            left -= alpha * (np.where(left > 0, L, mu) * left + np.sqrt(B))
        server = (right + left) / 2
    return server**2


def kinked_problem(Q=2, alpha=1 / 12, B=1e-4, N=10, T=10, theta0=0.0):
    """The same as a Problem of Q clients; L = 1, mu = .1. T None: 12 / (alpha mu N) rounds, which forget the start."""
    if T is None:
        T = int(np.ceil(12 / (0.1 * alpha * N)))
    return Problem(kinked(mu=0.1, L=1.0), [theta0], np.full((T + 1, N), alpha), B, opposed(Q))


def noise_only(L=1.0, alpha=1 / 12, sigma=0.1, Q=4):
    """One step from theta* without bias: E_1 = alpha^2 sigma^2 / Q, and the printed bound is 6 L sigma of it."""
    f = quadratic([L])
    return Problem(f, [0.0], np.full((2, 1), alpha), 0.0, np.zeros((Q, 1)), sigma=sigma)


def late_index():
    """Only round 0 takes a real step, and the printed sums over t = 1..T never see it."""
    steps = np.full((4, 5), 1e-6)
    steps[0] = 1 / 12
    return Problem(quadratic([1.0]), [0.0], steps, 0.0, np.zeros((4, 1)), sigma=1.0)


def counterexample_row(name, problem, note, power=2):
    """printed: at the last round; corrected and sharp: the worst over the rounds."""
    E = exact_error(problem)
    ratio = printed(problem, power)[-1] / E[-1]
    by_lemmas = worst(corrected(problem)[1:], E[1:])
    by_sharp = worst(sharp.bound(problem)[1:], E[1:])
    return row(f"Theorem 1, {name}", "violated", ratio, by_lemmas, by_sharp, note)


def check():
    """The counterexamples: first the one that no reading of B and sigma saves."""
    many = kinked_problem(1000)
    early = kinked_problem(1000, T=4)
    yield counterexample_row("bias over Q = 100", kinked_problem(100), "kinked f, T = 10")
    yield counterexample_row("bias over Q = 1000", many, "kinked f, T = 10")
    yield counterexample_row("bias over Q = 1000, B for B^2", early, "kinked f, T = 4", power=1)
    yield counterexample_row("sigma^3 and L on the noise", noise_only(), "the ratio is 6 L s")
    yield counterexample_row("indices t = 1..T", late_index(), "round 0 is left out")


def draw(axes):
    """The bounds against the number of rounds: where the run starts far away, and where only the bias acts."""
    T = np.arange(1, 61)
    starts = (kinked_problem(4, T=60, theta0=1.0), kinked_problem(1000, T=60))
    for axis, problem in zip(axes, starts, strict=True):
        axis.semilogy(T, exact_error(problem)[1:], "k", label="measured")
        axis.semilogy(T, printed(problem)[1:], "C3", label="printed")
        axis.semilogy(T, corrected(problem)[1:], "C0", label="corrected by its lemmas")
        axis.semilogy(T, sharp.bound(problem)[1:], "C2", label="sharp")
        axis.semilogy(T, sharp.closed_form(problem)[1:], "C2:", label="sharp, closed form")
        axis.set(xlabel="rounds T", ylabel="E‖θ − θ*‖²", title=f"Q = {problem.Q}, started at {problem.theta0[0]:g}")


if __name__ == "__main__":
    show(check, {"bounds.png": draw})
