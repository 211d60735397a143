"""Oracles and traps of FedCL by critical learning periods: each against something computed another way."""

import csv
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import common
import fedcl_fgn as fgn

SCRIPT = Path(fgn.__file__)
TINY = ["--threads", "1", "--clients", "12", "--clients-per-round", "4", "--rounds", "4", "--trials", "1"]
TINY += ["--alpha", "0.5", "--epochs", "1", "--batch-size", "16"]


@pytest.fixture(scope="module")
def digits():
    return common.load_data("digits")


def pixels(n=7, side=4, classes=3, seed=0):
    """A small data set of raw images whose normalisation is the identity up to scale."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.integers(0, 256, (n, side, side, 1), dtype=np.uint8))
    y = torch.from_numpy(rng.integers(0, classes, n))
    return common.Data(x, y, x, y, classes, torch.tensor([100.0]), torch.tensor([50.0]))


class Softmax(nn.Module):
    """One linear layer on the pixels, in the client-aware form of common."""

    def __init__(self, inputs, classes):
        super().__init__()
        self.head = common.Linear(inputs, classes)

    def features(self, x):
        return common.per_client(x, len(self.head.weight))


class TwoLayers(Softmax):
    def __init__(self, inputs, hidden, classes):
        super().__init__(hidden, classes)
        self.fc1 = common.Linear(inputs, hidden)

    def features(self, x):
        return torch.tanh(self.fc1(super().features(x)))


def softmax_model(inputs=16, classes=3):
    return common.Model(lambda: Softmax(inputs, classes), dtype=torch.float64)


def plain_lenet(theta):
    """LeNet-5 on 1x28x28 from torch's own layers, filled from the flat vector theta in its documented order."""
    layers = [nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    layers += [nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    net = nn.Sequential(*layers).double()
    nn.utils.vector_to_parameters(theta.clone(), net.parameters())
    return net


def images(data, index):
    """(n, C, H, W) float64, normalised by hand."""
    x = data.x_train[torch.as_tensor(index)].double().permute(0, 3, 1, 2)
    return (x - data.mean.view(1, -1, 1, 1)) / data.std.view(1, -1, 1, 1)


def squared_grad(net, x, y):
    grads = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
    return sum(float(g.square().sum()) for g in grads)


# --------------------------------------------------------------------------------------------------- FGN, three readings


def test_per_sample_equals_autograd_loop_and_vmap(digits):
    model = common.build_model("lenet5", digits, dtype=torch.float64)
    theta, index = model.init(1), np.arange(70)  # more than one chunk of 64
    ours = fgn.squared_norms(model, theta, digits, index[:, None])
    net, x, y = plain_lenet(theta), images(digits, index), digits.y_train[:70]
    loop = [squared_grad(net, x[i : i + 1], y[i : i + 1]) for i in index]
    params = {name: p.detach() for name, p in net.named_parameters()}

    def loss(params, x, y):
        return F.cross_entropy(torch.func.functional_call(net, params, x[None]), y[None])

    grads = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(params, x, y)
    vmapped = sum(g.flatten(1).square().sum(1) for g in grads.values())
    np.testing.assert_allclose(ours, loop, rtol=1e-10)
    np.testing.assert_allclose(ours, vmapped.numpy(), rtol=1e-10)


def test_full_is_the_gradient_of_the_client_mean(digits):
    model = common.build_model("lenet5", digits, dtype=torch.float64)
    theta, shard = model.init(2), np.arange(5, 40)
    wanted = squared_grad(plain_lenet(theta), images(digits, shard), digits.y_train[5:40])
    assert fgn.squared_norms(model, theta, digits, shard[None])[0] == pytest.approx(wanted, rel=1e-10)


def test_linear_softmax_closed_form():
    data, model = pixels(), softmax_model()
    theta = model.init(0)
    x = images(data, np.arange(7)).flatten(1)
    p = torch.softmax(x @ theta[:48].view(3, 16).T + theta[48:], 1)
    wanted = (p - F.one_hot(data.y_train, 3)).square().sum(1) * (x.square().sum(1) + 1)  # ||p - e_y||^2 (||x||^2 + 1)
    np.testing.assert_allclose(fgn.squared_norms(model, theta, data, np.arange(7)[:, None]), wanted.numpy(), rtol=1e-12)


def batch_reading(model, theta, data, batches):
    return common.train(model, theta, data, batches, lr=0.0).grad_sq


def test_batch_of_one_is_per_sample():
    data, model = pixels(), softmax_model()
    theta, shard = model.init(0), np.arange(7)
    batches = common.epochs_of_batches(shard, 2, 1, np.random.default_rng(0))
    np.testing.assert_allclose(
        batch_reading(model, theta, data, [batches]), fgn.per_sample(model, theta, data, [shard]), rtol=1e-12
    )


def test_identical_samples_make_the_three_readings_equal():
    data, model = pixels(), softmax_model()
    data.x_train[:], data.y_train[:] = data.x_train[0].clone(), 1
    theta, shard = model.init(0), np.arange(6)
    batch = batch_reading(model, theta, data, [shard.reshape(3, 2)])[0]
    full = fgn.squared_norms(model, theta, data, shard[None])[0]
    assert batch == pytest.approx(full, rel=1e-12)
    assert fgn.per_sample(model, theta, data, [shard])[0] == pytest.approx(full, rel=1e-12)


@pytest.mark.parametrize("B", [2, 3])
def test_expected_batch_norm_interpolates_between_full_and_per_sample(B):
    """E||g_B||^2 = ||g||^2 + (tr F - ||g||^2) / B with replacement, over all n^B batches."""
    data, model = pixels(n=4), softmax_model()
    theta = model.init(3)
    every = np.stack(np.meshgrid(*[np.arange(4)] * B), -1).reshape(-1, B)
    full = fgn.squared_norms(model, theta, data, np.arange(4)[None])[0]
    trace = fgn.per_sample(model, theta, data, [np.arange(4)])[0]
    assert trace > 1.5 * full  # else the identity says little
    assert batch_reading(model, theta, data, [every])[0] == pytest.approx(full + (trace - full) / B, rel=1e-12)


def test_loss_falls_by_eta_times_fgn_in_the_limit():
    data, model = pixels(), softmax_model()
    theta, one = model.init(0), np.array([[2]])
    norm = fgn.squared_norms(model, theta, data, one)[0]

    def loss(weights):
        return common.score(model, weights, data, [one[0]])[0][0][0]

    errors = []
    for eta in (1e-3, 1e-4, 1e-5):
        moved = common.train(model, theta, data, [one], lr=eta).weights[0]
        errors.append(abs((loss(moved) - loss(theta)) / (-eta * norm) - 1))
    assert errors[0] > 5 * errors[1] > 25 * errors[2]  # first order in eta
    assert errors[2] < 1e-2


def test_plain_nets_take_one_sample_at_a_time():
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.integers(0, 80, (3, 12))), torch.from_numpy(rng.integers(0, 80, 3))
    data = common.Data(x, y, x, y, 80)
    model = common.build_model("lstm", data, dtype=torch.float64, width=8)
    theta = model.init(0)
    torch.manual_seed(0)
    net = common.CharLSTM(0, 0, 80, 8).double().eval()  # parameters in the order of the flat vector
    nn.utils.vector_to_parameters(theta, net.parameters())
    wanted = []
    for i in range(3):
        grads = torch.autograd.grad(
            F.cross_entropy(net.head(net.features(x[i : i + 1]))[0], y[i : i + 1]), list(net.parameters())
        )
        wanted.append(sum(float(g.square().sum()) for g in grads))
    np.testing.assert_allclose(fgn.squared_norms(model, theta, data, np.arange(3)[:, None]), wanted, rtol=1e-10)
    grads = torch.autograd.grad(F.cross_entropy(net.head(net.features(x))[0], y), list(net.parameters()))
    full = sum(float(g.square().sum()) for g in grads)
    assert fgn.squared_norms(model, theta, data, np.arange(3)[None])[0] == pytest.approx(full, rel=1e-10)


# ---------------------------------------------------------------------------------------------------------------- FedFIM


def test_fim_equals_dense_jacobian():
    """tr E_x [J^T (diag p) J], J = d log p / d theta, from torch's own Jacobian of a net of torch's own layers."""
    data = pixels()
    model = common.Model(lambda: TwoLayers(16, 5, 3), dtype=torch.float64)
    theta = model.init(4)
    layout = {f"{owner}.{leaf}": theta[a:b].view(shape) for owner, leaf, shape, a, b in model.layout}
    flat, names = torch.cat([v.flatten() for v in layout.values()]), list(layout)
    x = images(data, np.arange(7)).flatten(1)

    def log_p(flat):
        parts = dict(zip(names, flat.split([v.numel() for v in layout.values()]), strict=True))
        w = {name: part.view(layout[name].shape) for name, part in parts.items()}
        hidden = torch.tanh(x @ w["fc1.weight"].T + w["fc1.bias"])
        return torch.log_softmax(hidden @ w["head.weight"].T + w["head.bias"], 1)

    J = torch.autograd.functional.jacobian(log_p, flat)  # (n, classes, P)
    F_x = torch.einsum("ny,nyp,nyq->npq", log_p(flat).exp(), J, J)
    trace = F_x.mean(0).trace().item()
    assert fgn.per_sample(model, theta, data, [np.arange(7)], fisher=True)[0] == pytest.approx(trace, rel=1e-10)
    assert fgn.per_sample(model, theta, data, [np.arange(7)])[0] != pytest.approx(trace, rel=1e-3)  # labels from the model


def test_detection_leaves_weights_and_streams_alone(digits):
    model = common.build_model("alexnet", common.load_data("digits", size=32), width=16)  # has dropout
    data = common.load_data("digits", size=32)
    theta = model.init(0)
    before, stream = theta.clone(), torch.get_rng_state()
    first = fgn.per_sample(model, theta, data, [np.arange(4)], fisher=True)
    np.testing.assert_array_equal(first, fgn.per_sample(model, theta, data, [np.arange(4)], fisher=True))
    assert torch.equal(theta, before) and torch.equal(torch.get_rng_state(), stream)


def test_peak_memory_counts_what_is_alive():
    def chained():
        a = torch.ones(2**18)  # 1 MiB
        b = a + 1
        del a
        return float((b * 2).sum())  # 2 MiB alive at most

    result, seconds, peak = fgn.measured(chained, "cpu", True)
    assert result == 2**20 and seconds > 0 and 2 * 2**20 <= peak < 2.1 * 2**20
    assert fgn.measured(chained, "cpu", False)[2] == ""


def test_time_on_the_gpu_waits_for_its_kernels(monkeypatch):
    order = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("wait"))
    monkeypatch.setattr(fgn.time, "perf_counter", lambda: order.append("clock") or 0.0)
    fgn.measured(lambda: order.append("work"), "cuda", False)
    assert order == ["wait", "clock", "work", "wait", "clock"]


