"""The examples as their users run them: a model behind a real HTTP server, the recipe, its plan."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import pytest

from gymllm_envs.swe.patching import apply_patch
from gymllm_envs.swe.task import SweTask, write_tasks
from gymllm_envs.swe.trees import prepare

pytest.importorskip("gymllm_trainers")

from gymllm_trainers.cli import train
from gymllm_trainers.config import load_config
from gymllm_trainers.metrics import read_metrics
from gymllm_trainers.plan import plan

SMALL = """
--model.name tiny --model.lora-rank 0 --model.dtype float32 --model.compute-dtype float32
--model.remat none --warm-start.no-enabled --steps 2 --env.kwargs.tools bash --env.kwargs.max_turns 2
--agent.kind model --agent.max-new-tokens 4 --rollout.group-size 2 --rollout.concurrency 2
--learner.groups-per-step 1 --algorithm.zero-variance keep --learner.row-tokens 2048
--engine.slots 2 --engine.context-length 2048 --engine.prefill-tokens 512
--metrics.wandb off --metrics.no-display
"""
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def task_file(task: SweTask, tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    write_tasks(path, [task])
    return path


def gold_calls(task: SweTask) -> list[tuple[str, dict[str, object]]]:
    """Looks at the tree, writes the gold patch's files, submits."""
    files = apply_patch(task.patch, anyio.run(prepare, task).given.text)
    edits = [
        ("edit", {"command": "create", "path": path, "file_text": text})
        for path, text in files.items()
    ]
    return [("bash", {"command": "git status --short; ls"}), *edits, ("submit", {})]


class Model:
    """A chat-completions server that calls these tools one after the other, in each conversation."""

    def __init__(self, calls: list[tuple[str, dict[str, object]]]) -> None:
        self.asked: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.asked.append(body)
                turn = sum(message["role"] == "assistant" for message in body["messages"])
                name, arguments = calls[turn]
                function = {"name": name, "arguments": json.dumps(arguments)}
                call = {"id": f"call{turn}", "type": "function", "function": function}
                said = {"role": "assistant", "content": None, "tool_calls": [call]}
                answer = {
                    "choices": [{"message": said, "finish_reason": "tool_calls"}],
                    "usage": {"prompt_tokens": 100, "completion_tokens": 7},
                }
                data = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def model(task: SweTask) -> Iterator[Model]:
    served = Model(gold_calls(task))
    yield served
    served.close()


def test_a_model_behind_a_server_is_evaluated(
    model: Model, task: SweTask, task_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("swe_agent", EXAMPLES / "swe_agent.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    flags = ["--model", "some-model", "--url", model.url, "--env.kwargs.tasks", str(task_file)]
    flags += ["--episodes", "2", "--out", str(tmp_path / "out")]
    assert example.main(flags) == 0
    assert "reward" in capsys.readouterr().out
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["reward"]["mean"] == 1.0
    assert summary["metrics"]["resolved"]["mean"] == 1.0
    assert summary["generated_tokens"]["mean"] == 7 * 3
    first = model.asked[0]
    assert first["model"] == "some-model"
    offered = [tool["function"]["name"] for tool in first["tools"]]
    assert offered == ["bash", "edit", "search", "submit"]
    assert task.problem_statement.strip() in first["messages"][-1]["content"]
    # What a call gave comes back as that call's result.
    results = [m for m in model.asked[-1]["messages"] if m["role"] == "tool"]
    assert [m["tool_call_id"] for m in results] == ["call0", "call1"]


def test_the_recipe_can_be_planned(task_file: Path) -> None:
    recipe = ["--config", str(EXAMPLES / "swe_train.yaml"), "--env.kwargs.tasks", str(task_file)]
    found = plan(load_config(recipe))
    assert found.warnings == ()
    said = {(part, what): much for part, what, much in found.rows}
    assert said["environment", "tools"] == "bash, edit, search, submit"
    assert said["environment", "tasks"] == "1"
    assert said["episodes", "limits"] == "30 turns, 900 s"  # the environment's, which end first
    assert found.device_bytes is not None
    assert found.device_bytes < 60 * 2**30  # leaves room for activations on 80 GB


def test_the_recipe_trains_the_tiny_model_for_two_steps(task_file: Path, tmp_path: Path) -> None:
    small = SMALL.split()
    recipe = ["--config", str(EXAMPLES / "swe_train.yaml"), "--env.kwargs.tasks", str(task_file)]
    runs = tmp_path / "runs"
    assert train([*recipe, *small, "--runs-dir", str(runs), "--name", "small"]) == 0
    rows = [row for row in read_metrics(runs / "small" / "metrics.jsonl") if "reward/mean" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[-1]["episode/turns"] == 2.0
    assert rows[-1]["turn/invalid_actions"] > 0
