"""Several agents: turns, rewards, endings, groups, resumes; real games where rules matter."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import anyio
import numpy as np
import pytest
from anyio.streams.memory import MemoryObjectReceiveStream

from gymllm.agent import Action, EpisodeContext
from gymllm.engine import Engine, GenerateRequest, SamplingParams
from gymllm.engines import ScriptedEngine
from gymllm.env import Env
from gymllm.episode import EpisodeLimits, run_episode, run_team_episode
from gymllm.errors import ConfigError
from gymllm.evaluation import evaluate
from gymllm.ledger import Segment, TokenLedger
from gymllm.message import Message
from gymllm.pool import EnvPool
from gymllm.rollout import AdmissionGate, Rollout, RolloutConfig
from gymllm.task import SeededTasks, Task
from gymllm.team import Player, Team, team_of, trained_agents
from gymllm.timeline import Timeline
from gymllm.trajectory import Ending, Group, Trajectory
from gymllm.transcripts import from_json, to_json
from gymllm_agents import train_tokenizer
from gymllm_envs.petting_zoo import scripted_action

TOKENIZER = train_tokenizer([], vocab_size=259)
TASK = Task(index=4, id="t4", seed=11)
ZOO, ARENA = "gymllm/PettingZoo-v0", "gymllm/TextArena-v0"
MOVES = re.compile(r"Available Moves: ([^\n]*)")


class Speaker:
    """The smallest agent there is: all that was said, as text, is the prompt; the answer is the action."""

    def __init__(self, context: EpisodeContext, opening: str) -> None:
        self.context, self._ledger = context, TokenLedger()
        self._messages = [Message(role="system", content=opening)]
        self._ledger.append_context(TOKENIZER.encode(opening, allow_special=False))

    async def act(self, observation: str) -> Action:
        engine, seed = self.context.engine, self.context.seed + len(self._messages)
        self._ledger.append_context(TOKENIZER.encode(f"\n{observation}\n", allow_special=False))
        if len(self._ledger) >= engine.context_length:
            return Action(text="", limit="context_length")
        length = len(self._ledger)
        answer = await engine.generate(
            GenerateRequest(
                prompt_ids=self._ledger.ids, sampling=SamplingParams(max_new_tokens=64, seed=seed)
            )
        )
        self._ledger.append_generation(answer, prompt_length=length)
        text = TOKENIZER.decode(answer.token_ids.tolist(), skip_special=True)
        self._messages += [
            Message(role="user", content=observation),
            Message(role="assistant", content=text),
        ]
        return Action(text=text, prompt_tokens=length, generated_tokens=len(answer.token_ids))

    def segments(self) -> tuple[Segment, ...]:
        return self._ledger.segments()

    def messages(self) -> tuple[Message, ...]:
        return tuple(self._messages)


def player(
    opening: str = "Play.", *, engine: Engine | None = None, trainable: bool = True
) -> Player:
    return Player(lambda context: Speaker(context, opening), engine=engine, trainable=trainable)


def says(*answers: str) -> ScriptedEngine:
    """Answers those, over and over; each conversation starts with the first."""
    left: dict[str, int] = {}

    def reply(prompt: str, rng: np.random.Generator) -> str:
        opening = prompt.split("\n", 1)[0]
        left[opening] = left.get(opening, -1) + 1
        return answers[left[opening] % len(answers)]

    return ScriptedEngine(reply, TOKENIZER)


def random_player(text: str, rng: np.random.Generator) -> str:
    """A possible move of whatever is played."""
    moves = MOVES.findall(text)
    return (
        str(rng.choice(moves[-1].split(", "))).strip("'")
        if moves
        else scripted_action(text, rng=rng)
    )


RANDOM = ScriptedEngine(random_player, TOKENIZER, context_length=10**5)


class Talk(Env):
    """`turns` names who acts at each turn; the last of them ends it. Subclasses change one thing."""

    turns: Sequence[str] = ("a", "b", "a")

    async def areset(self, *, seed=None, options=None):
        self.said: list[str] = []
        return "begin", {"agent": self.turns[0]}

    async def astep(self, action):
        self.said.append(action)
        done = len(self.said) == len(self.turns)
        info = {} if done else {"agent": self.turns[len(self.said)]}
        return f"heard {action}", 1.0, done, False, info


async def play(
    make_env: Callable[[], Env] | str,
    team: Team,
    *,
    engine: Engine | None = None,
    limits: EpisodeLimits | None = None,
    timeline: Timeline | None = None,
    seed: int = 0,
) -> dict[str, Trajectory]:
    pool = EnvPool(make_env, 1, env_id="test")
    try:
        with anyio.fail_after(5):
            async with pool.lease() as env:
                trajectories = await run_team_episode(
                    env=env,
                    team=team,
                    engine=engine or says("go"),
                    task=TASK,
                    member=1,
                    run_seed=seed,
                    limits=limits or EpisodeLimits(),
                    timeline=timeline or Timeline(),
                )
    finally:
        await pool.aclose()
    assert len({t.agent for t in trajectories}) == len(trajectories)
    return {t.agent: t for t in trajectories}


# ---------------------------------------------------------------------- turns and rewards


@pytest.mark.asyncio
async def test_each_agent_is_shown_and_keeps_what_is_its_own() -> None:
    timeline = Timeline()
    team = {"b": player("I am b."), "a": player("I am a.")}
    played = await play(Talk, team, engine=says("one", "two"), timeline=timeline)
    assert list(played) == ["b", "a"], "in the team's order"
    a, b = played["a"], played["b"]
    assert [(t.observation, t.action, t.reward) for t in a.turns] == [
        ("begin", "one", 1),
        ("heard one", "two", 1),
    ]
    assert [(t.observation, t.action, t.reward) for t in b.turns] == [("heard one", "one", 1)]
    assert (a.reward, b.reward) == (2, 1), "a step's reward is of who acted"
    assert [m.content for m in b.messages] == ["I am b.", "heard one", "one"]
    assert a.generated_tokens > b.generated_tokens > 0
    for one in (a, b):
        assert (one.ending, one.reason, one.member) == (Ending.TERMINATED, "", 1)
        assert (one.started_ns, one.ended_ns) == (a.started_ns, a.ended_ns)
        assert from_json(to_json(one)).agent == one.agent
    steps = [span.name for span in timeline.spans() if span.track == "episodes/4.1"]
    assert steps == ["reset", "step", "step", "step", "episode (terminated)"]


@pytest.mark.asyncio
async def test_agents_have_seeds_and_names_of_their_own() -> None:
    seen: dict[str, EpisodeContext] = {}

    def made(context: EpisodeContext) -> Speaker:
        seen[context.name] = context
        return Speaker(context, "")

    team = {"*": Player(made)}
    await play(Talk, team)
    first = dict(seen)
    assert list(first) == ["episodes/4.1/a", "episodes/4.1/b"], "made when they first act"
    assert len({context.seed for context in first.values()}) == 2
    await play(Talk, team)
    assert [c.seed for c in seen.values()] == [c.seed for c in first.values()]
    await play(Talk, team, seed=1)
    assert [c.seed for c in seen.values()] != [c.seed for c in first.values()]


class Scored(Talk):
    """Rewards by name: those of a step go to everyone concerned, whoever acted."""

    turns = ("a", "b", "a", "b")
    rewards: Sequence[Mapping[object, object]] = (
        {"b": 0.5, "c": 3},
        {"a": -1},
        {},
        {"a": 4, "b": -4},
    )

    async def astep(self, action):
        observation, _, *rest, info = await super().astep(action)
        return (
            observation,
            100.0,
            *rest,
            {**info, "agent_rewards": self.rewards[len(self.said) - 1]},
        )


@pytest.mark.asyncio
async def test_rewards_by_name_go_to_the_latest_turn_and_add_up() -> None:
    team = {"a": player(), "b": player(), "c": player(), "d": player()}
    played = await play(Scored, team)
    assert [turn.reward for turn in played["a"].turns] == [-1, 4]
    assert [turn.reward for turn in played["b"].turns] == [0, -4], "0.5 came before its first"
    assert {name: t.reward for name, t in played.items()} == {"a": 3, "b": -3.5, "c": 3, "d": 0}
    for name in ("c", "d"):  # they never acted
        assert played[name].turns == played[name].segments == played[name].messages == ()
        assert played[name].ending is Ending.TERMINATED


@pytest.mark.asyncio
async def test_anyone_plays_who_is_not_named() -> None:
    class Three(Talk):
        turns = ("c", "a", "b", "c")

    played = await play(Three, {"a": player(), "*": player()})
    assert list(played) == ["a", "c", "b"]
    assert [len(t.turns) for t in played.values()] == [1, 2, 1]
    played = await play(Three, {"a": player(), "*": player(trainable=False)})
    assert list(played) == ["a"]


class Alone(Talk):
    async def areset(self, *, seed=None, options=None):
        return (await super().areset())[0], {}

    async def astep(self, action):
        return *(await super().astep(action))[:4], {}


@pytest.mark.asyncio
async def test_an_environment_that_names_nobody_has_one_agent_without_a_name() -> None:
    for team in ({"": player()}, {"*": player()}):
        played = await play(Alone, team)
        assert list(played) == [""]
        assert (len(played[""].turns), played[""].reward) == (3, 3)


# ---------------------------------------------------------------------- endings and mistakes


def broken(*, agent: object = "b", rewards: object = None, at_reset: bool = False) -> type[Talk]:
    class Broken(Talk):
        async def areset(self, *, seed=None, options=None):
            observation, info = await super().areset()
            return observation, {"agent": agent} if at_reset else info

        async def astep(self, action):
            *rest, info = await super().astep(action)
            told = {} if rewards is None else {"agent_rewards": rewards}
            return *rest, {**info, "agent": agent, **told}

    return Broken


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("make_env", "problem"),
    [
        (broken(agent=3), r'info\["agent"\] must name an agent with a str, got 3'),
        (broken(agent=np.zeros(2), at_reset=True), "must name an agent with a str, got array"),
        (
            broken(agent="player_l"),
            "Unknown agent 'player_l'. Did you mean player_1.*\"\\*\" would",
        ),
        (broken(agent=""), "absent, so who acts has no name, but the team is a, b, player_1"),
        (broken(rewards=[1, 2]), r"must be a mapping of agents to rewards, got \[1, 2\]"),
        (broken(rewards={"a": "1"}), "must hold finite numbers, got '1' for 'a'"),
        (broken(rewards={"a": True}), "must hold finite numbers, got True for 'a'"),
        (broken(rewards={"b": float("nan")}), "must hold finite numbers, got nan for 'b'"),
        (broken(rewards={"b": 10**400}), "must hold finite numbers, got 10+ for 'b'"),
        (broken(rewards={"x": 1}), r"info\[.agent_rewards.\]: Unknown agent 'x'"),
        (broken(rewards={7: 1}), r"info\[.agent_rewards.\] must name an agent with a str, got 7"),
    ],
)
async def test_what_an_environment_says_wrongly_fails_the_episode(
    make_env: type[Talk], problem: str
) -> None:
    team = {"a": player(), "b": player(), "player_1": player(trainable=False)}
    played = await play(make_env, team)
    for one in played.values():
        assert one.ending is Ending.FAILED
        assert re.match(f"EnvTypeError: .*{problem}", one.reason), one.reason


@pytest.mark.asyncio
async def test_one_agent_in_an_environment_of_several_is_told_of_teams() -> None:
    pool = EnvPool(Talk, 1)
    async with pool.lease() as env:
        trajectory = await run_episode(
            env=env,
            make_agent=player().make_agent,
            engine=says("go"),
            task=TASK,
            member=0,
            run_seed=0,
            limits=EpisodeLimits(),
            timeline=Timeline(),
        )
    await pool.aclose()
    assert trajectory.ending is Ending.FAILED
    assert "has an agent 'a', but one agent without a name plays. Give a team" in trajectory.reason


@pytest.mark.asyncio
async def test_a_limit_of_one_truncates_for_all_and_is_told_by_name() -> None:
    short = ScriptedEngine(lambda prompt, rng: "go", TOKENIZER, context_length=8)
    played = await play(Talk, {"a": player(), "b": player(engine=short, trainable=False)})
    assert list(played) == ["a"]
    assert (played["a"].ending, played["a"].reason) == (Ending.TRUNCATED, "context_length (b)")
    assert (len(played["a"].turns), played["a"].reward) == (1, 1)


@pytest.mark.asyncio
async def test_what_breaks_one_fails_all_and_is_told_by_name() -> None:
    def lost(prompt: str, rng: np.random.Generator) -> str:
        raise OSError("device lost")

    team = {
        "a": player(),
        "b": player(engine=ScriptedEngine(lost, TOKENIZER), trainable=False),
    }
    played = await play(Talk, team)
    assert played["a"].ending is Ending.FAILED
    assert re.match("EngineError: b: .*device lost", played["a"].reason)


@pytest.mark.asyncio
async def test_turns_of_all_count_towards_max_turns() -> None:
    played = await play(Talk, {"a": player(), "b": player()}, limits=EpisodeLimits(max_turns=2))
    for one in played.values():
        assert (one.ending, one.reason, len(one.turns)) == (Ending.TRUNCATED, "max_turns", 1)


@pytest.mark.asyncio
async def test_before_anyone_appears_a_failure_has_somebody_to_tell_it() -> None:
    class NoReset(Talk):
        async def areset(self, *, seed=None, options=None):
            raise OSError("no board")

    for team in ({"*": player()}, {"a": player(), "b": player()}):
        played = await play(NoReset, team)
        assert list(played) == ([""] if "*" in team else ["a", "b"])
        assert all(t.ending is Ending.FAILED and "no board" in t.reason for t in played.values())


def test_who_is_trained_must_be_known() -> None:
    assert trained_agents({"a": player(), "b": player(trainable=False)}) == ("a",)
    with pytest.raises(ConfigError, match="'\\*' can't be trainable"):
        trained_agents({"a": player(), "*": player()})
    with pytest.raises(ConfigError, match="nobody of the team is trainable, got a, b"):
        trained_agents({name: player(trainable=False) for name in "ab"})
    for make_agent, team in ((None, None), (player().make_agent, {"a": player()})):
        with pytest.raises(ConfigError, match="one of them"):
            team_of(make_agent, team)
    with pytest.raises(ConfigError, match="at least one player"):
        team_of(None, {})


# ---------------------------------------------------------------------- groups


class Scene:
    """A rollout of a team, with everything around it."""

    def __init__(
        self,
        make_env: Callable[[], Env] | str,
        team: Team,
        *,
        engine: Engine | None = None,
        groups_per_step: int = 2,
        max_lag: int = 1,
        first_index: int = 0,
        again: Sequence[int] = (),
        settled: Mapping[int, Sequence[str]] | None = None,
        **config: int,
    ) -> None:
        self.ended: list[Trajectory] = []
        self.pool = EnvPool(make_env, 4, env_id="test")
        self.gate = AdmissionGate(groups_per_step=groups_per_step, max_lag=max_lag)
        self.rollout = Rollout(
            pool=self.pool,
            team=team,
            engine=engine or RANDOM,
            tasks=SeededTasks(run_seed=3),
            config=RolloutConfig(**{"group_size": 2, "concurrency": 4, **config}),
            gate=self.gate,
            run_seed=0,
            timeline=Timeline(),
            first_index=first_index,
            again=again,
            settled=settled,
            on_trajectory=self.ended.append,
        )

    @asynccontextmanager
    async def play(self) -> AsyncGenerator[MemoryObjectReceiveStream[Group]]:
        try:
            with anyio.fail_after(10):
                async with self.rollout.stream() as groups:
                    yield groups
        finally:
            await self.pool.aclose()

    async def take(self, count: int) -> list[Group]:
        """Plays until so many groups have come, and settles them."""
        taken: list[Group] = []
        async with self.play() as groups:
            for _ in range(count):
                taken.append(await groups.receive())
                self.rollout.settle(taken[-1].task, taken[-1].agent)
                self.gate.leave()
        return taken


def by_task(groups: Sequence[Group]) -> dict[int, dict[str, Group]]:
    found: dict[int, dict[str, Group]] = {}
    for group in groups:
        found.setdefault(group.task.index, {})[group.agent] = group
    return found


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("env_id", "agents"),
    [(ZOO, ("player_1", "player_2")), (ARENA, ("player_0", "player_1"))],
)
async def test_self_play_gives_a_group_to_each_with_opposite_rewards(
    env_id: str, agents: tuple[str, str]
) -> None:
    scene = Scene(env_id, {agent: player() for agent in agents})
    groups = by_task(await scene.take(12))
    whole = [pair for pair in groups.values() if len(pair) == 2]
    assert len(whole) >= 5
    for pair in whole:
        first, second = (pair[agent] for agent in agents)
        assert first.rewards == tuple(-reward for reward in second.rewards)
        for one, other in zip(first.trajectories, second.trajectories, strict=True):
            assert {one.agent, other.agent} == set(agents)
            assert 0 <= len(one.turns) - len(other.turns) <= 1
            assert one.generated_tokens > 0
    decided = [r for pair in whole for r in pair[agents[0]].rewards if r]
    assert len(set(decided)) == 2, "each of them wins at times"


@pytest.mark.asyncio
async def test_the_same_seed_plays_the_same_games() -> None:
    async def games() -> dict[tuple[int, int], list[str]]:
        scene = Scene(ZOO, {"player_1": player(), "player_2": player()})
        return {
            (t.task.index, t.member): [turn.action for turn in t.turns]
            for group in await scene.take(6)
            for t in group.trajectories
            if group.agent == "player_1"
        }

    one, other = await games(), await games()
    shared = one.keys() & other.keys()
    assert len(shared) >= 4
    assert all(one[key] == other[key] for key in shared)
    assert one[0, 0] != one[0, 1], "members differ"


@pytest.mark.asyncio
async def test_a_frozen_opponent_has_its_own_engine_and_no_group() -> None:
    asked: list[str] = []

    def careful(prompt: str, rng: np.random.Generator) -> str:
        asked.append(prompt)
        return random_player(prompt, rng)

    frozen = ScriptedEngine(careful, TOKENIZER, context_length=10**5, version=7)
    team = {
        "player_1": player("I learn."),
        "*": player("I am as I was.", engine=frozen, trainable=False),
    }
    scene = Scene(ZOO, team, groups_per_step=1)
    groups = await scene.take(4)
    assert {group.agent for group in groups} == {"player_1"}
    assert asked
    assert all(prompt.startswith("I am as I was.") for prompt in asked)
    for group in groups:
        for trajectory in group.trajectories:
            (segment,) = trajectory.segments
            assert set(segment.versions[segment.mask == 1].tolist()) == {0}


class Shop(Env):
    """A user wants something that only they know; the assistant must name it within four turns."""

    async def areset(self, *, seed=None, options=None):
        self.wish = ("apples", "pears")[int(self.np_random.integers(2))]
        self.turns = 0
        return f"You want {self.wish}.", {"agent": "user"}

    async def astep(self, action):
        self.turns += 1
        if self.turns % 2:
            return action, 0.0, False, self.turns > 6, {"agent": "assistant", "agent_rewards": {}}
        sold = self.wish in action
        return (
            action,
            0.0,
            sold,
            False,
            {"agent": "user", "agent_rewards": {"assistant": float(sold)}},
        )


@pytest.mark.asyncio
async def test_a_user_simulator_is_another_prompt_that_is_not_trained() -> None:
    def model(prompt: str, rng: np.random.Generator) -> str:
        if prompt.startswith("You are a customer."):
            return "I'd like " + re.findall(r"You want (\w+)", prompt)[-1]
        return "Here: " + re.findall(r"I'd like (\w+)", prompt)[-1]

    team = {
        "assistant": player("You sell fruit."),
        "user": player("You are a customer.", trainable=False),
    }
    groups = await Scene(Shop, team, engine=ScriptedEngine(model, TOKENIZER)).take(4)
    assert {group.agent for group in groups} == {"assistant"}
    for group in groups:
        assert group.rewards == (1, 1)
        for trajectory in group.trajectories:
            system, user, _ = trajectory.messages
            assert system.content == "You sell fruit."
            assert user.content.startswith("I'd like ")
            assert trajectory.turns[0].observation == user.content


# ---------------------------------------------------------------------- admission and resume


@pytest.mark.asyncio
async def test_the_gate_counts_groups() -> None:
    scene = Scene(Talk, {"a": player(), "b": player()}, engine=says("go"))
    async with scene.play() as groups:
        await anyio.wait_all_tasks_blocked()
        assert scene.gate.outstanding == scene.gate.limit == 4
        assert {t.task.index for t in scene.ended} == {0, 1}
        await groups.receive()
        scene.gate.leave()
        await anyio.wait_all_tasks_blocked()
        assert scene.gate.outstanding == 3, "one of two has no room"
        await groups.receive()
        scene.gate.leave()
        await anyio.wait_all_tasks_blocked()
        assert scene.gate.outstanding == 4
        assert scene.rollout.counts.groups == 6


@pytest.mark.asyncio
async def test_a_step_that_is_not_full_is_never_waited_for_in_vain() -> None:
    """Without lag: of two groups one is set aside, and the task that comes next has two again."""
    scene = Scene(Talk, {"a": player(), "b": player()}, engine=says("go"), max_lag=0)
    async with scene.play() as groups:
        await groups.receive()
        await groups.receive()
        scene.gate.leave()  # one was flat; the other waits for the rest of its step
        assert (await groups.receive()).task.index == 1
        assert scene.gate.outstanding == 3


def test_more_agents_than_groups_may_be_in_play_are_refused() -> None:
    team = {name: player() for name in "abc"}
    with pytest.raises(ConfigError, match=r"a task has 3 groups, .* a, b, c, but only 2 may be"):
        Scene(Talk, team, max_lag=0)


@pytest.mark.asyncio
async def test_a_task_that_keeps_failing_is_replaced_with_all_its_groups() -> None:
    class Doomed(Talk):
        async def astep(self, action):
            if self.np_random_seed == SeededTasks(run_seed=3).task(1).seed:
                raise OSError("lost")
            return await super().astep(action)

    scene = Scene(Doomed, {"a": player(), "b": player()}, engine=says("go"), retries=1)
    groups = await scene.take(6)
    assert [group.task.index for group in groups] == [0, 0, 2, 2, 3, 3]
    counts = scene.rollout.counts
    assert (counts.replaced_groups, counts.lost_episodes) == (2, 0)
    assert scene.gate.outstanding <= scene.gate.limit
    assert 1 not in scene.rollout.position()[1]


@pytest.mark.asyncio
async def test_a_task_is_settled_when_all_its_groups_are() -> None:
    team = {"a": player(), "b": player()}
    scene = Scene(Talk, team, engine=says("go"))
    async with scene.play() as groups:
        for _ in range(3):
            group = await groups.receive()
            scene.rollout.settle(group.task, group.agent)
            scene.gate.leave()
        with pytest.raises(ValueError, match="no groups of agent '', only of a, b"):
            scene.rollout.settle(group.task)
    first, again = scene.rollout.position()
    settled = scene.rollout.settled()
    assert again == list(range(1, first))
    assert settled == {1: ["a"]}

    resumed = Scene(Talk, team, engine=says("go"), first_index=first, again=again, settled=settled)
    assert resumed.rollout.position() == (first, again)
    assert resumed.rollout.settled() == settled
    came = [(group.task.index, group.agent) for group in await resumed.take(6)]
    assert came[0] == (1, "b"), "a's was trained on before"
    assert len(set(came)) == 6
    assert {(1, "a"), (0, "a"), (0, "b")}.isdisjoint(came)
    assert {t.agent for t in resumed.ended if t.task.index == 1} == {"a", "b"}, "both play it"


# ---------------------------------------------------------------------- evaluation


@pytest.mark.asyncio
async def test_evaluation_tells_each_agents_reward_and_wins() -> None:
    def first_free(text: str, rng: np.random.Generator) -> str:
        return re.findall(r"Valid actions: (\d)", text)[-1]

    pool = EnvPool(ZOO, 4)
    try:
        with anyio.fail_after(10):
            result = await evaluate(
                pool=pool,
                team={
                    "player_1": player(),
                    "*": player(
                        engine=ScriptedEngine(first_free, TOKENIZER, context_length=10**5),
                        trainable=False,
                    ),
                },
                engine=RANDOM,
                tasks=SeededTasks(run_seed=0),
                episodes=24,
                concurrency=4,
            )
    finally:
        await pool.aclose()
    assert (result.episodes, len(result.trajectories), result.failed) == (24, 48, 0)
    assert result.agents == ("player_1", "player_2")
    assert result.endings == {"terminated": 24}
    assert result.reward.mean == 0
    one, other = (result.of(agent) for agent in result.agents)
    assert one.reward.mean == -other.reward.mean
    wins = [result.wins(agent) for agent in result.agents]
    won = [sum(t.reward == 1 for t in side.trajectories) for side in (one, other)]
    assert [w.mean for w in wins] == [count / 24 for count in won]
    assert all(w.count == 24 for w in wins)
    assert sum(won) > 12
