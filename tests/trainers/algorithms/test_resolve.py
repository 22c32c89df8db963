"""Settings: presets as their papers have them, what overrides what, and what is refused."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from gymllm.errors import ConfigError, UnknownNameError
from gymllm_trainers.algorithms import Algorithm, AlgorithmConfig, resolve
from gymllm_trainers.algorithms.algorithm import PRESETS
from gymllm_trainers.algorithms.names import (
    AdvantageName,
    AggregationName,
    CorrectionName,
    LossName,
    PresetName,
)


def of(**settings: object) -> Algorithm:
    return resolve(AlgorithmConfig(**settings))  # pyright: ignore[reportArgumentType]


def test_the_default_is_centred_advantages_and_a_decoupled_clip() -> None:
    found = of()
    assert found == of(preset="default")
    assert (found.advantage, found.loss, found.aggregation) == ("centred", "ppo_clip", "token_mean")
    assert (found.clip_low, found.clip_high) == (0.2, 0.28)
    assert (found.correction, found.correction_cap) == ("decoupled", 2.0)
    assert (found.kl_coef, found.entropy_coef, found.overlong_buffer) == (0, 0, 0)
    assert found.zero_variance == "refill"
    assert not any((found.needs_reference, found.needs_values, found.needs_proximal))


def test_every_preset_resolves_and_is_what_it_is_named_after() -> None:
    assert set(PRESETS) == set(typing.get_args(PresetName))
    found = {name: of(preset=name) for name in PRESETS}
    expected = {
        "grpo": ("grpo", "ppo_clip", "decoupled", "sequence_mean_token_mean"),
        "dr_grpo": ("dr_grpo", "ppo_clip", "decoupled", "token_sum_constant"),
        "dapo": ("grpo", "ppo_clip", "decoupled", "token_mean"),
        "gspo": ("grpo", "gspo", "tis_sequence", "sequence_mean_token_mean"),
        "cispo": ("grpo", "cispo", "decoupled", "token_mean"),
        "rloo": ("rloo", "reinforce", "decoupled", "sequence_mean_token_sum"),
        "reinforce_pp_baseline": (
            "reinforce_pp_baseline",
            "ppo_clip",
            "decoupled",
            "token_mean",
        ),
        "ppo": ("gae", "ppo_clip", "decoupled", "token_mean"),
        "gigpo": ("gigpo", "ppo_clip", "decoupled", "token_mean"),
        "sft": ("constant", "supervised", "off", "token_mean"),
        "best_of_n": ("constant", "supervised", "off", "token_mean"),
    }
    for name, parts in expected.items():
        one = found[name]  # pyright: ignore[reportArgumentType]
        assert (one.advantage, one.loss, one.correction, one.aggregation) == parts, name
    assert (found["gspo"].clip_low, found["gspo"].clip_high) == (3e-4, 4e-4)
    assert (found["dapo"].clip_high, found["dapo"].overlong_buffer) == (0.28, 0.2)
    assert (found["gigpo"].gamma, found["gigpo"].turn_weight) == (0.95, 1.0)
    assert found["turn"].turn_weight == 0.5
    assert (found["ppo"].lam, found["ppo"].zero_variance) == (0.95, "keep")
    assert found["ppo"].needs_values


def test_a_setting_goes_over_a_part_s_own_goes_over_the_preset() -> None:
    assert of(preset="grpo", clip_high=0.5).clip_high == 0.5
    swapped = of(preset="grpo", loss="gspo")
    assert (swapped.advantage, swapped.clip_low, swapped.correction) == (
        "grpo",
        3e-4,
        "tis_sequence",
    )
    assert of(preset="grpo", loss="gspo", correction="off", clip_low=0.01).clip_low == 0.01
    assert of(advantage="turn").turn_weight == 0.5
    assert of(advantage="gigpo").gamma == 0.95
    masked = of(correction="geometric_mask")
    assert (masked.correction_floor, masked.correction_cap) == (0.99, 1.01)
    assert of(correction="icepop", correction_cap=5.0).correction_cap == 5.0
    assert of(loss="supervised").advantage == "constant"
    # The preset's own part keeps the preset's values.
    assert of(preset="grpo", loss="ppo_clip").clip_high == 0.2


def test_every_loss_goes_with_its_own_correction_and_every_other_part() -> None:
    for loss in typing.get_args(LossName):
        for aggregation in typing.get_args(AggregationName):
            assert of(loss=loss, aggregation=aggregation).loss == loss
    for advantage in typing.get_args(AdvantageName):
        if advantage != "constant":
            for correction in typing.get_args(CorrectionName):
                assert of(advantage=advantage, correction=correction).correction == correction


def test_one_step_a_batch_needs_no_second_pass() -> None:
    assert of().proximal == "current"
    several = resolve(AlgorithmConfig(), updates=4)
    assert several.proximal == "recompute"
    assert several.needs_proximal
    assert not resolve(AlgorithmConfig(correction="off"), updates=4).needs_proximal
    assert resolve(AlgorithmConfig(proximal="loglinear"), updates=4).proximal == "loglinear"
    assert of(proximal="loglinear").proximal == "loglinear"


def test_a_ratio_that_is_always_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="proximal current and 2 optimizer steps"):
        resolve(AlgorithmConfig(proximal="current"), updates=2)
    assert resolve(AlgorithmConfig(proximal="current", loss="reinforce"), updates=2)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"preset": "gspo", "correction": "decoupled"}, "one ratio for a whole sequence"),
        ({"preset": "gspo", "correction": "icepop"}, "tis_sequence, geometric_mask or off"),
        ({"advantage": "constant"}, "a policy loss needs one"),
        ({"preset": "sft", "advantage": "grpo"}, "supervised learning has no advantage"),
        ({"preset": "sft", "correction": "decoupled"}, "need not come from any policy"),
        ({"preset": "sft", "kl_coef": 0.1}, "of the policy's own samples"),
        ({"preset": "sft", "loss": "reinforce", "advantage": "grpo"}, "the preset imitates"),
        ({"kl_coef": 0.1, "kl_form": "k1"}, "k1's gradient is zero"),
        ({"advantage": "turn", "turn_weight": 2.0}, "a share where advantage is turn"),
        ({"correction": "geometric_mask", "correction_cap": 0.995}, "1 between them"),
        (
            {"correction": "icepop", "correction_floor": 0.5, "correction_cap": 0.4},
            "the second must be greater",
        ),
    ],
)
def test_parts_that_do_not_go_together_are_refused(settings, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        of(**settings)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"preset": "rloo", "clip_low": 0.1}, "loss is one of ppo_clip"),
        ({"dual_clip": 3.0}, "loss is dual_clip"),
        ({"ratio_cap": 3.0}, "loss is dppo_tv"),
        ({"sapo_negative": 1.0}, "loss is sapo"),
        ({"correction": "off", "correction_cap": 3.0}, "correction is not off"),
        ({"correction": "off", "proximal": "recompute"}, "correction is not off"),
        ({"correction_floor": 0.5}, "icepop or geometric_mask"),
        ({"kl_form": "k2"}, "kl_coef is > 0"),
        ({"aggregation_tokens": 5}, "aggregation is token_sum_constant"),
        ({"preset": "sft", "overlong_buffer": 0.1}, "preset is not sft"),
        ({"preset": "sft", "overlong_filter": "all"}, "preset is not sft"),
        ({"preset": "sft", "zero_variance": "refill"}, "preset is not sft"),
        ({"overlong_limit": 100}, "overlong_buffer is > 0"),
        ({"overlong_weight": 2.0}, "overlong_buffer is > 0"),
        ({"gamma": 0.9}, "gae, gigpo or turn"),
        ({"lam": 0.9}, "advantage is gae"),
        ({"whiten": False}, "advantage is gae"),
        ({"value_coef": 0.1}, "advantage is gae"),
        ({"value_clip": 0.1}, "advantage is gae"),
        ({"turn_weight": 0.1}, "gigpo or turn"),
        ({"scale": "none"}, "advantage is gigpo"),
        ({"keep_best": 2}, "preset is best_of_n"),
        ({"keep_above": 0.5}, "preset is best_of_n"),
    ],
)
def test_a_setting_that_nothing_obeys_is_refused(settings, where: str) -> None:
    name = list(settings)[-1]
    with pytest.raises(ConfigError, match=rf"algorithm.{name} = .* would do nothing.*{where}"):
        of(**settings)


def test_unknown_names_say_what_is_close() -> None:
    with pytest.raises(UnknownNameError, match=r"algorithm.preset 'dr-grpo'.*dr_grpo"):
        of(preset="dr-grpo")
    with pytest.raises(UnknownNameError, match=r"algorithm.loss 'ppoclip'.*ppo_clip"):
        of(loss="ppoclip")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clip_low", 0.0),
        ("clip_low", 1.5),
        ("clip_high", -1.0),
        ("clip_high", float("nan")),
        ("dual_clip", 1.0),
        ("correction_cap", 0.0),
        ("kl_coef", -0.1),
        ("kl_coef", float("inf")),
        ("overlong_buffer", 1.2),
        ("lam", 1.1),
        ("keep_best", 0),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm.{name} must be .*, got {value}"):
        AlgorithmConfig(**{name: value})


def test_settings_and_algorithm_have_the_same_fields() -> None:
    assert [field.name for field in dataclasses.fields(AlgorithmConfig)] == [
        field.name for field in dataclasses.fields(Algorithm)
    ]
    hash(of())
