"""What every test needs."""

import signal

import pytest

# A shell starts background jobs with Ctrl-C ignored, and children inherit that: no test of it could pass.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked slow, unless `-m` says what is wanted or a test is asked for by name."""
    if config.option.markexpr or any("::" in argument for argument in config.args):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
