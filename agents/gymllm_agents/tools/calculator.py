"""The calculator."""

from __future__ import annotations

import ast
from typing import cast

from gymllm_agents.tools.tool import Tool, ToolError

LONGEST_EXPRESSION = 200
LARGEST_BITS = 512


def calculate(expression: str) -> str:
    """The value of an arithmetic expression: + - * / // % ** and parentheses on numbers.

    Never evaluates code: the expression is parsed, and only numbers and these operators are walked.
    Whole numbers stay exact up to 512 bits.

    Raises:
        ToolError: Not such an expression, or too large; the message is for the model.
    """
    if len(expression) > LONGEST_EXPRESSION:
        raise ToolError(f"the expression is longer than {LONGEST_EXPRESSION} characters.")
    try:
        tree = ast.parse(expression.strip().replace("×", "*").replace("^", "**"), mode="eval")
        value = _value(tree.body)
    except ZeroDivisionError:
        raise ToolError("division by zero.") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError(f"{expression!r} is not an arithmetic expression.") from None
    except OverflowError:
        raise ToolError("the result is too large.") from None
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    return str(value)


def calculator() -> Tool:
    """The tool "calculator", with one argument "expression"."""
    return Tool(
        name="calculator",
        description="Works out an arithmetic expression.",
        parameters={
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
        function=lambda arguments: calculate(cast(str, arguments["expression"])),
        timeout_s=None,
    )


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=operator, right=right):
            return _bounded(_apply(operator, _value(left), _value(right)))
        case _:
            raise ValueError("not arithmetic")


def _apply(operator: ast.operator, left: int | float, right: int | float) -> int | float:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case ast.FloorDiv():
            return left // right
        case ast.Mod():
            return left % right
        case ast.Pow():
            # Checked before the work is done: 9**9**9 would never end.
            if isinstance(left, int) and left.bit_length() * abs(right) > 2 * LARGEST_BITS:
                raise OverflowError
            power = left**right
            if isinstance(power, complex):
                raise ValueError("a root of a negative number")
            return cast(int | float, power)
        case _:
            raise ValueError("not arithmetic")


def _bounded(number: int | float) -> int | float:
    if isinstance(number, int) and number.bit_length() > LARGEST_BITS:
        raise OverflowError
    if isinstance(number, float) and (number != number or number in (float("inf"), float("-inf"))):
        raise OverflowError
    return number
