"""Tests of compiler passes: full compilation, and limits that small programs reach."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from fedrax.xla import Limits, Options, use_options


@pytest.fixture(scope="module", autouse=True)
def full_compilation_in_this_folder(full_compilation: None) -> None:
    """Some wrong results of XLA occur only with its default optimizations."""


@pytest.fixture
def limits() -> Iterator[Callable[..., None]]:
    """``limits(name=value)`` changes fields of `fedrax.xla.Limits` until the end of the test."""
    changed = Limits()
    with ExitStack() as stack:

        def change(**sizes: float) -> None:
            nonlocal changed
            changed = replace(changed, **sizes)
            stack.enter_context(use_options(Options(limits=changed)))

        yield change
