"""llama.cpp on a CPU, asked for batches: python llama_cpp_generate.py GGUF_FILE THREADS."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
from answering import answer

LARGEST = 4096
"""Tokens of the largest batch that is given at once."""


class Peer:
    """One file's model."""

    def __init__(self, path: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self.threads = threads
        parameters = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), parameters)
        if not self.model:
            raise SystemExit(f"{path} can't be loaded")
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def generate(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """Seconds to the first token of each prompt and to the last; the ids; greedy."""
        count, length = len(prompts), len(prompts[0])
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = count * (length + new + 32)
        options.n_batch = options.n_ubatch = LARGEST
        options.n_seq_max = count
        options.n_threads = options.n_threads_batch = self.threads
        context = llama_cpp.llama_init_from_model(self.model, options)
        batch = llama_cpp.llama_batch_init(LARGEST, 0, 1)
        # What the first call allocates is not measured.
        self._decode(context, batch, [(prompts[0][0], 0, 0)])
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)

        started = time.perf_counter()
        together = max(LARGEST // length, 1)
        tokens: list[int] = []
        for first in range(0, count, together):
            rows = [
                (token, at, sequence)
                for sequence in range(first, min(first + together, count))
                for at, token in enumerate(prompts[sequence])
            ]
            tokens += self._decode(context, batch, rows, last=length - 1)
        first_s = time.perf_counter() - started
        ids = [[token] for token in tokens]
        for at in range(length, length + new - 1):
            tokens = self._decode(context, batch, [(t, at, s) for s, t in enumerate(tokens)])
            for row, token in zip(ids, tokens, strict=True):
                row.append(token)
        all_s = time.perf_counter() - started
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        return {"first_s": first_s, "all_s": all_s, "ids": ids}

    def _decode(
        self, context: Any, batch: Any, rows: Sequence[tuple[int, int, int]], last: int = -1
    ) -> list[int]:
        """Computes (token, position, sequence) rows; the likeliest next token of each at position `last`,
        or of each at all."""
        batch.n_tokens = len(rows)
        wanted: list[int] = []
        for index, (token, at, sequence) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, at
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = last in (-1, at)
            if last in (-1, at):
                wanted.append(index)
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        found: list[int] = []
        for index in wanted:
            logits = ctypes.cast(
                llama_cpp.llama_get_logits_ith(context, index),
                ctypes.POINTER(ctypes.c_float * self.vocabulary),
            )
            found.append(int(np.argmax(np.frombuffer(logits.contents, np.float32))))
        return found


if __name__ == "__main__":
    answer({"generate": Peer(sys.argv[1], int(sys.argv[2])).generate})
