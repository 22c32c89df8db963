"""`Unicode`: any text, cheap, and at home in Gymnasium's functions over spaces."""

import copy
import json
import pickle

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import utils as space_utils
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.vector.utils import batch_differing_spaces, batch_space, concatenate, iterate

from gymllm.errors import ConfigError
from gymllm.spaces import Unicode, is_text


@pytest.mark.parametrize(
    "text", ["", " ", "a\nb\t", "é", "日本語", "🙂", "\x00", "\ud800", "a" * 1000]
)
def test_any_text_is_contained(text: str) -> None:
    assert text in Unicode()
    assert Unicode().contains(text)


@pytest.mark.parametrize("other", [None, 3, b"bytes", ["a"], np.array("a")])
def test_other_types_are_not_contained(other: object) -> None:
    assert not Unicode().contains(other)


def test_longer_than_max_length_is_not_contained() -> None:
    assert Unicode(3).contains("abc")
    assert not Unicode(3).contains("abcd")


def test_negative_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="got -1"):
        Unicode(-1)


def test_samples_lie_in_the_space_and_follow_the_seed() -> None:
    first, second = Unicode(seed=3), Unicode(seed=3)
    samples = [first.sample() for _ in range(200)]
    assert samples == [second.sample() for _ in range(200)]
    assert len(set(samples)) > 150
    assert all(sample in first for sample in samples)
    assert all(len(Unicode(2, seed=i).sample()) <= 2 for i in range(50))
    first.seed(3)
    assert [first.sample() for _ in range(200)] == samples


def test_masks_are_refused() -> None:
    with pytest.raises(ConfigError, match="mask"):
        Unicode().sample(mask=np.ones(3))  # type: ignore[arg-type]  # what is tested


def test_equality_pickle_and_copy() -> None:
    space = Unicode(7, seed=1)
    assert space == Unicode(7)
    assert space != Unicode(8)
    assert space != spaces.Text(7)
    assert pickle.loads(pickle.dumps(space)) == space
    assert copy.deepcopy(space).sample() == space.sample()
    assert len(pickle.dumps(Unicode())) < 500


def test_json_round_trip() -> None:
    space = Unicode(seed=0)
    samples = [space.sample() for _ in range(20)]
    assert space.from_jsonable(json.loads(json.dumps(space.to_jsonable(samples)))) == samples


def test_batches_are_tuples_of_strings() -> None:
    batched = batch_space(Unicode(9), 3)
    assert isinstance(batched, spaces.Tuple)
    batched.seed(5)
    sample = batched.sample()
    assert sample in batched
    assert list(iterate(batched, sample)) == list(sample)
    assert concatenate(Unicode(9), sample, None) == tuple(sample)
    assert ("a", "b") in batch_differing_spaces([Unicode(1), Unicode(2)])


def test_flattening_leaves_text_alone() -> None:
    space = Unicode()
    assert not space.is_np_flattenable
    assert space_utils.flatten_space(space) == space
    assert space_utils.unflatten(space, space_utils.flatten(space, "a b")) == "a b"
    with pytest.raises(ValueError, match="no fixed size"):
        space_utils.flatdim(space)
    both = spaces.Dict({"text": space, "number": spaces.Discrete(2)})
    flat = space_utils.flatten(both, {"text": "é", "number": np.int64(1)})
    assert space_utils.unflatten(both, flat)["text"] == "é"


def test_is_text() -> None:
    assert is_text(Unicode())
    assert is_text(spaces.Text(3))
    assert not is_text(spaces.Discrete(2))


def test_works_in_gymnasiums_sync_vector_env() -> None:
    envs = SyncVectorEnv([lambda: gymnasium.make("gymllm/FrozenLake-v0")] * 2)
    observations, _ = envs.reset(seed=1)
    assert observations in envs.observation_space
    observations, rewards, *_ = envs.step(("down", "right"))
    assert len(observations) == 2
    assert rewards.shape == (2,)
    envs.close()


def test_works_in_gymnasiums_async_vector_env() -> None:
    make = lambda: gymnasium.make("gymllm:gymllm/FrozenLake-v0")  # noqa: E731
    envs = AsyncVectorEnv([make] * 2, shared_memory=False, context="spawn")
    observations, _ = envs.reset(seed=1)
    assert observations in envs.observation_space
    envs.close()
