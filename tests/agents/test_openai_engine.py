"""Agents on a chat-completions server: a real HTTP server on a local port."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anyio
import anyio.abc
import numpy as np
import pytest
from PIL import Image as pillow

import gymllm
from gymllm import EnvPool, SamplingParams, SeededTasks, spaces
from gymllm.agent import EpisodeContext
from gymllm.engine import GenerateRequest
from gymllm.engines import OpenAIEngine
from gymllm.episode import EpisodeLimits
from gymllm.errors import (
    ClosedError,
    ConfigError,
    EngineError,
    EngineTimeoutError,
    LedgerError,
    ModelError,
)
from gymllm.evaluation import evaluate
from gymllm.spaces import message
from gymllm.timeline import Timeline
from gymllm.transcripts import from_json, to_json
from gymllm_agents import ConversationConfig, ModelAgent, ToolAgent, ToolConfig, calculator


def completion(content: str | None, finish: str = "stop", **more: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": content, **more}
    usage = {"prompt_tokens": 11, "completion_tokens": 3}
    return {"choices": [{"message": said, "finish_reason": finish}], "usage": usage}


def calling(arguments: str, name: str = "calculator") -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return completion(None, "tool_calls", tool_calls=[call])


class Server:
    """Answers in order: a completion, a status with headers and a body, or "hang up"."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked, self.paths = list(answers), [], []  # type: ignore[var-annotated]
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.asked.append(json.loads(body))
                outer.paths.append((self.path, self.headers.get("authorization")))
                answer = outer.answers.pop(0)
                if answer == "hang up":
                    self.close_connection = True
                    return
                status, headers, text = (
                    answer if isinstance(answer, tuple) else (200, {}, json.dumps(answer))
                )
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(text.encode()))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*answers: Any) -> Server:
        servers.append(Server(*answers))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def context(engine: Any) -> EpisodeContext:
    return EpisodeContext(engine=engine, seed=7, name="e", timeline=Timeline())


@pytest.mark.asyncio
async def test_an_agent_talks_to_a_server(serve) -> None:
    server = serve(completion("<think>hm</think>\n\nleft"), completion("right"))
    config = ConversationConfig(system_prompt="Play.", max_new_tokens=9, temperature=0.5)
    async with OpenAIEngine("some-model", url=server.url, api_key="secret") as engine:
        agent = ModelAgent.factory(None, config)(context(engine))
        first = await agent.act("A door. <|im_end|>")
        second = await agent.act("Another.")
    assert (first.text, second.text) == ("left", "right")
    assert (first.prompt_tokens, first.generated_tokens) == (11, 3)
    assert server.paths == [("/v1/chat/completions", "Bearer secret")] * 2
    body = server.asked[1]
    assert [m["role"] for m in body["messages"]] == ["system", "user", "assistant", "user"]
    assert body["messages"][1]["content"] == "A door. <|im_end|>"
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("some-model", 9, 0.5)
    assert body["seed"] != server.asked[0]["seed"]
    assert agent.segments() == ()


@pytest.mark.asyncio
async def test_tools_are_called_by_the_protocols_own_calls(serve) -> None:
    server = serve(
        calling('{"expression": "6*7"}'), calling("{broken"), calling("[1]"), completion("42")
    )
    factory = ToolAgent.factory(None, ToolConfig(), tools=[calculator()])
    async with OpenAIEngine("m", url=server.url) as engine:
        agent = factory(context(engine))
        action = await agent.act("6 * 7?")
    assert (action.text, action.tool_calls, action.tool_errors) == ("42", 3, 2)
    assert server.asked[0]["tools"][0]["function"]["name"] == "calculator"
    call, result = server.asked[1]["messages"][-2:]
    assert call["tool_calls"][0]["id"] == "c1"
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"expression": "6*7"}
    assert result == {"role": "tool", "content": "42", "tool_call_id": "c1"}
    broken, told = server.asked[2]["messages"][-2:]
    assert "tool_calls" not in broken
    assert "{broken" in broken["content"]
    assert told["role"] == "user"
    assert "no JSON object" in told["content"]


@pytest.mark.asyncio
async def test_images_are_sent_as_they_are(serve, tokenizer, scripted) -> None:
    image = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    observation = message("user", "What is this?", image)
    server = serve(completion("noise"))
    async with OpenAIEngine("m", url=server.url) as engine:
        agent = ModelAgent.factory(None)(context(engine))
        assert (await agent.act(observation)).text == "noise"
    text, shown = server.asked[0]["messages"][0]["content"]
    assert text == {"type": "text", "text": "What is this?"}
    data = shown["image_url"]["url"].removeprefix("data:image/png;base64,")
    assert (np.array(pillow.open(io.BytesIO(base64.b64decode(data)))) == image).all()
    # An engine of tokens can't take it, and says so before anything is asked.
    agent = ModelAgent.factory(tokenizer)(context(scripted("x")))
    with pytest.raises(ModelError, match="holds an image, and this engine takes token ids alone"):
        await agent.act(observation)


