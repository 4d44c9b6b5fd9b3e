"""Tracing of a PyTorch module by ``torch.export``, with replacements for functions that its tracer does not support."""

from __future__ import annotations

import functools
import io
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from types import ModuleType
from typing import Any

from fedrax.errors import FedraxError
from fedrax.inputs import map_inputs
from fedrax.models.pytorch.operators import OPERATORS, key_of
from fedrax.models.pytorch.source_locations import current_line, line_of_error
from fedrax.models.pytorch.stop_gradients import NEW_ARRAY_REMEDY, mark_stopped_gradients


def _wrapper_class(torch: ModuleType) -> type:
    """Class of modules whose ``forward`` is ``function(module, x)``, because ``torch.export`` traces modules only."""

    class Wrapper(torch.nn.Module):
        def __init__(self, module: Any, function: Callable):
            super().__init__()
            self.module, self.function = module, function

        def forward(self, x: Any) -> Any:
            before = [(module, name, buffer) for module in self.modules() for name, buffer in module._buffers.items()]
            outputs = self.function(self.module, x)
            # The tracer does not see a buffer that is assigned (self.mean = ...): it is copied in place.
            for module, name, buffer in before:
                after = module._buffers.get(name)
                if buffer is not None and after is not None and after is not buffer:
                    buffer.copy_(after.detach())
            return outputs

    return Wrapper


def export(torch: ModuleType, module: Any, function: Callable, example: Any, name: str) -> Any:
    """Trace ``function(module, x)`` for any batch size and decompose it into the operators that fedrax has.

    Args:
        torch: The module torch.
        module: The PyTorch module; its mode is that of the trace.
        function: (module, x) -> outputs.
        example: A batch of at least two samples, a tensor or several.
        name: Name of the function in messages.

    Returns:
        A ``torch.export.ExportedProgram``.

    Raises:
        FedraxError: The function cannot be traced; the message has the line of user code.
    """
    wrapper = _wrapper_class(torch)(module, function)
    wrapper.train(module.training)
    batch = torch.export.Dim.AUTO
    try:
        with (
            tracing_settings(torch),
            torch.enable_grad(),
            _replacements(torch),
            _inference_as_no_grad(torch),
            _cumulative_batch_norm(torch),
            _silent(),
        ):
            shapes = (map_inputs(lambda _: {0: batch}, example),)
            exported = torch.export.export(wrapper, (example,), dynamic_shapes=shapes, strict=False)
            mark_stopped_gradients(torch, exported, name)
            if not _needs_decomposition(exported):
                return exported
            decompositions = torch.export.default_decompositions()
            needed = {op: how for op, how in decompositions.items() if key_of(op) not in OPERATORS}
            return exported.run_decompositions(needed)
    except FedraxError:
        raise
    except Exception as error:  # any error of user code or of PyTorch's tracer
        cause = next((text for text in str(error).splitlines() if text.strip()), type(error).__name__)
        why = "control flow depends on the values of arrays" if "data-dependent" in str(error).lower() else cause
        raise FedraxError(f"{name} cannot be traced at {line_of_error(torch, error)}: {why}") from error


def _needs_decomposition(exported: Any) -> bool:
    """Whether a trace has operators that fedrax does not implement, changes arrays in place or holds other graphs.

    Decomposition takes longer than the trace itself.
    """
    for node in exported.graph.nodes:
        if node.op == "get_attr":
            return True
        if node.op == "call_function":
            mutates = getattr(getattr(node.target, "_schema", None), "is_mutable", False)
            if mutates or (hasattr(node.target, "_schema") and not _is_implemented(node.target)):
                return True
    return False


def _is_implemented(target: Any) -> bool:
    name = str(target)
    return key_of(target) in OPERATORS or name.startswith(("aten.sym_", "fedrax."))


