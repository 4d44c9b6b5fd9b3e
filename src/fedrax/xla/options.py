"""Which compiler passes run, and from which sizes on: one options object for users, tests and the ablation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

from fedrax.errors import FedraxError

PassName = Literal[
    "attention",
    "batch_rng",
    "conv",
    "cse",
    "dot_layout",
    "ghost_norm",
    "grouped_conv",
    "half_precision",
    "hoist_rng",
    "layer_scan",
    "linear_algebra",
    "matvec_layout",
    "microbatch",
    "norms",
    "pooling",
    "recurrent",
    "reductions",
    "remat",
    "threefry",
    "trigonometric",
    "uniform_dot",
]
"""The passes of :data:`fedrax.xla.PASSES`, which says what each of them matches."""
VARIABLE = "FEDRAX_DISABLED_PASSES"
"""Environment variable: names of passes that are off, separated by commas."""


@dataclass(frozen=True)
class Limits:
    """Sizes from which on passes apply; bytes and counts are those of one program on one device.

    The defaults were chosen by the timings in docs/performance.md, on CPUs with XLA of jaxlib 0.10. A wrong value costs
    time or memory and never changes a result beyond float rounding. Tests lower them, so that small programs do.
    """

    attention_bytes: int = 6 << 20
    """Bytes of T x T products above which attention is computed in blocks: more than the caches hold."""
    attention_block_bytes: int = 1 << 20
    """Most bytes of T x T products in one block."""
    attention_block_rows: int = 64
    """Fewest rows of an axis that is cut although every block reads the whole other operand."""
    attention_growth: int = 8
    """A product is T x T-like if it has at least this many times the bytes of its operands."""
    attention_batched_growth: int = 2
    """The same for products with batch axes (examples, heads), and how much the second product must shrink it."""
    layer_scan_equations: int = 250
    """Equations that a scan over layers must save: compiling them takes longer than what the loop adds to each run."""
    layer_scan_bytes: int = 64 << 20
    """Most bytes of saved activations and twice the weights: loops copy them, and beyond the caches the copy costs more
    than the scan saves."""
    microbatch_bytes: int = 7 << 20
    """Most bytes that dot products and convolutions of a microbatch write, all of which its backward pass reads."""
    microbatch_weight_ratio: int = 5
    """A microbatch writes at least this many times the bytes of the weights, which every microbatch reads again (in a
    loop at each step) and whose gradient it adds to."""
    sharing_flops: float = 50e9
    """Floating-point operations a second of one device. A rough figure: it only decides what is far from worth it."""
    sharing_overhead: float = 0.3
    """Most extra time, as part of the time of a whole batch, for which two devices share a batch."""
    conv_groups: int = 64
    """Channel groups up to which each has a product of its own; of more, neighbors share a product."""
    kernel_gradient_bytes: int = 2 << 20
    """Bytes that the examples which are worked on together should touch at most."""
    full_conv_useful: float = 0.52
    """Part of what a kernel meets that is no padding, up to which a convolution is computed as a scatter where it has
    few channels or skips pixels."""
    full_conv_pixels: int = 16
    """Fewest pixels of a batch that are worth a product."""
    full_conv_taps: int = 16
    """Most entries of a kernel with one axis that are unrolled."""
    grouped_conv_bytes: int = 2 << 30
    """Most bytes of the patches of all groups together; beyond it groups are computed in a loop."""
    recurrent_weight_ratio: int = 4
    """How many times as large weights are at least as their product's input and output; below it, reading them at every
    time step costs nothing extra."""
    recurrent_product_ratio: int = 8
    """How many times as large an accumulated product is at least as its factors; below it, adding it up in the cache is
    as fast."""
    recurrent_steps: int = 16
    """Fewest time steps that are worth a transposed copy of the weights."""
    random_bits: int = 1 << 12
    """Fewest random numbers that are worth the longer program of unrolled Threefry."""
    sine_numbers: int = 1 << 12
    """Fewest sines or cosines that are worth the longer program of a polynomial."""


@dataclass(frozen=True)
class Options:
    """Compiler options.

    Example:
        >>> with fedrax.xla.use_options(fedrax.xla.Options(disabled=frozenset({"cse"}))):
        ...     jax.grad(fedrax.xla.optimize_forward(jnp.sin))(0.0)
        Array(1., dtype=float32, weak_type=True)
    """

    disabled: frozenset[PassName] = frozenset()
    """Passes that are off."""
    limits: Limits = field(default_factory=Limits)
    """Sizes from which on the others apply."""

    def __post_init__(self) -> None:
        unknown = sorted(self.disabled - set(get_args(PassName)))
        if unknown:
            raise FedraxError(f"no compiler pass is called {unknown[0]!r}: one of {', '.join(get_args(PassName))}")


def _from_environment() -> Options:
    names = os.environ.get(VARIABLE, "").replace(",", " ").split()
    return Options(disabled=frozenset(names))  # type: ignore[arg-type]


_current = _from_environment()


_applied: set[PassName] = set()


def note_applied(name: PassName) -> None:
    """Record that a pass has changed a program."""
    _applied.add(name)


def applied_passes() -> frozenset[PassName]:
    """The passes that have changed a program since this process started.

    Returns:
        Names of `fedrax.xla.PASSES`.

    Example:
        >>> _ = fedrax.xla.optimize(lambda x: jnp.sin(x))(jnp.zeros(1 << 12))
        >>> jax.default_backend() != "cpu" or "trigonometric" in fedrax.xla.applied_passes()
        True
    """
    return frozenset(_applied)


def current_options() -> Options:
    """The options that are in force in this process."""
    return _current


def limits() -> Limits:
    """The limits that are in force in this process."""
    return _current.limits


def is_enabled(name: PassName) -> bool:
    """Whether the pass of this name may run."""
    return name not in _current.disabled


@contextmanager
def use_options(options: Options) -> Iterator[None]:
    """Compile what is traced inside with ``options``, in all threads of the process.

    Programs that were compiled before keep the options of their time.

    Args:
        options: passes that are off, and limits.
    """
    global _current
    before, _current = _current, options
    try:
        yield
    finally:
        _current = before
