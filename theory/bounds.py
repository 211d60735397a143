"""Every statement of supplement 2, as printed, as its proof leaves it, and corrected, with its hypotheses.

Symbols: B bounds ||b_k||^2 (already squared), N = J + 1 local steps, Q clients, a = alpha^(t,j), noise
E||n_k||^2 <= M ||grad f + b_k||^2 + s^2; E = E||hat theta - theta*||^2, V = E mean_k ||theta_k - hat theta||^2,
F = E mean_k f(theta_k) - f*. A prime marks the next local step. Each function returns what its right-hand side is worth
(a float, or an array where the docstring gives a shape) and raises ValueError when a hypothesis that it can see fails.
Corrected forms need biases that sum to zero and do not depend on theta, and noise that is independent across clients.
The numbers printed by `python -m theory.check` are these against the measured left sides.
"""

import numpy as np

from theory.model import require


def at_most(value, limit):
    """value <= limit up to rounding, so that a step may sit exactly on its bound."""
    return np.asarray(value) <= limit * (1 + 1e-12)


def require_setting(F, B, L, M, s):
    """What every lemma assumes: F: scalar or (Q,), gaps to the minimum, are >= 0, and so are B, M, s; L > 0."""
    require(np.asarray(F) >= 0, "f* is the minimum of f")
    require((np.asarray(B) >= 0) & (L > 0) & (M >= 0) & (s >= 0), "B >= 0, L > 0, M >= 0 and s >= 0")


# ---- the second moment of a client's gradient ----


def lemma1_printed(F, B, L, M, s):
    """Lemma 1, as printed, for L-smooth f: E||g_k||^2 <= 2(3+2M) L F_k + (3+2M) B + 3 s^2, F_k = f(theta_k) - f*."""
    require_setting(F, B, L, M, s)
    return 2 * (3 + 2 * M) * L * F + (3 + 2 * M) * B + 3 * s**2


def lemma1_derived(F, B, L, M, s):
    """Lemma 1, where its first line leads: 3 E||n_k||^2 is 6M ||grad f||^2 + 6M B + 3 s^2, so 6M stands for 2M."""
    require_setting(F, B, L, M, s)
    return 2 * (3 + 6 * M) * L * F + (3 + 6 * M) * B + 3 * s**2


def lemma1_corrected(F, B, L, M, s):
    """Lemma 1, tight: the noise has mean zero, so E||g_k||^2 = ||grad f + b_k||^2 + E||n_k||^2
    <= (1+M) (2 ||grad f||^2 + 2B) + s^2 <= 4(1+M) L F_k + 2(1+M) B + s^2."""
    require_setting(F, B, L, M, s)
    return 4 * (1 + M) * L * F + 2 * (1 + M) * B + s**2


def lemma2_printed(F, B, L, M, s):
    """Lemma 2, as printed, for F: (Q,): E||g - bar g||^2 <= (3+2M)/Q^2 sum_k [2L F_k + B] + 3 s^2 / Q.

    Holds for biases that do not depend on theta and noise independent across clients; neither is in its hypotheses.
    """
    require_setting(F, B, L, M, s)
    return (3 + 2 * M) / len(F) ** 2 * np.sum(2 * L * F + B) + 3 * s**2 / len(F)


def lemma2_corrected(F, B, L, M, s):
    """Lemma 2, corrected: the biases cancel in the mean, so E||g - bar g||^2 = (1/Q^2) sum_k E||n_k||^2
    <= (4ML F + 2MB + s^2) / Q, F: (Q,). For noise shared by all clients the division by Q goes."""
    require_setting(F, B, L, M, s)
    return (4 * M * L * np.mean(F) + 2 * M * B + s**2) / len(F)


# ---- one local step ----


def lemma3_printed(clients, a):
    """Lemma 3, right as printed, for strongly convex L-smooth f and any a > 0:

    ||hat theta - a bar g - theta*||^2 <= E + 2a mean_k [(aL - 1/2) F_k - mu/2 ||theta_k - theta*||^2] + 2aL V.
    """
    f = clients.f
    require(a > 0 and f.mu > 0, "alpha > 0 and mu > 0")
    inner = (a * f.L - 0.5) * clients.gaps - f.mu / 2 * (clients.theta**2).sum(1)
    return clients.E + 2 * a * inner.mean() + 2 * a * f.L * clients.V


def lemma4_step(L, M, Q):
    """Lemma 4's largest step, 1 / (4 bar L) with bar L = L + 2(3+2M)L/Q."""
    return 1 / (4 * (L + (3 + 2 * M) * 2 * L / Q))


