"""Shared code of the benchmarks: arrays, fedrax's runner, the check of equal work, tables."""

import json
import os
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest

from benchmarks import methods, precision, profiles
from benchmarks.fedrax_clock import Times, time_rounds
from benchmarks.fedrax_problems import federation_of, model_of, parameters_of, random_images
from benchmarks.make_arrays import ensure_arrays, make_arrays, source_text
from benchmarks.peers_report import best_peers, disagreements, rows, table, write_report
from benchmarks.quiet import printed_result, run_quietly
from benchmarks.runners.jax_models import MODELS, parameters
from benchmarks.scaling import Measured, axes, exponent
from benchmarks.sessions import Session
from benchmarks.starting_weights import WEIGHTS, starting_weights
from benchmarks.timing import RESULT_PREFIX
from benchmarks.workloads import WORKLOADS, Arrays, flop_per_round, read_array, steps_per_round
from fedrax import FedAvg, LocalSGD, Settings, classification
from fedrax.config.hyperparameters import check
from fedrax.experiments.method_registry import algorithms
from fedrax.simulation import Script
from fedrax.simulation.setup import prepare
from tests.benchmarks.test_storage_benchmark import MACHINE


@pytest.fixture(scope="module")
def regression(tmp_path_factory):
    return Arrays(ensure_arrays("W2", tmp_path_factory.mktemp("arrays")))


def test_arrays_are_reproducible(regression):
    again = make_arrays(WORKLOADS["W2"])
    assert np.array_equal(again["x"], regression.x)
    assert np.array_equal(again["cohorts"], regression.cohorts)
    assert regression.x.ctypes.data % 64 == 0
    assert set(regression.initial) == {"fc.weight", "fc.bias"}


def test_flops_of_a_round(regression):
    workload = WORKLOADS["W2"]
    # 3000 samples, 10 epochs, 60 x 10 weights: 2 operations each for forward pass and weight gradient
    assert flop_per_round(workload, regression.offsets, regression.cohorts) == 3000 * 10 * 600 * 2 * 2
    assert steps_per_round(workload, regression.offsets, regression.cohorts) == 3000


def test_truncated_file_is_rejected(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(100))
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-1])
    with pytest.raises(ValueError, match="ends early"):
        read_array(tmp_path / "a.npy")


@pytest.mark.parametrize(("name", "shape"), [("W1", (784,)), ("W3", (32, 32, 3)), ("W4", (25, 50))])
def test_fedrax_has_the_shared_initial_parameters(name, shape):
    workload, rng = WORKLOADS[name], np.random.default_rng(0)
    weights = WEIGHTS[name](rng)
    x = rng.standard_normal((4, *shape), np.float32)
    actual = model_of(workload).apply(parameters_of(workload, weights), x)
    desired = MODELS[name](parameters(workload, weights), jax.numpy.asarray(x))
    np.testing.assert_allclose(actual, desired, atol=1e-5)


def test_fedrax_runs_the_benchmark_rounds(regression):
    """Two rounds against a plain NumPy loop over clients and batches."""
    workload = replace(WORKLOADS["W2"], epochs=2)
    w, b = np.zeros((60, 10)), np.zeros(10)
    for cohort in regression.cohorts[:2]:
        total, mean_w, mean_b = sum(regression.size(k) for k in cohort), np.zeros_like(w), np.zeros_like(b)
        for k in cohort:
            cw, cb = w.copy(), b.copy()
            x, y = regression.x[regression.rows(k)].astype(float), regression.y[regression.rows(k)]
            for start in [*range(0, len(y), workload.batch)] * workload.epochs:
                bx, by = x[start : start + workload.batch], y[start : start + workload.batch]
                p = np.exp(bx @ cw + cb)
                error = (p / p.sum(axis=1, keepdims=True) - np.eye(10)[by]) / len(by)
                cw -= workload.learning_rate * bx.T @ error
                cb -= workload.learning_rate * error.sum(axis=0)
            mean_w, mean_b = mean_w + cw * regression.size(k) / total, mean_b + cb * regression.size(k) / total
        w, b = mean_w, mean_b

    local = LocalSGD(lr=workload.learning_rate, epochs=2, batch_size=workload.batch, order="stored")
    clock, result = time_rounds(
        FedAvg(local=local),
        classification(model_of(workload)),
        federation_of(regression),
        2,
        params=parameters_of(workload, regression.initial),
        script=Script(cohorts=regression.cohorts),
        cohort_size=workload.cohort,
        weights="samples",
    )
    np.testing.assert_allclose(result.params["output"]["weight"], w.T, atol=2e-5)
    np.testing.assert_allclose(result.params["output"]["bias"], b, atol=2e-5)
    assert len(clock.seconds) == 1  # the last round includes an evaluation and is not counted


