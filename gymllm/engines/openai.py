"""A server that speaks OpenAI's chat-completions protocol, to play and evaluate with.

Form of requests and answers: platform.openai.com/docs/api-reference/chat. vLLM, SGLang, llama.cpp,
Ollama and most hosts serve the same.
"""

from __future__ import annotations

import base64
import io
import json
import os
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast, final

import anyio

from gymllm.chat_engine import ChatReply, ChatRequest
from gymllm.engine import FinishReason, GenerateRequest, SamplingParams
from gymllm.errors import (
    ClosedError,
    ConfigError,
    ContextLengthError,
    EngineError,
    EngineTimeoutError,
    MissingExtraError,
)
from gymllm.message import Message, ToolCall
from gymllm.spaces import Image

if TYPE_CHECKING:
    import httpx

OPENAI_URL = "https://api.openai.com/v1"
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
"""Before the first retry, doubled at each, and at most; a server's Retry-After counts instead."""
MOST_BYTES = 64 << 20
"""A longer answer is refused, as nobody means one."""
MOST_LEVELS = 64
"""Of objects and lists in a call's arguments; few tools and no encoder like what is deeper."""
_HONOURED = (
    "max_new_tokens",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "seed",
)

_AGAIN = frozenset({408, 409, 429, 500, 502, 503, 504, 529})


