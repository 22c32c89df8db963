"""Multi-turn FrozenLake, a group of 8, 8 turns: what finding what was computed before saves.

The same episodes are played twice: once as they come, once with what was generated then, each request
computed anew with another first token, so that nothing of it is found in the cache. Answers are held to the
four moves by a grammar, so that every turn is a move.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from dataclasses import dataclass, field

from engine_serving import copy_counts, counts_since, named_model, serving, smaller
from table import Table

from gymllm.engine import Engine, GenerateRequest, Generation
from gymllm.pool import EnvPool
from gymllm.rollout import AdmissionGate, Rollout, RolloutConfig
from gymllm.task import SeededTasks
from gymllm.timeline import Timeline
from gymllm.trajectory import Group
from gymllm_agents import ConversationConfig, ModelAgent
from gymllm_envs.frozen_lake import ACTIONS, FrozenLake
from gymllm_trainers.engine import EngineConfig, JaxEngine
from gymllm_trainers.models import LoadedModel

GROUP, TURNS = 8, 8
ANSWER = 16
"""Most tokens of an answer."""

Key = tuple[bytes, int]
"""A request: its prompt and its seed."""


def _key(request: GenerateRequest) -> Key:
    return str([int(i) for i in request.prompt_ids]).encode(), request.sampling.seed


@dataclass
class Recording:
    """An engine that answers with a move, and remembers what it was asked and what it answered."""

    engine: JaxEngine
    said: dict[Key, Generation] = field(default_factory=dict)
    prompt_tokens: int = 0

    @property
    def context_length(self) -> int:
        return self.engine.context_length

    @property
    def version(self) -> int:
        return self.engine.version

    async def generate(self, request: GenerateRequest) -> Generation:
        """As the engine does, held to the moves."""
        moves = dataclasses.replace(request.sampling, choices=ACTIONS)
        generation = await self.engine.generate(dataclasses.replace(request, sampling=moves))
        self.said[_key(request)] = generation
        self.prompt_tokens += len(request.prompt_ids)
        return generation

    async def aclose(self) -> None:
        """The engine is closed by who made it."""


@dataclass
class Anew(Recording):
    """Answers what was said before, once the engine has computed as many tokens with nothing reused."""

    first_token: int = 1

    async def generate(self, request: GenerateRequest) -> Generation:
        """Has the engine compute a request of the same size."""
        said = self.said[_key(request)]
        self.first_token += 1  # no two prompts begin alike
        prompt = [self.first_token, *(int(i) for i in request.prompt_ids[1:])]
        sampling = dataclasses.replace(
            request.sampling, max_new_tokens=len(said.token_ids), stop_token_ids=(), stop=()
        )
        await self.engine.generate(GenerateRequest(prompt_ids=prompt, sampling=sampling))
        return said


def turn_rows(table: Table, model: str, *, quick: bool) -> None:
    """Rows of prefilled tokens and of seconds, with and without reuse."""
    loaded, name = named_model(model, quick=quick)
    config = EngineConfig(slots=GROUP, context_length=2048)
    if quick:
        config = smaller(config)
    asyncio.run(_measure(table, loaded, name, config, rounds=1 if quick else 3))


async def _measure(
    table: Table, model: LoadedModel, name: str, config: EngineConfig, *, rounds: int
) -> None:
    with_reuse: list[float] = []
    without: list[float] = []
    prefilled = prefilled_anew = prompts = turns = 0
    async with serving(model.decoder(), config, tokenizer=model.tokenizer) as engine:
        await _play(model, Recording(engine), "Warm-up.", 1)
        anew = Anew(engine)
        for number in range(rounds):
            # Rounds begin differently: nothing is left of one for the next.
            system = f"Game {number}."
            recording = Recording(engine)
            before = copy_counts(engine)
            seconds, group = await _play(model, recording, system, TURNS)
            with_reuse.append(seconds)
            prefilled += counts_since(engine, before)["prefill_tokens"]
            prompts += recording.prompt_tokens
            turns += sum(len(trajectory.turns) for trajectory in group.trajectories)
            anew.said = recording.said
            before = copy_counts(engine)
            without.append((await _play(model, anew, system, TURNS))[0])
            prefilled_anew += counts_since(engine, before)["prefill_tokens"]
    what = f"FrozenLake, G = 8, 8 turns, {name}"
    table.add(f"{what}: turns an episode", turns / rounds / GROUP, "", "8")
    table.add(f"{what}: prompt tokens a group", prompts / rounds, "tokens")
    table.add(f"{what}: prefilled, with reuse", prefilled / rounds, "tokens")
    table.add(f"{what}: prefilled, without", prefilled_anew / rounds, "tokens")
    table.add(f"{what}: fewer prefilled", prefilled_anew / max(prefilled, 1), "x", ">= 5")
    table.add(f"{what}: a group, with reuse", statistics.median(with_reuse), "s")
    table.add(f"{what}: a group, without", statistics.median(without), "s")
    ratio = statistics.median(without) / statistics.median(with_reuse)
    table.add(f"{what}: end to end", ratio, "x", "what reuse gives")


async def _play(model: LoadedModel, engine: Engine, system: str, turns: int) -> tuple[float, Group]:
    """Seconds of one group, and the group."""
    # A lake without holes whose goal is farther away than the turns reach: no episode ends early.
    pool = EnvPool(lambda: FrozenLake(size=6, frozen_probability=1.0), GROUP)
    rollout = Rollout(
        pool=pool,
        make_agent=ModelAgent.factory(
            model.tokenizer,
            ConversationConfig(system_prompt=system, max_new_tokens=ANSWER),
        ),
        engine=engine,
        tasks=SeededTasks(run_seed=0),
        config=RolloutConfig(group_size=GROUP, concurrency=GROUP, max_lag=0, max_turns=turns),
        gate=AdmissionGate(groups_per_step=1, max_lag=0),
        run_seed=0,
        timeline=Timeline(),
    )
    started = time.perf_counter()
    async with rollout.stream() as groups:
        group = await groups.receive()
        seconds = time.perf_counter() - started
    await pool.aclose()
    return seconds, group
