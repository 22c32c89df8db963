"""What each family writes, and what is read of it; short copies of what the real templates render."""

from __future__ import annotations

import pytest

from gymllm import ToolCall
from gymllm_agents import ParsedReply, Said, UnreadableCall, make_parser

SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Finds.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "where": {"anyOf": [{"type": "array"}, {"$ref": "#/$defs/Place"}]},
                    "note": {"type": ["string", "null"]},
                },
                "$defs": {"Place": {"type": "object"}},
            },
        },
    }
]
FIND = ToolCall(name="find", arguments={"text": "5", "count": 2})
NOW = ToolCall(name="now", arguments={})


def call(name: str = "find", id: str = "", **arguments: object) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, id=id)


def read(name: str, text: str) -> ParsedReply:
    return make_parser(name, SCHEMAS).parse(Said(text=text))


QWEN_TAGS = (
    "<tool_call>\n<function=find>\n<parameter=text>\n5\n</parameter>\n<parameter=count>\n2\n"
    "</parameter>\n</function>\n</tool_call>"
)
HERMES_CALL = '<tool_call>\n{"name": "find", "arguments": {"text": "5", "count": 2}}\n</tool_call>'
GLM = (
    "<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>5</arg_value>\n"
    "<arg_key>count</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>"
    '{"text": "5", "count": 2}<|tool_call_end|><|tool_calls_section_end|>'
)
DEEPSEEK_V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n"
    '{"text": "5", "count": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
DEEPSEEK_SECTION = len("<｜tool▁calls▁begin｜>")
DEEPSEEK_V31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{"text": "5", "count": 2}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="find">\n'
    '<｜DSML｜parameter name="text" string="true">5</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="count" string="false">2</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)
MISTRAL_LIST = (
    '[TOOL_CALLS][{"name": "find", "arguments": {"text": "5", "count": 2}, "id": "abcdefghi"}]'
)
MISTRAL = '[TOOL_CALLS]find[CALL_ID]abcdefghi[ARGS]{"text": "5", "count": 2}'
HARMONY = (
    "<|channel|>commentary to=functions.find <|constrain|>json<|message|>"
    '{"text": "5", "count": 2}<|call|>'
)
HARMONY_EARLY = (
    ' to=functions.find<|channel|>commentary json<|message|>{"text": "5", "count": 2}<|call|>'
)
LLAMA = '{"name": "find", "parameters": {"text": "5", "count": 2}}'
GEMMA_CODE = '```tool_code\nfind(text="5", count=2)\n```'
FUNCTION_GEMMA = "<start_function_call>call:find{text:<escape>5<escape>,count:2}<end_function_call>"
GEMMA_4 = '<|tool_call>call:find{count:2,text:<|"|>5<|"|>}<tool_call|>'
JSON = '{"name": "find", "arguments": {"text": "5", "count": 2}}'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", HERMES_CALL),
        ("qwen", HERMES_CALL),
        ("qwen", QWEN_TAGS),
        ("qwen", QWEN_TAGS.removesuffix("</tool_call>")),
        ("qwen", QWEN_TAGS.removeprefix("<tool_call>\n")),
        ("qwen", QWEN_TAGS.replace("</function>\n", "")),
        ("qwen", QWEN_TAGS.replace("\n", "")),
        ("glm", GLM),
        ("glm", GLM.replace("\n", "")),
        ("deepseek", DEEPSEEK_V3),
        ("deepseek", DEEPSEEK_V31),
        ("deepseek", DSML),
        ("deepseek", DSML.replace("function_calls", "tool_calls")),
        ("deepseek", DSML.replace(' string="true"', "")),
        ("deepseek", DEEPSEEK_V3.replace("```<", "```\n<")),
        ("deepseek", DEEPSEEK_V31.removesuffix("<｜tool▁call▁end｜><｜tool▁calls▁end｜>")),
        ("mistral", MISTRAL_LIST.replace(', "id": "abcdefghi"', "")),
        ("mistral", MISTRAL.replace("[CALL_ID]abcdefghi", "")),
        ("mistral", MISTRAL.replace("[CALL_ID]abcdefghi[ARGS]", "")),
        ("gpt-oss", HARMONY),
        ("gpt-oss", HARMONY.removesuffix("<|call|>")),
        ("gpt-oss", HARMONY_EARLY),
        ("gpt-oss", "<|start|>assistant" + HARMONY_EARLY),
        ("gpt-oss", HARMONY.replace("functions.", "")),
        ("llama", LLAMA),
        ("llama", f"<|python_tag|>{LLAMA}"),
        ("llama", f"  {LLAMA}\n"),
        ("llama", LLAMA.replace("parameters", "arguments")),
        ("llama", LLAMA.replace("{", '{"type": "function", ', 1)),
        ("llama", '<function=find>{"text": "5", "count": 2}</function>'),
        ("llama", '<|python_tag|>find.call(text="5", count=2)'),
        ("gemma", GEMMA_CODE),
        ("gemma", GEMMA_CODE.replace("find(", "print(find(").replace("2)", "2))")),
        ("gemma", "```tool_code\nfind('5', 2,)\n```"),
        ("gemma", "```tool_code\n[find(text='5', count=2)]\n```"),
        ("gemma", "[find(text='5', count=2)]"),
        ("gemma", f"```json\n{LLAMA}\n```"),
        ("gemma", f"```tool_call\n{LLAMA}\n```"),
        ("gemma", LLAMA),
        ("gemma", FUNCTION_GEMMA),
        ("gemma", GEMMA_4),
        ("json", JSON),
        ("json", f"[{JSON}]"),
        ("json", LLAMA),
        ("json", f"```json\n{JSON}\n```"),
        ("json", f"```json\n[{JSON}]\n```"),
        ("json", JSON.replace('{"text": "5", "count": 2}', r'"{\"text\": \"5\", \"count\": 2}"')),
    ],
)
def test_one_call(name, text):
    assert read(name, text) == ParsedReply(text="", calls=(FIND,))


