"""Networks with normalization layers: TinyNN and LeNet-5 of GradMA, VGG-11 and residual networks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array, lax

from fedrax.config.hyperparameters import PositiveInt
from fedrax.contract.model import Model
from fedrax.models import composable_layers as layers
from fedrax.models.architecture import Architecture, Shape
from fedrax.models.composable_layers import Layer, Norm, build_network, image_shape, sequential


@dataclass(frozen=True)
class TinyNN(Architecture):
    """GradMA's network for MNIST (Luo et al. 2023, section 6.1): dense layers of 200 and 100 units.

    Both have ReLU; the first layer reads the flattened input.

    Example:
        >>> model = fedrax.models.TinyNN().build(input_shape=(28, 28, 1), num_outputs=10)
        >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
        178110
    """

    norm: Literal["none", "batch"] = "none"
    """"batch" adds batch norm before each ReLU, as in the authors' code."""

    def _build(self, input_shape: Shape, num_outputs: int) -> Model:
        sizes = (math.prod(input_shape), 200, 100)
        blocks = {f"layer{i}": _dense_block(sizes[i - 1], sizes[i], self.norm) for i in (1, 2)}
        return build_network("tinynn", blocks, sizes[-1], num_outputs)


@dataclass(frozen=True)
class LeNet5(Architecture):
    """GradMA's LeNet-5 for CIFAR-10 (Luo et al. 2023), with batch norm and dropout as in the authors' experiments.

    Two 5x5 convolutions of 32 and 64 channels, each with 2x2 max pooling, then dense layers of 512 and 128 units.
    Inputs are images [H, W] or [H, W, C] of at least 16x16 pixels.

    Example:
        >>> model = fedrax.models.LeNet5().build(input_shape=(32, 32, 3), num_outputs=10)
        >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)).params))
        941834
    """

    norm: Literal["none", "batch"] = "batch"
    """"batch" adds batch norm before each ReLU."""
    dropout: float = 0.5
    """Dropout rate after each hidden dense layer, used in training only."""

    def _build(self, input_shape: Shape, num_outputs: int) -> Model:
        height, width, channels = image_shape("lenet5", input_shape, smallest=16)
        flat = 64 * math.prod(((side - 4) // 2 - 4) // 2 for side in (height, width))

        def stage(channels: int, filters: int) -> Layer:
            conv = {"conv": layers.conv(channels, filters, 5), "norm": layers.norm(self.norm, filters)}
            return sequential(images=layers.add_channel_axis(), **conv, relu=layers.relu(), pool=layers.max_pool())

        blocks = {
            "conv1": stage(channels, 32),
            "conv2": stage(32, 64),
            "dense1": _dense_block(flat, 512, self.norm, self.dropout),
            "dense2": _dense_block(512, 128, self.norm, self.dropout),
        }
        return build_network("lenet5", blocks, 128, num_outputs)


@dataclass(frozen=True)
class VGG11(Architecture):
    """VGG-11 (Simonyan and Zisserman 2015) with normalization after each convolution.

    It has one hidden dense layer of 128 units, as in GradMA's experiments on CIFAR-100. Inputs are images [H, W] or
    [H, W, C] of at least 32x32 pixels.

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

    def _build(self, input_shape: Shape, num_outputs: int) -> Model:
        height, width, channels = image_shape("vgg11", input_shape, smallest=32)
        blocks: dict[str, Layer] = {}
        for stage, (factor, count) in enumerate(((1, 1), (2, 1), (4, 2), (8, 2), (8, 2)), start=1):
            filters, members = factor * self.width, {"images": layers.add_channel_axis()}
            for i in range(count):
                members |= {
                    f"conv{i}": layers.conv(channels, filters, padding=1),
                    f"norm{i}": layers.norm(self.norm, filters, self.groups),
                    f"relu{i}": layers.relu(),
                }
                channels = filters
            blocks[f"stage{stage}"] = sequential(**members, pool=layers.max_pool())
        flat = channels * (height // 32) * (width // 32)
        blocks["dense"] = _dense_block(flat, 128, "none", self.dropout)
        return build_network("vgg11", blocks, 128, num_outputs)


@dataclass(frozen=True)
class _ResNet(Architecture):
    """Common options of residual networks (He et al. 2016)."""

    norm: Norm = "group"
    """Normalization after each convolution: "batch" as in the paper, "group" without running statistics, or none."""
    groups: PositiveInt = 8
    """Number of groups of group norm."""
    stem: Literal["small", "large"] = "small"
    """First layer: "small" is a 3x3 convolution; "large", for ImageNet's sizes, is a 7x7 convolution of stride 2 and
    3x3 max pooling of stride 2."""

    def _network(self, name: str, shape: Shape, outputs: int, width: int, counts: tuple[int, ...], wide: bool) -> Model:
        """A network of stages of ``counts`` blocks; all but the first stage halve the image and double the channels.

        With ``wide``, blocks are bottlenecks that expand to four times their channels.
        """
        _, _, channels = image_shape(name, shape, smallest=8)
        blocks = {"stem": self._stem(channels, width)}
        channels = width
        for stage, count in enumerate(counts):
            filters = width * 2**stage
            members = {}
            for i in range(count):
                stride = 2 if stage and not i else 1
                members[f"block{i}"] = self._block(channels, filters, stride, wide)
                channels = filters * (4 if wide else 1)
            blocks[f"stage{stage + 1}"] = sequential(**members)
        return build_network(name, {**blocks, "pool": layers.global_mean_pool()}, channels, outputs)

    def _stem(self, channels: int, width: int) -> Layer:
        """The first layers, as ``stem`` selects."""
        side, stride = (3, 1) if self.stem == "small" else (7, 2)
        first = self._conv(channels, width, side, stride)
        rest = {"pool": layers.max_pool(side=3, padding=1)} if self.stem == "large" else {}
        return sequential(images=layers.add_channel_axis(), conv=first, relu=layers.relu(), **rest)

    def _conv(self, channels: int, filters: int, side: int, stride: int = 1) -> Layer:
        """A convolution followed by normalization; it has a bias only without normalization."""
        convolution = layers.conv(channels, filters, side, stride, side // 2, bias=self.norm == "none")
        return sequential(conv=convolution, norm=layers.norm(self.norm, filters, self.groups))

    def _block(self, channels: int, filters: int, stride: int, wide: bool) -> Layer:
        """A basic block of two convolutions or, with ``wide``, a bottleneck of three."""
        if wide:
            outputs = 4 * filters
            convs = [self._conv(channels, filters, 1), self._conv(filters, filters, 3, stride)]
            convs.append(self._conv(filters, outputs, 1))
        else:
            outputs = filters
            convs = [self._conv(channels, filters, 3, stride), self._conv(filters, filters, 3)]
        members: dict[str, Layer] = {}
        for i, conv in enumerate(convs):
            members |= {f"conv{i}": conv} | ({f"relu{i}": layers.relu()} if i < len(convs) - 1 else {})
        return layers.residual(sequential(**members), self._shortcut(channels, outputs, stride))

    def _shortcut(self, channels: int, outputs: int, stride: int) -> Layer:
        """The identity if shapes agree, else a 1x1 convolution."""
        if stride == 1 and channels == outputs:
            return layers.stateless(lambda x: x)
        return self._conv(channels, outputs, 1, stride)


@dataclass(frozen=True)
class ResNet18(_ResNet):
    """ResNet-18 (He et al. 2016): four stages of two basic blocks, 64 to 512 channels.

    Inputs are images [H, W] or [H, W, C] of at least 8x8 pixels.

    Example:
        >>> model = fedrax.models.ResNet18().build(input_shape=(32, 32, 3), num_outputs=10)
        >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
        11173962
    """

    width: PositiveInt = 64
    """Channels of the first stage."""

    def _build(self, input_shape: Shape, num_outputs: int) -> Model:
        return self._network("resnet18", input_shape, num_outputs, self.width, (2, 2, 2, 2), wide=False)


@dataclass(frozen=True)
class ResNet20(_ResNet):
    """ResNet-20 for small images (He et al. 2016, section 4.2): three stages of three basic blocks, 16 to 64 channels.

    The shortcut of a block that changes shape subsamples rows and columns by 2 and pads new channels with zeros.
    Inputs are images [H, W] or [H, W, C] of at least 8x8 pixels.

    Example:
        >>> model = fedrax.models.ResNet20().build(input_shape=(32, 32, 3), num_outputs=10)
        >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
        269722
    """

    width: PositiveInt = 16
    """Channels of the first stage."""

    def _build(self, input_shape: Shape, num_outputs: int) -> Model:
        return self._network("resnet20", input_shape, num_outputs, self.width, (3, 3, 3), wide=False)

    def _shortcut(self, channels: int, outputs: int, stride: int) -> Layer:
        """Subsampling and zero padding of channels, without parameters."""

        def apply(x: Array) -> Array:
            x = x[:, ::stride, ::stride]
            return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * 3 + [(0, outputs - channels, 0)])

        return layers.stateless(apply)


@dataclass(frozen=True)
class ResNet50(_ResNet):
    """ResNet-50 (He et al. 2016): four stages of 3, 4, 6 and 3 bottleneck blocks, 256 to 2048 channels.

    The stride of a block that halves the image is in its 3x3 convolution, as in Goyal et al. 2017 and PyTorch.
    Inputs are images [H, W] or [H, W, C] of at least 8x8 pixels.

    Example:
        >>> model = fedrax.models.ResNet50().build(input_shape=(32, 32, 3), num_outputs=10)
        >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
        23520842
    """

    width: PositiveInt = 64
    """Channels of the first stage's 3x3 convolutions; the stage's outputs have four times as many."""

    def _build(self, input_shape: Shape, num_outputs: int) -> Model:
        return self._network("resnet50", input_shape, num_outputs, self.width, (3, 4, 6, 3), wide=True)


def _dense_block(inputs: int, units: int, norm: Norm, dropout: float = 0.0) -> Layer:
    """A dense layer with normalization, ReLU and dropout."""
    return sequential(
        dense=layers.dense(inputs, units),
        norm=layers.norm(norm, units),
        relu=layers.relu(),
        drop=layers.dropout(dropout),
    )
