"""Where numbers of a run go: JSON lines always, Weights & Biases when wanted.

A step's record is written when the step is over, under the number of steps done by then: the first
is 1.
"""

from __future__ import annotations

import json
import math
import netrc
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import urlparse

from gymllm.errors import ClosedError, MissingExtraError
from gymllm_trainers.run_folder import LineFile, RunFolder, warn, write_atomically

WandbMode = Literal["auto", "online", "offline", "off"]


class MetricsWriter(Protocol):
    """Takes numbers. Never stops a run because of where they go."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the record of one step; returns soon."""
        ...

    def close(self) -> None:
        """Writes what is left and releases everything. Idempotent."""
        ...


def open_metrics(
    folder: RunFolder,
    *,
    name: str,
    wandb: WandbMode = "auto",
    project: str = "gymllm",
    config: Mapping[str, object] | None = None,
    resume_step: int | None = None,
    hurried: Callable[[], bool] = lambda: False,
) -> MetricsWriters:
    """The writers of a run.

    Args:
        folder: The run's folder.
        name: The run's name.
        wandb: Whether and how Weights & Biases is told; "auto" leaves it out where it isn't
        installed.
        project: Its project.
        config: The merged configuration, shown there beside the run.
        resume_step: Steps done by the checkpoint that a run goes on from.
        hurried: Whether closing must not take long, asked while it waits.

    Raises:
        MissingExtraError: `wandb` is "online" or "offline", and it isn't installed.
    """
    writers: list[MetricsWriter] = [JsonlWriter(folder.metrics, resume_step=resume_step)]
    if wandb != "off" and not (wandb == "auto" and find_spec("wandb") is None):
        resume = resume_step is not None
        writers.append(
            WandbWriter(
                folder.path,
                name=name,
                project=project,
                mode=wandb,
                config=config,
                resume=resume,
                hurried=hurried,
            )
        )
    return MetricsWriters(writers)


class MetricsWriters:
    """Several writers as one."""

    def __init__(self, writers: Sequence[MetricsWriter]) -> None:
        """Owns `writers`: closes them all."""
        self._writers = tuple(writers)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Gives the record to every writer."""
        for writer in self._writers:
            writer.write(step, metrics)

    def close(self) -> None:
        """Closes every writer."""
        for writer in self._writers:
            writer.close()


class JsonlWriter:
    """One JSON object a line: "step" first, then the metrics by name.

    Every line is valid JSON: a number that is not finite is written as null. A full disk delays
    records and loses none (see `LineFile`).
    """

    def __init__(
        self, path: Path, *, resume_step: int | None = None, warn: Callable[[str], None] = warn
    ) -> None:
        """Opens the file for appending.

        Args:
            path: The file; made if missing.
            resume_step: Steps done by the checkpoint that a run goes on from: later records are
                removed, since those steps are done again, and so is a line torn by a crash.
            warn: Told once when the disk is full.
        """
        if resume_step is not None and path.exists():
            kept = [record for record in _lines(path) if record["step"] <= resume_step]
            text = "".join(json.dumps(record) + "\n" for record in kept)
            write_atomically(path, text.encode())
        self._file = LineFile(path, warn=warn)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one record; it is with the operating system when this returns."""
        record: dict[str, float | int | None] = {"step": int(step)}
        for name, value in metrics.items():
            record[name] = _json_number(value)
        self._file.write(json.dumps(record, allow_nan=False))

    def close(self) -> None:
        """Closes the file. Idempotent."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Every record of a metrics file, oldest first; null is NaN, a torn last line is left out."""
    return [
        {name: math.nan if value is None else value for name, value in record.items()}
        for record in _lines(path)
    ]


