"""How soon the first update comes, and how long later ones take: agentic GRPO end to end.

16 episodes of 4 turns a step (2 groups of 8), a transformer of 1.7 million parameters in float32, about 60
prompt tokens and 20 generated ones a turn: the case that PEERS measures google-tunix on (13-16 s for its
first step, then 3.9 s). The clock starts when the learner and the engine are made, so JAX's import is not in
it; compilation is, from an empty cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import anyio
import anyio.to_thread
import jax
from flax import nnx

import gymllm
from gymllm.pool import EnvPool
from gymllm.rollout import AdmissionGate, Rollout, RolloutConfig
from gymllm.task import SeededTasks
from gymllm.timeline import Timeline
from gymllm_agents import ConversationConfig, ModelAgent, train_tokenizer
from gymllm_trainers.algorithms.config import AlgorithmConfig
from gymllm_trainers.engine import EngineConfig, JaxEngine
from gymllm_trainers.learner import Learner, LearnerConfig
from gymllm_trainers.memory import keep_freed_memory
from gymllm_trainers.models import Decoder, DecoderConfig

TURNS = 4
WORDS = (
    *("ice", "hole", "goal", "left", "right", "up", "down", "row", "column"),
    *("north", "south", "east", "west", "fish", "boat", "lamp"),
)


class FourTurns(gymllm.Env):
    """Shows words; rewards a turn whose answer has an even number of characters."""

    waits = False

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._turn = 0
        return self._words(), {}

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._turn += 1
        return self._words(), float(len(action) % 2 == 0), self._turn == TURNS, False, {}

    def _words(self) -> str:
        return " ".join(self.np_random.choice(WORDS, size=48).tolist())


async def measure(steps: int) -> tuple[list[float], int, dict[str, float]]:
    """Seconds of each update, the model's parameters, and the last step's metrics."""
    tokenizer = train_tokenizer([" ".join(WORDS), "user\n", "assistant\n"] * 100, vocab_size=384)
    shape = DecoderConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=512,
        qk_norm=True,
    )
    decoder = Decoder(shape, rngs=nnx.Rngs(0))
    jax.block_until_ready(nnx.state(decoder))
    timeline, times = Timeline(), []
    config = RolloutConfig(group_size=8, concurrency=32, max_lag=1)
    gate = AdmissionGate(groups_per_step=2, max_lag=config.max_lag)
    pool = EnvPool(FourTurns, config.concurrency)
    started = time.perf_counter()
    learner = Learner(
        decoder,
        LearnerConfig(groups_per_step=2),
        algorithm=AlgorithmConfig(zero_variance="keep"),
        row_tokens=704,
        temperature=1.0,
        max_lag=config.max_lag,
    )
    # Prompts of 60 tokens, 30 of them new each turn: one chunk size serves them all.
    engine = JaxEngine(
        learner.policy(),
        EngineConfig(slots=32, context_length=448, prefill_tokens=(256,)),
        timeline=timeline,
    )
    await anyio.to_thread.run_sync(learner.compile)
    rollout = Rollout(
        pool=pool,
        make_agent=ModelAgent.factory(tokenizer, ConversationConfig(max_new_tokens=20)),
        engine=engine,
        tasks=SeededTasks(run_seed=0),
        config=config,
        gate=gate,
        run_seed=0,
        timeline=timeline,
    )
    metrics: dict[str, float] = {}
    try:
        async with rollout.stream() as groups:
            while learner.version < steps:
                while learner.groups < 2:
                    group = await groups.receive()
                    await anyio.to_thread.run_sync(learner.add_group, group)
                metrics = await anyio.to_thread.run_sync(learner.step)
                engine.publish(await anyio.to_thread.run_sync(learner.weights), learner.version)
                gate.leave(2)
                now = time.perf_counter()
                times.append(now - started)
                started = now
    finally:
        with anyio.CancelScope(shield=True):
            await engine.aclose()
            await pool.aclose()
    return times, shape.parameters, metrics


def main() -> None:
    """Prints the table and its JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    quick = parser.parse_args().quick
    keep_freed_memory()
    times, parameters, metrics = anyio.run(measure, 6 if quick else 20)
    later = times[1:]
    rows = [
        {"what": "parameters", "value": parameters, "unit": "", "goal": "1.7 million"},
        {"what": "first update", "value": round(times[0], 2), "unit": "s", "goal": "<= 8"},
        {
            "what": "later updates, median",
            "value": round(statistics.median(later), 2),
            "unit": "s",
            "goal": "<= 1.5",
        },
        {"what": "later updates, worst", "value": round(max(later), 2), "unit": "s", "goal": ""},
        {
            "what": "tokens a step",
            "value": round(metrics["train_tokens"]),
            "unit": "tokens",
            "goal": "about 5200",
        },
        {
            "what": "trained tokens a step",
            "value": round(metrics["trained_tokens"]),
            "unit": "tokens",
            "goal": "about 1250",
        },
        {
            "what": "padding share",
            "value": round(metrics["padding_share"], 3),
            "unit": "",
            "goal": "",
        },
    ]
    for row in rows:
        print(f"{row['what']:24} {row['value']!s:>10} {row['unit']:7} {row['goal']}")
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
