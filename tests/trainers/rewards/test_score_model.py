"""Reward models of the hub: scores as transformers computes them, however they are packed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import anyio
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from gymllm.errors import ConfigError, ModelError
from gymllm.message import Message
from gymllm.task import Task
from gymllm.trajectory import Ending, Trajectory
from gymllm_trainers.rewards import RewardConfig, ScoreModel, load_score_model, open_reward

FIXTURES = Path(__file__).parent.parent / "fixtures"
QWEN3 = FIXTURES / "tiny_qwen3_reward"


@dataclasses.dataclass(frozen=True)
class Golden:
    """What transformers made of some conversations."""

    trajectories: list[Trajectory]
    ids: list[list[int]]
    scores: npt.NDArray[np.float32]


def golden(folder: Path) -> Golden:
    held = json.loads((folder / "scores.json").read_text())
    trajectories = [
        Trajectory(
            task=Task(index=index, id="t", seed=0),
            member=0,
            attempt=0,
            segments=(),
            turns=(),
            messages=tuple(Message(role=role, content=content) for role, content in conversation),
            ending=Ending.TERMINATED,
        )
        for index, conversation in enumerate(held["conversations"])
    ]
    return Golden(trajectories, held["ids"], np.array(held["scores"], np.float32))


@pytest.fixture(scope="module")
def model() -> ScoreModel:
    return load_score_model(QWEN3, rows=2, row_tokens=128)


@pytest.mark.parametrize("name", ["tiny_qwen3_reward", "tiny_llama_reward"])
def test_scores_are_those_of_transformers(name: str) -> None:
    expected = golden(FIXTURES / name)
    scores = load_score_model(FIXTURES / name, rows=1, row_tokens=128).score_ids(expected.ids)
    np.testing.assert_allclose(scores, expected.scores, rtol=1e-5, atol=1e-5)


@pytest.mark.asyncio
async def test_a_trajectory_is_read_by_the_models_own_template() -> None:
    expected = golden(QWEN3)
    config = RewardConfig(kind="model", model=str(QWEN3), row_tokens=128, rows=1)
    async with open_reward(config) as model:
        assert model is not None
        score = await model.score(expected.trajectories[1])
    np.testing.assert_allclose(score, expected.scores[1], rtol=1e-5, atol=1e-5)


def test_where_a_sequence_lies_changes_nothing(model: ScoreModel) -> None:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(1, 320, size=size).tolist() for size in (70, 5, 128, 1, 60, 33, 90)]
    alone = [model.score_ids([sequence])[0] for sequence in sequences]
    np.testing.assert_allclose(model.score_ids(sequences), alone, rtol=1e-5, atol=1e-5)


def test_padding_at_the_end_is_not_the_last_token(model: ScoreModel) -> None:
    ids = golden(QWEN3).ids[0]
    np.testing.assert_allclose(model.score_ids([[*ids, 0, 0]]), model.score_ids([ids]), rtol=1e-5)


@pytest.mark.asyncio
async def test_those_that_wait_are_computed_together(
    model: ScoreModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = golden(QWEN3)
    batches: list[int] = []
    computes = model.score_ids

    def counted(sequences: list[list[int]]) -> npt.NDArray[np.float32]:
        batches.append(len(sequences))
        return computes(sequences)

    monkeypatch.setattr(model, "score_ids", counted)
    scores: dict[int, float] = {}

    async def one(index: int) -> None:
        scores[index] = await model.score(expected.trajectories[index % 3])

    async with anyio.create_task_group() as tasks:
        for index in range(9):
            tasks.start_soon(one, index)
    assert sum(batches) == 9
    assert len(batches) <= 2
    for index, score in scores.items():
        assert score == pytest.approx(expected.scores[index % 3], rel=1e-4)


@pytest.mark.asyncio
async def test_one_that_gives_up_leaves_the_others_their_scores(model: ScoreModel) -> None:
    expected = golden(QWEN3)
    scores: list[float] = []
    scope = anyio.CancelScope()

    async def given_up() -> None:
        with scope:
            await model.score(expected.trajectories[0])

    async def one() -> None:
        scores.append(await model.score(expected.trajectories[1]))

    async with anyio.create_task_group() as tasks:
        for call in (given_up, one, one):
            tasks.start_soon(call)
        await anyio.lowlevel.checkpoint()
        scope.cancel()
    assert scores == pytest.approx([expected.scores[1]] * 2, rel=1e-4)


@pytest.mark.asyncio
async def test_a_conversation_longer_than_a_row_is_no_score(model: ScoreModel) -> None:
    (first, *_) = golden(QWEN3).trajectories
    message = Message(role="user", content="left " * 200)
    with pytest.raises(ModelError, match=r"can't be scored in rows of 128: set reward.row_tokens"):
        await model.score(dataclasses.replace(first, messages=(message,)))
    with pytest.raises(ModelError, match="0 tokens"):
        model.score_ids([[]])


# ---------------------------------------------------------------------- what is refused

Change = Callable[[Path], None]


def two_labels(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"] = np.repeat(tensors["score.weight"], 2, axis=0)
    save_file(tensors, folder / "model.safetensors")


def no_head(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors")


def not_a_number(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"][0, 3] = np.nan
    save_file(tensors, folder / "model.safetensors")


def writes_text(folder: Path) -> None:
    file = folder / "config.json"
    settings = json.loads(file.read_text()) | {"architectures": ["Qwen3ForCausalLM"]}
    file.write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (two_labels, r"expected 'score.weight' of shape \[1, 32\], got one of shape \[2, 32\]"),
        (no_head, r"of shape \[1, 32\], got none"),
        (not_a_number, "NaN or infinite"),
        (writes_text, "Qwen3ForSequenceClassification.* set reward.kind to judge"),
    ],
)
def test_a_model_that_gives_no_score_is_refused(
    change: Change, message: str, tmp_path: Path
) -> None:
    shutil.copytree(QWEN3, tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(ModelError, match=message):
        load_score_model(tmp_path / "model", row_tokens=128)


def test_rows_longer_than_the_model_was_made_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="was made for at most 128 tokens"):
        load_score_model(QWEN3, row_tokens=129)
