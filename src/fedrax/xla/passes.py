"""The table of compiler passes: what each of them matches, what it puts in its place, and where it applies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import jax
from jax.extend import core

from fedrax.xla import linear_algebra
from fedrax.xla.attention import block_attention, is_large_dot
from fedrax.xla.conv.lowering import lower_convolution
from fedrax.xla.conv.pooling import lower_max_pool_gradient, lower_window_sum
from fedrax.xla.cse import eliminate_common_subexpressions, has_common_subexpressions
from fedrax.xla.dot_layout import is_batched_matvec, lower_batched_matvec, lower_dot_general
from fedrax.xla.options import Options, PassName, current_options, limits
from fedrax.xla.reductions import accumulate_in_float32, lower_reduce_max, lower_reduce_sum, lower_scatter_add
from fedrax.xla.remat import rematerialize_residuals
from fedrax.xla.rewriting import Rule
from fedrax.xla.threefry import lower_random_bits
from fedrax.xla.tracing import equations_in
from fedrax.xla.trigonometric import lower_cos, lower_sin
from fedrax.xla.uniform_dot import lower_uniform_dots

Stage = Literal["forward", "lowering", "batch", "clients", "trace", "draws"]
"""Where a pass runs:

- ``forward``: on the jaxpr of a loss before differentiation, with calls inlined (transform and rules; by
  :func:`fedrax.xla.pipeline.optimize_forward`);
- ``lowering``: on the jaxpr of a gradient or an evaluation (transform and rules; by
  :func:`fedrax.xla.pipeline.optimize`);
- ``batch``: on the gradient of a mini-batch (its module is called by ``ClientData``);
- ``clients``: on the work of clients under ``vmap`` (:func:`fedrax.xla.vmap`);
- ``trace``: on the jaxpr of a client's or the server's work (:mod:`fedrax.xla.tracing`);
- ``draws``: on functions that draw random arrays (:mod:`fedrax.xla.batch_rng`).

