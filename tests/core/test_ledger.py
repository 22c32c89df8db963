"""The ledger refuses whatever would break invariants 1 and 2."""

from __future__ import annotations

import numpy as np
import pytest

from gymllm.engine import FinishReason, Generation
from gymllm.errors import LedgerError
from gymllm.ledger import NO_VERSION, TokenLedger


def generation(ids, *, version: int = 3, logprobs=None, versions=None) -> Generation:
    n = len(ids)
    return Generation(
        token_ids=np.array(ids, np.int32),
        logprobs=np.array([-0.5] * n if logprobs is None else logprobs, np.float32),
        versions=np.array([version] * n if versions is None else versions, np.int32),
        finish_reason=FinishReason.STOP,
    )


def test_context_has_mask_0_and_generation_mask_1():
    ledger = TokenLedger()
    ledger.append_context([1, 2])
    ledger.append_generation(generation([7, 8, 9]), prompt_length=2)
    ledger.append_context([4])
    (segment,) = ledger.segments()
    assert segment.ids.tolist() == [1, 2, 7, 8, 9, 4]
    assert segment.mask.tolist() == [0, 0, 1, 1, 1, 0]
    assert segment.logprobs.tolist() == [0, 0, -0.5, -0.5, -0.5, 0]
    assert segment.versions.tolist() == [NO_VERSION, NO_VERSION, 3, 3, 3, NO_VERSION]
    assert {a.dtype for a in (segment.ids, segment.mask, segment.versions)} == {np.dtype(np.int32)}
    assert segment.logprobs.dtype == np.float32


def test_what_is_known_of_the_newest_token():
    ledger = TokenLedger()
    assert (ledger.ids.tolist(), len(ledger), ledger.last_id, ledger.last_is_generated) == (
        [],
        0,
        None,
        False,
    )
    ledger.append_context([1])
    assert (ledger.last_id, ledger.last_is_generated, ledger.generated) == (1, False, 0)
    ledger.append_generation(generation([7]), prompt_length=1)
    assert (ledger.last_id, ledger.last_is_generated, ledger.generated) == (7, True, 1)
    ledger.start_segment()
    assert (ledger.last_id, ledger.last_is_generated, ledger.generated) == (None, False, 1)


@pytest.mark.parametrize("prompt_length", [0, 1, 3])
def test_an_answer_to_another_prompt_is_refused(prompt_length):
    ledger = TokenLedger()
    ledger.append_context([1, 2])
    with pytest.raises(LedgerError, match=f"prompt of {prompt_length} tokens.*holds 2"):
        ledger.append_generation(generation([7]), prompt_length=prompt_length)
    assert ledger.ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"logprobs": [0.0]}, "2 tokens came with 1 log-probabilities and 2 versions"),
        ({"versions": [1]}, "2 log-probabilities and 1 versions"),
        ({"logprobs": [0.0, np.nan]}, "not finite"),
        ({"logprobs": [0.0, -np.inf]}, "not finite"),
        ({"versions": [1, -1]}, "below 0"),
    ],
)
def test_an_incomplete_generation_is_refused(bad, message):
    ledger = TokenLedger()
    with pytest.raises(LedgerError, match=message):
        ledger.append_generation(generation([7, 8], **bad), prompt_length=0)
    assert len(ledger) == 0


def test_empty_and_negative_are_refused():
    ledger = TokenLedger()
    with pytest.raises(LedgerError, match="at least one token"):
        ledger.append_generation(generation([]), prompt_length=0)
    with pytest.raises(LedgerError, match="must be >= 0, got -2"):
        ledger.append_generation(generation([1, -2]), prompt_length=0)
    with pytest.raises(LedgerError, match="must be >= 0, got -1"):
        ledger.append_context([1, -1])
    assert len(ledger) == 0


def test_a_segment_seals_what_came_before():
    ledger = TokenLedger()
    ledger.start_segment()  # nothing to seal
    assert ledger.segments() == ()
    ledger.append_context([1])
    ledger.append_generation(generation([7]), prompt_length=1)
    ledger.start_segment()
    ledger.start_segment()
    ledger.append_context([1, 9])
    ledger.append_generation(generation([8]), prompt_length=2)
    first, second = ledger.segments()
    assert (first.ids.tolist(), second.ids.tolist()) == ([1, 7], [1, 9, 8])
    assert ledger.generated == 2


def test_segments_are_copies_that_cannot_be_written():
    ledger = TokenLedger()
    ledger.append_context([1])
    (before,) = ledger.segments()
    ledger.append_context([2])
    assert before.ids.tolist() == [1]
    with pytest.raises(ValueError, match="read-only"):
        before.ids[0] = 5
    ledger.start_segment()
    (sealed,) = ledger.segments()
    with pytest.raises(ValueError, match="read-only"):
        sealed.mask[0] = 1


def test_a_generations_arrays_are_not_shared():
    ledger = TokenLedger()
    answer = generation([7])
    ledger.append_generation(answer, prompt_length=0)
    answer.token_ids[0] = 1
    assert ledger.ids.tolist() == [7]


def test_what_was_handed_out_never_changes():
    """The arrays grow underneath: views of them must not."""
    ledger = TokenLedger()
    taken: list[tuple[object, list[int]]] = []
    for i in range(300):
        ledger.append_context([i] * (i % 7))
        taken.append((ledger.ids, ledger.ids.tolist()))
    assert all(view.tolist() == was for view, was in taken)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="read-only"):
        ledger.ids[0] = 1
