"""YAML files to nested frozen dataclasses and back; every mistake named by its full dotted path.

Knows nothing of training: `gymllm_trainers.config` holds the settings themselves. A field may be a
bool, int, float, str, path, literal, enum, tuple, mapping, another dataclass, or a union of these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Hashable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

import yaml

from gymllm.errors import ConfigError, UnknownNameError

T = TypeVar("T")


class _Loader(yaml.SafeLoader):
    """YAML with YAML 1.2's scalars: `off` is a word, `1e-4` a number; no key comes twice."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (the base class's own attribute)
        first: [
            pair
            for pair in pairs
            if pair[0] not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")
        ]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"config key {key!r} is written twice{node.start_mark}.")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf)|\.(nan|NaN))$"
    ),
    list("-+0123456789."),
)


def read_yaml(path: Path) -> Mapping[str, object]:
    """The mapping that a YAML file holds.

    Raises:
        ConfigError: The file is missing, isn't YAML, or holds something other than a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} can't be read: {error}.") from error
    try:
        loader = _Loader(text)  # a SafeLoader underneath
        loader.name = str(path)  # what messages call it
        loaded = loader.get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path} is not YAML: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"config file {path} must hold `key: value` lines, got {_describe(loaded)}."
        )
    return cast(Mapping[str, object], loaded)


def parse_scalar(text: str) -> object:
    """A value as it would be read after a key in a YAML file; text that is no YAML is itself."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        return text


def merge(base: T, overrides: Mapping[str, object]) -> T:
    """A copy of the dataclass `base` with `overrides` (nested, as a YAML file holds them) on top.

    Raises:
        UnknownNameError: A key that no field has; says which are close, by full dotted path.
        ConfigError: A value of the wrong type: names the key, the value and what was expected.
    """
    known = [path for path, _ in walk_fields(type(base))]
    return _merge(base, overrides, "", known)


def walk_fields(
    config_type: type, prefix: str = ""
) -> Iterator[tuple[str, dataclasses.Field[object]]]:
    """Every field below a dataclass by dotted path, the nested dataclasses themselves included."""
    hints = _hints(config_type)
    for field in dataclasses.fields(config_type):
        yield prefix + field.name, field
        nested = _dataclass_of(hints[field.name])
        if nested is not None:
            yield from walk_fields(nested, f"{prefix}{field.name}.")


