"""``from_torch``: convert a PyTorch module to a model."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax.contract.model import Model, Params, Variables
from fedrax.devices import use_all_cores
from fedrax.errors import FedraxError, unknown
from fedrax.models.pytorch.export import quiet
from fedrax.models.pytorch.module_state import called_once
from fedrax.models.pytorch.program import BEYOND, Program, only_batches_of
from fedrax.models.pytorch.source_locations import line_of_error
from fedrax.models.pytorch.stop_gradients import hooked_parameters, lost_derivatives

QUICK: dict[str, Any] = {"compiler_options": {"xla_backend_optimization_level": 1}}
"""What is run once need not run fast."""
Part = str | Callable[..., Any]
"""A method's name, or a function of the module and x."""
TOLERANCE = 1e-5
"""Largest difference of outputs in JAX and PyTorch, relative to the largest output or 1."""


@dataclass(frozen=True, eq=False, repr=False)
class TorchModel(Model):
    """A model made by `from_torch`, whose trained parameters can be exported to PyTorch.

    Example:
        >>> model = fedrax.models.from_torch(torch.nn.Linear(3, 2), torch.ones(4, 3))  # doctest: +SKIP
        >>> module = model.to_torch(model.init(jax.random.key(0)))  # doctest: +SKIP
        >>> torch.save(module.state_dict(), "model.pt")  # doctest: +SKIP
    """

    module: Any = None
    """A copy of the module as it was given to `from_torch`."""
    moving: frozenset[str] = field(default_factory=frozenset)
    """Names of the buffers that training updates, such as batch norm's running statistics."""

    def to_torch(self, trained: Any) -> Any:
        """Copy the module with trained values, in evaluation mode.

        Args:
            trained: A :class:`fedrax.Result`, :class:`fedrax.contract.Variables` or parameters. Running statistics
                are taken from a result or Variables.

        Returns:
            A ``torch.nn.Module``.

        Raises:
            FedraxError: ``trained`` has other names or shapes than the module's parameters.
        """
        torch = _torch()
        params = getattr(trained, "params", trained)
        values = _flat(params) | _flat(getattr(trained, "statistics", None) or {})
        made = _copied(torch, self.module).eval()
        places = dict(made.named_parameters()) | dict(made.named_buffers())
        wanted = {name for name, p in made.named_parameters() if p.requires_grad}
        if not wanted <= set(values) <= wanted | self.moving:
            raise FedraxError(f"these are not the parameters of {self.name}: it has {', '.join(sorted(wanted))}")
        with torch.no_grad():
            for name, value in values.items():
                if tuple(np.shape(value)) != tuple(places[name].shape):
                    raise FedraxError(f"{name} has shape {np.shape(value)}, should be {tuple(places[name].shape)}")
                places[name].copy_(torch.from_numpy(np.array(value)))
        return made


