"""``from_torch``: convert a PyTorch module to a model."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax.config.arguments import checked_arguments
from fedrax.contract.model import Model, Params, Variables
from fedrax.devices import use_all_cores
from fedrax.errors import FedraxError, unknown, warn
from fedrax.inputs import arrays_of, as_arguments, has_several, map_inputs
from fedrax.models.adapters.modules import ModuleFunction
from fedrax.models.pytorch.export import tracing_settings
from fedrax.models.pytorch.module_state import call_with_state_check
from fedrax.models.pytorch.source_locations import line_of_error
from fedrax.models.pytorch.stop_gradients import custom_derivatives, parameters_with_hooks
from fedrax.models.pytorch.traced_module import INT64_MESSAGE, TracedModule, fixed_batch_message

_FAST_COMPILATION: dict[str, Any] = {"compiler_options": {"xla_backend_optimization_level": 1}}
"""Options of jax.jit for a program that runs once: compilation takes longer than execution."""
_MOST_SAMPLES = 4
"""Samples of the example that are used: a forward pass of a large model on many takes longer than its trace."""
TOLERANCE = 1e-5
"""Largest accepted difference of outputs in JAX and PyTorch, relative to the largest output or 1."""


@dataclass(frozen=True, eq=False, repr=False)
class TorchModel(Model):
    """A model made by `from_torch`, whose trained parameters can be exported to PyTorch.

    Example:
        >>> model = fedrax.models.from_torch(torch.nn.Linear(3, 2), torch.ones(4, 3))  # doctest: +SKIP
        >>> module = model.to_torch(model.init(jax.random.key(0)))  # doctest: +SKIP
        >>> torch.save(module.state_dict(), "model.pt")  # doctest: +SKIP
    """

    module: Any = None
    """A copy of the module given to `from_torch`, which shares the memory of its frozen parameters."""
    running_buffers: frozenset[str] = field(default_factory=frozenset)
    """Names of the buffers that training updates, such as batch norm's running statistics."""
    _check_frozen: Callable[[], None] = lambda: None
    """Raises FedraxError if frozen parameters have been changed in place."""

    def to_torch(self, trained: Any) -> Any:
        """Copy the module with trained values, in evaluation mode.

        Args:
            trained: A :class:`fedrax.Result`, :class:`fedrax.contract.Variables` or parameters. Running statistics
                are taken from a result or Variables.

        Returns:
            A ``torch.nn.Module``.

        Raises:
            FedraxError: ``trained`` has other names or shapes than the module's parameters, or frozen parameters have
                been changed in place.
        """
        torch = _torch()
        self._check_frozen()
        params = getattr(trained, "params", trained)
        values = _flat(params) | _flat(getattr(trained, "statistics", None) or {})
        copied = _copy(torch, self.module).eval()
        tensors = dict(copied.named_parameters()) | dict(copied.named_buffers())
        wanted = {name for name, p in copied.named_parameters() if p.requires_grad}
        if not wanted <= set(values) <= wanted | self.running_buffers:
            raise FedraxError(f"these are not the parameters of {self.name}, which are {', '.join(sorted(wanted))}")
        with torch.no_grad():
            for name, value in values.items():
                if tuple(np.shape(value)) != tuple(tensors[name].shape):
                    raise FedraxError(f"{name} has shape {np.shape(value)}, should be {tuple(tensors[name].shape)}")
                tensors[name].copy_(torch.from_numpy(np.array(value)))
        return copied


