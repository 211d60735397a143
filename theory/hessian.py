"""Section 5's Hessian remark: do easy samples make the least-squares objective more convex?

L(theta) = 1/(2n) sum_i (f(theta, x_i) - y_i)^2 has the Hessian, with r_i = f(theta, x_i) - y_i,

    H_S = GN_S + mean_{i in S} r_i hess f_i,      GN_S = mean_{i in S} grad f_i grad f_i^T >= 0.

Here f is a tanh network with one hidden layer, its gradient and Hessian written out, trained by gradient descent; the
samples are cut in thirds by |r_i|: easy, middle, hard. The remark says lambda_min(easy) is the largest.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Network:
    """f(theta, x) = v . tanh(W x + c) + e on R^d with `width` hidden units; theta = (W | c per unit, v, e): (p,)."""

    d: int = 2
    width: int = 8

    @property
    def p(self):
        """The number of parameters."""
        return self.width * (self.d + 2) + 1

    def forward(self, theta, X):
        """X: (n, d) -> f_i: (n,), grad f_i: (n, p), and inputs with a one: (n, d+1), tanh: (n, width), v: (width,)."""
        n, first = len(X), self.width * (self.d + 1)
        inputs = np.concatenate([X, np.ones((n, 1))], 1)
        W, v = theta[:first].reshape(self.width, -1), theta[first:-1]
        hidden = np.tanh(inputs @ W.T)
        to_W = (v * (1 - hidden**2))[:, :, None] * inputs[:, None, :]  # d f / d W
        gradient = np.concatenate([to_W.reshape(n, -1), hidden, np.ones((n, 1))], 1)
        return hidden @ v + theta[-1], gradient, inputs, hidden, v

    def hessians(self, theta, X):
        """hess f_i(theta): (n, p, p). Nonzero only between weights into one unit, and between those and its v."""
        _, _, inputs, hidden, v = self.forward(theta, X)
        hessians = np.zeros((len(X), self.p, self.p))
        slope = 1 - hidden**2  # tanh' = 1 - tanh^2, tanh'' = -2 tanh (1 - tanh^2)
        for unit in range(self.width):
            into = slice(unit * (self.d + 1), (unit + 1) * (self.d + 1))
            out = self.width * (self.d + 1) + unit
            bend = -2 * v[unit] * hidden[:, unit] * slope[:, unit]
            hessians[:, into, into] = bend[:, None, None] * inputs[:, :, None] * inputs[:, None, :]
            hessians[:, into, out] = hessians[:, out, into] = slope[:, unit, None] * inputs
        return hessians


def teacher_problem(network, n, rng, noise=0.1):
    """Inputs X: (n, d), targets y: (n,) of a random network of this shape plus noise, and a small start theta: (p,)."""
    X = rng.standard_normal((n, network.d))
    y = network.forward(rng.standard_normal(network.p), X)[0] + noise * rng.standard_normal(n)
    return X, y, 0.5 * rng.standard_normal(network.p)


def train(network, X, y, theta, steps, rate=0.1):
    """`steps` steps of gradient descent on the mean of (f - y)^2 / 2: (p,)."""
    for _ in range(steps):
        f, gradient, *_ = network.forward(theta, X)
        theta = theta - rate * (f - y) @ gradient / len(X)
    return theta


def thirds(residuals):
    """Indices by |residual|, (n,): {'easy': the smallest third, 'all': everything, 'hard': the largest third}.

    ValueError for fewer than 3 samples: their thirds are empty.
    """
    if len(residuals) < 3:
        raise ValueError(f"thirds need 3 samples or more, not {len(residuals)}")
    order, third = np.argsort(np.abs(residuals)), len(residuals) // 3
    return {"easy": order[:third], "all": order, "hard": order[-third:]}


def hessian_parts(network, theta, X, y):
    """Per sample: residuals r: (n,), Gauss-Newton terms grad f grad f^T: (n, p, p), hess f: (n, p, p)."""
    f, gradient, *_ = network.forward(theta, X)
    return f - y, gradient[:, :, None] * gradient[:, None, :], network.hessians(theta, X)


def spectra(network, theta, X, y):
    """Eigenvalues of H_S, ascending, for S easy, all, hard: dict of (p,); and Weyl's lower bounds: dict of floats.

    Always lambda_min(H_S) >= lambda_min(GN_S) - mean_S |r_i| ||hess f_i||: the honest form of the remark.
    """
    r, gauss_newton, curvature = hessian_parts(network, theta, X, y)
    size = np.abs(r) * np.abs(np.linalg.eigvalsh(curvature)).max(1)
    eigenvalues, weyl = {}, {}
    for name, S in thirds(r).items():
        GN = gauss_newton[S].mean(0)
        eigenvalues[name] = np.linalg.eigvalsh(GN + (r[S, None, None] * curvature[S]).mean(0))
        weyl[name] = float(np.linalg.eigvalsh(GN)[0] - size[S].mean())
    return eigenvalues, weyl


def square_model_hessian(theta, c):
    """f(theta) = theta^2 fitted to y = -c: the Hessian of (theta^2 + c)^2 / 2 is 6 theta^2 + 2c.

    Harder (larger c) is *more* convex. Computed as GN + r f'', with f' = 2 theta, f'' = 2.
    """
    return (2 * theta) ** 2 + (theta**2 + c) * 2
