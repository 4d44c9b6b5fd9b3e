"""Server optimizers, learning-rate schedules, proximal operators, optax optimizers and the cone projection."""

from fedrax.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
