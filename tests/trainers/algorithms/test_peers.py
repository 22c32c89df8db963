"""The figures of TRL and verl (scripts/make_algorithm_fixtures.py), 1e-5.

Where we differ from them it is on purpose:
- TRL adds 1e-4 to standard deviations, verl and we 1e-6. Its advantages are computed inside its trainer,
  so verl's are compared here.
- verl whitens GAE's advantages inside; here that is `whitened`, which `Algorithm.whiten` asks for.
- verl's REINFORCE++ baseline shifts a group of equal rewards too; here it is exactly zero.
- verl's `vanilla` always has the dual clip. TRL's `cispo` takes the upper bound itself, not its distance
  from 1.
- TRL's GSPO divides the gradient by its sequence's length, as our token form does with
  sequence_mean_token_mean.
- verl holds k3 within 10; below that the two agree. Sequences that its rejection drops leave its divisor;
  ours stay.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from gymllm_trainers.algorithms import corrections, losses
from gymllm_trainers.algorithms.advantages import group_advantages, reinforce_pp_baseline
from gymllm_trainers.algorithms.aggregation import divisor, token_weight
from gymllm_trainers.algorithms.kl import k3, kl_estimate
from gymllm_trainers.algorithms.lengths import soft_overlong
from gymllm_trainers.algorithms.losses import TokenLoss
from gymllm_trainers.algorithms.names import AggregationName
from gymllm_trainers.algorithms.turn_advantages import gae, whitened

FIXTURE = Path(__file__).parent.parent / "fixtures" / "algorithms.npz"
Loss = Callable[[Array], Array]


@pytest.fixture(scope="module")
def peers() -> dict[str, np.ndarray]:
    with np.load(FIXTURE) as content:
        return dict(content)


def aggregated(peers, name: AggregationName, loss_BT: Array, constant_tokens: int = 0) -> Array:
    """As a step does it: by the weights of tokens and one divisor."""
    mask_BT = peers["mask"]
    weight_B = [token_weight(name, trained_tokens=int(row.sum())) for row in mask_BT]
    below = divisor(
        name,
        tokens=float(mask_BT.sum()),
        trajectories=len(mask_BT),
        constant_tokens=constant_tokens,
    )
    return jnp.sum(loss_BT * mask_BT * np.float32(weight_B)[:, None]) / below


def compare(peers, name: str, by: str, loss: Loss) -> None:
    value, gradient = jax.value_and_grad(loss)(jnp.asarray(peers[by]))
    np.testing.assert_allclose(value, peers[f"{name}/loss"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, peers[f"{name}/gradient"], rtol=1e-5, atol=1e-6)


def policy(peers, name: AggregationName, make: Callable[..., TokenLoss], **options) -> Loss:
    """The loss of all tokens, by a function of (log-probability, proximal, advantage)."""
    rows = peers["mask"].shape
    advantage = np.broadcast_to(peers["advantage"][:, None], rows)
    constant = options.pop("constant_tokens", 0)
    extra = options.pop("extra", {})
    return lambda logprob: aggregated(
        peers,
        name,
        make(logprob, peers["proximal"], advantage_N=advantage, **extra, **options).loss,
        constant,
    )


def gspo(logprob: Array, proximal: Array, *, advantage_N: Array, mask: Array, **clip) -> TokenLoss:
    """Rows flattened, each one a sequence."""
    number = np.repeat(np.arange(len(mask)), mask.shape[1])
    flat = losses.gspo(
        logprob.reshape(-1),
        proximal.reshape(-1),
        advantage_N.reshape(-1),
        mask.reshape(-1),
        number,
        sequences=len(mask),
        **clip,
    )
    return TokenLoss(*(part.reshape(mask.shape) for part in flat))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_advantages_of_verl(name, peers) -> None:
    members = peers["reward"].reshape(-1, 4)
    found = group_advantages(name, members).reshape(-1)
    np.testing.assert_allclose(found, peers[f"verl/{name}/advantage"], rtol=1e-5, atol=1e-6)


def test_reinforce_pp_baseline_of_verl(peers) -> None:
    rewards = list(peers["reward"].reshape(-1, 4))
    tokens = list(peers["mask"].sum(1).reshape(-1, 4))
    found = np.concatenate(reinforce_pp_baseline(rewards, tokens))
    expected = peers["verl/reinforce_pp_baseline/advantage"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8)])
def test_gae_of_verl(gamma: float, lam: float, peers) -> None:
    there = peers["mask"] > 0
    last = np.concatenate([np.arange(int(row.sum())) == row.sum() - 1 for row in peers["mask"]])
    found = gae(peers["token_reward"][there], peers["value"][there], last, gamma=gamma, lam=lam)
    name = f"verl/gae_{gamma}_{lam}"
    np.testing.assert_allclose(found.returns, peers[f"{name}/returns"][there], rtol=1e-5, atol=1e-5)
    advantage = peers[f"{name}/advantage"][there]
    np.testing.assert_allclose(whitened(found.advantage), advantage, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("theirs", "ours", "constant"),
    [
        ("token-mean", "token_mean", 0),
        ("seq-mean-token-mean", "sequence_mean_token_mean", 0),
        ("seq-mean-token-sum", "sequence_mean_token_sum", 0),
        ("seq-mean-token-sum-norm", "token_sum_constant", 9),  # the width of its rows
    ],
)
def test_dual_clip_and_aggregations_of_verl(theirs: str, ours, constant: int, peers) -> None:
    loss = policy(peers, ours, losses.dual_clip, clip_high=0.28, constant_tokens=constant)
    compare(peers, f"verl/vanilla_{theirs}", "logprob", loss)


def test_policy_losses_of_verl(peers) -> None:
    by_sequence, by_token = "sequence_mean_token_mean", "token_mean"
    for name, loss in {
        "gspo_seq-mean-token-mean": policy(
            peers,
            by_sequence,
            gspo,
            clip_low=0.02,
            clip_high=0.03,
            extra={"mask": peers["mask"]},
        ),
        "cispo_token-mean": policy(peers, by_token, losses.cispo, clip_low=0.2, clip_high=0.28),
        # Its old policy is the one that made the tokens.
        "dppo_tv_token-mean": policy(
            peers,
            by_token,
            losses.dppo_tv,
            low=0.1,
            high=0.15,
            cap=4.0,
            extra={"behaviour_N": peers["proximal"]},
        ),
        "sapo_seq-mean-token-mean": policy(peers, by_sequence, losses.sapo),
    }.items():
        compare(peers, f"verl/{name}", "logprob", loss)


def test_value_loss_of_verl(peers) -> None:
    compare(
        peers,
        "verl/value",
        "value",
        lambda value: aggregated(
            peers,
            "token_mean",
            losses.value_loss(value, peers["old_value"], peers["returns"], clip=0.5).loss,
        ),
    )


@pytest.mark.parametrize("form", ["k1", "k2", "k3", "k3+"])
def test_kl_penalties_of_verl(form, peers) -> None:
    compare(
        peers,
        f"verl/{form}",
        "logprob",
        lambda x: jnp.sum(kl_estimate(form, x, peers["reference"]) * peers["mask"]),
    )


def test_corrections_of_verl(peers) -> None:
    mask = peers["mask"]
    proximal, behaviour = peers["proximal"].reshape(-1), peers["behaviour"].reshape(-1)
    number = np.repeat(np.arange(len(mask)), mask.shape[1])
    rows = (proximal, behaviour, mask.reshape(-1), number)
    for name, weight in {
        "tis_token": corrections.tis_token(proximal, behaviour, cap=1.1),
        "icepop": corrections.icepop(proximal, behaviour, floor=0.9, cap=1.2),
        "tis_sequence": corrections.tis_sequence(*rows, sequences=len(mask), cap=1.5),
        "geometric_mask": corrections.geometric_mask(
            *rows, sequences=len(mask), floor=0.95, cap=1.06
        ),
    }.items():
        expected = peers[f"verl/{name}/weight"]
        found = weight.reshape(mask.shape) * mask
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=name)
        assert 0 < (expected > 0).sum() <= mask.sum()
    distance = k3(peers["proximal"] - peers["behaviour"])[mask > 0].mean()
    np.testing.assert_allclose(distance, peers["verl/distance/k3"], rtol=1e-4)


def test_losses_of_trl(peers) -> None:
    by_sequence = "sequence_mean_token_mean"
    grpo = policy(peers, by_sequence, losses.ppo_clip, clip_high=0.2)
    for name, loss in {
        "grpo": grpo,
        "grpo_kl": lambda x: (
            grpo(x)
            + 0.04 * aggregated(peers, by_sequence, kl_estimate("k3", x, peers["reference"]))
        ),
        "dapo": policy(peers, "token_mean", losses.ppo_clip),
        "dr_grpo": policy(peers, "token_sum_constant", losses.ppo_clip, constant_tokens=20),
        "delta": policy(peers, "token_mean", losses.dual_clip, clip_high=0.28, bound=3.0),
        "cispo": policy(peers, "token_mean", losses.cispo, clip_low=1.0, clip_high=0.5),
        "sapo": policy(peers, by_sequence, losses.sapo),
        "gspo": policy(
            peers,
            by_sequence,
            gspo,
            clip_low=0.02,
            clip_high=0.03,
            extra={"mask": peers["mask"]},
        ),
    }.items():
        compare(peers, f"trl/{name}", "logprob", loss)


def test_soft_overlong_of_trl(peers) -> None:
    found = soft_overlong(peers["lengths"], limit=100, buffer=20)
    np.testing.assert_allclose(found, peers["trl/soft_overlong/penalty"], rtol=1e-6)
