"""Reports about partitions, natural clients and preprocessing."""

from __future__ import annotations

import json
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedrax
from fedrax import Dataset, Federation, FedraxError, FedraxWarning, classification
from fedrax.contract import Model
from fedrax.data import DirichletClasses, Iid, Natural, as_samples, load
from fedrax.models import Linear
from tests.reported.problems import LOCAL, Y, run


def clients_in_features(federation: Federation, part: str) -> list[set[int]]:
    """The client number in x, by the client that has the row."""
    samples = federation.train if part == "train" else federation.test
    offsets = federation.offsets if part == "train" else federation.test_offsets
    assert offsets is not None
    return [set(samples.x[a:b, 0].astype(int).tolist()) for a, b in pairwise(offsets)]


@pytest.mark.parametrize("reader", ["arrays", "csv"])
def test_clients_have_their_own_test_rows_in_any_order_of_the_files(reader: str, tmp_path: Path):
    code = {"a": 1, "b": 2, "c": 3, "d": 4}
    train, test = list("bbacb"), list("dcbc")  # d has no training row, a no test row
    if reader == "arrays":
        x, tested = ([[float(code[i]), 0.0] for i in ids] for ids in (train, test))
        y, z = np.arange(5) % 2, np.arange(4) % 2
        federation = Federation.from_arrays(np.array(x), y, train, test=(np.array(tested), z), test_client_ids=test)
    else:
        for name, ids in (("train.csv", train), ("test.csv", test)):
            lines = [f"{code[i]},{k % 2},{i}" for k, i in enumerate(ids)]
            (tmp_path / name).write_text("\n".join(["code,label,client", *lines]))
        paths = {"path": tmp_path / "train.csv", "test_path": tmp_path / "test.csv"}
        table = load("csv", **paths, label="label", client="client", standardize="none")
        federation = Federation.from_dataset(table, Natural(), seed=0)
    assert federation.client_names == ("a", "b", "c")
    assert clients_in_features(federation, "train") == [{1}, {2}, {3}]
    assert clients_in_features(federation, "test") == [set(), {2}, {3}]
    assert len(federation.test.y) == 4 and federation.test.x[-1, 0] == 4  # rows of no client of the federation


@pytest.mark.parametrize("omega", [1e-3, 0.2, 100.0])
def test_classes_that_run_out_leave_no_row_behind(omega: float):
    y = np.repeat([0, 1, 2], [90, 9, 1])
    samples = as_samples(np.arange(100.0)[:, None], y)
    data = Dataset("skewed", samples, samples, 3)
    for seed in range(20):
        rows, offsets = DirichletClasses(clients=2, omega=omega).assign(data, seed)
        assert np.diff(offsets).tolist() == [50, 50] and sorted(rows.tolist()) == list(range(100))


def test_an_iid_partition_of_sorted_rows_is_mixed():
    samples = as_samples(np.zeros((200, 1)), np.repeat([0, 1], 100))
    federation = Federation.from_dataset(Dataset("sorted", samples, samples, 2), Iid(clients=2), seed=0)
    counts = fedrax.data.label_counts(federation)
    assert counts.sum() == 200 and (np.abs(counts - 50) < 20).all()  # four standard deviations are 14


def test_users_outside_of_the_training_part_are_test_rows_only(tmp_path: Path):
    def write(part: str, users: dict[str, float]) -> None:
        data = {name: {"x": [[value, 1.0]] * 3, "y": [0, 1, 1]} for name, value in users.items()}
        content = {"users": list(users), "num_samples": [3] * len(users), "user_data": data}
        (tmp_path / part).mkdir()
        (tmp_path / part / "all.json").write_text(json.dumps(content))

    write("train", {"u1": 1.0, "u2": 2.0})
    write("test", {"u3": 3.0, "u4": 4.0})
    federation = Federation.from_dataset(load("leaf", path=tmp_path), Natural(), seed=0)
    assert federation.client_names == ("u1", "u2")
    assert clients_in_features(federation, "train") == [{1}, {2}]
    assert federation.test_offsets is None and set(federation.test.x[:, 0].tolist()) == {3.0, 4.0}


def test_bytes_of_images_are_scaled_before_they_are_standardized():
    flat = Model(lambda key: np.ones((2, 3)), lambda w, x, key=None: x.reshape(len(x), 2) @ w, name="flat")
    images = np.random.default_rng(0).integers(0, 256, (10, 2, 1), np.uint8)
    arrays: dict[str, Any] = {"x": images, "y": Y[:10], "client_ids": [0] * 10, "num_classes": 3}
    once: dict[str, Any] = {"rounds": 1, "cohort_size": 1}
    federation = Federation.from_arrays(**arrays, pixels=True, mean=(0.5,), std=(0.25,))
    task = classification(flat, federation.preprocess())
    inputs = (federation.train.x.reshape(10, 2) / 255 - 0.5) / 0.25
    np.testing.assert_allclose(task.outputs(np.ones((2, 3)), federation.train.x), inputs @ np.ones((2, 3)), rtol=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FedraxWarning)
        run(fedrax.FedAvg(local=LOCAL), federation, task=task, **once)
    with pytest.warns(FedraxWarning, match=r"from 0 to 255: give the task federation\.preprocess\(\)"):
        run(fedrax.FedAvg(local=LOCAL), federation, task=classification(flat), **once)
    unmarked, zoo = Federation.from_arrays(**arrays), classification(Linear().build((2, 1), 3))
    with pytest.warns(FedraxWarning, match="from 0 to 255: if they are images, set pixels=True"):
        run(fedrax.FedAvg(local=LOCAL), unmarked, task=zoo, **once)
    with pytest.raises(FedraxError, match="mean must lie in 0 to 1"):
        Federation.from_arrays(**arrays, pixels=True, mean=(127.5,), std=(64.0,))
    with pytest.raises(FedraxError, match="mean and std standardize image bytes"):
        Federation.from_arrays(**arrays | {"x": images / 255}, mean=(0.5,), std=(0.25,))
