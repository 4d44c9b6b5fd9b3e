"""Runs outside of the main thread: concurrent, after the main thread has ended, and with Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from fedrax.simulation.process import numeric_context
from tests.simulation.problems import assert_identical, run

SINGLE = ("float32", "float64")


def test_concurrent_runs_equal_separate_ones():
    """Also with other dtypes, which used to crash the process."""
    again: list[dict[str, Any]] = [{"dtype": dtype, "seed": seed} for seed in range(6) for dtype in SINGLE]
    alone = [run(eval_every=1, rounds=20, **one) for one in again]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda one: run(eval_every=1, rounds=20, **one), again))
    for one, other in zip(alone, together, strict=True):
        assert_identical(one, other)


def test_process_settings_are_restored_after_overlapping_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    with threadpool_limits(3, user_api="blas"):
        before = [library["num_threads"] for library in threadpool_info()]
        first, second = numeric_context("float32"), numeric_context("float32")
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
            for pool, step in ((one, first.__enter__), (other, second.__enter__)):
                pool.submit(step).result()
            assert os.environ["OPENBLAS_NUM_THREADS"] == "1"
            for pool, step in ((one, first.__exit__), (other, second.__exit__)):
                pool.submit(step, None, None, None).result()
        assert "OPENBLAS_NUM_THREADS" not in os.environ
        assert [library["num_threads"] for library in threadpool_info()] == before


LATER = """
import threading, time
from tests.simulation.problems import run

def work():
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    time.sleep(0.2)  # until executors have been told that it is over
    print(len(run(samples="streamed").events))

threading.Thread(target=work).start()
"""


def test_run_may_begin_after_the_main_thread_has_ended():
    paths = os.pathsep.join(path for path in sys.path if path)
    completed = subprocess.run(
        [sys.executable, "-c", LATER], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert completed.stdout == "4\n", completed.stderr


def test_ctrl_c_reaches_a_thread_that_waits_for_a_run():
    """Polars makes system calls continue after a signal."""
    signal.siginterrupt(signal.SIGINT, False)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    over = threading.Event()
    knock = threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    late = threading.Timer(20, over.set)
    knock.start()
    late.start()
    with pytest.raises(KeyboardInterrupt):
        over.wait()
    late.cancel()
    assert not over.is_set()
