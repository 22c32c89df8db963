"""What a compiled program needs of a device's memory, known before it runs; and what to change if that is
too much."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from gymllm.errors import RunError
from gymllm_trainers.models.decoder import RematPolicy

_LENGTH_STEP = 64
"""Row lengths that are tried are so many tokens apart."""
Bytes = Callable[["Layout"], int | None]
"""Predicts what the gradient of a micro-batch needs, from its layout."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What decides how much memory the gradient of a micro-batch needs."""

    rows: int
    """learner.rows."""
    row_tokens: int
    """learner.row_tokens."""
    remat: RematPolicy
    """model.remat."""


def predicted_bytes(program: Any) -> int | None:
    """Bytes that a compiled program holds on each device while it runs: arguments, results, temporaries.

    Args:
        program: What `jax.jit(...).lower(...).compile()` returned.

    Returns:
        None where the platform doesn't say.
    """
    try:
        analysis = program.memory_analysis()
    except (AttributeError, NotImplementedError, jax.errors.JaxRuntimeError):
        return None
    if analysis is None:
        return None
    return int(
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
    )


def device_limit_bytes(*, held: int = 0) -> int | None:
    """Bytes that a program may hold on a device, its arguments included.

    Args:
        held: Of what is in use, bytes that are the program's own arguments; the rest (an optimizer's moments,
            an engine's cache) stays where it is.

    Returns:
        None where there is no limit, as on a CPU.
    """
    statistics = jax.local_devices()[0].memory_stats() or {}
    limit = statistics.get("bytes_limit")
    if limit is None:
        return None
    return int(limit) - max(int(statistics.get("bytes_in_use", 0)) - held, 0)


def held_bytes(tree: Any) -> int:
    """Bytes of a tree of arrays on each device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether XLA says that a device's memory was too small, when it compiled or when it ran."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def out_of_memory(
    layout: Layout,
    predict: Bytes,
    *,
    least_row_tokens: int,
    rows_of: int = 1,
    limit: int | None = None,
) -> RunError:
    """The error of a gradient that doesn't fit: what it takes, and the nearest setting that fits.

    Args:
        layout: What was asked for.
        predict: Compiles the gradient of another layout; seconds each, so few are tried.
        least_row_tokens: Longest sequence there may be, in tokens: a row can't be shorter.
        rows_of: Rows are a multiple of this, as they are divided over devices.
        limit: Bytes that there are for it on a device; None: it isn't known.
    """
    needed = predict(layout)
    what = f"the gradient of a micro-batch of {layout.rows} rows x {layout.row_tokens} tokens"
    takes = "needs more memory than there is" if needed is None else f"needs {_size(needed)}"
    has = "" if limit is None else f", and the device has {_size(limit)} for it"
    if limit is None or needed is None:
        advice = "Lower learner.rows or learner.row_tokens, or set model.remat to full."
    else:
        fit = nearest_fit(
            layout, predict, least_row_tokens=least_row_tokens, rows_of=rows_of, limit=limit
        )
        advice = "Nothing smaller fits either: train adapters (model.lora_rank), keep weights in "
        advice += "bfloat16 (model.dtype), divide them over more devices, or take a smaller model."
        if fit is not None:
            changes = [
                f"{name} {new}"
                for name, old, new in (
                    ("model.remat", layout.remat, fit.remat),
                    ("learner.rows", layout.rows, fit.rows),
                    ("learner.row_tokens", layout.row_tokens, fit.row_tokens),
                )
                if old != new
            ]
            fits = predict(fit)
            assert fits is not None
            advice = f"With {' and '.join(changes)} it needs {_size(fits)}, which fits: set that."
    return RunError(f"out of memory: {what} {takes}{has}. {advice}")


def nearest_fit(
    layout: Layout, predict: Bytes, *, least_row_tokens: int, limit: int, rows_of: int = 1
) -> Layout | None:
    """The first layout that fits of those that cost little speed first: fewer rows, then shorter ones,
    then the same with everything computed again in the backward pass.

    Args:
        layout: What does not fit.
        predict: As for `out_of_memory`.
        least_row_tokens: Shortest row.
        limit: Bytes that it may need.
        rows_of: Rows are a multiple of this.

    Returns:
        None if there is none.
    """

    def fits(candidate: Layout) -> bool:
        needed = predict(candidate)
        return needed is not None and needed <= limit

    policies: tuple[RematPolicy, ...] = (layout.remat,)
    if layout.remat != "full":
        policies += ("full",)
    for remat in policies:
        most = layout.rows if remat == layout.remat else layout.rows + 1
        by_rows = [replace(layout, rows=n, remat=remat) for n in range(rows_of, most, rows_of)]
        lengths = range(least_row_tokens, layout.row_tokens, _LENGTH_STEP)
        by_length = [replace(layout, rows=rows_of, row_tokens=n, remat=remat) for n in lengths]
        for candidates in (by_rows, by_length):
            if (found := _largest(candidates, fits)) is not None:
                return found
    return None


def _largest(layouts: Sequence[Layout], fits: Callable[[Layout], bool]) -> Layout | None:
    """The last of ever larger layouts that fits, where all before one that fits do; None if none does."""
    end = bisect.bisect_left(layouts, True, key=lambda layout: not fits(layout))
    return layouts[end - 1] if end else None


def _size(size_bytes: int) -> str:
    return (
        f"{size_bytes / 2**30:,.2f} GiB"
        if size_bytes >= 2**30
        else f"{size_bytes / 2**20:,.1f} MiB"
    )
