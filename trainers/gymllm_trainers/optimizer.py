"""The optimizer: by optax's name, with its schedule, clipping, and what it keeps between steps."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from gymllm.errors import ConfigError, UnknownNameError
from gymllm_trainers.optimizer_state import StateDtype, offloaded, stored_as, with_mean

Tree = Any
"""A pytree of arrays: JAX's own functions say no more of it."""
ScheduleName = Literal["linear", "cosine", "constant", "wsd"]
Factory = Callable[..., optax.GradientTransformation]

_MOMENTS = ("adamw", "lion", "muon", "sgd")
"""Optimizers whose state is moments and nothing else, so that they may be rounded."""
_WSD_FALL = 0.2
"""Share of a run's steps in which wsd falls."""
_NOT_MATRICES = ("embedding", "head", "score", "value_head")
"""Parameters of two axes that Muon leaves to AdamW, as its authors do: their rows are looked up or told apart
one by one."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How the gradient becomes a change of the parameters."""

    name: str = "adamw"
    """adamw, adafactor, muon, lion, sgd, or any other optimizer of optax or optax.contrib by its name there.
    muon: matrices of layers and adapters only, each layer's by itself; everything else by AdamW."""
    learning_rate: float = 1.5e-4
    """Peak learning rate."""
    schedule: ScheduleName = "linear"
    """What it does after its peak, until the run's last step. linear, cosine: it falls to final_rate;
    constant: it stays; wsd: it stays, and falls linearly in the run's last fifth (Hu et al. 2024,
    arXiv:2404.06395, who fall exponentially in the last tenth)."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises to its peak."""
    final_rate: float = 0.1
    """Learning rate at the run's last step, as a share of its peak; 1 keeps it."""
    b1: float = 0.9
    """Decay of the first moment, where the optimizer has one of that name; muon: of AdamW's part."""
    b2: float = 0.99
    """Decay of the second moment, likewise."""
    eps: float | None = None
    """Added to what an update is divided by; None: the optimizer's own (AdamW: 1e-8)."""
    weight_decay: float = 0.0
    """Decoupled weight decay, times the learning rate. Norms and biases are not decayed; muon: nor is what
    AdamW does."""
    max_grad_norm: float = 1.0
    """The gradient's global norm is clipped to this; 0 doesn't."""
    ema_decay: float = 0.0
    """Decay of an exponential mean of the parameters, kept in float32 and exported on demand; 0: none."""
    state_dtype: StateDtype = "float32"
    """What moments are kept in between steps. bfloat16: half the memory; int8: a quarter, in blocks with a
    scale each (Dettmers et al. 2021, arXiv:2110.02861)."""
    offload: bool = False
    """Whether moments and the mean of the parameters wait in the host's memory between steps."""
    kwargs: Mapping[str, bool | int | float | str] = field(
        default_factory=dict[str, "bool | int | float | str"]
    )
    """Other arguments of the optimizer, by optax's names, such as momentum for sgd:
    --optimizer.kwargs.momentum 0.9."""

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"optimizer.learning_rate must be > 0, got {self.learning_rate}.")
        for name in ("warmup_steps", "weight_decay", "max_grad_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"optimizer.{name} must be >= 0, got {getattr(self, name)}.")
        for name in ("b1", "b2", "ema_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"optimizer.{name} must be from 0 to below 1, got {getattr(self, name)}."
                )
        if not 0 <= self.final_rate <= 1:
            raise ConfigError(f"optimizer.final_rate must be from 0 to 1, got {self.final_rate}.")
        if self.eps is not None and not self.eps > 0:
            raise ConfigError(f"optimizer.eps must be > 0, got {self.eps}.")
        if self.state_dtype != "float32" and self.name not in _MOMENTS:
            raise ConfigError(
                f"optimizer.state_dtype {self.state_dtype} is for optimizers whose state is moments "
                f"({', '.join(_MOMENTS)}), got optimizer.name {self.name}. Leave state_dtype at float32, "
                "or choose one of these."
            )
        for name in self.kwargs:
            if name in self.__dataclass_fields__:
                raise ConfigError(
                    f"optimizer.kwargs.{name} is {self.kwargs[name]!r}, but that is a setting itself: set "
                    f"optimizer.{name} instead."
                )
        _factory(self)


def check_optimizer(config: OptimizerConfig) -> None:
    """Refuses settings that the optimizer of that name doesn't take; makes nothing.

    Raises:
        ConfigError: There is one; says what it takes.
    """
    factory = _factory(config)
    _settings(config, factory)
    parameters = inspect.signature(factory).parameters
    free = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    takes = [name for name in parameters if name not in OptimizerConfig.__dataclass_fields__]
    for name in config.kwargs:
        if name not in parameters and not free:
            raise UnknownNameError(
                f"argument of optimizer.name {config.name}, optimizer.kwargs", name, takes
            )


def make_optimizer(
    config: OptimizerConfig, total_steps: int | None
) -> optax.GradientTransformation:
    """The optimizer that a configuration describes.

    Its `update` needs the parameters. Moments have the dtype of what `init` gets and lie where that lies:
    give it the parameters in float32, whatever they are kept in.

    Args:
        config: Which, and how.
        total_steps: Steps of the whole run, over which the learning rate falls; None keeps it at its peak.

    Raises:
        ConfigError: Optax refuses the arguments, the optimizer needs more than gradients and parameters, or
            the platform has no host memory to offload to.
    """
    made = _made(config, learning_rate(config, total_steps))
    if config.max_grad_norm:
        made = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), made)
    made = stored_as(made, config.state_dtype)
    if config.ema_decay:
        made = with_mean(made, decay=config.ema_decay)
    return offloaded(made) if config.offload else made


