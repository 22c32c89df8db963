"""What the learner compiles: scoring, the gradient of a micro-batch, the optimizer's step.

Axes: B rows, T tokens or targets of a row, D model, N all targets of a micro-batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from flax import nnx
from jax import Array

from gymllm_trainers.algorithms.algorithm import Algorithm
from gymllm_trainers.algorithms.diagnostics import PolicySums
from gymllm_trainers.algorithms.objective import Targets, objective
from gymllm_trainers.models.decoder import Decoder, merge_adapters
from gymllm_trainers.models.logprob_head import token_statistics
from gymllm_trainers.models.value import ValueHead
from gymllm_trainers.packing import PackedBatch

Tree = Any
"""A pytree of arrays: JAX's own functions say no more of it."""
FloatArray = npt.NDArray[np.float32]


class Trained(NamedTuple):
    """What the optimizer changes."""

    policy: Tree
    value: Tree = None
    """The value head's parameters, where there is one."""


class Scored(NamedTuple):
    """What is known of each target beside its `PackedBatch`, float32 [B, T]; None: the loss needs none."""

    proximal: FloatArray | None = None
    """Log-probability (nats) under the policy at the start of the update."""
    reference: FloatArray | None = None
    """... under the reference."""
    value: FloatArray | None = None
    """Value of the state that the token was chosen in, at the start of the update."""
    returns: FloatArray | None = None
    """What that value should have been."""


class Scores(NamedTuple):
    """What one forward pass says of each target, float32 [B, T]; 0 where there is none."""

    logprob: Array
    value: Array | None


class _Statistics(NamedTuple):
    """Of each target, float32 [B, T]."""

    logprob: Array
    entropy: Array
    value: Array | None


