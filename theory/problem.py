"""A problem of local SGD under Assumption 1: the function, the steps, the biases and the noise.

Client k of Q takes N = J + 1 steps of length alpha along g_k = grad f(theta_k) + b_k + n_k, with

    sum_k b_k = 0,  ||b_k||^2 <= B,  E n_k = 0,
    E||n_k||^2 = M ||grad f(theta_k) + b_k||^2 + sigma^2.

Then the server averages. B bounds the *squared* bias. The noise is the largest that Theorem 1
allows. Numbers have no unit and are float64.
"""

from dataclasses import dataclass

import numpy as np

from theory.functions import Function, kinked, require


@dataclass
class Problem:
    """One run of Algorithm 3 with all clients.

    theta0: the weights at the start, (d,).
    steps: alpha^(t,j) for t = 0..T, as in the paper: (T+1, N). theta^(T,0) has seen t < T.
    B: the bound of the squared bias, a number or an array that broadcasts to (T+1, N).
    directions: u of norm at most 1, with sum 0 over clients: (Q, d) or (T+1, N, Q, d).
    M, sigma: the noise.

    The biases b_k = sqrt(B) u_k do not depend on theta. A Problem also has the attributes
    biases: (T+1, N, Q, d), mean_B = mean_k ||b_k||^2: (T+1, N), and E_0 = ||theta0||^2.
    ValueError if the arguments contradict Assumption 1.
    """

    f: Function
    theta0: np.ndarray
    steps: np.ndarray
    B: np.ndarray
    directions: np.ndarray
    M: float = 0.0
    sigma: float = 0.0

    def __post_init__(self):
        theta0 = np.asarray(self.theta0, float)
        steps = np.asarray(self.steps, float)
        B = np.asarray(self.B, float)
        u = np.asarray(self.directions)
        has_steps = steps.ndim == 2 and steps.size
        require(theta0.ndim == 1 and np.isfinite(theta0), "theta0 is a finite vector")
        require(has_steps, "steps are (T+1, N), at least one round of one step")
        require((steps > 0) & (steps < np.inf), "steps are positive")
        require((B >= 0) & (np.inf > B), "B >= 0")
        require(0 <= self.M < np.inf and 0 <= self.sigma < np.inf, "M >= 0 and sigma >= 0")
        require(u.ndim > 1 and u.shape[-1] == len(theta0), "directions are (Q, d)")
        length = np.linalg.norm(u, axis=-1)
        require(length <= 1 + 1e-12, "||b_k||^2 <= B")
        require(np.abs(u.mean(-2)) <= 1e-12, "the biases sum to zero")
        self.T = len(steps) - 1
        self.N = steps.shape[1]
        self.Q = u.shape[-2]
        self.theta0 = theta0
        self.E_0 = (theta0**2).sum()
        self.steps = steps
        self.B = np.broadcast_to(B, steps.shape)
        shape = (*steps.shape, self.Q, len(theta0))
        u = np.broadcast_to(u, shape)
        size = np.sqrt(self.B)
        self.biases = size[:, :, None, None] * u
        squared = (self.biases**2).sum(-1)
        self.mean_B = squared.mean(-1)

    def symbols(self, t, j):
        """(mu, L, alpha, B, M, sigma, Q) at local step j of round t."""
        f = self.f
        alpha = self.steps[t, j]
        B = self.B[t, j]
        return f.mu, f.L, alpha, B, self.M, self.sigma, self.Q


def kinked_problem(Q=2, alpha=1 / 12, B=1e-4, N=10, T=10, theta0=0.0):
    """T rounds on the kinked f with L = 1 and mu = 0.1: half of the clients are pushed each way.

    T = None takes 12 / (alpha mu N) rounds. After these only the effect of the bias is left.
    """
    if T is None:
        T = int(np.ceil(12 / (0.1 * alpha * N)))
    steps = np.full((T + 1, N), alpha)
    return Problem(kinked(mu=0.1, L=1.0), [theta0], steps, B, opposed(Q))


def opposed(Q, d=1):
    """Directions u of norm 1, half of the clients against the others: (Q, d).

    ValueError for odd Q.
    """
    require(Q >= 2 and Q % 2 == 0, "opposed biases need an even number of clients")
    signs = np.repeat([1.0, -1.0], Q // 2)
    return signs[:, None] * np.full(d, d**-0.5)


def zero_sum(rng, Q, d):
    """Random directions u with sum 0, the longest of norm 1: (Q, d). One client gets u = 0."""
    u = rng.standard_normal((Q, d))
    u -= u.mean(0)
    if Q == 1:
        return np.zeros((1, d))
    return u / np.linalg.norm(u, axis=1).max()


def schedule(order, rounds, N, mean=1.0, first=0.03, rng=None):
    """Sizes B^(t,j): (rounds, N). Every order has the same mean.

    'client' grows from round to round. 'data' grows inside every round, with
    B^(t,J) = B^(t+1,0) as in the paper. 'anti' is 'client' backwards, and 'shuffled' permutes its
    rounds by `rng`. A growing B starts at the fraction `first` of its last value.
    ValueError for another order.
    """
    t = np.arange(rounds)[:, None]
    j = np.arange(N)
    client = t + np.zeros(N)
    paths = {
        "client": client,
        "data": t * (N - 1.0) + j,
        "anti": client[::-1],
        "constant": 0 * client,
    }
    if rng:
        paths["shuffled"] = rng.permutation(client)
    known = f"order {order!r} is one of {list(paths)}; 'shuffled' needs a generator"
    require(order in paths, known)
    path = paths[order]
    if path.max() == 0:  # nothing grows: 'constant', one round, or 'data' with one local step
        return np.full((rounds, N), float(mean))
    B = first + (1 - first) * path / path.max()
    return mean * B / B.mean()


def diminishing_steps(rounds, N, c, offset):
    """alpha = c / (i + offset): (rounds, N). i = t N + j counts the local steps of all rounds."""
    i = np.arange(rounds * N).reshape(rounds, N)
    return c / (i + offset)
