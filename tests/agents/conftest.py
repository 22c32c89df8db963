"""What the agents' tests share: a small tokenizer, templates of several habits, engines that record."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from gymllm.agent import AgentFactory, EpisodeContext
from gymllm.engine import Engine, FinishReason, GenerateRequest, Generation
from gymllm.engines import ScriptedEngine
from gymllm.timeline import Timeline
from gymllm_agents import Tokenizer, train_tokenizer

sys.path.append(str(Path(__file__).parent))  # for `from families import ...`

TEXTS = [
    "What is 12 + 7? The answer is 19.",
    "go left, go right, go up and go down <tool_call> </tool_call>",
    "user assistant system tool question answer <think> </think>",
]

PLAIN = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TRIMMING = PLAIN.replace("m.content", "(m.content | trim)")
THINKING = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
  {%- set text = m.content %}
  {%- if m.role == 'assistant' and loop.index0 < ns.last %}
    {%- set text = text.split('</think>')[-1].lstrip('\n') %}
  {%- endif %}
  {{- '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
MOVING = """
{%- for m in messages %}
  {%- if m.role != 'system' %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
    {{- m.content + '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
NUMBERING = PLAIN.replace(
    "m.content", "(loop.index ~ ': ' if m.role == 'user' else '') + m.content"
)
STRICT = """
{%- for m in messages %}
  {%- if m.role not in ('user', 'assistant') %}{{ raise_exception('no ' + m.role + ' role') }}{% endif %}
  {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TEMPLATES = {
    "plain": PLAIN,
    "trimming": TRIMMING,
    "thinking": THINKING,
    "moving": MOVING,
    "numbering": NUMBERING,
    "strict": STRICT,
}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, vocab_size=320)


@pytest.fixture(scope="session")
def with_template(tokenizer: Tokenizer) -> Callable[[str | None], Tokenizer]:
    """The same vocabulary with another template: a name of `TEMPLATES`, Jinja source, or None."""

    def make(name: str | None) -> Tokenizer:
        return Tokenizer(
            tokenizer.copy_backend(),
            chat_template=None if name is None else TEMPLATES.get(name, name),
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
        )

    return make


@dataclass
class RecordingEngine:
    """Answers with the ids it is given, in order; keeps what it was asked and what it said."""

    answers: list[Sequence[int]]
    context_length: int = 4096
    version: int = 0
    asked: list[GenerateRequest] = field(default_factory=list)
    said: list[list[int]] = field(default_factory=list)

    async def generate(self, request: GenerateRequest) -> Generation:
        await asyncio.sleep(0)
        limit = request.sampling.max_new_tokens
        ids = list(self.answers[len(self.said)])
        stops = request.sampling.stop_token_ids
        end = next((k + 1 for k, i in enumerate(ids) if i in stops), len(ids))
        ids = ids[: min(limit, end)]
        self.asked.append(request)
        self.said.append(ids)
        return Generation(
            token_ids=np.array(ids, np.int32),
            logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32),
            versions=np.full(len(ids), len(self.said), np.int32),
            finish_reason=FinishReason.STOP if ids[-1] in stops else FinishReason.LENGTH,
        )

    async def aclose(self) -> None:
        await asyncio.sleep(0)


@pytest.fixture
def recording() -> type[RecordingEngine]:
    return RecordingEngine


@pytest.fixture
def scripted(tokenizer: Tokenizer) -> Callable[..., ScriptedEngine]:
    """An engine that says these texts, one a generation."""

    def make(*texts: str, context_length: int = 4096) -> ScriptedEngine:
        left = iter(texts)
        return ScriptedEngine(
            lambda prompt, rng: next(left), tokenizer, context_length=context_length
        )

    return make


@pytest.fixture
def start() -> Callable[..., object]:
    """Makes an agent for one episode."""

    def make(
        factory: AgentFactory, engine: Engine, *, seed: int = 0, timeline: Timeline | None = None
    ):
        return factory(
            EpisodeContext(
                engine=engine, seed=seed, name="episodes/0.0", timeline=timeline or Timeline()
            )
        )

    return make
