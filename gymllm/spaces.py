"""`Unicode`: the space of any text. `Message`: the space of chat messages with text and images.

Gymnasium's own `Text` lists its characters: it rejects blanks and accents by default, and with all of
Unicode listed it pickles to tens of megabytes. `Unicode` only knows a longest length.
"""

# pyright: reportUnknownMemberType=false
# Gymnasium's functions over spaces are generic over types that its annotations leave partly unknown.

from __future__ import annotations

import base64
import copy
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NoReturn, TypedDict, cast

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.spaces import utils as space_utils
from gymnasium.vector import utils as vector_utils
from gymnasium.wrappers import utils as wrapper_utils

from gymllm.errors import ConfigError, ConfigTypeError

LONGEST_SAMPLE = 32
LARGEST_SAMPLE_IMAGE = 8
"""Most rows and columns of a sampled image."""
MOST_SAMPLE_PARTS = 3
ROLES = ("system", "user", "assistant", "tool")
"""Who speaks in a conversation, unless a `Message` space is told otherwise."""
_SAMPLE_CHARACTERS = (
    " \n\t0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~äéñøßçΔλжя中文字日本한글 אبة→∑🙂🚀"
)

Image = npt.NDArray[np.uint8]
"""Red, green and blue, shape [H, W, 3], H and W >= 1."""


class TextPart(TypedDict):
    """A part of a message that is text."""

    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    """A part of a message that is a picture."""

    type: Literal["image"]
    image: Image


class ChatMessage(TypedDict):
    """One message of a conversation: an element of a `Message` space."""

    role: str
    content: tuple[TextPart | ImagePart, ...]


TextOrMessage = str | ChatMessage
"""What an agent reads or writes: an element of `Unicode` or of `Message`."""


class Unicode(spaces.Space[str]):
    """Any text of at most `max_length` characters.

    Samples are short (up to 32 characters) and mix alphabets, blanks and line breaks. In a batch it is
    a `Tuple` of `Unicode`, so a batch of texts is a tuple of strings.
    """

    def __init__(
        self, max_length: int = 1_000_000, *, seed: int | np.random.Generator | None = None
    ) -> None:
        self.max_length = _checked_length(max_length)
        super().__init__(dtype=str, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: None = None, probability: None = None) -> str:
        """A short random text. Masks have no meaning here and are refused."""
        if mask is not None or probability is not None:
            raise ConfigError("Unicode can't be sampled with a mask or probabilities.")
        return _sample_text(self.np_random, self.max_length)

    def contains(self, x: object) -> bool:
        """Whether `x` is a string that is not too long."""
        return isinstance(x, str) and len(x) <= self.max_length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unicode) and other.max_length == self.max_length

    __hash__ = None  # type: ignore[assignment]  # spaces are mutable (their seed), as Gymnasium's are

    def __repr__(self) -> str:
        return f"Unicode({self.max_length})"


