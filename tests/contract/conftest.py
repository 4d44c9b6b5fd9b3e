"""Programs of these tests run for milliseconds: compile them quickly rather than well.

What the whole compiler makes of every method is compared with NumPy in ``tests/algorithms``.
"""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_compilation() -> Iterator[None]:
    """Leave out most of the compiler's optimisations."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