def theorem1_step(L, M):
    """Theorem 1's largest step, 1 / (4(3+2M)L). Exceeds lemma4_step, which its proof uses, exactly for Q = 1 and 2."""
    return 1 / (4 * (3 + 2 * M) * L)


def lemma4_printed(clients, a, B, M, s):
    """Lemma 4, as printed (its left side says theta_k for hat theta): E' <= (1 - a mu) E - a/2 (f(hat theta) - f*)
    + 2aL V + (3+2M) a^2 B / Q + 3 s^2 a^2 / Q for a <= 1/(4 bar L). Holds where Lemma 2 does."""
    f, Q = clients.f, len(clients.theta)
    require(a > 0 and f.mu > 0, "alpha > 0 and mu > 0")
    require(at_most(a, lemma4_step(f.L, M, Q)), "alpha <= 1 / (4 bar L)")
    require_setting(clients.gaps, B, f.L, M, s)
    gap = f.value(clients.average) - f.minimum
    noise = ((3 + 2 * M) * B + 3 * s**2) * a**2 / Q
    return (1 - a * f.mu) * clients.E - a / 2 * gap + 2 * a * f.L * clients.V + noise


def lemma4_corrected(clients, a, B, M, s):
    """Lemma 4, corrected: E' <= (1 - a mu) E + 2aL V + a^2 (2MB + s^2)/Q - a [1 - 2aL(1 + 2M/Q)] F. Any a > 0."""
    f, Q = clients.f, len(clients.theta)
    require(a > 0 and f.mu > 0, "alpha > 0 and mu > 0")
    require_setting(clients.gaps, B, f.L, M, s)
    noise = a**2 * (2 * M * B + s**2) / Q
    descent = a * (1 - 2 * a * f.L * (1 + 2 * M / Q)) * clients.gaps.mean()
    return (1 - a * f.mu) * clients.E + 2 * a * f.L * clients.V + noise - descent


def equation5_printed(clients, B, M, s):
    """Equation 5, right as printed: mean_k E||g_k - g||^2 <= 2(3+2M) L F + (3+2M) B + 3 s^2."""
    return lemma1_printed(clients.gaps.mean(), B, clients.f.L, M, s)


def lemma5_printed(f, V, F, a, B, M, s):
    """Lemma 5, as printed: V' <= (1 - a mu/2) V + 2(3+2M) L a^2 F + a (a(3+2M) + B/mu) B + 3 a^2 s^2.

    Its proof writes Cauchy-Schwarz with B where the norm of the bias, sqrt B, belongs, and loses a factor 2.
    """
    require(a > 0 and f.mu > 0, "alpha > 0 and mu > 0")
    return (1 - a * f.mu / 2) * V + a**2 * lemma1_printed(F, B, f.L, M, s) + a * B**2 / f.mu


def lemma5_proof(f, V, F, a, B, M, s):
    """Lemma 5 by its own proof with sqrt B in Cauchy-Schwarz: the bias term becomes 2 a B / mu."""
    require(a > 0 and f.mu > 0, "alpha > 0 and mu > 0")
    return (1 - a * f.mu / 2) * V + a**2 * lemma1_printed(F, B, f.L, M, s) + 2 * a * B / f.mu


FORMS = ("contraction", "growth")


def drift(f, a, j, form):
    """(c, e) in mean_k ||T theta_k - a b_k - average||^2 <= c V + e B, with T = 1 - a grad f, a (1 - a mu)-contraction.

    form 'contraction': c = 1 - a mu, e = a/mu.  form 'growth': c = (1 + 1/j)(1 - a mu)^2, e = (1+j) a^2, local step j.
    Both: c = 0, e = a^2 at j = 0, where V = 0. Both are Young's inequality. ValueError when T need not contract.
    """
    require(a > 0 and f.mu > 0, "alpha > 0 and mu > 0")
    require(at_most(a, 2 / (f.mu + f.L)), "alpha <= 2 / (mu + L)")
    if form not in FORMS:
        raise ValueError(f"unknown form {form!r}; one of {', '.join(FORMS)}")
    if j == 0:
        return 0.0, a**2
    if form == "contraction":
        return 1 - a * f.mu, a / f.mu
    return (1 + 1 / j) * (1 - a * f.mu) ** 2, (1 + j) * a**2


