"""Error feedback: a client adds the compression error of its update to its next update."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from fedrax import tree
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.algorithm import ClientOutput
from fedrax.contract.client_data import ClientData
from fedrax.contract.wrapper import Wrapper, model_in
from fedrax.errors import FedraxError
from fedrax.tree import Tree


@hyperparameters
class ErrorFeedback(Wrapper):
    """Base of compressors C with error feedback: a client uploads C(e_i + u) and sets e_i <- e_i + u - C(e_i + u).

    e_i is the client's compression error, u its update: the upload of ``inner``, or the field ``params`` of the upload,
    whose other fields are sent uncompressed. Each phase of a round has its own error. Subclasses define ``compress``
    and ``compressed_type``. Stich, Cordonnier and Jaggi (2018); convergence: Karimireddy et al. (2019). The error of a
    client that is rarely sampled is sent late.

    Example:
        >>> issubclass(fedrax.compression.TopK, fedrax.compression.ErrorFeedback)
        True
    """

    compressed_type: ClassVar[type]
    """Type of the compressed update: a pytree class with a method ``dense`` that returns the decompressed tree."""

    @abstractmethod
    def compress(self, values: Tree) -> Any:
        """Compress the sum of error and update.

        Args:
            values: e_i + u, a pytree with the structure and shapes of the model.

        Returns:
            C(values), an instance of ``compressed_type``.
        """

    def init_client_own(self, params: Tree) -> Tree:
        """Return the initial errors: zero, one tree for each phase."""
        return tuple(tree.zeros_like(params) for _ in self.inner.phases)

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """Upload the compressed sum of error and update, and keep the new error."""
        output = client(message, state, data)
        # The errors rotate by one place a phase: after the last phase, the first phase's is in front again.
        error, *others = own
        if not jax.tree.leaves((output.upload, output.each, output.total)):
            return output, (*others, error)
        upload, update = output.upload, self._update(output.upload, error)
        corrected = tree.add(error, update)
        sent = self.compress(corrected)
        upload = sent if update is upload else upload._replace(params=sent)
        return output._replace(upload=upload), (*others, tree.sub(corrected, sent.dense()))

    def _update(self, upload: Tree, like: Tree) -> Tree:
        """The part of an upload that is compressed."""
        me, name = type(self).__name__, type(self.inner).__name__
        update = model_in(upload, like)
        if update is None:
            raise FedraxError(
                f"{me} needs an upload, or a field params of it, in the shape of the model, and the upload of {name}"
                f" has another shape: wrap another method, or apply quantization outside {me}"
            )
        if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(update)):
            raise FedraxError(
                f"{me} compresses floating-point arrays, and {name} uploads integers: apply quantization outside {me}"
            )
        return update

    def around_receive(self, receive: Callable, upload: Tree) -> Tree:
        """Decompress an upload for ``inner``: it receives C(e_i + u)."""

        # By type, not by the attribute: a model may have a layer called dense.
        def is_compressed(part: Any) -> bool:
            return isinstance(part, self.compressed_type)

        def decompressed(part: Any) -> Any:
            return part.dense() if is_compressed(part) else part

        return receive(jax.tree.map(decompressed, upload, is_leaf=is_compressed))
