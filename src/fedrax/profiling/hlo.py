"""Reads the text of a compiled program: which part of a round an operation belongs to, and what it costs.

XLA prints every operation as ``%name = type opcode(operands), attributes``; see its "Operation semantics".
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from fedrax.compiled.scopes import GATHER, read_scope

_SHAPE = re.compile(r"\b(pred|token|[a-z]+\d+\w*)\[([\d,<= ]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(?:calls|body|condition|to_apply|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
_CONTAINERS = {"while", "call", "conditional", "async-start", "async-update", "async-done"}
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")


class Cost(NamedTuple):
    """Of one execution of an operation."""

    flops: float = 0.0
    """Of matrix products and convolutions: two for each multiplication with its addition."""
    bytes: float = 0.0
    """Read and written: operands and results, of a slice or a gather its rows only."""

    def plus(self, other: Cost, times: float = 1.0) -> Cost:
        """Both together, ``other`` ``times`` times."""
        return Cost(self.flops + times * other.flops, self.bytes + times * other.bytes)


@dataclass(eq=False)
class Operation:
    """One instruction of the text."""

    name: str
    opcode: str
    shapes: list[tuple[str, tuple[int, ...]]]
    operands: list[str]
    text: str
    """The attributes after the operands; of a parameter its number comes first."""
    computation: str
    root: bool
    calls: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> float:
        """Of the result."""
        return sum(_width(kind) * math.prod(shape) for kind, shape in self.shapes)

    @property
    def scope(self) -> tuple[int | None, str | None]:
        """(phase, part) by its own name in the program."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.text)
        return read_scope(found[1]) if found else (None, None)


def _width(kind: str) -> float:
    if kind in ("pred", "token"):
        return kind == "pred"
    bits = int(re.findall(r"\d+", kind)[0])
    return bits / 8


def _split_type(text: str) -> tuple[str, str]:
    """(type, the rest) of what follows the equals sign."""
    if not text.startswith("("):
        return tuple(text.split(" ", 1))  # type: ignore[return-value]
    end = _closing(text)
    return text[: end + 1], text[end + 2 :]


