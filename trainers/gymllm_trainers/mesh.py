"""The devices of a run: settings of the mesh, and what the learner does with one.

`open_mesh` makes it; None is one device, where none of this is needed. On a mesh the learner

1. lays the model out: `place_decoder`; its optimizer's state: `init_like`;
2. calls programs inside `on_mesh(mesh)`, compiled there with `layout_of` their results as `out_shardings`,
   so that what a step returns lies where the next one wants it;
3. hands micro-batches over by `put_batch`, with as many rows as `rows_for` says.

Where each parameter lies, and why, is in `models/sharding.py`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gymllm.errors import ConfigError, ModelError
from gymllm_trainers.models.config import DecoderConfig
from gymllm_trainers.models.sharding import (
    CONTEXT,
    WHOLE_ROW_AXES,
    AnyMesh,
    make_mesh,
    param_shardings,
    row_sharding,
    shard_decoder,
)
from gymllm_trainers.processes import LEADER

if TYPE_CHECKING:
    from jaxlib._jax import Device

    from gymllm_trainers.models.decoder import Decoder

Tree = Any
"""A pytree of arrays."""
T = TypeVar("T")

_LARGE = 2**16
"""Elements from which on an optimizer's state is worth dividing."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How devices share the training. One axis may be -1: what the others leave."""

    data: int = 1
    """Copies of the model, each with rows of its own."""
    fsdp: int = -1
    """Parts that parameters, their gradient and the optimizer's state are divided into, and rows too."""
    tensor: int = 1
    """Parts that heads, feed-forward and vocabulary are divided into; best within one host."""
    expert: int = 1
    """Parts that a mixture's experts are divided into, and rows too."""
    context: int = 1
    """Parts that the tokens of a row are divided into, for rows too long for one device."""
    engine_devices: int = 0
    """Devices, the first ones of process 0, that the engine has to itself and the trainer leaves alone:
    engine.tensor times engine.replicas. 0: the trainer uses them too."""

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            if size < 1 and size != -1:
                raise ConfigError(
                    f"mesh.{name} must be >= 1, or -1 for what the other axes leave, got {size}."
                )
        if list(self.sizes.values()).count(-1) > 1:
            names = " and ".join(f"mesh.{name}" for name, size in self.sizes.items() if size == -1)
            raise ConfigError(f"only one axis can take what the others leave, but {names} are -1.")
        if self.engine_devices < 0:
            raise ConfigError(f"mesh.engine_devices must be >= 0, got {self.engine_devices}.")

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis, as it was set."""
        names = ("data", "fsdp", "tensor", "expert", "context")
        return {name: getattr(self, name) for name in names}


def open_mesh(config: MeshConfig, devices: Sequence[Device] | None = None) -> Mesh | None:
    """The trainer's mesh; None where it is one device that this process has.

    Args:
        config: Sizes.
        devices: All of them, of every process, when None.

    Raises:
        ConfigError: The sizes don't multiply to the devices that the engine leaves.
    """
    found, _ = split_devices(config, devices)
    sizes = sizes_for(config, len(found), simulated=found[0].platform == "cpu")
    local = found[0].process_index == jax.process_index()
    if len(found) == 1 and local and all(size in (1, -1) for size in config.sizes.values()):
        return None
    return make_mesh(**sizes, devices=found)


def sizes_for(config: MeshConfig, devices: int, *, simulated: bool = False) -> dict[str, int]:
    """Size of each axis on so many devices, the one that is -1 included.

    Args:
        config: Sizes, as they were set.
        devices: How many the trainer has.
        simulated: Whether they are a CPU's, of which there may be as many as one likes.

    Raises:
        ConfigError: The sizes don't multiply to `devices`; says the nearest that do.
    """
    sizes = config.sizes
    fixed = {axis: size for axis, size in sizes.items() if size != -1}
    product = math.prod(fixed.values())
    if product == devices or (len(fixed) < len(sizes) and devices % product == 0):
        return {axis: fixed.get(axis, devices // product) for axis in sizes}
    large = [f"mesh.{axis} {size}" for axis, size in fixed.items() if size > 1]
    shown = " x ".join(large) or "a mesh whose axes are all 1"
    takes = "a multiple of " * (len(fixed) < len(sizes)) + _devices(product)
    wrong = f"{shown} takes {takes}, but the trainer has {devices}"
    near = _nearest(sizes, devices)
    flags = " ".join(f"--mesh.{axis} {near[axis]}" for axis in sizes if near[axis] != sizes[axis])
    hint = ""
    if simulated:
        count = product + config.engine_devices
        hint = (
            f" On a CPU, the environment variable XLA_FLAGS=--xla_force_host_platform_device_count={count} "
            f"makes {count} of it."
        )
    raise ConfigError(f"{wrong}. The nearest mesh that works: {flags}.{hint}")


def _nearest(sizes: Mapping[str, int], devices: int) -> dict[str, int]:
    """The mesh of so many devices that changes the axes least, in proportion; -1 stays where it can."""
    given = {axis: size for axis, size in sizes.items() if size != -1}
    free = [axis for axis in sizes if axis not in given]
    best: tuple[float, dict[str, int]] = (math.inf, dict(sizes))

    def divide(left: int, axes: list[str], chosen: dict[str, int], change: float) -> None:
        nonlocal best
        if change >= best[0]:
            return
        if not axes:
            if free or left == 1:
                best = (change, {**chosen, **dict.fromkeys(free, -1)})
            return
        axis, *rest = axes
        for size in range(1, left + 1):
            if left % size == 0:
                moved = abs(math.log(size / given[axis]))
                divide(left // size, rest, {**chosen, axis: size}, change + moved)

    # Of two that are as near the first stays: axes that were set come first, and what is left goes to `fsdp`.
    order = ("tensor", "expert", "context", "data", "fsdp")
    divide(devices, sorted(given, key=lambda axis: (given[axis] == 1, order.index(axis))), {}, 0.0)
    return best[1]


def _devices(count: int) -> str:
    return f"{count} device{'s' * (count != 1)}"


def split_devices(
    config: MeshConfig, devices: Sequence[Device] | None = None
) -> tuple[list[Device], list[Device]]:
    """The trainer's devices and those that are the engine's alone; all and none where `engine_devices` is 0.

    Raises:
        ConfigError: The engine would leave none, or none of process 0, which takes part in the training.
    """
    found = list(jax.devices() if devices is None else devices)
    count = config.engine_devices
    if not count:
        return found, []
    leading = jax.local_devices(process_index=LEADER) if devices is None else found
    if count >= len(leading) and len(leading) < len(found):
        most = len(leading) - 1
        lower = f"Set it to at most {most}, or to 0, " if most else "Set it to 0, "
        raise ConfigError(
            f"mesh.engine_devices is {count}, but process {LEADER}, where the engine is, has "
            f"{_devices(len(leading))}, and every process must train on one at least. {lower}which trains on "
            f"the engine's devices too; or start fewer processes with more devices each."
        )
    if count >= len(found):
        most = len(found) - 1
        there = "there is only 1 device" if not most else f"there are only {len(found)} devices"
        lower = f"Set it to at most {most}, or to 0, " if most else "Set it to 0, "
        raise ConfigError(
            f"mesh.engine_devices is {count}, but {there}, and none would be left for training. {lower}which "
            "trains on the engine's devices too."
        )
    own = leading[:count]
    return [device for device in found if device not in own], own


def check_mesh(mesh: AnyMesh, model: DecoderConfig, *, row_tokens: int) -> None:
    """Refuses a mesh that the model or its rows can't be divided over, before anything is made.

    Raises:
        ModelError: An axis doesn't divide what it should of the model; says what would.
        ConfigError: `context` doesn't divide a row.
    """
    param_shardings(model, mesh)
    pieces, tensor = mesh.shape[CONTEXT], mesh.shape["tensor"]
    if row_tokens % pieces:
        raise ConfigError(
            f"learner.row_tokens={row_tokens} can't be divided over mesh.context={pieces}: set it to "
            f"{-(-row_tokens // pieces) * pieces}."
        )
    # Where key-value heads stay whole, every device of `tensor` has every query head.
    split = tensor if model.num_key_value_heads % tensor == 0 else 1
    heads = model.num_attention_heads // split
    if heads % pieces:
        raise ModelError(
            f"mesh.context={pieces} doesn't divide the {heads} query heads that a device has "
            f"(num_attention_heads={model.num_attention_heads}, mesh.tensor={tensor}). Choose a context that "
            f"divides {heads}."
        )


def row_parts(mesh: AnyMesh | None) -> int:
    """Into how many parts the rows of a micro-batch are divided."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in WHOLE_ROW_AXES)


