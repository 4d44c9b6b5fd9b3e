"""What of a client's work depends on its data other than through the one value that a mechanism covers."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.extend import core

from fedrax import tree
from fedrax.tree import Tree


def dependent(function: Callable[..., Tree], secret: Tree, *others: Tree) -> list[str]:
    """The names of the leaves of ``function(secret, *others)`` that are computed from ``secret``.

    ``function`` is traced and not run. Whatever an operation reads is taken to matter for all that it gives, loops and
    calls as a whole: a leaf that is not named does not depend on ``secret``; one that is named may.
    """
    with jax.disable_jit(False):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(secret, *others)
    jaxpr = closed.jaxpr
    touched = set(jaxpr.invars[: len(jax.tree.leaves(secret))])
    for equation in jaxpr.eqns:
        if any(not isinstance(v, core.Literal) and v in touched for v in equation.invars):
            touched.update(equation.outvars)
    outputs = zip(tree.leaf_names(shape), jaxpr.outvars, strict=True)
    return [name for name, v in outputs if not isinstance(v, core.Literal) and v in touched]
