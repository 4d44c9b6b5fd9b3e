"""A model is a pair of pure functions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Params = Any  # a pytree of arrays

_ADAPTERS = {"torch": "from_torch", "flax.linen": "from_linen", "flax.nnx": "from_nnx", "equinox": "from_equinox"}
"""The functions that make models of modules, by the library of the module's class."""


class Variables(NamedTuple):
    """Parameters and running statistics of a network, e.g. with batch norm.

    Models and tasks of such networks take and return Variables where others use plain parameter trees.

    Example:
        >>> variables = fedrax.contract.Variables({"w": jnp.ones(2)}, {"mean": jnp.zeros(2)})
        >>> variables.params["w"].shape
        (2,)
    """

    params: Params
    """The trained parameters, a pytree of arrays."""
    statistics: Any
    """A pytree of arrays that training updates without a gradient."""


def with_statistics(params: Params, statistics: Any) -> Params:
    """What the functions of models and tasks take: `Variables` where there are statistics, else the parameters."""
    return Variables(params, statistics) if statistics else params


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A model as a pair of pure functions: ``Model(init, apply)``.

    Example:
        >>> model = fedrax.contract.Model(lambda key: jnp.zeros(3), lambda w, x, key=None: x @ w)
        >>> model.apply(model.init(jax.random.key(0)), jnp.ones((2, 3))).tolist()
        [0.0, 0.0]
    """

    init: Callable[..., Params]
    """key -> parameters, or `Variables` where the network keeps running statistics."""
    apply: Callable[..., Any]
    """(parameters, x [B, ...], key=None) -> outputs [B, ...]. A key means training mode and feeds dropout, none
    evaluation mode; statistics do not change."""
    features: Callable[..., Any] | None = None
    """(parameters, x [B, ...], key=None) -> what the last layer reads [B, F]."""
    name: str = "model"
    """The name of the model in reports and messages."""
    blocks: tuple[Callable[..., Any], ...] | None = None
    """Functions (parameters, x, key=None) -> x that make up `apply`, one after the other, given one key."""
    train: Callable[..., tuple[Any, Any]] | None = None
    """(Variables, x [B, ...], key) -> (outputs, new statistics), in training mode; None without statistics."""
    measures: Callable[[Params, Any], dict[str, Any]] | None = None
    """(parameters, truth) -> metrics of the parameters that need no samples, by name. truth: the
    model that generated synthetic data, or None."""
    loss: Literal["hinge", "value"] | None = None
    """What an experiment trains it with, where that is neither cross entropy (of classes) nor squared error (of a
    regression): the multiclass hinge loss, or its own output as the loss."""
    reads_amounts: bool = False
    """Whether the model reads integers as amounts, so that token indices are meaningless to it."""
    words: int | None = None
    """The size of the vocabulary of a text model, with index 0 for padding."""
    frozen: Any = ()
    """A pytree of the frozen parameters, which the functions close over: a Flower federation compares their digests,
    because only trained parameters are sent."""

    @staticmethod
    def _remedy(value: Any) -> str:
        """How to make a model of ``value``; empty if unknown."""
        kind = value if isinstance(value, type) else type(value)
        if hasattr(kind, "build"):
            return f"{kind.__name__}(...).build(input_shape, outputs) gives the model"
        for base in kind.__mro__:
            for library, adapter in _ADAPTERS.items():
                if f"{base.__module__}.".startswith(f"{library}."):
                    return f"fedrax.models.{adapter} makes a model of it"
        return "fedrax.contract.Model(init, apply) makes a model of functions" if callable(value) else ""

    def __repr__(self) -> str:
        """Its name and its optional parts."""
        offered = [part for part in ("features", "blocks", "train", "measures") if getattr(self, part) is not None]
        return f"{type(self).__name__} {self.name!r}" + (f" with {', '.join(offered)}" if offered else "")
