"""The scripted engine honours every field of a request that a function can."""

from __future__ import annotations

import numpy as np
import pytest

from gymllm.engine import FinishReason, GenerateRequest, SamplingParams
from gymllm.engines import ScriptedEngine
from gymllm.errors import ContextLengthError, EngineError

STOP, OTHER_STOP = 0, 1


class Letters:
    """A codec of one id a character; "$" is the stop token, "%" another."""

    stop_token_ids = (STOP, OTHER_STOP)

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        ids = [
            {"$": STOP, "%": OTHER_STOP}.get(c, ord(c)) if allow_special else ord(c) for c in text
        ]
        return ids

    def decode(self, ids, *, skip_special: bool) -> str:
        shown = ["$%"[i] if i in (STOP, OTHER_STOP) else chr(i) for i in ids]
        return "".join(c for c in shown if not (skip_special and c in "$%"))


def request(
    text: str, *, max_new_tokens: int = 50, stops=(STOP,), seed: int = 0
) -> GenerateRequest:
    return GenerateRequest(
        prompt_ids=Letters().encode(text, allow_special=True),
        sampling=SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=stops, seed=seed),
    )


def engine(reply, **settings) -> ScriptedEngine:
    return ScriptedEngine(reply, Letters(), **settings)


async def text_of(engine: ScriptedEngine, asked: GenerateRequest) -> str:
    return Letters().decode((await engine.generate(asked)).token_ids, skip_special=False)


@pytest.mark.asyncio
async def test_the_function_sees_the_prompt_and_its_answer_is_stopped():
    generation = await engine(lambda prompt, rng: prompt.upper()).generate(request("ab$c"))
    assert generation.token_ids.tolist() == [ord("A"), ord("B"), STOP]  # at its first stop token
    assert generation.finish_reason is FinishReason.STOP
    assert generation.logprobs.tolist() == [0, 0, 0]
    assert generation.versions.tolist() == [0, 0, 0]


@pytest.mark.asyncio
async def test_a_stop_token_is_added_where_there_is_none():
    assert await text_of(engine(lambda prompt, rng: ""), request("a")) == "$"
    assert await text_of(engine(lambda prompt, rng: "x"), request("a", stops=(OTHER_STOP,))) == "x%"
    assert await text_of(engine(lambda prompt, rng: "x"), request("a", stops=())) == "x$"


@pytest.mark.asyncio
@pytest.mark.parametrize(("limit", "reason"), [(3, "stop"), (2, "length"), (1, "length")])
async def test_max_new_tokens_is_honoured(limit, reason):
    generation = await engine(lambda prompt, rng: "xy").generate(request("a", max_new_tokens=limit))
    assert len(generation.token_ids) == limit
    assert generation.finish_reason == reason


@pytest.mark.asyncio
async def test_the_context_is_honoured():
    small = engine(lambda prompt, rng: "xyz", context_length=4)
    generation = await small.generate(request("ab"))
    assert (len(generation.token_ids), generation.finish_reason) == (2, FinishReason.LENGTH)
    with pytest.raises(ContextLengthError, match="4 tokens, which fills the engine's context of 4"):
        await small.generate(request("abcd"))


@pytest.mark.asyncio
async def test_randomness_is_a_function_of_the_requests_seed():
    dice = engine(lambda prompt, rng: str(rng.integers(10**6)))
    first, again, other = [await text_of(dice, request("a", seed=seed)) for seed in (1, 1, 2)]
    assert first == again != other


@pytest.mark.asyncio
async def test_versions_follow_what_is_set():
    scripted = engine(lambda prompt, rng: "x", version=4)
    assert (await scripted.generate(request("a"))).versions.tolist() == [4, 4]
    scripted.version = 5
    assert scripted.version == 5
    assert (await scripted.generate(request("a"))).versions.dtype == np.int32
    assert (await scripted.generate(request("a"))).versions.tolist() == [5, 5]


@pytest.mark.asyncio
async def test_a_function_that_raises_is_an_engine_error():
    def breaks(prompt: str, rng: np.random.Generator) -> str:
        raise KeyError("lost")

    with pytest.raises(EngineError, match="KeyError: 'lost'") as caught:
        await engine(breaks).generate(request("a"))
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.asyncio
async def test_a_closed_engine_refuses():
    scripted = engine(lambda prompt, rng: "x")
    await scripted.aclose()
    await scripted.aclose()
    with pytest.raises(EngineError, match="closed"):
        await scripted.generate(request("a"))
