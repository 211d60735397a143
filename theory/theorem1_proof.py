"""What the proof of Theorem 1 gives: its last display, and a bound by its corrected lemmas.

The last display is violated, too. `corrected` is true, but about 10 times too large on the problems
of beyond/attained.py. PROOFS.md [7].
"""

import numpy as np

from theory import lemma5
from theory.functions import require
from theory.one_step import largest_steps
from theory.report import SLACK


def require_printed_step(problem):
    """Raise ValueError unless f is strongly convex and alpha <= 1 / (4(3+2M)L)."""
    f = problem.f
    require(f.mu > 0, "f is strongly convex, mu > 0")
    longest = largest_steps(f.L, problem.M)[0]
    require(problem.steps <= SLACK * longest, "alpha <= 1 / (4(3+2M)L)")


def last_display(problem):
    """The last display of the proof, applied round after round: (T+1,).

    E^(t+1,0) <= prod_j (1 - alpha mu/2) E^(t,0) + sum_j 2 alpha L/Q prod_{l>=j} (1 - alpha_l mu/2)
    [2 alpha (3+2M) B + B^2/mu + 6 alpha sigma^2].
    """
    require_printed_step(problem)
    bound = [problem.E_0]
    for t in range(problem.T):
        E = bound[t]
        for j in range(problem.N):
            mu, L, alpha, B, M, sigma, Q = problem.symbols(t, j)
            bracket = (
                2 * alpha * (3 + 2 * M) * B  # noise that the bias feeds
                + B**2 / mu  # bias
                + 6 * alpha * sigma**2  # noise
            )
            E += 2 * alpha * L / Q * bracket
            E *= 1 - alpha * mu / 2
        bound.append(E)
    return np.array(bound)


def round_in_form(problem, t, form):
    """(contraction, floor) with E^(t+1,0) <= contraction E^(t,0) + floor, by Lemmas 4 and 5.

    form: 0 or 1, the index into lemma5.factors. Here B is mean_k ||b_k||^2, as in sharp.py.

    The weights p on E and w on V are computed backwards from p = 1 and w = 0. PROOFS.md [7].
    ValueError if the weight of F becomes positive, because nothing bounds F then.
    """
    require(problem.f.mu > 0, "f is strongly convex, mu > 0")
    p = 1.0
    w = 0.0
    floor = 0.0
    for j in reversed(range(problem.N)):
        mu, L, alpha, _, M, sigma, Q = problem.symbols(t, j)
        B = problem.mean_B[t, j]
        require(alpha <= SLACK * 2 / (mu + L), "alpha <= 2 / (mu + L)")
        private = w * (1 - 1 / Q)  # weight of the noise that the average does not see
        gained = p * (1 - 2 * alpha * L * (1 + 2 * M / Q))
        lost = 4 * private * alpha * M * L
        require(lost - gained <= 1e-12 * p, "the weight of F is not positive: smaller steps")
        c, e = lemma5.factors(alpha, mu, j)[form]
        noise = alpha**2 * (2 * M * B + sigma**2)
        floor += (p / Q + private) * noise
        floor += w * e * B
        w = 2 * p * alpha * L + w * c
        p = p * (1 - alpha * mu)
    return p, floor


def round_by_lemmas(problem, t):
    """The form with the smaller floor. The contraction is the same in both."""
    return min(round_in_form(problem, t, 0), round_in_form(problem, t, 1))


def round_after_round(problem, one_round):
    """The bound on E_T for T = 0, 1, ..: (T+1,). one_round(problem, t) is (contraction, floor)."""
    bound = [problem.E_0]
    for t in range(problem.T):
        contraction, floor = one_round(problem, t)
        bound.append(contraction * bound[t] + floor)
    return np.array(bound)


def corrected(problem):
    """Theorem 1 by the corrected lemmas, for every T: (T+1,). PROOFS.md [7]."""
    return round_after_round(problem, round_by_lemmas)
