"""What grammars allow: random logits under the masks give texts that Python's own parsers accept."""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
import numpy.typing as npt
import pytest

from gymllm.engine import SamplingParams
from gymllm.errors import ConfigError, EngineError, ModelError
from gymllm_agents import Tokenizer
from gymllm_trainers.engine.constraints import MAX_GRAMMAR_CHARACTERS, Grammars, Matcher
from gymllm_trainers.engine.sampling import neutral_inputs, sample_full

TESTS = Path(__file__).parents[1]
PADDED = 333
"""Logits of the small model: 13 more than its tokenizer has tokens, and no multiple of 32."""
STOP = 2


@functools.cache
def small_grammars() -> Grammars:
    tokenizer = Tokenizer.from_folder(TESTS / "trainers" / "fixtures" / "tiny_llama")
    assert tokenizer.vocab_size == 320
    assert tokenizer.stop_token_ids == (STOP,)
    return Grammars(tokenizer, PADDED)


def tokenizer_of(grammars: Grammars) -> Tokenizer:
    return grammars._tokenizer


def start(grammars: Grammars | None = None, **grammar: object) -> Matcher:
    sampling = SamplingParams(max_new_tokens=1, **({"stop_token_ids": (STOP,)} | grammar))
    matcher = (grammars or small_grammars()).matcher(sampling)
    assert matcher is not None
    return matcher


def allowed(matcher: Matcher, vocab_size: int = PADDED) -> npt.NDArray[np.int64]:
    out = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
    matcher.mask(out)
    return np.flatnonzero(np.unpackbits(out.view(np.uint8), bitorder="little"))


def feed(matcher: Matcher, text: str) -> None:
    for token_id in tokenizer_of(small_grammars()).encode(text, allow_special=False):
        matcher.accept(token_id)


def write(
    matcher: Matcher, seed: int, *, grammars: Grammars | None = None, vocab_size: int = PADDED
) -> str | None:
    """A random text; None if it didn't end. Stop tokens are as likely as all others together."""
    rng, tokenizer = np.random.default_rng(seed), tokenizer_of(grammars or small_grammars())
    known = tokenizer.vocab_size
    ids: list[int] = []
    while not matcher.is_finished:
        choice = allowed(matcher, vocab_size)
        assert choice.max() < known
        assert (STOP in choice) == matcher.may_end
        others = choice[choice != STOP]
        ends = STOP in choice and (not len(others) or rng.random() < 0.5)
        ids.append(STOP if ends else int(rng.choice(others)))
        matcher.accept(ids[-1])
        if len(ids) > 400:
            return None
    text_ids = ids[:-1] if ids and ids[-1] == STOP else ids
    return tokenizer.decode(text_ids, skip_special=False)