class Message(spaces.Space[ChatMessage]):
    """Chat messages: a role and any number of parts, each a text or an image.

    `{"role": "user", "content": ({"type": "text", "text": "What is this?"},
    {"type": "image", "image": pixels})}`, with pixels uint8 of shape [H, W, 3]; `message` builds one.
    In a batch it is a `Tuple` of `Message`, so a batch of messages is a tuple of dicts. In JSON an image is
    its shape and its compressed bytes, so nothing is lost.
    """

    def __init__(
        self,
        *,
        max_length: int = 1_000_000,
        images: bool = True,
        roles: Sequence[str] = ROLES,
        seed: int | np.random.Generator | None = None,
    ) -> None:
        """Makes the space.

        Args:
            max_length: Most characters of all text parts together.
            images: Whether messages may have image parts.
            roles: Who may speak.
            seed: Of `sample`.

        Raises:
            ConfigError: `max_length` is negative, or there are no roles.
        """
        self.max_length = _checked_length(max_length)
        if isinstance(roles, str) or not roles:
            raise ConfigError(f'roles must be names such as ("user", "tool"), got {roles!r}.')
        self.images, self.roles = images, tuple(roles)
        super().__init__(seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: None = None, probability: None = None) -> ChatMessage:
        """A small random message. Masks have no meaning here and are refused."""
        if mask is not None or probability is not None:
            raise ConfigError("Message can't be sampled with a mask or probabilities.")
        draw, left = self.np_random, self.max_length
        role = self.roles[int(draw.integers(len(self.roles)))]
        parts: list[str | Image] = []
        for _ in range(int(draw.integers(1, MOST_SAMPLE_PARTS + 1))):
            if self.images and draw.random() < 0.5:
                height, width = draw.integers(1, LARGEST_SAMPLE_IMAGE + 1, size=2).tolist()
                parts.append(draw.integers(256, size=(height, width, 3), dtype=np.uint8))
            else:
                text = _sample_text(draw, left)
                left -= len(text)
                parts.append(text)
        return message(role, *parts)

    def contains(self, x: object) -> bool:
        """Whether `x` is a message as this space has them, with no keys besides."""
        fields = _fields(x, "role", "content")
        if fields is None:
            return False
        role, content = fields["role"], fields["content"]
        if not (isinstance(role, str) and role in self.roles and isinstance(content, tuple)):
            return False
        length = 0
        for part in cast("tuple[object, ...]", content):
            text = _text_in(part)
            if text is not None:
                length += len(text)
            elif not (self.images and _is_image_part(part)):
                return False
        return length <= self.max_length

    def to_jsonable(self, sample_n: Iterable[ChatMessage]) -> list[Any]:
        """JSON of some messages, images as their shape and base64 of their zlib-compressed bytes."""
        return [
            {"role": sample["role"], "content": [_part_to_json(p) for p in sample["content"]]}
            for sample in sample_n
        ]

    def from_jsonable(self, sample_n: list[Any]) -> list[ChatMessage]:
        """The messages that `to_jsonable` was given.

        Raises:
            ConfigError: It gave no such thing.
        """
        try:
            return [
                {"role": s["role"], "content": tuple(_part_from_json(p) for p in s["content"])}
                for s in sample_n
            ]
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise ConfigError(
                f"not messages: {repr(sample_n)[:80]} ({error!r}); from_jsonable reads what "
                "Message.to_jsonable wrote."
            ) from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and (other.max_length, other.images, other.roles) == (
            self.max_length,
            self.images,
            self.roles,
        )

    __hash__ = None  # type: ignore[assignment]  # as Unicode's

    def __repr__(self) -> str:
        return f"Message(max_length={self.max_length}, images={self.images}, roles={self.roles})"


def _checked_length(max_length: object) -> int:
    if isinstance(max_length, bool) or not isinstance(max_length, int | np.integer):
        raise ConfigTypeError(f"max_length must be a whole number >= 0, got {max_length!r}.")
    if max_length < 0:
        raise ConfigError(f"max_length must be >= 0, got {max_length}.")
    return int(cast("int", max_length))


def message(role: str, *parts: str | Image) -> ChatMessage:
    """A chat message of texts and images, in this order. Arrays are kept, not copied."""
    content: list[TextPart | ImagePart] = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        else:
            content.append({"type": "image", "image": part})
    return {"role": role, "content": tuple(content)}


def text_of(observation: TextOrMessage) -> str:
    """The text of an observation: itself, or the text parts of a message, each on lines of its own."""
    if isinstance(observation, str):
        return observation
    return "\n".join(part["text"] for part in observation["content"] if part["type"] == "text")


def is_text(space: spaces.Space[object]) -> bool:
    """Whether elements of the space are strings."""
    return isinstance(space, Unicode | spaces.Text)


def is_image(value: object) -> bool:
    """Whether `value` is a uint8 array of shape [H, W, 3] with pixels in it."""
    if not isinstance(value, np.ndarray):
        return False
    array = cast("npt.NDArray[Any]", value)
    return array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3 and array.size > 0


