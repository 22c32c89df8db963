"""`Unicode` and `Message`: any text, cheap, and at home in Gymnasium's functions over spaces."""

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import utils as space_utils
from gymnasium.utils.env_checker import check_env, data_equivalence
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import (
    batch_differing_spaces,
    batch_space,
    concatenate,
    create_empty_array,
    create_shared_memory,
    iterate,
)

from gymllm.errors import ConfigError, ConfigTypeError
from gymllm.spaces import ChatMessage, Message, Unicode, is_text, message, text_of

AnyVectorEnv = VectorEnv[Any, Any, Any]


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


@pytest.mark.parametrize("length", ["3", 1.5, True, None, float("nan")])
@pytest.mark.parametrize("make", [Unicode, lambda length: Message(max_length=length)])
def test_a_length_is_a_whole_number(make: Callable[[Any], object], length: object) -> None:
    with pytest.raises(ConfigTypeError, match="max_length must be a whole number"):
        make(length)


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


def test_shared_memory_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"Message.*no fixed size"):
        create_shared_memory(Message())
    with pytest.raises(ConfigError, match=r'vector_kwargs=\{"shared_memory": False\}'):
        gymnasium.make_vec("gymllm/FrozenLake-v0", vectorization_mode="async")
    envs = gymnasium.make_vec(
        "gymllm/FrozenLake-v0",
        vectorization_mode="async",
        vector_kwargs={"shared_memory": False, "context": "spawn"},
    )
    assert envs.reset(seed=1)[0] in envs.observation_space
    envs.close()


def test_works_in_gymnasiums_async_vector_env() -> None:
    make = lambda: gymnasium.make("gymllm:gymllm/FrozenLake-v0")  # noqa: E731
    envs = AsyncVectorEnv([make] * 2, shared_memory=False, context="spawn")
    observations, _ = envs.reset(seed=1)
    assert observations in envs.observation_space
    envs.close()


PIXELS = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)


@pytest.mark.parametrize(
    "element",
    [
        message("user"),
        message("assistant", "é\n🙂"),
        message("tool", "a", PIXELS, "b"),
        message("system", PIXELS),
    ],
)
def test_messages_of_texts_and_images_are_contained(element: ChatMessage) -> None:
    assert element in Message()
    assert json_round_trip(Message(), [element])[0]["role"] == element["role"]


@pytest.mark.parametrize(
    "other",
    [
        None,
        "text",
        {"role": "user"},
        {"role": "user", "content": "text"},
        {"role": "user", "content": [{"type": "text", "text": "a list"}]},
        {"role": "user", "content": (), "name": "more"},
        {"role": "stranger", "content": ()},
        {"role": np.array(["user", "tool"]), "content": ()},
        {"role": "user", "content": ({"type": np.array(["text", "a"]), "text": "a"},)},
        {"role": "user", "content": ("text",)},
        {"role": "user", "content": ({"type": "text", "image": PIXELS},)},
        {"role": "user", "content": ({"type": "image", "text": "a"},)},
        {"role": "user", "content": ({"type": "text", "text": 3},)},
        message("user", PIXELS.astype(np.float32)),  # type: ignore[arg-type]  # what is tested
        message("user", PIXELS[..., :2]),
        message("user", PIXELS[:0]),
        message("user", PIXELS[0]),
    ],
)
def test_what_is_no_message_is_not_contained(other: object) -> None:
    assert not Message().contains(other)


def test_a_message_space_limits_text_images_and_roles() -> None:
    assert message("user", "ab", "c") in Message(max_length=3)
    assert message("user", "ab", "cd") not in Message(max_length=3)
    assert message("user", PIXELS) not in Message(images=False)
    assert message("critic") in Message(roles=("critic",))
    with pytest.raises(ConfigError, match="got -1"):
        Message(max_length=-1)
    with pytest.raises(ConfigError, match="roles must be"):
        Message(roles=())
    with pytest.raises(ConfigError, match="roles must be"):
        Message(roles="user")


def json_round_trip(space: Message, elements: list[ChatMessage]) -> list[ChatMessage]:
    return space.from_jsonable(json.loads(json.dumps(space.to_jsonable(elements))))


def test_sampled_messages_follow_the_seed_and_survive_json_pickle_and_copy() -> None:
    first, second = Message(seed=3), Message(seed=3)
    samples = [first.sample() for _ in range(100)]
    assert data_equivalence(samples, [second.sample() for _ in range(100)])
    assert all(sample in first for sample in samples)
    kinds = {part["type"] for sample in samples for part in sample["content"]}
    assert kinds == {"text", "image"}
    revived = json_round_trip(first, samples)
    assert data_equivalence(samples, revived)
    images = [p["image"] for s in revived for p in s["content"] if p["type"] == "image"]
    assert all(image.flags.writeable for image in images)
    assert all(sample in first for sample in revived)
    assert data_equivalence(samples, pickle.loads(pickle.dumps(samples)))
    assert data_equivalence(copy.deepcopy(first).sample(), first.sample())
    assert all(len(text_of(Message(max_length=2, seed=i).sample())) <= 4 for i in range(50))


