"""python results/reproduce.py [--list] [--scale small|reduced|paper] [--only A6 C2 ...] [--jobs 2]

The runs behind the pages under results/, as data: the claims that each decides, its command line, its scale and the hours it is
estimated to take on two cores. What is complete is skipped, what was stopped is resumed; what a page reads is then
copied beside it, and pages.py writes the pages. `small` shows in minutes that everything runs, `reduced` is for two cores,
`paper` is the papers' own setting.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
CIFAR = "--dataset data/cifar10.npz"
DIGITS = "--dataset digits --data-dir data"


@dataclass
class Work:
    """One run: its place under results/ and runs/, the claims it decides, its command line and estimated hours on two cores."""

    place: str
    claims: str
    flags: str
    hours: float
    scale: str = "reduced"
    program: str = ""  # nothing: the script of its place

    def command(self, jobs: int) -> list[str]:
        script = self.program or self.place.split("/")[0] + ".py"
        return [script, *shlex.split(f"{self.flags} --threads 1 --jobs {jobs} --out runs/{self.place}")]

    def complete(self) -> bool:
        return (ROOT.parent / "runs" / self.place / "summary.json").exists()


CURRICULA, CLIENTS, FGN, PHASES, ART = (
    f"{name}/" for name in ("fedavg_curriculum", "client_curriculum", "fedcl_fgn", "fedcl_gmm_sync", "fedac_art")
)
ORDERS = "--order curriculum anti random vanilla shuffled"
PHASE_ARMS = "--method fedcl fedcl-fresh fedgen fedgen-e fedavg fedensemble"
MNIST_200 = f"--preset table2-mnist --data-dir data --eval-every 5 {PHASE_ARMS} --trials 10"
FRESH = "--method fedcl fedcl-fresh fedcl-nofreeze fedgen-e fedavg"
IMAGES = "--dataset fmnist --data-dir data"
NO_DECAY = "--lr 0.01 --lr-power 0"
EXPERT = f"{IMAGES} --expert-epochs 5 --rounds 40 --epochs 2 {NO_DECAY}"
TEN_CLIENTS = f"{IMAGES} --parts 100 --clients 10 --alpha 0.5 --rounds 20 --epochs 5 --trials 6"
SWEEPS = {"C6": "fig10", "C7": "fig12 fig13 fig14 fig15", "C8 C10": "fig18", "C9": "fig47 fig48"}
EXPOSED = "--order curriculum shuffled weighted fixed random vanilla threshold balanced --trials 5"
SMALLER_STEP = "--order shuffled vanilla --alpha 0.9 --lr 0.005 --trials 5"
RIVALS = "--alpha 0.2 --rounds 40 --epochs 5 --lr 0.01 --lr-power 0 --trials 5"
SELECT = "--arm base cl longer constant --budget 960 --rounds 120 --seed 20260"
SIZE = "--arm base --select size --budget 960 --rounds 120 --seed 20260"
LARGE = "--batch-size 16 --alpha 0.1 --trials 6 --eval-every 2"
RUNS = [
    Work(CURRICULA + "small", "A6", f"{DIGITS} {ORDERS} --rounds 3 --trials 2", 0.02, "small"),
    Work(CLIENTS + "small", "A10", f"{DIGITS} --rounds 3 --trials 2", 0.02, "small"),
    Work(FGN + "small", "C1 C11", f"{DIGITS} --arm cl base constant --rounds 4 --trials 2", 0.02, "small"),
    Work(PHASES + "small", "B1 B5", f"{DIGITS} --rounds 2 --trials 2", 0.02, "small"),
    Work(ART + "small", "D1 D5", f"{DIGITS} --rounds 2 --trials 2", 0.02, "small"),
    Work(CURRICULA + "cifar10-table1", "A6 A7", f"--preset table1 {CIFAR} {ORDERS} --trials 3 --stack-trials", 3, "paper"),
    Work(CURRICULA + "cifar10-table2", "A6 A7", f"--preset table2 {CIFAR} {ORDERS} --alpha 0.05 0.9 --trials 2", 1, "paper"),
    Work(CURRICULA + "cifar10-table3", "A6 A7", f"--preset table3 {CIFAR} {ORDERS} --alpha 0.05 0.9 --trials 2", 1, "paper"),
    Work(CURRICULA + "cifar10-table4", "A6 A7", f"--preset table4 {CIFAR} {ORDERS} --alpha 0.05 0.9 --trials 2", 1, "paper"),
    Work(CURRICULA + "cifar10-fig1", "A1 A2 A3", f"--preset fig1 {CIFAR} --trials 2", 8, "paper"),
    *(
        Work(f"{CURRICULA}cifar10-exposure-alpha{alpha}", "A6 A7", f"--preset exposure {CIFAR} {EXPOSED} --alpha {alpha}", 0.8)
        for alpha in (0.05, 0.9)
    ),
    Work(CURRICULA + "cifar10-exposure-eta", "A6", f"--preset exposure {CIFAR} {SMALLER_STEP}", 0.3),
    *(
        Work(f"{CLIENTS}cifar10-{figure}", claim, f"--preset {figure} {CIFAR} --trials 3", hours, "paper")
        for figure, claim, hours in (("fig4", "A9", 4), ("fig5", "A10", 2), ("fig6-data", "A11", 2), ("fig7", "A12", 1))
    ),
    Work(CLIENTS + "cifar10-rivals", "A10", f"--preset rivals {CIFAR} {RIVALS}", 0.8),
    Work(PHASES + "mnist-60", "B5", f"--dataset mnist --data-dir data --rounds 60 --trials 5 --eval-every 2 {FRESH}", 0.3),
    *(
        Work(f"{PHASES}mnist-200-alpha{alpha}", "B1 B2 B3 B5 B6", f"{MNIST_200} --alpha {alpha}", 0.8, "paper")
        for alpha in (0.05, 0.1, 1)
    ),
    Work(FGN + "select-digits", "C11", f"{SELECT} --select uniform size --each 0 8 --trials 10 --alpha 0.1", 0.2),
    Work(FGN + "select-digits-alpha1", "C11", f"{SELECT} --select uniform size --each 0 8 --trials 10 --alpha 1", 0.2),
    Work(CURRICULA + "digits", "", "", 0.02),  # the defaults of the five scripts, in the first table of each page
    Work(CLIENTS + "digits", "", "", 0.02),
    Work(FGN + "default", "", "--alpha 0.1", 0.02),
    Work(PHASES + "digits", "", "", 0.02),
    Work(ART + "digits", "D5", "", 0.02),
    Work(CURRICULA + "digits-fig12", "A4", f"--preset fig12 {DIGITS} --clients 50 --rounds 11 --epochs 5 --lr 0.01", 0.3),
    Work(CURRICULA + "fmnist-fig2", "A4", f"--preset fig2 {IMAGES} {NO_DECAY} --rounds 20 --epochs 2 --trials 3", 1),
    Work(CURRICULA + "fmnist-fig3", "A5", f"--preset fig3 {IMAGES} {NO_DECAY} --rounds 20 --epochs 2 --trials 3", 1),
    Work(CURRICULA + "fmnist-fig6", "A11", f"--preset fig6 {IMAGES} {NO_DECAY} --rounds 20 --epochs 2 --trials 3", 0.3),
    Work(CURRICULA + "fmnist-fig10", "A8", f"--preset fig10 {IMAGES} {NO_DECAY} --rounds 20 --epochs 2 --trials 3", 0.5),
    Work(
        CURRICULA + "fmnist-dissimilarity",
        "A13",
        f"--dissimilarity --order curriculum anti vanilla {IMAGES} --clients 100 --rounds 20 --epochs 2 --trials 3",
        0.3,
        program="results/explain.py",
    ),
    *(
        Work(f"{FGN}fmnist-{figure}", claims, f"--preset {figure} {IMAGES} --model lenet5 --alpha 0.1 --rounds 60", 1)
        for claims, figures in SWEEPS.items()
        for figure in figures.split()
    ),
    *(
        Work(f"{PHASES}mnist-{name}", "B4", f"--preset {name} --dataset mnist --data-dir data --rounds 60 --eval-every 5", 1)
        for name in ("table4", "table5", "table6-lambda", "table6-tau", "table6-s", "table6-v")
    ),
    Work(CLIENTS + "fmnist-fig7", "A12", f"--preset fig7 {EXPERT} --trials 8", 0.3),
    Work(CLIENTS + "fmnist-fig4", "A9", f"--preset fig4 {EXPERT} --data-order curriculum random vanilla --trials 5", 0.3),
    Work(FGN + "fmnist-alpha", "C1", f"{IMAGES} --alpha 0.1 0.3 --batch-size 16 --rounds 60 --trials 5", 0.3),
    Work(ART + "fmnist-table2", "D1 D2 D3", f"--preset table2 {TEN_CLIENTS} --model lenet5 --augment none", 0.4),
    Work(ART + "fmnist-controls", "D5", TEN_CLIENTS, 0.2),
    Work(ART + "fmnist-d4", "D4", f"--preset d4 {IMAGES} --model lenet5 --augment none --warmup 6", 0.3),
    *(
        Work(f"{FGN}select-{name}{part}", "C11", f"--dataset {data} {LARGE} {arms}", hours)
        for name, data, scale in (("cifar10", "data/cifar10.npz", 2), ("fmnist", "fmnist --data-dir data", 1))
        for part, arms, hours in (("", SIZE, 0.1 * scale), ("-others", SELECT, 0.4 * scale))
    ),
    *(
        Work(f"{FGN}select-cifar10-u2200{part}", "C11", f"{CIFAR} {LARGE} {arms} --budget 2200 --rounds 275", hours)
        for part, arms, hours in (("", SIZE, 0.4), ("-others", SELECT, 1.5))
    ),
    Work(FGN + "cifar10-bases", "C1 C2 C3", f"--preset fig6 {CIFAR} --trials 3", 90, "paper"),
    Work(ART + "cifar10-table3", "D1 D2 D3 D5", f"--preset table3 {CIFAR} --alpha 0.5 --trials 3", 40, "paper"),
]


def publish(work: Work) -> None:
    """Copies a finished run's summary, figures and small tables beside its page."""
    source, target = ROOT.parent / "runs" / work.place, ROOT / work.place
    target.mkdir(parents=True, exist_ok=True)
    for path in [source / "summary.json", *source.glob("*.png"), *source.glob("*.csv")]:
        if path.name != "metrics.csv":
            shutil.copy(path, target)


