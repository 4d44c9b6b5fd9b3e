"""How PyTorch traces a module: with functions that its tracer knows, and without what the trace would lose."""

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
from fedrax.models.pytorch.operators import OPERATORS, key_of
from fedrax.models.pytorch.source_locations import current_line, line_of_error
from fedrax.models.pytorch.stop_gradients import ANOTHER, mark_stopped_gradients


def part_class(torch: ModuleType) -> type:
    """A module whose forward is a function of another: ``torch.export`` traces nothing else."""

    class Part(torch.nn.Module):
        def __init__(self, module: Any, function: Callable):
            super().__init__()
            self.module, self.function = module, function

        def forward(self, x: Any) -> Any:
            held = [(part, name, buffer) for part in self.modules() for name, buffer in part._buffers.items()]
            outputs = self.function(self.module, x)
            for part, name, buffer in held:  # the tracer does not see one that is assigned: self.mean = ...
                now = part._buffers.get(name)
                if buffer is not None and now is not None and now is not buffer:
                    buffer.copy_(now.detach())
            return outputs

    return Part


def export(torch: ModuleType, module: Any, function: Callable, example: Any, name: str) -> Any:
    """``function(module, x)`` as ``torch.export`` writes it down, for any number of samples, in operators of the table.

    Raises FedraxError, with the user's line, for what cannot be traced.
    """
    part = part_class(torch)(module, function)
    part.train(module.training)
    batch = torch.export.Dim.AUTO
    try:
        with quiet(torch), torch.enable_grad(), _known_functions(torch), _plain_inference(torch), _silent():
            exported = torch.export.export(part, (example,), dynamic_shapes=({0: batch},), strict=False)
            mark_stopped_gradients(torch, exported, name)
            known = torch.export.default_decompositions()
            unknown = {op: how for op, how in known.items() if key_of(op) not in OPERATORS}
            return exported.run_decompositions(unknown)
    except FedraxError:
        raise
    except Exception as error:  # whatever the user's code or PyTorch's tracer makes of it
        cause = next((text for text in str(error).splitlines() if text.strip()), type(error).__name__)
        why = "what it does depends on the values of arrays" if "data-dependent" in str(error).lower() else cause
        raise FedraxError(f"{name} cannot be traced at {line_of_error(torch, error)}: {why}") from error


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

    def quantized(x: Any, scale: Any, zero_point: Any, quant_min: int, quant_max: int) -> Any:
        known = x.detach()
        steps = torch.round(known * (1 / scale)) + zero_point  # gradients go through where these are within the ends
        through = torch.where((steps >= quant_min) & (steps <= quant_max), x - known, 0)
        return (steps.clamp(quant_min, quant_max) - zero_point) * scale + through

    def lstm(*given: Any) -> Any:
        outputs, *states = torch_lstm(*given)  # PyTorch 2.11 traces the states with one axis too many
        return outputs, *(state.reshape(state.shape[0], state.shape[-2], state.shape[-1]) for state in states)

    torch_lstm = torch._VF.lstm  # type: ignore[attr-defined]
    others = {
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

    class Known(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if (kwargs or {}).get("max_norm") is not None:
                raise FedraxError(f"max_norm changes rows when they are read ({current_line(torch)}): {ANOTHER}")
            if function == torch.Tensor.data.__set__:
                raise FedraxError(f"the data of an array is replaced ({current_line(torch)}): {ANOTHER}")
            return others.get(function, function)(*args, **(kwargs or {}))

    return Known()


@contextmanager
def _silent() -> Iterator[None]:
    """Without the graph that the tracer prints beside its error."""
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        log.setLevel(level)


@contextmanager
def _plain_inference(torch: ModuleType) -> Iterator[None]:
    """``inference_mode`` as ``no_grad``: of the former the tracer writes nothing down."""
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
def quiet(torch: ModuleType) -> Iterator[None]:
    """Without warnings, attention and products in their plain form, nothing compiled, and masks as they are.

    These are settings of the process: one thread at a time, or another would restore what the first has set.
    """
    with _ONE_AT_A_TIME:
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        # of a mask's values PyTorch asks whether it is the causal one, only to say which kernel it takes
        transformer, causal = torch.nn.modules.transformer, "_detect_is_causal_mask"
        detect = getattr(transformer, causal, None)
        setattr(transformer, causal, lambda mask, is_causal=None, size=None: is_causal is True)
        # distributions ask whether their parameters are in range
        distribution = torch.distributions.Distribution
        validated = distribution._validate_args
        distribution.set_default_validate_args(False)
        # the order of products is planned for one size of the batch
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


_ONE_AT_A_TIME = threading.RLock()