ID = "abcdefghi"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", f"Hm. {HERMES_CALL}\n{HERMES_CALL}", ("Hm.", FIND, FIND)),
        ("qwen", f"Hm.\n\n{QWEN_TAGS}\n{HERMES_CALL} Well.", ("Hm.\n\n\n Well.", FIND, FIND)),
        ("qwen", "Write <function=f>.", ("Write <function=f>.",)),
        ("qwen", "<tool_call>\n<function=now>\n</function>\n</tool_call>", ("", NOW)),
        ("glm", f"\nHm.\n{GLM}\n{GLM}", ("Hm.", FIND, FIND)),
        ("glm", "<tool_call>now</tool_call>", ("", NOW)),
        ("kimi", f"Hm.{KIMI}", ("Hm.", call(text="5", count=2, id="functions.find:0"))),
        (
            "kimi",
            KIMI.replace("functions.find:0", "find"),
            ("", call(text="5", count=2, id="find")),
        ),
        (
            "kimi",
            "<|tool_call_begin|>functions.a:b:12<|tool_call_argument_begin|>{}<|tool_call_end|>",
            ("", call("a:b", id="functions.a:b:12")),
        ),
        ("deepseek", f"Hm.{DEEPSEEK_V31}", ("Hm.", FIND)),
        (
            "deepseek",
            DEEPSEEK_V3.replace("<｜tool▁calls▁end｜>", f"\n{DEEPSEEK_V3[DEEPSEEK_SECTION:]}"),
            ("", FIND, FIND),
        ),
        ("mistral", MISTRAL_LIST, ("", call(text="5", count=2, id=ID))),
        ("mistral", f"Hm.{MISTRAL}" * 2, ("Hm.Hm.", *[call(text="5", count=2, id=ID)] * 2)),
        ("mistral", f"[TOOL_CALLS][{JSON}, {JSON}] So.", ("So.", FIND, FIND)),
        (
            "gpt-oss",
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + HARMONY,
            ("I look.", FIND),
        ),
        ("gpt-oss", "<|channel|>final<|message|>42<|return|>", ("42",)),
        ("gpt-oss", "42", ("42",)),
        ("llama", f"{LLAMA}; {LLAMA}", ("", FIND, FIND)),
        ("llama", f"{LLAMA}\n{LLAMA}\nDone.", ("Done.", FIND, FIND)),
        ("llama", f"I call {LLAMA}", (f"I call {LLAMA}",)),
        ("llama", '{"answer": 42}', ('{"answer": 42}',)),
        ("llama", "{not JSON", ("{not JSON",)),
        ("llama", '{"name": "Ann"}', ('{"name": "Ann"}',)),
        ("gemma", f"Hm.\n{GEMMA_CODE}\nWell.", ("Hm.\n\nWell.", FIND)),
        ("gemma", "```tool_code\nnow()\nfind('5', count=2)\n```", ("", NOW, FIND)),
        ("gemma", f"{FUNCTION_GEMMA}{FUNCTION_GEMMA}", ("", FIND, FIND)),
        ("gemma", "<|tool_call>call:now{}<tool_call|>", ("", NOW)),
        ("gemma", "```python\nfind()\n```", ("```python\nfind()\n```",)),
        ("gemma", "[1, 2]", ("[1, 2]",)),
        ("gemma", "[see(this)]", ("[see(this)]",)),
        ("json", f"Hm.\n```json\n{JSON}\n```\nSo.", ("Hm.\n\nSo.", FIND)),
        ("json", '```json\n{"a": 1}\n```', ('```json\n{"a": 1}\n```',)),
        ("json", f"```\n{JSON}\n```", (f"```\n{JSON}\n```",)),
        ("json", f"[{JSON}, {JSON}]", ("", FIND, FIND)),
        ("json", '[{"name": "Ann"}]', ('[{"name": "Ann"}]',)),
        ("json", "[]", ("[]",)),
    ],
)
def test_calls_and_text(name, text, expected):
    content, *calls = expected
    assert read(name, text) == ParsedReply(text=content, calls=tuple(calls))


