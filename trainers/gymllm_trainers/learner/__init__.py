"""The learner: owns the policy's parameters, takes groups, gives new weights.

learner.py              when a gradient is computed and a step taken
config.py               what a batch is made of, and how it is computed
reader.py, sequences.py groups to rewards, advantages, sequences; values.py where a value head has a say
programs.py             what is computed of a micro-batch, as pure functions; compiled.py calls them
memory.py               what a program needs, and what to change where that is too much
metrics.py              what a batch says of itself
"""

from gymllm_trainers.learner.config import LearnerConfig as LearnerConfig
from gymllm_trainers.learner.learner import Learner as Learner
from gymllm_trainers.learner.learner import LearnerState as LearnerState

__all__ = ["Learner", "LearnerConfig", "LearnerState"]
