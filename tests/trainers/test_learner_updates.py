"""Updates of more than one pass: several steps on a batch, values, a reference; and batches that wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from gymllm.errors import ConfigError
from gymllm.ledger import Segment
from gymllm.task import Task
from gymllm.trajectory import Ending, Group, Trajectory, Turn
from gymllm_trainers.algorithms.config import AlgorithmConfig
from gymllm_trainers.learner import Learner, LearnerConfig
from gymllm_trainers.models import Decoder
from gymllm_trainers.optimizer import OptimizerConfig

MakeDecoder = Callable[..., Decoder]
CONFIG = LearnerConfig(rows=2, head_chunk=16, smaller_shapes=0)
# Without Adam, whose first step hides a gradient's size.
SGD = OptimizerConfig(name="sgd", learning_rate=0.05, max_grad_norm=0)
LENGTH = 48
SLOWER = [
    "grpo",
    "dr_grpo",
    "dapo",
    "cispo",
    "rloo",
    "gigpo",
    "turn",
    "maxrl",
    "batch_std",
    "dual_clip",
    "sapo",
    "dppo",
    "reinforce",
]
"""Presets that only a longer test goes through."""


def new_learner(
    decoder: Decoder,
    algorithm: AlgorithmConfig | None = None,
    optimizer: OptimizerConfig = SGD,
    **settings: Any,
) -> Learner:
    learner = Learner(
        decoder,
        replace(CONFIG, **settings),
        algorithm=algorithm,
        optimizer=optimizer,
        row_tokens=LENGTH,
        temperature=1.0,
        max_lag=99,
    )
    learner.compile()
    return learner


def segment(rng: np.random.Generator, turns: list[int]) -> Segment:
    """A prompt of 4 tokens, then turns of so many generated tokens, an observation of 3 before each other."""
    mask = np.concatenate([[0] * 4] + [[0] * 3 * (k > 0) + [1] * n for k, n in enumerate(turns)])
    mask = mask.astype(np.int32)
    return Segment(
        ids=rng.integers(64, size=len(mask)).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, -rng.exponential(size=len(mask)), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
    )


def groups(seed: int = 0, count: int = 4, members: int = 3) -> list[Group]:
    """Episodes of one to three turns, each with a reward; their prompts are the group's own."""
    rng = np.random.default_rng(seed)
    made: list[Group] = []
    for index in range(count):
        task = Task(index=index, id=f"t{index}", seed=index)
        prompt = rng.integers(64, size=4).astype(np.int32)
        trajectories: list[Trajectory] = []
        for member in range(members):
            sizes = rng.integers(1, 5, size=rng.integers(1, 4)).tolist()
            one = segment(rng, sizes)
            one.ids[:4] = prompt
            rewards = rng.integers(-2, 3, size=len(sizes)).astype(float).tolist()
            trajectories.append(
                Trajectory(
                    task=task,
                    member=member,
                    attempt=0,
                    segments=(one,),
                    turns=tuple(
                        Turn(
                            observation=str(int(rng.integers(2))),
                            action="",
                            reward=reward,
                            prompt_tokens=0,
                            generated_tokens=size,
                        )
                        for size, reward in zip(sizes, rewards, strict=True)
                    ),
                    messages=(),
                    ending=Ending.TERMINATED,
                    reward=sum(rewards) + member,
                )
            )
        made.append(Group(task=task, trajectories=tuple(trajectories)))
    return made


def parameters(one: Learner) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves((one.state.trainable, one.state.value))]


def assert_near(left: list[np.ndarray], right: list[np.ndarray], tolerance: float) -> None:
    for one, other in zip(left, right, strict=True):
        assert np.linalg.norm(other - one) <= tolerance * np.linalg.norm(one)


def moved(before: list[np.ndarray], after: list[np.ndarray]) -> bool:
    return any((one != other).any() for one, other in zip(before, after, strict=True))


def step(one: Learner, batch: list[Group]) -> dict[str, float]:
    for each in batch:
        assert one.add_group(each)
    return one.step()


# ---------------------------------------------------------------------- an independent reference


