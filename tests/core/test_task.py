"""Tasks and seeds are functions, and stay the same functions."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gymllm.errors import ConfigError
from gymllm.task import ListedTasks, SeededTasks, Task, derive_seed


def test_seeds_are_the_same_in_every_version() -> None:
    # A changed number here would change what every recorded run means.
    assert derive_seed("member", 0, 0, 0, 0) == 2054638094
    assert derive_seed() == 560093297
    assert SeededTasks(run_seed=3).task(5).seed == 604335756


def test_seeds_fit_everywhere_and_differ() -> None:
    seeds = [derive_seed("a", number) for number in range(2_000)]
    assert min(seeds) >= 0
    assert 2**30 < max(seeds) < 2**31
    assert len(set(seeds)) == 2_000


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((1,), ("1",)),
        (("a", "b"), ("ab",)),
        (("a", "b"), ("a'\x1f'b",)),
        ((1, 23), (12, 3)),
        ((0,), ()),
    ],
)
def test_parts_are_not_confused(left: tuple[int | str, ...], right: tuple[int | str, ...]) -> None:
    assert derive_seed(*left) != derive_seed(*right)


def test_the_same_index_gives_the_same_task() -> None:
    tasks, twin = SeededTasks(run_seed=1, options={"size": 3}), SeededTasks(run_seed=1)
    later = [tasks.task(index) for index in (7, 2, 7)]
    assert later[0] == later[2]
    assert later[0].seed == twin.task(7).seed
    assert later[0].options == {"size": 3}
    assert (later[0].index, later[0].id) == (7, "train-7")


def test_runs_splits_and_indices_differ() -> None:
    sources = [
        SeededTasks(run_seed=run, split=split) for run in (0, 1) for split in ("train", "test")
    ]
    seeds = [source.task(index).seed for source in sources for index in range(50)]
    assert len(set(seeds)) == 200


def test_count_repeats_tasks_under_new_indices() -> None:
    tasks = SeededTasks(run_seed=0, count=3)
    first, again = tasks.task(1), tasks.task(4)
    assert (first.seed, first.id) == (again.seed, again.id)
    assert (first.index, again.index) == (1, 4)
    assert len({tasks.task(index).seed for index in range(30)}) == 3
    # A task that comes again is played anew, not copied.
    assert first.member_seed(0, 0) != again.member_seed(0, 0)


def test_member_seeds_differ_by_everything_that_names_an_episode() -> None:
    tasks = [Task(index=index, id="", seed=5) for index in range(3)]
    seeds = [
        task.member_seed(run, member, attempt)
        for task in tasks
        for run in range(3)
        for member in range(8)
        for attempt in range(3)
    ]
    assert len(set(seeds)) == len(seeds)
    assert tasks[0].member_seed(0, 1) == tasks[0].member_seed(0, 1, 0)


def test_no_global_random_state_is_touched() -> None:
    def state() -> object:
        return random.getstate(), str(np.random.get_state(legacy=False))

    before = state()
    SeededTasks(run_seed=0).task(3).member_seed(0, 1)
    assert state() == before


def test_no_tasks_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"tasks\.count must be >= 1 or none, got 0"):
        SeededTasks(run_seed=0, count=0)


def test_listed_tasks_come_once_each_before_any_comes_again() -> None:
    tasks = ListedTasks(run_seed=4, ids=["a", "b", "c"], options={"size": 2})
    assert [tasks.task(index).id for index in range(4)] == ["a", "b", "c", "a"]
    assert tasks.task(1).options == {"size": 2, "task": "b"}
    assert tasks.task(0).seed != tasks.task(3).seed
    with pytest.raises(ConfigError, match="at least one task"):
        ListedTasks(run_seed=0, ids=[])


def test_shuffled_tasks_have_an_order_of_their_own_in_each_pass() -> None:
    names = [str(number) for number in range(12)]
    tasks = ListedTasks(run_seed=1, ids=names, shuffle=True)
    passes = [[tasks.task(12 * pass_ + n).id for n in range(12)] for pass_ in range(3)]
    assert all(sorted(order) == sorted(names) for order in passes)
    assert len({tuple(order) for order in passes}) == 3
    assert passes[0] == [
        ListedTasks(run_seed=1, ids=names, shuffle=True).task(n).id for n in range(12)
    ]
