"""From groups to sequences: turns, rewards of tokens, filters, penalties, weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gymllm.ledger import Segment
from gymllm.task import Task
from gymllm.trajectory import Ending, Group, Trajectory, Turn
from gymllm_trainers.algorithms.config import AlgorithmConfig
from gymllm_trainers.algorithms.resolve import resolve
from gymllm_trainers.learner.metrics import Counts
from gymllm_trainers.learner.reader import GroupReader
from gymllm_trainers.learner.sequences import token_advantages, token_rewards, turns_of_tokens

TASK = Task(index=0, id="t", seed=0)


def segment(mask: str, version: int = 0) -> Segment:
    flags = np.array([int(one) for one in mask], np.int32)
    return Segment(
        ids=np.arange(len(mask), dtype=np.int32),
        mask=flags,
        logprobs=(-0.5 * flags).astype(np.float32),
        versions=np.where(flags, version, -1).astype(np.int32),
    )


def turn(generated: int, reward: float = 0.0, observation: str = "") -> Turn:
    return Turn(
        observation=observation,
        action="",
        reward=reward,
        prompt_tokens=0,
        generated_tokens=generated,
    )


def trajectory(*masks: str, turns: tuple[Turn, ...] = (), **fields: object) -> Trajectory:
    made = Trajectory(
        task=TASK,
        member=0,
        attempt=0,
        segments=tuple(segment(mask) for mask in masks),
        turns=turns,
        messages=(),
        ending=Ending.TERMINATED,
    )
    return replace(made, **fields)  # type: ignore[arg-type] # built for tests


THREE = trajectory("0110111", "00110", turns=(turn(2, 1.0), turn(4, 0.0), turn(1, 3.0)), reward=4.5)
"""Three turns; the second goes on in the second segment, whose first token it generates."""


def test_tokens_know_their_turn_across_segments() -> None:
    first, second = turns_of_tokens(THREE)
    assert first.tolist() == [-1, 0, 0, -1, 1, 1, 1]
    assert second.tolist() == [-1, -1, 1, 2, -1]


def test_an_answer_that_a_limit_cut_off_is_of_the_last_turn() -> None:
    (only,) = turns_of_tokens(trajectory("01011", turns=(turn(1),)))
    assert only.tolist() == [-1, 0, -1, 0, 0]
    (only,) = turns_of_tokens(trajectory("0011"))
    assert only.tolist() == [-1, -1, 0, 0], "before any turn was over"


def test_advantages_of_turns_go_to_their_tokens() -> None:
    first, second = token_advantages(THREE, np.array([1.0, 2.0, 3.0], np.float32))
    assert first.tolist() == [0, 1, 1, 0, 2, 2, 2]
    assert second.tolist() == [0, 0, 2, 3, 0]
    assert [part.tolist() for part in token_advantages(THREE, 0.5)] == [[0.5] * 7, [0.5] * 5]


def test_rewards_come_after_the_last_token_of_their_turn() -> None:
    masks = [one.mask == 1 for one in THREE.segments]
    rewards = token_rewards(THREE, THREE.reward, masks)
    # 0.5 of the return came before the first turn: it is known at the end alone.
    assert rewards.tolist() == [0, 1, 0, 0, 0, 0, 3.5]
    masks[1][:] = False  # too old to be trained on, say: nothing is lost
    assert token_rewards(THREE, THREE.reward, masks).tolist() == [0, 1, 0, 0, 3.5]
    assert token_rewards(THREE, 1.0, [mask & False for mask in masks]).tolist() == []


def reader(**settings: object) -> GroupReader:
    algorithm = resolve(AlgorithmConfig(**settings))  # type: ignore[arg-type] # built for tests
    return GroupReader(algorithm, max_lag=1, longest=10)


def group(*trajectories: Trajectory) -> Group:
    return Group(task=TASK, trajectories=trajectories)


def test_old_tokens_first_tokens_and_counts() -> None:
    made = trajectory("111")
    old = replace(made, segments=(segment("011", version=3), segment("011", version=2)), reward=1.0)
    counts = Counts()
    one = reader()
    read = one.read(group(made, old), version=4)
    assert [[mask.tolist() for mask in masks] for masks in read.masks_G] == [
        [[False] * 3],
        [[False, True, True], [False] * 3],
    ]
    one.count(read, counts)
    assert (counts.generated, counts.stale, counts.lag_max) == (7, 5, 4)
    (prepared,) = one.prepare([read])
    assert prepared.trajectories == 1
    (sequence,) = prepared.sequences
    assert sequence.mask.tolist() == [0, 1, 1]
    assert np.asarray(sequence.age).tolist() == [0, 1, 1]
    assert sequence.advantage.tolist() == [0.5] * 3


def test_cut_episodes_are_filtered_but_stay_in_the_baseline() -> None:
    cut = trajectory("011", ending=Ending.TRUNCATED, reason="episode_timeout", reward=0.0)
    solved = trajectory("011", reward=1.0)
    for rule, kept in (("off", 2), ("machine", 1), ("all", 1)):
        one = reader(overlong_filter=rule)
        (prepared,) = one.prepare([one.read(group(cut, solved), version=0)])
        assert len(prepared.sequences) == kept
        assert prepared.sequences[-1].advantage[0] == 0.5
    by_task = replace(cut, reason="max_turns")
    one = reader(overlong_filter="machine")
    (prepared,) = one.prepare([one.read(group(by_task, solved), version=0)])
    assert len(prepared.sequences) == 2


def test_long_answers_are_worth_less() -> None:
    """DAPO's penalty: of 10 tokens at most, the last 4 cost a quarter each."""
    one = reader(overlong_buffer=0.4)
    short, long = trajectory("0" + "1" * 6, reward=1.0), trajectory("0" + "1" * 9, reward=1.0)
    read = one.read(group(short, long), version=0)
    assert read.reward_G.tolist() == [1.0, 0.25]
    assert not read.flat, "equal rewards, but the lengths teach something"
    assert read.penalty == -0.75


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [("token_mean", [1.0, 1.0, 1.0]), ("sequence_mean_token_mean", [0.5, 0.25, 0.25])],
)
def test_weights_are_of_trajectories_not_of_segments(
    aggregation: str, weights: list[float]
) -> None:
    one = reader(aggregation=aggregation)
    pair = group(trajectory("011", reward=1.0), trajectory("0111", "01"))
    (prepared,) = one.prepare([one.read(pair, version=0)])
    assert [sequence.weight for sequence in prepared.sequences] == weights


