"""Runs tests with pytest, when the judge says so. Everything from the graded code happens in this process.

It looks whether pytest, unittest and the built-in names are still what they were before the graded code came:
that, and canaries, is how a package that patches the test runner is caught.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import time
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest  # in the sandbox it is found only once `main` says where

SITE = "/opt/gymllm/site"
_WATCHED = ("_pytest", "pluggy", "unittest", "pytest", "json")
_MOST_MESSAGE_CHARS = 2000


def watched() -> dict[str, object]:
    """Code of every function of the test machinery, by its place, and the built-in names."""
    seen: dict[str, object] = {f"builtins.{name}": value for name, value in vars(builtins).items()}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in _WATCHED:
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType):
                seen[f"{name}.{key}"] = value.__code__
            elif isinstance(value, type) and value.__module__ == name:
                for inner, held in list(vars(value).items()):
                    function = getattr(held, "__func__", held)
                    if isinstance(function, property):
                        function = function.fget
                    code = getattr(function, "__code__", None)
                    if isinstance(code, types.CodeType):
                        seen[f"{name}.{key}.{inner}"] = code
    return seen


# `_` is set by doctest and interactive use; __build_class__ and the like are not.
_LOOSE = {"builtins._", "builtins.__warningregistry__"}


def changed(before: dict[str, object], after: dict[str, object]) -> str:
    """What was replaced or removed; what has come is no matter."""
    for name, value in before.items():
        if name not in _LOOSE and after.get(name) is not value:
            return name
    return ""


class Lockstep:
    """A plug-in that runs what it is told to, and answers for each test."""

    def __init__(self, told: int, said: int) -> None:
        self._told = os.fdopen(told, "r", encoding="utf-8")
        self._said = said
        self._before: dict[str, object] = {}
        self._outcome, self._message = "passed", ""

    def say(self, message: object) -> None:
        line = json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(self._said, line) :]

    def hear(self) -> dict[str, Any]:
        return json.loads(self._told.readline() or '{"end": true}')

    def pytest_collection(self) -> None:
        """From now on the test machinery must stay as it is: graded code comes with the first test file."""
        self._before = watched()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items: dict[str, pytest.Item] = {}
        for item in session.items:
            items.setdefault(item.nodeid, item)
        tampered = changed(self._before, watched())
        if tampered:
            self.say({"tampered": f"{tampered} was replaced by the graded code"})
            return True
        self.say({"collected": list(items)})
        while True:
            order = self.hear()
            name = order.get("run")
            if name is None:
                return True
            self._outcome, self._message = "passed", ""
            began = time.perf_counter()
            item, following = items[name], items.get(str(order.get("next")))
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            seconds = time.perf_counter() - began
            if tampered := changed(self._before, watched()):
                self.say({"tampered": f"{tampered} was replaced by the graded code"})
                return True
            answer = {"test": name, "outcome": self._outcome, "message": self._message}
            self.say(answer | {"seconds": round(seconds, 4)})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "failed" and self._outcome != "failed":
            self._outcome = "failed"
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash is not None else str(report.longrepr)
            self._message = text[:_MOST_MESSAGE_CHARS]
        elif report.outcome == "skipped" and self._outcome == "passed":
            self._outcome, self._message = "skipped", ""


def main() -> None:
    """Runs what the judge asks for."""
    told, said = int(sys.argv[1]), int(sys.argv[2])
    for fd in (told, said):
        os.set_inheritable(fd, False)
    sys.path.append(SITE)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    import pytest

    lockstep = Lockstep(told, said)
    lockstep.say({"ready": True})
    order = lockstep.hear()
    root = order["root"]
    sys.path += [os.path.normpath(f"{root}/{part}") for part in order["python_path"]]
    here = os.path.dirname(os.path.abspath(__file__))
    arguments = ["-c", f"{here}/pytest.ini", "--rootdir", root, "--confcutdir", root]
    arguments += ["-p", "no:cacheprovider", "--continue-on-collection-errors", "-q", "--noconftest"]
    status = pytest.main([*arguments, *order["pytest_args"], *order["files"]], plugins=[lockstep])
    os._exit(int(status))


if __name__ == "__main__":
    main()
