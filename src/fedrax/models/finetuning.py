"""Fine-tuning of pretrained models: frozen parameters and low-rank adapters (LoRA) for models of any library.

Frozen parameters are constants of the model's functions, which compiled programs take as inputs (`fedrax.xla.jit`):
they are on each device once, and neither differentiated nor sent, averaged, perturbed, compressed or stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from fedrax.errors import FedraxError
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

    def merge(self, params: Params) -> Params:
        """Combine trained parameters with the frozen ones.

        Args:
            params: the trainable parameters, such as ``result.params``.

        Returns:
            All parameters of the pretrained model; adapters are added to their matrices.
        """
        return params if self._merge is None else self._merge(params)


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
        FedraxError: a pattern matches no parameter, or no parameter is trainable.

    Example:
        >>> model = fedrax.models.MLP(hidden=(8,)).build((4,), 3)
        >>> head = fedrax.models.freeze(model, model.init(jax.random.key(0)), "output/*")
        >>> fedrax.tree.leaf_names(head.init(jax.random.key(1)))
        ['output/bias', 'output/weight']
    """
    weights, statistics = _checked_params(params)
    chosen = _chosen(weights, trainable)
    leaves, structure = jax.tree.flatten(weights)
    start = jax.tree.unflatten(structure, [a if one else None for a, one in zip(leaves, chosen, strict=True)])
    frozen = [None if one else _Frozen.of(a, frozen_dtype) for a, one in zip(leaves, chosen, strict=True)]

    def merge(params: Params) -> Params:
        given = iter(jax.tree.leaves(params))
        return jax.tree.unflatten(structure, [next(given) if a is None else a.array for a in frozen])

    return _fine_tuned(
        model, lambda key: start, statistics, lambda f: lambda params, *rest: f(merge(params), *rest), merge
    )


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
        example: a batch of inputs [B, ...] of the model; only shapes and dtypes matter.
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
        FedraxError: a pattern matches no parameter, a target is not a matrix with which activations are multiplied, or
            the rank exceeds the dimensions of a matrix.

    Example:
        >>> model = fedrax.models.MLP(hidden=(8,)).build((4,), 3)
        >>> tuned = fedrax.models.lora(model, model.init(jax.random.key(0)), jnp.ones((1, 4)), rank=2)
        >>> fedrax.tree.leaf_names(tuned.init(jax.random.key(1)))[:2]
        ['lora/dense1/weight/a', 'lora/dense1/weight/b']
    """
    weights, statistics = _checked_params(params)
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise FedraxError(f"rank must be a positive integer, not {rank!r}")
    if not 0 <= dropout < 1:
        raise FedraxError(f"dropout must be at least 0 and less than 1, not {dropout}")
    names, (leaves, structure) = tree.leaf_names(weights), jax.tree.flatten(weights)
    if len(set(names)) < len(names):
        raise FedraxError("lora needs parameters with different names: rename keys that contain '/'")
    others = _chosen(weights, trainable) if callable(trainable) or len(trainable) else [False] * len(names)
    matrices = _matrices(model, weights, statistics, example)
    adapted = _adapted(names, leaves, matrices, others, weights, target, rank)
    gain = 1.0 if alpha is None else alpha / rank
    frozen = {
        name: _Frozen.of(a, frozen_dtype) for name, a, other in zip(names, leaves, others, strict=True) if not other
    }
    start = {name: a for name, a, other in zip(names, leaves, others, strict=True) if other}

    def factors(key: Array) -> dict[str, dict[str, Array]]:
        found = {}
        for i, (name, split) in enumerate(adapted.items()):
            dtype = jnp.result_type(np.float32, *start.values()) if start else jnp.float32
            a = jax.random.normal(jax.random.fold_in(key, i), (split.rows, rank), dtype) / np.sqrt(split.rows)
            found[name] = {"a": a, "b": jnp.zeros((rank, split.columns), dtype)}
        return found

    fixed = None if train_a else {name: pair["a"] for name, pair in factors(jax.random.key(0)).items()}

    def init(key: Array) -> Params:
        found = factors(key)
        if fixed is not None:
            found = {name: {"b": pair["b"]} for name, pair in found.items()}
        return {"lora": found, **({"trainable": start} if start else {})}

    def parts(params: Params) -> list[Any]:
        """The parameters of the pretrained model, adapted matrices as `_LowRank`."""
        values: list[Any] = []
        for name in names:
            if name in adapted:
                pair = params["lora"][name]
                a = pair["a"] if fixed is None else fixed[name]
                values.append(_LowRank(frozen[name].array, a, pair["b"], gain, adapted[name]))
            else:
                values.append(params["trainable"][name] if name in start else frozen[name].array)
        return values

    def merge(params: Params) -> Params:
        return jax.tree.unflatten(structure, [_whole(value) for value in parts(params)])

    def adapting(function: Callable) -> Callable:
        def adapted_function(params: Params, *rest: Any) -> Any:
            return _evaluate_adapted(
                lambda leaves, rest: function(jax.tree.unflatten(structure, leaves), *rest),
                parts(params),
                rest,
                dropout,
            )

        return adapted_function

    return _fine_tuned(model, init, statistics, adapting, merge)


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


def _whole(value: Any) -> Array:
    """The matrix W + gain A B, in the dtype of the adapters; other values as they are."""
    if not isinstance(value, _LowRank):
        return value
    product = value.gain * (value.a @ value.b)
    product = product if value.split.first else product.T
    return value.weight.astype(product.dtype) + product.reshape(value.weight.shape)


def _matrices(model: Model, weights: Params, statistics: Any, example: Any) -> dict[int, _Split]:
    """Parameters, by number, with which the model multiplies activations, and how."""
    try:
        shapes = jax.tree.map(shape_struct, (weights, jnp.asarray(example)))
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
        raise FedraxError(f"the model does not take an example of shape {shapes[1].shape}: {cause}") from error
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
        elif equation.primitive.name == "dot_general":
            side = [v is source for v in equation.invars].index(True)
            contracted, batch = (pair[side] for pair in equation.params["dimension_numbers"])
            split = _split_of(leaves[index].shape, sorted(axes[i] for i in contracted))
            if split is not None and not batch:
                found.setdefault(index, split)
    return found


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
    names: list[str],
    leaves: list[Any],
    matrices: Mapping[int, _Split],
    others: list[bool],
    weights: Params,
    target: Trainable | None,
    rank: int,
) -> dict[str, _Split]:
    """The adapted matrices by name; raises FedraxError for targets that cannot be adapted."""
    possible = {names[i]: split for i, split in sorted(matrices.items()) if not others[i]}
    if target is not None:
        chosen = [name for name, one in zip(names, _chosen(weights, target, "target"), strict=True) if one]
        if wrong := [name for name in chosen if name not in possible]:
            raise FedraxError(
                f"lora adapts matrices with which activations are multiplied, and {', '.join(wrong)}"
                f" {'is none' if len(wrong) == 1 else 'are none'}: choose target among {', '.join(possible) or 'none'}"
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


def _evaluate_adapted(function: Callable, parts: list[Any], rest: tuple, dropout: float) -> Any:
    """``function(parts, rest)``, where products with a `_LowRank` are computed by its factors."""
    plain = [value.weight if isinstance(value, _LowRank) else value for value in parts]
    closed, structure = trace_inlined(function, plain, rest)
    arguments = [*parts, *jax.tree.leaves(rest)]
    jaxpr = closed.jaxpr
    values: dict = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arguments], strict=True))
    key = next((leaf for leaf in jax.tree.leaves(rest) if _is_key(leaf)), None)
    drop = partial(_dropped, key, dropout) if dropout and key is not None else lambda x, number: x
    for number, equation in enumerate(jaxpr.eqns):
        inputs = [v.val if isinstance(v, core.Literal) else values[v] for v in equation.invars]
        if any(isinstance(value, _LowRank) for value in inputs):
            outputs = _with_factors(equation, inputs, partial(drop, number=number))
        else:
            outputs = evaluate_equation(equation, inputs, {})
        values.update(zip(equation.outvars, outputs, strict=True))
    outputs = [v.val if isinstance(v, core.Literal) else _whole(values[v]) for v in jaxpr.outvars]
    return jax.tree.unflatten(structure, outputs)


def _with_factors(equation: core.JaxprEqn, inputs: list[Any], drop: Callable[[Array], Array]) -> list[Any]:
    """The outputs of an equation with a `_LowRank` among its inputs."""
    name, value = equation.primitive.name, inputs[0]
    if name == "transpose" and value.weight.ndim == 2:
        split = value.split._replace(first=not value.split.first)
        return [value._replace(weight=value.weight.T, split=split)]
    if name == "convert_element_type":
        dtype = equation.params["new_dtype"]
        return [value._replace(weight=value.weight.astype(dtype), a=value.a.astype(dtype), b=value.b.astype(dtype))]
    if name == "dot_general" and sum(isinstance(one, _LowRank) for one in inputs) == 1:
        side = [isinstance(one, _LowRank) for one in inputs].index(True)
        adapter, x = inputs[side], inputs[1 - side]
        (contracted, batch) = equation.params["dimension_numbers"]
        axes, of_x = contracted[side], contracted[1 - side]
        ndim, count = adapter.weight.ndim, adapter.split.inputs
        wanted = range(count) if adapter.split.first else range(ndim - count, ndim)
        if sorted(axes) == list(wanted) and not batch[side]:
            pair = [x, adapter.weight] if side else [adapter.weight, x]
            (y,) = evaluate_equation(equation, pair, {})
            order = sorted(range(count), key=lambda i: axes[i])
            free = [i for i in range(x.ndim) if i not in of_x]
            rows = drop(x).transpose([*free, *(of_x[i] for i in order)])
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


def _dropped(key: Array, rate: float, x: Array, number: int) -> Array:
    """``x`` with entries dropped and the others scaled by 1 / (1 - rate)."""
    kept = jax.random.bernoulli(jax.random.fold_in(key, number), 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _parts(params: Params) -> tuple[Params, Any]:
    """(parameters, running statistics or {})."""
    return (params.params, params.statistics) if isinstance(params, Variables) else (params, {})


def _checked_params(params: Any) -> tuple[Params, Any]:
    """As :func:`_parts`; raises FedraxError for what is no tree of arrays."""
    weights, statistics = _parts(params)
    wrong = [leaf for leaf in jax.tree.leaves(weights) if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape"))]
    if wrong or not jax.tree.leaves(weights):
        found = type(wrong[0]).__name__ if wrong else "nothing"
        raise FedraxError(f"params must be a tree of arrays, such as model.init(key), and it holds {found}")
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
        raise FedraxError(f"{field} chooses no parameter; the names are {', '.join(names)}")
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
    model: Model, init: Callable, statistics: Any, adapt: Callable[[Callable], Callable], merge: Callable
) -> FineTunedModel:
    """A model whose functions are those of ``model``, made functions of the trainable parameters by ``adapt``."""

    def of_params(function: Callable | None) -> Any:
        """A function (parameters or Variables, x, key=None)."""
        if function is None:
            return None

        def called(variables: Any, x: Any, key: Array | None = None) -> Any:
            params, moving = _parts(variables)

            def original(params: Params, moving: Any, x: Any, *key: Any) -> Any:
                return function(Variables(params, moving) if statistics else params, x, *key)

            return adapt(original)(params, moving, x, *(() if key is None else (key,)))

        return called

    first = [of_params(block) for block in model.blocks] if model.blocks else None
    shared = {name: getattr(model, name) for name in ("name", "loss", "reads_amounts", "words")}
    return FineTunedModel(
        init=(lambda key: Variables(init(key), statistics)) if statistics else init,
        apply=of_params(model.apply),
        features=of_params(model.features),
        blocks=None if first is None else tuple(first),
        train=of_params(model.train),
        measures=None if model.measures is None else lambda params, truth: model.measures(merge(params), truth),  # type: ignore[misc]
        _merge=merge,
        **shared,
    )
