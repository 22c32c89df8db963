"""Checkpoints: exact, atomic, and never the end of the ones before."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gymllm.errors import ModelError, RunError
from gymllm_trainers import checkpoint
from gymllm_trainers.checkpoint import Checkpointer


def arrays(scale: float = 1.0) -> dict[str, object]:
    params = {
        "layers": [{"w": scale * jnp.arange(6.0).reshape(2, 3)} for _ in range(2)],
        "norm": jnp.full((3,), scale, jnp.bfloat16),
    }
    return {"params": params, "optimizer": optax.adamw(1e-3).init(params)}


def assert_same(left: object, right: object) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_restore_gives_back_what_was_saved(tmp_path, capfd):
    saver = Checkpointer(tmp_path / "checkpoints")
    assert saver.latest() is None
    saver.save(3, arrays(), {"next": 7, "again": [1, 2], "nothing": None})
    reader = Checkpointer(tmp_path / "checkpoints")
    assert reader.latest() == 3
    assert_same(reader.restore(3, arrays(0.0)), arrays())
    assert reader.restore_state(3) == {"next": 7, "again": [1, 2], "nothing": None}
    output = capfd.readouterr()
    assert (output.out, output.err) == ("", "")


def test_part_of_a_checkpoint_is_restored_into_shapes_alone(tmp_path):
    saver = Checkpointer(tmp_path)
    saver.save(1, arrays(), {})
    shapes = jax.eval_shape(lambda: arrays()["params"])
    assert_same(saver.restore(1, {"params": shapes})["params"], arrays()["params"])


def test_only_the_latest_are_kept(tmp_path):
    saver = Checkpointer(tmp_path, keep=2)
    for step in (1, 2, 10):
        saver.save(step, {"x": jnp.ones(1)}, {"step": step})
    assert saver.steps() == [2, 10]


def test_same_step_is_replaced(tmp_path):
    saver = Checkpointer(tmp_path)
    for scale in (1.0, 2.0):
        saver.save(5, arrays(scale), {})
    assert saver.steps() == [5]
    assert_same(saver.restore(5, arrays()), arrays(2.0))
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000005"]


def test_crash_in_a_save_leaves_the_one_before(tmp_path, monkeypatch):
    saver = Checkpointer(tmp_path)
    saver.save(1, arrays(), {})

    def killed(path: Path, tree: object) -> None:
        path.mkdir()
        raise SystemExit  # as near to kill -9 as one process can test itself

    monkeypatch.setattr(checkpoint, "_save_tree", killed)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda path, ignore_errors: None)
    with pytest.raises(SystemExit):
        saver.save(2, arrays(2.0), {})
    monkeypatch.undo()
    assert (tmp_path / ".writing-2").is_dir()
    after = Checkpointer(tmp_path)
    assert after.latest() == 1
    assert_same(after.restore(1, arrays(0.0)), arrays())
    assert not (tmp_path / ".writing-2").exists()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        ValueError("UNAVAILABLE: write: No space left on device [source locations=...]"),
    ],
)
def test_full_disk_says_what_to_do_and_keeps_the_one_before(tmp_path, monkeypatch, error):
    saver = Checkpointer(tmp_path / "run" / "checkpoints")
    saver.save(4, arrays(), {})

    def full(path: Path, tree: object) -> None:
        raise error

    monkeypatch.setattr(checkpoint, "_save_tree", full)
    with pytest.raises(RunError) as raised:
        saver.save(8, arrays(2.0), {})
    assert "step 8" in str(raised.value)
    assert "the disk is full" in str(raised.value)
    assert "The one of step 4 is whole" in str(raised.value)
    assert f"--resume {tmp_path / 'run'}" in str(raised.value)
    assert saver.steps() == [4]
    assert list(saver.path(4).parent.iterdir()) == [saver.path(4)]


def test_other_mistakes_are_not_called_a_full_disk(tmp_path):
    with pytest.raises(TypeError):
        Checkpointer(tmp_path).save(1, {"x": jnp.ones(1)}, {"bad": object()})  # type: ignore[dict-item] # the mistake
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"params": {"w": jnp.ones((2, 4))}}, r"w has shape \(2, 3\), expected \(2, 4\)"),
        ({"params": {"v": jnp.ones((2, 3))}}, r"v is missing; w is not wanted"),
        ({"weights": {"w": jnp.ones((2, 3))}}, r"holds params, but no 'weights'"),
    ],
)
def test_checkpoint_of_another_model_is_refused(tmp_path, like, message):
    saver = Checkpointer(tmp_path)
    saver.save(1, {"params": {"w": jnp.ones((2, 3))}}, {})
    with pytest.raises(ModelError, match=message):
        saver.restore(1, like)


def spoil(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("state.json", "state.json can't be read"),
        ("arrays", "arrays/ is missing"),
        ("arrays/x/_METADATA", "arrays/x can't be read"),
        ("arrays/x/manifest.ocdbt", "arrays/x can't be read"),
        ("arrays/x/d", "arrays/x can't be read"),
    ],
)
def test_damaged_checkpoint_says_what_is_wrong_and_how_to_go_on(tmp_path, capfd, what, said):
    saver = Checkpointer(tmp_path / "run" / "checkpoints", keep=3)
    weights = {"x": {"w": jnp.arange(5000.0)}}
    for step in (1, 3, 4):
        saver.save(step, weights, {"next": 1})
    path = saver.path(4) / what
    if what == "arrays":
        shutil.rmtree(path)
    elif path.is_dir():
        for file in path.iterdir():
            spoil(file)
    else:
        spoil(path)
    read = (
        saver.restore_state if what == "state.json" else lambda step: saver.restore(step, weights)
    )
    with pytest.raises(ModelError) as raised:
        read(4)
    message = str(raised.value)
    assert f"the checkpoint {saver.path(4)} is damaged: " in message
    assert said in message
    assert "There are earlier ones, of step 1, 3." in message
    assert f"rm -r {saver.path(4)}" in message
    assert f"go on from step 3 with gymllm-train --resume {tmp_path / 'run'}" in message
    shutil.rmtree(saver.path(4))
    assert_same(saver.restore(3, weights), weights)
    assert "Traceback" not in capfd.readouterr().err


def test_only_checkpoint_being_damaged_means_another_start(tmp_path):
    saver = Checkpointer(tmp_path)
    saver.save(2, {"x": jnp.ones(1)}, {})
    (saver.path(2) / "state.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"hold a mapping\. There is no earlier one.*beginning"):
        saver.restore_state(2)


def test_reader_leaves_alone_what_another_process_is_writing(tmp_path):
    writing = tmp_path / ".writing-2"
    writing.mkdir()
    Checkpointer(tmp_path, read_only=True)
    assert writing.exists()
    Checkpointer(tmp_path)
    assert not writing.exists()


def test_late_writes_of_orbax_are_quiet_and_nothing_else_is(tmp_path, monkeypatch):
    heard: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    saver = Checkpointer(tmp_path)
    for step in (1, 2):
        saver.save(step, {"x": jnp.ones(1)}, {})
    late = SimpleNamespace(exc_value=RuntimeError("Event loop is closed"), object=None)
    sys.unraisablehook(late)  # type: ignore[arg-type] # stands for UnraisableHookArgs
    assert heard == []
    for other in (
        SimpleNamespace(exc_value=RuntimeError("Event loop is closed"), object=saver),
        SimpleNamespace(exc_value=ValueError("bug"), object=None),
    ):
        sys.unraisablehook(other)  # type: ignore[arg-type] # as above
        assert heard.pop() is other


def test_keep_below_one_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep must be >= 1, got 0"):
        Checkpointer(tmp_path, keep=0)
