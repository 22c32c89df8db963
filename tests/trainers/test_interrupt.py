"""`Interrupt`: SIGINT asks, nothing is torn, and KeyboardInterrupt comes at the end."""

from __future__ import annotations

import signal

import anyio
import anyio.lowlevel
import pytest

from gymllm_trainers.interrupt import Interrupt


def test_signal_never_raises_inside_and_always_at_the_end():
    before = signal.getsignal(signal.SIGINT)
    seen: list[bool] = []

    def block() -> None:
        with Interrupt() as interrupt:
            seen.append(interrupt.requested)
            signal.raise_signal(signal.SIGINT)
            seen.append(interrupt.requested)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert seen == [False, True]
    assert signal.getsignal(signal.SIGINT) is before


def test_block_without_a_signal_ends_as_it_is():
    with Interrupt() as interrupt:
        pass
    assert not interrupt.requested


def test_error_goes_before_the_interrupt():
    def block() -> None:
        with Interrupt():
            signal.raise_signal(signal.SIGINT)
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        block()


@pytest.mark.parametrize("before", [True, False])
def test_signal_cancels_the_scope_but_not_what_is_shielded(before):
    closed: list[str] = []

    async def main(interrupt: Interrupt) -> bool:
        with anyio.CancelScope() as scope, interrupt.cancels(scope):
            try:
                if not before:
                    signal.raise_signal(signal.SIGINT)
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.lowlevel.checkpoint()
                    closed.append("closed")
        return scope.cancelled_caught

    def block() -> None:
        with Interrupt() as interrupt:
            if before:
                signal.raise_signal(signal.SIGINT)
            assert anyio.run(main, interrupt)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert closed == ["closed"]


def test_what_is_nearly_done_is_let_end():
    async def main() -> bool:
        with anyio.CancelScope() as scope, interrupt.cancels(scope):
            interrupt.patience_s = 60.0
            signal.raise_signal(signal.SIGINT)
            for _ in range(10):
                await anyio.lowlevel.checkpoint()
        return scope.cancelled_caught

    with pytest.raises(KeyboardInterrupt), Interrupt() as interrupt:
        assert not anyio.run(main)
