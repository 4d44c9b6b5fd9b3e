"""Flower client: a ClientApp that runs an algorithm's local training on data that never leave the client."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedrax import xla
from fedrax.config.arguments import checked_arguments
from fedrax.config.hyperparameters import check
from fedrax.config.user_errors import innermost_user_frame
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.assignment import ClientAssignment
from fedrax.contract.checks import check_method, checked_personal
from fedrax.contract.client_data import Layout
from fedrax.contract.model import with_statistics
from fedrax.contract.task import Batch, Task
from fedrax.contract.task_checks import check_values
from fedrax.data import Dataset, Federation
from fedrax.devices import use_all_cores
from fedrax.errors import FedraxError
from fedrax.flower.client_store import ClientStore
from fedrax.flower.instructions import RoundInstructions
from fedrax.flower.loss_requests import ANSWER, REQUEST
from fedrax.flower.persistence import open_client_state
from fedrax.flower.schema import MessageSchema, message_schemas, needs_initial_parameters, shapes_of_samples
from fedrax.flower.serialization import pack, unpack
from fedrax.inputs import flat_inputs
from fedrax.prng.keys import RUN, purpose_key
from fedrax.simulation.evaluation import sample_values
from fedrax.simulation.persistence.run_identity import of_frozen
from fedrax.simulation.process import numeric_context
from fedrax.simulation.round import ClientInputs, ClientRecord, ClientResult, RoundProgram, run_client
from fedrax.simulation.validate import initial_client_state, model_shapes
from fedrax.tree import Tree
from fedrax.version import VERSION
from fedrax.xla import CodeFingerprint, run_cached

Data = Callable[[Context], Any] | Federation
"""A function that loads the client's samples, given its Context, or a federation that the client is part of."""

_EVALUATION_BATCH = 500
"""Samples evaluated at a time, to bound memory."""


@checked_arguments
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
        seed: draw mini-batches and noise as ``fedrax.simulate`` does with this seed, to compare the two; by default
            the ``node_config["seed"]`` of the SuperNode. Without either, they are drawn from secrets of the client:
            noise that others can reproduce protects nothing.
        directory: where to store the client state between rounds, so that the federation can be resumed
            (``federate(..., resume=True)``); by default the ``node_config["directory"]`` of the SuperNode. Without
            either, the client state stays in the Context and is lost at the end of the run.

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
    app.query()(client.reply_to_query)
    app.train()(client.train)
    app.evaluate()(client.evaluate)
    return app


