"""What check.py, plots.py and the tests measure: counterexamples small enough for paper, and random problems."""

from dataclasses import replace

import numpy as np

from theory import bounds, hessian
from theory.local_sgd import exact_moments, simulate
from theory.model import (
    Clients,
    Problem,
    annealed_steps,
    diminishing_steps,
    kinked,
    make_problem,
    opposed,
    quadratic,
    rational,
    ripple,
    schedule,
    with_unrun_round,
    zero_sum,
)

SEEDS = 20  # networks for the Hessian remark

# ---- counterexamples, each small enough to check by hand ----


def noise_only(L=1.0, s=0.1, Q=4, a=1 / 12):
    """b = 0, M = 0, theta_0 = theta*, one step: E_1 = a^2 s^2 / Q exactly."""
    return make_problem(quadratic([L]), [0.0], np.full((2, 1), a), 0.0, np.zeros((Q, 1)), s=s)


def late_index():
    """Only round 0 takes a real step: the printed sum over t = 1..T never sees it."""
    steps = np.full((4, 5), 1e-6)
    steps[0] = 1 / 12
    return make_problem(quadratic([1.0]), [0.0], steps, 0.0, np.zeros((4, 1)), s=1.0)


def kinked_problem(Q=2, a=1 / 12, B=1e-4, N=10, T=10, theta0=0.0):
    """Half the clients pushed up, half down, on a function steeper on one side: their average drifts off theta*."""
    return make_problem(kinked(mu=0.1, L=1.0), [theta0], np.full((T + 1, N), a), B, opposed(Q))


def floor(a=1 / 12, B=1e-4, N=10):
    """E after 12 / (a mu N) rounds of the kinked problem, mu = .1, started at theta*: what the bias alone leaves."""
    return simulate(kinked_problem(a=a, B=B, N=N, T=int(np.ceil(12 / (0.1 * a * N))))).E[-1]


def moving_centre(Q=100, a=1 / 12, B=1e-4, N=10, T=1):
    """b_k(theta) = sqrt(B) u_k sign(theta - c), u_k = +-1, with the clients' current average for c.

    For every fixed theta these sum to zero, which is all that Assumption 1 asks; at the clients' theta_k they do not.
    """

    def biases(t, j, theta):
        side = np.where(theta >= theta.mean(1, keepdims=True), 1.0, -1.0)
        return np.sqrt(B) * opposed(Q) * side

    steps = np.full((T + 1, N), a)
    return Problem(kinked(mu=0.1, L=1.0), np.zeros(1), steps, biases, np.full((T + 1, N), B), Q)


def common_hessian(a=1 / 12, B=1e-4, N=10):
    """One round on mu/2 theta^2, mu = .1, known to be 1-smooth: V grows as the square of the bias's push."""
    f = replace(quadratic([0.1]), L=1.0)
    return make_problem(f, [0.0], np.full((2, N), a), B, opposed(4))


def long_run(T=500, start=2.0):
    """Theorem 2's function from (2, 2) with a = .01, N = 5, Q = 4 and no noise."""
    return make_problem(rational(2), [start, start], np.full((T + 1, 5), 0.01), 0.0, np.zeros((4, 2)))


def noisy_run():
    """From a stationary point, with noise far larger than the gradient; the printed bound holds a^2 L G^2 alone."""
    return make_problem(rational(1), [0.0], np.full((51, 1), 0.01), 0.0, np.zeros((1, 1)), s=30.0)


def ordered(order, c, mu=1.0, T=200, N=5, first=0.002, offset=None, steps=None):
    """A bias that enters through the noise, M = 1, on mu theta^2 / 2; steps c / (i + offset), or `steps`.

    offset: max(20, 40 c mu) unless given: no step is longer than 1/(40 mu), half of what Theorem 1 allows at M = 1.
    """
    offset = max(20.0, 40.0 * c * mu) if offset is None else offset
    steps = diminishing_steps(T, N, c, offset) if steps is None else np.full((T, N), steps)
    B = schedule(order, T, N, first=first)
    return make_problem(quadratic([mu]), [0.0], with_unrun_round(steps), with_unrun_round(B), opposed(4), M=1.0)


def ordering_ratio(c=1.0, **settings):
    """E under a growing bias over E under the same bias shrinking: at the end, and averaged over the rounds, two floats."""
    growing, shrinking = (exact_moments(ordered(order, c, **settings)).E[1:] for order in ("client", "anti"))
    return growing[-1] / shrinking[-1], growing.mean() / shrinking.mean()


def annealed(T, c=1 / 12, N=10):
    """B = (j+1)^(1/4), a = c/(t+1) (j+1)^(-1/4) on the kinked function: the remark's remedy for a growing bias."""
    B = np.tile(np.arange(1, N + 1) ** 0.25, (T + 1, 1))
    return make_problem(kinked(mu=0.1, L=1.0), [5.0], annealed_steps(T + 1, N, c), B, opposed(4))


def ergodic_rate(T):
    """avg ||grad f||^2 sqrt T with a = .3 / sqrt T; one number for all T is the 1/sqrt T rate."""
    steps = np.full((T, 5), 0.3 / np.sqrt(T))
    problem = make_problem(rational(2), [1.75, 1.75], steps, 0.01, opposed(4, 2), s=0.3)
    return simulate(problem, replicas=64).gradient.mean() * np.sqrt(T)


# ---- random problems ----


