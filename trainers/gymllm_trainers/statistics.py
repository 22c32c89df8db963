"""What a step's episodes say: the numbers of metrics.jsonl that don't come from the learner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from gymllm.trajectory import Ending, Group


class StepStatistics:
    """Collects the groups between two optimizer steps, trained on or not."""

    def __init__(self) -> None:
        self._groups: list[Group] = []
        self._scored_s: list[float] = []

    def scored(self, seconds: float) -> None:
        """Adds how long an episode's reward took, where a reward model gives it."""
        self._scored_s.append(seconds)

    def add(self, group: Group) -> None:
        """Adds a group; zero-variance groups belong here too, or the reward would be biased."""
        self._groups.append(group)

    def metrics(self) -> dict[str, float]:
        """The numbers of the step; starts the next one. Empty without groups."""
        groups, self._groups = self._groups, []
        scored_s, self._scored_s = self._scored_s, []
        if not groups:
            return {}
        episodes = [trajectory for group in groups for trajectory in group.trajectories]
        turns = [turn for episode in episodes for turn in episode.turns]
        reward = np.array([episode.reward for episode in episodes])
        spreads = np.array([np.ptp(group.rewards) for group in groups])
        best = max(1.0, float(reward.max()))
        endings = Counter(
            episode.reason or "environment" if episode.ending is Ending.TRUNCATED else ""
            for episode in episodes
        )
        duration_s = [(e.ended_ns - e.started_ns) / 1e9 for e in episodes]
        metrics = {
            "reward/mean": float(reward.mean()),
            "reward/std": float(reward.std()),
            "groups/count": float(len(groups)),
            "groups/all_solved": float(np.mean([min(g.rewards) >= best for g in groups])),
            "groups/none_solved": float(np.mean([max(g.rewards) <= 0 for g in groups])),
            "groups/zero_variance": float(np.mean(spreads == 0)),
            "episode/turns": _mean([len(episode.turns) for episode in episodes]),
            "episode/tokens": _mean([episode.tokens for episode in episodes]),
            "episode/generated_tokens": _mean([episode.generated_tokens for episode in episodes]),
            "episode/segments": _mean([len(episode.segments) for episode in episodes]),
            "episode/truncated": _mean([e.ending is Ending.TRUNCATED for e in episodes]),
            "episode/seconds": _mean(duration_s),
            "turn/invalid_actions": _mean([turn.invalid_action for turn in turns]),
            "turn/tool_calls": _mean([turn.tool_calls for turn in turns]),
            "turn/tool_errors": _mean([turn.tool_errors for turn in turns]),
            "turn/generated_tokens": _mean([turn.generated_tokens for turn in turns]),
        }
        metrics |= {
            f"reward/{agent}": _mean([e.reward for e in episodes if e.agent == agent])
            for agent in sorted({episode.agent for episode in episodes} - {""})
        }
        metrics |= {
            f"env/{name}": _mean([e.metrics[name] for e in episodes if name in e.metrics])
            for name in sorted({name for episode in episodes for name in episode.metrics})
        }
        metrics |= {
            f"episode/truncated/{limit}": count / len(episodes)
            for limit, count in endings.items()
            if limit
        }
        for name, seconds in (
            ("env", [turn.env_s for turn in turns]),
            ("engine", [turn.engine_s for turn in turns]),
        ):
            metrics |= _percentiles(name, seconds)
        return metrics | (_percentiles("reward", scored_s) if scored_s else {})


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    return {
        f"latency/{name}_p{percentile}_s": float(np.percentile(seconds, percentile))
        if seconds
        else 0.0
        for percentile in (50, 95, 99)
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
