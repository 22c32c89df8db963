"""From settings to an algorithm: what overrides what, and which parts don't go together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, cast

from gymllm.errors import ConfigError
from gymllm_trainers.algorithms.algorithm import (
    OF_ADVANTAGE,
    OF_CORRECTION,
    OF_LOSS,
    PRESETS,
    Algorithm,
)
from gymllm_trainers.algorithms.config import AlgorithmConfig


def resolve(config: AlgorithmConfig, *, updates: int = 1) -> Algorithm:
    """The algorithm that settings say.

    A setting goes over what a part that is put in a preset's place brings with it (another loss its own clip
    range), which goes over the preset.

    Args:
        config: The settings.
        updates: Optimizer steps on one batch: epochs * mini-batches. With one, the policy at the start of
            the update is the policy itself: `recompute` is then `current`, and takes no second pass.

    Raises:
        ConfigError: Parts that don't go together, or a setting that nothing would obey.
    """
    given = {
        field.name: value
        for field in dataclasses.fields(config)
        if field.name != "preset" and (value := getattr(config, field.name)) is not None
    }
    preset = PRESETS[config.preset]
    values = dict(preset) | {"preset": config.preset}
    base = Algorithm()
    parts = {"loss": OF_LOSS, "advantage": OF_ADVANTAGE, "correction": OF_CORRECTION}
    for part, brings in parts.items():
        own = preset.get(part, getattr(base, part))
        chosen = given.get(part, values.get(part, own))
        values[part] = chosen
        if chosen != own:
            table = cast("dict[object, dict[str, object]]", brings)
            values |= table.get(chosen, {})
    algorithm = dataclasses.replace(base, **(values | given))
    _check_used(algorithm, given)
    _check_together(algorithm, updates)
    if algorithm.correction == "off" or (updates == 1 and algorithm.proximal == "recompute"):
        return dataclasses.replace(algorithm, proximal="current")
    return algorithm


class _Use(NamedTuple):
    """When a setting has an effect."""

    used: Callable[[Algorithm], bool]
    """Whether it has one."""
    where: str
    """Where it would."""


_CLIPPED = ("ppo_clip", "dual_clip", "gspo", "cispo", "dppo_tv")
_clipped = _Use(lambda a: a.loss in _CLIPPED, f"loss is one of {', '.join(_CLIPPED)}")
_sapo = _Use(lambda a: a.loss == "sapo", "loss is sapo")
_gae = _Use(lambda a: a.advantage == "gae", "advantage is gae")
_best = _Use(lambda a: a.preset == "best_of_n", "preset is best_of_n")
_overlong = _Use(lambda a: a.overlong_buffer > 0, "overlong_buffer is > 0")
_played = _Use(lambda a: a.preset != "sft", "episodes are played: preset is not sft")
_USES: dict[str, _Use] = {
    "clip_low": _clipped,
    "clip_high": _clipped,
    "dual_clip": _Use(lambda a: a.loss == "dual_clip", "loss is dual_clip"),
    "ratio_cap": _Use(lambda a: a.loss == "dppo_tv", "loss is dppo_tv"),
    "sapo_positive": _sapo,
    "sapo_negative": _sapo,
    "correction_cap": _Use(lambda a: a.correction != "off", "correction is not off"),
    "correction_floor": _Use(
        lambda a: a.correction in ("icepop", "geometric_mask"),
        "correction is icepop or geometric_mask",
    ),
    "proximal": _Use(lambda a: a.correction != "off", "correction is not off"),
    "kl_form": _Use(lambda a: a.kl_coef > 0, "kl_coef is > 0"),
    "aggregation_tokens": _Use(
        lambda a: a.aggregation == "token_sum_constant", "aggregation is token_sum_constant"
    ),
    "overlong_buffer": _played,
    "overlong_filter": _played,
    "zero_variance": _played,
    "overlong_limit": _overlong,
    "overlong_weight": _overlong,
    "gamma": _Use(
        lambda a: a.advantage in ("gae", "gigpo", "turn"), "advantage is gae, gigpo or turn"
    ),
    "lam": _gae,
    "whiten": _gae,
    "turn_weight": _Use(lambda a: a.advantage in ("gigpo", "turn"), "advantage is gigpo or turn"),
    "scale": _Use(lambda a: a.advantage == "gigpo", "advantage is gigpo"),
    "value_coef": _gae,
    "value_clip": _gae,
    "value_rate": _gae,
    "keep_best": _best,
    "keep_above": _best,
}


def _check_used(algorithm: Algorithm, given: dict[str, object]) -> None:
    for name, value in given.items():
        use = _USES.get(name)
        if use is not None and not use.used(algorithm):
            raise ConfigError(
                f"algorithm.{name} = {value} would do nothing: it is used where {use.where}, and here "
                f"preset is {algorithm.preset}, advantage {algorithm.advantage}, loss {algorithm.loss}, "
                f"correction {algorithm.correction}, kl_coef {algorithm.kl_coef:g}. Leave it out, or "
                "change that."
            )


def _check_together(algorithm: Algorithm, updates: int) -> None:
    def refuse(what: str, why: str, instead: str) -> None:
        raise ConfigError(f"algorithm: {what} don't go together: {why}. {instead}")

    a = algorithm
    if a.loss == "gspo" and a.correction in ("decoupled", "tis_token", "icepop"):
        refuse(
            f"loss gspo and correction {a.correction}",
            "gspo has one ratio for a whole sequence, which a weight of each token would undo",
            "Set correction to tis_sequence, geometric_mask or off.",
        )
    if (a.loss == "supervised") != (a.advantage == "constant"):
        refuse(
            f"advantage {a.advantage} and loss {a.loss}",
            "supervised learning has no advantage, and a policy loss needs one",
            "Set both advantage constant and loss supervised, or neither.",
        )
    if a.loss == "supervised" and a.correction != "off":
        refuse(
            f"loss supervised and correction {a.correction}",
            "what is imitated need not come from any policy",
            "Set correction to off.",
        )
    if a.loss == "supervised" and a.kl_coef > 0:
        refuse(
            f"loss supervised and kl_coef {a.kl_coef:g}",
            "the estimates of the divergence are of the policy's own samples",
            "Set kl_coef to 0.",
        )
    if a.preset in ("sft", "best_of_n") and a.loss != "supervised":
        refuse(
            f"preset {a.preset} and loss {a.loss}",
            "the preset imitates",
            "Start from another preset, or set loss to supervised.",
        )
    if a.kl_coef > 0 and a.kl_form == "k1":
        refuse(
            f"kl_coef {a.kl_coef:g} and kl_form k1",
            "as a loss, k1's gradient is zero in expectation",
            "Set kl_form to k2, k3 or k3+.",
        )
    if updates > 1 and a.proximal == "current" and a.correction != "off" and a.uses_ratio:
        refuse(
            f"proximal current and {updates} optimizer steps on one batch",
            "the ratio would be 1 at every step and nothing would bound the update",
            "Set proximal to recompute or loglinear, or make one step a batch.",
        )
    if a.advantage == "turn" and a.turn_weight > 1:
        raise ConfigError(
            f"algorithm.turn_weight is a share where advantage is turn: from 0 to 1, got {a.turn_weight:g}."
        )
    if a.correction == "geometric_mask" and not a.correction_floor <= 1 <= a.correction_cap:
        raise ConfigError(
            "algorithm: geometric_mask keeps sequences whose ratio is from correction_floor to "
            f"correction_cap, which must have 1 between them, got {a.correction_floor:g} and "
            f"{a.correction_cap:g}."
        )
    if a.correction == "icepop" and not a.correction_floor < a.correction_cap:
        raise ConfigError(
            "algorithm: icepop keeps ratios from correction_floor to correction_cap, got "
            f"{a.correction_floor:g} and {a.correction_cap:g}: the second must be greater."
        )