@pytest.mark.parametrize("name", ["qwen", "glm"])
@pytest.mark.parametrize(
    ("argument", "written", "value"),
    [
        ("text", "5", "5"),
        ("text", '"5"', '"5"'),
        ("text", "  a\n\n b ", "  a\n\n b "),
        ("text", "", ""),
        ("text", "<b>x</b> & </i>", "<b>x</b> & </i>"),
        ("text", "a </parameter> b </arg_value> c", "a </parameter> b </arg_value> c"),
        ("count", "5", 5),
        ("count", " 5 ", 5),
        ("exact", "true", True),
        ("exact", "False", False),
        ("where", '[1, {"a": null}]', [1, {"a": None}]),
        ("where", '{"a": 1}', {"a": 1}),
        ("note", "null", None),
        ("note", "x", "x"),
        ("unknown", "5", "5"),
    ],
)
def test_values_between_tags_are_of_the_schemas_types(name, argument, written, value):
    qwen = f"<tool_call>\n<function=find>\n<parameter={argument}>\n{written}\n</parameter>\n</function>"
    glm = f"<tool_call>find\n<arg_key>{argument}</arg_key>\n<arg_value>{written}</arg_value>\n"
    (found,) = read(name, f"{qwen if name == 'qwen' else glm}\n</tool_call>").calls
    assert found == call(**{argument: value})


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'a' \"b\"", "ab"),
        (r"'\x41\u00e9\n\d\'\101'", "Aé\n\\d'A"),
        (r"r'\n'", r"\n"),
        ('"""a\n"b" """', 'a\n"b" '),
        ("'''it's'''", "it's"),
        ("-1.5e3", -1500.0),
        ("[1, (2, 3), {'a': None,}, []]", [1, [2, 3], {"a": None}, []]),
        ("(1)", 1),
        ("true", True),
        ("'a'  # why\n", "a"),
    ],
)
def test_python_literals(written, value):
    assert read("gemma", f"```tool_code\nf(x={written})\n```").calls == (call("f", x=value),)


