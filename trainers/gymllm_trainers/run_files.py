"""What one run writes: metrics and trajectories as it goes, curve, page and trace at its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from gymllm.timeline import Timeline
from gymllm.timeline.perfetto import write_perfetto
from gymllm.trajectory import Trajectory
from gymllm.transcripts import to_json, write_html
from gymllm_trainers.config import TrainConfig
from gymllm_trainers.config_files import to_mapping
from gymllm_trainers.metrics import open_metrics
from gymllm_trainers.report import plot_rewards
from gymllm_trainers.run_folder import LineFile, RunFolder, warn

SHOWN_TRAJECTORIES = 64
"""Latest episodes on the page of transcripts."""
WAITING_BYTES = 64 * 2**20
"""Lines of earlier steps that wait for a full disk, at most."""


class RunFiles:
    """Owns a run's open files. A full disk delays what is written and stops nothing."""

    def __init__(
        self,
        folder: RunFolder,
        config: TrainConfig,
        timeline: Timeline,
        *,
        resume_step: int | None,
        hurried: Callable[[], bool] = lambda: False,
    ) -> None:
        """Opens them.

        Args:
            folder: The run's folder.
            config: The run's configuration.
            timeline: The run's timeline, written at the end.
            resume_step: Step that a resumed run goes on from, 0 without a checkpoint: what was written
                of later steps is removed, as they are done again.
            hurried: Whether closing must not take long.
        """
        self.folder, self._config, self._timeline = folder, config, timeline
        self.notes: list[str] = []
        """Lines for the closing report."""
        self.programs: list[str] = []
        """Names of what was compiled, or taken from the cache of what was."""
        self.shown = ""
        """Which episodes the page of transcripts holds, once it is written."""
        folder.new_trace()
        if resume_step is not None:
            folder.forget_after(resume_step)
        self._metrics = open_metrics(
            folder,
            name=folder.path.name,
            wandb=config.metrics.wandb,
            project=config.metrics.wandb_project,
            config=to_mapping(config),
            resume_step=resume_step,
            hurried=hurried,
        )
        self._latest: deque[Trajectory] = deque(maxlen=SHOWN_TRAJECTORIES)
        self._played = 0
        self._trajectories: tuple[int, LineFile] | None = None
        self._waiting: list[LineFile] = []
        """Of earlier steps, with lines that a full disk hasn't taken."""

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the numbers of a step."""
        self._metrics.write(step, metrics)

    def trajectories(self, step: int, trajectories: Iterable[Trajectory]) -> None:
        """Writes trajectories towards the step that they may be trained in."""
        for trajectory in trajectories:
            self._latest.append(trajectory)
            self._played += 1
            if self._config.metrics.trajectories:
                self._file(step).write(to_json(trajectory, step=step))

    def close(self, *, draw: bool) -> None:
        """Closes every file and writes the trace; with `draw` the curve and the page too.

        Never raises: what can't be written is said, and nothing else is lost for it.
        """
        if self._trajectories is not None:
            self._waiting.append(self._trajectories[1])
        for file in self._waiting:
            file.close()
        self._attempt("trace", lambda: write_perfetto(self._timeline, self.folder.trace))
        if draw:
            self._attempt(
                "reward curve",
                lambda: plot_rewards(
                    self.folder.metrics, self.folder.reward_plot, title=self.folder.path.name
                ),
            )
            self._attempt("page of transcripts", self._write_page)
        self._attempt("metrics", self._metrics.close)

    def _write_page(self) -> None:
        shown = f"the last {len(self._latest)} of {self._played}"
        if len(self._latest) == self._played:
            shown = f"all {self._played}"
        facts = {"episodes": f"{shown}; every one is in {self.folder.trajectories.name}/"}
        if not self._config.metrics.trajectories:
            facts = {"episodes": shown}
        title = self.folder.path.name
        write_html(self.folder.transcripts, self._latest, title=title, facts=facts)
        self.shown = shown

    def _file(self, step: int) -> LineFile:
        if self._trajectories is None or self._trajectories[0] != step:
            if self._trajectories is not None:
                self._waiting.append(self._trajectories[1])
            self._close_what_is_whole()
            self._trajectories = (step, LineFile(self.folder.trajectories_file(step)))
        return self._trajectories[1]

    def _close_what_is_whole(self) -> None:
        kept: list[LineFile] = []
        room = WAITING_BYTES
        for file in reversed(self._waiting):  # the oldest are given up first
            file.flush()
            room -= file.waiting_bytes
            if file.waiting and room >= 0:
                kept.append(file)
            else:
                file.close()
        self._waiting = kept[::-1]

    def _attempt(self, what: str, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as error:
            with suppress(Exception):
                warn(f"the {what} could not be written: {error}")
