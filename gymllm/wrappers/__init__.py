"""Wrappers that language-model environments need and Gymnasium lacks.

All are `gymnasium.Wrapper`s: they stack with Gymnasium's own, under `gymnasium.make` and in the pool, and
`EnvSpec.to_json` knows them where their arguments are JSON.

    time_limit.py                   TimeLimit: truncates by turns, tokens or wall clock
    record_transcript.py            RecordTranscript: every episode as a JSON line and on a page
    retry_idempotent_reset.py       RetryIdempotentReset: tries a reset that raised again
    rubric.py, rubric_reward.py     Reward, Rubric: weighted reward functions; RubricReward applies them
    judge.py                        Judge: a reward function that asks a model
    few_shot.py, history.py         FewShot, History: what is put before observations
    prefix.py                       how both do it
"""

from __future__ import annotations

from gymllm.wrappers.few_shot import FewShot as FewShot
from gymllm.wrappers.history import History as History
from gymllm.wrappers.judge import Judge as Judge
from gymllm.wrappers.record_transcript import RecordTranscript as RecordTranscript
from gymllm.wrappers.retry_idempotent_reset import RetryIdempotentReset as RetryIdempotentReset
from gymllm.wrappers.rubric import Episode as Episode
from gymllm.wrappers.rubric import Move as Move
from gymllm.wrappers.rubric import Reward as Reward
from gymllm.wrappers.rubric import Rubric as Rubric
from gymllm.wrappers.rubric_reward import RubricReward as RubricReward
from gymllm.wrappers.time_limit import TimeLimit as TimeLimit

__all__ = [
    "Episode",
    "FewShot",
    "History",
    "Judge",
    "Move",
    "RecordTranscript",
    "RetryIdempotentReset",
    "Reward",
    "Rubric",
    "RubricReward",
    "TimeLimit",
]