def test_tokens_of_gemma_hold_nested_values():
    inside = '{a:{b:[1,true,<|"|>x, {y}<|"|>]},c:None,d:New York,<|"|>e f<|"|>:-1.5}'
    (found,) = read("gemma", f"<|tool_call>call:f{inside}<tool_call|>").calls
    expected = {"a": {"b": [1, True, "x, {y}"]}, "c": None, "d": "New York", "e f": -1.5}
    assert found == ToolCall(name="f", arguments=expected)


@pytest.mark.parametrize(
    ("name", "text", "problem", "tool"),
    [
        ("hermes", HERMES_CALL.replace("}}", ""), "is not JSON", ""),
        ("qwen", QWEN_TAGS.replace("\n2\n", "\nmany\n"), "'count', which is of type integer", "find"),
        ("qwen", QWEN_TAGS.replace("\n2\n", "\n\n"), "is empty", "find"),
        ("qwen", QWEN_TAGS[:-35], "lacks a </parameter>", "find"),
        ("qwen", QWEN_TAGS[:-24], "lacks its </function>", "find"),
        ("qwen", QWEN_TAGS.replace("<parameter=count>", "<parameter="), "no name", "find"),
        ("qwen", QWEN_TAGS.replace("=find", "="), "has no name", ""),
        ("qwen", QWEN_TAGS.replace(">\n<par", ">\nx<par"), "text outside of", "find"),
        ("glm", GLM.replace("2", "many"), "'count', which is of type integer", "find"),
        ("glm", GLM.removesuffix("</tool_call>"), "lacks its </tool_call>", "find"),
        ("glm", GLM.replace("</arg_key>", ""), "lacks a </arg_key>", "find"),
        ("glm", GLM.replace("find", ""), "has no name", ""),
        ("kimi", KIMI.replace("2}", "2"), "is not JSON", "find"),
        ("kimi", KIMI.replace("<|tool_call_argument_begin|>", ""), "lacks its <|tool_call_arg", None),
        ("deepseek", DEEPSEEK_V31.replace("2}", "2"), "is not JSON", "find"),
        ("deepseek", DEEPSEEK_V3.replace("<｜tool▁sep｜>", ""), "lacks its <｜tool▁sep｜>", None),
        ("deepseek", DEEPSEEK_V31.replace("find", ""), "has no name", ""),
        ("deepseek", DSML.replace(">2<", ">many<"), "is not JSON", "find"),
        ("deepseek", DSML.replace("</｜DSML｜invoke>", ""), "lacks a </｜DSML｜parameter>", "find"),
        ("deepseek", DSML.replace('"find"', '""'), "has no name", ""),
        ("mistral", MISTRAL.replace("2}", "2"), "is not JSON", "find"),
        ("mistral", MISTRAL_LIST.replace('"id"', "id"), "is not JSON", ""),
        ("mistral", "[TOOL_CALLS][]", "is no list of calls", ""),
        ("mistral", "[TOOL_CALLS]", "has no name", ""),
        ("gpt-oss", HARMONY.replace("2}", "2"), "is not JSON", "find"),
        ("gpt-oss", HARMONY.replace("<|call|>", " so"), "more follows its end", "find"),
        ("llama", LLAMA[:-1], "is not JSON", ""),
        ("llama", "<|python_tag|>print(1)", "something else than calls", ""),
        ("llama", '<function=find>{"a"</function>', "is not JSON", "find"),
        ("llama", "<function=", "has no name", ""),
        ("llama", LLAMA.replace("find", " "), 'has no "name"', ""),
        ("gemma", "```tool_code\nfind(text=x)\n```", "is no literal value at 'x)'", ""),
        ("gemma", "```tool_code\nfind(1 + 1)\n```", "lacks a )", ""),
        ("gemma", "```tool_code\nadd(1)\n```", "must give its arguments by name", ""),
        ("gemma", "```tool_code\nimport os\n```", "lacks a (", ""),
        ("gemma", "```tool_code\nprint(print(now()))\n```", "lacks a =", None),
        ("gemma", "```tool_code\nf(a='x\n```", "is no literal value", ""),
        ("gemma", f"```tool_code\nf(a={'[' * 9999}\n```", "nested too deep", ""),
        ("gemma", f"```tool_code\nf(a={'9' * 9999})\n```", "limit", ""),
        ("gemma", "```tool_code\nf(a=1e999)\n```", "too large", ""),
        ("gemma", f"```tool_call\n{LLAMA[:-2]}\n```", "is not JSON", ""),
        ("gemma", "```tool_call\n?\n```", "is no JSON object", ""),
        ("gemma", FUNCTION_GEMMA.replace("call:find", ""), "has no name", ""),
        ("gemma", FUNCTION_GEMMA[:50], "lacks a <escape>", "find"),
        ("gemma", GEMMA_4.replace("}", ""), "is not JSON", "find"),
        ("json", JSON[:-1], "is not JSON", ""),
        ("json", f"```json\n{JSON} or so\n```", "something else in its fence", None),
        ("json", JSON.replace('{"text": "5", "count": 2}', "[]"), "must be a JSON object", "find"),
    ],
)  # fmt: skip
def test_an_unreadable_call_says_why_and_what_is_expected(name, text, problem, tool):
    found = read(name, f"{text}").calls[-1]
    assert isinstance(found, UnreadableCall), found
    assert problem in found.problem
    assert "expected" in found.problem
    assert found.problem.endswith(".")
    assert len(found.problem) < 400
    assert tool is None or found.name == tool


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", HERMES_CALL.replace("5", "<tool_call> </tool_call>")),
        ("qwen", HERMES_CALL.replace("5", "</tool_call>")),
        ("kimi", KIMI.replace("5", "<|tool_call_end|>")),
        ("deepseek", DEEPSEEK_V3.replace("5", "``` <｜tool▁call▁end｜>")),
        ("mistral", MISTRAL.replace("5", "[TOOL_CALLS][ARGS]")),
        ("gpt-oss", HARMONY.replace("5", "<|end|>")),
        ("llama", f"<|python_tag|>{LLAMA}".replace("5", "<|python_tag|>")),
        ("glm", GLM.replace(">5<", "></tool_call></arg_value><arg_key><")),
        ("gemma", GEMMA_4.replace("5", "<|tool_call><tool_call|>")),
    ],
)
def test_markup_that_is_spelt_out_is_text(name, text):
    """The first and last such mark are tokens, and those of a form's grammar; what replaced "5" is not."""
    plain = _without_spelt(name, text)
    said = Said(text=text, controls=plain, vocabulary=VOCABULARY)
    (found,) = make_parser(name, SCHEMAS).parse(said).calls
    assert isinstance(found, ToolCall), found
    assert found.arguments["count"] == 2


