"""Experiment files: reading and writing them, comparisons of several methods, and privacy audits."""

from fedrax.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
