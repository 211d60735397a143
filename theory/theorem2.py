"""Theorem 2: the ergodic rate without convexity. It is violated, and says nothing on curricula.

    python -m theory.theorem2

The theorem lacks alpha on the left and sigma on the right, and it contains no B. Its factor Q of
f_0 - f* is superfluous. The rate 1/sqrt T survives bias and noise: with alpha ~ 1/sqrt T, the
average of ||grad f||^2 times sqrt T is the same for all T. PROOFS.md [12].
"""

from functools import cache

import numpy as np

from theory.functions import rational, require
from theory.local_sgd import simulate
from theory.problem import Problem, opposed, schedule
from theory.report import row, show, verdict


def left_side(problem, gradient):
    """sum_t sum_j E||grad f(theta^(t,0))||^2, the paper's left side.

    gradient: E||grad f||^2 for t = 0..T, (T+1,).
    """
    return problem.N * gradient.sum()


def weighted_left_side(problem, gradient):
    """sum_t sum_j alpha E||grad f(theta^(t,0))||^2, the left side of all other forms."""
    return gradient @ problem.steps.sum(1)


def hypotheses(problem):
    """(f(theta_0) - f*, L, G, sigma, Q). ValueError unless ||grad f|| <= G < inf and M = 0."""
    f = problem.f
    require(np.isfinite(f.G), "||grad f|| is bounded by a finite G")
    require(problem.M == 0, "E||n_k||^2 <= sigma^2, M = 0")
    return f.value(problem.theta0), f.L, f.G, problem.sigma, problem.Q


def earlier(x):
    """sum_{l < j} x_l, for every j: (T+1, N)."""
    return x.cumsum(1) - x


def later(x):
    """sum_{l >= j} x_l, for every j: (T+1, N)."""
    return x.sum(1, keepdims=True) - earlier(x)


def printed(problem):
    """left_side <= Q (f_0 - f*) + 2 sum_t sum_j alpha_j (alpha_j + sum_{l>=j} alpha_l) L G^2."""
    gap, L, G, sigma, Q = hypotheses(problem)
    alpha = problem.steps
    cross = alpha * (alpha + later(alpha))
    return Q * gap + 2 * cross.sum() * L * G**2


def last_display(problem):
    """weighted_left_side <= Q (f_0 - f*)
    + sum_t sum_j (alpha_j sum_{l>=j} alpha_l + alpha_j^2 / 2) L G^2.
    """
    gap, L, G, sigma, Q = hypotheses(problem)
    alpha = problem.steps
    cross = alpha * later(alpha) + alpha**2 / 2
    return Q * gap + cross.sum() * L * G**2


def client_length(problem):
    """r = sqrt((G + sqrt B)^2 + sigma^2), a bound of sqrt(E||g_k||^2): (T+1, N)."""
    longest = problem.f.G + np.sqrt(problem.B)
    return np.sqrt(longest**2 + problem.sigma**2)


def corrected(problem):
    """weighted_left_side <= f_0 - f* + sum_t {L G sum_j alpha_j sum_{l<j} alpha_l [r_l + r]
    + L/2 sum_j alpha_j^2 r^2} with r^2 = G^2 + sigma^2/Q.

    r_l is `client_length`. PROOFS.md [12].
    """
    gap, L, G, sigma, Q = hypotheses(problem)
    alpha = problem.steps
    r = np.sqrt(G**2 + sigma**2 / Q)
    drift = earlier(alpha * (client_length(problem) + r))
    return (
        gap
        + L * G * (alpha * drift).sum()  # client and average move apart
        + L / 2 * (alpha**2).sum() * r**2
    )


def long_run(T=500, alpha=0.01):
    """A run without bias and noise. The paper's left side grows with T, its right side hardly."""
    steps = np.full((T + 1, 5), alpha)
    return Problem(rational(2), [2.0, 2.0], steps, 0.0, np.zeros((4, 2)))


def noisy_run():
    """One client at a stationary point. Noise moves it, but the paper's bound contains none."""
    steps = np.full((51, 1), 0.01)
    return Problem(rational(1), [0.0], steps, 0.0, np.zeros((1, 1)), sigma=30.0)


