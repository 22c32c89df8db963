"""Environments for language-model agents: written once, played, evaluated and trained on.

    gymllm  <-  gymllm_envs, gymllm_agents  <-  gymllm_trainers       (imports point left only)

    env.py, spaces.py       Env: async methods, a real gymnasium.Env; Unicode: the space of any text
    bridge.py               synchronous wrappers on an event loop, async environments without one
    event_loop.py           the loop of our commands, whose timers are fine
    adapters/               TextAdapter: any Gymnasium environment in text; gymllm/Gym-v0
    wrappers/, render.py    limits, transcripts, rubrics, few-shot; observations as pictures
    pool.py, workers/       EnvPool: many at once, no barrier; where they run, what happens when they break
    vector.py               its other face, a gymnasium.vector.VectorEnv
    task.py, ledger.py      what is played and with which seed; the exact tokens of a conversation
    engine.py, agent.py     protocols: token ids in, token ids out; observations in, actions out
    chat_engine.py          ... for servers that take messages (engines/openai.py), to evaluate
    team.py                 who plays, where an environment has several agents
    sandbox/                a work tree and processes apart from everything else
    trajectory.py           what an episode leaves behind
    timeline/               every span of a run
    tool_calls.py           calls of tools as actions of an environment; json_text.py, clip.py
    registration.py, errors.py, testing/, play.py

Importing it registers every installed environment with Gymnasium and brings neither JAX nor torch.
"""

from __future__ import annotations

from gymllm.adapters import TextAdapter as TextAdapter
from gymllm.adapters import textify as textify
from gymllm.agent import Action as Action
from gymllm.agent import Agent as Agent
from gymllm.agent import AgentFactory as AgentFactory
from gymllm.agent import EpisodeContext as EpisodeContext
from gymllm.engine import Engine as Engine
from gymllm.engine import FinishReason as FinishReason
from gymllm.engine import GenerateRequest as GenerateRequest
from gymllm.engine import Generation as Generation
from gymllm.engine import SamplingParams as SamplingParams
from gymllm.env import Env as Env
from gymllm.ledger import Segment as Segment
from gymllm.ledger import TokenLedger as TokenLedger
from gymllm.message import Message as Message
from gymllm.message import ToolCall as ToolCall
from gymllm.pool import EnvPool as EnvPool
from gymllm.pool import LeasedEnv as LeasedEnv
from gymllm.pool import Played as Played
from gymllm.registration import load_plugins
from gymllm.registration import make as make
from gymllm.spaces import Unicode as Unicode
from gymllm.task import ListedTasks as ListedTasks
from gymllm.task import SeededTasks as SeededTasks
from gymllm.task import Task as Task
from gymllm.task import TaskSource as TaskSource
from gymllm.team import Player as Player
from gymllm.team import Team as Team
from gymllm.timeline import Timeline as Timeline
from gymllm.tool_calls import ToolCalls as ToolCalls
from gymllm.tool_calls import ToolSchema as ToolSchema
from gymllm.tool_calls import check_call as check_call
from gymllm.tool_calls import read_calls as read_calls
from gymllm.tool_calls import write_calls as write_calls
from gymllm.trajectory import Ending as Ending
from gymllm.trajectory import Group as Group
from gymllm.trajectory import Trajectory as Trajectory
from gymllm.trajectory import Turn as Turn
from gymllm.workers import PoolStats as PoolStats
from gymllm.workers import StepResult as StepResult

__all__ = [
    "Action",
    "Agent",
    "AgentFactory",
    "Ending",
    "Engine",
    "Env",
    "EnvPool",
    "EpisodeContext",
    "FinishReason",
    "GenerateRequest",
    "Generation",
    "Group",
    "LeasedEnv",
    "ListedTasks",
    "Message",
    "Played",
    "Player",
    "PoolStats",
    "SamplingParams",
    "SeededTasks",
    "Segment",
    "StepResult",
    "Task",
    "TaskSource",
    "Team",
    "TextAdapter",
    "Timeline",
    "TokenLedger",
    "ToolCall",
    "ToolCalls",
    "ToolSchema",
    "Trajectory",
    "Turn",
    "Unicode",
    "check_call",
    "make",
    "read_calls",
    "textify",
    "write_calls",
]

load_plugins()
