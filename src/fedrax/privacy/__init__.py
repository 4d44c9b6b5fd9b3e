"""Differential privacy: private wrappers, accounting of what they spend, and audits of it."""

from fedrax.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
