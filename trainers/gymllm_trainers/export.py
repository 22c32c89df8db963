"""`gymllm-export`: a checkpoint as a folder that transformers, PEFT, vLLM and `load_model` read.

What it reads is the checkpoint: configuration, tokenizer and the shape of the model lie in it, so a copied
folder is enough. Only adapters that are to be merged need the model that they were trained on, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from jax.sharding import SingleDeviceSharding

from gymllm.errors import ConfigError, ModelError
from gymllm_agents.tokenizer import Tokenizer
from gymllm_trainers.checkpoint import Checkpointer
from gymllm_trainers.checkpoint_files import CONFIG, read_model_files
from gymllm_trainers.config import TrainConfig
from gymllm_trainers.config_checks import draft
from gymllm_trainers.config_files import merge, read_yaml
from gymllm_trainers.models import (
    Decoder,
    LoadedModel,
    decoder_params,
    load_model,
    save_adapters,
    save_model,
)
from gymllm_trainers.models.decoder import LoRAParam, merge_adapters
from gymllm_trainers.run_folder import RunFolder
from gymllm_trainers.starting_model import policy_decoder, start_name

Tree = Any
"""A pytree of arrays: JAX's own functions say no more of it."""


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """What to export, and where to."""

    source: Annotated[Path, tyro.conf.Positional]
    """A run's folder, or that of one checkpoint (step_00000040)."""
    out: Path
    """Folder to write; it appears whole or not at all."""
    step: int | None = None
    """Step of the checkpoint; None: the last."""
    best: bool = False
    """The checkpoint with the best checkpoint.best_metric."""
    adapters: bool = False
    """The LoRA adapters alone, as PEFT loads them."""
    merged: bool = False
    """The whole model, with adapters merged: what is written without --adapters too."""
    ema: bool = False
    """The mean of the parameters that optimizer.ema_decay keeps, in place of the last ones."""
    force: bool = False
    """Replace a model or adapters that are in --out."""


@dataclass(frozen=True)
class _Source:
    """One checkpoint, and what it was trained with."""

    checkpoints: Checkpointer
    step: int
    config: TrainConfig
    name: str
    """The run's."""

    @property
    def path(self) -> Path:
        """The checkpoint's folder."""
        return self.checkpoints.path(self.step)


def load_settings(argv: Sequence[str]) -> ExportSettings:
    """Reads the command line.

    A mistake in a flag, and `--help`, end the program as usual for command lines (`SystemExit`).

    Raises:
        ConfigError: Flags that exclude each other.
    """
    settings = tyro.cli(
        ExportSettings,
        args=list(argv),
        prog="gymllm-export",
        description="Writes a run's checkpoint as a model folder in the hub's format.",
    )
    if settings.step is not None and settings.best:
        raise ConfigError("--step and --best each name a checkpoint: leave one out.")
    if settings.adapters and settings.merged:
        raise ConfigError("--adapters and --merged are two exports: leave one out.")
    return settings


def run(settings: ExportSettings) -> None:
    """Exports, and says what was written.

    Raises:
        ConfigError: No run or checkpoint is there, or --out isn't empty.
        ModelError: The checkpoint can't be read, holds no adapters or no mean, or the disk refused.
    """
    _check_out(settings)
    source = _find(settings)
    lora = bool(source.config.model.lora_rank)
    if settings.adapters and not lora:
        raise ModelError(
            f"{source.name} trained every weight (model.lora_rank 0), so there are no adapters to "
            "export. Leave --adapters out for the whole model."
        )
    decoder, tokenizer = _decoder(source, ema=settings.ema, whole=not settings.adapters)
    if settings.adapters:
        save_adapters(settings.out, decoder, start_name(source.config), overwrite=settings.force)
    else:
        whole = merge_adapters(decoder) if lora else decoder
        save_model(
            settings.out,
            whole.config,
            decoder_params(whole),
            tokenizer,
            overwrite=settings.force,
        )
    (settings.out / "README.md").write_text(_card(settings, source), encoding="utf-8")
    what = "adapters" if settings.adapters else "model"
    print(f"{what} of {source.name}, step {source.step}: {settings.out}")  # noqa: T201 (a command line speaks)


def _check_out(settings: ExportSettings) -> None:
    out = settings.out
    if out.is_dir() and any(out.iterdir()) and not settings.force:
        raise ConfigError(
            f"{out} is not empty. Choose another --out, or replace the model in it with --force."
        )


# ------------------------------------------------------------------ where it comes from


