"""python tests/mutate.py [--only common.py ...] [--first 0 --count 20] [--jobs 2]

Breaks the algorithms on purpose, one sign, term or index at a time, and counts how many of the mutants the tests catch. Each
mutant is a copy of the project in a temporary folder; the tests of its file run there, the shortest first, until one fails.
Lists the survivors.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MUTANTS = {
    "common.py": [
        ("g.add_(y - self.anchor[:live], alpha=self.proximal)", "g.add_(self.anchor[:live] - y, alpha=self.proximal)"),
        ("g.add_(y, alpha=self.weight_decay)", "g.sub_(y, alpha=self.weight_decay)"),
        ("v.mul_(self.momentum).add_(g)", "v.add_(g).mul_(self.momentum)"),
        ("momentum=self.momentum, weight_decay", "momentum=self.momentum**2, weight_decay"),
        ("weight_decay=self.weight_decay, **rest", "weight_decay=-self.weight_decay, **rest"),
        ("g.add_(self.correction[:live])", "g.sub_(self.correction[:live])"),
        ("velocity = momentum * velocity + 1 - proximal * travelled", "velocity = momentum * velocity + 1"),
        ("velocity = momentum * velocity + 1 - proximal * travelled", "velocity = velocity + 1 - proximal * travelled"),
        (
            'return {"correction": self.state["c"] - self.recall("c_i", clients)}',
            'return {"correction": -self.recall("c_i", clients)}',
        ),
        ("c_new = c_i - c + (x - y) / length", "c_new = c_i + (x - y) / length"),
        ("c_new = c_i - c + (x - y) / length", "c_new = c_i - c + (x - y)"),
        ("c + len(clients) / self.clients * (c_new - c_i).mean(0)", "c + (c_new - c_i).mean(0)"),
        ("return x + self.server_lr * (y - x).mean(0)", "return x + self.server_lr * (p @ (y - x))"),
        ("return x - (p @ length) * (p @ d)", "return x - length.mean() * (p @ d)"),
        ("d = (x - y) / length[:, None]", "d = x - y"),
        ('return {"correction": -self.recall("delta", clients)}', 'return {"correction": self.recall("delta", clients)}'),
        ('self.recall("delta", clients) + (x_hat - y) / length', "(x_hat - y) / length"),
        ("return self.b2 * v + (1 - self.b2) * delta**2", "return self.b2 * v + delta**2"),
        ("return v + delta**2", "return v + delta"),
        ("* torch.sign(v - delta**2)", "* torch.sign(delta**2 - v)"),
        ("m / (v.sqrt() + self.tau)", "m / (v + self.tau).sqrt()"),
        ("torch.full_like(x, self.tau**2)", "torch.zeros_like(x)"),
        ("-F.log_softmax(similar / self.temperature, -1)[..., 0]", "-F.log_softmax(similar / self.temperature, -1)[..., 1]"),
        ('self.mu * step.extra["known"] * (step.mean * l_con).sum(1)', "self.mu * (step.mean * l_con).sum(1)"),
        ("return p @ y\n\n    def start", "return y.mean(0)\n\n    def start"),
        (
            "self.statistics[:live, 0].add_(torch.linalg.vector_norm(g, dim=1).square_())",
            "self.statistics[:live, 0].add_(torch.linalg.vector_norm(g, dim=1))",
        ),
        ("mean = mask / mask.sum(-1, keepdim=True).clamp(min=1)", "mean = mask / mask.shape[-1]"),
        ("if -size - 1 > min_size:", "if -size > min_size:"),
        ("if operation.is_view and not varying and", "if operation.is_view and"),
        ("            self.faithful = False", "            pass"),
        ("unseen or any(i not in self.names and _storage(x) in self.made for i, x in given.items())", "unseen"),
        (" and {*map(_storage, _flat(result))} <= {*map(_storage, given.values())}:", ":"),
        ("unseen = unseen or list(self.names.values()).count(self.names.get(id(args[0]))) != 1", "pass"),
        (" or operation is torch.ops.aten.lift_fresh.default", ""),
        (' or kwargs.get("generator")', ""),
        ("if self.faithful and not looks.seen else", "if self.faithful else"),
        ("or old.dtype != value.dtype:", "or False:"),
        ("            self.nets.clear()", "            pass"),
        ("            self.steps.clear()", "            pass"),
        ("self.recorded = {} if own else self.memory.steps", "self.recorded = self.memory.steps"),
        ("if model.memory is None or model.memory.data is not data:", "if model.memory is None:"),
        ("(rows.start, rows.stop, size)", "(rows.start, rows.stop)"),
        ("(live, self.batch_size, self.momentum, self.weight_decay", "(live, self.batch_size, self.weight_decay"),
        ("self.proximal, self.correction is None)", "self.proximal)"),
        ('self.hold("velocity", torch.zeros_like(self.anchor))[:k]', 'self.hold("velocity", self.anchor)[:k]'),
    ],
    "fedavg_curriculum.py": [
        ("N * b + N * (1 - b) * share", "N * b + (N - b) * share"),
        ('"quadratic": x**2', '"quadratic": x'),
        ('"root": np.sqrt(x)', '"root": x'),
        ("np.expm1(10 * x) / np.expm1(10)", "np.expm1(x) / np.expm1(1)"),
        ('"step": np.floor(x + 1e-9)', '"step": np.ceil(x)'),
        ('(1 if order == "curriculum" else -1)', '(-1 if order == "curriculum" else 1)'),
        ("rng.permutation(np.sort(ordered[:size]))", "rng.permutation(ordered[:size])"),
        ('"LG": (loss_L + loss_G) / 2', '"LG": loss_L + 0 * loss_G'),
        ('"L_pred": predicted_L != y', '"L_pred": predicted_G != y'),
        ("t * T + steps, config.rounds * T", "t + steps, config.rounds * T"),
        ("np.arange(longest)) ** -config.lr_power", "np.arange(longest)) ** config.lr_power"),
        ("T = config.epochs * -(-N // config.batch_size)", "T = config.epochs * (N // config.batch_size)"),
    ],
    "client_curriculum.py": [
        ("np.cumsum(N) - N", "np.cumsum(N) - N[0]"),
        ("np.floor(f * N + 1e-9)", "np.ceil(f * N)"),
        ("np.cumsum(N - first)[:-1]", "np.cumsum(first)[:-1]"),
        (
            "return float(clients[:, 1].mean()), float(clients[:, 0].std())",
            "return float(clients[:, 0].std()), float(clients[:, 1].mean())",
        ),
        ("U = config.rounds * config.clients_per_round", "U = config.rounds"),
        ("np.concatenate([queue, pool[~waiting], pool[waiting]])", "np.concatenate([queue, pool])"),
        ("if len(queue) < m:", "if len(queue) <= m:"),
        ("pool = rng.permutation(np.sort(ranked[:K]))", "pool = ranked[:K]"),
    ],
    "fedcl_fgn.py": [
        ("return (now - before) / before >= delta", "return (now - before) / now >= delta"),
        ("return (now - before) / before >= delta", "return (now - before) / before > delta + 1e-9"),
        ("return min(2 * n, most or M) if critical", "return min(2 * n, most or M) if not critical"),
        ("else max(n // 2, fewest or max(m // 2, 1))", "else max(n // 2, fewest or m)"),
        ("float(np.mean(history[-2 * w : -w]))", "float(np.mean(history[-2 * w :]))"),
        ("norms.append(leaf_norms(-log_p_y.mean((1, 2)), net))", "norms.append(leaf_norms(-log_p_y.sum((1, 2)), net))"),
        ("p[:, y] * leaf_norms(", "1 / data.classes * leaf_norms("),
        ("n, w = len(values), N / np.sum(N)", "n, w = len(values), np.ones(len(N)) / len(N)"),
        ("(1 - n / M)))", "1))"),
        ("np.hypot(s_now, (1 + delta) * s_before)", "np.hypot(s_now, s_before)"),
    ],
    "fedcl_gmm_sync.py": [
        ("b = (ce.detach().double() - tau) / lam", "b = (ce.detach().double() + tau) / lam"),
        ("return (ce - tau) * s + lam * s.log() ** 2", "return (ce - tau) * s + lam * s.log()"),
        ("return (ce - tau) * confidence(ce, tau, lam)", "return ce * confidence(ce, tau, lam)"),
        ("return N[math.ceil(T * len(N) - 1e-9) - 1]", "return N[math.ceil(T * len(N) - 1e-9) - 2]"),
        ("> v * len(draws) + 1e-9", ">= v * len(draws) - 1e-9"),
        ('torch.cat([state["own"][state["frozen"]], update.weights]).mean(0)', "update.weights.mean(0)"),
        ('state["frozen"] = z + 1, t + 1, []', 'state["frozen"] = z + 1, t + 1, state["frozen"]'),
        ("return torch.exp(-(d1 * d2).mean())", "return torch.exp((d1 * d2).mean())"),
        ("math.ceil(config.rounds / Z)", "config.rounds"),
    ],
    "fedac_art.py": [
        ("I_x = np.concatenate([x[i], ONE - x[i]])", "I_x = np.concatenate([x[i], x[i]])"),
        ("meet / (ONE * art_alpha + norm[:J])", "meet / (ONE * art_alpha + norm[:J] ** 0)"),
        ("art_beta * overlap[j] + (1 - art_beta) * w[j]", "art_beta * overlap[j] + w[j]"),
        ("own = order[y[order] == c]", "own = np.flatnonzero(y == c)"),
        ("P1[own] = size[own] < threshold(size[own], quantile)", "P1[own] = size[own] <= threshold(size[own], quantile)"),
        ("weight[shard] = raw * (len(raw) / raw.sum())", "weight[shard] = raw"),
        ("np.where(P1[shard], w_small, w_large)", "np.where(P1[shard], w_large, w_small)"),
        ("right = torch.where(flip, right.flip(-1), right)", "right = torch.where(flip, right, right.flip(-1))"),
    ],
    "theory/bounds.py": [
        ("return 4 * (1 + M) * L * F + 2 * (1 + M) * B + s**2", "return 4 * (1 + M) * L * F + (1 + M) * B + s**2"),
        (
            "return (4 * M * L * np.mean(F) + 2 * M * B + s**2) / len(F)",
            "return (4 * M * L * np.mean(F) + M * B + s**2) / len(F)",
        ),
        ("return 1 / (4 * (3 + 2 * M) * L)", "return 1 / (2 * (3 + 2 * M) * L)"),
        ("return 1 - a * f.mu, a / f.mu", "return 1 - a * f.mu / 2, a / f.mu"),
        ("return (1 + 1 / j) * (1 - a * f.mu) ** 2, (1 + j) * a**2", "return (1 - a * f.mu) ** 2, (1 + j) * a**2"),
        ("p, w = p * (1 - a * f.mu), 2 * p * a * f.L + w * c", "p, w = p * (1 - a * f.mu), p * a * f.L + w * c"),
        ("floor += p * noise / Q + w * (e * B + (1 - 1 / Q) * noise)", "floor += p * noise / Q + w * (1 - 1 / Q) * noise"),
        ("4 * f.L / f.mu * (min(a * N, 1 / f.mu) ** 2 * B", "4 * f.L / f.mu * (min(a * N, 1 / f.mu) * B"),
        (
            "client = np.sqrt((f.G + np.sqrt(problem.B)) ** 2 + s**2)\n    average",
            "client = f.G + np.sqrt(problem.B)\n    average",
        ),
    ],
}


# Run beside the tests: it notes how long each takes, and where that is known it runs the shortest first.
ORDER = """
import json, pathlib
file, seconds = pathlib.Path("seconds.json"), {}
known = json.loads(file.read_text()) if file.exists() else {}

