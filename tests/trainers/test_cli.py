"""The command lines: exit codes, one clean message, and Ctrl-C that always ends."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from gymllm.errors import (
    ConfigError,
    EnvCrashedError,
    GymLLMError,
    MissingExtraError,
    ModelError,
    RunError,
    UnknownNameError,
)
from gymllm.transcripts import read_jsonl
from gymllm_trainers import cli
from gymllm_trainers.compilation import use_compilation_cache
from gymllm_trainers.interrupt import ends_on_interrupt


@pytest.fixture(autouse=True)
def in_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("bad setting"), 2),
        (UnknownNameError("environment", "a", []), 2),
        (ModelError("bad model"), 2),
        (MissingExtraError("install it"), 2),
        (RunError("disk full"), 1),
        (ExceptionGroup("tasks", [ExceptionGroup("more", [EnvCrashedError("env broke")])]), 1),
    ],
)
def test_expected_error_is_one_line_and_a_code(capsys, error, code):
    def body(arguments: object) -> None:
        raise error

    assert cli._run(body, []) == code
    shown = capsys.readouterr().err
    assert shown.startswith("gymllm: ")
    assert shown.count("\n") == 1
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    "error", [KeyError("bug"), ExceptionGroup("tasks", [ConfigError("a"), KeyError("bug")])]
)
def test_unexpected_error_keeps_its_traceback(error):
    def body(arguments: object) -> None:
        raise error

    with pytest.raises(type(error)):
        cli._run(body, [])


def test_group_of_ours_shows_the_first():
    def body(arguments: object) -> None:
        raise ExceptionGroup("tasks", [GymLLMError("one"), ConfigError("two")])

    assert cli._run(body, []) == 1


def test_train_with_an_unknown_environment_says_what_is_close(capsys):
    assert cli.train(["--env.id", "gymllm/FrozenLak-v0", "--metrics.wandb", "off"]) == 2
    assert "gymllm/FrozenLake-v0" in capsys.readouterr().err


def test_train_with_a_missing_file_says_so(capsys):
    assert cli.train(["--config", "none.yaml"]) == 2
    assert "none.yaml does not exist" in capsys.readouterr().err


def test_evaluate_the_scripted_player(capsys):
    arguments = ["--model", "scripted", "--episodes", "6", "--skill", "1", "--out", "out"]
    assert cli.evaluate([*arguments, "--env-kwargs", "size", "2"]) == 0
    shown = capsys.readouterr().out
    for text in ("scripted on gymllm/FrozenLake-v0, 6 episodes", "reward", "terminated", "100%"):
        assert text in re.sub(r"\s+", " ", shown)
    assert len(list(read_jsonl(Path("out/transcripts.jsonl")))) == 6
    assert "FrozenLake" in Path("out/transcripts.html").read_text()
    summary = json.loads(Path("out/summary.json").read_text())
    assert summary["reward"]["mean"] == 1
    assert summary["env_kwargs"] == {"size": 2}


@pytest.mark.parametrize(
    "flags",
    [
        ["--env-kwargs", "size", "2", "is_slippery", "False"],
        ["--env.kwargs", "size", "2", "is_slippery", "False"],
        ["--env-kwargs.size", "2", "--env-kwargs.is-slippery=false"],
        ["--env.kwargs.size=2", "--env.kwargs.is_slippery", "false"],
    ],
)
def test_arguments_of_the_environment_are_spelt_as_for_training(flags):
    from gymllm_trainers.evaluate import load_settings

    evaluation = load_settings(["--model", "scripted", *flags])
    assert evaluation.env.kwargs == {"size": 2, "is_slippery": False}


def test_settings_of_the_environment_are_those_of_training(tmp_path):
    from gymllm_trainers.evaluate import load_settings

    file = tmp_path / "config.yaml"
    file.write_text("env: {worker: thread, spares: 2, kwargs: {size: 5}}")
    flags = ["--env.worker", "process", "--env.step-timeout-s=9", "--env.kwargs.slip", "0.5"]
    arguments = ["--model", "scripted", "--config", str(file), *flags]
    env = load_settings(arguments).env
    assert (env.worker, env.step_timeout_s, env.spares) == ("process", 9.0, 2)
    assert env.kwargs == {"size": 5, "slip": 0.5}
    for other in (["--env.id", "gymllm/Arithmetic-v0"], ["--env", "gymllm/Arithmetic-v0"]):
        env = load_settings([*arguments, *other]).env
        assert (env.id, env.kwargs, env.worker) == (
            "gymllm/Arithmetic-v0",
            {"slip": 0.5},
            "process",
        )


def test_settings_of_training_that_do_not_go_together_do_not_stop_an_evaluation(tmp_path):
    from gymllm_trainers.evaluate import load_settings

    file = tmp_path / "config.yaml"
    file.write_text("learner: {deterministic: true}\nenv: {kwargs: {size: 4}}\n")
    evaluation = load_settings(["--model", "scripted", "--config", str(file)])
    assert evaluation.env.kwargs == {"size": 4}


def test_interrupted_evaluation_says_so_and_where_its_transcripts_are(capsys, monkeypatch):
    from gymllm_envs.scripted import SCRIPTED_PLAYERS
    from gymllm_trainers.evaluate import load_settings, run

    lake = "gymllm/FrozenLake-v0"
    play = SCRIPTED_PLAYERS[lake]
    turns: list[str] = []

    def interrupting(text: str, rng: np.random.Generator, skill: float) -> str:
        turns.append(text)
        if len(turns) == 60:
            signal.raise_signal(signal.SIGINT)
        return play(text, rng, skill)

    monkeypatch.setitem(SCRIPTED_PLAYERS, lake, interrupting)
    arguments = ["--model", "scripted", "--episodes", "500", "--concurrency", "2", "--out", "out"]
    with pytest.raises(KeyboardInterrupt):
        run(load_settings(arguments))
    shown = capsys.readouterr().out
    ended = len(list(read_jsonl(Path("out/transcripts.jsonl"))))
    assert 0 < ended < 500
    assert f"Interrupted after {ended} of 500 episodes." in shown
    assert "out/transcripts.html" in shown
    assert Path("out/transcripts.html").exists()


def test_nobody_reading_the_output_is_no_traceback():
    for body in ("print('x' * 10**6)", "print('short')", "print('help'); sys.exit(0)"):
        script = f"import sys\nfrom gymllm_trainers import cli\ndef body(_):\n    {body}\n"
        script += "sys.exit(cli._main(body, None))"
        read, write = os.pipe()
        os.close(read)
        process = subprocess.run(
            [sys.executable, "-c", script], stdout=write, stderr=subprocess.PIPE, check=False
        )
        os.close(write)
        assert (process.returncode, process.stderr) == (141, b"")


def test_evaluation_is_a_function_of_its_seed():
    for out, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        arguments = ["--model", "scripted", "--episodes", "4", "--skill", "0.5", "--out", out]
        assert cli.evaluate([*arguments, "--seed", seed, "--concurrency", "2"]) == 0
    a, b, c = (
        sorted(
            (t.task.id, *(m.content for m in t.messages))
            for t in read_jsonl(Path(out, "transcripts.jsonl"))
        )
        for out in "abc"
    )
    assert a == b
    assert a != c


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "smolm2"], "Did you mean smollm2?"),
        (["--model", "scripted", "--env", "gymllm/FrozenLak-v0"], "gymllm/FrozenLake-v0"),
        (
            ["--model", "scripted", "--env", "CartPole-v1"],
            "there is no scripted player for CartPole-v1, only for gymllm/FrozenLake-v0",
        ),
        (["--model", "scripted", "--env-kwargs", "sise", "4"], "sise"),
        (["--model", "scripted", "--env.wroker", "thread"], "Did you mean env.worker"),
        (["--model", "scripted", "--env.worker", "threads"], "env.worker"),
        (["--model", "scripted", "--env.spares", "-1"], "env.spares must be >= 0"),
        (["--model", "scripted", "--env.worker"], "--env.worker needs a value"),
        (["--model", "scripted", "--episodes", "0"], "--episodes must be >= 1, got 0"),
        (["--model", "scripted", "--skill", "2"], "--skill must be from 0 to 1"),
        (["--model", "none/at/all"], "none/at/all"),
        (["--modle", "scripted"], "--model"),
        ([], "--model"),
    ],
)
def test_mistake_in_an_evaluation_ends_with_code_2_and_leaves_nothing(capsys, arguments, message):
    try:
        code = cli.evaluate(arguments)
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    shown = capsys.readouterr()
    assert message in re.sub(r"[\s│]+", " ", shown.err)
    assert "Traceback" not in shown.err
    assert not list(Path().glob("runs/*"))


def test_model_that_cannot_be_loaded_leaves_no_run_behind(capsys):
    Path("empty").mkdir()
    for model, said in (("tinny", "Did you mean tiny?"), ("./empty", "empty")):
        assert cli.train(["--model.name", model, "--metrics.wandb", "off"]) == 2
        shown = capsys.readouterr()
        assert said in shown.err
        assert "Everything is in" not in shown.out
    assert not list(Path().glob("runs/*"))


def test_prompt_longer_than_the_context_is_no_reward_of_0(capsys):
    arguments = ["--model", "scripted", "--episodes", "2", "--out", "out"]
    assert cli.evaluate([*arguments, "--context-length", "8"]) == 1
    assert "Raise --context-length" in capsys.readouterr().err


def test_failures_of_a_kind_are_counted_together():
    from gymllm_trainers.evaluate import _kinds

    asked = {f"failed: EngineError: no answer to request {n}": 1 for n in range(3)}
    assert _kinds({"terminated": 2, **asked}) == {"failed: EngineError": 3, "terminated": 2}


def test_full_disk_still_shows_what_an_evaluation_came_to(capsys, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gymllm_trainers.evaluate.write_html", full)
    monkeypatch.setattr("gymllm_trainers.evaluate.write_atomically", full)
    assert cli.evaluate(["--model", "scripted", "--episodes", "2", "--out", "out"]) == 1
    shown = capsys.readouterr()
    assert "2 episodes" in shown.out
    assert "No space left on device. Free some space" in shown.err
    assert len(list(read_jsonl(Path("out/transcripts.jsonl")))) == 2


def test_run_without_a_model_says_how_to_get_one(capsys):
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.yaml").write_text("steps: 3\n")
    assert cli.evaluate(["--model", "runs/a"]) == 2
    assert (
        "no checkpoint yet. Continue it with gymllm-train --resume runs/a"
        in capsys.readouterr().err
    )


def test_signal_interrupts_the_block_and_leaves_the_handlers_as_they_were():
    before = signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM):
        ended: list[str] = []
        with pytest.raises(KeyboardInterrupt), ends_on_interrupt(exit_now=ended.append):
            signal.raise_signal(number)
        assert ended == []
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


SCRIPT = """
import asyncio, hashlib, signal, sys, threading, time
from gymllm_trainers import cli, interrupt

