"""The embedded JAX engine: continuous batching over fixed slots, in this process.

`slots` decides which tokens go into which cache rows (plain Python, no arrays); `programs` holds what is
compiled; `engine` is the thread that drives both and the async face in front of it.
"""

from gymllm_trainers.engine.config import EngineConfig as EngineConfig
from gymllm_trainers.engine.engine import JaxEngine as JaxEngine

__all__ = ["EngineConfig", "JaxEngine"]