class WandbWriter:
    """Sends records to Weights & Biases from a thread of its own, so no step ever waits for it.

    In mode "auto" the run is online when the user has logged in (WANDB_API_KEY, or `wandb login`)
    and offline otherwise. Whatever goes wrong is said once on the console, and the run goes on
    without it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        project: str = "gymllm",
        mode: Literal["auto", "online", "offline"] = "auto",
        config: Mapping[str, object] | None = None,
        resume: bool = False,
        hurried: Callable[[], bool] = lambda: False,
        warn: Callable[[str], None] = warn,
    ) -> None:
        """Starts the thread; wandb's own start-up happens there.

        Args:
            folder: The run's folder; wandb keeps its files in `wandb/` inside.
            name: The run's name and id.
            project: wandb's project.
            mode: Where the records go.
            config: The merged configuration, shown beside the run.
            resume: The run goes on from a checkpoint.
            hurried: Whether `close` must not take long, asked while it waits; it then waits 1 s more.
            warn: Told once when wandb breaks.

        Raises:
            MissingExtraError: wandb isn't installed.
        """
        if find_spec("wandb") is None:
            raise MissingExtraError(
                'metrics.wandb needs wandb: pip install "gymllm-trainers[wandb]", or turn it off '
                "with --metrics.wandb off."
            )
        self._folder, self._name, self._project = folder, name, project
        self._mode: Literal["online", "offline"] = (
            mode if mode != "auto" else "online" if logged_in() else "offline"
        )
        self._config, self._resume, self._warn = dict(config or {}), resume, warn
        self._hurried = hurried
        self._broken = self._closed = False
        # Bounded: a wandb that hangs must not fill the memory. 10,000 records are hours of steps.
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(10_000)
        self._thread = threading.Thread(target=self._send, name="wandb", daemon=True)
        self._thread.start()

    @property
    def mode(self) -> Literal["online", "offline"]:
        """Where the records go."""
        return self._mode

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands one record over; returns at once."""
        if self._closed:
            raise ClosedError("the wandb writer was closed.")
        if self._broken:
            return
        try:
            self._queue.put_nowait((step, dict(metrics)))
        except queue.Full:
            self._fail("it doesn't take its records")

    def close(self, timeout_s: float | None = None) -> None:
        """Waits for wandb to finish, at most `timeout_s` (offline 3 s, online 20 s). Idempotent."""
        if self._closed:
            return
        self._closed = True
        if timeout_s is None:
            timeout_s = 3.0 if self._mode == "offline" else 20.0
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        left_s = timeout_s
        while left_s > 0 and self._thread.is_alive():
            if self._hurried():
                self._thread.join(min(left_s, 1.0))
                break
            self._thread.join(0.1)
            left_s -= 0.1
        if self._thread.is_alive():
            self._fail(f"it did not finish within {timeout_s:.0f} s; `wandb sync` sends the rest")

    def _send(self) -> None:
        try:
            import wandb

            # Else it advertises Weave to whoever uses MCP servers, in the middle of the display.
            os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
            run = wandb.init(
                project=self._project,
                name=self._name,
                id=self._name,
                dir=str(self._folder),
                mode=self._mode,
                config=self._config,
                resume="allow" if self._resume and self._mode == "online" else None,
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    disable_git=True,
                    disable_code=True,
                    x_disable_stats=True,
                    x_disable_machine_info=True,
                    init_timeout=30,
                ),
            )
            while (record := self._queue.get()) is not None:
                step, metrics = record
                run.log(metrics, step=step)
            run.finish()
        except Exception as error:
            # wandb raises many unrelated types; none of them is worth a training run.
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        if not self._broken:
            self._broken = True
            self._warn(f"Weights & Biases stopped ({why}). metrics.jsonl has every record.")


def logged_in() -> bool:
    """Whether wandb would find a key without asking."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _lines(path: Path) -> list[dict[str, float]]:
    records: list[dict[str, float]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break  # torn by a crash: nothing after it can be trusted to be whole
    return records


def _json_number(value: float) -> float | int | None:
    number = float(value)
    if not math.isfinite(number):
        return None
    return int(number) if isinstance(value, int) else number
