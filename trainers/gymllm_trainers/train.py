"""One training run, top to bottom: setup, rollout, advantage, update, log.

Everything that waits lives on one event loop in the main thread: episodes, agents, the loop below. The
engine has a thread of its own, gradients are computed in a worker thread, the display has one too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar, cast

import anyio
import anyio.to_thread
import jax.numpy as jnp
from flax import nnx

from gymllm.engine import Engine
from gymllm.errors import ConfigError, RunError, UnknownNameError
from gymllm.event_loop import LOOP_OPTIONS
from gymllm.memory import collect_rarely
from gymllm.pool import EnvPool
from gymllm.rollout import AdmissionGate, Rollout
from gymllm.team import Team
from gymllm.timeline import Timeline
from gymllm.trajectory import Ending, Group, Trajectory
from gymllm_agents import Tokenizer
from gymllm_envs.scripted import SCRIPTED_PLAYERS
from gymllm_trainers.build import open_pool, task_source
from gymllm_trainers.checkpoint import Checkpointer, Json
from gymllm_trainers.checkpoint_files import checkpoint_files
from gymllm_trainers.compilation import use_compilation_cache
from gymllm_trainers.config import TrainConfig, config_yaml, open_run_folder
from gymllm_trainers.display import Display, RunView
from gymllm_trainers.engine import EmbeddedEngine, EngineCounts, open_engine
from gymllm_trainers.flat_groups import FlatGroups
from gymllm_trainers.interrupt import Interrupt
from gymllm_trainers.learner import Learner, LearnerState
from gymllm_trainers.memory import keep_freed_memory
from gymllm_trainers.mesh import check_mesh, on_one_device, open_mesh, place_decoder
from gymllm_trainers.models import (
    Decoder,
    LoadedModel,
    choose_linears,
    decoder_params,
    load_model,
    save_adapters,
    save_model,
)
from gymllm_trainers.players import (
    PlayerSettings,
    build_team,
    check_players,
    scripted_engine,
    scripted_player,
    tools_named,
)
from gymllm_trainers.report import print_report
from gymllm_trainers.rewards import RewardModel, apply_rewards, open_reward
from gymllm_trainers.rewards.function import load_function
from gymllm_trainers.run_files import RunFiles
from gymllm_trainers.run_folder import RunFolder, warn
from gymllm_trainers.statistics import StepStatistics
from gymllm_trainers.supervised import Example, batches, find_files, imitation, load_examples
from gymllm_trainers.toolbox import Toolbox, open_tools
from gymllm_trainers.warm_start import cache_folder, random_start, warm_start

T = TypeVar("T")

TINY = "tiny"
"""Name of gymllm's own tiny model."""

EXPORT_PATIENCE_S = 2.0
"""How long after Ctrl-C the model may still be written."""


def run(config: TrainConfig) -> None:
    """Trains, and leaves everything in the run's folder.

    Raises:
        GymLLMError: A setting can't be used, or the run can't go on; what was collected is saved.
        KeyboardInterrupt: Ctrl-C; a checkpoint was written, and everything closed.
    """
    check_players(config.players, temperature=config.agent.temperature)
    if config.reward.kind == "function":
        load_function(config.reward.function)  # a mistake in it needn't wait for a model
    with Interrupt() as interrupt:
        started = time.monotonic()
        keep_freed_memory()
        collect_rarely()
        use_compilation_cache()
        folder = open_run_folder(config)
        try:
            _run_in(folder, config, interrupt, started)
        finally:
            folder.unlock()


