"""google-tunix's sampler, asked for batches: python tunix_sampler.py MODEL_FOLDER (Qwen3, safetensors)."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from answering import answer
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params

COMPILED = "/jax/core/compile/backend_compile_duration"


class Ids:
    """A tokenizer whose texts are ids with blanks between them; no text ever ends."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return ""

    def bos_id(self) -> int:
        return 0

    def pad_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return -1


class Peer:
    """Samplers of one model, by the size of their cache."""

    def __init__(self, folder: str) -> None:
        shape = json.loads((Path(folder) / "config.json").read_text())
        self.config = qwen3.ModelConfig(
            num_layers=shape["num_hidden_layers"],
            vocab_size=shape["vocab_size"],
            embed_dim=shape["hidden_size"],
            hidden_dim=shape["intermediate_size"],
            num_heads=shape["num_attention_heads"],
            head_dim=shape["head_dim"],
            num_kv_heads=shape["num_key_value_heads"],
            rope_theta=shape["rope_theta"],
            norm_eps=shape["rms_norm_eps"],
            use_tied_embedding=shape["tie_word_embeddings"],
        )
        self.model = qwen3_params.create_model_from_safe_tensors(
            folder, self.config, dtype=jnp.float32
        )
        self.samplers: dict[int, Sampler] = {}
        self.compiled, self.compile_s = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def generate(
        self, prompts: list[list[int]], new: int, cache: int, temperature: float, seed: int = 0
    ) -> dict[str, Any]:
        """Seconds, the ids, and what was compiled for it; greedy at temperature 0."""
        if cache not in self.samplers:
            shape = self.config
            sizes = CacheConfig(cache, shape.num_layers, shape.num_kv_heads, shape.head_dim)
            self.samplers[cache] = Sampler(self.model, Ids(), sizes)
        compiled, compile_s = self.compiled, self.compile_s
        started = time.perf_counter()
        output = self.samplers[cache](
            [" ".join(map(str, prompt)) for prompt in prompts],
            max_generation_steps=new,
            max_prompt_length=len(prompts[0]),
            eos_tokens=[-1],
            temperature=temperature,
            top_p=1.0 if temperature > 0 else None,
            seed=seed,
        )
        seconds = time.perf_counter() - started
        return {
            "seconds": seconds,
            "ids": [np.asarray(row).tolist() for row in output.tokens],
            "compiled": self.compiled - compiled,
            "compile_s": self.compile_s - compile_s,
        }

    def _count(self, event: str, seconds: float, **_: Any) -> None:
        if event == COMPILED:
            self.compiled += 1
            self.compile_s += seconds


if __name__ == "__main__":
    answer({"generate": Peer(sys.argv[1]).generate})