def _closing(text: str, start: int = 0) -> int:
    """Where the parenthesis that opens at ``start`` closes."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    return len(text) - 1


def _parse(line: str, computation: str) -> Operation | None:
    found = re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*)", line)
    if found is None:
        return None
    kind, rest = _split_type(found[3])
    opened = rest.find("(")
    closed = _closing(rest, opened)
    attributes = rest[closed + 1 :]
    calls = _CALLED.findall(attributes)
    for branches in _BRANCHES.findall(attributes):
        calls += _NAME.findall(branches)
    shapes = [
        (dtype, tuple(int(n) for n in re.findall(r"\d+", dimensions))) for dtype, dimensions in _SHAPE.findall(kind)
    ]
    inside = rest[opened + 1 : closed]
    opcode = rest[:opened]
    text = inside + attributes if opcode == "parameter" else attributes
    return Operation(found[2], opcode, shapes, _NAME.findall(inside), text, computation, bool(found[1]), calls)


class ProgramText:
    """The operations of a compiled program by name."""

    def __init__(self, text: str):
        self.operations: dict[str, Operation] = {}
        self.computations: dict[str, list[Operation]] = defaultdict(list)
        self.module = (re.match(r"HloModule ([\w.\-]+)", text) or [text, ""])[1]
        computation = ""
        for line in text.splitlines():
            header = re.match(r"(?:ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$", line)
            if header:
                computation = header[1]
            elif computation and (operation := _parse(line, computation)) is not None:
                self.operations[operation.name] = operation
                self.computations[computation].append(operation)
        self.caller = {name: op for op in self.operations.values() for name in op.calls}
        self._costs: dict[str, Cost] = {}

    # -- parts -------------------------------------------------------------------------------------------------

    def scope(self, name: str) -> tuple[int | None, str | None]:
        """(phase, part) of an operation: its own or, if that names none, that of the loop it runs in.

        A fusion belongs to what gives its result, but one that gathers rows to the gathering: there it waits.
        """
        operation = self.operations.get(name)
        if operation is None:
            return None, None
        if operation.opcode == "fusion":
            inner = [op for called in operation.calls for op in self.computations[called]]
            for op in inner:
                if op.opcode == "gather" and op.scope[1] == GATHER:
                    return op.scope
            found = [operation.scope, *(op.scope for op in inner if op.root)]
            named = [scope for scope in found if scope != (None, None)]
            common = Counter(scope for op in inner if (scope := op.scope) != (None, None)).most_common(1)
            if named or common:
                return named[0] if named else common[0][0]
        elif operation.scope != (None, None):
            return operation.scope
        caller = self.caller.get(operation.computation)
        return (None, None) if caller is None or caller is operation else self.scope(caller.name)

    # -- costs -------------------------------------------------------------------------------------------------

    def cost(self, name: str) -> Cost:
        """Of one execution, without that of loops and calls: their operations are executed one by one."""
        operation = self.operations.get(name)
        if operation is None or operation.opcode in _CONTAINERS:
            return Cost()
        return self._whole(operation)

    def whole_cost(self, name: str) -> Cost:
        """With everything inside; a loop whose trips are not known when it is compiled counts once."""
        operation = self.operations.get(name)
        return Cost() if operation is None else self._whole(operation)

    def inner(self, name: str) -> Iterable[str]:
        """Operations inside a loop or a call, at any depth."""
        for called in self.operations[name].calls:
            for op in self.computations[called]:
                yield op.name
                if op.calls:
                    yield from self.inner(op.name)

    def is_container(self, name: str) -> bool:
        """Whether it is a loop, a call or a conditional."""
        return name in self.operations and self.operations[name].opcode in _CONTAINERS

    def is_collective(self, name: str) -> bool:
        """Whether devices meet in it."""
        return name in self.operations and self.operations[name].opcode.startswith(_COLLECTIVES)

    def products_read(self, name: str) -> set[str]:
        """The matrix products whose results the operation reads."""
        operation, found = self.operations.get(name), set()
        for operand in operation.operands if operation is not None else ():
            source = self.operations.get(operand)
            while source is not None and source.opcode == "bitcast":
                source = self.operations.get(source.operands[0])
            if source is not None and source.opcode == "dot":
                found.add(source.name)
        return found

    def _whole(self, operation: Operation) -> Cost:
        if operation.name not in self._costs:
            self._costs[operation.name] = self._count(operation)
        return self._costs[operation.name]

    def _count(self, op: Operation) -> Cost:
        if op.opcode in _CONTAINERS:
            trips = _TRIPS.search(op.text) if op.opcode == "while" else None
            inside = (self._whole(o) for called in op.calls for o in self.computations[called])
            total = Cost()
            for cost in inside:
                total = total.plus(cost)
            return Cost().plus(total, int(trips[1]) if trips else 1)
        if op.opcode in _FREE:
            return Cost()
        if op.opcode == "fusion":
            inner = [o for called in op.calls for o in self.computations[called]]
            return Cost(sum(self._whole(o).flops for o in inner), self._fusion_bytes(op, inner))
        return Cost(self._flops(op), self._bytes(op))

    def _flops(self, op: Operation) -> float:
        if op.opcode == "dot" or (op.opcode == "custom-call" and "contracting_dim" in op.text):
            left = self.operations[op.operands[0]].shapes[0][1]
            found = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', op.text)
            dims = [int(n) for n in re.findall(r"\d+", found[1])] if found else []
            return 2.0 * math.prod(op.shapes[0][1]) * math.prod(left[d] for d in dims)
        if op.opcode == "convolution":
            kernel = self.operations[op.operands[1]].shapes[0][1]
            labels = re.search(r"dim_labels=\w+_(\w+)->", op.text)
            outputs = kernel[labels[1].index("o")] if labels else 1
            return 2.0 * math.prod(op.shapes[0][1]) * math.prod(kernel) / max(outputs, 1)
        return 0.0

    def _bytes(self, op: Operation) -> float:
        if op.opcode in ("dynamic-slice", "gather", "slice"):
            return 2 * op.bytes
        if op.opcode in ("dynamic-update-slice", "scatter"):
            update = op.operands[1 if op.opcode == "dynamic-update-slice" else 2]
            return 2 * self.operations[update].bytes
        return op.bytes + sum(self.operations[name].bytes for name in op.operands if name in self.operations)

    def _fusion_bytes(self, op: Operation, inner: list[Operation]) -> float:
        """Each parameter's rows that are used, and the rows of the result that are written."""
        users: dict[str, list[Operation]] = defaultdict(list)
        for o in inner:
            for operand in o.operands:
                users[operand].append(o)
        total = 0.0
        for o in inner:
            if o.opcode == "parameter":
                total += min(self._used(o, users), o.bytes)
            if o.root:
                results = [self.operations[name] for name in o.operands] if o.opcode == "tuple" else [o]
                total += sum(self._written(result) for result in results)
        return total

    def _used(self, value: Operation, users: dict[str, list[Operation]]) -> float:
        """Bytes of ``value`` that the fusion reads."""
        total = 0.0
        for user in users[value.name]:
            first = user.operands[0] == value.name
            if user.opcode == "bitcast":
                total += self._used(user, users)
            elif user.opcode in ("dynamic-slice", "gather", "slice") and first:
                total += user.bytes
            elif not (user.opcode == "dynamic-update-slice" and first):
                return value.bytes
        return total

    def _written(self, result: Operation) -> float:
        while result.opcode == "bitcast":
            result = self.operations[result.operands[0]]
        if result.opcode == "dynamic-update-slice":
            return self.operations[result.operands[1]].bytes
        return result.bytes