# ------------------------------------------------------------------------------------------------- the weighted mean, noise


def test_weighted_mean_is_eq_1():
    assert fgn.weighted_mean(np.array([1.0, 3.0, 8.0]), np.array([2, 1, 1]), 9)[0] == pytest.approx((2 + 3 + 8) / 4)
    assert fgn.weighted_mean(np.array([1.0, 3.0]), np.array([1, 1]), 2)[1] == 0  # all clients take part
    assert fgn.weighted_mean(np.array([1.0]), np.array([5]), 2)[1] == math.inf
    assert fgn.weighted_mean(np.array([4.0]), np.array([5]), 1) == (4.0, 0.0)


def test_standard_error_predicts_the_spread_over_selections():
    """Draw 16 of 128 clients 4,000 times: the spread of FGN is the root mean square of its own standard error."""
    rng = np.random.default_rng(0)
    N, g = rng.integers(5, 60, 128), rng.gamma(4, size=128)
    draws = [rng.choice(128, 16, replace=False) for _ in range(4000)]
    means, errors = np.array([fgn.weighted_mean(g[d], N[d], 128) for d in draws]).T
    assert np.sqrt(np.mean(errors**2)) == pytest.approx(means.std(), rel=0.06)


def test_growth_heeds_the_noise_that_eq_2_follows():
    """A level FGN with 15 % noise: Eq. 2 calls nearly every second round critical, two standard errors about one in 40."""
    rng = np.random.default_rng(1)
    values, errors = 1 + 0.15 * rng.standard_normal(4000), np.full(4000, 0.15)
    printed = np.mean([fgn.is_critical(values[t - 2 : t], 0.01) for t in range(2, 4000)])
    ours = np.mean([fgn.is_growing(values[t - 2 : t], errors[t - 2 : t], 0.01, 2.0) for t in range(2, 4000)])
    assert 0.42 < printed < 0.52 and 0.01 < ours < 0.035
    wider = np.mean([fgn.is_growing(values[t - 8 : t], errors[t - 8 : t], 0.01, 2.0, 4) for t in range(8, 4000)])
    assert 0.01 < wider < 0.035  # the error of a mean over a window is smaller, and is used
    assert all(fgn.is_growing([1.0, 1.5], [0.05, e], 0.01, 2.0) == (e < 0.2) for e in (0.0, 0.1, 0.3))


