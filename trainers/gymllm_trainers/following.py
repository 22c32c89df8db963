"""`gymllm-train` in several processes: how a run begins and ends in all of them, and what a follower does.

The leader tells its settings, then the model, then to make the learner, and hears whether anyone has a
problem with that. From then on a follower does what is done of the learner (`distributed.follow`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from gymllm.errors import ConfigError, GymLLMError, MissingExtraError, ModelError, RunError
from gymllm_trainers.checkpoint import Checkpointer
from gymllm_trainers.compilation import use_compilation_cache
from gymllm_trainers.config import TrainConfig
from gymllm_trainers.config_files import flatten
from gymllm_trainers.distributed import follow
from gymllm_trainers.interrupt import EXIT_INTERRUPTED, flush_and_exit
from gymllm_trainers.memory import keep_freed_memory
from gymllm_trainers.processes import Call, Ending, Leader, agree, receive
from gymllm_trainers.session import make_learner
from gymllm_trainers.starting_model import load_named, load_sent

_OWN = ("processes.process_id",)
"""Settings that each process has for itself."""
_TOKEN = ".seen-by-all"


@dataclass(frozen=True)
class _Start:
    """What the leader says first."""

    settings: Mapping[str, str]
    """Its own, each as text."""
    folder: Path
    """The run's."""
    token: str
    """What the file `_TOKEN` holds there."""
    resume_step: int | None


def said(line: str) -> None:
    """Prints a line of a process that has no display."""
    print(line, flush=True)  # noqa: T201 (the console is its job)


def _who() -> str:
    return f"process {jax.process_index()} of {jax.process_count()}"


# ---------------------------------------------------------------------- the leader


@contextlib.contextmanager
def led(leader: Leader) -> Iterator[Leader]:
    """Around the leader's run: at its end the other processes hear how it ended."""
    said(f"{_who()}: leads; the others follow")
    try:
        yield leader
    except KeyboardInterrupt:
        _end(leader, Ending(interrupted=True))
        raise
    except BaseException as error:
        _end(leader, Ending(problem=str(error) or type(error).__name__), error)
        raise
    else:
        _end(leader, Ending())


def _end(leader: Leader, ending: Ending, error: BaseException | None = None) -> None:
    leader.end(ending)
    if leader.lost:
        _leave_without_farewell(error)
    else:
        jax.distributed.shutdown()


def begin(leader: Leader, config: TrainConfig, folder: Path, resume_step: int | None) -> None:
    """Tells the other processes what is trained.

    Raises:
        ConfigError: One has other settings, or doesn't see the run's folder; says which.
        RunError: One has died.
    """
    token, file = uuid.uuid4().hex, folder.absolute() / _TOKEN
    try:
        file.write_text(token)
    except OSError as error:
        raise RunError(f"can't write to the run's folder {folder}: {error.strerror}.") from error
    try:
        leader.tell(Call.START, _Start(_settings(config), folder.absolute(), token, resume_step))
        leader.agree()
    finally:
        file.unlink(missing_ok=True)


def _settings(config: TrainConfig) -> dict[str, str]:
    return {name: repr(value) for name, value in flatten(config).items() if name not in _OWN}


# ---------------------------------------------------------------------- a follower


def follow_run(config: TrainConfig) -> None:
    """Takes part in the run that process 0 leads, until it ends. For every process but that one.

    Ctrl-C is the leader's to act on, as a terminal's reaches all processes: here the first one is ignored,
    and the second ends the process.

    Raises:
        ConfigError: The leader has other settings, or this process doesn't see the run's folder.
        RunError: The leader, or another process, broke or died.
        KeyboardInterrupt: The leader was stopped by Ctrl-C.
    """
    said(f"{_who()}: joined; process 0 leads, plays and keeps the run's folder")
    try:
        with _deaf():
            ending = _beside(lambda: _follow(config))
    except BaseException as error:
        _leave_without_farewell(error)
        raise
    jax.distributed.shutdown()
    if ending.problem:
        raise RunError(f"process 0, which leads, was stopped by an error: {ending.problem}")
    if ending.interrupted:
        said(f"{_who()}: ended, as process 0 was interrupted")
        raise KeyboardInterrupt
    said(f"{_who()}: ended with the run")


def _follow(config: TrainConfig) -> Ending:
    keep_freed_memory()
    use_compilation_cache()
    try:
        start: _Start = _next(Call.START)
        _next(Call.AGREE)
        agree(_differences(config, start))
        files: Mapping[str, bytes] | None = _next(Call.MODEL)
        problem, model = "", None
        try:
            model = load_named(config) if files is None else load_sent(config, files)
        except GymLLMError as error:
            problem = str(error)
        _next(Call.AGREE)
        agree(problem)
        assert model is not None, "all processes have agreed"
        _next(Call.LEARNER)
    except _Ended as ended:
        return ended.ending
    checkpoints = Checkpointer(start.folder / "checkpoints", read_only=True)
    learner = make_learner(config, model, checkpoints, start.resume_step)
    assert learner.mesh is not None, "there are several devices"
    return follow(learner, learner.mesh, checkpoints)


class _Ended(Exception):
    """The leader has ended before anything was trained."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending)
        self.ending = ending


def _next(expected: Call) -> Any:
    call, argument = receive()
    if call is Call.END:
        raise _Ended(argument)
    assert call is expected, f"{call} came instead of {expected}"
    return argument


def _differences(config: TrainConfig, start: _Start) -> str:
    """What keeps this process from taking part; empty: nothing."""
    own = _settings(config)
    names = sorted(own.keys() | start.settings.keys())
    different = [name for name in names if own.get(name) != start.settings.get(name)]
    if different:
        named = "; ".join(
            f"{name} is {own.get(name, 'not set')}, but {start.settings.get(name, 'not set')} in process 0"
            for name in different[:8]
        )
        more = f" (and {len(different) - 8} more)" if len(different) > 8 else ""
        return (
            f"it was started with other settings: {named}{more}. Start all processes with the same command, "
            "but for processes.process_id."
        )
    try:
        seen = (start.folder / _TOKEN).read_text()
    except OSError:
        seen = ""
    if seen == start.token:
        return ""
    return (
        f"it doesn't see the run's folder {start.folder}, where every process writes its part of a "
        "checkpoint. Give a --runs-dir on a file system that all hosts share, by the same path."
    )


def _beside(function: Callable[[], Ending]) -> Ending:
    """Calls it in a thread of its own: this one, the main one, must be free for signals."""
    endings: list[Ending] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            endings.append(function())
        except BaseException as error:  # raised again in the main thread
            errors.append(error)

    thread = threading.Thread(target=call, name="follower", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return endings[0]


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Inside, the first SIGINT or SIGTERM is only answered; the second ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = False

    def hear(signum: int, frame: FrameType | None) -> None:
        nonlocal heard
        if heard:
            flush_and_exit(EXIT_INTERRUPTED)
        heard = True
        # os.write: the other thread may hold the lock of sys.stderr.
        os.write(2, f"gymllm: {_who()} ends when process 0 does; once more ends it now.\n".encode())

    # The command line's own watch would end the process a few seconds after the first one.
    watch = signal.set_wakeup_fd(-1)
    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(watch, warn_on_full_buffer=False)


def _leave_without_farewell(error: BaseException | None) -> None:
    """Has this process, which ends for `error`, skip JAX's own farewell: it waits for the dead."""
    # What is registered last is called first; by then the command line has said what happened.
    refused = isinstance(error, (ConfigError, ModelError, MissingExtraError))
    atexit.register(flush_and_exit, 2 if refused else 1)
