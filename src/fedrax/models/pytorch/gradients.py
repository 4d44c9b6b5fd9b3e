"""Where gradients stop: what a trace has of ``detach`` and ``no_grad``, and what it would lose."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from fedrax.errors import FedraxError
from fedrax.models.pytorch.lines import line_of

ANOTHER = "compute with another array instead, as in F.linear(x, changed(self.weight))"


def mark_stopped_gradients(torch: ModuleType, exported: Any, name: str) -> None:
    """Put an operator of our own where gradients stop: decomposition leaves ``detach`` and ``no_grad`` out.

    An array that is changed in place where gradients do not see it is refused, unless it has none.
    """
    graph_module = exported.graph_module
    stop, nodes = _stop_gradient(torch), list(graph_module.graph.nodes)
    trained = _with_gradients(torch, nodes, exported.graph_signature.inputs_to_parameters)
    for node in nodes:
        if str(node.target) == "aten.detach.default":
            if (change := _change_of(node)) is None:
                node.target = stop
            elif node.args[0] in trained:
                raise _unseen(torch, exported, name, node.args[0], change)
        if str(node.target).endswith("wrap_with_autocast") and node.args[0] == "cpu" and node.args[2]:
            raise FedraxError(f"{name} computes with fewer bits by autocast, which a trace does not know: leave it out")
        if str(node.target).endswith("wrap_with_set_grad_enabled") and node.args[0] is False:
            inner = [n for n in getattr(graph_module, node.args[1].target).graph.nodes if n.op == "placeholder"]
            for outer, within in zip(node.args[2:], inner, strict=True):
                if outer in trained and (change := _change_of(within)) is not None:
                    raise _unseen(torch, exported, name, outer, change)
        within = node.args and str(getattr(node.args[0], "target", "")).endswith("wrap_with_set_grad_enabled")
        if node.target is operator.getitem and within and node.args[0].args[0] is False:
            if not isinstance(node.meta.get("val"), torch.Tensor):
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


@functools.cache
def _stop_gradient(torch: ModuleType) -> Any:
    """An operator that PyTorch does not take apart."""
    library = torch.library.Library("fedrax", "DEF")
    library.define("stop_gradient(Tensor x) -> Tensor")
    library.impl("stop_gradient", lambda x: x.clone(), "CompositeExplicitAutograd")
    _LIBRARIES.append(library)  # an operator lives as long as its library
    return torch.ops.fedrax.stop_gradient.default


_LIBRARIES: list[Any] = []


def refuse_own_derivatives(torch: ModuleType, outputs: Any, name: str) -> None:
    """Of the functions that outputs were made by, a trace has what they compute, not a derivative of their own."""
    found, seen, waiting = set(), set(), [outputs.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [other for other, _ in node.next_functions]
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            found.add(type(node).__name__.removesuffix("Backward"))
    if found:
        raise FedraxError(
            f"{name} has derivatives of its own, or hooks of them, which a trace does not know"
            f" ({', '.join(sorted(found))}): write what they do with detach, as in x + (f(x) - x).detach() for f with"
            " the derivative of x; checkpoint(...) needs use_reentrant=False"
        )


def refuse_hooks(module: Any) -> None:
    """Of what a parameter's hook makes of its gradient, a trace has nothing."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise FedraxError(f"the parameter {name} has a hook of its gradient, which a trace does not know")
