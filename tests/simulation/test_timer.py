"""Durations of a run exclude compilation."""

import time

import jax.monitoring
import pytest

import fedrax
from fedrax.simulation.timer import Compilations
from tests.simulation.problems import run


def test_nested_intervals_are_counted_once() -> None:
    """Against the measure of the union, second by second."""
    spans = [(0.0, 1.0), (2.0, 3.0), (4.0, 5.0), (1.5, 6.0), (7.0, 7.5), (7.4, 8.0)]
    made, covered = Compilations(), set()
    for start, end in spans:
        made.add(start, end)
        covered |= set(range(round(10 * start), round(10 * end)))
        assert made.seconds == pytest.approx(len(covered) / 10)


def test_reported_time_does_not_decrease() -> None:
    """If another thread's compilation began before the clock was read, or a clock was adjusted."""
    made = Compilations()
    made.heard("/jax/core/compile/backend_compile_duration", 50.0)
    before = made.elsewhere()
    made.heard("/jax/core/compile/backend_compile_duration", 100.0)
    made.heard("/jax/core/compile/jaxpr_trace_duration", 70.0)
    assert made.elsewhere() == pytest.approx(before, abs=0.5)
    assert made.elsewhere() >= before


def test_first_run_has_the_duration_of_a_second_one() -> None:
    """Compilation of its own program (a batch size that no other test has) takes much longer than its three rounds.

    On machines of any speed, the elapsed time is at least that of the rounds plus the compilation that JAX reports.
    """
    method = fedrax.FedAvg(local=fedrax.LocalSGD(lr=0.05, steps=3, batch_size=11))
    heard = Compilations()
    jax.monitoring.register_event_duration_secs_listener(heard.heard)
    try:
        began = time.monotonic()
        first = run(method, rounds=3).events[-1]["seconds"]
        took = time.monotonic() - began
    finally:
        jax.monitoring.unregister_event_duration_listener(heard.heard)
    assert heard.seconds > 0
    assert 0 < first < took - heard.seconds
