"""``detach`` and ``no_grad`` in a traced graph, and the derivatives that a trace cannot have."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from fedrax.errors import FedraxError
from fedrax.models.pytorch.source_locations import line_of

NEW_ARRAY_REMEDY = "compute with a new array instead, as in F.linear(x, changed(self.weight))"


def mark_stopped_gradients(torch: ModuleType, exported: Any, name: str) -> None:
    """Insert fedrax's operators where gradients stop, because decomposition removes ``detach`` and ``no_grad``.

    An array that is changed in place within ``no_grad`` keeps the gradient of its previous value.

    Args:
        torch: The module torch.
        exported: The exported program, whose graph is changed.
        name: Name of the module in messages.

    Raises:
        FedraxError: A parameter is changed, or an array with a gradient is changed through its detached view.
    """
    graph_module, parameters = exported.graph_module, exported.graph_signature.inputs_to_parameters
    stop, nodes = _custom_operators(torch).stop_gradient.default, list(graph_module.graph.nodes)
    differentiable = _differentiable_nodes(torch, nodes, parameters)
    for node in nodes:
        if str(node.target) == "aten.detach.default":
            if (change := _in_place_user(node)) is None:
                node.target = stop
            elif node.args[0] in differentiable:
                raise _hidden_change(torch, exported, name, node.args[0], change)
        if str(node.target).endswith("wrap_with_autocast") and node.args[0] == "cpu" and node.args[2]:
            raise FedraxError(
                f"{name} computes in lower precision by autocast, which cannot be traced: remove it from forward"
            )
        if _is_no_grad(node):
            region = getattr(graph_module, node.args[1].target)
            inner = [n for n in region.graph.nodes if n.op == "placeholder"]
            for outer, within in zip(node.args[2:], inner, strict=True):
                if outer.name in parameters and (change := _in_place_user(within)) is not None:
                    raise _hidden_change(torch, exported, name, outer, change)
            _mark_in_place_changes(torch, region)
        if node.target is operator.getitem and node.args and _is_no_grad(node.args[0]):
            region = getattr(graph_module, node.args[0].args[1].target)
            results = next(n for n in region.graph.nodes if n.op == "output").args[0]
            if not isinstance(node.meta.get("val"), torch.Tensor) or _changes_input(results[node.args[1]]):
                continue
            with graph_module.graph.inserting_after(node):
                stopped = graph_module.graph.call_function(stop, (node,))
            stopped.meta = dict(node.meta)
            node.replace_all_uses_with(stopped, delete_user_cb=lambda user, stopped=stopped: user is not stopped)
    graph_module.recompile()


def _differentiable_nodes(torch: ModuleType, nodes: Iterable[Any], parameters: Any) -> set[Any]:
    """The nodes with a gradient: floating-point values that are computed from parameters and not detached."""
    found: set[Any] = set()
    for node in nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            found |= {node} if node.name in parameters else set()
        elif isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
            continue
        elif not any(word in str(node.target) for word in ("detach", "_like", ".new_", "sym_size")):
            found |= {node} if found.intersection(node.all_input_nodes) else set()
    return found


def _in_place_user(node: Any) -> Any:
    """The operator that changes an array in place, directly or through a view; None if there is none."""
    for user in node.users:
        schema = getattr(user.target, "_schema", None)
        if schema is None or not user.args or user.args[0] is not node:
            continue
        alias = schema.arguments[0].alias_info
        if alias is not None and (change := user if alias.is_write else _in_place_user(user)) is not None:
            return change
    return None


def _hidden_change(torch: ModuleType, exported: Any, name: str, node: Any, change: Any) -> FedraxError:
    """The error for a change in place that gradients ignore."""
    own = exported.graph_signature.inputs_to_parameters.get(node.name)
    what = "an array" if own is None else f"the parameter {own.removeprefix('module.')}"
    return FedraxError(f"{name} changes {what} without gradients ({line_of(torch, change)}): {NEW_ARRAY_REMEDY}")


def _is_no_grad(node: Any) -> bool:
    """Whether a node is a subgraph within ``no_grad``."""
    return str(node.target).endswith("wrap_with_set_grad_enabled") and node.args[0] is False


def _changes_input(node: Any) -> bool:
    """Whether a node changes an input of its subgraph in place."""
    if not getattr(getattr(node.target, "_schema", None), "is_mutable", False):
        return False
    while node.op == "call_function" and any(made.alias_info for made in node.target._schema.returns):
        node = node.args[0]  # from a view or in-place operator to its base
    return node.op == "placeholder"


def _mark_in_place_changes(torch: ModuleType, region: Any) -> None:
    """Give arrays that are changed in place in a ``no_grad`` subgraph the gradient of their previous value."""
    custom = _custom_operators(torch)
    for node in [n for n in region.graph.nodes if _changes_input(n)]:
        changed = node.args[0]
        with region.graph.inserting_before(node):
            before = region.graph.call_function(torch.ops.aten.clone.default, (changed,))
        with region.graph.inserting_after(node):
            after = region.graph.call_function(custom.with_gradient_of.default, (node, before))
        with region.graph.inserting_after(after):
            region.graph.call_function(torch.ops.aten.copy_.default, (changed, after))
    region.recompile()


@functools.cache
def _custom_operators(torch: ModuleType) -> Any:
    """Operators of fedrax, which PyTorch does not decompose."""
    library = torch.library.Library("fedrax", "DEF")
    library.define("stop_gradient(Tensor x) -> Tensor")
    library.define("with_gradient_of(Tensor x, Tensor other) -> Tensor")
    library.impl("stop_gradient", lambda x: x.clone(), "CompositeExplicitAutograd")
    library.impl("with_gradient_of", lambda x, other: x.clone(), "CompositeExplicitAutograd")
    _LIBRARIES.append(library)  # an operator exists as long as its library object
    return torch.ops.fedrax


_LIBRARIES: list[Any] = []
"""Keeps the operator library alive."""


def custom_derivatives(torch: ModuleType, module: Any, function: Callable, example: Any) -> tuple[Any, list[str]]:
    """(outputs, names of hooks and autograd functions that change derivatives and cannot be traced)."""
    found = {
        f"a backward hook of {type(submodule).__name__}"
        for submodule in module.modules()
        if submodule._backward_hooks or submodule._backward_pre_hooks
    }
    with torch.enable_grad(), _hook_recorder(torch)(found):
        outputs = function(module, example)
    waiting, seen = [getattr(outputs, "grad_fn", None)], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [other for other, _ in node.next_functions]
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            found.add(type(node).__name__.removesuffix("Backward"))
    return outputs, sorted(found - {"BackwardHookFunction"})


def parameters_with_hooks(module: Any) -> list[str]:
    """Names of the parameters with gradient hooks."""
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return [name for name, p in module.named_parameters() if any(getattr(p, kind, None) for kind in hooks)]


@functools.cache
def _hook_recorder(torch: ModuleType) -> type:
    """Context manager that adds the names of called functions to a set if a trace ignores their effect."""
    ignored = ("register_hook", "register_post_accumulate_grad_hook", "detach_")

    class HookRecorder(torch.overrides.TorchFunctionMode):
        def __init__(self, found: set[str]):
            super().__init__()
            self.found = found

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(function, "__name__", "")
            if name in ignored:
                self.found.add(name)
            return function(*args, **(kwargs or {}))

    return HookRecorder
