"""A typed Python function as a tool: its schema and the checks of its arguments come from pydantic."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast, final, overload

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo

from gymllm.errors import ConfigError
from gymllm_agents.tools.argument_errors import argument_problems
from gymllm_agents.tools.argument_schema import QuietSchema, argument_schema
from gymllm_agents.tools.tool import Tool, ToolError

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NOT_PARSED = ("list_type", "dict_type", "model_type", "dataclass_type", "model_attributes_type")
"""Errors of pydantic's that a string of JSON gets where a list or an object was expected."""


@overload
def tool(
    function: Callable[..., object],
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float | None = 10.0,
    max_result_chars: int = 4000,
    max_concurrent: int | None = None,
) -> Tool: ...


@overload
def tool(
    function: None = None,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float | None = 10.0,
    max_result_chars: int = 4000,
    max_concurrent: int | None = None,
) -> Callable[[Callable[..., object]], Tool]: ...


def tool(
    function: Callable[..., object] | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float | None = 10.0,
    max_result_chars: int = 4000,
    max_concurrent: int | None = None,
) -> Tool | Callable[[Callable[..., object]], Tool]:
    """Makes a tool of a function, as `@tool`, `@tool(...)` or `tool(function, ...)`.

    Every parameter has an annotation that pydantic can read. The model is told of each by
    `Annotated[..., Field(description=...)]`, else by the docstring's "Args". What the model gives is
    converted where that is harmless ("3" for an int), a string of JSON is taken for the list or object
    it holds, and null for what may be left out is left out. A str is told as it is, None as nothing,
    any other result as JSON.

    Args:
        function: Sync or async; a bound method, a partial or a callable object too. What a partial
            binds is not the model's to set.
        name: Defaults to the function's.
        description: Defaults to its docstring, without the sections.
        timeout_s: As in `Tool`.
        max_result_chars: As in `Tool`.
        max_concurrent: As in `Tool`.

    Raises:
        ConfigError: A parameter that no model could fill, a name that models can't call, or a setting
            out of range.
    """
    if function is None:
        return cast(
            Callable[[Callable[..., object]], Tool],
            functools.partial(
                tool,
                name=name,
                description=description,
                timeout_s=timeout_s,
                max_result_chars=max_result_chars,
                max_concurrent=max_concurrent,
            ),
        )
    plain = _plain_function(function)
    if name is None:
        named = _without_partials(function)
        name = str(getattr(named, "__name__", type(named).__name__))
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"A tool's name must be 1 to 64 letters, digits, _ or -, got {name!r}. Give it by name=."
        )
    documented = _docstring(_documented(function, plain))
    told = {p.arg_name.lstrip("*"): p.description or "" for p in documented.params}
    arguments = _Arguments(name, function, plain, told)
    return Tool(
        name=name,
        description=(documented.description or "") if description is None else description,
        parameters=argument_schema(arguments.model),
        function=_call(function, plain, arguments.positional),
        timeout_s=timeout_s,
        max_result_chars=max_result_chars,
        max_concurrent=max_concurrent,
        convert=arguments.convert,
    )


@dataclass(frozen=True, kw_only=True)
class _Parameter:
    name: str
    field: str
    """In the pydantic model, where names that start with "_" or mean something to pydantic can't be."""
    omissible: bool
    """The function has a default of its own, which is used as it is."""


