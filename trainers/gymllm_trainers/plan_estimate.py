"""What a training step takes on a mesh, by arithmetic alone: memory, FLOPs, traffic, and the best meshes.

A model to choose by, not a measurement: parameters, optimizer and gradient are exact, activations are what
has to be kept, and time is the longest of computing, reading memory and sending, as if all of them
overlapped. `plan_compile` asks the compiler about the few that are worth it.

Figures are one device's unless said otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jax.sharding import AbstractMesh

from gymllm.errors import ConfigError, ModelError
from gymllm_trainers.mesh import check_mesh, row_parts
from gymllm_trainers.models.config import DecoderConfig, layer_shapes
from gymllm_trainers.models.decoder import RematPolicy
from gymllm_trainers.models.sharding import MESH_AXES, param_shardings
from gymllm_trainers.plan_chips import Chip

FULLEST = 0.92
"""Share of a device's memory that is planned with: compilers and other programs need some."""
_OVERHEAD = 1.2
"""What compilers add to what has to be held: libtpu 0.0.42 held 1.16 and 1.23 times as much for Qwen3-0.6B on
a v5e:2x2 and 8B on a v5p:4x4x4."""
_WORDS_HELD = 65_536
"""Words of the vocabulary whose logits are held at once (`logprob_head`)."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One run's training, whatever the devices."""

    model: DecoderConfig
    weight_bytes: int
    """Of a parameter."""
    compute_bytes: int
    """Of an activation."""
    remat: RematPolicy
    trained: int
    """Parameters that are trained."""
    state_bytes: float
    """Of the optimizer, for each trained parameter."""
    tokens: int
    """Most tokens of a step, all devices together."""
    longest: int
    """Tokens of the longest sequence."""
    head_chunk: int

    @property
    def adapts(self) -> bool:
        """Whether adapters alone are trained."""
        return self.trained < self.model.parameters


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How that is laid out."""

    mesh: tuple[int, ...]
    """Sizes of `MESH_AXES`."""
    rows: int
    """Of a micro-batch."""
    row_tokens: int

    @property
    def sizes(self) -> dict[str, int]:
        """By axis."""
        return dict(zip(MESH_AXES, self.mesh, strict=True))

    @property
    def abstract(self) -> AbstractMesh:
        """To ask where things would lie."""
        return AbstractMesh(self.mesh, MESH_AXES)

    @property
    def tokens(self) -> int:
        """Of a micro-batch, all devices together: the token budget."""
        return self.rows * self.row_tokens

    def __str__(self) -> str:
        axes = ", ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1)
        return f"{axes or 'one device'}; {self.rows} rows of {self.row_tokens:,}"


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Of one optimizer step, all devices together."""

    model: float
    """What the mathematics needs: forward and backward."""
    computed: float
    """With what is computed again in the backward pass."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Of a layout."""

    layout: Layout
    parameters: float
    optimizer: float
    gradient: float
    temporaries: float
    """Activations, a layer's gathered weights, the micro-batch's own gradient, logits; or what a step makes
    anew, if that is more."""
    compute_s: float
    """Of a step, at the device's peak."""
    memory_s: float
    """... at its memory's bandwidth."""
    links_s: float
    """... at its links' bandwidth."""
    mfu: float
    """Highest share of the peak that useful FLOPs can have."""

    @property
    def bytes(self) -> float:
        """All that the training holds at once."""
        return self.parameters + self.optimizer + self.gradient + self.temporaries

    @property
    def step_s(self) -> float:
        """Seconds of a step if computing, memory and links never wait for each other."""
        return max(self.compute_s, self.memory_s, self.links_s)


def step_flops(work: Work) -> Flops:
    """FLOPs of a step with `work.tokens` tokens, all trained on, in sequences of the longest kind.

    2 FLOPs a parameter and token forward, twice that backward (Kaplan et al. 2020, arXiv:2001.08361,
    sec. 2.1), and attention's 4 a query head's element and key. With frozen kernels there is no gradient by
    them.
    """
    model = work.model
    shapes = layer_shapes(model)
    share = model.experts_per_token / model.num_experts if model.num_experts else 1.0
    a_layer = sum(
        math.prod(shape) * (share if name.startswith("experts") else 1)
        for name, shape in shapes.items()
        if len(shape) > 1
    )
    products = 2 * (model.num_hidden_layers * a_layer + model.hidden_size * model.vocab_size)
    attention = (
        4 * model.num_hidden_layers * model.num_attention_heads * model.head_dim * work.longest / 2
    )
    forward = (products + attention) * work.tokens
    backward = 2 * forward - (products * work.tokens if work.adapts else 0)
    again = forward if work.remat == "full" else attention * work.tokens
    return Flops(model=forward + backward, computed=forward + backward + again)


