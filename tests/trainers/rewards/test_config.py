"""The section `reward`: what contradicts itself, or would be ignored, is refused."""

from __future__ import annotations

import pytest

from gymllm.errors import ConfigError
from gymllm_trainers.rewards import RewardConfig

JUDGE = {"kind": "judge", "model": "policy", "question": "Was it polite?"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "function", "function": "length"}, "\"module:name\", got 'length'"),
        ({"kind": "function", "function": ":length"}, '"module:name"'),
        ({"kind": "function"}, "\"module:name\", got ''"),
        ({"kind": "model"}, "needs reward.model"),
        ({"kind": "judge", "question": "?"}, "needs reward.model"),
        ({"kind": "judge", "model": "policy"}, "reward.question must say"),
        ({"weight": 2.0}, "reward.weight is 2.0, but reward.kind is environment"),
        ({"combine": "replace"}, "it is for function and judge and model"),
        (
            {"kind": "function", "function": "a:b", "tries": 5},
            "reward.tries is 5, but reward.kind is function; it is for judge",
        ),
        (
            {"kind": "function", "function": "a:b", "rows": 8},
            "reward.rows is 8, but reward.kind is function; it is for model",
        ),
        ({"function": "a:b"}, "reward.kind is environment; it is for function"),
        ({"model": "x"}, "it is for judge and model"),
        ({"kind": "model", "model": "x", "question": "?"}, "it is for judge"),
        ({"kind": "model", "model": "openai:x"}, "is scored here"),
        (JUDGE | {"model": "openai:"}, "behind the colon"),
        (JUDGE | {"model": "openai:x", "answer": "choices"}, "Set it to text"),
        (JUDGE | {"url": "http://localhost"}, "reward.url is for"),
        (JUDGE | {"tries": 0}, "reward.tries must be >= 1, got 0"),
        ({"weight": 0.0}, "other than 0, got 0.0"),
        ({"weight": float("nan")}, "finite number"),
        ({"timeout_s": 0.0}, "reward.timeout_s must be > 0"),
        ({"row_tokens": 1}, "reward.row_tokens must be >= 2"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        RewardConfig(**settings)  # type: ignore[arg-type]  # what is tested
    assert message in str(raised.value)


def test_what_can_be_meant_is_not() -> None:
    RewardConfig()
    RewardConfig(kind="function", function="my.module:f", weight=-1.0, combine="replace")
    RewardConfig(kind="model", model="folder")
    RewardConfig(**JUDGE, answer="grammar")  # type: ignore[arg-type]  # a mapping of settings
    RewardConfig(kind="judge", model="openai:gpt", url="http://localhost:8000/v1", question="?")
