"""Real servers on free ports: one engine that they share, and one whose model is a script."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import anyio
import httpx
import pytest

from gymllm.engine import GenerateRequest, Generation
from gymllm.engines import ScriptedEngine
from gymllm.timeline import Timeline
from gymllm_agents import Tokenizer, train_tokenizer
from gymllm_trainers.engine import EngineConfig, JaxEngine
from gymllm_trainers.models import Decoder
from gymllm_trainers.serve import ServeSettings
from gymllm_trainers.serve.server import listening, serve

CONFIG = EngineConfig(slots=4, context_length=512, small_batch=4, prefill_tokens=(64,), cache_mb=64)
TOOLS_TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}\n{% endfor %}
{{- '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- m.content or '' }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@dataclass(kw_only=True)
class Server:
    """A running server."""

    url: str
    client: httpx.Client
    end: Callable[[], None]

    def post(self, path: str, body: object) -> httpx.Response:
        return self.client.post(path, json=body)

    def ok(self, path: str, body: object) -> dict:
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str, body: object, status: int = 400) -> dict:
        response = self.post(path, body)
        assert response.status_code == status, response.text
        return response.json()["error"]

    def state(self) -> dict:
        return self.client.get("/get_server_info").json()["state"]

    def until(self, condition: Callable[[dict], bool]) -> None:
        """Asks for the server's state until it is as wanted."""
        deadline = time.monotonic() + 30
        while not condition(state := self.state()):
            assert time.monotonic() < deadline, state


Serving = Callable[..., AbstractContextManager[Server]]


@contextmanager
def serving(
    engine: object, tokenizer: Tokenizer, model: object, **changes: object
) -> Iterator[Server]:
    """A server of an engine, on a thread of its own."""
    settings = ServeSettings(**{"model": "test", "engine": CONFIG, "port": 0, **changes})  # type: ignore[arg-type]
    started = threading.Event()
    problems: list[BaseException] = []
    ending: list[Callable[[], None]] = []

    with listening("127.0.0.1", 0) as listener:
        host, port = listener.getsockname()

        async def main() -> None:
            end, loop = anyio.Event(), asyncio.get_running_loop()
            ending.append(lambda: loop.call_soon_threadsafe(end.set))
            await serve(
                engine,  # type: ignore[arg-type]
                settings,
                model,  # type: ignore[arg-type]
                tokenizer,
                listener,
                until=end.wait,
                say=lambda line: started.set(),
            )

        def run() -> None:
            try:
                anyio.run(main)
            except BaseException as problem:
                problems.append(problem)
            finally:
                started.set()

        thread = threading.Thread(target=run, name="server", daemon=True)
        thread.start()
        assert started.wait(60)
        assert not problems, problems
        url = f"http://{host}:{port}"
        try:
            with httpx.Client(base_url=url, timeout=60) as client:
                yield Server(url=url, client=client, end=ending[0])
        finally:
            if thread.is_alive():
                ending[0]()
            thread.join(15)
        assert not thread.is_alive(), "the server ends"
        assert not problems, problems


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["user\nassistant\nthe answer is "] * 50, vocab_size=270)


@pytest.fixture(scope="session")
def decoder(make_decoder: Callable[..., Decoder], tokenizer: Tokenizer) -> Decoder:
    return make_decoder(0, vocab_size=tokenizer.vocab_size, max_position_embeddings=512)


@pytest.fixture(scope="session")
def engine(decoder: Decoder, tokenizer: Tokenizer) -> Iterator[JaxEngine]:
    engine = JaxEngine(decoder, CONFIG, timeline=Timeline(), tokenizer=tokenizer)
    yield engine
    asyncio.run(engine.aclose())


@pytest.fixture(scope="session")
def make_server(engine: JaxEngine, decoder: Decoder, tokenizer: Tokenizer) -> Serving:
    """Makes servers of the one engine; each with settings of its own."""
    return lambda **changes: serving(engine, tokenizer, decoder.config, **changes)


@pytest.fixture(scope="session")
def server(make_server: Serving) -> Iterator[Server]:
    with make_server() as one:
        yield one


@dataclass(frozen=True, kw_only=True)
class ScriptedDelta:
    """One token of a script."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    base_logprobs: Sequence[float]
    versions: Sequence[int]
    top_logprobs: Sequence[dict[int, float]]
    finish_reason: object
    matched: object
    reused_tokens: int = 0


class ScriptedServed:
    """A scripted model that streams, token by token."""

    def __init__(self, reply: Callable[[str], str], tokenizer: Tokenizer) -> None:
        self.prompts: list[str] = []

        def answer(prompt: str, _: object) -> str:
            self.prompts.append(prompt)
            return reply(prompt)

        self._scripted = ScriptedEngine(answer, tokenizer, context_length=2048)
        self.context_length, self.version, self.closed = 2048, 0, False
        self.ready = threading.Event()
        self.ready.set()

    async def generate(self, request: GenerateRequest) -> Generation:
        return await self._scripted.generate(request)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[ScriptedDelta]:
        whole = await self.generate(request)
        ids = whole.token_ids.tolist()
        for place, token in enumerate(ids):
            last = place == len(ids) - 1
            yield ScriptedDelta(
                token_ids=[token],
                logprobs=[0.0],
                base_logprobs=[0.0],
                versions=[0],
                top_logprobs=[{}],
                finish_reason=whole.finish_reason if last else None,
                matched=token if last and token in request.sampling.stop_token_ids else None,
            )


@pytest.fixture(scope="session")
def tool_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Its template shows tools and thoughts, as Qwen's does."""
    return Tokenizer(
        tokenizer.copy_backend(),
        chat_template=TOOLS_TEMPLATE,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
    )


@pytest.fixture
def scripted(
    decoder: Decoder,
) -> Callable[..., AbstractContextManager[tuple[Server, ScriptedServed]]]:
    """Makes servers whose model is a function of the prompt's text."""

    @contextmanager
    def make(
        reply: Callable[[str], str], tokenizer: Tokenizer
    ) -> Iterator[tuple[Server, ScriptedServed]]:
        engine = ScriptedServed(reply, tokenizer)
        with serving(engine, tokenizer, decoder.config) as one:
            yield one, engine

    return make
