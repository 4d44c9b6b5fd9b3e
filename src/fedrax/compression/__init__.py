"""Compressed uploads and broadcasts: quantization, sparsification and sign compression."""

from fedrax.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
