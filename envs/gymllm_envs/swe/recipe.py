"""How a task in an image is set up and graded: what its data set leaves to its own harness.

A reader puts it into `SweTask.extra["recipe"]`, so that a task file keeps it; `Recipe.of` reads it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from gymllm.errors import ConfigError, UnknownNameError
from gymllm_envs.swe.task import SweTask


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is done around the test command of a task with an image."""

    format: str = ""
    """The data set's, for reading."""
    log_parser: str = "parse_log_pytest"
    """As swebench's `PARSER_REGISTRY` calls it, or one of `log_parsing.OWN`."""
    test_setup: str = ""
    """Lines of bash before the test command, in the same shell. What they say isn't part of the log."""
    path: str = ""
    """PATH of the agent's commands and of the tests; empty: the image's."""
    hidden: tuple[str, ...] = ()
    """Files and folders that the agent must not see: taken away before it starts."""
    bring: str = ""
    """Lines of bash that put hidden tests in place in the graded tree, before anything of the agent's is."""
    skipped_is_kept: bool = False
    """Whether a test of PASS_TO_PASS may also be skipped."""
    expected: Mapping[str, str] = field(default_factory=dict[str, str])
    """Not empty: the log must have exactly these tests with these statuses (R2E-Gym)."""

    @classmethod
    def of(cls, task: SweTask) -> Recipe:
        """Reads it.

        Raises:
            ConfigError: The task has no test command, or a field is of another type.
            UnknownNameError: There is no such field.
        """
        if not task.test_command:
            raise ConfigError(
                f"task {task.id} has no test_command: nothing says how its tests are run. Read it with "
                "load_tasks, or give one."
            )
        given = task.extra.get("recipe", {})
        if not isinstance(given, Mapping):
            raise _wrong(task.id, "recipe", "an object", given)
        values: dict[str, object] = {}
        for name, value in cast("Mapping[str, object]", given).items():
            if name not in cls.__dataclass_fields__:
                raise UnknownNameError(
                    f"field in the recipe of task {task.id}", name, cls.__dataclass_fields__
                )
            if name == "hidden":
                values[name] = tuple(_texts(value, task.id, name))
            elif name == "expected":
                if not isinstance(value, Mapping):
                    raise _wrong(task.id, name, "an object of test names and statuses", value)
                values[name] = dict(cast("Mapping[str, str]", value))
            elif not isinstance(value, bool if name == "skipped_is_kept" else str):
                expected = "true or false" if name == "skipped_is_kept" else "a text"
                raise _wrong(task.id, name, expected, value)
            else:
                values[name] = value
        return cls(**values)  # type: ignore[arg-type]  # checked above

    def extra(self) -> dict[str, object]:
        """For `SweTask.extra`; what is as usual is left out."""
        usual = Recipe()
        found: dict[str, object] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value != getattr(usual, name):
                found[name] = list(self.hidden) if name == "hidden" else value
        return {"recipe": found}


def _texts(value: object, task: str, name: str) -> list[str]:
    texts = cast("list[object]", value if isinstance(value, list | tuple) else [None])
    if all(isinstance(text, str) for text in texts):
        return cast("list[str]", texts)
    raise ConfigError(f"task {task}: {name} must be a list of paths, got {texts!r}.")


def _wrong(task: str, name: str, expected: str, value: object) -> ConfigError:
    return ConfigError(f"task {task}: {name} must be {expected}, got {value!r}.")
