"""Parser of a compiled program's text: the part and the layer of each operation, and its cost.

XLA prints an operation as ``%name = type opcode(operands), attributes``; see its "Operation semantics".
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from fedrax.xla import GATHER, GRADIENT, LAYER_SCAN_SCOPE, LINEAR_ALGEBRA_SCOPE, read_scope

_SHAPE = re.compile(r"\b(pred|token|[a-z]+\d+\w*)\[([\d,<= ]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(?:calls|body|condition|to_apply|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CUDNN = re.compile(r'custom_call_target="__cudnn\$conv(\w+)"')
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
_FREE |= {"while", "call", "conditional", "async-start", "async-update", "async-done"}
"""Opcodes without a cost of their own."""
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
_SLICES = ("dynamic-slice", "gather", "slice")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations that update an array in place, with the index of the operand that is written."""
_STRUCTURE = {"", "while", "body", "cond", "closed_call", "checkpoint", "custom_jvp_call", "custom_vjp_call"}
_STRUCTURE |= {LINEAR_ALGEBRA_SCOPE, "eval_jaxpr", "conv_general_dilated", "select_and_scatter_add", "reduce_sum"}
"""Parts of operation names that are not named scopes: JAX's transformations and names of rewritten operations."""


class OperationCost(NamedTuple):
    """The cost of one execution of an operation."""

    flops: float = 0.0
    """Floating-point operations of matrix products and convolutions, two for each multiply-add."""
    bytes: float = 0.0
    """Bytes read and written: operands and results; only the rows read by a slice or a gather."""


class OperationDescription(NamedTuple):
    """An operation in terms of the model."""

    what: str = ""
    """Kind of operation, such as ``product`` or ``reduction``."""
    layer: str = ""
    """The path of modules and named scopes, empty if there is none."""
    direction: str = ""
    """``forward``, ``backward``, or empty outside of gradients."""
    shapes: str = ""
    """Shapes of operands or of input and result."""
    looped: bool = False
    """Whether it runs in a loop of the model, such as that of a recurrent cell."""
    side: int = 0
    """The shortest side of a product's operands, or the smaller number of channels of a convolution; otherwise 0."""


@dataclass(eq=False)
class Instruction:
    """One line of the text."""

    name: str
    opcode: str
    shapes: list[tuple[str, tuple[int, ...]]]
    """dtype and shape of each result."""
    operands: list[str]
    """Names of the operands."""
    text: str
    """The attributes after the operands."""
    computation: str
    """Name of the computation that contains it."""
    root: bool
    """Whether it is the result of the computation."""
    calls: list[str] = field(default_factory=list)
    """Names of the computations that it calls."""
    sources: list[str] = field(default_factory=list)
    """The operands, through bitcasts."""

    @property
    def bytes(self) -> float:
        """Size of the result."""
        return sum(_bits(kind) / 8 * math.prod(shape) for kind, shape in self.shapes)

    @property
    def op_name(self) -> str:
        """Its scopes and its primitive, separated by slashes."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.text)
        return found[1] if found else ""

    @property
    def scope(self) -> tuple[int | None, str | None]:
        """(phase, part) by its name."""
        return read_scope(self.op_name)


def _bits(kind: str) -> int:
    """Bits of a number of an XLA type."""
    return {"pred": 8, "token": 0}.get(kind) or int((re.findall(r"\d+", kind) or [0])[0])


def _closing(text: str, start: int = 0) -> int:
    """The position of the parenthesis that closes the one at ``start``."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    return len(text) - 1


def _parse(line: str, computation: str) -> Instruction | None:
    """Parse a line, None if it is not an operation."""
    found = re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*)", line)
    if found is None:
        return None
    end = _closing(found[3]) + 1 if found[3].startswith("(") else found[3].index(" ")
    kind, rest = found[3][:end], found[3][end + 1 :]
    opened = rest.find("(")
    closed = _closing(rest, opened)
    attributes = rest[closed + 1 :]
    calls = _CALLED.findall(attributes)
    for branches in _BRANCHES.findall(attributes):
        calls += _NAME.findall(branches)
    shapes = [(dtype, tuple(int(n) for n in re.findall(r"\d+", dims))) for dtype, dims in _SHAPE.findall(kind)]
    operands = _NAME.findall(rest[opened + 1 : closed])
    return Instruction(found[2], rest[:opened], shapes, operands, attributes, computation, bool(found[1]), calls)


