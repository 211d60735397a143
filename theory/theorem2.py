"""Theorem 2: the ergodic rate without convexity. Violated as printed, and silent on curricula: it contains no B.

    python -m theory.theorem2

alpha is missing on the left, and sigma on the right. Corrected it knows both, and B: PROOFS.md [12].
"""

from functools import cache

import numpy as np

from theory.biases import opposed, random_biases, random_steps, schedule, zero_sum
from theory.functions import rational, require, ripple
from theory.local_sgd import Problem, simulate
from theory.report import row, show, verdict, worst


def left_side(problem, gradient):
    """sum_t sum_j E||grad f(theta^(t,0))||^2 as printed, gradient: (T+1,), t = 0..T."""
    return problem.N * gradient.sum()


def weighted_left_side(problem, gradient):
    """sum_t sum_j alpha E||grad f(theta^(t,0))||^2: what all other forms bound."""
    return gradient @ problem.steps.sum(1)


def hypotheses(problem):
    """(f - f* at theta_0, alpha, L, G, sigma, Q). ValueError unless ||grad f|| <= G < inf and M = 0."""
    f = problem.f
    require(np.isfinite(f.G), "||grad f|| is bounded by a finite G")
    require(problem.M == 0, "E||n_k||^2 <= sigma^2, M = 0")
    return f.value(problem.theta0), problem.steps, f.L, f.G, problem.sigma, problem.Q


def later(alpha):
    """sum_{l >= j} alpha_l: (T+1, N)."""
    return alpha[:, ::-1].cumsum(1)[:, ::-1]


def earlier(x):
    """sum_{l < j} x_l: (T+1, N)."""
    return x.cumsum(1) - x


def printed(problem):
    """left_side <= Q (f_0 - f*) + 2 sum_t sum_j alpha_j (alpha_j + sum_{l>=j} alpha_l) L G^2."""
    gap, alpha, L, G, sigma, Q = hypotheses(problem)
    return Q * gap + 2 * (alpha * (alpha + later(alpha))).sum() * L * G**2


def last_display(problem):
    """weighted_left_side <= Q (f_0 - f*) + sum_t sum_j (alpha_j sum_{l>=j} alpha_l + alpha_j^2 / 2) L G^2."""
    gap, alpha, L, G, sigma, Q = hypotheses(problem)
    return Q * gap + (alpha * later(alpha) + alpha**2 / 2).sum() * L * G**2


def client_gradient(problem):
    """r = sqrt((G + sqrt B)^2 + sigma^2), the most that sqrt(E||g_k||^2) is: (T+1, N)."""
    return np.sqrt((problem.f.G + np.sqrt(problem.B)) ** 2 + problem.sigma**2)


def corrected(problem):
    """weighted_left_side <= f_0 - f* + sum_t {LG sum_j alpha_j sum_{l<j} alpha_l [r_l + sqrt(G^2 + sigma^2/Q)]
    + L/2 sum_j alpha_j^2 (G^2 + sigma^2/Q)}. [12]
    """
    gap, alpha, L, G, sigma, Q = hypotheses(problem)
    mean_square = G**2 + sigma**2 / Q
    drift = earlier(alpha * (client_gradient(problem) + np.sqrt(mean_square)))
    return gap + L * G * (alpha * drift).sum() + L / 2 * (alpha**2).sum() * mean_square


def uncorrelated(problem):
    """The same with sum_t {LG sum_j alpha_j sum_{l<j} alpha_l r_l + L/2 [(sum_j alpha_j)^2 G^2 + sum_j alpha_j^2 sigma^2/Q]}.

    It would follow if later gradients were uncorrelated with earlier noise, which is not proved.
    """
    gap, alpha, L, G, sigma, Q = hypotheses(problem)
    drift = earlier(alpha * client_gradient(problem))
    squares = (alpha.sum(1) ** 2).sum() * G**2 + (alpha**2).sum() * sigma**2 / Q
    return gap + L * G * (alpha * drift).sum() + L / 2 * squares


def long_run(T=500, alpha=0.01):
    """No bias, no noise: the printed left side grows with T, its right side hardly."""
    return Problem(rational(2), [2.0, 2.0], np.full((T + 1, 5), alpha), 0.0, np.zeros((4, 2)))


def noisy_run():
    """One client from a stationary point: all that moves it is noise, which the printed bound does not contain."""
    return Problem(rational(1), [0.0], np.full((51, 1), 0.01), 0.0, np.zeros((1, 1)), sigma=30.0)


@cache
def ergodic_rate(T):
    """avg ||grad f||^2 sqrt T with alpha = .3 / sqrt T, biased and noisy; one number for all T is the 1/sqrt T rate."""
    steps = np.full((T, 5), 0.3 / np.sqrt(T))
    problem = Problem(rational(2), [1.75, 1.75], steps, 0.01, opposed(4, 2), sigma=0.3)
    _, gradient = simulate(problem, replicas=64)
    return gradient.mean() * np.sqrt(T)


