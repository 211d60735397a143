"""A small tanh network, with its gradient and its Hessian for every sample."""

import numpy as np


def network(theta, X, width=8):
    """f = v . tanh(W x + c) + e: (n,), and grad f: (n, p).

    theta: (W and c of every unit, v, e) in one vector, (p,).
    X: the samples, (n, d).
    """
    ones = np.ones((len(X), 1))
    x = np.append(X, ones, axis=1)
    inner = width * x.shape[1]
    W = theta[:inner].reshape(width, -1)
    v = theta[inner:-1]
    hidden = np.tanh(x @ W.T)
    to_hidden = v * (1 - hidden**2)
    to_W = to_hidden[:, :, None] * x[:, None, :]
    to_W = to_W.reshape(len(X), -1)
    f = hidden @ v + theta[-1]
    return f, np.concatenate([to_W, hidden, ones], 1)


def hessians(theta, X, width):
    """hess f_i: (n, p, p), exact, from grad f at an imaginary step whose square rounds to 0."""
    columns = []
    for direction in np.eye(len(theta)):
        moved = theta + 1e-30j * direction
        _, gradient = network(moved, X, width)
        column = gradient.imag / 1e-30
        columns.append(column)
    return np.stack(columns, 2)


def train(seed, steps, n=90):
    """(theta, X, y) after gradient descent on mean r_i^2 / 2.

    y is the output of a random network plus noise.
    """
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, 2))
    y, _ = network(rng.standard_normal(33), X)
    y = y + 0.1 * rng.standard_normal(n)
    theta = 0.5 * rng.standard_normal(33)
    for _ in range(steps):
        f, gradient = network(theta, X)
        slope = (f - y) @ gradient / n
        theta = theta - 0.1 * slope
    return theta, X, y
