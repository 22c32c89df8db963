"""The model that a run trains is the one that its settings describe, and its adapters can be taken along."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gymllm_trainers.config import load_config
from gymllm_trainers.models import load_adapters, load_model, save_adapters
from gymllm_trainers.models.decoder import LoRAParam
from gymllm_trainers.starting_model import policy_decoder

FIXTURE = Path(__file__).parent / "fixtures" / "tiny_qwen3"


def test_policy_has_what_the_settings_say(tmp_path: Path) -> None:
    words = "--model.dtype bfloat16 --model.compute-dtype bfloat16 --model.remat dots "
    words += "--model.lora-rank 2 --model.lora-alpha 6 --model.lora-linears q_proj down"
    config = load_config(words.split())
    decoder = policy_decoder(config, load_model(FIXTURE, dtype="bfloat16"))
    assert decoder.remat == "dots"
    assert decoder.compute_dtype == jnp.bfloat16
    assert decoder.embedding[...].dtype == jnp.bfloat16
    adapters = decoder.adapters
    assert adapters is not None
    assert adapters.linears == ("query", "down")
    assert adapters.scale == 3.0
    leaves = jax.tree.leaves(nnx.state(adapters, LoRAParam))
    assert {leaf.dtype.name for leaf in leaves} == {"float32"}
    assert {min(leaf.shape[1:]) for leaf in leaves} == {2}

    adapters.query_b[...] += 0.5
    save_adapters(tmp_path / "adapters", decoder, "base")
    again = load_model(FIXTURE).decoder()
    load_adapters(tmp_path / "adapters", again)
    assert again.adapters is not None
    np.testing.assert_array_equal(again.adapters.query_b[...], adapters.query_b[...])
    np.testing.assert_array_equal(again.adapters.down_a[...], adapters.down_a[...])


def test_without_a_rank_every_weight_is_trained() -> None:
    config = load_config([])
    decoder = policy_decoder(config, load_model(FIXTURE))
    assert decoder.adapters is None
    assert decoder.remat == "none"
