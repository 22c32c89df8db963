"""Whole runs of algorithms that take more than the default's one pass; and the same run twice."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from gymllm_trainers.cli import train
from gymllm_trainers.config_files import read_yaml
from gymllm_trainers.metrics import read_metrics
from gymllm_trainers.models import load_model

SIZES = (
    "--warm-start.no-enabled --warm-start.vocab-size 300 --env.kwargs.size 2 --engine.slots 8 "
    "--engine.context-length 256 --rollout.group-size 4 --rollout.max-turns 3 --rollout.concurrency 8 "
    "--learner.groups-per-step 2 --algorithm.zero-variance keep --metrics.wandb off"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(folder: Path, name: str, flags: str) -> list[dict[str, float]]:
    same = ["--name", name, "--runs-dir", str(folder)]
    assert train([*SIZES.split(), *same, *flags.split()]) == 0
    return read_metrics(folder / name / "metrics.jsonl")


@pytest.mark.slow
def test_ppo_with_a_reference_is_saved_and_goes_on(tmp_path: Path) -> None:
    flags = "--algorithm.preset ppo --algorithm.kl-coef 0.02 --learner.epochs 2 --steps 2"
    records = run(tmp_path, "ppo", flags)
    for record in records:
        assert record["learner/value_loss"] >= 0
        assert record["learner/update_kl_k3"] > 0, "two steps on one batch"
    assert records[1]["learner/reference_kl_k3"] > 0
    saved = tmp_path / "ppo" / "checkpoints" / "step_00000002" / "arrays"
    assert sorted(path.name for path in saved.iterdir()) == ["optimizer", "trainable", "value"]
    assert "value" not in str(load_model(str(tmp_path / "ppo" / "model")).params.keys()).split("'")
    assert train(["--resume", str(tmp_path / "ppo"), "--steps", "3"]) == 0
    records = read_metrics(tmp_path / "ppo" / "metrics.jsonl")
    assert len(records) == 3
    # The reference is the run's start, not the checkpoint.
    assert records[2]["learner/reference_kl_k3"] > 0.5 * records[1]["learner/reference_kl_k3"]
    assert read_yaml(tmp_path / "ppo" / "config.yaml")["algorithm"]["preset"] == "ppo"  # type: ignore[index] # a mapping


@pytest.mark.slow
def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    flags = "--learner.deterministic --rollout.max-lag 0 --steps 3 --algorithm.preset grpo"
    weights = []
    for name in ("first", "second"):
        run(tmp_path, name, flags)
        params = load_model(str(tmp_path / name / "model")).params
        weights.append([np.asarray(leaf) for leaf in jax.tree.leaves(params)])
    for one, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(one, other)
