"""Fine-tuning of pretrained models: frozen parameters and low-rank adapters (LoRA) for models of any library.

Frozen parameters are constants of the model's functions, which compiled programs take as inputs (`fedrax.xla.jit`):
they are on each device once, and neither differentiated nor sent, averaged, perturbed, compressed or stored.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend import core

from fedrax import tree
from fedrax.config.arguments import checked_arguments
from fedrax.contract.model import Model, Params, Variables
from fedrax.errors import FedraxError, listed
from fedrax.inputs import arrays_of, map_inputs
from fedrax.models.weights import check_arrays, shape_problem, shapes_by_name
from fedrax.tree import Tree
from fedrax.xla import evaluate_equation, shape_struct, trace_inlined

Trainable = str | Sequence[str] | Callable[[str], bool]
"""Patterns of names of trainable parameters, as of a shell; or a function of the name."""


@dataclass(frozen=True, eq=False, repr=False)
class FineTunedModel(Model):
    """A model made by `freeze` or `lora`: its parameters are the trainable ones alone.

    Example:
        >>> model = fedrax.models.MLP(hidden=(8,)).build((4,), 3)
        >>> head = fedrax.models.freeze(model, model.init(jax.random.key(0)), "output/*")
        >>> len(jax.tree.leaves(head.merge(head.init(jax.random.key(1)))))
        4
    """

    _merge: Callable[[Params], Params] | None = None

    def merge(self, trained: Params) -> Params:
        """Combine trained parameters with the frozen ones.

        Args:
            trained: the trainable parameters, such as ``result.params`` and ``result.client_model(i)``; `Variables`
                keep their running statistics.

        Returns:
            All parameters of the pretrained model; adapters are added to their matrices.

        Raises:
            FedraxError: ``trained`` has other names or shapes than the trainable parameters.
        """
        params, statistics = _parts(trained)
        if self._merge is None:
            return trained
        merged = self._merge(params)
        return Variables(merged, statistics) if isinstance(trained, Variables) else merged


@checked_arguments
def freeze(model: Model, params: Tree, trainable: Trainable, *, frozen_dtype: Any = None) -> FineTunedModel:
    """Train some parameters of a pretrained model and freeze the others.

    Args:
        model: the model.
        params: its pretrained parameters, or `Variables` where it keeps running statistics.
        trainable: patterns of the names of trainable parameters, such as ``"head/*"``, or a function name -> bool.
            Names are those of `fedrax.tree.leaf_names`.
        frozen_dtype: dtype of the frozen floating-point parameters, such as ``"bfloat16"``; None: as they are.

    Returns:
        A model whose parameters have None in the places of frozen ones. It starts from the pretrained values.

    Raises:
        FedraxError: a pattern matches no parameter, no parameter is trainable, or ``params`` are those of another
            model.

    Example:
        >>> model = fedrax.models.MLP(hidden=(8,)).build((4,), 3)
        >>> head = fedrax.models.freeze(model, model.init(jax.random.key(0)), "output/*")
        >>> fedrax.tree.leaf_names(head.init(jax.random.key(1)))
        ['output/bias', 'output/weight']
    """
    weights, statistics = _checked_params(model, params)
    chosen = _chosen(weights, trainable)
    leaves, structure = jax.tree.flatten(weights)
    start = jax.tree.unflatten(structure, [a if one else None for a, one in zip(leaves, chosen, strict=True)])
    frozen = [None if one else _Frozen.of(a, frozen_dtype) for a, one in zip(leaves, chosen, strict=True)]

    def values(params: Params) -> list[Any]:
        trained = iter(jax.tree.leaves(params))
        return [next(trained) if a is None else a.array for a in frozen]

    stored = {name: a.stored for name, a in zip(tree.leaf_names(weights), frozen, strict=True) if a is not None}
    return _fine_tuned(model, lambda key: start, statistics, structure, values, stored)


@checked_arguments
def lora(
    model: Model,
    params: Tree,
    example: Any,
    *,
    rank: int = 8,
    alpha: float | None = None,
    target: Trainable | None = None,
    trainable: Trainable = (),
    dropout: float = 0.0,
    train_a: bool = True,
    frozen_dtype: Any = None,
) -> FineTunedModel:
    """Train low-rank adapters of a pretrained model's weight matrices (LoRA, Hu et al. 2022).

    A matrix W of m inputs and n outputs is replaced by W + (alpha / r) A B, A [m, r], B [r, n]: x W + (alpha / r) x A B
    is computed, and neither the product A B nor a gradient by W. A is drawn from N(0, 1/m), B is zero.

    The average of the clients' products A_i B_i is not the product of the averages of A_i and B_i. With
    ``train_a=False`` only B is trained, and both agree (FFA-LoRA, Sun et al. 2024).

    Args:
        model: the model.
        params: its pretrained parameters, or `Variables` where it keeps running statistics.
        example: a batch of inputs [B, ...] of the model, an array or several; only shapes and dtypes matter.
        rank: r.
        alpha: scale of the adapters; None: r.
        target: patterns of the names of adapted matrices, or a function name -> bool; None: all matrices with which
            the model multiplies its activations, except the ones of ``trainable``.
        trainable: patterns of other parameters that are trained as they are, such as those of a new head.
        dropout: probability with which entries of the adapters' inputs x are dropped in training.
        train_a: whether A is trained. Otherwise it is frozen and the same for all seeds.
        frozen_dtype: dtype of the frozen floating-point parameters, such as ``"bfloat16"``; None: as they are.

    Returns:
        A model whose parameters are ``{"lora": {name: {"a": A, "b": B}}, "trainable": {name: parameter}}``.

    Raises:
        FedraxError: a pattern matches no parameter, a target is not a matrix with which activations are multiplied, the
            rank exceeds the dimensions of a matrix, or ``params`` are those of another model.

    Example:
        >>> model = fedrax.models.MLP(hidden=(8,)).build((4,), 3)
        >>> tuned = fedrax.models.lora(model, model.init(jax.random.key(0)), jnp.ones((1, 4)), rank=2)
        >>> fedrax.tree.leaf_names(tuned.init(jax.random.key(1)))[:2]
        ['lora/dense1/weight/a', 'lora/dense1/weight/b']
    """
    if rank < 1:
        raise FedraxError(f"rank must be a positive integer, not {rank!r}")
    if not 0 <= dropout < 1:
        raise FedraxError(f"dropout must be at least 0 and less than 1, not {dropout}")
    weights, statistics = _checked_params(model, params)
    names, (leaves, structure) = tree.leaf_names(weights), jax.tree.flatten(weights)
    if len(set(names)) < len(names):
        raise FedraxError("lora needs parameters with different names: rename keys that contain '/'")
    none = not callable(trainable) and not len(trainable)
    chosen = [False] * len(names) if none else _chosen(weights, trainable)
    matrices = {names[i]: split for i, split in sorted(_matrices(model, weights, statistics, example).items())}
    start = {name: a for name, a, one in zip(names, leaves, chosen, strict=True) if one}
    adapted = _adapted(matrices, start, weights, target, rank)
    frozen = {name: _Frozen.of(a, frozen_dtype) for name, a in zip(names, leaves, strict=True) if name not in start}
    dtype = jnp.result_type(np.float32, *start.values()) if start else jnp.float32

    def factor_a(key: Array) -> dict[str, Array]:
        return {
            name: jax.random.normal(jax.random.fold_in(key, i), (split.rows, rank), dtype) / np.sqrt(split.rows)
            for i, (name, split) in enumerate(adapted.items())
        }

    fixed = None if train_a else factor_a(jax.random.key(0))

    def init(key: Array) -> Params:
        factors = {name: {"b": jnp.zeros((rank, split.columns), dtype)} for name, split in adapted.items()}
        if fixed is None:
            factors = {name: {"a": a} | factors[name] for name, a in factor_a(key).items()}
        return {"lora": factors} | ({"trainable": start} if start else {})

    def values(params: Params) -> list[Any]:
        found: dict[str, Any] = {name: a.array for name, a in frozen.items()} | params.get("trainable", {})
        for number, (name, split) in enumerate(adapted.items()):
            factors = params["lora"][name]
            a = factors["a"] if fixed is None else fixed[name]
            found[name] = _LowRank(found[name], a, factors["b"], gain, split, number)
        return [found[name] for name in names]

    gain = 1.0 if alpha is None else alpha / rank
    stored = {name: a.stored for name, a in frozen.items()}
    return _fine_tuned(model, init, statistics, structure, values, stored, dropout)


class _Split(NamedTuple):
    """How an adapted array is a matrix: its first or last axes are contracted with activations."""

    inputs: int
    """Number of axes that are contracted."""
    first: bool
    """Whether they are the first axes."""
    rows: int
    """m, product of their sizes."""
    columns: int
    """n, product of the other sizes."""


class _LowRank(NamedTuple):
    """W + gain A B."""

    weight: Array
    a: Array
    b: Array
    gain: float
    split: _Split
    number: int
    """The number of the adapter, by which it draws its dropout."""


def _whole(value: Any) -> Array:
    """The matrix W + gain A B, in the dtype of the adapters; other values as they are."""
    if not isinstance(value, _LowRank):
        return value
    product = value.gain * jnp.matmul(value.a, value.b, precision=jax.lax.Precision.HIGHEST)
    product = product if value.split.first else product.T
    return value.weight.astype(product.dtype) + product.reshape(value.weight.shape)


def _matrices(model: Model, weights: Params, statistics: Any, example: Any) -> dict[int, _Split]:
    """Parameters, by number, with which the model multiplies activations, and how."""
    try:
        shapes = jax.tree.map(shape_struct, (weights, map_inputs(jnp.asarray, example)))
    except (TypeError, ValueError) as error:
        raise FedraxError(f"example must be a batch of the model's inputs: {error}") from error
    leaves, structure = jax.tree.flatten(shapes[0])

    def outputs(leaves: list, x: Array) -> Any:
        params = jax.tree.unflatten(structure, leaves)
        return model.apply(Variables(params, statistics) if statistics else params, x)

    try:
        closed, _ = trace_inlined(outputs, leaves, shapes[1])
    except (TypeError, ValueError, IndexError) as error:
        cause = str(error).split("\n")[0]
        given = " and ".join(str(a.shape) for a in arrays_of(shapes[1]))
        raise FedraxError(f"the model does not take an example of shape {given}: {cause}") from error
    number = {v: i for i, v in enumerate(closed.jaxpr.invars[: len(leaves)])}
    forms: dict[Any, tuple[int, tuple[int, ...]]] = {v: (i, tuple(range(v.aval.ndim))) for v, i in number.items()}
    found: dict[int, _Split] = {}
    for equation in closed.jaxpr.eqns:
        source = next((v for v in equation.invars if not isinstance(v, core.Literal) and v in forms), None)
        if source is None:
            continue
        index, axes = forms[source]
        if equation.primitive.name == "transpose":
            forms[equation.outvars[0]] = index, tuple(axes[i] for i in equation.params["permutation"])
        elif equation.primitive.name == "convert_element_type":
            forms[equation.outvars[0]] = index, axes
        elif (dimensions := _product_dimensions(equation)) is not None:
            side = [v is source for v in equation.invars].index(True)
            contracted, batch = (pair[side] for pair in dimensions)
            split = _split_of(leaves[index].shape, sorted(axes[i] for i in contracted))
            if split is not None and not batch:
                found.setdefault(index, split)
    return found


def _product_dimensions(equation: core.JaxprEqn) -> Any:
    """The dimension numbers of a matrix product of the equation's inputs; None for other equations.

    A product with a derivative of its own, such as that of the zoo's output layers, is one too.
    """
    if equation.primitive.name == "dot_general":
        return equation.params["dimension_numbers"]
    inner = equation.params.get("call_jaxpr") if equation.primitive.name == "custom_vjp_call" else None
    inner = getattr(inner, "jaxpr", inner)
    if inner is not None and len(inner.eqns) == 1 and inner.eqns[0].primitive.name == "dot_general":
        (product,) = inner.eqns
        if product.invars == inner.invars and product.outvars == inner.outvars:
            return product.params["dimension_numbers"]
    return None


def _split_of(shape: tuple[int, ...], contracted: list[int]) -> _Split | None:
    count, rank = len(contracted), len(shape)
    rows = int(np.prod([shape[i] for i in contracted]))
    columns = int(np.prod(shape)) // max(rows, 1)
    if 0 < count < rank and contracted == list(range(count)):
        return _Split(count, True, rows, columns)
    if 0 < count < rank and contracted == list(range(rank - count, rank)):
        return _Split(count, False, rows, columns)
    return None


def _adapted(
    matrices: Mapping[str, _Split], trained: Container[str], weights: Params, target: Trainable | None, rank: int
) -> dict[str, _Split]:
    """The adapted matrices by name; raises FedraxError for targets that cannot be adapted."""
    possible = {name: split for name, split in matrices.items() if name not in trained}
    if target is not None:
        selected = _chosen(weights, target, "target")
        chosen = [name for name, one in zip(tree.leaf_names(weights), selected, strict=True) if one]
        if both := [name for name in chosen if name in trained]:
            raise FedraxError(f"{listed(both)}: adapted by target and trained by trainable; leave it out of one")
        if wrong := [name for name in chosen if name not in matrices]:
            raise FedraxError(
                f"lora adapts matrices with which activations are multiplied, and {listed(wrong)}"
                f" {'is none' if len(wrong) == 1 else 'are none'}: choose target among {listed(list(possible))}"
            )
        possible = {name: possible[name] for name in chosen}
    if not possible:
        raise FedraxError("lora finds no matrix with which the model multiplies its activations: use freeze")
    small = {name: split for name, split in possible.items() if rank > min(split.rows, split.columns)}
    if small and target is None and len(small) < len(possible):
        return {name: split for name, split in possible.items() if name not in small}
    for name, split in small.items():
        raise FedraxError(
            f"rank {rank} exceeds the dimensions of {name}, {split.rows} x {split.columns}: lower it, or leave the"
            " matrix out of target"
        )
    return possible


def _evaluate_adapted(function: Callable, values: list[Any], rest: tuple, key: Array | None, dropout: float) -> Any:
    """``function(values, *rest)``, where products with a `_LowRank` are computed by its factors."""
    plain = [value.weight if isinstance(value, _LowRank) else value for value in values]
    closed, structure = trace_inlined(function, plain, *rest)
    jaxpr, inputs = closed.jaxpr, [*values, *jax.tree.leaves(rest)]
    known: dict = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *inputs], strict=True))
    for number, equation in enumerate(jaxpr.eqns):
        inputs = [v.val if isinstance(v, core.Literal) else known[v] for v in equation.invars]
        if any(isinstance(value, _LowRank) for value in inputs):
            drop = partial(_dropped, key, number, dropout) if dropout and key is not None else lambda x, adapter: x
            outputs = _with_factors(equation, inputs, drop)
        else:
            outputs = evaluate_equation(equation, inputs, {})
        known.update(zip(equation.outvars, outputs, strict=True))
    outputs = [v.val if isinstance(v, core.Literal) else _whole(known[v]) for v in jaxpr.outvars]
    return jax.tree.unflatten(structure, outputs)


def _with_factors(equation: core.JaxprEqn, inputs: list[Any], drop: Callable[[Array, int], Array]) -> list[Any]:
    """The outputs of an equation with a `_LowRank` among its inputs."""
    name, value = equation.primitive.name, inputs[0]
    if name == "transpose" and value.weight.ndim == 2:
        split = value.split._replace(first=not value.split.first)
        return [value._replace(weight=value.weight.T, split=split)]
    if name == "convert_element_type":
        dtype = equation.params["new_dtype"]
        return [value._replace(weight=value.weight.astype(dtype), a=value.a.astype(dtype), b=value.b.astype(dtype))]
    dimensions = _product_dimensions(equation)
    if dimensions is not None and sum(isinstance(one, _LowRank) for one in inputs) == 1:
        side = [isinstance(one, _LowRank) for one in inputs].index(True)
        adapter, x = inputs[side], inputs[1 - side]
        contracted, batch = dimensions
        axes, of_x = contracted[side], contracted[1 - side]
        ndim, count = adapter.weight.ndim, adapter.split.inputs
        wanted = range(count) if adapter.split.first else range(ndim - count, ndim)
        if sorted(axes) == list(wanted) and not batch[side]:
            pair = [x, adapter.weight] if side else [adapter.weight, x]
            (y,) = evaluate_equation(equation, pair, {})
            order = sorted(range(count), key=lambda i: axes[i])
            free = [i for i in range(x.ndim) if i not in of_x]
            rows = drop(x, adapter.number).transpose([*free, *(of_x[i] for i in order)])
            rows = rows.reshape([x.shape[i] for i in free] + [adapter.split.rows]).astype(adapter.a.dtype)
            update = (adapter.gain * (rows @ adapter.a)) @ adapter.b
            outer = adapter.weight.shape[count:] if adapter.split.first else adapter.weight.shape[: ndim - count]
            update = update.reshape([x.shape[i] for i in free] + list(outer))
            if side == 0:  # the outputs' axes come first
                update = jnp.moveaxis(update, range(len(free), update.ndim), range(len(outer)))
            return [y + update.astype(y.dtype)]
    avals: list[Any] = [v.aval for v in equation.invars]
    whole = [_whole(x).astype(a.dtype) if isinstance(x, _LowRank) else x for x, a in zip(inputs, avals, strict=True)]
    return evaluate_equation(equation, whole, {})


_DROPOUT = 0x10A4
"""Parts the keys of the adapters' dropout from those that the model derives."""


