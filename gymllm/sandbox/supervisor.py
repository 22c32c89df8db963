"""Process 1 of a sandbox: starts what it is told to, kills it when told to, reaps everything.

It runs inside, from its own compiled file, and imports only what is built into the interpreter, so that it
starts in milliseconds. Processes inside can't signal it (it is process 1), trace it (the system-call filter)
or see its memory (its folder of /proc is covered). When its control socket closes it ends, and the kernel
kills everything else in its process namespace.

From the host, one message a job: a memory file with the marshalled `Request`, the job's descriptors and its
socket. On the job's socket: b"k" kills it, and so does closing it; b"i", b"K" and b"e" end a shell's command
(see `interrupt`). To the host: b"p" and, for a shell, the file that lists its children; b"t" and a terminal's
master; b"x" and its status; b"f" and an error's number if there can be no process; b"e" when `interrupt` has
killed all.
"""

# ruff: noqa: SIM105 - importing contextlib takes as long as starting

from __future__ import annotations

import _socket
import fcntl
import marshal
import os
import select
import sys
import time
from errno import EFBIG, EINVAL, EISDIR, EMFILE, ENOENT, EXDEV

TYPE_CHECKING = False  # of our own: importing `typing` takes longer than all the rest
if not TYPE_CHECKING:
    import _signal  # what `signal` is made of; that brings `enum`
else:
    import signal as _signal
    from typing import NoReturn, TypedDict

    class Request(TypedDict):
        """What a job is: the fields that its operation needs."""

        op: str
        argv: list[bytes]
        cwd: bytes
        env: dict[bytes, bytes]
        path: bytes
        most: int
        mode: int
        size: bytes

    class Config(TypedDict):
        """What the host tells us at the start."""

        rlimits: list[tuple[int, int]]
        files: int
        harden: bool
        drop: bool
        subreaper: bool
        filter: bytes
        ends: float | None
        workdir: bytes
        confine: list[bytes]

    Table = dict[int, tuple[int, int, int, bytes]]

SIGKILL, SIGINT = 9, 2
RLIMIT_NOFILE = 7
TIOCSCTTY, TIOCSWINSZ = 0x540E, 0x5414
STDIO = (0, 1, 2, 253, 254)
"""What a job's descriptors become: the usual three, then a shell's marks and its commands' output."""
_DIR = 0o040000
_REG = 0o100000
_LNK = 0o120000


def main(control_fd: int, told: str) -> None:
    control = _socket.socket(fileno=control_fd)
    os.set_inheritable(control_fd, False)
    config: Config = marshal.loads(bytes.fromhex(told))

    for limit, value in config["rlimits"]:
        _set_limit(limit, value)
    _set_limit(RLIMIT_NOFILE, _hard_limit(RLIMIT_NOFILE))
    if config["harden"]:
        _harden(config)
    _hide_memory()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    _signal.signal(_signal.SIGCHLD, _ignore)
    _signal.signal(SIGINT, _signal.SIG_IGN)
    _signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    os.umask(0o022)
    control.send(b"ready")
    Supervisor(control, woken, config).run()
    os._exit(0)


