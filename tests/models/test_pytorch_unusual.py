"""PyTorch modules of unusual kinds: numbers and gradients are PyTorch's, or they are refused. Needs torch."""

from __future__ import annotations

import random
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
    by_weights = lambda a: (a.shape, a.ravel() @ np.arange(a.size))  # noqa: E731 - many sum to zero
    theirs = sorted((np.asarray(leaf) for leaf in jax.tree.leaves(found)), key=by_weights)
    for a, b in zip(theirs, sorted(own, key=by_weights), strict=True):
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


class Equal(nn.Module):
    """A function of images that are zero everywhere."""

    def __init__(self, function: Any):
        super().__init__()
        self.image, self.function = nn.Parameter(torch.zeros(2, 6, 6)), function

    def forward(self, x: Any) -> Any:
        return 1 + self.function(0 * x + self.image)


@pytest.mark.parametrize(
    "function",
    [
        lambda y: F.adaptive_max_pool2d(y, 4),
        lambda y: F.adaptive_max_pool2d(y, (1, 3), return_indices=True)[1] * y.sum() + y.abs().sum(),
        lambda y: torch.abs(y) * torch.arange(6.0) + torch.sinc(y),
        lambda y: y.norm(p=1, dim=2) + y.norm(p=float("inf"), dim=3),
    ],
)
def test_gradients_where_numbers_are_equal(function: Any):
    agree(Equal(function), torch.randn(3, 2, 6, 6), torch.randn(4, 2, 6, 6))


def test_deviations_of_equal_numbers():
    agree(
        Equal(lambda y: (y + 0.1).std(2, keepdim=True) + (y + 0.3).var(0)),
        torch.randn(3, 2, 6, 6),
        torch.randn(5, 2, 6, 6),
    )


def test_extremes_of_what_comes_to_a_place():
    places = torch.tensor([[0, 1, 1, 3, 0, 1]])

    def flat(self: Made, x: Any) -> Any:
        h, at = self.layer(x), places.expand(x.shape[0], -1)
        rounded = h - (h - h.round()).detach()
        made = [
            h[:, :4].scatter_reduce(1, at, rounded, kind, include_self=own)
            for kind in ("sum", "mean", "amax", "amin")
            for own in (True, False)
        ]
        return torch.cat([*made, h.reshape(-1, 3, 2).gather(1, at[:, :2, None]).flatten(1)], 1)

    agree(made(4, 6, flat), torch.randn(3, 4), torch.randn(5, 4))


def stopped(self: Made, x: Any) -> Any:
    h = self.layer(x)
    with torch.inference_mode():
        scale = h.exp()
    return h + scale + (h.round() - h).data + torch.fake_quantize_per_tensor_affine(h, 0.1, 3, -8, 7)


def test_gradients_that_stop_in_other_ways():
    agree(made(4, 3, stopped), torch.randn(3, 4), torch.randn(5, 4))


class Moving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 3), []
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("square", torch.ones(3))

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        self.kept.append(y)  # an array with a history, which cannot be copied
        if self.training:
            with torch.no_grad():
                self.mean = 0.9 * self.mean + 0.1 * y.mean(0)
            self.square.data.mul_(0.9).add_(y.detach().square().mean(0), alpha=0.1)
        return (y - self.mean) / self.square.sqrt()


def test_buffers_that_are_assigned_move():
    net, x = nn.Sequential(Moving()), torch.randn(5, 4)
    model = from_torch(net, torch.randn(3, 4))
    variables = model.init(jax.random.key(0))
    moved = model.train(variables, jnp.asarray(x.numpy()), jax.random.key(1))[1]["0"]
    net.train()(x)
    for name, buffer in net[0].named_buffers():
        np.testing.assert_allclose(moved[name], buffer.detach(), rtol=1e-5, atol=1e-6)


def drawn(self: Made, x: Any) -> Any:
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


def test_draws_have_pytorchs_distributions():
    model = from_torch(made(4, 9, drawn), torch.randn(3, 4))
    found = model.apply(model.init(jax.random.key(0)), jnp.ones((4000, 4)), jax.random.key(1))
    means, deviations = found.mean(0), found.std(0)
    np.testing.assert_allclose(means, [2, 1, 0.5, 2, 1, 1 / 9, 0.75, 0.5, 1], atol=0.15)
    expected = [0.577, 2, 0.5, 2**0.5, 2, (8 / 81) ** 0.5, 0.433, 0.289, 2]
    np.testing.assert_allclose(deviations, expected, rtol=0.06)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -gradients[0]


