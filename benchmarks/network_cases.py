"""The networks of `benchmarks.networks` and their inputs; NumPy only, for the environments of all simulators."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CLIENTS = 5
"""Clients of a round, and of the federation."""
LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Case:
    """A network's inputs and labels, and a client's work in a round."""

    what: str
    """Layers, for the table."""
    sample: tuple[int, ...]
    """Channels last, or one axis of tokens."""
    classes: int
    labels: tuple[int, ...] = ()
    """Shape of a sample's labels; empty for one label."""
    batch: int = 32
    steps: int = 2
    tokens: int = 0
    """Size of the vocabulary; 0 for real-valued inputs."""

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Random samples and labels of one client, [batch * steps, ...]."""
        rng, rows = np.random.default_rng(0), self.batch * self.steps
        x = rng.integers(0, self.tokens, (rows, *self.sample)) if self.tokens else rng.normal(size=(rows, *self.sample))
        y = rng.integers(0, self.classes, (rows, *self.labels))
        return x.astype(np.int32 if self.tokens else np.float32), y.astype(np.int32)


IMAGE = (32, 32, 3)
CASES = {
    "mnist_cnn": Case("two convolutions, average pooling", (28, 28, 1), 10, steps=4),
    "wide_kernels": Case("5x5 convolutions of 64 channels, dense layers", IMAGE, 10),
    "vgg": Case("six 3x3 convolutions, max pooling", IMAGE, 10),
    "densenet": Case("dense blocks of 12 channels a layer, group norm", IMAGE, 10),
    "batch_norm_resnet": Case("residual network with batch norm", IMAGE, 10),
    "convnext": Case("depthwise 7x7 convolutions, layer norm", IMAGE, 10),
    "efficientnet": Case("inverted bottlenecks, squeeze-and-excitation", IMAGE, 10),
    "shufflenet": Case("grouped convolutions, channel shuffle", IMAGE, 10),
    "inception": Case("parallel branches of 1x1, 3x3, 5x5 and pooling", IMAGE, 10),
    "dilated": Case("dilated convolutions, one grouped", IMAGE, 10),
    "unet": Case("U-Net, a class for each pixel", (64, 64, 3), 3, (64, 64), batch=8),
    "autoencoder": Case("4x4 convolutions and transposed convolutions of stride 2", IMAGE, 4, (32, 32)),
    "volumes": Case("3D convolutions", (24, 24, 24, 1), 5, batch=8),
    "waveform": Case("1D convolutions, kernels of 80 with stride 4", (8000, 1), 10, batch=16),
    "temporal": Case("1D causal dilated convolutions", (256, 8), 10),
    "characters": Case("two LSTM layers of 256, next-character prediction", (80,), 90, (80,), batch=16, tokens=90),
    "both_ways": Case("bidirectional LSTM of 64", (50,), 2, steps=4, tokens=2000),
    "language_model": Case("causal transformer with two layers", (64,), 1000, (64,), batch=16, tokens=1000),
    "mixer": Case("dense layers over patches and channels alternately", IMAGE, 10),
    "emnist_dropout": Case("two convolutions without padding, dropout", (28, 28, 1), 62, batch=20, steps=4),
    "cifar_dropout": Case("four convolutions, dropout after each pooling", IMAGE, 10),
    "encoder": Case("transformer with two layers, dropout, attention dropout", (96,), 4, tokens=2000),
    "resnet56": Case("27 residual blocks, group norm", IMAGE, 10),
    "mobilenet": Case("MobileNetV2 for small images, group norm", IMAGE, 10, batch=16),
    "deep_transformer": Case("vision transformer with 12 layers", IMAGE, 10, batch=16),
    "next_word": Case("LSTM of 670, 20 words, vocabulary of 10,004", (20,), 10004, (20,), batch=16, tokens=10004),
    "text_cnn": Case("convolutions over 3, 4 and 5 words without padding, global max pooling", (60,), 4, tokens=5000),
    "eegnet": Case("temporal, then spatial convolutions over electrodes, batch norm", (22, 256, 1), 4),
    "vgg11": Case("3x3 convolutions of up to 512 channels, down to 2x2 pixels", IMAGE, 10),
    "alexnet": Case("11x11 convolution with stride 4, 5x5, three 3x3 on 3x3 pixels", (64, 64, 3), 10),
    "resnext": Case("bottlenecks with sixteen groups, group norm", IMAGE, 10),
    "documents": Case("transformer with two layers, 1,024 tokens", (1024,), 4, batch=4, tokens=2000),
    "long_context": Case(
        "causal transformer, 1,024 tokens, vocabulary of 100", (1024,), 100, (1024,), batch=4, tokens=100
    ),
}
