"""SGLang's POST /generate."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast, final

from starlette.responses import JSONResponse, Response

from gymllm.engine import GenerateRequest, SamplingParams
from gymllm_trainers.engine import Delta
from gymllm_trainers.serve.answer import Answer
from gymllm_trainers.serve.connection import Body, Emit, EventStream
from gymllm_trainers.serve.fields import Unsupported, as_list, read_fields
from gymllm_trainers.serve.problems import RefusedError
from gymllm_trainers.serve.requests import biases, check_count, schema_text, seed_or_any, stop_ids
from gymllm_trainers.serve.service import Service, sequences
from gymllm_trainers.serve.visible_text import VisibleText, whole_text

_READS_TEXT = (None, "this server's models read text")
_UNSUPPORTED: Unsupported = {
    "image_data": _READS_TEXT,
    "audio_data": _READS_TEXT,
    "video_data": _READS_TEXT,
    "modalities": _READS_TEXT,
    "input_embeds": (None, "send input_ids"),
    "lora_path": (None, "the server has one set of weights"),
    "token_ids_logprob": (None, "use top_logprobs_num"),
    "return_hidden_states": (False, ""),
    "session_params": (None, "send the whole prompt; what was computed is found again"),
    "custom_logit_processor": (None, "use logit_bias"),
    "priority": (None, "requests are served in their order"),
}
_SAMPLING_UNSUPPORTED: Unsupported = {
    "min_new_tokens": (0, "use logit_bias against the stop token"),
    "stop_regex": (None, "use stop"),
    "ebnf": (None, "use regex or json_schema"),
    "structural_tag": (None, "use regex or json_schema"),
    "spaces_between_special_tokens": (True, ""),
    "custom_params": (None, ""),
}
_HARMLESS = frozenset(
    {"log_metrics", "background", "bootstrap_host", "bootstrap_port", "bootstrap_room"}
)
_SAMPLING_HARMLESS = frozenset({"stream_interval"})


@dataclass(frozen=True, kw_only=True)
class SamplingBody:
    """`sampling_params`."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1
    regex: str | None = None
    json_schema: object = None
    sampling_seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class GenerateBody:
    """What the route takes."""

    text: object = None
    input_ids: object = None
    sampling_params: object = None
    rid: str | tuple[str, ...] | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    stream: bool = False


