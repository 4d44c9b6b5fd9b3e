"""A PyTorch module of one layer and a function, and a comparison of its adapted model with PyTorch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from fedrax.models import from_torch


class LayerAndFunction(nn.Module):
    """A layer, and a forward function of the module and x."""

    def __init__(self, layer: Any, function: Any):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def dense_and_function(inputs: int, outputs: int, function: Any, **options: Any) -> LayerAndFunction:
    torch.manual_seed(0)
    return LayerAndFunction(nn.Linear(inputs, outputs, **options), function)


def assert_agrees(net: Any, example: Any, x: Any) -> None:
    """Assert equal outputs, and gradients of the sum of their cubes, on samples that differ from the example."""
    model = from_torch(net, example)
    params = model.init(jax.random.key(0))
    values = jnp.asarray(x.numpy())
    expected = net.eval()(x)
    np.testing.assert_allclose(model.apply(params, values), expected.detach(), rtol=1e-4, atol=1e-5)
    (expected**3).sum().backward()
    found = jax.grad(lambda p: (model.apply(p, values) ** 3).sum())(params)
    own = [p.grad.numpy() for p in net.parameters()]
    by_weights = lambda a: (a.shape, a.ravel() @ np.arange(a.size))  # noqa: E731 - many functions have constant sums
    desired = sorted((np.asarray(leaf) for leaf in jax.tree.leaves(found)), key=by_weights)
    for a, b in zip(desired, sorted(own, key=by_weights), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
