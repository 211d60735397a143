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
CAVEATS = {  # a rule's source, and what its authors could call unfair here
    "size": ("systematic sampling", "at equal samples it ends before the learning rate has fallen"),
    "round_robin": ("Yang et al., 2020", "all clients always answer, so it has no advantage"),
    "loss": ("after Goetz et al., 2019", "losses are as old as a client's last turn"),
    "power_of_choice": (
        "Cho et al., 2022",
        "all samples are scored; its variant with old losses was not run",
    ),
    "oort": (
        "Lai et al., 2021",
        "all are tried by round 10; its pacer moves from round 40; large clients count as slow",
    ),
    "hics": (
        "Chen and Vikalo, 2024",
        "first each client takes a turn (8 rounds); all have one alpha; constants are not tuned",
    ),
    "fedcor": (
        "Tang et al., 2022",
        "its covariance comes from 15 rounds of warm-up, and is fitted once",
    ),
    "divfl": (
        "Balakrishnan et al., 2022",
        "first each client takes a turn (8 rounds); gradients are as old as a client's last turn",
    ),
    "clusters_by_size": (
        "Fraboni et al., 2021",
        "a client is never selected twice in a round; its paper compares with selection by size",
    ),
    "clusters_by_similarity": (
        "Fraboni et al., 2021",
        "gradients are old; small clients may have none; its paper compares with selection by size",
    ),
    "oracle": ("after Zhang et al., 2023", "no server knows the labels; it is not a competitor"),
    "cl": ("FedCL, 2022", "60 rounds at decay 0.99; its later code has 200 at 0.9"),
    "criticalfl": ("CriticalFL, 2023", "it sends all weights, where its code sends a fifth"),
}
PAGE = """# Which clients should take part?

Each rule is compared with uniform selection of the same trial, at equal uploads, samples and
simulated seconds. After Holm's correction, {stars} of {gains} gains at equal uploads differ from 0.

![Gain over cost](selection.png)

## What came out

All six planned trials of each setting are made. Still, the first star needs a mean of {needed:.1f}
standard deviations of the differences, so a missing star says little. Look at the intervals, too:

- **Equal uploads.** `size`, `loss`, `hics` and both kinds of clusters are above 0 in all settings,
  by 0.3 to 5.7 points. Of their 15 intervals, 11 exclude 0. One gain is decided:
  `clusters_by_similarity` on Fashion-MNIST. These rules prefer large clients, and train on 1.1 to 2
  times as many samples. At equal samples their means scatter around 0 (-2.0 to +2.4). They weigh
  the clients of a round equally, or nearly so. Uniform selection weighs them by samples; with equal
  weights it was not run.
- **More samples alone** (`longer`) gain 2.1 points on Fashion-MNIST, about as much as these rules,
  and this is decided. On CIFAR-10 they gain nearly nothing (-0.3 and +0.2).
- **Equal seconds.** `oort` has the largest means, 3.4 to 9.5, and its intervals exclude 0. It reads
  the clock's exact durations. Uniform selection is cut after 14 to 32 of its rounds then, before
  its learning rate has fallen. At equal uploads `oort` gains nothing (-1.7 to 0.0).
- **Below 0 at equal uploads** in all settings are `divfl` (-3.9 to -6.7, decided at alpha 0.1 on
  both data sets) and `fedcor` (-1.4 to -1.9). `power_of_choice` is near 0 (-1.4 to +0.6), and so is
  `round_robin` (+0.1 to +0.6). `fedcor` and `power_of_choice` also cost more megabytes: more
  clients receive the model, to score it.
- **Known labels.** `oracle` is above 0 at all three costs in all settings, by 1.1 to 6.8. Eight of
  its nine intervals exclude 0, and at alpha 0.1 on CIFAR-10 the gain is decided.
- **Critical periods.** The same uploads spread evenly do better than the later code's rule in all
  settings (by 7.2, 1.3 and 3.2 points), and this is decided. FedCL's means are below 0, too (-2.5,
  -2.1, -0.7), which is undecided. [More](fedcl_fgn/README.md).

{tables}

## How to read the tables

- A gain is a difference in accuracy, in points, with its 95 % interval over n trials. Of both runs,
  only what they did until the cheaper run's end counts. The accuracy is the mean over the last
  sixth of this cost, of a curve that is straight between tests.
- A star marks a gain at equal uploads that differs from 0 after Holm's correction over these of all
  settings. Gains at equal samples and seconds are not tested. They show what else a rule costs.
- Accuracy (in %, over the last sixth of a run's own uploads) and costs are means over trials.
  Megabytes are received and sent. Scored samples are those on which a rule computed losses. They
  cost no simulated seconds, which favours rules that score.
- At equal samples or seconds, the run that is dearer in a round is cut before its learning rate has
  fallen. This counts against rules that select large clients, and for `oort`.
- FedCL (`cl`) and the later code's rule (`criticalfl`) spend their own uploads in 60 rounds. They
  are compared with uniform selection of as many uploads in as many rounds (`constant`).
- `longer` is a control: uniform selection with about as many samples as selection by size.

The model is LeNet-5. There are 128 clients and 60 rounds of 16 clients. A client trains for 2
epochs in batches of 16. The learning rate is 0.01, times 0.99 after each round. Devices have the
spread 0.5 ([clock](clock.md)). Models are tested every second round. No rule was tuned
([plan](log/11-28-rules.md), [tests](log/11-28-rules-tests.md)). The commands are in
[reproduce.csv](reproduce.csv), under `fedcl_fgn/rules-`.

## What is unfair to which rule

<!-- caveats -->
{caveats}
<!-- end -->

[rules.py](fedcl_fgn/rules.py) says what else we changed. This prints the same table with a rule of
your own, for six trials of other clients. There `fedavg` is uniform selection:

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
    caveats = [(name, *words) for name, words in CAVEATS.items()]
    head = ("rule", "source", "what is missing, or unfair to it")
    tests = (found.cost == "uploads").sum()
    return PAGE.format(
        stars=(found.holm < 0.05).sum(),
        gains=tests,
        needed=least_mean(found.trials.max(), tests),
        tables="\n".join(tables).strip(),
        caveats="\n".join(evidence.markdown(head, caveats)),
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
