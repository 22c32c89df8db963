"""Chat templates: what the hub's may do, and what the sandbox keeps them from."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gymllm.errors import ModelError
from gymllm.message import Message, ToolCall
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


CALL = ToolCall(name="add", arguments={"a": 1, "é": ["<"]}, id="c1")
CALLING = [Message(role="user", content="?"), Message(role="assistant", tool_calls=(CALL,))]


def test_fields_are_given_as_the_hub_names_them():
    messages = [
        Message(role="assistant", content="x", reasoning="why", tool_calls=(CALL,)),
        Message(role="tool", content="2", tool_call_id="c1", name="add"),
    ]
    call: dict[str, object] = {"id": "c1", "type": "function"}
    call["function"] = {"name": "add", "arguments": {"a": 1, "é": ["<"]}}
    assert json.loads(render("{{ messages | tojson }}", messages)) == [
        {
            "role": "assistant",
            "content": "x",
            "reasoning_content": "why",
            "thinking": "why",
            "tool_calls": [call],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
    ]


def test_what_a_message_has_not_is_left_out():
    assert (
        render("{{ messages[0].keys() | list }}", [Message(role="user")]) == "['role', 'content']"
    )
    unnamed = Message(role="assistant", tool_calls=(ToolCall(name="f", arguments={}),))
    assert render("{{ messages[0].tool_calls[0].keys() | list }}", [unnamed]) == (
        "['type', 'function']"
    )


LOOP = "{% for m in messages %}{% for c in m.tool_calls %}%s{% endfor %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    "shown",
    [
        "{{ c.function.name }} {{ c.function.arguments | tojson }}",
        "{{ c.function.name + ' ' + c.function.arguments }}",
        "{{ c.function.name }} {{ c.function.arguments }}",
        "{{ c.function.name }} {% if m.content is none %}{{ c.function.arguments }}{% endif %}",
        "{{ c.function.name }} {% if m.content is string %}"
        "{{ c.function.arguments | tojson }}{% endif %}",
    ],
)
def test_arguments_come_in_the_form_that_the_template_takes(shown):
    text = render(LOOP.replace("%s", shown), CALLING)
    assert text.removesuffix("None") == '?add {"a": 1, "é": ["<"]}'


def test_a_template_without_calls_gets_no_strange_content():
    assert render("{% for m in messages %}[{{ m.content }}]{% endfor %}", CALLING) == "[?][]"


def test_tool_support_where_a_result_needs_its_call():
    source = """
{%- for t in tools or [] %}{{ t.function.name }}{% endfor %}
{%- for m in messages %}
  {%- if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}
    {{- raise_exception('no call') }}
  {%- endif %}
  {{- m.content }}
{%- endfor %}"""
    assert ChatTemplate(source).supports_tools()
    assert not ChatTemplate(source.replace("t.function.name", "''")).supports_tools()


PICTURE = Message(role="user", content="a\nb", parts=("a", np.zeros((1, 1, 3), np.uint8), "b"))


def test_images_are_parts_where_the_template_has_a_place_for_them():
    source = """
{%- for m in messages %}
  {%- if m.content is string %}{{ m.content }}{% else %}
    {%- for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}
  {%- endif %}
{%- endfor %}"""
    assert ChatTemplate(source).supports_images
    assert render(source, [*HELLO, PICTURE]) == "helloa<image>b"


@pytest.mark.parametrize("shown", ["m.content", "'x' + m.content", "m.role"])
def test_images_are_refused_where_they_would_be_lost_or_garbled(shown):
    source = "{% for m in messages %}{{ " + shown + " }}{% endfor %}"
    with pytest.raises(ModelError, match="no place for images"):
        render(source, [PICTURE])
    texts_alone = Message(role="user", content="a\nb", parts=("a", "b"))
    assert render(source, [texts_alone]) in ("a\nb", "xa\nb", "user")


def test_variables_of_a_render_go_before_the_templates_own():
    assert render("{{ bos_token }}{{ enable_thinking }}", enable_thinking=False) == "<s>False"
    assert render("{{ bos_token }}", bos_token="") == ""


def test_generation_blocks_change_no_text():
    source = "{% generation %}{{ messages[0].content }}{% endgeneration %}!"
    assert render(source) == "hello!"
    with pytest.raises(ModelError, match="not valid Jinja"):
        ChatTemplate("{% generation %}")
