"""A model is a pair of pure functions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Params = Any  # a pytree of arrays


@dataclass(frozen=True, eq=False)
class Model:
    """Bring your own as `Model(init, apply)`.

    init:     key -> parameters.
    apply:    (parameters, x [B, ...], key=None) -> outputs [B, ...]; the key, where given, feeds dropout.
    features: (parameters, x [B, ...], key=None) -> what the last layer reads [B, F].
    """

    init: Callable[..., Params]
    apply: Callable[..., Any]
    features: Callable[..., Any] | None = None
    name: str = "model"
