"""The first local step of clients under ``vmap`` outside of the loop, with all clients in one batch, on NVIDIA GPUs.

- Before: a loop over local steps that starts from the broadcast parameters. ``vmap`` gives the loop's state a row for
  each client from the start, so that every product of every step is a product for each client.
- After: the first step, and a loop over the others. In the first step the parameters are still the same at all clients,
  and the rules of ``vmap`` merge the clients into the batch: forward passes and gradients of activations are ordinary
  products and convolutions that read each weight once. Gradients of weights stay those of each client.
- Why: convolutions with one kernel are the best case of cuDNN, and dense layers of few samples are limited by reading
  weights. It is one of T steps, or all of them where T is 1. The step is compiled twice.
- Not for: numbers of steps that are not known when the program is traced, and parameters that differ from the start,
  as in a later phase of a round; there the step is the same as before.

Not timed so far: it is used where ``first_step`` is enabled, see :class:`fedrax.xla.Options`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax

from fedrax.xla.options import is_enabled, note_applied


def repeat_steps(times: Array | int, step: Callable[[Any, Any], Any], carry: Any) -> Any:
    """``lax.fori_loop(0, times, step, carry)``; on GPUs with the first step outside of the loop, where it is enabled.

    Args:
        times: number of steps.
        step: (index, carry) -> carry.
        carry: before the first step.

    Returns:
        The carry after the last step.
    """
    first = 0
    if isinstance(times, int) and times > 0 and jax.default_backend() == "gpu" and is_enabled("first_step"):
        note_applied("first_step")
        carry, first = step(0, carry), 1
    return lax.fori_loop(first, times, step, carry)
