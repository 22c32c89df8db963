"""An agent that runs tools inside a turn; its first answer without a call is the action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gymllm.agent import AgentFactory
from gymllm.errors import ConfigError, ConfigTypeError
from gymllm.message import Message, ToolCall
from gymllm.spaces import TextOrMessage
from gymllm_agents.conversation import ConversationConfig, Dialogue
from gymllm_agents.conversation_agent import ConversationAgent
from gymllm_agents.parsers import ToolCallParser, UnreadableCall, make_parser
from gymllm_agents.setting import Setting
from gymllm_agents.tokenizer import Tokenizer
from gymllm_agents.tools import Held, Tool, ToolResult, run_calls


@dataclass(frozen=True, kw_only=True)
class ToolConfig(ConversationConfig):
    """A conversation's settings and those of its tool calls."""

    max_tool_calls: int = 4
    """Most calls a turn, >= 1, unreadable ones included. A reply that still calls after that is the
    turn's action as it stands."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tool_calls < 1:
            raise ConfigError(
                f"agent.max_tool_calls must be >= 1, got {self.max_tool_calls}. An agent without tools "
                "is a ModelAgent."
            )


class ToolAgent(ConversationAgent):
    """Says each observation as a user message, runs the calls in the answers, and acts."""

    def __init__(
        self,
        dialogue: Dialogue,
        *,
        tools: Mapping[str, Tool],
        max_tool_calls: int,
    ) -> None:
        """Builds one; `factory` is the way to get them.

        Args:
            dialogue: A new one.
            tools: By name.
            max_tool_calls: Most calls a turn.
        """
        super().__init__(dialogue)
        self._tools = tools
        self._max_tool_calls = max_tool_calls
        refusal = f"Error: only {max_tool_calls} calls a turn are allowed; answer now."
        self._refused = ToolResult(text=refusal, failed=True)
        self._held = Held()

    @classmethod
    def factory(  # pyright: ignore[reportIncompatibleMethodOverride]  # an agent of tools needs tools
        cls,
        tokenizer: Tokenizer | None,
        config: ToolConfig | None = None,
        *,
        tools: Sequence[Tool],
        parser: ToolCallParser | str | None = None,
    ) -> AgentFactory:
        """Makes agents that share the tokenizer, the opening, and what is known of the template.

        Where the chat template has no tool support, or shows another form than the parser's, the tools
        and the form of a call go into the system prompt, and results come as user messages.

        Args:
            tokenizer: Has a chat template. None: for chat engines alone (OpenAI), which need none.
            config: Defaults to `ToolConfig()`.
            tools: At least one; names are unique.
            parser: One of `PARSERS`, or your own. None: the form that the template shows, else Hermes'.

        Raises:
            ConfigError: No tools, two of one name, or something else than tools or a `ToolConfig`.
            UnknownNameError: No parser is called that.
            ModelError: The tokenizer has no chat template, or one that can't be used like this.
        """
        config = config or ToolConfig()
        if not isinstance(config, ToolConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigTypeError(
                f"A tool agent needs a ToolConfig, got a {type(config).__name__}."
            )
        if not isinstance(tools, Sequence) or any(not isinstance(tool, Tool) for tool in tools):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigTypeError(
                "A tool agent's tools must be a list of Tool (`tool` makes one of a function, an "
                f"McpServer has them as `server.tools`), got {tools!r}."
            )
        by_name = {tool.name: tool for tool in tools}
        if not tools or len(by_name) < len(tools):
            names = ", ".join(tool.name for tool in tools) or "none"
            raise ConfigError(f"A tool agent needs tools with names of their own, got: {names}.")
        schemas = [tool.schema for tool in tools]
        if isinstance(parser, str):
            parser = make_parser(parser, schemas)
        setting = Setting(tokenizer, config, tools=schemas, parser=parser)
        return lambda context: cls(
            setting.open(context),
            tools=by_name,
            max_tool_calls=config.max_tool_calls,
        ).bind(context)

    async def answer(self, observation: TextOrMessage) -> str:
        """Says the observation, runs what the policy calls, and returns its first answer without a call."""
        reply = await self.say(observation)
        left = self._max_tool_calls
        while reply.calls and left > 0:
            calls = reply.calls
            with self._held.during():
                results = await run_calls(
                    self._tools,
                    calls[:left],
                    timeline=self.context.timeline,
                    track=f"{self.context.name}/tools",
                )
            results += (self._refused,) * (len(calls) - len(results))
            left -= len(results)
            self.count_calls(len(results), sum(result.failed for result in results))
            reply = await self.say(*self.tell(calls, results))
        return reply.text if not reply.calls else reply.raw

    async def aclose(self) -> None:
        """Closes what tools hold open, such as a sandbox; `run_episode` calls it."""
        await self._held.aclose()

    def tell(
        self, calls: Sequence[ToolCall | UnreadableCall], results: Sequence[ToolResult]
    ) -> Sequence[Message]:
        """What the policy is told of its calls, in their order."""
        return tell_results(calls, results, listed=self.lists_tools)


def tell_results(
    calls: Sequence[ToolCall | UnreadableCall], results: Sequence[ToolResult], *, listed: bool
) -> Sequence[Message]:
    """Results of calls as messages: one a call, or one for all.

    Args:
        calls: As the policy made them.
        results: In their order.
        listed: Whether the model is told of tools in a way of its own, with a role for their results.
    """
    if listed and all(isinstance(call, ToolCall) for call in calls):
        return [
            Message(role="tool", content=result.text, tool_call_id=call.id, name=call.name)
            for call, result in zip(calls, results, strict=True)
        ]
    # Most templates want one message a turn.
    return [Message(role="user", content="\n".join(result.text for result in results))]
