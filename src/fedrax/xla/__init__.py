"""Compiler passes on traced functions (jaxprs), and what the library asks of traced functions.

The library reaches this package through the names of this module alone. :func:`optimize` and :func:`value_and_grad` run
the passes of :data:`PASSES`; :func:`vmap` batches clients; :func:`plan_microbatches` and :func:`accumulate_gradients`
split a batch; :class:`Options` switches passes off. `docs/performance.md` says what each pass gains.
"""

from fedrax.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