def lemma5_corrected(f, V, F, a, B, M, s, Q, j, form="contraction"):
    """Lemma 5, corrected: V' <= c V + e B + a^2 (1 - 1/Q)(4ML F + 2MB + s^2), (c, e) from `drift` at local step j.

    A round starts from V = 0: ValueError on another V at j = 0.
    """
    require_setting(F, B, f.L, M, s)
    require(V == 0 if j == 0 else V >= 0, "V >= 0, and V = 0 at j = 0")
    c, e = drift(f, a, j, form)
    return c * V + e * B + a**2 * (1 - 1 / Q) * (4 * M * f.L * F + 2 * M * B + s**2)


def equation6_printed(problem, F, t):
    """Equation 6, as printed: sum_j V^(t,j) <= sum_j (2aL/Q) prod_{l>=j} (1 - a_l mu/2) [2a(3+2M) L sum_k F_k
    + (a(3+2M) + B/mu) B + 3a s^2]. F: (N,), the mean gaps of round t. The 2aL belongs to Lemma 4's V, not to V itself,
    and Lemma 5 does not divide its B and s^2 by Q."""
    f, M, a, B = problem.f, problem.M, problem.steps[t], problem.B[t]
    require(f.mu > 0, "mu > 0")
    contraction = np.cumprod((1 - a * f.mu / 2)[::-1])[::-1]
    bracket = 2 * a * (3 + 2 * M) * f.L * problem.Q * F + (a * (3 + 2 * M) + B / f.mu) * B + 3 * a * problem.s**2
    return float((2 * a * f.L / problem.Q * contraction * bracket).sum())


def equation6_corrected(problem, F, t):
    """Equation 6, corrected: sum_j V^(t,j) by Lemma 5 run from V = 0, at every step in its smaller form."""
    V, total = 0.0, 0.0
    for j in range(problem.N):
        total += V
        arguments = (problem.f, V, F[j], problem.steps[t, j], problem.B[t, j], problem.M, problem.s, problem.Q, j)
        V = min(lemma5_corrected(*arguments, form) for form in FORMS)
    return total


# ---- Theorem 1: strongly convex f ----


def require_theorem1(problem):
    """The hypotheses printed with Theorem 1."""
    require(problem.f.mu > 0, "f is strongly convex, mu > 0")
    require(at_most(problem.steps, theorem1_step(problem.f.L, problem.M)), "alpha <= 1 / (4(3+2M)L)")


def theorem1_printed(problem, power=2):
    """Theorem 1, as printed, at theta^(T,0) for every T: (T+1,).

    E_T <= prod_{t=1}^T prod_j (1 - a mu/2) E_0 + (1/Q) sum_{t=1}^T sum_j {2a^2 L [(3+2M)B + 3 s^3] + 2aL B^2 / mu}.
    power: of B in the last term; 1 mends only that. The indices 1..T skip the first round and read one never run.
    """
    require_theorem1(problem)
    f, a, B = problem.f, problem.steps[1:], problem.B[1:]
    noise = 2 * a**2 * f.L * ((3 + 2 * problem.M) * B + 3 * problem.s**3)
    bias = 2 * a * f.L * B**power / f.mu
    contraction = np.cumprod((1 - a * f.mu / 2).prod(1)) * (problem.theta0**2).sum()
    return np.append((problem.theta0**2).sum(), contraction + np.cumsum((noise + bias).sum(1)) / problem.Q)


def theorem1_proof(problem):
    """Theorem 1 as the last display of its proof has it, round by round from t = 0, at every T: (T+1,).

    E_{t+1} <= prod_j (1 - a mu/2) E_t + (2L/Q) sum_j a prod_{l>=j} (1 - a_l mu/2) [(2a(3+2M) + B/mu) B + 6a s^2].
    """
    require_theorem1(problem)
    f, E = problem.f, [(problem.theta0**2).sum()]
    for a, B in zip(problem.steps[:-1], problem.B[:-1], strict=True):
        contraction = np.cumprod((1 - a * f.mu / 2)[::-1])[::-1]
        bracket = (2 * a * (3 + 2 * problem.M) + B / f.mu) * B + 6 * a * problem.s**2
        E.append(contraction[0] * E[-1] + 2 * f.L / problem.Q * (a * contraction * bracket).sum())
    return np.array(E)


