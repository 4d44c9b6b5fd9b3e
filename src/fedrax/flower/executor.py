"""A round over a network: one more executor of :func:`fedrax.simulation.round.run_round`, its clients far away."""

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
from fedrax.flower.serialization import packed, record_bytes, unpacked
from fedrax.simulation.executors.debug import NonFiniteError
from fedrax.simulation.executors.loop import Compiled
from fedrax.simulation.round import (
    SHARED_KEY,
    ClientRecord,
    ClientResult,
    ClientSums,
    Executor,
    PhaseResult,
    Program,
    Rounds,
    add_client,
    no_sums,
)
from fedrax.tree import Tree


class NonFiniteReply(FedraxError):
    """An answer that is one, but for a number that is infinite or none."""


class TooFewReplies(Exception):
    """A round of which the server cannot make use: too few of its clients have answered."""


@dataclass
class DeliveryState:
    """What is known of the clients from round to round."""

    start: Tree = ()
    """The starting parameters and statistics, where clients need them; else nothing."""
    start_record: ArrayRecord | None = None
    """The same as a part of a message."""
    counted: dict[int, int] = field(default_factory=dict)
    """The last round of each client that the server made use of."""
    introduced: dict[int, int] = field(default_factory=dict)
    """The nodes that have the start, by client."""
    down: int = 0
    """Bytes of arrays sent to clients so far."""
    up: int = 0
    """Bytes of arrays that came from them."""

    def begin(self, start: Tree) -> None:
        """With these starting parameters and statistics."""
        self.start = start
        self.start_record = packed(start) if jax.tree.leaves(start) else None

    def introduce(self, client: int, node: int, content: RecordDict) -> None:
        """Put the start into a message to a client that needs it and does not have it yet."""
        if self.start_record is not None and self.introduced.get(client) != node:
            content["start"] = self.start_record

    def heard(self, client: int, node: int, answered: bool) -> None:
        """Who has answered a message has kept the start; of others nobody knows."""
        if answered:
            self.introduced[client] = node
        else:
            self.introduced.pop(client, None)


class ServerComputation:
    """The server's part of a round, compiled."""

    def __init__(self, program: Program, phases: list[MessageSchema]):
        self.program, self.phases = program, phases
        self.of_round = Compiled(program)
        self.absorb = jax.jit(self._absorb, static_argnums=0)
        self.nothing = jax.jit(self._nothing, static_argnums=0)
        self.sound = jax.jit(tree.all_finite)
        self.usable = jax.jit(self._usable, static_argnums=0)

    def _finished(self, p: int, algorithm: Algorithm, sent: ClientOutput, statistics: Tree) -> ClientResult:
        phase = algorithm.phases[p]
        received = checked_received(algorithm, phase.receive(sent.upload))
        single = (sent.each, received if phase.stacked else ())
        return ClientResult(sent, received, single, ClientRecord((), ()), statistics)

    def _usable(self, p: int, algorithm: Algorithm, sent: tuple[ClientOutput, Tree]) -> JaxArray:
        """Whether all that a client has sent is finite, and so is what is made of its upload."""
        return tree.all_finite((sent, self._finished(p, algorithm, *sent).received))

    def _nothing(self, p: int, algorithm: Algorithm, places: JaxArray) -> tuple[ClientSums, Tree]:
        """(sums over nobody yet, room for what goes to the server singly)."""
        phase = self.phases[p]
        shape = jax.eval_shape(partial(self._finished, p, algorithm), phase.sent, phase.statistics)
        single = jax.tree.map(lambda a: jnp.zeros((len(places), *a.shape), a.dtype), shape.single)
        return no_sums(self.program, algorithm, p, ClientRecord((), ()), shape), single

    def _absorb(
        self, p: int, algorithm: Algorithm, so_far: Any, sent: Any, k: JaxArray, weight: JaxArray, client: JaxArray
    ) -> tuple[ClientSums, Tree]:
        """With the client in place k."""
        sums, single = so_far
        done = self._finished(p, algorithm, *sent)
        sums = add_client(self.program, sums, done, weight, jnp.bool_(True), client)
        return sums, tree.set_row(single, k, done.single)