VOCABULARY = frozenset(
    {
        "<tool_call>",
        "</tool_call>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "[TOOL_CALLS]",
        "[CALL_ID]",
        "[ARGS]",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|python_tag|>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<|tool_call>",
        "<tool_call|>",
        '<|"|>',
    }
)
ORIGINALS = {
    "hermes": HERMES_CALL,
    "qwen": HERMES_CALL,
    "kimi": KIMI,
    "deepseek": DEEPSEEK_V3,
    "mistral": MISTRAL,
    "gpt-oss": HARMONY,
    "llama": f"<|python_tag|>{LLAMA}",
    "glm": GLM,
    "gemma": GEMMA_4,
}


def _without_spelt(name: str, text: str) -> tuple[int, ...]:
    """Offsets of the tokens of the family's call, in a text where "5" was replaced."""
    original = ORIGINALS[name]
    place, grown = original.index("5"), len(text) - len(original)
    starts = [
        i for mark in VOCABULARY for i in range(len(original)) if original.startswith(mark, i)
    ]
    return tuple(sorted(i if i < place else i + grown for i in starts))


@pytest.mark.parametrize(("name", "text"), ORIGINALS.items())
def test_a_call_that_is_all_spelt_out_is_no_call(name, text):
    reply = make_parser(name).parse(Said(text=f"So: {text}", vocabulary=VOCABULARY))
    assert not reply.calls
    assert reply.text.startswith("So: ")


