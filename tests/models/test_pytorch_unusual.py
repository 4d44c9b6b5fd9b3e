"""PyTorch modules of unusual kinds: numbers and gradients are PyTorch's, or they are refused. Needs torch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from fedrax import FedraxError  # noqa: E402
from fedrax.models import from_torch  # noqa: E402


class Made(nn.Module):
    """A layer, and a function of it and x."""

    def __init__(self, layer: Any, function: Any):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def made(inputs: int, outputs: int, function: Any, **options: Any) -> Made:
    torch.manual_seed(0)
    return Made(nn.Linear(inputs, outputs, **options), function)


def agree(net: Any, example: Any, x: Any) -> None:
    """Outputs, and gradients of their cubes, at samples that the example has nothing like."""
    model = from_torch(net, example)
    params = model.init(jax.random.key(0))
    values = jnp.asarray(x.numpy())
    expected = net.eval()(x)
    np.testing.assert_allclose(model.apply(params, values), expected.detach(), rtol=1e-4, atol=1e-5)
    (expected**3).sum().backward()
    found = jax.grad(lambda p: (model.apply(p, values) ** 3).sum())(params)
    own = [p.grad.numpy() for p in net.parameters()]
    theirs = sorted((np.asarray(leaf) for leaf in jax.tree.leaves(found)), key=lambda a: (a.shape, a.sum()))
    for a, b in zip(theirs, sorted(own, key=lambda a: (a.shape, a.sum())), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def with_noise(self: Made, x: Any) -> Any:
    return self.layer(x + 0.1 * torch.randn_like(x) if self.training else x)


@pytest.mark.parametrize(
    "net", [made(4, 3, with_noise), nn.Sequential(nn.Linear(4, 3), nn.AlphaDropout(0.3))], ids=["noise", "alpha"]
)
def test_noise_in_training(net: Any):
    model = from_torch(net, torch.randn(3, 4))
    params, x = model.init(jax.random.key(0)), jnp.ones((5, 4))
    plain, one, same, other = (model.apply(params, x, *key) for key in ((), *((jax.random.key(k),) for k in (1, 1, 2))))
    np.testing.assert_allclose(plain, net.eval()(torch.ones(5, 4)).detach(), rtol=1e-5)
    np.testing.assert_array_equal(one, same)
    assert np.any(one != other) and np.any(one != plain)


def test_noise_in_evaluation_is_refused():
    with pytest.raises(FedraxError, match=r"draws random numbers in evaluation too: ask self.training first"):
        from_torch(made(4, 3, lambda self, x: self.layer(x + torch.randn_like(x))), torch.randn(3, 4))


def normed(self: Made, x: Any) -> Any:
    h = self.layer(x)
    return (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 1e-6)


def in_lengths(self: Made, x: Any) -> Any:
    h = self.layer(x)
    return torch.stack([torch.linalg.vector_norm(h, ord, -1) for ord in (0, 1, 2, 3, float("inf"))], 1) + h.sum()


@pytest.mark.parametrize("function", [normed, in_lengths])
def test_deviations_and_lengths_of_zero_have_a_gradient(function: Any):
    x = torch.randn(3, 4)
    x[1] = 0
    agree(made(4, 4, function, bias=False), torch.randn(3, 4), x)


class Text(nn.Module):
    """A transformer over words, of which 0 is none."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(10, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Any) -> Any:
        none = x == 0
        h, kept = self.layer(self.words(x), src_key_padding_mask=none), (~none).unsqueeze(-1).float()
        return self.out((h * kept).sum(1) / kept.sum(1).clamp(min=1))


def test_a_text_without_words():
    torch.manual_seed(0)
    x = torch.randint(1, 10, (3, 5))
    x[1], x[2, 3:] = 0, 0
    agree(Text(), torch.randint(1, 10, (3, 5)), x)


def test_sums_that_leave_nan_out():
    x = torch.randn(3, 4)
    x[0, 0] = float("nan")
    agree(made(1, 2, lambda self, x: self.layer(torch.nansum(x, 1, keepdim=True))), torch.randn(3, 4), x)
    agree(made(1, 2, lambda self, x: self.layer(torch.nanmean(x, 1, keepdim=True))), torch.randn(3, 4), x)


def test_gradients_divided_by_counts_are_refused():
    with pytest.raises(FedraxError, match="scale_grad_by_freq"):
        from_torch(nn.Sequential(nn.Embedding(5, 2, scale_grad_by_freq=True)), torch.tensor([[1, 1, 2], [1, 3, 3]]))


def test_what_depends_on_the_number_of_samples_is_refused():
    net = made(4, 2, lambda self, x: 2 * self.layer(x) if x.shape[0] > 16 else self.layer(x))
    with pytest.raises(FedraxError, match="asks how many samples there are: traced with 3"):
        from_torch(net, torch.randn(3, 4))
    agree(made(4, 2, lambda self, x: self.layer(x) / x.shape[0]), torch.randn(3, 4), torch.randn(20, 4))


def test_short_whole_numbers_do_not_overflow():
    torch.manual_seed(0)
    net = Made(nn.Embedding(1000, 2), lambda self, x: self.layer((x * 31 + 7) % 1000))
    x = torch.tensor([[9, 200], [3, 77]])
    model = from_torch(net, x)
    params = model.init(jax.random.key(0))
    for kind in (jnp.uint8, jnp.int16, jnp.int32):
        np.testing.assert_array_equal(model.apply(params, jnp.asarray(x.numpy(), kind)), net(x).detach())
