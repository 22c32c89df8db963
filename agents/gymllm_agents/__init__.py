"""Agents of gymllm: observations to messages, messages to exact tokens, tokens to actions.

tokenizer, chat_template    the model's own files
chat_format                 what each turn adds, in ids
conversation                the ledger at work, and the plain agent
tools, parsers              what a model can call, and how it writes that
tool_agent                  the agent that runs tools inside a turn
"""

from gymllm_agents.chat_format import ChatFormat as ChatFormat
from gymllm_agents.chat_template import ChatTemplate as ChatTemplate
from gymllm_agents.conversation import Conversation as Conversation
from gymllm_agents.conversation import ConversationAgent as ConversationAgent
from gymllm_agents.conversation import ConversationConfig as ConversationConfig
from gymllm_agents.conversation import Reply as Reply
from gymllm_agents.parsers import PARSERS as PARSERS
from gymllm_agents.parsers import HermesParser as HermesParser
from gymllm_agents.parsers import ParsedReply as ParsedReply
from gymllm_agents.parsers import PlainParser as PlainParser
from gymllm_agents.parsers import Said as Said
from gymllm_agents.parsers import ToolCallParser as ToolCallParser
from gymllm_agents.parsers import UnreadableCall as UnreadableCall
from gymllm_agents.parsers import make_parser as make_parser
from gymllm_agents.tokenizer import Tokenizer as Tokenizer
from gymllm_agents.tokenizer_training import train_tokenizer as train_tokenizer
from gymllm_agents.tool_agent import ToolAgent as ToolAgent
from gymllm_agents.tool_agent import ToolConfig as ToolConfig
from gymllm_agents.tools import McpServer as McpServer
from gymllm_agents.tools import Tool as Tool
from gymllm_agents.tools import ToolError as ToolError
from gymllm_agents.tools import ToolResult as ToolResult
from gymllm_agents.tools import calculator as calculator
from gymllm_agents.tools import local_search as local_search
from gymllm_agents.tools import run_calls as run_calls
from gymllm_agents.tools import tool as tool

__all__ = [  # noqa: RUF022 (in the order of `sorted`, which a test checks)
    "ChatFormat",
    "ChatTemplate",
    "Conversation",
    "ConversationAgent",
    "ConversationConfig",
    "HermesParser",
    "McpServer",
    "PARSERS",
    "ParsedReply",
    "PlainParser",
    "Reply",
    "Said",
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
    "tool",
    "train_tokenizer",
]
