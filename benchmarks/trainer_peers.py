"""Training on the same recorded groups, with the same model: ours, google-tunix's trainer and TRL's.

Each is a process of its own and takes one optimizer step on the same groups in its turn (A B C D A B C
D); the best round of each counts, and the first, in which things are compiled, never does. A step is all
that lies between finished episodes and new parameters: laying them out, the gradient, clipping and AdamW.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from machine_limits import Limits, matmul_rate, numpy_matmul_rate, training_s
from peers.session import PeerError, PeerSession
from table import Table
from trainer_trace import (
    lengths,
    record,
    small_tokenizer,
    trained,
    with_logprobs,
    write_groups,
    write_trace,
)

from gymllm.trajectory import Group
from gymllm_agents import Tokenizer
from gymllm_trainers.models import (
    DecoderConfig,
    decoder_params,
    load_model,
    random_decoder,
    save_model,
)

MATRICES = (512, 1024, 2048)
GOALS = {"google-tunix": 3.0, "google-tunix, packed": 2.0, "TRL": 2.0}
"""How many times its trained tokens a second."""
PEAK_GOAL = 0.5
ROPE_THETA = 1_000_000.0
"""The one base that google-tunix 0.1.7's Qwen3 computes with, whatever its settings say."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and how much it is trained on at once."""

    name: str
    shape: DecoderConfig
    groups: int
    """Of a step."""
    rows: int
    """Of our micro-batch."""
    row_tokens: int
    """Of our row; also google-tunix's max_seq_token_per_tpu."""
    peer_rows: int
    """Padded sequences that peers compute at once: as many as memory allows."""
    rounds: int
    """That count."""


SMALL = Size(
    name="3.3 M",
    shape=DecoderConfig(
        vocab_size=1280,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        rope_theta=ROPE_THETA,
        qk_norm=True,
    ),
    groups=4,
    rows=2,
    row_tokens=2048,
    peer_rows=8,
    rounds=3,
)
LARGE = Size(
    name="135 M",
    # SmolLM2-135M's sizes. Of Qwen3's family, because google-tunix packs for that one alone.
    shape=DecoderConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rope_theta=ROPE_THETA,
        qk_norm=True,
    ),
    groups=1,
    rows=1,
    row_tokens=2048,
    peer_rows=2,
    rounds=2,  # of minutes each
)


def tokenizer_of(size: Size, model: str) -> Tokenizer:
    """SmolLM2's own for its shape; for the small one, a small one."""
    return load_model(model).tokenizer if size is LARGE else small_tokenizer(size.shape.vocab_size)


def peer_rows(table: Table, venvs: Path, model: str, *, quick: bool, peers: bool) -> None:
    """Rows of each model: trained tokens a second of all, their ratios, padding, memory and peak share."""
    rate = product_rate(table, quick=quick)
    for size in (SMALL,) if quick else (SMALL, LARGE):
        tokenizer = tokenizer_of(size, model)
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            folder = Path(name)
            decoder = random_decoder(size.shape, seed=0)
            groups = record(tokenizer, groups=1 if quick else size.groups)
            groups = with_logprobs(groups, decoder)
            save_model(folder / "model", size.shape, decoder_params(decoder), tokenizer)
            write_groups(folder / "groups.jsonl", groups)
            write_trace(folder / "trace.json", groups)
            _describe(table, size, groups)
            runners = _start(table, venvs, folder, size, peers, stack)
            if peers:
                _same_logprobs(table, size, groups, runners)
            _measure(table, size, groups, runners, rate, rounds=1 if quick else size.rounds)


def product_rate(table: Table, *, quick: bool) -> float:
    """Operations a second of a matrix product in float32: the best of XLA's and NumPy's."""
    tries = 3 if quick else 8
    rates = {
        "XLA": max(matmul_rate("float32", size, tries) for size in MATRICES),
        "NumPy": max(numpy_matmul_rate(size, tries) for size in MATRICES),
    }
    for name, rate in rates.items():
        table.add(f"matrix product, float32: {name}", rate / 1e9, "GFLOP/s")
    return max(rates.values())


@dataclass
class Runner:
    """One trainer in its process."""

    session: PeerSession
    arguments: dict[str, object] = field(default_factory=dict[str, object])
    answers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def ask(self, **more: object) -> dict[str, Any]:
        """A step's figures."""
        return self.session.ask("step", **self.arguments, **more)

    @property
    def best(self) -> dict[str, Any]:
        """The round that took least, without the first."""
        return min(self.answers[1:], key=lambda answer: answer["seconds"])


