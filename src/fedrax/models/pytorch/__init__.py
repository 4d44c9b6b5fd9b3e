"""Adapter of PyTorch modules: traced by ``torch.export`` and computed in JAX."""

from fedrax.models.pytorch.adapter import TorchModel, from_torch

__all__ = ["TorchModel", "from_torch"]
