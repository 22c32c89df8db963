"""The command lines of `gymllm-train`, `-eval`, `-export` and `-serve`: arguments in, an exit code out.

0    done
1    the run broke; the message says what to do
2    a setting, file, model or package that can't be used
130  ended by Ctrl-C or SIGTERM, within 5 s
141  nobody reads the output any more, as after `gymllm-train --help | head -1`
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Sequence

from gymllm.errors import ConfigError, GymLLMError, MissingExtraError, ModelError
from gymllm_trainers.interrupt import EXIT_INTERRUPTED, ends_on_interrupt, flush_and_exit

EXIT_BROKEN_PIPE = 141
"""128 + SIGPIPE: what a shell expects of a program whose output nobody reads."""


def train(argv: Sequence[str] | None = None) -> int:
    """`gymllm-train`.

    Args:
        argv: Arguments; by default those of the process.

    Returns:
        The exit code. An interrupted process is ended here instead: its threads aren't waited for.
    """

    def body(arguments: Sequence[str]) -> None:
        # Here, not at the top: a mistake in gymllm-eval's flags need not wait for the trainer.
        from gymllm_trainers.config import load_config
        from gymllm_trainers.plan_chips import parse_topology, take_topology

        arguments, topology = take_topology(arguments)
        if topology is not None:
            parse_topology(topology)  # a mistake in it needn't wait either
        config = load_config(arguments)
        if topology is not None:
            from gymllm_trainers.plan_report import show as show_topology

            return show_topology(config, topology)
        if "--plan" in arguments:
            from gymllm_trainers.plan import show

            return show(config)
        from gymllm_trainers.train import run

        run(config)

    return _main(body, argv)


def evaluate(argv: Sequence[str] | None = None) -> int:
    """`gymllm-eval`; as `train`."""

    def body(arguments: Sequence[str]) -> None:
        from gymllm_trainers.evaluate import load_settings, run

        run(load_settings(arguments))

    return _main(body, argv)


def export(argv: Sequence[str] | None = None) -> int:
    """`gymllm-export`; as `train`."""

    def body(arguments: Sequence[str]) -> None:
        from gymllm_trainers.export import load_settings, run

        run(load_settings(arguments))

    return _main(body, argv)


def serve(argv: Sequence[str] | None = None) -> int:
    """`gymllm-serve`; as `train`."""

    def body(arguments: Sequence[str]) -> None:
        from gymllm_trainers.serve.settings import load_settings

        settings = load_settings(arguments)
        # After a mistake in a flag, and --help, which need nothing of this.
        from gymllm_trainers.serve.server import run

        run(settings)

    return _main(body, argv)


def _main(body: Callable[[Sequence[str]], None], argv: Sequence[str] | None) -> int:
    """As `_run`, with what a process of its own needs at its end."""
    try:
        try:
            return _run(body, argv)
        finally:
            sys.stdout.flush()  # after tyro's own way out too: Python's last flush can't be caught
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        return _leave_pipe()
    finally:
        if argv is None:
            # Everything is closed: Ctrl-C while Python itself ends needs no traceback.
            signal.signal(signal.SIGINT, lambda signum, frame: os._exit(EXIT_INTERRUPTED))


def _nobody_reads() -> bool:
    """Whether standard output is a pipe without a reader."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):  # no file at all, as in a test
        return False


def _leave_pipe() -> int:
    """Lets Python's own last flush go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return EXIT_BROKEN_PIPE


def _run(body: Callable[[Sequence[str]], None], argv: Sequence[str] | None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    try:
        with ends_on_interrupt():
            try:
                body(arguments)
            except KeyboardInterrupt:
                # Still inside the guard: flushing to a stuck pipe must not outlive it.
                flush_and_exit(EXIT_INTERRUPTED)
    except Exception as error:
        known = _known(error)
        if known is None:
            raise
        print(f"gymllm: {known}", file=sys.stderr)  # noqa: T201 (a command line speaks)
        return 2 if isinstance(known, (ConfigError, ModelError, MissingExtraError)) else 1
    return 0


def _known(error: BaseException) -> GymLLMError | None:
    """The error to show: one of ours, or the first of a group in which all are."""
    if isinstance(error, GymLLMError):
        return error
    if isinstance(error, BaseExceptionGroup):
        known = [_known(inner) for inner in error.exceptions]
        if known and all(inner is not None for inner in known):
            return known[0]
    return None


if __name__ == "__main__":
    raise SystemExit(train())  # as `python -m gymllm_trainers`
