"""The configuration of a run: from files and flags, and back."""

from __future__ import annotations

import dataclasses
import re
import time
import typing
from pathlib import Path

import pytest

from gymllm.errors import ConfigError, UnknownNameError
from gymllm_trainers import cli
from gymllm_trainers.config import (
    MOVED,
    EnvSettings,
    TrainConfig,
    config_yaml,
    default_name,
    load_config,
    open_run_folder,
)
from gymllm_trainers.config_files import merge, read_yaml, walk_fields
from gymllm_trainers.flags import ELSEWHERE


def saved_run(tmp_path: Path, *arguments: str) -> Path:
    config = load_config(["--name", "first", "--runs-dir", str(tmp_path), *arguments])
    folder = open_run_folder(config)
    folder.unlock()  # as when its process ends
    return folder.path


def test_no_arguments_give_the_defaults():
    assert load_config([]) == TrainConfig()


def test_runs_without_a_name_get_one_each_even_in_the_same_second(tmp_path):
    config = load_config(["--runs-dir", str(tmp_path)])
    paths = [open_run_folder(config).path for _ in range(4)]
    assert len(set(paths)) == 4
    for path in paths:
        assert re.fullmatch(r"frozenlake-\d{4}-\d{6}(-\d)?", path.name)
        assert merge(TrainConfig(), read_yaml(path / "config.yaml")).name == path.name