class ProgramText:
    """The operations of a compiled program by name."""

    def __init__(self, text: str):
        self.operations: dict[str, Instruction] = {}
        self.computations: dict[str, list[Instruction]] = defaultdict(list)
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
        for op in self.operations.values():
            op.operands = [name for name in op.operands if name in self.operations]
            op.sources = [self._source(name) for name in op.operands]
        self.scope, self.cost = cache(self._scope), cache(self._cost)

    def _source(self, name: str) -> str:
        """The operation at the start of a chain of bitcasts."""
        op = self.operations[name]
        return self._source(op.operands[0]) if op.opcode == "bitcast" and op.operands else name

    def is_collective(self, name: str) -> bool:
        """Whether it is a collective operation."""
        return name in self.operations and self.operations[name].opcode.startswith(_COLLECTIVES)

    def _fused(self, op: Instruction) -> list[Instruction]:
        """The operations inside a fusion, empty for other operations."""
        return [o for called in op.calls for o in self.computations[called]] if op.opcode == "fusion" else []

    def products_read(self, name: str) -> set[str]:
        """The matrix products and convolutions whose results the operation reads."""
        sources = self.operations[name].sources if name in self.operations else []
        return {source for source in sources if self.cost(source).flops}

    # -- parts and layers --------------------------------------------------------------------------------------

    def _scope(self, name: str) -> tuple[int | None, str | None]:
        """(phase, part) of an operation: its own or, if it has none, that of the loop it runs in.

        A fusion has the scope of its result, except that one which gathers rows counts as gathering, which takes most
        of its time.
        """
        operation = self.operations.get(name)
        if operation is None:
            return None, None
        fused = self._fused(operation)
        gathers = [op.scope for op in fused if op.opcode == "gather" and op.scope[1] == GATHER]
        roots = [op.scope for op in fused if op.root]
        others = [scope for scope, _ in Counter(op.scope for op in fused).most_common()]
        for scope in [*gathers, operation.scope, *roots, *others]:
            if scope != (None, None):
                return scope
        caller = self.caller.get(operation.computation)
        return (None, None) if caller is None or caller is operation else self.scope(caller.name)

    def describe(self, name: str) -> OperationDescription:
        """Describe an operation in terms of the model."""
        op = self.operations[name]
        inside = [op, *self._fused(op)]
        product = next((o for o in inside if self._flops(o)), None)
        named = product or next(filter(_is_depthwise, inside), op)
        title = named.op_name or next((o.op_name for o in inside if o.op_name), "")
        scopes = title.rpartition(f"{GRADIENT}/")[2].split("/")
        direction = "backward" if "transpose(" in title else "forward"
        if self.scope(name)[1] != GRADIENT:
            scopes, direction = [""], ""
        plain = (re.sub(r"^(?:\w+\()+|\)+$", "", scope) for scope in scopes[:-1])
        layer = "/".join(scope for scope in plain if scope not in _STRUCTURE)
        what = _what(inside, product, "conv_general_dilated" in scopes)
        read = [self.operations[o] for o in (product or op).operands]
        if product is not None:
            shapes = " · ".join(map(_shape, read[:2]))
            _, kernel, labels = self._convolution(product) or ((), (), "")
            sides = [kernel[labels.index(c)] for c in "io"] if labels else self._sides(product)
            side = min(sides, default=1)
        else:
            largest, side = max(read, key=lambda o: o.bytes, default=op), 0
            shapes = " → ".join(dict.fromkeys([_shape(largest), _shape(op)]))
        # loops inside rewritten convolutions, layer scans and linear algebra are not loops of the model
        outside = re.split(
            rf"conv_general_dilated|\d{LAYER_SCAN_SCOPE}|{LINEAR_ALGEBRA_SCOPE}", title.rpartition(f"{GRADIENT}/")[2]
        )[0]
        looped = "while" in outside.split("/")
        return OperationDescription(what, layer, direction, shapes, looped and direction != "", side)

    # -- costs -------------------------------------------------------------------------------------------------

    def _cost(self, name: str) -> OperationCost:
        """The cost of one execution, zero for loops and calls, whose operations are counted themselves."""
        op = self.operations.get(name)
        if op is None or op.opcode in _FREE:
            return OperationCost()
        inside = self._fused(op) or [op]
        return OperationCost(sum(map(self._flops, inside)), self._read(op, inside) + self._written(inside))

    def _flops(self, op: Instruction) -> float:
        """Floating-point operations of a product or a convolution."""
        if op.opcode == "dot" or (op.opcode == "custom-call" and "contracting_dim" in op.text):
            left = self.operations[op.operands[0]].shapes[0][1]
            return 2.0 * math.prod(op.shapes[0][1]) * math.prod(left[d] for d in _axes(op, "lhs_contracting"))
        convolution = self._convolution(op)
        if convolution is not None:
            outputs, kernel, labels = convolution
            channels = kernel[labels.index("o")] if labels else 1
            return 2.0 * math.prod(outputs) * math.prod(kernel) / max(channels, 1)
        return 0.0

    def _sides(self, op: Instruction) -> list[int]:
        """The sides of a product's operands without the batch axes."""
        operands = zip(("lhs", "rhs"), op.operands, strict=False)
        shapes = [(self.operations[name].shapes[0][1], _axes(op, f"{which}_batch")) for which, name in operands]
        return [size for shape, batch in shapes for axis, size in enumerate(shape) if axis not in batch]

    def _convolution(self, op: Instruction) -> tuple[tuple[int, ...], tuple[int, ...], str] | None:
        """(output shape, kernel shape, kernel axes) of a convolution, or of the one that it is a gradient of.

        cuDNN's gradients have the output instead of the input or of the kernel as operand.
        """
        role = "Forward" if op.opcode == "convolution" else (_CUDNN.search(op.text) or ["", ""])[1]
        if len(op.operands) < 2 or not ("Forward" in role or role in ("BackwardInput", "BackwardFilter")):
            return None
        first, second = (self.operations[name].shapes[0][1] for name in op.operands[:2])
        result, labels = op.shapes[0][1], re.search(r"dim_labels=[\w?]+_([\w?]+)->", op.text)
        of_role = {"BackwardInput": (first, second), "BackwardFilter": (second, result)}
        return *of_role.get(role, (result, second)), labels[1] if labels else ""

    def _read(self, op: Instruction, inside: list[Instruction]) -> float:
        """Bytes read: only the slices of arrays that are sliced, none of arrays that are updated in place."""
        total, here = 0.0, {o.name for o in inside if o.opcode == "parameter"} or set(op.sources)
        for value in map(self.operations.__getitem__, here):
            used = 0.0
            for user in (o for o in inside if value.name in o.sources):
                first = user.sources[0] == value.name
                used += user.bytes if first and user.opcode in _SLICES else value.bytes
                used -= value.bytes if first and user.opcode in _UPDATES else 0.0
            total += min(used, value.bytes)
        return total

    def _written(self, inside: list[Instruction]) -> float:
        """Bytes written: only the update of arrays that are updated in place."""
        root = next((op for op in inside if op.root), inside[0])
        total = 0.0
        for name in root.sources if root.opcode == "tuple" else [self._source(root.name)]:
            result = self.operations[name]
            change = _UPDATES.get(result.opcode)
            total += (result if change is None else self.operations[result.operands[change]]).bytes
        return total


