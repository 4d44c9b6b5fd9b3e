"""Compiler passes and analyses for jaxprs, the programs that JAX traces.

Code outside of this package imports from this module alone. :func:`optimize` and :func:`value_and_grad` run the passes
of :data:`PASSES`; :func:`vmap` batches clients; :func:`plan_microbatches` and :func:`accumulate_gradients` split a
batch; :class:`Options` disables passes. ``docs/compiler-passes.md`` describes each of them.

- Passes: one module each, listed in :mod:`fedrax.xla.passes`. The module's docstring says what the pass matches
  (before), what replaces it (after), why, and what it is not for. A pass is a rule for a primitive
  (:data:`fedrax.xla.rewriting.Rule`) or a function from one jaxpr to another. A pass that is not run by the pipeline
  calls :func:`~fedrax.xla.options.note_applied` where it changes a program.
- Analyses that passes use: :mod:`~fedrax.xla.per_example`, :mod:`~fedrax.xla.batch_invariance`,
  :mod:`~fedrax.xla.equivalence`, :mod:`~fedrax.xla.flops`, :mod:`~fedrax.xla.peak_memory`.
- Infrastructure: :mod:`~fedrax.xla.rewriting` evaluates a jaxpr with rules, :mod:`~fedrax.xla.pipeline` orders the
  passes, :mod:`~fedrax.xla.tracing` and :mod:`~fedrax.xla.fingerprint` cache traces, :mod:`~fedrax.xla.options` holds
  limits, :mod:`~fedrax.xla.scopes` names the parts of a round in profiles.
"""

from fedrax.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
