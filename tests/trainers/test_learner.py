"""The learner: what is trained on, and that how it is laid out changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymllm.errors import ConfigError
from gymllm.ledger import NO_VERSION, Segment
from gymllm.task import Task
from gymllm.trajectory import Ending, Group, Trajectory
from gymllm_trainers.algorithms.config import AlgorithmConfig
from gymllm_trainers.learner import Learner, LearnerConfig
from gymllm_trainers.models import Decoder
from gymllm_trainers.optimizer import OptimizerConfig
from gymllm_trainers.packing import TrainingSequence

MakeDecoder = Callable[[int], Decoder]
CONFIG = LearnerConfig(rows=2, head_chunk=16, smaller_shapes=0)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, max_grad_norm=1e6)


def new_learner(
    decoder: Decoder,
    *,
    row_tokens: int = 64,
    algorithm: AlgorithmConfig | None = None,
    **settings: object,
) -> Learner:
    return Learner(
        decoder,
        replace(CONFIG, **settings),  # type: ignore[arg-type] # built for tests
        algorithm=algorithm,
        optimizer=OPTIMIZER,
        row_tokens=row_tokens,
        temperature=1.0,
        max_lag=2,
    )


@pytest.fixture(scope="module")
def compiled(make_decoder: MakeDecoder) -> Learner:
    one = new_learner(make_decoder(0))
    one.compile()
    return one


@pytest.fixture
def learner(compiled: Learner) -> Iterator[Learner]:
    """The one learner that is compiled, as good as new at the start of each test."""
    state = compiled.state
    yield compiled
    compiled.step()
    compiled.state = state


def segment(rng: np.random.Generator, size: int, version: int | Sequence[int] = 0) -> Segment:
    """A random conversation: a prompt, then answers and observations in turns."""
    mask = (rng.random(size) < 0.5).astype(np.int32)
    mask[:3], mask[-1] = 0, 1
    return Segment(
        ids=rng.integers(64, size=size).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, -rng.exponential(size=size), 0).astype(np.float32),
        versions=np.where(mask, version, NO_VERSION).astype(np.int32),
    )


def group(index: int, rewards: Sequence[float], segments: Iterable[Segment]) -> Group:
    task = Task(index=index, id=f"t{index}", seed=index)
    return Group(
        task=task,
        trajectories=tuple(
            Trajectory(
                task=task,
                member=member,
                attempt=0,
                segments=(one,),
                turns=(),
                messages=(),
                ending=Ending.TERMINATED,
                reward=reward,
            )
            for member, (reward, one) in enumerate(zip(rewards, segments, strict=True))
        ),
    )


def random_groups(seed: int = 0, count: int = 3) -> list[Group]:
    rng = np.random.default_rng(seed)
    return [
        group(
            index,
            rng.integers(5, size=4).tolist(),
            [segment(rng, int(size)) for size in rng.integers(5, 40, size=4)],
        )
        for index in range(count)
    ]


def test_collecting_computes_no_gradient_and_computing_changes_nothing_else(
    learner: Learner,
) -> None:
    groups = random_groups(count=6)
    state = learner.state
    for one in groups:
        assert learner.add_group(one)
    expected = learner.step()
    after = parameters(learner)
    learner.state = state
    for one in groups:
        assert learner.collect(one)
    assert learner.micro_batches == 0
    assert learner.full_batches > 0
    learner.compute()
    assert learner.full_batches == 0
    assert learner.micro_batches > 0
    learner.compute(flush=True)
    count = learner.micro_batches
    assert learner.step() == expected
    assert_same(parameters(learner), after, 0.0)
    assert count > 0


def gradient(one: Learner) -> list[np.ndarray]:
    """The mean gradient of the last step, from Adam's first moment after the first step."""

    def is_adam(part: object) -> bool:
        return hasattr(part, "mu")

    parts = jax.tree.leaves(one.state.optimizer, is_leaf=is_adam)
    (adam,) = (part for part in parts if is_adam(part))
    return [np.asarray(leaf) / (1 - OPTIMIZER.b1) for leaf in jax.tree.leaves(adam.mu)]


def parameters(one: Learner) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(one.state.trainable)]


def assert_same(left: list[np.ndarray], right: list[np.ndarray], tolerance: float = 1e-6) -> None:
    """Equal, relative to the size of each array."""
    for one, other in zip(left, right, strict=True):
        assert np.linalg.norm(other - one) <= tolerance * np.linalg.norm(one)


# ---------------------------------------------------------------------- layout changes nothing


