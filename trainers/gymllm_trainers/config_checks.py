"""What sections of a configuration say of each other: what is refused, and what is only remarked on.

A setting that nothing obeys is refused where the run would learn something else than it was set for, or where
a promise couldn't be kept. Where what is learnt stays the same (where things are kept, sections that another
preset uses), a line says so and the run goes on: whoever switches presets on the command line need not
empty the file's other sections.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from gymllm.errors import ConfigError
from gymllm_trainers.algorithms.resolve import resolve
from gymllm_trainers.optimizer import check_optimizer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from gymllm_trainers.algorithms.algorithm import Algorithm
    from gymllm_trainers.config import TrainConfig

_OF_THE_RATIO = (
    "clip_low",
    "clip_high",
    "dual_clip",
    "ratio_cap",
    "sapo_positive",
    "sapo_negative",
)
"""Settings of an algorithm that act where the ratio isn't 1."""


_draft = ContextVar("draft", default=False)


@contextmanager
def draft() -> Iterator[None]:
    """Inside, `check_together` lets everything pass: flags are still to come."""
    token = _draft.set(True)
    try:
        yield
    finally:
        _draft.reset(token)


def check_together(config: TrainConfig) -> None:
    """Refuses sections that don't go together.

    Raises:
        ConfigError: Says which settings, their values, and what to change.
    """
    if _draft.get():
        return
    algorithm = resolve(config.algorithm, updates=config.learner.updates)
    check_optimizer(config.optimizer)
    _check_engine(config)
    if algorithm.preset == "sft":
        if config.learner.updates > 1:
            raise ConfigError(
                "algorithm.preset sft goes over its examples again by itself, until steps are done: leave "
                f"learner.epochs ({config.learner.epochs}) and learner.mini_batches "
                f"({config.learner.mini_batches}) at 1."
            )
        return
    if config.supervised.files:
        raise ConfigError(
            f"supervised.files is {', '.join(map(str, config.supervised.files))}, but algorithm.preset is "
            f"{algorithm.preset}, which plays its episodes and reads no files. Set algorithm.preset sft to "
            "imitate them, or empty supervised.files (--supervised.files with nothing after it)."
        )
    if config.rollout.group_size < 2 and algorithm.advantage not in ("gae", "constant"):
        raise ConfigError(
            f"rollout.group_size is {config.rollout.group_size}, but algorithm.advantage "
            f"{algorithm.advantage} compares the episodes of a group: set it to at least 2. Only "
            "ppo's values (advantage gae) do without."
        )
    if algorithm.preset == "best_of_n" and algorithm.keep_best > config.rollout.group_size:
        raise ConfigError(
            f"algorithm.keep_best is {algorithm.keep_best}, but a group has only rollout.group_size = "
            f"{config.rollout.group_size} episodes to choose from: set keep_best lower, or "
            "group_size higher."
        )
    if config.learner.deterministic and config.rollout.max_lag > 0:
        raise ConfigError(
            f"learner.deterministic promises the same parameters again, but with rollout.max_lag = "
            f"{config.rollout.max_lag} it depends on the clock which version plays an episode. Set "
            "rollout.max_lag 0 too, or leave learner.deterministic out."
        )


def _check_engine(config: TrainConfig) -> None:
    alone = config.mesh.engine_devices
    used = config.engine.tensor * config.engine.replicas
    if alone and alone != used:
        raise ConfigError(
            f"mesh.engine_devices is {alone}, but engine.tensor ({config.engine.tensor}) times "
            f"engine.replicas ({config.engine.replicas}) devices are used: set it to {used}, or to 0 to "
            "train on them too."
        )
    row, context = config.learner.row_tokens, config.engine.context_length
    if 0 < row < context:
        raise ConfigError(
            f"learner.row_tokens is {row}, but an episode may have engine.context_length ({context}) "
            "tokens, and a row must hold it: raise the one, or lower the other."
        )


# ---------------------------------------------------------------------- remarks


