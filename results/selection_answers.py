"""The page selection.md and its figure, from the published runs fedcl_fgn/rules-*.

`python -m results.tables` writes the page, and `python -m results.figures` plots selection.png. The
part "What came out" is written by hand.
"""

import math

import pandas as pd
from scipy import stats

from results import evidence
from results.fedcl_fgn import compare

SETTINGS = {
    "cifar10-0.1": "CIFAR-10, alpha 0.1",
    "cifar10-0.5": "CIFAR-10, alpha 0.5",
    "fmnist-0.1": "Fashion-MNIST, alpha 0.1",
}
PLACE = r"^fedcl_fgn/rules-(?P<place>.+)-(?P<number>\d+)(?:-detection)?$"
RULES = {  # a rule's idea, its source, and what is changed or unfair to it here
    "size": (
        "large clients more often",
        "systematic sampling",
        "at equal samples it ends before the learning rate has fallen",
    ),
    "round_robin": (
        "everyone in turn",
        "Yang et al., 2020",
        "all clients always answer, so it has no advantage",
    ),
    "loss": (
        "large losses more often",
        "after Goetz et al., 2019",
        "simpler: without their softmax, their quarter of the clients, their random tenth; "
        "equal weights",
    ),
    "power_of_choice": (
        "the largest losses of 2n candidates",
        "Cho et al., 2022",
        "all samples are scored, where a batch is cheaper; no other number of candidates; "
        "equal weights",
    ),
    "oort": (
        "large losses, fast devices",
        "Lai et al., 2021",
        "large clients count as slow; ten rounds until all were tried; its pacer steps more often "
        "than its code's",
    ),
    "hics": (
        "clients with balanced labels",
        "Chen and Vikalo, 2024",
        "first each client takes a turn (8 of 60 rounds); all have one alpha; constants are not "
        "tuned",
    ),
    "fedcor": (
        "losses that tell most about all",
        "Tang et al., 2022",
        "its warm-up is a quarter of this run; its covariance is fitted once, with other constants",
    ),
    "divfl": (
        "gradients that represent all",
        "Balakrishnan et al., 2022",
        "equal weights, where its code weighs by samples; gradients are means over a turn, and old",
    ),
    "clusters_by_size": (
        "one client of each group, by size",
        "Fraboni et al., 2021",
        "a client is never selected twice in a round; its paper compares with selection by size",
    ),
    "clusters_by_similarity": (
        "one of each group of similar gradients",
        "Fraboni et al., 2021",
        "a client is never selected twice in a round; its paper compares with selection by size",
    ),
    "oracle": (
        "together they have everyone's labels",
        "after Zhang et al., 2023",
        "a control: no server knows the labels; equal weights",
    ),
    "cl": (
        "more clients while gradients grow",
        "FedCL, 2022",
        "60 rounds at decay 0.99; its later code has 200 at 0.9",
    ),
    "criticalfl": (
        "the rule of FedCL's later code",
        "CriticalFL, 2023",
        "it sends all weights, where its code sends a fifth",
    ),
}
PAGE = """# Which clients should take part?

Each rule is compared with uniform selection of the same trial, at equal uploads, samples and
simulated seconds. After Holm's correction, {stars} of {tests} gains at equal uploads differ from 0:
{above} are above, and {below} below. One of those above is a usable rule's,
`clusters_by_similarity` on Fashion-MNIST. The others are controls (`oracle` and `longer`).

![Gain over cost](selection.png)

## What came out

**Which one?** If uploads are the cost: `loss` or `clusters_by_similarity`. Their means differ by at
most 0.3 points, and `loss` is simpler. If samples are the cost, no usable rule is ahead in all
settings. If time is the cost, `oort` has the largest means. All this is early in training: after 60
rounds accuracy still rises.

With six trials the correction is strict. The first star needs a mean of {needed:.1f} standard
deviations of the differences. No star does not mean no gain.

- **Equal uploads.** `size`, `loss`, `hics`, `clusters_by_size` and `clusters_by_similarity` are
  above 0 in all settings, by 0.3 to 5.7 points. Of their 15 intervals, 11 exclude 0, one of them
  only just. They prefer large clients, and train on 1.1 to 2 times as many samples. They weigh the
  clients of a round equally, or nearly so. Uniform selection weighs them by samples.
- **Why?** On Fashion-MNIST, longer training of the same clients gains as much (`longer`: 2.1
  points, decided). On CIFAR-10 it gains nearly nothing (-0.3 and +0.2). So there the cause is
  something else: large clients, or equal weights. We did not separate these two.
- **Equal samples.** The means of these five rules are -0.4 to +2.4 on CIFAR-10 and -2.0 to +0.5 on
  Fashion-MNIST. They are cut before their learning rate has fallen. `power_of_choice` is below 0 in
  all settings (-2.7 to -4.2), and its intervals exclude 0.
- **Equal seconds.** `oort` has the largest means, 3.4 to 9.5, and its intervals exclude 0. Its
  rounds are short: it makes all 60 while uniform selection makes 14 to 32. So it sends 2 to 4 times
  as many models, and its learning rate falls further. It knows how long each client will take. At
  equal uploads its means are 0.0, -0.6 and, on CIFAR-10 at alpha 0.5, -1.7 [-2.5, -0.8].
- **Means below 0** at equal uploads in all settings: `divfl` (-3.9 to -6.7, decided at alpha 0.1 on
  both data sets) and `fedcor` (-1.4 to -1.9, all intervals contain 0). `divfl` prefers small
  clients, with 0.4 to 0.7 times as many samples. At equal samples it is at +2.7 [-0.1, 5.6] on
  Fashion-MNIST.
- **Near 0** are `power_of_choice` (-1.4 to +0.6) and `round_robin` (+0.1 to +0.6).
  `power_of_choice` and `fedcor` also cost more megabytes: more clients receive the model, to score
  it.
- **Known labels.** `oracle` is above 0 at all three costs in all settings, by 1.1 to 6.8. Eight of
  its nine intervals exclude 0, one of them only just. It weighs clients equally, so their labels
  need not be the only cause.
- **Critical periods.** FedCL (`cl`) and its later code (`criticalfl`) change the number of clients.
  Uniform selection with as many uploads, spread evenly, does better than the later code in all
  settings (by 7.2, 1.3 and 3.2 points, decided). FedCL's means are below it, too (-2.5, -2.1,
  -0.7). This is undecided, but on CIFAR-10 the intervals exclude 0. [More](fedcl_fgn/README.md).

## The rules

<!-- rules -->
{rules}
<!-- end -->

Rules select n = 16 clients a round. [rules.py](fedcl_fgn/rules.py) has all that we changed.

{tables}

## How to read the tables

- A gain is a difference in accuracy, in points, with its 95 % interval over n trials. Both runs are
  cut where the cheaper one ends. Their tests are joined by straight lines, and averaged over the
  last sixth of the cost.
- A star marks a gain at equal uploads that differs from 0 after Holm's correction over all {tests}.
  Gains at equal samples and seconds are not tested. They show what else a rule costs.
- Accuracy (in %, over the last sixth of a run's own uploads) and costs are means over trials.
  Megabytes are received and sent. *Scored* samples are those on which a rule computed losses, only
  to choose clients. They cost no simulated seconds, which favours rules that score.
- At equal samples or seconds, the run that costs more in each round is cut before its learning rate
  has fallen. This counts against rules that select large clients, and for `oort`.
- FedCL (`cl`) and its later code (`criticalfl`) spend their own uploads in 60 rounds. They are
  compared with uniform selection of as many uploads in as many rounds (`constant`).
- `longer` is a control: uniform selection that trains as many samples as selection by size, by more
  epochs.

The model is LeNet-5. There are 128 clients and 60 rounds of 16 clients. A client trains for 2
epochs in batches of 16. The learning rate is 0.01, times 0.99 after each round. Devices have the
spread 0.5 ([clock](clock.md)). Models are tested every second round. No rule was tuned
([plan](log/11-28-rules.md), [tests](log/11-28-rules-tests.md)). The commands are in
[reproduce.csv](reproduce.csv), under `fedcl_fgn/rules-`. This prints the same table with a rule of
your own, for six trials with other seeds. There `fedavg` is uniform selection:

```bash
python -m results.fedcl_fgn.selection --preset rules --method base --dataset cifar10 \\
    --eval-every 2 --select mine.py:f uniform size
```
"""


