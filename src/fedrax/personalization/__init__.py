"""Personalized federated learning: personal layers (FedPer, FedRep, FedBN) and personal models (Ditto)."""

from fedrax.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
