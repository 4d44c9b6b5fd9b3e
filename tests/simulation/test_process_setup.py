"""Process-wide setup of JAX: threads, forks, and memory returned to the system."""

import ctypes
import json
import os
import subprocess
import sys

import jax
import jax.monitoring
import jax.numpy as jnp
import pytest

HAS_TRIM = os.name == "posix" and hasattr(ctypes.CDLL(None), "malloc_trim")

FRAGMENTS = """
import ctypes, json, resource
import jax
from fedrax import devices

devices.use_all_cores()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def resident():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * resource.getpagesize() / 2**20

def fragmented(megabytes):
    held = [libc.malloc(2**16) for _ in range(16 * megabytes)]
    for block in held:
        ctypes.memset(block, 1, 2**16)
    for block in held[:-1]:  # the last one keeps the heap from shrinking by itself
        libc.free(block)

fragmented(200)
before = resident()
for event, seconds in SHORT, OTHER, LONG:
    jax.monitoring.record_event_duration_secs(event, seconds)
    print(json.dumps(before - resident()))
"""


@pytest.mark.skipif(not HAS_TRIM, reason="only glibc keeps freed memory and has malloc_trim")
def test_memory_freed_by_compilation_is_returned_to_the_system():
    from fedrax.devices import _COMPILE_EVENT

    script = FRAGMENTS.replace("SHORT", repr((_COMPILE_EVENT, 0.001))).replace("LONG", repr((_COMPILE_EVENT, 1.0)))
    script = script.replace("OTHER", repr(("/another/event", 1.0)))
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=1800, check=True)
    short, other, long = (json.loads(line) for line in completed.stdout.splitlines())
    assert short < 20 and other < 20 and long > 150


def test_jax_reports_compilations_under_the_expected_name():
    """Otherwise the listener would never be called."""
    from fedrax.devices import _COMPILE_EVENT

    seen: list[str] = []

    def listener(event: str, duration_secs: float, **_: str | int) -> None:
        seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        jax.jit(lambda x: jnp.sin(x) + 3)(1.0)
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert _COMPILE_EVENT in seen


UNEQUAL_DEVICES = """
import time
import jax, jax.numpy as jnp, numpy as np
import fedrax
from fedrax.models import Logistic

task = fedrax.classification(Logistic().build((4,), 3))

def slow(x):
    if x.max() > 100:  # one client's mark
        time.sleep(45)
    return x

def loss(params, batch, key):
    x = jax.pure_callback(slow, jax.ShapeDtypeStruct(batch.x.shape, batch.x.dtype), batch.x)
    return task.loss(params, batch._replace(x=jnp.minimum(x, 1)), key)

rng = np.random.default_rng(0)
x, y = rng.normal(size=(20, 4)).astype(np.float32), rng.integers(0, 3, 20)
x[0] = 1000
federation = fedrax.Federation.from_arrays(x, y, offsets=np.array([0, 10, 20]), shuffle=False)
local = fedrax.LocalSGD(lr=0.1, steps=1, batch_size=10)
waiting = fedrax.Task(init=task.init, loss=loss)
result = fedrax.simulate(fedrax.FedAvg(local=local), waiting, federation, rounds=1, cohort_size=2)
assert "each of 2 CPU cores" in result.plan, result.plan
print(result.events[-1]["seconds"])
"""


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_devices_wait_for_each_other_without_a_time_limit():
    """By default XLA warns after 20 seconds and ends the process after 40."""
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}
    completed = subprocess.run(
        [sys.executable, "-c", UNEQUAL_DEVICES], capture_output=True, text=True, env=environment, check=False
    )
    assert completed.returncode == 0, completed.stderr
    assert float(completed.stdout) > 45
    assert not completed.stderr


ONE_CORE = """
import jax
jax.numpy.ones(3).block_until_ready()
import fedrax
fedrax.simulation.use_all_cores()
fedrax.simulation.use_all_cores()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_using_jax_before_fedrax_warns_of_idle_cores():
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    completed = subprocess.run(
        [sys.executable, "-c", ONE_CORE], capture_output=True, text=True, env=environment, check=True
    )
    assert completed.stderr.count("call fedrax.simulation.use_all_cores()") == 1


FORKED = """
import multiprocessing, warnings
import fedrax, jax
from tests.simulation.problems import run

def child(_):
    try:
        run(rounds=1)
    except fedrax.FedraxError as error:
        return str(error)

warnings.simplefilter("ignore")  # JAX's own
with multiprocessing.get_context("fork").Pool(1) as pool:
    print(pool.map(child, [0]))
jax.devices()
with multiprocessing.get_context("fork").Pool(1) as pool:
    print(pool.map_async(child, [0]).get(60))
"""


def test_process_forked_after_jax_has_started_raises_instead_of_hanging():
    """Its first child, forked before, runs."""
    completed = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=240, check=True)
    before, after = completed.stdout.splitlines()
    assert before == "[None]" and 'get_context("spawn")' in after


LAPACK = """
import json, sys
import jax, jax.numpy as jnp
from threadpoolctl import threadpool_info
from fedrax.simulation.process import numeric_context

def threads():
    return {pool["filepath"]: pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

before = threads()
with numeric_context("float32"):
    jax.jit(jnp.linalg.svd)(jnp.ones((3, 3)))
    during = threads()
after = threads()
print(json.dumps([len(during) > len(before), sorted(set(during.values())), all(after[k] == before[k] for k in before)]))
"""


def test_lapack_has_one_thread_during_a_run():
    """Loaded before or during the run; other threads' settings are restored afterwards."""
    completed = subprocess.run([sys.executable, "-c", LAPACK], capture_output=True, text=True, timeout=1800, check=True)
    loaded, during, restored = json.loads(completed.stdout)
    assert during == [1]
    assert restored
    if not loaded:
        pytest.skip("this JAX has LAPACK from elsewhere")


def test_systems_without_cpu_affinity(monkeypatch: pytest.MonkeyPatch):
    """Such as macOS and Windows."""
    from fedrax.devices import available_cores

    monkeypatch.delattr(os, "sched_getaffinity")
    assert available_cores() == os.cpu_count()
