"""'Curriculum ends below anti-curriculum' through the drift, M = 0: c mu < 1 + mu/L at a kink, c f'' < 3 where f is smooth.

    python -m theory.drift_law

The biases cancel, but move the clients apart, and then the mean gradient is not the gradient at the mean. PROOFS.md [8].
"""

import numpy as np

from theory.functions import require
from theory.ordering import GROWING, at_a_kink, final_ratio, where_smooth
from theory.report import label_ticks, listed, row, show, verdict

SPLITS = (1.5, 2), (3.0, 2), (10.0, 2), (10.0, 11)  # L/mu, Q


def tie_law(kappa, Q=2):
    """c mu at which the two orders tie at a kink: 1 + mu / (2qL + (1-2q) mu), q = 1/Q pushed up, L/mu = kappa."""
    q = 1 / Q
    return 1 + 1 / (2 * q * kappa + 1 - 2 * q)


def kink_ratio(c_mu, kappa, Q=2):
    """E growing / E shrinking at a kink of L = 1, mu = 1/kappa."""
    return final_ratio(at_a_kink, c_mu * kappa, mu=1 / kappa, L=1.0, Q=Q)


def tie(kappa, Q=2):
    """The measured tie: log-linear between runs near the law. ValueError where it is not among them."""
    c_mu = tie_law(kappa, Q) * np.array([0.9, 1.0, 1.1, 1.2])
    ratios = [kink_ratio(x, kappa, Q) for x in c_mu]
    require(ratios[0] < 1 < ratios[-1], "the tie is near the law: L / mu up to about 10")
    return np.exp(np.interp(0.0, np.log(ratios), np.log(c_mu)))


def check():
    """Both laws by their ties, measured within 5 %, and a constant step."""
    ratios = [kink_ratio(c_mu, 1.5) for c_mu in (1.0, 4 / 3, 2.0, 4.0)]
    ties = [tie(*split) for split in SPLITS]
    laws = [tie_law(*split) for split in SPLITS]
    smooth = [final_ratio(where_smooth, c) for c in (2.0, 3.0, 4.0)]
    constant = final_ratio(at_a_kink, mu=0.1, step=0.05)
    near = np.allclose(ties, laws, rtol=0.05) and abs(smooth[1] - 1) < 0.05
    law = near and smooth[0] < 0.5 and smooth[2] > 2
    note = f"growing/shrinking {listed(ratios)} at c mu = 1, 1.33, 2, 4 for L/mu = 1.5; tie at c mu = "
    note += ", ".join(f"{x:.2f} (law {y:.2f})" for x, y in zip(ties, laws, strict=True))
    note += " for L/mu, Q = 1.5, 2; 3, 2; 10, 2; 10, 11; "
    note += f"smooth f: {listed(smooth)} at c f'' = 2, 3, 4; constant a {constant:.1f}"
    name = "Remark, the same through the drift"
    yield row(name, "violated", 1 / max(ratios), verdict(law), note=note)


def draw_kink(axes):
    """At a kink: who wins against c mu, and where the two orders tie."""
    left, right = axes
    c_mu = np.geomspace(0.5, 4, 7)
    for kappa, style in ((1.5, "C2s-"), (10.0, "C0s-")):
        ratios = [kink_ratio(x, kappa) for x in c_mu]
        left.loglog(c_mu, ratios, style, label=f"L/μ = {kappa:g}")
        left.axvline(tie_law(kappa), color=style[:2], lw=0.8)
    left.axhline(1, color="gray", lw=0.8)
    label_ticks(left, [0.5, 1, 2, 4])
    left.set(xlabel="c μ, for steps c / (i + s₀)", ylabel=GROWING, title="below 1: the growing bias wins")
    kappa = np.geomspace(1, 10, 100)
    right.semilogx(kappa, tie_law(kappa), "C2", label="law: c μ = 1 + μ/L")
    measured = 1.1, 1.5, 2.0, 3.0, 5.0, 10.0
    right.semilogx(measured, [tie(x) for x in measured], "C2s", label="measured")
    label_ticks(right, [1, 2, 3, 5, 10])
    right.set(xlabel="L / μ", ylabel="c μ at the tie", title="below the line the growing bias wins")


def draw_smooth(axes):
    """On a smooth f: who wins against c f'', and four of the runs."""
    left, right = axes
    c = np.geomspace(1, 6, 9)
    left.loglog(c, [final_ratio(where_smooth, x) for x in c], "C1^-", label="f' = x + .9 (√(1 + x²) − 1)")
    left.axhline(1, color="gray", lw=0.8)
    left.axvline(3, color="gray", lw=0.8)
    label_ticks(left, [1, 2, 3, 4, 6])
    left.set(xlabel="c f''(θ*), for steps c / (i + s₀)", ylabel=GROWING, title="below 1: the growing bias wins")
    for x, color in ((2.0, "C0"), (4.0, "C3")):
        growing, shrinking = where_smooth(x)
        rounds = np.arange(1, len(growing) + 1)
        right.loglog(rounds, growing, color, label=f"growing, c f'' = {x:g}")
        right.loglog(rounds, shrinking, color + "--", label=f"shrinking, c f'' = {x:g}")
    right.set(xlabel="rounds", ylabel="(θ − θ*)²", title="the same total bias in two orders")


if __name__ == "__main__":
    show(check, {"kink_law.png": draw_kink, "smooth_law.png": draw_smooth})
