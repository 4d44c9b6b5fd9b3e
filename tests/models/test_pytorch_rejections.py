"""PyTorch modules whose traced function would differ from the module are rejected with the reason. Needs torch."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from fedrax import FedraxError  # noqa: E402
from fedrax.models import from_torch  # noqa: E402
from tests.models.torch_modules import LayerAndFunction, assert_agrees, dense_and_function  # noqa: E402


def test_scale_grad_by_freq_is_rejected():
    with pytest.raises(FedraxError, match="scale_grad_by_freq"):
        from_torch(nn.Sequential(nn.Embedding(5, 2, scale_grad_by_freq=True)), torch.tensor([[1, 1, 2], [1, 3, 3]]))


def test_branch_on_the_batch_size_is_rejected():
    net = dense_and_function(4, 2, lambda self, x: 2 * self.layer(x) if x.shape[0] > 16 else self.layer(x))
    with pytest.raises(FedraxError, match="condition on the number of samples: traced with 3"):
        from_torch(net, torch.randn(3, 4))
    assert_agrees(
        dense_and_function(4, 2, lambda self, x: self.layer(x) / x.shape[0]), torch.randn(3, 4), torch.randn(20, 4)
    )


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -gradients[0]


def counting(self: LayerAndFunction, x: Any) -> Any:
    self.steps = getattr(self, "steps", 0) + self.training
    return self.layer(x)


def clamped(self: LayerAndFunction, x: Any) -> Any:
    with torch.no_grad():
        self.layer.weight.clamp_(-9, 9)
    return self.layer(x)


def replaced(self: LayerAndFunction, x: Any) -> Any:
    self.layer.weight.data = self.layer.weight.data.clamp(-9, 9)
    return self.layer(x)


def hooked(self: LayerAndFunction, x: Any) -> Any:
    h = self.layer(x)
    if h.requires_grad:
        h.register_hook(lambda gradient: -gradient)
    return h


def half_precision(self: LayerAndFunction, x: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.layer(x)


def python_random(self: LayerAndFunction, x: Any) -> Any:
    return self.layer(x) * random.random() if self.training else self.layer(x)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (counting, "keeps steps from one call to the next"),
        (python_random, "random numbers that are not PyTorch's"),
        (lambda self, x: (Reversed.apply if self.training else torch.tanh)(self.layer(x)), r"custom.*\(Reversed\)"),
        (hooked, r"hooks of them.*\(register_hook\)"),
        (clamped, r"changes the parameter layer.weight without.*torch_modules.py, line"),
        (replaced, r"data of an array is replaced .*test_pytorch_rejections.py, line"),
        (half_precision, "autocast"),
        (lambda self, x: self.layer(x) + len(torch.where(self.layer(x) > 0)), "unknown length|cannot be traced"),
        (lambda self, x: F.embedding(x.long() % 3, self.layer.weight, max_norm=1.0)[:, 0], "max_norm.*line"),
        (lambda self, x: self.layer(x) + x.long()[:, :1] * 2654435761 % 7, "more than 32 bits .*line"),
    ],
)  # fmt: skip
def test_effects_that_a_trace_would_lose_are_rejected(function: Any, message: str):
    with pytest.raises(FedraxError, match=message):
        from_torch(dense_and_function(4, 4, function), torch.randn(3, 4))


def test_module_that_treats_a_single_sample_differently_is_rejected():
    centered = dense_and_function(4, 3, lambda self, x: (y := self.layer(x)) - (y.mean(0) if len(x) > 1 else 0))
    with pytest.raises(FedraxError, match="evaluation of a single sample: JAX's numbers differ"):
        from_torch(centered, torch.randn(3, 4))
    squeezed = dense_and_function(
        4, 3, lambda self, x: self.layer(x)[:, None].squeeze()
    )  # squeeze removes the batch axis of a single sample
    from_torch(squeezed, torch.randn(3, 4))


class Auxiliary(LayerAndFunction):
    def forward(self, x: Any) -> Any:
        return (self.layer(x), x) if self.training else self.layer(x)


def test_rejected_module_prints_nothing(capfd: Any):
    with pytest.raises(FedraxError, match="depends on the values"):
        from_torch(
            dense_and_function(4, 3, lambda self, x: self.layer(x) if x.sum() > 0 else x[:, :3]), torch.randn(3, 4)
        )
    assert capfd.readouterr() == ("", "")


def test_outputs_that_are_not_one_array_per_sample_are_rejected():
    with pytest.raises(FedraxError, match="a batch to one array in training"):
        from_torch(Auxiliary(nn.Linear(4, 3), None), torch.randn(3, 4))
    with pytest.raises(FedraxError, match=r"outputs of shape \(6, 2\) for 3 samples: the first axis must be"):
        from_torch(dense_and_function(4, 4, lambda self, x: self.layer(x).view(-1, 2)), torch.randn(3, 4))


def test_lazy_layers_and_parameter_hooks_are_rejected():
    with pytest.raises(FedraxError, match=r"without a shape yet: call it once"):
        from_torch(nn.LazyLinear(3), torch.randn(3, 4))
    layer = nn.Linear(4, 3)
    layer.weight.register_hook(lambda gradient: -gradient)
    with pytest.raises(FedraxError, match=r"hooks of gradients \(weight\)"):
        from_torch(layer, torch.randn(3, 4))
