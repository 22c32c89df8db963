"""Supervised data: what of trajectories and chats is imitated, in which order; and a run of it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from gymllm.engines import ScriptedEngine
from gymllm.episode import EpisodeLimits
from gymllm.errors import ConfigError
from gymllm.pool import EnvPool
from gymllm.team import Player
from gymllm.trajectory import Ending, Trajectory
from gymllm.transcripts import read_jsonl, write_jsonl
from gymllm_agents import ConversationConfig, ModelAgent, Tokenizer, train_tokenizer
from gymllm_envs.scripted import scripted_player
from gymllm_trainers.cli import train
from gymllm_trainers.metrics import read_metrics
from gymllm_trainers.supervised import SupervisedConfig, batches, imitation, load_examples
from gymllm_trainers.warm_start import scripted_episodes

LAKE = "gymllm/FrozenLake-v0"
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And one?"},
    {"role": "assistant", "content": "Five."},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["system\n", "user\n", "assistant\n"] * 100, vocab_size=300)


async def play(tokenizer: Tokenizer, episodes: int) -> list[Trajectory]:
    import gymllm

    player = scripted_player(LAKE)
    engine = ScriptedEngine(lambda prompt, rng: player(prompt, rng, 0.7), tokenizer)
    team = {"": Player(make_agent=ModelAgent.factory(tokenizer))}
    async with EnvPool(lambda: gymllm.make(LAKE, size=3), 2) as pool:
        return await scripted_episodes(
            pool, team, engine, episodes=episodes, seed=0, limits=EpisodeLimits()
        )


def load(
    tokenizer: Tokenizer, *files: Path, context_length: int = 512, **settings: float | None
) -> list[list[str]]:
    """What is imitated, as text: every example's generated tokens."""
    config = SupervisedConfig(files=files, **settings)  # type: ignore[arg-type] # built for tests
    found = load_examples(config, tokenizer, ConversationConfig(), context_length=context_length)
    texts: list[list[str]] = []
    for example in found:
        ids = np.concatenate([segment.ids[segment.mask == 1] for segment in example])
        text = tokenizer.decode(ids.tolist(), skip_special=False)
        texts.append([part for part in text.split("<|im_end|>") if part])
    return texts


def write_chats(path: Path, *chats: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


def test_of_a_chat_every_answer_is_imitated_up_to_its_end(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    file = write_chats(tmp_path / "chats.jsonl", CHAT, CHAT[1:3])
    assert load(tokenizer, file) == [["Four.", "Five."], ["Four."]]
    config = SupervisedConfig(files=(file,))
    agent = ConversationConfig(system_prompt="Not part of it.")
    example, _ = load_examples(config, tokenizer, agent, context_length=512)
    (segment,) = example
    text = tokenizer.decode(segment.ids.tolist(), skip_special=False)
    assert "Be brief." in text
    assert "Not part" not in text
    (sequence,) = imitation(example)
    np.testing.assert_array_equal(sequence.mask, segment.mask)
    assert (sequence.advantage == 1).all()


@pytest.mark.asyncio
async def test_trajectories_give_their_own_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    played = await play(tokenizer, 6)
    played[1] = replace(played[1], ending=Ending.FAILED, reason="broke")
    folder = tmp_path / "trajectories"
    folder.mkdir()
    write_jsonl(folder / "step_1.jsonl", played[:3])
    write_jsonl(folder / "step_2.jsonl", played[3:])
    with (folder / "step_2.jsonl").open("a") as file:
        file.write('{"task": {"ind')  # torn by a crash
    config = SupervisedConfig(files=(folder,))
    found = load_examples(config, tokenizer, ConversationConfig(), context_length=1024)
    kept = [one for number, one in enumerate(played) if number != 1]
    assert len(found) == len(kept)
    for example, one in zip(found, kept, strict=True):
        for mine, theirs in zip(example, one.segments, strict=True):
            np.testing.assert_array_equal(mine.ids, theirs.ids)
            np.testing.assert_array_equal(mine.mask, theirs.mask)
    solved = load_examples(
        replace(config, min_reward=0.5), tokenizer, ConversationConfig(), context_length=1024
    )
    assert len(solved) == sum(one.reward >= 0.5 for one in kept)


def test_what_is_too_long_is_left_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    long = [*CHAT[:2], {"role": "assistant", "content": "four " * 60}]
    file = write_chats(tmp_path / "chats.jsonl", long, CHAT)
    assert load(tokenizer, file, context_length=120) == [["Four.", "Five."]]
    with pytest.raises(ConfigError, match=r"nothing to imitate: of 2 lines .* 2 are longer than"):
        load(tokenizer, file, context_length=20)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1, 2", "line 1 is no JSON"),
        ('{"text": "x"}', 'neither a trajectory .with "segments". nor a chat'),
        ('{"messages": [{"role": "bot", "content": "x"}]}', "needs a role of system, user"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "must follow a user's"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "system messages must come first"),
        (
            '{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"name": "a"}]}]}',
            "has tool_calls: write them into its content",
        ),
    ],
)
def test_a_line_that_is_neither_says_where(
    tokenizer: Tokenizer, tmp_path: Path, line: str, said: str
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ConfigError, match=said) as raised:
        load(tokenizer, file)
    assert "bad.jsonl, line 1" in str(raised.value)


