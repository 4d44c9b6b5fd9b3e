"""Random numbers in PyTorch modules: only in training, from the key, with PyTorch's distributions. Needs torch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from fedrax import FedraxError  # noqa: E402
from fedrax.models import from_torch  # noqa: E402
from tests.models.torch_modules import LayerAndFunction, dense_and_function  # noqa: E402


def with_noise(self: LayerAndFunction, x: Any) -> Any:
    return self.layer(x + 0.1 * torch.randn_like(x) if self.training else x)


@pytest.mark.parametrize(
    "net",
    [dense_and_function(4, 3, with_noise), nn.Sequential(nn.Linear(4, 3), nn.AlphaDropout(0.3))],
    ids=["noise", "alpha"],
)
def test_noise_is_drawn_from_the_key_and_only_in_training(net: Any):
    model = from_torch(net, torch.randn(3, 4))
    params, x = model.init(jax.random.key(0)), jnp.ones((5, 4))
    plain, one, same, other = (model.apply(params, x, *key) for key in ((), *((jax.random.key(k),) for k in (1, 1, 2))))
    np.testing.assert_allclose(plain, net.eval()(torch.ones(5, 4)).detach(), rtol=1e-5)
    np.testing.assert_array_equal(one, same)
    assert np.any(one != other) and np.any(one != plain)


def test_noise_in_evaluation_is_rejected():
    with pytest.raises(FedraxError, match=r"draws random numbers in evaluation too: do it only if self.training"):
        from_torch(dense_and_function(4, 3, lambda self, x: self.layer(x + torch.randn_like(x))), torch.randn(3, 4))


def all_draws(self: LayerAndFunction, x: Any) -> Any:
    y = self.layer(x)
    if not self.training:
        return y
    like, chances = torch.empty_like(y[:, 0]), torch.tensor([1.0, 3.0]).expand(x.shape[0], -1)
    draws = [
        like.uniform_(1, 3), y.new_empty(x.shape[0]).normal_(1, 2), like.clone().exponential_(2),
        torch.randint(0, 5, like.shape), torch.distributions.Normal(1 + 0 * y[:, 0], 2.0).rsample(),
        F.gumbel_softmax(0 * y, hard=True)[:, 0], torch.multinomial(chances, 1)[:, 0],
        torch.randperm(x.shape[0]) / x.shape[0], torch.normal(1 + 0 * y[:, 0], 2.0),
    ]  # fmt: skip
    return torch.stack([d.float() for d in draws], 1)


def test_draws_have_the_distributions_of_pytorch():
    model = from_torch(dense_and_function(4, 9, all_draws), torch.randn(3, 4))
    found = model.apply(model.init(jax.random.key(0)), jnp.ones((4000, 4)), jax.random.key(1))
    means, deviations = found.mean(0), found.std(0)
    np.testing.assert_allclose(means, [2, 1, 0.5, 2, 1, 1 / 9, 0.75, 0.5, 1], atol=0.15)
    expected = [0.577, 2, 0.5, 2**0.5, 2, (8 / 81) ** 0.5, 0.433, 0.289, 2]
    np.testing.assert_allclose(deviations, expected, rtol=0.06)
