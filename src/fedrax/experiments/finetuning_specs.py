"""Fine-tuning by name: the table ``[finetuning]`` of an experiment.

    [finetuning]
    name = "lora"
    weights = "pretrained.safetensors"
    rank = 4
    trainable = ["output/*"]

Without the table all parameters are trained, from the model's own initial values.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax

from fedrax.config.annotations import Bound
from fedrax.config.hyperparameters import Positive, PositiveInt
from fedrax.data.readers.array_files import given_directory
from fedrax.errors import FedraxError
from fedrax.experiments.serialization import ClassChoice
from fedrax.models import Model, freeze, load_weights, lora

Patterns = tuple[str, ...]
"""Patterns of names of parameters."""


@dataclass(frozen=True)
class _Options:
    """Options of every kind of fine-tuning."""

    weights: Path
    """Pretrained weights: a file or directory that `fedrax.models.load_weights` reads, such as that of a run. A file
    that is not there is searched by its name in the data directory, as on another machine."""

    def pretrained(self, model: Model, skip: Patterns, data_dir: Path | str | None) -> Any:
        """The pretrained parameters of the model, or its `Variables`."""
        directory, path = given_directory(data_dir), self.weights
        if not path.exists() and directory is not None and (directory / path.name).exists():
            path = directory / path.name
        if not path.exists():
            others = f"no {path.name} in {directory}" if directory else "no data directory (--data-dir, $FEDRAX_DATA)"
            raise FedraxError(f"finetuning.weights: there is no {path}, and {others}")
        return load_weights(path, model.init(jax.random.key(0)), skip=skip)


@dataclass(frozen=True)
class Freeze(_Options):
    """Train some parameters and freeze the others."""

    trainable: Patterns
    """Patterns of the names of trainable parameters."""
    skip: Patterns = ()
    """Patterns of names of parameters that are not taken from the file, such as those of a new head."""
    frozen_dtype: Literal["bfloat16", "float16"] | None = None
    """Dtype of the frozen parameters; none: as they are."""

    def tuned(self, model: Model, example: Any, data_dir: Path | str | None) -> Model:
        """The fine-tuned model."""
        params = self.pretrained(model, self.skip, data_dir)
        return freeze(model, params, self.trainable, frozen_dtype=self.frozen_dtype)


@dataclass(frozen=True)
class Lora(_Options):
    """Low-rank adapters of the weight matrices (LoRA)."""

    rank: PositiveInt = 8
    """Rank of the adapters."""
    alpha: Positive | None = None
    """Scale of the adapters; none: the rank."""
    target: Patterns | None = None
    """Patterns of names of adapted matrices; none: all with which activations are multiplied."""
    trainable: Patterns = ()
    """Patterns of other parameters that are trained as they are, such as those of a new head."""
    dropout: Annotated[float, Bound(ge=0, lt=1)] = 0.0
    """Probability with which entries of the adapters' inputs are dropped in training."""
    train_a: bool = True
    """Whether both factors are trained; otherwise B alone, so that averages of adapters are exact (FFA-LoRA)."""
    skip: Patterns = ()
    """Patterns of names of parameters that are not taken from the file, such as those of a new head."""
    frozen_dtype: Literal["bfloat16", "float16"] | None = None
    """Dtype of the frozen parameters; none: as they are."""

    def tuned(self, model: Model, example: Any, data_dir: Path | str | None) -> Model:
        """The fine-tuned model."""
        params = self.pretrained(model, self.skip, data_dir)
        options = {name: getattr(self, name) for name in ("rank", "alpha", "target", "trainable", "dropout", "train_a")}
        return lora(model, params, example, **options, frozen_dtype=self.frozen_dtype)


FINETUNING = ClassChoice("fine-tuning", lambda: {"freeze": Freeze, "lora": Lora})