@checked_arguments
def from_torch(
    module: Any,
    example: Any,
    *,
    features: ModuleFunction | None = None,
    blocks: Sequence[ModuleFunction] = (),
    channels_last: bool = False,
) -> TorchModel:
    """Convert a PyTorch module, which maps a batch [B, ...] to outputs [B, ...], to a model computed in JAX.

    The forward pass is traced in evaluation and in training mode. Parameters are nested dictionaries under the
    module's names. Those with ``requires_grad=False`` are frozen and share the module's memory: runs of the model raise
    FedraxError if they have been changed in place. Buffers that training updates, such as batch norm's, are running
    statistics. JAX draws the random numbers, such as dropout's. The outputs for ``example`` are compared with PyTorch's
    in evaluation mode and, if nothing is random, in training mode.

    Several inputs of a sample are keyword arguments of ``forward`` (a dictionary, as ``transformers`` takes them) or
    positional ones (a tuple). Where it returns an output of ``transformers``, the model's outputs are its ``logits``.

    Warns if most of the trained values belong to peft's ``modules_to_save``, whole modules besides the adapters.

    Args:
        module: A module, which is the initial value for every key; or a class or function without arguments that
            makes one, for which PyTorch draws an initial value per key.
        example: A batch [B, ...] in the module's layout, images as [B, C, H, W]; a dictionary or tuple of such arrays
            where samples have several inputs.
        features: Method name or function (module, x) that gives the input of the last layer.
        blocks: Method names or functions (module, x) that ``forward`` applies one after the other.
        channels_last: Whether the model's inputs are [B, ..., C], as fedrax reads images; they are transposed for the
            module, of several inputs all.

    Returns:
        The model.

    Raises:
        FedraxError: PyTorch is not installed, the module cannot be traced or uses an operator that is not supported
            (with the source line), or the outputs in JAX and PyTorch differ.

    Example:
        >>> model = fedrax.models.from_torch(torch.nn.Linear(3, 2), torch.ones(4, 3))  # doctest: +SKIP
        >>> model.apply(model.init(jax.random.key(0)), jnp.ones((5, 3))).shape  # doctest: +SKIP
        (5, 2)
    """
    torch = _torch()
    make = module if callable(module) and not isinstance(module, torch.nn.Module) else None
    net = _checked_copy(torch, module if make is None else _create(torch, make, 0))
    name = type(net).__name__
    batch = _example_batch(torch, net, example, name)
    whole = _TracedFunction(torch, net, _forward, batch, name)
    state = _ModuleState(torch, net, whole.training.updated_buffers)
    if updated := ", ".join(whole.evaluation.updated_buffers):
        raise FedraxError(f"{name} updates {updated} in evaluation too: do it only if self.training")
    whole.compare(state, batch)
    _warn_of_saved_modules({name: state.initial[name].size for name in state.trained})

    def apply_of(traced: _TracedFunction, first: bool = True) -> Callable:
        transposed = channels_last and first
        return lambda variables, x, key=None: traced.run(state, variables, _channels_first(x, transposed), key)[0]

    def train(variables: Variables, x: Array, key: Array) -> tuple[Array, Any]:
        outputs, updated = whole.run(state, variables, _channels_first(x, channels_last), key)
        return outputs, _nested(updated)

    _check_batch_sizes(apply_of(whole, first=False), state.init(jax.random.key(0)), batch, name)
    block_functions, inputs = [], batch
    for index, block in enumerate(blocks):
        traced = _TracedFunction(torch, net, _function(net, block), inputs, f"{name}, block {block}")
        block_functions.append(apply_of(traced, index == 0))
        inputs = traced.expected
    features_function = None
    if features is not None:
        features_function = apply_of(_TracedFunction(torch, net, _function(net, features), batch, name))
    return TorchModel(
        init=state.init if make is None else state.init_by(lambda seed: _create(torch, make, seed)),
        apply=apply_of(whole),
        features=features_function,
        name=name,
        blocks=tuple(block_functions) or None,
        train=train if state.running else None,
        frozen=state.constants,
        module=net,
        running_buffers=frozenset(state.running),
        _check_frozen=state.check_frozen,
    )


def _warn_of_saved_modules(trained: dict[str, int]) -> None:
    """Warn if most trained values are of whole modules that peft's ``modules_to_save`` trains besides the adapters."""
    whole: dict[str, int] = {}
    for name, size in trained.items():
        module, found, _ = name.partition(".modules_to_save.")
        if found:
            whole[module] = whole.get(module, 0) + size
    saved, total = sum(whole.values()), sum(trained.values())
    if 2 * saved > total:
        named = ", ".join(f"{module.removeprefix('base_model.model.')} ({n:,})" for module, n in whole.items())
        warn(
            f"from_torch: clients train and send {saved:,} values of whole modules beside {total - saved:,} of the"
            f" adapters: {named}; peft copies the modules of modules_to_save and trains them entirely"
        )


def _forward(net: Any, x: Any) -> Any:
    """The module's outputs for a batch; the logits of an output of ``transformers``."""
    outputs = _call(net, x)
    return outputs.logits if hasattr(outputs, "logits") else outputs


def _call(function: Callable, x: Any) -> Any:
    """Call a module or method with one or several inputs."""
    positional, named = as_arguments(x)
    return function(*positional, **named)


