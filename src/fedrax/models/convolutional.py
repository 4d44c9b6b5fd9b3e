"""Networks with normalization layers from papers: TinyNN and LeNet-5 of GradMA, VGG-11 and residual networks."""

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

    Example:
        >>> model = fedrax.models.TinyNN().build(input_shape=(28, 28, 1), num_outputs=10)
        >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
        178110
    """

    norm: Literal["none", "batch"] = "none"
    """"batch" adds batch norm before each ReLU, as in the authors' code."""

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        """Build the model.

        Args:
            input_shape: Shape of one sample; it is flattened.
            num_outputs: Number of outputs: classes, or targets of a regression.

        Returns:
            The model.
        """
        sizes = (math.prod(input_shape), 200, 100)
        blocks = {f"layer{i}": _dense_block(sizes[i - 1], sizes[i], self.norm) for i in (1, 2)}
        return network("tinynn", blocks, sizes[-1], num_outputs)


@dataclass(frozen=True)
class LeNet5:
    """GradMA's LeNet-5 for CIFAR-10 (Luo et al. 2023), with batch norm and dropout as in the authors' experiments.

    Two 5x5 convolutions of 32 and 64 channels, each with 2x2 max pooling, then dense layers of 512 and 128 units.

    Example:
        >>> model = fedrax.models.LeNet5().build(input_shape=(32, 32, 3), num_outputs=10)
        >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)).params))
        941834
    """

    norm: Literal["none", "batch"] = "batch"
    """"batch" adds batch norm before each ReLU."""
    dropout: float = 0.5
    """Dropout rate after each hidden dense layer, used in training only."""

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        """Build the model.

        Args:
            input_shape: Shape of one image, (height, width) or (height, width, channels), at least 16x16.
            num_outputs: Number of outputs: classes, or targets of a regression.

        Returns:
            The model.
        """
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
    """VGG-11 (Simonyan and Zisserman 2015) with normalization after each convolution.

    It has one hidden dense layer of 128 units, as in GradMA's experiments on CIFAR-100.

    Example:
        >>> model = fedrax.models.VGG11(width=8).build(input_shape=(32, 32, 3), num_outputs=100)
        >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
        166468
    """

    norm: Norm = "group"
    """Normalization after each convolution: group norm, batch norm with running statistics, or none."""
    groups: PositiveInt = 8
    """Number of groups of group norm."""
    width: PositiveInt = 64
    """Channels of the first convolution; later stages have 2, 4 and 8 times as many."""
    dropout: float = 0.5
    """Dropout rate after the hidden dense layer, used in training only."""

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        """Build the model.

        Args:
            input_shape: Shape of one image, (height, width) or (height, width, channels), at least 32x32.
            num_outputs: Number of outputs: classes, or targets of a regression.

        Returns:
            The model.
        """
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
    """Residual networks (He et al. 2016)."""

    norm: Norm = "group"
    """Normalization after each convolution: "batch" as in the paper, "group" without running statistics, or none."""
    groups: PositiveInt = 8
    """Number of groups of group norm."""
    stem: Literal["small", "large"] = "small"
    """First layer: "small" is a 3x3 convolution; "large", for ImageNet's sizes, is a 7x7 convolution of stride 2 and
    3x3 max pooling of stride 2."""

    def _network(self, name: str, shape: Shape, outputs: int, width: int, counts: tuple[int, ...], wide: bool) -> Model:
        """Stages of ``counts`` blocks; each stage after the first halves the image and doubles the channels.

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
        """A convolution followed by normalization; it has a bias only without normalization."""
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
        """The identity where shapes agree, else a 1x1 convolution."""
        if stride == 1 and channels == ends:
            return network_parts.function(lambda x: x)
        return self._conv(channels, ends, 1, stride)


@dataclass(frozen=True)
class ResNet18(_ResNet):
    """ResNet-18 (He et al. 2016): four stages of two basic blocks, 64 to 512 channels.

    Example:
        >>> model = fedrax.models.ResNet18().build(input_shape=(32, 32, 3), num_outputs=10)
        >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
        11173962
    """

    width: PositiveInt = 64
    """Channels of the first stage."""

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        """Build the model.

        Args:
            input_shape: Shape of one image, (height, width) or (height, width, channels), at least 8x8.
            num_outputs: Number of outputs: classes, or targets of a regression.

        Returns:
            The model.
        """
        return self._network("resnet18", input_shape, num_outputs, self.width, (2, 2, 2, 2), wide=False)


@dataclass(frozen=True)
class ResNet20(_ResNet):
    """ResNet-20 for small images (He et al. 2016, section 4.2): three stages of three basic blocks, 16 to 64 channels.

    The shortcut of a block that changes shape subsamples rows and columns by 2 and pads new channels with zeros.

    Example:
        >>> model = fedrax.models.ResNet20().build(input_shape=(32, 32, 3), num_outputs=10)
        >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
        269722
    """

    width: PositiveInt = 16
    """Channels of the first stage."""

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        """Build the model.

        Args:
            input_shape: Shape of one image, (height, width) or (height, width, channels), at least 8x8.
            num_outputs: Number of outputs: classes, or targets of a regression.

        Returns:
            The model.
        """
        return self._network("resnet20", input_shape, num_outputs, self.width, (3, 3, 3), wide=False)

    def _shortcut(self, channels: int, ends: int, stride: int) -> Part:
        def apply(x: Array) -> Array:
            x = x[:, ::stride, ::stride]
            return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * 3 + [(0, ends - channels, 0)])

        return network_parts.function(apply)


@dataclass(frozen=True)
class ResNet50(_ResNet):
    """ResNet-50 (He et al. 2016): four stages of 3, 4, 6 and 3 bottleneck blocks, 256 to 2048 channels.

    The stride of a block that halves the image is in its 3x3 convolution, as in Goyal et al. 2017 and PyTorch.

    Example:
        >>> model = fedrax.models.ResNet50().build(input_shape=(32, 32, 3), num_outputs=10)
        >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
        23520842
    """

    width: PositiveInt = 64
    """Channels of the first stage's 3x3 convolutions; the stage's outputs have four times as many."""

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        """Build the model.

        Args:
            input_shape: Shape of one image, (height, width) or (height, width, channels), at least 8x8.
            num_outputs: Number of outputs: classes, or targets of a regression.

        Returns:
            The model.
        """
        return self._network("resnet50", input_shape, num_outputs, self.width, (3, 4, 6, 3), wide=True)


def _dense_block(inputs: int, units: int, norm: Norm, dropout: float = 0.0) -> Part:
    layers = {"dense": network_parts.dense(inputs, units), "norm": network_parts.norm(norm, units)}
    return series(**layers, relu=network_parts.relu(), drop=network_parts.drop(dropout))