def certificate(problem, t, form):
    """Corrected Theorem 1 over round t: (contraction, floor) with E_{t+1} <= contraction E_t + floor.

    Weights p on E and w on V run backward from p_N = 1, w_N = 0, each step spending Lemma 4 and Lemma 5 (corrected):
        w_j = 2 p_{j+1} a L + w_{j+1} c_V,     p_j = p_{j+1} (1 - a mu),
    and what multiplies F must not be positive: 2 p_{j+1} a (aL(1+2M/Q) - 1/2) + 4 w_{j+1} a^2 (1-1/Q) ML <= 0.
    ValueError when it is, or when `drift` raises.
    """
    f, M, Q, s = problem.f, problem.M, problem.Q, problem.s
    p, w, floor = 1.0, 0.0, 0.0
    for j in reversed(range(problem.N)):
        a, B = problem.steps[t, j], problem.B[t, j]
        c, e = drift(f, a, j, form)
        excess = 2 * p * a * (a * f.L * (1 + 2 * M / Q) - 0.5) + 4 * w * a**2 * (1 - 1 / Q) * M * f.L
        require(excess <= 0, "the weight of f(theta_k) - f* is not positive: smaller steps or fewer of them")
        noise = a**2 * (2 * M * B + s**2)
        floor += p * noise / Q + w * (e * B + (1 - 1 / Q) * noise)
        p, w = p * (1 - a * f.mu), 2 * p * a * f.L + w * c
    return p, floor


def theorem1_corrected(problem):
    """Theorem 1, corrected, at theta^(T,0) for every T: (T+1,): per round the smaller of the two certificates.

    The step condition is `certificate`'s, round by round.
    """
    require(not callable(problem.biases), "the biases do not depend on theta")
    E = [(problem.theta0**2).sum()]
    for t in range(problem.T):
        E.append(min(p * E[-1] + floor for p, floor in (certificate(problem, t, form) for form in FORMS)))
    return np.array(E)


def theorem1_closed(problem):
    """Theorem 1, corrected, closed form for M = 0 and one constant a <= 1/(2L), at every T: (T+1,):

    E_T <= (1 - a mu)^(NT) E_0 + a s^2 / (mu Q) + (4L/mu) [min(aN, 1/mu)^2 B + N a^2 s^2],
    since sqrt V_j <= min(aj, 1/mu) sqrt B + sqrt j a s by Minkowski: the floor is O(a^2 N^2) and no Q divides it.
    """
    f, a, B, N, s = problem.f, problem.steps[0, 0], problem.B.max(), problem.N, problem.s
    require(not callable(problem.biases), "the biases do not depend on theta")
    require(problem.M == 0 and f.mu > 0, "M = 0 and mu > 0")
    require(problem.steps == a, "one constant step")
    require(at_most(a, 1 / (2 * f.L)), "alpha <= 1 / (2L)")
    transient = (1 - a * f.mu) ** (N * np.arange(problem.T + 1)) * (problem.theta0**2).sum()
    return transient + a * s**2 / (f.mu * problem.Q) + 4 * f.L / f.mu * (min(a * N, 1 / f.mu) ** 2 * B + N * a**2 * s**2)


def bias_sum_printed(problem):
    """The bias part of printed Theorem 1, (1/Q) sum_{t=1}^T sum_j 2aL B^2 / mu, at every T: (T+1,)."""
    require_theorem1(problem)
    a, B = problem.steps[1:], problem.B[1:]
    return np.append(0.0, np.cumsum((2 * a * problem.f.L * B**2 / problem.f.mu).sum(1))) / problem.Q


# ---- Theorem 2: nonconvex f with bounded gradient ----


def require_theorem2(problem):
    """The hypotheses printed with Theorem 2: ||grad f|| <= G, and noise that does not grow with it (M = 0)."""
    require(np.isfinite(problem.f.G), "||grad f|| is bounded by a finite G")
    require(problem.M == 0, "E||n_k||^2 <= sigma^2, M = 0")


def ergodic_sum(problem, gradient, weighted):
    """Theorem 2's left side: sum_{t=0}^T sum_j w E||grad f(theta^(t,0))||^2, w = 1 as printed or w = a when weighted.

    gradient: (T+1,), E||grad f(theta^(t,0))||^2.
    """
    require(np.shape(gradient) == (problem.T + 1,), "one squared gradient per round, 0..T")
    return float(gradient @ (problem.steps.sum(1) if weighted else np.full(len(gradient), float(problem.N))))


def earlier(steps):
    """sum_{l<j} of a per-step array: (T+1, N) -> (T+1, N)."""
    return np.cumsum(steps, 1) - steps


def initial_gap(problem):
    """f(theta^0) - f*."""
    return float(problem.f.value(problem.theta0) - problem.f.minimum)


