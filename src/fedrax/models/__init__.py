"""Models of the federated learning literature, and adapters of Flax, Equinox and PyTorch modules."""

from fedrax.contract.model import Model, Variables
from fedrax.models.adapters.equinox import from_equinox
from fedrax.models.adapters.linen import from_linen
from fedrax.models.adapters.nnx import from_nnx
from fedrax.models.architecture import Architecture, TextArchitecture
from fedrax.models.convolutional import VGG11, LeNet5, ResNet18, ResNet20, ResNet50, TinyNN
from fedrax.models.polynomial import Polynomial
from fedrax.models.pytorch import TorchModel, from_torch
from fedrax.models.text_networks import SentencePairs, Tweets
from fedrax.models.trace_regression import TraceRegression
from fedrax.models.zoo import CNN, LSTM, MLP, MODELS, LeNet, Linear, Logistic, TwoNN

__all__ = [
    "CNN",
    "LSTM",
    "MLP",
    "MODELS",
    "VGG11",
    "Architecture",
    "LeNet",
    "LeNet5",
    "Linear",
    "Logistic",
    "Model",
    "Polynomial",
    "ResNet18",
    "ResNet20",
    "ResNet50",
    "SentencePairs",
    "TextArchitecture",
    "TinyNN",
    "TorchModel",
    "TraceRegression",
    "Tweets",
    "TwoNN",
    "Variables",
    "from_equinox",
    "from_linen",
    "from_nnx",
    "from_torch",
]
