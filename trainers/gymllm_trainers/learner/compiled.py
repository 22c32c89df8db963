"""The learner's programs as they are called: jitted or compiled ahead, on the mesh, with errors in words.

Where a program runs out of memory, the error names the settings to change and values that fit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from gymllm.errors import RunError
from gymllm_trainers.algorithms.algorithm import Algorithm
from gymllm_trainers.algorithms.diagnostics import PolicySums
from gymllm_trainers.compilation import compile_ahead
from gymllm_trainers.learner.config import LearnerConfig
from gymllm_trainers.learner.memory import (
    Layout,
    device_limit_bytes,
    held_bytes,
    is_out_of_memory,
    out_of_memory,
    predicted_bytes,
)
from gymllm_trainers.learner.programs import (
    FloatArray,
    Programs,
    Scored,
    Scores,
    Trained,
    Tree,
)
from gymllm_trainers.mesh import abstract_batch, init_like, layout_of, on_mesh, put_batch, row_parts
from gymllm_trainers.models.decoder import Decoder
from gymllm_trainers.models.value import ValueHead
from gymllm_trainers.packing import PackedBatch, pack_rows

Program = Any
"""What `jax.jit` or `compile_ahead` returned."""
Shape = tuple[int, int]
"""Rows and tokens of a micro-batch."""


class Stepped(NamedTuple):
    """What an optimizer step gives."""

    trained: Trained
    optimizer: Tree
    gradient: Tree
    """Zeros."""
    norm: float
    """Of the gradient, before any clipping."""


class Compiled:
    """Calls the learner's programs. Which passes a micro-batch takes, and so whether a reference is kept, is
    the algorithm's."""

    def __init__(
        self,
        graph: nnx.GraphDef[Decoder],
        value_graph: nnx.GraphDef[ValueHead] | None,
        start: Trained,
        frozen: Tree,
        *,
        config: LearnerConfig,
        algorithm: Algorithm,
        optimizer: optax.GradientTransformation,
        temperature: float,
        shapes: Sequence[Shape],
        longest: int,
        mesh: Mesh | None,
    ) -> None:
        """Says what of; nothing is compiled before it is called or `compile` is.

        Args:
            graph: The decoder without its parameters.
            value_graph: The value head without its parameters, where there is one.
            start: The parameters that are trained, as they are at the run's start: the reference, where the
                algorithm has one.
            frozen: The decoder's other parameters.
            config: How much is computed at once.
            algorithm: The loss.
            optimizer: Makes steps.
            temperature: That trajectories are sampled at.
            shapes: Of micro-batches, the usual one first.
            longest: Tokens of the longest sequence there may be: rows can't be shorter.
            mesh: Devices that all of this is divided over; None: one.
        """
        self._graph, self._value_graph, self._frozen = graph, value_graph, frozen
        self._config, self._algorithm, self._optimizer = config, algorithm, optimizer
        self._temperature, self._shapes, self._mesh = temperature, list(shapes), mesh
        self._longest = longest
        decoder = nnx.merge(graph, start.policy, frozen)
        self._adapts = decoder.adapters is not None
        self._layout = Layout(rows=shapes[0][0], row_tokens=shapes[0][1], remat=decoder.remat)
        programs = self._programs_of(graph)
        self._reference = self._start_as_reference(start)
        optimizer_state = init_like(programs.init, start, mesh)
        gradient = init_like(_zeros, start, mesh)
        self._beginning: list[Tree] = [optimizer_state, gradient]
        arrays = (start, frozen, gradient)
        self._held = held_bytes(arrays)
        self._arguments = jax.tree.map(_abstract, arrays)
        """Of the gradient's program, for compiling it for other micro-batches."""
        gradient_layout = step_layout = None  # left to XLA
        if mesh is not None:
            zeros, state = layout_of(gradient), layout_of(optimizer_state)
            gradient_layout, step_layout = (zeros, None), (layout_of(start), state, zeros, None)
        self._gradient: Program = jax.jit(
            programs.gradient, donate_argnums=(2,), out_shardings=gradient_layout
        )
        # The optimizer's state is not donated: a checkpoint may be taken of it at any moment.
        self._step: Program = jax.jit(programs.step, donate_argnums=(2,), out_shardings=step_layout)
        self._score: Program = jax.jit(programs.score)
        self._refer: Program = jax.jit(programs.score_base if self._adapts else programs.score)
        self._merge: Program = jax.jit(
            programs.merge
        )  # compiled at its first call, at the run's end
        self._gradients: dict[Shape, Program] = {}
        self._scores: dict[Shape, Program] = {}
        self._references: dict[Shape, Program] = {}
        self.predicted: dict[str, int] = {}
        """Bytes on each device that compiled programs need, by name."""

    @property
    def names(self) -> list[str]:
        """What `compile` compiles."""
        found = ["learner gradient", "learner step"]
        found += ["learner score"] if self._scores_current else []
        return found + (["learner reference"] if self._algorithm.needs_reference else [])

    @property
    def keeps_reference(self) -> bool:
        """Whether a frozen copy of the weights is kept."""
        return self._reference is not None

    def begin(self) -> tuple[Tree, Tree]:
        """The optimizer's state before any step, and a gradient of zeros. Handed over: call it once."""
        optimizer_state, gradient = self._beginning
        self._beginning.clear()
        return optimizer_state, gradient

    def compile(self, trained: Trained, optimizer: Tree, gradient: Tree) -> None:
        """Compiles everything ahead, for arrays of these shapes.

        Raises:
            RunError: A device's memory is too small for it; says what to change.
        """
        frozen = self._frozen
        with self._guarded():
            for shape in self._shapes:
                batch, scored = self._empty(shape), self._no_scores(shape)
                self._gradients[shape] = compile_ahead(
                    self._gradient, trained, frozen, gradient, batch, scored
                )
                if self._scores_current:
                    self._scores[shape] = compile_ahead(self._score, trained, frozen, batch)
                if self._algorithm.needs_reference:
                    alone = trained._replace(value=None)
                    self._references[shape] = compile_ahead(self._refer, alone, frozen, batch)
            self._step = compile_ahead(self._step, trained, optimizer, gradient, np.float32(1))
        for name, program in (("gradient", self._gradients[self._shapes[0]]), ("step", self._step)):
            needed = predicted_bytes(program)
            if needed is not None:
                self.predicted[name] = needed
        limit = device_limit_bytes(held=self._held)
        if limit is not None and self.predicted.get("gradient", 0) > limit:
            raise self._out_of_memory()

    def score(self, trained: Trained, batch: PackedBatch) -> Scored:
        """What the loss needs to know of each target beforehand; no pass is made where it needs nothing."""
        if not (self._scores_current or self._algorithm.needs_reference):
            return Scored()
        shape = batch.ids.shape
        proximal = reference = value = None
        with self._guarded():
            placed = put_batch(batch, self._mesh)
            if self._scores_current:
                score = self._scores.get(shape, self._score)
                current: Scores = score(trained, self._frozen, placed)
                value = None if current.value is None else _on_host(current.value)
                if self._algorithm.needs_proximal:
                    proximal = _on_host(current.logprob)
            if self._algorithm.needs_reference:
                refer = self._references.get(shape, self._refer)
                policy = self._reference_policy(trained)
                reference = _on_host(refer(policy, self._frozen, placed).logprob)
        return Scored(proximal=proximal, reference=reference, value=value)

    def gradient(
        self, trained: Trained, gradient: Tree, batch: PackedBatch, scored: Scored
    ) -> tuple[Tree, PolicySums]:
        """Adds a micro-batch's gradient to `gradient`, which can't be used any more; waits for it."""
        program = self._gradients.get(batch.ids.shape, self._gradient)
        with self._guarded():
            placed, known = put_batch((batch, scored), self._mesh)
            gradient, sums = program(trained, self._frozen, gradient, placed, known)
            # Wait here: a caller's clock says "gradient" then, and no more than one batch is in memory.
            jax.block_until_ready(sums)
        return gradient, sums

    def step(self, trained: Trained, optimizer: Tree, gradient: Tree, divisor: float) -> Stepped:
        """One optimizer step with gradient / divisor; `gradient` can't be used any more."""
        with self._guarded():
            after, state, zeros, norm = self._step(
                trained, optimizer, gradient, np.float32(divisor)
            )
            return Stepped(after, state, zeros, float(norm))

    def merge(self, policy: Tree) -> Tree:
        """The decoder's parameters with adapters folded in."""
        with self._guarded():
            return self._merge(policy, self._frozen)

    # ------------------------------------------------------------------ how they are made

    @property
    def _scores_current(self) -> bool:
        return self._algorithm.needs_proximal or self._algorithm.needs_values

    def _programs_of(self, graph: nnx.GraphDef[Decoder]) -> Programs:
        return Programs(
            graph,
            value_graph=self._value_graph,
            algorithm=self._algorithm,
            optimizer=self._optimizer,
            temperature=self._temperature,
            head_chunk=self._config.head_chunk,
            branched=self._config.share_prefixes,
        )

    def _start_as_reference(self, start: Trained) -> Trained | None:
        """The frozen weights that the KL divergence is to; with adapters, the base is there already."""
        if not self._algorithm.needs_reference or self._adapts:
            return None
        # Steps make new arrays and leave these alone, so this is no copy until the first of them.
        policy = Trained(start.policy)
        return jax.device_get(policy) if self._config.reference_on_host else policy

    def _reference_policy(self, trained: Trained) -> Trained:
        """The reference's parameters on the device; those in the host's memory go there for this one use."""
        if self._reference is None:
            return trained._replace(value=None)
        if not self._config.reference_on_host:
            return self._reference
        alone = trained._replace(value=None)
        return jax.tree.map(
            lambda x, like: jax.device_put(x, like.sharding), self._reference, alone
        )

    def _empty(self, shape: Shape) -> PackedBatch:
        rows, length = shape
        return abstract_batch(pack_rows([[]] * rows, length=length), self._mesh)

    def _no_scores(self, shape: Shape) -> Scored:
        """What a `Scored` of this algorithm looks like."""
        algorithm = self._algorithm

        def known(wanted: bool) -> np.ndarray | None:
            return np.zeros(shape, np.float32) if wanted else None

        scored = Scored(
            proximal=known(algorithm.needs_proximal),
            reference=known(algorithm.needs_reference),
            value=known(algorithm.needs_values),
            returns=known(algorithm.needs_values),
        )
        return abstract_batch(scored, self._mesh)

    # ------------------------------------------------------------------ memory

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """On the mesh; and out of memory is an error in words."""
        try:
            with on_mesh(self._mesh):
                yield
        except jax.errors.JaxRuntimeError as error:
            if is_out_of_memory(error):
                raise self._out_of_memory() from error
            raise

    def gradient_bytes(self, layout: Layout) -> int | None:
        """Bytes on each device that the gradient of such a micro-batch needs: it is compiled, not run."""
        trained, frozen, gradient = self._arguments
        decoder = nnx.merge(self._graph, trained.policy, frozen)
        decoder.remat = layout.remat
        programs = self._programs_of(nnx.graphdef(decoder))
        shape = (layout.rows, layout.row_tokens)
        batch, scored = self._empty(shape), self._no_scores(shape)
        program = jax.jit(programs.gradient, donate_argnums=(2,))
        try:
            with on_mesh(self._mesh):
                compiled = compile_ahead(program, trained, frozen, gradient, batch, scored)
        except jax.errors.JaxRuntimeError as error:
            if is_out_of_memory(error):
                return None
            raise
        return predicted_bytes(compiled)

    def _out_of_memory(self) -> RunError:
        return out_of_memory(
            self._layout,
            self.gradient_bytes,
            least_row_tokens=self._longest,
            rows_of=row_parts(self._mesh),
            limit=device_limit_bytes(held=self._held),
        )


def _on_host(array: jax.Array) -> FloatArray:
    """All of an array, wherever it lies; every process has the whole of it then."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def _zeros(tree: Trained) -> Trained:
    return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype=jnp.float32), tree)


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