@pytest.mark.asyncio
async def test_what_passes_is_tried_again(serve) -> None:
    again = {"retry-after": "0.01"}
    server = serve((429, again, "slow down"), (503, again, ""), completion("left"))
    async with OpenAIEngine("m", url=server.url) as engine:
        assert (await ModelAgent.factory(None)(context(engine)).act("a")).text == "left"
    assert len(server.asked) == 3


@pytest.mark.asyncio
async def test_a_lost_connection_is_tried_again_and_then_told(serve) -> None:
    server = serve("hang up", completion("left"), "hang up")
    async with OpenAIEngine("m", url=server.url, retries=1) as engine:
        assert (await ModelAgent.factory(None)(context(engine)).act("a")).text == "left"
    async with OpenAIEngine("m", url=server.url, retries=0) as engine:
        agent = ModelAgent.factory(None)(context(engine))
        with pytest.raises(EngineError, match=r"did not answer request 'e/0' of model 'm'"):
            await agent.act("a")
        with pytest.raises(LedgerError, match="its last request was not answered"):
            await agent.act("b")
    with pytest.raises(ClosedError):
        await ModelAgent.factory(None)(context(engine)).act("a")


@pytest.mark.asyncio
async def test_an_address_where_nobody_listens_is_asked_about() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with OpenAIEngine("m", url=f"http://127.0.0.1:{port}/v1", retries=0) as engine:
        with pytest.raises(EngineError, match=f"{port}/v1.*Is a server running at that address"):
            await ModelAgent.factory(None)(context(engine)).act("a")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((401, {}, '{"error": {"message": "bad key"}}'), "HTTP 401: bad key"),
        ((400, {}, '{"error": {"message": "no images here"}}'), "HTTP 400: no images here"),
        ((200, {}, "<html>"), "no JSON object: '<html>'"),
        ((200, {}, '{"choices": []}'), "no chat completion"),
        ((200, {}, '{"choices": [{"message": {"tool_calls": [{}]}}]}'), "no chat completion"),
    ],
)
@pytest.mark.asyncio
async def test_what_does_not_pass_is_told_at_once(serve, answer, said) -> None:
    server = serve(answer)
    async with OpenAIEngine("m", url=server.url) as engine:
        with pytest.raises(EngineError, match=said):
            await ModelAgent.factory(None)(context(engine)).act("a")


@pytest.mark.asyncio
async def test_a_full_context_is_a_limit(serve) -> None:
    error = '{"error": {"code": "context_length_exceeded", "message": "too long"}}'
    server = serve((400, {}, error))
    async with OpenAIEngine("m", url=server.url) as engine:
        action = await ModelAgent.factory(None)(context(engine)).act("a")
    assert action.limit == "context_length"


