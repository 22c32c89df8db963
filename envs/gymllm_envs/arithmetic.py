"""`gymllm/Arithmetic-v0`: a few sums, one a turn; easy with a calculator, hard for a small model without.

The agent is asked "What is 473 * 861?"; the last number of its text is its answer. It is told whether
that was right, and asked the next question.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, final

from gymllm.env import Env
from gymllm.errors import ConfigError
from gymllm.pool import make_pool

ENV_ID = "gymllm/Arithmetic-v0"
OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": int.__add__,
    "-": int.__sub__,
    "*": int.__mul__,
}
LONGEST_NUMBER = 64
_NUMBER = re.compile(r"(?<!\d)-?\d[\d,]*(?:\.\d+)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Question:
    """One sum."""

    left: int
    operator: str
    right: int

    @property
    def text(self) -> str:
        """As the agent reads it."""
        return f"What is {self.left} {self.operator} {self.right}?"

    @property
    def answer(self) -> int:
        """The right answer."""
        return OPERATORS[self.operator](self.left, self.right)


@final
class Arithmetic(Env):
    """Questions are a function of the reset's seed; a reset without one draws the next.

    Reward is 1 / questions for each right answer, so a perfect episode's return is 1. A text without a
    number is answered with a request for one and `info["invalid_action"]`, up to `retries` times a
    question; then the question counts as wrong.
    """

    waits = False

    def __init__(  # pyright: ignore[reportInconsistentConstructor]  Env.__new__ takes anything
        self,
        *,
        questions: int = 2,
        digits: int = 3,
        operators: str = "+-*",
        retries: int = 1,
        render_mode: str | None = None,
    ) -> None:
        """Makes the environment.

        Args:
            questions: Questions an episode, >= 1.
            digits: Digits of each number, 1 to 9.
            operators: Which of `+`, `-` and `*` are asked, equally often.
            retries: How often a question is asked again after a text without a number, >= 0.
            render_mode: None or "ansi".

        Raises:
            ConfigError: A setting is out of its range.
        """
        if questions < 1:
            raise ConfigError(f"questions must be >= 1, got {questions}.")
        if not 1 <= digits <= 9:
            raise ConfigError(f"digits must be from 1 to 9, got {digits}.")
        if not operators or not set(operators) <= OPERATORS.keys():
            raise ConfigError(f"operators must be some of {''.join(OPERATORS)}, got {operators!r}.")
        if retries < 0:
            raise ConfigError(f"retries must be >= 0, got {retries}.")
        self.render_mode = render_mode
        self._count, self._digits, self._retries = questions, digits, retries
        self._operators = "".join(dict.fromkeys(operators))
        self._questions: list[Question] = []
        self._asked = self._right = self._unreadable = 0

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Asks the first question.

        Raises:
            ConfigError: Options were given; there are none.
        """
        if options:
            raise ConfigError(f"{ENV_ID} takes no reset options, got {sorted(options)}.")
        self._questions = [self._draw() for _ in range(self._count)]
        self._asked = self._right = self._unreadable = 0
        return self._questions[0].text, {}

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Marks the answer and asks the next question."""
        question = self._questions[self._asked]
        number = last_number(action)
        if number is None and self._unreadable < self._retries:
            self._unreadable += 1
            again = f"There is no number in that. {question.text}"
            return again, 0.0, False, False, self._info(invalid_action=True)
        correct = number == question.answer
        self._right += correct
        self._asked += 1
        self._unreadable = 0
        done = self._asked == self._count
        verdict = "Correct." if correct else f"Wrong, it is {question.answer}."
        follow = (
            f"{self._right} of {self._count} right." if done else self._questions[self._asked].text
        )
        reward = 1 / self._count if correct else 0.0
        info = self._info(invalid_action=number is None)
        return f"{verdict} {follow}", reward, done, False, info

    def _info(self, *, invalid_action: bool) -> dict[str, Any]:
        return {"invalid_action": invalid_action, "right_answers": self._right}

    def _draw(self) -> Question:
        operator = self._operators[int(self.np_random.integers(len(self._operators)))]
        least = 10 ** (self._digits - 1) if self._digits > 1 else 0
        left, right = self.np_random.integers(least, 10**self._digits, size=2).tolist()
        if operator == "-" and left < right:
            left, right = right, left
        return Question(left=left, operator=operator, right=right)


def last_number(text: str) -> Fraction | None:
    """The last number in a text, thousands separated by commas or not; None if there is none."""
    found = None
    for found in _NUMBER.finditer(text):  # noqa: B007  the last one is wanted
        pass
    # A number longer than any answer is wrong, whatever its digits.
    return None if found is None else Fraction(found[0][:LONGEST_NUMBER].replace(",", ""))


make_vector = functools.partial(make_pool, ENV_ID)
"""What `gymnasium.make_vec` calls."""
