"""`gymllm/SWE-v0`: mend a fault in a real repository.

gymnasium.make("gymllm/SWE-v0")
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, final

import anyio.lowlevel
from anyio import to_thread

from gymllm.env import Env
from gymllm.errors import ConfigError, UnknownNameError
from gymllm.message import ToolCall
from gymllm.pool import make_pool
from gymllm.sandbox import check_kind
from gymllm.tool_calls import FORM, read_calls, tool_name
from gymllm_envs.named_tasks import chosen_task
from gymllm_envs.swe.grading import Verdict, share_passed
from gymllm_envs.swe.place import Place, open_place
from gymllm_envs.swe.sources import DEFAULT, default_tasks, load_tasks
from gymllm_envs.swe.task import SweTask
from gymllm_envs.swe.tools import TOOLS, Toolbox, command_of, is_submission

ENV_ID = "gymllm/SWE-v0"
_FEW_TURNS = 3

_TASK = """There is a fault in {repo}, whose source tree is in {workdir}:

{problem}

Find the cause and mend it in the sources. Hidden tests then judge the tree: those that fail because of \
the fault must pass, and all others must still pass. Changes to tests and to settings of builds and tests \
don't count. There is no network.
"""
_WITH_TOOLS = "Work with the tools, and call submit when it is mended. You have {turns} turns."
_WITH_BASH = """In each turn, say what you think and then give exactly one command for bash in a block:

```bash
ls
```

