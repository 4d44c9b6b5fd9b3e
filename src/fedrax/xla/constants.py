"""Large constants of a program, such as the frozen weights of a pretrained model, as inputs of the compiled program.

``jax.jit`` embeds arrays of a closure in the program: compilation reads and copies them, each program has a copy, and
constant folding may compute with them for minutes. :func:`jit` passes arrays of at least `LARGE` bytes as inputs.
A constant of a ``jax.jit`` call inside the body of a loop stays in the program. JAX 0.10 can do the same
(``jax_use_simplified_jaxpr_constants``), but not by default.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from fedrax.xla.rewriting import CALL_PRIMITIVES, CUSTOM_DERIVATIVE_PRIMITIVES, Rules, evaluate_equation
from fedrax.xla.tracing import CACHE_SIZE, constants_in, sub_jaxprs, trace_settings

LARGE = 1 << 18
"""Bytes from which a constant becomes an input. Smaller ones stay in the program, where XLA can fold them."""


class jit:
    """``jax.jit(function)`` whose large constants are inputs of the compiled program.

    A program without large constants is that of ``jax.jit``. Constants are placed once on the devices of the arguments,
    and shared by all programs; CPU devices share one copy.

    Args:
        function: of pytrees of arrays.
        options: options of ``jax.jit``; static arguments are not supported.
    """

    def __init__(self, function: Callable, **options: Any):
        self._options, self._jitted = options, jax.jit(function, **options)
        self._programs: dict[Any, _Program | None] = {}

    def __call__(self, *args: Any) -> Any:
        """The function's value."""
        leaves, structure = jax.tree.flatten(args)
        found = self._program(args, leaves, structure)
        return self._jitted(*args) if found is None else found.function(found.placed(leaves), *args)

    def lower(self, *args: Any) -> Any:
        """As ``jax.jit(function).lower``."""
        leaves, structure = jax.tree.flatten(args)
        found = self._program(args, leaves, structure)
        if found is None:
            return self._jitted.lower(*args)
        constants = found.placed(leaves)
        return _WithConstants(found.function.lower(constants, *args), constants)

    def _program(self, args: tuple, leaves: list, structure: Any) -> _Program | None:
        """The program for arguments of these shapes; None without large constants."""
        key = structure, tuple(map(jax.typeof, leaves)), trace_settings()
        if key not in self._programs:
            while len(self._programs) >= CACHE_SIZE:
                del self._programs[next(iter(self._programs))]
            self._programs[key] = self._lifted(args)
        return self._programs[key]

    def _lifted(self, args: tuple) -> _Program | None:
        traced = self._jitted.trace(*args)
        closed, large = traced.jaxpr, large_constants(traced.jaxpr)
        if not large:
            return None
        output, ids = jax.tree.structure(traced.out_info), [id(array) for array in large]

        def lifted(constants: list[Array], *args: Any) -> Any:
            known = dict(zip(ids, constants, strict=True))
            return jax.tree.unflatten(output, _evaluate(closed, jax.tree.leaves(args), known))

        donated = tuple(i + 1 for i in self._options.get("donate_argnums", ()))
        options: Any = self._options | {"donate_argnums": donated}
        return _Program(jax.jit(lifted, **options), large, {})


class _Program(NamedTuple):
    """A program that takes its large constants as its first argument."""

    function: Any
    constants: list[Any]
    on_devices: dict[Any, list[Array]]
    """The constants, by sharding."""

    def placed(self, arguments: list[Any]) -> list[Array]:
        """The constants on all devices of the arguments."""
        shardings = [leaf.sharding for leaf in arguments if isinstance(leaf, Array) and leaf.committed]
        where = shardings[0] if shardings else None
        where = NamedSharding(where.mesh, PartitionSpec()) if isinstance(where, NamedSharding) else where
        if where not in self.on_devices:
            self.on_devices[where] = [_place(array, where) for array in self.constants]
        return self.on_devices[where]


class _WithConstants:
    """A lowered or compiled program, called without its first argument, the constants."""

    def __init__(self, program: Any, constants: list[Array]):
        self._program, self._constants = program, constants

    def __call__(self, *args: Any) -> Any:
        return self._program(self._constants, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def compile(self) -> _WithConstants:
        """The compiled program."""
        return _WithConstants(self._program.compile(), self._constants)


def large_constants(program: core.ClosedJaxpr) -> list[Any]:
    """The constants of at least `LARGE` bytes of a program and of its sub-jaxprs, each once."""
    found = {id(array): array for array in constants_in(program) if getattr(array, "nbytes", 0) >= LARGE}
    return list(found.values())


_copies: dict[tuple[int, Any], tuple[weakref.ref, Array]] = {}
"""Copies of constants on devices, by identity and sharding, as long as the original exists."""


def _place(array: Any, sharding: Any, known: dict = _copies) -> Array:
    """A constant on devices; all CPU devices use the memory of a JAX array, and programs share copies of others."""
    if sharding is None and isinstance(array, Array):
        return array
    if isinstance(array, Array) and _is_in_host_memory(array, sharding):
        return jax.device_put(np.asarray(array), sharding)  # of the JAX array itself, device_put would make copies
    key = id(array), sharding
    if key not in known:
        reference = weakref.ref(array, lambda _: known.pop(key, None))
        if isinstance(array, np.ndarray) and jax.default_backend() == "cpu":
            array = np.asarray(jnp.asarray(array))  # the copy is aligned, as devices need it
        known[key] = reference, jax.device_put(array, sharding)
    return known[key][1]


def _is_in_host_memory(array: Array, sharding: Any) -> bool:
    """Whether the devices of an array and of a sharding are CPUs of this process."""
    devices = {*array.devices(), *(sharding.device_set if sharding is not None else ())}
    own = all(device.platform == "cpu" and device.process_index == jax.process_index() for device in devices)
    return own and not jnp.issubdtype(array.dtype, jax.dtypes.extended)


def _evaluate(closed: core.ClosedJaxpr, args: list, known: dict[int, Array]) -> list:
    """The outputs of a program, with ``known`` values, by identity, of its constants."""
    jaxpr = closed.jaxpr
    constants = [known.get(id(c), c) for c in closed.consts]
    values: dict = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *args], strict=True))
    read = lambda atom: known.get(id(atom.val), atom.val) if isinstance(atom, core.Literal) else values[atom]  # noqa: E731
    rules: Rules = {}
    for equation in jaxpr.eqns:
        inputs = list(map(read, equation.invars))
        inner = [sub for sub in sub_jaxprs(equation) if isinstance(sub, core.ClosedJaxpr)]
        if equation.primitive.name in _CALLS and inner and any(id(c) in known for c in constants_in(inner[0])):
            outputs = _evaluate(inner[0], inputs, known)  # a call's own constants cannot be inputs of the call
        else:
            outputs = evaluate_equation(equation, inputs, rules)
        values.update(zip(equation.outvars, outputs, strict=True))
    return list(map(read, jaxpr.outvars))


_CALLS = (*CALL_PRIMITIVES, *CUSTOM_DERIVATIVE_PRIMITIVES)
