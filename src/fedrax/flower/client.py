"""Flower client: a ClientApp that does an algorithm's local training on data that never leave the client."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedrax.config.hyperparameters import check
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.assignment import ClientAssignment
from fedrax.contract.checks import check_method, checked_personal
from fedrax.contract.client_data import Layout
from fedrax.contract.model import with_statistics
from fedrax.contract.task import Batch, Task
from fedrax.contract.task_checks import check_task
from fedrax.data import Dataset, Federation, Samples
from fedrax.devices import use_all_cores
from fedrax.errors import FedraxError
from fedrax.flower.client_store import ClientStore
from fedrax.flower.instructions import RoundInstructions
from fedrax.flower.persistence import open_client_state
from fedrax.flower.registry import log
from fedrax.flower.schema import MessageSchema, message_schemas, needs_initial_parameters, shapes_of_samples
from fedrax.flower.serialization import packed, unpacked
from fedrax.prng.keys import INITIALIZATION, RUN, purpose_key
from fedrax.simulation.evaluation import sample_values
from fedrax.simulation.process import arithmetic
from fedrax.simulation.round import ClientRecord, ClientResult, ClientTask, Program, run_client
from fedrax.simulation.validate import initial_client_state, start_and_statistics
from fedrax.tree import Tree
from fedrax.version import VERSION
from fedrax.xla import CodeFingerprint

Data = Callable[[Context], Any] | Federation
"""Where a client's samples come from: a function of its Context, or a federation of which it takes its part."""

_ROWS = 500
"""Samples that are evaluated at a time."""


def client_app(
    algorithm: Algorithm, task: Task, data: Data, *, seed: int | None = None, directory: Path | str | None = None
) -> ClientApp:
    """Make a Flower ClientApp for a federation that :func:`fedrax.flower.server_app` runs.

    Args:
        algorithm: the algorithm; the server must be given the same.
        task: loss and metrics; the server must be given the same.
        data: a function of the app's Context that returns the client's samples: (x [n, ...], y [n, ...]), a pair of
            these for training and test, or a :class:`fedrax.Dataset`. For tests a :class:`fedrax.Federation`, of which
            each client takes the part of its ``node_config["partition-id"]``, from 0.
        seed: draw mini-batches and noise as ``fedrax.simulate`` does with this seed, to compare the two. By default
            they are drawn from secrets of the client: noise that others can reproduce protects nothing.
        directory: where to store the client state between rounds, so that the federation can be resumed
            (``federate(..., resume=True)``); by default it stays in the Context and is lost at the end of the run.

    Returns:
        The app, for a SuperNode or :class:`fedrax.flower.LocalGrid`.

    Example:
        >>> task = fedrax.classification(fedrax.models.Logistic().build((4,), 3))
        >>> def load(context):
        ...     return np.zeros((8, 4), np.float32), np.arange(8) % 3
        >>> app = fedrax.flower.client_app(fedrax.FedAvg(), task, load)
    """
    check(algorithm)
    check_method(algorithm)
    client = _Client(algorithm, task, data, seed, None if directory is None else Path(directory))
    app = ClientApp()
    app.query()(client.introduce)
    app.train()(client.work)
    app.evaluate()(client.evaluate)
    return app


