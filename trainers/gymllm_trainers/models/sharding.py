"""Where a decoder's parameters and activations lie on a mesh of devices.

Every axis of every parameter has a name ("embed", "heads", ...), and `RULES` says which axis of the mesh
divides it. Nothing else in the models knows about devices: XLA partitions the arithmetic from where the
parameters lie, and from `constrain_rows`, which says that activations stay divided by rows.

Mesh axes: `data` divides rows only; `fsdp` divides rows and every large parameter, gathered when used
(Rajbhandari et al. 2020, arXiv:1910.02054, stage 3); `tensor` divides heads, feed-forward and vocabulary
(Shoeybi et al. 2019, arXiv:1909.08053); `expert` divides rows and the experts of a mixture; `context` divides
the tokens of each row.

Axes: B rows, T tokens, C pieces of a row. Everything but attention treats a token by itself, so a row that
is divided over `context` is simply C shorter rows [B * C, T / C] (`fold_context`). In attention the devices
along `context` exchange pieces for heads and back: each then has some heads of whole rows (Jacobs et al.
2023, arXiv:2309.14509). That moves less than gathering keys and values would, is balanced although attention
is causal, and leaves every implementation of attention as it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from gymllm.errors import ConfigError, ModelError
from gymllm_trainers.models.config import DecoderConfig, layer_shapes

if TYPE_CHECKING:
    from jaxlib._jax import Device  # what jax.Device is, which type checkers take for a variable

    from gymllm_trainers.models.decoder import Decoder

LogicalAxis = Literal[
    "layers", "vocab", "embed", "heads", "kv_heads", "mlp", "experts", "rank", "whole"
]
MeshAxis = Literal["data", "fsdp", "tensor", "expert", "context"]
Axes = tuple[LogicalAxis, ...]
Shardings = dict[str, NamedSharding | dict[str, NamedSharding]]
"""A sharding for each parameter, in the tree that `Params` is."""

MESH_AXES: tuple[MeshAxis, ...] = ("data", "fsdp", "tensor", "expert", "context")
ROW_AXES: tuple[MeshAxis, ...] = ("data", "expert", "fsdp", "context")
"""Mesh axes that rows of a batch are divided over: whole rows, or their pieces where there is `context`."""
WHOLE_ROW_AXES: tuple[MeshAxis, ...] = ("data", "expert", "fsdp")
"""Mesh axes that whole rows are divided over."""
CONTEXT: MeshAxis = "context"
_ROWS_OF_A_WIDTH = tuple(axis for axis in ROW_AXES if axis != "fsdp")
"""Mesh axes that divide rows while fsdp divides an activation's width, as it does the embedding's."""

RULES: dict[LogicalAxis, MeshAxis | None] = {
    "layers": None,  # scanned: each step needs one of them whole
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "expert",
    "rank": None,
    "whole": None,  # norms and such, too small to be worth a gather
}

_TOP: dict[str, Axes] = {
    "embedding": ("vocab", "embed"),
    "norm": ("whole",),
    "head": ("embed", "vocab"),
}
_LAYER: dict[str, Axes] = {
    "query": ("embed", "heads"),
    "key": ("embed", "kv_heads"),
    "value": ("embed", "kv_heads"),
    "output": ("heads", "embed"),
    "gate": ("embed", "mlp"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "router": ("embed", "whole"),
    "experts_gate": ("experts", "embed", "mlp"),
    "experts_up": ("experts", "embed", "mlp"),
    "experts_down": ("experts", "mlp", "embed"),
    "query_bias": ("heads",),
    "key_bias": ("kv_heads",),
    "value_bias": ("kv_heads",),
    "gate_bias": ("mlp",),
    "up_bias": ("mlp",),
}

AnyMesh = Mesh | AbstractMesh
"""A mesh of devices, or one without any, to ask where things would lie."""
_T = TypeVar("_T")

_log = logging.getLogger(__name__)


def make_mesh(
    *,
    data: int = 1,
    fsdp: int = -1,
    tensor: int = 1,
    expert: int = 1,
    context: int = 1,
    devices: Sequence[Device] | None = None,
) -> Mesh:
    """Arranges devices in a mesh with the axes `MESH_AXES`, neighbours along the axes that talk most.

    Args:
        data: Copies of the model.
        fsdp: Parts that parameters and rows are divided into.
        tensor: Parts that heads, feed-forward and vocabulary are divided into.
        expert: Parts that a mixture's experts are divided into.
        context: Parts that the tokens of a row are divided into.
        devices: All of them when None.

    One of the sizes may be -1: what the others leave.

    Raises:
        ConfigError: The sizes don't multiply to the number of devices.
    """
    found = list(jax.devices() if devices is None else devices)
    sizes: dict[MeshAxis, int] = {
        "data": data,
        "fsdp": fsdp,
        "tensor": tensor,
        "expert": expert,
        "context": context,
    }
    wrong = [f"{axis}={size}" for axis, size in sizes.items() if size < 1 and size != -1]
    open_axes: list[MeshAxis] = [axis for axis, size in sizes.items() if size == -1]
    if wrong or len(open_axes) > 1:
        raise ConfigError(
            f"A mesh axis must be >= 1, or -1 on one axis to take what the others leave; got "
            f"{', '.join(f'{axis}={size}' for axis, size in sizes.items())}."
        )
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if open_axes and len(found) % fixed == 0:
        sizes[open_axes[0]] = len(found) // fixed
    if math.prod(sizes.values()) != len(found):
        raise ConfigError(
            f"The mesh {', '.join(f'{axis}={size}' for axis, size in sizes.items())} doesn't fit "
            f"{len(found)} devices: its sizes must multiply to that number (-1 takes what is left)."
        )
    shape = tuple(sizes.values())
    if found[0].platform == "tpu":
        # Without split axes, tensor=2 has no place on a v5e:4x4 or v5p:4x4x4.
        arranged = mesh_utils.create_device_mesh(shape, found, allow_split_physical_axes=True)
    else:
        arranged = np.array(found).reshape(shape)
    return Mesh(arranged, MESH_AXES)


def logical_axes(config: DecoderConfig) -> dict[str, Axes | dict[str, Axes]]:
    """The name of every axis of every parameter, in the tree that `Params` is."""
    axes: dict[str, Axes | dict[str, Axes]] = dict(_TOP)
    if config.tie_word_embeddings:
        del axes["head"]
    axes["layers"] = {
        name: _layer_axes(name, len(shape)) for name, shape in layer_shapes(config).items()
    }
    return axes


def param_shardings(config: DecoderConfig, mesh: AnyMesh) -> Shardings:
    """Where each parameter of a decoder of this shape lies on the mesh.

    A vocabulary or a number of key-value heads that `tensor` doesn't divide stays whole on every device, with
    a line in the log; nothing else does.

    Raises:
        ModelError: A mesh axis doesn't divide the model's heads, feed-forward, width or experts.
    """
    rules = _rules_for(config, mesh)
    return {
        name: {inner: _sharding(inner_axes, rules, mesh) for inner, inner_axes in axes.items()}
        if isinstance(axes, dict)
        else _sharding(axes, rules, mesh)
        for name, axes in logical_axes(config).items()
    }


def shard_decoder(decoder: Decoder, mesh: Mesh) -> None:
    """Puts a decoder's parameters, its adapters included, where they belong on the mesh; in place.

    Raises:
        ModelError: As `param_shardings`.
    """
    rules = _rules_for(decoder.config, mesh)
    for path, variable in nnx.to_flat_state(nnx.state(decoder, nnx.Param)):
        axes = _axes_at(path, variable[...].ndim)
        variable[...] = jax.device_put(variable[...], _sharding(axes, rules, mesh))


def abstract_state(decoder: Decoder, mesh: AnyMesh) -> nnx.State:
    """What `shard_decoder` would make of a decoder, without its numbers: for compiling ahead.

    Args:
        decoder: As `nnx.eval_shape` makes it, adapters included, or a real one.
        mesh: Where it would lie.

    Raises:
        ModelError: As `param_shardings`.
    """
    rules = _rules_for(decoder.config, mesh)
    flat = []
    for path, variable in nnx.to_flat_state(nnx.state(decoder)):
        leaf = variable.get_value()
        sharding = _sharding(_axes_at(path, leaf.ndim), rules, mesh)
        struct = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        flat.append((path, variable.replace(struct)))
    return nnx.from_flat_state(flat)


def leaf_at(tree: Mapping[str, _T | dict[str, _T]], path: tuple[str, ...]) -> _T | None:
    """What a tree such as `Params` holds at a path of one or two keys; None if nothing."""
    node: _T | dict[str, _T] | None = tree.get(path[0])
    for key in path[1:]:
        node = node.get(key) if isinstance(node, dict) else None
    return None if isinstance(node, dict) else node


def row_sharding(mesh: AnyMesh) -> NamedSharding:
    """How a batch [B, T, ...] lies: rows divided over `WHOLE_ROW_AXES`, their tokens over `context`."""
    return NamedSharding(mesh, PartitionSpec(WHOLE_ROW_AXES, CONTEXT))


def constrain_rows(x: Array) -> Array:
    """Keeps an activation [B, ...] divided by rows inside `jax.set_mesh(mesh)`; does nothing elsewhere.

    Left alone, XLA divides activations by width, as the embedding is, and then sums them over devices at each
    linear instead of gathering the layer's weights.
    """
    return jax.lax.with_sharding_constraint(x, PartitionSpec(ROW_AXES)) if rows_divided(x) else x


def constrain_embedded(x: Array) -> Array:
    """`constrain_rows` of what was just looked up in the embedding [B, ..., D], which divides it by width.

    In two steps: XLA knows how to exchange one mesh axis between two axes of an array; when more changes, it
    first copies the whole batch to every device.
    """
    if not rows_divided(x):
        return x
    spec = PartitionSpec(_ROWS_OF_A_WIDTH, *[None] * (x.ndim - 2), "fsdp")
    return constrain_rows(jax.lax.with_sharding_constraint(x, spec))


def constrain_ids(ids: Array) -> Array:
    """What is looked up in the embedding [B, ...], where `constrain_embedded` wants what is found there."""
    # XLA (of JAX 0.10) would otherwise fail to compile the lookup where fsdp and context are both divided.
    if not rows_divided(ids):
        return ids
    return jax.lax.with_sharding_constraint(ids, PartitionSpec(_ROWS_OF_A_WIDTH))


def rows_divided(x: Array) -> bool:
    """Whether this is inside `jax.set_mesh(mesh)` of a mesh whose devices can share these rows evenly."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not set(ROW_AXES) <= set(mesh.axis_names):
        return False
    return x.shape[0] % math.prod(mesh.shape[axis] for axis in ROW_AXES) == 0


