"""Functions as tools: the schema that a model reads, and what it is told of wrong arguments."""

from __future__ import annotations

import enum
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import anyio.lowlevel
import numpy as np
import pytest
from pydantic import BaseModel, Field

from gymllm.errors import ConfigError
from gymllm_agents import Tool, tool


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    """A place."""

    x: int
    y: int = 0
    title: str = "none"


class Tree(BaseModel):
    value: int
    children: list[Tree] = []


@dataclass
class Pair:
    left: int
    right: int


def draw(
    points: list[Point],
    colour: Colour = Colour.RED,
    style: Literal["plain", "bold"] = "plain",
    width: Annotated[int, Field(gt=0, description="In pixels.")] = 3,
    label: int | list[str] = 1,
    angle: float | None = None,
) -> object:
    """Draws a line.

    Through all of the points.

    Args:
        points: Where it goes,
            in order.
        width: Not this one.

    Returns:
        What was drawn.
    """
    assert all(isinstance(point, Point) for point in points)
    return {"points": points, "colour": colour, "style": style, "width": width, "angle": angle}


def parameters(function: Callable[..., object]) -> Any:
    return tool(function).parameters


def test_the_schema_is_inlined_and_says_nothing_twice():
    made = tool(draw)
    assert (made.name, made.description) == ("draw", "Draws a line.\n\nThrough all of the points.")
    point = {
        "description": "A place.",
        "properties": {
            "x": {"type": "integer"},
            "y": {"default": 0, "type": "integer"},
            "title": {"default": "none", "type": "string"},
        },
        "required": ["x"],
        "type": "object",
    }
    assert made.parameters == {
        "type": "object",
        "properties": {
            "points": {"description": "Where it goes,\nin order.", "items": point, "type": "array"},
            "colour": {"enum": ["red", "blue"], "type": "string", "default": "red"},
            "style": {"default": "plain", "enum": ["plain", "bold"], "type": "string"},
            "width": {
                "default": 3,
                "description": "In pixels.",
                "exclusiveMinimum": 0,
                "type": "integer",
            },
            "label": {
                "default": 1,
                "anyOf": [{"type": "integer"}, {"items": {"type": "string"}, "type": "array"}],
            },
            "angle": {"type": "number"},
        },
        "required": ["points"],
    }