def from_torch(
    module: Any,
    example: Any,
    *,
    features: Part | None = None,
    blocks: Sequence[Part] = (),
    channels_last: bool = False,
) -> TorchModel:
    """Convert a PyTorch module, which maps a batch [B, ...] to outputs [B, ...], to a model computed in JAX.

    The forward pass is traced in evaluation and in training mode. Parameters are nested dictionaries under the
    module's names; those with ``requires_grad=False`` are frozen. Buffers that training updates, such as batch norm's,
    are running statistics. JAX draws the random numbers, such as dropout's. The outputs for ``example`` are compared
    with PyTorch's in evaluation mode and, if nothing is random, in training mode.

    Args:
        module: A module, which is the initial value for every key; or a class or function without arguments that
            makes one, for which PyTorch draws an initial value per key.
        example: A batch [B, ...] in the module's layout, images as [B, C, H, W].
        features: Method name or function (module, x) that gives the input of the last layer.
        blocks: Method names or functions (module, x) that ``forward`` applies one after the other.
        channels_last: Whether the model's inputs are [B, ..., C], as fedrax reads images; they are transposed for the
            module.

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
    kept = _own_copy(torch, module if make is None else _made(torch, make, 0))
    name = type(kept).__name__
    batch = _batch(torch, kept, example, name)
    whole = _Traced(torch, kept, lambda net, x: net(x), batch, name)
    state = _State(torch, kept, whole.training.moved)
    if moved := ", ".join(whole.evaluation.moved):
        raise FedraxError(f"{name} moves {moved} in evaluation too: ask self.training first")
    whole.compare(state, batch)

    def of(traced: _Traced, first: bool = True) -> Callable:
        turned = channels_last and first
        return lambda variables, x, key=None: traced.run(state, variables, _turned(x, turned), key)[0]

    def train(variables: Variables, x: Array, key: Array) -> tuple[Array, Any]:
        outputs, moved = whole.run(state, variables, _turned(x, channels_last), key)
        return outputs, _nested(moved)

    _check_other_sizes(of(whole, first=False), state.init(jax.random.key(0)), batch, name)
    parts, given = [], batch
    for number, part in enumerate(blocks):
        traced = _Traced(torch, kept, _function(kept, part), given, f"{name}, block {part}")
        parts.append(of(traced, number == 0))
        given = traced.expected
    return TorchModel(
        init=state.init if make is None else state.init_by(lambda seed: _made(torch, make, seed)),
        apply=of(whole),
        features=None if features is None else of(_Traced(torch, kept, _function(kept, features), batch, name)),
        name=name,
        blocks=tuple(parts) or None,
        train=train if state.moving else None,
        module=kept,
        moving=frozenset(state.moving),
    )


def _own_copy(torch: ModuleType, source: Any) -> Any:
    source = getattr(source, "_orig_mod", source)  # what torch.compile was given
    if isinstance(source, torch.jit.ScriptModule):
        raise FedraxError(f"{type(source).__name__} is compiled for TorchScript: give the module that it was made of")
    if not isinstance(source, torch.nn.Module):
        raise FedraxError(f"from_torch takes a torch.nn.Module, or what makes one, not {type(source).__name__}")
    if any(torch.nn.parameter.is_lazy(p) for p in (*source.parameters(), *source.buffers())):
        raise FedraxError(f"{type(source).__name__} has layers without a shape yet: call it once, module(example)")
    short = next((str(p.dtype) for p in source.parameters() if p.dtype in (torch.float16, torch.bfloat16)), None)
    if short is not None:
        raise FedraxError(f"{type(source).__name__} has parameters of {short}: from_torch(module.float(), example)")
    if hooked := hooked_parameters(source):
        raise FedraxError(
            f"{type(source).__name__} has hooks of gradients ({hooked[0]}), which a trace does not know: put what they"
            " do into forward, and requires_grad=False for parameters that stay"
        )
    return _copied(torch, source).cpu().eval()


def _copied(torch: ModuleType, module: Any) -> Any:
    # what an old weight_norm has computed of parameters cannot be copied with how it was computed
    made: dict[int, Any] = {}

    def look(value: Any) -> None:
        if isinstance(value, torch.Tensor) and not value.is_leaf:
            made[id(value)] = value.detach().clone()
        elif isinstance(value, (dict, list, tuple)):
            for entry in value.values() if isinstance(value, dict) else value:
                look(entry)

    for part in module.modules():
        look(vars(part))
    return copy.deepcopy(module, made)


def _check_other_sizes(apply: Callable, variables: Any, batch: Any, name: str) -> None:
    """Refuse a module with the example's size written into it; the tracer does not always notice."""
    x = jax.ShapeDtypeStruct((len(batch) + 1, *batch.shape[1:]), jax.dtypes.canonicalize_dtype(_array(batch[:1]).dtype))
    try:
        fits = jax.eval_shape(apply, variables, x).shape[0] == len(batch) + 1
    except FedraxError:
        fits = False
    if not fits:
        raise FedraxError(only_batches_of(len(batch), name))