def estimate(work: Work, layout: Layout, chip: Chip) -> Estimate:
    """What a step takes.

    Raises:
        ModelError: The mesh doesn't divide the model.
        ConfigError: ... or the rows.
    """
    mesh, sizes, model = layout.abstract, layout.sizes, work.model
    check_mesh(mesh, model, row_tokens=layout.row_tokens)
    if layout.rows % row_parts(mesh):
        raise ConfigError(f"{layout.rows} rows can't be divided over {row_parts(mesh)} parts.")
    held = elements(model, mesh)
    devices = math.prod(layout.mesh)
    parameters = held * work.weight_bytes
    # Adapters are small; what divides them is what divides the kernels they belong to.
    trained = held * work.trained / model.parameters
    frozen = work.trained / devices if work.adapts else 0.0
    parameters += frozen * 4
    tokens = layout.tokens / (row_parts(mesh) * sizes["context"])
    activations = _activations(work, tokens, sizes["tensor"])
    layer = sum(map(math.prod, layer_shapes(model).values())) / sizes["tensor"] / sizes["expert"]
    gathered = 2 * layer * work.compute_bytes  # the next layer's are fetched meanwhile
    logits = 3 * min(work.head_chunk, tokens) * min(model.vocab_size, _WORDS_HELD) * 4
    head = model.hidden_size * model.vocab_size / sizes["tensor"] * (work.compute_bytes + 4)
    part = trained * work.weight_bytes
    anew = trained * (work.weight_bytes + work.state_bytes)  # a step donates neither
    flops = step_flops(work)
    micro_batches = -(-work.tokens // layout.tokens)
    compute_s = flops.computed / devices / chip.flops
    passes = 4 if work.remat == "full" else 3
    read = passes * layer * model.num_hidden_layers * work.compute_bytes
    read += passes * activations
    sent = _sent(work, layout, held, tokens)
    memory_s = (
        micro_batches * read + 6 * (part + trained * work.state_bytes)
    ) / chip.memory_bandwidth
    links_s = micro_batches * sent / chip.link_bandwidth
    longest = max(compute_s, memory_s, links_s)
    return Estimate(
        layout=layout,
        parameters=parameters,
        optimizer=trained * work.state_bytes,
        gradient=trained * 4,
        temporaries=max(_OVERHEAD * (activations + gathered + logits + head + part), anew),
        compute_s=compute_s,
        memory_s=memory_s,
        links_s=links_s,
        mfu=flops.model / devices / chip.flops / longest,
    )


def elements(model: DecoderConfig, mesh: AbstractMesh) -> int:
    """Elements of the model's parameters that one device keeps."""
    shardings = param_shardings(model, mesh)
    shape = (model.vocab_size, model.hidden_size)
    whole: dict[str, tuple[int, ...]] = {"embedding": shape, "norm": (model.hidden_size,)}
    if not model.tie_word_embeddings:
        whole["head"] = shape[::-1]
    total = 0
    for name, sharding in shardings.items():
        if isinstance(sharding, dict):
            shapes = layer_shapes(model)
            total += sum(
                math.prod(inner.shard_shape((model.num_hidden_layers, *shapes[key])))
                for key, inner in sharding.items()
            )
        else:
            total += math.prod(sharding.shard_shape(whole[name]))
    return total


def _activations(work: Work, tokens: float, tensor: int) -> float:
    """Bytes kept of the layers for the backward pass, and what one layer holds while it is computed."""
    model = work.model
    width = model.hidden_size
    heads = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim / tensor
    mixed = model.num_attention_heads * model.head_dim / tensor
    inner = (
        model.intermediate_size
        if not model.num_experts
        else model.experts_per_token * model.expert_size
    )
    products = heads + mixed + 2 * inner / tensor + 2 * width
    everything = products + heads + inner / tensor + 4 * width
    kept = {"full": width, "dots": width + products, "offload": width, "none": everything}[
        work.remat
    ]
    return tokens * work.compute_bytes * (model.num_hidden_layers * kept + 2 * everything)


def _sent(work: Work, layout: Layout, held: int, tokens: float) -> float:
    """Bytes that a device sends for one micro-batch."""
    model, sizes = work.model, layout.sizes
    passes = 4 if work.remat == "full" else 3
    layers, width = model.num_hidden_layers, model.hidden_size * work.compute_bytes

    def ring(axis: str) -> float:
        return (sizes[axis] - 1) / sizes[axis]

    whole = held * sizes["fsdp"]  # of what `fsdp` divides, as it is when used
    trained = held * work.trained / model.parameters
    sent = whole * work.weight_bytes * ring("fsdp") * (passes - 1)
    if not work.adapts:
        sent += whole * work.weight_bytes * ring("fsdp")
    copies = sizes["data"] * sizes["context"] * (1 if model.num_experts else sizes["expert"])
    sent += 2 * trained * 4 * (copies - 1) / copies
    # After attention and after the feed-forward, and by their inputs in the backward pass.
    sent += 2 * passes * layers * 2 * ring("tensor") * tokens * width
    heads = (2 * model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    sent += (
        passes * layers * ring("context") * tokens * heads / sizes["tensor"] * work.compute_bytes
    )
    if model.num_experts:
        sent += 2 * passes * layers * (sizes["expert"] - 1) * tokens * width
    return sent


# ---------------------------------------------------------------------- which is best


def best_layouts(
    work: Work, chip: Chip, devices: int, *, held_bytes: float = 0.0, count: int = 3
) -> list[Estimate]:
    """Layouts that fit, the fastest first; where a device's figures aren't known, those that hold the least.

    Args:
        work: What is trained.
        chip: Each device.
        devices: How many.
        held_bytes: What else each device holds, such as an engine's pages.
        count: How many at most.
    """
    limit = (FULLEST * chip.memory_bytes or math.inf) - held_bytes
    timed = not math.isnan(chip.flops)

    def worth(one: Estimate) -> tuple[float, ...]:
        return (one.step_s, one.links_s, one.bytes) if timed else (one.bytes,)

    found: list[Estimate] = []
    for mesh in _meshes(work.model, devices):
        fitting = [one for one in _layouts_of(work, mesh, chip) if one.bytes <= limit]
        # The largest micro-batch that fits gathers weights the least often.
        if fitting:
            found.append(
                min(fitting, key=lambda one: (one.step_s if timed else 0.0, one.layout.tokens))
            )
    found.sort(key=worth)
    return found[:count]


def smallest(work: Work, chip: Chip, devices: int) -> Estimate | None:
    """The layout that holds the least on each device; None if no mesh divides the model."""
    every = [one for mesh in _meshes(work.model, devices) for one in _layouts_of(work, mesh, chip)]
    return min(every, key=lambda one: one.bytes, default=None)


def _layouts_of(work: Work, mesh: tuple[int, ...], chip: Chip) -> Iterator[Estimate]:
    parts = row_parts(AbstractMesh(mesh, MESH_AXES))
    row_tokens = max(2 * work.longest, 2048)
    context = mesh[MESH_AXES.index("context")]
    row_tokens = -(-row_tokens // (128 * context)) * 128 * context
    for each in (1, 2, 4, 8, 16):
        layout = Layout(mesh=mesh, rows=each * parts, row_tokens=row_tokens)
        if each > 1 and layout.tokens > 2 * work.tokens:
            return  # most of it would be padding
        try:
            yield estimate(work, layout, chip)
        except (ModelError, ConfigError):
            return


def _meshes(model: DecoderConfig, devices: int) -> Iterator[tuple[int, ...]]:
    """Every way to divide so many devices that may be worth a look."""
    for tensor in _divisors(devices, most=16):
        if model.num_key_value_heads % tensor and tensor % model.num_key_value_heads:
            continue
        for context in _divisors(devices // tensor, most=8):
            left = devices // tensor // context
            for expert in _divisors(left, most=64) if model.num_experts else (1,):
                for fsdp in _divisors(left // expert):
                    data = left // expert // fsdp
                    yield (data, fsdp, tensor, expert, context)


def _divisors(number: int, most: int | None = None) -> list[int]:
    end = number if most is None else min(number, most)
    return [size for size in range(1, end + 1) if number % size == 0]


def with_remat(work: Work, remat: RematPolicy) -> Work:
    """The same, keeping other activations."""
    return replace(work, remat=remat)
