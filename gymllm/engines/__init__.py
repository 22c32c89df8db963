"""Engines that the core brings along."""

from gymllm.engines.scripted import ScriptedEngine as ScriptedEngine
from gymllm.engines.scripted import TextCodec as TextCodec

__all__ = ["ScriptedEngine", "TextCodec"]
