"""Advantages that come from a value head: rewards and values of trained tokens, wherever they are packed.

Values are known by target of a micro-batch, advantages are found along a trajectory, whose segments may lie
in several micro-batches. So targets are numbered through the batch, trajectory by trajectory, and each
carries its number where its advantage will be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from gymllm_trainers.algorithms.algorithm import Algorithm
from gymllm_trainers.algorithms.turn_advantages import gae, whitened
from gymllm_trainers.learner.programs import Scored
from gymllm_trainers.learner.reader import Prepared
from gymllm_trainers.learner.sequences import token_rewards
from gymllm_trainers.packing import PackedBatch, TrainingSequence

MOST_TARGETS = 2**24
"""float32 tells whole numbers apart up to here."""


class ValueBook:
    """The rewards of a batch's trained tokens, in one order; and from values their advantages."""

    def __init__(self, algorithm: Algorithm, prepared: Sequence[Prepared]) -> None:
        """Numbers the trained tokens of a batch."""
        self._algorithm = algorithm
        self._first: dict[int, int] = {}
        rewards: list[npt.NDArray[np.float32]] = []
        last: list[npt.NDArray[np.bool_]] = []
        count = 0
        for each in prepared:
            self._first[id(each)] = count
            read = each.read
            members = zip(read.group.trajectories, read.reward_G, read.masks_G, strict=True)
            for trajectory, reward, masks in members:
                of_tokens = token_rewards(trajectory, float(reward), masks)
                rewards.append(of_tokens)
                last.append(np.arange(len(of_tokens)) == len(of_tokens) - 1)
                count += len(of_tokens)
        assert count < MOST_TARGETS, f"a batch of {count} trained tokens"
        self._reward = np.concatenate([*rewards, np.zeros(0, np.float32)])
        self._last = np.concatenate([*last, np.zeros(0, np.bool_)])

    def numbered(self, prepared: Prepared) -> list[TrainingSequence]:
        """A group's sequences, each trained token with its number as its advantage."""
        number = self._first[id(prepared)]
        sequences: list[TrainingSequence] = []
        for sequence in prepared.sequences:
            numbers = np.zeros(len(sequence), np.float32)
            trained = np.flatnonzero(sequence.mask)
            numbers[trained] = number + np.arange(len(trained))
            number += len(trained)
            sequences.append(replace(sequence, advantage=numbers))
        return sequences

    def with_advantages(
        self, batches: Sequence[PackedBatch], scored: Sequence[Scored]
    ) -> tuple[list[PackedBatch], list[Scored]]:
        """Micro-batches with advantages for numbers, and what their values should have been.

        Args:
            batches: All of the batch, of sequences that `numbered` made.
            scored: With the values at the start of the update.
        """
        value = np.zeros(len(self._reward), np.float32)
        numbers = [batch.advantage.astype(np.int64) for batch in batches]
        for batch, known, number in zip(batches, scored, numbers, strict=True):
            assert known.value is not None
            there = batch.mask > 0
            value[number[there]] = known.value[there]
        algorithm = self._algorithm
        found = gae(self._reward, value, self._last, gamma=algorithm.gamma, lam=algorithm.lam)
        advantage = whitened(found.advantage) if algorithm.whiten else found.advantage
        return (
            [
                batch._replace(advantage=np.where(batch.mask > 0, advantage[number], 0))
                for batch, number in zip(batches, numbers, strict=True)
            ],
            [
                known._replace(returns=np.where(batch.mask > 0, found.returns[number], 0))
                for batch, known, number in zip(batches, scored, numbers, strict=True)
            ],
        )
