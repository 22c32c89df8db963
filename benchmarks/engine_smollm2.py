"""SmolLM2-135M on this machine's cores, beside transformers, llama.cpp and the machine's own limits.

Greedy, random prompts of 128 tokens, exactly as many generated. Prefill is the time to the first token of
every prompt; decode is what the same with more tokens takes longer. The best of some rounds, by turns.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engine_serving import Prompts, generate_all, named_model, serving, smaller
from gguf_floats import write_floats
from machine_limits import (
    Limits,
    decode_s,
    matmul_rate,
    numpy_matmul_rate,
    prefill_s,
    read_rate,
)
from peers.session import PeerError, PeerSession
from table import Table

from gymllm_trainers.engine import EngineConfig, JaxEngine
from gymllm_trainers.models import LoadedModel, decoder_params, save_model
from gymllm_trainers.models.gguf import smollm2_path
from gymllm_trainers.models.load import SMOLLM2

PROMPT = 128
BATCHES = (1, 8, 32)
DTYPES: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
KINDS = ("prefill", "decode")
MATRICES = (512, 1024, 2048)
"""Rows of the square matrices whose product's rate is measured; the best counts."""


@dataclass
class Times:
    """Seconds of one batch, round by round: to the first token of each prompt, and to the last."""

    first: list[float] = field(default_factory=list)
    all: list[float] = field(default_factory=list)

    def rates(self, batch: int, new: int) -> tuple[float, float]:
        """Tokens a second of prefill and of decode, where `new` follow the first."""
        return batch * PROMPT / min(self.first), batch * new / (min(self.all) - min(self.first))


@dataclass(kw_only=True)
class Peers:
    """Who else is asked; None where it isn't, or can't be."""

    transformers: PeerSession | None = None
    llama_cpp: PeerSession | None = None


def smollm2_rows(table: Table, venvs: Path, model: str, *, quick: bool, peers: bool) -> None:
    """Rows of the machine's limits, and of prefill and decode at each batch, in float32 and bfloat16."""
    loaded, name = named_model(model, quick=quick)
    gguf = smollm2_path() if model == SMOLLM2 else Path(model)
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        others = Peers()
        if peers:
            params = decoder_params(loaded.decoder())
            save_model(folder / "model", loaded.config, params, loaded.tokenizer)
            others.transformers = _start(table, venvs, "transformers", folder / "model", stack)
        limits = limit_rows(table, others.transformers, quick=quick)
        # It takes long to build, so not when it must be quick; a hub folder is no file of its.
        llama = peers and not quick and gguf.suffix == ".gguf"
        for dtype in DTYPES[:1] if quick else DTYPES:
            with ExitStack() as while_measured:
                if llama:
                    write_floats(gguf, folder / f"{dtype}.gguf", dtype)
                    others.llama_cpp = _start(
                        table, venvs, "llama_cpp", folder / f"{dtype}.gguf", while_measured
                    )
                read, _ = named_model(model, quick=quick, dtype=dtype)
                measuring = _Measuring(table, read, name, dtype, limits, others)
                asyncio.run(measuring.all_batches(quick))
        if llama and (session := _start(table, venvs, "llama_cpp", gguf, stack)):
            _quantized_rows(table, session)


def limit_rows(table: Table, peer: PeerSession | None, *, quick: bool) -> Limits:
    """The machine's own rates; of matrix products, the best that NumPy, XLA and torch get."""
    tries, matrices = (3, MATRICES[1:2]) if quick else (8, MATRICES)
    read = read_rate(tries=tries)
    table.add(f"memory read, {os.cpu_count()} threads", read / 1e9, "GB/s")
    best: dict[str, float] = {}
    for dtype in DTYPES:
        rates = {"XLA": max(matmul_rate(dtype, size, tries) for size in matrices)}
        if dtype == "float32":
            rates["NumPy"] = max(numpy_matmul_rate(size, tries) for size in matrices)
        if peer is not None:
            asked = [peer.ask("matmul", dtype=dtype, size=size) for size in matrices]
            rates["torch"] = max(answer["rate"] for answer in asked)
        for name, rate in rates.items():
            table.add(f"matrix product, {dtype}: {name}", rate / 1e9, "GFLOP/s")
        best[dtype] = max(rates.values())
    return Limits(bytes_a_s=read, operations_a_s=best)


def _start(
    table: Table, venvs: Path, name: str, model: Path, stack: ExitStack
) -> PeerSession | None:
    try:
        return stack.enter_context(PeerSession(venvs, name, model, os.cpu_count()))
    except PeerError as error:
        table.add(name, f"not measured: {error}")
        return None


