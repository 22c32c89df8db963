"""What the families' own chat templates write of a call, the parser reads back.

The templates are other people's and not in this repository: scripts/fetch_tokenizers.py fetches them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import jinja2
import pytest
from families import hub_templates
from jinja2.ext import loopcontrols
from jinja2.sandbox import SandboxedEnvironment

from gymllm import ToolCall
from gymllm_agents import Said, make_parser

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "exact": {"type": "boolean"},
    "where": {"type": "array", "items": {"type": "object"}},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["text"]}
TOOL = {
    "type": "function",
    "function": {"name": "find", "description": "Finds.", "parameters": PARAMETERS},
}
ARGUMENTS = [
    {"text": 'a "b"\n\té 5 \\ </x>', "count": -3, "exact": True, "where": [{"b": [1.5, "x"]}]},
    {"text": "5", "exact": False},
    {},
]
THOUGHT = "First, find."
OPENED = (
    *("<think>\n", "<think>", "<think>\n</think>", "<think></think>"),
    "<|channel>thought\n<channel|>",
)
"""What a prompt may end with; some templates write it otherwise when the answer is known."""

# The template, its parser, what it writes behind an assistant's turn, and what it can't write:
# "many" calls, a "thought", "text" beside a call.
TEMPLATES = [
    ("Qwen-Qwen2.5-7B-Instruct", "qwen", "<|im_end|>", "thought"),
    ("Qwen-Qwen3-0.6B", "qwen", "<|im_end|>", ""),
    ("Qwen-QwQ-32B", "qwen", "<|im_end|>", "thought"),
    ("Qwen3-Coder", "qwen", "<|im_end|>", "thought"),
    ("Qwen3.5-4B", "qwen", "<|im_end|>", ""),
    ("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "hermes", "<|im_end|>", "thought text"),
    ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "hermes", "<|im_end|>", "thought text"),
    ("GLM-4.6", "glm", "", ""),
    ("GLM-4.7-Flash", "glm", "", ""),
    ("moonshotai-Kimi-K2", "kimi", "<|im_end|>", "thought"),
    ("Kimi-K2-Instruct", "kimi", "<|im_end|>", "thought"),
    ("Kimi-K2-Thinking", "kimi", "<|im_end|>", ""),
    ("deepseek-ai-DeepSeek-V3.1", "deepseek", "<｜end▁of▁sentence｜>", "thought"),
    ("deepseek-ai-DeepSeek-V3.2", "deepseek", "<｜end▁of▁sentence｜>", "thought"),
    ("deepseek-ai-DeepSeek-V4", "deepseek", "<｜end▁of▁sentence｜>", "thought"),
    ("llama-cpp-deepseek-r1", "deepseek", "<｜end▁of▁sentence｜>", "thought text"),
    ("mistralai-Mistral-Nemo-Instruct-2407", "mistral", "</s>", "thought text"),
    ("Mistral-Small-3.2-24B-Instruct-2506", "mistral", "</s>", "thought text"),
    ("unsloth-mistral-Devstral-Small-2507", "mistral", "</s>", "thought"),
    ("mistralai-Ministral-3-14B-Reasoning-2512", "mistral", "</s>", "thought"),
    ("meta-llama-Llama-3.1-8B-Instruct", "llama", "<|eot_id|>", "many thought text"),
    ("meta-llama-Llama-3.2-3B-Instruct", "llama", "<|eot_id|>", "many thought text"),
    ("meta-llama-Llama-3.3-70B-Instruct", "llama", "<|eot_id|>", "many thought text"),
    ("openai-gpt-oss-120b", "gpt-oss", "<|call|>", "many text"),
    ("google-gemma-4-31B-it", "gemma", "<|tool_response>", "text"),
]


def render(source: str, messages: list[dict[str, object]], *, prompt: bool) -> str:
    environment = SandboxedEnvironment(  # not immutable: Kimi's appends to lists
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: form)
    return environment.from_string(source).render(
        messages=messages,
        tools=[TOOL],
        add_generation_prompt=prompt,
        bos_token="",
        eos_token="</s>",
    )


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    if isinstance(value, Iterator):  # of jinja2's `map`
        value = list(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


@pytest.mark.parametrize(("template", "name", "stop", "cannot"), TEMPLATES)
@pytest.mark.parametrize("wanted", ["one", "many", "thought", "text"])
def test_what_a_template_writes_is_read_back(template, name, stop, cannot, wanted):
    if wanted in cannot.split():
        pytest.skip("not in this template")
    source = hub_templates()[template]
    arguments = ARGUMENTS if wanted == "many" else ARGUMENTS[:1]
    calls = [
        {
            "id": f"call{index:05}",
            "type": "function",
            "function": {"name": "find", "arguments": dict(each)},
        }
        for index, each in enumerate(arguments)
    ]
    answer: dict[str, object] = {"role": "assistant", "content": "", "tool_calls": calls}
    if wanted == "text":
        answer["content"] = "I look."
    if wanted == "thought":
        answer |= {"reasoning_content": THOUGHT, "thinking": THOUGHT}
    question: dict[str, object] = {"role": "user", "content": "Find it."}
    prompt = render(source, [question], prompt=True)
    for opened in OPENED:
        prompt = prompt.removesuffix(opened)
    whole = render(source, [question, answer], prompt=False)
    assert whole.startswith(prompt.rstrip("\n"))
    said = whole[len(prompt.rstrip("\n")) :].removeprefix("</think>")  # closes what a prompt opens
    text = said[: said.rindex(stop)] if stop else said

    reply = make_parser(name, [TOOL]).parse(Said(text=text))

    found = [call.arguments if isinstance(call, ToolCall) else call for call in reply.calls]
    assert found == arguments
    assert {call.name for call in reply.calls} == {"find"}
    assert reply.text == answer["content"]
    assert reply.reasoning == (THOUGHT if wanted == "thought" else "")
