"""The two dissimilarity remarks of supplement 2, on clients f_m(x) = 1/2 sum_i h_mi (x_i - c_mi)^2 that truly differ.

Remark 2: Lambda(theta, q) = sum q_m ||grad f_m||^2 / ||sum q_m grad f_m||^2 is bounded by some lambda.
Remark 3: FedProx decreases f by rho_t ||grad f||^2 a round, rho_t = 1/mu - bar rho, bar rho = O(B_t) O(gamma) O(1/mu).
"""

from dataclasses import dataclass

import numpy as np

from theory.model import require


@dataclass(frozen=True)
class QuadraticClients:
    """curvatures h: (m, d), positive; centres c: (m, d); weights q: (m,), positive with sum 1. ValueError otherwise."""

    curvatures: np.ndarray
    centres: np.ndarray
    weights: np.ndarray

    def __post_init__(self):
        require(np.shape(self.curvatures) == np.shape(self.centres), "curvatures and centres have one shape")
        require(self.curvatures > 0, "curvatures are positive")
        require((self.weights > 0) & (abs(self.weights.sum() - 1) < 1e-9), "weights are positive with sum 1")

    @property
    def minimiser(self):
        """theta* of f = sum_m q_m f_m: (d,)."""
        return (self.weights @ (self.curvatures * self.centres)) / (self.weights @ self.curvatures)

    def value(self, theta):
        """f(theta): scalar."""
        return float(self.weights @ (self.curvatures * (theta - self.centres) ** 2).sum(1) / 2)

    def gradients(self, theta):
        """grad f_m(theta): (m, d)."""
        return self.curvatures * (theta - self.centres)

    def dissimilarity(self, theta):
        """Lambda(theta, q) >= 1 (Jensen). ValueError where sum q_m grad f_m is 0: there it is not defined."""
        gradients = self.gradients(theta)
        mean = self.weights @ gradients
        require(mean @ mean > 0, "sum q_m grad f_m(theta) is not 0")
        return float(self.weights @ (gradients**2).sum(1) / (mean @ mean))

    def proximal_round(self, theta, mu):
        """One exact FedProx round (gamma = 0), all clients: mean of argmin f_m(x) + mu/2 ||x - theta||^2: (d,).

        mu > 0 is FedProx's proximal weight, not a convexity; ValueError otherwise.
        """
        require(mu > 0, "mu > 0")
        solutions = (self.curvatures * self.centres + mu * theta) / (self.curvatures + mu)
        return self.weights @ solutions


def random_clients(rng, m=8, d=4):
    """Clients with curvatures in [0.5, 2], normal centres and random weights."""
    weights = rng.uniform(0.5, 1.5, m)
    return QuadraticClients(rng.uniform(0.5, 2, (m, d)), rng.standard_normal((m, d)), weights / weights.sum())


def rho_printed(mu):
    """rho_t of the remark, as printed, for exact local solutions: bar rho has the factor gamma = 0, so rho = 1/mu."""
    require(mu > 0, "mu > 0")
    return 1 / mu


def rho_corrected(B, L, mu, gamma=0.0):
    """rho of a FedProx round with every client taking part and convex f_m, B^2 = Lambda(theta): a decrease of at least

        rho ||grad f||^2,  rho = 1/mu - gamma B/mu - L B (1+gamma)/mu^2 - L (1+gamma)^2 B^2 / (2 mu^2).
    gamma-inexact: ||grad f_m(x_m) + mu (x_m - theta)|| <= gamma ||grad f_m(theta)||. Then ||x_m - theta|| <=
    (1+gamma)/mu ||grad f_m(theta)||, mean_m ||grad f_m|| <= B ||grad f||, and L-smoothness of f gives the rest.
    Where rho <= 0 it promises nothing. ValueError unless B >= 1, L > 0, mu > 0, gamma >= 0.
    """
    require(B >= 1 - 1e-12 and L > 0 and mu > 0 and gamma >= 0, "B >= 1, L > 0, mu > 0 and gamma >= 0")
    inexact = (1 + gamma) * B
    return 1 / mu - gamma * B / mu - L * inexact / mu**2 - L * inexact**2 / (2 * mu**2)
