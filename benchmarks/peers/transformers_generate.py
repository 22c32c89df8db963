"""transformers' `generate` on a CPU, by batches: python transformers_generate.py MODEL_FOLDER THREADS."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from answering import answer
from transformers import AutoModelForCausalLM


class Peer:
    """One model, by the type of its weights."""

    def __init__(self, folder: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.folder = folder
        self.dtype, self.model = "", None

    def generate(
        self, prompts: list[list[int]], new: int, dtype: str, cache: str
    ) -> dict[str, Any]:
        """Seconds and the ids, greedy; exactly `new` of each prompt. `cache` is dynamic or static."""
        if self.dtype != dtype:
            self.model = None  # two at a time would need twice the memory
            self.model = AutoModelForCausalLM.from_pretrained(
                self.folder, dtype=getattr(torch, dtype)
            )
            self.dtype = dtype
        ids = torch.tensor(prompts)
        options = {} if cache == "dynamic" else {"cache_implementation": cache}
        started = time.perf_counter()
        with torch.inference_mode():
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=new,
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
                **options,
            )
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "ids": output[:, ids.shape[1] :].tolist()}

    def matmul(self, dtype: str, size: int) -> dict[str, Any]:
        """Operations a second of a square matrix product, the best of six."""
        matrix = torch.ones(size, size, dtype=getattr(torch, dtype))
        times: list[float] = []
        for _ in range(6):
            started = time.perf_counter()
            matrix @ matrix
            times.append(time.perf_counter() - started)
        return {"rate": 2 * size**3 / min(times)}


if __name__ == "__main__":
    peer = Peer(sys.argv[1], int(sys.argv[2]))
    answer({"generate": peer.generate, "matmul": peer.matmul})