@dataclass(frozen=True, eq=False)
class _Client:
    """Handlers of a ClientApp's messages."""

    algorithm: Algorithm
    task: Task
    data: Data
    seed: int | None
    directory: Path | None

    def reply_to_query(self, message: Message, context: Context) -> Message:
        """Reply with the client's number and the shapes, dtypes and numbers of its samples."""
        use_all_cores()
        found = _loaded(self.data, context)
        own = _as_federation(found)
        facts: dict[str, Any] = {"size": len(own.train.y), "test_size": len(own.test.y), "version": VERSION}
        facts |= {"frozen": self.frozen_digest, "names": _names_digest(found)}
        for name, part in (flat_inputs(own.train.x) | {"y": own.train.y}).items():
            # float64 and float32 samples are both converted to the run's dtype
            kind = "float32" if part.dtype == np.float64 else str(part.dtype)
            facts |= {f"{name}_type": kind, f"{name}_shape": list(part.shape[1:])}
        if (number := context.node_config.get("partition-id")) is not None:
            facts["client"] = int(number)
        return Message(RecordDict({"client": ConfigRecord(facts)}), reply_to=message)

    @cached_property
    def frozen_digest(self) -> str:
        """The digest of the frozen parameters, computed once in a process: it reads them all."""
        return of_frozen(self.task.frozen)

    def train(self, message: Message, context: Context) -> Message:
        """Run one phase of a round and reply with the upload."""
        use_all_cores()
        instructions = RoundInstructions.of(message.content)
        with (
            numeric_context(instructions.dtype),
            open_client_state(self._state_directory(context), context.state) as state,
        ):
            return Message(
                self._train_phase(instructions, message.content, context, ClientStore(state, message.content)),
                reply_to=message,
            )

    def _train_phase(
        self, instructions: RoundInstructions, content: RecordDict, context: Context, store: ClientStore
    ) -> RecordDict:
        """Run one phase with the client's state; returns the records of the reply."""
        instructions.check_frozen(self.frozen_digest)
        own = load_client_data(self.data, context)
        samples = Batch(*own.train)
        setup = _ClientSetup.of(self.algorithm, self.task, samples, own, instructions)
        if instructions.phase >= len(setup.phases):
            raise FedraxError(
                f"the server asks for phase {instructions.phase + 1}, and the algorithm has {len(setup.phases)}: give"
                " server and clients the same algorithm"
            )
        phase = setup.phases[instructions.phase]
        received = store.received_arrays(instructions, content)
        broadcast = unpack(received, (phase.message, setup.broadcast_statistics), "the broadcast message")
        message, statistics = jax.device_put(broadcast)  # jnp.asarray would be a program for each shape
        like = setup.phases[instructions.phase - 1].kept if instructions.phase else setup.initial
        record = store.load(instructions, like, partial(self._initial_record, setup, store))
        client_inputs = ClientInputs(
            _assignment(instructions, len(samples.y)),
            np.int32(instructions.round),  # type: ignore[arg-type]
            np.asarray(instructions.cohort_size, instructions.dtype),  # type: ignore[arg-type]
            self._key_words(instructions, store, context),  # type: ignore[arg-type]
            np.asarray(instructions.shared, np.uint32),  # type: ignore[arg-type]
        )
        run = _compiled_phase(setup.program, instructions.phase)
        arrays = jax.device_put(samples)
        done: ClientResult = run(self.algorithm, message, record, statistics, arrays, client_inputs)
        last = instructions.phase == len(setup.phases) - 1
        store.save(instructions, done.record, last=last)
        sent = pack((done.output._replace(info={}), done.statistics if last else ()))
        info = pack(done.output.info)
        return RecordDict({"sent": sent, "info": info, "client": ConfigRecord({"lost": store.state_lost})})

    def _initial_record(self, setup: _ClientSetup, store: ClientStore) -> ClientRecord:
        """The initial client state, computed from the server's starting parameters where it depends on them."""
        like = (setup.params, setup.statistics)
        if needs_initial_parameters(self.algorithm, *like):
            start = unpack(store.initial_parameters, like, "the record of the starting parameters")
        else:
            start = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), like)
        params, statistics = jax.device_put(start)
        return run_cached(partial(ClientRecord.at_first, self.algorithm), params, statistics)

    def _key_words(self, instructions: RoundInstructions, store: ClientStore, context: Context) -> np.ndarray:
        """The words of the client's random key of a round: from the seed as in a simulation, else from a secret."""
        seed = context.node_config.get("seed") if self.seed is None else self.seed
        if seed is not None:
            if type(seed) is not int:
                raise FedraxError(f"node_config['seed'] must be a whole number, not {seed!r:.40}")
            round_key = jax.random.fold_in(purpose_key(seed, RUN), instructions.round)
            return np.asarray(jax.random.key_data(jax.random.fold_in(round_key, instructions.client)))
        words = store.key_words(instructions, lambda: np.frombuffer(os.urandom(8), np.uint32).tolist())
        return np.asarray(words, np.uint32)

    def _state_directory(self, context: Context) -> Path | None:
        """The directory of the client state; None where Flower's Context holds it."""
        number, configured = (context.node_config.get(name) for name in ("partition-id", "directory"))
        directory = self.directory or (None if configured is None else Path(str(configured)))
        return directory if directory is None or number is None else directory / f"client-{int(number)}"

    def evaluate(self, message: Message, context: Context) -> Message:
        """Reply with sums of the metrics over the client's test samples, of the global and the personalized model."""
        use_all_cores()
        instructions = RoundInstructions.of(message.content)
        with (
            numeric_context(instructions.dtype),
            open_client_state(self._state_directory(context), context.state) as state,
        ):
            instructions.check_frozen(self.frozen_digest)
            own = load_client_data(self.data, context)
            if REQUEST in message.content:
                answer = ConfigRecord({"mean": self._training_loss(instructions, own, message.content)})
                return Message(RecordDict({ANSWER: answer}), reply_to=message)
            store = ClientStore(state, message.content)
            sums = self._metric_sums(instructions, own, message.content, store) if len(own.test.y) else {}
        rows = ConfigRecord({"test": len(own.test.y)})
        return Message(RecordDict({"sums": ConfigRecord(dict(sums)), "rows": rows}), reply_to=message)

    def _training_loss(self, instructions: RoundInstructions, own: Federation, content: RecordDict) -> float:
        """The mean loss of the global model on the training samples."""
        setup = _ClientSetup.of(self.algorithm, self.task, Batch(*own.train), own, instructions)
        model = unpack(content["model"], (setup.params, setup.statistics), "the model")  # type: ignore[arg-type]
        sums = self._sums(with_statistics(*jax.device_put(model)), Batch(*own.train))
        return float(sums["loss"]) / len(own.train.y)

    def _sums(self, model: Tree, samples: Batch) -> dict[str, np.ndarray]:
        """Sums of the metrics of a model over samples."""
        sums: dict[str, np.ndarray] = {}
        for first in range(0, len(samples.y), _EVALUATION_BATCH):
            part = jax.device_put(jax.tree.map(lambda a, at=first: a[at : at + _EVALUATION_BATCH], samples))
            for name, values in _compiled_metrics(self.task, CodeFingerprint(self.task))(model, part).items():
                sums[name] = sums.get(name, np.zeros(())) + np.asarray(values, float).sum(0)
        return sums

    def _metric_sums(
        self, instructions: RoundInstructions, own: Federation, content: RecordDict, store: ClientStore
    ) -> dict[str, float | list[float]]:
        """Sums of the metrics over the test samples; names of the personalized model's begin with "personal_"."""
        setup = _ClientSetup.of(self.algorithm, self.task, Batch(*own.train), own, instructions)
        like = (setup.params, setup.statistics)
        params, statistics = jax.device_put(unpack(content["model"], like, "the model"))  # type: ignore[arg-type]
        record = store.load(instructions, setup.initial, partial(self._initial_record, setup, store))
        models = {"": with_statistics(params, statistics)}
        personal = checked_personal(self.algorithm, self.algorithm.personal(params, record.state), params)
        if personal is not None:
            own_statistics = self.algorithm.traits.personal_statistics
            models["personal_"] = with_statistics(personal, record.statistics if own_statistics else statistics)
        return {
            f"{kind}{name}": value.tolist()
            for kind, model in models.items()
            for name, value in self._sums(model, Batch(*own.test)).items()
        }


