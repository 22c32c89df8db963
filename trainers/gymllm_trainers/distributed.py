"""One run in several processes: a learner that all of them hold parts of, and its checkpoints.

Process 0, the leader, plays the environments. Every call of its learner is made in the other processes too,
in the same order: the leader sends the call with its groups, and each process packs them itself, which gives
all the same micro-batches. Groups are a few bytes a token, so this is no traffic beside the gradient's.

When a process dies, the others end: at once where a collective needed it, else when the leader looks for it
or its heartbeat is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gymllm.errors import ModelError, RunError
from gymllm.trajectory import Group
from gymllm_trainers.checkpoint import Checkpointer, Json, PyTree
from gymllm_trainers.learner import Learner, LearnerState
from gymllm_trainers.models import Decoder
from gymllm_trainers.models.sharding import abstract_state
from gymllm_trainers.packing import TrainingSequence
from gymllm_trainers.processes import (
    PING_S,
    Call,
    Ending,
    Leader,
    LostError,
    collective,
    receive,
)
from gymllm_trainers.processes import ProcessConfig as ProcessConfig
from gymllm_trainers.processes import is_leader as is_leader
from gymllm_trainers.processes import join_processes as join_processes
from gymllm_trainers.run_folder import warn

Tree = Any
"""A pytree of arrays."""


class LeadingLearner:
    """The leader's learner: what is called of it happens in every process."""

    def __init__(self, learner: Learner, mesh: Mesh, leader: Leader | None = None) -> None:
        """Takes it over.

        Args:
            learner: This process's; the others have one of the same settings and weights, and call `follow`.
            mesh: Of the devices of all processes.
            leader: The line to them; None: a new one.
        """
        self.learner, self._mesh = learner, mesh
        self.leader = leader or Leader()
        self._places: dict[str, NamedSharding] = {}
        """Where each of the engine's parameters lies, by its path; empty: all on one device."""

    # ------------------------------------------------------------------ what happens everywhere

    def compile(self) -> None:
        """As `Learner.compile`."""
        with self.leader.call(Call.COMPILE):
            self.learner.compile()

    def add_group(self, group: Group) -> bool:
        """As `Learner.add_group`."""
        counts = self.collect(group)
        self.compute()
        return counts

    def collect(self, group: Group) -> bool:
        """As `Learner.collect`."""
        with self.leader.call(Call.COLLECT, group):
            return self.learner.collect(group)

    def add_sequences(self, sequences: Sequence[TrainingSequence]) -> None:
        """As `Learner.add_sequences`."""
        with self.leader.call(Call.SEQUENCES, list(sequences)):
            self.learner.add_sequences(sequences)

    def compute(self, *, flush: bool = False) -> None:
        """As `Learner.compute`."""
        with self.leader.call(Call.COMPUTE, flush):
            self.learner.compute(flush=flush)

    def step(self, *, flush: bool = True) -> dict[str, float]:
        """As `Learner.step`."""
        with self.leader.call(Call.STEP, flush):
            return self.learner.step(flush=flush)

    def weights(self) -> Tree:
        """As `Learner.weights`, on devices of this process: where `serving` put them last."""
        with self.leader.call(Call.WEIGHTS):
            return _gathered(self.learner.weights(), self._mesh, self._place)

    def serving(self, engine: Mesh | None = None) -> Decoder:
        """As `Learner.serving`, on devices of this process: what an engine here can take.

        Args:
            engine: Divided over these; None: whole on the first one.

        Raises:
            ModelError: It can't be divided like that.
        """
        decoder = self.learner.serving()
        # Before the others wait for a parameter.
        self._places = {} if engine is None else _places(decoder, engine)
        with self.leader.call(Call.SERVING):
            graph, state = nnx.split(decoder)
            return nnx.merge(graph, _gathered(state, self._mesh, self._place))

    def policy(self) -> Decoder:
        """As `Learner.policy`, in the host's memory."""
        host = jax.local_devices(backend="cpu")[0]
        with self.leader.call(Call.POLICY):
            graph, state = nnx.split(self.learner.policy())
            gathered = _gathered(
                state, self._mesh, lambda _, leaf: jax.device_put(np.asarray(leaf), host)
            )
            return nnx.merge(graph, gathered)

    def _place(self, path: str, leaf: jax.Array) -> jax.Array:
        return jax.device_put(leaf, self._places.get(path) or jax.local_devices()[0])

    def end(self) -> None:
        """Lets the other processes go."""
        self.leader.end(Ending())

    # ------------------------------------------------------------------ what is the same everywhere

    @property
    def mesh(self) -> Mesh:
        """As `Learner.mesh`."""
        return self._mesh

    @property
    def state(self) -> LearnerState:
        """As `Learner.state`."""
        return self.learner.state

    @property
    def version(self) -> int:
        """As `Learner.version`."""
        return self.learner.version

    @property
    def groups(self) -> int:
        """As `Learner.groups`."""
        return self.learner.groups

    @property
    def full_batches(self) -> int:
        """As `Learner.full_batches`."""
        return self.learner.full_batches

    @property
    def programs(self) -> list[str]:
        """As `Learner.programs`."""
        return self.learner.programs

    @property
    def predicted_bytes(self) -> Mapping[str, int]:
        """As `Learner.predicted_bytes`."""
        return self.learner.predicted_bytes


