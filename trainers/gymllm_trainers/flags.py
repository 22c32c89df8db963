"""Flags whose names no dataclass has: values by any name (`--env.kwargs.size 5`), and players.

They are taken out of a command line before tyro reads it, as a YAML file would hold them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from gymllm.errors import ConfigError
from gymllm_trainers.config_files import flatten, parse_scalar, to_mapping
from gymllm_trainers.players import PlayerSettings

_KWARGS_FLAGS = ("--env.kwargs.", "--env-kwargs.")
"""gymllm-train's own spelling and gymllm-eval's; both programs take both."""
_OPTIMIZER_FLAGS = ("--optimizer.kwargs.",)
_TEMPLATE_FLAGS = ("--agent.template-variables.", "--agent.template_variables.")
_PLAYERS_FLAG = "--players."


ELSEWHERE = {
    "lr": "optimizer.learning_rate",
    "betas": "optimizer.b1 and optimizer.b2",
    "beta1": "optimizer.b1",
    "beta2": "optimizer.b2",
    "lr_scheduler_type": "optimizer.schedule",
    "grad_clip": "optimizer.max_grad_norm",
    "beta": "algorithm.kl_coef",
    "epsilon": "algorithm.clip_low and algorithm.clip_high",
    "epsilon_high": "algorithm.clip_high",
    "loss_type": "algorithm.loss and algorithm.aggregation",
    "scale_rewards": "algorithm.advantage",
    "batch_size": "learner.groups_per_step, in groups of rollout.group_size episodes",
    "num_generations": "rollout.group_size",
    "max_steps": "steps",
    "dp": "mesh.data",
    "tp": "mesh.tensor",
    "ep": "mesh.expert",
    "cp": "mesh.context",
}
"""Settings by the names that other trainers have for them, and ours."""


def check_elsewhere(argv: Sequence[str]) -> None:
    """Answers a flag that another trainer has.

    Raises:
        ConfigError: There is one; says what it is called here.
    """
    for word in argv:
        flag = word.partition("=")[0]
        name = flag.removeprefix("--").rpartition(".")[2].replace("-", "_")
        if word.startswith("--") and name in ELSEWHERE:
            raise ConfigError(f"Unknown flag {flag}. Here it is {ELSEWHERE[name]}.")


def check_switches(argv: Sequence[str], config: object) -> None:
    """Answers a value after a flag that takes none.

    Raises:
        ConfigError: There is one; says what to write.
    """
    known = flatten(config)
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        flag, equals, value = word.partition("=")
        value = (value if equals else following).lower()
        path = flag.removeprefix("--").replace("-", "_")
        if (
            word.startswith("--")
            and isinstance(known.get(path), bool)
            and value in ("true", "false")
        ):
            section, dot, name = flag.removeprefix("--").rpartition(".")
            off = f"--{section}{dot}no-{name}"
            raise ConfigError(
                f"{flag} {value}: the flag takes no value. Write {flag if value == 'true' else off}."
            )


def take_env_kwargs(argv: Sequence[str]) -> tuple[list[str], dict[str, object]]:
    """Takes `--env.kwargs.key value` out: tyro knows only the keys that are there already.

    Returns:
        The other arguments, and the environment's by key, each as a YAML file would hold it.

    Raises:
        ConfigError: A flag has no value.
    """
    return take_mapping(argv, *_KWARGS_FLAGS, example="--env.kwargs.size 5")


def take_mapping(
    argv: Sequence[str], *flags: str, example: str
) -> tuple[list[str], dict[str, object]]:
    """Takes `--FLAG.key value` out, where FLAG is a setting that holds values by any name.

    Args:
        argv: The command line.
        flags: Spellings of the flag, with what is before the key: "--env.kwargs.".
        example: One as it should be, for the message.

    Returns:
        The other arguments, and the values by key, each as a YAML file would hold it.

    Raises:
        ConfigError: A flag has no value, or no key.
    """
    rest: list[str] = []
    found: dict[str, object] = {}
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        prefix = next((one for one in flags if flag.startswith(one)), None)
        if prefix is None:
            rest.append(word)
            continue
        if not equals:
            value = next(words, "--")
        key = flag.removeprefix(prefix).replace("-", "_")
        if value.startswith("--") or not key:
            raise ConfigError(f"{flag} needs a value, as in {example}.")
        found[key] = parse_scalar(value)
    return rest, found


def take_free(
    argv: Sequence[str],
) -> tuple[list[str], dict[str, object], dict[str, object]]:
    """Takes `--optimizer.kwargs.key value` and `--agent.template-variables.key value` out.

    Returns:
        The other arguments, the optimizer's and the template's.

    Raises:
        ConfigError: A flag has no value, or no key.
    """
    rest, options = take_mapping(argv, *_OPTIMIZER_FLAGS, example="--optimizer.kwargs.momentum 0.9")
    rest, variables = take_mapping(
        rest, *_TEMPLATE_FLAGS, example="--agent.template-variables.enable_thinking false"
    )
    return rest, options, variables


def take_players(
    argv: Sequence[str], before: Mapping[str, PlayerSettings]
) -> tuple[list[str], dict[str, object]]:
    """Takes `--players.NAME.SETTING value` out, as `take_env_kwargs` does.

    Returns:
        The other arguments, and the players: those before, with what the flags say, as in a YAML file.

    Raises:
        ConfigError: A flag has no value, or no setting.
    """
    rest: list[str] = []
    players = {name: to_mapping(settings) for name, settings in before.items()}
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if not flag.startswith(_PLAYERS_FLAG):
            rest.append(word)
            continue
        if not equals:
            value = next(words, "--")
        name, _, setting = flag.removeprefix(_PLAYERS_FLAG).rpartition(".")
        if value.startswith("--") or not name:
            raise ConfigError(
                f"{flag} needs a player, a setting and a value, as in --players.player_1.engine frozen."
            )
        players.setdefault(name, {})[setting.replace("-", "_")] = parse_scalar(value)
    return rest, dict(players)


def check_sections(argv: Sequence[str], config: object) -> None:
    """Answers a flag that lacks its section; every other mistake is left to tyro, which says more.

    Raises:
        ConfigError: There is one; says which flags it could be.
    """
    known = {path.replace("_", "-") for path in flatten(config)}
    top = {path.partition(".")[0] for path in known} | {"config", "help"}
    by_setting: dict[str, list[str]] = {}
    for path in sorted(path for path in known if "." in path):
        by_setting.setdefault(path.rpartition(".")[2], []).append(f"--{path}")
    for word in argv:
        flag = word.partition("=")[0].replace("_", "-")
        name = flag.removeprefix("--")
        if flag == name or "." in name or difflib.get_close_matches(name, top, n=1, cutoff=0.75):
            continue
        close = difflib.get_close_matches(name, by_setting, n=2, cutoff=0.75)
        if close:
            meant = " or ".join(path for setting in close for path in by_setting[setting])
            raise ConfigError(f"Unknown flag {flag}. Did you mean {meant}?")
