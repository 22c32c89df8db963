"""The shape of a decoder: what the hub's `config.json` says, in one vocabulary for every family."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gymllm.errors import ModelError

Activation = Literal["silu", "gelu_pytorch_tanh"]
NO_WINDOW = 2**30
"""The window of a layer that sees everything before it, where others of the model don't."""
MOST = {"num_hidden_layers": 2**12, "num_experts": 2**14}
"""Sizes that no model has, of what there is an object for each: a damaged config is refused before the
memory is used up."""
_MOST_SIZE = 2**31 - 1  # of any other: what an axis may have


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How RoPE's frequencies are stretched beyond the length that a model was first trained on."""

    kind: Literal["linear", "llama3"]
    """Positions divided by `factor` (Chen et al. 2023, arXiv:2306.15595), or, as in Llama 3.1, only in the
    frequencies that turn less than `low_freq_factor` times within the original length; blended up to
    `high_freq_factor`."""
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise ModelError(f"RoPE's scaling factor must be > 0 and finite, got {self.factor}.")
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor > 0:
            raise ModelError(
                "llama3 RoPE scaling needs high_freq_factor > low_freq_factor > 0, got "
                f"{self.high_freq_factor} and {self.low_freq_factor}."
            )

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        """The frequencies [H/2], radians a token, that are used instead of these."""
        if self.kind == "linear":
            return frequencies / self.factor
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything that decides the decoder's parameters and arithmetic.

    The defaults are Llama's; Qwen2, Qwen3, Qwen3-MoE, Gemma 2 and Gemma 3 differ from it by the options.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    """Longest sequence the model was made for, in tokens."""
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rope_local_theta: float | None = None
    """RoPE's base in the sliding layers, which are then not scaled (Gemma 3); None: as in the others."""
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    qk_norm: bool = False
    """RMS norm of each query and key head before RoPE (Qwen3, Gemma 3)."""
    qkv_bias: bool = False
    """Biases of the query, key and value projections (Qwen2)."""
    output_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    """Biases of the feed-forward's three projections."""
    hidden_act: Activation = "silu"
    norm_offset: bool = False
    """RMS norms multiply by 1 + weight instead of weight (Gemma)."""
    post_norms: bool = False
    """An RMS norm of what attention and feed-forward add to the residual stream (Gemma 2 and 3)."""
    scale_embeddings: bool = False
    """Embeddings are multiplied by sqrt(hidden_size) (Gemma)."""
    query_pre_attn_scalar: float | None = None
    """Scores are divided by its root; None: by the root of head_dim."""
    attention_softcap: float | None = None
    """Scores s become c tanh(s / c) (Gemma 2)."""
    final_softcap: float | None = None
    """The same of the logits."""
    sliding_window: int | None = None
    """How many tokens, its own included, a query of a sliding layer sees."""
    sliding_layers: tuple[bool, ...] = ()
    """Which layers slide, one entry a layer; empty when none does."""
    num_experts: int = 0
    """Experts of a layer's feed-forward, each of `expert_size`; 0: one dense feed-forward."""
    experts_per_token: int = 0
    expert_size: int = 0
    norm_topk_prob: bool = False
    """The shares of a token's experts are scaled to add up to one."""

    def __post_init__(self) -> None:
        for name in _SIZES:
            check_size(name, getattr(self, name))
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ModelError(f"{name} must be > 0 and finite, got {value}.")
        if self.num_experts:
            check_size("num_experts", self.num_experts)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})."
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even for RoPE, got {self.head_dim}.")
        if self.sliding_layers and len(self.sliding_layers) != self.num_hidden_layers:
            raise ModelError(
                f"sliding_layers has {len(self.sliding_layers)} entries for num_hidden_layers="
                f"{self.num_hidden_layers}; expected one a layer, or none."
            )
        if any(self.sliding_layers) and not (self.sliding_window or 0) > 0:
            raise ModelError(
                f"Layers slide, so sliding_window must be >= 1, got {self.sliding_window}."
            )
        if self.num_experts and not 0 < self.experts_per_token <= self.num_experts:
            raise ModelError(
                f"experts_per_token must be between 1 and num_experts ({self.num_experts}), got "
                f"{self.experts_per_token}."
            )
        if self.num_experts and self.expert_size < 1:
            raise ModelError(f"expert_size must be >= 1, got {self.expert_size}.")

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by."""
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    @property
    def windows(self) -> tuple[int, ...] | None:
        """Window of each layer, in tokens (`NO_WINDOW` where it sees all); None if no layer slides."""
        if not any(self.sliding_layers):
            return None
        assert self.sliding_window is not None
        return tuple(self.sliding_window if slides else NO_WINDOW for slides in self.sliding_layers)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        layer = sum(math.prod(shape) for shape in layer_shapes(self).values())
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * layer + embeddings + self.hidden_size


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_NUMBERS = (
    "rope_theta",
    "rope_local_theta",
    "rms_norm_eps",
    "query_pre_attn_scalar",
    "attention_softcap",
    "final_softcap",
)


def check_size(name: str, value: int) -> None:
    """Refuses a size that no model has.

    Raises:
        ModelError: Not from 1 to its most.
    """
    most = MOST.get(name, _MOST_SIZE)
    if not 1 <= value <= most:
        raise ModelError(f"{name} must be from 1 to {most}, got {value}.")


def rope_frequencies(config: DecoderConfig, *, local: bool = False) -> np.ndarray:
    """RoPE's frequencies [H/2], radians a token, float64 (Su et al. 2021, arXiv:2104.09864).

    Args:
        config: The decoder's shape.
        local: Of the sliding layers.
    """
    apart = local and config.rope_local_theta is not None
    theta = config.rope_local_theta if apart else config.rope_theta
    assert theta is not None
    half = config.head_dim // 2
    frequencies = theta ** (-np.arange(half, dtype=np.float64) / half)
    if config.rope_scaling is None or apart:
        return frequencies
    return config.rope_scaling.scale(frequencies)


def layer_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter of a layer by name: kernels [in, out], experts' [E, in, out], biases, norms."""
    d, f, head = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_attention_heads * head, config.num_key_value_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "query": (d, query),
        "key": (d, key),
        "value": (d, key),
        "output": (query, d),
    }
    if config.num_experts:
        e, f = config.num_experts, config.expert_size
        shapes |= {
            "router": (d, e),
            "experts_gate": (e, d, f),
            "experts_up": (e, d, f),
            "experts_down": (e, f, d),
        }
    else:
        shapes |= {"gate": (d, f), "up": (d, f), "down": (f, d)}
    if config.qkv_bias:
        shapes |= {"query_bias": (query,), "key_bias": (key,), "value_bias": (key,)}
    if config.output_bias:
        shapes["output_bias"] = (d,)
    if config.mlp_bias and not config.num_experts:
        shapes |= {"gate_bias": (f,), "up_bias": (f,), "down_bias": (d,)}
    shapes |= {"attention_norm": (d,), "mlp_norm": (d,)}
    if config.post_norms:
        shapes |= {"attention_post_norm": (d,), "mlp_post_norm": (d,)}
    if config.qk_norm:
        shapes |= {"query_norm": (head,), "key_norm": (head,)}
    return shapes
