"""Writes the figures that tests/trainers/algorithms/test_peers.py compares with: TRL's and verl's own code.

Run it in an environment of its own, and only when the fixture has to change:

    python -m venv .venv-peers
    .venv-peers/bin/pip install torch trl==1.16.0 ray 'tensordict<=0.10' omegaconf codetiming
    .venv-peers/bin/pip install --no-deps verl==0.9.1
    .venv-peers/bin/python scripts/make_algorithm_fixtures.py

verl's own requirements contradict newer versions of transformers, which nothing here needs of it; hence
--no-deps. Nothing is reimplemented: advantages, losses, corrections and penalties are what the packages'
functions return on small seeded inputs, with the gradients that torch derives from them.

It writes tests/trainers/fixtures/algorithms.npz: the inputs by their names, each result as
package/what/quantity, and the packages' versions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from trl import GRPOTrainer
from trl.rewards import get_soft_overlong_punishment
from verl.trainer.ppo import core_algos as verl
from verl.trainer.ppo.rollout_corr_helper import (
    compute_offpolicy_metrics,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.workers.config import ActorConfig

OUT = Path(__file__).parent.parent / "tests" / "trainers" / "fixtures" / "algorithms.npz"
GROUPS, MEMBERS, TOKENS = 3, 4, 9


def inputs() -> dict[str, np.ndarray]:
    """Small, seeded: 3 groups of 4 members, up to 9 tokens with gaps, some ratios far from 1."""
    rng = np.random.default_rng(7)
    rows = GROUPS * MEMBERS
    lengths = rng.integers(3, TOKENS + 1, rows)
    mask = (np.arange(TOKENS) < lengths[:, None]).astype(np.float32)
    mask[:, 2] *= rng.integers(0, 2, rows)  # a token of the environment in the middle
    behaviour = -rng.exponential(1.0, (rows, TOKENS))
    proximal = behaviour + rng.normal(0, 0.15, (rows, TOKENS))
    logprob = proximal + rng.normal(0, 0.4, (rows, TOKENS))
    logprob[::3, 1] = proximal[::3, 1] + 1.6  # ratios near 5
    return {
        "mask": mask,
        "behaviour": np.minimum(behaviour, -1e-3).astype(np.float32),
        "proximal": np.minimum(proximal, -1e-3).astype(np.float32),
        "logprob": np.minimum(logprob, -1e-3).astype(np.float32),
        "reference": (logprob + rng.normal(0, 0.3, logprob.shape)).astype(np.float32),
        "advantage": rng.normal(0, 1, rows).astype(np.float32),
        "reward": rng.normal(0.4, 1, rows).astype(np.float32),
        "group": np.repeat(np.arange(GROUPS), MEMBERS),
        "token_reward": (rng.normal(0, 1, (rows, TOKENS)) * mask).astype(np.float32),
        "value": rng.normal(0, 1, (rows, TOKENS)).astype(np.float32),
        "old_value": rng.normal(0, 1, (rows, TOKENS)).astype(np.float32),
        "returns": rng.normal(0, 1, (rows, TOKENS)).astype(np.float32),
    }


class Recorder:
    """The inputs as tensors, and what was computed of them."""

    def __init__(self) -> None:
        self.arrays = inputs()
        self.given = {name: torch.tensor(value) for name, value in self.arrays.items()}

    def save(self, name: str, value: torch.Tensor) -> None:
        """Keeps one result."""
        self.arrays[name] = value.detach().numpy()

    def differentiate(
        self, name: str, by: str, loss: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Keeps a scalar loss and its gradient by one of the inputs."""
        leaf = self.given[by].clone().requires_grad_()
        value = loss(leaf)
        value.backward()
        assert leaf.grad is not None
        self.save(f"{name}/loss", value)
        self.save(f"{name}/gradient", leaf.grad)


def verl_advantages(record: Recorder) -> None:
    """Outcome advantages (of each member), and GAE (of each token; whitened, and its returns)."""
    given = record.given
    rewards = torch.zeros_like(given["mask"])
    last = given["mask"].cumsum(1).argmax(1)
    rewards[torch.arange(len(last)), last] = given["reward"]
    outcome = {
        "grpo": (verl.compute_grpo_outcome_advantage, {}),
        "dr_grpo": (verl.compute_grpo_outcome_advantage, {"norm_adv_by_std_in_grpo": False}),
        "rloo": (verl.compute_rloo_outcome_advantage, {}),
        "reinforce_pp_baseline": (
            verl.compute_reinforce_plus_plus_baseline_outcome_advantage,
            {},
        ),
    }
    for name, (function, options) in outcome.items():
        advantage, _ = function(rewards, given["mask"], record.arrays["group"], **options)
        # The same at each of a member's tokens.
        member = (advantage * given["mask"]).sum(1) / given["mask"].sum(1)
        record.save(f"verl/{name}/advantage", member)
    for gamma, lam in ((1.0, 0.95), (0.9, 0.8)):
        advantage, returns = verl.compute_gae_advantage_return(
            given["token_reward"], given["value"], given["mask"], gamma, lam
        )
        record.save(f"verl/gae_{gamma}_{lam}/advantage", advantage)
        record.save(f"verl/gae_{gamma}_{lam}/returns", returns)


