"""Problem statements in other words, by an engine: better to read, the same facts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gymllm.chat_engine import ChatEngine, ChatRequest
from gymllm.engine import FinishReason, SamplingParams
from gymllm.errors import ContextLengthError, EngineError
from gymllm.message import Message
from gymllm_envs.swe.task import SweTask

_PROMPT = """Rewrite this bug report as a user of {repo} would file it. Keep the code, what was expected and \
what happened exactly; change the words around them. Add no guess about the cause and no fix. Answer with \
the report alone, in Markdown, its title as the first line.

{statement}"""
_LEAST, _MOST = 0.4, 2.5
"""Lengths of what is taken, beside the draft's."""


@dataclass(kw_only=True)
class Rewriter:
    """Asks an engine; keeps the draft where the answer can't be used."""

    engine: ChatEngine
    seed: int = 0
    rewritten: int = 0
    refused: int = 0
    """How often the draft was kept."""
    problem: str = ""
    """Why the engine gave no answer, the first time that it gave none."""

    async def __call__(self, task: SweTask) -> str:
        """The statement in other words, or as it was."""
        draft = task.problem_statement
        prompt = _PROMPT.format(repo=task.repo, statement=draft)
        request = ChatRequest(
            messages=[Message(role="user", content=prompt)],
            sampling=SamplingParams(max_new_tokens=4096, temperature=0.7, seed=self.seed),
            request_id=task.id,
        )
        try:
            reply = await self.engine.chat(request)
        except (EngineError, ContextLengthError) as problem:
            self.refused += 1
            self.problem = self.problem or str(problem)
            return draft
        text = reply.message.content.strip() + "\n"
        if reply.finish_reason is not FinishReason.STOP or not _usable(text, task):
            self.refused += 1
            return draft
        self.rewritten += 1
        return text


def _usable(text: str, task: SweTask) -> bool:
    """Whether it is a report: of a report's length, the code kept, the fault not named."""
    draft = task.problem_statement
    if not _LEAST * len(draft) <= len(text) <= _MOST * len(draft):
        return False
    code = re.findall(r"```python\n(.*?)\n```", draft, re.DOTALL)
    kept = all(block in text for block in code[:1])  # the others say more of the same
    secret = str(task.extra.get("function", "")).rpartition(":")[2].rpartition(".")[2]
    named = re.compile(rf"\b{re.escape(secret)}\b")
    return kept and (not secret or bool(named.search(draft)) or not named.search(text))
