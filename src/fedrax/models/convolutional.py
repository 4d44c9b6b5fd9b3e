"""Networks of the papers' experiments with norms: TinyNN and LeNet-5 of GradMA, VGG-11, and residual networks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array, lax

from fedrax.config.hyperparameters import PositiveInt
from fedrax.contract.model import Model
from fedrax.models import network_parts
from fedrax.models.network_parts import Norm, Part, image_shape, network, series

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TinyNN:
    """GradMA's network for MNIST (Luo et al. 2023, section 6.1): dense layers of 200 and 100 units with ReLU.

    ``norm="batch"`` is what the authors ran: batch norm before each ReLU.
    """

    norm: Literal["none", "batch"] = "none"

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        """The model on inputs of any shape, flattened."""
        sizes = (math.prod(input_shape), 200, 100)
        blocks = {f"layer{i}": _dense_block(sizes[i - 1], sizes[i], self.norm) for i in (1, 2)}
        return network("tinynn", blocks, sizes[-1], num_outputs)


@dataclass(frozen=True)
class LeNet5:
    """GradMA's LeNet-5 for CIFAR-10: two 5x5 convolutions of 32 and 64 channels, each pooled, then 512 and 128 units.

    The authors ran it with batch norm before each ReLU and dropout after the dense layers.
    """

    norm: Literal["none", "batch"] = "batch"
    dropout: float = 0.5

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        """The model on images [H, W] or [H, W, C]."""
        height, width, channels = image_shape("lenet5", input_shape, smallest=16)
        flat = 64 * math.prod(((side - 4) // 2 - 4) // 2 for side in (height, width))

        def stage(channels: int, filters: int) -> Part:
            layers = {"conv": network_parts.conv(channels, filters, 5), "norm": network_parts.norm(self.norm, filters)}
            return series(images=network_parts.images(), **layers, relu=network_parts.relu(), pool=network_parts.pool())

        blocks = {
            "conv1": stage(channels, 32),
            "conv2": stage(32, 64),
            "dense1": _dense_block(flat, 512, self.norm, self.dropout),
            "dense2": _dense_block(512, 128, self.norm, self.dropout),
        }
        return network("lenet5", blocks, 128, num_outputs)


@dataclass(frozen=True)
class VGG11:
    """VGG-11 (Simonyan and Zisserman 2015) with a norm after each convolution.

    One dense layer of 128 units with dropout, as GradMA trains it on CIFAR-100.
    """

    norm: Norm = "group"
    groups: PositiveInt = 8
    """Of group norm."""
    width: PositiveInt = 64
    """Channels of the first convolution; the others have 2, 4 and 8 times as many."""
    dropout: float = 0.5

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        """The model on images of at least 32x32."""
        height, width, channels = image_shape("vgg11", input_shape, smallest=32)
        blocks: dict[str, Part] = {}
        for stage, (factor, count) in enumerate(((1, 1), (2, 1), (4, 2), (8, 2), (8, 2)), start=1):
            filters, inside = factor * self.width, {"images": network_parts.images()}
            for i in range(count):
                inside |= {
                    f"conv{i}": network_parts.conv(channels, filters, padding=1),
                    f"norm{i}": network_parts.norm(self.norm, filters, self.groups),
                    f"relu{i}": network_parts.relu(),
                }
                channels = filters
            blocks[f"stage{stage}"] = series(**inside, pool=network_parts.pool())
        flat = channels * (height // 32) * (width // 32)
        return network("vgg11", {**blocks, "dense": _dense_block(flat, 128, "none", self.dropout)}, 128, num_outputs)


@dataclass(frozen=True)
class _ResNet:
    """Residual networks (He et al. 2016); batch norm is as printed, group norm needs no running statistics."""

    norm: Norm = "group"
    groups: PositiveInt = 8
    """Of group norm."""
    stem: Literal["small", "large"] = "small"
    """The first layer: a 3x3 convolution, for small images; or 7x7 and 3x3 pooling of stride 2, for ImageNet's."""

    def _network(self, name: str, shape: Shape, outputs: int, width: int, counts: tuple[int, ...], wide: bool) -> Model:
        """Stages of ``counts`` blocks; each but the first halves the image and doubles the channels.

        With ``wide``, blocks are bottlenecks that expand to four times their channels.
        """
        _, _, channels = image_shape(name, shape, smallest=8)
        blocks = {"stem": self._stem(channels, width)}
        channels = width
        for stage, count in enumerate(counts):
            filters = width * 2**stage
            inside = {}
            for i in range(count):
                stride = 2 if stage and not i else 1
                inside[f"block{i}"] = self._block(channels, filters, stride, wide)
                channels = filters * (4 if wide else 1)
            blocks[f"stage{stage + 1}"] = series(**inside)
        return network(name, {**blocks, "pool": network_parts.mean_pool()}, channels, outputs)

    def _stem(self, channels: int, width: int) -> Part:
        side, stride = (3, 1) if self.stem == "small" else (7, 2)
        first = self._conv(channels, width, side, stride)
        rest = {"pool": network_parts.pool(side=3, padding=1)} if self.stem == "large" else {}
        return series(images=network_parts.images(), conv=first, relu=network_parts.relu(), **rest)

    def _conv(self, channels: int, filters: int, side: int, stride: int = 1) -> Part:
        """A convolution without bias, and a norm (which has one)."""
        convolution = network_parts.conv(channels, filters, side, stride, side // 2, bias=self.norm == "none")
        return series(conv=convolution, norm=network_parts.norm(self.norm, filters, self.groups))

    def _block(self, channels: int, filters: int, stride: int, wide: bool) -> Part:
        if wide:
            ends = 4 * filters
            convs = [self._conv(channels, filters, 1), self._conv(filters, filters, 3, stride)]
            convs.append(self._conv(filters, ends, 1))
        else:
            ends = filters
            convs = [self._conv(channels, filters, 3, stride), self._conv(filters, filters, 3)]
        inside: dict[str, Part] = {}
        for i, conv in enumerate(convs):
            inside |= {f"conv{i}": conv} | ({f"relu{i}": network_parts.relu()} if i < len(convs) - 1 else {})
        return network_parts.residual(series(**inside), self._shortcut(channels, ends, stride))

    def _shortcut(self, channels: int, ends: int, stride: int) -> Part:
        """x itself where shapes agree, else a 1x1 convolution."""
        if stride == 1 and channels == ends:
            return network_parts.function(lambda x: x)
        return self._conv(channels, ends, 1, stride)


@dataclass(frozen=True)
class ResNet18(_ResNet):
    """ResNet-18 (He et al. 2016): four stages of two basic blocks, 64 to 512 channels."""

    width: PositiveInt = 64
    """Channels of the first stage."""

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        """The model on images [H, W] or [H, W, C]."""
        return self._network("resnet18", input_shape, num_outputs, self.width, (2, 2, 2, 2), wide=False)


@dataclass(frozen=True)
class ResNet20(_ResNet):
    """ResNet-20 for small images (He et al. 2016, section 4.2): three stages of three basic blocks, 16 to 64 channels.

    Where a block changes shape, its shortcut drops every other row and column and fills new channels with zeros.
    """

    width: PositiveInt = 16
    """Channels of the first stage."""

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        """The model on images [H, W] or [H, W, C]."""
        return self._network("resnet20", input_shape, num_outputs, self.width, (3, 3, 3), wide=False)

    def _shortcut(self, channels: int, ends: int, stride: int) -> Part:
        def apply(x: Array) -> Array:
            x = x[:, ::stride, ::stride]
            return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * 3 + [(0, ends - channels, 0)])

        return network_parts.function(apply)


@dataclass(frozen=True)
class ResNet50(_ResNet):
    """ResNet-50 (He et al. 2016): four stages of 3, 4, 6 and 3 bottleneck blocks, 256 to 2048 channels.

    Of a block that halves the image the 3x3 convolution does so, as in Goyal et al. 2017 and PyTorch.
    """

    width: PositiveInt = 64
    """A quarter of the channels of the first stage."""

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        """The model on images [H, W] or [H, W, C]."""
        return self._network("resnet50", input_shape, num_outputs, self.width, (3, 4, 6, 3), wide=True)


def _dense_block(inputs: int, units: int, norm: Norm, dropout: float = 0.0) -> Part:
    layers = {"dense": network_parts.dense(inputs, units), "norm": network_parts.norm(norm, units)}
    return series(**layers, relu=network_parts.relu(), drop=network_parts.drop(dropout))