def stuck(arguments):
    while True:
        try:
            print("ready", flush=True)
            hashlib.pbkdf2_hmac("sha256", b"a", b"b", 10**9)  # no Python handler runs in C code
        except KeyboardInterrupt:
            pass  # it came before the C code was reached

def ignoring(arguments):
    while True:
        try:
            print("ready", flush=True)
            threading.Event().wait()
        except KeyboardInterrupt:
            pass

def hanging_thread(arguments):
    threading.Thread(target=threading.Event().wait).start()
    print("ready", flush=True)
    threading.Event().wait()

def closing_loop(arguments):
    async def main():
        try:
            print("ready", flush=True)
            await asyncio.Event().wait()
        finally:
            print("checkpoint written", flush=True)
    asyncio.run(main())

guard = interrupt.ends_on_interrupt
cli.ends_on_interrupt = lambda: guard(float(sys.argv[2]))
sys.exit(cli._run(globals()[sys.argv[1]], []))
"""


def interrupted(body: str, grace_s: float, *signals: signal.Signals) -> tuple[int, str, str, float]:
    """Exit code, output, errors and seconds of a process that is sent signals once it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, body, str(grace_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        started = time.monotonic()
        for number in signals:
            os.kill(process.pid, number)
            if len(signals) > 1:
                process.stdout.readline()  # it has taken the first
        output, errors = process.communicate(timeout=20)
        return process.returncode, output, errors, time.monotonic() - started
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_loop_closes_and_exits_with_130(number):
    code, output, errors, _ = interrupted("closing_loop", 5, number)
    assert code == 130
    assert "checkpoint written" in output
    assert "Traceback" not in errors


def test_main_thread_stuck_in_c_code_is_left_when_time_is_up():
    code, _, errors, took = interrupted("stuck", 0.2, signal.SIGINT)
    assert code == 130
    assert "could not close within" in errors
    assert 0.2 <= took < 3


def test_thread_that_never_ends_does_not_keep_the_process():
    code, _, _, took = interrupted("hanging_thread", 5, signal.SIGINT)
    assert code == 130
    assert took < 3


def test_second_signal_ends_at_once():
    code, _, errors, took = interrupted("ignoring", 60, signal.SIGINT, signal.SIGINT)
    assert code == 130
    assert "interrupted again" in errors
    assert took < 3


@pytest.mark.parametrize("command", [cli.serve, cli.evaluate])
def test_what_is_compiled_is_kept_for_the_next_start(capsys, command):
    if command is cli.serve:
        pytest.importorskip("uvicorn", reason='needs pip install "gymllm-trainers[serve]"')
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        assert (
            command(["--model", "/nowhere/model"] + ["--port", "0"] * (command is cli.serve)) == 2
        )
        assert jax.config.values["jax_compilation_cache_dir"].endswith("compiled")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert "/nowhere/model" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["gymllm_trainers", "gymllm_trainers.cli"])
def test_the_module_is_the_trainer_too(module):
    command = [sys.executable, "-m", module, "--steps", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "steps must be >= 1, got 0" in done.stderr


def test_a_cache_that_cannot_be_written_is_one_sentence_and_none(tmp_path, capsys):
    (tmp_path / "file").write_text("in its place")
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        for told, folder in ((None, tmp_path / "file"), (str(tmp_path / "file" / "in"), None)):
            jax.config.update("jax_compilation_cache_dir", told)
            use_compilation_cache(folder)
            assert jax.config.values["jax_compilation_cache_dir"] is None
            said = capsys.readouterr().err
            assert said.count("\n") == 1
            assert "can't be kept in" in said
            assert "JAX_COMPILATION_CACHE_DIR" in said
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