class Textbook:
    """The same policy, one sequence at a time, unpacked, in plain JAX; its optimizer is plain SGD."""

    def __init__(self, decoder: Decoder) -> None:
        self.graph, self.params = nnx.split(decoder)

        def logprobs(params: Any, ids: jax.Array) -> jax.Array:
            decoder = nnx.merge(self.graph, params)
            size = len(ids)
            hidden = decoder.hidden(ids[None], jnp.arange(size)[None], jnp.full((1, size), size))
            shares = jax.nn.log_softmax(decoder.logits(hidden[0]))
            return jnp.append(0.0, shares[jnp.arange(size - 1), ids[1:]])

        self.logprobs = jax.jit(logprobs)

        def loss(params: Any, ids: Any, proximal: Any, advantage: Any, weight: Any) -> jax.Array:
            ratio = jnp.exp(logprobs(params, ids) - proximal)
            clipped = jnp.clip(ratio, 0.8, 1.28)
            return -jnp.sum(weight * jnp.minimum(ratio * advantage, clipped * advantage))

        self.gradient = jax.jit(jax.grad(loss))

    def step(self, sequences: list[tuple[Any, ...]], count: float) -> None:
        total = jax.tree.map(jnp.zeros_like, self.params)
        for one in sequences:
            # Padded to one length, so that there is one program; what follows changes nothing before it.
            padded = [np.pad(part, (0, LENGTH - len(part))) for part in one]
            total = jax.tree.map(jnp.add, total, self.gradient(self.params, *padded))
        updates = jax.tree.map(lambda leaf: -0.05 * leaf / count, total)
        self.params = optax.apply_updates(self.params, updates)


def test_epochs_clip_against_the_policy_at_the_start(make_decoder: MakeDecoder) -> None:
    batch = groups()
    book = Textbook(make_decoder(0))
    sequences = []
    for each in batch:
        mean = np.mean(each.rewards)
        for trajectory in each.trajectories:
            one = trajectory.segments[0]
            ids = np.pad(one.ids, (0, LENGTH - len(one)))
            start = np.asarray(book.logprobs(book.params, ids))[: len(one)]
            behind = np.minimum(np.exp(start - one.logprobs), 2.0) * one.mask
            advantage = np.full(len(one), trajectory.reward - mean, np.float32)
            sequences.append((one.ids, start, advantage, behind))
    count = sum(int(t.segments[0].mask.sum()) for each in batch for t in each.trajectories)
    learner = new_learner(make_decoder(0), epochs=3)
    before = parameters(learner)
    metrics = step(learner, batch)
    for _ in range(3):
        book.step(sequences, count)
    assert_near([np.asarray(x) for x in jax.tree.leaves(book.params)], parameters(learner), 1e-5)
    assert moved(before, parameters(learner))
    assert learner.version == 1, "versions are batches"
    assert metrics["trained_tokens"] == 3 * count
    assert metrics["clipped_low"] + metrics["clipped_high"] > 0
    assert metrics["update_kl_k3"] > 0


def test_mini_batches_are_steps_of_their_own(make_decoder: MakeDecoder) -> None:
    """With a loss that knows no ratio they are what smaller batches one after another would be."""
    algorithm = AlgorithmConfig(loss="reinforce", correction="off")
    batch = groups()
    learner = new_learner(make_decoder(0), algorithm, mini_batches=2)
    step(learner, batch)
    order = np.random.default_rng((0, 0)).permutation(4)  # which groups each takes
    tried: list[list[np.ndarray]] = []
    for first, second in ((order[:2], order[2:]), (order[2:], order[:2])):
        one = new_learner(make_decoder(0), algorithm)
        for numbers in (first, second):
            step(one, [batch[number] for number in numbers])
            one.state = one.state._replace(version=0)
        tried.append(parameters(one))
    distances = [
        max(np.abs(a - b).max() for a, b in zip(parameters(learner), other, strict=True))
        for other in tried
    ]
    assert min(distances) < 1e-6 < max(distances), "one order is it, and the order matters"


# ---------------------------------------------------------------------- values


def test_ppo_advantages_are_those_of_its_values(make_decoder: MakeDecoder) -> None:
    """A first batch has values 0, so lambda 1 makes returns-to-go of the tokens' rewards."""
    algorithm = AlgorithmConfig(
        preset="ppo", lam=1.0, whiten=False, loss="reinforce", correction="off", value_coef=1e-6
    )
    batch = groups()
    learner = new_learner(make_decoder(0), algorithm)
    assert learner.state.value is not None
    assert all(not leaf.any() for leaf in jax.tree.leaves(learner.state.value))
    metrics = step(learner, batch)
    count = total = squares = 0.0
    for each in batch:
        for trajectory in each.trajectories:
            rewards = [turn.reward for turn in trajectory.turns]
            rewards[-1] += trajectory.reward - sum(rewards)
            for index, turn in enumerate(trajectory.turns):
                to_go = sum(rewards[index:])
                count += turn.generated_tokens
                total += to_go * turn.generated_tokens
                squares += to_go**2 * turn.generated_tokens
    assert metrics["trained_tokens"] == count
    assert metrics["advantage_mean"] == pytest.approx(total / count, rel=1e-5)
    expected = np.sqrt(squares / count - (total / count) ** 2)
    assert metrics["advantage_std"] == pytest.approx(expected, rel=1e-5)
    # 0.5 * (0 - return)^2, and nothing explained yet.
    assert metrics["value_loss"] == pytest.approx(0.5 * squares / count, rel=1e-5)
    assert metrics["explained_variance"] == pytest.approx(0, abs=1e-6)


