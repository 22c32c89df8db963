"""What everything in this package is called: the values that settings take."""

from __future__ import annotations

from typing import Literal

PresetName = Literal[
    "default",
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_pp_baseline",
    "ppo",
    "gigpo",
    "turn",
    "maxrl",
    "batch_std",
    "dual_clip",
    "sapo",
    "dppo",
    "reinforce",
    "sft",
    "best_of_n",
]
MAIN_PRESETS: tuple[PresetName, ...] = (
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_pp_baseline",
    "ppo",
    "gigpo",
)
"""The main algorithms by the name of their paper's, which benchmarks compare."""
AdvantageName = Literal[
    "centred",
    "dr_grpo",
    "grpo",
    "batch_std",
    "rloo",
    "reinforce_pp_baseline",
    "maxrl",
    "gigpo",
    "turn",
    "gae",
    "constant",
]
LossName = Literal[
    "ppo_clip", "dual_clip", "gspo", "cispo", "dppo_tv", "reinforce", "sapo", "supervised"
]
CorrectionName = Literal[
    "decoupled", "tis_token", "tis_sequence", "icepop", "geometric_mask", "off"
]
ProximalName = Literal["current", "recompute", "loglinear"]
KLForm = Literal["k1", "k2", "k3", "k3+"]
AggregationName = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum_constant"
]
OverlongFilter = Literal["off", "machine", "all"]
Scale = Literal["std", "none"]
ZeroVariance = Literal["refill", "keep"]
