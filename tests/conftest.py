"""Two CPU devices for every test, set before anything touches JAX, and room for what they compile quickly."""

import gc
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from tests.compiler import compile_quickly

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_traceback_in_locations_limit", 0)  # nobody looks where in Python an operation came from
compile_quickly()
gc.set_threshold(50_000, 20, 50)  # or it looks through all that JAX keeps, over and over

MAPS = Path("/proc/self/maps")
MANY = 20_000
"""Pieces of memory. A compiled program has dozens, and without another (Linux allows 65,530) a process crashes."""


@pytest.fixture(scope="module", autouse=True)
def room_for_programs() -> Iterator[None]:
    """Forget compiled programs before there are too many."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MANY:
        jax.clear_caches()


@pytest.fixture(scope="module")
def full_compilation() -> Iterator[None]:
    """Programs as users run them, for the rest of a module that asks for it."""
    jax.clear_caches()
    compile_quickly(False)
    yield
    compile_quickly()  # what is compiled wholly may stay