def theorem2_printed(problem):
    """Theorem 2, as printed (left side unweighted): <= Q (f0 - f*) + 2 sum_t sum_j a_j (a_j + sum_{l>=j} a_l) L G^2.

    Neither B nor sigma is in it: it says nothing about curricula.
    """
    require_theorem2(problem)
    a, f = problem.steps, problem.f
    later = a.sum(1, keepdims=True) - earlier(a)
    return problem.Q * initial_gap(problem) + 2 * float((a * (a + later)).sum()) * f.L * f.G**2


def theorem2_proof(problem):
    """Theorem 2 as its proof ends (left side weighted by a_j):

    <= Q (f0 - f*) + L G^2 sum_t sum_j [a_j sum_{l>=j} a_l + a_j^2 / 2]. Still no sigma and no B.
    """
    require_theorem2(problem)
    a, f = problem.steps, problem.f
    later = a.sum(1, keepdims=True) - earlier(a)
    return problem.Q * initial_gap(problem) + float((a * later + a**2 / 2).sum()) * f.L * f.G**2


def theorem2_uncorrelated(problem):
    """Theorem 2, corrected (left side weighted), if later gradients were uncorrelated with earlier noise:

    <= f0 - f* + sum_t {L G sum_j a_j sum_{l<j} a_l sqrt((G + sqrt B_l)^2 + s^2)
                        + (L/2) [(sum_j a_j)^2 G^2 + sum_j a_j^2 s^2 / Q]}.
    The square E||sum_j a_j g_j||^2 also holds E<bar g_j, n_l> for l < j, which is not zero; see theorem2_corrected.
    """
    require_theorem2(problem)
    require(not callable(problem.biases), "the biases do not depend on theta")
    a, f, s = problem.steps, problem.f, problem.s
    client = np.sqrt((f.G + np.sqrt(problem.B)) ** 2 + s**2)  # E||g_k|| at most
    square = a.sum(1) ** 2 * f.G**2 + (a**2).sum(1) * s**2 / problem.Q
    return initial_gap(problem) + f.L * f.G * float((a * earlier(a * client)).sum()) + f.L / 2 * float(square.sum())


def theorem2_corrected(problem):
    """Theorem 2, corrected (left side weighted by a_j), by descent along hat theta^(t,j), step by step:

    <= f0 - f* + sum_t {L G sum_j a_j sum_{l<j} a_l [sqrt((G + sqrt B_l)^2 + s^2) + sqrt(G^2 + s^2/Q)]
                        + (L/2) sum_j a_j^2 (G^2 + s^2/Q)}.
    The roots bound what one step adds to E||theta_k - theta^(t,0)|| and E||hat theta - theta^(t,0)||; with them
    <grad f(hat theta), bar g> becomes ||grad f(theta^(t,0))||^2 one factor at a time. No noise meets a later gradient.
    """
    require_theorem2(problem)
    require(not callable(problem.biases), "the biases do not depend on theta")
    a, f, s = problem.steps, problem.f, problem.s
    client = np.sqrt((f.G + np.sqrt(problem.B)) ** 2 + s**2)
    average = np.sqrt(f.G**2 + s**2 / problem.Q)
    cross = f.L * f.G * float((a * earlier(a * (client + average))).sum())
    return initial_gap(problem) + cross + f.L / 2 * float((a**2).sum()) * average**2


# ---- the remark on noise that grows ----


def sigma_printed(distance, gamma, sigma):
    """The bound of [39] with sigma_t, as printed, C_1 = ||theta_0||^2, C_2 = 1, C_3 = 0 (one client and step):

    f - f* <= distance / (gamma T) + gamma sum_{t=0}^T sigma_t^2. Vacuous: the sum grows with T. sigma: (T+1,), T >= 1.
    """
    require(gamma > 0 and len(sigma) > 1, "gamma > 0 and T >= 1")
    return distance / (gamma * (len(sigma) - 1)) + gamma * (sigma**2).sum()


def sigma_corrected(distance, gamma, sigma, L):
    """The same, corrected: (1/T) sum_{t<T} f(theta_t) - f* <= distance / (gamma T) + gamma (1/T) sum_{t<T} sigma_t^2.

    Convex L-smooth f, gamma <= 1/(2L): SGD gives E_{t+1} <= E_t - 2 gamma (1 - gamma L) (f - f*) + gamma^2 sigma_t^2.
    """
    require(gamma > 0 and len(sigma) > 1, "gamma > 0 and T >= 1")
    require(at_most(gamma, 1 / (2 * L)), "gamma <= 1 / (2L)")
    return distance / (gamma * (len(sigma) - 1)) + gamma * (sigma[:-1] ** 2).mean()
