"""The networks of `benchmarks.networks` and what they see: NumPy only, for every simulator's own environment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CLIENTS = 5
"""Of a round, all of them."""
LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Case:
    """A network's inputs and labels, and a client's work in a round."""

    what: str
    sample: tuple[int, ...]
    """Channels last, or one axis of tokens."""
    classes: int
    labels: tuple[int, ...] = ()
    """Axes of labels that each sample has, none for one label."""
    batch: int = 32
    steps: int = 2
    tokens: int = 0
    """Different ones; 0 for numbers."""

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
    "densenet": Case("convolutions of 12 channels over all before, group norm", IMAGE, 10),
    "batch_norm_resnet": Case("residual network with batch norm", IMAGE, 10),
    "convnext": Case("depthwise 7x7 convolutions, layer norm", IMAGE, 10),
    "efficientnet": Case("inverted bottlenecks, squeeze and excitation", IMAGE, 10),
    "shufflenet": Case("convolutions in groups, shuffled channels", IMAGE, 10),
    "inception": Case("branches of 1x1, 3x3, 5x5 and pooling", IMAGE, 10),
    "dilated": Case("dilated convolutions, and one in groups", IMAGE, 10),
    "unet": Case("U-Net, a class for each pixel", (64, 64, 3), 3, (64, 64), batch=8),
    "autoencoder": Case("4x4 convolutions of stride 2 down and up", IMAGE, 4, (32, 32)),
    "volumes": Case("convolutions of volumes", (24, 24, 24, 1), 5, batch=8),
    "waveform": Case("one axis, kernels of 80 with stride 4", (8000, 1), 10, batch=16),
    "temporal": Case("one axis, causal dilated convolutions", (256, 8), 10),
    "characters": Case("two LSTM layers of 256, next character", (80,), 90, (80,), batch=16, tokens=90),
    "both_ways": Case("LSTM of 64 in both directions", (50,), 2, steps=4, tokens=2000),
    "language_model": Case("causal transformer of two layers", (64,), 1000, (64,), batch=16, tokens=1000),
    "mixer": Case("dense layers over patches and channels in turn", IMAGE, 10),
    "emnist_dropout": Case("two convolutions without padding, dropout", (28, 28, 1), 62, batch=20, steps=4),
    "cifar_dropout": Case("four convolutions, dropout after each pooling", IMAGE, 10),
    "encoder": Case("transformer of two layers, dropout, also of attention", (96,), 4, tokens=2000),
    "resnet56": Case("27 residual blocks, group norm", IMAGE, 10),
    "mobilenet": Case("MobileNetV2 for small images, group norm", IMAGE, 10, batch=16),
    "deep_transformer": Case("vision transformer of 12 layers", IMAGE, 10, batch=16),
    "next_word": Case("LSTM of 670 over 20 words of 10,004", (20,), 10004, (20,), batch=16, tokens=10004),
    "text_cnn": Case("over words convolutions of 3, 4 and 5 without padding, their largest", (60,), 4, tokens=5000),
    "eegnet": Case("filters of time, then of all electrodes at once, batch norm", (22, 256, 1), 4),
    "vgg11": Case("3x3 convolutions of up to 512 channels, down to 2x2 pixels", IMAGE, 10),
    "alexnet": Case("11x11 with stride 4, 5x5, three 3x3 convolutions of 3x3 pixels", (64, 64, 3), 10),
    "resnext": Case("bottlenecks in sixteen groups, group norm", IMAGE, 10),
    "documents": Case("transformer of two layers over 1,024 places", (1024,), 4, batch=4, tokens=2000),
    "long_context": Case("the same, causal, next of 100 tokens", (1024,), 100, (1024,), batch=4, tokens=100),
}
