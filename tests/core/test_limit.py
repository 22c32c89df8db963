"""`Limit`: what a cancel scope with a deadline does, on both loops."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from gymllm.limit import Limit

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


async def test_a_block_that_takes_too_long_is_cancelled_and_left() -> None:
    cleaned: list[str] = []
    with anyio.fail_after(5), Limit(0.02) as limit:
        try:
            await anyio.sleep_forever()
        finally:
            cleaned.append("up")
    assert limit.passed
    assert cleaned == ["up"]


async def test_a_block_that_ends_in_time_is_left_alone_later() -> None:
    with Limit(0.02) as limit:
        pass
    await anyio.sleep(0.05)
    assert not limit.passed


async def test_a_limit_that_has_passed_cancels_the_first_wait() -> None:
    with Limit(1e-9) as limit:
        await anyio.lowlevel.checkpoint()
    assert limit.passed


async def test_what_a_block_raises_comes_out() -> None:
    with pytest.raises(KeyError), Limit(5):
        raise KeyError("mine")


async def test_a_swallowed_cancellation_comes_again() -> None:
    swallowed = 0
    with anyio.fail_after(5), Limit(0.02) as limit:
        for _ in range(3):
            try:
                await anyio.sleep(1)
            except anyio.get_cancelled_exc_class():
                swallowed += 1
    assert swallowed == 3
    assert limit.passed


async def test_many_limits_of_two_lengths_each_pass_at_their_time() -> None:
    ended: list[tuple[float, float]] = []
    begun = anyio.current_time()

    async def wait(seconds: float, delay: float) -> None:
        await anyio.sleep(delay)
        started = anyio.current_time()
        with Limit(seconds):
            await anyio.sleep_forever()
        ended.append((seconds, anyio.current_time() - started))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(wait, 0.05 if number % 2 else 0.12, number * 0.005)
    assert len(ended) == 20
    assert all(took >= seconds - 0.002 for seconds, took in ended), "none is cut short"
    assert anyio.current_time() - begun < 2


async def test_the_outer_of_two_limits_ends_both() -> None:
    with anyio.fail_after(5), Limit(0.02) as outer:
        with Limit(60) as inner:
            await anyio.sleep_forever()
        raise AssertionError("not reached")
    assert outer.passed
    assert not inner.passed


async def test_a_limit_within_ends_both_and_says_which_it_was() -> None:
    reached = False
    with anyio.fail_after(5), Limit(60) as outer:
        with outer.within(0.02) as inner:
            await anyio.sleep_forever()
        reached = True
    assert inner.passed
    assert reached


async def test_an_outer_limit_that_passes_is_not_taken_for_the_one_within() -> None:
    with anyio.fail_after(5), Limit(0.02) as outer:
        with outer.within(60) as inner:
            await anyio.sleep_forever()
        raise AssertionError("not reached")
    assert outer.passed
    assert not inner.passed
