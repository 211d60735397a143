"""python -m results.fedcl_fgn.criticalfl --lr-decay 0.9 --rounds 200 --batch-size 16

Does detection gain, or do more clients in the first rounds? FedCL's paper was published later as
CriticalFL (KDD 2023), with code that has another rule and another FGN. This study compares four
methods on the same selections of clients:

base        FedAvg, or another --base
cl          FedCL, Algorithm 2 of the paper: fedcl_fgn.py itself
criticalfl  the rule and the FGN of the later code. --rule paper and --signal paper switch each to
            the paper's form. Both together are `cl`
early       the control: the base with more clients in its first rounds, without detection. It
            spends the uploads of `cl` in the same trial (`early_sizes`)

What the later code does that this study does not:
- It clips every gradient at a norm of 10 before the step. Here no step is clipped. In FGN a
  client's mean of ||gradient||^2 over its batches is clipped at 10^2, not each batch.
- In critical rounds its clients send only the fifth of their weights that changed most.
"""

import math
from dataclasses import dataclass

import numpy as np

import common
import experiment
import fedcl_fgn as paper
from experiment import flag

WINDOW = 10  # FGNs in a mean
SURELY = 5  # the first judgements, which are critical
MAX_NORM = 10


def is_criticalfl(config) -> bool:
    """Whether this method comes from the later code."""
    return config.method == "criticalfl"


def uses_delta(config) -> bool:
    """Whether FGN sets the number of clients, in this run or in the run that it follows."""
    return config.method != "base"


def followed(config) -> dict:
    """Returns the option that names the method that `early` follows: it spends its uploads."""
    if config.method == "early":
        return {"method": "cl"}
    return {}


@dataclass
class Config(paper.Config):
    """The options of fedcl_fgn.py, and the options of the later code."""

    method: str = flag(
        "criticalfl",
        "the base; FedCL; the later code's rule; the base with FedCL's uploads, more of them early",
        sweep=("base", "cl", "criticalfl", "early"),
        choices=("base", "cl", "criticalfl", "early"),
    )
    detector: str = flag("fgn", "what is judged", choices=("fgn",), when=paper.is_cl)
    delta: float = flag(
        0.01, "growth of FGN that makes a round critical", low=0, high=math.inf, when=uses_delta
    )
    rule: str = flag(
        "code", "how criticalfl judges a round", choices=("code", "paper"), when=is_criticalfl
    )
    signal: str = flag(
        "code", "which FGN criticalfl judges", choices=("code", "paper"), when=is_criticalfl
    )

    def reads_rounds(self) -> bool:
        """Whether a round depends on --rounds: `early` follows a whole run of FedCL."""
        return self.method == "early"


def name(config: Config) -> str:
    """fedavg, fedavg+cl, fedavg+early, fedavg+criticalfl, fedavg+criticalfl paper-rule, .."""
    words = [paper.name(config)]
    if is_criticalfl(config) and config.rule == "paper":
        words.append("paper-rule")
    if is_criticalfl(config) and config.signal == "paper":
        words.append("paper-fgn")
    return " ".join(words)


def federate(config: Config, fl: common.Federation, run: experiment.Run) -> None:
    """Trains one of the four methods. The first two come from fedcl_fgn.py."""
    if config.method in ("base", "cl"):
        paper.federate(config, fl, run)
        return
    sizes = None
    if config.method == "early":
        rows = run.other(**followed(config)).load()["rows"]
        clients = np.array([row["clients"] for row in rows])
        sizes = early_sizes(clients, config.clients)

    state = fl.start()
    state |= {"n": config.clients_per_round, "fgns": [], "is_full": False}
    for t in run.rounds(state):
        n = state["n"] if sizes is None else int(sizes[t])
        clients = fl.select(t, n)
        theta = state["theta"]
        eta = config.lr * config.lr_decay**t
        batches = fl.batches(t, clients, config.epochs, config.drop_last)
        update = fl.train(state, t, clients, batches, lr=eta, grad_norms=True)
        p = fl.proportions(clients)
        state["theta"] = fl.aggregate(state, update, p)

        if is_criticalfl(config) and config.signal == "code":
            columns = {"fgn": summed_fgn(update, eta, config.epochs)}
        else:
            g_sq = paper.squared_norms(config, fl, t, theta, update)
            columns = {"fgn": float(p @ (eta * g_sq))}
        if is_criticalfl(config):
            columns |= judge(config, state, t, columns["fgn"])
        run.record(t, state, update, **columns)