def _checked_copy(torch: ModuleType, source: Any) -> Any:
    """A copy of a module in evaluation mode; raises FedraxError for modules that are not supported."""
    source = getattr(source, "_orig_mod", source)  # the original of a module compiled by torch.compile
    if isinstance(source, torch.jit.ScriptModule):
        raise FedraxError(f"{type(source).__name__} is compiled for TorchScript: give the module that it was made of")
    if not isinstance(source, torch.nn.Module):
        raise FedraxError(
            f"from_torch takes a torch.nn.Module, or a function that creates one, not {type(source).__name__}"
        )
    if any(torch.nn.parameter.is_lazy(p) for p in (*source.parameters(), *source.buffers())):
        raise FedraxError(f"{type(source).__name__} has layers without a shape yet: call it once, module(example)")
    short = next((str(p.dtype) for p in source.parameters() if p.dtype in (torch.float16, torch.bfloat16)), None)
    if short is not None:
        raise FedraxError(f"{type(source).__name__} has parameters of {short}: from_torch(module.float(), example)")
    if hooked := parameters_with_hooks(source):
        raise FedraxError(
            f"{type(source).__name__} has hooks of gradients ({hooked[0]}), which cannot be traced: do the same in"
            " forward, and set requires_grad=False for frozen parameters"
        )
    return _copy(torch, source, _frozen_aliases(torch, source)).cpu().eval()


def _frozen_aliases(torch: ModuleType, module: Any) -> dict[int, Any]:
    """For frozen parameters, by ID, parameters of the same memory: most of a pretrained model, which is not copied."""
    return {
        id(p): torch.nn.Parameter(p.detach(), requires_grad=False)  # it has the version counter of ``p``
        for p in module.parameters()
        if type(p) is torch.nn.Parameter and not (p.requires_grad or p.is_inference()) and p.device.type == "cpu"
    }


def _copy(torch: ModuleType, module: Any, shared: dict[int, Any] | None = None) -> Any:
    """A deep copy of a module, also with attributes that were computed from parameters.

    shared: objects by ID that are not copied.
    """
    # Such tensors (as of the old weight_norm) cannot be copied with their autograd graph: they are detached.
    detached: dict[int, Any] = dict(shared or {})

    def detach(value: Any) -> None:
        if isinstance(value, torch.Tensor) and not value.is_leaf:
            detached[id(value)] = value.detach().clone()
        elif isinstance(value, (dict, list, tuple)):
            for entry in value.values() if isinstance(value, dict) else value:
                detach(entry)

    for submodule in module.modules():
        detach(vars(submodule))
    return copy.deepcopy(module, detached)


def _copy_sharing_parameters(torch: ModuleType, module: Any) -> Any:
    """A copy of a module with buffers and attributes of its own, which shares the parameters."""
    return _copy(torch, module, {id(p): p for p in module.parameters()})


def _check_batch_sizes(apply: Callable, variables: Any, batch: Any, name: str) -> None:
    """Raise FedraxError for a module that takes only the example's batch size; the tracer does not always notice."""
    rows = _rows(batch)

    def with_one_more(part: Any) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(_array(part[:1]).dtype)
        return jax.ShapeDtypeStruct((rows + 1, *part.shape[1:]), dtype)

    try:
        fits = jax.eval_shape(apply, variables, map_inputs(with_one_more, batch)).shape[0] == rows + 1
    except FedraxError:
        fits = False
    if not fits:
        raise FedraxError(fixed_batch_message(rows, name))


def _rows(batch: Any) -> int:
    """Number of samples of a batch."""
    return len(arrays_of(batch)[0])


