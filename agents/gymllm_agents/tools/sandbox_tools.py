"""Tools in a sandbox: a shell that stays, Python programs, an editor; one sandbox in each episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, cast, final

from gymllm.clip import clip
from gymllm.errors import (
    ConfigError,
    GymLLMError,
    SandboxError,
    SandboxStartError,
    UnknownNameError,
)
from gymllm.tool_calls import ToolSchema
from gymllm_agents.tools.held import Held
from gymllm_agents.tools.tool import Tool, ToolError, ToolFunction

if TYPE_CHECKING:  # at run time where they are used: importing gymllm_agents brings no sandboxes
    from gymllm.sandbox import Editor, ExecResult, Sandbox, SandboxSpec, Shell

SANDBOX_TOOLS = ("bash", "python", "edit")
"""The names that `sandbox_tools` knows."""
START_S = 60.0
"""Beyond the time of a command, for the start of the sandbox."""


def sandbox_tools(
    spec: SandboxSpec | None = None,
    *,
    kind: str = "local",
    names: Sequence[str] = SANDBOX_TOOLS,
    command_timeout_s: float = 60.0,
    max_result_chars: int = 8000,
) -> list[Tool]:
    """Makes tools that share one sandbox in each episode, opened at the first call.

    It is closed when the episode ends, however that happens. If it dies, by whatever the model did in it,
    the model is told so and the next call opens a fresh one. One that can't be opened fails the episode.

    Args:
        spec: What each sandbox is made from; an empty work tree if None.
        kind: As for `open_sandbox`.
        names: Which tools: "bash", "python", "edit".
        command_timeout_s: Longest that a command or program may take; what it wrote until then is told.
        max_result_chars: As in `Tool`.

    Raises:
        UnknownNameError: No such tool.
        ConfigError: `command_timeout_s` isn't positive.
    """
    if not command_timeout_s > 0:
        raise ConfigError(f"command_timeout_s must be > 0, got {command_timeout_s}.")
    bench = _Bench(spec, kind, command_timeout_s, max_result_chars)
    made: dict[str, Callable[[], Tool]] = {
        "bash": lambda: bench.tool(
            "bash", _BASH.format(limit=command_timeout_s), _COMMAND, bench.bash
        ),
        "python": lambda: bench.tool(
            "python", _PYTHON.format(limit=command_timeout_s), _CODE, bench.python
        ),
        "edit": lambda: bench.tool("edit", _EDIT, _EDIT_PARAMETERS, bench.edit),
    }
    for name in names:
        if name not in made:
            raise UnknownNameError("tool of a sandbox", name, made)
    return [made[name]() for name in names]


async def check_sandbox(spec: SandboxSpec | None = None, *, kind: str = "local") -> None:
    """Opens a sandbox and closes it, so that what is missing shows before anything is played.

    Raises:
        ConfigError: None can be opened; says why.
        MissingExtraError: A package isn't installed.
    """
    from gymllm.sandbox import open_sandbox

    try:
        sandbox = await open_sandbox(spec, kind)
    except SandboxError as error:
        raise ConfigError(f"tools in a sandbox can't be used here: {error}") from error
    await sandbox.aclose()


@final
class _Opened:
    """The sandbox of one episode, its shell and its editor."""

    def __init__(self, sandbox: Sandbox, editor: Editor) -> None:
        self.sandbox, self.editor = sandbox, editor
        self._shell: Shell | None = None

    async def shell(self) -> Shell:
        """The shell, started anew where a command has ended it."""
        if self._shell is None:
            self._shell = await self.sandbox.shell()
        elif not self._shell.alive:
            await self._shell.restart()
        return self._shell

    async def aclose(self) -> None:
        self._shell = None
        with suppress(SandboxError):  # dead already
            await self.sandbox.aclose()


@final
class _Bench:
    """What the tools of one `sandbox_tools` have in common."""

    def __init__(
        self, spec: SandboxSpec | None, kind: str, command_timeout_s: float, max_chars: int
    ) -> None:
        self._spec, self._kind = spec, kind
        self._timeout_s, self._max_chars = command_timeout_s, max_chars

    def tool(
        self, name: str, description: str, parameters: ToolSchema, function: ToolFunction
    ) -> Tool:
        return Tool(
            name=name,
            description=description,
            parameters=parameters,
            function=function,
            timeout_s=self._timeout_s + START_S,
            max_result_chars=self._max_chars,
            in_order=True,
        )

    async def bash(self, arguments: Mapping[str, object]) -> str:
        opened = await self._opened()
        command = cast(str, arguments["command"])
        if "\0" in command:
            raise ToolError("the command holds a NUL character.")
        try:
            done = await (await opened.shell()).run(command, timeout_s=self._timeout_s)
        except SandboxError as error:
            raise await self._died() from error
        if done.shell_died and not opened.sandbox.alive:
            raise await self._died()
        return self._told(done, bytes(done.stdout))

    async def python(self, arguments: Mapping[str, object]) -> str:
        opened = await self._opened()
        code = cast(str, arguments["code"]).encode("utf-8", "replace")
        try:
            done = await opened.sandbox.exec(
                ["python3", "-"], input=code, timeout_s=self._timeout_s
            )
        except SandboxError as error:
            raise await self._died() from error
        return self._told(done, bytes(done.stdout) + bytes(done.stderr))

    async def edit(self, arguments: Mapping[str, object]) -> str:
        from gymllm.sandbox import EditError

        opened = await self._opened()
        command = cast(str, arguments["command"])
        given = {name: value for name, value in arguments.items() if name != "command"}
        needed, allowed = _EDITS[command]
        for name in needed:
            if name not in given:
                raise ToolError(f"{command} needs the argument {name!r}.")
        for name in given:
            if name not in (*needed, *allowed):
                raise ToolError(f"{command} takes {', '.join((*needed, *allowed))}; not {name!r}.")
        try:
            return await getattr(opened.editor, command)(**given)
        except EditError as error:
            raise ToolError(str(error)) from error
        except SandboxError as error:
            raise await self._died() from error

    async def _opened(self) -> _Opened:
        opened = await Held.here().get(self, self._open)
        if opened.sandbox.alive:
            return opened
        raise await self._died()

    # Only a sandbox that can't be opened fails the episode: what breaks later may be the model's doing, and
    # one that is failed is not learnt from.

    async def _open(self) -> _Opened:
        from gymllm.sandbox import Editor, open_sandbox

        try:
            sandbox = await open_sandbox(self._spec, self._kind)
        except SandboxError:
            raise
        except GymLLMError as error:  # a package is missing: no fault of the model's
            raise SandboxStartError(str(error)) from error
        return _Opened(sandbox, Editor(sandbox, max_chars=max(self._max_chars, 200)))

    async def _died(self) -> ToolError:
        await Held.here().drop(self)
        return ToolError(
            "the sandbox died, perhaps of what ran in it, and all files in it are lost. The next call "
            "starts a fresh one."
        )

    def _told(self, done: ExecResult, output: bytes) -> str:
        from gymllm.sandbox import clean

        notes: list[str] = []
        if done.timed_out:
            notes.append(f"[stopped after {self._timeout_s:g} s]")
        elif done.signal is not None:
            notes.append(f"[ended by signal {done.signal}]")
        elif done.exit_code:
            notes.append(f"[exit code {done.exit_code}]")
        if done.shell_died:
            notes.append("[the shell has ended; the next command starts a fresh one]")
        note = "\n".join(notes)
        text = clip(clean(output).rstrip("\n"), max(self._max_chars - len(note) - 100, 50))
        return "\n".join(filter(None, (text, note))) or "[no output]"


def _parameters(required: Sequence[str], properties: Mapping[str, object]) -> ToolSchema:
    return {"type": "object", "properties": dict(properties), "required": list(required)}


_BASH = (
    "Runs a command in a bash shell that stays: its directory, variables and background jobs are there at "
    "the next call. Standard output and error come together. There is no terminal, no input and no "
    "network, and a command is stopped after {limit:g} s."
)
_COMMAND = _parameters(["command"], {"command": {"type": "string"}})
_PYTHON = (
    "Runs a Python program in a process of its own and gives what it prints; nothing is kept for the next "
    "call but the files it writes. It is stopped after {limit:g} s."
)
_CODE = _parameters(["code"], {"code": {"type": "string", "description": "The program's text."}})
_EDIT = (
    "Views and changes text files. view: a file's lines with their numbers, or what a folder holds. "
    "create: writes file_text to a file, over what was there. str_replace: puts new_str in the place of "
    "old_str, which must be in the file exactly once, blanks included. insert: puts insert_text behind "
    "line insert_line; 0 is the beginning. undo_edit: takes back the last change of a file."
)
_EDITS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "view": (("path",), ("view_range",)),
    "create": (("path", "file_text"), ()),
    "str_replace": (("path", "old_str"), ("new_str",)),
    "insert": (("path", "insert_line", "insert_text"), ()),
    "undo_edit": (("path",), ()),
}
_EDIT_PARAMETERS = _parameters(
    ["command", "path"],
    {
        "command": {"type": "string", "enum": list(_EDITS)},
        "path": {"type": "string"},
        "view_range": {
            "type": "array",
            "items": {"type": "integer"},
            "description": "view: first and last line, from 1; -1 is the file's last.",
        },
        "file_text": {"type": "string", "description": "create: all of the file."},
        "old_str": {"type": "string"},
        "new_str": {"type": "string", "description": "str_replace: left out, old_str goes."},
        "insert_line": {"type": "integer"},
        "insert_text": {"type": "string"},
    },
)
