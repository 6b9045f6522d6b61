"""Reads the text of a compiled XLA program: its loops, what one pass of each launches, and what that costs by estimate.

It is used by `accelerators.py`. Nothing here is measured. On a GPU, a kernel takes the largest of the times for its
launch, its bytes and its arithmetic; on a TPU it takes the cycles that the compiler itself has written beside it.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

# Names of what runs no kernel.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
_FREE |= {"opt-barrier", "add-dependency", "copy-done", "async-done", "async-update"}
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_BYTES |= {"s64": 8, "u64": 8, "f64": 8, "c64": 8}
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|[a-z]+\d*\[[^ ]*|token\[\]|\S+) ([\w\-]+)\((.*)$")


class Operation(NamedTuple):
    """One line of a computation: its name, the shape of its result, its kind, and the rest of the line."""

    name: str
    shape: str
    kind: str
    rest: str

    def attribute(self, key: str) -> str:
        """The value of ``key=``, without the mark of a name; empty if there is none."""
        found = re.search(rf'\b{key}="?%?([\w.$\-]+)', self.rest)
        return found.group(1) if found else ""

    def numbers(self, key: str) -> list[int]:
        """The value of ``key={1,2}``."""
        found = re.search(rf"\b{key}=\{{([\d,]*)\}}", self.rest)
        return [int(number) for number in found.group(1).split(",") if number] if found else []

    @property
    def operands(self) -> list[str]:
        """The names of its inputs."""
        return re.findall(r"%([\w.\-]+)", self.rest.split("), ")[0])

    @property
    def cycles(self) -> int:
        """The cycles that a TPU's compiler expects for it."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.rest)
        return int(found.group(1)) if found else 0


