"""From groups to what is trained on: rewards shaped, tokens chosen, advantages found, sequences made.

Axes: G members of a group, N tokens of a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gymllm.trajectory import Group, Trajectory
from gymllm_trainers.algorithms.advantages import (
    ADVANTAGES,
    batch_advantages,
    best_of_n,
    group_advantages,
)
from gymllm_trainers.algorithms.aggregation import token_weight
from gymllm_trainers.algorithms.algorithm import Algorithm
from gymllm_trainers.algorithms.lengths import overlong, soft_overlong
from gymllm_trainers.algorithms.turn_advantages import turn_advantages
from gymllm_trainers.learner.metrics import Counts
from gymllm_trainers.learner.sequences import token_advantages
from gymllm_trainers.packing import TrainingSequence

FloatArray = npt.NDArray[np.float32]
Masks = tuple[npt.NDArray[np.bool_], ...]
"""Of each segment of a trajectory, which tokens are trained on, [N]."""
MemberAdvantage = float | FloatArray
"""Of a whole episode, or one for each of its turns."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadGroup:
    """A group, with what its rewards and tokens are to the learner when it arrives."""

    group: Group
    version: int
    """The learner's, when it came."""
    reward_G: FloatArray
    """Returns, penalties included."""
    masks_G: tuple[Masks, ...]
    tokens_G: npt.NDArray[np.int64]
    """Trained tokens of each member."""
    advantages: Sequence[MemberAdvantage] | None
    """None: they take more than the group to find."""
    flat: bool
    """Whether nothing can be learnt from it, as all advantages are 0 or nothing is worth imitating."""
    filtered: int
    """Members that are not trained on."""
    penalty: float
    """Sum of the penalties in `reward_G`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A group's sequences, ready to be packed."""

    read: ReadGroup
    sequences: list[TrainingSequence]
    trajectories: int
    """Those with a trained token."""


