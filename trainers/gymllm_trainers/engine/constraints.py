"""Constrained decoding: the tokens that a regular expression, a JSON schema or choices let follow.

The work is llguidance's (https://github.com/guidance-ai/llguidance), which reads the vocabulary once and then
makes the mask of a step in well under a millisecond. Its limits bound what a hostile grammar can cost: one
that would take too much time or memory ends its own request.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, cast, final

import llguidance
import numpy as np
import numpy.typing as npt

from gymllm.engine import SamplingParams
from gymllm.errors import ConfigError, EngineError, ModelError
from gymllm_agents.tokenizer import Tokenizer

MAX_GRAMMAR_CHARACTERS = 2**16
"""Longest grammar."""
MAX_REGEX_CHARACTERS = 2**12
"""Longest regular expression, or all of a schema's together: the time to read some grows with the square,
and is half a second at this length."""
_KEPT = 16  # grammars kept ready: those of a group's requests are the same
_BLANKS = r"[\x20\x0A\x0D\x09]{1,40}"  # with no limit, a model can go on with blanks for ever
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,  # about 20 ms
    step_lexer_fuel=50_000,  # about 10 ms; what is written in earnest takes 1
    step_max_items=50_000,
    max_lexer_states=50_000,  # of 1-2 kB each
    verbose_errors=False,
)


class _Grammar(NamedTuple):
    name: str  # as the user knows it
    text: str  # as llguidance reads it


@final
class Matcher:
    """Where one generation is in its grammar. Single owner."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        *,
        name: str,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        ends: Sequence[int],
    ) -> None:
        """`Grammars.matcher` makes them.

        Args:
            matcher: At the start; owned from here on.
            name: What the grammar is called in errors.
            vocab_size: V.
            stop_token_ids: Tokens that end the text.
            ends: Tokens that llguidance takes for the end.
        """
        self._matcher, self._name, self._vocab_size = matcher, name, vocab_size
        self._stops = frozenset(i for i in stop_token_ids if 0 <= i < vocab_size)
        self._ends = self._stops.union(ends)
        self._stopped = False

    @property
    def may_end(self) -> bool:
        """Whether the text is complete, though more may be able to follow."""
        return self._stopped or self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and nothing can follow but a stop token."""
        return self._stopped or (self._matcher.is_stopped() and self._matcher.is_accepting())

    def mask(self, out: npt.NDArray[np.uint32]) -> None:
        """Tells which tokens may follow.

        Stop tokens may where the text may end and nowhere else, even those that the grammar has a use for.

        Args:
            out: uint32, contiguous, shape [ceil(V / 32)]; written to. Bit i % 32 of word i // 32 says whether
                token i may follow.

        Raises:
            ConfigError: Nothing can follow and the text is not complete, or the grammar is too complex. This
                request can't go on; no other is harmed.
        """
        assert out.shape == (-(-self._vocab_size // 32),)
        assert out.dtype == np.uint32
        assert out.flags.c_contiguous  # llguidance is given its address
        if self.is_finished:
            out[:] = 0
        else:
            self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
            self._check()
        may_end = self.may_end
        for token_id in self._ends:
            bit = np.uint32(1 << token_id % 32)
            if may_end and token_id in self._stops:
                out[token_id // 32] |= bit
            else:
                out[token_id // 32] &= ~bit
        if not may_end and not out.any():
            raise ConfigError(
                f"{self._name} can't be met: no token fits but a stop token, and the text is not complete. "
                "Take the stop token out of stop_token_ids or change the grammar."
            )

    def accept(self, token_id: int) -> None:
        """Goes on by a token that the mask allows.

        Raises:
            EngineError: It doesn't fit.
            ConfigError: The grammar is too complex.
        """
        if token_id in self._ends:
            fits = token_id in self._stops and self.may_end
            self._stopped = self._stopped or fits
        else:
            fits = not self._stopped and self._matcher.try_consume_tokens([token_id]) == 1
            self._check()
        if not fits:
            raise EngineError(
                f"token {token_id} doesn't fit {self._name} here; its mask forbids it."
            )

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConfigError(
                f"{self._name} can't go on: it asks for what no token spells, or is too complex "
                f"({_reason(self._matcher)}). Make it simpler."
            )


@final
class Grammars:
    """Makes the matchers of one model's requests. Thread-safe.

    The first call reads the vocabulary, in a second or two; a grammar that is not among the last ones takes
    milliseconds, a very large one a second. Not for the thread that drives the device.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Reads nothing yet.

        Args:
            tokenizer: The model's.
            vocab_size: V, the number of logits; those past the tokenizer's ids are never allowed.

        Raises:
            ModelError: The tokenizer has more tokens than that.
        """
        if vocab_size < tokenizer.vocab_size:
            raise ModelError(
                f"the model has {vocab_size} logits, but its tokenizer {tokenizer.vocab_size} tokens: "
                "they are of different models."
            )
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._ready: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def matcher(self, sampling: SamplingParams) -> Matcher | None:
        """A matcher at the start of a request's grammar; None if it has none.

        The text ends with one of the request's stop tokens or, if it names none, the tokenizer's. Blanks
        between the parts of a JSON text are at most 40 characters. `regex` is in the syntax of Rust's regex
        crate, which is Python's but for look-around, `\\b` and backreferences (`\\d` and `\\w` are of all
        scripts in both); it is matched as a whole.

        Raises:
            ConfigError: The grammar can't be used; says why.
            ModelError: Nor can any with this tokenizer.
        """
        grammar = _grammar(sampling)
        if grammar is None:
            return None
        with self._lock:
            ready = self._ready.pop(grammar.text, None)
            if ready is None:
                ready = self._read(grammar)
            self._ready[grammar.text] = ready
            if len(self._ready) > _KEPT:
                self._ready.popitem(last=False)
            own = ready.deep_copy()
        return Matcher(
            own,
            name=grammar.name,
            vocab_size=self._vocab_size,
            stop_token_ids=sampling.stop_token_ids or self._tokenizer.stop_token_ids,
            ends=self._tokenizer.stop_token_ids,
        )

    def _read(self, grammar: _Grammar) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._vocabulary, grammar.text, log_level=0, limits=_LIMITS)
        matcher.compute_bitmask()  # what can't make its first step is refused here
        if matcher.is_error():
            raise ConfigError(f"{grammar.name} can't be used: {_reason(matcher)}.")
        return matcher

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        try:
            return llguidance.LLTokenizer(
                self._tokenizer.copy_backend().to_str(),
                n_vocab=self._vocab_size,
                eos_token=list(self._tokenizer.stop_token_ids),
            )
        except ValueError as error:
            raise ModelError(
                f"llguidance can't read this tokenizer ({error}): regex, json_schema and choices can't be "
                "used with this model."
            ) from error


def _grammar(sampling: SamplingParams) -> _Grammar | None:
    """The grammar of a request, if it has one.

    Raises:
        ConfigError: It is too long or not text, or the schema is not JSON.
    """
    if sampling.regex is not None:
        _check_text("regex", sampling.regex, MAX_REGEX_CHARACTERS)
        slashes = len(sampling.regex) - len(sampling.regex.rstrip("\\"))
        if slashes % 2:  # it would quote what llguidance puts around it
            raise ConfigError(f"regex can't be used: it ends within an escape, {sampling.regex!r}.")
        return _Grammar("regex", llguidance.LLMatcher.grammar_from_regex(sampling.regex))
    if sampling.json_schema is not None:
        _check_text("json_schema", sampling.json_schema)
        try:
            schema = json.loads(sampling.json_schema)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"json_schema can't be used: it is not JSON ({error}).") from error
        if not isinstance(schema, dict):
            raise ConfigError(f"json_schema must be an object, got {sampling.json_schema!r}.")
        if (characters := _pattern_characters(schema)) > MAX_REGEX_CHARACTERS:
            raise ConfigError(
                f"json_schema must have patterns of at most {MAX_REGEX_CHARACTERS} characters together, got "
                f"{characters}."
            )
        try:
            text = llguidance.LLMatcher.grammar_from_json_schema(
                sampling.json_schema, defaults={"whitespace_pattern": _BLANKS}
            )
        except ValueError as error:  # deeper than it reads, or with Python's NaN
            raise ConfigError(f"json_schema can't be used: {error}.") from error
        return _Grammar("json_schema", text)
    if sampling.choices:
        _check_text("choices", "".join(sampling.choices))
        # One terminal: a rule for each choice would be much slower. JSON's escapes are those of the grammar.
        choices = " | ".join(json.dumps(choice) for choice in sampling.choices)
        return _Grammar(
            "choices", llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        )
    return None


def _pattern_characters(schema: object) -> int:
    """Characters of the regular expressions in a schema."""
    if isinstance(schema, list):
        return sum(map(_pattern_characters, cast("list[object]", schema)))
    if not isinstance(schema, dict):
        return 0
    characters = 0
    for key, value in cast("dict[str, object]", schema).items():
        if key == "pattern" and isinstance(value, str):
            characters += len(value)
        elif key == "patternProperties" and isinstance(value, dict):
            characters += sum(map(len, cast("dict[str, object]", value)))
        characters += _pattern_characters(value)
    return characters


def _check_text(name: str, text: str, most: int = MAX_GRAMMAR_CHARACTERS) -> None:
    if len(text) > most:
        raise ConfigError(f"{name} must have at most {most} characters, got {len(text)}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} holds half a surrogate pair: {error}.") from error


def _reason(matcher: llguidance.LLMatcher) -> str:
    """What llguidance says, on one line."""
    text = matcher.get_error().replace("<non-verbose/>", "")
    return " ".join(text.split())[:500].rstrip(".") or matcher.stop_reason()
