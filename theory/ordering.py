"""The order of a bias: the same biases growing and shrinking, under the same falling steps. Who is lower at the end?"""

from functools import cache

import numpy as np

from theory.biases import diminishing_steps, minority, opposed
from theory.functions import bent, kinked, quadratic
from theory.local_sgd import Problem, exact_error

GROWING = "E growing / E shrinking"  # the label of the figures


def two_orders(f, directions, M=0.0, c=1.0, T=200, N=5, offset=None, B=(0.0, 8.0), step=None):
    """E after every round, (2, T): under a B growing linearly over the local steps, and under its full reversal.

    Steps c / (i + offset), i counting local steps, offset max(20, 40 c L) unless given; or the constant `step`.
    """
    if offset is None:
        offset = max(20.0, 40.0 * c * f.L)
    steps = diminishing_steps(T + 1, N, c, offset)  # round T is never run
    if step:
        steps = np.full((T + 1, N), step)
    growing = np.zeros((T + 1, N))
    growing[:T] = np.linspace(*B, T * N).reshape(T, N)
    shrinking = np.zeros((T + 1, N))
    shrinking[:T] = growing[:T][::-1, ::-1]
    theta0 = np.zeros(directions.shape[-1])
    problems = [Problem(f, theta0, steps, order, directions, M) for order in (growing, shrinking)]
    return np.array([exact_error(problem)[1:] for problem in problems])


def through_noise(c=1.0, mu=1.0, **settings):
    """On mu ||theta||^2 / 2 in 4 dimensions: 8 clients, M = 1; the biases cancel and act through the noise."""
    return two_orders(quadratic(np.full(4, mu)), opposed(8, 4), M=1.0, c=c, **settings)


def at_a_kink(c=1.0, mu=1.0, L=1.0, Q=2, **settings):
    """Without noise, on the kinked f: one of Q clients is pushed to the steep side."""
    return two_orders(kinked(mu, L), minority(Q), c=c, **settings)


def where_smooth(c=1.0, k=0.9, **settings):
    """Without noise, two clients on the bent f, f'' = 1 and f''' = k at theta*."""
    return two_orders(bent(k), minority(2), c=c, **settings)


@cache
def final_ratio(run, c=1.0, **settings):
    """E growing / E shrinking at the end of run(c, ..); below 1 the growing bias, the curriculum, wins."""
    growing, shrinking = run(c, **settings)
    return growing[-1] / shrinking[-1]