def context_pieces(shape: tuple[int, ...]) -> int:
    """How many pieces each row of a batch [B, T, ...] comes in on the mesh that is set; 1 without `context`.

    Raises:
        ConfigError: The mesh doesn't divide these rows or their tokens.
    """
    mesh = jax.sharding.get_abstract_mesh()
    pieces = mesh.shape[CONTEXT] if CONTEXT in mesh.axis_names else 1
    if pieces == 1:
        return 1
    rows, tokens = shape[:2]
    holders = math.prod(mesh.shape[axis] for axis in WHOLE_ROW_AXES)
    if rows % holders or tokens % pieces:
        raise ConfigError(
            f"rows of a micro-batch must be a multiple of {holders} (mesh.data x mesh.expert x mesh.fsdp), "
            f"their tokens of {pieces} (mesh.context), got {rows} rows of {tokens}. Set learner.rows and "
            "learner.row_tokens to multiples of these."
        )
    return pieces


def fold_context(x: Array, pieces: int) -> Array:
    """[B, T, ...] to [B * C, T / C, ...]: C pieces of each row as rows of their own."""
    return x if pieces == 1 else x.reshape(x.shape[0] * pieces, -1, *x.shape[2:])


def unfold_context(x: Array, pieces: int) -> Array:
    """The inverse of `fold_context`."""
    return x if pieces == 1 else x.reshape(x.shape[0] // pieces, -1, *x.shape[2:])


def on_whole_rows(attend: Callable[..., Array], pieces: int) -> Callable[..., Array]:
    """Attention inside `jax.shard_map`, of arrays that are pieces of rows (`fold_context`).

    Pieces of rows with all of a device's heads are exchanged for whole rows with some of them, and back.

    Args:
        attend: Of this device's query [B, T, N / C, H], key and value [B, T, K', H], arrays [B, T], and
            scalars.
        pieces: C.

    Returns:
        The same function of query [B * C, T / C, N, H], key and value [B * C, T / C, K, H], arrays
        [B * C, T / C], and scalars; gives [B * C, T / C, N, H].
    """
    if pieces == 1:
        return attend

    def on_pieces(query: Array, key: Array, value: Array, *others: Array) -> Array:
        heads, groups = query.shape[2], key.shape[2]
        if heads % pieces:
            raise ConfigError(
                f"mesh.context={pieces} doesn't divide the {heads} query heads that a device has after "
                "mesh.tensor. Choose a smaller mesh.context or mesh.tensor."
            )
        # A key-value head that several devices' queries use goes to each of them.
        copies = pieces // math.gcd(groups, pieces)
        key, value = (jnp.repeat(x, copies, axis=2) if copies > 1 else x for x in (key, value))
        whole = (
            jax.lax.all_to_all(x, CONTEXT, split_axis=2, concat_axis=0, tiled=True)
            for x in (query, key, value)
        )
        tokens = (jax.lax.all_gather(x, CONTEXT, tiled=True) if x.ndim else x for x in others)
        mixed = attend(*(unfold_context(x, pieces) if x.ndim else x for x in (*whole, *tokens)))
        folded = fold_context(mixed, pieces)
        return jax.lax.all_to_all(folded, CONTEXT, split_axis=0, concat_axis=2, tiled=True)

    return on_pieces


def _axes_at(path: Sequence[object], rank: int) -> Axes:
    """Names of the axes of a decoder's parameter at this path, which has so many."""
    name = str(path[-1])
    if path[0] != "adapters":
        return _TOP[name] if len(path) == 1 else _layer_axes(name, rank - 1)
    linear, part = name.rsplit("_", 1)
    kernel = _layer_axes(linear, rank - 1)
    pair: Axes = (kernel[-2], "rank") if part == "a" else ("rank", kernel[-1])
    return (*kernel[:-2], *pair)


def _layer_axes(name: str, rank: int) -> Axes:
    """Axes of a layer's parameter; what has no name there is small and stays whole."""
    return ("layers", *_LAYER.get(name, ("whole",) * rank))


def _sharding(
    axes: Axes, rules: Mapping[LogicalAxis, MeshAxis | None], mesh: AnyMesh
) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(rules[axis] for axis in axes)))


