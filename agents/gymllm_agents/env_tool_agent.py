"""An agent for environments that offer tools: each call that the model makes is an action."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast, final

from gymllm.agent import AgentFactory
from gymllm.errors import ConfigError, ConfigTypeError
from gymllm.message import Message, ToolCall
from gymllm.spaces import Image, TextOrMessage, text_of
from gymllm.tool_calls import ToolSchema, tools_problem, write_calls
from gymllm_agents.conversation import ConversationConfig, Dialogue, Reply
from gymllm_agents.conversation_agent import ConversationAgent
from gymllm_agents.parsers import ToolCallParser, UnreadableCall, make_parser
from gymllm_agents.setting import Setting
from gymllm_agents.tokenizer import Tokenizer
from gymllm_agents.tool_agent import tell_results
from gymllm_agents.tools import ToolResult

_NO_PARAMETERS: Mapping[str, object] = {"type": "object", "properties": {}, "required": []}


@dataclass(frozen=True, kw_only=True)
class EnvToolConfig(ConversationConfig):
    """A conversation's settings and how often calls that can't be read are asked for again."""

    asks: int = 1
    """How often the policy is asked again, in the same turn, where its answer can't be used, >= 0. Then
    the whole answer is the action."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.asks < 0:
            raise ConfigError(f"agent.asks must be >= 0, got {self.asks}.")


@final
class EnvToolAgent(ConversationAgent):
    """Tells the model of the environment's tools and sends it each call as one action, by `write_calls`.

    Several calls of one reply are several actions, in their order, with nothing generated between them;
    then the model is told all their results. A reply without calls is sent as its text: the environment
    says what it expected. What can't be read as calls is answered here, and nothing of that reply is run.
    """

    def __init__(self, dialogue: Dialogue, *, asks: int) -> None:
        """Builds one; `factory` is the way to get them."""
        super().__init__(dialogue)
        self._asks = asks
        self._calls: tuple[ToolCall, ...] = ()
        """Of the last reply; empty where that was sent as its text."""
        self._waiting: deque[ToolCall] = deque()
        self._results: list[TextOrMessage] = []

    @classmethod
    def factory(  # pyright: ignore[reportIncompatibleMethodOverride]  # it needs the tools
        cls,
        tokenizer: Tokenizer | None,
        config: ConversationConfig | None = None,
        *,
        tools: Sequence[ToolSchema],
        parser: ToolCallParser | str | None = None,
    ) -> AgentFactory:
        """Makes agents that share the tokenizer, the opening, and what is known of the template.

        The tools are listed as the chat template lists them, or in the system prompt, as by
        `ToolAgent.factory`.

        Args:
            tokenizer: Has a chat template. None: for chat engines alone (OpenAI), which need none.
            config: Defaults to `EnvToolConfig()`.
            tools: What the environment offers: `Env.tools`, or `await pool.tools()`.
            parser: One of `PARSERS`, or your own. None: the form that the template shows, else Hermes'.

        Raises:
            ConfigError: No tools, two of one name, or no schemas of functions.
            UnknownNameError: No parser is called that.
            ModelError: The tokenizer has no chat template, or one that can't be used like this.
        """
        config = config or EnvToolConfig()
        asks = config.asks if isinstance(config, EnvToolConfig) else EnvToolConfig().asks
        if problem := tools_problem(tools):
            raise ConfigTypeError(problem)
        if not tools:
            raise ConfigError(
                "An EnvToolAgent is for environments that offer tools (Env.tools), got none."
            )
        schemas = [_filled(tool) for tool in tools]
        if isinstance(parser, str):
            parser = make_parser(parser, schemas)
        setting = Setting(tokenizer, config, tools=schemas, parser=parser)
        return lambda context: cls(setting.open(context), asks=asks).bind(context)

    async def answer(self, observation: TextOrMessage) -> str:
        """The next call that is waiting, or what the policy answers once it has all results."""
        if not self._calls:
            return await self._act_on(await self.say(observation))
        self._results.append(observation)
        if self._waiting:
            return self._send_next()
        calls, results = self._calls, self._results
        self._calls, self._results = (), []
        texts = [ToolResult(text=text_of(result)) for result in results]
        told = [*tell_results(calls, texts, listed=self.lists_tools), *_images_of(results)]
        return await self._act_on(await self.say(*told))

    async def _act_on(self, reply: Reply) -> str:
        left = self._asks
        while any(isinstance(call, UnreadableCall) for call in reply.calls):
            self.count_calls(len(reply.calls), len(reply.calls))
            if not left:
                return reply.raw
            left -= 1
            results = [_refusal(call) for call in reply.calls]
            reply = await self.say(*tell_results(reply.calls, results, listed=self.lists_tools))
        if not reply.calls:
            return reply.text
        self._calls = cast("tuple[ToolCall, ...]", reply.calls)
        self._waiting.extend(self._calls)
        return self._send_next()

    def _send_next(self) -> str:
        self.count_calls(1, 0)
        return write_calls([self._waiting.popleft()])


def _refusal(call: ToolCall | UnreadableCall) -> ToolResult:
    """Why a call was not sent to the environment."""
    if isinstance(call, UnreadableCall):
        return ToolResult(text=f"Error: {call.problem}", failed=True)
    text = f"Error: {call.name} was not run, as another call beside it can't be read. Write both again."
    return ToolResult(text=text, failed=True)


def _images_of(results: Sequence[TextOrMessage]) -> list[Message]:
    """The images in results, as a message of their own: tool messages hold text alone."""
    parts: list[str | Image] = []
    for result in results:
        if not isinstance(result, str):
            parts += [part["image"] for part in result["content"] if part["type"] == "image"]
    return [Message(role="user", parts=tuple(parts))] if parts else []


def _filled(tool: ToolSchema) -> ToolSchema:
    """A schema with what may be left out, as chat templates and parsers expect it; in the order as given."""
    function = dict(cast("Mapping[str, object]", tool["function"]))
    function.setdefault("description", "")
    function["parameters"] = function.get("parameters") or _NO_PARAMETERS
    return {"type": "function", "function": function}
