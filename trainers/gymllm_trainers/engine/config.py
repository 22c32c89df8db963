"""Sizes of the embedded engine. All its compiled shapes follow from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from gymllm.errors import ConfigError
from gymllm_trainers.models.config import DecoderConfig

_SMALL_MODEL = 20_000_000
"""Parameters that a device goes through in less time than the host needs for a step."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the embedded engine serves."""

    slots: int = 32
    """Most requests that generate at once."""
    context_length: int = 384
    """Most tokens of prompt and generation together; what a request doesn't use costs nothing."""
    small_batch: int = 8
    """Rows of the smallest batch shape; each following one has four times as many, up to a row for every
    slot."""
    prefill_tokens: tuple[int, ...] = (64, 256)
    """Most prompt tokens that one step takes, of all requests together; each size is compiled once a batch
    shape, and a step takes the smallest that holds what there is."""
    page_size: int = 16
    """Tokens of a page of the cache; also of a prefill block."""
    pages: int = 0
    """Pages of the cache; 0 is enough for every slot's longest conversation, or as many as cache_mb holds."""
    cache_mb: int = 2048
    """With pages 0: most memory that the cache takes, in MiB."""
    reuse_lag: int = 2
    """Policy versions that kept keys and values may be behind when a new request goes on from them; older
    ones are computed again."""
    on_publish: Literal["keep", "recompute"] = "keep"
    """What running requests do when weights are published: keep their keys and values, or compute them
    again with the new weights before they go on."""
    burst: int = 0
    """Tokens that a step generates for each request one after another, without the host between them, where
    all have been generating for a while and nobody waits; new weights and cancellations wait for its end.
    0: 8 for models so small that the host would take longer than the device, else 1."""
    cache_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the kept keys and values."""
    tensor: int = 1
    """Devices that one copy of the model is divided over, by heads."""
    replicas: int = 1
    """Copies of the model, each on devices of its own."""
    kernels: Literal["auto", "cpu", "xla"] = "auto"
    """cpu: matrix products and attention by our own C code, compiled at the first start, which needs a C
    compiler; xla: all by XLA; auto: cpu where that can be had."""

    def __post_init__(self) -> None:
        for name in ("slots", "small_batch", "page_size", "cache_mb", "tensor", "replicas"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name} must be >= 1, got {getattr(self, name)}.")
        if self.context_length < 2:
            raise ConfigError(f"engine.context_length must be >= 2, got {self.context_length}.")
        for name in ("reuse_lag", "pages", "burst"):
            if getattr(self, name) < 0:
                raise ConfigError(f"engine.{name} must be >= 0, got {getattr(self, name)}.")
        sizes = self.prefill_tokens
        if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
            raise ConfigError(
                f"engine.prefill_tokens must be different sizes >= 1 in rising order, got {sizes}."
            )
        if self.pages and self.pages < self.table_pages + 1:
            raise ConfigError(
                f"engine.pages must hold one conversation of engine.context_length "
                f"({self.context_length} tokens, {self.table_pages} pages of {self.page_size}) and one "
                f"page more, got {self.pages}."
            )

    @property
    def table_pages(self) -> int:
        """Pages of the longest conversation."""
        return -(-self.context_length // self.page_size)

    def resolved(self, model: DecoderConfig) -> EngineConfig:
        """The same with `pages` as a model's cache has them, and `burst` as suits its size.

        Raises:
            ConfigError: cache_mb holds less than one conversation.
        """
        if not self.burst:
            small = model.parameters <= _SMALL_MODEL
            return replace(self, burst=8 if small else 1).resolved(model)
        if self.pages:
            return self
        heads = model.num_hidden_layers * model.num_key_value_heads
        width = {"float32": 4, "bfloat16": 2}[self.cache_dtype]
        page_bytes = 2 * heads * model.head_dim * self.page_size * width
        fitting = (self.cache_mb << 20) // page_bytes
        if fitting < self.table_pages + 1:
            needed = -(-(self.table_pages + 1) * page_bytes // 2**20)
            raise ConfigError(
                f"engine.cache_mb = {self.cache_mb} holds {fitting} pages of {page_bytes:,} bytes, but one "
                f"conversation of engine.context_length = {self.context_length} takes "
                f"{self.table_pages + 1}: set cache_mb to {needed} or more, or context_length lower."
            )
        return replace(self, pages=min(fitting, self.total_pages))

    @property
    def total_pages(self) -> int:
        """Pages of the cache, the one that padding is written to (page 0) included."""
        return self.pages or self.slots * self.table_pages + 1

    @property
    def row_shapes(self) -> tuple[int, ...]:
        """Decode rows of a step."""
        rows = [min(self.small_batch, self.slots)]
        while rows[-1] < self.slots:
            rows.append(min(4 * rows[-1], self.slots))
        return tuple(rows)

    @property
    def block_shapes(self) -> tuple[int, ...]:
        """Prefill blocks of a step; 0 is a step that only decodes."""
        return (0, *sorted({-(-tokens // self.page_size) for tokens in self.prefill_tokens}))

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Every compiled step, as (decode rows, prefill blocks)."""
        return tuple((rows, blocks) for blocks in self.block_shapes for rows in self.row_shapes)
