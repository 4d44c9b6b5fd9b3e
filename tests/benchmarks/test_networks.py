"""The networks of `benchmarks.networks`: their outputs, one measurement, and the page."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.network_cases import CASES
from benchmarks.networks import COLD, JAX, WARM, measure_here, sections
from benchmarks.runners import run_jax_network
from benchmarks.runners.linen_networks import network
from benchmarks.sessions import Session
from tests.benchmarks.test_storage_benchmark import MACHINE


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("name", CASES)
def test_outputs_have_the_shape_of_the_labels(name: str) -> None:
    case, module = CASES[name], network(name)
    x, y = case.arrays()
    assert len(x) == len(y) == case.batch * case.steps
    made = jax.eval_shape(module.init, jax.random.key(0), x[:2])
    outputs = jax.eval_shape(lambda v: module.apply(v, x[:2]), made)  # as in evaluation
    assert outputs.shape == (2, *case.labels, case.classes)


@pytest.mark.slow
def test_measurement_of_one_network() -> None:
    measured = measure_here("mnist_cnn")
    assert measured["parameters"] == 824_458  # 320 + 18,496 + 803,072 + 2,570
    assert 0 < measured["round"] < measured["first"]
    loop = run_jax_network.measure("mnist_cnn", rounds=2)
    assert loop["parameters"] == 824_458
    assert 0 < loop["round"] < loop["first"]


def test_page_compares_with_the_faster_loop(tmp_path: Path) -> None:
    seconds = {
        COLD: (0.21, 3.0, 500.0),
        WARM: (0.19, 2.0, 400.0),
        JAX: (0.1, 9.0, 700.0),
        "1 threads": (0.3, 0, 0),
        "2 threads": (0.25, 0, 300),
    }
    runs = [
        {"network": "vgg", "setting": setting, "round": took, "first": first, "parameters": 1000, "peak_pss_mb": peak}
        for setting, (took, first, peak) in seconds.items()
    ]
    runs += [{"network": "unet", "setting": COLD, "failed": "no memory"}]
    text = "\n".join(sections(Session(tmp_path / "a.jsonl", {"id": "x", "date": "today", "machine": MACHINE}, runs)))
    assert "as fast or faster on 1 of 1; the median ratio, PyTorch's time over ours, is 1.25, plain JAX's 0.50" in text
    assert "leaves out what the host does between two" in text
    assert (
        "| vgg | six 3x3 convolutions, max pooling | 1,000 | 200 | 250 | 100 | 1.25 | 3 / 2 / 9 | 500 / 400 / 300 |"
        in text
    )
    assert f"- **unet, {COLD} failed**" in text


def test_samples_are_drawn_for_every_kind_of_input() -> None:
    assert {CASES[name].arrays()[0].dtype for name in ("vgg", "characters")} == {np.dtype("f4"), np.dtype("i4")}
