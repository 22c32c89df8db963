"""Checkpoints: exact, atomic, and never the end of the ones before."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
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


IN_THE_MIDDLE = """
import os, signal, sys
from pathlib import Path
import jax.numpy as jnp
from gymllm_trainers import checkpoint

saver = checkpoint.Checkpointer(Path(sys.argv[1]))
arrays = {"params": {f"w{i}": jnp.full((300, 1000), 2.0) for i in range(8)}}
die = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "state":
    checkpoint.write_atomically = die
elif sys.argv[2] == "rename":
    checkpoint.os.rename = die
elif sys.argv[2] == "array":
    checkpoint.Checkpointer._commit = die
saver.save(2, arrays, {}, wait=False)
if sys.argv[2] == "now":
    die()
saver.wait()
"""


@pytest.mark.parametrize("moment", ["now", "array", "state", "rename"])
def test_killed_in_a_save_leaves_the_one_before(tmp_path, moment):
    before = {"params": {f"w{i}": jnp.full((300, 1000), 1.0) for i in range(8)}}
    Checkpointer(tmp_path).save(1, before, {"next": 1})
    killed = subprocess.run(
        [sys.executable, "-c", IN_THE_MIDDLE, str(tmp_path), moment],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=200,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    if moment != "now":  # where the write may have been quicker
        assert any(path.name.startswith(".writing-2") for path in tmp_path.iterdir())
    after = Checkpointer(tmp_path)
    if moment != "now":
        assert after.steps() == [1]
    assert not list(tmp_path.glob(".writing-*"))
    assert_same(after.restore(1, before), before)
    assert after.restore_state(1) == {"next": 1}
    for step in after.steps()[1:]:
        twice = jax.tree.map(lambda leaf: 2 * leaf, before)
        assert_same(after.restore(step, before), twice)


def test_save_without_waiting_copies_before_it_returns(tmp_path):
    saver = Checkpointer(tmp_path)
    change = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    values = jnp.arange(2_000_000.0).reshape(1000, 2000)
    expected = np.array(values)
    saver.save(1, {"x": {"w": values}}, {}, wait=False)
    values = change(values)
    values.block_until_ready()
    saver.wait()
    restored = saver.restore(1, {"x": {"w": jnp.zeros((1000, 2000))}})
    assert_same(restored, {"x": {"w": expected}})


def test_next_save_waits_for_the_one_before(tmp_path, monkeypatch):
    saver = Checkpointer(tmp_path, keep=5)
    write, turns = checkpoint.Checkpointer._commit, []
    begun, go_on = threading.Event(), threading.Event()

    def slow(self: Checkpointer, step: int, *rest: object) -> None:
        turns.append(step)
        begun.set()
        assert go_on.wait(60)
        write(self, step, *rest)  # type: ignore[arg-type] # as they came

    monkeypatch.setattr(checkpoint.Checkpointer, "_commit", slow)
    saver.save(1, arrays(), {}, wait=False)
    assert begun.wait(60)
    assert saver.latest() is None
    second = threading.Thread(target=lambda: saver.save(2, arrays(2.0), {}))
    second.start()
    assert turns == [1]
    go_on.set()
    second.join(60)
    assert turns == saver.steps() == [1, 2]
    saver.close()


def test_failure_in_the_background_comes_out_at_the_next_call(tmp_path, monkeypatch, capsys):
    saver = Checkpointer(tmp_path / "run" / "checkpoints", keep=5)
    saver.save(1, arrays(), {})
    no_room = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full(path: Path, text: bytes) -> None:
        raise no_room

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_atomically", full)
        saver.save(2, arrays(), {}, wait=False)
        with pytest.raises(
            RunError, match=r"step 2 can't be written.*disk is full.*step 1 is whole"
        ):
            saver.wait()
        saver.wait()  # once is enough
        saver.save(3, arrays(), {}, wait=False)
        saver._writer.join()  # type: ignore[union-attr] # it runs
    saver.save(4, arrays(), {})
    assert "the checkpoint of step 3 can't be written" in capsys.readouterr().err
    assert saver.steps() == [1, 4]
    assert not list(saver.path(1).parent.glob(".writing-*"))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"keep": 2}, [50, 60]),
        ({"keep": 1, "keep_best": 1}, [30, 60]),
        ({"keep": 1, "keep_best": 2}, [20, 30, 60]),
        ({"keep": 1, "keep_best": 1, "best_metric": "-reward/mean"}, [10, 60]),
        ({"keep": 1, "keep_best": 1, "best_metric": "episode/turns"}, [60]),
        ({"keep": 1, "keep_every": 20}, [20, 40, 60]),
        ({"keep": 1, "keep_best": 1, "keep_every": 50}, [30, 50, 60]),
    ],
)
def test_what_is_kept(tmp_path, options, kept):
    saver = Checkpointer(tmp_path, **options)
    rewards = {10: 0.1, 20: 0.7, 30: 0.7, 40: 0.2, 50: float("nan"), 60: 0.3}
    for step, reward in rewards.items():
        saver.save(step, {"x": jnp.ones(1)}, {}, metrics={"reward/mean": reward})
    assert saver.steps() == kept
    best = {"-reward/mean": 10, "episode/turns": None}
    if "keep_best" in options:
        assert saver.best() == best.get(options.get("best_metric", ""), 30)


def test_callers_files_and_parts_of_trees(tmp_path):
    saver = Checkpointer(tmp_path)
    saver.save(1, arrays(), {}, files={"config.yaml": b"a: 1", "model/tokenizer.json": b"{}"})
    assert (saver.path(1) / "model" / "tokenizer.json").read_bytes() == b"{}"
    assert (saver.path(1) / "config.yaml").read_text() == "a: 1"
    like = {"params": {"norm": jnp.zeros(3, jnp.bfloat16)}}
    part = saver.restore(1, like, part=True)
    assert_same(part["params"], {"norm": arrays()["params"]["norm"]})  # type: ignore[index] # a mapping
    with pytest.raises(ModelError, match="is not wanted"):
        saver.restore(1, like)
    with pytest.raises(ModelError, match="bias is missing"):
        saver.restore(1, {"params": {"bias": jnp.zeros(3)}}, part=True)


ON_MESHES = """
import sys
from pathlib import Path
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from gymllm_trainers.checkpoint import Checkpointer