def test_a_value_head_learns_what_to_expect(make_decoder: MakeDecoder) -> None:
    algorithm = AlgorithmConfig(preset="ppo", whiten=False)
    adam = OptimizerConfig(learning_rate=3e-3, schedule="constant")
    learner = new_learner(make_decoder(0), algorithm, adam, epochs=4)
    losses = [step(learner, groups())["value_loss"] for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0]
    assert moved([np.zeros(())] * 2, [np.asarray(x) for x in jax.tree.leaves(learner.state.value)])
    assert set(learner.state.arrays) == {"trainable", "optimizer", "value"}
    names = {type(part).__name__ for part in jax.tree.leaves(nnx.state(learner.policy()))}
    assert "value" not in str(nnx.to_pure_dict(nnx.state(learner.policy())).keys()), names


def test_a_value_head_has_a_learning_rate_of_its_own(make_decoder: MakeDecoder) -> None:
    moved: list[list[np.ndarray]] = []
    for rate in (1.0, 10.0):
        one = new_learner(make_decoder(0), AlgorithmConfig(preset="ppo", value_rate=rate))
        before = parameters(one)
        for group in groups():
            one.add_group(group)
        one.step()
        moved.append([b - a for a, b in zip(before, parameters(one), strict=True)])
    slow, fast = moved
    head = len(jax.tree.leaves(one.state.value))
    for a, b in zip(slow[:-head], fast[:-head], strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(slow[-head:], fast[-head:], strict=True):
        assert np.any(a != 0)
        np.testing.assert_allclose(b, 10 * a, rtol=1e-5)


def test_values_go_through_any_packing(make_decoder: MakeDecoder) -> None:
    algorithm = AlgorithmConfig(preset="ppo")
    results = []
    for settings in ({"rows": 12}, {"rows": 1}, {"rows": 3, "share_prefixes": False}):
        learner = new_learner(make_decoder(0), algorithm, **settings)
        step(learner, groups())
        step(learner, groups(seed=1))  # values are no longer 0
        results.append(parameters(learner))
    assert_near(results[0], results[1], 2e-6)
    assert_near(results[0], results[2], 2e-6)


# ---------------------------------------------------------------------- a reference


def test_without_a_divergence_nothing_is_kept_or_scored(make_decoder: MakeDecoder) -> None:
    learner = new_learner(make_decoder(0))
    assert not learner.keeps_reference
    assert learner.programs == ["learner gradient", "learner step"]
    adapted = make_decoder(0)
    adapted.add_adapters(rank=2, alpha=4.0, rngs=nnx.Rngs(0))
    learner = new_learner(adapted, AlgorithmConfig(kl_coef=0.1))
    assert not learner.keeps_reference, "the base is the reference"
    assert learner.programs == ["learner gradient", "learner step", "learner reference"]


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
def test_divergence_is_to_the_start(make_decoder: MakeDecoder, rank: int, on_host: bool) -> None:
    if rank and on_host:
        pytest.skip("with adapters there is no copy to put anywhere")
    decoder = make_decoder(0)
    if rank:
        decoder.add_adapters(rank=rank, alpha=4.0, rngs=nnx.Rngs(0))
    held = OptimizerConfig(name="sgd", learning_rate=0.3, max_grad_norm=0)
    learner = new_learner(decoder, AlgorithmConfig(kl_coef=0.05), held, reference_on_host=on_host)
    assert learner.keeps_reference == (not rank)
    first = step(learner, groups())
    assert first["reference_kl_k3"] == pytest.approx(0, abs=1e-6)
    after = step(learner, groups())
    assert after["reference_kl_k3"] > 1e-5
    # Against both policies, one sequence at a time.
    book = Textbook(make_decoder(0))
    now = nnx.state(learner.policy())
    free = new_learner(make_decoder(0), None, held) if not rank else None
    if free is not None:
        step(free, groups())
        step(free, groups())
        assert moved(parameters(free), parameters(learner)), "the divergence holds the policy back"
    third = step(learner, groups())
    gaps = []
    for each in groups():
        for trajectory in each.trajectories:
            one = trajectory.segments[0]
            ids = np.pad(one.ids, (0, LENGTH - len(one)))
            policy, reference = book.logprobs(now, ids), book.logprobs(book.params, ids)
            gaps += np.asarray(reference - policy)[: len(one)][one.mask == 1].tolist()
    gap = np.array(gaps)
    assert third["reference_kl_k1"] == pytest.approx(-gap.mean(), rel=1e-3, abs=1e-6)
    assert third["reference_kl_k3"] == pytest.approx((np.expm1(gap) - gap).mean(), rel=1e-3)


# ---------------------------------------------------------------------- what a batch is


@pytest.mark.parametrize(
    "preset",
    [
        "gspo",
        "reinforce_pp_baseline",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOWER),
    ],
)
def test_no_preset_knows_how_a_batch_is_laid_out(make_decoder: MakeDecoder, preset: Any) -> None:
    results = []
    for settings in ({"rows": 1}, {"rows": 4, "share_prefixes": False}):
        batch = groups()
        if preset == "maxrl":
            batch = [positive(each) for each in batch]
        learner = new_learner(make_decoder(0), AlgorithmConfig(preset=preset), **settings)
        before = parameters(learner)
        metrics = step(learner, batch)
        assert np.isfinite(list(metrics.values())).all()
        results.append(parameters(learner))
        assert moved(before, results[-1])
    assert_near(results[0], results[1], 2e-6)


