"""OpenAI's routes, asked by OpenAI's own client and by ours; what comes is what the engine generates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from gymllm.chat_engine import ChatRequest
from gymllm.engine import GenerateRequest, Generation, SamplingParams
from gymllm.engines import OpenAIEngine
from gymllm.errors import ContextLengthError
from gymllm.message import Message
from gymllm_agents import ChatFormat, Tokenizer
from gymllm_trainers import cli
from gymllm_trainers.engine import JaxEngine

ASK = [{"role": "user", "content": "the answer?"}]


@pytest.fixture(scope="module")
def client(server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def engine_says(
    engine: JaxEngine, prompt: Sequence[int], tokenizer: Tokenizer, **sampling: object
) -> Generation:
    """The engine's own answer."""
    params = SamplingParams(
        **{"max_new_tokens": 8, "stop_token_ids": tokenizer.stop_token_ids, **sampling}  # type: ignore[arg-type]
    )
    return asyncio.run(engine.generate(GenerateRequest(prompt_ids=prompt, sampling=params)))


def test_a_chat_is_rendered_and_answered(
    client: OpenAI, engine: JaxEngine, tokenizer: Tokenizer
) -> None:
    answer = client.chat.completions.create(
        model="test",
        messages=ASK,
        max_completion_tokens=8,
        seed=5,
        temperature=0.7,
        logprobs=True,
        top_logprobs=3,
        extra_body={"return_token_ids": True},
    )
    prompt = ChatFormat(tokenizer).whole_ids([Message(role="user", content="the answer?")])
    own = engine_says(engine, prompt, tokenizer, seed=5, temperature=0.7, top_logprobs=3)
    choice = answer.choices[0]
    ids = own.token_ids.tolist()
    assert choice.token_ids == ids
    assert answer.prompt_token_ids == prompt
    assert choice.message.content == tokenizer.decode(ids, skip_special=True).strip()
    assert choice.finish_reason == own.finish_reason
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(ids)
    told = choice.logprobs.content
    np.testing.assert_allclose([each.logprob for each in told], own.base_logprobs, atol=1e-6)
    for each, top in zip(told, own.top_logprobs, strict=True):
        np.testing.assert_allclose(
            [other.logprob for other in each.top_logprobs], sorted(top.values())[::-1], atol=1e-6
        )