class Supervisor:
    def __init__(self, control: _socket.socket, woken: int, config: Config) -> None:
        self.control, self.woken, self.config = control, woken, config
        self.jobs: dict[int, Job] = {}  # socket's descriptor -> Job
        self.poll = select.poll()
        self.poll.register(control.fileno(), select.POLLIN)
        self.poll.register(woken, select.POLLIN)

    def run(self) -> None:
        ends = self.config["ends"]  # on the monotonic clock, which is the host's, too
        while True:
            left = None if ends is None else (ends - time.monotonic()) * 1000
            if left is not None and left <= 0:
                if self.config["subreaper"]:
                    self.kill_everything()
                return
            for fd, _ in self.poll.poll(left):
                if fd == self.control.fileno():
                    if not self.receive():
                        if self.config["subreaper"]:
                            self.kill_everything()
                        return
                elif fd == self.woken:
                    os.read(self.woken, 4096)
                    self.reap()
                elif fd in self.jobs:
                    self.serve(self.jobs[fd])

    def receive(self) -> bool:
        data, ancillary, _, _ = self.control.recvmsg(
            64, _socket.CMSG_SPACE(4 * 16), _socket.MSG_CMSG_CLOEXEC
        )
        if not data:
            return False
        fds: list[int] = []
        for _, kind, packed in ancillary:
            if kind == _socket.SCM_RIGHTS:
                fds += [
                    int.from_bytes(packed[i : i + 4], sys.byteorder)
                    for i in range(0, len(packed) - 3, 4)
                ]
        size = os.fstat(fds[0]).st_size
        request: Request = marshal.loads(os.pread(fds[0], size, 0))
        os.close(fds[0])
        channel = _socket.socket(fileno=fds[1])
        stdio = fds[2:]
        master = -1
        try:
            if request["op"] == "shell":
                # bash keeps a terminal's modes for its jobs; one that nobody reads stops its complaints.
                master, slave = os.openpty()
                stdio.insert(2, slave)
            elif request["op"] == "terminal":
                # Opened here, for it to have a name in here.
                master, slave = os.openpty()
                stdio = [slave]
                fcntl.ioctl(master, TIOCSWINSZ, request["size"])
            pid = os.fork()
        except OSError as error:  # the sandbox is full of processes
            channel.send(b"f" + str(error.errno).encode())
            pid = -1
        if pid == 0:
            self.child(request, stdio * 3 if request["op"] == "terminal" else stdio)
        for fd in stdio:
            os.close(fd)
        if pid < 0:
            if master >= 0:
                os.close(master)
            channel.close()
            return True
        job = Job(pid, channel, master)
        self.jobs[channel.fileno()] = job
        self.poll.register(channel.fileno(), select.POLLIN)
        if request["op"] == "shell":
            job.tell_children()
        elif request["op"] == "terminal":
            job.hand_over_terminal()
        return True

    def child(self, request: Request, stdio: list[int]) -> NoReturn:
        name = b""
        try:
            os.setsid()
            _signal.set_wakeup_fd(-1)
            _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)
            _signal.signal(_signal.SIGXFSZ, _signal.SIG_DFL)
            _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
            _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
            # First out of the way of all numbers that they are to have.
            high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 300) for fd in stdio]
            for number, fd in zip(STDIO, high, strict=False):
                os.dup2(fd, number)
            _set_limit(RLIMIT_NOFILE, self.config["files"])
            if request["op"] in FILE_OPERATIONS:
                os._exit(_file_operation(request, self.config))
            if request["op"] == "terminal":
                fcntl.ioctl(0, TIOCSCTTY, 0)
            name = request["cwd"]
            os.chdir(name)
            name = request["argv"][0]
            _execute(name, request["argv"], request["env"])
        except OSError as error:
            os.write(2, b"sandbox: %s: %s\n" % (name, str(error.strerror).encode()))
            os._exit(127 if error.errno == 2 else 126)
        except BaseException as error:  # a supervisor must never come back from here
            os.write(2, repr(error).encode())
        finally:
            os._exit(126)

    def serve(self, job: Job) -> None:
        try:
            data = job.channel.recv(65536)
        except OSError:
            data = b""
        if data[:1] in (b"i", b"K", b"e"):
            self.interrupt(job, marshal.loads(data[1:]), data[:1])
            return
        if job.status is None:
            self.kill(job)
        if not data:
            self.forget(job)

    def forget(self, job: Job) -> None:
        fd = job.channel.fileno()
        if self.jobs.pop(fd, None) is not None:
            self.poll.unregister(fd)
        job.close()

    def kill(self, job: Job) -> None:
        """Everything that descends from the job or is in its session."""
        for _ in range(100):
            table = _processes()
            doomed = _descendants(table, {job.pid})
            doomed |= {pid for pid, (_, _, session, _) in table.items() if session == job.pid}
            doomed = {pid for pid in doomed if table[pid][3] != b"Z"}
            if not doomed:
                return
            for pid in doomed:
                _kill(pid, SIGKILL)

    def interrupt(self, job: Job, keep: list[int], how: bytes) -> None:
        """Ends a shell's command: all that it started gets a signal, then bash goes back to its prompt.

        `keep` are the shell's children from before the command. bash breaks off only where a child died of
        SIGINT or none was running, so the host asks for b"i" and b"K" in turn until the shell answers. Then
        b"e": whatever is left is killed, and when it is gone we say so.
        """
        for _ in range(100):
            table = _processes()
            kept = _descendants(table, set(keep) & set(table)) | {1, job.pid, os.getpid()}
            begun = _descendants(table, {job.pid}) - kept
            groups = {table[pid][1] for pid in begun}
            groups -= {table[pid][1] for pid in kept if pid in table}
            begun |= {pid for pid, row in table.items() if row[1] in groups} - kept
            begun = {pid for pid in begun if table[pid][3] != b"Z"}
            if how == b"i":
                _kill(job.pid, SIGINT)
            for pid in begun:
                _kill(pid, SIGINT if how == b"i" else SIGKILL)
            if how == b"K":
                _kill(job.pid, SIGINT)
            if how != b"e":
                return
            if not begun:
                break
            select.select([], [], [], 0.001)
        try:
            job.channel.send(b"e")
        except OSError:
            pass

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for job in list(self.jobs.values()):
                if job.pid == pid:
                    job.status = status
                    try:
                        job.channel.send(b"x" + str(os.waitstatus_to_exitcode(status)).encode())
                    except OSError:
                        pass
                    self.forget(job)

    def kill_everything(self) -> None:
        """Where no process namespace does it."""
        for _ in range(200):
            doomed = _descendants(_processes(), {os.getpid()}) - {os.getpid()}
            for pid in doomed:
                _kill(pid, SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            select.select([], [], [], 0.005)


class Job:
    def __init__(self, pid: int, channel: _socket.socket, master: int) -> None:
        self.pid, self.channel, self.master = pid, channel, master
        self.status: int | None = None

    def tell_children(self) -> None:
        try:
            path = f"/proc/{self.pid}/task/{self.pid}/children"
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            fd = -1
        if not self.send_fd(b"p", fd):
            self.send_fd(b"p", -1)
        if fd >= 0:
            os.close(fd)

    def hand_over_terminal(self) -> None:
        """We keep none of it: its program shall see the end when the host closes it."""
        if not self.send_fd(b"t", self.master):
            self.send_fd(b"f" + str(EMFILE).encode(), -1)
        os.close(self.master)
        self.master = -1

    def send_fd(self, word: bytes, fd: int) -> bool:
        """False: the host has gone on, `serve` hears of it; or too many descriptors are on their way."""
        packed = fd.to_bytes(4, sys.byteorder, signed=True)
        rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)] if fd >= 0 else []
        try:
            self.channel.sendmsg([word], rights)
        except OSError:
            return False
        return True

    def close(self) -> None:
        self.channel.close()
        if self.master >= 0:
            os.close(self.master)
            self.master = -1


