"""One training run, top to bottom: setup, rollout, advantage, update, log.

Everything that waits lives on one event loop in the main thread: episodes, agents, the loop below. The
engine has a thread of its own, gradients are computed in a worker thread, the display has one too. Where
there are several processes, this is the one that leads; what the others do is in `following`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import anyio
import jax.numpy as jnp

from gymllm.engine import Engine
from gymllm.event_loop import LOOP_OPTIONS
from gymllm.memory import collect_rarely
from gymllm.pool import EnvPool
from gymllm.rollout import AdmissionGate, Rollout
from gymllm.team import Team
from gymllm.timeline import Timeline
from gymllm.trajectory import Ending, Group, Trajectory
from gymllm_agents import Tokenizer
from gymllm_trainers.build import open_pool, task_source
from gymllm_trainers.checkpoint import Checkpointer
from gymllm_trainers.compilation import use_compilation_cache
from gymllm_trainers.config import TrainConfig, open_run_folder
from gymllm_trainers.display import Display, RunView
from gymllm_trainers.distributed import LeadingLearner
from gymllm_trainers.engine import EmbeddedEngine, open_engine
from gymllm_trainers.engine.replicas import engine_meshes
from gymllm_trainers.flat_groups import FlatGroups
from gymllm_trainers.following import begin, follow_run, led
from gymllm_trainers.interrupt import Interrupt
from gymllm_trainers.memory import keep_freed_memory
from gymllm_trainers.mesh import on_one_device, open_mesh
from gymllm_trainers.models import LoadedModel
from gymllm_trainers.players import (
    PlayerSettings,
    build_team,
    check_players,
    scripted_engine,
    scripted_player,
    tools_named,
)
from gymllm_trainers.processes import PING_S, Leader, LostError, is_leader, join_processes
from gymllm_trainers.report import print_report
from gymllm_trainers.rewards import RewardModel, apply_rewards, open_reward
from gymllm_trainers.rewards.function import load_function
from gymllm_trainers.run_files import RunFiles
from gymllm_trainers.run_folder import RunFolder
from gymllm_trainers.session import (
    AnyLearner,
    Progress,
    Session,
    TaskPosition,
    closing,
    compile_learner,
    open_learner,
    position,
    try_checkpoint,
    write_model,
)
from gymllm_trainers.starting_model import starting_model
from gymllm_trainers.statistics import StepStatistics
from gymllm_trainers.step_numbers import engine_metrics, rollout_metrics, show, time_metrics
from gymllm_trainers.supervised_run import set_up_and_imitate
from gymllm_trainers.threads import in_thread
from gymllm_trainers.toolbox import open_tools


def run(config: TrainConfig) -> None:
    """Trains, and leaves everything in the run's folder.

    Raises:
        GymLLMError: A setting can't be used, or the run can't go on; what was collected is saved.
        KeyboardInterrupt: Ctrl-C; a checkpoint was written, and everything closed.
    """
    check_players(config.players, temperature=config.agent.temperature)
    if config.reward.kind == "function":
        load_function(config.reward.function)  # a mistake in it needn't wait for a model
    if join_processes(config.processes) == 1:
        return _run_leading(config, None)
    # Every process refuses one that can't be, before it waits for the others.
    open_mesh(config.mesh)
    if not is_leader():
        return follow_run(config)
    with led(Leader()) as leader:
        _run_leading(config, leader)
    return None


def _run_leading(config: TrainConfig, leader: Leader | None) -> None:
    with Interrupt() as interrupt:
        started = time.monotonic()
        keep_freed_memory()
        collect_rarely()
        use_compilation_cache()
        folder = open_run_folder(config)
        try:
            _run_in(folder, config, interrupt, started, leader)
        finally:
            folder.unlock()


def _run_in(
    folder: RunFolder,
    config: TrainConfig,
    interrupt: Interrupt,
    started: float,
    leader: Leader | None,
) -> None:
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
            session = Session(
                config, timeline, checkpoints, resume_step, view, display, files, interrupt, leader
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
                failed=headline == "Stopped by an error",
            )


async def _main(session: Session) -> bool:
    """Whether the run was done before anyone interrupted it."""
    with anyio.CancelScope() as scope, session.interrupt.cancels(scope):
        if session.leader is None:
            await _set_up_and_train(session)
        else:
            await _lead(session, session.leader)
    return not scope.cancelled_caught


async def _lead(session: Session, leader: Leader) -> None:
    """The run, and beside it a look every few seconds whether the other processes live."""

    async def look() -> None:
        while True:
            await anyio.sleep(PING_S)
            await in_thread(leader.ping)

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(look)
            config, folder = session.config, session.files.folder.path
            await in_thread(lambda: begin(leader, config, folder, session.resume_step))
            await _set_up_and_train(session)
            group.cancel_scope.cancel()
    except BaseExceptionGroup as errors:
        # Two where a death was noticed in two places: it is then one of the two all the same.
        own = [error for error in errors.exceptions if not isinstance(error, LostError)]
        raise (own or errors.exceptions)[0] from None
    if leader.lost:
        raise LostError(leader.lost)


async def _set_up_and_train(session: Session) -> None:
    if session.config.algorithm.preset == "sft":
        await set_up_and_imitate(session)
    else:
        await _set_up_and_play(session)


async def _set_up_and_play(session: Session) -> None:
    config, display = session.config, session.display
    clock = session.timeline.clock("learner")
    async with (
        open_pool(config.env, config.rollout.concurrency) as pool,
        open_tools(tools_named(config.agent, config.players), config.agent.sandbox) as toolbox,
    ):
        clock.enter("model")
        started = time.monotonic()
        model = await starting_model(config, pool, toolbox, display.phase, session.leader)
        session.files.notes.append(f"model ready after {time.monotonic() - started:.1f} s")
        clock.enter("compile")
        display.phase("compiling")
        learner, engine = await in_thread(lambda: _learner_and_engine(session, model))
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
    session: Session,
    pool: EnvPool,
    tokenizer: Tokenizer,
    team: Team,
    learner: AnyLearner,
    engine: EmbeddedEngine,
    reward: RewardModel | None,
) -> None:
    """The loop: groups as they complete, a step when enough of them have, weights to the engine."""
    config, view = session.config, session.view
    clock = session.timeline.clock("learner")
    gate = AdmissionGate(
        groups_per_step=config.learner.groups_per_step, max_lag=config.rollout.max_lag
    )
    start = position(session)
    statistics = StepStatistics()

    async def score(trajectories: list[Trajectory]) -> list[Trajectory]:
        started = time.monotonic()
        scored = await apply_rewards(trajectories, reward, config.reward)
        statistics.scored(time.monotonic() - started)
        return scored

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
        score_episode=None if reward is None else score,
        on_trajectory=lambda trajectory: _keep_failed(session, learner.version + 1, trajectory),
    )
    engine.idle_cause = lambda: (
        "waiting: environments" if rollout.counts.in_flight else "waiting: learner"
    )
    # What a checkpoint holds, taken only between steps: at Ctrl-C a step may be half done in its thread.
    progress = Progress(learner.state, TaskPosition.of(rollout))
    view.step, view.phase = learner.version, "training"
    session.display.phase("training")
    flat = FlatGroups(most=config.learner.max_flat_groups)
    async with closing(session, lambda: progress), rollout.stream() as groups:
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
                if await in_thread(lambda group=group: learner.collect(group)):
                    flat.end()
                    pending.append(group)
                else:
                    rollout.settle(group.task, group.agent)
                    gate.leave()
                    flat.add(group)
                if learner.full_batches:
                    clock.enter("gradient")
                    await in_thread(learner.compute)
            clock.enter("gradient")
            await in_thread(lambda: learner.compute(flush=True))
            clock.enter("update")
            metrics = await in_thread(learner.step)
            clock.enter("publish")
            publishing = time.monotonic()
            await in_thread(lambda: engine.publish(learner.weights(), learner.version))
            publish_s = time.monotonic() - publishing
            for group in pending:
                rollout.settle(group.task, group.agent)
            gate.leave(len(pending))
            progress = Progress(learner.state, TaskPosition.of(rollout))
            clock.enter("log")
            seconds = time.monotonic() - started
            numbers = {
                **{f"learner/{name}": value for name, value in metrics.items()},
                **statistics.metrics(),
                **engine_metrics(engine, engine_before, seconds),
                **rollout_metrics(rollout, gate, pool),
                **time_metrics(session.timeline),
                "learner/trained_per_s": metrics.get("trained_tokens", 0.0) / seconds,
                "time/publish_s": publish_s,
                "time/step_s": seconds,
            }
            session.files.metrics(step, numbers)
            show(view, step, numbers, gate, rollout)
            session.display.step_done()
            every = config.checkpoint.every
            progress = replace(progress, metrics=numbers)
            if every and step % every == 0 and step < config.steps:
                clock.enter("checkpoint")
                await in_thread(lambda progress=progress: try_checkpoint(session, progress))
    await write_model(session, learner, tokenizer)


def _learner_and_engine(session: Session, model: LoadedModel) -> tuple[AnyLearner, EmbeddedEngine]:
    config = session.config
    learner = open_learner(session, model)
    meshes = engine_meshes(config.engine)
    if isinstance(learner, LeadingLearner):
        serving = learner.serving(meshes[0] if meshes else None)
    else:
        serving = learner.serving()
    if learner.mesh is not None and not meshes:
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
    compile_learner(session, learner)
    return learner, engine


def _other_engine(
    session: Session,
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


def _keep_failed(session: Session, step: int, trajectory: Trajectory) -> None:
    """Failed episodes are never trained on, but whoever looks for the cause must find them."""
    if trajectory.ending is Ending.FAILED:
        session.files.trajectories(step, [trajectory])


def _compiled(programs: Sequence[str]) -> list[str]:
    return [f"{len(programs)} programs compiled: {', '.join(programs)}"] if programs else []
