"""Aggregation: every one is sum(weight * loss) / divisor, so that gradients add up as groups arrive.

The weight is known when a sequence is packed, the divisor at the step.
"""

from __future__ import annotations

from gymllm.errors import ConfigError
from gymllm_trainers.algorithms.names import AggregationName


def token_weight(name: AggregationName, *, trained_tokens: int) -> float:
    """What each token's loss is multiplied by.

    1 / trained_tokens for sequence_mean_token_mean (GRPO, sec. 4.1 of Shao et al. 2024, arXiv:2402.03300),
    else 1.

    Args:
        name: The aggregation.
        trained_tokens: Tokens of the token's trajectory that are trained on, all its segments together.

    Raises:
        ConfigError: `trained_tokens` < 1.
    """
    if trained_tokens < 1:
        raise ConfigError(f"a trajectory needs a trained token, got {trained_tokens}.")
    return 1.0 / trained_tokens if name == "sequence_mean_token_mean" else 1.0


def divisor(
    name: AggregationName, *, tokens: float, trajectories: int, constant_tokens: int = 0
) -> float:
    """What the sum over an optimizer step is divided by; at least 1, so that an empty step is no NaN.

    token_mean: DAPO, sec. 3.3 of Yu et al. 2025 (arXiv:2503.14476); sequence_mean_token_mean: GRPO, sec. 4.1
    of Shao et al. 2024 (arXiv:2402.03300); sequence_mean_token_sum: a trajectory is one action, as in RLOO
    (Ahmadian et al. 2024, arXiv:2402.14740); token_sum_constant: Dr. GRPO (Liu et al. 2025,
    arXiv:2503.20783).

    Args:
        name: The aggregation.
        tokens: Trained tokens of the step (targets: a token that several members share counts for each).
        trajectories: Trajectories of the step that have a trained token.
        constant_tokens: token_sum_constant: tokens that every trajectory is taken to have.

    Raises:
        ConfigError: token_sum_constant without its constant.
    """
    if name == "token_mean":
        return max(float(tokens), 1.0)
    if name != "token_sum_constant":
        return float(max(trajectories, 1))
    if constant_tokens < 1:
        raise ConfigError(
            f"token_sum_constant divides by algorithm.aggregation_tokens, which must be >= 1, got "
            f"{constant_tokens}."
        )
    return float(max(trajectories, 1) * constant_tokens)