@dataclass(frozen=True, eq=False)
class _Client:
    algorithm: Algorithm
    task: Task
    data: Data
    seed: int | None
    directory: Path | None

    def introduce(self, message: Message, context: Context) -> Message:
        """Reply to a query with the client's number and the shapes, dtypes and number of its samples."""
        use_all_cores()
        own = own_federation(self.data, context)
        facts: dict[str, Any] = {"size": len(own.train.y), "test_size": len(own.test.y), "version": VERSION}
        for name, part in zip("xy", own.train, strict=True):
            kind = "float32" if part.dtype == np.float64 else str(part.dtype)  # both are computed in the run's type
            facts |= {f"{name}_type": kind, f"{name}_shape": list(part.shape[1:])}
        if (number := context.node_config.get("partition-id")) is not None:
            facts["client"] = int(number)
        return Message(RecordDict({"client": ConfigRecord(facts)}), reply_to=message)

    def work(self, message: Message, context: Context) -> Message:
        """Do one phase of a round and reply with the upload."""
        use_all_cores()
        order = RoundInstructions.of(message.content)
        with arithmetic(order.dtype), open_client_state(self._folder(context), context.state) as state:
            return Message(
                self._work(order, message.content, context, ClientStore(state, message.content)), reply_to=message
            )

    def _work(self, order: RoundInstructions, content: RecordDict, context: Context, memory: ClientStore) -> RecordDict:
        own = own_federation(self.data, context)
        samples = Batch(*own.train)
        begun = _ClientSetup.of(self.algorithm, self.task, samples, own, order)
        if order.phase >= len(begun.phases):
            raise FedraxError(f"the server asks for part {order.phase + 1} of a round of {len(begun.phases)}")
        phase = begun.phases[order.phase]
        received = memory.receive(order, content)
        sent_down = unpacked(received, (phase.message, begun.down), "what the server sent")
        down, statistics = jax.tree.map(jnp.asarray, sent_down)
        like = begun.phases[order.phase - 1].kept if order.phase else begun.initial
        kept = memory.kept(order, like, partial(self._at_first, begun, memory))
        turn = ClientTask(
            _place(order, len(samples.y)),
            jnp.int32(order.round),
            jnp.asarray(order.cohort_size, float),
            self._key(order, memory),
            jax.random.wrap_key_data(jnp.asarray(order.shared, jnp.uint32)),
        )
        run = _compiled(begun.program, order.phase)
        done: ClientResult = run(self.algorithm, down, kept, statistics, jax.tree.map(jnp.asarray, samples), turn)
        memory.keep(order, done.kept, last=order.phase == len(begun.phases) - 1)
        up = done.statistics if order.phase == len(begun.phases) - 1 else ()
        sent, info = packed((done.output._replace(info={}), up)), packed(done.output.info)
        return RecordDict({"sent": sent, "info": info, "client": ConfigRecord({"lost": memory.lost})})

    def _at_first(self, begun: _ClientSetup, memory: ClientStore) -> ClientRecord:
        """The initial client state; where it depends on the starting parameters, the server sends these."""
        like = (begun.params, begun.statistics)
        if needs_initial_parameters(self.algorithm, *like):
            start = unpacked(memory.start, like, "the start")
        else:
            start = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
        params, statistics = jax.tree.map(jnp.asarray, start)
        return ClientRecord.at_first(self.algorithm, params, statistics)

    def _key(self, order: RoundInstructions, memory: ClientStore) -> jax.Array:
        if self.seed is not None:
            return jax.random.fold_in(jax.random.fold_in(purpose_key(self.seed, RUN), order.round), order.client)
        words = memory.key(order, lambda: np.frombuffer(os.urandom(8), np.uint32).tolist())
        return jax.random.wrap_key_data(jnp.asarray(words, jnp.uint32))

    def _folder(self, context: Context) -> Path | None:
        """The directory of the client's stored state; None where Flower's Context holds it."""
        number = context.node_config.get("partition-id")
        if self.directory is None:
            return None
        return self.directory if number is None else self.directory / f"client-{int(number)}"

    def evaluate(self, message: Message, context: Context) -> Message:
        """Reply with sums of the metrics over the client's test samples, for the global and the personal model."""
        use_all_cores()
        order = RoundInstructions.of(message.content)
        with arithmetic(order.dtype), open_client_state(self._folder(context), context.state) as state:
            own, memory = own_federation(self.data, context), ClientStore(state, message.content)
            sums = self._sums(order, own, message.content, memory) if len(own.test.y) else {}
        rows = ConfigRecord({"test": len(own.test.y)})
        return Message(RecordDict({"sums": ConfigRecord(dict(sums)), "rows": rows}), reply_to=message)

    def _sums(
        self, order: RoundInstructions, own: Federation, content: RecordDict, memory: ClientStore
    ) -> dict[str, float]:
        begun = _ClientSetup.of(self.algorithm, self.task, Batch(*own.train), own, order)
        like = (begun.params, begun.statistics)
        params, statistics = jax.tree.map(jnp.asarray, unpacked(content["model"], like, "the model"))  # type: ignore[arg-type]
        kept = memory.kept(order, begun.initial, partial(self._at_first, begun, memory))
        models = {"": with_statistics(params, statistics)}
        personal = checked_personal(self.algorithm, self.algorithm.personal(params, kept.state), params)
        if personal is not None:
            at_home = self.algorithm.traits.personal_statistics
            models["personal_"] = with_statistics(personal, kept.statistics if at_home else statistics)
        sums: dict[str, float] = {}
        for kind, model in models.items():
            for first in range(0, len(own.test.y), _ROWS):
                part = jax.tree.map(lambda a, first=first: jnp.asarray(a[first : first + _ROWS]), Batch(*own.test))
                for name, values in _values(self.task, CodeFingerprint(self.task))(model, part).items():
                    sums[f"{kind}{name}"] = sums.get(f"{kind}{name}", 0.0) + float(np.asarray(values, float).sum())
        return sums


