"""'Curriculum ends below anti-curriculum' through the noise: exactly when c mu < 1, for steps c / (i + s_0).

    python -m theory.noise_law

Local step s has the final weight alpha_s^2 prod_{r>s} (1 - alpha_r mu)^2 ~ (s + s_0)^(2 c mu - 2): early steps
weigh more when c mu < 1. PROOFS.md [8].
"""

import numpy as np

from theory.ordering import GROWING, final_ratio, through_noise
from theory.report import label_ticks, listed, row, show, verdict

C_MU = 0.25, 0.5, 1.0, 2.0, 4.0


def mean_ratio(c):
    """E growing / E shrinking, each averaged over the rounds."""
    growing, shrinking = through_noise(c)
    return growing.mean() / shrinking.mean()


def check():
    """mu = 1, so that c is c mu; and a constant step."""
    final = [final_ratio(through_noise, c) for c in C_MU]
    mean = [mean_ratio(c) for c in C_MU]
    constant = final_ratio(through_noise, step=0.05)
    law = max(final[:2]) < 1 < min(*final[3:], constant)
    note = f"through the noise growing/shrinking {listed(final)} at c mu = {C_MU}; constant a {constant:.0f}; "
    note += f"averaged over rounds {min(mean):.3f} to {max(mean):.2f}"
    name = "Remark, curriculum ends below anti"
    yield row(name, "violated", 1 / max(final), verdict(law), note=note)


def draw(axes):
    """Who wins, at the end and on the way, and four of the runs."""
    left, right = axes
    c = np.geomspace(0.25, 4, 9)
    left.loglog(c, [final_ratio(through_noise, x) for x in c], "ko-", label="at the end")
    left.loglog(c, [mean_ratio(x) for x in c], "C1o-", label="averaged over rounds")
    left.axhline(1, color="gray", lw=0.8)
    left.axvline(1, color="gray", lw=0.8)
    label_ticks(left, C_MU)
    left.set(xlabel="c μ, for steps c / (i + s₀)", ylabel=GROWING, title="below 1: the growing bias wins")
    for x, color in ((0.5, "C0"), (2.0, "C3")):
        growing, shrinking = through_noise(x)
        rounds = np.arange(1, len(growing) + 1)
        right.loglog(rounds, growing, color, label=f"growing, c μ = {x:g}")
        right.loglog(rounds, shrinking, color + "--", label=f"shrinking, c μ = {x:g}")
    right.set(xlabel="rounds", ylabel="E‖θ − θ*‖²", title="the same total bias in two orders")


if __name__ == "__main__":
    show(check, {"noise_law.png": draw})
