"""Where gradients stop: what a trace has of ``detach`` and ``no_grad``, and what it would lose."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from fedrax.errors import FedraxError
from fedrax.models.pytorch.source_locations import line_of

ANOTHER = "compute with another array instead, as in F.linear(x, changed(self.weight))"


def mark_stopped_gradients(torch: ModuleType, exported: Any, name: str) -> None:
    """Put operators of our own where gradients stop: decomposition leaves ``detach`` and ``no_grad`` out.

    What is changed in place within ``no_grad`` has the gradient of what it was. Parameters that are changed, and arrays
    with gradients that are changed by what is detached of them, are refused.
    """
    graph_module, parameters = exported.graph_module, exported.graph_signature.inputs_to_parameters
    stop, nodes = _own_operators(torch).stop_gradient.default, list(graph_module.graph.nodes)
    trained = _with_gradients(torch, nodes, parameters)
    for node in nodes:
        if str(node.target) == "aten.detach.default":
            if (change := _change_of(node)) is None:
                node.target = stop
            elif node.args[0] in trained:
                raise _unseen(torch, exported, name, node.args[0], change)
        if str(node.target).endswith("wrap_with_autocast") and node.args[0] == "cpu" and node.args[2]:
            raise FedraxError(f"{name} computes with fewer bits by autocast, which a trace does not know: leave it out")
        if _is_without_gradients(node):
            region = getattr(graph_module, node.args[1].target)
            inner = [n for n in region.graph.nodes if n.op == "placeholder"]
            for outer, within in zip(node.args[2:], inner, strict=True):
                if outer.name in parameters and (change := _change_of(within)) is not None:
                    raise _unseen(torch, exported, name, outer, change)
            _mark_changes_in_place(torch, region)
        if node.target is operator.getitem and node.args and _is_without_gradients(node.args[0]):
            region = getattr(graph_module, node.args[0].args[1].target)
            results = next(n for n in region.graph.nodes if n.op == "output").args[0]
            if not isinstance(node.meta.get("val"), torch.Tensor) or _changes_outer(results[node.args[1]]):
                continue
            with graph_module.graph.inserting_after(node):
                stopped = graph_module.graph.call_function(stop, (node,))
            stopped.meta = dict(node.meta)
            node.replace_all_uses_with(stopped, delete_user_cb=lambda user, made=stopped: user is not made)
    graph_module.recompile()


def _with_gradients(torch: ModuleType, nodes: Iterable[Any], parameters: Any) -> set[Any]:
    """The nodes that derivatives go through: what is made of parameters, in floats, and is not detached."""
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


def _change_of(node: Any) -> Any:
    """The operator that changes an array in place, itself or through views; None where none does."""
    for user in node.users:
        schema = getattr(user.target, "_schema", None)
        if schema is None or not user.args or user.args[0] is not node:
            continue
        alias = schema.arguments[0].alias_info
        if alias is not None and (change := user if alias.is_write else _change_of(user)) is not None:
            return change
    return None


def _unseen(torch: ModuleType, exported: Any, name: str, node: Any, change: Any) -> FedraxError:
    own = exported.graph_signature.inputs_to_parameters.get(node.name)
    what = "an array" if own is None else f"the parameter {own.removeprefix('module.')}"
    return FedraxError(f"{name} changes {what} where gradients do not see it ({line_of(torch, change)}): {ANOTHER}")


def _is_without_gradients(node: Any) -> bool:
    """Whether it is a part of the graph within ``no_grad``."""
    return str(node.target).endswith("wrap_with_set_grad_enabled") and node.args[0] is False


def _changes_outer(node: Any) -> bool:
    """Whether it changes an array in place that is not made within the same part of the graph."""
    if not getattr(getattr(node.target, "_schema", None), "is_mutable", False):
        return False
    while node.op == "call_function" and any(made.alias_info for made in node.target._schema.returns):
        node = node.args[0]  # of a view or a change to what is viewed or changed
    return node.op == "placeholder"


def _mark_changes_in_place(torch: ModuleType, region: Any) -> None:
    """What is changed without gradients has other values and the gradient of what it was."""
    own = _own_operators(torch)
    for node in [n for n in region.graph.nodes if _changes_outer(n)]:
        changed = node.args[0]
        with region.graph.inserting_before(node):
            before = region.graph.call_function(torch.ops.aten.clone.default, (changed,))
        with region.graph.inserting_after(node):
            after = region.graph.call_function(own.with_gradient_of.default, (node, before))
        with region.graph.inserting_after(after):
            region.graph.call_function(torch.ops.aten.copy_.default, (changed, after))
    region.recompile()


@functools.cache
def _own_operators(torch: ModuleType) -> Any:
    """Operators that PyTorch does not take apart."""
    library = torch.library.Library("fedrax", "DEF")
    library.define("stop_gradient(Tensor x) -> Tensor")
    library.define("with_gradient_of(Tensor x, Tensor other) -> Tensor")
    library.impl("stop_gradient", lambda x: x.clone(), "CompositeExplicitAutograd")
    library.impl("with_gradient_of", lambda x, other: x.clone(), "CompositeExplicitAutograd")
    _LIBRARIES.append(library)  # an operator lives as long as its library
    return torch.ops.fedrax


_LIBRARIES: list[Any] = []


def lost_derivatives(torch: ModuleType, module: Any, function: Callable, example: Any) -> tuple[Any, list[str]]:
    """(outputs, the names of what changes derivatives in ways that a trace does not know)."""
    found = {
        f"a backward hook of {type(part).__name__}"
        for part in module.modules()
        if part._backward_hooks or part._backward_pre_hooks
    }
    with torch.enable_grad(), _watch(torch)(found):
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


def hooked_parameters(module: Any) -> list[str]:
    """Parameters whose gradients a hook changes."""
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return [name for name, p in module.named_parameters() if any(getattr(p, kind, None) for kind in hooks)]


@functools.cache
def _watch(torch: ModuleType) -> type:
    """While it holds, functions enter the set that it is made with where a trace loses what they do."""
    lost = ("register_hook", "register_post_accumulate_grad_hook", "detach_")

    class Watch(torch.overrides.TorchFunctionMode):
        def __init__(self, found: set[str]):
            super().__init__()
            self.found = found

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(function, "__name__", "")
            if name in lost:
                self.found.add(name)
            return function(*args, **(kwargs or {}))

    return Watch
