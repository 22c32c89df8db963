"""The learner: gradients accumulated as groups arrive, optimizer steps when a batch is whole.

The gradient that is accumulated is *unnormalised* (a sum over tokens) and so is the count; they are
divided once, at the step. So streaming, one batch, any micro-batch split and any packing give the same
parameters. Groups wait for the whole batch only where the algorithm needs all of it: an advantage that
compares groups, values, or several optimizer steps on one batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from gymllm.errors import ConfigError
from gymllm.trajectory import Group
from gymllm_trainers.algorithms.aggregation import divisor
from gymllm_trainers.algorithms.config import AlgorithmConfig
from gymllm_trainers.algorithms.diagnostics import PolicySums, finish, merge
from gymllm_trainers.algorithms.resolve import resolve
from gymllm_trainers.learner.compiled import Compiled
from gymllm_trainers.learner.config import LearnerConfig
from gymllm_trainers.learner.metrics import Counts, Packing
from gymllm_trainers.learner.programs import Scored, Trained, Tree
from gymllm_trainers.learner.reader import GroupReader, Prepared, ReadGroup
from gymllm_trainers.learner.values import ValueBook
from gymllm_trainers.mesh import place_whole, row_parts, rows_for
from gymllm_trainers.models.decoder import Decoder, LoRAParam, merge_adapters
from gymllm_trainers.models.value import ValueHead
from gymllm_trainers.optimizer import OptimizerConfig, make_optimizer
from gymllm_trainers.packing import PackedBatch, Packer, TrainingSequence, smaller_shapes


class LearnerState(NamedTuple):
    """Everything that changes at a step, replaced as one: another thread sees all of it or none."""

    trainable: Tree
    """The policy's parameters that are trained."""
    optimizer: Tree
    version: int
    """Batches trained on: the policy version of `trainable`."""
    value: Tree = None
    """The value head's parameters, where there is one."""

    @property
    def arrays(self) -> dict[str, Tree]:
        """What a checkpoint holds of it, by name."""
        arrays = {"trainable": self.trainable, "optimizer": self.optimizer}
        return arrays if self.value is None else arrays | {"value": self.value}

    @staticmethod
    def of(arrays: Mapping[str, Tree], version: int) -> LearnerState:
        """The state that `arrays` were taken from."""
        return LearnerState(arrays["trainable"], arrays["optimizer"], version, arrays.get("value"))


class _Part(NamedTuple):
    """What one optimizer step is taken on."""

    batches: list[PackedBatch]
    scored: list[Scored]
    trajectories: int
    """Those with a trained token."""


