"""The learner on recorded groups, in a process of its own as its peers are.

python trainer_ours.py MODEL_FOLDER GROUPS.jsonl ROWS ROW_TOKENS [SETTING=VALUE ...]: GROUPS.jsonl holds
trajectories, `GROUP` of them a group; settings are of LearnerConfig. Only its public interface is used.
"""

from __future__ import annotations

import ast
import resource
import sys
import time
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from peers.answering import answer
from trainer_trace import read_groups

from gymllm.trajectory import Group
from gymllm_trainers.learner import Learner, LearnerConfig
from gymllm_trainers.memory import keep_freed_memory
from gymllm_trainers.models import Decoder, load_model
from gymllm_trainers.optimizer import OptimizerConfig


def new_learner(
    decoder: Decoder,
    *,
    rows: int,
    row_tokens: int,
    mesh: Mesh | None = None,
    learning_rate: float = 1e-5,
    **settings: object,
) -> Learner:
    """A learner as the benchmarks use it; the step is the caller's to take.

    The learning rate is so small that a trace stays good for some steps; peers have the same.
    """
    return Learner(
        decoder,
        LearnerConfig(rows=rows, **settings),  # type: ignore[arg-type]  # a benchmark's own settings
        optimizer=OptimizerConfig(learning_rate=learning_rate),
        row_tokens=row_tokens,
        temperature=1.0,
        max_lag=10**6,  # the trace is of version 0, however many steps were taken since
        mesh=mesh,
    )


class Ours:
    """One learner."""

    def __init__(self, learner: Learner, groups: list[Group]) -> None:
        learner.compile()
        self.learner, self.groups = learner, groups

    def step(self, groups: list[int]) -> dict[str, Any]:
        """One optimizer step on groups of the trace."""
        started = time.perf_counter()
        for index in groups:
            self.learner.add_group(self.groups[index])
        metrics = self.learner.step()
        jax.block_until_ready(self.learner.state.trainable)
        seconds = time.perf_counter() - started
        tokens = metrics["train_tokens"]
        return {
            "seconds": seconds,
            "trained": metrics["trained_tokens"],
            "tokens": tokens,
            "computed": tokens / (1 - metrics["padding_share"]),
            "gap": metrics["logprob_gap_mean"],
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def main(folder: str, trace: str, rows: str, row_tokens: str, *settings: str) -> Ours:
    """The learner that the command line asks for."""
    keep_freed_memory()  # as gymllm-train does
    given = (setting.split("=", 1) for setting in settings)
    learner = new_learner(
        load_model(folder).decoder(),
        rows=int(rows),
        row_tokens=int(row_tokens),
        **{name: ast.literal_eval(value) for name, value in given},
    )
    return Ours(learner, read_groups(Path(trace)))


if __name__ == "__main__":
    answer({"step": main(*sys.argv[1:]).step})
