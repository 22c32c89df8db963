"""What can be planned for: topologies by name, and what their devices can do.

A topology is `v5p:4x4x4` (TPUs, by how their chips are laid out), `cpu:8` (devices simulated on this
machine), `gpu` (one H100) or `gpu:8xH200`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gymllm.errors import ConfigError, UnknownNameError

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One device, as JAX counts them."""

    name: str
    flops: float
    """Peak of bfloat16 matrix products, FLOP/s; a TPU's float32 ones are one pass of bfloat16 by default."""
    memory_bytes: int
    """What programs may hold. Of a TPU: as its compiler says, less than the data sheet's."""
    memory_bandwidth: float
    """Bytes a second."""
    link_bandwidth: float
    """Bytes a second to other devices, one way, all links together."""
    source: str
    """Where these figures are from."""
    axes: int = 1
    """Numbers that say how a slice of a TPU is laid out."""
    devices_per_chip: int = 1

    @property
    def kind(self) -> Literal["tpu", "gpu", "cpu"]:
        return "cpu" if self.name == "cpu" else "gpu" if self.name in GPUS else "tpu"


_TPU_DOCS = "https://cloud.google.com/tpu/docs/"
_TPU_LIMITS = "memory: libtpu 0.0.42"

TPUS = {
    "v4": Chip(
        name="v4",
        flops=275e12 / 2,
        memory_bytes=16 * _GIB,
        memory_bandwidth=1200e9 / 2,
        link_bandwidth=300e9 / 2,
        source=f"{_TPU_DOCS}v4, half a chip",
        axes=3,
        devices_per_chip=2,
    ),
    "v5e": Chip(
        name="v5e",
        flops=197e12,
        memory_bytes=int(15.75 * _GIB),
        memory_bandwidth=819e9,
        link_bandwidth=200e9,
        source=f"{_TPU_DOCS}v5e; {_TPU_LIMITS}",
        axes=2,
    ),
    "v5p": Chip(
        name="v5p",
        flops=459e12,
        memory_bytes=int(95.73 * _GIB),
        memory_bandwidth=2765e9,
        link_bandwidth=600e9,
        source=f"{_TPU_DOCS}v5p; {_TPU_LIMITS}",
        axes=3,
    ),
    "v6e": Chip(
        name="v6e",
        flops=918e12,
        memory_bytes=int(31.24 * _GIB),
        memory_bandwidth=1638e9,
        link_bandwidth=400e9,
        source=f"{_TPU_DOCS}v6e; {_TPU_LIMITS}",
        axes=2,
    ),
    "tpu7x": Chip(
        name="tpu7x",
        flops=2307e12 / 2,
        memory_bytes=int(94.74 * _GIB),
        memory_bandwidth=7380e9 / 2,
        link_bandwidth=600e9 / 2,
        source=f"{_TPU_DOCS}tpu7x, half a chip; {_TPU_LIMITS}",
        axes=3,
        devices_per_chip=2,
    ),
}

_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
GPUS = {
    # Dense rates, not those with sparsity; 94 % of memory, which leaves the driver and cuBLAS theirs.
    "A100": Chip(
        name="A100",
        flops=312e12,
        memory_bytes=int(0.94 * 80e9),
        memory_bandwidth=2039e9,
        link_bandwidth=300e9,
        source=f"{_NVIDIA}a100, 80 GB SXM",
    ),
    "H100": Chip(
        name="H100",
        flops=989e12,
        memory_bytes=int(0.94 * 80e9),
        memory_bandwidth=3350e9,
        link_bandwidth=450e9,
        source=f"{_NVIDIA}h100, SXM",
    ),
    "H200": Chip(
        name="H200",
        flops=989e12,
        memory_bytes=int(0.94 * 141e9),
        memory_bandwidth=4800e9,
        link_bandwidth=450e9,
        source=f"{_NVIDIA}h200, SXM",
    ),
}

CPU = Chip(
    name="cpu",
    flops=math.nan,
    memory_bytes=0,
    memory_bandwidth=math.nan,
    link_bandwidth=math.nan,
    source="no figures: a CPU's are measured by benchmarks/machine_limits.py",
)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Devices to plan for."""

    name: str
    """As it was asked for."""
    chip: Chip
    devices: int

    @property
    def compiles(self) -> bool:
        """Whether programs can be compiled for it here; else only the model of `plan_estimate` is shown."""
        return self.chip.kind != "gpu"


def parse_topology(name: str) -> Topology:
    """Reads a topology's name.

    Raises:
        UnknownNameError: No such chip.
        ConfigError: Its layout can't be read.
    """
    kind, _, layout = name.partition(":")
    if kind == "cpu":
        return Topology(name=name, chip=CPU, devices=_count(name, layout or "1"))
    if kind == "gpu":
        number, _, model = layout.rpartition("x")
        model = model or "H100"
        if model.isdigit():
            number, model = model, "H100"
        if model not in GPUS:
            raise UnknownNameError("GPU", model, GPUS, "Write gpu:8xH100.")
        return Topology(name=name, chip=GPUS[model], devices=_count(name, number or "1"))
    if kind not in TPUS:
        raise UnknownNameError(
            "topology", kind, [*TPUS, "cpu", "gpu"], "Write --plan v5p:4x4x4, cpu:8 or gpu:8xH100."
        )
    chip = TPUS[kind]
    axes = chip.axes
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", layout) or layout.count("x") + 1 != axes:
        shown = "x".join("4" * axes)
        raise ConfigError(
            f"--plan {name}: how {kind} chips are laid out takes {axes} numbers, as in {kind}:{shown}."
        )
    chips = math.prod(map(int, layout.split("x")))
    return Topology(name=name, chip=chip, devices=chips * chip.devices_per_chip)


def _count(name: str, number: str) -> int:
    if not number.isdigit() or int(number) < 1:
        raise ConfigError(f"--plan {name}: {number!r} is no number of devices, as 8 in cpu:8.")
    return int(number)


def take_topology(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """Takes the topology after `--plan` out, which tyro knows as a flag without a value.

    Returns:
        The other arguments, `--plan` among them, and the topology, or None where there is none.
    """
    rest: list[str] = []
    found: str | None = None
    for word in argv:
        if word.startswith("--plan="):
            rest.append("--plan")
            found = word.removeprefix("--plan=")
        elif rest and rest[-1] == "--plan" and found is None and not word.startswith("-"):
            found = word
        else:
            rest.append(word)
    return rest, found
