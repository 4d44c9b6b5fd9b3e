"""PyTorch modules as models: traced by ``torch.export``, computed in JAX."""

from fedrax.models.pytorch.adapter import TorchModel, from_torch

__all__ = ["TorchModel", "from_torch"]