def _run_in(folder: RunFolder, config: TrainConfig, interrupt: Interrupt, started: float) -> None:
    timeline = Timeline()
    kept = config.checkpoint
    checkpoints = Checkpointer(
        folder.checkpoints,
        keep=kept.keep,
        keep_best=kept.keep_best,
        best_metric=kept.best_metric,
        keep_every=kept.keep_every,
    )
    resume_step = checkpoints.latest() if config.resume is not None else None
    view = RunView(name=folder.path.name, steps=config.steps, timeline=timeline)
    files = RunFiles(
        folder,
        config,
        timeline,
        # A run that ended before its first checkpoint starts again: nothing of it stays on record.
        resume_step=None if config.resume is None else resume_step or 0,
        hurried=lambda: interrupt.requested,
    )
    headline = "Stopped by an error"
    try:
        with Display(view, live=config.metrics.display) as display:
            session = _Session(
                config, timeline, checkpoints, resume_step, view, display, files, interrupt
            )
            whole = anyio.run(_main, session, backend="asyncio", backend_options=LOOP_OPTIONS)
        headline = "Finished" if whole else f"Interrupted at step {view.step}"
    finally:
        files.close(draw=headline == "Finished")
        if headline == "Stopped by an error" and config.resume is None and folder.is_bare():
            # A model that can't be loaded, say: nothing was played, so there is nothing to go on with.
            folder.remove()
        else:
            print_report(
                folder=folder,
                timeline=timeline,
                elapsed_s=time.monotonic() - started,
                headline=headline,
                notes=[*files.notes, *_compiled(files.programs)],
                shown=files.shown,
                to_resume=headline != "Finished",
            )


@dataclass(frozen=True)
class _Session:
    """What the parts of one run share."""

    config: TrainConfig
    timeline: Timeline
    checkpoints: Checkpointer
    resume_step: int | None
    view: RunView
    display: Display
    files: RunFiles
    interrupt: Interrupt
    checkpoint_files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """What every checkpoint holds beside the state, once the model is loaded."""


async def _main(session: _Session) -> bool:
    """Whether the run was done before anyone interrupted it."""
    with anyio.CancelScope() as scope, session.interrupt.cancels(scope):
        await _set_up_and_train(session)
    return not scope.cancelled_caught


async def _set_up_and_train(session: _Session) -> None:
    if session.config.algorithm.preset == "sft":
        await _set_up_and_imitate(session)
    else:
        await _set_up_and_play(session)


async def _set_up_and_play(session: _Session) -> None:
    config, display = session.config, session.display
    clock = session.timeline.clock("learner")
    async with (
        open_pool(config.env, config.rollout.concurrency) as pool,
        open_tools(tools_named(config.agent, config.players), config.agent.sandbox) as toolbox,
    ):
        clock.enter("model")
        started = time.monotonic()
        model = await _model(config, pool, toolbox, display.phase)
        session.files.notes.append(f"model ready after {time.monotonic() - started:.1f} s")
        clock.enter("compile")
        display.phase("compiling")
        learner, engine = await _in_thread(lambda: _learner_and_engine(session, model))
        others: dict[PlayerSettings, Engine] = {}
        try:
            team = build_team(
                model.tokenizer,
                config.agent,
                config.players,
                toolbox=toolbox,
                env_tools=await pool.tools(),
                engine_of=lambda settings: _other_engine(session, model, others, settings),
            )
            async with open_reward(
                config.reward,
                engine=engine,
                tokenizer=model.tokenizer,
                engine_config=config.engine,
                timeline=session.timeline,
            ) as reward:
                await _train(session, pool, model.tokenizer, team, learner, engine, reward)
        finally:
            clock.enter("closed")
            with anyio.CancelScope(shield=True):
                for one in (engine, *others.values()):
                    await one.aclose()


