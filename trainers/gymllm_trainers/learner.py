"""The learner: gradients accumulated as groups arrive, one optimizer step when enough have.

The gradient that is accumulated is *unnormalised* (a sum over tokens) and so is the count; they are
divided once, at the step. So streaming, one batch, any micro-batch split and any packing give the same
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from gymllm.errors import ConfigError
from gymllm.trajectory import Group, Trajectory
from gymllm_trainers.advantage import AdvantageName, advantages
from gymllm_trainers.compilation import compile_ahead
from gymllm_trainers.loss import (
    CorrectionName,
    LossName,
    correction_weight,
    ppo_clip,
    reinforce,
)
from gymllm_trainers.models.decoder import Decoder, LoRAParam, merge_adapters
from gymllm_trainers.models.logprob_head import token_statistics
from gymllm_trainers.packing import PackedBatch, Packer, TrainingSequence, pack_rows

Tree = Any
"""A pytree of arrays: JAX's own functions say no more of it."""
Program = Callable[..., Any]
"""Something compiled, or compiled at its first call."""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """How the policy is updated."""

    groups_per_step: int = 4
    """Groups in one optimizer step."""
    learning_rate: float = 1.5e-4
    """Peak learning rate of AdamW."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0 to its peak."""
    final_rate: float = 0.1
    """Learning rate at the run's last step, as a share of its peak; it falls linearly. 1 keeps it."""
    adam_b1: float = 0.9
    """Decay of AdamW's first moment."""
    adam_b2: float = 0.99
    """Decay of AdamW's second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """The gradient's global norm is clipped to this."""
    advantage: AdvantageName = "centred"
    """centred: reward less the group's mean; grpo: also divided by the group's standard deviation."""
    loss: LossName = "ppo_clip"
    """Policy loss of a token."""
    clip_low: float = 0.2
    """ppo_clip: how far below 1 the ratio may fall."""
    clip_high: float = 0.28
    """ppo_clip: how far above 1 the ratio may rise."""
    correction: CorrectionName = "decoupled"
    """decoupled: the ratio is to the policy at the start of the update, and tokens of older policies are
    weighted by min(ratio to them, correction_cap); off: the ratio is to the policy that made the token."""
    correction_cap: float = 2.0
    """Largest weight of the decoupled correction."""
    zero_variance: Literal["refill", "keep"] = "refill"
    """refill: a group whose rewards are all equal is counted and replaced by another task; keep: it counts
    towards groups_per_step, with advantage 0."""
    max_flat_groups: int = 200
    """refill: groups in a row whose rewards are all equal before the run stops, as it learns nothing."""
    rows: int = 2
    """Rows of a micro-batch."""
    row_tokens: int = 0
    """Tokens of a row; 0 is twice the engine's context length, so that little is left empty."""
    head_chunk: int = 512
    """Tokens whose logits are held at once."""

    def __post_init__(self) -> None:
        for name in ("groups_per_step", "max_flat_groups", "rows", "head_chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"learner.{name} must be >= 1, got {getattr(self, name)}.")
        if not 0 <= self.final_rate <= 1:
            raise ConfigError(f"learner.final_rate must be from 0 to 1, got {self.final_rate}.")
        for name in ("learning_rate", "max_grad_norm", "correction_cap"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"learner.{name} must be > 0, got {getattr(self, name)}.")


class Sums(NamedTuple):
    """What a micro-batch adds up to; float32 scalars."""

    loss: Array
    clipped_low: Array
    clipped_high: Array
    entropy: Array
    kl: Array
    """k3 from the behaviour policy to this one (Schulman 2020), nats."""
    gap: Array
    """|log-probability here - the engine's|, nats."""
    gap_max: Array
    weight: Array


class LearnerState(NamedTuple):
    """Everything that changes at a step, replaced as one: another thread sees all of it or none."""

    trainable: Tree
    optimizer: Tree
    version: int
    """Optimizer steps taken: the policy version of `trainable`."""


class Learner:
    """Owns the policy's parameters. One caller at a time; not thread-safe.

    The policy version is the number of optimizer steps taken.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: LearnerConfig,
        *,
        row_tokens: int,
        temperature: float,
        max_lag: int,
        total_steps: int | None = None,
    ) -> None:
        """Takes the decoder over.

        Args:
            decoder: The policy; with adapters, only they are trained.
            config: How.
            row_tokens: Tokens of a row; the longest sequence that can be trained on.
            temperature: The temperature that trajectories are sampled at.
            max_lag: Oldest token that is trained on, in policy versions behind the current one.
            total_steps: Steps of the whole run, over which the learning rate falls; None keeps it.

        Raises:
            ConfigError: The temperature is 0.
        """
        if not temperature > 0:
            raise ConfigError(
                f"agent.temperature must be > 0 for training, which needs chance to learn from, got "
                f"{temperature:g}."
            )
        self.config = config
        self._max_lag = max_lag
        self._temperature = temperature
        self._row_tokens = row_tokens
        self._packer = Packer(rows=config.rows, length=row_tokens)
        self._full: list[PackedBatch] = []
        wanted = LoRAParam if decoder.adapters is not None else nnx.Param
        graph, trainable, frozen = nnx.split(decoder, wanted, ...)
        self._graph, self._frozen = graph, frozen
        self._optimizer = _optimizer(config, total_steps)
        # Moments are float32 whatever the weights are, as the gradient is: AdamW gives back what it is given.
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), trainable)
        self.state = LearnerState(trainable, self._optimizer.init(wide), 0)
        self._gradient: Tree = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trainable
        )  # unnormalised sum since the last step
        self._accumulate: Program = jax.jit(self._accumulate_rows, donate_argnums=(2,))
        # The optimizer's state is not donated: a checkpoint may be taken of it at any moment.
        self._step: Program = jax.jit(self._apply, donate_argnums=(2,))
        self._merge: Program = jax.jit(self._merged)  # compiled when first called: at the run's end
        self._sums: list[Sums] = []
        self._counts = _Counts()

    def compile(self) -> None:
        """Compiles everything that a run calls, so that no step is slower for it."""
        empty = pack_rows([[] for _ in range(self.config.rows)], length=self._row_tokens)
        state = self.state
        self._accumulate = compile_ahead(
            self._accumulate, state.trainable, self._frozen, self._gradient, empty
        )
        self._step = compile_ahead(
            self._step, state.trainable, state.optimizer, self._gradient, np.float32(1)
        )

    # ------------------------------------------------------------------ what the run calls

    def add_group(self, group: Group) -> bool:
        """Adds a group to the next step; whether it counts towards `groups_per_step`."""
        counts = self.collect(group)
        self.compute()
        return counts

    def collect(self, group: Group) -> bool:
        """As `add_group`, but the gradient of micro-batches that are full waits for `compute`."""
        reward_PG = np.array([group.rewards], np.float32)
        advantage_PG = advantages(self.config.advantage, reward_PG)
        flat = bool(np.ptp(reward_PG) == 0)
        self._counts.zero_variance += flat
        if flat and self.config.zero_variance == "refill":
            return False
        self._counts.groups += 1
        sequences = [
            sequence
            for trajectory, advantage in zip(group.trajectories, advantage_PG[0], strict=True)
            for sequence in self._sequences(trajectory, float(advantage))
        ]
        self._full += self._packer.add(sequences)
        return True

    def add_sequences(self, sequences: Sequence[TrainingSequence]) -> None:
        """Adds sequences to the next step; computes the gradient of each micro-batch this fills."""
        self._full += self._packer.add(sequences)
        self.compute()

    def compute(self, *, flush: bool = False) -> None:
        """Computes the gradient of each micro-batch that is full; with `flush`, of what is left too."""
        if flush:
            self._full += self._packer.flush()
        while self._full:
            self._add_batch(self._full.pop(0))

    @property
    def full_batches(self) -> int:
        """Micro-batches that are full and wait for `compute`."""
        return len(self._full)

    @property
    def version(self) -> int:
        """Policy version: optimizer steps taken."""
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
        """Takes the optimizer step; returns its metrics and starts the next one at version + 1.

        Args:
            flush: Whether sequences that don't fill a micro-batch are part of it; else they wait for
                the next step, and nothing is padded for them.
        """
        self.compute(flush=flush)
        count = max(self._counts.trained, 1.0)
        state = self.state
        trainable, optimizer, self._gradient, norm = self._step(
            state.trainable, state.optimizer, self._gradient, np.float32(count)
        )
        self.state = LearnerState(trainable, optimizer, state.version + 1)
        metrics = self._metrics(float(norm), count)
        self._sums, self._counts = [], _Counts()
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
        return nnx.merge(graph, self._merge(self.state.trainable, self._frozen))

    # ------------------------------------------------------------------ sequences and counts

    def _sequences(self, trajectory: Trajectory, advantage: float) -> list[TrainingSequence]:
        oldest = self.version - self._max_lag
        sequences: list[TrainingSequence] = []
        for segment in trajectory.segments:
            mask = segment.mask.astype(np.float32)
            generated = int(mask.sum())
            stale = (segment.mask == 1) & (segment.versions < oldest)
            mask[stale] = 0.0
            mask[0] = 0.0  # nothing predicts a sequence's first token
            lag = self.version - segment.versions[segment.mask == 1]
            self._counts.stale += int(stale.sum())
            self._counts.lag_sum += int(lag.sum())
            self._counts.lag_max = max(self._counts.lag_max, int(lag.max(initial=0)))
            self._counts.generated += generated
            if mask.any():
                sequences.append(
                    TrainingSequence(
                        ids=segment.ids,
                        mask=mask,
                        behaviour=segment.logprobs,
                        advantage=np.full(len(segment), advantage, np.float32),
                    )
                )
        return sequences

    def _add_batch(self, batch: PackedBatch) -> None:
        self._counts.trained += batch.trained
        self._counts.tokens += batch.tokens
        self._counts.computed += batch.ids.size
        self._gradient, sums = self._accumulate(
            self.state.trainable, self._frozen, self._gradient, batch
        )
        self._sums.append(sums)
        # Wait here: a caller's clock says "gradient" then, and no more than one batch is in memory.
        jax.block_until_ready(sums)

    def _metrics(self, norm: float, count: float) -> dict[str, float]:
        counts = self._counts
        if not self._sums:
            return {"gradient_norm": norm, "zero_variance_groups": float(counts.zero_variance)}
        fetched = cast("list[Sums]", jax.device_get(self._sums))
        total = jax.tree.map(lambda *parts: float(np.sum(parts)), *fetched)
        generated = max(counts.generated, 1)
        return {
            "loss": float(total.loss) / count,
            "gradient_norm": norm,
            "entropy": float(total.entropy) / count,
            "clipped_low": float(total.clipped_low) / count,
            "clipped_high": float(total.clipped_high) / count,
            "behaviour_kl_k3": float(total.kl) / count,
            "logprob_gap_mean": float(total.gap) / count,
            "logprob_gap_max": float(max(part.gap_max for part in fetched)),
            "correction_weight": float(total.weight) / count,
            "trained_tokens": float(counts.trained),
            "train_tokens": float(counts.tokens),
            "padding_share": 1 - counts.tokens / counts.computed,
            "zero_variance_groups": float(counts.zero_variance),
            "lag_mean": counts.lag_sum / generated,
            "lag_max": float(counts.lag_max),
            "stale_share": counts.stale / generated,
        }

    # ------------------------------------------------------------------ what is compiled

    def _accumulate_rows(
        self, trainable: Tree, frozen: Tree, gradient: Tree, batch: PackedBatch
    ) -> tuple[Tree, Sums]:
        value = jax.grad(self._loss, has_aux=True)
        rows, sums = cast("tuple[Tree, Sums]", value(trainable, frozen, batch))
        return jax.tree.map(
            lambda total, part: total + part.astype(jnp.float32), gradient, rows
        ), sums

    def _loss(self, trainable: Tree, frozen: Tree, batch: PackedBatch) -> tuple[Array, Sums]:
        config = self.config
        decoder = nnx.merge(self._graph, trainable, frozen)
        ids_BT = jnp.asarray(batch.ids)
        hidden = decoder.hidden(ids_BT, jnp.asarray(batch.positions), jnp.asarray(batch.ends))
        # A token's log-probability comes from its parent.
        hidden = jnp.take_along_axis(hidden, jnp.asarray(batch.parent)[:, :, None], axis=1)
        mask_T = jnp.asarray(batch.mask).reshape(-1)
        behaviour_T = jnp.asarray(batch.behaviour).reshape(-1)
        advantage_T = jnp.asarray(batch.advantage).reshape(-1)
        tied = decoder.config.tie_word_embeddings
        statistics = token_statistics(
            hidden.reshape(-1, hidden.shape[-1]),
            (decoder.embedding if tied else decoder.head)[...],
            ids_BT.reshape(-1),
            jnp.asarray(batch.wanted).reshape(-1),
            tied=tied,
            temperature=self._temperature,
            softcap=decoder.config.final_softcap,
            chunk=config.head_chunk,
        )

        def of_targets(tokens_T: Array) -> Array:
            return jnp.take_along_axis(
                tokens_T.reshape(ids_BT.shape), jnp.asarray(batch.node), axis=1
            ).reshape(-1)

        # 0 where there is no target, as it is where none is wanted.
        logprob_T = of_targets(statistics.logprob) * mask_T
        entropy_T = of_targets(statistics.entropy)
        # One optimizer step per batch: the policy at the start of the update is the policy itself.
        current_T = jax.lax.stop_gradient(logprob_T)
        decoupled = config.correction == "decoupled" and config.loss == "ppo_clip"
        proximal_T = current_T if decoupled else behaviour_T
        if config.loss == "ppo_clip":
            token = ppo_clip(
                logprob_T,
                proximal_T,
                advantage_T,
                clip_low=config.clip_low,
                clip_high=config.clip_high,
            )
        else:
            token = reinforce(logprob_T, advantage_T)
        weight_T = (
            correction_weight(proximal_T, behaviour_T, cap=config.correction_cap)
            if decoupled
            else jnp.ones_like(logprob_T)
        )
        gap_T = (current_T - behaviour_T) * mask_T
        total = jnp.sum(token.loss * weight_T * mask_T)
        sums = Sums(
            loss=total,
            clipped_low=jnp.sum(token.clipped_low * mask_T),
            clipped_high=jnp.sum(token.clipped_high * mask_T),
            entropy=jnp.sum(entropy_T * mask_T),
            kl=jnp.sum(jnp.exp(gap_T) - 1 - gap_T),
            gap=jnp.sum(jnp.abs(gap_T)),
            gap_max=jnp.max(jnp.abs(gap_T)),
            weight=jnp.sum(weight_T * mask_T),
        )
        return total, sums

    def _apply(
        self, trainable: Tree, optimizer: Tree, gradient: Tree, count: Array
    ) -> tuple[Tree, Tree, Tree, Array]:
        mean = jax.tree.map(lambda leaf: leaf / count, gradient)
        norm = optax.tree.norm(mean)
        updates, optimizer = self._optimizer.update(mean, optimizer, trainable)
        trainable = optax.apply_updates(trainable, updates)
        return trainable, optimizer, jax.tree.map(jnp.zeros_like, gradient), norm

    def _merged(self, trainable: Tree, frozen: Tree) -> Tree:
        return nnx.state(merge_adapters(nnx.merge(self._graph, trainable, frozen)))


@dataclass
class _Counts:
    """Host-side sums since the last step."""

    groups: int = 0
    zero_variance: int = 0
    trained: float = 0.0
    tokens: int = 0
    computed: int = 0
    generated: int = 0
    stale: int = 0
    lag_sum: int = 0
    lag_max: int = 0


def _optimizer(config: LearnerConfig, total_steps: int | None) -> optax.GradientTransformation:
    peak, rising = config.learning_rate, config.warmup_steps
    # Not from 0: the first step would change nothing.
    rise = optax.linear_schedule(peak / (rising + 1), peak, rising)
    falling = max((total_steps or 0) - rising, 1)
    last = peak * (config.final_rate if total_steps else 1.0)
    rest = optax.linear_schedule(peak, last, falling)
    schedule = optax.join_schedules([rise, rest], [rising])
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            schedule, b1=config.adam_b1, b2=config.adam_b2, weight_decay=config.weight_decay
        ),
    )
