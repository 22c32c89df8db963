"""What the learner's packing, shared prefixes and streaming are worth, on recorded groups.

Padding and streaming use a model of a moment's computing: both are properties of what is laid out, not of who
computes it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from machine_limits import Limits, training_s
from table import Table
from trainer_ours import new_learner
from trainer_peers import LARGE, SMALL, Size, tokenizer_of
from trainer_trace import GROUP, lengths, record, trained, with_logprobs

from gymllm.ledger import NO_VERSION, Segment
from gymllm.task import Task
from gymllm.trajectory import Ending, Group, Trajectory
from gymllm_trainers.learner import Learner
from gymllm_trainers.models import Decoder, DecoderConfig, random_decoder

TINY = DecoderConfig(
    vocab_size=1280,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=4096,
    qk_norm=True,
)
STEPS, LEARNING_RATE = 5, 1e-3
"""Of streaming and meshes: a rate at which differences show."""
ROW_TOKENS = (1536, 2048, 4096)
"""The first is about as long as the longest episode."""
PADDING_GOAL, SHARING_GOAL = 0.05, 3.0


def tiny_policy() -> Decoder:
    """The model of a moment's computing; its weights are always the same."""
    return random_decoder(TINY, seed=0)


def recorded(groups: int, decoder: Decoder, size: Size = SMALL, model: str = "") -> list[Group]:
    """So many groups, with the decoder's log-probabilities."""
    return with_logprobs(record(tokenizer_of(size, model), groups=groups), decoder)


# ---------------------------------------------------------------------- padding


def padding_rows(table: Table, *, quick: bool) -> None:
    """Rows of how much is padding: each sequence padded to the longest, and as the learner packs them."""
    groups = recorded(8 if quick else 32, tiny_policy())
    each = lengths(groups).reshape(-1, GROUP)
    for what, computed in (
        ("each padded to the longest of all", each.size * each.max()),
        ("each padded to the longest of its group", (each.max(1) * GROUP).sum()),
    ):
        table.add(f"padding, {what}", 1 - float(each.sum() / computed))
    ways: list[dict[str, Any]] = [
        {"row_tokens": row_tokens, "share_prefixes": share}
        for share in (False, True)
        for row_tokens in (ROW_TOKENS[1:2] if quick else ROW_TOKENS)
    ]
    ways += [{"row_tokens": 2048, "smaller_shapes": shapes} for shapes in (0, 1, 2)]
    for settings in ways:
        shown = ", ".join(f"{name} {value}" for name, value in settings.items())
        value = _padding(new_learner(tiny_policy(), rows=2, **settings), groups)
        table.add(f"padding, 4 groups a step, {shown}", value, "", f"< {PADDING_GOAL:g}")


def _padding(learner: Learner, groups: list[Group]) -> float:
    """Share of all tokens that are computed."""
    tokens = computed = 0.0
    for start in range(0, len(groups), 4):
        for group in groups[start : start + 4]:
            learner.add_group(group)
        metrics = learner.step()
        tokens += metrics["train_tokens"]
        computed += metrics["train_tokens"] / (1 - metrics["padding_share"])
    return 1 - tokens / computed


# ---------------------------------------------------------------------- prefixes


@dataclass(frozen=True, kw_only=True)
class Case:
    """Groups whose prefixes are shared, or not."""

    name: str
    groups: list[Group]
    goal: str = ""


def prefix_rows(table: Table, *, quick: bool) -> None:
    """Rows of tokens, operations, time and memory with and without sharing, on one group in one row."""
    for size in (SMALL,) if quick else (SMALL, LARGE):
        decoder = random_decoder(size.shape, seed=0)
        cases = [
            Case(
                name="G = 8, 150 prompt and 40 answer tokens",
                groups=[answers(150, 40, size.shape.vocab_size)],
                goal=f"> {SHARING_GOAL:g}",
            ),
        ]
        if size is SMALL:  # five thousand tokens of the large one in one row take all memory
            cases.append(Case(name="a recorded group", groups=recorded(1, decoder)))
        for case in cases:
            shared = _Sharing(size, case.groups, share=True)
            apart = _Sharing(size, case.groups, share=False)
            for number in range(2 if quick else 4):
                for one in (apart, shared):
                    one.step(counts=number > 0)
            what = f"{size.name}, {case.name}"
            for name, value in apart.figures().items():
                other = shared.figures()[name]
                table.add(f"{what}: {name}, apart", value)
                table.add(f"{what}: {name}, shared", other)
                goal = case.goal if name != "memory of a gradient, GiB" else ""
                table.add(f"{what}: {name}, times fewer", value / other, "x", goal)


