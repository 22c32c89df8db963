"""`gymllm-eval`: a model plays an environment; a table, transcripts and a page say how well."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gymllm.engine import Engine
from gymllm.engines.openai import OPENAI_URL, OpenAIEngine
from gymllm.episode import EpisodeLimits
from gymllm.errors import ConfigError, ModelError, RunError, UnknownNameError
from gymllm.evaluation import Estimate, EvaluationResult, evaluate
from gymllm.event_loop import LOOP_OPTIONS
from gymllm.memory import collect_rarely
from gymllm.team import ANYONE, Team
from gymllm.timeline import Timeline
from gymllm.tool_calls import ToolSchema
from gymllm.trajectory import Trajectory
from gymllm.transcripts import to_json, write_html
from gymllm_agents import Tokenizer, train_tokenizer
from gymllm_trainers.build import EnvSettings, open_pool, task_source
from gymllm_trainers.checkpoint import Checkpointer
from gymllm_trainers.compilation import use_compilation_cache
from gymllm_trainers.config import TrainConfig
from gymllm_trainers.config_checks import draft
from gymllm_trainers.config_files import merge, parse_scalar, read_yaml
from gymllm_trainers.engine import EngineConfig, open_engine
from gymllm_trainers.flags import take_env_kwargs, take_players
from gymllm_trainers.interrupt import Interrupt
from gymllm_trainers.learner import Learner
from gymllm_trainers.models import Decoder, LoadedModel, load_model
from gymllm_trainers.players import (
    AgentSettings,
    PlayerSettings,
    build_team,
    scripted_engine,
    scripted_player,
    tools_named,
)
from gymllm_trainers.report import format_seconds
from gymllm_trainers.run_folder import LineFile, RunFolder, write_atomically
from gymllm_trainers.starting_model import TINY, policy_decoder, warm_start_folder
from gymllm_trainers.toolbox import Toolbox, open_tools

SCRIPTED = "scripted"
OPENAI = "openai:"
SERVER_CONTEXT = 1_000_000
"""Tokens: the server is the one who knows."""
SCRIPTED_CONTEXT = 65_536
"""Tokens that a scripted player reads at most: its text is bytes, and costs nothing."""


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """What is evaluated. Zero or empty means as the run, or --config, has it."""

    model: str
    """A run's folder (runs/NAME), a model folder, a .gguf file, a hub name, "smollm2";
    "scripted": the environment's own scripted player; or "openai:NAME", a model of a server."""
    url: str = ""
    """openai:NAME: the server, up to what is before /chat/completions; vLLM, SGLang, llama.cpp and most
    hosts serve the same. Default: OpenAI's own. The key is OPENAI_API_KEY."""
    env: str = ""
    """Environment; default: the one of the run, else gymllm/FrozenLake-v0. Its other settings are those
    of gymllm-train: --env.worker process, --env.step-timeout-s 300, ..."""
    env_kwargs: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """Arguments of the environment, beside those of the run; --env.kwargs.size 5, one flag each. So may
    players be, where it has several agents: --players.player_1.engine scripted. Without any the model
    plays all of them."""
    config: Path | None = None
    """A training configuration whose environment and agent are used."""
    episodes: int = 64
    """Episodes, each of another task; none is a task that training plays, unless the environment lists
    its tasks by name: then those, in order, over and over."""
    seed: int = 0
    """Decides tasks and sampling."""
    temperature: float | None = None
    """Softmax temperature of sampling; 0 is greedy."""
    max_new_tokens: int = 0
    """Most tokens of one answer."""
    max_turns: int = 0
    """Turns after which an episode is truncated."""
    context_length: int = 0
    """Tokens of prompt and generation together."""
    concurrency: int = 0
    """Episodes at once."""
    skill: float = 1.0
    """How well the scripted player plays, from 0 to 1."""
    out: Path | None = None
    """Folder of the transcripts; default: a new one below runs/."""

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise ConfigError(f"--episodes must be >= 1, got {self.episodes}.")
        for name in ("seed", "max_new_tokens", "max_turns", "context_length", "concurrency"):
            if getattr(self, name) < 0:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} must be >= 0, got {getattr(self, name)}.")
        if self.url and not self.model.startswith(OPENAI):
            raise ConfigError(f"--url is for --model openai:NAME, got --model {self.model}.")
        if self.model == OPENAI:
            raise ConfigError(
                "--model openai: needs the server's name of the model behind the colon."
            )
        if not 0 <= self.skill <= 1:
            raise ConfigError(f"--skill must be from 0 to 1, got {self.skill}.")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a command line came to: every setting decided."""

    model: str
    """As the user wrote it."""
    url: str
    """Of its server, where it has one; empty: the usual one."""
    env: EnvSettings
    agent: AgentSettings
    players: Mapping[str, PlayerSettings]
    """Empty: the model plays every agent there is."""
    engine: EngineConfig
    limits: EpisodeLimits
    retries: int
    episodes: int
    seed: int
    concurrency: int
    skill: float
    dtype: Literal["float32", "bfloat16"]
    compute_dtype: Literal["float32", "bfloat16"]
    run: TrainConfig | None
    """The run's configuration, where the model is a run's folder."""
    out: Path


def load_settings(argv: Sequence[str]) -> Evaluation:
    """Everything that is needed: flags over the configuration of the run, or of --config.

    A mistake in a flag, and `--help`, end the program as usual for command lines (`SystemExit`).

    Raises:
        ConfigError: A value or file that can't be used.
    """
    arguments, kwargs = take_env_kwargs(argv)
    arguments, env_settings = _take_env_settings(arguments)
    arguments, players = take_players(arguments, {})
    settings = tyro.cli(
        EvalSettings,
        # "--env.kwargs size 5", as gymllm-train takes it too.
        args=["--env-kwargs" if word == "--env.kwargs" else word for word in arguments],
        prog="gymllm-eval",
        description="Plays episodes with a model and says what they came to.",
    )
    is_run = RunFolder(Path(settings.model)).config.is_file()
    with draft():  # how it was or will be trained is no matter here
        run = None
        if is_run:
            run = merge(TrainConfig(), read_yaml(RunFolder(Path(settings.model)).config))
        base = run or TrainConfig()
        if settings.config is not None:
            base = merge(base, read_yaml(settings.config))
        if players:
            _, players = take_players(argv, base.players)
            base = merge(base, {"players": players})
        env_id = env_settings.pop("id", settings.env)
        env = merge(base, {"env": env_settings}).env
    if env_id and env_id != env.id:
        # Arguments of one environment mean nothing to another.
        env = merge(env, {"id": env_id, "kwargs": {}})
    env = merge(env, {"kwargs": {**env.kwargs, **settings.env_kwargs, **kwargs}})
    agent = base.agent
    if settings.temperature is not None:
        agent = dataclasses.replace(agent, temperature=settings.temperature)
    if settings.max_new_tokens:
        agent = dataclasses.replace(agent, max_new_tokens=settings.max_new_tokens)
    limits = base.rollout.limits
    if settings.max_turns:
        limits = dataclasses.replace(limits, max_turns=settings.max_turns)
    concurrency = settings.concurrency or min(base.engine.slots, settings.episodes)
    context_length = settings.context_length or base.engine.context_length
    if not settings.context_length and settings.model == SCRIPTED:
        context_length = SCRIPTED_CONTEXT
    if not settings.context_length and settings.model.startswith(OPENAI):
        context_length = SERVER_CONTEXT
    return Evaluation(
        model=settings.model,
        url=settings.url,
        env=env,
        agent=agent,
        players=base.players,
        engine=dataclasses.replace(base.engine, slots=concurrency, context_length=context_length),
        limits=limits,
        retries=base.rollout.retries,
        episodes=settings.episodes,
        seed=settings.seed,
        concurrency=concurrency,
        skill=settings.skill,
        dtype=base.model.dtype,
        compute_dtype=base.model.compute_dtype,
        run=run,
        out=settings.out or _default_out(settings.model, env.id),
    )


def _take_env_settings(argv: Sequence[str]) -> tuple[list[str], dict[str, object]]:
    """Takes `--env.worker process` and the like out, as `take_env_kwargs` does: here --env is the id."""
    rest: list[str] = []
    taken: dict[str, object] = {}
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if not flag.startswith("--env.") or flag == "--env.kwargs":
            rest.append(word)
            continue
        if not equals:
            value = next(words, "--")
        if value.startswith("--"):
            raise ConfigError(f"{flag} needs a value, as in --env.worker process.")
        taken[flag.removeprefix("--env.").replace("-", "_")] = parse_scalar(value)
    return rest, taken


def run(evaluation: Evaluation) -> None:
    """Evaluates; prints the table and writes the transcripts.

    Raises:
        GymLLMError: Something can't be used, or every episode failed; the transcripts say how.
        KeyboardInterrupt: Ctrl-C; the episodes that had ended are written.
    """
    use_compilation_cache()
    with Interrupt() as interrupt:
        _run(evaluation, interrupt)


def _run(evaluation: Evaluation, interrupt: Interrupt) -> None:
    started = time.monotonic()
    collect_rarely()
    try:
        evaluation.out.mkdir(parents=True, exist_ok=True)
        transcripts = evaluation.out / "transcripts.jsonl"
        transcripts.unlink(missing_ok=True)
        lines = LineFile(transcripts)
    except OSError as error:
        raise RunError(
            f"can't write to {evaluation.out}: {error.strerror}. Choose another folder with --out."
        ) from error
    ended: list[Trajectory] = []
    played: set[int] = set()  # one that several agents play ends with a trajectory of each
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    shown = bar.add_task("loading", total=evaluation.episodes)

    def take(trajectory: Trajectory) -> None:
        ended.append(trajectory)
        played.add(trajectory.task.index)
        lines.write(to_json(trajectory))
        bar.update(shown, completed=len(played), description="playing")

    facts: dict[str, str] = {}
    unwritten: OSError | None = None
    try:
        with bar:
            result = anyio.run(
                _play_or_stop,
                evaluation,
                take,
                interrupt,
                backend="asyncio",
                backend_options=LOOP_OPTIONS,
            )
        if result is not None:
            facts = {"reward": str(result.reward), "endings": _counts(result.endings)}
            if _several(result):
                facts = {f"reward of {a}": str(result.of(a).reward) for a in result.agents} | facts
                del facts["reward"]
    finally:
        lines.close()
        if ended:
            title = f"{evaluation.model} on {evaluation.env.id}"
            try:
                write_html(evaluation.out / "transcripts.html", ended, title=title, facts=facts)
            except OSError as error:  # the numbers are still worth showing
                (evaluation.out / "transcripts.html").unlink(missing_ok=True)
                unwritten = error
        else:  # a mistake, seen before anything was played, leaves nothing behind
            transcripts.unlink(missing_ok=True)
            with suppress(OSError):
                evaluation.out.rmdir()
    console = Console(highlight=False)
    if result is None:
        console.print(f"Interrupted after {len(played)} of {evaluation.episodes} episodes.")
        if ended:
            _say_where(console, evaluation, unwritten)
        return
    summary = json.dumps(summarize(evaluation, result), indent=2)
    try:
        write_atomically(evaluation.out / "summary.json", summary.encode())
    except OSError as error:
        unwritten = error
    if all(not t.turns and t.reason.startswith("context_length") for t in result.trajectories):
        raise RunError(
            "no episode had a first turn: its prompt leaves no room in a context of "
            f"{evaluation.engine.context_length} tokens. Raise --context-length."
        )
    console.print(result_table(evaluation, result, time.monotonic() - started))
    if unwritten is not None:
        raise RunError(
            f"the transcripts can't be written whole to {evaluation.out}: {unwritten.strerror}. "
            "Free some space and evaluate again, or choose another folder with --out."
        )
    _say_where(console, evaluation, None)
    if not result.scored:
        raise RunError(f"every episode failed, the first with {result.trajectories[0].reason}")


def _say_where(console: Console, evaluation: Evaluation, unwritten: OSError | None) -> None:
    if unwritten is None:
        console.print(f"Transcripts to read: {evaluation.out / 'transcripts.html'}", soft_wrap=True)
    console.print(f"... as JSON lines:   {evaluation.out / 'transcripts.jsonl'}", soft_wrap=True)


async def _play_or_stop(
    evaluation: Evaluation, on_trajectory: Callable[[Trajectory], None], interrupt: Interrupt
) -> EvaluationResult | None:
    """As `play`; None if it was interrupted."""
    with anyio.CancelScope() as scope, interrupt.cancels(scope):
        return await play(evaluation, on_trajectory)
    return None


async def play(
    evaluation: Evaluation, on_trajectory: Callable[[Trajectory], None]
) -> EvaluationResult:
    """Plays the episodes; owns, and closes, the environments and the engine."""
    env, timeline = evaluation.env, Timeline()
    named = tools_named(evaluation.agent, evaluation.players)
    async with (
        open_pool(env, evaluation.concurrency) as pool,
        open_tools(named, evaluation.agent.sandbox) as toolbox,
    ):
        engine, tokenizer = _engine(evaluation, timeline)
        others: list[Engine] = []
        try:
            tools = await pool.tools()
            team = _team(evaluation, tokenizer, toolbox, tools, timeline, others)
            tasks = await task_source(
                env, run_seed=evaluation.seed, split="evaluation", shuffle=False
            )
            return await evaluate(
                pool=pool,
                team=team,
                engine=engine,
                tasks=tasks,
                episodes=evaluation.episodes,
                concurrency=evaluation.concurrency,
                run_seed=evaluation.seed,
                retries=evaluation.retries,
                limits=evaluation.limits,
                timeline=timeline,
                on_trajectory=on_trajectory,
            )
        finally:
            with anyio.CancelScope(shield=True):
                for one in (engine, *others):
                    await one.aclose()


def _engine(evaluation: Evaluation, timeline: Timeline) -> tuple[Engine, Tokenizer | None]:
    if evaluation.model.startswith(OPENAI):
        return _server(evaluation), None
    if evaluation.model == SCRIPTED:
        tokenizer = _plain()
        return _scripted(evaluation, tokenizer, evaluation.skill), tokenizer
    if evaluation.run is not None:
        decoder, tokenizer = _run_policy(RunFolder(Path(evaluation.model)), evaluation.run)
    else:
        model = load_model(evaluation.model, dtype=evaluation.dtype)
        decoder = model.decoder(compute_dtype=evaluation.compute_dtype)
        tokenizer = model.tokenizer
    engine = open_engine(decoder, evaluation.engine, timeline=timeline, tokenizer=tokenizer)
    return engine, tokenizer


def _plain() -> Tokenizer:
    """Any does for a scripted player, who reads and writes text. One without merges is made at once."""
    return train_tokenizer([], vocab_size=259)


def _server(evaluation: Evaluation) -> Engine:
    return OpenAIEngine(
        evaluation.model.removeprefix(OPENAI),
        url=evaluation.url or OPENAI_URL,
        context_length=evaluation.engine.context_length,
        max_concurrent=evaluation.concurrency,
    )


def _team(
    evaluation: Evaluation,
    tokenizer: Tokenizer | None,
    toolbox: Toolbox,
    env_tools: Sequence[ToolSchema],
    timeline: Timeline,
    others: list[Engine],
) -> Team:
    """Who plays; engines that are made for it are added to `others`."""
    players = evaluation.players or {ANYONE: PlayerSettings()}
    made: dict[PlayerSettings, Engine] = {}

    def engine_of(settings: PlayerSettings) -> Engine | None:
        if settings.engine == "frozen" and evaluation.run is not None:
            key = PlayerSettings(engine="frozen")
            if key not in made:
                model = _start(evaluation.run)
                decoder = model.decoder(compute_dtype=evaluation.run.model.compute_dtype)
                made[key] = open_engine(
                    decoder, evaluation.engine, timeline=timeline, name="frozen_engine"
                )
                others.append(made[key])
            return made[key]
        if settings.engine == "scripted":
            if settings not in made:
                made[settings] = _scripted(evaluation, tokenizer or _plain(), settings.skill)
                others.append(made[settings])
            return made[settings]
        return None  # a model that no run trained is as it was

    return build_team(
        tokenizer,
        evaluation.agent,
        players,
        toolbox=toolbox,
        env_tools=env_tools,
        engine_of=engine_of,
    )


def _scripted(evaluation: Evaluation, tokenizer: Tokenizer, skill: float) -> Engine:
    try:
        player = scripted_player(evaluation.env.id)
    except UnknownNameError as problem:
        raise ConfigError(
            f"there is no scripted player for {evaluation.env.id}, only for "
            f"{', '.join(problem.known)}. Give another --model: a run's folder, a model's folder, or "
            "smollm2."
        ) from None
    length = evaluation.engine.context_length
    return scripted_engine(player, tokenizer, skill=skill, context_length=length)


def _start(config: TrainConfig) -> LoadedModel:
    """The model that a run started from."""
    start = str(warm_start_folder(config)) if config.model.name == TINY else config.model.name
    return load_model(start, dtype=config.model.dtype)


def _run_policy(folder: RunFolder, config: TrainConfig) -> tuple[Decoder, Tokenizer]:
    """The policy of a run: of its last checkpoint, or of its exported model if that is as new."""
    checkpoints = Checkpointer(folder.checkpoints, read_only=True)
    step = checkpoints.latest()
    exported = folder.model / "config.json"
    if exported.is_file() and (
        step is None or exported.stat().st_mtime >= checkpoints.path(step).stat().st_mtime
    ):
        model = load_model(folder.model, dtype=config.model.dtype)
        return model.decoder(compute_dtype=config.model.compute_dtype), model.tokenizer
    if step is None:
        raise ModelError(
            f"the run in {folder.path} has no checkpoint yet. "
            f"Continue it with gymllm-train --resume {folder.path}."
        )
    model = _start(config)
    learner = Learner(
        policy_decoder(config, model),
        config.learner,
        row_tokens=config.engine.context_length,
        temperature=1.0,
        max_lag=0,
    )
    trained = checkpoints.restore(step, {"trainable": learner.state.trainable})["trainable"]
    learner.state = learner.state._replace(trainable=trained)
    return learner.policy(), model.tokenizer


def summarize(evaluation: Evaluation, result: EvaluationResult) -> dict[str, object]:
    """The result as JSON: what was asked, and every number of the table."""
    return {
        "model": evaluation.model,
        "env": evaluation.env.id,
        "env_kwargs": dict(evaluation.env.kwargs),
        "seed": evaluation.seed,
        "temperature": evaluation.agent.temperature,
        "episodes": result.episodes,
        "failed": result.failed,
        "retried": dict(result.retried),
        "reward": _estimate(result.reward),
        "metrics": {name: _estimate(mean) for name, mean in result.metrics.items()},
        "turns": _estimate(result.turns),
        "tokens": _estimate(result.tokens),
        "generated_tokens": _estimate(result.generated_tokens),
        "invalid_actions": result.invalid_actions,
        "endings": result.endings,
        **({"agents": _agents(result)} if _several(result) else {}),
    }


def _several(result: EvaluationResult) -> bool:
    return result.agents not in ((), ("",))


def _agents(result: EvaluationResult) -> dict[str, object]:
    """What each agent's episodes come to."""
    return {
        agent: {"reward": _estimate(result.of(agent).reward), "wins": _estimate(result.wins(agent))}
        for agent in result.agents
    }


