"""Everything that decides a training run, as nested frozen dataclasses, and where it comes from.

A component's settings sit beside the component; here they come together as `TrainConfig`. A run's
configuration is the defaults, a YAML file over them, flags over that; `--resume` starts from the
configuration that the run was saved with.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, cast

import tyro

from gymllm.errors import ConfigError, RunError
from gymllm.registration import check_id
from gymllm.rollout import RolloutConfig
from gymllm_trainers.algorithms.config import AlgorithmConfig
from gymllm_trainers.build import EnvSettings
from gymllm_trainers.config_checks import check_together, draft, without_effect
from gymllm_trainers.config_files import flatten, merge, read_yaml, to_yaml
from gymllm_trainers.engine import EngineConfig
from gymllm_trainers.flags import (
    ELSEWHERE,
    check_elsewhere,
    check_sections,
    check_switches,
    take_env_kwargs,
    take_free,
    take_players,
)
from gymllm_trainers.learner import LearnerConfig
from gymllm_trainers.mesh import MeshConfig
from gymllm_trainers.metrics import WandbMode
from gymllm_trainers.models.decoder import RematPolicy
from gymllm_trainers.optimizer import OptimizerConfig
from gymllm_trainers.players import AgentSettings, PlayerSettings
from gymllm_trainers.processes import ProcessConfig
from gymllm_trainers.rewards.config import RewardConfig
from gymllm_trainers.run_folder import RunFolder, warn
from gymllm_trainers.supervised import SupervisedConfig
from gymllm_trainers.warm_start import WarmStartConfig


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The policy's model."""

    name: str = "tiny"
    """"tiny", "smollm2", a hub name ("Qwen/Qwen3-0.6B"), a .gguf file, or a folder in the hub's
    format."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the weights are kept in."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """What activations are computed in."""
    lora_rank: int = 0
    """Rank of LoRA adapters, which alone are then trained; 0 trains every weight."""
    lora_alpha: float = 32.0
    """Adapters are scaled by alpha / rank."""
    lora_linears: tuple[str, ...] = ()
    """Which linears of every layer have adapters, by the hub's names, such as q_proj, or ours; empty: all."""
    remat: RematPolicy = "none"
    """What training keeps of a layer's activations for its backward pass; what it doesn't, it computes again:
    slower, with less memory. none: keeps all; full: only what comes in; dots: that and products with kernels;
    offload: as dots, in the host's memory."""

    def __post_init__(self) -> None:
        if self.lora_rank < 0:
            raise ConfigError(f"model.lora_rank must be >= 0, got {self.lora_rank}.")
        if not self.lora_alpha > 0:
            raise ConfigError(f"model.lora_alpha must be > 0, got {self.lora_alpha}.")
        if self.lora_linears and not self.lora_rank:
            raise ConfigError(
                f"model.lora_linears is {', '.join(self.lora_linears)}, but model.lora_rank is 0: "
                "no adapters are made. Set lora_rank, or leave lora_linears out."
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """When the run is saved. It always is at its end and at Ctrl-C."""

    every: int = 20
    """Steps between checkpoints; 0 saves only at the end."""
    keep: int = 2
    """How many of the latest checkpoints stay."""
    keep_best: int = 0
    """How many of the best stay beside them, by best_metric."""
    best_metric: str = "reward/mean"
    """A metric of the step; the largest is best, or with "-" before it the smallest."""
    keep_every: int = 0
    """Checkpoints of steps that are a multiple of this stay for ever; 0: none."""

    def __post_init__(self) -> None:
        for name in ("every", "keep_best", "keep_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"checkpoint.{name} must be >= 0, got {getattr(self, name)}.")
        if self.keep < 1:
            raise ConfigError(f"checkpoint.keep must be >= 1, got {self.keep}.")


@dataclass(frozen=True, kw_only=True)
class MetricsSettings:
    """Where numbers go besides metrics.jsonl."""

    wandb: WandbMode = "auto"
    """Weights & Biases. auto: online if you have logged in, else offline, and off where it isn't
    installed; online, offline, off: just that."""
    wandb_project: str = "gymllm"
    """Its project."""
    trajectories: bool = True
    """Whether every trajectory is kept in trajectories/."""
    display: bool = True
    """Whether a terminal shows the live display; without it each step is a line."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    name: str = ""
    """The run's name and folder; empty makes one from the environment and the time."""
    seed: int = 0
    """Decides tasks, sampling and initial weights."""
    steps: int = 40
    """Batches that are trained on, those before a resume included."""
    runs_dir: Path = Path("runs")
    """Where the folders of runs are."""
    resume: Path | None = None
    """Folder of a run to go on with from its last checkpoint, with its own configuration."""
    model: ModelSettings = field(default_factory=ModelSettings)
    env: EnvSettings = field(default_factory=EnvSettings)
    agent: AgentSettings = field(default_factory=AgentSettings)
    # As flags they are taken out before tyro, which knows only the names that are there already.
    players: Annotated[Mapping[str, PlayerSettings], tyro.conf.Fixed] = field(
        default_factory=dict[str, PlayerSettings]
    )
    """Who plays, where the environment has several agents, by its name of each: as YAML, or
    --players.player_1.engine frozen. One called "*" plays everyone who is not named."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    processes: ProcessConfig = field(default_factory=ProcessConfig)
    supervised: SupervisedConfig = field(default_factory=SupervisedConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps must be >= 1, got {self.steps}.")
        if self.seed < 0:
            raise ConfigError(f"seed must be >= 0, got {self.seed}.")
        check_together(self)


FIXED_ON_RESUME = (
    "name",
    "runs_dir",
    "seed",
    "model",
    "env.id",
    "env.kwargs",
    "env.tasks",
    "agent",
    "players",
    "rollout.group_size",
    "algorithm.preset",
    "algorithm.advantage",
    "optimizer.name",
    "optimizer.state_dtype",
    "optimizer.ema_decay",
    "supervised",
    "warm_start",
)
"""What a run can't change half-way: its checkpoint or its task order would mean something else."""

MOVED = {
    "learner.learning_rate": "optimizer.learning_rate",
    "learner.warmup_steps": "optimizer.warmup_steps",
    "learner.final_rate": "optimizer.final_rate",
    "learner.adam_b1": "optimizer.b1",
    "learner.adam_b2": "optimizer.b2",
    "learner.weight_decay": "optimizer.weight_decay",
    "learner.max_grad_norm": "optimizer.max_grad_norm",
    "learner.advantage": "algorithm.advantage",
    "learner.loss": "algorithm.loss",
    "learner.clip_low": "algorithm.clip_low",
    "learner.clip_high": "algorithm.clip_high",
    "learner.correction": "algorithm.correction",
    "learner.correction_cap": "algorithm.correction_cap",
    "learner.zero_variance": "algorithm.zero_variance",
}
"""Settings by their old names, and what they are called now."""


_DESCRIPTION = """Trains a language model on an environment, with GRPO or whatever --algorithm.preset says.

Without arguments: gymllm's own tiny model on FrozenLake, a few minutes on a laptop. Flags go over
--config FILE.yaml, which goes over the defaults shown here.

Where the environment has several agents, --players.NAME.SETTING VALUE says who plays each of them: engine
(policy, frozen or scripted), trainable, system_prompt, temperature, max_new_tokens, tools, skill."""


@dataclass(frozen=True, kw_only=True)
class _CommandLine:
    """What is on the command line: the settings of a run, and a file with more of them."""

    config: Path | None = None
    """YAML file with any of these settings; flags go over it."""
    plan: bool = False
    """Say what the run would take, and end; with a topology after it (v5p:4x4x4, v5e:4x4, cpu:8, gpu:8xH100),
    compile it for those devices, which need not be here: memory, FLOPs, traffic, time, and the best mesh."""
    train: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)


def load_config(argv: Sequence[str]) -> TrainConfig:
    """The configuration that a command line asks for, ready to run: its name is never empty.

    A mistake in a flag, and `--help`, end the program as usual for command lines (`SystemExit`).

    Raises:
        ConfigError: A key, value or file that can't be used.
    """
    _check_moved(argv)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    first.add_argument("--resume", type=Path)
    files, _ = first.parse_known_args(list(argv))
    with draft():
        config, saved = _put_together(argv, files.config, files.resume)
    check_together(config)
    check_id(config.env.id)  # before a folder is made for a run that can't start
    if saved is not None:
        _check_resumable(saved, config)
    for remark in without_effect(config):
        warn(remark)
    return config


def _put_together(
    argv: Sequence[str], file: Path | None, resume: Path | None
) -> tuple[TrainConfig, TrainConfig | None]:
    """The configuration, and the one that the resumed run was saved with."""
    base = TrainConfig()
    saved: TrainConfig | None = None
    if resume is not None:
        if file is not None:
            raise ConfigError(
                "--resume goes on with the run's own configuration: leave out --config, and give "
                "what should change as flags."
            )
        saved = merge(base, _read(RunFolder.open(resume).config))
        base = dataclasses.replace(saved, resume=resume)
    elif file is not None:
        base = merge(base, _read(file))
        if base.resume is not None:
            raise ConfigError(f"{file} sets resume: give --resume on the command line.")
    arguments, kwargs = take_env_kwargs(argv)
    arguments, options, variables = take_free(arguments)
    arguments, players = take_players(arguments, base.players)
    free: dict[str, object] = {
        "env": {"kwargs": {**base.env.kwargs, **kwargs}},
        "optimizer": {"kwargs": {**base.optimizer.kwargs, **options}},
        "agent": {"template_variables": {**base.agent.template_variables, **variables}},
        "players": players,
    }
    base = merge(base, free)
    check_elsewhere(arguments)
    check_switches(arguments, base)
    check_sections(arguments, base)
    config = tyro.cli(
        _CommandLine,
        args=arguments,
        default=_CommandLine(config=file, train=base),
        prog="gymllm-train",
        description=_DESCRIPTION,
    ).train
    return config, saved


def _read(path: Path) -> Mapping[str, object]:
    """A file of settings.

    Raises:
        ConfigError: It can't be read, or has a setting by its old name.
    """
    read = read_yaml(path)
    for old, new in MOVED.items():
        section, _, name = old.partition(".")
        held = read.get(section)
        if isinstance(held, Mapping) and name in held:
            raise ConfigError(f"{path}: {old} is called {new} now. Write it there.")
    sections: list[tuple[str, Mapping[str, object]]] = [("", read)]
    for name in ("optimizer", "algorithm", "learner", "rollout", "mesh"):
        held = read.get(name)
        if isinstance(held, Mapping):
            sections.append((f"{name}.", cast("Mapping[str, object]", held)))
    for prefix, held in sections:
        for name in held:
            if name in ELSEWHERE:
                raise ConfigError(
                    f"{path}: Unknown config key {prefix + name!r}. Here it is {ELSEWHERE[name]}."
                )
    return read


def _check_moved(argv: Sequence[str]) -> None:
    for word in argv:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and name in MOVED:
            flag = f"--{MOVED[name].replace('_', '-')}"
            raise ConfigError(f"{word.partition('=')[0]} is called {flag} now.")


def open_run_folder(config: TrainConfig) -> RunFolder:
    """The run's folder, made or found (`resume`) and locked, with the configuration saved in it.

    Raises:
        ConfigError: The name is taken, there is no run to go on with, or another process trains it.
        RunError: The folder can't be written.
    """
    if config.resume is None and config.name:
        return RunFolder.create(config.runs_dir, config.name, config_yaml(config))
    if config.resume is None:
        return _create_unnamed(config)
    folder = RunFolder.open(config.resume)
    try:
        folder.lock()
        folder.write_config(config_yaml(config))
    except OSError as error:
        folder.unlock()
        raise RunError(
            f"can't write to the run's folder {folder.path}: {error.strerror}."
        ) from error
    return folder


def _create_unnamed(config: TrainConfig) -> RunFolder:
    """The folder of a run that has no name; those started in the same second are numbered."""
    base = default_name(config)
    for number in itertools.count(1):
        named = dataclasses.replace(config, name=base if number == 1 else f"{base}-{number}")
        try:
            return RunFolder.create(config.runs_dir, named.name, config_yaml(named))
        except ConfigError:
            if not (config.runs_dir / named.name).exists():
                raise
    raise AssertionError("unreachable")


def config_yaml(config: TrainConfig) -> str:
    """The configuration as YAML, which `--config` and `--resume` read back to an equal one; but for the
    processes, which are of a start and not of the run."""
    return to_yaml(dataclasses.replace(config, resume=None, processes=ProcessConfig()))


def default_name(config: TrainConfig, now: time.struct_time | None = None) -> str:
    """A name from the environment and the time: frozenlake-0131-142503."""
    env = config.env.id.rpartition("/")[2].rpartition(":")[2]
    env = re.sub(r"-v\d+$", "", env).lower()
    env = re.sub(r"[^a-z0-9._-]", "-", env).strip("-._") or "run"
    return f"{env}-{time.strftime('%m%d-%H%M%S', now or time.localtime())}"


def _check_resumable(saved: TrainConfig, config: TrainConfig) -> None:
    before, after = flatten(saved), flatten(config)
    for path in FIXED_ON_RESUME:
        for key in sorted(before.keys() | after.keys()):
            if (key == path or key.startswith(f"{path}.")) and before.get(key) != after.get(key):
                raise ConfigError(
                    f"{key} can't change when a run is resumed: it was {before.get(key)!r}, got "
                    f"{after.get(key)!r}. Leave it out, or start a new run."
                )
