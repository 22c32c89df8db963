"""The tokenizer: text to ids and back, with control tokens only where the caller allows them.

Wraps the `tokenizers` package and reads and writes the hub's files. Text from outside (an
environment, a tool) is *plain*: `<|im_end|>` in it becomes ordinary tokens that spell it, never the
control token that ends a turn. Two backends make that so, one that knows the added tokens and one
that does not; neither is changed after construction, so one `Tokenizer` serves every thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import cast, final

import tokenizers

from gymllm.errors import ModelError
from gymllm_agents.chat_template import ChatTemplate


@final
class Tokenizer:
    """Encodes and decodes; knows the chat template and the tokens that end a turn. Thread-safe."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None,
        eos_token: str,
        bos_token: str | None = None,
        pad_token: str | None = None,
        stop_tokens: Sequence[str] = (),
    ) -> None:
        """Builds it from parts.

        Args:
            backend: Owned from here on; truncation and padding are switched off.
            chat_template: Jinja source, or None for a model that has none (`template` then raises).
            eos_token: Ends a text; always a stop token.
            bos_token: Starts a text, for templates that ask for it.
            pad_token: Fills batches; None means the eos token's id is used.
            stop_tokens: Further tokens that end a turn.

        Raises:
            ModelError: One of the named tokens is not in the vocabulary.
        """
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        self._backend = backend
        self._chat_template = chat_template
        self.eos_token, self.bos_token, self.pad_token = eos_token, bos_token, pad_token
        self.eos_token_id = self._id_of(eos_token, "eos_token")
        self.bos_token_id = None if bos_token is None else self._id_of(bos_token, "bos_token")
        self.pad_token_id = (
            self.eos_token_id if pad_token is None else self._id_of(pad_token, "pad_token")
        )
        stops = [self.eos_token_id, *(self._id_of(token, "stop token") for token in stop_tokens)]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(stops))
        """Ids after which a generation ends; the eos token's first."""

        # Runs of blanks are added tokens in some vocabularies (Gemma, GPT-NeoX); they control
        # nothing, and without them ordinary text would be encoded otherwise than in training.
        self._controls = {
            token.content: (index, token)
            for index, token in backend.get_added_tokens_decoder().items()
            if len(token.content) > 1 and token.content.strip(" \t\r\n▁")
        }
        self._control_ids = frozenset(index for index, _ in self._controls.values())
        self._control_texts = {index: text for text, (index, _) in self._controls.items()}
        self.control_tokens = frozenset(self._controls)
        """Texts of all control tokens, those that are not special (`<think>`, `<tool_call>`) too."""
        self._every_control = _any_of(self._controls)
        self._every_special = _any_of(
            content for content, (_, token) in self._controls.items() if token.special
        )
        self._plain_backend, self._renumbered = _without(backend, self._control_ids)

    @staticmethod
    def from_folder(path: str | Path) -> Tokenizer:
        """Reads tokenizer.json, tokenizer_config.json and, where they are, chat_template.jinja and
        generation_config.json.

        Raises:
            ModelError: A file is missing or can't be read; the message says what to do.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                f"No tokenizer.json in {folder}. A model folder needs the hub's tokenizer.json and "
                "tokenizer_config.json: download the model again, or save its tokenizer there."
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the backend raises bare Exception
            raise ModelError(
                f"{file} can't be read as a tokenizer ({error}). Download it again."
            ) from error
        config = _read_json(folder / "tokenizer_config.json")
        special = _read_json(folder / "special_tokens_map.json")
        generation = _read_json(folder / "generation_config.json")
        eos = _token_text(config.get("eos_token")) or _token_text(special.get("eos_token"))
        stops = _stop_tokens(backend, generation)
        if eos is None and stops:
            eos = stops[0]
        if eos is None:
            raise ModelError(
                f"{folder / 'tokenizer_config.json'} names no eos_token, so no turn would ever "
                'end. Add "eos_token" to it.'
            )
        return Tokenizer(
            backend,
            chat_template=_read_chat_template(folder, config),
            eos_token=eos,
            bos_token=_token_text(config.get("bos_token")),
            pad_token=_token_text(config.get("pad_token")),
            stop_tokens=stops,
        )

    def save(self, folder: str | Path) -> None:
        """Writes the hub's files into `folder`, which is made if needed.

        tokenizer.json, tokenizer_config.json, and the stop tokens into generation_config.json,
        whose other keys are kept.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(target / "tokenizer.json"))
        config: dict[str, object] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.eos_token,
            "bos_token": self.bos_token,
            "pad_token": self.pad_token,
            "clean_up_tokenization_spaces": False,
        }
        if self._chat_template is not None:
            config["chat_template"] = self._chat_template
        _write_json(target / "tokenizer_config.json", config)
        generation = _read_json(target / "generation_config.json")
        generation["eos_token_id"] = list(self.stop_token_ids)
        _write_json(target / "generation_config.json", generation)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def template(self) -> ChatTemplate:
        """The model's chat template.

        Raises:
            ModelError: The model has none, or it is not valid Jinja.
        """
        if self._chat_template is None:
            raise ModelError(
                "This tokenizer has no chat template, so messages can't be put into the model's "
                "form. Use an instruction-tuned model, or write the template to "
                "chat_template.jinja in the model's folder."
            )
        return ChatTemplate(
            self._chat_template,
            variables={
                "bos_token": self.bos_token or "",
                "eos_token": self.eos_token,
                "pad_token": self.pad_token or "",
            },
        )

    @cached_property
    def cuts(self) -> Mapping[str, int]:
        """Ids of the special tokens before which text is encoded the same whatever comes after."""
        others = "\0".join(text[1:] for text in self._controls)
        return {
            text: index
            for text, (index, token) in self._controls.items()
            if token.special
            and not (token.normalized or token.single_word or token.lstrip or token.rstrip)
            and text not in others  # a token that holds another one is read instead of it
        }

    @cached_property
    def every_cut(self) -> re.Pattern[str]:
        """Matches any of `cuts`."""
        return _any_of(self.cuts)

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        """Ids of `text`; nothing is put before or after it.

        Args:
            text: Any text; half a surrogate pair counts as U+FFFD.
            allow_special: Whether `<|im_end|>` and other added tokens in the text become their
                control tokens. Only for text that you wrote yourself; without it they are spelt
                out.
        """
        if allow_special:
            return _encode(self._backend, text)
        ids = self._plain(text)
        if self._control_ids.isdisjoint(ids):
            return ids
        # The model's own vocabulary holds the token as an ordinary piece: keep it from forming.
        parts = _broken(text, self._every_control)
        return [i for part in parts for i in self._plain(part)]

    def defuse(self, text: str, *, fuse: str, keep_markup: bool = False) -> str:
        """`text` with `fuse` put inside everything that would be read as a control token.

        `encode_rendered` takes the fuses out again. Between the two, a chat template can trim,
        split or repeat the text as it likes.

        Args:
            text: Text from outside.
            fuse: A mark that is nowhere in any text of the render.
            keep_markup: Leave added tokens that are not special (`<think>`, `<tool_call>` in some
                vocabularies) as they are: for text that the model itself wrote.
        """
        pattern = self._every_special if keep_markup else self._every_control
        return pattern.sub(lambda match: match[0][:1] + fuse + match[0][1:], text)

    def encode_rendered(self, text: str, *, fuse: str) -> list[int]:
        """Ids of a rendered chat: control tokens wherever no fuse keeps them from being read.

        Without a fuse in it, exactly `encode(text, allow_special=True)`. With one, what stands
        between two control tokens is still encoded in one piece, so merges elsewhere do not change.
        """
        if fuse not in text:
            return self.encode(text, allow_special=True)
        ids: list[int] = []
        end = 0
        for match in self._every_control.finditer(text):
            index, token = self._controls[match[0]]
            before = text[end : match.start()]
            ids += self.encode(
                (before.rstrip() if token.lstrip else before).replace(fuse, ""), allow_special=False
            )
            ids.append(index)
            end = match.end()
            while token.rstrip and text[end : end + 1].isspace():
                end += 1
        return ids + self.encode(text[end:].replace(fuse, ""), allow_special=False)

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Text of `ids`, for reading: bytes that are not whole UTF-8 become U+FFFD.

        Args:
            ids: Token ids.
            skip_special: Leave out control tokens that are special (`<|im_end|>`); added tokens
                that are not, such as `<tool_call>` in most vocabularies, stay.
        """
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def decode_marked(self, ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Text of `ids` with every control token, and where in it each of those starts."""
        if self._control_ids.isdisjoint(ids):
            return self.decode(ids, skip_special=False), ()
        pieces: list[str] = []
        starts: list[int] = []
        length, begin = 0, 0
        for place, token_id in enumerate([*ids, -1]):
            if token_id != -1 and token_id not in self._control_ids:
                continue
            if begin < place:
                pieces.append(self.decode(ids[begin:place], skip_special=False))
                length += len(pieces[-1])
            if token_id != -1:
                starts.append(length)
                pieces.append(self._control_texts[token_id])
                length += len(pieces[-1])
            begin = place + 1
        return "".join(pieces), tuple(starts)

    def without_special(self, text: str) -> str:
        """`text` without what spells a special token."""
        return self._every_special.sub("", text)

    def copy_backend(self) -> tokenizers.Tokenizer:
        """A backend of your own with the same vocabulary, for a `Tokenizer` with another template."""
        return tokenizers.Tokenizer.from_str(self._backend.to_str())

    def token_to_id(self, token: str) -> int | None:
        """The id of one token's text; None if there is no such token."""
        return self._backend.token_to_id(token)

    def is_control(self, token_id: int) -> bool:
        """Whether an id is a control token."""
        return token_id in self._control_ids

    def _plain(self, text: str) -> list[int]:
        ids = _encode(self._plain_backend, text)
        return [self._renumbered.get(i, i) for i in ids] if self._renumbered else ids

    def _id_of(self, token: str, what: str) -> int:
        index = self._backend.token_to_id(token)
        if index is None:
            raise ModelError(
                f"The {what} {token!r} is not in the tokenizer's vocabulary. tokenizer.json and "
                "tokenizer_config.json are probably from different models."
            )
        return index


