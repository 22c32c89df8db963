"""The numbers of a step: what engine, rollout and clocks say, and what of it the display shows."""

from __future__ import annotations

from gymllm.pool import EnvPool
from gymllm.rollout import AdmissionGate, Rollout
from gymllm.timeline import Timeline
from gymllm_trainers.display import RunView
from gymllm_trainers.engine import EmbeddedEngine, EngineCounts


def engine_metrics(
    engine: EmbeddedEngine, before: EngineCounts, seconds: float
) -> dict[str, float]:
    now = engine.counts
    computed = max(now.computed_tokens - before.computed_tokens, 1)
    used = now.prefill_tokens - before.prefill_tokens
    used += now.generated_tokens - before.generated_tokens
    return {
        "engine/generated_per_s": (now.generated_tokens - before.generated_tokens) / seconds,
        "engine/prefilled_per_s": (now.prefill_tokens - before.prefill_tokens) / seconds,
        "engine/steps": float(now.steps - before.steps),
        "engine/waiting": float(engine.waiting),
        "engine/running": float(engine.running),
        "engine/padding_share": 1 - used / computed,
    }


def rollout_metrics(rollout: Rollout, gate: AdmissionGate, pool: EnvPool) -> dict[str, float]:
    counts = rollout.counts
    return {
        "rollout/in_flight": float(counts.in_flight),
        "rollout/groups_outstanding": float(gate.outstanding),
        "rollout/failed_episodes": float(counts.failed),
        "rollout/replaced_groups": float(counts.replaced_groups),
        "rollout/lost_episodes": float(counts.lost_episodes),
        **{f"rollout/failed/{kind}": float(n) for kind, n in rollout.failures.items()},
    }


def time_metrics(timeline: Timeline) -> dict[str, float]:
    """Share of each resource's time so far, by state; a resource's shares add up to 1."""
    shares: dict[str, float] = {}
    for resource, clock in timeline.clocks.items():
        totals = clock.totals_s()
        whole = sum(totals.values())
        shares |= {f"time/{resource}/{state}": s / whole for state, s in totals.items()}
    return shares


def show(
    view: RunView,
    step: int,
    numbers: dict[str, float],
    gate: AdmissionGate,
    rollout: Rollout,
) -> None:
    view.step, view.reward = step, numbers["reward/mean"]
    view.turns, view.episode_tokens = numbers["episode/turns"], numbers["episode/tokens"]
    view.generated_per_s = numbers["engine/generated_per_s"]
    view.trained_per_s = numbers.get("learner/train_tokens", 0.0) / numbers["time/step_s"]
    view.lag_mean = numbers.get("learner/lag_mean", 0.0)
    view.lag_max = int(numbers.get("learner/lag_max", 0))
    view.groups_in_flight, view.failures = gate.outstanding, rollout.counts.failed