def _execute(name: bytes, argv: list[bytes], env: dict[bytes, bytes]) -> None:
    """`os.execvpe`, which imports `warnings` first and so doubles what a short command takes."""
    failed = OSError(ENOENT, "No such file or directory")
    folders = [b""] if b"/" in name else env.get(b"PATH", b"/usr/bin:/bin").split(b":")
    for folder in folders:
        try:
            os.execve(os.path.join(folder, name), argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            failed = error  # a file of that name that can't be run: another may
    raise failed


# Files. Each operation runs in a process of its own: one that hangs is killed like any other job.


def _inside(request: Request, config: Config) -> bytes:
    """The path, absolute; where the host's files are visible, only what lies below the work tree."""
    path = os.path.join(config["workdir"], request["path"])
    if not config["confine"]:
        return path
    folder, name = os.path.split(path.rstrip(b"/") or b"/")
    real = os.path.realpath(path) if request["op"] != "write" else os.path.realpath(folder)
    for root in config["confine"]:
        if real == root or real.startswith(root + b"/"):
            return real if request["op"] != "write" else os.path.join(real, name)
    raise OSError(EXDEV, "outside of the sandbox's tree")


def _read(request: Request, config: Config) -> None:
    fd = os.open(_inside(request, config), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    kind = os.fstat(fd).st_mode & 0o170000
    if kind != _REG:
        raise OSError(EISDIR if kind == _DIR else EINVAL, "not a regular file")
    most = request["most"]
    if os.fstat(fd).st_size > most:
        raise OSError(EFBIG, f"larger than {most} bytes")
    done = 0
    while chunk := os.read(fd, 1 << 16):
        done += len(chunk)
        if done > most:
            raise OSError(EFBIG, f"larger than {most} bytes")
        _write_all(1, chunk)


def _write(request: Request, config: Config) -> None:
    path = _inside(request, config)
    folder, name = os.path.split(path)
    if not name or name in (b".", b".."):
        raise OSError(EISDIR, "names a folder")
    os.makedirs(folder, exist_ok=True)
    if os.path.isdir(path) and not os.path.islink(path):
        raise OSError(EISDIR, "is a folder")
    parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    temporary = b".%s.gymllm" % os.urandom(8).hex().encode()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    fd = os.open(temporary, flags, 0o600, dir_fd=parent)
    try:
        while chunk := os.read(0, 1 << 16):
            _write_all(fd, chunk)
        os.fchmod(fd, request["mode"])
        os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        os.unlink(temporary, dir_fd=parent)
        raise


def _list(request: Request, config: Config) -> None:
    path = _inside(request, config)
    rows: list[tuple[bytes, str, int, int]] = []
    with os.scandir(path) as entries:
        for entry in entries:
            if len(rows) >= request["most"]:
                raise OSError(EFBIG, f"more than {request['most']} entries")
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            kind = {_DIR: "directory", _REG: "file", _LNK: "link"}
            named = kind.get(found.st_mode & 0o170000, "other")
            rows.append((entry.name, named, found.st_size, found.st_mode & 0o7777))
    _write_all(1, marshal.dumps(sorted(rows)))


FILE_OPERATIONS = {"read": _read, "write": _write, "list": _list}


def _file_operation(request: Request, config: Config) -> int:
    try:
        _signal.signal(_signal.SIGXFSZ, _signal.SIG_IGN)
        FILE_OPERATIONS[request["op"]](request, config)
    except OSError as error:
        _write_all(2, marshal.dumps((error.errno or EINVAL, error.strerror or str(error))))
        return 1
    except ValueError as error:  # a NUL in the path
        _write_all(2, marshal.dumps((EINVAL, str(error))))
        return 1
    return 0


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


# Processes


def _processes() -> Table:
    """Of each process that we see: parent, group, session, state."""
    table: Table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            table[int(name)] = (int(fields[1]), int(fields[2]), int(fields[3]), fields[0])
    return table


def _descendants(table: Table, roots: set[int]) -> set[int]:
    """The roots that live, with all below them."""
    found = {root for root in roots if root in table}
    grown = True
    while grown:
        below = {pid for pid, row in table.items() if row[0] in found and pid not in found}
        found |= below
        grown = bool(below)
    return found


def _ignore(number: int, frame: object) -> None:
    pass


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass


def _hard_limit(limit: int) -> int:
    import resource

    return resource.getrlimit(limit)[1]


def _set_limit(limit: int, value: int) -> None:
    import resource

    hard = _hard_limit(limit)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


def _hide_memory() -> None:
    """Ours, and a new job's until it becomes its program: others of our user could write to it by /proc.

    It is still us by then, with the descriptors of all jobs: it could forge how they end.
    """
    import _ctypes

    set_dumpable = 4
    # `ctypes` takes 3 ms more. Its stub forgets that None is this program.
    here = _ctypes.dlopen(None, os.RTLD_NOW)  # pyright: ignore[reportArgumentType]
    prctl = _ctypes.dlsym(here, "prctl")
    if _ctypes.call_function(prctl, (set_dumpable, 0, 0, 0, 0)) != 0:
        raise OSError(EINVAL, "prctl(PR_SET_DUMPABLE) was refused")


def _harden(config: Config) -> None:
    """What bwrap would have done: no new privileges, no capabilities, the filter."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    set_no_new_privs, set_seccomp, drop, subreaper = 38, 22, 24, 36
    libc.prctl(subreaper, 1, 0, 0, 0)
    libc.prctl(set_no_new_privs, 1, 0, 0, 0)
    if config["drop"]:
        for capability in range(64):
            libc.prctl(drop, capability, 0, 0, 0)
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        libc.capset(header, (ctypes.c_uint32 * 6)())
    program = config["filter"]
    if program:
        code = ctypes.create_string_buffer(program, len(program))

        class Program(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

        taken = Program(len(program) // 8, ctypes.addressof(code))
        if libc.prctl(set_seccomp, 2, ctypes.byref(taken), 0, 0):
            raise OSError(ctypes.get_errno(), "the system-call filter was refused")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
