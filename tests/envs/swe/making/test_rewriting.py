"""Statements by an engine: taken if they keep the facts, counted if not."""

from __future__ import annotations

import pytest

from gymllm.chat_engine import ChatReply, ChatRequest
from gymllm.engine import FinishReason
from gymllm.errors import EngineError
from gymllm.message import Message
from gymllm_envs.swe.making.rewriting import Rewriter
from gymllm_envs.swe.task import SweTask

DRAFT = (
    "# `total([1])` gives a wrong result\n\nI use shapes 1.0.\n\n**What I did**\n\n"
    "```python\nfrom shapes import total\n\ntotal([1])\n```\n\n**What I expected**\n\n`1`.\n"
)
TASK = SweTask(
    id="a",
    repo="shapes",
    problem_statement=DRAFT,
    fail_to_pass=("t",),
    sdist="shapes==1.0",
    extra={"function": "shapes.py:Box.volume"},
)
GOOD = DRAFT.replace("I use shapes 1.0.", "Since I moved to shapes 1.0 sums are off.").strip()


class Engine:
    """Answers as it is told."""

    def __init__(self, text: str, reason: FinishReason = FinishReason.STOP) -> None:
        self.text, self.reason, self.asked = text, reason, ""

    async def chat(self, request: ChatRequest) -> ChatReply:
        self.asked = request.messages[0].content
        if not self.text:
            raise EngineError("the server is gone")
        return ChatReply(
            message=Message(role="assistant", content=self.text), finish_reason=self.reason
        )


@pytest.mark.asyncio
async def test_a_good_answer_is_taken() -> None:
    engine = Engine(GOOD)
    rewriter = Rewriter(engine=engine)
    assert await rewriter(TASK) == GOOD + "\n"
    assert (rewriter.rewritten, rewriter.refused) == (1, 0)
    assert DRAFT in engine.asked
    assert "volume" not in engine.asked


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", FinishReason.STOP),
        ("Sorry.", FinishReason.STOP),
        (GOOD, FinishReason.LENGTH),
        (GOOD.replace("total([1])\n", "total([2])\n"), FinishReason.STOP),
        (GOOD + " I think volume is broken.", FinishReason.STOP),
        (GOOD * 4, FinishReason.STOP),
    ],
)
@pytest.mark.asyncio
async def test_other_answers_leave_the_draft(text: str, reason: FinishReason) -> None:
    rewriter = Rewriter(engine=Engine(text, reason))
    assert await rewriter(TASK) == DRAFT
    assert (rewriter.rewritten, rewriter.refused) == (0, 1)
    assert rewriter.problem == ("" if text else "the server is gone")
