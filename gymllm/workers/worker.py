"""`Worker`: runs one environment somewhere."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, cast

import gymnasium
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec, load_env_creator

from gymllm.bridge import Finished
from gymllm.env import Env
from gymllm.errors import EnvTypeError
from gymllm.tool_calls import ToolSchema


@dataclass(frozen=True)
class MakeRegistered:
    """Makes an environment by an id that another process may not know."""

    make_env: Callable[[], gymnasium.Env[Any, Any]]
    spec: EnvSpec
    """Registered first, where nothing is by its id."""

    def __call__(self) -> gymnasium.Env[Any, Any]:
        self.register()
        return self.make_env()

    def register(self) -> None:
        """Registers the id, by its own module where that does it as it is imported."""
        if self.spec.id not in gymnasium.registry and isinstance(self.spec.entry_point, str):
            with suppress(Exception):  # said where the environment is made
                load_env_creator(self.spec.entry_point)
        gymnasium.registry.setdefault(self.spec.id, self.spec)


MakeEnv = Callable[[], gymnasium.Env[Any, Any]]
"""Makes one environment, wrappers included."""


def made_by(make_env: MakeEnv) -> gymnasium.Env[Any, Any]:
    """What `make_env` makes.

    Raises:
        EnvTypeError: It is no environment.
    """
    env = cast("object", make_env())
    if isinstance(env, gymnasium.Env):
        return cast("gymnasium.Env[Any, Any]", env)
    hint = "; call the class, to make one of it" if isinstance(env, type) else ""
    raise EnvTypeError(f"what makes environments must return a gymnasium.Env, got {env!r}{hint}")


@dataclass(frozen=True, kw_only=True)
class EnvFacts:
    """What a pool knows of an environment without having it in its own process."""

    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    render_mode: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    tools: tuple[ToolSchema, ...] = ()
    """What its actions are calls of; see `Env.tools`."""

    @classmethod
    def of(cls, env: gymnasium.Env[Any, Any]) -> EnvFacts:
        """Those of `env`."""
        return cls(
            observation_space=env.observation_space,
            action_space=env.action_space,
            render_mode=env.render_mode,
            metadata=dict(env.metadata or {}),
            tools=tuple(env.unwrapped.tools) if isinstance(env.unwrapped, Env) else (),
        )


class WorkerDied(Exception):
    """The process of a worker has ended; the message says how."""


LONGEST_CHAIN, LONGEST_TRACE = 8, 64
"""Exceptions of a chain, and frames of each, that are sent."""


@dataclass(frozen=True)
class RemoteTrace:
    """An exception of another process in words, and where it was raised.

    Without source lines: reading and marking them takes longer than most steps, and whoever shows the
    trace can do it.
    """

    summary: str
    """Class and message."""
    frames: tuple[tuple[str, int, str], ...]
    """File, line and function, outermost first."""
    before: RemoteTrace | None
    """What it was raised from, or in the handling of."""

    @classmethod
    def of(cls, error: BaseException) -> RemoteTrace:
        """That of `error`, and of the last few that it came from: chains can be long, or circles."""
        chain: list[BaseException] = []
        link: BaseException | None = error
        while link is not None and link not in chain and len(chain) < LONGEST_CHAIN:
            chain.append(link)
            link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
        trace: RemoteTrace | None = None
        for link in reversed(chain):
            trace = cls(_summary(link), _frames(link.__traceback__), trace)
        assert trace is not None, "the chain begins with the error"
        return trace

    def __str__(self) -> str:
        lines = [f"{self.before}\n\nwhich led to:\n"] if self.before is not None else []
        frames = [traceback.FrameSummary(*frame) for frame in self.frames]
        lines += traceback.StackSummary.from_list(frames).format()
        return "".join(lines) + self.summary


def _summary(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # a __str__ that raises
        return type(error).__name__


def _frames(trace: TracebackType | None) -> tuple[tuple[str, int, str], ...]:
    frames: list[tuple[str, int, str]] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return tuple(frames[-LONGEST_TRACE:])


class RemoteError(Exception):
    """An environment raised in another process."""

    def __init__(self, trace: RemoteTrace) -> None:
        """Says it again here."""
        super().__init__(trace)
        self.summary = trace.summary


class Worker(Protocol):
    """Runs one environment, one call at a time. Limits and faults are the slot's business."""

    @property
    def is_lost(self) -> bool:
        """The worker can't be used any more: it died, or a cancelled call did not end."""
        ...

    @property
    def log_tail(self) -> str:
        """The last lines that the environment's process printed, where it has one of its own."""
        ...

    def start(self) -> Finished[EnvFacts] | Awaitable[EnvFacts]:
        """Makes the environment. Called once, first; answers as `call`."""
        ...

    def call(
        self, method: str, *args: object, **kwargs: object
    ) -> Finished[object] | Awaitable[object]:
        """Calls a method of the environment, as `invoke` does; raises what that raises.

        Returns:
            The answer where nothing had to be waited for, else what to await for it. Cancellation
            reaches the environment's own code, and the call ends soon afterwards whether that reacts
            or not (unless it blocks the pool's own loop, or swallows each cancellation for ever, which
            only an inline worker lets it do).
        """
        ...

    async def aclose(self) -> None:
        """Closes the environment, if it was made, and frees the rest."""
        ...


Request = tuple[str, tuple[Any, ...], dict[str, Any]]
"""What a process is asked: method, arguments and keyword arguments."""
CANCEL = "cancel"
"""The method of a request that cancels the one before it; it is not answered."""


class Unsendable(Exception):
    """What was to be given to an environment can't go to its process; the message says what and why."""

    @classmethod
    def of(cls, request: Request, why: str) -> Unsendable:
        """Names the parts of the request that can't be copied here; else all, for it failed there."""
        method, args, kwargs = request
        if method == "step":
            given = {"the action": args[0]}
        elif method == "reset":
            options = cast("dict[str, object]", kwargs["options"] or {})
            given = {f"the option {name!r}": each for name, each in options.items()}
            given["the seed"] = kwargs["seed"]
        else:
            given = {f"argument {i}": each for i, each in enumerate(args)} | kwargs
        wrong = {name: each for name, each in given.items() if not _can_be_copied(each)} or given
        parts = (f"{name} (of type {type(each).__name__})" for name, each in wrong.items())
        return cls(
            f"can't send {', '.join(parts)} to the environment's process: {why}. Give what pickle can "
            'copy there, such as texts, numbers and arrays, or use worker="thread"'
        )


def _can_be_copied(value: object) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True


class NoAttribute:
    """The answer to a `CALL` of something that is not there."""


CALL = "call"
"""The method name by which `invoke` reads, or calls, an attribute of the environment or a wrapper."""


def invoke(
    env: gymnasium.Env[Any, Any], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> object:
    """Calls `method` of the environment; with `CALL`, what `args[0]` names in it or in a wrapper.

    Of what is named and can't be called, the value is the answer, as `gymnasium.vector.VectorEnv.call`
    wants it; `NoAttribute` where nothing is called that, which breaks nothing.
    """
    if method != CALL:
        return getattr(env, method)(*args, **kwargs)
    name, *rest = cast("tuple[str, ...]", args)
    if not env.has_wrapper_attr(name):
        return NoAttribute()
    attribute = env.get_wrapper_attr(name)
    return attribute(*rest, **kwargs) if callable(attribute) else attribute
