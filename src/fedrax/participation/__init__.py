"""Client participation: which clients are available, which are sampled, and when asynchronous uploads arrive."""

from fedrax.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