class _TracedFunction:
    """A function (module, x), traced in evaluation and in training mode."""

    def __init__(self, torch: ModuleType, module: Any, function: Callable, batch: Any, name: str):
        self._torch, self._name, self._function = torch, name, function
        self._eager = lambda net: function(net, batch)
        with tracing_settings(torch):
            outputs, custom = custom_derivatives(torch, module, function, batch)
        if not isinstance(outputs, torch.Tensor):
            raise FedraxError(f"{name} returns {type(outputs).__name__}, not one array: wrap it in a module that does")
        self._check_derivatives(custom)
        self._module, self.expected = module, outputs.detach()
        self.evaluation = TracedModule(torch, module, function, batch, name)
        self.training = TracedModule(torch, _copy_sharing_parameters(torch, module).train(), function, batch, name)
        with torch.random.fork_rng(devices=[]), tracing_settings(torch):
            copied = _copy_sharing_parameters(torch, module).train()
            self._check_derivatives(custom_derivatives(torch, copied, function, batch)[1])

    def _check_derivatives(self, custom: Sequence[str]) -> None:
        """Raise FedraxError for derivatives that the trace does not have."""
        if custom:
            raise FedraxError(
                f"{self._name} has custom derivatives, or hooks of them, which cannot be traced ({', '.join(custom)}):"
                " write them with detach, as x + (f(x) - x).detach() for f with the derivative of x; checkpoint(...)"
                " needs use_reentrant=False"
            )

    def run(self, state: _ModuleState, variables: Any, x: Any, key: Array | None) -> tuple[Array, dict]:
        """(outputs, running buffers by name); with a key in training mode."""
        state.check_frozen()
        params, statistics = variables if state.running else (variables, {})
        leaves = jax.tree.leaves(params)
        float_type = jnp.result_type(*leaves) if leaves else jnp.float32
        values = {**state.constants, **_flat(params), **_flat(statistics)}
        values = {alias: values[own] for alias, own in state.names.items() if own in values}
        traced = self.evaluation if key is None else self.training
        outputs, updated, _ = traced.run(values, x, key, float_type)
        return outputs, {name: updated.get(name, values[name]) for name in state.running}

    def compare(self, state: _ModuleState, batch: Any) -> None:
        """Raise FedraxError if outputs differ from PyTorch's, or do not have a row for each sample."""
        values = {alias: state.initial[own] for alias, own in state.names.items()}
        expected_single = self._outputs_of_single(map_inputs(lambda part: part[:1], batch))
        x, random = map_inputs(_array, batch), []

        def evaluation(values: dict, x: Any) -> tuple[Array, Array | None]:
            first, single = map_inputs(lambda part: part[:1], x), None
            if expected_single is not None:
                single = self.evaluation.run(values, first, None, jnp.float32)[0]
            return self.evaluation.run(values, x, None, jnp.float32)[0], single

        def training(values: dict, x: Any) -> tuple[Array, dict]:
            outputs, updated, drawn = self.training.run(values, x, jax.random.key(0), jnp.float32)
            random.append(drawn)
            return outputs, updated

        with jax.default_matmul_precision("highest"):
            evaluated, single = jax.jit(evaluation, **_FAST_COMPILATION)(values, x)
        self._compare("evaluation", evaluated, self.expected)
        if self.expected.shape[:1] != (_rows(batch),):
            raise FedraxError(
                f"{self._name} returns outputs of shape {tuple(self.expected.shape)} for {_rows(batch)} samples: the"
                " first axis must be the samples, and positions the next"
            )
        if single is not None and single.shape == expected_single.shape:  # squeeze() may remove the axis in PyTorch
            self._compare("evaluation of a single sample", single, expected_single)
        net = _copy_sharing_parameters(self._torch, self._module).train()
        with tracing_settings(self._torch):
            expected, buffers = call_with_state_check(self._torch, net, self._eager, self._name)
        with jax.default_matmul_precision("highest"):
            traced = jax.jit(training, **_FAST_COMPILATION).trace(values, x)
            if any(random):
                return
            outputs, updated = traced.lower().compile()(values, x)
        self._compare("training", outputs, expected)
        for name, value in updated.items():
            self._compare(f"training, {name}", value, buffers[name])

    def _outputs_of_single(self, sample: Any) -> Any:
        """PyTorch's outputs for a batch of one, a size that the tracer does not try; None if they are not finite."""
        with tracing_settings(self._torch), self._torch.no_grad():
            try:
                outputs = self._function(self._module, sample)
            except Exception:  # any error of user code
                return None
        return outputs if outputs.isfinite().all() else None

    def _compare(self, where: str, found: Array, expected: Any) -> None:
        """Raise FedraxError if an array differs from PyTorch's by more than ``TOLERANCE``."""
        kind = self._torch.complex128 if expected.is_complex() else self._torch.float64
        wanted = expected.detach().to(kind).numpy()
        if found.shape != wanted.shape:
            raise FedraxError(
                f"{self._name} in {where}: the shape is {found.shape} in JAX and {wanted.shape} in PyTorch"
            )
        numbers = np.asarray(found).astype(wanted.dtype)
        differ = numbers != wanted  # equal infinities, as of masked entries, are equal
        error = float(np.max(np.abs(numbers[differ] - wanted[differ]), initial=0.0))
        limit = TOLERANCE * max(1.0, float(np.max(np.abs(wanted[np.isfinite(wanted)]), initial=0.0)))
        if not error <= limit:
            raise FedraxError(
                f"{self._name} in {where}: JAX's numbers differ from PyTorch's by {error:.2g}, at most {limit:.2g} is"
                " accepted"
            )


