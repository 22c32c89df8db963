"""How text is put before observations, and how turns are written: what `FewShot` and `History` share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, cast

from gymnasium import spaces

from gymllm.errors import ConfigError
from gymllm.spaces import ChatMessage, Message, TextOrMessage, Unicode, is_text

Obs = TypeVar("Obs", bound=TextOrMessage)

TURN = "Observation: {observation}\nAction: {action}\n\n"
"""How a turn is written unless told otherwise."""


def check_turn(template: str) -> str:
    """The template itself.

    Raises:
        ConfigError: It can't be filled in, or lacks {observation} or {action}.
    """
    try:
        filled = template.format(observation="\x00", action="\x01")
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"turn={template!r} can't be filled in ({error!r}); use {{observation}} and {{action}}, and "
            "double every other brace."
        ) from error
    if "\x00" not in filled or "\x01" not in filled:
        raise ConfigError(f"turn must hold {{observation}} and {{action}}, got {template!r}.")
    return template


def write_turns(template: str, turns: Iterable[tuple[str, str]]) -> str:
    """Observations and actions, each pair by the template."""
    return "".join(template.format(observation=o, action=a) for o, a in turns)


def prefixed(prefix: str, observation: Obs) -> Obs:
    """An observation with text before it; in a message, as a text part of its own."""
    if not prefix:
        return observation
    if isinstance(observation, str):
        return cast("Obs", prefix + observation)
    content = ({"type": "text", "text": prefix}, *observation["content"])
    return cast("Obs", ChatMessage(role=observation["role"], content=cast("Any", content)))


def longest(space: spaces.Space[Any], wrapper: str) -> int:
    """Most characters of the space's texts.

    Raises:
        ConfigError: Its elements are no texts or messages.
    """
    if isinstance(space, Unicode | Message | spaces.Text):
        return space.max_length
    raise ConfigError(
        f"{wrapper} needs observations and actions that are texts or messages, got {space}; wrap the "
        "environment in gymllm.TextAdapter first."
    )


def widened(space: spaces.Space[Any], extra: int, wrapper: str) -> spaces.Space[Any]:
    """The space of the same elements with up to `extra` more characters before them."""
    max_length = longest(space, wrapper) + extra
    if is_text(space):
        return Unicode(max_length)
    assert isinstance(space, Message), "longest() lets nothing else through"
    return Message(max_length=max_length, images=space.images, roles=space.roles)
