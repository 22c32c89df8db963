"""Environment ids: loading plug-ins that register them, and making an environment from one.

Gymnasium has no plug-in entry point of its own, so gymllm loads the entry-point group `gymllm.envs` when
it is imported: each names a function without arguments that registers environments. Environments of a few
other packages are registered when they are first asked for, by importing the package.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import Any, cast

import gymnasium
from gymnasium import error
from gymnasium.envs.registration import EnvSpec, load_env_creator

from gymllm.adapters import is_text_env, needed_render_mode, textify
from gymllm.errors import (
    ConfigError,
    ConfigTypeError,
    GymLLMError,
    MissingExtraError,
    UnknownNameError,
)

ENTRY_POINT_GROUP = "gymllm.envs"
GYM_ID = "gymllm/Gym-v0"
"""Any Gymnasium environment in text: `gymnasium.make("gymllm/Gym-v0", env_id="CartPole-v1")`."""

PROVIDERS = {
    "ALE/": ("ale_py", "atari"),
    "BabyAI-": ("minigrid", "minigrid"),
    "MiniGrid-": ("minigrid", "minigrid"),
}
"""How ids begin, to the module whose import registers them and the extra of gymllm-envs that installs it."""


def register_gym() -> None:
    """Registers `gymllm/Gym-v0`, if it isn't yet."""
    if GYM_ID not in gymnasium.registry:
        gymnasium.register(  # pyright: ignore[reportUnknownMemberType]  # its kwargs are a bare dict
            id=GYM_ID,
            entry_point="gymllm.adapters.gym_env:make_gym",
            vector_entry_point="gymllm.adapters.gym_env:make_vector",
        )


def load_plugins(entry_points: Iterable[metadata.EntryPoint] | None = None) -> None:
    """Calls every plug-in's function. One that fails is named in a warning and left out.

    Args:
        entry_points: What to load; by default the installed ones of the group `gymllm.envs`.
    """
    if entry_points is None:
        entry_points = metadata.entry_points(group=ENTRY_POINT_GROUP)
    for entry_point in entry_points:
        try:
            entry_point.load()()
        except Exception as problem:
            warnings.warn(
                f"The environments of plug-in {entry_point.name!r} ({entry_point.value}) were not "
                f"registered: {type(problem).__name__}: {problem}",
                RuntimeWarning,
                stacklevel=2,
            )


def check_id(env_id: str) -> None:
    """Raises if there is no such environment. The version is part of the name: "-v0" can't be left out.

    An id with a module ("module:id") passes: what it registers is known once `make` has imported it.

    Raises:
        UnknownNameError: Nothing is registered by that name.
        ConfigTypeError: It is no text.
        MissingExtraError: It is in a package that is not installed.
    """
    if not isinstance(env_id, str):  # pyright: ignore[reportUnnecessaryIsInstance]  users' code
        raise ConfigTypeError(
            f'an environment\'s id must be a str such as "gymllm/FrozenLake-v0", got {env_id!r}.'
        )
    if ":" in env_id or env_id in gymnasium.registry:
        return
    _import_provider(env_id)
    if env_id not in gymnasium.registry:
        raise _unknown(env_id)


def make(env_id: str, /, **kwargs: Any) -> gymnasium.Env[str, str]:
    """Makes any registered environment as a text environment.

    As `gymnasium.make`, but an environment that is not played in text is wrapped in a `TextAdapter`, made
    with the render mode that shows most in text. `gymllm/Gym-v0` does the same and takes the adapter's
    settings.

    Args:
        env_id: Gymnasium's id, `module:id` included.
        **kwargs: As `gymnasium.make` takes them; the rest go to the environment.

    Raises:
        UnknownNameError: Nothing is registered by that name.
        MissingExtraError: It is in a package that is not installed.
        ConfigError: The environment does not take these arguments, needs something that is missing,
            or raised while it was made; or its module can't be imported.
    """
    return textify(make_to_describe(env_id, kwargs))


