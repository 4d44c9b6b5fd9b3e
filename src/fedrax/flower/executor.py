"""Flower executor of :func:`fedrax.simulation.round.run_round`: the clients of a round train on other machines."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MessageType, RecordDict
from jax import Array as JaxArray

from fedrax import tree
from fedrax.contract.algorithm import Algorithm, ClientOutput, Info
from fedrax.contract.checks import checked_received
from fedrax.errors import FedraxError
from fedrax.flower.instructions import RoundInstructions
from fedrax.flower.registry import ClientRegistry, log
from fedrax.flower.schema import MessageSchema
from fedrax.flower.serialization import pack, record_bytes, unpack
from fedrax.simulation.executors.debug import NonFiniteError
from fedrax.simulation.executors.loop import CompiledSteps
from fedrax.simulation.round import (
    SHARED_KEY,
    ClientRecord,
    ClientResult,
    ClientRows,
    ClientSums,
    Executor,
    PhaseResult,
    RoundInputs,
    RoundProgram,
    add_client,
    report,
    zero_sums,
)
from fedrax.tree import Tree


class NonFiniteReply(FedraxError):
    """A well-formed reply with values that are not finite."""


class TooFewReplies(Exception):
    """A round without enough replies to aggregate."""


@dataclass
class DeliveryState:
    """What the server knows between rounds about messages that clients have received and sent."""

    start: Tree = ()
    """The starting parameters and statistics, where clients need them; otherwise an empty tree."""
    start_record: ArrayRecord | None = None
    """``start`` as a record of a message."""
    last_aggregated: dict[int, int] = field(default_factory=dict)
    """The last round of each client whose upload was aggregated."""
    has_start: dict[int, int] = field(default_factory=dict)
    """The node of each client that has received ``start``."""
    bytes_down: int = 0
    """Bytes of arrays sent to clients so far."""
    bytes_up: int = 0
    """Bytes of arrays received from clients so far."""

    def set_start(self, start: Tree) -> None:
        """Store the starting parameters and statistics."""
        self.start = start
        self.start_record = pack(start) if jax.tree.leaves(start) else None

    def add_start(self, client: int, node: int, content: RecordDict) -> None:
        """Add the starting parameters to a message, if the client needs them and has not received them."""
        if self.start_record is not None and self.has_start.get(client) != node:
            content["start"] = self.start_record

    def record_reply(self, client: int, node: int, replied: bool) -> None:
        """A client that replied has the starting parameters; otherwise they are sent again with the next message."""
        if replied:
            self.has_start[client] = node
        else:
            self.has_start.pop(client, None)


class ServerComputation:
    """Compiled functions of the server's side of a round."""

    def __init__(self, program: RoundProgram, phases: list[MessageSchema]):
        self.program, self.phases = program, phases
        self.compiled = CompiledSteps(program)
        self.add = jax.jit(self._add, static_argnums=0)
        self.zeros = jax.jit(self._zeros, static_argnums=0)
        self.is_finite = jax.jit(tree.all_finite)
        self.is_valid = jax.jit(self._is_valid, static_argnums=0)
        self.report = jax.jit(self._report, static_argnums=0)

    def _finished(self, p: int, algorithm: Algorithm, sent: ClientOutput, statistics: Tree) -> ClientResult:
        """The result of a client as in a simulation, from its reply; the client state is not sent."""
        phase = algorithm.phases[p]
        received = checked_received(algorithm, p, phase.receive(sent.upload))
        stacked = (sent.each, received if phase.stacked else ())
        return ClientResult(sent, received, stacked, ClientRecord((), ()), statistics)

    def _is_valid(self, p: int, algorithm: Algorithm, sent: tuple[ClientOutput, Tree]) -> JaxArray:
        """Whether a reply is finite, and the upload still is after the algorithm's ``receive``."""
        return tree.all_finite((sent, self._finished(p, algorithm, *sent).received))

    def _report(self, p: int, algorithm: Algorithm, sent: tuple[ClientOutput, Tree]) -> Info:
        """What a participation policy sees of a client that replied."""
        return report(self._finished(p, algorithm, *sent))

    def _zeros(self, p: int, algorithm: Algorithm, assignments: JaxArray) -> tuple[ClientSums, Tree]:
        """(zero sums, zero arrays for the stacked uploads)."""
        phase = self.phases[p]
        shape = jax.eval_shape(partial(self._finished, p, algorithm), phase.sent, phase.statistics)
        stacked = jax.tree.map(lambda a: jnp.zeros((len(assignments), *a.shape), a.dtype), shape.per_client)
        return zero_sums(self.program, algorithm, p, ClientRecord((), ()), shape), stacked

    def _add(
        self, p: int, algorithm: Algorithm, so_far: Any, sent: Any, k: JaxArray, weight: JaxArray, client: JaxArray
    ) -> tuple[ClientSums, Tree]:
        """Add a client's reply to the sums and to row ``k`` of the stacked uploads."""
        sums, stacked = so_far
        done = self._finished(p, algorithm, *sent)
        sums = add_client(self.program, sums, done, weight, jnp.bool_(True), client)
        return sums, tree.set_row(stacked, k, done.per_client)


