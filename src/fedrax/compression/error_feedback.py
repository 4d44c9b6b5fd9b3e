"""Error feedback: what a compressed update leaves out is added to the client's next one."""

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
    """With the rest e_i and the update u, C(e_i + u) goes up and e_i <- e_i + u - C(e_i + u).

    The update is the upload of ``inner``, or the field ``params`` of it, whose other fields travel whole. A round of
    several phases keeps a rest for each. Subclasses define ``compressed`` and ``travels_as``. Stich, Cordonnier and
    Jaggi (2018); its convergence in Karimireddy et al. (2019). A client that takes part rarely sends its rest late.

    Example:
        >>> issubclass(fedrax.compression.TopK, fedrax.compression.ErrorFeedback)
        True
    """

    travels_as: ClassVar[type]
    """What ``compressed`` gives: a pytree class with a method ``dense`` that gives the tree back."""

    @abstractmethod
    def compressed(self, values: Tree) -> Any:
        """C(values) as it travels, an object of ``travels_as``.

        Args:
            values: pytree of arrays in the shapes of the model: the error e_i plus the update u.

        Returns:
            C(values), an instance of ``travels_as``.
        """

    def init_client_own(self, params: Tree) -> Tree:
        """A rest for each phase: nothing is left out yet."""
        return tuple(tree.zeros_like(params) for _ in self.inner.phases)

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """Update and rest go up compressed."""
        output = client(message, state, data)
        rest, *others = own  # of this phase; by the end of the round the first phase's is in front again
        if not jax.tree.leaves((output.upload, output.each, output.total)):
            return output, (*others, rest)
        upload, update = output.upload, self._update(output.upload, rest)
        whole = tree.add(rest, update)
        sent = self.compressed(whole)
        upload = sent if update is upload else upload._replace(params=sent)
        return output._replace(upload=upload), (*others, tree.sub(whole, sent.dense()))

    def _update(self, upload: Tree, like: Tree) -> Tree:
        me, name = type(self).__name__, type(self.inner).__name__
        update = model_in(upload, like)
        if update is None:
            raise FedraxError(
                f"{me} needs an upload, or a field params of it, in the shape of the model: {name} has none"
            )
        if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(update)):
            raise FedraxError(f"{me} compresses floating numbers: put what makes whole numbers of them around {me}")
        return update

    def around_receive(self, receive: Callable, upload: Tree) -> Tree:
        """What ``inner`` receives: C(e_i + u)."""
        # by its class: a user's model may have a layer called dense
        travels = lambda part: isinstance(part, self.travels_as)  # noqa: E731
        return receive(jax.tree.map(lambda part: part.dense() if travels(part) else part, upload, is_leaf=travels))
