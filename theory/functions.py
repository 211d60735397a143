"""The functions f on which we try the statements. Each has its minimum f* = 0 at theta* = 0."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


def require(condition, hypothesis):
    """Raise ValueError with the hypothesis unless the condition is true everywhere.

    NaN makes a comparison false, so it never passes.
    """
    if not np.all(condition):
        raise ValueError(f"hypothesis fails: {hypothesis}")


@dataclass(frozen=True)
class Function:
    """A function on R^d, with the constants that the theorems assume to be known.

    value: a function from points (..., d) to numbers (...).
    gradient: a function from points (..., d) to gradients (..., d).
    mu: the constant of strong convexity. It is 0 for a function that has none.
    L: the Lipschitz constant of the gradient.
    G: a bound of ||gradient||.
    curvature: the second derivatives (d,) of a quadratic. None for other functions.
    """

    value: Callable
    gradient: Callable
    mu: float
    L: float
    G: float = np.inf
    curvature: np.ndarray | None = None


def quadratic(curvature):
    """f(x) = 1/2 sum_i h_i x_i^2 with the curvature h: (d,). ValueError unless every h_i > 0."""
    h = np.asarray(curvature, float)
    require(h > 0, "curvatures are positive")

    def value(x):
        return (h * x**2).sum(-1) / 2

    def gradient(x):
        return h * x

    return Function(value, gradient, mu=h.min(), L=h.max(), curvature=h)


def kinked(mu, L):
    """f(x) = sum_i L/2 x_i^2 where x_i > 0, and mu/2 x_i^2 elsewhere.

    ValueError unless 0 < mu <= L.
    """
    require(0 < mu <= L, "0 < mu <= L")

    def value(x):
        return (gradient(x) * x).sum(-1) / 2

    def gradient(x):
        return np.where(x > 0, L, mu) * x

    return Function(value, gradient, mu, L)


def bent(k):
    """f'(x) = x + k (sqrt(1 + x^2) - 1), so that f''(0) = 1 and f'''(0) = k.

    ValueError unless 0 <= k < 1.
    """
    require(0 <= k < 1, "0 <= k < 1")

    def value(x):
        root_integral = (x * np.sqrt(1 + x**2) + np.arcsinh(x)) / 2
        return (x**2 / 2 + k * (root_integral - x)).sum(-1)

    def gradient(x):
        return x + k * (np.sqrt(1 + x**2) - 1)

    return Function(value, gradient, mu=1 - k, L=1 + k)


def rational(d):
    """f(x) = sum_i x_i^2 / (1 + x_i^2). It is not convex; |f_i'| is largest at x_i = 1 / sqrt 3."""

    def value(x):
        return (x**2 / (1 + x**2)).sum(-1)

    def gradient(x):
        return 2 * x / (1 + x**2) ** 2

    steepest = 9 * np.sqrt(d) / (8 * np.sqrt(3))
    return Function(value, gradient, mu=0.0, L=2.0, G=steepest)


def ripple(d):
    """f(x) = sum_i 1 - cos x_i. It is not convex and has a minimum at every multiple of 2 pi."""

    def value(x):
        return (1 - np.cos(x)).sum(-1)

    return Function(value, np.sin, mu=0.0, L=1.0, G=np.sqrt(d))
