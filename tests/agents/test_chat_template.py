"""Chat templates: what the hub's may do, and what the sandbox keeps them from."""

from __future__ import annotations

import pytest

from gymllm.errors import ModelError
from gymllm.message import Message
from gymllm_agents import ChatTemplate
from gymllm_agents.chatml import CHATML_TEMPLATE

HELLO = [Message(role="user", content="hello")]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def render(source: str, messages=HELLO, **options) -> str:
    return ChatTemplate(source, variables={"bos_token": "<s>"}).render(
        messages, **{"add_generation_prompt": False, **options}
    )


def test_the_hubs_constructs_render():
    source = """
{%- for m in messages %}
    {%- if loop.index > 1 %}{% break %}{% endif %}
    {{- bos_token + m['role'] + ': ' + m.content }}
{%- endfor %}
{%- if tools is defined and tools is not none %}{{ tools | tojson }}{% endif %}"""
    assert render(source, HELLO * 3) == "<s>user: hello"


def test_tojson_leaves_letters_and_marks_alone():
    assert render("{{ messages[0].content | tojson }}", [Message(role="user", content="é<'>")]) == (
        '"é<\'>"'
    )
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


def test_strftime_now_is_there():
    assert len(render("{{ strftime_now('%Y') }}")) == 4


def test_a_refusal_names_roles_and_reason():
    with pytest.raises(ModelError, match=r"roles \[user\]: no thanks"):
        render("{{ raise_exception('no thanks') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{% include '/etc/passwd' %}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_the_sandbox_holds(source):
    with pytest.raises(ModelError, match="refuses"):
        render(source)


def test_source_that_is_not_jinja_is_refused():
    with pytest.raises(ModelError, match="not valid Jinja"):
        ChatTemplate("{% for %}")


def test_tool_support_is_found_by_a_trial(with_template):
    assert ChatTemplate(CHATML_TEMPLATE).supports_tools()
    assert with_template("thinking").template.supports_tools()
    for name in ("plain", "strict"):
        assert not with_template(name).template.supports_tools()


def test_our_template_renders_tools_calls_and_results():
    messages = [
        Message(role="system", content="Be brief."),
        Message(role="user", content=" hi "),
        Message(role="assistant", content="x"),
        Message(role="tool", content="1"),
        Message(role="tool", content="2"),
    ]
    text = render(CHATML_TEMPLATE, messages, tools=[TOOL], add_generation_prompt=True)
    head, _, tail = text.partition("<|im_end|>\n")
    assert head.startswith("<|im_start|>system\nBe brief.\n\n")
    assert '\n{"type": "function", "function": {"name": "add"' in head
    assert tail == (
        "<|im_start|>user\n hi <|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_our_template_adds_nothing_of_its_own():
    text = "<|im_start|>user\nhello<|im_end|>\n"
    assert render(CHATML_TEMPLATE) == text
    assert render(CHATML_TEMPLATE, []) == ""