def random_problem(rng):
    """(problem, E||grad f||^2: (T+1,)), any step; exact without noise, else a mean over 100 runs."""
    T, N, Q, d = rng.integers(1, 16), rng.integers(1, 6), rng.integers(1, 9), rng.integers(1, 4)
    f = rng.choice([rational, ripple])(d)
    steps = random_steps(rng, T, N, 10 ** rng.uniform(-2, 0))
    sigma = rng.choice([0.0, 0.5, 3.0, 30.0])
    theta0 = rng.choice([0.0, 0.1, 3.0]) * rng.uniform(-1, 1, d)  # at the minimum, near it, past the inflection
    B = random_biases(rng, T, N)
    problem = Problem(f, theta0, steps, B, zero_sum(rng, Q, d), sigma=sigma)
    replicas = 100 if sigma else 1
    _, gradient = simulate(problem, replicas, int(rng.integers(2**32)))
    return problem, gradient


def ratios(problem, gradient):
    """bound / left side: printed, last display, corrected, uncorrelated."""
    weighted = weighted_left_side(problem, gradient)
    return (
        worst(printed(problem), left_side(problem, gradient)),
        worst(last_display(problem), weighted),
        worst(corrected(problem), weighted),
        worst(uncorrelated(problem), weighted),
    )


def check():
    """alpha missing; noise missing; the two orders of a curriculum; random problems; the rate."""
    problem = long_run()
    found = ratios(problem, simulate(problem)[1])
    name = "Theorem 2, alpha missing on the left"
    yield row(name, "violated", found[0], found[2], note="T = 500, a = .01")

    problem = noisy_run()
    _, gradient = simulate(problem, replicas=20000)
    left = weighted_left_side(problem, gradient)
    fixed = corrected(problem) / left
    note = "s = 30 from a stationary point"
    yield row("Theorem 2, no sigma, alpha restored", "violated", printed(problem) / left, fixed, note=note)
    yield row("Theorem 2 by its proof", "violated", last_display(problem) / left, fixed, note="the same problem")
    yield curriculum_row()
    yield random_row()
    values = [ergodic_rate(T) for T in (30, 100, 300, 1000, 3000)]
    note = f"avg ||grad||^2 sqrt T = {min(values):.3f} to {max(values):.3f}, T = 30..3000"
    same = verdict(max(values) < 1.05 * min(values))
    yield row("Remark, the ergodic rate survives bias", "holds", same, note=note)


def curriculum_row():
    """The bounds under a client-based curriculum, its reverse, and no bias at all."""
    steps = np.full((11, 5), 0.1)
    orders = schedule("client", 11, 5), schedule("anti", 11, 5), 0.0
    problems = [Problem(rational(2), [2.0, 2.0], steps, B, opposed(4, 2)) for B in orders]
    apart = np.ptp([printed(problem) for problem in problems])
    moved = np.ptp([corrected(problem) for problem in problems])
    note = "no B in it; corrected " + ("depends on B" if moved else "does not depend on B")
    return row("Theorem 2 about curricula", "vacuous", "holds" if apart else "vacuous", note=note)


def random_row():
    """All forms on 600 random problems."""
    rng = np.random.default_rng(2)
    found = np.array([ratios(*random_problem(rng)) for _ in range(600)])
    least = found.min(0)
    violated = np.mean(found[:, 0] < 1)
    note = f"600 problems, {violated:.0%} violated; uncorrelated form {least[3]:.3g}"
    return row("Theorem 2, random grid", "violated", least[0], least[2], note=note)


def draw(axes):
    """Both sides as T grows, and the 1/sqrt T rate that survives."""
    left, right = axes
    T = np.unique(np.geomspace(1, 500, 30).astype(int))
    runs = [(problem, simulate(problem)[1]) for problem in map(long_run, T)]
    left.loglog(T, [left_side(*run) for run in runs], "C3", label="printed: left side")
    left.loglog(T, [printed(problem) for problem, _ in runs], "C3--", label="printed: right side")
    left.loglog(T, [weighted_left_side(*run) for run in runs], "C0", label="corrected: left side, weighted by α")
    left.loglog(T, [corrected(problem) for problem, _ in runs], "C0--", label="corrected: right side")
    left.set(xlabel="rounds T", ylabel="the two sides of Theorem 2", title="solid must stay below dashed")
    T = np.array([30, 100, 300, 1000])
    rates = np.array([ergodic_rate(rounds) for rounds in T])
    right.loglog(T, rates / np.sqrt(T), "ko", label="measured, biased and noisy")
    right.loglog(T, rates.mean() / np.sqrt(T), color="gray", label=f"{rates.mean():.2f} / √T")
    right.set(xlabel="rounds T", ylabel="average ‖∇f‖²", title="steps α = 0.3 / √T: the rate survives")


if __name__ == "__main__":
    show(check, {"ergodic.png": draw})
