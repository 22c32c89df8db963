"""`gymllm-train --plan v5p:4x4x4`: whether a run fits devices that aren't here, and what it would cost.

Layouts are first compared by arithmetic (`plan_estimate`); the run's own one, or where that can't be used the
best, is then compiled for the topology, in a process of its own (`plan_compile`). A TPU's compiler is in the
package `libtpu`, which needs no TPU.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gymllm.errors import ConfigError, MissingExtraError, ModelError, RunError
from gymllm_trainers.config import TrainConfig, config_yaml
from gymllm_trainers.mesh import rows_for, sizes_for
from gymllm_trainers.models import DecoderConfig
from gymllm_trainers.models.sharding import MESH_AXES
from gymllm_trainers.plan import BYTES, adapter_parameters, shape_of
from gymllm_trainers.plan_chips import Topology, parse_topology
from gymllm_trainers.plan_compile import Job, abstract_decoder, state_bytes_of
from gymllm_trainers.plan_estimate import Estimate, Layout, Work, best_layouts, estimate

PATIENCE_S = 3600.0
"""How long the compiler may take in all."""


@dataclass(frozen=True, kw_only=True)
class TopologyPlan:
    """What was found."""

    topology: Topology
    work: Work
    own: Estimate | None
    """Of the layout that the run's settings give; None: they can't be used."""
    refused: str
    """Why not; empty otherwise."""
    engine_bytes: float
    """On each of the engine's devices: its weights and its pages."""
    suggestions: tuple[Estimate, ...]
    """The fastest that fit, best first; of a CPU, where `own` is None, those that hold the least."""
    compiled: Estimate | None
    """The layout that was compiled."""
    programs: dict[str, dict[str, Any]]
    """What the compiler said of each program, as `plan_compile` prints it."""

    @property
    def held_bytes(self) -> float:
        """Most that a device of the trainer holds, by the compiler where it was asked, at whichever program
        needs the most; with the engine's where both are on the same devices."""
        if not self.programs:
            assert self.compiled is not None or self.own is not None
            shown = self.own or self.compiled
            assert shown is not None
            return shown.bytes + self.engine_bytes
        return max(_peaks(self).values(), default=0.0)

    @property
    def fits(self) -> bool:
        """Whether it does; what the compiler refused doesn't."""
        if any("error" in program for program in self.programs.values()):
            return False
        limit = self.topology.chip.memory_bytes
        return limit == 0 or self.held_bytes <= limit


def beside(program: dict[str, Any]) -> float:
    """Bytes of a program beside its arguments."""
    return program["temporaries"] + program["results"] - program["in_place"] + program["code"]


def _peaks(found: TopologyPlan) -> dict[str, float]:
    """Bytes that a device holds while each program runs, with what waits meanwhile."""
    programs = {name: one for name, one in found.programs.items() if "error" not in one}
    held = programs.get("step", {}).get("held", {})
    kinds = held | programs.get("gradient", {}).get("held", {})
    resident = sum(size for kind, size in kinds.items() if kind != "micro-batch")
    engine = programs.get("engine", {})
    shared = sum(engine.get("held", {}).values()) if found.engine_bytes else 0.0
    peaks = {
        name: resident + kinds.get("micro-batch", 0) * (name != "step") + shared + beside(one)
        for name, one in programs.items()
        if name != "engine"
    }
    if engine:
        waits = resident if found.engine_bytes else 0.0
        peaks["engine"] = waits + sum(engine["held"].values()) + beside(engine)
    return peaks


def plan_for(
    config: TrainConfig, topology: str, *, programs: tuple[str, ...] | None = None
) -> TopologyPlan:
    """Works the plan out; allocates nothing on any device.

    Args:
        config: The run.
        topology: As `plan_chips.parse_topology` reads it.
        programs: Which to compile; None: gradient, step, score and engine; empty: none.

    Raises:
        ConfigError: The topology's name, or a setting, can't be used; or the model's shape isn't known.
        MissingExtraError: The compiler isn't installed; says what to install.
        RunError: It broke.
    """
    target = parse_topology(topology)
    shape = shape_of(config)
    if shape is None:
        raise ConfigError(
            f"--plan {topology} needs the model's shape, and model.name {config.model.name!r} is neither a "
            "folder, a .gguf file nor known here. Give a folder with its config.json."
        )
    work = work_of(config, shape)
    engine_bytes = _engine_bytes(config, shape)
    devices = target.devices - config.mesh.engine_devices
    shared = 0.0 if config.mesh.engine_devices else engine_bytes
    suggestions: list[Estimate] = []
    with _without_sharding_news():
        own, refused = _own(config, work, target, devices)
        if target.chip.memory_bytes or own is None:
            suggestions = best_layouts(work, target.chip, devices, held_bytes=shared)
    found: dict[str, dict[str, Any]] = {}
    # A CPU's memory isn't known, so no suggestion is worth minutes of compiling.
    compiled = own or (next(iter(suggestions), None) if target.chip.memory_bytes else None)
    wanted = ("gradient", "step", "score", "engine") if programs is None else programs
    if target.compiles and wanted and compiled is not None:
        found = _compile(config, target, compiled.layout, wanted)
    return TopologyPlan(
        topology=target,
        work=work,
        own=own,
        refused=refused,
        engine_bytes=shared,
        suggestions=tuple(suggestions),
        compiled=compiled,
        programs=found,
    )


