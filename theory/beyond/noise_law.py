"""Which order of a bias has the smaller error? Through the noise, the orders tie at c mu = 1.

    python -m theory.beyond.noise_law

The steps are c / (i + s_0). At the end, local step s has the weight
alpha_s^2 prod_{r>s} (1 - alpha_r mu)^2, of order (s + s_0)^(2 c mu - 2). So early steps weigh more
for c mu < 1, and the growing order has the smaller error. PROOFS.md [8].
"""

import numpy as np

from theory.beyond.ordering import draw_runs, final_ratio, final_ratios, frame_ratios, through_noise
from theory.report import listed, row, show, verdict

C_MU = 0.25, 0.5, 1.0, 2.0, 4.0


def mean_ratio(c):
    """E growing / E shrinking, where each E is the mean over the rounds."""
    growing, shrinking = through_noise(c)
    return growing.mean() / shrinking.mean()


def check():
    """Try five values of c with mu = 1, and a constant step."""
    final = final_ratios(through_noise, C_MU)
    slowest = mean_ratio(C_MU[0])
    fastest = mean_ratio(C_MU[-1])
    constant = final_ratio(through_noise, step=0.05)
    inside = final_ratio(through_noise, step=0.05, each_round=True)
    law = max(final[:2]) < 1 < min(*final[3:], constant)
    note = f"growing / shrinking: {listed(final)}; "
    note += f"constant step: {constant:.0f}, restarting: {inside:.2f}; "
    note += f"averaged over rounds: {slowest:.3f} to {fastest:.2f}"
    name = "Remark, curriculum ends below anti"
    yield row(name, "violated", 1 / max(final), verdict(law), note=note)


def draw(axes):
    """Plot the ratio of the orders, at the end and over the rounds, and four runs."""
    left, right = axes
    c = np.geomspace(0.25, 4, 9)
    left.loglog(c, final_ratios(through_noise, c), "ko-", label="at the end")
    left.loglog(c, [mean_ratio(x) for x in c], "C1o-", label="averaged over rounds")
    left.axvline(1, color="gray", lw=0.8)
    frame_ratios(left, "c μ", C_MU)
    draw_runs(right, through_noise, "c μ", (0.5, 2.0))


if __name__ == "__main__":
    show(check, {"noise_law.png": draw})