@functools.cache
def _replacements(torch: ModuleType) -> Any:
    """Context manager that replaces functions which cannot be traced by equivalent ones.

    ``cdist`` selects an algorithm by the number of points, which the trace would take for a condition on the batch
    size. Inverses and factorizations check whether they exist, which depends on values. The tracer ignores ``x.data``.
    """
    linalg = torch.linalg

    def distances(x: Any, y: Any, p: float = 2.0, compute_mode: Any = None) -> Any:
        return linalg.vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), ord=p, dim=-1)

    def inverse(x: Any) -> Any:
        return linalg.inv_ex(x)[0]

    def quantized(x: Any, scale: Any, zero_point: Any, quant_min: int, quant_max: int) -> Any:
        constant = x.detach()
        steps = torch.round(constant * (1 / scale)) + zero_point
        # The straight-through gradient is one within the limits and zero outside.
        straight_through = torch.where((steps >= quant_min) & (steps <= quant_max), x - constant, 0)
        return (steps.clamp(quant_min, quant_max) - zero_point) * scale + straight_through

    def lstm(*arguments: Any) -> Any:
        outputs, *states = torch_lstm(*arguments)  # PyTorch 2.11 traces the states with an additional axis
        return outputs, *(state.reshape(state.shape[0], state.shape[-2], state.shape[-1]) for state in states)

    torch_lstm = torch._VF.lstm  # type: ignore[attr-defined]
    replacements = {
        torch_lstm: lstm,
        torch.cdist: distances,
        torch.Tensor.data.__get__: torch.Tensor.detach,  # type: ignore[attr-defined]
        linalg.inv: inverse,
        torch.inverse: inverse,
        torch.Tensor.inverse: inverse,
        linalg.cholesky: lambda x, *, upper=False: linalg.cholesky_ex(x, upper=upper)[0],
        linalg.solve: lambda x, y, *, left=True: linalg.solve_ex(x, y, left=left)[0],
        torch.fake_quantize_per_tensor_affine: quantized,
    }

    class Replacements(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if (kwargs or {}).get("max_norm") is not None:
                raise FedraxError(f"max_norm changes parameters in forward ({current_line(torch)}): {NEW_ARRAY_REMEDY}")
            if function == torch.Tensor.data.__set__:
                raise FedraxError(f"the data of an array is replaced ({current_line(torch)}): {NEW_ARRAY_REMEDY}")
            return replacements.get(function, function)(*args, **(kwargs or {}))

    return Replacements()


@contextmanager
def _silent() -> Iterator[None]:
    """Suppress the graph that the tracer prints with its errors."""
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        log.setLevel(level)


@contextmanager
def _inference_as_no_grad(torch: ModuleType) -> Iterator[None]:
    """Replace ``inference_mode`` by ``no_grad``, because the tracer does not record the former."""
    mode = torch.inference_mode
    enter, leave = mode.__enter__, mode.__exit__

    def entered(self: Any) -> None:
        self._before = torch.is_grad_enabled()
        torch.set_grad_enabled(self._before and not self.mode)

    try:
        mode.__enter__ = entered
        mode.__exit__ = lambda self, *error: torch.set_grad_enabled(self._before) and None
        yield
    finally:
        mode.__enter__, mode.__exit__ = enter, leave


@contextmanager
def _cumulative_batch_norm(torch: ModuleType) -> Iterator[None]:
    """Let ``BatchNorm(momentum=None)`` average by arrays: PyTorch's layer divides by a number that a trace lacks."""
    kind = torch.nn.modules.batchnorm._BatchNorm
    forward = kind.forward

    def averaged(self: Any, x: Any) -> Any:
        if self.momentum is not None or not (self.training and self.track_running_stats):
            return forward(self, x)
        self._check_input_dim(x)
        self.num_batches_tracked.add_(1)
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        outputs = torch.nn.functional.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.eps)
        for running, now in ((self.running_mean, mean), (self.running_var, var)):  # mean and var of this batch
            running.add_((now - running) / self.num_batches_tracked)
        return outputs

    kind.forward = averaged
    try:
        yield
    finally:
        kind.forward = forward


@contextmanager
def tracing_settings(torch: ModuleType) -> Iterator[None]:
    """Settings of PyTorch for tracing: no warnings, compilation, fused attention, or checks and plans by values.

    They are global in the process, so that only one thread at a time may change and restore them.
    """
    with _SETTINGS_LOCK:
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        # PyTorch compares an attention mask with the causal one to select a kernel, which depends on values.
        transformer, causal = torch.nn.modules.transformer, "_detect_is_causal_mask"
        detect = getattr(transformer, causal, None)
        setattr(transformer, causal, lambda mask, is_causal=None, size=None: is_causal is True)
        # Distributions check the range of their parameters, which depends on values.
        distribution = torch.distributions.Distribution
        validated = distribution._validate_args
        distribution.set_default_validate_args(False)
        # The order of the products in einsum is optimized for one batch size.
        planner = torch.backends.opt_einsum
        planned, planner.enabled = planner.enabled, False
        try:
            with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
                warnings.simplefilter("ignore")
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            setattr(transformer, causal, detect)
            distribution.set_default_validate_args(validated)
            planner.enabled = planned


_SETTINGS_LOCK = threading.RLock()
