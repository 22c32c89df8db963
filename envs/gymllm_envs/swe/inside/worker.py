"""Runs tests with pytest, when the judge says so. Everything from the graded code happens in this process.

It looks whether pytest, unittest and the built-in names are still what they were before the graded code came.
That names most forgers at once, but a package that patches this module gets past it: what stops those are the
canaries, which are as good as anything that can be done from within the process.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest  # in the sandbox it is found only once `main` says where

SITE = "/opt/gymllm/site"
_WATCHED = ("_pytest", "pluggy", "unittest", "pytest", "json", "__main__")
_MOST_MESSAGE_CHARS = 2000
# `_` is set by doctest and interactive use.
_LOOSE = {"_", "__warningregistry__"}
# The same numbers on all architectures.
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
_SCOPE_SIGNAL = 1 << 1
_PR_SET_NO_NEW_PRIVS = 38

Namespace = Mapping[str, object]


class Watch:
    """What the test machinery was made of at one moment."""

    def __init__(self, config: pytest.Config) -> None:
        self._manager = config.pluginmanager
        self._plugins = set(map(id, self._manager.get_plugins()))
        self._hooks = {hook: list(map(id, hook.get_hookimpls())) for hook in self._relays()}
        self._values = list(_values())
        # Functions keep their identity when their code is exchanged.
        self._code = [
            (place, function, function.__code__)
            for place, function in _functions(value for _, _, _, value in self._values)
        ]
        self._tracing = (sys.gettrace(), sys.getprofile())

    def changed(self) -> str:
        """What was replaced or removed, or who came in; empty if all is as it was."""
        for where, namespace, name, value in self._values:
            if namespace.get(name) is not value:
                return f"{where}.{name}"
        for place, function, code in self._code:
            if function.__code__ is not code:
                return place
        if set(map(id, self._manager.get_plugins())) != self._plugins:
            return "the list of plug-ins"
        for hook, before in self._hooks.items():
            if list(map(id, hook.get_hookimpls())) != before:
                return f"the hook {hook.name}"
        if (sys.gettrace(), sys.getprofile()) != self._tracing:
            return "the interpreter's trace function"
        return ""

    def _relays(self) -> list[Any]:
        return list(vars(self._manager.hook).values())


def _values() -> Iterator[tuple[str, Namespace, str, object]]:
    """All functions and classes of the test machinery, those inside of classes too, and where they are."""
    for name, value in vars(builtins).items():
        if name not in _LOOSE:
            yield "builtins", vars(builtins), name, value
    for where, module in list(sys.modules.items()):
        if where.partition(".")[0] not in _WATCHED:
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
                yield where, vars(module), name, value
            if isinstance(value, type) and value.__module__ == where:
                for inner, held in list(vars(value).items()):
                    if _code_holders(held):
                        yield f"{where}.{name}", vars(value), inner, held


def _code_holders(held: object) -> list[types.FunctionType]:
    """The functions in what a class holds: a method, a property, a class method."""
    found: tuple[object, ...] = (held, getattr(held, "__func__", None))
    if isinstance(held, property):
        found = (held.fget, held.fset)
    return [f for f in found if isinstance(f, types.FunctionType)]


def _functions(values: Iterable[object]) -> Iterator[tuple[str, types.FunctionType]]:
    for value in values:
        for function in _code_holders(value):
            yield f"{function.__module__}.{function.__qualname__}", function


class Lockstep:
    """A plug-in that runs what it is told to, and answers for each test."""

    def __init__(self, told: int, said: int) -> None:
        self._told = os.fdopen(told, "r", encoding="utf-8")
        self._said = said
        self._watch: Watch | None = None
        self._outcome, self._message = "passed", ""

    def say(self, message: object) -> None:
        line = json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(self._said, line) :]

    def hear(self) -> dict[str, Any]:
        return json.loads(self._told.readline() or '{"end": true}')

    def pytest_collection(self, session: pytest.Session) -> None:
        """From now on the test machinery must stay as it is: graded code comes with the first test file."""
        self._watch = Watch(session.config)

    def _whole(self) -> bool:
        assert self._watch is not None
        if changed := self._watch.changed():
            self.say({"tampered": f"{changed} was replaced by the graded code"})
        return not changed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items: dict[str, pytest.Item] = {}
        for item in session.items:
            items.setdefault(item.nodeid, item)
        if not self._whole():
            return True
        self.say({"collected": list(items)})
        while (name := (order := self.hear()).get("run")) is not None:
            self._outcome, self._message = "passed", ""
            item, following = items[name], items.get(str(order.get("next")))
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if not self._whole():
                return True
            self.say({"test": name, "outcome": self._outcome, "message": self._message})
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "failed" and self._outcome != "failed":
            self._outcome = "failed"
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash is not None else str(report.longrepr)
            self._message = text[:_MOST_MESSAGE_CHARS]
        elif report.outcome == "skipped" and self._outcome == "passed":
            self._outcome, self._message = "skipped", ""


def spare_the_judge() -> None:
    """Lets this process send signals to its own descendants only, where the kernel knows how (Linux 6.12).

    Without it a stopped judge costs time: the host waits for its report in vain.
    """
    libc = ctypes.CDLL(None)
    attributes = (ctypes.c_uint64 * 3)(0, 0, _SCOPE_SIGNAL)
    ruleset = libc.syscall(_LANDLOCK_CREATE_RULESET, attributes, ctypes.sizeof(attributes), 0)
    if ruleset >= 0:
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0)
        os.close(ruleset)


def main() -> None:
    """Runs what the judge asks for."""
    spare_the_judge()
    told, said = int(sys.argv[1]), int(sys.argv[2])
    for fd in (told, said):
        os.set_inheritable(fd, False)
    sys.path.append(SITE)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    os.environ["PYTHONPATH"] = os.environ.pop("GYMLLM_PYTHONPATH", "")  # for what tests start
    import pytest

    lockstep = Lockstep(told, said)
    lockstep.say({"ready": True})
    order = lockstep.hear()
    root = order["root"]
    sys.path += [os.path.normpath(f"{root}/{part}") for part in order["python_path"]]
    here = os.path.dirname(os.path.abspath(__file__))
    arguments = ["-c", f"{here}/pytest.ini", "--rootdir", root, "--confcutdir", root]
    arguments += ["-p", "no:cacheprovider", "--continue-on-collection-errors", "-q", "--noconftest"]
    arguments += [
        "--tb",
        "native",
    ]  # others read the sources, which may end in an error of their own
    status = pytest.main([*arguments, *order["pytest_args"], *order["files"]], plugins=[lockstep])
    os._exit(int(status))


if __name__ == "__main__":
    main()