async def _train(
    session: _Session,
    pool: EnvPool,
    tokenizer: Tokenizer,
    team: Team,
    learner: Learner,
    engine: EmbeddedEngine,
    reward: RewardModel | None,
) -> None:
    """The loop: groups as they complete, a step when enough of them have, weights to the engine."""
    config, view = session.config, session.view
    clock = session.timeline.clock("learner")
    gate = AdmissionGate(
        groups_per_step=config.learner.groups_per_step, max_lag=config.rollout.max_lag
    )
    start = _position(session)
    rollout = Rollout(
        pool=pool,
        team=team,
        engine=engine,
        tasks=await task_source(config.env, run_seed=config.seed, split="train", shuffle=True),
        config=config.rollout,
        gate=gate,
        run_seed=config.seed,
        timeline=session.timeline,
        first_index=start.next_task,
        again=start.again,
        settled=start.settled,
        score_episode=None
        if reward is None
        else lambda trajectories: apply_rewards(trajectories, reward, config.reward),
        on_trajectory=lambda trajectory: _keep_failed(session, learner.version + 1, trajectory),
    )
    engine.idle_cause = lambda: (
        "waiting: environments" if rollout.counts.in_flight else "waiting: learner"
    )
    # What a checkpoint holds, taken only between steps: at Ctrl-C a step may be half done in its thread.
    progress = _Progress(learner.state, _TaskPosition.of(rollout))
    view.step, view.phase = learner.version, "training"
    session.display.phase("training")
    statistics = StepStatistics()
    flat = FlatGroups(most=config.learner.max_flat_groups)
    try:
        async with rollout.stream() as groups:
            while learner.version < config.steps:
                step = learner.version + 1
                started, engine_before = time.monotonic(), replace(engine.counts)
                pending: list[Group] = []
                while learner.groups < config.learner.groups_per_step:
                    clock.enter("waiting: episodes")
                    group = await groups.receive()
                    clock.enter("collect")
                    statistics.add(group)
                    session.files.trajectories(step, group.trajectories)
                    if await _in_thread(lambda group=group: learner.collect(group)):
                        flat.end()
                        pending.append(group)
                    else:
                        rollout.settle(group.task, group.agent)
                        gate.leave()
                        flat.add(group)
                    if learner.full_batches:
                        clock.enter("gradient")
                        await _in_thread(learner.compute)
                clock.enter("gradient")
                await _in_thread(lambda: learner.compute(flush=True))
                clock.enter("update")
                metrics = await _in_thread(learner.step)
                clock.enter("publish")
                await _in_thread(lambda: engine.publish(learner.weights(), learner.version))
                for group in pending:
                    rollout.settle(group.task, group.agent)
                gate.leave(len(pending))
                progress = _Progress(learner.state, _TaskPosition.of(rollout))
                clock.enter("log")
                seconds = time.monotonic() - started
                numbers = {
                    **{f"learner/{name}": value for name, value in metrics.items()},
                    **statistics.metrics(),
                    **_engine_metrics(engine, engine_before, seconds),
                    **_rollout_metrics(rollout, gate, pool),
                    **_time_metrics(session.timeline),
                    "time/step_s": seconds,
                }
                session.files.metrics(step, numbers)
                _show(view, step, numbers, gate, rollout)
                session.display.step_done()
                every = config.checkpoint.every
                progress = replace(progress, metrics=numbers)
                if every and step % every == 0 and step < config.steps:
                    clock.enter("checkpoint")
                    await _in_thread(lambda progress=progress: _try_checkpoint(session, progress))
    finally:
        # Ctrl-C and errors come through here too: a cancelled task must still be able to save.
        with anyio.CancelScope(shield=True):
            clock.enter("checkpoint")
            await _in_thread(lambda: _last_checkpoint(session, progress))
    await _write_model(session, learner, tokenizer)


async def _write_model(session: _Session, learner: Learner, tokenizer: Tokenizer) -> None:
    session.timeline.clock("learner").enter("export")
    session.display.phase("writing the model")
    # Ctrl-C lets it be written if that is quick, with time left to close the rest.
    session.interrupt.patience_s = EXPORT_PATIENCE_S
    await _in_thread(lambda: _export(session, learner, tokenizer))


# ------------------------------------------------------------------ supervised learning