@final
class Generate:
    """Answers token ids with token ids."""

    def __init__(self, service: Service) -> None:
        """Takes the model."""
        self._service = service

    async def __call__(self, given: Body) -> Response:
        """The answer to one request."""
        service = self._service
        body = read_fields(GenerateBody, given, harmless=_HARMLESS, unsupported=_UNSUPPORTED)
        prompts, batched = await self._prompts(body)
        wishes = _wishes(body.sampling_params, len(prompts))
        names = _names(body.rid, len(prompts), batched)
        outputs: list[_Output] = []
        for prompt, wish, name in zip(prompts, wishes, names, strict=True):
            sampling = self._sampling(wish, body)
            _check_logprobs(body, sampling, prompt)
            outputs += [
                _Output(service, body, wish, request, prompt, index)
                for index, request in enumerate(
                    sequences([prompt], sampling, wish.n, name), len(outputs)
                )
            ]
        single = not batched and len(outputs) == 1
        if body.stream:
            return EventStream(lambda emit: self._stream(outputs, single, emit))

        async def take(sequence: int, delta: Delta | None) -> None:
            outputs[sequence].take(delta)

        await service.running.run([output.request for output in outputs], take)
        shown = [output.shown() for output in outputs]
        return JSONResponse(shown[0] if single else shown)

    async def _stream(self, outputs: list[_Output], single: bool, emit: Emit) -> None:
        async def give(sequence: int, delta: Delta | None) -> None:
            output = outputs[sequence]
            output.take(delta)
            await emit(output.shown() | ({} if single else {"index": sequence}))

        await self._service.running.run([output.request for output in outputs], give)
        await emit("[DONE]")

    async def _prompts(self, body: GenerateBody) -> tuple[list[list[int]], bool]:
        """The prompts, and whether they were given as a batch."""
        service = self._service
        if (body.text is None) == (body.input_ids is None):
            raise RefusedError(400, "exactly one of text and input_ids must be given.")
        if body.input_ids is not None:
            given = cast("list[object]", body.input_ids)
            batched = isinstance(given, list) and bool(given) and isinstance(given[0], list)
            held = given if batched else [given]
            self._check_batch(len(held))
            return [service.check_prompt(ids, "input_ids") for ids in held], batched
        batched = not isinstance(body.text, str)
        texts = cast("list[object]", body.text) if batched else [body.text]
        if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
            raise RefusedError(400, "text must be a text or a list of texts.", param="text")
        self._check_batch(len(texts))
        return [
            service.check_prompt(await service.encode(cast("str", text)), "text") for text in texts
        ], batched

    def _check_batch(self, count: int) -> None:
        """Refuses what would be refused in the end, before it is worked on."""
        most = self._service.running.most
        if count > most:
            raise RefusedError(
                400, f"at most {most} sequences may be asked for at once, got {count}."
            )

    def _sampling(self, wish: SamplingBody, body: GenerateBody) -> SamplingParams:
        check_count(wish.n)
        schema = wish.json_schema
        return SamplingParams(
            max_new_tokens=wish.max_new_tokens,
            temperature=wish.temperature,
            top_k=0 if wish.top_k == -1 else wish.top_k,
            top_p=wish.top_p,
            min_p=wish.min_p,
            repetition_penalty=wish.repetition_penalty,
            presence_penalty=wish.presence_penalty,
            frequency_penalty=wish.frequency_penalty,
            logit_bias=biases(wish.logit_bias, self._service.vocabulary),
            stop_token_ids=stop_ids(
                wish.stop_token_ids,
                self._service.tokenizer.stop_token_ids,
                ignore_eos=wish.ignore_eos,
            ),
            stop=as_list(wish.stop),
            regex=wish.regex,
            json_schema=None if schema is None else schema_text(schema, "json_schema"),
            top_logprobs=body.top_logprobs_num,
            seed=seed_or_any(wish.sampling_seed),
        )


