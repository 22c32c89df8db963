"""Checkpoints: arrays by Orbax, the rest as files, each complete or absent.

    checkpoints/step_00000010/
    ├── arrays/<key>/   an Orbax tree each, so that a model is read without its optimizer
    ├── state.json      whatever else a run needs to go on
    ├── metrics.json    numbers of that step, by which the best is kept
    └── ...             files that the caller adds: configuration, tokenizer

A checkpoint is written beside and renamed when whole, so a crash at any moment leaves the ones
before. Where several processes share the arrays, all of them call the same methods in the same order: each
writes its own shards, and the first one everything else.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from gymllm.errors import ModelError, RunError
from gymllm_trainers.run_folder import DISK_FULL, warn, write_atomically

if TYPE_CHECKING:
    import jax
    import orbax.checkpoint as ocp

PyTree: TypeAlias = object
"""Nested containers of arrays, as JAX understands them."""
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

_PATIENCE_MS = 600_000
"""How long one process waits for the others."""
_meetings = itertools.count()
_STEP = re.compile(r"step_(\d{8})")


class Checkpointer:
    """The checkpoints of one run. One caller at a time; what it writes in the background is its own."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        keep_best: int = 0,
        best_metric: str = "reward/mean",
        keep_every: int = 0,
        read_only: bool = False,
    ) -> None:
        """Looks at `folder`, made at the first save, and clears what a crash left half-written.

        After each save, checkpoints that none of the three reasons keeps are removed.

        Args:
            folder: Where the checkpoints are.
            keep: How many of the latest stay, >= 1.
            keep_best: How many of those with the best metric stay, >= 0.
            best_metric: Its name; the largest is best, or with "-" before it the smallest. Where two are
                equal the later is.
            keep_every: Those whose step is a multiple of this stay for ever; 0: none.
            read_only: Whether nothing is cleared, as another process may be writing it right now.

        Raises:
            ValueError: One of the numbers is too small.
        """
        for name, value, least in (
            ("keep", keep, 1),
            ("keep_best", keep_best, 0),
            ("keep_every", keep_every, 0),
        ):
            if value < least:
                raise ValueError(f"checkpoint.{name} must be >= {least}, got {value}.")
        self._folder, self._keep = folder.absolute(), keep
        self._keep_best, self._best_metric, self._keep_every = keep_best, best_metric, keep_every
        self._writer: threading.Thread | None = None
        # A thread that was abandoned at Ctrl-C may still be in a save when the last one comes.
        self._lock = threading.RLock()
        self._failure: BaseException | None = None
        if not read_only and _first_process():
            for leftover in self._folder.glob(".writing-*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are whole, oldest first."""
        if not self._folder.is_dir():
            return []
        found = (_STEP.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match.group(1)) for match in found if match)

    def latest(self) -> int | None:
        """Step of the newest checkpoint, if there is one."""
        steps = self.steps()
        return steps[-1] if steps else None

    def best(self) -> int | None:
        """Step of the checkpoint with the best metric, if one has it."""
        ranked = self._ranked()
        return ranked[-1] if ranked else None

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of `step`."""
        return self._folder / f"step_{step:08d}"

    def save(
        self,
        step: int,
        arrays: Mapping[str, PyTree],
        state: Mapping[str, Json],
        *,
        metrics: Mapping[str, float] | None = None,
        files: Mapping[str, bytes] | None = None,
        wait: bool = True,
    ) -> Path:
        """Writes the checkpoint of `step`, replacing one of the same step, and drops what isn't kept.

        A save before that goes on in the background is waited for; if it failed, that is a warning, as
        this checkpoint takes its place.

        Args:
            step: Steps done.
            arrays: Trees of arrays by name ("params", "optimizer").
            state: Anything else, as JSON.
            metrics: Numbers of this step, by name.
            files: Other files of the checkpoint, by their path in it.
            wait: Whether the checkpoint counts when this returns. Otherwise it returns when everything is
                copied to the host, and arrays may be changed or donated; the next `save`, `wait` or `close`
                says if it couldn't be written. A program that ends before one of these leaves no checkpoint.

        Returns:
            The checkpoint's folder.

        Raises:
            RunError: The disk is full, or can't be written; the checkpoints before are whole.
        """
        with self._lock:
            return self._save(step, arrays, state, metrics or {}, files or {}, wait=wait)

    def _save(
        self,
        step: int,
        arrays: Mapping[str, PyTree],
        state: Mapping[str, Json],
        metrics: Mapping[str, float],
        files: Mapping[str, bytes],
        *,
        wait: bool,
    ) -> Path:
        try:
            self.wait()
        except RunError as error:
            warn(str(error))
        texts = {
            "state.json": json.dumps(dict(state)).encode(),
            "metrics.json": json.dumps(dict(metrics)).encode(),
            **files,
        }
        writing = self._folder / f".writing-{step}"
        if _first_process():
            self.begin(step)
        try:
            _meet(f"begin-{step}")
            trees = [_start_tree(writing / "arrays" / key, tree) for key, tree in arrays.items()]
        except BaseException as error:
            raise self._given_up(step, error) from error

        def write() -> None:
            try:
                for tree in trees:
                    tree.wait_until_finished()
                    tree.close()
                if _first_process():
                    self._commit(step, writing, texts)
            except BaseException as error:  # raised where someone waits for it
                self._failure = self._given_up(step, error)

        self._writer = threading.Thread(target=write, name=f"checkpoint {step}", daemon=True)
        self._writer.start()
        if wait:
            self.wait()
        return self.path(step)

    def begin(self, step: int) -> None:
        """Makes the folder that the checkpoint of `step` is written into; `save` does it too.

        Raises:
            RunError: The disk is full, or can't be written.
        """
        writing = self._folder / f".writing-{step}"
        try:
            shutil.rmtree(writing, ignore_errors=True)
            (writing / "arrays").mkdir(parents=True)
        except OSError as error:
            raise self._given_up(step, error) from error

    @property
    def has_saved(self) -> bool:
        """Whether there was a save that nobody has waited for."""
        return self._writer is not None

    def is_writing(self, timeout_s: float) -> bool:
        """Whether something is still written in the background after `timeout_s`."""
        if self._writer is None:
            return False
        self._writer.join(timeout_s)
        return self._writer.is_alive()

    def wait(self) -> None:
        """Waits for what is written in the background; when this returns, it counts.

        Raises:
            RunError: It could not be written; the checkpoints before are whole.
        """
        with self._lock:
            if self._writer is None:
                return
            self._writer.join()
            self._writer = None
            _meet("end")
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure

    def close(self) -> None:
        """As `wait`: after it nothing of this object runs any more."""
        self.wait()

    def _commit(self, step: int, writing: Path, texts: Mapping[str, bytes]) -> None:
        for name, text in texts.items():
            (writing / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(writing / name, text)
        # Two renames and no copying between: the step is never gone for longer than that.
        replaced = writing.with_name(f".writing-{step}-replaced")
        if self.path(step).exists():
            os.rename(self.path(step), replaced)
        os.rename(writing, self.path(step))
        shutil.rmtree(replaced, ignore_errors=True)
        kept = self._kept()
        for old in self.steps():
            if old not in kept:
                shutil.rmtree(self.path(old), ignore_errors=True)

    def _kept(self) -> set[int]:
        steps = self.steps()
        kept = set(steps[-self._keep :])
        if self._keep_best:
            kept |= set(self._ranked()[-self._keep_best :])
        if self._keep_every:
            kept |= {step for step in steps if step % self._keep_every == 0}
        return kept

    def _ranked(self) -> list[int]:
        """Steps of the checkpoints that have the metric, the best one last."""
        name = self._best_metric.removeprefix("-")
        sign = -1 if name != self._best_metric else 1
        ranked: list[tuple[float, int]] = []
        for step in self.steps():
            try:
                held = json.loads((self.path(step) / "metrics.json").read_text(encoding="utf-8"))
                value = float(held[name])
            except (OSError, ValueError, KeyError, TypeError):
                continue  # an older version's, or a step without that number
            if not math.isnan(value):
                ranked.append((sign * value, step))
        return [step for _, step in sorted(ranked)]

    def _given_up(self, step: int, error: BaseException) -> BaseException:
        """Clears what was written of a checkpoint; returns what to raise."""
        shutil.rmtree(self._folder / f".writing-{step}", ignore_errors=True)
        # One process that can't write has the others wait until their patience ends.
        elsewhere = _several_processes() and isinstance(error, (RuntimeError, ValueError))
        if isinstance(error, OSError) or _says_disk_full(error) or elsewhere:
            failure = RunError(self._said(step, error))
            failure.__cause__ = error
            return failure
        return error

    def restore_state(self, step: int) -> dict[str, Json]:
        """The JSON state of the checkpoint of `step`.

        Raises:
            ModelError: It can't be read.
        """
        try:
            state = json.loads((self.path(step) / "state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self.damaged(step, f"state.json can't be read ({_first_line(error)})") from error
        if not isinstance(state, dict):
            raise self.damaged(step, "state.json doesn't hold a mapping")
        return cast("dict[str, Json]", state)

    def restore(
        self, step: int, like: Mapping[str, PyTree], *, part: bool = False
    ) -> dict[str, PyTree]:
        """The arrays of the checkpoint of `step`.

        Args:
            step: A step of `steps()`.
            like: Trees of arrays or `jax.ShapeDtypeStruct`s to restore into, by name; only the names
                given are read. Arrays come back with their shapes, dtypes and shardings, whichever mesh they
                were saved from.
            part: Whether a tree may lack arrays that the checkpoint holds, which are not read then.

        Returns:
            Trees of the same structure as `like`.

        Raises:
            ModelError: The checkpoint holds other names or shapes, or is damaged; says which.
        """
        folder = self.path(step) / "arrays"
        held = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        if not held:
            raise self.damaged(step, "its arrays/ is missing or empty")
        restored: dict[str, PyTree] = {}
        for key, tree in like.items():
            if key not in held:
                raise self.damaged(step, f"it holds {', '.join(held)}, but no {key!r}")
            try:
                restored[key] = _restore_tree(folder / key, tree, part=part)
            except (ModelError, MemoryError):
                raise
            except Exception as error:  # Orbax and what it stands on raise many types
                raise self.damaged(
                    step, f"arrays/{key} can't be read ({_first_line(error)})"
                ) from error
        return restored

    def damaged(self, step: int, what: str) -> ModelError:
        """The error of a checkpoint that can't be used: what is wrong, and how to go on."""
        earlier = [other for other in self.steps() if other < step]
        if earlier:
            left = "There are earlier ones, of step " + ", ".join(map(str, earlier))
            after = f"go on from step {earlier[-1]}"
        else:
            left, after = "There is no earlier one", "start the run again from its beginning"
        return ModelError(
            f"the checkpoint {self.path(step)} is damaged: {what}. {left}. Remove that folder "
            f"(rm -r {shlex.quote(str(self.path(step)))}), then {after} with "
            f"gymllm-train --resume {shlex.quote(str(self._folder.parent))}."
        )

    def _said(self, step: int, error: BaseException) -> str:
        latest = self.latest()
        before = (
            "There is none before it" if latest is None else f"The one of step {latest} is whole"
        )
        what = "the disk is full" if _says_disk_full(error) else str(error).rstrip(".")
        return (
            f"the checkpoint of step {step} can't be written to {self._folder}: {what}. {before}. "
            f"Free some space, then go on with --resume {self._folder.parent}."
        )


