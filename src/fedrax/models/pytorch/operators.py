"""The table of PyTorch's ATen operators as functions of JAX arrays, and the elementwise operators and reductions.

Names and argument orders are those of ATen's schemas. A key is an operator's name, ``add``, or that of an overload,
``max.dim``, if overloads take different arguments.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedrax.errors import FedraxError
from fedrax.models.pytorch import subgradients

OPERATORS: dict[str, Callable[..., Any]] = {}
"""JAX functions by the name of the operator or overload."""
NEEDS_CONTEXT: set[str] = set()
"""Operators whose first argument is the :class:`Context`."""


class Context:
    """Random keys and dtypes of one evaluation of a traced graph.

    Attributes:
        float_type: Dtype of the parameters, which replaces float32 and float64.
    """

    def __init__(self, key: Array | None, float_type: Any):
        """Create the context; the random key is None in evaluation mode."""
        self._key, self.float_type, self._num_keys = key, float_type, 0

    @property
    def has_drawn(self) -> bool:
        """Whether an operator has asked for a random key."""
        return self._num_keys > 0

    def key(self) -> Array | None:
        """The next random key, the same sequence in every evaluation; None in evaluation mode."""
        self._num_keys += 1
        return None if self._key is None else jax.random.fold_in(self._key, self._num_keys)

    def random_key(self, operator: str) -> Array:
        """As :meth:`key`, for operators that draw in both modes; raises FedraxError in evaluation mode."""
        key = self.key()
        if key is None:
            raise FedraxError(f"{operator} draws random numbers in evaluation too: do it only if self.training")
        return key

    def type_of(self, dtype: Any) -> Any:
        """The JAX dtype of a PyTorch dtype; floats have the dtype of the parameters."""
        name = str(dtype).removeprefix("torch.")
        if name in ("float32", "float64"):
            return self.float_type
        if name in ("complex64", "complex128"):
            return jnp.result_type(self.float_type, jnp.complex64)
        try:
            return jnp.dtype({"int64": "int32", "half": "float16"}.get(name, name))
        except TypeError:
            raise FedraxError(f"the dtype {name} is not supported: use float32 or int64") from None

    def cast(self, x: Any, dtype: Any) -> Array:
        """x as an array of the JAX dtype of ``dtype``; None keeps its dtype."""
        return jnp.asarray(x) if dtype is None else jnp.asarray(x, self.type_of(dtype))


def operator(*names: str) -> Callable[[Callable], Callable]:
    """Decorator that adds a function to the table; a first parameter ``context`` receives the :class:`Context`."""

    def register(function: Callable) -> Callable:
        for name in names:
            OPERATORS[name] = function
            if next(iter(inspect.signature(function).parameters), None) == "context":
                NEEDS_CONTEXT.add(name)
        return function

    return register


def key_of(target: Any) -> str:
    """The operator's key in the table: that of the overload if it has an entry, else of the operator."""
    full = str(target).removeprefix("aten.")
    return full if full in OPERATORS else full.split(".")[0]


def axes(dim: Any, ndim: int) -> tuple[int, ...]:
    """Axes as non-negative numbers; None or an empty list stands for all axes."""
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return tuple(range(ndim))
    return tuple(d % max(ndim, 1) for d in (dim if isinstance(dim, Sequence) else (dim,)))


# --- Unary operators ----------------------------------------------------------------------------------------

_SAME_NAME_IN_NUMPY = (
    "acos acosh asin asinh atan atanh ceil cos cosh exp exp2 expm1 floor isfinite isinf isnan log log10 log1p log2 "
    "logical_not reciprocal round sign sin sinc sinh sqrt square tan tanh trunc"
)
"""Operators that are functions of the same name in jax.numpy."""
for _name in _SAME_NAME_IN_NUMPY.split():
    OPERATORS[_name] = getattr(jnp, _name)
