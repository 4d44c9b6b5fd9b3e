"""Robust aggregation rules, and malicious clients to test them with."""

from fedrax.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
