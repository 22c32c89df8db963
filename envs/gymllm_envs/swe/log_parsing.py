"""What a log of tests says of each test.

swebench's own parsers read it where that package is installed, in a process of their own: the log was
written by graded code, the parsers are others' regular expressions, and importing the package as it is takes
seconds and half a gigabyte. Without it there are parsers of our own for what pytest, unittest and Django, and
sympy write.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, cast

from gymllm.errors import EnvError, UnknownNameError

Parser = Callable[[str], dict[str, str]]

R2E = "r2e"
_STATUSES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")
_HEADING = "short test summary info"
_TIMEOUT_S = 120.0
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_CONTROLS = re.compile(r"[\x01-\x08\x0b-\x1f]|\[\d+m")


def without_colors(text: str) -> str:
    """Without escape sequences of colours, and carriage returns."""
    return _COLORS.sub("", text).replace("\r", "")


def _summary(line: str) -> tuple[str, str] | None:
    """Status and the rest, of a line of pytest's short summary."""
    status, _, said = line.partition(" ")
    return (status, said.strip()) if status in _STATUSES and said.strip() else None


def pytest_log(log: str) -> dict[str, str]:
    """The short summary of `pytest -rA`: a status, then a name without spaces."""
    found: dict[str, str] = {}
    for line in log.split("\n"):
        if one := _summary(line):
            status, name = one[0], one[1].split()[0]
            if status != "SKIPPED" or not re.fullmatch(r"\[\d+\]", name):  # [2] a.py:3: reason
                found[name] = status
    return found


def pytest_options_log(log: str) -> dict[str, str]:
    """As `pytest_log`; of a parameter that is an absolute path only the last part counts."""

    found: dict[str, str] = {}
    for name, status in pytest_log(log).items():
        main, bracket, option = name.partition("[")
        option, close, _ = option.rpartition("]")
        if close and option.startswith("/") and not option.startswith("//") and "*" not in option:
            option = "/" + option.rpartition("/")[2]
        found[f"{main}[{option}]" if bracket and close else name] = status
    return found


def pytest_spaces_log(log: str) -> dict[str, str]:
    """The short summary, with names that hold spaces; or lines that end with the status, of old pytests."""
    found: dict[str, str] = {}
    for line in log.split("\n"):
        line = _CONTROLS.sub("", line)
        if one := _summary(line):
            status, name = one
            if status == "FAILED":
                name = name.split(" - ", 1)[0]
            if status != "SKIPPED" or not re.match(r"\[\d+\]( |$)", name):
                found[" ".join(name.split())] = status
        elif line.endswith(_STATUSES) and len(line.split()) > 1:
            *name_words, status = line.split()
            if status in _STATUSES:
                found[" ".join(name_words)] = status
    return found


def matplotlib_log(log: str) -> dict[str, str]:
    """As `pytest_log`; mouse buttons have numbers in names."""
    log = log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3")
    return pytest_log(log)


def seaborn_log(log: str) -> dict[str, str]:
    """As `pytest_log`, or of `pytest -v`; other statuses than passed and failed aren't read."""
    found = verbose_log(log) | pytest_log(log)
    return {name: status for name, status in found.items() if status in {"PASSED", "FAILED"}}


def verbose_log(log: str) -> dict[str, str]:
    """`pytest -v`: a name without spaces, then the status."""
    found: dict[str, str] = {}
    for line in log.split("\n"):
        parts = line.split()
        if len(parts) >= 2 and line[:1].strip() and parts[1] in _STATUSES:
            found[parts[0]] = parts[1]
    return found


def r2e_log(log: str) -> dict[str, str]:
    """The short summary; a test is called by what follows its file, joined by dots."""
    _, mark, summary = without_colors(log).partition(_HEADING)
    found: dict[str, str] = {}
    for line in summary.strip().split("\n") if mark else ():
        if (one := _summary(line)) and one[0] in {"PASSED", "FAILED", "ERROR"}:
            found[".".join(one[1].split("::")[1:]).split(" - ")[0]] = one[0]
    return found


def _note(found: dict[str, str], name: str, status: str) -> None:
    """What has failed stays so, whatever is said later."""
    if found.get(name) not in {"FAILED", "ERROR"}:
        found[name] = status


_UNITTEST = {"ok": "PASSED", "OK": "PASSED", "FAIL": "FAILED", "ERROR": "ERROR"}


def unittest_log(log: str) -> dict[str, str]:
    """unittest's and Django's, with -v: `name (class) ... ok`; the answer may be some lines below."""
    found: dict[str, str] = {}
    open_test = ""
    for line in map(str.strip, log.split("\n")):
        name, dots, answer = line.partition(" ... ")
        answer = answer.strip()
        if dots:
            open_test = name
            said = answer.split(" ")[0]
            if said == "skipped":
                _note(found, name, "SKIPPED")
            elif answer in _UNITTEST or answer.endswith((" ... ok", " ... FAIL", " ... ERROR")):
                _note(found, name, _UNITTEST[answer.rsplit(" ", 1)[-1]])
        elif open_test and line in _UNITTEST:
            _note(found, open_test, _UNITTEST[line])
        elif heading := re.match(r"(FAIL|ERROR): (\S+)", line):
            _note(found, heading[2], _UNITTEST[heading[1]])
    return found


