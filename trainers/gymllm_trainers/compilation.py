"""How programs are compiled: soon enough to start a run in seconds, and only once for each user."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import platformdirs

from gymllm_trainers.run_folder import warn

_QUICK_ON_CPU = {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 1}
"""Compile in less than half the time; what they make runs as fast, because the time goes to matrix
products, which are library calls."""


def compile_ahead(program: Any, *arguments: Any, quick: bool = True) -> Any:
    """Compiles a jitted function for these arguments' shapes, and for no others.

    Args:
        program: What `jax.jit` returned.
        arguments: Arrays, or `jax.ShapeDtypeStruct` for them.
        quick: Whether a CPU's compiler may save time; not for what runs thousands of times a minute and
            is more than matrix products.
    """
    lowered = program.lower(*arguments)
    if jax.default_backend() != "cpu" or not quick:
        return lowered.compile()
    try:
        return lowered.compile(compiler_options=_QUICK_ON_CPU)
    except jax.errors.JaxRuntimeError as error:
        # Another release of XLA may have dropped an option: then its own choices are good enough.
        if "compile option" not in str(error):
            raise
        return lowered.compile()


def use_compilation_cache(
    folder: Path | None = None, *, warn: Callable[[str], None] = warn
) -> None:
    """Keeps compiled programs in `folder` (default: the user's cache), unless JAX was told where.

    Where nothing can be written there, nothing is kept, and one sentence says so.

    Args:
        folder: Where.
        warn: Told when it can't be used.
    """
    told = jax.config.values["jax_compilation_cache_dir"]
    folder = Path(told or folder or Path(platformdirs.user_cache_dir("gymllm")) / "compiled")
    if "://" in str(told or ""):
        return  # a bucket, which JAX itself reaches
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        jax.config.update("jax_compilation_cache_dir", None)
        warn(
            f"compiled programs can't be kept in {folder} ({error.strerror}), so each start compiles anew: "
            "set JAX_COMPILATION_CACHE_DIR to a folder that can be written."
        )
        return
    if told is None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # Programs of the default run compile in about a second each; keep those too.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
