"""Adapter of PyTorch modules: they are traced by ``torch.export`` and evaluated in JAX."""

from fedrax.models.pytorch.adapter import TorchModel, from_torch

__all__ = ["TorchModel", "from_torch"]