@dataclass
class Module:
    """A compiled program: computation -> its operations, and the place in the source of an operation."""

    computations: dict[str, list[Operation]] = field(default_factory=dict)
    entry: str = ""
    frames: dict[int, list[str]] = field(default_factory=dict)

    def source(self, operation: Operation) -> list[str]:
        """The functions that the operation comes from, innermost first."""
        found = re.search(r"stack_frame_id=(\d+)", operation.rest)
        return self.frames.get(int(found.group(1)), []) if found else []

    def trips(self, loop: Operation) -> int | None:
        """The number of passes of a loop if known: the compiler states it, or a counter is compared with a constant."""
        if found := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
            return int(found.group(1))
        condition = {part.name: part for part in self.computations.get(loop.attribute("condition"), [])}
        compared = next((part for part in condition.values() if part.kind == "compare"), None)
        limits = [condition[name] for name in compared.operands if name in condition] if compared else []
        constants = [re.match(r"(\d+)\)", part.rest) for part in limits if part.kind == "constant"]
        return int(constants[0].group(1)) if constants and constants[0] else None

    def branches(self, operation: Operation) -> list[str]:
        """The computations of a conditional."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", operation.rest)
        if listed:
            return [name.strip().lstrip("%") for name in listed.group(1).split(",")]
        return [operation.attribute(f"{which}_computation") for which in ("true", "false")]


def parse(text: str) -> Module:
    """Reads the text of ``compiled.as_text()``."""
    module, tables, table, current = Module(), {}, None, None
    for line in text.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, {})
        elif table is not None:
            number, _, value = line.partition(" ")
            if number.isdigit():
                table[int(number)] = value.strip('"') if value.startswith('"') else _fields(value)
            else:
                table = None
        if line.startswith("}"):
            current = None
        elif current is not None:
            if found := _LINE.match(line):
                current.append(Operation(*found.groups()))
        elif line.endswith("{") and (found := re.match(r"(ENTRY )?%?([\w.\-]+) .*\(", line)):
            current = module.computations.setdefault(found.group(2), [])
            module.entry = found.group(2) if found.group(1) else module.entry
    module.frames = {number: list(_stack(number, tables)) for number in tables.get("StackFrames", {})}
    return module


def _fields(text: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", text)}


def _stack(number: int, tables: dict) -> Iterator[str]:
    seen: set[int] = set()
    while number in tables["StackFrames"] and number not in seen:
        seen.add(number)
        frame = tables["StackFrames"][number]
        place = tables["FileLocations"].get(frame.get("file_location_id"), {})
        file = tables["FileNames"].get(place.get("file_name_id"), "")
        function = tables["FunctionNames"].get(place.get("function_name_id"), "")
        if "fedjax_pfl" in file:
            yield f"{file.rsplit('fedjax_pfl/', 1)[-1]}:{function}"
        number = frame.get("parent_frame_id", 0)


def size(shape: str) -> int:
    """Bytes of a shape, or of a tuple of shapes."""
    arrays = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", shape)
    return sum(_BYTES.get(kind, 0) * math.prod(_extents(extents)) for kind, extents in arrays)


def _extents(text: str) -> list[int]:
    return [int(extent) for extent in text.split(",") if extent]


def _dimensions(shape: str) -> list[int]:
    found = re.search(r"\[([\d,]*)\]", shape)
    return _extents(found.group(1)) if found else []


class Rates(NamedTuple):
    """The rates of a GPU.

    Attributes:
      launch: seconds from one kernel to the next.
      wait: seconds in which the host decides whether a loop continues.
      bytes: bytes read and written per second.
      flops: operations per second.
    """

    launch: float
    wait: float
    bytes: float
    flops: float


class Cost(NamedTuple):
    """The cost of a computation: seconds by what bounds each kernel, and the number of kernels.

    Attributes:
      launch: seconds of kernels that are so small that only their launch matters, and of waiting for the host.
      memory: seconds of kernels bound by memory.
      arithmetic: seconds of kernels bound by arithmetic.
      cycles: cycles of a TPU, of all operations.
      kernels: number of launched kernels.
    """

    launch: float = 0.0
    memory: float = 0.0
    arithmetic: float = 0.0
    cycles: float = 0.0
    kernels: float = 0.0

    @property
    def seconds(self) -> float:
        """The total on a GPU."""
        return self.launch + self.memory + self.arithmetic

    def plus(self, other: "Cost", times: float = 1.0) -> "Cost":
        """The sum of this cost and the other, the latter multiplied by ``times``."""
        return Cost(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))


class Loop(NamedTuple):
    """A loop of a program.

    Attributes:
      source: the functions that it comes from, innermost first.
      trips: number of passes; None if only the running program knows it.
      own: cost of one pass without the loops inside.
      whole: cost of all passes of all its calls in one pass of the program.
    """

    source: list[str]
    trips: int | None
    own: Cost
    whole: Cost


class Estimate(NamedTuple):
    """The cost of one pass of a program."""

    total: Cost
    loops: list[Loop]
    collectives: int


def estimate(module: Module, rates: Rates | None, passes: dict[str, int], *, evaluate: bool = False) -> Estimate:
    """Walks through a program.

    Args:
      module: the program.
      rates: of a GPU; None for a TPU, whose operations carry their cycles.
      passes: part of a source -> number of passes of a loop of unknown length that comes from it; 1 for all others.
      evaluate: whether of two branches the costlier one is taken, else the cheaper one.
    """
    loops: list[Loop] = []

    def walk(computation: str, times: float) -> tuple[Cost, Cost]:
        """The cost of one pass without the loops inside, and with them."""
        own = inner = Cost()
        table = {operation.name: operation for operation in module.computations.get(computation, [])}
        for operation in table.values():
            if operation.kind == "while":
                source, trips = module.source(operation), module.trips(operation)
                given = [n for part, n in passes.items() if any(part in function for function in source)]
                count = trips if trips is not None else (given or [1])[0]
                without, whole = walk(operation.attribute("body"), times * count)
                if trips is None and rates is not None:
                    whole = whole._replace(launch=whole.launch + rates.wait)
                loops.append(Loop(source, trips, without, Cost().plus(whole, times * count)))
                inner = inner.plus(whole, count)
            elif operation.kind == "conditional":
                found = [walk(name, times)[1] for name in module.branches(operation)]
                inner = inner.plus((max if evaluate else min)(found, key=lambda cost: (cost.seconds, cost.cycles)))
            elif operation.kind == "call":
                called, whole = walk(operation.attribute("to_apply"), times)
                own, inner = own.plus(called), inner.plus(whole).plus(called, -1)
            elif operation.kind not in _FREE:
                own = own.plus(_kernel(module, table, operation, rates))
        return own, own.plus(inner)

    _, total = walk(module.entry, 1)
    everything = [operation for computation in module.computations.values() for operation in computation]
    collectives = sum(operation.kind.removesuffix("-start") in _COLLECTIVES for operation in everything)
    return Estimate(total, loops, collectives)


def _kernel(module: Module, table: dict[str, Operation], operation: Operation, rates: Rates | None) -> Cost:
    if rates is None:
        return Cost(cycles=operation.cycles, kernels=operation.kind not in ("copy-start", "async-start"))
    moved, flops = _bytes_moved(module, table, operation), _flops(module, table, operation)
    launch, memory, arithmetic = rates.launch, moved / rates.bytes, flops / rates.flops
    most = max(launch, memory, arithmetic)
    if most == launch:
        return Cost(launch=launch, kernels=1)
    return Cost(memory=memory, kernels=1) if most == memory else Cost(arithmetic=arithmetic, kernels=1)


def _bytes_moved(module: Module, table: dict[str, Operation], operation: Operation) -> int:
    """The bytes that a kernel reads and writes; only the slices of an input of which it uses slices."""
    inner = module.computations.get(operation.attribute("calls"), []) if operation.kind == "fusion" else []
    total = size(operation.shape)
    for position, name in enumerate(operation.operands):
        if name in table:
            total += _bytes_read(inner, position, size(table[name].shape))
    if inner and inner[-1].kind == "dynamic-update-slice":  # in place
        by_name = {part.name: part for part in inner}
        total += 2 * size(by_name[inner[-1].operands[1]].shape) - size(operation.shape)
    return total


def _bytes_read(inner: list[Operation], position: int, whole: int) -> int:
    given = [part.name for part in inner if part.kind == "parameter" and part.rest.startswith(f"{position})")]
    users = [part for part in inner if given and given[0] in part.operands]
    if users and all(part.kind in ("dynamic-slice", "gather", "slice") for part in users):
        return min(whole, sum(size(part.shape) for part in users))
    if users and all(part.kind == "dynamic-update-slice" and part.operands[0] == given[0] for part in users):
        return 0
    return whole


def _flops(module: Module, table: dict[str, Operation], operation: Operation) -> float:
    """The operations of matrix products and convolutions, also within a fusion."""
    if operation.kind == "dot" or "gemm" in operation.attribute("custom_call_target"):
        return _product_flops(table, operation)
    if operation.kind == "convolution" or "conv" in operation.attribute("custom_call_target"):
        return _convolution_flops(table, operation)
    inner = module.computations.get(operation.attribute("calls") or operation.attribute("to_apply"), [])
    by_name = {part.name: part for part in inner}
    return sum(_flops(module, by_name, part) for part in inner if part.kind in ("dot", "fusion", "call", "convolution"))


def _product_flops(table: dict[str, Operation], operation: Operation) -> float:
    left = table.get(operation.operands[0])
    contracted = operation.numbers("lhs_contracting_dims")
    if not contracted:  # a library's call says it in its configuration
        found = re.search(r'"lhs_contracting_dimensions":\["?([\d",]*)"?\]', operation.rest)
        contracted = [int(number) for number in re.findall(r"\d+", found.group(1))] if found else []
    extents = _dimensions(left.shape) if left else []
    first = operation.shape.strip("(").split("{")[0]
    return 2.0 * math.prod(_dimensions(first)) * math.prod(extents[axis] for axis in contracted)


def _convolution_flops(table: dict[str, Operation], operation: Operation) -> float:
    window = re.search(r"window=\{size=([\dx]+)", operation.rest)
    labels = operation.attribute("dim_labels")
    kernel = table.get(operation.operands[1])
    if not window or not kernel or "_" not in labels:
        return 0.0
    taps = math.prod(int(extent) for extent in window.group(1).split("x"))
    order = re.search(r"_(\w+?)->", operation.rest)
    inputs = _dimensions(kernel.shape)[order.group(1).index("i")] if order else 1
    first = operation.shape.strip("(").split("{")[0]
    return 2.0 * math.prod(_dimensions(first)) * taps * inputs
