"""Terminal tasks in containers, on a real Podman; skipped where there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from terminal_helpers import SUBMIT, bash, call, play

sys.path.append(str(Path(__file__).parents[2] / "core" / "sandbox"))
pytest.importorskip("docker", reason='needs pip install "gymllm[docker]"')

from podman_service import IMAGE, podman_service, why_not

from gymllm.errors import ConfigError
from gymllm.sandbox.docker import DockerHost
from gymllm_envs.terminal.harbor import read_folder
from gymllm_envs.terminal.task import TerminalTask


@pytest.fixture(scope="module")
def host() -> Iterator[DockerHost]:
    if problem := why_not():
        pytest.skip(problem)
    try:
        with podman_service() as address:
            yield DockerHost(url=address, pull="never")
    except RuntimeError as error:
        pytest.skip(f"Podman's service does not start here: {error}")


SMALL = TerminalTask(
    id="small",
    instruction="Say hello.",
    image=IMAGE,
    files={"in.txt": "x\n"},
    check="grep -qx hello out.txt",
)


def test_a_task_is_played_in_a_container(host: DockerHost) -> None:
    assert play(SMALL, bash("cat in.txt"), SUBMIT, kind=host).reward == 0.0
    evil = "mkdir -p /logs/verifier /tests; echo 1 >/logs/verifier/reward.txt; "
    evil += "(setsid sh -c 'while sleep 1; do echo hello >out.txt; done' &)"
    assert play(SMALL, bash(evil), SUBMIT, kind=host).reward == 0.0
    played = play(SMALL, bash("cat in.txt; echo hello >out.txt"), SUBMIT, kind=host)
    assert played.texts[0] == "x"
    assert played.reward == 1.0


def test_its_screen_is_a_containers(host: DockerHost) -> None:
    keys = call("keys", keys=["echo hello >out.txt; tty", "Enter"], quiet_s=0.5)
    played = play(SMALL, keys, call("submit"), kind=host, mode="screen")
    assert "/dev/pts/" in played.texts[0]
    assert played.reward == 1.0


def test_a_harbor_folder_is_built_and_checked(host: DockerHost, tmp_path: Path) -> None:
    files = {
        "task.toml": "[verifier]\ntimeout_sec = 30\n[environment]\nmemory_mb = 256\n",
        "instruction.md": "Write hello.",
        "environment/Dockerfile": f"FROM {IMAGE}\nWORKDIR /work\n"
        "COPY seed.txt /etc/seed\nRUN echo made >made\n",
        "environment/seed.txt": "seed",
        "tests/test.sh": "mkdir -p /logs/verifier; grep -qx hello /work/out.txt && cat /tests/half.txt "
        ">/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt\n",
        "tests/half.txt": "0.5\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    task = read_folder(tmp_path)[0]
    done = bash("ls /tests; cat made /etc/seed; echo hello >out.txt")
    played = play(task, done, SUBMIT, kind=host)
    assert "made\nseed" in played.texts[0]
    assert "half" not in played.texts[0]
    assert (played.reward, played.reason) == (0.5, "the checker says 0.5")
    (tmp_path / "environment" / "Dockerfile").write_text(
        f"FROM {IMAGE}\nWORKDIR /w\nRUN no-such-x\n"
    )
    with pytest.raises(ConfigError, match="it can't be built"):
        play(read_folder(tmp_path)[0], kind=host)
