"""A round costs its slowest client: `clock` and `waiting` against a computation by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

import common
import experiment
from data import load_data

BASES = {"fedavg": 1, "fedprox": 1, "scaffold": 2, "fednova": 1, "vrlsgd": 1, "moon": 1}
BASES |= {"fedadagrad": 1, "fedyogi": 1, "fedadam": 1, "solo": 0}  # nets a client receives, sends


def federation(**flags) -> common.Federation:
    config = experiment.Config(clients=3, clients_per_round=3, **flags)
    return common.Federation(config, load_data("digits"), common.Streams(0))


def update(samples: list[int]) -> SimpleNamespace:
    return SimpleNamespace(clients=np.arange(3), samples=np.array(samples), moves_frozen=False)


def test_three_clients_by_hand():
    """Twice as slow: 100 samples in 2 s; a quarter of the bandwidth: 4 MB each way in 32 s."""
    fl = federation()
    fl.model.size = 1_000_000  # 4 MB in float32
    fl.devices = np.array([[1.0, 2.0, 1.0], [1.0, 1.0, 0.25]])
    cost = fl.cost(update([100, 100, 300]))
    seconds = [1 + 8, 2 + 8, 3 + 32]
    assert cost["samples"] == 500
    assert cost["clock"] == pytest.approx(35)
    assert cost["waiting"] == pytest.approx(1 - np.mean(seconds) / 35)
    cost = fl.cost(update([100, 100, 300]), received=3_000_000)  # a net more for each
    assert cost["clock"] == pytest.approx(3 + 12 / 0.25)
    cost = fl.cost(update([100, 100, 300]), sent=30, scorers=20)  # others receive meanwhile
    assert cost["received_mb"] == pytest.approx(12 + 80)
    assert cost["sent_mb"] == pytest.approx(12 + 30 * 4e-6)
    assert cost["clock"] == pytest.approx(3 + 8.00004 / 0.25)


@pytest.mark.parametrize("base", BASES)
def test_alike_devices_differ_by_their_samples_alone(base):
    fl = federation(base=base)
    travel = 2 * BASES[base] * fl.model.size * 4 / 1e6
    cost = fl.cost(update([100, 50, 0]))
    assert cost["clock"] == pytest.approx(1 + travel)
    assert cost["waiting"] == pytest.approx(0.5 / (1 + travel))


def test_devices_are_log_normal_and_the_same_in_every_arm():
    data = load_data("digits")
    devices = []
    for epochs in (1, 2):
        small = experiment.Config(clients=30, device_spread=0.5, epochs=epochs, alpha=1.0)
        devices.append(common.Federation(small, data, common.Streams(7)).devices)
    np.testing.assert_array_equal(devices[0], devices[1])
    np.testing.assert_allclose(np.log(devices[0]).std(), 0.5, rtol=0.3)
    assert (federation().devices == 1).all()
