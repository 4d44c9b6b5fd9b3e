"""Options of the compiler passes: which are disabled, and the sizes above which the others apply."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

import jax

from fedrax.errors import FedraxError

PassName = Literal[
    "attention",
    "batch_rng",
    "conv",
    "cse",
    "dot_layout",
    "first_step",
    "ghost_norm",
    "grouped_conv",
    "half_precision",
    "hoist_rng",
    "implicit_gemm",
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
"""Environment variable with the names of disabled passes, separated by commas."""
UNMEASURED: Mapping[PassName, tuple[str, ...]] = {
    "first_step": ("cpu", "gpu", "tpu"),
    "implicit_gemm": ("cpu", "gpu", "tpu"),
    "recurrent": ("gpu", "tpu"),
    "remat": ("gpu", "tpu"),
}
"""Backends on which the gain of a pass has not been measured: it is disabled there unless it is named in
``Options.enabled``."""
ENABLING_VARIABLE = "FEDRAX_ENABLED_PASSES"
"""Environment variable with the names of enabled passes, separated by commas."""


@dataclass(frozen=True)
class Limits:
    """Sizes above which passes apply; bytes and counts are those of one program on one device.

    The defaults were chosen by the timings in docs/performance.md, on CPUs with XLA of jaxlib 0.10. A wrong value costs
    time or memory and never changes a result beyond float rounding. Tests lower them to cover passes by small programs.
    """

    attention_bytes: int = 6 << 20
    """Bytes of T x T products above which attention is computed in blocks: more than the caches hold."""
    attention_block_bytes: int = 1 << 20
    """Most bytes of T x T products in one block."""
    attention_block_rows: int = 64
    """Fewest rows of an axis that only one operand has. Every block then reads the whole other operand."""
    attention_growth: int = 8
    """A product counts as T x T scores if it has at least this many times the bytes of its operands."""
    attention_batched_growth: int = 2
    """The same for products with batch axes (examples, heads), and the factor by which the second product must reduce
    the scores."""
    layer_scan_equations: int = 250
    """Equations that a scan over layers must save, so that the shorter compilation outweighs the loop's overhead."""
    layer_scan_bytes: int = 64 << 20
    """Most bytes of saved activations plus twice the weights. Scans copy both, and beyond the caches the copy costs
    more than the scan saves."""
    microbatch_bytes: int = 7 << 20
    """Most bytes of activations that dot products and convolutions of a microbatch write for the backward pass."""
    microbatch_weight_ratio: int = 5
    """Fewest bytes of activations of a microbatch, as a multiple of the bytes of the weights. Every microbatch reads
    the weights and writes their gradient (in a loop at each step), which must be cheap by comparison."""
    sharing_flops: float = 50e9
    """Floating-point operations per second of one device. A rough figure: it only excludes cases far from worth it."""
    sharing_overhead: float = 0.3
    """Most overhead, as a fraction of the time of a whole batch, with which two devices share a batch."""
    conv_groups: int = 64
    """Most dot products of a grouped convolution; with more channel groups, neighboring groups share a product."""
    kernel_gradient_bytes: int = 2 << 20
    """Most bytes that one chunk of examples reads and writes in the gradient of a kernel."""
    full_conv_useful: float = 0.52
    """Fraction of kernel entries that meet pixels and not padding, up to which a convolution with few channels or with
    input dilation is computed as a scatter."""
    full_conv_pixels: int = 16
    """Fewest pixels of a batch for which a convolution is computed as a scatter."""
    full_conv_taps: int = 16
    """Most entries of a one-dimensional kernel that are unrolled."""
    grouped_conv_bytes: int = 2 << 30
    """Most bytes of the patches of all groups together; with more, groups are computed in a loop."""
    recurrent_weight_ratio: int = 4
    """Fewest bytes of weights, as a multiple of the input and output of their product in a scan body. Smaller weights
    are read at every time step at no extra cost."""
    recurrent_product_ratio: int = 8
    """Fewest bytes of an accumulated product, as a multiple of its factors. Smaller ones are accumulated in the cache
    as fast."""
    recurrent_steps: int = 16
    """Fewest time steps that outweigh a transposed copy of the weights."""
    random_bits: int = 1 << 12
    """Fewest random numbers that outweigh the longer program of unrolled Threefry."""
    sine_numbers: int = 1 << 12
    """Fewest sines or cosines that outweigh the longer program of a polynomial."""


@dataclass(frozen=True)
class Options:
    """Compiler options.

    Example:
        >>> with fedrax.xla.use_options(fedrax.xla.Options(disabled=frozenset({"cse"}))):
        ...     jax.grad(fedrax.xla.optimize_forward(jnp.sin))(0.0)
        Array(1., dtype=float32, weak_type=True)
    """

    disabled: frozenset[PassName] = frozenset()
    """Disabled passes."""
    limits: Limits = field(default_factory=Limits)
    """Sizes above which the other passes apply."""
    enabled: frozenset[PassName] = frozenset()
    """Passes to enable that are disabled by default, because their gain has not been measured yet."""

    def enables(self, name: PassName) -> bool:
        """Whether a pass may change programs.

        Args:
            name: a name of `fedrax.xla.PASSES`.

        Returns:
            False if it is disabled, or disabled by default on the current backend and not enabled.
        """
        if name in self.disabled:
            return False
        return name in self.enabled or name not in UNMEASURED or jax.default_backend() not in UNMEASURED[name]

    def __post_init__(self) -> None:
        unknown = sorted((self.disabled | self.enabled) - set(get_args(PassName)))
        if unknown:
            raise FedraxError(f"no compiler pass is called {unknown[0]!r}: use {', '.join(get_args(PassName))}")


def _from_environment() -> Options:
    """The options that the environment variables set."""
    disabled, enabled = (
        frozenset(os.environ.get(variable, "").replace(",", " ").split()) for variable in (VARIABLE, ENABLING_VARIABLE)
    )
    return Options(disabled=disabled, enabled=enabled)  # type: ignore[arg-type]


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
    """The current options of this process."""
    return _current


def limits() -> Limits:
    """The current limits of this process."""
    return _current.limits


def is_enabled(name: PassName) -> bool:
    """Whether a pass may change programs."""
    return _current.enables(name)


@contextmanager
def use_options(options: Options) -> Iterator[None]:
    """Compile functions that are traced inside with ``options``, in all threads of the process.

    Programs that were compiled before keep the options that they were traced with.

    Args:
        options: disabled passes, and limits.
    """
    global _current
    before, _current = _current, options
    try:
        yield
    finally:
        _current = before