async def _set_up_and_imitate(session: _Session) -> None:
    """algorithm.preset sft: no engine, and no environment but to make the tiny model with."""
    config, display = session.config, session.display
    find_files(config.supervised)  # a mistake there needn't wait for a model
    clock = session.timeline.clock("learner")
    clock.enter("model")
    if config.model.name == TINY:
        async with (
            open_pool(config.env, config.rollout.concurrency) as pool,
            open_tools(tools_named(config.agent, config.players), config.agent.sandbox) as toolbox,
        ):
            model = await _model(config, pool, toolbox, display.phase)
    else:
        model = await _loaded(config, display.phase)
    display.phase("reading what is imitated")
    length = config.engine.context_length
    examples = await _in_thread(
        lambda: load_examples(
            config.supervised, model.tokenizer, config.agent, context_length=length
        )
    )
    session.files.notes.append(f"{len(examples)} examples are imitated")
    clock.enter("compile")
    display.phase("compiling")
    learner = await _in_thread(lambda: _learner(session, model))
    await _in_thread(lambda: _compile(session, learner))
    await _imitate(session, learner, examples)
    await _write_model(session, learner, model.tokenizer)


async def _imitate(session: _Session, learner: Learner, examples: Sequence[Example]) -> None:
    """The loop: some examples, a step, in an order that the seed alone decides."""
    config, view = session.config, session.view
    clock = session.timeline.clock("learner")
    every = config.checkpoint.every
    nothing = _TaskPosition(next_task=0, again=[], settled={})
    progress = _Progress(learner.state, nothing)
    view.step = learner.version
    session.display.phase("training")
    numbered = batches(
        len(examples),
        config.supervised.examples_per_step,
        seed=config.seed,
        first=learner.version,
    )
    try:
        while learner.version < config.steps:
            started, chosen = time.monotonic(), next(numbered)
            clock.enter("gradient")
            for number in chosen:
                sequences = imitation(examples[number])
                await _in_thread(lambda sequences=sequences: learner.add_sequences(sequences))
            metrics = await _in_thread(learner.step)
            progress = _Progress(learner.state, nothing)
            clock.enter("log")
            view.step = step = learner.version
            seconds = time.monotonic() - started
            numbers = {f"learner/{name}": value for name, value in metrics.items()}
            numbers |= {**_time_metrics(session.timeline), "time/step_s": seconds}
            session.files.metrics(step, numbers)
            view.trained_per_s = numbers["learner/train_tokens"] / seconds
            session.display.step_done()
            progress = replace(progress, metrics=numbers)
            if every and step % every == 0 and step < config.steps:
                clock.enter("checkpoint")
                await _in_thread(lambda progress=progress: _try_checkpoint(session, progress))
    finally:
        with anyio.CancelScope(shield=True):
            clock.enter("checkpoint")
            await _in_thread(lambda: _last_checkpoint(session, progress))


# ------------------------------------------------------------------ setup


async def _loaded(config: TrainConfig, progress: Callable[[str], None]) -> LoadedModel:
    progress(f"loading {config.model.name}")
    try:
        return await _in_thread(lambda: load_model(config.model.name, dtype=config.model.dtype))
    except UnknownNameError as error:
        known = [*error.known, TINY]
        raise UnknownNameError(error.kind, error.name, known, error.hint) from None


