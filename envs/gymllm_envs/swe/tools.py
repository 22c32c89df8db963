"""What an agent can do in a task's sandbox: its tools' schemas, and how each is run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from gymllm.errors import SandboxError
from gymllm.message import ToolCall
from gymllm.sandbox import ExecResult, Sandbox, Shell
from gymllm.sandbox.clip import clean, clip
from gymllm.sandbox.editor import EditError, Editor
from gymllm.tool_calls import ToolSchema, check_call

_MOST_SEARCH_MATCHES = 200


def schema(
    name: str, description: str, required: Sequence[str] = (), **properties: Mapping[str, object]
) -> ToolSchema:
    """A tool's, as chat templates list them."""
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _text(description: str) -> Mapping[str, object]:
    return {"type": "string", "description": description}


BASH = schema(
    "bash",
    "Runs a command in a bash that stays: directory, variables and background jobs outlive a command. "
    "There is no network and no terminal.",
    ["command"],
    command=_text("What bash is to run."),
)
EDIT = schema(
    "edit",
    "Views and changes text files. view: a file with line numbers, or a folder. create: writes a new file. "
    "str_replace: replaces old_str, which must be there exactly once, by new_str. insert: puts insert_text "
    "after line insert_line (0: at the top). undo_edit: takes the last change of the file back.",
    ["command", "path"],
    command={
        "type": "string",
        "enum": ["view", "create", "str_replace", "insert", "undo_edit"],
        "description": "What to do.",
    },
    path=_text("The file or folder, absolute or from the tree's root."),
    view_range={
        "type": "array",
        "items": {"type": "integer"},
        "description": "view: first and last line, from 1; -1 is the last.",
    },
    file_text=_text("create: the file's whole text."),
    old_str=_text("str_replace: what is there now, with enough lines around it to be unique."),
    new_str=_text("str_replace: what is to be there."),
    insert_line={"type": "integer", "description": "insert: the line after which to insert."},
    insert_text=_text("insert: the lines to insert."),
)
SEARCH = schema(
    "search",
    "Finds lines that match a regular expression (as grep -E), with file and line number.",
    ["pattern"],
    pattern=_text("The regular expression."),
    path=_text("A file or folder to search; by default the whole tree."),
    include=_text("Only files whose names match this, such as *.py."),
)
SUBMIT = schema(
    "submit", "Ends the work and hands the tree in, as it is. Hidden tests then judge it."
)
TOOLS = (BASH, EDIT, SEARCH, SUBMIT)


@dataclass(frozen=True, kw_only=True)
class ToolOutput:
    """What a call gave."""

    text: str
    failed: bool = False
    exit_code: int | None = None
    """Of a command that ended by itself."""
    timed_out: bool = False