def _dropped(key: Array, equation: int, rate: float, x: Array, adapter: int) -> Array:
    """``x`` with entries dropped and the others scaled by 1 / (1 - rate).

    The mask depends on the adapter and on the equation: blocks of a model share a key, and a matrix may be used twice.
    """
    for number in (_DROPOUT, adapter, equation):
        key = jax.random.fold_in(key, number)
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def _parts(params: Params) -> tuple[Params, Any]:
    """(parameters, running statistics or {})."""
    return (params.params, params.statistics) if isinstance(params, Variables) else (params, {})


def _checked_params(model: Model, params: Any) -> tuple[Params, Any]:
    """As :func:`_parts`; raises FedraxError for what is no tree of arrays, and for parameters of another model."""
    weights, statistics = _parts(params)
    check_arrays(weights)
    wanted = _parts(jax.eval_shape(model.init, jax.random.key(0)))
    for found, like in zip((weights, statistics), wanted, strict=True):
        if problem := shape_problem(shapes_by_name(found), shapes_by_name(like)):
            raise FedraxError(f"params are not those of the model {model.name}: they have {problem}")
    return weights, statistics


def _chosen(params: Params, trainable: Trainable, field: str = "trainable") -> list[bool]:
    """For each parameter whether ``trainable`` chooses it; raises FedraxError, which names ``field``, if none."""
    names = tree.leaf_names(params)
    if callable(trainable):
        found = {name for name in names if trainable(name)}
    else:
        patterns = (trainable,) if isinstance(trainable, str) else tuple(trainable)
        found = tree.matching_names(names, patterns, field)
    if not found:
        raise FedraxError(f"{field} chooses no parameter; the names are {listed(names)}")
    return [name in found for name in names]