def to_mapping(config: object) -> dict[str, object]:
    """A dataclass as plain values, in field order; `merge` reads it back to an equal one."""
    assert dataclasses.is_dataclass(config)
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def flatten(config: object) -> dict[str, object]:
    """Every setting by its dotted path, as a plain value."""

    def leaves(mapping: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
        for key, value in mapping.items():
            if isinstance(value, Mapping) and value:
                yield from leaves(cast(Mapping[str, object], value), f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    return dict(leaves(to_mapping(config), ""))


def to_yaml(config: object) -> str:
    """A dataclass as the text of a YAML file that `read_yaml` and `merge` read back."""
    return yaml.dump(to_mapping(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would otherwise read as something else."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (the base class's own attribute)
        first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *pairs]
        for first, pairs in _Loader.yaml_implicit_resolvers.items()
    }


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    if math.isfinite(value):
        return dumper.represent_scalar("tag:yaml.org,2002:float", repr(value))
    return dumper.represent_float(value)


_Dumper.add_representer(float, _represent_float)


def _merge(base: T, overrides: Mapping[str, object], prefix: str, known: Sequence[str]) -> T:
    assert dataclasses.is_dataclass(base)
    hints = _hints(type(base))
    changes: dict[str, object] = {}
    for key, value in overrides.items():
        path = f"{prefix}{key}"
        if key not in hints:
            # A clear favourite alone is the better answer; only without one, whatever is near.
            close = difflib.get_close_matches(path, known, n=1, cutoff=0.85) or known
            if not difflib.get_close_matches(path, close, n=1, cutoff=0.5):
                close = [f"{prefix}{name}" for name in hints]
            raise UnknownNameError("config key", path, close)
        current = getattr(base, key)
        if dataclasses.is_dataclass(current) and not isinstance(current, type):
            if not isinstance(value, Mapping):
                fields = [field.name for field in dataclasses.fields(current)]
                one = f"{path}: {{{fields[0]}: {value}}}" if isinstance(value, str) else ""
                meant = f"Did you mean {one}?" if one else f"Write them below {path}:, indented."
                raise ConfigError(
                    f"{path} must hold the keys {', '.join(fields)}, got {_describe(value)}. {meant}"
                )
            nested = cast(Mapping[str, object], value)
            changes[key] = _merge(current, nested, f"{path}.", known)
        else:
            changes[key] = _convert(value, hints[key], path, known)
    return cast(T, dataclasses.replace(cast(Any, base), **changes))


class _Mismatch(Exception):
    """A value isn't of the type; `_convert` at the top turns it into a `ConfigError`."""


def _convert(value: object, annotation: object, path: str, known: Sequence[str]) -> object:
    try:
        return _coerce(value, annotation, path, known)
    except _Mismatch:
        raise ConfigError(
            f"{path} must be {_expected(annotation)}, got {_describe(value)}.{_meant(value, annotation)}"
        ) from None


def _coerce(value: object, annotation: object, path: str, known: Sequence[str]) -> object:
    """`value` as `annotation` wants it; only lossless conversions (int to float, list to tuple)."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return _coerce(value, arguments[0], path, known)
    if origin in (Union, types.UnionType):
        # A value that some member takes as it is stays as it is: True is no int where bool is
        # allowed.
        for exact in (True, False):
            for member in arguments:
                try:
                    converted = _coerce(value, member, path, known)
                except _Mismatch:
                    continue
                if not exact or type(converted) is type(value):
                    return converted
        raise _Mismatch
    if origin is Literal:
        for choice in arguments:
            if type(choice) is type(value) and choice == value:
                return value
        raise _Mismatch
    if annotation in (None, type(None)):
        if value is None:
            return None
        raise _Mismatch
    if annotation is object:
        return value
    if origin in (tuple, list, Sequence):
        if not isinstance(value, (list, tuple)):
            raise _Mismatch
        if origin is tuple and not (len(arguments) == 2 and arguments[1] is ...):
            if len(value) != len(arguments):
                raise _Mismatch
            return tuple(_coerce(v, a, path, known) for v, a in zip(value, arguments, strict=True))
        items = (_coerce(v, arguments[0], path, known) for v in value)
        return list(items) if origin is list else tuple(items)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _Mismatch
        return {
            _coerce(k, arguments[0], path, known): _coerce(v, arguments[1], f"{path}.{k}", known)
            for k, v in value.items()
        }
    nested = _dataclass_of(annotation)
    if nested is not None:
        if not isinstance(value, Mapping):
            raise _Mismatch
        return _build(nested, cast(Mapping[str, object], value), path)
    return _coerce_scalar(value, annotation)


def _build(record_type: type, record: Mapping[str, object], path: str) -> object:
    """A dataclass that isn't a group of settings but a value, such as an item of a list."""
    hints = _hints(record_type)
    for key in record:
        if key not in hints:
            raise UnknownNameError(f"key of {path}", key, hints)
    for field in dataclasses.fields(record_type):
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and field.name not in record:
            raise ConfigError(f"an item of {path} lacks {field.name!r}; it has {list(record)}.")
    return record_type(
        **{key: _convert(value, hints[key], f"{path}.{key}", ()) for key, value in record.items()}
    )


def _coerce_scalar(value: object, annotation: object) -> object:
    if annotation is bool and isinstance(value, bool):
        return value
    if annotation is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if annotation is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # of an integer past 1e308, which is then no float
            return float(value)
    if annotation is str and isinstance(value, str):
        return value
    if annotation is Path and isinstance(value, (str, Path)):
        return Path(value)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        for member in annotation:
            if value in (member, member.value):
                return member
    raise _Mismatch


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Types of a dataclass's fields; evaluating their annotations takes a millisecond."""
    return typing.get_type_hints(kind)


def _dataclass_of(annotation: object) -> type | None:
    """The dataclass that an annotation is, or may be (`Settings | None`)."""
    union = get_origin(annotation) in (Union, types.UnionType, typing.Annotated)
    for candidate in get_args(annotation) if union else (annotation,):
        if isinstance(candidate, type) and dataclasses.is_dataclass(candidate):
            return candidate
    return None


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_mapping(value)
    if isinstance(value, Enum):
        return cast(object, value.value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _describe(value: object) -> str:
    """A value and its type, as the writer of a YAML file knows them."""
    if value is None:
        return "nothing"
    kind = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(
        type(value), "a list" if isinstance(value, list) else "a mapping"
    )
    shown = repr(value)
    return f"{shown if len(shown) <= 60 else shown[:57] + '...'} ({kind})"


def _meant(value: object, annotation: object) -> str:
    """What was probably meant, as a sentence; empty where nothing is near."""
    if isinstance(value, float) and value.is_integer() and _takes(int(value), annotation):
        return f" Write {int(value)}."
    if isinstance(value, (str, Path)) and _takes([value], annotation):
        return f" Write [{value}]."
    if not isinstance(value, str):
        return ""
    choices = {str(choice).lower(): str(choice) for choice in _choices(annotation)}
    close = difflib.get_close_matches(value.lower(), choices, n=1)
    if close:
        return f" Did you mean {choices[close[0]]}?"
    if _takes(True, annotation) and value.lower() in ("yes", "no", "on", "off"):
        return f" Write {'true' if value.lower() in ('yes', 'on') else 'false'}."
    plain = parse_scalar(value)
    return " Write it without quotes." if plain != value and _takes(plain, annotation) else ""


def _takes(value: object, annotation: object) -> bool:
    try:
        _coerce(value, annotation, "", ())
    except (_Mismatch, ConfigError):
        return False
    return True


def _choices(annotation: object) -> list[object]:
    """What a literal may be, also inside a union."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return list(arguments)
    if origin in (Union, types.UnionType, typing.Annotated):
        return [choice for member in arguments for choice in _choices(member)]
    return []


def _expected(annotation: object) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return _expected(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(_expected(member) for member in arguments)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in arguments)
    if origin is tuple and not (len(arguments) == 2 and arguments[1] is ...):
        return "a list of exactly " + ", ".join(_expected(member) for member in arguments)
    if origin in (tuple, list, Sequence):
        return f"a list, each item {_expected(arguments[0])}"
    if origin in (dict, Mapping):
        return f"a mapping, each value {_expected(arguments[1])}"
    if annotation in (None, type(None)):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "one of " + ", ".join(str(member.value) for member in annotation)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return "a mapping with " + ", ".join(field.name for field in dataclasses.fields(annotation))
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names.get(cast(type, annotation), "a path" if annotation is Path else str(annotation))
