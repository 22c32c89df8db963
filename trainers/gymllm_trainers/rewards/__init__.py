"""Reward models: what scores a finished episode beside, or instead of, its environment.

reward_model    the protocol: a trajectory in, a number out
config          the section `reward` of a run's settings
function        any Python function of a trajectory
judge           a language model that is asked, through an engine of tokens or of messages
score_model     a decoder with a linear head of one label, from the hub
opening         makes the one that the settings ask for
apply           puts its scores into trajectories, before they are grouped
"""

from gymllm_trainers.rewards.apply import apply_rewards as apply_rewards
from gymllm_trainers.rewards.config import RewardConfig as RewardConfig
from gymllm_trainers.rewards.function import FunctionReward as FunctionReward
from gymllm_trainers.rewards.judge import JudgeReward as JudgeReward
from gymllm_trainers.rewards.opening import open_reward as open_reward
from gymllm_trainers.rewards.reward_model import RewardModel as RewardModel
from gymllm_trainers.rewards.score_model import ScoreModel as ScoreModel
from gymllm_trainers.rewards.score_model import load_score_model as load_score_model

__all__ = [
    "FunctionReward",
    "JudgeReward",
    "RewardConfig",
    "RewardModel",
    "ScoreModel",
    "apply_rewards",
    "load_score_model",
    "open_reward",
]
