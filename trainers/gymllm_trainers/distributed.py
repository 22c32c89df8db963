"""One run in several processes: `jax.distributed`, and a learner that all of them hold parts of.

Process 0, the leader, plays the environments. Every call of its learner is made in the other processes too,
in the same order: the leader sends the call with its groups, and each process packs them itself, which gives
all the same micro-batches. Groups are a few bytes a token, so this is no traffic beside the gradient's. It
goes through JAX's own collectives; nothing here opens a connection.

When a process dies, the others end: at once where a collective needed it, else when its heartbeat is missed.
"""

from __future__ import annotations

import enum
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gymllm.errors import ConfigError, RunError
from gymllm.trajectory import Group
from gymllm_trainers.learner import Learner
from gymllm_trainers.packing import TrainingSequence

Tree = Any
"""A pytree of arrays."""

LEADER = 0
"""The process that plays."""
_LEAST_BYTES = 1 << 16
"""Messages are padded to this times a power of two: each size is a program of its own."""
_SIGNS_OF_DEATH = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Gloo",
    "DEADLINE_EXCEEDED",
    "UNAVAILABLE",
    "heartbeat",
)


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """The processes of a run. Each is started with the same command, but for `process_id`."""

    coordinator: str = ""
    """HOST:PORT of process 0, which every process can reach; "auto": as the cluster says (TPU pods, Slurm,
    Open MPI, or JAX_COORDINATOR_ADDRESS); empty: one process."""
    num_processes: int = 0
    """How many there are; 0: as the cluster says."""
    process_id: int = -1
    """Which one this is, from 0; -1: as the cluster says."""
    start_timeout_s: int = 300
    """How long a process waits for the others, in seconds."""
    heartbeat_timeout_s: int = 30
    """A process that isn't heard of for so long is dead, and the run ends; in seconds."""

    def __post_init__(self) -> None:
        for name in ("start_timeout_s", "heartbeat_timeout_s"):
            if getattr(self, name) < 1:
                raise ConfigError(f"processes.{name} must be >= 1, got {getattr(self, name)}.")
        named = self.coordinator not in ("", "auto")
        if named and not self.coordinator.rpartition(":")[2].isdigit():
            raise ConfigError(
                f"processes.coordinator must be HOST:PORT, auto or empty, got {self.coordinator!r}."
            )
        if named and not 0 <= self.process_id < self.num_processes:
            raise ConfigError(
                f"processes.process_id must be from 0 to num_processes - 1 where there is a coordinator, got "
                f"{self.process_id} of {self.num_processes}."
            )