class _ModuleState:
    """A module's parameters and buffers: trained, running (updated by training) and constant ones."""

    def __init__(self, torch: ModuleType, module: Any, updated: Sequence[str]):
        shared: dict[int, str] = {}
        self.names: dict[str, str] = {}
        """For each name of a tensor, the first of its names: modules may share tensors."""
        self.initial: dict[str, Any] = {}
        trained = []
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        for name, tensor in tensors:
            own = self.names[name] = shared.setdefault(id(tensor), name)
            if own == name:
                self.initial[name] = _array(tensor)
                trained += [name] if tensor.requires_grad else []
        self.trained, self.running = trained, [name for name in updated if name in self.initial]
        frozen = {name: p for name, p in module.named_parameters() if not (p.requires_grad or p.is_inference())}
        self._frozen = {name: (p, p._version) for name, p in frozen.items()}
        """Frozen parameters, and PyTorch's counts of their changes in place."""
        variable = (*self.trained, *self.running)
        # JAX arrays, so that the programs of a model share them; jnp.asarray would copy. Those of 64 bits depend on a
        # setting of JAX.
        self.constants = {
            name: jax.device_put(a) if a.dtype.itemsize < 8 else a
            for name, a in self.initial.items()
            if name not in variable
        }
        self.initial |= self.constants
        if not self.trained:
            raise FedraxError(
                f"{type(module).__name__} has no parameters with requires_grad=True: there is nothing to train"
            )

    def check_frozen(self) -> None:
        """Raise FedraxError if frozen parameters have been changed in place."""
        changed = [name for name, (p, version) in self._frozen.items() if p._version != version]
        if changed:
            more = f" and {len(changed) - 1} others" if len(changed) > 1 else ""
            raise FedraxError(
                f"the frozen parameter {changed[0]}{more} of the module given to from_torch, whose memory the model"
                " shares, has been changed in place: convert a copy, from_torch(copy.deepcopy(module), ...)"
            )

    def init(self, key: Array) -> Params:
        """The module's own values, for any key."""
        self.check_frozen()
        return self._variables({name: jnp.asarray(a) for name, a in self.initial.items()})

    def init_by(self, make: Callable[[int], Any]) -> Callable[[Array], Params]:
        """An initializer whose values are those of ``make(seed)``, with a seed derived from the key."""

        def draw(shapes: dict[str, jax.ShapeDtypeStruct], bits: np.ndarray) -> dict[str, np.ndarray]:
            seed = int(np.asarray(bits, np.uint64) @ np.array([1 << 32, 1], np.uint64)) if np.size(bits) == 2 else 0
            module = make(seed % (1 << 63))
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            return {name: _array(tensors[name]).astype(shape.dtype) for name, shape in shapes.items()}

        def init(key: Array) -> Params:
            self.check_frozen()
            bits = jax.random.bits(key, (2,), jnp.uint32)
            # Types depend on whether float64 is enabled when init is called.
            types = {name: jax.dtypes.canonicalize_dtype(a.dtype) for name, a in self.initial.items()}
            shapes = {name: jax.ShapeDtypeStruct(a.shape, types[name]) for name, a in self.initial.items()}
            return self._variables(jax.pure_callback(partial(draw, shapes), shapes, bits, vmap_method="sequential"))

        return init

    def _variables(self, values: dict[str, Any]) -> Params:
        """The model's variables from values by name."""
        params = _nested({name: values[name] for name in self.trained})
        return Variables(params, _nested({name: values[name] for name in self.running})) if self.running else params


def _torch() -> ModuleType:
    """Import PyTorch; raises FedraxError if it is not installed."""
    use_all_cores()  # before the first array: JAX fixes its devices when it creates one
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise FedraxError("this model needs torch: pip install 'fedrax[torch]'.") from None