def _sample_text(draw: np.random.Generator, max_length: int) -> str:
    length = int(draw.integers(min(max_length, LONGEST_SAMPLE) + 1))
    which = draw.integers(len(_SAMPLE_CHARACTERS), size=length).tolist()
    return "".join(_SAMPLE_CHARACTERS[i] for i in which)


def _fields(value: object, *keys: str) -> dict[str, object] | None:
    """The value, if it is a dict with these keys and no others."""
    if not isinstance(value, dict):
        return None
    fields = cast("dict[str, object]", value)
    return fields if fields.keys() == set(keys) else None


def _text_in(part: object) -> str | None:
    fields = _fields(part, "type", "text")
    if fields is None or not _is(fields["type"], "text"):
        return None
    return fields["text"] if isinstance(fields["text"], str) else None


def _is_image_part(part: object) -> bool:
    fields = _fields(part, "type", "image")
    return fields is not None and _is(fields["type"], "image") and is_image(fields["image"])


def _is(value: object, name: str) -> bool:
    return isinstance(value, str) and value == name  # an array would be compared element by element


def _part_to_json(part: TextPart | ImagePart) -> dict[str, object]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    packed = base64.b64encode(zlib.compress(part["image"].tobytes())).decode("ascii")
    return {"type": "image", "shape": list(part["image"].shape), "zlib": packed}


def _part_from_json(part: dict[str, Any]) -> TextPart | ImagePart:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    if part["type"] != "image":
        raise ValueError(f"a part's type must be text or image, got {part['type']!r}")
    pixels = zlib.decompress(base64.b64decode(part["zlib"], validate=True))
    # A copy, because an array over bytes can't be written to.
    image = np.array(np.frombuffer(pixels, np.uint8).reshape(tuple(part["shape"])))
    return {"type": "image", "image": image}


# Gymnasium's functions over spaces dispatch on the class; these are the ones whose default refuses
# spaces it does not know. A text has no flat array, so flattening leaves it as it is, as for `Graph`.


@wrapper_utils.create_zero_array.register(Unicode)
def _no_text(space: Unicode) -> Any:  # pyright: ignore[reportUnusedFunction]  # registered
    return ""


@wrapper_utils.create_zero_array.register(Message)
def _no_message(space: Message) -> Any:  # pyright: ignore[reportUnusedFunction]  # registered
    return message(space.roles[0])


@vector_utils.batch_differing_spaces.register(Unicode)
@vector_utils.batch_differing_spaces.register(Message)
def _batch_differing(different: Sequence[Unicode | Message]) -> spaces.Tuple[Any]:  # pyright: ignore[reportUnusedFunction]  # registered
    return spaces.Tuple(copy.deepcopy(list(different)))


@vector_utils.create_shared_memory.register(Unicode)
@vector_utils.create_shared_memory.register(Message)
def _no_shared_memory(space: Unicode | Message, n: int = 1, ctx: object = None) -> NoReturn:  # pyright: ignore[reportUnusedFunction]  # registered
    raise ConfigError(  # Gymnasium would hide its own CustomSpaceError behind another error
        f"{space} can't be in shared memory: texts have no fixed size. Give make_vec "
        'vector_kwargs={"shared_memory": False}; or no vectorization_mode, for a gymllm.EnvPool.'
    )


@space_utils.flatdim.register(Unicode)
@space_utils.flatdim.register(Message)
def _flat_dimension(space: Unicode | Message) -> int:  # pyright: ignore[reportUnusedFunction]  # registered
    raise ValueError(
        f"{space} can't be flattened to an array of numbers: texts have no fixed size."
    )


@space_utils.flatten_space.register(Unicode)
@space_utils.flatten_space.register(Message)
def _flat_space(space: Unicode | Message) -> Any:  # pyright: ignore[reportUnusedFunction]  # registered
    return space


@space_utils.flatten.register(Unicode)
@space_utils.flatten.register(Message)
@space_utils.unflatten.register(Unicode)
@space_utils.unflatten.register(Message)
def _flat_element(space: Unicode | Message, x: Any) -> Any:  # pyright: ignore[reportUnusedFunction]  # registered
    return x
