"""JAX's compilation cache, in the user's cache folder: a second run compiles nothing again."""

from __future__ import annotations

from pathlib import Path

import jax
import platformdirs


def use_compilation_cache(folder: Path | None = None) -> None:
    """Keeps compiled programs in `folder` (default: the user's cache), unless JAX was told where."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        folder = folder or Path(platformdirs.user_cache_dir("gymllm")) / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # Programs of the default run compile in about a second each; keep those too.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