class _Frozen(NamedTuple):
    """A frozen parameter."""

    stored: Array
    """A JAX array, which all traces refer to by identity: each trace makes an array of its own of one of NumPy."""
    dtype: Any
    """The dtype in which the model uses it."""

    @classmethod
    def of(cls, array: Any, dtype: Any) -> _Frozen:
        """Stored in ``dtype`` if it is a floating-point array and ``dtype`` is not None."""
        narrow = dtype is not None and jnp.issubdtype(array.dtype, jnp.floating)
        kept = jnp.asarray(array)
        return cls(kept.astype(dtype) if narrow else kept, kept.dtype)

    @property
    def array(self) -> Any:
        """The parameter in its own dtype."""
        return self.stored.astype(self.dtype)


def _fine_tuned(
    model: Model,
    init: Callable[[Array], Params],
    statistics: Any,
    structure: Any,
    values: Callable[[Params], list[Any]],
    frozen: dict[str, Array],
    dropout: float = 0.0,
) -> FineTunedModel:
    """A model with other parameters.

    init: key -> the trainable parameters. structure: of the pretrained parameters. values: trainable parameters -> the
    leaves of the pretrained ones, adapted matrices as `_LowRank`. frozen: frozen parameters by name.
    """
    wanted = shapes_by_name(jax.eval_shape(init, jax.random.key(0)))

    def of_trainable(function: Callable | None) -> Any:
        """A function (parameters or Variables, x, key=None)."""
        if function is None:
            return None

        def of_leaves(leaves: list[Any], moving: Any, *rest: Any) -> Any:
            params = jax.tree.unflatten(structure, leaves)
            return function(Variables(params, moving) if statistics else params, *rest)

        def called(variables: Any, x: Any, key: Array | None = None) -> Any:
            params, moving = _parts(variables)
            leaves, rest = values(params), (moving, x) if key is None else (moving, x, key)
            if any(isinstance(value, _LowRank) for value in leaves):
                return _evaluate_adapted(of_leaves, leaves, rest, key, dropout)
            return of_leaves(leaves, *rest)

        return called

    def merge(params: Params) -> Params:
        if problem := shape_problem(shapes_by_name(params), wanted):
            raise FedraxError(
                f"merge takes the trainable parameters of {model.name}, such as result.params, and these have {problem}"
            )
        return jax.tree.unflatten(structure, [_whole(value) for value in values(params)])

    return FineTunedModel(
        init=(lambda key: Variables(init(key), statistics)) if statistics else init,
        apply=of_trainable(model.apply),
        features=of_trainable(model.features),
        blocks=tuple(map(of_trainable, model.blocks)) if model.blocks else None,
        train=of_trainable(model.train),
        measures=None if model.measures is None else lambda params, truth: model.measures(merge(params), truth),  # type: ignore[misc]
        frozen=(model.frozen, frozen),
        _merge=merge,
        **{name: getattr(model, name) for name in ("name", "loss", "reads_amounts", "words")},
    )
