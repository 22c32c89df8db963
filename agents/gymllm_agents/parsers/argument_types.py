"""The values of arguments that are written as bare text, by the tools' schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast, final

from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.parsers.json_calls import whole_json

_PYTHON_CONSTANTS: Mapping[str, object] = {"True": True, "False": False, "None": None}
_MAX_STEPS = 50  # through a schema that refers to itself


@final
class ArgumentTypes:
    """What each tool's arguments may be."""

    def __init__(self, tools: Sequence[ToolSchema]) -> None:
        """Takes the schemas; what they do not say is not known, and such arguments are texts."""
        self._types: dict[str, dict[str, frozenset[str]]] = {}
        for tool in tools:
            function = _mapping(tool.get("function"))
            parameters = _mapping(function.get("parameters"))
            self._types[str(function.get("name"))] = {
                name: _types(schema, parameters)
                for name, schema in _mapping(parameters.get("properties")).items()
            }

    def names(self, tool: str) -> tuple[str, ...]:
        """The arguments of a tool, in the schema's order; none of an unknown one."""
        return tuple(self._types.get(tool, {}))

    def value(self, tool: str, argument: str, text: str) -> object:
        """The text itself where a text is allowed, else what it is as JSON.

        `True`, `False` and `None` are read too, since chat templates write these to models.

        Raises:
            ValueError: It must be JSON and is not.
        """
        types = self._types.get(tool, {}).get(argument, frozenset())
        bare = text.strip()
        if "null" in types and bare in ("null", "None"):
            return None
        if not types or "string" in types:
            return text
        if bare in _PYTHON_CONSTANTS:
            return _PYTHON_CONSTANTS[bare]
        try:
            if not bare:
                raise ValueError("is empty")
            return whole_json(bare)
        except ValueError as error:
            wanted = " or ".join(sorted(types))
            raise ValueError(
                f"has a wrong {argument[:60]!r}, which is of type {wanted} but {error}"
            ) from None


def _mapping(value: object) -> Mapping[str, object]:
    return cast(Mapping[str, object], value) if isinstance(value, Mapping) else {}


def _types(schema: object, root: Mapping[str, object]) -> frozenset[str]:
    """The JSON types that a schema allows; empty where it can't be told."""
    found, waiting = set[str](), [schema]
    for _ in range(_MAX_STEPS):
        if not waiting:
            return frozenset(found)
        part = _mapping(waiting.pop())
        kind, reference = part.get("type"), part.get("$ref")
        branches = [part.get("anyOf"), part.get("oneOf")]
        if isinstance(kind, str):
            found.add(kind)
        elif isinstance(kind, Sequence):
            found.update(map(str, cast(Sequence[object], kind)))
        elif isinstance(reference, str):
            place, _, name = reference.removeprefix("#/").rpartition("/")
            waiting.append(_mapping(root.get(place)).get(name))
        elif any(branches):
            waiting += [
                inner
                for branch in branches
                if isinstance(branch, Sequence)
                for inner in cast(Sequence[object], branch)
            ]
        else:
            return frozenset()
    return frozenset()
