"""One sharp step: gradients drive the average or hold the clients together, and count once.

E = ||hat theta - theta*||^2, V = mean_k ||theta_k - hat theta||^2 before a local step, a prime
after it. Here B is mean_k ||b_k||^2. `symbols` are (mu, L, alpha, B, M, sigma, Q) of the step.
Proof, and where it is attained: PROOFS.md [4].
"""

import numpy as np

from theory.functions import require
from theory.report import SLACK


def weight(f, alpha, p, w, noise):
    """Phi = max over mu <= s <= L of w (1 - alpha s)^2 + 2 alpha p/(L+mu) (s - mu)(L - s)
    + 2 noise s^2, a parabola in s. [4]
    """
    mu = f.mu
    L = f.L
    pull = 2 * alpha * p / (L + mu)
    bend = pull - w * alpha**2 - 2 * noise  # minus the coefficient of s^2
    slopes = np.array([mu, L])
    if bend > 0:
        top = pull * (L + mu) / 2 - alpha * w
        top = top / bend
        slopes = np.append(slopes, np.clip(top, mu, L))
    values = (
        w * (1 - alpha * slopes) ** 2  # what is left of the spread
        + pull * (slopes - mu) * (L - slopes)  # what it does to the average
        + 2 * noise * slopes**2  # the noise that it feeds
    )
    return values.max()


def step(f, symbols, mean_B, p, w, young):
    """(p', w', c) with p E' + w V' <= p' E + w' V + c; young = (1 + e, 1 + 1/e). [4]

    p' = p (1 - 2 alpha mu L/(L+mu)), w' = Phi at (1+e) w, c = alpha^2 {w (1 + 1/e) B
    + n (2MB + sigma^2)}, n = p/Q + w (1 - 1/Q). ValueError where the step is too long.
    """
    mu, L, alpha, _, M, sigma, Q = symbols
    on_V, on_B = young
    n = p / Q + w * (1 - 1 / Q)
    longest = 2 * p / (L + mu)
    require(alpha * (p + n * M) <= SLACK * longest, "alpha (p + nM) <= 2p/(L+mu): smaller steps")
    new_p = p * (1 - 2 * alpha * mu * L / (L + mu))
    new_w = weight(f, alpha, p, w * on_V, n * alpha**2 * M)
    c = (
        w * on_B * mean_B  # the biases push the clients apart
        + n * (2 * M * mean_B + sigma**2)  # noise
    )
    return new_p, new_w, alpha**2 * c


def young(shrunk, pushed):
    """(1 + e, 1 + 1/e) for e = pushed / shrunk, where Young's inequality is an equality."""
    if shrunk == 0 or pushed == 0:  # one of the two terms is 0
        return 1.0, 1.0
    return 1 + pushed / shrunk, 1 + shrunk / pushed