class _Traced:
    """A function of a module and x as a program for each mode."""

    def __init__(self, torch: ModuleType, module: Any, function: Callable, batch: Any, name: str):
        self._torch, self._name, self._function = torch, name, function
        self._eager = lambda net: function(net, batch)
        with quiet(torch):
            outputs, lost = lost_derivatives(torch, module, function, batch)
        if not isinstance(outputs, torch.Tensor):
            raise FedraxError(f"{name} gives {type(outputs).__name__}, not one array: wrap it in one that does")
        self._refuse(lost)
        self._module, self.expected = module, outputs.detach()
        self.evaluation = Program(torch, module, function, batch, name)
        self.training = Program(torch, _copied(torch, module).train(), function, batch, name)
        with torch.random.fork_rng(devices=[]), quiet(torch):
            self._refuse(lost_derivatives(torch, _copied(torch, module).train(), function, batch)[1])

    def _refuse(self, lost: Sequence[str]) -> None:
        if lost:
            raise FedraxError(
                f"{self._name} has derivatives of its own, or hooks of them, which a trace does not know"
                f" ({', '.join(lost)}): write what they do with detach, as in x + (f(x) - x).detach() for f with the"
                " derivative of x; checkpoint(...) needs use_reentrant=False"
            )

    def run(self, state: _State, variables: Any, x: Any, key: Array | None) -> tuple[Array, dict]:
        """(outputs, moved buffers by name); with a key in training mode."""
        params, statistics = variables if state.moving else (variables, {})
        leaves = jax.tree.leaves(params)
        float_type = jnp.result_type(*leaves) if leaves else jnp.float32
        values = {**state.still, **_flat(params), **_flat(statistics)}
        values = {alias: values[own] for alias, own in state.names.items() if own in values}
        program = self.evaluation if key is None else self.training
        outputs, moved, _ = program.run(values, x, key, float_type)
        return outputs, {name: moved.get(name, values[name]) for name in state.moving}

    def compare(self, state: _State, batch: Any) -> None:
        """Refuse the program if its numbers are not PyTorch's, or not a row for each sample."""
        values = {alias: state.start[own] for alias, own in state.names.items()}
        asked = []

        def both(values: dict, x: Array) -> tuple[Array, Array | None, Array, dict]:
            found, _, _ = self.evaluation.run(values, x, None, jnp.float32)
            first = None if alone is None else self.evaluation.run(values, x[:1], None, jnp.float32)[0]
            outputs, moved, random = self.training.run(values, x, jax.random.key(0), jnp.float32)
            asked.append(random)
            return found, first, outputs, moved

        alone = self._of_one(batch[:1])
        with jax.default_matmul_precision("highest"):
            found, first, outputs, moved = jax.jit(both, **QUICK)(values, _array(batch))
        self._compare("evaluation", found, self.expected)
        if self.expected.shape[:1] != batch.shape[:1]:
            raise FedraxError(
                f"{self._name} gives outputs of shape {tuple(self.expected.shape)} for {len(batch)} samples: the first"
                " axis must be the samples, and positions the next"
            )
        if first is not None and first.shape == alone.shape:  # squeeze() may make it another, which nobody relies on
            self._compare("evaluation of a single sample", first, alone)
        net = _copied(self._torch, self._module).train()
        with quiet(self._torch):
            expected, buffers = called_once(self._torch, net, self._eager, self._name)
        if any(asked):
            return
        self._compare("training", outputs, expected)
        for name, value in moved.items():
            self._compare(f"training, {name}", value, buffers[name])

    def _of_one(self, sample: Any) -> Any:
        """PyTorch's outputs of a single one, of which the tracer knows nothing; None where the module gives none."""
        with quiet(self._torch), self._torch.no_grad():
            try:
                outputs = self._function(self._module, sample)
            except Exception:  # of the user's own
                return None
        return outputs if outputs.isfinite().all() else None

    def _compare(self, where: str, found: Array, expected: Any) -> None:
        kind = self._torch.complex128 if expected.is_complex() else self._torch.float64
        wanted = expected.detach().to(kind).numpy()
        if found.shape != wanted.shape:
            raise FedraxError(f"{self._name} in {where}: JAX gives shape {found.shape}, PyTorch {wanted.shape}")
        numbers = np.asarray(found).astype(wanted.dtype)
        differ = numbers != wanted  # infinities, as in what is masked, may be the same
        error = float(np.max(np.abs(numbers[differ] - wanted[differ]), initial=0.0))
        limit = TOLERANCE * max(1.0, float(np.max(np.abs(wanted[np.isfinite(wanted)]), initial=0.0)))
        if not error <= limit:
            raise FedraxError(f"{self._name} in {where}: JAX's numbers differ from PyTorch's by {error:.2g}")


