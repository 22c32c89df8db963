"""Parts of answers that both of OpenAI's routes have."""

from __future__ import annotations

from collections.abc import Sequence

from gymllm_trainers.serve.answer import Answer
from gymllm_trainers.serve.service import Service


def usage_of(answers: Sequence[Answer]) -> dict[str, object]:
    """Tokens of prompts, counted once however many answers each has, and of answers."""
    prompts = {id(answer.prompt_ids): answer for answer in reversed(answers)}.values()
    prompt = sum(len(answer.prompt_ids) for answer in prompts)
    generated = sum(len(answer.token_ids) for answer in answers)
    cached = sum(answer.reused_tokens for answer in prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def chat_logprobs(service: Service, answer: Answer, start: int, top: int) -> dict[str, object]:
    """`logprobs` of a chat choice, of the tokens from `start` on."""

    def shown(token: int, logprob: float) -> dict[str, object]:
        text = service.token_text(token)
        whole = "\ufffd" not in text  # a token may be part of a character
        return {
            "token": text,
            "logprob": logprob,
            "bytes": list(text.encode()) if whole else None,
        }

    content: list[dict[str, object]] = []
    for place in range(start, len(answer.token_ids)):
        others = answer.top_logprobs[place] if top else {}
        ranked = sorted(others.items(), key=lambda pair: -pair[1])[:top]
        content.append(
            {
                **shown(answer.token_ids[place], answer.base_logprobs[place]),
                "top_logprobs": [shown(token, logprob) for token, logprob in ranked],
            }
        )
    return {"content": content, "refusal": None}


def completion_logprobs(
    service: Service, answer: Answer, start: int, top: int, offset: int
) -> dict[str, object]:
    """`logprobs` of a completion's choice, of the tokens from `start` on.

    Args:
        service: Knows the texts of tokens.
        answer: The tokens.
        start: The first of them.
        top: Likeliest tokens to name; the sampled one is always among them.
        offset: Characters of text before the first.
    """
    tokens = [service.token_text(token) for token in answer.token_ids[start:]]
    offsets = [offset]
    for text in tokens:
        offsets.append(offsets[-1] + len(text))
    tops: list[dict[str, float]] = []
    for place in range(start, len(answer.token_ids)):
        others = answer.top_logprobs[place] if top else {}
        ranked = sorted(others.items(), key=lambda pair: -pair[1])[:top]
        sampled = (answer.token_ids[place], answer.base_logprobs[place])
        tops.append({service.token_text(token): p for token, p in (*ranked, sampled)})
    return {
        "tokens": tokens,
        "token_logprobs": answer.base_logprobs[start:],
        "top_logprobs": tops,
        "text_offset": offsets[:-1],
    }


def stop_reason(answer: Answer, end_ids: Sequence[int]) -> int | str | None:
    """vLLM's `stop_reason`: the stop string, or the stop token unless it is the model's own."""
    return None if answer.matched in end_ids else answer.matched
