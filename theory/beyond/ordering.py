"""The order of a bias: the same sizes growing and shrinking, with the same falling steps.

A curriculum is the growing order. noise_law.py and drift_law.py say which order has the smaller
error at the end.
"""

from functools import cache

import numpy as np

from theory.functions import bent, kinked, quadratic
from theory.local_sgd import exact_error
from theory.problem import Problem, diminishing_steps, opposed
from theory.report import label_ticks


def minority(Q):
    """Directions u with sum 0: (Q, 1). One client is pushed up, the others down."""
    u = np.full((Q, 1), 1 / (Q - 1))
    u[0] = -1.0  # a step goes against the bias
    return u


def two_orders(
    f, directions, c, M=0.0, T=200, N=5, offset=None, B=(0.0, 8.0), step=None, each_round=False
):
    """E after each round, for a B that grows linearly over the local steps and for its reverse.

    f, directions, M: as in Problem.
    c, offset: the steps c / (i + offset), where i counts local steps. offset is max(20, 40 c L)
        unless given.
    step: a constant step to use instead.
    B: the first and the last size.
    each_round: let B grow inside each round, and start again in the next, not over the whole run.

    Returns (2, T).
    """
    if offset is None:
        offset = max(20.0, 40.0 * c * f.L)
    steps = diminishing_steps(T + 1, N, c, offset)  # round T is never run
    if step:
        steps = np.full((T + 1, N), step)
    ramp = np.linspace(*B, T * N)
    if each_round:
        ramp = np.tile(np.linspace(*B, N), T)
    d = directions.shape[-1]
    errors = []
    for sizes in (ramp, ramp[::-1]):
        rounds = sizes.reshape(T, N)
        order = np.append(rounds, rounds[-1:], axis=0)
        problem = Problem(f, np.zeros(d), steps, order, directions, M)
        E = exact_error(problem)
        errors.append(E[1:])
    return np.array(errors)


def through_noise(c, mu=1.0, **settings):
    """two_orders on mu ||theta||^2 / 2: the biases act through the noise.

    There are 8 clients in 4 dimensions, and M = 1.
    """
    f = quadratic(np.full(4, mu))
    directions = opposed(8, 4)
    return two_orders(f, directions, c, M=1.0, **settings)


def at_a_kink(c, mu=1.0, L=1.0, Q=2, **settings):
    """two_orders without noise, on the kinked f. One of Q clients is pushed to the steep side."""
    return two_orders(kinked(mu, L), minority(Q), c, **settings)


def where_smooth(c, k=0.9, **settings):
    """two_orders without noise, with two clients on the bent f: f'' = 1, f''' = k at theta*."""
    return two_orders(bent(k), minority(2), c, **settings)


@cache
def final_ratio(run, c=1.0, **settings):
    """E growing / E shrinking at the end of run(c, ..). Below 1 the growing order is better."""
    growing, shrinking = run(c, **settings)
    return growing[-1] / shrinking[-1]


def final_ratios(run, values, **settings):
    """final_ratio for every c in `values`, as a list."""
    return [final_ratio(run, c, **settings) for c in values]


def frame_ratios(axis, name, ticks):
    """Label a panel of final ratios over `name`, with a line where the two orders tie."""
    axis.axhline(1, color="gray", lw=0.8)
    label_ticks(axis, ticks)
    axis.set(xlabel=f"{name}, for steps c / (i + s₀)", ylabel="E growing / E shrinking")
    axis.set(title="below 1 growing wins; vertical: the law's tie")


def draw_runs(axis, run, name, values):
    """Plot E over the rounds, in both orders, for two values of c."""
    for c, color in zip(values, ("C0", "C3"), strict=True):
        growing, shrinking = run(c)
        rounds = np.arange(1, len(growing) + 1)
        axis.loglog(rounds, growing, color, label=f"growing, {name} = {c:g}")
        axis.loglog(rounds, shrinking, color + "--", label=f"shrinking, {name} = {c:g}")
    axis.set(xlabel="rounds", ylabel="E‖θ − θ*‖²")
    axis.set(title="the same total bias in two orders")