class GroupReader:
    """Makes sequences of groups, as an algorithm has it."""

    def __init__(self, algorithm: Algorithm, *, max_lag: int, longest: int) -> None:
        """Says how.

        Args:
            algorithm: The algorithm.
            max_lag: Oldest token that is trained on, in policy versions behind the learner's.
            longest: Most tokens that an episode can generate, where the settings leave it open.
        """
        self._algorithm, self._max_lag = algorithm, max_lag
        self._needs = ADVANTAGES[algorithm.advantage]
        self.longest = longest

    @property
    def compares_groups(self) -> bool:
        """Whether an advantage depends on other groups of its batch."""
        return self._needs.what == "batch"

    def read(self, group: Group, *, version: int) -> ReadGroup:
        """What a group is to a learner at `version`."""
        penalty_G = self._penalties(group)
        reward_G = np.array(group.rewards, np.float32) + penalty_G
        keep_G = self._kept(group, reward_G)
        masks_G = tuple(
            self._masks(trajectory, version=version, keep=bool(keep))
            for trajectory, keep in zip(group.trajectories, keep_G, strict=True)
        )
        advantages = self._own_advantages(group, reward_G)
        return ReadGroup(
            group=group,
            version=version,
            reward_G=reward_G,
            masks_G=masks_G,
            tokens_G=np.array([sum(int(mask.sum()) for mask in masks) for masks in masks_G]),
            advantages=advantages,
            flat=self._is_flat(reward_G, advantages, keep_G),
            filtered=int((~keep_G).sum()),
            penalty=float(penalty_G.sum()),
        )

    def count(self, read: ReadGroup, counts: Counts) -> None:
        """Adds a group that is trained on to `counts`."""
        counts.groups += 1
        counts.episodes += len(read.reward_G)
        counts.filtered += read.filtered
        counts.penalty += read.penalty
        for trajectory in read.group.trajectories:
            for segment in trajectory.segments:
                lag_N = read.version - segment.versions[segment.mask == 1]
                counts.add_tokens(lag_N, stale=int((lag_N > self._max_lag).sum()))

    def prepare(self, groups: Sequence[ReadGroup]) -> list[Prepared]:
        """The sequences of groups; of the whole batch, if advantages compare groups."""
        if self._needs.what != "batch":
            return [self._prepared(read, read.advantages) for read in groups]
        found = batch_advantages(
            self._algorithm.advantage,
            [read.reward_G for read in groups],
            [read.tokens_G for read in groups],
        )
        return [
            self._prepared(read, advantage_G.tolist())
            for read, advantage_G in zip(groups, found, strict=True)
        ]

    # ------------------------------------------------------------------ rewards

    def _penalties(self, group: Group) -> FloatArray:
        """Of the soft overlong penalty, in reward units."""
        algorithm = self._algorithm
        if not algorithm.overlong_buffer:
            return np.zeros(len(group.trajectories), np.float32)
        limit = algorithm.overlong_limit or self.longest
        tokens_G = [trajectory.generated_tokens for trajectory in group.trajectories]
        penalty_G = soft_overlong(tokens_G, limit=limit, buffer=algorithm.overlong_buffer * limit)
        return (algorithm.overlong_weight * penalty_G).astype(np.float32)

    def _own_advantages(
        self, group: Group, reward_G: FloatArray
    ) -> Sequence[MemberAdvantage] | None:
        algorithm = self._algorithm
        match self._needs.what:
            case "group":
                return group_advantages(algorithm.advantage, reward_G[None])[0].tolist()
            case "turns":
                turns = [trajectory.turns for trajectory in group.trajectories]
                return turn_advantages(
                    algorithm.advantage,
                    [[turn.reward for turn in each] for each in turns],
                    [[turn.observation for turn in each] for each in turns],
                    gamma=algorithm.gamma,
                    turn_weight=algorithm.turn_weight,
                    scale=algorithm.scale,
                    return_G=reward_G,
                )
            case "nothing":
                return [1.0] * len(reward_G)
            case "batch" | "values":
                return None

    def _kept(self, group: Group, reward_G: FloatArray) -> npt.NDArray[np.bool_]:
        """Which members are trained on at all; the others still are part of the baseline."""
        algorithm = self._algorithm
        keep_G = np.array(
            [
                not overlong(t.ending, t.reason, rule=algorithm.overlong_filter)
                for t in group.trajectories
            ]
        )
        if algorithm.preset == "best_of_n":
            best_G = best_of_n(reward_G[None], keep=algorithm.keep_best, above=algorithm.keep_above)
            keep_G &= best_G[0]
        return keep_G

    def _is_flat(
        self,
        reward_G: FloatArray,
        advantages: Sequence[MemberAdvantage] | None,
        keep_G: npt.NDArray[np.bool_],
    ) -> bool:
        if self._needs.what == "nothing":
            return not keep_G.any()
        if self._needs.flat_is_zero or advantages is None:
            return bool(np.ptp(reward_G) == 0)
        return not any(np.any(advantage) for advantage in advantages)

    # ------------------------------------------------------------------ tokens

    def _masks(self, trajectory: Trajectory, *, version: int, keep: bool) -> Masks:
        masks: list[npt.NDArray[np.bool_]] = []
        for segment in trajectory.segments:
            fresh_N = version - segment.versions <= self._max_lag
            mask_N = (segment.mask == 1) & fresh_N & keep
            mask_N[:1] = False  # nothing predicts a sequence's first token
            masks.append(mask_N)
        return tuple(masks)

    def _prepared(self, read: ReadGroup, advantages: Sequence[MemberAdvantage] | None) -> Prepared:
        sequences: list[TrainingSequence] = []
        for member, trajectory in enumerate(read.group.trajectories):
            tokens = int(read.tokens_G[member])
            if not tokens:
                continue
            weight = token_weight(self._algorithm.aggregation, trained_tokens=tokens)
            advantage = 0.0 if advantages is None else advantages[member]
            of_segments = zip(
                trajectory.segments,
                read.masks_G[member],
                token_advantages(trajectory, advantage),
                strict=True,
            )
            sequences += [
                TrainingSequence(
                    ids=segment.ids,
                    mask=mask.astype(np.float32),
                    behaviour=segment.logprobs,
                    advantage=advantage_N,
                    weight=weight,
                    age=np.where(mask, read.version - segment.versions, 0).astype(np.float32),
                    trajectory=member,
                )
                for segment, mask, advantage_N in of_segments
                if mask.any()
            ]
        return Prepared(read=read, sequences=sequences, trajectories=int((read.tokens_G > 0).sum()))