def test_messages_in_broken_json_are_named() -> None:
    for broken in (
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "sound"}]}],
        [{"role": "user", "content": [{"type": "image", "shape": [9, 9, 3], "zlib": "AAAA"}]}],
        [{"role": "user", "content": [{"type": "image", "shape": [9, 9, 3], "zlib": "?"}]}],
    ):
        with pytest.raises(ConfigError, match="not messages"):
            Message().from_jsonable(broken)


def test_message_spaces_are_equal_by_what_they_hold_and_pickle_small() -> None:
    assert Message(seed=1) == Message(seed=2)
    assert Message() != Message(images=False)
    assert Message() != Message(max_length=3)
    assert Message() != Message(roles=("user",))
    assert Message() != Unicode()
    assert pickle.loads(pickle.dumps(Message(max_length=3))) == Message(max_length=3)
    assert len(pickle.dumps(Message())) < 500
    with pytest.raises(ConfigError, match="mask"):
        Message().sample(mask=3)  # type: ignore[arg-type]  # what is tested


def test_batches_are_tuples_of_messages() -> None:
    space = Message(seed=4)
    batched = batch_space(space, 3)
    assert isinstance(batched, spaces.Tuple)
    sample = batched.sample()
    assert sample in batched
    assert list(iterate(batched, sample)) == list(sample)
    assert concatenate(space, sample, create_empty_array(space, 3)) == tuple(sample)
    one = Message(seed=1)
    batch_differing_spaces([one, one]).seed(2)
    assert data_equivalence(one.sample(), Message(seed=1).sample()), "the batch has copies"
    different = batch_differing_spaces([Message(), Message(images=False)])
    assert (message("user", PIXELS), message("user", "a")) in different
    assert (message("user", "a"), message("user", PIXELS)) not in different
    assert space_utils.flatten_space(space) == space
    assert space_utils.unflatten(space, space_utils.flatten(space, sample[0])) is sample[0]


def test_text_of_a_message_is_its_text_parts() -> None:
    assert text_of("a") == "a"
    assert text_of(message("user", "a", PIXELS, "b")) == "a\nb"


class Camera(gymnasium.Env[ChatMessage, ChatMessage]):
    """Shows what it was sent last, and a picture."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = Message(), Message()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ChatMessage, dict[str, Any]]:
        super().reset(seed=seed)
        return self.picture("Start."), {}

    def step(self, action: ChatMessage) -> tuple[ChatMessage, float, bool, bool, dict[str, Any]]:
        return self.picture(text_of(action)), 0.0, False, False, {}

    def picture(self, text: str) -> ChatMessage:
        size = int(self.np_random.integers(1, 5))
        return message(
            "user", text, self.np_random.integers(256, size=(size, 2, 3), dtype=np.uint8)
        )


def test_messages_pass_gymnasiums_check_env() -> None:
    gymnasium.register("gymllm-test/Camera-v0", Camera)
    try:
        check_env(gymnasium.make("gymllm-test/Camera-v0").unwrapped)
    finally:
        del gymnasium.registry["gymllm-test/Camera-v0"]


def spawned(makers: list[type[Camera]]) -> AnyVectorEnv:
    return AsyncVectorEnv(makers, shared_memory=False, context="spawn")


@pytest.mark.parametrize("make_envs", [SyncVectorEnv, spawned], ids=["sync", "async"])
def test_messages_work_in_gymnasiums_vector_envs(make_envs: Callable[..., AnyVectorEnv]) -> None:
    envs = make_envs([Camera] * 2)
    observations, _ = envs.reset(seed=1)
    assert observations in envs.observation_space
    observations, *_ = envs.step((message("user", "a"), message("user", "b")))
    assert [text_of(observation) for observation in observations] == ["a", "b"]
    assert observations in envs.observation_space
    envs.close()


def test_gymnasium_has_a_zero_of_texts_and_messages() -> None:
    from gymnasium.wrappers import DelayObservation
    from gymnasium.wrappers.utils import create_zero_array

    for space in (Unicode(), Message()):
        assert space.contains(create_zero_array(space))  # type: ignore[arg-type]
    env = DelayObservation(gymnasium.make("gymllm/FrozenLake-v0"), delay=1)
    assert env.reset(seed=0)[0] == ""
