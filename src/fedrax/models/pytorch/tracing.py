"""How PyTorch traces a module: with functions that its tracer knows, and without what the trace would lose."""

from __future__ import annotations

import functools
import operator
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from fedrax.errors import FedraxError
from fedrax.models.pytorch.lines import line_of_error
from fedrax.models.pytorch.operators import OPERATORS, key_of


def part_class(torch: ModuleType) -> type:
    """A module whose forward is a function of another: ``torch.export`` traces nothing else."""

    class Part(torch.nn.Module):
        def __init__(self, module: Any, function: Callable):
            super().__init__()
            self.module, self.function = module, function

        def forward(self, x: Any) -> Any:
            return self.function(self.module, x)

    return Part


def export(torch: ModuleType, module: Any, function: Callable, example: Any, name: str) -> Any:
    part = part_class(torch)(module, function)
    part.train(module.training)
    batch = torch.export.Dim.AUTO
    try:
        with quiet(torch), torch.enable_grad(), _known_functions(torch):
            exported = torch.export.export(part, (example,), dynamic_shapes=({0: batch},), strict=False)
            _mark_stopped_gradients(torch, exported.graph_module)
            known = torch.export.default_decompositions()
            unknown = {op: how for op, how in known.items() if key_of(op) not in OPERATORS}
            return exported.run_decompositions(unknown)
    except Exception as error:  # whatever the user's code or PyTorch's tracer makes of it
        cause = next((text for text in str(error).splitlines() if text.strip()), type(error).__name__)
        why = "what it does depends on the values of arrays" if "data-dependent" in str(error).lower() else cause
        raise FedraxError(f"{name} cannot be traced at {line_of_error(torch, error)}: {why}") from error


def _mark_stopped_gradients(torch: ModuleType, graph_module: Any) -> None:
    """Put operators of our own where gradients stop: decomposition leaves ``detach`` and ``no_grad`` out."""
    stop, nodes = _own_operators(torch).stop_gradient.default, list(graph_module.graph.nodes)
    for node in nodes:
        if str(node.target) == "aten.detach.default":
            node.target = stop
        if _is_without_gradients(node):
            _mark_changes_in_place(torch, getattr(graph_module, node.args[1].target))
        within = node.args and str(getattr(node.args[0], "target", "")).endswith("wrap_with_set_grad_enabled")
        if node.target is operator.getitem and within and _is_without_gradients(node.args[0]):
            region = getattr(graph_module, node.args[0].args[1].target)
            results = next(n for n in region.graph.nodes if n.op == "output").args[0]
            if not isinstance(node.meta.get("val"), torch.Tensor) or _changes_outer(results[node.args[1]]):
                continue
            with graph_module.graph.inserting_after(node):
                stopped = graph_module.graph.call_function(stop, (node,))
            stopped.meta = dict(node.meta)
            node.replace_all_uses_with(stopped, delete_user_cb=lambda user, made=stopped: user is not made)
    graph_module.recompile()


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


@functools.cache
def _known_functions(torch: ModuleType) -> Any:
    """While it holds, some functions are others of the same numbers.

    PyTorch computes distances in ways that depend on how many there are, which a trace would take for a condition on
    the batch, and asks of inverses and factors whether they exist, which a trace cannot. ``x.data`` its tracer loses.
    """
    linalg = torch.linalg

    def distances(x: Any, y: Any, p: float = 2.0, compute_mode: Any = None) -> Any:
        return linalg.vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), ord=p, dim=-1)

    def inverse(x: Any) -> Any:
        return linalg.inv_ex(x)[0]

    others = {
        torch.cdist: distances,
        torch.Tensor.data.__get__: torch.Tensor.detach,  # type: ignore[attr-defined]
        linalg.inv: inverse,
        torch.inverse: inverse,
        torch.Tensor.inverse: inverse,
        linalg.cholesky: lambda x, *, upper=False: linalg.cholesky_ex(x, upper=upper)[0],
        linalg.solve: lambda x, y, *, left=True: linalg.solve_ex(x, y, left=left)[0],
    }

    class Known(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return others.get(function, function)(*args, **(kwargs or {}))

    return Known()


@contextmanager
def quiet(torch: ModuleType) -> Iterator[None]:
    """Without warnings of the tracer's own, attention in its plain form, nothing compiled, and masks as they are.

    These are settings of the process: one thread at a time, or another would restore what the first has set.
    """
    with _ONE_AT_A_TIME:
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        # of a mask's values PyTorch asks whether it is the causal one, only to say which kernel it takes
        transformer, causal = torch.nn.modules.transformer, "_detect_is_causal_mask"
        detect = getattr(transformer, causal, None)
        setattr(transformer, causal, lambda mask, is_causal=None, size=None: is_causal is True)
        try:
            with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
                warnings.simplefilter("ignore")
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            setattr(transformer, causal, detect)


_ONE_AT_A_TIME = threading.RLock()


def lost_derivatives(torch: ModuleType, module: Any, function: Callable, example: Any) -> tuple[Any, list[str]]:
    """(outputs, the names of what changes derivatives in ways that a trace does not know)."""
    found = {
        f"a backward hook of {type(part).__name__}"
        for part in module.modules()
        if part._backward_hooks or part._backward_pre_hooks
    }
    with quiet(torch), torch.enable_grad(), _watch(torch)(found):
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
            if torch.is_inference_mode_enabled():
                self.found.add("inference_mode")
            return function(*args, **(kwargs or {}))

    return Watch
