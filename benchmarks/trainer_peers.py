"""Training on the same recorded groups, with the same model: ours, google-tunix's trainer and TRL's.

Each is a process of its own and takes one optimizer step on the same groups in its turn (A B C D A B C
D), or of the large model, whose trainers don't fit into memory together, after the one before has ended; the
best round of each counts, and one on the first group, in which things are compiled, never does. A step is all
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
    together: bool
    """Whether trainers take turns; else one after another."""


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
    together=True,
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
    groups=2,
    rows=1,
    row_tokens=2048,
    peer_rows=2,
    rounds=1,  # of minutes
    together=False,
)


def tokenizer_of(size: Size, model: str) -> Tokenizer:
    """SmolLM2's own for its shape; for the small one, a small one."""
    return load_model(model).tokenizer if size is LARGE else small_tokenizer(size.shape.vocab_size)


def peer_rows(table: Table, venvs: Path, model: str, *, quick: bool, peers: bool) -> None:
    """Rows of each model: trained tokens a second of all, their ratios, padding, memory and peak share."""
    rate = product_rate(table, quick=quick)
    for size in (SMALL,) if quick else (SMALL, LARGE):
        tokenizer = tokenizer_of(size, model)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            decoder = random_decoder(size.shape, seed=0)
            groups = record(tokenizer, groups=1 if quick else size.groups)
            groups = with_logprobs(groups, decoder)
            save_model(folder / "model", size.shape, decoder_params(decoder), tokenizer)
            write_groups(folder / "groups.jsonl", groups)
            write_trace(folder / "trace.json", groups)
            _describe(table, size, groups)
            starts = _starts(venvs, folder, size, peers=peers)
            found: dict[str, dict[str, Any]] = {}
            for names in [list(starts)] if size.together else [[name] for name in starts]:
                turn = {name: starts[name] for name in names}
                found |= _measure(table, size, groups, turn, rounds=1 if quick else size.rounds)
            _report(table, size, groups, found, rate)


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


@dataclass(frozen=True)
class Start:
    """How a trainer's process is started, and what each of its steps is asked with."""

    session: Callable[[], PeerSession]
    arguments: dict[str, object] = field(default_factory=dict[str, object])


def _starts(venvs: Path, folder: Path, size: Size, *, peers: bool) -> dict[str, Start]:
    """Ours, and the peers."""
    model, trace = folder / "model", folder / "trace.json"
    script = Path(__file__).parent / "trainer_ours.py"
    ours = [str(script), str(model), str(folder / "groups.jsonl"), str(size.rows)]
    command = [sys.executable, *ours, str(size.row_tokens)]
    starts = {"gymllm": Start(lambda: PeerSession(venvs, "", command=command))}
    if not peers:
        return starts
    tunix = (model, trace, size.peer_rows, size.row_tokens)
    for name, packed in (("google-tunix", False), ("google-tunix, packed", True)):
        starts[name] = Start(
            lambda: PeerSession(venvs, "tunix", *tunix, script="tunix_grpo.py"), {"packed": packed}
        )
    starts["TRL"] = Start(
        lambda: PeerSession(venvs, "trl", model, trace, size.peer_rows, os.cpu_count())
    )
    return starts


def _describe(table: Table, size: Size, groups: list[Group]) -> None:
    each = lengths(groups)
    table.add(f"{size.name}: parameters", size.shape.parameters / 1e6, "million")
    what = f"{size.name}: tokens of a trajectory: least, mean, most"
    table.add(what, f"{each.min()} {each.mean():.0f} {each.max()}", "tokens")
    table.add(f"{size.name}: of a step's tokens, trained", trained(groups) / each.sum())


def _measure(
    table: Table, size: Size, groups: list[Group], starts: dict[str, Start], *, rounds: int
) -> dict[str, dict[str, Any]]:
    """Each trainer's best round; of those that could be run."""
    answers: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        sessions: dict[str, PeerSession] = {}
        for turn in range(-1, rounds):
            asked = [0] if turn < 0 else list(range(len(groups)))
            for name, start in starts.items():
                try:
                    if turn < 0:
                        sessions[name] = stack.enter_context(start.session())
                        if name != "gymllm":
                            _same_logprobs(table, size, groups[0], name, sessions[name], start)
                    elif name not in answers:
                        continue
                    answer = sessions[name].ask("step", groups=asked, **start.arguments)
                except PeerError as error:
                    table.add(f"{size.name}: {name}", f"not measured: {error}")
                    answers.pop(name, None)
                else:
                    answers.setdefault(name, []).append(answer)
    return {
        name: min(found[1:], key=lambda answer: answer["seconds"])
        for name, found in answers.items()
    }


def _same_logprobs(
    table: Table, size: Size, group: Group, name: str, session: PeerSession, start: Start
) -> None:
    """Whether it computes what we do of the same weights: else it would not do the same work."""
    segment = group.trajectories[0].segments[0]
    first = int(segment.mask.argmax())
    mask, expected = segment.mask[first:] == 1, segment.logprobs[first:]
    answer = session.ask("step", groups=[0], logprobs=True, **start.arguments)
    gap = float(np.abs(np.array(answer["logprobs"], np.float32) - expected)[mask].max())
    table.add(f"{size.name}: largest difference of log-probabilities, {name}", gap, "nats", "0")


def _report(
    table: Table,
    size: Size,
    groups: list[Group],
    found: dict[str, dict[str, Any]],
    rate: float,
) -> None:
    if "gymllm" not in found:
        return
    real, wanted = float(lengths(groups).sum()), trained(groups)
    ours = wanted / found["gymllm"]["seconds"]
    for name, best in found.items():
        what, seconds = f"{size.name}: {name}", best["seconds"]
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
    _peak_rows(table, size, groups, found["gymllm"], rate)


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