def test_clock_measures_between_the_first_and_the_last_round():
    times = Times()
    times.own, times.working = [1.0, 1.1, 1.2, 1.5], [11.0, 11.2, 11.2, 11.8]
    times.began, times.wall = 20.0, [23.0]  # of which two seconds are compilation
    seconds = times.clock().seconds
    assert seconds == pytest.approx([3.0, 0.2, 0.2])  # 0.3 s of the host, shared by three rounds


def test_random_images_repeat_and_do_not_share_memory():
    federation = random_images(4000, 2, 10)
    assert federation.train.x.shape == (8000, 28, 28)
    assert np.array_equal(federation.train.x[5000:], federation.train.x[:3000])
    assert not np.array_equal(federation.train.x[0], federation.train.x[1])


def run(simulator, loss, milliseconds, workload="W1", repeat=1, foreign=0.0):
    return {
        "workload": workload,
        "simulator": simulator,
        "setting": "any",
        "repeat": repeat,
        "round_median": milliseconds / 1e3,
        "first_round": 1.0,
        "first_round_with_import": 2.0,
        "peak_pss_mb": 100.0,
        "test_loss": loss,
        "foreign_cpu": foreign,
        "versions": {"it": "1"},
    }


def test_simulator_with_different_work_is_named(tmp_path):
    session = Session(tmp_path / "a.jsonl", {}, [run("A", 1.0, 10), run("B", 1.0005, 20), run("C", 1.01, 5)])
    assert len(disagreements(session)) == 1
    assert "C (any) ends W1 at test loss 1.0100" in disagreements(session)[0]
    session.runs[2]["test_loss"] = float("nan")
    assert "C (any)" in disagreements(session)[0]


def test_failed_run_counts_until_it_is_repeated(tmp_path):
    failed = {"workload": "W1", "simulator": "A", "setting": "any", "repeat": 1, "failed": "killed"}
    session = Session(tmp_path / "a.jsonl", {}, [failed])
    assert disagreements(session) == ["A (any) failed on W1, repeat 1"]
    session.runs.append(run("A", 1.0, 10))
    assert disagreements(session) == []


def test_table_compares_undisturbed_runs_with_the_best_peer(tmp_path):
    runs = [run("fedrax", 1.0, 5), run("A", 1.0, 20), run("A", 1.0, 90, repeat=2, foreign=1.0), run("B", 1.0, 30)]
    session = Session(tmp_path / "a.jsonl", {}, runs)
    assert best_peers(rows(session)) == {"W1": 0.02}
    assert "| fedrax, any | 5 (4.00×) |" in table(session)
    assert "| A | 20 (1.00×) |" in table(session)


def test_ten_workloads_are_sorted_numerically(tmp_path):
    runs = [run(name, 1.0, 5, workload=f"W{i}") for i in (10, 2, 1, 3, 4) for name in ("fedrax", "A")]
    machine = dict.fromkeys(("memory_gib", "gemm_gflops_1_thread", "gemm_gflops_all_cores"), 300.0)
    machine |= dict.fromkeys(("copy_gb_per_second_1_thread", "copy_gb_per_second_all_cores"), 40.0)
    machine |= {"cpu": "a processor", "cores": 2, "system": "Linux", "python": "3"}
    facts = {f"W{i}": {"source": "synthetic", "flop": 1e9, "steps": 5.0} for i in (1, 2, 3, 4, 10)}
    header = {"id": "x", "date": "today", "machine": machine, "workloads": facts}
    session = Session(tmp_path / "a.jsonl", header, runs)
    assert table(session).startswith("|  | W1 | W2 | W3 | W4 | W10 |")
    page, *pictures = write_report(session, tmp_path)
    headings = [line.split(":")[0] for line in page.read_text().splitlines() if line.startswith("### ")]
    assert headings == ["### W1", "### W2", "### W3", "### W4", "### W10"]
    assert all(picture.stat().st_size > 10_000 for picture in pictures)


