"""What a program needs is known before it runs, and too much of it is an error that says what to change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from gymllm.errors import RunError
from gymllm_trainers.learner import Learner, LearnerConfig
from gymllm_trainers.learner.memory import (
    Layout,
    device_limit_bytes,
    is_out_of_memory,
    nearest_fit,
    out_of_memory,
    predicted_bytes,
)
from gymllm_trainers.models import Decoder

LAYOUT = Layout(rows=8, row_tokens=1024, remat="none")


def formula(layout: Layout) -> int:
    """1,000 bytes whatever is computed, and 10 a token, 4 where most is computed again."""
    return 1000 + layout.rows * layout.row_tokens * (4 if layout.remat == "full" else 10)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (72_000, Layout(rows=6, row_tokens=1024, remat="none")),
        (12_000, Layout(rows=1, row_tokens=1024, remat="none")),
        (9_000, Layout(rows=1, row_tokens=768, remat="none")),
        (3_500, Layout(rows=1, row_tokens=576, remat="full")),
        (2_000, None),
    ],
)
def test_the_nearest_layout_that_fits(limit: int, expected: Layout | None) -> None:
    asked: list[Layout] = []

    def predict(layout: Layout) -> int:
        asked.append(layout)
        return formula(layout)

    # Rows of 512 tokens at least; in the backward pass nothing is computed again if it can be helped.
    assert nearest_fit(LAYOUT, predict, least_row_tokens=512, limit=limit) == expected
    assert len(asked) <= 16, "each of them is compiled"


def test_rows_stay_a_multiple_of_the_devices_that_divide_them() -> None:
    found = nearest_fit(LAYOUT, formula, least_row_tokens=512, limit=60_000, rows_of=4)
    assert found == replace(LAYOUT, rows=4)


def test_the_error_names_settings_and_values() -> None:
    error = out_of_memory(LAYOUT, formula, least_row_tokens=512, limit=72_000)
    assert isinstance(error, RunError)
    assert "micro-batch of 8 rows x 1024 tokens needs 0.1 MiB" in str(error)
    assert "and the device has 0.1 MiB for it. With learner.rows 6 it needs" in str(error)
    error = out_of_memory(LAYOUT, formula, least_row_tokens=512, limit=3_500)
    assert "model.remat full and learner.rows 1 and learner.row_tokens 576" in str(error)
    error = out_of_memory(LAYOUT, formula, least_row_tokens=512, limit=1)
    assert "Nothing smaller fits either: train adapters (model.lora_rank)" in str(error)
    error = out_of_memory(LAYOUT, lambda layout: None, least_row_tokens=512, limit=1)
    assert "Lower learner.rows or learner.row_tokens, or set model.remat to full." in str(error)


def test_what_a_compiled_program_needs_is_what_it_holds() -> None:
    program = jax.jit(lambda x: jnp.outer(x, x).sum() + x).lower(jnp.zeros(512)).compile()
    needed = predicted_bytes(program)
    assert needed is not None
    # Its argument and its result; at most the whole product beside.
    assert 2 * 512 * 4 <= needed <= 2 * 512 * 4 + 2 * 512 * 512 * 4
    assert device_limit_bytes() is None, "a CPU has no limit of its own"


def test_only_a_full_memory_is_one() -> None:
    kind = jax.errors.JaxRuntimeError
    assert is_out_of_memory(kind("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes."))
    assert not is_out_of_memory(kind("INVALID_ARGUMENT: something else"))
    assert not is_out_of_memory(MemoryError())


def test_the_learner_predicts_and_explains(
    make_decoder: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its real programs: fewer rows need less, and a full device is answered with a number of rows."""
    config = LearnerConfig(rows=4, head_chunk=16, smaller_shapes=0)
    learner = Learner(
        make_decoder(0), config, row_tokens=64, temperature=1.0, max_lag=0, context_length=64
    )
    learner.compile()
    whole = learner.predicted_bytes["gradient"]
    predict = learner._compiled.gradient_bytes
    half = predict(Layout(rows=2, row_tokens=64, remat="none"))
    assert predict(Layout(rows=4, row_tokens=64, remat="none")) == whole
    assert half is not None
    assert half < whole
    assert learner.predicted_bytes["step"] > 0

    def full(*arguments: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.")

    module = "gymllm_trainers.learner.compiled"
    monkeypatch.setattr(f"{module}.device_limit_bytes", lambda held: (half + whole) // 2)
    monkeypatch.setattr(learner._compiled, "_gradients", {(4, 64): full})
    batch = learner._compiled._empty((4, 64))
    with pytest.raises(RunError, match=r"out of memory: .* With learner\.rows [23] it needs"):
        learner._compiled.gradient(
            learner._trained, learner._gradient, batch, learner._compiled._no_scores((4, 64))
        )