@final
class OpenAIEngine:
    """Asks a chat-completions server. Use as `async with`, or call `aclose`.

    It is an `Engine` in name only: it has no tokens, so `generate` refuses, and with it training.
    """

    def __init__(
        self,
        model: str,
        *,
        url: str = OPENAI_URL,
        api_key: str | None = None,
        context_length: int = 1_000_000,
        timeout_s: float = 600.0,
        max_concurrent: int = 256,
        retries: int = 4,
        options: Mapping[str, object] | None = None,
    ) -> None:
        """Connects at the first request.

        Args:
            model: The server's name of the model.
            url: Of the server, up to what is before "/chat/completions".
            api_key: Default: the environment variable OPENAI_API_KEY; a server of your own needs none.
            context_length: Of the model, in tokens; the server is the one who knows.
            timeout_s: Longest that one request may take, its answer's last byte included, retries not
                counted.
            max_concurrent: Requests at once, at most; others wait.
            retries: Further tries of a request that met a lost connection, 429 or a server's error.
            options: Further keys of each request ("reasoning_effort", "top_p").

        Raises:
            ConfigError: A setting can't be used.
            MissingExtraError: httpx is not installed.
        """
        try:
            import httpx
        except ImportError as error:
            raise MissingExtraError(
                'The OpenAI engine needs httpx: pip install "gymllm[openai]"'
            ) from error
        if not model:
            raise ConfigError("model must name a model of the server, got an empty text.")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url must start with http:// or https://, got {url!r}.")
        for name, value, least in (
            ("context_length", context_length, 1),
            ("max_concurrent", max_concurrent, 1),
            ("retries", retries, 0),
        ):
            if value < least:
                raise ConfigError(f"{name} must be >= {least}, got {value}.")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s must be > 0, got {timeout_s}.")
        self.model, self.context_length, self.version = model, context_length, 0
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._retries, self._options, self._timeout_s = retries, dict(options or {}), timeout_s
        self._slots = anyio.Semaphore(max_concurrent)
        key = os.environ.get("OPENAI_API_KEY", "") if api_key is None else api_key
        self._httpx = httpx
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout_s, pool=None),
            limits=httpx.Limits(max_connections=max_concurrent),
        )
        self._closed = False
        self._jitter = random.Random(0)

    async def chat(self, request: ChatRequest) -> ChatReply:
        """Answers a conversation; see `gymllm.chat_engine.ChatEngine`.

        Raises:
            ConfigError: Stop token ids were given, or something else that every chat server doesn't take.
            ContextLengthError: The server says so.
            EngineError: The server refused, broke or could not be reached, after all retries.
            MissingExtraError: A message holds an image and Pillow is not installed.
            ClosedError: The engine was closed before.
        """
        if self._closed:
            raise ClosedError("the OpenAI engine was used after aclose(); make a new one.")
        sampling = request.sampling
        if sampling.stop_token_ids:
            raise ConfigError(
                "a chat engine has no token ids to stop at, got stop_token_ids "
                f"{sampling.stop_token_ids}; leave them out."
            )
        sampling.require_only("a chat server", _HONOURED)
        body: dict[str, object] = {
            "model": self.model,
            "messages": [_as_openai(message) for message in request.messages],
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            **_options_of(sampling),
            **self._options,
        }
        if request.tools:
            body["tools"] = list(request.tools)
        async with self._slots:
            answer = await self._post(body, request.request_id)
        return _read(answer, request.request_id)

    async def generate(self, request: GenerateRequest) -> NoReturn:
        """Refuses: a chat server takes and gives no token ids.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "the OpenAI engine gives no exact tokens, so nothing can be trained on what it says; use it "
            "to evaluate, and the embedded, SGLang or vLLM engine to train."
        )

    async def aclose(self) -> None:
        """Closes the connections. Idempotent."""
        self._closed = True
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *problem: object) -> None:
        await self.aclose()

    async def _post(self, body: Mapping[str, object], name: str) -> dict[str, Any]:
        """The answer's JSON, after as many tries as it takes."""
        # Text that no UTF-8 can hold (half a character from an environment) is sent as "?".
        content = json.dumps(body, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
        wait_s, problem = FIRST_WAIT_S, ""
        timed_out = False
        for attempt in range(self._retries + 1):
            if attempt:
                # Those that failed at the same moment don't come back at the same moment.
                await anyio.sleep(wait_s * self._jitter.uniform(0.5, 1))
            wait_s = min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S)
            try:
                with anyio.fail_after(self._timeout_s):  # httpx's limit is one between two bytes
                    response = await self._response(content, name)
            except (self._httpx.RequestError, TimeoutError) as error:
                timed_out = isinstance(error, (self._httpx.TimeoutException, TimeoutError))
                problem = f"{type(error).__name__} {error}".strip()
                if isinstance(error, self._httpx.ConnectError):
                    problem += ". Is a server running at that address?"
                continue
            if response.is_success:
                return _json_object(response, self._url, name)
            problem = f"HTTP {response.status_code}: {_problem_in(response)}"
            if _is_context_length(response):
                raise ContextLengthError(f"{self._url}: {problem} (request {name!r}).")
            timed_out = False
            if response.status_code not in _AGAIN:
                break
            wait_s = _retry_after(response) or wait_s
        kind = EngineTimeoutError if timed_out else EngineError
        raise kind(
            f"{self._url} did not answer request {name!r} of model {self.model!r}: {problem}"
        )

    async def _response(self, content: bytes, name: str) -> httpx.Response:
        """One try's answer, all of it."""
        headers = {"Content-Type": "application/json"}
        async with self._client.stream(
            "POST", self._url, content=content, headers=headers
        ) as response:
            data = bytearray()
            async for piece in response.aiter_bytes():
                data += piece
                if len(data) > MOST_BYTES:
                    raise EngineError(
                        f"{self._url} answered request {name!r} with more than {MOST_BYTES} bytes."
                    )
        return self._httpx.Response(
            response.status_code,
            # The bytes are decompressed already.
            headers=[(k, v) for k, v in response.headers.items() if k != "content-encoding"],
            content=bytes(data),
        )


def _as_openai(message: Message) -> dict[str, object]:
    """A message as the protocol has it."""
    shown: dict[str, object] = {"role": message.role, "content": message.content}
    if any(not isinstance(part, str) for part in message.parts):
        shown["content"] = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": _data_url(part)}}
            for part in message.parts
        ]
    if message.tool_calls:
        shown["content"] = message.content or None
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        shown["tool_call_id"] = message.tool_call_id
    return shown


