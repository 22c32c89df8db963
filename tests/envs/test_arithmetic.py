"""`gymllm/Arithmetic-v0`: questions from the seed, answers by the last number."""

from __future__ import annotations

import functools
import re
from fractions import Fraction

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from gymllm.errors import ConfigError
from gymllm.testing import check_env_conformance
from gymllm.testing.env_conformance import UNREADABLE
from gymllm_envs.arithmetic import OPERATORS, Arithmetic, last_number

QUESTION = re.compile(r"What is (\d+) ([-+*]) (\d+)\?$")


def answer(observation: str) -> int:
    left, operator, right = QUESTION.search(observation).groups()
    return OPERATORS[operator](int(left), int(right))


@pytest.fixture
def env():
    env = Arithmetic(questions=3)
    yield env
    env.close()


def test_right_answers_add_up_to_1(env):
    observation, _ = env.reset(seed=0)
    total = 0.0
    for turn in range(3):
        observation, reward, terminated, truncated, info = env.step(f"It is {answer(observation)}.")
        total += reward
        assert (terminated, truncated) == (turn == 2, False)
        assert info == {"invalid_action": False, "right_answers": turn + 1}
    assert total == pytest.approx(1)
    assert observation == "Correct. 3 of 3 right."


def test_a_wrong_answer_is_told_and_the_next_question_asked(env):
    observation, _ = env.reset(seed=0)
    right = answer(observation)
    observation, reward, terminated, _, _ = env.step(str(right + 1))
    assert observation.startswith(f"Wrong, it is {right}. What is ")
    assert (reward, terminated) == (0.0, False)


def test_unreadable_answers_are_told_counted_and_bounded():
    env = Arithmetic(questions=2, retries=2)
    first, _ = env.reset(seed=1)
    for _ in range(2):
        observation, reward, terminated, _, info = env.step("dunno")
        assert observation == f"There is no number in that. {first}"
        assert (reward, terminated, info["invalid_action"]) == (0.0, False, True)
    observation, reward, _, _, info = env.step("")
    assert observation.startswith(f"Wrong, it is {answer(first)}.")
    assert info["invalid_action"]
    observation, _, _, _, info = env.step("what?")  # each question has its own retries
    assert observation.startswith("There is no number")


def test_the_seed_decides_the_questions():
    def questions(seed):
        env = Arithmetic(questions=4)
        seen = [env.reset(seed=seed)[0]]
        seen += [env.step("1")[0] for _ in range(3)]
        return seen, env.reset()[0]

    assert questions(5) == questions(5)
    assert questions(5) != questions(6)


@pytest.mark.parametrize("digits", [1, 3, 9])
@pytest.mark.parametrize("operators", ["+", "-*", "+-*"])
def test_settings_shape_the_questions(digits, operators):
    env = Arithmetic(questions=1, digits=digits, operators=operators)
    for seed in range(20):
        left, operator, right = QUESTION.search(env.reset(seed=seed)[0]).groups()
        assert len(left) == len(right) == digits
        assert operator in operators
        assert answer(f"What is {left} {operator} {right}?") >= 0
        assert env.step(str(answer(f"What is {left} {operator} {right}?")))[1] == 1.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4042", 4042),
        ("47 * 86 = 4,042.", 4042),
        ("first 3, then -5", -5),
        ("12-5", 5),
        ("(-7)", -7),
        ("7.0", 7),
        ("7.5", Fraction(15, 2)),
        ("1,000,000", 1_000_000),
        ("0012", 12),
        ("x" * 1000 + "3", 3),
        ("**42**", 42),
        ("", None),
        ("none", None),
        ("- . ,", None),
        ("٣", None),
    ],
)
def test_the_last_number_is_the_answer(text, number):
    assert last_number(text) == number


def test_no_text_breaks_the_reader():
    assert last_number("9" * 100_000) != 9
    assert last_number("1," * 50_000) is not None
    assert last_number("5." + "1" * 100_000) != 5
    assert last_number("1" * 63 + ".5") is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"questions": 0}, "questions must be >= 1"),
        ({"digits": 0}, "digits must be from 1 to 9"),
        ({"digits": 10}, "digits must be from 1 to 9"),
        ({"operators": ""}, "operators must be some of"),
        ({"operators": "+/"}, r"must be some of \+-\*, got '\+/'"),
        ({"retries": -1}, "retries must be >= 0"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Arithmetic(**settings)


def test_options_are_refused(env):
    with pytest.raises(ConfigError, match="takes no reset options, got \\['hard'\\]"):
        env.reset(seed=0, options={"hard": True})


def test_it_conforms():
    make = functools.partial(gymnasium.make, "gymllm/Arithmetic-v0")
    check_env_conformance(make, actions=["12", *UNREADABLE, "it is -3"])


def test_it_is_a_gymnasium_env():
    env = gymnasium.make("gymllm/Arithmetic-v0", digits=2, render_mode="ansi")
    check_env(env.unwrapped, skip_render_check=True)
    observation, _ = env.reset(seed=3)
    assert env.render() == observation
    env.close()
