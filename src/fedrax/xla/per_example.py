"""Whether a function treats each sample of a batch by itself, found in its jaxpr.

:func:`each_by_itself` follows the axis of the samples from equation to equation. It knows of each kind of operation
whether numbers of two samples can meet in it, and takes for granted that they do where it does not know the operation.
So batch norm, dropout (whose masks differ from sample to sample, see :mod:`fedrax.xla.hoist_rng`), losses that compare
samples, backward passes of the user's own (``jax.custom_vjp``) and derivatives that do so (``jax.custom_jvp``) are
found out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from fedrax.tree import Tree
from fedrax.xla.flops import flops_in, length_of
from fedrax.xla.per_example_rules import RULES, Along, Mixed, Same, State, joined
from fedrax.xla.tracing import num_bytes

_PRODUCTS = ("dot_general", "conv_general_dilated")


class LookedAt(NamedTuple):
    """A function that treats each sample by itself."""

    bytes: int
    """What its products and convolutions give for one sample."""
    weights: int
    """Bytes that they read of arrays which are the same for all samples, in a loop once a turn."""
    dtype: Any
    """Of its values."""
    flops: int
    length: int
    """Arithmetic of its products and convolutions, for one sample; and all its equations."""


def each_by_itself(function: Callable, shared: Tree, batch: Tree, key: Tree) -> LookedAt | None:
    """What is seen of ``function(shared, batch, key)`` -> [B], which is traced; no number is computed.

    shared: pytree of arrays. batch: pytree of arrays [B, ...], B > 1. None where a value of the result, or its
    derivative, may depend on more than its own sample.
    """
    closed = jax.make_jaxpr(function)(shared, batch, key)
    samples = jax.tree.leaves(batch)[0].shape[0]
    states: list[State] = [Same() for _ in jax.tree.leaves(shared)]
    states += [Along(0) for _ in jax.tree.leaves(batch)] + [Same() for _ in jax.tree.leaves(key)]
    walk = Walker(samples)
    try:
        (out,) = walk.through(closed, states)
    except Mixed:
        return None
    found: Any = closed.out_avals[0]
    if out != Along(0) or found.shape != (samples,):
        return None
    return LookedAt(walk.bytes // samples, walk.weights, found.dtype, flops_in(closed) // samples, length_of(closed))


class Walker:
    """Through the equations of a function of ``samples`` samples."""

    def __init__(self, samples: int, derived: bool = False):
        """derived: whether the function is a derivative itself, in which no function's own derivative is asked for."""
        self.samples, self.derived = samples, derived
        self.bytes = self.weights = 0
        self.repeats = 1
        """How often the equations at hand are run, loops around them counted."""

    def through(self, closed: core.ClosedJaxpr | core.Jaxpr, inputs: Sequence[State]) -> list[State]:
        """The states of the outputs."""
        jaxpr = closed.jaxpr if isinstance(closed, core.ClosedJaxpr) else closed
        known: dict[Any, State] = {v: Same() for v in jaxpr.constvars}
        known.update(zip(jaxpr.invars, inputs, strict=True))
        self.over(jaxpr.eqns, known)
        return [_known(atom, known) for atom in jaxpr.outvars]

    def over(self, equations: Sequence[core.JaxprEqn], known: dict[Any, State]) -> None:
        """Adds the states of what the equations make to those of what they read."""
        for equation in equations:
            states = [_known(atom, known) for atom in equation.invars]
            name = equation.primitive.name
            if name in RULES:
                outputs = RULES[name](states, equation, self)
            elif any(isinstance(state, Along) for state in states):
                raise Mixed(name)
            else:
                outputs = [Same()] * len(equation.outvars)
            if name in _PRODUCTS and isinstance(outputs[0], Along):
                shared = [atom for atom, state in zip(equation.invars, states, strict=True) if isinstance(state, Same)]
                self.bytes += self.repeats * sum(map(num_bytes, equation.outvars))
                self.weights += self.repeats * sum(map(num_bytes, shared))
            known.update(zip(equation.outvars, outputs, strict=True))

    def through_derivative(self, closed: core.ClosedJaxpr, inputs: Sequence[State]) -> list[State]:
        """The same of a derivative, of which nothing is counted."""
        return Walker(self.samples, derived=True).through(closed, inputs)

    def in_loop(self, body: core.ClosedJaxpr, fixed: list[State], carry: list[State], rest: list[State], times: int):
        """(states of the carry, of the other outputs) that hold in every turn."""
        while True:
            before, self.repeats = (self.bytes, self.weights, self.repeats), self.repeats * times
            outputs = self.through(body, [*fixed, *carry, *rest])
            met = [joined([a, b]) for a, b in zip(carry, outputs, strict=False)]
            if met == carry:
                self.repeats = before[-1]
                return carry, outputs[len(carry) :]
            carry, (self.bytes, self.weights, self.repeats) = met, before


def _known(atom: Any, states: dict[Any, State]) -> State:
    return Same() if isinstance(atom, core.Literal) else states[atom]
