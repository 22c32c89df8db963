"""Calls the kernels of one library with sizes that fit nothing; for a build with sanitizers."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gymllm_trainers.engine import EngineConfig
from gymllm_trainers.engine.batch import StepLayout
from gymllm_trainers.engine.kernels import Kernels
from gymllm_trainers.engine.kernels.calls import open_library
from gymllm_trainers.engine.paged_attention import PagedCache
from gymllm_trainers.engine.programs import Programs
from gymllm_trainers.models import DecoderConfig, random_decoder

PRODUCT_TYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")]
CACHE_TYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]


def main(library: Path) -> None:
    """Runs them all; a sanitizer ends the process at the first fault."""
    loaded = open_library(library)
    rng = np.random.default_rng(0)

    def draw(*shape: int, dtype: str) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)

    for x_type, kernel_type in PRODUCT_TYPES:
        for depth, columns in ((1, 1), (33, 47), (34, 49), (1030, 97), (16, 193)):
            for tokens in (1, 2, 7, 9, 40):
                x = draw(tokens, depth, dtype=x_type)
                kernel = draw(2, depth, columns, dtype=kernel_type)
                rows = np.arange(-1, tokens, dtype=np.int32)
                rows[0] = tokens // 2 + 1
                loaded.linear(x, kernel, 1, rows).block_until_ready()
                loaded.logits_tied(x, kernel[1].T).block_until_ready()
    for tokens in (1, 8, 63, 64, 65, 150):
        for size, window in ((16, 0), (48, 1), (80, 30)):
            shapes = ((2, tokens, heads, size) for heads in (6, 2, 2, 6))
            *rows, cotangent = (draw(*shape, dtype="float32") for shape in shapes)
            ends = np.minimum(np.arange(tokens) + rng.integers(0, 90, size=(2, tokens)), tokens)
            places = np.tile(np.arange(tokens), (2, 1))
            inputs = (*rows, jnp.asarray(ends, jnp.int32), jnp.asarray(places), jnp.int32(window))
            outputs = loaded.packed_attention(*inputs, scale=1.0)
            parts = loaded.packed_attention_backward(inputs, outputs, cotangent, scale=1.0)
            jax.block_until_ready(parts)
    for size, page_size in ((1, 1), (17, 3), (64, 16), (80, 70)):
        for cache_type, query_type in CACHE_TYPES:
            table = np.zeros((3, -(-140 // page_size)), np.int32)
            table[:2] = 1 + np.arange(2 * table.shape[1]).reshape(2, -1)
            shape = 2, 1 + 2 * table.shape[1], 2, page_size, size
            cache = PagedCache(draw(*shape, dtype=cache_type), draw(*shape, dtype=cache_type))
            slot = np.array([0, shape[1] * page_size - 1], np.int32)
            new = draw(2, 2, size, dtype=query_type)
            cache = loaded.write_pages(cache, jnp.int32(1), new, new, slot)
            query = draw(3, 37, 10, size, dtype=query_type)
            for window, softcap in ((None, None), (3, 1.0), (65, None)):
                start, count = np.array([100, 0, 0]), np.array([37, 5, 0])
                out = loaded.paged_attention(
                    query,
                    cache,
                    jnp.int32(1),
                    table,
                    start,
                    count,
                    scale=0.5,
                    window=window,
                    softcap=softcap,
                )
                out.block_until_ready()
    sample_all(loaded)
    run_trunks(loaded)
    sys.stdout.write("every size done\n")


def sample_all(loaded: Kernels) -> None:
    """Draws from vocabularies that no vector divides, and where nothing can be drawn."""
    rng = np.random.default_rng(0)
    for words in (1, 5, 63, 65, 1281):
        for tied in (False, True):
            hidden = jnp.asarray(rng.normal(size=(9, 33)), jnp.float32).at[2].set(jnp.nan)
            head = jnp.asarray(rng.normal(size=(words, 33) if tied else (33, words)), jnp.float32)
            for count, softcap in ((0, None), (1, 2.0), (7, None), (7, 2.0)):
                temperature, uniform = jnp.linspace(0, 2, 7), jnp.linspace(0, 0.999, 7)
                out, _ = loaded.sample(
                    hidden,
                    head,
                    jnp.int32(count),
                    temperature,
                    uniform,
                    tied=tied,
                    softcap=softcap,
                )
                out.block_until_ready()


def run_trunks(loaded: Kernels) -> None:
    """Steps of decoders with every option, with decode rows, blocks and padding."""
    sizes = EngineConfig(
        slots=40, context_length=120, small_batch=5, prefill_tokens=(14,), page_size=7, pages=90
    )
    rng = np.random.default_rng(0)
    for hidden, inner, head, dtype in (
        *((33, 47, 2, "float32"), (50, 1030, 20, "float32"), (48, 96, 64, "float32")),
        *((34, 46, 6, "bfloat16"), (64, 192, 80, "bfloat16")),
    ):
        config = DecoderConfig(
            vocab_size=51,
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=head,
            max_position_embeddings=128,
            qk_norm=True,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            post_norms=True,
            sliding_window=9,
            sliding_layers=(True, False),
            rope_local_theta=100.0,
            attention_softcap=5.0,
            hidden_act="silu" if hidden % 2 else "gelu_pytorch_tanh",
        )
        decoder = random_decoder(config, seed=0, dtype=dtype, compute_dtype=dtype)
        graph, state = nnx.split(decoder)
        programs = Programs(graph, state, sizes, kernels=loaded)
        for shape in ((5, 0), (5, 2)):
            layout = StepLayout.of(sizes, *shape)
            packed = np.zeros(layout.size, np.int32)
            _, source, table, start, count, active, pick = layout.views(packed)
            source.fill(-1)
            table[:] = 1 + np.arange(table.size).reshape(table.shape) % 89
            start[:3], count[:3] = (0, 64, 119), 1
            indices = [0, 1, 2]
            if shape[1]:
                start[5:], count[5:] = (0, 100), (7, 3)
                indices += [*range(5, 12), *range(12, 15)]
            active[0], active[1 : 1 + len(indices)] = len(indices), indices
            pick[: len(indices)] = indices
            part = rng.normal(size=(2, 90, 2, 7, head))
            cache = PagedCache(*(jnp.asarray(part, jnp.float32).astype(dtype) for _ in range(2)))
            forward = jax.jit(programs.forward_of(layout))
            out, _ = forward(jax.tree.leaves(state), cache, packed, np.zeros(40, np.int32))
            out.block_until_ready()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
