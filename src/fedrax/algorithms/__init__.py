"""Federated algorithms, one module for each family; experiment files refer to them by class name."""

from fedrax.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