def _encode(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """Ids of a text; half a surrogate pair, which no UTF-8 can hold, counts as U+FFFD."""
    if not text.isascii():
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return backend.encode(text, add_special_tokens=False).ids


def _any_of(contents: Iterable[str]) -> re.Pattern[str]:
    """Matches any of `contents`, the longest first; nothing at all if there are none."""
    ordered = sorted(contents, key=len, reverse=True)
    return re.compile("|".join(re.escape(content) for content in ordered) if ordered else r"(?!)")


def _without(
    backend: tokenizers.Tokenizer, dropped: frozenset[int]
) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
    """A copy of `backend` without some added tokens, and what it made of the ids of the others."""
    state = cast(dict[str, object], json.loads(backend.to_str()))
    added = cast(list[dict[str, object]], state.get("added_tokens") or [])
    state["added_tokens"] = [token for token in added if token["id"] not in dropped]
    copy = tokenizers.Tokenizer.from_str(json.dumps(state))
    # Added tokens are numbered anew, without a gap where one was dropped.
    before = {token.content: i for i, token in backend.get_added_tokens_decoder().items()}
    after = {i: before[token.content] for i, token in copy.get_added_tokens_decoder().items()}
    return copy, {now: was for now, was in after.items() if now != was}


def _broken(text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    """`text` cut after the first character of every match."""
    start = 0
    for match in pattern.finditer(text):
        yield text[start : match.start() + 1]
        start = match.start() + 1
    yield text[start:]


def _read_json(file: Path) -> dict[str, object]:
    """The object in a JSON file; empty if there is no file."""
    if not file.is_file():
        return {}
    try:
        value: object = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON ({error}). Download it again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object, got {type(value).__name__}.")
    return cast(dict[str, object], value)


def _write_json(file: Path, value: dict[str, object]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _token_text(value: object) -> str | None:
    """A token's text: the hub writes it bare or as an object with its "content"."""
    if isinstance(value, dict):
        value = cast(dict[str, object], value).get("content")
    return value if isinstance(value, str) else None


def _stop_tokens(backend: tokenizers.Tokenizer, generation: dict[str, object]) -> list[str]:
    """Texts of the stop tokens that generation_config.json names by id."""
    named = generation.get("eos_token_id")
    ids = cast(list[object], named) if isinstance(named, list) else [named]
    # Past 32 bits the backend raises instead of having no token.
    tokens = [backend.id_to_token(i) for i in ids if isinstance(i, int) and 0 <= i < 2**32]
    return [token for token in tokens if token is not None]


def _read_chat_template(folder: Path, config: dict[str, object]) -> str | None:
    """The template: its own file first, then the configuration's; of named ones the "default"."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except ValueError as error:
            raise ModelError(f"{file} is not UTF-8 ({error}). Download it again.") from error
    value = config.get("chat_template")
    if isinstance(value, list):
        entries = [
            cast(dict[str, object], e) for e in cast(list[object], value) if isinstance(e, dict)
        ]
        named = {str(entry.get("name")): entry.get("template") for entry in entries}
        value = named.get("default", next(iter(named.values()), None))
    return value if isinstance(value, str) else None