class Learner:
    """Owns the policy's parameters. One caller at a time; not thread-safe."""

    def __init__(
        self,
        decoder: Decoder,
        config: LearnerConfig,
        *,
        algorithm: AlgorithmConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        row_tokens: int,
        temperature: float,
        max_lag: int,
        context_length: int | None = None,
        total_steps: int | None = None,
        mesh: Mesh | None = None,
        seed: int = 0,
    ) -> None:
        """Takes the decoder over.

        Args:
            decoder: The policy, laid out on the mesh; with adapters, only they are trained.
            config: What a batch is and how it is computed.
            algorithm: How rewards become a gradient; None: the defaults.
            optimizer: How the gradient becomes new parameters; None: the defaults.
            row_tokens: Tokens of a row; the longest sequence that can be trained on.
            temperature: The temperature that trajectories are sampled at.
            max_lag: Oldest token that is trained on, in policy versions behind the current one.
            context_length: Longest sequence there may be, in tokens; None: `row_tokens`.
            total_steps: Batches of the whole run, over which the learning rate falls; None keeps it.
            mesh: Devices that the training is divided over; None: one.
            seed: Decides which groups make a mini-batch.

        Raises:
            ConfigError: The temperature is 0, or settings don't go together.
        """
        if not temperature > 0:
            raise ConfigError(
                f"agent.temperature must be > 0 for training, which needs chance to learn from, got "
                f"{temperature:g}."
            )
        self.config, self._mesh, self._seed = config, mesh, seed
        self.algorithm = resolve(algorithm or AlgorithmConfig(), updates=config.updates)
        self._reader = GroupReader(
            self.algorithm, max_lag=max_lag, longest=context_length or row_tokens
        )
        self._packer = self._new_packer(row_tokens)
        self._full: list[PackedBatch] = []
        kind = LoRAParam if decoder.adapters is not None else nnx.Param
        self._graph, policy, self._frozen = nnx.split(decoder, kind, ...)
        value_graph = value = None
        if self.algorithm.needs_values:
            value_graph, value = nnx.split(ValueHead(decoder.config.hidden_size))
            value = place_whole(value, mesh)
        steps = None if total_steps is None else total_steps * config.updates
        trained = Trained(policy, value)
        self._compiled = Compiled(
            self._graph,
            value_graph,
            trained,
            self._frozen,
            config=config,
            algorithm=self.algorithm,
            optimizer=make_optimizer(optimizer or OptimizerConfig(), steps),
            temperature=temperature,
            shapes=self._packer.shapes,
            longest=context_length or row_tokens,
            mesh=mesh,
        )
        optimizer_state, self._gradient = self._compiled.begin()
        self.state = LearnerState(policy, optimizer_state, 0, value)
        self._begin_batch()

    # ------------------------------------------------------------------ what the run calls

    def compile(self) -> None:
        """Compiles everything that a run calls, so that no step is slower for it.

        Raises:
            RunError: A device's memory is too small; says what to change.
        """
        self._compiled.compile(self._trained, self.state.optimizer, self._gradient)

    @property
    def programs(self) -> list[str]:
        """Names of what `compile` compiles."""
        return self._compiled.names

    @property
    def keeps_reference(self) -> bool:
        """Whether a frozen copy of the weights is kept; with adapters, the base is the reference."""
        return self._compiled.keeps_reference

    @property
    def predicted_bytes(self) -> Mapping[str, int]:
        """Bytes on each device that compiled programs need, by the program's name; where it is known."""
        return self._compiled.predicted

    def add_group(self, group: Group) -> bool:
        """Adds a group to the next step; whether it counts towards `groups_per_step`."""
        counts = self.collect(group)
        self.compute()
        return counts

    def collect(self, group: Group) -> bool:
        """As `add_group`, but the gradient of micro-batches that are full waits for `compute`."""
        read = self._reader.read(group, version=self.version)
        self._counts.zero_variance += read.flat
        if read.flat and self.algorithm.zero_variance == "refill":
            return False
        self._reader.count(read, self._counts)
        self._waiting.append(read)
        if not self._waits_for_all:
            self._pack_waiting()
        return True

    def add_sequences(self, sequences: Sequence[TrainingSequence]) -> None:
        """Adds sequences to the next step, each as a trajectory of its own; computes the gradient of each
        micro-batch that this fills.

        Raises:
            ConfigError: The algorithm needs whole groups: values, or several steps on a batch.
        """
        if self._makes_parts:
            raise ConfigError(
                f"sequences alone are trained on in one step and without values, but learner.epochs x "
                f"learner.mini_batches is {self.config.updates} and algorithm.advantage "
                f"{self.algorithm.advantage}: set these to 1, and another advantage, or add groups."
            )
        self._trajectories += len(sequences)
        self._full += self._packer.add(sequences)
        self.compute()

    def compute(self, *, flush: bool = False) -> None:
        """Computes the gradient of each micro-batch that is full; with `flush`, of what is left too, as no
        group is still to come."""
        if flush:
            if not self._makes_parts:
                self._pack_waiting()
            self._full += self._packer.flush()
        while self._full:
            batch = self._full.pop(0)
            self._add_gradient(batch, self._score(batch))

    @property
    def full_batches(self) -> int:
        """Micro-batches that are full and wait for `compute`."""
        return len(self._full)

    @property
    def mesh(self) -> Mesh | None:
        """Devices that the training is divided over; None: one."""
        return self._mesh

    @property
    def version(self) -> int:
        """Policy version: batches trained on."""
        return self.state.version

    @property
    def groups(self) -> int:
        """Groups that count towards the next step."""
        return self._counts.groups

    @property
    def micro_batches(self) -> int:
        """Micro-batches whose gradient is in the next step already."""
        return len(self._sums)

    def step(self, *, flush: bool = True) -> dict[str, float]:
        """Takes the batch's optimizer steps; returns its metrics and starts the next at version + 1.

        Args:
            flush: Whether sequences that don't fill a micro-batch are part of it; else they wait for
                the next step, and nothing is padded for them.
        """
        self.compute(flush=flush)
        if self._makes_parts and self._waiting:
            for part in self._parts():
                for batch, scored in zip(part.batches, part.scored, strict=True):
                    self._add_gradient(batch, scored)
                self._apply(part.trajectories)
        else:
            self._apply(self._trajectories)
        self.state = self.state._replace(version=self.version + 1)
        metrics = self._metrics()
        self._begin_batch()
        return metrics

    def weights(self) -> Tree:
        """What changed since the start, to publish to an engine that serves `serving()`: all parameters, or
        with adapters them alone. The learner's own arrays, which no later step writes to."""
        return self.state.trainable

    def serving(self) -> Decoder:
        """The policy as an engine takes it, adapters beside the base; its arrays are the learner's own."""
        return nnx.merge(self._graph, self.state.trainable, self._frozen)

    def policy(self) -> Decoder:
        """The policy as a decoder without adapters: they are merged into a copy."""
        graph, _ = nnx.split(jax.eval_shape(merge_adapters, self.serving()))
        return nnx.merge(graph, self._compiled.merge(self.state.trainable))

    # ------------------------------------------------------------------ a batch

    @property
    def _trained(self) -> Trained:
        return Trained(self.state.trainable, self.state.value)

    @property
    def _makes_parts(self) -> bool:
        """Whether a batch is scored as a whole before any step is taken on it."""
        return self.config.updates > 1 or self.algorithm.needs_values

    @property
    def _waits_for_all(self) -> bool:
        """Whether groups wait until their batch is whole."""
        return self._makes_parts or self.config.deterministic or self._reader.compares_groups

    def _begin_batch(self) -> None:
        self._counts, self._packing = Counts(), Packing()
        self._sums: list[PolicySums] = []
        self._norms: list[float] = []
        self._divisor = 0.0
        self._targets = 0.0
        self._trajectories = 0
        self._waiting: list[ReadGroup] = []

    def _prepared(self) -> list[Prepared]:
        """The waiting groups' sequences; nothing waits then."""
        waiting, self._waiting = self._waiting, []
        if self.config.deterministic:
            waiting.sort(key=lambda read: (read.group.task.index, read.group.agent))
        return self._reader.prepare(waiting)

    def _pack_waiting(self) -> None:
        for prepared in self._prepared():
            self._trajectories += prepared.trajectories
            self._full += self._packer.add(prepared.sequences)

    def _parts(self) -> Iterator[_Part]:
        """What each optimizer step on the waiting groups is taken on, pass after pass, with what is known of
        each target at the start of the update."""
        random = np.random.default_rng((self._seed, self.version))
        prepared = self._prepared()
        book = ValueBook(self.algorithm, prepared) if self.algorithm.needs_values else None
        order = np.arange(len(prepared))
        if self.config.mini_batches > 1:
            order = random.permutation(len(prepared))
        parts: list[_Part] = []
        for numbers in np.array_split(order, self.config.mini_batches):
            packer = self._new_packer(self._packer.shapes[0][1])
            chosen = [prepared[number] for number in numbers]
            batches = [
                batch
                for each in chosen
                for batch in packer.add(each.sequences if book is None else book.numbered(each))
            ]
            batches += packer.flush()
            scored = [self._score(batch) for batch in batches]
            parts.append(_Part(batches, scored, sum(each.trajectories for each in chosen)))
        if book is not None:
            parts = _with_advantages(book, parts)
        for _ in range(self.config.epochs):
            for number in random.permutation(len(parts)) if len(parts) > 1 else (0,):
                yield parts[number]

    def _new_packer(self, row_tokens: int) -> Packer:
        config, parts = self.config, row_parts(self._mesh)
        rows = rows_for(self._mesh, config.rows)
        return Packer(
            rows=rows,
            length=row_tokens,
            share=config.share_prefixes,
            smaller=smaller_shapes(
                rows, row_tokens, row_multiple=parts, count=config.smaller_shapes
            ),
            parts=parts,
        )

    def _score(self, batch: PackedBatch) -> Scored:
        """What the loss needs to know of each target beforehand; mostly nothing."""
        return self._compiled.score(self._trained, batch)

    def _add_gradient(self, batch: PackedBatch, scored: Scored) -> None:
        self._packing.add(batch)
        self._targets += batch.trained
        self._gradient, sums = self._compiled.gradient(self._trained, self._gradient, batch, scored)
        self._sums.append(sums)

    def _apply(self, trajectories: int) -> None:
        """One optimizer step with the gradient so far."""
        algorithm = self.algorithm
        count = divisor(
            algorithm.aggregation,
            tokens=self._targets,
            trajectories=trajectories,
            constant_tokens=algorithm.aggregation_tokens or self._reader.longest,
        )
        trained, optimizer, self._gradient, norm = self._compiled.step(
            self._trained, self.state.optimizer, self._gradient, count
        )
        self.state = self.state._replace(
            trainable=trained.policy, optimizer=optimizer, value=trained.value
        )
        self._norms.append(norm)
        self._divisor += count
        self._targets = 0.0

    def _metrics(self) -> dict[str, float]:
        always = {
            "gradient_norm": float(np.mean(self._norms)),
            "zero_variance_groups": float(self._counts.zero_variance),
        }
        if not self._sums:
            return always
        found = finish(merge(jax.device_get(self._sums)), divisor=self._divisor)
        # Lags are of all tokens that were generated, those too old to be trained on included.
        return found | self._packing.metrics() | self._counts.metrics() | always


def _with_advantages(book: ValueBook, parts: list[_Part]) -> list[_Part]:
    batches, scored = book.with_advantages(
        [batch for part in parts for batch in part.batches],
        [known for part in parts for known in part.scored],
    )
    found: list[_Part] = []
    for part in parts:
        count = len(part.batches)
        found.append(part._replace(batches=batches[:count], scored=scored[:count]))
        batches, scored = batches[count:], scored[count:]
    return found
