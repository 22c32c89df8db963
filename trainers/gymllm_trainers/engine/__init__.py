"""The embedded JAX engine: continuous batching on a paged cache, in this process.

`scheduler` and `pages` decide what the next step computes (plain Python, no arrays); `batch` writes it
down for the device; `programs` holds what is compiled, of `paged_attention`, `sampling` and, on a CPU,
`kernels`; `engine` is the thread that drives them and the async face in front of it; `publication` checks
new weights; `replicas` are several engines as one.
"""

from gymllm_trainers.engine.config import EngineConfig as EngineConfig
from gymllm_trainers.engine.engine import EngineCounts as EngineCounts
from gymllm_trainers.engine.engine import JaxEngine as JaxEngine
from gymllm_trainers.engine.replicas import EmbeddedEngine as EmbeddedEngine
from gymllm_trainers.engine.replicas import Replicas as Replicas
from gymllm_trainers.engine.replicas import open_engine as open_engine
from gymllm_trainers.engine.tickets import Delta as Delta

__all__ = [
    "Delta",
    "EmbeddedEngine",
    "EngineConfig",
    "EngineCounts",
    "JaxEngine",
    "Replicas",
    "open_engine",
]