@dataclass(frozen=True, eq=False)
class _ClientSetup:
    """What a client derives from algorithm, task and data before its part of a round."""

    program: Program
    phases: list[MessageSchema]
    params: Tree
    statistics: Tree
    initial: ClientRecord
    """All three in shapes."""
    down: Tree
    """The statistics that come with a message: none where they stay at home."""

    @classmethod
    def of(
        cls, algorithm: Algorithm, task: Task, samples: Batch, own: Federation, order: RoundInstructions
    ) -> _ClientSetup:
        """From the shapes of the task's parameters and of the client's samples, which fit each other."""
        start = start_and_statistics(task, purpose_key(0, INITIALIZATION), None, order.dtype)
        _, params, statistics, _ = start
        check_task(task, with_statistics(params, statistics), samples, own)
        initial, broken = initial_client_state(algorithm, params, statistics)
        if broken:
            raise broken[0]
        layout = Layout.of(np.array([len(samples.y)]))
        program = Program(task, layout, order.num_clients, chunk=0, code=CodeFingerprint(algorithm, task))
        phases = message_schemas(program, algorithm, params, statistics, shapes_of_samples(samples))
        down = () if algorithm.traits.personal_statistics else statistics
        return cls(program, phases, params, statistics, initial, down)


def own_federation(data: Data, context: Context) -> Federation:
    """A client's data as a federation of one client, checked."""
    if isinstance(data, Federation):
        return _part(data, context)
    found: Any = _given(data, context)
    more: dict[str, Any] = {}
    if isinstance(found, Dataset):
        more = {"num_classes": found.num_classes, "padding": found.padding, "pixels": found.pixels}
        found = (found.train, found.test)
    try:
        first, second = found
        (x, y), test = (first, tuple(second)) if isinstance(first, tuple) else (found, None)
        rows, kind = len(y), np.asarray(y).dtype.kind
    except (TypeError, ValueError):
        raise FedraxError(
            "the function data must return a client's samples as (x, y), as ((x, y), (x_test, y_test)) or as a Dataset,"
            f" not a {type(found).__name__}"
        ) from None
    if kind not in "iufb":
        raise FedraxError("labels must be numbers with the same meaning on every client: number the classes")
    return Federation.from_arrays(x, y, offsets=np.array([0, rows]), test=test, shuffle=False, name="own", **more)


def _given(data: Callable[[Context], Any], context: Context) -> Any:
    """Call the function. Its errors stay in the client's log, since their text may contain data."""
    try:
        return data(context)
    except FedraxError:
        raise
    except Exception as error:
        log.exception("the function data has failed")
        raise FedraxError(
            f"the function data of this client has failed ({type(error).__name__}): see the client's own log"
        ) from None


def _part(federation: Federation, context: Context) -> Federation:
    """The part of one client of a federation."""
    number = context.node_config.get("partition-id")
    if type(number) is not int or not 0 <= number < federation.num_clients:
        raise FedraxError(
            f"a client of {federation.name!r} needs a partition-id from 0 to {federation.num_clients - 1} in its node"
            f" config, and has {number!r}"
        )
    rows = slice(*federation.offsets[number : number + 2])
    mine = slice(0) if federation.test_offsets is None else slice(*federation.test_offsets[number : number + 2])
    return replace(
        federation,
        train=Samples(*(a[rows] for a in federation.train)),
        test=Samples(*(a[mine] for a in federation.test)),
        offsets=np.array([0, rows.stop - rows.start]),
        test_offsets=None,
        client_names=(),
    )


def _place(order: RoundInstructions, rows: int) -> ClientAssignment:
    zero = jnp.int32(0)
    return ClientAssignment(jnp.int32(order.client), zero, zero, jnp.int32(rows), jnp.ones(()))


@lru_cache(maxsize=16)
def _compiled(program: Program, p: int) -> Callable:
    return jax.jit(partial(run_client, program, p))


@lru_cache(maxsize=8)
def _values(task: Task, code: CodeFingerprint) -> Callable:
    return jax.jit(partial(sample_values, task))
