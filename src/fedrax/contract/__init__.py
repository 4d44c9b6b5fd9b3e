"""What an algorithm, a model and a task are, and what algorithms are written with."""

from fedrax.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
