"""A problem of local SGD under Assumption 1: the function, the steps, the biases and the noise.

Client k of Q takes N = J + 1 steps of length alpha along g_k = grad f(theta_k) + b_k + n_k, with

    sum_k b_k = 0,  ||b_k||^2 <= B,  E n_k = 0,
    E||n_k||^2 = M ||grad f(theta_k) + b_k||^2 + sigma^2,

then the server averages. B bounds the *squared* bias; the noise is the largest that Theorem 1
allows. Nothing has a physical unit; all is float64.
"""

from dataclasses import dataclass

import numpy as np

from theory.functions import Function, kinked, require


@dataclass
class Problem:
    """One run of Algorithm 3 with all clients. ValueError where Assumption 1 is contradicted.

    theta0: (d,). steps: alpha^(t,j), (T+1, N), t = 0..T as printed; theta^(T,0) has seen t < T. B:
    a number or up to (T+1, N). directions: u, zero-sum, of norm <= 1, (Q, d) or (T+1, N, Q, d). b_k
    = sqrt(B) u_k does not depend on theta. biases: (T+1, N, Q, d), mean_B = mean_k ||b_k||^2
    and E_0 = ||theta0||^2 follow.
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
        require(theta0.ndim == 1 and np.isfinite(theta0), "theta0 is a finite vector")
        require(
            steps.ndim == 2 and steps.size, "steps are (T+1, N), at least one round of one step"
        )
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
        self.biases = np.sqrt(self.B)[:, :, None, None] * u
        self.mean_B = (self.biases**2).sum(-1).mean(-1)

    def symbols(self, t, j):
        """(mu, L, alpha, B, M, sigma, Q) at local step (t, j)."""
        f = self.f
        return f.mu, f.L, self.steps[t, j], self.B[t, j], self.M, self.sigma, self.Q


def kinked_problem(Q=2, alpha=1 / 12, B=1e-4, N=10, T=10, theta0=0.0):
    """Half the clients pushed up, half down, on the kinked f, L = 1, mu = .1, for T rounds.

    T None: 12 / (alpha mu N) rounds, after which only what the bias leaves is left.
    """
    if T is None:
        T = int(np.ceil(12 / (0.1 * alpha * N)))
    steps = np.full((T + 1, N), alpha)
    return Problem(kinked(mu=0.1, L=1.0), [theta0], steps, B, opposed(Q))


def opposed(Q, d=1):
    """Zero-sum u: (Q, d) of norm 1, half the clients against the others. ValueError for odd Q."""
    require(Q >= 2 and Q % 2 == 0, "opposed biases need an even number of clients")
    signs = np.repeat([1.0, -1.0], Q // 2)
    return signs[:, None] * np.full(d, d**-0.5)


def zero_sum(rng, Q, d):
    """Random zero-sum directions u: (Q, d), the longest of norm 1; all 0 for one client."""
    u = rng.standard_normal((Q, d))
    u -= u.mean(0)
    if Q == 1:
        return np.zeros((1, d))
    return u / np.linalg.norm(u, axis=1).max()


def schedule(order, rounds, N, mean=1.0, first=0.03, rng=None):
    """Sizes B^(t,j): (rounds, N), of one mean; B at the start is `first` of B at the end.

    'client' grows from round to round; 'data' inside every round, with B^(t,J) = B^(t+1,0) as
    printed; 'anti' is 'client' backwards; 'shuffled' permutes its rounds by `rng`. ValueError on
    another order.
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
    require(
        order in paths, f"order {order!r} is one of {list(paths)}; 'shuffled' takes a generator"
    )
    path = paths[order]
    if path.max() == 0:  # nothing grows: 'constant', one round, or 'data' with one local step
        return np.full((rounds, N), float(mean))
    B = first + (1 - first) * path / path.max()
    return mean * B / B.mean()


def diminishing_steps(rounds, N, c, offset):
    """alpha = c / (i + offset) at local step i = t N + j, counted over all rounds: (rounds, N)."""
    i = np.arange(rounds * N).reshape(rounds, N)
    return c / (i + offset)