def test_flags_go_over_the_file_and_the_file_over_the_defaults(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("steps: 7\nrollout:\n  group_size: 4\n  concurrency: 12\n")
    config = load_config(["--config", str(file), "--rollout.group-size", "2"])
    assert config.steps == 7
    assert config.rollout.concurrency == 12
    assert config.rollout.group_size == 2
    assert config.rollout.max_lag == TrainConfig().rollout.max_lag
    assert load_config([f"--config={file}"]).steps == 7


def test_flags_take_mappings_and_lists(tmp_path):
    config = load_config(
        ["--env.kwargs", "size", "5", "is_slippery", "True", "--agent.tools", "calculator"]
    )
    assert config.env.kwargs == {"size": 5, "is_slippery": True}
    assert config.agent.tools == ("calculator",)


def test_arguments_of_the_environment_are_flags_of_their_own(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("env:\n  kwargs: {size: 4, skill: 0.5}\n")
    flags = ["--env.kwargs.size", "5", "--env.kwargs.is-slippery=true", "--env.kwargs.low", "-1"]
    config = load_config(["--config", str(file), *flags, "--env.kwargs.kind", "off"])
    assert config.env.kwargs == {
        "size": 5,
        "skill": 0.5,
        "is_slippery": True,
        "low": -1,
        "kind": "off",
    }
    with pytest.raises(ConfigError, match=r"--env\.kwargs\.size needs a value"):
        load_config(["--env.kwargs.size", "--steps", "3"])


def test_options_of_the_optimizer_and_of_the_template_are_flags_of_their_own(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("optimizer:\n  name: sgd\n  kwargs: {momentum: 0.5}\n")
    flags = ["--optimizer.kwargs.momentum", "0.9", "--optimizer.kwargs.nesterov=true"]
    config = load_config(["--config", str(file), *flags])
    assert config.optimizer.kwargs == {"momentum": 0.9, "nesterov": True}
    config = load_config(["--agent.template-variables.enable-thinking", "false"])
    assert config.agent.template_variables == {"enable_thinking": False}
    with pytest.raises(
        ConfigError, match=r"needs a value, as in --optimizer\.kwargs\.momentum 0\.9"
    ):
        load_config(["--optimizer.kwargs.momentum"])
    with pytest.raises(ConfigError, match=r"needs a value"):
        load_config(["--optimizer.kwargs.", "0.9"])


def test_unknown_key_of_a_file_is_answered_with_the_right_one(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("rollout:\n  group_sise: 4\n")
    with pytest.raises(UnknownNameError) as raised:
        load_config(["--config", str(file)])
    expected = "Unknown config key 'rollout.group_sise'. Did you mean rollout.group_size?"
    assert str(raised.value) == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rollout.group-sise", "4"], "--rollout.group-size"),
        (["--rollout.group-size", "four"], "four"),
        (["--rollout.group-size", "1"], "set it to at least 2"),
        (["--model.dtype", "float16"], "bfloat16"),
        (["--model.lora-linears", "q_proj"], "q_proj, but model.lora_rank is 0"),
        (["--model.remat", "some"], "offload"),
        (["--steps", "0"], "steps must be >= 1, got 0"),
        (["--env.worker", "proces"], "inline"),
        (["--env.spares", "-1"], "env.spares must be >= 0, got -1"),
        (["--env.start-timeout-s", "0"], "env.start_timeout_s must be > 0, got 0.0"),
        (["--learner.max-flat-groups", "0"], "learner.max_flat_groups must be >= 1, got 0"),
        (["--algorithm.preset", "grop"], "grpo"),
        (["--optimizer.name", "adamW"], "adamw"),
        (["--learner.row-tokens", "383"], "learner.row_tokens is 383, but an episode may have"),
        (["--learner.mini-batches", "9"], "learner.mini_batches is 9, but a batch has only 4"),
        (["--supervised.files", "a.jsonl"], "supervised.files is a.jsonl, but algorithm.preset is"),
        (
            ["--algorithm.preset", "best_of_n", "--algorithm.keep-best", "9"],
            "algorithm.keep_best is 9, but a group has only rollout.group_size = 8",
        ),
        (
            ["--rollout.group-size", "1"],
            "centred compares the episodes of a group: set it to at least 2",
        ),
        (["--learner.deterministic"], "Set rollout.max_lag 0 too"),
        (["--mesh.engine-devices", "2"], "set it to 1, or to 0"),
        (
            ["--optimizer.kwargs.momentun", "0.9", "--optimizer.name", "sgd"],
            "Did you mean momentum",
        ),
        (["--optimizer.kwargs.learning-rate", "0.1"], "set optimizer.learning_rate instead"),
        (
            ["--optimizer.name", "sgd", "--optimizer.weight-decay", "0.1"],
            "sgd has no such argument",
        ),
        (["--lr", "1e-4"], "Unknown flag --lr. Here it is optimizer.learning_rate."),
        (["--algorithm.beta=0.04"], "Unknown flag --algorithm.beta. Here it is algorithm.kl_coef."),
        (["--mesh.tp", "2"], "Here it is mesh.tensor."),
        (["--learner.share-prefixes", "false"], "Write --learner.no-share-prefixes."),
        (["--learner.deterministic=True"], "Write --learner.deterministic."),
        (["--reward.weight", "2"], "reward.weight is 2.0, but reward.kind is environment"),
        (["--steps"], "--steps"),
        (["stray"], "stray"),
    ],
)
def test_mistake_in_a_flag_ends_with_code_2_and_says_what_would_do(capsys, arguments, said):
    try:
        code = cli.train(arguments)
    except SystemExit as exit:  # tyro's own way out
        code = exit.code
    assert code == 2
    error = capsys.readouterr().err
    assert said in re.sub(r"[\s│]+", " ", error)
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("algorithm: grpo", "Did you mean algorithm: {preset: grpo}?"),
        ("model: Qwen/Qwen3-0.6B", "Did you mean model: {name: Qwen/Qwen3-0.6B}?"),
        ("algorithm: {preset: GRPO}", "Did you mean grpo?"),
        (
            "optimizer: {lr: 1e-4}",
            "Unknown config key 'optimizer.lr'. Here it is optimizer.learning_rate.",
        ),
        ("num_generations: 4", "Here it is rollout.group_size."),
        ("optimizer: {learning_rate: '1e-4'}", "Write it without quotes."),
        ("steps: 1e3", "Write 1000."),
        ("learner: {deterministic: yes}", "Write true."),
        ("supervised: {files: data.jsonl}", "Write [data.jsonl]."),
        ("rollout:\n  group_size: 8\n  group_size: 4", 'config.yaml", line 2'),
        ("rollout:\n\tgroup_size: 8", 'config.yaml", line 2'),
    ],
)
def test_a_mistake_in_a_file_is_answered_with_what_to_write(tmp_path, text, said):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_config(["--config", str(tmp_path / "config.yaml")])
    assert said in str(raised.value)


def test_no_name_of_another_trainer_is_one_of_ours():
    names = {path.rpartition(".")[2] for path, _ in walk_fields(TrainConfig)}
    assert not names & set(ELSEWHERE)
    for ours in ELSEWHERE.values():
        for path in re.findall(r"[a-z_]+\.[a-z_0-9]+|^steps$", ours):
            assert path in dict(walk_fields(TrainConfig)), path


def test_what_a_file_says_may_only_go_together_with_a_flag(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "supervised:\n  files: [a.jsonl]\nlearner:\n  epochs: 1\n  deterministic: true\n"
    )
    with pytest.raises(ConfigError, match=r"supervised\.files is a\.jsonl"):
        load_config(["--config", str(file)])
    assert load_config(["--config", str(file), "--algorithm.preset", "sft"]).supervised.files
    config = load_config(["--config", str(file), "--supervised.files", "--rollout.max-lag", "0"])
    assert (config.supervised.files, config.learner.deterministic) == ((), True)