def rows_for(mesh: AnyMesh | None, rows: int) -> int:
    """Rows of a micro-batch on this mesh.

    Args:
        mesh: The trainer's; None is one device.
        rows: As set; 0 is the fewest, but at least 2.

    Raises:
        ConfigError: `rows` can't be divided over the mesh; says the nearest that can.
    """
    parts = row_parts(mesh)
    if rows == 0:
        return max(parts, -(-2 // parts) * parts)
    if rows % parts:
        raise ConfigError(
            f"learner.rows={rows} can't be divided over {parts} parts of the mesh (mesh.data x mesh.expert x "
            f"mesh.fsdp): set it to {-(-rows // parts) * parts}, or leave it out."
        )
    return rows


# ---------------------------------------------------------------------- what the learner does with it


def on_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[object]:
    """Inside, programs are compiled for the mesh and called on it; nothing where there is none."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def place_whole(tree: T, mesh: Mesh | None) -> T:
    """Small arrays on every device of the mesh, such as a value head's; as they are where there is none."""
    return tree if mesh is None else jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def on_one_device(decoder: Decoder) -> Decoder:
    """A copy on the first device: for an engine that isn't divided, where the decoder is."""
    graph, state = nnx.split(decoder)
    return nnx.merge(graph, jax.device_put(state, jax.local_devices()[0]))


def place_decoder(decoder: Decoder, mesh: Mesh | None) -> None:
    """Puts a decoder's parameters where they belong; in place."""
    if mesh is not None:
        shard_decoder(decoder, mesh)


def layout_of(tree: Tree) -> Tree:
    """Shardings of a tree of arrays, for `out_shardings`; None for arrays that no mesh holds."""

    def layout(leaf: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding | None:
        return leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None

    return jax.tree.map(layout, tree)


def init_like(init: Callable[[Tree], T], params: Tree, mesh: Mesh | None) -> T:
    """Calls `init(params)`, as an optimizer's, with results that lie as the parameters do.

    XLA would keep zeros whole on every device: they depend on no parameter.

    Args:
        init: Makes a tree in which a parameter's moments have its shape, or fewer or shorter axes.
        params: Of float32 or another dtype, laid out on the mesh.
        mesh: None: just `init(params)`.
    """
    if mesh is None:
        return init(params)
    with jax.set_mesh(mesh):
        return jax.jit(init, out_shardings=state_layout(init, params, mesh))(params)


def abstract_like(init: Callable[[Tree], T], params: Tree, mesh: Mesh) -> T:
    """What `init_like` would return, without its numbers, of `jax.ShapeDtypeStruct` laid out on the mesh."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(init, params),
        state_layout(init, params, mesh),
    )


def state_layout(init: Callable[[Tree], Tree], params: Tree, mesh: Mesh) -> Tree:
    """Where the leaves of `init(params)` lie: as the parameter of the same name and shape."""
    by_suffix: dict[tuple[str, ...], list[jax.Array]] = {}
    for path, param in jax.tree_util.tree_leaves_with_path(params):
        names = tuple(map(str, path))
        for start in range(len(names)):
            by_suffix.setdefault(names[start:], []).append(param)
    whole = NamedSharding(mesh, PartitionSpec())

    def layout(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        names = tuple(map(str, path))
        # Moments are in a tree like the parameters', somewhere inside the optimizer's own.
        suffixes = [names[i:j] for i in range(len(names)) for j in range(len(names), i, -1)]
        for suffix in sorted(suffixes, key=len, reverse=True):
            for param in by_suffix.get(suffix, ()):
                if param.shape == leaf.shape:
                    return param.sharding if isinstance(param.sharding, NamedSharding) else whole
        # Of another shape, such as moments in blocks: what is large is divided all the same.
        parts = mesh.shape["fsdp"]
        axis = next((axis for axis, size in enumerate(leaf.shape) if size % parts == 0), None)
        if leaf.size < _LARGE or parts == 1 or axis is None:
            return whole
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, "fsdp"))

    traced = jax.jit(init).trace(params)
    places, structure = jax.tree.flatten(jax.tree_util.tree_map_with_path(layout, traced.out_info))
    # What `init` puts in the host's memory, as an offloaded optimizer does, stays there.
    host = [aval.memory_space == jax.memory.Space.Host for aval in traced.jaxpr.out_avals]
    return structure.unflatten(
        [
            place.with_memory_kind("pinned_host") if waits else place
            for place, waits in zip(places, host, strict=True)
        ]
    )


def put_batch(batch: T, mesh: Mesh | None) -> T:
    """A micro-batch's host arrays [B, T] on the mesh.

    Each process has all of them, and gives its own devices theirs. Without a mesh they stay as they are: JAX
    copies them when a program is called.
    """
    if mesh is None:
        return batch
    sharding = row_sharding(mesh)

    def put(array: np.ndarray) -> jax.Array:
        if jax.process_count() == 1:
            return jax.device_put(array, sharding)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(put, batch)


def abstract_batch(batch: T, mesh: AnyMesh | None) -> T:
    """What a program that takes `put_batch(batch)` is compiled for."""
    sharding = None if mesh is None else row_sharding(mesh)
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
        batch,
    )