def answers(prompt: int, answer: int, vocabulary: int) -> Group:
    """A group of one prompt and random answers."""
    rng = np.random.default_rng(0)
    task = Task(index=0, id="answers", seed=0)
    beginning = rng.integers(1, vocabulary, size=prompt)
    mask = np.repeat([0, 1], [prompt, answer]).astype(np.int32)
    return Group(
        task=task,
        trajectories=tuple(
            Trajectory(
                task=task,
                member=member,
                attempt=0,
                segments=(
                    Segment(
                        ids=np.concatenate(
                            [beginning, rng.integers(1, vocabulary, size=answer)]
                        ).astype(np.int32),
                        mask=mask,
                        logprobs=np.where(mask, -np.log(vocabulary), 0).astype(np.float32),
                        versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
                    ),
                ),
                turns=(),
                messages=(),
                ending=Ending.TERMINATED,
                reward=float(member % 2),
            )
            for member in range(GROUP)
        ),
    )


class _Sharing:
    """A learner whose one row is as long as the groups need."""

    def __init__(self, size: Size, groups: list[Group], *, share: bool) -> None:
        self.size, self.groups = size, groups
        tokens = _tree_tokens(groups) if share else int(lengths(groups).sum())
        self.learner = new_learner(
            random_decoder(size.shape, seed=0),
            rows=1,
            row_tokens=-(-tokens // 64) * 64,
            share_prefixes=share,
            smaller_shapes=0,
        )
        self.learner.compile()
        self.seconds: list[float] = []
        self.metrics: dict[str, float] = {}

    def step(self, *, counts: bool) -> None:
        """One step."""
        started = time.perf_counter()
        for group in self.groups:
            self.learner.add_group(group)
        self.metrics = self.learner.step()
        jax.block_until_ready(self.learner.state.trainable)
        if counts:
            self.seconds.append(time.perf_counter() - started)

    def figures(self) -> dict[str, float]:
        """What a step took, by name."""
        each = lengths(self.groups)
        operations = training_s(
            Limits(bytes_a_s=1.0, operations_a_s={"float32": 1.0}),
            self.size.shape,
            tokens=self.metrics["train_tokens"],
            row=float((each**2).sum() / each.sum()),
            dtype="float32",
            trained=float(trained(self.groups)),
        )
        found = {
            "tokens": self.metrics["train_tokens"],
            "operations of a gradient, 1e9": operations / 1e9,
            "seconds": min(self.seconds),
        }
        predicted = self.learner.predicted_bytes
        if predicted:
            found["memory of a gradient, GiB"] = max(predicted.values()) / 2**30
        return found


def _tree_tokens(groups: list[Group]) -> int:
    """Different beginnings of any length: the tokens that remain when each is computed once."""
    total = 0
    for group in groups:
        found: set[bytes] = set()
        for trajectory in group.trajectories:
            for segment in trajectory.segments:
                found.update(segment.ids[: end + 1].tobytes() for end in range(len(segment)))
        total += len(found)
    return total


# ---------------------------------------------------------------------- streaming


def streaming_rows(table: Table, *, quick: bool) -> None:
    """Rows of the largest difference of a parameter after some steps, of each way to lay the batch out."""
    groups = recorded(4, tiny_policy())
    ways: dict[str, dict[str, Any]] = {
        "streamed, group by group": {},
        "streamed, the last group first": {"order": -1},
        "one row at a time": {"rows": 1},
        "rows of twice as many tokens": {"row_tokens": 4096},
        "rows that hold one episode": {"row_tokens": 1152, "rows": 4},
        "prefixes not shared": {"share_prefixes": False},
    }
    start = parameters(new_learner(tiny_policy(), rows=2, row_tokens=2048))
    expected = taken(groups, at_once=True)
    moved = max(float(np.abs(b - a).max()) for a, b in zip(start, expected, strict=True))
    table.add(f"largest change of a parameter in {STEPS} steps, one batch", moved)
    for name, settings in list(ways.items())[:: 2 if quick else 1]:
        order = settings.pop("order", 1)
        found = taken(groups[::order], **settings)
        difference = largest_difference(expected, found)
        table.add(f"largest difference of a parameter from that: {name}", difference, "", "<= 1e-6")


def taken(
    groups: list[Group],
    *,
    at_once: bool = False,
    rows: int = 2,
    row_tokens: int = 2048,
    **more: Any,
) -> list[np.ndarray]:
    """The parameters after some steps on the groups, each step on all of them."""
    learner = new_learner(
        tiny_policy(), rows=rows, row_tokens=row_tokens, learning_rate=LEARNING_RATE, **more
    )
    for _ in range(STEPS):
        for group in groups:
            if at_once:
                learner.collect(group)
            else:
                learner.add_group(group)
        learner.step()
    return parameters(learner)


def parameters(learner: Learner) -> list[np.ndarray]:
    """Every trained parameter, on the host."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(learner.state.trainable)]


def largest_difference(left: list[np.ndarray], right: list[np.ndarray]) -> float:
    """Of any parameter."""
    return max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True))