def without_effect(config: TrainConfig) -> list[str]:
    """Settings that were changed and that this run has no use for, as sentences; empty when there is none."""
    algorithm = resolve(config.algorithm, updates=config.learner.updates)
    found = _of_model(config) + _of_learner(config, algorithm) + _of_optimizer(config)
    if algorithm.preset == "sft":
        found += _of_playing(config)
    elif _changed(config.supervised):
        names = _named("supervised", _changed(config.supervised))
        found.append(f"{names} has no effect: it is for algorithm.preset sft.")
    kept = config.checkpoint
    if not kept.keep_best and "best_metric" in _changed(kept):
        found.append("checkpoint.best_metric has no effect while checkpoint.keep_best is 0.")
    return found


def _of_model(config: TrainConfig) -> list[str]:
    found: list[str] = []
    model, start = config.model, config.warm_start
    if not model.lora_rank and "lora_alpha" in _changed(model):
        found.append(
            "model.lora_alpha has no effect while model.lora_rank is 0: no adapters are made."
        )
    if model.name != "tiny" and _changed(start):
        names = _named("warm_start", _changed(start))
        found.append(f"{names} has no effect: model.name is {model.name}, and only tiny is warmed.")
    if config.engine.pages and "cache_mb" in _changed(config.engine):
        found.append("engine.cache_mb has no effect: engine.pages says how large the cache is.")
    return found


def _of_learner(config: TrainConfig, algorithm: Algorithm) -> list[str]:
    found: list[str] = []
    if config.learner.reference_on_host and not algorithm.needs_reference:
        found.append(
            "learner.reference_on_host has no effect: algorithm.kl_coef is 0, and no reference is kept."
        )
    elif config.learner.reference_on_host and config.model.lora_rank:
        found.append(
            "learner.reference_on_host has no effect: with adapters (model.lora_rank) the reference is the "
            "model without them, and no copy is kept."
        )
    if algorithm.zero_variance == "keep" and "max_flat_groups" in _changed(config.learner):
        found.append("learner.max_flat_groups has no effect: algorithm.zero_variance is keep.")
    given = [name for name in _OF_THE_RATIO if getattr(config.algorithm, name) is not None]
    if algorithm.loss == "dppo_tv":
        given = [name for name in given if name == "ratio_cap"]
    if given and algorithm.correction != "off" and algorithm.proximal == "current":
        found.append(
            f"{_named('algorithm', given)} has no effect: with one optimizer step on a batch and "
            f"algorithm.correction {algorithm.correction}, the ratio is to the policy itself, which is 1. It "
            "has one with learner.epochs or mini_batches > 1, or with algorithm.correction off."
        )
    if config.algorithm.value_clip and config.learner.updates == 1:
        found.append(
            "algorithm.value_clip has no effect with one optimizer step on a batch: the old value is the "
            "value. It has one with learner.epochs or mini_batches > 1."
        )
    return found


def _of_optimizer(config: TrainConfig) -> list[str]:
    optimizer, steps = config.optimizer, config.steps * config.learner.updates
    found: list[str] = []
    if optimizer.schedule == "constant" and "final_rate" in _changed(optimizer):
        found.append("optimizer.final_rate has no effect: optimizer.schedule is constant.")
    if optimizer.warmup_steps >= steps:
        found.append(
            f"optimizer.learning_rate is never reached: optimizer.warmup_steps is {optimizer.warmup_steps}, "
            f"and the run takes {steps} optimizer steps."
        )
    return found


def _of_playing(config: TrainConfig) -> list[str]:
    """algorithm.preset sft: no episode is played."""
    names = [f"rollout.{name}" for name in _changed(config.rollout)]
    names += [f"reward.{name}" for name in _changed(config.reward)]
    names += [
        f"learner.{name}"
        for name in _changed(config.learner)
        if name in ("groups_per_step", "max_flat_groups", "deterministic")
    ]
    found: list[str] = []
    if names:
        found.append(f"{', '.join(names)} has no effect: algorithm.preset sft plays no episodes.")
    if config.mesh.engine_devices:
        found.append(
            f"mesh.engine_devices keeps {config.mesh.engine_devices} of the devices idle: "
            "algorithm.preset sft has no engine. Set it to 0 to train on them too."
        )
    return found


def _named(section: str, names: list[str]) -> str:
    return ", ".join(f"{section}.{name}" for name in names)


def _changed(section: DataclassInstance) -> list[str]:
    """Names of a section's settings that are not at their defaults."""
    plain = type(section)()
    return [
        field.name
        for field in dataclasses.fields(section)
        if getattr(section, field.name) != getattr(plain, field.name)
    ]
