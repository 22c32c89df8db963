"""Keys, limits, clients that vanish, and the end of the server."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import anyio
import httpx
import pytest

from gymllm.errors import ConfigError, ModelError, UnknownNameError
from gymllm_trainers import cli
from gymllm_trainers.models import tiny_config
from gymllm_trainers.serve.server import fitting, load
from gymllm_trainers.serve.settings import ServeSettings, load_settings

TINY_SMOLLM2 = Path(__file__).parents[1] / "fixtures" / "tiny_smollm2"

LONG = {"input_ids": [5], "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}


def vanish(server, path: str, body: dict, *, after: bytes) -> None:
    """Asks over a socket of our own, reads up to `after`, and closes it."""
    data = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as one:
        one.settimeout(20)
        one.sendall(b"POST %s HTTP/1.1\r\nHost: a\r\n" % path.encode())
        one.sendall(b"Content-Length: %d\r\n\r\n" % len(data) + data)
        seen = b""
        while after not in seen:
            seen += one.recv(4096)
        server.until(lambda state: state["sequences"] == 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanishes_cancels_its_request(server, stream: bool) -> None:
    before = server.state()["counts"]["requests"]
    server.ok("/pause_generation", {"mode": "in_place"})  # so that it can't end by itself
    try:
        vanish(server, "/generate", {**LONG, "stream": stream}, after=b"")
        server.until(lambda state: state["sequences"] + state["running"] + state["waiting"] == 0)
    finally:
        server.ok("/continue_generation", {})
    assert server.state()["counts"]["requests"] == before, "it was not answered"


def test_a_client_that_vanishes_in_the_middle_frees_its_pages(server) -> None:
    free = server.state()["free_pages"]
    vanish(server, "/generate", {**LONG, "stream": True}, after=b"data: ")
    server.until(lambda state: state["sequences"] + state["running"] + state["waiting"] == 0)
    server.until(lambda state: state["free_pages"] == free)


def test_clients_of_every_kind_leave_nothing_behind(server) -> None:
    """Streams that are left at any moment, aborts, mistakes and patient clients, all at once."""
    free = server.state()["free_pages"]

    async def one(client: httpx.AsyncClient, number: int) -> None:
        chance = random.Random(number)
        params = {"max_new_tokens": chance.randint(1, 60), "n": chance.randint(1, 3)}
        params["ignore_eos"] = True
        body = {"rid": f"r{number}", "input_ids": [5 + number % 7] * chance.randint(1, 40)}
        body |= {"sampling_params": params, "stream": chance.random() < 0.5}
        kind = chance.choice(["patient", "vanishes", "aborts", "mistaken"])
        if kind == "mistaken":
            body["input_ids"] = [10**6]
        try:
            with anyio.move_on_after(chance.uniform(0, 0.05) if kind == "vanishes" else 60):
                async with client.stream("POST", "/generate", json=body) as response:
                    assert response.status_code == (400 if kind == "mistaken" else 200)
                    async for _ in response.aiter_lines():
                        if kind == "aborts":
                            await client.post("/abort_request", json={"rid": f"r{number}"})
        except httpx.ReadError:
            assert kind == "vanishes"

    async def all_of_them() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            for start in range(0, 90, 15):
                async with anyio.create_task_group() as group:
                    for number in range(start, start + 15):
                        group.start_soon(one, client, number)

    anyio.run(all_of_them)
    server.until(lambda state: state["sequences"] + state["running"] + state["waiting"] == 0)
    server.until(lambda state: state["free_pages"] == free)


def test_more_than_the_queue_holds_is_refused_for_a_while(make_server) -> None:
    with make_server(queue=0) as server:  # so as many as there are slots
        server.ok("/pause_generation", {"mode": "in_place"})
        try:
            with ThreadPoolExecutor(1) as threads:
                params = {"max_new_tokens": 2, "n": 3}
                held = threads.submit(
                    server.ok, "/generate", {"input_ids": [5], "sampling_params": params}
                )
                server.until(lambda state: state["sequences"] == 3)
                response = server.post("/v1/completions", {"prompt": "a", "n": 2})
                assert response.status_code == 429
                assert int(response.headers["Retry-After"]) >= 1
                assert response.json()["error"]["code"] == "queue_full"
                too_many = server.refused("/v1/completions", {"prompt": "a", "n": 5})
                assert "at most 4" in too_many["message"]
                server.ok("/continue_generation", {})
                assert len(held.result()) == 3
            server.ok("/v1/completions", {"prompt": "a", "n": 2, "max_tokens": 1})
        finally:
            server.ok("/continue_generation", {})


def test_a_long_body_is_refused(make_server) -> None:
    with make_server(max_body_mb=1) as server:
        long = b" " * ((1 << 20) + 1)
        assert server.client.post("/generate", content=long).status_code == 413

        def chunks():
            yield b"[" * (1 << 19)
            yield b"[" * (1 << 19)
            yield b"[" * 10

        assert server.client.post("/generate", content=chunks()).status_code == 413


def test_the_key_is_asked_for_and_never_shown(make_server, capfd, caplog) -> None:
    key = "s3cret-key"
    with make_server(api_key=key) as server:
        assert server.client.get("/health").status_code == 200
        for wrong in ({}, {"Authorization": "Bearer no"}, {"Authorization": f"Basic {key}"}):
            response = server.client.get("/v1/models", headers=wrong)
            assert response.status_code == 401
            assert key not in response.text
        right = {"Authorization": f"Bearer {key}"}
        assert server.client.get("/v1/models", headers=right).status_code == 200
        info = server.client.get("/get_server_info", headers=right)
        assert key not in info.text
        server.client.post("/generate", headers=right, content=b"{")
        server.client.post("/generate", json={})
    shown = capfd.readouterr()
    assert key not in shown.out + shown.err + caplog.text
    assert key not in repr(load_settings(["--model", "tiny", "--api-key", key]))


def test_health_is_the_engines(scripted, tokenizer) -> None:
    with scripted(lambda prompt: "a", tokenizer) as (server, engine):
        assert server.client.get("/health").status_code == 200
        engine.closed = True
        assert server.client.get("/health").status_code == 503
        engine.closed = False
        engine.ready.clear()
        assert server.client.get("/health").status_code == 503


def test_web_pages_are_refused_without_a_key(make_server) -> None:
    page = {"Origin": "http://somewhere.example"}
    with make_server() as server:
        response = server.client.post("/flush_cache", headers=page)
        assert response.status_code == 403
    with make_server(api_key="k") as server:
        both = {**page, "Authorization": "Bearer k"}
        assert server.client.post("/flush_cache", headers=both).status_code == 200


def test_what_runs_when_the_server_ends_gets_an_error(make_server) -> None:
    with make_server() as server:
        lines = []
        with server.client.stream("POST", "/generate", json={**LONG, "stream": True}) as response:
            for line in response.iter_lines():
                if not lines:
                    server.end()
                lines += [line] if line else []
        assert (
            "the server is ending"
            in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
        )


def test_settings_that_cannot_be_are_refused(capsys) -> None:
    assert load_settings(["--model", "random", "tiny", "--engine.slots", "3"]).engine.slots == 3
    for words, says in (
        ("--model tiny --port 70000", "--port must be"),
        ("--model tiny --engine.slots 0", "engine.slots must be >= 1"),
        ("--model tiny --queue -1", "--queue must be"),
    ):
        with pytest.raises(SystemExit):
            load_settings(words.split())
        assert says in " ".join(capsys.readouterr().err.split())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.serve(["--model", "tiny", "--port", str(port)]) == 2
    assert f"port {port}" in capsys.readouterr().err
    assert cli.serve(["--model", "/nowhere/model", "--port", "0"]) == 2


def test_help_shows_no_key(capsys, monkeypatch) -> None:
    monkeypatch.setenv("GYMLLM_API_KEY", "s3cret-key")
    with pytest.raises(SystemExit):
        cli.serve(["--help"])
    shown = capsys.readouterr().out
    assert "--engine.slots" in shown
    assert "s3cret-key" not in shown


@pytest.mark.parametrize(
    "which", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_ends_the_command_within_seconds(tmp_path: Path, which: int) -> None:
    words = "--model tiny --port 0 --engine.slots 2 --engine.context-length 2000"
    words += " --engine.small-batch 2 --engine.prefill-tokens 64"
    command = "import sys; from gymllm_trainers import cli; sys.exit(cli.serve())"
    process = subprocess.Popen(
        [sys.executable, "-c", command, *words.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    try:
        assert process.stdout is not None
        url = next(line for line in process.stdout if " at http" in line).split(" at ")[1].strip()
        with httpx.stream("POST", f"{url}/generate", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(which)
            started = time.monotonic()
            rest = [line for line in lines if line]
        assert "error" in json.loads(rest[-1].removeprefix("data: "))
        assert process.wait(10) == 130
        assert time.monotonic() - started < 5
        assert process.stderr is not None
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


def test_a_run_is_served_by_its_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("name: run\n", "utf-8")
    with pytest.raises(ModelError, match=r"has written no model yet.*--resume .*run\."):
        load(ServeSettings(model=str(run)))
    shutil.copytree(TINY_SMOLLM2, run / "model")
    decoder, tokenizer = load(ServeSettings(model=str(run)))
    assert decoder.config.vocab_size == 320
    assert tokenizer.vocab_size <= 320


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one() -> None:
    for name, right in (("tny", "tiny"), ("smolm2", "smollm2")):
        with pytest.raises(UnknownNameError, match=f"Did you mean {right}?"):
            load(ServeSettings(model=name))


def test_a_context_beyond_the_models_is_lowered_aloud_or_refused() -> None:
    model, said = tiny_config(300, max_position_embeddings=512), list[str]()
    default = load_settings(["--model", "tiny"]).engine
    assert fitting(default, model, say=said.append).context_length == 512
    assert said == ["the context is 512 tokens, what the model was made for"]
    fits = replace(default, context_length=500)
    assert fitting(fits, model, say=said.append) == fits
    with pytest.raises(ConfigError, match="is 1000, but the model was made for at most 512 tokens"):
        fitting(replace(default, context_length=1000), model, say=said.append)
    assert len(said) == 1