SFT = ("--algorithm.preset", "sft", "--supervised.files", "a.jsonl")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--learner.reference-on-host",),
            r"reference_on_host has no effect: algorithm\.kl_coef is 0",
        ),
        (
            (
                *("--learner.reference-on-host", "--algorithm.kl-coef", "0.1"),
                *("--model.lora-rank", "4"),
            ),
            r"reference_on_host has no effect: with adapters",
        ),
        (("--model.lora-alpha", "16"), r"lora_alpha has no effect while model\.lora_rank is 0"),
        (("--model.name", "m", "--warm-start.skill", "0.5"), r"warm_start\.skill has no effect"),
        (("--engine.pages", "900", "--engine.cache-mb", "9"), r"cache_mb has no effect"),
        (("--supervised.min-reward", "1"), r"supervised\.min_reward has no effect: it is for"),
        (("--checkpoint.best-metric", "episode/turns"), r"best_metric has no effect while"),
        (
            ("--optimizer.schedule", "constant", "--optimizer.final-rate", "0.5"),
            r"final_rate has no effect: optimizer\.schedule is constant",
        ),
        (("--optimizer.warmup-steps", "40"), r"warmup_steps is 40, and the run takes 40"),
        (
            ("--algorithm.clip-high", "0.3", "--algorithm.clip-low", "0.1"),
            r"clip_low, algorithm\.clip_high has no effect: with one optimizer step",
        ),
        (
            ("--algorithm.preset", "ppo", "--algorithm.value-clip", "0.1"),
            r"value_clip has no effect with one optimizer step",
        ),
        (
            ("--algorithm.preset", "ppo", "--learner.max-flat-groups", "3"),
            r"max_flat_groups has no effect: algorithm\.zero_variance is keep",
        ),
        (
            (
                *SFT,
                "--rollout.group-size",
                "4",
                "--reward.kind",
                "function",
                "--reward.function",
                "a:b",
            ),
            r"rollout\.group_size, reward\.kind, reward\.function has no effect: .*no episodes",
        ),
        ((*SFT, "--mesh.engine-devices", "1"), r"keeps 1 of the devices idle"),
    ],
)
def test_a_setting_without_an_effect_on_what_is_learnt_is_remarked_on(capsys, arguments, said):
    load_config(arguments)
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        SFT,
        ("--learner.deterministic", "--rollout.max-lag", "0"),
        ("--algorithm.clip-high", "0.3", "--learner.epochs", "2"),
        ("--algorithm.clip-high", "0.3", "--algorithm.correction", "off"),
        ("--algorithm.preset", "dppo", "--algorithm.clip-high", "0.3"),
        ("--algorithm.preset", "ppo", "--rollout.group-size", "1"),
        ("--algorithm.preset", "best_of_n", "--algorithm.keep-best", "8"),
        ("--learner.reference-on-host", "--algorithm.kl-coef", "0.1"),
        ("--model.lora-rank", "4", "--model.lora-alpha", "16"),
    ],
)
def test_settings_that_have_one_are_not(capsys, arguments):
    load_config(arguments)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--group-sise", "Did you mean --rollout.group-size?"),
        ("--learning_rate=1", "--optimizer.learning-rate or --warm-start.learning-rate"),
    ],
)
def test_flag_without_its_section_is_answered_with_the_whole_one(flag, meant):
    with pytest.raises(ConfigError, match=re.escape(meant)):
        load_config([flag, "4"])


def test_a_setting_by_its_old_name_is_answered_with_the_new_one(tmp_path):
    for old, new in MOVED.items():
        flag = f"--{old.replace('_', '-')}"
        with pytest.raises(ConfigError, match=f"is called --{new.replace('_', '-')} now"):
            load_config([flag, "1"])
        section, _, name = old.partition(".")
        file = tmp_path / "config.yaml"
        file.write_text(f"{section}:\n  {name}: 1\n")
        with pytest.raises(ConfigError, match=f"{re.escape(old)} is called {re.escape(new)} now"):
            load_config(["--config", str(file)])
        assert new in dict(walk_fields(TrainConfig)), new


def test_parts_of_an_algorithm_that_do_not_go_together_are_refused_at_once():
    with pytest.raises(ConfigError, match="loss gspo and correction decoupled"):
        load_config(["--algorithm.preset", "gspo", "--algorithm.correction", "decoupled"])
    with pytest.raises(ConfigError, match="proximal current and 2 optimizer steps"):
        load_config(["--algorithm.proximal", "current", "--learner.epochs", "2"])


