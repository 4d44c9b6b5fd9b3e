"""Reports of runs: HTML pages, run directories read back, and event sinks."""

from fedrax.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