class Toolbox:
    """The tools, bound to one sandbox."""

    def __init__(
        self, sandbox: Sandbox, shell: Shell, *, command_timeout_s: float, max_output_chars: int
    ) -> None:
        """Takes a sandbox and a shell in it, which it doesn't close.

        Args:
            sandbox: Where the work is.
            shell: What `bash` runs in.
            command_timeout_s: Of one command.
            max_output_chars: Longest answer; what is longer loses its middle.
        """
        self._sandbox, self._shell = sandbox, shell
        self._most_s = self._timeout_s = command_timeout_s
        self._most = max_output_chars
        self._editor = Editor(sandbox, max_chars=max(200, max_output_chars))

    async def run(self, call: ToolCall, *, left_s: float = math.inf) -> ToolOutput:
        """Runs any call but "submit".

        Args:
            call: Its arguments not checked yet.
            left_s: Seconds that are left altogether; a command gets no more.

        Raises:
            SandboxDiedError: The sandbox is gone.
        """
        self._timeout_s = max(0.01, min(self._most_s, left_s))
        try:
            return await self._run(call)
        except SandboxError as problem:
            if not self._sandbox.alive:
                raise
            # It lives: the agent has used up what it may have, processes most likely.
            return ToolOutput(text=f"Error: {problem}", failed=True)

    async def _run(self, call: ToolCall) -> ToolOutput:
        if problem := check_call(TOOLS, call):
            return ToolOutput(text=f"Error: {problem}", failed=True)
        if call.name == "bash":
            return await self.bash(str(call.arguments["command"]))
        if call.name == "search":
            return await self._search(cast("Mapping[str, str]", call.arguments))
        try:
            return ToolOutput(text=await self._edit(call.arguments))
        except EditError as problem:
            return ToolOutput(text=f"Error: {problem}", failed=True)

    async def bash(self, command: str) -> ToolOutput:
        """Runs a command in the shell. One that ends the shell gets a fresh one."""
        if "\0" in command:
            return ToolOutput(text="Error: a command can't hold a NUL character.", failed=True)
        if not self._shell.alive:  # it could not be started again before
            await self._shell.restart()
        done = await self._shell.run(
            command.encode("utf-8", "replace"),
            timeout_s=self._timeout_s,
            max_output_bytes=4 * self._most,
        )
        notes: list[str] = []
        if done.timed_out:
            notes.append(f"killed: it took longer than {self._timeout_s:g} s")
        elif done.signal is not None:
            notes.append(f"killed by signal {done.signal}")
        elif done.exit_code:
            notes.append(f"exit code {done.exit_code}")
        if done.shell_died:
            await self._shell.restart()
            notes.append("the shell has ended; a fresh one was started, in the tree's root")
        return ToolOutput(
            text=self._shown(done, notes),
            failed=bool(notes),
            exit_code=done.exit_code,
            timed_out=done.timed_out,
        )

    def _shown(self, done: ExecResult, notes: Sequence[str]) -> str:
        out = done.stdout
        text = clean(out.head)
        if out.cut_bytes:
            text = f"{text}\n[... {out.cut_bytes} bytes left out ...]\n{clean(out.tail)}"
        text = clip(text.rstrip("\n"), self._most)
        said = "\n".join(f"[{note}]" for note in notes)
        return "\n".join(filter(None, (text, said))) or "[no output]"

    async def _search(self, arguments: Mapping[str, str]) -> ToolOutput:
        options = ["-rnIE", f"--max-count={_MOST_SEARCH_MATCHES}", "--exclude-dir=.git"]
        if include := arguments.get("include"):
            options.append(f"--include={include}")
        argv = ["grep", *options, "-e", arguments["pattern"], "--", arguments.get("path") or "."]
        if any("\0" in part for part in argv):
            return ToolOutput(text="Error: an argument can't hold a NUL character.", failed=True)
        done = await self._sandbox.exec(
            [part.encode("utf-8", "replace") for part in argv],
            timeout_s=self._timeout_s,
            max_output_bytes=4 * self._most,
        )
        if done.exit_code == 1:
            return ToolOutput(text="[nothing matches]")
        text = self._shown(done, [])
        if done.exit_code != 0:
            said = clean(bytes(done.stderr)).strip() or f"no answer within {self._timeout_s:g} s"
            return ToolOutput(text=clip(f"Error: {said}", self._most), failed=True)
        return ToolOutput(text=text)

    async def _edit(self, arguments: Mapping[str, object]) -> str:
        command, path = cast(str, arguments["command"]), cast(str, arguments["path"])
        needed = {
            "create": ["file_text"],
            "str_replace": ["old_str"],
            "insert": ["insert_line", "insert_text"],
        }
        for name in needed.get(command, []):
            if name not in arguments:
                raise EditError(f"edit {command} needs the argument {name!r}.")
        if command == "view":
            return await self._editor.view(
                path, cast("list[int] | None", arguments.get("view_range"))
            )
        if command == "create":
            return await self._editor.create(path, cast(str, arguments["file_text"]))
        if command == "str_replace":
            new = cast(str, arguments.get("new_str", ""))
            return await self._editor.str_replace(path, cast(str, arguments["old_str"]), new)
        if command == "insert":
            line = cast(int, arguments["insert_line"])
            return await self._editor.insert(path, line, cast(str, arguments["insert_text"]))
        return await self._editor.undo_edit(path)


def command_of(text: str) -> str | None:
    """The command in a text's one fenced block of bash; None where there is none, or several."""
    blocks: list[str] = []
    lines: list[str] | None = None
    for line in text.split("\n"):
        bare = line.strip()
        if lines is None and bare in {"```bash", "```sh", "```shell"}:
            lines = []
        elif lines is not None and bare == "```":
            blocks.append("\n".join(lines))
            lines = None
        elif lines is not None:
            lines.append(line)
    return blocks[0] if len(blocks) == 1 and lines is None else None


def is_submission(command: str) -> bool:
    """Whether a command of the bash-only form hands the tree in."""
    try:
        return shlex.split(command, comments=True) == ["submit"]
    except ValueError:
        return False
