"""Weights on their way to the engine's programs: what is compiled, what is shared."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymllm.errors import ModelError
from gymllm_trainers.engine.publication import Publisher
from gymllm_trainers.models import Decoder, decoder_params
from gymllm_trainers.models.decoder import LoRAParam


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_nothing_compiles_when_weights_or_adapters_alone_are_published(
    make_decoder: Callable[[int], Decoder], compilations: list[str], compute: str
) -> None:
    decoder = make_decoder(0)
    decoder.add_adapters(rank=2, alpha=4.0, rngs=nnx.Rngs(0))
    graph, state = nnx.split(decoder)
    publisher = Publisher(graph, state, compute_dtype=compute)
    publisher.compile()
    moved = jax.tree.map(lambda leaf: leaf + 0.25, nnx.state(decoder, LoRAParam))
    jax.block_until_ready(jax.tree.leaves(moved))
    del compilations[:]
    taken = publisher.check(moved)
    publisher.check(state)
    assert compilations == []
    given, held = (dict(nnx.to_flat_state(tree)) for tree in (moved, taken))
    assert {leaf.dtype for leaf in jax.tree.leaves(held)} == {jnp.dtype(compute)}
    for path, variable in given.items():
        np.testing.assert_array_equal(
            held[path][...], variable[...].astype(compute), err_msg=str(path)
        )


def test_only_a_state_is_published(make_decoder: Callable[[int], Decoder]) -> None:
    decoder = make_decoder(0)
    publisher = Publisher(*nnx.split(decoder), compute_dtype=jnp.float32)
    params = decoder_params(decoder)
    for wrong, what in ((decoder, "Decoder"), (params, "dict"), (None, "NoneType")):
        with pytest.raises(ModelError, match=rf"got {what}: publish `nnx.state\(decoder\)`"):
            publisher.check(wrong)
    publisher.check(nnx.state(decoder))
