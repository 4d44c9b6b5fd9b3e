"""Synthetic(alpha, beta): the moments of its definition."""

import numpy as np
import pytest

from fedrax.data import Federation, Natural, load
from fedrax.errors import FedraxError


def test_shapes_sizes_and_test_data_of_devices():
    dataset = load("synthetic", alpha=1.0, beta=1.0)
    assert dataset.train.x.shape[1] == 60 and dataset.train.x.dtype == np.float32
    assert dataset.num_classes == 10 and dataset.name == "synthetic_1_1"
    federation = Federation.from_dataset(dataset, Natural(), 0)
    assert federation.num_clients == 30 and federation.test_offsets is not None
    test = np.diff(federation.test_offsets)
    total = federation.sizes + test
    assert total.min() >= 50 and np.array_equal(test, total // 10)


def test_shares_are_rounded_down_exactly():
    """0.29 x 100 is 28.999999999999996 in float64."""
    dataset = load("synthetic", devices=400, features=2, test_fraction=0.29)
    test, train = (np.bincount(owner, minlength=400) for owner in (dataset.test_clients, dataset.train_clients))
    assert ((test + train) % 100 == 0).any() and np.array_equal(test, (test + train) * 29 // 100)


def test_sizes_are_lognormal():
    dataset = load("synthetic", devices=2000, features=2, test_fraction=0.0)
    sizes = np.bincount(dataset.train_clients)
    logs = np.log(sizes - 50 + 0.5)
    assert np.median(logs) == pytest.approx(4, abs=0.2)
    assert logs[logs > 2].std() < logs.std() < 2.2


def test_features_have_the_power_law_variance_and_the_means_spread_by_beta():
    dataset = load("synthetic", alpha=0.0, beta=2.0, devices=300, features=20, test_fraction=0.0, seed=1)
    x, device = dataset.train.x, dataset.train_clients
    sizes = np.bincount(device)
    means = np.stack([np.bincount(device, x[:, j]) for j in range(20)], axis=1) / sizes[:, None]
    inside = ((x - means[device]) ** 2).sum(axis=0) / (len(x) - 300)
    assert inside == pytest.approx(np.arange(1, 21) ** -1.2, rel=0.05)
    # v_kj ~ N(B_k, 1) with B_k ~ N(0, beta^2): the mean over j has variance beta^2 + 1/20
    assert means.mean(axis=1).std() == pytest.approx(np.sqrt(4.05), rel=0.15)


def accuracy_on_unseen_devices(dataset) -> float:
    """Accuracy on the second half of the devices of a least-squares classifier fitted to the first half."""
    inputs = np.hstack([dataset.train.x.astype(np.float64), np.ones((len(dataset.train.y), 1))])
    first = dataset.train_clients < 50
    fitted = np.linalg.lstsq(inputs[first], np.eye(10)[dataset.train.y[first]], rcond=None)[0]
    return np.mean(np.argmax(inputs[~first] @ fitted, axis=1) == dataset.train.y[~first])


def test_iid_devices_share_one_model_and_one_distribution():
    iid = load("synthetic", iid=True, devices=100, seed=2)
    assert iid.name == "synthetic_iid"
    assert np.abs(iid.train.x.mean(axis=0)).max() < 0.05
    apart = load("synthetic", alpha=1.0, beta=1.0, devices=100, seed=2)
    assert accuracy_on_unseen_devices(iid) > 0.6  # one linear model explains all labels ...
    assert accuracy_on_unseen_devices(apart) < 0.3  # ... and almost none if each device has its own model


def test_seeds_determine_the_data():
    one, again, other = (load("synthetic", seed=s).train for s in (0, 0, 1))
    assert np.array_equal(one.x, again.x) and np.array_equal(one.y, again.y)
    assert one.x.shape != other.x.shape


@pytest.mark.parametrize(
    "options",
    [{"alpha": -1.0}, {"devices": 0}, {"classes": 1}, {"test_fraction": 1.0}, {"devices": 10_000_000}],
)
def test_impossible_options_are_rejected(options):
    with pytest.raises(FedraxError):
        load("synthetic", **options)
