"""The simulator: cohorts, execution plans, evaluation, checkpoints, events."""

from fedrax.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
