"""gymllm-export: what a run trained, in the hub's format, from a run's folder or a copied checkpoint."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymllm_trainers import cli
from gymllm_trainers.algorithms.config import AlgorithmConfig
from gymllm_trainers.checkpoint import Checkpointer
from gymllm_trainers.checkpoint_files import checkpoint_files
from gymllm_trainers.config import CheckpointSettings, ModelSettings, TrainConfig, config_yaml
from gymllm_trainers.learner import Learner, LearnerConfig
from gymllm_trainers.models import Decoder, load_adapters, load_model
from gymllm_trainers.optimizer import OptimizerConfig
from gymllm_trainers.optimizer_state import mean_parameters
from gymllm_trainers.packing import TrainingSequence
from gymllm_trainers.starting_model import policy_decoder

START = Path(__file__).parent / "fixtures" / "tiny_qwen3"
REWARDS = {1: 0.5, 2: 0.9, 3: 0.2}


class Run:
    """A run's folder as `gymllm-train` leaves it, and the policies that it should be exported as."""

    def __init__(self, path: Path, settings: ModelSettings, *, ema: float) -> None:
        self.path = path
        self.config = TrainConfig(
            name=path.name,
            model=settings,
            optimizer=OptimizerConfig(learning_rate=0.05, ema_decay=ema, warmup_steps=0),
            algorithm=AlgorithmConfig(preset="sft"),
            checkpoint=CheckpointSettings(keep=3),
        )
        path.mkdir(parents=True)
        (path / "config.yaml").write_text(config_yaml(self.config))
        model = load_model(settings.name)
        learner = Learner(
            policy_decoder(self.config, model),
            LearnerConfig(rows=1, smaller_shapes=0),
            algorithm=self.config.algorithm,
            optimizer=self.config.optimizer,
            row_tokens=32,
            temperature=1.0,
            max_lag=0,
            total_steps=3,
        )
        files = checkpoint_files(
            config_yaml(self.config), model.config, model.tokenizer, dtype=settings.dtype
        )
        saver = Checkpointer(path / "checkpoints", keep=3)
        self.last: dict[int, Decoder] = {}
        self.mean: dict[int, Decoder] = {}
        for step, reward in REWARDS.items():
            learner.add_sequences([sequence(step)])
            learner.step()
            state = learner.state
            metrics = {"reward/mean": reward}
            saver.save(step, state.arrays, {}, metrics=metrics, files=files)
            self.last[step] = learner.policy()
            mean = mean_parameters(state.optimizer, state.trainable)
            if mean is not None:
                learner.state = state._replace(trainable=mean)
                self.mean[step] = learner.policy()
                learner.state = state

    def export(self, out: Path, *flags: str, source: Path | None = None) -> int:
        return cli.export([str(source or self.path), "--out", str(out), *flags])