@cache
def ergodic_rate(T):
    """The average of ||grad f||^2 times sqrt T, with alpha = 0.3 / sqrt T.

    It is the same for all T if the rate is 1/sqrt T.
    """
    steps = np.full((T, 5), 0.3 / np.sqrt(T))
    problem = Problem(rational(2), [1.75, 1.75], steps, 1.0, opposed(4, 2), sigma=1.0)
    _, gradient = simulate(problem, replicas=64)
    return gradient.mean() * np.sqrt(T)


def check():
    """Try the form without alpha, the form without noise, and three orders of the bias."""
    problem = long_run()
    _, gradient = simulate(problem)
    ratio = printed(problem) / left_side(problem, gradient)
    fixed = corrected(problem) / weighted_left_side(problem, gradient)
    note = "T = 500, alpha = 0.01"
    yield row("Theorem 2, alpha missing on the left", "violated", ratio, fixed, note=note)

    problem = noisy_run()
    _, gradient = simulate(problem, replicas=20000)
    left = weighted_left_side(problem, gradient)
    fixed = corrected(problem) / left
    ratio = printed(problem) / left
    note = "sigma = 30 from a stationary point"
    yield row("Theorem 2, no sigma, alpha restored", "violated", ratio, fixed, note=note)
    ratio = last_display(problem) / left
    yield row("Theorem 2 by its proof", "violated", ratio, fixed, note="the same problem")

    orders = schedule("client", 11, 5), schedule("anti", 11, 5), 0.0
    start = [2.0, 2.0]
    steps = np.full((11, 5), 0.1)
    bounds = []
    for B in orders:
        problem = Problem(rational(2), start, steps, B, opposed(4, 2))
        bounds.append(printed(problem))
    label = "holds" if np.ptp(bounds) else "vacuous"
    note = "it contains no B; the corrected form depends on B"
    yield row("Theorem 2 about curricula", "vacuous", label, note=note)
    yield check_rate()


def check_rate():
    """Compare the rate from 30 to 3000 rounds."""
    rates = [ergodic_rate(T) for T in (30, 100, 300, 1000, 3000)]
    note = f"avg ||grad||^2 sqrt T = {min(rates):.3f} to {max(rates):.3f}, T = 30..3000"
    same = verdict(max(rates) < 1.05 * min(rates))
    return row("Remark, the ergodic rate survives bias", "holds", same, note=note)


def draw(axes):
    """Plot both sides of the theorem as T grows, and the rate."""
    sides, rate = axes
    rounds = np.unique(np.geomspace(1, 500, 30).astype(int))
    found = []
    for T in rounds:
        problem = long_run(T)
        _, gradient = simulate(problem)
        values = [
            left_side(problem, gradient),
            weighted_left_side(problem, gradient),
            printed(problem),
            corrected(problem),
        ]
        found.append(values)
    left, weighted, bound, fixed = np.transpose(found)
    sides.loglog(rounds, left, "C3", label="the paper: left side")
    sides.loglog(rounds, bound, "C3--", label="the paper: right side")
    sides.loglog(rounds, weighted, "C0", label="corrected: left side, weighted by α")
    sides.loglog(rounds, fixed, "C0--", label="corrected: right side")
    sides.set(xlabel="rounds T", ylabel="the two sides of Theorem 2")
    sides.set(title="solid must stay below dashed")
    sides.set_ylim(3e-3, 3e4)  # room for the legend
    rounds = np.array([30, 100, 300, 1000, 3000])
    rates = np.array([ergodic_rate(T) for T in rounds])
    rate.loglog(rounds, rates / np.sqrt(rounds), "ko", label="measured, biased and noisy")
    law = rates.mean() / np.sqrt(rounds)
    rate.loglog(rounds, law, color="gray", label=f"{rates.mean():.2f} / √T")
    rate.set(xlabel="rounds T", ylabel="average ‖∇f‖²", title="steps α = 0.3 / √T")


if __name__ == "__main__":
    show(check, {"ergodic.png": draw})
