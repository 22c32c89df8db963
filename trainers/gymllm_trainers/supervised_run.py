"""algorithm.preset sft from top to bottom: no engine, no episodes; examples, a step, and again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gymllm_trainers.build import open_pool
from gymllm_trainers.optimizer import learning_rate
from gymllm_trainers.players import tools_named
from gymllm_trainers.session import (
    AnyLearner,
    Progress,
    Session,
    TaskPosition,
    closing,
    compile_learner,
    open_learner,
    try_checkpoint,
    write_model,
)
from gymllm_trainers.starting_model import TINY, loaded_model, starting_model
from gymllm_trainers.step_numbers import time_metrics
from gymllm_trainers.supervised import Example, batches, find_files, imitation, load_examples
from gymllm_trainers.threads import in_thread
from gymllm_trainers.toolbox import open_tools


async def set_up_and_imitate(session: Session) -> None:
    """The whole run; an environment is only opened to make the tiny model with."""
    config, display = session.config, session.display
    find_files(config.supervised)  # a mistake there needn't wait for a model
    clock = session.timeline.clock("learner")
    clock.enter("model")
    if config.model.name == TINY:
        async with (
            open_pool(config.env, config.rollout.concurrency) as pool,
            open_tools(tools_named(config.agent, config.players), config.agent.sandbox) as toolbox,
        ):
            model = await starting_model(config, pool, toolbox, display.phase, session.leader)
    else:
        model = await loaded_model(config, display.phase, session.leader)
    display.phase("reading what is imitated")
    length = config.engine.context_length
    examples = await in_thread(
        lambda: load_examples(
            config.supervised, model.tokenizer, config.agent, context_length=length
        )
    )
    session.files.notes.append(f"{len(examples)} examples are imitated")
    clock.enter("compile")
    display.phase("compiling")
    learner = await in_thread(lambda: open_learner(session, model))
    await in_thread(lambda: compile_learner(session, learner))
    await _imitate(session, learner, examples)
    await write_model(session, learner, model.tokenizer)


async def _imitate(session: Session, learner: AnyLearner, examples: Sequence[Example]) -> None:
    """The loop: some examples, a step, in an order that the seed alone decides."""
    config, view = session.config, session.view
    clock = session.timeline.clock("learner")
    every = config.checkpoint.every
    nothing = TaskPosition(next_task=0, again=[], settled={})
    progress = Progress(learner.state, nothing)
    view.step = learner.version
    session.display.phase("training")
    rate = learning_rate(config.optimizer, config.steps)
    numbered = batches(
        len(examples),
        config.supervised.examples_per_step,
        seed=config.seed,
        first=learner.version,
    )
    async with closing(session, lambda: progress):
        while learner.version < config.steps:
            started, chosen = time.monotonic(), next(numbered)
            clock.enter("gradient")
            for number in chosen:
                sequences = imitation(examples[number])
                await in_thread(lambda sequences=sequences: learner.add_sequences(sequences))
            metrics = await in_thread(learner.step)
            progress = Progress(learner.state, nothing)
            clock.enter("log")
            view.step = step = learner.version
            seconds = time.monotonic() - started
            numbers = {f"learner/{name}": value for name, value in metrics.items()}
            numbers |= {**time_metrics(session.timeline), "time/step_s": seconds}
            session.files.metrics(step, numbers)
            view.loss = numbers["learner/loss"]
            view.learning_rate = float(np.asarray(rate(step - 1)))
            view.episode_tokens = numbers["learner/train_tokens"]
            view.trained_per_s = view.episode_tokens / seconds
            session.display.step_done()
            progress = replace(progress, metrics=numbers)
            if every and step % every == 0 and step < config.steps:
                clock.enter("checkpoint")
                await in_thread(lambda progress=progress: try_checkpoint(session, progress))
