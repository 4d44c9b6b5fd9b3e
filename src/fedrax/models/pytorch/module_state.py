"""Check that a PyTorch module keeps state between calls in buffers only: a trace has no other state."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from fedrax.errors import FedraxError


def call_with_state_check(torch: ModuleType, net: Any, function: Callable, name: str) -> tuple[Any, dict[str, Any]]:
    """(outputs, buffers) after a call in training mode.

    Raises:
        FedraxError: A second call with the same buffers and PyTorch random numbers differs from the first, or the
            module draws random numbers of Python or NumPy.
    """
    initial, random_state = _buffers(net), _random_state()
    outputs = _call(torch, net, function)
    if _random_state() != random_state:
        raise FedraxError(
            f"{name} draws random numbers that are not PyTorch's, which a trace would repeat: use torch.rand"
        )
    buffers, attributes = _buffers(net), _number_attributes(net)
    tensors = dict(net.named_buffers())
    with torch.no_grad():
        for label, value in initial.items():
            tensors[label].copy_(value)
    again = _call(torch, net, function)
    changed = ", ".join(label for label, value in _number_attributes(net).items() if value != attributes.get(label))
    if changed or not torch.allclose(outputs, again, rtol=1e-4, atol=1e-5, equal_nan=True):
        what = changed or "state"
        raise FedraxError(
            f"{name} keeps {what} from one call to the next, which cannot be traced: use a buffer that is an array, as"
            " register_buffer('steps', torch.zeros(())) and self.steps += 1"
        )
    return outputs.detach(), buffers


def _call(torch: ModuleType, net: Any, function: Callable) -> Any:
    """The outputs with PyTorch's random seed 0; its global random state does not change."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        return function(net)


def _buffers(net: Any) -> dict[str, Any]:
    """Copies of the buffers by name."""
    return {name: buffer.detach().clone() for name, buffer in net.named_buffers()}


def _random_state() -> tuple[Any, ...]:
    """State of the global random number generators of Python and NumPy."""
    kind, words, *rest = np.random.get_state()  # noqa: NPY002
    return random.getstate(), kind, bytes(np.asarray(words)), *rest


def _number_attributes(net: Any) -> dict[str, Any]:
    """Attributes of modules that are Python numbers, by name."""
    return {
        f"{name}.{key}".lstrip("."): value
        for name, module in net.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (int, float)) and value == value
    }
