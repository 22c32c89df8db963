"""docs/algorithms.md says what the presets are and names every metric."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gymllm.ledger import NO_VERSION, Segment
from gymllm.task import Task
from gymllm.trajectory import Ending, Group, Trajectory
from gymllm_trainers.algorithms import AlgorithmConfig, resolve
from gymllm_trainers.algorithms.algorithm import PRESETS
from gymllm_trainers.config_files import merge, read_yaml
from gymllm_trainers.learner import Learner, LearnerConfig
from gymllm_trainers.models import Decoder

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text("utf-8")


def test_the_table_of_presets_is_what_they_resolve_to() -> None:
    table = PAGE.split("## Presets", 1)[1].split("\n\n", 2)[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    found = {}
    for name, advantage, loss, clip, correction, aggregation, _ in rows:
        algorithm = resolve(AlgorithmConfig(preset=name.strip("`")))  # pyright: ignore
        found[algorithm.preset] = algorithm
        parts = (algorithm.advantage, algorithm.loss, algorithm.correction, algorithm.aggregation)
        assert parts == (advantage, loss, correction, aggregation)
        if clip:
            assert [float(side) for side in clip.split("/")] == [
                algorithm.clip_low,
                algorithm.clip_high,
            ]
    assert set(found) == set(PRESETS)


def test_the_table_of_metrics_is_what_a_learner_says(
    make_decoder: Callable[[int], Decoder],
) -> None:
    # Values and a reference: with them there is every metric that there can be.
    learner = Learner(
        make_decoder(0),
        LearnerConfig(groups_per_step=1, rows=1, smaller_shapes=0, head_chunk=16),
        algorithm=AlgorithmConfig(preset="ppo", kl_coef=0.1),
        row_tokens=16,
        temperature=1.0,
        max_lag=2,
    )
    assert learner.add_group(_group())
    table = PAGE.split("## Metrics", 1)[1].split("| | |", 1)[1].split("\n\n", 1)[0]
    named = set()
    for row in table.splitlines()[2:]:
        cell = row.split("|")[1]
        first, _, last = cell.partition(" to ")
        if last:
            stem, start = re.findall(r"`(\w+/)(\d)`", first)[0]
            end = re.findall(r"/(\d)`", last)[0]
            named |= {f"{stem}{age}" for age in range(int(start), int(end) + 1)}
        else:
            named |= set(re.findall(r"`([\w/]+)`", cell))
    assert named == set(learner.step())


def _group() -> Group:
    task = Task(index=0, id="t", seed=0)
    segment = Segment(
        ids=np.arange(6, dtype=np.int32),
        mask=np.array([0, 0, 1, 1, 1, 1], np.int32),
        logprobs=np.array([0, 0, -1, -1, -1, -1], np.float32),
        versions=np.array([NO_VERSION, NO_VERSION, 0, 0, 0, 0], np.int32),
    )
    return Group(
        task=task,
        trajectories=tuple(
            Trajectory(
                task=task,
                member=member,
                attempt=0,
                segments=(segment,),
                turns=(),
                messages=(),
                ending=Ending.TERMINATED,
                reward=float(member),
            )
            for member in range(2)
        ),
    )


def test_the_example_is_a_configuration(tmp_path: Path) -> None:
    example = re.findall(r"^```yaml\nalgorithm:\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0]
    (tmp_path / "part.yaml").write_text(example, encoding="utf-8")
    config = merge(AlgorithmConfig(), read_yaml(tmp_path / "part.yaml"))
    assert config == AlgorithmConfig(preset="dapo", advantage="rloo", clip_high=0.3)
    assert resolve(config).overlong_buffer == 0.2
