"""What the parts of one run share: its learner, its place among the tasks, what it saves."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias, cast

import anyio
import jax

from gymllm.errors import ConfigError, RunError, UnknownNameError
from gymllm.rollout import Rollout
from gymllm.timeline import Timeline
from gymllm_agents import Tokenizer
from gymllm_trainers.algorithms.resolve import resolve
from gymllm_trainers.checkpoint import Checkpointer, Json
from gymllm_trainers.checkpoint_files import checkpoint_files
from gymllm_trainers.config import TrainConfig, config_yaml
from gymllm_trainers.display import Display, RunView
from gymllm_trainers.distributed import LeadingCheckpointer, LeadingLearner
from gymllm_trainers.interrupt import Interrupt
from gymllm_trainers.learner import Learner, LearnerState
from gymllm_trainers.mesh import check_mesh, open_mesh, place_decoder
from gymllm_trainers.models import LoadedModel, decoder_params, save_adapters, save_model
from gymllm_trainers.processes import Call, Leader, LostError
from gymllm_trainers.run_files import RunFiles
from gymllm_trainers.run_folder import warn
from gymllm_trainers.starting_model import policy_decoder, start_name
from gymllm_trainers.threads import in_thread

AnyLearner: TypeAlias = Learner | LeadingLearner
"""Of this process alone, or of all of them."""

EXPORT_PATIENCE_S = 2.0
"""How long after Ctrl-C the model may still be written."""


@dataclass(frozen=True)
class Session:
    """What the parts of one run share."""

    config: TrainConfig
    timeline: Timeline
    saved: Checkpointer
    """The run's checkpoints, of this process."""
    resume_step: int | None
    view: RunView
    display: Display
    files: RunFiles
    interrupt: Interrupt
    leader: Leader | None = None
    """The line to the other processes, where there are some."""
    checkpoint_files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """What every checkpoint holds beside the state, once the model is loaded."""
    saving: threading.RLock = field(default_factory=threading.RLock)
    """Whoever saves has it: at Ctrl-C a thread that is abandoned may still be beginning a checkpoint."""

    @cached_property
    def checkpoints(self) -> Checkpointer | LeadingCheckpointer:
        """The run's checkpoints, of all processes."""
        return self.saved if self.leader is None else LeadingCheckpointer(self.saved, self.leader)


@dataclass(frozen=True, kw_only=True)
class TaskPosition:
    """Which tasks are done: none is lost, none trained twice."""

    next_task: int
    """First that was never started."""
    again: list[int]
    """Those before it that must be played again."""
    settled: dict[int, list[str]]
    """Of these, agents whose group is done already."""

    @classmethod
    def of(cls, rollout: Rollout) -> TaskPosition:
        """A rollout's, now."""
        next_task, again = rollout.position()
        return cls(next_task=next_task, again=again, settled=rollout.settled())


