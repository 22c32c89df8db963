"""What the embedded engine compiles: a forward for each shape, a sampler for each number of rows.

Compiled ahead of time into tables, so nothing can be compiled later by accident (invariant 9). Nothing here
depends on a conversation's length, a temperature or a stop.

Axes: R decode rows, Q prefill blocks of C tokens, T = R + Q * C tokens, S slots, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gymllm_trainers.compilation import compile_ahead
from gymllm_trainers.engine.batch import StepArrays, StepLayout
from gymllm_trainers.engine.config import EngineConfig
from gymllm_trainers.engine.kernels import Kernels, TrunkInputs, TrunkShape
from gymllm_trainers.engine.paged_attention import (
    PagedCache,
    copy_pages,
    new_cache,
    paged_attention,
    write_pages,
)
from gymllm_trainers.engine.sampling import (
    FullInputs,
    PlainInputs,
    Sampled,
    neutral_inputs,
    sample_full,
    sample_plain,
)
from gymllm_trainers.models.decoder import Decoder, rope, softcap

Tree = Any
"""A pytree of arrays."""

MAX_BIASES = 300
"""Most ids that one request may give a bias, as OpenAI's servers have it."""

COPIES = 16
"""Pages that one call of the copy program copies."""


class Programs:
    """Every compiled program of one engine."""

    def __init__(
        self,
        graph: nnx.GraphDef[Decoder],
        state: Tree,
        config: EngineConfig,
        *,
        kernels: Kernels | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """Compiles nothing yet: see `compile`.

        Args:
            graph: The decoder's structure.
            state: Its parameters, for their shapes, dtypes and shardings.
            config: Sizes; `pages` is set.
            kernels: What replaces XLA's matrix products and attention, if anything does.
            mesh: Where the parameters are, if on several devices; the cache is divided over "tensor".
        """
        self._graph, self._config, self._kernels, self._mesh = graph, config, kernels, mesh
        self._state = jax.tree.map(_abstract, state)
        # Programs take leaves: to flatten a state takes longer than a small model's step.
        self._leaves, self._tree = jax.tree.flatten(self._state)
        decoder = nnx.merge(graph, self._state)
        self.decoder = decoder.config
        self._whole = kernels is not None and kernels.take_trunk(
            self.decoder,
            {leaf.dtype for leaf in self._leaves},
            adapters=decoder.adapters is not None,
            compute_dtype=decoder.compute_dtype,
        )
        """Whether all layers are one call."""
        self._layouts = {shape: StepLayout.of(config, *shape) for shape in config.shapes}
        self._forwards: dict[tuple[int, int], Callable[..., tuple[Array, PagedCache]]] = {}
        self._samplers: dict[tuple[str, int], Callable[..., Any]] = {}
        self._bursts: dict[int, Callable[..., tuple[Array, Array, PagedCache]]] = {}
        self._copy: Callable[..., PagedCache] | None = None

    def layout(self, rows: int, blocks: int) -> StepLayout:
        """Where the parts of a step's array are."""
        return self._layouts[rows, blocks]

    def compile(self, log: Callable[[str], None] = lambda name: None) -> None:
        """Compiles every program; calls `log` with each one's name before it does."""
        cache = jax.eval_shape(self._empty_cache)
        whole = laid_out = None
        if self._mesh is not None:
            whole, laid_out = NamedSharding(self._mesh, PartitionSpec()), self._sharding()
            cache = jax.tree.map(
                lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=laid_out), cache
            )
        slots = self._config.slots
        previous = jax.ShapeDtypeStruct((slots,), np.int32, sharding=whole)
        hidden = jax.ShapeDtypeStruct(
            (slots, self.decoder.hidden_size),
            nnx.merge(self._graph, self._state).compute_dtype,
            sharding=whole,
        )
        for (rows, blocks), layout in self._layouts.items():
            log(f"engine step {rows} + {blocks} x {layout.block}")
            forward = jax.jit(
                self.forward_of(layout),
                donate_argnums=(1,),
                out_shardings=None if whole is None else (whole, laid_out),
            )
            packed = jax.ShapeDtypeStruct((layout.size,), np.int32, sharding=whole)
            # With kernels in C, what XLA makes of the rest is a third of a small model's step.
            self._forwards[rows, blocks] = compile_ahead(
                forward, self._leaves, cache, packed, previous, quick=self._kernels is None
            )
            if blocks or self._config.burst == 1:
                continue
            log(f"engine burst {rows} x {self._config.burst}")
            burst = jax.jit(
                self._burst_of(layout),
                donate_argnums=(1,),
                out_shardings=None if whole is None else (whole, whole, laid_out),
            )
            inputs = self.burst_inputs(rows)
            self._bursts[rows] = compile_ahead(
                burst,
                self._leaves,
                cache,
                packed,
                previous,
                np.int32(rows),
                inputs,
                quick=self._kernels is None,
            )
        for rows in self._config.row_shapes:
            log(f"engine sample {rows}")
            self._samplers["plain", rows] = compile_ahead(
                jax.jit(self._sample_plain, out_shardings=whole),
                self._leaves,
                hidden,
                np.int32(rows),
                plain_inputs(rows),
            )
            log(f"engine sample {rows} full")
            self._samplers["full", rows] = compile_ahead(
                jax.jit(self._sample_full, out_shardings=whole),
                self._leaves,
                hidden,
                np.int32(rows),
                self.full_inputs(rows),
            )
        log("engine copy")
        pages = jax.ShapeDtypeStruct((COPIES,), np.int32)
        copy = jax.jit(copy_pages, donate_argnums=(0,), out_shardings=laid_out)
        self._copy = compile_ahead(copy, cache, pages, pages)

    def full_inputs(self, rows: int) -> FullInputs:
        """Inputs of the full sampler that change nothing; the caller's own, to write to."""
        return neutral_inputs(
            rows,
            vocabulary=self.decoder.vocab_size,
            seen=self._config.context_length,
            biases=MAX_BIASES,
        )

    def new_cache(self) -> PagedCache:
        """An empty cache."""
        if self._mesh is None:
            return self._empty_cache()
        return jax.jit(self._empty_cache, out_shardings=self._sharding())()

    def forward(
        self,
        shape: tuple[int, int],
        leaves: list[Array],
        cache: PagedCache,
        packed: npt.NDArray[np.int32],
        previous: Array | npt.NDArray[np.int32],
    ) -> tuple[Array, PagedCache]:
        """Computes a step with `jax.tree.leaves` of the weights; the cache is donated.

        Returns:
            The picked hidden states, [S, D], and the cache.
        """
        return self._forwards[shape](leaves, cache, packed, previous)

    def burst(
        self,
        rows: int,
        leaves: list[Array],
        cache: PagedCache,
        packed: npt.NDArray[np.int32],
        previous: Array | npt.NDArray[np.int32],
        count: int,
        inputs: PlainInputs,
    ) -> tuple[Array, Array, PagedCache]:
        """Computes a burst: a step without blocks, and what each samples as the next one's tokens.

        Args:
            rows: Of the shape.
            leaves, cache, packed, previous: As for `forward`; packed is of the first.
            count: Rows that are sampled.
            inputs: Temperatures [F], and uniform numbers [burst, F].

        Returns:
            What each token's sampling gave, [burst, 4, F]; the last tokens as `previous`; and the cache.
        """
        return self._bursts[rows](leaves, cache, packed, previous, np.int32(count), inputs)

    def burst_inputs(self, rows: int) -> PlainInputs:
        """Inputs of a burst, to write to."""
        uniform = np.zeros((self._config.burst, rows), np.float32)
        return PlainInputs(np.ones(rows, np.float32), uniform)

    def sample_plain(
        self, leaves: list[Array], hidden: Array, count: int, inputs: PlainInputs
    ) -> tuple[Array, Array]:
        """Samples the first `count` rows; see `unpack_sampled`. Also the tokens as the next step's
        `previous`, [S]."""
        sampler = self._samplers["plain", len(inputs.temperature)]
        return sampler(leaves, hidden, np.int32(count), inputs)

    def sample_full(
        self, leaves: list[Array], hidden: Array, count: int, inputs: FullInputs
    ) -> tuple[Array, Array, Array, Array]:
        """As `sample_plain`, and the likeliest ids and their log-probabilities, [rows, 20]."""
        sampler = self._samplers["full", len(inputs.temperature)]
        return sampler(leaves, hidden, np.int32(count), inputs)

    def copy(self, cache: PagedCache, copies: list[tuple[int, int]]) -> PagedCache:
        """Copies pages; the cache is donated."""
        assert self._copy is not None, "compile() comes first"
        for first in range(0, len(copies), COPIES):
            part = copies[first : first + COPIES]
            # Page 0 onto itself is no harm.
            pairs = np.zeros((2, COPIES), np.int32)
            pairs[:, : len(part)] = np.array(part, np.int32).T
            cache = self._copy(cache, pairs[0], pairs[1])
        return cache

    def __len__(self) -> int:
        programs = len(self._forwards) + len(self._bursts) + len(self._samplers)
        return programs + (self._copy is not None)

    # ------------------------------------------------------------------ what is compiled

    def _empty_cache(self) -> PagedCache:
        config = self._config
        return new_cache(
            self.decoder, config.total_pages, config.page_size, jnp.dtype(config.cache_dtype)
        )

    def _sharding(self) -> NamedSharding:
        assert self._mesh is not None
        heads = self.decoder.num_key_value_heads
        tensor = "tensor" if heads % self._mesh.shape.get("tensor", 1) == 0 else None
        return NamedSharding(self._mesh, PartitionSpec(None, None, tensor))

    def forward_of(self, layout: StepLayout) -> Callable[..., tuple[Array, PagedCache]]:
        """A step of this layout, to be jitted: (weights' leaves, cache, packed inputs int32 [layout.size],
        previous tokens int32 [slots]) to (hidden states of what is sampled from [S, D], cache)."""
        if self._whole:
            return self._trunk_of(layout)
        kernels, rows = self._kernels, layout.rows
        write = kernels.write_pages if kernels else write_pages
        look = kernels.paged_attention if kernels else paged_attention

        def forward(
            leaves: list[Array], cache: PagedCache, packed: Array, previous_S: Array
        ) -> tuple[Array, PagedCache]:
            decoder = self._decoder(leaves)
            config = decoder.config
            step = layout.unpack(packed)
            slot_T = layout.write_slots(step)
            token_T = _tokens(step, rows, previous_S)

            def attend(
                layer: Array,
                window: Array | None,
                query: Array,
                key: Array,
                value: Array,
                carry: PagedCache,
            ) -> tuple[Array, PagedCache]:
                cache = write(carry, layer, key, value, slot_T)

                def part(query_BCNH: Array, lanes: slice) -> Array:
                    mixed = look(
                        query_BCNH,
                        cache,
                        layer,
                        step.table_FM[lanes],
                        step.start_F[lanes],
                        step.count_F[lanes],
                        scale=config.attention_scale,
                        window=window,
                        softcap=config.attention_softcap,
                    )
                    return mixed.reshape(-1, *mixed.shape[2:])

                mixed = part(query[:rows, None], slice(rows))
                if layout.blocks:
                    blocks = query[rows:].reshape(layout.blocks, layout.block, *query.shape[1:])
                    mixed = jnp.concatenate([mixed, part(blocks, slice(rows, None))])
                return mixed, cache

            def linear(x_MI: Array, kernels_LIO: Array, layer: Array) -> Array:
                assert kernels is not None
                return kernels.linear(x_MI, kernels_LIO, layer, step.active_E)

            hidden_TD, cache = decoder.trunk(
                token_T, layout.positions(step), attend, cache, linear=linear if kernels else None
            )
            return hidden_TD[step.pick_S], cache

        return forward

    def _trunk_of(self, layout: StepLayout) -> Callable[..., tuple[Array, PagedCache]]:
        """The same with all layers in one call of the kernels."""
        kernels, rows = self._kernels, layout.rows
        assert kernels is not None

        def forward(
            leaves: list[Array], cache: PagedCache, packed: Array, previous_S: Array
        ) -> tuple[Array, PagedCache]:
            decoder = self._decoder(leaves)
            config = decoder.config
            step = layout.unpack(packed)
            position_T = layout.positions(step)
            local = config.rope_local_theta is not None
            inputs = TrunkInputs(
                x_TD=decoder.embed(_tokens(step, rows, previous_S)),
                rope=rope(position_T, config, local=False),
                local_rope=rope(position_T, config, local=True) if local else None,
                cache=cache,
                slot_T=layout.write_slots(step),
                table_FM=step.table_FM,
                start_F=step.start_F,
                count_F=step.count_F,
                active_E=step.active_E,
                windows_L=None if config.windows is None else jnp.array(config.windows),
                slides_L=jnp.array(config.sliding_layers, jnp.int32) if local else None,
            )
            shape = TrunkShape(
                rows=rows,
                block=layout.block,
                heads=config.num_attention_heads,
                gelu=config.hidden_act != "silu",
                eps=config.rms_norm_eps,
                offset=1.0 if config.norm_offset else 0.0,
                scale=config.attention_scale,
                softcap=config.attention_softcap,
            )
            weights = {**decoder.stacked(), "norm": decoder.norm[...]}
            hidden_TD, cache = kernels.trunk(inputs, weights, shape)
            return hidden_TD[step.pick_S], cache

        return forward

    def _burst_of(self, layout: StepLayout) -> Callable[..., tuple[Array, Array, PagedCache]]:
        forward = self.forward_of(layout)

        def burst(
            leaves: list[Array],
            cache: PagedCache,
            packed: Array,
            previous_S: Array,
            count: Array,
            inputs: PlainInputs,
        ) -> tuple[Array, Array, PagedCache]:
            def token(
                carry: tuple[PagedCache, Array, Array], uniform_F: Array
            ) -> tuple[tuple[PagedCache, Array, Array], Array]:
                cache, packed, previous_S = carry
                hidden_SD, cache = forward(leaves, cache, packed, previous_S)
                own = PlainInputs(inputs.temperature, uniform_F)
                sampled, previous_S = self._sample_plain(leaves, hidden_SD, count, own)
                return (cache, layout.following(packed), previous_S), sampled

            start = (cache, packed, previous_S)
            (cache, _, previous_S), sampled = jax.lax.scan(
                token, start, jnp.asarray(inputs.uniform)
            )
            return sampled, previous_S, cache

        return burst

    def _decoder(self, leaves: list[Array]) -> Decoder:
        return nnx.merge(self._graph, jax.tree.unflatten(self._tree, leaves))

    def _logits(self, leaves: list[Array], hidden_SD: Array, rows: int, count: Array) -> Array:
        decoder, kernels = self._decoder(leaves), self._kernels
        hidden_FD = hidden_SD[:rows]
        if kernels is None:
            return decoder.uncapped_logits(hidden_FD)
        active_E = jnp.concatenate([count[None], jnp.arange(rows, dtype=jnp.int32)])
        if decoder.config.tie_word_embeddings:
            logits_FV = kernels.logits_tied(hidden_FD, decoder.embedding[...], active_E)
        else:
            logits_FV = kernels.logits(hidden_FD, decoder.head[...], active_E)
        return logits_FV

    def _sample_plain(
        self, leaves: list[Array], hidden_SD: Array, count: Array, inputs: PlainInputs
    ) -> tuple[Array, Array]:
        inputs = PlainInputs(*map(jnp.asarray, inputs))
        if self._kernels is not None:
            decoder = self._decoder(leaves)
            tied = decoder.config.tie_word_embeddings
            return self._kernels.sample(
                hidden_SD,
                (decoder.embedding if tied else decoder.head)[...],
                count,
                jnp.asarray(inputs.temperature),
                jnp.asarray(inputs.uniform),
                tied=tied,
                softcap=decoder.config.final_softcap,
            )
        logits_FV = self._logits(leaves, hidden_SD, len(inputs.temperature), count)
        sampled = sample_plain(softcap(logits_FV, self.decoder.final_softcap), inputs)
        return _packed(sampled), self._previous(sampled.token)

    def _sample_full(
        self, leaves: list[Array], hidden_SD: Array, count: Array, inputs: FullInputs
    ) -> tuple[Array, Array, Array, Array]:
        inputs = FullInputs(*map(jnp.asarray, inputs))
        logits_FV = self._logits(leaves, hidden_SD, len(inputs.temperature), count)
        cap = self.decoder.final_softcap
        full = sample_full(softcap(logits_FV, cap), inputs)
        packed_4F = _packed(full.sampled)
        if self._kernels is not None:
            # Whoever needs no full sampler gets the bits of the plain one, whatever others need.
            temperature_F, uniform_F = map(jnp.asarray, (inputs.temperature, inputs.uniform))
            drawn_4F = self._kernels.draw(logits_FV, temperature_F, uniform_F, softcap=cap)
            packed_4F = jnp.where(inputs.plain, drawn_4F, packed_4F)
        return packed_4F, self._previous(packed_4F[0]), full.top_ids, full.top_logprobs

    def _previous(self, token_F: Array) -> Array:
        return jnp.zeros((self._config.slots,), jnp.int32).at[: token_F.shape[0]].set(token_F)


