"""What people copy needs numpy, torch and other packages alone; it refuses what it cannot do."""

import ast
import builtins
import dis
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import numpy as np
import pytest
import torch
from scipy.special import lambertw

import client_curriculum
import fedavg_curriculum
import fedcl_fgn
import fedcl_gmm_sync

ROOT = Path(__file__).resolve().parent.parent
SAMPLER = ("pacing", "CurriculumBatchSampler")
PACKAGES = {"np", "torch", "math", "scipy", "sklearn", "threadpoolctl", "warnings"}
PIECES = [
    ("fedavg_curriculum", *SAMPLER, "difficulty_by"),
    ("client_curriculum", *SAMPLER),
    ("client_curriculum", "fill_queue", "sort_clients"),
    ("client_curriculum", "reconstitute"),
    ("fedcl_fgn", "is_critical", "double", "halve"),
    ("fedac_art", "cluster_client", "fuzzy_art", "small_clusters", "weigh_samples"),
    ("fedcl_gmm_sync", "confidence_loss", "confidence", "lambert_w"),
    ("fedcl_gmm_sync", "mixture", "draw_scores"),
    ("fedcl_gmm_sync", "quantile", "end_of_phase"),
    ("fedcl_gmm_sync", "sample_conditions", "NOISE"),
    ("fedcl_gmm_sync", "similarity"),
]


def names_read(code: CodeType) -> Iterator[str]:
    """The global names and modules that this code and all functions in it read."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME"):
            yield step.argval.partition(".")[0]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_read(constant)


@pytest.mark.parametrize("piece", PIECES, ids="-".join)
def test_a_piece_needs_nothing_else_of_ours(piece):
    script, *names = piece
    source = (ROOT / f"{script}.py").read_text()
    known = PACKAGES | {"__name__", *names, *dir(builtins)}
    found = set()
    for node in ast.parse(source).body:
        name = getattr(node, "name", None)
        if isinstance(node, ast.Assign):
            name = ast.unparse(node.targets[0])
        if name in names:
            found.add(name)
            code = compile(ast.get_source_segment(source, node), script, "exec")
            assert set(names_read(code)) <= known
    assert found == set(names)


SHARDS = [np.array([0, 2]), np.array([1])]
LABELS = np.zeros(3, int)
NAN = float("nan")


def deal(losses, f_ord):
    return client_curriculum.reconstitute(SHARDS, LABELS, np.array(losses), f_ord, None)


def first_batch(difficulty, batch_size, count):
    sampler = fedavg_curriculum.CurriculumBatchSampler
    return next(iter(sampler(difficulty, batch_size, 3, lambda step: count, 0)))


@pytest.mark.parametrize(
    ("said", "call", "arguments"),
    [
        ("at least one sample", first_batch, ([], 2, 2)),
        ("at least one sample", first_batch, ([0.1, 0.2], 0, 2)),
        ("wanted a whole number of samples", first_batch, ([0.1, 0.2], 1, 0)),
        ("wanted a whole number of samples", first_batch, ([0.1, 0.2], 1, 0.5)),
        ("wanted a whole number of samples", first_batch, ([0.1, 0.2], 1, NAN)),
        ("cubic: choose linear", fedavg_curriculum.pacing, ("cubic", 0, 8, 10, 0.5, 0.2)),
        ("loss: choose G", fedavg_curriculum.difficulty_by, ("loss", *np.zeros((5, 2)))),
        ("reconstitute", deal, ([NAN] * 3, 1.0)),
        ("reconstitute", deal, ([0.1, 0.2, 0.3], 1.5)),
        ("give finite numbers", fedcl_fgn.is_critical, (1.0, NAN, 0)),
        ("give finite numbers", fedcl_fgn.is_critical, (float("inf"), 1.0, 0)),
        ("give finite numbers", fedcl_fgn.is_critical, (None, NAN, 0)),
        ("delta nan", fedcl_fgn.is_critical, (1.0, 2.0, NAN)),
    ],
)
def test_a_piece_refuses_what_it_cannot_do(said, call, arguments):
    with pytest.raises(ValueError, match=said):
        call(*arguments)


def test_a_seed_stands_for_its_generator():
    samplers = []
    for rng in (7, np.random.default_rng(7)):
        sampler = fedavg_curriculum.CurriculumBatchSampler
        samplers.append(sampler(np.arange(9), 2, 6, lambda step: 9, rng))
    batches, wanted = map(list, samplers)
    assert batches == wanted


def test_the_confidence_loss_is_the_papers():
    """Against SciPy's Lambert W, and the slope of the loss by differences."""
    ce = torch.linspace(0, 12, 25, dtype=torch.float64, requires_grad=True)
    tau = 2.0
    lam = 3.0
    b = (ce.detach().numpy() - tau) / lam
    s = np.exp(-lambertw(np.maximum(b, -2 / np.e) / 2).real)
    wanted = (ce.detach().numpy() - tau) * s + lam * np.log(s) ** 2
    loss = fedcl_gmm_sync.confidence_loss(ce, tau, lam)
    np.testing.assert_allclose(loss.detach(), wanted, rtol=1e-9)
    [slope] = torch.autograd.grad(loss.sum(), ce)
    np.testing.assert_allclose(slope, s, rtol=1e-9)