def test_help_shows_every_setting(capsys):
    with pytest.raises(SystemExit) as raised:
        load_config(["--help"])
    assert raised.value.code == 0
    shown = capsys.readouterr().out
    for path, field in walk_fields(TrainConfig):
        group = dataclasses.is_dataclass(getattr(field, "default_factory", None))
        if not group and path != "agent.few_shot":  # few_shot is for files: no flag can hold it
            assert f"--{path.replace('_', '-')}" in shown, path


def documented(config_type: type) -> set[str]:
    """Fields of a dataclass with a docstring below them, its bases' included."""
    import ast
    import inspect

    found: set[str] = set()
    for base in config_type.__mro__:
        if not dataclasses.is_dataclass(base):
            continue
        (tree,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(tree, ast.ClassDef)
        for statement, following in zip(tree.body, tree.body[1:], strict=False):
            match statement, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str() as text)),
                ) if text.strip():
                    found.add(name)
    return found


def config_types(config_type: type) -> set[type]:
    types = {config_type}
    for hint in typing.get_type_hints(config_type).values():
        if dataclasses.is_dataclass(hint):
            types |= config_types(hint)
    return types


@pytest.mark.parametrize("config_type", sorted(config_types(TrainConfig), key=lambda t: t.__name__))
def test_every_setting_is_documented(config_type):
    fields = {
        field.name
        for field in dataclasses.fields(config_type)
        if not dataclasses.is_dataclass(field.default_factory)
    }
    assert config_type.__doc__
    assert not config_type.__doc__.startswith(f"{config_type.__name__}("), "only the automatic one"
    assert fields <= documented(config_type)


def test_unknown_environment_is_refused_before_anything_is_made():
    with pytest.raises(UnknownNameError, match="Did you mean gymllm/FrozenLake-v0"):
        load_config(["--env.id", "gymllm/FrozenLak-v0"])


def test_saved_config_reads_back_to_an_equal_one(tmp_path):
    arguments = ["--name", "a", "--optimizer.learning-rate", "1e-5", "--metrics.wandb", "off"]
    config = load_config([*arguments, "--env.kwargs", "size", "5"])
    file = tmp_path / "config.yaml"
    file.write_text(config_yaml(config))
    assert load_config(["--config", str(file)]) == config
    assert merge(TrainConfig(), read_yaml(file)) == config


def test_resume_starts_from_the_saved_config_and_takes_new_flags(tmp_path):
    path = saved_run(tmp_path, "--steps", "10", "--rollout.group-size", "4")
    config = load_config(["--resume", str(path), "--steps", "20"])
    assert (config.steps, config.rollout.group_size, config.name) == (20, 4, "first")
    assert config.resume == path
    folder = open_run_folder(config)
    folder.unlock()
    assert folder.path == path
    assert merge(TrainConfig(), read_yaml(folder.config)) == dataclasses.replace(
        config, resume=None
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "1"], "seed can't change when a run is resumed: it was 0, got 1"),
        (["--model.lora-rank", "4"], "model.lora_rank can't change"),
        (["--env.kwargs.size", "5"], "env.kwargs.size can't change"),
        (["--config", "other.yaml"], "leave out --config"),
    ],
)
def test_resume_refuses_what_would_make_it_another_run(tmp_path, arguments, message):
    path = saved_run(tmp_path, "--env.kwargs", "size", "4")
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(["--resume", str(path), *arguments])


def test_resume_of_no_run_says_which_there_are(tmp_path):
    path = saved_run(tmp_path)
    with pytest.raises(UnknownNameError, match=f"Did you mean {re.escape(str(path))}"):
        load_config(["--resume", str(tmp_path / "firts")])


def test_resume_in_a_file_is_refused(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("resume: runs/a\n")
    with pytest.raises(ConfigError, match="give --resume on the command line"):
        load_config(["--config", str(file)])


@pytest.mark.parametrize(
    ("env_id", "name"),
    [
        ("gymllm/FrozenLake-v0", "frozenlake-0203-040506"),
        ("my_module:Odd Name!-v12", "odd-name-0203-040506"),
        ("CartPole", "cartpole-0203-040506"),
        ("!-v1", "run-0203-040506"),
    ],
)
def test_default_name_is_made_of_environment_and_time(env_id, name):
    now = time.struct_time((2025, 2, 3, 4, 5, 6, 0, 34, 0))
    assert default_name(TrainConfig(env=EnvSettings(id=env_id)), now) == name


def test_new_run_never_takes_a_folder_that_is_there(tmp_path):
    saved_run(tmp_path)
    with pytest.raises(ConfigError, match=r"already.*--resume .*first.*another --name"):
        saved_run(tmp_path)


def test_every_example_config_can_be_read():
    for file in (Path(__file__).parents[2] / "examples").glob("*.yaml"):
        assert load_config(["--config", str(file)]).steps >= 1
