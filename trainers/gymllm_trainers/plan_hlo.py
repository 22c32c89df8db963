"""What a compiled program says of itself: collectives with their bytes, and kernels, out of its HLO text.

XLA's own cost analysis counts a loop's body once and a Pallas kernel as nothing. Here bodies count as often
as their loops run, where the compiler knows it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*->.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*)$")
_OPERATION = re.compile(r"(?:^|[\s)}])([a-z][\w\-]*)\(")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_LOOP = re.compile(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count[\\"]*:\s*\{[\\"]*n[\\"]*:\s*[\\"]*(\d+)')
_CONSTANT = re.compile(r"^[su](?:32|64)\[\]\S* constant\((\d+)\)")
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_GROUPS = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")
_SCATTERS = "all-reduce-scatter"
"""How a TPU's compiler names computations that are a reduce-scatter, though they are written as an
all-reduce."""


@dataclass
class Collectives:
    """Of one kind, of each device and call of the program."""

    count: int = 0
    """How many are run."""
    sent_bytes: float = 0.0
    """What a device sends, as rings do it."""


class _Collective(NamedTuple):
    kind: str
    sent_bytes: float
    key: tuple[str, ...]
    """The same for the parts that a compiler cuts one collective into, to hide it behind other work."""


@dataclass
class _Computation:
    found: list[_Collective] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    loops: list[tuple[str, str, int | None]] = field(default_factory=list)
    """Condition, body, and how often the body is run, where the instruction says."""
    constants: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class HloSummary:
    """Of a whole program."""

    collectives: dict[str, Collectives]
    kernels: int
    """Pallas kernels in its text."""
    unknown_loops: int
    """Loops that hold collectives and whose length the compiler doesn't know: counted once."""

    @property
    def sent_bytes(self) -> float:
        """Of all kinds."""
        return sum(kind.sent_bytes for kind in self.collectives.values())


def summarise(text: str, *, devices: int) -> HloSummary:
    """Reads `compiled.as_text()`.

    Args:
        text: Of a program after SPMD partitioning: shapes are one device's own.
        devices: How many it is for.
    """
    computations, entry = _read(text, devices)
    totals = {kind: Collectives() for kind in KINDS}
    seen: set[tuple[str, ...]] = set()
    unknown = 0

    def visit(name: str, times: int) -> bool:
        """Adds a computation's collectives; whether it has any."""
        nonlocal unknown
        computation = computations.get(name, _Computation())
        for one in computation.found:
            if one.key not in seen:
                seen.add(one.key)
                totals[one.kind].count += times
                totals[one.kind].sent_bytes += times * one.sent_bytes
        has = bool(computation.found)
        for called in computation.calls:
            has |= visit(called, times)
        for condition, body, trips in computation.loops:
            constants = computations.get(condition, _Computation()).constants
            if trips is None and len(constants) == 1:
                trips = constants[0]  # a scan's: the counter is less than this
            inside = visit(body, times * (trips or 1))
            unknown += inside and trips is None
            has |= inside
        return has

    visit(entry, 1)
    return HloSummary(
        collectives={kind: total for kind, total in totals.items() if total.count},
        kernels=text.count('custom_call_target="tpu_custom_call"'),
        unknown_loops=unknown,
    )


def _read(text: str, devices: int) -> tuple[dict[str, _Computation], str]:
    computations: dict[str, _Computation] = {}
    entry, name = "", ""
    for line in text.splitlines():
        if (header := _COMPUTATION.match(line)) is not None:
            name = header[1]
            computations[name] = _Computation()
            if line.startswith("ENTRY"):
                entry = name
        elif name and (instruction := _INSTRUCTION.match(line)) is not None:
            scatters = name.startswith(_SCATTERS)
            _read_instruction(instruction[1], computations[name], devices, scatters=scatters)
    return computations, entry


def _read_instruction(text: str, into: _Computation, devices: int, *, scatters: bool) -> None:
    if (constant := _CONSTANT.match(text)) is not None:
        into.constants.append(int(constant[1]))
    operation = _OPERATION.search(text)
    if operation is None or operation[1].endswith(("-done", "-update")):
        return  # the latter are the same as their starts
    name = operation[1]
    kind = name.removesuffix("-start")
    if kind in KINDS:
        shapes = _SHAPE.findall(text[: operation.start() + 1])
        size, group = sum(map(_size, shapes)), _group_size(text, devices)
        if kind == "all-reduce" and scatters:
            kind, size = "reduce-scatter", size / group
        sent = _sent(kind, size, group, begun=name.endswith("-start"))
        channel = _CHANNEL.search(text)
        # Without a channel it is of one place alone.
        key = (channel[1], *map(str, shapes)) if channel else (str(id(into)), text)
        into.found.append(_Collective(kind, sent, (kind, *key)))
    if name == "while" and (loop := _LOOP.search(text)) is not None:
        known = _TRIPS.search(text)
        into.loops.append((loop[1], loop[2], int(known[1]) if known else None))
    into.calls += _CALLED.findall(text)
    for branches in _BRANCHES.findall(text):
        into.calls += [branch.strip().lstrip("%") for branch in branches.split(",")]


def _sent(kind: str, size: float, group: int, *, begun: bool) -> float:
    """Bytes that a device sends, as rings do it.

    Args:
        kind: Of `KINDS`.
        size: Of the result, bytes.
        group: Devices that take part.
        begun: Whether it is asynchronous: the result of some of those starts with the operands.
    """
    share = (group - 1) / group
    match kind:
        case "all-gather":  # the whole, less one's own part
            return size * share * (group / (group + 1) if begun else 1)
        case "all-reduce":  # a reduce-scatter and an all-gather
            return 2 * size * share
        case "reduce-scatter":
            return size * group * share
        case "all-to-all":
            return size * share / (1 + begun)
        case _:
            return size / (1 + begun)


def _size(shape: tuple[str, str]) -> float:
    """Bytes of an array; of a scalar none, which as a flag or a counter is no traffic."""
    dtype, dimensions = shape
    if dtype == "pred" or not dimensions:
        return 0.0
    bits = int("".join(re.findall(r"^[a-z]+(\d+)", dtype)))
    return math.prod(int(size) for size in dimensions.split(",")) * bits / 8


def _group_size(text: str, devices: int) -> int:
    if (mesh := _MESH_GROUPS.search(text)) is not None:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    if (iota := _IOTA_GROUPS.search(text)) is not None:
        return int(iota[2])
    if (listed := _GROUPS.search(text)) is not None and listed[1]:
        return listed[1].count(",") + 1
    return devices