OPERATORS |= {
    "neg": jnp.negative,
    "bitwise_not": jnp.invert,
    "erf": jax.scipy.special.erf,
    "erfc": jax.scipy.special.erfc,
    "erfinv": jax.scipy.special.erfinv,
    "lgamma": jax.scipy.special.gammaln,
    "digamma": jax.scipy.special.digamma,
    "abs": subgradients.absolute,
    "angle": subgradients.angle,
    "i0": subgradients.i0,
    "rsqrt": lax.rsqrt,
    "sigmoid": jax.nn.sigmoid,
    "log_sigmoid": jax.nn.log_sigmoid,
    "silu": jax.nn.silu,
    "mish": jax.nn.mish,
    "relu": jax.nn.relu,
    "selu": jax.nn.selu,
    "hardswish": lambda x: x * subgradients.between(x + 3, 0, 6) / 6,
    "hardsigmoid": lambda x: subgradients.between(x + 3, 0, 6) / 6,
    "relu6": lambda x: subgradients.between(x, 0, 6),
    "leaky_relu": lambda x, negative_slope=0.01: jnp.where(x > 0, x, negative_slope * x),
    "threshold": lambda x, threshold, value: jnp.where(x > threshold, x, value),
    "softshrink": lambda x, lambd=0.5: jnp.where(x > lambd, x - lambd, jnp.where(x < -lambd, x + lambd, 0)),
    "hardshrink": lambda x, lambd=0.5: jnp.where(jnp.abs(x) > lambd, x, 0),
    "clamp_min": lambda x, min: clamp(x, min),
    "clamp_max": lambda x, max: clamp(x, None, max),
    "detach": lax.stop_gradient,
    "item": lambda x: x.reshape(()),
}
OPERATORS |= {f"special_{name}": getattr(jax.scipy.special, name) for name in ["i0e", "i1", "i1e", "log_ndtr", "ndtri"]}


@operator("hardtanh")
def _hardtanh(x: Array, min_val: float = -1.0, max_val: float = 1.0) -> Array:
    return subgradients.between(x, min_val, max_val)


@operator("clamp", "clip")
def clamp(x: Array, min: Any = None, max: Any = None) -> Array:
    """x clipped to [min, max]; the gradient at the limits is one, as in ``torch.clamp``."""
    x = x if min is None else jnp.where(x < min, min, x)
    return x if max is None else jnp.where(x > max, max, x)


@operator("gelu")
def _gelu(x: Array, approximate: str = "none") -> Array:
    return jax.nn.gelu(x) if approximate == "tanh" else 0.5 * x * (1 + jax.scipy.special.erf(x * math.sqrt(0.5)))