def test_a_stream_adds_up_to_the_whole(client: OpenAI) -> None:
    def ask(**more: object):
        return client.chat.completions.create(
            model="test", messages=ASK, max_tokens=40, seed=3, n=2, logprobs=True, **more
        )

    whole = ask()
    texts, logprobs, finishes = ["", ""], [[], []], [None, None]
    usages = []
    for chunk in ask(stream=True, stream_options={"include_usage": True}):
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
            if choice.logprobs:
                logprobs[choice.index] += [each.logprob for each in choice.logprobs.content]
    assert texts == [choice.message.content for choice in whole.choices]
    assert finishes == [choice.finish_reason for choice in whole.choices]
    assert texts[0] != texts[1], "each has a seed of its own"
    for choice, told in zip(whole.choices, logprobs, strict=True):
        np.testing.assert_allclose(
            told, [each.logprob for each in choice.logprobs.content], atol=1e-5
        )
    assert usages[:-1] == [None] * (len(usages) - 1)
    counts = (usages[-1].prompt_tokens, usages[-1].completion_tokens)
    assert counts == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_without_a_seed_answers_differ(client: OpenAI) -> None:
    texts = {
        client.completions.create(model="test", prompt="a", max_tokens=20).choices[0].text
        for _ in range(3)
    }
    assert len(texts) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_of_every_form_are_gone_on_with(
    client: OpenAI, engine: JaxEngine, tokenizer: Tokenizer, stream: bool
) -> None:
    text = "the user"
    ids = tokenizer.encode(text, allow_special=True)
    other = [7, 8, 9]
    for prompt, prompts in (
        (text, [ids]),
        ([text, "a"], [ids, tokenizer.encode("a", allow_special=True)]),
        (ids, [ids]),
        ([ids, other], [ids, other]),
    ):
        answer = client.completions.create(
            model="test",
            prompt=prompt,
            max_tokens=6,
            seed=9,
            n=2,
            logprobs=0,
            stream=stream,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        got: dict[int, list[int]] = {}
        logprobs: dict[int, list[float]] = {}
        texts: dict[int, str] = {}
        shown: dict[int, list[int]] = {}
        for chunk in answer if stream else [answer]:
            for choice in chunk.choices:
                got.setdefault(choice.index, []).extend(choice.token_ids)
                logprobs.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs)
                texts[choice.index] = texts.get(choice.index, "") + choice.text
                shown.setdefault(choice.index, getattr(choice, "prompt_token_ids", None))
        for index in range(2 * len(prompts)):
            own = engine_says(
                engine,
                prompts[index // 2],
                tokenizer,
                max_new_tokens=6,
                seed=9 + index % 2,
                stop_token_ids=(),
            )
            assert got[index] == own.token_ids.tolist()
            assert shown[index] == prompts[index // 2]
            np.testing.assert_allclose(logprobs[index], own.base_logprobs, atol=1e-5)
            assert texts[index] == tokenizer.decode(got[index], skip_special=True)


@pytest.mark.parametrize("stream", [False, True])
def test_stops_end_the_text_and_are_not_in_it(client: OpenAI, stream: bool) -> None:
    def ask(prompt: str = "a", **more: object):
        return client.completions.create(
            model="test", prompt=prompt, max_tokens=60, seed=1, temperature=0.8, **more
        )

    free = ask(extra_body={"return_token_ids": True, "ignore_eos": True}).choices[0]
    start = next(k for k in range(8, 50) if free.text[k : k + 3].isascii())
    stop = free.text[start : start + 3]
    cut = free.text.partition(stop)[0]

    def gathered(**more: object) -> tuple[str, str, object]:
        answer = ask(stream=stream, **more)
        text, finish, reason = "", "", None
        for chunk in answer if stream else [answer]:
            text += chunk.choices[0].text
            finish = chunk.choices[0].finish_reason or finish
            reason = chunk.choices[0].stop_reason or reason
        return text, finish, reason

    assert gathered(stop=["@#@", stop], extra_body={"ignore_eos": True}) == (cut, "stop", stop)
    kept, *_ = gathered(
        stop=stop, extra_body={"ignore_eos": True, "include_stop_str_in_output": True}
    )
    assert kept.startswith(cut + stop)
    token = free.token_ids[5]
    _, finish, reason = gathered(extra_body={"ignore_eos": True, "stop_token_ids": [token]})
    assert (finish, reason) == ("stop", token)


def test_what_shapes_sampling_reaches_the_engine(
    client: OpenAI, engine: JaxEngine, tokenizer: Tokenizer
) -> None:
    token = tokenizer.encode("z", allow_special=False)[0]
    forced = client.completions.create(
        model="test", prompt=[5, 6], max_tokens=4, logit_bias={str(token): 100}
    )
    assert forced.choices[0].text == "zzzz"
    shaped = {
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    }
    answer = client.completions.create(
        model="test",
        prompt=[5, 6],
        max_tokens=8,
        seed=4,
        extra_body={**shaped, "return_token_ids": True},
    )
    own = engine_says(engine, [5, 6], tokenizer, seed=4, **shaped)
    assert answer.choices[0].token_ids == own.token_ids.tolist()
    plain = engine_says(engine, [5, 6], tokenizer, seed=4)
    assert plain.token_ids.tolist() != own.token_ids.tolist()


def test_text_can_be_held_to_a_form(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}
    for stream in (False, True):
        answer = client.chat.completions.create(
            model="test", messages=ASK, response_format=form, seed=1, stream=stream
        )
        if stream:
            text = "".join(c.choices[0].delta.content or "" for c in answer)
        else:
            text = answer.choices[0].message.content
        assert json.loads(text)["ok"] in (True, False)
    for wish, fits in (
        ({"regex": "[ab]{5}"}, lambda text: len(text) == 5 and set(text) <= set("ab")),
        ({"choice": ["left", "right"]}, lambda text: text in ("left", "right")),
    ):
        answer = client.completions.create(
            model="test", prompt="a", max_tokens=20, extra_body={"structured_outputs": wish}
        )
        assert fits(answer.choices[0].text)
    with pytest.raises(BadRequestError, match="regex"):
        client.completions.create(
            model="test", prompt="a", extra_body={"structured_outputs": {"regex": "("}}
        )


def test_the_model_is_listed_and_no_other_is_served(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["test"]
    with pytest.raises(NotFoundError, match="only 'test'"):
        client.chat.completions.create(model="other", messages=ASK)


# ---------------------------------------------------------------------- our own client


def test_our_own_client_talks_to_it(server) -> None:
    async def talk() -> None:
        async with OpenAIEngine("test", url=f"{server.url}/v1", api_key="", retries=0) as engine:
            sampling = SamplingParams(max_new_tokens=8, seed=2, stop=("zz",), top_p=0.9)
            messages = [Message(role="user", content="hi")]
            first = await engine.chat(ChatRequest(messages=messages, sampling=sampling))
            again = await engine.chat(ChatRequest(messages=messages, sampling=sampling))
            assert first.message == again.message
            assert first.generated_tokens in range(1, 9)
            long = [Message(role="user", content="x" * 2000)]
            with pytest.raises(ContextLengthError):
                await engine.chat(ChatRequest(messages=long, sampling=sampling))

    asyncio.run(talk())


def test_gymllm_eval_plays_against_it(server, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    words = f"--model openai:test --url {server.url}/v1 --env gymllm/Arithmetic-v0 --episodes 3"
    code = cli.evaluate([*words.split(), "--max-new-tokens", "8", "--out", "out"])
    assert code == 0, capsys.readouterr().err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["episodes"], summary["failed"]) == (3, 0)
