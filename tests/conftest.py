"""Two CPU devices for every test, set before anything touches JAX, and room for what they compile quickly."""

import gc
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.compiler import compile_quickly, write_quickly
from tests.slow import keep_some

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_traceback_in_locations_limit", 0)  # nobody looks where in Python an operation came from
compile_quickly()
write_quickly()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin by ignoring it
gc.set_threshold(50_000, 20, 50)  # or it looks through all that JAX keeps, over and over

MAPS = Path("/proc/self/maps")
MANY = 20_000
"""Pieces of memory. A compiled program has dozens, and without another (Linux allows 65,530) a process crashes."""

TASKS: dict[Any, Any] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before marks decide what is run."""
    keep_some(items)


@pytest.fixture(scope="module", autouse=True)
def room_for_programs() -> Iterator[None]:
    """Forget compiled programs before there are too many."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MANY:
        jax.clear_caches()


@pytest.fixture(scope="module")
def tasks_once() -> Iterator[None]:
    """Commands in this process are about the same task where they say the same of it: programs belong to a task.

    Of a user each command has a process. Tasks of own models, or of data that say more than their shapes, stay apart.
    """
    from fedrax.contract import task as tasks
    from fedrax.experiments import experiment

    made, makers = (
        experiment.make_task,
        (tasks.classification, tasks.regression, tasks.binary_classification, tasks.margin),
    )

    def once(spec: Any, federation: Any) -> Any:
        (x, y), kind = federation.train, type(spec.model)
        if kind.__module__ != "fedrax.models.zoo" or federation.truth is not None or federation.vocabulary:
            return made(spec, federation)
        now = tuple(getattr(tasks, maker.__name__) for maker in makers)
        says = (federation.num_classes, federation.padding, federation.pixels, federation.mean, federation.std)
        about = (spec.model, spec.task, spec.normalize, now, *says, x.shape[1:], x.dtype.str, y.shape[1:], y.dtype.str)
        if about not in TASKS:
            TASKS[about] = made(spec, federation)
        return TASKS[about]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "make_task", once)
        yield


@pytest.fixture(scope="module")
def full_compilation() -> Iterator[None]:
    """Programs as users run them, for the rest of a module that asks for it."""
    jax.clear_caches()
    compile_quickly(False)
    yield
    compile_quickly()  # what is compiled wholly may stay