def test_a_type_that_contains_itself_keeps_its_definition():
    def grow(tree: Tree, other: Tree | None = None) -> str:
        return str(tree.children[0].value)

    schema = parameters(grow)
    assert schema["properties"]["other"] == {"$ref": "#/$defs/Tree"}
    assert schema["$defs"]["Tree"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Tree"}
    assert "title" not in str(schema)


@pytest.mark.asyncio
async def test_arguments_are_converted_and_results_are_json():
    made = tool(draw)
    result = await made({"points": [{"x": "3"}], "width": "4", "angle": None})
    assert not result.failed
    assert result.text == (
        '{"points": [{"x": 3, "y": 0, "title": "none"}], "colour": "red", "style": "plain", '
        '"width": 4, "angle": null}'
    )
    read = await made({"points": '[{"x": 3}]', "style": None})
    assert read.text.startswith('{"points": [{"x": 3,')
    assert '"style": "plain"' in read.text
    assert "must be a valid list, got null" in (await made({"points": None})).text


@pytest.mark.asyncio
async def test_each_problem_is_told_on_a_line():
    given = {
        "points": [{"y": 3}, {"x": "k"}],
        "widht": 1,
        "width": -1,
        "label": {"a": 1},
        "colour": "green",
        "angle": "é" * 200,
    }
    result = await tool(draw)(given)
    assert result.failed
    assert result.text.splitlines() == [
        "Error: draw needs the argument 'points[0].x'.",
        "the argument 'points[1].x' must be a valid integer, unable to parse string as an integer, "
        'got "k".',
        "the argument 'colour' must be 'red' or 'blue', got \"green\".",
        "the argument 'width' must be greater than 0, got -1.",
        "the argument 'label' must be a valid integer or a valid list, got {\"a\": 1}.",
        "the argument 'angle' must be a valid number, unable to parse string as a number, "
        'got "' + "é" * 79 + "....",
        "draw has no argument 'widht'; it takes: points, colour, style, width, label, angle. "
        "Did you mean 'width'?",
    ]
    assert (await tool(draw)({})).text == "Error: draw needs the argument 'points'."
    many = await tool(draw)({"points": [{}] * 20})
    assert many.text.splitlines()[-1] == "12 more problems."
    assert "must be a valid list" in (await tool(draw)({"points": "[1"})).text


@pytest.mark.parametrize(
    "docstring",
    [
        "Args:",
        "Args:\n  x",
        "Args:\n    :",
        ":param:",
        ":param",
        "@param",
        "x\n-\nParameters\n---\n",
    ],
)
def test_a_docstring_in_no_known_form_is_no_error(docstring):
    def odd(x: int) -> None: ...

    odd.__doc__ = docstring
    assert tool(odd).parameters["required"] == ["x"]


def test_an_alias_does_not_change_the_parameters_name():
    def aliased(x: Annotated[int, Field(alias="y", description="Told.")]) -> None: ...

    assert parameters(aliased)["properties"] == {"x": {"type": "integer", "description": "Told."}}


@pytest.mark.asyncio
async def test_anything_that_can_be_called_becomes_a_tool():
    class Shop:
        """Sells."""

        def __init__(self) -> None:
            self.sold: list[str] = []

        def sell(self, what: str, /, price: float, count: int = 1) -> str:
            """Sells something."""
            self.sold.append(what)
            return f"{count} {what} at {price}"

        async def restock(self, count: int) -> int:
            await anyio.lowlevel.checkpoint()
            return count + 1

        async def __call__(self, what: str) -> list[str]:
            await anyio.lowlevel.checkpoint()
            return [what]

    shop = Shop()
    sell = tool(shop.sell)
    assert (sell.name, sell.description) == ("sell", "Sells something.")
    assert (await sell({"what": "tea", "price": 2})).text == "1 tea at 2.0"
    assert shop.sold == ["tea"]
    assert (await tool(shop.restock)({"count": "2"})).text == "3"
    called = tool(shop)
    assert (called.name, called.description) == ("Shop", "Sells.")
    assert (await called({"what": "ü"})).text == '["ü"]'
    cheap = tool(functools.partial(shop.sell, price=0.5), name="cheap")
    assert list(parameters(functools.partial(shop.sell, price=0.5))["properties"]) == [
        "what",
        "count",
    ]
    assert (await cheap({"what": "tea", "price": 9})).failed
    assert (await cheap({"what": "tea", "count": 2})).text == "2 tea at 0.5"
    of_tea = tool(functools.partial(shop.sell, "tea"))
    assert (await of_tea({"price": 1})).text == "1 tea at 1.0"
    assert (await tool(functools.partial(shop.restock), name="r")({"count": 0})).text == "1"
    with pytest.raises(ConfigError, match=r"annotations for self.*tool\(thing.method\)"):
        tool(Shop.sell)


@pytest.mark.asyncio
async def test_names_that_pydantic_keeps_for_itself_are_fine():
    def odd(_hidden: int, schema: int, model_config: int, json: int = 4, /, copy: int = 5) -> str:
        return f"{_hidden}{schema}{model_config}{json}{copy}"

    result = await tool(odd)({"_hidden": 1, "schema": 2, "model_config": 3, "copy": 6})
    assert result.text == "12346"


@pytest.mark.asyncio
async def test_defaults_of_any_kind_stay_the_functions_own():
    nothing: Any = object()

    def ask(
        what: str = Field("tea", description="A drink."), into: int = nothing, *, loud: bool = False
    ) -> str:
        return f"{what} {into is nothing} {loud}"

    made = tool(ask)
    assert parameters(ask)["properties"]["what"]["description"] == "A drink."
    assert parameters(ask)["required"] == []
    assert (await made({})).text == "tea True False"
    assert (await made({"what": "soup", "loud": "true"})).text == "soup True True"


def test_the_decorator_takes_settings():
    @tool
    def plain(count: int) -> int:
        return count

    @tool(name="other-name", description="Told.", timeout_s=None, max_result_chars=5)
    def named(count: int) -> int:
        """Not told."""
        return count

    assert isinstance(plain, Tool)
    assert (plain.name, plain.timeout_s, plain.description) == ("plain", 10.0, "")
    assert (named.name, named.description) == ("other-name", "Told.")
    assert (named.timeout_s, named.max_result_chars) == (None, 5)


def test_what_no_model_could_fill_is_refused_by_name():
    class Opaque:
        pass

    def variable(*rest: int, **more: str) -> str:
        return ""

    with pytest.raises(ConfigError, match=r"has \*rest: .int.? and \*\*more: .str.?"):
        tool(variable)
    with pytest.raises(ConfigError, match="annotations for a, b"):
        tool(lambda a, b=1: "", name="f")
    with pytest.raises(ConfigError, match="1 to 64 letters, digits, _ or -, got '<lambda>'"):
        tool(lambda: "")
    bad = draw_nothing
    bad.__annotations__["what"] = Opaque
    with pytest.raises(ConfigError, match=r"no model can give 'what', of type .*Opaque"):
        tool(bad)
    bad.__annotations__["what"] = "Missing"
    with pytest.raises(ConfigError, match="'Missing' is not defined"):
        tool(bad)


def _give(value: object) -> object:
    return value


def draw_nothing(what: int) -> str:
    return ""


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (None, ""),
        (3, "3"),
        (True, "true"),
        (Colour.BLUE, '"blue"'),
        (Point(x=1), '{"x": 1, "y": 0, "title": "none"}'),
        (Pair(1, 2), '{"left": 1, "right": 2}'),
        ((1, "é"), '[1, "é"]'),
        (np.arange(3), "[0, 1, 2]"),
        ({"n": np.float32(0.5), 2: np.int64(7)}, '{"n": 0.5, "2": 7}'),
        ("\ud83d\ude00 \ud83d!", "😀 \ufffd!"),
        (["\udc80"], '["\ufffd"]'),
    ],
)
async def test_results_as_text(value, text):
    result = await tool(lambda: value, name="give", timeout_s=None)({})
    assert (result.text, result.failed) == (text, False)


@pytest.mark.asyncio
async def test_results_without_a_json_form_are_errors():
    circle: list[object] = []
    circle.append(circle)
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    for value in (object(), circle, deep, {"a": threading.Lock()}):
        give = functools.partial(_give, value=value)
        result = await tool(give, name="give", timeout_s=None)({})
        assert result.failed
        assert "has no JSON form" in result.text
