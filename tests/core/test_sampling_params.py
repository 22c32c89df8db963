"""How a request is sampled: what no engine could do is refused before one sees it."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from gymllm.engine import SamplingParams
from gymllm.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1, got 0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be an integer, got 1.5"),
        ({"max_new_tokens": math.nan}, "max_new_tokens must be an integer, got nan"),
        ({"max_new_tokens": "5"}, "max_new_tokens must be an integer, got '5'"),
        ({"seed": None}, "seed must be an integer, got None"),
        ({"top_k": 1.5}, "top_k must be an integer, got 1.5"),
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"temperature": 10**400}, "temperature must be a number, got 1000"),
        ({"temperature": math.nan}, "temperature must be >= 0 and finite, got nan"),
        ({"min_p": math.nan}, "min_p must be in [0, 1], got nan"),
        ({"presence_penalty": -(10**400)}, "presence_penalty must be a number, got -1000"),
        ({"logit_bias": {1: -(10**400)}}, "logit_bias must be a mapping from integers to numbers"),
        ({"logit_bias": {"1": 1.0}}, "logit_bias must be a mapping from integers to numbers"),
        ({"logit_bias": None}, "logit_bias must be a mapping from integers to numbers, got None"),
        ({"logit_bias": {1: math.nan}}, "logit_bias must be numbers below infinity, got 1: nan"),
        ({"stop": "ab"}, "stop must be a tuple of texts, got 'ab'"),
        ({"stop": ("a", 1)}, "stop must be a tuple of texts, got ('a', 1)"),
        ({"stop_token_ids": (1.5,)}, "stop_token_ids must be a tuple of integers, got (1.5,)"),
        ({"regex": 5}, "regex must be a text or None, got 5"),
        ({"choices": "ab"}, "choices must be a tuple of texts, got 'ab'"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        SamplingParams(**({"max_new_tokens": 1} | changes))  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    given = SamplingParams(
        max_new_tokens=np.int64(3),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        logit_bias={np.int32(1): np.float32(-np.inf)},  # type: ignore[dict-item]
        stop_token_ids=(np.int64(2),),  # type: ignore[arg-type]
    )
    assert (given.max_new_tokens, given.temperature, given.stop_token_ids) == (3, 0.5, (2,))
    assert given.logit_bias == {1: -np.inf}
