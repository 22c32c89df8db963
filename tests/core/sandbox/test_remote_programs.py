"""The programs for containers, in whichever sh there is here: dash, bash, busybox."""

from __future__ import annotations

import shutil
import subprocess
import time

import pytest

from gymllm.errors import ConfigError, SandboxFileError
from gymllm.sandbox import remote_files
from gymllm.sandbox.remote_programs import KEEPER, LISTEN, command, exports, program, quoted, told

SHELLS = [
    pytest.param(argv, marks=pytest.mark.skipif(shutil.which(argv[0]) is None, reason="not here"))
    for argv in (["dash"], ["bash", "--posix"], ["busybox", "sh"])
]


def listen(shell: list[str], text: bytes, input: bytes = b"") -> tuple[bytes, bytes]:
    done = subprocess.run(
        [*shell, "-c", LISTEN],
        input=told(b"WORD", text) + input,
        capture_output=True,
        check=False,
        timeout=10,
    )
    return done.stdout, done.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_any_bytes_reach_a_program(shell: list[str]) -> None:
    every = bytes(range(1, 256)).replace(b"\n", b"\n\n") + b"'\\'\n"
    text = command(
        b"exec printf '%%s|%%s' %s \"$NAME\"\n" % quoted(every),
        0,
        cwd=b"/",
        exports=exports({"NAME": "it's\nä"}),
    )
    out, err = listen(shell, text)
    assert out == every + "|it's\nä".encode() + b"WORD 0 \n"
    pid, status = err.splitlines()
    assert pid.split()[1].isdigit()
    assert status == b"WORD 0 "


@pytest.mark.parametrize("shell", SHELLS)
def test_input_ends_where_it_ends(shell: list[str]) -> None:
    data = bytes(range(256)) * 400
    text = command(b"exec cat\n", len(data), cwd=b"/", exports=b"")
    out, _ = listen(shell, text, data + b"not for it")
    assert out == data + b"WORD 0 \n"


@pytest.mark.parametrize("shell", SHELLS)
def test_input_that_nobody_reads_is_taken_all_the_same(shell: list[str]) -> None:
    data = b"\n".join([b"WORD", b"echo evil", b"WORD"] * 10_000)
    unread = command(b"exit 7\n", len(data), cwd=b"/", exports=b"", stay=True)
    then = command(b"echo then\n", 0, cwd=b"/", exports=b"", stay=True)
    out, _ = listen(shell, unread, data + told(b"WORD", then))
    lines = out.splitlines()
    assert lines[0].startswith(b"WORD 7 ")
    assert lines[1] == b"then"
    assert lines[2].startswith(b"WORD 0 ")
    assert len(lines) == 3


@pytest.mark.parametrize("shell", SHELLS)
def test_endings_and_what_a_shell_says_of_them(shell: list[str]) -> None:
    for body, status, said in (
        (b"exec sh -c 'kill -9 $$'\n", b"137", b""),
        (b"exec exit 3\n", b"127", b"exit"),
        (b"exec no-such\n", b"127", b"no-such"),
        (b"exec sh -c 'exit 5'\n", b"5", b""),
    ):
        out, err = listen(shell, command(body, 0, cwd=b"/", exports=b""))
        assert out == b"WORD %s \n" % status
        lines = err.splitlines()
        assert lines[-1] == b"WORD %s " % status
        assert bool(said) == (len(lines) == 3)
        assert said in err


