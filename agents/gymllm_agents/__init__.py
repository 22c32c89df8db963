"""Agents of gymllm: observations to messages, messages to exact tokens, tokens to actions.

tokenizer, chat_template    the model's own files
chat_format                 what each turn adds, in ids
conversation                the ledger at work, and the plain agent
"""

from gymllm_agents.chat_format import ChatFormat as ChatFormat
from gymllm_agents.chat_template import ChatTemplate as ChatTemplate
from gymllm_agents.conversation import Conversation as Conversation
from gymllm_agents.conversation import ConversationAgent as ConversationAgent
from gymllm_agents.conversation import ConversationConfig as ConversationConfig
from gymllm_agents.tokenizer import Tokenizer as Tokenizer
from gymllm_agents.tokenizer_training import train_tokenizer as train_tokenizer

__all__ = [
    "ChatFormat",
    "ChatTemplate",
    "Conversation",
    "ConversationAgent",
    "ConversationConfig",
    "Tokenizer",
    "train_tokenizer",
]
