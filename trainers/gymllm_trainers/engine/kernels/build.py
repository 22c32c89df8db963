"""Compiles the kernels with the system's C compiler, once for each version, processor and compiler."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

import jax
import platformdirs

from gymllm.errors import EngineError

_HERE = Path(__file__).parent
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-fPIC", "-shared", "-pthread")
_TIMEOUT_S = 300


def build(*, flags: tuple[str, ...] = ("-march=native",), folder: Path | None = None) -> Path:
    """Compiles the kernels, unless that has been done; processes that do so at once don't disturb each other.

    Args:
        flags: For the compiler, besides those that are always needed.
        folder: Where the library is kept; the user's cache if none is given.

    Returns:
        The shared library.

    Raises:
        EngineError: There is no C compiler, or it failed; the message has what it said.
    """
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise EngineError(
            f"No C compiler is on the PATH ({', '.join(_COMPILERS)}), so the engine's kernels for CPUs "
            "can't be built. Install one (on Debian: apt-get install gcc), or go on without: XLA's are "
            "used."
        )
    folder = folder or Path(platformdirs.user_cache_dir("gymllm")) / "kernels"
    sources = sorted(_HERE.glob("*.c"))
    parts = [
        version("jaxlib"),
        compiler,
        _run(compiler, "--version"),
        *_FLAGS,
        *flags,
        _processor(),
    ]
    parts += [path.read_text() for path in (*sources, *sorted(_HERE.glob("*.h")))]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    library = folder / f"kernels-{digest}.so"
    if _is_whole(library):
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".part")
    except OSError as error:
        raise EngineError(f"The engine's kernels can't be kept in {folder}: {error}.") from error
    os.close(handle)
    try:
        headers = f"-isystem{jax.ffi.include_dir()}"
        _run(compiler, *_FLAGS, *flags, headers, *map(str, sources), "-lm", "-o", name)
        made = Path(name).read_bytes()
        # What comes after an ELF or Mach-O file's own end is nothing to the loader.
        Path(name).write_bytes(made + hashlib.sha256(made).digest())
        # Whoever comes last wins; all of them have made the same.
        Path(name).replace(library)
    except OSError as error:
        raise EngineError(f"The engine's kernels can't be kept in {folder}: {error}.") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
    return library


def _is_whole(library: Path) -> bool:
    """Whether it is there as it was made: a library cut off by a full disk or a crash would end the process
    that loads it, with a bus error."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return content[-size:] == hashlib.sha256(content[:-size]).digest()


def _run(*command: str) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"The C compiler could not be run: {error}.") from error
    if done.returncode:
        raise EngineError(
            f"The engine's kernels could not be compiled: {' '.join(command)} ended with "
            f"{done.returncode}: {done.stderr.strip()[-2000:]}"
        )
    return done.stdout


def _processor() -> str:
    """What `-march=native` depends on: a home folder may be shared by different machines."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"