@dataclass(frozen=True, eq=False)
class _ClientSetup:
    """What a client derives from algorithm, task and the shapes of its data before it trains; trees hold shapes.

    A client has a process for each message, so that it checks only its own values: the server has checked that the
    algorithm and the task accept samples of these shapes.
    """

    algorithm: Algorithm
    program: RoundProgram
    samples: Batch
    params: Tree
    statistics: Tree
    """The model's running statistics, such as those of batch norm."""
    initial: ClientRecord
    """The client state before the first round."""

    @classmethod
    def of(
        cls, algorithm: Algorithm, task: Task, samples: Batch, own: Federation, instructions: RoundInstructions
    ) -> _ClientSetup:
        """Check the client's values."""
        check_values(task, samples, own)
        params, statistics = model_shapes(task, instructions.dtype)
        initial, broken = initial_client_state(algorithm, params, statistics)
        if broken:
            raise broken[0]
        layout = Layout.of(np.array([len(samples.y)]))
        program = RoundProgram(task, layout, instructions.num_clients, chunk=0, code=CodeFingerprint(algorithm, task))
        return cls(algorithm, program, shapes_of_samples(samples), params, statistics, initial)

    @property
    def broadcast_statistics(self) -> Tree:
        """The running statistics in a broadcast message; empty where each client has its own."""
        return () if self.algorithm.traits.personal_statistics else self.statistics

    @cached_property
    def phases(self) -> list[MessageSchema]:
        """The schema of each phase; traces a round, which an evaluation does not need."""
        return message_schemas(self.program, self.algorithm, self.params, self.statistics, self.samples)


def load_client_data(data: Data, context: Context) -> Federation:
    """Load and check the data of a client, as a federation of one client."""
    return _as_federation(_loaded(data, context))


def _loaded(data: Data, context: Context) -> Any:
    """The data of a client: what the user's function returns, or the client's part of a federation."""
    return client_of_federation(data, context) if isinstance(data, Federation) else _call_data_function(data, context)


def _names_digest(found: Any) -> str:
    """Digest of the names of a data set's classes and features in their order; empty for data without names."""
    names = (found.class_names, found.feature_names) if isinstance(found, Dataset) else ()
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()[:32] if any(names) else ""