def _start_tree(path: Path, tree: PyTree) -> ocp.AsyncCheckpointer:
    """Copies a tree to the host and starts to write it; the caller waits for it and closes it."""
    import orbax.checkpoint as ocp

    _quiet()
    checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    checkpointer.save(path, args=ocp.args.PyTreeSave(_flatten(tree)))
    return checkpointer


def _first_process() -> bool:
    """Whether this is the process that writes what isn't an array."""
    return not _several_processes() or sys.modules["jax"].process_index() == 0


def _several_processes() -> bool:
    """Whether JAX was told of others. Asking for their number would start its devices."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized() and jax.process_count() > 1


def _meet(place: str) -> None:
    """Waits until every process is here. No device takes part: a step may run on them meanwhile."""
    if _several_processes():
        from orbax.checkpoint import multihost

        key = f"gymllm-checkpoint-{place}-{next(_meetings)}"
        multihost.get_barrier_sync_fn()(key=key, timeout_ms=_PATIENCE_MS)


def _restore_tree(path: Path, like: PyTree, *, part: bool) -> PyTree:
    import jax
    import orbax.checkpoint as ocp

    wanted = {
        name: leaf
        if isinstance(leaf, jax.ShapeDtypeStruct)
        else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))
        for name, leaf in _flatten(like).items()
    }
    _quiet()
    with ocp.PyTreeCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(path).item_metadata
        if metadata is None:
            raise ValueError("what it holds is not written in it")
        held = metadata.tree
        if part:
            held = {name: held[name] for name in held if name in wanted}
        _check_fit(path, held, wanted)
        arguments = ocp.args.PyTreeRestore(
            item=wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=part,
        )
        flat = checkpointer.restore(path, args=arguments)
    return jax.tree.unflatten(jax.tree.structure(like), [flat[name] for name in wanted])


def _check_fit(
    path: Path, held: Mapping[str, object], wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> None:
    differences = [f"{name} is missing" for name in wanted if name not in held]
    differences += [f"{name} is not wanted" for name in held if name not in wanted]
    for name in wanted:
        if name in held:
            shape = tuple(getattr(held[name], "shape", ()))
            if shape != wanted[name].shape:
                differences.append(f"{name} has shape {shape}, expected {wanted[name].shape}")
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise ModelError(
            f"the checkpoint {path} doesn't fit the model: {'; '.join(differences[:3])}{more}. "
            f"Was the model's configuration changed since it was written?"
        )


def _flatten(tree: PyTree) -> dict[str, jax.Array]:
    """Leaves by path: one form for every kind of tree, in the file as in messages."""
    import jax

    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    flat = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert len(flat) == len(leaves), "two leaves have the same path"
    return flat


def _says_disk_full(error: BaseException) -> bool:
    """Orbax writes from C++, whose errors carry the system's message and no number."""
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return True
    chain: BaseException | None = error
    while chain is not None:
        text = str(chain)
        if "No space left on device" in text or "Disk quota exceeded" in text:
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    first = text[0].rstrip(".") if text else type(error).__name__
    return first if len(first) <= 200 else first[:197] + "..."


class _QuietLateWrites:
    """A `sys.unraisablehook` that keeps what Orbax lets come too late off the console.

    Orbax closes its event loop at the first array that fails. The others end in TensorStore's threads at
    any later moment, and each tells the closed loop: an error that nobody can handle, and that says less
    than the first one did.
    """

    def __init__(self, before: Callable[[sys.UnraisableHookArgs], object]) -> None:
        self._before = before

    def __call__(self, unraisable: sys.UnraisableHookArgs, /) -> None:
        error = unraisable.exc_value
        late = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        if not (late and unraisable.object is None):
            self._before(unraisable)


def _from_elsewhere(record: logging.LogRecord) -> bool:
    """Whether a record is not Orbax's own: what fails there is raised too."""
    return "orbax" not in record.pathname


def _quiet() -> None:
    """Orbax reports each save through absl's logger, and warns of shardings it then handles.

    For good: it writes in the background, at any later moment.
    """
    if not isinstance(sys.unraisablehook, _QuietLateWrites):
        sys.unraisablehook = _QuietLateWrites(sys.unraisablehook)
    for name in ("absl", "orbax"):
        logging.getLogger(name).addFilter(_from_elsewhere)  # adding it again changes nothing
