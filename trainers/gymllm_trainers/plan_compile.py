"""Compiles a run's real programs for devices that aren't here, and says what the compiler knows of them.

    python -m gymllm_trainers.plan_compile JOB.json

A process of its own: JAX is told once which devices there are, and a compiler that runs out of memory takes
nobody else down. Prints a line of JSON for each program as soon as it is compiled. Parameters are abstract,
so nothing is allocated.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gymllm_trainers.algorithms.resolve import resolve
from gymllm_trainers.config import TrainConfig
from gymllm_trainers.config_files import merge, read_yaml
from gymllm_trainers.engine.paged_attention import new_cache
from gymllm_trainers.engine.programs import Programs as EnginePrograms
from gymllm_trainers.learner.programs import Programs, Scored, Trained
from gymllm_trainers.mesh import abstract_batch, abstract_like
from gymllm_trainers.models import choose_linears
from gymllm_trainers.models.config import DecoderConfig
from gymllm_trainers.models.decoder import Decoder, LoRAParam
from gymllm_trainers.models.sharding import MESH_AXES, abstract_state, make_mesh
from gymllm_trainers.models.value import ValueHead
from gymllm_trainers.optimizer import make_optimizer
from gymllm_trainers.packing import pack_rows
from gymllm_trainers.plan import shape_of
from gymllm_trainers.plan_chips import parse_topology
from gymllm_trainers.plan_hlo import summarise

if TYPE_CHECKING:
    from jaxlib._jax import Device

Tree = Any
"""A pytree of arrays, or of `jax.ShapeDtypeStruct`."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to compile."""

    config: Path
    """YAML of a run's configuration."""
    topology: str
    mesh: tuple[int, ...]
    """Sizes of `MESH_AXES`."""
    rows: int
    row_tokens: int
    programs: tuple[str, ...] = ("gradient", "step", "score", "engine")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self) | {"config": str(self.config)})

    @classmethod
    def from_json(cls, text: str) -> Job:
        found = json.loads(text)
        return cls(
            **found
            | {
                "config": Path(found["config"]),
                "mesh": tuple(found["mesh"]),
                "programs": tuple(found["programs"]),
            }
        )


class _Lowered(NamedTuple):
    """A program and what it is called with."""

    program: Any
    """What `jax.jit` returned."""
    arguments: tuple[Tree, ...]
    kinds: dict[str, Tree]
    """The arguments, by what is held in them."""
    mesh: Mesh


def main(path: str) -> None:
    """Compiles the job and prints what was found."""
    job = Job.from_json(Path(path).read_text())
    config = merge(TrainConfig(), read_yaml(job.config))
    shape = shape_of(config)
    assert shape is not None, "the caller knows the model's shape"
    devices = _devices(job.topology)
    programs: dict[str, Callable[[], _Lowered]] = {}
    training = _Training(config, shape, job, devices)
    programs["gradient"] = training.gradient
    programs["step"] = training.step
    programs["score"] = training.score
    programs["engine"] = lambda: _engine(config, shape, devices)
    for name in job.programs:
        print(json.dumps({"program": name} | _compile(programs[name])), flush=True)  # noqa: T201


def _devices(topology: str) -> list[Device]:
    found = parse_topology(topology)
    if found.chip.kind == "tpu":
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
        return list(described.devices)
    return jax.devices()[: found.devices]


def _compile(make: Callable[[], _Lowered]) -> dict[str, object]:
    start = time.perf_counter()
    made = make()
    with jax.set_mesh(made.mesh):
        try:
            compiled = made.program.lower(*made.arguments).compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return {"error": " ".join(str(error).split())[:600]}
    seconds = time.perf_counter() - start
    memory, summary = (
        compiled.memory_analysis(),
        summarise(compiled.as_text(), devices=made.mesh.size),
    )
    return {
        "seconds": seconds,
        "held": {kind: held_bytes(tree) for kind, tree in made.kinds.items()},
        "arguments": memory.argument_size_in_bytes,
        "results": memory.output_size_in_bytes,
        "in_place": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "collectives": {
            kind: {"count": found.count, "sent_bytes": found.sent_bytes}
            for kind, found in summary.collectives.items()
        },
        "kernels": summary.kernels,
        "unknown_loops": summary.unknown_loops,
    }


def held_bytes(tree: Tree) -> int:
    """Bytes of a tree's arrays on each device."""
    return sum(_leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _leaf_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    sharding = leaf.sharding
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


# ---------------------------------------------------------------------- training


def abstract_decoder(config: TrainConfig, shape: DecoderConfig) -> Decoder:
    """The policy as the run makes it, without its numbers."""
    model = config.model

    def make() -> Decoder:
        decoder = Decoder(
            shape,
            rngs=nnx.Rngs(0),
            dtype=jnp.dtype(model.dtype),
            compute_dtype=jnp.dtype(model.compute_dtype),
            remat=model.remat,
        )
        if model.lora_rank:
            decoder.add_adapters(
                rank=model.lora_rank,
                alpha=model.lora_alpha,
                linears=choose_linears(model.lora_linears or "all-linear", shape),
                rngs=nnx.Rngs(0),
                dtype=jnp.float32,
            )
        return decoder

    return nnx.eval_shape(make)


def state_bytes_of(config: TrainConfig, decoder: Decoder) -> int:
    """Bytes of the optimizer's state for the parameters that the run trains."""
    kind = LoRAParam if decoder.adapters is not None else nnx.Param
    trained = nnx.split(decoder, kind, ...)[1]
    optimizer = make_optimizer(config.optimizer, config.steps)
    wide = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), trained)
    return held_bytes(jax.eval_shape(optimizer.init, wide))


