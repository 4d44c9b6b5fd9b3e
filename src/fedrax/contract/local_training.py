"""Local training: the steps of a client between receiving the broadcast message and its upload.

All methods share one loop. At each of T steps (or of E epochs) a gradient g is computed, the method turns it into a
direction d, and x_i <- prox_{eta Psi}(x_i - eta d).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax import tree
from fedrax.config.arguments import checked_arguments
from fedrax.config.hyperparameters import Decay, NonNegative, Positive, PositiveInt, hyperparameters
from fedrax.contract.client_data import BlockOrder, ClientData, Order, Reduction, TrainState
from fedrax.contract.hooks import TermHook, same_structure
from fedrax.errors import FedraxError, warn
from fedrax.optim.optax_adapter import OptaxField, with_new_keys
from fedrax.optim.proximal import Prox
from fedrax.optim.schedules import Constant, Schedule
from fedrax.tree import Tree
from fedrax.xla import repeat_steps


class Step:
    """One local step: its number, and gradients on its batch at any parameters.

    ``LocalSGD.run`` makes one in each local step and passes it to the direction of the method.

    Args:
        local: the options of local training.
        data: the client's data in this round.
        index: int32; the number of the local step in this round, from 0.

    Example:
        >>> def decayed(gradient, x, step):
        ...     return jax.tree.map(lambda g: g / (1 + step.index), gradient)
    """

    def __init__(self, local: LocalSGD, data: ClientData, index: Array | int):
        self.index = jnp.asarray(index, jnp.int32)
        """t, from 0: int32."""
        self._key = data.dropout_key(index)
        self._local, self._data, self._evaluated = local, data, False
        self.block: Array | None = None
        """The block this step works on (M fixed blocks only)."""
        if local.blocks is not None:
            self.block = data.block_index(index, local.blocks, local.block_order)
        elif local.batch_size != "full":
            self._samples, self._real = data.batch(index, local.batch_size, local.order)

    def gradient(self, params: Tree) -> tuple[Array, Tree]:
        """Compute loss and gradient of this step's mini-batch.

        Args:
            params: pytree of parameters.

        Returns:
            The loss and the raw gradient.
        """
        return self.gradient_and_statistics(params)[:2]

    def gradient_and_statistics(self, params: Tree) -> tuple[Array, Tree, Tree]:
        """Compute loss and gradient, and the model's running statistics after this mini-batch.

        Args:
            params: pytree of parameters.

        Returns:
            The loss, the raw gradient and the running statistics.
        """
        local, data = self._local, self._data
        if self._evaluated:
            data.refuse_uncounted("a second gradient in a step")
        self._evaluated = True
        if local.blocks is not None and self.block is not None:
            rows = local.microbatch_size(data)
            found = data.block_gradient(params, self.block, local.blocks, self._key, local.reduction, rows)
        elif local.batch_size == "full":
            found = local.full_gradient(data, params)
        else:
            rows = local.microbatch_size(data)
            return data.loss_and_gradient(params, self._samples, self._real, self._key, local.reduction, rows)
        if data.carried.statistics:
            raise FedraxError(
                "a model with running statistics, such as batch norm's, takes steps on batches: set local.batch_size"
            )
        return *found, ()

    def key(self, name: str) -> Array:
        """A random key for one purpose, different in every step, round and client.

        Args:
            name: the purpose; any text.

        Returns:
            A JAX random key.
        """
        return jax.random.fold_in(self._data.key(name), self.index)

    @property
    def batch(self) -> Tree:
        """The step's samples; None where it works on a block or on all of the client's data."""
        self._data.refuse_uncounted("a step's samples")
        return getattr(self, "_samples", None)


Direction = Callable[[Tree, Tree, Step], Tree]
"""(gradient, x_i, step) -> direction d, the form of the hooks of ``ClientData.with_direction``."""

DirectionWithMemory = Callable[[Tree, Tree, Step, Any], tuple[Tree, Any]]
"""(gradient, x_i, step, memory) -> (direction d, memory), with a pytree that is passed from step to step."""


@checked_arguments
def proximal_term(strength: Any, center: Tree) -> TermHook:
    """Create the term strength/2 |x_i - center|^2 of the local objective, for `ClientData.with_term`.

    Args:
        strength: the factor.
        center: pytree like the parameters.

    Returns:
        The hook (gradient, x_i) -> gradient + strength (x_i - center), in the gradient's dtypes.

    Example:
        >>> term = fedrax.contract.proximal_term(0.5, center=jnp.zeros(2))
        >>> term(jnp.ones(2), jnp.full(2, 4.0)).tolist()
        [3.0, 3.0]
    """
    return lambda gradient, x: jax.tree.map(
        lambda g, a, b: (g + strength * (a - b)).astype(g.dtype), gradient, x, center
    )


def _warn_of_restarts(state: Tree) -> None:
    """Warn of optimizers that need state over many steps, if their state is reset in each round."""
    import optax

    kinds = (optax.MultiStepsState, optax.ScaleByScheduleState)
    for part in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds)):
        if isinstance(part, optax.MultiStepsState):
            warn(
                "optax.MultiSteps restarts in each round, and gradients that it has accumulated at the end of a"
                " round are lost: accumulate them by local.microbatches instead, or set local.carry to true"
            )
        elif isinstance(part, optax.ScaleByScheduleState):
            warn(
                "the schedule of the local optimizer restarts in each round: use local.schedule, which counts"
                " rounds, or set local.carry to true"
            )


class LocalResult(NamedTuple):
    """The result of local training.

    Example:
        >>> fedrax.contract.LocalResult._fields
        ('params', 'steps', 'memory', 'mean_gradient', 'info')
    """

    params: Tree
    """x_i after the last step."""
    steps: Array
    """T_i, the steps taken (float)."""
    memory: Any
    """The memory of the direction after the last step; None without one."""
    mean_gradient: Tree
    """The mean of the raw gradients of all steps; None unless requested."""
    info: dict[str, Array]
    """loss: mean over the steps, each before its update; gradients: evaluations of one sample's gradient; with
    ``local.clip`` also clipped: the share of the steps that it shortened."""


def _check_client_data(data: Any) -> None:
    """FedraxError if the arguments of ``local.run`` are in the wrong order."""
    if not isinstance(data, ClientData):
        raise FedraxError(f"local.run is given a {type(data).__name__} as data: write local.run(data, params)")


def _direction_of(
    direction: Direction | DirectionWithMemory | None, gradient: Tree, x: Tree, step: Step, memory: Any
) -> tuple[Tree, Any]:
    """The direction of the method and the memory after it, both checked."""
    if direction is None:
        return gradient, memory
    if memory is None:
        d, after = cast(Direction, direction)(gradient, x, step), None
    else:
        pair: Any = cast(DirectionWithMemory, direction)(gradient, x, step, memory)
        if not isinstance(pair, tuple) or hasattr(pair, "_fields") or len(pair) != 2:
            raise FedraxError(f"a direction with a memory returns a {type(pair).__name__}, not the pair d, memory")
        d, after = pair
    if not same_structure(d, x):
        raise FedraxError("a direction must have the tree structure and shapes of the parameters")
    if not same_structure(after, memory):
        raise FedraxError(
            "a direction must return a memory with the tree structure and shapes of the one that"
            " local.run(..., memory=...) started with"
        )
    return d, after


def _repeat(body: Callable, times: Array | int, carry: tuple, unroll: bool) -> tuple:
    """Run ``body(index, carry)`` for each index below ``times``: in a loop, unrolled if asked for and possible."""
    if not (unroll and isinstance(times, int)):
        return repeat_steps(times, body, carry)
    for index in range(times):
        carry = body(index, carry)
    return carry


@hyperparameters
class LocalSGD:
    """Local stochastic gradient descent and its options. Set ``steps`` or ``epochs``, not both.

    Example:
        >>> local = fedrax.LocalSGD(lr=0.1, steps=5, batch_size=32)
        >>> float(local.step_size(round=0))
        0.1
    """

    lr: Positive = 0.1
    """Learning rate eta."""
    steps: PositiveInt | None = None
    """T, local steps a round."""
    epochs: PositiveInt | None = None
    """E, passes over the client's data a round (1 where neither steps nor epochs are given)."""
    batch_size: PositiveInt | Literal["full"] = 10
    """B, samples a step, or "full" for all of the client's data in every step."""
    microbatches: PositiveInt = 1
    """k: a step's gradient is accumulated over k microbatches of ceil(B / k) samples, in the memory of one of them. The
    step is the same up to rounding, except that each microbatch has its own dropout masks and batch statistics."""
    blocks: PositiveInt | None = None
    """M: cut the client's data once into M blocks and draw one in each step, instead of batches."""
    block_order: BlockOrder = "replacement"
    """How the blocks are drawn: independently (LoSAC's Algorithm 2), or each once in random order before any again."""
    order: Order = "shuffle"
    """Order of the samples in batches: reshuffled in every epoch, as stored and in every round from the first sample
    on, or drawn with replacement."""
    reduction: Reduction = "mean"
    """Whether the client's loss f_i is the mean or the sum over its samples; batches and blocks estimate it."""
    momentum: Decay | None = None
    """Heavy-ball momentum on the gradient; the buffer is zero at the start of each round. It does not see what a method
    adds to correct drift. As ``optimizer``, ``Optax.of(optax.sgd, momentum=0.9)``, it does; ``nesterov=True`` is
    Nesterov's."""
    weight_decay: NonNegative | None = None
    """Added to the gradient times the parameters."""
    clip: Positive | None = None
    """gamma: the longest step. A direction d is scaled by min(1, gamma / (eta |d|)) (CELGC's rule)."""
    prox: Prox | None = None
    """Regularizer Psi, applied as prox_{eta Psi} after every step."""
    schedule: Schedule = Constant()
    """Factor on ``lr`` and ``clip`` by round; any schedule of optax is one."""
    optimizer: OptaxField | None = None
    """An optimizer of optax in place of the plain step x_i - eta d: it is given the direction d. ``lr`` is its
    learning rate where it is made here and has none (``Optax.of(optax.adamw)``); a finished one has its own."""
    carry: bool = False
    """Whether the optimizer's state is stored at each client between rounds, instead of being reset."""

    _instead = {"steps": "epochs", "epochs": "steps"}  # noqa: RUF012 - never mutated
    """If a file sets one of them, the default of the other is dropped."""

    def check(self) -> None:
        """Raise FedraxError for options that exclude each other."""
        if self.steps is not None and self.epochs is not None:
            raise FedraxError("give local steps or local epochs, not both ('none' in a file removes an inherited one)")
        if self.blocks is not None and self.steps is None:
            raise FedraxError(
                f"with fixed blocks (local.blocks = {self.blocks}; a default of LoSAC and FedSaga) every step draws one"
                " block at random: give local steps, not epochs"
            )
        if self.blocks is None and self.block_order != "replacement":
            raise FedraxError("local.block_order is the order of fixed blocks: set local.blocks, or unset it")
        if self.blocks is None and isinstance(self.batch_size, int) and self.microbatches > self.batch_size:
            raise FedraxError(
                f"local.microbatches = {self.microbatches} is more than the samples of a batch, local.batch_size ="
                f" {self.batch_size}"
            )
        if self.optimizer is not None and (self.momentum is not None or self.clip is not None):
            raise FedraxError(
                "local.momentum and local.clip have no effect on a local optimizer: configure the optimizer instead"
            )
        if self.carry and self.optimizer is None:
            raise FedraxError("local.carry needs a local optimizer: set local.optimizer")
        if self.prox is not None and not self.lr_is_step_size:
            raise FedraxError(
                "local.prox needs the learning rate local.lr, which a finished local optimizer does not use: create the"
                " optimizer by Optax.of(...) without a learning rate"
            )

    def check_sizes(self, sizes: np.ndarray) -> None:
        """Refuse more blocks than any client has samples; warn of an ignored batch size and of samples never used.

        Args:
            sizes: int [N], the clients' numbers of samples.
        """
        largest = int(sizes.max())
        if self.blocks is not None and (self.blocks > largest or self.blocks * largest > np.iinfo(np.int32).max):
            raise FedraxError(f"local.blocks = {self.blocks} is too many: the largest client has {largest} samples")
        if self.blocks is not None and self.batch_size != LocalSGD.batch_size:
            warn(
                f"local.batch_size = {self.batch_size} is ignored: a step uses one of local.blocks = {self.blocks}, up"
                f" to {-(-largest // self.blocks):,} samples"
            )
        if self.order == "stored" and self.blocks is None and self.batch_size != "full" and self.steps is not None:
            seen = self.steps * self.batch_size
            if seen < largest:
                warn(
                    f"in stored order every round starts at a client's first sample: local.steps = {self.steps} use"
                    f" {seen} samples, and the others of the {largest} samples of the largest client are never used"
                )

    def step_size(self, round: Array) -> Array | float:
        """The local learning rate eta in a round.

        Args:
            round: the number of the round, from 0.

        Returns:
            The learning rate times the schedule's factor.
        """
        return self.lr * self.schedule(round)

    def num_steps(self, data: ClientData) -> Array | int:
        """The number of local steps T_i.

        Args:
            data: the client's data in this round.

        Returns:
            A Python int where all clients take the same number of steps, otherwise int32.
        """
        if data.assignment.steps is not None:
            return data.assignment.steps
        if data.work is not None and (self.steps or self.epochs or 1) == 1:
            what = "epochs" if self.steps is None else "steps"
            warn(f"stragglers are ignored: they do at least one of the {what}, and local.{what} = 1")
        if self.steps is not None:
            return self.steps if data.work is None else jnp.ceil(data.work * self.steps).astype(jnp.int32)
        epochs: Array | int = self.epochs or 1
        if data.work is not None:
            epochs = jnp.ceil(data.work * epochs).astype(jnp.int32)
        per_epoch = 1 if self.batch_size == "full" else data.batches(self.batch_size)
        return epochs * per_epoch

    def most_steps(self, data: ClientData) -> int | None:
        """The largest number of local steps of any client in a round.

        Args:
            data: the client's data in this round.

        Returns:
            The number; None where a script sets the steps.
        """
        if data.assignment.steps is not None:
            return None
        per_epoch = 1 if self.batch_size == "full" else -(-data.layout.largest // self.batch_size)
        return self.steps if self.steps is not None else (self.epochs or 1) * per_epoch

    def microbatch_size(self, data: ClientData) -> int | None:
        """The samples of a microbatch.

        Args:
            data: the client's data in this round.

        Returns:
            The number of samples; None without ``microbatches``.
        """
        if self.microbatches == 1:
            return None
        rows = data.layout.largest if self.batch_size == "full" else min(self.batch_size, data.layout.largest)
        if self.blocks is not None:
            rows = -(-data.layout.largest // self.blocks)
        return -(-rows // self.microbatches)

    def samples(self, data: ClientData, steps: Array | int) -> Array:
        """Count the samples whose gradients ``steps`` local steps evaluate (in expectation for batches of random size).

        Args:
            data: the client's data in this round.
            steps: int32; the number of local steps.

        Returns:
            The count, as a float.
        """
        given = data.given_rows
        if given is not None:
            used = jnp.arange(len(given)) < steps
            return jnp.sum(jnp.where(used[:, None], given >= 0, False)).astype(float)
        if data.mean_batch is not None:
            return jnp.asarray(steps, float) * data.mean_batch
        if self.blocks is not None:
            return jnp.asarray(steps, float) * data.size / self.blocks
        if self.batch_size == "full":
            return jnp.asarray(steps, float) * data.size  # int32 may overflow
        batch = min(self.batch_size, data.layout.largest)
        if self.order == "replacement":
            return jnp.asarray(steps, float) * batch
        epochs, rest = steps // data.batches(batch), steps % data.batches(batch)
        return jnp.asarray(epochs, float) * data.size + jnp.minimum(rest * batch, data.size)

    @property
    def lr_is_step_size(self) -> bool:
        """Whether ``lr`` has an effect: a finished local optimizer has a learning rate of its own."""
        return self.optimizer is None or self.optimizer.wants_lr

    def takes_one_gradient(self, name: str, *refused: str, hints: Mapping[str, str] | None = None) -> None:
        """Check the options of a method whose clients evaluate one gradient per round.

        Local steps or epochs other than one may be meant for other methods in a comparison, so they only cause a
        warning.

        Args:
            name: the name of the method, for messages.
            *refused: names of the options that must not be set.
            hints: what to do instead, by the name of the option; by default, to leave the option out.

        Raises:
            FedraxError: if one of the options ``refused`` is set.
        """
        for option in refused:
            if getattr(self, option) is not None:
                hint = (hints or {}).get(option, f"unset local.{option}")
                raise FedraxError(f"{name} takes one step a round, the server's: {hint}")
        for option in ("steps", "epochs"):
            if getattr(self, option) not in (None, 1):
                idle = f"local.{option} = {getattr(self, option)}"
                warn(f"{name} takes one step a round, and {idle} is ignored")

    @property
    def steps_are_gradients(self) -> bool:
        """Whether (x - x_i) / (T eta) is the mean direction: no momentum, decay, clipping or prox between."""
        between = (self.momentum, self.weight_decay, self.clip, self.prox, self.optimizer)
        return all(option is None for option in between)

    def init_carried(self, params: Tree) -> Tree:
        """Create the optimizer state that a client carries between rounds.

        Args:
            params: pytree of parameters.

        Returns:
            The optimizer's state with ``carry``; otherwise ().
        """
        return self.optimizer.init(params) if self.optimizer is not None and self.carry else ()

    def decayed(self, gradient: Tree, params: Tree) -> Tree:
        """Add weight decay to a gradient.

        Args:
            gradient: the gradient.
            params: pytree of parameters.

        Returns:
            gradient + weight_decay * params.
        """
        return gradient if self.weight_decay is None else tree.add_scaled(gradient, self.weight_decay, params)

    def move(self, x: Tree, direction: Tree, lr: Array | float, round: Array) -> tuple[Tree, dict[str, Array]]:
        """Compute prox_{eta Psi}(x - eta d), with the step clipped to ``clip``.

        Args:
            x: the local parameters.
            direction: d.
            lr: eta, the learning rate of this round.
            round: the number of the round, from 0.

        Returns:
            The new parameters, and the info ``clipped`` (1 where the step was clipped) if ``clip`` is set.
        """
        step, info = lr, {}
        if self.clip is not None:
            limit = self.clip * self.schedule(round)
            length = lr * tree.norm(direction)
            step = lr * jnp.where(length > limit, limit / jnp.where(length > 0, length, 1), 1)
            info = {"clipped": (length > limit).astype(float)}
        x = tree.add_scaled(x, -step, direction)
        return (x if self.prox is None else self.prox(x, lr)), info

    def run(
        self,
        data: ClientData,
        params: Tree,
        direction: Direction | DirectionWithMemory | None = None,
        memory: Any = None,
        mean_gradient: bool = False,
    ) -> LocalResult:
        """Run the local steps of one round from ``params``.

        Args:
            data: the client's data in this round.
            params: the parameters to start from.
            direction: (gradient, x, step) -> direction d of a local step; None: d is the gradient. The gradient has
                passed weight decay, the terms of `ClientData.with_term` and momentum.
            memory: a pytree that is passed from step to step, from its value here on. With it ``direction`` is
                (gradient, x, step, memory) -> (d, memory).
            mean_gradient: whether to return the mean of the raw gradients.

        Returns:
            The local parameters after the last step, and metrics.
        """
        _check_client_data(data)
        data = data._start_training()
        data.check_counted(self)
        lr, steps, carried = self.step_size(data.round), self.num_steps(data), data.carried

        def body(index: Array | int, carry: tuple) -> tuple:
            x, memory, velocity, total, sums, statistics, rule = carry
            step = Step(self, data.with_carried(TrainState(statistics)), index)
            step_loss, gradient, statistics = step.gradient_and_statistics(x)
            total = tree.add(total, gradient) if mean_gradient else None
            gradient = data.add_terms(self.decayed(gradient, x), x)
            if self.momentum is not None:
                gradient = velocity = tree.add_scaled(gradient, self.momentum, velocity)
            d, memory = _direction_of(direction, gradient, x, step, memory)
            d, metrics = data.change_direction(d, x, step), {}
            if self.optimizer is None:
                x, metrics = self.move(x, d, lr, data.round)
            else:
                x, rule = self._optimized(x, rule, d, lr, data.round, step_loss if data.exposes_losses else None)
            return x, memory, velocity, total, tree.add(sums, {"loss": step_loss, **metrics}), statistics, rule

        zeros = tree.zeros_like(params)
        carry = (
            params,
            memory,
            zeros if self.momentum is not None else None,
            zeros if mean_gradient else None,
            self._zero_metrics(params),
            carried.statistics,
            self._init_optimizer(params, data),
        )
        x, memory, _, total, sums, carried.statistics, rule = _repeat(body, steps, carry, data.unroll)
        carried.params, carried.optimizer = x, rule if self.carry else carried.optimizer
        x = data.change_result(x)
        count = jnp.asarray(steps, float)
        shared = 1 / jnp.maximum(count, 1)  # without any step the loss is 0
        return LocalResult(
            params=x,
            steps=count,
            memory=memory,
            mean_gradient=tree.scale(shared, total) if mean_gradient else None,
            info={name: summed * shared for name, summed in sums.items()} | {"gradients": self.samples(data, steps)},
        )

    def full_gradient(self, data: ClientData, params: Tree) -> tuple[Array, Tree]:
        """Loss and raw gradient over all of the client's samples.

        Args:
            data: the client's data in this round.
            params: pytree of parameters.

        Returns:
            The loss and the gradient.
        """
        return data.full_gradient(params, self.reduction, self.microbatch_size(data))

    def one_gradient(self, data: ClientData, params: Tree) -> tuple[Array, Tree]:
        """Loss and raw gradient of the first mini-batch, which also updates the running statistics.

        Args:
            data: the client's data in this round.
            params: pytree of parameters.

        Returns:
            The loss and the gradient.
        """
        loss, gradient, data.carried.statistics = Step(self, data, 0).gradient_and_statistics(params)
        return loss, gradient

    def _zero_metrics(self, params: Tree) -> dict[str, Array]:
        """The sums of the steps' metrics before the first step."""
        loss = {"loss": jnp.zeros((), jax.tree.leaves(params)[0].dtype)}
        return loss if self.clip is None else loss | {"clipped": jnp.zeros((), float)}

    def _init_optimizer(self, params: Tree, data: ClientData) -> Tree:
        if self.optimizer is None:
            return ()
        if self.carry:
            return with_new_keys(data.carried.optimizer, data.key("optimizer"))
        state = self.optimizer.init(params)
        _warn_of_restarts(state)
        return with_new_keys(state, data.key("optimizer"))

    def _optimized(
        self, x: Tree, state: Tree, d: Tree, lr: Array | float, round: Array, loss: Array | None
    ) -> tuple[Tree, Tree]:
        """One step of the optimizer; the schedule scales the learning rate, or the updates of a finished optimizer."""
        assert self.optimizer is not None
        factor = 1.0 if self.optimizer.wants_lr else self.schedule(round)
        x, state = self.optimizer.move(x, state, d, lr, factor, loss)
        return x if self.prox is None else self.prox(x, lr), state