def test_growth_without_noise_is_eq_2():
    rng = np.random.default_rng(2)
    values = rng.gamma(3, size=60)
    for t in range(2, 60):
        for window in (1, 4):
            assert fgn.is_growing(values[:t], np.zeros(t), 0.01, 2.0, window) == fgn.is_critical(values[:t], 0.01, window)


def test_growth_under_infinite_errors_and_huge_thresholds():
    for errors in ([math.inf, 0.1], [0.1, math.inf], [math.inf] * 2):
        assert fgn.is_growing([1.0, 2.0], errors, 0.01, 0.0)  # z = 0 heeds no error
        assert not fgn.is_growing([2.0, 1.0], errors, 0.01, 0.0)
        assert not fgn.is_growing([1.0, 9e9], errors, 0.01, 2.0)  # what is unknown is not growth
    for now, critical in ((1e198, False), (3e200, False), (5e200, True)):  # 1e200 +- 2 * sqrt(1 + (1e200)^2)
        with np.errstate(all="raise"):
            assert fgn.is_growing([1.0, now], [1.0, 1.0], 1e200, 2.0) == critical


# ----------------------------------------------------------------------------------------------------- the pure controller


def trajectory(decisions, m=16, M=128, **limits):
    sizes = [m]
    for critical in decisions:
        sizes.append(fgn.next_size(sizes[-1], critical, m, M, **limits))
    return sizes


def test_scripted_ratios_give_the_specified_sizes():
    values = [1.0, 1.5, 2.0, 2.5, 2.0, 1.5, 1.0, 0.5, 0.4]
    decisions = [fgn.is_critical(values[: t + 1], 0.01) for t in range(len(values))]
    assert decisions == [True] * 4 + [False] * 5
    assert trajectory(decisions) == [16, 32, 64, 128, 128, 64, 32, 16, 8, 8]