def sequences(groups: list[Group]) -> list[TrainingSequence]:
    return [
        TrainingSequence(
            ids=trajectory.segments[0].ids,
            mask=trajectory.segments[0].mask.astype(np.float32),
            behaviour=trajectory.segments[0].logprobs,
            advantage=np.full(
                len(trajectory.segments[0]),
                trajectory.reward - np.mean(each.rewards),
                np.float32,
            ),
        )
        for each in groups
        for trajectory in each.trajectories
    ]


def test_any_layout_gives_the_same_gradient_and_parameters(
    make_decoder: MakeDecoder, learner: Learner
) -> None:
    groups, start = random_groups(), learner.state
    results: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {}

    def step(name: str, one: Learner) -> None:
        one.step()
        results[name] = gradient(one), parameters(one)

    # One micro-batch of unpacked rows, as a textbook would do it.
    single = new_learner(make_decoder(0), rows=12, row_tokens=40)
    single.add_sequences(sequences(groups))
    assert single.micro_batches == 0, "they all wait for one micro-batch"
    step("single batch", single)
    # One sequence a row and one row a micro-batch.
    padded = new_learner(make_decoder(0), rows=1, row_tokens=40)
    for one in sequences(groups):
        padded.add_sequences([one])
    step("padded", padded)
    # Packed rows, all groups at once.
    learner.add_sequences(sequences(groups))
    assert learner.micro_batches > 0
    step("packed", learner)
    # Group by group, in either order.
    for name, order in (("streamed", groups), ("streamed backwards", groups[::-1])):
        learner.state = start
        for each in order:
            assert learner.add_group(each)
        step(name, learner)
    before = parameters(new_learner(make_decoder(0)))
    expected = results.pop("single batch")
    assert all(np.abs(a - b).max() > 1e-4 for a, b in zip(before, expected[1], strict=True))
    assert list(results) == ["padded", "packed", "streamed", "streamed backwards"]
    for gradients, values in results.values():
        # Sums of thousands of float32 numbers, taken in other orders: 1.1e-6 was seen.
        assert_same(expected[0], gradients, 2e-6)
        # Adam's first step is g / (|g| + eps): where g is nothing but rounding, so is the step.
        known = [np.abs(g) > 1e-5 * np.abs(g).max() for g in expected[0]]
        assert all(part.mean() > 0.5 for part in known)
        assert_same(
            [part[where] for part, where in zip(expected[1], known, strict=True)],
            [part[where] for part, where in zip(values, known, strict=True)],
        )
        assert_same(expected[1], values, 1e-4)


def test_gradient_is_that_of_the_formula(make_decoder: MakeDecoder, learner: Learner) -> None:
    """Token mean of min(pi / mu, 2) A grad log pi, each sequence on its own and unpadded."""
    rng = np.random.default_rng(3)
    each = group(0, [1, 0, 0], [segment(rng, 20) for _ in range(3)])
    learner.add_group(each)
    learner.step()
    graph, state = nnx.split(make_decoder(0))

    @jax.jit
    def total(state, ids, mask, behaviour, advantage):
        decoder = nnx.merge(graph, state)
        hidden = decoder.hidden(ids[None], jnp.arange(20)[None], jnp.full((1, 20), 20))
        logprob = jax.nn.log_softmax(decoder.logits(hidden[0]))[jnp.arange(19), ids[1:]]
        weight = jnp.minimum(jnp.exp(jax.lax.stop_gradient(logprob) - behaviour[1:]), 2.0)
        return -jnp.sum(weight * advantage * logprob * mask[1:])

    sums = jax.tree.map(jnp.zeros_like, state)
    for trajectory, advantage in zip(each.trajectories, (2 / 3, -1 / 3, -1 / 3), strict=True):
        one = trajectory.segments[0]
        part = jax.grad(total)(state, one.ids, one.mask, one.logprobs, advantage)
        sums = jax.tree.map(jnp.add, sums, part)
    count = sum(int(t.segments[0].mask[1:].sum()) for t in each.trajectories)
    expected = [np.asarray(leaf) / count for leaf in jax.tree.leaves(sums)]
    assert_same(expected, gradient(learner), 1e-5)


# ---------------------------------------------------------------------- what is trained on


