"""A PyTorch module's forward pass as a traced graph of operators, and its evaluation in JAX.

``torch.export`` runs the module's Python code once on abstract arrays and records the operators: views and in-place
operations become functional ones, updated buffers become outputs, layers remain single operators. PyTorch decomposes
operators that fedrax does not implement into others.
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
from fedrax.inputs import arrays_of, flat_inputs, map_inputs
from fedrax.models.pytorch import (  # noqa: F401 - importing them registers their operators
    fourier_ops,
    interpolation_ops,
    layer_ops,
    linear_algebra_ops,
    pooling_ops,
    random_ops,
    recurrent_ops,
    shape_ops,
    sorting_ops,
    subgradients,
    variance_ops,
)
from fedrax.models.pytorch.export import export
from fedrax.models.pytorch.operators import NEEDS_CONTEXT, OPERATORS, Context, key_of
from fedrax.models.pytorch.source_locations import line_of
from fedrax.models.pytorch.stop_gradients import NEW_ARRAY_REMEDY

_SIZE_FUNCTIONS = (operator, math)
"""Modules of the functions that compute with sizes: ``x.size(0) * 2``."""


class TracedModule:
    """A traced graph of ``function(module, x)`` in the module's current mode, which JAX evaluates.

    Raises:
        FedraxError: The function cannot be traced or uses an operator that fedrax does not implement; the message has
            the line of user code.
    """

    def __init__(self, torch: ModuleType, module: Any, function: Callable, example: Any, name: str):
        self._torch, self._name, self._training = torch, name, module.training
        self._names, self._sample_shapes = [*flat_inputs(example)], [list(a.shape[1:]) for a in arrays_of(example)]
        self._takes_integers = [part.dtype == torch.int64 for part in arrays_of(example)]
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
    def updated_buffers(self) -> list[str]:
        """Names of the buffers that the module updates."""
        return [_name_in_module(spec.target) for spec in self.outputs if spec.kind.name == "BUFFER_MUTATION"]

    def run(self, values: Mapping[str, Any], x: Any, key: Array | None, float_type: Any):
        """Evaluate the graph in JAX.

        Args:
            values: Parameters and buffers by their names in the module.
            x: The batch, an array or several as in the example.
            key: Random key; None in evaluation mode.
            float_type: Dtype of the computation.

        Returns:
            (outputs, values of updated buffers by name, whether random numbers were drawn).
        """
        context = Context(key, float_type)
        inputs, parts = [], arrays_of(map_inputs(jnp.asarray, x))
        if [*flat_inputs(x)] != self._names:
            raise FedraxError(
                f"{self._name} takes the inputs of its example, {', '.join(self._names)}, not"
                f" {', '.join(flat_inputs(x))}"
            )
        remaining = zip(parts, self._takes_integers, strict=True)
        for node, spec in self.inputs.items():
            if spec.kind.name == "USER_INPUT":
                part, takes_integers = next(remaining)
                widen = takes_integers and jnp.issubdtype(part.dtype, jnp.integer)  # int8 would overflow
                inputs.append(part.astype(jnp.int32) if widen else part)
            else:
                value = jnp.asarray(
                    self.constants[node] if node in self.constants else values[_name_in_module(spec.target)]
                )
                inputs.append(value.astype(float_type) if jnp.issubdtype(value.dtype, jnp.floating) else value)
        try:
            results = self._evaluate(self.graph, inputs, context)
        except FedraxError as error:
            raise FedraxError(f"{self._shape_hint([list(a.shape[1:]) for a in parts])}{error}") from error
        updated = {}
        for spec, value in zip(self.outputs, results, strict=True):
            if spec.kind.name == "BUFFER_MUTATION":
                updated[_name_in_module(spec.target)] = value
        return results[-1], updated, context.has_drawn

    def _shape_hint(self, shapes: list[list[int]]) -> str:
        """A possible cause of an error: samples of another shape than those of the example."""
        pair = next((pair for pair in zip(shapes, self._sample_shapes, strict=True) if pair[0] != pair[1]), None)
        if pair is None:
            return ""
        shape, expected = pair
        channels_last = len(shape) == 3 and shape == [*expected[1:], expected[0]]
        remedy = " (from_torch(..., channels_last=True) transposes them)" if channels_last else ""
        return f"these samples have shape {shape}, and those of the example had {expected}{remedy}: "

    def _evaluate(self, graph: Any, inputs: list, context: Context) -> Any:
        """The outputs of a graph."""
        values: dict[Any, Any] = {}
        remaining = iter(inputs)
        for node in graph.graph.nodes:
            read = functools.partial(self._torch.fx.node.map_arg, fn=values.__getitem__)
            if node.op == "placeholder":
                values[node] = next(remaining)
            elif node.op == "get_attr":
                values[node] = getattr(graph, node.target)
            elif node.op == "output":
                return read(node.args[0])
            else:
                values[node] = self._call(node, read(node.args), read(node.kwargs), context)
        raise AssertionError("a graph without an output")

    def _call(self, node: Any, arguments: tuple, options: dict[str, Any], context: Context) -> Any:
        """The value of one operator; raises FedraxError with the line of user code."""
        function = _function_of(node)
        assert function is not None
        if key_of(node.target) in NEEDS_CONTEXT:
            arguments = (context, *arguments)
        try:
            named: dict[str, Any] = {_ARGUMENT_NAMES.get(k, k): v for k, v in options.items()}
            return function(*arguments, **named)
        except OverflowError as error:
            raise FedraxError(f"{self._name}: {INT64_MESSAGE} ({line_of(self._torch, node)})") from error
        except (FedraxError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            cause = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise FedraxError(f"{self._name}: {cause} ({line_of(self._torch, node)})") from error

    def _check(self, example: Any) -> None:
        """Raise FedraxError for a graph that cannot be evaluated."""
        missing = {}
        for node in (node for node in self.graph.graph.nodes if node.op == "call_function"):
            if _function_of(node) is None:
                missing.setdefault(str(node.target), line_of(self._torch, node))
        if missing:
            listed = "; ".join(f"{name} ({line})" for name, line in list(missing.items())[:3])
            more = "" if len(missing) <= 3 else f"; and {len(missing) - 3} more"
            raise FedraxError(f"{self._name} uses operators that fedrax does not implement: {listed}{more}")
        changed = [_name_in_module(spec.target) for spec in self.outputs if spec.kind.name == "PARAMETER_MUTATION"]
        if changed:
            raise FedraxError(
                f"{self._name} changes its parameters ({', '.join(changed)}) in forward: {NEW_ARRAY_REMEDY}"
            )
        has_objects = any(spec.kind.name in ("CUSTOM_OBJ", "TOKEN") for spec in self.inputs.values())
        outputs = [spec for spec in self.outputs if spec.kind.name == "USER_OUTPUT"]
        if has_objects or len(outputs) != 1 or len(self.outputs) != 1 + len(self.updated_buffers):
            mode = " in training" if self._training else ""
            raise FedraxError(f"{self._name} must map a batch to one array{mode}: wrap it in a module that does")
        rows = len(arrays_of(example)[0])
        for node in self.graph.graph.nodes:
            if node.op == "placeholder" and node.name in self._user_inputs():
                size = node.meta["val"].shape[0]
                if isinstance(size, int):
                    raise FedraxError(fixed_batch_message(rows, self._name))
                self._check_range(self._bounds.get(size.node.expr), rows)

    def _check_range(self, bounds: Any, size: int) -> None:
        """Raise FedraxError if the trace is valid only for a range of batch sizes: it has one branch of a condition."""
        if bounds is not None and (bool(bounds.lower > 2) or bool(bounds.upper < _LARGEST_BATCH)):
            raise FedraxError(
                f"{self._name} has a condition on the number of samples: traced with {size}, it computes something else"
                f" for fewer than {bounds.lower} or more than {bounds.upper}"
            )

    def _user_inputs(self) -> set[str]:
        """Names of the nodes of the batch."""
        return {node for node, spec in self.inputs.items() if spec.kind.name == "USER_INPUT"}


def fixed_batch_message(size: int, name: str) -> str:
    """The message for a module that takes only one batch size."""
    return (
        f"{name} takes only batches of {size}: it has a constant size, as in view(4, 8) or by len(x); write x.size(0)"
        " or -1"
    )


INT64_MESSAGE = "integers of more than 32 bits are not supported in JAX"
_LARGEST_BATCH = 2**20
"""A trace must be valid for batches of 2 to this many samples."""
_ARGUMENT_NAMES = {"self": "x", "input": "x"}
"""Names of the first argument in ATen's schemas, and in the functions of the table."""


def _name_in_module(name: str) -> str:
    """A name in the module from that in its wrapper."""
    return name.removeprefix("module.")


def _function_of(node: Any) -> Callable | None:
    """The JAX function of a node's operator, or its Python function of sizes; None if there is neither."""
    target = node.target
    if any(getattr(module, getattr(target, "__name__", ""), None) is target for module in _SIZE_FUNCTIONS):
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
