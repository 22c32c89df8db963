"""The section `reward` of a run's settings."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from gymllm.errors import ConfigError

POLICY = "policy"
OPENAI = "openai:"


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What scores an episode when it has ended, beside its environment."""

    kind: Literal["environment", "function", "judge", "model"] = "environment"
    """environment: its own reward alone; function: a Python function of the trajectory; judge: a language
    model is asked; model: a reward model of the hub, a decoder with one label."""
    function: str = ""
    """function: where it is, "module:name"; it takes a `Trajectory`, returns a number, and may be async."""
    model: str = ""
    """model: its folder or hub name. judge: "policy" for the weights that are trained, as they are now; a
    folder, hub name or .gguf file; or "openai:NAME", a model of a chat-completions server."""
    url: str = ""
    """judge openai:NAME: the server, up to what is before /chat/completions. The key is OPENAI_API_KEY."""
    question: str = ""
    """judge: what makes an episode good, in the words of the prompt."""
    answer: Literal["text", "grammar", "choices"] = "text"
    """judge: text: what it likes, "Score: 0.7" on its last line; grammar: it is held to a sentence and that
    line; choices: to the line alone, in tenths. A server's model can't be held to anything."""
    max_new_tokens: int = 512
    """judge: most tokens of an answer."""
    tries: int = 3
    """judge: answers asked for before the episode fails."""
    weight: float = 1.0
    """What the score is multiplied by."""
    combine: Literal["add", "replace"] = "add"
    """add: to the environment's reward; replace: in its place."""
    timeout_s: float = 120.0
    """Longest that a score may take; past it the episode has failed."""
    rows: int = 4
    """model: rows that are scored at once."""
    row_tokens: int = 4096
    """model: tokens of a row; the longest episode that can be scored."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "tries", "rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"reward.{name} must be >= 1, got {getattr(self, name)}.")
        if self.row_tokens < 2:
            raise ConfigError(f"reward.row_tokens must be >= 2, got {self.row_tokens}.")
        if not self.timeout_s > 0:
            raise ConfigError(f"reward.timeout_s must be > 0, got {self.timeout_s}.")
        if not math.isfinite(self.weight) or self.weight == 0:
            raise ConfigError(
                f"reward.weight must be a finite number other than 0, got {self.weight}."
            )
        self._check_used()
        if self.kind == "function":
            module, colon, name = self.function.partition(":")
            if not (module and colon and name):
                raise ConfigError(f'reward.function must be "module:name", got {self.function!r}.')
        if self.kind in ("judge", "model") and not self.model:
            raise ConfigError(f"reward.kind {self.kind} needs reward.model, got none.")
        if self.kind == "judge" and not self.question.strip():
            raise ConfigError("reward.question must say what makes an episode good, got none.")
        server = self.model.startswith(OPENAI)
        if self.model == OPENAI:
            raise ConfigError(
                "reward.model openai: needs the server's name of the model behind the colon."
            )
        if server and self.kind == "model":
            raise ConfigError(
                f"reward.kind model is scored here, but reward.model is {self.model}."
            )
        if server and self.answer != "text":
            raise ConfigError(
                f"reward.answer {self.answer} is for a judge whose tokens are sampled here, but "
                f"reward.model is {self.model}. Set it to text."
            )
        if self.url and not server:
            raise ConfigError(f"reward.url is for reward.model openai:NAME, got {self.model!r}.")

    def _check_used(self) -> None:
        """Refuses a setting that another kind has: it would be ignored without a word."""
        scored = ("function", "judge", "model")
        kinds = {
            "function": ("function",),
            "model": ("judge", "model"),
            "url": ("judge",),
            "question": ("judge",),
            "answer": ("judge",),
            "max_new_tokens": ("judge",),
            "tries": ("judge",),
            "weight": scored,
            "combine": scored,
            "timeout_s": scored,
            "rows": ("model",),
            "row_tokens": ("model",),
        }
        for field in dataclasses.fields(self):
            own = kinds.get(field.name)
            value = getattr(self, field.name)
            if own is not None and value != field.default and self.kind not in own:
                raise ConfigError(
                    f"reward.{field.name} is {value!r}, but reward.kind is {self.kind}; it is for "
                    f"{' and '.join(own)}. Set reward.kind, or leave it out."
                )