_WHAT = {"sort": "sort", "fft": "Fourier transform", "custom-call": "library call", "scatter": "scatter"}
_WHAT |= {"gather": "gather", "reduce": "reduction", "while": "loop"}
"""Kinds of operations by an opcode in them; the first that occurs applies."""


def _axes(op: Instruction, which: str) -> list[int]:
    """The contracted or batch axes of a product's operand, in the text of a dot or of a library call."""
    found = re.search(rf'{which}_dim(?:s=\{{|ensions":\[)([\d,"]*)', op.text)
    return [int(n) for n in re.findall(r"\d+", found[1])] if found else []


def _shape(op: Instruction) -> str:
    """The shape of the largest result as text."""
    return "×".join(map(str, max((shape for _, shape in op.shapes), key=math.prod, default=()))) or "1"


def _is_depthwise(op: Instruction) -> bool:
    """Whether it is a product of a depthwise convolution that was rewritten as shifted multiplications."""
    return "conv_general_dilated/" in op.op_name and op.opcode == "multiply"


def _what(inside: list[Instruction], product: Instruction | None, convolution: bool) -> str:
    """The kind of an operation or a fusion."""
    opcodes = {op.opcode for op in inside}
    if product is not None:
        return "convolution" if convolution else "product"
    if any(map(_is_depthwise, inside)):
        return "depthwise convolution"
    if any("select_and_scatter_add/" in op.op_name for op in inside) or "reduce-window" in opcodes:
        return "pooling"
    return next((what for opcode, what in _WHAT.items() if opcode in opcodes), "pass")
