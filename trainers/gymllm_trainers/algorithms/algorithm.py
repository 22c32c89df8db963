"""An algorithm with every value decided; what the presets are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

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
class Algorithm:
    """What `AlgorithmConfig` says of each field, decided. Made by `resolve`, which checks that the parts go
    together. Hashable, so that a compiled program can depend on it."""

    preset: PresetName = "default"
    advantage: AdvantageName = "centred"
    loss: LossName = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0
    ratio_cap: float = 20.0
    sapo_positive: float = 1.0
    sapo_negative: float = 1.05
    correction: CorrectionName = "decoupled"
    correction_cap: float = 2.0
    correction_floor: float = 0.5
    proximal: ProximalName = "recompute"
    kl_coef: float = 0.0
    kl_form: KLForm = "k3+"
    aggregation: AggregationName = "token_mean"
    aggregation_tokens: int = 0
    overlong_buffer: float = 0.0
    overlong_limit: int = 0
    overlong_weight: float = 1.0
    overlong_filter: OverlongFilter = "machine"
    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    turn_weight: float = 1.0
    scale: Scale = "std"
    value_coef: float = 0.5
    value_clip: float = 0.2
    value_rate: float = 10.0
    entropy_coef: float = 0.0
    zero_variance: ZeroVariance = "refill"
    keep_best: int = 1
    keep_above: float = 0.0

    @property
    def needs_values(self) -> bool:
        """Whether a value head is trained."""
        return self.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities of the reference are part of the loss."""
        return self.kl_coef > 0

    @property
    def needs_proximal(self) -> bool:
        """Whether log-probabilities at the start of the update take a forward pass of their own."""
        return self.proximal == "recompute"

    @property
    def uses_ratio(self) -> bool:
        """Whether the loss is of a ratio to the proximal policy."""
        return self.loss not in ("reinforce", "supervised")


PRESETS: Mapping[PresetName, Mapping[str, object]] = MappingProxyType(
    {
        "default": {},
        # Shao et al. 2024 (arXiv:2402.03300), without the KL loss, which practice has dropped.
        "grpo": {
            "advantage": "grpo",
            "clip_high": 0.2,
            "aggregation": "sequence_mean_token_mean",
        },
        # Liu et al. 2025 (arXiv:2503.20783).
        "dr_grpo": {
            "advantage": "dr_grpo",
            "clip_high": 0.2,
            "aggregation": "token_sum_constant",
        },
        # Yu et al. 2025 (arXiv:2503.14476): clip-higher, dynamic sampling, token mean, 4,096 tokens of
        # 20,480 as the buffer of the soft overlong penalty.
        "dapo": {"advantage": "grpo", "overlong_buffer": 0.2},
        # Zheng et al. 2025 (arXiv:2507.18071), sec. 5.1.
        "gspo": {
            "advantage": "grpo",
            "loss": "gspo",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "correction": "tis_sequence",
            "aggregation": "sequence_mean_token_mean",
        },
        # MiniMax 2025 (arXiv:2506.13585): no lower bound; ratios up to 5 as in Khatri et al. 2025
        # (arXiv:2510.13786).
        "cispo": {"advantage": "grpo", "loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
        # Ahmadian et al. 2024 (arXiv:2402.14740): an episode is one action.
        "rloo": {
            "advantage": "rloo",
            "loss": "reinforce",
            "aggregation": "sequence_mean_token_sum",
        },
        # Hu 2025 (arXiv:2501.03262).
        "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline", "clip_high": 0.2},
        # Schulman et al. 2017 (arXiv:1707.06347). Equal rewards teach the value head all the same.
        "ppo": {"advantage": "gae", "clip_high": 0.2, "zero_variance": "keep"},
        # Feng et al. 2025 (arXiv:2505.10978).
        "gigpo": {"advantage": "gigpo", "clip_high": 0.2, "gamma": 0.95},
        # Zeng et al. 2025 (arXiv:2505.11821).
        "turn": {"advantage": "turn", "turn_weight": 0.5},
        "maxrl": {"advantage": "maxrl"},  # arXiv:2602.02710
        "batch_std": {"advantage": "batch_std"},
        # Ye et al. 2020 (arXiv:1912.09729).
        "dual_clip": {"advantage": "grpo", "loss": "dual_clip", "clip_high": 0.2},
        # Gao et al. 2025 (arXiv:2511.20347).
        "sapo": {"advantage": "grpo", "loss": "sapo", "aggregation": "sequence_mean_token_mean"},
        # arXiv:2602.04879: the ratio and the trust region are to the policy that made the token.
        "dppo": {"advantage": "grpo", "loss": "dppo_tv", "clip_high": 0.2, "correction": "off"},
        "reinforce": {"loss": "reinforce"},
        "sft": {
            "advantage": "constant",
            "loss": "supervised",
            "correction": "off",
            "zero_variance": "keep",
        },
        "best_of_n": {
            "advantage": "constant",
            "loss": "supervised",
            "correction": "off",
        },
    }
)

OF_LOSS: Mapping[LossName, Mapping[str, object]] = MappingProxyType(
    {
        "gspo": {
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "correction": "tis_sequence",
            "aggregation": "sequence_mean_token_mean",
        },
        "cispo": {"clip_low": 1.0, "clip_high": 4.0},
        "dppo_tv": {"clip_low": 0.2, "clip_high": 0.2, "correction": "off"},
        "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28},
        "dual_clip": {"clip_low": 0.2, "clip_high": 0.2},
        "supervised": {"advantage": "constant", "correction": "off", "zero_variance": "keep"},
    }
)
"""What a loss brings with it when it is put in the place of a preset's own."""

OF_ADVANTAGE: Mapping[AdvantageName, Mapping[str, object]] = MappingProxyType(
    {
        "gigpo": {"gamma": 0.95, "turn_weight": 1.0},
        "turn": {"gamma": 1.0, "turn_weight": 0.5},
        "gae": {"gamma": 1.0, "zero_variance": "keep"},
    }
)
"""The same of an advantage."""

OF_CORRECTION: Mapping[CorrectionName, Mapping[str, object]] = MappingProxyType(
    {
        "decoupled": {"correction_cap": 2.0},
        "tis_token": {"correction_cap": 2.0},
        "tis_sequence": {"correction_cap": 2.0},
        "icepop": {"correction_floor": 0.5, "correction_cap": 2.0},
        "geometric_mask": {"correction_floor": 0.99, "correction_cap": 1.01},
    }
)
"""The same of a correction."""