def _as_federation(found: Any) -> Federation:
    """The data of a client as a federation of one client; raises FedraxError for anything else."""
    if isinstance(found, Federation):
        return found
    description: dict[str, Any] = {}
    if isinstance(found, Dataset):
        description = {"num_classes": found.num_classes, "padding": found.padding, "pixels": found.pixels}
        found = (found.train, found.test)
    try:
        first, second = found
        (x, y), test = (first, tuple(second)) if _is_pair(first, second) else (found, None)
        rows, kind = len(y), np.asarray(y).dtype.kind
    except (TypeError, ValueError):
        raise FedraxError(
            "the function data must return a client's samples as (x, y), as ((x, y), (x_test, y_test)) or as a Dataset,"
            f" not a {type(found).__name__}"
        ) from None
    if kind not in "iufb":
        raise FedraxError("labels must be numbers with the same meaning on every client: number the classes")
    return Federation.from_arrays(
        x, y, offsets=np.array([0, rows]), test=test, shuffle=False, name="own", **description
    )


def _is_pair(first: Any, second: Any) -> bool:
    """Whether these are training and test samples (x, y), and not inputs, which may be a tuple, and labels."""
    listed = isinstance(second, list) and len(second) == 2
    return isinstance(first, tuple) and len(first) == 2 and (isinstance(second, tuple) or listed)


class DataFunctionError(FedraxError):
    """An error of the user's function ``data``, which is its cause.

    The message goes to the server and names the type and the place of the cause. The text of the cause may contain
    data: Flower shows it in the log of the client only.
    """


def _call_data_function(data: Callable[[Context], Any], context: Context) -> Any:
    """Call the user's function; raises DataFunctionError where it fails."""
    try:
        return data(context)
    except Exception as error:
        number, frame = context.node_config.get("partition-id"), innermost_user_frame(error)
        whose = "this client" if number is None else f"client {number}"
        place = "" if frame is None else f" in {Path(frame.filename).name}, line {frame.lineno}"
        raise DataFunctionError(
            f"the function data of {whose} failed ({type(error).__name__}{place}): see the client's log"
        ) from error


def client_of_federation(federation: Federation, context: Context) -> Federation:
    """The part of a federation that belongs to the client with this Context's partition-id."""
    number = context.node_config.get("partition-id")
    if type(number) is not int or not 0 <= number < federation.num_clients:
        raise FedraxError(
            f"node_config['partition-id'] is {number!r}: a client of {federation.name!r} needs a number from 0 to"
            f" {federation.num_clients - 1}"
        )
    rows = slice(*federation.offsets[number : number + 2])
    mine = slice(0) if federation.test_offsets is None else slice(*federation.test_offsets[number : number + 2])
    return replace(
        federation,
        train=federation.train.map(lambda a: a[rows]),
        test=federation.test.map(lambda a: a[mine]),
        offsets=np.array([0, rows.stop - rows.start]),
        test_offsets=None,
        client_names=(),
    )


def _assignment(instructions: RoundInstructions, rows: int) -> ClientAssignment:
    """The client's assignment in a cohort of one, whose only samples are its own."""
    zero = np.int32(0)
    return ClientAssignment(np.int32(instructions.client), zero, zero, np.int32(rows), np.ones((), instructions.dtype))


@xla.owned_cache(lambda program, _: program.task)
def _compiled_phase(program: RoundProgram, p: int) -> Callable:
    """The compiled client side of phase ``p``, whose inputs have the words of random keys.

    Keys are made in the program: each operation outside of it would be a program of its own, which a process loads.
    """

    def run(
        algorithm: Algorithm, message: Tree, record: ClientRecord, statistics: Tree, samples: Batch, words: ClientInputs
    ) -> ClientResult:
        key, shared = map(jax.random.wrap_key_data, (words.key, words.shared_key))
        inputs = words._replace(key=key, shared_key=shared)
        return run_client(program, p, algorithm, message, record, statistics, samples, inputs)

    return xla.jit(run)


@xla.owned_cache()
def _compiled_metrics(task: Task, code: CodeFingerprint) -> Callable:
    """Compiled metrics per sample; ``code`` is part of the cache key, so that edited code is compiled again."""
    return xla.jit(partial(sample_values, task))
