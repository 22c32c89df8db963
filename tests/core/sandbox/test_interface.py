"""What a spec accepts; `import gymllm` stays light."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import gymllm.sandbox
from gymllm.errors import ConfigError
from gymllm.sandbox import Output, SandboxSpec, open_sandbox
from gymllm.sandbox.output import Kept


def test_specs_are_checked(tmp_path: Path) -> None:
    for wrong in (
        {"memory_mb": 0},
        {"pids": -1},
        {"wall_s": 0},
        {"workdir": "x"},
        {"network": True},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            SandboxSpec(**wrong)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ConfigError, match="no folder"):
        SandboxSpec(base=tmp_path / "none")
    assert hash(SandboxSpec(env={"A": "b"})) == hash(SandboxSpec(env={"A": "b"}))


@pytest.mark.asyncio
async def test_hidden_folders_are_empty_and_others_refuse_to_hide() -> None:
    folder = sysconfig.get_path("stdlib") + "/ensurepip"
    code = f"ls {folder} | wc -l; ls {folder}/.. | wc -l"
    async with await open_sandbox(
        SandboxSpec(hidden=(f"{folder}/_bundled", folder, "/usr/nowhere"))
    ) as sandbox:
        hidden, above = bytes((await sandbox.exec(["sh", "-c", code])).stdout).split()
    assert hidden == b"0"
    assert int(above) > 100
    with pytest.raises(ConfigError, match=r"sandbox.hidden: only kind 'local'"):
        await open_sandbox(SandboxSpec(hidden=(folder,)), "unshare")


def test_import_gymllm_brings_no_sandbox() -> None:
    code = "import gymllm, sys; print('gymllm.sandbox' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"False\n"


def test_all_is_sorted_and_complete() -> None:
    exported = gymllm.sandbox.__all__
    assert exported == sorted(exported)
    assert all(hasattr(gymllm.sandbox, name) for name in exported)


@pytest.mark.parametrize("most", [0, 1, 2, 9, 10])
@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_both_ends_are_kept(most: int, chunk: int) -> None:
    data = bytes(range(65, 85))
    kept = Kept(most)
    for start in range(0, 20, chunk):
        kept.add(data[start : start + chunk])
    out = kept.output()
    assert out.head == data[: most - most // 2]
    assert out.tail == data[20 - most // 2 :]
    assert out.cut_bytes == 20 - most
    small = Kept(40)
    small.add(data)
    assert small.output() == Output(head=data)
