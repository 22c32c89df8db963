"""Problem statements say what was done, wanted and got, and not where the fault is."""

import textwrap

from gymllm_envs.swe.making.running import Failure, Outcome
from gymllm_envs.swe.making.statement import problem_statement

TEXT = textwrap.dedent(
    """
    import os, sys
    from math import floor as down, ceil
    import unittest
    import pytest
    from shapes import area, Box

    SIDES = (2, 3)
    FAR = raises(ValueError)


    def helper(n):
        return n + 1


    def test_area():
        unrelated = 1
        box = Box(*SIDES)
        box.grow(down(1.5))
        assert box.sides == (3, 4)
        assert area(box, helper(1)) == 12


    @pytest.mark.parametrize("given, wanted", [])
    def test_given(given, wanted):
        assert wanted == area(given)


    def test_raises():
        with pytest.raises(ValueError):
            area(None)


    class BoxTest(unittest.TestCase):
        def setUp(self):
            self.box = Box(1, 1)

        def test_equal(self):
            self.assertEqual(area(self.box), 1)

        def test_member(self):
            boxes = make_boxes(2)
            self.assertEqual(len(boxes), 2)
            self.assertNotIn(self.box, boxes)

        def test_true(self):
            for n in range(3):
                self.assertTrue(self.box.fits(n))
    """
)


def failing(name: str, fragment: str, error: str, message: str, **parameters: str) -> Outcome:
    lines = TEXT.split("\n")
    first = next(n for n, text in enumerate(lines, 1) if f"def {name}(" in text)
    at = next(n for n, text in enumerate(lines, 1) if fragment in text)
    if lines[first - 2].startswith("@"):
        first -= 1
    failure = Failure(error=error, message=message, line=at, parameters=parameters, depth=1)
    return Outcome(
        id=f"t.py::{name}", outcome="failed", seconds=0, file="t.py", line=first, failure=failure
    )


def statement(*tests: Outcome, secret: str = "volume_of") -> str:
    return problem_statement("shapes==1.2", tests, {"t.py": TEXT}, secret)


AREA = failing(
    "test_area",
    "assert area(box",
    "AssertionError",
    "assert 13 == 12\n +  where 13 = area(<Box>, 2)",
)


def test_an_assertion_becomes_code_expectation_and_outcome() -> None:
    text = statement(AREA)
    assert text.startswith("# `area(box, helper(1))` gives a wrong result\n\nI use shapes 1.2.\n")
    code = text.partition("```python\n")[2].partition("\n```")[0]
    assert code == textwrap.dedent(
        """\
        from math import floor as down
        from shapes import area, Box
        SIDES = (2, 3)
        def helper(n):
            return n + 1

        box = Box(*SIDES)
        box.grow(down(1.5))
        area(box, helper(1))"""
    )
    assert "**What I expected**\n\n`12`." in text
    assert "**What happened**\n\n```\n13\n```" in text


def test_parameters_are_told_and_sides_are_found() -> None:
    text = statement(
        failing(
            "test_given", "wanted ==", "AssertionError", "assert 3 == 4", given="'a'", wanted="3"
        )
    )
    assert "# `area('a')` gives a wrong result" in text
    assert "given = 'a'\narea(given)" in text
    assert "`3`." in text
    assert "```\n4\n```" in text


def test_an_exception_is_told_without_its_place() -> None:
    text = statement(failing("test_area", "box = Box", "TypeError", "volume_of() takes 1 argument"))
    assert "raises TypeError" in text.split("\n")[0]
    assert "TypeError: a function takes 1 argument" in text
    assert "volume_of" not in text


def test_a_name_that_the_test_calls_is_kept() -> None:
    text = statement(
        failing("test_area", "assert area(box", "TypeError", "area() takes 1 argument"),
        secret="area",
    )
    assert "TypeError: area() takes 1 argument" in text


def test_an_error_that_does_not_come() -> None:
    text = statement(
        failing("test_raises", "area(None)", "Failed", "DID NOT RAISE <class 'ValueError'>")
    )
    assert "`area(None)` doesn't raise ValueError" in text
    assert "`ValueError`." in text
    assert "No error." in text


def test_another_error_than_the_wanted_one() -> None:
    text = statement(failing("test_raises", "area(None)", "KeyError", "'x'"))
    assert "`area(None)` raises KeyError" in text
    assert "**What I expected**\n\n`ValueError`." in text


def test_unittest_with_its_set_up() -> None:
    text = statement(failing("test_equal", "assertEqual", "AssertionError", "2 != 1"))
    assert "self.box = Box(1, 1)\narea(self.box)" in text
    assert "`1`." in text
    assert "```\n2\n```" in text


def test_other_checks_of_unittest_become_expressions() -> None:
    text = statement(
        failing("test_member", "assertNotIn", "AssertionError", "<Box> unexpectedly found in [...]")
    )
    assert "# `self.box not in boxes` gives a wrong result" in text
    assert "boxes = make_boxes(2)\nself.box not in boxes\n```" in text
    assert "`True`." in text


def test_helpers_keep_their_decorators_and_wanted_names_are_explained() -> None:
    text = """
import shapes

@shapes.cached
def helper(n):
    return n


def test_it():
    output = [4]
    assert helper(3) == output
"""
    failure = Failure(
        error="AssertionError", message="assert 3 == [4]", line=11, parameters={}, depth=1
    )
    test = Outcome(
        id="t.py::test_it", outcome="failed", seconds=0, file="t.py", line=9, failure=failure
    )
    told = problem_statement("shapes==1.2", [test], {"t.py": text}, "secret")
    assert (
        "import shapes\n@shapes.cached\ndef helper(n):\n    return n\n\noutput = [4]\nhelper(3)"
        in told
    )
    assert "`output`." in told


def test_a_check_in_a_loop_is_told_with_the_loop() -> None:
    text = statement(failing("test_true", "assertTrue", "AssertionError", "False is not true"))
    assert "for n in range(3):\n    self.assertTrue(self.box.fits(n))" in text
    assert "False is not true" in text


def test_others_are_told_too_and_addresses_are_not() -> None:
    other = failing("test_equal", "assertEqual", "AssertionError", "<A at 0x7f00aa11> != 1")
    text = statement(AREA, other)
    assert text.count("**What I did**") == 2
    assert "## Also: " in text
    assert "0x7f" not in text
    assert text == statement(other, AREA)


def test_a_failure_outside_of_the_test_still_gives_a_statement() -> None:
    nowhere = failing("test_area", "import os", "RuntimeError", "no")
    assert "`test_area`" in statement(nowhere)


def test_places_of_this_machine_are_not_told() -> None:
    message = 'File "/home/me/py/lib/python3.11/json/decoder.py" at 0x7f00aa1122'
    text = statement(failing("test_area", "assert area(box", "ValueError", message))
    assert 'ValueError: File "/usr/lib/python3.11/json/decoder.py" at 0x...' in text
