"""The base class of the zoo's network architectures."""

from __future__ import annotations

from fedrax.config.hyperparameters import check
from fedrax.contract.model import Model
from fedrax.errors import FedraxError

Shape = tuple[int, ...]


def _check_shape(name: str, input_shape: object) -> None:
    """Raise FedraxError for the shapes of several inputs."""
    if isinstance(input_shape, dict) or any(isinstance(size, tuple) for size in input_shape):  # type: ignore[attr-defined]
        raise FedraxError(
            f"{name} takes samples of one array, and these have several inputs, {input_shape}: give a model of your own"
        )


class Architecture:
    """Base class of network architectures, which build a model for given shapes of inputs and outputs.

    Subclasses are dataclasses whose fields are options; they define ``_build``.

    Example:
        >>> model = fedrax.models.MLP(hidden=(32,)).build(input_shape=(28, 28, 1), num_outputs=10)
        >>> isinstance(fedrax.models.MLP(), fedrax.models.Architecture)
        True
    """

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        """Build the model.

        Args:
            input_shape: Shape of one sample.
            num_outputs: Number of outputs: classes, or targets of a regression.

        Returns:
            The model.

        Raises:
            FedraxError: A field is invalid, or the architecture does not take inputs of this shape.
        """
        check(self)
        _check_shape(type(self).__name__, input_shape)
        return self._build(input_shape, num_outputs)

    def _build(self, input_shape: Shape, num_outputs: int) -> Model:
        raise NotImplementedError


class TextArchitecture(Architecture):
    """Base class of architectures whose inputs are texts, as arrays of token numbers.

    Subclasses define ``_build_for``.

    Example:
        >>> isinstance(fedrax.models.Tweets(), fedrax.models.TextArchitecture)
        True
    """

    def build(self, input_shape: Shape, num_outputs: int, vocabulary: tuple[str, ...] = ()) -> Model:
        """Build the model.

        Args:
            input_shape: Shape of one sample.
            num_outputs: Number of classes.
            vocabulary: The data set's vocabulary; its first word is token 2.

        Returns:
            The model.

        Raises:
            FedraxError: A field is invalid, or the architecture does not take inputs of this shape.
        """
        check(self)
        _check_shape(type(self).__name__, input_shape)
        return self._build_for(input_shape, num_outputs, vocabulary)

    def _build_for(self, input_shape: Shape, num_outputs: int, vocabulary: tuple[str, ...]) -> Model:
        raise NotImplementedError