def counting(self: Made, x: Any) -> Any:
    self.steps = getattr(self, "steps", 0) + self.training
    return self.layer(x)


def clamped(self: Made, x: Any) -> Any:
    with torch.no_grad():
        self.layer.weight.clamp_(-9, 9)
    return self.layer(x)


def replaced(self: Made, x: Any) -> Any:
    self.layer.weight.data = self.layer.weight.data.clamp(-9, 9)
    return self.layer(x)


def hooked(self: Made, x: Any) -> Any:
    h = self.layer(x)
    if h.requires_grad:
        h.register_hook(lambda gradient: -gradient)
    return h


def short(self: Made, x: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.layer(x)


def by_chance(self: Made, x: Any) -> Any:
    return self.layer(x) * random.random() if self.training else self.layer(x)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (counting, "keeps steps from one call to the next"),
        (by_chance, "random numbers that are not PyTorch's"),
        (lambda self, x: (Reversed.apply if self.training else torch.tanh)(self.layer(x)), r"of its own.*\(Reversed\)"),
        (hooked, r"hooks of them.*\(register_hook\)"),
        (clamped, r"changes the parameter layer.weight where.*test_pytorch_unusual.py, line"),
        (replaced, r"data of an array is replaced .*test_pytorch_unusual.py, line"),
        (short, "autocast"),
        (lambda self, x: self.layer(x) + len(torch.where(self.layer(x) > 0)), "places of a mask|cannot be traced"),
        (lambda self, x: F.embedding(x.long() % 3, self.layer.weight, max_norm=1.0)[:, 0], "max_norm.*line"),
        (lambda self, x: self.layer(x) + x.long()[:, :1] * 2654435761 % 7, "beyond 32 bits .*line"),
    ],
)  # fmt: skip
def test_what_a_trace_would_lose_is_refused(function: Any, sentence: str):
    with pytest.raises(FedraxError, match=sentence):
        from_torch(made(4, 4, function), torch.randn(3, 4))


def test_another_function_of_a_single_sample_is_refused():
    centered = made(4, 3, lambda self, x: (y := self.layer(x)) - (y.mean(0) if len(x) > 1 else 0))
    with pytest.raises(FedraxError, match="evaluation of a single sample: JAX's numbers differ"):
        from_torch(centered, torch.randn(3, 4))
    squeezed = made(4, 3, lambda self, x: self.layer(x)[:, None].squeeze())  # in PyTorch one sample has no rows
    from_torch(squeezed, torch.randn(3, 4))


class Auxiliary(Made):
    def forward(self, x: Any) -> Any:
        return (self.layer(x), x) if self.training else self.layer(x)


def test_a_refusal_prints_nothing(capfd: Any):
    with pytest.raises(FedraxError, match="depends on the values"):
        from_torch(made(4, 3, lambda self, x: self.layer(x) if x.sum() > 0 else x[:, :3]), torch.randn(3, 4))
    assert capfd.readouterr() == ("", "")


def test_outputs_of_other_kinds_are_refused():
    with pytest.raises(FedraxError, match="one array to one array in training"):
        from_torch(Auxiliary(nn.Linear(4, 3), None), torch.randn(3, 4))
    with pytest.raises(FedraxError, match=r"outputs of shape \(6, 2\) for 3 samples: the first axis must be"):
        from_torch(made(4, 4, lambda self, x: self.layer(x).view(-1, 2)), torch.randn(3, 4))


def test_products_of_three_do_not_hold_the_number_of_samples():
    def product(self: Made, x: Any) -> Any:
        h = self.layer(x)
        state = torch.zeros(x.shape[0], 2, 2) + torch.einsum("bi,bj,bi->bij", h[:, :2], h[:, 2:], h[:, 1:3])
        return torch.einsum("bij,bj->bi", state, h[:, :2])

    agree(made(4, 4, product), torch.randn(3, 4), torch.randn(5, 4))


def test_layers_without_a_shape_and_hooks_of_parameters_are_refused():
    with pytest.raises(FedraxError, match=r"without a shape yet: call it once"):
        from_torch(nn.LazyLinear(3), torch.randn(3, 4))
    layer = nn.Linear(4, 3)
    layer.weight.register_hook(lambda gradient: -gradient)
    with pytest.raises(FedraxError, match=r"hooks of gradients \(weight\)"):
        from_torch(layer, torch.randn(3, 4))