async def _model(
    config: TrainConfig, pool: EnvPool, toolbox: Toolbox, progress: Callable[[str], None]
) -> LoadedModel:
    """The model that training starts from: loaded, or for "tiny" warm-started or random."""
    if config.model.name != TINY:
        return await _loaded(config, progress)
    settings, folder = config.warm_start, warm_start_folder(config)
    player = SCRIPTED_PLAYERS.get(config.env.id)
    if settings.cache and folder.exists():
        pass
    elif not settings.enabled:
        progress("training the tokenizer")
        await random_start(folder, settings, pool=pool, player=player, seed=config.seed)
    elif player is None:
        raise ConfigError(
            "the tiny model's warm start imitates a scripted player, and there is none for "
            f"{config.env.id} (only for {', '.join(SCRIPTED_PLAYERS)}). Start from another model with "
            "--model.name smollm2 or a model's folder, or from random weights with "
            "--warm-start.no-enabled."
        )
    else:
        env_tools = await pool.tools()
        await warm_start(
            folder,
            settings,
            pool=pool,
            player=player,
            agents=lambda tokenizer: build_team(
                tokenizer, config.agent, config.players, toolbox=toolbox, env_tools=env_tools
            ),
            limits=config.rollout.limits,
            context_length=config.engine.context_length,
            row_tokens=2 * config.engine.context_length,
            seed=config.seed,
            progress=progress,
        )
    return await _in_thread(lambda: load_model(str(folder), dtype=config.model.dtype))


def warm_start_folder(config: TrainConfig) -> Path:
    """Where the tiny model that this configuration starts from is kept."""
    depends_on: dict[str, object] = {
        "env": (config.env.id, dict(config.env.kwargs)),
        "agent": asdict(config.agent),
        "max_turns": config.rollout.max_turns,
        "context_length": config.engine.context_length,
    }
    if config.players:
        depends_on["players"] = {name: asdict(player) for name, player in config.players.items()}
    return cache_folder(config.warm_start, seed=config.seed, depends_on=depends_on)


def start_name(config: TrainConfig) -> str:
    """Name or folder of the model that a run starts from."""
    return str(warm_start_folder(config)) if config.model.name == TINY else config.model.name


def policy_decoder(config: TrainConfig, model: LoadedModel) -> Decoder:
    """The decoder to train, with the adapters that the settings ask for."""
    settings = config.model
    decoder = model.decoder(compute_dtype=jnp.dtype(settings.compute_dtype))
    decoder.remat = settings.remat
    if settings.lora_rank:
        decoder.add_adapters(
            rank=settings.lora_rank,
            alpha=settings.lora_alpha,
            linears=choose_linears(settings.lora_linears or "all-linear", model.config),
            rngs=nnx.Rngs(config.seed),
            dtype=jnp.float32,
        )
    return decoder


def _learner(session: _Session, model: LoadedModel) -> Learner:
    config = session.config
    session.checkpoint_files.update(
        checkpoint_files(
            config_yaml(config), model.config, model.tokenizer, dtype=config.model.dtype
        )
    )
    mesh = open_mesh(config.mesh)
    row_tokens = config.learner.row_tokens or 2 * config.engine.context_length
    decoder = policy_decoder(config, model)
    if mesh is not None:
        check_mesh(mesh, decoder.config, row_tokens=row_tokens)
    place_decoder(decoder, mesh)
    learner = Learner(
        decoder,
        config.learner,
        algorithm=config.algorithm,
        optimizer=config.optimizer,
        row_tokens=row_tokens,
        temperature=config.agent.temperature,
        max_lag=config.rollout.max_lag,
        context_length=config.engine.context_length,
        total_steps=config.steps,
        mesh=mesh,
        seed=config.seed,
    )
    if session.resume_step is not None:
        arrays = session.checkpoints.restore(session.resume_step, learner.state.arrays)
        learner.state = LearnerState.of(arrays, session.resume_step)
    session.files.programs += learner.programs
    return learner


def _compile(session: _Session, learner: Learner) -> None:
    learner.compile()
    needs = [f"{name} {size / 2**20:,.0f} MiB" for name, size in learner.predicted_bytes.items()]
    if needs:
        said = f"memory that the learner's programs need: {', '.join(needs)}"
        session.files.notes.append(said)
        session.display.phase(f"compiled; {said}")