def _rules_for(config: DecoderConfig, mesh: AnyMesh) -> dict[LogicalAxis, MeshAxis | None]:
    """`RULES` for a model of this shape: whole what may stay whole, an error for what may not."""
    absent = set(MESH_AXES) - set(mesh.axis_names)
    if absent:
        raise ConfigError(
            f"The mesh has the axes {', '.join(map(str, mesh.axis_names))} and lacks "
            f"{', '.join(sorted(absent))}. Make it with `make_mesh`."
        )
    # Heads are counted, not their elements: a head is never split.
    counts: dict[LogicalAxis, tuple[str, int]] = {
        "vocab": ("vocab_size", config.vocab_size),
        "embed": ("hidden_size", config.hidden_size),
        "heads": ("num_attention_heads", config.num_attention_heads),
        "kv_heads": ("num_key_value_heads", config.num_key_value_heads),
    }
    if config.num_experts:
        counts["experts"] = ("num_experts", config.num_experts)
        counts["mlp"] = ("expert_size", config.expert_size)
    else:
        counts["mlp"] = ("intermediate_size", config.intermediate_size)
    rules = dict(RULES)
    for axis, (name, count) in counts.items():
        mesh_axis = rules[axis]
        if mesh_axis is None or count % mesh.shape[mesh_axis] == 0:
            continue
        parts = mesh.shape[mesh_axis]
        if axis not in ("vocab", "kv_heads"):
            raise ModelError(
                f"{name}={count} can't be divided over {mesh_axis}={parts} devices. Choose a mesh "
                f"whose {mesh_axis!r} axis divides {count}."
            )
        _log.warning("%s=%d is not a multiple of %s=%d: kept whole.", name, count, mesh_axis, parts)
        rules[axis] = None
    return rules
