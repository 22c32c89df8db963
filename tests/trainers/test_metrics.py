"""Where metrics go: always a valid line, never the end of a run."""

from __future__ import annotations

import json
import math
import threading
import time
from pathlib import Path

import pytest

from gymllm.errors import ClosedError, MissingExtraError
from gymllm_trainers import metrics
from gymllm_trainers.metrics import (
    JsonlWriter,
    MetricsWriters,
    WandbWriter,
    logged_in,
    open_metrics,
    read_metrics,
)
from gymllm_trainers.run_folder import RunFolder


@pytest.fixture(autouse=True)
def logged_out(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_closing_in_a_hurry_does_not_wait_for_wandb(tmp_path, monkeypatch):
    hang = threading.Event()
    monkeypatch.setattr(WandbWriter, "_send", lambda self: hang.wait(60))
    said: list[str] = []
    asked: list[int] = []

    def hurried() -> bool:
        asked.append(0)
        return len(asked) > 1

    writer = WandbWriter(tmp_path, name="a", mode="offline", hurried=hurried, warn=said.append)
    started = time.monotonic()
    writer.close(timeout_s=30)
    assert time.monotonic() - started < 5
    assert "did not finish" in said[0]
    hang.set()


def test_records_read_back(tmp_path):
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.write(1, {"reward/mean": 0.5, "groups": 4})
    writer.write(2, {"reward/mean": 0.75})
    assert read_metrics(tmp_path / "m.jsonl") == [
        {"step": 1, "reward/mean": 0.5, "groups": 4},
        {"step": 2, "reward/mean": 0.75},
    ]
    writer.close()
    writer.close()


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path):
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.write(1, {"a": math.nan, "b": math.inf, "c": 1.0})
    writer.close()

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    line = (tmp_path / "m.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse) == {"step": 1, "a": None, "b": None, "c": 1.0}
    assert math.isnan(read_metrics(tmp_path / "m.jsonl")[0]["a"])


def test_numpy_and_jax_numbers_are_numbers(tmp_path):
    import jax.numpy as jnp
    import numpy as np

    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.write(1, {"a": np.float32(0.5), "b": jnp.float32(2), "c": np.int64(3)})  # type: ignore[dict-item] # what callers hand over
    writer.close()
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1, "a": 0.5, "b": 2.0, "c": 3.0}]


def test_resume_drops_steps_that_are_done_again_and_a_torn_line(tmp_path):
    path = tmp_path / "m.jsonl"
    writer = JsonlWriter(path)
    for step in (1, 2, 3):
        writer.write(step, {"x": step})
    writer.close()
    with path.open("a") as file:
        file.write('{"step": 4, "x"')
    writer = JsonlWriter(path, resume_step=2)
    writer.write(3, {"x": 30})
    writer.close()
    assert read_metrics(path) == [
        {"step": 1, "x": 1},
        {"step": 2, "x": 2},
        {"step": 3, "x": 30},
    ]


def test_wandb_offline_run_is_inside_the_folder(tmp_path, capfd):
    # With mcp imported it would advertise another product.
    pytest.importorskip("mcp")
    said: list[str] = []
    writer = WandbWriter(tmp_path, name="a", config={"seed": 1}, warn=said.append)
    assert writer.mode == "offline"
    writer.write(1, {"reward/mean": 0.5})
    writer.write(2, {"reward/mean": math.nan})
    writer.close(timeout_s=30)
    writer.close()
    assert said == []
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = run.glob("*.wandb")
    assert file.stat().st_size > 0
    output = capfd.readouterr()
    assert (output.out, output.err) == ("", "")
    with pytest.raises(ClosedError):
        writer.write(3, {})


def test_broken_wandb_is_said_once_and_stops_nothing(tmp_path, monkeypatch):
    import wandb

    def broken(**settings: object) -> None:
        raise RuntimeError("no space")

    monkeypatch.setattr(wandb, "init", broken)
    said: list[str] = []
    writer = WandbWriter(tmp_path, name="a", warn=said.append)
    for step in range(3):
        writer.write(step, {"x": 1.0})
    writer.close()
    assert len(said) == 1
    assert "RuntimeError: no space" in said[0]


def test_wandb_that_hangs_is_left_behind(tmp_path, monkeypatch):
    import threading

    import wandb

    release = threading.Event()
    monkeypatch.setattr(wandb, "init", lambda **settings: release.wait(10))
    said: list[str] = []
    writer = WandbWriter(tmp_path, name="a", warn=said.append)
    writer.close(timeout_s=0.01)
    assert "did not finish" in said[0]
    release.set()


def test_missing_wandb_names_its_install(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'pip install "gymllm-trainers\[wandb\]"'):
        WandbWriter(tmp_path, name="a")


def test_auto_leaves_wandb_out_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    folder = RunFolder.create(tmp_path, "a", "")
    writers = open_metrics(folder, name="a", wandb="auto")
    writers.write(1, {"x": 1.0})
    writers.close()
    assert read_metrics(folder.metrics) == [{"step": 1, "x": 1.0}]
    with pytest.raises(MissingExtraError):
        open_metrics(folder, name="a", wandb="offline")


def test_login_is_found_where_wandb_looks(monkeypatch, tmp_path):
    assert not logged_in()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    assert logged_in()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not logged_in()
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert logged_in()


def test_writers_all_get_every_record(tmp_path: Path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    writers = MetricsWriters([JsonlWriter(path) for path in paths])
    writers.write(1, {"x": 1.0})
    writers.close()
    assert paths[0].read_text() == paths[1].read_text() == '{"step": 1, "x": 1.0}\n'