def sympy_log(log: str) -> dict[str, str]:
    """sympy's `bin/test --verbose`: `name ok`, and headings of failures with file and name."""
    found: dict[str, str] = {}
    for file, name in re.findall(r"^_+ (\S+)\.py:(\S+) _+$", log, re.MULTILINE):
        found[f"{file}.py:{name}"] = "FAILED"
    ends = {"ok": "PASSED", "F": "FAILED", "E": "ERROR"}
    for line in map(str.strip, log.split("\n")):
        parts = line.split()
        if line.startswith("test_") and len(parts) > 1 and parts[-1] in ends:
            _note(found, parts[0], ends[parts[-1]])
    return found


def mypy_log(log: str) -> dict[str, str]:
    """mypy's cases: `PASSED` or `FAILED` anywhere in a line, the case last, or before ` - `."""
    found: dict[str, str] = {}
    for line in log.split("\n"):
        for status in ("PASSED", "FAILED"):
            if status in line:
                _note(found, line.split(" - ")[0].split()[-1], status)
                break
    return found


_PYTEST = (
    *("pytest", "astroid", "flask", "marshmallow", "pvlib", "pyvista", "sqlfluff", "xarray"),
)
OWN: dict[str, Parser] = {
    **{f"parse_log_{name}": pytest_log for name in _PYTEST},
    **{
        f"parse_log_{name}": pytest_options_log
        for name in ("pytest_options", "pydicom", "requests", "pylint")
    },
    **{
        f"parse_log_{name}": pytest_spaces_log
        for name in ("pytest_v2", "astropy", "scikit", "sphinx")
    },
    "parse_log_matplotlib": matplotlib_log,
    "parse_log_seaborn": seaborn_log,
    "parse_log_django": unittest_log,
    "parse_log_sympy": sympy_log,
    "unittest": unittest_log,
    "verbose": verbose_log,
    "mypy": mypy_log,
    R2E: r2e_log,
}
_NOT_PYTEST = {"parse_log_django", "parse_log_sympy", "unittest", "mypy"}


def runner_of(parser: str) -> Literal["pytest", "unittest", "functions", ""]:
    """What runs the tests that it reads of: which tests can be added to theirs. Empty: none that is known."""
    if parser in {"parse_log_django", "unittest"}:
        return "unittest"
    if parser == "parse_log_sympy":
        return "functions"
    return "pytest" if is_of_pytest(parser) else ""


def is_of_pytest(parser: str) -> bool:
    """Whether the tests that it reads of are run by pytest, named as pytest names them."""
    return parser in OWN and parser not in _NOT_PYTEST


def parse_log(parser: str, log: str, *, version: str = "", task: str = "") -> dict[str, str]:
    """Each test's status: PASSED, FAILED, ERROR, SKIPPED, XFAIL or XPASS. May take seconds.

    Args:
        parser: A key of swebench's `PARSER_REGISTRY`, or of `OWN`.
        log: What the tests wrote. A test that it says both passed and failed has failed.
        version: Of the repository, as its row says; a few of swebench's parsers ask.
        task: Its id; likewise.

    Raises:
        UnknownNameError: There is no such parser, or swebench, which has it, isn't installed.
        EnvError: swebench's parser broke.
    """
    check_parser(parser)
    theirs = _swebench_has(parser)
    found = _by_swebench(parser, log, version, task) if theirs else OWN[parser](log)
    # Lines may be forged, after the true ones. No run says both of one test; but pytest, ERROR of what
    # comes after one that passed.
    bad = {"FAILED"} if is_of_pytest(parser) else {"FAILED", "ERROR"}
    again = OWN[parser](_backwards(log) if is_of_pytest(parser) else log) if parser in OWN else {}
    for name, status in again.items():
        said = found.get(name)
        if (status in bad and said == "PASSED") or (status == "PASSED" and said in bad):
            found[name] = "FAILED"
    return found


def _backwards(log: str) -> str:
    """For a reader that takes what is said last: what is said first."""
    before, mark, after = log.partition(_HEADING)
    lines = reversed((after if mark else before).split("\n"))
    return "\n".join([mark, *lines, *reversed(before.split("\n"))] if mark else lines)


def check_parser(parser: str) -> None:
    """Raises UnknownNameError where `parse_log` would."""
    if parser not in OWN and not _swebench_has(parser):
        hint = (
            ""
            if has_swebench()
            else 'More come with swebench: pip install "gymllm-envs[swebench]".'
        )
        raise UnknownNameError("log parser", parser, OWN, hint)


def has_swebench() -> bool:
    """Whether a swebench that names its parsers (5 or newer) is installed."""
    found = importlib.util.find_spec("swebench")
    if found is None or not found.submodule_search_locations:
        return False
    file = Path(found.submodule_search_locations[0], "harness/log_parsers/__init__.py")
    return file.is_file() and "PARSER_REGISTRY" in file.read_text()


def _swebench_has(parser: str) -> bool:
    return parser.startswith("parse_log_") and has_swebench()


def _by_swebench(parser: str, log: str, version: str, task: str) -> dict[str, str]:
    worker = Path(__file__).with_name("swebench_worker.py")
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(worker), parser, version, task],
            input=log.encode(errors="replace"),
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {}  # no honest log takes so long: the graded code has written it
    if done.returncode == 3:
        raise UnknownNameError("log parser", parser, [*OWN, *done.stdout.decode().split()])
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()[-1000:]
        raise EnvError(f"swebench's {parser} broke: {said}")
    found: object = json.loads(done.stdout)
    return dict(cast("Mapping[str, str]", found))