@contextmanager
def _without_sharding_news() -> Iterator[None]:
    """Meshes by the hundred are tried: what some of them keep whole is no news."""
    logger = logging.getLogger("gymllm_trainers.models.sharding")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def work_of(config: TrainConfig, shape: DecoderConfig) -> Work:
    """What a run trains."""
    model = config.model
    trained = adapter_parameters(shape, model) if model.lora_rank else shape.parameters
    return Work(
        model=shape,
        weight_bytes=BYTES[model.dtype],
        compute_bytes=BYTES[model.compute_dtype],
        remat=model.remat,
        trained=trained,
        state_bytes=state_bytes_of(config, abstract_decoder(config, shape)) / trained,
        tokens=config.learner.groups_per_step
        * config.rollout.group_size
        * config.engine.context_length,
        longest=config.engine.context_length,
        head_chunk=config.learner.head_chunk,
    )


def _own(
    config: TrainConfig, work: Work, target: Topology, devices: int
) -> tuple[Estimate | None, str]:
    """The layout that the settings give, or why they can't be used."""
    try:
        sizes = sizes_for(config.mesh, devices)
    except ConfigError as problem:
        return None, str(problem)
    row_tokens = config.learner.row_tokens or 2 * config.engine.context_length
    layout = Layout(mesh=tuple(sizes[axis] for axis in MESH_AXES), rows=1, row_tokens=row_tokens)
    try:
        layout = replace(layout, rows=rows_for(layout.abstract, config.learner.rows))
        return estimate(work, layout, target.chip), ""
    except (ConfigError, ModelError) as problem:
        return None, str(problem)


def _engine_bytes(config: TrainConfig, shape: DecoderConfig) -> float:
    engine = config.engine.resolved(shape)
    weights = shape.parameters * BYTES[config.model.compute_dtype]
    a_token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
    pages = engine.total_pages * engine.page_size * a_token * BYTES[engine.cache_dtype]
    return (weights + pages) / engine.tensor


# ---------------------------------------------------------------------- the compiler's process


def _compile(
    config: TrainConfig, target: Topology, layout: Layout, programs: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    environment = dict(os.environ)
    environment["JAX_PLATFORMS"] = "cpu"
    if target.chip.kind == "tpu":
        environment |= _libtpu(target)
    else:
        kept = environment.get("XLA_FLAGS", "")
        count = f"--xla_force_host_platform_device_count={target.devices}"
        environment["XLA_FLAGS"] = f"{kept} {count}".strip()
    with tempfile.TemporaryDirectory() as folder:
        settings, job = Path(folder) / "config.yaml", Path(folder) / "job.json"
        settings.write_text(config_yaml(config))
        job.write_text(
            Job(
                config=settings,
                topology=target.name,
                mesh=layout.mesh,
                rows=layout.rows,
                row_tokens=layout.row_tokens,
                programs=programs,
            ).to_json()
        )
        try:
            done = subprocess.run(
                [sys.executable, "-m", "gymllm_trainers.plan_compile", str(job)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired as problem:
            raise RunError(
                f"compiling for {target.name} took more than {PATIENCE_S:g} s and was stopped."
            ) from problem
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-8:])
        if done.returncode == -signal.SIGKILL:
            last = f"it was killed, most likely for want of this machine's memory.\n{last}"
        raise RunError(
            f"the compiler for {target.name} ended with exit code {done.returncode}:\n{last}"
        )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line.pop("program"): line for line in lines}


def _libtpu(target: Topology) -> dict[str, str]:
    """What the compiler's process needs to find and use libtpu without a TPU."""
    if "TPU_LIBRARY_PATH" not in os.environ and importlib.util.find_spec("libtpu") is None:
        raise MissingExtraError(
            f"--plan {target.name} needs the TPU's compiler, which needs no TPU: pip install "
            f'"gymllm-trainers[tpu-plan]". Or keep it apart from JAX (0.6 GB): pip install --no-deps '
            f"--target FOLDER {_libtpu_version()}, and set TPU_LIBRARY_PATH=FOLDER/libtpu/libtpu.so."
        )
    return {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def _libtpu_version() -> str:
    """The release that belongs to this JAX, as pip writes it."""
    for line in importlib.metadata.requires("jax") or ():
        if (found := re.match(r"(libtpu\s*==\s*[\w.*]+)", line)) is not None:
            return f'"{found[1]}"'
    return "libtpu"