def _find(settings: ExportSettings) -> _Source:
    path = settings.source
    if (path / "arrays").is_dir():
        return _of_checkpoint(settings, path.absolute())
    folder = RunFolder.open(path)
    config = _config(folder.config)
    checkpoints = Checkpointer(
        folder.checkpoints, best_metric=config.checkpoint.best_metric, read_only=True
    )
    steps = checkpoints.steps()
    if not steps:
        raise ModelError(
            f"the run in {path} has no checkpoint yet. Continue it with gymllm-train --resume {path}."
        )
    if settings.step is not None and settings.step not in steps:
        raise ConfigError(
            f"the run in {path} has no checkpoint of step {settings.step}, only of "
            f"{', '.join(map(str, steps))}."
        )
    step = settings.step if settings.step is not None else steps[-1]
    if settings.best:
        best = checkpoints.best()
        if best is None:
            raise ModelError(
                f"no checkpoint of the run in {path} has the metric {config.checkpoint.best_metric} "
                "(checkpoint.best_metric). Name one with --step."
            )
        step = best
    return _Source(checkpoints, step, config, folder.path.absolute().name)


def _of_checkpoint(settings: ExportSettings, path: Path) -> _Source:
    if settings.step is not None or settings.best:
        raise ConfigError(f"{path} is one checkpoint: --step and --best are for a run's folder.")
    checkpoints = Checkpointer(path.parent, read_only=True)
    step = next((step for step in checkpoints.steps() if checkpoints.path(step) == path), None)
    if step is None:
        raise ConfigError(
            f"a checkpoint's folder is called step_ and eight digits, got {path.name}. Rename it back."
        )
    for place in (path / CONFIG, path.parent.parent / CONFIG):
        if place.is_file():
            config = _config(place)
            return _Source(checkpoints, step, config, config.name or path.name)
    raise ConfigError(
        f"{path} lacks config.yaml, which says what was trained: it is of an older version. Export it "
        "from its run's folder."
    )


def _config(path: Path) -> TrainConfig:
    with draft():  # what an earlier version let pass was trained all the same
        return merge(TrainConfig(), read_yaml(path))


# ------------------------------------------------------------------ what it holds


def _decoder(source: _Source, *, ema: bool, whole: bool) -> tuple[Decoder, Tokenizer]:
    """The decoder of a checkpoint. Where adapters are trained, its other parameters are read only if `whole`
    is wanted."""
    config = source.config
    lora = bool(config.model.lora_rank)
    held = read_model_files(source.path)
    if held is None or (lora and whole):
        model = load_model(start_name(config), dtype=config.model.dtype)
        tokenizer, decoder = model.tokenizer, policy_decoder(config, model)
    else:
        shape, tokenizer = held
        dtype = jnp.dtype(config.model.dtype)

        def built() -> Decoder:
            params = decoder_params(Decoder(shape, rngs=nnx.Rngs(0), dtype=dtype))
            model = LoadedModel(config=shape, params=params, tokenizer=tokenizer)
            return policy_decoder(config, model)

        decoder = nnx.eval_shape(built)
    graph, trained, rest = nnx.split(decoder, LoRAParam if lora else nnx.Param, ...)
    return nnx.merge(graph, _trained(source, trained, ema=ema), rest), tokenizer


def _trained(source: _Source, like: Tree, *, ema: bool) -> Tree:
    """The trained parameters, on the host: they may have been saved from devices that aren't here."""
    host = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])

    def wanted(leaf: jax.Array, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=host)

    if not ema:
        tree = jax.tree.map(lambda leaf: wanted(leaf, leaf.dtype), like)
        return source.checkpoints.restore(source.step, {"trainable": tree})["trainable"]
    if not source.config.optimizer.ema_decay:
        raise ModelError(
            f"{source.name} kept no mean of its parameters (optimizer.ema_decay 0), which --ema exports. "
            "Leave --ema out for the last ones."
        )
    mean: Tree = jax.tree.map(lambda leaf: wanted(leaf, jnp.float32), like)
    # Beside a value head the policy is one of two trees that the optimizer has.
    beside = (source.path / "arrays" / "value").is_dir()
    held = {"mean": {"policy": mean} if beside else mean}
    found = source.checkpoints.restore(source.step, {"optimizer": held}, part=True)["optimizer"]
    mean = cast("dict[str, Tree]", found)["mean"]
    mean = mean["policy"] if beside else mean
    return jax.tree.map(lambda leaf, last: leaf.astype(last.dtype), mean, like)


def _card(settings: ExportSettings, source: _Source) -> str:
    """A model card: what the hub reads at its top, and where the model comes from."""
    config, start = source.config, start_name(source.config)
    library = "peft" if settings.adapters else "transformers"
    base = f"base_model: {start}\n" if "/" in start and not Path(start).exists() else ""
    which = "the mean of the parameters" if settings.ema else "the parameters"
    return (
        f"---\nlibrary_name: {library}\n{base}tags: [gymllm]\n---\n\n# {source.name}\n\n"
        f"Trained from {config.model.name} with gymllm on {config.env.id}: {which} after step "
        f"{source.step} of the run {source.name}.\n"
    )
