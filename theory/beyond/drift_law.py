"""Which order of a bias has the smaller error? Two laws for the drift, without noise (M = 0).

    python -m theory.beyond.drift_law

The biases cancel, but they move the clients apart. Then the mean gradient is not the gradient at
the mean. At a kink the orders tie at c mu = 1 + mu/L, and on a smooth f at c f'' = 3. Below the tie
the growing order has the smaller error. If B grows inside each round and alpha N is small, it
always has it. PROOFS.md [8].
"""

import numpy as np

from theory.beyond.ordering import (
    at_a_kink,
    draw_runs,
    final_ratio,
    final_ratios,
    frame_ratios,
    where_smooth,
)
from theory.functions import require
from theory.report import label_ticks, listed, row, show, verdict

SPLITS = (1.5, 2), (3.0, 2), (10.0, 2), (10.0, 11)  # L/mu, Q


def tie_law(kappa, Q=2):
    """The c mu at which the orders tie at a kink: 1 + mu / (2qL + (1-2q) mu).

    q = 1/Q and kappa = L/mu.
    """
    q = 1 / Q
    return 1 + 1 / (2 * q * kappa + 1 - 2 * q)


def kink_ratios(c_mu, kappa, Q=2, **settings):
    """E growing / E shrinking at a kink with L = 1 and mu = 1/kappa, for c mu: (n,).

    ValueError for L = mu, where E = 0 in both orders.
    """
    require(kappa > 1, "L > mu")
    c = np.array(c_mu) * kappa
    mu = 1 / kappa
    return final_ratios(at_a_kink, c, mu=mu, L=1.0, Q=Q, **settings)


def tie(kappa, Q=2, **settings):
    """The measured tie, by log-linear interpolation between runs near the law.

    settings: as in ordering.two_orders. ValueError if the tie is not near the law.
    """
    c_mu = tie_law(kappa, Q) * np.array([0.9, 1.0, 1.1, 1.2])
    ratios = kink_ratios(c_mu, kappa, Q, **settings)
    require(ratios[0] < 1 < ratios[-1], "the tie is near the law: L / mu up to about 10")
    return np.exp(np.interp(0.0, np.log(ratios), np.log(c_mu)))


def check():
    """Measure the ties of both laws, which must be within 5 %, and try a constant step."""
    ratios = kink_ratios((1.0, 4 / 3, 2.0, 4.0), 1.5)
    smooth = final_ratios(where_smooth, (2.0, 3.0, 4.0))
    constant = final_ratio(at_a_kink, mu=0.1, step=0.05)
    inside = final_ratio(at_a_kink, mu=0.1, step=0.05, each_round=True)
    law = abs(smooth[1] - 1) < 0.05 and smooth[0] < 0.5 and smooth[2] > 2 and inside < 1
    ties = []
    for kappa, Q in SPLITS:
        measured = tie(kappa, Q)
        expected = tie_law(kappa, Q)
        law = law and abs(measured / expected - 1) < 0.05
        ties.append(measured)
    note = f"kink: {listed(ratios)}; ties: {listed(ties)}; "
    note += f"smooth f: {listed(smooth)}; "
    note += f"constant step: {constant:.1f}, restarting: {inside:.2f}"
    name = "Remark, the same through the drift"
    yield row(name, "violated", 1 / max(ratios), verdict(law), note=note)


def draw_kink(axes):
    """Plot, for a kink, the ratio of the orders over c mu and the ties over L/mu."""
    left, right = axes
    c_mu = np.geomspace(0.5, 4, 7)
    for kappa, color in ((1.5, "C2"), (10.0, "C0")):
        left.loglog(c_mu, kink_ratios(c_mu, kappa), color + "o-", label=f"L/μ = {kappa:g}")
        left.axvline(tie_law(kappa), color=color, lw=0.8)
    frame_ratios(left, "c μ", [0.5, 1, 2, 4])
    kappa = np.geomspace(1.1, 10, 100)
    right.semilogx(kappa, tie_law(kappa), "C2", label="law: c μ = 1 + μ/L")
    measured = 1.1, 1.5, 2.0, 3.0, 5.0, 10.0
    right.semilogx(measured, [tie(x) for x in measured], "C2s", label="measured")
    label_ticks(right, [1, 2, 3, 5, 10])
    right.set(xlabel="L / μ", ylabel="c μ at the tie")
    right.set(title="below the line the growing order is better")


def draw_smooth(axes):
    """Plot, for a smooth f, the ratio of the orders over c f'', and four runs."""
    left, right = axes
    c = np.geomspace(1, 6, 9)
    ratios = final_ratios(where_smooth, c)
    left.loglog(c, ratios, "C1o-", label="f' = x + 0.9 (√(1 + x²) − 1)")
    left.axvline(3, color="gray", lw=0.8)
    frame_ratios(left, "c f''(θ*)", [1, 2, 3, 4, 6])
    draw_runs(right, where_smooth, "c f''", (2.0, 4.0))


if __name__ == "__main__":
    show(check, {"kink_law.png": draw_kink, "smooth_law.png": draw_smooth})