def test_turns_that_acted_on_the_same_observation_are_compared() -> None:
    """GiGPO without scaling: the episode's part is +-1; of the two at the door one went on to 2."""
    left = trajectory("01", turns=(turn(1, 2.0, "door"),), reward=2.0)
    right = trajectory("01", turns=(turn(1, 0.0, "door"),), reward=0.0)
    other = trajectory("01", turns=(turn(1, 1.0, "hall"),), reward=1.0)
    one = reader(preset="gigpo", scale="none")
    (prepared,) = one.prepare([one.read(group(left, right, other), version=0)])
    assert [float(each.advantage[1]) for each in prepared.sequences] == [2.0, -2.0, 0.0]


def test_whole_batches_are_whitened_together() -> None:
    one = reader(preset="batch_std")
    assert one.compares_groups
    pairs = [(0.0, 1.0), (0.0, 3.0)]
    reads = [
        one.read(group(*(trajectory("01", reward=reward) for reward in pair)), version=0)
        for pair in pairs
    ]
    spread = np.std([0, 1, 0, 3], ddof=1)
    advantages = [float(s.advantage[1]) for each in one.prepare(reads) for s in each.sequences]
    np.testing.assert_allclose(advantages, np.array([-0.5, 0.5, -1.5, 1.5]) / spread, rtol=1e-5)