@pytest.mark.asyncio
async def test_nothing_can_be_trained_on_it(scripted) -> None:
    async with OpenAIEngine("m") as engine:
        sampling = SamplingParams(max_new_tokens=1)
        with pytest.raises(ConfigError, match="gives no exact tokens"):
            await engine.generate(GenerateRequest(prompt_ids=[1], sampling=sampling))
    with pytest.raises(ModelError, match="takes token ids, but the agents were made without"):
        ModelAgent.factory(None)(context(scripted("x")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "localhost:80"}, r"must start with http"),
        ({"retries": -1}, r"retries must be >= 0, got -1"),
        ({"max_concurrent": 0}, r"max_concurrent must be >= 1"),
        ({"timeout_s": 0}, r"timeout_s must be > 0"),
    ],
)
def test_bad_settings_are_refused(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        OpenAIEngine("m", **settings)


class Pictures(gymllm.Env):
    """Two turns of a picture; the right word is rewarded."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Message(images=True, roles=("user",))

    async def areset(self, *, seed=None, options=None):
        self.turns = 0
        return self._shown(), {}

    async def astep(self, action):
        self.turns += 1
        return self._shown(), float(action == "red"), self.turns == 2, False, {}

    def _shown(self):
        return message("user", f"Turn {self.turns}. Which colour?", np.full((2, 2, 3), 7, np.uint8))


@pytest.mark.asyncio
async def test_a_model_that_sees_is_evaluated_on_an_environment_that_shows(serve, tmp_path) -> None:
    server = serve(*[completion("red"), completion("blue")] * 3)
    async with OpenAIEngine("m", url=server.url) as engine, EnvPool(Pictures, 1) as pool:
        result = await evaluate(
            pool=pool,
            make_agent=ModelAgent.factory(None),
            engine=engine,
            tasks=SeededTasks(run_seed=0),
            episodes=3,
            concurrency=1,
            run_seed=0,
            limits=EpisodeLimits(),
            timeline=Timeline(),
        )
    assert [t.reward for t in result.trajectories] == [1.0, 1.0, 1.0]
    first = result.trajectories[0]
    assert [turn.observation for turn in first.turns] == [
        "Turn 0. Which colour?",
        "Turn 1. Which colour?",
    ]
    (back,) = [from_json(to_json(first))]
    assert (back.messages[0].parts[1] == np.full((2, 2, 3), 7)).all()
    assert len(server.asked[1]["messages"][2]["content"]) == 2


ODD_TEXTS = [
    ("half \ud83c", "half ?"),
    (3, "3"),
    ([{"type": "text", "text": "a"}, {"type": "text", "text": None}], "a"),
]


@pytest.mark.parametrize(("content", "text"), ODD_TEXTS)
@pytest.mark.parametrize("usage", ["many", [1], {"prompt_tokens": float("inf")}, {}])
@pytest.mark.asyncio
async def test_an_odd_answer_is_read_as_far_as_it_can_be(serve, content, text, usage) -> None:
    server = serve({**completion(content), "usage": usage}, completion("next"))
    async with OpenAIEngine("m", url=server.url, api_key="") as engine:
        agent = ModelAgent.factory(None)(context(engine))
        action = await agent.act("half \ud83c")
        assert (await agent.act("go on")).text == "next"
    assert (action.text, action.prompt_tokens) == (text, 0)
    assert server.asked[0]["messages"][0]["content"] == "half ?"


@pytest.mark.parametrize(
    "arguments", ['{"a": "\\ud83c"}', '{"a": NaN}', '{"a":' * 70 + "1" + "}" * 70, "[1]", "{"]
)
@pytest.mark.asyncio
async def test_arguments_that_nothing_can_pass_on_are_told_to_the_model(serve, arguments) -> None:
    server = serve(calling(arguments), completion("done"))
    async with OpenAIEngine("m", url=server.url, api_key="") as engine:
        agent = ToolAgent.factory(None, tools=[calculator()])(context(engine))
        action = await agent.act("go")
    assert (action.text, action.tool_errors) == ("done", 1)
    assert "are no JSON object" in server.asked[1]["messages"][-1]["content"]


@pytest.mark.asyncio
async def test_calls_without_ids_get_their_own(serve) -> None:
    function = {"name": "calculator", "arguments": '{"expression": "6*7"}'}
    two = completion(None, tool_calls=[{"function": function}, {"function": function}])
    server = serve(two, two, completion("done"))
    async with OpenAIEngine("m", url=server.url, api_key="") as engine:
        agent = ToolAgent.factory(None, tools=[calculator()])(context(engine))
        assert (await agent.act("go")).text == "done"
    said = server.asked[2]["messages"]
    asked = [call["id"] for m in said for call in m.get("tool_calls", ())]
    assert asked == [m["tool_call_id"] for m in said if m["role"] == "tool"]
    assert len(set(asked)) == 4


@pytest.mark.asyncio
async def test_an_answer_that_cannot_be_unpacked_is_the_engines_fault(serve) -> None:
    server = serve((200, {"content-encoding": "gzip"}, "no gzip"))
    async with OpenAIEngine("m", url=server.url, api_key="", retries=0) as engine:
        with pytest.raises(EngineError, match="DecodingError"):
            await ModelAgent.factory(None)(context(engine)).act("go")


@pytest.mark.asyncio
async def test_an_answer_without_end_is_refused(serve, monkeypatch) -> None:
    monkeypatch.setattr("gymllm.engines.openai.MOST_BYTES", 100)
    server = serve((200, {}, " " * 101))
    async with OpenAIEngine("m", url=server.url, api_key="") as engine:
        with pytest.raises(EngineError, match="more than 100 bytes"):
            await ModelAgent.factory(None)(context(engine)).act("go")


@pytest.mark.asyncio
async def test_the_time_limit_is_one_for_the_whole_answer() -> None:
    async def drip(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            with contextlib.suppress(anyio.BrokenResourceError):
                await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10000\r\n\r\n")
                while True:
                    await stream.send(b" ")
                    await anyio.sleep(0.01)

    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, drip)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        url = f"http://127.0.0.1:{port}/v1"
        async with OpenAIEngine("m", url=url, api_key="", timeout_s=0.1, retries=0) as engine:
            with pytest.raises(EngineTimeoutError):
                await ModelAgent.factory(None)(context(engine)).act("go")
        group.cancel_scope.cancel()
