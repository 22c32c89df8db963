"""Settings of the algorithm: a preset, and what overrides it."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass

from gymllm.errors import ConfigError, UnknownNameError
from gymllm_trainers.algorithms.names import (
    AdvantageName,
    AggregationName,
    CorrectionName,
    KLForm,
    LossName,
    OverlongFilter,
    PresetName,
    ProximalName,
    Scale,
    ZeroVariance,
)


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """How rewards become a gradient. Whatever is None is as the preset has it; a setting that the rest of
    the algorithm has no use for is refused, never ignored (`resolve`)."""

    preset: PresetName = "default"
    """Where everything starts from, named after its method; docs/algorithms.md lists what each is."""
    advantage: AdvantageName | None = None
    """What a group's rewards say of each of its members, or of their turns or tokens."""
    loss: LossName | None = None
    """Policy loss of a token."""
    clip_low: float | None = None
    """How far below 1 the ratio may fall; dppo_tv: how far the probability may."""
    clip_high: float | None = None
    """How far above 1 the ratio may rise; dppo_tv: how far the probability may."""
    dual_clip: float | None = None
    """dual_clip: with a negative advantage A the loss is at most -dual_clip * A."""
    ratio_cap: float | None = None
    """dppo_tv: largest ratio that weights a token."""
    sapo_positive: float | None = None
    """sapo: temperature of the gate where the advantage is positive."""
    sapo_negative: float | None = None
    """sapo: temperature of the gate elsewhere."""
    correction: CorrectionName | None = None
    """What is done about tokens that another policy made: an older one, or an engine that computes
    differently. off: the ratio is to the policy that made the token; else the ratio is to the policy at the
    start of the update, and a weight stands outside it."""
    correction_cap: float | None = None
    """Largest weight of the correction; icepop, geometric_mask: above it a token or sequence is dropped."""
    correction_floor: float | None = None
    """icepop, geometric_mask: below it a token or sequence is dropped."""
    proximal: ProximalName | None = None
    """The policy that the ratio is to, where correction isn't off. recompute: the one at the start of the
    update, for which a second forward pass is made where the update has several steps; current: the
    one that is trained; loglinear: estimated, without a second pass, between the engine's log-probability
    and the current one by the token's age."""
    kl_coef: float | None = None
    """Weight of the KL divergence to the reference in the loss. At 0 no reference is kept."""
    kl_form: KLForm | None = None
    """Which estimate of it: k2, k3, or k3+, which has k3's value and k2's gradient."""
    aggregation: AggregationName | None = None
    """What the losses of tokens are averaged over."""
    aggregation_tokens: int | None = None
    """token_sum_constant: tokens that every trajectory is taken to have; 0: the most it can generate."""
    overlong_buffer: float | None = None
    """Soft overlong penalty: share of the limit over which a penalty rises to 1; 0: none."""
    overlong_limit: int | None = None
    """Soft overlong penalty: generated tokens at which it is 1; 0: the most an episode can generate."""
    overlong_weight: float | None = None
    """Soft overlong penalty: what it is multiplied by before it is added to the reward."""
    overlong_filter: OverlongFilter | None = None
    """Episodes that a limit cut short are not trained on. machine: those cut by time on the clock; all:
    whatever the limit; off: none. They stay in their group's baseline."""
    gamma: float | None = None
    """gae, gigpo, turn: discount of later rewards, per token (gae) or turn."""
    lam: float | None = None
    """gae: lambda, from one-step differences (0) to whole returns (1)."""
    whiten: bool | None = None
    """gae: advantages are shifted and scaled to mean 0 and spread 1 over the batch."""
    turn_weight: float | None = None
    """gigpo: weight of the turn's advantage beside the episode's; turn: its share, from 0 to 1."""
    scale: Scale | None = None
    """gigpo: whether advantages are divided by the standard deviation of those they are compared with."""
    value_coef: float | None = None
    """gae: weight of the value loss."""
    value_clip: float | None = None
    """gae: how far the value may move from the old one before its loss counts the move; 0: any distance."""
    value_rate: float | None = None
    """gae: learning rate of the value head, times optimizer.learning_rate: it starts at zero and must know
    what to expect before its advantages mean anything, while the policy has learnt already."""
    entropy_coef: float | None = None
    """Weight of the entropy that is added to what is maximised."""
    zero_variance: ZeroVariance | None = None
    """refill: a group that has nothing to teach (every advantage is 0, or no episode is kept) is counted and
    replaced by another task; keep: it counts towards the step."""
    keep_best: int | None = None
    """best_of_n: episodes of a group that are imitated."""
    keep_above: float | None = None
    """best_of_n: only those whose reward is greater."""

    def __post_init__(self) -> None:
        for name, known in _choices().items():
            value = getattr(self, name)
            if value is not None and value not in known:
                raise UnknownNameError(f"algorithm.{name}", str(value), known)
        for name, (low, high, words) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"algorithm.{name} must be {words}, got {value}.")


_TINY = 1e-30  # "> 0", as a lower bound that is allowed itself
_MOST = 1e30  # and any finite number
_RANGES: dict[str, tuple[float, float, str]] = {
    "clip_low": (_TINY, 1.0, "> 0 and <= 1"),
    "clip_high": (_TINY, _MOST, "> 0"),
    "dual_clip": (1 + 1e-9, _MOST, "> 1"),
    "ratio_cap": (1.0, _MOST, ">= 1"),
    "sapo_positive": (_TINY, _MOST, "> 0"),
    "sapo_negative": (_TINY, _MOST, "> 0"),
    "correction_cap": (_TINY, _MOST, "> 0"),
    "correction_floor": (0.0, 1.0, "from 0 to 1"),
    "kl_coef": (0.0, _MOST, ">= 0"),
    "aggregation_tokens": (0, _MOST, ">= 0"),
    "overlong_buffer": (0.0, 1.0, "from 0 to 1, a share of the limit"),
    "overlong_limit": (0, _MOST, ">= 0"),
    "overlong_weight": (_TINY, _MOST, "> 0"),
    "gamma": (0.0, 1.0, "from 0 to 1"),
    "lam": (0.0, 1.0, "from 0 to 1"),
    "turn_weight": (0.0, _MOST, ">= 0"),
    "value_coef": (_TINY, _MOST, "> 0"),
    "value_clip": (0.0, _MOST, ">= 0"),
    "value_rate": (_TINY, _MOST, "> 0"),
    "entropy_coef": (0.0, _MOST, ">= 0"),
    "keep_best": (1, _MOST, ">= 1"),
    "keep_above": (-_MOST, _MOST, "a finite number"),
}


def _choices() -> dict[str, tuple[str, ...]]:
    """The names that each field of names takes."""
    found: dict[str, tuple[str, ...]] = {}
    hints = typing.get_type_hints(AlgorithmConfig)
    for field in dataclasses.fields(AlgorithmConfig):
        hint = hints[field.name]
        for part in (hint, *typing.get_args(hint)):  # a literal, or a literal or None
            if typing.get_origin(part) is typing.Literal:
                found[field.name] = typing.get_args(part)
    return found