class FlowerExecutor(Executor):
    """Executor of one round whose clients are nodes of a Flower federation.

    Args:
        computation: the server's compiled functions.
        algorithm: the algorithm.
        round_inputs: inputs of the round on one device, with an assignment for each client of the cohort.
        key: random key of the run.
        registry: the clients and their nodes.
        delivery: state of message delivery, updated by the round.
        unbiased: whether weights are inverse probabilities, whose sum is not one; those of the clients that replied are
            then scaled by the inverse of the share that did.
    """

    def __init__(
        self,
        computation: ServerComputation,
        algorithm: Algorithm,
        round_inputs: RoundInputs,
        key: JaxArray,
        registry: ClientRegistry,
        delivery: DeliveryState,
        unbiased: bool = False,
    ):
        super().__init__(computation.program, algorithm, round_inputs, key)
        self.computation, self.registry, self.delivery, self.unbiased = computation, registry, delivery, unbiased
        self.cohort = [int(client) for client in round_inputs.assignments.client]
        self.replied = sorted(self.cohort)
        """Clients that have replied in every phase so far, in the order of their rows at the server."""
        self.reports: dict[int, dict[str, float]] = {}
        """What each client that replied reported, for adaptive participation policies."""
        self.sent: dict[tuple, str] = {}
        """Names of the arrays that earlier phases of the round have sent, by content."""
        words = jax.random.key_data(jax.random.fold_in(self.round_key, jnp.uint32(SHARED_KEY)))
        self.shared = [int(word) for word in np.asarray(words)]

    def broadcast(self, p: int, server: Any) -> Tree:
        """The broadcast message of phase ``p``."""
        return self.computation.compiled.broadcast(p, self.algorithm, server)

    def server(self, p: int, server: Any, gathered: PhaseResult) -> tuple[Any, Info]:
        """The server's update after phase ``p``."""
        return self.computation.compiled.server(p, self.algorithm, server, gathered, self.round_inputs, self.round_key)

    def clients(self, p: int, message: Tree, statistics: Tree) -> PhaseResult:
        """Run phase ``p`` on all clients of the cohort; clients without a valid reply are left out of the cohort."""
        replies = self._collect_replies(p, message, () if self.algorithm.traits.personal_statistics else statistics)
        if not replies or (len(replies) < len(self.cohort) and self.algorithm.traits.fixed_cohort):
            raise TooFewReplies
        self.replied = [client for client in self.replied if client in replies]
        clients, weights = self._cohort_weights()
        so_far = self.computation.zeros(p, self.algorithm, clients)
        for k, client in enumerate(self.replied):
            sent, weight = replies[client], weights[k]
            so_far = self.computation.add(p, self.algorithm, so_far, sent, jnp.int32(k), weight, clients[k])
            if self.program.client_info:
                found = self.computation.report(p, self.algorithm, sent)
                self.reports.setdefault(client, {}).update({name: float(value) for name, value in found.items()})
        self.round_inputs = self.round_inputs._replace(
            cohort_size=self.round_inputs.cohort_size.dtype.type(len(self.replied))
        )
        sums, stacked = so_far
        return PhaseResult(sums, ClientRows(stacked, clients, weights))

    def _cohort_weights(self) -> tuple[JaxArray, JaxArray]:
        """(clients that replied, their weights, which sum to one), padded to the cohort with N and weight zero."""
        given = dict(zip(self.cohort, self.round_inputs.assignments.weight, strict=True))
        weights, clients = (
            np.zeros_like(self.round_inputs.assignments.weight),
            np.full(len(self.cohort), self.program.num_clients),
        )
        clients[: len(self.replied)] = self.replied
        weights[: len(self.replied)] = [given[client] for client in self.replied]
        if len(self.replied) < len(self.cohort):
            weights *= len(self.cohort) / len(self.replied) if self.unbiased else 1 / weights.sum()
        return jnp.asarray(clients, jnp.int32), jnp.asarray(weights)

    def _collect_replies(self, p: int, message: Tree, statistics: Tree) -> dict[int, tuple[ClientOutput, Tree]]:
        """Send phase ``p`` to the cohort and return the valid replies by client."""
        new, again = self._omit_sent_arrays(p, pack((message, statistics)))
        contents = {client: self._message_content(p, client, new, again) for client in self.replied}
        name = f"round {int(self.round_inputs.round) + 1}"
        replies = self.registry.send_and_receive(MessageType.TRAIN, contents, name)
        found, diverged = {}, 0
        for client in self.replied:
            self.delivery.bytes_down += sum(map(record_bytes, contents[client].array_records.values()))
            self.delivery.record_reply(client, self.registry.node_of[client], client in replies)
            if client not in replies:
                continue
            facts = replies[client].get("client")
            if p == 0 and isinstance(facts, ConfigRecord) and facts.get("lost"):
                log.warning("%s: client %d has lost its state and continues with the initial one", name, client)
            try:
                found[client] = self._parse_reply(p, replies[client])
            except FedraxError as error:
                log.warning("%s: client %d is left out: %s", name, client, error)
                diverged += isinstance(error, NonFiniteReply)
                continue
            self.delivery.bytes_up += record_bytes(replies[client]["sent"])  # type: ignore[arg-type]
        if diverged and not found:
            raise NonFiniteError(
                f"{type(self.algorithm).__name__}, {name}: no client's reply is finite: lower the learning rate, and"
                " check the clients' data"
            )
        return found

    def _parse_reply(self, p: int, reply: RecordDict) -> tuple[ClientOutput, Tree]:
        """The upload and statistics in a reply; raises FedraxError where they are malformed or not finite."""
        phase = self.computation.phases[p]
        record, about = reply.get("sent"), reply.get("info")
        if not isinstance(record, ArrayRecord) or not isinstance(about, ArrayRecord):
            raise FedraxError("its reply has no arrays")
        output, statistics = unpack(record, (phase.sent._replace(info={}), phase.statistics), "its reply")
        output = output._replace(info=unpack(about, phase.sent.info, "its reply"))
        sent = jax.tree.map(jnp.asarray, (output, statistics))
        if not bool(self.computation.is_valid(p, self.algorithm, sent)):
            raise NonFiniteReply("its reply has values that are not finite")
        return sent

    def _omit_sent_arrays(self, p: int, whole: ArrayRecord) -> tuple[ArrayRecord, dict[str, str]]:
        """(arrays that no earlier phase has sent, earlier names of the others)."""
        earlier = dict(self.sent)
        again = {name: earlier[_array_key(array)] for name, array in whole.items() if _array_key(array) in earlier}
        self.sent = {_array_key(array): f"{p} {name}" for name, array in whole.items()} | earlier
        return ArrayRecord({name: array for name, array in whole.items() if name not in again}), again

    def _message_content(self, p: int, client: int, new: ArrayRecord, again: dict[str, str]) -> RecordDict:
        """The content of the message to one client."""
        expected = self.program.expected_cohort_size
        instructions = RoundInstructions(
            round=int(self.round_inputs.round),
            phase=p,
            client=client,
            num_clients=self.program.num_clients,
            cohort_size=float(self.round_inputs.cohort_size if expected is None else expected),
            last_aggregated=self.delivery.last_aggregated.get(client, -1),
            shared=self.shared,
            dtype=str(self.round_inputs.assignments.weight.dtype),
            frozen=self.registry.frozen,
        )
        content = RecordDict({"down": new, **instructions.record()})
        if again:
            content["again"] = ConfigRecord(dict(again))
        if p < len(self.computation.phases) - 1:
            content["more"] = ConfigRecord()
        if p == 0:
            self.delivery.add_start(client, self.registry.node_of[client], content)
        return content


def _array_key(array: Array) -> tuple:
    """Key of equal arrays."""
    return array.dtype, array.shape, array.data
