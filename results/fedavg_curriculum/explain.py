"""python -m results.fedavg_curriculum.explain --order curriculum anti vanilla --dataset fmnist

How much do clients disagree, and do they disagree less on their easy samples (Section 3.3 of the
paper)? These are the runs of fedavg_curriculum.py, with columns of the gradient dissimilarity at
the received model,

  Lambda = sum_m q_m ||grad f_m||^2 / ||sum_m q_m grad f_m||^2 >= 1.

Here f_m is client m's mean loss on some of its samples, and q_m is its fraction of all of these.
Three columns give Lambda:

lambda_easy  on the easiest fraction b (--pacing-b) of every client's samples
lambda_all   on all
lambda_hard  on the hardest fraction b
"""

from dataclasses import dataclass

import numpy as np
import torch

import common
import experiment
import fedavg_curriculum as paper
import training
from experiment import flag
from nets import Model


@dataclass
class Config(paper.Config):
    """The options of fedavg_curriculum.py. Every order uses those that say what is easy."""

    unscored = ()

    pacing_b: float = flag(0.2, "fraction of the samples at the first step", low=0, high=1)


def federate(config: Config, fl: common.Federation, run: experiment.Run) -> None:
    """The loop of fedavg_curriculum.py, with the dissimilarity measured before each round."""
    order, own_score = paper.find_functions(config)
    state = fl.start()
    state["own_nets"] = {}
    expert_losses = None
    if paper.asks_expert(config):
        expert_losses = paper.score_by_expert(config, fl, run)
    for t in run.rounds(state):
        clients = fl.select(t, config.clients_per_round)
        difficulties = paper.score_samples(config, fl, state, clients, expert_losses, own_score)
        columns = measure(config, fl, t, state["theta"], clients, difficulties)
        batches = []
        for m, difficulty in zip(clients, difficulties, strict=True):
            if config.order == "random":
                difficulty = np.zeros(len(difficulty))
            drawn = paper.draw_client_batches(config, fl, t, m, difficulty, order)
            batches.append(drawn)
        eta = paper.falling_lr(config, steps=max(map(len, batches)))
        update = fl.train(state, t, clients, batches, lr=eta)
        p = fl.proportions(clients)
        state["theta"] = fl.aggregate(state, update, p)
        if paper.asks_own_net(config):
            paper.keep_own_nets(state, update)
        run.record(t, state, update, **columns)


def measure(config, fl: common.Federation, t: int, theta, clients, difficulties) -> dict:
    """Returns lambda_easy, lambda_all and lambda_hard of these clients at theta (P,)."""
    samples = {"lambda_easy": [], "lambda_all": [], "lambda_hard": []}
    for m, difficulty in zip(clients, difficulties, strict=True):
        easy_first = fl.shards[m][np.argsort(difficulty, kind="stable")]
        count = max(1, int(config.pacing_b * len(easy_first) + 1e-9))
        samples["lambda_easy"].append(easy_first[:count])
        samples["lambda_all"].append(easy_first)
        samples["lambda_hard"].append(easy_first[-count:])
    seeds = [fl.streams.seed("dropout", t, m) for m in clients]
    columns = {}
    for name, samples_of_clients in samples.items():
        columns[name] = dissimilarity(fl, theta, samples_of_clients, seeds)
    return columns


def dissimilarity(fl: common.Federation, theta: torch.Tensor, samples: list, seeds: list) -> float:
    """Returns Lambda over the clients' samples [(n_m,)] at theta (P,); 1: all pull the same way.

    It is in float64, whatever --dtype is: gradients of easy samples vanish as theta learns them.
    """
    model = Model(fl.model.build, fl.model.device, torch.float64)
    model.is_recordable = False  # on a GPU: a single step
    theta = theta.double()
    sizes = np.array([len(samples_m) for samples_m in samples])
    batches = []
    for samples_m in samples:
        batch = np.full((1, sizes.max()), -1)
        batch[0, : len(samples_m)] = samples_m
        batches.append(batch)
    one_step = training.Local(lr=1.0, seeds=seeds)
    clients = np.arange(len(samples))
    chunk = fl.config.chunk
    update = training.train(model, theta, fl.data, clients, batches, one_step, chunk)
    thetas = update.gather_thetas()  # theta_m = theta - grad f_m
    gradients = (theta - thetas)[:, : model.trainable]
    q = torch.as_tensor(sizes / sizes.sum(), device=theta.device)
    mean_of_squares = q @ gradients.square().sum(1)
    square_of_mean = (q @ gradients).square().sum()
    return float(mean_of_squares / square_of_mean)


FMNIST = "--order curriculum anti vanilla --dataset fmnist --clients 100 --epochs 2"
PRESETS = paper.PRESETS | {
    "dissimilarity": f"{FMNIST} --rounds 20 --trials 3  # Section 3.3",
}


def main(argv=None) -> None:
    """Runs the command line. Tests pass its words as `argv`."""
    script = experiment.Script(
        config=Config,
        presets=PRESETS,
        doc=__doc__,
        federate=federate,
        compare=("order",),
        name=paper.name,
        plot=plot,
    )
    experiment.main(script, argv)


def plot(df, folder) -> None:
    """Plots lambda.png: the three over rounds, a row each."""
    from experiment import figures

    figures.curves(df, folder / "lambda.png", "lambda_easy", "lambda_all", "lambda_hard")


if __name__ == "__main__":
    main()