def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: known.get(item.nodeid, 0.0))

def pytest_runtest_logreport(report):
    seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration

def pytest_sessionfinish():
    if not known:
        file.write_text(json.dumps(seconds))
"""
LONGEST = 900  # seconds after which a mutant's tests count as hanging


def tests_of(name: str) -> str:
    return "tests/test_theory.py" if name.startswith("theory") else f"tests/test_{Path(name).stem}.py"


def run_tests(copy: Path, name: str) -> tuple[int, str]:
    """(exit status of pytest, first failed test) of the tests of the file, which stop at the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "order"]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, tests_of(name)], cwd=copy, env=environment, capture_output=True, text=True, timeout=LONGEST
        )
    except subprocess.TimeoutExpired:
        return 1, f"(no end after {LONGEST} s)"
    failed = [line.split("::")[-1].split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, failed[0] if failed else ""


def caught(whole: Path, name: str, old: str, new: str) -> tuple[bool, str]:
    """Whether the tests of the file fail on the mutant, and the name of the test that caught it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        shutil.copytree(whole / Path(name).stem, copy)
        text = (copy / name).read_text()
        (copy / name).write_text(text.replace(old, new))
        status, test = run_tests(copy, name)
        return status == 1, test


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(MUTANTS), choices=MUTANTS)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutant to try, of those of --only")
    parser.add_argument("--count", type=int, default=10**6, help="how many to try")
    parser.add_argument("--jobs", type=int, default=2)
    flags = parser.parse_args()
    work = [(name, old, new) for name in flags.only for old, new in MUTANTS[name]][flags.first : flags.first + flags.count]
    for name, old, _ in work:  # a mutant that no longer fits its file is a mistake of this list
        assert (ROOT / name).read_text().count(old) == 1, f"{name}: {old!r}"
    count = 0
    with tempfile.TemporaryDirectory() as top, ThreadPoolExecutor(flags.jobs) as pool:
        for name in dict.fromkeys(name for name, *_ in work):  # the tests must pass on the whole file, or 'caught' says nothing
            copy = Path(top) / Path(name).stem
            left = (".git", "runs", "results", "__pycache__", "data", ".pytest_cache", ".ruff_cache")
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*left))
            (copy / "order.py").write_text(ORDER)
            status, test = run_tests(copy, name)
            assert status == 0, f"{tests_of(name)} fails on the unchanged file: {test}"
            print(f"{tests_of(name)} passes on the unchanged {name}", flush=True)
        results = pool.map(lambda each: caught(Path(top), *each), work)
        for (name, old, new), (dead, test) in zip(work, results, strict=True):
            count += dead
            print(f"{'caught' if dead else 'SURVIVED'}: {name}: {old.strip()} -> {new.strip()} | {test}", flush=True)
    print(f"{count} of {len(work)} mutants caught")
    sys.exit(count < 0.95 * len(work))


if __name__ == "__main__":
    main()
