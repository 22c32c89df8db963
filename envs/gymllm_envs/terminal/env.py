"""`gymllm/Terminal-v0`: do something in a terminal; a script checks it.

gymnasium.make("gymllm/Terminal-v0")
"""

from __future__ import annotations

import functools
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast, final

import anyio
import anyio.lowlevel
from anyio import to_thread

from gymllm.env import Env
from gymllm.errors import ConfigError, SandboxError, UnknownNameError
from gymllm.message import ToolCall
from gymllm.pool import make_pool
from gymllm.sandbox import Mount, Sandbox, open_sandbox
from gymllm.sandbox.clip import clip
from gymllm.tool_calls import FORM, check_call, read_calls, tool_name
from gymllm_envs.named_tasks import chosen_task
from gymllm_envs.swe.tools import Toolbox, ToolOutput, command_of, is_submission
from gymllm_envs.terminal import ENV_ID
from gymllm_envs.terminal.building import TESTS, Kind, has_mounts, is_container, new_folder, prepare
from gymllm_envs.terminal.checking import Check, check, mounts_of
from gymllm_envs.terminal.default_tasks import default_tasks
from gymllm_envs.terminal.grid import MOST_COLUMNS, MOST_ROWS
from gymllm_envs.terminal.harbor import read_folder
from gymllm_envs.terminal.screen import QUIET_S, Screen
from gymllm_envs.terminal.task import TerminalTask, read_tasks
from gymllm_envs.terminal.tools import SCREEN_TOOLS, SHELL_TOOLS

DEFAULT = "default"
MODES = ("shell", "screen")
_FEW_TURNS = 3
_WAIT_S = 5.0
_FIRST_WAIT_S = 5.0
_MOST_SCROLLBACK = 200
_PROMPT = {"PS1": "\\w \\$ ", "PROMPT_COMMAND": ""}

_TASK = """{instruction}

You are in {workdir}; what counts is what is below {tree}. {how} There is no network. \
You have {turns} turns."""
_HOW = {
    "shell": "Work with the tool bash, or give one command in a block that begins with ```bash. When the "
    "task is done, call submit, or give `submit` alone as the command.",
    "screen": "You have a terminal of {columns} columns and {rows} rows: type with the tool "
    "keys. When the task "
    "is done, call submit.",
}
_NO_CALL = "Error: this is no call of a tool. Write one like {form}; there is: {tools}."


