"""Federated algorithms: one file a family, found by name in experiment files."""

from fedrax.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
