"""Checkpoints: exact, atomic, and never the end of the ones before."""

from __future__ import annotations

import errno
import os
from pathlib import Path

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


def test_keep_below_one_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep must be >= 1, got 0"):
        Checkpointer(tmp_path, keep=0)
