"""`--plan` says what a run would take, and starts nothing."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from gymllm.errors import ConfigError
from gymllm_trainers.cli import train
from gymllm_trainers.config import load_config
from gymllm_trainers.plan import SHAPES, plan

ADMITTED = 4 * 8 * (1 + 2)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as the models' own pages have them
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400),
        ("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824),
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
    ],
)
def test_shapes_have_the_parameters_that_are_published(name: str, parameters: int) -> None:
    assert SHAPES[name].parameters == parameters


def test_the_default_run_is_planned_without_warnings() -> None:
    found = plan(load_config([]))
    assert found.warnings == ()
    said = {(part, what): much for part, what, much in found.rows}
    assert said["episodes", "a step"] == "32: 4 groups of 8"
    assert said["episodes", "at once"] == f"32 of {ADMITTED} admitted"
    assert said["tokens", "an episode"] == "at most 384"


def test_memory_is_what_has_to_be_held() -> None:
    config = load_config(["--model.name", "Qwen/Qwen3-0.6B", "--model.dtype", "bfloat16"])
    found = plan(config)
    assert found.device_bytes is not None
    parameters = 596_049_920
    a_page = 16 * 2 * 28 * 8 * 128 * 4
    cache = (2048 << 20) // a_page * a_page  # less than 32 slots of 384 tokens
    logits = 512 * 151_936 * 4
    assert found.device_bytes == parameters * (2 + 8 + 4) + cache + logits
    lora = ["--model.lora-rank", "8", "--model.lora-linears", "q_proj", "down_proj"]
    found = plan(
        load_config(["--model.name", "Qwen/Qwen3-0.6B", "--model.dtype", "bfloat16", *lora])
    )
    adapters = 28 * 8 * ((1024 + 2048) + (3072 + 1024))
    assert found.device_bytes == parameters * 2 + adapters * (4 + 8 + 4) + cache + logits


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--rollout.concurrency", "500"], "admits 96 episodes"),
        (["--rollout.concurrency", "4"], "less than a group of 8"),
        (["--engine.slots", "8"], "engine.slots 8 is less than the 32"),
        (["--engine.context-length", "4096"], "more than the 2048 positions"),
        (["--agent.max-new-tokens", "400"], "leaves no room for a prompt"),
    ],
)
def test_what_would_go_wrong_is_said(flags: list[str], says: str) -> None:
    assert any(says in warning for warning in plan(load_config(flags)).warnings)


def test_the_command_prints_it_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--plan", "--runs-dir", str(tmp_path / "runs"), "--model.name", "nobody/knows"]
    assert train(flags) == 0
    said = capsys.readouterr().out
    assert "not known here" in said
    assert not (tmp_path / "runs").exists()


def test_tasks_are_counted_and_a_missing_file_is_an_error(tmp_path: Path) -> None:
    counted = load_config(["--env.id", "gymllm/Arithmetic-v0", "--env.tasks", "3"])
    assert plan(counted).rows[1] == ("environment", "tasks", "3, by seed")
    missing = ["--env.kwargs.tasks", str(tmp_path / "none.jsonl")]
    config = load_config(["--env.id", "gymllm/SWE-v0", *missing])
    with pytest.raises(ConfigError, match="can't be read"):
        plan(config)


def test_tasks_that_are_made_at_first_use_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    async def make() -> list[str]:
        return ["a", "b"]

    # As gymllm/SWE-v0 does where its default tasks aren't there yet.
    monkeypatch.setattr("gymllm_envs.swe.env.SWE.task_ids", lambda self: anyio.run(make))
    assert plan(load_config(["--env.id", "gymllm/SWE-v0"])).rows[1][2] == "2"
