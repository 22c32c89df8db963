"""Where a pool's environments run: in the pool's own task (`InlineWorker`) or in threads (`ThreadWorker`).

A `Slot` is one place of the pool: it holds a worker and deals with everything that can go wrong there.
"""

from gymllm.workers.inline import InlineWorker as InlineWorker
from gymllm.workers.slot import Limits as Limits
from gymllm.workers.slot import PoolStats as PoolStats
from gymllm.workers.slot import Slot as Slot
from gymllm.workers.slot import StepResult as StepResult
from gymllm.workers.thread import ThreadWorker as ThreadWorker
from gymllm.workers.worker import MakeEnv as MakeEnv
from gymllm.workers.worker import Worker as Worker

__all__ = [
    "InlineWorker",
    "Limits",
    "MakeEnv",
    "PoolStats",
    "Slot",
    "StepResult",
    "ThreadWorker",
    "Worker",
]
