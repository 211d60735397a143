"""Section 5: do easy samples make the objective more convex? At the start of training.

    python -m theory.easy_samples

Let r_i = f(theta, x_i) - y_i. The Hessian of mean_S r_i^2 / 2 is H_S = GN_S + mean_S r_i hess f_i
with the Gauss-Newton term GN_S = mean_S grad f_i grad f_i^T. What is true is
lambda_min(H_S) >= lambda_min(GN_S) - mean_S |r_i| ||hess f_i||. PROOFS.md [9].
"""

from functools import cache

import numpy as np

from theory.beyond.network import hessians, network, train
from theory.functions import require
from theory.report import row, show, verdict

NETWORKS = 20


def counterexample(c, theta=1.0):
    """The second derivative of (f - y)^2 / 2 for f = theta^2 and y = -c.

    The harder sample has the larger c, and it has the larger derivative.
    """
    residual = theta**2 + c
    return (2 * theta) ** 2 + residual * 2  # f'^2 + r f''


def spectra(theta, X, y, width=8):
    """Three pairs (eigenvalues of H_S: (p,), bound on the least of them).

    They are for the easy third of the samples, for all, and for the hard third. ValueError for
    fewer than three samples.
    """
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
        bending = r[S, None, None] * curvature[S]
        H = GN + bending.mean(0)
        bound = np.linalg.eigvalsh(GN)[0] - size[S].mean()
        eigenvalues = np.linalg.eigvalsh(H)
        found.append((eigenvalues, bound))
    return found


@cache
def convexity(steps):
    """(lambda_min: (NETWORKS, 3) on easy, all and hard samples, whether the bound was true)."""
    lowest = np.zeros((NETWORKS, 3))
    bounds = np.zeros((NETWORKS, 3))
    for seed in range(NETWORKS):
        found = spectra(*train(seed, steps))
        for S, (eigenvalues, bound) in enumerate(found):
            lowest[seed, S] = eigenvalues[0]
            bounds[seed, S] = bound
    return lowest, (lowest >= bounds - 1e-12).all()


def above(lowest, other):
    """The number of networks in which lambda_min on easy samples is above that column."""
    return (lowest[:, 0] > lowest[:, other]).sum()


def check():
    """Try the initial objective, which the paper means, the trained one, and the counterexample."""
    start, start_holds = convexity(0)
    late, late_holds = convexity(1000)
    label = "holds"
    if counterexample(c=2) > counterexample(c=1) or above(late, 1) < NETWORKS:
        label = "partly"
    if above(start, 1) < NETWORKS:
        label = "violated"
    note = f"easy > hard {above(late, 2)}/20, easy > all {above(late, 1)}/20 after 1000 steps; "
    note += f"at step 0 easy > all {above(start, 1)}/20"
    weyl = verdict(start_holds and late_holds)
    yield row("Remark, easy samples are more convex", "partly", label, weyl, note=note)


def draw(axes):
    """Plot lambda_min of every network on easy, all and hard samples, before and after training."""
    for axis, steps in zip(axes, (0, 1000), strict=True):
        lowest, _ = convexity(steps)
        lowest = lowest[lowest[:, 1].argsort()]
        axis.plot(lowest[:, 0], "bo", ms=4, label="easy")
        axis.plot(lowest[:, 1], "ko", ms=4, label="all")
        axis.plot(lowest[:, 2], "ro", ms=4, label="hard")
        axis.axhline(0, color="gray", lw=0.8)
        axis.set(xlabel="network, sorted by λ_min on all", ylabel="λ_min of the Hessian")
        axis.set(title=f"after {steps} steps of training", xticks=range(0, NETWORKS, 5))


if __name__ == "__main__":
    show(check, {"spectra.png": draw})
