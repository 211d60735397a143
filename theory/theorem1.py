"""Theorem 1: the distance to the optimum under strong convexity. Every reading is violated.

    python -m theory.theorem1

The theorem divides the bias by Q, the number of clients. But more clients do not reduce the bias:
see `two_clients`. There are smaller errors, too. sigma^3 must be sigma^2, and B^2 must be B. The
noise and the bias have a factor L too many. The sums lack their products, and they miss round 0.
theorem1_proof.py and beyond/sharp.py have the bounds that are true.
"""

import numpy as np

from theory.beyond import sharp
from theory.functions import quadratic
from theory.local_sgd import exact_error
from theory.problem import Problem, kinked_problem
from theory.report import row, show, worst
from theory.theorem1_proof import corrected, require_printed_step


def printed_bias(problem, power=2):
    """The part of the bound for the bias, sum_{t=1}^T sum_j 2 alpha L B^2 / (mu Q): (T+1,)."""
    f = problem.f
    terms = 2 * problem.steps * f.L * problem.B**power / (f.mu * problem.Q)
    terms[0] = 0.0  # the paper's sums start at t = 1
    return terms.sum(1).cumsum()


def printed(problem, power=2):
    """E_T <= prod_{t=1}^T prod_j (1 - alpha mu/2) E_0
    + sum_{t=1}^T sum_j 2 alpha^2 [L ((3+2M) B + 3 sigma^3)] / Q
    + sum_{t=1}^T sum_j 2 alpha L (B^2 / mu) / Q.

    Returns the bound for every T: (T+1,). With power = 1 the last B^2 is B. ValueError unless
    mu > 0 and alpha <= 1 / (4(3+2M)L).
    """
    require_printed_step(problem)
    L = problem.f.L
    alpha = problem.steps
    noise = (3 + 2 * problem.M) * problem.B + 3 * problem.sigma**3
    noise = 2 * alpha**2 * L * noise / problem.Q
    noise[0] = 0.0  # the paper's sums and its product start at t = 1
    contraction = (1 - alpha * problem.f.mu / 2).prod(1)
    contraction[0] = 1.0
    return (
        contraction.cumprod() * problem.E_0  # what is left of the start
        + noise.sum(1).cumsum()
        + printed_bias(problem, power)
    )


def two_clients(L=1.0, mu=0.1, alpha=1 / 12, B=1e-4, N=2, T=1):
    """||theta^(T,0)||^2 from theta* = 0. f has the curvature L right of 0, and mu left of it.

    README.md computes this by hand. One client is pushed right and one left. Any even number of
    clients gives the same.
    """
    server = 0.0
    for _ in range(T):
        right = server
        left = server
        for _ in range(N):
            slope_right = (L if right > 0 else mu) * right
            slope_left = (L if left > 0 else mu) * left
            right -= alpha * (slope_right - B**0.5)
            left -= alpha * (slope_left + B**0.5)
        server = (right + left) / 2
    return server**2


def noise_only(L=1.0, alpha=1 / 12, sigma=0.1, Q=4):
    """One step from theta* without bias: E_1 = alpha^2 sigma^2 / Q. The bound is 6 L sigma E_1."""
    steps = np.full((2, 1), alpha)
    return Problem(quadratic([L]), [0.0], steps, 0.0, np.zeros((Q, 1)), sigma=sigma)


def late_index():
    """Only round 0 takes a real step, and the paper's sums over t = 1..T leave it out."""
    steps = np.full((4, 5), 1e-6)
    steps[0] = 1 / 12
    return Problem(quadratic([1.0]), [0.0], steps, 0.0, np.zeros((4, 1)), sigma=1.0)


def compare(name, problem, note, power=2):
    """A row: the paper's ratio in the last round, and the others' least ratio over the rounds."""
    E = exact_error(problem)
    promised = printed(problem, power)
    by_lemmas = corrected(problem)
    tight = sharp.bound(problem)
    ratios = (
        promised[-1] / E[-1],
        worst(by_lemmas[1:], E[1:]),
        worst(tight[1:], E[1:]),
    )
    return row(f"Theorem 1, {name}", "violated", *ratios, note)


def check():
    """Try the counterexamples, first the one that no reading of B and sigma avoids."""
    yield compare("bias over Q = 100", kinked_problem(100), "kinked f, T = 10")
    yield compare("bias over Q = 1000", kinked_problem(1000), "kinked f, T = 10")
    short = kinked_problem(1000, T=4)
    yield compare("bias over Q = 1000, B for B^2", short, "kinked f, T = 4", power=1)
    yield compare("sigma^3 and L on the noise", noise_only(), "the ratio is 6 L sigma")
    yield compare("indices t = 1..T", late_index(), "round 0 is left out")


def draw(axes):
    """Plot the bounds over the rounds: from far away, and from theta*, where only the bias acts."""
    T = np.arange(1, 61)
    for axis, Q, theta0 in zip(axes, (4, 1000), (1.0, 0.0), strict=True):
        problem = kinked_problem(Q, T=60, theta0=theta0)
        axis.semilogy(T, exact_error(problem)[1:], "k", label="measured")
        axis.semilogy(T, printed(problem)[1:], "C3", label="the paper")
        axis.semilogy(T, corrected(problem)[1:], "C0", label="corrected by its lemmas")
        axis.semilogy(T, sharp.bound(problem)[1:], "C2", label="sharp")
        axis.semilogy(T, sharp.closed_form(problem)[1:], "C2:", label="sharp, closed form")
        axis.set(xlabel="rounds T", ylabel="E‖θ − θ*‖²")
        axis.set(title=f"Theorem 1, Q = {problem.Q} clients, from θ = {problem.theta0[0]:g}")


if __name__ == "__main__":
    show(check, {"bounds.png": draw})