def published() -> pd.DataFrame:
    """Returns the rounds of these runs, with setting and trial from the place of a run."""
    rounds = evidence.rounds()
    whose = rounds.run.str.extract(PLACE)
    rounds = rounds.assign(setting=whose.place.map(SETTINGS), trial=whose.number)
    return rounds.dropna(subset="setting")


def page(rounds: pd.DataFrame) -> str:
    """Returns the text of selection.md from `published`."""
    found = compare.gains(rounds)
    spent = compare.costs(rounds)
    tables = []
    for setting in SETTINGS.values():
        lines = table(found[found.setting == setting], spent)
        tables += [f"## {setting}", "", "<!-- gains -->", *lines, "<!-- end -->", ""]
    rules = [(name, *words) for name, words in RULES.items()]
    head = ("rule", "idea", "source", "what is changed, or unfair to it")
    tests = (found.cost == "uploads").sum()
    decided = found[found.holm < 0.05]
    return PAGE.format(
        stars=len(decided),
        above=(decided["mean"] > 0).sum(),
        below=(decided["mean"] < 0).sum(),
        tests=tests,
        needed=least_mean(found.trials.max(), tests),
        tables="\n".join(tables).strip(),
        rules="\n".join(evidence.markdown(head, rules)),
    )


def least_mean(trials: int, tests: int) -> float:
    """Returns the mean of paired differences, in their deviations, with p = 0.05 / tests."""
    return stats.t(trials - 1).isf(0.025 / tests) / math.sqrt(trials)


def table(found: pd.DataFrame, spent: pd.DataFrame) -> list[str]:
    """Returns the table of one setting's gains: a row for each method."""
    shown = compare.shown(found, spent).droplevel(0)
    columns = [*compare.COSTS.values(), "n", "accuracy"]
    columns += ["uploads", "megabytes", "samples", "scored", "simulated s"]
    names = [name.removeprefix("fedavg").strip(" +") or "uniform" for name in shown.index]
    rows = [
        (name, *map(grouped, row)) for name, row in zip(names, shown[columns].values, strict=True)
    ]
    return evidence.markdown(("rule", *columns), rows)


def grouped(cell) -> str:
    """Returns a whole number as 1,234,567, and any other cell as it is."""
    text = str(cell)
    return f"{int(text):,}" if text.isdecimal() else text


def plot(rounds: pd.DataFrame) -> None:
    """Plots selection.png."""
    path = evidence.FOLDER / "selection.png"
    compare.plot(compare.gains(rounds), compare.costs(rounds), path, "Gain over cost")
