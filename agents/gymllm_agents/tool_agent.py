"""An agent that runs tools inside a turn; its first answer without a call is the action."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import anyio.lowlevel

from gymllm.agent import Action, AgentFactory, EpisodeContext
from gymllm.errors import ConfigError
from gymllm.ledger import Segment
from gymllm.message import Message, ToolCall
from gymllm_agents.chat_format import ChatFormat
from gymllm_agents.conversation import Conversation, ConversationConfig, refuse_rewrites
from gymllm_agents.parsers import HermesParser, Said, ToolCallParser, UnreadableCall
from gymllm_agents.tokenizer import Tokenizer
from gymllm_agents.tools import Tool, ToolResult


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
                "is a ConversationAgent."
            )


@final
class ToolAgent:
    """Says each observation as a user message, runs the calls in the answers, and acts."""

    def __init__(
        self,
        conversation: Conversation,
        *,
        tools: Mapping[str, Tool],
        parser: ToolCallParser,
        result_role: str,
        max_tool_calls: int,
    ) -> None:
        """Builds one; `factory` is the way to get them.

        Args:
            conversation: A new one.
            tools: By name.
            parser: How calls are written.
            result_role: "tool" where the template lists the tools, else "user".
            max_tool_calls: Most calls a turn.
        """
        self._conversation = conversation
        self._tools, self._parser = tools, parser
        self._result_role = result_role
        self._max_tool_calls = max_tool_calls
        refusal = f"Error: only {max_tool_calls} calls a turn are allowed; answer now."
        self._refused = ToolResult(text=refusal, failed=True)

    @staticmethod
    def factory(
        tokenizer: Tokenizer,
        config: ToolConfig | None = None,
        *,
        tools: Sequence[Tool],
        parser: ToolCallParser | None = None,
    ) -> AgentFactory:
        """Makes agents that share the tokenizer, the opening, and what is known of the template.

        Where the chat template has no tool support, or teaches another form than the parser's, the tools
        and the form of a call go into the system prompt, and results come as user messages.

        Args:
            tokenizer: Has a chat template.
            config: Defaults to `ToolConfig()`.
            tools: At least one; names are unique.
            parser: Defaults to the Hermes form.

        Raises:
            ConfigError: No tools, or two of one name.
            ModelError: The tokenizer has no chat template, or one that can't be used like this.
        """
        config = config or ToolConfig()
        parser = parser or HermesParser()
        by_name = {tool.name: tool for tool in tools}
        if not tools or len(by_name) < len(tools):
            names = ", ".join(tool.name for tool in tools) or "none"
            raise ConfigError(f"A tool agent needs tools with names of their own, got: {names}.")
        schemas = [tool.schema for tool in tools]
        listed = parser.from_template and tokenizer.template.supports_tools()
        if listed:
            chat = ChatFormat(tokenizer, opening=config.opening, tools=schemas)
        else:
            prompts = (config.system_prompt, parser.instructions(schemas))
            told = replace(config, system_prompt="\n\n".join(filter(None, prompts)))
            chat = ChatFormat(tokenizer, opening=_without_tool_role(told.opening))
        refuse_rewrites(chat, config)

        def make(context: EpisodeContext) -> ToolAgent:
            return ToolAgent(
                Conversation(chat, config, context),
                tools=by_name,
                parser=parser,
                result_role="tool" if listed else "user",
                max_tool_calls=config.max_tool_calls,
            )

        return make

    async def act(self, observation: str) -> Action:
        """Says the observation, runs what the policy calls, and returns its first answer without a call.

        Raises:
            EngineError: The engine broke.
        """
        said = [Message(role="user", content=observation)]
        prompt_tokens = generated_tokens = calls = errors = 0
        engine_s = 0.0
        while True:
            reply = await self._conversation.reply(*said)
            prompt_tokens = prompt_tokens or reply.prompt_tokens
            generated_tokens += reply.generated_tokens
            engine_s += reply.engine_s
            asked = self._parser.parse(Said(text=reply.text)).calls
            if reply.limit or not asked or calls >= self._max_tool_calls:
                break
            left = self._max_tool_calls - calls
            results = [await self._run(call) for call in asked[:left]]
            results += [self._refused] * len(asked[left:])
            calls += len(results)
            errors += sum(result.failed for result in results)
            said = [Message(role=self._result_role, content=result.text) for result in results]
            if self._result_role == "user":  # most templates want one message a turn
                said = [Message(role="user", content="\n".join(m.content for m in said))]
        return Action(
            text=reply.text,
            limit=reply.limit,
            prompt_tokens=prompt_tokens,
            generated_tokens=generated_tokens,
            tool_calls=calls,
            tool_errors=errors,
            engine_s=engine_s,
        )

    def segments(self) -> tuple[Segment, ...]:
        """The exact tokens so far."""
        return self._conversation.segments()

    def messages(self) -> tuple[Message, ...]:
        """Everything said so far, opening included."""
        return self._conversation.messages()

    async def _run(self, call: ToolCall | UnreadableCall) -> ToolResult:
        if isinstance(call, UnreadableCall):
            await anyio.lowlevel.checkpoint()
            return ToolResult(text=f"Error: {call.problem}", failed=True)
        tool = self._tools.get(call.name)
        if tool is None:
            await anyio.lowlevel.checkpoint()
            known = ", ".join(self._tools)
            text = f"Error: there is no tool {call.name!r}; there is: {known}."
            return ToolResult(text=text, failed=True)
        return await tool(call.arguments)


def _without_tool_role(messages: Sequence[Message]) -> list[Message]:
    """Results as user messages, those that follow each other as one, as `ToolAgent.act` says them."""
    told: list[Message] = []
    for role, run in itertools.groupby(messages, key=lambda message: message.role):
        if role == "tool":
            told.append(Message(role="user", content="\n".join(m.content for m in run)))
        else:
            told.extend(run)
    return told
