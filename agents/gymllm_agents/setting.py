"""What an agent's conversations have in common: the template tried out, the form of calls known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gymllm.agent import EpisodeContext
from gymllm.chat_engine import ChatEngine
from gymllm.errors import ModelError
from gymllm.message import Message
from gymllm_agents.chat_conversation import ChatConversation
from gymllm_agents.chat_format import ChatFormat
from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.conversation import Conversation, ConversationConfig, Dialogue
from gymllm_agents.parser_choice import choose_parser, reads_its_calls
from gymllm_agents.parsers import HermesParser, ToolCallParser
from gymllm_agents.tokenizer import Tokenizer


class Setting:
    """What all conversations of an agent have in common: tokenizer, opening, tools, form of calls."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        config: ConversationConfig,
        *,
        tools: Sequence[ToolSchema] = (),
        parser: ToolCallParser | None = None,
    ) -> None:
        """Tries the chat template out.

        Where it has no tool support, or shows calls in another form than the parser's, the tools and the
        form of a call go into the system prompt, and results come as user messages.

        Args:
            tokenizer: Has a chat template. None: for chat engines alone (OpenAI), which need none.
            config: The conversations' settings.
            tools: What the model is told it can call.
            parser: Reads reasoning and calls. None: the form that the template shows, else Hermes'.

        Raises:
            ModelError: The tokenizer has no chat template, or one that can't be used like this.
        """
        self._config, self._tools = config, tools
        self._lists_tools = False
        self._chat: tuple[ChatFormat, ToolCallParser] | None = None
        if tokenizer is None:
            return
        if (
            tools
            and (parser is None or parser.from_template)
            and tokenizer.template.supports_tools()
        ):
            chat = self._format(tokenizer, config.opening, tools)
            if parser is None or reads_its_calls(chat, parser):
                self._lists_tools = True
                self._chat = (chat, parser or choose_parser(chat, tools))
                return
        opening: Sequence[Message] = config.opening
        if tools:
            parser = parser or self._shown_form(tokenizer, tools)
            prompts = (config.system_prompt, parser.instructions(tools))
            told = replace(config, system_prompt="\n\n".join(filter(None, prompts)))
            opening = _without_tool_role(told.opening)
        chat = self._format(tokenizer, opening, ())
        self._chat = (chat, parser or choose_parser(chat))

    def open(self, context: EpisodeContext) -> Dialogue:
        """A new conversation for one episode.

        Raises:
            ModelError: The engine takes token ids, and there is no tokenizer.
        """
        engine = context.engine
        if isinstance(engine, ChatEngine):
            return ChatConversation(engine, self._config, context, tools=self._tools)
        if self._chat is None:
            raise ModelError(
                f"{type(engine).__name__} takes token ids, but the agents were made without a "
                "tokenizer: give their factory the model's."
            )
        chat, parser = self._chat
        return Conversation(
            chat, self._config, context, parser=parser, lists_tools=self._lists_tools
        )

    def _shown_form(self, tokenizer: Tokenizer, tools: Sequence[ToolSchema]) -> ToolCallParser:
        """The form of calls in a template that does not say which tools there are (DeepSeek's)."""
        chat = self._format(tokenizer, (), tools, report=False)
        return choose_parser(chat, tools) if chat.trials.shows_calls else HermesParser()

    def _format(
        self,
        tokenizer: Tokenizer,
        opening: Sequence[Message],
        tools: Sequence[ToolSchema],
        *,
        report: bool = True,
    ) -> ChatFormat:
        return ChatFormat(
            tokenizer,
            opening=opening,
            tools=tools,
            variables=self._config.template_variables,
            control_tokens_in_text=self._config.control_tokens_in_text,
            on_rewrite=self._config.on_rewrite,
            report=report,
        )


def _without_tool_role(messages: Sequence[Message]) -> list[Message]:
    """Results as user messages, those that follow each other as one, as `ToolAgent` says them."""
    told: list[Message] = []
    for message in messages:
        if message.role != "tool":
            told.append(message)
        elif told and told[-1].name == "tool results":
            told[-1] = replace(told[-1], content=f"{told[-1].content}\n{message.content}")
        else:
            told.append(Message(role="user", content=message.content, name="tool results"))
    return [replace(message, name="") for message in told]
