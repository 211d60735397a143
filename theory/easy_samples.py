"""Section 5: do easy samples make the objective more convex? At the start of training, not after it.

    python -m theory.easy_samples

r_i = f(theta, x_i) - y_i. The Hessian of mean_S r_i^2 / 2 is H_S = GN_S + mean_S r_i hess f_i with the Gauss-Newton
term GN_S = mean_S grad f_i grad f_i^T. What holds: lambda_min(H_S) >= lambda_min(GN_S) - mean_S |r_i| ||hess f_i||. [9]
"""

from functools import cache

import numpy as np

from theory.functions import require
from theory.report import row, show, verdict

NETWORKS = 20


def counterexample(c, theta=1.0):
    """The second derivative of (f - y)^2 / 2 for f = theta^2, y = -c: larger for the harder sample, larger c."""
    residual = theta**2 + c
    return (2 * theta) ** 2 + residual * 2  # f'^2 + r f''


def network(theta, X, width=8):
    """f = v . tanh(W x + c) + e and grad f: (n,) and (n, p) at X: (n, d); theta: (p,) is (W | c per unit, v, e)."""
    ones = np.ones((len(X), 1))
    x = np.concatenate([X, ones], 1)
    inner = width * x.shape[1]
    W = theta[:inner].reshape(width, -1)
    v = theta[inner:-1]
    hidden = np.tanh(x @ W.T)
    to_hidden = v * (1 - hidden**2)
    to_W = to_hidden[:, :, None] * x[:, None, :]
    gradient = [to_W.reshape(len(X), -1), hidden, ones]
    return hidden @ v + theta[-1], np.concatenate(gradient, 1)


def hessians(theta, X, width):
    """hess f_i: (n, p, p), exact: grad f at an imaginary step so small that its square is nothing."""
    columns = []
    for direction in np.eye(len(theta)):
        _, gradient = network(theta + 1e-30j * direction, X, width)
        columns.append(gradient.imag / 1e-30)
    return np.stack(columns, 2)


def spectra(theta, X, y, width=8):
    """(eigenvalues of H_S: (p,), the bound on the least) for the thirds of least |r_i|, for all, of largest |r_i|."""
    f, gradient = network(theta, X, width)
    curvature = hessians(theta, X, width)
    r = f - y
    third = len(y) // 3
    require(third > 0, "thirds need 3 samples or more")
    ranked = np.argsort(np.abs(r))
    size = np.abs(r) * np.linalg.norm(curvature, 2, (1, 2))
    found = []
    for S in (ranked[:third], ranked, ranked[-third:]):
        GN = gradient[S].T @ gradient[S] / len(S)
        H = GN + (r[S, None, None] * curvature[S]).mean(0)
        bound = np.linalg.eigvalsh(GN)[0] - size[S].mean()
        found.append((np.linalg.eigvalsh(H), bound))
    return found


def train(seed, steps, n=90):
    """(theta, X, y) after gradient descent on mean r_i^2 / 2 towards a random network plus noise."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, 2))
    y = network(rng.standard_normal(33), X)[0] + 0.1 * rng.standard_normal(n)
    theta = 0.5 * rng.standard_normal(33)
    for _ in range(steps):
        f, gradient = network(theta, X)
        theta = theta - 0.1 * (f - y) @ gradient / n
    return theta, X, y


@cache
def convexity(steps):
    """lambda_min: (NETWORKS, 3) on the easy, all and hard samples, and whether the bound held throughout."""
    lowest = []
    holds = True
    for seed in range(NETWORKS):
        found = spectra(*train(seed, steps))
        lowest.append([eigenvalues[0] for eigenvalues, _ in found])
        holds = holds and all(values[0] >= bound - 1e-12 for values, bound in found)
    return np.array(lowest), holds


def check():
    """The initial objective, which is what the paper speaks of; the trained one; the counterexample."""
    start, start_holds = convexity(0)
    late, late_holds = convexity(1000)
    first = (start[:, 0] > start[:, 1]).sum()
    above_all = (late[:, 0] > late[:, 1]).sum()
    above_hard = (late[:, 0] > late[:, 2]).sum()
    label = "holds"
    if counterexample(c=2) > counterexample(c=1) or above_all < NETWORKS:
        label = "partly"
    if first < NETWORKS:
        label = "violated"
    note = f"easy > hard {above_hard}/20, easy > all {above_all}/20 after 1000 steps; "
    note += f"at step 0 easy > all {first}/20; corrected: Weyl"
    weyl = verdict(start_holds and late_holds)
    yield row("Remark, easy samples are more convex", "partly", label, weyl, note=note)


def draw(axes):
    """lambda_min of every network on easy, all and hard samples: the initial objective, and after 1000 steps."""
    for axis, steps in zip(axes, (0, 1000), strict=True):
        lowest, _ = convexity(steps)
        lowest = lowest[lowest[:, 1].argsort()]
        axis.plot(lowest[:, 0], "bo", ms=4, label="easy")
        axis.plot(lowest[:, 1], "ko", ms=4, label="all")
        axis.plot(lowest[:, 2], "ro", ms=4, label="hard")
        axis.axhline(0, color="gray", lw=0.8)
        axis.set(xlabel="network, sorted by λ_min on all", ylabel="λ_min of the Hessian")
        axis.set(title=f"after {steps} steps", xticks=range(0, NETWORKS, 5))


if __name__ == "__main__":
    show(check, {"spectra.png": draw})
