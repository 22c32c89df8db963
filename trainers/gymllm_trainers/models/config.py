"""The shape of a decoder, in the words of the hub's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass

from gymllm.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything that decides the decoder's parameters and arithmetic.

    Covers Llama, SmolLM2 and Qwen3 (`qk_norm`).
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
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    qk_norm: bool = False
    """RMS norm of each query and key head before RoPE (Qwen3)."""

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})."
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even for RoPE, got {self.head_dim}.")

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        query = self.num_attention_heads * self.head_dim
        key = self.num_key_value_heads * self.head_dim
        layer = self.hidden_size * (2 * query + 2 * key + 3 * self.intermediate_size + 2)
        layer += 2 * self.head_dim if self.qk_norm else 0
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * layer + embeddings + self.hidden_size
