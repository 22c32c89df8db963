"""The engine on several devices: divided over two, copied on two, both; simulated on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

PROGRAM = """
import asyncio, json
import jax, numpy as np
from dataclasses import replace
from flax import nnx
from gymllm.engine import GenerateRequest, SamplingParams
from gymllm.errors import ConfigError
from gymllm.timeline import Timeline
from gymllm_trainers.engine import EngineConfig, Replicas, open_engine
from gymllm_trainers.models import DecoderConfig, random_decoder

shape = DecoderConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128)
decoders = []
for seed in range(2):
    graph, state = nnx.split(random_decoder(shape, seed=seed))
    decoders.append(nnx.merge(graph, jax.tree.map(lambda l: l * 4 if l.std() else l, state)))
config = EngineConfig(slots=4, context_length=64, small_batch=4, prefill_tokens=(32,),
    page_size=8, reuse_lag=0)
draw = np.random.default_rng(0)
prompts = [draw.integers(64, size=n).tolist() for n in (3, 20, 30, 9, 20, 7)]

async def play(engine):
    engine.ready.wait()
    async def all_of(version):
        requests = []
        for n, prompt in enumerate(prompts):
            sampling = SamplingParams(max_new_tokens=8, seed=n, temperature=n % 2)
            requests.append(GenerateRequest(prompt_ids=prompt, sampling=sampling))
        answers = await asyncio.gather(*map(engine.generate, requests))
        assert all(set(a.versions.tolist()) == {version} for a in answers)
        return [a.token_ids.tolist() for a in answers]
    tokens = await all_of(0)
    engine.publish(nnx.state(decoders[1]), 1)
    tokens += await all_of(1)
    again = prompts[1] + tokens[7]
    turn = await engine.generate(GenerateRequest(prompt_ids=again, sampling=SamplingParams(max_new_tokens=2)))
    busy = [e.counts.requests for e in engine.engines] if isinstance(engine, Replicas) else []
    await engine.aclose()
    return {"tokens": tokens, "reused": turn.reused_tokens, "busy": busy}

results = {}
for name, sizes in {"one": (1, 1), "tensor": (2, 1), "replicas": (1, 2), "both": (2, 2)}.items():
    c = replace(config, tensor=sizes[0], replicas=sizes[1])
    results[name] = asyncio.run(play(open_engine(decoders[0], c, timeline=Timeline())))
try:
    open_engine(decoders[0], replace(config, tensor=2, replicas=4), timeline=Timeline())
except ConfigError as error:
    results["error"] = str(error)
print(json.dumps(results))
"""


def test_every_arrangement_of_devices_gives_the_same_tokens() -> None:
    flags = "--xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    one = results["one"]
    assert one["tokens"][:6] != one["tokens"][6:], "other weights, other tokens"
    for name in ("tensor", "replicas", "both"):
        assert results[name]["tokens"] == one["tokens"], name
        # The conversation came back to the replica that has its pages.
        assert results[name]["reused"] == one["reused"] == 27
    assert all(count > 0 for count in results["replicas"]["busy"])
    assert "is 8, but there are 4 devices" in results["error"]
