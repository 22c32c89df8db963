"""A Dockerfile read as what a local sandbox can do: this host's system instead of FROM's, one writable tree.

FROM, WORKDIR, ENV, ARG, COPY, ADD of files and RUN are followed; labels, ports and commands mean nothing
here. What can't be had (packages that aren't installed, downloads, files outside of one folder, other
users) is refused with its line and the way out: kind="docker".
"""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gymllm.errors import ConfigError
from gymllm_envs.terminal.task import CopyStep, RunStep

_IGNORED = (
    *("CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "ONBUILD"),
    *("SHELL", "STOPSIGNAL", "VOLUME"),
)
_NETWORK = re.compile(
    r"(?:^|[\s;&|(])(?:apt|apt-get|apk|dnf|yum|pip3?|pipx|uvx?|conda|mamba|npm|npx|yarn|pnpm|cargo|go|gem|curl"
    r"|wget|git\s+clone|python3?\s+-m\s+pip)(?=\s|$)"
)
_APT = re.compile(r"(?:apt-get|apt)\s+(.*)", re.DOTALL)
_HARMLESS = re.compile(r"(?:rm\s+-rf\s+/var/(?:lib/apt/lists|cache/apt)\S*|true|:)\Z")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")


@dataclass(frozen=True, kw_only=True)
class Interpreted:
    """What a Dockerfile makes of a local sandbox."""

    tree: str
    """The folder that is written to."""
    workdir: str
    env: Mapping[str, str]
    steps: tuple[CopyStep | RunStep, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Line:
    number: int
    word: str
    rest: str

    def __str__(self) -> str:
        return f"line {self.number}, {self.word} {self.rest}"[:120]


def interpret(dockerfile: Path, *, context: Path | None = None) -> Interpreted:
    """Reads a Dockerfile.

    Args:
        dockerfile: The file.
        context: What COPY copies from; its folder if None.

    Raises:
        ConfigError: It needs what a local sandbox can't do.
    """
    root = (context or dockerfile.parent).resolve()
    variables: dict[str, str] = {}
    env: dict[str, str] = {}
    notes: list[str] = []
    steps: list[CopyStep | RunStep] = []
    workdir, has_workdir, stages = "/", False, 0
    for line in _lines(dockerfile):
        word, rest = line.word, line.rest
        if word not in ("RUN", "CMD", "ENTRYPOINT"):
            rest = _substituted(rest, {**variables, **env})
        if word == "FROM":
            stages += 1
            if stages > 1:
                raise _refusal(dockerfile, line, "more than one stage")
            notes.append(f"FROM {rest}: this machine's system instead")
        elif word == "WORKDIR":
            workdir, has_workdir = os.path.normpath(os.path.join(workdir, rest.strip("\"'"))), True
            steps.append(RunStep(command="", cwd=workdir, line=str(line)))  # which makes it
        elif word == "ENV":
            env |= _assignments(dockerfile, line, rest)
        elif word == "ARG":
            name, _, value = rest.partition("=")
            variables.setdefault(name.strip(), value.strip("\"'"))
        elif word in ("COPY", "ADD"):
            steps.append(_copy(dockerfile, line, rest, root, workdir))
        elif word == "RUN":
            command = _possible(dockerfile, line)
            if command:
                made = {**variables, **env}
                steps.append(RunStep(command=command, cwd=workdir, env=made, line=str(line)))
        elif word == "USER":
            if rest.split(":")[0] not in ("root", "0"):
                notes.append(f"USER {rest}: the sandbox's only user instead")
        elif word not in _IGNORED:
            raise _refusal(dockerfile, line, f"the instruction {word}")
    if not has_workdir:
        raise ConfigError(
            f"{dockerfile}: it has no WORKDIR, so the whole file system would be its tree. Local sandboxes "
            'write to one folder; use kind="docker", or give it a WORKDIR.'
        )
    tree = _tree(dockerfile, workdir, steps)
    return Interpreted(tree=tree, workdir=workdir, env=env, steps=tuple(steps), notes=tuple(notes))


def needs_network(script: str) -> str:
    """The first line of a script that fetches something; empty where none does."""
    for line in script.splitlines():
        code = line.strip()
        if code and not code.startswith("#") and _NETWORK.search(code):
            return code
    return ""


def _lines(dockerfile: Path) -> Iterator[_Line]:
    try:
        text = dockerfile.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{dockerfile} can't be read: {problem}.") from problem
    rows = text.splitlines()
    number = 0
    while number < len(rows):
        start, row = number, rows[number].strip()
        number += 1
        if not row or row.startswith("#"):
            continue
        while row.endswith("\\") and number < len(rows):
            more = rows[number].strip()
            number += 1
            if not more.startswith("#"):
                row = row[:-1].rstrip() + " " + more
        word, _, rest = row.rstrip("\\").partition(" ")
        line = _Line(number=start + 1, word=word.upper(), rest=rest.strip())
        if heredoc := re.search(r"<<-?\s*[\"']?(\w+)[\"']?\s*\Z", line.rest):
            if line.word != "RUN" or heredoc.start() != 0:
                raise _refusal(dockerfile, line, "a here-document")
            body: list[str] = []
            while number < len(rows) and rows[number].strip() != heredoc[1]:
                body.append(rows[number])
                number += 1
            number += 1
            line = _Line(number=start + 1, word="RUN", rest="\n".join(body))
        yield line


def _substituted(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3]) or match[2] or ""

    return _VARIABLE.sub(value, text)


def _assignments(dockerfile: Path, line: _Line, rest: str) -> dict[str, str]:
    try:
        parts = shlex.split(rest)
    except ValueError as problem:
        raise ConfigError(f"{dockerfile}, {line}: {problem}.") from problem
    if parts and "=" not in parts[0]:  # the old form: ENV NAME the rest is its value
        name, _, value = rest.partition(" ")
        return {name: value.strip()}
    return {name: value for name, _, value in (part.partition("=") for part in parts)}


def _copy(dockerfile: Path, line: _Line, rest: str, root: Path, workdir: str) -> CopyStep:
    parts = shlex.split(rest.strip("[]").replace(",", " ") if rest.startswith("[") else rest)
    if any(part.startswith("--from") for part in parts):
        raise _refusal(dockerfile, line, "a copy from another stage")
    parts = [part for part in parts if not part.startswith("--")]
    if len(parts) < 2:
        raise ConfigError(f"{dockerfile}, {line}: needs a source and a target.")
    *patterns, target = parts
    sources: list[Path] = []
    for pattern in patterns:
        if "://" in pattern:
            raise _refusal(dockerfile, line, f"a download ({pattern})")
        found = sorted(root.glob(pattern.strip("/"))) if pattern.strip("/.") else [root]
        if not found:
            raise ConfigError(f"{dockerfile}, {line}: there is no {pattern!r} in {root}.")
        for path in found:
            if root != path.resolve() and root not in path.resolve().parents:
                raise ConfigError(f"{dockerfile}, {line}: {pattern!r} leads out of {root}.")
        sources += found
    folder = target.endswith(("/", "/.")) or target == "." or len(sources) > 1
    absolute = os.path.normpath(os.path.join(workdir, target))
    target = absolute + "/" if folder and absolute != "/" else absolute
    return CopyStep(sources=tuple(sources), target=target, line=str(line))


def _possible(dockerfile: Path, line: _Line) -> str:
    """The command of a RUN without the packages that are here already."""
    command = re.sub(r"\A(?:--\S+\s+)+", "", line.rest)
    if command.startswith("["):
        raise _refusal(dockerfile, line, "a RUN in the form of a list")
    if not _NETWORK.search(command):
        return command
    left: list[str] = []
    for part in re.split(r"&&|;|\n", command):
        part = part.strip()
        if not part or _HARMLESS.match(part):
            continue
        if not _NETWORK.search(part):
            left.append(part)
            continue
        apt = _APT.match(part)
        words = shlex.split(apt[1]) if apt else []
        named = [word.partition("=")[0] for word in words if not word.startswith("-")]
        if named[:1] == ["install"]:
            missing = [name for name in named[1:] if name not in _installed()]
            if missing:
                raise _refusal(dockerfile, line, f"packages that aren't here: {', '.join(missing)}")
        elif named[:1] not in (["update"], ["upgrade"], ["clean"], ["autoremove"]):
            raise _refusal(dockerfile, line, f"the network ({part.split()[0]})")
    return " && ".join(left)


@functools.cache
def _installed() -> frozenset[str]:
    """Debian packages of this machine."""
    try:
        status = Path("/var/lib/dpkg/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    found: set[str] = set()
    for block in status.split("\n\n"):
        if "\nStatus: install ok installed\n" in block:
            found.add(block.partition("\n")[0].removeprefix("Package: "))
    return frozenset(found)


def _tree(dockerfile: Path, workdir: str, steps: list[CopyStep | RunStep]) -> str:
    """The lowest folder that holds the work directory and all that is copied."""
    places = [workdir]
    for step in steps:
        if isinstance(step, CopyStep):
            inside = step.target.endswith("/") or any(path.is_dir() for path in step.sources)
            target = step.target.rstrip("/")
            places.append(target if inside else os.path.dirname(target))
    tree = os.path.commonpath([place or "/" for place in places])
    if tree == "/":
        raise ConfigError(
            f"{dockerfile}: it writes to {', '.join(sorted(set(places)))}. Local sandboxes write "
            f"to one folder "
            'below /; use kind="docker".'
        )
    return tree


def _refusal(dockerfile: Path, line: _Line, what: str) -> ConfigError:
    return ConfigError(
        f'{dockerfile}, {line}: local sandboxes can\'t have {what}; use kind="docker".'
    )