Directory and variables stay from one command to the next. When the fault is mended, give the command \
`submit`, alone. You have {turns} turns."""
_NO_CALL = "Error: this is no call of a tool. Write one like {form}; there is: {tools}."
_NO_COMMAND = (
    "Error: give exactly one command in one block that begins with ```bash and ends with ```; "
    "`submit` alone hands the tree in."
)


@final
class SWE(Env):
    """A fault in a real repository, described as its users met it.

    Description:
        The tree of a released package or of a container image, with a fault. The agent looks around, edits,
        runs what it likes in a sandbox, and submits. By default the tasks are bugs put into small real
        packages, made at first use and kept in the cache (`gymllm-swe-tasks make` makes more).
    Observations:
        At first the problem and what can be done; then what a command or tool answered, without escape
        sequences, its middle left out where it is long, with how much that was.
    Actions:
        Calls of `Env.tools` (bash, edit, search, submit) as `gymllm.tool_calls` writes them, one or several;
        with `tools="bash"` a text with one block of bash. A block of bash is taken in both.
    Rewards:
        0 until the end. Then 1 if all tests that failed pass and all that passed still do; they run in a
        fresh sandbox, on the files that the agent has changed and nothing else of its sandbox. With
        `partial_credit` else the share of mended tests times the share of kept ones.
    Episode end:
        Terminated by `submit`. Truncated by `info["truncated_by"]`: "turns", "wall_clock", "context",
        "command_timeouts". What breaks in the machine raises, and is never a reward.
        `info` then has "resolved", "reason", "fail_to_pass", "pass_to_pass" (each test's result),
        "test_messages", "tampered", "patch", "left_out".
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
        tasks: str | Path | Sequence[SweTask] = DEFAULT,
        split: str = "test",
        tools: Literal["full", "bash"] = "full",
        kind: str = "local",
        max_turns: int = 50,
        command_timeout_s: float = 60.0,
        max_command_timeouts: int = 5,
        wall_clock_s: float = 1800.0,
        max_context_chars: int = 400_000,
        max_output_chars: int = 8_000,
        partial_credit: bool = False,
        grade_truncated: bool = False,
        memory_mb: int = 2048,
        render_mode: str | None = None,
    ) -> None:
        """Makes the environment; nothing is started yet.

        Args:
            tasks: "default"; a task file; the name of a data set on the hub; or tasks.
            split: Of a data set.
            tools: "full", or "bash": one command a turn in plain text.
            kind: Of sandbox: "local"; "docker" or "kubernetes" for tasks with images.
            max_turns: Actions, >= 1.
            command_timeout_s: Seconds a command may take.
            max_command_timeouts: How many may take longer before the episode is truncated, >= 1.
            wall_clock_s: Seconds the episode may take, grading not included.
            max_context_chars: Characters of all observations and actions together.
            max_output_chars: Longest answer to a command, >= 200.
            partial_credit: Whether a patch that doesn't resolve the task may still get a part.
            grade_truncated: Whether a truncated episode is graded as it stands, rather than 0.
            memory_mb: Of the sandbox.
            render_mode: As for `Env.render`.

        Raises:
            ConfigError: A setting is wrong, or the tasks can't be read.
            UnknownNameError: No such set of tools, or kind of sandbox.
        """
        if tools not in ("full", "bash"):
            raise UnknownNameError("set of tools", tools, ["full", "bash"])
        check_kind(kind)
        limits: dict[str, tuple[float, float]] = {
            "max_turns": (max_turns, 1),
            "command_timeout_s": (command_timeout_s, 0.01),
            "max_command_timeouts": (max_command_timeouts, 1),
            "wall_clock_s": (wall_clock_s, 0.01),
            "max_context_chars": (max_context_chars, 1),
            "max_output_chars": (max_output_chars, 200),
            "memory_mb": (memory_mb, 64),
        }
        for name, (value, least) in limits.items():
            if isinstance(value, bool) or not value >= least:
                raise ConfigError(f"{name} must be >= {least:g}, got {value!r}.")
        self.render_mode = render_mode
        self._full, self._kind = tools == "full", kind
        self.tools = TOOLS if self._full else ()
        self._max_turns, self._command_timeout_s = max_turns, command_timeout_s
        self._max_command_timeouts, self._wall_clock_s = max_command_timeouts, wall_clock_s
        self._max_context_chars, self._max_output_chars = max_context_chars, max_output_chars
        self._partial_credit, self._grade_truncated = partial_credit, grade_truncated
        self._memory_mb = memory_mb
        self._source, self._split = tasks, split
        self._tasks: dict[str, SweTask] = {}
        if tasks != DEFAULT:
            self._tasks = {task.id: task for task in load_tasks(tasks, split)}
        self._place: Place | None = None

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Starts a task's sandbox.

        Raises:
            ConfigError: Unknown options.
            UnknownNameError: No such task.
            EnvError: What the task is made from can't be had.
            SandboxError: The sandbox can't be started.
        """
        await self._leave()
        if not self._tasks:
            found = await to_thread.run_sync(default_tasks)
            self._tasks = {task.id: task for task in found}
        task = chosen_task(self._tasks, options or {}, self.np_random, ENV_ID)
        self._place = await open_place(task, self._kind, memory_mb=self._memory_mb)
        sandbox = self._place.sandbox
        self._toolbox = Toolbox(
            sandbox,
            await sandbox.shell(),
            command_timeout_s=self._command_timeout_s,
            max_output_chars=self._max_output_chars,
        )
        self._turns = self._timeouts = 0
        self._began = time.monotonic()
        how = _WITH_TOOLS if self._full else _WITH_BASH
        text = _TASK.format(
            repo=task.repo, workdir=sandbox.workdir, problem=task.problem_statement.strip()
        )
        text = f"{text}\n{how.format(turns=self._max_turns)}"
        self._chars = len(text)
        return text, {"task": task.id, "repo": task.repo}

    def task_ids(self) -> list[str]:
        """Every task's id, in order; makes the default ones if they aren't there yet."""
        if not self._tasks:
            # In a thread: it runs an event loop of its own, and there may be one here.
            with ThreadPoolExecutor(1) as thread:
                found = thread.submit(default_tasks).result()
            self._tasks = {task.id: task for task in found}
        return list(self._tasks)

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Runs the calls in an action.

        Raises:
            SandboxError: The sandbox is gone, or grading broke.
        """
        await anyio.lowlevel.checkpoint()  # a limit ends a step that calls nothing, too
        self._turns += 1
        self._chars += len(action)
        calls, problem = self._read(action)
        info: dict[str, Any] = {"invalid_action": bool(problem)}
        said = [problem] if problem else []
        for call in calls:
            if call.name == "submit":
                return await self._end("submitted", info)
            left_s = self._began + self._wall_clock_s - time.monotonic()
            done = await self._toolbox.run(call, left_s=left_s)
            self._timeouts += done.timed_out
            self._chars += len(done.text)
            info |= {"tool": call.name, "failed": done.failed, "exit_code": done.exit_code}
            said.append(done.text)
            if self._reached(turns_too=False):
                break
        observation, reward, terminated, truncated, info = self._go_on("\n\n".join(said), info)
        if truncated and self._grade_truncated:
            _, reward, _, _, info = await self._end(observation, info)
        elif truncated:
            await self._leave()
        return observation, reward, terminated, truncated, info

    async def aclose(self) -> None:
        """Closes the sandbox."""
        await self._leave()

    def _read(self, action: str) -> tuple[Sequence[ToolCall], str]:
        """The calls in an action, or what is wrong with it."""
        if self._full:
            found = read_calls(action)
            if found.calls:
                return found.calls, ""
            if found.errors:
                return (), "\n".join(f"Error: {error}" for error in found.errors)
        command = command_of(action)
        if command is not None:
            name = "submit" if is_submission(command) else "bash"
            return (
                ToolCall(name=name, arguments={"command": command} if name == "bash" else {}),
            ), ""
        if not self._full:
            return (), _NO_COMMAND
        return (), _NO_CALL.format(form=FORM, tools=", ".join(tool_name(tool) for tool in TOOLS))

    def _go_on(
        self, text: str, info: dict[str, Any]
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        left = self._max_turns - self._turns
        if 0 < left <= _FEW_TURNS:
            text += f"\n[{left} turn{'s' if left > 1 else ''} left]"
        reached = self._reached()
        if reached:
            info["truncated_by"] = reached
        return text, 0.0, False, bool(reached), info

    def _reached(self, *, turns_too: bool = True) -> str:
        if turns_too and self._turns >= self._max_turns:
            return "turns"
        if time.monotonic() - self._began >= self._wall_clock_s:
            return "wall_clock"
        if self._chars >= self._max_context_chars:
            return "context"
        return "command_timeouts" if self._timeouts >= self._max_command_timeouts else ""

    async def _end(
        self, text: str, info: dict[str, Any]
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Grades what there is."""
        assert self._place is not None
        place, self._place = self._place, None
        try:
            verdict = await place.submit()
        finally:
            await place.aclose()
        info |= _told(verdict)
        return text, verdict.reward(partial=self._partial_credit), True, False, info

    async def _leave(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            await place.aclose()


def _told(verdict: Verdict) -> dict[str, Any]:
    return {
        "resolved": verdict.resolved,
        "reason": verdict.reason,
        "fail_to_pass": dict(verdict.fail_to_pass),
        "pass_to_pass": dict(verdict.pass_to_pass),
        "test_messages": dict(verdict.messages),
        "tampered": verdict.tampered,
        "patch": verdict.patch,
        "left_out": dict(verdict.left_out),
        "grading_s": verdict.wall_s,
        "metrics": {
            "resolved": float(verdict.resolved),
            "mended_share": share_passed(verdict.fail_to_pass),
            "kept_share": share_passed(verdict.pass_to_pass),
            "tampered": float(bool(verdict.tampered)),
        },
    }


make_vector = functools.partial(make_pool, ENV_ID)
"""What `gymnasium.make_vec` calls: tasks worked on at the same time, in a pool."""
