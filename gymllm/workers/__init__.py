"""Where a pool's environments run: in the pool's own task, in threads, or in processes.

A `Slot` is one place of the pool: it holds a worker and deals with everything that can go wrong there. A
`WorkerSupply` makes workers, so many at a time, and keeps some ready.
"""

from gymllm.workers.inline import InlineWorker as InlineWorker
from gymllm.workers.limits import Limits as Limits
from gymllm.workers.limits import PoolStats as PoolStats
from gymllm.workers.process import EnvProcesses as EnvProcesses
from gymllm.workers.process import ProcessWorker as ProcessWorker
from gymllm.workers.slot import Slot as Slot
from gymllm.workers.slot import StepResult as StepResult
from gymllm.workers.supply import WorkerSupply as WorkerSupply
from gymllm.workers.thread import ThreadWorker as ThreadWorker
from gymllm.workers.watch import LoopWatch as LoopWatch
from gymllm.workers.worker import EnvFacts as EnvFacts
from gymllm.workers.worker import MakeEnv as MakeEnv
from gymllm.workers.worker import Worker as Worker

__all__ = [
    "EnvFacts",
    "EnvProcesses",
    "InlineWorker",
    "Limits",
    "LoopWatch",
    "MakeEnv",
    "PoolStats",
    "ProcessWorker",
    "Slot",
    "StepResult",
    "ThreadWorker",
    "Worker",
    "WorkerSupply",
]
