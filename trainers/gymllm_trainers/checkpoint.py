"""Checkpoints: arrays by Orbax, the rest as JSON, each complete or absent.

    checkpoints/step_00000010/
    ├── arrays/<key>/   an Orbax tree each, so that a model is read without its optimizer
    └── state.json      whatever else a run needs to go on

A checkpoint is written beside and renamed when whole, so a crash at any moment leaves the ones
before.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from gymllm.errors import ModelError, RunError
from gymllm_trainers.run_folder import DISK_FULL, write_atomically

if TYPE_CHECKING:
    import jax

PyTree: TypeAlias = object
"""Nested containers of arrays, as JAX understands them."""
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

_STEP = re.compile(r"step_(\d{8})")


class Checkpointer:
    """The checkpoints of one run. When `save` returns, the checkpoint counts."""

    def __init__(self, folder: Path, *, keep: int = 2, read_only: bool = False) -> None:
        """Looks at `folder`, made at the first save, and clears what a crash left half-written.

        Args:
            folder: Where the checkpoints are.
            keep: How many of the latest stay; older ones are removed after a save, >= 1.
            read_only: Whether nothing is cleared, as another process may be writing it right now.
        """
        if keep < 1:
            raise ValueError(f"checkpoint.keep must be >= 1, got {keep}.")
        self._folder, self._keep = folder.absolute(), keep
        if not read_only:
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

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of `step`."""
        return self._folder / f"step_{step:08d}"

    def save(self, step: int, arrays: Mapping[str, PyTree], state: Mapping[str, Json]) -> Path:
        """Writes the checkpoint of `step`, replacing one of the same step, and drops the oldest.

        Args:
            step: Steps done.
            arrays: Trees of arrays by name ("params", "optimizer").
            state: Anything else, as JSON.

        Returns:
            The checkpoint's folder.

        Raises:
            RunError: The disk is full, or can't be written; the checkpoints before are whole.
        """
        writing = self._folder / f".writing-{step}"
        try:
            shutil.rmtree(writing, ignore_errors=True)
            (writing / "arrays").mkdir(parents=True)
            for key, tree in arrays.items():
                _save_tree(writing / "arrays" / key, tree)
            write_atomically(writing / "state.json", json.dumps(dict(state)).encode())
            # Two renames and no copying between: the step is never gone for longer than that.
            if self.path(step).exists():
                os.rename(self.path(step), writing.with_name(f".writing-{step}-replaced"))
            os.rename(writing, self.path(step))
            shutil.rmtree(writing.with_name(f".writing-{step}-replaced"), ignore_errors=True)
        except BaseException as error:
            shutil.rmtree(writing, ignore_errors=True)
            if isinstance(error, OSError) or _says_disk_full(error):
                raise RunError(self._failure(step, error)) from error
            raise
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(self.path(old), ignore_errors=True)
        return self.path(step)

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

    def restore(self, step: int, like: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """The arrays of the checkpoint of `step`.

        Args:
            step: A step of `steps()`.
            like: Trees of arrays or `jax.ShapeDtypeStruct`s to restore into, by name; only the
            names
                given are read. Arrays come back with their shapes, dtypes and shardings.

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
                raise ModelError(
                    f"the checkpoint {self.path(step)} holds {', '.join(held)}, but no {key!r}."
                )
            try:
                restored[key] = _restore_tree(folder / key, tree)
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

    def _failure(self, step: int, error: BaseException) -> str:
        latest = self.latest()
        before = (
            "There is none before it" if latest is None else f"The one of step {latest} is whole"
        )
        what = "the disk is full" if _says_disk_full(error) else str(error).rstrip(".")
        return (
            f"the checkpoint of step {step} can't be written to {self._folder}: {what}. {before}. "
            f"Free some space, then go on with --resume {self._folder.parent}."
        )


def _save_tree(path: Path, tree: PyTree) -> None:
    import orbax.checkpoint as ocp

    with _quiet(), ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, _flatten(tree))


def _restore_tree(path: Path, like: PyTree) -> PyTree:
    import jax
    import orbax.checkpoint as ocp

    wanted = {
        name: leaf
        if isinstance(leaf, jax.ShapeDtypeStruct)
        else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))
        for name, leaf in _flatten(like).items()
    }
    with _quiet(), ocp.PyTreeCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(path).item_metadata
        if metadata is None:
            raise ValueError("what it holds is not written in it")
        held = metadata.tree
        _check_fit(path, held, wanted)
        arguments = ocp.checkpoint_utils.construct_restore_args(wanted)
        flat = checkpointer.restore(path, item=wanted, restore_args=arguments)
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


@contextmanager
def _quiet() -> Iterator[None]:
    """Orbax reports each save through absl's logger, and warns of shardings it then handles."""
    if not isinstance(sys.unraisablehook, _QuietLateWrites):
        sys.unraisablehook = _QuietLateWrites(sys.unraisablehook)  # stays: late is after this block
    loggers = [logging.getLogger(name) for name in ("absl", "orbax")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)  # what fails is raised too
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
