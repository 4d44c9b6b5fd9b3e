"""Models of the federated learning literature, and adapters of Flax, Equinox and PyTorch modules."""

from fedrax.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