def verl_losses(record: Recorder) -> None:
    """Policy losses over verl's aggregations, the value loss, the KL penalties."""
    given = record.given

    def actor(low: float, high: float, **more: float) -> ActorConfig:
        return ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            use_dynamic_bsz=True,
            clip_ratio=low,
            clip_ratio_low=low,
            clip_ratio_high=high,
            **more,
        )

    modes = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    cases = [("vanilla", actor(0.2, 0.28, clip_ratio_c=3.0), mode) for mode in modes]
    cases += [
        ("gspo", actor(0.02, 0.03), "seq-mean-token-mean"),
        ("cispo", actor(0.2, 0.28), "token-mean"),
        ("dppo_tv", actor(0.1, 0.15, clip_ratio_c=4.0), "token-mean"),
        ("sapo", actor(0.2, 0.2, tau_pos=1.0, tau_neg=1.05), "seq-mean-token-mean"),
    ]
    advantage = given["advantage"][:, None].expand_as(given["mask"])
    for name, config, mode in cases:
        function = verl.get_policy_loss_fn(name)
        record.differentiate(
            f"verl/{name}_{mode}",
            "logprob",
            lambda logprob, function=function, config=config, mode=mode: function(
                given["proximal"], logprob, advantage, given["mask"], mode, config
            )[0],
        )
    record.differentiate(
        "verl/value",
        "value",
        lambda value: verl.compute_value_loss(
            value, given["returns"], given["old_value"], given["mask"], 0.5
        )[0],
    )
    for form in ("k1", "k2", "k3", "k3+"):
        record.differentiate(
            f"verl/{form}",
            "logprob",
            lambda logprob, form=form: (
                verl.kl_penalty(logprob, given["reference"], form) * given["mask"]
            ).sum(),
        )


def verl_corrections(record: Recorder) -> None:
    """Weights for tokens of another policy, and how far it is."""
    given = record.given
    gap, mask = given["proximal"] - given["behaviour"], given["mask"]
    for name, level, threshold in (
        ("tis_token", "token", 1.1),
        ("tis_sequence", "sequence", 1.5),
        ("icepop", "token", "0.9_1.2"),
    ):
        weight, _ = compute_rollout_correction_weights(gap, mask, level, threshold)
        record.save(f"verl/{name}/weight", weight)
    # verl bounds the inverse ratio: exp(mean k1) = 1 / the geometric mean.
    kept, _ = compute_rollout_rejection_mask(gap, mask, "seq_mean_k1", f"{1 / 1.06}_{1 / 0.95}")
    record.save("verl/geometric_mask/weight", kept)
    distance = compute_offpolicy_metrics(given["proximal"], given["behaviour"], mask)
    record.save("verl/distance/k3", torch.tensor(distance["k3_kl"]))


def trl_losses(record: Recorder) -> None:
    """GRPOTrainer's own loss, on log-probabilities that are given to it instead of a model's."""
    given = record.given
    rows, tokens = given["mask"].shape
    ids = torch.zeros((rows, tokens), dtype=torch.long)
    identity = SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        gather=lambda value: value,
        reduce=lambda value, reduction: value,
    )

    def loss(
        loss_type: str,
        *,
        low: float = 0.2,
        high: float = 0.28,
        level: str = "token",
        beta: float = 0.0,
        delta: float | None = None,
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        def of(logprob: torch.Tensor) -> torch.Tensor:
            trainer = SimpleNamespace(
                _get_per_token_logps_and_entropies=lambda *_, **__: (
                    logprob,
                    torch.zeros_like(logprob),
                    None,
                ),
                _entropy_bonus_enabled=False,
                _metrics={"train": defaultdict(list)},
                accelerator=identity,
                args=SimpleNamespace(
                    delta=delta,
                    sapo_temperature_pos=1.0,
                    sapo_temperature_neg=1.05,
                    steps_per_generation=1,
                    use_bias_correction_kl=False,
                ),
                aux_loss_enabled=False,
                beta=beta,
                current_gradient_accumulation_steps=1,
                epsilon_high=high,
                epsilon_low=low,
                importance_sampling_level=level,
                loss_type=loss_type,
                max_completion_length=20,
                model=SimpleNamespace(training=True),
                off_policy_mask_threshold=None,
                top_entropy_quantile=1.0,
                use_vllm=False,
                vllm_importance_sampling_correction=False,
            )
            batch = {
                "prompt_ids": ids[:, :1],
                "prompt_mask": torch.ones_like(ids[:, :1]),
                "completion_ids": ids,
                "completion_mask": given["mask"],
                "advantages": given["advantage"],
                "old_per_token_logps": given["proximal"],
                "ref_per_token_logps": given["reference"],
                "num_items_in_batch": given["mask"].sum(),
            }
            return GRPOTrainer._compute_loss(trainer, None, batch)

        return of

    record.differentiate("trl/grpo", "logprob", loss("grpo", high=0.2))
    record.differentiate("trl/grpo_kl", "logprob", loss("grpo", high=0.2, beta=0.04))
    record.differentiate("trl/dapo", "logprob", loss("dapo"))
    record.differentiate("trl/dr_grpo", "logprob", loss("dr_grpo"))
    record.differentiate("trl/delta", "logprob", loss("dapo", delta=3.0))
    record.differentiate("trl/cispo", "logprob", loss("cispo", high=1.5))
    record.differentiate("trl/sapo", "logprob", loss("sapo"))
    record.differentiate("trl/gspo", "logprob", loss("grpo", low=0.02, high=0.03, level="sequence"))
    penalty = get_soft_overlong_punishment(100, 20)
    lengths = [1, 79, 80, 81, 90, 99, 100, 101, 500]
    record.arrays["lengths"] = np.array(lengths)
    values = penalty([[0] * length for length in lengths])
    record.save("trl/soft_overlong/penalty", torch.tensor(values))


def main() -> None:
    """Writes the fixture."""
    record = Recorder()
    verl_advantages(record)
    verl_losses(record)
    verl_corrections(record)
    trl_losses(record)
    for package in ("trl", "verl"):
        record.arrays[f"version/{package}"] = np.array(version(package))
    np.savez_compressed(OUT, **record.arrays)
    print(f"wrote {OUT.name}: {len(record.arrays)} arrays, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