class _Measuring:
    """One type of weights, ours and theirs by turns."""

    def __init__(
        self,
        table: Table,
        model: LoadedModel,
        name: str,
        dtype: Literal["float32", "bfloat16"],
        limits: Limits,
        peers: Peers,
    ) -> None:
        self._table, self._model, self._name = table, model, name
        self._dtype: Literal["float32", "bfloat16"] = dtype
        self._limits, self._peers = limits, peers
        self._prompts = Prompts(model.config.vocab_size)

    async def all_batches(self, quick: bool) -> None:
        """Rows of each batch; one engine serves them all."""
        new, rounds = (16, 1) if quick else (64, 3)
        decoder = self._model.decoder(compute_dtype=self._dtype)
        config = EngineConfig(slots=32, context_length=256, cache_dtype=self._dtype)
        if quick:
            config = smaller(config)
        async with serving(decoder, config) as engine:
            await generate_all(engine, self._prompts.take(8, PROMPT), new=2)
            self._choose_cache(quick)
            for batch in (8,) if quick else BATCHES:
                ours, theirs, llama = Times(), Times(), Times()
                for _ in range(rounds):
                    await self._round(engine, batch, 1, ours.first, theirs.first)
                    await self._round(engine, batch, 1 + new, ours.all, theirs.all)
                    if self._peers.llama_cpp is not None:
                        _ask_llama(self._peers.llama_cpp, self._prompts, batch, new, llama)
                self._speed_rows(batch, new, ours, theirs, llama)

    def _choose_cache(self, quick: bool) -> None:
        """Which of transformers' caches is faster here; also its warm-up."""
        times: dict[str, float] = {}
        if self._peers.transformers is not None:
            asked = self._prompts.take(8, PROMPT)
            for cache in ("dynamic",) if quick else ("dynamic", "static", "dynamic", "static"):
                answer = self._peers.transformers.ask(
                    "generate", prompts=asked, new=8, dtype=self._dtype, cache=cache
                )
                times[cache] = answer["seconds"]
            self._cache = min(times, key=times.__getitem__)
            if not quick:
                self._table.add(f"transformers' faster cache, {self._dtype}", self._cache)

    async def _round(
        self, engine: JaxEngine, batch: int, new: int, ours: list[float], theirs: list[float]
    ) -> None:
        # Others each time: what was computed once would be found again.
        asked = self._prompts.take(batch, PROMPT)
        ours.append((await generate_all(engine, asked, new=new, temperature=0.0))[0])
        if self._peers.transformers is not None:
            answer = self._peers.transformers.ask(
                "generate", prompts=asked, new=new, dtype=self._dtype, cache=self._cache
            )
            theirs.append(answer["seconds"])

    def _speed_rows(self, batch: int, new: int, ours: Times, theirs: Times, llama: Times) -> None:
        shape, table = self._model.config, self._table
        step = decode_s(
            self._limits, shape, batch=batch, context=PROMPT + new / 2, dtype=self._dtype
        )
        prompts = prefill_s(self._limits, shape, batch=batch, prompt=PROMPT, dtype=self._dtype)
        possible = (batch * PROMPT / prompts, batch / step)
        got = ours.rates(batch, new)
        for index, kind in enumerate(KINDS):
            what = f"{self._name}, {self._dtype}, batch {batch}, {kind}"
            table.add(f"{what}: gymllm", got[index], "tokens/s")
            if theirs.all:
                peer = theirs.rates(batch, new)[index]
                table.add(f"{what}: transformers", peer, "tokens/s")
                goal = ">= 2" if batch > 1 else ""
                table.add(f"{what}: times transformers", got[index] / peer, "x", goal)
            if llama.all:
                table.add(f"{what}: llama.cpp", llama.rates(batch, new)[index], "tokens/s")
            table.add(f"{what}: roofline", possible[index], "tokens/s")
            share = got[index] / possible[index]
            table.add(f"{what}: share of the roofline", share, "", ">= 0.5")


def _ask_llama(peer: PeerSession, prompts: Prompts, batch: int, new: int, times: Times) -> None:
    got = peer.ask("generate", prompts=prompts.take(batch, PROMPT), new=1 + new)
    times.first.append(got["first_s"])
    times.all.append(got["all_s"])


def _quantized_rows(table: Table, peer: PeerSession) -> None:
    """Rows of the file as it is: llama.cpp computes with its 4-bit weights, which we don't."""
    new = 64
    prompts = Prompts(1000)
    for batch in BATCHES:
        times = Times()
        for _ in range(2):
            _ask_llama(peer, prompts, batch, new, times)
        for kind, rate in zip(KINDS, times.rates(batch, new), strict=True):
            what = f"SmolLM2-135M, as the file has it, batch {batch}, {kind}: llama.cpp"
            table.add(what, rate, "tokens/s")
