"""Algorithms: how rewards become a gradient, as pure functions of arrays.

    config.py, resolve.py    settings over a preset, checked; algorithm.py: the presets, and what comes out
    advantages.py            rewards to advantages, on the host; turn_advantages.py: of turns and of tokens
    lengths.py               the penalty and the filter of episodes that are too long
    aggregation.py           weight of a token, divisor of a step
    losses.py                policy loss of a token, and the value loss
    corrections.py           what is done about tokens of other policies
    kl.py                    estimates of the KL divergence
    objective.py             a micro-batch's loss, of all of these; diagnostics.py: what it says of itself

Axes: P groups, G members of a group, S turns of an episode, N targets (trained tokens of one micro-batch).
"""

from gymllm_trainers.algorithms.advantages import ADVANTAGES as ADVANTAGES
from gymllm_trainers.algorithms.algorithm import Algorithm as Algorithm
from gymllm_trainers.algorithms.config import AlgorithmConfig as AlgorithmConfig
from gymllm_trainers.algorithms.objective import Objective as Objective
from gymllm_trainers.algorithms.objective import Targets as Targets
from gymllm_trainers.algorithms.objective import objective as objective
from gymllm_trainers.algorithms.resolve import resolve as resolve

__all__ = [
    "ADVANTAGES",
    "Algorithm",
    "AlgorithmConfig",
    "Objective",
    "Targets",
    "objective",
    "resolve",
]
