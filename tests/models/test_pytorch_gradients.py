"""Subgradients and other special cases of derivatives agree with PyTorch. Needs torch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from tests.models.torch_modules import LayerAndFunction, assert_agrees, dense_and_function  # noqa: E402


def normed(self: LayerAndFunction, x: Any) -> Any:
    h = self.layer(x)
    return (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 1e-6)


def norms(self: LayerAndFunction, x: Any) -> Any:
    h = self.layer(x)
    return torch.stack([torch.linalg.vector_norm(h, ord, -1) for ord in (0, 1, 2, 3, float("inf"))], 1) + h.sum()


@pytest.mark.parametrize("function", [normed, norms])
def test_standard_deviations_and_norms_of_zero_have_a_finite_gradient(function: Any):
    x = torch.randn(3, 4)
    x[1] = 0
    assert_agrees(dense_and_function(4, 4, function, bias=False), torch.randn(3, 4), x)


class TextTransformer(nn.Module):
    """A transformer over tokens with padding token 0."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(10, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Any) -> Any:
        none = x == 0
        h, kept = self.layer(self.words(x), src_key_padding_mask=none), (~none).unsqueeze(-1).float()
        return self.out((h * kept).sum(1) / kept.sum(1).clamp(min=1))


def test_attention_over_a_sequence_of_padding_only():
    torch.manual_seed(0)
    x = torch.randint(1, 10, (3, 5))
    x[1], x[2, 3:] = 0, 0
    assert_agrees(TextTransformer(), torch.randint(1, 10, (3, 5)), x)


def test_sums_and_means_that_skip_nan():
    x = torch.randn(3, 4)
    x[0, 0] = float("nan")
    assert_agrees(
        dense_and_function(1, 2, lambda self, x: self.layer(torch.nansum(x, 1, keepdim=True))), torch.randn(3, 4), x
    )
    assert_agrees(
        dense_and_function(1, 2, lambda self, x: self.layer(torch.nanmean(x, 1, keepdim=True))), torch.randn(3, 4), x
    )


class ZeroImages(nn.Module):
    """A function of images that are zero everywhere, so that all values are tied."""

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
def test_subgradients_at_ties_and_zeros(function: Any):
    assert_agrees(ZeroImages(function), torch.randn(3, 2, 6, 6), torch.randn(4, 2, 6, 6))


def test_standard_deviations_of_equal_values():
    assert_agrees(
        ZeroImages(lambda y: (y + 0.1).std(2, keepdim=True) + (y + 0.3).var(0)),
        torch.randn(3, 2, 6, 6),
        torch.randn(5, 2, 6, 6),
    )


def test_scatter_reductions_with_ties():
    places = torch.tensor([[0, 1, 1, 3, 0, 1]])

    def flat(self: LayerAndFunction, x: Any) -> Any:
        h, at = self.layer(x), places.expand(x.shape[0], -1)
        rounded = h - (h - h.round()).detach()
        dense_and_function = [
            h[:, :4].scatter_reduce(1, at, rounded, kind, include_self=own)
            for kind in ("sum", "mean", "amax", "amin")
            for own in (True, False)
        ]
        return torch.cat([*dense_and_function, h.reshape(-1, 3, 2).gather(1, at[:, :2, None]).flatten(1)], 1)

    assert_agrees(dense_and_function(4, 6, flat), torch.randn(3, 4), torch.randn(5, 4))


def detached(self: LayerAndFunction, x: Any) -> Any:
    h = self.layer(x)
    with torch.inference_mode():
        scale = h.exp()
    return h + scale + (h.round() - h).data + torch.fake_quantize_per_tensor_affine(h, 0.1, 3, -8, 7)


def test_all_ways_to_detach_stop_the_gradient():
    assert_agrees(dense_and_function(4, 3, detached), torch.randn(3, 4), torch.randn(5, 4))


def test_einsum_of_three_operands_takes_any_batch_size():
    def product(self: LayerAndFunction, x: Any) -> Any:
        h = self.layer(x)
        state = torch.zeros(x.shape[0], 2, 2) + torch.einsum("bi,bj,bi->bij", h[:, :2], h[:, 2:], h[:, 1:3])
        return torch.einsum("bij,bj->bi", state, h[:, :2])

    assert_agrees(dense_and_function(4, 4, product), torch.randn(3, 4), torch.randn(5, 4))
