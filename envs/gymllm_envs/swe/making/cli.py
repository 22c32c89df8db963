"""`gymllm-swe-tasks`: makes SWE tasks from real packages, checks them, shows them.

Results go to standard output, progress and complaints to standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

from gymllm.errors import ConfigError, GymLLMError, SandboxError, UnknownNameError
from gymllm_envs.swe.changes import Changes
from gymllm_envs.swe.grading import gold_changes, grade
from gymllm_envs.swe.making.making import Made, Progress, counted, make_tasks
from gymllm_envs.swe.making.packages import PACKAGES
from gymllm_envs.swe.making.rewriting import Rewriter
from gymllm_envs.swe.task import SweTask, read_tasks
from gymllm_envs.swe.trees import prepare

EXIT_BROKEN = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130  # what a shell reports for Ctrl-C


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The command line."""

    command: str
    out: Path = Path()
    count: int = 0
    packages: str = ""
    seed: int = 0
    jobs: int = 0
    engine_url: str = ""
    engine_model: str = ""
    file: Path = Path()
    id: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: Arguments; by default those of the process.

    Returns:
        The exit code: 0; 1 if something broke or a task isn't valid; 2 if an argument can't be used; 130
        after Ctrl-C.
    """
    options = _Options(**vars(_parser().parse_args(arguments)))
    try:
        match options.command:
            case "make":
                return _make(options)
            case "validate":
                return anyio.run(_validate, options)
            case "show":
                return _show(options)
            case _:
                return _list()
    except KeyboardInterrupt:
        _complain("Interrupted; what is made is kept.")
        return EXIT_INTERRUPTED
    except ConfigError as problem:
        _complain(str(problem))
        return EXIT_CONFIG
    except GymLLMError as problem:
        _complain(str(problem))
        return EXIT_BROKEN


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gymllm-swe-tasks",
        description="SWE tasks from real packages: bugs, the tests that tell, and a description.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser(
        "make", help="make a file of tasks; again, to go on where it stopped"
    )
    make.add_argument("--out", type=Path, required=True, help="the file, JSON lines")
    make.add_argument("--count", type=int, default=200, help="of tasks in the file (200)")
    make.add_argument("--packages", default="all", help='"all" (default), or names: toolz,schema')
    make.add_argument("--seed", type=int, default=0, help="of all choices (0)")
    make.add_argument("--jobs", type=int, default=2, help="packages at a time, a core each (2)")
    make.add_argument(
        "--engine-url", default="", help="a chat server that rewrites the descriptions"
    )
    make.add_argument("--engine-model", default="", help="its name of the model")
    commands.add_parser("list", help="the packages that tasks are made from")
    validate = commands.add_parser("validate", help="grade each gold patch (1) and none (0)")
    validate.add_argument("file", type=Path, help="a file of tasks")
    validate.add_argument("--jobs", type=int, default=2, help="tasks at a time (2)")
    show = commands.add_parser("show", help="a task as text, with its solution")
    show.add_argument("file", type=Path, help="a file of tasks")
    show.add_argument("id", help="its instance_id")
    return parser


def _make(options: _Options) -> int:
    names = [] if options.packages == "all" else options.packages.split(",")
    if bool(options.engine_url) != bool(options.engine_model):
        raise ConfigError("--engine-url and --engine-model go together; give both or none.")
    made = anyio.run(_make_all, options, [name.strip() for name in names])
    for name, problem in made.failed.items():
        _complain(f"{name} could not be used: {problem}")
    tried = sum(tried for tried, _ in made.operators.values())
    dropped = ", ".join(f"{n} {reason}" for reason, n in sorted(made.dropped.items()))
    _print(
        f"{options.out}: {counted(len(made.tasks), 'task')} of {counted(made.packages, 'package')}, "
        f"{made.wall_s:.0f} s"
    )
    _print(f"{counted(tried, 'bug')} tried" + (f"; dropped: {dropped}" if dropped else ""))
    if len(made.tasks) < options.count:
        _complain(
            f"Only {len(made.tasks)} of {options.count} tasks: these packages have no more bugs to give. "
            "Name more packages, or another seed and file."
        )
        return EXIT_BROKEN
    return 0


async def _make_all(options: _Options, names: Sequence[str]) -> Made:
    progress = Progress(
        f"Making {counted(options.count, 'task')} into {options.out}; Ctrl-C keeps what is made"
    )

    async def make(rewriter: Rewriter | None) -> Made:
        return await make_tasks(
            options.out,
            count=options.count,
            packages=names,
            seed=options.seed,
            jobs=options.jobs,
            progress=progress,
            rewrite=rewriter,
        )

    if not options.engine_url:
        return await make(None)
    from gymllm.engines.openai import OpenAIEngine  # needs an extra

    async with OpenAIEngine(options.engine_model, url=options.engine_url) as engine:
        rewriter = Rewriter(engine=engine, seed=options.seed)
        made = await make(rewriter)
        _print(f"{rewriter.rewritten} descriptions rewritten, {rewriter.refused} kept as they were")
        if rewriter.problem:
            _complain(f"The model gave no answer, the first time because {rewriter.problem}")
        return made


async def _validate(options: _Options) -> int:
    """Grades each task's gold patch and an empty one."""
    tasks = [task for task in read_tasks(options.file) if task.sdist]
    wrong: list[str] = []
    limiter = anyio.CapacityLimiter(max(1, options.jobs))

    async def one(task: SweTask) -> None:
        async with limiter:
            try:
                gold = await grade(task, gold_changes(task, await prepare(task)))
                none = await grade(task, Changes(files={}))
            except SandboxError as problem:
                wrong.append(task.id)
                _print(f"{task.id}: could not be graded: {problem}")
                return
        if gold.reward() != 1 or none.reward() != 0:
            wrong.append(task.id)
            said = [
                f"{name} {v.reward():g} ({v.reason})"
                for name, v in (("gold", gold), ("nothing", none))
            ]
            _print(f"{task.id}: {', '.join(said)}")

    async with anyio.create_task_group() as group:
        for task in tasks:
            group.start_soon(one, task, name=f"validate {task.id}")
    _print(f"{len(tasks) - len(wrong)} of {len(tasks)} tasks valid: gold 1, nothing 0")
    return EXIT_BROKEN if wrong else 0


def _show(options: _Options) -> int:
    tasks = {task.id: task for task in read_tasks(options.file)}
    if options.id not in tasks:
        raise UnknownNameError("task", options.id, tasks)
    task = tasks[options.id]
    _print(f"{task.id}   {task.sdist}   {task.extra.get('operator', '')}\n")
    _print(task.problem_statement)
    for title, tests in (("FAIL_TO_PASS", task.fail_to_pass), ("PASS_TO_PASS", task.pass_to_pass)):
        _print(f"{title} ({len(tests)}):")
        _print("\n".join(f"    {test}" for test in tests[:20]))
        if len(tests) > 20:
            _print(f"    and {len(tests) - 20} more")
    _print(f"\nSolution:\n{task.patch}\nHidden:\n{task.hide_patch}")
    return 0


def _list() -> int:
    for package in PACKAGES.values():
        _print(f"{package.name:16} {package.version:10} {package.licence}")
    return 0


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _complain(text: str) -> None:
    sys.stderr.write(f"gymllm-swe-tasks: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