def join_processes(config: ProcessConfig) -> None:
    """Makes this process one of the run's; before anything else of JAX is used.

    Raises:
        RunError: The others didn't come in time, or can't be reached.
    """
    _use_pathways()
    if not config.coordinator:
        return
    if jax.config.values["jax_cpu_collectives_implementation"] in (None, "none"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    explicit: dict[str, Any] = {}
    if config.coordinator != "auto":
        explicit = {
            "coordinator_address": config.coordinator,
            "num_processes": config.num_processes,
            "process_id": config.process_id,
        }
    try:
        jax.distributed.initialize(
            **explicit,
            initialization_timeout=config.start_timeout_s,
            heartbeat_timeout_seconds=config.heartbeat_timeout_s,
            shutdown_timeout_seconds=config.heartbeat_timeout_s,
        )
    except (RuntimeError, ValueError) as problem:
        raise RunError(
            f"process {config.process_id} of {config.num_processes} couldn't join the others at "
            f"{config.coordinator} within {config.start_timeout_s} s: {problem}. Start all of them, with the "
            "same processes.coordinator and num_processes, and look whether the address can be reached."
        ) from problem


def _use_pathways() -> None:
    """One process that drives every host's devices, where Pathways is asked for by its own variables."""
    if "proxy" not in os.environ.get("JAX_PLATFORMS", ""):
        return
    try:
        import pathwaysutils  # type: ignore[import-not-found]  # optional, and only in Google's cloud
    except ImportError:
        raise ConfigError(
            "JAX_PLATFORMS has proxy, which is Pathways, but its client isn't installed: pip install "
            "pathwaysutils."
        ) from None
    pathwaysutils.initialize()


def is_leader() -> bool:
    """Whether this process plays, and writes files."""
    return jax.process_index() == LEADER


# ---------------------------------------------------------------------- the learner of all of them


class _Call(enum.Enum):
    """What the leader has every process do."""

    COLLECT = enum.auto()
    SEQUENCES = enum.auto()
    COMPUTE = enum.auto()
    STEP = enum.auto()
    WEIGHTS = enum.auto()
    END = enum.auto()


class LeadingLearner:
    """The leader's learner: what is called of it happens in every process."""

    def __init__(self, learner: Learner, mesh: Mesh) -> None:
        """Takes it over.

        Args:
            learner: This process's; the others have one of the same settings and weights, and call `follow`.
            mesh: Of the devices of all processes.
        """
        self.learner, self._mesh = learner, mesh

    def add_group(self, group: Group) -> bool:
        """As `Learner.add_group`."""
        counts = self.collect(group)
        self.compute()
        return counts

    def collect(self, group: Group) -> bool:
        """As `Learner.collect`."""
        _send((_Call.COLLECT, group))
        return self.learner.collect(group)

    def add_sequences(self, sequences: Sequence[TrainingSequence]) -> None:
        """As `Learner.add_sequences`."""
        _send((_Call.SEQUENCES, list(sequences)))
        with _Collective():
            self.learner.add_sequences(sequences)

    def compute(self, *, flush: bool = False) -> None:
        """As `Learner.compute`."""
        _send((_Call.COMPUTE, flush))
        with _Collective():
            self.learner.compute(flush=flush)

    def step(self, *, flush: bool = True) -> dict[str, float]:
        """As `Learner.step`."""
        _send((_Call.STEP, flush))
        with _Collective():
            return self.learner.step(flush=flush)

    def weights(self) -> Tree:
        """As `Learner.weights`, whole, on one device of this process: what an engine here can take."""
        _send((_Call.WEIGHTS, None))
        with _Collective():
            return _gathered(self.learner.weights(), self._mesh)

    def end(self) -> None:
        """Lets the other processes go."""
        _send((_Call.END, None))


def follow(learner: Learner, mesh: Mesh) -> None:
    """Does what the leader does, until it ends. For every process but the leader.

    Raises:
        RunError: The leader, or another process, has died.
    """
    while True:
        call, argument = _receive()
        with _Collective():
            match call:
                case _Call.COLLECT:
                    learner.collect(argument)
                case _Call.SEQUENCES:
                    learner.add_sequences(argument)
                case _Call.COMPUTE:
                    learner.compute(flush=argument)
                case _Call.STEP:
                    learner.step(flush=argument)
                case _Call.WEIGHTS:
                    _gathered(learner.weights(), mesh)
                case _Call.END:
                    return


def _gathered(tree: Tree, mesh: Mesh) -> Tree:
    whole = NamedSharding(mesh, PartitionSpec())
    # A program rather than device_put, which moves nothing between processes on a CPU.
    with jax.set_mesh(mesh):
        gathered = jax.jit(lambda tree: tree, out_shardings=whole)(tree)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), gathered)


# ---------------------------------------------------------------------- messages


def _send(message: tuple[_Call, object]) -> None:
    payload = np.frombuffer(pickle.dumps(message), np.uint8)
    with _Collective():
        multihost_utils.broadcast_one_to_all(np.int32(len(payload)), is_source=True)
        padded = np.zeros(_padded(len(payload)), np.uint8)
        padded[: len(payload)] = payload
        multihost_utils.broadcast_one_to_all(padded, is_source=True)


def _receive() -> tuple[_Call, Any]:
    with _Collective():
        size = int(multihost_utils.broadcast_one_to_all(np.int32(0), is_source=False))
        nothing = np.zeros(_padded(size), np.uint8)
        payload: npt.NDArray[np.uint8] = np.asarray(
            multihost_utils.broadcast_one_to_all(nothing, is_source=False)
        )
    # From the leader of the same run, which could run anything here anyway.
    return pickle.loads(payload[:size].tobytes())


def _padded(size: int) -> int:
    padded = _LEAST_BYTES
    while padded < size:
        padded *= 2
    return padded


class _Collective:
    """Says in words that another process has died, where a collective in the block needed it."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, jax.errors.JaxRuntimeError) and any(
            sign in str(error) for sign in _SIGNS_OF_DEATH
        ):
            raise RunError(
                f"another of the {jax.process_count()} processes has died or can't be reached; this is "
                f"process {jax.process_index()}. See its log, then start all of them again with --resume. "
                f"({str(error).splitlines()[0][:200]})"
            ) from error