class Programs:
    """Pure functions of arrays, to be compiled."""

    def __init__(
        self,
        graph: nnx.GraphDef[Decoder],
        *,
        value_graph: nnx.GraphDef[ValueHead] | None,
        algorithm: Algorithm,
        optimizer: optax.GradientTransformation,
        temperature: float,
        head_chunk: int,
        branched: bool = True,
    ) -> None:
        """Says what of.

        Args:
            graph: The decoder without its parameters.
            value_graph: The value head without its parameters, where there is one.
            algorithm: The loss.
            optimizer: Of `Trained`, or of its policy alone where there is no value head.
            temperature: The temperature that trajectories are sampled at.
            head_chunk: Tokens whose logits are held at once.
            branched: Whether rows may hold trees with branches.
        """
        self._branched = branched
        self._graph, self._value_graph = graph, value_graph
        self._algorithm, self._optimizer = algorithm, optimizer
        self._temperature, self._head_chunk = temperature, head_chunk

    def score(self, trained: Trained, frozen: Tree, batch: PackedBatch) -> Scores:
        """Log-probability and, with a value head, value of each target; nothing is differentiated."""
        statistics = self._statistics(
            nnx.merge(self._graph, trained.policy, frozen), trained, batch
        )
        return Scores(statistics.logprob, statistics.value)

    def score_base(self, trained: Trained, frozen: Tree, batch: PackedBatch) -> Scores:
        """As `score`, without the decoder's adapters: what the policy was before any training."""
        decoder = nnx.merge(self._graph, trained.policy, frozen)
        decoder.adapters = None
        return Scores(self._statistics(decoder, trained._replace(value=None), batch).logprob, None)

    def gradient(
        self, trained: Trained, frozen: Tree, gradient: Tree, batch: PackedBatch, scored: Scored
    ) -> tuple[Tree, PolicySums]:
        """Adds a micro-batch's unnormalised gradient to `gradient`, float32; and what it says of itself."""
        part, sums = jax.grad(self._loss, has_aux=True)(trained, frozen, batch, scored)
        added = jax.tree.map(lambda total, leaf: total + leaf.astype(jnp.float32), gradient, part)
        return added, cast("PolicySums", sums)

    def step(
        self, trained: Trained, optimizer: Tree, gradient: Tree, divisor: Array
    ) -> tuple[Trained, Tree, Tree, Array]:
        """One step with gradient / divisor.

        Returns:
            The new parameters, the optimizer's new state, a gradient of zeros, and the norm before any
            clipping.
        """
        mean = jax.tree.map(lambda leaf: leaf / divisor, gradient)
        norm = optax.tree.norm(mean)
        updates, optimizer = self._optimizer.update(
            _optimized(mean), optimizer, _optimized(trained)
        )
        if trained.value is not None:
            rate = self._algorithm.value_rate
            of_value = jax.tree.map(lambda leaf: rate * leaf, cast("Trained", updates).value)
            updates = cast("Trained", updates)._replace(value=of_value)
        after = optax.apply_updates(_optimized(trained), updates)
        trained = Trained(after) if trained.value is None else cast("Trained", after)
        return trained, optimizer, jax.tree.map(jnp.zeros_like, gradient), norm

    def init(self, trained: Trained) -> Tree:
        """The optimizer's first state. Moments are float32 whatever the weights are, as the gradient is: an
        optimizer gives back what it is given."""
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), _optimized(trained))
        return self._optimizer.init(wide)

    def merge(self, policy: Tree, frozen: Tree) -> Tree:
        """The decoder's parameters with the adapters folded into the kernels."""
        return nnx.state(merge_adapters(nnx.merge(self._graph, policy, frozen)))

    def _loss(
        self, trained: Trained, frozen: Tree, batch: PackedBatch, scored: Scored
    ) -> tuple[Array, PolicySums]:
        decoder = nnx.merge(self._graph, trained.policy, frozen)
        statistics = self._statistics(decoder, trained, batch)
        rows, width = batch.ids.shape
        # A row has at most as many sequences as targets.
        sequence = batch.sequence + jnp.arange(rows, dtype=jnp.int32)[:, None] * width

        def flat(of_targets: Array | FloatArray) -> Array:
            return jnp.asarray(of_targets).reshape(-1)

        def known(of_targets: Array | FloatArray | None) -> Array | None:
            return None if of_targets is None else flat(of_targets)

        targets = Targets(
            logprob=flat(statistics.logprob),
            entropy=flat(statistics.entropy),
            behaviour=flat(batch.behaviour),
            advantage=flat(batch.advantage),
            weight=flat(batch.weight),
            mask=flat(batch.mask),
            age=flat(batch.age),
            sequence=flat(sequence),
            proximal=known(scored.proximal),
            reference=known(scored.reference),
            value=known(statistics.value),
            old_value=known(scored.value),
            returns=known(scored.returns),
        )
        found = objective(self._algorithm, targets, sequences=rows * width)
        return found.loss, found.sums

    def _statistics(self, decoder: Decoder, trained: Trained, batch: PackedBatch) -> _Statistics:
        ids, parent, node, wanted = map(
            jnp.asarray, (batch.ids, batch.parent, batch.node, batch.wanted)
        )
        positions, ends = jnp.asarray(batch.positions), jnp.asarray(batch.ends)
        hidden = decoder.hidden(ids, positions, ends, branched=self._branched)
        # A token is predicted from the one before it, which in a tree is not always its neighbour.
        before = jnp.take_along_axis(hidden, parent[..., None], axis=1)
        tied = decoder.config.tie_word_embeddings
        found = token_statistics(
            before.reshape(-1, before.shape[-1]),
            (decoder.embedding if tied else decoder.head)[...],
            ids.reshape(-1),
            wanted.reshape(-1),
            tied=tied,
            temperature=self._temperature,
            softcap=decoder.config.final_softcap,
            chunk=self._head_chunk,
            entropy_gradient=self._algorithm.entropy_coef > 0,
        )

        def of_targets(of_tokens: Array) -> Array:
            gathered = jnp.take_along_axis(of_tokens.reshape(ids.shape), node, axis=1)
            return jnp.where(jnp.asarray(batch.mask) > 0, gathered, 0.0)

        value = None
        if trained.value is not None:
            assert self._value_graph is not None
            head = nnx.merge(self._value_graph, trained.value)
            value = of_targets(head(before))
        return _Statistics(of_targets(found.logprob), of_targets(found.entropy), value)


def _optimized(trained: Trained) -> Tree:
    """What the optimizer sees. Without a value head the policy alone, as in checkpoints from before."""
    return trained.policy if trained.value is None else trained