def sequence(seed: int) -> TrainingSequence:
    ids = np.random.default_rng(seed).integers(0, 320, 24).astype(np.int32)
    mask = np.ones(24, np.float32)
    mask[0] = 0
    return TrainingSequence(ids=ids, mask=mask, behaviour=np.zeros_like(mask), advantage=mask)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that trained every weight, and kept their mean."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    return Run(path, ModelSettings(name=str(START)), ema=0.5)


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that trained adapters of some linears, on a start of its own."""
    folder = tmp_path_factory.mktemp("runs")
    start = folder / "start"
    shutil.copytree(START, start)
    settings = ModelSettings(
        name=str(start), lora_rank=3, lora_alpha=6.0, lora_linears=("q_proj", "up_proj")
    )
    return Run(folder / "lora", settings, ema=0.5)


@nnx.jit
def compute(decoder: Decoder) -> jax.Array:
    ids = jnp.arange(12, dtype=jnp.int32)[None] * 7
    positions = jnp.arange(12, dtype=jnp.int32)[None]
    hidden = decoder.hidden(ids, positions, jnp.full_like(ids, 12))
    return decoder.logits(hidden)


def logits(decoder: Decoder) -> np.ndarray:
    return np.asarray(compute(decoder))


def assert_exported(folder: Path, expected: Decoder) -> None:
    read = load_model(folder).decoder()
    np.testing.assert_allclose(logits(read), logits(expected), atol=2e-6)


def test_policies_differ_from_step_to_step(whole: Run):
    """Else the tests below could not tell which was exported."""
    seen = [logits(one) for one in (*whole.last.values(), whole.mean[3])]
    for at, one in enumerate(seen):
        for other in seen[:at]:
            assert np.abs(one - other).max() > 1e-3


@pytest.mark.parametrize(
    ("flags", "step"), [([], 3), (["--step", "1"], 1), (["--best"], 2), (["--merged"], 3)]
)
def test_a_runs_checkpoint_becomes_a_model(whole: Run, tmp_path, capsys, flags, step):
    assert whole.export(tmp_path / "out", *flags) == 0
    assert capsys.readouterr().out == f"model of whole, step {step}: {tmp_path / 'out'}\n"
    assert_exported(tmp_path / "out", whole.last[step])
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"the parameters after step {step} of the run whole" in card


def test_the_mean_of_the_parameters(whole: Run, tmp_path):
    assert whole.export(tmp_path / "out", "--ema") == 0
    assert_exported(tmp_path / "out", whole.mean[3])
    assert "the mean of the parameters after step 3" in (tmp_path / "out/README.md").read_text()


def test_a_copied_checkpoint_is_enough(whole: Run, tmp_path):
    copy = tmp_path / "elsewhere" / "step_00000002"
    shutil.copytree(whole.path / "checkpoints" / "step_00000002", copy)
    assert whole.export(tmp_path / "out", source=copy) == 0
    assert_exported(tmp_path / "out", whole.last[2])
    assert whole.export(tmp_path / "mean", "--ema", source=copy) == 0
    assert_exported(tmp_path / "mean", whole.mean[2])


def test_a_checkpoint_without_model_files_is_exported_with_the_models_own(whole: Run, tmp_path):
    run = tmp_path / "old"
    shutil.copytree(whole.path, run)
    for step in run.glob("checkpoints/step_*"):
        shutil.rmtree(step / "model")
        for name in ("config.yaml", "metrics.json"):
            (step / name).unlink()
    assert whole.export(tmp_path / "out", source=run) == 0
    assert_exported(tmp_path / "out", whole.last[3])
    checkpoint = run / "checkpoints" / "step_00000001"
    assert whole.export(tmp_path / "one", source=checkpoint) == 0
    assert_exported(tmp_path / "one", whole.last[1])


@pytest.mark.parametrize("mean", [False, True])
def test_adapters_are_merged_or_alone(lora: Run, tmp_path, mean):
    flags = ["--ema"] if mean else []
    expected = (lora.mean if mean else lora.last)[3]
    assert lora.export(tmp_path / "merged", *flags) == 0
    assert_exported(tmp_path / "merged", expected)
    assert lora.export(tmp_path / "adapters", "--adapters", *flags) == 0
    decoder = load_model(START).decoder()
    load_adapters(tmp_path / "adapters", decoder)
    np.testing.assert_allclose(logits(decoder), logits(expected), atol=2e-5)
    assert "library_name: peft" in (tmp_path / "adapters" / "README.md").read_text()


def test_adapters_alone_need_no_model(lora: Run, tmp_path):
    start = Path(lora.config.model.name)
    hidden = start.with_name("hidden")
    start.rename(hidden)
    try:
        assert lora.export(tmp_path / "out", "--adapters") == 0
        assert lora.export(tmp_path / "merged") == 2
    finally:
        hidden.rename(start)
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "merged").exists()


def test_a_value_head_is_beside_the_mean_and_not_exported(whole: Run, tmp_path):
    """As the learner keeps both: the optimizer's tree holds the policy's and the head's parameters."""
    run = tmp_path / "ppo"
    shutil.copytree(whole.path, run, ignore=shutil.ignore_patterns("step_*"))
    policy = nnx.state(whole.last[1], nnx.Param)
    head = {"kernel": jnp.ones((4, 1))}
    mean = jax.tree.map(lambda leaf: 2 * leaf, policy)
    arrays = {
        "trainable": policy,
        "value": head,
        "optimizer": {"mean": {"policy": mean, "value": head}, "inner": {"count": jnp.ones(())}},
    }
    files = {
        f"model/{file.name}": file.read_bytes()
        for file in (whole.path / "checkpoints" / "step_00000001" / "model").iterdir()
    }
    Checkpointer(run / "checkpoints").save(7, arrays, {}, files=files)
    assert whole.export(tmp_path / "out", "--ema", source=run) == 0
    graph, _ = nnx.split(whole.last[1])
    assert_exported(tmp_path / "out", nnx.merge(graph, mean))


# ------------------------------------------------------------------ mistakes


def test_a_folder_is_replaced_only_with_force(whole: Run, tmp_path, capsys):
    out = tmp_path / "out"
    assert whole.export(out, "--step", "1") == 0
    assert whole.export(out) == 2
    assert f"{out} is not empty" in capsys.readouterr().err
    assert_exported(out, whole.last[1])
    assert whole.export(out, "--force") == 0
    assert_exported(out, whole.last[3])
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("mine")
    assert whole.export(other, "--force") == 2
    assert "holds something else than a model" in capsys.readouterr().err
    assert (other / "thesis.tex").read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--adapters"], "trained every weight (model.lora_rank 0), so there are no adapters"),
        (["--step", "9"], "no checkpoint of step 9, only of 1, 2, 3"),
        (["--step", "1", "--best"], "each name a checkpoint"),
        (["--adapters", "--merged"], "two exports"),
    ],
)
def test_what_there_is_not_is_said(whole: Run, tmp_path, capsys, flags, said):
    assert whole.export(tmp_path / "out", *flags) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_runs_and_checkpoints_that_are_none(whole: Run, tmp_path, capsys):
    def said(*flags: str, source: Path) -> str:
        assert whole.export(tmp_path / "out", *flags, source=source) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    assert "Unknown run" in said(source=tmp_path / "nothing")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.yaml").write_text(config_yaml(whole.config))
    assert f"gymllm-train --resume {empty}" in said(source=empty)
    one = whole.path / "checkpoints" / "step_00000001"
    assert "--step and --best are for a run's folder" in said("--best", source=one)
    renamed = tmp_path / "mine"
    shutil.copytree(one, renamed)
    assert "called step_ and eight digits, got mine" in said(source=renamed)


def test_no_mean_and_no_metric(whole: Run, tmp_path, capsys):
    run = tmp_path / "plain"
    shutil.copytree(whole.path, run)
    config = replace(
        whole.config,
        optimizer=OptimizerConfig(),
        checkpoint=CheckpointSettings(best_metric="reward/nope"),
    )
    (run / "config.yaml").write_text(config_yaml(config))
    assert whole.export(tmp_path / "out", "--ema", source=run) == 2
    assert "kept no mean of its parameters" in capsys.readouterr().err
    assert whole.export(tmp_path / "out", "--best", source=run) == 2
    assert "the metric reward/nope" in capsys.readouterr().err