def _learner_and_engine(session: _Session, model: LoadedModel) -> tuple[Learner, EmbeddedEngine]:
    config = session.config
    learner = _learner(session, model)
    serving = learner.serving()
    if learner.mesh is not None and config.engine.tensor * config.engine.replicas == 1:
        serving = on_one_device(serving)
    engine = open_engine(
        serving,
        config.engine,
        timeline=session.timeline,
        tokenizer=model.tokenizer,
        version=learner.version,
        log=session.files.programs.append,
    )
    # While the engine compiles in its own thread, and the first episodes play.
    _compile(session, learner)
    return learner, engine


def _other_engine(
    session: _Session,
    model: LoadedModel,
    made: dict[PlayerSettings, Engine],
    settings: PlayerSettings,
) -> Engine | None:
    """The engine of a player that isn't the policy; made once for all that are alike."""
    config = session.config
    if settings.engine == "policy":
        return None
    frozen = settings.engine == "frozen"
    key = PlayerSettings(engine="frozen") if frozen else settings
    if key not in made and frozen:
        decoder = model.decoder(compute_dtype=jnp.dtype(config.model.compute_dtype))
        made[key] = open_engine(
            decoder,
            config.engine,
            timeline=session.timeline,
            name="frozen_engine",
            log=session.files.programs.append,
        )
    elif key not in made:
        made[key] = scripted_engine(
            scripted_player(config.env.id),
            model.tokenizer,
            skill=settings.skill,
            context_length=config.engine.context_length,
        )
    return made[key]


def _position(session: _Session) -> _TaskPosition:
    """Where the run goes on."""
    if session.resume_step is None:
        return _TaskPosition(next_task=0, again=[], settled={})
    state = session.checkpoints.restore_state(session.resume_step)
    match state:
        case {"next_task": int(first), "again": list(again)}:
            # Of tasks with one agent, all that a checkpoint says.
            settled = cast("dict[str, list[str]]", state.get("settled", {}))
            return _TaskPosition(
                next_task=first,
                again=cast("list[int]", again),
                settled={int(index): agents for index, agents in settled.items()},
            )
        case _:
            raise session.checkpoints.damaged(
                session.resume_step, "state.json lacks next_task or again"
            )


# ------------------------------------------------------------------ what is kept


@dataclass(frozen=True, kw_only=True)
class _TaskPosition:
    """Which tasks are done: none is lost, none trained twice."""

    next_task: int
    """First that was never started."""
    again: list[int]
    """Those before it that must be played again."""
    settled: dict[int, list[str]]
    """Of these, agents whose group is done already."""

    @classmethod
    def of(cls, rollout: Rollout) -> _TaskPosition:
        """A rollout's, now."""
        next_task, again = rollout.position()
        return cls(next_task=next_task, again=again, settled=rollout.settled())


@dataclass(frozen=True)
class _Progress:
    """Parameters and the tasks that belong to them."""

    state: LearnerState
    tasks: _TaskPosition
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers of the step that made them."""


def _checkpoint(session: _Session, progress: _Progress, *, wait: bool = True) -> None:
    settled = {str(index): agents for index, agents in progress.tasks.settled.items()}
    tasks: dict[str, Json] = {
        "next_task": progress.tasks.next_task,
        "again": cast("list[Json]", progress.tasks.again),
        "settled": cast("dict[str, Json]", settled),
    }
    session.checkpoints.save(
        progress.state.version,
        progress.state.arrays,
        tasks,
        metrics=progress.metrics,
        files=session.checkpoint_files,
        wait=wait,
    )
    kept = session.config.checkpoint
    best = kept.best_metric.removeprefix("-")
    if kept.keep_best and progress.metrics and best not in progress.metrics:
        hint = "Without checkpoint.best_metric none is kept as the best; --resume can set another."
        warn(str(UnknownNameError("metric", best, progress.metrics, hint)))


def _try_checkpoint(session: _Session, progress: _Progress) -> None:
    """A checkpoint on the way: it is written while the run goes on, which it does if it can't be, too."""
    try:
        _checkpoint(session, progress, wait=False)
    except RunError as error:
        warn(str(error))


