"""Advantages of turns and of tokens: pure functions of arrays, on the host.

Axes: S turns of one episode, T trained tokens in their order. A group is a sequence of members, each with
an array of its own length. float32 in and out; computed in float64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gymllm.errors import ConfigError, UnknownNameError
from gymllm_trainers.algorithms.advantages import EPS
from gymllm_trainers.algorithms.names import AdvantageName, Scale

Turns = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]


class Gae(NamedTuple):
    """Of each token, float32, shape [T]."""

    advantage: Turns
    returns: Turns
    """advantage + value: what the value should have been."""


def turn_advantages(
    name: AdvantageName,
    rewards: Sequence[npt.ArrayLike],
    states: Sequence[Sequence[Hashable]],
    *,
    gamma: float,
    turn_weight: float,
    scale: Scale = "std",
    return_G: npt.ArrayLike | None = None,
) -> list[Turns]:
    """The advantage called `name` of each turn of a group: `gigpo` or `turn`, with an algorithm's settings.

    Args:
        name: Which.
        rewards: Reward of each turn, one array a member, shape [S]; members may differ in length.
        states: Of each turn what it acted on, likewise; `turn` has no use for them.
        gamma: Discount of a later turn's reward.
        turn_weight: gigpo's `weight`, turn's `share`.
        scale: gigpo's.
        return_G: Return of each member, shape [G]; None: the sum of its turns' rewards.

    Returns:
        Advantage of each turn, float32, one array a member, shape [S].

    Raises:
        ConfigError: Fewer than two members, or members and states that don't go together.
        UnknownNameError: No such advantage of turns.
    """
    match name:
        case "gigpo":
            return gigpo(
                rewards,
                states,
                gamma=gamma,
                weight=turn_weight,
                scale=scale,
                return_G=return_G,
            )
        case "turn":
            return turn(rewards, gamma=gamma, share=turn_weight, return_G=return_G)
        case _:
            raise UnknownNameError("advantage of turns", name, ["gigpo", "turn"])


def gigpo(
    rewards: Sequence[npt.ArrayLike],
    states: Sequence[Sequence[Hashable]],
    *,
    gamma: float = 0.95,
    weight: float = 1.0,
    scale: Scale = "std",
    return_G: npt.ArrayLike | None = None,
    eps: float = EPS,
) -> list[Turns]:
    """The episode's advantage in its group + weight * the turn's among all that acted on the same state.

    GiGPO, sec. 4 of Feng et al. 2025 (arXiv:2505.10978). A turn's return is the discounted sum of rewards
    from it on; turns of all members whose state is equal are a group of their own, also when one member
    came by several times. A turn that nothing is like has 0 as its own part.

    Args:
        rewards: Reward of each turn, one array a member, shape [S]; members may differ in length.
        states: Of each turn what it acted on (the observation, or a hash of it), likewise.
        gamma: Discount of a later turn's reward, in the turn's part alone.
        weight: Of the turn's part.
        scale: std: both parts are divided by the standard deviation (ddof 1) of what they are compared
            with, + eps; none: they aren't.
        return_G: Return of each member, shape [G]; None: the sum of its turns' rewards.
        eps: Added to standard deviations, in reward units.

    Returns:
        Advantage of each turn, float32, one array a member, shape [S].

    Raises:
        ConfigError: Fewer than two members, or members and states that don't go together.
    """
    rewards_GS = _members(rewards)
    if [len(reward_S) for reward_S in rewards_GS] != [len(state_S) for state_S in states]:
        raise ConfigError(
            f"gigpo needs a state for each turn: got members of {[len(r) for r in rewards_GS]} turns and "
            f"{[len(s) for s in states]} states."
        )
    episode_G = _compare(_returns(rewards_GS, return_G), scale, eps)
    to_go = [_return_to_go(reward_S, gamma) for reward_S in rewards_GS]
    places: defaultdict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for member, state_S in enumerate(states):
        for index, state in enumerate(state_S):
            places[state].append((member, index))
    own = [np.zeros(len(reward_S)) for reward_S in rewards_GS]
    for group in places.values():
        compared = _compare(np.array([to_go[i][s] for i, s in group]), scale, eps)
        for (member, index), value in zip(group, compared, strict=True):
            own[member][index] = value
    return [
        (episode_G[member] + weight * own_S).astype(np.float32) for member, own_S in enumerate(own)
    ]


def turn(
    rewards: Sequence[npt.ArrayLike],
    *,
    gamma: float = 1.0,
    share: float = 0.5,
    return_G: npt.ArrayLike | None = None,
) -> list[Turns]:
    """(1 - share) * the episode's centred return + share * the turn's centred return-to-go.

    Turn-level credit after Zeng et al. 2025 (arXiv:2505.11821): the n-th turn is compared with the n-th
    turns of those members that got so far; one that got there alone has 0 as its own part.

    Args:
        rewards: Reward of each turn, one array a member, shape [S]; members may differ in length.
        gamma: Discount of a later turn's reward, in the return-to-go alone.
        share: The turn's, from 0 to 1.
        return_G: Return of each member, shape [G]; None: the sum of its turns' rewards.

    Returns:
        Advantage of each turn, float32, one array a member, shape [S].

    Raises:
        ConfigError: Fewer than two members.
    """
    rewards_GS = _members(rewards)
    episode_G = _compare(_returns(rewards_GS, return_G), "none", 0.0)
    to_go = [_return_to_go(reward_S, gamma) for reward_S in rewards_GS]
    own = [np.zeros(len(reward_S)) for reward_S in rewards_GS]
    for index in range(max(len(reward_S) for reward_S in rewards_GS)):
        there = [member for member, reward_S in enumerate(rewards_GS) if index < len(reward_S)]
        compared = _compare(np.array([to_go[member][index] for member in there]), "none", 0.0)
        for member, value in zip(there, compared, strict=True):
            own[member][index] = value
    return [
        ((1 - share) * episode_G[member] + share * own_S).astype(np.float32)
        for member, own_S in enumerate(own)
    ]


def gae(
    reward_T: npt.ArrayLike,
    value_T: npt.ArrayLike,
    last_T: npt.ArrayLike,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Gae:
    """Generalised advantage estimation over trained tokens.

    A_t = d_t + gamma lam A_{t+1}, d_t = r_t + gamma v_{t+1} - v_t: eq. 16 of Schulman et al. 2015
    (arXiv:1506.02438). The token after an episode's last has value and advantage 0. Tokens of the
    environment are no steps: the next step is the next token that the policy generated.

    Args:
        reward_T: Reward that came with each token, 0 for most, shape [T]; several episodes may follow
            each other.
        value_T: Value before each token, shape [T].
        last_T: Whether a token is its episode's last, shape [T].
        gamma: Discount, per token.
        lam: From one-step differences (0) to whole returns (1).

    Returns:
        Advantages and returns, float32, shape [T]; not whitened.

    Raises:
        ConfigError: Shapes that differ.
    """
    reward = np.asarray(reward_T, np.float64)
    value = np.asarray(value_T, np.float64)
    last = np.asarray(last_T, np.bool_)
    if not reward.shape == value.shape == last.shape or reward.ndim != 1:
        raise ConfigError(
            f"gae needs rewards, values and last marks of one shape [T], got {reward.shape}, "
            f"{value.shape} and {last.shape}."
        )
    following = np.append(value[1:], 0.0) * ~last
    difference = reward + gamma * following - value
    carried = gamma * lam * ~last
    advantages: list[float] = []
    later = 0.0
    # Plain numbers: indexing an array at every step takes five times as long.
    for one, share in zip(reversed(difference.tolist()), reversed(carried.tolist()), strict=True):
        later = one + share * later
        advantages.append(later)
    advantage = np.array(advantages[::-1], np.float64)
    return Gae(advantage.astype(np.float32), (advantage + value).astype(np.float32))


def whitened(advantage_T: npt.ArrayLike, *, eps: float = 1e-8) -> Turns:
    """Batch-wide: shifted and scaled to mean 0 and variance (ddof 1) 1 over all trained tokens of a batch.

    Usual for PPO's advantages (Andrychowicz et al. 2020, arXiv:2006.05990).

    Args:
        advantage_T: Of every trained token of the batch, shape [T].
        eps: Added to the variance.

    Returns:
        float32, shape [T]; of a single token 0.
    """
    advantage = np.asarray(advantage_T, np.float64)
    if advantage.size < 2:
        return np.zeros(advantage.shape, np.float32)
    centre = advantage - advantage.mean()
    return (centre / np.sqrt(centre.var(ddof=1) + eps)).astype(np.float32)


def _members(rewards: Sequence[npt.ArrayLike]) -> list[Wide]:
    if len(rewards) < 2:
        raise ConfigError(
            f"a group baseline needs at least 2 members, got {len(rewards)}; set rollout.group_size >= 2."
        )
    return [np.asarray(reward_S, np.float64) for reward_S in rewards]


def _returns(rewards_GS: list[Wide], return_G: npt.ArrayLike | None) -> Wide:
    if return_G is None:
        return np.array([reward_S.sum() for reward_S in rewards_GS])
    given = np.asarray(return_G, np.float64)
    if given.shape != (len(rewards_GS),):
        raise ConfigError(
            f"return_G needs one number a member, got shape {given.shape} for {len(rewards_GS)} members."
        )
    return given


def _compare(values: Wide, scale: Scale, eps: float) -> Wide:
    """Centred, and scaled if wanted; exactly 0 where all are equal, so also for one alone."""
    if np.ptp(values) == 0:
        return np.zeros_like(values)
    centre = values - values.mean()
    return centre / (centre.std(ddof=1) + eps) if scale == "std" else centre


def _return_to_go(reward_S: Wide, gamma: float) -> Wide:
    total, later = np.zeros_like(reward_S), 0.0
    for index in range(len(reward_S) - 1, -1, -1):
        later = reward_S[index] + gamma * later
        total[index] = later
    return total
