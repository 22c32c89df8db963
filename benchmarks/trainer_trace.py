"""What the trainer's benchmarks train on: groups of multi-turn episodes, played as a run plays them.

A scripted player walks over FrozenLake and says first what it thinks, in a few words or in many, so lengths
spread. Pool, agent, chat template and ledger are a run's own, and so are prompts, masks and lengths; the
log-probabilities are those of the model that is trained.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gymllm.engines.scripted import ScriptedEngine
from gymllm.pool import EnvPool
from gymllm.rollout import AdmissionGate, Rollout, RolloutConfig
from gymllm.task import SeededTasks
from gymllm.timeline import Timeline
from gymllm.trajectory import Group, Trajectory
from gymllm.transcripts import read_jsonl, write_jsonl
from gymllm_agents import ConversationConfig, ModelAgent, Tokenizer, train_tokenizer
from gymllm_envs.frozen_lake import FrozenLake, scripted_action
from gymllm_trainers.models import Decoder
from gymllm_trainers.models.logprob_head import token_statistics

GROUP, TURNS = 8, 24
SKILL = 0.5
SYSTEM = (
    "You are a careful player. Think about where the ice is, then say your move as the last word."
)
THOUGHTS = (
    "the map shows a hole near the goal so i look at each cell around me row column ice wall far close "
    "maybe it is safe to walk along this line and then turn because that way is longer but not blocked"
)


def record(
    tokenizer: Tokenizer,
    *,
    groups: int,
    seed: int = 0,
    turns: int = TURNS,
    same_length: bool = False,
) -> list[Group]:
    """Plays so many groups; none has equal rewards for all its members.

    Args:
        tokenizer: Whose ids and chat template.
        groups: How many, of `GROUP` members each.
        seed: Decides maps and play.
        turns: Most turns of an episode.
        same_length: Whether every thought has as many words, as a comparison.
    """

    vocabulary = THOUGHTS.split()

    def reply(prompt: str, rng: np.random.Generator) -> str:
        words = 12 if same_length else min(int(rng.lognormal(2.5, 0.8)) + 1, 150)
        thought = " ".join(vocabulary[i] for i in rng.integers(len(vocabulary), size=words))
        return f"{thought}. {scripted_action(prompt, rng=rng, skill=SKILL)}"

    engine = ScriptedEngine(reply, tokenizer, context_length=4096)
    return asyncio.run(_play(tokenizer, engine, groups=groups, seed=seed, turns=turns))


def small_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer of that many entries, trained on what is said in these episodes."""
    rng = np.random.default_rng(0)
    env = FrozenLake(size=4)
    texts = [" ".join(rng.choice(THOUGHTS.split(), size=30)) for _ in range(200)]
    texts += [env.reset(seed=seed)[0] for seed in range(50)]
    env.close()
    return train_tokenizer(
        [SYSTEM, *texts, "system\n", "user\n", "assistant\n"], vocab_size=vocab_size
    )


async def _play(
    tokenizer: Tokenizer, engine: ScriptedEngine, *, groups: int, seed: int, turns: int
) -> list[Group]:
    config = ConversationConfig(system_prompt=SYSTEM, max_new_tokens=256)
    played: list[Group] = []
    async with EnvPool(lambda: FrozenLake(size=4, max_turns=turns), GROUP) as pool:
        rollout = Rollout(
            pool=pool,
            make_agent=ModelAgent.factory(tokenizer, config),
            engine=engine,
            tasks=SeededTasks(run_seed=seed),
            # One episode after another: the order, and so the trace, is always the same.
            config=RolloutConfig(group_size=GROUP, concurrency=1, max_lag=0, max_turns=turns),
            gate=(gate := AdmissionGate(groups_per_step=1, max_lag=0)),
            run_seed=seed,
            timeline=Timeline(),
        )
        async with rollout.stream() as stream:
            while len(played) < groups:
                group = await stream.receive()
                gate.leave()
                if np.ptp(group.rewards) > 0:
                    played.append(group)
    return played


def with_logprobs(groups: list[Group], decoder: Decoder, *, block: int = 256) -> list[Group]:
    """The groups with the log-probabilities that a model gives their generated tokens."""
    graph, state = nnx.split(decoder)
    tied = decoder.config.tie_word_embeddings

    @jax.jit
    def logprobs(state: nnx.State, ids_T: jax.Array) -> jax.Array:
        model = nnx.merge(graph, state)
        size = ids_T.shape[0]
        # One sequence that ends with the row: what is behind its own tokens reaches none of them.
        ends = jnp.full((1, size), size, jnp.int32)
        hidden = model.hidden(ids_T[None], jnp.arange(size, dtype=jnp.int32)[None], ends)[0]
        return token_statistics(
            hidden,
            (model.embedding if tied else model.head)[...],
            jnp.roll(ids_T, -1),
            jnp.ones(size, jnp.float32),
            tied=tied,
            temperature=1.0,
            softcap=model.config.final_softcap,
            chunk=256,
        ).logprob

    def of(trajectory: Trajectory) -> Trajectory:
        segments = []
        for segment in trajectory.segments:
            ids = np.zeros(-(-len(segment) // block) * block, np.int32)
            ids[: len(segment)] = segment.ids
            after = np.asarray(logprobs(state, jnp.asarray(ids)))[: len(segment) - 1]
            values = np.concatenate([np.zeros(1, np.float32), after]) * segment.mask
            segments.append(dataclasses.replace(segment, logprobs=values.astype(np.float32)))
        return dataclasses.replace(trajectory, segments=tuple(segments))

    return [
        dataclasses.replace(group, trajectories=tuple(of(one) for one in group.trajectories))
        for group in groups
    ]


def write_trace(path: Path, groups: list[Group]) -> None:
    """The groups as peers read them: prompt, completion, its mask and log-probabilities, and the advantage.

    The prompt is what stands before the first generated token; the completion is all the rest, with what the
    environment said in between, whose mask is 0.
    """
    written = []
    for group in groups:
        centred = np.array(group.rewards) - np.mean(group.rewards)
        members = []
        for trajectory, advantage in zip(group.trajectories, centred, strict=True):
            (segment,) = trajectory.segments
            start = int(segment.mask.argmax())
            members.append(
                {
                    "prompt": segment.ids[:start].tolist(),
                    "completion": segment.ids[start:].tolist(),
                    "mask": segment.mask[start:].tolist(),
                    "logprobs": segment.logprobs[start:].tolist(),
                    "advantage": float(advantage),
                }
            )
        written.append(members)
    path.write_text(json.dumps(written))


def lengths(groups: list[Group]) -> np.ndarray:
    """Tokens of every trajectory."""
    return np.array([t.tokens for group in groups for t in group.trajectories])


def trained(groups: list[Group]) -> int:
    """Tokens that the policy generated."""
    return sum(t.generated_tokens for group in groups for t in group.trajectories)


def write_groups(path: Path, groups: list[Group]) -> None:
    """Every trajectory, group by group, as `read_groups` reads them."""
    write_jsonl(path, (trajectory for group in groups for trajectory in group.trajectories))


def read_groups(path: Path) -> list[Group]:
    """The groups that `write_groups` wrote."""
    trajectories = list(read_jsonl(path))
    members = [tuple(trajectories[at : at + GROUP]) for at in range(0, len(trajectories), GROUP)]
    return [Group(task=each[0].task, trajectories=each) for each in members]
