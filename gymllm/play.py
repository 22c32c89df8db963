"""`gymllm-play`: a person plays an environment in the terminal and sees exactly what a model sees.

Observations go to standard output as they are; everything else (the prompt, rewards, the ending) goes to
standard error, so the two can be told apart.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import gymnasium

import gymllm
from gymllm.errors import ConfigError

EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130  # what a shell reports for Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """Plays one episode. Returns the exit code: 0, 2 for an unknown environment, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="gymllm-play", description="Play an environment in the terminal, as a model sees it."
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
    except EOFError:
        _say("\nNo more input.")
    finally:
        env.close()
    return 0


def play(env: gymnasium.Env[str, str], *, seed: int | None) -> float:
    """Plays one episode with actions from standard input; returns the sum of its rewards.

    Raises:
        EOFError: Standard input ended.
        KeyboardInterrupt: Ctrl-C.
    """
    observation, _ = env.reset(seed=seed)
    total, turns, terminated, truncated = 0.0, 0, False, False
    info: dict[str, object] = {}
    print(observation, flush=True)
    while not (terminated or truncated):
        _say("> ", end="")
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        observation, reward, terminated, truncated, info = env.step(line.rstrip("\n"))
        total, turns = total + float(reward), turns + 1
        print(observation, flush=True)
        _say(f"[turn {turns}: reward {float(reward):g}]")
    ending = "Terminated" if terminated else f"Truncated ({info.get('truncated_by', 'a limit')})"
    _say(f"{ending} after {turns} turns, total reward {total:g}.")
    return total


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