@final
class TerminalEnv(Env):
    """A task in a terminal, judged by a script.

    Description:
        Work in a sandbox: files, text, archives, git, servers, whatever the tasks are about. By default a
        small built-in set; also folders of Harbor's and Terminal-Bench's tasks, and files of one's own.
    Observations:
        At first the task. With mode="shell" then what a command wrote, without escape sequences, its
        middle left out where it is long, with how much that was. With mode="screen" the screen of a
        terminal as text, its size and the cursor's place above it.
    Actions:
        Calls of `Env.tools` as `gymllm.tool_calls` writes them, one or several: bash and submit, or keys,
        screen and submit. In mode "shell" a text with one block of bash is taken, too.
    Rewards:
        0 until the end; then what the task's checker says, within 0 and 1. All that the agent has started
        is killed, and the checker runs in a fresh sandbox that has the tree and nothing else of the
        agent's. Tasks about processes are checked in place; `info["check"]["in_place"]` says so.
    Episode end:
        Terminated by `submit`. Truncated by `info["truncated_by"]`: "turns", "wall_clock",
        "command_timeouts"; what was done by then is checked, unless told otherwise. `info["check"]` has
        "reason", "exit_code", "output", "rewards" and "in_place". What breaks in the machine, or in the
        checker, raises, and is never a reward.
    Arguments:
        See `__init__`. Reset options: {"task": id or index}; by default the seed chooses.
    Version history:
        v0: first.
    """

    # It has limits of its own for all that can take long; these are for what breaks.
    reset_timeout_s = 1200.0
    step_timeout_s = 1800.0

    def __init__(  # pyright: ignore[reportInconsistentConstructor]  Env.__new__ takes anything
        self,
        *,
        tasks: str | Path | Sequence[TerminalTask] = DEFAULT,
        mode: Literal["shell", "screen"] = "shell",
        kind: Kind = "local",
        max_turns: int = 50,
        command_timeout_s: float = 60.0,
        max_command_timeouts: int = 5,
        wall_clock_s: float | None = None,
        max_output_chars: int = 8_000,
        check_truncated: bool = True,
        columns: int = 80,
        rows: int = 24,
        render_mode: str | None = None,
    ) -> None:
        """Makes the environment; nothing is started yet.

        Args:
            tasks: "default"; a folder of one task or of many; a file of JSON lines; or tasks.
            mode: "shell", commands; "screen", a terminal with keys.
            kind: Of sandbox, as `open_sandbox` takes it: "local", "docker", ...
            max_turns: Actions, >= 1.
            command_timeout_s: Seconds a command may take, and a wait for the screen.
            max_command_timeouts: How many may take longer before the episode is truncated, >= 1.
            wall_clock_s: Seconds the episode may take, the check not included; None: what the task says, else
                half an hour.
            max_output_chars: Longest answer to a command, >= 200.
            check_truncated: Whether a truncated episode is checked as it stands, rather than 0.
            columns: Of the screen, 20 to 300.
            rows: Of the screen, 5 to 100.
            render_mode: As for `Env.render`.

        Raises:
            ConfigError: A setting is wrong, or the tasks can't be read.
            UnknownNameError: No such mode.
        """
        if mode not in MODES:
            raise UnknownNameError("mode", mode, MODES)
        limits: dict[str, tuple[float, float, float]] = {
            "max_turns": (max_turns, 1, math.inf),
            "command_timeout_s": (command_timeout_s, 0.01, math.inf),
            "max_command_timeouts": (max_command_timeouts, 1, math.inf),
            "wall_clock_s": (1.0 if wall_clock_s is None else wall_clock_s, 0.01, math.inf),
            "max_output_chars": (max_output_chars, 200, math.inf),
            "columns": (columns, 20, MOST_COLUMNS),
            "rows": (rows, 5, MOST_ROWS),
        }
        for name, (value, least, most) in limits.items():
            if isinstance(value, bool) or not least <= value <= most:
                until = f"and <= {most:g} " if most < math.inf else ""
                raise ConfigError(f"{name} must be >= {least:g} {until}, got {value!r}.")
        self.render_mode = render_mode
        self._mode, self._kind = mode, kind
        is_container(kind)  # or refuses
        self.tools = SHELL_TOOLS if mode == "shell" else SCREEN_TOOLS
        self._max_turns, self._command_timeout_s = max_turns, command_timeout_s
        self._max_command_timeouts, self._wall_clock_s = max_command_timeouts, wall_clock_s
        self._max_output_chars, self._check_truncated = max_output_chars, check_truncated
        self._columns, self._rows = columns, rows
        self._tasks = {task.id: task for task in _load(tasks)}
        self._sandbox: Sandbox | None = None
        self._live_tests: Path | None = None

    def task_ids(self) -> list[str]:
        """Every task's id, in order."""
        return list(self._tasks)

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Starts a task's sandbox.

        Raises:
            ConfigError: Unknown options, or this kind of sandbox can't do the task.
            UnknownNameError: No such task.
            SandboxError: The sandbox can't be started.
        """
        await self._leave()
        chosen = chosen_task(self._tasks, options or {}, self.np_random, ENV_ID)
        self._prepared = prepared = await prepare(chosen, self._kind)
        task, spec = prepared.task, prepared.spec
        if task.check_in_place and has_mounts(self._kind):
            mounts, _ = mounts_of(prepared, self._kind)
            self._live_tests = new_folder("tests")
            mounts += (Mount(source=self._live_tests, target=TESTS),)
            spec = replace(spec, mounts=mounts)
        self._sandbox = sandbox = await open_sandbox(spec, self._kind)
        workdir = task.workdir or task.tree
        how = _HOW[self._mode].format(columns=self._columns, rows=self._rows)
        text = _TASK.format(
            instruction=task.instruction,
            workdir=workdir,
            tree=task.tree,
            how=how,
            turns=self._max_turns,
        )
        if self._mode == "shell":
            self._toolbox = Toolbox(
                sandbox,
                await sandbox.shell(cwd=workdir),
                command_timeout_s=self._command_timeout_s,
                max_output_chars=self._max_output_chars,
            )
        else:
            await self._open_screen()
            text = f"{text}\n\n{self._screen.text()}"
        self._turns = self._timeouts = 0
        self._ends = time.monotonic() + (self._wall_clock_s or task.agent_timeout_s or 1800.0)
        info: dict[str, Any] = {"task": task.id}
        if task.notes:
            info["notes"] = list(task.notes)
        return text, info

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Runs the calls in an action.

        Raises:
            SandboxError: The sandbox is gone, or the check broke.
            EnvError: The checker is at fault.
        """
        await anyio.lowlevel.checkpoint()  # a limit ends a step that calls nothing, too
        self._turns += 1
        calls, problem = self._read(action)
        info: dict[str, Any] = {"invalid_action": bool(problem)}
        said = [problem] if problem else []
        for call in calls:
            if wrong := check_call(self.tools, call):
                info["invalid_action"] = True
                said.append(f"Error: {wrong}")
                continue
            if call.name == "submit":
                info["submitted"] = True
                return await self._finish("\n\n".join([*said, "submitted"]), info, ended=True)
            done = await self._run(call)
            self._timeouts += done.timed_out
            info |= {"tool": call.name, "failed": done.failed, "exit_code": done.exit_code}
            if done.timed_out:
                info["timed_out"] = True
            said.append(done.text)
            if time.monotonic() >= self._ends:
                break
        text = "\n\n".join(said)
        reached = self._reached()
        if reached:
            info["truncated_by"] = reached
            return await self._finish(text, info, ended=False)
        left = self._max_turns - self._turns
        if left <= _FEW_TURNS:
            text += f"\n[{left} turn{'s' if left > 1 else ''} left]"
        return text, 0.0, False, False, info

    async def aclose(self) -> None:
        """Closes the sandbox."""
        await self._leave()

    def _read(self, action: str) -> tuple[Sequence[ToolCall], str]:
        """The calls in an action, or what is wrong with it."""
        found = read_calls(action)
        if found.calls:
            return found.calls, ""
        if found.errors:
            return (), "\n".join(f"Error: {error}" for error in found.errors)
        command = command_of(action) if self._mode == "shell" else None
        if command is None:
            return (), _NO_CALL.format(form=FORM, tools=", ".join(map(tool_name, self.tools)))
        if is_submission(command):
            return (ToolCall(name="submit", arguments={}),), ""
        return (ToolCall(name="bash", arguments={"command": command}),), ""

    async def _run(self, call: ToolCall) -> ToolOutput:
        """One call. A shell that can't be started again is told: who breaks it must not escape the check."""
        try:
            return await self._run_it(call)
        except SandboxError as problem:
            if self._sandbox is None or not self._sandbox.alive:
                raise
            return ToolOutput(text=f"Error: {problem}", failed=True)

    async def _run_it(self, call: ToolCall) -> ToolOutput:
        left_s = max(self._ends - time.monotonic(), 0.01)
        if call.name == "bash":
            return await self._toolbox.run(call, left_s=left_s)
        if not self._screen.alive:
            await self._open_screen(self._screen)
        most_s = min(self._command_timeout_s, left_s)
        wait_s = _seconds(call, "wait_s", _WAIT_S if call.name == "keys" else 0.0, most_s)
        notes: list[str] = []
        if call.name == "screen":
            await self._screen.settle(max(wait_s, QUIET_S))
            above = min(max(cast("int", call.arguments.get("scrollback", 0)), 0), _MOST_SCROLLBACK)
            return await self._shown(notes, scrollback=above)
        keys = cast("list[str]", call.arguments["keys"])
        if not await self._screen.press(keys):
            notes.append("not all keys were taken: the program reads nothing")
        quiet_s = min(_seconds(call, "quiet_s", QUIET_S, wait_s), max(wait_s, 0.01))
        if not await self._screen.settle(max(wait_s, 0.01), quiet_s=quiet_s):
            notes.append(f"the screen was not quiet within {wait_s:g} s")
        return await self._shown(notes)

    async def _shown(self, notes: list[str], *, scrollback: int = 0) -> ToolOutput:
        text = self._screen.text(scrollback=scrollback)
        if not self._screen.alive:
            await self._open_screen(self._screen)
            notes.append("the program has ended; this is a fresh one")
            text += f"\n{self._screen.text()}"
        text = clip(text, max(self._max_output_chars, 2 * self._columns * self._rows))
        return ToolOutput(text="\n".join([text, *(f"[{note}]" for note in notes)]))

    async def _open_screen(self, old: Screen | None = None) -> None:
        assert self._sandbox is not None
        if old is not None:
            await old.aclose()
        task = self._prepared.task
        terminal = await self._sandbox.terminal(
            columns=self._columns,
            rows=self._rows,
            cwd=task.workdir or None,
            env={**_PROMPT, "TERM": "xterm"},
        )
        self._screen = Screen(terminal, self._columns, self._rows)
        await self._screen.settle(_FIRST_WAIT_S, quiet_s=0.05, expected=True)

    def _reached(self) -> str:
        if self._turns >= self._max_turns:
            return "turns"
        if time.monotonic() >= self._ends:
            return "wall_clock"
        return "command_timeouts" if self._timeouts >= self._max_command_timeouts else ""

    async def _finish(
        self, text: str, info: dict[str, Any], *, ended: bool
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Checks what was done."""
        if not ended and not self._check_truncated:
            await self._leave()
            return text, 0.0, False, True, info
        assert self._sandbox is not None
        sandbox, self._sandbox = self._sandbox, None
        try:
            found = await check(self._prepared, sandbox, self._kind, self._live_tests)
        finally:
            await self._leave()
        info["check"] = _told(found)
        return text, found.reward, ended, not ended, info

    async def _leave(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        tests, self._live_tests = self._live_tests, None
        with anyio.CancelScope(shield=True):
            if sandbox is not None:
                await sandbox.aclose()
            if tests is not None:
                await to_thread.run_sync(lambda: shutil.rmtree(tests, ignore_errors=True))


def _load(tasks: str | Path | Sequence[TerminalTask]) -> Sequence[TerminalTask]:
    if not isinstance(tasks, str | Path):
        found = list(tasks)
    elif tasks == DEFAULT:
        found = list(default_tasks())
    elif (path := Path(tasks)).is_dir():
        found = read_folder(path)
    elif path.is_file():
        found = read_tasks(path)
    else:
        raise ConfigError(
            f"tasks must be {DEFAULT!r}, a folder of tasks or a file of JSON lines, got "
            f"{str(tasks)!r}, which "
            "doesn't exist."
        )
    if not found:
        raise ConfigError("tasks must not be empty.")
    names = [task.id for task in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"tasks: each needs an id of its own; more than one has {twice[0]!r}.")
    return found


def _seconds(call: ToolCall, name: str, default: float, most: float) -> float:
    value = cast("float", call.arguments.get(name, default))
    return min(max(value, 0.0), most) if math.isfinite(value) else default


def _told(found: Check) -> dict[str, Any]:
    return {
        "reason": found.reason,
        "exit_code": found.exit_code,
        "output": found.output,
        "rewards": dict(found.rewards),
        "in_place": found.in_place,
    }


make_vector = functools.partial(make_pool, ENV_ID)
"""What `gymnasium.make_vec` calls: tasks worked on at the same time, in a pool."""
