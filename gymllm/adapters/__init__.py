"""Any Gymnasium environment in text: `TextAdapter`, and `gymllm/Gym-v0` by id.

    text_adapter.py   TextAdapter: the environment; textify
    describe.py       an observation as text, or as an image where nothing else is possible
    parse.py          a text as an action
    masks.py          which actions are possible now
    registry.py       what is known of some environments: how they look, what actions are called, rules
    gym_env.py        gymllm/Gym-v0

The describers that ship are in `gymllm_envs.describers`; `register_describer` adds others.
"""

from gymllm.adapters.describe import AnyEnv as AnyEnv
from gymllm.adapters.describe import AnySpace as AnySpace
from gymllm.adapters.describe import Describe as Describe
from gymllm.adapters.describe import Describer as Describer
from gymllm.adapters.describe import describe_value as describe_value
from gymllm.adapters.describe import describer_for as describer_for
from gymllm.adapters.describe import mark_highlights as mark_highlights
from gymllm.adapters.describe import needed_render_mode as needed_render_mode
from gymllm.adapters.parse import AnswerRule as AnswerRule
from gymllm.adapters.parse import Parse as Parse
from gymllm.adapters.parse import how_to_answer as how_to_answer
from gymllm.adapters.parse import parser_for as parser_for
from gymllm.adapters.registry import Description as Description
from gymllm.adapters.registry import action_names_for as action_names_for
from gymllm.adapters.registry import description_for as description_for
from gymllm.adapters.registry import register_describer as register_describer
from gymllm.adapters.text_adapter import TextAdapter as TextAdapter
from gymllm.adapters.text_adapter import is_text_env as is_text_env
from gymllm.adapters.text_adapter import textify as textify

__all__ = [
    "AnswerRule",
    "AnyEnv",
    "AnySpace",
    "Describe",
    "Describer",
    "Description",
    "Parse",
    "TextAdapter",
    "action_names_for",
    "describe_value",
    "describer_for",
    "description_for",
    "how_to_answer",
    "is_text_env",
    "mark_highlights",
    "needed_render_mode",
    "parser_for",
    "register_describer",
    "textify",
]