def make_to_describe(env_id: str, kwargs: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    """Makes an environment, not adapted yet, with the render mode that its describer needs."""
    check_id(env_id)
    # Answers are checked where they are used, with errors that say what came. Gymnasium's checker
    # would raise before, as if the environment had.
    kwargs = {"disable_env_checker": True, **kwargs}
    env = _make(env_id, kwargs)
    mode = None if "render_mode" in kwargs or is_text_env(env) else needed_render_mode(env)
    if mode is None:
        return env
    env.close()
    return _make(env_id, {**kwargs, "render_mode": mode})


def _make(env_id: str, kwargs: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    module, colon, _ = env_id.partition(":")
    if colon:
        _import(module, env_id)
    try:
        return gymnasium.make(env_id, **kwargs)
    except (error.UnregisteredEnv, error.DeprecatedEnv) as problem:
        raise _unknown(env_id) from problem
    except GymLLMError:
        raise
    except error.DependencyNotInstalled as problem:
        raise ConfigError(f"{env_id} can't be made: {problem}") from problem
    except TypeError as problem:
        if (misspelt := _misspelt(env_id, kwargs)) is not None:
            raise misspelt from problem
        raise ConfigError(f"{env_id} can't be made with these arguments: {problem}") from problem
    except Exception as problem:
        raise ConfigError(
            f"{env_id} can't be made: it raised {type(problem).__name__}: {problem}. Check its "
            "arguments and what it needs."
        ) from problem


def _misspelt(env_id: str, kwargs: Mapping[str, object]) -> UnknownNameError | None:
    """The first of these arguments that the environment doesn't take; None where it can't be told."""
    entry_point = gymnasium.spec(env_id).entry_point
    try:
        creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
        parameters = inspect.signature(cast("Callable[..., object]", creator)).parameters.values()
    except (TypeError, ValueError, ImportError, AttributeError):
        return None
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    known = {one.name for one in parameters} | set(inspect.signature(gymnasium.make).parameters)
    wrong = next((name for name in kwargs if name not in known), None)
    takes = [one.name for one in parameters]
    return None if wrong is None else UnknownNameError(f"argument of {env_id}", wrong, takes)


def _import(module: str, env_id: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as problem:
        if isinstance(problem, ModuleNotFoundError) and problem.name == module.split(".")[0]:
            raise ConfigError(
                f"{env_id}: there is no module {module!r}. Check its name, install its package, or "
                "put its folder on PYTHONPATH."
            ) from problem
        raise ConfigError(
            f"{env_id}: the module {module!r} can't be imported: "
            f"{type(problem).__name__}: {problem}."
        ) from problem


def _import_provider(env_id: str) -> None:
    for prefix, (module, extra) in PROVIDERS.items():
        if env_id.startswith(prefix):
            if importlib.util.find_spec(module) is None:
                raise MissingExtraError(
                    f'{env_id} needs the package {module}: pip install "gymllm-envs[{extra}]".'
                )
            _import(module, env_id)


def _unknown(env_id: str) -> UnknownNameError:
    known = gymnasium.registry.keys()
    own = ", ".join(sorted(name for name in known if name.startswith("gymllm/")))
    hint = f"gymllm's own: {own}." if own else ""
    return UnknownNameError("environment", env_id.rpartition(":")[2], known, hint)


register_gym()


def spec_of(make_env: Callable[..., object]) -> EnvSpec | None:
    """The spec of the id that a `functools.partial` of `make` or `gymnasium.make` makes, if it is one."""
    maker: object = make_env
    while isinstance(maker, functools.partial):
        part = cast("functools.partial[object]", maker)
        if part.func in (make, gymnasium.make) and part.args:
            return gymnasium.registry.get(str(part.args[0]))
        maker = part.func
    return None


def entry_point_of(make_env: Callable[..., object]) -> object:
    """What makes the environments in the end: a class, as a rule; its module is imported.

    None if that can't be known without making one.
    """
    spec = spec_of(make_env)
    if spec is not None and isinstance(spec.entry_point, str):
        try:
            return load_env_creator(spec.entry_point)
        except Exception:  # what is missing is said where it is made, as that environment's fault
            return None
    if spec is not None:
        return spec.entry_point
    maker: object = make_env
    while isinstance(maker, functools.partial):
        maker = cast("functools.partial[object]", maker).func
    return maker
