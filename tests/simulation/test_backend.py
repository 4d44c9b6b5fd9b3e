"""Setting up JAX: what a process returns to the system."""

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
from fedrax.simulation import backend

backend.use_all_cores()
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
def test_memory_that_a_long_compilation_has_freed_goes_back_to_the_system():
    from fedrax.simulation.backend import _COMPILED

    script = FRAGMENTS.replace("SHORT", repr((_COMPILED, 0.001))).replace("LONG", repr((_COMPILED, 1.0)))
    script = script.replace("OTHER", repr(("/another/event", 1.0)))
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    short, other, long = (json.loads(line) for line in made.stdout.splitlines())
    assert short < 20 and other < 20 and long > 150


def test_jax_reports_compilations_under_this_name():
    """Without it the listener would wait for ever."""
    from fedrax.simulation.backend import _COMPILED

    seen: list[str] = []

    def listener(event: str, duration_secs: float, **_: str | int) -> None:
        seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        jax.jit(lambda x: jnp.sin(x) + 3)(1.0)
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert _COMPILED in seen
