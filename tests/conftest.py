"""Settings of all tests: two CPU devices, fast compilation, and a bounded number of compiled programs.

On a GPU (``make test-gpu``) tests use the devices of the machine; those that need more are skipped.
``FEDRAX_TEST_DEVICES=1`` runs tests on one CPU device, to see which of them these are.
"""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from fedrax.errors import FedraxError
from tests.compiler import ON_GPU, set_fast_compilation, share_mlir_contexts
from tests.slow import unmark_kept_cases

jax.config.update("jax_num_cpu_devices", int(os.environ.get("FEDRAX_TEST_DEVICES", "2")))
if ON_GPU:  # for calls that a test compares a run with; JAX's default is TensorFloat-32
    jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_traceback_in_locations_limit", 0)  # Python locations in programs cost time and are never read
set_fast_compilation()
share_mlir_contexts()
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with SIGINT ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, also by the processes that tests start
gc.set_threshold(50_000, 20, 50)  # with Python's defaults, full collections traverse JAX's caches again and again

MEMORY_MAPS = Path("/proc/self/maps")
MAX_MEMORY_MAPS = 20_000
"""Memory maps of the process above which compiled programs are dropped. Each program needs dozens of maps, and a
process that exceeds Linux's default limit (vm.max_map_count, 65,530) crashes.
"""

_TASKS: dict[Any, Any] = {}


def pytest_sessionstart() -> None:
    """End if JAX finds no GPU where the tests are for one: with ``cuda,cpu`` they would run, and pass, on the CPU."""
    if ON_GPU and jax.default_backend() != "gpu":
        raise pytest.UsageError(
            f"JAX_PLATFORMS={os.environ['JAX_PLATFORMS']} asks for a GPU and JAX finds none: check that nvidia-smi"
            " shows one, with a driver for the version of CUDA that JAX is built for (580 or newer for CUDA 13)"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Apply ``slow(keep=...)`` before pytest deselects by marks."""
    unmark_kept_cases(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip a test that asks for more devices than there are."""
    try:
        return (yield)
    except FedraxError as error:
        if len(jax.devices()) < 2 and "devices are asked for, but JAX has" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="module", autouse=True)
def bounded_program_cache() -> Iterator[None]:
    """Clear JAX's caches after a module if the process has many memory maps."""
    yield
    if MEMORY_MAPS.exists() and MEMORY_MAPS.read_bytes().count(b"\n") > MAX_MEMORY_MAPS:
        jax.clear_caches()


@pytest.fixture(scope="module")
def shared_tasks() -> Iterator[None]:
    """Let the commands that a module runs share equal tasks, because compiled programs are cached by task.

    Each command of a user runs in its own process. Tasks with user-defined or fine-tuned models, or with data that
    contain more than arrays (a vocabulary, the true parameters), are not shared.
    """
    from fedrax.contract import task as tasks
    from fedrax.experiments import experiment

    make_task = experiment.make_task
    makers = (tasks.classification, tasks.regression, tasks.binary_classification, tasks.margin)

    def make_task_once(spec: Any, federation: Any, data_dir: Any = None) -> Any:
        (x, y), kind = federation.train, type(spec.model)
        user_defined = kind.__module__ != "fedrax.models.zoo" or spec.finetuning is not None
        if user_defined or federation.truth is not None or federation.vocabulary:
            return make_task(spec, federation, data_dir)
        current_makers = tuple(getattr(tasks, maker.__name__) for maker in makers)  # a test may replace them
        data = (federation.num_classes, federation.padding, federation.pixels, federation.mean, federation.std)
        shapes = (x.shape[1:], x.dtype.str, y.shape[1:], y.dtype.str)
        key = (spec.model, spec.task, spec.normalize, current_makers, *data, *shapes)
        if key not in _TASKS:
            _TASKS[key] = make_task(spec, federation)
        return _TASKS[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "make_task", make_task_once)
        yield


@pytest.fixture(scope="module")
def full_compilation() -> Iterator[None]:
    """Compile the programs of a module with all optimizations, as users do."""
    jax.clear_caches()
    set_fast_compilation(False)
    yield
    set_fast_compilation()  # later modules may reuse the optimized programs