@pytest.mark.parametrize("shell", SHELLS)
def test_one_sh_runs_one_after_another_and_each_in_its_session(shell: list[str]) -> None:
    segfault = [b"sh", b"-c", b"kill -SEGV $$"]
    texts = [
        command(program(words, b"PID"), 0, cwd=b"/", exports=b"export A=b\n", stay=True)
        for words in (segfault, [b"no-such"], [b"ps", b"-o", b"sess=", b"-p", b"%d"], [b"env"])
    ]
    texts[2] = texts[2].replace(
        b"'ps' '-o' 'sess=' '-p' '%d'", b"sh -c 'ps -o sess= -p $$; echo $$'"
    )
    texts.append(command(b"cat\n", 3, cwd=b"/", exports=b"", stay=True))
    out, err = listen(shell, b"".join(told(b"WORD", text) for text in texts)[5:-5], b"abc")
    lines = out.split(b"\n")
    assert lines[0].startswith(b"WORD 139 ")
    assert lines[1].startswith(b"WORD 127 ")
    assert lines[2].strip() == lines[3].strip()
    assert b"A=b" in lines
    assert not {line.partition(b"=")[0] for line in lines} & {b"word", b"program", b"line"}
    assert lines[-2].startswith(b"abcWORD 0 ")
    assert err.count(b"PID ") == 4
    assert err.count(b"no-such") == 1


@pytest.mark.parametrize("shell", SHELLS)
def test_a_program_that_is_cut_short_is_not_begun(shell: list[str]) -> None:
    done = subprocess.run(
        [*shell, "-c", LISTEN], input=b"WORD\necho begun\n", capture_output=True, check=False
    )
    assert done.stdout == b""


@pytest.mark.parametrize("shell", SHELLS)
def test_the_keeper_ends_a_session_and_spares_jobs(shell: list[str]) -> None:
    keeper = subprocess.Popen(
        [*shell, "-c", LISTEN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    # A shell with two jobs, each in a group of its own; the second has left its parent.
    script = "set -m; sleep 56.1 & echo $! $$; (sleep 56.2 &); sleep 56.3; exit 7"
    victim = subprocess.Popen(
        ["bash", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert keeper.stdin
    assert keeper.stdout
    assert victim.stdout
    try:
        keeper.stdin.write(told(b"WORD", KEEPER.encode()))
        keeper.stdin.flush()
        assert keeper.stdout.readline().split()[:2] == [b"WORD", b"leader"]
        job, pid = victim.stdout.readline().split()

        def tell(line: bytes) -> None:
            assert keeper.stdin
            assert keeper.stdout
            keeper.stdin.write(b"answer " + line + b"\n")
            keeper.stdin.flush()
            assert keeper.stdout.readline() == b"answer\n"

        def left() -> bytes:
            shown = subprocess.run(["ps", "-A", "-o", "args="], capture_output=True, check=True)
            return b" ".join(x for x in shown.stdout.split(b"\n") if x.startswith(b"sleep 56."))

        ends = time.monotonic() + 5
        while b"sleep 56.3" not in left() and time.monotonic() < ends:
            pass
        tell(b"rest %s %s" % (pid, job))
        assert b"sleep 56.1" in left()
        assert b"sleep 56.3" not in left()
        assert victim.wait(5) == 7
        tell(b"session " + pid)
        assert left() == b""
    finally:
        for process in (keeper, victim):
            process.kill()
            process.wait()
        for pipe in (keeper.stdin, keeper.stdout, victim.stdout):
            pipe.close()


def test_names_that_no_sh_takes_are_refused() -> None:
    for env in ({"a-b": ""}, {"": ""}, {"A": "\0"}):
        with pytest.raises(ConfigError, match=r"sandbox\.env"):
            exports(env)


def test_what_tools_say_becomes_an_error_number() -> None:
    for said, name in (
        (b"cat: x: No such file or directory\n", "ENOENT"),
        (b"sh: 3: cannot create /a: Directory nonexistent\nmv: can't rename\n", "EIO"),
        (b"stat: can't stat 'l': Symbolic link loop\n", "ELOOP"),
        (b"cat: write error: No space left on device\n", "ENOSPC"),
        (b"", "EIO"),
    ):
        problem = remote_files.problem(said, "path")
        assert isinstance(problem, SandboxFileError)
        assert errno_name(problem.errno) == name


def errno_name(number: int | None) -> str:
    import errno

    assert number is not None
    return errno.errorcode[number]
