"""A pydantic model's JSON schema as a model should read it: inlined, without what says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind

from gymllm_agents.chat_template import ToolSchema

Json = dict[str, object]

_OF_NAMES = ("properties", "$defs", "patternProperties")
_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_OF_ONE = ("items", "additionalProperties", "contains", "propertyNames", "not")
_PREFIX = "#/$defs/"


class QuietSchema(GenerateJsonSchema):
    """A default that has no JSON form is left out of the schema; the function still has it."""

    ignored_warning_kinds: set[JsonSchemaWarningKind] = {  # noqa: RUF012 (pydantic's own form)
        "skipped-choice",
        "non-serializable-default",
    }


def argument_schema(arguments: type[BaseModel]) -> ToolSchema:
    """The schema of a model's fields, by their aliases.

    Definitions are put where they are used, but for those that contain themselves; titles go, and
    so does the null of what is None unless given.

    Raises:
        PydanticInvalidForJsonSchema: A type has no JSON form.
    """
    tidy = tidy_schema(cast(Json, arguments.model_json_schema(schema_generator=QuietSchema)))
    schema: Json = {
        "type": "object",
        "properties": tidy.get("properties", {}),
        "required": tidy.get("required", []),
    }
    return schema | {key: value for key, value in tidy.items() if key == "$defs"}


def tidy_schema(schema: Mapping[str, object]) -> Json:
    """A copy of a JSON schema: definitions where they are used, no titles, no null by default."""
    raw = dict(schema)
    raw.pop("$schema", None)
    definitions = cast(dict[str, Json], raw.pop("$defs", {}))
    kept: dict[str, Json] = {}
    tidy = _tidy(raw, definitions, kept, ())
    if kept:
        tidy["$defs"] = {name: kept[name] for name in sorted(kept)}
    return tidy


def _tidy(
    schema: Json, definitions: Mapping[str, Json], kept: dict[str, Json], inside: tuple[str, ...]
) -> Json:
    """A copy. `kept` gathers the definitions that stay; `inside` names those being written out."""
    schema = dict(schema)
    reference = schema.pop("$ref", None)
    name = reference.removeprefix(_PREFIX) if isinstance(reference, str) else ""
    if name and name not in definitions:
        schema["$ref"] = reference  # to somewhere else, in a server's schema
    elif name:
        if name in inside or name in kept:
            if name not in kept:
                kept[name] = {}  # before the walk, which meets the name again
                kept[name] = _tidy(definitions[name], definitions, kept, (name,))
            return {"$ref": reference, **_tidy(schema, definitions, kept, inside)}
        # What is said at the place of use counts for more than what is said of the type.
        return _tidy(definitions[name] | schema, definitions, kept, (*inside, name))
    schema.pop("discriminator", None)  # refers to definitions that are no longer there
    if isinstance(schema.get("title"), str):
        del schema["title"]
    schema = _without_null(schema)
    for key in _OF_NAMES:
        if isinstance(schema.get(key), dict):
            named = cast(dict[str, Json], schema[key])
            schema[key] = {n: _tidy(s, definitions, kept, inside) for n, s in named.items()}
    for key in _OF_SCHEMAS:
        if isinstance(schema.get(key), list):
            listed = cast(list[Json], schema[key])
            schema[key] = [_tidy(s, definitions, kept, inside) for s in listed]
    for key in _OF_ONE:
        if isinstance(schema.get(key), dict):
            schema[key] = _tidy(cast(Json, schema[key]), definitions, kept, inside)
    return schema


def _without_null(schema: Json) -> Json:
    """Of `X | None = None`, just X: not required, so a model leaves it out."""
    arms = schema.get("anyOf")
    if "default" not in schema or schema["default"] is not None or not isinstance(arms, list):
        return schema
    left = [arm for arm in cast(list[Json], arms) if arm != {"type": "null"}]
    rest = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
    if len(left) == 1:
        return left[0] | rest
    return {"anyOf": left, **rest}
