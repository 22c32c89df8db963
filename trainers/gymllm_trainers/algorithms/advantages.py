"""Advantages of episodes: what rewards say of each member of a group. Pure functions of arrays, on the host.

Axes: P groups, G members. Rewards and advantages are float32; means and spreads are taken in float64.
Those of a group need the group alone; those of the batch need every group of the step, so that groups
wait for it. Advantages of turns and of tokens are in `turn_advantages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gymllm.errors import ConfigError, UnknownNameError
from gymllm_trainers.algorithms.names import AdvantageName

Rewards = npt.NDArray[np.float32]
EPS = 1e-6
"""Added to standard deviations, in reward units."""


class Needs(NamedTuple):
    """What an advantage is made of."""

    what: Literal["group", "batch", "turns", "values", "nothing"]
    """group: the group's rewards (`group_advantages`); batch: those of every group of the step
    (`batch_advantages`); turns: the rewards of the group's turns (`turn_advantages`); values: a value
    head's (`gae`); nothing: it is 1."""
    flat_is_zero: bool
    """Whether a group whose members' returns are all equal has the advantage 0 throughout."""


ADVANTAGES: dict[AdvantageName, Needs] = {
    "centred": Needs("group", flat_is_zero=True),
    "dr_grpo": Needs("group", flat_is_zero=True),
    "grpo": Needs("group", flat_is_zero=True),
    "rloo": Needs("group", flat_is_zero=True),
    "maxrl": Needs("group", flat_is_zero=True),
    "batch_std": Needs("batch", flat_is_zero=True),
    "reinforce_pp_baseline": Needs("batch", flat_is_zero=True),
    "gigpo": Needs("turns", flat_is_zero=False),
    "turn": Needs("turns", flat_is_zero=False),
    "gae": Needs("values", flat_is_zero=False),
    "constant": Needs("nothing", flat_is_zero=False),
}


def group_advantages(name: AdvantageName, reward_PG: Rewards) -> Rewards:
    """The advantage called `name` of one that needs the group alone.

    Args:
        name: centred, dr_grpo, grpo, rloo or maxrl: each has its function below, with its source.
        reward_PG: Return of each episode, float32, shape [P, G] with G >= 2.

    Returns:
        Advantage, float32, shape [P, G].

    Raises:
        ConfigError: G < 2, or what the method itself refuses.
        UnknownNameError: No such advantage of a group.
    """
    match name:
        case "centred" | "dr_grpo":
            return centred(reward_PG)
        case "grpo":
            return grpo(reward_PG)
        case "rloo":
            return rloo(reward_PG)
        case "maxrl":
            return maxrl(reward_PG)
        case _:
            known = [one for one, needs in ADVANTAGES.items() if needs.what == "group"]
            raise UnknownNameError("advantage of a group", name, known)


def batch_advantages(
    name: AdvantageName,
    rewards: Sequence[npt.ArrayLike],
    tokens: Sequence[npt.ArrayLike],
) -> list[Rewards]:
    """The advantage called `name` of one that needs the whole step.

    Args:
        name: batch_std or reinforce_pp_baseline: each has its function below, with its source.
        rewards: Return of each member, one array a group; groups may differ in size.
        tokens: Trained tokens of each member, likewise.

    Returns:
        Advantage, float32, one array a group, shape [G].

    Raises:
        ConfigError: A group has fewer than two members.
        UnknownNameError: No such advantage of a batch.
    """
    match name:
        case "batch_std":
            return batch_std(rewards)
        case "reinforce_pp_baseline":
            return reinforce_pp_baseline(rewards, tokens)
        case _:
            known = [one for one, needs in ADVANTAGES.items() if needs.what == "batch"]
            raise UnknownNameError("advantage of a batch", name, known)


def centred(reward_PG: Rewards) -> Rewards:
    """Reward less the group's mean: `dr_grpo` by its other name.

    Dr. GRPO, sec. 3.2 of Liu et al. 2025 (arXiv:2503.20783): GRPO's advantage without the division by
    the group's spread, which weights nearly solved and nearly hopeless tasks up.

    Args:
        reward_PG: Return of each episode, float32, shape [P, G] with G >= 2.

    Returns:
        Advantage, float32, shape [P, G]; exactly zero for a group whose rewards are all equal.

    Raises:
        ConfigError: G < 2.
    """
    return _centre(reward_PG).astype(np.float32)


def grpo(reward_PG: Rewards, *, eps: float = EPS) -> Rewards:
    """Reward less the group's mean, over the group's standard deviation (ddof 1) + eps.

    GRPO, sec. 4.1 of Shao et al. 2024 (arXiv:2402.03300).

    Args:
        reward_PG: Return of each episode, float32, shape [P, G] with G >= 2.
        eps: Added to the standard deviation, in reward units.

    Returns:
        Advantage, float32, shape [P, G]; exactly zero for a group whose rewards are all equal.

    Raises:
        ConfigError: G < 2.
    """
    centre_PG = _centre(reward_PG)
    spread_P1 = centre_PG.std(axis=1, ddof=1, keepdims=True)
    return (centre_PG / (spread_P1 + eps)).astype(np.float32)


def rloo(reward_PG: Rewards) -> Rewards:
    """Reward less the mean of the *other* members' rewards: `centred` times G / (G - 1).

    RLOO, Ahmadian et al. 2024 (arXiv:2402.14740), after Kool et al. 2019.

    Args:
        reward_PG: Return of each episode, float32, shape [P, G] with G >= 2.

    Returns:
        Advantage, float32, shape [P, G]; exactly zero for a group whose rewards are all equal.

    Raises:
        ConfigError: G < 2.
    """
    centre_PG = _centre(reward_PG)
    members = centre_PG.shape[1]
    return (centre_PG * (members / (members - 1))).astype(np.float32)


