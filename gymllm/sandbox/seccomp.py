"""The system calls that a sandbox may not make, as a classic BPF program for the kernel.

A list of what is forbidden, not of what is allowed: compilers, interpreters and test suites call nearly
everything else. Namespaces and dropped capabilities hold already; this takes away what has most often been
the way around them, and what would let one process of a sandbox reach into another.
"""

from __future__ import annotations

import errno
import platform
import struct

_LOAD, _JUMP_EQUAL, _JUMP_SET, _JUMP_GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24
_SUPERVISOR = 1  # its pid
_X32 = 0x40000000
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}."""
_SOCKET_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX

# Numbers by machine: x86_64, aarch64 (None where it has no such call).
_FORBIDDEN: dict[str, tuple[int | None, int | None]] = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "fanotify_init": (300, 262),
    "vhangup": (153, 58),
}
# Answered "no such call", so that the C library and others take the older way.
_ABSENT = {
    "clone3": (435, 435),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
# Refused where an argument has this value. The supervisor is of the same user: who may set its limits can
# end it, and who may set its priority, or that of all of its user, can make it late.
_REFUSED_ARGUMENTS: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {
    (302, 261): ((_ARGUMENT_0, _SUPERVISOR),),  # prlimit64
    (203, 122): ((_ARGUMENT_0, _SUPERVISOR),),  # sched_setaffinity
    (144, 119): ((_ARGUMENT_0, _SUPERVISOR),),  # sched_setscheduler
    (142, 118): ((_ARGUMENT_0, _SUPERVISOR),),  # sched_setparam
    (314, 274): ((_ARGUMENT_0, _SUPERVISOR),),  # sched_setattr
    (141, 140): ((_ARGUMENT_1, _SUPERVISOR), (_ARGUMENT_0, 2)),  # setpriority; PRIO_USER
    (251, 30): ((_ARGUMENT_1, _SUPERVISOR), (_ARGUMENT_0, 3)),  # ioprio_set; IOPRIO_WHO_USER
}
_CLONE, _SOCKET, _SOCKETPAIR, _IOCTL = (56, 220), (41, 198), (53, 199), (16, 29)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def seccomp_filter(machine: str | None = None) -> bytes | None:
    """The program, as the array of instructions that bwrap and prctl take.

    Args:
        machine: As `platform.machine()` says it; this one if None.

    Returns:
        None for a machine whose numbers we don't know.
    """
    which = _MACHINES.get(machine or platform.machine())
    if which is None:
        return None
    column, arch = which
    program: list[tuple[int, int, int, int]] = []

    def add(code: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
        program.append((code, if_true, if_false, value))

    def refuse(number: int, error: int) -> None:
        add(_JUMP_EQUAL, number, 0, 1)
        add(_RETURN, _ERRNO | error)

    add(_LOAD, _ARCH)
    add(_JUMP_EQUAL, arch, 1, 0)
    add(_RETURN, _KILL)  # a 32-bit call: other numbers, so nothing below would hold
    add(_LOAD, _NUMBER)
    add(_JUMP_GREATER_EQUAL, _X32, 0, 1)
    add(_RETURN, _ERRNO | errno.ENOSYS)
    for numbers in _FORBIDDEN.values():
        number = numbers[column]
        if number is not None:
            refuse(number, errno.EPERM)
    for numbers in _ABSENT.values():
        refuse(numbers[column], errno.ENOSYS)
    add(_JUMP_EQUAL, _CLONE[column], 0, 4)
    add(_LOAD, _ARGUMENT_0)
    add(_JUMP_SET, _NEW_NAMESPACES, 0, 1)
    add(_RETURN, _ERRNO | errno.EPERM)
    add(_RETURN, _ALLOW)
    for call in (_SOCKET, _SOCKETPAIR):
        add(_JUMP_EQUAL, call[column], 0, len(_SOCKET_FAMILIES) + 3)
        add(_LOAD, _ARGUMENT_0)
        for left, family in enumerate(reversed(_SOCKET_FAMILIES)):
            add(_JUMP_EQUAL, family, len(_SOCKET_FAMILIES) - left, 0)
        add(_RETURN, _ERRNO | errno.EAFNOSUPPORT)
        add(_RETURN, _ALLOW)
    for numbers, arguments in _REFUSED_ARGUMENTS.items():
        add(_JUMP_EQUAL, numbers[column], 0, 3 * len(arguments) + 1)
        for place, value in arguments:
            add(_LOAD, place)
            refuse(value, errno.EPERM)
        add(_RETURN, _ALLOW)
    add(_JUMP_EQUAL, _IOCTL[column], 0, 3)
    add(_LOAD, _ARGUMENT_1)
    add(_JUMP_EQUAL, _TERMINAL_INPUT[0], 2, 0)
    add(_JUMP_EQUAL, _TERMINAL_INPUT[1], 1, 0)
    add(_RETURN, _ALLOW)
    add(_RETURN, _ERRNO | errno.EPERM)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