class LeadingCheckpointer:
    """The leader's checkpoints: every process writes its own shards, and reads them.

    Only of the learner's present state, or of the one before its last step.
    """

    def __init__(self, checkpoints: Checkpointer, leader: Leader) -> None:
        """Takes them over; the folder is one that every process sees."""
        self._checkpoints, self._leader = checkpoints, leader

    def save(
        self,
        step: int,
        arrays: Mapping[str, PyTree],
        state: Mapping[str, Json],
        *,
        metrics: Mapping[str, float] | None = None,
        files: Mapping[str, bytes] | None = None,
        wait: bool = True,
    ) -> Path:
        """As `Checkpointer.save`.

        Raises:
            RunError: As there; or a process has died.
        """
        try:
            self.wait()
        except LostError:
            raise
        except RunError as error:
            warn(str(error))
        # What can't even be begun, with the others or alone, is said before they wait for it.
        self._leader.tell(Call.PING)
        self._checkpoints.begin(step)
        with self._leader.call(Call.SAVE, step):
            path = self._checkpoints.save(
                step, arrays, state, metrics=metrics, files=files, wait=False
            )
        if wait:
            self.wait()
        return path

    def wait(self) -> None:
        """As `Checkpointer.wait`.

        Raises:
            RunError: As there; or a process has died.
        """
        # Writing ends when every process is done: it would wait long for one that has died.
        while self._checkpoints.is_writing(PING_S):
            self._leader.ping()
        if self._checkpoints.has_saved:
            with self._leader.call(Call.SAVED):
                self._checkpoints.wait()

    def close(self) -> None:
        """As `Checkpointer.close`."""
        self.wait()

    def latest(self) -> int | None:
        """As `Checkpointer.latest`."""
        return self._checkpoints.latest()

    def restore_state(self, step: int) -> dict[str, Json]:
        """As `Checkpointer.restore_state`."""
        return self._checkpoints.restore_state(step)

    def damaged(self, step: int, what: str) -> ModelError:
        """As `Checkpointer.damaged`."""
        return self._checkpoints.damaged(step, what)


def follow(learner: Learner, mesh: Mesh, checkpoints: Checkpointer | None = None) -> Ending:
    """Does what the leader does, until it ends; returns how it did. For every process but the leader.

    Args:
        learner: With the settings and weights of the leader's.
        mesh: Of the devices of all processes.
        checkpoints: Where the leader's are, if it saves any.

    Raises:
        RunError: The leader, or another process, has died.
    """
    before: LearnerState | None = None
    while True:
        call, argument = receive()
        if call in (Call.COLLECT, Call.SEQUENCES, Call.COMPUTE):
            before = None  # the step is over for good
        with collective():
            match call:
                case Call.COMPILE:
                    learner.compile()
                case Call.COLLECT:
                    learner.collect(argument)
                case Call.SEQUENCES:
                    learner.add_sequences(argument)
                case Call.COMPUTE:
                    learner.compute(flush=argument)
                case Call.STEP:
                    before = learner.state
                    learner.step(flush=argument)
                case Call.WEIGHTS:
                    _gathered(learner.weights(), mesh, _nothing)
                case Call.SERVING:
                    _gathered(nnx.split(learner.serving())[1], mesh, _nothing)
                case Call.POLICY:
                    _gathered(nnx.split(learner.policy())[1], mesh, _nothing)
                case Call.SAVE if checkpoints is not None:
                    # At Ctrl-C the leader saves what its last whole step left.
                    late = before is not None and before.version == argument
                    state = before if late and before is not None else learner.state
                    checkpoints.save(argument, state.arrays, {}, wait=False)
                case Call.SAVED if checkpoints is not None:
                    _wait(checkpoints)
                case Call.END:
                    return argument
                case _:
                    raise AssertionError(f"{call} comes before a process follows")


def _wait(checkpoints: Checkpointer) -> None:
    try:
        checkpoints.wait()
    except RunError as error:
        warn(str(error))  # whether the run goes on is the leader's to say


def _gathered(tree: Tree, mesh: Mesh, keep: Callable[[str, jax.Array], jax.Array | None]) -> Tree:
    """What `keep` makes of each parameter, given its path and all of it on one device.

    One after the other, so that no device must hold the whole model. Every process calls it.
    """
    # A program rather than device_put, which moves nothing between processes on a CPU.
    program = jax.jit(_same, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def fetch(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array | None:
        with jax.set_mesh(mesh):
            whole = program(leaf)
        kept = keep(jax.tree_util.keystr(path), whole.addressable_data(0))
        # The next one is begun when this one's memory can be had again.
        jax.block_until_ready((whole, kept))
        return kept

    return jax.tree_util.tree_map_with_path(fetch, tree)


def _nothing(path: str, leaf: jax.Array) -> None:
    """What a process without an engine keeps."""


def _places(decoder: Decoder, mesh: Mesh) -> dict[str, NamedSharding]:
    there = jax.tree_util.tree_leaves_with_path(abstract_state(decoder, mesh))
    return {jax.tree_util.keystr(path): leaf.sharding for path, leaf in there}


def _same(leaf: jax.Array) -> jax.Array:
    return leaf