def _data_url(image: Image) -> str:
    try:
        from PIL import Image as pillow
    except ImportError as error:
        raise MissingExtraError(
            'Sending an image to a server needs Pillow: pip install "gymllm[render]"'
        ) from error
    file = io.BytesIO()
    pillow.fromarray(image).save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _read(answer: Mapping[str, Any], name: str) -> ChatReply:
    try:
        choice = answer["choices"][0]
        said = choice["message"]
        calls: list[ToolCall] = []
        unreadable: list[tuple[str, str]] = []
        for call in said.get("tool_calls") or ():
            function = call["function"]
            arguments = _arguments_in(function.get("arguments") or "{}")
            if arguments is None:
                unreadable.append((_whole(function["name"]), _whole(function["arguments"])))
            else:
                called = ToolCall(
                    name=_whole(function["name"]),
                    arguments=arguments,
                    id=_whole(call.get("id") or ""),
                )
                calls.append(called)
        told = answer.get("usage")
        usage = cast("dict[str, Any]", told) if isinstance(told, dict) else {}
        reasoning = said.get("reasoning_content") or said.get("reasoning") or ""
        return ChatReply(
            message=Message(
                role="assistant",
                content=_text_of(said.get("content")),
                reasoning=_whole(reasoning),
                tool_calls=tuple(calls),
            ),
            finish_reason=(
                FinishReason.LENGTH
                if choice.get("finish_reason") == "length"
                else FinishReason.STOP
            ),
            unreadable=tuple(unreadable),
            prompt_tokens=_count(usage.get("prompt_tokens")),
            generated_tokens=_count(usage.get("completion_tokens")),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        shown = str(dict(answer))[:200]
        raise EngineError(
            f"the answer to request {name!r} is no chat completion ({error!r}): {shown}"
        ) from error


def _options_of(sampling: SamplingParams) -> dict[str, object]:
    """What the protocol has words for, where it is not the default."""
    options: dict[str, object] = {}
    if sampling.top_p != 1:
        options["top_p"] = sampling.top_p
    if sampling.presence_penalty:
        options["presence_penalty"] = sampling.presence_penalty
    if sampling.frequency_penalty:
        options["frequency_penalty"] = sampling.frequency_penalty
    if sampling.logit_bias:
        options["logit_bias"] = {
            str(token): max(bias, -100.0) for token, bias in sampling.logit_bias.items()
        }
    if sampling.stop:
        options["stop"] = list(sampling.stop)
    return options


def _text_of(content: object) -> str:
    """The text of a message, which some servers give in parts."""
    if isinstance(content, list):
        parts = cast("list[Mapping[str, Any]]", content)
        return "".join(_whole(part.get("text") or "") for part in parts)
    return "" if content is None else _whole(content)


def _whole(value: object) -> str:
    """A text without halves of characters, which JSON can spell and nothing can encode."""
    return str(value).encode("utf-8", "replace").decode()


def _count(value: object) -> int:
    """A number of tokens; 0 for what is none."""
    return value if isinstance(value, int) and value > 0 else 0


def _arguments_in(text: object) -> dict[str, object] | None:
    """The arguments of a call; None if they are no JSON object that could be sent back."""
    arguments = _object_in(text)
    level: list[object] = [arguments]
    for _ in range(MOST_LEVELS):
        level = [inner for held in level for inner in _inner(held)]
    if level:
        return None
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return arguments


def _inner(value: object) -> list[object]:
    """What is in an object or a list."""
    if isinstance(value, dict):
        return list(cast("dict[str, object]", value).values())
    return cast("list[object]", value) if isinstance(value, list) else []


def _object_in(text: object) -> dict[str, object] | None:
    """The JSON object that arguments are; None if they are none."""
    try:
        value: object = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, object]", value) if isinstance(value, dict) else None


def _json_object(response: httpx.Response, url: str, name: str) -> dict[str, Any]:
    value = _object_in(response.text)
    if value is None:
        raise EngineError(
            f"{url} answered request {name!r} with something that is no JSON object: "
            f"{response.text[:200]!r}"
        )
    return value


def _problem_in(response: httpx.Response) -> str:
    """What the server says is wrong."""
    error: object = (_object_in(response.text) or {}).get("error")
    if isinstance(error, Mapping):
        error = cast("Mapping[str, object]", error).get("message")
    return str(error or response.text)[:500]


def _is_context_length(response: httpx.Response) -> bool:
    """Whether the conversation is too long; servers say so in words of their own."""
    if response.status_code not in (400, 413, 422):
        return False
    text = response.text.lower()
    words: Sequence[str] = ("context_length", "context length", "maximum context", "context window")
    return any(word in text for word in words)


def _retry_after(response: httpx.Response) -> float:
    try:
        return min(max(float(response.headers.get("retry-after", 0)), 0.0), LONGEST_WAIT_S)
    except ValueError:  # a date; our own wait will do
        return 0.0
