"""`gymllm-play`: a person plays an environment in the terminal and sees exactly what a model sees.

Observations go to standard output as they are; everything else (the prompt, rewards, the ending) goes to
standard error, so the two can be told apart.

A line is an action. A block of code that begins with ``` goes on up to its end, over several lines; and where
there are tools, `/NAME {"argument": value}` is short for a call, `$ COMMAND` for one of bash.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

import gymnasium

import gymllm
from gymllm.errors import ConfigError, EnvCrashedError, EnvError, EnvTypeError
from gymllm.message import ToolCall
from gymllm.spaces import TextOrMessage, text_of
from gymllm.tool_calls import tools_problem, write_calls
from gymllm.workers.slot import check_reset, check_step

T = TypeVar("T")

EXIT_BROKEN = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130  # what a shell reports for Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """Plays one episode.

    Args:
        arguments: Arguments; by default those of the process.

    Returns:
        The exit code: 0; 1 if the environment broke; 2 if it can't be made; 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog="gymllm-play",
        description="Play an environment in the terminal, as a model sees it. A line is an action; a "
        "block that begins with ``` may have several. Where there are tools, `$ COMMAND` calls bash and "
        '`/NAME {"argument": value}` any of them.',
    )
    parser.add_argument("env", help="an environment's id, e.g. gymllm/FrozenLake-v0")
    parser.add_argument("--seed", type=int, help="seed of the episode; without one it is random")
    options = parser.parse_args(arguments)
    if options.seed is not None and options.seed < 0:
        parser.error(f"--seed must be >= 0, got {options.seed}")
    try:
        env = gymllm.make(options.env)
    except ConfigError as problem:
        _say(f"gymllm-play: {problem}")
        return EXIT_CONFIG
    try:
        play(env, seed=options.seed)
    except KeyboardInterrupt:
        _say("\nInterrupted.")
        return EXIT_INTERRUPTED
    except EnvError as problem:
        _say(f"gymllm-play: {problem}")
        return EXIT_BROKEN
    except EOFError:
        _say("\nNo more input.")
    finally:
        env.close()
    return 0


def play(env: gymnasium.Env[str, str], *, seed: int | None) -> float:
    """Plays one episode with actions from standard input; returns the sum of its rewards.

    Raises:
        EnvError: The environment raised, or answered with something of a wrong type.
        EOFError: Standard input ended.
        KeyboardInterrupt: Ctrl-C.
    """
    observation, info = _answer(env, "reset", check_reset, seed=seed)
    total, turns, ending = 0.0, 0, ""
    print(_shown(observation), flush=True)
    tools = _tools(env)
    if tools:
        _say(_how_to_call(tools))
    while not ending:
        _say(f"{info.get('agent', '')}> ", end="")
        result = _answer(env, "step", check_step, _action(tools))
        total, turns, info = total + result.reward, turns + 1, result.info
        print(_shown(result.observation), flush=True)
        _say(f"[turn {turns}: reward {result.reward:g}]")
        if result.terminated:
            ending = "Terminated"
        elif result.truncated:
            ending = f"Truncated ({result.info.get('truncated_by', 'a limit')})"
    reason = info.get("reason")
    why = f": {reason}" if isinstance(reason, str) else ""
    _say(f"{ending} after {turns} turns, total reward {total:g}{why}.")
    return total


def _tools(env: gymnasium.Env[str, str]) -> dict[str, list[str]]:
    """The arguments of each tool, by its name."""
    tools = getattr(env.unwrapped, "tools", ())
    if tools_problem(tools):
        return {}
    functions = [tool["function"] for tool in tools]
    return {one["name"]: list(one.get("parameters", {}).get("properties", {})) for one in functions}


def _how_to_call(tools: Mapping[str, Sequence[str]]) -> str:
    shown = ", ".join(f"{name}({', '.join(arguments)})" for name, arguments in tools.items())
    last = list(tools)[-1]
    bash = " `$ COMMAND` is a call of bash." if "bash" in tools else ""
    return (
        f'Tools: {shown}. Call one by `/NAME {{"argument": value}}`, without arguments '
        f"by `/{last}` alone.{bash}"
    )


def _action(tools: Mapping[str, Sequence[str]]) -> str:
    """The next action from standard input.

    Raises:
        EOFError: Standard input ended.
    """
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    text = line.rstrip("\n")
    if text.startswith("```"):
        while text.count("```") < 2 and (line := sys.stdin.readline()):
            text += "\n" + line.rstrip("\n")
    elif text.startswith("$ ") and "bash" in tools:
        return write_calls([ToolCall(name="bash", arguments={"command": text[2:]})])
    elif tools and text.startswith("/") and (call := _call(text[1:])) is not None:
        return write_calls([call])
    return text


def _call(text: str) -> ToolCall | None:
    """None if it is none, as a model's that can't be read: the environment answers it."""
    name, _, written = text.partition(" ")
    try:
        arguments = json.loads(written or "{}")
    except ValueError:
        return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name=name, arguments=cast("dict[str, object]", arguments))


def _answer(
    env: gymnasium.Env[str, str],
    method: str,
    check: Callable[[object], T],
    *args: object,
    **kwargs: object,
) -> T:
    """What the environment answered, its types checked; its faults named, as the pool does it."""
    name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
    try:
        answer = getattr(env, method)(*args, **kwargs)
    except (Exception, SystemExit) as problem:
        raise EnvCrashedError(
            f"{name}: {method}: raised {type(problem).__name__}: {problem}."
        ) from problem
    try:
        return check(answer)
    except EnvTypeError as problem:
        raise EnvTypeError(f"{name}: {method}: {problem}.") from None


def _shown(observation: TextOrMessage) -> str:
    """The observation's text; of an image, its size: a terminal shows no more of it."""
    if isinstance(observation, str):
        return observation
    images = [part["image"].shape for part in observation["content"] if part["type"] == "image"]
    lines = [text_of(observation), *(f"(an image of {h} x {w} pixels)" for h, w, _ in images)]
    return "\n".join(line for line in lines if line)


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