EXPRESSIONS = [
    r"[0-9]{3}-[0-9]{4}",
    r"(up|down|left|right)( (up|down|left|right)){0,5}",
    r"[a-z]{1,5}@[a-z]{1,5}\.(com|org)",
    r"<answer>-?[0-9]+(\.[0-9]+)?</answer>",
    r"[äöüß€🌍]{2,6}",
    r"a/b\\c|\n{2}",
    r"(ab|a)(c|bc)?",
    r"",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_texts_match_their_regular_expression(expression: str) -> None:
    texts = {write(start(regex=expression), seed) for seed in range(25)} - {None}
    assert texts
    for text in texts:
        assert re.fullmatch(expression, text), text


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "y", None, 1.5]}, "maxItems": 3},
        "at": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/point"}]},
    },
    "required": ["name", "age", "at"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
            "required": ["x", "y"],
            "additionalProperties": False,
        }
    },
}


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def assert_valid(value: object) -> None:
    """SCHEMA, by hand."""
    assert isinstance(value, dict)
    assert {"name", "age", "at"} <= set(value) <= {"name", "age", "tags", "at"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 6
    assert isinstance(value["age"], int)
    assert 0 <= value["age"] <= 120
    assert all(tag in ("x", "y", None, 1.5) for tag in value.get("tags", []))
    assert len(value.get("tags", [])) <= 3
    at = value["at"]
    if not isinstance(at, bool):
        assert isinstance(at, dict)
        assert set(at) == {"x", "y"}
        assert is_number(at["x"])
        assert is_number(at["y"])


def test_texts_are_json_of_their_schema() -> None:
    texts = [write(start(json_schema=json.dumps(SCHEMA)), seed) for seed in range(40)]
    ended = [text for text in texts if text is not None]
    assert len(ended) > 20
    for text in ended:
        assert_valid(json.loads(text))


def test_blanks_of_json_have_an_end() -> None:
    matcher = start(json_schema='{"type": "array", "items": {"type": "null"}, "minItems": 1}')
    feed(matcher, "[" + " " * 40)
    blank = tokenizer_of(small_grammars()).encode(" ", allow_special=False)
    with pytest.raises(EngineError, match="json_schema"):
        matcher.accept(blank[0])


CHOICES = (
    "yes",
    "no",
    "yes, please",
    "7",
    'a "quoted"\n\\ text',
    "Grüße 🌍",
    "\x00\x7f\x85",
    "[a-z]+",
)


def test_texts_are_one_of_the_choices_and_every_one_can_be() -> None:
    texts = {write(start(choices=CHOICES), seed) for seed in range(150)}
    assert texts == set(CHOICES)


def test_the_sampler_obeys_the_mask() -> None:
    sampler = jax.jit(sample_full)
    rng = np.random.default_rng(0)
    for seed in range(3):
        matcher, ids = start(choices=("left", "right", "lemon")), []
        inputs = neutral_inputs(1, PADDED)
        while not matcher.is_finished:
            matcher.mask(inputs.allowed[0])
            inputs.uniform[:] = rng.random()
            logits = rng.normal(size=(1, PADDED)).astype(np.float32) * 10
            ids.append(int(sampler(logits, inputs).sampled.token[0]))
            matcher.accept(ids[-1])
        text = tokenizer_of(small_grammars()).decode(ids, skip_special=True)
        assert text in ("left", "right", "lemon"), seed


# --- Ends ---------------------------------------------------------------------------------------


def test_a_stop_token_is_allowed_exactly_where_the_text_may_end() -> None:
    matcher = start(regex="[0-9]{2,3}")
    assert STOP not in allowed(matcher)
    feed(matcher, "1")
    assert not matcher.may_end
    feed(matcher, "2")
    assert STOP in allowed(matcher)
    assert matcher.may_end
    assert not matcher.is_finished
    feed(matcher, "3")
    assert matcher.is_finished
    assert allowed(matcher).tolist() == [STOP]
    matcher.accept(STOP)
    assert matcher.is_finished


def test_a_text_ends_with_its_stop_token() -> None:
    matcher = start(regex="[0-9]+")
    feed(matcher, "1")
    matcher.accept(STOP)
    assert matcher.is_finished
    with pytest.raises(EngineError, match="regex"):
        feed(matcher, "1")


def test_a_requests_own_stop_tokens_count_and_the_tokenizers_do_not() -> None:
    tokenizer = tokenizer_of(small_grammars())
    (letter,) = tokenizer.encode("z", allow_special=False)
    matcher = start(regex="[a-z]{3}|[0-9]+", stop_token_ids=(letter, 1, 999_999))
    assert letter not in allowed(matcher)
    feed(matcher, "5")
    assert {letter, 1} <= set(allowed(matcher).tolist())
    assert STOP not in allowed(matcher)
    with pytest.raises(EngineError, match="token 2"):
        matcher.accept(STOP)
    matcher.accept(letter)
    assert matcher.is_finished


def test_without_stop_tokens_the_tokenizers_end_the_text() -> None:
    matcher = start(regex="a*", stop_token_ids=())
    assert STOP in allowed(matcher)


def test_a_token_that_is_forbidden_is_refused_and_the_matcher_goes_on() -> None:
    matcher = start(regex="[0-9]+")
    with pytest.raises(EngineError, match="doesn't fit regex"):
        feed(matcher, "x")
    feed(matcher, "12")
    assert matcher.may_end


def test_matchers_of_one_grammar_do_not_share_their_place() -> None:
    one, other = start(regex="ab?"), start(regex="ab?")
    feed(one, "ab")
    assert one.is_finished
    assert not other.may_end
    feed(other, "a")
    assert other.may_end


def test_a_request_without_a_grammar_has_no_matcher() -> None:
    assert small_grammars().matcher(SamplingParams(max_new_tokens=1)) is None


# --- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ({"regex": "[0-9"}, "unclosed character class"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": "a\\"}, "within an escape"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"regex": "(" * 2000 + ")" * 2000}, "regex can't be used"),
        ({"regex": "a?" * 2_049}, "at most 4096 characters, got 4098"),
        ({"choices": ("a" * (MAX_GRAMMAR_CHARACTERS + 1),)}, "at most 65536 characters, got 65537"),
        (
            {"json_schema": json.dumps({"anyOf": [{"pattern": "a?" * 1_025}] * 2})},
            "patterns of at most 4096 characters together, got 4100",
        ),
        (
            {"json_schema": json.dumps({"patternProperties": {"a?" * 2_049: {}}})},
            "patterns of at most 4096 characters together, got 4098",
        ),
        (
            {"json_schema": '{"not":' * 300 + "{}" + "}" * 300},
            "json_schema can't be used: recursion",
        ),
        ({"json_schema": '{"const": NaN}'}, "json_schema can't be used"),
        ({"json_schema": "{"}, "not JSON"),
        ({"json_schema": "[1]"}, "must be an object"),
        ({"json_schema": "[" * 30_000}, "not JSON"),
        ({"json_schema": '{"type": "nothing"}'}, "Invalid type: nothing"),
        ({"json_schema": '{"not": {}}'}, "Unimplemented keys"),
        ({"json_schema": '{"$ref": "http://localhost/x"}'}, "not fetch"),
        ({"json_schema": '{"minLength": 3, "maxLength": 2, "type": "string"}'}, "Unsatisfiable"),
        ({"choices": ("\udfff",)}, "surrogate"),
        ({"choices": ("x" * 40_000, "y" * 40_000)}, "choices must have at most"),
    ],
)
def test_a_bad_grammar_is_refused_with_the_reason(grammar: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        start(**grammar)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_grammar_that_grows_without_bounds_ends_its_request_alone() -> None:
    hostile, other = start(regex="(.*a.{200}|b.{300}c)*"), start(regex="[0-9]+")
    letters = tokenizer_of(small_grammars()).encode("abc", allow_special=False)
    rng = np.random.default_rng(0)

    def write_on() -> None:
        for _ in range(3000):
            hostile.accept(int(rng.choice(np.intersect1d(allowed(hostile), letters))))

    with pytest.raises(ConfigError, match="too complex"):
        write_on()
    with pytest.raises(ConfigError, match="too complex"):
        allowed(hostile)
    feed(other, "1")
    assert other.may_end


def test_a_text_that_nothing_can_complete_is_an_error() -> None:
    (letter,) = tokenizer_of(small_grammars()).encode("z", allow_special=False)
    matcher = start(regex="z", stop_token_ids=(letter,))
    with pytest.raises(ConfigError, match="stop_token_ids"):
        allowed(matcher)


def test_fewer_logits_than_tokens_are_refused() -> None:
    with pytest.raises(ModelError, match="300 logits, but its tokenizer 320 tokens"):
        Grammars(tokenizer_of(small_grammars()), 300)


# --- A real vocabulary --------------------------------------------------------------------------


@functools.cache
def smollm2_grammars() -> Grammars:
    sys.path.append(str(TESTS / "agents"))
    from families import load_family

    return Grammars(load_family("smollm2"), 49280)


@pytest.mark.parametrize("expression", EXPRESSIONS[:4])
def test_texts_of_a_real_vocabulary_match(expression: str) -> None:
    grammars = smollm2_grammars()
    matchers = [start(grammars, regex=expression) for _ in range(3)]
    texts = [write(m, seed, grammars=grammars, vocab_size=49280) for seed, m in enumerate(matchers)]
    assert any(texts)
    assert all(text is None or re.fullmatch(expression, text) for text in texts)


def test_json_of_a_real_vocabulary_is_valid() -> None:
    grammars = smollm2_grammars()
    texts = [
        write(
            start(grammars, json_schema=json.dumps(SCHEMA)), n, grammars=grammars, vocab_size=49280
        )
        for n in range(6)
    ]
    assert any(texts)
    for text in texts:
        if text is not None:
            assert_valid(json.loads(text))