def test_floor_is_half_of_the_initial_size_and_at_least_one():
    assert trajectory([False] * 5, m=1, M=9) == [1] * 6
    assert trajectory([True] * 4 + [False] * 5, m=3, M=20) == [3, 6, 12, 20, 20, 10, 5, 2, 1, 1]
    assert trajectory([True, False, True, False], fewest=16, most=16) == [16] * 5


def test_the_toy_of_the_specification():
    """The norm rises for 8 rounds, then decays: one hump, on average about the base's 16 clients over 100 rounds."""
    norms = [1.1 ** min(t, 7) * 0.95 ** max(t - 7, 0) for t in range(200)]
    G = [norm * 0.01 * 0.99**t for t, norm in enumerate(norms)]
    sizes = trajectory([fgn.is_critical(G[: t + 1], 0.01) for t in range(199)])
    assert sizes[:4] == [16, 32, 64, 128] and max(sizes) == 128
    down = sizes.index(64, 4)
    assert set(sizes[3:down]) == {128} and sizes[down : down + 5] == [64, 32, 16, 8, 8]
    assert set(sizes[down + 3 :]) == {8}
    assert 0.95 < np.mean(sizes[:100]) / 16 < 1.1


def test_sign_of_fgn_does_not_matter():
    """The printed rule on the printed, negative FGN, and ours on -FGN, take the same decisions."""
    G = np.random.default_rng(0).gamma(5, size=200)
    printed = [(-G[t] - -G[t - 1]) / -G[t - 1] >= 0.01 for t in range(1, 200)]
    assert 40 < sum(printed) < 160
    assert printed == [fgn.is_critical(G[: t + 1], 0.01) for t in range(1, 200)]
    assert printed == [fgn.is_critical(-G[: t + 1], 0.01) for t in range(1, 200)]


def test_threshold_is_inclusive_and_guarded():
    assert fgn.is_critical([1.0, 1.25], 0.25) and not fgn.is_critical([1.0, 1.2499], 0.25)
    assert fgn.is_critical([1.0, 1.0], 0.0)
    assert fgn.is_critical([0.0, 1.0], 0.01) and not fgn.is_critical([0.0, 0.0], 0.01)
    for values in ([1.0, 9e9], [0.0, 1.0]):
        assert not fgn.is_critical(values, math.inf) and not fgn.is_growing(values, [0.0, 0.0], math.inf, 0.0)
    assert fgn.is_critical([5.0], math.inf) and not fgn.is_critical([5.0], 0.01, first=False)
    assert fgn.is_growing([5.0], [1.0], 0.01, 2.0) and not fgn.is_growing([5.0], [1.0], 0.01, 2.0, first=False)


def test_infinite_delta_ends_at_the_floor():
    values = np.exp(np.arange(6))
    assert trajectory([fgn.is_critical(values[: t + 1], math.inf) for t in range(5)]) == [16, 32, 16, 8, 8, 8]


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_window_compares_means_of_neighbours(window):
    values = np.random.default_rng(window).gamma(5, size=30).tolist()
    for t in range(2, 31):
        w = max(k for k in range(1, window + 1) if 2 * k <= t)
        now, before = sum(values[t - w : t]) / w, sum(values[t - 2 * w : t - w]) / w
        assert fgn.is_critical(values[:t], 0.01, window) == (now / before - 1 >= 0.01)


def test_random_sizes_follow_their_probabilities():
    u = np.random.default_rng(0).random(20000)
    steps = [fgn.random_size(16, x, 0.2, 0.3, (16, 128, 0, 0)) for x in u]
    assert [round(steps.count(n) / 20000, 1) for n in (32, 8, 16)] == [0.2, 0.3, 0.5]
    assert fgn.random_size(128, 0.1, 0.2, 0.3, (16, 128, 0, 0)) == 128  # capped
    assert fgn.random_size(8, 0.4, 0.2, 0.3, (16, 128, 0, 0)) == 8  # at the floor


def test_controls_spend_what_fedcl_spends():
    sizes = np.array([16, 32, 64, 128, 64, 32, 16, 8, 8, 8, 8])
    constant, shifted = (fgn.replayed_sizes(arm, sizes, 0.5) for arm in ("constant", "shifted"))
    assert constant.sum() == shifted.sum() == sizes.sum()
    assert np.ptp(constant) <= 1 and len(constant) == len(sizes)
    assert shifted.tolist() == [32, 16, 8, 8, 8, 8, 16, 32, 64, 128, 64]
    assert fgn.replayed_sizes("shifted", sizes, 0.0).tolist() == sizes.tolist()


# ---------------------------------------------------------------------------------------------------------- the whole run


def launch(folder, *flags):
    fgn.main([*TINY, "--out", str(folder), *flags])
    return read(folder)


