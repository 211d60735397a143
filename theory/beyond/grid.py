"""Random step sizes and biases for the random problems of Theorems 1 and 2."""

import numpy as np

from theory.problem import diminishing_steps, schedule

GRID = 600  # problems of each kind


def random_steps(rng, T, N, largest):
    """Constant, diminishing or arbitrary steps: (T+1, N). Many of them reach `largest`."""
    shape = rng.integers(3)
    top = largest
    if rng.random() < 0.75:
        top = largest * rng.uniform(0.1, 1)
    if shape == 0:
        return np.full((T + 1, N), top)
    if shape == 1:
        return diminishing_steps(T + 1, N, 5 * top, 5)
    steps = np.ones((T + 1) * N)
    steps[1:] = rng.uniform(0.05, 1, len(steps) - 1)
    return top * steps.reshape(T + 1, N)


def random_biases(rng, T, N):
    """Sizes B with a random order and mean: (T+1, N). One time in ten they are all 0."""
    order = rng.choice(["client", "data", "anti", "constant", "shuffled"])
    mean = 10 ** rng.uniform(-4, 1) * (rng.random() < 0.9)
    first = rng.uniform(0.01, 1)
    return mean * schedule(order, T + 1, N, first=first, rng=rng)