def learning_rate(config: OptimizerConfig, total_steps: int | None) -> optax.Schedule:
    """Learning rate of each step, from 0; it is never 0 at the first, which would change nothing."""
    peak, rising = config.learning_rate, config.warmup_steps
    rise = optax.linear_schedule(peak / (rising + 1), peak, rising)
    falling = max((total_steps or 0) - rising, 1)
    last = peak * (config.final_rate if total_steps else 1.0)
    if config.schedule == "cosine":
        rest = optax.cosine_decay_schedule(peak, falling, alpha=last / peak)
    elif config.schedule == "constant":
        rest = optax.constant_schedule(peak)
    elif config.schedule == "wsd":
        fall = max(round(_WSD_FALL * falling), 1)
        rest = optax.linear_schedule(peak, last, fall, transition_begin=falling - fall)
    else:
        rest = optax.linear_schedule(peak, last, falling)
    return optax.join_schedules([rise, rest], [rising])


def decayed(params: Tree) -> Tree:
    """Whether weight decay acts on each parameter: on all but norms and biases, by their names or shape."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.ndim >= 2 and not _name(path).endswith(("norm", "bias")), params
    )


def muon_axes(params: Tree) -> Tree:
    """What Muon makes orthogonal of each parameter: its last two axes, of each layer and expert by itself.

    Returns:
        `optax.contrib.MuonDimensionNumbers` for a matrix, None for what AdamW does.
    """

    def axes(path: tuple[object, ...], leaf: Tree) -> optax.contrib.MuonDimensionNumbers | None:
        name = _name(path)
        matrix = leaf.ndim >= 2 and min(leaf.shape[-2:]) > 1
        if not matrix or name.endswith(("norm", "bias")) or name in _NOT_MATRICES:
            return None
        return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)

    return jax.tree_util.tree_map_with_path(axes, params)


def _name(path: tuple[object, ...]) -> str:
    """The parameter's own name: Flax keeps an array as a variable's attribute, `value`."""
    names = [key for key in path if not isinstance(key, jax.tree_util.GetAttrKey)]
    return str(getattr(names[-1], "key", names[-1])) if names else ""


# ------------------------------------------------------------------ by name


def _made(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    factory = _factory(config)
    arguments: dict[str, object] = {"learning_rate": schedule, **_settings(config, factory)}
    if config.name == "muon":
        # One learning rate for both parts: Muon's updates get the size of AdamW's (Liu et al. 2025,
        # arXiv:2502.16982, sec. 2.2).
        arguments |= {"muon_weight_dimension_numbers": muon_axes, "consistent_rms": 0.2}
    arguments |= config.kwargs
    try:
        made = factory(**arguments)
        probe = {"w": jnp.zeros((2, 2))}
        jax.eval_shape(lambda tree: made.update(tree, made.init(tree), tree)[0], probe)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer.name {config.name} can't be used with optimizer.kwargs "
            f"{dict(config.kwargs)}: {error}. It must take a learning rate, and work from gradients and "
            "parameters alone."
        ) from error
    return optax.GradientTransformation(made.init, made.update)


def _settings(config: OptimizerConfig, factory: Factory) -> dict[str, object]:
    """The settings that the optimizer takes; one that was set and that it doesn't take is refused."""
    takes = inspect.signature(factory).parameters
    wanted: dict[str, object] = {"b1": config.b1, "b2": config.b2}
    if config.eps is not None:
        wanted["eps"] = config.eps
    wanted["weight_decay"] = config.weight_decay
    settings: dict[str, object] = {}
    defaults = OptimizerConfig.__dataclass_fields__
    for name, value in wanted.items():
        place = f"adam_{name}" if config.name == "muon" and name in ("b1", "b2") else name
        if place in takes:
            settings[place] = value
        elif value != defaults[name].default:
            raise ConfigError(
                f"optimizer.{name} is {value}, and {config.name} has no such argument. Leave it out; what "
                f"{config.name} takes is {', '.join(list(takes)[1:])}."
            )
    if config.name == "muon":
        settings["adam_weight_decay"] = 0.0
    for mask in ("mask", "weight_decay_mask"):
        if mask in takes and "weight_decay" in settings:
            settings[mask] = decayed
    return settings


def _factory(config: OptimizerConfig) -> Factory:
    """Optax's function of that name.

    Raises:
        UnknownNameError: There is none.
    """
    known: dict[str, Factory] = {}
    for module in (optax.contrib, optax):
        for name, found in inspect.getmembers(module, inspect.isfunction):
            first = next(iter(inspect.signature(found).parameters), "")
            if first == "learning_rate" and not name.startswith(("_", "scale_by_")):
                known[name] = found
    if config.name not in known:
        raise UnknownNameError("optimizer", config.name, known)
    return known[config.name]