saver = Checkpointer(Path(sys.argv[1]))
devices = np.array(jax.devices())
rng = np.random.default_rng(0)
values = {"up": rng.standard_normal((16, 32)).astype(np.float32), "norm": np.ones(7, np.int8)}
first, second = Mesh(devices.reshape(4, 2), ("a", "b")), Mesh(devices.reshape(2, 4), ("a", "b"))
def placed(mesh, spec, kind=None):
    lie = {"up": NamedSharding(mesh, spec, memory_kind=kind), "norm": NamedSharding(mesh, P())}
    return {"trainable": {name: jax.device_put(values[name], lie[name]) for name in values}}
saver.save(1, placed(first, P("a", "b")), {})
likes = [placed(second, P("b", "a")), placed(first, P()), placed(second, P("b"), "pinned_host")]
likes.append({"trainable": {name: jax.device_put(value, devices[3]) for name, value in values.items()}})
for like in likes:
    got = saver.restore(1, like)["trainable"]
    for name, value in values.items():
        assert got[name].sharding == like["trainable"][name].sharding, (got[name].sharding, name)
        np.testing.assert_array_equal(got[name], value)
print("same")
"""


def test_arrays_come_back_on_another_mesh_bit_for_bit(tmp_path):
    several = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, "-c", ON_MESHES, str(tmp_path)],
        env=os.environ | several,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.stdout.strip(), done.stderr) == ("same", "")


IN_TWO_PROCESSES = """
import sys
from pathlib import Path
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]), initialization_timeout=120)
from gymllm_trainers.checkpoint import Checkpointer

values = np.arange(64, dtype=np.float32).reshape(8, 8)
place = NamedSharding(Mesh(np.array(jax.devices()), ("a",)), P("a"))
array = jax.make_array_from_callback(values.shape, place, lambda index: values[index])
saver = Checkpointer(Path(sys.argv[1]), keep=1)
for step in (1, 2):
    saver.save(step, {"x": {"w": array * step}}, {"from": jax.process_index()}, wait=False)
saver.close()
assert saver.steps() == [2], saver.steps()
for shard in saver.restore(2, {"x": {"w": array}})["x"]["w"].addressable_shards:
    np.testing.assert_array_equal(shard.data, 2 * values[shard.index])
print("same", len(jax.local_devices()), len(jax.devices()))
"""


def test_two_processes_write_one_checkpoint(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    several = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", IN_TWO_PROCESSES, str(tmp_path), address, str(number)],
            env=os.environ | several,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        for process in processes:
            out, err = process.communicate(timeout=300)
            assert out.splitlines()[-1:] == ["same 2 4"], err[-3000:]  # after what gloo says
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    alone = Checkpointer(tmp_path)
    assert alone.restore_state(2) == {"from": 0}
    restored = alone.restore(2, {"x": {"w": jnp.zeros((8, 8))}})
    assert_same(restored, {"x": {"w": 2 * np.arange(64, dtype=np.float32).reshape(8, 8)}})


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

    monkeypatch.setattr(checkpoint, "_start_tree", full)
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
        ({"weights": {"w": jnp.ones((2, 3))}}, r"holds params, but no 'weights'\. .*--resume"),
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


def test_other_programs_logging_is_left_alone(tmp_path, caplog):
    Checkpointer(tmp_path).save(1, {"x": jnp.ones(1)}, {})
    assert not caplog.records
    logging.getLogger("absl").warning("heard")
    assert [record.message for record in caplog.records] == ["heard"]


@pytest.mark.parametrize(("name", "value"), [("keep", 0), ("keep_best", -1), ("keep_every", -1)])
def test_too_few_to_keep_is_refused(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"{name} must be >= {value + 1 if value else 1}, got"):
        Checkpointer(tmp_path, **{name: value})


def test_a_save_waits_for_one_that_another_thread_has_begun(tmp_path):
    # At Ctrl-C the thread of a save is abandoned, and the last checkpoint comes from another one.
    large = {"params": {"w": jnp.zeros((2048, 2048))}}
    for step in range(1, 9):
        saver = Checkpointer(tmp_path)
        failures: list[BaseException] = []

        def save(saver=saver, step=step, failures=failures):
            try:
                saver.save(step, large, {}, wait=False)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=save)
        thread.start()
        while not (tmp_path / f".writing-{step}").exists() and thread.is_alive():
            pass
        saver.wait()
        saver.save(step, large, {})
        thread.join()
        saver.wait()
        assert not failures
        assert saver.latest() == step
        assert_same(saver.restore(step, large), large)
    assert not list(tmp_path.glob(".writing-*"))