class _Training:
    """The learner's programs, as `learner/compiled.py` calls them."""

    def __init__(
        self, config: TrainConfig, shape: DecoderConfig, job: Job, devices: list[Device]
    ) -> None:
        self._mesh = make_mesh(**dict(zip(MESH_AXES, job.mesh, strict=True)), devices=devices)
        decoder = abstract_decoder(config, shape)
        algorithm = resolve(config.algorithm, updates=config.learner.updates)
        kind = LoRAParam if decoder.adapters is not None else nnx.Param
        placed = nnx.merge(nnx.graphdef(decoder), abstract_state(decoder, self._mesh))
        graph, policy, self._frozen = nnx.split(placed, kind, ...)
        value_graph = value = None
        whole = NamedSharding(self._mesh, PartitionSpec())
        if algorithm.needs_values:
            value_graph, value = nnx.split(nnx.eval_shape(lambda: ValueHead(shape.hidden_size)))
            value = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), value
            )
        self._trained = Trained(policy, value)
        self._programs = Programs(
            graph,
            value_graph=value_graph,
            algorithm=algorithm,
            optimizer=make_optimizer(config.optimizer, config.steps),
            temperature=config.agent.temperature or 1.0,
            head_chunk=config.learner.head_chunk,
        )
        self._optimizer = abstract_like(self._programs.init, self._trained, self._mesh)
        self._gradient = abstract_like(_float_zeros, self._trained, self._mesh)
        batch = pack_rows([[]] * job.rows, length=job.row_tokens)
        self._batch = abstract_batch(batch, self._mesh)
        known = np.zeros(batch.ids.shape, np.float32)
        self._scored = abstract_batch(
            Scored(
                proximal=known if algorithm.needs_proximal else None,
                reference=known if algorithm.needs_reference else None,
                value=known if algorithm.needs_values else None,
                returns=known if algorithm.needs_values else None,
            ),
            self._mesh,
        )

    def gradient(self) -> _Lowered:
        arguments = (self._trained, self._frozen, self._gradient, self._batch, self._scored)
        program = jax.jit(
            self._programs.gradient,
            donate_argnums=(2,),
            out_shardings=(_layout(self._gradient), None),
        )
        kinds = {
            "parameters": (self._trained, self._frozen),
            "gradient": self._gradient,
            "micro-batch": (self._batch, self._scored),
        }
        return _Lowered(program, arguments, kinds, self._mesh)

    def step(self) -> _Lowered:
        divisor = jax.ShapeDtypeStruct((), jnp.float32)
        arguments = (self._trained, self._optimizer, self._gradient, divisor)
        layouts = (*map(_layout, (self._trained, self._optimizer, self._gradient)), None)
        program = jax.jit(self._programs.step, donate_argnums=(2,), out_shardings=layouts)
        kinds = {
            "parameters": self._trained,
            "optimizer": self._optimizer,
            "gradient": self._gradient,
        }
        return _Lowered(program, arguments, kinds, self._mesh)

    def score(self) -> _Lowered:
        arguments = (self._trained, self._frozen, self._batch)
        kinds = {"parameters": (self._trained, self._frozen), "micro-batch": self._batch}
        return _Lowered(jax.jit(self._programs.score), arguments, kinds, self._mesh)


def _float_zeros(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), tree)


def _layout(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


# ---------------------------------------------------------------------- engine


def _engine(config: TrainConfig, shape: DecoderConfig, devices: list[Device]) -> _Lowered:
    """The engine's largest step: every slot decodes, and as many prompt tokens as may be."""
    engine = config.engine.resolved(shape)
    mesh = make_mesh(fsdp=1, tensor=engine.tensor, devices=devices[: engine.tensor])
    decoder = abstract_decoder(config, shape)
    compute = jnp.dtype(config.model.compute_dtype)
    state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, compute, sharding=leaf.sharding),
        abstract_state(decoder, mesh),
    )
    programs = EnginePrograms(nnx.graphdef(decoder), state, engine, mesh=mesh)
    rows, blocks = max(engine.shapes)
    layout = programs.layout(rows, blocks)
    whole = NamedSharding(mesh, PartitionSpec())
    split = "tensor" if shape.num_key_value_heads % engine.tensor == 0 else None
    pages = NamedSharding(mesh, PartitionSpec(None, None, split))

    def empty() -> Tree:
        dtype = jnp.dtype(engine.cache_dtype)
        return new_cache(shape, engine.total_pages, engine.page_size, dtype)

    cache = jax.tree.map(
        lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=pages),
        jax.eval_shape(empty),
    )
    arguments = (
        jax.tree.leaves(state),
        cache,
        jax.ShapeDtypeStruct((layout.size,), np.int32, sharding=whole),
        jax.ShapeDtypeStruct((engine.slots,), np.int32, sharding=whole),
    )
    program = jax.jit(
        programs.forward_of(layout), donate_argnums=(1,), out_shardings=(whole, pages)
    )
    return _Lowered(program, arguments, {"weights": state, "KV pages": cache}, mesh)


if __name__ == "__main__":
    main(sys.argv[1])