@dataclass(frozen=True)
class Progress:
    """Parameters and the tasks that belong to them."""

    state: LearnerState
    tasks: TaskPosition
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers of the step that made them."""


def open_learner(session: Session, model: LoadedModel) -> AnyLearner:
    """The learner of the run, with what the checkpoint holds that it goes on from."""
    config = session.config
    session.checkpoint_files.update(
        checkpoint_files(
            config_yaml(config), model.config, model.tokenizer, dtype=config.model.dtype
        )
    )
    leader = session.leader
    if leader is None:
        learner = make_learner(config, model, session.saved, session.resume_step)
    else:
        with leader.call(Call.LEARNER):
            alone = make_learner(config, model, session.saved, session.resume_step)
        assert alone.mesh is not None, "there are several devices"
        learner = LeadingLearner(alone, alone.mesh, leader)
    session.files.programs += learner.programs
    return learner


def make_learner(
    config: TrainConfig, model: LoadedModel, checkpoints: Checkpointer, resume_step: int | None
) -> Learner:
    """This process's learner; where there are several, each makes its own, at the same moment.

    Args:
        config: The run's.
        model: What training starts from.
        checkpoints: The run's.
        resume_step: The checkpoint to go on from, if any.

    Raises:
        ConfigError: The mesh doesn't fit the devices, or settings don't go together.
        ModelError: The mesh doesn't fit the model, or the checkpoint can't be read.
    """
    algorithm = resolve(config.algorithm, updates=config.learner.updates)
    if (
        config.learner.reference_on_host
        and algorithm.needs_reference
        and not config.model.lora_rank
        and jax.process_count() > 1
    ):
        raise ConfigError(
            f"learner.reference_on_host needs all of the reference in one process, and there are "
            f"{jax.process_count()}, each with a part: leave it out (mesh.fsdp divides the reference as it "
            "does the policy), or train adapters (model.lora_rank), whose base is the reference."
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
    if resume_step is not None:
        arrays = checkpoints.restore(resume_step, learner.state.arrays)
        learner.state = LearnerState.of(arrays, resume_step)
    return learner


def compile_learner(session: Session, learner: AnyLearner) -> None:
    """Compiles what a step takes, and says how much memory it needs."""
    learner.compile()
    needs = [f"{name} {size / 2**20:,.0f} MiB" for name, size in learner.predicted_bytes.items()]
    if needs:
        said = f"memory that the learner's programs need: {', '.join(needs)}"
        session.files.notes.append(said)
        session.display.phase(f"compiled; {said}")


def position(session: Session) -> TaskPosition:
    """Where the run goes on."""
    if session.resume_step is None:
        return TaskPosition(next_task=0, again=[], settled={})
    state = session.checkpoints.restore_state(session.resume_step)
    match state:
        case {"next_task": int(first), "again": list(again)}:
            # Of tasks with one agent, all that a checkpoint says.
            settled = cast("dict[str, list[str]]", state.get("settled", {}))
            return TaskPosition(
                next_task=first,
                again=cast("list[int]", again),
                settled={int(index): agents for index, agents in settled.items()},
            )
        case _:
            raise session.checkpoints.damaged(
                session.resume_step, "state.json lacks next_task or again"
            )


def _checkpoint(session: Session, progress: Progress, *, wait: bool = True) -> None:
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


def try_checkpoint(session: Session, progress: Progress) -> None:
    """A checkpoint on the way: it is written while the run goes on, which it does if it can't be, too."""
    try:
        with session.saving:
            _checkpoint(session, progress, wait=False)
    except LostError:  # that ends the run
        raise
    except RunError as error:
        warn(str(error))


@asynccontextmanager
async def closing(session: Session, progress: Callable[[], Progress]) -> AsyncIterator[None]:
    """Around a run's loop: however it ends, what it had reached is saved.

    Args:
        session: The run's.
        progress: What is saved, asked for at the end.
    """
    try:
        yield
    finally:
        # Ctrl-C and errors come through here too: a cancelled task must still be able to save.
        with anyio.CancelScope(shield=True):
            session.timeline.clock("learner").enter("checkpoint")
            await in_thread(lambda: _save_last(session, progress()))


def _save_last(session: Session, progress: Progress) -> None:
    with session.saving:
        _last_checkpoint(session, progress)


def _last_checkpoint(session: Session, progress: Progress) -> None:
    """The checkpoint that a run ends with, if none of the same state is there."""
    try:
        session.checkpoints.wait()
    except LostError:
        pass  # said below
    except RunError as error:
        warn(str(error))
    latest = session.checkpoints.latest()
    if latest == progress.state.version:
        return
    try:
        _checkpoint(session, progress)
    except LostError:  # the run ends for it anyway, with what happened before
        there = "none was written" if latest is None else f"the last one is of step {latest}"
        warn(
            f"a checkpoint of step {progress.state.version} can't be made without the others' parts: {there}."
        )


async def write_model(session: Session, learner: AnyLearner, tokenizer: Tokenizer) -> None:
    """The trained model, as a folder of its own in the run's."""
    session.timeline.clock("learner").enter("export")
    session.display.phase("writing the model")
    # Ctrl-C lets it be written if that is quick, with time left to close the rest.
    session.interrupt.patience_s = EXPORT_PATIENCE_S
    await in_thread(lambda: _export(session, learner, tokenizer))


def _export(session: Session, learner: AnyLearner, tokenizer: Tokenizer) -> None:
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