@pytest.mark.parametrize("source", ["mnist", "gaussian", None])
def test_page_names_the_source_of_the_samples_of_w1(tmp_path, source):
    ends = {"accuracy": [0.9, 0.8], "loss": [1.0, 2.0], "platform": "cpu"}
    runs = [{"workload": w, "precision": p} | ends for w in precision.WORKLOADS for p in precision.PRECISIONS]
    header = {"id": "x", "date": "today", "machine": MACHINE} | ({"source": source} if source else {})
    cost = [methods.Measured("fedavg", 0.01, 100.0, 1.0, 100.0, 0.0)]
    page, *_ = methods.write_report(Session(tmp_path / "a.jsonl", header), cost, tmp_path)
    texts = [
        page.read_text(),
        "\n".join(precision.sections(Session(tmp_path / "a.jsonl", header, runs))),
        "\n".join(profiles.sections(Session(tmp_path / "a.jsonl", header))),
    ]
    assert all(source_text(source) in text for text in texts)


def test_synthetic_samples_are_not_called_mnist(tmp_path):
    facts = {"W1": {"source": "gaussian", "flop": 1e9, "steps": 5.0}}
    header = {"id": "x", "date": "today", "machine": MACHINE, "workloads": facts}
    page, *_ = write_report(Session(tmp_path / "a.jsonl", header, [run("A", 1.0, 10)]), tmp_path)
    assert source_text("gaussian") in page.read_text()
    assert "Gaussian classes, sorted by label" in page.read_text()


def test_session_files_are_read_back(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [{"kind": "session", "id": "x"}, {"kind": "session", "id": "y"}, {"kind": "run", "session": "x"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    session = Session.latest(path)
    session.add({"value": 1})
    assert [run["value"] for run in Session.latest(path).runs] == [1]


def test_exponent_of_a_power():
    axis = axes()["cohort"]
    points = [Measured(p, 3.0 * axis.size(p) ** 0.7, 0, 0, 0) for p in axis.points()]
    assert exponent(axis, points) == pytest.approx(0.7)


@pytest.mark.slow
def test_cpu_time_of_other_processes_is_measured():
    code = f"import time; block = bytearray(120 << 20)\nprint({RESULT_PREFIX!r} + '{{\"value\": 7}}'); time.sleep(1)"
    result = run_quietly([sys.executable, "-c", code], dict(os.environ), max_wait=0, timeout=1800)
    assert result["value"] == 7
    assert 110 < result["peak_pss_mb"] < 400
    late = run_quietly([sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ), 0, timeout=1)
    assert late["timed_out"]
    assert late["wall_seconds"] < 20
    assert printed_result("nothing here") is None


def test_parameters_have_the_models_shapes():
    for workload in WORKLOADS.values():
        ours = parameters_of(workload, starting_weights(workload, np.random.default_rng(0)))
        models = jax.eval_shape(model_of(workload).init, jax.random.key(0))
        assert jax.tree.map(np.shape, ours) == jax.tree.map(lambda leaf: leaf.shape, models)


def test_every_algorithm_is_in_the_methods_benchmark():
    for name in (*algorithms(), *methods.CLIPPED):
        check(methods.method(name))
    task = classification(model_of(WORKLOADS["W1"]))
    for name in methods.OPTIONS:
        prepare(methods.method(name), task, random_images(6, 12, 10), Settings(rounds=1, cohort_size=5, devices=1))
