"""The engine beside google-tunix's sampler: a Qwen3 of 3.3 million parameters, the same weights in both.

Both sample at temperature 1 from all of the distribution, float32, 64 prompt tokens and 128 generated. One
engine serves every batch; the sampler is as it comes.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from engine_serving import Compilations, Prompts, generate_all, serving, smaller
from peers.session import PeerError, PeerSession
from table import Table

from gymllm_agents import train_tokenizer
from gymllm_trainers.engine import EngineConfig, JaxEngine
from gymllm_trainers.models import DecoderConfig, decoder_params, random_decoder, save_model

PROMPT, NEW, CACHE, LARGE_CACHE = 64, 128, 512, 4096
GOALS = {1: 1.5, 8: 2.0, 32: 4.0, 64: 4.0}
"""How many times its tokens a second, by batch."""
LARGE_CACHE_GOAL = 8.0
SHAPE = DecoderConfig(
    vocab_size=1280,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=LARGE_CACHE,
    rope_theta=10_000.0,
    qk_norm=True,
)


def tunix_rows(table: Table, venvs: Path, *, quick: bool, peers: bool) -> None:
    """Rows of each batch, of a large context allowance and of what is compiled after the start."""
    with tempfile.TemporaryDirectory() as folder:
        decoder = random_decoder(SHAPE, seed=0)
        tokenizer = train_tokenizer(["left right up down"] * 10, vocab_size=300)
        save_model(Path(folder) / "model", SHAPE, decoder_params(decoder), tokenizer)
        table.add("tunix's case: parameters", SHAPE.parameters / 1e6, "million", "3.3")
        peer = _start(table, venvs, Path(folder) / "model") if peers else None
        measuring = _Measuring(table, peer, Prompts(SHAPE.vocab_size), 1 if quick else 5)
        try:
            asyncio.run(measuring.batches(quick))
            if not quick:
                asyncio.run(measuring.large_cache())
        finally:
            if peer is not None:
                peer.__exit__(None, None, None)


def _start(table: Table, venvs: Path, model: Path) -> PeerSession | None:
    try:
        return PeerSession(venvs, "tunix", model, script="tunix_sampler.py")
    except PeerError as error:
        table.add("google-tunix's sampler", f"not measured: {error}")
        return None


class _Measuring:
    """Ours and theirs by turns."""

    def __init__(
        self, table: Table, peer: PeerSession | None, prompts: Prompts, rounds: int
    ) -> None:
        self._table, self._peer, self._prompts, self._rounds = table, peer, prompts, rounds

    async def batches(self, quick: bool) -> None:
        """Every batch with the small cache."""
        decoder = random_decoder(SHAPE, seed=0)
        config = EngineConfig(slots=64, context_length=CACHE)
        if quick:
            config = smaller(config)
        async with serving(decoder, config) as engine:
            await self._same_tokens(engine)
            compilations = Compilations()
            await generate_all(engine, self._prompts.take(8, PROMPT), new=NEW)
            for batch in (8,) if quick else GOALS:
                await self._speed(engine, batch, CACHE, GOALS[batch])
            await self._compiled(engine, compilations, quick)

    async def large_cache(self) -> None:
        """A batch of 8 that may take 4,096 tokens each, and doesn't."""
        decoder = random_decoder(SHAPE, seed=0)
        async with serving(decoder, EngineConfig(slots=8, context_length=LARGE_CACHE)) as engine:
            await generate_all(engine, self._prompts.take(8, PROMPT), new=NEW)
            await self._speed(engine, 8, LARGE_CACHE, LARGE_CACHE_GOAL)

    async def _same_tokens(self, engine: JaxEngine) -> None:
        """Whether both compute the same: random weights have near ties, so the first tokens only."""
        if self._peer is None:
            return
        (prompt,) = self._prompts.take(1, PROMPT)
        _, (ours,) = await generate_all(engine, [prompt], new=16, temperature=0.0)
        theirs = self._peer.ask("generate", prompts=[prompt], new=16, cache=CACHE, temperature=0.0)[
            "ids"
        ]
        same = ours.token_ids.tolist() == theirs[0]
        self._table.add("the same 16 greedy tokens as tunix's", "yes" if same else "no", "", "yes")

    async def _speed(self, engine: JaxEngine, batch: int, cache: int, goal: float) -> None:
        """Tokens a second of both, prompt included, the best of some rounds by turns."""
        ours: list[float] = []
        theirs: list[float] = []
        for number in range(self._rounds + 1):
            prompts = self._prompts.take(batch, PROMPT)
            seconds = (await generate_all(engine, prompts, new=NEW))[0]
            if number:  # the first is where the peer compiles
                ours.append(seconds)
            if self._peer is not None:
                answer = self._peer.ask(
                    "generate", prompts=prompts, new=NEW, cache=cache, temperature=1.0, seed=number
                )
                if number:
                    theirs.append(answer["seconds"])
        what = f"batch {batch}, context allowance {cache}"
        rate = batch * NEW / min(ours)
        self._table.add(f"{what}: gymllm", rate, "tokens/s")
        if theirs:
            peer_rate = batch * NEW / min(theirs)
            self._table.add(f"{what}: google-tunix", peer_rate, "tokens/s")
            self._table.add(f"{what}: ratio", rate / peer_rate, "x", f">= {goal:g}")

    async def _compiled(self, engine: JaxEngine, compilations: Compilations, quick: bool) -> None:
        """What a new temperature, length or batch size compiles, in both."""
        changes = (
            ("a new temperature", 8, NEW, 0.7),
            ("a new length", 8, 100, 1.0),
            ("a new batch size", 5, NEW, 1.0),
        )
        for what, batch, new, temperature in changes[: 1 if quick else None]:
            prompts = self._prompts.take(batch, PROMPT)
            await generate_all(engine, prompts, new=new, temperature=temperature)
            if self._peer is not None:
                theirs = self._peer.ask(
                    "generate", prompts=prompts, new=new, cache=CACHE, temperature=temperature
                )
                self._table.add(f"google-tunix compiles for {what}", theirs["compiled"], "programs")
                self._table.add("... which takes", theirs["compile_s"], "s")
        what = "gymllm compiled after its start, for every batch, length and temperature"
        self._table.add(what, compilations.count, "programs", "0")
