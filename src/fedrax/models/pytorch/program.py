"""A PyTorch module's forward pass as a list of operators, and its evaluation in JAX.

``torch.export`` runs the module's own Python once, on arrays without values, and writes down what is done to them:
views and changes in place become functions, moved buffers become outputs, layers stay whole. What fedrax has no
form for, PyTorch decomposes into what there is.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedrax.errors import FedraxError
from fedrax.models.pytorch import (
    subgradients,
)
from fedrax.models.pytorch.export import export
from fedrax.models.pytorch.operators import NEEDS_CONTEXT, OPERATORS, Context, key_of
from fedrax.models.pytorch.source_locations import line_of
from fedrax.models.pytorch.stop_gradients import ANOTHER

_PLAIN = (operator, math)
"""Where the functions of sizes come from: ``x.size(0) * 2``."""


class Program:
    """``function(module, x)`` as operators, in the mode that the module is in.

    Raises FedraxError, with the line of the module's source, for what cannot be traced or has no form in JAX.
    """

    def __init__(self, torch: ModuleType, module: Any, function: Callable, example: Any, name: str):
        self._torch, self._name, self._sample = torch, name, list(example.shape[1:])
        self._whole, self._training = example.dtype == torch.int64, module.training
        exported = export(torch, module, function, example, name)
        self.graph, signature = exported.graph_module, exported.graph_signature
        self.inputs = {spec.arg.name: spec for spec in signature.input_specs}
        self.outputs, self._bounds = signature.output_specs, exported.range_constraints
        self.constants: dict[str, np.ndarray] = {
            node: exported.constants[spec.target].detach().numpy()
            for node, spec in self.inputs.items()
            if spec.kind.name == "CONSTANT_TENSOR"
        }
        self._check(example)

    @property
    def moved(self) -> list[str]:
        """The buffers that the module changes."""
        return [_inner(spec.target) for spec in self.outputs if spec.kind.name == "BUFFER_MUTATION"]

    def run(self, values: Mapping[str, Any], x: Any, key: Array | None, float_type: Any):
        """(outputs, the new values of moved buffers, whether random numbers were asked for).

        values: parameters and buffers by their names in the module.
        """
        context = Context(key, float_type)
        given = []
        for node, spec in self.inputs.items():
            if spec.kind.name == "USER_INPUT":
                x = jnp.asarray(x)
                whole = self._whole and jnp.issubdtype(x.dtype, jnp.integer)  # short ones would overflow
                given.append(x.astype(jnp.int32) if whole else x)
            else:
                value = jnp.asarray(self.constants[node] if node in self.constants else values[_inner(spec.target)])
                given.append(value.astype(float_type) if jnp.issubdtype(value.dtype, jnp.floating) else value)
        try:
            results = self._evaluate(self.graph, given, context)
        except FedraxError as error:
            raise FedraxError(f"{error}{self._other_samples(list(jnp.shape(x)[1:]))}") from error
        moved = {}
        for spec, value in zip(self.outputs, results, strict=True):
            if spec.kind.name == "BUFFER_MUTATION":
                moved[_inner(spec.target)] = value
        return results[-1], moved, bool(context._drawn)

    def _other_samples(self, given: list[int]) -> str:
        """What may be behind an error: samples of another shape than the module was traced with."""
        if given == self._sample:
            return ""
        turned = len(given) == 3 and given == [*self._sample[1:], self._sample[0]]
        remedy = ": from_torch(..., channels_last=True) turns them" if turned else ""
        return f"; its example had samples {self._sample}, and it is given {given}{remedy}"

    def _evaluate(self, graph: Any, given: list, context: Context) -> Any:
        values: dict[Any, Any] = {}
        inputs = iter(given)
        for node in graph.graph.nodes:
            read = functools.partial(self._torch.fx.node.map_arg, fn=values.__getitem__)
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "get_attr":
                values[node] = getattr(graph, node.target)
            elif node.op == "output":
                return read(node.args[0])
            else:
                values[node] = self._call(node, read(node.args), read(node.kwargs), context)
        raise AssertionError("a graph without an output")

    def _call(self, node: Any, arguments: tuple, options: dict[str, Any], context: Context) -> Any:
        function = _function_of(node)
        assert function is not None
        if key_of(node.target) in NEEDS_CONTEXT:
            arguments = (context, *arguments)
        try:
            named: dict[str, Any] = {_PYTHON.get(k, k): v for k, v in options.items()}
            return function(*arguments, **named)
        except OverflowError as error:
            raise FedraxError(f"{self._name}: {BEYOND} ({line_of(self._torch, node)})") from error
        except (FedraxError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            cause = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise FedraxError(f"{self._name}: {cause} ({line_of(self._torch, node)})") from error

    def _check(self, example: Any) -> None:
        """Refuse what cannot be evaluated, before anything is."""
        missing = {}
        for node in (node for node in self.graph.graph.nodes if node.op == "call_function"):
            if _function_of(node) is None:
                missing.setdefault(str(node.target), line_of(self._torch, node))
        if missing:
            listed = "; ".join(f"{name} ({line})" for name, line in list(missing.items())[:3])
            more = "" if len(missing) <= 3 else f"; and {len(missing) - 3} more"
            raise FedraxError(f"{self._name} uses operators that fedrax has no form of: {listed}{more}")
        changed = [_inner(spec.target) for spec in self.outputs if spec.kind.name == "PARAMETER_MUTATION"]
        if changed:
            raise FedraxError(f"{self._name} changes its parameters ({', '.join(changed)}) in forward: {ANOTHER}")
        odd = next((s for s in self.inputs.values() if s.kind.name in ("CUSTOM_OBJ", "TOKEN")), None)
        kept = [spec for spec in self.outputs if spec.kind.name == "USER_OUTPUT"]
        if odd is not None or len(kept) != 1 or len(self.outputs) != len(kept) + len(self.moved):
            mode = " in training" if self._training else ""
            raise FedraxError(f"{self._name} must map one array to one array{mode}: wrap it in a module that does")
        node = next(n for n in self.graph.graph.nodes if n.op == "placeholder" and n.name == self._user_input())
        size = node.meta["val"].shape[0]
        if isinstance(size, int):
            raise FedraxError(only_batches_of(len(example), self._name))
        self._check_range(self._bounds.get(size.node.expr), len(example))

    def _check_range(self, bounds: Any, size: int) -> None:
        """Refuse a module that does something else for larger batches: the tracer has kept what it does for this."""
        if bounds is not None and (bool(bounds.lower > 2) or bool(bounds.upper < _LARGEST_BATCH)):
            raise FedraxError(
                f"{self._name} asks how many samples there are: traced with {size}, it does another thing for fewer"
                f" than {bounds.lower} or more than {bounds.upper}"
            )

    def _user_input(self) -> str:
        return next(node for node, spec in self.inputs.items() if spec.kind.name == "USER_INPUT")


def only_batches_of(size: int, name: str) -> str:
    """What is said of a module that reads batches of one size."""
    return (
        f"{name} works for batches of {size} alone: a size is written into it, as in view(4, 8) or by len(x); write"
        " x.size(0) or -1"
    )


BEYOND = "whole numbers beyond 32 bits are not what JAX computes with"
_LARGEST_BATCH = 2**20
_PYTHON = {"self": "x", "input": "x"}
"""Names that schemas give the first argument."""


def _inner(name: str) -> str:
    """A name in the module that is wrapped."""
    return name.removeprefix("module.")


def _function_of(node: Any) -> Callable | None:
    """The operator's form in JAX, or a plain function of sizes; None where there is neither."""
    target = node.target
    if any(getattr(module, getattr(target, "__name__", ""), None) is target for module in _PLAIN):
        return target
    name = str(target)
    if name in ("aten.sym_size.int", "aten.sym_size"):
        return lambda x, dim: x.shape[dim]
    if name == "aten.sym_numel.default":
        return lambda x: x.size
    if name == "<function sym_float>" or getattr(target, "__name__", "") in ("sym_float", "sym_int"):
        return float if "float" in getattr(target, "__name__", "") else int
    if getattr(target, "__name__", "") in ("sym_max", "sym_min"):
        return max if "max" in target.__name__ else min
    if name == "fedrax.stop_gradient.default":
        return lax.stop_gradient
    if name == "fedrax.with_gradient_of.default":
        return subgradients.with_gradient_of
    return OPERATORS.get(key_of(target)) if name.startswith("aten.") else None