The passes of the last four stages have neither transform nor rules here: their modules ask whether they are enabled."""


class Pass(NamedTuple):
    """A compiler pass."""

    name: PassName
    module: str
    """Below ``fedrax.xla``."""
    stage: Stage
    backends: tuple[str, ...]
    """The JAX backends on which it applies."""
    matches: str
    """The pattern in the jaxpr."""
    becomes: str
    """The replacement."""
    matches_in: Callable[[core.ClosedJaxpr], bool] = lambda _: True
    """Whether a jaxpr may contain the pattern. If no pass of the stage "forward" matches, the jaxpr stays unchanged."""
    transform: Callable[[core.ClosedJaxpr], core.ClosedJaxpr] | None = None
    """jaxpr -> jaxpr, the same object if nothing changes."""
    rules: Callable[[bool], Mapping[str, Rule]] | None = None
    """(whether per-example gradients are computed) -> rules by the name of the primitive. A rule is
    (inputs, equation) -> output, a list for several outputs, or None to leave the equation as it is."""


def _has_large_dots(closed: core.ClosedJaxpr) -> bool:
    return any(map(is_large_dot, equations_in(closed)))


def _has_batched_matvecs(closed: core.ClosedJaxpr) -> bool:
    return any(map(is_batched_matvec, equations_in(closed)))


def _is_long(closed: core.ClosedJaxpr) -> bool:
    return sum(1 for _ in equations_in(closed)) >= limits().layer_scan_equations


CPU, GPU, NVIDIA, ANY = ("cpu",), ("gpu", "tpu"), ("gpu",), ("cpu", "gpu", "tpu")
CPU_OR_NVIDIA = (*CPU, *NVIDIA)
PASSES: tuple[Pass, ...] = (
    # The order of the forward stage matters: blocks are not found where another equation reads their parts.
    Pass(
        "attention",
        "attention",
        "forward",
        CPU,
        "dot_general to T x T scores, row-wise operations, dot_general back to T rows",
        "a scan over blocks of rows, rematerialized in the backward pass",
        _has_large_dots,
        block_attention,
    ),
    Pass(
        "cse",
        "cse",
        "forward",
        CPU,
        "equal dot_general, conv_general_dilated or scan of the same inputs",
        "one equation",
        has_common_subexpressions,
        eliminate_common_subexpressions,
    ),
    Pass(
        "matvec_layout",
        "dot_layout",
        "forward",
        CPU,
        "dot_general of a matrix [D, C] and [..., C], as vmap makes of matrix @ vector",
        "dot_general with the vectors as first operand",
        _has_batched_matvecs,
        rules=lambda _: {"dot_general": lower_batched_matvec},
    ),
    Pass(
        "layer_scan",
        "layer_scan",
        "forward",
        CPU,
        "repeated runs of structurally equal equations with other weights",
        "a scan over the stacked weights",
        _is_long,
    ),
    Pass(
        "uniform_dot",
        "uniform_dot",
        "lowering",
        CPU,
        "dot_general with an operand that is one number everywhere",
        "a sum (XLA of jaxlib 0.10.2 miscompiles some of these products)",
        transform=lower_uniform_dots,
    ),
    Pass(
        "remat",
        "remat",
        "lowering",
        CPU_OR_NVIDIA,
        "scan whose stacked inputs are cheap functions of others from the forward scan",
        "the same operations inside the body",
        transform=rematerialize_residuals,
    ),
    Pass(
        "conv",
        "conv.lowering",
        "lowering",
        CPU,
        "conv_general_dilated, kernel gradients, transposed and grouped ones",
        "the one layout that XLA:CPU hands to Eigen, or dot_general",
        rules=lambda per_example: {"conv_general_dilated": partial(lower_convolution, per_example=per_example)},
    ),
    # Before the passes below: those leave half-precision numbers alone.
    Pass(
        "half_precision",
        "reductions",
        "lowering",
        CPU,
        "reduce_sum, reduce_window_sum and scatter-add of bfloat16 and float16",
        "the same in float32, rounded once",
        rules=lambda _: {
            "reduce_sum": accumulate_in_float32,
            "reduce_window_sum": accumulate_in_float32,
            "scatter-add": lower_scatter_add,
        },
    ),
    Pass(
        "pooling",
        "conv.pooling",
        "lowering",
        CPU,
        "select_and_scatter_add, reduce_window_sum without strides",
        "shifted slices, compared or added",
        rules=lambda _: {"select_and_scatter_add": lower_max_pool_gradient, "reduce_window_sum": lower_window_sum},
    ),
    Pass(
        "reductions",
        "reductions",
        "lowering",
        CPU,
        "reduce_sum over axes that are apart, reduce_sum and reduce_max with unit axes",
        "two sums; reductions without unit axes",
        rules=lambda _: {"reduce_sum": lower_reduce_sum, "reduce_max": lower_reduce_max},
    ),
    Pass(
        "threefry",
        "threefry",
        "lowering",
        CPU,
        "random_bits of Threefry keys",
        "all twenty rounds unrolled in one pass",
        rules=lambda _: {"random_bits": lower_random_bits},
    ),
    Pass(
        "dot_layout",
        "dot_layout",
        "lowering",
        CPU,
        "dot_general that contracts leading axes, as weight gradients do",
        "one contracted axis, narrower operand first",
        rules=lambda _: {"dot_general": lower_dot_general},
    ),
    Pass(
        "trigonometric",
        "trigonometric",
        "lowering",
        CPU,
        "sin and cos of many float32 numbers",
        "a polynomial after Cody-Waite reduction",
        rules=lambda _: {"sin": lower_sin, "cos": lower_cos},
    ),
    Pass(
        "linear_algebra",
        "linear_algebra",
        "lowering",
        CPU,
        "factorizations of a batch of matrices, before jaxlib 0.11.2",
        "a loop over the batch (avoids a deadlock of the thread pool)",
        rules=lambda _: linear_algebra.SEQUENTIAL_RULES,
    ),
    Pass(
        "recurrent",
        "recurrent",
        "lowering",
        CPU_OR_NVIDIA,
        "scan whose body multiplies few rows by large weights",
        "products before and after the scan over all steps; transposed weights",
    ),
    Pass(
        "microbatch",
        "microbatch",
        "batch",
        CPU,
        "gradients of losses that treat each example by itself",
        "gradient accumulation over microbatches that fit the caches; batches that devices share",
    ),
    Pass(
        "hoist_rng",
        "hoist_rng",
        "batch",
        CPU,
        "random arrays with a row for each example, such as dropout masks",
        "further inputs of the batch, so that it can be split",
    ),
    Pass(
        "ghost_norm",
        "per_example_clipping",
        "batch",
        ANY,
        "per-example gradients that are outer products",
        "norms and one dot_general of the factors",
    ),
    Pass(
        "grouped_conv",
        "grouped_conv",
        "clients",
        GPU,
        "conv_general_dilated with groups, as vmap over clients makes",
        "batched dot_general of patches",
    ),
    Pass(
        "implicit_gemm",
        "conv.implicit_gemm",
        "clients",
        NVIDIA,
        "conv_general_dilated with groups over two spatial axes",
        "a kernel that reads patches from the images (not measured, disabled by default)",
    ),
    Pass(
        "first_step",
        "first_step",
        "clients",
        NVIDIA,
        "a loop over local steps that starts from the same weights at all clients",
        "its first step, in which the clients are one batch, and a loop (not measured, disabled by default)",
    ),
    Pass(
        "norms",
        "norms",
        "trace",
        CPU,
        "norm of a difference of two trees",
        "sums of squares in blocks, without writing the difference",
    ),
    Pass(
        "batch_rng",
        "batch_rng",
        "draws",
        CPU,
        "random arrays of several shapes that are made by the same operations",
        "one loop over chunks of all of them",
    ),
)


def enabled_passes(stage: Stage, options: Options | None = None) -> list[Pass]:
    """Those of a stage that are enabled on the current backend, in the order in which they run."""
    chosen, backend = options or current_options(), jax.default_backend()
    return [one for one in PASSES if one.stage == stage and backend in one.backends and chosen.enables(one.name)]
