"""The processes of a run: how they meet, and what they say to one another.

One of them leads; what it says goes to all through JAX's own collectives, so nothing here opens a connection.
"""

from __future__ import annotations

import contextlib
import enum
import os
import pickle
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from gymllm.errors import ConfigError, RunError

LEADER = 0
"""The process that plays, and writes files."""
_LATER_S = 60
"""JAX waits for longer than we do: what it says is a stack trace."""
PING_S = 5.0
"""How often a leader that has nothing to say looks whether the others are there."""
_LEAST_BYTES = 1 << 16
"""Of a message's first piece."""
_MORE_BYTES = 1 << 20
"""Of each piece after it."""
_LENGTH = np.dtype("<i8")
"""How many bytes a message has, before them."""
_SAID_BYTES = 1 << 12
"""Of what a process says to the others, so much is heard."""
_END_PATIENCE_S = 4.0
"""How long the end waits for what a thread still does with the others."""
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
        if not self.coordinator and (self.num_processes > 1 or self.process_id > 0):
            raise ConfigError(
                f"processes.num_processes is {self.num_processes} and process_id {self.process_id}, but "
                "there is no processes.coordinator: set it to HOST:PORT of process 0, or to auto."
            )


def join_processes(config: ProcessConfig) -> int:
    """Makes this process one of the run's; before anything else of JAX is used.

    Returns:
        How many there are.

    Raises:
        RunError: The coordinator's port is taken, or JAX gave up.
        SystemExit: The others didn't come in time: JAX would end the process without a word of ours, so
            that is said, and it ends with code 1.
    """
    _use_pathways()
    if not config.coordinator:
        return 1
    if jax.config.values["jax_cpu_collectives_implementation"] in (None, "none"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM for itself, and the run would not hear of it.
    jax.config.update("jax_enable_preemption_service", False)
    explicit: dict[str, Any] = {}
    if config.coordinator != "auto":
        explicit = {
            "coordinator_address": config.coordinator,
            "num_processes": config.num_processes,
            "process_id": config.process_id,
        }
        if config.process_id == LEADER:
            _check_port(config.coordinator)
    watch = threading.Timer(config.start_timeout_s, _give_up, [config])
    watch.daemon = True
    watch.start()
    try:
        jax.distributed.initialize(
            **explicit,
            initialization_timeout=config.start_timeout_s + _LATER_S,
            heartbeat_timeout_seconds=config.heartbeat_timeout_s,
            shutdown_timeout_seconds=config.heartbeat_timeout_s,
        )
    except (RuntimeError, ValueError) as problem:
        raise RunError(f"{_alone(config)} ({problem})") from problem
    finally:
        watch.cancel()
    return jax.process_count()


def _check_port(coordinator: str) -> None:
    """Whether this process can listen there: JAX ends with a segmentation fault where it can't."""
    port = int(coordinator.rpartition(":")[2])
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(("", port))
        except OSError as error:
            raise RunError(
                f"process 0 can't listen on port {port} of processes.coordinator {coordinator}: "
                f"{error.strerror}. Choose another port in every process, or end what listens there."
            ) from error


def _alone(config: ProcessConfig) -> str:
    which = (
        "this process"
        if config.coordinator == "auto"
        else f"process {config.process_id} of {config.num_processes}"
    )
    return (
        f"{which} couldn't join the others at {config.coordinator} within {config.start_timeout_s} s. Start "
        "all of them, each with a process_id of its own and the same processes.coordinator and "
        "num_processes, and look whether the address can be reached."
    )


def _give_up(config: ProcessConfig) -> None:
    """Ends this process: the call that waits for the others can't be interrupted."""
    sys.stderr.write(f"gymllm: {_alone(config)}\n")
    sys.stderr.flush()
    os._exit(1)


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


# ---------------------------------------------------------------------- messages


class Call(enum.Enum):
    """What the leader has every process do."""

    # The run's beginning.
    START = enum.auto()
    MODEL = enum.auto()
    LEARNER = enum.auto()
    AGREE = enum.auto()
    # The learner.
    COMPILE = enum.auto()
    COLLECT = enum.auto()
    SEQUENCES = enum.auto()
    COMPUTE = enum.auto()
    STEP = enum.auto()
    WEIGHTS = enum.auto()
    SERVING = enum.auto()
    POLICY = enum.auto()
    # Its checkpoints.
    SAVE = enum.auto()
    SAVED = enum.auto()
    # The processes themselves.
    PING = enum.auto()
    END = enum.auto()


@dataclass(frozen=True)
class Ending:
    """How the leader ended."""

    problem: str = ""
    """What broke; empty: nothing did."""
    interrupted: bool = False
    """Whether somebody stopped it."""


class Leader:
    """The leader's end of the line. Threads may share it: what all processes do, is done one by one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.lost = ""
        """What to say once another process is gone: nothing can be asked of them any more."""

    @contextlib.contextmanager
    def call(self, call: Call, argument: object = None) -> Iterator[None]:
        """Has the other processes do something, in which this one takes part in the block.

        Raises:
            RunError: One of them has died.
        """
        with self._lock:
            if self.lost:
                raise LostError(self.lost)
            try:
                with collective():
                    _send((call, argument))
                    yield
            except LostError as error:
                self.lost = str(error)
                raise

    def tell(self, call: Call, argument: object = None) -> None:
        """As `call`, where this process takes no part.

        Raises:
            RunError: A process has died.
        """
        with self.call(call, argument):
            pass

    def ping(self) -> None:
        """Looks whether the others are there, unless something is being done with them at this moment.

        Raises:
            RunError: One of them has died.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            self.tell(Call.PING)
        finally:
            self._lock.release()

    def agree(self, problem: str = "") -> None:
        """Hears whether any process has a problem; every process calls it.

        Raises:
            ConfigError: One has, or more; says which.
        """
        with self.call(Call.AGREE):
            agree(problem)

    def end(self, ending: Ending) -> None:
        """Lets the other processes go; does nothing if they are gone."""
        # A thread that Ctrl-C didn't wait for may still be in the middle of something.
        if self.lost or not self._lock.acquire(timeout=_END_PATIENCE_S):
            return
        try:
            self.tell(Call.END, ending)
        except RunError:
            return
        finally:
            self._lock.release()


def receive() -> tuple[Call, Any]:
    """What the leader has this process do next; it waits as long as there is nothing.

    Raises:
        RunError: The leader has died.
    """
    while True:
        with collective():
            payload = _broadcast(b"", is_source=False)
        # From the leader of the same run, which could run anything here anyway.
        call, argument = pickle.loads(payload)
        if call is not Call.PING:
            return call, argument


def agree(problem: str) -> None:
    """Hears whether any process has a problem; every process calls it, the leader by `Leader.agree`.

    Args:
        problem: This one's, one sentence or more; empty: none.

    Raises:
        ConfigError: One has, or more; says which.
    """
    said = np.zeros(_SAID_BYTES, np.uint8)
    text = np.frombuffer(problem.encode()[:_SAID_BYTES], np.uint8)
    said[: len(text)] = text
    with collective():
        heard = np.asarray(multihost_utils.process_allgather(said))
    problems = [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in heard]
    named = [f"process {number}: {each}" for number, each in enumerate(problems) if each]
    if named:
        raise ConfigError(" ".join(named))


def _send(message: tuple[Call, object]) -> None:
    _broadcast(pickle.dumps(message), is_source=True)


def _broadcast(payload: bytes, *, is_source: bool) -> bytes:
    """The source's payload, in every process.

    In pieces of two sizes, as each size is a program to compile: nearly every message is one small piece.
    """
    first = _LEAST_BYTES - _LENGTH.itemsize
    head = np.array([len(payload)], _LENGTH).tobytes() + payload[:first]
    heard = _broadcast_piece(head, _LEAST_BYTES, is_source=is_source)
    size = int(np.frombuffer(heard[: _LENGTH.itemsize], _LENGTH)[0])
    parts = [heard[_LENGTH.itemsize :]]
    for start in range(first, size, _MORE_BYTES):
        piece = payload[start : start + _MORE_BYTES]
        parts.append(_broadcast_piece(piece, _MORE_BYTES, is_source=is_source))
    return b"".join(parts)[:size]


def _broadcast_piece(piece: bytes, size: int, *, is_source: bool) -> bytes:
    padded = np.zeros(size, np.uint8)
    padded[: len(piece)] = np.frombuffer(piece, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(padded, is_source=is_source)).tobytes()


class LostError(RunError):
    """Another process has died, or can't be reached."""


@contextlib.contextmanager
def collective() -> Iterator[None]:
    """Says in words that another process has died, where a collective in the block needed it.

    Raises:
        LostError: One has.
    """
    try:
        yield
    # What XLA reports as unknown is a ValueError here.
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if not any(sign in str(error) for sign in _SIGNS_OF_DEATH):
            raise
        raise LostError(
            f"{_others()} died or can't be reached; this is process {jax.process_index()}. See its log, then "
            f"start all of them again with --resume. ({str(error).splitlines()[0][:200]})"
        ) from error


def _others() -> str:
    if not is_leader():
        return (
            f"process {LEADER}, which leads, or another of the {jax.process_count()} processes has"
        )
    return f"another of the {jax.process_count()} processes has"