def test_tokens_older_than_max_lag_are_masked(learner: Learner) -> None:
    rng = np.random.default_rng(0)
    versions = rng.integers(6, size=(4, 30))
    mixed = [segment(rng, 30, versions[member]) for member in range(4)]
    fresh = [replace(s, mask=np.where(s.versions >= 3, s.mask, 0)) for s in mixed]
    start = learner.state._replace(version=5)  # max_lag is 2: versions 0 to 2 are too old
    results = []
    for segments in (mixed, fresh):
        learner.state = start
        learner.add_group(group(0, [1, 0, 2, 0], segments))
        metrics = learner.step()
        results.append((metrics, gradient(learner)))
    (metrics, gradients), (expected, expected_gradients) = results
    assert_same(expected_gradients, gradients)
    assert metrics["trained_tokens"] == expected["trained_tokens"]
    generated = np.concatenate([s.versions[s.mask == 1] for s in mixed])
    assert metrics["stale_share"] == pytest.approx(np.mean(generated < 3))
    assert metrics["lag_mean"] == pytest.approx(np.mean(5 - generated))
    assert metrics["lag_max"] == 5 - generated.min()
    assert expected["stale_share"] == 0


def test_a_step_of_stale_tokens_alone_changes_no_parameter(learner: Learner) -> None:
    rng = np.random.default_rng(0)
    learner.state = learner.state._replace(version=5)
    before = parameters(learner)
    assert learner.add_group(group(0, [1, 0], [segment(rng, 30) for _ in range(2)]))
    assert learner.groups == 1
    metrics = learner.step()
    assert metrics["gradient_norm"] == 0
    assert "loss" not in metrics
    assert all((a == b).all() for a, b in zip(before, parameters(learner), strict=True))
    assert (learner.version, learner.groups) == (6, 0)


def test_a_group_without_variance_is_refilled_or_kept(
    make_decoder: MakeDecoder, learner: Learner
) -> None:
    rng = np.random.default_rng(0)
    flat = group(0, [0.1] * 7, [segment(rng, 8) for _ in range(7)])
    assert not learner.add_group(flat)
    assert learner.groups == 0
    metrics = learner.step()
    assert metrics == {"gradient_norm": 0, "zero_variance_groups": 1}
    keeper = new_learner(make_decoder(0), algorithm=AlgorithmConfig(zero_variance="keep"))
    assert keeper.add_group(flat)
    assert keeper.groups == 1


def test_a_sequence_with_nothing_to_train_is_left_out(learner: Learner) -> None:
    rng = np.random.default_rng(0)
    empty = segment(rng, 10)
    empty = replace(empty, mask=np.zeros_like(empty.mask))
    alone = segment(rng, 1)  # one generated token that nothing predicts
    one = segment(rng, 10)
    learner.add_group(group(0, [1, 0, 0], [empty, alone, one]))
    assert learner.step()["train_tokens"] == 10


def test_metrics_by_hand(learner: Learner, make_decoder: MakeDecoder) -> None:
    rng = np.random.default_rng(1)
    one = segment(rng, 30)
    decoder = make_decoder(0)
    ids = jnp.asarray(one.ids)[None]
    hidden = decoder.hidden(ids, jnp.arange(30)[None], jnp.full_like(ids, 30))
    logprobs_TV = np.asarray(jax.nn.log_softmax(decoder.logits(hidden[0])))
    own = np.zeros(30, np.float32)
    own[1:] = logprobs_TV[np.arange(29), one.ids[1:]]
    mask = one.mask == 1
    # The engine said half a nat less for every token: ratio e^0.5.
    behaviour = np.where(mask, own - 0.5, 0).astype(np.float32)
    learner.add_group(group(0, [1, 0], [replace(one, logprobs=behaviour)] * 2))
    metrics = learner.step()
    entropy = -(np.exp(logprobs_TV) * logprobs_TV).sum(-1)[:-1][mask[1:]].mean()
    expected = {
        "loss": 0,  # the two members' advantages cancel
        "entropy": entropy,
        "behaviour_kl_k3": np.exp(0.5) - 1.5,
        "logprob_gap_mean": 0.5,
        "logprob_gap_max": 0.5,
        "correction_weight": np.exp(0.5),
        "trained_tokens": 2 * mask.sum(),
        "train_tokens": 30,  # the two members say the same
        "padding_share": 1 - 30 / 128,
        "clipped_low": 0,
        "clipped_high": 0,
        "stale_share": 0,
        "zero_variance_groups": 0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-4)
    assert metrics["gradient_norm"] < 1e-5


def test_gradient_norm_is_clipped(make_decoder: MakeDecoder, learner: Learner) -> None:
    for each in random_groups():
        learner.add_group(each)
    norm = learner.step()["gradient_norm"]
    assert norm == pytest.approx(
        np.sqrt(sum((leaf.astype(np.float64) ** 2).sum() for leaf in gradient(learner))), rel=1e-5
    )


