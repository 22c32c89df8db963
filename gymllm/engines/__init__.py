"""Engines that the core brings along."""

from gymllm.engines.openai import OpenAIEngine as OpenAIEngine
from gymllm.engines.scripted import ScriptedEngine as ScriptedEngine
from gymllm.engines.scripted import TextCodec as TextCodec

__all__ = ["OpenAIEngine", "ScriptedEngine", "TextCodec"]
