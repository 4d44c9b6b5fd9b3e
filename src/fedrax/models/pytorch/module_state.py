"""What a module keeps between calls: buffers alone, for a trace knows nothing else that changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from fedrax.errors import FedraxError


def called_once(torch: ModuleType, net: Any, function: Callable, name: str) -> tuple[Any, dict[str, Any]]:
    """The outputs and buffers after a call in training mode.

    Raises FedraxError where a second call with the same buffers and random numbers of PyTorch's is another.
    """
    start, others = _buffers(net), _other_draws()
    outputs = _call(torch, net, function)
    if _other_draws() != others:
        raise FedraxError(f"{name} draws random numbers that are not PyTorch's, once for all: use torch.rand")
    buffers, numbers = _buffers(net), _numbers(net)
    places = dict(net.named_buffers())
    with torch.no_grad():
        for label, value in start.items():
            places[label].copy_(value)
    again = _call(torch, net, function)
    changed = ", ".join(label for label, value in _numbers(net).items() if value != numbers.get(label))
    if changed or not torch.allclose(outputs, again, rtol=1e-4, atol=1e-5, equal_nan=True):
        what = changed or "something"
        raise FedraxError(
            f"{name} keeps {what} from one call to the next, which a trace does not: use a buffer that is an array, as"
            " register_buffer('steps', torch.zeros(())) and self.steps += 1"
        )
    return outputs.detach(), buffers


def _call(torch: ModuleType, net: Any, function: Callable) -> Any:
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        return function(net)


def _buffers(net: Any) -> dict[str, Any]:
    return {name: buffer.detach().clone() for name, buffer in net.named_buffers()}


def _other_draws() -> tuple[Any, ...]:
    kind, words, *rest = np.random.get_state()  # noqa: NPY002
    return random.getstate(), kind, bytes(np.asarray(words)), *rest


def _numbers(net: Any) -> dict[str, Any]:
    """Numbers of Python's that are attributes, by name."""
    return {
        f"{name}.{key}".lstrip("."): value
        for name, part in net.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, (int, float)) and value == value
    }