THOUGHTS = [
    *[
        (name, "<think>", "</think>")
        for name in (
            "qwen",
            "hermes",
            "llama",
            "gemma",
            "deepseek",
            "glm",
            "json",
            "kimi",
            "mistral",
        )
    ],
    ("mistral", "[THINK]", "[/THINK]"),
    ("kimi", "◁think▷", "◁/think▷"),
    ("gemma", "<|channel>thought\n", "<channel|>"),
    ("gpt-oss", "<|channel|>analysis<|message|>", "<|end|>"),
]
CALLS = ORIGINALS | {"llama": LLAMA, "json": JSON}


@pytest.mark.parametrize(("name", "opened", "closed"), THOUGHTS)
def test_a_thought_is_apart(name, opened, closed):
    considered = CALLS[name].replace("<|call|>", "")  # which would end Harmony's thought
    reply = read(name, f"{opened}\nHm, {considered}\n{closed}\n\n{CALLS[name]}")
    assert (reply.text, reply.reasoning) == ("", f"Hm, {considered}")
    assert [type(found) for found in reply.calls] == [ToolCall]
    assert read(name, f"{opened}Hm.{closed}42") == ParsedReply(text="42", reasoning="Hm.")
    assert read(name, f"{opened}\n\n{closed}\n42") == ParsedReply(text="42")


@pytest.mark.parametrize(("name", "opened", "closed"), THOUGHTS)
def test_a_thought_that_is_not_closed_is_all_of_the_rest(name, opened, closed):
    assert read(name, f"{opened}Hm, 42.") == ParsedReply(text="", reasoning="Hm, 42.")


@pytest.mark.parametrize(("name", "opened", "closed"), THOUGHTS)
def test_the_prompt_may_have_opened_the_thought(name, opened, closed):
    for again in ("", opened if name not in ("gpt-oss", "gemma") else ""):
        said = Said(text=f"{again}Hm.{closed}42", in_thought=True)
        assert make_parser(name).parse(said) == ParsedReply(text="42", reasoning="Hm.")
    cut = Said(text=f"Hm. {CALLS[name].replace('<|call|>', '')}", in_thought=True)
    reply = make_parser(name).parse(cut)
    assert (reply.text, reply.calls) == ("", ())
    assert reply.reasoning.startswith("Hm. ")


@pytest.mark.parametrize(
    "spelt", ["</｜DSML｜parameter>\n</｜DSML｜invoke>", "<｜DSML｜tool_calls>"]
)
def test_tags_that_hold_a_token_count_where_it_was_generated(spelt):
    text = DSML.replace(">5<", f">{spelt}<")
    starts = [i for i in range(len(text)) if text.startswith("｜DSML｜", i)]
    place = text.index(spelt)
    controls = tuple(i for i in starts if not place <= i < place + len(spelt))
    said = Said(text=text, controls=controls, vocabulary=frozenset({"｜DSML｜"}))
    assert make_parser("deepseek").parse(said).calls == (call(text=spelt, count=2),)
    none = Said(text=text, vocabulary=frozenset({"｜DSML｜"}))
    assert make_parser("deepseek").parse(none).text == text


def test_a_thought_that_is_spelt_out_is_text():
    said = Said(text="Write <think>.", vocabulary=frozenset({"<think>", "</think>"}))
    assert make_parser("qwen").parse(said) == ParsedReply(text="Write <think>.")


def test_thoughts_between_calls_are_joined():
    reply = read("qwen", f"<think>a</think>{HERMES_CALL}<think>b</think>c")
    assert reply == ParsedReply(text="c", reasoning="a\nb", calls=(FIND,))