def _tokens(step: StepArrays, rows: int, previous_S: Array) -> Array:
    """Each token's id, [T]: those that the step before sampled are still on the device."""
    known_R = step.token_T[:rows]
    token_R = jnp.where(step.source_R < 0, known_R, previous_S[step.source_R])
    return jnp.concatenate([token_R, step.token_T[rows:]])


class HostSampled(NamedTuple):
    """What a step sampled, on the host; a number for each row, in lists: they are read one by one."""

    token: list[int]
    logprob: list[float]
    base_logprob: list[float]
    bad: list[bool]


def _packed(sampled: Sampled) -> Array:
    """All of it as one array, [4, rows]: one transfer to the host instead of four."""
    return jnp.stack(
        [
            sampled.token,
            jax.lax.bitcast_convert_type(sampled.logprob, jnp.int32),
            jax.lax.bitcast_convert_type(sampled.base_logprob, jnp.int32),
            sampled.bad.astype(jnp.int32),
        ]
    )


def unpack_sampled(packed: Array) -> HostSampled:
    """Waits for what a sampler or a burst gave, and reads it; a burst's tokens one after another."""
    numbers = np.asarray(packed)
    if numbers.ndim == 3:
        numbers = numbers.transpose(1, 0, 2).reshape(4, -1)
    token, logprob, base_logprob, bad = numbers
    return HostSampled(
        token.tolist(),
        logprob.view(np.float32).tolist(),
        base_logprob.view(np.float32).tolist(),
        bad.astype(bool).tolist(),
    )


def plain_inputs(rows: int) -> PlainInputs:
    """Inputs of the plain sampler, to write to."""
    return PlainInputs(np.ones(rows, np.float32), np.zeros(rows, np.float32))


def _abstract(leaf: Array) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