def _create(torch: ModuleType, make: Callable, seed: int) -> Any:
    """``make()`` with PyTorch's random seed set to ``seed``; its global random state does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _example_batch(torch: ModuleType, module: Any, example: Any, name: str) -> Any:
    """The example as tensors of at least two samples that the module accepts, floats in the module's dtype."""
    kind = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    example = dict(sorted(example.items())) if isinstance(example, Mapping) else example
    several = has_several(example)

    def read(part: Any) -> Any:
        try:
            batch = torch.as_tensor(part if isinstance(part, torch.Tensor) else np.asarray(part)).detach().cpu()
        except (TypeError, ValueError) as error:
            raise FedraxError(f"the example must be a batch of numbers, an array [B, ...]: {error}") from None
        if batch.ndim < 1 or not len(batch):
            raise FedraxError(
                f"the example must be a batch [B, ...] of at least one sample, not of shape {tuple(batch.shape)}"
            )
        batch = batch[:_MOST_SAMPLES]
        if not (several and batch.dtype == torch.bool):  # Booleans beside other inputs are masks
            batch = batch.to(kind if batch.is_floating_point() else torch.int64)
        return batch if len(batch) > 1 else torch.cat([batch, batch])  # PyTorch's tracer takes a size of 1 for constant

    batch = map_inputs(read, example)
    if len(sizes := {len(part) for part in arrays_of(batch)}) != 1:
        raise FedraxError(f"the inputs of the example must have one number of samples, not {sorted(sizes)}")
    try:
        with tracing_settings(torch), torch.enable_grad():
            _call(module, batch)
    except Exception as error:  # any error of user code
        cause = next((text for text in str(error).splitlines() if text.strip()), type(error).__name__)
        where = line_of_error(torch, error)
        shapes = " and ".join(str(tuple(part.shape)) for part in arrays_of(batch))
        hint = _size_hint(module, batch)
        raise FedraxError(f"{name} does not take an example of shape {shapes} at {where}: {cause}{hint}") from error
    return batch


def _size_hint(module: Any, batch: Any) -> str:
    """What may be wrong with the tokens of an example: more than a model of ``transformers`` has positions or words."""
    config = next((part.config for part in module.modules() if hasattr(part, "config")), None)
    tokens = batch.get("input_ids") if isinstance(batch, dict) else batch
    if config is None or has_several(tokens) or tokens is None or tokens.is_floating_point():
        return ""
    positions, words = (getattr(config, name, None) for name in ("max_position_embeddings", "vocab_size"))
    if isinstance(positions, int) and tokens.ndim == 2 and tokens.shape[1] > positions:
        return (
            f"; texts have {tokens.shape[1]} tokens, and the model {positions} positions: shorten them to {positions}"
        )
    if isinstance(words, int) and int(tokens.max()) >= words:
        return f"; there is a token {int(tokens.max())}, and the model has {words} words: use the model's own tokenizer"
    return ""


def _function(module: Any, function: ModuleFunction) -> Callable:
    """A function (module, x), for the name of a method too."""
    if not isinstance(function, str):
        return function
    if not callable(getattr(module, function, None)):
        known = [name for name, value in vars(type(module)).items() if callable(value) and not name.startswith("_")]
        raise unknown(f"method of {type(module).__name__}", function, known)
    return lambda net, x: _call(getattr(net, function), x)


def _channels_first(x: Any, channels_last: bool) -> Any:
    """[B, ..., C] -> [B, C, ...] if ``channels_last``."""
    return map_inputs(lambda part: jnp.moveaxis(jnp.asarray(part), -1, 1), x) if channels_last else x


def _array(tensor: Any) -> np.ndarray:
    """A tensor as a NumPy array of a type that JAX has: integers as int32, floats as float32 or float64.

    The array shares the tensor's memory where it can.
    """
    array = tensor.detach().cpu()
    array = array.float() if array.is_floating_point() and array.element_size() < 8 else array
    values = array.numpy()
    if values.dtype != np.int64:
        return values
    if values.size and (values.max() >= 1 << 31 or values.min() < -(1 << 31)):
        raise FedraxError(INT64_MESSAGE)
    return values.astype(np.int32)


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Nested dictionaries from dotted names."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *prefixes, last = name.split(".")
        node = tree
        for prefix in prefixes:
            node = node.setdefault(prefix, {})
        node[last] = value
    return tree


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Values by dotted name, from nested dictionaries."""
    if not isinstance(tree, dict):
        return {prefix[:-1]: tree}
    return {name: v for key, value in tree.items() for name, v in _flat(value, f"{prefix}{key}.").items()}