class _State:
    """A module's parameters and buffers: which are trained, which move, which stay."""

    def __init__(self, torch: ModuleType, module: Any, moved: Sequence[str]):
        shared: dict[int, str] = {}
        self.names: dict[str, str] = {}
        """A tensor's first name by each of its names."""
        self.start: dict[str, np.ndarray] = {}
        trained = []
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        for name, tensor in tensors:
            own = self.names[name] = shared.setdefault(id(tensor), name)
            if own == name:
                self.start[name] = _array(tensor)
                trained += [name] if tensor.requires_grad else []
        self.trained, self.moving = trained, [name for name in moved if name in self.start]
        self.still = {name: a for name, a in self.start.items() if name not in (*self.trained, *self.moving)}
        if not self.trained:
            raise FedraxError(
                f"{type(module).__name__} has no parameters that need a gradient: there is nothing to train"
            )

    def init(self, key: Array) -> Params:
        """The module's own values."""
        return self._variables({name: jnp.asarray(a) for name, a in self.start.items()})

    def init_by(self, make: Callable[[int], Any]) -> Callable[[Array], Params]:
        """Values that ``make(seed)`` draws, for any key."""

        def draw(shapes: dict[str, jax.ShapeDtypeStruct], bits: np.ndarray) -> dict[str, np.ndarray]:
            seed = int(np.asarray(bits, np.uint64) @ np.array([1 << 32, 1], np.uint64)) if np.size(bits) == 2 else 0
            made = make(seed % (1 << 63))
            found = {**dict(made.named_parameters()), **dict(made.named_buffers())}
            return {name: _array(found[name]).astype(shape.dtype) for name, shape in shapes.items()}

        def init(key: Array) -> Params:
            bits = jax.random.bits(key, (2,), jnp.uint32)
            # JAX's type of a double is a matter of the precision in which init is called.
            types = {name: jax.dtypes.canonicalize_dtype(a.dtype) for name, a in self.start.items()}
            shapes = {name: jax.ShapeDtypeStruct(a.shape, types[name]) for name, a in self.start.items()}
            return self._variables(jax.pure_callback(partial(draw, shapes), shapes, bits, vmap_method="sequential"))

        return init

    def _variables(self, values: dict[str, Any]) -> Params:
        params = _nested({name: values[name] for name in self.trained})
        return Variables(params, _nested({name: values[name] for name in self.moving})) if self.moving else params


def _torch() -> ModuleType:
    use_all_cores()  # before the first array: afterwards JAX's devices are what they are
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise FedraxError("this model needs torch: pip install 'fedrax[torch]'.") from None


def _made(torch: ModuleType, make: Callable, seed: int) -> Any:
    """What ``make()`` gives from a seed, PyTorch's own random state left as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _batch(torch: ModuleType, module: Any, example: Any, name: str) -> Any:
    """The example as a tensor of two samples at least, floats in the module's type; the module must take it."""
    try:
        batch = (
            torch.as_tensor(np.asarray(example) if not isinstance(example, torch.Tensor) else example).detach().cpu()
        )
    except (TypeError, ValueError) as error:
        raise FedraxError(f"the example must be a batch of numbers, an array [B, ...]: {error}") from None
    if batch.ndim < 1 or not len(batch):
        raise FedraxError(f"the example must be a batch [B, ...] of samples, not of shape {tuple(batch.shape)}")
    kind = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    batch = batch.to(kind if batch.is_floating_point() else torch.int64)
    batch = batch if len(batch) > 1 else torch.cat([batch, batch])  # of one sample alone PyTorch takes 1 for a constant
    try:
        with quiet(torch), torch.enable_grad():
            module(batch)
    except Exception as error:  # of the user's own code
        cause = next((text for text in str(error).splitlines() if text.strip()), type(error).__name__)
        where = line_of_error(torch, error)
        raise FedraxError(
            f"{name} does not take an example of shape {tuple(batch.shape)} at {where}: {cause}"
        ) from error
    return batch


def _function(module: Any, part: Part) -> Callable:
    if not isinstance(part, str):
        return part
    if not callable(getattr(module, part, None)):
        known = [name for name, value in vars(type(module)).items() if callable(value) and not name.startswith("_")]
        raise unknown(f"method of {type(module).__name__}", part, known)
    return lambda net, x: getattr(net, part)(x)


def _turned(x: Any, channels_last: bool) -> Any:
    return jnp.moveaxis(jnp.asarray(x), -1, 1) if channels_last else x


def _array(tensor: Any) -> np.ndarray:
    """A tensor's values; integers as int32, floats as float32 or float64: what JAX holds."""
    array = tensor.detach().cpu()
    array = array.float() if array.is_floating_point() and array.element_size() < 8 else array
    made = array.numpy().copy()
    if made.dtype != np.int64:
        return made
    if made.size and (made.max() >= 1 << 31 or made.min() < -(1 << 31)):
        raise FedraxError(BEYOND)
    return made.astype(np.int32)


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Names with dots as dictionaries in dictionaries."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *folders, last = name.split(".")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    return tree


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix[:-1]: tree}
    return {name: v for key, value in tree.items() for name, v in _flat(value, f"{prefix}{key}.").items()}