def _last_checkpoint(session: _Session, progress: _Progress) -> None:
    """The checkpoint that a run ends with, if none of the same state is there."""
    try:
        session.checkpoints.wait()
    except RunError as error:
        warn(str(error))
    if session.checkpoints.latest() != progress.state.version:
        _checkpoint(session, progress)


def _keep_failed(session: _Session, step: int, trajectory: Trajectory) -> None:
    """Failed episodes are never trained on, but whoever looks for the cause must find them."""
    if trajectory.ending is Ending.FAILED:
        session.files.trajectories(step, [trajectory])


def _compiled(programs: Sequence[str]) -> list[str]:
    return [f"{len(programs)} programs compiled: {', '.join(programs)}"] if programs else []


def _export(session: _Session, learner: Learner, tokenizer: Tokenizer) -> None:
    decoder = learner.policy()
    save_model(
        session.files.folder.model,
        decoder.config,
        decoder_params(decoder),
        tokenizer,
        overwrite=True,
    )
    config = session.config
    if config.model.lora_rank:
        base = start_name(config)
        save_adapters(session.files.folder.adapters, learner.serving(), base, overwrite=True)


# ------------------------------------------------------------------ numbers


def _engine_metrics(
    engine: EmbeddedEngine, before: EngineCounts, seconds: float
) -> dict[str, float]:
    now = engine.counts
    computed = max(now.computed_tokens - before.computed_tokens, 1)
    used = now.prefill_tokens - before.prefill_tokens
    used += now.generated_tokens - before.generated_tokens
    return {
        "engine/generated_per_s": (now.generated_tokens - before.generated_tokens) / seconds,
        "engine/prefilled_per_s": (now.prefill_tokens - before.prefill_tokens) / seconds,
        "engine/steps": float(now.steps - before.steps),
        "engine/padding_share": 1 - used / computed,
    }


def _rollout_metrics(rollout: Rollout, gate: AdmissionGate, pool: EnvPool) -> dict[str, float]:
    counts = rollout.counts
    return {
        "rollout/in_flight": float(counts.in_flight),
        "rollout/groups_outstanding": float(gate.outstanding),
        "rollout/failed_episodes": float(counts.failed),
        "rollout/replaced_groups": float(counts.replaced_groups),
        "rollout/lost_episodes": float(counts.lost_episodes),
        **{f"rollout/failed/{kind}": float(n) for kind, n in rollout.failures.items()},
    }


def _time_metrics(timeline: Timeline) -> dict[str, float]:
    """Share of each resource's time so far, by state; a resource's shares add up to 1."""
    shares: dict[str, float] = {}
    for resource, clock in timeline.clocks.items():
        totals = clock.totals_s()
        whole = sum(totals.values())
        shares |= {f"time/{resource}/{state}": s / whole for state, s in totals.items()}
    return shares


def _show(
    view: RunView,
    step: int,
    numbers: dict[str, float],
    gate: AdmissionGate,
    rollout: Rollout,
) -> None:
    view.step, view.reward = step, numbers["reward/mean"]
    view.turns, view.episode_tokens = numbers["episode/turns"], numbers["episode/tokens"]
    view.generated_per_s = numbers["engine/generated_per_s"]
    view.trained_per_s = numbers.get("learner/train_tokens", 0.0) / numbers["time/step_s"]
    view.lag_mean = numbers.get("learner/lag_mean", 0.0)
    view.lag_max = int(numbers.get("learner/lag_max", 0))
    view.groups_in_flight, view.failures = gate.outstanding, rollout.counts.failed


async def _in_thread(function: Callable[[], T]) -> T:
    """Runs something that computes in a worker thread; Ctrl-C doesn't wait for it."""
    return await anyio.to_thread.run_sync(function, abandon_on_cancel=True)