class _Output:
    """One output on its way to the client."""

    def __init__(
        self,
        service: Service,
        body: GenerateBody,
        wish: SamplingBody,
        request: GenerateRequest,
        prompt: Sequence[int],
        index: int,
    ) -> None:
        self.request = request
        self._service, self._body, self._prompt = service, body, prompt
        self._answer = Answer(request=request, prompt_ids=prompt, index=index)
        self._started_s = time.perf_counter()
        stops = () if wish.no_stop_trim else as_list(wish.stop)
        self._cut, self._skip = stops, wish.skip_special_tokens
        self._visible = VisibleText(service.tokenizer, stops=stops, skip_special=self._skip)
        self._text = ""

    def take(self, delta: Delta | None) -> None:
        answer, before = self._answer, len(self._answer.token_ids)
        answer.take(delta)
        if self._body.stream:
            self._text += self._visible.push(answer.shown_ids[before:])
            if answer.finish:
                self._text += self._visible.end(answer.matched)
        elif answer.finish:
            self._text = whole_text(
                self._service.tokenizer,
                answer.shown_ids,
                matched=answer.matched,
                stops=self._cut,
                skip_special=self._skip,
            )

    def shown(self) -> dict[str, object]:
        """All that there is so far."""
        answer, service = self._answer, self._service
        versions = [service.version_name(version) for version, _, _ in answer.spans()]
        meta: dict[str, object] = {
            "id": self.request.request_id,
            "finish_reason": self._finish_reason(),
            "prompt_tokens": len(self._prompt),
            "completion_tokens": len(answer.token_ids),
            "cached_tokens": answer.reused_tokens,
            "weight_version": (
                versions[-1] if versions else service.version_name(service.engine.version)
            ),
            "weight_versions": [
                {"version": name, "start": start, "end": end}
                for name, (_, start, end) in zip(versions, answer.spans(), strict=True)
            ],
            "e2e_latency": time.perf_counter() - self._started_s,
        }
        if self._body.return_logprob:
            meta |= self._logprobs()
        return {"text": self._text, "output_ids": answer.token_ids, "meta_info": meta}

    def _finish_reason(self) -> dict[str, object] | None:
        answer = self._answer
        if answer.finish is None:
            return None
        if answer.finish == "length":
            return {"type": "length", "length": len(answer.token_ids)}
        if answer.finish == "abort":
            return {"type": "abort", "message": "aborted by a client's request"}
        return {"type": "stop", "matched": answer.matched}

    def _logprobs(self) -> dict[str, object]:
        answer = self._answer
        start = self._body.logprob_start_len
        start = len(self._prompt) - 1 if start == -1 else start
        shown: dict[str, object] = {
            "input_token_logprobs": [self._entry(None, i) for i in self._prompt[start:]],
            "output_token_logprobs": [
                self._entry(p, i) for p, i in zip(answer.logprobs, answer.token_ids, strict=True)
            ],
        }
        top = self._body.top_logprobs_num
        if top:
            shown["output_top_logprobs"] = [
                [
                    self._entry(p, i)
                    for i, p in sorted(each.items(), key=lambda pair: -pair[1])[:top]
                ]
                for each in answer.top_logprobs
            ]
        return shown

    def _entry(self, logprob: float | None, token: int) -> list[object]:
        texts = self._body.return_text_in_logprobs
        return [logprob, token, self._service.token_text(token) if texts else None]


def _wishes(given: object, count: int) -> list[SamplingBody]:
    """How each prompt is sampled: one for all, or one each."""
    held = cast("list[object]", given) if isinstance(given, list) else [given or {}] * count
    if len(held) != count or not all(isinstance(each, dict) for each in held):
        raise RefusedError(
            400,
            f"sampling_params must be an object, or a list of {count} of them, one a prompt.",
            param="sampling_params",
        )
    return [
        read_fields(
            SamplingBody,
            cast("Mapping[str, object]", each),
            where="sampling_params.",
            harmless=_SAMPLING_HARMLESS,
            unsupported=_SAMPLING_UNSUPPORTED,
        )
        for each in held
    ]


def _names(rid: str | tuple[str, ...] | None, count: int, batched: bool) -> list[str]:
    """What each prompt's sequences are called."""
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    names = list(as_list(rid))
    if (
        not all(names)
        or len(names) != count
        or (batched and isinstance(rid, str))
        or len(set(names)) < count
    ):
        raise RefusedError(
            400,
            f"rid must be a name, or a list of {count} different ones, one a prompt.",
            param="rid",
        )
    return names


def _check_logprobs(body: GenerateBody, sampling: SamplingParams, prompt: Sequence[int]) -> None:
    """Refuses log-probabilities that there are none of."""
    start = body.logprob_start_len
    if body.return_logprob and -1 != start < len(prompt) - 1:
        raise RefusedError(
            400,
            "prompts get no log-probabilities here: logprob_start_len must be -1 or at least "
            f"{len(prompt) - 1}, the prompt's length less one, got {start}.",
            param="logprob_start_len",
        )
    if body.top_logprobs_num and not body.return_logprob:
        raise RefusedError(
            400, "top_logprobs_num needs return_logprob to be true.", param="top_logprobs_num"
        )
    if body.top_logprobs_num and sampling.temperature not in (0, 1):
        raise RefusedError(
            400,
            "the likeliest tokens are known at temperature 1 alone: leave top_logprobs_num out, or set "
            f"temperature to 1 or 0, got {sampling.temperature}.",
            param="top_logprobs_num",
        )