class FlowerExecutor(Executor):
    """One round whose clients are nodes of a Flower federation."""

    def __init__(
        self,
        arithmetic: ServerComputation,
        algorithm: Algorithm,
        here: Rounds,
        key: JaxArray,
        nodes: ClientRegistry,
        traffic: DeliveryState,
    ):
        """here: the round of one device, with a place for each client that is asked."""
        super().__init__(arithmetic.program, algorithm, here, key)
        self.arithmetic, self.nodes, self.traffic = arithmetic, nodes, traffic
        self.asked = [int(client) for client in here.places.client]
        self.answered = self.asked
        """Those who have answered in every phase so far."""
        self.received: dict[tuple, str] = {}
        """Arrays that all clients of the round have by now, by their content."""
        words = jax.random.key_data(jax.random.fold_in(self.round_key, jnp.uint32(SHARED_KEY)))
        self.shared = [int(word) for word in np.asarray(words)]

    def broadcast(self, p: int, server: Any) -> Tree:
        """As every executor, compiled."""
        return self.arithmetic.of_round.broadcast(p, self.algorithm, server)

    def server(self, p: int, server: Any, gathered: PhaseResult) -> tuple[Any, Info]:
        """As every executor, compiled."""
        return self.arithmetic.of_round.server(p, self.algorithm, server, gathered, self.here, self.round_key)

    def clients(self, p: int, message: Tree, statistics: Tree) -> PhaseResult:
        """Run phase ``p`` on all clients of the cohort; clients without a valid reply are left out of the cohort."""
        answers = self._answers(p, message, () if self.algorithm.traits.personal_statistics else statistics)
        if not answers or (len(answers) < len(self.asked) and self.algorithm.traits.fixed_cohort):
            raise TooFewReplies
        self.answered = [client for client in self.answered if client in answers]
        clients, weights = self._shares()
        so_far = self.arithmetic.nothing(p, self.algorithm, clients)
        for k, client in enumerate(self.answered):
            sent, weight = answers[client], weights[k]
            so_far = self.arithmetic.absorb(p, self.algorithm, so_far, sent, jnp.int32(k), weight, clients[k])
        self.here = self.here._replace(cohort_size=self.here.cohort_size.dtype.type(len(self.answered)))
        sums, single = so_far
        return PhaseResult(sums, single, clients, weights)

    def _shares(self) -> tuple[JaxArray, JaxArray]:
        """Clients that have answered and their weights, which sum to one; with no client and zero in places beyond."""
        given = dict(zip(self.asked, self.here.places.weight, strict=True))
        weights, clients = np.zeros_like(self.here.places.weight), np.full(len(self.asked), self.program.num_clients)
        clients[: len(self.answered)] = self.answered
        weights[: len(self.answered)] = [given[client] for client in self.answered]
        if len(self.answered) < len(self.asked):
            weights /= weights.sum()
        return jnp.asarray(clients, jnp.int32), jnp.asarray(weights)

    def _answers(self, p: int, message: Tree, statistics: Tree) -> dict[int, tuple[ClientOutput, Tree]]:
        """What came, by client."""
        new, again = self._new(p, packed((message, statistics)))
        contents = {client: self._content(p, client, new, again) for client in self.answered}
        name = f"round {int(self.here.round) + 1}"
        replies = self.nodes.ask(MessageType.TRAIN, contents, name)
        found, diverged = {}, 0
        for client in self.answered:
            self.traffic.down += sum(map(record_bytes, contents[client].array_records.values()))
            self.traffic.heard(client, self.nodes.node_of[client], client in replies)
            if client not in replies:
                continue
            facts = replies[client].get("client")
            if p == 0 and isinstance(facts, ConfigRecord) and facts.get("lost"):
                log.warning("%s: client %d has lost its state and continues with the initial one", name, client)
            try:
                found[client] = self._understood(p, replies[client])
            except FedraxError as error:
                log.warning("%s: client %d is left out: %s", name, client, error)
                diverged += isinstance(error, NonFiniteReply)
                continue
            self.traffic.up += record_bytes(replies[client]["sent"])  # type: ignore[arg-type]
        if diverged and not found:
            raise NonFiniteError(
                f"{type(self.algorithm).__name__}, {name}: no client's answer is finite: take smaller steps, and look"
                " at the clients' data"
            )
        return found

    def _understood(self, p: int, reply: RecordDict) -> tuple[ClientOutput, Tree]:
        """What a client has sent; FedraxError where it is something else than a round needs."""
        phase = self.arithmetic.phases[p]
        record, about = reply.get("sent"), reply.get("info")
        if not isinstance(record, ArrayRecord) or not isinstance(about, ArrayRecord):
            raise FedraxError("its answer holds no arrays")
        output, statistics = unpacked(record, (phase.sent._replace(info={}), phase.statistics), "its answer")
        output = output._replace(info=unpacked(about, phase.sent.info, "its answer"))
        sent = jax.tree.map(jnp.asarray, (output, statistics))
        if not bool(self.arithmetic.usable(p, self.algorithm, sent)):
            raise NonFiniteReply("its answer holds a number that is not finite")
        return sent

    def _new(self, p: int, whole: ArrayRecord) -> tuple[ArrayRecord, dict[str, str]]:
        """(the arrays that no earlier phase has brought, the earlier names of the others)."""
        earlier = dict(self.received)
        again = {name: earlier[_key_of(array)] for name, array in whole.items() if _key_of(array) in earlier}
        self.received = {_key_of(array): f"{p} {name}" for name, array in whole.items()} | earlier
        return ArrayRecord({name: array for name, array in whole.items() if name not in again}), again

    def _content(self, p: int, client: int, new: ArrayRecord, again: dict[str, str]) -> RecordDict:
        """What goes to one client."""
        asked = self.program.expected
        order = RoundInstructions(
            round=int(self.here.round),
            phase=p,
            client=client,
            num_clients=self.program.num_clients,
            cohort_size=float(self.here.cohort_size if asked is None else asked),
            counted=self.traffic.counted.get(client, -1),
            shared=self.shared,
            dtype=str(self.here.places.weight.dtype),
        )
        content = RecordDict({"down": new, **order.record()})
        if again:
            content["again"] = ConfigRecord(dict(again))
        if p < len(self.arithmetic.phases) - 1:
            content["more"] = ConfigRecord()
        if p == 0:
            self.traffic.introduce(client, self.nodes.node_of[client], content)
        return content


def _key_of(array: Array) -> tuple:
    return array.dtype, array.shape, array.data