@final
class _Arguments:
    """What a function takes, as a pydantic model."""

    def __init__(
        self,
        tool_name: str,
        function: Callable[..., object],
        plain: Callable[..., object],
        told: Mapping[str, str],
    ) -> None:
        self._tool_name = tool_name
        is_partial = isinstance(function, functools.partial)
        set_already = set(function.keywords) if is_partial else set[str]()
        signature = inspect.signature(function)
        parameters = [p for p in signature.parameters.values() if p.name not in set_already]
        _refuse(tool_name, parameters)
        hints = _hints(tool_name, plain)
        self.positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
        self._parameters: list[_Parameter] = []
        fields: dict[str, Any] = {}
        for index, parameter in enumerate(parameters):
            hint = hints[parameter.name]
            _refuse_type(tool_name, parameter.name, hint)
            own = parameter.default if isinstance(parameter.default, FieldInfo) else None
            described = _description(hint, own) or told.get(parameter.name) or None
            has_default = parameter.default is not parameter.empty and own is None
            positional = parameter.kind is parameter.POSITIONAL_ONLY
            field = Field(alias=parameter.name, description=described)
            if has_default:
                field = Field(parameter.default, alias=parameter.name, description=described)
            elif own is not None:
                hint = typing.Annotated[hint, own]
            name = f"argument_{index}"
            fields[name] = (hint, field)
            self._parameters.append(
                # Of positional ones none may be left out, for the next to find its place.
                _Parameter(
                    name=parameter.name, field=name, omissible=has_default and not positional
                )
            )
        self.model: type[BaseModel] = create_model(
            tool_name, __config__=ConfigDict(extra="forbid"), **fields
        )

    def convert(self, arguments: Mapping[str, object]) -> Mapping[str, object]:
        """What the function is called with, by name.

        Raises:
            ToolError: The arguments are not right.
        """
        try:
            made = self.model.model_validate(dict(arguments))
        except ValidationError as error:
            made = self._mended(arguments, error)
        return {
            parameter.name: getattr(made, parameter.field)
            for parameter in self._parameters
            if not parameter.omissible or parameter.field in made.model_fields_set
        }

    def _mended(self, arguments: Mapping[str, object], error: ValidationError) -> BaseModel:
        """Tries again without what models do wrong but mean right.

        That is a list or an object written as a string of JSON, and null for what may be left out.
        """
        mended = dict(arguments)
        omissible = {p.name for p in self._parameters if p.omissible}
        for problem in error.errors(include_url=False):
            name = str(problem["loc"][0]) if problem["loc"] else ""
            given = problem["input"]
            if given is None and name in omissible and arguments.get(name, "") is None:
                mended.pop(name, None)
            elif problem["type"] in _NOT_PARSED and given is arguments.get(name):
                with contextlib.suppress(ValueError, TypeError, RecursionError):
                    mended[name] = json.loads(cast(str, given))
        if mended != arguments:
            try:
                return self.model.model_validate(mended)
            except ValidationError as second:
                error = second
        known = [parameter.name for parameter in self._parameters]
        raise ToolError(argument_problems(self._tool_name, error, mended, known)) from None


def _call(
    function: Callable[..., object], plain: Callable[..., object], positional: list[str]
) -> Callable[[Mapping[str, object]], object]:
    """The function, called with arguments by name."""

    def call(arguments: Mapping[str, object]) -> object:
        named = dict(arguments)
        first = [named.pop(name) for name in positional]
        return function(*first, **named)

    async def call_async(arguments: Mapping[str, object]) -> object:
        return await cast(typing.Awaitable[object], call(arguments))

    return call_async if inspect.iscoroutinefunction(plain) else call


def _without_partials(function: Callable[..., object]) -> Callable[..., object]:
    while isinstance(function, functools.partial):
        function = cast(Callable[..., object], function.func)
    return function


def _plain_function(function: Callable[..., object]) -> Callable[..., object]:
    """What has the annotations: of a partial its function, of an object its `__call__`."""
    function = _without_partials(function)
    if inspect.isclass(function) or inspect.isroutine(function):
        return function
    return type(function).__call__


def _docstring(documented: object) -> docstring_parser.Docstring:
    text = inspect.getdoc(documented) or ""
    try:
        return docstring_parser.parse(text)
    except docstring_parser.ParseError:  # in a form of its own: then all of it describes
        whole = docstring_parser.Docstring()
        whole.short_description = text
        return whole


def _documented(function: Callable[..., object], plain: Callable[..., object]) -> object:
    """What has the docstring: an object's own class, where its `__call__` has none."""
    named = _without_partials(function)
    return plain if plain.__doc__ or inspect.isroutine(named) else type(named)


def _refuse(tool_name: str, parameters: list[inspect.Parameter]) -> None:
    variable = [str(p) for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if variable:
        raise ConfigError(
            f"Tool {tool_name!r} has {' and '.join(variable)}: a model can't know what to give. Name "
            "every parameter."
        )
    bare = [p.name for p in parameters if p.annotation is p.empty]
    if bare:
        hint = " Of a method, make the tool from an object: tool(thing.method)."
        raise ConfigError(
            f"Tool {tool_name!r} needs annotations for {', '.join(bare)}, to tell the model what to "
            f"give.{hint if bare[0] in ('self', 'cls') else ''}"
        )


def _refuse_type(tool_name: str, name: str, hint: Any) -> None:
    try:
        create_model(tool_name, argument=(hint, ...)).model_json_schema(
            schema_generator=QuietSchema
        )
    except (PydanticUserError, NameError, TypeError) as error:
        reason = str(error).split("\n", 1)[0]
        raise ConfigError(
            f"Tool {tool_name!r}: no model can give {name!r}, of type {hint}: {reason}"
        ) from error


def _hints(tool_name: str, plain: Callable[..., object]) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(
            plain.__init__ if inspect.isclass(plain) else plain, include_extras=True
        )
    except NameError as error:
        raise ConfigError(
            f"Tool {tool_name!r}: {error}, which an annotation uses. Types of tools are found where "
            "they are defined or imported at the top of a module."
        ) from error


def _description(hint: object, own: FieldInfo | None) -> str | None:
    """What the annotation says of the parameter."""
    if own is not None and own.description:
        return own.description
    for said in getattr(hint, "__metadata__", ()):
        if isinstance(said, FieldInfo) and said.description:
            return said.description
    return None