def early_sizes(clients: np.ndarray, M: int) -> np.ndarray:
    """Returns the number of clients in each round of `early` (R,), from FedCL's numbers (R,).

    The first rounds select all M clients. The others select FedCL's mean of its last third, or its
    mean of all rounds if this is smaller, rounded down. The sum equals FedCL's sum. So it decides
    the number of first rounds, and the round after them selects what is left.
    """
    R = len(clients)
    last_third = clients[-max(1, R // 3) :]
    late = int(min(last_third.mean(), clients.mean()))
    sizes = np.full(R, late)
    extra = clients.sum() - sizes.sum()
    whole, left = divmod(extra, max(1, M - late))
    sizes[:whole] = M
    sizes[whole : whole + 1] += left
    return sizes


def summed_fgn(update: common.Update, eta: float, epochs: int) -> float:
    """Returns the later code's FGN: eta times the sum of ||g||^2 over an epoch's batches.

    It is the mean over epochs and clients, all with the same weight. So large clients count more.
    """
    g_sq = np.minimum(update.grad_sq, MAX_NORM**2)
    sums = g_sq * update.steps / epochs
    return float(eta * sums.mean())


def judge(config: Config, state: dict, t: int, fgn: float) -> dict:
    """Sets state["n"], the next round's clients. Returns the column `critical`, if judged."""
    paper.check_signal(t, fgn)
    n = state["n"]
    if config.rule == "paper":
        previous = state["fgns"][-1] if state["fgns"] else None
        critical = paper.is_critical(previous, fgn, config.delta)
        state["fgns"] = [fgn]
        if critical:
            state["n"] = paper.double(n, config.clients)
        else:
            state["n"] = paper.halve(n, config.clients_per_round)
        return {"critical": int(critical)}

    state["n"], columns = next_size(config, state, t, n, fgn)
    return columns


def next_size(config, state: dict, t: int, n: int, fgn: float) -> tuple[int, dict]:
    """The later code's rule: returns the next round's clients, and `critical`, if judged.

    It keeps the FGNs in state["fgns"], and in state["is_full"] whether n was ever at its most.
    """
    if t % 2 == 1:  # every second round is judged
        return n, {}
    n_0 = config.clients_per_round
    state["fgns"].append(fgn)
    critical = window_grew(state["fgns"], config.delta)
    most = max(int(0.75 * config.clients), n_0)
    state["is_full"] = state["is_full"] or n == most
    if critical and not state["is_full"]:  # after `most` it never doubles again
        n = min(2 * n, most)
    elif not critical:
        n = max(n - n // 2, n_0)
    return n, {"critical": int(critical)}


def window_grew(fgns: list[float], delta: float) -> bool:
    """Whether the mean of the last ten FGNs is more than 1 + delta times the mean before the last.

    The list begins with zeros, so the mean grows until ten FGNs are there.
    """
    if len(fgns) <= SURELY:
        return True
    padded = [0.0] * (WINDOW + 1) + fgns
    new = np.mean(padded[-WINDOW:])
    old = np.mean(padded[-WINDOW - 1 : -1])
    return bool(new - old > delta * max(old, 1e-7))


PRESETS = {
    "alexnet": f"{paper.ALEXNET} --alpha 0.1 --lr-decay 0.9  # the later code's model and decay",
    "switches": "--batch-size 16 --method criticalfl --rule code paper --signal code paper",
}


def main(argv=None) -> None:
    """The command line; `argv` replaces it in tests."""
    script = experiment.Script(
        config=Config,
        presets=PRESETS,
        doc=__doc__,
        federate=federate,
        compare=("method", "detector", "rule", "signal"),
        name=name,
        plot=paper.plot,
        after=followed,
    )
    experiment.main(script, argv)


if __name__ == "__main__":
    main()