def test_files_that_are_not_there(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"supervised\.files: .*absent\.jsonl does not exist"):
        load(tokenizer, tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match=r"there is no \.jsonl file in"):
        load(tokenizer, tmp_path)
    with pytest.raises(ConfigError, match=r"preset sft needs data: set supervised\.files"):
        load(tokenizer)


@pytest.mark.parametrize("files", [[], ["--supervised.files", "absent.jsonl"]])
def test_missing_files_are_refused_before_a_model_is_made(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    files: list[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runs = ["--runs-dir", str(tmp_path / "runs"), "--name", "imitated"]
    assert train([*runs, "--algorithm.preset", "sft", "--metrics.wandb", "off", *files]) == 2
    said = capsys.readouterr().err
    assert "supervised.files" in said
    assert not list((tmp_path / "cache").rglob("config.json"))
    assert not (tmp_path / "runs" / "imitated").exists()


@pytest.mark.asyncio
async def test_tokens_of_another_model_are_refused(tmp_path: Path) -> None:
    large = train_tokenizer(["row column tile lake " * 9] * 50, vocab_size=300)
    played = await play(large, 1)
    write_jsonl(tmp_path / "other.jsonl", played)
    small = train_tokenizer([], vocab_size=259)
    with pytest.raises(ConfigError, match=r"has token \d+, but the model's tokenizer has 259"):
        load(small, tmp_path / "other.jsonl", context_length=2048)


def test_all_examples_come_before_any_comes_again() -> None:
    stream = batches(10, 4, seed=3, first=0)
    steps = list(islice(stream, 10))
    flat = [number for step in steps for number in step]
    assert all(len(step) == 4 for step in steps)
    for start in range(0, 40, 10):
        assert sorted(flat[start : start + 10]) == list(range(10))
    assert flat[:10] != flat[10:20]
    assert list(islice(batches(10, 4, seed=3, first=6), 4)) == steps[6:], "as a resume goes on"
    assert next(batches(10, 4, seed=4, first=0)) != steps[0]
    assert len(next(batches(3, 8, seed=0, first=0))) == 8


@pytest.mark.slow
def test_a_run_imitates_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """gymllm-train on the trajectories of a run before it: the loss falls, and a model is written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    same = "--warm-start.no-enabled --warm-start.vocab-size 300 --env.kwargs.size 2"
    same += f" --engine.context-length 256 --metrics.wandb off --runs-dir {tmp_path}"
    first = "--name played --steps 1 --rollout.group-size 2 --learner.groups-per-step 2"
    first += " --algorithm.zero-variance keep --engine.slots 4 --rollout.max-turns 3"
    assert train([*same.split(), *first.split()]) == 0
    folder = tmp_path / "played" / "trajectories"
    assert sum(1 for file in folder.glob("*.jsonl") for _ in read_jsonl(file)) >= 4
    second = "--name imitated --algorithm.preset sft --steps 8 --supervised.examples-per-step 4"
    second += f" --supervised.files {folder} --optimizer.learning-rate 1e-2 --checkpoint.every 3"
    second += " --checkpoint.keep-best 1 --checkpoint.best-metric=-learner/los"
    assert train([*same.split(), *second.split()]) == 0
    assert "Unknown metric 'learner/los'. Did you mean learner/loss" in capsys.readouterr().err
    losses = [
        record["learner/loss"] for record in read_metrics(tmp_path / "imitated/metrics.jsonl")
    ]
    assert len(losses) == 8
    assert losses[-1] < 0.9 * losses[0]
    assert (tmp_path / "imitated" / "model" / "config.json").is_file()
    again = ["--resume", str(tmp_path / "imitated"), "--steps", "9"]
    again.append("--checkpoint.best-metric=-learner/loss")
    assert train(again) == 0
    assert "Unknown metric" not in capsys.readouterr().err
    assert len(read_metrics(tmp_path / "imitated/metrics.jsonl")) == 9