def _start(
    table: Table, venvs: Path, folder: Path, size: Size, peers: bool, stack: ExitStack
) -> dict[str, Runner]:
    """Ours, and the peers that can be had."""
    model, trace = folder / "model", folder / "trace.json"
    script = Path(__file__).parent / "trainer_ours.py"
    ours = [str(script), str(model), str(folder / "groups.jsonl"), str(size.rows)]
    command = [sys.executable, *ours, str(size.row_tokens)]
    runners = {"gymllm": Runner(stack.enter_context(PeerSession(venvs, "", command=command)))}
    if not peers:
        return runners
    starts: list[tuple[str, Callable[[], PeerSession], dict[str, object]]] = [
        *(
            (
                name,
                lambda: PeerSession(
                    venvs,
                    "tunix",
                    model,
                    trace,
                    size.peer_rows,
                    size.row_tokens,
                    script="tunix_grpo.py",
                ),
                {"packed": packed},
            )
            for name, packed in (("google-tunix", False), ("google-tunix, packed", True))
        ),
        (
            "TRL",
            lambda: PeerSession(venvs, "trl", model, trace, size.peer_rows, os.cpu_count()),
            {},
        ),
    ]
    for name, start, arguments in starts:
        try:
            runners[name] = Runner(stack.enter_context(start()), arguments)
        except PeerError as error:
            table.add(f"{size.name}: {name}", f"not measured: {error}")
    return runners


def _describe(table: Table, size: Size, groups: list[Group]) -> None:
    each = lengths(groups)
    table.add(f"{size.name}: parameters", size.shape.parameters / 1e6, "million")
    what = f"{size.name}: tokens of a trajectory: least, mean, most"
    table.add(what, f"{each.min()} {each.mean():.0f} {each.max()}", "tokens")
    table.add(f"{size.name}: of a step's tokens, trained", trained(groups) / each.sum())


def _same_logprobs(
    table: Table, size: Size, groups: list[Group], runners: dict[str, Runner]
) -> None:
    """Whether all compute the same of the same weights: else they would not do the same work."""
    segment = groups[0].trajectories[0].segments[0]
    start = int(segment.mask.argmax())
    mask, expected = segment.mask[start:] == 1, segment.logprobs[start:]
    for name, runner in list(runners.items())[1:]:
        try:
            theirs = np.array(runner.ask(groups=[0], logprobs=True)["logprobs"], np.float32)
        except PeerError as error:
            table.add(f"{size.name}: {name}", f"not measured: {error}")
            del runners[name]
            continue
        gap = float(np.abs(theirs - expected)[mask].max())
        table.add(f"{size.name}: largest difference of log-probabilities, {name}", gap, "nats", "0")


def _measure(
    table: Table,
    size: Size,
    groups: list[Group],
    runners: dict[str, Runner],
    rate: float,
    rounds: int,
) -> None:
    asked = list(range(len(groups)))
    for _ in range(rounds + 1):
        for name, runner in list(runners.items()):
            try:
                runner.answers.append(runner.ask(groups=asked))
            except PeerError as error:
                table.add(f"{size.name}: {name}", f"not measured: {error}")
                del runners[name]
    real = float(lengths(groups).sum())
    wanted = trained(groups)
    if "gymllm" not in runners:
        return
    ours = wanted / runners["gymllm"].best["seconds"]
    for name, runner in runners.items():
        best, what = runner.best, f"{size.name}: {name}"
        seconds = best["seconds"]
        table.add(f"{what}: trained tokens", best["trained"] / seconds, "tokens/s")
        # Ours may compute a shared token once, google-tunix's packing leaves some out.
        tokens = best.get("tokens", real)
        table.add(f"{what}: real tokens", tokens / seconds, "tokens/s")
        table.add(f"{what}: computed tokens that are padding", 1 - tokens / best["computed"])
        if best["trained"] < wanted:
            lost = 1 - best["trained"] / wanted
            table.add(f"{what}: trained tokens that it leaves out", lost, "", "0")
        table.add(f"{what}: memory at its peak", best["peak_bytes"] / 2**30, "GiB")
        if name in GOALS:
            ratio = ours / (best["trained"] / seconds)
            table.add(f"{size.name}: gymllm to {name}", ratio, "x", f">= {GOALS[name]:g}")
    _peak_rows(table, size, groups, runners["gymllm"].best, rate)


def _peak_rows(
    table: Table, size: Size, groups: list[Group], answer: dict[str, Any], rate: float
) -> None:
    """Operations that the step needs, to those that the machine's matrix products do in its time."""
    limits = Limits(bytes_a_s=math.inf, operations_a_s={"float32": rate})
    each = lengths(groups)
    row = float((each**2).sum() / each.sum())  # what attention sees on average: half of this
    wanted = float(trained(groups))
    goal = f">= {PEAK_GOAL:g}" if size is LARGE else ""
    for what, tokens in (("as computed", answer["tokens"]), ("as if unshared", float(each.sum()))):
        least = training_s(
            limits, size.shape, tokens=tokens, row=row, dtype="float32", trained=wanted
        )
        share = least / answer["seconds"]
        table.add(f"{size.name}: share of the matrix product's rate, {what}", share, "", goal)
