"""Assumption 1: a random S_t leaves no bias, and b_k may not depend on theta.

python -m theory.assumption1
"""

from itertools import combinations

import numpy as np

from theory.problem import kinked_problem
from theory.report import row, show
from theory.theorem1 import printed


def rank(K, Q):
    """The rank of the conditions sum_{k in S} b_k = 0 for every S of Q out of K clients.

    Rank K means that only b = 0 satisfies them. PROOFS.md [1].
    """
    members = []
    for clients in combinations(np.eye(K), Q):
        members.append(sum(clients))
    return np.linalg.matrix_rank(members)


def moving_centre(mu=0.1, L=1.0, alpha=1 / 12, B=1e-4, N=10, Q=100):
    """||theta||^2 after a round from theta* = 0. The biases depend on the clients' average.

    b_k = sqrt(B) u_k sign(theta_k - average), with u_k = 1 for half of the clients and -1 for the
    others. While all clients have the same theta, the biases cancel, as Assumption 1 demands. But
    the algorithm evaluates them at different theta_k.
    """
    theta = np.zeros(Q)
    u = np.repeat([1.0, -1.0], Q // 2)
    for _ in range(N):
        side = np.where(theta >= theta.mean(), 1.0, -1.0)
        gradient = np.where(theta > 0, L, mu) * theta
        theta = theta - alpha * (gradient + np.sqrt(B) * u * side)
    return theta.mean() ** 2


def check():
    """The rank for every Q < K <= 8, and Theorem 1 against biases about a moving centre."""
    cases = list(combinations(range(1, 9), 2))  # Q < K
    label = "holds"
    if all(rank(K, Q) == K for Q, K in cases):
        label = "vacuous"
    note = f"rank K in all {len(cases)} cases with K <= 8: only b = 0 is left"
    yield row("Assumption 1, random S_t, Q < K", "vacuous", label, note=note)
    ratio = printed(kinked_problem(100, T=1))[-1] / moving_centre()
    note = "Theorem 1 at T = 1, biases about the moving average"
    yield row("Assumption 1, b_k depends on theta", "violated", ratio, note=note)


if __name__ == "__main__":
    show(check)