# ---------------------------------------------------------------------- what it gives


def test_step_moves_the_policy_and_counts_versions(learner: Learner) -> None:
    before = jax.tree.leaves(learner.weights())
    learner.add_group(random_groups()[0])
    assert (learner.version, learner.groups) == (0, 1)
    learner.step()
    assert (learner.version, learner.groups, learner.micro_batches) == (1, 0, 0)
    after = jax.tree.leaves(learner.weights())
    assert all((a != b).any() for a, b in zip(before, after, strict=True))
    assert all(
        (a == b).all()
        for a, b in zip(after, jax.tree.leaves(nnx.state(learner.policy())), strict=True)
    )


def test_weights_survive_the_next_step(learner: Learner) -> None:
    """The engine still computes with them while the learner goes on."""
    weights = learner.weights()
    copy = [np.array(leaf) for leaf in jax.tree.leaves(weights)]
    learner.add_group(random_groups()[0])
    learner.step()
    for leaf, kept in zip(jax.tree.leaves(weights), copy, strict=True):
        np.testing.assert_array_equal(leaf, kept)


def test_the_same_groups_give_the_same_policy(learner: Learner) -> None:
    start, policies = learner.state, []
    for _ in range(2):
        learner.state = start
        for each in random_groups():
            learner.add_group(each)
        learner.step()
        policies.append(parameters(learner))
    assert all((a == b).all() for a, b in zip(*policies, strict=True))


def test_nothing_compiles_again(learner: Learner, compilations: list[str]) -> None:
    for seed in range(3):
        for each in random_groups(seed, count=1 + seed):
            learner.add_group(each)
        learner.step()
        learner.weights()
    learner.add_group(group(9, [1, 1], [segment(np.random.default_rng(0), 5)] * 2))
    learner.step()
    assert compilations == []


# ---------------------------------------------------------------------- mistakes


def test_a_segment_longer_than_a_row_names_the_setting(make_decoder: MakeDecoder) -> None:
    one = new_learner(make_decoder(0), row_tokens=16)
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigError, match=r"does not fit in a row of 16: set learner\.row_tokens"):
        one.add_group(group(0, [1, 0], [segment(rng, 17), segment(rng, 17)]))


def test_greedy_trajectories_are_refused(make_decoder: MakeDecoder) -> None:
    with pytest.raises(ConfigError, match=r"agent.temperature must be > 0 .*, got 0"):
        Learner(make_decoder(0), CONFIG, row_tokens=16, temperature=0.0, max_lag=2)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"groups_per_step": 0}, "learner.groups_per_step must be >= 1, got 0"),
        ({"rows": -1}, "learner.rows must be >= 0, got -1"),
        ({"head_chunk": 0}, "learner.head_chunk must be >= 1, got 0"),
        ({"row_tokens": -1}, "learner.row_tokens must be >= 0, got -1"),
        ({"epochs": 0}, "learner.epochs must be >= 1, got 0"),
        ({"mini_batches": 5}, "learner.mini_batches is 5, but a batch has only 4 groups"),
    ],
)
def test_settings_out_of_range_are_refused(setting, message) -> None:
    with pytest.raises(ConfigError, match=message):
        LearnerConfig(**setting)


@pytest.mark.parametrize("rank", [0, 2])
def test_bfloat16_weights_are_trained_step_after_step(make_decoder: MakeDecoder, rank: int) -> None:
    graph, state = nnx.split(make_decoder(0))
    decoder = nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state))
    decoder.compute_dtype = jnp.dtype(jnp.bfloat16)
    if rank:
        decoder.add_adapters(rank=rank, alpha=4.0, rngs=nnx.Rngs(0), dtype=jnp.float32)
    learner = new_learner(decoder)
    learner.compile()
    kinds = [leaf.dtype for leaf in jax.tree.leaves(learner.state)[:-1]]
    for _ in range(3):
        before = parameters(learner)
        for one in random_groups(count=2):
            learner.add_group(one)
        assert learner.step()["gradient_norm"] > 0
        assert any((new != old).any() for new, old in zip(parameters(learner), before, strict=True))
    assert [leaf.dtype for leaf in jax.tree.leaves(learner.state)[:-1]] == kinds
    moments = [leaf for leaf in jax.tree.leaves(learner.state.optimizer) if leaf.ndim]
    assert {leaf.dtype.name for leaf in moments} == {"float32"}
    own = "float32" if rank else "bfloat16"
    assert {leaf.dtype.name for leaf in jax.tree.leaves(learner.state.trainable)} == {own}
