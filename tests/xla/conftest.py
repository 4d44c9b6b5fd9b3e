"""Tests of compiler passes: compiled as users compile, with limits that small programs reach."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from fedrax.xla import Limits, Options, use_options


@pytest.fixture(scope="module", autouse=True)
def users_compilation(full_compilation: None) -> None:
    """XLA's own optimizations: some wrong results of XLA show with them alone."""


@pytest.fixture
def limits() -> Iterator[Callable[..., None]]:
    """``limits(name=value)`` changes some of `fedrax.xla.Limits` until the end of the test."""
    changed = Limits()
    with ExitStack() as stack:

        def change(**sizes: float) -> None:
            nonlocal changed
            changed = replace(changed, **sizes)
            stack.enter_context(use_options(Options(limits=changed)))

        yield change