def maxrl(reward_PG: Rewards) -> Rewards:
    """(Reward less the group's mean) over the group's mean; 0 where the mean is 0.

    MaxRL (arXiv:2602.02710): rare successes weigh in proportion to how rare they are, as they do in the
    gradient of the log-likelihood of success.

    Args:
        reward_PG: Return of each episode, float32, >= 0, shape [P, G] with G >= 2.

    Returns:
        Advantage, float32, shape [P, G]; exactly zero for a group whose rewards are all equal.

    Raises:
        ConfigError: G < 2, or a negative reward: the mean would say nothing of how rare success is.
    """
    centre_PG = _centre(reward_PG)
    if reward_PG.min() < 0:
        raise ConfigError(
            f"advantage maxrl divides by a group's mean reward and needs rewards >= 0, got "
            f"{float(reward_PG.min()):g}: choose another algorithm.advantage, or shift the rewards."
        )
    mean_P1 = reward_PG.mean(axis=1, keepdims=True, dtype=np.float64)
    return np.divide(centre_PG, mean_P1, out=np.zeros_like(centre_PG), where=mean_P1 != 0).astype(
        np.float32
    )


def batch_std(rewards: Sequence[npt.ArrayLike], *, eps: float = EPS) -> list[Rewards]:
    """Batch-wide: reward less its group's mean, over the standard deviation (ddof 1) of all rewards + eps.

    The idea of normalising over the batch is of REINFORCE++ (Hu 2025, arXiv:2501.03262); in this form it
    is what TRL calls scale_rewards="batch".

    Args:
        rewards: Return of each member, one array a group; groups may differ in size.
        eps: Added to the standard deviation, in reward units.

    Returns:
        Advantage, float32, one array a group, shape [G]; exactly zero for a group whose rewards are all
        equal.

    Raises:
        ConfigError: A group has fewer than two members.
    """
    groups = [_centre(_row(reward_G))[0] for reward_G in rewards]
    if not groups:
        return []
    everything = np.concatenate([np.asarray(reward_G, np.float64) for reward_G in rewards])
    spread = everything.std(ddof=1)
    return [(centre_G / (spread + eps)).astype(np.float32) for centre_G in groups]


def reinforce_pp_baseline(
    rewards: Sequence[npt.ArrayLike], tokens: Sequence[npt.ArrayLike], *, eps: float = 1e-8
) -> list[Rewards]:
    """Batch-wide: reward less its group's mean, whitened over the *tokens* of the batch.

    REINFORCE++ with a group baseline, Hu 2025 (arXiv:2501.03262): mean and variance (ddof 1) are those of
    the batch's trained tokens, each of which has its episode's advantage.

    Args:
        rewards: Return of each member, one array a group; groups may differ in size.
        tokens: Trained tokens of each member, likewise.
        eps: Added to the variance, in reward units squared.

    Returns:
        Advantage, float32, one array a group, shape [G]. A group whose rewards are all equal has exactly
        zero (whitening alone would push all of its members one way), though its tokens count in mean and
        variance.

    Raises:
        ConfigError: A group has fewer than two members.
    """
    groups = [_centre(_row(reward_G))[0] for reward_G in rewards]
    if not groups:
        return []
    weights = np.concatenate([np.asarray(token_G, np.float64) for token_G in tokens])
    centre = np.concatenate(groups)
    count = weights.sum()
    if count < 2:
        return [np.zeros(len(centre_G), np.float32) for centre_G in groups]
    mean = (centre * weights).sum() / count
    variance = ((centre - mean) ** 2 * weights).sum() / (count - 1)
    return [
        (np.where(centre_G.any(), centre_G - mean, 0.0) / np.sqrt(variance + eps)).astype(
            np.float32
        )
        for centre_G in groups
    ]


def best_of_n(reward_PG: Rewards, *, keep: int = 1, above: float = 0.0) -> npt.NDArray[np.bool_]:
    """Which members of each group are imitated: the `keep` best of those with a reward above `above`.

    Rejection sampling fine-tuning (RFT; Yuan et al. 2023, arXiv:2308.01825; best-of-n). Of equals the
    earlier member comes first.

    Args:
        reward_PG: Return of each episode, float32, shape [P, G].
        keep: At most so many of a group, >= 1.
        above: Reward that must be exceeded.

    Returns:
        Shape [P, G], bool.
    """
    order_PG = np.argsort(-reward_PG.astype(np.float64), axis=1, kind="stable")
    kept_PG = np.zeros(reward_PG.shape, np.bool_)
    np.put_along_axis(kept_PG, order_PG[:, :keep], True, axis=1)
    return kept_PG & (reward_PG > above)


def _centre(reward_PG: Rewards) -> npt.NDArray[np.float64]:
    if reward_PG.ndim != 2 or reward_PG.shape[1] < 2:
        raise ConfigError(
            f"a group baseline needs rewards of shape [groups, members] with at least 2 members, got "
            f"shape {reward_PG.shape}; set rollout.group_size >= 2."
        )
    wide_PG = reward_PG.astype(np.float64)
    # The mean of equal numbers can differ from them by one rounding: say zero outright.
    flat_P1 = np.ptp(wide_PG, axis=1, keepdims=True) == 0
    return np.where(flat_P1, 0.0, wide_PG - wide_PG.mean(axis=1, keepdims=True))


def _row(reward_G: npt.ArrayLike) -> Rewards:
    return np.atleast_2d(np.asarray(reward_G, np.float32))