@operator("elu")
def _elu(x: Array, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Array:
    below = alpha * jnp.expm1(
        jnp.where(x > 0, 0, x) * input_scale
    )  # finite in the branch that is not selected, for gradients
    return scale * jnp.where(x > 0, x, below)


@operator("celu")
def _celu(x: Array, alpha: float = 1.0) -> Array:
    return jnp.where(x > 0, x, alpha * jnp.expm1(jnp.where(x > 0, 0, x) / alpha))


@operator("softplus")
def _softplus(x: Array, beta: float = 1.0, threshold: float = 20.0) -> Array:
    return jnp.where(beta * x > threshold, x, jax.nn.softplus(beta * x) / beta)


@operator("prelu", "_prelu_kernel")
def _prelu(x: Array, weight: Array) -> Array:
    if weight.ndim != x.ndim and weight.size > 1:
        weight = weight.reshape(-1, *[1] * (x.ndim - 2))
    return jnp.where(x > 0, x, weight * x)


@operator("rrelu_with_noise_functional")
def _rrelu(
    context: Context, x: Array, noise: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, *_: Any
) -> tuple[Array, None]:
    slope: Any = (lower + upper) / 2
    if training:
        slope = jax.random.uniform(context.random_key("rrelu"), x.shape, x.dtype, lower, upper)
    return jnp.where(x > 0, x, slope * x), None


@operator("nan_to_num")
def _nan_to_num(x: Array, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Array:
    return jnp.nan_to_num(x, nan=nan or 0.0, posinf=posinf, neginf=neginf)


@operator("clone", "alias", "lift_fresh", "lift_fresh_copy", "contiguous", "positive")
def _identity(x: Array, memory_format: Any = None) -> Array:
    return x


@operator("_to_copy", "to.dtype", "to.dtype_layout", "to.device")
def _to_copy(context: Context, x: Array, *dtypes: Any, dtype: Any = None, **_: Any) -> Array:
    chosen = dtype if dtype is not None else next((d for d in dtypes if str(d).startswith("torch.")), None)
    return x if chosen is None or ":" in str(chosen) else context.cast(x, chosen)


@operator("_assert_tensor_metadata", "sym_constrain_range_for_size", "_assert_scalar")
def _no_value(*_: Any, **__: Any) -> None:
    return None


# --- Operators of several arrays --------------------------------------------------------------------------

for _name, _function in {
    "maximum": jnp.maximum, "minimum": jnp.minimum, "max.other": jnp.maximum, "min.other": jnp.minimum,
    "fmax": subgradients.fmax, "fmin": subgradients.fmin, "hypot": jnp.hypot, "copysign": subgradients.copysign,
    "ldexp": lambda x, other: x * jnp.exp2(jnp.asarray(other, x.dtype)),
    "atan2": subgradients.arctan2, "remainder": jnp.remainder, "fmod": jnp.fmod, "floor_divide": jnp.floor_divide,
    "eq": jnp.equal, "ne": jnp.not_equal, "lt": jnp.less, "le": jnp.less_equal, "gt": jnp.greater,
    "ge": jnp.greater_equal, "logical_and": jnp.logical_and, "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor, "bitwise_and": jnp.bitwise_and, "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor, "mul": jnp.multiply, "mm": jnp.matmul, "bmm": jnp.matmul, "matmul": jnp.matmul,
    "mv": jnp.matmul, "dot": jnp.dot, "outer": jnp.outer,
}.items():  # fmt: skip
    OPERATORS[_name] = _function


@operator("add")
def _add(x: Any, other: Any, *, alpha: Any = 1) -> Array:
    return jnp.add(x, other if alpha == 1 else alpha * other)


@operator("sub")
def _sub(x: Any, other: Any, *, alpha: Any = 1) -> Array:
    return jnp.subtract(x, other if alpha == 1 else alpha * other)


@operator("rsub")
def _rsub(x: Any, other: Any, alpha: Any = 1) -> Array:
    return _sub(other, x, alpha=alpha)


@operator("div", "true_divide")
def _div(x: Any, other: Any, *, rounding_mode: str | None = None) -> Array:
    if rounding_mode == "floor":
        return jnp.floor_divide(x, other)
    quotient = jnp.true_divide(x, other)
    return quotient if rounding_mode is None else jnp.trunc(quotient).astype(jnp.result_type(x, other))


@operator("pow")
def _pow(x: Any, exponent: Any) -> Array:
    is_float = jnp.issubdtype(jnp.result_type(x), jnp.inexact)  # integers with a float exponent become floats
    if is_float and isinstance(exponent, float) and exponent.is_integer() and abs(exponent) < 64:
        exponent = int(exponent)  # repeated products have the right gradient at zero
    return jnp.power(x, exponent)


@operator("where")
def _where(mask: Array, x: Any = None, other: Any = None) -> Array:
    if x is None:
        raise FedraxError(
            "torch.where(mask) returns arrays of unknown length: use torch.where(mask, x, y) or masked_fill"
        )
    return jnp.where(mask, x, other)


@operator("masked_fill")
def _masked_fill(x: Array, mask: Array, value: Any) -> Array:
    return jnp.where(mask, jnp.asarray(value, x.dtype), x)


@operator("lerp")
def _lerp(x: Array, end: Array, weight: Any) -> Array:
    return x + weight * (end - x)


@operator("addcmul")
def _addcmul(x: Array, one: Array, two: Array, *, value: Any = 1) -> Array:
    return x + value * one * two


@operator("addcdiv")
def _addcdiv(x: Array, one: Array, two: Array, *, value: Any = 1) -> Array:
    return x + value * one / two


@operator("addmm", "baddbmm")
def _addmm(x: Array, one: Array, two: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    product = one @ two
    return (x if beta == 1 else beta * x) + (product if alpha == 1 else alpha * product)


@operator("linear")
def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x [..., inputs] @ weight.T + bias, with weight [outputs, inputs] and bias [outputs]."""
    product = lax.dot_general(x, weight, (((x.ndim - 1,), (weight.ndim - 1,)), ((), ())))
    return product if bias is None else product + bias


@operator("bilinear")
def _bilinear(x: Array, y: Array, weight: Array, bias: Array | None = None) -> Array:
    product = jnp.einsum("...i,oij,...j->...o", x, weight, y)
    return product if bias is None else product + bias


@operator("einsum")
def _einsum(equation: str, operands: Sequence[Array], path: Any = None) -> Array:
    return jnp.einsum(equation, *operands)


# --- Reductions ---------------------------------------------------------------------------------------


@operator("nansum")
def _nansum(context: Context, x: Array, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    return _sum(context, jnp.where(jnp.isnan(x), 0, x), dim, keepdim, dtype=dtype)


@operator("sum")
def _sum(context: Context, x: Array, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    x = x.astype(jnp.int32) if x.dtype == bool else x
    return context.cast(x, dtype).sum(axes(dim, x.ndim), keepdims=keepdim)


@operator("mean")
def _mean(context: Context, x: Array, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    return context.cast(x, dtype).mean(axes(dim, x.ndim), keepdims=keepdim)


@operator("prod")
def _prod(context: Context, x: Array, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    return context.cast(x, dtype).prod(axes(dim, x.ndim), keepdims=keepdim)


def _reduce(function: Callable, x: Array, dim: Any = None, keepdim: bool = False) -> Array:
    """A reduction of jax.numpy with PyTorch's arguments."""
    return function(x, axis=axes(dim, x.ndim), keepdims=keepdim)


for _name, _function in {
    "amax": jnp.max, "amin": jnp.min, "any": jnp.any, "all": jnp.all, "logsumexp": jax.nn.logsumexp,
    "max.default": jnp.max, "min.default": jnp.min,
}.items():  # fmt: skip
    OPERATORS[_name] = partial(_reduce, _function)


def _extreme_with_index(find: Callable, x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """The maximum or minimum along an axis and its index; only the entry at the index has a gradient."""
    index = find(x, axis=dim, keepdims=True)
    value = jnp.take_along_axis(x, index, axis=dim)
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


OPERATORS["max.dim"], OPERATORS["min.dim"] = (partial(_extreme_with_index, find) for find in (jnp.argmax, jnp.argmin))


@operator("argmax")
def _argmax(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    return jnp.argmax(x, axis=dim, keepdims=keepdim)


@operator("argmin")
def _argmin(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    return jnp.argmin(x, axis=dim, keepdims=keepdim)


@operator("softmax", "_softmax")
def _softmax(context: Context, x: Array, dim: int, dtype: Any = None) -> Array:
    return jax.nn.softmax(context.cast(x, None if isinstance(dtype, bool) else dtype), axis=dim)


@operator("log_softmax", "_log_softmax")
def _log_softmax(context: Context, x: Array, dim: int, dtype: Any = None) -> Array:
    return jax.nn.log_softmax(context.cast(x, None if isinstance(dtype, bool) else dtype), axis=dim)