def positive(group: Group) -> Group:
    trajectories = tuple(replace(t, reward=abs(t.reward)) for t in group.trajectories)
    return replace(group, trajectories=trajectories)


def test_sequence_means_weigh_each_trajectory_alike(make_decoder: MakeDecoder) -> None:
    """By hand: the loss of `reinforce` is then the mean over trajectories of the mean over their tokens."""
    algorithm = AlgorithmConfig(
        loss="reinforce", correction="off", aggregation="sequence_mean_token_mean"
    )
    (each,) = groups(count=1)
    book = Textbook(make_decoder(0))
    losses = []
    for trajectory in each.trajectories:
        one = trajectory.segments[0]
        ids = np.pad(one.ids, (0, LENGTH - len(one)))
        own = np.asarray(book.logprobs(book.params, ids))[: len(one)][one.mask == 1]
        losses.append(-(trajectory.reward - np.mean(each.rewards)) * own.mean())
    learner = new_learner(make_decoder(0), algorithm)
    assert step(learner, [each])["loss"] == pytest.approx(np.mean(losses), rel=1e-4, abs=1e-6)


def test_the_best_of_a_group_are_imitated(make_decoder: MakeDecoder) -> None:
    learner = new_learner(make_decoder(0), AlgorithmConfig(preset="best_of_n", keep_above=0.5))
    (each,) = groups(count=1)
    rewards = (1.0, 3.0, 0.0)
    each = replace(
        each,
        trajectories=tuple(
            replace(t, reward=r) for t, r in zip(each.trajectories, rewards, strict=True)
        ),
    )
    failed = replace(each, trajectories=tuple(replace(t, reward=0.2) for t in each.trajectories))
    assert not learner.add_group(failed), (
        "there is nothing worth imitating: another task takes its place"
    )
    assert learner.add_group(each)
    metrics = learner.step()
    assert metrics["trained_tokens"] == each.trajectories[1].segments[0].mask.sum()
    assert metrics["filtered_episodes"] == pytest.approx(2 / 3)


def test_deterministic_batches_do_not_depend_on_arrival(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder(0)
    runs = []
    for orders in (((0, 1, 2, 3), (3, 2, 1, 0)), ((2, 3, 1, 0), (0, 2, 1, 3))):
        learner = new_learner(decoder, None, OptimizerConfig(), deterministic=True, rows=1)
        for seed, order in enumerate(orders):
            batch = groups(seed)
            step(learner, [batch[number] for number in order])
        runs.append(parameters(learner))
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_one_pass_with_no_policy_to_clip_against_is_refused(make_decoder: MakeDecoder) -> None:
    with pytest.raises(ConfigError, match="proximal current and 2 optimizer steps"):
        new_learner(make_decoder(0), AlgorithmConfig(proximal="current"), epochs=2)


def test_sequences_alone_are_no_batch(make_decoder: MakeDecoder) -> None:
    learner = Learner(
        make_decoder(0),
        replace(CONFIG, epochs=2),
        row_tokens=LENGTH,
        temperature=1.0,
        max_lag=0,
    )
    with pytest.raises(ConfigError, match=r"epochs x learner\.mini_batches is 2 .* or add groups"):
        learner.add_sequences([])
