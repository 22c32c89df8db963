"""Agents of gymllm: observations to messages, messages to exact tokens, tokens to actions.

tokenizer, chat_template        the model's own files
chat_format, template_trials    what each turn adds, in ids; what a template does to earlier turns
growing_text                    what a template rewrites is encoded from where it differs
conversation, setting           the ledger at work; what all conversations of an agent have in common
conversation_agent              the agent to subclass: override `answer`
model_agent                     the whole answer is the action, or what is in a tag or a pattern
tool_agent, react_agent         agents that run tools inside a turn
env_tool_agent                  the agent for environments that offer tools
tools, parsers, parser_choice   what a model can call, and how it writes that
"""

from gymllm_agents.chat_format import ChatFormat as ChatFormat
from gymllm_agents.chat_template import ChatTemplate as ChatTemplate
from gymllm_agents.conversation import Conversation as Conversation
from gymllm_agents.conversation import ConversationConfig as ConversationConfig
from gymllm_agents.conversation import Dialogue as Dialogue
from gymllm_agents.conversation import Reply as Reply
from gymllm_agents.conversation_agent import ConversationAgent as ConversationAgent
from gymllm_agents.conversation_agent import LimitReachedError as LimitReachedError
from gymllm_agents.env_tool_agent import EnvToolAgent as EnvToolAgent
from gymllm_agents.env_tool_agent import EnvToolConfig as EnvToolConfig
from gymllm_agents.model_agent import FormatAgent as FormatAgent
from gymllm_agents.model_agent import FormatConfig as FormatConfig
from gymllm_agents.model_agent import ModelAgent as ModelAgent
from gymllm_agents.parsers import PARSERS as PARSERS
from gymllm_agents.parsers import HermesParser as HermesParser
from gymllm_agents.parsers import ParsedReply as ParsedReply
from gymllm_agents.parsers import PlainParser as PlainParser
from gymllm_agents.parsers import Said as Said
from gymllm_agents.parsers import ThoughtParser as ThoughtParser
from gymllm_agents.parsers import ToolCallParser as ToolCallParser
from gymllm_agents.parsers import UnreadableCall as UnreadableCall
from gymllm_agents.parsers import make_parser as make_parser
from gymllm_agents.react_agent import ReActAgent as ReActAgent
from gymllm_agents.react_agent import ReActParser as ReActParser
from gymllm_agents.tokenizer import Tokenizer as Tokenizer
from gymllm_agents.tokenizer_training import train_tokenizer as train_tokenizer
from gymllm_agents.tool_agent import ToolAgent as ToolAgent
from gymllm_agents.tool_agent import ToolConfig as ToolConfig
from gymllm_agents.tools import Held as Held
from gymllm_agents.tools import McpServer as McpServer
from gymllm_agents.tools import Tool as Tool
from gymllm_agents.tools import ToolError as ToolError
from gymllm_agents.tools import ToolResult as ToolResult
from gymllm_agents.tools import calculator as calculator
from gymllm_agents.tools import local_search as local_search
from gymllm_agents.tools import run_calls as run_calls
from gymllm_agents.tools import sandbox_tools as sandbox_tools
from gymllm_agents.tools import tool as tool

__all__ = [  # noqa: RUF022 (in the order of `sorted`, which a test checks)
    "ChatFormat",
    "ChatTemplate",
    "Conversation",
    "ConversationAgent",
    "ConversationConfig",
    "Dialogue",
    "EnvToolAgent",
    "EnvToolConfig",
    "FormatAgent",
    "FormatConfig",
    "Held",
    "HermesParser",
    "LimitReachedError",
    "McpServer",
    "ModelAgent",
    "PARSERS",
    "ParsedReply",
    "PlainParser",
    "ReActAgent",
    "ReActParser",
    "Reply",
    "Said",
    "ThoughtParser",
    "Tokenizer",
    "Tool",
    "ToolAgent",
    "ToolCallParser",
    "ToolConfig",
    "ToolError",
    "ToolResult",
    "UnreadableCall",
    "calculator",
    "local_search",
    "make_parser",
    "run_calls",
    "sandbox_tools",
    "tool",
    "train_tokenizer",
]