def result_table(evaluation: Evaluation, result: EvaluationResult, elapsed_s: float) -> Table:
    """The result for a person."""
    episodes = f"{result.episodes} episodes"
    table = Table(
        title=f"{evaluation.model} on {evaluation.env.id}, {episodes}", title_style="bold"
    )
    table.add_column("")
    table.add_column("mean", justify="right")
    table.add_column("95 % interval", justify="right")
    rewards = [("reward", result.reward, 3)]
    if _several(result):
        rewards = [(f"reward of {agent}", result.of(agent).reward, 3) for agent in result.agents]
        rewards += [(f"wins of {agent}", result.wins(agent), 3) for agent in result.agents]
    for label, estimate, digits in (
        *rewards,
        *((name.replace("_", " "), mean, 3) for name, mean in result.metrics.items()),
        ("turns", result.turns, 1),
        ("tokens", result.tokens, 0),
        ("generated tokens", result.generated_tokens, 0),
    ):
        if not result.scored:
            break  # there is no mean of nothing
        interval = f"{estimate.low:.{digits}f} to {estimate.high:.{digits}f}"
        style = "bold" if label.startswith("reward") else ""
        table.add_row(label, f"{estimate.mean:.{digits}f}", interval, style=style)
    table.add_section()
    for ending, count in _kinds(result.endings).items():
        table.add_row(ending, str(count), f"{count / result.episodes:.0%}")
    if result.invalid_actions:
        table.add_row("actions not readable", str(result.invalid_actions), "")
    if result.retried:
        table.add_row("failed, played again", str(sum(result.retried.values())), "")
    table.caption = (
        f"seed {evaluation.seed}, temperature {evaluation.agent.temperature:g}, "
        f"{format_seconds(elapsed_s)}"
    )
    return table


def _default_out(model: str, env_id: str) -> Path:
    words = re.sub(r"[^A-Za-z0-9.]+", "-", f"{Path(model).name}-{env_id.rpartition('/')[2]}")
    return Path("runs") / f"eval-{words.strip('-').lower()}-{time.strftime('%m%d-%H%M%S')}"


def _estimate(estimate: Estimate) -> dict[str, float | int | None]:
    finite = {
        name: value if abs(value) < float("inf") else None
        for name, value in dataclasses.asdict(estimate).items()
    }
    return finite


def _counts(endings: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in _kinds(endings).items())


def _kinds(endings: Mapping[str, int]) -> dict[str, int]:
    """Failures by the error's class alone: their texts name requests and slots, each another."""
    counts = Counter[str]()
    for ending, count in endings.items():
        how, _, reason = ending.partition(": ")
        counts[f"failed: {reason.partition(':')[0]}" if how == "failed" else _short(ending)] += (
            count
        )
    return dict(counts.most_common())


def _short(text: str) -> str:
    return text if len(text) <= 48 else text[:45] + "..."
