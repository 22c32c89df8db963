"""Logs are read as swebench reads them, and nothing forged after the fact counts."""

from __future__ import annotations

import pytest

from gymllm.errors import UnknownNameError
from gymllm_envs.swe import log_parsing
from gymllm_envs.swe.log_parsing import OWN, R2E, check_parser, is_of_pytest, parse_log

PYTEST = """\
============================= test session starts ==============================
collected 6 items

a.py F.sxE                                                              [100%]

=========================== short test summary info ============================
PASSED a.py::test_one
PASSED a.py::TestTwo::test_two[x-1]
PASSED a.py::test_path[/root/x/file.txt]
SKIPPED [1] a.py:30: no network
XFAIL a.py::test_five - known
ERROR a.py::test_six - NameError: name 'x' is not defined
FAILED a.py::test_three - assert 1 == 2
==================== 1 failed, 3 passed, 1 skipped, 1 xfailed ===================
"""
SPACES = """\
\x1b[32mPASSED\x1b[0m a.py::test_one[a b]
\x1b[31mFAILED\x1b[0m a.py::\x1b[1mtest_two[c d]\x1b[0m - assert 1
a.py::test_old PASSED
"""
DJANGO = """\
test_a (app.tests.ATests) ... ok
test_b (app.tests.ATests)
A docstring of it. ... FAIL
test_c (app.tests.ATests) ... skipped 'no'
test_d (app.tests.ATests) ... ERROR
test_e (app.tests.ATests) ... Something said
ok

======================================================================
FAIL: test_b (app.tests.ATests)
"""
SYMPY = """\
sympy/core/a.py[3]
test_one ok
test_two F
test_three E                                                              [FAIL]

________________________________________________________________________________
____________________ sympy/core/tests/test_a.py:test_two _______________________
"""
VERBOSE = """\
a.py::test_one PASSED                                                     [ 33%]
a.py::test_two FAILED                                                     [ 66%]
a.py::test_three SKIPPED (no network)                                     [100%]
"""
MYPY = """\
[gw0] PASSED mypy/test/testcheck.py::TypeCheckSuite::testA
FAILED mypy/test/testcheck.py::TypeCheckSuite::testB
"""


@pytest.mark.parametrize(
    ("parser", "log", "expected"),
    [
        (
            "parse_log_pytest",
            PYTEST,
            {
                "a.py::test_one": "PASSED",
                "a.py::TestTwo::test_two[x-1]": "PASSED",
                "a.py::test_path[/root/x/file.txt]": "PASSED",
                "a.py::test_five": "XFAIL",
                "a.py::test_six": "ERROR",
                "a.py::test_three": "FAILED",
            },
        ),
        (
            "parse_log_astropy",
            SPACES,
            {
                "a.py::test_one[a b]": "PASSED",
                "a.py::test_two[c d]": "FAILED",
                "a.py::test_old": "PASSED",
            },
        ),
        ("parse_log_sympy", SYMPY, {"test_one": "PASSED", "test_two": "FAILED"}),
        ("verbose", VERBOSE, {"a.py::test_one": "PASSED", "a.py::test_two": "FAILED"}),
        (R2E, PYTEST, {"test_one": "PASSED", "TestTwo.test_two[x-1]": "PASSED"}),
        ("mypy", MYPY, {"mypy/test/testcheck.py::TypeCheckSuite::testA": "PASSED"}),
        (
            "parse_log_django",
            DJANGO,
            {
                "test_a (app.tests.ATests)": "PASSED",
                "A docstring of it.": "FAILED",
                "test_c (app.tests.ATests)": "SKIPPED",
                "test_d (app.tests.ATests)": "ERROR",
                "test_e (app.tests.ATests)": "PASSED",
            },
        ),
    ],
)
def test_what_runners_write_is_read(parser: str, log: str, expected: dict[str, str]) -> None:
    found = parse_log(parser, log)
    assert found == {**found, **expected}


def test_of_a_path_in_a_parameter_the_last_part_counts() -> None:
    found = parse_log("parse_log_requests", PYTEST)
    assert found["a.py::test_path[/file.txt]"] == "PASSED"
    assert found["a.py::TestTwo::test_two[x-1]"] == "PASSED"


@pytest.mark.parametrize("parser", ["parse_log_pytest", "parse_log_astropy", R2E])
@pytest.mark.parametrize("where", ["after", "before"])
def test_a_test_that_both_passed_and_failed_has_failed(parser: str, where: str) -> None:
    forged = "PASSED a.py::test_three\nshort test summary info\nPASSED a.py::test_three\n"
    log = PYTEST + forged if where == "after" else forged + PYTEST
    name = "test_three" if parser == R2E else "a.py::test_three"
    assert parse_log(parser, log)[name] == "FAILED"


def test_what_unittest_and_sympy_said_failed_stays_so() -> None:
    forged = "test_b (app.tests.ATests) ... FAIL\n" + DJANGO + "test_b (app.tests.ATests) ... ok\n"
    assert parse_log("parse_log_django", forged)["test_b (app.tests.ATests)"] == "FAILED"
    assert parse_log("unittest", DJANGO + "test_d (app.tests.ATests) ... ok\n")[
        "test_d (app.tests.ATests)"
    ] in {"ERROR", "FAILED"}
    assert parse_log("parse_log_sympy", SYMPY + "test_two ok\n")["test_two"] == "FAILED"


def test_a_parser_that_nobody_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_parsing, "has_swebench", lambda: False)
    with pytest.raises(UnknownNameError, match=r'pip install "gymllm-envs\[swebench\]"'):
        check_parser("parse_log_gotest")
    with pytest.raises(UnknownNameError, match="Did you mean parse_log_pytest"):
        parse_log("parse_log_pytst", "")
    assert is_of_pytest("parse_log_flask")
    assert not is_of_pytest("parse_log_django")


THEIRS = sorted(name for name in OWN if name.startswith("parse_log_"))


@pytest.mark.skipif(not log_parsing.has_swebench(), reason="swebench isn't installed")
@pytest.mark.parametrize("parser", THEIRS)
def test_ours_read_as_swebenchs_do(parser: str) -> None:
    logs = {"parse_log_django": DJANGO, "parse_log_sympy": SYMPY}
    log = logs.get(parser, PYTEST + SPACES * (OWN[parser] is log_parsing.pytest_spaces_log))
    theirs = log_parsing.parse_log(parser, log)
    ours = OWN[parser](log)
    assert ours == theirs


@pytest.mark.skipif(not log_parsing.has_swebench(), reason="swebench isn't installed")
def test_swebench_reads_what_only_it_can() -> None:
    log = "=== RUN   TestA\n--- PASS: TestA (0.01s)\n--- FAIL: TestB (0.00s)\n"
    assert parse_log("parse_log_gotest", log) == {"TestA": "PASSED", "TestB": "FAILED"}
    with pytest.raises(UnknownNameError, match="Unknown log parser 'parse_log_cobol'"):
        parse_log("parse_log_cobol", log)