def main(argv: list[str]) -> int:
    """The command line; the exit status of the first run that fails."""
    parser = argparse.ArgumentParser(description="the runs behind the pages")
    parser.add_argument("--list", action="store_true", help="print them, with estimated hours on two cores, and stop")
    parser.add_argument("--scale", choices=("small", "reduced", "paper"), default="reduced")
    parser.add_argument("--only", nargs="+", default=[], metavar="CLAIM", help="those that these claims rest on")
    parser.add_argument("--jobs", type=int, default=2)
    flags = parser.parse_args(argv)
    chosen = [w for w in RUNS if not flags.only or set(flags.only) & set(w.claims.split())]
    if flags.list:
        for w in chosen:
            state = "done" if w.complete() else f"{w.hours:.2f} h"
            print(f"{w.scale:<8} {w.claims:<12} {state:>7}  python {shlex.join(w.command(flags.jobs))}")
        return 0
    for work in (w for w in chosen if w.scale == flags.scale and not w.complete()):
        resumed = ["--resume"] if (ROOT.parent / "runs" / work.place / "config.json").exists() else []
        status = subprocess.run([sys.executable, *work.command(flags.jobs), *resumed], cwd=ROOT.parent).returncode
        if status:
            return status
        if work.scale != "small":
            publish(work)
    return subprocess.run([sys.executable, str(ROOT / "pages.py")]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
