"""What an update is made of, and how it is laid out in memory."""

from __future__ import annotations

from dataclasses import dataclass

from gymllm.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """What a batch is made of and how it is computed; `algorithm` says what is learnt from it."""

    groups_per_step: int = 4
    """Groups in one batch, after which new weights are published."""
    epochs: int = 1
    """How often a batch is gone over."""
    mini_batches: int = 1
    """Parts that each pass over a batch is cut into, an optimizer step each."""
    max_flat_groups: int = 200
    """algorithm.zero_variance refill: groups in a row that teach nothing, as their rewards are all equal,
    before the run stops."""
    rows: int = 0
    """Rows of a micro-batch; 0 is two, or as many as there must be for the mesh to divide them."""
    row_tokens: int = 0
    """Tokens of a row; 0 is twice the engine's context length, so that little is left empty."""
    smaller_shapes: int = 3
    """How many times a micro-batch is halved for what is left at a step's end; each size is compiled at the
    start."""
    share_prefixes: bool = True
    """Whether what a group's sequences have in common at their beginnings is computed once."""
    head_chunk: int = 512
    """Tokens whose logits are held at once."""
    reference_on_host: bool = False
    """algorithm.kl_coef > 0 without adapters: whether the frozen copy of the weights is kept in the host's
    memory, and only moved to the device to be used."""
    deterministic: bool = False
    """Whether a batch waits until it is whole and is then put in the order of its tasks: with
    rollout.max_lag 0, the same seed gives the same parameters, bit for bit on a CPU."""

    def __post_init__(self) -> None:
        for name in (
            "groups_per_step",
            "epochs",
            "mini_batches",
            "max_flat_groups",
            "head_chunk",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"learner.{name} must be >= 1, got {getattr(self, name)}.")
        for name in ("rows", "row_tokens", "smaller_shapes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"learner.{name} must be >= 0, got {getattr(self, name)}.")
        if self.mini_batches > self.groups_per_step:
            raise ConfigError(
                f"learner.mini_batches is {self.mini_batches}, but a batch has only "
                f"{self.groups_per_step} groups: set it to at most learner.groups_per_step."
            )

    @property
    def updates(self) -> int:
        """Optimizer steps on each batch."""
        return self.epochs * self.mini_batches