def read(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def weights(folder, method):
    return common.load_checkpoint(folder / "checkpoints" / f"{method}-trial0.pt")["state"]["weights"]


def of(rows, method):
    return [row for row in rows if row["method"] == method]


@pytest.mark.parametrize("base", fgn.BASES)
def test_pinned_size_is_the_base_bit_for_bit(tmp_path, base, capsys):
    """delta = inf with the size pinned, and the same size pinned under the default delta."""
    flags = ["--base", base, "--rounds", "3"]
    rows = launch(tmp_path / "inf", *flags, "--delta", "inf", "--fewest", "4", "--no-first-round-critical")
    assert torch.equal(weights(tmp_path / "inf", f"{base}+cl"), weights(tmp_path / "inf", base))
    same = [[row[name] for name in ("accuracy", "loss", "clients", "fgn", "train_loss")] for row in rows]
    assert same[:3] == same[3:]
    launch(tmp_path / "pin", *flags, "--fewest", "4", "--most", "4", "--arms", "cl")
    assert torch.equal(weights(tmp_path / "pin", f"{base}+cl"), weights(tmp_path / "inf", base))


def test_bases_differ_from_one_another(tmp_path, capsys):
    found = []
    for base in fgn.BASES:
        launch(tmp_path / base, "--base", base, "--no-cl", "--mu", "0.5", "--rounds", "3")
        found.append(weights(tmp_path / base, base))
    assert not any(torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


def test_next_size_follows_from_this_round(tmp_path, capsys):
    """select -> train -> FGN -> aggregate -> size of the next round; the decision is Eq. 2 on the logged FGN."""
    rows = of(launch(tmp_path, "--rounds", "10", "--eval-every", "5"), "fedavg+cl")
    values, n = [float(row["fgn"]) for row in rows], [int(row["clients"]) for row in rows]
    assert n[0] == 4 and rows[0]["critical"] == "1"
    for t in range(1, 10):
        assert (values[t] / values[t - 1] - 1 >= 0.01) == (rows[t]["critical"] == "1")
    for t in range(9):
        assert n[t + 1] == (min(2 * n[t], 12) if rows[t]["critical"] == "1" else max(n[t] // 2, 2))
    assert len(set(n)) > 1


def test_growth_decides_on_the_logged_fgn_and_error(tmp_path, capsys):
    flags = ["--detector", "growth", "--z", "0.5", "--window", "2", "--rounds", "10", "--arms", "cl", "--eval-every", "9"]
    rows = launch(tmp_path, *flags)
    G, s = ([float(row[name]) for row in rows] for name in ("fgn", "fgn_se"))
    ours, printed = [True], [True]
    for t in range(1, 10):
        a, b = ([t], [t - 1]) if t < 3 else ([t, t - 1], [t - 2, t - 3])
        now, before = (sum(G[i] for i in part) / len(a) for part in (a, b))
        variance = (sum(s[i] ** 2 for i in a) + 1.01**2 * sum(s[i] ** 2 for i in b)) / len(a) ** 2
        ours.append(now - 1.01 * before > 0.5 * math.sqrt(variance))
        printed.append(now / before - 1 >= 0.01)
    assert [row["critical"] == "1" for row in rows] == ours
    assert ours != printed and sum(ours) > 1


def test_random_arm_doubles_and_halves_by_its_own_flags(tmp_path, capsys):
    for double, sizes in (("1", "4 8 12 12"), ("0", "4 2 2 2")):
        flags = ["--arms", "random", "--p-double", double, "--p-halve", str(1 - int(double)), "--eval-every", "4"]
        assert [row["clients"] for row in launch(tmp_path / double, *flags)] == sizes.split()


def test_controls_count_the_clients_that_were_dropped(tmp_path, monkeypatch, capsys):
    """A client whose update is not finite was selected, and trained, all the same."""
    train = common.train

    def diverging(*args, lr, **options):
        update = train(*args, lr=lr, **options)
        if lr < 0.01:  # from the second round on
            update.weights[0] = math.nan
        return update

    monkeypatch.setattr(common, "train", diverging)
    rows = launch(tmp_path, "--arms", "cl", "constant", "shifted", "--on-nonfinite", "drop", "--eval-every", "4")
    n = {arm: [int(row["clients"]) + int(row["dropped"]) for row in of(rows, f"fedavg+{arm}")] for arm in fgn.ARMS}
    assert [row["dropped"] for row in of(rows, "fedavg+cl")] == ["0", "1", "1", "1"]
    assert n["shifted"] == np.roll(n["cl"], 2).tolist()
    assert sum(n["constant"]) == sum(n["cl"]) and np.ptp(n["constant"]) <= 1


def test_two_rounds_are_local_sgd_at_a_decayed_rate_averaged_by_samples(tmp_path, capsys):
    flags = ["--no-cl", "--rounds", "2", "--lr", "0.05", "--lr-decay", "0.5", "--weight-decay", "0.01", "--dtype", "float64"]
    config, data, shards, _, _, streams = first_round(flags)
    launch(tmp_path, *flags)
    theta = common.build_model("lenet5", data, dtype=torch.float64).init(streams.seed("init"))
    for t, lr in enumerate((0.05, 0.025)):
        clients, moved = common.select(config, 4, streams, t), []
        N = torch.tensor([float(len(shards[k])) for k in clients], dtype=torch.float64)
        assert N.max() > 1.2 * N.min()
        for k in clients:
            net = plain_lenet(theta)
            sgd = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=0.01)
            for batch in common.epochs_of_batches(shards[k], 1, 16, streams("batches", t, k)):
                batch = torch.as_tensor(batch[batch >= 0])
                sgd.zero_grad()
                F.cross_entropy(net(images(data, batch)), data.y_train[batch]).backward()
                sgd.step()
            moved.append(nn.utils.parameters_to_vector(net.parameters()).detach())
        theta = (N[:, None] * torch.stack(moved)).sum(0) / N.sum()
    torch.testing.assert_close(weights(tmp_path, "fedavg"), theta, rtol=0, atol=1e-10)


def first_round(flags):
    """(config, data, shards, clients, theta_0) of the first round of a TINY run, from the same streams."""
    config, _ = common.parse(fgn.Config, fgn.PRESETS, "doc", [*TINY, *flags])
    data, streams = common.load_data("digits"), common.Streams(config.seed, 0)
    model = common.build_model("lenet5", data)
    shards = common.client_shards(config, data, streams)
    return config, data, shards, common.select(config, 4, streams, 0), model.init(streams.seed("init")), streams


@pytest.mark.parametrize("reading", ["per_sample", "full"])
def test_fgn_is_read_at_the_received_model(tmp_path, reading, capsys):
    """A trap: after aggregation the norms are others."""
    _, data, shards, clients, theta, _ = first_round([])
    rows = launch(tmp_path, "--rounds", "1", "--fgn", reading)
    net, N = plain_lenet(theta.double()), np.array([len(shards[k]) for k in clients])
    G = []
    for k in clients:
        x, y = images(data, shards[k]), data.y_train[torch.as_tensor(shards[k])]
        each = [squared_grad(net, x[i : i + 1], y[i : i + 1]) for i in range(len(y))]
        G.append(np.mean(each) if reading == "per_sample" else squared_grad(net, x, y))
    assert float(rows[0]["fgn"]) == pytest.approx(0.01 * (N @ G) / N.sum(), rel=1e-4)


def test_batch_fgn_reads_all_local_batches_before_momentum_and_decay(tmp_path, capsys):
    """Against a local SGD of torch.optim, batch after batch. A trap: the first batch alone gives another value."""
    flags = ["--rounds", "1", "--epochs", "3", "--weight-decay", "0.1", "--lr", "0.05"]
    config, data, shards, clients, theta, streams = first_round(flags)
    rows = launch(tmp_path, *flags)
    N, G, one = np.array([len(shards[k]) for k in clients]), [], []
    for k in clients:
        net = plain_lenet(theta.double())
        sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        norms = []
        for batch in common.epochs_of_batches(shards[k], 3, 16, streams("batches", 0, k)):
            batch = batch[batch >= 0]
            sgd.zero_grad()
            F.cross_entropy(net(images(data, batch)), data.y_train[torch.as_tensor(batch)]).backward()
            norms.append(sum(float(p.grad.square().sum()) for p in net.parameters()))
            sgd.step()
        G.append(np.mean(norms))
        one.append(norms[0])
    wanted = 0.05 * (N @ G) / N.sum()
    assert float(rows[0]["fgn"]) == pytest.approx(wanted, rel=1e-3)
    assert abs(0.05 * (N @ one) / N.sum() / wanted - 1) > 0.01


def test_learning_rate_in_fgn_decays(tmp_path, capsys):
    flags = ["--arms", "base", "--fgn", "full", "--lr-decay", "0.5", "--rounds", "3"]
    inside = launch(tmp_path / "in", *flags)
    outside = launch(tmp_path / "out", *flags, "--no-fgn-lr")
    for t, (a, b) in enumerate(zip(inside, outside, strict=True)):
        assert float(a["fgn"]) == pytest.approx(0.01 * 0.5**t * float(b["fgn"]), rel=1e-12)
        assert a["loss"] == b["loss"]


def test_fim_beside_fgn_and_arms_of_every_kind(tmp_path, capsys):
    flags = ["--detector", "fgn", "growth", "fim", "--arms", *fgn.ARMS, "--detect-samples", "6", "--fgn", "per_sample"]
    rows = launch(tmp_path, *flags, "--z", "0.5", "--rounds", "5")
    printed = capsys.readouterr().out
    names = ["fedavg+cl", "fedavg+cl-growth", "fedavg+cl-fim", "fedavg", "fedavg+random", "fedavg+constant", "fedavg+shifted"]
    assert list(dict.fromkeys(row["method"] for row in rows)) == names
    clients = {name: [int(row["clients"]) for row in of(rows, name)] for name in names}
    assert sum(clients["fedavg+constant"]) == sum(clients["fedavg+shifted"]) == sum(clients["fedavg+cl"])
    assert clients["fedavg+shifted"] == np.roll(clients["fedavg+cl"], 2).tolist()
    assert set(clients["fedavg"]) == {4}
    for name in names:
        assert of(rows, name)[0]["fgn"] == of(rows, "fedavg+cl")[0]["fgn"] or name.endswith(("constant", "shifted"))
    fim = [float(row["fim"]) for row in of(rows, "fedavg+cl-fim")]
    critical = [True, *(b / a - 1 >= 0.01 for a, b in zip(fim, fim[1:], strict=False))]
    assert [row["critical"] == "1" for row in of(rows, "fedavg+cl-fim")] == critical
    assert "agree on" in printed and "MiB at peak" in printed
    first = of(rows, "fedavg+cl")[0]
    assert int(first["fim_bytes"]) >= int(first["fgn_bytes"]) > 0
    assert float(first["fim_seconds"]) > 0 and float(first["fgn_seconds"]) > 0  # which is longer is the machine's to say
    assert {path.name for path in tmp_path.glob("*.png")} == {"accuracy.png", "fgn.png"}
    with open(tmp_path / "selection.csv", newline="") as file:
        assert [line["method"] for line in csv.DictReader(file)] == names


def test_warns_where_one_doubling_reaches_all(tmp_path, capsys):
    launch(tmp_path, "--clients", "8", "--rounds", "1", "--arms", "cl")
    assert "one doubling of 4 clients reaches all 8" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- the report


def scripted(method, accuracy, clients, critical, trial=0):
    uploads = np.cumsum(clients)
    return [
        {"setting": "", "method": method, "trial": trial, "round": t + 1, "accuracy": a, "clients": n, "uploads": int(u)}
        | {"critical": c, "fgn": 2.0, "fgn_se": 0.5}
        for t, (a, n, u, c) in enumerate(zip(accuracy, clients, uploads, critical, strict=True))
    ]


def test_selection_table_by_hand():
    rows = scripted("x+cl", [10, 30, "", 50, 40, 60], [4, 8, 8, 2, 2, 2], [1, 1, 0, 0, 0, 0])
    rows += scripted("x+cl", [10, 20, "", 20, 20, 20], [4, 8, 4, 4, 2, 2], [1, 0, 0, 0, 1, 0], trial=1)
    rows += scripted("x", [5, 10, 15, 20, 30, 45], [4] * 6, [1, 0, 1, 0, 1, 0])
    rows += scripted("x", [5, 10, 15, 20, 30, 45], [4] * 6, [1, 1, 1, 0, 1, 0], trial=1)
    cl, base = fgn.selection_table(rows, "", "x")
    assert (cl["rounds_to"], cl["uploads_to"], cl["reached"]) == (4, 22, 0.5)  # 50 >= 45 in trial 1, never in trial 2
    assert (base["rounds_to"], base["uploads_to"], base["reached"]) == (6, 24, 1)
    assert cl["clients"] == pytest.approx(25 / 6) and (cl["peak"], cl["early"], cl["late"]) == (8, 6, 2)
    assert (cl["critical"], base["critical"], cl["fgn_error"]) == (2, 3.5, 25)
    assert cl["equal"] == (40 + 20) / 2  # 24 uploads are spent after round 5 of trial 1, after round 6 of trial 2
    assert base["equal"] == 45


def test_without_a_base_nothing_is_said_of_reaching_it():
    line = fgn.selection_table(scripted("x+cl", [10, 30], [4, 8], [1, 1]), "", "")[0]
    assert math.isnan(line["reached"]) and math.isnan(line["rounds_to"]) and line["equal"] == 30


def test_each_setting_of_a_sweep_is_reported_with_its_own_flags(tmp_path, monkeypatch, capsys):
    """The critical rounds that the report calls on a run's own signal are those that the run logged."""
    calls, called = fgn.calls, []

    def spied(own, name, config):
        called.append((own[0]["setting"], own[0]["method"], name, calls(own, name, config)))
        return called[-1][-1]

    monkeypatch.setattr(fgn, "calls", spied)
    monkeypatch.setitem(fgn.PRESETS, "tiny", ("two windows", {}, {"window": (1, 2), "delta": (0.02,)}))
    flags = ["--preset", "tiny", "--detector", "fgn", "fim", "--detect-samples", "4", "--rounds", "6", "--eval-every", "6"]
    rows, logged = launch(tmp_path, *flags), {}
    for row in rows:
        logged.setdefault((row["setting"], row["method"]), []).append(row["critical"] == "1")
    assert len(logged) == 6 and len(called) == 24  # three methods in two settings; FGN and FedFIM, in figure and in text
    for setting, method, name, critical in called:
        if name == ("fim" if method.endswith("fim") else "fgn"):
            assert critical == logged[setting, method]
    assert logged["window=1 delta=0.02", "fedavg"] != logged["window=2 delta=0.02", "fedavg"]  # same FGN, other windows


def test_agreement_of_the_two_detectors_by_hand():
    rows = scripted("x", [1] * 5, [4] * 5, [1] * 5)
    for row, a, b in zip(rows, (1, 2, 3, 2, 3), (1, 2, 1, 0.5, 1), strict=True):
        row |= {"fgn": a, "fim": b, "fgn_seconds": 0.001, "fim_seconds": 0.009, "fgn_bytes": 2**20, "fim_bytes": 40 * 2**20}
    config = fgn.Config(delta=0.01, window=1, fgn="batch")  # up up down up; up down down up
    text = fgn.agreement(rows, "", config)
    assert "agree on 75% of the rounds, 50% by chance (critical 75%, 50%)" in text
    assert "1.00 ms a round      1.000 MiB" in text and "9.00 ms a round     40.000 MiB" in text


# ---------------------------------------------------------------------------------------------------- set-up and command


def test_nets_have_the_specified_sizes():
    image = SimpleNamespace(x_train=torch.empty(1, 32, 32, 3, dtype=torch.uint8), classes=10)
    text = SimpleNamespace(x_train=torch.empty(1, 80, dtype=torch.int64), classes=80)
    size = {name: common.build_model(name, image).trainable for name in ("alexnet", "vgg11")}
    assert size == {"alexnet": 23_272_266, "vgg11": 9_750_922}
    assert common.build_model("alexnet", image, width=128).trainable == 2_400_586
    assert common.build_model("lstm", text).trainable == 3_739_728
    assert common.build_model("resnet18", image).trainable > 11_000_000


def test_presets_are_valid_and_cover_the_figures():
    for name in fgn.PRESETS:
        config, sweep = common.parse(fgn.Config, fgn.PRESETS, "doc", ["--preset", name])
        assert (config.clients, config.clients_per_round, config.epochs, config.lr) == (128, 16, 2, 0.01)
        assert (config.momentum, config.weight_decay, config.delta, config.lr_decay) == (0.9, 1e-5, 0.01, 0.99)
        for setting, flags in common._settings(sweep):
            each = fgn.Config(**{**vars(config), **flags})
            each.check()
            assert fgn.methods(each), setting
    wanted = {"fig1", "fig2", "fig6", "fig10", "fig11", "fig12", "fig13", "fig14", "fig15", "fig18", "fig26", "fig29", "fig31"}
    assert wanted | {"fig39", "fig47", "fig48", "fig50", "fig52", "controls"} <= fgn.PRESETS.keys()


@pytest.mark.parametrize(
    "flags, word",
    [
        ("--fewest 5", "--fewest"),
        ("--most 3", "--most"),
        ("--most 13", "--most"),
        ("--p-double .8", "--p-double"),
        ("--arms base constant", "add cl"),
        ("--detector fgn growth --clients-per-round 3", "set --fewest 2"),
        ("--detector growth --fewest 1", "set --fewest 2"),
        ("--delta -1", "--delta"),
        ("--base scaffold", "--base"),
        ("--detector fisher", "--detector"),
        ("--lr-decay 1.1", "--lr-decay"),
        ("--window 0", "--window"),
        ("--model lstm", "--model"),
    ],
)
def test_wrong_flags_give_one_line_and_2(tmp_path, flags, word, capsys):
    with pytest.raises(SystemExit) as stop:
        launch(tmp_path, *flags.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and word in error and "Traceback" not in error
    assert len([line for line in error.splitlines() if "error:" in line]) == 1


def test_growth_is_allowed_where_an_error_is_known_or_not_asked_for():
    for flags in ("--fewest 2 --clients-per-round 3", "--z 0 --fewest 1", "--clients 1 --clients-per-round 1", ""):
        common.parse(fgn.Config, fgn.PRESETS, "doc", [*TINY, "--detector", "growth", *flags.split()])


def same_results(a, b, methods):
    strip = [[{k: v for k, v in row.items() if "seconds" not in k} for row in read(folder)] for folder in (a, b)]
    assert strip[0] == strip[1]
    assert all(torch.equal(weights(a, method), weights(b, method)) for method in methods)


def test_jobs_do_not_change_a_bit(tmp_path, capsys):
    flags = ["--arms", "cl", "base", "constant", "--rounds", "3"]
    launch(tmp_path / "one", *flags)
    launch(tmp_path / "two", *flags, "--jobs", "2")
    same_results(tmp_path / "one", tmp_path / "two", ["fedavg+cl", "fedavg", "fedavg+constant"])


def test_killed_run_resumes_to_the_same_result(tmp_path, capsys):
    flags = [*TINY, "--rounds", "12", "--base", "fedyogi", "--detector", "growth", "--window", "2", "--arms", "cl", "random"]
    command = [sys.executable, str(SCRIPT), *flags, "--out", str(tmp_path / "killed")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
    path = tmp_path / "killed" / "checkpoints" / "fedyogi+cl-growth-trial0.pt"
    while process.poll() is None and not path.exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    begun = common.load_checkpoint(path)["round"]
    fgn.main([*flags, "--out", str(tmp_path / "killed"), "--resume"])
    fgn.main([*flags, "--out", str(tmp_path / "whole")])
    assert 1 <= begun <= 12
    same_results(tmp_path / "killed", tmp_path / "whole", ["fedyogi+cl-growth", "fedyogi+random"])


def test_lstm_learns_next_characters_of_speaking_roles(tmp_path, real_data, capsys):
    """Clients are roles; a few rounds bring the loss far below that of guessing among 80 characters."""
    flags = ["--dataset", "shakespeare", "--data-dir", str(real_data), "--model", "lstm", "--partition", "natural"]
    flags += [
        "--width",
        "16",
        "--clients",
        "20",
        "--clients-per-round",
        "4",
        "--rounds",
        "3",
        "--lr",
        "0.5",
        "--min-size",
        "20",
    ]
    rows = launch(tmp_path, *flags, "--no-cl", "--epochs", "1")
    assert float(rows[-1]["loss"]) < 0.85 * math.log(80)
