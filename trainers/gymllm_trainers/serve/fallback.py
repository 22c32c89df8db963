"""Until the paged engine is there."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace

from gymllm_trainers.engine import JaxEngine as Old


class JaxEngine(Old):
    def __init__(self, *a, tokenizer, **k):
        super().__init__(*a, **k)
        self.free_pages = 0

    async def stream(self, request) -> AsyncGenerator:
        g = await self.generate(request)
        stops = request.sampling.stop_token_ids
        last = int(g.token_ids[-1])
        yield SimpleNamespace(
            token_ids=g.token_ids,
            logprobs=g.logprobs,
            base_logprobs=g.base_logprobs,
            versions=g.versions,
            top_logprobs=[{} for _ in g.token_ids],
            finish_reason=g.finish_reason,
            matched=last if last in stops else None,
            reused_tokens=0,
        )

    def pause(self): ...
    def resume(self): ...
    def clear_cache(self): ...
