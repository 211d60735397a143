"""'Curriculum ends below anti-curriculum', through the noise: exactly when c mu < 1.

    python -m theory.beyond.noise_law

Under steps c / (i + s_0) local step s has the final weight alpha_s^2 prod_{r>s} (1 - alpha_r mu)^2,
of order (s + s_0)^(2 c mu - 2): early steps weigh more when c mu < 1. PROOFS.md [8].
"""

import numpy as np

from theory.beyond.ordering import draw_runs, final_ratio, final_ratios, frame_ratios, through_noise
from theory.report import listed, row, show, verdict

C_MU = 0.25, 0.5, 1.0, 2.0, 4.0


def mean_ratio(c):
    """E growing / E shrinking, each averaged over the rounds."""
    growing, shrinking = through_noise(c)
    return growing.mean() / shrinking.mean()


def check():
    """mu = 1, so that c is c mu; and a constant step."""
    final = final_ratios(through_noise, C_MU)
    slowest = mean_ratio(C_MU[0])
    fastest = mean_ratio(C_MU[-1])
    constant = final_ratio(through_noise, step=0.05)
    law = max(final[:2]) < 1 < min(*final[3:], constant)
    note = f"through the noise growing/shrinking {listed(final)} at c mu = {C_MU}; "
    note += f"constant a {constant:.0f}; "
    note += f"averaged over rounds {slowest:.3f} to {fastest:.2f}"
    name = "Remark, curriculum ends below anti"
    yield row(name, "violated", 1 / max(final), verdict(law), note=note)


def draw(axes):
    """Who wins, at the end and on the way, and four of the runs."""
    left, right = axes
    c = np.geomspace(0.25, 4, 9)
    left.loglog(c, final_ratios(through_noise, c), "ko-", label="at the end")
    left.loglog(c, [mean_ratio(x) for x in c], "C1o-", label="averaged over rounds")
    left.axvline(1, color="gray", lw=0.8)
    frame_ratios(left, "c μ", C_MU)
    draw_runs(right, through_noise, "c μ", (0.5, 2.0))


if __name__ == "__main__":
    show(check, {"noise_law.png": draw})
