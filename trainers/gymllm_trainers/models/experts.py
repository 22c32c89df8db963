"""A layer of experts: each token goes to the few that its router chooses; none is dropped.

On a mesh each device keeps some of the experts. The devices along the axis "expert" hand their tokens to each
other, each adds what its own experts make of them, and the sums go back to where the tokens are from.

Axes: M tokens, D model, E experts, F an expert's feed-forward, K experts of a token, S = M K.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from gymllm_trainers.models.product import product
from gymllm_trainers.models.sharding import ROW_AXES, rows_divided

Implementation = Literal["auto", "dense", "ragged"]
Kernels = tuple[Array, Array, Array]
"""Of experts: gate [E, D, F], up [E, D, F], down [E, F, D]."""


def mix_experts(
    x_MD: Array,
    router_DE: Array,
    gate_EDF: Array,
    up_EDF: Array,
    down_EFD: Array,
    *,
    experts_per_token: int,
    normalise: bool,
    activation: Callable[[Array], Array],
    implementation: Implementation = "auto",
) -> Array:
    """Sum of the chosen experts' feed-forwards, weighted by the router's shares (Qwen3-MoE).

    Args:
        x_MD: Tokens, after the norm.
        router_DE: The router's kernel; its softmax is over all experts, in float32.
        gate_EDF: Kernels of the experts' gates.
        up_EDF: Of what the gates multiply.
        down_EFD: Of what comes after.
        experts_per_token: How many each token goes to.
        normalise: Scale a token's shares to add up to one.
        activation: Of the gate.
        implementation: "dense" runs every expert on every token and adds in the order of the experts, so
            that a token's result doesn't depend on the others'; "ragged" sorts tokens by expert and
            multiplies each group by its own kernel; "auto" is dense on CPU, where XLA has no ragged
            product, else ragged.

    Returns:
        [M, D] in x's type.
    """
    mix = functools.partial(
        _mix,
        experts_per_token=experts_per_token,
        normalise=normalise,
        activation=activation,
        implementation=implementation,
    )
    kernels = (gate_EDF, up_EDF, down_EFD)
    if not rows_divided(x_MD):
        return mix(x_MD, router_DE, kernels, 0)

    # Left to XLA, tokens would be sorted by expert over all devices, each of them holding the whole batch.
    def on_device(x_MD: Array, router_DE: Array, kernels: Kernels) -> Array:
        first = jax.lax.axis_index("expert") * kernels[0].shape[0]
        x_MD = jax.lax.all_gather(x_MD, "expert", tiled=True)
        return jax.lax.psum_scatter(mix(x_MD, router_DE, kernels, first), "expert", tiled=True)

    rows, experts = PartitionSpec(ROW_AXES), PartitionSpec("expert")
    divided = jax.shard_map(
        on_device,
        in_specs=(rows, PartitionSpec(), (experts,) * 3),
        out_specs=rows,
        axis_names=set(ROW_AXES),
        check_vma=False,
    )
    return divided(x_MD, router_DE, kernels)


def _mix(
    x_MD: Array,
    router_DE: Array,
    kernels: Kernels,
    first: Array | int,
    *,
    experts_per_token: int,
    normalise: bool,
    activation: Callable[[Array], Array],
    implementation: Implementation,
) -> Array:
    """What the experts from `first` on, of which these are the kernels, add to each token."""
    logits_ME = product(x_MD, router_DE).astype(jnp.float32)
    share_MK, chosen_MK = jax.lax.top_k(jax.nn.softmax(logits_ME, axis=-1), experts_per_token)
    if normalise:
        share_MK /= jnp.sum(share_MK, axis=-1, keepdims=True)
    share_MK = share_MK.astype(x_MD.dtype)
    chosen_MK -= first

    def dense(x_MD: Array, chosen_MK: Array, share_MK: Array) -> Array:
        return _dense(x_MD, chosen_MK, share_MK, kernels, activation)

    def ragged(x_MD: Array, chosen_MK: Array, share_MK: Array) -> Array:
        return _ragged(x_MD, chosen_MK, share_MK, kernels, activation)

    match implementation:
        case "dense":
            return dense(x_MD, chosen_MK, share_MK)
        case "ragged":
            return ragged(x_MD, chosen_MK, share_MK)
        case "auto":
            return jax.lax.platform_dependent(x_MD, chosen_MK, share_MK, cpu=dense, default=ragged)


def _dense(
    x_MD: Array,
    chosen_MK: Array,
    share_MK: Array,
    kernels: Kernels,
    activation: Callable[[Array], Array],
) -> Array:
    experts = kernels[0].shape[0]

    # Recomputed in the backward pass: what every expert makes of every token is large.
    @jax.checkpoint
    def expert(
        sum_MD: Array, inputs: tuple[Array, tuple[Array, Array, Array]]
    ) -> tuple[Array, None]:
        index, (gate_DF, up_DF, down_FD) = inputs
        share_M = jnp.sum(jnp.where(chosen_MK == index, share_MK, 0), axis=1)
        inner_MF = activation(product(x_MD, gate_DF)) * product(x_MD, up_DF)
        return sum_MD + share_M[:, None] * product(inner_MF, down_FD), None

    return jax.lax.scan(expert, jnp.zeros_like(x_MD), (jnp.arange(experts), kernels))[0]


def _ragged(
    x_MD: Array,
    chosen_MK: Array,
    share_MK: Array,
    kernels: Kernels,
    activation: Callable[[Array], Array],
) -> Array:
    experts, per_token = kernels[0].shape[0], chosen_MK.shape[1]
    # The experts of other devices come last, and no kernel is for them.
    elsewhere_MK = (chosen_MK < 0) | (chosen_MK >= experts)
    expert_S = jnp.where(elsewhere_MK, experts, chosen_MK).reshape(-1)
    order_S = jnp.argsort(expert_S, stable=True)
    sizes_E = jnp.bincount(expert_S, length=experts + 1)[:experts].astype(jnp.int32)
    gate_EDF, up_EDF, down_EFD = (kernel.astype(x_MD.dtype) for kernel in kernels)
    sorted_SD = x_MD[order_S // per_token]
    inner_SF = activation(jax.lax.ragged_dot(sorted_SD, gate_EDF, sizes_E))
    inner_SF *= jax.lax.ragged_dot(sorted_SD, up_EDF, sizes_E)
    mixed_SD = jax.lax.ragged_dot(inner_SF, down_EFD, sizes_E)
    # Back in the tokens' order, and each token's few added in the order that the router ranks them.
    parts_MKD = mixed_SD[jnp.argsort(order_S)].reshape(*chosen_MK.shape, -1)
    parts_MKD = jnp.where(elsewhere_MK[..., None], 0, parts_MKD)
    return jnp.einsum("mkd,mk->md", parts_MKD, share_MK)
