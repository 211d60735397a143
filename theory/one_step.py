"""One local step from any state of the clients: the exact values that the lemmas bound."""

import numpy as np

from theory.functions import kinked, quadratic, require
from theory.problem import zero_sum
from theory.report import SLACK


def largest_steps(L, M, Q=1):
    """The largest steps of Theorem 1, 1 / (4 (3+2M) L), and of Lemma 4, 1 / (4 bar L).

    bar L = L + 2 (3+2M) L / Q.
    """
    steep = (3 + 2 * M) * L
    bar_L = L + 2 * steep / Q
    theorem1 = 1 / (4 * steep)
    lemma4 = 1 / (4 * bar_L)
    return theorem1, lemma4


def spread(x):
    """mean_k ||x_k - average||^2 for x: (Q, d)."""
    apart = x - x.mean(0)
    return (apart**2).sum(1).mean()


class State:
    """The clients before a local step: the averages in the lemmas, and expectations after it.

    theta: the weights of the clients, (Q, d).
    b: their biases with ||b_k||^2 <= B, (Q, d).
    alpha: the step. M, sigma: the noise.

    Below, g is the mean of the clients' gradients g_k, and bar g the mean of grad f(theta_k).
    ValueError if the arguments contradict this.
    """

    def __init__(self, f, theta, b, alpha, B, M=0.0, sigma=0.0):
        require(np.shape(b) == np.shape(theta), "biases are (Q, d), like theta")
        require(alpha > 0 and M >= 0 and sigma >= 0, "alpha > 0, M >= 0 and sigma >= 0")
        size = (b**2).sum(1)
        require(size <= B * SLACK, "||b_k||^2 <= B")
        Q = len(theta)
        self.f = f
        self.theta = theta
        self.b = b
        self.symbols = f.mu, f.L, alpha, B, M, sigma, Q
        self.mean_B = size.mean()
        average = theta.mean(0)
        self.E = (average**2).sum()  # ||hat theta - theta*||^2
        self.V = spread(theta)  # mean_k ||theta_k - hat theta||^2
        self.F = f.value(theta)  # f(theta_k) - f*: (Q,)
        self.gap = f.value(average)  # f(hat theta) - f*

        gradient = f.gradient(theta)
        g = gradient + b  # E g_k
        v = M * (g**2).sum(1) + sigma**2  # E||n_k||^2
        common = v.mean() / Q  # E||mean_k n_k||^2
        private = v.mean() - common
        moved = theta - alpha * g
        pulled = average - alpha * gradient.mean(0)
        next_average = moved.mean(0)
        self.second = (g**2).sum(1) + v  # E||g_k||^2: (Q,)
        self.off_mean = (b.mean(0) ** 2).sum() + common  # E||g - bar g||^2
        self.apart = spread(g) + private  # mean_k E||g_k - g||^2
        self.pulled = (pulled**2).sum()  # ||hat theta - alpha bar g||^2
        self.next_E = (next_average**2).sum() + alpha**2 * common
        self.next_V = spread(moved) + alpha**2 * private


def random_states(seed=0, count=2000):
    """Yield random states: strongly convex f with L <= 1, steps within Lemma 4's limit."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        Q = rng.integers(1, 9)
        d = rng.integers(1, 5)
        mu = 10 ** rng.uniform(-2, 0)
        f = kinked(mu, 1.0)
        if rng.random() >= 0.5:
            f = quadratic(rng.uniform(mu, 1.0, d))
        B = 10 ** rng.uniform(-3, 1) * (rng.random() < 0.9)
        centre = rng.standard_normal(d) * 10 ** rng.uniform(-2, 1)
        apart = rng.standard_normal((Q, d))
        apart *= 10 ** rng.uniform(-2, 1)
        b = np.sqrt(B) * zero_sum(rng, Q, d)
        fraction = rng.uniform(0.01, 0.5)
        M = rng.choice([0.0, 0.5, 3.0])
        sigma = rng.choice([0.0, 0.1, 2.0])
        longest = largest_steps(f.L, M, Q)[1]
        alpha = fraction * min(1.0, 2 * longest)
        yield State(f, centre + apart, b, alpha, B, M, sigma)