def random_state(rng):
    """Clients, biases (Q, d), a, B, M, s for the lemmas: strongly convex f with L <= 1, zero-sum biases, any a <= 1/2."""
    Q, d = rng.integers(1, 9), rng.integers(1, 5)
    mu = 10 ** rng.uniform(-2, 0)
    f = kinked(mu, 1.0) if rng.random() < 0.5 else quadratic(rng.uniform(mu, 1.0, d))
    B = 10 ** rng.uniform(-3, 1) * (rng.random() < 0.9)
    centre = rng.standard_normal(d) * 10 ** rng.uniform(-2, 1)
    theta = centre + rng.standard_normal((Q, d)) * 10 ** rng.uniform(-2, 1)
    biases = np.sqrt(B) * zero_sum(rng, Q, d)
    return (
        Clients(f, theta),
        biases,
        rng.uniform(0.01, 0.5),
        B,
        rng.choice([0.0, 0.5, 3.0]),
        rng.choice([0.0, 0.1, 2.0]),
    )


def random_steps(rng, T, N, largest):
    """Constant, diminishing or arbitrary steps at most `largest`, which one time in four they reach: (T+1, N)."""
    shape, top = rng.integers(3), largest * (rng.uniform(0.1, 1) if rng.random() < 0.75 else 1.0)
    if shape == 0:
        return np.full((T + 1, N), top)
    if shape == 1:
        return diminishing_steps(T + 1, N, 5 * top, 5)
    return top * np.append(1.0, rng.uniform(0.05, 1, (T + 1) * N - 1)).reshape(T + 1, N)


def random_biases(rng, T, N):
    """A schedule of random order and size, one time in ten no bias at all: (T+1, N)."""
    order = rng.choice(["client", "data", "anti", "constant", "shuffled"])
    return 10 ** rng.uniform(-4, 1) * (rng.random() < 0.9) * schedule(order, T + 1, N, first=rng.uniform(0.01, 1), rng=rng)


def certified(problem):
    """Whether every hypothesis of corrected Theorem 1 holds."""
    try:
        bounds.theorem1_corrected(problem)
    except ValueError:
        return False
    return True


def random_theorem1(rng, beyond=False):
    """(problem, E): strongly convex, E: (T+1,) exact; noise only on quadratics.

    Steps reach Theorem 1's printed limit or, `beyond` it, what the corrected form allows: 1/(2L) for M = 0, and for M > 0
    halves of 1/(2L(1+2M/Q)) until the certificate accepts them. One client, round, step or dimension, mu = L, no bias, no
    noise and a start at theta* are all drawn.
    """
    T, N, Q, d = rng.integers(1, 9), rng.integers(1, 7), rng.integers(1, 9), rng.integers(1, 4)
    L, mu = 10 ** rng.uniform(-1, 1), 10 ** rng.uniform(-2, 0)
    smooth = rng.random() < 0.5
    M, s = (rng.choice([0.0, 0.5, 2.0]), rng.choice([0.0, 0.3, 2.0])) if smooth else (0.0, 0.0)
    f = quadratic(L * np.append(rng.uniform(mu, 1, d - 1), 1.0)) if smooth else kinked(L * mu, L)
    # Without noise nothing but theta_0 moves E on a quadratic: at theta* it would be rounding that is measured.
    theta0 = rng.standard_normal(d) * rng.choice([0.1, 3.0] if smooth and M == s == 0 else [0.0, 0.1, 3.0])
    steps = random_steps(rng, T, N, 1 / (2 * L * (1 + 2 * M / Q)) if beyond else bounds.theorem1_step(L, M))
    problem = make_problem(f, theta0, steps, random_biases(rng, T, N), zero_sum(rng, Q, d), M=M, s=s)
    while beyond and not certified(problem):
        problem = replace(problem, steps=problem.steps / 2)
    return problem, (exact_moments if smooth else simulate)(problem).E


def random_theorem2(rng):
    """(problem, gradient): bounded gradient, any step; gradient: (T+1,), exact where s = 0, else a mean over 100 runs."""
    T, N, Q, d = rng.integers(1, 16), rng.integers(1, 6), rng.integers(1, 9), rng.integers(1, 4)
    f = rng.choice([rational, ripple])(d)
    steps = random_steps(rng, T, N, 10 ** rng.uniform(-2, 0))
    s = rng.choice([0.0, 0.5, 3.0, 30.0])
    theta0 = rng.choice([0.0, 0.1, 3.0]) * rng.uniform(-1, 1, d)  # at the minimum, near it, past the inflection
    problem = make_problem(f, theta0, steps, random_biases(rng, T, N), zero_sum(rng, Q, d), s=s)
    return problem, simulate(problem, replicas=100 if s else 1, seed=int(rng.integers(2**32))).gradient


def sgd_gaps(curvature, theta0, gamma, sigma):
    """E f(theta_t) - f* for t = 0..T-1 of plain SGD on a diagonal quadratic with noise sigma_t^2: (T,), exact.

    curvature, theta0: (d,).  sigma: (T+1,), whose last entry no theta_t with t < T has seen.
    """
    P, gaps = theta0**2, []
    for s in sigma[:-1]:
        gaps.append(curvature @ P / 2)
        P = (1 - gamma * curvature) ** 2 * P + gamma**2 * s**2 / len(P)
    return np.array(gaps)


def spectra_of(seed, steps):
    """Eigenvalues and Weyl bounds of one network after `steps` steps of training; see hessian.spectra."""
    network = hessian.Network()
    X, y, start = hessian.teacher_problem(network, 90, np.random.default_rng(seed))
    return hessian.spectra(network, hessian.train(network, X, y, start, steps), X, y)
