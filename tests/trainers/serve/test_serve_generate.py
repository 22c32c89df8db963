"""SGLang's routes: token ids in and out, aborts, pauses, new weights."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymllm.engine import GenerateRequest, Generation, SamplingParams
from gymllm_agents import Tokenizer
from gymllm_trainers.engine import JaxEngine
from gymllm_trainers.models import Decoder, decoder_params, save_model


def engine_says(engine: JaxEngine, prompt: list[int], **sampling: object) -> Generation:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return asyncio.run(engine.generate(GenerateRequest(prompt_ids=prompt, sampling=params)))


def events(server, body: dict) -> Iterator[dict]:
    """What a stream brings."""
    with server.client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return
            if line:
                yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ends without [DONE]")


def test_ids_and_logprobs_are_the_engines(server, engine: JaxEngine, tokenizer: Tokenizer) -> None:
    prompt = [5, 6, 7, 8]
    got = server.ok(
        "/generate",
        {
            "rid": "mine",
            "input_ids": prompt,
            "sampling_params": {
                "max_new_tokens": 6,
                "temperature": 0.7,
                "sampling_seed": 3,
                "ignore_eos": True,
            },
            "return_logprob": True,
            "logprob_start_len": 3,
            "stream": False,
        },
    )
    own = engine_says(engine, prompt, max_new_tokens=6, temperature=0.7, seed=3)
    ids, meta = own.token_ids.tolist(), got["meta_info"]
    assert got["output_ids"] == ids
    assert got["text"] == tokenizer.decode(ids, skip_special=True)
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (4, 6)
    assert meta["input_token_logprobs"] == [[None, 8, None]]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == ids
    np.testing.assert_allclose(
        [logprob for logprob, _, _ in meta["output_token_logprobs"]], own.logprobs, atol=1e-6
    )
    version = str(engine.version)
    assert meta["weight_version"] == version
    assert meta["weight_versions"] == [{"version": version, "start": 0, "end": 6}]


def test_a_stop_token_is_kept_in_the_ids(server, engine: JaxEngine) -> None:
    free = engine_says(engine, [9], max_new_tokens=12, seed=1).token_ids.tolist()
    stop = free[6]
    params = {"max_new_tokens": 12, "sampling_seed": 1, "ignore_eos": True}
    got = server.ok(
        "/generate", {"input_ids": [9], "sampling_params": {**params, "stop_token_ids": [stop]}}
    )
    assert got["output_ids"] == free[: free.index(stop) + 1]
    assert got["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_a_batch_comes_in_order_and_n_is_many(server, engine: JaxEngine) -> None:
    got = server.ok(
        "/generate",
        {
            "rid": ["a", "b"],
            "input_ids": [[5], [6, 7]],
            "sampling_params": [
                {"max_new_tokens": 3, "sampling_seed": 1, "n": 2, "ignore_eos": True},
                {"max_new_tokens": 4, "temperature": 0},
            ],
        },
    )
    assert [each["meta_info"]["id"] for each in got] == ["a", "a", "b"]
    for each, seed in zip(got, (1, 2), strict=False):
        own = engine_says(engine, [5], max_new_tokens=3, seed=seed)
        assert each["output_ids"] == own.token_ids.tolist()
    alone = server.ok("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}})
    assert isinstance(alone, dict)
    batch = server.ok("/generate", {"text": ["a"], "sampling_params": {"max_new_tokens": 1}})
    assert len(batch) == 1


def test_a_stream_is_cumulative(server) -> None:
    body = {
        "input_ids": [5, 6],
        "sampling_params": {"max_new_tokens": 10, "sampling_seed": 2, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    whole = server.ok("/generate", body)
    seen = list(events(server, body))
    for earlier, later in itertools.pairwise(seen):
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert later["text"].startswith(earlier["text"])
        assert earlier["meta_info"]["finish_reason"] is None
    assert seen[-1]["output_ids"] == whole["output_ids"]
    assert seen[-1]["text"] == whole["text"]
    meta = seen[-1]["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 10}
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 10


def test_a_prompt_that_was_computed_is_reused(server) -> None:
    prompt = np.random.default_rng(0).integers(3, 200, size=100).tolist()
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}
    assert server.post("/flush_cache", {}).text.startswith("Cache flushed")
    assert server.ok("/generate", body)["meta_info"]["cached_tokens"] == 0
    assert server.ok("/generate", body)["meta_info"]["cached_tokens"] >= 64


@pytest.fixture
def paused(server) -> Iterator[None]:
    """The engine stands still, until it is told to go on."""
    server.ok("/pause_generation", {"mode": "in_place"})
    yield
    server.ok("/continue_generation", {})


def test_a_pause_holds_what_runs_and_what_comes(server, engine: JaxEngine) -> None:
    body = {
        "input_ids": [5, 6],
        "sampling_params": {"max_new_tokens": 5, "sampling_seed": 7, "ignore_eos": True},
    }
    own = engine_says(engine, [5, 6], max_new_tokens=5, seed=7).token_ids.tolist()
    server.ok("/pause_generation", {"mode": "in_place"})
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(server.ok, "/generate", body)
        try:
            server.until(lambda state: state["sequences"] == 1)
            assert not answer.done()
        finally:
            server.ok("/continue_generation", {})
        assert answer.result()["output_ids"] == own


@pytest.mark.usefixtures("paused")
@pytest.mark.parametrize("how", [{"rid": "one"}, {"abort_all": True}])
def test_an_abort_ends_a_request_and_frees_what_it_held(server, how: dict) -> None:
    with ThreadPoolExecutor(2) as threads:
        params = {"max_new_tokens": 400, "n": 2}
        one = threads.submit(
            server.ok, "/generate", {"rid": "one", "input_ids": [5], "sampling_params": params}
        )
        server.until(lambda state: state["sequences"] == 2)
        assert "one" in server.refused("/generate", {"rid": "one", "input_ids": [5]})["message"]
        server.post("/abort_request", {"rid": "nobody"})
        server.post("/abort_request", how)
        answers = one.result()
    assert [a["meta_info"]["finish_reason"]["type"] for a in answers] == ["abort", "abort"]
    server.until(lambda state: state["running"] + state["waiting"] + state["sequences"] == 0)


def test_what_was_generated_before_an_abort_is_answered_with(server) -> None:
    body = {
        "rid": "long",
        "input_ids": [5],
        "sampling_params": {"max_new_tokens": 500, "ignore_eos": True},
    }
    seen = []
    for event in events(server, body):
        if not seen:
            server.ok("/pause_generation", {"mode": "abort"})
        seen.append(event)
    server.ok("/continue_generation", {})
    assert seen[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert 1 <= len(seen[-1]["output_ids"]) < 500
    assert seen[-1]["output_ids"][: len(seen[0]["output_ids"])] == seen[0]["output_ids"]


def test_the_server_says_what_it_serves(server, engine: JaxEngine) -> None:
    info = server.client.get("/get_model_info").json()
    assert info["is_generation"] is True
    assert info["weight_version"] == str(engine.version)
    about = server.client.get("/get_server_info").json()
    assert about["context_length"] == 512
    assert about["engine"]["slots"] == 4
    assert server.client.get("/health_generate").status_code == 200


# ---------------------------------------------------------------------- new weights


@pytest.fixture
def save(
    make_decoder: Callable[..., Decoder], tokenizer: Tokenizer, tmp_path: Path
) -> Callable[..., str]:
    """Writes a folder of weights."""

    def save(seed: int, *, spoil: bool = False, **changes: int) -> str:
        changes = {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": 512, **changes}
        decoder = make_decoder(seed, **changes)
        if spoil:
            decoder.norm[...] = decoder.norm[...].at[0].set(jnp.nan)
        folder = tmp_path / f"weights{seed}"
        save_model(folder, decoder.config, decoder_params(decoder), tokenizer=tokenizer)
        return str(folder)

    return save


@pytest.fixture
def own_weights(engine: JaxEngine, decoder: Decoder) -> Iterator[None]:
    """The shared engine has its first weights again afterwards."""
    yield
    engine.publish(nnx.state(decoder), engine.version + 1)


GREEDY = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 12, "temperature": 0}}


@pytest.mark.usefixtures("own_weights")
def test_new_weights_are_read_from_a_folder(server, engine: JaxEngine, save: Callable) -> None:
    before = server.ok("/generate", GREEDY)["output_ids"]
    path = save(1)
    done = server.ok("/update_weights_from_disk", {"model_path": path, "weight_version": "step-7"})
    assert done["success"] is True
    after = server.ok("/generate", GREEDY)
    assert after["output_ids"] != before
    assert after["meta_info"]["weight_version"] == "step-7"
    info = server.client.get("/get_model_info").json()
    assert (info["model_path"], info["weight_version"]) == (path, "step-7")


@pytest.mark.usefixtures("own_weights")
def test_requests_go_on_over_new_weights(server, save: Callable) -> None:
    path = save(2)
    body = {
        "input_ids": [5],
        "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
    }
    old = server.client.get("/get_model_info").json()["weight_version"]
    stream = events(server, body)
    first = next(stream)
    server.ok("/pause_generation", {"mode": "in_place"})
    server.ok("/update_weights_from_disk", {"model_path": path, "weight_version": "new"})
    server.ok("/continue_generation", {})
    *_, last = stream
    spans = last["meta_info"]["weight_versions"]
    assert first["meta_info"]["weight_version"] == old
    assert [span["version"] for span in spans] == [old, "new"]
    assert (spans[0]["start"], spans[1]["end"]) == (0, 400)
    assert spans[0]["end"] == spans[1]["start"]
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 400}


@pytest.mark.parametrize("fault", ["nan", "other", "rope", "cut", "missing", "nowhere"])
def test_bad_weights_are_refused_and_the_old_ones_stay(
    server, engine: JaxEngine, save: Callable, fault: str
) -> None:
    before, version = server.ok("/generate", GREEDY)["output_ids"], engine.version
    path = Path(save(3, spoil=fault == "nan"))
    weights, config = path / "model.safetensors", path / "config.json"
    if fault == "other":
        config.write_text(
            config.read_text().replace('"num_key_value_heads": 2', '"num_key_value_heads": 4')
        )
    if fault == "rope":
        config.write_text(json.dumps({**json.loads(config.read_text()), "rope_theta": 77.0}))
    if fault == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    if fault == "missing":
        weights.unlink()
    if fault == "nowhere":
        path = path / "nowhere"
    response = server.post("/update_weights_from_disk", {"model_path": str(path)})
    assert response.status_code == 400
    answer = response.json()
    assert answer["success"] is False
    says = {
        "nan": "NaN",
        "other": "has shape",
        "rope": "rope_theta is 77.0, not 10000.0",
        "cut": "safetensors",
        "missing": "model.safetensors",
        "nowhere": "no such file or folder",
    }
    assert says[fault] in answer["message"]
    assert engine.version == version
    assert server.ok("/generate", GREEDY)["output_ids"] == before
