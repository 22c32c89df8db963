"""What a client may get wrong, and what it is told."""

from __future__ import annotations

import pytest

CHAT, COMPLETE, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (CHAT, {"messages": USER, "max_token": 3}, "did you mean max_tokens"),
        (CHAT, {"messages": USER, "temprature": None}, "did you mean temperature"),
        (CHAT, {"messages": USER, "stream_options": {"include_usag": True}}, "include_usage"),
        (CHAT, {"messages": USER, "stream_options": {"include_usage": True}}, "needs stream"),
        (CHAT, {"messages": USER, "max_tokens": 3, "max_completion_tokens": 4}, "differ"),
        (CHAT, {"messages": USER, "max_tokens": "3"}, "max_tokens must be a whole number"),
        (CHAT, {"messages": USER, "max_tokens": 0}, "must be >= 1, got 0"),
        (CHAT, {"messages": USER, "n": 0}, "n must be from 1 to 128"),
        (CHAT, {"messages": USER, "temperature": -1}, "temperature must be >= 0"),
        (CHAT, {"messages": USER, "top_p": 0}, "top_p must be in (0, 1]"),
        (CHAT, {"messages": USER, "top_logprobs": 3}, "top_logprobs needs logprobs"),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "from 0 to 20"),
        (CHAT, {"messages": USER, "logit_bias": {"x": 1}}, "a key of logit_bias"),
        (CHAT, {"messages": USER, "logit_bias": {"99999": 1}}, "token id below"),
        (CHAT, {"messages": USER, "tool_choice": "required"}, "no call can be forced"),
        (CHAT, {"messages": USER, "functions": [{}]}, "use tools"),
        (CHAT, {"messages": USER, "parallel_tool_calls": False}, "parallel_tool_calls is not"),
        (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, '"schema"'),
        (CHAT, {"messages": USER, "tools": [{"type": "x"}]}, 'tools[0].type must be "function"'),
        (CHAT, {}, "messages must be a list of at least one message"),
        (CHAT, {"messages": [{"role": "boss", "content": ""}]}, "messages[0].role must be one of"),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content must be"),
        (CHAT, {"messages": [{"role": "user", "contents": ""}]}, "unknown field 'contents'"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "read text alone",
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
            "must be a JSON object as text",
        ),
        (COMPLETE, {"prompt": "a", "echo": True}, "echo is not supported"),
        (COMPLETE, {"prompt": "a", "best_of": 2}, "best_of is not supported"),
        (COMPLETE, {}, "prompt must be a text"),
        (COMPLETE, {"prompt": []}, "prompt must be a text"),
        (COMPLETE, {"prompt": [[1], []]}, "prompt[1] is empty"),
        (COMPLETE, {"prompt": [1, "a"]}, "must be a list of token ids"),
        (COMPLETE, {"prompt": [1, 99999]}, "prompt holds 99999"),
        (COMPLETE, {"prompt": [True]}, "must be a list of token ids"),
        (GENERATE, {"input_id": [1]}, "did you mean input_ids"),
        (GENERATE, {"input_ids": [1], "sampling_params": {"max_tokens": 3}}, "max_new_tokens"),
        (GENERATE, {"input_ids": [1], "sampling_params": {"ebnf": "x"}}, "use regex"),
        (GENERATE, {"input_ids": [1], "text": "a"}, "exactly one of text and input_ids"),
        (GENERATE, {}, "exactly one of text and input_ids"),
        (GENERATE, {"input_ids": "a"}, "must be a list of token ids"),
        (GENERATE, {"input_ids": [[1], [2]], "rid": "a"}, "list of 2"),
        (GENERATE, {"input_ids": [1], "rid": ""}, "rid must be"),
        (GENERATE, {"input_ids": [[1], [2]], "sampling_params": [{}]}, "list of 2"),
        (
            GENERATE,
            {"input_ids": [1, 2, 3], "return_logprob": True, "logprob_start_len": 0},
            "at least 2",
        ),
        (GENERATE, {"input_ids": [1], "sampling_params": {"temperature": 10**400}}, "temperature"),
        (
            GENERATE,
            {"input_ids": [1], "sampling_params": {"logit_bias": {"1" * 5_000: 1}}},
            "a key",
        ),
        (GENERATE, {"input_ids": [[1]] * 10_000}, "may be asked for at once, got 10000"),
        ("/abort_request", {}, "abort_all"),
        ("/pause_generation", {"mode": "retract"}, "use in_place"),
        ("/pause_generation", {"mode": "later"}, "must be one of abort"),
        ("/update_weights_from_disk", {}, "model_path must be given"),
    ],
)
def test_a_mistake_is_named(server, path: str, body: dict, says: str) -> None:
    error = server.refused(path, body)
    assert says.lower() in error["message"].lower()
    assert error["type"] == "invalid_request_error"


def test_half_a_surrogate_pair_is_no_harm(server) -> None:
    """An answer or an error that repeats what it was given could not be sent otherwise."""
    for path, content, status in (
        (GENERATE, b'{"input_ids": [1], "\\ud800": 1}', 400),
        (GENERATE, b'{"input_ids": [1], "\xed\xa0\x80": 1}', 400),
        ("/update_weights_from_disk", b'{"model_path": "\\ud800"}', 400),
        (
            GENERATE,
            b'{"input_ids": [1], "rid": "\\ud800", "sampling_params": {"max_new_tokens": 1}}',
            200,
        ),
    ):
        response = server.client.post(path, content=content)
        assert response.status_code == status, response.text
        assert "\ufffd" in response.text


def test_a_path_that_cannot_be_is_refused(server) -> None:
    response = server.post("/update_weights_from_disk", {"model_path": "x" * 5_000})
    assert response.status_code == 400
    assert "no such file or folder as xxx" in response.json()["message"]


def test_what_is_no_json_is_refused(server) -> None:
    for content in (b"{", b"[1]", b'{"a": NaN}', b"\xff", b"[" * 100_000):
        response = server.client.post(CHAT, content=content)
        assert response.status_code == 400
        assert "JSON" in response.json()["error"]["message"]


def test_other_models_and_paths_are_not_found(server) -> None:
    error = server.refused(CHAT, {"model": "gpt-9", "messages": USER}, 404)
    assert error["code"] == "model_not_found"
    assert "'test'" in error["message"]
    assert "/v1/completions" in server.refused("/v1/completion", {}, 404)["message"]
    assert server.client.get(CHAT).status_code == 405


def test_a_prompt_that_cannot_fit_says_so_as_openai_does(server) -> None:
    long = {"messages": [{"role": "user", "content": "x" * 2000}]}
    for path, body in ((CHAT, long), (COMPLETE, {"prompt": [5] * 512})):
        error = server.refused(path, body)
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"]


def test_harmless_fields_are_let_pass(server) -> None:
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    nothing = {"stop": None, "tools": None, "echo": None, "seed": None, "suffix": None}
    server.ok(CHAT, {"messages": USER, "max_tokens": 1, **harmless, **nothing})
    server.ok(COMPLETE, {"prompt": "a", "max_tokens": 1, **harmless, "echo": False, "best_of": 1})
